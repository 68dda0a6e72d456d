"""Prompts are checked before training, and their order is a function of (seed, ordinal)."""

import json
import logging
import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vision_models import image as picture
from vision_models import png_that_says, write_vision_model

from openrlhf.data.files import DataError
from openrlhf.data.image_places import DataImages
from openrlhf.data.images import read_image
from openrlhf.data.prompts import PromptSet, PromptStream
from openrlhf.data.sources import load_records
from openrlhf.data.templates import image_places
from openrlhf.models.image_processor import ImageProcessor
from openrlhf.models.loading import load_tokenizer


class WordTokenizer:
    """A token per word; counts how it is called."""

    def __init__(self):
        self.calls = 0

    def __call__(self, texts, *, add_special_tokens):
        assert not add_special_tokens
        self.calls += 1
        return {"input_ids": [text.split() for text in texts]}


@pytest.fixture
def load(tmp_path):
    """Records of a file train.jsonl."""

    def write(records):
        path = tmp_path / "train.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return load_records(str(path))

    return write


@pytest.fixture
def prompts(load):
    return PromptSet(load([{"input": f"q{i}", "label": i} for i in range(10)]), label_key="label")


class TestPromptSet:
    def test_file_order_with_ordinals(self, prompts):
        assert [(p.ordinal, p.text, p.label) for p in prompts] == [(i, f"q{i}", i) for i in range(10)]
        assert prompts[-1].text == "q9"
        assert [p.text for p in prompts[2:4]] == ["q2", "q3"]

    def test_label_and_datasource_are_optional(self, load):
        first, second = PromptSet(load([{"input": "a"}, {"input": "b", "datasource": "aime"}]))
        assert (first.label, first.datasource) == ("", "default")
        assert second.datasource == "aime"

    def test_a_prompt_of_several_data_sets_is_of_one_of_them(self, tmp_path):
        """Training prompts without a datasource are named after their file; those of an evaluation are not."""
        for name, records in {
            "math": [{"input": "a"}, {"input": "b", "datasource": "aime"}],
            "chat": [{"input": "c"}],
        }.items():
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        both = load_records(f"{tmp_path}/math.jsonl,{tmp_path}/chat.jsonl")
        prompts = PromptSet(both)
        assert [prompt.datasource for prompt in prompts] == ["math", "aime", "chat"]
        assert prompts.datasources == {"math", "aime", "chat"}
        assert PromptSet(both, flag="--eval.dataset").datasources == {"default", "aime"}
        assert PromptSet(load_records(f"{tmp_path}/chat.jsonl")).datasources == {"default"}

    def test_label_of_any_kind(self, load):
        labels = [0, False, "", {"tests": ["x"]}]
        prompts = PromptSet(load([{"input": "a", "label": label} for label in labels]), label_key="label")
        assert [p.label for p in prompts] == labels

    def test_wrong_input_key(self, load):
        with pytest.raises(DataError) as caught:
            PromptSet(load([{"question": "a", "label": 1}]), flag="--eval.dataset")
        assert str(caught.value) == (
            "--eval.dataset, record 1 of train.jsonl: it has no 'input': set --data.input_key to one of question, label"
        )

    @pytest.mark.parametrize("second", [{"input": "b", "answer": "5"}, {"input": "b", "answer": "5", "label": None}])
    def test_a_label_may_be_null_or_missing_in_some_records(self, load, second, caplog):
        prompts = PromptSet(load([{"input": "a", "label": 1}, second]), label_key="label")
        assert [prompt.label for prompt in prompts] == [1, None]
        assert caplog.messages == [
            "--data.prompt_dataset: 1 of 2 records have no 'label': rewards and agents get None for it: "
            "record 2 of train.jsonl"
        ]

    def test_a_label_that_no_record_has_is_a_mistake(self, load):
        with pytest.raises(DataError) as caught:
            PromptSet(load([{"input": "a", "answer": 5}] * 3), label_key="label")
        assert str(caught.value) == (
            "--data.prompt_dataset, record 1 of train.jsonl: it has no 'label': "
            "set --data.label_key to one of input, answer"
        )

    def test_empty_and_long_prompts_are_left_out_and_counted(self, load, caplog):
        """10 records: 2 empty, 6 of more than 2 words; two warnings, the second naming five of the six."""
        records = [{"input": text} for text in ["a", "", "a b", " ", *["a b c"] * 6]]
        tokenizer = WordTokenizer()
        with caplog.at_level(logging.WARNING):
            prompts = PromptSet(load(records), tokenizer=tokenizer, max_prompt_tokens=2, long_prompts="skip")
        assert [p.text for p in prompts] == ["a", "a b"]
        assert prompts.where(1) == "record 3 of train.jsonl"
        assert tokenizer.calls == 1
        assert [record.getMessage() for record in caplog.records] == [
            "--data.prompt_dataset: left out 2 of 10 prompts, which have an empty 'input': "
            "record 2 of train.jsonl, record 4 of train.jsonl",
            "--data.prompt_dataset: left out 6 of 10 prompts, which are longer than 2 tokens: "
            + ", ".join(f"record {n} of train.jsonl" for n in range(5, 10))
            + ", …",
        ]

    def test_long_prompts_are_kept_and_counted(self, load, caplog):
        """Whoever plays them cuts them from the left, when it is known what is read first."""
        prompts = PromptSet(load([{"input": "a"}, {"input": "a b c"}]), tokenizer=WordTokenizer(), max_prompt_tokens=2)
        assert [p.text for p in prompts] == ["a", "a b c"]
        assert caplog.messages == [
            "--data.prompt_dataset: 1 of 2 prompts are longer than 2 tokens and lose their beginning (raise "
            "--data.max_len or lower --rollout.max_new_tokens; --data.long_prompts skip leaves them out): "
            "record 2 of train.jsonl"
        ]

    def test_long_prompts_may_end_the_run(self, load):
        with pytest.raises(
            DataError, match=r"record 2 of train\.jsonl: 2 of 3 prompts are longer than 2 tokens: raise"
        ):
            PromptSet(
                load([{"input": "a"}, {"input": "a b c"}, {"input": "a b c"}]),
                tokenizer=WordTokenizer(),
                max_prompt_tokens=2,
                long_prompts="error",
            )

    def test_of_a_huge_prompt_the_end_is_tokenised(self, load, monkeypatch):
        """Words of at most 3 letters: 2 + 1 of them have 9 characters, and no more than the last 10 are read."""
        monkeypatch.setattr("openrlhf.data.prompts.HUGE", 10)
        monkeypatch.setattr(WordTokenizer, "get_vocab", lambda self: {"a": 0, "bcd": 1}, raising=False)
        prompts = PromptSet(load([{"input": "a " * 50 + "end"}]), tokenizer=WordTokenizer(), max_prompt_tokens=2)
        assert prompts[0].text == " a a a end"

    def test_the_limit_itself_fits(self, load):
        assert len(PromptSet(load([{"input": "a b"}]), tokenizer=WordTokenizer(), max_prompt_tokens=2)) == 1

    def test_nothing_left(self, load):
        with pytest.raises(DataError) as caught:
            PromptSet(
                load([{"input": "a b c"}, {"input": ""}]),
                tokenizer=WordTokenizer(),
                max_prompt_tokens=2,
                long_prompts="skip",
            )
        assert str(caught.value) == (
            "--data.prompt_dataset: no usable prompt in 2 records: 1 are empty, 1 are longer than 2 tokens "
            "(raise --data.max_len or lower --rollout.max_new_tokens)"
        )

    def test_template_without_a_place_is_not_used(self, load, caplog):
        prompts = PromptSet(load([{"input": "a"}]), input_template="Answer:")
        assert prompts[0].text == "a"
        assert "has no {} for the prompt: it is not used" in caplog.text

    def test_many_prompts_are_tokenised_in_batches(self, load):
        tokenizer = WordTokenizer()
        PromptSet(load([{"input": "a"}] * 2500), tokenizer=tokenizer, max_prompt_tokens=5)
        assert tokenizer.calls == 3


