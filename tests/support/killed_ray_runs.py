"""RL runs on a Ray of their own, with a vLLM engine, whose driver is killed with SIGKILL and started again."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from killed_runs import PYTHON, Killed, Rl
from preloaded_workers import Interpreter
from processes import living_children


@dataclass
class RayRl(Rl):
    """A rank of the policy, an engine, and the driver. Times are from the first round to the model that is written: to
    start and to end takes longer."""

    python: Interpreter | None = None
    """Of Ray's workers, if it is another."""

    place: ClassVar[dict] = {"train.launcher": "ray", "vllm.num_engines": 1}
    exact: ClassVar[bool] = False

    @property
    def environment(self) -> dict[str, str]:
        workers = {PYTHON: self.python.path} if self.python else {}
        return super().environment | {"VLLM_CPU_KVCACHE_SPACE": "1"} | workers

    @property
    def left(self) -> list[str]:
        """Workers that were forked do not have their environment where `left` looks for it."""
        forked = living_children(self.python.server) if self.python else []
        return super().left + [f"{pid} a worker" for pid in forked]

    def run(self) -> float:
        process = self.start()
        times = [self._time_of(process, path) for path in (self.run_dir, self.folder / "out")]
        self.end(process)
        return times[1] - times[0]

    def _time_of(self, process, path: Path) -> float:
        """When it is there, or will never be."""
        while process.is_alive() and not path.exists():
            time.sleep(0.01)
        return time.monotonic()

    def kill_after(self, seconds: float) -> Killed:
        begun: list[float] = []

        def reached() -> bool:
            if not begun and self.run_dir.exists():
                begun.append(time.monotonic())
            return bool(begun) and time.monotonic() >= begun[0] + seconds

        killed = self.kill_when(reached)
        return Killed(time.monotonic() - begun[0], killed.status) if begun else killed
