"""The demo's tokenizer and model: one token per character, a Qwen2 of about a million parameters."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from openrlhf.demo.sorting import CHARACTERS

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
