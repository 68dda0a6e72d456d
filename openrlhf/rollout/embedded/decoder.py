"""One step of all running rows in one packed forward.

    stream   d d d d d d | p p p p p | p p p | e e e    d: the last token of a decoding row, p: tokens of a new prompt,
    logits   * * * * * *           *       *       *    e: of one whose beginning is known; * predictions that are used

The attention plan stores the new keys and values, and then attends. Decoding rows attend to their own history, pool by
pool of the store. New prompts attend to themselves, causally, as in a training forward. Prompts with a known beginning
attend to that beginning and to themselves.

Shapes: T stream tokens, n rows of a pool, H key-value heads, G query heads per key-value head, D head
dimension, L the longest history of the pool, E the most new tokens of a row, R sequences, V vocabulary. Of a mixture: M
decoder layers, K experts of a token, F = M·K.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from openrlhf.models.packed import PackedAttention
from openrlhf.rollout.embedded.images import ImageReader
from openrlhf.rollout.embedded.kv_store import KnownPrefix, KVStore, LayerShape, SlotPool, Tokens
from openrlhf.rollout.embedded.routes import RouteReader
from openrlhf.types import PackedImages, PlacedImage

_MAX_SCORES = 2**24
"""The most attention scores, per head, of one attention call over prompts with a known beginning."""


class Prefill(NamedTuple):
    """A prompt that is read in this step."""

    row: int
    token_ids: np.ndarray
    """int64 [P]: the prompt without its known beginning."""
    siblings: tuple[int, ...] = ()
    """Rows with the same prompt. They get a copy of its keys and values."""
    known: KnownPrefix | None = None
    """The known beginning of the prompt, from `Decoder.recall`."""
    images: tuple[PlacedImage, ...] = ()
    """The images among `token_ids`, and where they are in them."""
    positions_RP: np.ndarray | None = None
    """int64 [R, P]: the positions of `token_ids`, for a model with R rows of positions; None: the next numbers."""
    shift: int = 0
    """The position of the next token, less the number of tokens before it: an image with its many tokens takes few
    positions where a model has several rows of them."""

    @property
    def positions(self) -> np.ndarray:
        """int64 [P] or [R, P]"""
        return np.arange(self.before, self.length) if self.positions_RP is None else self.positions_RP

    @property
    def before(self) -> int:
        return 0 if self.known is None else self.known.length

    @property
    def length(self) -> int:
        """The number of tokens of the whole prompt."""
        return self.before + len(self.token_ids)


class StepLogits(NamedTuple):
    """The predictions of a step, in the decoder's own order of rows."""

    rows: np.ndarray
    """int64 [R]: the row of each line of `logits`. Every running row occurs once."""
    logits: Tensor
    """[R, V]"""


class Decoder(Protocol):
    """Keeps the history of every row and predicts its next token."""

    def step(self, last_tokens: np.ndarray, prefills: Sequence[Prefill]) -> StepLogits:
        """Feed `last_tokens[row]` to every row that is already running, and their prompts to the new rows."""
        ...

    def fork(self, source: int, target: int, *, length: int) -> bool:
        """Start row `target` with the first `length` tokens of row `source`; False when it cannot."""
        ...

    def remove(self, rows: Sequence[int]) -> None:
        """Forget these rows."""
        ...

    def keep(self, histories: Mapping[int, Tokens], *, wanted: Container[int]) -> None:
        """Keep the histories of these rows (row → the tokens that it was fed) after removal, while memory allows.

        `wanted`: numbers of kept histories that must not be dropped for these.
        """
        ...

    def recall(self, prompt: Tokens, *, most: int) -> KnownPrefix | None:
        """The longest kept beginning of a prompt, of at most so many tokens."""
        ...

    def forget(self) -> None:
        """Drop all kept histories and features of images, because the weights have changed."""
        ...

    def clear(self) -> None:
        """Forget everything and give the memory back."""
        ...

    def routes(self, rows: Sequence[int]) -> list[np.ndarray]:
        """[tokens, M, K] of each row: the experts of the tokens that it was fed. Only of a decoder that reads them."""
        ...


