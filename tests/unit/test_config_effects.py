"""Every flag of every command has an effect, or says that it has none: a walk over all pairs of the two.

A flag is read outside `openrlhf.config`; or it declares why it does nothing (`Flag.no_effect`). What it depends on is
declared as well (`Flag.only_with`), and a user who gives the flag without it is told so.
"""

import json
import re
from pathlib import Path

import pytest
from config_reads import flags_read

from openrlhf.config import ROOTS, parse, require_runnable
from openrlhf.config.effects import holds, newly_without_effect, parts, why_without_effect
from openrlhf.config.schema import flags_of, value_at

KNOWN = json.loads((Path(__file__).parent / "data" / "flags.json").read_text())
PAIRS = [(command, path) for command in ROOTS for path in flags_of(command)]

# condition -> flags with which it does not hold, and with which it does. Where commands differ, by command.
CONDITIONS = {
    "actor.policy_loss_type!=gspo,luspo,vespo,dppo_tv,dppo_kl": ("--actor.policy_loss_type gspo", ""),
    "algo.advantage.is_correction_type!=kpop": ("--algo.advantage.is_correction_type kpop", ""),
    "!actor.eps_clip_low_high": ("--actor.eps_clip_low_high 0.1 0.2", ""),
    "!data.apply_chat_template": ("--data.apply_chat_template", ""),
    "!model.ipo_enable": ("--model.ipo_enable", ""),
    "!model.pretrain_mode_enable": ("--model.pretrain_mode_enable", ""),
    "!reference_is_base": ("--ds.lora.rank 4", ""),
    "!reward.remote_url|reward.weights": ("--reward.remote_url r.py", "--reward.remote_url r.py --reward.weights 1 1"),
    "!train.async_enable": ("--train.async_enable", ""),
    "!train.dynamic_batch_enable": ("--train.dynamic_batch_enable", ""),
    "!uses_group_baseline": ("--algo.advantage.estimator rloo", "--algo.advantage.estimator reinforce"),
    "uses_group_baseline": ("--algo.advantage.estimator reinforce", "--algo.advantage.estimator rloo"),
    "corrects_off_policy": ("", "--algo.advantage.is_correction_enable"),
    "!rollout.exact": ("--rollout.exact", ""),
    "cuts_distributions": ("", "--train.agent_func_path a.py"),
    "algo.advantage.estimator=pass_at_k": ("", "--algo.advantage.estimator pass_at_k"),
    "algo.dynamic_filtering_enable": ("", "--algo.dynamic_filtering_enable --rollout.n_samples_per_prompt 2"),
    "algo.kl.target": ("", "--algo.kl.target 0.1"),
    "asks_reward_servers": ("--reward.remote_url r.py", "--reward.remote_url http://h/get_reward"),
    "ckpt.uses_folder": ("", "--ckpt.save_steps 5"),
    "data.apply_chat_template": ("", "--data.apply_chat_template"),
    "data.curriculum!=off": ("", "--data.curriculum success"),
    "data.curriculum=difficulty": ("--data.curriculum success", "--data.curriculum difficulty"),
    "data.curriculum=difficulty,solved_last": ("--data.curriculum success", "--data.curriculum difficulty"),
    "data.curriculum=success,difficulty": ("--data.curriculum solved_last", "--data.curriculum success"),
    "data.max_images_per_prompt": ("", "--data.max_images_per_prompt 1"),
    "ds.lora.rank": ("", "--ds.lora.rank 4"),
    "ds.param_dtype!=fp32": ("--ds.param_dtype fp32", "--ds.param_dtype bf16"),
    "ds.ring_attn_size!=1": ("", "--ds.ring_attn_size 2"),
    "ds.zero_stage=3": ("--ds.zero_stage 2", "--ds.zero_stage 3"),
    "eval.dataset": ("", "--eval.dataset d"),
    "eval.steps|eval.at_start": ("", "--eval.at_start"),
    "logger.wandb.key": ("", "--logger.wandb.key K"),
    "model.loss_type!=kto,prm": ("--model.loss_type kto", ""),
    "model.loss_type=prm": ("", "--model.loss_type prm"),
    "model.loss_type=kto": ("", "--model.loss_type kto"),
    "model.loss_type=sigmoid": ("--model.loss_type logexp", ""),
    "reward.overlong_buffer_len": ("", "--reward.overlong_buffer_len 8"),
    "reward.remote_url": ("", "--reward.remote_url r.py"),
    "reward.steps": ("--reward.model_name_or_path m", "--reward.model_name_or_path m --reward.steps token"),
    "reward.steps=separator": ("--reward.steps token", "--reward.steps separator"),
    "reward.remote_url|reward.model_name_or_path": ("", "--reward.remote_url r.py,s.py"),
    "train.agent_func_path": ("", "--train.agent_func_path a.py"),
    "train.async_enable": ("", "--train.async_enable"),
    "train.backend=deepspeed": ("--train.backend torch", "--train.backend deepspeed"),
    "train.colocate_all|train.launcher=local": ("--train.launcher ray", "--train.launcher ray --train.colocate_all"),
    "train.dynamic_batch_enable|uses_reward_model": ("", "--train.dynamic_batch_enable"),
    "train.enable_ema": ("", "--train.enable_ema"),
    "train.launcher=ray": ("--train.launcher local", "--train.launcher ray"),
    "!plays_world": ("--train.agent_func_path openrlhf.worlds.gymnasium", ""),
    "plays_agent": ("--train.agent_func_path openrlhf.worlds.gymnasium", "--train.agent_func_path a.py"),
    "plays_world": ("", "--train.agent_func_path openrlhf.worlds.gymnasium"),
    "measures_world": ("--eval.dataset a.jsonl", "--eval.dataset openrlhf.worlds.gymnasium"),
    "uses_world": ("", "--train.agent_func_path openrlhf.worlds.gymnasium"),
    "uses_critic": ("--algo.advantage.estimator rloo", ""),
    "uses_critic|uses_reward_model": ("--algo.advantage.estimator rloo", ""),
    "uses_reference": ("--algo.kl.init_coef 0", ""),
    "teacher.loss": ("", "--teacher.loss js"),
    "!teacher.loss": ("--teacher.loss js", ""),
    "teacher.remote_url": ("", "--teacher.remote_url http://h"),
    "teacher_path": ("--teacher.policy current --teacher.prompt_key hint", "--teacher.model_name_or_path t"),
    "uses_teacher": ("", "--teacher.model_name_or_path t --algo.advantage.estimator reinforce"),
    "uses_reward_model": ("--reward.remote_url r.py", "--reward.model_name_or_path m"),
    "vllm.speculation": ("", "--vllm.speculation ngram"),
    "vllm.num_engines!=0": ("--vllm.num_engines 0", "--vllm.num_engines 1"),
    "whitens_advantages": ("--algo.advantage.estimator group_norm", ""),
}
for owner in ("", "actor.", "critic.", "model."):
    CONDITIONS |= {
        f"{owner}gradient_checkpointing_enable": ("", f"--{owner}gradient_checkpointing_enable"),
        f"{owner}lr_scheduler!=constant": (f"--{owner}lr_scheduler constant", ""),
        f"{owner}lr_scheduler=cosine_with_min_lr,cosine_warmup_with_min_lr": (f"--{owner}lr_scheduler linear", ""),
        f"{owner}optim=muon": ("", f"--{owner}optim muon"),
        f"{owner}policy_loss_type!=sapo,vespo,kl_cov": (f"--{owner}policy_loss_type sapo", ""),
    }

