"""A chat model of a few thousand random weights that says readable nonsense, and prompts for it: no download."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from openrlhf.data.templates import render_prompt
from openrlhf.types import Prompt

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    f"{START}{{{{ message['role'] }}}}\n{{{{ message['content'] }}}}{END}\n"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{START}assistant\n{{% endif %}}"
)

SPEECH = "the answer is forty two or so i think, but it may be a 1, 2, 3, 4, 5, 6, 7, 8, 9 or 0. "
"""How often each character is said."""
RESPONSE_TOKENS = 24
"""How long a response is on average."""
WHISPER = 1e-6
"""How likely a token is that `SPEECH` does not have, relative to one that it has once."""

PROMPTS = (
    ("What is 2 + 3?", "5"),
    ("What is 12 * 12?", "144"),
    ("I think of a number from 1 to 100. Guess!", "42"),
    ("A week has how many days? Answer with a number.", "7"),
)
"""(text, label); labels that also int() and json.loads() can read."""


def builtin_prompts(tokenizer: Any = None) -> list[Prompt]:
    """The built-in prompts; with a tokenizer, in its chat template."""
    prompts = []
    for i, (question, label) in enumerate(PROMPTS):
        text = render_prompt({"input": question}, apply_chat_template=tokenizer is not None, tokenizer=tokenizer)
        where = f"built-in prompt {i + 1} (--prompt_data takes yours)"
        prompts.append(Prompt(ordinal=i, text=text, label=label, where=where))
    return prompts


def write_tiny_model(directory: Path) -> None:
    """A model folder as users have them."""
    tokenizer = make_tokenizer()
    make_model(tokenizer).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def make_tokenizer() -> Qwen2Tokenizer:
    """One token per byte, ChatML around messages: whatever text comes, it is read and written back."""
    tokens = [PAD, START, END, *sorted(ByteLevel.alphabet())]
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[],
        unk_token=PAD,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    """Random weights, but for one hidden dimension: it is the same after every token, so that its column in the output
    layer is a bias, which is set to how often each token is said.
    """
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 3.0  # outweighs the rest, so that the last norm makes it nearly √hidden
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight[:, 0] = _log_frequencies(tokenizer) / math.sqrt(config.hidden_size)
    return model


def _log_frequencies(tokenizer: Qwen2Tokenizer) -> torch.Tensor:
    """float32 [V]"""
    said = Counter(tokenizer(SPEECH, add_special_tokens=False)["input_ids"])
    counts = torch.tensor([said.get(token, WHISPER) for token in range(len(tokenizer))])
    counts[tokenizer.eos_token_id] = counts.sum() / RESPONSE_TOKENS
    return counts.log()
