"""Many episodes against an environment that takes its time: `python -m bench.agents [--write]`.

256 episodes of 4 turns at once, 16 sampled tokens a turn, a 1M-parameter Qwen2, real host processes. The environment
sleeps 0.5 s a step, in three ways; without sleep the same episodes are what generation alone takes. If nothing waited
for anything else, an episode would take the generation and 4 × 0.5 s = 2 s more.

    await     `await asyncio.sleep(0.5)` in `async def step`
    blocking  `time.sleep(0.5)` in `async def step`, as users' files have it
    plain     `time.sleep(0.5)` in `def step`

Each repeat runs all; the table shows medians, and the median and range of the differences within a repeat.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch
import transformers

from bench.results import write_section
from openrlhf.agents.episode_worker import EpisodeSettings
from openrlhf.agents.episodes import AgentEpisodes, hosts_for
from openrlhf.demo.model import write_model
from openrlhf.models.loading import load_policy, load_tokenizer, silence_progress_bars
from openrlhf.rollout.embedded import EmbeddedEngine
from openrlhf.types import Prompt, SamplingParams

EPISODES, TURNS, TOKENS, SECONDS = 256, 4, 16, 0.5
MAX_LENGTH = 8 + TURNS * (TOKENS + 2)

AGENT = """
import asyncio, time
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.turns = 0

    {step}
        {sleep}
        self.turns += 1
        return {{"rewards": 0.0, "environment_feedback": "5>", "done": self.turns == {turns}}}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""
COROUTINE, FUNCTION = "async def step(self, states, **kwargs):", "def step(self, states, **kwargs):"
CASES = {
    "no sleep": (COROUTINE, "pass"),
    "await": (COROUTINE, f"await asyncio.sleep({SECONDS})"),
    "blocking": (COROUTINE, f"time.sleep({SECONDS})"),
    "plain": (FUNCTION, f"time.sleep({SECONDS})"),
}


class Case:
    """Hosts of one environment, started and warm."""

    def __init__(self, name: str, folder: Path, engine: EmbeddedEngine, *, hosts: int) -> None:
        step, sleep = CASES[name]
        file = folder / f"{name.replace(' ', '_')}.py"
        file.write_text(AGENT.format(step=step, sleep=sleep, turns=TURNS))
        settings = EpisodeSettings(
            agent_file=str(file),
            tokenizer=str(folder / "model"),
            use_fast=True,
            trust_remote_code=False,
            max_length=MAX_LENGTH,
            max_steps=None,
            max_model_len=MAX_LENGTH,
        )
        self._episodes = AgentEpisodes(settings, engine=engine, hosts=hosts, step_timeout=60.0)

    async def start(self) -> None:
        await self._episodes.start()
        await self.seconds(16)

    async def seconds(self, count: int = EPISODES) -> float:
        """How long so many episodes take, all at once."""
        began = time.perf_counter()
        played = await asyncio.gather(
            *(
                self._episodes.play(
                    Prompt(ordinal=i, text=f"{10_000 + 37 * i:05d}>"),
                    SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=i),
                )
                for i in range(count)
            )
        )
        took = time.perf_counter() - began
        assert all(episode.segments[0].num_actions == TURNS * TOKENS for episode in played)
        return took

    async def close(self) -> None:
        await self._episodes.close()


async def measure(folder: Path, engine: EmbeddedEngine, *, hosts: int, repeats: int) -> dict[str, list[float]]:
    cases = {name: Case(name, folder, engine, hosts=hosts) for name in CASES}
    taken: dict[str, list[float]] = {name: [] for name in CASES}
    try:
        for case in cases.values():
            await case.start()
        for _ in range(repeats):
            for name, case in cases.items():
                taken[name].append(await case.seconds())
                print(f"{name}: {taken[name][-1]:.2f} s", flush=True)
    finally:
        for case in cases.values():
            await case.close()
    return taken


def table(taken: dict[str, list[float]]) -> str:
    lines = ["| environment | seconds | more than without sleep |", "|---|---:|---|"]
    for name, seconds in taken.items():
        extra = sorted(mine - base for mine, base in zip(seconds, taken["no sleep"], strict=True))
        shown = "" if name == "no sleep" else f"{statistics.median(extra):.2f} ({extra[0]:.2f} … {extra[-1]:.2f})"
        lines.append(f"| {name} | {statistics.median(seconds):.2f} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--hosts", type=int, help="processes (default: as in a run)")
    parser.add_argument("--machine", default="", help="how the report calls this machine")
    parser.add_argument("--write", action="store_true", help="replace the section in --out")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "RESULTS.md")
    args = parser.parse_args()
    silence_progress_bars()
    torch.set_num_threads(args.threads)
    hosts = hosts_for(EPISODES, wanted=args.hosts)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", seed=0)
        policy = load_policy(str(folder / "model"), dtype=torch.float32, device=torch.device("cpu"))
        policy.model.config.max_position_embeddings = MAX_LENGTH
        engine = EmbeddedEngine(policy.model, load_tokenizer(str(folder / "model")), max_model_len=MAX_LENGTH)
        taken = asyncio.run(measure(folder, engine, hosts=hosts, repeats=args.repeats))
    shown = table(taken)
    print(shown)
    if args.write:
        write_section(args.out, title="Slow environments", body=describe(shown, hosts=hosts, args=args))


def describe(shown: str, *, hosts: int, args: argparse.Namespace) -> str:
    return (
        f"`python -m bench.agents --write`: {EPISODES} episodes of {TURNS} turns at once, {TOKENS} tokens a turn, in "
        f"{hosts} host processes; each step of the environment sleeps {SECONDS} s, {TURNS * SECONDS:g} s an episode. "
        f"1M-parameter Qwen2, fp32, {args.threads} thread, {args.machine or platform.processor()} "
        f"({len(os.sched_getaffinity(0))} CPU cores given to the process), torch {torch.__version__}, transformers "
        f"{transformers.__version__}. Medians of {args.repeats} interleaved repeats, the difference within each "
        f"(min … max).\n\n{shown}\n\n"
        "`await`: `await asyncio.sleep` in `async def step`. `blocking`: `time.sleep` there; the host notices, and "
        "gives each episode a thread. `plain`: `time.sleep` in `def step`.\n"
    )


if __name__ == "__main__":
    main()
