"""Proofs of rollouts: which tokens are trained on, what engines compute after a push, adapters, images and experts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from openrlhf.proving import reference
from openrlhf.proving.plain_round import LOGPROB_TOLERANCE, inputs_of, worst
from openrlhf.proving.registry import Disproved, proof
from openrlhf.proving.trial import Call, RLTrial, SupervisedTrial, Weights, has_adapter, move_weights
from openrlhf.runs.engines import policy_probe
from openrlhf.types import FinishReason, Outcome, SamplingParams, Segment

MOST_SHOWN = 400
"""Characters of a text that is shown."""


@proof(
    "rollouts",
    title="the run's own parts play and judge a round",
    shows="The user's prompts, agent and reward work with the user's model: samples are played and judged.",
    remedy="openrlhf check tries a reward or agent file by itself, and shows what it gives.",
    first=True,
    cost=1,
)
def rollouts(trial: RLTrial) -> str:
    trial.groups = trial.play()
    judged = [t for group in trial.groups for t in group.scored]
    failed = [t for group in trial.groups for t in group.trajectories if t.failed]
    if not judged:
        raise Disproved(f"not one of {len(failed)} samples could be judged: {failed[0].error}")
    trial.blocked = None
    rewards = [t.reward for t in judged if t.reward is not None]
    text = f"{len(judged)} samples of {len(trial.groups)} prompts, rewards from {min(rewards):g} to {max(rewards):g}"
    return f"{text}; {len(failed)} failed: {failed[0].error}" if failed else text


# ------------------------------------------------------------------------------------------------------------- masks


def sampled_spans(segment: Segment, calls: Sequence[Call]) -> list[tuple[int, int, Call]]:
    """The parts of a history that an engine has sampled, from what it was asked and answered: start, end, call."""
    ids = segment.token_ids.tolist()
    found = []
    for call in calls:
        start, answer = len(call.token_ids), list(call.generation.token_ids)
        if answer and ids[:start] == list(call.token_ids) and ids[start : start + len(answer)] == answer:
            found.append((start, start + len(answer), call))
    found.sort(key=lambda span: (span[0], -span[1]))
    # Several samples of a prompt may have answered alike.
    return [span for i, span in enumerate(found) if all(span[:2] != other[:2] for other in found[:i])]


def shown(trial: Any, token_ids: Tensor, mask: Tensor) -> str:
    """The text, with what is trained on in brackets."""
    parts, ids = [], token_ids.tolist()
    start = 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or bool(mask[end]) != bool(mask[start]):
            text = trial.tokenizer.decode(ids[start:end], skip_special_tokens=False)
            parts.append(f"⟦{text}⟧" if bool(mask[start]) else text)
            start = end
    text = "".join(parts).replace("\n", "⏎")
    half = MOST_SHOWN // 2
    return text if len(text) <= MOST_SHOWN else f"{text[:half]} … {text[-half:]}"


@proof(
    "masks",
    title="exactly the sampled tokens are trained on",
    shows="The tokens that are trained on are those that the engine answered, each with its log-prob and version, up "
    "to the end of the turn and no further; prompt and feedback are not; nothing is written over.",
    remedy="The update learns tokens that the policy never chose, or not all that it chose. The line says where.",
    cost=0.1,
)
def masks(trial: RLTrial) -> str:
    turns = tokens = 0
    longest: Segment | None = None
    for group in trial.groups:
        for member in group.scored:
            for segment in member.segments:
                spans = sampled_spans(segment, trial.engine.calls)
                turns += len(spans)
                tokens += len(segment)
                _check_masks(trial, segment, spans, f"prompt {member.key.prompt} sample {member.key.sample}")
                longest = segment if longest is None or len(segment) > len(longest) else longest
            if len(member.segments) == 1 and trial.config.train.agent_func_path is None:
                _check_single_turn(trial, group.prompt, member)
    assert longest is not None
    trial.shown.append("trained on ⟦in brackets⟧: " + shown(trial, longest.token_ids, longest.action_mask))
    return f"{turns} turns in {tokens} tokens"


def _check_masks(trial: RLTrial, segment: Segment, spans: Sequence[tuple[int, int, Call]], who: str) -> None:
    wanted, ends = torch.zeros(len(segment), dtype=torch.bool), torch.zeros(len(segment), dtype=torch.bool)
    for start, end, _ in spans:
        wanted[start:end] = True
        ends[end - 1] = True
    wrong = (segment.action_mask != wanted).nonzero().flatten().tolist()
    if wrong:
        at = wrong[0]
        token = trial.tokenizer.decode([int(segment.token_ids[at])], skip_special_tokens=False)
        what = (
            "is trained on, and the engine did not sample it there"
            if segment.action_mask[at]
            else "was sampled by the engine, and is not trained on"
        )
        raise Disproved(f"{who}: token {at} ({token!r}) {what}; {len(wrong)} tokens are wrong")
    if segment.turn_ends is not None and not torch.equal(segment.turn_ends, ends):
        raise Disproved(f"{who}: its turns end at other tokens than the engine's answers do")
    for start, end, call in spans:
        told = call.generation.logprobs
        kept = segment.rollout_logprobs
        if told is not None and kept is not None and not worst(kept[start:end], torch.tensor(told)) <= 1e-5:
            raise Disproved(f"{who}: the log-probs of tokens {start} to {end} are not those that the engine told")
        if segment.versions[start:end].tolist() != list(call.generation.versions):
            raise Disproved(f"{who}: the versions of tokens {start} to {end} are not those that the engine told")
    if bool((segment.turn_rewards[~wanted] != 0).any()):
        raise Disproved(f"{who}: a reward stands on a token that the policy did not sample")


def _check_single_turn(trial: RLTrial, prompt: Any, member: Any) -> None:
    segment, who = member.segments[0], f"prompt {member.key.prompt} sample {member.key.sample}"
    if not segment.images:
        ids = trial.tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
        start = int(segment.action_mask.nonzero()[0]) if segment.num_actions else len(segment)
        if start <= len(ids) and segment.token_ids[:start].tolist() != ids[len(ids) - start :]:
            raise Disproved(f"{who}: what the policy has read is not the prompt in the tokenizer's tokens")
    spans = sampled_spans(segment, trial.engine.calls)
    if spans:
        reason = spans[-1][2].generation.finish_reason
        cut = member.outcome is Outcome.TRUNCATED
        if cut != (reason is FinishReason.LENGTH):
            raise Disproved(f"{who}: it counts as {member.outcome}, and the engine ended it by {reason}")


# ------------------------------------------------------------------------------------------------------------ engine


def refresh_plain(trial: RLTrial) -> None:
    """The plain model gets the policy's present weights."""
    named = {name.removeprefix("model."): p for name, p in trial.models.policy.named_parameters()}
    trained = [name.removeprefix("model.") for name in trial.trained]
    trial.plain.take_weights(named, trained, scaling=trial.adapter_scaling)


