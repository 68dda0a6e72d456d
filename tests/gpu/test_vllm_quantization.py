"""Weights of 8 bits in vLLM on a CUDA device, with its own kernels and CUDA graphs: a dense model, and a mixture.

An engine takes a minute to start; each model has one for all its tests. What is printed: how far the engine's log-probs
are from the policy's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

pytest.importorskip("vllm")

import eight_bits
from small_tokenizers import tokenizer as small_tokenizer

from openrlhf.backends.base import ModuleWeights
from openrlhf.models.attention import ATTENTION
from openrlhf.models.policy import Policy
from openrlhf.rollout.vllm import settings as vllm_settings
from openrlhf.rollout.vllm.engine import VllmEngine
from openrlhf.rollout.vllm.settings import VllmSettings
from openrlhf.types import SamplingParams
from openrlhf.weight_sync.base import EngineWeightSync, PolicyWeights
from openrlhf.weight_sync.probe import LocalProbe, Probe, policy_logprobs, probe_tokens
from openrlhf.weight_sync.transports import IpcSender

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCABULARY, CONTEXT = 4096, 512
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "initializer_range": 0.04,
    "tie_word_embeddings": False,
    "bos_token_id": None,
}
CONFIGS = {
    "dense": Qwen2Config(intermediate_size=2816, **COMMON),
    "mixture": Qwen3MoeConfig(
        moe_intermediate_size=512,
        intermediate_size=2816,
        num_experts=16,
        num_experts_per_tok=4,
        head_dim=64,
        norm_topk_prob=True,
        **COMMON,
    ),
}
TOKENS = probe_tokens(VOCABULARY, length=64)


@dataclass
class Setup:
    engine: VllmEngine
    sync: EngineWeightSync
    policy: Policy

    def push(self) -> dict[str, float]:
        return self.sync.push(version=self.engine.version + 1).values()

    def held(self) -> dict[str, tuple[str, int, int]]:
        (found,) = asyncio.run(self.engine.ask(self.engine.llm.collective_rpc("held"), "what it holds"))
        return found

    def change_weights(self, seed: int, scale: float = 1.0) -> None:
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.policy.named_parameters():
                parameter.add_((0.002 + 0.3 * parameter.float().std()) * torch.randn_like(parameter))
                if parameter.dim() > 1 and ".layers." in name:
                    parameter.mul_(scale)

    def gap(self) -> float:
        """Of log-probs, on average, in standard deviations of the policy's."""
        own = torch.tensor(policy_logprobs(self.policy, TOKENS))
        found = torch.tensor(asyncio.run(self.engine.logprobs(TOKENS)))
        return float((own - found).abs().mean() / own.std())

    def sampled(self, *, count: int = 16, temperature: float = 1.0) -> list[Any]:
        params = SamplingParams(temperature=temperature, max_tokens=64, ignore_eos=True, detokenize=False)

        async def all_of_them() -> list[Any]:
            return await asyncio.gather(*(self.engine.generate([10 + i, 20, 30], params) for i in range(count)))

        return asyncio.run(all_of_them())


@pytest.fixture(scope="module", params=CONFIGS)
def setup(request, tmp_path_factory) -> Iterator[Setup]:
    tokenizer = small_tokenizer()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param], attn_implementation=ATTENTION)
    model = model.eval().to("cuda", torch.bfloat16)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = VllmSettings(
        model=str(folder),
        max_model_len=CONTEXT,
        max_num_seqs=64,
        gpu_memory_utilization=0.3,
        enable_sleep=True,
        quantization="fp8",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_settings, "WORKER_EXTENSION", eight_bits.TELLING)
        engine = VllmEngine(settings, tokenizer)
    policy = Policy(model)
    probe = Probe.of(vocab_size=VOCABULARY, dtype=torch.bfloat16, max_model_len=CONTEXT, rounded=True)
    sync = EngineWeightSync(
        engine,
        PolicyWeights(policy, ModuleWeights(policy)),
        IpcSender(block_bytes=16 * 2**20),
        SimpleNamespace(run=asyncio.run),
        probe=LocalProbe(probe, policy),
    )
    yield Setup(engine, sync, policy)
    engine.close()


def test_the_same_weights_leave_every_bit_and_every_address(setup):
    """Those of the files, and of three pushes. Heads, embeddings, norms and routers have 16 bits."""
    first = setup.held()
    rounded = {name for name, (dtype, _, _) in first.items() if "float8" in dtype}
    assert rounded
    assert not [name for name in rounded if "lm_head" in name or "embed" in name or "norm" in name or ".gate." in name]
    assert all(dtype == "torch.bfloat16" for name, (dtype, _, _) in first.items() if name.endswith((".gate.weight",)))
    print(f"gap as loaded: {setup.gap():.3f} standard deviations; rounded: {sorted(rounded)[:8]} …")
    assert setup.gap() < 0.3
    for _ in range(3):
        setup.push()
        assert setup.held() == first


def test_changed_weights_arrive_rounded_by_their_own_scales(setup):
    """They grow by more than old scales could hold, and shrink by more than old scales would leave anything of."""
    before = setup.held()
    for seed, scale in ((1, 4.0), (2, 0.05), (3, 4.0)):
        setup.change_weights(seed, scale)
        assert setup.gap() > 0.5  # or the push would prove nothing
        setup.push()
        print(f"gap after a push: {setup.gap():.3f} standard deviations")
        assert setup.gap() < 0.3
        after = setup.held()
        assert {name: found[:2] for name, found in after.items()} == {n: found[:2] for n, found in before.items()}
        assert not [name for name, found in after.items() if found[2] == before[name][2]]
        before = after


def test_log_probs_of_samples_are_those_of_the_engine_in_one_forward(setup):
    """Decoding runs in captured graphs, which would go on with old scales if these were elsewhere; reading a prompt
    does not."""
    setup.change_weights(4, 2.0)
    setup.push()
    gaps, scale = [], []
    for number, answer in enumerate(setup.sampled()):
        read = asyncio.run(setup.engine.logprobs([10 + number, 20, 30, *answer.token_ids]))[2:]
        gaps += [abs(a - b) for a, b in zip(answer.logprobs, read, strict=True)]
        scale += read
    mean, spread = float(torch.tensor(gaps).mean()), float(torch.tensor(scale).std())
    print(f"decoding and reading differ by {mean:.4f} on average; log-probs have a standard deviation of {spread:.2f}")
    assert mean < 0.1 * spread


def test_an_engine_that_slept_has_the_same_bits_after_a_push(setup):
    setup.push()
    before, tokens = setup.held(), [answer.token_ids for answer in setup.sampled(temperature=0.0)]
    asyncio.run(setup.engine.sleep())
    setup.push()
    assert setup.held() == before
    assert [answer.token_ids for answer in setup.sampled(temperature=0.0)] == tokens
