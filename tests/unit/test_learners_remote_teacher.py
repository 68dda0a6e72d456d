"""A teacher behind vLLM's API: a server on loopback that answers in its form, from a model of a few hundred weights."""

import dataclasses

import pytest
import torch
from patience import patience
from reward_server import RewardServer
from small_rl import equal_rewards, make_groups, make_models, play, training

import openrlhf.rewards.http as http
from openrlhf.config import parse
from openrlhf.learners.remote_teacher import RemoteTeacherError, check_remote_teacher, completions_url
from openrlhf.models.body import decoder_body, hidden_states
from openrlhf.models.loading import ModelLoadError
from openrlhf.runs.preflight import check_teacher
from openrlhf.types import PackedTokens, Supports


def log_softmaxes(policy, token_ids):
    """log p [T − 1, V] of each token but the first, by a plain forward."""
    ids = torch.tensor(token_ids)
    packed = PackedTokens.from_sequences([ids], [torch.arange(len(ids)) > 0])
    with torch.no_grad():
        hidden = hidden_states(decoder_body(policy.model), packed, positions=torch.arange(len(ids) - 1)).states_pD
        return torch.log_softmax(hidden @ policy.model.get_output_embeddings().weight.t(), dim=-1)


def completion(entries, **more):
    """The answer of vLLM's server, as far as anybody reads it."""
    choice = {"index": 0, "text": "?", "finish_reason": "length", "prompt_logprobs": entries, **more}
    return {"id": "cmpl-1", "object": "text_completion", "model": "m", "choices": [choice], "usage": {}}


def serving(policy):
    """As vLLM answers: the token itself comes first, then the likeliest, each once, under its id as a string."""

    def answer(question, before):
        assert (question["max_tokens"], question["temperature"]) == (1, 1.0)
        entries = [None]
        for token, row in zip(question["prompt"][1:], log_softmaxes(policy, question["prompt"]), strict=True):
            order = row.argsort(descending=True).tolist()
            entries.append(
                {
                    str(one): {"logprob": float(row[one]), "rank": order.index(one) + 1, "decoded_token": f"t{one}"}
                    for one in dict.fromkeys([token, *order[: question["prompt_logprobs"]]])
                }
            )
        return completion(entries)

    return answer


