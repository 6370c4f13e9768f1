"""Parses JSON lines that differ only in numbers as columns: a form per line, and its numbers.

Headers and indexes of half a million entries consist of a few dozen forms. Work is done on whole arrays of bytes and
once a form, never line by line. Whatever is unusual gives None: for that, and for small files, there are the plain
parsers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer[Any]]
T = TypeVar("T", bound=Hashable)
STEP_BYTES = 1 << 19  # of text worked on at a time, so that arrays stay in the processor's caches
MOST_NUMBERS = 16  # of a line
MOST_DIGITS = 16
_PAD = b" " * MOST_DIGITS  # before a text, so that there are so many bytes before every number
_ZERO, _DOT, _QUOTE, _STAR, _BRACKET, _BRACE = b'0."*]}'
_EIGHT = np.uint64(8)


class Lines(NamedTuple):
    """`forms`: distinct lines, with `*` for their numbers. `ids`: the form of each line. `numbers`: of each line, in
    order, 0 behind its last.
    """

    forms: list[str]
    ids: Ints
    numbers: Ints


def compact(text: bytes) -> bytes | None:
    """JSON without the blanks between its parts; None where some may be inside of strings.

    A string that holds one of `[]{},:` may lose a blank beside it: nothing that is read as lines has such names.
    """
    if not any(blank in text for blank in (b" ", b"\n", b"\t", b"\r")):
        return text
    found, start = [], 0
    while start < len(text):
        stop = text.find(b'"', start + STEP_BYTES) + 1 or len(text)
        codes = np.frombuffer((b'"' if start else b"{") + text[start:stop] + b"}", np.uint8)
        is_blank = _one_of(codes, b" \n\t\r")
        edges = np.flatnonzero(is_blank[1:] != is_blank[:-1]) + 1
        before, after = codes[edges[::2] - 1], codes[edges[1::2]]
        if not np.all(_one_of(before, b"{[,:") | _one_of(after, b"]},:")):
            return None
        found.append(codes[~is_blank].tobytes()[1:-1])
        start = stop
    return b"".join(found)


def _one_of(codes: NDArray[np.uint8], some: bytes) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = np.logical_or.reduce([codes == one for one in some])
    return found


def read_lines(text: bytes | bytearray, between: bytes) -> Lines | None:
    """What stands between occurrences of `between`, the first byte of which ends each line and the text.

    Numbers are what a name has between its dots, or behind the last, and the two at the end of an entry of a header:
    `a.3.w1":{"shape":[2],"data_offsets":[0,8]` is `a.*.w1":{"shape":[2],"data_offsets":[*,*]`. Zeros before a number
    stay in the form, and so do digits before its last `MOST_DIGITS` (`patterns.py` has names so as well).
    None for text that is no UTF-8, has a backslash, a `*` or a zero byte in it, or very many numbers in a line.
    """
    if b"\\" in text or b"*" in text:
        return None
    known: dict[bytes, int] = {}
    stars = np.zeros(0, np.int64)  # of each form
    ids: list[Ints] = []
    numbers: list[Ints] = []
    for part in _parts(text, between):
        collapsed, of_part = _collapse(part)
        found = collapsed.split(between)
        kinds, own = counted(found)
        number = np.array([known.setdefault(form, len(known)) for form in kinds], np.int32)
        fresh = kinds if len(known) == len(stars) + len(kinds) else tuple(islice(known, len(stars), None))
        if fresh:
            stars = np.concatenate((stars, [form.count(b"*") for form in fresh]))
        ids.append(number[own])
        counts = stars[ids[-1]]
        if counts.sum() != len(of_part) or counts.max() > MOST_NUMBERS:
            return None
        numbers.append(_by_line(of_part, counts))
    most = max(of_it.shape[1] for of_it in numbers)
    table = np.zeros((sum(map(len, ids)), most), np.int64)
    for of_it, stop in zip(numbers, np.cumsum([len(of_it) for of_it in numbers]), strict=True):
        table[stop - len(of_it) : stop, : of_it.shape[1]] = of_it
    try:
        forms = b"\0".join(known).decode().split("\0")
    except UnicodeDecodeError:
        return None
    return Lines(forms, np.concatenate(ids), table) if len(forms) == len(known) else None


def counted(items: Sequence[T]) -> tuple[tuple[T, ...], Ints]:
    """Distinct items, in the order in which they come, and which of these each is."""
    numbers = dict(zip(there := tuple(dict.fromkeys(items)), range(len(items)), strict=False))
    if len(there) == len(items):
        return there, np.arange(len(items), dtype=np.int32)
    return there, np.fromiter(map(numbers.__getitem__, items), np.int32, len(items))


def _parts(text: bytes | bytearray, between: bytes) -> Iterator[bytes]:
    """The text in parts of about `STEP_BYTES` that end where lines do, each with the byte that ends its last line."""
    start = 0
    while start < len(text):
        stop = text.find(between, start + STEP_BYTES)
        stop = len(text) - 1 if stop < 0 else stop
        yield bytes(text[start : stop + 1])
        start = stop + len(between)


def _collapse(text: bytes) -> tuple[bytes, Ints]:
    """The text, less its last byte, with `*` for numbers, and the numbers."""
    text = _PAD + text + b" "
    codes = np.frombuffer(text, np.uint8)
    is_digit = codes - np.uint8(_ZERO) < 10
    edges: Ints = np.flatnonzero(is_digit[1:] != is_digit[:-1]) + 1
    starts, stops = edges[::2], edges[1::2]
    chosen = _are_numbers(codes, starts, stops)
    stops = stops[chosen]
    if not len(stops):
        return text[len(_PAD) : -2], stops
    starts = _as_written(codes, starts[chosen], stops)
    lengths = stops - starts
    collapsed, kept = codes.copy(), np.ones(len(codes), bool)
    collapsed[starts] = _STAR
    places, left = starts, lengths
    while len(places := places[left > 1] + 1):
        left = left[left > 1] - 1
        kept[places] = False
    return collapsed[kept].tobytes()[len(_PAD) : -2], numbers_before(text, stops, lengths)


def _are_numbers(codes: NDArray[np.uint8], starts: Ints, stops: Ints) -> NDArray[np.bool_]:
    """Which runs of digits are parts of names, or the two at the end of an entry of a header."""
    before, after = codes[starts - 1], codes[stops]
    last = (after == _BRACKET) & (codes[stops + 1] == _BRACE)
    chosen = (before == _DOT) & ((after == _DOT) | (after == _QUOTE)) | last
    chosen[:-1] |= last[1:]
    return chosen


def _as_written(codes: NDArray[np.uint8], starts: Ints, stops: Ints) -> Ints:
    """Where numbers start that are written as numbers are, without a zero before them."""
    starts = np.maximum(starts, stops - MOST_DIGITS)
    padded = np.flatnonzero(codes[starts] == _ZERO)
    while len(padded := padded[(stops[padded] - starts[padded] > 1) & (codes[starts[padded]] == _ZERO)]):
        starts[padded] += 1
    return starts


def numbers_before(text: bytes, stops: Ints, lengths: Ints) -> Ints:
    """The numbers of 1 to `MOST_DIGITS` digits that end before `stops`; so many bytes of text stand before each."""
    eights = np.ndarray((len(text) - 7,), "<u8", text, strides=(1,))  # from each place on
    values = _of_eight(eights[stops - 8], np.minimum(lengths, 8))
    longer = np.flatnonzero(lengths > 8)
    values[longer] += 10**8 * _of_eight(eights[stops[longer] - 16], lengths[longer] - 8)
    return values


def _of_eight(digits: NDArray[np.uint64], lengths: Ints) -> Ints:
    """The numbers that the last `lengths` of eight bytes each spell: neighbours are added in pairs, fours and eights.

    Source: D. Lemire, "Quickly parsing eight digits" (2018).
    """
    others = _EIGHT * (8 - lengths).astype(np.uint64)  # bits of bytes that are no part of the number
    pairs = digits >> others << others & np.uint64(0x0F0F0F0F0F0F0F0F)
    pairs = pairs * np.uint64(10 << 8 | 1) >> np.uint64(8) & np.uint64(0x00FF00FF00FF00FF)
    fours = pairs * np.uint64(100 << 16 | 1) >> np.uint64(16) & np.uint64(0x0000FFFF0000FFFF)
    return (fours * np.uint64(10_000 << 32 | 1) >> np.uint64(32)).astype(np.int64)


def _by_line(numbers: Ints, counts: Ints) -> Ints:
    """Numbers in one row a line, of which each has its count."""
    table = np.zeros((len(counts), int(counts.max())), np.int64)
    first = np.cumsum(counts) - counts
    for place in range(table.shape[1]):
        has = counts > place
        table[has, place] = numbers[first[has] + place]
    return table
