"""vLLM on this machine's CPU: the tokens of the embedded engine, and the policy's weights after every push.

An engine takes half a minute to start, so all tests share one, and push weights of their own where they need them. Its
model has a head of its own; `test_vllm_run.py` pushes one whose head is its embedding.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import itertools
import math
import os
import signal
import tempfile
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_contract import EngineContract, Subject
from own_routes import check_routes
from own_supports import check_supports
from patience import patience
from processes import living_children, wait_until
from small_tokenizers import tokenizer as small_tokenizer
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

from openrlhf.agents.recording_engine import joined
from openrlhf.backends.base import ModuleWeights
from openrlhf.config.backend import LoraSection
from openrlhf.models.adapters import add_adapter
from openrlhf.models.attention import ATTENTION
from openrlhf.models.policy import Policy
from openrlhf.rollout.base import EngineError
from openrlhf.rollout.embedded import EmbeddedEngine
from openrlhf.rollout.vllm.engine import VllmEngine, VllmError
from openrlhf.rollout.vllm.settings import VllmSettings
from openrlhf.types import FinishReason, Generation, SamplingParams
from openrlhf.weight_sync.base import EngineWeightSync, PolicyWeights, WeightSyncError
from openrlhf.weight_sync.blocks import WeightBlock, pack
from openrlhf.weight_sync.probe import LocalProbe, Probe, max_gap, policy_logprobs, probe_tokens
from openrlhf.weight_sync.transports import RpcSender

pytestmark = pytest.mark.slow

VOCABULARY = 360
CONTEXT = 256
BLOCK_BYTES = 100_000
LOOP = SimpleNamespace(run=asyncio.run)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,  # heads of 32, the smallest that vLLM has on a CPU
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
}


@dataclass
class Setup:
    """An engine, and the model that its folder was written from."""

    engine: VllmEngine
    model: Any
    tokenizer: Any
    version: int = 0
    others_sockets: frozenset[Path] = frozenset()
    """Where temporary files are, from before this engine."""

    @property
    def policy(self) -> Policy:
        return Policy(self.model)

    def sync(self, model: Any | None = None, *, probe: LocalProbe | None = None) -> EngineWeightSync:
        sender = RpcSender(block_bytes=BLOCK_BYTES, checksums=True)
        return EngineWeightSync(self.engine, source(model or self.model), sender, LOOP, probe=probe)

    def push(self, sync: EngineWeightSync) -> dict[str, float]:
        self.version += 1
        return sync.push(version=self.version).values()

    def probed(self, policy: Policy | None = None) -> LocalProbe:
        return LocalProbe(
            Probe.of(vocab_size=VOCABULARY, dtype=torch.float32, max_model_len=CONTEXT), policy or self.policy
        )

    def change_weights(self, *, seed: int) -> None:
        """As an update would, only more so."""
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.3 * parameter.std().nan_to_num() * torch.randn_like(parameter))


def write_model(config: Any, tokenizer: Any, folder: Path) -> tuple[Any, Path]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, folder


def start_engine(folder: Path, tokenizer: Any, *, dtype: str = "float32", **options: Any) -> VllmEngine:
    places = {"max_model_len": CONTEXT, "max_num_seqs": 64, "cpu_cache_gib": 1}
    return VllmEngine(VllmSettings(model=str(folder), dtype=dtype, **places, **options), tokenizer)


def move_adapter(model: Any) -> None:
    """As training would: B starts at 0."""
    torch.manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))


def source(model: Any) -> PolicyWeights:
    policy = Policy(model)
    return PolicyWeights(policy, ModuleWeights(policy))


@pytest.fixture(scope="module")
def setup(tmp_path_factory) -> Iterator[Setup]:
    """A Qwen2 with grouped queries: 4 heads share 2 keys. Its engine, closed afterwards with no process left."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    tokenizer = small_tokenizer()
    config = Qwen2Config(**SMALL, eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=False)
    model, folder = write_model(config, tokenizer, tmp_path_factory.mktemp("model"))
    others = set(living_children(os.getpid()))
    sockets = frozenset(path for path in Path(tempfile.gettempdir()).iterdir() if path.is_socket())
    engine = start_engine(folder, tokenizer, return_routes=True)  # which a model without experts has none of
    workers = _descendants(os.getpid()) - others
    yield Setup(engine, model, tokenizer, others_sockets=sockets)
    engine.close()
    engine.close()
    assert not os.path.exists(engine._sockets)
    torch.set_num_threads(threads)
    # A worker whose parent was killed ends by itself, but not at once.
    assert wait_until(lambda: not {pid for pid in workers if _is_ours(pid)}, 30), workers
    with pytest.raises(VllmError, match="closed"):
        engine.abort()


