"""Weights that change in the middle of responses: every sampled token has the log-prob of the very weights it names,
and an evaluation beside training is one of the weights of its step."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence

import pytest
import torch
from safetensors.torch import load_file
from test_vllm_run import REWARD, _write_model

from openrlhf.config import parse
from openrlhf.models.policy import Policy
from openrlhf.observability.loggers import read_metrics
from openrlhf.runs.launchers import RunParts, make_launcher
from openrlhf.runs.rl_assembly import train
from openrlhf.runs.rl_models import ACTOR
from openrlhf.types import Group, PackedTokens, Segment

pytestmark = pytest.mark.slow

PIPELINES = {
    "partial": ["--train.async_enable", "--train.partial_rollout_enable", "--train.async_queue_size", "2"],
    "stragglers": ["--rollout.abort_stragglers"],
}


class Witness:
    """Sees a local run: the weights of every version, and every group that is trained on."""

    def __init__(self) -> None:
        self.policies: dict[int, Policy] = {}
        self.groups: list[Group] = []

    @contextlib.contextmanager
    def make_launcher(self, config, tokenizer) -> Iterator[Witness]:
        with make_launcher(config, tokenizer) as self._launcher:
            yield self

    def reward(self):
        return self._launcher.reward()

    @contextlib.contextmanager
    def build(self, *, total_steps: int, loop) -> Iterator[RunParts]:
        with self._launcher.build(total_steps=total_steps, loop=loop) as bound:
            self._policy, self._weights = bound.kept[ACTOR].backend.module, bound.weights
            self._place, bound.workers.place = bound.workers.place, self.place
            yield bound._replace(weights=self)

    def place(self, groups: Sequence[Group]):
        self.groups += groups
        return self._place(groups)

    def push(self, *, version: int):
        self.policies[version] = copy.deepcopy(self._policy)
        return self._weights.push(version=version)

    def gap(self, segment: Segment) -> float:
        """Between the log-probs a segment came with and those of the weights that its tokens name, at most."""
        tokens = PackedTokens.from_sequences([segment.token_ids], [segment.action_mask])
        versions_A = segment.versions[segment.action_mask]
        found_A = segment.rollout_logprobs[segment.action_mask]
        for version in versions_A.unique().tolist():
            with torch.no_grad():
                expected_A = self.policies[version].eval()(tokens, temperature=1.0).logprobs_A
            found_A = torch.where(versions_A == version, found_A - expected_A, found_A)
        return float(found_A.abs().max())


@pytest.mark.parametrize(
    ("engines", "pipeline", "rank"),
    [(0, "partial", 0), (0, "stragglers", 0), (1, "partial", 0), (1, "partial", 8)],
    ids=lambda value: str(value),
)
def test_a_token_has_the_logprob_of_the_weights_it_names(inputs, tmp_path, monkeypatch, engines, pipeline, rank):
    """Eight rounds of 4 of 32 prompts, 12 in play, at a large learning rate. Responses end where chance has it, so that
    the long ones are in play when weights change; no sample is older than the 3 rounds that 12 groups take. `rank`: of
    an adapter, which is all that changes in the engine; what is cached before a prompt's end is of it too."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    flags = inputs.flags(
        tmp_path / "run",
        actor__model_name_or_path=_write_model(tmp_path / "model"),
        reward__remote_url=tmp_path / "reward.py",
        rollout__batch_size=4,
        rollout__vllm_generate_batch_size=12,
        rollout__max_new_tokens=40,
        rollout__n_samples_per_prompt=1,
        rollout__agent_hosts=0,  # a reward takes no longer than a few tokens
        data__max_len=48,
        train__batch_size=4,
        train__num_episodes=4,
        train__launcher="local",
        vllm__num_engines=engines,
        algo__advantage__estimator="reinforce",
        algo__advantage__is_correction_enable=True,
        actor__adam__lr=1e-2 if rank else 1e-3,
        ds__lora__rank=rank,
        actor__lr_scheduler="constant",
        eval__dataset=inputs.data,
        eval__steps=3,
        ckpt__path=tmp_path / "ckpt",
        ckpt__save_steps=8,
    )
    witness = Witness()
    train(parse("train_ppo_ray", [*flags, *PIPELINES[pipeline]]), make_launcher=witness.make_launcher)

    if not rank:
        assert_the_best_checkpoint_has_the_weights_that_were_measured(tmp_path, witness)
    assert sorted(group.prompt.ordinal for group in witness.groups) == list(range(32))
    assert sorted(witness.policies) == list(range(9))
    segments = [segment for group in witness.groups for t in group.scored for segment in t.segments]
    assert len(segments) == 32
    mixed = [segment for segment in segments if len(segment.versions[segment.action_mask].unique()) > 1]
    assert mixed, "no weights changed in the middle of a response"
    assert max(map(witness.gap, segments)) < 1e-4
    # The test would notice: with the weights of another version some token is far off.
    witness.policies = {version: witness.policies[(version + 1) % 9] for version in witness.policies}
    assert max(map(witness.gap, segments)) > 1e-2
    for round_, start in enumerate(range(0, 32, 4)):
        trained = [s for group in witness.groups[start : start + 4] for t in group.scored for s in t.segments]
        assert all(round_ - segment.oldest_version <= 3 for segment in trained)


