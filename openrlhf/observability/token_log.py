"""Groups of every step token by token, in one file per step: ids, log-probs, advantages, and what else a token has.

`RUN/tokens/step_000012.npz` needs nothing beside it to be read: no tokenizer, no other file of the run. It holds

    index           a JSON document (uint8): prompts, samples and segments in order, and how many tokens each has
    token_ids, …    what the rollout recorded, flat over the tokens of all segments (`TOKEN_COLUMNS`)
    advantages, …   what the trainer computed, flat over their action tokens (`TRAINED_COLUMNS`); NaN where a segment
                    was not trained on. A column that the run does not compute is not there
    routes_…        experts of a mixture; support_…  what tokens were sampled from; and `images/` beside the file the
                    images, each once: only where all groups are kept (--logger.rollouts_per_step -1), because they are
                    larger than all the rest
    piece_…         the bytes of every token id that occurs

A file appears whole or not at all. `read_step` reads one with numpy alone, and `read_groups` makes of one the very
groups that the step was trained on.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import logging
import math
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from openrlhf.observability.rollout_log import THINNED, chosen_groups
from openrlhf.observability.thumbnails import FOLDER as THUMBNAILS
from openrlhf.observability.thumbnails import ThumbnailFolder
from openrlhf.utils import waits

if TYPE_CHECKING:
    from openrlhf.types import Group, ImageInput, SampleKey, Segment, Supports, Trajectory

logger = logging.getLogger(__name__)

FOLDER = "tokens"
"""Of a run."""
IMAGES = "images"
"""The folder in it with the tensors of images, by digest."""
FORMAT = 1
ALL = -1
"""Every group of a step, with everything that is needed to train on it again."""

TOKEN_COLUMNS = {
    "token_ids": "int32 (int64 where an id needs it): the token",
    "action": "bool: whether the policy sampled it",
    "logprobs": "float32: its log-prob as the engine told it, 0 outside actions; see `TokenSegment.logprobs`",
    "versions": "int32: the version of the weights that sampled it, -1 outside actions",
    "rewards": "float32: the reward of a turn on its last action token, raw; 0 elsewhere",
    "turn_ends": "bool: the last token of each action; see `TokenSegment.turn_ends`",
}
"""One entry per token of a segment."""
TRAINED_COLUMNS = {
    "shaped_rewards": "the reward after penalties and clip",
    "advantages": "the advantage that the update used",
    "returns": "what the critic was trained towards",
    "values": "what the critic said before the update",
    "old_logprobs": "the trainer's log-prob before the update",
    "new_logprobs": "the trainer's log-prob in the update, in the last pass over the sample",
    "ref_logprobs": "the reference model's log-prob",
    "teacher_logprobs": "the log-prob of the teacher, where it rewards tokens",
    "entropy": "the entropy of the policy at this token, in the update",
    "is_weights": "the off-policy correction's factor of the loss",
    "clipped": "1 where the clip of the loss took the gradient away, else 0",
    "losses": "the policy loss of this token before it is weighed in the step's mean",
}
"""float32, one entry per action token. NaN: the trainer did not compute it for this token."""

Columns = Mapping["SampleKey", Mapping[str, np.ndarray]]
"""Of each segment that was trained on, by its key: `TRAINED_COLUMNS`, [A] each."""
ColumnSource = Callable[[Collection["SampleKey"]], Columns]
"""Keys of segments → their columns (`learners.workers.Workers.columns`)."""


class TokenLogError(ValueError):
    """A file of the token log that cannot be read, or does not hold what is asked of it. The text names it."""


# ---------------------------------------------------------------------------------------------------------- writing


class NoTokenLog:
    """Of a run that keeps none."""

    def begin(self, *, after: int) -> None: ...

    def wants(self, step: int) -> bool:
        return False

    def write(
        self, step: int, groups: Sequence[Group], columns: Callable[[Collection[SampleKey]], Columns]
    ) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class TokenLog(NoTokenLog):
    """The token log of a run: of each step at most `groups` groups, those of rollouts.jsonl, with all of their samples.

    0: none. -1: all groups of all steps, with the tensors of images and the routes of experts; otherwise a long run
    keeps fewer steps, as rollouts.jsonl does. Files are compressed and written in a thread of their own, one at a time.
    """

    def __init__(self, run: Path, tokenizer: Any, *, groups: int = 4) -> None:
        if groups < ALL:
            raise ValueError(f"groups must be >= {ALL}, got {groups}")
        self._folder = run / FOLDER
        self._groups = groups
        self._bytes_of = TokenBytes(tokenizer)
        self._thumbnails = ThumbnailFolder(run / THUMBNAILS)
        self._sizes = {path.name: path.stat().st_size for path in steps(run).values()}
        self._every = 1
        self._writer: futures.ThreadPoolExecutor | None = None
        self._pending: tuple[int, futures.Future[int]] | None = None

    def begin(self, *, after: int) -> None:
        """The run goes on after this step: files of later ones, which it takes again, are removed."""
        if not self._folder.is_dir():
            return
        for path in self._folder.rglob("*.partial"):
            path.unlink(missing_ok=True)
        for step, path in steps(self._folder.parent).items():
            if step > after:
                path.unlink(missing_ok=True)
                self._sizes.pop(path.name, None)

    def wants(self, step: int) -> bool:
        """Whether the groups of this step are kept. The answer stays the same until they are written."""
        if self._groups in (0, ALL):
            return self._groups == ALL
        size = sum(self._sizes.values())
        every = next((every for least, every in reversed(THINNED) if size >= least), 1)
        if every != self._every:
            self._every = every
            logger.info("%s has %d MiB: of every %d steps one is kept from now on", self._folder, size >> 20, every)
        return step % every == 0

    def write(self, step: int, groups: Sequence[Group], columns: ColumnSource) -> None:
        """`columns`: asked once, for what the trainer computed of the kept segments."""
        if not self.wants(step):
            return
        whole = self._groups == ALL
        kept = [("", group) for group in groups] if whole else chosen_groups(groups, self._groups)
        keys = [
            t.key._replace(segment=i) for _, group in kept for t in group.trajectories for i in range(len(t.segments))
        ]
        builder = _StepBuilder(self._bytes_of, columns(keys), whole=whole)
        for choice, group in kept:
            builder.add(choice, group)
        for image in builder.images.values():
            self._thumbnails.add(image)
        images = list(builder.images.values()) if whole else []
        arrays = builder.arrays(step, complete=whole)
        self.flush()
        self._writer = self._writer or futures.ThreadPoolExecutor(1, thread_name_prefix="token-log")
        self._pending = step, self._writer.submit(_write, self._folder, step, arrays, images)

    def flush(self) -> None:
        """Wait until what was written is on the disk. A disk that is full costs the file, and not the run."""
        if self._pending is None:
            return
        (step, pending), self._pending = self._pending, None
        name = step_name(step)
        with waits.waiting(f"for {self._folder / name} to be written") as wait:
            while not futures.wait([pending], timeout=1.0).done:
                wait.check()
        try:
            self._sizes[name] = pending.result()
        except OSError as error:
            logger.warning("%s could not be written: %s", self._folder / name, error)

    def close(self) -> None:
        self.flush()
        if self._writer is not None:
            self._writer.shutdown()
            self._writer = None


class _StepBuilder:
    """The arrays of one step, as they grow group by group."""

    def __init__(self, bytes_of: TokenBytes, columns: Columns, *, whole: bool) -> None:
        self._bytes_of = bytes_of
        self._trained = columns
        self._whole = whole
        self._groups: list[dict[str, Any]] = []
        self._flat: dict[str, list[np.ndarray]] = {name: [] for name in TOKEN_COLUMNS}
        names = {name for own in columns.values() for name in own}
        self._flat_A: dict[str, list[np.ndarray]] = {name: [] for name in TRAINED_COLUMNS if name in names}
        self._routes: dict[str, list[np.ndarray]] = {}
        self._supports: list[Supports] = []
        self.images: dict[str, ImageInput] = {}

    def add(self, choice: str, group: Group) -> None:
        prompt = group.prompt
        self._groups.append(
            {
                "ordinal": prompt.ordinal,
                "prompt": prompt.text,
                "label": _as_json(prompt.label),
                "datasource": prompt.datasource,
                "where": prompt.where,
                "images": [image for image in prompt.images if isinstance(image, str)],
                "choice": choice,
                "samples": [self._sample(trajectory) for trajectory in group.trajectories],
            }
        )

    def _sample(self, trajectory: Trajectory) -> dict[str, Any]:
        return {
            "sample": trajectory.key.sample,
            "outcome": str(trajectory.outcome),
            "reward": _number(trajectory.reward),
            "reward_size": _number(trajectory.reward_size),
            "reward_parts": [
                [part.name, _number(part.value), _number(part.weight)] for part in trajectory.reward_parts
            ],
            "greedy_reward": _number(trajectory.greedy_reward),
            "score": _number(trajectory.score),
            "text": trajectory.text,
            "extra_logs": {name: _number(value) for name, value in trajectory.extra_logs.items()},
            "error": trajectory.error,
            "agent": trajectory.agent,
            "fork": trajectory.fork,
            "segments": [
                self._segment(segment, trajectory.key._replace(segment=index))
                for index, segment in enumerate(trajectory.segments)
            ],
        }

    def _segment(self, segment: Segment, key: SampleKey) -> dict[str, Any]:
        tokens, actions = len(segment), segment.num_actions
        columns = {
            "token_ids": segment.token_ids,
            "action": segment.action_mask,
            "logprobs": segment.rollout_logprobs,
            "versions": segment.versions,
            "rewards": segment.turn_rewards,
            "turn_ends": segment.turn_ends,
        }
        for name, column in columns.items():
            if column is None:
                self._flat[name].append(np.zeros(tokens, np.float32 if name == "logprobs" else np.bool_))
            else:
                self._flat[name].append(column.numpy())
        trained = self._trained.get(key)
        for name, parts in self._flat_A.items():
            own = None if trained is None else trained.get(name)
            if own is not None and own.shape != (actions,):
                raise ValueError(f"{name} of {key} has shape {own.shape} for {actions} action tokens")
            parts.append(np.full(actions, np.nan, np.float32) if own is None else own.astype(np.float32, copy=False))
        self.images |= {placed.image.digest: placed.image for placed in segment.images}
        return {
            "tokens": tokens,
            "actions": actions,
            "logprobs": segment.rollout_logprobs is not None,
            "turn_ends": segment.turn_ends is not None,
            "trained": trained is not None,
            "routes": self._segment_routes(segment),
            "supports": self._keeps_supports(segment),
            "images": [
                {
                    "start": placed.start,
                    "tokens": len(placed.image),
                    "digest": placed.image.digest,
                    "size": placed.image.size,
                    "file": f"{THUMBNAILS}/{placed.image.digest}.png" if placed.image.thumbnail else None,
                }
                for placed in segment.images
            ],
        }

    def _segment_routes(self, segment: Segment) -> list[Any] | None:
        """Dtype and shape of the segment's routes; None: it has none, or they are not kept."""
        if segment.routes is None or not self._whole:
            return None
        routes = segment.routes.numpy()
        self._routes.setdefault(routes.dtype.name, []).append(routes.ravel())
        return [routes.dtype.name, *routes.shape]

    def _keeps_supports(self, segment: Segment) -> int | None:
        """The number of their ids; None: the segment has none, or they are not kept."""
        if segment.supports is None or not self._whole:
            return None
        self._supports.append(segment.supports)
        return len(segment.supports.token_ids)

    def arrays(self, step: int, *, complete: bool) -> dict[str, np.ndarray]:
        index = {"format": FORMAT, "step": step, "complete": complete, "groups": self._groups}
        arrays = {"index": np.frombuffer(json.dumps(index).encode("ascii"), np.uint8)}
        empty = {"logprobs": np.float32, "rewards": np.float32, "action": np.bool_, "turn_ends": np.bool_}
        for name, parts in self._flat.items():
            arrays[name] = np.concatenate([np.zeros(0, empty.get(name, np.int32)), *parts])
        ids = arrays["token_ids"]
        if not len(ids) or np.iinfo(np.int32).min <= ids.min() <= ids.max() <= np.iinfo(np.int32).max:
            arrays["token_ids"] = ids.astype(np.int32)
        for name, parts in self._flat_A.items():
            arrays[name] = np.concatenate([np.zeros(0, np.float32), *parts])
        for dtype, parts in self._routes.items():
            arrays[f"routes_{dtype}"] = np.concatenate(parts)
        if self._supports:
            arrays["support_sizes"] = np.concatenate([own.sizes_A.numpy() for own in self._supports])
            arrays["support_ids"] = np.concatenate([own.token_ids.numpy() for own in self._supports])
        unique = np.unique(arrays["token_ids"])
        pieces = [self._bytes_of(token) for token in unique.tolist()]
        arrays["piece_ids"] = unique
        arrays["piece_ends"] = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
        arrays["piece_bytes"] = np.frombuffer(b"".join(pieces), np.uint8)
        return arrays


