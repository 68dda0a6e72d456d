"""Spellings: oddities of older documents, shared names, conflicts, unknown and gone names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.config import ROOTS, ConfigError, RLConfig, parse
from openrlhf.config.aliases import vocabulary
from openrlhf.config.legacy_flags import GONE, INERT
from openrlhf.config.schema import flags_of


def rl(text: str) -> RLConfig:
    return parse("train_ppo_ray", text.split())


def error(command: str, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(command, text.split())
    return str(caught.value)


@pytest.mark.parametrize(
    "command", ["train_sft", "train_rm", "train_dpo", "train_ppo_ray", "serve_rm", "lora_combiner"]
)
def test_bf16_is_a_dtype_in_every_command(command):
    assert parse(command, ["--bf16"]).ds.param_dtype == "bf16"
    assert parse(command, ["--no-bf16"]).ds.param_dtype == "fp32"
    assert parse(command, ["--bf16=false"]).ds.param_dtype == "fp32"


@pytest.mark.parametrize("command", ["train_sft", "train_rm", "train_dpo", "train_ppo_ray", "serve_rm"])
def test_flash_attn_is_an_attention(command):
    assert parse(command, ["--flash_attn"]).ds.attn_implementation == "flash_attention_2"
    assert parse(command, ["--flash_attn", "false"]).ds.attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("text", "max_len", "max_new_tokens"),
    [
        ("--prompt_max_len 1000 --generate_max_len 500", 1500, 500),
        ("--generate_max_len 500", 1524, 500),
        ("--prompt_max_len 1000", 2024, 1024),
        ("--generate_max_len 500 --max_len 4096", 4096, 500),
        ("--prompt_max_len 1000 --generate_max_len 500 --max_len 1500", 1500, 500),
    ],
)
def test_prompt_and_generate_max_len_add_up(text, max_len, max_new_tokens):
    """The half that is missing keeps its old default, 1024."""
    config = rl(text)
    assert (config.data.max_len, config.rollout.max_new_tokens) == (max_len, max_new_tokens)


def test_a_sum_that_contradicts_max_len_is_an_error():
    message = error("train_ppo_ray", "--prompt_max_len 1000 --generate_max_len 500 --max_len 2048")
    assert "--max_len" in message
    assert "--prompt_max_len and --generate_max_len" in message
    assert "1500" in message


def test_supervised_commands_take_the_sum():
    assert parse("train_sft", ["--prompt_max_len", "100", "--generate_max_len", "50"]).data.max_len == 150


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("--clip_eps_low 0.1 --clip_eps_high 0.3", (0.1, 0.3)),
        ("--clip_eps_low 0.1", (0.1, 0.2)),
        ("--clip_eps_high 0.3 --eps_clip 0.25", (0.25, 0.3)),
        ("--actor.eps_clip_low_high 0.1 0.3", (0.1, 0.3)),
        ("--eps_clip 0.4", (0.4, 0.4)),
        ("", (0.2, 0.2)),
    ],
)
def test_clip_range(text, pair):
    assert rl(text).actor.clip_range == pair


def test_the_other_half_of_the_clip_range_may_come_from_a_file(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("actor: {eps_clip_low_high: [0.1, 0.3]}")
    assert rl(f"--config {file} --clip_eps_high 0.5").actor.clip_range == (0.1, 0.5)


@pytest.mark.parametrize(
    ("text", "read", "value"),
    [
        ("--use_icepop", lambda c: c.algo.advantage.is_correction_type, "icepop"),
        ("--use_icepop", lambda c: c.algo.advantage.is_correction_enable, True),
        ("--use_icepop false", lambda c: c.corrects_off_policy, False),
        ("--use_icepop --no-enable_vllm_is_correction", lambda c: c.algo.advantage.is_correction_enable, False),
        ("--use_icepop false", lambda c: c.algo.advantage.is_correction_type, "tis"),
        ("--use_kl_estimator_k3", lambda c: c.algo.kl.estimator, "k3"),
        ("--reward_clip_range 7.5", lambda c: c.reward.clip_range, (-7.5, 7.5)),
        ("--reward_clip_range -3 4", lambda c: c.reward.clip_range, (-3.0, 4.0)),
        ("--vllm_is_truncated_threshold 2", lambda c: c.algo.advantage.is_correction_threshold, (0.0, 2.0)),
        ("--max_steps 3", lambda c: c.max_steps, 3),
        ("--value_prefix_head v", lambda c: c.ds.value_head_prefix, "v"),
        ("--head_prefix v", lambda c: c.ds.value_head_prefix, "v"),
        ("--critic_pretrain None", lambda c: c.critic.model_name_or_path, None),
        ("--actor.entropy_coef None", lambda c: c.actor.entropy_coef, None),
        ("--ckpt.best_metric_key none", lambda c: c.ckpt.best_metric_key, "none"),
        ("--top_k 5", lambda c: c.rollout.top_k, 5),
        ("--torch_compile", lambda c: c.ds.deepcompile, True),
        ("--micro_forward_batch_size 4", lambda c: c.rollout.micro_batch_size, 4),
        ("--universal_ckpt", lambda c: c.ds.use_universal_ckpt, True),
        ("--model.trust_remote_code", lambda c: c.actor.trust_remote_code, True),
        ("--ref_reward_offload", lambda c: (c.ref.offload, c.reward.offload), (True, True)),
        ("--max_tokens_per_gpu 99", lambda c: (c.train.max_tokens_per_gpu, c.scoring_tokens_per_gpu), (99, 99)),
        ("--adam_betas 0.8 0.9", lambda c: (c.actor.adam.betas, c.critic.adam.betas), ((0.8, 0.9),) * 2),
        ("--l2 0.1", lambda c: (c.actor.adam.weight_decay, c.critic.adam.weight_decay), (0.1, 0.1)),
        ("--lr_scheduler linear", lambda c: (c.actor.lr_scheduler, c.critic.lr_scheduler), ("linear",) * 2),
        ("--max_norm 0.5 --critic.max_norm 0.5", lambda c: (c.actor.max_norm, c.critic.max_norm), (0.5, 0.5)),
        ("--no-actor.muon.no_nesterov", lambda c: c.actor.muon.nesterov, True),
        ("--actor.adam.lr -0e-6", lambda c: c.actor.adam.lr, 0.0),
        ("--vllm_is_truncated_threshold 0 inf", lambda c: c.algo.advantage.is_correction_threshold[1], float("inf")),
        ("--eps_clip_low_high 0.2 inf", lambda c: c.actor.eps_clip_low_high, (0.2, float("inf"))),
        ("--clip_eps_high inf", lambda c: c.actor.eps_clip_low_high, (0.2, float("inf"))),
        ("--value_clip inf", lambda c: c.critic.value_clip, float("inf")),
        ("--max_norm inf", lambda c: c.actor.max_norm, float("inf")),
        ("--reward.clip_range -inf 1e1", lambda c: c.reward.clip_range, (-float("inf"), 10.0)),
    ],
)
def test_one_oddity_each(text, read, value):
    assert read(rl(text)) == value


@pytest.mark.parametrize("command", ["train_sft", "train_rm", "train_dpo"])
def test_supervised_commands_know_their_model_as_actor(command):
    config = parse(
        command, ["--actor.model_name_or_path", "m", "--actor.gradient_checkpointing_enable", "--actor.adam.lr", "0.5"]
    )
    assert (config.model.model_name_or_path, config.model.gradient_checkpointing_enable) == ("m", True)
    assert config.adam.lr == 0.5


def test_sections_may_be_left_out_and_old_split_names_work():
    config = parse("train_dpo", ["--chosen_key", "c", "--rejected_key", "r", "--prompt_key", "p", "--train_split", "s"])
    data = config.data
    assert (data.chosen_key, data.rejected_key, data.prompt_key, data.dataset_split) == ("c", "r", "p", "s")
    assert parse("train_sft", ["--balancing_loss_coef", "0.5"]).model.aux_loss_coef == 0.5


@pytest.mark.parametrize("name", INERT)
def test_inert_names_say_that_they_do_nothing(name, capsys):
    assert rl(f"--{name}") == rl(f"--{name} false")
    assert capsys.readouterr().err.count(f"note: --{name} does nothing: {INERT[name]}") == 1


@pytest.mark.parametrize("name", GONE)
def test_gone_names_say_what_to_use(name):
    assert error("train_ppo_ray", f"--{name} x") == f"--{name} is gone: {GONE[name]}"


def test_ptx_coef_must_be_zero(capsys):
    rl("--ptx_coef 0")
    assert "does nothing" in capsys.readouterr().err
    assert "--ptx_coef" in error("train_ppo_ray", "--ptx_coef 0.05")
    assert "train_sft" in error("train_ppo_ray", "--ptx_coef 0.05")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("--actor.adam.lr 1e-6", "--actor_learning_rate 2e-6"),
        ("--actor.adam.lr 1e-6", "--actor.adam.lr 2e-6"),
        ("--bf16", "--param_dtype fp16"),
        ("--l2 0.1", "--critic.adam.weight_decay 0.2"),
        ("--clip_eps_low 0.1", "--actor.eps_clip_low_high 0.2 0.2"),
        ("--async_train", "--no-train.async_enable"),
        ("--use_icepop", "--vllm_is_correction_type tis"),
    ],
)
def test_two_values_for_one_field_are_an_error_that_names_both_spellings(first, second):
    message = error("train_ppo_ray", f"{first} {second}")
    assert first.split()[0] in message
    assert second.split()[0] in message


def test_the_same_value_twice_is_fine():
    assert rl("--actor.adam.lr 1e-5 --actor_learning_rate 0.00001").actor.adam.lr == 1e-5


@pytest.mark.parametrize(
    ("command", "text", "expected"),
    [
        ("train_ppo_ray", "--actor.adm.lr 1", "--actor.adm.lr is unknown; did you mean --actor.adam.lr?"),
        ("train_ppo_ray", "--rollout-batch-size=8", "did you mean --rollout_batch_size?"),
        ("train_ppo_ray", "--data.max_l 5", "did you mean --data.max_len?"),
        ("train_ppo_ray", "--chosen_key c", "--chosen_key belongs to train_rm, train_dpo, not to train_ppo_ray"),
        ("train_ppo_ray", "--actor_learning_rat 1", "did you mean --actor_learning_rate?"),
        ("train_sft", "--qqqq", "--qqqq is unknown; --help all lists all flags"),
        ("train_sft", "stray", "without a flag"),
        ("train_sft", "--adam.lr x", "--adam.lr: expected a number, got 'x'"),
        ("train_sft", "--train.seed 1.5", "--train.seed: expected a whole number, got '1.5'"),
        ("train_sft", "--optim sgd", "--optim: 'sgd' is not one of adam, muon"),
        ("train_sft", "--data.multiturn maybe", "--data.multiturn: is a switch"),
        ("train_sft", "--adam.betas 0.9", "--adam.betas: takes 2 values"),
        ("train_sft", "--adam.lr", "--adam.lr"),
        ("train_sft", "--adam.lr nan", "--adam.lr: 'nan' is not a value"),
        ("train_sft", "--adam.betas 0.9 1e400", "--adam.betas: '1e400' is not a value"),
        ("train_ppo_ray", "--reward.weights 1 -inf", "--reward.weights: '-inf' is not a value; give a finite number"),
        ("train_ppo_ray", "--reward.clip_range nan 1", "--reward.clip_range: 'nan' is not a value"),
        ("train_sft", "--adam.lr None", "--adam.lr: expected a number"),
    ],
)
def test_wrong_words_name_the_flag_and_the_remedy(command, text, expected):
    assert expected in error(command, text)


def test_a_key_is_never_repeated_in_a_message():
    for text in ("--wandb_kye SECRET", "--wandb_kye=SECRET", "--use_wandb SECRET --logger.wandb.key OTHER"):
        message = error("train_sft", text)
        assert "SECRET" not in message
        assert "OTHER" not in message


@given(st.lists(st.floats(allow_nan=False, width=32), min_size=2, max_size=2).map(sorted))
def test_any_ordered_pair_of_numbers_survives_the_command_line(pair):
    """Negative, tiny, huge, infinite: none is mistaken for an option."""
    low, high = pair
    if low < high:
        assert rl(f"--reward.clip_range {low!r} {high!r}").reward.clip_range == (low, high)


def test_no_flat_name_hides_a_dotted_one():
    for command in ("train_sft", "train_rm", "train_dpo", "train_ppo_ray", "serve_rm", "lora_combiner"):
        words = vocabulary(command)
        for name, targets in words.fields.items():
            if len(targets) > 1:
                assert "." not in name
                assert {spec.path for spec in targets}.isdisjoint({name})
            assert len({spec.shape for spec in targets if not spec.shape.optional}) <= 1, name


@pytest.mark.parametrize("command", ROOTS)
def test_no_flag_takes_nan_and_infinity_only_where_it_means_no_limit(command):
    unlimited = {"ckpt.max_mem", "reward.clip_range", "critic.value_clip", "max_norm", "actor.max_norm"}
    unlimited |= {"critic.max_norm", "actor.eps_clip_low_high", "algo.dynamic_filtering_range"}
    unlimited |= {"algo.advantage.is_correction_threshold", "train.stall_timeout"}
    for path, spec in flags_of(command).items():
        if spec.shape.kind is float:
            count = 1 if spec.shape.count == "*" else spec.shape.count
            words = ["--" + path, *(["inf"] * count)]
            assert f"--{path}: 'nan' is not a value" in error(command, " ".join(w.replace("inf", "nan") for w in words))
            if path not in unlimited:
                assert f"--{path}: 'inf' is not a value" in error(command, " ".join(words))
