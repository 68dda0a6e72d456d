"""What is not built yet parses and prints, and is refused before a run, by name."""

import pytest

from openrlhf.config import NotBuiltError, parse, refuse_unbuilt, require_runnable
from openrlhf.config.commands import ROOTS
from openrlhf.config.not_implemented import RL, UNBUILT
from openrlhf.config.parser import enter

BUILT = "--pretrain m --prompt_data d --remote_rm_url r.py --advantage_estimator {estimator}"
BASE = BUILT.format(estimator="group_norm").split()

# The flags that ask for each entry, added to a run that is built.
ASKS = {
    "--ds.ring_attn_size": "--ring_attn_size 2",
}


def never(_config):
    raise AssertionError("a refused run was started")


def assert_refused(argv, flags, capsys, command="train_ppo_ray"):
    assert enter(command, argv, never) == 2
    err = capsys.readouterr().err
    assert f"{command}: error: {flags}: not built yet" in err
    assert "Traceback" not in err
    assert "SECRET" not in err
    with pytest.raises(SystemExit) as done:
        parse(command, [*argv, "--print_config"])
    assert done.value.code == 0
    assert "SECRET" not in capsys.readouterr().out


@pytest.mark.parametrize("entry", RL, ids=lambda entry: entry.flags)
def test_each_entry_parses_prints_and_is_refused_by_name(entry, capsys):
    words = ASKS[entry.flags]
    if words is not None:
        assert_refused([*BASE, *words.split()], entry.flags, capsys)


@pytest.mark.parametrize("command", [command for command in ROOTS if command != "train_ppo_ray"])
def test_the_other_commands_lack_nothing(command):
    assert UNBUILT[ROOTS[command]] == ()


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("train_sft", "--multiturn --apply_chat_template --packing_samples --zero_stage 3 --adam_offload"),
        ("train_sft", "--pretrain_mode --gradient_checkpointing --param_dtype bf16 --eval_dataset e --eval_steps 5"),
        ("train_sft", "--ring_attn_size 2 --ring_head_stride 2 --packing_samples"),
        ("train_rm", "--ring_attn_size 4"),
        ("train_dpo", "--ring_attn_size 2 --ds_tensor_parallel_size 2"),
        ("train_sft", "--param_dtype fp16 --use_ds_universal_ckpt --load_checkpoint --grad_accum_dtype fp16"),
        ("train_dpo", "--param_dtype bf16 --grad_accum_dtype bf16 --use_ms"),
        ("train_sft", "--lora_rank 8 --lora_alpha 16 --target_modules q_proj v_proj --lora_dropout 0.1"),
        (
            "train_sft",
            "--lora_rank 8 --load_in_4bit --aux_loss_coef 0.1 --ds.experts_implementation eager --use_liger_kernel",
        ),
        ("train_sft", "--use_wandb SECRET --use_tensorboard t --optim muon --lr_scheduler linear --max_epochs 3"),
        ("train_sft", "--save_steps 5 --save_hf_ckpt --load_checkpoint --max_ckpt_num 2 --disable_ds_ckpt"),
        ("train_rm", "--loss logexp --margin_loss --compute_fp32_loss --value_head_prefix value_head"),
        ("train_dpo", "--ipo --nll_loss_coef 0.1 --ref_pretrain r --ref_offload"),
        ("train_dpo", "--model.loss_type kto --label_key l --response_key r --beta 0.2"),
    ],
)
def test_what_the_supervised_trainers_do_is_let_through(command, text):
    config = parse(command, ["--pretrain", "m", "--dataset", "d", *text.split()])
    require_runnable(config)
    refuse_unbuilt(config)


def test_the_reward_server_is_let_through():
    text = "--reward_pretrain r --port 5000 --bf16 --flash_attn --normalize_reward --max_len 8192 --batch_size 16 --load_in_4bit --use_ms"
    config = parse("serve_rm", text.split())
    require_runnable(config)
    refuse_unbuilt(config)


def test_merging_is_let_through():
    text = "--model_path a --lora_path b --output_path c --is_rm --bf16"
    config = parse("lora_combiner", text.split())
    require_runnable(config)
    refuse_unbuilt(config)


