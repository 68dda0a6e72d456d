"""Cross-flag rules: what is refused when parsing, what a run needs, what the user is told, what is derived."""

import pytest

from openrlhf.config import ROOTS, ConfigError, parse, require_runnable, rules
from openrlhf.config.schema import build, flags_of
from openrlhf.config.training import MEASURING_SCHEDULES, SCHEDULES
from openrlhf.runs.worlds import game_plan

RUNNABLE = "--pretrain m --prompt_data d --remote_rm_url r.py --advantage_estimator rloo --init_kl_coef 0"

# rule, command, flags it refuses, words of its message, flags it lets pass
CASES = [
    ("values_are_within_bounds", "train_sft", "--train.batch_size 0", ["--train.batch_size 0"], "--train.batch_size 1"),
    ("values_are_within_bounds", "train_ppo_ray", "--temperature 0", ["--rollout.temperature"], "--temperature 0.1"),
    ("values_are_within_bounds", "train_ppo_ray", "--data.curriculum solved_last --data.curriculum_threshold 1.5", ["--data.curriculum_threshold 1.5: must be more than 0 and at most 1"], "--data.curriculum solved_last --data.curriculum_threshold 1"),
    ("values_are_within_bounds", "train_ppo_ray", "--async_queue_size 0", ["--train.async_queue_size"], ""),
    ("values_are_within_bounds", "serve_rm", "--batch_size 0", ["--batch_size 0"], "--batch_size 1"),
    ("values_are_within_bounds", "train_ppo_ray", "--gamma 1.5", ["--algo.advantage.gamma 1.5"], "--gamma 0.9"),
    ("values_are_within_bounds", "train_ppo_ray", "--eval_temperature -1", ["--eval.temperature"], "--eval_temperature 0"),
    ("values_are_within_bounds", "train_ppo_ray", "--critic.max_norm -1", ["--critic.max_norm"], "--critic.max_norm 0"),
    ("values_are_within_bounds", "train_ppo_ray", "--vllm_num_engines -1", ["--vllm.num_engines"], "--vllm_num_engines 0"),
    ("values_are_within_bounds", "train_sft", "--lr_warmup_ratio 2", ["--lr_warmup_ratio 2"], "--lr_warmup_ratio 1"),
    ("values_are_within_bounds", "train_sft", "--zero_stage 4", ["--ds.zero_stage 4", "from 0 to 3"], "--zero_stage 3"),
    ("values_are_within_bounds", "serve_rm", "--port 70000", ["--port 70000"], "--port 80"),
    ("values_are_within_bounds", "train_dpo", "--adam_betas 0.9 1", ["--adam.betas 0.9 1.0"], "--adam_betas 0 0.99"),
    ("values_are_within_bounds", "train_ppo_ray", "--critic.adam.betas -1 0", ["--critic.adam.betas"], ""),
    ("values_are_within_bounds", "train_ppo_ray", "--ema_beta 1", ["--train.ema_beta 1.0", "less than 1"], "--ema_beta 0"),
    ("values_are_within_bounds", "train_rm", "--muon.momentum 1", ["--muon.momentum 1.0"], "--muon.momentum 0.9"),
    ("values_are_within_bounds", "train_ppo_ray", "--actor.muon.ns_steps 100", ["--actor.muon.ns_steps 100", "from 1 to 99"], "--actor.muon.ns_steps 6"),
    ("schedules_are_known", "train_ppo_ray", "--actor.lr_scheduler cosin", ["--actor.lr_scheduler cosin is not a schedule; did you mean cosine?", "inverse_sqrt"], "--actor.lr_scheduler cosine"),
    ("schedules_are_known", "train_sft", "--lr_scheduler xyz", ["--lr_scheduler xyz is not a schedule (choose from constant,"], "--lr_scheduler polynomial"),
    ("schedules_are_known", "train_ppo_ray", "--critic.lr_scheduler greedy", ["--critic.lr_scheduler greedy follows a loss"], "--critic.lr_scheduler linear"),
    ("periods_are_positive_or_off", "train_rm", "--eval.steps 0", ["--eval.steps 0", "-1"], "--eval.steps -1"),
    ("template_arguments_are_an_object", "train_ppo_ray", "--data.chat_template_kwargs [1]", ["--data.chat_template_kwargs [1]: must be a JSON object"], "--data.chat_template_kwargs {}"),
    ("template_arguments_are_an_object", "train_sft", "--data.chat_template_kwargs enable_thinking=false", ["must be a JSON object"], '--data.chat_template_kwargs {"enable_thinking":false}'),
    ("template_arguments_are_an_object", "train_sft", '--data.chat_template_kwargs {"tokenize":true}', ["tokenize is given by the run itself"], ""),
    ("probabilities_fit_datasets", "train_sft", "--dataset a,b --dataset_probs 1", ["--data.dataset_probs", "--data.dataset:"], "--dataset a,b --dataset_probs 0.5,0.5"),
    ("probabilities_fit_datasets", "train_ppo_ray", "--prompt_data a,b --prompt_data_probs 0.5,0.6", ["--data.prompt_probs", "1.1"], "--prompt_data a,b --prompt_data_probs 0.3,0.7"),
    ("probabilities_fit_datasets", "train_ppo_ray", "--prompt_data a --prompt_data_probs half", ["--data.prompt_probs half"], ""),
    ("probabilities_fit_datasets", "train_ppo_ray", "--prompt_data a,b --prompt_data_probs nan,0.5", ["--data.prompt_probs nan,0.5"], ""),
    ("balanced_routers_are_seen", "train_sft", "--aux_loss_coef 0.1 --gradient_checkpointing --gradient_checkpointing_use_reentrant", ["--model.aux_loss_coef", "--model.gradient_checkpointing_reentrant"], "--aux_loss_coef 0.1 --gradient_checkpointing"),
    ("balanced_routers_are_seen", "train_ppo_ray", "--aux_loss_coef 0.1 --gradient_checkpointing --gradient_checkpointing_use_reentrant", ["--actor.aux_loss_coef"], "--gradient_checkpointing --gradient_checkpointing_use_reentrant"),
    ("gradients_are_summed_in_fp32_or_as_weights_are", "train_sft", "--grad_accum_dtype fp16", ["--ds.grad_accum_dtype fp16 needs --ds.param_dtype fp16"], "--grad_accum_dtype fp16 --param_dtype fp16"),
    ("gradients_are_summed_in_fp32_or_as_weights_are", "train_ppo_ray", "--grad_accum_dtype bfloat16 --param_dtype fp16", ["--ds.grad_accum_dtype bf16", "--ds.param_dtype fp16"], "--grad_accum_dtype bf16"),
    ("multiturn_needs_a_chat_template", "train_sft", "--multiturn", ["--data.multiturn", "--data.apply_chat_template"], "--multiturn --apply_chat_template"),
    ("pair_options_have_pairs", "train_dpo", "--model.loss_type kto --ipo", ["--model.ipo_enable", "--model.loss_type kto"], "--ipo"),
    ("pair_options_have_pairs", "train_dpo", "--model.loss_type kto --label_smoothing 0.1", ["--model.label_smoothing"], "--label_smoothing 0.1"),
    ("pair_options_have_pairs", "train_dpo", "--model.loss_type kto --nll_loss_coef 0.1", ["--model.nll_loss_coef"], "--nll_loss_coef 0.1 --ipo"),
    ("group_estimators_need_samples", "train_ppo_ray", "--advantage_estimator rloo --n_samples_per_prompt 1", ["--algo.advantage.estimator rloo", "--rollout.n_samples_per_prompt"], "--advantage_estimator rloo"),
    ("clip_range_is_valid", "train_ppo_ray", "--eps_clip -0.1", ["--actor.eps_clip"], "--eps_clip 0"),
    ("clip_range_is_valid", "train_ppo_ray", "--eps_clip_low_high 1.5 0.2", ["--actor.eps_clip_low_high"], "--eps_clip_low_high 1 5"),
    ("dual_clip_is_above_one", "train_ppo_ray", "--dual_clip 1", ["--actor.dual_clip 1"], "--dual_clip 3"),
    ("dual_clip_has_a_ratio_to_bound", "train_ppo_ray", "--dual_clip 3 --policy_loss_type gspo", ["--actor.dual_clip", "--actor.policy_loss_type ppo; gspo has none"], "--policy_loss_type gspo"),
    ("kl_target_has_a_coefficient", "train_ppo_ray", "--kl_target 0.1 --init_kl_coef 0", ["--algo.kl.target", "--algo.kl.init_coef"], "--kl_target 0.1 --init_kl_coef 0.01"),
    ("stalls_outlast_users_code", "train_ppo_ray", "--agent_func_path a.py --train.stall_timeout 600", ["--train.stall_timeout 600", "--rollout.step_timeout 600"], "--agent_func_path a.py --train.stall_timeout 0"),
    ("stalls_outlast_users_code", "train_ppo_ray", "--remote_rm_url r.py --train.stall_timeout 60", ["--reward.timeout 180"], "--remote_rm_url r.py --train.stall_timeout 60 --reward.timeout 30"),
    ("stalls_outlast_users_code", "train_ppo_ray", "--agent_func_path openrlhf.worlds.gymnasium --train.stall_timeout 60", ["--world.timeout 120"], "--agent_func_path openrlhf.worlds.gymnasium --train.stall_timeout 600"),
    ("worlds_can_be_asked_for", "train_ppo_ray", "--agent_func_path openrlhf.worlds.gymnasium --world.tasks a,a", ["--world.tasks: a task is named twice: a, a"], "--agent_func_path openrlhf.worlds.gymnasium --world.tasks a:2,b"),
    ("worlds_can_be_asked_for", "train_ppo_ray", "--agent_func_path openrlhf.worlds.gymnasium --world.options rows", ["--world.options: rows: expected key=value"], "--agent_func_path openrlhf.worlds.gymnasium --world.options rows=4"),
    ("sampling_is_valid", "train_ppo_ray", "--top_p 0", ["--rollout.top_p"], "--top_p 0.5"),
    ("sampling_is_valid", "train_ppo_ray", "--top_k 20 --algo.sampling_mask 8", ["--algo.sampling_mask 8", "--rollout.top_k 20", "20 or more"], "--top_k 20 --algo.sampling_mask 20"),
    ("sampling_is_valid", "train_ppo_ray", "--top_k 0", ["--rollout.top_k 0", "-1"], "--top_k 20"),
    ("reward_clip_is_ordered", "train_ppo_ray", "--reward_clip_range 5 -5", ["--reward.clip_range"], "--reward_clip_range 0 1"),
    ("curriculum_range_is_ordered", "train_ppo_ray", "--data.curriculum_score_range 1 1", ["--data.curriculum_score_range 1 1"], "--data.curriculum_score_range -1 1 --data.curriculum success"),
    ("correction_thresholds_are_ordered", "train_ppo_ray", "--vllm_is_truncated_threshold 2 1", ["--algo.advantage.is_correction_threshold"], ""),
    ("filtering_is_possible", "train_ppo_ray", "--dynamic_filtering", ["--algo.dynamic_filtering_enable", "--rollout.n_samples_per_prompt"], "--dynamic_filtering --n_samples_per_prompt 2"),
    ("filtering_is_possible", "train_ppo_ray", "--dynamic_filtering --n_samples_per_prompt 2 --dynamic_filtering_reward_range 1 0", ["--algo.dynamic_filtering_range"], "--dynamic_filtering_reward_range 1 0"),
    ("surplus_prompts_have_a_use", "train_ppo_ray", "--vllm_generate_batch_size 2048", ["--rollout.vllm_generate_batch_size 2048", "--rollout.batch_size 1024", "--train.async_enable"], "--vllm_generate_batch_size 2048 --async_train"),
    ("stragglers_have_company", "train_ppo_ray", "--rollout.abort_stragglers", ["--rollout.abort_stragglers", "--rollout.vllm_generate_batch_size", "--rollout.batch_size 1024"], "--rollout.abort_stragglers --vllm_generate_batch_size 1025"),
    ("stragglers_have_company", "train_ppo_ray", "--rollout.abort_stragglers --async_train", ["--rollout.abort_stragglers", "--train.async_enable"], "--async_train"),
    ("surplus_prompts_have_a_use", "train_ppo_ray", "--vllm_generate_batch_size 1025", ["--algo.dynamic_filtering_enable"], "--vllm_generate_batch_size 2048 --dynamic_filtering --n_samples_per_prompt 2"),
    ("responses_leave_room_for_prompts", "train_ppo_ray", "--max_new_tokens 2048", ["--rollout.max_new_tokens 2048", "--data.max_len 2048"], "--max_new_tokens 2047"),
    ("overlong_buffer_fits", "train_ppo_ray", "--overlong_buffer_len 65 --max_new_tokens 64", ["--reward.overlong_buffer_len 65", "--rollout.max_new_tokens 64"], "--overlong_buffer_len 64 --max_new_tokens 64"),
    ("overlong_buffer_fits", "train_ppo_ray", "--overlong_buffer_len 65 --max_len 64", ["--data.max_len 64"], ""),
    ("steps_can_be_judged", "train_ppo_ray", "--reward.steps separator --reward.step_separator=", ["--reward.step_separator is empty"], "--reward.steps token --reward.step_separator="),
    ("steps_can_be_judged", "train_ppo_ray", "--reward.steps token --algo.advantage.turns step", ["--algo.advantage.turns step", "add --reward.step_total sum"], "--reward.steps token --algo.advantage.turns step --reward.step_total sum"),
    ("steps_can_be_judged", "train_ppo_ray", "--reward.steps token --reward.overlong_buffer_len 8", ["--reward.overlong_buffer_len", "--reward.steps"], "--reward.overlong_buffer_len 8"),
    ("steps_can_be_judged", "train_ppo_ray", "--reward.steps token --reward.normalize_enable", ["add --reward.step_logits"], "--reward.steps token --reward.normalize_enable --reward.step_logits"),
    ("reward_weights_match", "train_ppo_ray", "--remote_rm_url http://a,http://b --reward.weights 1", ["--reward.weights has 1 values for the 2 of --reward.remote_url"], "--remote_rm_url http://a,http://b --reward.weights 1 2"),
    ("reward_weights_match", "train_ppo_ray", "--remote_rm_url a.py --reward_pretrain r --reward.weights 1 2 3", ["--reward.weights has 3 values for the 1"], "--remote_rm_url a.py --reward_pretrain r --reward.weights 1 2"),
    ("reward_weights_match", "train_ppo_ray", "--reward_pretrain r,s --reward.weights 1", ["--reward.weights has 1 values for the 2 of --reward.model_name_or_path"], "--reward_pretrain r,s --reward.weights 1 2"),
    ("there_is_one_teacher", "train_ppo_ray", "--teacher.policy initial --teacher.model_name_or_path t", ["--teacher.policy initial and --teacher.model_name_or_path are two teachers"], "--teacher.policy initial"),
    ("there_is_one_teacher", "train_ppo_ray", "--teacher.policy current", ["--teacher.policy current", "give --teacher.prompt_key"], "--teacher.policy current --teacher.prompt_key hint"),
    ("there_is_one_teacher", "train_ppo_ray", "--teacher.remote_url http://h --teacher.model_name_or_path t", ["--teacher.model_name_or_path and --teacher.remote_url are two teachers"], "--teacher.remote_url http://h/v1,http://i"),
    ("a_served_teacher_can_be_asked", "train_ppo_ray", "--teacher.remote_url host:8000", ["--teacher.remote_url host:8000 is no URL"], "--teacher.remote_url http://host:8000"),
    ("a_served_teacher_can_be_asked", "train_ppo_ray", "--teacher.remote_url http://u:p@h", ["--teacher.api_key"], "--teacher.remote_url https://h"),
    ("a_served_teacher_can_be_asked", "train_ppo_ray", "--teacher.remote_url http://h --temperature 0.7", ["give --rollout.temperature 1"], "--teacher.remote_url http://h --temperature 1"),
    ("a_served_teacher_can_be_asked", "train_ppo_ray", "--teacher.remote_url http://h --top_p 0.9", ["--rollout.top_p", "--algo.sampling_mask 0"], "--teacher.remote_url http://h --top_p 0.9 --algo.sampling_mask 0"),
    ("a_served_teacher_can_be_asked", "train_ppo_ray", "--teacher.remote_url http://h --data.max_images_per_prompt 1", ["--data.max_images_per_prompt"], "--teacher.remote_url http://h --top_p 0.9 --teacher.loss js"),
    ("a_teachers_prompt_has_no_images", "train_ppo_ray", "--teacher.policy initial --teacher.prompt_key hint --data.max_images_per_prompt 1", ["--teacher.prompt_key", "--data.max_images_per_prompt"], "--teacher.policy initial --data.max_images_per_prompt 1"),
    ("reward_weights_match", "train_ppo_ray", "--remote_rm_url a.py,b.py --reward.weights 0 0", ["--reward.weights: with all weights 0"], "--remote_rm_url a.py,b.py --reward.weights 1 0"),
    ("values_are_within_bounds", "serve_rm", "--max_queue 0", ["--max_queue 0"], "--max_queue 1"),
    ("api_key_is_a_key", "serve_rm", "--api_key=", ["--api_key is empty"], "--api_key k"),
    ("api_key_is_a_key", "serve_rm", "--api_key schlüssel", ["--api_key", "ASCII"], ""),
    ("reward_addresses_are_usable", "train_ppo_ray", "--remote_rm_url localhost:5000", ["--reward.remote_url localhost:5000 is neither"], "--remote_rm_url http://localhost:5000"),
    ("reward_addresses_are_usable", "train_ppo_ray", "--remote_rm_url a.py,ftp://h/x", ["--reward.remote_url ftp://h/x is neither"], "--remote_rm_url a.py,https://h/x"),
    ("reward_addresses_are_usable", "train_ppo_ray", "--remote_rm_url http://h:port", ["--reward.remote_url http://h:port is neither"], "--remote_rm_url http://h:1/reward.py"),
    ("reward_addresses_are_usable", "train_ppo_ray", "--remote_rm_url http://me:pw@h/x", ["--reward.remote_url: a URL is stored", "--reward.api_key"], "--remote_rm_url http://h/x --reward.api_key pw"),
    ("async_modes_agree", "train_ppo_ray", "--partial_rollout", ["--train.partial_rollout_enable", "--train.async_enable"], "--partial_rollout --async_train"),
    ("async_modes_agree", "train_ppo_ray", "--async_train --vllm_enable_sleep", ["--vllm.enable_sleep", "--train.async_enable"], "--async_train"),
    ("subsets_are_smaller_than_groups", "train_ppo_ray", "--advantage_estimator pass_at_k --n_samples_per_prompt 4", ["--algo.advantage.pass_k 4", "--rollout.n_samples_per_prompt 4"], "--advantage_estimator pass_at_k"),
    ("compared_turns_can_be_compared", "train_ppo_ray", "--advantage_estimator pass_at_k --algo.advantage.turns step", ["--algo.advantage.turns step", "pass_at_k"], "--advantage_estimator maxrl --algo.advantage.turns step"),
    ("groups_have_workers", "train_ppo_ray", "--critic_num_nodes 0", ["--critic.num_nodes 0", "--train.colocate_all"], "--critic_num_nodes 0 --advantage_estimator rloo"),
    ("groups_have_workers", "train_ppo_ray", "--ref_num_gpus_per_node 0", ["--ref.num_gpus_per_node 0"], "--ref_num_gpus_per_node 0 --colocate_all_models"),
    ("groups_have_workers", "train_ppo_ray", "--actor_num_nodes 0 --colocate_all_models", ["--actor.num_nodes 0"], ""),
    ("groups_have_workers", "train_ppo_ray", "--reward_num_nodes -1", ["--reward.num_nodes -1"], "--reward_num_nodes 0"),
    ("shared_devices_agree", "train_ppo_ray", "--colocate_all_models --actor_num_gpus_per_node 2 --ref_num_gpus_per_node 4", ["--train.colocate_all", "--ref.num_gpus_per_node is 4"], "--colocate_all_models --actor_num_gpus_per_node 4 --ref_num_gpus_per_node 2"),
    ("rounded_weights_are_of_16_bits", "train_ppo_ray", "--vllm.quantization fp8 --ds.param_dtype fp32", ["--vllm.quantization fp8", "--ds.param_dtype fp32"], "--vllm.quantization fp8 --ds.param_dtype bf16"),
    ("rounded_weights_are_of_16_bits", "train_ppo_ray", "--vllm.quantization fp8 --vllm.lora_sync adapter --ds.lora.rank 4", ["--vllm.quantization fp8", "--vllm.lora_sync merged"], "--vllm.quantization fp8 --vllm.lora_sync merged --ds.lora.rank 4"),
    ("exact_runs_have_one_forward", "train_ppo_ray", "--rollout.exact --ds.zero_stage 3 --rollout.top_p 0.9", ["--rollout.exact", "--ds.zero_stage 3", "--rollout.top_p"], "--rollout.exact --ds.zero_stage 2"),
    ("exact_runs_have_one_forward", "train_ppo_ray", "--rollout.exact --vllm.quantization fp8 --ds.lora.rank 4", ["--vllm.quantization", "--ds.lora.rank"], "--rollout.exact --vllm.num_engines 1"),
    ("drafts_fit_the_run", "train_ppo_ray", "--vllm.speculation ngram --vllm.pipeline_parallel_size 2", ["--vllm.speculation ngram", "--vllm.pipeline_parallel_size"], "--vllm.speculation ngram"),
    ("drafts_fit_the_run", "train_ppo_ray", "--vllm.speculation history --train.full_determinism_enable", ["--vllm.speculation history", "--train.full_determinism_enable"], "--vllm.speculation history"),
    ("drafts_fit_the_run", "train_ppo_ray", "--vllm.speculation ngram --algo.router_replay", ["--vllm.speculation ngram", "--algo.router_replay"], "--vllm.speculation ngram --algo.router_replay false"),
    ("shared_devices_agree", "train_ppo_ray", "--colocate_all_models --actor_num_gpus_per_node 8 --vllm_num_engines 2", ["--vllm.num_engines 2", "8 devices"], "--colocate_all_models --actor_num_gpus_per_node 8 --vllm_num_engines 2 --vllm_tensor_parallel_size 4"),
    ("shared_devices_agree", "train_ppo_ray", "--colocate_actor_ref --actor_num_gpus_per_node 8 --ref_num_gpus_per_node 4", ["--train.colocate_actor_ref", "1 × 8 and 1 × 4"], "--colocate_actor_ref --actor_num_gpus_per_node 8 --ref_num_gpus_per_node 4 --init_kl_coef 0"),
    ("shared_devices_agree", "train_ppo_ray", "--colocate_critic_reward --reward_pretrain r --critic_num_gpus_per_node 8 --reward_num_gpus_per_node 4", ["--train.colocate_critic_reward"], "--colocate_critic_reward --remote_rm_url r.py --critic_num_gpus_per_node 8 --reward_num_gpus_per_node 4"),
    ("processes_share_one_device", "train_ppo_ray", "--vllm.processes_per_engine 2 --vllm.num_engines 1 --vllm.tensor_parallel_size 2", ["--vllm.processes_per_engine 2", "--vllm.tensor_parallel_size 2", "give 1"], "--vllm.processes_per_engine 2 --vllm.num_engines 1"),
    ("a_local_run_has_one_engine", "train_ppo_ray", "--train.launcher local --vllm_num_engines 2", ["--vllm.num_engines 2", "--train.launcher ray"], "--train.launcher local --vllm_num_engines 1"),
    ("every_worker_scores_something", "train_ppo_ray", "--actor_num_gpus_per_node 8 --rollout_batch_size 4", ["--rollout.batch_size 4", "workers (8)"], "--actor_num_gpus_per_node 8 --rollout_batch_size 8"),
    ("every_worker_scores_something", "train_ppo_ray", "--actor_num_gpus_per_node 8 --rollout_batch_size 4 --ring_attn_size 1", ["workers (8)"], "--actor_num_gpus_per_node 8 --rollout_batch_size 4 --ring_attn_size 2"),
    ("shares_divide_every_group", "train_ppo_ray", "--actor_num_gpus_per_node 8 --ring_attn_size 3", ["--ds.ring_attn_size 3: the actor model has 8 workers", "groups of 3"], "--actor_num_gpus_per_node 8 --ring_attn_size 4"),
    ("shares_divide_every_group", "train_ppo_ray", "--actor_num_gpus_per_node 8 --ring_attn_size 2 --ds_tensor_parallel_size 2 --critic_num_gpus_per_node 2", ["--ds.tensor_parallel_size 2 × --ds.ring_attn_size 2: the critic model has 2 workers", "groups of 4"], "--actor_num_gpus_per_node 8 --ring_attn_size 2 --ds_tensor_parallel_size 2 --critic_num_gpus_per_node 4"),
    ("shares_divide_every_group", "train_ppo_ray", "--ref_num_gpus_per_node 1 --ds_tensor_parallel_size 2", ["the ref model has 1 workers (--ref.num_nodes × --ref.num_gpus_per_node)"], "--ref_num_gpus_per_node 1 --ds_tensor_parallel_size 2 --init_kl_coef 0"),
    ("shares_divide_every_group", "train_ppo_ray", "--train.launcher local --ds_tensor_parallel_size 2", ["--ds.tensor_parallel_size 2", "--train.launcher ray"], "--ds_tensor_parallel_size 2"),
    ("four_bit_weights_are_whole", "train_sft", "--load_in_4bit --ds_tensor_parallel_size 2", ["--ds.load_in_4bit", "--ds.tensor_parallel_size"], "--load_in_4bit"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "command", "bad", "expected", "good"), CASES, ids=lambda value: None if isinstance(value, list) else str(value)[:40])  # fmt: skip
