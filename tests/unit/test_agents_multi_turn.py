"""Multi-turn episodes: exactly the engine's tokens, within every limit, nothing shared between episodes."""

import asyncio
import copy
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import CharTokenizer, ScriptedEngine, bpe_tokenizer, says
from vision_models import image, vision_tokenizer

from openrlhf.agents.base import Episode
from openrlhf.agents.images import BadImageError
from openrlhf.agents.multi_turn import MultiTurnAgentExecutor
from openrlhf.agents.user_agent import UserAgent, load_agent
from openrlhf.agents.user_calls import AgentResultError
from openrlhf.types import FinishReason, SamplingParams
from openrlhf.utils.agent import AgentInstanceBase, next_user_turn
from openrlhf.utils.randomness import derive_seed

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "python" / "agent_func.py"


def play(
    player, engine, *, prompt="ask", label="", tokenizer=None, params=None, max_length=100, max_steps=None, **more
):
    return asyncio.run(
        player.play(
            prompt,
            label,
            params or SamplingParams(seed=7),
            max_length,
            tokenizer or CharTokenizer(),
            engine,
            max_steps=max_steps,
            **more,
        )
    )


def environment(*turns: dict, reset: dict | None = None):
    """A class that answers with `turns` one after another, the last one again and again, and remembers what it was
    told; done with the last unless they say otherwise."""
    made = []

    class Scripted(AgentInstanceBase):
        def __init__(self, *args, **kwargs):
            self.told = []
            made.append(self)

        async def reset(self, states, **kwargs):
            self.started = states
            return reset or {"observation": states["observation"]}

        async def step(self, states, **kwargs):
            self.told.append(states)
            await asyncio.sleep(0)
            turn = min(len(self.told), len(turns))
            return {"rewards": 0.0, "done": turn == len(turns)} | turns[turn - 1]

    Scripted.made = made
    return Scripted


def columns(episode: Episode) -> dict[str, list]:
    (segment,) = episode.segments
    return {
        "text": "".join(map(chr, segment.token_ids.tolist())),
        "mask": "".join("a" if action else "." for action in segment.action_mask.tolist()),
        "rewards": [(i, r) for i, r in enumerate(segment.turn_rewards.tolist()) if r],
        "versions": segment.versions.tolist(),
    }


def test_two_turns_as_they_are_trained_on():
    """ask | 12 | no: | 3 — turn rewards 0.25 and 0.5 on the last token of "12" (index 4) and of "3" (index 8)."""
    cls = environment({"rewards": 0.25, "environment_feedback": "no:"}, {"rewards": 0.5, "environment_feedback": "yes"})
    episode = play(MultiTurnAgentExecutor(cls), says("12", "3"))
    assert columns(episode) == {
        "text": "ask12no:3",
        "mask": "...aa...a",
        "rewards": [(4, 0.25), (8, 0.5)],
        "versions": [-1, -1, -1, 0, 0, -1, -1, -1, 1],
    }
    assert episode.segments[0].rollout_logprobs.tolist() == pytest.approx([0, 0, 0, 0, -0.01, 0, 0, 0, -1.0])
    assert episode.reward == episode.score == 0.75
    assert not episode.truncated
    # The last feedback was read by nobody: it is not trained on, but people can read it.
    assert episode.text == "ask12no:3yes"


def test_multi_turn_step_arguments():
    cls = environment({"environment_feedback": "no:"}, {})
    play(MultiTurnAgentExecutor(cls), says("12", "3"), label={"answer": 3})
    (instance,) = cls.made
    assert instance.started == {"observation": "ask", "label": {"answer": 3}}
    assert [(s["observation_text"], s["action_text"], s["label"]) for s in instance.told] == [
        ("ask", "12", {"answer": 3}),
        ("ask12no:", "3", {"answer": 3}),
    ]
    assert all(s["sampling_params"] == SamplingParams(seed=7) for s in instance.told)


def test_an_action_is_told_with_its_special_tokens():
    """Tool calls and end-of-turn markers are special tokens in many chat models."""
    tokenizer = bpe_tokenizer()
    ids = [*tokenizer("higher")["input_ids"], tokenizer.eos_token_id]
    cls = environment({})
    episode = play(MultiTurnAgentExecutor(cls), ScriptedEngine(lambda *_: ids), tokenizer=tokenizer)
    assert cls.made[0].told[0]["action_text"] == "higher<|end|>"
    assert episode.text == "askhigher<|end|>"


