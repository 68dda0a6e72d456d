"""Weights packed for a reader on the same device."""

import pickle

import pytest
import torch
from torch.storage import TypedStorage

from openrlhf.weight_sync.device_blocks import pack_on_device, plain_arguments, rebuild_arguments


def read(block):
    return dict(block.tensors())


def test_tensors_come_out_as_they_went_in_block_by_block():
    """100 bytes a block. a and b are 40 + 60; c would be one too many, d is larger than a block, e comes after it."""
    torch.manual_seed(0)
    sizes = {"a": (2, 5), "b": (15,), "c": (1,), "d": (7, 9), "e": (3,)}
    named = {name: torch.randn(shape) for name, shape in sizes.items()}
    blocks = list(pack_on_device(named.items(), max_bytes=100, device="cpu"))
    assert [block.names for block in blocks] == [("a", "b"), ("c",), ("d",), ("e",)]
    found = {name: tensor for block in blocks for name, tensor in read(block).items()}
    assert list(found) == list(named)
    assert all(torch.equal(found[name], tensor) for name, tensor in named.items())


def test_a_block_has_one_dtype_so_that_every_part_can_be_viewed():
    """Three bf16 numbers are six bytes: an fp32 tensor behind them would begin in the middle of a number."""
    named = [("a", torch.ones(3, dtype=torch.bfloat16)), ("b", torch.arange(2.0)), ("c", torch.tensor(5.0))]
    blocks = list(pack_on_device(named, max_bytes=100, device="cpu"))
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

    (block,) = pack_on_device(gathered(), max_bytes=1000, device="cpu")
    for i, tensor in enumerate(read(block).values()):
        assert tensor.tolist() == [[i, i], [-1, i], [i, i]]


def test_every_block_is_new_and_what_was_read_outlives_it():
    """vLLM loads a layer when all of it is there: parts of it are kept from one block to the next."""
    named = [("a", torch.zeros(25)), ("b", torch.ones(25))]
    first, second = pack_on_device(named, max_bytes=100, device="cpu")
    assert first.payload.data_ptr() != second.payload.data_ptr()
    found = read(first)["a"]
    first.payload.fill_(255)
    assert found.sum() == 0


def arguments(kind=torch.uint8):
    """Of `rebuild_cuda_tensor`, in its order."""
    sizes = (torch.Size([8]), (1,), 0)
    return (torch.Tensor, *sizes, TypedStorage, kind, 0, b"handle", 8, 0, False, b"counter", 3, b"event", True)


def test_a_handle_is_made_of_plain_values_and_becomes_what_it_was():
    """What a transport makes of tuples is lists; every class of the arguments is known to the reader."""
    plain = plain_arguments(arguments())
    assert {type(value) for value in plain} <= {type(None), list, int, bytes, bool}
    assert rebuild_arguments(pickle.loads(pickle.dumps(plain))) == arguments()


def test_a_handle_to_anything_but_bytes_is_refused():
    with pytest.raises(TypeError, match=r"not torch.float32"):
        plain_arguments(arguments(torch.float32))
