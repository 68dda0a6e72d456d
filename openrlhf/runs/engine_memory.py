"""What an engine may have of its device's memory, from the configuration: as asked for, or by what training needs.

Nothing has to be loaded for it: shapes are those of models without weights. So it can be asked before models load, as
on Ray, where engines start first, or beside them.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from openrlhf.config.commands import RLConfig
from openrlhf.config.fields import ConfigError
from openrlhf.config.rules import required
from openrlhf.models.image_processor import has_vision
from openrlhf.models.loading import policy_skeleton
from openrlhf.models.routes import route_shape
from openrlhf.runs.device_memory import (
    GIB,
    MOST,
    DeviceMemory,
    Division,
    DoesNotFitError,
    EngineMemory,
    EngineNeed,
    Layout,
    ModelShape,
    TrainedModel,
    TrainingNeed,
    capped,
    divide,
    engine_need,
    leaves_too_little,
    review,
    training_need,
)
from openrlhf.runs.preflight import reading_model
from openrlhf.runs.rl_models import load_settings

logger = logging.getLogger(__name__)

NF4 = 0.4
"""Of the size of 16-bit weights: matrices of linear layers have 4 bits and a scale; embeddings and head stay."""


class Settled(NamedTuple):
    """What an engine may have, and the division that it follows from; None: nothing was divided."""

    memory: EngineMemory
    division: Division | None = None


NOTHING_SHARED = Settled(EngineMemory(MOST, sleeps=False))
"""Of an engine on a device of its own."""


def engine_memory(config: RLConfig, device: DeviceMemory | None, *, ranks: int = 1, engines: int = 1) -> Settled:
    """The memory of each of so many engines. `device`: the GPU that it shares with training; None: there is none, or it
    has one of its own. `ranks`: of the models on such devices. Raises ConfigError where they do not fit even in turns.
    """
    asked, sleeps = config.vllm.gpu_memory_utilization, config.engines_sleep
    if device is None:
        return Settled(EngineMemory(asked or MOST, sleeps=False))
    shape = policy_shape(config)
    training = training_of(config, shape, ranks=ranks)
    if asked is not None:
        return Settled(_as_asked(asked, device, training, sleeps=sleeps))
    try:
        division = divide(device, training, engine_of(config, shape, engines=engines), sleeps=sleeps)
    except DoesNotFitError as error:
        raise ConfigError(f"{error}: {_MORE_ROOM}") from error
    logger.info("%s", division)
    return Settled(division.memory, division)


_MORE_ROOM = (
    "--ds.enable_sleep moves masters and moments away while vLLM samples, --ds.lora.rank trains few parameters, and "
    "several GPUs share all of it out (--train.launcher ray, --ds.zero_stage); --vllm.gpu_memory_utilization tries all "
    "the same"
)


def _as_asked(asked: float, device: DeviceMemory, training: TrainingNeed, *, sleeps: bool | None) -> EngineMemory:
    share = capped(asked, device, training)
    if share < asked:
        logger.info(
            "vLLM takes %.2f of the device's memory, not %.2f (--vllm.gpu_memory_utilization): %.1f GiB are free, and "
            "training keeps %.1f (--ds.enable_sleep: nothing)",
            share,
            asked,
            (device.total - device.others - device.loaded) / GIB,
            (training.staying - training.weights) / GIB,
        )
    return EngineMemory(share, sleeps=leaves_too_little(share, device, training) if sleeps is None else sleeps)


def local_device(device: torch.device) -> DeviceMemory | None:
    """The memory of this process's GPU; None on a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    loaded = torch.cuda.memory_reserved(device)
    return DeviceMemory(total=total, others=max(0, total - free - loaded), loaded=loaded)


def review_training(division: Division, config: RLConfig, taken: int) -> None:
    """Compare with what the first update took, in bytes, and say where a flag would do better."""
    reserved = division.training.total
    logger.info("training took %.1f GiB at its peak; %.1f were set aside for it", taken / GIB, reserved / GIB)
    if config.vllm.enable_sleep is None and (advice := review(division, taken)) is not None:
        logger.warning("%s", advice)


# -------------------------------------------------------------------------------------------- from the configuration