def _descendants(pid: int) -> set[int]:
    children = living_children(pid)
    return set(children).union(*(_descendants(child) for child in children))


def _is_ours(pid: int) -> bool:
    """Not multiprocessing's resource tracker, which lives as long as the process that once spawned something."""
    try:
        with open(f"/proc/{pid}/stat") as stat, open(f"/proc/{pid}/cmdline") as command:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z" and "resource_tracker" not in command.read()
    except OSError:
        return False


def prompts(n: int, *, length: int = 9) -> list[list[int]]:
    generator = torch.Generator().manual_seed(n)
    return torch.randint(1, 250, (n, length), generator=generator).tolist()


async def _gather(calls: Sequence[Coroutine]) -> list[Generation]:
    return await asyncio.gather(*calls)


def generate_all(engine: Any, asked: Sequence[Sequence[int]], params: SamplingParams) -> list[Generation]:
    return asyncio.run(_gather([engine.generate(prompt, params) for prompt in asked]))


def embedded(setup: Setup) -> EmbeddedEngine:
    return EmbeddedEngine(setup.model, setup.tokenizer, max_model_len=CONTEXT)


def rescored(model: Any, prompt: Sequence[int], generation: Generation, *, temperature: float = 1.0) -> torch.Tensor:
    """log-probs of the generated tokens, by a plain forward of the whole sequence."""
    with torch.no_grad():
        return (
            _logits(model, prompt, generation)
            .float()
            .div(temperature)
            .log_softmax(-1)[torch.arange(len(generation.token_ids)), generation.token_ids]
        )


def _logits(model: Any, prompt: Sequence[int], generation: Generation) -> torch.Tensor:
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    with torch.no_grad():
        return plain(torch.tensor([[*prompt, *generation.token_ids]])).logits[0, len(prompt) - 1 : -1]


class TestContract(EngineContract):
    @pytest.fixture
    def subject(self, setup) -> Iterator[Subject]:
        setup.push(setup.sync())
        weights = [(name, weight.clone()) for name, weight in source(setup.model)]
        yield Subject(setup.engine, weights, prompts(1)[0], max_tokens=200, quiet=0.3)
        setup.version = setup.engine.version


def test_weights_that_are_not_finite_are_not_sent_and_the_next_good_push_goes_on(setup):
    sync = setup.sync()
    setup.push(sync)
    with torch.no_grad():
        weight = next(setup.model.parameters())
        kept = weight[0, 0].clone()
        weight[0, 0] = math.nan
        with pytest.raises(
            WeightSyncError, match=r"failed: weights are not finite: model\.model\.embed_tokens\.weight"
        ):
            setup.push(sync)
        weight[0, 0] = kept
    setup.push(sync)
    (answer,) = generate_all(setup.engine, prompts(1), SamplingParams(max_tokens=2, temperature=0.0))
    assert len(answer.token_ids) == 2


def test_greedy_tokens_are_those_of_the_embedded_engine(setup):
    setup.push(setup.sync())
    asked = prompts(8)
    for ours, theirs in zip(
        generate_all(setup.engine, asked, GREEDY), generate_all(embedded(setup), asked, GREEDY), strict=True
    ):
        assert ours.token_ids == theirs.token_ids
        assert ours.text == theirs.text
        assert ours.finish_reason == theirs.finish_reason
        assert ours.stop_reason == theirs.stop_reason
        torch.testing.assert_close(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), atol=1e-4, rtol=0)


