"""Images of episodes: prepared once, beside the event loop; every one has its place in texts and token ids."""

import asyncio
import io
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from vision_models import image, vision_tokenizer

from openrlhf.agents.images import BadImageError, EpisodeImages, ImageTokenizer
from openrlhf.models.image_processor import ExpandedText
from openrlhf.rollout.requests import num_bytes

KINDS = ("qwen2_5_vl", "qwen3_vl", "llava")


class Watched:
    """A model's image processor that notes what it prepares, and in which thread. `hold` makes it wait."""

    def __init__(self, kind: str = "qwen2_5_vl"):
        self._inner = vision_tokenizer(kind).episode_images.processor
        self.threads = []
        self.hold = threading.Event()
        self.hold.set()

    def prepare(self, picture):
        self.threads.append(threading.current_thread().name)
        self.hold.wait(60)
        return self._inner.prepare(picture)

    def __getattr__(self, name):
        return getattr(self._inner, name)


def reader(processor=None, **options) -> tuple[EpisodeImages, Watched]:
    processor = processor or Watched()
    return EpisodeImages(processor, vision_tokenizer("qwen2_5_vl").tokenizer, **options), processor


def png(picture) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


# Once ---------------------------------------------------------------------------------------------------------------


def test_the_samples_of_a_prompt_prepare_an_image_once_and_the_event_loop_goes_on():
    images, processor = reader()
    processor.hold.clear()

    async def main():
        asked = [asyncio.create_task(images.prepare([image(1), image(2), image(1)])) for _ in range(8)]
        for _ in range(100):  # the loop is free while the image is held up in its thread
            await asyncio.sleep(0)
        assert not any(task.done() for task in asked)
        processor.hold.set()
        return await asyncio.gather(*asked)

    found = asyncio.run(main())
    assert len(processor.threads) == 2
    assert all(name.startswith("images") for name in processor.threads)
    assert {id(picture) for sample in found for picture in sample} == {id(p) for p in found[0]}
    assert found[0][0] is found[0][2] is not found[0][1]


def test_a_sample_that_is_given_up_leaves_the_image_to_the_others():
    images, processor = reader()
    processor.hold.clear()

    async def main():
        first, second = (asyncio.create_task(images.prepare([image(1)])) for _ in range(2))
        while not processor.threads:
            await asyncio.sleep(0.001)
        first.cancel()
        await asyncio.wait([first])
        processor.hold.set()
        return await second

    assert len(asyncio.run(main())) == 1
    assert len(processor.threads) == 1


def test_an_image_is_known_by_what_it_shows_in_whatever_form_it_comes(tmp_path):
    images, processor = reader()
    file = tmp_path / "a.png"
    file.write_bytes(png(image(1)))
    forms = [str(file), file, png(image(1)), {"bytes": png(image(1))}, image(1)]
    assert len({images.prepare_one(form).digest for form in forms}) == 1
    assert len(processor.threads) == 3  # a file, bytes, and pixels
    drawn_on = image(1)
    images.prepare_one(drawn_on)
    drawn_on.putpixel((0, 0), (1, 2, 3))
    before = images.prepare_one(image(1)).digest
    assert images.prepare_one(drawn_on).digest != before
    file.write_bytes(png(image(2, width=40)))
    assert images.prepare_one(file).digest != before


def test_an_image_that_failed_is_tried_again(tmp_path):
    images, _ = reader()
    file = tmp_path / "late.png"
    with pytest.raises(BadImageError, match=r"late\.png"):
        images.prepare_one(str(file))
    file.write_bytes(png(image(1))[:-40])
    with pytest.raises(BadImageError, match=r"late\.png"):
        images.prepare_one(str(file))
    file.write_bytes(png(image(1)))
    assert images.prepare_one(str(file)).digest == images.prepare_one(image(1)).digest


def test_a_pillow_image_whose_file_is_broken_is_named_as_bad(tmp_path):
    """Pillow reads a file when its pixels are first needed."""
    images, _ = reader()
    (tmp_path / "short.png").write_bytes(png(image(1, width=200, height=200))[:3000])
    for use in (images.prepare_one, images._pixels):
        with Image.open(tmp_path / "short.png") as opened, pytest.raises(BadImageError, match="truncated"):
            use(opened)


def test_all_who_wait_for_a_broken_image_hear_of_it():
    images, processor = reader()

    def fails(picture):
        processor.threads.append("fails")
        raise ValueError("too small")

    processor.prepare = fails

    async def main():
        return await asyncio.gather(*(images.prepare([image(1)]) for _ in range(3)), return_exceptions=True)

    errors = asyncio.run(main())
    assert [str(error) for error in errors] == ["too small"] * 3
    assert all(isinstance(error, BadImageError) for error in errors)


def test_what_is_kept_is_bounded_and_the_latest_stays():
    one = reader()[0].prepare_one(image(0))
    images, processor = reader(kept_bytes=2 * num_bytes(one) + 400)
    for n in (0, 1, 0, 2):  # thumbnails differ by some bytes
        images.prepare_one(image(n))
    assert len(processor.threads) == 3
    images.prepare_one(image(0))
    images.prepare_one(image(2))
    assert len(processor.threads) == 3
    images.prepare_one(image(1))
    assert len(processor.threads) == 4


def test_urls_are_not_fetched_unless_allowed():
    images, _ = reader()
    with pytest.raises(BadImageError, match=r"--data\.allow_image_urls"):
        images.prepare_one("http://127.0.0.1:1/a.png")


# Text ---------------------------------------------------------------------------------------------------------------

