"""Lines of JSON that differ in numbers only, as columns: the form of each line, and its numbers.

Headers and indexes of half a million entries consist of a few dozen forms. Work is done on whole arrays of bytes and
once a form, never line by line. Whatever is unusual gives None: for that, and for small files, there are the plain
parsers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer[Any]]
STEP_BYTES = 1 << 19  # of text worked on at a time, so that arrays stay in the processor's caches
MOST_NUMBERS = 6  # of a line
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


def read_lines(text: bytes | bytearray, between: bytes) -> Lines | None:
    """What stands between occurrences of `between`, the first byte of which ends each line and the text.

    Numbers are what a name has between its dots, or behind the last, and the two at the end of an entry of a header:
    `a.3.w1":{"shape":[2],"data_offsets":[0,8]` is `a.*.w1":{"shape":[2],"data_offsets":[*,*]`.
    None for text that has a backslash, a `*` or other than ASCII in it, numbers that are written unusually, or about as
    many forms as lines.
    """
    if b"\\" in text or b"*" in text or not text.isascii():
        return None
    known: dict[bytes, int] = {}
    stars: list[int] = []  # of each form
    ids: list[Ints] = []
    numbers: list[Ints] = []
    lines = 0
    for part in _parts(text, between):
        collapsed = _collapse(part)
        if collapsed is None:
            return None
        found = collapsed[0].split(between)
        lines += len(found)
        for form in dict.fromkeys(found):
            if form not in known:
                known[form] = len(known)
                stars.append(form.count(b"*"))
        if 4 * len(known) > lines + 1024:
            return None
        ids.append(np.fromiter(map(known.__getitem__, found), np.int32, len(found)))
        counts = np.array(stars)[ids[-1]]
        if counts.sum() != len(collapsed[1]) or counts.max() > MOST_NUMBERS:
            return None
        numbers.append(_by_line(collapsed[1], counts))
    most = max(of_it.shape[1] for of_it in numbers)
    table = np.zeros((lines, most), np.int64)
    for of_it, stop in zip(numbers, np.cumsum([len(of_it) for of_it in numbers]), strict=True):
        table[stop - len(of_it) : stop, : of_it.shape[1]] = of_it
    return Lines([form.decode() for form in known], np.concatenate(ids), table)


def _parts(text: bytes | bytearray, between: bytes) -> Iterator[bytes]:
    """The text in parts of about `STEP_BYTES` that end where lines do, each with the byte that ends its last line."""
    start = 0
    while start < len(text):
        stop = text.find(between, start + STEP_BYTES)
        stop = len(text) - 1 if stop < 0 else stop
        yield bytes(text[start : stop + 1])
        start = stop + len(between)


def _collapse(text: bytes) -> tuple[bytes, Ints] | None:
    """The text, less its last byte, with `*` for numbers, and the numbers; None where one has a zero before it, or too
    many digits.
    """
    text = _PAD + text + b" "
    codes = np.frombuffer(text, np.uint8)
    is_digit = codes - np.uint8(_ZERO) < 10
    edges = np.flatnonzero(is_digit[1:] != is_digit[:-1]) + 1
    starts, stops = edges[::2], edges[1::2]
    chosen = _are_numbers(codes, starts, stops)
    starts, stops = starts[chosen], stops[chosen]
    lengths = stops - starts
    if not len(starts):
        return text[len(_PAD) : -2], starts
    if lengths.max() > MOST_DIGITS or np.any((codes[starts] == _ZERO) & (lengths > 1)):
        return None
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
