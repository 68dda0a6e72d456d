"""Ranks that share packed streams train what one process trains: log-probs, losses, every gradient, every logged mean."""

import functools
import re
from pathlib import Path

import pytest
import torch
import transformers as hf
from context_ranks import CASES, MODELS, Case, make_groups, make_models, play
from patience import patience
from preloaded import run_ranks, start_ranks, words_of
from processes import wait_until
from small_sections import optimizer

from openrlhf.backends.torch import TorchBackend
from openrlhf.checkpoint.folder import TRAINING_STATE
from openrlhf.checkpoint.training_state import read_training_state
from openrlhf.types import PackedTokens

pytestmark = pytest.mark.slow

SUPPORT = Path(__file__).resolve().parents[1] / "support"
ALL = [(ranks, case) for ranks, cases in CASES.items() for case in cases]


@functools.cache
def alone(model: str, algorithm: str) -> dict:
    return play(Case(model, algorithm, zero=0, degree=1))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[int, Path]:
    """What 2 and 4 ranks leave."""
    found = {}
    for ranks in CASES:
        found[ranks] = folder = tmp_path_factory.mktemp(f"ranks{ranks}")
        command = [str(SUPPORT / "context_ranks.py"), str(folder)]
        run_ranks(ranks, command, cwd=folder, said=folder / "said.txt", environment={})
    return found


@pytest.fixture(scope="module")
def rounds(folders) -> dict[tuple[int, str], dict]:
    """What ranks computed, by their number and case."""
    return {
        (ranks, name): said
        for ranks, folder in folders.items()
        for name, said in torch.load(folder / "rounds.pt", weights_only=False).items()
    }


def assert_close(found: dict, expected: dict, *, gap: float = 1e-5) -> None:
    """Every tensor to 1e-5, or to 1e-5 of the largest of all."""
    assert found.keys() == expected.keys()
    largest = max(1.0, max(float(tensor.abs().max()) for tensor in expected.values() if tensor.numel()))
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=0, atol=gap * largest, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(("ranks", "case"), ALL, ids=str)
def test_log_probs_values_and_advantages_are_those_of_one_process(rounds, ranks, case):
    found, expected = rounds[ranks, str(case)]["columns"], alone(case.model, case.algorithm)["columns"]
    for own, theirs in zip(found, expected, strict=True):
        assert_close(own, theirs)


