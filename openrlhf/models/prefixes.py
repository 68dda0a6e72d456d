"""Sequences that begin alike compute their beginning once: the samples of a prompt share its forward and backward.

    given     P Q a b | P Q c | P Q d e         shared_prefixes 0 2 2
    computed  P Q | c | a b | d e               attention: c sees P Q c, b sees P Q a b

The hidden state of a token depends on the tokens before it alone, so the first two of each sequence are the same
numbers; the gradients that reach them add up. Everything but attention is per token and does not notice. With n
samples of a prompt of p tokens and responses of t, the body works on p + n·t tokens instead of n·(p + t).

Shapes: T tokens of the given stream, U of the computed one, K keys, R prefixes, n sequences of a group, p prefix
length, t tail length, H heads, D head dimension.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from openrlhf.models import attention_kernels as kernels
from openrlhf.models.packed import StreamAttention, StreamPart, attend_rows
from openrlhf.types import PackedTokens, moved


class SharedStream(NamedTuple):
    tokens: PackedTokens
    """The computed stream: prefixes, then tails, equal lengths side by side."""
    back_T: Tensor
    """int64 [T]: `column_U[back_T]` gives every token of the given stream its entry."""
    plan: PrefixAttention


class _Part(NamedTuple):
    """One sequence of the computed stream: a prefix, or the rest of a sequence after its prefix."""

    prefix: int
    """The index of the prefix before it; -1: it has none, or is a prefix itself."""
    prefix_length: int
    start: int
    """The position of its first token in the given stream."""
    length: int


def share_prefixes(tokens: PackedTokens) -> SharedStream | None:
    """The stream with every shared beginning once; None when nothing is shared."""
    if not any(tokens.shared_prefixes):
        return None
    bounds = tokens.cu_seqlens.tolist()
    prefixes, tails, owner = _cut(bounds, tokens.shared_prefixes)
    # Prefixes come first, because tails attend to their keys. Both are sorted by length: parts of equal length are then
    # adjacent, and off CUDA their attention is one call.
    prefix_order = sorted(range(len(prefixes)), key=lambda r: prefixes[r].length)
    place = {old: new for new, old in enumerate(prefix_order)}
    tail_order = sorted(range(len(tails)), key=lambda i: (tails[i].prefix_length, tails[i].length))
    parts = [prefixes[r] for r in prefix_order]
    parts += [tails[i]._replace(prefix=place.get(tails[i].prefix, -1)) for i in tail_order]

    starts = [0, *itertools.accumulate(part.length for part in parts)]
    tail_place = {old: len(prefixes) + new for new, old in enumerate(tail_order)}
    back = []  # for each token of the given stream, in its order, the position in the computed one
    for i, tail in enumerate(tails):
        if owner[i] >= 0:
            begin = starts[place[owner[i]]]
            back.append(torch.arange(begin, begin + tail.prefix_length))
        begin = starts[tail_place[i]]
        back.append(torch.arange(begin, begin + tail.length))
    device = tokens.token_ids.device
    back_T = moved(torch.cat(back), device)
    given_U = moved(torch.cat([torch.arange(part.start, part.start + part.length) for part in parts]), device)
    stream = tokens.at(
        given_U,
        cu_seqlens=torch.tensor(starts, dtype=torch.int32),
        action_positions=back_T[tokens.action_positions].sort().values,
        max_seqlen=max(part.length for part in parts),
        shared_prefixes=(),
    )
    return SharedStream(stream, back_T, PrefixAttention(parts, starts, device=device))


def _cut(bounds: list[int], shared: tuple[int, ...]) -> tuple[list[_Part], list[_Part], list[int]]:
    """The prefixes and tails of the given stream, and the index of the prefix of each sequence (-1: none).

    `shared[i]` is what sequence i has in common with the sequence before it. So a prefix belongs to a run: a sequence
    and those after it that share the same number of tokens with their predecessor. Sharing within a run is enough,
    because the samples of a prompt are adjacent and share exactly the prompt.
    """
    prefixes: list[_Part] = []
    tails: list[_Part] = []
    owner: list[int] = []
    N = len(bounds) - 1
    for i in range(N):
        joins = shared[i] > 0 and i > 0 and owner[i - 1] >= 0 and prefixes[owner[i - 1]].length == shared[i]
        if joins:  # the run goes on: same prefix as the sequence before
            owner.append(owner[i - 1])
        elif i + 1 < N and shared[i + 1] > 0:
            # The first sequence of a run. Only its successor knows how long the prefix is. If sequence i shares another
            # number of tokens with its own predecessor, that sharing is given up: a token can be in one prefix only.
            owner.append(len(prefixes))
            prefixes.append(_Part(-1, 0, bounds[i], shared[i + 1]))
        else:
            owner.append(-1)
        p = prefixes[owner[i]].length if owner[i] >= 0 else 0
        tails.append(_Part(owner[i], p, bounds[i] + p, bounds[i + 1] - bounds[i] - p))
    return prefixes, tails, owner


@dataclass(frozen=True, slots=True)
class _Group:
    """Neighbouring parts of the same prefix and own length."""

    count: int
    prefix_length: int
    length: int
    prefixes: Tensor | None
    """int64 [n]: each part's prefix, counted among those of this length; None without one."""

    @property
    def tokens(self) -> int:
        return self.count * self.length


