"""Single turn: one prompt, one response; the reward comes from elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from openrlhf.agents.base import AgentExecutorBase, Episode
from openrlhf.agents.images import begin_recording, read_text
from openrlhf.agents.results import describe_episode
from openrlhf.models.image_processor import ExpandedText
from openrlhf.types import FinishReason, SamplingParams
from openrlhf.utils.randomness import derive_seed

if TYPE_CHECKING:
    from openrlhf.rollout.base import Engine


class SingleTurnAgentExecutor(AgentExecutorBase):
    """Generates once. A prompt too long to leave room for the response is cut from the left, unless it has images:
    then its episode fails."""

    _read: tuple[Any, str, list[int]] = (None, "", [])
    """Tokenizer, prompt, token ids of the last one: a prompt's samples begin one after the other."""

    async def play(
        self,
        prompt: str,
        label: Any,
        sampling_params: SamplingParams,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Engine,
        images: Any = None,
        *,
        max_steps: int | None = None,
    ) -> Episode:
        """One episode; it has one turn, whatever `max_steps` says. Raises BadImageError."""
        if images:
            read = await read_text(hf_tokenizer, prompt, images)
        else:
            if self._read[:2] != (hf_tokenizer, prompt):
                self._read = (hf_tokenizer, prompt, (await read_text(hf_tokenizer, prompt, ())).token_ids)
            read = ExpandedText(self._read[2], ())
        wanted = sampling_params.max_tokens or max(1, max_length - len(read.token_ids))
        recorder = begin_recording(read, most=max_length - wanted, what="the prompt")
        turn = sampling_params.copy(
            max_tokens=min(wanted, max_length - len(recorder)),
            seed=None if sampling_params.seed is None else derive_seed(sampling_params.seed, "turn", 0),
            detokenize=bool(sampling_params.stop),  # the text is made below
        )
        generation = await llm_engine.generate(recorder.token_ids, turn, images=recorder.images)
        recorder.append_action(generation)
        return Episode(
            segments=(recorder.segment(),),
            text=prompt + hf_tokenizer.decode(generation.token_ids, skip_special_tokens=False),
            truncated=generation.finish_reason is FinishReason.LENGTH,
            images=tuple(images or ()),
        )

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: SamplingParams,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        """The same as a dict, for users' executors that add to it."""
        episode = await self.play(prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images)
        return describe_episode(episode, prompt=prompt, label=label)


if TYPE_CHECKING:
    from openrlhf.agents.base import Player

    _: type[Player] = SingleTurnAgentExecutor
