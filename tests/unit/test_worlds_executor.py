"""Episodes of worlds: what the world is told, what becomes of its answers, and whose tokens are whose."""

import asyncio
import sys
from pathlib import Path

import pytest
from chat_model import CALCULATOR, Speaker, chat_tokenizer
from patience import patience
from world_files import counting_world

from openrlhf.agents.user_calls import AgentError, AgentResultError, UserFileError
from openrlhf.data.templates import PLAIN_TEMPLATE
from openrlhf.types import SamplingParams
from openrlhf.worlds.base import Start, Turn, WorldSettings
from openrlhf.worlds.environments import WorldPython
from openrlhf.worlds.executor import Dialogue, WorldPlayer
from openrlhf.worlds.games import GamePlan
from openrlhf.worlds.process import WorldPlan

LABEL = {"say": "b", "index": 0}


@pytest.fixture
def player(tmp_path):
    players = []

    def make(processes=1, tasks=(), **options):
        settings = WorldSettings(tasks=tasks, options=options, seed=1)
        python = WorldPython(Path(sys.executable))
        players.append(WorldPlayer(WorldPlan(counting_world(tmp_path), settings, python, patience(60.0), processes)))
        return players[-1]

    yield make
    for one in players:
        one.close()


def play(player, engine, tokenizer=None, *, label=LABEL, max_length=1000, max_steps=None, **params):
    params = SamplingParams(**{"max_tokens": 50, "logprobs": True, "seed": 5} | params)
    tokenizer = tokenizer or chat_tokenizer()
    return asyncio.run(player.play("Say b.", label, params, max_length, tokenizer, engine, max_steps=max_steps))


def test_an_episode_is_what_was_read_and_sampled(player):
    """Two turns; the second says what is asked for. The policy's tokens are one per character, as it sampled them."""
    tokenizer = chat_tokenizer()
    engine = Speaker(tokenizer, "no", "b")
    episode = play(player(), engine)
    (segment,) = episode.segments
    ids = segment.token_ids.tolist()
    assert tokenizer.decode(ids) == (
        "<|im_start|>user\nSay b.<|im_end|>\n<|im_start|>assistant\nno<|im_end|>\n"
        "<|im_start|>user\nAgain.<|im_end|>\n<|im_start|>assistant\nb<|im_end|>"
    )
    said = [ids[i] for i in range(len(ids)) if segment.action_mask[i]]
    assert said == [*engine.spell("no"), tokenizer.eos_token_id, *engine.spell("b"), tokenizer.eos_token_id]
    assert engine.asked[1][0] == ids[: len(engine.asked[1][0])]
    assert segment.versions[segment.action_mask].tolist() == [0, 0, 0, 1, 1]
    assert segment.rollout_logprobs[segment.action_mask].tolist() == pytest.approx([0, -0.01, -0.02, -1, -1.01])
    assert [(at, value) for at, value in enumerate(segment.turn_rewards.tolist()) if value] == [(len(ids) - 1, 1.0)]
    assert (episode.reward, episode.score, episode.truncated) == (1.0, 1.0, False)
    assert episode.extra_logs["turns"] == 2
    assert (
        episode.text
        == "Say b." + "no<|im_end|>\n<|im_start|>user\nAgain.<|im_end|>\n<|im_start|>assistant\nb<|im_end|>"
    )


def test_samples_of_a_prompt_have_worlds_of_their_own_chance(player):
    one = player()
    seeds = [play(one, Speaker(chat_tokenizer(), "b"), seed=seed).extra_logs["seed"] for seed in (5, 5, 6)]
    assert seeds[0] == seeds[1] != seeds[2]


def test_turns_have_randomness_of_their_own(player):
    engine = Speaker(chat_tokenizer(), "b")
    play(player(), engine)
    assert len({params.seed for _, params in engine.asked}) == 2


