"""Sections only RL has: algorithm, rollout, vLLM, training mode."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from openrlhf.algorithms.advantages import ESTIMATORS, PASS_K, Turns
from openrlhf.algorithms.corrections import CORRECTIONS
from openrlhf.algorithms.kl import KL_ESTIMATORS
from openrlhf.algorithms.losses import POLICY_LOSSES
from openrlhf.algorithms.reduction import AGGREGATION_SYNONYMS, Aggregation
from openrlhf.config.fields import Flag
from openrlhf.worlds.base import WorldSettings, parse_options, parse_tasks

SELF_CORRECTING = ",".join(name for name, loss in POLICY_LOSSES.items() if loss.corrects_itself)
"""Policy losses that no weight of a correction is applied to."""
BOUNDLESS = ",".join(name for name, entry in CORRECTIONS.items() if not entry.takes_bounds)
"""Corrections that read no thresholds."""


@dataclass(frozen=True, kw_only=True)
class AdvantageSection:
    estimator: Annotated[
        str,
        Flag(
            "advantage estimator; group_norm is GRPO, only gae has a critic",
            flat="advantage_estimator",
            choices=tuple(ESTIMATORS),
            synonyms=tuple((word, name) for name, entry in ESTIMATORS.items() for word in entry.synonyms),
        ),
    ] = "gae"
    lambd: Annotated[float, Flag("lambda of GAE", flat="lambd", only_with="uses_critic", within=(0, 1))] = 1.0
    gamma: Annotated[
        float,
        Flag(
            "discount per action token; group estimators use 1",
            flat="gamma",
            only_with="!uses_group_baseline",
            within=(0, 1),
        ),
    ] = 1.0
    turns: Annotated[
        str | None,
        Flag(
            "what the tokens of a turn are compared by under group estimators: their episode's total, its return to go "
            "from that turn on, or rewards per step as in GRPO's paper; unset: outcome",
            choices=tuple(map(str, Turns)),
            only_with="uses_group_baseline",
        ),
    ] = None
    pass_k: Annotated[
        int,
        Flag("samples of a subset, of which the best counts", only_with=".estimator=pass_at_k", above=0),
    ] = PASS_K
    no_std_norm: Annotated[
        bool,
        Flag("whiten advantages by their mean only", flat="no_advantage_std_norm", only_with="whitens_advantages"),
    ] = False
    is_correction_enable: Annotated[
        bool | None,
        Flag(
            "weight tokens by training over rollout probability; auto: with vllm.quantization",
            flat="enable_vllm_is_correction",
            shown_default="auto",
        ),
    ] = None
    is_correction_threshold: Annotated[
        tuple[float, float],
        Flag(
            "bounds of that weight; one value X means 0 X",
            flat="vllm_is_truncated_threshold",
            one_value="upper",
            unlimited=True,
            only_with=f"corrects_off_policy actor.policy_loss_type!={SELF_CORRECTING} .is_correction_type!={BOUNDLESS}",
        ),
    ] = (0.5, 5.0)
    is_correction_type: Annotated[
        str,
        Flag(
            ", ".join(f"{name} ({entry.summary})" for name, entry in CORRECTIONS.items()),
            flat="vllm_is_correction_type",
            choices=tuple(CORRECTIONS),
            only_with=f"corrects_off_policy actor.policy_loss_type!={SELF_CORRECTING}",
        ),
    ] = "tis"


@dataclass(frozen=True, kw_only=True)
class KLSection:
    init_coef: Annotated[
        float, Flag("KL coefficient; 0 = no reference model at all", flat="init_kl_coef", at_least=0)
    ] = 0.01
    target: Annotated[
        float | None, Flag("KL aimed at by adapting the coefficient; unset: it is fixed", flat="kl_target", above=0)
    ] = None
    horizon: Annotated[
        int, Flag("samples over which the coefficient adapts", flat="kl_horizon", only_with=".target", above=0)
    ] = 10000
    estimator: Annotated[
        str,
        Flag(
            ", ".join(f"{name}: {entry.formula}" for name, entry in KL_ESTIMATORS.items())
            + ", with d = log π − log π_ref",
            flat="kl_estimator",
            choices=tuple(KL_ESTIMATORS),
            only_with="uses_reference",
        ),
    ] = "k1"
    use_loss: Annotated[
        bool,
        Flag("KL is a loss term instead of a per-token reward", flat="use_kl_loss", only_with="uses_reference"),
    ] = False


@dataclass(frozen=True, kw_only=True)
class AlgoSection:
    advantage: AdvantageSection = field(default=AdvantageSection())
    kl: KLSection = field(default=KLSection())
    dynamic_filtering_enable: Annotated[
        bool, Flag("replace prompt groups whose mean score is outside the range", flat="dynamic_filtering")
    ] = False
    dynamic_filtering_range: Annotated[
        tuple[float, float],
        Flag(
            "the range, both ends excluded",
            flat="dynamic_filtering_reward_range",
            unlimited=True,
            only_with=".dynamic_filtering_enable",
        ),
    ] = (0.0, 1.0)
    loss_agg: Annotated[
        str | None,
        Flag(
            "mean of the loss over tokens, over sequences, sum over a constant, mean over each prompt's tokens, or sum "
            "of a sequence's tokens; unset: the policy loss's own",
            choices=tuple(map(str, Aggregation)),
            synonyms=AGGREGATION_SYNONYMS,
        ),
    ] = None
    router_replay: Annotated[
        bool | None,
        Flag(
            "of a mixture of experts: each token is trained through the experts that the engine chose for it; unset: "
            "where the engine tells them"
        ),
    ] = None
    sampling_mask: Annotated[
        int | None,
        Flag(
            "with top-p, top-k or min-p, the policy's softmax is over what a token was sampled from, where that is at "
            "most so many tokens; 0: over the whole vocabulary; unset: 64, or top_k where it is more",
            shown_default="64",
            only_with="cuts_distributions !rollout.exact",
            at_least=0,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class RolloutSection:
    batch_size: Annotated[int, Flag("prompts per training step", flat="rollout_batch_size", above=0)] = 1024
    n_samples_per_prompt: Annotated[
        int | None,
        Flag(
            "responses per prompt; unset: 1 for gae, reinforce and remax, 8 for the group estimators",
            flat="n_samples_per_prompt",
            shown_default="1 or 8",
            above=0,
        ),
    ] = None
    vllm_generate_batch_size: Annotated[
        int | None,
        Flag(
            "prompts in play at a time; more than batch_size (over-sampling) needs dynamic filtering, async or "
            "abort_stragglers",
            flat="vllm_generate_batch_size",
            above=0,
        ),
    ] = None
    abort_stragglers: Annotated[
        bool,
        Flag("sync: a round ends with its batch_size-th group; what is in play stops, and goes on in the next round"),
    ] = False
    micro_batch_size: Annotated[
        int,
        Flag(
            "samples per forward when scoring",
            flat="micro_rollout_batch_size micro_forward_batch_size",
            only_with="!train.dynamic_batch_enable",
            above=0,
        ),
    ] = 1
    max_tokens_per_gpu: Annotated[
        int | None,
        Flag(
            "the same budget for those forwards; unset: train.max_tokens_per_gpu",
            flat="rollout_max_tokens_per_gpu max_tokens_per_gpu",
            only_with="train.dynamic_batch_enable|uses_reward_model",
            above=0,
        ),
    ] = None
    max_new_tokens: Annotated[
        int | None, Flag("longest response in tokens; unset: what data.max_len leaves", flat="max_new_tokens", above=0)
    ] = None
    temperature: Annotated[float, Flag("sampling temperature, also in log-probs", flat="temperature", above=0)] = 1.0
    top_p: Annotated[float, Flag("sample from the smallest set with this probability", flat="top_p")] = 1.0
    top_k: Annotated[int, Flag("sample from this many likeliest tokens; -1 = all", flat="top_k")] = -1
    stop: Annotated[
        tuple[str, ...] | None,
        Flag("texts that end a response, which keeps them; several words: several texts"),
    ] = None
    exact: Annotated[
        bool,
        Flag(
            "engines and trainer compute log-probs with the same kernels, bit by bit: their gap is exactly 0, at a "
            "price in speed (docs/precision.md)",
            only_with="vllm.num_engines!=0",
        ),
    ] = False
    agent_hosts: Annotated[
        int | None,
        Flag(
            "processes for an agent's code; unset: chosen by load, 0: this process",
            only_with="train.agent_func_path",
            at_least=0,
        ),
    ] = None
    step_timeout: Annotated[
        float,
        Flag(
            "seconds one step of an agent's environment may take",
            only_with="plays_agent",
            above=0,
        ),
    ] = 600.0


@dataclass(frozen=True, kw_only=True)
class WorldSection:
    """Worlds: environments of existing packages (docs/worlds.md)."""

    tasks: Annotated[
        str | None,
        Flag(
            "tasks of the world by name, with weights: chain_sum,gcd:2; unset: what the world has as its default",
            only_with="uses_world",
        ),
    ] = None
    options: Annotated[
        str | None,
        Flag("what only this world knows, as key=value,…; a value is JSON, or else a text", only_with="uses_world"),
    ] = None
    samples: Annotated[
        int,
        Flag(
            "records of a world that is the data set; the prompts of a run without another one",
            only_with="uses_world",
            above=0,
        ),
    ] = 10_000
    eval_samples: Annotated[
        int,
        Flag(
            "records of a world that is --eval.dataset; no seed of training gives them",
            only_with="measures_world",
            above=0,
        ),
    ] = 100
    python: Annotated[
        str | None,
        Flag(
            "interpreter that has the world's package; unset: that of `openrlhf worlds install`, else this one",
            only_with="uses_world",
        ),
    ] = None
    processes: Annotated[
        int, Flag("world processes of each agent host, which share its episodes", only_with="plays_world", above=0)
    ] = 1
    timeout: Annotated[
        float,
        Flag(
            "seconds the world may take for an answer; then its process is killed and replaced",
            only_with="uses_world",
            above=0,
        ),
    ] = 120.0

    opponent: Annotated[
        str,
        Flag(
            "who plays against the policy in games of several agents: self, or a player of the world's own (random), a "
            "folder with a model, or the URL of an OpenAI-compatible server",
            only_with="plays_world",
        ),
    ] = "self"
    eval_opponent: Annotated[
        str | None,
        Flag(
            "the same in evaluations on records of the world; unset: as in training",
            only_with="plays_world measures_world",
        ),
    ] = None

    def settings(self, seed: int) -> WorldSettings:
        """How a run with this seed asks for the world. Raises WorldError."""
        return WorldSettings(parse_tasks(self.tasks or ""), parse_options(self.options or ""), seed)


@dataclass(frozen=True, kw_only=True)
class VLLMSection:
    num_engines: Annotated[
        int | None,
        Flag(
            "vLLM engines; 0 = the embedded engine; unset: 0 without a GPU or vLLM, else one per actor device ÷ TP",
            flat="vllm_num_engines",
            at_least=0,
        ),
    ] = None
    tensor_parallel_size: Annotated[
        int, Flag("devices that share a layer", flat="vllm_tensor_parallel_size", only_with=".num_engines!=0", above=0)
    ] = 1
    pipeline_parallel_size: Annotated[
        int, Flag("stages of layers, each on devices of its own", only_with=".num_engines!=0", above=0)
    ] = 1
    processes_per_engine: Annotated[
        int,
        Flag(
            "vLLM processes that share an engine's device and requests: 2 or 3 where vLLM's Python takes longer than "
            "the GPU, as with small models and hundreds of sequences",
            only_with=".num_engines!=0",
            above=0,
        ),
    ] = 1
    sync_backend: Annotated[
        str,
        Flag(
            "how weights reach engines: nccl (GPU to GPU; where one is shared they stay on it), or gloo (CPU memory)",
            flat="vllm_sync_backend",
            only_with=".num_engines!=0",
        ),
    ] = "nccl"
    sync_with_ray: Annotated[
        bool,
        Flag(
            "weights travel through Ray's object store",
            flat="vllm_sync_with_ray",
            only_with=".num_engines!=0 train.launcher=ray",
        ),
    ] = False
    sync_verify: Annotated[
        bool,
        Flag(
            "compare checksums, and log-probs of engine and policy, after every transport of weights",
            only_with=".num_engines!=0",
        ),
    ] = False
    lora_sync: Annotated[
        Literal["adapter", "merged"] | None,
        Flag(
            "how engines get LoRA: adapter (the base once, then the adapter alone) or merged (all weights each time); "
            "unset: adapter where vLLM can hold it and does not sleep",
            only_with=".num_engines!=0 ds.lora.rank",
        ),
    ] = None
    quantization: Annotated[
        Literal["fp8"] | None,
        Flag(
            "engines sample with weights of 8 bits, rounded at every push; training is as it was, and the off-policy "
            "correction is on; unset: with the policy's own",
            only_with=".num_engines!=0",
        ),
    ] = None
    speculation: Annotated[
        Literal["ngram", "suffix", "history"] | None,
        Flag(
            "drafts of the next tokens, which a step verifies together: from the same sequence (ngram), from a tree of "
            "earlier ones (suffix: needs arctic-inference), or from earlier responses to the prompt (history); samples "
            "stay exact; unset: none",
            only_with=".num_engines!=0",
        ),
    ] = None
    speculation_tokens: Annotated[
        int, Flag("tokens of a draft, at most", only_with=".num_engines!=0 .speculation", within=(1, 64))
    ] = 4
    enable_prefix_caching: Annotated[
        bool,
        Flag(
            "engines cache prompt prefixes; on in any case where samples or turns share them",
            flat="enable_prefix_caching",
            only_with=".num_engines!=0",
        ),
    ] = False
    logits_dtype: Annotated[
        Literal["auto", "fp32", "model"],
        Flag(
            "dtype of the engines' logits: fp32, as the trainer's, or model (that of ds.param_dtype); auto: fp32, "
            "unless layers are quantised",
            only_with=".num_engines!=0 ds.param_dtype!=fp32",
        ),
    ] = "auto"
    enforce_eager: Annotated[
        bool, Flag("engines capture no CUDA graphs", flat="enforce_eager", only_with=".num_engines!=0")
    ] = False
    enable_sleep: Annotated[
        bool | None,
        Flag(
            "engines that share the actor's devices free their memory while training; auto: if both do not fit",
            flat="vllm_enable_sleep",
            shown_default="auto",
            only_with=".num_engines!=0 train.colocate_all|train.launcher=local",
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        Flag(
            "share of device memory an engine may take; auto: 0.95, and of a device that it shares with training what "
            "it can use beside that",
            flat="vllm_gpu_memory_utilization",
            shown_default="auto",
            only_with=".num_engines!=0",
            within=(0.01, 1),
        ),
    ] = None
    health_timeout: Annotated[
        float,
        Flag(
            "Ray: seconds without a sign of life after which an engine with requests is replaced; 0 = never",
            only_with=".num_engines!=0 train.launcher=ray",
            at_least=0,
        ),
    ] = 120.0

    @property
    def devices_per_engine(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def size_in_flags(self) -> str:
        """How an engine's devices are asked for."""
        stages = self.pipeline_parallel_size
        pipeline = f" × --vllm.pipeline_parallel_size {stages}" if stages > 1 else ""
        return f"--vllm.tensor_parallel_size {self.tensor_parallel_size}{pipeline}"
