"""Checks before a run begins, of what would otherwise fail after hours of training."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError

from openrlhf.backends.ranks import ALONE, Ranks
from openrlhf.checkpoint.folder import CheckpointError, Claim, ClaimedError
from openrlhf.checkpoint.manager import ResumePoint, run_on_all_ranks
from openrlhf.config.commands import RLConfig, TrainerConfig
from openrlhf.config.fields import ConfigError
from openrlhf.config.rules import required
from openrlhf.config.schema import to_dict
from openrlhf.config.training import TrainSection
from openrlhf.data.files import hub_reachable, offline
from openrlhf.data.image_places import DataImages
from openrlhf.data.templates import image_places, set_chat_template
from openrlhf.models.image_processor import ImageProcessor, ImageProcessorError
from openrlhf.models.loading import ModelLoadError, load_tokenizer
from openrlhf.observability.run_directory import RunDirectory
from openrlhf.runs.resume import run_directory_of

logger = logging.getLogger(__name__)


def checked_model_dir(output_dir: str) -> Path:
    """The folder of the trained model, as an absolute path that can be written. Raises ConfigError."""
    flag, target = f"--ckpt.output_dir {output_dir}", Path(output_dir).expanduser().resolve()
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{flag}: this is a file; name a folder for the model")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # The export is written beside its place first.
        tempfile.TemporaryDirectory(dir=target.parent).cleanup()
    except OSError as error:
        raise ConfigError(f"{flag}: cannot be written ({error.strerror}); name another folder") from error
    return target


@contextlib.contextmanager
def claimed_model_dir(folder: Path, ranks: Ranks = ALONE) -> Iterator[None]:
    """While open no other run may write its model there. Raises CheckpointError where one is about to.

    The lock is beside the folder, which the export may replace. The ranks of a run have it run_on_all_ranks.
    """
    flag = f"--ckpt.output_dir {folder}"
    claim = Claim(folder.with_name(f".{folder.name}.lock"), flag=flag)

    def take() -> None:
        try:
            claim.take()
        except ClaimedError as holder:
            raise CheckpointError(
                f"{flag}: {holder} writes its model there; wait for it, or name another folder"
            ) from None

    run_on_all_ranks(ranks, lambda: take() if ranks.is_main else None)
    try:
        yield
    finally:
        if ranks.is_main:
            claim.release(remove=True)


def create_run_directory(config: TrainerConfig, found: ResumePoint | None = None) -> RunDirectory:
    """That of the run which wrote the checkpoint `found`, or a new one. Raises ConfigError."""
    directory, continued = run_directory_of(config.logger, found)
    try:
        return RunDirectory.create(directory, to_dict(config), reuse=continued)
    except OSError as error:
        raise ConfigError(f"--logger.run_dir {directory}: {error.strerror or 'this is a file'}") from error


@contextlib.contextmanager
def reading_model(path: str, *, flag: str) -> Iterator[None]:
    """Around the loading of a model: what is wrong with its files becomes a ModelLoadError.

    A Hub name is looked for on the Hub, or at once in its cache when the Hub cannot be reached.
    """
    if Path(path).expanduser().exists() or not _may_be_hub_name(path) or hub_reachable():
        try:
            yield
        except (SafetensorError, RuntimeError) as error:  # damaged files; weights of other shapes; no memory
            raise ModelLoadError(f"{flag} {path}: cannot load the model: {error}") from error
        return
    try:
        with offline():
            yield
    except ModelLoadError as error:
        raise ModelLoadError(
            f"{flag} {path}: there is no such folder (looked in {Path.cwd()}), the Hub's cache has no such model and "
            "the Hub cannot be reached: name a model's folder, or download it first"
        ) from error


def policy_tokenizer(config: RLConfig) -> Any:
    """The tokenizer of the model that an RL run trains, in whatever process. Raises ModelLoadError."""
    path = required(config.actor.model_name_or_path)
    with reading_model(path, flag="--actor.model_name_or_path"):
        tokenizer = load_tokenizer(
            path,
            use_fast=not config.data.disable_fast_tokenizer,
            trust_remote_code=config.actor.trust_remote_code,
        )
    return set_chat_template(
        tokenizer,
        config.data.tokenizer_chat_template,
        config.data.template_arguments,
        needed=config.plays_world,
    )


REACH_SECONDS = 60.0
"""Seconds for the check of each of a teacher's servers before the first step."""


