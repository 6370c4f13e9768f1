"""The bytes of single tokens, for tokenizers whose decoder concatenates the bytes of tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import msgspec

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


class Pieces(msgspec.Struct, frozen=True):
    """How tokens become bytes.

    `bytes_of(token)`: the token's bytes in the middle of a text. `first_bytes_of(token)`: the same for the first token.
    `strip`: how many spaces are taken off the start of the whole text.
    """

    bytes_of: Callable[[str], bytes]
    first_bytes_of: Callable[[str], bytes]
    strip: int = 0


@cache
def byte_of_char() -> Mapping[str, int]:
    """GPT-2's byte alphabet, backwards: printable bytes are themselves, the others characters from U+0100 on."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(kept)]
    return {chr(b): b for b in kept} | {chr(256 + index): byte for index, byte in enumerate(others)}


def _byte_level(token: str) -> bytes:
    table = byte_of_char()
    try:
        return bytes([table[char] for char in token])
    except KeyError:  # an added token outside of the alphabet is text
        return token.encode()


def _replacing(old: str, new: str, byte_fallback: bool) -> Callable[[str], bytes]:
    def bytes_of(token: str) -> bytes:
        if byte_fallback and (found := BYTE_TOKEN.match(token)):
            return bytes([int(found[1], 16)])
        return token.replace(old, new).encode()

    return bytes_of


def pieces_of(decoder: Any) -> Pieces | None:
    """How the tokens of a tokenizer.json's decoder become bytes, or None for a decoder that looks at neighbours.

    Covered: ByteLevel; Metaspace; a sequence of Replace, ByteFallback, Fuse and a Strip at the left, in that order.
    """
    if not isinstance(decoder, Mapping):
        return None
    steps = list(decoder.get("decoders", ())) if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        return Pieces(_byte_level, _byte_level)
    if kinds == ["Metaspace"]:
        mark = steps[0].get("replacement", "▁")
        scheme = steps[0].get("prepend_scheme") or ("always" if steps[0].get("add_prefix_space", True) else "never")
        first = _replacing(mark, " " if scheme == "never" else "", byte_fallback=False)
        return Pieces(_replacing(mark, " ", byte_fallback=False), first)
    if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        pattern = steps[0].get("pattern", {}).get("String")
        strip: Mapping[str, Any] = steps[3] if len(steps) == 4 else {"content": " ", "start": 0, "stop": 0}
        if pattern is None or strip["content"] != " " or strip["stop"]:
            return None
        bytes_of = _replacing(pattern, steps[0].get("content", ""), byte_fallback=True)
        return Pieces(bytes_of, bytes_of, strip["start"])
    return None