def test_sampled_logprobs_are_those_of_the_distribution_sampled_from(setup):
    setup.push(setup.sync())
    params = SamplingParams(temperature=0.7, max_tokens=24, ignore_eos=True)
    asked = prompts(6)
    for prompt, generation in zip(asked, generate_all(setup.engine, asked, params), strict=True):
        expected = rescored(setup.model, prompt, generation, temperature=0.7)
        torch.testing.assert_close(torch.tensor(generation.logprobs), expected, atol=1e-4, rtol=0)
        assert generation.versions == [setup.version] * 24
        assert generation.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    "cut",
    [
        {"top_k": 5},
        {"top_p": 0.9, "temperature": 0.5},
        {"min_p": 0.2, "logprobs": None},
        {"top_k": 12, "top_p": 0.8, "min_p": 0.05},
        {"top_p": 0.95, "supports": 3},
        {"top_p": 0.9999, "supports": 10_000},
    ],
    ids=str,
)
def test_every_token_says_what_it_was_chosen_among(setup, cut):
    """Beside requests that ask for other things. The last cut may leave the whole vocabulary."""
    setup.push(setup.sync())
    params = SamplingParams(**{"max_tokens": 16, "ignore_eos": True, "supports": 64, **cut})
    asked = prompts(3)

    async def sampled() -> list[Generation]:
        beside = [params.copy(supports=0), SamplingParams(max_tokens=16, ignore_eos=True, supports=64)]
        others = [setup.engine.generate(prompt, other) for prompt, other in zip(asked, beside, strict=False)]
        return await _gather([*(setup.engine.generate(prompt, params) for prompt in asked), *others])

    found = asyncio.run(sampled())
    for prompt, generation in zip(asked, found, strict=False):
        assert (generation.logprobs is None) is ("logprobs" in cut)
        check_supports(_logits(setup.model, prompt, generation), generation, params)
    assert [generation.supports for generation in found[3:]] == [None, None]
    assert [len(generation.logprobs or ()) for generation in found[3:]] == [0 if "logprobs" in cut else 16, 16]


def test_supports_are_those_of_the_weights_that_sampled(setup):
    """Of a stream that a push interrupts."""
    setup.push(setup.sync())
    params, prompt = SamplingParams(max_tokens=200, ignore_eos=True, top_k=6, supports=64), prompts(1)[0]
    kept = copy.deepcopy(setup.model.state_dict())

    async def interrupted() -> list[Generation]:
        parts = setup.engine.stream(prompt, params)
        seen = [await anext(parts)]
        await setup.engine.pause()
        rest = asyncio.create_task(_collected(parts, seen))
        await asyncio.to_thread(push_other)
        await rest
        return seen

    def push_other() -> None:
        setup.change_weights(seed=3)
        setup.push(setup.sync())

    seen = asyncio.run(interrupted())
    whole = joined(seen)
    first = sum(version < setup.version for version in whole.versions)
    assert 0 < first < 200
    new = _logits(setup.model, prompt, whole)[first:]
    setup.model.load_state_dict(kept)
    check_supports(torch.cat([_logits(setup.model, prompt, whole)[:first], new]), whole, params)
    setup.push(setup.sync())


async def _collected(parts: Any, seen: list[Generation]) -> None:
    async for part in parts:
        seen.append(part)


def test_a_model_without_experts_has_no_routes(setup, caplog):
    (generation,) = generate_all(setup.engine, prompts(1), GREEDY)
    assert generation.routes is None
    assert "routes" not in caplog.text


def test_logprobs_are_left_out_unless_asked_for(setup):
    (generation,) = generate_all(setup.engine, prompts(1), GREEDY.copy(logprobs=None))
    assert generation.logprobs is None
    assert generation.token_ids


def test_a_push_changes_what_is_sampled_and_costs_one_call_a_block(setup):
    """The same prompts before and after: whatever is cached of the old weights must be gone."""
    asked = prompts(4, length=100)
    sync = setup.sync()
    setup.push(sync)
    before = generate_all(setup.engine, asked, GREEDY)
    setup.change_weights(seed=setup.version)
    metrics = setup.push(sync)

    blocks = list(pack(source(setup.model), max_bytes=BLOCK_BYTES))
    assert 1 < len(blocks) < len(list(setup.model.parameters()))
    assert metrics["sync/buckets"] == len(blocks)
    after = generate_all(setup.engine, asked, GREEDY)
    assert [g.token_ids for g in after] != [g.token_ids for g in before]
    assert [g.token_ids for g in after] == [g.token_ids for g in generate_all(embedded(setup), asked, GREEDY)]
    assert {v for g in after for v in g.versions} == {setup.version}
    probe = probe_tokens(VOCABULARY)
    assert max_gap(policy_logprobs(setup.policy, probe), asyncio.run(setup.engine.logprobs(probe))) < 1e-4


