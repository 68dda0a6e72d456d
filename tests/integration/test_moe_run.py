"""A mixture of experts trained by the commands as users call them, its experts kept busy."""

import json
import shutil

import pytest
import torch
from agent_files import HEAD, env
from demo_runs import Demo, column, run, scores
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from openrlhf.cli.train_sft import main as train_sft
from openrlhf.demo.model import make_tokenizer, warm_up
from openrlhf.demo.sorting import make_task
from openrlhf.observability.loggers import read_metrics, without_times


@pytest.fixture(scope="module")
def moe(inputs, tmp_path_factory):
    """With the tokenizer of the other tests, and routers that know what they want."""
    folder = tmp_path_factory.mktemp("moe")
    tokenizer = AutoTokenizer.from_pretrained(inputs.model)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=AutoModelForCausalLM.from_pretrained(inputs.model).config.vocab_size,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def sft(model, tmp_path, monkeypatch, *words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"input": f"{i:02}>", "output": str(i // 10) * 2} for i in range(64)]
    (tmp_path / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = "--data.dataset sft.jsonl --data.output_key output --data.max_len 16 --train.batch_size 16 --adam.lr 3e-3"
    flags += " --data.input_template {} --train.max_epochs 4 --ckpt.output_dir out --logger.run_dir run"
    return train_sft(["--model.model_name_or_path", str(model), *flags.split(), *words])


def test_sft_lowers_its_loss_and_that_of_the_experts(moe, tmp_path, monkeypatch):
    assert sft(moe, tmp_path, monkeypatch, "--model.aux_loss_coef", "1") == 0
    metrics = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "train"]
    assert metrics[-1]["gpt_loss"] < metrics[0]["gpt_loss"]
    assert 2.0 < metrics[-1]["aux_loss"] < metrics[0]["aux_loss"]


def test_a_model_without_experts_is_refused(inputs, tmp_path, monkeypatch, capsys):
    assert sft(inputs.model, tmp_path, monkeypatch, "--model.aux_loss_coef", "0.1") == 2
    assert "--model.aux_loss_coef 0.1: qwen2 has no experts" in capsys.readouterr().err


def test_rl_balances_the_actor_and_the_critic(cli, moe):
    """The critic starts from the actor: the same routers have the same loss in the first round."""
    ran = cli(
        actor__model_name_or_path=moe,
        actor__aux_loss_coef=0.1,
        actor__adam__lr=1e-3,
        algo__advantage__estimator="gae",
    )
    assert ran.rc == 0, ran.err
    assert all(2.0 < record["aux_loss"] < 4.0 for record in ran.metrics)
    assert all(record["actor_grad_norm"] > 0 for record in ran.metrics)
    assert all(2.0 < record["critic_aux_loss"] < 4.0 for record in ran.metrics)
    assert ran.metrics[0]["critic_aux_loss"] == pytest.approx(ran.metrics[0]["aux_loss"], rel=0.05)


REWARD = """
def reward_func(queries, prompts, labels):
    return [float(sum(map(ord, query)) % 5) for query in queries]
"""
"""Different for nearly every answer, so that every round has a gradient."""


@pytest.fixture
def reward(tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    return tmp_path / "reward.py"


@pytest.fixture(scope="module")
def mixture_demo(tmp_path_factory) -> Demo:
    """The demo's task and data, and a mixture that a minute's warm-up has taken as far as the demo's own model."""
    task, folder = make_task(seed=0), tmp_path_factory.mktemp("mixture")
    (folder / "inputs").mkdir()
    task.write(folder / "inputs")
    tokenizer = make_tokenizer(task.characters)
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=128,
            moe_intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=32,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    for part in (model, tokenizer):
        part.save_pretrained(folder / "inputs" / "model")
    warm_up(folder / "inputs" / "model", task.train, seed=0, until=task.warm_up_until, on_step=lambda *_: None)
    return Demo(task, folder)


PIPELINES = {
    "sync": [],
    "partial": ["--train.async_enable", "--train.partial_rollout_enable"],
    "vllm": ["--vllm.num_engines", "1", "--train.launcher", "local"],
}


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_mixture_learns_through_the_engines_experts(mixture_demo, tmp_path, monkeypatch, pipeline):
    """From 0.56 to 0.9 of 500 problems; the difference has a standard error of 0.03. Every token is replayed. With
    partial rollout the weights of a response's first tokens are older than its routes."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    words = ["--actor.adam.lr", "1e-3", *PIPELINES[pipeline]]
    folder = run(mixture_demo, tmp_path / "run", *words, steps=8)
    before, after = scores(folder)
    assert before <= 0.7
    assert after >= before + 0.1
    assert column(folder, "experts/missing") == [0.0] * 8
    assert len(column(folder, "experts/differ")) == 8
    assert all(1.0 <= load <= 2.0 for load in column(folder, "experts/load_max"))
    if pipeline != "partial":
        # fp32 on both sides: hardly a choice differs before the update, and log-probs are the same.
        assert max(column(folder, "experts/logprobs_diff")) < 1e-4


def test_an_episode_of_three_turns_is_replayed_whole(cli, moe, tmp_path):
    """In a host process, whose turns ask the engine. Feedback has routes too: the next turn has read it. The policy has
    not changed since it sampled, so its routers agree with themselves."""
    step = """self.n += 1
        reward = sum(map(ord, states["action_text"])) % 5
        return {"rewards": reward, "environment_feedback": ">12", "done": self.n == 3, "extra_logs": {"turns": self.n}}
    """
    (tmp_path / "agent.py").write_text(HEAD + env(step))
    ran = cli(
        actor__model_name_or_path=moe,
        train__agent_func_path=tmp_path / "agent.py",
        reward__remote_url="none",
        data__max_len=48,
        rollout__max_new_tokens=6,
    )
    assert ran.rc == 0, ran.err
    for record in ran.metrics:
        assert record["turns"] == 3.0
        assert record["experts/missing"] == 0.0
        assert record["experts/differ"] == 0.0
        assert record["experts/logprobs_diff"] < 1e-5


def test_a_resumed_run_replays_what_was_waiting(cli, moe, reward, tmp_path):
    """Three of seven groups are too many for a round, and wait in the checkpoint with their experts. Interrupted after
    round 2 of 4, it ends as if it had not been."""
    flags = {
        "actor__model_name_or_path": moe,
        "actor__adam__lr": 1e-3,
        "reward__remote_url": reward,
        "algo__dynamic_filtering_enable": True,
        "rollout__vllm_generate_batch_size": 7,
        "train__num_episodes": 3,
        "train__max_epochs": 2,
        "ckpt__save_steps": 2,
    }
    words = ["--algo.dynamic_filtering_range", "-1", "9"]
    straight = cli(*words, **flags, ckpt__path=tmp_path / "a", ckpt__output_dir=tmp_path / "out_a")
    assert straight.rc == 0, straight.err
    shutil.copytree(tmp_path / "a" / "global_step2", tmp_path / "b" / "global_step2")
    (tmp_path / "run").rename(tmp_path / "first")
    resumed = cli(
        *words, **flags, ckpt__path=tmp_path / "b", ckpt__output_dir=tmp_path / "out_b", ckpt__load_enable=True
    )
    assert resumed.rc == 0, resumed.err
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("out_a", "out_b"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    first, again = (
        [without_times(r) for r in read_metrics(tmp_path / name / "metrics.jsonl") if r["step"] > 2]
        for name in ("first", "run")
    )
    assert first == again != []
    (kept,) = (r for r in read_metrics(tmp_path / "first" / "metrics.jsonl") if (r["step"], r["kind"]) == (2, "train"))
    assert kept["rollout/buffered"] > 0, "there was something to keep"
    assert all(record["experts/missing"] == 0.0 for record in again if record["kind"] == "train")


def test_rl_trains_through_the_experts_that_the_engine_chose(cli, moe):
    """The embedded engine computes with the policy's weights: both choose alike, and every token has its route."""
    ran = cli(actor__model_name_or_path=moe, actor__adam__lr=1e-3, algo__advantage__estimator="gae")
    assert ran.rc == 0, ran.err
    for record in ran.metrics:
        assert record["experts/missing"] == 0
        assert record["experts/differ"] < 0.02
        assert record["logprobs_diff"] < 1e-4
        assert record["experts/logprobs_diff"] < 1e-4
        assert 0 <= record["experts/load_min"] < 1 < record["experts/load_max"] <= 2


def test_rl_without_replay_watches_the_load_alone(cli, moe):
    ran = cli(
        "--algo.router_replay", "false", actor__model_name_or_path=moe, algo__advantage__estimator="gae", max_steps=1
    )
    assert ran.rc == 0, ran.err
    told = {name for name in ran.metrics[0] if name.startswith("experts/")}
    assert told == {"experts/load_min", "experts/load_max"}


def test_routes_of_a_model_without_experts_are_refused(cli):
    ran = cli("--algo.router_replay", "true")
    assert ran.rc == 2
    assert "--algo.router_replay: the routes of qwen2 cannot be replayed: it is no mixture of experts" in ran.err