# A value that differs from the default, where the usual one is not allowed.
SAMPLES = {
    "actor.dual_clip": "1.5",
    "actor.eps_clip_low_high": "0.1 0.3",
    "actor.lr_scheduler": "linear",
    "critic.lr_scheduler": "linear",
    "lr_scheduler": "linear",
    "ckpt.max_num": "5",
    "data.chat_template_kwargs": '{"think":true}',
    "data.dataset_probs": "1.0",
    "data.input_template": "Q:{}",
    "data.prompt_probs": "1.0",
    "ds.attn_implementation": "sdpa",
    "ds.grad_accum_dtype": "bf16",
    "reward.clip_range": "-2 2",
    "reward.remote_url": "r.py",
    "reward.weights": "1 1",
    "teacher.remote_url": "http://h",
    "vllm.sync_backend": "gloo",
    "world.options": "key=1",
}
# What else must be said for the flag to be accepted at all.
COMPANIONS = {
    "algo.dynamic_filtering_enable": "--rollout.n_samples_per_prompt 4",
    "data.multiturn": "--data.apply_chat_template",
    "rollout.abort_stragglers": "--rollout.vllm_generate_batch_size 2000",
    "rollout.vllm_generate_batch_size": "--train.async_enable",
    "teacher.policy": "--teacher.prompt_key hint",
    "train.partial_rollout_enable": "--train.async_enable",
}


