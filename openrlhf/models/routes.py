"""Routes of a mixture of experts: which experts compute a token, chosen by its routers or by an engine before (replay).

An engine and the trainer compute the same hidden states up to rounding, and a router that is nearly undecided sends a
token to other experts for it: the log-probs of that token then differ by far more than rounding. So the routers of the
policy are given the engine's choice. The weights of the chosen experts are the router's own, by its own rule, from its
own logits, so that it goes on learning.

A router is what chooses by one top-k over all experts, whatever it is called (`install_routers` tries each candidate).
Its own forward runs, and the answer of that top-k is replaced: the given experts, and their entries of what they were
to be chosen from. Whether weights come from a softmax before or after, are normalised, scaled or biased, is left to it.

Routers compute in fp32, whatever dtype the model has, replay or not. What leaves them has the dtype that it always had.

Routes are an argument of each decoder layer's call, as the plan of attention is, so that a second forward, by gradient
checkpointing, finds them again. The layer's call takes the argument out and shows its part to the router inside.
Samples that share the forward of their prompt share its routes, those of the first of them.

Shapes: T tokens of a stream, L decoder layers, E experts of a layer, K experts of a token, D hidden size.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from openrlhf.backends.base import whole_shape
from openrlhf.types import PackedTokens

ROUTES = "expert_routes"
"""The argument of a layer's call."""


class RouteShape(NamedTuple):
    """The figures of a mixture's routes."""

    layers: int
    """All decoder layers; those without experts count too."""
    experts: int
    per_token: int

    @property
    def dtype(self) -> torch.dtype:
        """The smallest that holds every expert's number."""
        return torch.uint8 if self.experts <= 256 else torch.int16


