"""Ranks that share a stream compute what one rank computes of the whole: log-probs, values, and every gradient."""

import copy

import pytest
import torch
import transformers as hf
from test_models_policy import EXPERTS, SMALL, make_policy, make_sequences
from test_models_prefixes import make_stream
from torch import nn

from openrlhf.config.fields import ConfigError
from openrlhf.models.body import RouterLog
from openrlhf.models.context import Context, Share, share_streams
from openrlhf.models.exchange import play
from openrlhf.models.policy import Policy
from openrlhf.models.value import ScalarHead, ValueModel
from openrlhf.types import PackedTokens

HEADS = {**SMALL, "num_attention_heads": 8, "num_key_value_heads": 2}
MODELS = {
    "grouped heads": lambda: hf.Qwen2Config(**HEADS),
    "window": lambda: hf.MistralConfig(**HEADS, sliding_window=3),
    "some windows": lambda: hf.Gemma3TextConfig(
        **HEADS, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    ),
    "experts": lambda: hf.Qwen3MoeConfig(**HEADS, **EXPERTS, num_experts=4),
}
STREAMS = {
    "one length": lambda: PackedTokens.from_sequences(*make_sequences([8])),
    "short ones": lambda: PackedTokens.from_sequences(*make_sequences([2, 3, 2])),
    "many lengths": lambda: PackedTokens.from_sequences(*make_sequences([7, 2, 13, 5, 7, 30], seed=1)),
    "shared prompts": lambda: make_stream([(6, [2, 9, 4, 4]), (3, [5]), (11, [1, 1, 8])]),
}


def loss_of(output, tokens):
    """Every column counts, with weights that tell tokens apart, and one sequence-level term: a product over tokens."""
    weights_A = torch.linspace(0.5, 1.5, tokens.num_actions)
    sums_N = output.logprobs_A.new_zeros(tokens.num_sequences).index_add(
        0, tokens.action_sequences(), output.logprobs_A
    )
    loss = (weights_A * output.logprobs_A).mean() + (0.1 * sums_N).exp().mean()
    return loss if output.entropy_A is None else loss + (weights_A**2 * output.entropy_A).mean()


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def added(several: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: sum(one[name] for one in several) for name in several[0]}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def trained(policy: Policy, tokens: PackedTokens, *, context: Context | None = None, routers: bool = False):
    """Columns, router logits and gradients of one step on a copy of the policy."""
    own = copy.deepcopy(policy)
    share_streams(own, context)
    log = RouterLog() if routers else None
    output = own(tokens, temperature=0.7, with_entropy=True, router_log=log)
    loss = loss_of(output, tokens)
    if log is not None:
        loss = loss + sum((torch.linspace(1, 2, x.numel()).view_as(x) * x.softmax(-1)).mean() for x in log.logits)
    loss.backward()
    columns = [output.logprobs_A, output.entropy_A, *(log.logits if log else ())]
    return [column.detach() for column in columns], gradients(own)