def test_reset_may_rewrite_the_prompt():
    """The policy reads what `reset` says; the text still begins with the prompt, where reward functions split it."""
    cls = environment({}, reset={"observation": "Q: ask. A:"})
    engine = says("12")
    episode = play(MultiTurnAgentExecutor(cls), engine)
    assert "".join(map(chr, engine.asked[0][0])) == "Q: ask. A:"
    assert cls.made[0].told[0]["observation_text"] == "Q: ask. A:"
    assert episode.text == "ask12"
    added = play(MultiTurnAgentExecutor(environment({}, reset={"observation": "ask politely"})), says("12"))
    assert added.text == "ask politely12"


def test_the_score_is_the_last_turns_and_logs_are_the_last_of_their_name():
    cls = environment(
        {"rewards": 1, "scores": 0.2, "extra_logs": {"a": 1, "b": torch.tensor(2.0)}},
        {"rewards": 1, "extra_logs": {"b": torch.tensor([3])}},
        {"rewards": 1, "scores": True, "extra_logs": {"c": True}},
    )
    episode = play(MultiTurnAgentExecutor(cls), says("1"))
    assert (episode.reward, episode.score, episode.extra_logs) == (3.0, 1.0, {"a": 1.0, "b": 3.0, "c": 1.0})
    without = environment({"rewards": 1, "scores": 0.2}, {"rewards": 0.5})
    assert play(MultiTurnAgentExecutor(without), says("1")).score == 1.5  # the rewards so far


# Images -------------------------------------------------------------------------------------------------------------


def looks(tokenizer, *texts: str) -> ScriptedEngine:
    """Answers with these texts in turn, the last one again and again."""

    def answer(prompt, params):
        return tokenizer(texts[min(len(engine.asked), len(texts)) - 1])["input_ids"]

    engine = ScriptedEngine(answer)
    return engine


class Sees(AgentInstanceBase):
    """Shows another image with every answer, as a message of the user; three turns."""

    def __init__(self, *args, **kwargs):
        self.turn = 0

    async def step(self, states, **kwargs):
        self.turn += 1
        feedback = next_user_turn(states["tokenizer"], "no <image> look", after=states["action_text"])
        shown = {"environment_feedback": feedback, "environment_images": [image(self.turn, width=16 + 8 * self.turn)]}
        return {"rewards": 0.5, "done": self.turn == 3} | shown


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "llava"])
def test_three_turns_with_an_image_each_are_the_tokens_of_one_rendering(kind):
    tokenizer = vision_tokenizer(kind)
    reader = tokenizer.episode_images
    engine = looks(tokenizer, "7", "8 8", "9")
    asked = [{"type": "image"}, {"type": "text", "text": "which?"}]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": asked}], tokenize=False, add_generation_prompt=True
    )
    episode = play(
        MultiTurnAgentExecutor(Sees),
        engine,
        prompt=prompt,
        tokenizer=tokenizer,
        images=(image(0),),
        params=SamplingParams(),
        max_length=1000,
    )

    messages = [{"role": "user", "content": asked}]
    for said in ("7", "8 8"):
        again = [{"type": "text", "text": "no "}, {"type": "image"}, {"type": "text", "text": " look"}]
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": again}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    pictures = [image(0), image(1, width=24), image(2, width=32)]
    whole = reader.processor.expand(text, [reader.processor.prepare(picture) for picture in pictures])
    (segment,) = episode.segments
    assert segment.token_ids.tolist() == whole.token_ids + tokenizer("9")["input_ids"]
    places = [(at, picture.digest) for at, picture in whole.images]
    assert [(at, picture.digest) for at, picture in segment.images] == places
    # Each turn was asked with all that it has seen, and the same tensors all the time.
    assert [len(shown) for shown in engine.shown] == [1, 2, 3]
    assert all(now is then for now, then in zip(engine.shown[2], segment.images, strict=True))
    assert [ids for ids, _ in engine.asked][2] == whole.token_ids
    # The mask: what the policy said, and nothing of images.
    assert tokenizer.decode(segment.token_ids[segment.action_mask]) == tokenizer.decode(
        [token for said in ("7", "8 8", "9") for token in tokenizer(said)["input_ids"]]
    )
    assert episode.text.count("<image>") == 3 + (kind == "llava")  # feedback is told as it was written