AROUND = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.mark.parametrize(
    ("text", "count", "read_as"),
    [
        (f"a{AROUND}b", 1, f"a{AROUND}b"),
        ("a<image>b", 1, f"a{AROUND}b"),
        (f"<image>{AROUND}", 2, f"{AROUND}{AROUND}"),
        ("ab", 2, f"{AROUND}{AROUND}ab"),
        (f"<image> {AROUND}", 1, f"<image> {AROUND}"),  # the image has its token, so the rest is text
    ],
)
def test_marks_of_images_in_a_text(text, count, read_as):
    images, processor = reader()
    inputs = [images.prepare_one(image(n)) for n in range(count)]
    assert images.expand(text, inputs) == processor.expand(read_as, inputs)


@pytest.mark.parametrize(("text", "count"), [("<image>", 2), ("<image><image>", 1), (f"{AROUND}<image>x", 3)])
def test_another_number_of_marks_is_an_error(text, count):
    images, _ = reader()
    inputs = [images.prepare_one(image(n)) for n in range(count)]
    with pytest.raises(BadImageError, match=rf"the text has {images.count_marks(text)} marks .* and {count} images"):
        images.expand(text, inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_without_images_has_no_image_token_whatever_it_spells(kind):
    tokenizer = vision_tokenizer(kind)
    token = tokenizer.image_token
    read = tokenizer.episode_images.expand(f"a<image>b{token}", ())
    assert tokenizer.episode_images.processor.placeholder not in read.token_ids
    assert read.token_ids[0] == tokenizer("a")["input_ids"][0]
    assert tokenizer.episode_images.expand("ab", ()) == ExpandedText(tokenizer("ab")["input_ids"], ())


def test_no_text_beside_an_image_may_stand_for_a_video():
    images, _ = reader()
    with pytest.raises(BadImageError, match=r"spells <\|video_pad\|>"):
        images.expand("<image><|video_pad|>", [images.prepare_one(image(1))])
    assert len(images.expand("<|video_pad|>", ()).token_ids) > 1


# Token ids ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_token_ids_with_one_token_or_all_of_an_image_become_the_same(kind):
    tokenizer = vision_tokenizer(kind)
    images = tokenizer.episode_images
    inputs = [images.prepare_one(image(n, width=16 + 8 * n)) for n in range(2)]
    token = tokenizer.image_token
    text = f"ab{token}c{token}"
    whole = images.processor.expand(text, inputs)
    once = tokenizer(text)["input_ids"]
    found = images.place(once, inputs)
    assert (found.token_ids, found.images) == whole
    assert [once[origin] for origin in found.origins if origin is not None] == tokenizer("abc")["input_ids"]
    again = images.place(whole.token_ids, inputs)
    assert (again.token_ids, again.images) == whole
    assert images.collapse(whole.token_ids, whole.images) == once


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.booleans()), max_size=5), st.integers(0, 2))
def test_neighbours_and_mixtures_are_told_apart(parts, rest):
    """Each part: some text, one of three images of different sizes, and whether it is collapsed to one token. Images
    side by side in one form are always read right, those in two forms right or not at all."""
    images = vision_tokenizer("qwen2_5_vl").episode_images
    (one,) = images._tokenizer(images.processor.image_token)["input_ids"]
    sizes = [images.prepare_one(image(n, width=8 + 8 * n, height=8)) for n in range(3)]
    assert [len(size) for size in sizes] == [1, 2, 3]
    given_ids, expanded, inputs, starts = [], [], [], []
    for text, number, collapsed in parts:
        given_ids += [5] * text + ([one] if collapsed else list(sizes[number].token_ids))
        expanded += [5] * text
        starts.append(len(expanded))
        expanded += sizes[number].token_ids
        inputs.append(sizes[number])
    try:
        found = images.place(given_ids + [5] * rest, inputs)
    except BadImageError:
        assert len({collapsed for _, number, collapsed in parts if number}) == 2
        assert any(text == 0 for text, _, _ in parts[1:])
        return
    assert found.token_ids == expanded + [5] * rest
    assert [at for at, _ in found.images] == starts
    assert [picture.digest for _, picture in found.images] == [picture.digest for picture in inputs]


@pytest.mark.parametrize(
    ("tokens", "count", "text"),
    [
        ("ab", 1, "0 of the 2 tokens are image tokens .*, and 1 images belong to them"),
        ("T", 2, "1 of the 1 tokens"),
        ("aTbTT", 1, "3 of the 5 tokens"),
        ("aT", 0, "token 1 stands for an image .*, and no image belongs to it"),
    ],
)
def test_token_ids_that_do_not_come_out_even_are_an_error(tokens, count, text):
    images, processor = reader()
    inputs = [images.prepare_one(image(n)) for n in range(count)]
    ids = [processor.placeholder if letter == "T" else 5 for letter in tokens]
    with pytest.raises(BadImageError, match=text):
        images.place(ids, inputs)


# The tokenizer that users see -----------------------------------------------------------------------------------------


def test_the_tokenizer_is_a_processor_to_those_who_call_it_so():
    tokenizer = vision_tokenizer("qwen2_5_vl")
    assert hasattr(tokenizer, "image_processor")
    assert isinstance(tokenizer, ImageTokenizer)
    assert tokenizer("ab")["input_ids"] == tokenizer.tokenizer("ab")["input_ids"]
    assert tokenizer.decode(tokenizer("ab")["input_ids"]) == "ab"
    assert (len(tokenizer), tokenizer.eos_token) == (len(tokenizer.tokenizer), tokenizer.tokenizer.eos_token)
    made = tokenizer(text=[f"a{AROUND}"], images=[image(1)], return_tensors="pt")
    whole = tokenizer.episode_images.expand(f"a{AROUND}", [tokenizer.episode_images.prepare_one(image(1))])
    assert made["input_ids"][0].tolist() == whole.token_ids
    assert made["pixel_values"].equal(whole.images[0].image.tensors["pixel_values"])
