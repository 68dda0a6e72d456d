"""What cannot work on a cluster: one sentence, soon, and nothing is left running."""

import pytest
from patience import patience

pytestmark = pytest.mark.slow

RAY = {"train__launcher": "ray", "vllm__num_engines": 1}


def said(ran, *, rc: int, within: float) -> str:
    assert ran.rc == rc, ran.err
    assert ran.seconds < patience(within)
    assert "Traceback" not in ran.err
    (error,) = ran.errors
    return error


def test_a_plan_that_the_cluster_cannot_hold(cli):
    error = said(
        cli(**RAY, actor__num_gpus_per_node=64, rollout__batch_size=64, train__batch_size=128), rc=1, within=60
    )
    assert "the run needs 65 devices (actor 64, vllm 1)" in error
    assert "it fits with" in error


def test_a_model_that_is_not_there(cli):
    error = said(cli(**RAY, actor__model_name_or_path="nowhere/at-all"), rc=1, within=30)
    assert "--actor.model_name_or_path nowhere/at-all" in error


def test_no_engines(cli):
    error = said(cli(train__launcher="ray", vllm__num_engines=0), rc=2, within=60)
    assert "--vllm.num_engines" in error
    assert "--train.launcher local" in error


def test_engines_and_actor_that_do_not_match(cli):
    error = said(cli(**RAY | {"train__colocate_all": True, "actor__num_gpus_per_node": 2}), rc=2, within=60)
    assert "--vllm.num_engines 1 × --vllm.tensor_parallel_size 1 must equal the actor's 2 devices" in error


def test_an_engine_that_does_not_start(cli, inputs, tmp_path):
    """Its heads have a size that vLLM does not know on a CPU: the actor does not wait for it."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from openrlhf.demo.model import make_tokenizer

    tokenizer = make_tokenizer()
    shape = {"hidden_size": 20, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=1, **shape)
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    error = said(cli(**RAY, actor__model_name_or_path=tmp_path / "model"), rc=1, within=120)
    assert error.startswith("error: vLLM engine 0 on ")
    assert "heads of 32" in error
