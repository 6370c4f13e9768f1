"""Parses a large shard's header into columns instead of objects; same result as `header.py`, much faster.

Source of the format: https://github.com/huggingface/safetensors (README, "Format"). No torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from firstlight.engine.findings import Finding
from firstlight.engine.weights.files.header import (
    BLANKS,
    LIBRARY_CAP_BYTES,
    METADATA,
    TWICE,
    Header,
    HeaderText,
    TensorInfo,
    decode_metadata,
    entry_problem,
    header_of,
    invalid,
    kind_bytes,
    over_the_cap,
    read_text,
    refuse_dense,
    trailing,
    truncated,
)
from firstlight.engine.weights.files.lines import Ints, Vocabulary, compact, read_lines
from firstlight.engine.weights.names.columns import Names, repeated, row_keys
from firstlight.engine.weights.sources.base import AnyPath

_NUMBER = r"(?:0|[1-9]\d{0,17})"
_FORM = re.compile(
    rf'dtype":"(\w+)","shape":\[({_NUMBER}(?:,{_NUMBER})*)?\],"data_offsets":\[\*,\*\]',
    re.ASCII,
)
_ORDER = (b"dtype", b"shape", b"data_offsets")
_VALUES = {b"dtype": r'"\w+"', b"shape": r"\[[\d,]*\]", b"data_offsets": r"\[\d+,\d+\]"}
_KEYS = re.compile(rb'":\{"(\w+)":[^{}]*?,"(\w+)":[^{}]*?,"(\w+)":[^{}]*?\}')
_USUAL = rb'":{"dtype":\g<dtype>,"shape":\g<shape>,"data_offsets":\g<data_offsets>}'
NONE = -(1 << 62)  # bytes of what can be no tensor
_OPENING = re.compile(rb'\s*\{\s*"')
_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_METADATA = re.compile(rf'"{METADATA}"\s*:\s*(\{{(?:[^"{{}}]++|{_STRING})*+\}})\s*(,\s*)?'.encode(), re.DOTALL)
_MIDDLE, _BETWEEN = b'":{"', b'},"'  # of a name and its entry, of entries


class Form(NamedTuple):
    """What tensors of one dtype and shape share."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class ShardColumns(NamedTuple):
    """One shard's tensors as columns (name, form, offset in the file), with findings."""

    file: str
    names: Names
    forms: tuple[Form, ...]
    form: Ints
    offsets: Ints
    findings: tuple[Finding, ...] = ()

    def at(self, rows: slice | Ints | NDArray[np.bool_]) -> ShardColumns:
        """Some of the tensors."""
        return ShardColumns(self.file, self.names.at(rows), self.forms, self.form[rows], self.offsets[rows])


def read_shard(path: AnyPath, vocabulary: Vocabulary) -> ShardColumns | Header:
    """The tensors of one file as columns or, if anything is unusual, from the plain parser.

    Raises `Refused` for a file that is no safetensors file.
    """
    written = read_text(path)
    found = columns_of(written, vocabulary)
    return header_of(written) if found is None else found


def columns_of(written: HeaderText, vocabulary: Vocabulary) -> ShardColumns | None:
    """The columns of a usually formatted header, with the plain parser's checks; else None."""
    file, size, length, text = written
    refuse_dense(file, text)
    read = _entries(file, text, vocabulary)
    if read is None:
        return None
    found, starts, stops = read
    taken, findings = _once(found)
    found, starts, stops = found.at(taken), starts[taken], stops[taken]
    nbytes = np.array([form.nbytes for form in found.forms])[found.form]
    is_wrong = stops - starts != nbytes
    if not findings and not is_wrong.any() and not _is_whole(starts, stops, size - 8 - length):
        order = np.lexsort((nbytes, starts))
        found, starts, stops = found.at(order), starts[order], stops[order]
    found = found._replace(offsets=starts + (8 + length))
    if is_wrong.any():
        findings.extend(_wrong_entries(found, starts, stops, is_wrong))
        found, starts, stops = found.at(~is_wrong), starts[~is_wrong], stops[~is_wrong]
    elif not findings:
        findings.extend(_layout(found, starts, stops))
    findings.extend(_size_problems(found, stops, size - 8 - length, size, whole=not findings))
    if length > LIBRARY_CAP_BYTES:
        findings.append(over_the_cap(file, length, len(found.form)))
    return found._replace(findings=tuple(findings))


def _once(found: ShardColumns) -> tuple[slice | Ints, list[Finding]]:
    """Each name once, with its last entry in the place of its first, and what is said of those that have several."""
    (keys,) = row_keys((found.names.kinds, found.names.numbers))
    several = repeated(keys)
    if not len(several):
        return slice(None), []
    rows = np.flatnonzero(np.isin(keys, several))
    first = rows[np.unique(keys[rows], return_index=True)[1]]
    last = rows[::-1][np.unique(keys[rows][::-1], return_index=True)[1]]
    taken, is_left = np.arange(len(keys)), np.ones(len(keys), bool)
    is_left[rows], is_left[first] = False, True
    taken[first] = last
    names = found.names.listed(np.sort(first))
    return taken[is_left], [invalid(found.file, names, *TWICE)]


