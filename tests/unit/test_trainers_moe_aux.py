"""The load-balancing loss: hand-derived, as transformers has it, and on packed streams."""

import copy
import dataclasses

import pytest
import torch
from small_supervised import CPU, Judged, Samples, example, make_backend, make_trainer, pair
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from vllm_mixtures import make_mixture

from openrlhf.algorithms.losses import load_balancing_loss
from openrlhf.config.models import DPOModelSection
from openrlhf.models.attention import ATTENTION
from openrlhf.models.body import NoRoutersError, RouterLog, experts_per_token
from openrlhf.models.policy import Policy
from openrlhf.models.value import ScalarHead, ValueModel
from openrlhf.trainers.dpo import DPOObjective
from openrlhf.trainers.kto import KTOObjective
from openrlhf.trainers.moe_aux import BalancedObjective
from openrlhf.trainers.preferences import Reference
from openrlhf.trainers.reward_model import RewardObjective
from openrlhf.trainers.sft import SFTObjective
from openrlhf.trainers.supervised import WholeSet
from openrlhf.types import PackedTokens

SIZES = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
FAMILIES = {
    "mixtral": (MixtralForCausalLM, MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            **SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, decoder_sparse_step=1
        ),
    ),
}


def make(name="qwen3_moe", *, packed=True, seed=0) -> Policy:
    torch.manual_seed(seed)
    cls, config = FAMILIES[name]
    model = cls._from_config(copy.deepcopy(config), attn_implementation=ATTENTION if packed else "eager")
    return Policy(model, packed=packed)


def ids(*lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 16, (n,), generator=generator) for n in lengths]


def stream(sequences, shared=()):
    tokens = PackedTokens.from_sequences(sequences, [torch.arange(len(s)) >= 1 for s in sequences])
    return dataclasses.replace(tokens, shared_prefixes=shared)


def balance(policy, tokens):
    log = RouterLog()
    policy(tokens, temperature=1.0, router_log=log)
    return load_balancing_loss(log.logits, top_k=2)


class TestLoss:
    def test_by_hand(self):
        """Two tokens, two experts, one each. Probabilities (3/4, 1/4) and (3/4, 1/4): both go to the first. f = (1, 0),
        P = (3/4, 1/4), 2 · 3/4 = 3/2. With the second token's turned round, f = P = (1/2, 1/2): 1."""
        likes_first = torch.tensor([3.0, 1.0]).log()
        same, turned = torch.stack([likes_first, likes_first]), torch.stack([likes_first, likes_first.flip(0)])
        assert load_balancing_loss([same], top_k=1).item() == pytest.approx(1.5)
        assert load_balancing_loss([turned], top_k=1).item() == pytest.approx(1.0)
        # Of two layers all rows count together: f = (3/4, 1/4), P = (5/8, 3/8), 2 · (15 + 3) / 32 = 9/8.
        assert load_balancing_loss([same, turned], top_k=1).item() == pytest.approx(9 / 8)

    def test_it_is_that_of_transformers_with_its_gradient(self):
        generator = torch.Generator().manual_seed(0)
        ours = [torch.randn(17, 8, generator=generator, requires_grad=True) for _ in range(3)]
        theirs = [layer.detach().clone().requires_grad_() for layer in ours]
        loss, expected = load_balancing_loss(ours, top_k=2), load_balancing_loss_func(tuple(theirs), 8, 2)
        torch.testing.assert_close(loss, expected)
        loss.backward()
        expected.backward()
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("name", FAMILIES)
class TestModels:
    def test_one_sequence_gives_what_the_model_itself_adds_to_its_loss(self, name):
        policy = make(name)
        theirs = FAMILIES[name][0]._from_config(copy.deepcopy(policy.model.config), attn_implementation="eager")
        theirs.load_state_dict(policy.model.state_dict())
        (sequence,) = ids(9)
        expected = theirs(input_ids=sequence[None], output_router_logits=True).aux_loss
        torch.testing.assert_close(balance(policy, stream([sequence])), expected)

    def test_a_stream_gives_that_of_its_tokens_however_it_is_computed(self, name):
        """Three sequences with the same beginning: packed, sharing it, and one by one without packing."""
        beginning, *rests = ids(4, 3, 5, 3)
        sequences = [torch.cat([beginning, rest]) for rest in rests]
        policy, alone = make(name), make(name, packed=False)
        logits = []
        for sequence in sequences:
            log = RouterLog()
            policy(stream([sequence]), temperature=1.0, router_log=log)
            logits.append(log.logits)
        expected = load_balancing_loss_func(tuple(torch.cat(layer) for layer in zip(*logits, strict=True)), 4, 2)
        for model, shared in ((policy, ()), (policy, (0, 4, 4)), (alone, ())):
            torch.testing.assert_close(balance(model, stream(sequences, shared)), expected)

    def test_gradient_checkpointing_gives_the_same_gradient(self, name):
        gradients = []
        for on in (False, True):
            policy = make(name).train()
            if on:
                policy.model.gradient_checkpointing_enable({"use_reentrant": False})
            balance(policy, stream(ids(7, 5))).backward()
            gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]))
        assert gradients[0].norm() > 0
        torch.testing.assert_close(*gradients)