def shows(**turn):
    return environment({"environment_images": [image(1)]} | turn, {})


def test_images_without_a_mark_stand_before_the_feedback():
    tokenizer = vision_tokenizer("qwen2_5_vl")
    engine = looks(tokenizer, "1")
    cls = environment({"environment_images": [image(1), image(2)], "environment_feedback": " no "}, {})
    play(MultiTurnAgentExecutor(cls), engine, tokenizer=tokenizer)
    once = "<|vision_start|><|image_pad|><|vision_end|>"
    inputs = [tokenizer.episode_images.prepare_one(image(n)) for n in (1, 2)]
    expected = tokenizer.episode_images.processor.expand(f"ask1{once}{once} no ", inputs)
    assert engine.asked[1][0] == expected.token_ids
    assert [at for at, _ in engine.shown[1]] == [at for at, _ in expected.images]


def test_images_that_do_not_fit_end_the_episode_as_truncated():
    tokenizer = vision_tokenizer("qwen2_5_vl")
    tokens = len(tokenizer.episode_images.prepare_one(image(1)))
    beside = len("ask1") + 2 + len("no")  # the vision tokens stand around the image's
    for room, turns in ((beside + tokens, 1), (beside + tokens + 1, 2)):
        cls = shows(environment_feedback="no")
        episode = play(MultiTurnAgentExecutor(cls), looks(tokenizer, "1"), tokenizer=tokenizer, max_length=room)
        (segment,) = episode.segments
        assert (len(cls.made[0].told), len(segment.images)) == (turns, turns - 1)
        assert episode.truncated == (turns == 1)


def test_a_first_observation_with_images_is_not_cut():
    tokenizer = vision_tokenizer("qwen2_5_vl")
    with pytest.raises(BadImageError, match=r"has \d+ tokens with its 1 images, and room for 9: raise --data.max_len"):
        play(
            MultiTurnAgentExecutor(shows()),
            looks(tokenizer, "1"),
            tokenizer=tokenizer,
            images=[image(0)],
            max_length=10,
        )


@pytest.mark.parametrize(
    ("observation", "returned", "seen"),
    [
        ("ask <image>", None, [0]),
        ("<image> ask <image>", [1], [0, 1]),  # more than the prompt's
        ("ask <image>", [1], [1]),  # in place of the prompt's
        ("<image><image> ask", [0, 1], [0, 1]),
        ("ask", [], []),
    ],
)
def test_reset_says_which_images_the_policy_reads_first(observation, returned, seen):
    tokenizer = vision_tokenizer("qwen2_5_vl")
    reset = {"observation": observation}
    if returned is not None:
        reset["images"] = [image(n) for n in returned]
    engine = looks(tokenizer, "1")
    cls = environment({}, reset=reset)
    play(MultiTurnAgentExecutor(cls), engine, tokenizer=tokenizer, images=[image(0)])
    digests = [tokenizer.episode_images.prepare_one(image(n)).digest for n in seen]
    assert [picture.digest for _, picture in engine.shown[0]] == digests
    assert cls.made[0].started["images"][0].tobytes() == image(0).tobytes()


@pytest.mark.parametrize(
    ("turn", "text"),
    [
        ({"environment_feedback": "<image> <image>"}, "has 2 marks of images .*, and 1 images belong to it"),
        ({"environment_images": [b"no image"]}, "images of step: an image of 8 bytes"),
        ({"environment_images": ["nowhere.png"]}, "nowhere.png"),
    ],
)
def test_what_is_wrong_with_images_is_said_of_the_users_method(turn, text):
    tokenizer = vision_tokenizer("qwen2_5_vl")
    with pytest.raises(AgentResultError, match=rf"test_agents_multi_turn.py:\d+.*{text}"):
        play(MultiTurnAgentExecutor(shows(**turn)), looks(tokenizer, "1"), tokenizer=tokenizer)


@pytest.mark.parametrize("done", [True, False])
def test_images_for_a_policy_of_text_are_an_error(done):
    with pytest.raises(AgentResultError, match=r"images of step: 1 came, but the policy of this run reads no images"):
        play(MultiTurnAgentExecutor(shows(done=done)), says("1"))


