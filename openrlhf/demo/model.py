"""The demo's tokenizer and model: one token per character, a Qwen2 of about a million parameters."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PAD, EOS = "<pad>", "<eos>"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Digits, plus and equals sign, padding and end of sequence."""
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *"0123456789+="])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)


def make_model(tokenizer: PreTrainedTokenizerFast, *, seed: int) -> Qwen2ForCausalLM:
    """Random weights."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=160,
            intermediate_size=424,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def write_model(directory: Path, *, seed: int) -> None:
    """A model folder as users have them."""
    tokenizer = make_tokenizer()
    make_model(tokenizer, seed=seed).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