def test_rule_refuses_and_lets_pass(rule, command, bad, expected, good):
    with pytest.raises(ConfigError) as caught:
        parse(command, bad.split())
    for words in expected:
        assert words in str(caught.value)
    parse(command, good.split())


def test_every_rule_is_tested():
    assert {rule.__name__ for rule in rules.CONTRADICTIONS} == {case[0] for case in CASES}


BOUNDED = [(command, path) for command in ROOTS for path, spec in flags_of(command).items() if spec.flag.bounds]


@pytest.mark.parametrize(("command", "path"), BOUNDED)
def test_a_bound_holds_its_flag_on_both_sides(command, path):
    """The bound itself passes where the words say that it may, a number just beyond it never does."""
    spec = flags_of(command)[path]
    flag, pair = spec.flag, spec.shape.count == 2
    low, high = flag.within or (flag.above if flag.at_least is None else flag.at_least, flag.below)

    def refused(number):
        value = (number, spec.default[1]) if pair else number
        problems = list(rules.values_are_within_bounds(build(command, {path: value})))
        assert len(problems) <= 1
        assert all(problem.startswith(f"--{path} {number}") and problem.endswith(flag.bounds) for problem in problems)
        return bool(problems)

    assert list(rules.values_are_within_bounds(build(command, {}))) == []
    for bound, outwards, strict in ((low, -1, flag.above is not None), (high, 1, flag.below is not None)):
        if bound is not None and abs(bound) != float("inf"):
            assert refused(bound) == strict
            assert refused(bound + outwards)


