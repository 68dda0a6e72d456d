"""What a user names is loaded, or refused in the user's words; what is exported loads anywhere."""

import json

import pytest
import torch
from safetensors.torch import load_file
from small_sections import loading
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from vllm_mixtures import FAMILIES, VOCABULARY, make_mixture

from openrlhf.checkpoint.export import export_policy
from openrlhf.models.attention import ATTENTION
from openrlhf.models.loading import ModelLoadError, load_policy, load_tokenizer
from openrlhf.types import PackedTokens

WORDS = ["<unk>", "<eos>", *"0123456789+="]


def make_tokenizer(**special):
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", **special)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with dropout, tied embeddings and generation settings, and a tokenizer without a padding token."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        attention_dropout=0.25,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config.temperature = 0.6
    model.generation_config.do_sample = True
    model.save_pretrained(path)
    make_tokenizer(eos_token="<eos>").save_pretrained(path)
    return path


def load(path, **kwargs):
    return load_policy(path, loading(**kwargs))


class TestPolicy:
    @pytest.mark.parametrize("attention", [None, "flash_attention_2", "eager"])
    def test_attention_is_packed_whatever_it_is_called(self, folder, attention):
        policy = load(folder, attn_implementation=attention)
        assert policy.packed
        assert policy.model.config._attn_implementation == ATTENTION

    def test_dropout_is_off_in_training_mode(self, folder):
        policy = load(folder)
        assert policy.training
        tokens = PackedTokens.from_sequences([torch.arange(12)], [torch.arange(12) > 0])
        first, second = (policy(tokens, temperature=1.0).logprobs_A for _ in range(2))
        assert torch.equal(first, second)

    def test_families_give_dropout_other_names(self, tmp_path):
        """OPT calls it `dropout`, and has 0.1 of it unless told otherwise."""
        config = OPTConfig(
            vocab_size=13,
            hidden_size=16,
            ffn_dim=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            word_embed_proj_dim=16,
        )
        OPTForCausalLM(config).save_pretrained(tmp_path)
        policy = load(tmp_path)
        assert policy.config_changes == {"dropout": 0.1}
        tokens = PackedTokens.from_sequences([torch.arange(12)], [torch.arange(12) > 0])
        first, second = (policy(tokens, temperature=1.0).logprobs_A for _ in range(2))
        assert torch.equal(first, second)

    def test_weights_come_in_the_asked_type(self, folder):
        policy = load(folder, dtype=torch.bfloat16)
        assert {p.dtype for p in policy.parameters()} == {torch.bfloat16}

    def test_gradient_checkpointing_is_on_when_asked_for(self, folder):
        assert load(folder, gradient_checkpointing=True).model.is_gradient_checkpointing
        assert not load(folder).model.is_gradient_checkpointing

    def test_a_folder_that_is_not_there(self, tmp_path):
        with pytest.raises(ModelLoadError, match=r"--actor.model_name_or_path .*missing: no such folder"):
            load(tmp_path / "missing")

    def test_a_relative_folder_that_is_not_there(self):
        with pytest.raises(ModelLoadError, match="no such folder"):
            load("./missing")

    def test_a_file(self, folder):
        with pytest.raises(ModelLoadError, match="is a file"):
            load(folder / "config.json")

    def test_a_folder_without_a_model(self, tmp_path):
        with pytest.raises(ModelLoadError, match=r"no config\.json"):
            load(tmp_path)

    def test_a_folder_without_weights(self, tmp_path, folder):
        (tmp_path / "config.json").write_text((folder / "config.json").read_text())
        with pytest.raises(ModelLoadError, match="cannot load the model"):
            load(tmp_path)

    def test_an_unreadable_configuration(self, tmp_path):
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(ModelLoadError, match="cannot load the configuration"):
            load(tmp_path)

    def test_a_model_whose_logits_are_more_than_its_head(self, folder, monkeypatch):
        forward = Qwen2ForCausalLM.forward

        def louder(self, *args, **kwargs):
            out = forward(self, *args, **kwargs)
            out.logits = out.logits * 1.5
            return out

        monkeypatch.setattr(Qwen2ForCausalLM, "forward", louder)
        with pytest.raises(ModelLoadError, match=r"--actor.model_name_or_path .*qwen2.*logits"):
            load(folder)

    def test_errors_name_the_flag_that_was_used(self, tmp_path):
        with pytest.raises(ModelLoadError, match=r"--ref\.model_name_or_path"):
            load(tmp_path / "missing", flag="--ref.model_name_or_path")


