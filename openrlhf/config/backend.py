"""How models are held and computed: dtype, attention, ZeRO, parallelism, LoRA (the `ds` section)."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from openrlhf.config.fields import Flag

DEEPSPEED = "train.backend=deepspeed train.launcher=ray"
"""Condition of what plain torch does not do. Supervised commands have the first flag, RL the second."""


@dataclass(frozen=True, kw_only=True)
class DTypeSection:
    param_dtype: Annotated[
        Literal["auto", "bf16", "fp16", "fp32"],
        Flag("dtype of computation; auto: bf16 on a GPU, fp32 on CPU", flat="param_dtype data_type"),
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class InferenceBackendSection(DTypeSection):
    attn_implementation: Annotated[
        str, Flag("attention; our packed one stands in where this is not installed", flat="attn_implementation")
    ] = "flash_attention_2"
    experts_implementation: Annotated[
        Literal["eager", "batched_mm", "grouped_mm", "deepgemm"] | None, Flag("kernel of mixture-of-experts layers")
    ] = None
    load_in_4bit: Annotated[bool, Flag("hold frozen weights in 4 bits (NF4)", flat="load_in_4bit")] = False
    packing_samples: Annotated[
        bool,
        Flag("accepted; batches are always packed", flat="packing_samples", no_effect="batches are always packed"),
    ] = False


@dataclass(frozen=True, kw_only=True)
class LigerSection:
    use_liger_kernel: Annotated[bool, Flag("Liger kernels", flat="use_liger_kernel use_linger_kernel")] = False


@dataclass(frozen=True, kw_only=True)
class ValueHeadSection:
    value_head_prefix: Annotated[
        str,
        Flag(
            "name of the scalar head; one stored with the model wins",
            flat="value_head_prefix head_prefix value_prefix_head",
            only_with="uses_critic|uses_reward_model",
        ),
    ] = "score"


@dataclass(frozen=True, kw_only=True)
class LoraSection:
    rank: Annotated[int, Flag("LoRA rank; 0 = train all weights", flat="lora_rank", at_least=0)] = 0
    alpha: Annotated[int, Flag("LoRA alpha", flat="lora_alpha", only_with=".rank", above=0)] = 16
    target_modules: Annotated[
        tuple[str, ...], Flag("modules that get an adapter", flat="target_modules", only_with=".rank")
    ] = ("all-linear",)
    dropout: Annotated[float, Flag("LoRA dropout", flat="lora_dropout", only_with=".rank", within=(0, 1))] = 0.0


@dataclass(frozen=True, kw_only=True)
class BackendSection(InferenceBackendSection):
    zero_stage: Annotated[
        int, Flag("ZeRO stage of trained models", flat="zero_stage", only_with=DEEPSPEED, within=(0, 3))
    ] = 2
    zpg: Annotated[
        int, Flag("ZeRO++ partition size (stage 3)", flat="zpg", only_with=f"{DEEPSPEED} .zero_stage=3", above=0)
    ] = 1
    adam_offload: Annotated[bool, Flag("optimizer state in CPU memory", flat="adam_offload", only_with=DEEPSPEED)] = (
        False
    )
    grad_accum_dtype: Annotated[
        Literal["bf16", "fp16", "fp32"] | None,
        Flag(
            "dtype gradients are summed in: fp32 (if unset), or that of 16-bit weights",
            flat="grad_accum_dtype",
            synonyms=(
                ("bfloat16", "bf16"),
                ("float16", "fp16"),
                ("half", "fp16"),
                ("float32", "fp32"),
                ("float", "fp32"),
            ),
            only_with=".param_dtype!=fp32",
        ),
    ] = None
    overlap_comm: Annotated[
        bool, Flag("overlap reduction of gradients with backward", flat="overlap_comm", only_with=DEEPSPEED)
    ] = False
    deepcompile: Annotated[bool, Flag("compile the layers of models", flat="deepcompile torch_compile")] = False
    tensor_parallel_size: Annotated[
        int, Flag("devices that share one layer", flat="ds_tensor_parallel_size", above=0)
    ] = 1
    ring_attn_size: Annotated[int, Flag("devices that share one sequence", flat="ring_attn_size", above=0)] = 1
    ring_attn_head_stride: Annotated[
        int,
        Flag(
            "key/value heads per step of a ring (where the size does not divide the heads)",
            flat="ring_head_stride",
            only_with=".ring_attn_size!=1",
            above=0,
        ),
    ] = 1
    use_universal_ckpt: Annotated[
        bool, Flag("read a DeepSpeed universal checkpoint", flat="use_ds_universal_ckpt universal_ckpt")
    ] = False
    lora: LoraSection = field(default=LoraSection())

    @property
    def ranks_per_share(self) -> int:
        """Neighbouring ranks that compute every sample together, and so have the same share of the samples."""
        return self.tensor_parallel_size * self.ring_attn_size

    @property
    def share_in_flags(self) -> str:
        """The flags that say `ranks_per_share`, as a user would write them."""
        sizes = {
            "--ds.tensor_parallel_size": self.tensor_parallel_size,
            "--ds.ring_attn_size": self.ring_attn_size,
        }
        return " × ".join(f"{flag} {size}" for flag, size in sizes.items() if size > 1)


def undivided_group(share_in_flags: str, ranks_per_share: int, *, role: str, workers: int) -> str | None:
    """Why the workers of a model cannot be divided into shares, for an error message; None: they can."""
    if workers % ranks_per_share == 0:
        return None
    return (
        f"{share_in_flags}: the {role} model has {workers} workers (--{role}.num_nodes × --{role}.num_gpus_per_node), "
        f"which cannot be divided into groups of {ranks_per_share}; make it a multiple"
    )


@dataclass(frozen=True, kw_only=True)
class CausalBackendSection(LigerSection, BackendSection):
    """SFT and DPO."""


@dataclass(frozen=True, kw_only=True)
class RMBackendSection(ValueHeadSection, BackendSection):
    """Reward-model training."""


@dataclass(frozen=True, kw_only=True)
class RLBackendSection(LigerSection, ValueHeadSection, BackendSection):
    enable_sleep: Annotated[
        bool,
        Flag(
            "optimizer state leaves the device between phases",
            flat="deepspeed_enable_sleep",
            only_with="!train.async_enable train.colocate_all|train.launcher=local",
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class ServeBackendSection(ValueHeadSection, InferenceBackendSection):
    """The reward server."""
