"""Opponents of the policy that are models: a checkpoint's, or one that a server has."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from openrlhf.types import SamplingParams

if TYPE_CHECKING:
    from openrlhf.rollout.base import Engine

REQUEST_SECONDS = 600.0
LONGEST = 1 << 20
"""The context of a model that does not say its own."""


class OpponentError(Exception):
    """An opponent cannot play. The text names the flag."""


class LoadedModel(NamedTuple):
    """A model in this process."""

    engine: Engine
    tokenizer: Any


def load_model(path: str) -> LoadedModel:
    """The model of a folder, with weights that stay as they are; on the GPU that this process sees, else on the CPU.
    Raises OpponentError."""
    import torch

    from openrlhf.data.templates import set_chat_template
    from openrlhf.models.loading import LoadSettings, ModelLoadError, load_policy, load_tokenizer
    from openrlhf.rollout.embedded import EmbeddedEngine

    folder = Path(path).expanduser()
    if (folder / "config.yaml").is_file() and (folder / "model").is_dir():  # a run's folder
        folder = folder / "model"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        tokenizer = set_chat_template(load_tokenizer(str(folder)), None, {}, needed=True)
        policy = load_policy(str(folder), LoadSettings(device=device, flag="--world.opponent"))
    except (ModelLoadError, OSError, ValueError) as error:
        raise OpponentError(f"--world.opponent {path}: {error}") from error
    policy.requires_grad_(False)
    longest = int(getattr(policy.model.config.get_text_config(), "max_position_embeddings", None) or LONGEST)
    return LoadedModel(EmbeddedEngine(policy.model, tokenizer, max_model_len=longest), tokenizer)


class ServedModel:
    """A model of an OpenAI-compatible server."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._name: str | None = None

    def headers(self) -> dict[str, str]:
        key = os.environ.get("OPENAI_API_KEY")
        return {"Authorization": f"Bearer {key}"} if key else {}

    async def name(self) -> str:
        """The first one that the server lists."""
        if self._name is None:
            listed = await self._ask("GET", "/models")
            try:
                self._name = str(listed["data"][0]["id"])
            except (KeyError, IndexError, TypeError):
                raise OpponentError(f"--world.opponent {self._url}: the server lists no model at /models") from None
        return self._name

    async def say(self, messages: Sequence[Mapping[str, Any]], params: SamplingParams) -> Mapping[str, Any]:
        """Its answer, as worlds read it. Raises OpponentError."""
        asked: dict[str, Any] = {
            "model": await self.name(),
            "messages": list(messages),
            "temperature": params.temperature,
            "top_p": params.top_p,
        }
        if params.max_tokens:
            asked["max_tokens"] = params.max_tokens
        answer = await self._ask("POST", "/chat/completions", asked)
        try:
            choice = answer["choices"][0]
            text = str(choice["message"]["content"] or "")
        except (KeyError, IndexError, TypeError):
            raise OpponentError(f"--world.opponent {self._url}: the server's answer has no message") from None
        cut = choice.get("finish_reason") == "length"
        return {"role": "assistant", "content": text, "text": text, "truncated": cut}

    async def _ask(self, method: str, path: str, body: Any = None) -> Any:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as client,
                client.request(method, self._url + path, json=body, headers=self.headers()) as response,
            ):
                if response.status >= 400:
                    said = " ".join((await response.text()).split())[:300]
                    raise OpponentError(f"--world.opponent {self._url}: {response.status} {said}")
                return await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            why = str(error) or type(error).__name__
            raise OpponentError(f"--world.opponent {self._url}: the server does not answer: {why}") from error


class ServedSeat:
    """One agent of a game whom a served model plays."""

    def __init__(self, model: ServedModel, params: SamplingParams) -> None:
        self._model = model
        self._params = params
        self._messages: list[Mapping[str, Any]] = []

    def read(self, messages: Sequence[Mapping[str, Any]]) -> None:
        self._messages += messages

    async def answer(self) -> Mapping[str, Any]:
        said = await self._model.say(self._messages, self._params)
        self._messages.append({"role": "assistant", "content": said["content"]})
        return said