class PackedDecoder:
    """`Decoder` for models whose attention implementation is `openrlhf.models.attention.ATTENTION`."""

    def __init__(
        self, model: Any, store: KVStore, images: ImageReader | None = None, routes: RouteReader | None = None
    ) -> None:
        """`images`: None for a model of text. `routes`: None: experts are not read, and not stored."""
        self.model = model
        self.store = store
        self._images = images
        self._routes = routes
        self._shifts = np.zeros(store.max_rows, np.int64)
        """By row, see `Prefill.shift`."""

    def step(self, last_tokens: np.ndarray, prefills: Sequence[Prefill]) -> StepLogits:
        store = self.store
        store.make_room()
        pools = [pool for pool in store.pools if pool.rows]
        # This list is taken before the new rows get their slots below: only rows that run already decode a token.
        decoding = [np.array(pool.rows) for pool in pools]
        # Prompts are sorted by length, because slots are given out in this order. Prompts of equal length then get
        # adjacent slots: their keys are stored in one copy, and on a CPU their attention is one call.
        fresh = sorted((p for p in prefills if p.known is None), key=lambda prefill: prefill.length)
        extended = sorted(
            (p for p in prefills if p.known is not None),
            key=lambda prefill: (store.pool_index(prefill.length), len(prefill.token_ids)),
        )
        prefills = [*fresh, *extended]
        # First all rows that are read in this step, then their siblings, whose slots are filled by a copy afterwards:
        # a sibling between two prompts would leave a gap in the slots that the plan writes.
        for prefill in prefills:
            store.place([prefill.row], length=prefill.length)
        for prefill in prefills:
            store.place(prefill.siblings, length=prefill.length)
        for prefill in extended:
            store.restore(prefill.known, prefill.row)  # type: ignore[arg-type]
        for prefill in prefills:
            self._shifts[[prefill.row, *prefill.siblings]] = prefill.shift

        rows = np.concatenate([*decoding, np.empty(0, np.int64)])
        prompts = [prefill.token_ids for prefill in prefills]
        ends = len(rows) + np.cumsum([len(p) for p in prompts], dtype=np.int64)
        inputs = {
            "token_ids": np.concatenate([last_tokens[rows], *prompts]),
            "position_ids": _end_to_end([store.lengths[rows] + self._shifts[rows], *(p.positions for p in prefills)]),
            "images": PackedImages.of([(), *(p.images for p in prefills)], [len(rows), *map(len, prompts)]),
            "keep": np.concatenate([np.arange(len(rows)), ends - 1]) if prompts else None,
            "plan": DecodePlan(store, pools=pools, decoding=decoding, fresh=fresh, extended=extended),
        }
        logits = self._forward_or_make_room(inputs)
        store.lengths[rows] += 1
        return self._with_siblings(rows, prefills, logits)

    def fork(self, source: int, target: int, *, length: int) -> bool:
        self.store.place([target], length=length)
        self.store.copy(source, [target], length=length)
        self._shifts[target] = self._shifts[source]
        return True

    def remove(self, rows: Sequence[int]) -> None:
        self.store.remove(rows)

    def keep(self, histories: Mapping[int, Tokens], *, wanted: Container[int]) -> None:
        self.store.keep(histories, wanted=wanted)

    def recall(self, prompt: Tokens, *, most: int) -> KnownPrefix | None:
        known = self.store.kept.find(prompt)
        return known._replace(length=min(known.length, most)) if known is not None and most > 0 else None

    def forget(self) -> None:
        self.store.kept.clear()
        if self._images is not None:
            self._images.forget()

    def clear(self) -> None:
        self.store.clear()
        if self._images is not None:
            self._images.clear()

    def routes(self, rows: Sequence[int]) -> list[np.ndarray]:
        return self.store.routes(rows)

    def _forward_or_make_room(self, inputs: dict[str, Any]) -> Tensor:
        """Run the forward; if memory runs out, drop what is kept of finished requests and run it again.

        A second run is safe, because the plan only writes the same keys to the same places once more.
        """
        try:
            return self._forward(**inputs)
        except torch.OutOfMemoryError:
            if not self.store.kept and not self._images:
                raise
        self.store.kept.clear()
        if self._images is not None:
            self._images.clear()
        return self._forward(**inputs)

    def _forward(self, *, plan: DecodePlan, **inputs: Any) -> Tensor:
        if self._routes is None:
            return self._logits({"attention_plan": plan}, **inputs)
        logits = self._logits({"attention_plan": plan, **self._routes.argument()}, **inputs)
        plan.store_routes(self._routes.take())
        return logits

    def _logits(
        self,
        arguments: dict[str, Any],
        *,
        token_ids: np.ndarray,
        position_ids: np.ndarray,
        images: PackedImages | None,
        keep: np.ndarray | None,
    ) -> Tensor:
        """`arguments`: those of the layers."""
        device = self.store.device
        token_ids_T = torch.from_numpy(token_ids).to(device)
        kept = None if keep is None else torch.from_numpy(keep).to(device)
        # [T] → [1, T], [R, T] → [R, 1, T]
        arguments["position_ids"] = torch.from_numpy(position_ids).to(device).unsqueeze(-2)
        arguments["use_cache"] = False
        if images is not None:
            assert self._images is not None, "a model of text gets no images"
            return self._images.forward(token_ids_T, images, keep=kept, **arguments).logits
        output = self.model(input_ids=token_ids_T[None], logits_to_keep=0 if kept is None else kept, **arguments)
        logits = output.logits[0]
        # Models that do not know `logits_to_keep` predict at every position.
        return logits if keep is None or len(logits) == len(keep) else logits[keep]

    def _with_siblings(self, rows: np.ndarray, prefills: Sequence[Prefill], logits: Tensor) -> StepLogits:
        order = [*range(len(rows) + len(prefills))]
        all_rows = [*rows.tolist(), *(prefill.row for prefill in prefills)]
        for index, prefill in enumerate(prefills, start=len(rows)):
            if prefill.siblings:
                self.store.copy(prefill.row, prefill.siblings, length=prefill.length)
                order += [index] * len(prefill.siblings)
                all_rows += prefill.siblings
        if len(order) > len(logits):
            logits = logits[torch.tensor(order, device=logits.device)]
        return StepLogits(np.array(all_rows, dtype=np.int64), logits)


