"""vLLM's scheduler, without the work that it repeats for every request in every step though nothing changes.

A step gives each running request room for one token. Only one token in a block's 16 needs a new block, and is the last
of one whose hash makes it a cached prefix; for the others vLLM goes the same way through its managers, and finds that
there is nothing to do. With 512 sequences of 1.5B parameters on an H200 this took a quarter of the scheduler's time,
which is longer than the GPU's (bench/RESULTS.md, "The scheduler of vLLM").
"""

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request, RequestStatus

logger = logging.getLogger(__name__)

COORDINATORS = ("UnitaryKVCacheCoordinator", "KVCacheCoordinatorNoPrefixCache")
"""Those that do nothing beside what their one manager does."""


class QuickScheduler(Scheduler):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        quicken(self.kv_cache_manager)


class QuickAsyncScheduler(AsyncScheduler):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        quicken(self.kv_cache_manager)


def quicken(manager: KVCacheManager) -> bool:
    """Let it return at once where a request has room for its next tokens, and fills no block with them. False: it is of
    another kind (windows, several kinds of layers, devices that share a sequence), and stays as it is."""
    try:
        if not _is_plain(manager):
            return False
        (blocks_of,) = manager.coordinator.single_type_managers
        slots, cache, nothing = manager.allocate_slots, manager.cache_blocks, manager.empty_kv_cache_blocks
        size, longest, caches = blocks_of.block_size, manager.max_model_len, manager.enable_caching
        blocks, cached = blocks_of.req_to_blocks, blocks_of.num_cached_block
        partial = blocks_of._partial_hit_reqs
    except AttributeError as error:
        logger.debug("vLLM's scheduler stays as it is: %s", error)
        return False

    def quick_slots(
        request: Request, num_new_tokens: int, *others: Any, num_lookahead_tokens: int = 0, **options: Any
    ) -> Any:
        """`allocate_slots`. Of a running request a scheduler says no more than this."""
        name = request.request_id
        if (
            num_new_tokens > 0
            and request.status == RequestStatus.RUNNING
            and not (others or options)
            and name in blocks  # a dictionary that would make an entry
            and name not in partial
        ):
            end = min(request.num_computed_tokens, longest) + num_new_tokens
            full = min(end, request.num_tokens) // size if caches else 0
            if min(end + num_lookahead_tokens, longest) <= len(blocks[name]) * size and full <= cached.get(name, 0):
                return nothing
        return slots(request, num_new_tokens, *others, **options | {"num_lookahead_tokens": num_lookahead_tokens})

    def quick_cache(request: Request, num_computed_tokens: int) -> None:
        """`cache_blocks`."""
        if caches and num_computed_tokens // size > cached.get(request.request_id, 0):
            cache(request, num_computed_tokens)

    manager.allocate_slots, manager.cache_blocks = quick_slots, quick_cache  # type: ignore[method-assign]
    return True


def _is_plain(manager: KVCacheManager) -> bool:
    """Whether all layers attend to everything, on one device, and prefixes are cached by whole blocks."""
    coordinator = manager.coordinator
    managers = coordinator.single_type_managers
    return (
        type(coordinator).__name__ in COORDINATORS
        and len(managers) == 1
        and type(managers[0]) is FullAttentionManager
        and manager.block_pool.hash_block_size == managers[0].block_size
        and managers[0].dcp_world_size == managers[0].pcp_world_size == 1
        and not managers[0].use_eagle
        and not getattr(coordinator, "num_reprefillable_tokens", 0)
    )
