"""Prompts, checked before training, in an order that is a pure function of (seed, ordinal), or that of a curriculum."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import torch

from openrlhf.data.boundaries import HUGE, longest_token
from openrlhf.data.curricula import Curriculum
from openrlhf.data.files import DataError
from openrlhf.data.image_places import DataImages, PlacedText, listed_images
from openrlhf.data.sources import Record, Records, named, warn_left_out
from openrlhf.data.templates import known_keys, render_prompt, usable_template
from openrlhf.models.image_processor import ImageProcessorError
from openrlhf.observability.metrics import Metrics
from openrlhf.types import Prompt
from openrlhf.utils.randomness import shuffled

logger = logging.getLogger(__name__)

BATCH = 1024
"""Prompts tokenised per call: fast tokenizers run a batch on all cores."""
_ROOM = "raise --data.max_len or lower --rollout.max_new_tokens"


DECODED = 32
"""Records with images that are read to their last pixel before a run begins."""


class PromptSet(Sequence[Prompt]):
    """The usable prompts of a data set, in file order; `prompts[i]` has ordinal i.

    Every record is rendered and checked once, here. Records without text are left out, with one warning that says how
    many; anything else that is wrong raises DataError with the record's number. Texts are rendered again when asked
    for, so memory stays that of the records.

    What becomes of prompts of more than `max_prompt_tokens` tokens is `long_prompts`: "cut" keeps them, and whoever
    plays them cuts their tokens from the left; "skip" leaves them out; "error" raises DataError. An image is never cut:
    "cut" leaves out long prompts that have some.

    Of every image the size is read, which finds files that are missing or are no images; the first ones are decoded to
    their end. A URL is not fetched for its size: such an image counts as one token here.
    """

    def __init__(
        self,
        records: Records,
        *,
        tokenizer: Any = None,
        input_key: str = "input",
        label_key: str | None = None,
        apply_chat_template: bool = False,
        input_template: str | None = None,
        images: DataImages | None = None,
        image_key: str = "images",
        teacher_key: str | None = None,
        max_prompt_tokens: int | None = None,
        long_prompts: str = "cut",
        flag: str = "--data.prompt_dataset",
    ) -> None:
        """`images`: how images are read, None: none are; `image_key` says then where they would be. `teacher_key`:
        where every record has the prompt that a teacher reads in the place of its own; needs a tokenizer."""
        if max_prompt_tokens is not None and tokenizer is None:
            raise ValueError("max_prompt_tokens needs a tokenizer to count with")
        self._records = records
        self._tokenizer = tokenizer
        self._input_key = input_key
        self._label_key = label_key
        self._apply_chat_template = apply_chat_template
        self._input_template = usable_template(input_template, apply_chat_template=apply_chat_template)
        self._images = images
        self._image_key = images.places.key if images else image_key
        self._teacher_key = teacher_key
        self.max_prompt_tokens = max_prompt_tokens
        self._long_prompts = long_prompts
        self._flag = flag
        self.datasources: set[str] = set()
        """The names of the prompts' sources, as metrics use them."""
        self._kept, self.digest = self._check_all()

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        return self.prompt(index, ordinal=index)

    def prompt(self, index: int, *, ordinal: int) -> Prompt:
        """Usable prompt `index`, under the identity `ordinal`."""
        row = int(self._kept[index])
        record = self._records[row]
        text, images = self._render(row, record)
        return Prompt(
            ordinal=ordinal,
            text=text,
            images=images,
            label=self._label(record),
            datasource=self._datasource(row, record),
            where=self._records.where(row),
            teacher_ids=self._teacher_ids(row, record),
        )

    def difficulties(self, key: str) -> np.ndarray:
        """float64 [N]: what records have under `key`. Reads all records; raises DataError for one without a number."""
        found = np.empty(len(self))
        for index, row in enumerate(self._kept.tolist()):
            record = self._records[row]
            value = record.get(key)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                problem = f"its {key!r} is no number: {value!r}" if key in record else f"it has no {key!r}"
                raise DataError(
                    f"{self._flag}, {self._records.where(row)}: {problem}: --data.curriculum difficulty needs one in "
                    f"every record, under --data.difficulty_key (this one has {known_keys(record)})"
                )
            found[index] = value
        return found

    def where(self, index: int) -> str:
        """`record 12 of train.jsonl`, for messages about prompt `index`."""
        return self._records.where(int(self._kept[index]))

    def num_tokens(self, prompt: Prompt) -> int:
        """The tokens of one of these prompts, those of its images included."""
        (length,) = self._lengths([PlacedText(prompt.text, prompt.images)])
        return length

    def _check_all(self) -> tuple[np.ndarray, str]:
        """Rows of the usable records, int64 [N], and a digest of their texts, labels and images."""
        kept: list[int] = []
        empty: list[int] = []
        long: list[int] = []
        uncut: list[int] = []
        unlabelled: list[int] = []
        with_images: list[int] = []
        digest = hashlib.blake2b(digest_size=8)
        rows = iter(range(len(self._records)))
        while batch := list(islice(rows, BATCH)):
            usable: list[tuple[int, PlacedText, Any]] = []
            sources: dict[int, str] = {}
            for row in batch:
                record = self._records[row]
                prompt = self._render(row, record)
                label = self._label(record)
                if label is None:
                    unlabelled.append(row)
                if prompt.images or (self._images is None and listed_images(record.get(self._image_key))):
                    with_images.append(row)
                if prompt.text:
                    usable.append((row, prompt, label))
                    sources[row] = self._datasource(row, record)
                else:
                    empty.append(row)
            first = set(with_images[:DECODED])
            self._decode([(row, prompt) for row, prompt, _ in usable if row in first])
            lengths = self._lengths([prompt for _, prompt, _ in usable], rows=[row for row, _, _ in usable])
            before = len(kept)
            for (row, prompt, label), length in zip(usable, lengths, strict=True):
                if length == 0:
                    empty.append(row)
                elif self.max_prompt_tokens is not None and length > self.max_prompt_tokens:
                    cut = self._long_prompts == "cut"
                    (uncut if cut and prompt.images else long).append(row)
                    if not cut or prompt.images:
                        continue
                if length:
                    kept.append(row)
                    self.datasources.add(sources[row])
                    digest.update(repr((prompt.text, label)).encode())
                    for image in prompt.images:
                        digest.update(image if isinstance(image, bytes) else image.encode())
            self._check_teacher(kept[before:])
        warn_left_out(self._records, empty, why=f"have an empty {self._input_key!r}", what="prompts", flag=self._flag)
        self._tell_long(long)
        too_long = f"are longer than {self.max_prompt_tokens} tokens and have images, which are never cut ({_ROOM})"
        warn_left_out(self._records, uncut, why=too_long, what="prompts", flag=self._flag)
        self._tell_unlabelled(unlabelled)
        self._tell_images(with_images)
        if not kept:
            raise DataError(
                f"{self._flag}: no usable prompt in {len(self._records)} records: {len(empty)} are empty, "
                f"{len(long) + len(uncut)} are longer than {self.max_prompt_tokens} tokens"
                + (f" ({_ROOM})" if long or uncut else "")
            )
        return np.array(kept, dtype=np.int64), digest.hexdigest()

    def _decode(self, prompts: list[tuple[int, PlacedText]]) -> None:
        """Read these images as whoever plays them will, so that what is wrong with all of them is found here."""
        for row, prompt in prompts:
            for image in prompt.images:
                with self._about(row):
                    assert self._images is not None
                    self._images.prepare(image)

    def _tell_images(self, rows: list[int]) -> None:
        if self._images is None and rows:
            logger.warning(
                "%s: %d of %d records have something under %r, which is not read: --data.max_images_per_prompt is 0",
                self._flag, len(rows), len(self._records), self._image_key,
            )  # fmt: skip
        elif self._images is not None and not rows:
            logger.warning(
                "%s: no record has an image, under %r or in its messages: is --data.image_key one of %s?",
                self._flag, self._image_key, known_keys(self._records[0]),
            )  # fmt: skip

    def _tell_long(self, rows: list[int]) -> None:
        too_long = f"are longer than {self.max_prompt_tokens} tokens"
        if not rows:
            return
        if self._long_prompts == "error":
            raise DataError(
                f"{self._flag}, {self._records.where(rows[0])}: {len(rows)} of {len(self._records)} prompts "
                f"{too_long}: {_ROOM}, or take another --data.long_prompts"
            )
        if self._long_prompts == "skip":
            warn_left_out(self._records, rows, why=too_long, what="prompts", flag=self._flag)
        else:
            logger.warning(
                "%s: %d of %d prompts %s and lose their beginning (%s; --data.long_prompts skip leaves them out): %s",
                self._flag, len(rows), len(self._records), too_long, _ROOM, named(self._records, rows),
            )  # fmt: skip

    def _tell_unlabelled(self, rows: list[int]) -> None:
        """Rewards get None for a label that is null or missing. Raises DataError when no record has one."""
        if self._label_key is None or not rows:
            return
        if not any(self._label_key in self._records[row] for row in range(len(self._records))):
            raise DataError(
                f"{self._flag}, {self._records.where(0)}: it has no {self._label_key!r}: "
                f"set --data.label_key to one of {known_keys(self._records[0])}"
            )
        logger.warning(
            "%s: %d of %d records have no %r: rewards and agents get None for it: %s",
            self._flag, len(rows), len(self._records), self._label_key, named(self._records, rows),
        )  # fmt: skip

    def _lengths(self, prompts: Sequence[PlacedText], *, rows: Sequence[int] = ()) -> list[int]:
        """Tokens of each prompt, with those of its images; characters where no tokenizer was given. `rows`: the
        prompts' records, for errors."""
        if self._tokenizer is None or not prompts:
            return [len(prompt.text) for prompt in prompts]
        # A rendered prompt already holds its special tokens.
        encoded = self._tokenizer([self._end(prompt.text) for prompt in prompts], add_special_tokens=False)
        lengths = [len(ids) for ids in encoded["input_ids"]]
        for index, prompt in enumerate(prompts):
            for image in prompt.images:
                with self._about(rows[index] if rows else None):
                    assert self._images is not None
                    token_ids = self._images.token_ids(image)
                    lengths[index] += 0 if token_ids is None else len(token_ids) - 1
        return lengths

    def _render(self, row: int, record: Record) -> PlacedText:
        """The prompt, and of a huge text its end: a prompt is cut there anyway, unless it has images."""
        with self._about(row):
            prompt = render_prompt(
                record,
                input_key=self._input_key,
                apply_chat_template=self._apply_chat_template,
                input_template=self._input_template,
                tokenizer=self._tokenizer,
                places=self._images.places if self._images else None,
                folder=self._records.folder(row),
            )
        return prompt if prompt.images else PlacedText(self._end(prompt.text))

    def _teacher_ids(self, row: int, record: Record) -> tuple[int, ...]:
        """The prompt that the teacher reads; () where it reads the policy's."""
        if self._teacher_key is None:
            return ()
        (ids,) = self._tokenizer([self._teacher_text(row, record)], add_special_tokens=False)["input_ids"]
        return tuple(ids)

    def _teacher_text(self, row: int, record: Record) -> str:
        """Written as the policy's prompt is. Raises DataError where there is none."""
        key = self._teacher_key
        assert key is not None
        with self._about(row):
            if key not in record:
                raise DataError(
                    f"it has no {key!r}, which --teacher.prompt_key names as the teacher's prompt (this one has "
                    f"{known_keys(record)})"
                )
            text = render_prompt(
                record,
                input_key=key,
                apply_chat_template=self._apply_chat_template,
                input_template=self._input_template,
                tokenizer=self._tokenizer,
            ).text
            if not text:
                raise DataError(f"its {key!r}, the teacher's prompt (--teacher.prompt_key), is empty")
        return text

    def _check_teacher(self, rows: Sequence[int]) -> None:
        """Of records that are kept. The teacher's prompt is never cut: what it has beyond the policy's is what it
        teaches. Raises DataError."""
        if self._teacher_key is None:
            return
        texts = [PlacedText(self._teacher_text(row, self._records[row])) for row in rows]
        for row, length in zip(rows, self._lengths(texts), strict=True):
            if self.max_prompt_tokens is not None and length > self.max_prompt_tokens:
                with self._about(row):
                    raise DataError(
                        f"its {self._teacher_key!r}, the teacher's prompt (--teacher.prompt_key), is longer than "
                        f"{self.max_prompt_tokens} tokens: {_ROOM}"
                    )

    def _end(self, text: str) -> str:
        """Of a huge text, the tokens that may be kept and at least one more: tokenising megabytes takes minutes."""
        if len(text) <= HUGE or self.max_prompt_tokens is None:
            return text
        return text[-max(HUGE, (self.max_prompt_tokens + 1) * longest_token(self._tokenizer)) :]

    @contextlib.contextmanager
    def _about(self, row: int | None) -> Iterator[None]:
        """Errors within name the record."""
        try:
            yield
        except (DataError, ImageProcessorError) as error:
            where = "" if row is None else f", {self._records.where(row)}"
            raise DataError(f"{self._flag}{where}: {error}") from error

    def _datasource(self, row: int, record: Record) -> str:
        """As the record says; otherwise the data set's name, where training prompts are of several."""
        given = record.get("datasource")
        return str(given or ("" if self._flag == "--eval.dataset" else self._records.entry(row)) or "default")

    def _label(self, record: Record) -> Any:
        return "" if self._label_key is None else record.get(self._label_key)