def sample(command: str, path: str) -> list[str]:
    """The flag with another value than its default."""
    spec = flags_of(command)[path]
    if spec.shape.is_switch:
        return [f"--{path}", "false" if spec.default else "true"]
    if path in SAMPLES:
        return [f"--{path}", *SAMPLES[path].split()]
    if spec.shape.choices:
        return [f"--{path}", next(choice for choice in reversed(spec.shape.choices) if choice != spec.default)]
    one, two = {int: ("3", "4"), float: ("0.25", "0.75"), str: ("word", "other")}[spec.shape.kind]
    return [f"--{path}", one] if spec.shape.count == 1 else [f"--{path}", one, two]


def notes(capsys, command: str, words: list[str]) -> list[str]:
    capsys.readouterr()
    parse(command, words)
    return capsys.readouterr().err.splitlines()


def about(lines: list[str], path: str) -> list[str]:
    """Those that say that this flag has no effect."""
    first = [line.partition(" not used")[0].partition(" nothing: ")[0] for line in lines]
    return [line for line, start in zip(lines, first, strict=True) if start != line and f"--{path}" in start.split()]


def test_the_walk_has_every_flag_that_users_know():
    known = {(command, row["name"]) for row in KNOWN for command in row["commands"]}
    assert len(known) == 421
    assert {(command, name) for command, name in known if not name.endswith("muon.no_nesterov")} <= set(PAIRS)


@pytest.mark.parametrize(("command", "path"), PAIRS, ids=[" ".join(pair) for pair in PAIRS])
def test_a_flag_has_exactly_one_answer(command, path, capsys):
    spec = flags_of(command)[path]
    given = [*COMPANIONS.get(path, "").split(), *sample(command, path)]
    is_read = (command, path) in flags_read()
    if spec.flag.no_effect:
        assert not is_read, "it is read: does it really do nothing?"
        (line,) = about(notes(capsys, command, given), path)
        assert line == f"note: --{path} does nothing: {spec.flag.no_effect}"
        return
    assert is_read, "nothing reads it: build it, or declare no_effect"
    if not spec.only_with:
        assert about(notes(capsys, command, given), path) == []


MODEL_AND_DATA = {"model.model_name_or_path": "m", "data.dataset": "d"}
RUNS = {
    "train_ppo_ray": {"actor.model_name_or_path": "m", "data.prompt_dataset": "d", "reward.remote_url": "r.py"},
    "train_sft": MODEL_AND_DATA,
    "train_rm": MODEL_AND_DATA,
    "train_dpo": MODEL_AND_DATA,
    "serve_rm": {"reward.model_name_or_path": "m"},
    "lora_combiner": {"model_path": "m", "lora_path": "l", "output_path": "o"},
}
"""A run of each command that could begin."""
# What else must be said for a run with the flag to be possible, in the commands that have it.
RUNNABLE_WITH = {
    "ds.load_in_4bit": "--ds.lora.rank 4",
    "ds.use_universal_ckpt": "--ckpt.load_enable",
    "rollout.batch_size": "--train.batch_size 3",
}
DOCUMENTED = [(command, row) for row in KNOWN for command in row["commands"]]


def has(command: str, words: str) -> bool:
    """Whether the command has the first flag of these."""
    return words.split()[0].removeprefix("--") in flags_of(command)


def run_without(command: str, given: set[str]) -> list[str]:
    """The words of a run that could begin, but for flags that are given otherwise. A reward model judges alone."""
    if "reward.model_name_or_path" in given:
        given = given | {"reward.remote_url"}
    return [word for flag, value in RUNS[command].items() if flag not in given for word in (f"--{flag}", value)]


