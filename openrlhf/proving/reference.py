"""The reference side of proofs: the definitions, written for clarity. No packing, one sample at a time, whole logits.

It shares nothing with the code that trains: models are as transformers loads them, formulas are loops over Python
numbers or plain autograd. Only settings (`config`) and records of samples (`types`) are read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from openrlhf.types import Segment

_ADAPTER = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.default\.weight")


# ---------------------------------------------------------------------------------------------------- models


class PlainModel:
    """A model as transformers loads it, in fp32 with eager attention. It reads one sequence at a time."""

    def __init__(self, folder: str, *, kind: str, device: torch.device, trust_remote_code: bool) -> None:
        """`kind`: `text`, `images`, or `body` for a model without a language head."""
        import transformers

        loader: Any = {
            "text": transformers.AutoModelForCausalLM,
            "images": transformers.AutoModelForImageTextToText,
            "body": transformers.AutoModel,
        }[kind]
        model = loader.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", trust_remote_code=trust_remote_code
        )
        self.model = model.to(device).eval()
        self._banned = never_sampled(model.config)
        self.device = device
        self._leaves: dict[str, Tensor] = {}
        """Name in the trained model → the tensor whose gradient is asked for."""
        self._scaling = 1.0

    def take_weights(self, named: Mapping[str, Tensor], trained: Sequence[str], *, scaling: float = 1.0) -> None:
        """The weights of the trained model, by the names that they have there. Those of `trained` are learnt.

        Of an adapter: W + scaling · B A takes the place of W, where A and B are the ones beside it.
        """
        self._leaves, self._scaling = {}, scaling
        own = dict(self.model.named_parameters(remove_duplicate=False))
        for name, tensor in named.items():
            if _ADAPTER.fullmatch(name):
                self._leaves[name] = tensor.detach().float().to(self.device).clone().requires_grad_(name in trained)
            else:
                target = own[name.replace(".base_layer", "")]
                with torch.no_grad():
                    target.copy_(tensor)
                target.requires_grad_(name in trained)
                if name in trained:
                    self._leaves[name] = target
        for target in own.values():
            if not any(target is leaf for leaf in self._leaves.values()):
                target.requires_grad_(False)

    def _changed(self) -> dict[str, Tensor]:
        """Weights that an adapter changes, by name: W + scaling · B A."""
        changed = {}
        for name, leaf in self._leaves.items():
            found = _ADAPTER.fullmatch(name)
            if found and found["side"] == "A":
                weight = f"{found['module']}.weight"
                other = self._leaves[f"{found['module']}.lora_B.default.weight"]
                changed[weight] = self.model.get_parameter(weight) + self._scaling * other @ leaf
        return changed

    def outputs(self, token_ids: Tensor, **inputs: Any) -> Any:
        """The model's own output for one sequence."""
        arguments = {"input_ids": token_ids[None].to(self.device), "use_cache": False, **inputs}
        return functional_call(self.model, self._changed(), kwargs=arguments)

    def logits(self, token_ids: Tensor, **inputs: Any) -> Tensor:
        """float32 [T, V]; tokens that stand for images have no probability."""
        logits = self.outputs(token_ids, **inputs).logits[0].float()
        return logits.index_fill(1, torch.tensor(self._banned, device=logits.device), -1e9) if self._banned else logits

    def hidden(self, token_ids: Tensor, **inputs: Any) -> Tensor:
        """float32 [T, D], of a body."""
        return self.outputs(token_ids, **inputs).last_hidden_state[0].float()

    def gradients(self) -> dict[str, Tensor]:
        """By the names of the trained model; zeros where nothing arrived. They are forgotten here."""
        found = {}
        for name, leaf in self._leaves.items():
            if leaf.requires_grad:
                found[name] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.clone()
                leaf.grad = None
        return found


def never_sampled(config: Any) -> list[int]:
    """The tokens that stand for images, videos or sound."""
    if getattr(config, "vision_config", None) is None:
        return []
    names = [f"{kind}_token_{end}" for kind in ("image", "video", "audio") for end in ("id", "index")]
    found = {getattr(config, name, None) for name in names}
    size = config.get_text_config().vocab_size
    return sorted(token for token in found if isinstance(token, int) and 0 <= token < size)


