"""reasoning-gym 0.1.25: every data set through its own verifier, and two steps of training on it."""

import asyncio
import subprocess
from pathlib import Path

import pytest
from installed_worlds import install_world
from patience import patience

import openrlhf
from openrlhf.worlds.base import WorldSettings
from openrlhf.worlds.environments import find_python
from openrlhf.worlds.process import WorldFailure, WorldPlan, WorldRefusal
from openrlhf.worlds.reasoning_gym import ENDING, extract

NAME = "openrlhf.worlds.reasoning_gym"
SLOW = "arc_agi,arc_1d,codeio,figlet_font,game_of_life,group_anagrams,jugs,sokoban,zebra_puzzles,rearc,n_queens"
"""Data sets that take seconds to make, or for an item."""


@pytest.fixture(scope="module", autouse=True)
def installed():
    install_world(NAME)


@pytest.fixture
def world():
    made = []

    def make(*tasks, held_out=None, **options):
        settings = WorldSettings(tuple((name, 1.0) for name in tasks), options, seed=3, held_out=held_out)
        made.append(WorldPlan(NAME, settings, find_python(NAME), patience(60.0)).process())
        return made[-1]

    yield make
    for process in made:
        process.close()


def answer(world, record, text):
    async def play():
        episode = await world.begin(record["label"], seed=0)
        assert [dict(message) for message in episode.start.messages] == record["input"]
        turn = await episode.step({"role": "assistant", "content": text, "text": text, "truncated": False})
        await episode.close()
        return turn

    return asyncio.run(play())


@pytest.mark.parametrize(
    ("said", "how", "found"),
    [
        ("2+3 <answer> 5 </answer>", "auto", ("5", True)),
        ("<answer>4</answer> no: <ANSWER>5</ANSWER>", "auto", ("5", True)),
        ("Answer: 4\nso the final answer is: **5**\n", "auto", ("5", True)),
        ("5", "auto", ("5", False)),
        ("5", "tags", ("", False)),
        ("<answer>5</answer>", "line", ("", False)),
        (" 5\n", "whole", ("5", True)),
        ("5 - 9 = -4, I think.", "number", ("-4", True)),
        ("9-4", "number", ("4", True)),
        ("a half, 0.5.", "number", ("0.5", True)),
        ("five", "number", ("", False)),
    ],
)
def test_an_answer_is_found_where_it_is_marked(said, how, found):
    assert extract(said, how) == found


def test_records_are_a_function_of_the_settings_and_the_seed(world):
    one, other = world("chain_sum", "gcd"), world("chain_sum", "gcd")
    records = list(one.records(count=30, seed=5))
    assert list(other.records(count=30, seed=5)) == records
    assert list(other.records(count=30, seed=6)) != records
    assert {record["datasource"] for record in records} == {"chain_sum", "gcd"}
    assert all(record["input"][0]["content"].endswith(ENDING) for record in records)
    assert len({record["input"][0]["content"] for record in records}) > 20


def test_weights_and_parameters_count(world):
    made = world("chain_sum", **{"chain_sum.max_terms": 2, "chain_sum.min_terms": 2, "ending": "", "system": "Add."})
    for record in made.records(count=20, seed=1):
        system, question = record["input"]
        assert system == {"role": "system", "content": "Add."}
        assert question["content"].count("+") + question["content"].count(" - ") == 1
        total = str(eval(question["content"].split(":")[1].split("=")[0]))
        assert answer(made, record, f"<answer>{total}</answer>").reward == 1.0


SMALL_SUMS = {"chain_sum.min_terms": 2, "chain_sum.max_terms": 2, "chain_sum.min_digits": 1, "chain_sum.max_digits": 1}
"""There are some two hundred of them."""


def _questions(records):
    return {record["input"][0]["content"] for record in records}


def test_what_an_evaluation_asks_is_in_no_training_record(world):
    open_to_all, made = world("chain_sum", **SMALL_SUMS), world("chain_sum", held_out=(40, 6), **SMALL_SUMS)
    held, training = list(made.records(count=40, seed=6)), list(made.records(count=300, seed=5))
    assert held == list(open_to_all.records(count=40, seed=6))
    assert len(training) == 300
    assert _questions(held) & _questions(open_to_all.records(count=300, seed=5))
    assert not _questions(held) & _questions(training)
    total = str(eval(training[-1]["input"][0]["content"].split(":")[1].split("=")[0]))
    assert answer(made, training[-1], total).reward == 1.0


def test_a_task_all_of_whose_questions_are_asked_in_evaluations_is_refused(world):
    made = world("chain_sum", held_out=(3000, 6), **SMALL_SUMS)
    with pytest.raises(WorldFailure, match="chain_sum has too few questions beside those"):
        list(made.records(count=50, seed=5))