def _end_to_end(positions: Sequence[np.ndarray]) -> np.ndarray:
    """[T]; or [R, T] where some have R rows of positions: the others have the same numbers in each."""
    rows = max((len(part) for part in positions if part.ndim == 2), default=None)
    if rows is None:
        return np.concatenate(positions)
    return np.concatenate([np.broadcast_to(part, (rows, part.shape[-1])) for part in positions], axis=1)


class DecodePlan:
    """The attention of one step. It is made for one forward call, and knows where the keys of each token are stored."""

    def __init__(
        self,
        store: KVStore,
        *,
        pools: Sequence[SlotPool],
        decoding: Sequence[np.ndarray],
        fresh: Sequence[Prefill],
        extended: Sequence[Prefill],
    ) -> None:
        self._parts: list[_PoolPart] = []
        start = 0
        for pool, rows in zip(pools, decoding, strict=True):
            self._parts.append(_PoolPart(pool, store.lengths[rows], start=start, device=store.device))
            start += len(rows)
        self._prompt_start = start
        self._prompt_slots: list[tuple[SlotPool, int, int, int]] = []
        """(pool, first slot, prompts, length) of runs of prompts in adjacent slots of one pool, with equal length."""
        for prefill in fresh:
            pool, slot = store.slot(prefill.row)
            length = prefill.length
            if self._prompt_slots:
                previous, first, count, same = self._prompt_slots[-1]
                if previous is pool and same == length and first + count == slot:
                    self._prompt_slots[-1] = (pool, first, count + 1, length)
                    continue
            self._prompt_slots.append((pool, slot, 1, length))
        self._packed: PackedAttention | None = None
        if fresh:
            lengths = [prefill.length for prefill in fresh]
            bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(store.device)
            self._packed = PackedAttention(bounds, max(lengths))
            start += sum(lengths)
        self._prompt_end = start
        self._extensions: list[_ExtensionPart] = []
        for group in _alike(store, extended):
            self._extensions.append(_ExtensionPart(store, group, start=start))
            start += sum(len(prefill.token_ids) for prefill in group)

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
        dropout: float,
    ) -> Tensor:
        """query [1, Hq, T, D], key and value [1, Hkv, T, D] → [1, T, Hq, D]."""
        layer = cast(int, module.layer_idx)
        q_THD, k_THD, v_THD = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        outputs = [
            part.attend(layer, q_THD, k_THD, v_THD, scaling=scaling, window=sliding_window) for part in self._parts
        ]
        if self._packed is not None:
            part = slice(self._prompt_start, self._prompt_end)
            self._store_prompts(lambda pool: pool.keys[layer], k_THD[part])
            self._store_prompts(lambda pool: pool.values[layer], v_THD[part])
            prompts = self._packed(
                module,
                query[:, :, part],
                key[:, :, part],
                value[:, :, part],
                scaling=scaling,
                sliding_window=sliding_window,
                dropout=0.0,
            )
            outputs.append(prompts.squeeze(0))
        outputs += [
            part.attend(layer, q_THD, k_THD, v_THD, scaling=scaling, window=sliding_window) for part in self._extensions
        ]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(0)

    def store_routes(self, routes_TF: Tensor) -> None:
        """Store the experts of the step's tokens with their keys and values."""
        routes_T1F = routes_TF.unsqueeze(1)
        parts: list[_PoolPart | _ExtensionPart] = [*self._parts, *self._extensions]
        for part in parts:
            part.store(part.pool.routes[0], routes_T1F)
        if self._packed is not None:
            self._store_prompts(lambda pool: pool.routes[0], routes_T1F[self._prompt_start : self._prompt_end])

    def _store_prompts(self, cache: Callable[[SlotPool], Tensor], new_THD: Tensor) -> None:
        start = 0
        for pool, slot, count, length in self._prompt_slots:
            end = start + count * length
            cache(pool)[slot : slot + count, :, :length] = (
                new_THD[start:end].unflatten(0, (count, length)).transpose(1, 2)
            )
            start = end


