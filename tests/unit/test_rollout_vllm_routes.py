"""Routes by slot and by request: blocks of 2 tokens, one layer of the worker, and the number of an expert says whose
token it is, and when it was read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from openrlhf.rollout.vllm.routes import Message, RouteStore, StepPart, merged


def store(*, num_experts: int = 100, keep: int = 8) -> RouteStore:
    return RouteStore(num_blocks=8, block_size=2, layers=[1], top_k=2, num_experts=num_experts, keep=keep)


def part(name: str, start: int, num_tokens: int, blocks: Sequence[int], *, resumed: bool = False) -> StepPart:
    return StepPart(name, start, num_tokens, np.array(blocks, np.int32), resumed)


def rows(*experts: int) -> np.ndarray:
    """Of one token each: an expert, and the next."""
    return np.array([[[expert, expert + 1]] for expert in experts], np.int16)


def experts(message: Message | None) -> list[int]:
    assert message is not None
    routes = merged([message], num_layers=2, routed=[1])
    assert routes is not None
    assert not routes[:, 0].any()
    assert (routes[:, 1, 1] == routes[:, 1, 0] + 1).all()
    return routes[:, 1, 0].tolist()


def test_prompts_and_what_follows_them_are_put_together_step_by_step():
    kept = store()
    kept.add_step([part("a", 0, 3, [5, 2]), part("b", 0, 1, [7])], rows(10, 11, 12, 20))
    kept.add_step([part("b", 1, 1, [7]), part("a", 3, 1, [5, 2])], rows(21, 13))
    kept.add_step([part("a", 4, 1, [5, 2, 3])], rows(14))
    assert experts(kept.take("a", 5)) == [10, 11, 12, 13, 14]
    assert experts(kept.take("b", 1)) == [20]  # one step was run ahead of its end
    assert kept.take("a", 5) is None  # it has been taken


def test_tokens_in_the_cache_have_the_routes_of_whoever_read_them():
    """Also within the same step, whichever of the two comes first."""
    kept = store()
    kept.add_step([part("hit", 2, 2, [5, 6]), part("a", 0, 3, [5, 2])], rows(30, 31, 10, 11, 12))
    assert experts(kept.take("hit", 4)) == [10, 11, 30, 31]
    kept.end(["a"])
    kept.add_step([part("later", 2, 1, [5, 2])], rows(40))
    assert experts(kept.take("later", 3)) == [10, 11, 40]
    assert experts(kept.take("a", 3)) == [10, 11, 12]


def test_what_is_read_again_has_the_routes_of_the_last_time():
    """The weights have changed: one request reads all again, the other finds its beginning in the cache."""
    kept = store()
    kept.add_step([part("a", 0, 3, [1, 2]), part("b", 0, 3, [3, 4])], rows(10, 11, 12, 20, 21, 22))
    kept.add_step([part("b", 0, 4, [6, 7], resumed=True)], rows(50, 51, 52, 53))
    kept.add_step([part("a", 2, 2, [6, 5], resumed=True)], rows(62, 63))
    assert experts(kept.take("a", 4)) == [50, 51, 62, 63]
    assert experts(kept.take("b", 4)) == [50, 51, 52, 53]


def test_a_request_that_goes_on_where_it_was_is_new_all_the_same():
    """It had read one block, which now is another's that begins alike and was read with other weights."""
    kept = store()
    kept.add_step([part("a", 0, 2, [1])], rows(10, 11))
    kept.add_step([part("other", 0, 2, [3])], rows(50, 51))
    kept.add_step([part("a", 2, 1, [3, 4], resumed=True)], rows(52))
    assert experts(kept.take("a", 3)) == [50, 51, 52]


def test_blocks_that_others_get_do_not_change_what_a_request_has_read():
    kept = store()
    kept.add_step([part("a", 0, 3, [1, 2])], rows(10, 11, 12))
    kept.end(["a"])
    kept.add_step([part("b", 0, 3, [2, 1])], rows(20, 21, 22))
    assert experts(kept.take("a", 3)) == [10, 11, 12]


def test_blocks_that_vllm_copies_take_their_routes_along():
    kept = store()
    kept.add_step([part("a", 0, 2, [1])], rows(10, 11))
    kept.copy_blocks([(1, 4)])
    kept.add_step([part("b", 1, 2, [4, 5])], rows(20, 21))
    assert experts(kept.take("b", 3)) == [10, 20, 21]
    assert experts(kept.take("a", 2)) == [10, 11]


def test_only_so_many_that_nobody_took_are_kept():
    kept = store(keep=2)
    for name in "abcd":
        kept.add_step([part(name, 0, 1, [1])], rows(ord(name)))
    kept.end("abc")
    assert kept.take("a", 1) is None
    assert [experts(kept.take(name, 1)) for name in "bcd"] == [[98], [99], [100]]


def test_more_than_was_read_is_not_told():
    kept = store()
    kept.add_step([part("a", 0, 2, [1])], rows(10, 11))
    assert kept.take("a", 3) is None
    assert kept.take("nobody", 1) is None


@pytest.mark.parametrize(("num_experts", "dtype"), [(256, "uint8"), (257, "int16")])
def test_numbers_of_experts_have_one_byte_where_they_fit(num_experts, dtype):
    kept = store(num_experts=num_experts)
    kept.add_step([part("a", 0, 1, [1])], rows(num_experts - 2))
    message = kept.take("a", 1)
    assert message is not None
    assert message[2] == dtype
    assert experts(message) == [num_experts - 2]


def test_a_long_request_grows():
    kept = RouteStore(num_blocks=200, block_size=2, layers=[1], top_k=2, num_experts=256, keep=1)
    for at in range(150):
        kept.add_step([part("a", at, 1, range(200))], rows(at))
    assert experts(kept.take("a", 150)) == list(range(150))


def test_stages_of_a_pipeline_are_merged_and_all_of_them_are_needed():
    first = ([0, 1], [2, 2, 1], "uint8", bytes([1, 2, 3, 4]))
    second = ([3], [2, 1, 1], "uint8", bytes([5, 6]))
    whole = merged([first, None, second, None], num_layers=4, routed=[0, 1, 3])
    assert whole is not None
    assert whole[..., 0].tolist() == [[1, 2, 0, 5], [3, 4, 0, 6]]
    assert merged([first, None, None, None], num_layers=4, routed=[0, 1, 3]) is None
    assert merged([None, None], num_layers=4, routed=[0, 1, 3]) is None
