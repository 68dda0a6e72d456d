"""Several vLLM processes as one engine: its contract, who gets which request, and what happens when they differ."""

from __future__ import annotations

import asyncio
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from engine_contract import EngineContract, Subject
from processes import living_children, wait_until
from small_tokenizers import tokenizer as small_tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

from openrlhf.backends.base import ModuleWeights
from openrlhf.models.policy import Policy
from openrlhf.rollout.base import EngineError
from openrlhf.rollout.vllm import start_engine
from openrlhf.rollout.vllm.engine import VllmError
from openrlhf.rollout.vllm.processes import VllmProcesses
from openrlhf.rollout.vllm.settings import VllmSettings
from openrlhf.types import SamplingParams
from openrlhf.weight_sync.base import PolicyWeights
from openrlhf.weight_sync.blocks import WeightBlock, WeightSyncError
from openrlhf.weight_sync.transports import DeviceHandles, HandlesOfReaders

pytestmark = pytest.mark.slow

SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "bos_token_id": None,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two processes, and the model that they begin with."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    tokenizer, folder = small_tokenizer(), tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen2Config(**SHAPE, vocab_size=360, max_position_embeddings=512, eos_token_id=tokenizer.eos_token_id)
    model = Qwen2ForCausalLM(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = VllmSettings(
        model=str(folder), dtype="float32", max_model_len=256, max_num_seqs=64, cpu_cache_gib=1, engines=2,
        has_experts=False,
    )  # fmt: skip
    before = set(living_children(os.getpid()))
    engine = start_engine(settings, tokenizer, processes=2)
    started = set(living_children(os.getpid())) - before
    yield SimpleNamespace(engine=engine, model=model)
    engine.close()
    engine.close()
    assert wait_until(lambda: not _engine_processes() & started, 30)
    torch.set_num_threads(threads)


def _engine_processes() -> set[int]:
    """Children of this process that are vLLM's."""
    found = set()
    for pid in living_children(os.getpid()):
        try:
            with open(f"/proc/{pid}/cmdline") as file:
                if "EngineCore" in file.read():
                    found.add(pid)
        except OSError:
            continue
    return found


def weights_of(model):
    policy = Policy(model)
    return [(name, weight.clone()) for name, weight in PolicyWeights(policy, ModuleWeights(policy))]


class TestContract(EngineContract):
    @pytest.fixture
    def subject(self, made):
        subject = Subject(made.engine, weights_of(made.model), [5, 6, 7, 8, 9], max_tokens=200, quiet=0.3)
        asyncio.run(subject.push(subject.weights))
        return subject


def test_the_samples_of_a_prompt_share_a_process_and_prompts_are_shared_out(made, monkeypatch):
    asked: list[tuple[int, tuple[int, ...]]] = []
    for number, engine in enumerate(made.engine.engines):
        generate = engine.generate

        def noted(token_ids, *others, number=number, generate=generate):
            asked.append((number, tuple(token_ids)))
            return generate(token_ids, *others)

        monkeypatch.setattr(engine, "generate", noted)

    async def a_round():
        params = SamplingParams(max_tokens=4, temperature=1.0, ignore_eos=True)
        prompts = [[10 + n, 20, 30] for n in range(6)]
        return await asyncio.gather(*(made.engine.generate(p, params) for p in prompts for _ in range(4)))

    answers = asyncio.run(a_round())
    assert [len(answer.token_ids) for answer in answers] == [4] * 24
    homes = {prompt: {number for number, other in asked if other == prompt} for _, prompt in asked}
    assert all(len(home) == 1 for home in homes.values())
    counts = [sum(number == one for number, _ in asked) for one in (0, 1)]
    assert min(counts) >= 8
    assert made.engine.num_running == 0


def test_a_process_with_other_weights_is_found(made):
    subject = Subject(made.engine, weights_of(made.model), [5, 6, 7])
    asyncio.run(subject.push(subject.weights))
    first, second = made.engine.engines
    other = Subject(second, subject.weights, [5, 6, 7])

    async def alone(weights):
        await second.pause()
        for block in other.blocks(weights):
            await second.load_weights([block])
        await second.resume(first.version)

    asyncio.run(alone(other.other_weights))
    with pytest.raises(WeightSyncError, match=r"process 2 of an engine gives other log-probs than its first"):
        asyncio.run(made.engine.logprobs([5, 6, 7, 8]))
    asyncio.run(alone(other.weights))
    assert len(asyncio.run(made.engine.logprobs([5, 6, 7, 8]))) == 3


def test_each_process_reads_memory_of_the_device_with_a_handle_of_its_own(made):
    readers = (DeviceHandles({"a GPU": [1]}), DeviceHandles({"a GPU": [2]}))
    shared = WeightBlock(("w",), ((2,),), "float32", HandlesOfReaders(readers), None)
    plain = WeightBlock(("w",), ((2,),), "float32", b"12345678", None)
    for engine, handles in zip(made.engine.engines, readers, strict=True):
        own = made.engine._own([shared, plain], engine)
        assert own[0].payload is handles
        assert own[1] is plain


def test_a_process_that_does_not_start_ends_the_others():
    closed: list[int] = []

    def start():
        if closed or len(began) == 1:
            raise VllmError("no memory")
        began.append(1)
        return SimpleNamespace(close=lambda: closed.append(1))

    began: list[int] = []
    with pytest.raises(VllmError, match="no memory"):
        VllmProcesses.started(start, count=2)
    assert closed == [1]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"vllm__tensor_parallel_size": 2}, "--vllm.processes_per_engine 2 with --vllm.tensor_parallel_size 2"),
        (
            {"vllm__sync_backend": "gloo", "train__launcher": "ray"},
            "weights reach engines through a process group",
        ),
    ],
)
def test_what_several_processes_cannot_have_is_refused(cli, flags, said):
    ran = cli(**{"vllm__num_engines": 1, "vllm__processes_per_engine": 2, "train__launcher": "local"} | flags)
    assert ran.rc == 2
    assert said in ran.errors[0]


def test_a_process_that_dies_ends_what_is_asked_of_the_engine(made):
    """The last test: the engine is gone afterwards."""
    before = _engine_processes()
    os.kill(max(before), signal.SIGKILL)
    assert wait_until(lambda: _raises(made.engine), 60)
    with pytest.raises(EngineError, match="vLLM has died"):
        asyncio.run(made.engine.check_health())


def _raises(engine) -> bool:
    try:
        asyncio.run(engine.check_health())
    except EngineError:
        return True
    return False
