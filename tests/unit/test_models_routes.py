"""Routes of experts: which models have them, and their replay."""

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    GptOssConfig,
    GraniteMoeHybridConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2Config,
    Qwen3MoeConfig,
    Qwen3VLMoeConfig,
)

from openrlhf.models.routes import route_shape


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Qwen3MoeConfig(num_hidden_layers=3, num_experts=16, num_experts_per_tok=4), (3, 16, 4)),
        (MixtralConfig(num_hidden_layers=2), (2, 8, 2)),
        (OlmoeConfig(num_hidden_layers=5), (5, 64, 8)),
        (GptOssConfig(num_hidden_layers=4, num_local_experts=32), (4, 32, 4)),
        (DeepseekV3Config(num_hidden_layers=3), (3, 256, 8)),
        (Qwen3VLMoeConfig(text_config={"num_hidden_layers": 6}), (6, 60, 4)),
        (GraniteMoeHybridConfig(num_local_experts=0), None),
        (Qwen2Config(), None),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_the_shape_of_routes_is_in_the_configuration(config, expected):
    assert route_shape(config) == expected


def test_numbers_of_experts_are_as_small_as_they_can_be():
    few, many = (route_shape(Qwen3MoeConfig(num_experts=experts)) for experts in (256, 257))
    assert (few.dtype, many.dtype) == (torch.uint8, torch.int16)
