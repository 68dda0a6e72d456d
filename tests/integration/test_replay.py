"""The token log of whole runs, and steps that are taken again from it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from openrlhf.observability.ledger import read_trained
from openrlhf.observability.loggers import read_metrics, without_times
from openrlhf.observability.token_log import read_groups, read_step, steps


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tiny matrices are slower on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


LUCK = """\
import zlib
def reward_func(queries, prompts, labels):
    return [zlib.crc32(query.encode()) % 5 / 4 for query in queries]
"""


POISON = (
    LUCK
    + """\
calls, judge = 0, reward_func
def reward_func(queries, prompts, labels):
    global calls
    calls += 1
    rewards = judge(queries, prompts, labels)
    return [rewards[0], 1e6] if calls == 131 else rewards
"""
)
"""Of 4 prompts a step, the 131st is one of step 33."""

AGENT = """\
import zlib
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    def __init__(self):
        self.turns = 0
    async def reset(self, states, **kwargs):
        return states
    async def step(self, states, **kwargs):
        self.turns += 1
        luck = zlib.crc32((states["observation_text"] + states["action_text"]).encode()) % 5 / 4
        return {"rewards": luck, "environment_feedback": "1 ", "done": self.turns == 3 or luck == 1}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


class Runs:
    """Runs of the command by name, each once: six rounds of 4 prompts, 2 samples each, a checkpoint every 2 rounds."""

    def __init__(self, inputs, folder: Path) -> None:
        self._inputs, self.folder = inputs, folder
        self._done: dict[str, Path] = {}
        (folder / "luck.py").write_text(LUCK)
        (folder / "poison.py").write_text(POISON)
        (folder / "agent.py").write_text(AGENT)

    def __call__(self, name: str, *words: str, **overrides) -> Path:
        from openrlhf.cli.train_ppo_ray import main

        if name not in self._done:
            run = self.folder / name / "run"
            flags = {
                "train__num_episodes": 3,
                "actor__adam__lr": 1e-3,
                "ckpt__save_steps": 2,
                "ckpt__path": run.with_name("checkpoints"),
                "logger__rollouts_per_step": -1,
                "reward__remote_url": self.folder / "luck.py",
            } | overrides
            flags = {name: value for name, value in flags.items() if value is not None}
            assert main([*self._inputs.flags(run, **flags), *words]) == 0
            self._done[name] = run
        return self._done[name]


@pytest.fixture(scope="module")
def runs(inputs, tmp_path_factory) -> Runs:
    return Runs(inputs, tmp_path_factory.mktemp("replay"))


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run.with_name("out") / "model.safetensors")


def test_the_log_changes_no_number_of_the_run(runs):
    """Metrics and weights of a run that keeps every token and of one that keeps none, bit for bit."""
    all_kept, none_kept = (
        runs("sync"),
        runs("silent", logger__rollouts_per_step=None, logger__rollouts=0, ckpt__save_steps=-1),
    )
    assert list(steps(all_kept)) == [1, 2, 3, 4, 5, 6]
    assert not (none_kept / "tokens").exists()
    assert [without_times(r) for r in read_metrics(all_kept / "metrics.jsonl")] == [
        without_times(r) for r in read_metrics(none_kept / "metrics.jsonl")
    ]
    one, other = weights(all_kept), weights(none_kept)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_log_holds_what_was_trained_on(runs):
    run = runs("sync")
    ledger = read_trained(run / "trained.jsonl")
    for (step, path), line in zip(steps(run).items(), ledger, strict=True):
        logged = read_step(path)
        assert (logged.step, line.step, logged.complete) == (step, step, True)
        samples = [sample for group in logged.groups for sample in group.samples]
        assert sorted((s.prompt, s.sample) for s in samples) == line.trained
        for sample in samples:
            (segment,) = sample.segments
            assert segment.is_trained
            assert logged.pieces.text(segment.token_ids.tolist()) == sample.text
            new, old = segment.columns["new_logprobs"], segment.columns["old_logprobs"]
            idle = not segment.columns["advantages"].any()
            assert np.isnan(new).all() if idle else np.allclose(new, segment.logprobs[segment.action], atol=1e-5)
            assert np.array_equal(old, new, equal_nan=True)
        assert [group.prompt.ordinal for group in read_groups(path)] == [group.ordinal for group in logged.groups]


