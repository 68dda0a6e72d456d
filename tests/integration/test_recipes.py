"""The recipes of examples/scripts run small on Ray, vLLM and DeepSpeed: the very command of each, other sizes."""

import json
import math
import shutil

import pytest
from script_commands import RECIPES, started_by
from small_sections import loading

from openrlhf.checkpoint.export import export_value_model
from openrlhf.config import parse
from openrlhf.models.loading import load_tokenizer, load_value_model
from openrlhf.models.value import Normalisation
from openrlhf.observability.loggers import read_metrics
from openrlhf.runs.rl_assembly import train

pytestmark = pytest.mark.slow

TINY = {
    "NODES": 1,
    "GPUS": 2,
    "ACTOR_NODES": 1,
    "CRITIC_NODES": 1,
    "ACTOR_GPUS": 1,
    "CRITIC_GPUS": 1,
    "ENGINES": 2,
    "TP": 1,
    "BATCH": 4,
    "IN_PLAY": 6,
    "SAMPLES": 2,
    "TRAIN_BATCH": 4,
    "EPISODES": 1,
    "MAX_LEN": 32,
    "MAX_NEW_TOKENS": 10,
}
"""Two rounds of the 8 prompts there are, of lengths that the shared engines take."""
SMALLER = {"train_ppo_ray_multi_node": {"GPUS": 1}, "train_ppo_ray_70b_48gpus": {"GPUS": 1}}
"""Several groups of workers: one process for each will do."""
REWARD = """
def reward_func(queries, prompts, labels):
    rewards = [float(i % 2) for i in range(len(queries))]  # no group agrees, so no prompt is turned away
    return {"rewards": rewards, "scores": rewards}
"""


AGENT = """
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class Twice(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.turns = 0

    async def step(self, states, **kwargs):
        self.turns += 1
        reward = len(states["action_text"]) / 10
        return {"rewards": reward, "scores": reward, "environment_feedback": ">", "done": self.turns == 2}


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Twice)
"""


@pytest.fixture(scope="module")
def brought(inputs, tmp_path_factory) -> dict[str, str | int]:
    """What a user brings, by the variables of the scripts."""
    folder = tmp_path_factory.mktemp("brought")
    model = shutil.copytree(inputs.model, folder / "model")
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(model)
    judge = load_value_model(model, loading(seed=1))
    export_value_model(judge, tokenizer, folder / "judge", statistics=Normalisation(0.0, 0.5))
    (folder / "reward.py").write_text(REWARD)
    (folder / "agent.py").write_text(AGENT)
    chats = [(r["label"], [{"role": "user", "content": r["input"]}]) for r in inputs.records]
    lines = [json.dumps({"label": label, "prompt": chat, "context_messages": chat}) for label, chat in chats]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return TINY | {
        "MODEL": str(model),
        "REWARD_MODEL": str(folder / "judge"),
        "REWARD": str(folder / "reward.py"),
        "AGENT": str(folder / "agent.py"),
        "DATA": str(folder / "prompts.jsonl"),
        "EVAL_DATA": str(folder / "prompts.jsonl"),
    }


def configure(script, brought, folder):
    variables = brought | SMALLER.get(script.stem, {}) | {"OUT": str(folder / "out")}
    (started,) = started_by(script, folder, variables=variables)
    return parse(started.command, started.words)


@pytest.mark.parametrize("script", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_trains(cluster, brought, script, tmp_path, monkeypatch):
    """Two rounds to the end, with every part of the algorithm at work: its metrics are there, and no others'."""
    monkeypatch.chdir(tmp_path)
    config = configure(script, brought, tmp_path)
    result = train(config, make_launcher=cluster.make_launcher)
    rounds = [line for line in read_metrics(result.run_dir / "metrics.jsonl") if line["kind"] == "train"]
    assert len(rounds) == 2
    for line in rounds:
        assert line["rollout/failed"] == 0
        assert line["rollout/num_samples"] == 8
        parts = {
            "critic_loss": config.uses_critic,
            "kl": config.uses_reference,
            "dynamic_filtering_pass_rate": config.algo.dynamic_filtering_enable,
            "is_weight": config.corrects_off_policy,
            "policy_loss": config.critic.freezing_steps < 0,
            "rollout/staleness": config.train.async_enable,
        }
        assert {name: name in line for name in parts} == parts
        assert all(math.isfinite(value) for value in line.values() if isinstance(value, float))
    assert (tmp_path / "out" / "model" / "config.json").is_file()
