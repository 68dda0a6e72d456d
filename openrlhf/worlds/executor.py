"""Plays episodes of worlds: the policy's tokens here, the world in its own process, messages between them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from openrlhf.agents.base import Episode
from openrlhf.agents.chat_history import ChatHistory, ChatPrompt, Conversation, TemplateError
from openrlhf.agents.recorder import TokenRecorder
from openrlhf.agents.results import after_prompt
from openrlhf.agents.tool_calls import THINK, Reply, parse_reply, split_thoughts
from openrlhf.agents.user_calls import AgentError, AgentResultError, UserFileError
from openrlhf.types import FinishReason, SamplingParams, Segment
from openrlhf.utils.randomness import derive_seed
from openrlhf.worlds.base import Start
from openrlhf.worlds.process import WorldEpisode, WorldFailure, WorldPlan, WorldProcess

if TYPE_CHECKING:
    from openrlhf.rollout.base import Engine

MOST_SEED = 2**31
"""What a world is told is less: many packages take no more than 32 bits."""


class WorldPlayer:
    """A `Player` of the episodes of one world, in processes that its episodes share."""

    shared_loop = True
    """What it does waits for engines and worlds, so that no episode needs a thread of its own."""

    def __init__(self, plan: WorldPlan) -> None:
        """Starts one process, which finds out what is wrong with the settings. Raises UserFileError."""
        self._plan = plan
        self._processes = [plan.process(index) for index in range(plan.processes)]
        self._closing: set[asyncio.Task[None]] = set()
        try:
            self._processes[0].start_now()
        except WorldFailure as error:
            raise UserFileError(str(error)) from error

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
        """One episode, in at most `max_length` tokens and `max_steps` turns.

        First messages that leave no room for a turn lose their beginning. Where a limit ends the episode, the world is
        not told more than that it is over.
        """
        seed = _seed(sampling_params)
        try:
            process = self._least_busy()
            world = await process.begin(label, seed=seed)
            try:
                dialogue = Dialogue(
                    world.start,
                    sampling_params=sampling_params,
                    max_length=min(max_length, llm_engine.max_model_len),
                    tokenizer=hf_tokenizer,
                    engine=llm_engine,
                )
                return await _play(world, dialogue, prompt, max_steps=max_steps)
            finally:
                await self._close(world)
        except WorldFailure as error:
            raise (AgentError if error.retry else AgentResultError)(str(error)) from error
        except TemplateError as error:
            raise AgentResultError(f"{self._plan.target}: {error}") from error

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.close()

    def _least_busy(self) -> WorldProcess:
        return min(self._processes, key=lambda process: process.playing)

    async def _close(self, world: WorldEpisode) -> None:
        """An episode that is given up does not wait until its world has said good-bye."""
        closing = asyncio.ensure_future(world.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        task = asyncio.current_task()
        if task is None or not task.cancelling():
            await closing


async def _play(world: WorldEpisode, dialogue: Dialogue, prompt: str, *, max_steps: int | None) -> Episode:
    total = score = 0.0
    logs: dict[str, float] = {}
    turns = 0
    while True:
        said = await dialogue.answer()
        if said is None:
            break
        turns += 1
        turn = await world.step(said)
        dialogue.reward(turn.reward)
        total += turn.reward
        score = total if turn.score is None else turn.score
        logs |= turn.logs
        if turn.done:
            break
        if turns == max_steps:
            dialogue.truncated = True
            break
        dialogue.read(turn.messages)
    return Episode(
        segments=dialogue.segments(),
        text=dialogue.text(prompt),
        truncated=dialogue.truncated,
        reward=total,
        score=score,
        extra_logs=logs,
    )


class Dialogue:
    """What one agent reads and says in an episode: messages to a world, tokens to the engine and to the trainer.

    The tokens that the policy has sampled are kept as they are; only what is new is rendered and tokenised, as the chat
    template puts it after them. Where the template shows what has been said otherwise than it was said (it leaves
    thoughts of earlier turns out, say), what follows is another segment.
    """

    def __init__(
        self, start: Start, *, sampling_params: SamplingParams, max_length: int, tokenizer: Any, engine: Engine
    ) -> None:
        """
        Args:
            start: what the agent reads first, and its tools.
            sampling_params: of a turn, with the seed of the episode.
            max_length: most tokens of what is read and said.
        """
        self.truncated = False
        """Whether a limit has cut an answer, or the dialogue, short."""
        self.turns = 0
        self._messages: list[Mapping[str, Any]] = list(start.messages)
        self._tools = list(start.tools) if start.tools else None
        self._params = sampling_params
        self._max_length = max_length
        self._tokenizer = tokenizer
        self._engine = engine
        self._history = ChatHistory(tokenizer)
        self._recorders: list[TokenRecorder] = []
        self._first_text = ""

    def read(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """What the agent reads before its next answer."""
        self._messages += messages

    async def answer(self) -> dict[str, Any] | None:
        """What the policy says next, as worlds read it (`base.Episode.step`); None where there is no room for that: the
        dialogue ends as if it had been cut. Raises TemplateError."""
        prompt = self._history.prompt(Conversation(list(self._messages), self._tools))
        if not self._recorders:
            most = max(1, self._max_length - (self._params.max_tokens or 1))
            prompt = prompt._replace(token_ids=prompt.token_ids[-most:])
            self._first_text = prompt.text
        room = self._max_length - len(prompt.token_ids)
        if room < 1:
            self.truncated = True
            return None
        params = self._params.copy(
            max_tokens=min(self._params.max_tokens or room, room),
            seed=None if self._params.seed is None else derive_seed(self._params.seed, "turn", self.turns),
            skip_special_tokens=self._tools is None,  # calls may be spelled with special tokens
            detokenize=True,
        )
        recorder = self._recorder(prompt)
        generation = await self._engine.generate(recorder.token_ids, params)
        if not generation.token_ids:
            raise RuntimeError(f"the engine answered {len(recorder)} tokens with none ({generation.finish_reason})")
        recorder.append_action(generation)
        self.turns += 1
        cut = generation.finish_reason is FinishReason.LENGTH
        self.truncated = self.truncated or cut
        reply = parse_reply(generation.text) if self._tools else Reply(generation.text)
        self._history.remember(prompt, generation.token_ids, reply)
        said = self._as_message(reply)
        self._messages.append(said)
        thoughts = split_thoughts(reply.content, begun=prompt.text.rstrip().endswith(THINK))
        told: dict[str, Any] = {
            "role": "assistant",
            "content": reply.content if thoughts is None else thoughts.answer,
            "truncated": cut,
            "text": self._tokenizer.decode(generation.token_ids, skip_special_tokens=False),
        }
        if thoughts is not None:
            told["thoughts"] = thoughts.thoughts
        if reply.tool_calls:
            told["tool_calls"] = [
                {"id": call["id"], "name": call["function"]["name"], "arguments": call["function"]["arguments"]}
                for call in said["tool_calls"]
            ]
        return told

    def reward(self, reward: float) -> None:
        """The last answer has earned it."""
        self._recorders[-1].reward_turn(reward)

    def segments(self) -> tuple[Segment, ...]:
        """All that was read and said."""
        return tuple(recorder.segment() for recorder in self._recorders)

    def text(self, prompt: str) -> str:
        """The text of `prompt`, and what followed it. A prompt that was no more than a stand-in stays where it was."""
        before = self._first_text if self._first_text.startswith(prompt) else prompt
        after = after_prompt(self._recorders[-1].segment(), self._tokenizer)
        return before + str(self._tokenizer.decode(after, skip_special_tokens=False))

    def _recorder(self, prompt: ChatPrompt) -> TokenRecorder:
        """The one that goes on with these tokens. The last one has the last answer, in which rewards are written."""
        if self._recorders:
            last = self._recorders[-1]
            if prompt.token_ids[: len(last)] == last.token_ids:
                last.append_observation(prompt.token_ids[len(last) :])
                return last
        self._recorders.append(TokenRecorder(prompt.token_ids))
        return self._recorders[-1]

    def _as_message(self, reply: Reply) -> dict[str, Any]:
        """As chat templates read it."""
        message: dict[str, Any] = {"role": "assistant", "content": reply.content}
        if reply.tool_calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{self.turns}_{number}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for number, call in enumerate(reply.tool_calls, start=1)
            ]
        return message


def _seed(params: SamplingParams) -> int:
    """The world's own randomness of a sample; that of the policy has others."""
    seed = random.getrandbits(31) if params.seed is None else derive_seed(params.seed, "world")
    return seed % MOST_SEED


if TYPE_CHECKING:
    from openrlhf.agents.base import Player

    _: type[Player] = WorldPlayer
