"""The records that stages hand to each other, in the order in which a prompt meets them.

    Prompt → ImageInput → SamplingParams → Generation → StepResult → Segment → Trajectory → Group
           → TrainingSample → TrainingBatch → PackedTokens / PackedBatch (one micro-batch)

Records check themselves when they are made, so that a wrong length fails where it arose, not three stages later.
Records that only one stage uses live in that stage's package.

Shapes: T tokens of one stream, N sequences, A action tokens, G samples of a group, V vocabulary. A token's
column entry describes the token itself: `logprobs[t]` is log π(token t | tokens before t), never that of t + 1.
Routes of a mixture: R tokens, L decoder layers (those without experts have zeros that nobody reads), K experts of a
token. `routes[t]` are the experts that computed token t, so they are part of the log-prob of token t + 1.
Supports: S token ids that sampled tokens were chosen among, those of all tokens one after the other.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class SampleKey(NamedTuple):
    """The origin of a segment. It is unique in the whole run, so that retries and resumed runs can be told apart."""

    prompt: int
    """Ordinal of the prompt in the prompt stream."""
    sample: int
    """The index among the prompt's n samples."""
    segment: int = 0
    """The index among the segments of the episode; 0 unless a client rewrote its history."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One task for the policy, with its template already applied.

    >>> Prompt(ordinal=0, text="2+3=", label="5")
    """

    ordinal: int
    """Position in the endless prompt stream (not in the data set): the identity of this task."""
    text: str
    """The text that the policy reads."""
    label: Any = ""
    """Ground truth for rewards and environments; "" when the data has none."""
    datasource: str = "default"
    """The name under which evaluation reports it."""
    where: str = ""
    """Where it was read, for messages: `record 12 of train.jsonl`."""
    images: tuple[Any, ...] = ()
    """The images that belong to the text, as the data has them (`data.images.read_image`), in the order of their
    placeholders."""
    teacher_ids: tuple[int, ...] = ()
    """The tokens of the prompt that a teacher reads in its place; empty: it reads the same."""

    def __post_init__(self) -> None:
        if self.ordinal < 0:
            raise ValueError(f"prompt ordinal must be >= 0, got {self.ordinal}")
        if not self.text:
            raise ValueError(f"prompt {self.ordinal} is empty")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageInput:
    """One image as a model reads it. The image processor makes it once (`models.image_processor`); engines and trainers
    get the same tensors and never resize, cut or expand an image again."""

    tensors: dict[str, Tensor]
    """The processor's outputs for this image alone, by the names of the model's arguments (`pixel_values`, …)."""
    token_ids: tuple[int, ...]
    """The tokens that stand for the image in a prompt."""
    placeholder: int
    """The token among them that the model replaces by a feature of the image; others say where rows and images end."""
    digest: str
    """Equal for equal tensors and tokens, and for no others: caches trust it."""
    thumbnail: bytes = b""
    """A small PNG of the image, for people."""
    size: tuple[int, int] | None = None
    """Width and height in pixels as the image was given, for people; None: not known."""

    @property
    def num_features(self) -> int:
        return self.token_ids.count(self.placeholder)

    @property
    def is_feature(self) -> Tensor:
        """bool, one for each of its tokens: whether a feature takes the token's place."""
        return torch.tensor(self.token_ids) == self.placeholder

    def __len__(self) -> int:
        """The number of its tokens."""
        return len(self.token_ids)

    def __reduce__(self) -> tuple[Any, ...]:
        """Tensors cross processes as numpy arrays, see `Segment.__reduce__`."""
        arrays = {name: tensor.numpy() for name, tensor in self.tensors.items()}
        rest = {name: getattr(self, name) for name in _PLAIN_IMAGE_FIELDS}
        return _image_from_arrays, (arrays, rest)


_PLAIN_IMAGE_FIELDS = ("token_ids", "placeholder", "digest", "thumbnail", "size")


def _image_from_arrays(arrays: dict[str, Any], rest: dict[str, Any]) -> ImageInput:
    return ImageInput(tensors={name: torch.from_numpy(array) for name, array in arrays.items()}, **rest)


