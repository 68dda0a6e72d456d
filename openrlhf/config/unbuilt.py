"""What the flags promise and this version does not do yet. Building a feature means deleting its entry here.

Every flag parses and prints; a run that one of these entries would change is refused before it starts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from openrlhf.config.errors import NotBuiltError
from openrlhf.config.roots import Config, DPOConfig, LoraCombinerConfig, RLConfig, RMConfig, ServeRMConfig, SFTConfig


@dataclass(frozen=True, slots=True)
class Unbuilt:
    """One missing feature."""

    flags: str
    """The flag or flags that ask for it, as the user would write them."""
    asked: Callable[[Any], bool]
    """Whether this configuration would be changed by it."""
    missing: str
    remedy: str


def _whole_command(name: str, remedy: str) -> tuple[Unbuilt, ...]:
    return (Unbuilt(name, lambda _: True, "this command parses its flags but does not run yet", remedy),)


FOUR_BIT = Unbuilt("--ds.load_in_4bit", lambda c: c.ds.load_in_4bit, "4-bit weights", "leave it out")
EXPERTS = Unbuilt(
    "--ds.experts_implementation",
    lambda c: c.ds.experts_implementation is not None,
    "the choice of expert kernels",
    "leave it out",
)
MODELSCOPE = Unbuilt("--use_ms", lambda c: c.use_ms, "ModelScope", "name a local folder or a Hugging Face model")


def _aux_loss(section: str) -> Unbuilt:
    return Unbuilt(
        f"--{section}.aux_loss_coef",
        lambda c: getattr(c, section).aux_loss_coef != 0,
        "the load-balancing loss",
        "leave it out",
    )


LIGER = Unbuilt("--ds.use_liger_kernel", lambda c: c.ds.use_liger_kernel, "Liger kernels", "leave it out")

TRAINERS: tuple[Unbuilt, ...] = (
    Unbuilt("--ds.param_dtype fp16", lambda c: c.ds.param_dtype == "fp16", "loss scaling for fp16", "use bf16 or fp32"),
    Unbuilt("--ds.lora.rank", lambda c: c.ds.lora.rank > 0, "LoRA", "leave it out"),
    FOUR_BIT,
    Unbuilt("--ds.deepcompile", lambda c: c.ds.deepcompile, "compilation", "leave it out"),
    EXPERTS,
    Unbuilt(
        "--ds.grad_accum_dtype",
        lambda c: c.ds.grad_accum_dtype not in (None, "fp32"),
        "gradients summed in less than fp32",
        "leave it out",
    ),
    Unbuilt("--ds.tensor_parallel_size", lambda c: c.ds.tensor_parallel_size > 1, "tensor parallelism", "leave it out"),
    Unbuilt("--ds.ring_attn_size", lambda c: c.ds.ring_attn_size > 1, "ring attention", "leave it out"),
    Unbuilt("--ds.use_universal_ckpt", lambda c: c.ds.use_universal_ckpt, "universal checkpoints", "leave it out"),
    MODELSCOPE,
)
"""What no trainer has."""

SUPERVISED = (_aux_loss("model"), *TRAINERS)

RL: tuple[Unbuilt, ...] = (
    _aux_loss("actor"),
    LIGER,
    *TRAINERS,
    Unbuilt(
        "--reward.offload",
        lambda c: c.uses_reward_model and c.reward.offload,
        "a reward model that waits in CPU memory",
        "leave it out",
    ),
    Unbuilt("--train.async_enable", lambda c: c.train.async_enable, "asynchronous training", "leave it out"),
    Unbuilt(
        "--train.partial_rollout_enable",
        lambda c: c.train.partial_rollout_enable,
        "partial rollouts",
        "leave it out",
    ),
    Unbuilt("--train.launcher ray", lambda c: c.train.launcher == "ray", "the Ray launcher", "use local"),
    Unbuilt("--vllm.num_engines", lambda c: bool(c.vllm.num_engines), "vLLM engines", "give 0 for the embedded engine"),
    Unbuilt("--data.max_images_per_prompt", lambda c: c.data.max_images_per_prompt > 0, "images", "leave it out"),
    Unbuilt("--actor.freeze_visual_encoder", lambda c: c.actor.freeze_visual_encoder, "images", "leave it out"),
)

UNBUILT: dict[type, tuple[Unbuilt, ...]] = {
    RLConfig: RL,
    SFTConfig: (LIGER, *SUPERVISED),
    RMConfig: SUPERVISED,
    DPOConfig: (LIGER, *SUPERVISED),
    ServeRMConfig: (FOUR_BIT, EXPERTS, MODELSCOPE),
    LoraCombinerConfig: _whole_command("lora_combiner", "merge with peft's merge_and_unload"),
}


def refuse_unbuilt(config: Config) -> None:
    """Raise `NotBuiltError` listing every feature this run asks for and this version lacks."""
    missing = [entry for entry in UNBUILT[type(config)] if entry.asked(config)]
    if missing:
        lines = [f"{entry.flags}: not built yet ({entry.missing}); {entry.remedy}" for entry in missing]
        raise NotBuiltError("\n".join(lines))
