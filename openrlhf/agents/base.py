"""The agent interface that every run goes through: token in, token out."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from openrlhf.types import Fork, SamplingParams, Segment

if TYPE_CHECKING:
    from openrlhf.rollout.base import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """The result of one sample's episode: the recorded tokens, and the reward if the agent gives one itself."""

    segments: tuple[Segment, ...]
    text: str
    """The prompt's text, then everything after it, decoded with special tokens."""
    truncated: bool
    """A token or turn limit cut it short."""
    reward: float | None = None
    """The sum of its turn rewards. None: the reward comes from elsewhere (a reward function, a server, a model)."""
    score: float | None = None
    extra_logs: dict[str, float] = field(default_factory=dict)
    images: tuple[Any, ...] = ()
    """The images of the prompt, then those of the environment, as they came. What the policy has read of them is in
    the segments."""
    unmatched_ranges: int = 0
    """Action ranges that no engine call accounts for: their versions are a guess."""
    agent: str = ""
    """The role that it plays, where a prompt's episodes play several."""
    fork: Fork | None = None
    """Where it left another episode of its group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedEpisode:
    """An episode of a group that failed, while others of the group did not."""

    error: str
    """File, line and what happened."""
    agent: str = ""


class Player(Protocol):
    """Plays one episode. One player serves many episodes at once, so `play` keeps no state on `self`."""

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
        """The episode that begins with `prompt`, in at most `max_length` tokens and `max_steps` turns.

        Raises AgentError when users' code fails; `sampling_params` stays as it is.
        """
        ...


class GroupPlayer(Player, Protocol):
    """A player that may play all samples of a prompt together, because they share something or meet each other."""

    @property
    def group_play(self) -> str:
        """How it does so, for people: then `play` is not called. "": it does not."""
        ...

    async def play_group(
        self,
        prompt: str,
        label: Any,
        sampling_params: Sequence[SamplingParams],
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Engine,
        images: Any = None,
        *,
        max_steps: int | None = None,
    ) -> Sequence[Episode | FailedEpisode]:
        """The episodes of a prompt, one for each of `sampling_params`, in their order.

        Raises AgentError when the whole group has failed: it is played again.
        """
        ...


class AgentExecutorBase(ABC):
    """The base class of a user's `AgentExecutor` that plays episodes in its own way.

    It is made once, without arguments, and plays many episodes at once: keep no state of an episode on `self`.

    A class that defines `execute_group` plays all samples of a prompt together, and need not define `execute`:

        async def execute_group(
            self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engines, images=None
        ) -> list

    `sampling_params` and `llm_engines` are lists with one entry for each sample. It returns a list with one entry for
    each: the dict of `execute`, which may also have

        agent          the role that this sample plays: samples are compared with those of the same role
        forked_from    (sample, tokens): its first `tokens` tokens are those of this earlier sample, sampled once

    or the exception with which this sample alone has failed.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if hasattr(cls, "execute_group") and getattr(cls.execute, "__isabstractmethod__", False):
            cls.execute = _execute_in_group  # type: ignore[method-assign]

    @abstractmethod
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
        """Play one episode. `await llm_engine.generate(token_ids, sampling_params)` gives what the policy says next.

        Returns a dict:

            observation_tokens  list[int]: prompt, actions and feedback in order, as the engine saw and gave them
            action_ranges       [(start, end), …]: which of them the policy sampled, half open
            reward              number; None: a reward function, server or model judges it
            scores              success in [0, 1]; the reward if left out
            extra_logs          {name: number}
            truncated           whether a limit cut it short; what the engine said if left out
            rollout_log_probs   one per token, or one per action token; what the engine said if left out or None
            turn_rewards        one per action range, for rewards earned before the end; the rest of `reward` stands on
                                the last action token

        Images of the prompt come as Pillow images; `generate(…, multi_modal_data={"image": images})` shows some to the
        policy, and `observation_tokens` have one image token for each, or all of its tokens.

        Without `observation_tokens` and `action_ranges`, what the engine was asked and answered is the episode.
        """


async def _execute_in_group(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    raise NotImplementedError(
        f"{type(self).__name__} plays groups: execute_group is called, with lists of one if need be"
    )


class AgentInstanceBase(ABC):
    """The environment of one multi-turn episode: made anew for each, so state belongs on `self`.

    `__init__`, `reset` and `step` may be `async` or not, and may block: each episode has a thread of its own.
    """

    fork_after_reset = False
    """True: one instance is made and reset for a prompt, and each of its samples goes on with a `fork` of it."""

    @abstractmethod
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Called without arguments."""

    def fork(self) -> Any:
        """Another environment in the same state, which shares nothing with this one that `step` changes. May be
        `async`."""
        return copy.deepcopy(self)

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """From {"observation": the prompt, "label", perhaps "images"} to {"observation": what the policy reads first,
        perhaps "images": those of the observation; left out: the prompt's}."""
        return {"observation": states["observation"]}

    @abstractmethod
    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Answer one action. `states` has

            observation_text   everything before the action
            action_text        the action, special tokens included
            label              of the prompt
            sampling_params    a copy; it changes nothing unless it is returned

        Returns a dict:

            rewards               number earned by this turn; the episode's reward is the sum
            done                  whether the episode ends here
            environment_feedback  text the policy reads before its next turn; "" if left out
            scores                success in [0, 1]; the rewards so far if left out. The last turn's counts
            extra_logs            {name: number}; of each name the last one counts
            sampling_params       replaces the next turns' parameters
            environment_images    list of images that belong to the feedback, which has `<image>` for each
        """