class TestPromptStream:
    def test_each_pass_is_a_new_permutation(self, prompts):
        stream = PromptStream(prompts, seed=1, num_episodes=3)
        passes = [[p.text for p in stream.take(10)] for _ in range(3)]
        assert all(sorted(texts) == [f"q{i}" for i in range(10)] for texts in passes)
        assert len({tuple(texts) for texts in passes}) == 3

    def test_order_is_fixed_for_good(self, prompts):
        """A checkpoint's ordinals must mean the same prompts in every later version."""
        order = " ".join(p.text for p in PromptStream(prompts, seed=42).take(10))
        assert order == "q4 q8 q1 q9 q3 q6 q0 q7 q2 q5"

    def test_seed_changes_the_order(self, prompts):
        orders = {tuple(p.text for p in PromptStream(prompts, seed=seed).take(10)) for seed in (-1, 0, 1, 2)}
        assert len(orders) == 4

    def test_an_ordinal_is_one_prompt_however_it_is_reached(self, prompts):
        stream = PromptStream(prompts, seed=7)
        taken = [*stream.take(3), *stream.take(25)]
        assert [p.ordinal for p in taken] == list(range(28))
        fresh = PromptStream(prompts, seed=7)
        assert [fresh.prompt_at(ordinal) for ordinal in reversed(range(28))] == taken[::-1]
        assert fresh.next_ordinal == 0

    def test_fewer_at_the_end(self, prompts):
        stream = PromptStream(prompts, seed=1, num_episodes=1)
        assert len(stream) == 10
        assert [len(stream.take(4)) for _ in range(4)] == [4, 4, 2, 0]
        assert stream.remaining == 0
        with pytest.raises(IndexError):
            stream.prompt_at(10)

    def test_endless(self, prompts):
        stream = PromptStream(prompts, seed=1)
        assert len(stream.take(95)) == 95
        assert stream.remaining is None
        with pytest.raises(TypeError):
            len(stream)

    def test_without_shuffling(self, prompts):
        stream = PromptStream(prompts, seed=1, shuffle=False, num_episodes=2)
        assert [p.text for p in stream] == [f"q{i}" for i in range(10)] * 2

    def test_names_the_record(self, prompts):
        stream = PromptStream(prompts, seed=1)
        text = stream.prompt_at(13).text
        assert stream.where(13) == f"record {int(text[1:]) + 1} of train.jsonl"

    def test_continues_where_it_was(self, prompts):
        stream = PromptStream(prompts, seed=5)
        stream.take(13)
        state = json.loads(json.dumps(stream.state_dict()))
        resumed = PromptStream(prompts, seed=5)
        resumed.load_state_dict(state)
        assert resumed.take(20) == stream.take(20)

    def test_what_is_given_back_comes_first_and_survives_a_restart(self, prompts):
        stream = PromptStream(prompts, seed=5, num_episodes=1)
        taken = stream.take(6)
        stream.give_back([4, 1])
        stream.give_back([3])
        assert (stream.remaining, stream.next_ordinal) == (7, 6)
        resumed = PromptStream(prompts, seed=5, num_episodes=1)
        resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
        assert stream.take(2) == resumed.take(2) == [taken[1], taken[3]]
        assert [p.ordinal for p in resumed] == [4, 6, 7, 8, 9]
        with pytest.raises(ValueError, match=r"\[8\] were never taken"):
            stream.give_back([1, 8])

    def test_state_of_other_data_is_refused(self, prompts, load, caplog):
        state = PromptStream(prompts, seed=5).state_dict()
        with pytest.raises(DataError, match=r"was made with --train\.seed 5, now it is 6"):
            PromptStream(prompts, seed=6).load_state_dict(state)
        fewer = PromptSet(load([{"input": "q"}]))
        with pytest.raises(DataError, match="was made with 10 prompts, now there are 1"):
            PromptStream(fewer, seed=5).load_state_dict(state)
        others = PromptSet(load([{"input": f"other {i}"} for i in range(10)]))
        PromptStream(others, seed=5).load_state_dict(state)
        assert "not those the checkpoint was made with" in caplog.text

    @given(seed=st.integers(-(2**70), 2**70), takes=st.lists(st.integers(0, 7), max_size=8))
    def test_takes_partition_the_stream(self, small_prompts, seed, takes):
        """Whatever is taken at a time, two passes over 4 prompts give each prompt twice, ordinals in order."""
        stream = PromptStream(small_prompts, seed=seed, num_episodes=2)
        taken = [prompt for n in takes for prompt in stream.take(n)] + list(stream)
        assert [p.ordinal for p in taken] == list(range(8))
        assert set(Counter(p.text for p in taken).values()) == {2}


