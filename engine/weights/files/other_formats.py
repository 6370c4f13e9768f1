"""Recognises files that are not safetensors by their first bytes. No torch."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import BinaryIO

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, fatal
from firstlight.engine.weights.sources.base import AnyPath

HEADER_LIMIT_BYTES = 1 << 30

_MAGIC = {
    b"PK\x03\x04": "a zip archive (a torch checkpoint?)",
    b"\x80\x02": "a Python pickle",
    b"\x80\x03": "a Python pickle",
    b"\x80\x04": "a Python pickle",
    b"\x80\x05": "a Python pickle",
    b"GGUF": "a GGUF file",
    b"\x89HDF": "an HDF5 file",
    b"\x93NUMPY": "a numpy array",
    b"\x1f\x8b": "a gzip archive",
    b"\xfd7zX": "an xz archive",
    b"\x28\xb5\x2f\xfd": "a zstd archive",
    b"BZh": "a bzip2 archive",
    b"7z\xbc\xaf": "a 7-zip archive",
    b"version https": "a Git LFS pointer: the weights themselves were not fetched",
    b"<!": "a web page: a download that went wrong",
    b"<htm": "a web page: a download that went wrong",
    b"<HTM": "a web page: a download that went wrong",
    b"<?xm": "an XML page: a download that went wrong",
    b'{"': "JSON text: a download that went wrong, or an index",
}


def refuse_other_formats(file: str, start: bytes, size: int, length: int) -> None:
    """A sane length and '{' behind it is a header; everything else is told apart by its first bytes."""
    if start[8:9] == b"{" and length <= HEADER_LIMIT_BYTES:
        return
    for magic, what in _MAGIC.items():
        if start.startswith(magic):
            raise Refused(foreign(file, f"starts with {magic[:4]!r}: {what}"))
    if size < 10 and start[8:9] != b"{":
        raise Refused(foreign(file, f"{size} bytes in all" if size else "an empty file"))
    if start[8:9] != b"{":
        raise Refused(foreign(file, _unknown(start)))
    raise Refused(
        fatal(
            "header-too-large",
            f"{file} claims a header of {length:,} bytes ({length / 2**20:,.0f} MiB)",
            file=file,
            expected=f"at most {HEADER_LIMIT_BYTES:,} bytes",
            found=f"{length:,} bytes in a file of {size:,}",
            next="fetch the file again; its first eight bytes are not a sane length",
        )
    )


def _unknown(start: bytes) -> str:
    """What is seen of a file that begins like no format known here."""
    if not start.strip(b"\0"):
        return f"its first {len(start)} bytes are zeros: it was never written"
    if start.isascii() and start.decode().replace("\n", " ").isprintable():
        return f"it begins with the words {start.decode()!r}: a download that went wrong"
    return f"byte 9 is {start[8:9]!r}"


def foreign(file: str, found: str) -> Finding:
    """The finding for a file that is something else."""
    return fatal(
        "not-safetensors",
        f"{file} is not a safetensors file: {found}",
        file=file,
        expected="8 bytes of header length, then '{'",
        found=found,
        next="fetch the safetensors file of the release; other formats are not read",
    )


def open_regular(path: AnyPath) -> BinaryIO:
    """The file for reading; anything that is not a regular file is refused before it can block or fail."""
    if not stat.S_ISREG(path.stat().st_mode):
        kind = "a directory" if path.is_dir() else "no regular file"
        raise Refused(foreign(path.name, f"it is {kind}"))
    return path.open("rb")


def unreadable(path: AnyPath, error: OSError) -> Finding:
    """The finding for a file that the system does not read."""
    if isinstance(path, Path) and path.is_symlink() and not path.exists():
        return fatal(
            "missing-shard",
            f"{path.name} is a link to {path.readlink()}, which is not there",
            file=path.name,
            expected="a file",
            found="a dangling link",
            next=f"fetch {path.name} itself, or copy the link's target along",
        )
    return fatal(
        "read-failed",
        f"{path.name} cannot be read: {error.strerror}",
        file=path.name,
        expected="a readable file",
        found=error.strerror,
        next="check the permissions of the file and the health of the storage",
    )
