"""A user's agent file in a real run: hosts, failures as data, the same numbers in this process and in others."""

import json

import pytest

from openrlhf.data.templates import render_chat
from openrlhf.observability.loggers import read_metrics, without_times

AGENT = """
import asyncio, time
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.turn = 0

    async def reset(self, states, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        self.turn += 1
        BODY
        done = self.turn == 2
        return {
            "rewards": 0.5 * (states["action_text"][:1] == states["label"][:1]),
            "scores": 1.0 * done,
            "environment_feedback": "" if done else ">",
            "done": done,
            "extra_logs": {"turn": self.turn},
        }

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


@pytest.fixture
def agent_file(tmp_path):
    def write(body="pass"):
        path = tmp_path / "agent.py"
        path.write_text(AGENT.replace("BODY", body))
        return path

    return write


def run(cli, path, *words, **overrides):
    flags = {"reward.remote_url": "none", "data.max_len": 24, "rollout.max_new_tokens": 3} | overrides
    return cli("--train.agent_func_path", str(path), *words, **{k.replace(".", "__"): v for k, v in flags.items()})


def train_records(ran):
    return [without_times(r) for r in read_metrics(ran.run_dir / "metrics.jsonl") if r["kind"] == "train"]


def test_a_two_turn_agent_trains(cli, agent_file):
    ran = run(cli, agent_file())
    assert ran.rc == 0, ran.err
    records = train_records(ran)
    assert len(records) == 2
    assert records[0]["turn"] == 2.0
    assert records[0]["score"] == 1.0
    assert records[0]["rollout/failed"] == 0
    assert records[0]["logprobs_diff"] < 1e-4
    rollout = json.loads((ran.run_dir / "rollouts.jsonl").read_text().splitlines()[0])
    assert rollout["score"] == 1.0
    said = [turn for turn in rollout["turns"] if turn["action"]]
    assert len(said) == 2
    assert rollout["turns"][0]["text"] == rollout["prompt"]
    assert sum(turn["tokens"] for turn in said) == rollout["response_length"]
    assert sum(turn["reward"] for turn in said) == pytest.approx(rollout["reward"])
    assert 'class="turn act"' in (ran.run_dir / "report.html").read_text()


PORTIONS = """
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.turn = self.turns = 0

    async def step(self, states, **kwargs):
        self.turns = self.turns or (3 if ord(states["action_text"][:1] or "x") % 2 else 1)
        self.turn += 1
        return {
            "rewards": 0.3 if self.turns == 3 else 0.9,
            "environment_feedback": ">",
            "done": self.turn == self.turns,
            "extra_logs": {"turns": self.turns},
        }

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


def test_the_same_total_in_other_portions_teaches_nothing(cli, tmp_path):
    """Episodes earn 0.3 in each of three turns, or 0.9 in one. Three times the float32 next to 0.3 is 6e-8 more than the
    float32 next to 0.9; divided by a standard deviation of that size, advantages would be of the order of 1e7."""
    path = tmp_path / "agent.py"
    path.write_text(PORTIONS)
    flags = {"algo.advantage.estimator": "group_norm", "rollout.n_samples_per_prompt": 8, "data.max_len": 32}
    ran = run(cli, path, **flags)
    assert ran.rc == 0, ran.err
    records = train_records(ran)
    assert all(1 < r["turns"] < 3 for r in records)  # both kinds are there
    assert [r["actor_grad_norm"] for r in records] == [0.0] * len(records)
    assert [r["policy_loss"] for r in records] == [0.0] * len(records)


def test_in_this_process_the_numbers_are_the_same(cli, agent_file, tmp_path):
    """Up to the last bits of a sum: in another order of arrival rows stand elsewhere in the engine's batch."""
    hosted = train_records(run(cli, agent_file()))
    (tmp_path / "run").rename(tmp_path / "hosted")
    local = train_records(run(cli, agent_file(), "--rollout.agent_hosts", "0"))
    for mine, theirs in zip(local, hosted, strict=True):
        assert mine.pop("kind") == theirs.pop("kind")
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    assert (tmp_path / "run" / "rollouts.jsonl").read_text() == (tmp_path / "hosted" / "rollouts.jsonl").read_text()


def test_an_agent_that_always_fails_ends_the_run_with_its_line(cli, agent_file):
    ran = run(cli, agent_file("raise ValueError('no such level')"))
    assert ran.rc == 1
    assert "agent.py:14 (in step): ValueError: no such level" in ran.err
    assert "Traceback" not in ran.err


def test_some_failures_do_not_end_the_run(cli, agent_file, inputs):
    label = inputs.records[0]["label"]
    ran = run(cli, agent_file(f"if states['label'] == {label!r}: raise ValueError('no such level')"))
    assert ran.rc == 0, ran.err
    assert "ValueError: no such level" in ran.err
    records = train_records(ran)
    assert sum(r["rollout/failed"] for r in records) == 2
    assert all(r["score"] == 1.0 for r in records)


def test_a_step_that_hangs_fails_alone(cli, agent_file, inputs):
    label = inputs.records[0]["label"]
    ran = run(
        cli,
        agent_file(f"if states['label'] == {label!r}: time.sleep(600)"),
        "--rollout.step_timeout",
        "1.5",
    )
    assert ran.rc == 0, ran.err
    assert "--rollout.step_timeout 1.5" in ran.err
    assert sum(r["rollout/failed"] for r in train_records(ran)) == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1\n", "defines no class AgentExecutor"),
        ("import nonsense_module\n", "agent.py:1: ModuleNotFoundError"),
        ("class AgentExecutor:\n    pass\n", "does not define execute"),
    ],
)
def test_a_file_that_cannot_be_used_ends_the_run_before_the_first_step(cli, tmp_path, text, expected):
    path = tmp_path / "agent.py"
    path.write_text(text)
    ran = run(cli, path)
    assert ran.rc == 1
    assert expected in ran.err
    assert "Traceback" not in ran.err
    assert not (ran.run_dir / "metrics.jsonl").exists()


def test_a_missing_file_is_named(cli, tmp_path):
    ran = run(cli, tmp_path / "nowhere.py")
    assert ran.rc == 1
    assert "--train.agent_func_path: there is no file" in ran.err


def test_an_agents_tokenizer_has_the_template_of_the_run(inputs, agent_file):
    from openrlhf.agents.episode_worker import EpisodeService, EpisodeSettings

    service = EpisodeService(
        EpisodeSettings(
            agent_file=str(agent_file()),
            tokenizer=str(inputs.model),
            use_fast=True,
            trust_remote_code=False,
            max_length=16,
            max_steps=None,
            max_model_len=16,
            chat_template="{{ messages[0].content }}{{ more }}",
            template_arguments=(("more", "1"),),
        )
    )
    assert render_chat([{"role": "user", "content": "2"}], service._tokenizer) == "21"
