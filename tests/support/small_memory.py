"""A device that holds so many tokens at a time: forwards, or backwards, of more run out of memory."""

import torch
from torch import nn


class SmallMemory:
    """While `limit` is set, `module` fails on longer streams as CUDA does: before the forward, or when half of the
    backward is done and some gradients have been added. Remembers what did not fit."""

    def __init__(self, module: nn.Module, *, limit: int | None, where: str = "forward", spared: int = 0) -> None:
        """`spared`: so many longer streams still fit; then something else has taken that memory."""
        self.limit = limit
        self._spared = spared
        self.overflows: list[int] = []
        self._where = where
        self._tokens = 0
        module.register_forward_pre_hook(self._before_forward)
        body = getattr(module.model, "model", module.model)
        body.layers[0].mlp.down_proj.register_full_backward_pre_hook(self._in_backward)

    def _before_forward(self, module: nn.Module, arguments: tuple) -> None:
        self._tokens = arguments[0].num_tokens
        self._fail_if(self._where == "forward")

    def _in_backward(self, module: nn.Module, gradients: object) -> None:
        self._fail_if(self._where == "backward")

    def _fail_if(self, here: bool) -> None:
        if here and self.limit is not None and self._tokens > self.limit:
            if self._spared:
                self._spared -= 1
                return
            self.overflows.append(self._tokens)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than there is")
