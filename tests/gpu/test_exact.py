"""The exact forward on a CUDA device: kernels give a row the same bits in every batch, and vLLM and trainer agree."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Qwen2Config

from openrlhf.models import exact
from openrlhf.models.exact import KeyPlaces, Matrix
from openrlhf.models.loading import LoadSettings, load_policy
from openrlhf.types import PackedTokens, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LOOP = SimpleNamespace(run=asyncio.run)


def _random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 7, 64, 700])
def test_rows_of_products_norms_and_softmaxes_have_the_bits_of_any_batch(dtype, rows):
    torch.manual_seed(0)
    x, weight, bias = (_random(*shape, dtype=dtype) for shape in ((1500, 576), (1536, 576), (1536,)))
    for out in (dtype, torch.float32):
        for given in (None, bias):
            whole = exact.linear(x, Matrix(weight, given), dtype=out)
            assert torch.equal(
                exact.linear(x[200 : 200 + rows], Matrix(weight, given), dtype=out), whole[200 : 200 + rows]
            )
            torch.testing.assert_close(whole.to(dtype), F.linear(x, weight, given), atol=0.3, rtol=0.02)
    assert torch.equal(exact.rms_norm(x[:rows], weight[0], 1e-6), exact.rms_norm(x, weight[0], 1e-6)[:rows])
    logits = _random(1500, 49_152, dtype=torch.float32)
    assert torch.equal(exact.log_softmax(logits[3 : 3 + rows]), exact.log_softmax(logits)[3 : 3 + rows])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [64, 96, 128])
def test_a_decoding_step_attends_with_the_bits_of_the_whole_sequence(dtype, size):
    torch.manual_seed(0)
    lengths, heads, key_heads = [700, 33, 1, 250], 9, 3
    starts = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
    q, k, v = (_random(sum(lengths), n, size, dtype=dtype) for n in (heads, key_heads, key_heads))
    slots = starts[:-1, None] + torch.arange(max(lengths), device="cuda", dtype=torch.int32)
    config = Qwen2Config(
        hidden_size=heads * size, num_attention_heads=heads, num_key_value_heads=key_heads, num_hidden_layers=1
    )
    decoder = exact.ExactDecoder(config)
    whole = decoder.attend(q, k, v, KeyPlaces(starts, starts.diff(), slots, max(lengths)))
    for number, length in enumerate(lengths):
        own = slice(int(starts[number]), int(starts[number + 1]))
        expected = F.scaled_dot_product_attention(
            *(x[own].transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=True
        )
        torch.testing.assert_close(whole[own].transpose(0, 1)[None], expected, atol=2e-2, rtol=2e-2)
        for seen in {1, min(length, 17), length}:  # one token asks, with so many keys, in a shuffled cache
            places = torch.randperm(1000, device="cuda")[:seen].int()
            cache = _random(1000, 2, key_heads, size, dtype=dtype)
            cache[places.long(), 0], cache[places.long(), 1] = k[own][:seen], v[own][:seen]
            one = torch.tensor([0, 1], device="cuda", dtype=torch.int32)
            step = KeyPlaces(one, torch.tensor([seen], device="cuda", dtype=torch.int32), places[None], 1)
            row = own.start + seen - 1
            assert torch.equal(decoder.attend(q[row : row + 1], cache[:, 0], cache[:, 1], step), whole[row : row + 1])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_vllm_and_the_trainer_have_the_same_log_probs_to_the_bit(dtype, tmp_path):
    pytest.importorskip("vllm")
    from small_tokenizers import tokenizer as small_tokenizer

    from openrlhf.config.backend import InferenceBackendSection
    from openrlhf.rollout.vllm.engine import VllmEngine
    from openrlhf.rollout.vllm.settings import VllmSettings

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=1024,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer = small_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    policy = load_policy(
        tmp_path, LoadSettings(device="cuda", ds=InferenceBackendSection(param_dtype=dtype), exact=True)
    )
    settings = VllmSettings(
        model=str(tmp_path),
        dtype=str(policy.model.dtype).removeprefix("torch."),
        max_model_len=800,
        max_num_seqs=256,
        gpu_memory_utilization=0.3,
        enable_prefix_caching=True,
        exact=True,
    )
    engine = VllmEngine(settings, tokenizer)
    prompts = [[5 + (i * 7 + j * 3) % 4000 for j in range(1 + i % 250)] for i in range(400)]

    async def sample() -> list:
        params = SamplingParams(temperature=0.9, max_tokens=200, ignore_eos=True)
        return await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))

    try:
        found = asyncio.run(sample())
    finally:
        engine.close()
    gaps = []
    for first in range(0, len(found), 50):
        part = list(zip(prompts, found, strict=True))[first : first + 50]
        ids = [torch.tensor([*prompt, *each.token_ids]) for prompt, each in part]
        actions = [torch.arange(len(own)) >= len(prompt) for own, (prompt, _) in zip(ids, part, strict=True)]
        with torch.no_grad():
            stream = PackedTokens.from_sequences(ids, actions).to("cuda")
            own = policy(stream, temperature=0.9).logprobs_A.cpu()
        gaps.append((own - torch.tensor([x for _, each in part for x in each.logprobs])).abs())
    gap = torch.cat(gaps)
    print(f"{len(gap)} tokens, mean gap {gap.mean():.2e}, largest {gap.max():.2e}, {int((gap > 0).sum())} not 0")
    assert len(gap) > 50_000
    assert gap.max() == 0