def over_supports(logits_TV: Tensor, segment: Segment) -> Tensor:
    """The logits that a token of the segment was sampled by: −∞ for what it was not chosen among."""
    if segment.supports is None:
        return logits_TV
    outside_TV = torch.zeros(logits_TV.shape, dtype=torch.bool)
    positions = segment.action_mask.nonzero().flatten().tolist()
    for position, token_ids in zip(positions, segment.supports.tolist(), strict=True):
        if token_ids:
            outside_TV[position - 1] = True
            outside_TV[position - 1, token_ids] = False
    return logits_TV.masked_fill(outside_TV.to(logits_TV.device), -math.inf)


def logprobs(logits_TV: Tensor, token_ids: Tensor, *, temperature: float = 1.0) -> Tensor:
    """float32 [T]: log softmax(logits / temperature) of each token given those before it; 0 for the first."""
    scaled = logits_TV[:-1] / (temperature or 1.0)
    picked = torch.log_softmax(scaled, dim=-1).gather(1, token_ids[1:, None].to(scaled.device))[:, 0]
    return torch.cat([picked.new_zeros(1), picked])


def entropies(logits_TV: Tensor, *, temperature: float = 1.0) -> Tensor:
    """float32 [T]: −Σ p log p of the distribution that each token was drawn from; 0 for the first."""
    log_p = whole_logprobs(logits_TV, temperature=temperature)[1:]
    # 0 · log 0 = 0, and so is its gradient.
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == -math.inf, 0.0)).sum(-1)
    return torch.cat([entropy.new_zeros(1), entropy])


def whole_logprobs(logits_TV: Tensor, *, temperature: float = 1.0) -> Tensor:
    """float32 [T, V]: log softmax(logits / temperature) that each token was drawn from; 0 for the first."""
    log_p = torch.log_softmax(logits_TV[:-1] / (temperature or 1.0), dim=-1)
    return torch.cat([log_p.new_zeros(1, log_p.shape[1]), log_p])


# ------------------------------------------------------------------------------------------------ advantages


