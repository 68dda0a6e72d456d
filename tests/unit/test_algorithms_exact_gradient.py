"""The gradient each algorithm has in expectation, exactly: every trajectory, and every group of them, is enumerated.

The policy is a table of logits, one row per history, so a task has a handful of trajectories τ with probability p(τ)
and total reward R(τ). The expected gradient of an algorithm is the sum over all n-tuples of trajectories of their
probability times the gradient of the project's own loss on that group (ratio 1, summed over tokens and averaged over
samples: constant aggregation with length 1). It is compared with g[f] = ∇_θ Σ_τ p_θ(τ) f(τ), f held fixed, worked out
from the definition alone; the policy gradient is g[R]. Everything is float64 and must agree to 1e-10.

Two facts carry the derivations. For any c that does not depend on a_t given the history h_t,
E[c ∇log π(a_t|h_t)] = 0 (*). And Σ_t ∇log π(a_t|h_t) = ∇log p(τ), so E[f(τ) Σ_t ∇log π(a_t|h_t)] = g[f] (**).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from openrlhf.algorithms.advantages import (
    Moments,
    TurnRewards,
    Turns,
    discounted_returns,
    gae,
    get_estimator,
    part_advantages,
    turn_advantages,
    whiten,
)
from openrlhf.algorithms.corrections import CorrectionInputs, get_correction
from openrlhf.algorithms.kl import get_kl_estimator
from openrlhf.algorithms.losses import POLICY_LOSSES, LossInputs, LossSettings, get_policy_loss
from openrlhf.algorithms.reduction import Aggregation, sample_weights
from openrlhf.models.logprobs import chunked_logprobs
from openrlhf.types import Supports

VOCABULARY = 3


@dataclass(frozen=True)
class Path:
    """One trajectory: its action tokens only, each with the row of the history it was sampled after."""

    rows: tuple[int, ...]
    actions: tuple[int, ...]
    rewards: tuple[float, ...]
    """Each turn's on its last token."""
    turns: tuple[int, ...] = ()
    """The turn of each action token; empty: there is only one."""
    luck: float = 1.0
    """Probability of what the environment did in it."""

    @property
    def total(self) -> float:
        return sum(self.rewards)

    @property
    def turn_of(self) -> tuple[int, ...]:
        return self.turns or (0,) * len(self.actions)

    @property
    def turn_rewards(self) -> list[float]:
        earned = [0.0] * (1 + self.turn_of[-1])
        for turn, reward in zip(self.turn_of, self.rewards, strict=True):
            earned[turn] += reward
        return earned


class Task:
    """All trajectories of a small game, and a policy to play it."""

    def __init__(self, paths: Sequence[Path], *, actions: int, seed: int = 0) -> None:
        self.paths = paths
        rows = 1 + max(row for path in paths for row in path.rows)
        generator = torch.Generator().manual_seed(seed)
        self.logits = torch.randn(rows, actions, generator=generator, dtype=torch.float64).requires_grad_()
        assert sum(p.item() for p in self.probabilities()) == pytest.approx(1)

    def logprobs(self, paths: Sequence[Path]) -> Tensor:
        """The column of log π over the action tokens of these paths."""
        rows = [row for path in paths for row in path.rows]
        actions = [action for path in paths for action in path.actions]
        return self.logits.log_softmax(-1)[rows, actions]

    def probabilities(self) -> list[Tensor]:
        return [path.luck * self.logprobs([path]).sum().exp() for path in self.paths]

    def gradient_of(self, f: Callable[[Path], float]) -> Tensor:
        """g[f] = ∇_θ Σ_τ p_θ(τ) f(τ)."""
        expectation = sum(p * f(path) for p, path in zip(self.probabilities(), self.paths, strict=True))
        return torch.autograd.grad(expectation, self.logits)[0]

    def policy_gradient(self) -> Tensor:
        return self.gradient_of(lambda path: path.total)

    def values(self, gamma: float) -> Tensor:
        """V of each history: what is expected to come, discounted over action tokens."""
        mass, worth = torch.zeros(2, len(self.logits), dtype=torch.float64)
        for p, path in zip(self.probabilities(), self.paths, strict=True):
            to_come = 0.0
            for row, reward in zip(reversed(path.rows), reversed(path.rewards), strict=True):
                to_come = reward + gamma * to_come
                worth[row] += p.item() * to_come
                mass[row] += p.item()
        return worth / mass


def single_turn() -> Task:
    """Responses of one or two of three tokens: token 0 ends the response at once. Seven different rewards."""
    rewards = iter([0.3, -1.0, 2.0, 0.5, 1.0, -0.2, 0.8])
    paths = [Path((0,), (0,), (next(rewards),))]
    paths += [Path((0, a), (a, b), (0.0, next(rewards))) for a in (1, 2) for b in range(3)]
    return Task(paths, actions=3)


