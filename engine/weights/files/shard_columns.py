"""A shard's header as columns, in a fraction of the time that objects take: what `header.py` gives for usual ones.

Source of the format: https://github.com/huggingface/safetensors (README, "Format"). No torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from firstlight.engine.findings import Finding
from firstlight.engine.weights.files.header import (
    LIBRARY_CAP_BYTES,
    METADATA,
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
from firstlight.engine.weights.files.lines import Ints, Lines, read_lines
from firstlight.engine.weights.names.columns import Names, keys, radixes, repeated
from firstlight.engine.weights.sources.base import AnyPath

NAME = r'([^"\\{}\[\],:\x00-\x1f]*)'
_NUMBER = r"(?:0|[1-9]\d{0,17})"
_ENTRY = re.compile(
    rf'{NAME}": ?\{{"dtype": ?"(\w+)", ?"shape": ?\[({_NUMBER}(?:, ?{_NUMBER})*)?\], ?"data_offsets": ?\[\*, ?\*\]',
    re.ASCII,
)
NONE = -(1 << 62)  # bytes of what can be no tensor
_OPENING = b'{"__metadata__":'
_BETWEEN = (b'},"', b'}, "')  # entries, as most writers have it


class Form(NamedTuple):
    """What tensors of one pattern of names, dtype and shape share."""

    pattern: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class ShardColumns(NamedTuple):
    """One shard's tensors: form, numbers of the name, where the data begins in the file; and what is wrong with it."""

    file: str
    forms: tuple[Form, ...]
    ids: Ints
    numbers: Ints
    offsets: Ints
    findings: tuple[Finding, ...] = ()

    def names(self, rows: Ints) -> Sequence[str]:
        """The names of rows, in their order where they are few."""
        patterns = {form.pattern: number for number, form in enumerate(self.forms)}
        kinds = np.array([patterns[form.pattern] for form in self.forms])[self.ids]
        return Names([form.pattern for form in self.forms], kinds, self.numbers).listed(rows)


def read_shard(path: AnyPath) -> ShardColumns | Header:
    """The tensors of one file as columns, or, where anything is unusual, as the plain parser has them.

    Raises `Refused` for a file that is no safetensors file.
    """
    written = read_text(path)
    found = columns_of(written)
    return header_of(written) if found is None else found


def columns_of(written: HeaderText) -> ShardColumns | None:
    """The columns of a header that is written as most are, checked as the plain parser does; else None."""
    file, size, length, text = written
    refuse_dense(file, text)
    read = _entries(text)
    if read is None:
        return None
    forms, lines = read
    (starts, stops), numbers = _offsets(forms, lines)
    nbytes = np.array([form.nbytes for form in forms])[lines.ids]
    order: slice | Ints = slice(None)
    is_wrong = stops - starts != nbytes
    if not is_wrong.any() and not _is_whole(starts, stops, size - 8 - length):
        order = np.lexsort((nbytes, starts))
        starts, stops = starts[order], stops[order]
    found = ShardColumns(file, forms, lines.ids[order], numbers[order], starts + (8 + length))
    if not _are_apart(found):
        return None
    if is_wrong.any():
        findings = list(_wrong_entries(found, starts, stops, is_wrong))
        found = _those(found, ~is_wrong)
        starts, stops = starts[~is_wrong], stops[~is_wrong]
    else:
        findings = list(_layout(found, starts, stops))
    findings.extend(_size_problems(found, stops, size - 8 - length, size, whole=not findings))
    if length > LIBRARY_CAP_BYTES:
        findings.append(over_the_cap(file, length, len(found.ids)))
    return found._replace(findings=tuple(findings))


def _those(found: ShardColumns, chosen: NDArray[np.bool_]) -> ShardColumns:
    columns = (found.ids[chosen], found.numbers[chosen], found.offsets[chosen])
    return ShardColumns(found.file, found.forms, *columns)


def _wrong_entries(found: ShardColumns, starts: Ints, stops: Ints, is_wrong: NDArray[np.bool_]) -> Iterator[Finding]:
    """Entries whose dtype, shape and place cannot be, one finding a kind of problem."""
    wrong: dict[str, tuple[str, str, list[Ints]]] = {}
    bad = np.flatnonzero(is_wrong)
    of_form = (bad[found.ids[bad] == form] for form in np.unique(found.ids[bad]))
    for rows in sorted(of_form, key=lambda rows: int(rows[0])):
        form, first = found.forms[found.ids[rows[0]]], rows[0]
        kind, expected, was = entry_problem(form.dtype, form.shape, (int(starts[first]), int(stops[first])))
        wrong.setdefault(kind, (expected, was, []))[2].append(rows)
    for kind, (expected, was, parts) in wrong.items():
        yield invalid(found.file, found.names(np.sort(np.concatenate(parts))), kind, expected, was)


