"""Episodes with images in the hosts of an agent: tensors travel once, and what comes back is whole."""

import asyncio
import dataclasses
from pathlib import Path

import pytest
from scripted_engine import ScriptedEngine
from vision_models import TURNS, image, vision_tokenizer, write_vision_model

from openrlhf.agents.episode_worker import EpisodeSettings
from openrlhf.agents.episodes import AgentEpisodes, ArrivingImages, EpisodeError, OwnEpisodes
from openrlhf.agents.single_turn import SingleTurnAgentExecutor
from openrlhf.rollout.requests import ImageStore, num_bytes
from openrlhf.types import ImageInput, Prompt, SamplingParams

AROUND = "<|vision_start|><|image_pad|><|vision_end|>"
SHOWS = """
from PIL import Image
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    def __init__(self):
        self.turn = 0

    async def step(self, states):
        self.turn += 1
        colour = (states["label"], 40 * self.turn, 0)
        shown = [] if self.turn == 2 else [Image.new("RGB", (24, 24), colour)]
        return {"rewards": 1, "done": self.turn == 3, "environment_feedback": " no ", "environment_images": shown}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_vision_model("qwen2_5_vl", tmp_path_factory.mktemp("model"))


class Counted(AgentEpisodes):
    """Notes the images that hosts send, and how often they ask which to send."""

    def __init__(self, *args, **kwargs):
        self.sent: list[str] = []
        self.asked_about = 0
        super().__init__(*args, **kwargs)

    async def _answer(self, name, about):
        if name == "take_images":
            self.sent += [picture.digest for picture in about]
        self.asked_about += name == "lacking_images"
        return await super()._answer(name, about)


def settings_for(model: Path, folder: Path, agent: str = SHOWS, **changes) -> EpisodeSettings:
    (folder / "agent.py").write_text(agent)
    settings = EpisodeSettings(
        agent_file=str(folder / "agent.py"),
        tokenizer=str(model),
        use_fast=True,
        trust_remote_code=False,
        max_length=300,
        max_steps=None,
        max_model_len=300,
        chat_template=TURNS.replace("{{ IMAGE }}", AROUND),
        images=True,
    )
    return settings._replace(**changes)


def scripted() -> ScriptedEngine:
    return ScriptedEngine(lambda *_: vision_tokenizer("qwen2_5_vl")("5")["input_ids"])


def play_all(episodes, *prompts: Prompt):
    async def main():
        await episodes.start()
        try:
            return await asyncio.gather(*(episodes.play(prompt, SamplingParams()) for prompt in prompts))
        finally:
            await episodes.close()

    return asyncio.run(main())


def prompt(ordinal: int, label: int) -> Prompt:
    return Prompt(ordinal=ordinal, text=f"ask{AROUND}", label=label, images=(image(ordinal),))


def test_images_travel_once_from_a_host_and_come_back_with_the_episode(model, tmp_path):
    """Two prompts of two samples each: both show the prompt's image, and then one that only their label has."""
    engine = scripted()
    episodes = Counted(settings_for(model, tmp_path), engine=engine, hosts=0, step_timeout=60)
    played = play_all(episodes, prompt(0, 10), prompt(0, 10), prompt(1, 10), prompt(1, 20))
    segments = [episode.segments[0] for episode in played]
    assert [len(segment.images) for segment in segments] == [2, 2, 2, 2]
    digests = [[picture.digest for _, picture in segment.images] for segment in segments]
    assert digests[0] == digests[1]
    assert digests[0][0] != digests[2][0] == digests[3][0]
    assert digests[0][1] == digests[2][1] != digests[3][1]
    assert len({digest for row in digests for digest in row}) == 4
    assert sorted(episodes.sent) == sorted({digest for row in digests for digest in row})
    shown = [[picture.digest for _, picture in call] for call in engine.shown]
    assert sorted(map(len, shown)) == [1] * 4 + [2] * 8
    for segment in segments:
        for at, picture in segment.images:
            assert segment.token_ids[at : at + len(picture)].tolist() == list(picture.token_ids)
    first = vision_tokenizer("qwen2_5_vl").episode_images.prepare_one(image(0))
    assert segments[0].images[0].image.tensors["pixel_values"].equal(first.tensors["pixel_values"])
    assert all(episode.images == () for episode in played)  # what was read is in the segments