def two_turns() -> Task:
    """Two tokens a b, an environment token e that depends on b by chance, one token c; a reward per turn.

    Rows: 0 the prompt, 1–2 after a, 3–10 after a b e. The second turn's reward depends on everything before it.
    """
    paths = []
    for a, b, e, c in itertools.product(range(2), repeat=4):
        likely = 0.7 if b else 0.4
        first = (0.5, -1.0, 0.2, 1.5)[2 * a + b]
        second = math.sin(1 + 8 * a + 4 * b + 2 * e + c)
        row = 3 + 4 * a + 2 * b + e
        paths.append(
            Path((0, 1 + a, row), (a, b, c), (0.0, first, second), (0, 0, 1), luck=likely if e else 1 - likely)
        )
    return Task(paths, actions=2)


def up_to_three_turns() -> Task:
    """Two tokens x a, then b, then c, each a turn that earns something; a = 0 or b = 0 ends the episode.

    Rows: 0 the prompt, 1–2 after x, 3–4 after x 1, 5–6 after x 1 1. Rewards depend on everything so far.
    """
    paths = []
    for x in range(2):
        first, second = (0.4, -0.7, 1.3, 0.2)[2 * x :], (0.9, 0.1, -0.5, 0.6)[2 * x :]
        paths.append(Path((0, 1 + x), (x, 0), (0.0, first[0]), (0, 0)))
        started = (0.0, first[1])
        paths.append(Path((0, 1 + x, 3 + x), (x, 1, 0), (*started, second[0]), (0, 0, 1)))
        for c in range(2):
            third = math.sin(2 + 2 * x + c)
            rows = (0, 1 + x, 3 + x, 5 + x)
            paths.append(Path(rows, (x, 1, 1, c), (*started, second[1], third), (0, 0, 1, 2)))
    return Task(paths, actions=2)


def equal_lengths(rewards: Sequence[float]) -> Task:
    """Responses of exactly two of two tokens; `rewards` of aa, ab, ba, bb."""
    pairs = itertools.product(range(2), repeat=2)
    paths = [Path((0, 1 + a), (a, b), (0.0, r)) for (a, b), r in zip(pairs, rewards, strict=True)]
    return Task(paths, actions=2)


TASKS = {"single turn": single_turn, "two turns": two_turns, "up to three turns": up_to_three_turns}

Advantages = Callable[[Sequence[Path]], Tensor]
"""The advantages of a group's action tokens, path after path."""


def columns(group: Sequence[Path]) -> tuple[Tensor, list[int], Tensor]:
    """Rewards, offsets and sequences of a group's action tokens."""
    sizes = [len(path.actions) for path in group]
    rewards = torch.tensor([reward for path in group for reward in path.rewards], dtype=torch.float64)
    sequences = torch.repeat_interleave(torch.arange(len(group)), torch.tensor(sizes))
    return rewards, [0, *itertools.accumulate(sizes)], sequences


def reinforce(*, gamma: float = 1.0) -> Advantages:
    """R_t, not whitened."""

    def advantages(group: Sequence[Path]) -> Tensor:
        rewards, offsets, _ = columns(group)
        return discounted_returns(rewards, offsets, gamma=gamma)

    return advantages


def comparing(name: str, turns: Turns = Turns.OUTCOME, *, k: int = 1) -> Advantages:
    """(x − b) / s, not whitened. `k`: of the subsets, where there are some."""

    def advantages(group: Sequence[Path]) -> Tensor:
        earned = [torch.tensor(path.turn_rewards, dtype=torch.float64) for path in group]
        episodes = [TurnRewards(rewards, rewards.abs()) for rewards in earned]
        credit = turn_advantages(episodes, get_estimator(name).with_k(k).shape, turns)
        return torch.cat([advantages_K[list(path.turn_of)] for advantages_K, path in zip(credit, group, strict=True)])

    return advantages


def whitened(inner: Advantages, *, divide_by_std: bool = True) -> Advantages:
    """`inner`, whitened over the action tokens of the group: the group is the round."""

    def advantages(group: Sequence[Path]) -> Tensor:
        values = inner(group)
        return whiten(values, Moments.of(values), divide_by_std=divide_by_std)

    return advantages


def with_critic(values: Tensor, *, gamma: float, lambd: float) -> Advantages:
    def advantages(group: Sequence[Path]) -> Tensor:
        rewards, offsets, _ = columns(group)
        rows = [row for path in group for row in path.rows]
        return gae(rewards, values[rows], offsets, gamma=gamma, lambd=lambd).advantages_A

    return advantages


def expected_gradient(task: Task, advantages: Advantages, *, n: int, loss: str = "ppo") -> Tensor:
    """−E[∇L] over all groups of n independent trajectories."""
    groups = list(itertools.product(task.paths, repeat=n))
    chances = itertools.product([p.item() for p in task.probabilities()], repeat=n)
    everyone = [path for group in groups for path in group]
    logprobs = task.logprobs(everyone)
    inputs = LossInputs(
        logprobs, logprobs.detach(), torch.cat([advantages(group) for group in groups]), columns(everyone)[2]
    )
    token_loss = get_policy_loss(loss).function(inputs, LossSettings(clip_low=0.2, clip_high=0.2)).loss_A
    weights = []
    for group, chance in zip(groups, chances, strict=True):
        sizes = [len(path.actions) for path in group]
        for size, weight in zip(sizes, sample_weights(Aggregation.CONSTANT, sizes, constant_length=1), strict=True):
            weights += [math.prod(chance) * weight] * size
    total = (torch.tensor(weights, dtype=torch.float64) * token_loss).sum()
    return -torch.autograd.grad(total, task.logits)[0]


