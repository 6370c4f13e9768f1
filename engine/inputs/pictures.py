"""Opens pictures: size limits before decoding, EXIF rotation, conversion to opaque RGB, and a record of what was done.

What is done to a picture, in this order; the record of each picture states it:
1. The file's size, the format, and the number of pixels in the header are held against `PictureLimits`.
2. Of an animation or a file with several pages, the first frame is used.
3. The EXIF orientation is applied (`apply_exif=False` leaves the stored orientation, as a processor does that is given
   `PIL.Image.open(file)` itself).
4. Grey of 16 or 32 bits is taken as transformers takes it where all values lie within 0 to 255. Larger values it clips
   to white, which is nearly all of a 16-bit range: such a picture is refused, with its values, rather than answered for
   as a white one. 16-bit RGB keeps the upper eight bits, as Pillow reads it.
5. Transparency (alpha, a palette's or a colour's tRNS) is composited on white, as transformers 5 does.
6. Everything else (grey, bilevel, palette, CMYK, YCbCr, LAB) is converted by Pillow. ICC profiles are not applied.
"""

from __future__ import annotations

import re
import struct
import zlib
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.inputs.picture_sources import read_source

if TYPE_CHECKING:
    from PIL import Image

EXIF_ORIENTATION = 0x0112
SIXTEEN_BIT_MODES = ("I;16", "I;16L", "I;16B", "I;16N")

# What brings a picture of an EXIF orientation upright, by Pillow's names.
TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}

# How files of the common formats begin, to tell a broken one from something else.
BEGINNINGS = {b"\x89PNG": "PNG", b"\xff\xd8\xff": "JPEG", b"GIF8": "GIF"}

# What Pillow's decoders raise on broken files, besides its own UnidentifiedImageError (an OSError); where warnings are
# errors, their warnings as well.
_DECODE_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    EOFError,
    ArithmeticError,
    RuntimeError,
    struct.error,
    zlib.error,
    UserWarning,
)


class PictureLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on pictures: file size in bytes, number of pixels, and accepted formats."""

    max_file_bytes: int = 64 << 20
    max_pixels: int = 64_000_000
    formats: tuple[str, ...] = ("PNG", "JPEG", "BMP", "GIF", "PPM", "WEBP", "TIFF", "AVIF")


class PictureRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a picture was and what was done to it. Sizes are (width, height)."""

    source: str
    file_bytes: int
    format: str
    mode: str
    stored_size: tuple[int, int]
    size: tuple[int, int]
    orientation: int | None = None
    orientation_applied: bool = False
    composited_on_white: bool = False
    is_animated: bool = False
    notes: tuple[str, ...] = ()


class Picture(msgspec.Struct, frozen=True, eq=False):
    """An upright 8-bit RGB picture, and the record of how it was made.

    `rgba` is the picture before compositing, for processors that have their own background.
    """

    image: Image.Image
    record: PictureRecord
    rgba: Image.Image | None = None


def open_picture(
    source: bytes | str | Path, apply_exif: bool = True, limits: PictureLimits | None = None, files: bool = True
) -> Picture:
    """A picture from the bytes of a file, a path, or a `data:` URL.

    `files`: whether a text may be a path; a server passes false for what its clients send.
    Raises `Refused` (bad-image) with the limit and the actual value: file too large, not a picture, a format that is
    not decoded, too many pixels, truncated or broken data, values without a defined range; and for http(s) URLs, which
    are not fetched.
    """
    limits = limits or PictureLimits()
    data, name = read_source(source, limits.max_file_bytes, files)
    image, notes, turned_by_decoder = _open(data, name, limits)
    return _upright_rgb(image, name, len(data), apply_exif, notes, turned_by_decoder)


def _refuse(name: str, message: str, **fields: Any) -> NoReturn:
    raise Refused(fatal("bad-image", message, file=name, **fields))