class TestTokenizer:
    def test_the_end_token_pads_when_there_is_no_padding_token(self, folder):
        tokenizer = load_tokenizer(folder)
        assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1

    def test_a_padding_token_of_its_own_is_kept(self, tmp_path, folder):
        (tmp_path / "config.json").write_text((folder / "config.json").read_text())
        make_tokenizer(eos_token="<eos>", pad_token="<unk>").save_pretrained(tmp_path)
        assert load_tokenizer(tmp_path).pad_token_id == 0

    def test_a_folder_without_a_tokenizer(self, tmp_path, folder):
        (tmp_path / "config.json").write_text((folder / "config.json").read_text())
        with pytest.raises(ModelLoadError, match=r"--actor.model_name_or_path .*cannot load the tokenizer"):
            load_tokenizer(tmp_path)

    def test_a_tokenizer_without_an_end(self, tmp_path, folder):
        (tmp_path / "config.json").write_text((folder / "config.json").read_text())
        make_tokenizer().save_pretrained(tmp_path)
        with pytest.raises(ModelLoadError, match="eos_token"):
            load_tokenizer(tmp_path)


class TestExport:
    def test_the_folder_loads_anywhere_and_gives_the_same_logits(self, tmp_path, folder):
        policy, tokenizer = load(folder), load_tokenizer(folder)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.01)
        out = export_policy(policy, tokenizer, tmp_path / "a" / "export")
        model, again = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
        ids = torch.tensor([again("2+3=").input_ids])
        assert ids.tolist() == [[4, 12, 5, 13]]
        tokens = PackedTokens.from_sequences([ids[0]], [torch.tensor([False, True, True, True])])
        with torch.no_grad():
            expected = torch.log_softmax(model(ids).logits[0], -1)[:-1].gather(1, ids[0, 1:, None]).squeeze(1)
            torch.testing.assert_close(policy(tokens, temperature=1.0).logprobs_A, expected)
        assert model.generation_config.temperature == 0.6

    def test_the_configuration_is_the_users_not_ours(self, tmp_path, folder):
        export_policy(load(folder), None, tmp_path / "export")
        written = json.loads((tmp_path / "export" / "config.json").read_text())
        assert ATTENTION not in json.dumps(written)
        assert written["attention_dropout"] == 0.25

    @pytest.mark.parametrize("handed_in", [False, True])
    @pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32, torch.float16])
    @pytest.mark.parametrize("computed", [torch.bfloat16, torch.float32])
    def test_a_model_is_written_in_the_dtype_it_came_in(self, tmp_path, folder, stored, computed, handed_in):
        """Whatever was computed in. What was not trained is what it was, where the one dtype holds the other's numbers;
        a head that is tied is not written twice."""
        came = tmp_path / "came"
        AutoModelForCausalLM.from_pretrained(folder, dtype=stored).save_pretrained(came)
        policy = load(came, dtype=computed)
        weights = dict(policy.named_parameters()) if handed_in else None
        out = export_policy(policy, None, tmp_path / "out", state_dict=weights)
        before, after = (load_file(path / "model.safetensors") for path in (came, out))
        assert before.keys() == after.keys()
        assert {tensor.dtype for tensor in after.values()} == {stored}
        assert json.loads((out / "config.json").read_text())["dtype"] == str(stored).removeprefix("torch.")
        assert {parameter.dtype for parameter in policy.parameters()} == {computed}
        if computed == torch.float32:
            assert all(torch.equal(before[name], tensor) for name, tensor in after.items())

    def test_what_a_model_keeps_in_fp32_and_what_is_no_number_stay_so(self, tmp_path, folder):
        """As transformers loads it: modules that their class names, in a model of 16 bits, have 32."""
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(tmp_path / "came")
        policy = load(tmp_path / "came")
        policy.model._keep_in_fp32_modules_strict = {"norm"}
        policy.model.model.register_buffer("counts", torch.ones(2, dtype=torch.float64))
        out = load_file(export_policy(policy, None, tmp_path / "out") / "model.safetensors")
        norms = {tensor.dtype for name, tensor in out.items() if "norm" in name}
        others = {tensor.dtype for name, tensor in out.items() if "norm" not in name and "counts" not in name}
        assert (norms, others, out["model.counts"].dtype) == ({torch.float32}, {torch.bfloat16}, torch.float64)

    def test_exporting_leaves_the_policy_as_it_was(self, tmp_path, folder):
        policy = load(folder)
        export_policy(policy, None, tmp_path / "export")
        assert policy.model.config._attn_implementation == ATTENTION
        assert policy.model.config.attention_dropout == 0.0

    def test_an_older_export_is_replaced_and_its_neighbours_stay(self, tmp_path, folder):
        """`./ckpt` is the default output folder, and `./ckpt/checkpoints_ppo_ray` lies inside it."""
        target = tmp_path / "export"
        (target / "checkpoints").mkdir(parents=True)
        (target / "model-00001-of-00002.safetensors").write_text("old weights")
        (target / "config.json").write_text("old configuration")
        export_policy(load(folder), load_tokenizer(folder), target)
        assert (target / "checkpoints").is_dir()
        assert not (target / "model-00001-of-00002.safetensors").exists()
        assert AutoModelForCausalLM.from_pretrained(target).config.vocab_size == load(folder).model.config.vocab_size
        assert [p.name for p in tmp_path.iterdir()] == ["export"]

    def test_a_failed_export_leaves_the_older_one_and_no_debris(self, tmp_path, folder):
        class Broken:
            def save_pretrained(self, folder):
                raise OSError("disk full")

        policy, target = load(folder), tmp_path / "export"
        target.mkdir()
        (target / "kept.txt").write_text("old")
        with pytest.raises(OSError, match="disk full"):
            export_policy(policy, Broken(), target)
        assert (target / "kept.txt").exists()
        assert [p.name for p in tmp_path.iterdir()] == ["export"]

    def test_weights_can_be_handed_in(self, tmp_path, folder):
        policy = load(folder)
        weights = {name: torch.ones_like(value) for name, value in policy.state_dict().items()}
        out = export_policy(policy, None, tmp_path / "export", state_dict=weights)
        model = AutoModelForCausalLM.from_pretrained(out)
        assert all(bool((p == 1).all()) for p in model.parameters())


