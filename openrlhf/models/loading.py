"""Loading a Hugging Face folder into a policy, a model with a scalar head, or a tokenizer."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING
from transformers.utils import logging as transformers_logging

from openrlhf.config.backend import BackendSection, InferenceBackendSection, LigerSection, LoraSection, ValueHeadSection
from openrlhf.config.models import ActorSection, TrainedModelSection, TrustSection
from openrlhf.models.adapters import AdapterError, add_adapter
from openrlhf.models.body import decoder_body, decoder_layers, fuse_norms
from openrlhf.models.compilation import NoLayersError, compile_layers
from openrlhf.models.exact import ExactForward, InexactModelError
from openrlhf.models.heads import read_tensor, scalar_heads, stored_dtype
from openrlhf.models.image_processor import ImageProcessor, ImageProcessorError, has_vision
from openrlhf.models.policy import Policy
from openrlhf.models.routes import install_routers
from openrlhf.models.support import UnsupportedModelError, examine, examine_body, examine_replay
from openrlhf.models.tiles import tile_mlps
from openrlhf.models.value import Normalisation, ScalarHead, ValueModel
from openrlhf.models.vision import reads_images, tower_parameters
from openrlhf.types import ImageInput

logger = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json", "merges.txt")


class ModelLoadError(ValueError):
    """A model or tokenizer that the user named cannot be loaded."""


def silence_progress_bars() -> None:
    """Loading and saving say nothing: a run has a progress display of its own."""
    transformers_logging.disable_progress_bar()
    # Its lines go where ours go, and not past their filter.
    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()
    name_accelerator()


def name_accelerator() -> None:
    """Tell DeepSpeed that there is no GPU, before transformers imports it, where it is installed, to load or save a
    model: DeepSpeed would say on stdout that it has found none."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def model_dtype(name: str, device: torch.device | str) -> torch.dtype:
    """The dtype that --ds.param_dtype names; `auto` depends on the device."""
    if name == "auto":
        return torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """How a model is loaded: the sections of the configuration that say it, and what follows from the run.

    Commands have sections of different classes. What a command has no flag for is off.
    """

    device: torch.device | str
    ds: InferenceBackendSection = field(default=InferenceBackendSection())
    model: TrustSection = field(default=TrustSection())
    trains: bool = False
    """The model gets an adapter and gradient checkpointing, if the sections say so. Otherwise it only runs forward."""
    seed: int = 0
    """Seed of what starts from random weights: an adapter, a scalar head."""
    flag: str = "--actor.model_name_or_path"
    """The flag that error messages name."""
    images: bool = False
    """The model will be given images."""
    exact: bool = False
    """Values are those of the exact forward (`models.exact`)."""
    device_ready: Callable[[], None] = lambda: None
    """Returns when the device's memory may be used. Weights are read into the host's memory before that."""

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in."""
        return model_dtype(self.ds.param_dtype, self.device)

    @property
    def compiled(self) -> bool:
        """The layers go through torch.compile."""
        return isinstance(self.ds, BackendSection) and self.ds.deepcompile

    @property
    def uses_liger(self) -> bool:
        """Liger kernels replace norms, rotary embeddings and MLPs; log-probs are computed as ever."""
        return isinstance(self.ds, LigerSection) and self.ds.use_liger_kernel

    @property
    def lora(self) -> LoraSection | None:
        """The weights are frozen, and this adapter is trained. None: all weights are."""
        section = self.ds.lora if self.trains and isinstance(self.ds, BackendSection) else None
        return section if section is not None and section.rank else None

    @property
    def native_attention(self) -> str | None:
        """Attention is packed whatever --ds.attn_implementation says. "eager" and "sdpa" name the implementation of
        models that have to run one sequence at a time."""
        return self.ds.attn_implementation if self.ds.attn_implementation in ("eager", "sdpa") else None


def load_policy(path: str | os.PathLike[str], settings: LoadSettings) -> Policy:
    """The causal language model or image-text model at `path`, in training mode, its dropout off.

    Gradient checkpointing acts in training mode only. In 4 bits (NF4) are the matrices of linear layers, the head
    apart.
    """
    what = f"{settings.flag} {path}"
    config = load_config(path, trust_remote_code=settings.model.trust_remote_code, flag=settings.flag)
    image = _any_image(path, config, settings) if settings.images else None
    changed = _switch_dropout_off(config)
    model = _to_device(_load_model(_policy_loader(config, settings), path, config, settings), settings)
    if settings.uses_liger:
        _use_liger_kernels(model)
    if not settings.compiled:
        fuse_norms(model)
    # Transformers has chosen a native implementation that the model supports; it serves where packing does not.
    try:
        with _trying(settings.ds.experts_implementation):
            support = examine(model, native_attention=model.config._attn_implementation, image=image)
    except UnsupportedModelError as error:
        raise ModelLoadError(f"{what}: {error}") from error
    routers = install_routers(model, decoder_layers(model), replay=settings.trains)
    if routers is not None and settings.trains:
        routers = examine_replay(model, routers, packed=support.packed)
    _prepare_training(model, settings, what=what)
    policy = Policy(
        model,
        packed=support.packed,
        transform=support.transform,
        config_changes=changed,
        stored_dtype=stored_dtype(path),
        blank=image,
        routers=routers if settings.trains else None,
    )
    if settings.exact:
        try:
            policy.exact = ExactForward(model, decoder_body(model), transform=support.transform)
        except InexactModelError as error:
            raise ModelLoadError(f"{what}: --rollout.exact is not for this model: {error}") from error
    return policy.train()


def _policy_loader(config: Any, settings: LoadSettings) -> Any:
    """Of the families that have both, a run of text takes the class that it always took."""
    texts = not settings.images and (not has_vision(config) or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING)
    return AutoModelForCausalLM if texts else AutoModelForImageTextToText


def policy_skeleton(path: str | os.PathLike[str], settings: LoadSettings) -> Policy:
    """The policy that `load_policy` loads to be trained, without weights (meta device): it has their names, shapes and
    the adapter."""
    config = load_config(path, trust_remote_code=settings.model.trust_remote_code, flag=settings.flag)
    loader = _policy_loader(config, settings)
    with torch.device("meta"):
        model = loader.from_config(config, dtype=settings.dtype, trust_remote_code=settings.model.trust_remote_code)
        _prepare_training(model, settings, what=f"{settings.flag} {path}")
    return Policy(model)


def load_value_model(
    path: str | os.PathLike[str],
    settings: LoadSettings,
    *,
    fresh_head: bool | None = None,
    normalise: bool = False,
    classifies: bool = False,
) -> ValueModel:
    """The body of the model at `path` with a scalar head, in training mode, its dropout off.

    `fresh_head`: False: the head must be there; True: it is not looked for; None: kept where there is one, and fresh on
    a language model. A fresh one is N(0, 1 / (hidden + 1)²). The head is called as --ds.value_head_prefix says unless
    the model's config.json has a `value_head_prefix`. `normalise` takes `mean` and `std` from there. Beside an adapter
    the head is trained too. `classifies`: the head may have a bias, and two labels, of which the value is
    log P(second) − log P(first): that of a token classifier.
    """
    flag, what = settings.flag, f"{settings.flag} {path}"
    config = load_config(path, trust_remote_code=settings.model.trust_remote_code, flag=flag)
    normalisation = _normalisation(config, what=what) if normalise else None
    named = settings.ds if isinstance(settings.ds, ValueHeadSection) else ValueHeadSection()
    head_prefix = getattr(config, "value_head_prefix", None) or named.value_head_prefix
    # Before the weights of the body, which take minutes: what is wrong with the head is found at once.
    weight, bias = None, None
    if classifies:
        weight, bias = _stored_classifier(path, head_prefix, flag=flag)
    if weight is None and not fresh_head:
        weight = _stored_head(path, config, head_prefix, required=fresh_head is False, flag=flag)
    image = _any_image(path, config, settings) if settings.images else None
    changed = _switch_dropout_off(config)
    with _no_load_report():
        body, found = _load_model(AutoModel, path, config, settings, output_loading_info=True)
    if missing := sorted(found["missing_keys"]):
        raise ModelLoadError(
            f"{what}: its files lack {len(missing)} tensors of a {type(body).__name__}, such as {missing[0]}. "
            "They were written by another class: name the folder that this family's save_pretrained wrote."
        )
    if weight is None:
        if fresh_head is None:
            logger.info("%s %s: a language model; its scalar head starts from random weights", flag, path)
        weight = _fresh_head(config.get_text_config().hidden_size, seed=settings.seed)
    head = ScalarHead(weight.shape[1], bias=bias is not None)
    head.weight.data = weight
    if bias is not None:
        head.bias.data = bias
    head = head.to(dtype=settings.dtype, device=settings.device)
    body = _to_device(body, settings)
    if not settings.compiled:
        fuse_norms(body)
    with _trying(settings.ds.experts_implementation):
        reason = _examine_value_body(body, image, what=what)
    install_routers(body, decoder_layers(body), replay=False)
    _prepare_training(body, settings, what=what)
    model = ValueModel(
        body,
        head,
        head_prefix=head_prefix,
        packed=not reason,
        normalisation=normalisation,
        config_changes=changed,
        stored_dtype=stored_dtype(path),
        blank=image,
    )
    return model.train()


def _examine_value_body(body: Any, image: ImageInput | None, *, what: str) -> str:
    try:
        return examine_body(body, native_attention=body.config._attn_implementation, image=image)
    except UnsupportedModelError as error:
        raise ModelLoadError(f"{what}: {error}") from error


def _any_image(path: str | os.PathLike[str], config: Any, settings: LoadSettings) -> ImageInput:
    """A small image as the model reads it. Raises ModelLoadError for a model that can be given none: before its weights
    are loaded."""
    what, trusts = f"{settings.flag} {path}", settings.model.trust_remote_code
    if not has_vision(config):
        raise ModelLoadError(
            f"{what}: {config.model_type} reads no images. Name an image-text model, or leave "
            "--data.max_images_per_prompt out."
        )
    tokenizer = load_tokenizer(path, trust_remote_code=trusts, flag=settings.flag)
    try:
        processor = ImageProcessor.load(path, tokenizer, trust_remote_code=trusts)
        assert processor is not None, "its configuration has a vision tower"
        image = processor.blank()
    except ImageProcessorError as error:
        raise ModelLoadError(f"{what}: {error}") from error
    body_class = MODEL_MAPPING.get(type(config), None)
    if not hasattr(body_class, "get_image_features"):
        raise ModelLoadError(
            f"{what}: images for {config.model_type} are not built: its class has no get_image_features. "
            "Choose another model, such as Qwen3-VL."
        )
    return image


def load_config(path: str | os.PathLike[str], *, trust_remote_code: bool = False, flag: str) -> Any:
    """A model's configuration; raises ModelLoadError."""
    check_model_path(path, flag=flag)
    return _load(AutoConfig, path, flag=flag, trust_remote_code=trust_remote_code)


