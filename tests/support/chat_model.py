"""A tokenizer with a chat template that knows tools, and tiny policies that speak through it."""

import asyncio
import re
from collections.abc import AsyncGenerator, Sequence
from functools import cache
from typing import Any

from openrlhf.types import FinishReason, Generation, SamplingParams

CHATML = (
    "{%- if tools %}{{ '<|im_start|>system\\n' }}"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n' }}{% endif %}"
    "{{- 'Tools:' }}{%- for tool in tools %}{{ ' ' + (tool.function | tojson) }}{% endfor %}{{ '<|im_end|>\\n' }}"
    "{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}"
    "{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{%- elif message.role != 'system' %}"
    "{{- '<|im_start|>' + message.role + '\\n' + (CONTENT) }}"
    "{%- for call in message.tool_calls or [] %}"
    '{{- \'\\n<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}"
    "{%- endfor %}{{ '<|im_end|>\\n' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

TEMPLATES = {
    "plain": CHATML.replace("CONTENT", "message.content"),
    "trims": CHATML.replace("CONTENT", "message.content | trim"),
    # Thoughts of all turns but those after the last question are left out.
    "forgets": (
        "{%- set asked = namespace(last=0) %}{%- for message in messages %}"
        "{%- if message.role == 'user' %}{%- set asked.last = loop.index0 %}{% endif %}{% endfor %}"
    )
    + CHATML.replace(
        "CONTENT",
        "message.content.split('</think>')[-1] if message.role == 'assistant' and loop.index0 < asked.last "
        "else message.content",
    ),
    # As Qwen3's does: thoughts stand in every turn after the last question, spelled in one way, and in none before it;
    # with `enable_thinking=False` the template itself writes that there are none.
    "qwen3": (
        "{%- set asked = namespace(last=-1) %}{%- for message in messages %}"
        "{%- if message.role == 'user' %}{%- set asked.last = loop.index0 %}{% endif %}{% endfor %}"
    )
    + CHATML.replace(
        "{{- '<|im_start|>' + message.role + '\\n' + (CONTENT) }}",
        "{%- set parts = message.content.split('</think>') %}{%- set said = parts[-1].lstrip('\\n') %}"
        "{%- set thoughts = parts[0].split('<think>')[-1].strip('\\n') if parts | length > 1 else '' %}"
        "{{- '<|im_start|>' + message.role + '\\n' }}"
        "{%- if message.role == 'assistant' and loop.index0 > asked.last and (loop.last or thoughts) %}"
        "{{- '<think>\\n' + thoughts + '\\n</think>\\n\\n' + said }}"
        "{%- elif message.role == 'assistant' %}{{- said }}{%- else %}{{- message.content }}{%- endif %}",
    )
    + "{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}",
    # Nothing special about its marks: the tokenizer may join them with what stands beside them.
    "words": (
        "{%- for message in messages %}{{ '\\n' + message.role + ': ' + message.content }}{% endfor %}"
        "{%- if add_generation_prompt %}{{ '\\nassistant: ' }}{% endif %}"
    ),
}

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Arithmetic.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


@cache
def chat_tokenizer(template: str = "plain") -> Any:
    """Byte-level BPE with merges, so that text → tokens → text → tokens does not always give the same tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=[AddedToken(token, normalized=False, special=True) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = ["user assistant system tool_response", "the answer is 12 and 123", '{"name": "arguments": "expression":']
    tokenizer.train_from_iterator(words * 20, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATES[template],
    )


def chat_model(tokenizer: Any, *, seed: int = 0) -> Any:
    """A Qwen2 of random weights."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from openrlhf.models.attention import ATTENTION

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM._from_config(config, attn_implementation=ATTENTION)


def learn_by_heart(model: Any, tokenizer: Any, dialogue: str, *, steps: int = 60) -> None:
    """The model says what the assistant says in this dialogue, nearly always."""
    import torch

    from openrlhf.models.policy import Policy
    from openrlhf.types import PackedTokens

    encoded = tokenizer(dialogue, add_special_tokens=False, return_offsets_mapping=True)
    turns = [turn.span(1) for turn in re.finditer(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", dialogue, re.DOTALL)]
    said = [any(first <= start < end for first, end in turns) for start, _ in encoded["offset_mapping"]]
    tokens = PackedTokens.from_sequences([torch.tensor(encoded["input_ids"])], [torch.tensor(said)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    policy = Policy(model)
    for _ in range(steps):
        (-policy(tokens, temperature=1.0).logprobs_A.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


def write_chat_model(folder: Any, *, template: str = "plain") -> str:
    """A folder with such a model and its tokenizer, as users have them; its path."""
    tokenizer = chat_tokenizer(template)
    chat_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


class Speaker:
    """An engine that says these texts in turn, the last one again and again, each closed with end-of-sequence.

    It spells character by character, as no tokenizer would. Token i of call k has log-prob −(k + i/100), version k.
    """

    max_model_len = 10_000

    def __init__(self, tokenizer: Any, *texts: str, seconds_per_token: float = 0.0) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        self._seconds = seconds_per_token
        self.asked: list[tuple[list[int], SamplingParams]] = []
        self.shown: list[tuple[Any, ...]] = []
        """The images of each call, with their places."""
        self.sampled = 0
        self.given_up = 0
        self.version = 0

    async def generate(
        self, token_ids: Sequence[int], sampling_params: SamplingParams, images: Sequence[Any] = ()
    ) -> Generation:
        from openrlhf.agents.recording_engine import joined

        return joined([part async for part in self.stream(token_ids, sampling_params, images)])

    async def stream(
        self, token_ids: Sequence[int], sampling_params: SamplingParams, images: Sequence[Any] = ()
    ) -> AsyncGenerator[Generation]:
        call = len(self.asked)
        self.asked.append((list(token_ids), sampling_params.copy()))
        self.shown.append(tuple(images))
        text = self._texts[min(call, len(self._texts) - 1)]
        whole = [*self.spell(text), self._tokenizer.eos_token_id]
        ids = whole[: sampling_params.max_tokens]
        shown = ""
        try:
            for index, token in enumerate(ids):
                await asyncio.sleep(self._seconds)
                self.sampled += 1
                last = index + 1 == len(ids)
                said = self._decode([i for i in ids[: index + 1] if i != whole[-1]], sampling_params)
                yield Generation(
                    token_ids=[token],
                    logprobs=[-(call + index / 100)],
                    versions=[call],
                    finish_reason=(FinishReason.STOP if ids == whole else FinishReason.LENGTH) if last else None,
                    text=said[len(shown) :],
                )
                shown = said
        except BaseException:
            self.given_up += 1
            raise

    def spell(self, text: str) -> list[int]:
        pieces = re.split(f"({'|'.join(map(re.escape, SPECIAL))})", text)
        units = (unit for piece in pieces for unit in ([piece] if piece in SPECIAL else piece))
        return [i for unit in units for i in self._tokenizer(unit, add_special_tokens=False)["input_ids"]]

    def _decode(self, ids: list[int], params: SamplingParams) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
