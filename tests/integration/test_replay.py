"""The token log of whole runs, and steps that are taken again from it."""

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


class Runs:
    """Runs of the command by name, each once: six rounds of 4 prompts, 2 samples each, a checkpoint every 2 rounds."""

    def __init__(self, inputs, folder: Path) -> None:
        self._inputs, self._folder = inputs, folder
        self._done: dict[str, Path] = {}
        (folder / "luck.py").write_text(LUCK)

    def __call__(self, name: str, **overrides) -> Path:
        from openrlhf.cli.train_ppo_ray import main

        if name not in self._done:
            run = self._folder / name / "run"
            flags = {
                "train__num_episodes": 3,
                "actor__adam__lr": 1e-3,
                "ckpt__save_steps": 2,
                "ckpt__path": run.with_name("checkpoints"),
                "logger__rollouts_per_step": -1,
                "reward__remote_url": self._folder / "luck.py",
            } | overrides
            assert main(self._inputs.flags(run, **{k: v for k, v in flags.items() if v is not None})) == 0
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
