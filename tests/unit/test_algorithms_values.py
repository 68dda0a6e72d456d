"""The critic's clipped loss, region by region."""

import pytest
import torch

from openrlhf.algorithms.values import value_loss


def test_value_loss_and_gradient_in_each_region():
    """ε = 1, v_old = 0, so v_clip = clamp(v, −1, 1); where v itself counts, d loss / d v = v − R.

     v    R    v_clip    (v_clip − R)²    (v − R)²    loss    d loss / d v
     0.5  2    0.5       2.25             2.25        1.125   −1.5     within the band
     3    4    1         9                1           4.5      0       moved far towards R already: held
     3    0    1         1                9           4.5      3       moved away from R: pulled back
    −3   −5   −1         16               4           8        0       the same, downwards
    −3    0   −1         1                9           4.5     −3
     3    1.9  1         0.81             1.21        0.605    1.1     past R: v is the worse, pulled back
    """
    values = torch.tensor([0.5, 3.0, 3.0, -3.0, -3.0, 3.0], requires_grad=True)
    returns = torch.tensor([2.0, 4.0, 0.0, -5.0, 0.0, 1.9])
    result = value_loss(values, torch.zeros(6), returns, value_clip=1.0)
    assert result.loss_A.tolist() == pytest.approx([1.125, 4.5, 4.5, 8, 4.5, 0.605], rel=1e-6)
    assert result.clipped_A.tolist() == [False, True, False, True, False, False]
    result.loss_A.sum().backward()
    assert values.grad.tolist() == pytest.approx([-1.5, 0, 3, 0, -3, 1.1], rel=1e-6)


def test_the_band_lies_around_the_old_value():
    """v_old = 10, ε = 0.5, v = 11, R = 12: v_clip = 10.5, loss ½ · 1.5² = 1.125, held."""
    values = torch.tensor([11.0], requires_grad=True)
    result = value_loss(values, torch.tensor([10.0]), torch.tensor([12.0]), value_clip=0.5)
    result.loss_A.sum().backward()
    assert (result.loss_A.tolist(), values.grad.tolist()) == ([1.125], [0])
