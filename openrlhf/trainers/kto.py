"""KTO: each answer is labelled desirable or not, and becomes likelier or less likely than under the reference."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from openrlhf.algorithms.preferences import kto_loss, kto_reference_point
from openrlhf.backends.ranks import ALONE, Ranks
from openrlhf.data.schedule import divide
from openrlhf.observability.metrics import Metrics
from openrlhf.trainers.preferences import Reference, ReferenceLogprobs, answer_logprobs
from openrlhf.trainers.sft import pack
from openrlhf.trainers.supervised import Batch, MetricNames, MicroBatchLoss
from openrlhf.types import PackedTokens

if TYPE_CHECKING:
    from openrlhf.data.examples import Example
    from openrlhf.data.preferences import Judged, JudgedSet


class KTOObjective:
    """L = mean over the step's answers of the KTO loss.

    The reference point z₀ is estimated over the whole step before the step is cut, from mismatched pairs: each prompt
    with an answer to another prompt. The paper shifts the answers of a batch by one. Here the other answer is chosen
    once for the whole data set, so that the reference's log-probs of the mismatched pairs are computed once too.
    """

    names = MetricNames(
        evaluation={"loss": "eval_loss", "acc": "acc_mean"}, smoothed={"loss": "loss_mean", "acc": "acc_mean"}
    )

    def __init__(
        self,
        answers: JudgedSet,
        *,
        beta: float,
        reference: Reference,
        max_len: int,
        tokens_per_forward: int,
        seed: int,
        device: torch.device,
        ranks: Ranks = ALONE,
    ) -> None:
        """`max_len`: where mismatched pairs are cut. `tokens_per_forward`: the token budget of their forwards."""
        self._answers = answers
        self.lengths = answers.lengths
        self._beta = beta
        self._tokens_per_forward = tokens_per_forward
        self._device = device
        self._ranks = ranks
        self._mismatched = Mismatched(answers, max_len=max_len, seed=seed)
        self._reference = ReferenceLogprobs(
            len(answers), 1, lambda indices: reference.answer_logprobs(self._pack(indices)).unsqueeze(1), ranks=ranks
        )
        self._mismatched_reference = ReferenceLogprobs(
            len(self._mismatched),
            1,
            lambda indices: reference.answer_logprobs(pack([self._mismatched[i] for i in indices])).unsqueeze(1),
            ranks=ranks,
        )

    def begin(self, module: nn.Module, batch: Batch) -> Callable[[Sequence[int]], MicroBatchLoss]:
        z0 = self._reference_point(module, batch)
        self._reference.complete(batch.samples, batch.micro_batches)

        def compute_loss(micro: Sequence[int]) -> MicroBatchLoss:
            policy_N = answer_logprobs(module, self._pack(micro).to(self._device))
            ratio_N = policy_N - self._reference.of(micro).squeeze(1).to(self._device)
            desirable_N = torch.tensor([self._answers[i].desirable for i in micro], device=self._device)
            loss_N = kto_loss(ratio_N, desirable_N, z0, beta=self._beta)
            rewards_N = self._beta * ratio_N.detach()
            metrics, count = Metrics(), len(micro)
            metrics.mean("loss", loss_N.detach().sum(), count)
            metrics.mean("acc", ((ratio_N > z0) == desirable_N).sum(), count)
            for name, side_N in (("chosen_reward", desirable_N), ("reject_reward", ~desirable_N)):
                metrics.mean(name, torch.where(side_N, rewards_N, 0.0).sum(), side_N.sum())
            metrics.last("kl", z0)
            return MicroBatchLoss(loss_N.sum() / len(batch.samples), metrics)

        return compute_loss

    @torch.no_grad()
    def _reference_point(self, module: nn.Module, batch: Batch) -> Tensor:
        cut = divide(
            batch.samples, self._mismatched.lengths, ranks=self._ranks.count, token_budget=self._tokens_per_forward
        )
        micro_batches = cut[self._ranks.index]
        self._mismatched_reference.complete(batch.samples, micro_batches)
        own: list[float] = []
        for micro in micro_batches:
            # Ranks that share weights run every forward together. One without samples runs any sample, for nothing.
            indices = micro or batch.samples[:1]
            policy_N = answer_logprobs(module, pack([self._mismatched[i] for i in indices]).to(self._device))
            own += (policy_N.cpu() - self._mismatched_reference.of(indices).squeeze(1)).tolist() if micro else []
        ratios = [ratio for theirs in self._ranks.gather(own) for ratio in theirs]
        return kto_reference_point(torch.tensor(ratios, device=self._device))

    def _pack(self, indices: Sequence[int]) -> PackedTokens:
        return pack([self._answers[i].example for i in indices])

    def state_dict(self) -> dict[str, Any]:
        return {"answers": self._reference.state_dict(), "mismatched": self._mismatched_reference.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._reference.load_state_dict(state["answers"])
        self._mismatched_reference.load_state_dict(state["mismatched"])


class Mismatched(Sequence["Example"]):
    """Each prompt of a data set with an answer to another prompt: the next in a random order whose prompt differs.

    Where all prompts are the same there is no such answer, and any answer is taken. Pairs are built on access.
    """

    def __init__(self, answers: Sequence[Judged], *, max_len: int, seed: int) -> None:
        self._answers = answers
        self._max_len = max_len
        prompts: list[bytes] = []
        self._sizes: list[tuple[int, int]] = []
        for answer in answers:
            prompt = _prompt(answer.example)
            # Images of the same size have the same tokens.
            asked = prompt.numpy().tobytes() + repr(answer.example.image_keys).encode()
            prompts.append(hashlib.blake2b(asked, digest_size=16).digest())
            self._sizes.append((len(prompt), len(answer.example.token_ids) - len(prompt)))
        self._partner = _partners(prompts, seed=seed)
        self.lengths = [
            size + self._room(size, self._sizes[self._partner[i]][1]) for i, (size, _) in enumerate(self._sizes)
        ]

    def __len__(self) -> int:
        return len(self._answers)

    def __getitem__(self, index: Any) -> Any:
        asked, answered = self._answers[index].example, self._answers[self._partner[index]].example
        prompt = _prompt(asked)
        answer = answered.token_ids[len(_prompt(answered)) :]
        answer = answer[: self._room(len(prompt), len(answer))]
        mask = torch.arange(len(prompt) + len(answer)) >= len(prompt)
        return dataclasses.replace(asked, token_ids=torch.cat([prompt, answer]), target_mask=mask)

    def _room(self, prompt: int, answer: int) -> int:
        """The number of tokens of the answer that fit, at least one."""
        return max(1, min(answer, self._max_len - prompt))


def _partners(prompts: Sequence[bytes], *, seed: int) -> dict[int, int]:
    order = list(range(len(prompts)))
    random.Random(seed).shuffle(order)
    partner: dict[int, int] = {}
    # The order is a ring, walked backwards, so that a sample whose successor has the same prompt takes over the
    # successor's partner: the nearest later sample with another prompt. The first walk does not know yet what follows
    # the end of the order, so the ring is walked twice.
    for after, here in pairwise(reversed([*order, *order, order[0]])):
        partner[here] = after if prompts[here] != prompts[after] else partner.get(after, after)
    return partner


def _prompt(example: Example) -> Tensor:
    return example.token_ids[: int(example.target_mask.int().argmax())]


if TYPE_CHECKING:
    from openrlhf.trainers.supervised import Objective

    _: type[Objective] = KTOObjective