def test_feedback_that_spells_the_image_token_stays_text():
    tokenizer = vision_tokenizer("qwen2_5_vl")
    engine = looks(tokenizer, "1")
    play(
        MultiTurnAgentExecutor(environment({"environment_feedback": "<|image_pad|>?"}, {})), engine, tokenizer=tokenizer
    )
    assert engine.shown == [(), ()]
    assert tokenizer.episode_images.processor.placeholder not in engine.asked[1][0]
    assert len(engine.asked[1][0]) > len("ask1?")


# Limits -------------------------------------------------------------------------------------------------------------


def test_a_long_observation_is_cut_from_the_left_to_leave_room_for_a_turn():
    engine = says("12345")
    play(
        MultiTurnAgentExecutor(environment({})),
        engine,
        prompt="abcdefgh",
        params=SamplingParams(max_tokens=3),
        max_length=8,
    )
    assert engine.asked[0][0] == [ord(c) for c in "defgh"]
    engine = says("12345")
    play(MultiTurnAgentExecutor(environment({})), engine, prompt="abcdefgh", max_length=8)
    assert engine.asked[0][0] == [ord(c) for c in "bcdefgh"]  # no limit per turn: room for one token


def test_multi_turn_limits_of_a_turn_and_of_the_episode():
    """max_length 10, 4 a turn: "ask" 3, turn 7, feedback 8, turn 10. Nothing is left for a third."""
    engine = says("123456789")
    cls = environment({"environment_feedback": "!"}, {"environment_feedback": "!"}, {})
    episode = play(MultiTurnAgentExecutor(cls), engine, params=SamplingParams(max_tokens=4), max_length=10)
    assert [params.max_tokens for _, params in engine.asked] == [4, 2]
    assert columns(episode)["text"] == "ask1234!12"
    assert episode.truncated


def test_feedback_that_leaves_no_room_ends_the_episode():
    cls = environment({"rewards": 1.0, "environment_feedback": "x" * 95}, {})
    episode = play(MultiTurnAgentExecutor(cls), says("12"), max_length=100)
    assert (columns(episode)["text"], episode.reward, episode.truncated) == ("ask12", 1.0, True)
    fits = environment({"rewards": 1.0, "environment_feedback": "x" * 94}, {})
    assert len(play(MultiTurnAgentExecutor(fits), says("12"), max_length=100).segments[0]) == 100


@pytest.mark.parametrize(
    ("max_steps", "turns", "truncated"), [(1, 1, True), (2, 2, True), (3, 3, False), (9, 3, False), (None, 3, False)]
)
def test_the_turn_limit_ends_an_episode_before_it_is_done(max_steps, turns, truncated):
    engine = says("1")
    episode = play(MultiTurnAgentExecutor(environment({}, {}, {})), engine, max_steps=max_steps)
    assert (len(engine.asked), episode.truncated) == (turns, truncated)


def test_a_generation_cut_by_its_limit_is_reported():
    cut = play(MultiTurnAgentExecutor(environment({})), says("12345"), params=SamplingParams(max_tokens=4))
    whole = play(MultiTurnAgentExecutor(environment({})), says("12345"), params=SamplingParams(max_tokens=5))
    assert (cut.truncated, whole.truncated) == (True, False)


# Sampling parameters ------------------------------------------------------------------------------------------------


def test_multi_turn_step_changes_parameters_only_by_returning_them():
    seen = []

    class Cooling(AgentInstanceBase):
        def __init__(self, *args, **kwargs):
            self.turn = 0

        async def step(self, states, **kwargs):
            self.turn += 1
            params = states["sampling_params"]
            seen.append(params.temperature)
            params.temperature /= 2
            return {"rewards": 0, "done": self.turn == 4} | ({"sampling_params": params} if self.turn == 2 else {})

    engine = says("1")
    params = SamplingParams(seed=7, temperature=0.8)
    play(MultiTurnAgentExecutor(Cooling), engine, params=params)
    assert seen == [0.8, 0.8, 0.4, 0.4]
    assert [asked.temperature for _, asked in engine.asked] == [0.8, 0.8, 0.4, 0.4]
    assert params == SamplingParams(seed=7, temperature=0.8)


