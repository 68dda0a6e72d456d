"""The tensors of an adapter in a worker: what is wrong with them, and what is added to a weight. No vLLM is needed."""

import pytest
import torch

from openrlhf.rollout.vllm.worker import CollectedAdapter
from openrlhf.weight_sync.blocks import AdapterSpec

SHAPES = {"x.q.weight": (6, 5), "x.o.weight": (5, 6), "x.norm.weight": (5,)}
SPEC = AdapterSpec(config={"r": 2, "lora_alpha": 3, "alpha_pattern": {"o": 8}}, modules=("x.q", "x.o"))


def factors(module: str = "x.q", *, rank: int = 2, inputs: int = 5, outputs: int = 6) -> dict[str, torch.Tensor]:
    torch.manual_seed(rank)
    return {
        f"{module}.lora_A.weight": torch.randn(rank, inputs),
        f"{module}.lora_B.weight": torch.randn(outputs, rank),
    }


OTHER = factors("x.o", inputs=6, outputs=5)


def collected(tensors: dict[str, torch.Tensor], spec: AdapterSpec = SPEC) -> CollectedAdapter:
    adapter = CollectedAdapter(spec)
    for name, tensor in tensors.items():
        adapter.add([(name, tensor)])
    return adapter


def test_b_is_scaled_once_and_what_was_sent_stays_as_it_is():
    sent = factors() | OTHER
    before = {name: tensor.clone() for name, tensor in sent.items()}
    adapter = collected(sent)
    assert adapter.problem(SHAPES, max_rank=8) is None
    for _ in range(2):
        found = adapter.factors()
        assert list(found) == ["x.q", "x.o"]
        for module, scale in (("x.q", 1.5), ("x.o", 4.0)):
            a, b = found[module]
            assert torch.equal(a, before[f"{module}.lora_A.weight"])
            assert torch.equal(b, before[f"{module}.lora_B.weight"] * scale)
    assert all(torch.equal(sent[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        (OTHER, "of the 2 modules that are trained it leaves x.q unchanged"),
        (OTHER | factors() | factors("x.v"), "it reaches x.v, and the adapter has nothing for it"),
        (OTHER | factors(inputs=4), "lora_B [6, 2] times lora_A [2, 4] of x.q cannot be added to its weight [6, 5]"),
        (OTHER | factors(outputs=7), "cannot be added to its weight [6, 5]"),
        (OTHER | factors() | {"x.q.lora_B.weight": torch.ones(6, 3)}, "cannot be added to its weight [6, 5]"),
        (OTHER | factors() | {"x.q.lora_A.weight": torch.ones(10)}, "cannot be added to its weight [6, 5]"),
        (OTHER | factors(rank=9), "x.q has rank 9, and the engine has room for 8"),
        (OTHER | {"x.q.lora_A.weight": torch.ones(2, 5)}, "of x.q only lora_A has come"),
        (OTHER | {"x.q.lora_B.weight": torch.ones(6, 2)}, "of x.q only lora_B has come"),
        (OTHER | factors() | {"x.q.lora_B.bias": torch.ones(6)}, "x.q.lora_B.bias is not one of the two matrices"),
        (OTHER | factors() | {"x.q.weight": torch.ones(6, 5)}, "x.q.weight is not one of the two matrices"),
    ],
)
def test_what_does_not_fit_is_named(tensors, problem):
    assert problem in (collected(tensors).problem(SHAPES, max_rank=8) or "")


def test_a_module_that_the_model_does_not_have_is_named():
    spec = AdapterSpec(config=SPEC.config, modules=("y.q",))
    assert collected(factors("y.q"), spec).problem(SHAPES, max_rank=8) == "the model has no weight y.q.weight"