def assert_shared_is_whole(policy, tokens, ranks, **options):
    routers = options.pop("routers", False)
    whole_columns, whole_gradients = trained(policy, tokens, routers=routers)
    parts = play(
        ranks, lambda exchange: trained(policy, tokens, context=Context(exchange=exchange, **options), routers=routers)
    )
    for columns, _ in parts:
        for found, expected in zip(columns, whole_columns, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert_same(added([part for _, part in parts]), whole_gradients)


@pytest.fixture(scope="module", params=MODELS)
def policy(request):
    return make_policy(MODELS[request.param]())


@pytest.mark.parametrize(
    ("stream", "ranks"), [*((stream, 2) for stream in STREAMS), ("many lengths", 4), ("shared prompts", 8)]
)
def test_shared_by_heads(policy, stream, ranks):
    """Also more ranks than key/value heads, and than tokens."""
    routers = "Moe" in type(policy.model).__name__
    assert_shared_is_whole(policy, STREAMS[stream](), ranks, routers=routers)


@pytest.mark.parametrize(
    ("stream", "ranks", "head_stride"),
    [*((stream, 3, 1) for stream in STREAMS), ("many lengths", 2, 2), ("shared prompts", 5, 1)],
)
def test_shared_by_ring(policy, stream, ranks, head_stride):
    """Three and five do not divide eight heads, and two are told to."""
    routers = "Moe" in type(policy.model).__name__
    assert_shared_is_whole(
        policy, STREAMS[stream](), ranks, routers=routers, head_stride=head_stride, always_ring=ranks == 2
    )


def test_gradients_go_through_checkpointed_layers(policy):
    checkpointed = copy.deepcopy(policy).train()
    checkpointed.model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_shared_is_whole(checkpointed, STREAMS["shared prompts"](), 2)
    assert_shared_is_whole(checkpointed, STREAMS["shared prompts"](), 3)


def test_a_value_model_is_shared():
    torch.manual_seed(0)
    policy = make_policy(MODELS["grouped heads"]())
    model = ValueModel(policy.model.model, ScalarHead(SMALL["hidden_size"]))
    tokens = STREAMS["shared prompts"]()

    def values(exchange=None):
        own = copy.deepcopy(model)
        share_streams(own, None if exchange is None else Context(exchange=exchange))
        values_A = own(tokens, positions=tokens.action_positions - 1)
        values_A.square().sum().backward()
        return values_A.detach(), gradients(own)

    expected, whole = values()
    parts = play(4, values)
    for found, _ in parts:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert_same(added([part for _, part in parts]), whole)


def test_a_rank_without_actions_takes_part():
    """Of five tokens the last is the only action: the rank of its predecessor computes the head, the other nothing."""
    policy = make_policy(MODELS["grouped heads"]())
    tokens = PackedTokens.from_sequences([torch.arange(3, 8)], [torch.arange(5) == 4])
    assert_shared_is_whole(policy, tokens, 2)


def test_each_rank_has_its_stripe():
    tokens = PackedTokens.from_sequences(*make_sequences([3, 4]))
    stripes = play(2, lambda exchange: Context(exchange=exchange).stripe(tokens))
    assert stripes[0].token_ids.tolist() == tokens.token_ids[[0, 2, 4, 6]].tolist()
    assert stripes[0].position_ids.tolist() == [0, 2, 1, 3]
    assert stripes[1].token_ids.tolist() == tokens.token_ids[[1, 3, 5, 6]].tolist()  # the last is padding


def test_columns_come_back_in_the_order_of_their_positions():
    positions = torch.tensor([5, 0, 3, 3, 2])  # a shared prefix's last token predicts several tokens

    def column(exchange):
        share = Context(exchange=exchange).share(positions)
        assert (positions[positions % 3 == exchange.rank] // 3).tolist() == share.rows_p.tolist()
        return share.whole(share.own(torch.arange(5) * 10))

    assert [found.tolist() for found in play(3, column)] == [[0, 10, 20, 30, 40]] * 3


def test_without_other_ranks_nothing_is_cut():
    column = torch.arange(3)
    assert Share().own(column) is column
    assert Share().whole(column) is column


def test_a_model_that_cannot_be_packed_is_refused():
    policy = make_policy(hf.BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4))
    with pytest.raises(ConfigError, match=r"--ds.ring_attn_size 2: BloomForCausalLM cannot be computed as a packed"):
        play(2, lambda exchange: share_streams(policy, Context(exchange=exchange)))


def test_a_stride_that_does_not_divide_the_key_value_heads_is_refused_before_the_first_forward():
    policy = make_policy(hf.Qwen3Config(**{**SMALL, "num_attention_heads": 6, "num_key_value_heads": 3}))
    with pytest.raises(ConfigError, match=r"--ds.ring_attn_head_stride 2: .* the model has 3; take one of 1, 3"):
        play(4, lambda exchange: share_streams(policy, Context(exchange=exchange, head_stride=2)))
    play(4, lambda exchange: share_streams(policy, Context(exchange=exchange, head_stride=3)))


def test_a_stride_is_said_to_have_no_effect_where_heads_are_shared_out(caplog):
    """Six heads on two ranks; but if two more share the layers, each has three, which go around a ring."""
    policy = make_policy(hf.Qwen3Config(**{**SMALL, "num_attention_heads": 6, "num_key_value_heads": 2}))
    with caplog.at_level("INFO"):
        play(2, lambda exchange: share_streams(policy, Context(exchange=exchange, head_stride=2)))
    assert "--ds.ring_attn_head_stride 2 has no effect: 2 ranks divide the 6 heads" in caplog.text
    with pytest.raises(ConfigError, match=r"--ds.ring_attn_head_stride 2: .* the model has 1; take one of 1"):
        play(2, lambda exchange: share_streams(policy, Context(exchange=exchange, head_stride=2, tensor=2)))