class TestExperts:
    @pytest.fixture(scope="class")
    def moe(self, tmp_path_factory):
        path = tmp_path_factory.mktemp("moe")
        torch.manual_seed(0)
        config = Qwen3MoeConfig(
            vocab_size=13,
            hidden_size=16,
            intermediate_size=24,
            moe_intermediate_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            decoder_sparse_step=1,
        )
        Qwen3MoeForCausalLM(config).save_pretrained(path)
        return path

    @pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe", "gpt_oss", "qwen2_moe"])
    def test_every_kernel_gives_the_log_probs_and_gradients_of_the_first(self, family, tmp_path):
        make_mixture(family).save_pretrained(tmp_path)
        tokens = PackedTokens.from_sequences([torch.arange(12)], [torch.arange(12) > 0])
        expected = None
        for kernel in ("eager", "batched_mm", "grouped_mm"):
            policy = load(tmp_path, experts_implementation=kernel)
            assert policy.model.config._experts_implementation == kernel
            logprobs_A = policy(tokens, temperature=1.0).logprobs_A
            logprobs_A.sum().backward()
            found = [logprobs_A.detach(), *(p.grad for name, p in policy.named_parameters() if ".experts." in name)]
            expected = expected or found
            assert len(found) > 1
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_mixture_computes_what_transformers_computes_in_training_too(self, family, tmp_path):
        """No router draws, no input is shaken, and what only looks like noise stays (Phi-MoE)."""
        model = make_mixture(family, packed=False)
        model.save_pretrained(tmp_path)
        policy = load(tmp_path)
        assert policy.packed is (family != "gpt_oss")
        ids = torch.randint(VOCABULARY, (40,), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            expected = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
            for mode in (True, False):
                policy.train(mode)
                tokens = PackedTokens.from_sequences([ids], [torch.arange(40) > 0])
                found = policy(tokens, temperature=1.0).logprobs_A
                torch.testing.assert_close(found, expected, atol=5e-5, rtol=0)

    def test_a_kernel_that_does_not_run_here_is_told_by_its_flag(self, moe):
        with pytest.raises(ModelLoadError, match=r"--ds.experts_implementation deepgemm does not run here: .*bfloat16"):
            load(moe, experts_implementation="deepgemm")

    def test_a_model_without_experts_has_none(self, folder):
        with pytest.raises(ModelLoadError, match="does not support setting experts implementation"):
            load(folder, experts_implementation="grouped_mm")
