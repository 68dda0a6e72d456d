"""vLLM as an engine: its asynchronous engine in this process, its workers in their own.

engine.py       VllmEngine: requests in, generations out; pause and resume around a push of weights
worker.py       the inside of its workers: they take over weights
compat.py       every private part of vLLM that is used, and what differs between its versions
settings.py     how an engine is started, and vLLM's arguments for it
processes.py    several vLLM processes on the same device, as one engine
scheduling.py   vLLM's scheduler without work that changes nothing
spare.py        a process that has imported vLLM before an engine asks for one
speculation.py  drafts of the next tokens: where they come from, and whether they pay
routes.py       the experts of tokens, where workers of ours have to see them
sampling.py     our sampling parameters in vLLM's words
texts.py        tokens decoded at the end of a generation, or part by part
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from openrlhf.rollout.vllm.settings import VllmSettings, environment, logging_variables
from openrlhf.rollout.vllm.spare import SCHEDULER

if TYPE_CHECKING:
    import torch

    from openrlhf.rollout.vllm.engine import VllmEngine
    from openrlhf.rollout.vllm.processes import VllmProcesses


def start_engine(settings: VllmSettings, tokenizer: Any | None, *, processes: int = 1) -> VllmEngine | VllmProcesses:
    """Import vLLM, which takes seconds and which most runs do without, and start it. `settings`: of each process."""
    start = engine_class()
    if processes == 1:
        return start(settings, tokenizer)
    from openrlhf.rollout.vllm.processes import VllmProcesses

    return VllmProcesses.started(lambda: start(settings, tokenizer), count=processes)


def engine_class() -> type[VllmEngine]:
    with environment(logging_variables()):  # which vLLM reads when it is imported
        from openrlhf.rollout.vllm.engine import VllmEngine
    return VllmEngine


def end_start() -> None:
    """End the processes of an engine that is starting in this process, so that its start fails."""
    for process in multiprocessing.active_children():
        if process.name.startswith(SCHEDULER):
            process.kill()  # one that is asked to end may have started until then


def adapter_problem(
    model: Any, modules: Sequence[str], *, rank: int, gpu: bool, dtype: torch.dtype | None = None
) -> str | None:
    """Why vLLM cannot hold an adapter beside a model's weights; None: it can. No engine is started.

    Args:
        model: a Hugging Face folder, or its configuration.
        modules: what the adapter changes, by the names of the model's files.
        dtype: of the engine; None: one that both devices have adapters for.
    """
    with environment(logging_variables()):
        from openrlhf.rollout.vllm.compat import adapter_problem
    return adapter_problem(model, modules, rank=rank, gpu=gpu, dtype=dtype)
