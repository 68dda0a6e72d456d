"""Routes of experts: which models have them, and their replay."""

import pytest
import torch
import transformers as hf
from compiling import as_it_is, compiling_with
from mixtures import MIXTURES, SIZES, choices, make_mixture, own_routes, plain_twin, random_ids, random_routes, stream
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

from openrlhf.models.body import RouterLog, decoder_layers
from openrlhf.models.compilation import compile_layers
from openrlhf.models.context import Context, share_streams
from openrlhf.models.exchange import play
from openrlhf.models.packed import PackedAttention
from openrlhf.models.routes import (
    RouteCounts,
    RouteLog,
    RouteShape,
    StreamRoutes,
    install_routers,
    route_shape,
    without_route,
)
from openrlhf.models.support import _SEEN_REPLAYED, examine, examine_replay
from openrlhf.models.tiles import tile_mlps
from openrlhf.models.value import ScalarHead, ValueModel
from openrlhf.types import PackedTokens


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


def rule(name, logits_TE, ids_TK, scale=1.0):
    """The weights of given experts, as each family's paper or code has them."""
    if name == "gpt_oss":  # softmax over the chosen ones
        return logits_TE.gather(-1, ids_TK).softmax(-1)
    weights_TK = logits_TE.softmax(-1).gather(-1, ids_TK)
    return weights_TK if name in ("olmoe", "qwen2_moe") else weights_TK / weights_TK.sum(-1, keepdim=True)


def logprobs(policy, tokens, **options):
    return policy(tokens, temperature=0.7, **options).logprobs_A


def step(policy, tokens, **options):
    """Log-probs, and the gradients of their weighted mean, by parameter."""
    policy.zero_grad()
    logprobs_A = logprobs(policy, tokens, **options)
    (torch.linspace(0.5, 1.5, len(logprobs_A)) * logprobs_A).mean().backward()
    gradients = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    return logprobs_A.detach(), gradients


def assert_same_bits(found, expected):
    assert torch.equal(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert torch.equal(found[1][name], gradient), name


def assert_close(found, expected, **tolerance):
    tolerance = tolerance or {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found[0], expected[0], **tolerance)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, **tolerance, msg=lambda m, n=name: f"{n}: {m}")


def router_gradients(gradients):
    return {name: x for name, x in gradients.items() if name.endswith(("gate.weight", "router.weight", "router.bias"))}


