"""Scalar heads: values that do not depend on the layout of sequences; heads kept, made, refused; folders that round-trip."""

import itertools
import json
import logging

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from prompted_streams import prompted_segment
from safetensors.torch import load_file, save_file
from small_sections import loading
from test_models_policy import ONE_BY_ONE, PACKED, SMALL, make_sequences

from openrlhf.checkpoint.export import export_value_model
from openrlhf.models.attention import ATTENTION
from openrlhf.models.loading import ModelLoadError, load_value_model
from openrlhf.models.value import Normalisation, ScalarHead, ValueModel, sequence_ends
from openrlhf.types import PackedTokens

HIDDEN = SMALL["hidden_size"]
FAMILIES = PACKED | {name: make for name, (make, _) in ONE_BY_ONE.items()}


def load(path, *, fresh_head=None, normalise=False, flag="--reward.model_name_or_path", **kwargs):
    return load_value_model(path, loading(flag=flag, **kwargs), fresh_head=fresh_head, normalise=normalise)


def write_language_model(path, config):
    torch.manual_seed(0)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def write_classifier(path, *, labels=1, **config):
    torch.manual_seed(1)
    hf.Qwen2ForSequenceClassification(hf.Qwen2Config(**SMALL, num_labels=labels, **config)).save_pretrained(path)
    return path


def edit_config(path, **changes):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def rename_head(path, name):
    """What another framework might have written: the head under a name of its own."""
    tensors = load_file(path / "model.safetensors")
    tensors[f"{name}.weight"] = tensors.pop("score.weight")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def loud(model):
    """A head whose values are not tiny, so that mistakes show."""
    with torch.no_grad():
        model.head.weight.copy_(torch.randn(model.head.weight.shape, generator=torch.Generator().manual_seed(3)))
    return model


def pack(lengths, *, seed=0):
    sequences, masks = make_sequences(lengths, seed=seed)
    return sequences, masks, PackedTokens.from_sequences(sequences, masks)


@pytest.fixture(scope="module")
def policy_folder(tmp_path_factory):
    return write_language_model(tmp_path_factory.mktemp("policy"), hf.Qwen2Config(**SMALL))


@pytest.fixture(scope="module")
def qwen(policy_folder):
    return loud(load(policy_folder))