@pytest.fixture(scope="module")
def small_prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "small.jsonl"
    path.write_text("".join(json.dumps({"input": f"q{i}"}) + "\n" for i in range(4)))
    return PromptSet(load_records(str(path)))


class TestImages:
    """With the processor of a small Qwen2.5-VL: 8 × 8 pixels are one token, so an image of 24 × 16 has six."""

    @pytest.fixture(scope="class")
    def vision(self, tmp_path_factory):
        """Tokenizer and image processor."""
        folder = write_vision_model("qwen2_5_vl", tmp_path_factory.mktemp("model"))
        tokenizer = load_tokenizer(folder)
        return tokenizer, ImageProcessor.load(folder, tokenizer)

    @pytest.fixture
    def read(self, load, tmp_path, vision):
        """Prompts of records beside which the images 0.png … 3.png are."""
        for number in range(4):
            picture(number).save(tmp_path / f"{number}.png")
        tokenizer, processor = vision

        def made(records, *, most=3, allow_urls=False, **options):
            places = image_places(processor, tokenizer, key="images", most=most, allow_urls=allow_urls)
            options = {"tokenizer": tokenizer, "images": DataImages(places, processor)} | options
            return PromptSet(load(records), **options)

        return made

    def test_a_prompt_has_a_token_for_each_image(self, read, tmp_path, vision):
        records = [
            {"input": "<image> or <image>", "images": ["0.png", str(tmp_path / "1.png")]},
            {"input": "which", "images": "2.png"},
            {"input": "html has <image>"},
        ]
        two, one, none = read(records)
        mark = "<|vision_start|><|image_pad|><|vision_end|>"
        assert (two.text, two.images) == (f"{mark} or {mark}", (str(tmp_path / "0.png"), str(tmp_path / "1.png")))
        assert (one.text, one.images) == (f"{mark}which", (str(tmp_path / "2.png"),))
        assert (none.text, none.images) == ("html has <image>", ())
        processor = vision[1]
        inputs = [processor.prepare(read_image(image, allow_urls=False)) for image in two.images]
        assert processor.expand(two.text, inputs).images[1].image is inputs[1]

    def test_a_chat_template_writes_the_places(self, read):
        records = [
            {"input": "see <image>?", "images": ["0.png"]},
            {
                "input": [
                    {"role": "user", "content": [{"type": "image", "path": "0.png"}, {"type": "text", "text": "a"}]}
                ]
            },
        ]
        first, second = read(records, apply_chat_template=True)
        mark = "<|vision_start|><|image_pad|><|vision_end|>"
        assert first.text == f"user=see {mark}?!a="
        assert second.text == f"user={mark}a!a="
        assert first.images == second.images

    def test_prompts_are_cheap_to_send(self, read, load):
        (prompt,) = read([{"input": "a", "images": ["0.png"]}])
        assert len(pickle.dumps(prompt)) < 1000

    def test_lengths_count_the_tokens_of_images(self, read, vision):
        """Image tokens and what is around them: 2 + 6 and "ab"."""
        prompts = read([{"input": "ab", "images": ["0.png"]}], max_prompt_tokens=10)
        assert prompts.num_tokens(prompts[0]) == 10
        processor = vision[1]
        image = processor.prepare(read_image(prompts[0].images[0], allow_urls=False))
        assert len(processor.expand(prompts[0].text, [image]).token_ids) == 10

    def test_a_long_prompt_with_images_is_left_out_not_cut(self, read, caplog):
        records = [{"input": "ab", "images": ["0.png"]}, {"input": "abc", "images": ["0.png"]}, {"input": "a" * 11}]
        prompts = read(records, max_prompt_tokens=10)
        assert [len(prompt.text) for prompt in prompts] == [2 + 43, 11]
        assert caplog.messages == [
            "--data.prompt_dataset: 1 of 3 prompts are longer than 10 tokens and lose their beginning (raise "
            "--data.max_len or lower --rollout.max_new_tokens; --data.long_prompts skip leaves them out): "
            "record 3 of train.jsonl",
            "--data.prompt_dataset: left out 1 of 3 prompts, which are longer than 10 tokens and have images, which "
            "are never cut (raise --data.max_len or lower --rollout.max_new_tokens): record 2 of train.jsonl",
        ]
        with pytest.raises(DataError, match=r"record 2 of train\.jsonl: 2 of 3 prompts are longer than 10 tokens"):
            read(records, max_prompt_tokens=10, long_prompts="error")

    def test_a_huge_prompt_with_an_image_is_long(self, read, monkeypatch):
        monkeypatch.setattr("openrlhf.data.prompts.HUGE", 10)
        records = [{"input": "a", "images": ["0.png"]}, {"input": "b" * 5000, "images": ["0.png"]}]
        (prompt,) = read(records, max_prompt_tokens=20)
        assert prompt.images

    @pytest.mark.parametrize(
        ("record", "message"),
        [
            ({"images": ["none.png"]}, r"image 1 of 1: there is no image file none\.png \(looked in /.* and in /"),
            ({"images": ["broken.png"]}, r"the image /.*/broken\.png is truncated or broken \("),
            ({"images": ["text.png"]}, r"the image /.*/text\.png is no image, or its beginning is broken"),
            ({"images": ["bomb.png"]}, "is a decompression bomb, or far too large"),
            ({"images": ["zero.png"]}, "has 0 × 0 pixels"),
            ({"images": ["line.png"]}, "an image of 900 × 1 pixels: "),
            ({"images": ["0.png"] * 4}, "it has 4 images, and --data.max_images_per_prompt is 3"),
            ({"images": ["0.png"], "input": "<image> <image>"}, "it has 2 times <image>, and 1 images"),
            ({"input": "type <|image_pad|>"}, r"its text has <\|image_pad\|>"),
            ({"images": ["http://127.0.0.1:9/a.png"]}, "is a URL: --data.allow_image_urls"),
        ],
    )
    def test_the_record_is_named(self, read, tmp_path, record, message):
        picture(0, width=64, height=64).save(tmp_path / "broken.png")
        (tmp_path / "broken.png").write_bytes((tmp_path / "broken.png").read_bytes()[:-3000])
        (tmp_path / "text.png").write_text("a text")
        for name, width in (("bomb", 30_000), ("zero", 0)):
            (tmp_path / f"{name}.png").write_bytes(png_that_says(width, width))
        picture(0, width=900, height=1).save(tmp_path / "line.png")
        with pytest.raises(DataError, match=rf"^--data\.prompt_dataset, record 2 of train\.jsonl: .*{message}"):
            read([{"input": "a"}, {"input": "a"} | record])

    def test_only_the_first_images_are_decoded(self, read, tmp_path, monkeypatch):
        """The beginning of a truncated file is read all the same: it says how many tokens the image has."""
        monkeypatch.setattr("openrlhf.data.prompts.DECODED", 1)
        picture(0, width=64, height=64).save(tmp_path / "broken.png")
        (tmp_path / "broken.png").write_bytes((tmp_path / "broken.png").read_bytes()[:-3000])
        records = [{"input": "a", "images": ["0.png"]}, {"input": "a", "images": ["broken.png"]}]
        assert len(read(records)) == 2
        with pytest.raises(DataError, match="record 1 of"):
            read(records[::-1])

    def test_a_url_counts_as_a_token_until_it_is_fetched(self, read, monkeypatch):
        monkeypatch.setattr("openrlhf.data.prompts.DECODED", 0)
        (prompt,) = read(
            [{"input": "ab", "images": ["http://127.0.0.1:9/a.png"]}], allow_urls=True, max_prompt_tokens=5
        )
        assert prompt.images == ("http://127.0.0.1:9/a.png",)

    def test_the_digest_is_of_the_images_too(self, read):
        first, second = (read([{"input": "a", "images": [name]}]).digest for name in ("0.png", "1.png"))
        assert first != second

    def test_a_run_that_reads_no_images_says_that_there_are_some(self, load, caplog):
        PromptSet(load([{"input": "a", "images": ["0.png"]}, {"input": "b", "images": []}]))
        assert caplog.messages == [
            "--data.prompt_dataset: 1 of 2 records have something under 'images', which is not read: "
            "--data.max_images_per_prompt is 0"
        ]

    def test_a_run_that_reads_images_says_that_there_are_none(self, read, caplog):
        read([{"input": "a", "picture": "0.png"}])
        assert caplog.messages == [
            "--data.prompt_dataset: no record has an image, under 'images' or in its messages: is --data.image_key one "
            "of input, picture?"
        ]

    def test_tables_of_datasets(self, tmp_path, vision):
        """Images are kept as files: nothing is decoded, and a broken one is found with its record."""
        datasets = pytest.importorskip("datasets")
        table = {"input": ["a", "b"], "images": [[picture(0)], [{"bytes": b"\x89PNG\r\n\x1a\n", "path": None}]]}
        features = datasets.Features({"input": datasets.Value("string"), "images": datasets.List(datasets.Image())})
        path = tmp_path / "train.parquet"
        datasets.Dataset.from_dict(table, features=features).to_parquet(str(path))
        tokenizer, processor = vision
        places = image_places(processor, tokenizer, key="images", most=1)
        records = load_records(str(path))
        (prompt,) = PromptSet(records[:1], tokenizer=tokenizer, images=DataImages(places, processor))
        assert np.array_equal(np.asarray(read_image(prompt.images[0], allow_urls=False)), np.asarray(picture(0)))
        with pytest.raises(DataError, match=r"record 2 of train\.parquet: an image of 8 bytes is"):
            PromptSet(records, tokenizer=tokenizer, images=DataImages(places, processor))