@pytest.mark.parametrize("name", MIXTURES)
class TestReplay:
    def test_own_routes_change_no_bit(self, name):
        policy = make_mixture(name)
        assert not policy.routers.problem
        sequences = random_ids(7, 4, 7)
        without = step(policy, stream(sequences))
        assert_same_bits(step(policy, stream(sequences, own_routes(policy, sequences))), without)
        assert_same_bits(step(plain_twin(policy), stream(sequences)), without)

    def test_foreign_routes_have_the_weights_and_gradients_of_the_families_own_rule(self, name, monkeypatch):
        """The reference is transformers' model, whose routers are functions of the test."""
        policy, sequences = make_mixture(name), random_ids(9)
        routes = random_routes(policy, sequences)
        found = step(policy, stream(sequences, routes))
        reference = plain_twin(policy)
        for index, layer in enumerate(decoder_layers(reference.model)):
            for module in layer.modules():
                if hasattr(module, "top_k") and hasattr(module, "weight"):
                    monkeypatch.setattr(module, "forward", self.fixed_router(name, module, routes[0][:, index].long()))
        expected = step(reference, stream(sequences))
        assert torch.isfinite(found[0]).all()
        assert_close(found, expected)
        assert len(router_gradients(found[1])) >= 2
        assert all(gradient.abs().max() > 1e-6 for gradient in router_gradients(found[1]).values())

    @staticmethod
    def fixed_router(name, module, ids_RK):
        def forward(hidden):
            hidden = hidden.reshape(-1, hidden.shape[-1])
            logits_TE = hidden @ module.weight.T
            if getattr(module, "bias", None) is not None:
                logits_TE = logits_TE + module.bias
            last_1K = logits_TE[-1:].topk(module.top_k).indices  # the last token has no route
            ids_TK = torch.cat([ids_RK, last_1K])
            return logits_TE, rule(name, logits_TE, ids_TK), ids_TK

        return forward

    def test_the_routers_gradient_is_that_of_finite_differences(self, name):
        policy, sequences = make_mixture(name).double(), random_ids(5)
        policy.model.set_experts_implementation("eager")  # the others do not compute in fp64
        tokens = stream(sequences, random_routes(policy, sequences))
        _, gradients = step(policy, tokens)
        parameters = dict(policy.named_parameters())
        for parameter_name, gradient in router_gradients(gradients).items():
            parameter, place = parameters[parameter_name], tuple((gradient.abs() == gradient.abs().max()).nonzero()[0])
            sides = []
            for change in (3e-3, -3e-3):  # log-probs are fp32
                with torch.no_grad():
                    parameter[place] += change
                    sides.append((torch.linspace(0.5, 1.5, 4) * logprobs(policy, tokens)).mean().item())
                    parameter[place] -= change
            assert gradient[place].item() == pytest.approx((sides[0] - sides[1]) / 6e-3, rel=1e-2)

    def test_tokens_without_a_route_have_the_routers_own_choice(self, name):
        """The first sequence has no routes at all, of the second only the first three tokens have some."""
        policy, sequences = make_mixture(name), random_ids(6, 8)
        routes = random_routes(policy, sequences)[1][:3]
        with choices(policy) as made:
            found = step(policy, stream(sequences, [None, routes]))
        with choices(policy) as once_more:
            [step(policy, stream([ids], [known])) for ids, known in zip(sequences, [None, routes], strict=True)]
        whole = make_table(policy, made)
        assert torch.equal(whole.sort(-1).values, make_table(policy, once_more).sort(-1).values)
        own = own_routes(policy, sequences[:1])[0]
        with_experts = list(policy.routers.layers)
        assert torch.equal(whole[:5, with_experts].to(torch.uint8), own[:, with_experts])
        assert torch.equal(whole[6:9, with_experts].to(torch.uint8), routes[:, with_experts])
        # Told every expert that it has used, the model computes the same.
        again = step(policy, stream(sequences, [whole[:5], whole[6:13]]))
        assert_same_bits(again, found)

    def test_packed_or_one_by_one_or_with_a_shared_prompt(self, name):
        """The samples of a prompt come from requests of their own, and their prompts have one and the same route."""
        policy = make_mixture(name)
        (prompt,), answers = random_ids(4), random_ids(3, 5, 3, seed=2)
        sequences = [torch.cat([prompt, answer]) for answer in answers]
        routes = random_routes(policy, sequences)
        for known in routes[1:]:
            known[:4] = routes[0][:4]
        found = step(policy, stream(sequences, routes))
        assert_close(step(policy, stream(sequences, routes, shared=(0, 4, 4))), found)
        swapped = step(policy, stream(sequences[::-1], routes[::-1], shared=(0, 4, 4)))
        alone = [logprobs(policy, stream([ids], [known])) for ids, known in zip(sequences, routes, strict=True)]
        torch.testing.assert_close(torch.cat(alone), found[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(swapped[0], torch.cat(alone[::-1]), rtol=1e-4, atol=1e-5)
        policy.packed = False
        policy.model.set_attn_implementation("eager")
        assert_close(step(policy, stream(sequences, routes, shared=(0, 4, 4))), found)

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_a_second_forward_for_the_backward_pass_has_the_same_routes(self, name, reentrant):
        policy, sequences = make_mixture(name), random_ids(6, 8)
        routes = random_routes(policy, sequences)
        expected = step(policy.train(), stream(sequences, routes))
        policy.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        policy.model.enable_input_require_grads()
        log = RouteLog(policy.routers.shape)
        assert_same_bits(step(policy, stream(sequences, routes), route_log=log), expected)
        assert log.chosen_LE.sum() == 14 * policy.routers.shape.per_token * len(policy.routers.layers)  # each once

    def test_routers_logits_are_live_and_whole(self, name):
        """What the load-balancing loss gets is the logits of all tokens, whatever the routes."""
        policy, sequences = make_mixture(name), random_ids(6, 8)
        own, foreign = RouterLog(), RouterLog()
        logprobs(policy, stream(sequences), router_log=own)
        logprobs(policy, stream(sequences, random_routes(policy, sequences)), router_log=foreign)
        assert [x.shape for x in foreign.logits] == [x.shape for x in own.logits]
        torch.testing.assert_close(foreign.logits[0], own.logits[0])  # before any choice
        assert all(x.requires_grad for x in foreign.logits)


def make_table(policy, made):
    """[T, L, K] of what was chosen, with calls one after the other."""
    shape = policy.routers.shape
    columns = [[ids for layer, ids in made if layer == index] for index in range(shape.layers)]
    total = max(sum(map(len, column)) for column in columns)
    empty = torch.zeros(total, shape.per_token, dtype=torch.int64)
    return torch.stack([torch.cat(column) if column else empty for column in columns], dim=1)


class TestPrecision:
    """In 16 bits."""

    @pytest.mark.parametrize("name", MIXTURES)
    def test_routers_compute_in_fp32_and_give_what_they_gave(self, name):
        policy = make_mixture(name, dtype=torch.bfloat16)
        plain, sequences = plain_twin(policy), random_ids(8)
        seen = {}

        def listen(label):
            return lambda module, inputs, output: seen.update({label: (module, inputs[0], output)})

        for label, one in (("ours", policy), ("theirs", plain)):
            router = next(m for m in one.model.modules() if hasattr(m, "top_k") and hasattr(m, "weight"))
            router.register_forward_hook(listen(label))
            logprobs(one, stream(sequences))
        router, hidden_TD, (logits_TE, weights_TK, ids_TK) = seen["ours"]
        assert [x.dtype for x in seen["theirs"][2]] == [logits_TE.dtype, weights_TK.dtype, ids_TK.dtype]
        torch.testing.assert_close(hidden_TD, seen["theirs"][1], rtol=0, atol=0)
        exact_TE = hidden_TD.reshape(-1, 16).float() @ router.weight.float().T
        if getattr(router, "bias", None) is not None:
            exact_TE = exact_TE + router.bias.float()
        assert torch.equal(ids_TK, exact_TE.topk(ids_TK.shape[-1]).indices)
        assert torch.equal(weights_TK, rule(name, exact_TE, ids_TK).to(weights_TK.dtype))
        assert torch.equal(logits_TE, exact_TE.to(logits_TE.dtype))

    @pytest.mark.parametrize("checkpointing", [False, True])
    def test_own_routes_change_no_bit(self, checkpointing):
        policy = make_mixture(dtype=torch.bfloat16).train()
        if checkpointing:
            policy.model.gradient_checkpointing_enable({"use_reentrant": False})
        sequences = random_ids(7, 5)
        expected = step(policy, stream(sequences))
        assert_same_bits(step(policy, stream(sequences, own_routes(policy, sequences))), expected)

    def test_nobody_keeps_the_stream_in_fp32_for_routers(self):
        policy, sequences = make_mixture(dtype=torch.bfloat16), random_ids(11)
        plain = plain_twin(policy)

        def kept(one):
            """Bytes of what the backward pass needs, each tensor once."""
            tensors = {}

            def pack(tensor):
                tensors[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                output = logprobs(one, stream(sequences))
            return sum(tensors.values()), output

        assert kept(policy)[0] <= kept(plain)[0]

    @pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
    def test_routes_of_changed_weights_bring_log_probs_nearer(self, name):
        """The engine's weights are the trainer's, rounded in another way: some routers are nearly undecided."""
        trainer, sequences = make_mixture(name, dtype=torch.bfloat16), random_ids(*[24] * 8)
        engine = make_mixture(name, dtype=torch.bfloat16)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in engine.parameters():
                parameter.copy_(parameter.float() * (1 + 0.002 * torch.randn(parameter.shape, generator=generator)))
            told = logprobs(engine, stream(sequences))
            routes = own_routes(engine, sequences)
            gaps = [(logprobs(trainer, stream(sequences, r)) - told).abs().mean() for r in (routes, ())]
        assert gaps[0] < 0.7 * gaps[1]


class TestOtherForwards:
    def test_ranks_that_share_a_stream(self):
        policy, sequences = make_mixture(), random_ids(7, 4, 6)
        tokens = stream(sequences, random_routes(policy, sequences))

        ranks = [make_mixture() for _ in range(2)]

        def played(exchange):
            own, log = ranks[exchange.rank], RouteLog(policy.routers.shape)
            share_streams(own, Context(exchange=exchange))
            return step(own, tokens, route_log=log), log.counts()

        log = RouteLog(policy.routers.shape)
        whole, counts = step(policy, tokens, route_log=log), log.counts()
        parts = play(2, played)
        for (columns, _), _ in parts:
            torch.testing.assert_close(columns, whole[0], rtol=1e-5, atol=1e-6)
        added = {name: sum(part[0][1][name] for part in parts) for name in whole[1]}
        assert_close((whole[0], added), whole)
        for mine, theirs, together in zip(parts[0][1], parts[1][1], counts, strict=True):
            assert torch.equal(mine + theirs, together)

    def test_tiles_see_slices_and_routers_the_stream(self):
        """The shared expert of a long sequence works in tiles."""
        policy, sequences = make_mixture("qwen2_moe"), random_ids(11, 3)
        tokens = stream(sequences, random_routes(policy, sequences))
        expected = step(policy, tokens)
        assert tile_mlps(policy.model, long=8, tile=3) == 3
        assert_close(step(policy, tokens), expected)

    def test_compiled_layers_leave_routers_out(self):
        """One compilation serves streams of all lengths, with routes and without."""
        with compiling_with(as_it_is) as compiling:
            (policy, plain), made = (make_mixture("mixtral", num_hidden_layers=1) for _ in range(2)), []
            compile_layers(policy.model)
            for lengths in ([5, 3], [8], [6, 2, 4], [17, 2]):
                sequences = random_ids(*lengths)
                routes = random_routes(plain, sequences)
                for tokens in (stream(sequences), stream(sequences, routes)):
                    assert_close(step(policy, tokens), step(plain, tokens))
                made.append(compiling.pieces)
            assert made[0] > 0
            assert made[2:] == [made[1]] * 2

    def test_images_stand_among_tokens_with_routes(self):
        """Qwen3-VL-MoE reads embeddings: its layers are called in another way."""
        model = hf.AutoModelForImageTextToText.from_config(
            hf.Qwen3VLMoeConfig(
                text_config={**SIZES, "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2,
                             "moe_intermediate_size": 12, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                             "mrope_section": [2, 1, 1]}},
                vision_config={"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 16,
                               "intermediate_size": 16, "deepstack_visual_indexes": [0]},
            )
        )  # fmt: skip
        routers = install_routers(model, decoder_layers(model), replay=True)
        assert examine_replay(model, routers, packed=examine(model, native_attention="eager").packed).problem == ""

    def test_models_that_do_not_replay_are_given_no_routes(self):
        policy, sequences = make_mixture(), random_ids(6)
        expected = logprobs(policy, stream(sequences))
        policy.replays = False
        assert torch.equal(logprobs(policy, stream(sequences, random_routes(policy, sequences))), expected)
        critic = ValueModel(policy.model.model, ScalarHead(16))
        tokens = stream(sequences)
        with_routes = stream(sequences, random_routes(policy, sequences))
        assert torch.equal(*(critic(x, positions=x.action_positions) for x in (tokens, with_routes)))


class TestLog:
    def test_counts_by_hand(self):
        """Two sequences; in the second layer two tokens get the experts that they would not have chosen."""
        policy, sequences = make_mixture(), random_ids(5, 4)
        routes, log = own_routes(policy, sequences), RouteLog(policy.routers.shape)
        for place in ((0, 1), (1, 2)):
            sequence, token = place
            chosen = set(routes[sequence][token, 2].tolist())
            routes[sequence][token, 2, 0] = min(set(range(8)) - chosen)
        routes[0][0] = routes[0][0].flip(-1)  # another order is the same set
        logprobs(policy, stream(sequences, routes), route_log=log)
        chosen_LE, compared_L, differing_L = log.counts()
        assert compared_L.tolist() == [7, 7, 7]
        assert differing_L.tolist() == [0, 0, 2]
        assert chosen_LE.sum(-1).tolist() == [9 * 3] * 3
        given = torch.cat(routes).long()
        rest_LE = chosen_LE - torch.stack([given[:, layer].flatten().bincount(minlength=8) for layer in range(3)])
        assert (rest_LE >= 0).all()
        assert rest_LE.sum(-1).tolist() == [2 * 3] * 3  # the last token of each sequence

    def test_without_routes_there_is_nothing_to_compare(self):
        policy, sequences = make_mixture(), random_ids(5, 4)
        log = RouteLog(policy.routers.shape)
        for _ in range(2):
            logprobs(policy, stream(sequences), route_log=log)
        assert log.compared_L.tolist() == [0, 0, 0]
        assert log.chosen_LE.sum().item() == 2 * 9 * 3 * 3


TINY = {name: value for name, value in SIZES.items() if name != "initializer_range"}


class TestRefusals:
    @pytest.mark.parametrize(
        ("config", "problem"),
        [
            (hf.PhimoeConfig(**TINY, num_local_experts=4), "layer 0 does not choose its experts by one top-k"),
            (
                hf.DeepseekV2Config(
                    **{**TINY, "num_key_value_heads": 4},
                    n_routed_experts=8,
                    num_experts_per_tok=2,
                    n_group=4,
                    topk_group=1,
                    topk_method="group_limited_greedy",
                    moe_intermediate_size=8,
                    first_k_dense_replace=0,
                    q_lora_rank=8,
                    kv_lora_rank=8,
                    qk_rope_head_dim=4,
                    qk_nope_head_dim=4,
                    v_head_dim=4,
                ),
                "DeepseekV2TopkRouter: it gives experts no weight that others have chosen",
            ),
            (hf.JetMoeConfig(**TINY, num_local_experts=4, kv_channels=4), "JetMoeTopKGating: "),
        ],
        ids=lambda value: getattr(value, "model_type", None),
    )
    def test_routers_that_cannot_be_replayed_soundly(self, config, problem):
        model = hf.AutoModelForCausalLM.from_config(config)
        routers = install_routers(model, decoder_layers(model), replay=True)
        assert routers.problem.startswith(problem)
        model(input_ids=torch.tensor([[2, 3, 4]]))  # left to itself

    def test_a_model_without_experts_has_no_routers(self):
        model = hf.Qwen2ForCausalLM(hf.Qwen2Config(**SIZES))
        assert install_routers(model, decoder_layers(model), replay=True) is None

    def test_a_model_that_does_not_pass_routes_on(self):
        policy = make_mixture()
        model, body_forward = policy.model, policy.model.model.forward
        model.model.forward = lambda *args, expert_routes=None, **options: body_forward(*args, **options)
        found = examine_replay(model, policy.routers, packed=policy.packed)
        assert found.problem.startswith("its forward with routes fails (the model did not pass the routes")

    def test_routes_of_another_model(self):
        policy, sequences = make_mixture(), random_ids(5)
        routes = random_routes(make_mixture("mixtral", num_hidden_layers=2), sequences)
        with pytest.raises(ValueError, match="tells 2 experts of a token in 2 layers, and the policy has 3 in 3"):
            logprobs(policy, stream(sequences, routes))

    def test_routes_of_another_stream(self):
        policy, sequences = make_mixture(), random_ids(5)
        tokens = stream(sequences, random_routes(policy, sequences))
        wrong = StreamRoutes(tokens.routes_TLK[:3])
        with pytest.raises(ValueError, match="routes of 3 tokens for a router of 5"):
            policy.model.model(input_ids=sequences[0][None], attention_plan=PackedAttention(tokens.cu_seqlens, 5),
                               use_cache=False, expert_routes=wrong)  # fmt: skip


@pytest.mark.parametrize("name", sorted(_SEEN_REPLAYED))
def test_routers_are_found_where_weights_are_not_there_yet(name):
    """Weights of ZeRO-3 are sharded while they load: routers are tried on others."""
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(MIXTURES[name]())
    routers = examine_replay(model, install_routers(model, decoder_layers(model), replay=True), packed=True)
    assert routers == make_mixture(name).routers


class TestCounts:
    def test_shares_by_hand(self):
        """Layer 0 has no experts; of layer 1 one expert is idle and one has half of the tokens, layer 2 is even."""
        chosen_LE = torch.tensor([[0, 0, 0, 0], [0, 2, 2, 4], [3, 3, 3, 3]])
        counts = RouteCounts(chosen_LE, torch.tensor([0, 5, 5]), torch.tensor([0, 2, 1]))
        assert counts.differing_share() == 0.3
        assert counts.load_range() == (0.5, 1.5)
        twice = RouteCounts.added([counts, counts])
        assert twice.chosen_LE.tolist()[1] == [0, 4, 4, 8]
        assert (twice.differing_share(), twice.load_range()) == (0.3, (0.5, 1.5))

    def test_nothing_was_given_or_computed(self):
        counts = RouteLog(RouteShape(2, 4, 2)).counts()
        assert counts.differing_share() is None
        assert counts.load_range() is None

    def test_tokens_without_a_route_that_need_one(self):
        """Actions are tokens 2 to 4 of six; the last two are feedback. Of the second sequence half is missing, too."""
        sequences, masks = [torch.arange(6)] * 3, [torch.tensor([False, False, True, True, True, False])] * 3
        routes = [torch.zeros(4, 2, 1), torch.zeros(2, 2, 1), None]
        tokens = PackedTokens.from_sequences(sequences, masks, routes=routes)
        assert without_route(tokens) == (0 + 2 + 4, 12)
        assert without_route(tokens.without_routes()) == (12, 12)