def _open(data: bytes, name: str, limits: PictureLimits) -> tuple[Image.Image, list[str], int | None]:
    """The first frame, decoded, after its header passed the limits; remarks; the orientation the decoder applied."""
    from PIL import Image

    try:
        image = Image.open(BytesIO(data), formats=limits.formats)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        found = re.search(r"(\d+) pixels", str(error))
        _refuse(
            name,
            "too many pixels",
            expected=f"1 to {limits.max_pixels} pixels",
            found=found[0] if found else str(error),
            next="scale it down",
        )
    except _DECODE_ERRORS:
        begun = next((form for start, form in BEGINNINGS.items() if data.startswith(start)), None)
        _refuse(
            name,
            f"a {begun} that is truncated or corrupt before its size" if begun else "not a picture that can be decoded",
            expected=f"one of {', '.join(limits.formats)}",
            found=_describe(data),
            next="fetch or save the picture again" if begun else "convert it to PNG or JPEG",
        )
    width, height = image.size
    if width * height > limits.max_pixels or width * height == 0:
        _refuse(
            name,
            "too many pixels" if width else "no pixels",
            expected=f"1 to {limits.max_pixels} pixels",
            found=f"{width} x {height} = {width * height} pixels",
            next="scale it down",
        )
    # Pillow forgets how the file stores its values once they are decoded, and turns TIFF upright of its own accord.
    is_wide = any(";16" in str(tile[3]) for tile in getattr(image, "tile", None) or ()) and "16" not in image.mode
    orientation = _orientation(image, []) if image.format == "TIFF" else None
    try:
        image.load()
    except _DECODE_ERRORS as error:
        _refuse(
            name,
            f"{image.format} data is broken: {error}",
            expected=f"{width} x {height} pixels, as the header says",
            found=f"truncated or corrupt data ({len(data)} bytes)",
            next="fetch or save the picture again",
        )
    notes = ["16 bits a channel in the file: the upper 8 are used"] if is_wide else []
    return image, notes, orientation


def _describe(data: bytes) -> str:
    if not data:
        return "an empty file"
    return f"{len(data)} bytes that start with {data[:8].hex(' ')}"


def _upright_rgb(
    image: Image.Image,
    name: str,
    file_bytes: int,
    apply_exif: bool,
    notes: list[str],
    turned_by_decoder: int | None = None,
) -> Picture:
    is_animated = _is_animated(image)
    if is_animated:
        notes.append("several frames or pages: the first is used")
    if image.info.get("icc_profile"):
        notes.append("the embedded ICC profile is not applied")
    orientation = _orientation(image, notes)
    format_, mode, stored_size = image.format or "none", image.mode, image.size
    turned, is_turned = image, False
    if turned_by_decoder in TURNS:
        orientation, is_turned = turned_by_decoder, True
        stored_size = image.size[::-1] if turned_by_decoder >= 5 else image.size
        notes.append("the decoder applies the orientation, whatever is asked for")
    elif orientation in TURNS and apply_exif:
        turned, is_turned = image.transpose(_turn(orientation)), True
    elif orientation in TURNS:
        notes.append(f"EXIF orientation {orientation} is not applied: switched off")
    rgb, rgba = _rgb(turned, name, notes)
    record = PictureRecord(
        source=name,
        file_bytes=file_bytes,
        format=format_,
        mode=mode,
        stored_size=stored_size,
        size=rgb.size,
        orientation=orientation,
        orientation_applied=is_turned,
        composited_on_white=rgba is not None,
        is_animated=is_animated,
        notes=tuple(notes),
    )
    return Picture(rgb, record, rgba)


def _is_animated(image: Image.Image) -> bool:
    try:
        return bool(getattr(image, "is_animated", False))
    except _DECODE_ERRORS:  # what follows the first frame is broken
        return True


def _orientation(image: Image.Image, notes: list[str]) -> int | None:
    try:
        value = image.getexif().get(EXIF_ORIENTATION)
    except _DECODE_ERRORS as error:
        notes.append(f"the EXIF data cannot be read and is ignored: {error}")
        return None
    if value is not None and value not in range(1, 9):
        notes.append(f"EXIF orientation {value!r} is not one of 1 to 8 and is ignored")
        return None
    return value


def _turn(orientation: int) -> Image.Transpose:
    from PIL import Image

    return Image.Transpose[TURNS[orientation]]


def _rgb(image: Image.Image, name: str, notes: list[str]) -> tuple[Image.Image, Image.Image | None]:
    """The picture in RGB, composited on white, and in RGBA if anything was transparent."""
    from PIL import Image

    if image.mode in (*SIXTEEN_BIT_MODES, "I", "F"):
        _check_wide_grey(image, name)
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB"), rgba
    if image.mode != "RGB":
        notes.append(f"converted from mode {image.mode}")
    return image.convert("RGB"), None


def _check_wide_grey(image: Image.Image, name: str) -> None:
    """Refuses grey of more than 8 bits whose values have no place in 8: the vendor's processor would clip them."""
    import numpy as np

    grey = np.asarray(image)
    if image.mode == "F" or grey.min() < 0 or grey.max() > 255:
        _refuse(
            name,
            f"grey of mode {image.mode}: values without a defined white, which the model's processor would clip at 255",
            expected="8 bits a channel, or whole numbers from 0 to 255",
            found=f"{'fractions' if image.mode == 'F' else 'values'} from {grey.min():g} to {grey.max():g}",
            next="scale it to 8 bits (16 bits: divide by 257) and save it as PNG",
        )
