"""YAML in and out: `--config`, `--print_config`, secrets."""

import pytest
import yaml

from openrlhf.config import ROOTS, ConfigError, parse, to_dict, to_yaml


def printed(command, words, capsys):
    with pytest.raises(SystemExit) as done:
        parse(command, [*words, "--print_config"])
    assert done.value.code == 0
    return capsys.readouterr().out


LINES = {
    "train_ppo_ray": "--pretrain m --l2 0.1 --clip_eps_low 0.1 --reward_clip_range 3 --advantage_estimator rloo "
    "--temperature 0.5 --max_ckpt_mem inf --actor_learning_rate 1e-7 --target_modules q k --reward.weights 1 2",
    "train_sft": "--pretrain m --optim muon --muon.no_nesterov --dataset a,b --dataset_probs 0.25,0.75",
    "train_rm": "--margin_loss --loss logexp",
    "train_dpo": "--beta 0.5 --ref_offload --no-flash_attn",
    "serve_rm": "--port 80 --reward_pretrain r",
    "lora_combiner": "--model_path a --lora_path b --output_path c --is_rm",
}


@pytest.mark.parametrize("command", ROOTS)
@pytest.mark.parametrize("given", [False, True], ids=["defaults", "given"])
def test_what_print_config_prints_gives_the_same_configuration(command, given, tmp_path, capsys):
    words = LINES[command].split() if given else []
    file = tmp_path / "config.yaml"
    file.write_text(printed(command, words, capsys))
    assert parse(command, ["--config", str(file)]) == parse(command, words)


def test_print_config_needs_neither_model_nor_data(capsys):
    tree = yaml.safe_load(printed("train_ppo_ray", ["--actor_learning_rate", "2e-6"], capsys))
    assert tree["actor"]["adam"]["lr"] == 2e-6
    assert tree["actor"]["model_name_or_path"] is None


def test_flags_override_the_file_and_the_file_overrides_defaults(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "actor:\n  adam.lr: 1e-4\n  model_name_or_path: m\n"
        "rollout.batch_size: 256\ntemperature: 0.5\nbf16: true\nds: {lora: {target_modules: [q, k]}}\ncritic:\n"
    )
    config = parse("train_ppo_ray", ["--config", str(file), "--rollout_batch_size", "128"])
    assert config.actor.adam.lr == 1e-4  # YAML 1.1 reads 1e-4 as text; it is a number here
    assert config.actor.model_name_or_path == "m"
    assert config.rollout.batch_size == 128
    assert config.rollout.temperature == 0.5
    assert config.ds.param_dtype == "bf16"
    assert config.ds.lora.target_modules == ("q", "k")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("actor: {adam: {lrr: 1}}", "key actor.adam.lrr is unknown; did you mean --actor.adam.lr?"),
        ("rolout: {batch_size: 1}", "key rolout is unknown; did you mean --"),
        ("actor: 3", "key actor is unknown"),
        ("rollout: {batch_size: {a: 1}}", "rollout.batch_size takes a value, not a mapping"),
        ("rollout: {batch_size: true}", "rollout.batch_size: expected int, got True"),
        ("rollout: {batch_size: 2.5}", "rollout.batch_size: expected a whole number, got 2.5"),
        ("rollout: {batch_size: }", "rollout.batch_size: needs a value"),
        ("actor_learning_rate: 1\nactor.adam.lr: 2", "both set actor.adam.lr, to 1.0 and 2.0"),
        ("- 1", "must be a mapping"),
        ("a: [", "is not YAML"),
        ("rollout: {temperature: 0}", "--rollout.temperature 0.0: must be more than 0"),
    ],
)
def test_errors_in_a_file_name_the_file_or_the_flag(text, expected, tmp_path):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        parse("train_ppo_ray", ["--config", str(file)])
    assert expected in str(caught.value)
    assert "bad.yaml" in str(caught.value) or "--rollout.temperature" in str(caught.value)


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match=r"--config /no/such\.yaml: cannot be read"):
        parse("train_sft", ["--config", "/no/such.yaml"])


def test_an_empty_file_changes_nothing(tmp_path):
    file = tmp_path / "empty.yaml"
    file.write_text("")
    assert parse("train_sft", ["--config", str(file)]) == parse("train_sft", [])


@pytest.mark.parametrize("command", ["train_sft", "train_rm", "train_dpo", "train_ppo_ray"])
def test_the_wandb_key_is_used_but_never_shown(command, tmp_path, capsys):
    config = parse(command, ["--use_wandb", "SECRET"])
    assert config.logger.wandb.key == "SECRET"
    for text in (repr(config), to_yaml(config), str(to_dict(config))):
        assert "SECRET" not in text
    assert to_dict(config)["logger"]["wandb"]["key"] == "<redacted>"

    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    again = parse(command, ["--config", str(file)])
    assert again.logger.wandb.key is None
    assert "logger.wandb.key is <redacted>" in capsys.readouterr().err
    assert parse(command, ["--config", str(file), "--use_wandb", "SECRET"]) == config


def test_the_server_key_is_never_shown():
    config = parse("serve_rm", ["--api_key", "SECRET"])
    assert config.api_key == "SECRET"
    assert "SECRET" not in repr(config) + to_yaml(config)
