"""The head's kernels give what the plain formula gives, forward and backward."""

import pytest
import torch

from openrlhf.models.logprobs import chunked_logprobs

pytestmark = pytest.mark.gpu


def plain(hidden, weight, targets, temperature):
    logp = torch.log_softmax(hidden.double() @ weight.double().t() / temperature, dim=-1)
    return logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-4), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("tile", [None, (7, 100), (64, 5003)])
def test_values_and_gradients(dtype, tolerance, with_entropy, tile):
    torch.backends.cuda.matmul.allow_tf32 = False
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(37, 64, generator=generator).to("cuda", dtype).requires_grad_()
    weight = (torch.randn(5003, 64, generator=generator) * 0.3).to("cuda", dtype).requires_grad_()
    targets = torch.randint(5003, (37,), generator=generator).cuda()
    g, k = torch.randn(2, 37, generator=generator).cuda()

    def gradients(logprobs, entropy):
        loss = (g * logprobs).sum() + ((k * entropy).sum() if with_entropy else 0.0)
        return torch.autograd.grad(loss, (hidden, weight))

    ours = chunked_logprobs(hidden, weight, targets, temperature=0.7, with_entropy=with_entropy, tile=tile)
    theirs = plain(hidden, weight, targets, 0.7)
    assert torch.allclose(ours.logprobs_A.double(), theirs[0], atol=1e-3)
    if with_entropy:
        assert torch.allclose(ours.entropy_A.double(), theirs[1], atol=1e-3)
    for got, expected in zip(gradients(*ours), gradients(*theirs), strict=True):
        error = (got.double() - expected.double()).norm() / expected.double().norm()
        assert float(error) < tolerance
