"""Decodes JSON and explains what is wrong with a text that is not JSON. No torch."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

_MARKS = {  # of byte orders, which JSON may not begin with; the longer first
    b"\xef\xbb\xbf": ("a byte order mark", "save it as UTF-8 without one"),
    b"\xff\xfe\0\0": ("the byte order mark of UTF-32", "save it as UTF-8"),
    b"\xff\xfe": ("the byte order mark of UTF-16", "save it as UTF-8"),
    b"\xfe\xff": ("the byte order mark of UTF-16", "save it as UTF-8"),
}
_STARTS = {
    b"version https://git-lfs": "a Git LFS pointer: the file itself was not fetched",
    b"<": "a web page: a download that went wrong",
    b"\x1f\x8b": "a gzip archive",
    b"PK\x03\x04": "a zip archive",
    b"//": "JSON with comments, which JSON has not",
    b"/*": "JSON with comments, which JSON has not",
}
_PLACE = re.compile(r"\(byte (\d+)\)|\(char (\d+)\)")
_AROUND = 20  # bytes shown on either side of the place
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_APART = re.compile(rb'"[ \t\r\n]+:')
ENDLESS = "a number of more than 4,300 digits"


def decode(text: bytes) -> Any:
    """JSON, with the Infinity and NaN that Python writes into some configurations.

    Raises msgspec.DecodeError, ValueError and RecursionError: `why_no_json` has words for the first two.
    """
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        if b"Infinity" not in text and b"NaN" not in text and "out of range" not in str(error):  # 1e999 is infinite
            raise
        return json.loads(text)


def keys_twice(text: bytes, value: object) -> tuple[str, ...]:
    """The keys that `text`, which is the JSON of `value`, states twice with different values.

    Of equal keys the last one wins in every parser. Keys and colons agree in number unless there are some.
    """
    is_once = colons(value) == text.count(b'":') and b"\\" not in text and not _APART.search(text)
    return () if is_once else _twice(text)


def colons(value: object) -> int:
    """Number of keys in a JSON value at all levels."""
    if isinstance(value, dict):
        return len(value) + sum(colons(item) for item in value.values() if isinstance(item, dict | list))
    return sum(colons(item) for item in value if isinstance(item, dict | list)) if isinstance(value, list) else 0


def _twice(text: bytes) -> tuple[str, ...]:
    found: dict[str, None] = {}

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in items:
            if key in values and values[key] != value:
                found[key] = None
            values[key] = value
        return values

    json.loads(text, object_pairs_hook=pairs)
    return tuple(found)


def is_endless(said: str) -> bool:
    """Whether a parser failed because of the length of a number."""
    return "digits" in said and "limit" in said


def why_no_json(text: bytes, error: Exception) -> tuple[str, str, str]:
    """What is wrong (a sentence that goes on from the file's name), what was expected, and what was found."""
    for mark, (what, way) in _MARKS.items():
        if text.startswith(mark):
            return f"is not JSON: it begins with {what}; {way}", "JSON in UTF-8", repr(text[:40])
    stripped = text.lstrip()
    if not stripped:
        return "is not JSON: it is empty", "a JSON object", f"{len(text):,} bytes" + (" of white space" if text else "")
    if not text.strip(b"\0"):
        return "is not JSON: it holds zeros alone and was never written", "a JSON object", f"{len(text):,} zero bytes"
    if b"\0" in text[:4]:
        return "is not JSON: it looks like UTF-16 or UTF-32; save it as UTF-8", "JSON in UTF-8", repr(text[:40])
    for start, what in _STARTS.items():
        if stripped.startswith(start):
            return f"is not JSON but {what}", "a JSON object", repr(text[:40])
    said = str(error)
    if is_endless(said):
        return f"holds {ENDLESS}", "numbers that are sizes or weights", repr(text[:40])
    if "surrogate" in said or (_HALF.search(text) and "truncated" in said):
        return "is not JSON: it holds half of a pair of surrogates, which is no text", "a JSON object", repr(text[:40])
    if "truncated" in said:
        ending = repr(text[-2 * _AROUND :])
        return f"is not JSON: it breaks off after {len(text):,} bytes", "a JSON object", f"its end: {ending}"
    if (place := _PLACE.search(said)) is None:
        return f"is not JSON: {said}", "a JSON object", repr(text[:40])
    at = int(place[1] or place[2])
    problem = said[: place.start()].removeprefix("JSON is malformed: ").strip()
    found = f"byte {at:,}, in {text[max(at - _AROUND, 0) : at + _AROUND]!r}"
    return f"is not JSON: {problem}, at byte {at:,} (line {text.count(10, 0, at) + 1:,})", "a JSON object", found
