"""The RL loop on Ray, vLLM and DeepSpeed, on CPU: it learns what one process learns, wherever its models sit."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from demo_runs import Demo, column, run, scores
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from universal_checkpoints import rewritten

from openrlhf.checkpoint.training_state import read_training_state
from openrlhf.cli import train_rm
from openrlhf.observability.loggers import read_metrics
from openrlhf.observability.token_log import read_step, steps

pytestmark = pytest.mark.slow

STEPS = 12
"""By then most is learned, and chance decides little."""
GREEDY = ["--eval.temperature", "0"]
RANKS = ["--train.launcher", "ray", "--actor.num_gpus_per_node", "2", "--vllm.num_engines", "2"]


@pytest.fixture(scope="module")
def alone(demo, tmp_path_factory):
    """The score of one process after so many steps."""
    return scores(run(demo, tmp_path_factory.mktemp("alone") / "run", *GREEDY, steps=STEPS))


SHARED_OUT = {
    "zero 2": ["--ds.zero_stage", "2"],
    "zero 3": ["--ds.zero_stage", "3"],
    "compiled": ["--ds.deepcompile", "--ds.zero_stage", "2"],  # or not, where there is no C++ compiler
    "context 2": ["--ds.ring_attn_size", "2", "--ds.zero_stage", "2"],  # by ring: the demo's model has 7 heads
}


@pytest.mark.parametrize("way", SHARED_OUT)
def test_it_learns_as_much_as_one_process(demo, alone, cluster, tmp_path, way):
    words = [*RANKS, *GREEDY, *SHARED_OUT[way], "--vllm.sync_verify"]
    run_dir = run(demo, tmp_path / "run", *words, steps=STEPS, make_launcher=cluster.make_launcher)
    before, after = scores(run_dir)
    assert abs(before - alone[0]) < 0.05
    assert after > before
    # How much a greedy evaluation can rise depends on the warmed-up model; what is sampled rises from about 0.08 to 0.41.
    sampled = column(run_dir, "score")
    assert sampled[-1] > sampled[0] + 0.2
    assert abs(after - alone[1]) < 0.05
    assert max(column(run_dir, "logprobs_diff")) < 1e-4
    assert max(column(run_dir, "sync/probe_gap")) < 1e-4
    assert column(run_dir, "sync/buckets") == [1] * STEPS
    assert min(column(run_dir, "memory/peak_training_gb")) > 0
    assert column(run_dir, "rollout/failed") == [0] * STEPS


@pytest.fixture(scope="module")
def reward_model(demo, tmp_path_factory):
    """Prefers digits in order to the same out of order."""
    folder = tmp_path_factory.mktemp("reward")
    pairs = [{"prompt": p.prompt, "chosen": p.label, "rejected": p.digits} for p in demo.task.train[:512]]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    words = ["--model.model_name_or_path", demo.folder / "inputs" / "model", "--data.dataset", folder / "pairs.jsonl"]
    words += ["--data.prompt_key", "prompt", "--data.max_len", "16", "--adam.lr", "1e-3", "--train.batch_size", "64"]
    words += ["--train.max_epochs", "1", "--ckpt.output_dir", folder / "model", "--logger.run_dir", folder / "run"]
    assert train_rm.main(list(map(str, words))) == 0
    return folder / "model"


SHARING = {
    "apart": ["--critic.num_gpus_per_node", "1", "--ref.num_gpus_per_node", "1", "--reward.num_gpus_per_node", "1"],
    "in pairs": ["--train.colocate_actor_ref", "--train.colocate_critic_reward", "--ref.offload", "--reward.offload"],
    "all together": ["--train.colocate_all", "--actor.num_gpus_per_node", "2", "--ds.zero_stage", "3", "--ref.offload"],
    "streams": ["--train.colocate_all", "--actor.num_gpus_per_node", "2", "--ds.ring_attn_size", "2"],
}


@pytest.mark.parametrize("sharing", SHARING)
def test_ppo_with_four_models(demo, reward_model, cluster, tmp_path, sharing):
    """Two rounds, whoever shares devices and processes with whom."""
    words = [
        *("--algo.advantage.estimator", "gae", "--algo.kl.init_coef", "0.01", "--critic.adam.lr", "1e-3"),
        *("--reward.model_name_or_path", str(reward_model), "--rollout.n_samples_per_prompt", "1"),
        *("--train.launcher", "ray", "--vllm.num_engines", "2", "--train.batch_size", "128", *SHARING[sharing]),
        *("--actor.lr_scheduler", "constant", "--vllm.sync_verify"),
    ]
    others = ("reward.remote_url", "eval.dataset", "eval.at_start", "eval.steps")
    run_dir = run(demo, tmp_path / "run", *words, steps=2, without=others, make_launcher=cluster.make_launcher)
    assert column(run_dir, "rollout/failed") == [0, 0]
    assert max(column(run_dir, "logprobs_diff")) < 1e-4
    assert max(column(run_dir, "sync/probe_gap")) < 1e-4
    assert column(run_dir, "kl")[0] == pytest.approx(0, abs=1e-5)
    assert column(run_dir, "kl")[1] != 0
    assert min(column(run_dir, "critic_loss")) > 0


@pytest.mark.parametrize("stage", [2, 3])
def test_a_universal_checkpoint_is_continued_on_ranks(demo, cluster, tmp_path, stage):
    """A round of one process, rewritten as DeepSpeed has it. At a rate of 0 the actor and the critic that two ranks
    each then leave are the ones that they began with; it is the second round, and the last."""
    flags = [
        *("--algo.advantage.estimator", "gae", "--rollout.n_samples_per_prompt", "1", "--train.batch_size", "128"),
        *("--ckpt.save_steps", "1", "--critic.save_value_network"),
    ]
    without = ("eval.dataset", "eval.at_start", "eval.steps")
    run(demo, tmp_path / "first", *flags, "--ckpt.path", str(tmp_path / "a"), steps=2, without=without)
    theirs = rewritten(tmp_path / "a" / "global_step1", tmp_path / "b", rounds=1, prompts=8)
    words = [*flags, "--ckpt.path", str(theirs), "--ckpt.load_enable", "--ds.use_universal_ckpt", *RANKS]
    words += ["--critic.num_gpus_per_node", "2", "--ds.zero_stage", str(stage), "--vllm.sync_verify"]
    words += ["--actor.adam.lr", "0", "--critic.adam.lr", "0"]
    run_dir = run(demo, tmp_path / "run", *words, steps=2, without=without, make_launcher=cluster.make_launcher)
    assert [r["step"] for r in read_metrics(run_dir / "metrics.jsonl")] == [2]
    for part, left in (("actor", run_dir / "model"), ("critic", run_dir / "model_critic")):
        begun = load_file(tmp_path / "a" / "global_step1" / part / "model.safetensors")
        ended = load_file(left / "model.safetensors")
        assert all(torch.equal(ended[name], tensor) for name, tensor in begun.items())
    start = load_file(demo.folder / "inputs" / "model" / "model.safetensors")
    assert not torch.equal(
        start["model.norm.weight"], load_file(run_dir / "model" / "model.safetensors")["model.norm.weight"]
    )
    _, tensors = read_training_state(theirs / "global_step2" / "actor" / "training_state")
    before, _ = read_training_state(tmp_path / "a" / "global_step1" / "actor" / "training_state")
    assert {float(tensors[name]) for name in tensors if name.startswith("step/")} == {before["steps"] + 1}


TWO_TURNS = """
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class Again(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.turns = 0

    async def reset(self, states, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        self.turns += 1
        good = states["label"] in states["action_text"]
        done = good or self.turns == 2
        return {"rewards": float(good), "scores": float(good), "environment_feedback": "" if done else ">", "done": done}


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Again)
"""


def test_a_multi_turn_agent_and_a_checkpoint_that_one_process_goes_on_from(demo, cluster, tmp_path):
    """An adapter is trained by two ranks that share their parameters out; its merged weights sample. One process then
    reads what they have saved."""
    (tmp_path / "agent.py").write_text(TWO_TURNS)
    words = [
        *("--train.agent_func_path", str(tmp_path / "agent.py"), "--ds.lora.rank", "4", "--vllm.sync_verify"),
        *("--vllm.lora_sync", "merged"),  # the engines are for other runs too, which have no adapter
        *("--ckpt.path", str(tmp_path / "ckpt"), "--ckpt.save_steps", "1", "--actor.adam.lr", "1e-3"),
        *("--actor.lr_scheduler", "constant", "--actor.entropy_coef", "0"),
    ]
    others = ("reward.remote_url", "actor.adam.lr", "eval.dataset", "eval.at_start", "eval.steps")
    run_dir = run(
        demo, tmp_path / "run", *words, *RANKS, "--ds.zero_stage", "3", steps=2, without=others,
        make_launcher=cluster.make_launcher,
    )  # fmt: skip
    assert column(run_dir, "rollout/failed") == [0, 0]
    assert min(column(run_dir, "actor_grad_norm")) > 0
    assert max(column(run_dir, "logprobs_diff")) < 1e-4
    assert max(column(run_dir, "sync/probe_gap")) < 1e-4
    on = run(demo, tmp_path / "on", *words, "--ckpt.load_enable", "--train.total_steps", "4", steps=2, without=others)
    assert column(on, "global_step") == [3, 4]
    assert max(column(on, "logprobs_diff")) < 1e-4


def write_even_model(folder: Path, demo: Demo) -> Path:
    """With the demo's tokenizer: four heads and two for keys and values, so that two ranks can share them."""
    tokenizer = AutoTokenizer.from_pretrained(demo.folder / "inputs" / "model")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # vLLM's attention on a CPU has no smaller ones
        max_position_embeddings=64,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_two_ranks_share_every_layer_and_one_process_goes_on(demo, cluster, tmp_path):
    """Policy, critic and reference are cut; engines get whole weights, and so does the checkpoint."""
    words = [
        *("--actor.model_name_or_path", str(write_even_model(tmp_path / "even", demo))),
        *("--algo.advantage.estimator", "gae", "--algo.kl.init_coef", "0.01", "--critic.adam.lr", "1e-3"),
        *("--ckpt.path", str(tmp_path / "ckpt"), "--ckpt.save_steps", "1", "--actor.lr_scheduler", "constant"),
        *("--vllm.sync_verify", "--train.batch_size", "128", "--rollout.n_samples_per_prompt", "1"),
    ]
    ranks = ["--train.launcher", "ray", "--ds.tensor_parallel_size", "2", "--vllm.num_engines", "1"]
    ranks += ["--actor.num_gpus_per_node", "2", "--ref.num_gpus_per_node", "2", "--critic.num_gpus_per_node", "2"]
    ranks += ["--train.colocate_actor_ref"]
    others = ("actor.model_name_or_path", "eval.dataset", "eval.at_start", "eval.steps")
    run_dir = run(
        demo, tmp_path / "run", *words, *ranks, steps=2, without=others, make_launcher=cluster.with_own_engines
    )
    assert column(run_dir, "rollout/failed") == [0, 0]
    assert max(column(run_dir, "logprobs_diff")) < 1e-4
    assert max(column(run_dir, "sync/probe_gap")) < 1e-4
    assert column(run_dir, "kl")[0] == pytest.approx(0, abs=1e-5)
    assert column(run_dir, "kl")[1] != 0
    assert min(column(run_dir, "critic_loss")) > 0
    for path in steps(run_dir).values():  # of each sample its ranks have sent the driver every column
        logged = [s for g in read_step(path).groups for sample in g.samples for s in sample.segments]
        assert logged
        for name in ("new_logprobs", "old_logprobs", "ref_logprobs", "values", "returns", "advantages"):
            assert not any(np.isnan(segment.columns[name]).any() for segment in logged), name
    on = run(demo, tmp_path / "on", *words, "--ckpt.load_enable", "--train.total_steps", "3", steps=2, without=others)
    assert column(on, "global_step") == [3]
    assert max(column(on, "logprobs_diff")) < 1e-4


def write_mixture(folder: Path, demo: Demo) -> Path:
    """With the demo's tokenizer: two layers, of which the second has four experts, two for a token."""
    tokenizer = AutoTokenizer.from_pretrained(demo.folder / "inputs" / "model")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        mlp_only_layers=[0],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_experts_that_an_engine_chose_come_with_every_turn(demo, cluster, tmp_path):
    """Through the engine's process, the driver, hosts of agents and two ranks that share the experts' weights out. A
    model that has learned nothing has one answer in two right by chance."""
    by_chance = TWO_TURNS.replace(
        'states["label"] in states["action_text"]', 'sum(states["action_text"].encode()) % 2 == 0'
    )
    assert by_chance != TWO_TURNS
    (tmp_path / "agent.py").write_text(by_chance)
    words = [
        *("--actor.model_name_or_path", str(write_mixture(tmp_path / "mixture", demo)), "--vllm.sync_verify"),
        *("--train.agent_func_path", str(tmp_path / "agent.py"), "--ds.zero_stage", "3", "--train.batch_size", "128"),
        *("--rollout.n_samples_per_prompt", "2", "--actor.adam.lr", "1e-3", "--actor.lr_scheduler", "constant"),
    ]
    ranks = ["--train.launcher", "ray", "--actor.num_gpus_per_node", "2", "--vllm.num_engines", "1"]
    others = ("actor.model_name_or_path", "reward.remote_url", "actor.adam.lr", "eval.dataset", "eval.at_start")
    run_dir = run(
        demo, tmp_path / "run", *words, *ranks, steps=2, without=(*others, "eval.steps"),
        make_launcher=cluster.with_own_engines,
    )  # fmt: skip
    assert column(run_dir, "rollout/failed") == [0, 0]
    assert column(run_dir, "experts/missing") == [0, 0]
    assert max(column(run_dir, "experts/differ")) < 0.001  # in fp32 only what is undecided can differ
    assert max(column(run_dir, "logprobs_diff")) < 1e-4
    assert max(column(run_dir, "sync/probe_gap")) < 1e-4


PIPELINES = {
    "async": ["--train.async_enable"],
    "partial": ["--train.async_enable", "--train.partial_rollout_enable", "--algo.advantage.estimator", "rloo"],
    "agent": ["--train.async_enable", "--train.partial_rollout_enable"],
    "stragglers": ["--rollout.abort_stragglers", "--rollout.vllm_generate_batch_size", "192"],
}


@pytest.mark.parametrize("name", PIPELINES)
def test_it_learns_when_episodes_outlive_their_round(demo, cluster, tmp_path, name):
    """Rounds of 128 prompts, with 192 in play where stragglers are left behind. Evaluations beside training are told under
    the step they measured."""
    (tmp_path / "agent.py").write_text(TWO_TURNS)
    words = [*PIPELINES[name], "--algo.advantage.is_correction_enable", "--vllm.sync_verify", "--eval.steps", "2"]
    words += ["--train.agent_func_path", str(tmp_path / "agent.py")] if name == "agent" else []
    run_dir = run(
        demo, tmp_path / "run", *words, *RANKS, steps=4, without=["eval.steps"], make_launcher=cluster.make_launcher
    )
    before, _, after = scores(run_dir)
    assert after > before
    assert column(run_dir, "rollout/failed") == [0] * 4
    assert max(column(run_dir, "sync/probe_gap")) < 1e-4
    assert 1 <= max(column(run_dir, "rollout/staleness_max")) <= (2 if name == "stragglers" else 1)
    overlap = column(run_dir, "perf/overlap")
    if name == "stragglers":
        assert overlap == []
    else:
        assert 0 < max(overlap) <= 1