@dataclass
class PlainEpisode:
    """One judged sample: its turns, each a list of token positions, and what each turn has earned."""

    group: tuple[int, str]
    """Its prompt and its agent: those of the same are compared."""
    turns: list[int]
    """Action tokens of each turn."""
    rewards: list[float]
    """One per turn."""
    truncated: bool = False
    greedy: float = 0.0
    """The reward of the prompt's greedy sample, where one is played."""
    parts: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Value and weight of each reward by name, where there are several."""

    @property
    def tokens(self) -> int:
        return sum(self.turns)


def shaped_rewards(episode: PlainEpisode, config: Any) -> list[float]:
    """Overlong penalty, then the stop-properly penalty, then the clip."""
    rewards, section = list(episode.rewards), config.reward
    limit = config.rollout.max_new_tokens or config.data.max_len
    if section.overlong_buffer_len is not None:
        for turn, length in enumerate(episode.turns):
            over = min(length - (limit - section.overlong_buffer_len), section.overlong_buffer_len)
            if over > 0:
                rewards[turn] -= section.overlong_penalty_factor * over / section.overlong_buffer_len
    keep = section.stop_properly_penalty_coef
    if keep is not None and episode.truncated:
        rewards = [r * keep for r in rewards] if keep >= 0 else [0.0] * (len(rewards) - 1) + [keep]
    low, high = section.clip_range
    last = len(rewards) - 1
    return [min(max(r, low), high) if r != 0 or turn == last else r for turn, r in enumerate(rewards)]


def advantages(
    episodes: Sequence[PlainEpisode],
    config: Any,
    *,
    kl_costs: Sequence[Sequence[float]] | None = None,
    values: Sequence[Sequence[float]] | None = None,
) -> list[list[float]]:
    """One number per action token of each episode, by the estimator that the flags name.

    `kl_costs`: coefficient · KL of each action token, where that is a part of the reward. `values`: a critic's.
    """
    estimator = config.algo.advantage.estimator
    rewards = [shaped_rewards(episode, config) for episode in episodes]
    costs = kl_costs or [[0.0] * episode.tokens for episode in episodes]
    if estimator in ("gae", "reinforce", "remax"):
        per_token = []
        for episode, earned, cost in zip(episodes, rewards, costs, strict=True):
            column = []
            for length, reward in zip(episode.turns, earned, strict=True):
                column += [0.0] * (length - 1) + [reward]
            per_token.append([r - k for r, k in zip(column, cost, strict=True)])
        gamma = config.algo.advantage.gamma
        if estimator == "gae":
            assert values is not None
            found = [_gae(r, v, gamma, config.algo.advantage.lambd) for r, v in zip(per_token, values, strict=True)]
        else:
            found = [_returns(r, gamma) for r in per_token]
        if estimator == "remax":
            low, high = config.reward.clip_range
            pairs = zip(found, episodes, strict=True)
            return [[x - min(max(episode.greedy, low), high) for x in row] for row, episode in pairs]
        return _whitened(found, divide=not config.algo.advantage.no_std_norm)
    compared = _compared(episodes, rewards, config)
    found = [[a - k for a, k in zip(c, _returns(k, 1.0), strict=True)] for c, k in zip(compared, costs, strict=True)]
    if estimator in ("reinforce_baseline", "gdpo"):
        return _whitened(found, divide=not config.algo.advantage.no_std_norm)
    return found


def _returns(rewards: Sequence[float], gamma: float) -> list[float]:
    result, following = [], 0.0
    for reward in reversed(rewards):
        following = reward + gamma * following
        result.append(following)
    return result[::-1]


def _gae(rewards: Sequence[float], values: Sequence[float], gamma: float, lambd: float) -> list[float]:
    result, following, next_value = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        following = reward + gamma * next_value - value + gamma * lambd * following
        next_value = value
        result.append(following)
    return result[::-1]


def returns_of(advantages: Sequence[Sequence[float]], values: Sequence[Sequence[float]]) -> list[list[float]]:
    """What a critic learns: A + V, before A is whitened."""
    return [[a + v for a, v in zip(row, own, strict=True)] for row, own in zip(advantages, values, strict=True)]


def unwhitened_gae(
    episodes: Sequence[PlainEpisode],
    config: Any,
    values: Sequence[Sequence[float]],
    kl_costs: Sequence[Sequence[float]] | None,
) -> list[list[float]]:
    costs = kl_costs or [[0.0] * episode.tokens for episode in episodes]
    found = []
    for episode, value, cost in zip(episodes, values, costs, strict=True):
        column: list[float] = []
        for length, reward in zip(episode.turns, shaped_rewards(episode, config), strict=True):
            column += [0.0] * (length - 1) + [reward]
        earned = [r - k for r, k in zip(column, cost, strict=True)]
        found.append(_gae(earned, value, config.algo.advantage.gamma, config.algo.advantage.lambd))
    return found


def _whitened(columns: Sequence[Sequence[float]], *, divide: bool) -> list[list[float]]:
    every = [x for column in columns for x in column]
    mean = sum(every) / len(every)
    variance = sum((x - mean) ** 2 for x in every) / len(every)
    if variance <= (4 * 2.0**-23 * mean) ** 2:
        return [[0.0] * len(column) for column in columns]
    scale = math.sqrt(max(variance, 1e-8)) if divide else 1.0
    return [[(x - mean) / scale for x in column] for column in columns]


def _compared(episodes: Sequence[PlainEpisode], rewards: Sequence[Sequence[float]], config: Any) -> list[list[float]]:
    """Every episode with those of its own prompt, and no others."""
    result: list[list[float]] = [[] for _ in episodes]
    for group in dict.fromkeys(episode.group for episode in episodes):
        members = [i for i, episode in enumerate(episodes) if episode.group == group]
        if config.algo.advantage.estimator == "gdpo":
            every = _decoupled([episodes[i] for i in members], config)
            per_turn = [[a] * len(episodes[i].turns) for a, i in zip(every, members, strict=True)]
        else:
            per_turn = _turn_advantages([rewards[i] for i in members], config)
        for i, row in zip(members, per_turn, strict=True):
            result[i] = [a for a, length in zip(row, episodes[i].turns, strict=True) for _ in range(length)]
    return result


def _decoupled(episodes: Sequence[PlainEpisode], config: Any) -> list[float]:
    """Σ over named rewards of weight times z-score; the penalty on length is a reward of its own, and so is what a
    truncated episode is left with where that is below 0."""
    section, tables = config.reward, []
    for episode in episodes:
        table = dict(episode.parts) or {"the reward": (sum(episode.rewards), 1.0)}
        if section.overlong_buffer_len is not None:
            bare = PlainEpisode(group=episode.group, turns=episode.turns, rewards=[0.0] * len(episode.turns))
            free = dataclasses.replace(section, stop_properly_penalty_coef=None, clip_range=(-math.inf, math.inf))
            table["length"] = (sum(shaped_rewards(bare, dataclasses.replace(config, reward=free))), 1.0)
        keep = section.stop_properly_penalty_coef
        if keep is not None and episode.truncated:
            table = {name: (max(keep, 0.0) * value, weight) for name, (value, weight) in table.items()}
            table["the end"] = (min(keep, 0.0), 1.0)
        low, high = section.clip_range
        tables.append({name: (min(max(value, low), high), weight) for name, (value, weight) in table.items()})
    result = [0.0] * len(episodes)
    for name in dict.fromkeys(name for table in tables for name in table):
        values = [table.get(name, (0.0, 0.0))[0] for table in tables]
        weight = next(table[name][1] for table in tables if name in table)
        norms = _normalised(values, list(range(len(values))), "group_norm", [abs(v) for v in values], 1)
        result = [a + weight * norm for a, norm in zip(result, norms, strict=True)]
    return result


def _turn_advantages(rewards: Sequence[Sequence[float]], config: Any) -> list[list[float]]:
    section = config.algo.advantage
    estimator, pass_k, turns = section.estimator, section.pass_k, section.turns or "outcome"
    if turns == "outcome":
        totals = [sum(row) for row in rewards]
        sizes = [sum(map(abs, row)) for row in rewards]
        norms = _normalised(totals, list(range(len(totals))), estimator, sizes, pass_k)
        return [[norm] * len(row) for norm, row in zip(norms, rewards, strict=True)]
    longest = max(map(len, rewards))
    if turns == "to_go":
        columns = []
        for k in range(longest):
            to_go = [sum(row[k:]) for row in rewards]
            sizes = [sum(map(abs, row[k:])) for row in rewards]
            columns.append(_normalised(to_go, list(range(len(to_go))), estimator, sizes, pass_k))
        return [[columns[k][i] for k in range(len(row))] for i, row in enumerate(rewards)]
    lengths = {len(row) for row in rewards}
    if len(lengths) == 1 and all(_agree([row[k] for row in rewards]) for k in range(longest)):
        return [[0.0] * len(row) for row in rewards]
    every = [r for row in rewards for r in row]
    owners = [i for i, row in enumerate(rewards) for _ in row]
    every_norm = iter(_normalised(every, owners, estimator, [abs(r) for r in every], pass_k))
    return [_returns([next(every_norm) for _ in row], 1.0) for row in rewards]


def _agree(values: Sequence[float], sizes: Sequence[float] | None = None) -> bool:
    """Whether they differ by no more than the rounding of the float32 numbers that they were added up from."""
    largest = max(sizes if sizes is not None else [abs(v) for v in values])
    return max(values) - min(values) <= 4 * 2.0**-23 * largest


def _normalised(
    values: Sequence[float], owners: Sequence[int], estimator: str, sizes: Sequence[float], pass_k: int
) -> list[float]:
    if _agree(values, sizes):
        return [0.0] * len(values)
    mean = sum(values) / len(values)
    if estimator == "pass_at_k":
        return _best_of_subsets(values, pass_k)
    if estimator == "rloo":
        result = []
        for value, owner in zip(values, owners, strict=True):
            others = [v for v, o in zip(values, owners, strict=True) if o != owner]
            result.append(value - sum(others) / len(others))
        return result
    centred = [value - mean for value in values]
    if estimator == "group_norm":
        spread = math.sqrt(sum(c * c for c in centred) / (len(values) - 1)) + 1e-9
        return [c / spread for c in centred]
    if estimator == "maxrl":
        return [c / mean if mean > 4 * 2.0**-23 * max(map(abs, values)) else 0.0 for c in centred]
    return centred


def _best_of_subsets(values: Sequence[float], k: int) -> list[float]:
    """Every subset of k earns what its best member did; a member has the mean of its subsets, less the mean of all,
    in units of the standard deviation of all."""
    if len(values) <= k:
        return [0.0] * len(values)
    subsets = list(itertools.combinations(range(len(values)), k))
    earned = [max(values[i] for i in subset) for subset in subsets]
    mean = sum(earned) / len(earned)
    spread = math.sqrt(sum((e - mean) ** 2 for e in earned) / len(earned))
    if spread <= 4 * 2.0**-23 * max(map(abs, values)):
        return [0.0] * len(values)
    result = []
    for i in range(len(values)):
        own = [e for e, subset in zip(earned, subsets, strict=True) if i in subset]
        result.append((sum(own) / len(own) - mean) / spread)
    return result


# ---------------------------------------------------------------------------------------------------- losses


@dataclass
class PlainSample:
    """The action tokens of one sequence, and the numbers that belong to them."""

    episode: int
    prompt: int
    current: Tensor
    """log π with gradient, [A]"""
    old: Tensor
    advantages: Tensor
    rollout: Tensor | None = None
    reference: Tensor | None = None
    entropy: Tensor | None = None
    key: tuple[int, ...] = ()
    """(prompt, sample, segment)"""
    whole: Tensor | None = None
    """log π of every token of the vocabulary, with gradient, [A, V]; None without a teacher whose word is a loss."""
    teacher: Tensor | None = None
    """log p of the tokens that the policy has too, [A, V']"""


def policy_loss(samples: Sequence[PlainSample], config: Any, *, kl_coef: float) -> Tensor:
    """The loss of one optimizer step, by the flags: policy loss, correction, reduction, KL and entropy."""
    lengths: dict[int, int] = {}
    prompts: dict[int, int] = {}
    for sample in samples:
        lengths[sample.episode] = lengths.get(sample.episode, 0) + len(sample.current)
        prompts[sample.prompt] = prompts.get(sample.prompt, 0) + len(sample.current)
    total, regulariser = torch.zeros(()), torch.zeros(())
    for sample, chosen in zip(samples, _chosen(samples, config.actor.policy_loss_type), strict=True):
        token_losses = _token_losses(sample, config, chosen)
        weight = _weight(config.loss_aggregation, lengths, prompts, sample, config)
        total = total + weight * token_losses.sum().cpu()
        weight = _weight(config.regulariser_aggregation, lengths, prompts, sample, config)
        if sample.reference is not None and config.algo.kl.use_loss:
            kl = kl_estimate(sample.current - sample.reference, config.algo.kl.estimator)
            regulariser = regulariser + weight * kl_coef * kl.sum().cpu()
        if sample.whole is not None and sample.teacher is not None:
            apart = divergence(config.teacher.loss, sample.whole, sample.teacher, k=config.teacher.top_k)
            regulariser = regulariser + weight * config.teacher.coef * apart.sum().cpu()
        if sample.entropy is not None and config.actor.entropy_coef:
            regulariser = regulariser - weight * config.actor.entropy_coef * sample.entropy.sum().cpu()
    return total + regulariser


def _weight(
    aggregation: str, lengths: Mapping[int, int], prompts: Mapping[int, int], sample: PlainSample, config: Any
) -> float:
    """What each token of a sample weighs, in the whole step."""
    if aggregation == "token":
        return 1.0 / sum(lengths.values())
    if aggregation == "sequence":
        return 1.0 / (len(lengths) * lengths[sample.episode])
    if aggregation == "prompt_mean":
        return 1.0 / (len(prompts) * prompts[sample.prompt])
    if aggregation == "token_sum":
        return 1.0 / len(lengths)
    return 1.0 / (len(lengths) * (config.rollout.max_new_tokens or config.data.max_len))


def divergence(name: str, policy_AV: Tensor, teacher_AV: Tensor, *, k: int) -> Tensor:
    """[A]: of the distributions over the teacher's k likeliest tokens and all others as one."""
    top = teacher_AV.topk(min(k, teacher_AV.shape[1]), dim=1).indices
    sides = []
    for column in (policy_AV, teacher_AV):
        probabilities = column.double().exp()
        chosen = probabilities.gather(1, top)
        others = torch.ones_like(probabilities, dtype=torch.bool).scatter(1, top, value=False)
        rest = probabilities.where(others, 0.0).sum(1, keepdim=True)
        sides.append(torch.cat([chosen, rest], dim=1) if top.shape[1] < policy_AV.shape[1] else chosen)
    own, theirs = sides[0], sides[1].clamp_min(1e-8)
    middle = (own + theirs) / 2

    def apart(one: Tensor, other: Tensor) -> Tensor:
        return (one * (one.clamp_min(1e-30).log() - other.clamp_min(1e-30).log())).sum(1)

    if name == "js":
        return 0.5 * apart(own, middle) + 0.5 * apart(theirs, middle)
    return apart(own, theirs) if name == "reverse" else apart(theirs, own)


def kl_estimate(difference: Tensor, name: str) -> Tensor:
    """k1, k2 and k3 of d = log π − log π_ref, held within ±10."""
    if name == "k1":
        return difference.clamp(-10, 10)
    if name == "k2":
        return (difference**2 / 2).clamp(-10, 10)
    bounded = difference.clamp(-20, 20)
    return (torch.exp(-bounded) - 1 + bounded).clamp(-10, 10)


def _chosen(samples: Sequence[PlainSample], kind: str) -> list[Tensor]:
    """bool [A] each: under `kl_cov` the 0.02 % of the step's tokens with the largest covariance of advantage and old
    log-prob, of equal ones at random, under `clip_cov` as many at random of those between 1 and 5; at least one."""
    nothing = [torch.zeros(len(sample.old), dtype=torch.bool) for sample in samples]
    if kind not in ("clip_cov", "kl_cov"):
        return nothing
    tokens = [(i, t) for i, sample in enumerate(samples) for t in range(len(sample.old))]
    mean_a = sum(float(samples[i].advantages[t]) for i, t in tokens) / len(tokens)
    mean_p = sum(float(samples[i].old[t]) for i, t in tokens) / len(tokens)
    found = {}
    draws = [_draws(sample.key, len(sample.old)) for sample in samples]
    for i, t in tokens:
        covariance = (float(samples[i].advantages[t]) - mean_a) * (float(samples[i].old[t]) - mean_p)
        if kind == "kl_cov":
            found[i, t] = (covariance, draws[i][t])
        elif 1 < covariance < 5:
            found[i, t] = (0.0, draws[i][t])
    count = max(1, int(2e-4 * len(tokens)))
    for i, t in sorted(found, key=lambda place: found[place], reverse=True)[:count]:
        nothing[i][t] = True
    return nothing


def _draws(key: Sequence[int], count: int) -> list[int]:
    """The random numbers of a sample's tokens in the first epoch of the first round, by its key alone."""
    digest = hashlib.blake2b("\x1f".join(map(str, ("chosen", 1, 0, *key))).encode(), digest_size=8).digest()
    words = np.random.PCG64(np.random.SeedSequence(int.from_bytes(digest, "little") >> 1)).random_raw(count)
    return [int(word) for word in words]


def _token_losses(sample: PlainSample, config: Any, chosen: Tensor) -> Tensor:
    kind, (low, high) = config.actor.policy_loss_type, config.actor.clip_range
    advantage, corrects = sample.advantages, config.corrects_off_policy
    own_correction = kind in ("gspo", "luspo", "vespo", "dppo_tv", "dppo_kl")
    base = sample.rollout if corrects and own_correction and sample.rollout is not None else sample.old
    log_ratio = (sample.current - base).clamp(-20, 20)
    ratio = log_ratio.exp()
    if kind in ("gspo", "luspo"):
        mean = (sample.current - base).mean().clamp(-20, 20).exp().detach()
        ratio = mean * (sample.current - sample.current.detach()).exp()
    if kind in ("ppo", "gspo", "luspo", "clip_cov"):
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
        if config.actor.dual_clip is not None and kind == "ppo":
            gain = torch.where(advantage < 0, torch.maximum(gain, config.actor.dual_clip * advantage), gain)
        losses = torch.where(chosen, 0.0, -gain) if kind == "clip_cov" else -gain
    elif kind == "kl_cov":
        losses = -ratio * advantage + torch.where(chosen, (sample.current - base).abs(), 0.0)
    elif kind == "cispo":
        losses = -ratio.detach().clamp(1 - low, 1 + high) * advantage * sample.current
    elif kind == "sapo":
        tau = torch.where(advantage > 0, 1.0, 1.05)
        losses = -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantage
    elif kind == "gmpo":
        held = [
            min(d, high) if a > 0 else max(d, -low) if a < 0 else d
            for d, a in zip((sample.current - base).tolist(), advantage.tolist(), strict=True)
        ]
        free = torch.tensor([h == d for h, d in zip(held, (sample.current - base).tolist(), strict=True)])
        geometric = math.exp(sum(held) / len(held))
        losses = -geometric * advantage * torch.where(free, (sample.current - sample.current.detach()).exp(), 1.0)
    elif kind == "vespo":
        weight = (sample.current - base).detach().sum().clamp(-20, 20).exp()
        up, down = weight**2 * torch.exp(3 * (1 - weight)), weight**3 * torch.exp(2 * (1 - weight))
        losses = -torch.where(advantage > 0, up, down) * advantage * sample.current
    else:  # dppo
        trusted = _trusted(sample.current.tolist(), base.tolist(), advantage.tolist(), kind, low, high)
        losses = -torch.tensor(trusted) * ratio.detach().clamp(max=20) * advantage * sample.current
    if not corrects or own_correction or sample.rollout is None:
        return losses
    return _correction(sample, config) * losses


def _trusted(
    current: Sequence[float], old: Sequence[float], advantages: Sequence[float], kind: str, low: float, high: float
) -> list[float]:
    """1 for each token that DPPO trains on, else 0."""
    result = []
    for log_p, log_q, advantage in zip(current, old, advantages, strict=True):
        p, q = math.exp(min(log_p, 0.0)), math.exp(min(log_q, 0.0))
        distance = abs(p - q) if kind == "dppo_tv" else _two_event_kl(q, p)
        risen = advantage > 0 and log_p > log_q and distance > high
        fallen = advantage < 0 and log_p < log_q and distance > low
        result.append(0.0 if risen or fallen else 1.0)
    return result


def _two_event_kl(p: float, q: float) -> float:
    """KL of (p, 1 − p) from (q, 1 − q)."""
    return p * math.log(p / q) + max(1 - p, 1e-8) * math.log(max(1 - p, 1e-8) / max(1 - q, 1e-8))


def _correction(sample: PlainSample, config: Any) -> Tensor:
    assert sample.rollout is not None
    name, (low, high) = config.algo.advantage.is_correction_type, config.algo.advantage.is_correction_threshold
    gap = (sample.old - sample.rollout).detach()
    weight = gap.clamp(-20, 20).exp()
    if name == "tis":
        return weight.clamp(low, high)
    if name == "icepop":
        return torch.where((weight < low) | (weight > high), 0.0, weight)
    if name == "kpop":
        pairs = [
            (math.exp(min(a, 0.0)), math.exp(min(b, 0.0)))
            for a, b in zip(sample.old.tolist(), sample.rollout.tolist(), strict=True)
        ]
        far = [_two_event_kl(p, q) > 0.1 or _two_event_kl(q, p) > 0.1 for p, q in pairs]
        return torch.where(torch.tensor(far), 0.0, weight)
    whole = gap.mean().clamp(-20, 20).exp()
    return weight.clamp(max=high) if low <= whole <= high else torch.zeros_like(weight)


def value_loss(values: Tensor, old: Tensor, returns: Tensor, *, clip: float) -> Tensor:
    """½ max((v_clip − R)², (v − R)²) of each token."""
    held = old + (values - old).clamp(-clip, clip)
    return 0.5 * torch.maximum((held - returns) ** 2, (values - returns) ** 2)


def pair_loss(gap: Tensor, config: Any, kind: str) -> Tensor:
    """DPO with label smoothing, or IPO, of h = (log π − log π_ref)(chosen) − (log π − log π_ref)(rejected)."""
    beta = config.model.beta
    if kind == "ipo":
        return (gap - 1 / (2 * beta)) ** 2
    smoothing = config.model.label_smoothing
    keep, flip = torch.nn.functional.logsigmoid(beta * gap), torch.nn.functional.logsigmoid(-beta * gap)
    return -(1 - smoothing) * keep - smoothing * flip


def reward_loss(chosen: Tensor, rejected: Tensor, margin: float, config: Any) -> Tensor:
    """Bradley-Terry, with the margin under `sigmoid`."""
    margin = margin if config.model.loss_type == "sigmoid" and config.model.margin_loss_enable else 0.0
    return -torch.nn.functional.logsigmoid(chosen - rejected - margin)


# ------------------------------------------------------------------------------------------------ comparisons


def gradient_gap(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest difference of a tensor, as a part of the whole gradient's norm, and the tensor's name.

    `theirs` is the one that is right. A tensor that is missing counts as zeros.
    """
    norm = math.sqrt(sum(_norm(tensor) ** 2 for tensor in theirs.values())) or 1e-30
    worst, where = 0.0, ""
    for name in dict.fromkeys([*theirs, *ours]):
        one, other = ours.get(name), theirs.get(name)
        if one is None or other is None:
            present = one if one is not None else other
            assert present is not None
            gap = _norm(present)
        else:
            gap = _norm(one.cpu() - other.cpu())
        if not gap / norm <= worst:  # not a number is a difference too
            worst, where = gap / norm, name
    return worst, where


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
