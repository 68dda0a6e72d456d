"""What a user sees before a run: help, the printed configuration, and errors that lead from other tools' names to ours."""

import re
import subprocess
import sys

import pytest
import yaml

from openrlhf.cli import main as console
from openrlhf.config import ROOTS, ConfigError, parse, to_dict
from openrlhf.config.aliases import vocabulary
from openrlhf.config.help import THAT_MATTER, topics
from openrlhf.config.legacy_flags import FOREIGN, HINTS
from openrlhf.config.schema import flags_of, value_at


def printed(capsys, command: str, *words: str, name: str | None = None) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as done:
        parse(command, words, name=name)
    assert done.value.code == 0
    return capsys.readouterr().out


def error(command: str, text: str, *, name: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(command, text.split(), name=name)
    return str(caught.value)


# ----------------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize("command", THAT_MATTER)
def test_help_begins_with_the_flags_that_matter_one_line_each(command, capsys):
    text = printed(capsys, command, "--help", name="openrlhf x")
    assert text.startswith("usage: openrlhf x [FLAGS]\n")
    assert max(len(line) for line in text.splitlines()) <= 80
    shown = re.findall(r"^  --([\w.]+)", text, flags=re.MULTILINE)
    chosen = [path for flags in THAT_MATTER[command].values() for path in flags]
    assert shown == [*chosen, "config", "print_config"]
    assert set(chosen) <= set(flags_of(command))
    assert f"--help all shows all {len(flags_of(command))} flags" in text


def test_twenty_flags_of_rl_matter(capsys):
    assert sum(len(flags) for flags in THAT_MATTER["train_ppo_ray"].values()) == 20
    text = printed(capsys, "train_ppo_ray", "-h")
    assert "\n  --rollout.batch_size                  prompts per step [1024]\n" in text


@pytest.mark.parametrize("command", ROOTS)
def test_help_all_has_every_flag_in_groups(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for words in (["--help", "all"], ["--help=all"]):
        text = printed(capsys, command, *words)
        names = re.findall(r"^  --([\w.]+)", text, flags=re.MULTILINE)
        assert set(flags_of(command)) <= set(names)
        assert len(names) == len(set(names))
        headings = re.findall(r"^([a-z]+):$", text, flags=re.MULTILINE)
        assert set(topics(command)) - {"all"} <= set(headings)
        # One with many choices is longer than a line.
        assert all(len(line) <= 80 for line in text.splitlines() if not line.startswith("  --"))


def test_help_of_a_section_has_that_section(capsys):
    text = printed(capsys, "train_ppo_ray", "--help", "vllm")
    names = set(re.findall(r"^  --([\w.]+)", text, flags=re.MULTILINE))
    assert names == {path for path in flags_of("train_ppo_ray") if path.startswith("vllm.")}


def test_a_few_flags_are_all_shown(capsys):
    """Whoever has no list of flags that matter shows all of them."""
    assert set(ROOTS) - set(THAT_MATTER) == {"serve_rm", "lora_combiner"}
    assert "--max_query_chars" in printed(capsys, "serve_rm", "--help")


# ------------------------------------------------------------------------------------------ printed configuration


def test_the_printed_configuration_marks_what_was_set(capsys, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("actor: {adam: {lr: 2.0e-6, eps: 1.0e-8}}\n")
    words = ["--config", str(file), "--pretrain", "m", "--adam_betas", "0.9", "0.99", "--clip_eps_high", "0.3"]
    words += ["--input_template", "User: {}\nAssistant: ", "--use_icepop", "--use_wandb", "SECRET"]
    text = printed(capsys, "train_ppo_ray", *words, "--print_config")
    marked = sorted(line.strip() for line in text.splitlines() if "# set: " in line)
    assert marked == sorted(
        [
            "model_name_or_path: m  # set: --pretrain",
            "betas:  # set: --adam_betas",  # the actor's
            "betas:  # set: --adam_betas",  # the critic's
            f"lr: 2.0e-06  # set: {file}: actor.adam.lr",
            "eps_clip_low_high:  # set: --clip_eps_high",
            "is_correction_enable: true  # set: --use_icepop",
            "is_correction_type: icepop  # set: --use_icepop",
            "# set: --input_template",  # above a text of two lines
            "key: <redacted>  # set: --use_wandb",
        ]
    )
    assert "SECRET" not in text
    config = parse("train_ppo_ray", words)
    again = yaml.safe_load(text)
    assert again == to_dict(config)
    assert again["data"]["input_template"] == "User: {}\nAssistant: "


@pytest.mark.parametrize("command", ROOTS)
def test_what_was_printed_gives_the_same_configuration(command, capsys, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(printed(capsys, command, "--print_config"))
    capsys.readouterr()
    first, again = parse(command, []), parse(command, ["--config", str(file)])
    assert to_dict(again) | {"logger": None} == to_dict(first) | {"logger": None}
    assert "# set" not in printed(capsys, command, "--config", str(file), "--print_config")


# ---------------------------------------------------------------------------------------- names of other tools


@pytest.mark.parametrize("name", FOREIGN)
def test_another_tools_name_sets_our_flag(name):
    commands = [command for command in ROOTS if name in vocabulary(command).fields]
    assert commands
    for command in commands:
        (spec, *_) = vocabulary(command).fields[name]
        ours = FOREIGN[name].split()
        own = name in spec.flat_names or name == spec.path
        assert own or spec.path in ours
        default = (
            spec.shape.choices[-1] if spec.shape.choices else {int: "7", float: "0.5", str: "linear"}[spec.shape.kind]
        )
        value = value_at(parse(command, [f"--{name}", default]), spec.path)
        assert value in (spec.shape.kind(default), (default,))


def test_what_other_tools_users_type_first():
    words = "--model_name_or_path m --dataset_name d --num_generations 4 --max_completion_length 64 --output_dir o"
    words += " --learning_rate 1e-5 --per_device_train_batch_size 2 --num_train_epochs 3 --adv_estimator grpo"
    config = parse("train_ppo_ray", words.split())
    assert (config.actor.model_name_or_path, config.data.prompt_dataset, config.ckpt.output_dir) == ("m", "d", "o")
    assert (config.rollout.n_samples_per_prompt, config.rollout.max_new_tokens) == (4, 64)
    assert (config.actor.adam.lr, config.train.micro_batch_size, config.train.num_episodes) == (1e-5, 2, 3)
    assert config.algo.advantage.estimator == "group_norm"
    sft = parse("train_sft", ["--num_train_epochs", "3", "--max_seq_length", "100", "--lora_r", "8"])
    assert (sft.train.max_epochs, sft.data.max_len, sft.ds.lora.rank) == (3, 100, 8)


@pytest.mark.parametrize(
    ("word", "estimator"),
    [
        ("grpo", "group_norm"),
        ("ppo", "gae"),
        ("reinforce++", "reinforce"),
        ("reinforce++-baseline", "reinforce_baseline"),
        ("reinforce_plus_plus", "reinforce"),
        ("reinforce_plus_plus_baseline", "reinforce_baseline"),
        ("rloo", "rloo"),
    ],
)
def test_estimators_have_other_names_elsewhere(word, estimator):
    assert parse("train_ppo_ray", ["--advantage_estimator", word]).algo.advantage.estimator == estimator


@pytest.mark.parametrize("name", HINTS)
def test_a_hint_names_flags_of_a_command_that_does_not_know_the_name(name):
    told = [command for command in ROOTS if vocabulary(command).hint(name) and name not in vocabulary(command).names()]
    assert told, "no command would show it"
    for command in told:
        assert error(command, f"--{name} x") == f"--{name} is unknown; {HINTS[name]}"


def test_settings_as_verl_writes_them_are_explained():
    text = "algorithm.adv_estimator=grpo +data.train_batch_size=8 reward.api_key=SECRET"
    assert error("train_ppo_ray", text).splitlines() == [
        "algorithm.adv_estimator=… is not a flag; use --algo.advantage.estimator",
        "data.train_batch_size=… is not a flag; use --rollout.batch_size",
        "reward.api_key=… is not a flag; write --reward.api_key with its value",
    ]


# ------------------------------------------------------------------------------------------- the shell's command


def test_errors_have_the_name_that_the_user_typed(capsys):
    assert console.main(["rl", "--ipo"]) == 2
    assert capsys.readouterr().err == (
        "openrlhf rl: error: --ipo belongs to openrlhf dpo, not to openrlhf rl; --help all lists all flags\n"
    )
    assert console.main(["sft"]) == 2
    assert all(line.startswith("openrlhf sft: error: --") for line in capsys.readouterr().err.splitlines())
    assert error("train_ppo_ray", "--ipo").startswith("--ipo belongs to train_dpo, not to train_ppo_ray;")


@pytest.mark.parametrize(("module", "word"), [("train_ppo_ray", "rl"), ("serve_rm", "serve-rm"), ("train_dpo", "dpo")])
def test_a_modules_name_is_a_command_too(module, word, capsys):
    with pytest.raises(SystemExit):
        console.main([module, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: openrlhf {word} [FLAGS]")


@pytest.mark.parametrize("name", console.ELSEWHERE)
def test_commands_that_are_not_here_lead_somewhere(name, capsys):
    assert console.main([name, "--pretrain", "m"]) == 2
    line = capsys.readouterr().err
    assert line == f"openrlhf {name}: error: there is no such command; use {console.ELSEWHERE[name]}\n"
    for word in re.findall(r"openrlhf ([a-z-]+)", console.ELSEWHERE[name]):
        assert word in console.COMMANDS
    for flag in re.findall(r"--([\w.]+\w)", console.ELSEWHERE[name]):
        assert any(flag in vocabulary(command).names() for command in ROOTS)


def test_a_typo_in_a_command_is_led_back(capsys):
    assert console.main(["train_pp_ray"]) == 2
    assert "did you mean train_ppo_ray?" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_error():
    """As `openrlhf doctor … | head`."""
    program = (
        "import sys, types\n"
        "from openrlhf.cli import main as console\n"
        "console.COMMANDS['talk'] = ('talk', '')\n"
        "sys.modules['talk'] = types.SimpleNamespace(main=lambda rest: print('word ' * 10**6))\n"
        "raise SystemExit(console.main(['talk']))\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(4) == b"word"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 1