def agrees(found: Tensor, expected: Tensor) -> bool:
    # The comparison means something only where there is a gradient to get wrong.
    return bool(expected.norm() > 1e-2) and bool((found - expected).norm() < 1e-10)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("loss", POLICY_LOSSES)
@pytest.mark.parametrize("turns", [Turns.OUTCOME, Turns.TO_GO])
def test_leave_one_out_is_unbiased_under_every_loss(task, loss, turns):
    """rloo by outcome: A_t = R − b, b the mean total of the other samples. b is independent of this sample, so by (*) it
    drops out, and by (**) the sum over t of E[R ∇log π_t] is g[R].

    By the return to go: A_t = R_k − b_k, R_k what turns k, k+1, … of this sample earned, b_k the mean of the same over
    the others. What turns before k earned is part of h_t: E[R_k ∇log π_t] = E[R ∇log π_t]. And b_k depends on h_t by k
    only. So that is g[R] too, whatever the number of turns.

    At ratio 1 all losses have the gradient −A_t ∇log π_t; gspo because each token of a sequence keeps its own advantage.
    """
    game = TASKS[task]()
    found = expected_gradient(game, comparing("rloo", turns), n=2, loss=loss)
    assert agrees(found, game.policy_gradient())


@pytest.mark.parametrize("task", ["single turn", "up to three turns"])
@pytest.mark.parametrize("turns", [Turns.OUTCOME, Turns.TO_GO])
def test_leave_one_out_is_unbiased_for_three(task, turns):
    game = TASKS[task]()
    assert agrees(expected_gradient(game, comparing("rloo", turns), n=3), game.policy_gradient())


@pytest.mark.parametrize("task", TASKS)
def test_remax_is_unbiased(task):
    """A_t = R_t − b with b the reward of the greedy path, the same for every sample of the prompt: it drops out by (*),
    and with γ = 1 the rest is as for plain returns. One sample is enough, and its gradient varies less."""
    game = TASKS[task]()
    greedy = max(game.paths, key=lambda path: all_likeliest(game, path))
    assert get_estimator("remax").greedy_baseline

    def advantages(group: Sequence[Path]) -> Tensor:
        return reinforce()(group) - greedy.total

    assert agrees(expected_gradient(game, advantages, n=1), game.policy_gradient())
    assert agrees(expected_gradient(game, advantages, n=2), game.policy_gradient())


def all_likeliest(game: Task, path: Path) -> tuple[bool, float]:
    """Whether each action is the likeliest one; of several such paths the luckiest comes first."""
    best = game.logits.argmax(-1).tolist()
    return all(best[row] == action for row, action in zip(path.rows, path.actions, strict=True)), path.luck


@pytest.mark.parametrize("task", TASKS)
def test_plain_returns_are_unbiased(task):
    """reinforce without whitening: A_t = R_t, as above with b = 0; one sample is enough."""
    game = TASKS[task]()
    assert agrees(expected_gradient(game, reinforce(), n=1), game.policy_gradient())


def test_the_second_turn_s_reward_belongs_to_the_first_turn_too():
    """What the tests of two turns would notice: with each turn credited its own reward alone, the gradient is another,
    by the terms E[r_2 ∇log π(a, b)]."""

    def own_turn_only(group: Sequence[Path]) -> Tensor:
        return torch.tensor([r for path in group for r in (path.rewards[1], *path.rewards[1:])], dtype=torch.float64)

    game = two_turns()
    assert (expected_gradient(game, own_turn_only, n=1) - game.policy_gradient()).norm() > 1e-2


@pytest.mark.parametrize(
    ("task", "n"),
    [("single turn", 2), ("single turn", 3), ("two turns", 2), ("up to three turns", 2), ("up to three turns", 3)],
)
@pytest.mark.parametrize("turns", [Turns.OUTCOME, Turns.TO_GO])
@pytest.mark.parametrize("name", ["reinforce_baseline", "dr_grpo"])
def test_a_mean_that_includes_the_sample_scales_the_gradient(task, name, turns, n):
    """b = mean of all totals, or of all returns from turn k on, = x/n + (n−1)/n · (mean of the others), x the sample's
    own.

    The second part drops out by (*). The first does not: the sum over t of E[x ∇log π_t] is g[R], as above, so it is
    g[R] − g[R]/n = (n−1)/n · g[R]. The right direction, a smaller step.
    """
    game = TASKS[task]()
    found = expected_gradient(game, comparing(name, turns), n=n)
    assert agrees(found, (n - 1) / n * game.policy_gradient())


