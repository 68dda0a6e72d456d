"""Pairs and judged answers: same prompt, other answers, and a number that goes with them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jsonl_records import written
from small_tokenizers import KINDS, tokenizer
from vision_models import image as picture
from vision_models import write_vision_model

from openrlhf.data.boundaries import Encoder, MarkedText, without_common_beginning
from openrlhf.data.files import DataError
from openrlhf.data.preferences import JudgedFormat, JudgedSet, PairFormat, PairSet
from openrlhf.data.templates import image_places
from openrlhf.models.image_processor import ImageProcessor
from openrlhf.models.loading import load_tokenizer
from openrlhf.trainers.preferences import pack_pairs

CHATML = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
USER = {"role": "user", "content": "q"}


def answer(content):
    return {"role": "assistant", "content": content}


@pytest.fixture
def make(tmp_path):
    def made(kind, format, records, *, max_len=200):
        return kind(written(tmp_path, records), format, tokenizer=tokenizer(chat_template=CHATML), max_len=max_len)

    return made


@pytest.fixture
def pairs(make):
    return lambda records, *, max_len=200, **format: make(PairSet, PairFormat(**format), records, max_len=max_len)


@pytest.fixture
def judged(make):
    return lambda records, **format: make(JudgedSet, JudgedFormat(**format), records)


def learnt(example):
    return tokenizer().decode(example.token_ids[example.target_mask])


def whole(example):
    return tokenizer().decode(example.token_ids)


class TestPairs:
    def test_strings(self, pairs):
        (pair,) = pairs([{"p": "Q:", "chosen": " a", "rejected": " b\n"}], prompt_key="p")
        assert (learnt(pair.chosen), learnt(pair.rejected)) == (" a</s>", " b</s>")
        assert whole(pair.chosen) == "Q: a</s>"
        assert pair.margin == 0.0
        assert pair.where == "record 1 of train.jsonl"

    def test_what_tells_answers_apart_is_learnt(self, pairs):
        """`A: ` + `the`, `A: ` + `a`: both tokens begin with the prompt's space, and are targets all the same."""
        (pair,) = pairs([{"p": "A: ", "chosen": "the", "rejected": "a"}], prompt_key="p")
        assert (learnt(pair.chosen), learnt(pair.rejected)) == (" the</s>", " a</s>")

    def test_input_template(self, pairs):
        record = {"p": "x", "chosen": "a", "rejected": "b"}
        (pair,) = pairs([record], prompt_key="p", input_template="Q: {}\nA:")
        assert whole(pair.rejected) == "Q: x\nA:b</s>"

    def test_chats_without_a_prompt_key(self, pairs):
        """The prompt is everything before the last message."""
        record = {"chosen": [USER, answer("a")], "rejected": [USER, answer("b")]}
        (pair,) = pairs([record], apply_chat_template=True)
        assert (learnt(pair.chosen), learnt(pair.rejected)) == ("a<|end|></s>", "b<|end|></s>")

    @pytest.mark.parametrize("prompt", ["q", [USER]])
    @pytest.mark.parametrize("wrap", [str, lambda text: [answer(text)]])
    def test_chats_with_a_prompt_key_are_joined(self, pairs, prompt, wrap):
        record = {"p": prompt, "chosen": wrap("a"), "rejected": wrap("b")}
        (pair,) = pairs([record], prompt_key="p", apply_chat_template=True)
        assert whole(pair.chosen) == "<|start|>user\nq<|end|>\n<|start|>assistant\na<|end|></s>"
        assert learnt(pair.rejected) == "b<|end|></s>"

    def test_a_reward_model_reads_whole_texts(self, pairs):
        """No prompt is told apart: all tokens but the first are marked."""
        (pair,) = pairs([{"chosen": "Q: a\n", "rejected": "Q: b"}], answers_only=False)
        assert whole(pair.chosen) == "Q: a</s>"
        assert pair.chosen.target_mask.tolist() == [False] + [True] * (len(pair.chosen) - 1)

    def test_a_reward_model_compares_whole_conversations(self, pairs):
        other = {"role": "user", "content": "another"}
        record = {"chosen": [USER, answer("a")], "rejected": [other, answer("a")]}
        (pair,) = pairs([record], apply_chat_template=True, answers_only=False)
        assert "another" in whole(pair.rejected)

    def test_texts_without_a_prompt_begin_alike(self, pairs):
        """The prompt is the tokens that both begin with, of which a space before the answer may be none."""
        (pair,) = pairs([{"chosen": "Q: 2+3= A: the answer is 5.", "rejected": "Q: 2+3= A: a cat"}])
        assert (learnt(pair.chosen), learnt(pair.rejected)) == (" the answer is 5.</s>", " a cat</s>")
        assert whole(pair.chosen) == "Q: 2+3= A: the answer is 5.</s>"

    def test_texts_that_have_nothing_in_common(self, pairs):
        """Nothing predicts the first token, so it is the prompt."""
        (pair,) = pairs([{"chosen": "the cat", "rejected": "a b"}])
        assert (learnt(pair.chosen), learnt(pair.rejected)) == (" cat</s>", " b</s>")

    def test_a_text_that_is_the_beginning_of_the_other(self, pairs):
        (pair,) = pairs([{"chosen": "Q: a", "rejected": "Q: a b\n"}])
        assert (learnt(pair.chosen), learnt(pair.rejected)) == ("</s>", " b</s>")

    @given(st.data())
    def test_what_is_not_learnt_of_undivided_texts_is_the_same_in_both(self, data):
        """Whatever merges across the end of the prompt, also in a tokenizer that merges over spaces."""
        kind = data.draw(st.sampled_from(KINDS))
        prompt, first, second = (data.draw(st.text(st.sampled_from("ab c=A:. the"), max_size=12)) for _ in range(3))
        texts = [MarkedText(prompt + rest + ".", None, closed=True) for rest in (first, second)]
        one, other = without_common_beginning(*Encoder(tokenizer(kind), max_len=100).encode(texts))
        assert one.ids[: one.prompt_length].tolist() == other.ids[: other.prompt_length].tolist()
        assert one.targets[max(1, one.prompt_length) :].all()
        assert not one.targets[: one.prompt_length].any()
        if one.ids.tolist() != other.ids.tolist():
            assert one.ids[one.prompt_length :].tolist() != other.ids[other.prompt_length :].tolist()

    def test_length_is_of_both(self, pairs):
        made = pairs([{"p": "Q", "chosen": " a", "rejected": " a a"}], prompt_key="p")
        assert made.lengths == [3 + 4] == [len(made[0])]
        assert made.target_counts == [2 + 3]