def vocabulary_of(config: Any) -> int:
    """The tokens that a Hugging Face model of this configuration has."""
    return int(config.get_text_config().vocab_size)


def load_tokenizer(
    path: str | os.PathLike[str],
    *,
    use_fast: bool = True,
    trust_remote_code: bool = False,
    flag: str = "--actor.model_name_or_path",
) -> PreTrainedTokenizerBase:
    """The tokenizer at `path`; its padding token is the end-of-sequence token if the model knows no other.

    The model's embeddings keep their size: a padding token beyond them, as transformers adds by default to a few
    tokenizer classes, does not count as one.
    """
    check_model_path(path, flag=flag)
    _check_tokenizer_files(Path(path).expanduser(), flag=flag)
    config = _load(AutoConfig, path, flag=flag, trust_remote_code=trust_remote_code)
    tokenizer = _load(AutoTokenizer, path, flag=flag, use_fast=use_fast, trust_remote_code=trust_remote_code)
    vocabulary = getattr(config.get_text_config(), "vocab_size", None) or len(tokenizer)
    if tokenizer.eos_token_id is None or tokenizer.eos_token_id >= vocabulary:
        raise ModelLoadError(
            f"{flag} {path}: the tokenizer has no end-of-sequence token among the model's {vocabulary} entries. "
            "Set eos_token in its tokenizer_config.json."
        )
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id >= vocabulary:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_model_path(path: str | os.PathLike[str], *, flag: str) -> None:
    """Fail early, and in the user's words, on a folder that is not there or holds no model.

    What does not look like a folder ("org/name") is left to the hub.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        if (folder / "adapter_config.json").is_file():
            raise ModelLoadError(
                f"{flag} {path}: this folder holds a LoRA adapter. Merge it into its base model first "
                "(python -m openrlhf.cli.lora_combiner), and name the result."
            )
        if not (folder / "config.json").is_file():
            raise ModelLoadError(
                f"{flag} {path}: this folder has no config.json, so it holds no Hugging Face model. "
                "Name the folder that save_pretrained wrote."
            )
    elif folder.exists():
        raise ModelLoadError(f"{flag} {path}: this is a file. Name the model's folder.")
    elif folder.is_absolute() or str(path).startswith((".", "~")) or str(path).count("/") > 1:
        raise ModelLoadError(f"{flag} {path}: no such folder.")


def has_tokenizer(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES)


def _check_tokenizer_files(folder: Path, *, flag: str) -> None:
    """Transformers makes an empty tokenizer for a folder that has none, and says nothing."""
    if folder.is_dir() and not has_tokenizer(folder):
        raise ModelLoadError(
            f"{flag} {folder}: cannot load the tokenizer: the folder has none. Copy the files that its base model has "
            "(tokenizer.json, tokenizer_config.json) beside the weights."
        )


def _load(loader: Any, path: str | os.PathLike[str], *, flag: str, **kwargs: Any) -> Any:
    what = {AutoTokenizer: "tokenizer", AutoConfig: "configuration"}.get(loader, "model")
    try:
        name_accelerator()
        return loader.from_pretrained(os.path.expanduser(path), **kwargs)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelLoadError(f"{flag} {path}: cannot load the {what}: {error}") from error


def _load_model(loader: Any, path: str | os.PathLike[str], config: Any, settings: LoadSettings, **options: Any) -> Any:
    """What `loader` reads at `path`, with weights held and computed with as the settings say."""
    options |= {"dtype": settings.dtype, "attn_implementation": settings.native_attention}
    if settings.ds.experts_implementation:
        options["experts_implementation"] = settings.ds.experts_implementation
    if settings.ds.load_in_4bit:
        _require("bitsandbytes", flag="--ds.load_in_4bit", extra="qlora")
        settings.device_ready()
        # QLoRA's: 4-bit normal floats, their scales quantised too (https://arxiv.org/abs/2305.14314). Quantised weights
        # do not change places: they are loaded where they are used.
        options |= {
            "quantization_config": BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=settings.dtype,
            ),
            "device_map": {"": settings.device},
        }
    trusts = settings.model.trust_remote_code
    return _load(loader, path, flag=settings.flag, config=config, trust_remote_code=trusts, **options)


def _to_device(model: Any, settings: LoadSettings) -> Any:
    if not settings.ds.load_in_4bit:
        settings.device_ready()
        return model.to(settings.device)
    _keep_layout(model)
    return model


def _prepare_training(model: Any, settings: LoadSettings, *, what: str) -> None:
    """Tiles for long sequences, and routers that draw nothing; the adapter, gradient checkpointing and compiled layers
    that the settings ask for."""
    trained = settings.model
    frozen_tower = isinstance(trained, ActorSection) and trained.freeze_visual_encoder
    tile_mlps(model)
    _switch_drawing_off(model)
    try:
        if frozen_tower:
            freeze_tower(model, what=what)
        if settings.lora:
            add_adapter(model, settings.lora, dtype=settings.dtype, seed=settings.seed, only_decoder=frozen_tower)
        if settings.trains and isinstance(trained, TrainedModelSection) and trained.gradient_checkpointing_enable:
            _checkpoint_gradients(model, reentrant=trained.gradient_checkpointing_reentrant)
        if settings.compiled:
            compile_layers(model)
    except (AdapterError, NoLayersError) as error:
        raise ModelLoadError(f"{what}: {error}") from error


def freeze_tower(model: Any, *, what: str) -> None:
    """An image-text model's vision tower and projector are not trained. Raises ModelLoadError for a model of text."""
    body = decoder_body(model)
    if not reads_images(body):
        raise ModelLoadError(f"{what}: --actor.freeze_visual_encoder: it has no vision tower; leave the flag out")
    for _, parameter in tower_parameters(body):
        parameter.requires_grad_(False)