def replayed(run: Path, step: int, *words: str, tmp_path: Path) -> dict:
    """Through the command, as its JSON."""
    from openrlhf.cli.main import main

    out = tmp_path / "replay.json"
    assert main(["replay", str(run), "--step", str(step), "--json", str(out), *words]) == 0
    return json.loads(out.read_text())


@pytest.mark.parametrize(
    ("step", "origin", "trained"),
    [(1, 0, [1]), (3, 2, [3]), (6, 4, [5, 6])],
)
def test_a_step_is_taken_again_to_the_bit(runs, tmp_path, capsys, step, origin, trained):
    """From the beginning where there is no checkpoint before it; step 6 has a checkpoint of its own."""
    found = replayed(runs("sync"), step, tmp_path=tmp_path)
    assert found["origin_step"] == origin
    assert [one["step"] for one in found["replayed"]] == trained
    for one in found["replayed"]:
        assert one["bit_equal"], one["differences"]
        assert {"policy_loss", "actor_grad_norm", "actor_lr"} <= one["metrics"].keys()
    assert (found["weights"] or {}).get("bit_equal") is (True if step % 2 == 0 else None)
    (optimizer_step,) = found["optimizer_steps"]
    assert optimizer_step["gradient_norm"] == pytest.approx(found["replayed"][-1]["metrics"]["actor_grad_norm"])
    assert sum(one["share"] for one in found["effects"]) == pytest.approx(1.0, abs=1e-4)
    assert sum(one["loss"] for one in found["effects"]) == pytest.approx(
        found["replayed"][-1]["metrics"]["policy_loss"], abs=1e-6
    )
    assert f"step {step}  bit-equal" in capsys.readouterr().out


