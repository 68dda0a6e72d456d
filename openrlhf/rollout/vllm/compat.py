"""Every private attribute and undocumented import of vLLM that is used here, from 0.26 to 0.32. A new vLLM is read
against this file and `scheduling.py`; what the other files of this folder use is documented.

InProcessExecutor          a worker beside its scheduler, for engines of one part on a CPU
WorkerProcesses            workers in processes of their own, where torchvision is missing
schedulers_in              a process that is there already becomes the scheduler's
time_start                 how long a worker takes to load, to measure memory and to capture graphs
num_output_tokens          how far requests are
LayerwiseLoad              new weights, layer by layer, as if from a checkpoint
AdapterSlot                an adapter beside the weights, replaced in place
adapt_by_every_name        layers that a model has by several names are adapted by all of them
adapter_problem            why vLLM cannot hold an adapter
never_sample               tokens that stand for images are out of every distribution
ImageInputs                images that are prepared already, in the form of vLLM's engine
use_pillow                 image processors of models where torchvision is missing
route_arguments            the experts of every token, returned by vLLM itself
RouteCapture               the same where it does not return them: on a CPU
Drafts                     what is proposed as the next tokens of requests
mend_verification          drafts are verified on a CPU as they are on a GPU
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os
import re
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoTokenizer, BatchFeature
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import mm_input
from vllm.lora.layers import BaseLayerWithLoRA, FusedMoEWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.model_manager import LoRAModelManager
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_layer
from vllm.model_executor.models import ModelRegistry, supports_lora
from vllm.model_executor.models import registry as model_registry
from vllm.multimodal.inputs import MultiModalKwargsItem, MultiModalKwargsItems, PlaceholderRange
from vllm.platforms import current_platform
from vllm.transformers_utils import processor as vllm_processors
from vllm.v1.engine import utils as engine_utils
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.sample import rejection_sampler

from openrlhf.models.image_processor import load_processor
from openrlhf.models.routes import route_shape
from openrlhf.rollout.base import DraftCounts
from openrlhf.rollout.vllm.routes import Message, RouteStore, StepPart
from openrlhf.rollout.vllm.settings import EXPERTS, RANKS, SOCKETS, THREADS
from openrlhf.rollout.vllm.spare import SpareContext, SpareProcess
from openrlhf.rollout.vllm.speculation import DraftTally, HistoryDrafts, Responses, draft_room
from openrlhf.types import ImageInput, PlacedImage

_T = TypeVar("_T")


class InProcessExecutor(UniProcExecutor):
    """vLLM itself gives a worker on a CPU a process of its own, bound to a core: the same one for every engine of a
    machine, which then wait for each other while other cores rest. In the scheduler's process a worker starts in half
    the time, and no step of the model goes from process to process."""

    def _init_executor(self) -> None:
        use_pillow()
        torch.set_num_threads(int(os.environ[THREADS]))  # a worker allows it no more
        super()._init_executor()

    def _distributed_args(self) -> tuple[str, int, int]:
        """The file of its process group goes to the engine's sockets: vLLM's own place is left full by a kill."""
        method, rank, local_rank = super()._distributed_args()
        if method.startswith("file://") and (folder := os.environ.get(SOCKETS)):
            method = f"file://{folder}/{os.path.basename(method)}"
        return method, rank, local_rank


class WorkerProcesses(MultiprocExecutor):
    """vLLM's own, in a process that does without torchvision: the scheduler there asks for the sizes of images too."""

    def _init_executor(self) -> None:
        use_pillow()
        super()._init_executor()


@contextlib.contextmanager
def schedulers_in(spare: SpareProcess | None) -> Iterator[None]:
    """While open, vLLM's scheduler starts in this process, if there is one, and the spare ends with the failure of the
    start."""
    if spare is None:
        yield
        return
    make_context = engine_utils.get_mp_context
    context = SpareContext(make_context(), spare)
    engine_utils.get_mp_context = lambda: context
    try:
        yield
    except BaseException:
        spare.end()
        raise
    finally:
        engine_utils.get_mp_context = make_context


_START = {
    "load_model": "weights",
    "determine_available_memory": "memory",
    "initialize_from_config": "cache",
    "compile_or_warm_up_model": "graphs",
}
"""What vLLM asks of a worker that starts. Where layers are compiled, that is a part of "memory": the first forward is
what measures it."""


