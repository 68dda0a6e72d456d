"""A run that has lost a part of its cluster is closed, and goes on from its last checkpoint, in the same process."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from openrlhf.checkpoint.manager import Found, find_checkpoint
from openrlhf.cluster.engines import EngineLostError
from openrlhf.cluster.launch import ClusterError
from openrlhf.cluster.workers import WorkerError
from openrlhf.config.errors import ConfigError
from openrlhf.config.reporting import RLCheckpointSection
from openrlhf.runs.process import USER_ERRORS
from openrlhf.runs.resume import Checkpoints

logger = logging.getLogger(__name__)

ROOM_SECONDS = 600.0
"""For so long a restart waits for a cluster that has room for the run: a node that was lost may come back."""
LOOK_SECONDS = 10.0

_T = TypeVar("_T")


def with_restarts(
    attempt: Callable[[Checkpoints], _T],
    checkpoints: Checkpoints,
    section: RLCheckpointSection,
    *,
    most: int,
    sleep: Callable[[float], None] = time.sleep,
) -> _T:
    """What an attempt returns; one that loses a part of the cluster is followed by another, up to `most` times.

    Each goes on from the newest checkpoint, or, where none has been written yet, begins anew. A run that writes none
    which could be continued from is not restarted.
    """
    found, restarts, waited = checkpoints.found, 0, 0.0
    while True:
        try:
            return attempt(checkpoints._replace(found=found))
        except ClusterError as error:
            if not restarts or waited >= ROOM_SECONDS:
                raise
            logger.warning("%s; looks again in %g s", error, LOOK_SECONDS)
            sleep(LOOK_SECONDS)
            waited += LOOK_SECONDS
            continue
        except Exception as error:
            lost = lost_part(error)
            if lost is None:
                raise
            if section.period is None or section.disable_ds:
                logger.warning("the run ends: it writes no checkpoints that it could go on from (--ckpt.save_steps)")
                raise
            if restarts == most:
                logger.warning("the run ends: --train.max_restarts %d", most)
                raise
        restarts, waited = restarts + 1, 0.0
        found = _newest(checkpoints)
        where = f"goes on from {found.path}" if found else "begins anew, for there is no checkpoint yet"
        logger.warning("%s — the run %s (restart %d of %d)", lost, where, restarts, most)


def lost_part(error: BaseException | None) -> str | None:
    """What an error says is lost of the cluster: a worker that died, failed or does not answer, or an engine's node.

    None: it is something else, which would be so again. That holds for what users have to mend, wherever it was found.
    """
    while error is not None:
        if isinstance(error, EngineLostError):
            return str(error)
        if isinstance(error, WorkerError) and not isinstance(error.reason, (*USER_ERRORS, ConfigError)):
            return str(error)
        error = error.__cause__
    return None


def _newest(checkpoints: Checkpoints) -> Found | None:
    assert checkpoints.folder is not None, "who writes checkpoints has a folder for them"
    checkpoints.folder.remove_leftovers()
    return find_checkpoint(checkpoints.folder)