def test_every_schedule_of_transformers_is_offered_or_refused_by_name():
    from transformers import SchedulerType

    assert {kind.value for kind in SchedulerType} == {*SCHEDULES, *MEASURING_SCHEDULES}


def test_all_problems_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        parse("train_ppo_ray", ["--top_p", "0", "--dual_clip", "0.5", "--zero_stage", "9"])
    assert len(str(caught.value).splitlines()) == 3


def test_the_local_launcher_does_not_check_device_plans():
    parse("train_ppo_ray", ["--train.launcher", "local", "--colocate_all_models", "--actor_num_gpus_per_node", "8", "--vllm_num_engines", "1"])  # fmt: skip


def test_packing_needs_no_engines():
    parse("train_ppo_ray", ["--packing_samples", "--vllm_num_engines", "0", "--use_dynamic_batch"])


# ------------------------------------------------------------------------------------------ what a run needs

NEEDS = [
    ("model_is_named", "train_ppo_ray", "--prompt_data d --remote_rm_url r.py", "--actor.model_name_or_path"),
    ("model_is_named", "train_sft", "--dataset d", "--model.model_name_or_path"),
    ("data_is_named", "train_ppo_ray", "--pretrain m --remote_rm_url r.py", "--data.prompt_dataset"),
    ("data_is_named", "train_dpo", "--pretrain m", "--data.dataset"),
    ("rewards_come_from_somewhere", "train_ppo_ray", "--pretrain m --prompt_data d", "--reward.remote_url"),
    ("rewards_come_from_somewhere", "train_ppo_ray", "--pretrain m --prompt_data d --reward_pretrain r --eval_dataset e", "--eval.dataset"),
    ("rewards_come_from_somewhere", "train_ppo_ray", "--pretrain m --prompt_data d --reward_pretrain r --dynamic_filtering --n_samples_per_prompt 2", "--algo.dynamic_filtering_enable"),
    ("optimizer_batch_fits_the_round", "train_ppo_ray", f"{RUNNABLE} --rollout_batch_size 4 --train_batch_size 33", "--train.batch_size 33 is more than a round has: --rollout.batch_size 4 × --rollout.n_samples_per_prompt 8 = 32"),
    ("rewards_come_from_somewhere", "train_ppo_ray", "--pretrain m --prompt_data d --teacher.model_name_or_path t --advantage_estimator reinforce --data.curriculum success", "--data.curriculum success goes by the scores of samples, and nothing judges them: give --reward.remote_url"),
    ("a_teacher_alone_has_no_critic", "train_ppo_ray", "--pretrain m --prompt_data d --teacher.model_name_or_path t", "--algo.advantage.estimator reinforce, or a reward"),
    ("a_teacher_alone_has_no_critic", "train_ppo_ray", "--pretrain m --prompt_data d --teacher.model_name_or_path t --remote_rm_url r.py --reward.weights 0", "--algo.advantage.estimator reinforce, or a reward"),
    ("reward_model_is_named", "serve_rm", "", "--reward.model_name_or_path"),
    ("four_bit_weights_have_an_adapter", "train_rm", "--pretrain m --dataset d --load_in_4bit", "--ds.lora.rank"),
    ("four_bit_weights_have_an_adapter", "train_ppo_ray", f"{RUNNABLE} --load_in_4bit", "--ds.load_in_4bit"),
    ("universal_checkpoints_are_loaded", "train_sft", "--pretrain m --dataset d --use_ds_universal_ckpt", "add --ckpt.load_enable"),
    ("attention_is_known", "train_sft", "--pretrain m --dataset d --attn_implementation flash_atention_2", "--ds.attn_implementation flash_atention_2 is unknown; did you mean flash_attention_2? (choose from eager, sdpa, "),
    ("attention_is_known", "serve_rm", "--reward_pretrain m --ds.attn_implementation nonsense", "or a kernel of the Hub such as kernels-community/flash-attn2"),
    ("weights_have_a_way", "train_ppo_ray", f"{RUNNABLE} --vllm.sync_backend mpi", "--vllm.sync_backend mpi: give nccl, or gloo"),
    ("merge_paths_are_named", "lora_combiner", "--model_path a --output_path c", "--lora_path"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "command", "text", "expected"), NEEDS)