def training_of(config: RLConfig, policy: ModelShape, *, ranks: int = 1) -> TrainingNeed:
    """What the models of one process need that shares its device with an engine: all of the run's."""
    ds, train = config.ds, config.train
    plain = ranks == 1 and not ds.adam_offload
    layout = Layout(
        ranks=ranks,
        zero=0 if plain else max(1, ds.zero_stage),
        context=ds.ring_attn_size,
        tensor=ds.tensor_parallel_size,
        checkpointing=config.actor.gradient_checkpointing_enable,
    )
    trained, frozen = [TrainedModel(policy, layout)], []
    if config.critic_path is not None:
        trained.append(TrainedModel(_shape(config, config.critic_path, "--critic.model_name_or_path"), layout))
    if config.uses_reference and not config.reference_is_base and not config.ref.offload:
        frozen.append(TrainedModel(replace(policy, trained=0), layout))
    if config.teacher_path is not None and not config.teacher.offload:
        shape = _shape(config, config.teacher_path, config.teacher_flag, trains=False)
        frozen.append(TrainedModel(shape, layout))
    if config.uses_reward_model and not config.reward.offload:
        flag = "--reward.model_name_or_path"
        frozen += [TrainedModel(_shape(config, path, flag, trains=False), layout) for path in config.reward.model_paths]
    if train.dynamic_batch_enable:
        tokens = train.max_tokens_per_gpu * ds.ranks_per_share
    else:
        tokens = train.micro_batch_size * config.data.max_len if train.micro_batch_size > 1 else 0
    return training_need(
        trained,
        frozen=frozen,
        tokens=tokens,
        longest=config.data.max_len,
        states_stay=not config.optimizer_sleeps,
        offloaded=ds.adam_offload and not plain,
        averaged=train.enable_ema,
    )


def engine_of(config: RLConfig, policy: ModelShape, *, engines: int = 1) -> EngineNeed:
    """What each of so many engines needs."""
    processes = config.vllm.processes_per_engine
    requests = -(-config.generate_batch_size * config.samples_per_prompt // engines)
    most = processes * places(-(-requests // processes))
    return engine_need(
        policy,
        max_len=config.data.max_len,
        # An agent's histories are kept from turn to turn, also of those that wait for their environment.
        needed=requests if config.reward_source == "agent" else min(requests, most),
        places=most,
        tensor=config.vllm.tensor_parallel_size,
        stages=config.vllm.pipeline_parallel_size,
        graphs=not config.vllm.enforce_eager,
        images=config.data.max_images_per_prompt > 0,
        processes=processes,
    )


def places(requests: int) -> int:
    """Sequences that a process of vLLM samples at once, for a rollout of so many requests.

    No more than its largest CUDA graph is captured for, and enough for an evaluation that asks for more than a round.
    """
    return min(512, max(256, requests))


def policy_shape(config: RLConfig) -> ModelShape:
    return _shape(config, required(config.actor.model_name_or_path), "--actor.model_name_or_path")


def _shape(config: RLConfig, path: str, flag: str, *, trains: bool = True) -> ModelShape:
    """Of a model on GPUs."""
    settings = load_settings(config, torch.device("cuda"), flag=flag, trains=trains)
    with reading_model(path, flag=flag):
        model = policy_skeleton(path, settings).model
    found = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad and trains),
        "element_bytes": settings.dtype.itemsize,
        "stored": NF4 if config.ds.load_in_4bit else 1.0,
    }
    tower = settings.images and not config.actor.freeze_visual_encoder
    return shape_of(model.config, with_tower=tower, **found)


def shape_of(model_config: Any, *, with_tower: bool = False, **found: Any) -> ModelShape:
    """`model_config`: Hugging Face's. `found`: the fields that it does not tell. `with_tower`: which is trained."""
    text = model_config.get_text_config()
    hidden, layers = text.hidden_size, text.num_hidden_layers
    heads = getattr(text, "num_attention_heads", None) or 1
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    per_layer = 2 * kv_heads * (getattr(text, "head_dim", None) or hidden // heads)
    if (latent := getattr(text, "kv_lora_rank", None)) is not None:  # multi-head latent attention, not cut by heads
        kv_heads, per_layer = 1, latent + getattr(text, "qk_rope_head_dim", 0)
    return ModelShape(
        layers=layers,
        hidden=hidden,
        intermediate=_intermediate(text),
        vocabulary=text.vocab_size,
        cache_numbers=layers * per_layer,
        kv_heads=kv_heads,
        image_numbers=_tower_numbers(model_config.vision_config) if with_tower and has_vision(model_config) else 0,
        **found,
    )


def _intermediate(text: Any) -> int:
    dense = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    routes = route_shape(text)
    if routes is None:
        return dense
    expert = getattr(text, "moe_intermediate_size", None) or dense
    shared = getattr(text, "shared_expert_intermediate_size", None) or 0
    shared = shared or (getattr(text, "n_shared_experts", None) or 0) * expert
    return routes.per_token * (expert + text.hidden_size // 2) + shared


def _tower_numbers(vision: Any) -> int:
    """All patches of a token, in all layers; families agree on no name."""
    hidden = getattr(vision, "embed_dim", None) or vision.hidden_size
    layers = getattr(vision, "depth", None) or vision.num_hidden_layers
    intermediate = getattr(vision, "intermediate_size", None) or 4 * hidden
    patches = (getattr(vision, "spatial_merge_size", None) or 1) ** 2
    return int(patches * layers * (6.6 * hidden + 3 * intermediate))