class TestValues:
    @pytest.mark.parametrize("name", FAMILIES)
    def test_are_those_of_the_family_one_sequence_at_a_time(self, tmp_path, name):
        """Reference: the causal model's own last hidden state times the head."""
        write_language_model(tmp_path, FAMILIES[name]())
        model = loud(load(tmp_path))
        assert model.packed == (name in PACKED)
        reference = hf.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        sequences, masks, tokens = pack([9, 5, 12, 5, 1, 9])
        with torch.no_grad():
            hidden = [
                reference(s[None], use_cache=False, output_hidden_states=True).hidden_states[-1][0] for s in sequences
            ]
            values = [h @ model.head.weight[0] for h in hidden]
            torch.testing.assert_close(
                model(tokens, positions=sequence_ends(tokens)),
                torch.stack([v[-1] for v in values]),
                rtol=1e-5,
                atol=5e-5,
            )
            torch.testing.assert_close(
                model(tokens, positions=tokens.action_positions - 1),
                torch.cat([v[:-1][m[1:]] for v, m in zip(values, masks, strict=True)]),
                rtol=1e-5,
                atol=5e-5,
            )

    def test_positions_by_hand(self):
        """Two sequences of 4 and 2 tokens; actions are tokens 2 and 3 of the first, 1 of the second.

        stream     a b C D | e F        actions at 2 3 5
        cu_seqlens 0 4 6                last tokens at 3 5
        """
        tokens = PackedTokens.from_sequences(
            [torch.arange(4), torch.arange(2)],
            [torch.tensor([False, False, True, True]), torch.tensor([False, True])],
        )
        assert tokens.action_positions.tolist() == [2, 3, 5]
        assert sequence_ends(tokens).tolist() == [3, 5]
        assert sequence_ends(tokens).dtype == torch.int64

    def test_the_head_is_a_dot_product_in_fp32(self):
        """w = (1, 1), h = (256, 1): 257 in fp32; bf16, with 8 bits, has no 257."""
        head = ScalarHead(2).to(torch.bfloat16)
        with torch.no_grad():
            head.weight.fill_(1.0)
            values = head(torch.tensor([[256.0, 1.0]], dtype=torch.bfloat16))
        assert values.dtype == torch.float32
        assert values.tolist() == [257.0]

    @settings(max_examples=15, deadline=None)
    @given(order=st.permutations(range(6)), cut_points=st.sets(st.integers(1, 5)))
    def test_order_and_split_of_sequences_do_not_change_the_gradient(self, qwen, order, cut_points):
        sequences, masks = make_sequences([9, 5, 12, 5, 2, 9])
        targets = torch.arange(6.0)

        def gradient(batches):
            qwen.zero_grad()
            for indices in batches:
                tokens = PackedTokens.from_sequences([sequences[i] for i in indices], [masks[i] for i in indices])
                values = qwen(tokens, positions=sequence_ends(tokens))
                ((values - targets[list(indices)]) ** 2).sum().backward()
            return torch.cat([p.grad.flatten() for p in qwen.parameters()])

        expected = gradient([range(6)])
        bounds = [0, *sorted(cut_points), 6]
        actual = gradient([order[a:b] for a, b in itertools.pairwise(bounds)])
        assert (actual - expected).norm() / expected.norm() < 1e-5
        assert qwen.head.weight.grad.any()

    def test_samples_that_share_their_prompt_get_their_own_values(self, qwen):
        """The state before the first action is the prompt's end, computed once and read by all."""
        prompt = torch.arange(3, 9)
        answers = [torch.arange(10, 14), torch.arange(20, 22), torch.arange(30, 35)]
        segments = [prompted_segment(torch.cat([prompt, answer]), len(prompt)) for answer in answers]
        together = PackedTokens.from_segments(segments)
        assert together.shared_prefixes == (0, 6, 6)
        with torch.no_grad():
            alone = [PackedTokens.from_segments([s]) for s in segments]
            expected = torch.cat([qwen(t, positions=t.action_positions - 1) for t in alone])
            torch.testing.assert_close(
                qwen(together, positions=together.action_positions - 1), expected, rtol=1e-5, atol=1e-5
            )

    def test_normalisation_by_hand(self, qwen):
        """(v − 2) / 4, in training mode as in evaluation."""
        normal = ValueModel(qwen.model, qwen.head, normalisation=Normalisation(mean=2.0, std=4.0))
        _, _, tokens = pack([9, 5])
        for mode in (True, False):
            with torch.no_grad():
                raw = qwen.train(mode)(tokens, positions=sequence_ends(tokens))
                values = normal.train(mode)(tokens, positions=sequence_ends(tokens))
            torch.testing.assert_close(values, (raw - 2.0) / 4.0)
        qwen.train()

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_gradient_checkpointing_changes_nothing(self, policy_folder, reentrant):
        plain = loud(load(policy_folder))
        recomputing = loud(load(policy_folder, gradient_checkpointing=True, gradient_checkpointing_reentrant=reentrant))
        _, _, tokens = pack([9, 5, 12])
        calls = []
        recomputing.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
        for model in (plain, recomputing):
            model(tokens, positions=sequence_ends(tokens)).square().sum().backward()
        assert len(calls) == 2, "the layer runs again in the backward pass"
        for (name, a), b in zip(plain.named_parameters(), recomputing.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, msg=name)


