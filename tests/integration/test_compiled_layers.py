"""--ds.deepcompile: adapters, experts and checkpointing, compilers that fail, an RL run, and ranks of DeepSpeed."""

import json
from pathlib import Path

import pytest
import torch
from compiling import PIECES, SMALL, as_it_is, assert_alike, compiled_pair, compiling_with, make_model, streams
from preloaded import run_ranks
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from openrlhf.config.backend import LoraSection
from openrlhf.models.adapters import add_adapter
from openrlhf.models.attention import ATTENTION
from openrlhf.models.body import RouterLog

SUPPORT = Path(__file__).resolve().parents[1] / "support"


@pytest.mark.parametrize("reentrant", [False, True])
def test_so_it_is_with_an_adapter_and_gradient_checkpointing(reentrant):
    with compiling_with(as_it_is) as compiling:
        model = make_model()
        add_adapter(model, LoraSection(rank=2), dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        plain, compiled = compiled_pair(model)
        first, *rest = streams(6)
        assert_alike(plain, compiled, first)
        made = compiling.pieces
        for tokens in rest:
            assert_alike(plain, compiled, tokens)
        # Two more than without: checkpointing runs a layer's beginning where its input wants no gradient.
        assert made == compiling.pieces <= 2 * PIECES + 4


def test_routers_are_logged_from_compiled_layers():
    with compiling_with(as_it_is) as compiling:
        torch.manual_seed(0)
        config = Qwen3MoeConfig(
            **SMALL, num_hidden_layers=2, head_dim=4, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2
        )
        plain, compiled = compiled_pair(Qwen3MoeForCausalLM._from_config(config, attn_implementation=ATTENTION))
        made = []
        for tokens in streams(6):
            logs = []
            for policy in (plain, compiled):
                logs.append(RouterLog())
                policy(tokens, temperature=1.0, router_log=logs[-1])
            for expected, found in zip(logs[0].logits, logs[1].logits, strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
            made.append(compiling.pieces)
        assert len(logs[0].logits) == 2
        assert made[-1] == made[2]


def fails_from(number):
    """A compiler that cannot do its so manieth piece, nor any later one."""
    calls = []

    def run(graph, inputs):
        calls.append(graph)
        if len(calls) >= number:
            raise RuntimeError("no C++ compiler\nand more lines")
        return graph.forward

    return run


def fails_in_the_backward_pass(graph, inputs):
    from torch._dynamo.backends.common import aot_autograd

    def backward(graph, inputs):
        raise RuntimeError("no C++ compiler")

    return aot_autograd(fw_compiler=lambda graph, _: graph.forward, bw_compiler=backward)(graph, inputs)


@pytest.mark.parametrize(
    "inductor",
    [fails_from(1), fails_from(6), fails_in_the_backward_pass],
    ids=["at once", "later", "in the backward pass"],
)
def test_a_run_whose_compilation_fails_goes_on_without_and_says_so_once(inductor, caplog):
    """With checkpointing, which runs a layer again in the backward pass and compares."""
    with compiling_with(inductor):
        model = make_model()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        plain, compiled = compiled_pair(model)
        for tokens in streams(4):
            assert_alike(plain, compiled, tokens)
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith("--ds.deepcompile: compilation failed, and the run goes on without it")
    assert said.endswith("RuntimeError: no C++ compiler")


FLAGS = {
    "ds__deepcompile": True,
    "algo__advantage__estimator": "gae",
    "algo__kl__init_coef": 0.1,
    "rollout__batch_size": 2,
    "rollout__n_samples_per_prompt": 2,
    "train__batch_size": 4,
    "train__max_epochs": 2,
}
"""Policy, reference and critic, each scored; policy and critic trained twice on every round."""


def test_a_run_compiles_as_much_in_one_round_as_in_many(cli):
    made = []
    for rounds in (1, 4):
        with compiling_with(as_it_is) as compiling:
            ran = cli(
                **FLAGS, data__max_samples=2 * rounds, ckpt__output_dir=f"out{rounds}", logger__run_dir=f"run{rounds}"
            )
            assert ran.rc == 0, ran.err
            made.append(compiling.pieces)
    assert made[0] == made[1] <= 4 * PIECES


WAYS = ["zero 2", "zero 3", "zero 3, checkpointing", "zero 3, lora", "zero 2 fails", "zero 3 fails", "tensor parallel"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(
        2,
        [str(SUPPORT / "compiled_ranks.py"), str(folder / "out.json")],
        cwd=folder,
        said=folder / "said.txt",
        environment={},
    )
    return json.loads((folder / "out.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_ranks_train_as_they_do_without(ranks, way):
    """Also where one of them cannot compile. Where they compute layers together, norms alone are compiled."""
    ran, together = ranks[way], "zero 3" in way or "tensor" in way
    assert ran["gap"] < 1e-5
    for rank, own in enumerate(ran["ranks"]):
        first, *rest = own["made"]
        assert first <= (4 if together else 2 * PIECES)
        assert sum(rest) == 0
        assert [text.partition(":")[0] for text in own["said"]] == ["--ds.deepcompile"] * ("fails" in way and rank == 1)