@proof(
    "pushes",
    title="the engine has the policy's weights after every push",
    shows="After one push and after two, the engine's log-probs of tokens from all over the vocabulary, and of what it "
    "samples after a prompt that it has read before, are those of transformers with the policy's weights.",
    remedy="The engine samples from another policy than the one that is trained: a weight is not sent, laid out "
    "wrongly, or keys and values of older weights are used. --vllm.sync_verify watches every push of a run.",
    cost=3,
)
def pushes(trial: RLTrial) -> str:
    config, policy = trial.config, trial.models.policy
    probe = policy_probe(config, policy.model.config, trial.device)
    tokens = torch.tensor(probe.token_ids)
    params = SamplingParams(temperature=config.rollout.temperature, max_tokens=4, seed=7, ignore_eos=True)
    prompt = trial.engine.calls[0]
    asked = list(prompt.token_ids)[: config.data.max_len - 8]
    # Long enough that what was read is kept, by engines that keep blocks of it.
    kept, largest = Weights(policy), 0.0
    trial.to_sampling()
    first = trial.loop.run(trial.engine.generate(asked, params, prompt.images))
    history = [*asked, *first.token_ids]
    try:
        for number in (1, 2):
            move_weights(policy, seed=10 + number, by=0.05)
            trial.push()
            refresh_plain(trial)
            told = trial.loop.run(trial.engine.logprobs(tokens.tolist()))
            with torch.no_grad():
                logits = trial.plain.logits(tokens)
            gap = worst(torch.tensor(told), reference.logprobs(logits, tokens)[1:])
            largest = max(largest, gap)
            if config.rounds_weights:
                probe.compare(probe.policy_side(policy), told, version=trial.version)
            elif not gap <= LOGPROB_TOLERANCE:
                raise Disproved(
                    f"after push {number} the engine's log-probs are up to {gap:.2g} away from those of the policy's "
                    f"weights; {LOGPROB_TOLERANCE:g} is allowed"
                )
            if not config.rounds_weights:
                largest = max(largest, _read_again(trial, asked, history, params, prompt, number))
    finally:
        kept.restore()
        trial.push()
        refresh_plain(trial)
    return f"2 pushes, {len(tokens)} tokens and a known prompt each: at most {largest:.1g} away"