def test_a_verified_push_notices_weights_that_are_not_the_policys(setup):
    """The head alone is 1% off, in what is sent and not in the policy that is compared."""
    probe = setup.probed()
    assert setup.push(setup.sync(probe=probe))["sync/probe_gap"] < 1e-4
    wrong = copy.deepcopy(setup.model)
    with torch.no_grad():
        wrong.get_output_embeddings().weight.mul_(1.01)
    with pytest.raises(WeightSyncError, match=rf"version {setup.version + 1} .* differ"):
        setup.push(setup.sync(wrong, probe=probe))
    setup.push(setup.sync(probe=probe))


def test_a_policy_with_an_adapter_arrives_merged(setup):
    """The engine knows of none; the policy keeps it, and its weights as they are."""
    model = copy.deepcopy(setup.model)
    add_adapter(model, LoraSection(rank=4, alpha=8, dropout=0.5), dtype=torch.float32)
    move_adapter(model)
    policy, before = Policy(model).train(), copy.deepcopy(model.state_dict())
    metrics = setup.push(setup.sync(model, probe=setup.probed(policy)))
    assert metrics["sync/probe_gap"] < 1e-4
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert (
        max_gap(
            asyncio.run(setup.engine.logprobs(probe_tokens(VOCABULARY))),
            policy_logprobs(setup.policy, probe_tokens(VOCABULARY)),
        )
        > 0.01
    )
    setup.push(setup.sync(probe=setup.probed()))


def test_experts_arrive_with_what_an_adapter_adds_to_each_in_every_stage_of_a_pipeline(tmp_path):
    """Transformers has them stacked, its files one by one, and vLLM packed; each of two layers in a process of its
    own."""
    tokenizer = small_tokenizer()
    config = Qwen3MoeConfig(**SMALL, head_dim=32, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2)
    model, folder = write_model(config, tokenizer, tmp_path)
    with contextlib.closing(start_engine(folder, tokenizer, pipeline_parallel_size=2, return_routes=True)) as engine:
        setup = Setup(engine, model, tokenizer)
        for prompt, generation in zip(prompts(3), generate_all(engine, prompts(3), GREEDY), strict=True):
            check_routes(generation.routes, model, [*prompt, *generation.token_ids])  # each stage has seen one layer
        add_adapter(model, LoraSection(rank=4, alpha=8), dtype=torch.float32)
        move_adapter(model)
        probe = probe_tokens(VOCABULARY)
        assert max_gap(policy_logprobs(setup.policy, probe), asyncio.run(engine.logprobs(probe))) > 0.01
        for _ in range(2):
            assert setup.push(setup.sync(probe=setup.probed()))["sync/probe_gap"] < 1e-4