class PromptStream:
    """The tasks of a run, numbered from 0: each pass over the prompts is in a new order, or in that of a curriculum.

    With N prompts, ordinal o is prompt π_e(o mod N) of pass e = o div N, where the permutation π_e is a function
    of (seed, e) alone. So a retry or a resumed run gets the same task from the same ordinal.

    A curriculum chooses the prompt of an ordinal when it is first taken, and what it chose is kept. Whoever takes
    prompts tells at each round what became of them (`settle`). The number of tasks is the same: N for each pass.
    """

    def __init__(
        self,
        prompt_set: PromptSet,
        *,
        seed: int,
        shuffle: bool = True,
        num_episodes: int | None = None,
        curriculum: Curriculum | None = None,
    ) -> None:
        """`num_episodes` passes; None: endless."""
        if num_episodes is not None and num_episodes < 1:
            raise ValueError(f"num_episodes must be >= 1, got {num_episodes}")
        self._prompts = prompt_set
        self._seed = seed
        self._shuffle = shuffle
        self._num_episodes = num_episodes
        self._curriculum = curriculum
        self._next = 0
        self._again: list[int] = []
        self._drawn: list[int] = []
        """The prompts behind the first ordinals, up to the last that a curriculum has drawn."""
        self._in_play: Counter[int] = Counter()
        """How often each prompt is behind an ordinal that was taken and is not settled; kept for a curriculum alone."""
        self._order = lru_cache(maxsize=2)(lambda episode: shuffled(len(prompt_set), seed=seed, epoch=episode))

    def __len__(self) -> int:
        """Ordinals in all passes together."""
        if self._num_episodes is None:
            raise TypeError("an endless prompt stream has no length")
        return len(self._prompts) * self._num_episodes

    @property
    def next_ordinal(self) -> int:
        """The first ordinal that was never taken."""
        return self._next

    @property
    def remaining(self) -> int | None:
        """How many prompts `take` still has; None: endlessly many."""
        return None if self._num_episodes is None else len(self._again) + len(self) - self._next

    @property
    def datasources(self) -> set[str]:
        return self._prompts.datasources

    def prompt_at(self, ordinal: int) -> Prompt:
        """With a curriculum, of an ordinal that was taken."""
        return self._prompts.prompt(self._index(ordinal), ordinal=ordinal)

    def where(self, ordinal: int) -> str:
        """`record 12 of train.jsonl`, for messages about prompt `ordinal`."""
        return self._prompts.where(self._index(ordinal))

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts; fewer at the end. Those that were given back come first."""
        if self.remaining is not None:
            n = min(n, self.remaining)
        again, self._again = self._again[:n], self._again[n:]
        first_new, self._next = self._next, self._next + n - len(again)
        self._draw(first_new)
        return [self.prompt_at(ordinal) for ordinal in (*again, *range(first_new, self._next))]

    def give_back(self, ordinals: Iterable[int]) -> None:
        """These were taken and came to nothing: `take` gives them again."""
        returned = {*self._again, *ordinals}
        if never_taken := [ordinal for ordinal in returned if not 0 <= ordinal < self._next]:
            raise ValueError(f"prompt ordinals {sorted(never_taken)} were never taken")
        self._again = sorted(returned)

    def settle(self, scores: Mapping[int, Sequence[float]]) -> None:
        """A round is handed to training: what its prompts, and those that were turned away for it, have scored, by
        ordinal. What is taken from now on may depend on it."""
        if self._curriculum is None:
            return
        results = [(self._index(ordinal), scores[ordinal]) for ordinal in sorted(scores)]
        self._in_play -= Counter(index for index, _ in results)
        self._curriculum.learn(results)

    def metrics(self) -> Metrics:
        """What a curriculum knows."""
        return Metrics() if self._curriculum is None else self._curriculum.metrics()

    def __iter__(self) -> Iterator[Prompt]:
        while prompts := self.take(1):
            yield prompts[0]

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "next_ordinal": self._next,
            "again": list(self._again),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "size": len(self._prompts),
            "digest": self._prompts.digest,
        }
        if self._drawn:
            state["drawn"] = torch.tensor(self._drawn, dtype=torch.int64)
        if self._curriculum is not None:
            state["curriculum"] = self._curriculum.state_dict()
            state["in_play"] = sorted(self._in_play.elements())
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Raises DataError when ordinals would mean other prompts.

        The curriculum may be another one than that of `state`: what was taken stays what it was, and success rates
        that are known stay known.
        """
        if state["seed"] != self._seed or state["shuffle"] != self._shuffle:
            raise DataError(
                f"the checkpoint's prompt order was made with --train.seed {state['seed']}, now it is {self._seed}: "
                f"resume with the same seed"
            )
        if state["size"] != len(self._prompts):
            raise DataError(
                f"the checkpoint was made with {state['size']} prompts, now there are {len(self._prompts)}: resume "
                f"with the same data and limits, or start a new run from the checkpoint's model"
            )
        if state["digest"] != self._prompts.digest:
            logger.warning("the prompts' texts or labels are not those the checkpoint was made with")
        self._next = state["next_ordinal"]
        self._again = list(state["again"])
        self._drawn = state["drawn"].tolist() if "drawn" in state else []
        if self._curriculum is not None and "curriculum" in state:
            self._curriculum.load_state_dict(state["curriculum"])
            self._in_play = Counter(state["in_play"])

    def _draw(self, first: int) -> None:
        """Have the curriculum choose the prompts from ordinal `first` on. Those before it that no curriculum has chosen
        are in the order without one: the run had none then."""
        if self._curriculum is None:
            return
        self._drawn += [self._index(ordinal) for ordinal in range(len(self._drawn), first)]
        for ordinal in range(first, self._next):
            self._drawn.append(index := self._curriculum.draw(ordinal, self._in_play))
            self._in_play[index] += 1

    def _index(self, ordinal: int) -> int:
        if 0 <= ordinal < len(self._drawn):
            return self._drawn[ordinal]
        episode, position = divmod(ordinal, len(self._prompts))
        never_drawn = self._curriculum is not None and ordinal >= self._next
        if ordinal < 0 or never_drawn or (self._num_episodes is not None and episode >= self._num_episodes):
            raise IndexError(f"prompt ordinal {ordinal} is outside the stream")
        return int(self._order(episode)[position]) if self._shuffle else position
