"""The policy: packed tokens in, log-probs of the action tokens out.

`forward` does it all — body, choice of positions, head — so that hooks on the module (ZeRO-3, DDP) see every parameter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from openrlhf.models.body import RouterLog, decoder_body, hidden_states, with_any_image
from openrlhf.models.context import Context
from openrlhf.models.exact import ExactForward
from openrlhf.models.logprobs import IDENTITY, LogitTransform, chunked_logprobs
from openrlhf.models.packed import PackedAttention
from openrlhf.models.routes import RouteLog, Routers
from openrlhf.models.top_logprobs import TopLogprobs, chosen_logprobs, top_logprobs
from openrlhf.models.vision import reads_images, tower_parameters
from openrlhf.types import ImageInput, PackedTokens


class PolicyOutput(NamedTuple):
    """A NamedTuple, because distributed wrappers look for tensors in tuples and not in other records."""

    logprobs_A: Tensor
    """float32 [A]: log π of each action token given the tokens before it."""
    entropy_A: Tensor | None
    """float32 [A]: entropy of π where the action was taken; None unless asked for."""
    chosen_AK: Tensor | None = None
    """float32 [A, K]: log π of the tokens that were asked for; None: none were."""
    rest_A: Tensor | None = None
    """float32 [A]: log of what π gives to all others together; None: there are none."""


class Policy(nn.Module):
    """A Hugging Face causal language model that reads packed streams. Made by `models.loading.load_policy`."""

    def __init__(
        self,
        model: Any,
        *,
        packed: bool = True,
        transform: LogitTransform = IDENTITY,
        config_changes: dict[str, float] | None = None,
        stored_dtype: torch.dtype | None = None,
        blank: ImageInput | None = None,
        routers: Routers | None = None,
    ) -> None:
        """`packed`: the model's attention implementation is `ATTENTION`; otherwise sequences run one by one.

        `config_changes`: configuration values that loading replaced, as they were; an export writes them back.
        `stored_dtype`: what an export writes weights in; None: in the dtype they have. `blank`: an image that a rank
        encodes whose samples have none, in a run with images. `routers`: those of a mixture of experts; where they can
        take routes, the policy computes with those that its tokens have.
        """
        super().__init__()
        self.model = model
        self.packed = packed
        self.transform = transform
        self.config_changes = config_changes or {}
        self.stored_dtype = stored_dtype
        self.blank = blank
        self.routers = routers
        self.replays = routers is not None and not routers.problem
        self.exact: ExactForward | None = None
        """Where values are those of the exact forward; None: those of the usual kernels."""
        self.context: Context | None = None
        """The ranks that share a stream with this one; None: it computes its streams alone."""

    def forward(
        self,
        tokens: PackedTokens,
        *,
        temperature: float,
        with_entropy: bool = False,
        router_log: RouterLog | None = None,
        route_log: RouteLog | None = None,
        token_ids_AK: Tensor | None = None,
        top_k: int | None = None,
        vocabulary: int | None = None,
    ) -> PolicyOutput | TopLogprobs:
        """log π(token t | tokens before t of its sequence) for t in `action_positions`, in that order.

        π is the softmax of logits / temperature, in fp32, over what the tokens were chosen among, where the stream says
        it; temperature 0 (greedy) counts as 1. `router_log` and `route_log` are filled, if there are any; `route_log`
        is for routers that can take routes. `token_ids_AK`: other tokens whose log-probs are wanted where each action
        was taken. `top_k`: the likeliest tokens are wanted instead of all that, of the first `vocabulary`. Both are
        of a softmax over all tokens.
        """
        if self.routers is None or not self.replays:
            tokens = tokens.without_routes()
        elif tokens.routes_TLK is not None:
            self.routers.check(tokens.routes_TLK)
        hidden_aD, share = hidden_states(
            decoder_body(self.model),
            with_any_image(tokens, self.blank),
            positions=tokens.action_positions - 1,  # the state before a token predicts it
            packed=self.packed,
            plan=None if self.exact is None else PackedAttention(tokens.cu_seqlens, tokens.max_seqlen),
            router_log=router_log,
            route_log=route_log,
            context=self.context,
        )
        head = output_head(self.model)
        of_head: dict[str, Any] = {"bias_V": head.bias, "temperature": temperature, "transform": self.transform}
        if top_k is not None:
            return TopLogprobs(
                *map(share.whole, top_logprobs(hidden_aD, head.weight, top_k, vocabulary=vocabulary, **of_head))
            )
        targets_a = share.own(tokens.token_ids[tokens.action_positions])
        supports_a = tokens.supports
        if supports_a is not None and self.context is not None:
            supports_a = supports_a.at(share.own(torch.arange(len(supports_a), device=targets_a.device)).cpu())
        logprobs_a, entropy_a = chunked_logprobs(
            hidden_aD, head.weight, targets_a, with_entropy=with_entropy, supports=supports_a, **of_head
        )
        chosen_aK = rest_a = None
        if token_ids_AK is not None:
            chosen_aK, rest_a = chosen_logprobs(hidden_aD, head.weight, share.own(token_ids_AK), **of_head)
        if self.exact is not None:
            logprobs_a = self.exact.logprobs(logprobs_a, hidden_aD, head, targets_a, temperature)
        others = (None if column is None else share.whole(column) for column in (entropy_a, chosen_aK, rest_a))
        return PolicyOutput(share.whole(logprobs_a), *others)


def tower_names(policy: Policy) -> list[str]:
    """The parameters of the policy's vision tower, by their names in the policy; none for a model of text."""
    body = decoder_body(policy.model)
    tower = {id(parameter) for _, parameter in tower_parameters(body)} if reads_images(body) else set()
    return [name for name, parameter in policy.named_parameters() if id(parameter) in tower]


def output_head(model: Any) -> nn.Linear:
    """The model's head, as the plain matrix that `chunked_logprobs` multiplies with."""
    head = model.get_output_embeddings()
    if type(head).forward is not nn.Linear.forward:
        raise TypeError(
            f"the output head must be a plain Linear, got {type(head).__name__}: an adapter or a quantised weight "
            "there would be left out of the log-probs. Take lm_head out of the LoRA target modules."
        )
    return head