def test_what_is_missing_stops_a_run_but_not_parsing(rule, command, text, expected):
    config = parse(command, text.split())
    with pytest.raises(ConfigError) as caught:
        require_runnable(config)
    assert expected in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "name",
    ["eager", "sdpa", "flex_attention", "flash_attention_3", "paged|sdpa", "kernels-community/flash-attn2@v1:attend"],
)
def test_every_attention_of_transformers_is_known(name):
    require_runnable(parse("train_sft", ["--pretrain", "m", "--dataset", "d", "--attn_implementation", name]))


def test_every_need_is_tested_and_a_complete_run_needs_nothing():
    assert {rule.__name__ for rule in rules.REQUIREMENTS} == {need[0] for need in NEEDS}
    require_runnable(parse("train_ppo_ray", RUNNABLE.split()))
    require_runnable(parse("train_ppo_ray", f"{RUNNABLE} --rollout_batch_size 4 --train_batch_size 32".split()))
    require_runnable(parse("train_sft", ["--pretrain", "m", "--dataset", "d"]))


def test_a_teacher_is_enough_to_learn_from():
    taught = "--pretrain m --prompt_data d --teacher.model_name_or_path t --advantage_estimator reinforce"
    require_runnable(parse("train_ppo_ray", taught.split()))
    require_runnable(parse("train_ppo_ray", f"{taught} --remote_rm_url r.py --reward.weights 0".split()))
    its_own = "--pretrain m --prompt_data d --teacher.policy current --teacher.prompt_key hint"
    require_runnable(parse("train_ppo_ray", f"{its_own} --advantage_estimator reinforce".split()))


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("", None),
        ("--teacher.model_name_or_path t --ds.lora.rank 4", "t"),
        ("--teacher.policy initial", "m"),
        ("--teacher.policy initial --ds.lora.rank 4", None),
        ("--teacher.policy current --teacher.prompt_key hint", None),
    ],
)
def test_only_a_teacher_with_weights_of_its_own_has_a_path(text, path):
    config = parse("train_ppo_ray", f"--pretrain m {text}".split())
    assert config.teacher_path == path
    assert config.uses_teacher == bool(text)


