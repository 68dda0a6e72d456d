"""Games of several agents: who sits where, what each reads and earns, and who plays against the policy."""

import asyncio
import sys
from pathlib import Path

import pytest
from aiohttp import web
from chat_model import Speaker, chat_tokenizer, write_chat_model
from patience import patience
from world_files import counting_world, duel_world

from openrlhf.agents.base import FailedEpisode
from openrlhf.agents.user_calls import AgentError, AgentResultError, UserFileError
from openrlhf.types import SamplingParams
from openrlhf.worlds.base import WorldSettings
from openrlhf.worlds.environments import WorldPython
from openrlhf.worlds.executor import WorldPlayer
from openrlhf.worlds.games import GamePlan, seats_of_samples
from openrlhf.worlds.process import WorldPlan

LABEL = {"first": 0}


@pytest.fixture
def player(tmp_path):
    players = []

    def make(opponent="self", *, samples=(), members=1, target=None, **options):
        settings = WorldSettings(options=options, seed=1)
        plan = WorldPlan(
            target or duel_world(tmp_path),
            settings,
            WorldPython(Path(sys.executable)),
            patience(30.0),
            1,
            GamePlan(opponent, None, tuple(samples), members),
        )
        players.append(WorldPlayer(plan))
        return players[-1]

    yield make
    for one in players:
        one.close()


class Replies:
    """An engine that says a digit which depends on the seed of the sample alone, or what `by_prompt` says."""

    max_model_len = 1000
    version = 0

    def __init__(self, tokenizer, say):
        self.asked = []
        self._speaker = Speaker(tokenizer, "")
        self._tokenizer = tokenizer
        self._say = say

    async def generate(self, token_ids, params, images=()):
        text = self._tokenizer.decode(token_ids)
        self.asked.append(text)
        speaker = Speaker(self._tokenizer, self._say(text))
        return await speaker.generate(token_ids, params)


def play(player, say, *, samples=2, label=LABEL, max_length=1000, max_steps=None):
    tokenizer = chat_tokenizer()
    engine = Replies(tokenizer, say)
    params = [SamplingParams(max_tokens=20, logprobs=True, seed=seed) for seed in range(samples)]
    played = asyncio.run(player.play_group("Begin.", label, params, max_length, tokenizer, engine, max_steps=max_steps))
    return played, engine


def read(episode):
    return chat_tokenizer().decode(episode.segments[0].token_ids)


def first_says(high, low):
    """The player 0 says `high`, the others `low`."""
    return lambda text: high if "You are player 0." in text else low


def test_the_samples_of_a_prompt_play_each_other(player):
    """Two rounds: 9 + 9 against 2 + 2. Each agent has a conversation of its own, in which the other's words are read
    and its own are sampled."""
    one = player()
    assert one.group_play == "the samples of a prompt play games of 2 agents among themselves"
    played, _ = play(one, first_says("9", "2"), samples=4)
    assert [e.agent for e in played] == ["player 0", "player 1"] * 2
    assert [e.reward for e in played] == [1.0, 0.0] * 2
    assert [e.extra_logs["sum"] for e in played] == [18.0, 4.0] * 2
    assert read(played[0]) == (
        "<|im_start|>user\nYou are player 0. Say a digit.<|im_end|>\n<|im_start|>assistant\n9<|im_end|>\n"
        "<|im_start|>user\nplayer 1 said 2.<|im_end|>\n<|im_start|>assistant\n9<|im_end|>"
    )
    assert read(played[1]) == (
        "<|im_start|>user\nplayer 0 said 9.<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\nplayer 0 said 9.<|im_end|>\n<|im_start|>assistant\n2<|im_end|>"
    )
    for episode in played:
        segment = episode.segments[0]
        assert segment.turn_ends.sum() == 2
        # What is earned at the end of the game stands on the agent's own last token.
        assert segment.turn_rewards[-1] == episode.reward == segment.turn_rewards.sum()


def test_the_games_of_a_prompt_have_their_own_chance_and_each_only_one(player):
    played, _ = play(player(), first_says("9", "2"), samples=4)
    seeds = [episode.extra_logs["seed"] for episode in played]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]


@pytest.mark.parametrize(("name", "sums"), [("low", {"player 0": 4.0}), ("echo", {"player 0": 10.0})])
def test_a_player_of_the_worlds_own_is_played_against(player, name, sums):
    """The opponent's digits are in what is read, and no sample is its."""
    one = player(name)
    assert one.group_play == f"each sample plays one agent of a game, against {name}"
    played, engine = play(one, lambda text: "2" if name == "low" else "5", samples=3)
    assert sorted({e.agent for e in played}) == ["player 0", "player 1"]
    assert abs(sum(e.agent == "player 0" for e in played) - 1.5) == 0.5
    for episode in played:
        assert episode.segments[0].turn_ends.sum() == 2
        assert episode.reward == 1.0
        if episode.agent in sums:
            assert episode.extra_logs["sum"] == sums[episode.agent]
    assert len(engine.asked) == 6


def test_a_record_may_name_its_own_opponent(player):
    played, _ = play(player(), lambda text: "2", samples=3, label={**LABEL, "opponent": "low"})
    assert [episode.reward for episode in played] == [1.0] * 3
    with pytest.raises(AgentResultError, match=r"--world.opponent nobody: there is no such folder; .* self, low, echo"):
        play(player(), lambda text: "2", label={**LABEL, "opponent": "nobody"})