@pytest.mark.parametrize(
    ("command", "row"), DOCUMENTED, ids=[f"{command} {row['name']}" for command, row in DOCUMENTED]
)
def test_a_documented_flag_is_parsed_accepted_and_read(command, row, capsys):
    """With another value than its default, and with what it depends on: the run is not refused, nothing says that the
    flag is in vain, and the program reads it; or the flag is documented as one that changes nothing."""
    is_opposite = row["name"].endswith(".no_nesterov")
    path = row["name"].replace(".no_nesterov", ".nesterov")
    spec = flags_of(command)[path]
    values = [] if is_opposite else sample(command, path)[1:]
    beside = [CONDITIONS[one][1] for one in spec.only_with if applies(command, one)]
    beside += [others for others in (COMPANIONS.get(path), RUNNABLE_WITH.get(path)) if others]
    words = " ".join(others for others in beside if others and has(command, others)).split()
    words += run_without(command, {path, *(word.removeprefix("--") for word in words)})
    for name in (row["name"], *row["flat"]):
        lines = notes(capsys, command, [*words, f"--{name}", *values])
        config = parse(command, [*words, f"--{name}", *values])
        assert value_at(config, path) != spec.default
        require_runnable(config)
        if spec.flag.no_effect:
            assert spec.flag.help.startswith("accepted; "), "docs/flags.md says that it changes nothing"
            assert len(about(lines, path)) == 1
        else:
            assert about(lines, path) == []
            assert (command, path) in flags_read()


def applies(command: str, condition: str) -> bool:
    """Whether it can fail: a condition on a flag that a command does not have holds there."""
    try:
        return bool([value_at(ROOTS[command](), name) for _, name, _ in parts(condition)])
    except AttributeError:
        return False


DEPENDENT = [
    (command, path, condition)
    for command, path in PAIRS
    for condition in flags_of(command)[path].only_with
    if applies(command, condition)
]


@pytest.mark.parametrize(("command", "path", "condition"), DEPENDENT, ids=[" ".join(one) for one in DEPENDENT])
def test_a_flag_without_what_it_needs_is_noted_once(command, path, condition, capsys):
    others = [one for one in flags_of(command)[path].only_with if one != condition and applies(command, one)]
    said = " ".join([COMPANIONS.get(path, ""), *(CONDITIONS[one][1] for one in others)]).split()
    without, with_it = (words.split() for words in CONDITIONS[condition])
    flag = sample(command, path)
    (line,) = about(notes(capsys, command, [*said, *without, *flag]), path)
    assert line.startswith("note: --")
    named = set(re.findall(r"--([\w.]+\w)", line)) - {path}
    assert named & set(flags_of(command)), "it names what is missing, or what it does not go with"
    assert about(notes(capsys, command, [*said, *with_it, *flag]), path) == []


def test_conditions_name_what_there_is():
    used = {condition for command, path in PAIRS for condition in flags_of(command)[path].only_with}
    for condition in used:
        assert len(parts(condition)) == len(condition.split("|")), f"{condition} cannot be read"
        assert any(applies(command, condition) for command in ROOTS), f"no command has what {condition} names"
    applied = {condition for _, _, condition in DEPENDENT}
    assert applied <= CONDITIONS.keys(), "say in CONDITIONS with which flags a new condition fails and holds"


def test_one_note_for_all_flags_with_one_reason(capsys):
    words = "--advantage_estimator rloo --critic_learning_rate 1e-6 --value_clip 0.2 --critic.max_norm 2"
    assert notes(capsys, "train_ppo_ray", words.split()) == [
        "note: --critic.adam.lr, --critic.value_clip and --critic.max_norm are not used: they need a critic "
        "(--algo.advantage.estimator gae)"
    ]


def test_a_name_for_two_flags_has_an_effect_where_one_of_them_has(capsys):
    """--adam_betas is the actor's and the critic's; without a critic it is still the actor's."""
    shared = ["--advantage_estimator", "rloo", "--adam_betas", "0.9", "0.99", "--lr_scheduler", "linear"]
    assert notes(capsys, "train_ppo_ray", shared) == []
    assert len(notes(capsys, "train_ppo_ray", [*shared, "--critic.adam.eps", "1e-7"])) == 1


def test_what_asks_for_nothing_is_not_noted(capsys):
    """Groups of no workers, switches that are off and flags that are unset, as documents write them."""
    words = "--advantage_estimator rloo --critic_num_nodes 0 --critic_pretrain None --save_value_network false"
    assert notes(capsys, "train_ppo_ray", words.split()) == []


