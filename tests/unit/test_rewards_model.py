"""A reward model judges samples: the same scores however requests are batched, by tokens or by text."""

import asyncio
import random

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2Model

from openrlhf.models.support import examine_body
from openrlhf.models.value import Normalisation, ScalarHead, ValueModel, sequence_ends
from openrlhf.rewards.base import RewardError, RewardRequest
from openrlhf.rewards.model import RewardModel, RewardModelSource
from openrlhf.types import Outcome, PackedTokens, Prompt, SampleKey, Segment, Trajectory

WORDS = ["<unk>", "<eos>", *"0123456789+="]


def make_tokenizer(words=WORDS):
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="<eos>")


class CountingModel(ValueModel):
    """Remembers the lengths of the sequences of every forward; fails in those it is told to."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.forwards = []
        self.shared = []
        self.fail = set()

    def forward(self, tokens, *, positions):
        self.forwards.append(tokens.cu_seqlens.diff().tolist())
        self.shared.append(tokens.shared_prefixes)
        if len(self.forwards) in self.fail:
            raise RuntimeError("out of memory")
        return super().forward(tokens, positions=positions)


@pytest.fixture
def model():
    torch.manual_seed(0)
    body = Qwen2Model(
        Qwen2Config(
            vocab_size=len(WORDS),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            initializer_range=0.3,
        )
    )
    assert examine_body(body, native_attention="sdpa") == ""
    return CountingModel(body, ScalarHead(16)).eval()


def make_source(model, *, tokenizer=None, policy_tokenizer=None, max_length=64, max_batch_tokens=1000):
    judge = RewardModel(model, tokenizer or make_tokenizer(), max_length=max_length, name="rm")
    return RewardModelSource(
        judge,
        judge.score,
        policy_tokenizer=policy_tokenizer or make_tokenizer(),
        max_batch_tokens=max_batch_tokens,
    )


def make_request(*texts, name="record 1", tokens=True):
    """Ids of the policy's tokenizer, the text they stand for, and a first character as prompt."""
    ids = tuple(torch.tensor(make_tokenizer()(text)["input_ids"]) for text in texts)
    return RewardRequest(
        queries=texts,
        prompts=tuple(text[:1] for text in texts),
        labels=tuple("" for _ in texts),
        name=name,
        token_ids=ids if tokens else (),
    )


def alone(model, text, *, tokenizer=None):
    """Reference: one sequence, one forward, the value of its last token."""
    ids = torch.tensor((tokenizer or make_tokenizer())(text)["input_ids"])
    tokens = PackedTokens.from_sequences([ids], [torch.zeros(len(ids), dtype=torch.bool)])
    with torch.no_grad():
        return ValueModel.forward(model, tokens, positions=sequence_ends(tokens)).item()


def judge(source, *requests):
    """All requests at once → their rewards; an error in the place of a request that failed."""

    async def run():
        await source.start()
        results = await asyncio.gather(*(source.score(r) for r in requests), return_exceptions=True)
        await source.close()
        return [r if isinstance(r, BaseException) else [reward.reward for reward in r] for r in results]

    return asyncio.run(run())


PROMPTS = [("1+2=3", "1+2=4", "1+2=12345"), ("7=", "7=7"), ("99+1=100", "99+1=100", "99+1="), ("5",)]


