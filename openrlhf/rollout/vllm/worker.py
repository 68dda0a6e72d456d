"""The inside of a vLLM worker: it takes over blocks of weights, and ends with the process that its engine belongs to.

`VllmEngine` calls these methods by vLLM's `collective_rpc`, which is documented, in every version. vLLM's own interface
for weight transfers is the same calls behind two registries of classes; their arguments differ from version to version.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from openrlhf.rollout.vllm.routes import Message
from openrlhf.rollout.vllm.settings import OWNER, SOCKETS
from openrlhf.utils.parent_death import exit_with_parent
from openrlhf.weight_sync.transports import BlockReceiver, block_from


class WorkerExtension:
    """Named in vLLM's configuration, and by that a base of the worker's class, after its own bases."""

    device: torch.device
    _weights: tuple[BlockReceiver, Any] | None
    _routes: Any

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        """vLLM constructs a worker before it loads anything. Its processes do not notice when the one that started
        them is killed, so they are told here whom to watch."""
        owner = int(os.environ.get(OWNER, os.getpid()))
        if owner != os.getpid():
            exit_with_parent(owner, leaving_nothing_in=os.environ.get(SOCKETS))
        from openrlhf.rollout.vllm.compat import use_pillow

        use_pillow()
        return super().__new__(cls)

    def take_blocks(self, messages: Sequence[dict[str, Any]]) -> None:
        receiver, load = _weights_of(self)
        for message in messages:
            load.load(receiver.tensors(block_from(message)))

    def finish_blocks(self) -> None:
        _weights_of(self)[1].finish()

    def forget_blocks(self) -> None:
        _weights_of(self)[1].forget()

    def never_sample(self, token_ids: Sequence[int]) -> None:
        from openrlhf.rollout.vllm.compat import never_sample

        never_sample(self, token_ids)

    def capture_routes(self) -> tuple[list[int], str | None]:
        """The layers whose routes this worker will know, or why it cannot."""
        from openrlhf.rollout.vllm.compat import RouteCapture

        try:
            self._routes = RouteCapture(self)
        except ValueError as error:
            return [], str(error)
        return self._routes.layers, None

    def take_routes(self, name: str, read: int) -> Message | None:
        return self._routes.take(name, read)

    def find_routers(self) -> tuple[list[int], str | None]:
        """The same as `capture_routes`, of a vLLM that returns routes itself."""
        from openrlhf.rollout.vllm.compat import routers

        try:
            return [layer for layer, _ in routers(self)], None
        except ValueError as error:
            return [], str(error)

    def run_once(self) -> None:
        """A stage of a pipeline makes room for what the stage before sends it in its first forward with nothing in it,
        which on a CPU, without compilation, is never run otherwise."""
        from openrlhf.rollout.vllm.compat import run_a_forward

        run_a_forward(self)


def _weights_of(worker: Any) -> tuple[BlockReceiver, Any]:
    """Made at the first call: the extension has no constructor that vLLM would call with a model."""
    from openrlhf.rollout.vllm.compat import LayerwiseLoad

    if "_weights" not in vars(worker):
        worker._weights = (BlockReceiver(worker.device), LayerwiseLoad(worker))
    return worker._weights