def _keep_layout(model: Any) -> None:
    """Layers of 4 bits keep the layout that they were quantised in, whatever the CPU.

    On CPUs with AVX512-BF16 bitsandbytes rearranges a layer's weights, for good, at its first forward without
    gradients. A rearranged layer passes no gradient to the layers below it, rounds its inputs to bf16, cannot be made
    whole again, and has to have a multiple of 32 outputs and of 64 inputs.
    """
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


@contextlib.contextmanager
def _trying(experts_implementation: str | None) -> Iterator[None]:
    """Around a model's first forward: a kernel that does not run here is told by its flag."""
    try:
        yield
    except (ValueError, RuntimeError, ImportError) as error:
        if experts_implementation is None or isinstance(error, UnsupportedModelError):
            raise
        raise ModelLoadError(
            f"--ds.experts_implementation {experts_implementation} does not run here: {error}. Choose another, or "
            "leave it out."
        ) from error


def _use_liger_kernels(model: Any) -> None:
    _require("liger_kernel", flag="--ds.use_liger_kernel", extra="liger")
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)


def _require(library: str, *, flag: str, extra: str) -> None:
    if importlib.util.find_spec(library) is None:
        raise ModelLoadError(
            f"{flag} needs {library}, which is not installed: pip install -e '.[{extra}]' in the repository"
        )