class TestBatching:
    @pytest.mark.parametrize("budget", [1, 7, 20, 1000])
    def test_does_not_change_scores_and_keeps_their_order(self, model, budget):
        rewards = judge(make_source(model, max_batch_tokens=budget), *(make_request(*texts) for texts in PROMPTS))
        expected = [[alone(model, text) for text in texts] for texts in PROMPTS]
        for got, want in zip(rewards, expected, strict=True):
            assert got == pytest.approx(want, rel=1e-5, abs=1e-5)
        assert len({value for texts in expected for value in texts}) == 8, "the model tells samples apart"

    def test_requests_that_wait_together_share_a_forward(self, model):
        judge(make_source(model), *(make_request(*texts) for texts in PROMPTS))
        assert model.forwards == [[5, 5, 9, 2, 3, 8, 8, 5, 1]]

    def test_samples_of_a_prompt_compute_it_once(self, model):
        """1+2=… share 4 tokens, 7= / 7=7 one less than the shorter has, 99+1= likewise."""
        judge(make_source(model), *(make_request(*texts) for texts in PROMPTS))
        assert model.shared == [(0, 4, 4, 0, 1, 0, 4, 4, 0)]

    def test_the_budget_is_kept_and_a_longer_sample_goes_alone(self, model):
        judge(make_source(model, max_batch_tokens=8), make_request("1", "12", "12345", "1234567890", "1", "1234567"))
        assert model.forwards == [[1, 2, 5], [10], [1, 7]]

    def test_requests_that_come_during_a_forward_join_the_next(self, model):
        source = make_source(model, max_batch_tokens=4)

        async def later():
            while not model.forwards:
                await asyncio.sleep(0)
            return await source.score(make_request("3"))

        async def run():
            return await asyncio.gather(source.score(make_request("1111", "22")), later())

        asyncio.run(run())
        assert model.forwards == [[4], [2, 1]]

    def test_a_cancelled_request_costs_nothing_and_harms_nobody(self, model):
        source = make_source(model)

        async def run():
            given_up = asyncio.create_task(source.score(make_request("1+1=2")))
            kept = asyncio.create_task(source.score(make_request("7=")))
            await asyncio.sleep(0)
            given_up.cancel()
            return await kept

        (reward,) = asyncio.run(run())
        assert model.forwards == [[2]]
        assert reward.reward == pytest.approx(alone(model, "7="))
        assert reward.score is None

    def test_forwards_run_between_turns_of_the_loop(self, model):
        """Other tasks get a turn before every forward."""
        source = make_source(model, max_batch_tokens=1)
        seen = []

        async def watch():
            while len(model.forwards) < 3:
                seen.append(len(model.forwards))
                await asyncio.sleep(0)

        async def run():
            await asyncio.gather(source.score(make_request("1", "2", "3")), watch())

        asyncio.run(run())
        assert set(seen) == {0, 1, 2}


class TestReading:
    def test_the_policys_tokens_are_read_as_they_are(self, model):
        """The text would be tokenised differently: the tokens count, not the text."""
        request = make_request("1+2=3")
        other = RewardRequest(
            queries=("999",), prompts=("9",), labels=("",), name="record 1", token_ids=request.token_ids
        )
        assert judge(make_source(model), other) == judge(make_source(model), request)

    def test_a_larger_vocabulary_with_the_same_ids_is_the_same(self, model):
        source = make_source(model, policy_tokenizer=make_tokenizer(WORDS[:-1]))
        text_says_otherwise = RewardRequest(
            queries=("999",), prompts=("9",), labels=("",), name="r", token_ids=make_request("1").token_ids
        )
        assert judge(source, text_says_otherwise) == [pytest.approx([alone(model, "1")])]

    def test_another_tokenizer_reads_the_text(self, model, caplog):
        shuffled = [*WORDS[:2], *random.Random(0).sample(WORDS[2:], len(WORDS) - 2)]
        own = make_tokenizer(shuffled)
        with caplog.at_level("INFO", logger="openrlhf.rewards.model"):
            ((reward,),) = judge(make_source(model, tokenizer=own), make_request("1+2=3"))
        assert reward == pytest.approx(alone(model, "1+2=3", tokenizer=own))
        assert reward != pytest.approx(alone(model, "1+2=3"))
        assert "another vocabulary" in caplog.text

    def test_requests_with_text_alone(self, model):
        assert judge(make_source(model), make_request("1+2=3", tokens=False)) == [
            pytest.approx([alone(model, "1+2=3")])
        ]

    @pytest.mark.parametrize("tokens", [True, False])
    def test_what_is_too_long_loses_its_beginning(self, model, tokens):
        rewards = judge(make_source(model, max_length=3), make_request("99991+2", tokens=tokens))
        assert rewards == [pytest.approx([alone(model, "1+2")])]

    def test_normalisation_is_the_models(self, model):
        """(r − 1) / 2"""
        normal = ValueModel(model.model, model.head, normalisation=Normalisation(1.0, 2.0))
        assert judge(make_source(normal), make_request("7=")) == [pytest.approx([(alone(model, "7=") - 1.0) / 2.0])]

    def test_a_group_brings_the_tokens_of_its_finished_samples(self):
        def trajectory(sample, token_ids, **kwargs):
            mask = torch.arange(len(token_ids)) > 0
            zeros = torch.zeros(len(token_ids))
            segment = Segment(
                token_ids=torch.tensor(token_ids),
                action_mask=mask,
                rollout_logprobs=None,
                versions=zeros.int(),
                turn_rewards=zeros,
            )
            return Trajectory(key=SampleKey(0, sample), segments=(segment,), outcome=Outcome.FINISHED, **kwargs)

        samples = [trajectory(0, [1, 2], text="ax"), trajectory(2, [1, 4], text="ay")]
        request = RewardRequest.of(Prompt(ordinal=0, text="a", label="b"), samples)
        assert [ids.tolist() for ids in request.token_ids] == [[1, 2], [1, 4]]
        assert (request.queries, request.prompts, request.labels) == (("ax", "ay"), ("a", "a"), ("b", "b"))

    def test_as_many_token_sequences_as_queries(self):
        with pytest.raises(ValueError, match="1 token sequences for 2 queries"):
            RewardRequest(queries=("a", "b"), prompts=("", ""), labels=("", ""), name="r", token_ids=(torch.arange(2),))