@pytest.mark.parametrize(("ranks", "case"), ALL, ids=str)
def test_every_logged_mean_is_that_of_one_process_on_every_rank(rounds, ranks, case):
    found, expected = rounds[ranks, str(case)]["metrics"], alone(case.model, case.algorithm)["metrics"]
    # Prompts whose samples are in several shares are computed more often, and each share compares a sample.
    other = () if case.degree == ranks else ("experts/differ", "experts/lo")
    for on_ranks, (theirs,) in zip(found, expected, strict=True):
        assert len(on_ranks) == ranks
        for own in on_ranks:
            assert own.keys() == theirs.keys()
            compared = {name: value for name, value in own.items() if not name.startswith(other)}
            assert compared == pytest.approx({name: theirs[name] for name in compared}, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(("ranks", "case"), ALL, ids=str)
def test_every_gradient_is_that_of_one_process(rounds, ranks, case):
    found, expected = rounds[ranks, str(case)], alone(case.model, case.algorithm)
    assert all(gradient.abs().max() > 0 for name, gradient in expected["gradients"].items() if "bias" not in name)
    assert_close(found["gradients"], expected["gradients"])
    assert_close(found["weights"], expected["weights"])


# ------------------------------------------------------------------------------------------------------- traps
# Where context parallelism goes wrong elsewhere. Each of the tests above would notice; these say what it is.


def by(algorithm: str) -> list:
    return [
        pytest.param(ranks, case, id=f"{ranks} ranks: {case}") for ranks, case in ALL if case.algorithm == algorithm
    ]


def samples(**options) -> dict:
    """Segments by key."""
    return {t.key: t.segments[0] for group in make_groups(**options) for t in group.trajectories}


@pytest.mark.parametrize(("ranks", "case"), by("sample by sample"))
def test_labels_are_shifted_before_the_stream_is_cut(rounds, ranks, case):
    """A token and the one that predicts it are never on the same rank. Expected: by transformers' own attention."""
    model = hf.AutoModelForCausalLM.from_config(MODELS[case.model](), attn_implementation="eager")
    model.load_state_dict(make_models(case.model).policy.model.state_dict())
    for key, segment in samples().items():
        with torch.no_grad():
            logprobs_TV = model(segment.token_ids.unsqueeze(0)).logits[0].log_softmax(-1)
        of_labels_T = logprobs_TV[:-1].gather(1, segment.token_ids[1:, None]).squeeze(1)
        found_A = rounds[ranks, str(case)]["columns"][0][key, "old_logprobs_A"]
        torch.testing.assert_close(found_A, of_labels_T[segment.action_mask[1:]], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("ranks", "case"), by("sample by sample"))
def test_a_stream_may_be_shorter_than_the_degree_and_a_rank_without_action(rounds, ranks, case):
    """Two samples have one action: of 2 tokens, where ranks have padding alone; and of many, where all ranks but one
    have tokens and no action."""
    lengths = {key: len(segment) for key, segment in samples().items() if segment.num_actions == 1}
    assert min(lengths.values()) == 2
    assert max(lengths.values()) > 2 * case.degree
    found, expected = rounds[ranks, str(case)], alone(case.model, case.algorithm)
    for key in lengths:
        for column in ("old_logprobs_A", "values_A"):
            assert found["columns"][1][key, column] == pytest.approx(expected["columns"][1][key, column], abs=1e-5)


@pytest.mark.parametrize(("ranks", "case"), by("kl loss"))
def test_denominators_are_counted_once(rounds, ranks, case):
    """At the ratio 1 the loss is minus the mean advantage of all action tokens, each of which is there once."""
    said = rounds[ranks, str(case)]
    advantages_A = torch.cat([c for (_, name), c in said["columns"][0].items() if name == "advantages_A"])
    assert len(advantages_A) == sum(segment.num_actions for segment in samples().values())
    for metrics in said["metrics"][0]:
        assert metrics["policy_loss"] == pytest.approx(-float(advantages_A.mean()), rel=1e-5)


@pytest.mark.parametrize(("ranks", "case"), by("whitened"))
def test_whitening_is_over_the_action_tokens_of_all_samples(rounds, ranks, case):
    columns = rounds[ranks, str(case)]["columns"][0]
    advantages_A = torch.cat([column for (_, name), column in columns.items() if name == "advantages_A"])
    assert float(advantages_A.mean()) == pytest.approx(0, abs=1e-6)
    assert float(advantages_A.std(correction=0)) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(("ranks", "case"), by("balanced"))
def test_the_balance_of_experts_is_that_of_the_whole_stream(rounds, ranks, case):
    """A product of means over its tokens: the mean of what ranks see of it would be another number."""
    found, expected = rounds[ranks, str(case)], alone(case.model, case.algorithm)
    for name in ("aux_loss", "critic_aux_loss"):
        assert found["metrics"][0][0][name] == pytest.approx(expected["metrics"][0][0][name], rel=1e-6)
    routers = [name for name in expected["gradients"] if "gate.weight" in name]
    assert len(routers) == 4
    for name in routers:
        assert found["gradients"][name] == pytest.approx(expected["gradients"][name], abs=1e-5)


@pytest.mark.parametrize(("ranks", "case"), by("replayed"))
def test_tokens_keep_their_experts_wherever_they_are(rounds, ranks, case):
    """Any experts: most routers would have chosen others. One sample has none, and the reference chooses itself."""
    found, expected = rounds[ranks, str(case)], alone(case.model, case.algorithm)
    for (theirs,) in expected["metrics"]:
        assert theirs["experts/differ"] > 0.7
        assert 0.01 < theirs["experts/missing"] < 0.1
        assert theirs["experts/logprobs_diff"] != pytest.approx(theirs["experts/logprobs_diff_own"], rel=1e-3)
    policy = make_models(case.model).policy
    for key, segment in samples(routes=True).items():
        tokens = PackedTokens.from_segments([segment])
        with torch.no_grad():
            replayed_A, own_A = (policy(x, temperature=1.0).logprobs_A for x in (tokens, tokens.without_routes()))
        if segment.routes is not None:  # the other one shares the forward of its prompt
            torch.testing.assert_close(found["columns"][0][key, "old_logprobs_A"], replayed_A, rtol=0, atol=1e-5)
            assert not torch.allclose(own_A, replayed_A, atol=1e-3)


def test_gradients_add_up_whatever_the_degree(rounds):
    """A mean over the ranks of a stream would be smaller by the degree, a sum over shares of the loss larger."""
    norms = {
        (ranks, case.degree, case.ring, case.tensor): rounds[ranks, str(case)]["metrics"][0][0]["actor_grad_norm"]
        for ranks, case in ALL
        if (case.model, case.algorithm) == ("8/2 heads", "ppo")
    }
    assert {(2, 2, False, 1), (2, 2, True, 1), (4, 2, False, 1), (4, 4, False, 1), (4, 2, False, 2)} <= norms.keys()
    (expected,) = alone("8/2 heads", "ppo")["metrics"][0]
    assert list(norms.values()) == pytest.approx([expected["actor_grad_norm"]] * len(norms), rel=1e-5)


@pytest.mark.parametrize(("ranks", "case"), [*by("gspo"), *by("whitened")])
def test_what_is_decided_by_sequence_is_decided_by_the_whole_sequence(rounds, ranks, case):
    """gspo clips, and seq-mask-tis drops, by a mean over the tokens of a sequence, which lie on all ranks."""
    name = "ppo_clip_ratio" if case.algorithm == "gspo" else "is_corrected"
    for on_ranks, (theirs,) in zip(
        rounds[ranks, str(case)]["metrics"], alone(case.model, case.algorithm)["metrics"], strict=True
    ):
        assert 0 < theirs[name] < 1
        assert [own[name] for own in on_ranks] == pytest.approx([theirs[name]] * ranks)


@pytest.mark.parametrize("ranks", CASES)
def test_one_rank_writes_checkpoints(folders, rounds, ranks):
    """The others take part in putting it together. One process with plain torch goes on from it."""
    written = {path.parent.name for path in folders[ranks].glob("rank */*")}
    assert written == {"rank 0"}
    case = CASES[ranks][-1]
    backend = TorchBackend(make_models(case.model).policy, optimizer(lr=0.1))
    backend.load(*read_training_state(folders[ranks] / "rank 0" / TRAINING_STATE))
    weights = {f"policy parameters/{name}": tensor for name, tensor in backend.whole_weights()}
    for name, tensor in rounds[ranks, str(case)]["weights"].items():
        if name.startswith("policy"):
            assert torch.equal(weights[name], tensor), name


@pytest.mark.parametrize("where", ["score", "forward", "backward"])
def test_a_rank_without_memory_ends_the_run_and_the_others_do_not_wait_for_it(tmp_path, where):
    """The others are in the middle of an exchange with it, so none can begin again. It says why; they lose it."""
    said = tmp_path / "said.txt"
    command = [str(SUPPORT / "context_memory_ranks.py"), where]
    processes = start_ranks(2, command, cwd=tmp_path, said=said, environment={})
    try:
        ended = wait_until(lambda: all(process.exitcode is not None for process in processes), seconds=patience(60))
        assert ended, words_of(said)
        assert [process.exitcode for process in processes] == [1, 1]
    finally:
        for process in processes:
            process.kill()
            process.join()
    budget = "rollout" if where == "score" else "train"
    found = re.search(r"DoesNotFitError: memory ran out in a micro-batch of (\d+) tokens.*", words_of(said))
    assert found, words_of(said)
    assert "together" in found[0]
    assert f"begin with --{budget}.max_tokens_per_gpu {int(found[1]) // 2}" in found[0]