def _write(folder: Path, step: int, arrays: Mapping[str, np.ndarray], images: Sequence[ImageInput]) -> int:
    """The number of bytes. Images come first: a step whose file is there has all of its images."""
    folder.mkdir(parents=True, exist_ok=True)
    for image in images:
        path = folder / IMAGES / f"{image.digest}.npz"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            _write_whole(path, _image_arrays(image))
    return _write_whole(folder / step_name(step), arrays)


def _write_whole(path: Path, arrays: Mapping[str, np.ndarray]) -> int:
    draft = path.with_suffix(f".{os.getpid()}.partial")
    try:
        with draft.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)
        size = draft.stat().st_size
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return size


def _image_arrays(image: ImageInput) -> dict[str, np.ndarray]:
    rest = {
        "placeholder": image.placeholder,
        "digest": image.digest,
        "size": image.size,
        "tensors": list(image.tensors),
    }
    return {
        "index": np.frombuffer(json.dumps(rest).encode("ascii"), np.uint8),
        "token_ids": np.array(image.token_ids, np.int64),
        "thumbnail": np.frombuffer(image.thumbnail, np.uint8),
        **{f"tensor_{i}": tensor.numpy() for i, tensor in enumerate(image.tensors.values())},
    }


class TokenBytes:
    """The bytes that a token adds to a text, by its id.

    What a tokenizer decodes a token to depends on its neighbours: a first one loses its space, and of a character that
    several tokens share each alone is no text. So a token is decoded behind another, and where that gives no text its
    bytes are read off its name in the vocabulary, as byte-level and byte-fallback tokenizers write it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        self._before: tuple[int, str] | None = None

    def __call__(self, token: int) -> bytes:
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._find(token)
        return known

    def _find(self, token: int) -> bytes:
        try:
            text = self._decoded_behind(token)
        except (KeyError, IndexError, OverflowError, TypeError, ValueError):
            return b""  # an id beyond the vocabulary: models have more rows than their tokenizers have tokens
        if "\ufffd" in text:
            name = self._name(token)
            found = None if name is None else _bytes_of_name(name)
            if found is not None:
                return found
        return text.encode("utf-8", errors="replace")

    def _decoded_behind(self, token: int) -> str:
        if self._before is None:
            try:
                first = int(self._tokenizer.encode("a", add_special_tokens=False)[-1])
                self._before = first, self._decode([first])
            except (AttributeError, IndexError, KeyError, TypeError, ValueError):
                self._before = -1, ""
        before, text = self._before
        whole = self._decode([token] if before < 0 else [before, token])
        return whole.removeprefix(text) if whole.startswith(text) else self._decode([token])

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))

    def _name(self, token: int) -> str | None:
        convert = getattr(self._tokenizer, "convert_ids_to_tokens", None)
        name = None if convert is None else convert(token)
        return name if isinstance(name, str) else None


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _bytes_of_name(name: str) -> bytes | None:
    """The bytes of a token by its name in the vocabulary: `<0xE2>`, or one letter for each byte (GPT-2's alphabet)."""
    if match := _BYTE_TOKEN.fullmatch(name):
        return bytes([int(match[1], 16)])
    values = [_BYTE_OF.get(letter) for letter in name]
    return None if not values or None in values else bytes(value for value in values if value is not None)


def _byte_alphabet() -> dict[str, int]:
    """Letter → byte. Bytes that are printable in Latin-1 stand for themselves, the others for U+0100 and on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _number(value: float | None) -> float | str | None:
    """JSON has no NaN: a number that is not finite is its name, which `float` reads."""
    return value if value is None or math.isfinite(value) else str(float(value))


def _as_json(value: Any) -> Any:
    """The value where JSON can give it back, otherwise its text."""
    try:
        return value if json.loads(json.dumps(value, allow_nan=False)) == value else str(value)
    except (TypeError, ValueError, RecursionError):
        return str(value)


# ---------------------------------------------------------------------------------------------------------- reading


class Pieces:
    """The text of every token id of a file."""

    def __init__(self, known: Mapping[int, bytes]) -> None:
        self._known = known

    def __iter__(self) -> Iterator[int]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def __getitem__(self, token: int) -> str:
        """The token by itself, for people. Bytes that are no whole character are shown as `<0xE2><0x82>`.

        Raises KeyError for an id that does not occur.
        """
        return "".join(_shown(part) for part in _characters(self._known[token]))

    def bytes_of(self, token: int) -> bytes:
        return self._known[token]

    def text(self, tokens: Iterable[int]) -> str:
        """The tokens as one text."""
        return b"".join(self._known[int(token)] for token in tokens).decode("utf-8", errors="replace")

    def texts(self, tokens: Iterable[int]) -> list[str]:
        """One text for each token; joined they are `text`. A character that several tokens share is the last one's."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        found = [decoder.decode(self._known[int(token)]) for token in tokens]
        if found:
            found[-1] += decoder.decode(b"", final=True)
        return found


def _characters(content: bytes) -> Iterator[str | bytes]:
    """The text in some bytes, and between it the bytes that are no whole character."""
    while content:
        try:
            yield content.decode("utf-8")
            return
        except UnicodeDecodeError as error:
            if error.start:
                yield content[: error.start].decode("utf-8")
            yield content[error.start : error.end]
            content = content[error.end :]


def _shown(part: str | bytes) -> str:
    return part if isinstance(part, str) else "".join(f"<0x{byte:02X}>" for byte in part)


class TokenImage(NamedTuple):
    """An image among the tokens of a segment."""

    start: int
    tokens: int
    digest: str
    size: tuple[int, int] | None
    """Width and height in pixels as it was given; None: not known."""
    file: str | None
    """Its thumbnail, in the run's folder; None: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSegment:
    """One history of tokens (`openrlhf.types.Segment`) and the numbers of its tokens."""

    num_tokens: int
    num_actions: int
    has_logprobs: bool
    """Whether the engine told log-probs."""
    has_turn_ends: bool
    """Whether the ends of turns were recorded."""
    is_trained: bool
    """Whether the trainer got it: False for episodes that failed, that had nothing to be compared with, or in which the
    policy sampled nothing."""
    images: tuple[TokenImage, ...]
    columns: Mapping[str, np.ndarray] = field(repr=False)
    """`TOKEN_COLUMNS` of [T] and `TRAINED_COLUMNS` of [A] entries, those that were read and that the file has."""
    routes: np.ndarray | None = field(default=None, repr=False)
    """[R, L, K], see `openrlhf.types.Segment.routes`."""
    supports: tuple[np.ndarray, np.ndarray] | None = field(default=None, repr=False)
    """Sizes and ids, see `openrlhf.types.Supports`."""

    @property
    def token_ids(self) -> np.ndarray:
        return self.columns["token_ids"]

    @property
    def action(self) -> np.ndarray:
        return self.columns["action"]

    @property
    def logprobs(self) -> np.ndarray | None:
        """[T]: the engine's; None where it told none."""
        return self.columns["logprobs"] if self.has_logprobs else None

    @property
    def turn_ends(self) -> np.ndarray | None:
        """[T]; None where they were not recorded."""
        return self.columns["turn_ends"] if self.has_turn_ends else None

    def per_token(self, name: str) -> np.ndarray | None:
        """[T]: any column, over all tokens: one of the trainer's is NaN outside actions. None: the file has none."""
        column = self.columns.get(name)
        if column is None or name in TOKEN_COLUMNS:
            return column
        whole = np.full(self.num_tokens, np.nan, np.float32)
        whole[self.action] = column
        return whole


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSample:
    """One episode (`openrlhf.types.Trajectory`)."""

    prompt: int
    """The ordinal of its prompt."""
    sample: int
    outcome: str
    """finished, truncated or failed."""
    reward: float | None
    reward_size: float | None
    reward_parts: tuple[tuple[str, float, float], ...]
    """Name, value and weight of each reward, where there are several."""
    greedy_reward: float | None
    score: float | None
    text: str
    extra_logs: dict[str, float]
    error: str
    """Why it failed."""
    segments: tuple[TokenSegment, ...]
    agent: str = ""
    fork: tuple[int, int] | None = None

    @property
    def num_tokens(self) -> int:
        return sum(segment.num_tokens for segment in self.segments)

    @property
    def num_actions(self) -> int:
        return sum(segment.num_actions for segment in self.segments)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenGroup:
    """The samples of one prompt (`openrlhf.types.Group`)."""

    ordinal: int
    prompt: str
    label: Any
    """As JSON has it: of a label that JSON cannot give back, its text."""
    datasource: str
    where: str
    images: tuple[str, ...]
    """Paths and addresses of the prompt's images, as far as the data names them so."""
    choice: str
    """Why it was kept: best, worst, typical or failed; empty where all groups are."""
    samples: tuple[TokenSample, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTokens:
    """A file of the token log."""

    path: Path
    step: int
    complete: bool
    """Whether it has all groups of the step, and all that is needed to train on them again."""
    groups: tuple[TokenGroup, ...]
    column_names: tuple[str, ...]
    """The columns that the file has, `TOKEN_COLUMNS` first, whether they were read or not."""
    pieces: Pieces


def step_name(step: int) -> str:
    """
    >>> step_name(12)
    'step_000012.npz'
    """
    return f"step_{step:06d}.npz"


_STEP = re.compile(r"step_(\d{6,})\.npz")


def steps(run: str | Path) -> dict[int, Path]:
    """Step → its file, ascending; empty where the run keeps none. Reads the folder, and no file of it."""
    folder = Path(run) / FOLDER
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    found = {int(match[1]): folder / match[0] for match in map(_STEP.fullmatch, names) if match}
    return dict(sorted(found.items()))


def read_index(path: str | Path) -> StepTokens:
    """Everything of a file but its columns and pieces: a few milliseconds, however many tokens it has."""
    return read_step(path, columns=())


def read_step(path: str | Path, *, columns: Collection[str] | None = None) -> StepTokens:
    """A step of the token log. `columns`: those to be read, and no pieces if there are none of them; None: all.

    Where the round was one optimizer step the log-probs before the update are those in it, and the file has them once:
    `old_logprobs` are then `new_logprobs`. Raises TokenLogError for a file that is torn or is no file of the log, and
    FileNotFoundError.
    """
    path = Path(path)
    with _opened(path) as archive:
        names = set(archive.files)
        index = json.loads(archive["index"].tobytes())
        if index["format"] != FORMAT:
            raise TokenLogError(f"{path} has format {index['format']}; this version reads {FORMAT}")
        aliases = {} if "old_logprobs" in names or "new_logprobs" not in names else {"old_logprobs": "new_logprobs"}
        present = tuple(
            name for name in (*TOKEN_COLUMNS, *TRAINED_COLUMNS) if name in names or aliases.get(name) in names
        )
        wanted = present if columns is None else tuple(name for name in present if name in columns)
        if columns is not None and columns and "action" not in wanted:
            wanted = ("action", *wanted)
        members = {name: archive[aliases.get(name, name)] for name in wanted}
        routes = {name: archive[name] for name in names if name.startswith("routes_")} if columns is None else {}
        supports = None
        if columns is None and "support_sizes" in names:
            supports = archive["support_sizes"], archive["support_ids"]
        pieces = _pieces(archive) if wanted else Pieces({})
        cutter = _Cutter(members, routes, supports)
        groups = tuple(_group(group, cutter) for group in index["groups"])
        cutter.require_end()
    return StepTokens(
        path=path,
        step=index["step"],
        complete=index["complete"],
        groups=groups,
        column_names=present,
        pieces=pieces,
    )


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """An npz file while it is read: whatever is wrong with it becomes a TokenLogError."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            yield archive
    except (FileNotFoundError, TokenLogError):
        raise
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, LookupError, TypeError, ValueError) as error:
        raise TokenLogError(f"{path} is no whole file of the token log: {error}") from error


def _pieces(archive: Any) -> Pieces:
    ids, ends, content = archive["piece_ids"].tolist(), archive["piece_ends"].tolist(), archive["piece_bytes"].tobytes()
    starts = [0, *ends][:-1]
    return Pieces({token: content[start:end] for token, start, end in zip(ids, starts, ends, strict=True)})


class _Cutter:
    """Cuts flat columns into those of segments, in order."""

    def __init__(
        self,
        columns: Mapping[str, np.ndarray],
        routes: Mapping[str, np.ndarray],
        supports: tuple[np.ndarray, np.ndarray] | None,
    ) -> None:
        self._columns = columns
        self._routes = routes
        self._supports = supports
        self._size = self._id = 0
        self._token = self._action = 0
        self._route = dict.fromkeys(routes, 0)

    def segment(self, tokens: int, actions: int) -> dict[str, np.ndarray]:
        own_T, own_A = slice(self._token, self._token + tokens), slice(self._action, self._action + actions)
        self._token, self._action = own_T.stop, own_A.stop
        return {name: column[own_T if name in TOKEN_COLUMNS else own_A] for name, column in self._columns.items()}

    def routes(self, described: Sequence[Any] | None) -> np.ndarray | None:
        if described is None or not self._routes:
            return None
        name, shape = f"routes_{described[0]}", described[1:]
        start = self._route[name]
        self._route[name] = end = start + math.prod(shape)
        return self._routes[name][start:end].reshape(shape)

    def supports(self, ids: int | None, *, actions: int) -> tuple[np.ndarray, np.ndarray] | None:
        if ids is None or self._supports is None:
            return None
        own_A, own_S = slice(self._size, self._size + actions), slice(self._id, self._id + ids)
        self._size, self._id = own_A.stop, own_S.stop
        return self._supports[0][own_A], self._supports[1][own_S]

    def require_end(self) -> None:
        for name, column in self._columns.items():
            used = self._token if name in TOKEN_COLUMNS else self._action
            if len(column) != used:
                raise TokenLogError(f"{name} has {len(column)} entries for {used} tokens")


def _group(found: Mapping[str, Any], cutter: _Cutter) -> TokenGroup:
    return TokenGroup(
        ordinal=found["ordinal"],
        prompt=found["prompt"],
        label=found["label"],
        datasource=found["datasource"],
        where=found["where"],
        images=tuple(found["images"]),
        choice=found["choice"],
        samples=tuple(_sample(sample, found["ordinal"], cutter) for sample in found["samples"]),
    )


def _sample(found: Mapping[str, Any], prompt: int, cutter: _Cutter) -> TokenSample:
    return TokenSample(
        prompt=prompt,
        sample=found["sample"],
        outcome=found["outcome"],
        reward=_float(found["reward"]),
        reward_size=_float(found["reward_size"]),
        reward_parts=tuple((name, float(v), float(w)) for name, v, w in found.get("reward_parts", ())),
        greedy_reward=_float(found.get("greedy_reward")),
        score=_float(found["score"]),
        text=found["text"],
        extra_logs={name: float(value) for name, value in found["extra_logs"].items()},
        error=found["error"],
        segments=tuple(_segment(segment, cutter) for segment in found["segments"]),
        agent=found.get("agent", ""),  # logs of earlier versions have neither
        fork=found.get("fork"),
    )


def _segment(found: Mapping[str, Any], cutter: _Cutter) -> TokenSegment:
    return TokenSegment(
        num_tokens=found["tokens"],
        num_actions=found["actions"],
        has_logprobs=found["logprobs"],
        has_turn_ends=found["turn_ends"],
        is_trained=found["trained"],
        images=tuple(
            TokenImage(**{**image, "size": None if image["size"] is None else tuple(image["size"])})
            for image in found["images"]
        ),
        columns=cutter.segment(found["tokens"], found["actions"]),
        routes=cutter.routes(found["routes"]),
        supports=cutter.supports(found.get("supports"), actions=found["actions"]),
    )


def _float(value: float | str | None) -> float | None:
    return None if value is None else float(value)


# ------------------------------------------------------------------------------------------------------ for training


def read_groups(path: str | Path) -> list[Group]:
    """The groups that the step was trained on, equal to what the loop had in every field that training reads.

    A label that JSON does not know is its text, and images of a prompt that the data does not name by path are left
    out: both were used up when the episode was played. Raises TokenLogError where the file has only some groups.
    """
    from openrlhf.types import Group, Prompt

    logged = read_step(path)
    if not logged.complete:
        raise TokenLogError(
            f"{path} has {len(logged.groups)} groups of its step, for people to read: to train on a step again, all "
            "are needed (--logger.rollouts_per_step -1)"
        )
    images: dict[str, ImageInput] = {}
    return [
        Group(
            prompt=Prompt(
                ordinal=group.ordinal,
                text=group.prompt,
                label=group.label,
                datasource=group.datasource,
                where=group.where,
                images=group.images,
            ),
            trajectories=tuple(_trajectory(sample, logged.path, images) for sample in group.samples),
        )
        for group in logged.groups
    ]


def _trajectory(sample: TokenSample, path: Path, images: dict[str, ImageInput]) -> Trajectory:
    from openrlhf.types import Fork, Outcome, RewardPart, SampleKey, Trajectory

    return Trajectory(
        key=SampleKey(sample.prompt, sample.sample),
        segments=tuple(_trained_segment(segment, path, images) for segment in sample.segments),
        outcome=Outcome(sample.outcome),
        reward=sample.reward,
        reward_size=sample.reward_size,
        reward_parts=tuple(RewardPart(*part) for part in sample.reward_parts),
        greedy_reward=sample.greedy_reward,
        score=sample.score,
        text=sample.text,
        extra_logs=sample.extra_logs,
        error=sample.error,
        agent=sample.agent,
        fork=None if sample.fork is None else Fork(*sample.fork),
    )


def _trained_segment(segment: TokenSegment, path: Path, images: dict[str, ImageInput]) -> Segment:
    import torch

    from openrlhf.types import PlacedImage, Segment, supports_from

    def tensor(column: np.ndarray | None) -> Any:
        return None if column is None else torch.from_numpy(column.copy())

    for placed in segment.images:
        if placed.digest not in images:
            images[placed.digest] = _read_image(path.parent / IMAGES / f"{placed.digest}.npz")
    return Segment(
        token_ids=torch.from_numpy(segment.token_ids.astype(np.int64)),
        action_mask=tensor(segment.action),
        rollout_logprobs=tensor(segment.logprobs),
        versions=tensor(segment.columns["versions"]),
        turn_rewards=tensor(segment.columns["rewards"]),
        turn_ends=tensor(segment.turn_ends),
        images=tuple(PlacedImage(placed.start, images[placed.digest]) for placed in segment.images),
        routes=tensor(segment.routes),
        supports=None if segment.supports is None else supports_from(*segment.supports),
    )


def _read_image(path: Path) -> ImageInput:
    import torch

    from openrlhf.types import ImageInput

    if not path.exists():
        raise TokenLogError(f"{path} is missing: an image that the step was trained on")
    with _opened(path) as archive:
        rest = json.loads(archive["index"].tobytes())
        return ImageInput(
            tensors={name: torch.from_numpy(archive[f"tensor_{i}"]) for i, name in enumerate(rest["tensors"])},
            token_ids=tuple(archive["token_ids"].tolist()),
            placeholder=rest["placeholder"],
            digest=rest["digest"],
            thumbnail=archive["thumbnail"].tobytes(),
            size=None if rest["size"] is None else tuple(rest["size"]),
        )