class TestOffload:
    def test_the_model_is_on_its_device_while_it_judges(self, model, monkeypatch):
        """A CPU is both places here: what is seen is that it is sent there, and back when it has judged."""
        sent = []

        def forward(*arguments, **options):
            sent.append("forward")
            return ValueModel.forward(model, *arguments, **options)

        monkeypatch.setattr(model, "to", lambda device: sent.append(str(device)))
        monkeypatch.setattr(model, "forward", forward)
        judge_ = RewardModel(
            model, make_tokenizer(), max_length=64, name="rm", device=torch.device("cpu", 0), offload=True
        )
        source = RewardModelSource(judge_, judge_.score, policy_tokenizer=make_tokenizer(), max_batch_tokens=1000)
        assert judge(source, make_request("1+2=3")) == [[pytest.approx(alone(model, "1+2=3"), abs=1e-6)]]
        assert sent == ["cpu:0", "forward", "cpu"]


class TestErrors:
    def test_a_failed_forward_fails_its_requests_and_no_other(self, model):
        model.fail = {1}
        source = make_source(model, max_batch_tokens=4)
        failed, judged = judge(source, make_request("1234", name="record 1"), make_request("77", name="record 2"))
        assert isinstance(failed, RewardError)
        assert str(failed) == "record 1: reward model rm failed: out of memory"
        assert judged == pytest.approx([alone(model, "77")])

    def test_a_score_that_is_no_number(self, model):
        with torch.no_grad():
            model.head.weight.fill_(float("nan"))
        (error,) = judge(make_source(model), make_request("1"))
        assert isinstance(error, RewardError)
        assert "record 1: reward model rm gave [nan]" in str(error)

    def test_a_token_the_model_has_no_embedding_for(self, model):
        bad = RewardRequest(
            queries=("x",), prompts=("",), labels=("",), name="record 9", token_ids=(torch.tensor([99]),)
        )
        error, judged = judge(make_source(model), bad, make_request("77"))
        assert isinstance(error, RewardError)
        assert "record 9: token 99 is beyond the 14 embeddings" in str(error)
        assert judged == pytest.approx([alone(model, "77")])

    def test_a_text_without_tokens(self, model):
        (error,) = judge(make_source(model), make_request("1", "", tokens=False))
        assert isinstance(error, RewardError)
        assert "empty" in str(error)
