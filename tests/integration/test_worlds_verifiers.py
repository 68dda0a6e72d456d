"""Environments of verifiers, with the real package in an environment of its own, and a taskset of a file."""

import asyncio
from pathlib import Path

import pytest
from chat_model import Speaker, chat_tokenizer, write_chat_model
from installed_worlds import install_world
from patience import patience

from openrlhf.agents.user_calls import UserFileError
from openrlhf.types import SamplingParams
from openrlhf.worlds.base import WorldSettings
from openrlhf.worlds.environments import WORLDS, WorldMissingError, find_python
from openrlhf.worlds.executor import WorldPlayer
from openrlhf.worlds.process import WorldPlan

pytestmark = pytest.mark.slow

TARGET = "openrlhf.worlds.verifiers"
TASKSET = str(Path(__file__).parents[1] / "support" / "verifiers_taskset.py")
SUMS = str(Path(__file__).parents[2] / "examples" / "verifiers" / "sums.py")


@pytest.fixture(scope="module", autouse=True)
def installed():
    return install_world("verifiers")


def plan(*tasksets, **options):
    settings = WorldSettings(tasks=tuple((name, 1.0) for name in tasksets), options=options, seed=1)
    return WorldPlan(TARGET, settings, find_python(TARGET), patience(120.0))


@pytest.fixture(scope="module")
def player(installed):
    one = WorldPlayer(plan(TASKSET, taskset={"num_tasks": 3}))
    yield one
    one.close()


def play(player, *texts, index=1, max_steps=None, samples=1, task=TASKSET):
    tokenizer = chat_tokenizer()
    engines = [Speaker(tokenizer, *texts) for _ in range(samples)]
    label = {"task": task, "index": index}

    async def all_of_them():
        params = [SamplingParams(max_tokens=30, logprobs=True, seed=seed) for seed in range(samples)]
        playing = (
            player.play("Say b.", label, sampled, 1000, tokenizer, engine, max_steps=max_steps)
            for sampled, engine in zip(params, engines, strict=True)
        )
        return await asyncio.gather(*playing)

    return asyncio.run(all_of_them())


def test_a_missing_package_ends_in_the_command_that_installs_it(monkeypatch, tmp_path):
    monkeypatch.setenv("OPENRLHF_WORLDS", str(tmp_path))
    with pytest.raises(WorldMissingError, match=r"verifiers==0\.4\.0.*Run: openrlhf worlds install verifiers$"):
        find_python(TARGET)
    assert all("==" in package for package in WORLDS["verifiers"].packages)


def test_records_are_the_tasks_of_the_taskset_each_once(player):
    process = player._processes[0]
    records = list(process.records(count=10, seed=1))
    assert sorted(record["label"]["index"] for record in records) == [0, 1, 2]
    assert records == list(process.records(count=10, seed=1))
    assert {record["datasource"] for record in records} == {"verifiers_taskset"}
    texts = {record["label"]["index"]: record["input"] for record in records}
    assert texts[1] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say b."}]


def test_its_loop_asks_the_policy_and_its_rewards_judge(player):
    """`said` has weight 2. The tokens are those that were sampled, one per character."""
    (episode,) = play(player, "a b")
    (segment,) = episode.segments
    tokenizer = chat_tokenizer()
    assert tokenizer.decode(segment.token_ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSay b.<|im_end|>\n<|im_start|>assistant\n"
        "a b<|im_end|>"
    )
    assert int(segment.action_mask.sum()) == 4
    assert segment.rollout_logprobs[segment.action_mask].tolist() == pytest.approx([0, -0.01, -0.02, -0.03])
    assert segment.turn_rewards[-1] == episode.reward == 2.0
    assert episode.score == 1.0
    assert episode.extra_logs == {"said": 2.0, "turns": 1.0}


def test_episodes_at_once_are_told_apart(player):
    played = play(player, "b", samples=8)
    assert [episode.reward for episode in played] == [2.0] * 8
    (wrong,) = play(player, "c")
    assert wrong.reward == 0.0


def test_the_example_pays_a_right_sum_and_a_number_alone():
    """Task 34 asks for 3 + 4."""
    player = WorldPlayer(plan(SUMS))
    try:
        for text, right, alone in [("7", 1, 0.2), ("It is 3 + 4 = 7.", 1, 0), ("8", 0, 0.2), ("seven", 0, 0)]:
            (episode,) = play(player, text, index=34, task=SUMS)
            assert episode.reward == pytest.approx(right + alone)
            assert episode.extra_logs == pytest.approx({"right": right, "alone": alone})
    finally:
        player.close()


@pytest.mark.parametrize(
    ("tasksets", "options", "why"),
    [
        ((), {}, "--world.tasks names no taskset"),
        (("no-such-taskset",), {}, r"taskset no-such-taskset: taskset 'no-such-taskset' not found"),
        ((TASKSET,), {"taskset": {"colour": 1}}, "colour"),
        (("/no/such/file.py",), {}, "there is no file /no/such/file.py"),
    ],
)
def test_what_cannot_be_loaded_is_said_before_the_run(tasksets, options, why):
    with pytest.raises(UserFileError, match=why):
        WorldPlayer(plan(*tasksets, **options))


def test_two_steps_of_training(cli, tmp_path):
    ran = cli(
        "--train.agent_func_path", TARGET, "--world.tasks", TASKSET, "--world.options", 'taskset={"num_tasks":8}',
        data__prompt_dataset="none", reward__remote_url="none", data__label_key="none", data__max_len=1024,
        actor__model_name_or_path=write_chat_model(tmp_path / "model"),
        world__samples=8, max_steps=2,
    )  # fmt: skip
    assert ran.rc == 0, ran.err
    steps = [record for record in ran.metrics if record["kind"] == "train"]
    assert len(steps) == 2
    assert all(step["rollout/failed"] == 0 and step["turns"] == 1.0 for step in steps)
