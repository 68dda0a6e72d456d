"""The engine of a local run, and how weights get there: the embedded one, or vLLM beside the trainer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from openrlhf.backends.weights import ModuleWeights
from openrlhf.config.roots import RLConfig
from openrlhf.models.policy import Policy
from openrlhf.rollout.base import Engine
from openrlhf.rollout.embedded import EmbeddedEngine
from openrlhf.trainers.settings import model_dtype
from openrlhf.weight_sync.base import WeightSync
from openrlhf.weight_sync.in_process import InProcessWeightSync


class LocalEngine(NamedTuple):
    engine: Engine
    weights: WeightSync


@contextlib.contextmanager
def opened_engine(config: RLConfig, policy: Policy, tokenizer: Any, device: torch.device) -> Iterator[LocalEngine]:
    """Ready to sample; nothing of it is left afterwards."""
    if config.vllm.num_engines:
        with _vllm(config, policy, tokenizer, device) as opened:
            yield opened
    else:
        engine = EmbeddedEngine(
            policy.model,
            tokenizer,
            max_model_len=config.data.max_len,
            seed=config.train.seed,
            # Only an agent comes back to a history it has shown before.
            reuse_prefixes=config.train.agent_func_path is not None,
        )
        yield LocalEngine(engine, InProcessWeightSync(engine))


@contextlib.contextmanager
def _vllm(config: RLConfig, policy: Policy, tokenizer: Any, device: torch.device) -> Iterator[LocalEngine]:
    # Seconds of imports, of a library that most runs do without.
    from openrlhf.rollout.vllm.engine import VllmEngine
    from openrlhf.rollout.vllm.settings import VllmSettings
    from openrlhf.weight_sync.probe import LocalProbe, Probe
    from openrlhf.weight_sync.vllm_source import PolicyWeights
    from openrlhf.weight_sync.vllm_transfer import RpcTrainerInfo, VllmWeightSync

    dtype = model_dtype(config.ds.param_dtype, device)
    settings = VllmSettings(
        model=config.actor.model_name_or_path,
        max_model_len=config.data.max_len,
        dtype=str(dtype).removeprefix("torch."),
        tensor_parallel_size=config.vllm.tensor_parallel_size,
        gpu_memory_utilization=config.vllm.gpu_memory_utilization,
        enforce_eager=config.vllm.enforce_eager,
        trust_remote_code=config.actor.trust_remote_code,
        seed=config.train.seed,
        deterministic=config.train.full_determinism_enable,
    )
    source = PolicyWeights(policy, ModuleWeights(policy))
    info = RpcTrainerInfo(rank=0, checksums=config.vllm.sync_verify)
    probe = None
    if config.vllm.sync_verify:
        vocab_size = policy.model.config.get_text_config().vocab_size
        probe = LocalProbe(Probe.of(vocab_size=vocab_size, dtype=dtype, max_model_len=config.data.max_len), policy)
    with contextlib.closing(VllmEngine(settings, tokenizer)) as engine:
        weights = VllmWeightSync(engine, source, init_info=info, probe=probe)
        # The engine has read the model's files; what the policy made of them, in 4 bits for one, is what it must have.
        weights.push(version=0)
        yield LocalEngine(engine, weights)