# -------------------------------------------------------------------------------------------------- notes

NOTED = [
    ("template_is_not_used", "train_sft", ["--input_template", "no braces"], "--data.input_template has no {}"),
    ("template_is_not_used", "train_rm", ["--input_template", "{}\\n"], "backslash"),
    ("flags_without_effect", "train_sft", ["--pretrain_mode", "--input_template", "Q: {}"], "--data.input_template is not used"),
    ("raw_text_has_no_template", "train_sft", ["--pretrain_mode", "--apply_chat_template"], "--data.apply_chat_template is for lists of messages"),
    ("flags_without_effect", "train_dpo", ["--ipo", "--label_smoothing", "0.1"], "--model.label_smoothing is not used"),
    ("flags_without_effect", "train_dpo", ["--lora_rank", "4", "--ref_offload"], "--ref.offload is not used"),
    ("flags_without_effect", "train_ppo_ray", ["--lora_rank", "4", "--ref.offload"], "--ref.offload is not used"),
    ("flags_without_effect", "train_ppo_ray", ["--gamma", "0.9", "--advantage_estimator", "rloo"], "--algo.advantage.gamma is not used with --algo.advantage.estimator rloo"),
    ("sums_of_16_bits_cost_precision", "train_rm", ["--grad_accum_dtype", "bf16"], "less than 1/256 of the sum before it"),
    ("sums_of_16_bits_cost_precision", "train_ppo_ray", ["--grad_accum_dtype", "half", "--param_dtype", "fp16"], "less than 1/2048 of the sum before it"),
    ("stop_text_is_meant", "train_ppo_ray", ["--rollout.stop", "\\n\\n"], "--rollout.stop contains a backslash and an n"),
    ("kl_estimator_fits_its_use", "train_ppo_ray", ["--use_kl_loss"], "k2 or k3 is recommended"),
    ("kl_estimator_fits_its_use", "train_ppo_ray", ["--kl_estimator", "k3"], "k1 is recommended"),
    ("flags_without_effect", "train_ppo_ray", ["--use_kl_loss", "--init_kl_coef", "0"], "--algo.kl.use_loss is not used"),
    ("flags_without_effect", "train_ppo_ray", ["--policy_loss_type", "sapo", "--eps_clip_low_high", "0.2", "0.3"], "--actor.eps_clip_low_high is not used"),
    ("flags_without_effect", "train_ppo_ray", ["--normalize_reward", "--remote_rm_url", "r.py"], "--reward.normalize_enable is not used"),
    ("agent_replaces_remote_reward", "train_ppo_ray", ["--agent_func_path", "a.py", "--remote_rm_url", "r.py"], "--reward.remote_url judges only"),
    ("reward_servers_have_a_path", "train_ppo_ray", ["--remote_rm_url", "http://a/x,http://b:5000/"], "--reward.remote_url http://b:5000/ names no path: http://b:5000/get_reward is asked"),
    ("flags_without_effect", "train_ppo_ray", ["--reward.api_key", "k", "--remote_rm_url", "r.py"], "--reward.api_key is not used"),
    ("flags_without_effect", "train_ppo_ray", ["--vllm_enable_sleep", "--train.launcher", "ray"], "--vllm.enable_sleep is not used"),
    ("flags_without_effect", "train_ppo_ray", ["--vllm_num_engines", "0", "--enforce_eager"], "--vllm.enforce_eager is not used"),
    ("flags_without_effect", "train_ppo_ray", ["--vllm_num_engines", "1", "--train.launcher", "local", "--vllm_sync_with_ray"], "--vllm.sync_with_ray is not used"),
    ("rounded_rollouts_are_corrected", "train_ppo_ray", ["--vllm.quantization", "fp8"], "--algo.advantage.is_correction_enable (tis) is on because --vllm.quantization fp8"),
    ("rounded_rollouts_are_corrected", "train_ppo_ray", ["--vllm.quantization", "fp8", "--no-enable_vllm_is_correction"], "--algo.advantage.is_correction_enable is off, and --vllm.quantization fp8"),
    ("evaluations_beside_training_are_saved", "train_ppo_ray", ["--async_train", "--eval_dataset", "d", "--eval_steps", "3", "--save_steps", "2"], "--eval.steps 3"),
    ("async_engines_have_own_devices", "train_ppo_ray", ["--async_train", "--colocate_all_models"], "the engines have their own"),
    ("flags_without_effect", "train_ppo_ray", ["--critic_pretrain", "c", "--advantage_estimator", "rloo"], "--critic.model_name_or_path is not used"),
    ("flags_without_effect", "train_ppo_ray", ["--freezing_actor_steps", "5", "--advantage_estimator", "rloo"], "--critic.freezing_steps is not used: it needs a critic"),
    ("flags_without_effect", "train_ppo_ray", ["--algo.advantage.turns", "to_go"], "--algo.advantage.turns is not used: it needs an estimator that compares a prompt's samples (--algo.advantage.estimator rloo, reinforce_baseline, group_norm, dr_grpo, maxrl)"),
    ("server_is_open", "serve_rm", ["--host", "0.0.0.0"], "--host 0.0.0.0 without --api_key"),
    ("nothing_to_go_on_from", "train_sft", ["--ckpt.auto_resume"], "--ckpt.auto_resume without --ckpt.save_steps"),
    ("local_launcher_is_one_process", "train_ppo_ray", ["--actor_num_gpus_per_node", "8", "--train.launcher", "local"], "the actor's 8 workers"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "command", "argv", "expected"), NOTED)
