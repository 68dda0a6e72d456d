"""TextArena's games, with the real package in an environment of its own."""

import asyncio
from enum import Enum
from types import SimpleNamespace

import numpy
import pytest
from chat_model import write_chat_model
from installed_worlds import install_world
from patience import patience

from openrlhf.worlds.base import WorldSettings
from openrlhf.worlds.environments import WORLDS, WorldMissingError, find_python
from openrlhf.worlds.process import WorldProcess, WorldRefusal
from openrlhf.worlds.textarena import Table

TARGET = "openrlhf.worlds.textarena"


@pytest.fixture(scope="module", autouse=True)
def installed():
    return install_world("textarena")


@pytest.fixture
def world():
    made = []

    def make(*games, **options):
        settings = WorldSettings(tasks=tuple((game, 1.0) for game in games), options=options, seed=1)
        made.append(WorldProcess(TARGET, settings, python=find_python(TARGET), timeout=patience(60.0)))
        return made[-1]

    yield make
    for process in made:
        process.close()


def label(game, seed=3):
    return {"game": game, "seed": seed}


def said(text):
    return {"role": "assistant", "content": text, "text": text, "truncated": False}


def test_a_missing_package_ends_in_the_command_that_installs_it(monkeypatch, tmp_path):
    monkeypatch.setenv("OPENRLHF_WORLDS", str(tmp_path))
    with pytest.raises(WorldMissingError, match=r"textarena==0\.7\.4.*Run: openrlhf worlds install textarena$"):
        find_python(TARGET)
    assert all("==" in package for package in WORLDS["textarena"].packages)


def test_a_game_of_two_tells_each_what_is_new_to_it(world):
    """Nim with piles of 1 and 2: the first takes the 2, the second the 1, and with it the last object: it wins."""
    process = world("Nim-v0", game={"piles": [1, 2]}, show="board", rules=False)

    async def play():
        game = await process.begin(label("Nim-v0"), seed=0)
        second = await game.move("player 0", said("I <take> the two. [1 2]"))
        return game.start, second, await game.move("player 1", said("<think>[1 1]?</think>[0 1]"))

    start, second, last = asyncio.run(play())
    assert start.agents == ["player 0", "player 1"]
    assert start.turn.messages[0]["content"] == "Current Pile:\n  pile 0: 1\n  pile 1: 2"
    assert second.messages == [{"role": "user", "content": "Current Pile:\n  pile 0: 1\n  pile 1: 0"}]
    assert last.rewards == {"player 0": -1.0, "player 1": 1.0}
    assert last.scores == {"player 0": 0.0, "player 1": 1.0}
    assert last.logs["player 0"] == {"invalid_move": 0.0, "turns": 2.0}


def test_all_that_is_told_has_rules_and_moves_but_no_ones_own_words(world):
    process = world("TicTacToe-v0")

    async def play():
        game = await process.begin(label("TicTacToe-v0"), seed=0)
        second = await game.move("player 0", said("<think>The middle?</think>[4]"))
        third = await game.move("player 1", said("[0]"))
        return [turn.messages[0]["content"] for turn in (game.start.turn, second, third)]

    first, second, third = asyncio.run(play())
    assert first.startswith("You are Player 0 in Tic Tac Toe.")
    assert second.startswith("You are Player 1 in Tic Tac Toe.")
    assert "[Player 0] [4]" in second
    assert "middle" not in second
    assert "[Player 0]" not in third
    assert "[Player 1] [0]" in third
    assert third.count("Current Board") == 2


def test_a_foul_may_be_mended_once(world):
    process = world("Nim-v0", game={"piles": [3]}, show="board", rules=False)

    async def play():
        game = await process.begin(label("Nim-v0"), seed=0)
        again = await game.move("player 0", said("[0 9]"))
        return again, await game.move("player 0", said("nonsense"))

    again, last = asyncio.run(play())
    assert again.agent == "player 0"
    assert "invalid move. Reason: Cannot remove 9 from pile 0" in again.messages[0]["content"]
    assert last.rewards == {"player 0": -1.0, "player 1": 1.0}
    assert last.logs["player 0"]["invalid_move"] == 1.0
    assert last.logs["player 1"]["invalid_move"] == 0.0


def test_the_samples_of_a_prompt_begin_alike_and_episodes_do_not_mix_their_chance(world):
    """Cards are drawn from Python's shared generator. Two games of one seed see the same cards in the first round, also
    when other games are played between their moves; later rounds are each sample's own."""
    process = world("KuhnPoker-v0-short")

    async def play(seed, disturb):
        game = await process.begin(label("KuhnPoker-v0-short", 5), seed=seed)
        turn, seen = game.start.turn, [game.start.turn.messages[0]["content"]]
        for _ in range(4):
            if disturb:
                await process.begin(label("KuhnPoker-v0-short", 99), seed=0)
            text = await game.call("scripted", turn.agent, "random")
            turn = await game.move(turn.agent, said(text))
            if not turn.agent:
                break
            seen.append(turn.messages[0]["content"])
        return seen

    async def all_of_them():
        return [await play(1, False), await play(1, True), await play(2, False)]

    alone, disturbed, other = asyncio.run(all_of_them())
    assert alone == disturbed
    assert alone[0] == other[0]
    assert alone != other


