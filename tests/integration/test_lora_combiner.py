"""`lora_combiner`: the merged model is the trained one, loads anywhere, and wrong folders are told in one line."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_sections import loading
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from openrlhf.checkpoint.export import export_policy, export_value_model
from openrlhf.cli.lora_combiner import main
from openrlhf.config.backend import LoraSection
from openrlhf.models.loading import load_policy, load_tokenizer, load_value_model
from openrlhf.models.value import Normalisation, sequence_ends
from openrlhf.types import PackedTokens

LORA = LoraSection(rank=4, alpha=16)
TOKENS = PackedTokens.from_sequences([torch.tensor([3, 5, 4, 8, 6, 2])], [torch.arange(6) >= 1])


@pytest.fixture
def adapters(inputs, tmp_path):
    """A policy and a reward model with adapters that have moved, in memory and as folders."""
    policy = load_policy(inputs.model, loading(lora=LORA))
    reward = load_value_model(inputs.model, loading(lora=LORA, value_head_prefix="value_head", seed=5))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for model in (policy, reward):
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    export_policy(policy, load_tokenizer(inputs.model), tmp_path / "policy")
    export_value_model(reward, None, tmp_path / "reward", statistics=Normalisation(0.25, 3.0))
    return policy, reward


def merge(base, adapter, output, *words):
    return main(["--model_path", str(base), "--lora_path", str(adapter), "--output_path", str(output), *words])


def test_a_language_model(inputs, adapters, tmp_path):
    policy, _ = adapters
    assert merge(inputs.model, tmp_path / "policy", tmp_path / "out") == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(load_file(inputs.model / "model.safetensors"))
    with torch.no_grad():
        logits = merged(TOKENS.token_ids[None]).logits[0]
        plain = AutoModelForCausalLM.from_pretrained(inputs.model)(TOKENS.token_ids[None]).logits[0]
    picked = logits.log_softmax(-1)[torch.arange(5), TOKENS.token_ids[1:]]
    torch.testing.assert_close(picked, policy(TOKENS, temperature=1.0).logprobs_A, rtol=1e-4, atol=1e-5)
    assert (logits - plain).abs().max() > 0.1
    assert AutoTokenizer.from_pretrained(tmp_path / "out").vocab_size > 0


def test_a_reward_model_keeps_its_head_its_statistics_and_its_scores(inputs, adapters, tmp_path):
    _, reward = adapters
    assert merge(inputs.model, tmp_path / "reward", tmp_path / "out", "--is_rm") == 0
    expected = reward(TOKENS, positions=sequence_ends(TOKENS)).item()
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", num_labels=1)
    with torch.no_grad():
        assert classifier(TOKENS.token_ids[None]).logits.item() == pytest.approx(expected, rel=1e-4)
    ours = load_value_model(tmp_path / "out", loading(), fresh_head=False)
    assert ours(TOKENS, positions=sequence_ends(TOKENS)).item() == pytest.approx(expected, rel=1e-4)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["mean"], config["std"], config["value_head_prefix"]) == (0.25, 3.0, "value_head")


def test_the_dtype_is_the_bases_or_the_one_asked_for(inputs, adapters, tmp_path):
    for words, dtype in (((), torch.float32), (("--param_dtype", "bf16"), torch.bfloat16)):
        assert merge(inputs.model, tmp_path / "policy", tmp_path / "out", *words) == 0
        assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {dtype}


class TestRefused:
    def test_folders_that_are_none(self, inputs, adapters, tmp_path, capsys):
        for adapter, words, message in (
            (tmp_path / "nope", (), "no such folder"),
            (inputs.model, (), "no adapter_config.json here"),
            (tmp_path / "reward", (), "add --is_rm"),
        ):
            assert merge(inputs.model, adapter, tmp_path / "out", *words) == 1
            err = capsys.readouterr().err
            assert message in err
            assert "Traceback" not in err
        assert not (tmp_path / "out").exists()

    def test_a_language_models_adapter_has_no_score(self, inputs, adapters, tmp_path, capsys):
        assert merge(inputs.model, tmp_path / "policy", tmp_path / "out", "--is_rm") == 1
        assert "--model_path" in capsys.readouterr().err

    @pytest.mark.parametrize("change", [{"hidden_size": 32}, {"num_hidden_layers": 1}, {"num_hidden_layers": 9}])
    def test_another_base(self, inputs, adapters, tmp_path, capsys, change):
        base = Qwen2Config.from_pretrained(inputs.model).to_dict() | change
        base.pop("layer_types", None)
        Qwen2ForCausalLM(Qwen2Config(**base)).save_pretrained(tmp_path / "other")
        assert merge(tmp_path / "other", tmp_path / "policy", tmp_path / "out") == 1
        assert "does not fit --model_path" in capsys.readouterr().err

    def test_a_head_of_another_size(self, inputs, adapters, tmp_path, capsys):
        file = tmp_path / "reward" / "adapter_model.safetensors"
        tensors = load_file(file)
        name = next(name for name in tensors if "lora" not in name)
        save_file(tensors | {name: torch.zeros(1, 3)}, file)
        assert merge(inputs.model, tmp_path / "reward", tmp_path / "out", "--is_rm") == 1
        assert "does not fit --model_path" in capsys.readouterr().err

    def test_the_base_is_never_overwritten(self, inputs, adapters, tmp_path, capsys):
        assert merge(inputs.model, tmp_path / "policy", inputs.model) == 2
        assert "--output_path" in capsys.readouterr().err
