"""Weights that vLLM rounds to 8 bits when it loads them: every push rounds the weights that it brings, by new scales.

The rounding, and the load layer by layer, are vLLM's own; the product is plain torch (`eight_bits`), because vLLM's
needs other CPUs. `tests/gpu/test_vllm_quantization.py` has its kernels.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import eight_bits
import pytest
import torch
from small_tokenizers import tokenizer as small_tokenizer
from transformers import AutoModelForCausalLM, Qwen2Config

from openrlhf.backends.base import ModuleWeights
from openrlhf.models.attention import ATTENTION
from openrlhf.models.policy import Policy
from openrlhf.rollout.vllm import settings as vllm_settings
from openrlhf.rollout.vllm.engine import VllmEngine
from openrlhf.rollout.vllm.settings import VllmSettings
from openrlhf.types import SamplingParams
from openrlhf.weight_sync.base import EngineWeightSync, PolicyWeights
from openrlhf.weight_sync.probe import LocalProbe, Probe, max_gap, policy_logprobs, probe_tokens
from openrlhf.weight_sync.transports import RpcSender

pytestmark = pytest.mark.slow

VOCABULARY, CONTEXT = 360, 128
TOKENS = probe_tokens(VOCABULARY)
ROUNDING_APART = 0.5
"""Two right ways to multiply the same rounded weights in bf16 differ by less; the unrounded ones by more."""


@dataclass
class Setup:
    engine: VllmEngine
    model: Any

    def push(self) -> dict[str, float]:
        policy = Policy(self.model)
        probe = Probe.of(vocab_size=VOCABULARY, dtype=torch.bfloat16, max_model_len=CONTEXT, rounded=True)
        weights = PolicyWeights(policy, ModuleWeights(policy))
        sync = EngineWeightSync(
            self.engine, weights, RpcSender(block_bytes=50_000), _LOOP, probe=LocalProbe(probe, policy)
        )
        return sync.push(version=self.engine.version + 1).values()

    def held(self) -> dict[str, tuple[str, int, int]]:
        (found,) = asyncio.run(self.engine.ask(self.engine.llm.collective_rpc("held"), "what it holds"))
        return found

    def change_weights(self, *, seed: int, scale: float) -> None:
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_((0.03 + 0.3 * parameter.float().std()) * torch.randn_like(parameter))
            for layer in self.model.model.layers.modules():
                if isinstance(layer, torch.nn.Linear):
                    layer.weight.mul_(scale)

    def gap(self) -> float:
        """Of the engine's log-probs to those of the policy with rounded weights."""
        model = copy.deepcopy(self.model)
        with torch.no_grad():
            for layer in model.model.layers.modules():
                if isinstance(layer, torch.nn.Linear):
                    layer.weight.copy_(eight_bits.rounded(layer.weight))
        return max_gap(policy_logprobs(Policy(model), TOKENS), asyncio.run(self.engine.logprobs(TOKENS)))


_LOOP = SimpleNamespace(run=asyncio.run)


@pytest.fixture(scope="module")
def setup(tmp_path_factory) -> Iterator[Setup]:
    tokenizer = small_tokenizer()
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval().bfloat16()
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = VllmSettings(
        model=str(folder), max_model_len=CONTEXT, max_num_seqs=8, cpu_cache_gib=1, quantization="fp8"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_settings, "WORKER_EXTENSION", eight_bits.EXTENSION)
        engine = VllmEngine(settings, tokenizer)
    yield Setup(engine, model)
    engine.close()


def test_the_same_weights_leave_every_bit_and_every_address(setup):
    """Of the weights as they were read from files: 8 bits in all linear layers of the body, 16 elsewhere."""
    first = setup.held()
    by_dtype = {
        dtype: {name.split(".", 3)[-1] for name, (kind, _, _) in first.items() if kind == f"torch.{dtype}"}
        for dtype in ("float8_e4m3fn", "float32", "bfloat16")
    }
    linear = {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"}
    assert by_dtype["float8_e4m3fn"] == {f"{name}.weight" for name in linear}
    assert by_dtype["float32"] == {f"{name}.weight_scale" for name in linear}
    assert {"embed_tokens.weight", "lm_head.weight"} <= {
        name.removeprefix("model.") for name, (kind, _, _) in first.items() if kind == "torch.bfloat16"
    }
    assert setup.gap() < ROUNDING_APART
    for _ in range(3):
        setup.push()
        assert setup.held() == first


def test_changed_weights_arrive_rounded_by_their_own_scales(setup):
    """Twice: they grow, by a factor that old scales could not hold, and shrink, where old scales would leave nothing."""
    before = setup.held()
    for seed, scale in ((1, 3.0), (2, 0.02)):
        setup.change_weights(seed=seed, scale=scale)
        setup.push()
        assert setup.gap() < ROUNDING_APART
        after = setup.held()
        changed = {name for name, found in after.items() if found[2] != before[name][2]}
        assert changed == set(after)
        assert {name: found[:2] for name, found in after.items()} == {n: found[:2] for n, found in before.items()}
        before = after


def test_an_update_that_breaks_off_is_forgotten(setup):
    setup.push()
    before = setup.held()
    other = copy.deepcopy(setup.model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2.0)
    policy = Policy(other)
    blocks: list[Any] = []
    PolicyWeights(policy, ModuleWeights(policy)).send(
        RpcSender(block_bytes=50_000), lambda block, *, adapter=None: blocks.append(block), needs_base=True
    )

    async def begin() -> None:
        await setup.engine.pause()
        for block in blocks[: len(blocks) // 2]:
            await setup.engine.load_weights([block])

    asyncio.run(begin())
    setup.push()
    assert setup.held() == before
    assert setup.gap() < ROUNDING_APART
    answer = asyncio.run(setup.engine.generate(TOKENS[:4], SamplingParams(temperature=1.0, max_tokens=8)))
    scored = asyncio.run(setup.engine.logprobs([*TOKENS[:4], *answer.token_ids]))[3:]
    assert max_gap(answer.logprobs, scored) < 0.1