class PlacedImage(NamedTuple):
    """An image in a sequence of tokens."""

    start: int
    """The index of its first token."""
    image: ImageInput

    @property
    def end(self) -> int:
        return self.start + len(self.image)


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """How one generation is sampled. Field names are vLLM's, because users' agents read and write them.

    Mutable for users' sake; whoever passes one on passes a `copy`, which also checks what was assigned since.

    >>> SamplingParams(temperature=0.7, max_tokens=64, stop=["</tool>"])
    """

    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 means no limit."""
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest one are left out."""
    repetition_penalty: float = 1.0
    """Divides the positive logits, and multiplies the negative ones, of tokens in prompt or response."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the response."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time it is in the response."""
    max_tokens: int | None = None
    """None means up to the context limit."""
    min_tokens: int = 0
    """Before this many, nothing but the context limit ends a generation."""
    stop: list[str] = field(default_factory=list)
    """Generation ends when one of these appears in the decoded text; the tokens that spell it are kept."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Generation ends with any of these tokens, which is kept, as with end-of-sequence."""
    ignore_eos: bool = False
    """Whether end-of-sequence is a token like any other."""
    seed: int | None = None
    """Randomness of this request; token i is a function of (seed, i) alone. None: the engine picks one."""
    logprobs: bool | int | None = True
    """Whether the sampled tokens' log-probs are wanted: True, 0 or 1 mean yes (vLLM counts alternatives), None no."""
    supports: int = 0
    """The size of the largest support that is to be told (`Supports`) where top-k, top-p or min-p cut the distribution;
    0: none is. This name is not vLLM's."""
    include_stop_str_in_output: bool = False
    """Whether the text keeps what ended it: the stop string, stop token or end-of-sequence."""
    skip_special_tokens: bool = True
    """Whether the text leaves special tokens out."""
    detokenize: bool = True
    """Whether a text is wanted."""
    n: int = 1
    """This and the fields below are vLLM's too, but have one value here. Any other is refused, not ignored."""
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    structured_outputs: Any = None
    guided_decoding: Any = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        self.stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or ())
        self.stop_token_ids = list(self.stop_token_ids or ())
        self.validate()

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None and self.logprobs is not False

    @property
    def wants_supports(self) -> bool:
        """Whether supports are to be told, and there are some."""
        return self.supports > 0 and self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    def validate(self) -> None:
        """Raises a ValueError that names the first field no generation can be sampled with."""
        for name, (kind, wanted, holds) in _SAMPLING_RULES.items():
            value = getattr(self, name)
            if value is None and wanted.endswith("None"):
                continue
            if not isinstance(value, kind) or isinstance(value, bool) or not holds(value):
                raise ValueError(f"{name} must be {wanted}, got {value!r}")
        if not all(isinstance(text, str) and text for text in self.stop or ()):
            raise ValueError(f"stop must hold strings that are not empty, got {self.stop!r}")
        if not all(isinstance(token, numbers.Integral) and token >= 0 for token in self.stop_token_ids or ()):
            raise ValueError(f"stop_token_ids must hold token ids, got {self.stop_token_ids!r}")
        if self.stop and not self.detokenize:
            raise ValueError("detokenize must be True where stop strings are looked for")
        if self.logprobs not in (None, False, True):
            raise ValueError(f"logprobs must be None, or 0 or 1 for the sampled token's alone, got {self.logprobs!r}")
        for name in _NOT_AVAILABLE:
            if getattr(self, name) not in (None, [], {}):
                raise ValueError(f"{name} is not available here, got {getattr(self, name)!r}")

    def copy(self, **changes: Any) -> SamplingParams:
        return dataclasses.replace(self, **changes)


_LARGEST = 3.4e38
"""Engines compute in float32."""
_SAMPLING_RULES: dict[str, tuple[type, str, Callable[[Any], bool]]] = {
    "temperature": (numbers.Real, ">= 0 and finite", lambda x: 0 <= x <= _LARGEST),
    "top_p": (numbers.Real, "in (0, 1]", lambda x: 0 < x <= 1),
    "top_k": (numbers.Integral, "-1 (no limit) or > 0, in 32 bits", lambda x: x == -1 or 0 < x < 1 << 31),
    "min_p": (numbers.Real, "in [0, 1]", lambda x: 0 <= x <= 1),
    "repetition_penalty": (numbers.Real, "> 0 and finite", lambda x: 0 < x <= _LARGEST),
    "presence_penalty": (numbers.Real, "in [-2, 2]", lambda x: -2 <= x <= 2),
    "frequency_penalty": (numbers.Real, "in [-2, 2]", lambda x: -2 <= x <= 2),
    "max_tokens": (numbers.Integral, ">= 1 or None", lambda x: x >= 1),
    "min_tokens": (numbers.Integral, ">= 0", lambda x: x >= 0),
    "seed": (numbers.Integral, "an integer or None", lambda x: True),
    "supports": (numbers.Integral, ">= 0", lambda x: x >= 0),
    "n": (numbers.Integral, "1 (call n times instead)", lambda x: x == 1),
}
_NOT_AVAILABLE = (
    "prompt_logprobs",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "structured_outputs",
    "guided_decoding",
    "truncate_prompt_tokens",
)


@dataclass(frozen=True, slots=True, eq=False)
class Supports:
    """The tokens that each of A sampled tokens was chosen among, where top-k, top-p or min-p cut its distribution.

    Three tokens; the second one's distribution was whole:

        sizes_A     2 0 3
        token_ids   4 9 1 4 7
    """

    sizes_A: Tensor
    """int32 [A], on the CPU, wherever the ids are. 0: the distribution was whole. `UNTOLD`: it was cut, and what was
    left is too large to be told, or not known."""
    token_ids: Tensor
    """int32 [S]: those of all tokens, one after the other. The sampled token is always among its own."""

    def __post_init__(self) -> None:
        if self.sizes_A.dim() != 1 or self.token_ids.shape != (int(self.sizes_A.clamp(min=0).sum()),):
            raise ValueError(f"{tuple(self.token_ids.shape)} ids for supports of {self.sizes_A.tolist()[:8]} … tokens")

    @staticmethod
    def of(told: Sequence[Sequence[int] | None]) -> Supports:
        """One for each token; an empty one: it was whole; None: untold."""
        sizes_A = torch.tensor([UNTOLD if ids is None else len(ids) for ids in told], dtype=torch.int32)
        return Supports(sizes_A, torch.tensor([token for ids in told for token in ids or ()], dtype=torch.int32))

    @staticmethod
    def joined(parts: Sequence[tuple[Supports | None, int]]) -> Supports | None:
        """Those of parts, one after the other; with each part the number of its tokens, whose distributions were whole
        where it has none. None: no part has any."""
        if all(own is None for own, _ in parts):
            return None
        whole = [own or Supports(torch.zeros(count, dtype=torch.int32), _NO_IDS) for own, count in parts]
        return Supports(torch.cat([own.sizes_A for own in whole]), torch.cat([own.token_ids for own in whole]))

    def __len__(self) -> int:
        return len(self.sizes_A)

    def __getitem__(self, part: slice) -> Supports:
        """Those of tokens that follow one another."""
        ends = self.ends
        start, stop, _ = part.indices(len(self))
        return Supports(self.sizes_A[start:stop], self.token_ids[ends[start] : ends[max(start, stop)]])

    def at(self, indices: Tensor) -> Supports:
        """Those of these tokens, in this order. `indices`: int64, on the CPU."""
        ends = torch.tensor(self.ends)
        sizes = self.sizes_A[indices]
        counts = sizes.clamp(min=0).long()
        inside = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        places = ends[indices].repeat_interleave(counts) + inside
        return Supports(sizes, self.token_ids[moved(places, self.token_ids.device)])

    @property
    def ends(self) -> list[int]:
        """[A+1]: where the ids of each token begin, and the end."""
        return [0, *self.sizes_A.clamp(min=0).cumsum(0).tolist()]

    def tolist(self) -> list[list[int] | None]:
        """As `of` takes them."""
        ids, ends = self.token_ids.tolist(), self.ends
        return [
            None if size == UNTOLD else ids[start:end]
            for size, start, end in zip(self.sizes_A.tolist(), ends[:-1], ends[1:], strict=True)
        ]

    def to(self, device: torch.device | str) -> Supports:
        return Supports(self.sizes_A, moved(self.token_ids, device))

    def __reduce__(self) -> tuple[Any, ...]:
        """As numpy arrays, see `Segment.__reduce__`."""
        return supports_from, (self.sizes_A.numpy(), self.token_ids.numpy())