class TestHead:
    def test_a_language_model_gets_a_small_random_one_from_the_seed(self, policy_folder, caplog):
        with caplog.at_level(logging.INFO, logger="openrlhf.models.loading"):
            first, again, other = (load(policy_folder, seed=seed).head.weight for seed in (0, 0, 1))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        assert "random weights" in caplog.text

    def test_a_fresh_one_has_standard_deviation_one_over_hidden_plus_one(self, policy_folder):
        """200 heads of 32 weights: the estimate is within 5 % of 1/33 (its own error is 1/√12800 < 1 %)."""
        from openrlhf.models.loading import _fresh_head

        weights = torch.cat([_fresh_head(HIDDEN, seed=seed) for seed in range(200)])
        assert weights.shape == (200, HIDDEN)
        assert abs(weights.std().item() * (HIDDEN + 1) - 1) < 0.05
        torch.testing.assert_close(load(policy_folder, seed=7).head.weight.data, weights[7:8])

    def test_a_reward_model_keeps_its_own(self, tmp_path, caplog):
        write_classifier(tmp_path)
        with caplog.at_level(logging.INFO, logger="openrlhf.models.loading"):
            model = load(tmp_path)
        assert torch.equal(model.head.weight, load_file(tmp_path / "model.safetensors")["score.weight"])
        assert model.head_prefix == "score"
        assert "random" not in caplog.text

    def test_unless_a_fresh_one_is_asked_for(self, tmp_path):
        write_classifier(tmp_path)
        assert not torch.equal(load(tmp_path).head.weight, load(tmp_path, fresh_head=True).head.weight)

    def test_found_in_sharded_and_in_pickled_files(self, tmp_path):
        torch.manual_seed(1)
        model = hf.Qwen2ForSequenceClassification(hf.Qwen2Config(**SMALL, num_labels=1))
        model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
        assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
        write_classifier(tmp_path / "pickled")
        torch.save(model.state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
        (tmp_path / "pickled" / "model.safetensors").unlink()
        for name in ("sharded", "pickled"):
            assert torch.equal(load(tmp_path / name).head.weight, model.score.weight), name

    def test_another_name_by_the_flag(self, tmp_path):
        write_classifier(tmp_path)
        expected = load(tmp_path).head.weight
        rename_head(tmp_path, "value_head")
        model = load(tmp_path, value_head_prefix="value_head")
        assert torch.equal(model.head.weight, expected)
        assert model.head_prefix == "value_head"

    def test_a_name_stored_with_the_model_wins_over_the_flag(self, tmp_path):
        write_classifier(tmp_path)
        expected = load(tmp_path).head.weight
        rename_head(tmp_path, "value_head")
        edit_config(tmp_path, value_head_prefix="value_head")
        assert torch.equal(load(tmp_path, value_head_prefix="score").head.weight, expected)

    def test_a_head_on_a_class_of_its_own_is_found_by_its_name(self, tmp_path, policy_folder):
        """Nothing in config.json says reward model; the tensor is there all the same."""
        write_language_model(tmp_path, hf.Qwen2Config(**SMALL))
        tensors = load_file(tmp_path / "model.safetensors")
        tensors["score.weight"] = torch.full((1, HIDDEN), 0.5)
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        assert load(tmp_path).head.weight.unique().tolist() == [0.5]

    def test_a_wrong_name_is_refused_with_the_names_that_are_there(self, tmp_path):
        write_classifier(tmp_path)
        rename_head(tmp_path, "value_head")
        with pytest.raises(ModelLoadError) as caught:
            load(tmp_path)
        assert str(caught.value).startswith(f"--reward.model_name_or_path {tmp_path}: there is no score.weight")
        assert "Scalar heads in its files: value_head. Set --ds.value_head_prefix" in str(caught.value)

    def test_a_wrong_stored_name_is_to_be_mended_where_it_is_stored(self, tmp_path):
        write_classifier(tmp_path)
        edit_config(tmp_path, value_head_prefix="v")
        with pytest.raises(ModelLoadError, match=r"no v\.weight.*score\. Set value_head_prefix in its config\.json"):
            load(tmp_path)

    def test_a_language_model_is_no_reward_model(self, policy_folder):
        with pytest.raises(ModelLoadError, match=r"no score\.weight.*no scalar head at all.*train_rm"):
            load(policy_folder, fresh_head=False)

    def test_two_labels(self, tmp_path):
        with pytest.raises(ModelLoadError, match=r"score\.weight has shape \[2, 32\], num_labels 2.*num_labels 1"):
            load(write_classifier(tmp_path, labels=2))

    def test_a_bias(self, tmp_path):
        write_classifier(tmp_path)
        tensors = load_file(tmp_path / "model.safetensors") | {"score.bias": torch.ones(1)}
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelLoadError, match="has a bias"):
            load(tmp_path)

    def test_a_body_under_foreign_names_is_refused_not_made_up(self, tmp_path):
        write_classifier(tmp_path)
        tensors = {
            f"net.{name}" if name != "score.weight" else name: t
            for name, t in load_file(tmp_path / "model.safetensors").items()
        }
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelLoadError, match=r"lack \d+ tensors of a Qwen2Model"):
            load(tmp_path)