class _PoolPart:
    """The decoding rows of one pool: stream tokens start … start+n-1 are slots 0 … n-1."""

    def __init__(self, pool: SlotPool, lengths: np.ndarray, *, start: int, device: torch.device) -> None:
        self.pool = pool
        self._stream = slice(start, start + len(lengths))
        self._slots = torch.arange(len(lengths), device=device)
        self._positions = torch.from_numpy(lengths).to(device)
        self._longest = int(lengths.max()) + 1
        self._even = bool((lengths == lengths[0]).all())
        if device.type == "cuda" and not self._even:
            # CUDA's masked attention copies a mask whose rows are not aligned to 16, so the length is rounded up.
            self._longest = min(pool.capacity, -(-self._longest // 16) * 16)
        self._masks: dict[int | None, Tensor | None] = {}

    def attend(
        self, layer: int, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, *, scaling: float, window: int | None
    ) -> Tensor:
        """Store the key and value of each row's token, then attend to the row's whole history → [n, Hq, D]."""
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        self.store(keys, k_THD)
        self.store(values, v_THD)
        n, L, H = len(self._slots), self._longest, keys.shape[1]
        # The G query heads that share a key-value head are passed as G queries: SDPA then reads the keys once, not G
        # times. There is one query per row, so the query dimension is free for this.
        q_nHGD = q_THD[self._stream].unflatten(1, (H, -1))
        out_nHGD = F.scaled_dot_product_attention(
            q_nHGD, keys[:n, :, :L], values[:n, :, :L], attn_mask=self._mask(window, q_THD.dtype), scale=scaling
        )
        return out_nHGD.flatten(1, 2)

    def store(self, cache: Tensor, new_THD: Tensor) -> None:
        """Write what is new of each row's token into a tensor of its pool."""
        cache[self._slots, :, self._positions] = new_THD[self._stream]

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """[n, 1, 1, L]: 0 where a row may attend, -inf elsewhere; None where every row may attend everywhere."""
        if window not in self._masks:
            mask = None
            if not self._even or (window is not None and window < self._longest):
                position = torch.arange(self._longest, device=self._positions.device)
                hidden = position > self._positions[:, None]
                if window is not None:
                    hidden |= position <= self._positions[:, None] - window
                mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
                mask = mask.masked_fill_(hidden, float("-inf"))[:, None, None, :]
            self._masks[window] = mask
        return self._masks[window]


def _alike(store: KVStore, prefills: Sequence[Prefill]) -> list[list[Prefill]]:
    """Group adjacent prompts of one pool, so that padding at most doubles a group's tokens and masks stay small."""
    groups: list[list[Prefill]] = []
    for prefill in prefills:
        pool, _ = store.slot(prefill.row)
        new = len(prefill.token_ids)
        group = groups[-1] if groups else []
        if (
            not group
            or store.slot(group[0].row)[0] is not pool
            or new > 2 * len(group[0].token_ids)
            or (len(group) + 1) * new * pool.capacity > _MAX_SCORES
        ):
            group = []
            groups.append(group)
        group.append(prefill)
    return groups


class _ExtensionPart:
    """Prompts with a known beginning, in adjacent slots of one pool. Their new tokens are padded to E each."""

    def __init__(self, store: KVStore, prefills: Sequence[Prefill], *, start: int) -> None:
        self.pool, self._first = store.slot(prefills[0].row)
        new = np.array([len(prefill.token_ids) for prefill in prefills])
        before = np.array([prefill.before for prefill in prefills])
        row = np.repeat(np.arange(len(new)), new)
        offset = np.arange(len(row)) - np.repeat(np.cumsum(new) - new, new)
        self._stream = slice(start, start + len(row))
        self._row, self._slots, self._offset, self._positions, self._before = (
            torch.from_numpy(x).to(store.device) for x in (row, self._first + row, offset, before[row] + offset, before)
        )
        self._shape = len(new), int(new.max())
        longest = int((before + new).max())
        # As for decoding rows: CUDA's masked attention wants aligned masks.
        self._longest = min(self.pool.capacity, -(-longest // 16) * 16) if store.device.type == "cuda" else longest
        self._masks: dict[int | None, Tensor] = {}

    def attend(
        self, layer: int, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, *, scaling: float, window: int | None
    ) -> Tensor:
        """Store the new keys and values, then let each token attend to all before it → [tokens of this part, Hq, D]."""
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        self.store(keys, k_THD)
        self.store(values, v_THD)
        (n, E), L, H = self._shape, self._longest, keys.shape[1]
        q_nEHD = q_THD.new_zeros(n, E, *q_THD.shape[1:])
        q_nEHD[self._row, self._offset] = q_THD[self._stream]
        q_nHGED = q_nEHD.unflatten(2, (H, -1)).permute(0, 2, 3, 1, 4)
        G = q_nHGED.shape[2]
        slots = slice(self._first, self._first + n)
        out_nHGED = F.scaled_dot_product_attention(
            q_nHGED.flatten(2, 3),
            keys[slots, :, :L],
            values[slots, :, :L],
            attn_mask=self._mask(window, q_THD.dtype, repeat=G),
            scale=scaling,
        ).unflatten(2, (G, E))
        return out_nHGED[self._row, :, :, self._offset].flatten(1, 2)

    def store(self, cache: Tensor, new_THD: Tensor) -> None:
        """Write what is new of each row's tokens into a tensor of their pool."""
        cache[self._slots, :, self._positions] = new_THD[self._stream]

    def _mask(self, window: int | None, dtype: torch.dtype, *, repeat: int) -> Tensor:
        """[n, 1, G·E, L]: 0 where a token may attend, -inf elsewhere."""
        if window not in self._masks:
            E = self._shape[1]
            query_nE1 = (self._before[:, None] + torch.arange(E, device=self._before.device))[:, :, None]
            position = torch.arange(self._longest, device=self._before.device)
            hidden = position > query_nE1
            if window is not None:
                hidden |= position <= query_nE1 - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
            self._masks[window] = mask.repeat(1, repeat, 1)[:, None]
        return self._masks[window]


_TOLERANCE = {torch.float32: 1e-3}
_LOW_PRECISION_TOLERANCE = 5e-2
_ADVICE = "load it with its native attention instead: it then decodes one request at a time"


def packed_decoder(
    model: Any,
    *,
    max_rows: int,
    max_length: int,
    images: ImageReader | None = None,
    routes: RouteReader | None = None,
) -> PackedDecoder:
    """A decoder for `model`, after a check: two short sequences must get the same logits by steps as in one forward.

    Raises ValueError, naming the model, where they do not (for example, where layers have a state of their own).
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

    assert recorder.dtype is not None  # a layer has attended
    store = partial(KVStore, recorder.shapes, dtype=recorder.dtype, device=device)
    probe = PackedDecoder(model, store(max_rows=2, max_length=8))
    probe.step(np.zeros(2, np.int64), [Prefill(0, long[:3]), Prefill(1, short[:1])])
    second = probe.step(np.array([long[3], short[1]]), [])
    third = probe.step(np.array([long[4], short[2]]), [])
    decoded = torch.stack([step.logits[step.rows.tolist().index(row)] for step in (second, third) for row in (0, 1)])
    whole = expected[[3, 6, 4, 7]].float()
    # The median of the four errors is tested, because in low precision a router may send one token to another expert.
    error = ((decoded.float() - whole).norm(dim=-1) / whole.norm(dim=-1)).median().item()
    if not error <= _TOLERANCE.get(recorder.dtype, _LOW_PRECISION_TOLERANCE):
        raise ValueError(
            f"the embedded engine cannot batch {name}: decoded step by step its logits differ by {error:.1e} from one "
            f"forward over the whole sequence; {_ADVICE}"
        )
    shape = None if routes is None else routes.shape
    return PackedDecoder(model, store(max_rows=max_rows, max_length=max_length, routes=shape), images, routes)


class _Recorder:
    """A packed plan that records the shapes of each layer's keys and values."""

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
    """The kind of the rotary embedding, if it depends on the longest position of a forward call; otherwise ""."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {str(entry.get("rope_type")) for entry in (rope, *rope.values()) if isinstance(entry, dict)}
    return next(iter(kinds & {"dynamic", "longrope"}), "")


def _probe_ids(vocab_size: int, count: int) -> np.ndarray:
    """Ids of ordinary tokens, from the middle of the vocabulary: special tokens usually are at its ends."""
    return (np.arange(count) * 7 + vocab_size // 3) % vocab_size


if TYPE_CHECKING:
    from openrlhf.models.attention import AttentionPlan

    _: tuple[type[Decoder], type[AttentionPlan], type[AttentionPlan]] = (PackedDecoder, DecodePlan, _Recorder)