def credited(game: Task, credit: Callable[[Path, Path], Sequence[float]]) -> Tensor:
    """Σ p(τ) p(τ') Σ_t A_t ∇log π_t over pairs, by hand: `credit` is the advantage of each turn of τ beside τ'."""
    result = torch.zeros_like(game.logits)
    chances = [p.item() for p in game.probabilities()]
    for (p, path), (q, other) in itertools.product(zip(chances, game.paths, strict=True), repeat=2):
        turns = credit(path, other)
        for row, action, turn in zip(path.rows, path.actions, path.turn_of, strict=True):
            # ∇ of a log-softmax: one at the action, less the probabilities of all.
            result[row] -= p * q * turns[turn] * game.logits[row].softmax(-1).detach()
            result[row, action] += p * q * turns[turn]
    return result


def left_out_where_alike(game: Task, n: int) -> Tensor:
    """What the formula of steps less a mean would add where all samples are alike, which in these games is where all
    are the same path: the mean is its own, R/K, and A_t = R_k − (turns from k on) · R/K."""
    chances = dict(zip(game.paths, [p.item() for p in game.probabilities()], strict=True))

    def credit(path: Path, other: Path) -> list[float]:
        count = len(path.turn_rewards)
        to_go = [sum(path.turn_rewards[k:]) - (count - k) * path.total / count for k in range(count)]
        return [(path is other) * chances[path] ** (n - 2) * advantage for advantage in to_go]

    return credited(game, credit)


@pytest.mark.parametrize("n", [2, 3])
def test_steps_that_leave_one_out_charge_every_turn_the_mean_reward(n):
    """rloo by step: A_t = Σ_{j ≥ k} (r_j − b) = R_k − (turns from k on) · b, b the mean over all turns of the others.

    b is independent of this sample, with mean β; the turns before k are part of h_t. So by (*) and (**) it is
    g[R] − β · g[K], K(τ) the number of turns of τ: the policy gradient of a game in which every turn costs β. It is
    biased where the policy has a say in the number of turns, against long episodes if turns earn something on average.
    Groups that are alike turn by turn are left out of it.
    """
    game = up_to_three_turns()
    chances = [p.item() for p in game.probabilities()]
    beta = 0.0
    for others in itertools.product(zip(chances, game.paths, strict=True), repeat=n - 1):
        rewards = [reward for _, path in others for reward in path.turn_rewards]
        beta += math.prod(p for p, _ in others) * sum(rewards) / len(rewards)
    found = expected_gradient(game, comparing("rloo", Turns.STEP), n=n)
    costly = game.gradient_of(lambda path: path.total - beta * len(path.turn_rewards))
    assert agrees(found, costly - left_out_where_alike(game, n))
    assert (found - game.policy_gradient()).norm() > 1e-2


def test_steps_that_leave_one_out_are_unbiased_where_all_episodes_have_as_many_turns():
    """Then K is a constant, and g of a constant is 0: the policy gradient, but for groups that are alike."""
    game = two_turns()
    found = expected_gradient(game, comparing("rloo", Turns.STEP), n=2)
    assert agrees(found, game.policy_gradient() - left_out_where_alike(game, 2))


def test_steps_less_a_mean_that_includes_the_sample_shrink_early_turns_most():
    """dr_grpo by step, K turns in all n samples: b = R/(nK) + what is independent of the sample, and turn k has
    K − k + 1 turns from itself on. So turn k's part of g[R] is multiplied by 1 − (K − k + 1)/(nK): with K = n = 2 the
    first turn's by 1/2 and the second's by 3/4. Another direction. Groups that are alike are left out, as above.
    """
    game = two_turns()
    parts = [credited(game, lambda path, _, k=k: [path.total * (turn == k) for turn in (0, 1)]) for k in (0, 1)]
    torch.testing.assert_close(parts[0] + parts[1], game.policy_gradient(), atol=1e-12, rtol=0)
    found = expected_gradient(game, comparing("dr_grpo", Turns.STEP), n=2)
    assert agrees(found, 1 / 2 * parts[0] + 3 / 4 * parts[1] - left_out_where_alike(game, 2))


def returns_to_go(path: Path) -> list[float]:
    return [sum(path.turn_rewards[k:]) for k in range(len(path.turn_rewards))]


def scored(own: float, other: float) -> float:
    """z of the first of two: half their difference over |difference|/√2, the unbiased deviation."""
    return (own - other) / 2 / (abs(own - other) / math.sqrt(2) + 1e-9)


def by_outcome(path: Path, other: Path) -> list[float]:
    return [scored(path.total, other.total)] * len(path.turn_rewards)


def by_return_to_go(path: Path, other: Path) -> list[float]:
    theirs = [*returns_to_go(other), 0.0, 0.0, 0.0]
    return [scored(own, theirs[k]) for k, own in enumerate(returns_to_go(path))]


def by_step(path: Path, other: Path) -> list[float]:
    if path.turn_rewards == other.turn_rewards:
        return [0.0] * len(path.turn_rewards)
    rewards = [*path.turn_rewards, *other.turn_rewards]
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / max(len(rewards) - 1, 1)) + 1e-9
    steps = [(reward - mean) / deviation for reward in path.turn_rewards]
    return [sum(steps[k:]) for k in range(len(steps))]


