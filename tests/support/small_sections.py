"""Sections of the configuration as tests want them: few words, a constant learning rate, fp32 on the CPU."""

import torch

from openrlhf.config.backend import LoraSection, RLBackendSection
from openrlhf.config.models import TrainedModelSection
from openrlhf.config.training import AdamSection, MuonSection, OptimizerSection
from openrlhf.models.loading import LoadSettings

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def optimizer(
    *, muon: MuonSection | None = None, max_norm=1.0, scheduler="constant", warmup_ratio=0.0, min_lr_ratio=0.1, **adam
) -> OptimizerSection:
    """AdamW with these fields (`lr`, `weight_decay` …); with `muon` also Muon."""
    return OptimizerSection(
        optim="adam" if muon is None else "muon",
        adam=AdamSection(**adam),
        muon=muon or MuonSection(),
        max_norm=max_norm,
        lr_scheduler=scheduler,
        lr_warmup_ratio=warmup_ratio,
        min_lr_ratio=min_lr_ratio,
    )


def loading(
    *,
    dtype: torch.dtype = torch.float32,
    device="cpu",
    lora: LoraSection | None = None,
    seed: int = 0,
    gradient_checkpointing: bool = False,
    gradient_checkpointing_reentrant: bool = False,
    trust_remote_code: bool = False,
    flag: str = "--actor.model_name_or_path",
    **ds,
) -> LoadSettings:
    """How a model is loaded for training; `ds`: fields of the section of that name."""
    model = TrainedModelSection(
        trust_remote_code=trust_remote_code,
        gradient_checkpointing_enable=gradient_checkpointing,
        gradient_checkpointing_reentrant=gradient_checkpointing_reentrant,
    )
    section = RLBackendSection(param_dtype=NAMES[dtype], lora=lora or LoraSection(), **ds)
    return LoadSettings(device=device, ds=section, model=model, trains=True, seed=seed, flag=flag)