class TestMargins:
    def test_margin(self, pairs):
        made = pairs(
            [{"p": "Q", "chosen": "a", "rejected": "b", "margin": m} for m in (1.5, "2", None, 0)], prompt_key="p"
        )
        assert [pair.margin for pair in made] == [1.5, 2.0, 0.0, 0.0]

    @pytest.mark.parametrize("margin", ["much", [], "nan", "inf"])
    def test_no_number(self, pairs, margin):
        with pytest.raises(DataError, match=r"record 1 of train.jsonl: its 'margin' must be a number"):
            pairs([{"p": "Q", "chosen": "a", "rejected": "b", "margin": margin}], prompt_key="p")


class TestWhatIsLeftOut:
    def test_pairs_that_truncation_makes_equal(self, pairs):
        """At 10 tokens ` a` × 20 + ` b` and ` a` × 20 + ` c` are the same; a difference in the first 10 stays."""
        long = " a" * 20
        records = [
            {"p": "Q", "chosen": long + " b", "rejected": long + " c"},
            {"p": "Q", "chosen": " b" + long, "rejected": " c" + long},
        ]
        made = pairs(records, prompt_key="p", max_len=10)
        assert made.skipped == {"compare answers that differ only beyond --data.max_len": 1}
        assert made[0].where == "record 2 of train.jsonl"
        assert made[0].chosen.token_ids.tolist() != made[0].rejected.token_ids.tolist()

    def test_one_answer_the_beginning_of_the_other(self, pairs):
        """Both are cut to the same 10 tokens only if the shorter one's end is cut off too."""
        records = [{"p": "Q", "chosen": " a" * n, "rejected": " a" * 20} for n in (8, 9)]
        made = pairs(records, prompt_key="p", max_len=10)
        assert [pair.where for pair in made] == ["record 1 of train.jsonl"]

    def test_an_answer_against_itself(self, pairs):
        records = [{"p": "Q", "chosen": "a", "rejected": rejected} for rejected in ("a\n", "b")]
        assert pairs(records, prompt_key="p").skipped == {"compare an answer with itself": 1}

    def test_answers_to_different_prompts(self, pairs):
        other = {"role": "user", "content": "another"}
        records = [{"chosen": [USER, answer("a")], "rejected": [user, answer("b")]} for user in (other, USER)]
        assert pairs(records, apply_chat_template=True).skipped == {"compare answers to different prompts": 1}

    def test_empty_and_long(self, pairs):
        records = [
            {"p": "", "chosen": "a", "rejected": "b"},
            {"p": "Q", "chosen": "a", "rejected": " "},
            {"p": "Q" + " a" * 7, "chosen": "a", "rejected": "b"},
            {"p": "Q", "chosen": "a", "rejected": "b"},
        ]
        made = pairs(records, prompt_key="p", max_len=10)
        assert made.skipped == {
            "have an empty prompt": 1,
            "have an empty answer": 1,
            "leave no room for an answer within --data.max_len": 1,
        }

    def test_a_chat_without_a_prompt(self, pairs):
        records = [
            {"chosen": [answer("a")], "rejected": [answer("b")]},
            {"chosen": [USER, answer("a")], "rejected": []},
        ]
        with pytest.raises(
            DataError, match=r"no usable record among 2: 1 have an empty prompt, 1 have an empty answer"
        ):
            pairs(records, apply_chat_template=True)


