"""The quick scheduler gives blocks as vLLM's own does, whatever requests come, grow and go."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request, RequestStatus

from openrlhf.rollout.vllm.scheduling import quicken

BLOCK, LONGEST = 4, 40
PROMPTS = ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 4, 3, 2], [5])


def kv_manager(*, caching, blocks=24, spec=FullAttentionSpec, **others):
    init_none_hash(sha256)
    layers = spec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32, **others)
    groups = [KVCacheGroupSpec(["layer"], layers)]
    config = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    return KVCacheManager(
        config, max_model_len=LONGEST, scheduler_block_size=BLOCK, hash_block_size=BLOCK, enable_caching=caching
    )


class Play:
    """A scheduler as simple as can be. Tokens are known at once, or a step later, as in asynchronous scheduling."""

    def __init__(self, manager, *, late):
        self.manager, self.late, self.running, self.told = manager, late, {}, []

    def begin(self, name, prompt):
        hasher = get_request_block_hasher(BLOCK, sha256)
        params = SamplingParams(max_tokens=LONGEST)
        request = Request(name, list(prompt), params, None, block_hasher=hasher)
        found = self.manager.get_computed_blocks(request)
        computed, count = found[0], found[1]
        given_blocks = self.manager.allocate_slots(request, len(prompt) - count, count, computed)
        self._tell("begin", count, None if given_blocks is None else given_blocks.get_block_ids())
        if given_blocks is None:
            return
        request.status, request.num_computed_tokens = RequestStatus.RUNNING, len(prompt)
        self.running[name] = [request, []]
        self._sampled(name)

    def step(self, name, *, drafts):
        request, waiting = self.running[name]
        if request.num_tokens + len(waiting) >= LONGEST - drafts:
            return
        given_blocks = self.manager.allocate_slots(request, 1, num_lookahead_tokens=drafts)
        self._tell("step", name, None if given_blocks is None else given_blocks.get_block_ids(allow_none=True))
        if given_blocks is None:
            self.end(name)
            return
        request.num_computed_tokens += 1
        self._sampled(name)

    def _sampled(self, name):
        request, waiting = self.running[name]
        waiting.append(7 + request.num_computed_tokens % 3)
        while len(waiting) > self.late:
            request.append_output_token_ids(waiting.pop(0))
            self.manager.cache_blocks(request, request.num_computed_tokens - len(waiting))
            self._tell("cached")

    def end(self, name):
        request, _ = self.running.pop(name)
        self.manager.free(request)
        self._tell("end")

    def _tell(self, *what):
        self.told.append((what, self._state()))

    def _state(self):
        (own,) = self.manager.coordinator.single_type_managers
        held = {name: [block.block_id for block in blocks] for name, blocks in own.req_to_blocks.items() if blocks}
        free = [block.block_id for block in self.manager.block_pool.free_block_queue.get_all_free_blocks()]
        hashes = [block.block_hash for block in self.manager.block_pool.blocks]
        return held, dict(own.num_cached_block), free, hashes


@settings(max_examples=150)
@given(
    acts=st.lists(st.tuples(st.sampled_from("bbssssssssssse"), st.integers(0, 3), st.integers(0, 3)), max_size=120),
    caching=st.booleans(),
    late=st.integers(0, 2),
    drafts=st.sampled_from([0, 0, 3]),
)
def test_the_same_blocks_are_given_cached_and_freed(acts, caching, late, drafts):
    plain, quick = (Play(kv_manager(caching=caching), late=late) for _ in range(2))
    assert quicken(quick.manager)
    for number, (act, which, prompt) in enumerate(acts):
        for play in (plain, quick):
            if act == "b":
                play.begin(str(number), PROMPTS[prompt])
            elif play.running:
                name = sorted(play.running)[which % len(play.running)]
                play.end(name) if act == "e" else play.step(name, drafts=drafts)
    assert quick.told == plain.told


def test_a_token_inside_a_block_is_no_work_for_the_manager(monkeypatch):
    play = Play(kv_manager(caching=True), late=1)
    asked = []
    slots = play.manager.allocate_slots
    monkeypatch.setattr(play.manager, "allocate_slots", lambda *a, **o: asked.append(1) or slots(*a, **o))
    assert quicken(play.manager)
    play.begin("0", PROMPTS[0])
    for _ in range(16):
        play.step("0", drafts=0)
    # The prompt; then, for each four tokens, the one that needs a block and the one that has filled one.
    assert 1 + 4 <= len(asked) <= 1 + 8


def test_a_manager_of_windows_stays_as_it_is():
    manager = kv_manager(caching=True, spec=SlidingWindowSpec, sliding_window=8)
    assert not quicken(manager)
    assert "allocate_slots" not in vars(manager)
