"""`openrlhf check DATA`: how its records are read, and which tokens are learnt, by the code that trains on them."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import IO, Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.text import Text

from openrlhf.checking.display import MOST_CHARACTERS, PIPE_WIDTH, shown
from openrlhf.checking.image_display import ImageDisplay
from openrlhf.config.commands import RLConfig, RMConfig, TrainerConfig
from openrlhf.config.data import PromptDataSection
from openrlhf.config.fields import ConfigError
from openrlhf.config.parser import parse
from openrlhf.data.examples import Example, TokenisedSet
from openrlhf.data.files import DataError, Record
from openrlhf.data.image_places import DataImages, image_sources
from openrlhf.data.images import ImageError, read_image
from openrlhf.data.preferences import Judged, Pair
from openrlhf.data.prompts import PromptSet
from openrlhf.data.recognition import ANSWERS, is_chat
from openrlhf.data.sources import load_records
from openrlhf.data.steps import JudgedSteps, judged_tokens
from openrlhf.models.image_processor import ImageProcessorError
from openrlhf.models.loading import ModelLoadError
from openrlhf.observability.turns import TextImage
from openrlhf.runs.local_copies import DATASET, MODEL, local_copy
from openrlhf.types import PlacedImage, Prompt

MOST_BROKEN = 20
"""The most images that cannot be read that are named."""
COMMANDS = {
    "sft": "train_sft",
    "rm": "train_rm",
    "dpo": "train_dpo",
    "kto": "train_dpo",
    "prm": "train_rm",
    "rl": "train_ppo_ray",
}
"""Kind of data → the command that trains on it."""


ABOUT = {
    "rl": "The policy goes on from what it reads here.",
    "rm": "A text's reward is read at its last token; all of it is learnt from.",
}
"""Kind of data → how its texts are used, where no part of them is learnt more than others."""


class TextPart(NamedTuple):
    """Neighbouring tokens of a text that are learnt, or are not."""

    text: str
    learnt: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownText:
    """A tokenised text, for people."""

    name: str
    """The role of the text: `chosen`, `prompt`; empty where there is only one."""
    parts: tuple[TextPart, ...]
    """An image in them is a mark: `[image 1: 54 tokens]`."""
    tokens: int
    learnt: int
    images: tuple[TextImage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRecord:
    where: str
    facts: str
    """Values that come with the texts: a margin, a label."""
    texts: tuple[ShownText, ...]


def run(argv: Sequence[str]) -> int:
    """Exit status: 0 when training can use the data, 1 when it cannot, 2 for options that cannot be right."""
    options, flags = _parser().parse_known_args(argv[1:])
    data = argv[0]
    if options.model is None:
        _complain("--model is missing: the folder or Hub name of the model whose tokenizer and chat template it is for")
        return 2
    told, page = _Told(), _Page(sys.stdout)
    with told.listening():
        try:
            if any(word.partition("=")[0] == "--use_ms" for word in flags):
                data = local_copy(data, DATASET, flag="DATA")
                options.model = local_copy(options.model, MODEL, flag="--model")
            purpose = options.purpose or guess(load_records(data, max_samples=1, flag="DATA")[0], flags)
            config = configure(purpose, data, options.model, flags)
            seen = None
            if config.data.max_images_per_prompt:
                with page.working("reading all images …"):
                    seen = read_images(config, data)
            if seen is not None and seen.broken:
                for line in [*seen.broken[:MOST_BROKEN], *_more(len(seen.broken) - MOST_BROKEN)]:
                    _complain(line)
                return 1
            found = read(config)
            records = [show(found, index) for index in range(min(options.records, len(found.samples)))]
        except (ConfigError, DataError, ModelLoadError, ImageProcessorError) as error:
            for line in told.lines:
                print(f"note: {line}", file=sys.stderr)
            _complain(str(error))
            return 2 if isinstance(error, ConfigError) else 1
    told_of_all = summary(found.samples, config)
    if seen is not None:
        told_of_all += f" {seen.number:,} image{'' if seen.number == 1 else 's'} read, none of them broken."
    page.show(purpose, records, told_of_all, told.lines, guessed=options.purpose is None)
    return 0


def _more(count: int) -> list[str]:
    return [f"{count:,} more images cannot be read"] if count > 0 else []


def guess(record: Record, flags: Sequence[str] = ()) -> str:
    """The kind of data that a record is, from its keys and from the flags that name keys."""
    given = {word.split("=")[0].rpartition(".")[2].lstrip("-") for word in flags if word.startswith("--")}
    if {"chosen", "rejected"} <= {*record} or given & {"chosen_key", "rejected_key"}:
        return "dpo"
    if {"steps", "labels"} <= {*record} or given & {"steps_key", "labels_key"}:
        return "prm"
    if ("label" in record and "prompt" in record and any(key in record for key in ANSWERS)) or "response_key" in given:
        return "kto"
    if given & {"output_key", "multiturn", "pretrain_mode", "pretrain_mode_enable"} or "completion" in record:
        return "sft"
    chat = next((record[key] for key in ("messages", "input") if is_chat(record.get(key))), None)
    return "sft" if chat is not None and chat[-1]["role"] == "assistant" else "rl"


def configure(purpose: str, data: str, model: str, flags: Sequence[str]) -> TrainerConfig:
    """The configuration of a run on this data. Raises ConfigError."""
    where, what = ("actor", "prompt_dataset") if purpose == "rl" else ("model", "dataset")
    words = [f"--{where}.model_name_or_path", model, f"--data.{what}", data]
    if purpose in ("kto", "prm"):
        words += ["--model.loss_type", purpose]
    config = parse(COMMANDS[purpose], [*words, *flags])
    assert isinstance(config, TrainerConfig)
    return config


class ReadData(NamedTuple):
    samples: TokenisedSet[Any] | PromptSet
    tokenizer: Any
    images: DataImages | None
    """How images are read; None: they are not."""


def read(config: TrainerConfig) -> ReadData:
    """Its data as a run reads it. Raises DataError and ModelLoadError."""
    if isinstance(config, RLConfig):
        from openrlhf.runs.preflight import policy_images, policy_tokenizer
        from openrlhf.runs.rl_assembly import prompts_of

        tokenizer = policy_tokenizer(config)
        images = policy_images(config, tokenizer)
        return ReadData(prompts_of(config, tokenizer, evaluation=False, images=images), tokenizer, images)
    from openrlhf.runs.supervised_assembly import images_of, samples_of, tokenizer_of

    tokenizer = tokenizer_of(config)
    images = images_of(config, tokenizer)
    return ReadData(samples_of(config, tokenizer, images=images), tokenizer, images)


class ReadImages(NamedTuple):
    """The images of all records, read to their last pixel."""

    number: int
    broken: list[str]
    """The record and what is wrong with its image."""


def read_images(config: TrainerConfig, data: str) -> ReadImages:
    """A run looks at the beginning of each image before it starts, and meets a truncated one in the middle of training.
    Raises DataError."""
    given = config.data
    split = given.prompt_split if isinstance(given, PromptDataSection) else given.dataset_split
    trusts = given.trust_remote_code
    records = load_records(data, split=split, max_samples=given.max_samples, trust_remote_code=trusts, flag="DATA")
    # Records that have no other key are read with `image`.
    keys = dict.fromkeys([given.image_key, "image"] if given.image_key == "images" else [given.image_key])

    def problems(row: int) -> tuple[int, list[str]]:
        record, found, count = records[row], [], 0
        present = [key for key in keys if key in record] or [given.image_key]
        for count, source in enumerate((s for s in image_sources(record, present[0]) if s is not None), start=1):
            try:
                read_image(source, allow_urls=given.allow_image_urls, folder=records.folder(row))
            except ImageError as error:
                found.append(f"{records.where(row)}: image {count}: {error}")
        return count, found

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        results = list(threads.map(problems, range(len(records))))
    return ReadImages(sum(count for count, _ in results), [line for _, lines in results for line in lines])


def show(data: ReadData, index: int) -> ShownRecord:
    """Sample `index`, token by token. Raises DataError for an image that cannot be read."""
    samples, tokenizer, images = data
    sample, where = samples[index], samples.where(index)
    if isinstance(samples, PromptSet):
        facts = f"label {shown(repr(sample.label), 60)}"
        return ShownRecord(where=where, facts=facts, texts=(_shown_prompt(sample, samples, images),))
    match sample:
        case Pair():
            texts = (shown_text(sample.chosen, tokenizer, "chosen"), shown_text(sample.rejected, tokenizer, "rejected"))
            return ShownRecord(where=where, facts=f"margin {sample.margin:g}" if sample.margin else "", texts=texts)
        case Judged():
            facts = "wanted" if sample.desirable else "not wanted"
            return ShownRecord(where=where, facts=facts, texts=(shown_text(sample.example, tokenizer),))
        case JudgedSteps():
            facts = "steps " + ", ".join("good" if good else "bad" for good in sample.good)
            return ShownRecord(where=where, facts=facts, texts=(shown_text(judged_tokens(sample), tokenizer),))
    return ShownRecord(where=where, facts="", texts=(shown_text(sample, tokenizer),))


def _shown_prompt(prompt: Prompt, samples: PromptSet, images: DataImages | None) -> ShownText:
    part = TextPart(prompt.text, False)
    if images is None or not prompt.images:
        return ShownText(name="prompt", parts=(part,), tokens=samples.num_tokens(prompt), learnt=0)
    expanded = images.processor.expand(prompt.text, [images.prepare(image) for image in prompt.images])
    parts, marked = _with_marks([part], expanded.images, images.processor.image_token)
    return ShownText(name="prompt", parts=parts, tokens=len(expanded.token_ids), learnt=0, images=marked)


def shown_text(example: Example, tokenizer: Any, name: str = "") -> ShownText:
    """Its text, cut where what is learnt begins and ends."""
    ids, mask, parts, end, before = example.token_ids.tolist(), example.target_mask.tolist(), [], 0, ""
    images = example.images
    for placed in reversed(images):
        ids[placed.start : placed.end], mask[placed.start : placed.end] = [placed.image.placeholder], [False]
    for learnt, tokens in groupby(mask):
        end += len(list(tokens))
        # A piece by itself may lose a space: the text grows, and the piece is what it grows by.
        text = tokenizer.decode(ids[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        parts.append(TextPart(text[len(before) :], learnt))
        before = text
    token = tokenizer.decode([images[0].image.placeholder], skip_special_tokens=False) if images else ""
    marked_parts, marked = _with_marks(parts, images, token)
    learnt_count = int(example.target_mask.sum())
    return ShownText(name=name, parts=marked_parts, tokens=len(example), learnt=learnt_count, images=marked)


def _with_marks(
    parts: Sequence[TextPart], images: Sequence[PlacedImage], token: str
) -> tuple[tuple[TextPart, ...], tuple[TextImage, ...]]:
    """The parts with a mark for each image, where `token` stands for it: no text of a user's may hold this token."""
    if not images:
        return tuple(parts), ()
    numbers: dict[str, int] = {}
    waiting = list(images)
    marked: list[TextImage] = []

    def mark(match: re.Match[str]) -> str:
        placed = waiting.pop(0)
        number = numbers.setdefault(placed.image.digest, len(numbers) + 1)
        marked.append(TextImage(number=number, at=match.start(), placed=placed))
        return marked[-1].mark

    return tuple(part._replace(text=re.sub(re.escape(token), mark, part.text)) for part in parts), tuple(marked)