def assert_the_best_checkpoint_has_the_weights_that_were_measured(folder, witness: Witness) -> None:
    """Evaluations after rounds 3 and 6; the period of checkpoints is neither's."""
    evaluations = [line for line in read_metrics(folder / "run" / "metrics.jsonl") if line["kind"] == "eval"]
    assert [line["step"] for line in evaluations] == [3, 6]
    first, second = (line["eval_sorting_pass1"] for line in evaluations)
    best = 6 if second > first else 3
    (kept,) = (folder / "ckpt").glob("best_global_step*")
    assert kept.name == f"best_global_step{best}"
    weights, measured = load_file(kept / "actor" / "model.safetensors"), witness.policies[best].model.state_dict()
    assert all(torch.equal(tensor, measured[name]) for name, tensor in weights.items())


SLOW_ONCE = """
import asyncio
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

waits = [2.0]


class Twice(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.turns = 0

    async def step(self, states, **kwargs):
        self.turns += 1
        await asyncio.sleep(waits.pop() if waits else 0)
        return {"rewards": float(self.turns), "environment_feedback": ">", "done": self.turns == 2}


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Twice)
"""
"""The first step of all takes two seconds, in which others play rounds of theirs."""


def test_an_environment_lives_on_when_its_round_ends_without_it(inputs, tmp_path, monkeypatch):
    """Four rounds of 2 of 8 prompts, 3 in play. The slow one's first turn is of version 0; its environment remembers that
    turn when it goes on in a later round, with the weights of then, and at most 2 versions after it began."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(SLOW_ONCE)
    flags = inputs.flags(
        tmp_path / "run",
        train__agent_func_path=tmp_path / "agent.py",
        rollout__batch_size=2,
        rollout__vllm_generate_batch_size=3,
        rollout__n_samples_per_prompt=1,
        rollout__agent_hosts=1,
        train__batch_size=2,
        algo__advantage__estimator="reinforce",
    )
    without = flags.index("--reward.remote_url")
    witness = Witness()
    words = [*flags[:without], *flags[without + 2 :], *PIPELINES["stragglers"]]
    train(parse("train_ppo_ray", words), make_launcher=witness.make_launcher)

    assert sorted(group.prompt.ordinal for group in witness.groups) == list(range(8))
    assert [t.reward for group in witness.groups for t in group.trajectories] == [3.0] * 8
    turns = [
        segment.versions[segment.action_mask].unique().tolist()
        for g in witness.groups
        for segment in g.scored[0].segments
    ]
    (mixed,) = (versions for versions in turns if len(versions) > 1)
    assert mixed in ([0, 1], [0, 2])
