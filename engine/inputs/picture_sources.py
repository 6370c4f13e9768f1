"""Reads the bytes of a picture from memory, a path or a `data:` URL, within a size limit; nothing is downloaded."""

from __future__ import annotations

import base64
import binascii
import errno
from pathlib import Path
from typing import NoReturn
from urllib.parse import unquote_to_bytes

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal

SHOWN_CHARACTERS = 48


def read_source(source: bytes | str | Path, max_bytes: int, files: bool = True) -> tuple[bytes, str]:
    """The bytes of a picture and a name for messages; raises `Refused` (bad-image, not-found).

    `files`: whether a string may be a path; servers pass False, so that clients cannot read their files.
    """
    if isinstance(source, bytes | bytearray | memoryview):
        data = bytes(source)
        _check_size(len(data), max_bytes, f"{len(data)} bytes in memory")
        return data, f"{len(data)} bytes in memory"
    if isinstance(source, str):
        scheme = source[:8].lower()
        if scheme.startswith("data:"):
            return _from_data_url(source, max_bytes)
        if scheme.startswith(("http:", "https:", "ftp:", "file:", "s3:", "gs:")):
            _refuse_url(source)
        if not files:
            _refuse_url(source, "only data: URLs are pictures here")
    return _from_file(Path(source), max_bytes)


def _from_file(path: Path, max_bytes: int) -> tuple[bytes, str]:
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a directory")
        with path.open("rb") as file:
            # One byte more than allowed is enough to know; a pipe or /dev/zero ends here too.
            data = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise Refused(
            fatal("not-found", f"there is no picture {path}", file=str(path), next="check the path of the picture")
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise Refused(
            fatal(
                "bad-image",
                f"the picture cannot be read: {reason}",
                file=str(path),
                next="name an image file that this user may read",
            )
        ) from None
    size = len(data) if len(data) <= max_bytes else max(path.stat().st_size, len(data))
    _check_size(size, max_bytes, str(path))
    return data, str(path)


def _from_data_url(url: str, max_bytes: int) -> tuple[bytes, str]:
    """`data:image/png;base64,...`: RFC 2397, the base64 form."""
    name = _shown(url)
    head, comma, body = url[5:].partition(",")
    kind, *options = (part.strip().lower() for part in head.split(";"))
    if not comma or "base64" not in options:
        raise Refused(
            fatal(
                "bad-image",
                "a data URL that is not base64",
                file=name,
                expected="data:image/png;base64,<data>",
                found=f"data:{head[:SHOWN_CHARACTERS]}",
                next="send the picture's bytes in base64",
            )
        )
    if not kind.startswith("image/"):
        raise Refused(
            fatal(
                "bad-image",
                "a data URL that is not a picture",
                file=name,
                expected="image/...",
                found=kind or "no type",
                next="name the picture's type: data:image/png;base64,<data>",
            )
        )
    # Held against the limit before it is decoded: four characters are three bytes.
    _check_size(len(body) * 3 // 4, max_bytes + 3, name)
    if "%" in body:
        body = unquote_to_bytes(body).decode("latin-1")
    try:
        data = base64.b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refused(
            fatal(
                "bad-image",
                f"the base64 of a data URL is broken: {error}",
                file=name,
                next="encode the picture's bytes anew",
            )
        ) from None
    _check_size(len(data), max_bytes, name)
    return data, name


def _check_size(size: int, max_bytes: int, name: str) -> None:
    if size > max_bytes:
        raise Refused(
            fatal(
                "bad-image",
                "the picture's file is too large",
                file=name,
                expected=f"at most {max_bytes} bytes",
                found=f"{size} bytes",
                next="scale the picture down",
            )
        )


def _refuse_url(url: str, message: str = "pictures are not fetched from other places") -> NoReturn:
    raise Refused(
        fatal(
            "bad-image",
            message,
            file=_shown(url),
            expected="a data: URL",
            found=_shown(url),
            next="send the picture itself: data:image/png;base64,<data>",
        )
    )


def _shown(url: str) -> str:
    return url if len(url) <= SHOWN_CHARACTERS else f"{url[:SHOWN_CHARACTERS]}... ({len(url)} characters)"
