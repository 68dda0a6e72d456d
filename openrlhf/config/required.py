"""What a run needs beyond a configuration without contradictions. Not asked of `--print_config`."""

import difflib
from collections.abc import Iterator
from typing import Any

from openrlhf.config.commands import DPOConfig, LoraCombinerConfig, RLConfig, RMConfig, ServeRMConfig, SFTConfig
from openrlhf.config.schema import value_at

ATTENTIONS = (
    "eager",
    "sdpa",
    "flex_attention",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
)


def model_is_named(config: Any) -> Iterator[str]:
    for path in ("actor.model_name_or_path", "model.model_name_or_path"):
        section = path.partition(".")[0]
        if hasattr(config, section) and not value_at(config, path):
            yield f"--{path} is missing: the model to train, a Hugging Face name or a folder"


def data_is_named(config: Any) -> Iterator[str]:
    path = "data.prompt_dataset" if isinstance(config, RLConfig) else "data.dataset"
    if not value_at(config, path):
        yield f"--{path} is missing: a dataset name, folder or file"


def four_bit_weights_have_an_adapter(config: SFTConfig | RMConfig | DPOConfig | RLConfig) -> Iterator[str]:
    if config.ds.load_in_4bit and not config.ds.lora.rank:
        yield "--ds.load_in_4bit: weights of 4 bits cannot be trained: add an adapter (--ds.lora.rank), or leave it out"


def universal_checkpoints_are_loaded(config: SFTConfig | RMConfig | DPOConfig) -> Iterator[str]:
    if config.ds.use_universal_ckpt and not config.ckpt.resumes:
        yield "--ds.use_universal_ckpt: reads what a run continues from: add --ckpt.load_enable, or leave it out"


def attention_is_known(config: SFTConfig | RMConfig | DPOConfig | RLConfig | ServeRMConfig) -> Iterator[str]:
    """What transformers knows by name, paged or not, or a kernel of the Hub, which is called org/name."""
    name = config.ds.attn_implementation
    if name.removeprefix("paged|") in ATTENTIONS or "/" in name:
        return
    near = difflib.get_close_matches(name, ATTENTIONS, n=1)
    yield (
        f"--ds.attn_implementation {name} is unknown{f'; did you mean {near[0]}?' if near else ''} (choose from "
        f"{', '.join(ATTENTIONS)}, or a kernel of the Hub such as kernels-community/flash-attn2)"
    )


def weights_have_a_way(config: RLConfig) -> Iterator[str]:
    backend = config.vllm.sync_backend
    if config.vllm.num_engines != 0 and backend not in ("nccl", "gloo"):
        yield f"--vllm.sync_backend {backend}: give nccl, or gloo for weights that travel by CPU memory"


def rewards_come_from_somewhere(config: RLConfig) -> Iterator[str]:
    if config.reward_source is None:
        yield (
            "no reward: give --reward.remote_url (.py files with reward_func, or URLs), --train.agent_func_path or "
            "--reward.model_name_or_path"
        )
    if config.reward_source in (None, "model"):
        if config.eval.dataset:
            yield "--eval.dataset needs rewards from --reward.remote_url or --train.agent_func_path"
        if config.algo.dynamic_filtering_enable:
            yield (
                "--algo.dynamic_filtering_enable needs rewards from --reward.remote_url or --train.agent_func_path, "
                "before a reward model runs"
            )


def optimizer_batch_fits_the_round(config: RLConfig) -> Iterator[str]:
    if config.train.batch_size > config.samples_per_round:
        yield (
            f"--train.batch_size {config.train.batch_size} is more than a round has: --rollout.batch_size "
            f"{config.rollout.batch_size} × --rollout.n_samples_per_prompt {config.samples_per_prompt} = "
            f"{config.samples_per_round} samples. Make it {config.samples_per_round} or less"
        )


def reward_model_is_named(config: ServeRMConfig) -> Iterator[str]:
    if not config.reward.model_name_or_path:
        yield "--reward.model_name_or_path is missing: the reward model to serve"


def merge_paths_are_named(config: LoraCombinerConfig) -> Iterator[str]:
    for path in ("model_path", "lora_path", "output_path"):
        if not value_at(config, path):
            yield f"--{path} is missing"
