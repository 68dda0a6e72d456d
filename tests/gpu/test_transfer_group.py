"""The group that carries weights between devices, by NCCL: as far as one device goes, with the sender alone in it."""

import pytest
import torch

from openrlhf.weight_sync.transports import TransferGroup

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_a_block_is_sent_by_nccl():
    from concurrent.futures import Future

    group = TransferGroup.opened("127.0.0.1", 1, "nccl")
    block = torch.arange(2**20, device="cuda").view(torch.uint8)
    group.send(block, taking=Future())
    torch.cuda.synchronize()
    assert torch.equal(block.view(torch.int64), torch.arange(2**20, device="cuda"))
