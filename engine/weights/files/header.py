"""A bounded parser of safetensors headers: eight bytes of length, then JSON. No tensor library, no torch.

Source of the format: https://github.com/huggingface/safetensors (README, "Format").
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from operator import attrgetter, itemgetter, sub
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, fatal, named, several, warning
from firstlight.engine.weights.files.json_text import ENDLESS, is_endless
from firstlight.engine.weights.files.other_formats import open_regular, refuse_other_formats, unreadable
from firstlight.engine.weights.sources.base import AnyPath

LIBRARY_CAP_BYTES = 100_000_000  # what the safetensors library accepts; larger headers are ours alone to read
DENSE_FROM_BYTES = 64 << 20  # shorter headers may be as dense as they like
LEAST_ENTRY_BYTES, LEAST_NUMBER_BYTES = 40, 5  # no entry takes fewer, and few of its bytes are commas
STEP_BYTES = 4 << 20  # a header is read in steps, so that a sparse file costs no more memory than it holds
BLANKS = b" " * STEP_BYTES
MAX_DIMS = 64
METADATA = "__metadata__"

TWICE = ("a key that occurs twice", "every key once", "two values for one key")
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


class TensorInfo(msgspec.Struct, frozen=True, gc=False):
    """Where a tensor lies: `offset_bytes` counts from the start of `file`, row-major, little-endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset_bytes: int
    nbytes: int


_Size = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct, gc=False):
    dtype: str | None = None
    shape: tuple[_Size, ...] | None = None
    data_offsets: tuple[_Size, _Size] | None = None


class _Metadata(msgspec.Struct):
    metadata: Any = msgspec.field(default=None, name=METADATA)


_Entries = dict[str, _Entry]
_decode_metadata = msgspec.json.Decoder(_Metadata).decode
decode_metadata = msgspec.json.Decoder(dict[str, str]).decode
_decode = msgspec.json.Decoder(dict[str, _Entry]).decode


class Header(msgspec.Struct, frozen=True):
    """One shard's tensors in file order, its size in bytes, and findings about it."""

    file: str
    file_bytes: int
    tensors: tuple[TensorInfo, ...]
    findings: tuple[Finding, ...]