class Dice:
    """A game as the package has them, which draws from numpy's shared generator, as SpellingBee does."""

    state = SimpleNamespace(current_player_id=0, role_mapping={})

    def reset(self, *, num_players, seed):
        self.drawn = numpy.random.randint(10**6)

    def get_observation(self):
        return 0, [(-1, str(self.drawn), Kind.PROMPT)]


Kind = Enum("Kind", ["PROMPT", "GAME_BOARD"])


def test_what_games_draw_from_numpy_is_their_own_too():
    package = SimpleNamespace(ObservationType=Kind, Wrapper=type("Wrapper", (), {}))
    before = numpy.random.get_state()[1].tolist()
    read = [Table(package, Dice(), 1, seed, own_seed).tell() for seed, own_seed in ((3, 1), (3, 2), (4, 1))]
    assert read[0] == read[1] != read[2]
    assert numpy.random.get_state()[1].tolist() == before


def test_a_game_for_one_is_a_plain_world(world):
    process = world("GuessTheNumber-v0")
    (record,) = process.records(count=1, seed=4)
    assert record["datasource"] == "GuessTheNumber-v0"
    assert "between 1 and 20" in record["input"][0]["content"]

    async def play():
        episode = await process.begin(record["label"], seed=0)
        assert episode.start.messages == record["input"]
        turns = []
        while not turns or not turns[-1].done:
            turns.append(await episode.step(said(f"[{len(turns) + 1}]")))
        return turns

    turns = asyncio.run(play())
    assert len(turns) <= 10
    assert (turns[-1].score == 1.0) == (turns[-1].reward == 1.0)


@pytest.mark.parametrize("game", ["TicTacToe-v0", "ConnectFour-v0", "PigDice-v0-short", "ThreePlayerTicTacToe-v0"])
def test_the_random_player_plays_legal_moves_to_the_end(world, game):
    process = world(game)
    assert process.start_now()["agents"] == (3 if game.startswith("Three") else 2)

    async def play():
        episode = await process.begin(label(game), seed=0)
        turn = episode.start.turn
        while turn.agent:
            turn = await episode.move(turn.agent, said(await episode.call("scripted", turn.agent, "random")))
        return turn

    last = asyncio.run(play())
    assert all(logs["invalid_move"] == 0.0 for logs in last.logs.values())
    assert set(last.scores) == set(last.rewards)


@pytest.mark.parametrize(
    ("games", "options", "why"),
    [
        ((), {}, "--world.tasks names no game; there are TicTacToe-v0"),
        (("TicTacTo-v0",), {}, "TextArena has no game TicTacTo-v0; it has"),
        (("Nim-v0",), {"game": {"colour": 1}}, "Nim-v0 cannot be made: TypeError: .*colour"),
        (("Nim-v0",), {"players": 3}, r"players=3: Nim-v0 cannot be played so \(3: The number of players has to be 2"),
        (("Nim-v0",), {"show": "nothing"}, "there are all, board"),
        (("GuessWho-v0",), {}, "GuessWho-v0 cannot be made: ValueError: OpenRouter API key not found"),
    ],
)
def test_what_cannot_be_played_is_said_before_the_run(world, games, options, why):
    with pytest.raises(WorldRefusal, match=why):
        world(*games, **options).start_now()


@pytest.mark.slow
def test_two_steps_of_self_play_are_measured_against_a_random_player(cli, tmp_path):
    """A model of random weights knows no legal move: half of all samples, those whose game the other has lost by a
    foul, have won."""
    ran = cli(
        "--train.agent_func_path", TARGET, "--world.tasks", "Nim-v0", "--world.eval_opponent", "random",
        data__prompt_dataset="none", reward__remote_url="none", data__label_key="none", data__max_len=1024,
        actor__model_name_or_path=write_chat_model(tmp_path / "model"),
        world__samples=8, world__options='game={"piles":[1,2]},show=board', max_steps=2,
        rollout__n_samples_per_prompt=4, eval__dataset=TARGET, world__eval_samples=2, eval__at_start="true",
    )  # fmt: skip
    assert ran.rc == 0, ran.err
    steps = [record for record in ran.metrics if record["kind"] == "train"]
    assert len(steps) == 2
    for step in steps:
        assert step["invalid_move"] > 0
        assert "rollout/reward_mean_player 0" in step
    assert any(f"eval_Nim-v0_score_player {seat}" in record for record in ran.metrics for seat in (0, 1))