def test_asking_changes_nothing_else():
    policy, tokens = make(), stream(ids(7, 5))
    plain = policy(tokens, temperature=1.0).logprobs_A
    assert torch.equal(policy(tokens, temperature=1.0, router_log=RouterLog()).logprobs_A, plain)


def test_a_model_without_experts_has_nothing_to_balance():
    with pytest.raises(NoRoutersError, match=r"--model.aux_loss_coef 0.1: qwen2 has no experts"):
        experts_per_token(AutoModelForCausalLM.from_config(Qwen2Config(**SIZES)), flag="--model.aux_loss_coef 0.1")


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_experts_that_biases_keep_busy_are_not_balanced_by_a_loss(family):
    """Transformers adds none for them either."""
    with pytest.raises(NoRoutersError, match=rf"--model.aux_loss_coef 0.1: {family} keeps its experts busy by biases"):
        experts_per_token(make_mixture(family), flag="--model.aux_loss_coef 0.1")


@pytest.mark.parametrize("family", ["qwen3_moe_dense_first", "mixtral", "olmoe", "gpt_oss", "qwen2_moe", "granitemoe"])
def test_every_parameter_has_the_gradient_of_the_loss_that_transformers_adds(family):
    """Of a policy, and of a critic or reward model on the same body."""
    theirs, model = make_mixture(family, packed=False), make_mixture(family, packed=family != "gpt_oss")
    (sequence,) = ids(11)
    theirs(input_ids=sequence[None], output_router_logits=True).aux_loss.backward()
    expected = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    assert max(gradient.abs().max() for gradient in expected.values()) > 1e-3
    packed, top_k = family != "gpt_oss", experts_per_token(model, flag="")
    value_model = ValueModel(model.base_model, ScalarHead(model.config.hidden_size), packed=packed)
    for module in (Policy(model, packed=packed), value_model):
        model.zero_grad()
        log = RouterLog()
        options = {"temperature": 1.0} if isinstance(module, Policy) else {"positions": torch.arange(11)}
        module(stream([sequence]), router_log=log, **options)
        load_balancing_loss(log.logits, top_k=top_k).backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


class TestObjective:
    samples = Samples(example(s[:2].tolist(), s[2:].tolist()) for s in ids(7, 5, 9, 4))

    def test_micro_batches_weigh_as_much_as_they_have_tokens(self):
        """25 tokens cut 12 + 13: (12 · B₁ + 13 · B₂) / 25 on top of a loss that does not notice the cut."""
        policy, coef = make(), 0.5
        parts = [stream([self.samples[i].token_ids for i in micro]) for micro in ((0, 1), (2, 3))]
        first, second = (balance(policy, part) for part in parts)
        plain = SFTObjective(self.samples, device=CPU)
        objective = BalancedObjective(plain, coef=coef, top_k=2)
        batch = WholeSet(range(4), [(0, 1), (2, 3)])
        compute_loss = objective.begin(policy, batch)
        shares = [compute_loss(micro) for micro in batch.micro_batches]
        expected = plain.begin(policy, batch)(range(4)).loss + coef * (12 * first + 13 * second) / 25
        torch.testing.assert_close(sum(share.loss for share in shares), expected)
        shares[0].metrics.merge(shares[1].metrics)
        assert shares[0].metrics.values()["aux_loss"] == pytest.approx((12 * first.item() + 13 * second.item()) / 25)

    @pytest.mark.parametrize("kind", ["sft", "dpo", "kto", "rm"])
    def test_training_on_it_balances_the_experts(self, kind):
        """With a large weight; equally busy experts have a loss of 2, the number of experts per token."""
        policy = make()
        with torch.no_grad():  # all tokens have something in common, and the first expert likes it
            policy.model.model.embed_tokens.weight[:, 0] += 2.0
            for layer in policy.model.model.layers:
                layer.mlp.gate.weight[0, 0] += 1.0
        pairs = Samples(pair(s[:2].tolist(), s[2:].tolist(), s[3:].flip(0).tolist()) for s in ids(7, 5, 9, 8))
        module: torch.nn.Module = policy
        if kind == "sft":
            objective = SFTObjective(self.samples, device=CPU)
        elif kind == "dpo":
            reference = Reference(copy.deepcopy(policy), device=CPU)
            objective = DPOObjective(pairs, DPOModelSection(beta=0.1), reference=reference, device=CPU)
        elif kind == "kto":
            reference = Reference(copy.deepcopy(policy), device=CPU)
            judged = Samples(Judged(example=e, desirable=i % 2 == 0) for i, e in enumerate(self.samples))
            limits = {"max_len": 16, "tokens_per_forward": 1000, "seed": 0}
            objective = KTOObjective(judged, beta=0.1, reference=reference, device=CPU, **limits)
        else:
            module = ValueModel(policy.model.model, ScalarHead(16))
            objective = RewardObjective(pairs, loss=lambda c, r, m: -(c - r - m), margins=False, device=CPU)
        balanced = BalancedObjective(objective, coef=10.0, top_k=2)
        trainer, memory = make_trainer(make_backend(module, lr=3e-3), balanced, batch_size=4, steps=20)
        trainer.fit()
        losses = [record["aux_loss"] for record in memory.of("train")]
        assert losses[0] > 2.4
        assert losses[-1] < 2 + (losses[0] - 2) / 2
