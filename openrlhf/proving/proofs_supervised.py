"""Proofs of supervised runs: which tokens are learnt, the loss and its gradient, and how samples are cut."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openrlhf.proving import reference
from openrlhf.proving.plain_round import CUT_TOLERANCE, GRADIENT_TOLERANCE
from openrlhf.proving.proofs_rollout import shown
from openrlhf.proving.registry import SUPERVISED, Disproved, proof
from openrlhf.proving.trial import SupervisedTrial

PAIRS = (("input", "output"), ("prompt", "completion"), ("prompt", "response"), ("question", "answer"))
"""Keys of records with a prompt and an answer, where the flags name none."""


# ----------------------------------------------------------------------------------------------------------- targets


def _record(trial: SupervisedTrial, where: str) -> dict[str, Any] | None:
    """The record that a sample was read from."""
    found = re.match(r"record (\d+) of ", where)
    path = Path(trial.config.data.dataset)
    if found is None or path.suffix != ".jsonl" or not path.is_file():
        return None
    return json.loads(path.read_text(encoding="utf-8").splitlines()[int(found[1]) - 1])


def _messages(record: dict[str, Any], data: Any) -> tuple[list[dict[str, Any]], int] | None:
    """The conversation, and the number of the first message that may be learnt; None: the record is no conversation."""
    keys = [data.input_key, "messages", "conversations"]
    found = next((record[key] for key in keys if isinstance(record.get(key), list)), None)
    if found is not None and all(isinstance(m, dict) and "role" in m for m in found):
        messages = list(found)
        first = 0 if data.multiturn else len(messages) - 1
        answer = record.get(data.output_key) if data.output_key else None
        if isinstance(answer, str):
            first = 0 if data.multiturn else len(messages)
            messages.append({"role": "assistant", "content": answer})
        elif isinstance(answer, list):
            first = 0 if data.multiturn else len(messages)
            messages += answer
        return messages, first
    pair = _pair(record, data)
    if pair is None:
        return None
    return [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}], 1


def _pair(record: dict[str, Any], data: Any) -> tuple[str, str] | None:
    for prompt, answer in ((data.input_key, data.output_key), *PAIRS):
        if isinstance(record.get(prompt), str) and isinstance(record.get(answer or ""), str):
            return record[prompt], record[answer]
    return None


def _spans(trial: SupervisedTrial, record: dict[str, Any]) -> tuple[str, list[tuple[int, int]]] | None:
    """The text of a record and the characters in it that are learnt, from the chat template itself; None: the template
    rewrites what it has written, and this proof cannot tell."""
    data, tokenizer = trial.config.data, trial.tokenizer
    found = _messages(record, data) if data.apply_chat_template else None
    if found is None:
        return None
    messages, first = found
    arguments = {"tokenize": False, **data.template_arguments}
    text = tokenizer.apply_chat_template(messages, **arguments)
    spans = []
    for place in range(first, len(messages)):
        if messages[place]["role"] != "assistant" or not messages[place].get("content"):
            continue
        before = tokenizer.apply_chat_template(messages[:place], add_generation_prompt=True, **arguments)
        until = tokenizer.apply_chat_template(messages[: place + 1], **arguments)
        if not (until.startswith(before) and text.startswith(until)):
            return None
        spans.append((len(before), len(until.rstrip("\n"))))
    return text, spans


@proof(
    "targets",
    title="exactly the answers are learnt",
    shows="The tokens that are learnt are those that the chat template puts between the end of the generation prompt "
    "and the end of the assistant's turn; nothing of the user's, and no end of turn less.",
    remedy="Compare the shown text with your template; openrlhf check DATA --model MODEL shows more of it.",
    kinds=("sft",),
    cost=0,
)
def targets(trial: SupervisedTrial) -> str:
    compared = learnt = 0
    for sample in trial.samples:
        learnt += int(sample.target_mask.sum())
        record = _record(trial, sample.where)
        found = None if record is None else _spans(trial, record)
        if found is None:
            continue
        text, spans = found
        encoded = trial.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = encoded["input_ids"]
        if sample.token_ids.tolist() != ids[: len(sample)]:
            continue  # cut from the left, or closed by end-of-sequence: the places are not the template's
        compared += 1
        for place, (start, end) in enumerate(encoded["offset_mapping"][: len(sample)]):
            inside = any(a <= start and end <= b for a, b in spans)
            outside = all(end <= a or start >= b for a, b in spans)
            if (inside or outside) and start < end and place and bool(sample.target_mask[place]) != inside:
                what = "is not learnt, and is part of an answer" if inside else "is learnt, and is part of no answer"
                raise Disproved(f"{sample.where}: token {place} ({text[start:end]!r}) {what}")
    one = max(trial.samples, key=len)
    trial.shown.append("learnt ⟦in brackets⟧: " + shown(trial, one.token_ids, one.target_mask))
    if not learnt:
        raise Disproved("not one token is learnt")
    how = f"{compared} of {len(trial.samples)} compared with the template"
    return f"{learnt} tokens are learnt; {how if trial.config.data.apply_chat_template else 'no chat template'}"


# -------------------------------------------------------------------------------------------------------------- loss


def _answer(trial: SupervisedTrial, example: Any, *, of_reference: bool = False) -> Tensor:
    """The sum of the log-probs of an example's targets."""
    model = trial.plain_reference if of_reference else trial.plain
    with torch.set_grad_enabled(not of_reference):
        logits = model.logits(example.token_ids)
        column = reference.logprobs(logits, example.token_ids)
    return column[example.target_mask.to(column.device)].sum().cpu()


