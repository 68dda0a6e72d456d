"""The inside of a vLLM worker: it takes over blocks of weights, and ends with the process that its engine belongs to.

`VllmEngine` calls these methods by vLLM's `collective_rpc`, which is documented, in every version. vLLM's own interface
for weight transfers is the same calls behind two registries of classes; their arguments differ from version to version.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from openrlhf.rollout.vllm.routes import Message
from openrlhf.rollout.vllm.settings import EXACT, OWNER, SOCKETS
from openrlhf.utils.parent_death import exit_with_parent
from openrlhf.weight_sync.blocks import AdapterSpec
from openrlhf.weight_sync.transports import BlockReceiver, block_from


class WorkerExtension:
    """Named in vLLM's configuration, and by that a base of the worker's class, after its own bases."""

    device: torch.device
    _weights: WorkerWeights | None
    _routes: Any
    _drafts: Any
    _start_seconds: tuple[float, dict[str, float]]

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        """vLLM constructs a worker before it loads anything. Its processes do not notice when the one that started
        them is killed, so they are told here whom to watch."""
        owner = int(os.environ.get(OWNER, os.getpid()))
        if owner != os.getpid():
            exit_with_parent(owner, leaving_nothing_in=lambda: os.environ.get(SOCKETS))
        from openrlhf.rollout.vllm.compat import adapt_by_every_name, mend_verification, time_start, use_pillow

        use_pillow()
        adapt_by_every_name()
        mend_verification()
        if EXACT in os.environ:
            from openrlhf.rollout.vllm.exact import keep_plain_weights

            keep_plain_weights()
        worker = super().__new__(cls)
        worker._start_seconds = time_start(worker)
        return worker

    def start_seconds(self) -> tuple[float, dict[str, float]]:
        """When this worker was made, by `time.time`, and how long the parts of its start took since."""
        return self._start_seconds

    def hold_adapter(self, number: int) -> None:
        """Requests may ask for it from here on. It adds nothing until one is pushed."""
        _weights_of(self).begin_adapter(number)

    def take_blocks(self, messages: Sequence[dict[str, Any]], adapter: dict[str, Any] | None = None) -> None:
        """`adapter`: the fields of the `AdapterSpec` that the blocks belong to."""
        _weights_of(self).take(messages, None if adapter is None else AdapterSpec(**adapter))

    def finish_blocks(self) -> dict[str, Any]:
        """Of an adapter, what is wrong with it (`problem`), or the `modules` of this worker that it changes now."""
        return _weights_of(self).finish()

    def forget_blocks(self) -> None:
        _weights_of(self).forget()

    def never_sample(self, token_ids: Sequence[int]) -> None:
        from openrlhf.rollout.vllm.compat import never_sample

        never_sample(self, token_ids)

    def compute_exactly(self) -> None:
        """From the first request on."""
        from openrlhf.rollout.vllm.exact import ExactModel

        ExactModel(self)

    def begin_drafts(self, history: bool) -> None:
        """Before the first request. `history`: earlier responses to a prompt are drafts too."""
        from openrlhf.rollout.vllm.compat import Drafts

        self._drafts = Drafts(self, history=history)

    def take_draft_counts(self) -> dict[str, int] | None:
        """The fields of a `DraftCounts`, since the last call. None: another worker counts."""
        counts = self._drafts.take_counts()
        return None if counts is None else dataclasses.asdict(counts)

    def allow_drafts(self, allowed: bool) -> None:
        self._drafts.allowed = allowed

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


def _weights_of(worker: Any) -> WorkerWeights:
    """Made at the first call: the extension has no constructor that vLLM would call with a model."""
    if "_weights" not in vars(worker):
        worker._weights = WorkerWeights(worker)
    return worker._weights


class WorkerWeights:
    """An update of a worker's weights: those of its model, and the adapter beside them."""

    def __init__(self, worker: Any) -> None:
        from openrlhf.rollout.vllm.compat import AdapterSlot, LayerwiseLoad

        self._receiver = BlockReceiver(worker.device)
        self._base = LayerwiseLoad(worker)
        self._slot = AdapterSlot(worker) if AdapterSlot.has_one(worker) else None
        self._shapes: dict[str, tuple[int, ...]] = {}
        """Of the base's weights, by their names: what its adapter has to fit to."""
        self._base_came = False
        self._adapter: CollectedAdapter | None = None

    def begin_adapter(self, number: int) -> None:
        assert self._slot is not None, "vLLM was started with room for an adapter"
        self._slot.clear(number)

    def take(self, messages: Sequence[dict[str, Any]], spec: AdapterSpec | None) -> None:
        for message in messages:
            tensors = self._receiver.tensors(block_from(message))
            if spec is None:
                self._base_came = True
                self._shapes |= {name: tuple(tensor.shape) for name, tensor in tensors}
                self._base.load(tensors)
            else:
                self._adapter = self._adapter or CollectedAdapter(spec)
                self._adapter.add(tensors)

    def finish(self) -> dict[str, Any]:
        """First the base: where it comes without an adapter, it is what is sampled from."""
        self._base.finish()
        adapter, base_came = self._adapter, self._base_came
        self._adapter, self._base_came = None, False
        if adapter is None:
            if base_came and self._slot is not None:
                self._slot.clear()
            return {}
        assert self._slot is not None, "an engine without room for an adapter is sent none"
        if problem := adapter.problem(self._shapes, max_rank=self._slot.max_rank):
            return {"problem": problem}
        return {"modules": self._slot.fill(adapter.spec.number, adapter.factors())}

    def forget(self) -> None:
        self._adapter, self._base_came = None, False
        self._base.forget()


_FACTORS = {".lora_A.weight": 0, ".lora_B.weight": 1}


class CollectedAdapter:
    """The tensors of one adapter, until the last of them is there."""

    def __init__(self, spec: AdapterSpec) -> None:
        self.spec = spec
        self._tensors: dict[str, Tensor] = {}

    def add(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """In memory that is the caller's no more."""
        self._tensors |= dict(named)

    def problem(self, shapes: Mapping[str, tuple[int, ...]], *, max_rank: int) -> str | None:
        """Why it cannot be added to a base whose weights have these shapes; None: it can."""
        for name in self._tensors:
            if not name.endswith(tuple(_FACTORS)):
                return f"{name} is not one of the two matrices lora_A and lora_B"
        modules = dict.fromkeys(name.partition(".lora_")[0] for name in self._tensors)
        if difference := self.spec.difference(modules):
            return difference
        for module in modules:
            a, b = (self._tensors.get(f"{module}{end}") for end in _FACTORS)
            if a is None or b is None:
                return f"of {module} only {'lora_A' if b is None else 'lora_B'} has come"
            shape = shapes.get(f"{module}.weight")
            if shape is None:
                return f"the model has no weight {module}.weight"
            if a.dim() != 2 or b.dim() != 2 or len(a) != b.shape[1] or (len(b), a.shape[1]) != shape:
                return (
                    f"lora_B {list(b.shape)} times lora_A {list(a.shape)} of {module} cannot be added to its weight "
                    f"{list(shape)}"
                )
            if len(a) > max_rank:
                return f"{module} has rank {len(a)}, and the engine has room for {max_rank}"
        return None

    def factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """By module: A and B, whose product is what is added. vLLM's own way to scale it, which changes B in place and
        differs from version to version, has nothing left to do."""
        modules = dict.fromkeys(name.partition(".lora_")[0] for name in self._tensors)
        return {
            module: (
                self._tensors[f"{module}.lora_A.weight"],
                self._tensors[f"{module}.lora_B.weight"].float() * self.spec.scaling(module),
            )
            for module in modules
        }