class TestLoading:
    def test_dropout_is_off_and_weights_come_in_the_asked_type(self, tmp_path):
        write_classifier(tmp_path, attention_dropout=0.5)
        model = load(tmp_path, dtype=torch.bfloat16)
        assert model.training
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        _, _, tokens = pack([12])
        first, second = (model(tokens, positions=sequence_ends(tokens)) for _ in range(2))
        assert torch.equal(first, second)
        assert first.dtype == torch.float32

    def test_transformers_does_not_report_heads_that_stay_behind(self, policy_folder, capfd):
        load(policy_folder)
        assert "lm_head" not in capfd.readouterr().err

    def test_stored_statistics_normalise_when_asked_for(self, tmp_path):
        write_classifier(tmp_path, mean=0.5, std=2)
        assert load(tmp_path).normalisation is None
        assert load(tmp_path, normalise=True).normalisation == Normalisation(0.5, 2.0)

    @pytest.mark.parametrize(
        ("stored", "complaint"),
        [
            ({}, "mean there is missing"),
            ({"mean": 0.5}, "std there is missing"),
            ({"mean": 0.5, "std": 0.0}, "std there is 0.0"),
            ({"mean": "x", "std": 1.0}, "mean there is 'x'"),
        ],
    )
    def test_statistics_that_cannot_be_used(self, tmp_path, stored, complaint):
        write_classifier(tmp_path, **stored)
        with pytest.raises(ModelLoadError) as caught:
            load(tmp_path, normalise=True)
        assert complaint in str(caught.value)
        assert "--reward.normalize_enable" in str(caught.value)
        assert "train_rm" in str(caught.value)

    def test_errors_name_the_flag_that_was_used(self, tmp_path):
        with pytest.raises(ModelLoadError, match=r"--critic\.model_name_or_path .*no such folder"):
            load(tmp_path / "missing", flag="--critic.model_name_or_path")