def check_teacher(config: RLConfig, tokenizer: Any) -> None:
    """A teacher judges the policy's tokens by their ids, so both must give every id the same meaning.

    `tokenizer`: the policy's. Raises ModelLoadError.
    """
    if config.teacher.remote_url is not None:
        from openrlhf.learners.remote_teacher import RemoteTeacherError, check_remote_teacher

        try:
            check_remote_teacher(
                config.teacher.urls,
                tokenizer=tokenizer,
                top_k=0 if config.teacher_rewards else config.teacher.top_k,
                max_len=config.data.max_len,
                timeout=min(config.teacher.timeout, REACH_SECONDS),
                api_key=config.teacher.api_key,
            )
        except RemoteTeacherError as error:
            raise ModelLoadError(str(error)) from error
    path = config.teacher.model_name_or_path
    if path is None:
        return
    flag = "--teacher.model_name_or_path"
    with reading_model(path, flag=flag):
        theirs = load_tokenizer(
            path,
            use_fast=not config.data.disable_fast_tokenizer,
            trust_remote_code=config.actor.trust_remote_code,
            flag=flag,
        )
    own_ids, their_ids = tokenizer.get_vocab(), theirs.get_vocab()
    if own_ids == their_ids:
        return
    differing = [token for token in sorted(own_ids, key=own_ids.__getitem__) if their_ids.get(token) != own_ids[token]]
    what = (
        f"{differing[0]!r} is token {own_ids[differing[0]]} of the policy, and "
        + (f"token {their_ids[differing[0]]} of the teacher" if differing[0] in their_ids else "none of the teacher")
        if differing
        else f"it has {len(their_ids)} tokens, and the policy {len(own_ids)}"
    )
    raise ModelLoadError(
        f"{flag} {path}: its tokenizer has another vocabulary than that of --actor.model_name_or_path: {what}. Take a "
        "teacher of the same family"
    )


def policy_images(config: RLConfig, tokenizer: Any) -> DataImages | None:
    """How the images of prompts are found and processed, in whatever process; None for a run without images.

    `tokenizer`: that of `policy_tokenizer`. Raises ModelLoadError.
    """
    return data_images(
        required(config.actor.model_name_or_path),
        tokenizer,
        config.data,
        trust_remote_code=config.actor.trust_remote_code,
        flag="--actor.model_name_or_path",
    )


class ImageFlags(Protocol):
    """What a section of flags says about images."""

    @property
    def image_key(self) -> str: ...

    @property
    def max_images_per_prompt(self) -> int: ...

    @property
    def allow_image_urls(self) -> bool: ...


def data_images(
    path: str, tokenizer: Any, data: ImageFlags, *, trust_remote_code: bool, flag: str
) -> DataImages | None:
    """How the images of records are found, and processed for the model at `path`, which `flag` names; None where the
    flags ask for none. Raises ModelLoadError."""
    if not data.max_images_per_prompt:
        return None
    with reading_model(path, flag=flag):
        processor = load_image_processor(path, tokenizer, trust_remote_code=trust_remote_code, flag=flag)
    places = image_places(
        processor,
        tokenizer,
        key=data.image_key,
        most=data.max_images_per_prompt,
        allow_urls=data.allow_image_urls,
    )
    return DataImages(places, processor)


def load_image_processor(path: str, tokenizer: Any, *, trust_remote_code: bool, flag: str) -> ImageProcessor:
    """The image processor of a model that is to read images. Raises ModelLoadError, also where it cannot."""
    if importlib.util.find_spec("PIL") is None:
        raise ModelLoadError(
            "--data.max_images_per_prompt: images need Pillow: pip install -e '.[vlm]' in the repository"
        )
    try:
        processor = ImageProcessor.load(path, tokenizer, trust_remote_code=trust_remote_code)
    except ImageProcessorError as error:
        raise ModelLoadError(f"{flag} {error}") from error
    if processor is None:
        raise ModelLoadError(
            f"{flag} {path}: this model reads no images (its configuration has no vision_config), and "
            "--data.max_images_per_prompt asks for them: take a model that does, or leave the flag out"
        )
    return processor


def warn_of_positions(model_config: Any, *, max_len: int) -> None:
    """Sequences longer than the model was made for are possible, and seldom meant."""
    known = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if isinstance(known, int) and max_len > known:
        logger.warning("--data.max_len %d is more than the %d positions the model was made for", max_len, known)


def warn_of_few_steps(train: TrainSection, available: int, *, remedy: str) -> None:
    """`available`: steps until the data is through."""
    if train.total_steps is not None and train.total_steps > available:
        logger.warning(
            "--train.total_steps %d: the data is through after %d steps, and the run ends there (raise %s for more)",
            train.total_steps, available, remedy,
        )  # fmt: skip


def _may_be_hub_name(path: str) -> bool:
    return not path.startswith((".", "/", "~")) and path.count("/") <= 1