class Gone(PolicyWeights):
    """Weights that break off in the middle of a layer."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().__iter__():
            if name.endswith("layers.1.self_attn.v_proj.weight"):
                raise OSError("a rank is gone")
            yield name, tensor


def break_block(sync: EngineWeightSync) -> None:
    """One bit of the third block flips on its way."""
    load, numbers = sync._load, itertools.count()

    def damaging(block: WeightBlock, **options: Any) -> None:
        if next(numbers) == 2:
            payload = block.payload.copy()
            payload[len(payload) // 2] ^= 1
            block = dataclasses.replace(block, payload=payload)
        load(block, **options)

    sync._load = damaging


def break_source(sync: EngineWeightSync) -> None:
    sync._weights.__class__ = Gone


@pytest.mark.parametrize(("broken", "reason"), [(break_block, "arrived damaged"), (break_source, "a rank is gone")])
def test_a_push_that_fails_midway_leaves_the_engine_paused_until_another_succeeds(setup, broken, reason):
    """Some layers have new weights, one has half of them. Nothing is sampled with that; the next push starts over."""
    setup.push(setup.sync(probe=setup.probed()))
    setup.change_weights(seed=200)
    failing = setup.sync()
    broken(failing)
    with pytest.raises(WeightSyncError, match=rf"the push of version {setup.version + 1} failed: .*{reason}"):
        failing.push(version=setup.version + 1)
    assert setup.engine.version == setup.version

    async def play() -> list[Generation]:
        call = asyncio.create_task(setup.engine.generate(prompts(1)[0], GREEDY))
        await asyncio.sleep(1.0)
        assert not call.done()
        await asyncio.to_thread(setup.push, setup.sync(probe=setup.probed()))
        return [await call]

    (generation,) = asyncio.run(play())
    assert set(generation.versions) == {setup.version}
    (expected,) = generate_all(embedded(setup), prompts(1), GREEDY)
    assert generation.token_ids == expected.token_ids


@pytest.mark.parametrize(
    "stops", [(), ("pause",), ("pause", "sleep")], ids=["at once", "paused before", "asleep before"]
)
def test_requests_under_way_go_on_with_the_new_weights_and_every_token_knows_its_version(setup, stops):
    """A greedy token is the likeliest of the version it names: old weights up to the push, new ones from there. So it is
    for requests that stop long before the push, as at the end of a round, and whose engine gives its memory away."""
    setup.push(setup.sync())
    old_model, old = copy.deepcopy(setup.model), setup.version
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, detokenize=False)
    asked = prompts(6)
    setup.change_weights(seed=100)

    async def play() -> list[Generation]:
        calls = [asyncio.create_task(setup.engine.generate(prompt, params)) for prompt in asked]
        seen = 0
        async with contextlib.aclosing(setup.engine.stream(asked[0], params)) as parts:
            async for part in parts:
                seen += len(part.token_ids)
                if seen > 30:
                    break
        for stop in stops:
            await getattr(setup.engine, stop)()
        if stops:
            done, _ = await asyncio.wait(calls, timeout=1.0)
            assert not done
        await asyncio.to_thread(setup.push, setup.sync())
        return await asyncio.gather(*calls)

    for prompt, generation in zip(asked, asyncio.run(play()), strict=True):
        assert len(generation.token_ids) == 200
        assert sorted(generation.versions) == generation.versions
        first_new = generation.versions.count(old)
        assert 20 < first_new < 200
        assert set(generation.versions) == {old, old + 1}
        behind_old = _behind(_logits(old_model, prompt, generation), generation)
        behind_new = _behind(_logits(setup.model, prompt, generation), generation)
        assert max(behind_old[:first_new]) < 1e-3  # two may be equally likely
        assert max(behind_new[first_new:]) < 1e-3
        assert max(behind_new[:first_new]) > 1
        assert max(behind_old[first_new:]) > 1


def _behind(logits: torch.Tensor, generation: Generation) -> list[float]:
    """How far the logit of each token is from the largest."""
    chosen = torch.tensor(generation.token_ids)[:, None]
    return (logits.max(-1).values - logits.gather(-1, chosen).squeeze(-1)).tolist()


def test_an_engine_that_slept_goes_on_with_the_weights_of_the_next_push(setup):
    """A CPU's memory is not given back, but the order of calls is a GPU's: asleep nothing is sampled, a request made
    meanwhile waits for the push, and without weights there is no going on."""
    setup.push(setup.sync())
    before = generate_all(setup.engine, prompts(3), GREEDY)
    asyncio.run(setup.engine.sleep())
    with pytest.raises(EngineError, match="no weights"):
        asyncio.run(setup.engine.resume(setup.version))
    setup.change_weights(seed=7)

    async def ask_asleep() -> list[Generation]:
        calls = [asyncio.create_task(setup.engine.generate(prompt, GREEDY)) for prompt in prompts(3)]
        done, _ = await asyncio.wait(calls, timeout=0.5)
        assert not done
        await asyncio.to_thread(setup.push, setup.sync())
        return await asyncio.gather(*calls)

    after = asyncio.run(ask_asleep())
    assert [g.token_ids for g in after] == [g.token_ids for g in generate_all(embedded(setup), prompts(3), GREEDY)]
    assert [g.token_ids for g in after] != [g.token_ids for g in before]
    assert {v for g in after for v in g.versions} == {setup.version}
    setup.push(setup.sync())  # awake again: a push like any other


def test_more_requests_than_places_are_all_answered(setup):
    """200 for 64 places, from two event loops at once; no answer goes to another's question."""
    setup.push(setup.sync())
    asked = prompts(100)
    params = GREEDY.copy(max_tokens=8)

    async def both() -> list[list[Generation]]:
        halves = (asyncio.to_thread(generate_all, setup.engine, asked, params) for _ in range(2))
        return await asyncio.gather(*halves)

    first, second = asyncio.run(both())
    expected = [g.token_ids for g in generate_all(embedded(setup), asked, params)]
    assert [g.token_ids for g in first] == expected
    assert [g.token_ids for g in second] == expected
    assert setup.engine.num_running == 0


