"""A mixture of experts trained by the commands as users call them, its experts kept busy."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from openrlhf.cli.train_sft import main as train_sft
from openrlhf.observability.loggers import read_metrics


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