UNTOLD = -1
_NO_IDS = torch.zeros(0, dtype=torch.int32)


def supports_from(sizes_A: np.ndarray, token_ids: np.ndarray) -> Supports:
    """In memory of their own: what comes from another process may belong to it, and torch warns of that."""
    return Supports(torch.from_numpy(sizes_A.copy()), torch.from_numpy(token_ids.copy()))


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    """End-of-sequence token or a stop string."""
    LENGTH = "length"
    """The token limit."""
    ABORT = "abort"
    """The engine was told to end the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The answer of an engine to one request: the tokens that it sampled, and their log-probs.

    A streamed generation comes in parts of the same form, each with the tokens since the part before.
    """

    token_ids: list[int]
    """Sampled tokens, the end-of-sequence token included."""
    logprobs: list[float] | None
    """log-prob of each sampled token under the distribution it was sampled from; None if not asked for."""
    versions: list[int]
    """Weight version that produced each token."""
    finish_reason: FinishReason | None
    """None for a part that is not the last one."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it; None if something else did."""
    text: str = ""
    """Decoded tokens, in the form the sampling parameters ask for."""
    routes: np.ndarray | None = field(default=None, compare=False)
    """uint8 or int16 [R, L, K]: the experts of each token that the engine has read, prompt and response without the
    last one; those of the last reading, where weights changed in between. Of a streamed generation the last part has
    them. None: the model has no experts, or the engine does not tell."""
    supports: Supports | None = field(default=None, compare=False)
    """What each sampled token was chosen among, at the moment when it was; each part of a streamed generation has those
    of its own tokens. None: nobody asked, or nothing cut the distribution."""
    _outputs: list[CompletionOutput] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        lengths = {"token_ids": len(self.token_ids), "versions": len(self.versions)}
        if self.logprobs is not None:
            lengths["logprobs"] = len(self.logprobs)
        if self.supports is not None:
            lengths["supports"] = len(self.supports)
        if len(set(lengths.values())) != 1:
            raise ValueError(f"a generation's columns must have equal lengths, got {lengths}")
        if self.routes is not None and self.routes.ndim != 3:
            raise ValueError(f"routes must be [R, L, K], got {self.routes.shape}")

    @property
    def outputs(self) -> list[CompletionOutput]:
        """The generation in the form of vLLM's `RequestOutput`, for users' agents: `generation.outputs[0].text`."""
        if not self._outputs:
            self._outputs.append(CompletionOutput(self))
        return self._outputs