def test_levels_of_the_curriculum_are_difficulties(world):
    made = world("chain_sum", "gsm_symbolic", levels=[0, 2])
    records = list(made.records(count=40, seed=1))
    sums = [record for record in records if record["datasource"] == "chain_sum"]
    assert {record["difficulty"] for record in sums} == {0, 2}
    length = {level: max(len(r["input"][0]["content"]) for r in sums if r["difficulty"] == level) for level in (0, 2)}
    assert length[0] < length[2]
    assert all("difficulty" not in record for record in records if record["datasource"] == "gsm_symbolic")


def test_parts_of_a_score_may_not_count(world):
    """The verifier gives `5` a part where `55` is written that has it."""
    for partial in (True, False):
        made = world("gcd", partial=partial)
        (record,) = made.records(count=1, seed=1)
        rewards = {str(n): answer(made, record, f"<answer>{n}</answer>").reward for n in range(1, 150)}
        assert sorted(set(rewards.values()))[-1] == 1.0
        assert any(0 < reward < 1 for reward in rewards.values()) == partial


@pytest.mark.parametrize(
    ("tasks", "options", "why"),
    [
        (["chain_sun"], {}, "no data set chain_sun: did you mean chain_sum"),
        (["gcd"], {"gcd.most": 4}, "most"),
        (["gcd"], {"lcm.max_value": 4}, "there is no task lcm; there are gcd"),
        (["gcd"], {"rows": 4}, "no such option; it has levels, answer"),
        (["gcd"], {"levels": "high"}, "expected levels such as"),
        (["gcd"], {"gcd.max_value": -5}, "reasoning-gym refuses gcd"),
    ],
)
def test_what_cannot_be_made_is_refused(world, tasks, options, why):
    with pytest.raises(WorldRefusal, match=why):
        world(*tasks, **options).start_now()


DRAW = """
import sys
sys.path[:0] = [{folder!r}]
from openrlhf.worlds.server import load_world
cls = load_world("openrlhf.worlds.reasoning_gym", {package!r})
from openrlhf.worlds.base import WorldSettings
slow = {slow!r}.split(",")
from reasoning_gym.factory import DATASETS
names = [name for name in sorted(DATASETS) if name not in (*slow, "composite")]
known = none = 0
for name in names:
    world = cls(WorldSettings(((name, 1.0),), {{}}, 1))
    (record,) = world.records(count=1, seed=1)
    episode = world.begin(record["label"], seed=0)
    assert [dict(m) for m in episode.start.messages] == record["input"], name
    oracle = episode._entry["answer"]
    if oracle is None:
        none += 1
        assert 0.0 <= episode.step({{"content": "<answer>?</answer>"}}).score < 1.0, name
    else:
        known += 1
        turn = episode.step({{"content": "So: <answer>" + oracle + "</answer>"}})
        assert turn.score == 1.0, (name, oracle, turn)
print("", known, none)
"""


def test_every_data_set_gives_its_own_answer_the_whole_score():
    """106 data sets, without the mixture and the slow ones; five have no answer of their own."""
    package = Path(openrlhf.__file__).parent
    python = find_python(NAME)
    code = DRAW.format(folder=str(package.parent), package=str(package), slow=SLOW)
    ran = subprocess.run(
        [str(python.path), "-c", code], env=python.environment(), capture_output=True, text=True, check=False,
        timeout=patience(300.0),
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    known, none = map(int, ran.stdout.split()[-2:])
    assert known + none == 106 - 1 - len(SLOW.split(","))
    assert none == 5


def test_two_steps_of_training(cli):
    ran = cli(
        "--train.agent_func_path", NAME, "--world.tasks", "chain_sum,gcd:2", "--eval.dataset", NAME,
        "--world.eval_samples", "4", "--eval.steps", "1",
        data__prompt_dataset="none", reward__remote_url="none", data__label_key="none", data__max_len=512,
        world__samples=8, world__options="ending=",
    )  # fmt: skip
    assert ran.rc == 0, ran.err
    steps = [record for record in ran.metrics if record["kind"] == "train"]
    assert len(steps) == 2
    assert all(step["rollout/failed"] == 0 for step in steps)
    assert steps[0]["logprobs_diff"] < 1e-4


def test_a_missing_package_ends_in_the_command_that_installs_it(cli, monkeypatch, tmp_path):
    monkeypatch.setenv("OPENRLHF_WORLDS", str(tmp_path))
    ran = cli("--train.agent_func_path", NAME, data__prompt_dataset="none", reward__remote_url="none")
    assert ran.rc != 0
    assert ran.errors[-1].endswith("Run: openrlhf worlds install reasoning_gym")
    assert not ran.run_dir.exists()
