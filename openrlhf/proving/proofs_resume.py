"""Proofs of checkpoints: a run that was killed and resumed ends as one that was not, and loses nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from openrlhf.observability.ledger import TrainedStep, read_trained
from openrlhf.observability.loggers import read_metrics, without_times
from openrlhf.proving.registry import KINDS, Disproved, proof
from openrlhf.proving.trial import RLTrial, SupervisedTrial
from openrlhf.runs import rl_assembly, supervised_assembly

STEPS = 3
SAVED_AFTER = 2

DIFFERENT_REWARDS = '''"""Rewards that are different for nearly every answer."""


def reward_func(queries, prompts, labels):
    return [float(sum(map(ord, query)) % 5) for query in queries]
'''


def resumable(trial: RLTrial | SupervisedTrial, folder: Path) -> Any:
    """The trial as a whole run of three steps with a checkpoint after the second; as the user has it, async."""
    config: Any = trial.config
    ckpt = dataclasses.replace(
        config.ckpt,
        path=str(folder / "checkpoints"),
        output_dir=str(folder / "model"),
        save_steps=SAVED_AFTER,
        max_num=1,
        save_hf=False,
    )
    logger = dataclasses.replace(config.logger, run_dir=str(folder / "run"))
    train = dataclasses.replace(config.train, total_steps=STEPS)
    if isinstance(trial, SupervisedTrial):
        return dataclasses.replace(
            config, ckpt=ckpt, logger=logger, train=dataclasses.replace(train, max_epochs=STEPS, batch_size=2)
        )
    given = trial.given
    several = given.train.max_epochs > 1 or given.samples_per_round > given.train.batch_size
    samples = config.rollout.batch_size * config.samples_per_prompt
    train = dataclasses.replace(
        train,
        num_episodes=-(-STEPS * config.rollout.batch_size // trial.num_prompts),
        batch_size=-(-samples // 2) if several else samples,
        max_epochs=min(given.train.max_epochs, 2),
        async_enable=given.train.async_enable,
        partial_rollout_enable=given.train.partial_rollout_enable,
        async_queue_size=min(given.train.async_queue_size, 2),
        enable_ema=given.train.enable_ema,
    )
    rollout = dataclasses.replace(
        config.rollout,
        abort_stragglers=given.rollout.abort_stragglers,
        vllm_generate_batch_size=config.rollout.batch_size + 1 if given.rollout.abort_stragglers else None,
    )
    # Engines are no part of a checkpoint; what the embedded one samples does not depend on what it samples beside.
    vllm = dataclasses.replace(config.vllm, num_engines=0, quantization=None, speculation=None)
    config = dataclasses.replace(config, ckpt=ckpt, logger=logger, train=train, rollout=rollout, vllm=vllm)
    rewards = {t.reward for group in trial.groups for t in group.scored}
    if len(rewards) < 2 and not given.train.agent_func_path:
        # The user's rewards would teach nothing here, and weights that stay cannot go astray.
        path = folder / "rewards.py"
        path.write_text(DIFFERENT_REWARDS, encoding="utf-8")
        reward = dataclasses.replace(config.reward, remote_url=str(path), model_name_or_path=None, weights=None)
        config = dataclasses.replace(config, reward=reward)
    return config


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def _train(trial: RLTrial | SupervisedTrial, config: Any) -> None:
    with _silent():
        if isinstance(trial, RLTrial):
            rl_assembly.train(config, make_launcher=trial.make)
        else:
            supervised_assembly.train(config)


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    named: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        named |= load_file(path)
    return named


def _last(folder: Path) -> dict[str, Any]:
    """What the last step has logged, without times."""
    return without_times([r for r in read_metrics(folder / "metrics.jsonl") if r.get("kind", "train") == "train"][-1])


def _same(one: Any, other: Any, *, exact: bool) -> bool:
    if exact or not (isinstance(one, float) and isinstance(other, float)):
        return one == other
    return math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-5)


def _ordinals(steps: list[TrainedStep]) -> list[int]:
    return [p for step in steps for p in [*dict.fromkeys(s.prompt for s in [*step.trained, *step.failed])]] + [
        p for step in steps for p in step.rejected_prompts
    ]


def _cannot_resume(trial: RLTrial | SupervisedTrial) -> str | None:
    if isinstance(trial, RLTrial) and trial.given.plays_across_rounds:
        wanted = STEPS * trial.config.rollout.batch_size
        if trial.num_prompts != wanted:
            return f"what an async run loses shows with exactly {wanted} prompts, and {trial.num_prompts} can be used"
    module = trial.models.policy if isinstance(trial, RLTrial) else trial.module
    size = sum(p.numel() for p in module.parameters()) * 20
    free = shutil.disk_usage(trial.folder).free
    if size > free / 2:
        return (
            f"a checkpoint needs {size / 2**30:.0f} GiB in {trial.folder}, where {free / 2**30:.0f} are free (TMPDIR)"
        )
    return None


@proof(
    "resume",
    title="killed and resumed is as good as undisturbed",
    shows="Three steps with a checkpoint after the second, and the third once more from that checkpoint: the same "
    "prompts, no prompt twice and none left out, no finished group lost, and in a sync run the same metrics and "
    "weights to the bit.",
    remedy="Something that the loop knows is not in the checkpoint. Do not resume runs before this is found.",
    kinds=KINDS,
    unless=_cannot_resume,
    cost=6,
)
def resume(trial: RLTrial | SupervisedTrial) -> str:
    folder = trial.folder / "resume"
    folder.mkdir()
    try:
        return _resume(trial, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _resume(trial: RLTrial | SupervisedTrial, folder: Path) -> str:
    if isinstance(trial, RLTrial):
        trial.to_training()
    config = resumable(trial, folder)
    _train(trial, config)
    run = next(folder.glob("run*"))
    again = dataclasses.replace(
        config,
        ckpt=dataclasses.replace(config.ckpt, load_enable=True, output_dir=str(folder / "model_again")),
        logger=dataclasses.replace(config.logger, run_dir=str(folder / "again")),
    )
    _train(trial, again)
    resumed = next(folder.glob("again*"))
    lines = []
    if isinstance(trial, RLTrial):
        lines.append(_compare_prompts(trial, config, read_trained(run / "trained.jsonl"), resumed))
        if config.plays_across_rounds:
            return f"{lines[0]}; the order of an async run depends on time, so weights are not compared"
    one, other = _last(run), _last(resumed)
    # Episodes of agents, and of images that threads prepare, reach the engine in an order of their own; what it
    # batches decides the last bits.
    exact = not (
        isinstance(trial, RLTrial) and (trial.config.train.agent_func_path or config.data.max_images_per_prompt)
    )
    for name in one.keys() | other.keys():
        if not _same(one.get(name), other.get(name), exact=exact):
            raise Disproved(
                f"{name} of step {STEPS} is {other.get(name)} in the resumed run, and {one.get(name)} in the other"
            )
    straight, continued = _weights(folder / "model"), _weights(folder / "model_again")
    if straight.keys() != continued.keys() or not straight:
        raise Disproved("the resumed run has written other tensors than the undisturbed one")
    for name, tensor in straight.items():
        close = torch.equal if exact else torch.allclose
        if not close(tensor, continued[name]):
            raise Disproved(f"{name} of the resumed run differs from that of the undisturbed one")
    lines.append(f"{len(one)} metrics and {len(straight)} tensors are the same{' to the bit' if exact else ''}")
    return "; ".join(lines)


def _compare_prompts(trial: RLTrial, config: Any, straight: list[TrainedStep], resumed: Path) -> str:
    history = [step for step in straight if step.step <= SAVED_AFTER] + [
        step for step in read_trained(resumed / "trained.jsonl") if step.step > SAVED_AFTER
    ]
    wanted = list(range(STEPS * config.rollout.batch_size))
    for name, steps in (("undisturbed", straight), ("resumed", history)):
        found = sorted(_ordinals(steps))
        if lost := sorted(set(wanted) - set(found)):
            raise Disproved(
                f"the {name} run never trained on prompt {lost[0]}, and {len(lost) - 1} more of {len(wanted)}"
            )
        if found != wanted:
            twice = next(p for p in found if found.count(p) > 1 or p not in wanted)
            raise Disproved(f"the {name} run trained on prompt {twice} more often than once, or beyond its data")
    if not config.plays_across_rounds and straight[-1].trained != history[-1].trained:
        raise Disproved("the resumed run trained on other samples in its last step than the undisturbed one")
    return f"{len(wanted)} prompts once each"