def mean_steps(path: Path, other: Path) -> list[float]:
    if path.turn_rewards == other.turn_rewards:
        return [0.0] * len(path.turn_rewards)
    rewards = [*path.turn_rewards, *other.turn_rewards]
    mean = sum(rewards) / len(rewards)
    return [to_go - (len(path.turn_rewards) - k) * mean for k, to_go in enumerate(returns_to_go(path))]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    ("name", "turns", "definition"),
    [
        ("group_norm", Turns.OUTCOME, by_outcome),
        ("group_norm", Turns.TO_GO, by_return_to_go),
        ("group_norm", Turns.STEP, by_step),
        ("dr_grpo", Turns.STEP, mean_steps),
    ],
)
def test_biased_credit_is_what_its_formula_says(task, name, turns, definition):
    """None of these is a multiple of g[R] in every game. Written out for pairs, their expected gradients are theirs."""
    game = TASKS[task]()
    found = expected_gradient(game, comparing(name, turns), n=2)
    assert agrees(found, credited(game, definition))
    if task == "up to three turns":
        true = game.policy_gradient()
        cosine = float((found * true).sum() / (found.norm() * true.norm()))
        assert cosine < 0.999


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("lambd", [0.0, 0.5, 0.95, 1.0])
def test_gae_with_the_true_values_is_unbiased_for_every_lambda(task, lambd):
    """γ = 1. If V is the true value function, E[δ_k | h_k] = 0 for every k, whatever came before; so of the sum
    A_t = Σ_{k≥t} λ^(k−t) δ_k only E[δ_t | h_t, a_t] = Q(h_t, a_t) − V(h_t) is left, for every λ. V drops out by (*)
    and Q is the expectation of R_t: g[R]. V at the end of the first turn is that of the next action token's history,
    the environment's token included.
    """
    game = TASKS[task]()
    found = expected_gradient(game, with_critic(game.values(1.0), gamma=1.0, lambd=lambd), n=1)
    assert agrees(found, game.policy_gradient())


@pytest.mark.parametrize("task", TASKS)
def test_gae_with_lambda_one_is_unbiased_whatever_the_critic_says(task):
    """λ = 1: the values in between cancel, A_t = R_t − V(h_t), and V(h_t) drops out by (*). With λ = 0 they do not:
    a wrong critic is then believed."""
    game = TASKS[task]()
    wrong = torch.linspace(-1, 2, len(game.logits), dtype=torch.float64)
    found = expected_gradient(game, with_critic(wrong, gamma=1.0, lambd=1.0), n=1)
    assert agrees(found, game.policy_gradient())
    believing = expected_gradient(game, with_critic(wrong, gamma=1.0, lambd=0.0), n=1)
    assert not agrees(believing, game.policy_gradient())


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("lambd", [0.0, 0.7])
def test_discounted_gae_has_the_gradient_of_discounted_returns(task, lambd):
    """γ = 0.8, V the true discounted values: as above, E[A_t | h_t, a_t] = Q^γ − V^γ for every λ, which has the same
    expected gradient as A_t = R_t^γ: Σ_t E[R_t^γ ∇log π_t]. With f_t the discounted return from token t on, that is
    written down token by token; it is not g of any discounted total, since later tokens are not discounted for being
    late.
    """
    game = TASKS[task]()
    found = expected_gradient(game, with_critic(game.values(0.8), gamma=0.8, lambd=lambd), n=1)
    plain = expected_gradient(game, reinforce(gamma=0.8), n=1)
    expected = torch.zeros_like(game.logits)
    for p, path in zip(game.probabilities(), game.paths, strict=True):
        for t, (row, action) in enumerate(zip(path.rows, path.actions, strict=True)):
            to_come = sum(0.8**k * reward for k, reward in enumerate(path.rewards[t:]))
            # ∇ of a log-softmax: one at the action, less the probabilities of all.
            expected[row] -= p.detach() * to_come * game.logits[row].softmax(-1).detach()
            expected[row, action] += p.detach() * to_come
    assert agrees(plain, expected)
    assert agrees(found, expected)


def test_grpo_of_two_samples_is_the_gradient_of_winning():
    """n = 2: R_1 − mean = (R_1 − R_2)/2 and the unbiased deviation is |R_1 − R_2|/√2, so A_1 = sign(R_1 − R_2)/√2.

    By (**), the expected gradient is g[f] with f(τ) = (P(R' < R(τ)) − P(R' > R(τ))) / √2: how much oftener τ wins
    against the policy itself than it loses. How much it wins by does not count. The 1e-9 beside the deviation moves
    it by 1e-8 at most.
    """
    game = single_turn()
    chances = [p.item() for p in game.probabilities()]

    def wins(path: Path) -> float:
        outcomes = list(zip(chances, [other.total for other in game.paths], strict=True))
        won = sum(p for p, total in outcomes if total < path.total)
        lost = sum(p for p, total in outcomes if total > path.total)
        return (won - lost) / math.sqrt(2)

    found = expected_gradient(game, comparing("group_norm"), n=2)
    expected = game.gradient_of(wins)
    assert expected.norm() > 1e-2
    torch.testing.assert_close(found, expected, atol=1e-8, rtol=0)