def lines_of(record: ShownRecord, purpose: str) -> list[str]:
    """The record in a line for each text, what is learnt between ⟦ and ⟧."""
    lines = [record.facts] if record.facts else []
    for text in record.texts:
        marked = "".join(
            f"⟦{shown(part.text, MOST_CHARACTERS)}⟧" if part.learnt and purpose not in ABOUT else
            shown(part.text, MOST_CHARACTERS)
            for part in text.parts
        )  # fmt: skip
        lines.append(f"{text.name}: {marked}" if text.name else marked)
    return lines


def summary(samples: TokenisedSet[Any] | PromptSet, config: TrainerConfig) -> str:
    """A sentence or two about all records."""
    if isinstance(samples, PromptSet):
        return (
            f"{len(samples):,} prompt{'s' if len(samples) > 1 else ''} for a run to play; "
            f"there is room for {samples.max_prompt_tokens:,} tokens of each."
        )
    lengths, learnt = np.array(samples.lengths), np.array(samples.target_counts)
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in samples.skipped.items())
    part = "" if isinstance(config, RMConfig) else f", {learnt.sum() / lengths.sum():.0%} of them learnt"
    return (
        f"{len(samples):,} sample{'s' if len(samples) > 1 else ''} with {lengths.sum():,} tokens{part}. "
        f"Cut at --data.max_len {config.data.max_len}: {samples.num_truncated:,}. "
        f"Left out: {sum(samples.skipped.values()):,}{f' ({reasons})' if reasons else ''}."
    )