def taught(*servers, **flags):
    """A run that these servers teach, and its scored batch."""
    groups = flags.pop("groups", None) or equal_rewards(make_groups())
    urls = ",".join(server.url for server in servers)
    given = {"teacher.remote_url": urls, "advantage_estimator": "reinforce", "teacher.timeout": patience(60)}
    run, _ = training(make_models(), **{**given, **flags})
    batch, _ = run.learners.place(groups)
    run.learners.score(batch)
    return batch, run


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(http, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(http, "LONGEST_PAUSE", 0.01)


def told_of(policy, batch, replaced=None):
    """log p [A, V] of all action tokens. `replaced`: tokens in the place of each first two."""
    rows = []
    for sample in batch.samples:
        ids, mask = sample.segment.token_ids.tolist(), sample.segment.action_mask
        shift = 0 if replaced is None else len(replaced) - 2
        ids = ids if replaced is None else [*replaced, *ids[2:]]
        rows.append(log_softmaxes(policy, ids)[mask.nonzero().flatten() - 1 + shift])
    return torch.cat(rows)


def actions_of(batch):
    return torch.cat([s.segment.token_ids[s.segment.action_mask] for s in batch.samples])


def test_a_served_teacher_tells_the_log_probs_of_sampled_tokens():
    """One request for each sample, for the sampled tokens' log-probs alone."""
    teacher = make_models().reference
    with RewardServer(serving(teacher)) as server:
        batch, _ = taught(server)
    wanted_A = told_of(teacher, batch).gather(1, actions_of(batch)[:, None]).squeeze(1)
    torch.testing.assert_close(batch.teacher_logprobs_A, wanted_A, rtol=1e-5, atol=1e-6)
    assert sorted(q["prompt"] for q in server.questions) == sorted(s.segment.token_ids.tolist() for s in batch.samples)
    assert {q["prompt_logprobs"] for q in server.questions} == {0}


def test_a_served_teacher_tells_its_likeliest_tokens():
    """The sampled token is not among them where it is not likely, though the answer names it first."""
    teacher = make_models().reference
    with RewardServer(serving(teacher)) as server:
        batch, run = taught(server, **{"teacher.loss": "reverse", "teacher.top_k": 3})
        assert play(run.learners, equal_rewards(make_groups()))["teacher_kl"] > 0
    best = told_of(teacher, batch).topk(3, dim=1)
    assert torch.equal(batch.teacher_ids_AK, best.indices.int())
    torch.testing.assert_close(batch.teacher_logprobs_AK, best.values, rtol=1e-5, atol=1e-6)


def test_a_served_teacher_reads_its_own_prompt():
    teacher, hint = make_models().reference, (7, 1, 12)
    groups = [
        dataclasses.replace(group, prompt=dataclasses.replace(group.prompt, teacher_ids=hint))
        for group in equal_rewards(make_groups())
    ]
    with RewardServer(serving(teacher)) as server:
        batch, _ = taught(server, groups=groups, **{"teacher.prompt_key": "hint"})
    wanted_A = told_of(teacher, batch, replaced=hint).gather(1, actions_of(batch)[:, None]).squeeze(1)
    torch.testing.assert_close(batch.teacher_logprobs_A, wanted_A, rtol=1e-5, atol=1e-6)


def cut_groups(size):
    """Each token was sampled from so many tokens, as an agent may ask; 0: from all."""

    def cut(segment):
        ids = segment.token_ids[segment.action_mask].tolist()
        told = [[token, *(other for other in range(13) if other != token)][:size] for token in ids]
        return dataclasses.replace(segment, supports=Supports.of(told))

    return [
        dataclasses.replace(
            group,
            trajectories=tuple(
                dataclasses.replace(member, segments=tuple(map(cut, member.segments))) for member in group.trajectories
            ),
        )
        for group in equal_rewards(make_groups())
    ]


def test_a_reward_compares_softmaxes_over_the_same_tokens():
    """The server's is over all tokens, so the policy's must be. A loss is over all tokens anyway."""
    with RewardServer(serving(make_models().reference)) as server:
        with pytest.raises(
            RemoteTeacherError, match=r"^--teacher\.remote_url: prompt \d+ sample \d+ was sampled .*mask 0"
        ):
            taught(server, groups=cut_groups(3))
        assert not server.questions
        taught(server, groups=cut_groups(0))
        taught(server, groups=cut_groups(3), **{"teacher.loss": "reverse", "teacher.top_k": 3})


def test_servers_share_the_work_and_one_that_is_gone_is_no_loss():
    teacher = make_models().reference
    with RewardServer(serving(teacher)) as one, RewardServer(serving(teacher)) as other:
        taught(one, other)
        assert min(len(one.questions), len(other.questions)) > 0
        one.stop()
        batch, _ = taught(one, other)
    assert batch.teacher_logprobs_A.shape == (batch.num_actions,)


def short(question, before):
    return completion([None])


def other_token(question, before):
    return completion([None] + [{"99": {"logprob": -1.0, "rank": 1}} for _ in question["prompt"][1:]])


def no_numbers(question, before):
    return completion([None] + [{"a": -1.0} for _ in question["prompt"][1:]])


@pytest.mark.parametrize(
    ("behaviour", "flags", "message"),
    [
        (lambda question, before: {"error": "no"}, {}, r"there must be choices, got \{'error': 'no'\}"),
        (lambda question, before: completion(None), {}, r"an entry for each of \d+ tokens, got None"),
        (short, {}, r"an entry for each of \d+ tokens, got 1 entries"),
        (other_token, {}, r"no log-prob of token \d+ at position \d+: \{'99'"),
        (no_numbers, {}, r"expected .*logprob.*, got \{'a': -1\.0\}"),
        (other_token, {"teacher.loss": "js", "teacher.top_k": 1}, r"token 99 among the likeliest: the policy has 13"),
        (other_token, {"teacher.loss": "js", "teacher.top_k": 2}, r"1 tokens where --teacher\.top_k 2 were asked for"),
    ],
)
def test_an_answer_of_another_form_names_the_server_and_what_came(behaviour, flags, message):
    with (
        RewardServer(behaviour) as server,
        pytest.raises(
            RemoteTeacherError, match=rf"^--teacher\.remote_url: {server.url}: .*cannot be used: .*{message}"
        ),
    ):
        taught(server, **flags)


def test_a_refusal_is_shown():
    from aiohttp import web

    def refuses(question, before):
        return web.json_response({"error": {"message": "Requested 64 logprobs, max allowed: 20"}}, status=400)

    with (
        RewardServer(refuses) as server,
        pytest.raises(RemoteTeacherError, match=f"{server.url} answered 400 .*max allowed: 20"),
    ):
        taught(server, **{"teacher.loss": "js"})


class Letters:
    """A token for each letter, counted from `first`."""

    def __init__(self, first=0):
        self._first = first

    def __call__(self, texts, *, add_special_tokens):
        return {"input_ids": [[ord(letter) + self._first for letter in text] for text in texts]}


def reads_letters(question, before):
    ids = Letters()([question["prompt"]], add_special_tokens=False)["input_ids"][0]
    assert (question["return_token_ids"], question["add_special_tokens"]) == (True, False)
    return completion([None] * len(ids), prompt_token_ids=ids)


def test_the_check_compares_how_a_text_is_read():
    with RewardServer(reads_letters) as server:
        asked = {"top_k": 4, "max_len": 64, "timeout": patience(60), "api_key": "k"}
        check_remote_teacher([server.url, server.url], tokenizer=Letters(), **asked)
        assert [headers["Authorization"] for headers in server.headers] == ["Bearer k"] * 2
        config = parse("train_ppo_ray", ["--teacher.remote_url", server.url])
        check_teacher(config, Letters())
        with pytest.raises(
            ModelLoadError, match=rf"{server.url}: .* it reads 'The 3 .* take a teacher of the same fam"
        ):
            check_teacher(config, Letters(first=1))


@pytest.mark.parametrize(
    ("models", "refused"),
    [
        ({"data": [{"id": "m", "max_model_len": 100}]}, True),
        ({"data": [{"id": "m", "max_model_len": 101}]}, False),
        ({"data": [{"id": "m"}]}, False),
        ({"data": []}, False),
        ("?", False),
        (None, False),
    ],
)
def test_the_check_asks_how_long_samples_may_be(models, refused):
    """A sample of 100 tokens and the one that is asked for after it. Not every server says how many it reads."""
    with RewardServer(reads_letters, models=models) as server:
        base = server.url.removesuffix("/get_reward")
        config = parse("train_ppo_ray", ["--teacher.remote_url", base, "--data.max_len", "100"])
        if not refused:
            check_teacher(config, Letters())
            return
        with pytest.raises(ModelLoadError, match=rf"{base} reads 100 tokens, .*--max-model-len 101, .*max_len 99$"):
            check_teacher(config, Letters())


@pytest.mark.parametrize("url", ["http://h:8000", "http://h:8000/", "http://h:8000/v1", "http://h:8000/v1/"])
def test_the_address_is_that_of_completions(url):
    assert completions_url(url) == "http://h:8000/v1/completions"
    assert completions_url("http://h/team/v1/completions") == "http://h/team/v1/completions"