def _checkpoint_gradients(model: Any, *, reentrant: bool) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        # It passes gradients on only where an input wants one, and the embeddings below an adapter are frozen.
        model.enable_input_require_grads()


def _stored_head(path: str | os.PathLike[str], config: Any, prefix: str, *, required: bool, flag: str) -> Tensor | None:
    """The weight [1, D] of the head that the files at `path` hold; None for a language model, unless `required`."""
    weight = read_tensor(path, f"{prefix}.weight")
    if weight is not None:
        if weight.dim() != 2 or weight.shape[0] != 1:
            raise ModelLoadError(
                f"{flag} {path}: its head {prefix}.weight has shape {list(weight.shape)}, num_labels "
                f"{weight.shape[0]}. A value or reward is one number: name a model with num_labels 1."
            )
        if read_tensor(path, f"{prefix}.bias") is not None:
            raise ModelLoadError(f"{flag} {path}: its head {prefix} has a bias. Name a model whose head has none.")
        return weight
    stored = getattr(config, "value_head_prefix", None)
    classifier = any(name.endswith("ForSequenceClassification") for name in config.architectures or ())
    if not (stored or classifier or required):
        return None
    where = "value_head_prefix in its config.json" if stored else "--ds.value_head_prefix"
    found = scalar_heads(path)
    remedy = (
        f"Scalar heads in its files: {', '.join(found)}. Set {where} to the right one."
        if found
        else "Its files have no scalar head at all: name a reward model, such as train_rm writes."
    )
    raise ModelLoadError(f"{flag} {path}: there is no {prefix}.weight, the head that {where} names. {remedy}")