class PrefixAttention(StreamAttention):
    """Causal attention of each part to its prefix and itself. Holds no state between calls."""

    def __init__(self, parts: list[_Part], starts: list[int], *, device: torch.device) -> None:
        self._parts = parts
        self._starts = starts
        self._device = device
        self.longest = max(part.prefix_length + part.length for part in parts)
        self._groups: list[_Group] | None = None
        self._keys: _Keys | None = None

    def parts(self) -> list[StreamPart]:
        return [
            StreamPart(start, part.length)
            if part.prefix < 0
            else StreamPart(start, part.length, self._starts[part.prefix], part.prefix_length)
            for part, start in zip(self._parts, self._starts, strict=False)  # the last start is the stream's end
        ]

    def _on_gpu(
        self,
        module: nn.Module,
        q_UHD: Tensor,
        k_UHD: Tensor,
        v_UHD: Tensor,
        *,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        """Keys and values are laid out per part, prefix first; queries stay as they are."""
        keys = self._keys = self._keys or _Keys.of(self._parts, self._starts, device=self._device)
        return kernels.flash(
            q_UHD,
            k_UHD.index_select(0, keys.positions_K),
            v_UHD.index_select(0, keys.positions_K),
            cu_queries=keys.cu_queries,
            cu_keys=keys.cu_keys,
            longest_query=keys.longest_query,
            longest_key=keys.longest_key,
            scaling=scaling,
            window=window,
            kept=self.kept,
            module=module,
        )

    def _grouped(
        self,
        module: nn.Module,
        q_UHD: Tensor,
        k_UHD: Tensor,
        v_UHD: Tensor,
        *,
        scaling: float,
        window: int | None,
        dropout: float,
    ) -> Tensor:
        groups = self._groups = self._groups or _group(self._parts, device=self._device)
        sizes = [group.tokens for group in groups]
        prefixes: dict[int, tuple[Tensor, Tensor]] = {}
        outputs = []
        streams = zip(groups, q_UHD.split(sizes), k_UHD.split(sizes), v_UHD.split(sizes), strict=True)
        for index, (group, *qkv) in enumerate(streams):
            q, k, v = (x.unflatten(0, (group.count, group.length)).transpose(1, 2) for x in qkv)
            if group.prefixes is not None:
                before_k, before_v = prefixes[group.prefix_length]
                k = torch.cat([before_k.index_select(0, group.prefixes), k], dim=2)
                v = torch.cat([before_v.index_select(0, group.prefixes), v], dim=2)
            elif group.length not in prefixes:  # prefixes stand first, so a later group of this length is of tails
                prefixes[group.length] = (k, v)
            out_nHtD = attend_rows(
                q, k, v, scaling=scaling, window=window, dropout=dropout, kept=self.kept, slot=(module, index)
            )
            outputs.append(out_nHtD.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs)


def _shape(part: _Part) -> tuple[bool, int, int]:
    return part.prefix >= 0, part.prefix_length, part.length


def _group(parts: list[_Part], *, device: torch.device) -> list[_Group]:
    groups: list[_Group] = []
    first_of_length: dict[int, int] = {}
    seen = 0
    for (prefixed, prefix_length, length), run in itertools.groupby(parts, key=_shape):
        members = list(run)
        rows = None
        if prefixed:
            rows = torch.tensor([m.prefix - first_of_length[prefix_length] for m in members], device=device)
        else:
            first_of_length.setdefault(length, seen)
        groups.append(_Group(len(members), prefix_length, length, rows))
        seen += len(members)
    return groups


class _Keys(NamedTuple):
    """The positions of each part's keys, for the varlen kernel."""

    positions_K: Tensor
    cu_queries: Tensor
    cu_keys: Tensor
    longest_query: int
    longest_key: int

    @staticmethod
    def of(parts: list[_Part], starts: list[int], *, device: torch.device) -> _Keys:
        positions, lengths = [], []
        for part, start in zip(parts, starts, strict=False):
            if part.prefix >= 0:
                begin = starts[part.prefix]
                positions.append(torch.arange(begin, begin + part.prefix_length))
            positions.append(torch.arange(start, start + part.length))
            lengths.append(part.prefix_length + part.length)
        return _Keys(
            moved(torch.cat(positions), device),
            moved(torch.tensor(starts, dtype=torch.int32), device),
            moved(torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32), device),
            max(part.length for part in parts),
            max(lengths),
        )