def binomial(k: int, n: int, p: float) -> float:
    return math.comb(n, k) * p**k * (1 - p) ** (n - k)


def success_gap(n: int, p: float, right: Callable[[int], float], wrong: Callable[[int], float]) -> float:
    """E[A | this one is right] − E[A | it is wrong], with A a function of the number k of right samples in the group;
    of the other n − 1, a binomial number is right."""
    chances = [binomial(j, n - 1, p) for j in range(n)]
    return sum(q * (right(j + 1) - wrong(j)) for j, q in enumerate(chances))


def test_grpo_of_right_and_wrong_answers_reweighs_the_gradient():
    """Rewards 0 and 1, k of n right: mean k/n, unbiased variance k(n−k) / (n(n−1)); for 0 < k < n

        A_right = √((n−1)(n−k) / (n k)),   A_wrong = −√((n−1) k / (n (n−k))),   else 0.

    A depends on τ_i through R_i alone, so by (**) the expected gradient is g[f] with f two-valued: f_right for right
    and f_wrong for wrong answers, each the mean of A over the others. g of a constant is 0, so it is
    (f_right − f_wrong) · g[R]: the exact direction, times a factor of the success rate p.
    """
    n, game = 3, equal_lengths([1.0, 0.0, 0.0, 1.0])
    p = sum(q.item() * path.total for q, path in zip(game.probabilities(), game.paths, strict=True))
    factor = success_gap(
        n,
        p,
        right=lambda k: math.sqrt((n - 1) * (n - k) / (n * k)),
        wrong=lambda k: -math.sqrt((n - 1) * k / (n * (n - k))),
    )
    found = expected_gradient(game, comparing("group_norm"), n=n)
    torch.testing.assert_close(found, factor * game.policy_gradient(), atol=1e-8, rtol=0)
    assert game.policy_gradient().norm() > 1e-2


@pytest.mark.parametrize("n", [2, 3])
def test_gdpo_is_the_weighted_sum_of_grpo_s_gradients(n):
    """Of two rewards, R and |R − ½| with weights 2 and −½, each compared by itself: before whitening, the gradient of
    the sum is that of GRPO under each reward, weighed. Under the z-score of their sum it is another."""
    game = equal_lengths([0.3, 1.0, -0.5, 0.8])
    values = {path: (path.total, abs(path.total - 0.5)) for path in game.paths}
    weights = torch.tensor([2.0, -0.5], dtype=torch.float64)

    def advantages(group: Sequence[Path]) -> Tensor:
        earned = torch.tensor([values[path] for path in group], dtype=torch.float64)
        found = part_advantages(earned, weights.expand(len(group), 2), get_estimator("gdpo").shape)
        return found.repeat_interleave(2)

    def under(rewards: list[float]) -> Tensor:
        other = equal_lengths(rewards)
        return expected_gradient(other, comparing("group_norm"), n=n)

    found = expected_gradient(game, advantages, n=n)
    by_part = [under([values[path][p] for path in game.paths]) for p in (0, 1)]
    assert agrees(found, 2 * by_part[0] - 0.5 * by_part[1])
    summed = under([2 * a - 0.5 * b for a, b in values.values()])
    assert (found - summed).norm() > 1e-2


@pytest.mark.parametrize("n", [2, 3, 4])
def test_maxrl_is_the_gradient_of_the_first_terms_of_maximum_likelihood(n):
    """Rewards 0 and 1, k of n right: A_right = (n − k)/k, A_wrong = −1 for k > 0, and 0 where nobody is right.

    With S_i = Σ_t ∇log π_t of sample i, (1/n) Σ A_i S_i = (1/k) Σ_right S_i − (1/n) Σ S_i. As p = E[R], ∇p = E[R S]:
    the first part is on average (1 − (1 − p)ⁿ)/p ∇p, for E[R_1/k] = P(k > 0)/n and n E[R_1 S_1/k] is its derivative
    along one sample; the second is Σ S_i/n where k > 0, on average −∇(1 − p)ⁿ/n = (1 − p)^(n−1) ∇p. Together

        (Σ_{j < n} (1 − p)^j − (1 − p)^(n−1)) ∇p = Σ_{j ≤ n−2} (1 − p)^j ∇p,

    which is ∇ Σ_{j=1..n−1} pass@j / j, pass@j = 1 − (1 − p)^j: the first n − 1 terms of ∇log p = ∇p / p.
    """
    game = equal_lengths([1.0, 0.0, 0.0, 1.0])
    p = sum(q.item() * path.total for q, path in zip(game.probabilities(), game.paths, strict=True))
    found = expected_gradient(game, comparing("maxrl"), n=n)
    assert agrees(found, sum((1 - p) ** j for j in range(n - 1)) * game.policy_gradient())


