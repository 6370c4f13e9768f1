"""Parses JSON lines that differ only in numbers as columns: a form per line, and its numbers.

Headers and indexes of half a million entries consist of a few dozen forms. Work is done on whole arrays of bytes and
once a form, never line by line. Whatever is unusual gives None: for that, and for small files, there are the plain
parsers.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from itertools import count
from operator import methodcaller
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from firstlight.engine.weights.names.patterns import STAR_ITSELF

Ints = NDArray[np.integer[Any]]
T = TypeVar("T", bound=Hashable)
STEP_BYTES = 1 << 19  # of text worked on at a time, so that arrays stay in the processor's caches
MOST_NUMBERS = 32  # of a line
MOST_DIGITS = 16
_PAD = b" " * MOST_DIGITS  # before a text, so that there are so many bytes before every number
_FIRST_SIGN = 32  # what is before it are control characters
_ZERO, _DOT, _QUOTE, _STAR, _BRACKET, _BRACE, _COMMA, _BACKSLASH = b'0."*]},\\'
_NUMBER_SIGN = "\uf02b"  # what a star is while escapes are read
_STAR_ITSELF = STAR_ITSELF.encode()
_SIGNS = re.compile(rf"{_NUMBER_SIGN}|\\u[fF]02[aAbB]".encode())
_NUMBER_LEFT = re.compile(r"\.[0-9]+(?=[.\n]|\Z)")
_NUMBERS_TAKEN = re.compile(r"(?<=\.)[0-9]*\*(?=[.\n]|\Z)")
_EIGHT = np.uint64(8)


class Lines(NamedTuple):
    """`tails`: what distinct lines have behind their middle, with `*` for their numbers; `heads`: what is before it, of
    other lines as well.

    `head` and `tail`: those of each line. `numbers`: of each line, in order, 0 behind its last; `stars`: how many of
    them are the head's.
    """

    heads: Vocabulary
    head: Ints
    tails: tuple[str, ...]
    tail: Ints
    stars: Ints
    numbers: Ints


def compact(text: bytes) -> bytes:
    """JSON that begins inside of a string, without the blanks between its parts."""
    if not any(blank in text for blank in (b" ", b"\n", b"\t", b"\r")):
        return text
    found, start, is_outside = [], 0, np.uint8(0)
    while start < len(text):
        stop = text.find(b'"', start + STEP_BYTES) + 1 or len(text)
        codes = np.frombuffer(text, np.uint8, stop - start, start)
        quotes = codes == _QUOTE
        quotes[_escaped(codes)] = False
        outside = np.cumsum(quotes, dtype=np.uint8) + is_outside & np.uint8(1)
        found.append(codes[~(_one_of(codes, b" \n\t\r") & outside.astype(bool))].tobytes())
        start, is_outside = stop, outside[-1]
    return b"".join(found)


def _escaped(codes: NDArray[np.uint8]) -> Ints:
    """The places behind an odd number of backslashes."""
    is_backslash = np.concatenate(([False], codes == _BACKSLASH, [False]))
    edges = np.flatnonzero(is_backslash[1:] != is_backslash[:-1])
    starts, stops = edges[::2], edges[1::2]
    behind: Ints = stops[(stops - starts) % 2 == 1]
    return behind[behind < len(codes)]


def _one_of(codes: NDArray[np.uint8], some: bytes) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = np.logical_or.reduce([codes == one for one in some])
    return found


def read_lines(text: bytes | bytearray, middle: bytes, between: bytes, heads: Vocabulary) -> Lines | None:
    """What stands between occurrences of `between`, the first byte of which ends each line and the text.

    A line is a name, `middle`, and a tail. Numbers are what a name has between its dots, or behind the last, and the
    two at the end of an entry of a header: of `a.3.w1":{"shape":[2],"data_offsets":[0,8]` the head is `a.*.w1` and the
    tail `shape":[2],"data_offsets":[*,*]`. Zeros before a number stay in the head, and so do digits before its last
    `MOST_DIGITS`, and a star of the name's own is another sign (`patterns.py` has names so as well).
    None for text that is no UTF-8, has control characters in it, or very many numbers in a line, and for lines that are
    not a name, the middle and a tail.
    """
    is_escaped = b"\\" in text
    if _STAR_ITSELF in text or (is_escaped and _SIGNS.search(text)):
        return None
    text = text.replace(b"*", _STAR_ITSELF)
    tails = Vocabulary()
    parts = []
    try:
        for part in _parts(text, between):
            if (found := _lines_of(part, middle.decode(), between.decode(), is_escaped, heads, tails)) is None:
                return None
            parts.append(found)
    except UnicodeDecodeError:
        return None
    head, tail, counts = (np.concatenate([part[column] for part in parts]) for column in (0, 1, 2))
    numbers = stacked([_by_line(part[3], part[2]) for part in parts])
    stars = counts - np.array([text.count("*") for text in tails])[tail]
    return Lines(heads, head, tails.texts, tail, stars, numbers)


class Vocabulary(defaultdict[str, int]):
    """Numbers texts in the order in which they are first asked for."""

    def __init__(self) -> None:
        super().__init__(count().__next__)
        self._lock = Lock()
        self._texts: tuple[str, ...] = ()
        self._stars: list[int] = []

    def of(self, texts: Sequence[str]) -> Ints:
        """The number of each text."""
        with self._lock:
            return np.fromiter(map(self.__getitem__, texts), np.int32, len(texts))

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts by number, as far as there are any yet."""
        if len(self._texts) < len(self):
            self._texts = tuple(self)
        return self._texts

    @property
    def stars(self) -> list[int]:
        """How many numbers lines of each have."""
        if len(self._stars) < len(self):
            self._stars = list(map(methodcaller("count", "*"), self))
        return self._stars


