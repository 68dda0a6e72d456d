"""The demo's model: a token per character, a Qwen2 of about a million parameters, and its supervised warm-up.

The warm-up brings random weights to where RL can take over: right now and then, not reliably.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from openrlhf.backends.torch import TorchBackend
from openrlhf.checkpoint.export import export_policy
from openrlhf.config.backend import InferenceBackendSection
from openrlhf.config.training import AdamSection, OptimizerSection
from openrlhf.demo.sorting import CHARACTERS
from openrlhf.demo.task import Problem
from openrlhf.models.loading import LoadSettings, load_policy, load_tokenizer
from openrlhf.types import PackedTokens

PAD, EOS = "<pad>", "<eos>"


def make_tokenizer(characters: str = CHARACTERS) -> Qwen2Tokenizer:
    """Padding, end of sequence and these: byte-level BPE without merges, so one token per character."""
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *characters])}
    return Qwen2Tokenizer(vocab=vocabulary, merges=[], unk_token=PAD, pad_token=PAD, eos_token=EOS)


def make_model(tokenizer: Qwen2Tokenizer, *, seed: int) -> Qwen2ForCausalLM:
    """Random weights."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=224,
            intermediate_size=608,
            num_hidden_layers=2,
            num_attention_heads=7,
            num_key_value_heads=1,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def write_model(directory: Path, *, seed: int, characters: str = CHARACTERS) -> None:
    """A model folder as users have them."""
    tokenizer = make_tokenizer(characters)
    make_model(tokenizer, seed=seed).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


BATCH = 256
MAX_STEPS = 1000
WINDOW = 3
"""Steps over which the success rate is averaged."""


def warm_up(
    directory: Path,
    problems: Sequence[Problem],
    *,
    seed: int,
    until: float,
    on_step: Callable[[int, float], None],
) -> int:
    """Train the model in `directory` on worked examples until it would act as they do with probability `until`, and
    write it back. Returns the number of steps; `on_step(step, probability)` hears of each.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy = load_policy(str(directory), LoadSettings(device=device, ds=InferenceBackendSection(param_dtype="fp32")))
    tokenizer = load_tokenizer(str(directory))
    optimizer = OptimizerSection(adam=AdamSection(lr=5e-4), lr_scheduler="constant_with_warmup", lr_warmup_ratio=0.05)
    backend = TorchBackend(policy, optimizer, total_steps=MAX_STEPS)
    rng = random.Random(seed)
    recent: deque[float] = deque(maxlen=WINDOW)
    for step in range(1, MAX_STEPS + 1):
        tokens = _pack(rng.choices(problems, k=BATCH), tokenizer, rng).to(device)
        logprobs_A = backend.module(tokens, temperature=1.0).logprobs_A
        backend.backward(-logprobs_A.mean())
        backend.step()
        examples = torch.zeros(BATCH, device=device).index_add_(0, tokens.action_sequences(), logprobs_A.detach())
        recent.append(float(examples.exp().mean()))
        on_step(step, recent[-1])
        if len(recent) == WINDOW and fmean(recent) >= until:
            break
    export_policy(policy, tokenizer, directory)
    return step


def _pack(problems: Sequence[Problem], tokenizer: Any, rng: random.Random) -> PackedTokens:
    """Worked examples; their actions are what is learned."""

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"] if text else []

    sequences, masks = [], []
    for problem in problems:
        tokens = ids(problem.prompt)
        mask = [False] * len(tokens)
        for turn in problem.worked(rng):
            action, feedback = [*ids(turn.action), tokenizer.eos_token_id], ids(turn.feedback)
            tokens += action + feedback
            mask += [True] * len(action) + [False] * len(feedback)
        sequences.append(torch.tensor(tokens))
        masks.append(torch.tensor(mask))
    return PackedTokens.from_sequences(sequences, masks)
