"""Run by test_models_exact.py, in a process whose Triton interprets kernels."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from openrlhf.models import exact, exact_triton


def main() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(70, 96), torch.randn(150, 96), torch.randn(150)
    for given in (None, bias):
        found = exact_triton.linear(x, weight, given, dtype=torch.float32)
        torch.testing.assert_close(found, F.linear(x, weight, given), atol=1e-4, rtol=0)
        torch.testing.assert_close(exact_triton.linear(x[33:34], weight, given, dtype=torch.float32), found[33:34])
    # Whole numbers add up to the same bits in any order, so that these are equal whatever library multiplies here.
    whole_x, whole_weight = torch.randint(-9, 10, (70, 96)).float(), torch.randint(-9, 10, (150, 96)).float()
    found = exact_triton.linear(whole_x, whole_weight, None, dtype=torch.float32)
    assert torch.equal(found, F.linear(whole_x, whole_weight))
    assert torch.equal(exact_triton.linear(whole_x[33:34], whole_weight, None, dtype=torch.float32), found[33:34])
    torch.testing.assert_close(exact_triton.rms_norm(x, weight[0], 1e-6), F.rms_norm(x, (96,), weight[0], 1e-6))
    torch.testing.assert_close(exact_triton.log_softmax(5 * x), (5 * x).log_softmax(-1))

    heads, key_heads, size = 4, 2, 24
    starts = torch.tensor([0, 5, 75, 76], dtype=torch.int32)
    q, k, v = (torch.randn(76, n, size) for n in (heads, key_heads, key_heads))
    places = exact.KeyPlaces(starts, starts.diff(), starts[:-1, None] + torch.arange(70, dtype=torch.int32), 70)
    whole = exact_triton.attend(q, k, v, places, scaling=0.2)
    torch.testing.assert_close(whole, exact._attend_by_rows(q, k, v, places, scaling=0.2), atol=1e-5, rtol=1e-5)

    # A decoding step of the middle sequence: its keys lie about, with something else between them.
    slots = torch.randperm(100)[:70].to(torch.int32)
    cache = torch.full((100, 2, key_heads, size), torch.nan)
    cache[slots.long(), 0], cache[slots.long(), 1] = k[5:75], v[5:75]
    step = exact.KeyPlaces(
        torch.tensor([0, 1], dtype=torch.int32), torch.tensor([70], dtype=torch.int32), slots[None], 1
    )
    found = exact_triton.attend(q[74:75], cache[:, 0], cache[:, 1], step, scaling=0.2)
    torch.testing.assert_close(found, whole[74:75], atol=1e-6, rtol=1e-6)


if __name__ == "__main__":
    main()