class Logprob(NamedTuple):
    """vLLM's record of a token's log-prob; `rank` and `decoded_token` are optional there too."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class CompletionOutput:
    """A `Generation` under the names of vLLM's `CompletionOutput`."""

    index = 0

    def __init__(self, generation: Generation) -> None:
        self.token_ids = generation.token_ids
        self.text = generation.text
        self.finish_reason = generation.finish_reason
        self.stop_reason = generation.stop_reason
        self._logprobs = generation.logprobs

    @functools.cached_property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        """`logprobs[i][token_ids[i]].logprob`"""
        if self._logprobs is None:
            return None
        return [{token: Logprob(value)} for token, value in zip(self.token_ids, self._logprobs, strict=True)]

    @property
    def cumulative_logprob(self) -> float | None:
        return None if self._logprobs is None else sum(self._logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """An environment's answer to one action, parsed from what the user's `step` returned."""

    reward: float
    """The reward of this turn alone."""
    done: bool
    score: float | None = None
    """Success in [0, 1], for filtering and evaluation; None: the sum of rewards so far."""
    feedback: str = ""
    """The text that the policy reads before its next turn."""
    sampling_params: SamplingParams | None = None
    """The sampling parameters of the next turn; None: those of the caller."""
    extra_logs: dict[str, float] = field(default_factory=dict)
    images: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One contiguous token history that the policy read and wrote.

    `agents.recorder.TokenRecorder` is the only code that appends to a history. Elsewhere segments are only read back
    (from a saved file, or from another process) or get their rewards (`Trajectory.with_reward`).

    A two-turn example, a = action, o = observation:

        token_ids         o o o  a a  o o  a a
        action_mask       0 0 0  1 1  0 0  1 1
        rollout_logprobs  0 0 0  p p  0 0  p p
        versions         -1-1-1  7 7 -1-1  8 8
        turn_rewards      0 0 0  0 r  0 0  0 r
        turn_ends         0 0 0  0 1  0 0  0 1
    """

    token_ids: Tensor
    """int64 [T]"""
    action_mask: Tensor
    """bool [T]: True where the policy sampled the token."""
    rollout_logprobs: Tensor | None
    """float32 [T]: log-prob at sampling time, 0 outside actions. None where the engine was not asked for them."""
    versions: Tensor
    """int32 [T]: weight version of each sampled token, -1 outside actions."""
    turn_rewards: Tensor
    """float32 [T]: each turn's reward on the last token of its action, 0 elsewhere."""
    turn_ends: Tensor | None = None
    """bool [T]: True on the last token of each action. None: not recorded, see `turn_ends_A`."""
    images: tuple[PlacedImage, ...] = ()
    """The images among the tokens, in order."""
    routes: Tensor | None = None
    """uint8 or int16 [R, L, K], R <= T: the experts of the first R tokens, as the engine chose them. The others have
    none: no layer of the engine has seen the last token, nor feedback after the last action. None: it does not tell."""
    supports: Supports | None = None
    """What each of its A action tokens was chosen among. None: the distributions were whole, or nobody asked."""

    def __post_init__(self) -> None:
        tokens = self.token_ids.shape
        if len(tokens) != 1 or tokens[0] == 0:
            raise ValueError(f"token_ids must be a non-empty 1-D tensor, got shape {tuple(tokens)}")
        columns = {
            "action_mask": self.action_mask,
            "versions": self.versions,
            "turn_rewards": self.turn_rewards,
            "rollout_logprobs": self.rollout_logprobs,
            "turn_ends": self.turn_ends,
        }
        for name, column in columns.items():
            if column is not None and column.shape != tokens:
                raise ValueError(f"{name} has shape {tuple(column.shape)}, token_ids {tuple(tokens)}")
        if bool(self.action_mask[0]):
            raise ValueError("the first token has nothing before it, so it cannot be an action")
        for start, image in self.images:
            if tuple(self.token_ids[start : start + len(image)].tolist()) != image.token_ids:
                raise ValueError(f"the tokens from {start} on are not those of the image {image.digest}")
        if self.routes is not None and (self.routes.dim() != 3 or len(self.routes) > len(self)):
            raise ValueError(f"routes must be [R, L, K] of at most {len(self)} tokens, got {tuple(self.routes.shape)}")
        if self.supports is not None and len(self.supports) != self.num_actions:
            raise ValueError(f"{len(self.supports)} supports for {self.num_actions} action tokens")

    @property
    def oldest_version(self) -> int | None:
        """The oldest weight version of its actions; None without actions."""
        return int(self.versions[self.action_mask].min()) if bool(self.action_mask.any()) else None

    def __len__(self) -> int:
        return self.token_ids.shape[0]

    def __reduce__(self) -> tuple[Any, ...]:
        """Columns cross processes as numpy arrays: pickle would make an archive of every tensor, which takes 0.9 ms per
        segment instead of 0.06."""
        columns = [getattr(self, name) for name in (*SEGMENT_COLUMNS, "routes")]
        arrays = [None if column is None else column.numpy() for column in columns]
        return _segment_from_arrays, (arrays, self.images, self.supports)

    @property
    def num_actions(self) -> int:
        return int(self.action_mask.sum())

    def reading(self, other: OtherPrompt) -> Segment:
        """The same actions after another prompt. Routes are left out: they were chosen in view of this one."""
        token_ids = torch.tensor(other.token_ids, dtype=torch.int64)
        if torch.equal(self.token_ids[: other.replaces], token_ids):
            return self
        if self.images:
            raise ValueError("the prompt of a segment with images cannot be replaced")
        blank: dict[str, Any] = {"token_ids": token_ids, "versions": token_ids.new_full(token_ids.shape, -1)}
        columns: dict[str, Any] = {}
        for name in SEGMENT_COLUMNS:
            own = getattr(self, name)
            if own is not None:
                first = blank.get(name, torch.zeros(len(token_ids)))
                columns[name] = torch.cat([first.to(own.dtype), own[other.replaces :]])
        return dataclasses.replace(self, **columns, routes=None)

    @property
    def turn_ends_A(self) -> Tensor:
        """bool [A]: the action tokens that end a turn.

        Where this was not recorded: the action tokens that an observation follows, or that have a reward.
        """
        if self.turn_ends is not None:
            return self.turn_ends[self.action_mask]
        followed = self.action_mask.roll(-1)
        followed[-1] = False
        return (~followed | (self.turn_rewards != 0))[self.action_mask]


SEGMENT_COLUMNS = ("token_ids", "action_mask", "rollout_logprobs", "versions", "turn_rewards", "turn_ends")
"""One entry per token."""


def _segment_from_arrays(arrays: list[Any], images: tuple[PlacedImage, ...], supports: Supports | None) -> Segment:
    columns: list[Any] = [None if array is None else torch.from_numpy(array) for array in arrays]
    named = dict(zip((*SEGMENT_COLUMNS, "routes"), columns, strict=True))
    return Segment(**named, images=images, supports=supports)


class OtherPrompt(NamedTuple):
    """What a teacher reads at the beginning of a segment, in the place of what the policy has read there."""

    replaces: int
    """The number of the segment's first tokens in whose place it stands."""
    token_ids: tuple[int, ...]


class Fork(NamedTuple):
    """Where a sample left another one of its prompt: what is before was sampled once, for both."""

    sample: int
    """The index of the other sample, which is less than its own."""
    actions: int
    """How many of its first action tokens are the other's."""


class RewardPart(NamedTuple):
    """One of several rewards of an episode, whose weighted sum is the reward."""

    name: str
    value: float
    weight: float = 1.0


class Outcome(StrEnum):
    """How an episode ended."""

    FINISHED = "finished"
    TRUNCATED = "truncated"
    """A token or turn limit cut it."""
    FAILED = "failed"
    """The environment or the reward failed. It has no reward, enters no statistic, and counts in `rollout/failed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One finished episode of one sample of a prompt."""

    key: SampleKey
    """(prompt ordinal, sample); the segment entry is 0."""
    segments: tuple[Segment, ...]
    """Usually one; empty only when the episode failed."""
    outcome: Outcome
    reward: float | None = None
    """Sum of its turn rewards, raw; None until scored."""
    reward_size: float | None = None
    """The sum of the absolute values of the terms of the reward, where several sources gave it. It tells how much of
    the reward may be rounding error. None: the turn rewards are the only terms."""
    reward_parts: tuple[RewardPart, ...] = ()
    """What the reward is the weighted sum of, where it was given by name; empty: it is one number."""
    greedy_reward: float | None = None
    """The reward of the greedy sample that was played beside it, which is not trained on. None: there is none."""
    score: float | None = None
    """Success in [0, 1]; falls back to the reward."""
    text: str = ""
    """The prompt and everything after it, decoded with special tokens: the `query` of a reward function."""
    extra_logs: dict[str, float] = field(default_factory=dict)
    error: str = ""
    """The reason of a failure, for messages."""
    agent: str = ""
    """The role that it plays. Episodes of one prompt are compared where their role is the same."""
    fork: Fork | None = None
    """Where it left another sample of its prompt; None: all of its action tokens are its own."""

    def __post_init__(self) -> None:
        if self.outcome is Outcome.FAILED:
            if not self.error:
                raise ValueError(f"failed trajectory {self.key} does not say why")
        elif not self.segments:
            raise ValueError(f"trajectory {self.key} has no tokens")

    @property
    def failed(self) -> bool:
        return self.outcome is Outcome.FAILED

    @property
    def num_tokens(self) -> int:
        return sum(len(segment) for segment in self.segments)

    @property
    def num_actions(self) -> int:
        return sum(segment.num_actions for segment in self.segments)

    def with_reward(
        self,
        reward: float,
        *,
        score: float | None,
        extra_logs: dict[str, float],
        size: float | None = None,
        parts: tuple[RewardPart, ...] = (),
        steps: tuple[tuple[int, ...], tuple[float, ...]] | None = None,
    ) -> Trajectory:
        """The same episode with its reward on the last action token.

        `steps`: tokens of the last segment and what was earned at each, which adds up to the reward: these tokens end
        turns from now on.
        """
        last = self.segments[-1]
        placed, turn_ends = torch.zeros_like(last.turn_rewards), last.turn_ends
        actions = last.action_mask.nonzero()
        if steps is not None:
            ends = torch.tensor(steps[0])
            turn_ends = torch.zeros_like(last.action_mask)
            turn_ends[last.action_mask] = last.turn_ends_A
            turn_ends[ends] = True
            placed[ends] = torch.tensor(steps[1], dtype=placed.dtype)
        elif len(actions):
            placed[actions[-1]] = reward
        segments = (*self.segments[:-1], dataclasses.replace(last, turn_rewards=placed, turn_ends=turn_ends))
        return dataclasses.replace(
            self,
            segments=segments,
            reward=reward,
            reward_size=size,
            reward_parts=parts,
            score=reward if score is None else score,
            extra_logs=extra_logs,
        )

    def as_failed(self, error: str) -> Trajectory:
        return dataclasses.replace(self, segments=(), outcome=Outcome.FAILED, reward=None, score=None, error=error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The samples of one prompt. Group statistics are taken over `scored`, never over failed members."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]

    def __post_init__(self) -> None:
        if not self.trajectories:
            raise ValueError(f"group of prompt {self.prompt.ordinal} is empty")
        for trajectory in self.trajectories:
            if trajectory.key.prompt != self.prompt.ordinal:
                raise ValueError(f"trajectory {trajectory.key} is not of prompt {self.prompt.ordinal}")

    @property
    def scored(self) -> tuple[Trajectory, ...]:
        return tuple(t for t in self.trajectories if not t.failed and t.reward is not None)

    @property
    def by_agent(self) -> dict[str, tuple[Trajectory, ...]]:
        """`scored` by the role that each plays, which is "" where there are no roles."""
        roles: dict[str, list[Trajectory]] = {}
        for trajectory in self.scored:
            roles.setdefault(trajectory.agent, []).append(trajectory)
        return {agent: tuple(members) for agent, members in sorted(roles.items())}

    @property
    def rewards(self) -> list[float]:
        """Of `scored`."""
        return [t.reward for t in self.scored if t.reward is not None]

    @property
    def scores(self) -> list[float]:
        """Of `scored`."""
        return [t.score for t in self.scored if t.score is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """One segment, and the numbers of its episode and group that the update needs."""

    key: SampleKey
    segment: Segment
    rewards_A: Tensor
    """float32 [A]: the reward of each action token, after penalties and clip. A turn's reward is on its last token."""
    compared_A: Tensor | None = None
    """float32 [A]: the result of the comparison with the prompt's other samples, for each action token. None under
    estimators that do not compare samples."""
    baseline: float = 0.0
    """What is taken from its returns, where samples are not compared: the greedy sample's reward, if there is one."""
    other_prompt: OtherPrompt | None = None
    """None: a teacher reads what the policy has read."""

    def __post_init__(self) -> None:
        for name, column in (("rewards", self.rewards_A), ("comparisons", self.compared_A)):
            if column is not None and column.shape != (self.segment.num_actions,):
                raise ValueError(f"{tuple(column.shape)} {name} for {self.segment.num_actions} action tokens")

    def __len__(self) -> int:
        return len(self.segment)


COLUMNS = (
    "rollout_logprobs_A",
    "old_logprobs_A",
    "reference_logprobs_A",
    "values_A",
    "returns_A",
    "advantages_A",
    "teacher_logprobs_A",
    "teacher_ids_AK",
    "teacher_logprobs_AK",
)
"""The columns of `TrainingBatch` and `PackedBatch`, one entry per action token; None until a stage fills it."""


@dataclass(slots=True, kw_only=True)
class TrainingBatch:
    """The samples that one rank trains on in a round, and the columns that the stages have computed so far.

    Columns ending in `_A` are 1-D over all action tokens of all samples, sample after sample: sample i owns
    entries `action_offsets[i] : action_offsets[i + 1]`. The segments of an episode are adjacent and in order.
    """

    samples: list[TrainingSample]
    action_offsets: list[int] = field(init=False)
    rollout_logprobs_A: Tensor | None = field(init=False)
    """log π of the weights that sampled, as the engine reported it; NaN on samples without it. None when no sample has
    it."""
    old_logprobs_A: Tensor | None = None
    """log π of the weights before this round's updates. None when provably equal to the current ones."""
    reference_logprobs_A: Tensor | None = None
    """log π of the reference model. None without one."""
    values_A: Tensor | None = None
    """The critic's values before this round's updates. None without a critic."""
    returns_A: Tensor | None = None
    """The targets of the critic."""
    advantages_A: Tensor | None = None
    teacher_logprobs_A: Tensor | None = None
    """log p of the sampled tokens, p the teacher that they are distilled from. None without one, or where it is a
    loss."""
    teacher_ids_AK: Tensor | None = None
    """int32 [A, K]: the tokens that the teacher finds likeliest. None unless it is a loss."""
    teacher_logprobs_AK: Tensor | None = None
    """float32 [A, K]: log p of these."""
    seen_A: dict[str, Tensor] = field(default_factory=dict)
    """What the policy's update saw of each action token, where it was to be kept (`learners.policy.SeenColumns`)."""

    def __post_init__(self) -> None:
        self.action_offsets = [0]
        for sample in self.samples:
            self.action_offsets.append(self.action_offsets[-1] + sample.segment.num_actions)
        self.rollout_logprobs_A = None
        if any(sample.segment.rollout_logprobs is not None for sample in self.samples):
            self.rollout_logprobs_A = torch.cat([_sampled_logprobs(sample.segment) for sample in self.samples])

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def num_actions(self) -> int:
        return self.action_offsets[-1]

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each sample."""
        return [len(sample) for sample in self.samples]

    @property
    def episode_offsets(self) -> list[int]:
        """The index in the `_A` columns where each episode begins, and the end."""
        episodes = [sample.key._replace(segment=0) for sample in self.samples]
        firsts = [i for i in range(len(episodes)) if i == 0 or episodes[i] != episodes[i - 1]]
        return [*(self.action_offsets[i] for i in firsts), self.num_actions]

    def actions_of(self, index: int) -> slice:
        """The entries of sample `index` in the `_A` columns."""
        return slice(self.action_offsets[index], self.action_offsets[index + 1])

    def per_action(self, values: Sequence[float]) -> Tensor:
        """float32 [A]: the number of each sample, repeated for all of its action tokens."""
        counts = torch.tensor(self.action_offsets, dtype=torch.int64).diff()
        return torch.tensor(values, dtype=torch.float32).repeat_interleave(counts)

    def pack(self, indices: Sequence[int]) -> PackedBatch:
        """The micro-batch made of these samples, in this order."""
        segments = [self.samples[i].segment for i in indices]
        rows = torch.cat([torch.arange(*self.actions_of(i).indices(self.num_actions)) for i in indices])
        columns = {name: getattr(self, name) for name in COLUMNS}
        return PackedBatch(
            tokens=PackedTokens.from_segments(segments),
            rows=rows,
            **{name: None if column is None else column[rows] for name, column in columns.items()},
        )


def _sampled_logprobs(segment: Segment) -> Tensor:
    """float32 [A]"""
    if segment.rollout_logprobs is None:
        return torch.full((segment.num_actions,), torch.nan)
    return segment.rollout_logprobs[segment.action_mask]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedImages:
    """The images of a packed stream. An image that stands in several sequences is here once.

    Three features of image a, and two of image b, in the sequences "x a y" and "a b":

        token_ids   x a a a y | a a a b b
        rows_T     -1 0 1 2 -1  0 1 2 3 4
    """

    inputs: tuple[ImageInput, ...]
    rows_T: Tensor
    """int64 [T]: the feature that takes the token's place, counted over all features of `inputs`; -1: none does."""
    sequences: tuple[tuple[PlacedImage, ...], ...] = ()
    """[N]: the images of each sequence of the stream, and where they are in it. Empty after a change of order."""

    @staticmethod
    def of(sequences: Sequence[Sequence[PlacedImage]], lengths: Sequence[int]) -> PackedImages | None:
        """The images of sequences of these lengths; None when there are none."""
        if not any(sequences):
            return None
        first_rows: dict[str, int] = {}
        inputs: list[ImageInput] = []
        rows_T = torch.full((sum(lengths),), -1)
        begin = num_rows = 0
        for placed, length in zip(sequences, lengths, strict=True):
            for start, image in placed:
                if image.digest not in first_rows:
                    first_rows[image.digest] = num_rows
                    num_rows += image.num_features
                    inputs.append(image)
                own_T = rows_T[begin + start : begin + start + len(image)]
                own_T[image.is_feature] = first_rows[image.digest] + torch.arange(image.num_features)
            begin += length
        return PackedImages(inputs=tuple(inputs), rows_T=rows_T, sequences=tuple(map(tuple, sequences)))

    def at(self, positions: Tensor | slice) -> PackedImages:
        """Those of a stream that is made of these positions of this one."""
        return PackedImages(inputs=self.inputs, rows_T=self.rows_T[positions])

    def to(self, device: torch.device | str) -> PackedImages:
        inputs = tuple(
            dataclasses.replace(image, tensors={name: moved(t, device) for name, t in image.tensors.items()})
            for image in self.inputs
        )
        return PackedImages(inputs=inputs, rows_T=moved(self.rows_T, device), sequences=self.sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTokens:
    """Several sequences laid end to end, without padding: the input of a model's forward.

    Two sequences of 3 and 2 tokens:

        token_ids    a b c d e
        position_ids 0 1 2 0 1
        cu_seqlens   0 3 5
    """

    token_ids: Tensor
    """int64 [T]"""
    position_ids: Tensor
    """int64 [T], restarting at 0 with every sequence. A model with R rows of positions makes [R, T] of them where there
    are images (`models.vision`)."""
    cu_seqlens: Tensor
    """int32 [N+1]: the position where each sequence begins, and the end. On the CPU, wherever the tokens are: a forward
    is planned by it, and reading it from a GPU would wait for everything that was launched there."""
    action_positions: Tensor
    """int64 [A]: stream positions of the tokens whose log-probs are wanted, ascending."""
    max_seqlen: int
    shared_prefixes: tuple[int, ...] = ()
    """[N], or empty when nothing is shared: how many leading tokens a sequence has in common with the one before it.
    A forward may compute them once; see `models.prefixes`."""
    images: PackedImages | None = None
    """The images among the tokens; None: there are none."""
    routes_TLK: Tensor | None = None
    """int16 [T, L, K]: the experts that the policy's routers are to choose (`models.routes`); -1: their own choice.
    None: their own choice everywhere."""
    supports: Supports | None = None
    """What the action tokens were chosen among, [A]: a policy's softmax is over these. None: over all tokens."""

    def __post_init__(self) -> None:
        T = self.token_ids.shape[0]
        if self.position_ids.shape[-1] != T:
            raise ValueError(f"position_ids has shape {tuple(self.position_ids.shape)} for {T} tokens")
        if self.cu_seqlens.dtype != torch.int32 or self.cu_seqlens.dim() != 1 or len(self.cu_seqlens) < 2:
            raise ValueError("cu_seqlens must be int32 [N+1] with N >= 1")
        if len(self.shared_prefixes) not in (0, self.num_sequences):
            raise ValueError(f"{len(self.shared_prefixes)} shared prefixes for {self.num_sequences} sequences")
        if self.routes_TLK is not None and self.routes_TLK.shape[0] != T:
            raise ValueError(f"routes of shape {tuple(self.routes_TLK.shape)} for {T} tokens")
        if self.supports is not None and len(self.supports) != self.num_actions:
            raise ValueError(f"{len(self.supports)} supports for {self.num_actions} actions")

    @staticmethod
    def from_sequences(
        sequences: Sequence[Tensor],
        action_masks: Sequence[Tensor],
        *,
        shared_prefixes: Sequence[int] = (),
        images: Sequence[Sequence[PlacedImage]] = (),
        routes: Sequence[Tensor | None] = (),
        supports: Sequence[Supports | None] = (),
    ) -> PackedTokens:
        """Pack 1-D id tensors; `action_masks` (bool, same lengths) say whose log-probs are wanted.

        `shared_prefixes`: as the field. The caller must be sure of them: they are not compared here. `images`,
        `routes` (`Segment.routes`) and `supports`: those of each sequence.
        """
        lengths = [len(sequence) for sequence in sequences]
        if not lengths or min(lengths) == 0:
            raise ValueError("a packed stream needs at least one sequence, and no empty one")
        for sequence, mask in zip(sequences, action_masks, strict=True):
            if sequence.shape != mask.shape:
                raise ValueError(f"mask of shape {tuple(mask.shape)} for {len(sequence)} tokens")
            if bool(mask[0]):
                raise ValueError("the first token of a sequence has nothing before it, so it cannot be an action")
        device = sequences[0].device
        ends = torch.tensor([0, *lengths]).cumsum(0)
        return PackedTokens(
            token_ids=torch.cat(list(sequences)).to(torch.int64),
            position_ids=torch.cat([torch.arange(n) for n in lengths]).to(device),
            cu_seqlens=ends.to(torch.int32),
            action_positions=torch.cat(list(action_masks)).nonzero().flatten(),
            max_seqlen=max(lengths),
            shared_prefixes=tuple(shared_prefixes) if any(shared_prefixes) else (),
            images=PackedImages.of(images, lengths),
            routes_TLK=_packed_routes(routes, lengths),
            supports=_packed_supports(supports, action_masks),
        )

    @staticmethod
    def from_segments(segments: Sequence[Segment]) -> PackedTokens:
        """Pack segments. Adjacent segments that begin with the same prompt share it."""
        return PackedTokens.from_sequences(
            [s.token_ids for s in segments],
            [s.action_mask for s in segments],
            shared_prefixes=(0, *(_shared_prompt(a, b) for a, b in pairwise(segments))),
            images=[s.images for s in segments],
            routes=[s.routes for s in segments],
            supports=[s.supports for s in segments],
        )

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    @property
    def num_actions(self) -> int:
        return self.action_positions.shape[0]

    def action_sequences(self) -> Tensor:
        """int64 [A]: the index of the sequence of each action token."""
        ends_N = moved(self.cu_seqlens[1:].to(torch.int64), self.action_positions.device)
        return torch.bucketize(self.action_positions, ends_N, right=True)

    def split(self) -> Iterator[PackedTokens]:
        """One stream per sequence, for models that cannot be packed."""
        bounds, first = self.cu_seqlens.tolist(), 0
        for start, end in pairwise(bounds):
            inside = (self.action_positions >= start) & (self.action_positions < end)
            supports = None
            if self.supports is not None:
                last = first + int(inside.sum())
                supports, first = self.supports[first:last], last
            yield self.at(
                slice(start, end),
                cu_seqlens=self.cu_seqlens.new_tensor([0, end - start]),
                action_positions=self.action_positions[inside] - start,
                max_seqlen=end - start,
                shared_prefixes=(),
                supports=supports,
            )

    def at(self, positions: Tensor | slice, **changes: Any) -> PackedTokens:
        """The stream that is made of these positions of this one, with all that its tokens have. `changes`: the fields
        that say where its sequences and actions are, and what actions were chosen among, which no body reads."""
        return dataclasses.replace(
            self,
            token_ids=self.token_ids[positions],
            position_ids=self.position_ids[..., positions],
            images=None if self.images is None else self.images.at(positions),
            routes_TLK=None if self.routes_TLK is None else self.routes_TLK[positions],
            **{"supports": None, **changes},
        )

    def to(self, device: torch.device | str) -> PackedTokens:
        return dataclasses.replace(
            self,
            token_ids=moved(self.token_ids, device),
            position_ids=moved(self.position_ids, device),
            action_positions=moved(self.action_positions, device),
            images=None if self.images is None else self.images.to(device),
            routes_TLK=None if self.routes_TLK is None else moved(self.routes_TLK, device),
            supports=None if self.supports is None else self.supports.to(device),
        )

    def without_routes(self) -> PackedTokens:
        """For models whose routers choose themselves: every one but the policy."""
        return self if self.routes_TLK is None else dataclasses.replace(self, routes_TLK=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """One micro-batch of an update: packed tokens and the columns of their actions, named as in `TrainingBatch`."""

    tokens: PackedTokens
    rows: Tensor
    """int64 [A]: the indices of these actions in the `TrainingBatch` columns."""
    rollout_logprobs_A: Tensor | None = None
    old_logprobs_A: Tensor | None = None
    reference_logprobs_A: Tensor | None = None
    values_A: Tensor | None = None
    returns_A: Tensor | None = None
    advantages_A: Tensor | None = None
    teacher_logprobs_A: Tensor | None = None
    teacher_ids_AK: Tensor | None = None
    teacher_logprobs_AK: Tensor | None = None

    def __post_init__(self) -> None:
        A = self.tokens.num_actions
        for name in (*COLUMNS, "rows"):
            column = getattr(self, name)
            if column is not None and (column.dim() != 1 + name.endswith("_AK") or len(column) != A):
                raise ValueError(f"{name} has shape {tuple(column.shape)} for {A} action tokens")

    def to(self, device: torch.device | str) -> PackedBatch:
        columns = {name: getattr(self, name) for name in COLUMNS}
        return PackedBatch(
            tokens=self.tokens.to(device),
            rows=self.rows,
            **{name: None if column is None else moved(column, device) for name, column in columns.items()},
        )


def moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on the device. A copy to a GPU is queued there like a kernel: from memory that is not pinned it would
    wait for the kernels before it."""
    if tensor.device.type != "cpu" or torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _packed_routes(routes: Sequence[Tensor | None], lengths: Sequence[int]) -> Tensor | None:
    """int16 [T, L, K], -1 where a token has none; None when no token has one."""
    some = next((known for known in routes if known is not None), None)
    if some is None:
        return None
    packed_TLK = torch.full((sum(lengths), *some.shape[1:]), -1, dtype=torch.int16, device=some.device)
    begin = 0
    for known, length in zip(routes, lengths, strict=True):
        if known is not None:
            packed_TLK[begin : begin + len(known)] = known
        begin += length
    return packed_TLK


def _packed_supports(supports: Sequence[Supports | None], action_masks: Sequence[Tensor]) -> Supports | None:
    if all(own is None for own in supports):
        return None
    return Supports.joined([(own, int(mask.sum())) for own, mask in zip(supports, action_masks, strict=True)])


def _shared_prompt(first: Segment, second: Segment) -> int:
    """The number of tokens before the first action, if they and their images are the same in both segments; otherwise
    0. Two images of the same size have the same tokens."""
    prompt = int(second.action_mask.int().argmax())
    if int(first.action_mask.int().argmax()) != prompt or _digests(first, prompt) != _digests(second, prompt):
        return 0
    return prompt if torch.equal(first.token_ids[:prompt], second.token_ids[:prompt]) else 0


def _digests(segment: Segment, end: int) -> list[tuple[int, str]]:
    """The images before `end`, and where they are."""
    return [(placed.start, placed.image.digest) for placed in segment.images if placed.start < end]