def test_streamed_parts_are_the_whole_generation(setup):
    """What comes while the reader is busy is one part, so on a busy machine several parts take some tries."""
    params = GREEDY.copy(max_tokens=64, ignore_eos=True)

    async def parts() -> list[Generation]:
        return [part async for part in setup.engine.stream(prompts(1)[0], params)]

    (whole,) = generate_all(setup.engine, prompts(1), params)

    def came_in_several() -> bool:
        streamed = asyncio.run(parts())
        assert [token for part in streamed for token in part.token_ids] == whole.token_ids
        assert "".join(part.text for part in streamed) == whole.text
        assert [part.finish_reason for part in streamed[:-1]] == [None] * (len(streamed) - 1)
        assert streamed[-1].finish_reason is whole.finish_reason
        return len(streamed) > 3

    assert wait_until(came_in_several, patience(60.0))


def test_stop_strings_and_stop_tokens_end_a_generation_as_in_the_embedded_engine(setup):
    setup.push(setup.sync())
    asked = [setup.tokenizer("the answer is")["input_ids"]]  # vLLM reads on from whole characters
    (free,) = generate_all(setup.engine, asked, GREEDY.copy(ignore_eos=True))
    texts = [setup.tokenizer.decode([token], skip_special_tokens=True) for token in free.token_ids[3:]]
    word = next(text for text in texts if text.isascii() and text.isprintable() and text and text in free.text)
    for params in (
        GREEDY.copy(ignore_eos=True, stop_token_ids=[free.token_ids[5]]),
        GREEDY.copy(ignore_eos=True, stop=[word]),
        GREEDY.copy(ignore_eos=True, stop=[word], include_stop_str_in_output=True),
    ):
        (ours,) = generate_all(setup.engine, asked, params)
        (theirs,) = generate_all(embedded(setup), asked, params)
        assert ours.finish_reason is FinishReason.STOP
        assert (ours.token_ids, ours.text, ours.stop_reason) == (theirs.token_ids, theirs.text, theirs.stop_reason)


def test_abort_ends_every_request_with_the_tokens_it_has(setup):
    """On a busy machine a request may have ended by itself before it is aborted: then it is whole, and tried again."""
    params = GREEDY.copy(max_tokens=None, ignore_eos=True)

    async def play() -> list[Generation]:
        calls = [asyncio.create_task(setup.engine.generate(prompt, params)) for prompt in prompts(3)]
        async with contextlib.aclosing(setup.engine.stream(prompts(1)[0], params)) as parts:
            async for _ in parts:
                break
        await asyncio.to_thread(setup.engine.abort)
        return await asyncio.gather(*calls)

    def all_aborted() -> bool:
        ended = asyncio.run(play())
        assert setup.engine.num_running == 0
        whole = [generation for generation in ended if generation.finish_reason is FinishReason.LENGTH]
        assert {len(generation.token_ids) for generation in whole} <= {CONTEXT - len(p) for p in prompts(3)}
        aborted = [generation for generation in ended if generation.finish_reason is FinishReason.ABORT]
        assert all(0 <= len(generation.token_ids) < CONTEXT - 9 for generation in aborted)
        assert len(aborted) + len(whole) == len(ended)
        return not whole

    assert wait_until(all_aborted, patience(60.0))


def test_a_cancelled_call_gives_its_place_up(setup):
    async def play() -> None:
        call = asyncio.create_task(setup.engine.generate(prompts(1)[0], GREEDY.copy(max_tokens=None, ignore_eos=True)))
        while not setup.engine.num_running:
            await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(play())
    assert wait_until(lambda: setup.engine.num_running == 0)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "at least one token"), ([1] * CONTEXT, "leaves no room"), ([VOCABULARY], "must be in 0 … 359, got 360")],
)
def test_a_prompt_that_cannot_be_continued_is_refused(setup, prompt, message):
    with pytest.raises(ValueError, match=message):
        generate_all(setup.engine, [prompt], GREEDY)