class _Told(logging.Handler):
    """Collects the messages of reading the data."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        logger = logging.getLogger("openrlhf")
        before = logger.level, logger.propagate
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.addHandler(self)
        try:
            yield
        finally:
            logger.removeHandler(self)
            logger.setLevel(before[0])
            logger.propagate = before[1]


class _Page:
    """Colours on a terminal, plain marks in a pipe."""

    def __init__(self, file: IO[str]) -> None:
        self._console = Console(file=file, highlight=False, markup=False, emoji=False)
        if not self._console.is_terminal:
            self._console.width = PIPE_WIDTH
        self._images = ImageDisplay(self._console)

    def working(self, what: str) -> contextlib.AbstractContextManager[Any]:
        """Something that moves, on a terminal only."""
        return self._console.status(Text(what)) if self._console.is_terminal else contextlib.nullcontext()

    def show(
        self, purpose: str, records: Sequence[ShownRecord], summary: str, told: Sequence[str], *, guessed: bool
    ) -> None:
        command = {"kto": "dpo --model.loss_type kto", "prm": "rm --model.loss_type prm"}.get(purpose, purpose)
        looks = f"Read as `openrlhf {command}` reads it"
        self._print(Text(looks + (" (--as says otherwise)." if guessed else "."), style="bold"))
        for line in told:
            self._print(Text.assemble(("note: ", "yellow"), shown(line, 2000)), soft_wrap=True)
        mark = "green" if self._console.is_terminal else "between ⟦ and ⟧"
        self._print(ABOUT.get(purpose, f"What is learnt is {mark}."))
        for record in records:
            self._print("")
            self._print(Text.assemble((record.where, "bold"), f", {record.facts}" if record.facts else ""))
            for text in record.texts:
                learnt = "" if purpose in ABOUT else f", {text.learnt} learnt"
                self._print(Text(f"{text.name or 'text'}: {text.tokens} tokens{learnt}", style="dim"))
                self._print(self._marked(text.parts, plain=purpose in ABOUT), soft_wrap=True)
                self._images.show(text.images)
        self._print("")
        self._print(summary, soft_wrap=True)

    def _marked(self, parts: Sequence[TextPart], *, plain: bool) -> Text:
        text = Text()
        for part in parts:
            words = shown(part.text, MOST_CHARACTERS, lines=True)
            if plain or not part.learnt:
                text.append(words)
            elif self._console.is_terminal:
                text.append(words, style="bold black on green")
            else:
                text.append(f"⟦{words}⟧")
        return text

    def _print(self, what: Any, **how: Any) -> None:
        self._console.print(what, **how)


def _complain(text: str) -> None:
    for line in text.splitlines():
        print(f"error: {line}", file=sys.stderr)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="openrlhf check",
        usage="openrlhf check DATA --model MODEL [--as sft|rm|dpo|kto|rl] [FLAGS of that command]",
        description="Show how a data set is read, and which tokens of it are learnt: a few records in full, how many "
        "are cut or left out, and what could not be used.",
        allow_abbrev=False,
    )
    parser.add_argument(
        *("--model", "--pretrain", "--model.model_name_or_path", "--actor.model_name_or_path"),
        metavar="MODEL",
        help="whose tokenizer and chat template are used",
    )
    parser.add_argument(
        "--as", dest="purpose", choices=tuple(COMMANDS), help="what the data is for (default: by its keys)"
    )
    parser.add_argument("--records", type=_count, default=3, metavar="N", help="records to show in full (3)")
    return parser
