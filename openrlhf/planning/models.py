"""Models as a plan sees them: figures from which memory, arithmetic and traffic follow. No weight is loaded.

A folder, or a Hub name in the cache, is read as a run reads it, on the meta device. The shapes of `KNOWN` are planned
with where no such folder is here: their configuration is a small dictionary.
"""

from __future__ import annotations

import json
import logging
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf.models.loading import LoadSettings, policy_skeleton
from openrlhf.models.routes import route_shape
from openrlhf.runs.device_memory import ModelShape
from openrlhf.runs.engine_memory import NF4, shape_of
from openrlhf.runs.preflight import reading_model


def _dense(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, *, kind: str = "qwen2", **more: Any
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 151_936,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": False,
        **more,
    }


def _mixture(hidden: int, expert: int, layers: int, heads: int, experts: int, per_token: int) -> dict[str, Any]:
    more: dict[str, Any] = {
        "head_dim": 128,
        "moe_intermediate_size": expert,
        "num_experts": experts,
        "num_experts_per_tok": per_token,
        "max_position_embeddings": 40_960,
    }
    return _dense(hidden, 3 * hidden, layers, heads, 4, kind="qwen3_moe", **more)


_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_QWEN3: dict[str, Any] = {"kind": "qwen3", "head_dim": 128, "max_position_embeddings": 40_960}
_LLAMA: dict[str, Any] = {"kind": "llama", "vocab_size": 128_256, "max_position_embeddings": 131_072}
_LARGE: dict[str, Any] = {"vocab_size": 152_064}

KNOWN: Mapping[str, Mapping[str, Any]] = {
    "SmolLM2-135M": _dense(576, 1536, 30, 9, 3, kind="llama", vocab_size=49_152, max_position_embeddings=8192, **_TIED),
    "Qwen2.5-0.5B": _dense(896, 4864, 24, 14, 2, **_TIED),
    "Qwen2.5-1.5B": _dense(1536, 8960, 28, 12, 2, **_TIED),
    "Qwen2.5-3B": _dense(2048, 11_008, 36, 16, 2, **_TIED),
    "Qwen2.5-7B": _dense(3584, 18_944, 28, 28, 4, **_LARGE),
    "Qwen2.5-14B": _dense(5120, 13_824, 48, 40, 8, **_LARGE),
    "Qwen2.5-32B": _dense(5120, 27_648, 64, 40, 8, **_LARGE),
    "Qwen2.5-72B": _dense(8192, 29_568, 80, 64, 8, **_LARGE),
    "Qwen3-0.6B": _dense(1024, 3072, 28, 16, 8, **_QWEN3, **_TIED),
    "Qwen3-1.7B": _dense(2048, 6144, 28, 16, 8, **_QWEN3, **_TIED),
    "Qwen3-4B": _dense(2560, 9728, 36, 32, 8, **_QWEN3, **_TIED),
    "Qwen3-8B": _dense(4096, 12_288, 36, 32, 8, **_QWEN3),
    "Qwen3-14B": _dense(5120, 17_408, 40, 40, 8, **_QWEN3),
    "Qwen3-32B": _dense(5120, 25_600, 64, 64, 8, **_QWEN3),
    "Qwen3-30B-A3B": _mixture(2048, 768, 48, 32, 128, 8),
    "Qwen3-235B-A22B": _mixture(4096, 1536, 94, 64, 128, 8),
    "Llama-3.2-1B": _dense(2048, 8192, 16, 32, 8, **_LLAMA, **_TIED),
    "Llama-3.2-3B": _dense(3072, 8192, 28, 24, 8, **_LLAMA, **_TIED),
    "Llama-3.1-8B": _dense(4096, 14_336, 32, 32, 8, **_LLAMA),
    "Llama-3.1-70B": _dense(8192, 28_672, 80, 64, 8, **_LLAMA),
    "Llama-3.3-70B": _dense(8192, 28_672, 80, 64, 8, **_LLAMA),
}
"""Name → its configuration. `org/NAME`, `NAME-Instruct` and other endings are the same shape."""


def known_config(path: str) -> Mapping[str, Any] | None:
    """The configuration of a model that is named like one of `KNOWN`; the longest name counts."""
    name = path.rstrip("/").rpartition("/")[2].lower()
    name = name.removeprefix("meta-").removesuffix("-hf")
    found = [known for known in KNOWN if name == known.lower() or name.startswith(known.lower() + "-")]
    return KNOWN[max(found, key=len)] if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    shape: ModelShape
    matrices: int
    """Parameters that a token is multiplied with in the layers: of a mixture, those of its own experts."""
    head: int
    """Those of the output head."""
    attention_width: int
    """Numbers of a token's queries in a layer: heads × their size."""
    heads: int
    expert_parameters: int
    """Of all experts of a mixture; 0: it is none."""
    expert_share: float
    """Of them, those that one token goes to."""
    positions: int | None
    """That the model was made for."""
    assumed: bool = False
    """The shape is that of the table, because the model is not here."""

    @property
    def is_mixture(self) -> bool:
        return self.expert_parameters > 0

    @property
    def is_adapter(self) -> bool:
        return 0 < self.shape.trained < self.shape.parameters // 2


def read_model(path: str, settings: LoadSettings, *, four_bit: bool = False, with_tower: bool = False) -> PlannedModel:
    """Raises ModelLoadError where neither a folder, nor the Hub's cache, nor the table has it."""
    config = None if Path(path).expanduser().exists() else known_config(path)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")  # libraries warn of what loading weights would do
        logging.disable(logging.WARNING)
        try:
            if config is not None:
                (Path(folder) / "config.json").write_text(json.dumps(config))
                model = policy_skeleton(folder, settings).model
            else:
                with reading_model(path, flag=settings.flag):
                    model = policy_skeleton(path, settings).model
        finally:
            logging.disable(logging.NOTSET)
    return _planned(model, settings, four_bit=four_bit, with_tower=with_tower, assumed=config is not None)


def _planned(model: Any, settings: LoadSettings, *, four_bit: bool, with_tower: bool, assumed: bool) -> PlannedModel:
    parameters = dict(model.named_parameters())
    shape = shape_of(
        model.config,
        with_tower=with_tower,
        parameters=sum(p.numel() for p in parameters.values()),
        trained=sum(p.numel() for p in parameters.values() if p.requires_grad and settings.trains),
        element_bytes=settings.dtype.itemsize,
        stored=NF4 if four_bit else 1.0,
    )
    text = model.config.get_text_config()
    routes = route_shape(text)
    head = text.vocab_size * text.hidden_size
    in_layers = {name: p for name, p in parameters.items() if ".layers." in name and p.dim() > 1}
    matrices = sum(p.numel() for p in in_layers.values())
    in_experts, share = 0, 1.0
    if routes is not None:
        in_experts = sum(p.numel() for name, p in in_layers.items() if ".experts." in name)
        share = routes.per_token / routes.experts
        matrices -= in_experts - int(in_experts * share)
    heads = getattr(text, "num_attention_heads", None) or 1
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    positions = getattr(text, "max_position_embeddings", None)
    return PlannedModel(
        shape=shape,
        matrices=matrices,
        head=head,
        attention_width=heads * head_dim,
        heads=heads,
        expert_parameters=in_experts,
        expert_share=share,
        positions=positions if isinstance(positions, int) else None,
        assumed=assumed,
    )
