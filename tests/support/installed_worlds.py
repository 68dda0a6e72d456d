"""Environments of worlds for tests: made once, beside the environment that the tests run in, and kept with it."""

import os
import sys
from pathlib import Path

from openrlhf.worlds.environments import install


def install_world(target: str) -> Path:
    """The environment of a world, made where there is none yet. From then on this process and those that it starts
    find worlds there."""
    os.environ["OPENRLHF_WORLDS"] = str(Path(sys.prefix) / "worlds")
    return install(target)