@pytest.mark.parametrize(("n", "k"), [(3, 1), (3, 2), (4, 2), (4, 3)])
def test_pass_at_k_training_reweighs_the_gradient(n, k):
    """Rewards 0 and 1: by the paper's equations A depends on τ_i through R_i and the number c of right samples alone,
    so as for GRPO the expected gradient is success_gap · g[R]: the exact direction, and the size of pass@k's."""
    game = equal_lengths([1.0, 0.0, 0.0, 1.0])
    p = sum(q.item() * path.total for q, path in zip(game.probabilities(), game.paths, strict=True))

    def advantage(c: int, right: bool) -> float:
        mean = 1 - math.comb(n - c, k) / math.comb(n, k)
        if not 0 < mean < 1:
            return 0.0
        lost = 0.0 if right else math.comb(n - c - 1, k - 1) / math.comb(n - 1, k - 1)
        return (1 - mean - lost) / math.sqrt(mean * (1 - mean))

    factor = success_gap(n, p, right=lambda c: advantage(c, True), wrong=lambda c: advantage(c, False))
    found = expected_gradient(game, comparing("pass_at_k", k=k), n=n)
    assert agrees(found, factor * game.policy_gradient())


def test_whitened_returns_of_right_and_wrong_answers():
    """reinforce, its round being n responses of equal lengths: the tokens' mean and population variance are k/n and
    k(n−k)/n², so A_right = √((n−k)/k), A_wrong = −√(k/(n−k)): GRPO's times √(n/(n−1)). The rest as above."""
    n, game = 3, equal_lengths([1.0, 0.0, 0.0, 1.0])
    p = sum(q.item() * path.total for q, path in zip(game.probabilities(), game.paths, strict=True))
    factor = success_gap(
        n,
        p,
        right=lambda k: math.sqrt((n - k) / k),
        wrong=lambda k: -math.sqrt(k / (n - k)),
    )
    found = expected_gradient(game, whitened(reinforce()), n=n)
    assert agrees(found, factor * game.policy_gradient())


def test_whitening_by_the_mean_alone_is_a_baseline():
    """Without the division, and with responses of equal lengths, the tokens' mean is the mean of the totals: the case
    of the mean that includes the sample, (n−1)/n · g[R]."""
    game = equal_lengths([0.3, -1.0, 2.0, 0.5])
    found = expected_gradient(game, whitened(reinforce(), divide_by_std=False), n=3)
    assert agrees(found, 2 / 3 * game.policy_gradient())


def test_whitening_over_two_groups():
    """reinforce_baseline with two prompts of two samples: the shaped rewards are ±d/2 and ±e/2, d = R_1 − R_2 and
    e = R_3 − R_4; mean 0, population variance (2 d²/4 + 2 e²/4) / 4 = (d² + e²)/8. So A_1 = √2 d / √(d² + e²), and by
    symmetry and (**) the expected gradient is g[f], f(τ) = √2 E[(R(τ) − R_2) / √((R(τ) − R_2)² + (R_3 − R_4)²)] over
    the other three; 0/0 = 0."""
    game = equal_lengths([0.3, -1.0, 2.0, 0.5])
    chances = [p.item() for p in game.probabilities()]
    outcomes = list(zip(chances, [path.total for path in game.paths], strict=True))

    def f(path: Path) -> float:
        result = 0.0
        for (p, second), (q, third), (r, fourth) in itertools.product(outcomes, repeat=3):
            d = path.total - second
            if d:
                result += p * q * r * math.sqrt(2) * d / math.hypot(d, third - fourth)
        return result

    shaped = comparing("reinforce_baseline")
    two_groups = whitened(lambda round_: torch.cat([shaped(round_[:2]), shaped(round_[2:])]))
    assert agrees(expected_gradient(game, two_groups, n=4), game.gradient_of(f))


