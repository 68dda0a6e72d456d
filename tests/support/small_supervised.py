"""Tiny models and data for the supervised trainers: made of token ids, so that no tokenizer is needed."""

import io
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from small_sections import optimizer
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Model

from openrlhf.backends.torch import TorchBackend
from openrlhf.data.packing import by_tokens
from openrlhf.models.attention import ATTENTION
from openrlhf.models.policy import Policy
from openrlhf.models.value import ScalarHead, ValueModel
from openrlhf.observability.loggers import NullLogger
from openrlhf.observability.progress import Progress
from openrlhf.trainers.supervised import Periods, SupervisedTrainer, WholeSet

CPU = torch.device("cpu")


def config(hidden: int = 32, layers: int = 1) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=16,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )


def make_policy(*, seed: int = 0, hidden: int = 32, layers: int = 1) -> Policy:
    torch.manual_seed(seed)
    return Policy(Qwen2ForCausalLM._from_config(config(hidden, layers), attn_implementation=ATTENTION))


def make_reward_model(*, seed: int = 0, hidden: int = 32, layers: int = 1) -> ValueModel:
    torch.manual_seed(seed)
    return ValueModel(
        Qwen2Model._from_config(config(hidden, layers), attn_implementation=ATTENTION), ScalarHead(hidden)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    token_ids: torch.Tensor
    target_mask: torch.Tensor
    where: str = ""
    images: tuple = ()
    image_keys: tuple = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    chosen: Example
    rejected: Example
    margin: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    example: Example
    desirable: bool


class Samples(list):
    """A data set as trainers see it."""

    @property
    def lengths(self) -> list[int]:
        return [sum(len(e.token_ids) for e in _examples(sample)) for sample in self]

    @property
    def target_counts(self) -> list[int]:
        return [sum(int(e.target_mask.sum()) for e in _examples(sample)) for sample in self]


def _examples(sample) -> list[Example]:
    if isinstance(sample, Pair):
        return [sample.chosen, sample.rejected]
    return [sample.example if isinstance(sample, Judged) else sample]


def example(prompt: Sequence[int], answer: Sequence[int]) -> Example:
    ids = torch.tensor([*prompt, *answer])
    return Example(token_ids=ids, target_mask=torch.arange(len(ids)) >= len(prompt))


def pair(prompt: Sequence[int], chosen: Sequence[int], rejected: Sequence[int], *, margin: float = 0.0) -> Pair:
    return Pair(chosen=example(prompt, chosen), rejected=example(prompt, rejected), margin=margin)


def random_pairs(count: int, *, seed: int = 0) -> Samples:
    """Of uneven lengths."""
    rng = random.Random(seed)

    def some(low: int, high: int) -> list[int]:
        return [rng.randrange(2, 16) for _ in range(rng.randint(low, high))]

    return Samples(pair(some(1, 6), some(1, 9), some(1, 9), margin=rng.random()) for _ in range(count))


class InOrder:
    """Epoch after epoch in the order of the data, cut by a token budget. Stands in for the schedule of `data`."""

    def __init__(self, lengths: Sequence[int], *, batch_size: int, steps: int, budget: int = 10_000) -> None:
        self.lengths, self.batch_size, self.steps, self.budget = lengths, batch_size, steps, budget
        self.next = 0

    @property
    def steps_per_epoch(self) -> int:
        return len(self.lengths) // self.batch_size

    def __len__(self) -> int:
        return self.steps

    def __iter__(self):
        while self.next < self.steps:
            start = self.next % self.steps_per_epoch * self.batch_size
            samples = range(start, start + self.batch_size)
            self.next += 1
            yield WholeSet(samples, by_tokens(samples, self.lengths, budget=self.budget))

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def make_backend(module, *, lr: float = 1e-2, steps: int = 100) -> TorchBackend:
    return TorchBackend(module, optimizer(lr=lr), total_steps=steps)


class Memory(NullLogger):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.records: list[dict] = []

    def log(self, step, metrics, *, kind="train") -> None:
        self.records.append({"step": step, "kind": kind, **metrics})

    def of(self, kind: str) -> list[dict]:
        return [record for record in self.records if record["kind"] == kind]


def make_trainer(backend, objective, *, batch_size, steps, evaluation=None, budget=10_000, **periods):
    """A trainer and what it logs."""
    logger = Memory()
    trainer = SupervisedTrainer(
        backend=backend,
        objective=objective,
        evaluation=evaluation,
        schedule=InOrder(objective.lengths, batch_size=batch_size, steps=steps, budget=budget),
        periods=Periods(**periods),
        tokens_per_forward=budget,
        logger=logger,
        progress=Progress(steps, "test", stream=io.StringIO(), live=False),
    )
    return trainer, logger
