"""Every private attribute and undocumented import of vLLM that is used here, from 0.26 to 0.32. A new vLLM is read
against this file; what the other files of this folder use is documented.

InProcessExecutor          a worker beside its scheduler, for engines of one part on a CPU
num_output_tokens          how far requests are
LayerwiseLoad              new weights, layer by layer, as if from a checkpoint
"""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from openrlhf.rollout.vllm.settings import SOCKETS, THREADS


class InProcessExecutor(UniProcExecutor):
    """vLLM itself gives a worker on a CPU a process of its own, bound to a core: the same one for every engine of a
    machine, which then wait for each other while other cores rest. In the scheduler's process a worker starts in half
    the time, and no step of the model goes from process to process."""

    def _init_executor(self) -> None:
        torch.set_num_threads(int(os.environ[THREADS]))  # a worker allows it no more
        super()._init_executor()

    def _distributed_args(self) -> tuple[str, int, int]:
        """The file of its process group goes to the engine's sockets: vLLM's own place is left full by a kill."""
        method, rank, local_rank = super()._distributed_args()
        if method.startswith("file://") and (folder := os.environ.get(SOCKETS)):
            method = f"file://{folder}/{os.path.basename(method)}"
        return method, rank, local_rank


def num_output_tokens(llm: AsyncLLM) -> dict[str, int]:
    """Tokens sampled so far of the requests under way, by their names. vLLM counts no versions before 0.32."""
    states = list(llm.output_processor.request_states.values())
    counts = {}
    for state in states:
        assert state.detokenizer is not None  # a request that generates has one
        counts[state.external_req_id] = state.detokenizer.num_output_tokens()
    return counts


def head_sizes_on_a_cpu() -> list[int]:
    """The attention heads that vLLM can compute there."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return CPUAttentionBackend.get_supported_head_sizes()


def run_a_forward(worker: Any) -> None:
    worker.model_runner.profile_run()


class LayerwiseLoad:
    """New weights for the model of a worker. An update is begun by the first `load`, and ended by `finish`."""

    def __init__(self, worker: Any) -> None:
        self._config: VllmConfig = worker.vllm_config
        self._model = worker.model_runner.get_model()
        self._open = False

    def load(self, named: list[tuple[str, torch.Tensor]]) -> None:
        with set_current_vllm_config(self._config):
            if not self._open:
                initialize_layerwise_reload(self._model)
                self._open = True
            self._model.load_weights(named)

    def finish(self) -> None:
        with set_current_vllm_config(self._config):
            if not self._open:
                return
            finalize_layerwise_reload(self._model, self._config.model_config)
            self._open = False
            if current_platform.is_cpu():
                self._pack_again()
            else:
                torch.cuda.synchronize()

    def forget(self) -> None:
        """Layers in which an update broke off wait for the rest, and would take the start of the next for it."""
        with set_current_vllm_config(self._config):
            unfinished = [info for info in map(get_layerwise_info, self._model.modules()) if info.can_load()]
            for info in unfinished:
                info.load_numel = 0
                info.loaded_weights.clear()
            if unfinished:  # the tensors from before are in place again
                finalize_layerwise_reload(self._model, self._config.model_config)
            self._open = False

    def _pack_again(self) -> None:
        """On a CPU layers multiply with packed copies of their weights, and two kinds of them nothing else renews: a
        tied head is loaded as an embedding, and experts are packed only when their kernel is first made."""
        head = getattr(self._model, "lm_head", None)
        if head is not None and hasattr(head, "quant_method"):
            head.quant_method.process_weights_after_loading(head)
        for layer in self._model.modules():
            kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
            if kernel is not None:
                kernel.fused_experts.process_weights_after_loading(layer)