def test_all_missing_features_are_listed_at_once():
    config = parse("train_ppo_ray", [*BASE, "--deepcompile", "--ring_attn_size", "2"])
    asked = [entry for entry in RL if entry.flags in ("--ds.deepcompile", "--ds.ring_attn_size")]
    if asked:
        with pytest.raises(NotBuiltError) as caught:
            refuse_unbuilt(config)
        assert len(str(caught.value).splitlines()) == len(asked)


@pytest.mark.parametrize("estimator", ["gae", "reinforce", "reinforce_baseline", "rloo", "group_norm", "dr_grpo"])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "--vllm_num_engines 0 --train.launcher local",
        "--vllm_num_engines 1 --train.launcher local --enforce_eager --enable_prefix_caching",
        "--vllm_num_engines 1",
        "--actor_num_nodes 1 --actor_num_gpus_per_node 8",
        "--actor_num_gpus_per_node 8 --ds_tensor_parallel_size 4",
        "--zero_stage 3 --adam_offload --gradient_checkpointing --packing_samples --flash_attn --param_dtype fp16",
        "--ref_reward_offload --colocate_all_models --vllm_sync_backend gloo",
        "--use_dynamic_batch --train_max_tokens_per_gpu 512 --rollout_max_tokens_per_gpu 1024",
        "--eps_clip_low_high 0.2 0.3 --entropy_loss_coef 0 --reward_clip_range 5",
        "--init_kl_coef 0.1 --use_kl_loss --kl_estimator k2 --kl_target 0.1 --kl_horizon 1000",
        "--policy_loss_type gspo --enable_vllm_is_correction --vllm_is_correction_type seq-mask-tis",
        "--dual_clip 3 --entropy_loss_coef 0.1 --algo.loss_agg constant",
        "--overlong_buffer_len 4 --overlong_penalty_factor 2 --stop_properly_penalty_coef 0.5",
        "--use_wandb SECRET --wandb_project p --use_tensorboard t",
        "--eval_dataset e --eval_steps 5 --eval.at_start --seed 7 --full_determinism --logging_steps 2",
        "--actor.optim muon --actor.muon.lr 1e-4 --lr_scheduler warmup_stable_decay --enable_ema --ema_beta 0.9",
        "--deepcompile --zero_stage 2",
        "--max_epochs 2 --train_batch_size 64 --temperature 0.7 --top_p 0.9 --top_k 50 --max_new_tokens 64",
        "--dynamic_filtering --dynamic_filtering_reward_range 0.1 0.9 --n_samples_per_prompt 4 --vllm_generate_batch_size 2048",
        "--use_ds_universal_ckpt --load_checkpoint --grad_accum_dtype bf16 --param_dtype bf16",
        "--save_steps 5 --save_hf_ckpt --load_checkpoint --max_ckpt_num 2 --max_ckpt_mem 100 --best_metric_key k",
        "--use_ms --critic_pretrain None --kl_estimator k3 --colocate_all_models --critic_num_nodes 0 --ref_num_nodes 0",
    ],
)
def test_what_is_built_is_let_through(estimator, text):
    config = parse("train_ppo_ray", [*BUILT.format(estimator=estimator).split(), *text.split()])
    require_runnable(config)
    refuse_unbuilt(config)


@pytest.mark.parametrize(
    "text",
    [
        "--reward_pretrain r",
        "--reward_pretrain r --normalize_reward",
        "--reward_pretrain r --value_head_prefix value_head",
        "--reward_pretrain r,s",
        "--remote_rm_url http://h/get_reward",
        "--remote_rm_url http://h,http://i --reward.api_key SECRET",
        "--remote_rm_url a.py,http://h/get_reward --reward.weights 0.7 0.3",
        "--remote_rm_url a.py,b.py --reward_pretrain r --reward.weights 1 1 1",
    ],
)
def test_rewards_are_let_through(text):
    argv = [word for word in BASE if word not in ("--remote_rm_url", "r.py")]
    config = parse("train_ppo_ray", [*argv, *text.split()])
    require_runnable(config)
    refuse_unbuilt(config)