def _stored_classifier(path: str | os.PathLike[str], prefix: str, *, flag: str) -> tuple[Tensor | None, Tensor | None]:
    """The weight [1, D] and bias [1] of a head of one label, or the difference of two. None for what is missing."""
    weight, bias = read_tensor(path, f"{prefix}.weight"), read_tensor(path, f"{prefix}.bias")
    if weight is None:
        return None, None
    if weight.dim() != 2 or weight.shape[0] not in (1, 2):
        raise ModelLoadError(
            f"{flag} {path}: its head {prefix}.weight has shape {list(weight.shape)}, num_labels {weight.shape[0]}. A "
            "step's reward is one number, or the second of two labels: name a model with num_labels 1 or 2."
        )
    if weight.shape[0] == 2:
        weight = weight[1:].float() - weight[:1].float()
        bias = None if bias is None else bias[1:].float() - bias[:1].float()
    return weight, bias


def _fresh_head(hidden_size: int, *, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, hidden_size, generator=generator) / (hidden_size + 1)


def _normalisation(config: Any, *, what: str) -> Normalisation:
    mean: Any = getattr(config, "mean", None)
    std: Any = getattr(config, "std", None)
    for name, value in (("mean", mean), ("std", std)):
        if not isinstance(value, int | float) or not math.isfinite(value) or (name == "std" and value <= 0):
            raise ModelLoadError(
                f"{what}: --reward.normalize_enable needs the mean and the std (> 0) of the model's rewards in its "
                f"config.json, and {name} there is {'missing' if value is None else repr(value)}. train_rm writes "
                "both; add them yourself for a model from elsewhere, or leave the flag out."
            )
    return Normalisation(float(mean), float(std))


