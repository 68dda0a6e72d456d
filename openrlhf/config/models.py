"""The models of a run: actor, critic, reference, reward (RL) and the one model of SFT, RM and DPO."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, NamedTuple

from openrlhf.algorithms.distillation import DIVERGENCES
from openrlhf.algorithms.losses import POLICY_LOSSES
from openrlhf.algorithms.preferences import ANSWER_LOSSES, PAIR_LOSSES
from openrlhf.config.data import written
from openrlhf.config.fields import Flag
from openrlhf.config.training import AdamSection, OptimizerSection

UNCLIPPED = ",".join(name for name, loss in POLICY_LOSSES.items() if not loss.clips)
"""Policy losses that no clip range has an effect on."""

NODES = Flag("nodes of this model's worker group", flat="{owner}num_nodes")
WORKERS = Flag(
    "workers per node of this group; unset: the devices that are there, 1 on CPU",
    flat="{owner}num_gpus_per_node",
    shown_default="auto",
)


@dataclass(frozen=True, kw_only=True)
class GroupSection:
    """A group of workers that hold one model: `num_nodes` × `num_gpus_per_node` of them."""

    num_nodes: Annotated[int, NODES] = 1
    num_gpus_per_node: Annotated[int | None, WORKERS] = None

    @property
    def world_size(self) -> int | None:
        """Workers in the group; None while `num_gpus_per_node` is left to the machine."""
        return None if self.num_gpus_per_node is None else self.num_nodes * self.num_gpus_per_node


@dataclass(frozen=True, kw_only=True)
class OtherGroupSection(GroupSection):
    """Beside the actor's. A local run has no groups: of the actor's size it says so by itself."""

    num_nodes: Annotated[int, replace(NODES, only_with="train.launcher=ray")] = 1
    num_gpus_per_node: Annotated[int | None, replace(WORKERS, only_with="train.launcher=ray")] = None


@dataclass(frozen=True, kw_only=True)
class TrustSection:
    trust_remote_code: Annotated[bool, Flag("run Python code that comes with the model; off unless you trust it")] = (
        False
    )


@dataclass(frozen=True, kw_only=True)
class TrainedModelSection(TrustSection):
    model_name_or_path: Annotated[str | None, Flag("Hugging Face model to train: name or folder", flat="pretrain")] = (
        None
    )
    gradient_checkpointing_enable: Annotated[
        bool,
        Flag("recompute activations in the backward pass (in RL also the critic's)", flat="gradient_checkpointing"),
    ] = False
    gradient_checkpointing_reentrant: Annotated[
        bool,
        Flag(
            "re-entrant variant of it",
            flat="gradient_checkpointing_use_reentrant",
            only_with=".gradient_checkpointing_enable",
        ),
    ] = False
    aux_loss_coef: Annotated[
        float,
        Flag(
            "weight of the mixture-of-experts load-balancing loss; in RL of actor and critic",
            flat="aux_loss_coef balancing_loss_coef",
        ),
    ] = 0.0


@dataclass(frozen=True, kw_only=True)
class ActorSection(OptimizerSection, GroupSection, TrainedModelSection):
    eps_clip: Annotated[
        float,
        Flag(
            "policy ratio is clipped to [1 − eps, 1 + eps]",
            flat="eps_clip",
            only_with=f".policy_loss_type!={UNCLIPPED} !.eps_clip_low_high",
        ),
    ] = 0.2
    eps_clip_low_high: Annotated[
        tuple[float, float] | None,
        Flag(
            "separate eps below and above 1; unset: eps_clip twice",
            flat="eps_clip_low_high",
            unlimited=True,
            only_with=f".policy_loss_type!={UNCLIPPED}",
        ),
    ] = None
    dual_clip: Annotated[
        float | None, Flag("bound c > 1 on the loss of negative advantages; unset = off", flat="dual_clip")
    ] = None
    policy_loss_type: Annotated[
        str,
        Flag(
            "policy loss: " + ", ".join(f"{name} ({loss.summary})" for name, loss in POLICY_LOSSES.items()),
            flat="policy_loss_type",
            choices=tuple(POLICY_LOSSES),
        ),
    ] = "ppo"
    entropy_coef: Annotated[
        float | None, Flag("entropy bonus; unset = not computed, 0 = logged only", flat="entropy_loss_coef")
    ] = None
    freeze_visual_encoder: Annotated[
        bool, Flag("train the language part of a vision-language model only", flat="freeze_visual_encoder")
    ] = False
    adam: AdamSection = field(default=AdamSection(lr=1e-6))

    @property
    def clip_range(self) -> tuple[float, float]:
        """(eps_low, eps_high): the ratio is clipped to [1 − eps_low, 1 + eps_high]."""
        return self.eps_clip_low_high or (self.eps_clip, self.eps_clip)


@dataclass(frozen=True, kw_only=True)
class CriticSection(OptimizerSection, OtherGroupSection):
    model_name_or_path: Annotated[
        str | None,
        Flag("critic to start from (gae only); unset: the first reward model, else the actor", flat="critic_pretrain"),
    ] = None
    value_clip: Annotated[
        float, Flag("values move at most this far from the old ones", flat="value_clip", unlimited=True, at_least=0)
    ] = 0.5
    freezing_steps: Annotated[
        int,
        Flag(
            "gae: the critic learns alone in the first N + 1 rounds, those with numbers 0 to N; -1 = in none",
            flat="freezing_actor_steps",
        ),
    ] = -1
    save_value_network: Annotated[
        bool, Flag("save the critic at the end, to <ckpt.output_dir>_critic", flat="save_value_network")
    ] = False
    adam: AdamSection = field(default=AdamSection(lr=9e-6))


@dataclass(frozen=True, kw_only=True)
class RefSection(OtherGroupSection):
    offload: Annotated[
        bool,
        Flag(
            "keep the reference model's weights in CPU memory",
            flat="ref_offload ref_reward_offload",
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class TeacherSection(OtherGroupSection):
    num_nodes: Annotated[int, replace(NODES, only_with="teacher_path train.launcher=ray")] = 1
    num_gpus_per_node: Annotated[int | None, replace(WORKERS, only_with="teacher_path train.launcher=ray")] = None
    model_name_or_path: Annotated[
        str | None,
        Flag(
            "teacher that the policy is distilled from on its own samples: a model with the same vocabulary, Hugging "
            "Face name or folder (docs/distillation.md)"
        ),
    ] = None
    loss: Annotated[
        str | None,
        Flag(
            "the divergence from the teacher as a loss: "
            + ", ".join(f"{name} ({entry.summary})" for name, entry in DIVERGENCES.items())
            + "; unset: log p − log π of each sampled token as its reward",
            choices=tuple(DIVERGENCES),
            only_with="uses_teacher",
        ),
    ] = None
    top_k: Annotated[
        int,
        Flag(
            "that loss looks at so many of the teacher's likeliest tokens, and at all others as one",
            above=0,
            only_with="uses_teacher .loss",
        ),
    ] = 64
    coef: Annotated[
        float, Flag("weight of the teacher's reward or loss beside the task's", above=0, only_with="uses_teacher")
    ] = 1.0
    gamma: Annotated[
        float,
        Flag(
            "discount of the teacher's rewards of the tokens that follow; 0: each token earns its own",
            within=(0, 1),
            only_with="uses_teacher !.loss",
        ),
    ] = 0.0
    policy: Annotated[
        Literal["initial", "current"] | None,
        Flag(
            "the policy is its own teacher: with the weights that the run begins with, or with those of the moment, "
            "which needs teacher.prompt_key"
        ),
    ] = None
    remote_url: Annotated[
        str | None,
        Flag(
            "vLLM servers (OpenAI's API) that serve the teacher, separated by commas; they tell log-probs at "
            "temperature 1"
        ),
    ] = None
    api_key: Annotated[
        str | None, Flag("these servers get it as a bearer token", secret=True, only_with=".remote_url")
    ] = field(default=None, repr=False)
    timeout: Annotated[
        float,
        Flag("seconds that these servers may take for one sample, attempts together", only_with=".remote_url", above=0),
    ] = 180.0
    prompt_key: Annotated[
        str | None,
        Flag(
            "record key of the prompt that the teacher reads in the place of the policy's, such as one with a hint or "
            "the solution; unset: it reads the same",
            only_with="uses_teacher",
        ),
    ] = None
    offload: Annotated[bool, Flag("keep the teacher's weights in CPU memory", only_with="teacher_path")] = False

    @property
    def urls(self) -> tuple[str, ...]:
        """`remote_url` as a tuple; empty when unset."""
        return split_commas(self.remote_url)


@dataclass(frozen=True, kw_only=True)
class DPORefSection:
    model_name_or_path: Annotated[str | None, Flag("reference model; unset: the trained one", flat="ref_pretrain")] = (
        None
    )
    offload: Annotated[
        bool,
        Flag("keep the reference model's weights in CPU memory", flat="ref_offload", only_with="!reference_is_base"),
    ] = False


class RewardEntry(NamedTuple):
    """One source of rewards."""

    kind: Literal["function", "http", "model"]
    names: tuple[str, ...]
    """The file, the model, or the URLs of servers that give the same answers."""


@dataclass(frozen=True, kw_only=True)
class ServedRewardSection:
    model_name_or_path: Annotated[
        str | None,
        Flag(
            "reward model, Hugging Face name or folder; in RL a comma list",
            flat="reward_pretrain",
            only_with="!reward.remote_url|reward.weights",
        ),
    ] = None
    normalize_enable: Annotated[
        bool,
        Flag(
            "(r − mean) / std with the statistics stored in the reward model",
            flat="normalize_reward",
            only_with="uses_reward_model",
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class RewardSection(GroupSection, ServedRewardSection):
    num_nodes: Annotated[int, replace(NODES, only_with="uses_reward_model train.launcher=ray")] = 1
    num_gpus_per_node: Annotated[int | None, replace(WORKERS, only_with="uses_reward_model train.launcher=ray")] = None
    remote_url: Annotated[
        str | None,
        Flag("reward server URLs, .py files with reward_func, or both, separated by commas", flat="remote_rm_url"),
    ] = None
    api_key: Annotated[
        str | None, Flag("reward servers get it as a bearer token", secret=True, only_with="asks_reward_servers")
    ] = field(default=None, repr=False)
    clip_range: Annotated[
        tuple[float, float],
        Flag(
            "raw rewards are clipped to [low, high]; one value X means −X X, and inf no limit",
            flat="reward_clip_range",
            one_value="mirror",
            unlimited=True,
        ),
    ] = (-10.0, 10.0)
    overlong_buffer_len: Annotated[
        float | None,
        Flag(
            "tokens before the length limit in which the reward falls; unset = off", flat="overlong_buffer_len", above=0
        ),
    ] = None
    overlong_penalty_factor: Annotated[
        float,
        Flag(
            "penalty at the end of that buffer",
            flat="overlong_penalty_factor",
            only_with=".overlong_buffer_len",
            at_least=0,
        ),
    ] = 1.0
    stop_properly_penalty_coef: Annotated[
        float | None,
        Flag(
            "truncated answers: 0…1 scales the reward, < 0 replaces it",
            flat="stop_properly_penalty_coef",
            within=(-float("inf"), 1),
        ),
    ] = None
    offload: Annotated[
        bool,
        Flag(
            "keep the reward model's weights in CPU memory",
            flat="reward_offload ref_reward_offload",
            only_with="uses_reward_model",
        ),
    ] = False
    timeout: Annotated[
        float,
        Flag("seconds a reward call may take, attempts at reward servers together", only_with=".remote_url", above=0),
    ] = 180.0
    weights: Annotated[
        tuple[float, ...] | None,
        Flag(
            "one per entry of reward.remote_url, then of reward.model_name_or_path; unset: all 1; all 0, beside a "
            "teacher: rewards are only measured",
            only_with=".remote_url|.model_name_or_path",
        ),
    ] = None

    steps: Annotated[
        Literal["separator", "token"] | None,
        Flag(
            "reward models judge each step: the tokens where reward.step_separator ends, and the last; or every token "
            "of the policy; unset: whole answers",
            only_with="uses_reward_model",
        ),
    ] = None
    step_separator: Annotated[
        str, Flag("text that ends a step; \\n is the end of a line", only_with=".steps=separator")
    ] = r"\n\n"
    step_total: Annotated[
        Literal["min", "last", "mean", "sum"],
        Flag("an answer's reward, from those of its steps; those that do not count in it are 0", only_with=".steps"),
    ] = "min"
    step_logits: Annotated[
        bool, Flag("a step's reward is the model's number, not the probability σ of it", only_with=".steps")
    ] = False

    @property
    def separator(self) -> str:
        """`step_separator` as it is written by the policy."""
        return written(self.step_separator)

    @property
    def sources(self) -> tuple[RewardEntry, ...]:
        """What judges, in the order of `weights`; the reward is the weighted sum.

        Without weights every file is a source, and all URLs together are one: replicas that share the work; reward
        models judge only where there is neither. With weights each entry is a source of its own, reward models too if
        there are weights for them.
        """
        remote = tuple(RewardEntry("function" if is_python_file(url) else "http", (url,)) for url in self.urls)
        models = tuple(RewardEntry("model", (path,)) for path in self.model_paths)
        if self.weights is not None:
            return remote + models if len(self.weights) == len(remote) + len(models) else remote or models
        files = tuple(entry for entry in remote if entry.kind == "function")
        servers = tuple(entry.names[0] for entry in remote if entry.kind == "http")
        return (*files, RewardEntry("http", servers)) if servers else files or models

    @property
    def urls(self) -> tuple[str, ...]:
        """`remote_url` as a tuple; empty when unset."""
        return split_commas(self.remote_url)

    @property
    def model_paths(self) -> tuple[str, ...]:
        """`model_name_or_path` as a tuple; empty when unset."""
        return split_commas(self.model_name_or_path)


@dataclass(frozen=True, kw_only=True)
class SFTModelSection(TrainedModelSection):
    pretrain_mode_enable: Annotated[
        bool, Flag("raw text without a template, loss on every token", flat="pretrain_mode")
    ] = False


@dataclass(frozen=True, kw_only=True)
class RMModelSection(TrainedModelSection):
    loss_type: Annotated[str, Flag("sigmoid: −log σ(rc − rr); prm: steps; else log(1 + exp(rr − rc))", flat="loss")] = (
        "sigmoid"
    )
    margin_loss_enable: Annotated[
        bool,
        Flag("subtract the record's margin inside the sigmoid", flat="margin_loss", only_with=".loss_type=sigmoid"),
    ] = False
    compute_fp32_loss_enable: Annotated[
        bool,
        Flag(
            "accepted; rewards and their loss are always fp32",
            flat="compute_fp32_loss",
            no_effect="rewards and their loss are always fp32",
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class DPOModelSection(TrainedModelSection):
    loss_type: Annotated[
        str,
        Flag(
            "pairs of a chosen and a rejected answer (dpo), or single answers with a label (kto)",
            flat="loss",
            # ipo has a switch of its own.
            choices=(*(name for name in PAIR_LOSSES if name != "ipo"), *ANSWER_LOSSES),
        ),
    ] = "dpo"
    beta: Annotated[float, Flag("beta of DPO, IPO and KTO", flat="beta", above=0)] = 0.1
    ipo_enable: Annotated[bool, Flag("IPO loss instead of DPO", flat="ipo")] = False
    label_smoothing: Annotated[
        float,
        Flag(
            "share of labels taken as flipped (cDPO)", flat="label_smoothing", only_with="!.ipo_enable", within=(0, 0.5)
        ),
    ] = 0.0
    nll_loss_coef: Annotated[float, Flag("weight of the chosen answers' own NLL", flat="nll_loss_coef", at_least=0)] = (
        0.0
    )

    @property
    def objective(self) -> str:
        """The loss in force: a name of `PAIR_LOSSES` or `ANSWER_LOSSES`."""
        return "ipo" if self.ipo_enable else self.loss_type


def is_python_file(name: str) -> bool:
    return name.endswith(".py") and "://" not in name


def split_commas(text: str | None) -> tuple[str, ...]:
    """`"a, b"` -> `("a", "b")`; None or blanks -> `()`."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())