def route_shape(model_config: Any) -> RouteShape | None:
    """From a Hugging Face configuration; None for a model without experts."""
    text = model_config.get_text_config()
    # Families agree on no name.
    per_token = _first(text, "num_experts_per_tok", "top_k_experts", "moe_topk")
    experts = _first(text, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    if not 0 < per_token <= experts or experts == 1:
        return None
    return RouteShape(layers=text.num_hidden_layers, experts=experts, per_token=per_token)


def _first(config: Any, *names: str) -> int:
    return next((number for name in names if isinstance(number := getattr(config, name, None), int)), 0)


# ---------------------------------------------------------------------------------------- what a forward is given


class RouteLog:
    """Goes into forwards and comes out with what the routers did; counts of several forwards add up.

    A token that shares the forward of its prefix with others counts once. Ranks that share a stream count their tokens.
    """

    def __init__(self, shape: RouteShape, device: torch.device | str = "cpu") -> None:
        self.chosen_LE = torch.zeros(shape.layers, shape.experts, dtype=torch.int64, device=device)
        """How often each expert computed a token."""
        self.compared_L = torch.zeros(shape.layers, dtype=torch.int64, device=device)
        """Tokens whose experts were given, …"""
        self.differing_L = torch.zeros(shape.layers, dtype=torch.int64, device=device)
        """… and those of them for which the router itself would have chosen another set."""

    def counts(self) -> RouteCounts:
        return RouteCounts(self.chosen_LE.cpu(), self.compared_L.cpu(), self.differing_L.cpu())


class RouteCounts(NamedTuple):
    """A log's numbers, on the CPU."""

    chosen_LE: Tensor
    compared_L: Tensor
    differing_L: Tensor

    @staticmethod
    def added(several: Sequence[RouteCounts]) -> RouteCounts:
        return RouteCounts(*(torch.stack(column).sum(0) for column in zip(*several, strict=True)))

    def differing_share(self) -> float | None:
        """The share of (token, layer) pairs whose router would have chosen another set; None: nothing was given."""
        compared = int(self.compared_L.sum())
        return int(self.differing_L.sum()) / compared if compared else None

    def load_range(self) -> tuple[float, float] | None:
        """The tokens of a layer's least and of its most busy expert, of which 1 is the mean; mean over layers."""
        busy_LE = self.chosen_LE[self.chosen_LE.sum(-1) > 0].double()
        if not len(busy_LE):
            return None
        load_LE = busy_LE / busy_LE.mean(-1, keepdim=True)
        return load_LE.amin(-1).mean().item(), load_LE.amax(-1).mean().item()


def without_route(tokens: PackedTokens) -> tuple[int, int]:
    """How many tokens have no route of those that log-probs depend on, and how many these are.

    They are the tokens before the last action of their sequence. The others need none, and mostly have none.
    """
    last_N = torch.full((tokens.num_sequences,), -1, device=tokens.action_positions.device)
    last_N.scatter_reduce_(0, tokens.action_sequences(), tokens.action_positions, "amax")
    places_T = torch.arange(tokens.num_tokens, device=last_N.device)
    needed_T = places_T < last_N.repeat_interleave(tokens.cu_seqlens.diff().to(last_N.device))
    needed = int(needed_T.sum())
    if tokens.routes_TLK is None:
        return needed, needed
    return int((needed_T & (tokens.routes_TLK[:, 0, 0] < 0)).sum()), needed


class StreamRoutes:
    """The routes of one forward, for all layers. No tuple and no list, which wrappers around modules take apart."""

    def __init__(
        self,
        routes_TLK: Tensor | None,
        log: RouteLog | None = None,
        *,
        counted: int | None = None,
        seen: dict[int, Tensor] | None = None,
    ) -> None:
        """
        Args:
            routes_TLK: as in `PackedTokens`.
            log: is filled; only of the first `counted` tokens (None: of all).
            seen: is filled with the experts that compute the tokens, [T, K] of each layer that has some.
        """
        self.routes_TLK = routes_TLK
        self.log = log
        self.counted = counted
        self.seen = seen
        self.reached: set[int] = set()
        """Layers that have been given theirs."""

    def finish(self) -> None:
        """The forward is over: what is computed again for the backward pass is not counted."""
        self.log = None
        if not self.reached:
            raise RuntimeError("the model did not pass the routes of its experts on to its layers")


class _LayerRoutes(NamedTuple):
    """What a router is shown."""

    stream: StreamRoutes
    layer: int

    @property
    def routes_TK(self) -> Tensor | None:
        all_layers = self.stream.routes_TLK
        return None if all_layers is None else all_layers[:, self.layer]

    @torch.no_grad()
    def note(self, own_TK: Tensor, used_TK: Tensor) -> None:
        """`own_TK`: the router's own choice; `used_TK`: the experts that compute the tokens."""
        if self.stream.seen is not None:
            self.stream.seen[self.layer] = used_TK
        log, n = self.stream.log, self.stream.counted
        if log is None:
            return
        experts = used_TK[:n].flatten()
        log.chosen_LE[self.layer].scatter_add_(0, experts, torch.ones_like(experts))
        if (routes_TK := self.routes_TK) is not None:
            differs_T = (own_TK[:n].sort(-1).values != used_TK[:n].sort(-1).values).any(-1)
            log.compared_L[self.layer] += (routes_TK[:n, 0] >= 0).sum()
            log.differing_L[self.layer] += differs_T.sum()  # a token without a route has its router's own choice


class _Thread(threading.local):
    routes: _LayerRoutes | None = None


_THREAD = _Thread()
"""What the layer that is running in this thread was called with."""


class LayerCall:
    """A call of a decoder layer, whose router is shown the routes that the call was given.

    It stands where torch has the compiled call of a module, outside of what is compiled.
    """

    def __init__(self, layer: nn.Module, index: int) -> None:
        self.run: Callable[..., Any] = layer._compiled_call_impl or layer._call_impl
        self._index = index

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        stream: StreamRoutes | None = options.pop(ROUTES, None)
        if stream is not None:
            stream.reached.add(self._index)
        before, _THREAD.routes = _THREAD.routes, None if stream is None else _LayerRoutes(stream, self._index)
        try:
            return self.run(*arguments, **options)
        finally:
            _THREAD.routes = before


# ------------------------------------------------------------------------------------------------------- routers


class _Rule(NamedTuple):
    """What is known of a class of routers."""

    shape: RouteShape
    choice: int
    """Which of its calls of top-k over all experts is the choice: the last one."""
    follows: tuple[bool, ...]
    """For each of its outputs, whether it has the dtype of the input; otherwise it has its own."""


class Router(nn.Module):
    """What is put before the class of a router. A class, and not a forward of its own for each, because compiled layers
    share their code."""

    _rule: _Rule

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return _route(self, arguments, options)

    def plain(self, *arguments: Any, **options: Any) -> Any:
        return super().forward(*arguments, **options)


def hide_from_compiler() -> None:
    """Compiled layers leave routers out: the routes of a layer are not among a router's arguments."""
    global _route
    _route = torch.compiler.disable(_route)


def _route(router: Router, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    routes = _THREAD.routes
    if all(tensor.dtype.itemsize >= 4 for tensor in (arguments[0], *router.parameters())):
        return _choose(router, routes, arguments, options)
    if not torch.is_grad_enabled():
        return _choose_in_fp32(router, routes, arguments, options)
    # Computed again in the backward pass, so that nobody keeps the stream in fp32. Routes are an argument: by then the
    # layer's call is over.
    return checkpoint(
        _choose_in_fp32, router, routes, arguments, options, use_reentrant=False, preserve_rng_state=False
    )


def _choose(router: Router, routes: _LayerRoutes | None, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    if routes is None:
        return router.plain(*arguments, **options)
    with _Choice(router._rule.shape, router._rule.choice, routes.routes_TK) as choice:
        output = router.plain(*arguments, **options)
    routes.note(*choice.made)
    return output


def _choose_in_fp32(
    router: Router, routes: _LayerRoutes | None, arguments: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    dtype = arguments[0].dtype
    with _in_fp32(router):
        output = _choose(router, routes, tuple(map(_float, arguments)), {k: _float(v) for k, v in options.items()})
    return tuple(x.to(dtype) if follows else x for x, follows in zip(output, router._rule.follows, strict=True))


def _float(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


@contextlib.contextmanager
def _in_fp32(router: nn.Module) -> Iterator[None]:
    """While open, the module's parameters are fp32 tensors, through which gradients reach those that it has."""
    kept = [(owner._parameters, name, p) for owner in router.modules() for name, p in owner._parameters.items()]
    for parameters, name, parameter in kept:
        parameters[name] = None if parameter is None else cast(nn.Parameter, parameter.float())
    try:
        yield
    finally:
        for parameters, name, parameter in kept:
            parameters[name] = parameter


class _Choice(TorchFunctionMode):
    """While open, the router's top-k over all experts gives the experts of `routes_TK`, where it has some."""

    def __init__(self, shape: RouteShape, choice: int, routes_TK: Tensor | None) -> None:
        super().__init__()
        self._shape = shape
        self._choice = choice
        self._routes_TK = routes_TK
        self.calls = 0
        """Of top-k over all experts, so far."""
        self.made: tuple[Tensor, Tensor]
        """Its own choice and the one that was made, [T, K]."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = function(*args, **kwargs)
        if function not in (torch.topk, Tensor.topk):
            return output
        scores, own = args[0] if args else kwargs["input"], output.indices
        if scores.shape[-1] != self._shape.experts or own.shape[-1] != self._shape.per_token:
            return output
        self.calls += 1
        if self.calls != self._choice:
            return output
        used = own
        if (given_TK := self._routes_TK) is not None:
            if given_TK.numel() != own.numel():
                raise ValueError(f"routes of {len(given_TK)} tokens for a router of {own.numel() // own.shape[-1]}")
            given = given_TK.reshape(own.shape).to(own.dtype)
            used = torch.where(given < 0, own, given)
            output = torch.return_types.topk((scores.gather(-1, used), used))
        self.made = own.flatten(0, -2), used.flatten(0, -2)
        return output


# -------------------------------------------------------------------------------------------------- finding routers


@dataclass(frozen=True, slots=True)
class Routers:
    """The routers of a model, as far as they were found."""

    shape: RouteShape
    layers: tuple[int, ...]
    """The layers that have one."""
    problem: str = ""
    """Why routes cannot be replayed; empty: they can."""

    def check(self, routes_TLK: Tensor) -> None:
        """Raises ValueError for routes of another model."""
        told, own = tuple(routes_TLK.shape[1:]), (self.shape.layers, self.shape.per_token)
        if told != own:
            raise ValueError(
                f"the engine tells {told[1]} experts of a token in {told[0]} layers, and the policy has {own[1]} in "
                f"{own[0]}: they are not the same model"
            )


def install_routers(model: Any, layers: nn.ModuleList | None, *, replay: bool) -> Routers | None:
    """Let a model's routers compute in fp32, in place, and with `replay` take routes; None for one without experts.

    `layers`: its decoder layers. A router is known by what it does, on random weights and inputs: these are the same on
    every rank, and weights may be shared out.
    """
    shape = route_shape(model.config)
    if shape is None:
        return None
    if layers is None or len(layers) != shape.layers:
        return Routers(shape, (), "its decoder layers are not in one list")
    width, found, problem = model.config.get_text_config().hidden_size, [], ""
    known: dict[type, _Rule | str | None] = {}
    for index, layer in enumerate(layers):
        routers: list[tuple[nn.Module, _Rule]] = []
        for module in layer.modules():
            if isinstance(module, Router):  # of a model that was copied
                routers.append((module, module._rule))
                continue
            if module is layer or not _may_be_router(module, shape, width):
                continue
            if (kind := type(module)) not in known:
                known[kind] = _examined(module, shape, width)
            rule = known[kind]
            if isinstance(rule, str):
                problem = problem or f"{kind.__name__}: {rule}"
            elif rule is not None:
                routers.append((module, rule))
        for module, rule in routers:
            if not isinstance(module, Router):
                _make_router(module, rule)
        if len(routers) > 1:
            problem = problem or f"layer {index} has {len(routers)} routers"
        elif routers:
            found.append(index)
        elif not problem and any(_holds_experts(p, shape) for p in layer.parameters()):
            problem = f"layer {index} does not choose its experts by one top-k over their scores"
    if not found and not problem:
        problem = "it does not choose its experts by one top-k over their scores"
    if replay and not problem:
        for index, layer in enumerate(layers):
            layer._compiled_call_impl = LayerCall(layer, index)
    return Routers(shape, tuple(found), problem)


def _make_router(module: nn.Module, rule: _Rule) -> None:
    plain = type(module)
    if plain not in _CLASSES:
        # The same name: others know modules by it.
        _CLASSES[plain] = type(plain.__name__, (Router, plain), {"__module__": plain.__module__})
    module.__class__ = _CLASSES[plain]
    cast(Router, module)._rule = rule


_CLASSES: dict[type, type] = {}


def _holds_experts(parameter: nn.Parameter, shape: RouteShape) -> bool:
    whole = whole_shape(parameter)
    return len(whole) == 3 and whole[0] == shape.experts


def _may_be_router(module: nn.Module, shape: RouteShape, width: int) -> bool:
    """It has a score for each expert, and little else."""
    wholes = [whole_shape(parameter) for parameter in module.parameters()]
    scores = any(len(whole) == 2 and whole[0] == shape.experts for whole in wholes)
    small = 2 * shape.experts * width + 8 * (shape.experts + width)
    return scores and sum(whole.numel() for whole in wholes) <= small


_TOKENS = 16


def _examined(module: nn.Module, shape: RouteShape, width: int) -> _Rule | str | None:
    """The rule of a router; why its choice cannot be replaced; None for a module that is no router."""
    generator = torch.Generator().manual_seed(0)
    router, hidden_TD = _twin(module, generator), torch.randn(_TOKENS, width, generator=generator)
    arguments: tuple[Tensor, ...] = (hidden_TD,)
    if len(inspect.signature(type(module).forward).parameters) == 3:
        arguments = hidden_TD, torch.randn(shape.experts, generator=generator) / 8  # a bias that its parent holds

    def run(choice: int, routes_TK: Tensor | None = None) -> tuple[_Choice, tuple[Any, ...]]:
        with torch.no_grad(), _Choice(shape, choice, routes_TK) as made:
            output = router(*arguments)
        return made, output

    try:
        calls = run(0)[0].calls
        if not calls:
            return None
        plain, expected = run(calls)
        own_TK = plain.made[0]
        with torch.no_grad():
            narrow = copy.deepcopy(router).bfloat16()(hidden_TD.bfloat16(), *arguments[1:])
    except Exception:  # whatever a module may raise that is given something else than it wants
        return None
    if not isinstance(expected, tuple):
        return None
    if any(not _same(a, b) for a, b in zip(expected, run(calls, own_TK)[1], strict=True)):
        return "with its own choice of experts it gives something else than without"
    # Every expert but those of its own choice, as far as there are others.
    order_TE = torch.rand(_TOKENS, shape.experts, generator=generator)
    order_TE.scatter_(-1, own_TK, 2.0)
    foreign_TK = order_TE.argsort(-1)[:, : shape.per_token]
    answer, swapped = run(calls, foreign_TK)[1], run(calls, foreign_TK.flip(-1))[1]
    if not any(_is_choice(x, foreign_TK) for x in answer):
        return "it does not take another's choice of experts"
    for one, other, own in zip(answer, swapped, expected, strict=True):
        if not isinstance(one, Tensor) or not one.is_floating_point() or _same(one, own):
            continue  # the choice itself, and what does not depend on it: logits
        weights_TK = one.gather(-1, foreign_TK) if one.shape[-1] == shape.experts else one
        if not bool(weights_TK.isfinite().all() and weights_TK.ne(0).all()):
            return "it gives experts no weight that others have chosen"
        mirrored = other if one.shape[-1] == shape.experts else other.flip(-1)
        if not torch.allclose(one, mirrored, rtol=1e-5, atol=1e-7):
            return "the weight of an expert depends on its place among the chosen ones"
    follows = tuple(isinstance(x, Tensor) and x.dtype == torch.bfloat16 for x in narrow)
    return _Rule(shape, calls, follows)


def _same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b


def _is_choice(output: Any, choice_TK: Tensor) -> bool:
    """The numbers of the chosen experts, or weights of all experts that are 0 but for these."""
    if not isinstance(output, Tensor):
        return False
    if not output.is_floating_point():
        return torch.equal(output, choice_TK)
    chosen_TE = torch.zeros(len(choice_TK), output.shape[-1], dtype=torch.bool)
    inside = int(choice_TK.max()) < output.shape[-1]
    return inside and torch.equal(output != 0, chosen_TE.scatter(-1, choice_TK, True))


def _twin(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """The module with random weights, in fp32 on the CPU, and without hooks."""
    twin = copy.copy(nn.Module())
    twin.__dict__.update({k: v for k, v in vars(module).items() if k not in (*vars(nn.Module()), "forward")})
    twin.__class__ = type(module)
    twin.training = module.training
    for name, parameter in module._parameters.items():
        whole = None if parameter is None else whole_shape(parameter)
        twin._parameters[name] = None if whole is None else nn.Parameter(_random(whole, generator))
    for name, buffer in module._buffers.items():
        floats = buffer is not None and buffer.is_floating_point()
        twin._buffers[name] = _random(buffer.shape, generator) / 8 if buffer is not None and floats else buffer
    for name, child in module._modules.items():
        twin._modules[name] = None if child is None else _twin(child, generator)
    return twin


def _random(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Matrices whose products with random vectors are of size 1, vectors near 1."""
    numbers = torch.randn(shape, generator=generator)
    return numbers / shape[-1] ** 0.5 if len(shape) > 1 else 1 + numbers / 8