def time_start(worker: Any) -> tuple[float, dict[str, float]]:
    """Of a worker that is new: when that was, and its seconds by part, which are filled in as it starts."""
    seconds: dict[str, float] = {}

    def timed(method: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*arguments, **options)
            finally:
                seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - began

        return call

    for name, part in _START.items():
        if (method := getattr(worker, name, None)) is not None:
            setattr(worker, name, timed(method, part))
    return time.time(), seconds


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
        self._wrappers = _Wrappers(self._model)
        self._copies: dict[torch.nn.Module, list[_Copy]] = {}
        """Of layers that wait for the rest of theirs."""

    def load(self, named: list[tuple[str, torch.Tensor]]) -> None:
        with set_current_vllm_config(self._config):
            if not self._open:
                self._wrappers.take_off()
                initialize_layerwise_reload(self._model)
                self._open = True
            with _CopiesIntoNothing(self._model) as seen:
                self._model.load_weights(named)
            for layer, copies in seen.unheeded():
                self._copies.setdefault(layer, []).extend(copies)
                info = get_layerwise_info(layer)
                info.load_numel += sum(copy.source.numel() for copy in copies)
                if info.load_numel_total is not None and info.load_numel >= info.load_numel_total:
                    self._place(layer)

    def finish(self) -> None:
        with set_current_vllm_config(self._config):
            if not self._open:
                return
            for layer in list(self._copies):  # the padding of a layer is never loaded
                self._place(layer)
            self._check_arrival()
            finalize_layerwise_reload(self._model, self._config.model_config)
            self._open = False
            self._renew_sinks()
            if current_platform.is_cpu():
                self._pack_again()
            else:
                torch.cuda.synchronize()
            self._wrappers.put_on()

    def forget(self) -> None:
        """Layers in which an update broke off wait for the rest, and would take the start of the next for it."""
        with set_current_vllm_config(self._config):
            unfinished = [info for info in map(get_layerwise_info, self._model.modules()) if info.can_load()]
            for info in unfinished:
                info.load_numel = 0
                info.loaded_weights.clear()
            if unfinished:  # the tensors from before are in place again
                finalize_layerwise_reload(self._model, self._config.model_config)
            self._copies.clear()
            self._open = False
            self._wrappers.put_on()

    def _place(self, layer: torch.nn.Module) -> None:
        """Do the copies into this layer, now that it has memory, and let vLLM make of it what its kernels want."""
        info = get_layerwise_info(layer)
        materialize_layer(layer, info)
        for copy in self._copies.pop(layer):
            copy.do(layer)
        _layerwise_process(layer, info)

    def _check_arrival(self) -> None:
        """Raise ValueError if a layer got nothing that belongs to a block of which others got something. vLLM would go
        on with the weights that it has. Layers of no block may stay as they are: a tied head, a frozen tower."""
        empty, blocks = [], set()
        for name, layer in self._model.named_modules():
            info, block = get_layerwise_info(layer), _BLOCK.match(name)
            if block is None or not layer._parameters:
                continue
            waits = info.can_load() and any(p is not None and p.is_meta for p in layer._parameters.values())
            if waits and info.load_numel <= 0:
                empty.append((name, block[0]))
            else:
                blocks.add(block[0])
        if missing := [name for name, block in empty if block in blocks]:
            raise ValueError(f"vLLM's {type(self._model).__name__} takes no new weights for {', '.join(missing[:4])}")

    def _renew_sinks(self) -> None:
        """Some attention backends keep sinks in another dtype, a copy that they make once."""
        for layer in self._model.modules():
            sinks = layer._parameters.get("sinks")
            attention = getattr(getattr(layer, "attn", None), "impl", None)
            used = getattr(attention, "sinks", None)
            if sinks is not None and isinstance(used, torch.Tensor) and used.data_ptr() != sinks.data_ptr():
                with torch.inference_mode():  # they make it in a forward
                    used.copy_(sinks)

    def _pack_again(self) -> None:
        """On a CPU layers multiply with packed copies of their weights, and two kinds of them nothing else renews: a
        tied head is loaded as an embedding, and experts are packed only when their kernel is first made."""
        # By every name that it has: an image-text model's head is that of the language model in it, and some models
        # have a tied head by the name of the embedding first.
        for name, layer in self._model.named_modules(remove_duplicate=False):
            if name.rpartition(".")[2] == "lm_head" and hasattr(layer, "quant_method"):
                layer.quant_method.process_weights_after_loading(layer)
        for layer in self._model.modules():
            kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
            if kernel is not None:
                kernel.fused_experts.process_weights_after_loading(layer)