class TestExport:
    @pytest.mark.parametrize("prefix", ["score", "value_head"])
    @pytest.mark.parametrize("name", ["qwen2", "llama", "gemma3", "mixtral", "gemma2", "bloom"])
    def test_transformers_classifier_gives_our_scores(self, tmp_path, name, prefix):
        model = loud(load(write_language_model(tmp_path / "policy", FAMILIES[name]()), value_head_prefix=prefix)).eval()
        out = export_value_model(model, None, tmp_path / "a" / "reward")
        classifier = hf.AutoModelForSequenceClassification.from_pretrained(out).eval()
        assert classifier.config.num_labels == 1
        sequences, _, tokens = pack([9, 5, 12, 5])
        with torch.no_grad():
            expected = torch.cat([classifier(s[None]).logits[0] for s in sequences])
            actual = model(tokens, positions=sequence_ends(tokens))
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)

    @pytest.mark.parametrize("name", ["qwen2", "qwen3_moe", "granite", "mamba"])
    def test_what_was_written_comes_back_exactly(self, tmp_path, name):
        """Granite and Mamba have no classifier in transformers: body and head lie side by side."""
        model = loud(load(write_language_model(tmp_path / "policy", FAMILIES[name]()), value_head_prefix="value_head"))
        out = export_value_model(model, None, tmp_path / "reward")
        again = load(out, fresh_head=False)
        assert again.head_prefix == "value_head"
        for (key, a), (other, b) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
            assert key == other
            assert torch.equal(a, b), key

    def test_the_given_name_is_in_the_file_too(self, tmp_path, policy_folder):
        """A reader that was told `value_head` need not know what the family calls it."""
        model = load(policy_folder, value_head_prefix="value_head")
        out = export_value_model(model, None, tmp_path / "reward")
        tensors = load_file(out / "model.safetensors")
        assert torch.equal(tensors["value_head.weight"], model.head.weight)
        assert torch.equal(tensors["score.weight"], model.head.weight)

    def test_the_configuration_is_the_users_and_says_what_we_know(self, tmp_path):
        write_classifier(tmp_path / "model", attention_dropout=0.25, mean=0.0, std=1.0)
        model = load(tmp_path / "model", normalise=True, dtype=torch.bfloat16)
        export_value_model(model, None, tmp_path / "own")
        export_value_model(model, None, tmp_path / "new", statistics=Normalisation(0.5, 2.0))
        for folder, statistics in (("own", (0.0, 1.0)), ("new", (0.5, 2.0))):
            written = json.loads((tmp_path / folder / "config.json").read_text())
            assert (written["mean"], written["std"]) == statistics
            assert written["value_head_prefix"] == "score"
            assert written["architectures"] == ["Qwen2ForSequenceClassification"]
            assert written["attention_dropout"] == 0.25
            assert written["dtype"] == "float32"
            assert ATTENTION not in json.dumps(written)
        assert load(tmp_path / "new", normalise=True).normalisation == Normalisation(0.5, 2.0)

    @pytest.mark.parametrize("name", ["qwen2", "granite"])
    def test_it_is_written_in_the_dtype_it_came_in(self, tmp_path, name):
        """As a classifier, and where the family has none."""
        folder = write_language_model(tmp_path / "policy", FAMILIES[name]())
        hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
        out = export_value_model(loud(load(folder, dtype=torch.float32)), None, tmp_path / "reward")
        assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
        assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"

    def test_exporting_leaves_the_model_as_it_was(self, tmp_path, policy_folder):
        model = loud(load(policy_folder))
        _, _, tokens = pack([9, 5])
        before = model(tokens, positions=sequence_ends(tokens))
        export_value_model(model, None, tmp_path / "reward")
        assert model.model.config._attn_implementation == ATTENTION
        assert torch.equal(model(tokens, positions=sequence_ends(tokens)), before)

    def test_weights_can_be_handed_in(self, tmp_path, policy_folder):
        model = load(policy_folder)
        ones = {name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()}
        out = export_value_model(model, None, tmp_path / "reward", state_dict=ones)
        classifier = hf.AutoModelForSequenceClassification.from_pretrained(out)
        assert all(bool((p == 1).all()) for p in classifier.parameters())

    def test_a_failed_export_leaves_the_older_one_and_no_debris(self, tmp_path, policy_folder):
        class Broken:
            def save_pretrained(self, folder):
                raise OSError("disk full")

        target = tmp_path / "reward"
        target.mkdir()
        (target / "kept.txt").write_text("old")
        with pytest.raises(OSError, match="disk full"):
            export_value_model(load(policy_folder), Broken(), target)
        assert (target / "kept.txt").exists()
        assert [p.name for p in tmp_path.iterdir()] == ["reward"]