def _read_again(
    trial: RLTrial, asked: list[int], history: list[int], params: SamplingParams, prompt: Call, number: int
) -> float:
    """Sample after the same prompt, and after the same prompt and answer, as a second turn would."""
    largest = 0.0
    for read in (asked, history):
        answer = trial.loop.run(trial.engine.generate(read, params, prompt.images))
        ids = torch.tensor([*read, *answer.token_ids])
        inputs: dict[str, Any] = {}
        if prompt.images:
            inputs = inputs_of(_as_segment(ids, prompt), trial.device)
        with torch.no_grad():
            logits = trial.plain.logits(ids, **inputs)
        wanted = reference.logprobs(logits, ids, temperature=params.temperature)[len(read) :]
        gap = worst(torch.tensor(answer.logprobs), wanted)
        if not gap <= LOGPROB_TOLERANCE:
            raise Disproved(
                f"after push {number}, tokens after a prompt that the engine has read before are up to {gap:.2g} away "
                "from the policy's: it goes on from keys and values of older weights"
            )
        largest = max(largest, gap)
    return largest


def _as_segment(ids: Tensor, call: Call) -> Segment:
    mask = torch.arange(len(ids)) >= len(call.token_ids)
    return Segment(
        token_ids=ids,
        action_mask=mask,
        rollout_logprobs=None,
        versions=torch.where(mask, 0, -1).int(),
        turn_rewards=torch.zeros(len(ids)),
        images=call.images,
    )


# ----------------------------------------------------------------------------------------------------------- adapter


def _no_adapter(trial: RLTrial | SupervisedTrial) -> str | None:
    return None if trial.config.ds.lora.rank else "the run trains all weights (--ds.lora.rank 0)"