def test_a_turns_seed_depends_on_the_episodes_and_on_its_index():
    engine = says("1")
    new = SamplingParams(temperature=0.5, logprobs=False)  # made from nothing: names no seed
    play(MultiTurnAgentExecutor(environment({}, {"sampling_params": new}, {})), engine, params=SamplingParams(seed=3))
    assert [params.seed for _, params in engine.asked] == [derive_seed(3, "turn", i) for i in range(3)]
    assert all(params.logprobs for _, params in engine.asked)  # the run wants them, whatever a step says


def test_multi_turn_without_a_seed_leaves_it_to_the_engine():
    engine = says("1")
    play(MultiTurnAgentExecutor(environment({}, {})), engine, params=SamplingParams())
    assert [params.seed for _, params in engine.asked] == [None, None]


# Token exactness ----------------------------------------------------------------------------------------------------


@dataclass
class Script:
    """One random episode: what the policy would say, what the environment answers, and the limits."""

    prompt: str
    actions: list[list[int]]
    turns: list[dict]
    max_length: int
    max_tokens: int | None
    max_steps: int | None
    reset: dict | None = None
    log: list = field(default_factory=list)


texts = st.text(alphabet="the guesr 123:\n<|end|>é😀", max_size=12)
scripts = st.integers(1, 5).flatmap(
    lambda n: st.builds(
        Script,
        prompt=texts.filter(bool),
        actions=st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=8), min_size=n, max_size=n),
        turns=st.lists(
            st.fixed_dictionaries(
                {"rewards": st.sampled_from([0.0, 0.5, -1.0, 2]), "environment_feedback": texts},
                optional={"done": st.booleans(), "scores": st.floats(0, 1, width=32)},
            ),
            min_size=n,
            max_size=n,
        ),
        max_length=st.integers(2, 60),
        max_tokens=st.none() | st.integers(1, 10),
        max_steps=st.none() | st.integers(1, 6),
        reset=st.none() | st.builds(lambda text: {"observation": text}, texts.filter(bool)),
    )
)


def engine_of(script: Script) -> ScriptedEngine:
    engine = ScriptedEngine(lambda *_: script.actions[min(len(engine.asked), len(script.actions)) - 1])
    return engine


@settings(deadline=None, max_examples=80)
@given(scripts)
def test_multi_turn_tokens_are_those_the_engine_read_and_wrote(script):
    tokenizer, engine = bpe_tokenizer(), engine_of(script)
    cls = environment(*script.turns, reset=script.reset)
    params = SamplingParams(seed=1, max_tokens=script.max_tokens)
    before = copy.deepcopy(params)
    episode = play(
        MultiTurnAgentExecutor(cls),
        engine,
        prompt=script.prompt,
        tokenizer=tokenizer,
        params=params,
        max_length=script.max_length,
        max_steps=script.max_steps,
    )
    assert params == before

    turns = len(engine.asked)
    answers = (script.turns + script.turns[-1:] * turns)[:turns]
    actions = (script.actions + script.actions[-1:] * turns)[:turns]
    (segment,) = episode.segments
    tokens = segment.token_ids.tolist()
    expected_mask, rewards = [False] * len(tokens), [0.0] * len(tokens)
    versions, logprobs = [-1] * len(tokens), [0.0] * len(tokens)
    end = 0
    for k, ((read, asked), answer) in enumerate(zip(engine.asked, engine.answered, strict=True)):
        start = len(read)
        assert read == tokens[:start]
        if k:
            feedback = answers[k - 1]["environment_feedback"]
            assert read[end:] == tokenizer(feedback, add_special_tokens=False)["input_ids"]
        end = start + len(answer.token_ids)
        assert tokens[start:end] == answer.token_ids == actions[k][: asked.max_tokens]
        expected_mask[start:end] = [True] * (end - start)
        versions[start:end] = answer.versions
        logprobs[start:end] = answer.logprobs
        rewards[end - 1] = answers[k]["rewards"]
    assert end == len(tokens) <= script.max_length
    assert segment.action_mask.tolist() == expected_mask
    assert segment.versions.tolist() == versions
    assert segment.rollout_logprobs.tolist() == pytest.approx(logprobs)
    assert segment.turn_rewards.tolist() == rewards
    assert episode.reward == sum(rewards)

    done = answers[-1].get("done", turns >= len(script.turns))
    cut = any(answer.finish_reason is FinishReason.LENGTH for answer in engine.answered)
    assert episode.truncated == (cut or not done)
    assert turns <= (script.max_steps or turns)
    assert all(len(answer.token_ids) <= (script.max_tokens or 99) for answer in engine.answered)

    (instance,) = cls.made
    said = instance.started["observation"] if script.reset is None else script.reset["observation"]
    for told, answer, turn in zip(instance.told, engine.answered, answers, strict=True):
        assert told["observation_text"] == said
        said += told["action_text"] + turn["environment_feedback"]
        assert told["action_text"] == tokenizer.decode(answer.token_ids, skip_special_tokens=False)