def _wrong_entries(found: ShardColumns, starts: Ints, stops: Ints, is_wrong: NDArray[np.bool_]) -> Iterator[Finding]:
    """Entries with impossible dtype, shape or offsets, one finding per kind of problem."""
    wrong: dict[str, tuple[str, str, list[Ints]]] = {}
    bad = np.flatnonzero(is_wrong)
    order = np.argsort(found.form[bad], kind="stable")
    of_form = np.split(bad[order], np.unique(found.form[bad][order], return_index=True)[1][1:])
    for rows in sorted(of_form, key=lambda rows: int(rows[0])):
        form, first = found.forms[found.form[rows[0]]], rows[0]
        kind, expected, was = entry_problem(form.dtype, form.shape, (int(starts[first]), int(stops[first])))
        wrong.setdefault(kind, (expected, was, []))[2].append(rows)
    for kind, (expected, was, parts) in wrong.items():
        yield invalid(found.file, found.names.listed(np.sort(np.concatenate(parts))), kind, expected, was)


def _layout(found: ShardColumns, starts: Ints, stops: Ints) -> Iterator[Finding]:
    """Gaps and overlaps between tensors sorted by offset, one finding per kind of problem."""
    ends = np.concatenate(([0], np.maximum.accumulate(stops)[:-1]))
    parts = [("overlaps the tensor before it", starts < ends), ("leaves a gap before it", starts > ends)]
    wrong = [(np.flatnonzero(is_so), kind) for kind, is_so in parts if is_so.any()]
    for rows, kind in sorted(wrong, key=lambda item: int(item[0][0])):
        expected, was = (f"data from byte {int(where[rows[0]]):,}" for where in (ends, starts))
        yield invalid(found.file, found.names.listed(rows), kind, expected, was)


def _size_problems(found: ShardColumns, stops: Ints, payload: int, size: int, whole: bool) -> Iterator[Finding]:
    end = int(stops.max(initial=0))
    if end > payload:
        yield truncated(found.file, size - payload + end, size, found.names.listed(np.flatnonzero(stops > payload)))
    elif end < payload and whole:
        yield trailing(found.file, size - payload + end, size)


def columns_of_tensors(file: str, tensors: Sequence[TensorInfo], vocabulary: Vocabulary) -> ShardColumns | None:
    """Columns of tensors that the plain parser found; None where their names are unusual."""
    entries = {t.name: {"dtype": t.dtype, "shape": t.shape, "data_offsets": (0, 0)} for t in tensors}
    read = _entries(file, bytearray(msgspec.json.encode(entries)), vocabulary) if entries else None
    return None if read is None else read[0]._replace(offsets=np.array([t.offset_bytes for t in tensors]))


def _entries(file: str, text: bytearray, vocabulary: Vocabulary) -> tuple[ShardColumns, Ints, Ints] | None:
    """The entries of a header, and where the data of each starts and stops, if there are any and nothing about them is
    unusual; what they say is not checked yet.
    """
    parted = _without_metadata(text)
    opening = _OPENING.match(parted) if parted is not None else None
    if parted is None or opening is None:
        return None
    body = bytes(parted[opening.end() : parted.rfind(b"}") + 1])
    rest = bytes(parted[opening.end() + len(body) :])
    if not BLANKS.startswith(rest) and rest.strip(b" \t\r\n"):
        return None
    body = _in_order(compact(body))
    lines = read_lines(body[:-1], _MIDDLE, _BETWEEN, vocabulary) if body.endswith(b"]}}") else None
    if lines is None or METADATA in vocabulary:
        return None
    forms = tuple(form for form in map(_form, lines.tails) if form is not None)
    if len(forms) < len(lines.tails):
        return None
    rows, stars = np.arange(len(lines.head)), lines.stars
    starts, stops = lines.numbers[rows, stars], lines.numbers[rows, stars + 1]
    numbers = lines.numbers[:, : int(stars.max())]
    names = Names(vocabulary, lines.head, np.where(np.arange(numbers.shape[1]) < stars[:, None], numbers, 0))
    return ShardColumns(file, names, forms, lines.tail, starts), starts, stops


def _without_metadata(text: bytearray) -> bytearray | None:
    """The header without the metadata, wherever they stand; None where they are not text by text."""
    found = _METADATA.search(text)
    if found is None:
        return text
    try:
        decode_metadata(found[1])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    before, behind = text[: found.start()], text[found.end() :]
    if found[2]:  # the comma behind them goes with them
        return before + behind
    return before.rstrip(b" \t\r\n").removesuffix(b",") + behind


def _in_order(body: bytes) -> bytes:
    """Entries with their keys in the usual order, as far as all have them in one order."""
    keys = _KEYS.search(body)
    order = keys.groups() if keys is not None else _ORDER
    if order == _ORDER or set(order) != set(_ORDER):
        return body
    entry = ",".join(rf'"{key.decode()}":(?P<{key.decode()}>{_VALUES[key]})' for key in order)
    return re.sub(rf'":\{{{entry}\}}'.encode(), _USUAL, body)


@lru_cache(maxsize=1 << 14)
def _form(text: str) -> Form | None:
    match = _FORM.fullmatch(text)
    if match is None:
        return None
    dtype, shape = match[1], tuple(map(int, match[2].split(","))) if match[2] else ()
    try:
        nbytes = kind_bytes(dtype, shape)
    except (KeyError, ValueError):
        return Form(dtype, shape, NONE)
    return Form(dtype, shape, nbytes) if nbytes < 1 << 62 else None


def _is_whole(starts: Ints, stops: Ints, payload_bytes: int) -> bool:
    """Whether the data is contiguous from first to last."""
    return bool(starts[0] == 0 and stops[-1] == payload_bytes and np.array_equal(starts[1:], stops[:-1]))