class TestJudged:
    @pytest.mark.parametrize(
        ("label", "desirable"),
        [(wanted, True) for wanted in (True, 1, 1.0, "true", "1")]
        + [(unwanted, False) for unwanted in (False, 0, -1, -1.0, "False", "-1")],
    )
    def test_labels(self, judged, label, desirable):
        made = judged([{"prompt": "Q", "response": " a", "label": label}])
        assert made[0].desirable is desirable
        assert made.desirable == [desirable]
        assert learnt(made[0].example) == " a</s>"

    @pytest.mark.parametrize("label", [0.5, 4, "good", None, [], "nan"])
    def test_other_labels_are_refused(self, judged, label):
        with pytest.raises(DataError, match=r"its 'label' must be true or 1 \(wanted\), or false, 0 or -1"):
            judged([{"prompt": "Q", "response": "a", "label": label}])

    def test_keys(self, judged):
        made = judged([{"q": "Q", "a": "b", "ok": 1}], prompt_key="q", response_key="a", label_key="ok")
        assert learnt(made[0].example) == "b</s>"
        with pytest.raises(DataError, match=r"it has no 'response': set --data\.response_key to one of prompt, label"):
            judged([{"prompt": "Q", "label": 1}])

    @pytest.mark.parametrize("prompt", ["q", [USER]])
    @pytest.mark.parametrize("response", ["a", [answer("a")]])
    def test_chats(self, judged, prompt, response):
        (one,) = judged([{"prompt": prompt, "response": response, "label": 1}], apply_chat_template=True)
        assert whole(one.example) == "<|start|>user\nq<|end|>\n<|start|>assistant\na<|end|></s>"
        assert learnt(one.example) == "a<|end|></s>"
        assert one.where == "record 1 of train.jsonl"