@proof(
    "adapter",
    title="the adapter reaches every module, scaled once",
    shows="Every module that the flags name has two trained matrices, nothing else is trained, and the model computes "
    "W + (alpha / rank) · B A, neither more nor less.",
    remedy="Look at --ds.lora.target_modules and alpha; a scale that is applied twice trains at another learning rate.",
    kinds=("rl", "sft", "dpo", "ipo"),
    unless=_no_adapter,
    cost=1,
)
def adapter(trial: RLTrial | SupervisedTrial) -> str:
    policy: Any = trial.models.policy if isinstance(trial, RLTrial) else trial.module
    if not has_adapter(trial):
        raise Disproved(f"--ds.lora.rank {trial.config.ds.lora.rank}: the model has no adapter")
    names = {name for name, p in policy.model.named_parameters() if p.requires_grad}
    adapted = {name.partition(".lora_")[0] for name in names if ".lora_" in name}
    others = sorted(name for name in names if ".lora_" not in name)
    if others:
        raise Disproved(f"beside the adapter {others[0]} is trained")
    wanted = _targets(trial)
    if missing := sorted(wanted - adapted):
        raise Disproved(f"{missing[0]} and {len(missing) - 1} more modules that the flags name have no adapter")
    if beyond := sorted(adapted - wanted):
        raise Disproved(f"{beyond[0]} has an adapter, and the flags do not name it")
    tokens = torch.tensor([i % int(policy.model.config.get_text_config().vocab_size) for i in range(3, 40 * 37, 37)])
    from openrlhf.weight_sync.probe import policy_logprobs

    with torch.no_grad():
        wanted_logprobs = reference.logprobs(trial.plain.logits(tokens), tokens)[1:]
    told = torch.tensor(policy_logprobs(policy, tokens.tolist()))
    gap = worst(told, wanted_logprobs)
    if not gap <= LOGPROB_TOLERANCE:
        lora = trial.config.ds.lora
        raise Disproved(
            f"the model's log-probs are up to {gap:.2g} away from those of W + ({lora.alpha} / {lora.rank}) · B A: the "
            "adapter is scaled otherwise, or does not reach its modules"
        )
    return f"{len(adapted)} modules; log-probs {gap:.1g} away from W + (alpha / rank) · B A"


def _targets(trial: RLTrial | SupervisedTrial) -> set[str]:
    """The modules that the flags name, in transformers' own model."""
    targets = trial.config.ds.lora.target_modules
    model = trial.plain.model
    head = model.get_output_embeddings()
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head}
    if getattr(trial.config.data, "max_images_per_prompt", 0) > 0:
        linear = {name for name in linear if "visual" not in name and "vision" not in name}
    if tuple(targets) == ("all-linear",):
        return linear
    return {name for name in linear if any(name == target or name.endswith(f".{target}") for target in targets)}


# ------------------------------------------------------------------------------------------------------------ images


def _no_images(trial: RLTrial) -> str | None:
    if trial.config.data.max_images_per_prompt == 0:
        return "the run has no images (--data.max_images_per_prompt 0)"
    if not any(call.images for call in trial.engine.calls):
        return "no sample of the trial has an image"
    return None


@proof(
    "images",
    title="engine and trainer see the same pixels, prepared once",
    shows="The tensors that the engine got with a prompt, those that the trainer gets with its samples, and those that "
    "the model's own image processor makes of the image are the same bytes; the prompt has each image's tokens once.",
    remedy="An image is resized, normalised or expanded twice on one side: log-probs are those of another picture.",
    unless=_no_images,
    cost=0.1,
)
def images(trial: RLTrial) -> str:
    from openrlhf.data.images import read_image

    read = functools.partial(read_image, allow_urls=trial.config.data.allow_image_urls)
    processor = _hugging_face_processor(trial)
    compared = 0
    for group in trial.groups:
        sources = group.prompt.images
        for member in group.scored:
            for segment in member.segments:
                calls = [call for _, _, call in sampled_spans(segment, trial.engine.calls)]
                for call in calls:
                    for (start, image), (begin, own) in zip(call.images, segment.images, strict=False):
                        if start != begin or image.token_ids != own.token_ids:
                            raise Disproved(
                                f"an image is at token {start} for the engine, and at {begin} for the trainer"
                            )
                        for name, tensor in image.tensors.items():
                            if not torch.equal(tensor, own.tensors[name]):
                                raise Disproved(f"{name} of an image differs between engine and trainer")
                for (start, image), source in zip(segment.images, sources, strict=False):
                    _check_pixels(processor, image, read(source), start)
                    compared += 1
                expected = sum(image.num_features for _, image in segment.images)
                counted = int((segment.token_ids == segment.images[0].image.placeholder).sum()) if segment.images else 0
                if counted != expected:
                    raise Disproved(
                        f"a prompt has {counted} placeholder tokens for {expected} features of its images: they were "
                        "expanded twice, or not at all"
                    )
    return f"{compared} images, byte by byte"