@contextlib.contextmanager
def _no_load_report() -> Iterator[None]:
    """A body leaves heads behind on purpose; transformers prints a table about it."""

    def other(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    reporter = logging.getLogger("transformers.modeling_utils")
    reporter.addFilter(other)
    try:
        yield
    finally:
        reporter.removeFilter(other)


_NOISE = {"phimoe": ("input_jitter_noise",)}
"""Of routers, where it is not `router_jitter_noise`: Phi-MoE's of this name is the gap below which experts compete, in
evaluation too."""


def _switch_drawing_off(model: Any) -> None:
    """Let routers choose the best experts in training too. Phi-MoE's would draw them at random."""
    for module in model.modules():
        if type(module).__name__ == "PhimoeTopKRouter":
            module.register_forward_pre_hook(_in_evaluation_mode)


def _in_evaluation_mode(module: nn.Module, _: tuple[Any, ...]) -> None:
    module.training = False


def _switch_dropout_off(config: Any) -> dict[str, float]:
    """Set every source of randomness in the forward to 0; returns what it was, for the export to write back.

    Old and new log-probs must come from the same function of the weights.
    """
    changed = {}
    parts = [("", config.get_text_config())]
    if has_vision(config):
        parts.append(("vision_config.", config.vision_config))
    for place, part in parts:
        for name, value in list(vars(part).items()):
            # attention_dropout, resid_pdrop, layerdrop, …: families agree on no name.
            random = "drop" in name or name in _NOISE.get(part.model_type, ("router_jitter_noise",))
            if random and isinstance(value, float) and value > 0:
                changed[f"{place}{name}"] = value
                setattr(part, name, 0.0)
    return changed