class TestImages:
    """With the processor of a small Qwen2.5-VL: an image of 24 × 16 pixels has six tokens."""

    @pytest.fixture(scope="class")
    def vision(self, tmp_path_factory):
        folder = write_vision_model("qwen2_5_vl", tmp_path_factory.mktemp("model"))
        made = load_tokenizer(folder)
        return made, ImageProcessor.load(folder, made)

    @pytest.fixture
    def illustrated(self, tmp_path, vision):
        made, processor = vision
        for number in range(2):
            picture(number).save(tmp_path / f"{number}.png")

        def make(kind, format, records, **options):
            places = image_places(processor, made, key="images", most=2)
            return kind(
                written(tmp_path, records),
                format(**{"places": places} | options),
                tokenizer=made,
                max_len=60,
                image_processor=processor,
            )

        return make

    @pytest.mark.parametrize("answers_only", [True, False])
    @pytest.mark.parametrize("form", ["texts", "whole texts", "chats", "whole chats"])
    def test_both_answers_have_the_images_of_the_prompt(self, illustrated, form, answers_only):
        """A reward model's targets are all tokens but those of images."""
        record = {"prompt": "is<image>?", "chosen": "a", "rejected": "b", "images": ["0.png"]}
        chat = [{"role": "user", "content": "is<image>?"}]
        record |= {
            "texts": {},
            "whole texts": {"chosen": "is<image>?a", "rejected": "is<image>?b"},
            "chats": {"prompt": chat, "chosen": [answer("a")], "rejected": [answer("b")]},
            "whole chats": {"chosen": [*chat, answer("a")], "rejected": [*chat, answer("b")]},
        }[form]
        (pair,) = illustrated(
            PairSet,
            PairFormat,
            [record],
            prompt_key=None if "whole" in form else "prompt",
            apply_chat_template="chats" in form,
            answers_only=answers_only,
        )
        assert pair.chosen.image_keys == pair.rejected.image_keys
        (one,), (other,) = pair.chosen.images, pair.rejected.images
        assert one.image is other.image, "it is prepared once"
        assert one.start == other.start
        for example in (pair.chosen, pair.rejected):
            assert not example.target_mask[one.start : one.end].any()
            assert tuple(example.token_ids[one.start : one.end].tolist()) == one.image.token_ids
        packed = pack_pairs([pair])
        assert packed.shared_prefixes[1] >= one.end
        assert len(packed.images.inputs) == 1

    def test_answers_that_differ_in_their_images_alone(self, illustrated):
        """Images of the same size have the same tokens, and are not the same answer."""
        chat = {"role": "user", "content": "draw"}
        drawn = [[chat, answer([{"type": "image", "path": f"{i}.png"}, {"type": "text", "text": "!"}])] for i in (0, 1)]
        record = {"chosen": drawn[0], "rejected": drawn[1]}
        (pair,) = illustrated(PairSet, PairFormat, [record], apply_chat_template=True)
        assert torch.equal(pair.chosen.token_ids, pair.rejected.token_ids)
        assert pair.chosen.images[0].image.digest != pair.rejected.images[0].image.digest
        assert pack_pairs([pair]).shared_prefixes[1] == pair.chosen.images[0].start

    def test_judged_answers(self, illustrated):
        records = [
            {"prompt": "is<image>?", "response": "a", "label": 1, "images": ["0.png"]},
            {"prompt": "is<image>?", "response": "a", "label": 0, "images": ["1.png"]},
        ]
        for chat in (False, True):
            first, second = illustrated(JudgedSet, JudgedFormat, records, apply_chat_template=chat)
            assert torch.equal(first.example.token_ids, second.example.token_ids)
            assert first.example.image_keys != second.example.image_keys
            assert len(first.example.images) == 1

    def test_a_judged_answer_has_no_images(self, illustrated):
        response = [answer([{"type": "image", "path": "0.png"}])]
        record = {"prompt": [{"role": "user", "content": "draw"}], "response": response, "label": 1}
        with pytest.raises(DataError, match=r"record 1 of train\.jsonl: its 'response' has an image: answers are read"):
            illustrated(JudgedSet, JudgedFormat, [record], apply_chat_template=True)
