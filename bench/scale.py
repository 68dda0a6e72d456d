"""What the driver of a large run costs: `python -m bench.scale [--write] [--what turns] [--profile]`.

turns   1,024 agent episodes of 8 turns of 256 tokens, in real host processes, on fake engines behind `RayEngines`; and
        8,192 single turns, which the driver plays itself. CPU seconds are those of the driver's process, all its
        threads and Ray's among them; hosts, engines and Ray's own processes are others and do not count.
round   A round of 4,096 samples of 4,096 tokens: from episodes as a host sends them to samples on Ray's ranks.

A fake engine is real but for the model: it is asked through `EngineShell` in a Ray actor, and answers at once with
made-up tokens and log-probs. Many fake engines share an actor: there are 8 processes whatever the number of engines,
because each would need 0.3 GB. To the driver they are as many engines as it is told: each has its own place in the
router, in the books of what is lost, and in calls to all. What this leaves out: Ray's own cost of a connection to each
further actor, the network to other nodes, and vLLM's side of a request.

CPU seconds are compared, not seconds: they hardly depend on what else runs on the machine. Each figure is the least of
its repeats.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import gc
import os
import pickle
import pstats
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.results import write_section
from openrlhf.agents.base import Episode
from openrlhf.agents.episode_worker import EpisodeSettings
from openrlhf.agents.episodes import AgentEpisodes, Episodes, OwnEpisodes
from openrlhf.agents.single_turn import SingleTurnAgentExecutor
from openrlhf.algorithms.advantages import ESTIMATORS
from openrlhf.algorithms.reduction import Aggregation
from openrlhf.cluster.engine_shell import EngineShell
from openrlhf.cluster.engines import RayEngines
from openrlhf.cluster.launch import ray_cluster
from openrlhf.cluster.learners import RayWorkers
from openrlhf.cluster.services import RankService
from openrlhf.demo.model import write_model
from openrlhf.learners.accumulation import MicroBatching
from openrlhf.learners.advantages import AdvantageSettings, SampleMaker
from openrlhf.learners.steps import StepSettings
from openrlhf.models.loading import load_tokenizer
from openrlhf.rewards.base import Reward, RewardRequest
from openrlhf.rollout.runner import EpisodeRunner
from openrlhf.types import (
    FinishReason,
    Generation,
    Group,
    Outcome,
    Prompt,
    SampleKey,
    SamplingParams,
    Segment,
    Trajectory,
)

PROCESSES = 8
"""Ray actors that the fake engines share."""
GROUP = 8
"""Samples of a prompt."""
ROOM = 64
"""Tokens of an episode that are neither prompt nor sampled: feedback."""

AGENT = """
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.turn = 0

    async def step(self, states, **kwargs):
        self.turn += 1
        return {"rewards": 1.0, "environment_feedback": "12345>", "done": self.turn == TURNS}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


class FakeEngine:
    """Answers at once, with as many tokens as it is asked for."""

    any_loop = True

    def __init__(self, max_model_len: int) -> None:
        self.version = 0
        self.max_model_len = max_model_len

    async def generate(
        self, token_ids: Sequence[int], sampling_params: SamplingParams, images: Sequence[Any] = ()
    ) -> Generation:
        count = sampling_params.max_tokens or 1
        first = (sampling_params.seed or 0) % 7
        return Generation(
            token_ids=[first + token % 5 for token in range(count)],
            logprobs=[-0.001 * token for token in range(count)],
            versions=[self.version] * count,
            finish_reason=FinishReason.LENGTH,
        )

    async def check_health(self) -> None:
        pass

    def close(self) -> None:
        pass


class SharedSlot:
    """The place of one fake engine in an actor that it shares with others; what `RayEngines` asks of `EngineSlot`."""

    def __init__(self, engine: int, actor: Any) -> None:
        self.name = f"fake engine {engine}"
        self.actor = actor

    def close(self) -> None:
        pass


