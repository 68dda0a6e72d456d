"""Records of supervised fine-tuning become tokens and targets; what cannot be used is counted or refused."""

import logging

import pytest
import torch
from jsonl_records import written
from small_tokenizers import tokenizer
from vision_models import image as picture
from vision_models import write_vision_model

from openrlhf.data.examples import Example, ExampleFormat, ExampleSet
from openrlhf.data.files import DataError
from openrlhf.data.templates import image_places
from openrlhf.models.image_processor import ImageProcessor
from openrlhf.models.loading import load_tokenizer
from openrlhf.trainers.sft import pack
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


class TestImages:
    """With the processor of a small Qwen2.5-VL: 8 × 8 pixels are one token, so an image of 24 × 16 has six."""

    @pytest.fixture(scope="class")
    def vision(self, tmp_path_factory):
        folder = write_vision_model("qwen2_5_vl", tmp_path_factory.mktemp("model"))
        made = load_tokenizer(folder)
        return made, ImageProcessor.load(folder, made)

    @pytest.fixture
    def illustrated(self, tmp_path, vision):
        """Examples of records beside which the images 0.png … 3.png are."""
        for number in range(4):
            picture(number).save(tmp_path / f"{number}.png")
        made, processor = vision

        def make(records, *, max_len=100, cache_dir=None, **format):
            places = image_places(processor, made, key="images", most=3)
            return ExampleSet(
                written(tmp_path, records),
                ExampleFormat(**{"input_key": "q", "output_key": "a", "places": places} | format),
                tokenizer=made,
                max_len=max_len,
                image_processor=processor,
                cache_dir=cache_dir,
            )

        return make

    def read(self, vision, example):
        """The tokens, with one image token for each image, and what of them is learnt."""
        made, processor = vision
        ids = example.token_ids.tolist()
        for placed in reversed(example.images):
            assert tuple(ids[placed.start : placed.end]) == placed.image.token_ids
            assert not example.target_mask[placed.start : placed.end].any()
            ids[placed.start : placed.end] = [made.convert_tokens_to_ids(processor.image_token)]
        return ids, example.token_ids[example.target_mask].tolist()

    def tokens(self, vision, *texts):
        """The same of what is expected."""
        return tuple(vision[0](text, add_special_tokens=False)["input_ids"] for text in texts)

    MARK = "<|vision_start|><|image_pad|><|vision_end|>"

    def test_tokens_stand_where_their_images_do(self, illustrated, vision):
        (example,) = illustrated([{"q": "is<image>or<image>?", "a": "no", "images": ["0.png", "1.png"]}])
        eos = vision[0].eos_token
        expected = self.tokens(vision, f"is{self.MARK}or{self.MARK}?no{eos}", f"no{eos}")
        assert self.read(vision, example) == expected
        # "is" and what is before the image; its six tokens; what is after it, "or", what is before the next
        assert [(placed.start, placed.end) for placed in example.images] == [(3, 9), (13, 19)]
        assert len(example) == 19 + 1 + 1 + 2 + 1
        own = vision[1].prepare(picture(1))
        assert example.images[1].image.digest == own.digest

    def test_chats_in_which_every_answer_is_learnt(self, illustrated, vision):
        chat = [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]},
            {"role": "assistant", "content": "a cat"},
            {"role": "user", "content": "and <image>?"},
            {"role": "assistant", "content": "a dog"},
        ]
        record = {"messages": [{**chat[0], "content": "<image>what?"}, *chat[1:]], "images": ["0.png", "1.png"]}
        options = {"input_key": "messages", "output_key": None, "apply_chat_template": True}
        (last,) = illustrated([record], **options)
        (every,) = illustrated([record], multiturn=True, **options)
        # Items that bring their images: the marks of texts are text then, so the second image has its own item.
        items = [
            {**chat[0], "content": [{"type": "image", "path": "0.png"}, {"type": "text", "text": "what?"}]},
            chat[1],
            {"role": "user", "content": [{"type": "text", "text": "and "}, {"type": "image", "path": "1.png"}, "?"]},
            chat[3],
        ]
        (same,) = illustrated([{"messages": items}], **options)
        eos = vision[0].eos_token
        expected = f"user={self.MARK}what?!assistant=a cat!user=and {self.MARK}?!assistant=a dog!{eos}"
        assert self.read(vision, every) == self.tokens(vision, expected, f"a cat!a dog!{eos}")
        assert self.read(vision, last) == self.read(vision, same) == self.tokens(vision, expected, f"a dog!{eos}")

    def test_raw_text_is_learnt_but_for_its_images(self, illustrated, vision):
        (example,) = illustrated([{"q": "see <image> there", "images": ["0.png"]}], pretrain=True, output_key=None)
        (placed,) = example.images
        expected = torch.ones(len(example), dtype=torch.bool)
        expected[0] = False
        expected[placed.start : placed.end] = False
        assert torch.equal(example.target_mask, expected)

    def test_an_example_whose_image_would_be_cut_is_left_out_and_counted(self, illustrated, caplog):
        """The image of the first ends at token 8, that of the second at token 13."""
        records = [{"q": f"{'b' * n}<image>", "a": "c" * 20, "images": ["0.png"]} for n in (1, 6)]
        examples = illustrated(records, max_len=12)
        assert [len(example) for example in examples] == [12]
        assert examples[0].images[0].end == 8
        assert examples.num_truncated == 1
        assert caplog.messages == [
            "--data.dataset: left out 1 of 2 records, which have an image that --data.max_len would cut: "
            "record 2 of train.jsonl"
        ]

    def test_a_mark_in_a_record_without_images_is_text(self, illustrated, vision):
        (example,) = illustrated([{"q": "html <image>", "a": "b"}])
        assert (example.images, example.image_keys) == ((), ())
        places = image_places(vision[1], vision[0], key="images", most=3)
        format = ExampleFormat(input_key="q", output_key="a", places=places)
        (text,) = format.read({"q": "html <image>", "a": "b"}, vision[0]).texts
        assert text.text == "html <image>b"

    @pytest.mark.parametrize(
        ("record", "message"),
        [
            ({"images": ["none.png"]}, r"image 1 of 1: there is no image file none\.png"),
            ({"images": ["broken.png"]}, r"the image /.*/broken\.png is truncated or broken"),
            ({"images": ["0.png"] * 4}, "it has 4 images, and --data.max_images_per_prompt is 3"),
            ({"images": ["0.png"], "q": "<image> <image>"}, "it has 2 times <image>, and 1 images"),
            ({"q": "type <|image_pad|>"}, r"its text has <\|image_pad\|>"),
            ({"a": "<|image_pad|>"}, r"its text has <\|image_pad\|>"),
        ],
    )
    def test_the_record_is_named(self, illustrated, tmp_path, record, message):
        picture(0, width=64, height=64).save(tmp_path / "broken.png")
        (tmp_path / "broken.png").write_bytes((tmp_path / "broken.png").read_bytes()[:-3000])
        with pytest.raises(DataError, match=rf"^--data\.dataset, record 2 of train\.jsonl: .*{message}"):
            illustrated([{"q": "a", "a": "b"}, {"q": "a", "a": "b"} | record])

    def test_an_image_that_went_away_names_the_record(self, illustrated, tmp_path):
        examples = illustrated([{"q": "a", "a": "b", "images": ["0.png"]}])
        (tmp_path / "0.png").unlink()
        with pytest.raises(DataError, match=r"^--data\.dataset, record 1 of train\.jsonl: .*there is no image file"):
            _ = examples[0].images

    def test_tokens_are_kept_and_another_image_is_noticed(self, illustrated, tmp_path):
        record = {"q": "a", "a": "b", "images": ["0.png"]}
        first = illustrated([record], cache_dir=tmp_path / "cache")
        again = illustrated([record], cache_dir=tmp_path / "cache")
        assert torch.equal(first[0].token_ids, again[0].token_ids)
        assert again[0].images[0].start == first[0].images[0].start
        assert len(list((tmp_path / "cache").glob("*/ids.npy"))) == 1
        picture(0, width=8, height=8).save(tmp_path / "0.png")
        other = illustrated([record], cache_dir=tmp_path / "cache")
        assert len(other[0]) == len(first[0]) - 5
        first._prepare.cache_clear()
        with pytest.raises(
            DataError, match="image 1 of 1 has 1 tokens now, and 6 when the data was read: has the image"
        ):
            _ = first[0].images

    def test_examples_pack_with_their_images(self, illustrated):
        records = [
            {"q": "a", "a": "b", "images": ["0.png"]},
            {"q": "a", "a": "b"},
            {"q": "a", "a": "b", "images": "0.png"},
        ]
        packed = pack([*illustrated(records)])
        assert len(packed.images.inputs) == 1, "the same image is encoded once"
        assert int((packed.images.rows_T >= 0).sum()) == 12

    def test_no_image_anywhere_is_said(self, illustrated, caplog):
        illustrated([{"q": "a", "a": "b"}])
        assert caplog.messages == [
            "--data.dataset: no record has an image, under 'images' or in its messages: is --data.image_key one of q, a?"
        ]

    def test_messages_with_images_need_the_flag(self, examples):
        content = [{"type": "image"}, {"type": "text", "text": "a"}]
        chat = [{"role": "user", "content": content}, {"role": "assistant", "content": "b"}]
        assert "its messages have an image, and this run reads none: set --data.max_images_per_prompt" in refused(
            examples, [{"input": chat}], apply_chat_template=True
        )