def test_a_choice_that_is_not_followed_is_noted(rule, command, argv, expected, capsys):
    parse(command, argv)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("note: ")
    assert expected in line


def test_every_note_is_tested_and_defaults_are_silent(capsys):
    noted = {rule.__name__ for rule in rules.NOTES} | {"flags_without_effect"}
    assert noted == {note[0] for note in NOTED}
    for command in ("train_sft", "train_rm", "train_dpo", "train_ppo_ray", "serve_rm", "lora_combiner"):
        parse(command, [])
    assert capsys.readouterr().err == ""


# ------------------------------------------------------------------------------------------ derived values


@pytest.mark.parametrize(
    ("flags", "fewest"),
    [
        ("reinforce", 1),
        ("remax", 1),
        ("group_norm", 2),
        ("pass_at_k", 5),
        ("pass_at_k --algo.advantage.pass_k 2", 3),
    ],
)
def test_how_many_samples_teach_something(flags, fewest):
    """With four samples there is one subset of four, and nothing to compare it with: so it is in a game of two agents,
    whose roles have half of the default of eight samples each."""
    config = parse("train_ppo_ray", ["--algo.advantage.estimator", *flags.split()])
    assert config.fewest_compared == game_plan(config).members == fewest


@pytest.mark.parametrize(
    ("estimator", "samples"),
    [("gae", 1), ("reinforce", 1), ("rloo", 8), ("reinforce_baseline", 8), ("group_norm", 8), ("dr_grpo", 8)],
)
def test_samples_per_prompt_follow_the_estimator(estimator, samples):
    config = parse("train_ppo_ray", ["--advantage_estimator", estimator, "--rollout_batch_size", "4"])
    assert config.rollout.n_samples_per_prompt is None
    assert config.samples_per_prompt == samples
    assert config.samples_per_round == 4 * samples


