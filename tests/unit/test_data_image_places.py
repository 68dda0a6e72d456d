"""Images find their places in texts and messages; what does not come out even is refused, and nothing is dropped."""

import pytest

from openrlhf.data.files import DataError
from openrlhf.data.image_places import ImagePlaces, is_image, listed_images, refuse_images
from openrlhf.data.images import ImageError

QWEN = {
    "token": "<|pad|>",
    "written": "<|from|><|pad|><|to|>",
    "reserved": ("<|pad|>", "<|video|>"),
}
LLAVA = {"token": "<image>", "written": "<image>", "reserved": ("<image>",)}
A, B, C = b"a", b"b", b"c"


def places(**options):
    return ImagePlaces(**{"key": "images", "most": 3, "allow_urls": False, "items_only": False} | QWEN | options)


def image(**source):
    return {"type": "image", **source}


def text(words):
    return {"type": "text", "text": words}


def user(content):
    return {"role": "user", "content": content}


class TestText:
    @pytest.mark.parametrize(
        ("words", "images", "expected"),
        [
            ("see <image>?", [A], "see <|from|><|pad|><|to|>?"),
            ("<image><image> alike?", [A, B], "<|from|><|pad|><|to|><|from|><|pad|><|to|> alike?"),
            ("what is it?", A, "<|from|><|pad|><|to|>what is it?"),
            ("alike?", [A, B], "<|from|><|pad|><|to|><|from|><|pad|><|to|>alike?"),
            ("by hand: <|from|><|pad|><|to|>", [A], "by hand: <|from|><|pad|><|to|>"),
            ("html has <image> tags", [], "html has <image> tags"),
            ("html has <image> tags", None, "html has <image> tags"),
            ("html has <image> tags", "", "html has <image> tags"),
        ],
    )
    def test_each_image_has_its_token(self, words, images, expected):
        found = places().in_text(words, {"images": images})
        assert found.text == expected
        assert found.images == tuple(listed_images(images))
        assert found.text.count("<|pad|>") == len(found.images)

    def test_a_model_whose_token_is_the_mark(self):
        llava = places(**LLAVA)
        assert llava.in_text("see <image>?", {"images": [A]}) == ("see <image>?", (A,))
        assert llava.in_text("what?", {"images": [A]}) == ("<image>what?", (A,))
        assert llava.in_text("html has <image> tags", {}) == ("html has <image> tags", ())
        llava.require_tokens("html has <image> tags", ())

    @pytest.mark.parametrize(
        ("words", "images", "message"),
        [
            ("<image> <image>", [A], "it has 2 times <image>, and 1 images under 'images': give one for each"),
            ("<image>", [A, B], "it has 1 times <image>, and 2 images under 'images': give one for each"),
            ("a", [A, B, C, A], "it has 4 images, and --data.max_images_per_prompt is 3: raise it"),
            ("type <|pad|>", [], r"its text has <\|pad\|>, which stands for an image, .* and none belongs to it"),
            ("<image> <|video|>", [A], r"its text has <\|video\|>, which stands for"),
            ("a", ["http://127.0.0.1/a.png"], "image 1 of 1: http://.* is a URL: --data.allow_image_urls"),
            ("a", [A, "none.png"], r"image 2 of 2: there is no image file none\.png \(looked in "),
            ("a", [A, 7], "image 2 of 2: an image must be a path"),
        ],
    )
    def test_what_does_not_come_out_even(self, words, images, message):
        with pytest.raises(DataError, match=message):
            places().in_text(words, {"images": images})

    def test_a_url_that_is_allowed_stays_one(self):
        url = "https://127.0.0.1/a.png"
        assert places(allow_urls=True).in_text("a", {"images": url}).images == (url,)

    def test_paths_are_those_beside_the_data(self, tmp_path):
        (tmp_path / "cat.png").write_bytes(b"cat")
        found = places().in_text("a", {"images": ["cat.png"]}, folder=tmp_path)
        assert found.images == (str(tmp_path / "cat.png"),)