@contextlib.contextmanager
def fake_engines(count: int, actors: Sequence[Any], max_model_len: int) -> Iterator[RayEngines]:
    """`count` engines on the actors, all of which have started."""
    slots: list[Any] = [SharedSlot(engine, actors[engine % len(actors)]) for engine in range(count)]
    engines = RayEngines(slots, max_model_len=max_model_len, health_timeout=120.0)
    try:
        yield engines
    finally:
        engines.close(seconds=0.1)


class Cost(NamedTuple):
    """What a stretch of work took in the driver's process."""

    cpu: float
    seconds: float
    threads: dict[str, float]
    """CPU seconds by the name of the thread."""


class Meter:
    """Measures the driver's process between `with` and its end."""

    cost: Cost

    def __enter__(self) -> Meter:
        gc.collect()
        self._threads = thread_seconds()
        self._began = time.process_time(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        cpu, seconds = time.process_time() - self._began[0], time.perf_counter() - self._began[1]
        threads = {name: now - self._threads.get(name, 0.0) for name, now in thread_seconds().items()}
        self.cost = Cost(cpu, seconds, threads)


def thread_seconds() -> dict[str, float]:
    """CPU seconds of every thread of this process, by name; those of one name together."""
    names = {thread.native_id: thread.name.split("-")[0] for thread in threading.enumerate()}
    seconds: dict[str, float] = {}
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has just ended
            head, _, tail = Path(f"/proc/self/task/{task}/stat").read_text().rpartition(")")
            user, system = tail.split()[11:13]
            name = names.get(int(task), "Ray: " + head.partition("(")[2])
            seconds[name] = seconds.get(name, 0.0) + (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return seconds


class NoReward:
    """Judges episodes that bring no reward of their own: a single turn."""

    async def start(self) -> None:
        pass

    async def score(self, request: RewardRequest) -> list[Reward]:
        return [Reward(reward=0.0) for _ in request.queries]

    async def close(self) -> None:
        pass


class Workload(NamedTuple):
    episodes: int
    turns: int
    tokens: int

    @property
    def max_length(self) -> int:
        return self.turns * (self.tokens + ROOM)


async def play(episodes: Episodes, work: Workload, *, repeats: int, profile: cProfile.Profile | None) -> list[Cost]:
    """What each repeat costs, after a short one that is not counted."""
    runner = EpisodeRunner(episodes=episodes, reward=NoReward(), seed=0)
    await episodes.start()
    costs = []
    try:
        for repeat in range(-1, repeats):
            count = work.episodes if repeat >= 0 else min(work.episodes, 64)
            params = SamplingParams(max_tokens=work.tokens, ignore_eos=True)
            prompts = [
                Prompt(ordinal=number, text=f"{number:05d}" * 8 + ">") for number in range(max(1, count // GROUP))
            ]
            with Meter() as meter, profile if repeat >= 0 and profile is not None else contextlib.nullcontext():
                groups = await runner.play_all(prompts, n=min(GROUP, count), sampling_params=params)
            trajectories = [trajectory for group in groups for trajectory in group.trajectories]
            sampled = sum(trajectory.num_actions for trajectory in trajectories)
            assert sampled == len(trajectories) * work.turns * work.tokens, trajectories[0].error
            if repeat >= 0:
                costs.append(meter.cost)
    finally:
        await episodes.close()
    return costs


def row(name: str, engines: int, work: Workload, costs: Sequence[Cost]) -> str:
    cost = min(costs)
    turns = work.episodes * work.turns
    return (
        f"| {name} | {engines} | {work.tokens} | {cost.cpu:.2f} | {1e3 * cost.cpu / turns:.2f} | "
        f"{1e6 * cost.cpu / turns / work.tokens:.2f} | {turns / cost.seconds:,.0f} |"
    )


def turn_rows(options: argparse.Namespace) -> list[str]:
    """The table of `turns`."""
    import ray

    agents = Workload(options.episodes, options.turns, options.tokens)
    few = agents._replace(tokens=max(1, options.tokens // 16))
    single = Workload(options.episodes * options.turns, 1, options.tokens)
    cases = [("agents, 8 turns" if options.turns == 8 else "agents", count, agents) for count in options.engines]
    middle = options.engines[len(options.engines) // 2]
    cases += [("agents, short answers", middle, few), ("single turn, in the driver", middle, single)]
    rows = [
        "| | engines | tokens a turn | CPU s | CPU s per 1,000 turns | CPU s per million tokens | turns/s |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    print(*rows, sep="\n")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model(folder, seed=0)
        agent = folder / "agent.py"
        agent.write_text(AGENT.replace("TURNS", str(options.turns)))
        tokenizer = load_tokenizer(folder)
        actors = [
            ray.remote(EngineShell).options(num_cpus=0, max_concurrency=100_000).remote()
            for _ in range(options.processes)
        ]
        ray.get([actor.start.remote(lambda: FakeEngine(65536), os.getcwd()) for actor in actors], timeout=600)
        for name, count, work in cases:
            settings = EpisodeSettings(
                agent_file=str(agent),
                tokenizer=str(folder),
                use_fast=True,
                trust_remote_code=False,
                max_length=work.max_length,
                max_steps=None,
                max_model_len=work.max_length,
            )
            profile = cProfile.Profile() if options.profile else None
            with fake_engines(count, actors, work.max_length) as engines:
                episodes: Episodes
                if work is single:
                    player = SingleTurnAgentExecutor()
                    episodes = OwnEpisodes(player, engine=engines, tokenizer=tokenizer, max_length=work.max_length)
                else:
                    episodes = AgentEpisodes(
                        settings, engine=engines, requests=engines, hosts=options.hosts, step_timeout=600.0
                    )
                costs = asyncio.run(play(episodes, work, repeats=options.repeats, profile=profile))
            rows.append(row(name, count, work, costs))
            print(rows[-1], flush=True)
            if profile is not None:
                spent = sorted(min(costs).threads.items(), key=lambda item: -item[1])
                print("CPU s by thread:", ", ".join(f"{thread} {cpu:.2f}" for thread, cpu in spent if cpu >= 0.05))
                pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        for actor in actors:
            ray.kill(actor)
    return rows


# --------------------------------------------------------------------------------------- a round, to its ranks


class Ranks:
    """A group of ranks with nothing but a `RankService` each; what `RayWorkers.place` asks of `WorkerGroup`."""

    def __init__(self, count: int) -> None:
        import ray

        self.actors = [ray.remote(RankService).options(num_cpus=0).remote() for _ in range(count)]

    def __len__(self) -> int:
        return len(self.actors)

    def call(self, method: str, *, shares: Sequence[tuple[Any, ...]], deadline: float) -> list[Any]:
        import ray

        return ray.get(
            [getattr(actor, method).remote(*share) for actor, share in zip(self.actors, shares, strict=True)],
            timeout=deadline,
        )


def an_episode(tokens: int) -> bytes:
    """One episode, as a host sends it: half of its tokens sampled, in 8 turns."""
    turn = np.arange(tokens) % max(2, tokens // 8) >= max(2, tokens // 8) // 2
    ends = np.append(turn[:-1] & ~turn[1:], True) & turn
    segment = Segment(
        token_ids=torch.arange(tokens) % 1000,
        action_mask=torch.from_numpy(turn),
        rollout_logprobs=torch.from_numpy(np.where(turn, np.float32(-0.5), np.float32(0))),
        versions=torch.from_numpy(np.where(turn, 3, -1).astype(np.int32)),
        turn_rewards=torch.from_numpy(ends.astype(np.float32)),
        turn_ends=torch.from_numpy(ends),
    )
    return pickle.dumps(Episode(segments=(segment,), text="", truncated=False, reward=float(ends.sum())))


def read_groups(payload: bytes, samples: int) -> list[Group]:
    """As the driver gets them: every episode is read from its own message."""

    def trajectory(prompt: int, sample: int) -> Trajectory:
        episode = pickle.loads(payload)
        return Trajectory(
            key=SampleKey(prompt, sample),
            segments=episode.segments,
            outcome=Outcome.FINISHED,
            reward=episode.reward + sample,
            score=0.0,
        )

    return [
        Group(
            prompt=Prompt(ordinal=prompt, text="?"),
            trajectories=tuple(trajectory(prompt, sample) for sample in range(GROUP)),
        )
        for prompt in range(samples // GROUP)
    ]


class Peak:
    """The driver's memory, in GB: at most, less what it was at the beginning."""

    def __enter__(self) -> Peak:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._before = _memory("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.gigabytes = _memory("VmHWM") - self._before


def _memory(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith(name))
    return int(kilobytes) / 1e6


def round_rows(options: argparse.Namespace) -> list[str]:
    """The table of `round`."""
    make_samples = SampleMaker(AdvantageSettings(estimator=ESTIMATORS["group_norm"]))
    steps = StepSettings(
        epochs=1, batch_size=options.samples, batching=MicroBatching(), aggregation=Aggregation.TOKEN, seed=0
    )
    policy, critic = Ranks(options.ranks), Ranks(max(1, options.ranks // 2))
    fake: dict[str, Any] = {"policy": policy, "critic": critic}
    placing = RayWorkers(make_samples=make_samples, steps=steps, **fake)
    payload = an_episode(options.length)
    placing.place(read_groups(payload, 2 * GROUP))  # the processes have started
    best: dict[str, tuple[Cost, float]] = {}
    for _ in range(options.repeats):
        groups: list[Group] = []

        def read(groups: list[Group] = groups) -> None:
            groups += read_groups(payload, options.samples)

        def place(groups: list[Group] = groups) -> None:
            placing.place(groups)

        stages: dict[str, Callable[[], None]] = {"episodes read into groups": read, "groups placed on ranks": place}
        for name, stage in stages.items():
            with Peak() as peak, Meter() as meter:
                stage()
            # Later repeats find memory that earlier ones have given back to the allocator: the most is what it takes.
            cost, most = best.get(name, (meter.cost, peak.gigabytes))
            best[name] = min(cost, meter.cost), max(most, peak.gigabytes)
    return [
        "| | CPU s of the driver | seconds | the driver's memory, GB |",
        "|---|---:|---:|---:|",
        *(f"| {name} | {cost.cpu:.2f} | {cost.seconds:.2f} | {peak:+.2f} |" for name, (cost, peak) in best.items()),
    ]


# ------------------------------------------------------------------------------------------------- command line


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the sections of bench/RESULTS.md")
    parser.add_argument("--what", nargs="+", choices=("turns", "round"), default=("turns", "round"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="of a turn")
    parser.add_argument("--engines", type=int, nargs="+", default=(8, 64, 512))
    parser.add_argument("--processes", type=int, default=PROCESSES, help="that engines share")
    parser.add_argument("--hosts", type=int, default=2, help="processes that play episodes")
    parser.add_argument("--profile", action="store_true", help="say where the driver's time goes; it takes longer")
    parser.add_argument("--samples", type=int, default=4096, help="of the round")
    parser.add_argument("--length", type=int, default=4096, help="of a sample, in tokens")
    parser.add_argument("--ranks", type=int, default=4, help="of the policy; half as many of the critic")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    where = f"{os.cpu_count()} busy cores, torch {torch.__version__}; least CPU of {options.repeats}"
    sections = {}
    with ray_cluster():
        if "turns" in options.what:
            sections["The driver, turn by turn"] = [
                f"{options.episodes:,} episodes of {options.turns} turns in {options.hosts} hosts, fake engines that "
                f"answer at once in {options.processes} Ray actors; {where}. CPU seconds are the driver's process's. "
                "Repeat: `python -m bench.scale --what turns`.",
                "",
                *turn_rows(options),
            ]
        if "round" in options.what:
            sections["The driver, a round to its ranks"] = [
                f"{options.samples:,} samples of {options.length:,} tokens to {options.ranks} ranks of a policy and "
                f"{max(1, options.ranks // 2)} of a critic; {where}. Repeat: `python -m bench.scale --what round`.",
                "",
                *round_rows(options),
            ]
            print(*sections["The driver, a round to its ranks"], sep="\n")
    if options.write:
        for title, rows in sections.items():
            write_section(Path(__file__).with_name("RESULTS.md"), title=title, body="\n".join(rows))


if __name__ == "__main__":
    main()