def test_a_default_is_noted_on_the_command_line_but_not_from_a_file(capsys, tmp_path):
    """Whoever writes --lora_alpha 16 believes to train an adapter. A file of --print_config has all the defaults."""
    (line,) = notes(capsys, "train_sft", ["--lora_alpha", "16"])
    assert line == "note: --ds.lora.alpha is not used: it needs --ds.lora.rank"
    file = tmp_path / "c.yaml"
    with pytest.raises(SystemExit):
        parse("train_sft", ["--max_len", "100", "--print_config"])
    file.write_text(capsys.readouterr().out)
    assert notes(capsys, "train_sft", ["--config", str(file)]) == []
    file.write_text("ds: {lora: {alpha: 32}}")
    assert notes(capsys, "train_sft", ["--config", str(file)]) == [line]


def test_what_a_launcher_adds_is_not_noted(capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert notes(capsys, "train_sft", ["--local_rank=3"]) == []
    monkeypatch.delenv("LOCAL_RANK")
    (line,) = notes(capsys, "train_sft", ["--local_rank=3"])
    assert "LOCAL_RANK counts" in line


def test_one_process_of_several_says_it(capsys, monkeypatch):
    for variable in ("RANK", "SLURM_PROCID"):
        monkeypatch.setenv(variable, "1")
        assert notes(capsys, "train_sft", ["--packing_samples"]) == []
        monkeypatch.setenv(variable, "0")
        assert len(notes(capsys, "train_sft", ["--packing_samples"])) == 1


def test_what_is_left_to_the_machine_is_noted_when_it_is_known(capsys):
    """--train.launcher auto may be either: nothing is said when parsing, and the truth when the run begins."""
    words = ["--ds.adam_offload", "--ds.zero_stage", "3", "--vllm.health_timeout", "60", "--ds.lora.alpha", "8"]
    assert len(notes(capsys, "train_ppo_ray", words)) == 1
    left_open = parse("train_ppo_ray", words)
    local = parse("train_ppo_ray", [*words, "--train.launcher", "local", "--vllm.num_engines", "0"])
    assert list(newly_without_effect(left_open, local)) == [
        "--vllm.health_timeout is not used with --vllm.num_engines 0",
        "--ds.zero_stage and --ds.adam_offload are not used: they need --train.launcher ray",
    ]
    on_ray = parse("train_ppo_ray", [*words, "--train.launcher", "ray"])
    assert list(newly_without_effect(left_open, on_ray)) == []
    assert holds(left_open, "train.launcher=ray")
    assert why_without_effect(left_open, "ds.adam_offload") is None


def test_a_run_in_one_process_says_what_it_leaves_out(caplog, monkeypatch):
    from openrlhf.runs.launchers import resolve_launcher

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    caplog.set_level("INFO")
    words = ["--ds.adam_offload", "--vllm.num_engines", "0", "--train.max_restarts", "7"]
    assert resolve_launcher(parse("train_ppo_ray", words)).train.launcher == "local"
    (line,) = caplog.messages
    assert line == "--train.max_restarts and --ds.adam_offload are not used: they need --train.launcher ray"
    assert resolve_launcher(parse("train_ppo_ray", [*words, "--train.launcher", "ray"])).train.launcher == "ray"
    assert caplog.messages == [line]


@pytest.mark.parametrize(
    ("words", "sleeps"),
    [
        ("--train.launcher local", True),
        ("--train.launcher ray --train.colocate_all", True),
        ("--train.launcher ray", False),
        ("--train.launcher ray --train.colocate_all --train.async_enable", False),
        ("--train.launcher local --train.async_enable --train.async_share_device", False),
    ],
)
def test_optimizer_states_leave_devices_that_engines_use_in_turns(words, sleeps, capsys):
    """ds.enable_sleep does it, or a note says that it does nothing, and why."""
    lines = notes(capsys, "train_ppo_ray", ["--ds.enable_sleep", *words.split()])
    assert bool(about(lines, "ds.enable_sleep")) is not sleeps
    assert parse("train_ppo_ray", ["--ds.enable_sleep", *words.split()]).optimizer_sleeps is sleeps