@pytest.mark.parametrize(
    ("text", "every"),
    [
        ("", 16),  # of a cluster: elsewhere the number is settled before
        ("--vllm_num_engines 0", 1),
        ("--vllm_num_engines 1", 16),
        ("--vllm_num_engines 1 --enable_vllm_is_correction", 1),
        ("--vllm_num_engines 1 --vllm.quantization fp8", 1),
        ("--vllm_num_engines 1 --vllm.quantization fp8 --no-enable_vllm_is_correction", 16),
        ("--vllm_num_engines 1 --enable_vllm_is_correction --policy_loss_type cispo", 1),
    ],
)
def test_logprobs_are_sampled_where_they_are_used_or_free(text, every):
    assert parse("train_ppo_ray", text.split()).logprobs_every == every


@pytest.mark.parametrize(
    ("text", "cached"),
    [
        ("--advantage_estimator reinforce", False),
        ("--advantage_estimator reinforce --enable_prefix_caching", True),
        ("--advantage_estimator reinforce --n_samples_per_prompt 2", True),
        ("--advantage_estimator reinforce --agent_func_path a.py", True),
    ],
)
def test_prefixes_are_cached_where_they_are_shared_or_as_asked(text, cached):
    assert parse("train_ppo_ray", text.split()).engines_cache_prefixes is cached


def test_derived_values():
    """64 prompts × 4 samples = 256: three optimizer steps of at most 100 samples. 10 prompts more: one step of 40."""
    text = (
        "--rollout_batch_size 64 --n_samples_per_prompt 4 --train_batch_size 100 --advantage_estimator rloo --gamma 0.9"
    )
    config = parse("train_ppo_ray", text.split())
    assert [config.optimizer_steps(prompts) for prompts in (64, 128, 138)] == [3, 6, 7]
    assert (config.generate_batch_size, config.scoring_tokens_per_gpu, config.response_limit) == (64, 16192, 2048)
    assert config.gamma == 1.0
    assert config.algo.advantage.gamma == 0.9
    assert config.critic_path is None
    assert parse("train_ppo_ray", ["--gamma", "0.9"]).gamma == 0.9
    assert config.loss_aggregation == "token"
    assert parse("train_ppo_ray", ["--policy_loss_type", "gspo"]).loss_aggregation == "sequence"
    assert parse("train_ppo_ray", ["--policy_loss_type", "gspo", "--algo.loss_agg", "constant"]).loss_aggregation == "constant"  # fmt: skip


@pytest.mark.parametrize(
    ("command", "words", "tokens"),
    [
        ("train_sft", "", 300),
        ("train_rm", "", 600),
        ("train_dpo", "", 600),
        ("train_dpo", "--model.loss_type kto", 300),
    ],
)
def test_forwards_hold_the_tokens_of_so_many_longest_samples(command, words, tokens):
    """Three of 100 tokens; a pair has two sequences."""
    config = parse(command, ["--micro_train_batch_size", "3", "--max_len", "100", *words.split()])
    assert config.tokens_per_forward == tokens


