"""What the user wrote and a run will not do as written: told, not refused."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any
from urllib.parse import urlsplit

from openrlhf.config.roots import DPOConfig, RLConfig, ServeRMConfig, SFTConfig


def template_is_not_used(config: Any) -> Iterator[str]:
    template = config.data.input_template
    if template is None:
        return
    if "{}" not in template:
        yield "--data.input_template has no {} for the prompt: it is not used"
    elif "\\n" in template:
        yield "--data.input_template contains a backslash and an n, not a line break: write $'…\\n…' in the shell"


def raw_text_has_no_template(config: SFTConfig) -> Iterator[str]:
    if not config.model.pretrain_mode_enable:
        return
    if config.data.input_template not in (None, SFTConfig().data.input_template):
        yield "--data.input_template is not used: --model.pretrain_mode_enable learns the text as it is"
    if config.data.apply_chat_template:
        yield "--data.apply_chat_template is for lists of messages: --model.pretrain_mode_enable learns text as it is"
    if config.data.multiturn:
        yield "--data.multiturn is not used: --model.pretrain_mode_enable learns every token"


def smoothing_is_not_used(config: DPOConfig) -> Iterator[str]:
    if config.model.ipo_enable and config.model.label_smoothing > 0:
        yield "--model.label_smoothing is not used: it belongs to the DPO loss, which --model.ipo_enable replaces"


def reference_offload_is_not_used(config: DPOConfig | RLConfig) -> Iterator[str]:
    if config.ref.offload and config.reference_is_base:
        yield "--ref.offload is not used: with --ds.lora.rank the reference is the trained model without its adapter"


def gamma_is_one(config: RLConfig) -> Iterator[str]:
    gamma = config.algo.advantage.gamma
    if config.uses_group_baseline and gamma != 1:
        yield f"--algo.advantage.gamma {gamma} is not used: {config.algo.advantage.estimator} has no discount"


def kl_estimator_fits_its_use(config: RLConfig) -> Iterator[str]:
    kl = config.algo.kl
    if not config.uses_reference:
        return
    if kl.use_loss and kl.estimator == "k1":
        yield "--algo.kl.estimator k1 has the wrong gradient as a loss: k2 or k3 is recommended with --algo.kl.use_loss"
    if not kl.use_loss and kl.estimator != "k1":
        yield (
            f"--algo.kl.estimator {kl.estimator} has the wrong gradient as a reward: "
            "k1 is recommended without --algo.kl.use_loss"
        )


def kl_settings_are_not_used(config: RLConfig) -> Iterator[str]:
    if config.algo.kl.use_loss and not config.uses_reference:
        yield "--algo.kl.use_loss is not used: with --algo.kl.init_coef 0 there is no KL"


def normalisation_is_not_used(config: RLConfig) -> Iterator[str]:
    if config.reward.normalize_enable and not config.uses_reward_model:
        yield (
            "--reward.normalize_enable is not used: mean and std come with a reward model "
            "(--reward.model_name_or_path), and the rewards of this run do not"
        )


def clip_is_not_used(config: RLConfig) -> Iterator[str]:
    if config.actor.policy_loss_type == "sapo" and config.actor.eps_clip_low_high:
        yield "--actor.eps_clip_low_high is not used: sapo fades tokens out by its own gate"


def agent_replaces_remote_reward(config: RLConfig) -> Iterator[str]:
    if config.train.agent_func_path and config.reward.remote_url:
        yield "--reward.remote_url judges only episodes to which the agent of --train.agent_func_path gives no reward"


def reward_servers_have_a_path(config: RLConfig) -> Iterator[str]:
    for source in config.reward.sources:
        for url in source.names if source.kind == "http" else ():
            if not urlsplit(url).path.strip("/"):
                yield f"--reward.remote_url {url} names no path: {url.rstrip('/')}/get_reward is asked"


def reward_key_is_not_used(config: RLConfig) -> Iterator[str]:
    if config.reward.api_key and not any(source.kind == "http" for source in config.reward.sources):
        yield "--reward.api_key is not used: no reward server is asked (--reward.remote_url)"


def engines_stay_awake(config: RLConfig) -> Iterator[str]:
    if config.vllm.enable_sleep and not config.train.async_enable and not config.engines_share_devices:
        yield "--vllm.enable_sleep is not used: without --train.colocate_all engines have devices of their own"


def engine_settings_are_not_used(config: RLConfig) -> Iterator[str]:
    if config.vllm.num_engines != 0:
        return
    for field in fields(config.vllm):
        if field.name != "num_engines" and getattr(config.vllm, field.name) != field.default:
            yield f"--vllm.{field.name} is not used: with --vllm.num_engines 0 there is no vLLM"


def local_weights_have_one_way(config: RLConfig) -> Iterator[str]:
    given = {
        f"--vllm.sync_backend {config.vllm.sync_backend}": config.vllm.sync_backend != "nccl",
        "--vllm.sync_with_ray": config.vllm.sync_with_ray,
    }
    if config.vllm.num_engines and config.train.launcher != "ray":
        for flag in (flag for flag, is_given in given.items() if is_given):
            yield f"{flag} is not used: engine and trainer are on one machine, and weights take the shortest way"


def evaluations_beside_training_are_saved(config: RLConfig) -> Iterator[str]:
    measured, saved = config.eval.period, config.ckpt.period
    follows = config.eval.dataset and config.ckpt.best_metric_key != "none"
    if config.train.async_enable and follows and measured and saved and measured % saved:
        yield (
            f"--eval.steps {measured}: evaluations go on beside training, so a checkpoint is written at each as well, "
            "in case it is the best (--ckpt.best_metric_key none leaves these out)"
        )


def async_engines_have_own_devices(config: RLConfig) -> Iterator[str]:
    if config.train.async_enable and config.train.colocate_all and not config.train.async_share_device:
        yield (
            "--train.colocate_all with --train.async_enable: the models share devices, the engines have their own "
            "(on a single device add --train.async_share_device)"
        )


def critic_is_not_used(config: RLConfig) -> Iterator[str]:
    if config.critic.model_name_or_path and not config.uses_critic:
        estimator = config.algo.advantage.estimator
        yield f"--critic.model_name_or_path is not used: --algo.advantage.estimator {estimator} has no critic"


def local_launcher_is_one_process(config: RLConfig) -> Iterator[str]:
    world = config.actor.world_size
    if config.train.launcher == "local" and world is not None and world > 1:
        yield (
            f"--train.launcher local is one process on this machine: the actor's {world} workers "
            "(--actor.num_nodes × --actor.num_gpus_per_node) become 1"
        )


def nothing_to_go_on_from(config: Any) -> Iterator[str]:
    if config.ckpt.auto_resume and config.ckpt.period is None:
        yield "--ckpt.auto_resume without --ckpt.save_steps: a checkpoint is written only when a signal stops the run"


def server_is_open(config: ServeRMConfig) -> Iterator[str]:
    if config.api_key is None and config.host not in ("127.0.0.1", "localhost", "::1"):
        yield f"--host {config.host} without --api_key: whoever reaches this machine may ask the reward model"