@pytest.mark.parametrize(
    ("limits", "turns", "read"),
    [
        ({"max_steps": 1}, 1, 0),
        ({"max_length": 24, "max_tokens": 4}, 1, 0),  # the feedback does not fit
        ({"max_length": 1000, "max_tokens": 2}, 2, 1),  # "no" without its end
    ],
)
def test_limits_cut_an_episode_short(player, limits, turns, read):
    engine = Speaker(chat_tokenizer(), "no")
    episode = play(player(), engine, **limits)
    assert episode.truncated
    assert len(engine.asked) == turns
    assert episode.text.count("Again.") == read
    assert episode.reward == 0.0


def test_first_messages_that_leave_no_room_lose_their_beginning(player):
    engine = Speaker(chat_tokenizer(), "b")
    episode = play(player(turns=1), engine, max_length=12, max_tokens=4)
    assert len(engine.asked[0][0]) == 8
    assert chat_tokenizer().decode(engine.asked[0][0]).endswith("<|im_start|>assistant\n")
    assert episode.reward == 1.0


def test_a_template_that_forgets_thoughts_makes_segments(player):
    """Each sampled token is an action once, after the tokens that it was sampled after; each turn's reward is where it
    was earned."""
    tokenizer = chat_tokenizer("forgets")
    engine = Speaker(tokenizer, "<think>b?</think>b", "b")
    episode = play(player(), engine, tokenizer)
    assert len(episode.segments) == 2
    first, second = (tokenizer.decode(segment.token_ids) for segment in episode.segments)
    assert first.endswith("assistant\n<think>b?</think>b<|im_end|>")
    assert second == (
        "<|im_start|>user\nSay b.<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>user\nAgain.<|im_end|>\n<|im_start|>assistant\nb<|im_end|>"
    )
    for segment in episode.segments:
        assert segment.turn_rewards[-1] == 1.0
        assert segment.turn_ends.sum() == 1
    assert episode.segments[1].action_mask.sum() == 2
    assert episode.reward == 2.0


def test_a_model_without_template_reads_plain_text(player):
    tokenizer = chat_tokenizer("words")
    tokenizer = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>")
    tokenizer.chat_template = PLAIN_TEMPLATE
    episode = play(player(), Speaker(tokenizer, " b"), tokenizer)
    assert tokenizer.decode(episode.segments[0].token_ids) == (
        "User: Say b.\n\nAssistant: b<|im_end|>\n\nUser: Again.\n\nAssistant: b<|im_end|>"
    )


@pytest.mark.parametrize(
    ("misdeed", "error", "words"),
    [
        ("raise", AgentError, "counting.py:59 (in step): ValueError: no such move"),
        ("refuse", AgentResultError, "the label has no goal"),
        ("crash", AgentError, "the last words"),
    ],
)
def test_failures_are_said_and_the_next_episode_plays(player, misdeed, error, words):
    one = player()
    with pytest.raises(AgentError) as failure:
        play(one, Speaker(chat_tokenizer(), "b"), label={**LABEL, "misdeed": misdeed})
    assert type(failure.value) is error
    assert words in str(failure.value)
    assert play(one, Speaker(chat_tokenizer(), "b")).reward == 2.0


class Waiting(Speaker):
    """Speaks when it is told to."""

    def __init__(self, *args):
        super().__init__(*args)
        self.asking, self.may = 0, asyncio.Semaphore(0)

    async def generate(self, *args):
        self.asking += 1
        await self.may.acquire()
        return await super().generate(*args)


def test_an_episode_survives_whatever_others_do_to_its_process(player):
    """Five crashes under calls of others: more than an episode of its own may have."""
    one, tokenizer = player(), chat_tokenizer()
    params = SamplingParams(max_tokens=50, logprobs=True, seed=5)

    async def both():
        engine = Waiting(tokenizer, "b")
        good = asyncio.ensure_future(one.play("Say b.", LABEL, params, 1000, tokenizer, engine))
        for crashes in range(5):
            while engine.asking <= crashes:
                await asyncio.sleep(0.01)
            bad = {**LABEL, "misdeed": "crash"}
            with pytest.raises(AgentError, match="the last words"):
                await one.play("Say b.", bad, params, 1000, tokenizer, Speaker(tokenizer, "b"))
            engine.may.release()
        engine.may.release()
        engine.may.release()
        return await asyncio.wait_for(good, patience(60.0))

    assert asyncio.run(both()).reward == 2.0
    assert one._processes[0].playing == 0


