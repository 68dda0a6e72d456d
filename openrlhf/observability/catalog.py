"""Every metric that a run logs: its name, its unit and its meaning. `docs/metrics.md` is written from it.

A test walks over the calls that log metrics and compares their names with these: it fails for a name that is missing
here, and for one that is not logged any more. `<…>` in a name stands for what the run puts there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Metric(NamedTuple):
    unit: str
    meaning: str


class Section(NamedTuple):
    """Metrics that are read together."""

    title: str
    about: str
    metrics: Mapping[str, Metric]


REWARD, SHARE, TOKENS, SAMPLES, GROUPS = "reward", "share", "tokens", "samples", "groups"
NATS, SECONDS, VERSIONS, NONE = "nats", "s", "versions", ""

CATALOG = (
    Section(
        "Rewards",
        "RL. Means over the judged samples of the groups that the round trains on. A sample that failed is in none of "
        "them. What reward files and agents return as `extra_logs` is logged under its own name, as a mean over the "
        "samples that have it; with several reward sources there is `reward_<source>` for each.",
        {
            "reward": Metric(REWARD, "an episode's reward with length penalties, before it is clipped"),
            "score": Metric(SHARE, "success, as the reward source says it; the reward where it says nothing"),
            "return": Metric(REWARD, "an episode's total as samples are compared by it, less the price of its KL"),
            "group_reward_std": Metric(
                REWARD,
                "standard deviation of the rewards of a prompt's samples, mean over prompts; 0: nothing to learn",
            ),
            "reward_clipped": Metric(SHARE, "rewards that `--reward.clip_range` has changed"),
            "overlong_penalty": Metric(REWARD, "penalty of `--reward.overlong_buffer_len`, per episode"),
            "rollout/reward_mean": Metric(REWARD, "reward as the source gave it"),
            "rollout/reward_mean_<agent>": Metric(
                REWARD, "the same of the episodes of one agent, where a prompt's samples play several roles"
            ),
            "source/<datasource>_score": Metric(
                SHARE, "`score` of the prompts of one data source, where the training prompts have several"
            ),
            "source/<datasource>_reward": Metric(REWARD, "`rollout/reward_mean` of them"),
            "source/<datasource>_prompts": Metric(GROUPS, "how many of the round's prompts are of it"),
            "rollout/reward_std": Metric(REWARD, "standard deviation of these over all samples of the round"),
        },
    ),
    Section(
        "Responses",
        "RL. What the policy wrote.",
        {
            "response_length": Metric(TOKENS, "tokens that the policy sampled in an episode"),
            "total_length": Metric(TOKENS, "tokens of an episode, prompt and feedback included"),
            "truncated": Metric(SHARE, "episodes that a limit of length or turns has ended"),
            "response_clip_ratio": Metric(SHARE, "episodes that fill `--data.max_len`"),
            "rollout/response_length_mean": Metric(TOKENS, "the same as `response_length`"),
            "rollout/truncated_rate": Metric(SHARE, "the same as `truncated`"),
            "rollout/num_samples": Metric(SAMPLES, "judged samples of the round"),
            "rollout/support_size": Metric(
                TOKENS,
                "how many tokens a token was sampled from, on average over those of which it is known, where top-p, "
                "top-k or min-p cut the distribution",
            ),
            "rollout/support_untold": Metric(
                SHARE,
                "of the tokens whose distribution was cut, those that were sampled from more tokens than engines tell "
                "(`--algo.sampling_mask`): their softmax is over the whole vocabulary",
            ),
            "rollout/failed": Metric(
                SAMPLES, "samples whose episode or reward failed, those of replaced groups included"
            ),
            "rollout/left_alone": Metric(
                SAMPLES, "judged samples that are not trained on, because no other sample of their prompt was judged"
            ),
        },
    ),
    Section(
        "Which groups are trained on",
        "RL, with dynamic filtering or one of the pipelines that do not wait for all episodes.",
        {
            "dynamic_filtering_pass_rate": Metric(SHARE, "judged groups that the filter has accepted"),
            "rollout/judged_groups": Metric(GROUPS, "groups that the filter has judged for this round"),
            "rollout/rejected_groups": Metric(GROUPS, "groups that it has rejected"),
            "rollout/buffered": Metric(GROUPS, "finished groups that wait for a later round"),
            "rollout/in_play": Metric("prompts", "prompts whose episodes go on while the round is trained on"),
            "rollout/staleness": Metric(
                VERSIONS, "age of a sample: the version that is trained less that of its oldest token, mean"
            ),
            "rollout/staleness_max": Metric(VERSIONS, "age of the oldest sample of the round"),
        },
    ),
    Section(
        "The curriculum",
        "RL, with `--data.curriculum`. Success rates are those of the curriculum, in which old results count less.",
        {
            "curriculum/seen": Metric(SHARE, "prompts of which a sample was judged"),
            "curriculum/success": Metric(SHARE, "success rate of a prompt, mean over those"),
            "curriculum/spread": Metric(
                SHARE, "prompts that draws are spread over: 1/(N Σ P²); 1: all alike (not with `solved_last`)"
            ),
            "curriculum/level": Metric(NONE, "difficulty of the present level (with `difficulty`)"),
        },
    ),
    Section(
        "The policy's update",
        "RL. Means over the action tokens of the round's optimizer steps that had a forward, unless it says otherwise.",
        {
            "policy_loss": Metric(NONE, "the policy loss, mean over optimizer steps"),
            "actor_lr": Metric(NONE, "learning rate of the last optimizer step"),
            "actor_grad_norm": Metric(NONE, "norm of the gradient before clipping, mean over optimizer steps"),
            "kl": Metric(
                NATS,
                "KL to the reference model, by `--algo.kl.estimator`; of KTO, what answers are compared with",
            ),
            "kl_coef": Metric(NONE, "the price of KL in this round"),
            "teacher_kl": Metric(
                NATS,
                "how far the policy is from its teacher: log π − log p of sampled tokens, or the divergence of "
                "`--teacher.loss`",
            ),
            "ppo_kl": Metric(NATS, "log-prob before the round's update less the present one: how far the update went"),
            "ppo_clip_ratio": Metric(SHARE, "tokens whose ratio is clipped"),
            "entropy_loss": Metric(NATS, "entropy of the policy's distribution, after temperature"),
            "aux_loss": Metric(NONE, "load-balancing loss of the experts, mean over all tokens; 1 is perfect balance"),
            "vllm_kl": Metric(
                NATS, "log-prob of the engine that sampled less that of the trainer, whatever the engine"
            ),
            "logprobs_diff": Metric(NATS, "the same, absolute values"),
            "logprobs_diff_p99": Metric(NATS, "what 99 of 100 of these absolute values do not exceed, to 2 %"),
            "logprobs_diff_max": Metric(NATS, "the largest of them"),
            "is_weight": Metric(NONE, "weight of the off-policy correction"),
            "is_corrected": Metric(SHARE, "tokens whose weight the correction has clamped or set to 0"),
            "<model>skipped_steps": Metric(
                "steps",
                "optimizer steps that were left out because something was not finite; not logged where there was "
                "none. `<model>` is `actor_`, `critic_`, or nothing in supervised training",
            ),
        },
    ),
    Section(
        "Experts of the policy",
        "RL of a mixture of experts, over the round and all ranks. Without replay (`--algo.router_replay`) the load "
        "alone.",
        {
            "experts/differ": Metric(
                SHARE,
                "of tokens and layers: the policy's routers would have chosen other experts than the engine, which are "
                "those that compute; in the first optimizer step, tokens that share a prompt's forward once",
            ),
            "experts/missing": Metric(SHARE, "tokens whose experts the policy's routers choose: the engine told none"),
            "experts/logprobs_diff": Metric(NATS, "as `logprobs_diff`, before the update, on one sample of each rank"),
            "experts/logprobs_diff_own": Metric(
                NATS, "the same samples through the experts that the policy's own routers choose: without replay"
            ),
            "experts/load_max": Metric(
                NONE, "tokens of the busiest expert of a layer, of which 1 is the mean expert's; mean over layers"
            ),
            "experts/load_min": Metric(NONE, "the same of the least busy one"),
        },
    ),
    Section(
        "The critic's update",
        "RL with `gae`. Means over action tokens, unless it says otherwise.",
        {
            "critic_loss": Metric(NONE, "the critic's loss, mean over optimizer steps"),
            "critic_lr": Metric(NONE, "learning rate of the last optimizer step"),
            "critic_grad_norm": Metric(NONE, "norm of the gradient before clipping, mean over optimizer steps"),
            "critic_clip_ratio": Metric(SHARE, "tokens whose value is clipped"),
            "critic_aux_loss": Metric(NONE, "as `aux_loss`, of the critic's experts"),
            "values": Metric(REWARD, "the critic's values"),
        },
    ),
    Section(
        "Evaluation in RL",
        'Lines with `"kind": "eval"`. `<source>` is the data set\'s name; `<k>` is `--eval.n_samples_per_prompt`.',
        {
            "eval_<source>_pass1": Metric(SHARE, "mean score"),
            "eval_<source>_pass<k>": Metric(SHARE, "pass@k, unbiased: at least one of k samples has a score of 1"),
            "eval_<source>_mean": Metric(REWARD, "mean reward"),
            "eval_<source>_score_<agent>": Metric(SHARE, "mean score of one agent, where samples play several roles"),
            "eval_<source>_response_length_mean": Metric(TOKENS, "tokens that the policy sampled"),
            "eval_<source>_truncated_rate": Metric(SHARE, "episodes that a limit has ended"),
            "eval_response_length_mean": Metric(TOKENS, "the same over all data sets"),
            "eval_truncated_rate": Metric(SHARE, "the same over all data sets"),
            "eval_num_samples": Metric(SAMPLES, "judged samples"),
            "eval_failed": Metric(SAMPLES, "samples whose episode or reward failed"),
            "eval_best": Metric(NONE, "the highest value so far of `--ckpt.best_metric_key`"),
        },
    ),
    Section(
        "Supervised training",
        "SFT, reward models, DPO and KTO. Means over what the optimizer step learns from: target tokens in SFT, pairs "
        "or answers otherwise. In evaluations a mean is one over the whole data set.",
        {
            "gpt_loss": Metric(NATS, "SFT: negative log-prob of a target token"),
            "eval gpt_loss": Metric(NATS, "the same, in an evaluation"),
            "loss": Metric(NONE, "the objective's loss"),
            "loss_mean": Metric(NONE, "running mean of `loss` or `gpt_loss`, which forgets a tenth with every step"),
            "eval_loss": Metric(NONE, "the objective's loss in an evaluation"),
            "acc": Metric(SHARE, "pairs whose chosen answer is the better one; of KTO, answers on the right side"),
            "acc_mean": Metric(SHARE, "running mean of `acc`; in an evaluation, `acc` over the data set"),
            "chosen_reward": Metric(REWARD, "reward of the chosen (KTO: the desirable) answers"),
            "reject_reward": Metric(REWARD, "reward of the rejected (KTO: the undesirable) answers"),
            "reward_mean": Metric(REWARD, "reward models: mean of all rewards, in evaluations"),
            "reward_std": Metric(REWARD, "reward models: their standard deviation, in evaluations"),
            "nll_loss": Metric(NATS, "DPO with `--model.nll_loss_coef`: mean negative log-prob of a chosen token"),
            "lr": Metric(NONE, "learning rate"),
            "grad_norm": Metric(NONE, "norm of the gradient before clipping"),
        },
    ),
    Section(
        "Time and machines",
        "Evaluations and checkpoints are in no step's time.",
        {
            "timing/step_total": Metric(SECONDS, "the whole step"),
            "timing/generation": Metric(SECONDS, "RL: waiting for the round's rollouts"),
            "timing/make_experience": Metric(SECONDS, "RL: forwards of frozen weights, and advantages"),
            "timing/ppo_train": Metric(SECONDS, "RL: the optimizer steps"),
            "timing/broadcast": Metric(SECONDS, "RL: bringing the new weights to the engines"),
            "timing/evaluation_wait": Metric(
                SECONDS, "RL, async: a push waits for an evaluation of the weights before it"
            ),
            "timing/train": Metric(SECONDS, "supervised: the optimizer step"),
            "startup/total": Metric(SECONDS, "RL, with the first step: from the command to the first sample"),
            "startup/<part>": Metric(
                SECONDS,
                "RL, with the first step: a part of it, `imports`, `data`, `cluster`, `reward`, `vllm` (its import), "
                "`engine`, `models`, `checkpoint`, `push`, `first_sample`; and of the engine's own start, also while "
                "nobody waits for it, `engine_process`, `engine_weights`, `engine_memory`, `engine_cache`, "
                "`engine_graphs`",
            ),
            "perf/tokens_per_second": Metric("tokens/s", "tokens of the step's samples over the step's time"),
            "perf/generated_tokens_per_second": Metric("tokens/s", "RL: only those that the policy sampled (`tok/s`)"),
            "perf/max_tokens_per_gpu": Metric(
                TOKENS, "most tokens of a micro-batch on a device, once memory ran out and they had to be cut smaller"
            ),
            "perf/overlap": Metric(
                SHARE, "RL, async: the part of a round's time in which generation went on beside training"
            ),
            "memory/peak_<phase>_gb": Metric(
                "GB", "most memory in use on any device; `<phase>` is `generation` or `training`"
            ),
            "device/<node>/<phase>_busy": Metric(SHARE, "how busy the devices of a node were in the phase"),
            "sync/buckets": Metric("buckets", "in how many parts the weights were sent to the engines"),
            "sync/bytes": Metric(
                "bytes",
                "of the weights that were sent: all of them, or with `--vllm.lora_sync adapter` the adapter, and the "
                "base where an engine needed it",
            ),
            "sync/probe_gap": Metric(
                NATS, "`--vllm.sync_verify`: how far the engine's log-probs are from the policy's"
            ),
            "rollout/draft_acceptance": Metric(
                SHARE, "`--vllm.speculation`: tokens of drafts that were kept, since the last push"
            ),
            "rollout/draft_gain": Metric(
                TOKENS,
                "the same: tokens that drafts added to a step of a request that could have had one; below 0.25 they "
                "are switched off for 8 rounds",
            ),
            "rollout/tokens_per_step": Metric(TOKENS, "the same: tokens of a request per step, 1 without drafts"),
            "rollout/engines_replaced": Metric(
                "engines", "engines that were lost and started again since the last push"
            ),
        },
    ),
)

INTRODUCTION = """\
# Metrics

What `metrics.jsonl`, W&B and TensorBoard get, one line per training step and per evaluation. `make docs` writes this
page from `openrlhf/observability/catalog.py`, and a test compares that with the calls that log metrics. How the report
shows them: [report.md](report.md). What is said when one of them goes wrong: [troubleshooting.md](troubleshooting.md).

Every line has `step` and `global_step` (optimizer steps; in RL rounds), `kind` (`train` or `eval`) and `time`. A mean
is one over all ranks and micro-batches; a mean over nothing is left out. A share is from 0 to 1.
"""


def render() -> str:
    """The page."""
    lines = [INTRODUCTION]
    for section in CATALOG:
        lines += [f"## {section.title}", "", section.about, "", "| metric | unit | meaning |", "|---|---|---|"]
        lines += [f"| `{name}` | {metric.unit} | {metric.meaning} |" for name, metric in section.metrics.items()]
        lines.append("")
    return "\n".join(lines)
