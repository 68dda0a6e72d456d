"""An engine that says what it is told to, and a small real tokenizer."""

import asyncio
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from openrlhf.types import FinishReason, Generation, SamplingParams


class ScriptedEngine:
    """Answers with `says(prompt ids, params)`, cut to `max_tokens`; token i of call k has log-prob −(k + i/100) and
    version k. Remembers every call."""

    max_model_len = 10_000

    def __init__(self, says: Callable[[list[int], SamplingParams], Sequence[int]]) -> None:
        self.says = says
        self.asked: list[tuple[list[int], SamplingParams]] = []
        self.shown: list[tuple[Any, ...]] = []
        """The images of each call, with their places."""
        self.answered: list[Generation] = []
        self.version = 0

    async def generate(
        self, token_ids: Sequence[int], sampling_params: SamplingParams, images: Sequence[Any] = ()
    ) -> Generation:
        assert sampling_params.max_tokens >= 1
        call = len(self.asked)
        self.asked.append((list(token_ids), sampling_params.copy()))
        self.shown.append(tuple(images))
        self.version = call
        await asyncio.sleep(0)
        wanted = list(self.says(list(token_ids), sampling_params))
        ids = wanted[: sampling_params.max_tokens]
        answer = Generation(
            token_ids=ids,
            logprobs=[-(call + i / 100) for i in range(len(ids))] if sampling_params.logprobs else None,
            versions=[call] * len(ids),
            finish_reason=FinishReason.STOP if len(ids) == len(wanted) else FinishReason.LENGTH,
        )
        self.answered.append(answer)
        return answer


@cache
def bpe_tokenizer() -> Any:
    """Byte-level BPE with merges, so that text → tokens → text → tokens does not always give the same tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["the answer is higher than the other", "guess lower, guess higher: 12 123"] * 20, trainer
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


class CharTokenizer:
    """One token per character."""

    all_special_tokens = ("§",)

    def __len__(self) -> int:
        return 0x110000

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict:
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))


def says(*texts: str) -> ScriptedEngine:
    """Answers with these texts in turn (characters as tokens), the last one again and again."""
    engine: ScriptedEngine

    def answer(prompt: list[int], params: SamplingParams) -> list[int]:
        return [ord(c) for c in texts[min(len(engine.asked), len(texts)) - 1]]

    engine = ScriptedEngine(answer)
    return engine