def test_a_world_that_cannot_be_made_says_so(player):
    with pytest.raises(UserFileError, match="there is no task unknown"):
        player(tasks=(("unknown", 1.0),))


@pytest.mark.parametrize(
    ("games", "flag"), [(GamePlan("random"), "--world.opponent"), (GamePlan("self", "random"), "--world.eval_opponent")]
)
def test_an_opponent_needs_a_game(tmp_path, games, flag):
    plan = WorldPlan(counting_world(tmp_path), WorldSettings(), WorldPython(Path(sys.executable)), 60.0, games=games)
    with pytest.raises(UserFileError, match=rf"^{flag} random: .*counting\.py has no games of several agents"):
        WorldPlayer(plan)


def test_episodes_are_shared_among_processes(player):
    """Also where they begin at once, as those of a round do."""
    one = player(processes=2)

    async def begin():
        return await one._least_busy().begin(LABEL, seed=0)

    async def both():
        first, second = await asyncio.gather(begin(), begin())
        busy = [process.playing for process in one._processes]
        await first.close()
        await second.close()
        return busy, [process.playing for process in one._processes]

    assert asyncio.run(both()) == ([1, 1], [0, 0])


def test_an_episode_that_is_given_up_is_closed(player):
    one = player()

    async def give_up():
        engine = Speaker(chat_tokenizer(), "b" * 40, seconds_per_token=0.05)
        params = SamplingParams(max_tokens=50, seed=1)
        task = asyncio.ensure_future(one.play("", LABEL, params, 1000, chat_tokenizer(), engine))
        while engine.sampled == 0:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.gather(*one._closing)
        return one._processes[0].playing

    assert asyncio.run(give_up()) == 0


# ------------------------------------------------------------------------------------ one agent's dialogue


def dialogue(*says, template="plain", tools=None, **params):
    tokenizer = chat_tokenizer(template)
    params = SamplingParams(**{"max_tokens": 200, "seed": 1} | params)
    start = Start([{"role": "user", "content": "2+3?"}], tools)
    return Dialogue(
        start, sampling_params=params, max_length=2000, tokenizer=tokenizer, engine=Speaker(tokenizer, *says)
    )


CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2+3"}}\n</tool_call>'


def test_calls_of_tools_are_parsed_and_their_answers_read():
    async def talk():
        agent = dialogue(f"I add.\n{CALL}", "5", tools=[CALCULATOR])
        first = await agent.answer()
        agent.read(Turn([{"role": "tool", "content": "5", "tool_call_id": first["tool_calls"][0]["id"]}]).messages)
        return agent, first, await agent.answer()

    agent, first, second = asyncio.run(talk())
    assert first["content"] == "I add."
    assert first["tool_calls"] == [{"id": "call_1_1", "name": "calculator", "arguments": {"expression": "2+3"}}]
    assert first["text"] == f"I add.\n{CALL}<|im_end|>"
    assert (second["content"], "tool_calls" in second) == ("5", False)
    (segment,) = agent.segments()
    assert "<tool_response>\n5\n</tool_response>" in chat_tokenizer().decode(segment.token_ids)


def test_without_tools_a_call_is_text():
    told = asyncio.run(dialogue(CALL.replace("<tool_call>", "").replace("</tool_call>", "")).answer())
    assert "tool_calls" not in told


@pytest.mark.parametrize(
    ("says", "content", "thoughts"),
    [
        ("<think>\nhm\n</think>\n\n5", "5", "hm"),
        ("<think>\nhm", "", "hm"),  # cut in the middle of a thought
        ("5", "5", None),
    ],
)
def test_thoughts_are_not_what_was_said(says, content, thoughts):
    told = asyncio.run(dialogue(says).answer())
    assert (told["content"], told.get("thoughts")) == (content, thoughts)
    assert told["text"] == says + "<|im_end|>"


def test_an_answer_that_was_cut_says_so():
    assert asyncio.run(dialogue("12345", max_tokens=3).answer())["truncated"]
