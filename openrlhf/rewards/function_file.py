"""Rewards from a user's Python file that defines `reward_func(queries, prompts, labels)`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from openrlhf.agents.host import HostCrashError, HostError, HostProcess, HostStartError, HostTimeoutError, RemoteError
from openrlhf.rewards.base import Reward, RewardError, RewardRequest
from openrlhf.rewards.values import RewardValues
from openrlhf.utils import waits

logger = logging.getLogger(__name__)

START_SECONDS = 120.0


class FunctionFileReward:
    """Judges each prompt group with one call of `reward_func`, in a process of its own that loads the file once.

    A call that takes longer than `timeout` seconds, or ends the process, is a RewardError for that group alone.
    A call that raises, or under which the process dies, is made again up to `max_retries` times.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        timeout: float,
        max_concurrency: int = 16,
        max_retries: int = 1,
        start_timeout: float = START_SECONDS,
    ) -> None:
        if timeout <= 0:
            raise ValueError(f"--reward.timeout must be > 0, got {timeout}")
        self._path = Path(path).expanduser().resolve()
        self._timeout = timeout
        self._max_retries = max_retries
        self._host = HostProcess(
            "openrlhf.rewards.function_worker:RewardFunction",
            str(self._path),
            name=f"reward file {self._path}",
            start_timeout=start_timeout,
            max_concurrency=max_concurrency,
            max_crashes=max_retries,
        )
        self._said_repeated = False

    async def start(self) -> None:
        if not self._path.is_file():
            raise RewardError(f"--reward.remote_url: there is no file {self._path}")
        try:
            await self._host.start()
        except HostStartError as error:
            raise self._not_loaded(error) from error

    async def score(self, request: RewardRequest) -> Sequence[Reward]:
        with waits.doing(f"judged by reward_func ({self._path.name})"):
            values = await self._values(request)
        if values.repeated and not self._said_repeated:
            self._said_repeated = True
            logger.warning(
                "%s: reward_func returned one number for %d samples, so each gets it; it is called once per prompt, "
                "with all samples of the prompt",
                self._path,
                len(request.queries),
            )
        return Reward.each(values)

    async def close(self) -> None:
        await self._host.close()

    async def _values(self, request: RewardRequest) -> RewardValues:
        lists = list(request.queries), list(request.prompts), list(request.labels)
        attempt = 0
        while True:
            try:
                return await self._host.call("score", *lists, timeout=self._timeout)
            except RemoteError as error:
                if error.failure.kind == "RewardFunctionError" and attempt < self._max_retries:
                    attempt += 1
                    continue
                raise RewardError(f"{request.name}: {error.failure.text}") from error
            except HostTimeoutError as error:
                raise RewardError(
                    f"{request.name}: reward_func of {self._path} did not answer in {self._timeout:g} s "
                    f"(--reward.timeout)"
                ) from error
            except HostCrashError as error:
                raise RewardError(
                    f"{request.name}: {error} while reward_func of {self._path} judged this prompt's samples"
                ) from error
            except HostStartError as error:
                raise self._not_loaded(error) from error
            except HostError as error:
                raise RewardError(f"{request.name}: reward_func of {self._path}: {error}") from error

    def _not_loaded(self, error: HostStartError) -> RewardError:
        if error.failure is not None and error.failure.kind == "UserFileError":
            return RewardError(f"--reward.remote_url: {error.failure.text}")
        return RewardError(f"--reward.remote_url: {self._path} could not be loaded: {error}")


if TYPE_CHECKING:
    from openrlhf.rewards.base import RewardSource

    _: type[RewardSource] = FunctionFileReward