def _hugging_face_processor(trial: RLTrial) -> Any:
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(
        trial.path, trust_remote_code=trial.config.actor.trust_remote_code, backend="pil"
    )


def _check_pixels(processor: Any, image: Any, source: Any, start: int) -> None:
    made = processor(images=[source.convert("RGB")], return_tensors="pt")
    for name, tensor in image.tensors.items():
        if name not in made:
            continue
        wanted = made[name].reshape(tensor.shape) if made[name].numel() == tensor.numel() else made[name]
        if wanted.shape != tensor.shape:
            raise Disproved(
                f"{name} of the image at token {start} has the shape {tuple(tensor.shape)}, and {tuple(wanted.shape)} "
                "as the model's image processor makes it"
            )
        if not (gap := float((wanted.double() - tensor.double()).abs().max())) <= 1e-5:
            raise Disproved(
                f"{name} of the image at token {start} is up to {gap:.2g} away from what the model's image processor "
                "makes of it"
            )
    grid = made.get("image_grid_thw")
    if grid is not None:
        merge = getattr(processor, "merge_size", 1)
        features = int(grid[0].prod()) // merge**2
        if features != image.num_features:
            raise Disproved(
                f"the image at token {start} has {image.num_features} placeholder tokens, and {features} features"
            )


# ----------------------------------------------------------------------------------------------------------- experts


def _no_experts(trial: RLTrial) -> str | None:
    policy = trial.models.policy
    if policy.routers is None:
        return "the model is no mixture of experts"
    if not policy.replays:
        return "routes are not replayed (--algo.router_replay)"
    return None


@proof(
    "experts",
    title="tokens are trained through the experts that sampled them",
    shows="Samples carry the experts that the engine chose, for every token that it has read, and the update's "
    "forward goes through exactly these.",
    remedy="The update trains other experts than those that acted: look at --algo.router_replay.",
    unless=_no_experts,
    cost=1,
)
def experts(trial: RLTrial) -> str:
    compared = 0
    for group in trial.groups:
        for member in group.scored:
            for segment in member.segments:
                spans = sampled_spans(segment, trial.engine.calls)
                if not spans:
                    continue
                told = spans[-1][2].generation.routes
                if segment.routes is None or told is None:
                    raise Disproved("a sample has no routes, though the engine is to tell them")
                if segment.routes.tolist() != told.tolist():
                    raise Disproved("a sample's routes are not those that the engine told")
                if len(segment.routes) != spans[-1][1] - 1:
                    raise Disproved(f"{len(segment.routes)} tokens have routes, and {spans[-1][1] - 1} were read")
                compared += len(segment.routes)
    _check_replay(trial)
    return f"{compared} tokens carry the engine's experts, and a foreign choice is followed"


def _check_replay(trial: RLTrial) -> None:
    """Other experts than the routers' own must give other log-probs: those of transformers with that choice."""
    import dataclasses

    from openrlhf.types import PackedTokens

    policy = trial.models.policy
    segment = next(s for g in trial.groups for t in g.scored for s in t.segments)
    assert segment.routes is not None
    assert policy.routers is not None
    experts = policy.routers.shape.experts
    other = dataclasses.replace(segment, routes=((segment.routes.long() + 1) % experts).to(segment.routes.dtype))
    found = []
    policy.eval()
    with torch.no_grad():
        for one in (segment, other):
            tokens = PackedTokens.from_segments([one]).to(trial.device)
            found.append(policy(tokens, temperature=1.0).logprobs_A.cpu())
    policy.train()
    if not worst(*found) > 1e-5:
        raise Disproved(
            "the update's forward does not follow the routes of its samples: others give the same log-probs"
        )