class TestMessages:
    @pytest.mark.parametrize(
        ("content", "images", "expected", "order"),
        [
            ("see <image>?", [A], [text("see "), image(), text("?")], [A]),
            ("<image><image>", [A, B], [image(), image()], [A, B]),
            ("what?", [A, B], [image(), image(), text("what?")], [A, B]),
            ("html <image>", [], "html <image>", []),
            (
                [text("see "), image(), text("<image> is text")],
                [A],
                [text("see "), image(), text("<image> is text")],
                [A],
            ),
            ([text("see <image>?")], [A], [text("see "), image(), text("?")], [A]),
            ([image(image=B), text("a")], [], [image(), text("a")], [B]),
            ([{"image": B}, text("a")], [], [image(), text("a")], [B]),
            ([image(bytes=B), image(), image(base64="R0lGODlh" * 8)], [A], [image()] * 3, [B, A, "gif"]),
            ([{"type": "image_url", "image_url": {"url": "data:,x"}}, text("a")], [], [image(), text("a")], [b"x"]),
            ([{"type": "image_url", "image_url": "data:,x"}], [], [image()], [b"x"]),
            ([image(image=B), text("and <image>")], [A], [image(), text("and "), image()], [B, A]),
            ([image(image=None, text=None), text("a") | {"image": None}], [A], [image(), text("a")], [A]),
        ],
    )
    def test_each_image_has_its_item(self, content, images, expected, order):
        found, placed = places().in_messages([user(content)], {"images": images})
        assert found == [user(expected)]
        assert len(placed) == len(order)
        assert [image for image in placed if len(image) < 9] == [image for image in order if image != "gif"]

    def test_images_without_a_place_stand_before_the_first_question(self):
        """Not before the system's message, and not before the last question."""
        chat = [{"role": "system", "content": "be short"}, user("what?"), {"role": "assistant", "content": None}]
        found = places().in_messages(chat, {"images": [A]})
        assert found.messages == [chat[0], user([image(), text("what?")]), chat[2]]

    def test_marks_of_all_messages_count_in_their_order(self):
        chat = [user("<image>?"), {"role": "assistant", "content": "a dog"}, user("and <image>")]
        found = places().in_messages(chat, {"images": [A, B]})
        assert [message["content"] for message in found.messages] == [
            [image(), text("?")],
            "a dog",
            [text("and "), image()],
        ]
        assert found.images == (A, B)

    def test_a_template_that_reads_items_alone(self):
        found = places(items_only=True).in_messages([user("hi")], {})
        assert found.messages == [user([text("hi")])]

    @pytest.mark.parametrize(
        ("content", "images", "message"),
        [
            ([image(), image()], [A], "it has 2 places for images without an image of their own, and 1 images"),
            ([image()], [], "it has 1 places for images without an image of their own, and 0 images under 'images'"),
            ("<image> or <image>", [A], "it has 2 places"),
            ([image(image=A), text("?")], [B], "bring 1 images of their own, and nothing in them says where the 1"),
            ([image(image=A)] * 4, [], "it has 4 images, and --data.max_images_per_prompt is 3"),
            ("a <|pad|>", [], r"its text has <\|pad\|>"),
            ([text("a <|video|>"), image()], [A], r"its text has <\|video\|>"),
            ([{"type": "video", "video": "a.mp4"}], [], "an item of a message is of type 'video': text and images"),
            ([7], [], "an item of a message must be an object"),
            (7, [], "the content of a message must be a string or a list of items, got int"),
            ([image(path="none.png")], [], "image 1 of 1: there is no image file none.png"),
        ],
    )
    def test_what_does_not_come_out_even(self, content, images, message):
        with pytest.raises(DataError, match=message):
            places().in_messages([user(content)], {"images": images})

    def test_the_record_is_not_changed(self):
        record = {"input": [user([image(image=A), text("a")])], "images": []}
        places().in_messages(record["input"], record)
        assert record == {"input": [user([image(image=A), text("a")])], "images": []}


def test_a_template_that_writes_no_image_is_refused():
    with pytest.raises(DataError, match=r"with its template it has 0 times <\|pad\|> for 1 images: the chat template"):
        places().require_tokens("[{'type': 'image'}]", [A])


def test_a_run_without_images_refuses_messages_with_some():
    refuse_images([user("a"), user([text("a")]), user(None)])
    with pytest.raises(DataError, match="its messages have an image, and this run reads none: set --data"):
        refuse_images([user([text("a"), image()])])


def test_listed_images():
    assert [listed_images(value) for value in (None, "", " ", [], [None])] == [[]] * 5
    assert [listed_images(value) for value in ("a", {"bytes": A}, A)] == [["a"], [{"bytes": A}], [A]]
    assert listed_images((A, None, B)) == [A, B]


def test_is_image():
    assert is_image({"type": "image"})
    assert is_image({"url": "a.png"})
    assert not is_image({"type": "text", "text": "a", "url": "a.png"})
    assert not is_image("image")


def test_errors_of_images_are_of_data():
    assert issubclass(ImageError, DataError)