class TestTeachersPrompts:
    """The prompt that a teacher reads in the place of the policy's (`--teacher.prompt_key`)."""

    def of(self, records, **options):
        return PromptSet(records, tokenizer=WordTokenizer(), teacher_key="hint", **options)

    def test_it_is_written_as_the_prompt_is(self, load):
        prompts = self.of(load([{"input": "2+3", "hint": "2+3 is 5"}]), input_template="Q: {} A:")
        assert prompts[0].text == "Q: 2+3 A:"
        assert prompts[0].teacher_ids == ("Q:", "2+3", "is", "5", "A:")
        assert pickle.loads(pickle.dumps(prompts[0])) == prompts[0]

    def test_a_stream_has_it_and_its_digest_is_that_of_the_prompts(self, load):
        records = load([{"input": f"q{i}", "hint": f"h{i}"} for i in range(4)])
        with_hints = self.of(records)
        assert {p.teacher_ids for p in PromptStream(with_hints, seed=1, num_episodes=1)} == {
            (f"h{i}",) for i in range(4)
        }
        assert with_hints.digest == PromptSet(records, tokenizer=WordTokenizer()).digest

    def test_without_a_key_the_teacher_reads_the_same(self, load):
        assert PromptSet(load([{"input": "q", "hint": "h"}]))[0].teacher_ids == ()

    @pytest.mark.parametrize(
        ("record", "message"),
        [
            ({"input": "q"}, r"it has no 'hint', which --teacher\.prompt_key names .*\(this one has .*input"),
            ({"input": "q", "hint": " "}, r"its 'hint', the teacher's prompt \(--teacher\.prompt_key\), is empty"),
            (
                {"input": "q", "hint": "a b c d"},
                r"its 'hint', .*--teacher\.prompt_key.* is longer than 3 tokens: raise",
            ),
        ],
    )
    def test_a_record_without_it_is_named(self, load, record, message):
        records = load([{"input": "q0", "hint": "h0"}, record])
        with pytest.raises(DataError, match=rf"^--data\.prompt_dataset, record 2 of .*train\.jsonl: {message}"):
            self.of(records, max_prompt_tokens=3)

    def test_that_of_a_record_that_is_left_out_is_not_looked_at(self, load):
        """A hint is longer than its prompt: with --data.long_prompts skip it would end every run with a long one."""
        records = load(
            [{"input": "q", "hint": "h"}, {"input": "a b c d", "hint": "a b c d e"}, {"input": "r", "hint": "h"}]
        )
        prompts = self.of(records, max_prompt_tokens=3, long_prompts="skip")
        assert [prompt.text for prompt in prompts] == ["q", "r"]
