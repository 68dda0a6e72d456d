"""Compiled decoder layers (`--ds.deepcompile`), for streams of any length; where compiling fails a run goes on without.

The compiler sees a layer in four pieces, up to attention and from there on. Attention itself is opaque to it: a plan
attends in another way for every stream, and would be compiled again for every stream. What is left is per token, so one
compiled piece serves all layers and all lengths. There is another one with gradients and without them, in training and
in evaluation mode, and for models of other shapes.

Where ranks compute a layer together (ZeRO-3, tensor parallelism) they meet at every matrix, which would be a piece of
its own. There only norms are compiled.

A piece is compiled, its backward pass included, before any of it has run. So a failure leaves nothing half done: the
piece is run operation by operation, there and from then on, in this process. The pieces that were compiled before stay:
gradient checkpointing wants the same operations in its second forward as it saw in the first. Ranks need not fail
alike: a piece gives its gradients in the same order, compiled or not, and by that order DeepSpeed adds up those of
ranks.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from openrlhf.models import attention, routes, tiles
from openrlhf.models.attention import AttentionPlan
from openrlhf.models.body import decoder_layers

logger = logging.getLogger(__name__)

FLAG = "--ds.deepcompile"
_TORCH_LOGGER = "torch._dynamo.convert_frame"
_MOST_VERSIONS = 64
"""Compiled versions of one piece. Policy, reference, critic and reward model share them, with and without gradients."""


class NoLayersError(ValueError):
    """The model has no list of layers."""


def compile_layers(model: Any) -> None:
    """Compile each decoder layer, in place, at its first forward; the first steps take some seconds longer.

    All layers share one compiled code, so none may have a forward of its own: norms are fused by the compiler. Raises
    `NoLayersError`.
    """
    layers = decoder_layers(model)
    if layers is None:
        raise NoLayersError(f"{FLAG}: {type(model).__name__} has no list of layers to compile; leave it out")
    _COMPILER.start()
    for layer in layers:
        around: Any = layer._compiled_call_impl  # what torch's own `Module.compile` sets
        if around is None:
            layer._compiled_call_impl = _LayerCall(layer)
            continue
        while isinstance(around.run, tiles.LayerCall | routes.LayerCall):
            around = around.run
        around.run = _LayerCall(layer)


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """While open, layers run as they are in this thread. For decoding: its steps are short, and of another kind."""
    before, _THREAD.uncompiled = _THREAD.uncompiled, True
    try:
        yield
    finally:
        _THREAD.uncompiled = before


class _Thread(threading.local):
    uncompiled = False


_THREAD = _Thread()


class _LayerCall:
    """The call of one layer, hooks included. How it is compiled shows at the first: DeepSpeed has cut it by then."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        plain = self._layer._call_impl
        if _THREAD.uncompiled:
            return plain(*arguments, **options)
        if self._compiled is None:
            if _is_shared_out(self._layer):
                _compile_norms(self._layer)
                self._compiled = plain
            else:
                self._compiled = _compiled(plain)
        if self._compiled is plain:
            return plain(*arguments, **options)
        if (plan := options.get("attention_plan")) is not None:
            options["attention_plan"] = _AnyPlan(plan)
        return self._compiled(*arguments, **options)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True, backend=_COMPILER)


def _is_shared_out(layer: nn.Module) -> bool:
    """Whether ranks compute the layer together: ZeRO-3 has cut its parameters, or AutoTP its matrices."""
    cut = any(hasattr(parameter, "ds_id") for parameter in layer.parameters())
    return cut or any(type(module).__module__.startswith("deepspeed.") for module in layer.modules())


def _compile_norms(layer: nn.Module) -> None:
    """Below their hooks, which put their weights together."""
    for module in layer.modules():
        if type(module).__name__.endswith("Norm") and "forward" not in vars(module):
            module.forward = _compiled(module.forward)


class _AnyPlan:
    """A plan of whatever class. The compiler makes a version for each class that it sees."""

    def __init__(self, plan: AttentionPlan) -> None:
        self._plan = plan

    def __call__(self, *arguments: Any, **options: Any) -> Tensor:
        output = self._plan(*arguments, **options)
        # The same memory, but not a view: of a view the compiler makes a version for each layout that its base has.
        return torch.ops.aten._unsafe_view(output, output.shape)


class _Compiler(logging.Filter):
    """Torch's compiler, until it fails; then pieces are run operation by operation. One for the whole process.

    As a filter of its log lines it learns of what the compiler has given up by itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self._failed = False

    def start(self) -> None:
        """Prepare torch, where a model is compiled at all: importing its compiler takes seconds."""
        import torch._dynamo
        from torch.fx.experimental import _config as shapes

        config: Any = torch._dynamo.config
        config.suppress_errors = True  # a piece that cannot be traced runs as it is
        config.recompile_limit = max(config.recompile_limit, _MOST_VERSIONS)
        shapes.use_duck_shape = False  # as many tokens as heads, the first time: that is chance, and no rule
        logging.getLogger(_TORCH_LOGGER).addFilter(self)  # once, however often it is added
        attention.hide_from_compiler()
        tiles.hide_from_compiler()
        routes.hide_from_compiler()

    def stop(self) -> None:
        """As at the beginning: nothing has failed."""
        self._failed = False
        logging.getLogger(_TORCH_LOGGER).removeFilter(self)

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """The backend: dynamo's graph of a piece → what is run."""
        from torch._dynamo.exc import RestartAnalysis, SkipFrame

        if not self._failed:
            try:
                # Otherwise the backward pass would be compiled when it is run, in the middle of a step.
                with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
                    return _inductor(graph, inputs)
            except (RestartAnalysis, SkipFrame):  # torch has learnt something, and begins again
                raise
            except Exception as error:  # whatever a compiler may raise means the same
                self._give_up(_first_line(error))
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager(graph, inputs)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        error = record.exc_info[1] if record.exc_info else None
        self._give_up(record.getMessage().partition("\n")[0] if error is None else _first_line(error))
        return False

    def _give_up(self, reason: str) -> None:
        if not self._failed:
            logger.warning(
                "%s: compilation failed, and the run goes on without it, slower but with the same results: %s",
                FLAG,
                reason,
            )
        self._failed = True


def _inductor(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(graph, inputs)


def _first_line(error: BaseException) -> str:
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


_COMPILER = _Compiler()