@settings(deadline=None, max_examples=30)
@given(scripts)
def test_the_dict_that_users_may_change_says_the_same_as_the_episode(script):
    """An executor that only passes on what `super().execute` returned trains on the same tokens, masks, log-probs,
    versions and turn rewards as one that does not touch it."""
    plain = MultiTurnAgentExecutor(environment(*script.turns, reset=script.reset))

    class AgentExecutor(MultiTurnAgentExecutor):
        def __init__(self):
            super().__init__(environment(*script.turns, reset=script.reset))

        async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
            result = await super().execute(prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images)
            return {**result, "extra_logs": {"mine": 1}, "rollout_log_probs": None}

    limits = {
        "prompt": script.prompt,
        "tokenizer": bpe_tokenizer(),
        "params": SamplingParams(seed=1, max_tokens=script.max_tokens),
        "max_length": script.max_length,
        "max_steps": script.max_steps,
    }
    expected = play(plain, engine_of(script), **limits)
    episode = play(UserAgent(AgentExecutor, file=Path(__file__)), engine_of(script), **limits)
    assert episode.extra_logs == {"mine": 1.0}
    assert (episode.reward, episode.score, episode.truncated) == (expected.reward, expected.score, expected.truncated)
    assert episode.unmatched_ranges == 0
    (ours,), (theirs,) = expected.segments, episode.segments
    for column in ("token_ids", "action_mask", "rollout_logprobs", "versions", "turn_rewards"):
        assert torch.equal(getattr(ours, column), getattr(theirs, column)), column


def test_episodes_of_a_prompt_share_nothing():
    """Eight at once on one executor, each with its own counter: every one counts to 3 and sees its own actions only."""

    class Counter(AgentInstanceBase):
        def __init__(self, *args, **kwargs):
            self.said = []

        async def step(self, states, **kwargs):
            self.said.append(states["action_text"])
            await asyncio.sleep(0)
            return {
                "rewards": len(self.said),
                "done": len(self.said) == 3,
                "extra_logs": {"kinds": len(set(self.said))},
            }

    def initial(prompt: list[int], params: SamplingParams) -> list[int]:
        return prompt[:1]

    async def play_all():
        executor, engine = MultiTurnAgentExecutor(Counter), ScriptedEngine(initial)
        params = SamplingParams(seed=0)
        return await asyncio.gather(
            *(executor.play(f"{i}?", "", params, 50, CharTokenizer(), engine) for i in range(8))
        )

    for i, episode in enumerate(asyncio.run(play_all())):
        assert columns(episode)["text"] == f"{i}?{i}{i}{i}"
        assert (episode.reward, episode.extra_logs) == (6.0, {"kinds": 1.0})


# The example --------------------------------------------------------------------------------------------------------


def test_the_example_plays_a_game():
    """Secret 42: 50 (first guess), 30 (12 away, not nearer than 8), 45 (3 away: 0.1), "hm" (−0.1), 42 (1)."""
    engine = says("50", "30", "45", "hm", "42")
    episode = play(load_agent(EXAMPLE), engine, prompt="Guess!", label="42", max_length=500)
    assert [r for _, r in columns(episode)["rewards"]] == pytest.approx([0.1, -0.1, 1.0])
    assert (episode.score, episode.truncated) == (1.0, False)
    assert episode.extra_logs == {"guesses": 5.0, "no_number": 0.0}
    assert "30\nIt is higher. Your next guess: 45\nIt is lower." in episode.text


def test_the_example_ends_after_its_guesses():
    episode = play(load_agent(EXAMPLE), says("7"), label="42", max_length=500)
    assert (episode.extra_logs["guesses"], episode.score, episode.truncated) == (6.0, 0.0, False)