@pytest.mark.parametrize(
    ("name", "divergence"),
    [
        ("k1", lambda policy, reference: 0.0 * policy.sum()),
        ("k2", lambda policy, reference: (policy.exp() * (policy - reference)).sum()),
        ("k3", lambda policy, reference: (reference.exp() * (reference - policy)).sum()),
    ],
)
def test_kl_estimates_as_losses_have_the_documented_gradients(name, divergence):
    """With d = log π − log q and a ~ π, E[∇k1] = E[∇log π] = 0; E[∇k2] = E[d ∇log π] = ∇KL(π‖q), whose other term is
    E[∇log π] = 0; E[∇k3] = E[(1 − q/π) ∇log π] = −Σ q ∇log π = ∇KL(q‖π)."""
    generator = torch.Generator().manual_seed(1)
    logits, other = torch.randn(2, VOCABULARY, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    policy, reference = logits.log_softmax(-1), other.log_softmax(-1)
    expected_loss = (policy.detach().exp() * get_kl_estimator(name)(policy, reference)).sum()
    (found,) = torch.autograd.grad(expected_loss, logits, retain_graph=True)
    (expected,) = torch.autograd.grad(divergence(policy, reference), logits)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    assert (expected.norm() > 1e-2) == (name != "k1")


@pytest.mark.parametrize(
    ("name", "low", "high", "weight"),
    [
        ("tis", 0.0, math.inf, lambda w: w),
        ("tis", 0.0, 1.1, lambda w: min(w, 1.1)),
        ("icepop", 0.3, 2.0, lambda w: w if 0.3 <= w <= 2.0 else 0.0),
    ],
)
def test_corrected_gradients_of_another_sampler(name, low, high, weight):
    """One token a ~ μ, trained at π, w = π/μ. Unbounded, E_μ[w R ∇log π] = E_π[R ∇log π] = g[R]: unbiased. Bounded, it
    is Σ_a μ(a) weight(w) R(a) ∇log π(a), with ∇log π(a) = (one at a) − π."""
    generator = torch.Generator().manual_seed(2)
    logits, sampler = torch.randn(2, VOCABULARY, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    rewards = torch.tensor([1.0, -0.5, 0.3], dtype=torch.float64)
    policy, rollout = logits.log_softmax(-1), sampler.log_softmax(-1)
    tokens = torch.arange(VOCABULARY)
    weights = get_correction(name)(CorrectionInputs(policy, rollout, tokens), low=low, high=high).weights_A
    loss = get_policy_loss("ppo").function(
        LossInputs(policy, policy.detach(), rewards, tokens), LossSettings(clip_low=0.2, clip_high=0.2)
    )
    (found,) = torch.autograd.grad(-(rollout.exp() * weights * loss.loss_A).sum(), logits, retain_graph=True)

    pi, mu = policy.detach().exp(), rollout.exp()
    expected = sum(
        mu[a] * weight(float(pi[a] / mu[a])) * rewards[a] * (torch.eye(VOCABULARY)[a] - pi) for a in range(VOCABULARY)
    )
    assert agrees(found, expected)
    if high == math.inf:
        assert agrees(found, torch.autograd.grad((policy.exp() * rewards).sum(), logits)[0])
    else:
        assert weights.tolist() != pytest.approx((pi / mu).tolist())


# ------------------------------------------------------------------------------------------------- cut distributions


def kept_by(logits: Tensor, *, top_k: int = 0, top_p: float = 1.0) -> list[list[int]]:
    """What top-k, or top-p, leaves of the distribution of each history."""
    kept = []
    for row in logits.detach().softmax(-1).tolist():
        likeliest, mass, own = sorted(range(len(row)), key=lambda v: -row[v]), 0.0, []
        for token in likeliest[: top_k or len(row)]:
            if mass < top_p:
                own.append(token)
            mass += row[token]
        kept.append(sorted(own))
    return kept


def over(kept: list[list[int]], logits: Tensor) -> Tensor:
    """log π of every token, over what is kept of its row; −∞ for the rest."""
    outside = torch.ones_like(logits, dtype=torch.bool)
    for row, own in enumerate(kept):
        outside[row, own] = False
    return logits.masked_fill(outside, -math.inf).log_softmax(-1)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("cut", [{"top_k": 2}, {"top_k": 1}, {"top_p": 0.6}])
@pytest.mark.parametrize("moved", [0.0, 0.3])
def test_what_is_sampled_from_a_cut_distribution_teaches_that_distribution(task, cut, moved):
    """q_θ(τ) = Π_t softmax over S_t, the set that top-k or top-p leaves after τ's first tokens. By (**) with q for π,
    E_q[R Σ_t ∇log q(a_t|h_t)] = ∇_θ Σ_τ q_θ(τ) R(τ): S_t does not move with θ, almost everywhere. In a later step of
    the round θ has moved and S_t is still the one that was sampled from, so with ρ = q_θ / q_old of the whole response
    E_old[ρ R Σ_t ∇log q] = ∇_θ Σ_τ q_θ(τ) R(τ) as well. ∇log q is that of the trainer's head, in fp32; the head of a
    table is the table, and the state of a history is its unit vector. A softmax over everything gives another gradient.
    """
    game = TASKS[task]()
    kept = kept_by(game.logits, **cut)
    old = over(kept, game.logits).detach()
    generator = torch.Generator().manual_seed(3)
    logits = (game.logits + moved * torch.randn(game.logits.shape, generator=generator)).detach().requires_grad_()

    def chance(table: Tensor, path: Path) -> Tensor:
        return path.luck * table[list(path.rows), list(path.actions)].sum().exp()

    wanted = sum(chance(over(kept, logits), path) * path.total for path in game.paths)
    (definition,) = torch.autograd.grad(wanted, logits)

    def expected(*, masked: bool) -> Tensor:
        total = torch.zeros_like(logits)
        for path in game.paths:
            if not (sampled := float(chance(old, path))):
                continue
            weight = logits.detach().t().float().requires_grad_()
            hidden = torch.eye(len(logits))[list(path.rows)]
            supports = Supports.of([kept[row] for row in path.rows]) if masked else None
            column = chunked_logprobs(hidden, weight, torch.tensor(path.actions), supports=supports, tile=(2, 2))
            ratio = float(column.logprobs_A.detach().sum().exp()) * path.luck / sampled
            (own,) = torch.autograd.grad(column.logprobs_A.sum(), weight)
            total += sampled * ratio * path.total * own.t()
        return total

    torch.testing.assert_close(expected(masked=True), definition, rtol=1e-4, atol=1e-6)
    if any(len(own) < logits.shape[1] for own in kept):
        assert (expected(masked=False) - definition).norm() > 0.02 * definition.norm()