class _Wrappers:
    """The layers that vLLM puts around others for an adapter. While base weights are loaded they are off, and the model
    is the one that its loaders know: with them, parameters have other names, which 0.26 does not find."""

    def __init__(self, model: torch.nn.Module) -> None:
        # By every place that they have: a router belongs to its block and to what runs the experts.
        self._places = [
            (parent, name, child)
            for parent in model.modules()
            for name, child in parent._modules.items()
            if isinstance(child, BaseLayerWithLoRA)
        ]
        self._experts = [child.base_layer.routed_experts for _, _, child in self._places if _holds_experts(child)]
        self._methods = [experts.quant_method for experts in self._experts]

    def take_off(self) -> None:
        for parent, name, wrapper in self._places:
            parent._modules[name] = wrapper.base_layer
        for experts, method in zip(self._experts, self._methods, strict=True):
            experts.lora_base_layer_prefix = ""
            experts.quant_method = method.old_quant_method  # which knows how weights are prepared for its kernel

    def put_on(self) -> None:
        for parent, name, wrapper in self._places:
            parent._modules[name] = wrapper
        for experts, method in zip(self._experts, self._methods, strict=True):
            experts.lora_base_layer_prefix = "base_layer."
            experts.quant_method = method


def _holds_experts(layer: torch.nn.Module) -> bool:
    return isinstance(layer, FusedMoEWithLoRA)


def adapt_by_every_name() -> None:
    """In a worker, before its model is loaded. A layer may have several names: a router is called by what runs the
    experts, and the adapter's tensors have the name that it has in their block. vLLM puts its own layer in the place of
    one name, and in that of others only where their ends are alike and nothing around them is adapted; called by
    another, the layer would compute without its adapter."""
    create = LoRAModelManager._create_lora_modules

    def create_for_all_names(manager: Any) -> None:
        create(manager)
        rewire(manager.model, manager.modules.values())

    if create.__name__ != create_for_all_names.__name__:
        LoRAModelManager._create_lora_modules = create_for_all_names  # type: ignore[method-assign]


def rewire(model: torch.nn.Module, wrappers: Iterable[Any]) -> None:
    """Every place of the model that has a wrapped layer gets its wrapper."""
    around = {id(wrapper.base_layer): wrapper for wrapper in wrappers}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            wrapper = around.get(id(child))
            if wrapper is not None and wrapper is not parent:
                parent._modules[name] = wrapper


