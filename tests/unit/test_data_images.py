"""Images in every form become the same pixels; what cannot be read says why, each in its own words."""

import base64
import functools
import http.server
import io
import pickle
import threading

import numpy as np
import pytest
from PIL import Image
from vision_models import image as picture
from vision_models import png_that_says

from openrlhf.data import images
from openrlhf.data.files import DataError
from openrlhf.data.images import ImageError, image_size, portable, read_image


def file_of(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def pixels(source, **options):
    found = read_image(source, **{"allow_urls": False} | options)
    assert found.mode == "RGB"
    return np.asarray(found)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "data" / "cat.png"
    path.parent.mkdir()
    path.write_bytes(file_of(picture(1)))
    return path


class TestForms:
    @pytest.mark.parametrize(
        "form",
        [
            lambda image, path: image,
            lambda image, path: np.asarray(image),
            lambda image, path: file_of(image),
            lambda image, path: bytearray(file_of(image, "TIFF")),
            lambda image, path: str(path),
            lambda image, path: path,
            lambda image, path: f"file://{path}",
            lambda image, path: {"bytes": file_of(image), "path": "not/there.png"},
            lambda image, path: {"bytes": None, "path": str(path)},
            lambda image, path: {"url": str(path)},
            lambda image, path: {"image_url": {"url": str(path)}},
            lambda image, path: base64.b64encode(file_of(image)).decode(),
            lambda image, path: base64.encodebytes(file_of(image)).decode(),
            lambda image, path: "data:image/png;base64," + base64.b64encode(file_of(image)).decode(),
            lambda image, path: "data:image/png," + "".join(f"%{byte:02x}" for byte in file_of(image)),
        ],
        ids=[
            *("pillow", "array", "bytes", "bytearray", "path", "Path", "file URL", "datasets bytes", "datasets path"),
            *("url that is a path", "image_url", "base64", "base64 in lines", "data URI", "percent data URI"),
        ],
    )
    def test_each_form_gives_the_same_pixels(self, form, file):
        source = form(picture(1), file)
        expected = np.asarray(picture(1))
        assert np.array_equal(pixels(source), expected)
        sent = pickle.loads(pickle.dumps(portable(source)))
        assert isinstance(sent, bytes | str)
        assert np.array_equal(pixels(sent), expected)
        assert image_size(sent) == (24, 16)

    def test_a_relative_path_is_looked_for_beside_the_data_first(self, file, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "cat.png").write_bytes(file_of(picture(2)))
        (tmp_path / "dog.png").write_bytes(file_of(picture(3)))
        beside = file.parent
        assert portable("cat.png", folder=beside) == str(file)
        assert portable("cat.png") == str(tmp_path / "cat.png")
        assert portable("dog.png", folder=beside) == str(tmp_path / "dog.png")

    def test_a_jpeg_in_base64_looks_like_a_path(self):
        text = base64.b64encode(file_of(picture(1), "JPEG")).decode()
        assert text.startswith("/9j/")
        assert pixels(text).shape == (16, 24, 3)


class TestPixels:
    def test_a_turned_photograph_is_upright(self):
        """Orientation 6: the camera was turned, and the picture has to be turned by 90° clockwise to be seen."""
        exif = Image.Exif()
        exif[0x0112] = 6
        for kind in ("PNG", "TIFF"):
            data = file_of(picture(1), kind, exif=exif)
            assert np.array_equal(pixels(data), np.rot90(np.asarray(picture(1)), k=-1))
            assert image_size(data) == (16, 24)
        assert image_size(file_of(picture(1), "JPEG", exif=exif)) == (16, 24)

    def test_what_is_transparent_is_white(self):
        """Red, half of it seen: half white."""
        clear = Image.new("RGBA", (3, 1))
        clear.putdata([(255, 0, 0, 0), (255, 0, 0, 255), (255, 0, 0, 51)])
        assert pixels(file_of(clear)).tolist() == [[[255, 255, 255], [255, 0, 0], [255, 204, 204]]]
        grey = Image.new("LA", (2, 1))
        grey.putdata([(7, 0), (7, 255)])
        assert pixels(grey).tolist() == [[[255] * 3, [7] * 3]]

    def test_palettes_with_and_without_a_transparent_colour(self):
        palette = Image.new("P", (2, 1))
        palette.putpalette([10, 20, 30, 40, 50, 60])
        palette.putdata([0, 1])
        assert pixels(file_of(palette)).tolist() == [[[10, 20, 30], [40, 50, 60]]]
        assert pixels(file_of(palette, transparency=0)).tolist() == [[[255] * 3, [40, 50, 60]]]

    def test_sixteen_bits_of_grey_are_not_cut_off(self):
        grey = Image.fromarray(np.array([[0, 257, 128 * 257, 65535]], dtype=np.uint16))
        assert pixels(file_of(grey))[0, :, 0].tolist() == [0, 1, 128, 255]

    def test_one_bit_and_four_inks(self):
        assert pixels(file_of(Image.new("1", (1, 1), 1))).tolist() == [[[255] * 3]]
        assert pixels(file_of(Image.new("CMYK", (1, 1), (0, 0, 0, 255)), "TIFF")).tolist() == [[[0] * 3]]

    def test_of_an_animation_the_first_picture(self):
        frames = [Image.new("RGB", (2, 2), colour) for colour in ("red", "blue")]
        data = file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])
        assert pixels(data)[0, 0].tolist() == [255, 0, 0]


