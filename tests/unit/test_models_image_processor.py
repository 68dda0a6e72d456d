"""The processor of a model: what is known of an image by its size alone, and what nobody may write in a text."""

import json

import pytest
from PIL import Image
from vision_models import KINDS, image, write_vision_model

from openrlhf.data.templates import image_places
from openrlhf.models.image_processor import ImageProcessor, ImageProcessorError
from openrlhf.models.loading import load_tokenizer


@pytest.fixture(scope="module", params=sorted(KINDS))
def loaded(request, tmp_path_factory):
    folder = write_vision_model(request.param, tmp_path_factory.mktemp(request.param))
    tokenizer = load_tokenizer(folder)
    return tokenizer, ImageProcessor.load(folder, tokenizer)


def test_the_tokens_of_an_image_depend_on_its_size_alone(loaded):
    processor = loaded[1]
    for width, height in ((24, 16), (16, 24), (1, 1), (7, 33), (64, 64), (300, 17), (1200, 900)):
        expected = processor.prepare(image(1, width=width, height=height)).token_ids
        assert processor.token_ids(width, height) == expected
        assert len(expected) >= 1


def test_these_families_say_the_number_by_themselves(loaded, monkeypatch):
    """Sizes of a whole data set are counted without preparing an image of each."""
    processor = loaded[1]
    assert processor.token_ids(24, 16)
    monkeypatch.setattr(processor, "prepare", lambda picture: pytest.fail("an image was prepared"))
    assert processor.token_ids(56, 48)


def test_a_processor_that_says_it_wrong_is_not_believed(loaded, monkeypatch):
    tokenizer, right = loaded
    wrong = ImageProcessor(right.processor, tokenizer, placeholder=right.placeholder)
    monkeypatch.setattr(wrong, "_stated_number", lambda width, height: 5)
    assert wrong.token_ids(40, 24) == right.token_ids(40, 24)


def test_an_image_that_no_size_fits(loaded):
    """Qwen's processors refuse strips; LLaVA's cuts a square out of them."""
    processor = loaded[1]
    if processor.image_token == "<image>":
        assert len(processor.token_ids(900, 1)) == len(processor.token_ids(16, 16))
        return
    with pytest.raises(ImageProcessorError, match="an image of 900 × 1 pixels: "):
        processor.token_ids(900, 1)


def test_reserved_tokens_are_single_tokens_of_the_model(loaded):
    tokenizer, processor = loaded
    assert processor.image_token in processor.reserved_tokens
    for token in processor.reserved_tokens:
        assert len(tokenizer(token, add_special_tokens=False)["input_ids"]) == 1
    if processor.image_token != "<image>":
        assert "<|video_pad|>" in processor.reserved_tokens


def test_how_a_text_writes_an_image_is_read_off_the_template(loaded):
    tokenizer, processor = loaded
    written = image_places(processor, tokenizer, key="images", most=1).written
    qwen = processor.image_token != "<image>"
    assert written == ("<|vision_start|><|image_pad|><|vision_end|>" if qwen else "<image>")


TEMPLATES = {
    "images first": (
        "{% for m in messages %}{% for i in m.content if i.type == 'image' %}IMAGE\n{% endfor %}"
        "{% for i in m.content if i.type == 'text' %}{{ i.text }}{% endfor %}{% endfor %}"
    ),
    "text alone": "{% for m in messages %}{{ m.content }}{% endfor %}",
}


@pytest.mark.parametrize(("name", "items_only"), [("images first", True), ("text alone", False)])
def test_templates_of_other_kinds(loaded, name, items_only):
    """One that reads lists of items alone is given such; where it says nothing about images, the token stands alone."""
    tokenizer, processor = loaded
    before = tokenizer.chat_template
    try:
        tokenizer.chat_template = TEMPLATES[name].replace("IMAGE", processor.image_token)
        places = image_places(processor, tokenizer, key="images", most=1)
    finally:
        tokenizer.chat_template = before
    assert (places.items_only, places.written) == (items_only, processor.image_token)


def test_a_chat_template_that_only_the_processor_has(tmp_path):
    folder = write_vision_model("qwen2_5_vl", tmp_path)
    template = tmp_path / "chat_template.jinja"
    text = template.read_text()
    template.unlink()
    tokenizer = load_tokenizer(folder)
    assert not tokenizer.chat_template
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": text}))
    processor = ImageProcessor.load(folder, tokenizer)
    assert processor is not None
    assert tokenizer.chat_template == text


def test_blank_images_have_tokens(loaded):
    assert loaded[1].blank().token_ids == loaded[1].prepare(Image.new("RGB", (32, 32))).token_ids
