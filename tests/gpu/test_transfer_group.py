"""The group that carries weights between devices, by NCCL: as far as one device goes, with the sender alone in it."""

import pytest
import torch

from openrlhf.weight_sync.groups import TransferGroup

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_a_block_is_sent_by_nccl():
    from concurrent.futures import Future

    invited: Future[None] = Future()
    invited.set_result(None)
    group = TransferGroup.opened("127.0.0.1", size=1, transport="nccl", invite=lambda meeting: invited)
    block = torch.arange(2**20, device="cuda").view(torch.uint8)
    group.send(block, taking=Future())
    torch.cuda.synchronize()
    assert torch.equal(block.view(torch.int64), torch.arange(2**20, device="cuda"))
