"""Agents with images in real host processes: prepared there, sent once, and exact after a crash."""

import asyncio

from scripted_engine import ScriptedEngine
from vision_models import TURNS, image, vision_tokenizer, write_vision_model

from openrlhf.agents.episode_worker import EpisodeSettings
from openrlhf.agents.episodes import AgentEpisodes
from openrlhf.types import Prompt, SamplingParams

AROUND = "<|vision_start|><|image_pad|><|vision_end|>"
AGENT = """
import os
from pathlib import Path
from PIL import Image
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor, next_user_turn

marker = Path(__file__).with_name("crashed")

class AgentInstance(AgentInstanceBase):
    def __init__(self):
        self.turn = 0

    def step(self, states):
        self.turn += 1
        if self.turn == 2 and states["label"] == "crash" and not marker.exists():
            marker.touch()
            os._exit(3)
        feedback = next_user_turn(states["tokenizer"], "no <image>", after=states["action_text"])
        shown = [Image.new("RGB", (16 + 8 * self.turn, 24), (40 * self.turn, 0, 0))]
        return {"rewards": 1, "done": self.turn == 3, "environment_feedback": feedback, "environment_images": shown}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


class Counted(AgentEpisodes):
    """Notes the images that hosts send."""

    sent: list[str]

    async def _answer(self, name, about):
        if name == "take_images":
            self.sent += [picture.digest for picture in about]
        return await super()._answer(name, about)


def test_images_of_hosts_are_exact_and_a_crash_changes_nothing(tmp_path):
    from PIL import Image

    model = write_vision_model("qwen2_5_vl", tmp_path / "model")
    (tmp_path / "agent.py").write_text(AGENT)
    settings = EpisodeSettings(
        agent_file=str(tmp_path / "agent.py"),
        tokenizer=str(model),
        use_fast=True,
        trust_remote_code=False,
        max_length=300,
        max_steps=None,
        max_model_len=300,
        chat_template=TURNS.replace("{{ IMAGE }}", AROUND),
        images=True,
    )
    tokenizer = vision_tokenizer("qwen2_5_vl")
    engine = ScriptedEngine(lambda *_: tokenizer("5")["input_ids"])
    episodes = Counted(settings, engine=engine, hosts=1, step_timeout=120)
    episodes.sent = []
    prompts = [
        Prompt(ordinal=0, text=f"user={AROUND}ask!assistant=", label=label, images=(image(0),))
        for label in ("crash", "", "")
    ]

    async def main():
        await episodes.start()
        try:
            return await asyncio.gather(*(episodes.play(prompt, SamplingParams()) for prompt in prompts))
        finally:
            await episodes.close()

    played = asyncio.run(main())
    assert (tmp_path / "crashed").exists()
    reader = tokenizer.episode_images
    pictures = [image(0), *(Image.new("RGB", (16 + 8 * turn, 24), (40 * turn, 0, 0)) for turn in (1, 2))]
    inputs = [reader.prepare_one(picture) for picture in pictures]
    again = f"5!user=no {AROUND}!assistant="
    whole = reader.expand(f"user={AROUND}ask!assistant={again}{again}", inputs)
    for episode in played:
        (segment,) = episode.segments
        assert segment.token_ids.tolist() == whole.token_ids + tokenizer("5")["input_ids"]
        assert [(at, picture.digest) for at, picture in segment.images] == [
            (at, picture.digest) for at, picture in whole.images
        ]
        for (_, here), (_, there) in zip(whole.images, segment.images, strict=True):
            assert here.tensors.keys() == there.tensors.keys()
            assert all(here.tensors[name].equal(there.tensors[name]) for name in here.tensors)
    # Three answers for each of three episodes: what was answered before the crash is not asked again.
    assert len(engine.asked) == 9
    # Each of three images once: the process that took the place of the other sends none that is here.
    assert sorted(episodes.sent) == sorted(picture.digest for picture in inputs)
