"""Pictures of every kind: upright, on white, bounded before they are decoded, refused with the limit and the value."""

import base64
import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers.image_transforms import convert_to_rgb

from firstlight.engine.errors import Refused
from firstlight.engine.inputs.pictures import PictureLimits, open_picture


def gradient(width: int = 24, height: int = 16, mode: str = "RGB") -> Image.Image:
    rows, columns = np.mgrid[0:height, 0:width]
    values = np.stack(
        [columns * 255 // max(width - 1, 1), rows * 255 // max(height - 1, 1), (columns * rows) % 256], -1
    )
    return Image.fromarray(values.astype(np.uint8)).convert(mode)


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def with_orientation(image: Image.Image, tag: int, form: str = "JPEG") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = tag
    return encoded(image, form, exif=exif.tobytes())


def png(width: int, height: int, depth: int, kind: int, data: bytes = b"", **chunks: bytes) -> bytes:
    """A PNG chunk by chunk, for what Pillow does not write."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
    extra = b"".join(chunk(name.encode(), body) for name, body in chunks.items())
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + extra
        + chunk(b"IDAT", zlib.compress(data))
        + chunk(b"IEND", b"")
    )


def refusal(source: Any, **options: Any) -> Any:
    with pytest.raises(Refused) as caught:
        open_picture(source, **options)
    (finding,) = caught.value.findings
    return finding


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("tag", range(1, 9))
def test_orientation_is_applied_or_left(tag: int, form: str) -> None:
    data = with_orientation(gradient(), tag, form)
    stored = Image.open(io.BytesIO(data))
    upright = ImageOps.exif_transpose(stored).convert("RGB")
    picture = open_picture(data)
    assert picture.image.size == ((16, 24) if tag >= 5 else (24, 16))
    np.testing.assert_array_equal(np.asarray(picture.image), np.asarray(upright))
    assert (picture.record.orientation, picture.record.orientation_applied) == (tag, tag > 1)
    assert (picture.record.stored_size, picture.record.size) == ((24, 16), picture.image.size)
    if form == "TIFF":  # Pillow's decoder turns it
        assert any("the decoder" in remark for remark in picture.record.notes) == (tag > 1)
        return
    left = open_picture(data, apply_exif=False)
    np.testing.assert_array_equal(np.asarray(left.image), np.asarray(stored.convert("RGB")))
    assert not left.record.orientation_applied
    assert any("switched off" in remark for remark in left.record.notes) == (tag > 1)


@pytest.mark.parametrize("tag", [0, 9, 700])
def test_an_orientation_that_is_none_is_ignored(tag: int) -> None:
    picture = open_picture(with_orientation(gradient(), tag))
    assert picture.image.size == (24, 16)
    assert any("not one of 1 to 8" in remark for remark in picture.record.notes)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data", "ignore:Possibly corrupt EXIF data")
def test_broken_exif_is_ignored() -> None:
    data = encoded(gradient(), "JPEG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff\x01\x00")
    assert open_picture(data).image.size == (24, 16)


def noise(mode: str) -> Image.Image:
    """Noise also where nothing is seen: under alpha 0."""
    rng = np.random.default_rng(3)
    values = rng.integers(0, 256, (16, 24, 4), dtype=np.uint8)
    values[:8, :, 3], values[8:12, :, 3] = 0, 255
    return Image.fromarray(values).convert(mode)


def colour_key() -> Image.Image:
    image = gradient()
    image.info["transparency"] = image.getpixel((5, 5))
    return image


KINDS: dict[str, Callable[[], bytes]] = {
    "RGB": lambda: encoded(gradient()),
    "RGBA": lambda: encoded(noise("RGBA")),
    "RGBA WEBP": lambda: encoded(noise("RGBA"), "WEBP", lossless=True, exact=True),
    "LA": lambda: encoded(noise("LA")),
    "L": lambda: encoded(gradient(mode="L")),
    "L, tRNS": lambda: encoded(gradient(mode="L"), transparency=17),
    "1": lambda: encoded(gradient(mode="1")),
    "P": lambda: encoded(gradient().quantize(16)),
    "P, tRNS": lambda: encoded(gradient().quantize(16), transparency=bytes([0, 128, 255, 3])),
    "P, one transparent": lambda: encoded(gradient().quantize(16), transparency=2),
    "RGB, tRNS": lambda: encoded(colour_key()),
    "GIF": lambda: encoded(gradient().quantize(16), "GIF", transparency=3),
    "CMYK JPEG": lambda: encoded(gradient(mode="CMYK"), "JPEG"),
    "CMYK TIFF": lambda: encoded(gradient(mode="CMYK"), "TIFF"),
    "grey JPEG": lambda: encoded(gradient(mode="L"), "JPEG"),
    "LAB TIFF": lambda: encoded(gradient(mode="LAB"), "TIFF"),
    "BMP": lambda: encoded(gradient(), "BMP"),
    "PPM": lambda: encoded(gradient(), "PPM"),
    "AVIF": lambda: encoded(gradient(32, 32), "AVIF"),
    "1 x 1": lambda: encoded(gradient(1, 1)),
    "2 x 500": lambda: encoded(gradient(2, 500)),
    "1 x 10000": lambda: encoded(gradient(1, 10_000)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_equal_transformers(kind: str) -> None:
    data = KINDS[kind]()
    picture = open_picture(data)
    theirs = convert_to_rgb(Image.open(io.BytesIO(data)), return_numpy=True)
    np.testing.assert_array_equal(np.asarray(picture.image), theirs)
    assert picture.image.mode == "RGB"
    assert not picture.image.info.get("transparency")
    stored = Image.open(io.BytesIO(data))
    seen_through = "A" in stored.getbands() or stored.info.get("transparency") is not None
    assert picture.record.composited_on_white == seen_through
    assert (picture.record.mode, picture.record.format) == (stored.mode, stored.format)


def test_what_is_under_alpha_0_becomes_white() -> None:
    picture = open_picture(encoded(noise("RGBA")))
    assert (np.asarray(picture.image)[:8] == 255).all()


def test_an_adobe_cmyk_jpeg_is_not_a_negative() -> None:
    """Adobe stores CMYK inverted; Pillow writes and reads it so."""
    white = Image.new("CMYK", (8, 8), (0, 0, 0, 0))
    data = encoded(white, "JPEG")
    assert b"Adobe" in data
    assert np.asarray(open_picture(data).image).min() > 250


def test_grey_of_16_bits_equals_transformers_or_is_refused_with_its_values() -> None:
    """transformers clips at 255: nearly all of a 16-bit range would be white, and the answer about a white picture."""
    dark = encoded(Image.fromarray(np.array([[0, 128, 255]], dtype=np.uint16)))
    picture = open_picture(dark)
    theirs = convert_to_rgb(Image.open(io.BytesIO(dark)), return_numpy=True)
    np.testing.assert_array_equal(np.asarray(picture.image), theirs)
    assert picture.record.mode == "I;16"
    finding = refusal(encoded(Image.fromarray(np.array([[0, 256, 65535]], dtype=np.uint16))))
    assert finding.code == "bad-image"
    assert finding.found == "values from 0 to 65535"
    assert "257" in finding.next


@pytest.mark.parametrize("top", [255, 40000])
def test_grey_of_16_bits_with_a_transparent_value(top: int) -> None:
    row = struct.pack(">4H", 0, 100, 200, top)
    data = png(4, 1, 16, 0, b"\x00" + row, tRNS=struct.pack(">H", 100))
    if top > 255:
        assert refusal(data).found == "values from 0 to 40000"
        return
    picture = open_picture(data)
    theirs = convert_to_rgb(Image.open(io.BytesIO(data)), return_numpy=True)
    np.testing.assert_array_equal(np.asarray(picture.image), theirs)
    assert picture.record.composited_on_white


@pytest.mark.parametrize("form", ["JPEG", "PNG", "GIF"])
def test_a_picture_cut_in_its_header_is_called_broken_not_foreign(form: str) -> None:
    finding = refusal(encoded(gradient(), form)[:12])
    assert form in finding.message
    assert "again" in finding.next


def test_16_bit_colour_keeps_the_upper_bits() -> None:
    row = struct.pack(">6H", 0x12FF, 0x8000, 0xFFFF, 0, 255, 256)
    picture = open_picture(png(2, 1, 16, 2, b"\x00" + row))
    assert np.asarray(picture.image).tolist() == [[[0x12, 0x80, 0xFF], [0, 0, 1]]]
    assert any("upper 8" in remark for remark in picture.record.notes)


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_values_without_a_defined_white_are_refused(dtype: Any) -> None:
    data = encoded(Image.fromarray(np.array([[0, 1], [70_000, 2]], dtype=dtype)), "TIFF")
    finding = refusal(data)
    assert finding.code == "bad-image"
    assert "without a defined white" in finding.message


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP"])
def test_the_first_frame_of_an_animation(form: str) -> None:
    frames = [Image.new("RGB", (10, 8), colour) for colour in ("red", "lime", "blue")]
    data = encoded(
        frames[0],
        form,
        save_all=True,
        append_images=frames[1:],
        duration=10,
        **({"lossless": True} if form == "WEBP" else {}),
    )
    picture = open_picture(data)
    assert picture.image.getpixel((3, 3)) == (255, 0, 0)
    assert picture.record.is_animated
    assert any("the first is used" in remark for remark in picture.record.notes)


def test_a_colour_profile_is_said() -> None:
    from PIL import ImageCms

    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    assert any("ICC" in remark for remark in open_picture(encoded(gradient(), icc_profile=profile)).record.notes)
    assert not open_picture(encoded(gradient())).record.notes


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP"])
def test_a_truncated_file_is_refused(kind: str) -> None:
    data = encoded(noise("RGB").resize((200, 150)), kind)
    for kept in (len(data) // 2, len(data) * 9 // 10, 30, 3):
        finding = refusal(data[:kept])
        assert finding.code == "bad-image"
        assert str(kept) in (finding.found or "")


@pytest.mark.parametrize(
    "data", [b"", b"hello", b"%PDF-1.7", b"\x00" * 100, b"GIF89a", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"]
)
def test_what_is_not_a_picture_is_refused(data: bytes) -> None:
    finding = refusal(data)
    assert finding.code == "bad-image"
    assert "PNG" in (finding.expected or "")


def test_a_bomb_is_refused_by_its_header() -> None:
    """Before memory for it is asked for; also where Pillow itself only warns."""
    for width, height in ((60_000, 60_000), (10_000, 10_000), (9_000, 9_000), (2**31 - 1, 1)):
        finding = refusal(png(width, height, 1, 0, b"\x00"))
        assert finding.code == "bad-image"
        assert "too many pixels" in finding.message
        assert "64000000" in (finding.expected or "")
        assert f"{width * height} pixels" in (finding.found or "")


def test_the_number_of_pixels_is_the_limits(tmp_path: Path) -> None:
    limits = PictureLimits(max_pixels=24 * 16 - 1)
    finding = refusal(encoded(gradient()), limits=limits)
    assert (finding.expected, finding.found) == ("1 to 383 pixels", "24 x 16 = 384 pixels")
    assert open_picture(encoded(gradient()), limits=PictureLimits(max_pixels=384)).image.size == (24, 16)


def test_no_pixels_are_refused() -> None:
    assert refusal(png(0, 5, 8, 2, b"")).code == "bad-image"


def test_the_size_of_a_file_is_bounded(tmp_path: Path) -> None:
    data = encoded(gradient())
    limits = PictureLimits(max_file_bytes=len(data) - 1)
    path = tmp_path / "picture.png"
    path.write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    for source in (data, path, str(path), url):
        finding = refusal(source, limits=limits)
        assert "too large" in finding.message
        assert (finding.expected, finding.found) == (f"at most {len(data) - 1} bytes", f"{len(data)} bytes")
    # A file that never ends is not read to its end.
    assert "too large" in refusal("/dev/zero", limits=limits).message
    # A data URL far over the limit is not decoded.
    assert (
        "too large"
        in refusal("data:image/png;base64," + "A" * 10_000, limits=PictureLimits(max_file_bytes=100)).message
    )


def test_formats_are_the_limits() -> None:
    finding = refusal(encoded(gradient(), "BMP"), limits=PictureLimits(formats=("PNG",)))
    assert finding.expected == "one of PNG"


def test_sources_give_the_same_picture(tmp_path: Path) -> None:
    data = encoded(gradient())
    path = tmp_path / "picture.png"
    path.write_bytes(data)
    text = base64.b64encode(data).decode()
    wrapped = "\n".join(text[i : i + 60] for i in range(0, len(text), 60))
    escaped = text.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D")
    sources = [path, str(path), data, f"data:image/png;base64,{text}", f"DATA:image/png;charset=x;base64,{wrapped}"]
    for source in [*sources, f"data:image/png;base64,{escaped}"]:
        np.testing.assert_array_equal(np.asarray(open_picture(source).image), np.asarray(gradient()))
    assert open_picture(path).record.source == str(path)
    assert len(open_picture(sources[3]).record.source) < 100


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://example.com/cat.png", "not fetched"),
        ("HTTPS://example.com/cat.png", "not fetched"),
        ("file:///etc/passwd", "not fetched"),
        ("data:image/png,abc", "not base64"),
        ("data:image/png;base64", "not base64"),
        ("data:text/plain;base64,aGk=", "not a picture"),
        ("data:;base64,aGk=", "not a picture"),
        ("data:image/png;base64,***", "broken"),
        ("data:image/png;base64,aGk", "broken"),
        ("data:image/png;base64,aGk=", "not a picture"),
    ],
)
def test_urls_that_are_refused(url: str, says: str) -> None:
    finding = refusal(url)
    assert finding.code == "bad-image"
    assert says in finding.message


def test_a_server_does_not_open_its_own_files(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(encoded(gradient()))
    finding = refusal(str(path), files=False)
    assert (finding.code, finding.expected) == ("bad-image", "a data: URL")
    url = "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    assert open_picture(url, files=False).image.size == (24, 16)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "PPM", "AVIF"])
def test_damaged_files_are_refused_or_decoded_and_nothing_else(form: str) -> None:
    """Random damage: a picture or `Refused`, never another exception."""
    rng = np.random.default_rng(5)
    data = np.frombuffer(
        with_orientation(noise("RGB"), 6, form) if form not in ("GIF", "BMP", "PPM") else encoded(noise("RGB"), form),
        np.uint8,
    )
    refused = 0
    for _ in range(60):
        damaged = data.copy()
        places = rng.integers(0, min(len(data), 400), rng.integers(1, 8))
        damaged[places] = rng.integers(0, 256, len(places))
        try:
            open_picture(damaged.tobytes(), limits=PictureLimits(max_pixels=1_000_000))
        except Refused:
            refused += 1
    assert refused


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.png").code == "not-found"
    assert "directory" in refusal(tmp_path).message
    assert refusal("a\0b").code == "bad-image"