class AdapterSlot:
    """The place of the adapter in a worker's vLLM. Something is in it all the time, for all requests ask for it."""

    def __init__(self, worker: Any) -> None:
        self._manager = worker.model_runner.lora_manager._adapter_manager
        self._device = worker.device
        self._dtype = worker.vllm_config.lora_config.lora_dtype
        self.max_rank: int = worker.vllm_config.lora_config.max_lora_rank
        self._number = 0
        renames = getattr(worker.model_runner.get_model(), "hf_to_vllm_mapper", None)
        if renames is not None:  # of modules; what it says of layers that are put together is about weights
            new = hasattr(renames, "get_rename_mapper")
            renames = renames.get_rename_mapper() if new else renames.get_unstacked_mapper()
        self._renames = renames

    @staticmethod
    def has_one(worker: Any) -> bool:
        return worker.vllm_config.lora_config is not None

    def clear(self, number: int | None = None) -> None:
        """What is in it adds nothing from here on."""
        self.fill(self._number if number is None else number, {})

    def fill(self, number: int, factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> list[str]:
        """`factors`: A and B by module, with its name in the model's files. They replace what was in the slot.

        Returns the modules that it adds to.
        """
        manager = self._manager
        ours = {self._name(module): module for module in factors}
        known = {part for layer in manager.modules for part in self._parts(layer)}
        adapter = LoRAModel(
            number,
            max((len(a) for a, _ in factors.values()), default=1),
            {name: self._weights(name, *factors[module]) for name, module in ours.items() if name in known}
            # vLLM expects one module at least: of the layers of a stage of a pipeline none may be trained.
            or {"": self._weights("", torch.zeros(1, 1), torch.zeros(1, 1))},
        )
        for layer in filter(_holds_experts, manager.modules.values()):
            layer.adapter_enabled.zero_()  # for other slots than this one it would stay lost after a sleep
        manager.remove_adapter(self._number or number)
        manager.add_adapter(adapter)
        manager.activate_adapter(number)
        manager._last_mapping = None  # of tokens to slots, which is on the device, and lost after a sleep
        self._number = number
        reached = [ours[part] for part in self._reached(adapter, ours)]
        adapter.loras = _InUse()
        if not current_platform.is_cpu():
            torch.cuda.synchronize()
        return reached

    def _name(self, module: str) -> str:
        """In vLLM."""
        if self._renames is None:
            return module
        end = ".lora_A.weight"  # some renames are of the ends of weights' names
        return (self._renames._map_name(f"{module}{end}") or "").removesuffix(end)

    def _parts(self, layer: str) -> Sequence[str]:
        """The modules of the files that vLLM has put together in one layer: queries, keys and values; or experts."""
        return self._manager.packed_modules.get(layer) or [layer]

    def _weights(self, name: str, a: torch.Tensor, b: torch.Tensor) -> LoRALayerWeights:
        """alpha is the rank: vLLM has nothing to scale."""
        a, b = (factor.to(self._device, self._dtype) for factor in (a, b))
        return LoRALayerWeights(name, len(a), len(a), a, b)

    def _reached(self, adapter: LoRAModel, sent: Mapping[str, str]) -> Iterator[str]:
        manager = self._manager
        for layer, wrapper in manager.modules.items():
            held = manager._get_lora_layer_weights(adapter, layer)
            if held is None:
                continue
            parts = self._parts(layer)
            if _holds_experts(wrapper) or not isinstance(held.lora_a, list):
                yield from (part for part in parts if part in sent)
            else:
                yield from (part for part, a in zip(parts, held.lora_a, strict=True) if a is not None)


class _InUse(dict[str, Any]):
    """In place of an adapter's tensors once they are in the layers' own: a second copy would stay on the device. vLLM
    would ask for them to put them there again, which with one adapter it has no reason to."""

    def get(self, *_: Any) -> Any:
        raise RuntimeError("the adapter's tensors are in use, and nowhere else: a push brings it again")


def adapter_problem(
    model: Any, modules: Sequence[str], *, rank: int, gpu: bool, dtype: torch.dtype | None = None
) -> str | None:
    """See `openrlhf.rollout.vllm.adapter_problem`. What only a model in memory would show ends a push."""
    config = _read_config(model) if isinstance(model, str | os.PathLike) else model
    if config is None:
        return "its model has code of its own"
    if rank > RANKS[-1]:
        return f"its rank is {rank}, and vLLM holds {RANKS[-1]} at most"
    if gpu and dtype == torch.float32:
        return "vLLM's kernels for adapters compute in 16 bits on a GPU, and the model is in 32 (--ds.param_dtype)"
    name = (config.architectures or [type(config).__name__])[0]
    use_pillow()
    layers = ModelRegistry._try_load_model_cls(name)
    if layers is None or not supports_lora(layers):
        return f"vLLM has no adapters for {name}"
    if not gpu and route_shape(config) is not None:
        return "vLLM has no adapters for mixtures of experts on a CPU"
    for module in modules:
        if problem := _module_problem(module, config):
            return f"vLLM would ignore what it adds to {module}: {problem}"
    return _experts_problem([module for module in modules if f".{EXPERTS}." in module], layers)


def _read_config(folder: str | os.PathLike[str]) -> Any:
    """None: it cannot be read without the code that comes with it."""
    try:
        return AutoConfig.from_pretrained(folder)
    except ValueError:
        return None


_TOWERS = ("vis", "audio", "multi_modal", "mm_")
"""How the parts of models begin that make features of images and sounds."""


def _module_problem(module: str, config: Any) -> str | None:
    *parents, end = module.split(".")
    if not any(part.isdecimal() for part in parents):
        return "it is in none of the model's layers"
    if config.get_text_config() is not config and any(part.startswith(_TOWERS) for part in parents):
        return "it is not in the language model"
    if end == "kv_b_proj":
        return "attention does not call this layer, but multiplies its matrix into others"
    return None


def _experts_problem(modules: Sequence[str], layers: Any) -> str | None:
    """vLLM packs three matrices of every expert, and each of them must be there."""
    if not modules:
        return None
    if layers.is_3d_moe_weight or layers.is_non_gated_moe:
        return f"vLLM has other adapters for the experts of {layers.__name__} than those of single matrices"
    ends: dict[str, set[str]] = {}
    for module in modules:
        block, _, matrix = module.partition(f".{EXPERTS}.")
        ends.setdefault(block, set()).add(re.sub(r"^\d+\.", "", matrix))
    if single := [block for block, found in ends.items() if len(found) != 3]:
        return f"vLLM adapts all three matrices of an expert or none, and in {single[0]} fewer are trained"
    return None


_BLOCK = re.compile(r".*\.\d+(?=\.)")
"""The name of the block that a module is in: `model.layers.3`."""


class _Copy(NamedTuple):
    """A part of a parameter, and what it is to hold."""

    name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    source: torch.Tensor

    def do(self, layer: torch.nn.Module) -> None:
        getattr(layer, self.name).data.as_strided(self.size, self.stride, self.offset).copy_(self.source)


class _CopiesIntoNothing(TorchDispatchMode):
    """Sees copies into parameters that have no memory.

    While weights are loaded the parameters of layers are on the meta device, and vLLM's layers keep what their weight
    loaders are called with until a layer is whole. Models that copy into a parameter themselves (gpt-oss: all that its
    experts have, and sinks) would lose it without a word, and go on with the weights from before.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._owners = {
            parameter.untyped_storage()._cdata: (layer, name)
            for layer in model.modules()
            for name, parameter in layer._parameters.items()
            if parameter is not None and parameter.is_meta
        }
        self._seen: dict[torch.nn.Module, tuple[int, list[_Copy]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].is_meta:
            target, source = args[:2]
            if owner := self._owners.get(target.untyped_storage()._cdata):
                layer, name = owner
                _, copies = self._seen.setdefault(layer, (get_layerwise_info(layer).load_numel, []))
                copies.append(_Copy(name, target.size(), target.stride(), target.storage_offset(), source))
        return func(*args, **(kwargs or {}))

    def unheeded(self) -> Iterator[tuple[torch.nn.Module, list[_Copy]]]:
        """Copies that no weight loader made: those count what they copy."""
        for layer, (before, copies) in self._seen.items():
            info = get_layerwise_info(layer)
            if info.can_load() and info.load_numel == before:
                yield layer, copies


def image_arguments() -> dict[str, Any]:
    """Of the engine: pixels come normalised. Newer versions would do it on the device, and take ours for bytes."""
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    return {"mm_device_do_normalize": False} if "mm_device_do_normalize" in known else {}


def never_sample(worker: Any, token_ids: Sequence[int]) -> None:
    """Logits of these tokens are -inf from here on, for every request and for the log-probs of prompts.

    vLLM's own ways (bad words, biases, logits processors) are about single requests, and leave prompts out.
    """
    model = worker.model_runner.get_model()
    banned = torch.tensor(token_ids, device=worker.device)
    compute = model.compute_logits

    def without_banned(*arguments: Any, **options: Any) -> torch.Tensor | None:
        logits = compute(*arguments, **options)
        return None if logits is None else logits.index_fill_(-1, banned, -torch.inf)  # None: another rank has them

    model.compute_logits = without_banned


def route_arguments() -> dict[str, Any]:
    """Of an engine on a GPU: `CompletionOutput.routed_experts` is there when a request has ended. Newer versions find
    the routes of a cached prefix by the hashes of its blocks, and refuse to start without prefix caching."""
    return {"enable_return_routed_experts": True, "enable_prefix_caching": True}


def has_experts(config: VllmConfig) -> bool:
    return bool(config.model_config.is_moe)


def num_layers(config: VllmConfig) -> int:
    return int(config.model_config.hf_text_config.num_hidden_layers)


def routers(worker: Any) -> list[tuple[int, BaseRouter]]:
    """(layer, router) of this worker's part of the model. Raises ValueError where the choice cannot be seen: older
    versions return zeros without a word."""
    found = []
    for module in worker.model_runner.get_model().modules():
        if not isinstance(module, MoERunner):
            continue
        if module.is_monolithic:
            raise ValueError(f"the kernel of layer {module.layer_id} chooses experts itself, and does not tell")
        if not isinstance(module.router, BaseRouter):
            raise ValueError(f"the router of layer {module.layer_id} ({type(module.router).__name__}) does not tell")
        found.append((module.layer_id, module.router))
    return found


class RouteCapture:
    """Sees every step of a worker, and keeps which experts its tokens went to (`RouteStore`)."""

    def __init__(self, worker: Any) -> None:
        """Raises ValueError for a model whose routes cannot be captured."""
        self._runner = worker.model_runner
        named = routers(worker)
        self.layers = [layer for layer, _ in named]
        self._rows: dict[int, list[np.ndarray]] = {}
        """Of the step that runs: by layer, in the order of its tokens."""
        self._store: RouteStore | None = None
        if not named or worker.rank % worker.parallel_config.tensor_parallel_size:
            self.layers = []  # nothing to see, or another worker sees the same
            return
        cache = self._runner.kv_cache_config
        # Only such layers keep the blocks of all tokens; others let go of what is behind their window.
        whole = [i for i, group in enumerate(cache.kv_cache_groups) if _keeps_all(group.kv_cache_spec)]
        top_k, *others = {router.top_k for _, router in named}
        if not whole or others:
            raise ValueError("no layer attends to all tokens" if others == [] else "layers differ in experts per token")
        self._table = self._runner.input_batch.block_table[whole[0]]
        self._top_k = top_k
        self._store = RouteStore(
            num_blocks=cache.num_blocks
            * cache.kv_cache_groups[whole[0]].kv_cache_spec.block_size
            // self._table.block_size,
            block_size=self._table.block_size,
            layers=self.layers,
            top_k=top_k,
            num_experts=max(router.global_num_experts for _, router in named),
            keep=4 * worker.scheduler_config.max_num_seqs,
        )
        for layer, router in named:
            router.set_capture_fn(functools.partial(self._note, layer))
        self._execute = self._runner.execute_model
        self._runner.execute_model = self._execute_model

    def take(self, name: str, read: int) -> Message | None:
        return None if self._store is None else self._store.take(name, read)

    def _note(self, layer: int, chosen_TK: torch.Tensor) -> None:
        self._rows.setdefault(layer, []).append(chosen_TK.to(torch.int16, copy=True).numpy())

    def _execute_model(self, step: Any, *arguments: Any, **options: Any) -> Any:
        if self._store is not None:
            self._store.end(map(_our_name, step.finished_req_ids))
            self._store.copy_blocks(getattr(step, "kv_cache_block_copies", None) or ())
        self._rows.clear()
        output = self._execute(step, *arguments, **options)
        if self._store is not None and step.total_num_scheduled_tokens:
            self._add(self._store, step)
        return output

    def _add(self, store: RouteStore, step: Any) -> None:
        total = step.total_num_scheduled_tokens
        rows = [np.concatenate(self._rows[layer])[:total] for layer in self.layers if layer in self._rows]
        if len(rows) != len(self.layers) or any(layer.shape != (total, self._top_k) for layer in rows):
            self._store = None  # better none than those of other tokens
            return
        batch, resumed = self._runner.input_batch, step.scheduled_cached_reqs.resumed_req_ids
        blocks = self._table.get_numpy_array()
        parts = [
            StepPart(
                _our_name(name),
                start=int(batch.num_computed_tokens_cpu[row]),
                num_tokens=step.num_scheduled_tokens[name],
                blocks=blocks[row],
                resumed=name in resumed,
            )
            for row, name in enumerate(batch.req_ids)
        ]
        store.add_step(parts, np.stack(rows, axis=1))


def _keeps_all(spec: Any) -> bool:
    return isinstance(spec, FullAttentionSpec)


def _our_name(name: str) -> str:
    """vLLM adds something random to the name of a request."""
    return name.partition("-")[0]


class Drafts:
    """Sees what vLLM drafts in a worker, and when: it drafts where there is room (`draft_room`) and while `allowed`.

    vLLM asks for drafts at the end of each step of its older model runner, which is the one that it uses for drafts
    without a model. Of several workers that hold parts of the layers each asks, and the first one's drafts count.
    """

    def __init__(self, worker: Any, *, history: bool) -> None:
        """`history`: earlier responses to a prompt are asked first."""
        runner = worker.model_runner
        self._runner = runner
        self._of_requests = runner.speculative_config.method == "ngram"
        """Whether it is given the tokens of requests, and not the batch that has them."""
        self._counts = worker.rank % worker.parallel_config.tensor_parallel_size == 0
        self._propose = runner.drafter.propose
        runner.drafter.propose = self._proposed
        # Near the limit of the context vLLM would draft the token 0 for all requests as soon as one of them is there;
        # these drafters mind the limit themselves.
        runner.effective_drafter_max_model_len = sys.maxsize
        self._history = HistoryDrafts(Responses()) if history and self._counts else None
        self._tally = DraftTally()
        self._execute = runner.execute_model
        runner.execute_model = self._execute_model
        self.allowed = True

    def take_counts(self) -> DraftCounts | None:
        """Since the last call. None: another worker counts."""
        return self._tally.take() if self._counts else None

    def _execute_model(self, step: Any, *arguments: Any, **options: Any) -> Any:
        for name in step.finished_req_ids:
            self._tally.end(name)
            request = self._runner.requests.get(name)
            if self._history is not None and request is not None and request.prompt_token_ids is not None:
                self._history.end(name, request.prompt_token_ids, request.output_token_ids)
        return self._execute(step, *arguments, **options)

    def _proposed(self, wanted: int, *arguments: Any, **options: Any) -> list[list[int]]:
        sampled: list[list[int]] = arguments[0] if self._of_requests else arguments[1]
        batch, room = self._runner.input_batch, 0
        if self._counts:
            for name, tokens in zip(batch.req_ids, sampled, strict=False):
                if tokens:
                    self._tally.sampled(name, len(tokens))
            room = draft_room(len(sampled), wanted) if self.allowed else 0
        if not room:
            return [[] for _ in sampled]
        drafts = [self._recalled(row, room) if tokens else [] for row, tokens in enumerate(sampled)]
        if self._of_requests:
            rest = [[] if draft else tokens for tokens, draft in zip(sampled, drafts, strict=True)]
            found = self._propose(room, rest, *arguments[1:], **options)
        else:
            found = self._propose(wanted, *arguments, **options)
        drafts = [draft or list(other[:room]) for draft, other in zip(drafts, found, strict=True)]
        for name, tokens, draft in zip(batch.req_ids, sampled, drafts, strict=False):
            if tokens:
                self._tally.drafted(name, len(draft))
        return drafts

    def _recalled(self, row: int, room: int) -> list[int]:
        """From earlier responses to its prompt."""
        if self._history is None:
            return []
        batch = self._runner.input_batch
        length = int(batch.num_tokens_no_spec[row])
        room = min(room, self._runner.max_model_len - length - 1)
        if room < 1:
            return []
        tokens, prompt = batch.token_ids_cpu[row, :length], int(batch.num_prompt_tokens[row])
        return self._history.draft(batch.req_ids[row], tokens, prompt_length=prompt, room=room)


def mend_verification() -> None:
    """In a worker on a CPU. What a request asks for (temperature, top-p) is repeated there for each token of its draft
    by a kernel that writes whole numbers into a copy: logits are divided by whatever was in memory. And a step in which
    no request has a draft ends the engine where one asks for top-k, whose largest value is looked for among none."""
    if not current_platform.is_cpu():
        return
    constrain = rejection_sampler.apply_sampling_constraints

    def constrain_some(logits: torch.Tensor, *arguments: Any) -> torch.Tensor:
        return constrain(logits, *arguments) if len(logits) else logits

    rejection_sampler.expand_batch_to_tokens = _expanded  # type: ignore[assignment]
    if constrain.__name__ != constrain_some.__name__:
        rejection_sampler.apply_sampling_constraints = constrain_some  # type: ignore[assignment]


def _expanded(
    values: torch.Tensor, ends: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """`values` of requests, each as often as it has tokens. `ends`: of the requests' tokens."""
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    values = torch.where(values == replace_from, torch.full_like(values, replace_to), values)
    return values.repeat_interleave(counts, output_size=num_tokens)


class ImageInputs:
    """Makes prompts with prepared images. The names that a model's images have in vLLM, and how they are put into
    batches, are asked from vLLM's own processor of the model; it processes no image."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._processor = llm.renderer.get_mm_processor()
        self._dtype = llm.model_config.dtype
        self.tokenizer = self._processor.info.get_tokenizer()

    def prompt(self, token_ids: list[int], images: Sequence[PlacedImage]) -> Any:
        items = MultiModalKwargsItems({"image": [self._item(image) for _, image in images]})
        hashes = {"image": [image.digest for _, image in images]}
        return mm_input(token_ids, items, hashes, {"image": [_range(placed) for placed in images]})

    def difference(self, ours: ImageInput, image: Any) -> str | None:
        """What vLLM's own processor makes of this image that is not in `ours`, in words; None: nothing.

        vLLM's models read what its processors give, and a worker that misses something ends the engine.
        """
        text = self._processor.dummy_inputs.get_dummy_text({"image": 1})
        theirs = self._processor(text, self._processor.info.parse_mm_data({"image": [image]}))
        (item,), (place,) = theirs["mm_kwargs"].require_data()["image"], theirs["mm_placeholders"]["image"]
        if place.get_num_embeds() != ours.num_features:
            return f"{place.get_num_embeds()} tokens for an image that the processor gives {ours.num_features}"
        wanted, given = _shapes(item), _shapes(self._item(ours))
        if wanted != given:
            return f"inputs of an image {wanted}, and the processor gives {given}"
        return None

    def _item(self, image: ImageInput) -> MultiModalKwargsItem:
        inputs = BatchFeature({name: self._in_its_dtype(tensor) for name, tensor in image.tensors.items()})
        (item,) = MultiModalKwargsItems.from_hf_inputs(inputs, self._processor._get_mm_fields_config(inputs, {}))[
            "image"
        ]
        return item

    def _in_its_dtype(self, tensor: torch.Tensor) -> torch.Tensor:
        """As vLLM's own processors do: not all of its models convert what they are given."""
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor


def _shapes(item: MultiModalKwargsItem) -> dict[str, tuple[int, ...]]:
    found = {name: element.data for name, element in item.items()}
    return {name: tuple(data.shape) if isinstance(data, torch.Tensor) else () for name, data in sorted(found.items())}


def _range(placed: PlacedImage) -> PlaceholderRange:
    """From the first placeholder to the last: models count positions from there. Other tokens that stand for the image
    are text to vLLM; those between placeholders are marked."""
    token_ids, placeholder = placed.image.token_ids, placed.image.placeholder
    first, last = token_ids.index(placeholder), len(token_ids) - 1 - token_ids[::-1].index(placeholder)
    is_embed = torch.tensor(token_ids[first : last + 1]) == placeholder
    return PlaceholderRange(
        offset=placed.start + first, length=last + 1 - first, is_embed=None if bool(is_embed.all()) else is_embed
    )


def use_pillow() -> None:
    """Let this process run image-text models where torchvision is missing: not every torch has a build of it.

    vLLM needs it three times, though it gets images that are prepared. The modules of its models import transformers'
    processors for a function or a type, and these import `torchvision.transforms.v2`, so an empty module has this name;
    `torchvision` itself stays missing, and transformers goes on with Pillow. vLLM looks at a model's class in a process
    that knows nothing of this, to keep CUDA out of this one: where torchvision is missing there is none. And it loads
    the model's processor, to ask for sizes and to make images to profile with: it gets ours (`models.image_processor`).
    """
    if _without_torchvision():
        sys.modules.setdefault(_TRANSFORMS, _empty_transforms())
        model_registry._run_in_subprocess = _run_here
        vllm_processors.cached_get_processor = _processor_by_pillow


def use_pillow_in_its_processes(config: VllmConfig) -> None:
    """`use_pillow` also where the scheduler of this engine will be. Workers call it themselves."""
    if _without_torchvision() and config.parallel_config.distributed_executor_backend == "mp":
        config.parallel_config.distributed_executor_backend = WorkerProcesses


def _without_torchvision() -> bool:
    return importlib.util.find_spec("torchvision") is None


def _run_here(fn: Callable[[], _T]) -> _T:
    return fn()


_TRANSFORMS = "torchvision.transforms.v2"


def _empty_transforms() -> types.ModuleType:
    module = types.ModuleType(_TRANSFORMS)
    module.functional = types.ModuleType(f"{_TRANSFORMS}.functional")  # type: ignore[attr-defined]
    return module


@functools.lru_cache
def _processor_by_pillow(path: str, *_: Any, tokenizer: Any = None, trust_remote_code: bool = False, **__: Any) -> Any:
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    if tokenizer is None:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    processor = load_processor(path, config, tokenizer, trust_remote_code=trust_remote_code)
    processor.video_processor = processor.image_processor  # of which vLLM asks the sizes, though no video may come
    return processor