def _reward(trial: SupervisedTrial, example: Any) -> Tensor:
    hidden = trial.plain.hidden(example.token_ids)
    return (hidden[-1] @ trial.module.head.weight.float()[0]).cpu()


def plain_loss(trial: SupervisedTrial) -> Tensor:
    """The loss of one step over all samples of the trial, one at a time."""
    samples, config = trial.samples, trial.config
    if trial.kind == "sft":
        count = sum(int(sample.target_mask.sum()) for sample in samples)
        return -torch.stack([_answer(trial, sample) for sample in samples]).sum() / count
    losses = []
    for pair in samples:
        if trial.kind == "reward model":
            chosen, rejected = _reward(trial, pair.chosen), _reward(trial, pair.rejected)
            losses.append(reference.reward_loss(chosen, rejected, pair.margin, config))
            continue
        chosen = _answer(trial, pair.chosen)
        ratio = chosen - _answer(trial, pair.chosen, of_reference=True)
        other = _answer(trial, pair.rejected) - _answer(trial, pair.rejected, of_reference=True)
        one = reference.pair_loss(ratio - other, config, trial.kind)
        losses.append(one - config.model.nll_loss_coef * chosen / int(pair.chosen.target_mask.sum()))
    return torch.stack(losses).mean()


LOSSES = {"sft": "gpt_loss", "reward model": "loss", "dpo": "loss", "ipo": "loss"}
"""What the loop calls the loss."""


def _has_images(trial: SupervisedTrial) -> str | None:
    if trial.config.data.max_images_per_prompt > 0:
        return "the plain reference of supervised runs reads no images"
    return None


@proof(
    "objective",
    title="loss and gradient are those of the formula",
    shows="The gradient that the optimizer gets is that of the configured loss, computed one sample at a time by "
    "autograd over transformers' own forward; a reference model is the one of its files.",
    remedy="The step does not do what the flags say: look at the loss, its mean, and which tokens are learnt.",
    kinds=("sft", "reward model", "dpo", "ipo"),
    unless=_has_images,
    cost=3,
)
def objective(trial: SupervisedTrial) -> str:
    done = trial.step([[i] for i in range(trial.count)])
    head = None if trial.is_policy else trial.module.head.weight
    if head is not None:
        head.grad = None
    wanted = plain_loss(trial)
    wanted.backward()
    theirs = {f"model.{name}": gradient for name, gradient in trial.plain.gradients().items()}
    if head is not None and head.grad is not None:
        theirs["head.weight"], head.grad = head.grad.clone(), None
    told = done.metrics[LOSSES[trial.kind]]
    if not abs(told - float(wanted.detach())) <= 1e-3 * max(1.0, abs(float(wanted.detach()))):
        raise Disproved(f"the loss is {told:.6g}, and {float(wanted.detach()):.6g} by its formula")
    gap, where = reference.gradient_gap(done.gradient, theirs)
    if not gap <= GRADIENT_TOLERANCE:
        raise Disproved(
            f"the gradient is {gap:.2g} of its norm away from that of the formula, most in {where}; "
            f"{GRADIENT_TOLERANCE:g} is allowed"
        )
    return f"{trial.count} samples: loss {told:.5g}, gradient {gap:.1g} of its norm away"


@proof(
    "batches",
    title="micro-batches, packing and order change nothing",
    shows="The gradient is the same one sample at a time, all samples in one packed stream, and in another order.",
    remedy="The loss is a mean over micro-batches, or samples see each other: look at --train.micro_batch_size and at "
    "what was changed in packing, positions or masks.",
    kinds=SUPERVISED,
    cost=4,
)
def batches(trial: SupervisedTrial) -> str:
    every = list(range(trial.count))
    base = trial.step([[i] for i in every])
    ways = {
        "all samples in one stream, in the opposite order": [every[::-1]],
        "in uneven micro-batches": [every[:1], every[1:]],
    }
    largest = 0.0
    for name, cut in ways.items():
        gap, where = reference.gradient_gap(trial.step([part for part in cut if part]).gradient, base.gradient)
        largest = max(largest, gap)
        if not gap <= CUT_TOLERANCE:
            raise Disproved(
                f"{name}, the gradient is {gap:.2g} of its norm away from that of one sample at a time, most in "
                f"{where}; {CUT_TOLERANCE:g} is allowed"
            )
    return f"{len(ways) + 1} ways to cut: at most {largest:.1g} of the norm apart"
