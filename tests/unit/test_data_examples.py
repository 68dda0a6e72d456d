"""Records of supervised fine-tuning become tokens and targets; what cannot be used is counted or refused."""

import logging

import pytest
import torch
from jsonl_records import written
from small_tokenizers import tokenizer

from openrlhf.data.examples import Example, ExampleFormat, ExampleSet
from openrlhf.data.files import DataError
from openrlhf.types import PackedTokens

CHATML = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


CHAT = [
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": "b1"},
    {"role": "user", "content": "q2"},
    {"role": "assistant", "content": "b2"},
]


@pytest.fixture
def examples(tmp_path):
    def make(records, *, max_len=200, eos="</s>", **format):
        return ExampleSet(
            written(tmp_path, records),
            ExampleFormat(**format),
            tokenizer=tokenizer(chat_template=CHATML, eos=eos),
            max_len=max_len,
        )

    return make


def refused(call, *args, **options):
    with pytest.raises(DataError) as caught:
        call(*args, **options)
    return str(caught.value)


def said(example):
    """What is given, and what is learnt."""
    made = tokenizer()
    return made.decode(example.token_ids[~example.target_mask]), made.decode(example.token_ids[example.target_mask])


class TestText:
    def test_prompt_and_answer(self, examples):
        (example,) = examples([{"q": "2+3=", "a": " 5\n"}], input_key="q", output_key="a")
        assert said(example) == ("2+3=", " 5</s>")
        assert example.where == "record 1 of train.jsonl"
        assert example.token_ids.dtype == torch.int64
        assert example.target_mask.dtype == torch.bool

    def test_input_template(self, examples):
        (example,) = examples([{"input": "{2}", "a": "5"}], output_key="a", input_template="Q: {}\nA:")
        assert said(example) == ("Q: {2}\nA:", "5</s>")

    def test_strings_in_a_chat_template(self, examples):
        """The template ends with a newline and no end-of-sequence: the one goes, the other comes."""
        (example,) = examples([{"input": "q", "a": "b"}], output_key="a", apply_chat_template=True)
        assert said(example) == ("<|start|>user\nq<|end|>\n<|start|>assistant\n", "b<|end|></s>")

    def test_a_chat_template_that_ends_with_end_of_sequence(self, examples):
        (example,) = examples([{"input": "q", "a": "b"}], output_key="a", apply_chat_template=True, eos="<|end|>")
        assert said(example)[1] == "b<|end|>"

    def test_chats_under_both_keys(self, examples):
        record = {
            "input": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
            "output": [{"role": "assistant", "content": "b"}],
        }
        (example,) = examples([record], output_key="output", apply_chat_template=True)
        assert said(example)[0].startswith("<|start|>system\ns<|end|>\n<|start|>user\nq")
        assert said(example)[1] == "b<|end|></s>"

    def test_a_whole_chat_learns_its_last_message(self, examples):
        (example,) = examples([{"input": CHAT}], apply_chat_template=True)
        assert said(example)[1] == "b2<|end|></s>"

    def test_multiturn_learns_every_answer(self, examples):
        (example,) = examples([{"input": CHAT}], apply_chat_template=True, multiturn=True)
        assert said(example)[1] == "b1<|end|>b2<|end|></s>"
        assert "q2" in said(example)[0]

    def test_pretraining_learns_all_but_the_first_token(self, examples):
        """Raw: the newline stays, and the text does not end."""
        (example,) = examples([{"input": "the cat\n"}], pretrain=True)
        assert tokenizer().decode(example.token_ids) == "the cat\n"
        assert example.target_mask.tolist() == [False] + [True] * (len(example) - 1)

    @pytest.mark.parametrize("templates", [{"input_template": "User: {}\nAssistant: "}, {"apply_chat_template": True}])
    def test_raw_text_is_raw_whatever_the_templates(self, examples, templates):
        """`train_sft` has an input template by default."""
        (example,) = examples([{"input": "the cat\n"}], pretrain=True, **templates)
        assert tokenizer().decode(example.token_ids) == "the cat\n"
        (example,) = examples([{"input": "the", "a": " cat"}], pretrain=True, output_key="a", **templates)
        assert tokenizer().decode(example.token_ids) == "the cat"

    def test_a_chat_is_no_raw_text_without_its_template(self, examples):
        (example,) = examples([{"input": CHAT[:2]}], pretrain=True, apply_chat_template=True)
        rendered = "<|start|>user\nq1<|end|>\n<|start|>assistant\nb1<|end|>\n"
        assert tokenizer().decode(example.token_ids) == rendered
        assert example.target_mask.tolist() == [False] + [True] * (len(example) - 1)
        assert "which needs --data.apply_chat_template" in refused(examples, [{"input": CHAT}], pretrain=True)

    def test_what_is_not_an_answer(self, examples):
        assert "set --data.output_key, or --model.pretrain_mode_enable" in refused(examples, [{"input": "q"}])
        assert "not a chat with an answer: set --data.output_key" in refused(
            examples, [{"input": "q"}], apply_chat_template=True
        )
        assert refused(examples, [{"input": "q", "a": 3}], output_key="a") == (
            "--data.dataset, record 1 of train.jsonl: its 'a' must be a string or a list of messages, got int"
        )
        assert "it has no 'b': set --data.output_key to one of input, a" in refused(
            examples, [{"input": "q", "a": "x"}], output_key="b"
        )
        assert "which needs --data.apply_chat_template" in refused(examples, [{"input": [], "a": "x"}], output_key="a")


