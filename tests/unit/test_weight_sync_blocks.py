"""Blocks of weights: everything comes out as it went in, in few blocks."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.weight_sync.blocks import AdapterSpec, checksum_of, pack

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)


def read(block):
    return dict(block.tensors())


def test_tensors_come_out_as_they_went_in_block_by_block():
    """100 bytes a block. a and b are 40 + 60; c would be one too many, d is larger than a block, e comes after it."""
    torch.manual_seed(0)
    sizes = {"a": (2, 5), "b": (15,), "c": (1,), "d": (7, 9), "e": (3,)}
    named = {name: torch.randn(shape) for name, shape in sizes.items()}
    blocks = list(pack(named.items(), max_bytes=100))
    assert [block.names for block in blocks] == [("a", "b"), ("c",), ("d",), ("e",)]
    found = {name: tensor for block in blocks for name, tensor in read(block).items()}
    assert list(found) == list(named)
    assert all(torch.equal(found[name], tensor) for name, tensor in named.items())


def test_a_block_has_one_dtype_so_that_every_part_can_be_viewed():
    """Three bf16 numbers are six bytes: an fp32 tensor behind them would begin in the middle of a number."""
    named = [("a", torch.ones(3, dtype=torch.bfloat16)), ("b", torch.arange(2.0)), ("c", torch.tensor(5.0))]
    blocks = list(pack(named, max_bytes=100))
    assert [(block.names, block.dtype) for block in blocks] == [(("a",), "bfloat16"), (("b", "c"), "float32")]
    assert read(blocks[1])["c"] == 5.0
    assert read(blocks[1])["c"].shape == ()


def test_a_tensor_may_change_as_soon_as_the_next_one_is_asked_for():
    """As the buffer of a gathered one does; non-contiguous ones are laid out as they read."""
    buffer = torch.zeros(2, 3)

    def gathered():
        for i in range(4):
            buffer.fill_(i)
            buffer[0, 1] = -1
            yield f"w{i}", buffer.T

    (block,) = pack(gathered(), max_bytes=1000)
    for i, tensor in enumerate(read(block).values()):
        assert tensor.tolist() == [[i, i], [-1, i], [i, i]]


def test_every_block_has_memory_of_its_own():
    """A reader may still have the last one: vLLM loads a layer when all of it is there, and keeps parts until then."""
    first, second = pack([("a", torch.zeros(25)), ("b", torch.ones(25))], max_bytes=100)
    second.payload.fill_(255)
    assert read(first)["a"].sum() == 0


@given(
    shapes=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.sampled_from(DTYPES)), max_size=8),
    max_bytes=st.integers(1, 200),
)
def test_any_tensors_arrive_as_they_were(shapes, max_bytes):
    named = [
        (str(i), torch.arange(rows * columns).view(rows, columns).to(dtype).t())  # not contiguous
        for i, (rows, columns, dtype) in enumerate(shapes)
    ]
    blocks = list(pack(named, max_bytes=max_bytes))
    arrived = [pair for block in blocks for pair in block.tensors()]
    assert [name for name, _ in arrived] == [name for name, _ in named]
    for (_, ours), (_, theirs) in zip(arrived, named, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    assert all(len(block.payload) == block.num_bytes for block in blocks)
    assert all(block.num_bytes <= max_bytes or len(block.names) == 1 for block in blocks)


def test_a_block_of_which_one_bit_changed_is_refused():
    (block,) = pack([("a", torch.arange(9.0)), ("b", torch.ones(2))], max_bytes=1000)
    block = dataclasses.replace(block, checksum=checksum_of(block.payload))
    assert read(block)["b"].tolist() == [1, 1]
    block.payload[17] ^= 4
    with pytest.raises(ValueError, match="weights a … b arrived damaged"):
        block.tensors()


def spec(*modules: str, **config: object) -> AdapterSpec:
    return AdapterSpec(config={"r": 4, "lora_alpha": 12} | config, modules=modules)


@pytest.mark.parametrize(
    ("config", "module", "scale"),
    [
        ({}, "a.q_proj", 3.0),
        ({"use_rslora": True}, "a.q_proj", 6.0),
        ({"rank_pattern": {"q_proj": 2}}, "a.q_proj", 6.0),
        ({"rank_pattern": {"q_proj": 2}}, "a.faq_proj", 3.0),
        ({"alpha_pattern": {"q_proj": 0.0}}, "a.q_proj", 0.0),
        ({"rank_pattern": {r"layers\.[01]\.v": 16}, "alpha_pattern": {"v": 4}}, "model.layers.1.v", 0.25),
        ({"rank_pattern": {r"layers\.[01]\.v": 16}, "alpha_pattern": {"v": 4}}, "model.layers.2.v", 1.0),
        ({"alpha_pattern": {"b.q": 1, "q": 2}}, "a.b.q", 0.25),
    ],
)
def test_an_adapters_modules_have_pefts_scales(config, module, scale):
    assert spec(module, **config).scaling(module) == scale


def test_an_adapter_tells_how_what_it_reached_differs_from_what_is_trained():
    wanted = spec("a", "b", "c")
    assert wanted.difference(["c", "a", "b"]) is None
    assert wanted.difference(["b"]) == "of the 3 modules that are trained it leaves a and 1 more unchanged"
    assert wanted.difference({"a", "b", "c", "d"}) == "it reaches d, and the adapter has nothing for it"
    assert wanted.difference({"a", "b", "d"}) == "of the 3 modules that are trained it leaves c unchanged"
