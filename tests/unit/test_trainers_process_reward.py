"""Process reward models: which tokens are judged, the loss by hand, and what is learnt and written."""

import copy
import json
import math
import random
from typing import NamedTuple

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from openrlhf.algorithms.preferences import step_loss
from openrlhf.checking.data_check import configure, guess, lines_of, read, show
from openrlhf.config import parse
from openrlhf.data.files import DataError
from openrlhf.data.steps import StepFormat, StepSet
from openrlhf.runs.supervised_assembly import train
from openrlhf.trainers.process_reward import ProcessRewardObjective

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture(scope="module")
def tokenizer():
    """A token for each byte, so that a blank line is two."""
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate([*ALPHABET, "<eos>"])}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")


class Rows(list):
    def where(self, row):
        return f"record {row + 1} of steps.jsonl"

    def folder(self, row):
        return None


def answers_of(tokenizer, *records, max_len=64):
    return StepSet(Rows(records), StepFormat(), tokenizer=tokenizer, max_len=max_len)


RECORD = {"input": "q1", "steps": ["x0", " y12\n", "x"], "labels": [1, False, "true"]}
"""Tokens: q 1 x 0 ⏎ ⏎ y 1 2 ⏎ ⏎ x <eos>"""


class TestRecords:
    def test_steps_are_judged_where_their_separator_ends_and_at_the_last_token(self, tokenizer):
        (answer,) = answers_of(tokenizer, RECORD)
        assert tokenizer.decode(answer.example.token_ids) == "q1x0\n\ny12\n\nx<eos>"
        assert answer.ends == (5, 10, 12)
        assert answer.good == (True, False, True)

    def test_an_answer_that_is_cut_keeps_the_steps_before(self, tokenizer):
        (answer,) = answers_of(tokenizer, RECORD, max_len=9)
        assert (len(answer), answer.ends, answer.good) == (9, (5,), (True,))

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"labels": [1, 0]}, "list of 3 labels"),
            ({"labels": [1, 0, 0.5]}, "must be true or 1"),
            ({"steps": "x"}, "list of texts"),
            ({"steps": ["x", " ", "y"]}, "step 2 under 'steps' is empty"),
            ({"steps": ["x", "x\n\ny", "y"]}, "step 2 under 'steps' has .* in it"),
        ],
    )
    def test_wrong_records_are_named(self, tokenizer, change, words):
        with pytest.raises(DataError, match=f"record 2 of steps.jsonl.*{words}"):
            answers_of(tokenizer, RECORD, RECORD | change)

    @pytest.mark.parametrize(
        ("steps", "template"),
        [
            (["x", "<eos>", "y"], None),
            (
                ["<think>x", "y</think>0", "y"],
                "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}",
            ),
        ],
    )
    def test_an_answer_with_other_steps_as_tokens_is_named_before_training(self, tokenizer, steps, template):
        """A step without text, and a template that leaves thinking out. Where --data.max_len cuts, nobody can tell."""
        own = copy.deepcopy(tokenizer)
        own.chat_template = template
        format = StepFormat(apply_chat_template=template is not None)
        rows = Rows([RECORD, RECORD | {"steps": steps}])
        if template is None:
            StepSet(rows, format, tokenizer=own, max_len=6)
        with pytest.raises(DataError, match=r"record 2 of steps\.jsonl: its 3 steps have 2 ends as tokens: "):
            StepSet(rows, format, tokenizer=own, max_len=64)


class Table(nn.Module):
    """The value is −4 at end-of-sequence and −3 elsewhere, whatever came before."""

    def __init__(self, tokenizer):
        super().__init__()
        self.offset = nn.Parameter(torch.tensor(-3.0))
        self.eos = tokenizer.eos_token_id

    def forward(self, tokens, *, positions):
        return self.offset - (tokens.token_ids[positions] == self.eos).float()


class Step(NamedTuple):
    samples: tuple
    micro_batches: list