def _lines_of(
    part: bytes, middle: str, between: str, is_escaped: bool, heads: Vocabulary, tails: Vocabulary
) -> tuple[Ints, Ints, Ints, Ints] | None:
    """Head and tail of each line of a part, how many numbers it has, and all numbers; None as `read_lines` has it."""
    collapsed, numbers = _collapse(part)
    lines, own = counted(collapsed.decode().split(between))
    if np.frombuffer(part, np.uint8).min() < _FIRST_SIGN or set(map(methodcaller("count", middle), lines)) != {1}:
        return None
    words = middle.join(lines).split(middle)
    counts = np.fromiter(map(methodcaller("count", "*"), lines), np.int32, len(lines))[own]
    patterns = _unescaped(words[::2]) if is_escaped else words[::2]
    if counts.sum() != len(numbers) or counts.max() > MOST_NUMBERS or patterns is None:
        return None
    if not _are_patterns("\n".join(patterns), is_escaped):
        return None
    return heads.of(patterns)[own], tails.of(words[1::2])[own], counts, numbers


def _unescaped(heads: Sequence[str]) -> list[str] | None:
    """What heads are as JSON; None where they are not each one text."""
    text = "\n".join(heads).replace("*", _NUMBER_SIGN).replace("\n", '","')
    try:
        found = msgspec.json.decode(f'["{text}"]', type=list[str])
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None
    if len(found) != len(heads):
        return None
    return [pattern.replace("*", STAR_ITSELF).replace(_NUMBER_SIGN, "*") for pattern in found]


def _are_patterns(text: str, is_escaped: bool) -> bool:
    """Whether heads, line by line, are the patterns that names have, with every number taken out and no other."""
    if '"' in text and not is_escaped:
        return False
    is_usual = not is_escaped and "]}" not in text
    return is_usual or (not _NUMBER_LEFT.search(text) and len(_NUMBERS_TAKEN.findall(text)) == text.count("*"))


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
    text = _PAD + text + b"  "
    codes = np.frombuffer(text, np.uint8)
    is_digit = codes - np.uint8(_ZERO) < 10
    edges: Ints = np.flatnonzero(is_digit[1:] != is_digit[:-1]) + 1
    starts, stops = edges[::2], edges[1::2]
    chosen = _are_numbers(codes, starts, stops)
    stops = stops[chosen]
    if not len(stops):
        return text[len(_PAD) : -3], stops
    starts = _as_written(codes, starts[chosen], stops)
    lengths = stops - starts
    collapsed, kept = codes.copy(), np.ones(len(codes), bool)
    collapsed[starts] = _STAR
    places, left = starts, lengths
    while len(places := places[left > 1] + 1):
        left = left[left > 1] - 1
        kept[places] = False
    return collapsed[kept].tobytes()[len(_PAD) : -3], numbers_before(text, stops, lengths)


def _are_numbers(codes: NDArray[np.uint8], starts: Ints, stops: Ints) -> NDArray[np.bool_]:
    """Which runs of digits are parts of names, or the two at the end of an entry of a header."""
    before, after = codes[starts - 1], codes[stops]
    last = (after == _BRACKET) & (codes[stops + 1] == _BRACE)
    ends = stops[last] + 2  # of lines, where a name has not the same in it
    last[last] = ((codes[ends] == _COMMA) & (codes[ends + 1] == _QUOTE)) | (ends == len(codes) - 2)
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


def stacked(tables: Sequence[Ints]) -> Ints:
    """Tables one below the other, with zeros behind the columns of narrower ones."""
    found = np.zeros((sum(map(len, tables)), max(table.shape[1] for table in tables)), np.int64)
    start = 0
    for table in tables:
        found[start : start + len(table), : table.shape[1]] = table
        start += len(table)
    return found


def _by_line(numbers: Ints, counts: Ints) -> Ints:
    """Numbers in one row a line, of which each has its count."""
    table = np.zeros((len(counts), int(counts.max())), np.int64)
    first = np.cumsum(counts) - counts
    for place in range(table.shape[1]):
        has = counts > place
        table[has, place] = numbers[first[has] + place]
    return table