OTHERS = {
    "multi-turn": {
        "train__agent_func_path": "agent.py",
        "rollout__agent_hosts": 1,
        "reward__remote_url": "none",
        "data__max_len": 40,
        "algo__advantage__estimator": "rloo",
        "algo__advantage__turns": "to_go",
    },
    "async": {
        "train__async_enable": True,
        "algo__advantage__is_correction_enable": True,
        "algo__advantage__estimator": "group_norm",
    },
    "ppo in four optimizer steps": {
        "algo__advantage__estimator": "gae",
        "algo__kl__init_coef": 0.05,
        "train__batch_size": 4,
        "train__max_epochs": 2,
        "critic__adam__lr": 1e-3,
        "actor__entropy_coef": 0.01,
        "train__enable_ema": True,
    },
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_runs_are_taken_again_to_the_bit(runs, tmp_path, name):
    flags = {flag: runs.folder / value if value == "agent.py" else value for flag, value in OTHERS[name].items()}
    run = runs(name.replace(" ", "-"), **flags)
    found = replayed(run, 4, tmp_path=tmp_path)
    assert [one["bit_equal"] for one in found["replayed"]] == [True, True], found["replayed"]
    assert found["weights"]["bit_equal"]
    assert len(found["optimizer_steps"]) == (4 if name.startswith("ppo") else 1)
    assert {one["sample"] for one in found["effects"]} == {0, 1}
    if name == "multi-turn":
        turns = [segment.turn_ends.sum() for _, segment in segments(run, 4)]
        assert max(turns) > 1
    if name == "async":
        ages = [step - 1 - s.columns["versions"][s.action].min() for step in steps(run) for _, s in segments(run, step)]
        assert max(ages) > 0, "no sample is older than the weights that it trained"


def segments(run: Path, step: int):
    logged = read_step(steps(run)[step])
    return [(sample, segment) for group in logged.groups for sample in group.samples for segment in sample.segments]


def test_a_poisoned_sample_is_named_first(runs, tmp_path, capsys):
    """A reward of a million in step 33 of 40. The command needs to be told no more than the step."""
    run = runs(
        "poisoned",
        *("--reward.clip_range", "-1e9", "1e9"),
        train__num_episodes=20,
        algo__advantage__estimator="reinforce",
        reward__remote_url=runs.folder / "poison.py",
        ckpt__save_steps=10,
    )
    ((culprit, _),) = [(s, g) for s, g in segments(run, 33) if s.reward == 1e6]
    found = replayed(run, 33, tmp_path=tmp_path)
    assert [one["step"] for one in found["replayed"]] == [31, 32, 33]
    assert all(one["bit_equal"] for one in found["replayed"])
    first, second, *_ = found["effects"]
    assert (first["prompt"], first["sample"], first["reward"]) == (culprit.prompt, culprit.sample, 1e6)
    assert first["along"] > 3 * abs(second["along"])
    table = capsys.readouterr().out.splitlines()
    rows = table[next(i for i, line in enumerate(table) if line.split()[0:1] == ["share"]) + 1 :]
    assert f"prompt {culprit.prompt} sample {culprit.sample}" in rows[0]


def test_another_setting_shows_what_the_step_would_have_been(runs, tmp_path):
    found = replayed(runs("sync"), 4, "--actor.adam.lr", "1e-2", tmp_path=tmp_path)
    first, second = found["replayed"]
    then, here = first["differences"].pop("actor_lr")
    assert here == pytest.approx(10 * then)
    assert not first["differences"]
    assert second["differences"].keys() >= {"actor_lr", "actor_grad_norm"}
    assert not found["weights"]["bit_equal"]


def test_checkpoints_of_another_run_in_the_same_folder_are_not_taken(runs, tmp_path):
    """Runs that name no --ckpt.path share one."""
    others = runs("sync").with_name("checkpoints")
    found = replayed(runs("async", **OTHERS["async"]), 2, "--ckpt.path", str(others), tmp_path=tmp_path)
    assert (found["origin"], found["weights"]) == (None, None)
    assert [one["bit_equal"] for one in found["replayed"]] == [True, True]


def refused(capsys, *words: str) -> str:
    from openrlhf.cli.main import main

    assert main(["replay", *words]) in (1, 2)
    return capsys.readouterr().err


def test_what_is_missing_is_named_with_the_flag_that_would_have_kept_it(runs, tmp_path, capsys):
    sync = runs("sync")
    assert "there is no folder" in refused(capsys, str(tmp_path / "nowhere"), "--step", "1")
    assert "holds no run: it has no config.yaml" in refused(capsys, str(tmp_path), "--step", "1")
    assert "has no step 7: its steps are 1 to 6" in refused(capsys, str(sync), "--step", "7")
    assert "has no step 0" in refused(capsys, str(sync), "--step", "0")
    assert "has no token log" in refused(capsys, str(runs("silent")), "--step", "2")
    assert "--actor.learning is unknown" in refused(capsys, str(sync), "--step", "2", "--actor.learning", "1")

    gap = tmp_path / "gap" / "run"
    shutil.copytree(sync, gap)
    (gap / "tokens" / "step_000005.npz").unlink()
    said = refused(capsys, str(gap), "--step", "6")
    assert "step 5 is not in" in said
    assert "from global_step4 on" in said
    assert "--logger.rollouts_per_step -1" in said
    said = refused(capsys, str(gap), "--step", "6", "--ckpt.path", str(tmp_path / "none"))
    assert "checkpoints are not in" in said
    (tmp_path / "none").mkdir()
    said = refused(capsys, str(gap), "--step", "6", "--ckpt.path", str(tmp_path / "none"))
    assert "from the beginning on, for no checkpoint is before it" in said
    assert "--ckpt.save_steps" in said

    few = runs("few", logger__rollouts_per_step=2, train__num_episodes=1)
    assert "has only some of its groups" in refused(capsys, str(few), "--step", "2")