def _layout(found: ShardColumns, starts: Ints, stops: Ints) -> Iterator[Finding]:
    """Tensors, sorted by place, that do not begin where the one before ends, one finding a kind of problem."""
    ends = np.concatenate(([0], np.maximum.accumulate(stops)[:-1]))
    parts = [("overlaps the tensor before it", starts < ends), ("leaves a gap before it", starts > ends)]
    wrong = [(np.flatnonzero(is_so), kind) for kind, is_so in parts if is_so.any()]
    for rows, kind in sorted(wrong, key=lambda item: int(item[0][0])):
        expected, was = (f"data from byte {int(where[rows[0]]):,}" for where in (ends, starts))
        yield invalid(found.file, found.names(rows), kind, expected, was)


def _size_problems(found: ShardColumns, stops: Ints, payload: int, size: int, whole: bool) -> Iterator[Finding]:
    end = int(stops.max(initial=0))
    if end > payload:
        yield truncated(found.file, size - payload + end, size, found.names(np.flatnonzero(stops > payload)))
    elif end < payload and whole:
        yield trailing(found.file, size - payload + end, size)


def columns_of_tensors(file: str, tensors: Sequence[TensorInfo]) -> ShardColumns | None:
    """Columns of tensors that the plain parser found; None where their names are unusual."""
    entries = {t.name: {"dtype": t.dtype, "shape": t.shape, "data_offsets": (0, 0)} for t in tensors}
    read = _entries(bytearray(msgspec.json.encode(entries))) if entries else None
    if read is None:
        return None
    forms, lines = read
    _, numbers = _offsets(forms, lines)
    return ShardColumns(file, forms, lines.ids, numbers, np.array([t.offset_bytes for t in tensors]))


def _entries(text: bytearray) -> tuple[tuple[Form, ...], Lines] | None:
    """Entries by form, if there are any and nothing about them is unusual; what they say is not checked yet."""
    text = text.rstrip(b" \t\r\n")
    between = next((between for between in _BETWEEN if between in text), _BETWEEN[0])
    start = 2
    if text.startswith(_OPENING):
        start = text.find(b"}") + 1
        try:
            decode_metadata(text[len(_OPENING) : start])
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        if not text.startswith(between[1:], start):
            return None
        start += len(between) - 1
    elif not text.startswith(b'{"'):
        return None
    lines = read_lines(text[start:-1], between) if text.endswith(b"]}}") else None
    if lines is None:
        return None
    found = tuple(map(_form, lines.forms))
    forms = tuple(form for form in found if form is not None)
    return (forms, lines) if len(forms) == len(found) else None


def _form(line: str) -> Form | None:
    match = _ENTRY.fullmatch(line)
    if match is None or match[1] == METADATA:
        return None
    pattern, dtype = match[1], match[2]
    shape = tuple(map(int, match[3].split(","))) if match[3] else ()
    try:
        nbytes = kind_bytes(dtype, shape)
    except (KeyError, ValueError):
        return Form(pattern, dtype, shape, NONE)
    return Form(pattern, dtype, shape, nbytes) if nbytes < 1 << 62 else None


def _offsets(forms: Sequence[Form], lines: Lines) -> tuple[tuple[Ints, Ints], Ints]:
    """Where the data of each tensor starts and stops, and the numbers of its name."""
    stars = np.array([form.pattern.count("*") for form in forms])[lines.ids]
    rows = np.arange(len(stars))
    starts, stops = lines.numbers[rows, stars], lines.numbers[rows, stars + 1]
    numbers = lines.numbers[:, : int(stars.max())]
    return (starts, stops), np.where(np.arange(numbers.shape[1]) < stars[:, None], numbers, 0)


def _is_whole(starts: Ints, stops: Ints, payload_bytes: int) -> bool:
    """Whether data follow each other without a gap from first to last."""
    return bool(starts[0] == 0 and stops[-1] == payload_bytes and np.array_equal(starts[1:], stops[:-1]))


def _are_apart(found: ShardColumns) -> bool:
    """Whether no name occurs twice."""
    patterns = {form.pattern: number for number, form in enumerate(found.forms)}
    kinds = np.array([patterns[form.pattern] for form in found.forms])[found.ids]
    radix = radixes(found.numbers)
    return radix is not None and not len(repeated(keys(kinds, found.numbers, radix)))