def test_three_agents_play_a_game(player):
    one = player(agents=3)
    played, _ = play(one, first_says("1", "7"), samples=3)
    assert [(e.agent, e.reward) for e in played] == [("player 0", 0.0), ("player 1", 1.0), ("player 2", 1.0)]
    with pytest.raises(
        AgentResultError, match=r"--rollout.n_samples_per_prompt 4: .* a multiple of 3; or give --world"
    ):
        play(one, first_says("1", "7"), samples=4)


def test_who_had_no_turn_has_no_sample(player):
    """The first move ends the game: player 1 has said nothing that could be learnt from."""
    played, _ = play(player(), lambda text: "x")
    assert played[0].reward == 0.0
    assert played[1] == FailedEpisode(error="the game was over before player 1 had spoken", agent="player 1")


@pytest.mark.parametrize(("limits", "turns"), [({"max_steps": 1}, 1), ({"max_length": 24}, 1)])
def test_a_limit_of_one_agent_ends_the_game_for_all(player, limits, turns):
    played, _ = play(player(), first_says("9", "2"), **limits)
    assert [e.truncated for e in played] == [True, True]
    assert [e.reward for e in played] == [0.0, 0.0]
    assert [int(e.segments[0].turn_ends.sum()) for e in played] == [turns] * 2


def test_a_game_that_fails_fails_for_its_agents_and_the_others_go_on(player):
    with pytest.raises(AgentError, match="no such move"):
        play(player(), first_says("9", "2"), label={**LABEL, "misdeed": "raise"})


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (
            {"samples": [("--rollout.n_samples_per_prompt", 3)]},
            "--rollout.n_samples_per_prompt 3: the samples of a prompt play games of 2 agents among themselves, so "
            "their number must be a multiple of 2; or give --world.opponent",
        ),
        (
            {"samples": [("--rollout.n_samples_per_prompt", 4), ("--eval.n_samples_per_prompt", 1)]},
            "--eval.n_samples_per_prompt 1: the samples",
        ),
        (
            {"samples": [("--rollout.n_samples_per_prompt", 2)], "members": 2},
            "--rollout.n_samples_per_prompt 2: games have 2 agents, .* give 4 or more",
        ),
        ({"opponent": "/no/such/folder"}, "--world.opponent /no/such/folder: there is no such folder"),
    ],
)
def test_what_does_not_come_out_even_is_said_at_the_start(player, arguments, why):
    with pytest.raises(UserFileError, match=why):
        player(**arguments)


def test_samples_take_seats_in_turn():
    agents = ["a", "b", "c"]
    assert seats_of_samples(agents, 6, None, self_play=True) == [agents, agents]
    seats = [seat for (seat,) in seats_of_samples(agents, 4, {"n": 1}, self_play=False)]
    assert sorted(seats[:3]) == agents
    assert seats[3] == seats[0]
    others = {seats_of_samples(agents, 1, {"n": n}, self_play=False)[0][0] for n in range(20)}
    assert others == set(agents)  # one sample of each prompt: not always the same seat


def test_a_world_without_games_is_played_as_ever(player, tmp_path):
    one = player(target=counting_world(tmp_path))
    assert one.group_play == ""


def test_another_model_plays_from_its_folder(player, tmp_path):
    """Its words are read by the policy, and its tokens are in no sample. A model of random weights says no digit: the
    game ends with its first move."""
    folder = write_chat_model(tmp_path / "opponent")
    played, engine = play(player(folder), lambda text: "2", samples=2)
    assert all(asked.count("assistant\n") <= 2 for asked in engine.asked)
    real = [episode for episode in played if not isinstance(episode, FailedEpisode)]
    assert real
    assert all(episode.segments[0].action_mask.sum() == 2 for episode in real)  # "2" and its end, once


def test_a_served_model_plays_by_its_url(player, tmp_path):
    seen = []

    async def models(request):
        return web.json_response({"data": [{"id": "the-model"}]})

    async def chat(request):
        body = await request.json()
        seen.append(body)
        if len(seen) > 3:
            return web.json_response({"error": "too much"}, status=500)
        message = {"role": "assistant", "content": "1"}
        return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}]})

    async def all_of_it():
        app = web.Application()
        app.router.add_get("/v1/models", models)
        app.router.add_post("/v1/chat/completions", chat)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        one = player(f"http://127.0.0.1:{port}/v1")
        tokenizer = chat_tokenizer()
        params = [SamplingParams(max_tokens=20, logprobs=True, seed=1)]
        play = lambda: one.play_group("Begin.", LABEL, params, 1000, tokenizer, Replies(tokenizer, lambda text: "2"))  # noqa: E731
        try:
            (episode,) = await play()
            with pytest.raises(AgentError, match=r"--world.opponent http://127.*: 500 .*too much"):
                await play()
            return episode
        finally:
            await runner.cleanup()

    episode = asyncio.run(all_of_it())
    assert episode.reward == 1.0
    assert seen[0]["model"] == "the-model"
    assert seen[0]["messages"][-1]["role"] == "user"
    assert seen[1]["messages"][1] == {"role": "assistant", "content": "1"}


def test_a_server_that_is_not_there_is_named(player):
    with pytest.raises(AgentError, match=r"--world.opponent http://127.0.0.1:9/v1: the server does not answer"):
        play(player("http://127.0.0.1:9/v1"), lambda text: "2", samples=1)