def dtype_bytes(dtype: str, elements: int) -> int:
    """Bytes of `elements` elements, packed sub-byte dtypes included."""
    return -(-elements * DTYPE_BITS[dtype] // 8)


def read_header(path: AnyPath) -> Header:
    """The header of one file, checked against the file's size; other kinds of files are refused.

    Reads the length and the header only. Memory is bounded by what the file really holds, whatever it claims.
    """
    return header_of(read_text(path))


class HeaderText(NamedTuple):
    """The text of a header, its stated length, and the size of its file."""

    file: str
    file_bytes: int
    length_bytes: int
    text: bytearray


def read_text(path: AnyPath) -> HeaderText:
    """The text of a header. Raises `Refused` for a file that can hold none."""
    file = path.name
    try:
        with open_regular(path) as stream:
            size = path.stat().st_size
            start = stream.read(16)
            length = int.from_bytes(start[:8], "little")
            refuse_other_formats(file, start, size, length)
            if 8 + length > size:
                raise Refused(_cut_in_header(file, 8 + length, size))
            stream.seek(8)
            return HeaderText(file, size, length, _read_text(file, stream, length))
    except OSError as error:
        raise Refused(unreadable(path, error)) from error


def refuse_dense(file: str, text: bytearray) -> None:
    """Refuses text that would take many times its own length in memory when parsed."""
    if len(text) < DENSE_FROM_BYTES:
        return
    entries, numbers = text.count(b"{"), text.count(b",")
    if entries * LEAST_ENTRY_BYTES > len(text) or numbers * LEAST_NUMBER_BYTES > len(text):
        raise Refused(
            fatal(
                "header-invalid",
                f"the header of {file} is no list of tensors: {entries:,} objects and {numbers:,} commas in "
                f"{len(text):,} bytes",
                file=file,
                expected=f"at least {LEAST_ENTRY_BYTES} bytes a tensor",
                found=f"{len(text) // max(entries, 1)} bytes an object",
                next="do not use this file before you know where it comes from",
            )
        )


def header_bytes(paths: Iterable[AnyPath]) -> int:
    """Total header length that local files state; remote files are not asked."""
    total = 0
    for path in paths:
        with contextlib.suppress(OSError, Refused):
            if isinstance(path, Path):
                with open_regular(path) as stream:
                    total += min(int.from_bytes(stream.read(8), "little"), path.stat().st_size)
    return total


def header_of(written: HeaderText) -> Header:
    """Parses a header and checks it against the size of its file; the text is released. Raises `Refused`."""
    file, size, length, text = written
    refuse_dense(file, text)
    entries, findings = _parse(file, text)
    entries.pop(METADATA, None)
    beside = list(_metadata_problems(file, text))
    text.clear()  # of a million tensors it is much
    tensors = _sound(file, size, 8 + length, entries) if not findings else None
    if tensors is None:
        tensors, findings = _check(file, size, length, entries, findings)
    findings.extend(beside)
    if length > LIBRARY_CAP_BYTES:
        findings.append(over_the_cap(file, length, len(tensors)))
    return Header(file, size, tensors, tuple(findings))


_dtype_and_shape, _offsets = attrgetter("dtype", "shape"), attrgetter("data_offsets")


def _sound(file: str, size: int, base: int, entries: _Entries) -> tuple[TensorInfo, ...] | None:
    """The tensors of a valid header whose entries are in the order of their data; else None.

    The same checks as `_check`, vectorised, since nearly all headers are valid.
    """
    kinds = list(map(_dtype_and_shape, entries.values()))
    try:
        forms = {kind: (*kind, kind_bytes(*kind)) for kind in set(kinds)}
    except (KeyError, TypeError, ValueError):  # an unknown dtype, no shape, a shape of no whole bytes
        return None
    offsets = list(map(_offsets, entries.values()))
    if None in offsets:
        return None
    starts, stops = list(map(itemgetter(0), offsets)), list(map(itemgetter(1), offsets))
    rows = list(map(forms.__getitem__, kinds))
    sizes = list(map(itemgetter(2), rows))
    if [0, *stops] != [*starts, size - base] or list(map(sub, stops, starts)) != sizes:
        return None
    places = map(base.__add__, starts)
    columns = (map(itemgetter(0), rows), map(itemgetter(1), rows), repeat(file), places, sizes)
    return tuple(map(TensorInfo, entries, *columns))


def kind_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor. Raises KeyError, TypeError or ValueError for an impossible one."""
    if len(shape) > MAX_DIMS:
        raise ValueError(shape)
    nbytes, over = divmod(math.prod(shape) * DTYPE_BITS[dtype], 8)
    if over:
        raise ValueError(dtype, shape)
    return nbytes


def truncated(file: str, expected: int, size: int, tensors: Sequence[str]) -> Finding:
    """The finding for a file that ends before its tensors do, which are to end at `expected`."""
    return fatal(
        "truncated-shard",
        f"{file} lacks its last {several(expected - size, 'byte', 'bytes')} (Range: bytes={size}-{expected - 1})",
        file=file,
        **named(tensors),
        expected=f"{expected:,} bytes",
        found=f"{size:,} bytes",
        next=f"fetch bytes {size}-{expected - 1} of {file} again",
    )


def _cut_in_header(file: str, header_end: int, size: int) -> Finding:
    """The finding for a file that ends within its header, so that its full length is unknown."""
    return fatal(
        "truncated-shard",
        f"{file} breaks off within its header: all of its tensors are missing",
        file=file,
        expected=f"{header_end:,} bytes of header, then the tensors",
        found=f"{size:,} bytes",
        next=f"fetch {file} again, from byte {size} to its end",
    )


def _read_text(file: str, stream: BinaryIO, length: int) -> bytearray:
    """The JSON text without trailing padding.

    A zero byte, as in a hole of a sparse file, ends the reading since no JSON text has one.
    """
    text, blanks = bytearray(), 0
    while (done := len(text) + blanks) < length:
        part = stream.read(min(STEP_BYTES, length - done))
        if part and BLANKS.startswith(part):
            blanks += len(part)
            continue
        zero = part.find(0)
        if zero >= 0 or not part:
            where = 8 + done + max(zero, 0)
            what = "a zero byte" if part else "the end of the file"
            raise Refused(
                fatal(
                    "header-invalid",
                    f"the header of {file} is not text: {what} at byte {where:,}",
                    file=file,
                    expected=f"{length:,} bytes of JSON",
                    found=f"{what} at byte {where:,}",
                    next="fetch the file again: a download that reserved the file first was not finished",
                )
            )
        text += b" " * blanks + part
        blanks = 0
    return text


def _parse(file: str, text: bytearray) -> tuple[_Entries, list[Finding]]:
    """Entries by name. The fast parser keeps the last of duplicate keys, so these are parsed closely."""
    try:
        entries = _decode(text)
        named = len(entries) - (METADATA in entries)
        if all(text.count(f'"{key}"'.encode()) == named for key in _Entry.__struct_fields__) and b"\\" not in text:
            return entries, []
        return _parse_closely(file, text)
    except msgspec.ValidationError:
        return _parse_closely(file, text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(_not_json(file, text, str(error))) from error
    except RecursionError as error:
        raise Refused(_not_json(file, text, "values nested too deeply")) from error


def _not_json(file: str, text: bytearray, problem: str) -> Finding:
    return fatal(
        "header-invalid",
        f"the header of {file} is not valid: {_of_json(text, problem)}",
        file=file,
        expected="JSON of tensor name -> dtype, shape, data_offsets",
        found=repr(bytes(text[:60])),
        next="fetch the file again",
    )


def _of_json(text: bytearray, problem: str) -> str:
    if "truncated" in problem:
        return f"{several(len(text), 'byte is', 'bytes are')} no whole JSON text"
    return problem.removeprefix("JSON is malformed: ")


def _parse_closely(file: str, text: bytearray) -> tuple[_Entries, list[Finding]]:
    """The same, slowly: names invalid entries and duplicate keys."""
    twice: dict[str, None] = {}

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            counts = Counter(key for key, _ in items)
            twice.update((_readable(key), None) for key, count in counts.items() if count > 1)
        return found

    try:
        raw = json.loads(text.decode(), object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        problem = "values nested too deeply" if isinstance(error, RecursionError) else str(error)
        problem = ENDLESS if is_endless(problem) else problem
        raise Refused(_not_json(file, text, problem)) from error
    if not isinstance(raw, dict):
        raise Refused(_not_json(file, text, f"it is {type(raw).__name__}, not an object"))
    groups: dict[str, list[str]] = {}
    entries: dict[str, _Entry] = {}
    for name, value in raw.items():
        if _readable(name) != name:
            groups.setdefault("a name that is no text", []).append(_readable(name))
            continue
        try:
            entries[name] = _Entry() if name == METADATA else msgspec.convert(value, _Entry)
        except msgspec.ValidationError as error:
            groups.setdefault(_readable(str(error)), []).append(name)
        except UnicodeEncodeError:
            groups.setdefault("a key that is no text", []).append(name)
    findings = [
        invalid(file, names, problem, "dtype text, shape and data_offsets sizes", problem)
        for problem, names in groups.items()
    ]
    if twice:
        findings.append(invalid(file, list(twice), *TWICE))
    return entries, findings


def _readable(name: str) -> str:
    """The name with lone surrogates escaped."""
    return name.encode(errors="backslashreplace").decode()


def _check(
    file: str, size: int, length: int, entries: _Entries, findings: list[Finding]
) -> tuple[tuple[TensorInfo, ...], list[Finding]]:
    """The valid tensors, checked one by one, and findings about the others and about the layout."""
    base = 8 + length
    tensors: list[TensorInfo] = []
    wrong: dict[str, list[tuple[str, str, str]]] = {}
    for name, entry in entries.items():
        bits, shape, offsets = DTYPE_BITS.get(entry.dtype or ""), entry.shape, entry.data_offsets
        if (
            bits is None
            or shape is None
            or offsets is None
            or len(shape) > MAX_DIMS
            or (offsets[1] - offsets[0]) * 8 != math.prod(shape) * bits
        ):
            kind, expected, found = _entry_problem(entry)
            wrong.setdefault(kind, []).append((name, expected, found))
            continue
        tensors.append(TensorInfo(name, entry.dtype or "", shape, file, base + offsets[0], offsets[1] - offsets[0]))
    if not wrong and not findings:
        wrong.update(_layout(base, tensors))
    end = max((tensor.offset_bytes + tensor.nbytes for tensor in tensors), default=base)
    for kind, cases in wrong.items():
        _, expected, found = cases[0]
        findings.append(invalid(file, [name for name, _, _ in cases], kind, expected, found))
    findings.extend(_size_problems(file, size, end, tensors, whole=not findings))
    return tuple(tensors), findings


def _layout(base: int, tensors: list[TensorInfo]) -> Mapping[str, list[tuple[str, str, str]]]:
    """Sorts tensors by offset and finds gaps and overlaps."""
    tensors.sort(key=lambda tensor: (tensor.offset_bytes, tensor.nbytes))
    wrong: dict[str, list[tuple[str, str, str]]] = {}
    end = base
    for tensor in tensors:
        if tensor.offset_bytes != end:
            kind = "overlaps the tensor before it" if tensor.offset_bytes < end else "leaves a gap before it"
            case = (tensor.name, f"data from byte {end - base:,}", f"data from byte {tensor.offset_bytes - base:,}")
            wrong.setdefault(kind, []).append(case)
        end = max(end, tensor.offset_bytes + tensor.nbytes)
    return wrong


def _size_problems(file: str, size: int, end: int, tensors: list[TensorInfo], whole: bool) -> Iterator[Finding]:
    if end > size:
        cut = tuple(tensor.name for tensor in tensors if tensor.offset_bytes + tensor.nbytes > size)
        yield truncated(file, end, size, cut)
    elif end < size and whole:
        yield trailing(file, end, size)


def trailing(file: str, end: int, size: int) -> Finding:
    """The finding for trailing bytes after the last tensor."""
    return fatal(
        "trailing-bytes",
        f"{file} holds {several(size - end, 'byte', 'bytes')} that no tensor claims",
        file=file,
        expected=f"{end:,} bytes",
        found=f"{size:,} bytes",
        next="fetch the file again: header and contents do not belong together",
    )


def _metadata_problems(file: str, text: bytearray) -> Iterator[Finding]:
    """`__metadata__` maps text to text; readers other than this one refuse the file where it does not."""
    opening = b'{"__metadata__":'
    if b'"__metadata__"' not in text:
        return
    try:
        if text.startswith(opening):  # as every writer has it: there is no need to read on
            decode_metadata(text[len(opening) : text.find(b"}") + 1])
            return
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    try:
        found = _decode_metadata(text).metadata
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # names that no text can be; said elsewhere
        return
    wrong = {} if isinstance(found, dict) else {METADATA: found}
    if not wrong:
        wrong = {key: value for key, value in found.items() if not isinstance(value, str)}
    if found is not None and wrong:
        key, value = next(iter(wrong.items()))
        yield warning(
            "header-invalid",
            f"the {METADATA} of {file} is not text by text: {_readable(key)[:60]} is {type(value).__name__}",
            file=file,
            expected="an object of texts",
            found=f"{_readable(key)[:60]}: {json.dumps(value)[:60]}",
            next="nothing for this project, which does not use it; other tools will refuse the file",
        )


def over_the_cap(file: str, length: int, count: int) -> Finding:
    """The finding for a header that the library would not read."""
    return warning(
        "header-too-large",
        f"the header of {file} is {length / 2**20:.0f} MiB with {several(count, 'tensor', 'tensors')}: "
        "over the 100 MB cap of the safetensors library, read here all the same",
        file=file,
        expected=f"at most {LIBRARY_CAP_BYTES:,} bytes",
        found=f"{length:,} bytes",
        next="other tools will refuse this file; split it into more shards",
    )


def _entry_problem(entry: _Entry) -> tuple[str, str, str]:
    """The kind of problem of an entry, what was expected and what was found."""
    absent = [key for key in _Entry.__struct_fields__ if getattr(entry, key) is None]
    if entry.dtype is None or entry.shape is None or entry.data_offsets is None:
        return f"an entry without {' and '.join(absent)}", "dtype, shape and data_offsets", f"no {', '.join(absent)}"
    return entry_problem(entry.dtype, entry.shape, entry.data_offsets)


def entry_problem(dtype: str, shape: tuple[int, ...], offsets: tuple[int, int]) -> tuple[str, str, str]:
    """The same for an entry with all its keys."""
    if dtype not in DTYPE_BITS:
        return "an unknown dtype", "one of " + ", ".join(DTYPE_BITS), _readable(dtype[:40])
    if len(shape) > MAX_DIMS:
        return "a shape of too many dims", f"at most {MAX_DIMS} dims", f"{len(shape):,} dims"
    begin, end = offsets
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    form = f"{dtype} {list(shape)}"[:120]
    if bits % 8:
        return "a packed tensor that ends inside a byte", "a whole number of bytes", f"{form}: {bits % 8} bits over"
    return "a length that is not its shape's", f"{_amount(bits // 8)} for {form}", f"{_amount(end - begin)}"


def _amount(nbytes: int) -> str:
    return several(nbytes, "byte", "bytes") if abs(nbytes) < 1 << 80 else "more than 2^80 bytes"


def invalid(file: str, names: Sequence[str], problem: str, expected: str, found: str) -> Finding:
    """The finding for entries of a header that all have one problem."""
    more = f", and {several(len(names) - 1, 'tensor', 'tensors')} more" if len(names) > 1 else ""
    return fatal(
        "header-invalid",
        f"the header of {file} is inconsistent: {names[0]!r}{more}: {problem}",
        file=file,
        **named(names),
        expected=expected,
        found=found,
        next="fetch the file again, or report it to whoever wrote it",
    )
