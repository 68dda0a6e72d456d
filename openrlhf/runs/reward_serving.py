"""Binds the reward server to one process: from a configuration to a server that has been stopped."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from typing import NamedTuple

import torch

from openrlhf.config.commands import ServeRMConfig
from openrlhf.config.fields import ConfigError
from openrlhf.models.loading import ModelLoadError, silence_progress_bars
from openrlhf.rewards.model import RewardModel
from openrlhf.rewards.server import BACKLOG, RewardServer, ServerLimits
from openrlhf.runs.local_copies import local_copies
from openrlhf.runs.reward_sources import load_reward_model
from openrlhf.utils.foreign_lines import start_logging

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 25
"""The time for answering what is under way when a signal comes. Kubernetes kills after 30."""
SETTLE_SECONDS = 1.0
"""The time for a forward whose answer is not wanted any more."""


def serve(config: ServeRMConfig) -> int:
    """Serve until SIGINT or SIGTERM; the exit status, 0 if all that was accepted was answered."""
    start_logging()
    silence_progress_bars()
    try:
        end = asyncio.run(_serve(config, _listen(config.host, config.port)))
    except ModelLoadError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    if end.busy:
        # The interpreter would wait for the thread, however long it still loads or hangs.
        logging.shutdown()
        os._exit(end.status)
    return end.status


class _End(NamedTuple):
    status: int
    busy: bool
    """Whether the model's thread still does something whose result is not wanted any more."""


async def _serve(config: ServeRMConfig, listener: socket.socket) -> _End:
    rewards = RewardServer(
        limits=ServerLimits(
            max_request_bytes=config.max_request_bytes,
            max_query_chars=config.max_query_chars,
            max_queue=config.max_queue,
            max_batch_tokens=config.max_tokens_per_gpu,
            max_batch_queries=config.batch_size,
            read_seconds=config.read_timeout,
        ),
        api_key=config.api_key,
    )
    stopped = asyncio.Event()

    def stop() -> None:
        """The first signal ends the server in good order, the second at once."""
        if stopped.is_set():
            rewards.give_up()
        stopped.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    await rewards.listen(listener)
    logger.info("listening on %s; loading %s", _address(listener), config.reward.model_name_or_path)
    loading = asyncio.create_task(_load(config, rewards, stopped))
    await stopped.wait()
    logger.info("stopping; queries under way: %d", rewards.under_way)
    await rewards.stop(DRAIN_SECONDS)
    if loading.done():
        loading.result()
    return _End(1 if rewards.given_up else 0, busy=not await rewards.close(SETTLE_SECONDS))


async def _load(config: ServeRMConfig, rewards: RewardServer, stopped: asyncio.Event) -> None:
    """Ends the server if the model cannot be loaded."""
    loop = asyncio.get_running_loop()
    try:
        rewards.serve_model(await loop.run_in_executor(rewards.model_thread, _load_model, config))
    except BaseException:
        stopped.set()
        raise
    logger.info("ready")


def _load_model(config: ServeRMConfig) -> RewardModel:
    config, device = local_copies(config), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path = config.reward.model_name_or_path
    assert path is not None, "a run needs it"
    return load_reward_model(path, config, device)


def _listen(host: str, port: int) -> socket.socket:
    """Raises ConfigError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port}: cannot listen there: {error.strerror or error}") from error


def _address(listener: socket.socket) -> str:
    host, port, *_ = listener.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
