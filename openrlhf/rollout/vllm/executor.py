"""vLLM's worker beside its scheduler, for engines of one part on a CPU.

vLLM itself gives such a worker a process of its own, bound to a core: the same one for every engine of a machine, which
then wait for each other while other cores rest. In the scheduler's process a worker starts in half the time, and no
step of the model goes from process to process.
"""

from __future__ import annotations

import os

import torch
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from openrlhf.weight_sync.vllm_names import SOCKETS, THREADS


class InProcessExecutor(UniProcExecutor):
    def _init_executor(self) -> None:
        torch.set_num_threads(int(os.environ[THREADS]))  # a worker allows it no more
        super()._init_executor()

    def _distributed_args(self) -> tuple[str, int, int]:
        """The file of its process group goes to the engine's sockets: vLLM's own place is left full by a kill."""
        method, rank, local_rank = super()._distributed_args()
        if method.startswith("file://") and (folder := os.environ.get(SOCKETS)):
            method = f"file://{folder}/{os.path.basename(method)}"
        return method, rank, local_rank