@pytest.mark.parametrize(
    ("text", "source", "critic"),
    [
        ("--pretrain m", None, "m"),
        ("--pretrain m --reward_pretrain r1,r2", "model", "r1"),
        ("--pretrain m --reward_pretrain r1 --remote_rm_url http://h", "http", "m"),
        ("--pretrain m --remote_rm_url f.py", "function", "m"),
        ("--pretrain m --remote_rm_url f.py --agent_func_path a.py", "agent", "m"),
        ("--pretrain m --critic_pretrain c", None, "c"),
    ],
)
def test_reward_source_and_the_critics_start(text, source, critic):
    config = parse("train_ppo_ray", text.split())
    assert (config.reward_source, config.critic_path) == (source, critic)


@pytest.mark.parametrize(
    ("text", "sources"),
    [
        ("", []),
        ("--remote_rm_url a.py", [("function", ("a.py",))]),
        ("--remote_rm_url http://a,http://b", [("http", ("http://a", "http://b"))]),
        ("--remote_rm_url http://a,x.py,http://b", [("function", ("x.py",)), ("http", ("http://a", "http://b"))]),
        ("--remote_rm_url http://a,http://b --reward.weights 1 2", [("http", ("http://a",)), ("http", ("http://b",))]),
        ("--remote_rm_url http://a,x.py --reward.weights 1 2", [("http", ("http://a",)), ("function", ("x.py",))]),
        ("--remote_rm_url x.py --reward_pretrain r", [("function", ("x.py",))]),
        ("--remote_rm_url x.py --reward_pretrain r --reward.weights 2", [("function", ("x.py",))]),
        ("--remote_rm_url x.py --reward_pretrain r --reward.weights 2 1", [("function", ("x.py",)), ("model", ("r",))]),
        ("--reward_pretrain r,s", [("model", ("r",)), ("model", ("s",))]),
    ],
)
def test_sources_of_rewards(text, sources):
    config = parse("train_ppo_ray", text.split())
    assert list(config.reward.sources) == sources
    assert config.uses_reward_model == any(kind == "model" for kind, _ in sources)
    assert config.reward_source == (sources[0][0] if sources else None)


def test_the_key_of_reward_servers_is_never_shown(capsys):
    argv = ["--remote_rm_url", "http://h", "--reward.api_key", "SECRET"]
    config = parse("train_ppo_ray", argv)
    assert config.reward.api_key == "SECRET"
    assert "SECRET" not in repr(config)
    with pytest.raises(SystemExit):
        parse("train_ppo_ray", [*argv, "--print_config"])
    assert "SECRET" not in capsys.readouterr().out


def test_engines_sleep_only_where_they_share_devices():
    for shared in (["--colocate_all_models"], ["--train.launcher", "local"]):
        assert parse("train_ppo_ray", ["--vllm_enable_sleep", *shared]).engines_sleep is True
        assert parse("train_ppo_ray", ["--vllm_enable_sleep", "false", *shared]).engines_sleep is False
        assert parse("train_ppo_ray", shared).engines_sleep is None
    assert parse("train_ppo_ray", ["--vllm_enable_sleep"]).engines_sleep is False
    assert parse("train_ppo_ray", ["--colocate_all_models", "--async_train"]).engines_sleep is False


def test_auto_is_the_word_for_what_is_left_to_the_run():
    for word in ("auto", "none"):
        assert parse("train_ppo_ray", ["--vllm.enable_sleep", word]).vllm.enable_sleep is None
        assert parse("train_ppo_ray", ["--vllm.gpu_memory_utilization", word]).vllm.gpu_memory_utilization is None
    with pytest.raises(ConfigError, match=r"--ds.enable_sleep: is a switch"):
        parse("train_ppo_ray", ["--ds.enable_sleep", "auto"])


def test_a_template_without_a_place_for_the_prompt_is_none():
    assert parse("train_sft", []).data.prompt_template == "User: {}\nAssistant: "
    assert parse("train_sft", ["--input_template", "x"]).data.prompt_template is None
    assert parse("train_sft", ["--apply_chat_template"]).data.prompt_template is None


def test_periods_paths_and_names():
    config = parse("train_dpo", ["--pretrain", "m", "--save_steps", "5", "--wandb_run_name", "a/b:c"])
    assert (config.eval.period, config.ckpt.period) == (None, 5)
    assert config.reference_path == "m"
    assert config.logger.directory == "./runs/a_bc"
    assert parse("train_dpo", ["--logger.run_dir", "x"]).logger.directory == "x"
    assert parse("train_dpo", ["--pretrain", "m", "--ref_pretrain", "r"]).reference_path == "r"


def test_checkpoints_that_nobody_placed_are_beside_the_model():
    """With --ckpt.auto_resume, so that a run with another model does not find them."""
    words = ["--ckpt.output_dir", "a/b", "--save_steps", "5"]
    assert parse("train_rm", words).ckpt.folder == "./ckpt/checkpoints_rm"
    assert parse("train_rm", [*words, "--ckpt.auto_resume"]).ckpt.folder == "a/b/checkpoints_rm"
    placed = parse("train_rm", [*words, "--ckpt.auto_resume", "--ckpt.path", "./ckpt/mine"]).ckpt
    assert placed.folder == "./ckpt/mine"
    assert placed.resumes
    assert parse("train_rm", [*words, "--load_checkpoint"]).ckpt.resumes
    assert not parse("train_rm", words).ckpt.resumes


def test_a_configuration_cannot_be_changed():
    config = parse("train_ppo_ray", [])
    with pytest.raises(AttributeError):
        config.actor.adam.lr = 1.0


LET_THROUGH = "--pretrain m --prompt_data d --remote_rm_url r.py --advantage_estimator {estimator}"


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


def test_the_reward_server_is_let_through():
    text = "--reward_pretrain r --port 5000 --bf16 --flash_attn --normalize_reward --max_len 8192 --batch_size 16 --load_in_4bit --use_ms"
    config = parse("serve_rm", text.split())
    require_runnable(config)


def test_merging_is_let_through():
    text = "--model_path a --lora_path b --output_path c --is_rm --bf16"
    config = parse("lora_combiner", text.split())
    require_runnable(config)


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
        "--actor_num_gpus_per_node 8 --ring_attn_size 4 --ring_head_stride 2",
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
def test_what_rl_does_is_let_through(estimator, text):
    config = parse("train_ppo_ray", [*LET_THROUGH.format(estimator=estimator).split(), *text.split()])
    require_runnable(config)


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
    base = LET_THROUGH.format(estimator="group_norm").split()
    argv = [word for word in base if word not in ("--remote_rm_url", "r.py")]
    config = parse("train_ppo_ray", [*argv, *text.split()])
    require_runnable(config)
