"""The workbench of a check: prompts, a model to answer them, and the sampling parameters of training."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from openrlhf.agents.episode_worker import EpisodeSettings
from openrlhf.checking.options import CheckOptions
from openrlhf.checking.tiny_model import builtin_prompts, write_tiny_model
from openrlhf.data.prompts import PromptSet
from openrlhf.data.sources import load_records
from openrlhf.models.loading import LoadSettings, load_policy, load_tokenizer, silence_progress_bars
from openrlhf.rollout.embedded import EmbeddedEngine
from openrlhf.runs.preflight import reading_model
from openrlhf.types import Prompt, SamplingParams
from openrlhf.utils.randomness import derive_seed

PROMPTS = 4
"""How many prompts of the user's data are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workbench:
    """The same for every file."""

    options: CheckOptions
    model_folder: str
    engine: EmbeddedEngine
    tokenizer: Any
    prompts: list[Prompt]

    def sampling_params(self, prompt: Prompt, sample: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.options.max_new_tokens, seed=derive_seed(0, "check", prompt.ordinal, sample)
        )

    def episode_settings(self) -> EpisodeSettings:
        return EpisodeSettings(
            agent_file=str(self.options.file),
            tokenizer=self.model_folder,
            use_fast=True,
            trust_remote_code=False,
            max_length=self.options.max_len,
            max_steps=self.options.max_steps,
            max_model_len=self.engine.max_model_len,
        )


@contextlib.contextmanager
def workbench(options: CheckOptions) -> Iterator[Workbench]:
    """The user's model and prompts, or our own. Raises ModelLoadError or DataError."""
    silence_progress_bars()
    with contextlib.ExitStack() as held:
        folder, device = options.pretrain, torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if folder is None:
            folder, device = held.enter_context(tempfile.TemporaryDirectory()), torch.device("cpu")
            write_tiny_model(Path(folder))
        with reading_model(folder, flag="--pretrain"):
            tokenizer = load_tokenizer(folder, flag="--pretrain")
            policy = load_policy(folder, LoadSettings(device=device, flag="--pretrain"))
        yield Workbench(
            options=options,
            model_folder=folder,
            engine=EmbeddedEngine(policy.model, tokenizer, max_model_len=options.max_len),
            tokenizer=tokenizer,
            prompts=_prompts(options, tokenizer),
        )


def _prompts(options: CheckOptions, tokenizer: Any) -> list[Prompt]:
    if options.prompt_data is None:
        return builtin_prompts(tokenizer if options.apply_chat_template else None)
    flag = "--prompt_data"
    prompts = PromptSet(
        load_records(options.prompt_data, max_samples=PROMPTS, flag=flag),
        tokenizer=tokenizer,
        input_key=options.input_key,
        label_key=options.label_key,
        apply_chat_template=options.apply_chat_template,
        max_prompt_tokens=options.max_len - options.max_new_tokens,
        flag=flag,
    )
    return prompts[:PROMPTS]