@contextlib.contextmanager
def frozen(engine: VllmEngine) -> Iterator[None]:
    """Its processes do nothing, and say so to nobody."""
    pids = [pid for pid in _descendants(os.getpid()) if _is_ours(pid)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def test_an_engine_that_samples_nothing_is_given_up_and_one_that_is_slow_is_not(setup, monkeypatch):
    """200 tokens take longer than 0.05 s; a frozen engine samples none in twice that time."""
    monkeypatch.setattr("openrlhf.rollout.vllm.engine.STALL_SECONDS", 0.05)
    params = GREEDY.copy(max_tokens=200, ignore_eos=True)
    (whole,) = generate_all(setup.engine, prompts(1), params)
    assert len(whole.token_ids) == 200
    with frozen(setup.engine), pytest.raises(VllmError, match=r"waited 0\.05 s for a token; requests under way: 1"):
        generate_all(setup.engine, prompts(1), params)
    assert wait_until(lambda: setup.engine.num_running == 0)


def test_a_call_that_is_not_answered_is_named(setup):
    with frozen(setup.engine), pytest.raises(VllmError, match=r"does not answer: waited 0\.2 s to count"):
        asyncio.run(setup.engine.ask(setup.engine.llm.is_sleeping(), "to count", deadline=0.2))


@pytest.mark.parametrize("tied", [False, True])
def test_logits_in_fp32_bring_a_bf16_engine_nearer_to_the_trainer(tied, tmp_path):
    """The numbers of a head have a mean of 1/4 and those of a hidden state of about 1, so that a logit is about
    128 / 4 · 1 = 30, which bf16 has in steps of 1/8. Rounded, it is off by 1/32 on average, and a log-prob by about as
    much. The one layer has small weights, and adds little of its own. The head is that of the newest push."""
    tokenizer = small_tokenizer()
    shape = SMALL | {"num_hidden_layers": 1, "initializer_range": 0.02}
    config = Qwen2Config(**shape, eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval().bfloat16()
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
            weight.normal_(0.25, 0.1)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with contextlib.closing(start_engine(tmp_path, tokenizer, dtype="bfloat16")) as engine:
        setup = Setup(engine, model, tokenizer)
        for push in range(4):
            if push:
                setup.change_weights(seed=push)
                setup.push(setup.sync())
            asked = prompts(8)
            answers = generate_all(engine, asked, SamplingParams(max_tokens=40, ignore_eos=True, seed=push))
            own = [torch.tensor(answer.logprobs) for answer in answers]
            trainers = [
                torch.tensor(policy_logprobs(setup.policy, [*prompt, *answer.token_ids])[len(prompt) - 1 :])
                for prompt, answer in zip(asked, answers, strict=True)
            ]
            rounded = [rescored(model, prompt, answer) for prompt, answer in zip(asked, answers, strict=True)]
            gap = (torch.cat(own) - torch.cat(trainers)).abs().mean()
            of_rounding = (torch.cat(rounded) - torch.cat(trainers)).abs().mean()
            print(f"after {push} pushes {gap:.4f} from the trainer; by rounded logits it were {of_rounding:.4f}")
            assert of_rounding == pytest.approx(1 / 32, rel=0.4)
            assert gap < 0.25 * of_rounding


def test_weights_that_cannot_be_read_leave_an_error_and_no_process(setup, tmp_path):
    """vLLM's workers find that out, after all of their imports."""
    setup.model.save_pretrained(tmp_path)
    setup.tokenizer.save_pretrained(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 100)
    others = _descendants(os.getpid())
    with pytest.raises(VllmError, match=f"did not start with {tmp_path}"):
        VllmEngine(VllmSettings(model=str(tmp_path), max_model_len=CONTEXT, cpu_cache_gib=1), setup.tokenizer)
    assert wait_until(lambda: not {pid for pid in _descendants(os.getpid()) - others if _is_ours(pid)}, 30)


def test_an_engines_sockets_are_in_a_private_folder(setup):
    """vLLM itself leaves them where all temporary files are. Here they go with their engine, as `setup` asserts."""
    folder = Path(setup.engine._sockets)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert any(path.is_socket() for path in folder.iterdir())
    assert not {path for path in Path(tempfile.gettempdir()).iterdir() if path.is_socket()} - setup.others_sockets


def test_an_engine_that_is_killed_fails_every_call_in_one_sentence(setup):
    """The last test of this file: nobody can use this engine afterwards."""
    params = GREEDY.copy(max_tokens=None, ignore_eos=True)

    async def play() -> list[Any]:
        calls = [asyncio.create_task(setup.engine.generate(prompt, params)) for prompt in prompts(8)]
        while not setup.engine.num_running:
            await asyncio.sleep(0.01)
        for pid in living_children(os.getpid()):
            if _is_ours(pid):
                os.kill(pid, signal.SIGKILL)
        return await asyncio.gather(*calls, return_exceptions=True)

    assert {str(error) for error in asyncio.run(play())} == {"vLLM has died; what its processes said last is above"}
    with pytest.raises(VllmError, match="has died"):
        asyncio.run(setup.engine.pause())
