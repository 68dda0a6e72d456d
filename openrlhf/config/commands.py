"""One configuration class per command. `RLConfig().actor.adam.lr` is the flag `--actor.adam.lr` of train_ppo_ray.

Values that follow from several flags are properties here, never written back into fields.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from openrlhf.algorithms.advantages import ESTIMATORS
from openrlhf.algorithms.losses import POLICY_LOSSES
from openrlhf.algorithms.preferences import PAIR_LOSSES
from openrlhf.algorithms.reduction import Aggregation
from openrlhf.config.backend import (
    CausalBackendSection,
    DTypeSection,
    RLBackendSection,
    RMBackendSection,
    ServeBackendSection,
)
from openrlhf.config.data import (
    DPODataSection,
    PromptDataSection,
    RMDataSection,
    SFTDataSection,
    TokenizerSection,
)
from openrlhf.config.fields import Flag
from openrlhf.config.models import (
    ActorSection,
    CriticSection,
    DPOModelSection,
    DPORefSection,
    RefSection,
    RewardSection,
    RMModelSection,
    ServedRewardSection,
    SFTModelSection,
    TeacherSection,
    TrustSection,
    split_commas,
)
from openrlhf.config.reporting import (
    EvalSection,
    LoggerSection,
    RLCheckpointSection,
    RLEvalSection,
    RLLoggerSection,
    RMEvalSection,
    SupervisedCheckpointSection,
    logger_for,
)
from openrlhf.config.rl import AlgoSection, RolloutSection, VLLMSection, WorldSection
from openrlhf.config.training import AdamSection, OptimizerSection, RLTrainSection, SupervisedTrainSection
from openrlhf.worlds.environments import is_world

RewardSource = Literal["agent", "function", "http", "model"]

LARGEST_SUPPORT = 64
"""The size of the largest support that engines tell unless they are asked for more. A nucleus of 0.9 is nearly always
smaller; vLLM sorts so many tokens out of the vocabulary, and sends them, for each token that it samples."""
LOGPROBS_EVERY = 16
"""vLLM takes half as long again with sampled log-probs. Where only metrics use them, one prompt in so many has them."""


@dataclass(frozen=True, kw_only=True)
class HubSection:
    use_ms: Annotated[bool, Flag("models and data from ModelScope", flat="use_ms")] = False


@dataclass(frozen=True, kw_only=True)
class TrainerSection(HubSection):
    local_rank: Annotated[
        int,
        Flag(
            "accepted; launchers give it beside the variable that counts",
            flat="local_rank",
            no_effect="the variable LOCAL_RANK counts, which launchers set",
        ),
    ] = -1


@dataclass(frozen=True, kw_only=True)
class RLConfig(TrainerSection):
    """`train_ppo_ray`: reinforcement learning."""

    actor: ActorSection = field(default=ActorSection())
    critic: CriticSection = field(default=CriticSection(), metadata={"only_with": "uses_critic"})
    ref: RefSection = field(default=RefSection(), metadata={"only_with": "uses_reference !reference_is_base"})
    reward: RewardSection = field(default=RewardSection())
    teacher: TeacherSection = field(default=TeacherSection())
    algo: AlgoSection = field(default=AlgoSection())
    rollout: RolloutSection = field(default=RolloutSection())
    train: RLTrainSection = field(default=RLTrainSection())
    world: WorldSection = field(default=WorldSection())
    vllm: VLLMSection = field(default=VLLMSection())
    ds: RLBackendSection = field(default=RLBackendSection())
    data: PromptDataSection = field(default=PromptDataSection(max_samples=100_000_000))
    eval: RLEvalSection = field(default=RLEvalSection())
    ckpt: RLCheckpointSection = field(default=RLCheckpointSection(path="./ckpt/checkpoints_ppo_ray"))
    logger: RLLoggerSection = field(
        default_factory=lambda: logger_for("ppo", project="openrlhf_train_ppo", section=RLLoggerSection)
    )
    max_steps: Annotated[
        int | None,
        Flag(
            "turns a multi-turn episode may have; unset: the environment decides",
            only_with="train.agent_func_path",
            above=0,
        ),
    ] = None

    @property
    def plays_world(self) -> bool:
        """The agent is a world: `openrlhf.worlds.NAME`, or a file with a class `World`."""
        return self.train.agent_func_path is not None and is_world(self.train.agent_func_path)

    @property
    def plays_agent(self) -> bool:
        """The agent is a user's file."""
        return self.train.agent_func_path is not None and not self.plays_world

    @property
    def prompt_dataset(self) -> str | None:
        """Where prompts come from: as given, else the records of the world that is played."""
        return self.data.prompt_dataset or (self.train.agent_func_path if self.plays_world else None)

    @property
    def worlds(self) -> tuple[str, ...]:
        """The worlds that are played, or whose records are data."""
        data = (*split_commas(self.data.prompt_dataset), *split_commas(self.eval.dataset))
        played = (self.train.agent_func_path or "",)
        return tuple(dict.fromkeys(name for name in (*played, *data) if is_world(name)))

    @property
    def uses_world(self) -> bool:
        return bool(self.worlds)

    @property
    def measures_world(self) -> bool:
        """Evaluations have records of a world."""
        return any(is_world(name) for name in split_commas(self.eval.dataset))

    @property
    def label_key(self) -> str | None:
        """The record key of labels: as given; what a world is to begin is under `label`."""
        return self.data.label_key or ("label" if self.uses_world else None)

    @property
    def uses_group_baseline(self) -> bool:
        return ESTIMATORS[self.algo.advantage.estimator].needs_group

    @property
    def fewest_compared(self) -> int:
        """Judged samples of a prompt that it takes, of one agent, for any of them to teach something."""
        if ESTIMATORS[self.algo.advantage.estimator].takes_k:
            return self.algo.advantage.pass_k + 1
        return 2 if self.uses_group_baseline else 1

    @property
    def whitens_advantages(self) -> bool:
        return ESTIMATORS[self.algo.advantage.estimator].whiten

    @property
    def samples_per_prompt(self) -> int:
        """Responses per prompt: as given, else 8 for the group estimators and 1 for the others."""
        given = self.rollout.n_samples_per_prompt
        return given if given is not None else (8 if self.uses_group_baseline else 1)

    @property
    def samples_per_round(self) -> int:
        """Responses per training step: rollout.batch_size × samples_per_prompt."""
        return self.rollout.batch_size * self.samples_per_prompt

    def optimizer_steps(self, prompts: int) -> int:
        """Optimizer steps of a run over so many prompts of which none is lost: a round is cut into as few as have
        room for its samples."""
        rounds, rest = divmod(prompts, self.rollout.batch_size)
        sizes = (self.samples_per_round, rest * self.samples_per_prompt)
        whole, last = (-(-size // self.train.batch_size) for size in sizes)
        return self.train.max_epochs * (rounds * whole + last)

    @property
    def generate_batch_size(self) -> int:
        """Prompts in play at a time."""
        return self.rollout.vllm_generate_batch_size or self.rollout.batch_size

    @property
    def plays_across_rounds(self) -> bool:
        """Episodes may outlive the round in which they began."""
        return self.train.async_enable or self.rollout.abort_stragglers

    @property
    def scoring_tokens_per_gpu(self) -> int:
        """Token budget of scoring forwards with dynamic batches."""
        return self.rollout.max_tokens_per_gpu or self.train.max_tokens_per_gpu

    @property
    def response_limit(self) -> int:
        """Longest possible response: rollout.max_new_tokens, else data.max_len."""
        return self.rollout.max_new_tokens or self.data.max_len

    @property
    def gamma(self) -> float:
        """Discount in force: 1 for the group estimators, whatever was given."""
        return 1.0 if self.uses_group_baseline else self.algo.advantage.gamma

    @property
    def loss_aggregation(self) -> Aggregation:
        """How token losses become one number: as given, else as the paper of the policy loss has it."""
        given = self.algo.loss_agg
        return Aggregation(given) if given else POLICY_LOSSES[self.actor.policy_loss_type].aggregation

    @property
    def regulariser_aggregation(self) -> Aggregation:
        """The same for KL and entropy terms: as given, else a mean over tokens."""
        return Aggregation(self.algo.loss_agg or "token")

    @property
    def uses_critic(self) -> bool:
        return ESTIMATORS[self.algo.advantage.estimator].needs_critic

    @property
    def uses_reference(self) -> bool:
        return self.algo.kl.init_coef > 0

    @property
    def reference_is_base(self) -> bool:
        """Whether the reference is the actor without its adapter, and needs no weights of its own."""
        return self.uses_reference and self.ds.lora.rank > 0

    @property
    def uses_teacher(self) -> bool:
        """Whether the policy is distilled from a teacher, alone or beside the task's reward."""
        teacher = self.teacher
        return any(given is not None for given in (teacher.model_name_or_path, teacher.policy, teacher.remote_url))

    @property
    def teacher_path(self) -> str | None:
        """The files of a teacher that has weights of its own. None: there is no teacher, or it needs none: it is the
        policy, as it is or without its adapter, or servers have it."""
        if self.teacher.policy == "initial" and not self.ds.lora.rank:
            return self.actor.model_name_or_path
        return self.teacher.model_name_or_path

    @property
    def teacher_flag(self) -> str:
        """The flag that names `teacher_path`."""
        return "--actor.model_name_or_path" if self.teacher.policy else "--teacher.model_name_or_path"

    @property
    def teacher_rewards(self) -> bool:
        """Whether the teacher's word is a reward; otherwise, if there is a teacher, it is a loss."""
        return self.uses_teacher and self.teacher.loss is None

    @property
    def reward_source(self) -> RewardSource | None:
        """Where rewards come from, the first of several places; an agent wins over the others. None: nowhere."""
        if self.train.agent_func_path:
            return "agent"
        return self.reward.sources[0].kind if self.reward.sources else None

    @property
    def rewards_a_task(self) -> bool:
        """Whether rewards pull at the policy: with weights of 0 they are only measured."""
        weights = self.reward.weights
        return self.reward_source == "agent" or (self.reward_source is not None and (weights is None or any(weights)))

    @property
    def uses_reward_model(self) -> bool:
        """Beside an agent it judges the episodes to which that gives no reward."""
        return any(source.kind == "model" for source in self.reward.sources)

    @property
    def asks_reward_servers(self) -> bool:
        return any(source.kind == "http" for source in self.reward.sources)

    @property
    def critic_path(self) -> str | None:
        """Model the critic starts from; None without a critic. Default: first reward model, else the actor."""
        if not self.uses_critic:
            return None
        if self.critic.model_name_or_path:
            return self.critic.model_name_or_path
        return self.reward.model_paths[0] if self.reward_source == "model" else self.actor.model_name_or_path

    @property
    def cuts_distributions(self) -> bool:
        """Whether some tokens may be sampled from a part of the vocabulary. Agents sample each call as they like."""
        return self.rollout.top_p < 1 or self.rollout.top_k > 0 or self.train.agent_func_path is not None

    @property
    def largest_support(self) -> int:
        """The size of the largest support that engines tell, and the policy's softmax is over. 0: they tell none."""
        if self.rollout.exact:  # the exact softmax is over the whole vocabulary
            return 0
        asked = self.algo.sampling_mask
        return max(LARGEST_SUPPORT, self.rollout.top_k) if asked is None else asked

    @property
    def corrects_off_policy(self) -> bool:
        """As given; else where engines sample with other weights than those that are trained."""
        given = self.algo.advantage.is_correction_enable
        return given if given is not None else self.rounds_weights

    @property
    def rounds_weights(self) -> bool:
        """Engines sample with weights of fewer bits than the policy's."""
        return self.vllm.quantization is not None and self.vllm.num_engines != 0

    @property
    def logprobs_every(self) -> int:
        """One prompt in so many is sampled with log-probs: all where the update needs them or the engine has them."""
        return LOGPROBS_EVERY if self.vllm.num_engines != 0 and not self.corrects_off_policy else 1

    @property
    def engines_cache_prefixes(self) -> bool:
        """Engines keep what they have read: where somebody reads it again, or as asked for."""
        return self.vllm.enable_prefix_caching or self.samples_per_prompt > 1 or self.reward_source == "agent"

    @property
    def engines_share_devices(self) -> bool:
        """Engines sample on the actor's devices, in turns with training or, async, beside it. Local runs have one."""
        if self.train.async_enable and not self.train.async_share_device:
            return False
        return self.train.colocate_all or self.train.launcher == "local"

    @property
    def optimizer_sleeps(self) -> bool:
        """Optimizer states leave the devices while engines on them sample: not where both go on at the same time."""
        return self.ds.enable_sleep and self.engines_share_devices and not self.train.async_enable

    @property
    def engines_sleep(self) -> bool | None:
        """Engines free their memory while training: only where they share the actor's devices. None: if they must."""
        return self.vllm.enable_sleep if self.engines_share_devices and not self.train.async_enable else False


@dataclass(frozen=True, kw_only=True)
class SFTConfig(TrainerSection, OptimizerSection):
    """`train_sft`: supervised fine-tuning."""

    adam: AdamSection = field(default=AdamSection(lr=5e-6))
    model: SFTModelSection = field(default=SFTModelSection())
    data: SFTDataSection = field(default=SFTDataSection(input_template="User: {}\nAssistant: "))
    train: SupervisedTrainSection = field(default=SupervisedTrainSection(micro_batch_size=8, max_epochs=2))
    ds: CausalBackendSection = field(default=CausalBackendSection())
    eval: EvalSection = field(default=EvalSection())
    ckpt: SupervisedCheckpointSection = field(default=SupervisedCheckpointSection(path="./ckpt/checkpoints_sft"))
    logger: LoggerSection = field(
        default_factory=lambda: logger_for("sft", project="openrlhf_train_sft", section=LoggerSection)
    )

    @property
    def tokens_per_forward(self) -> int:
        """Token budget of a micro-batch: what `micro_batch_size` samples of the greatest length have."""
        return self.train.micro_batch_size * self.data.max_len


@dataclass(frozen=True, kw_only=True)
class RMConfig(TrainerSection, OptimizerSection):
    """`train_rm`: reward model from preference pairs."""

    adam: AdamSection = field(default=AdamSection(lr=9e-6))
    model: RMModelSection = field(default=RMModelSection())
    data: RMDataSection = field(default=RMDataSection(max_len=512))
    train: SupervisedTrainSection = field(default=SupervisedTrainSection())
    ds: RMBackendSection = field(default=RMBackendSection())
    eval: RMEvalSection = field(default=RMEvalSection())
    ckpt: SupervisedCheckpointSection = field(default=SupervisedCheckpointSection(path="./ckpt/checkpoints_rm"))
    logger: LoggerSection = field(
        default_factory=lambda: logger_for("rm", project="openrlhf_train_rm", section=LoggerSection)
    )

    @property
    def tokens_per_forward(self) -> int:
        """Token budget of a micro-batch: what `micro_batch_size` pairs (prm: answers) of the greatest length have."""
        return self.train.micro_batch_size * (1 if self.model.loss_type == "prm" else 2) * self.data.max_len


@dataclass(frozen=True, kw_only=True)
class DPOConfig(TrainerSection, OptimizerSection):
    """`train_dpo`: DPO, IPO, cDPO from preference pairs, KTO from judged answers."""

    adam: AdamSection = field(default=AdamSection(lr=1e-5))
    model: DPOModelSection = field(default=DPOModelSection())
    ref: DPORefSection = field(default=DPORefSection())
    data: DPODataSection = field(default=DPODataSection(max_len=512))
    train: SupervisedTrainSection = field(default=SupervisedTrainSection(micro_batch_size=8))
    ds: CausalBackendSection = field(default=CausalBackendSection())
    eval: EvalSection = field(default=EvalSection(split="test"))
    ckpt: SupervisedCheckpointSection = field(default=SupervisedCheckpointSection(path="./ckpt/checkpoints_dpo"))
    logger: LoggerSection = field(
        default_factory=lambda: logger_for("exp", project="openrlhf_train_dpo", section=LoggerSection)
    )

    @property
    def reference_path(self) -> str | None:
        """Reference model: as given, else the one that is trained."""
        return self.ref.model_name_or_path or self.model.model_name_or_path

    @property
    def reference_is_base(self) -> bool:
        """Whether the reference is the trained model without its adapter, and needs no weights of its own."""
        return self.ds.lora.rank > 0 and self.reference_path == self.model.model_name_or_path

    @property
    def tokens_per_forward(self) -> int:
        """Token budget of a micro-batch: what `micro_batch_size` pairs (kto: answers) of the greatest length have."""
        return self.train.micro_batch_size * self.data.max_len * (2 if self.model.objective in PAIR_LOSSES else 1)


@dataclass(frozen=True, kw_only=True)
class ServeRMConfig(HubSection):
    """`serve_rm`: a reward model behind HTTP."""

    reward: ServedRewardSection = field(default=ServedRewardSection())
    data: TokenizerSection = field(default=TokenizerSection())
    ds: ServeBackendSection = field(default=ServeBackendSection())
    model: TrustSection = field(default=TrustSection())
    host: Annotated[str, Flag("address to listen on; 0.0.0.0 = every network this machine is in")] = "127.0.0.1"
    port: Annotated[int, Flag("port to listen on", within=(0, 65535))] = 5000
    batch_size: Annotated[
        int | None, Flag("queries per forward, whoever asked; unset: as many as max_tokens_per_gpu allows", above=0)
    ] = None
    max_tokens_per_gpu: Annotated[int, Flag("tokens per forward; a longer query goes alone", above=0)] = 16192
    max_queue: Annotated[
        int, Flag("queries that may be under way, of all callers together; beyond it the answer is 503", above=0)
    ] = 4096
    max_request_bytes: Annotated[int, Flag("a larger request is answered with 413", above=0)] = 16 * 2**20
    max_query_chars: Annotated[
        int, Flag("a longer query is answered with 413; a shorter one keeps its last data.max_len tokens", above=0)
    ] = 1_000_000
    read_timeout: Annotated[
        float,
        Flag(
            "seconds in which the headers of a request must arrive, and then its body; what is slower is closed",
            above=0,
        ),
    ] = 60.0
    api_key: Annotated[str | None, Flag("callers must send it as a bearer token", secret=True)] = field(
        default=None, repr=False
    )


@dataclass(frozen=True, kw_only=True)
class LoraCombinerConfig:
    """`lora_combiner`: merge an adapter into its base model."""

    model_path: Annotated[str | None, Flag("base model (required)")] = None
    lora_path: Annotated[str | None, Flag("adapter folder (required)")] = None
    output_path: Annotated[str | None, Flag("folder of the merged model (required)")] = None
    is_rm: Annotated[bool, Flag("the model is a reward model")] = False
    ds: DTypeSection = field(default=DTypeSection())
    model: TrustSection = field(default=TrustSection())


SupervisedConfig = SFTConfig | RMConfig | DPOConfig
TrainerConfig = SupervisedConfig | RLConfig
Config = TrainerConfig | ServeRMConfig | LoraCombinerConfig

ROOTS: dict[str, type[Config]] = {
    "train_sft": SFTConfig,
    "train_rm": RMConfig,
    "train_dpo": DPOConfig,
    "train_ppo_ray": RLConfig,
    "serve_rm": ServeRMConfig,
    "lora_combiner": LoraCombinerConfig,
}
"""Configuration class of each command in `openrlhf.cli`."""

SHORT_NAMES = {
    "train_sft": "sft",
    "train_rm": "rm",
    "train_dpo": "dpo",
    "train_ppo_ray": "rl",
    "serve_rm": "serve-rm",
    "lora_combiner": "lora-combine",
}
"""Commands as the `openrlhf` command calls them."""