class TestErrors:
    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("not/there.png", r"there is no image file not/there\.png \(looked in /"),
            ("/not/there.png", r"there is no image file /not/there\.png$"),
            (file_of(picture(1, width=64, height=64))[:-2000], r"an image of [\d,]+ bytes is truncated or broken \("),
            (b"GIF89a", "is no image, or its beginning is broken"),
            (b"PK\x03\x04" + b"0" * 100, "is no image, or its beginning is broken"),
            (png_that_says(20_000, 20_000), "is a decompression bomb, or far too large"),
            (png_that_says(10_000, 10_000), "is a decompression bomb, or far too large"),
            (png_that_says(0, 0), r"an image of \d+ bytes has 0 × 0 pixels: there is nothing to see"),
            (Image.new("RGB", (0, 0)), "a Pillow image has 0 × 0 pixels: there is nothing to see"),
            (np.zeros((0, 5, 3), dtype=np.uint8), "an array has 5 × 0 pixels"),
            (np.zeros((5, 5, 3)), "an array is an image if it is uint8"),
            ("http://127.0.0.1:9/a.png", "is a URL: --data.allow_image_urls lets the run fetch images"),
            ("iVBORw0KGgo" + "A" * 50, "the base64 of an image is cut or broken"),
            ("data:image/png;base64,!!", "the base64 of an image is cut or broken"),
            ("data:image/png", "has no comma"),
            (b"", "an image has no bytes"),
            (7, r"an image must be a path, .* got 7 \(int\)"),
            (None, r"got None \(NoneType\)"),
            (" ", r"an image must be a path"),
            ({"width": 7}, "an image must have one of bytes, .* got the keys width"),
            (Image.new("F", (2, 2)), "floating-point pixels"),
            (Image.fromarray(np.array([[-1, 5]], dtype=np.int32)), "outside of 16 bits"),
        ],
    )
    def test_each_has_its_own_message(self, source, message):
        with pytest.raises(ImageError, match=message) as caught:
            read_image(source, allow_urls=False)
        assert isinstance(caught.value, DataError)

    def test_a_file_is_named(self, file):
        file.write_bytes(file.read_bytes()[:-300])
        with pytest.raises(ImageError, match=f"the image {file} is truncated or broken"):
            read_image("cat.png", allow_urls=False, folder=file.parent)
        assert image_size(str(file)) == (24, 16), "the beginning is whole"

    def test_a_file_that_went_away(self, file):
        found = portable(file)
        file.unlink()
        with pytest.raises(ImageError, match=f"there is no image file {file}"):
            read_image(found, allow_urls=False)

    @pytest.mark.parametrize("data", [png_that_says(10_000, 10_000), png_that_says(0, 0), b"nothing"])
    def test_sizes_are_checked_without_reading_pixels(self, data):
        with pytest.raises(ImageError):
            image_size(data)


class _Server(http.server.BaseHTTPRequestHandler):
    body = file_of(picture(1))
    hold = threading.Event()

    def do_GET(self):
        match self.path:
            case "/cat.png":
                self._answer(self.body)
            case "/large":
                self._answer(b"0" * 5000)
            case "/elsewhere":
                self.send_response(302)
                self.send_header("Location", "file:///etc/hostname")
                self.end_headers()
            case "/slow":
                self.hold.wait(30)
            case _:
                self.send_error(404)

    def _answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server) as serving:
        serving.daemon_threads = True
        _Server.hold.clear()
        threading.Thread(target=functools.partial(serving.serve_forever, poll_interval=0.01), daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_port}"
        _Server.hold.set()
        serving.shutdown()


class TestURLs:
    def test_they_are_fetched_if_allowed(self, server):
        url = f"{server}/cat.png"
        assert portable(url) == url
        assert image_size(url) is None
        assert np.array_equal(pixels(url, allow_urls=True), np.asarray(picture(1)))

    @pytest.mark.parametrize(
        ("path", "message"),
        [
            ("/none", r"the image http://.*/none cannot be fetched \(HTTP Error 404"),
            ("/elsewhere", "cannot be fetched"),
            ("/large", "has more than 0 MiB, which is the limit"),
            ("/slow", r"cannot be fetched \(no answer within 0\.2 s\)"),
        ],
    )
    def test_what_may_go_wrong(self, server, path, message, monkeypatch):
        monkeypatch.setattr(images, "URL_BYTES", 4000)
        if path == "/slow":
            monkeypatch.setattr(images, "URL_SECONDS", 0.2)
        with pytest.raises(ImageError, match=message):
            read_image(server + path, allow_urls=True)

    def test_nobody_there(self):
        with pytest.raises(ImageError, match="cannot be fetched"):
            read_image("http://127.0.0.1:9/cat.png", allow_urls=True)