def test_a_later_episode_sends_no_image_that_the_parent_has(model, tmp_path):
    episodes = Counted(settings_for(model, tmp_path), engine=scripted(), hosts=0, step_timeout=60)

    async def main():
        await episodes.start()
        found = []
        for _ in range(3):
            found.append(await episodes.play(prompt(0, 10), SamplingParams()))
            found[-1] = found[-1].segments[0].images, len(episodes.sent)
        return found

    found = asyncio.run(main())
    assert [sent for _, sent in found] == [2, 2, 2]
    # The first asks again after each image it has sent; of three turns, the last has no new image.
    assert episodes.asked_about == 4 + 2 + 2
    # Samples hold the same tensors, not copies of them.
    assert all(images[0].image is found[0][0][0].image for images, _ in found)


def test_what_the_parent_has_forgotten_is_sent_again_and_an_episode_keeps_its_own(model, tmp_path):
    """The parent keeps one image for others; each episode has two, of which it needs both to its end."""
    episodes = Counted(settings_for(model, tmp_path), engine=scripted(), hosts=0, step_timeout=60)
    one = vision_tokenizer("qwen2_5_vl").episode_images.prepare_one(image(0))
    episodes._arriving = ArrivingImages(ImageStore(most_bytes=num_bytes(one)))

    async def main():
        await episodes.start()
        return [await episodes.play(prompt(0, 10), SamplingParams()) for _ in range(2)]

    played = asyncio.run(main())
    assert [len(episode.segments[0].images) for episode in played] == [2, 2]
    assert len(episodes.sent) == 4


def picture(digest: str) -> ImageInput:
    return ImageInput(tensors={}, token_ids=(7,), placeholder=7, digest=digest)


def test_two_episodes_that_need_the_same_images_do_not_wait_for_each_other():
    """Each has to send one that the other waits for."""

    async def main():
        arriving, first, second = ArrivingImages(ImageStore()), {}, {}
        assert await arriving.lacking(["a"], first) == ["a"]
        assert await arriving.lacking(["b", "a"], second) == ["b"]
        assert await arriving.lacking(["b", "a"], first) == ["a"]  # what it has to send comes first
        arriving.take([picture("a")], first)
        waits_for_b = asyncio.create_task(arriving.lacking(["b", "a"], first))
        await asyncio.sleep(0)
        assert not waits_for_b.done()
        arriving.take([picture("b")], second)
        assert await waits_for_b == []
        assert await arriving.lacking(["b", "a"], second) == []
        return sorted(first), sorted(second)

    assert asyncio.run(main()) == (["a", "b"], ["a", "b"])


def test_what_an_episode_ended_without_sending_comes_from_who_waits_for_it():
    async def main():
        arriving, first, second, third = ArrivingImages(ImageStore(0)), {}, {}, {}
        assert await arriving.lacking(["a"], first) == ["a"]
        assert await arriving.lacking(["a"], first) == ["a"]  # another process that plays the same episode again
        waiting = [asyncio.create_task(arriving.lacking(["a"], images)) for images in (second, third)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        arriving.give_up(first)
        assert await waiting[0] == ["a"]
        assert not waiting[1].done()
        arriving.take([picture("a")], second)
        assert await waiting[1] == []
        arriving.give_up(second)
        return list(third)

    assert asyncio.run(main()) == ["a"]


def test_a_prompts_broken_image_fails_its_episode_for_good(model, tmp_path):
    broken = dataclasses.replace(prompt(0, 1), images=(b"no image",))
    agents = AgentEpisodes(settings_for(model, tmp_path), engine=scripted(), hosts=0, step_timeout=60)
    tokenizer = vision_tokenizer("qwen2_5_vl")
    own = OwnEpisodes(SingleTurnAgentExecutor(), engine=scripted(), tokenizer=tokenizer, max_length=300)
    for episodes in (agents, own):
        with pytest.raises(EpisodeError, match="an image of 8 bytes") as caught:
            play_all(episodes, broken)
        assert not caught.value.retry


def test_our_own_single_turn_prepares_the_image_of_a_prompt_once():
    engine = scripted()
    tokenizer = vision_tokenizer("qwen2_5_vl")
    own = OwnEpisodes(SingleTurnAgentExecutor(), engine=engine, tokenizer=tokenizer, max_length=300)
    played = play_all(own, *[prompt(7, 1)] * 4)
    whole = tokenizer.episode_images.expand(f"ask{AROUND}", [tokenizer.episode_images.prepare_one(image(7))])
    assert [ids for ids, _ in engine.asked] == [whole.token_ids] * 4
    assert {id(call[0].image) for call in engine.shown} == {id(whole.images[0].image)}
    assert [episode.segments[0].images for episode in played] == [whole.images] * 4
    assert played[0].text == f"ask{AROUND}5"