class TestWhatIsLeftOut:
    def test_each_reason_is_counted_and_named(self, examples, caplog):
        """`Q` + 7 × ` a` is 8 tokens: at max_len 10 a prompt of 8 = 10 − 2 tokens is too long, one of 7 is not."""
        records = [
            {"input": "Q" + " a" * 6, "a": "b"},
            {"input": " ", "a": "b"},
            {"input": "Q" + " a" * 7, "a": "b"},
            {"input": "Q", "a": "\n"},
            {"input": "Q", "a": None},
        ]
        with caplog.at_level(logging.WARNING):
            made = examples(records, output_key="a", max_len=10)
        assert made.skipped == {
            "have an empty prompt": 1,
            "have an empty answer": 2,
            "leave no room for an answer within --data.max_len": 1,
        }
        assert len(made) == 1
        assert (
            "--data.dataset: left out 2 of 5 records, which have an empty answer: "
            "record 4 of train.jsonl, record 5 of train.jsonl"
        ) in caplog.messages

    def test_a_cut_answer_has_no_end(self, examples):
        made = examples([{"input": "Q", "a": " a" * 20}, {"input": "Q", "a": " a"}], output_key="a", max_len=10)
        assert said(made[0]) == ("Q", " a" * 9)
        assert made.num_truncated == 1

    def test_a_chat_that_the_user_ends(self, examples):
        chats = [
            {"input": [{"role": "user", "content": "q"}, {"role": role, "content": "x"}]}
            for role in ("user", "assistant")
        ]
        made = examples(chats, apply_chat_template=True)
        assert made.skipped == {"have no message of the assistant to learn": 1}
        assert made[0].where == "record 2 of train.jsonl"

    def test_nothing_is_left(self, examples):
        assert refused(examples, [{"input": "", "a": "b"}], output_key="a") == (
            "--data.dataset: no usable record among 1: 1 have an empty prompt"
        )

    def test_a_template_that_drops_words_is_told(self, tmp_path, caplog):
        template = CHATML.replace("m.content", "m.content.split('</think>')[-1]")
        with caplog.at_level(logging.WARNING):
            ExampleSet(
                written(tmp_path, [{"input": "q", "a": "<think>why</think>b"}]),
                ExampleFormat(output_key="a", apply_chat_template=True),
                tokenizer=tokenizer(chat_template=template),
                max_len=100,
            )
        assert "in 1 of 1 samples the chat template leaves out or changes words of an answer" in caplog.text


class TestSet:
    def test_sequence(self, examples):
        made = examples([{"input": "Q", "a": " a" * n} for n in range(1, 6)], output_key="a")
        assert len(made) == 5
        assert made.lengths == [3, 4, 5, 6, 7]
        assert made.target_counts == [2, 3, 4, 5, 6]
        assert [len(example) for example in made] == made.lengths
        assert len(made[-1]) == 7
        assert [len(example) for example in made[1:3]] == [4, 5]
        with pytest.raises(IndexError):
            made[5]

    def test_examples_pack(self, examples):
        made = examples([{"input": "Q", "a": " a"}, {"input": "Q", "a": " b"}], output_key="a")
        packed = PackedTokens.from_sequences([e.token_ids for e in made], [e.target_mask for e in made])
        assert packed.num_actions == sum(made.target_counts)


def test_an_example_checks_itself():
    with pytest.raises(ValueError, match="cannot be learnt"):
        Example(token_ids=torch.tensor([1, 2]), target_mask=torch.tensor([True, True]))
    with pytest.raises(ValueError, match="mask of shape"):
        Example(token_ids=torch.tensor([1, 2]), target_mask=torch.tensor([False]))