class TestObjective:
    def test_loss_and_gradient_of_a_step(self):
        """v = ln 3: σ = 3/4. Good: −ln 3/4, slope −1/4; bad: −ln 1/4, slope 3/4."""
        values = torch.full((2,), math.log(3), requires_grad=True)
        loss = step_loss(values, torch.tensor([True, False]))
        loss.sum().backward()
        assert loss.tolist() == pytest.approx([math.log(4 / 3), math.log(4)])
        assert values.grad.tolist() == pytest.approx([-0.25, 0.75])

    @pytest.mark.parametrize("cut", [[[0, 1, 2]], [[0], [2, 1]], [[2], [1], [0]]])
    def test_is_the_mean_over_the_steps_judged_tokens_however_it_is_cut(self, tokenizer, cut):
        """Six tokens are judged: three of the first answer (good, bad, good), one of the second (bad), two of the third
        (bad, good). The last of each answer is end-of-sequence."""
        records = [
            RECORD,
            {"input": "q", "steps": ["y"], "labels": [0]},
            {"input": "q", "steps": ["y", "x"], "labels": [-1, 1]},
        ]
        module, total = Table(tokenizer), 0.0
        objective = ProcessRewardObjective(answers_of(tokenizer, *records), device=torch.device("cpu"))
        compute = objective.begin(module, Step((0, 1, 2), cut))
        for micro in cut:
            result = compute(micro)
            result.loss.backward()
            total += float(result.loss.detach())
        good, bad = (lambda v: math.log1p(math.exp(-v))), (lambda v: math.log1p(math.exp(v)))
        wanted = good(-3) + bad(-3) + good(-4) + bad(-4) + bad(-3) + good(-4)
        assert total == pytest.approx(wanted / 6, rel=1e-5)
        sigmoid = [1 / (1 + math.exp(-v)) for v in (-3, -3, -4, -4, -3, -4)]
        assert float(module.offset.grad) == pytest.approx((sum(sigmoid) - 3) / 6, rel=1e-5)


def records_of_the_rule(count, *, seed):
    """A step is good if it is written with x, not with y; what is asked, digits and the order say nothing."""
    rng = random.Random(seed)
    for _ in range(count):
        good = [rng.random() < 0.5 for _ in range(rng.randint(1, 4))]
        steps = [("x" if one else "y") + "".join(rng.choices("01234", k=rng.randint(1, 3))) for one in good]
        yield {"input": "q" + rng.choice("01234"), "steps": steps, "labels": [int(one) for one in good]}


def test_learns_a_rule_and_is_written_as_a_model_that_judges_steps(tokenizer, tmp_path):
    torch.manual_seed(0)
    base, data, held_out = tmp_path / "base", tmp_path / "steps.jsonl", tmp_path / "held_out.jsonl"
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=len(ALPHABET) + 1, num_hidden_layers=2, **shape)).save_pretrained(base)
    tokenizer.save_pretrained(base)
    data.write_text("".join(json.dumps(one) + "\n" for one in records_of_the_rule(256, seed=1)))
    held_out.write_text("".join(json.dumps(one) + "\n" for one in records_of_the_rule(32, seed=2)))
    words = f"""--model.loss_type prm --model.model_name_or_path {base} --data.dataset {data} --data.max_len 64
        --eval.dataset {held_out} --eval.split train --ckpt.output_dir {tmp_path / "prm"} --ckpt.path {tmp_path / "c"}
        --train.batch_size 32 --train.micro_batch_size 8 --train.max_epochs 6 --adam.lr 1e-2 --ds.param_dtype fp32
        --logger.run_dir {tmp_path / "run"} --train.backend torch"""
    train(parse("train_rm", words.split()))

    held = StepSet(Rows(records_of_the_rule(32, seed=2)), StepFormat(), tokenizer=tokenizer, max_len=64)
    judge = AutoModelForTokenClassification.from_pretrained(tmp_path / "prm", num_labels=1).eval()
    scorer = AutoModelForSequenceClassification.from_pretrained(tmp_path / "prm").eval()
    assert torch.equal(judge.score.weight, scorer.score.weight)
    right = total = 0
    with torch.no_grad():
        for answer in held:
            values = judge(answer.example.token_ids[None]).logits[0, list(answer.ends), 0]
            right += int(((values > 0) == torch.tensor(answer.good)).sum())
            total += len(answer.good)
    assert right / total > 0.95, f"{right} of {total} steps"


def test_check_shows_the_tokens_that_are_judged(tokenizer, tmp_path):
    Qwen2Config(vocab_size=len(ALPHABET) + 1).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    data = tmp_path / "steps.jsonl"
    data.write_text(json.dumps(RECORD) + "\n")
    assert guess(RECORD) == "prm"
    shown = lines_of(show(read(configure("prm", str(data), str(tmp_path), [])), 0), "prm")
    assert shown[0] == "steps good, bad, good"
    assert shown[1].count("⟦") == 3
    assert shown[1].endswith("x⟦<eos>⟧")
