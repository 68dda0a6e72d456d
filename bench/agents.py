"""256 episodes at once against an environment that takes half a second a step: `python -m bench.agents [--write]`.

Four turns each, the demo's model, in real host processes. What they take is compared with the same episodes without
the wait: if nobody waits for anybody else, the difference is the 2 s that each episode sleeps. `async`: the step awaits
a sleep. `blocking`: it calls `time.sleep` inside an async step, as careless code does.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path

import torch

from bench.results import write_section
from openrlhf.agents.episode_worker import EpisodeSettings
from openrlhf.agents.episodes import AgentEpisodes, hosts_for
from openrlhf.demo.model import write_model
from openrlhf.models.loading import LoadSettings, load_policy, load_tokenizer, silence_progress_bars
from openrlhf.rollout.embedded import EmbeddedEngine
from openrlhf.types import Prompt, SamplingParams

EPISODES, TURNS, SECONDS, TOKENS = 256, 4, 0.5, 8

AGENT = """
import asyncio, time
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.turn = 0

    async def step(self, states, **kwargs):
        self.turn += 1
        WAIT
        return {"rewards": 0.0, "environment_feedback": "12345>", "done": self.turn == TURNS}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""
WAITS = {"none": "pass", "async": f"await asyncio.sleep({SECONDS})", "blocking": f"time.sleep({SECONDS})"}


async def measure(model: Path, agent: Path, repeats: int) -> list[float]:
    """Seconds of each repeat, after one that is not counted."""
    policy = load_policy(model, LoadSettings(device="cpu"))
    engine = EmbeddedEngine(policy.model, load_tokenizer(model), max_model_len=128, max_batch_size=EPISODES)
    settings = EpisodeSettings(
        agent_file=str(agent),
        tokenizer=str(model),
        use_fast=True,
        trust_remote_code=False,
        max_length=128,
        max_steps=None,
        max_model_len=128,
    )
    hosts = hosts_for(EPISODES, wanted=None)
    episodes = AgentEpisodes(settings, engine=engine, hosts=hosts, step_timeout=60.0)
    await episodes.start()
    taken = []
    for repeat in range(repeats + 1):
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        prompts = [Prompt(ordinal=i, text="73914>") for i in range(EPISODES)]
        start = time.perf_counter()
        played = await asyncio.gather(*(episodes.play(p, params.copy(seed=1000 * repeat + p.ordinal)) for p in prompts))
        taken.append(time.perf_counter() - start)
        assert all(episode.segments[0].num_actions == TURNS * TOKENS for episode in played)
    await episodes.close()
    return taken[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the section of bench/RESULTS.md")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    silence_progress_bars()
    times: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model(folder / "model", seed=0)
        for name, wait in WAITS.items():
            agent = folder / f"{name}.py"
            agent.write_text(AGENT.replace("WAIT", wait).replace("TURNS", str(TURNS)))
            times[name] = sorted(asyncio.run(measure(folder / "model", agent, options.repeats)))[options.repeats // 2]
            print(name, f"{times[name]:.2f} s", flush=True)
    waits = TURNS * SECONDS
    rows = [
        f"{EPISODES} episodes of {TURNS} turns, {TOKENS} tokens each, at once; a step that waits {SECONDS} s; "
        f"the demo's model, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"{hosts_for(EPISODES, wanted=None)} hosts; median of {options.repeats}. Repeat: `python -m bench.agents`.",
        "",
        "| step | seconds | beyond generation and the wait of one episode |",
        "|---|---:|---:|",
        f"| returns at once | {times['none']:.2f} | |",
        *(
            f"| {text} | {times[name]:.2f} | {times[name] - times['none'] - waits:+.2f} |"
            for name, text in (("async", "`await asyncio.sleep(0.5)`"), ("blocking", "`time.sleep(0.5)`"))
        ),
    ]
    body = "\n".join(rows)
    print(body)
    if options.write:
        write_section(Path(__file__).with_name("RESULTS.md"), title="Agents that wait", body=body)


if __name__ == "__main__":
    main()
