"""Construction of a packed decoder, with a check that it predicts what the model predicts."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from openrlhf.models.packed import PackedAttention
from openrlhf.rollout.embedded.decoder import PackedDecoder, Prefill
from openrlhf.rollout.embedded.kv_store import KVStore, LayerShape

_TOLERANCE = {torch.float32: 1e-3}
_LOW_PRECISION_TOLERANCE = 5e-2
_ADVICE = "load it with its native attention instead: it then decodes one request at a time"


def packed_decoder(model: Any, *, max_rows: int, max_length: int) -> PackedDecoder:
    """A decoder for `model`, checked: two short sequences decoded by steps must predict what one forward predicts.

    Raises ValueError naming the model when they do not (layers with a state of their own, for instance).
    """
    name = type(model).__name__
    config = model.config.get_text_config()
    if kind := _batch_dependent_rope(config):
        raise ValueError(
            f"the embedded engine cannot batch {name}: its {kind!r} rotary embedding depends on the longest sequence "
            f"of a batch; {_ADVICE}"
        )
    device = next(model.parameters()).device
    long, short = _probe_ids(config.vocab_size, 5), _probe_ids(config.vocab_size, 3)
    recorder = _Recorder(PackedAttention(torch.tensor([0, 5, 8], dtype=torch.int32, device=device), 5))
    expected = model(
        input_ids=torch.from_numpy(np.concatenate([long, short])).to(device)[None],
        position_ids=torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]], device=device),
        attention_plan=recorder,
        use_cache=False,
    ).logits[0]
    if recorder.problem or not recorder.shapes:
        why = recorder.problem or "its layers do not attend by plan"
        raise ValueError(f"the embedded engine cannot batch {name}: {why}; {_ADVICE}")

    store = partial(KVStore, recorder.shapes, dtype=recorder.dtype, device=device)
    probe = PackedDecoder(model, store(max_rows=2, max_length=8))
    probe.step(np.zeros(2, np.int64), [Prefill(0, long[:3]), Prefill(1, short[:1])])
    second = probe.step(np.array([long[3], short[1]]), [])
    third = probe.step(np.array([long[4], short[2]]), [])
    decoded = torch.stack([step.logits[step.rows.tolist().index(row)] for step in (second, third) for row in (0, 1)])
    whole = expected[[3, 6, 4, 7]].float()
    # The median of the four, because in low precision a router may send one token to another expert.
    error = ((decoded.float() - whole).norm(dim=-1) / whole.norm(dim=-1)).median().item()
    if not error <= _TOLERANCE.get(recorder.dtype, _LOW_PRECISION_TOLERANCE):
        raise ValueError(
            f"the embedded engine cannot batch {name}: decoded step by step its logits differ by {error:.1e} from one "
            f"forward over the whole sequence; {_ADVICE}"
        )
    return PackedDecoder(model, store(max_rows=max_rows, max_length=max_length))


class _Recorder:
    """A packed plan that notes what each layer would store."""

    def __init__(self, plan: PackedAttention) -> None:
        self._plan = plan
        self.shapes: dict[int, LayerShape] = {}
        self.dtype: torch.dtype | None = None
        self.problem = ""

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        layer = getattr(module, "layer_idx", None)
        if layer is None or layer in self.shapes:
            self.problem = f"{type(module).__name__} has no layer_idx of its own"
        else:
            self.shapes[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3])
            self.dtype = key.dtype
        return self._plan(module, query, key, value, **kwargs)


def _batch_dependent_rope(config: Any) -> str:
    """The kind of rotary embedding that looks at the longest position of a forward call, or ""."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {entry.get("rope_type") for entry in (rope, *rope.values()) if isinstance(entry, dict)}
    return next(iter(kinds & {"dynamic", "longrope"}), "")


def _probe_ids(vocab_size: int, count: int) -> np.ndarray:
    """Ordinary ids: special ones sit at the ends of a vocabulary, as a rule."""
    return (np.arange(count) * 7 + vocab_size // 3) % vocab_size
