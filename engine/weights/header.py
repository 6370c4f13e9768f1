"""A bounded parser of safetensors headers: eight bytes of length, then JSON. No tensor library, no torch.

Source of the format: https://github.com/huggingface/safetensors (README, "Format").
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, fatal, warning

LIBRARY_CAP_BYTES = 100_000_000  # what the safetensors library accepts; larger headers are ours alone to read
HEADER_LIMIT_BYTES = 1 << 30

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
    "C64": 64,
}  # fmt: skip

_MAGIC = {
    b"PK\x03\x04": "a zip archive (a torch checkpoint?)",
    b"\x80\x02": "a Python pickle",
    b"\x80\x04": "a Python pickle",
    b"GGUF": "a GGUF file",
    b"\x89HDF": "an HDF5 file",
    b"version https": "a Git LFS pointer: the weights themselves were not fetched",
    b"<!DO": "a web page: a download that went wrong",
    b"<htm": "a web page: a download that went wrong",
}


class TensorInfo(msgspec.Struct, frozen=True, gc=False):
    """Where a tensor lies: `offset_bytes` counts from the start of `file`, row-major, little-endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset_bytes: int
    nbytes: int


class _Entry(msgspec.Struct, gc=False):
    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] | None = None


_decode = msgspec.json.Decoder(dict[str, _Entry]).decode


class Header(msgspec.Struct, frozen=True):
    """One shard's tensors in file order, its size in bytes, and what is wrong with it."""

    file: str
    file_bytes: int
    tensors: tuple[TensorInfo, ...]
    findings: tuple[Finding, ...]


def dtype_bytes(dtype: str, elements: int) -> int:
    """Bytes of `elements` elements, packed sub-byte dtypes included."""
    return -(-elements * DTYPE_BITS[dtype] // 8)


def read_header(path: Path) -> Header:
    """The header of one file, checked against the file's size; a file that is no safetensors file is refused.

    Reads the length and the header only. Memory is bounded by what the file really holds, whatever it claims.
    """
    file = path.name
    size = path.stat().st_size
    with path.open("rb") as stream:
        start = stream.read(16)
        length = int.from_bytes(start[:8], "little") if len(start) >= 8 else 0
        _refuse_other_formats(file, start, size)
        if length > HEADER_LIMIT_BYTES:
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
        if 8 + length > size:
            raise Refused(_truncated(file, 8 + length, size, ()))
        stream.seek(8)
        raw = stream.read(length)
    return _check(file, size, length, _parse(file, raw))


def _refuse_other_formats(file: str, start: bytes, size: int) -> None:
    for magic, what in _MAGIC.items():
        if start.startswith(magic):
            raise Refused(_foreign(file, f"starts with {magic[:4]!r}: {what}"))
    if size < 10:
        if len(start) == 9 and start[8:9] == b"{":
            return  # a header that was cut off: the length decides what to say
        raise Refused(_foreign(file, f"{size} bytes in all"))
    if start[8:9] != b"{":
        raise Refused(_foreign(file, f"byte 9 is {start[8:9]!r}"))


def _foreign(file: str, found: str) -> Finding:
    return fatal(
        "not-safetensors",
        f"{file} is not a safetensors file: {found}",
        file=file,
        expected="8 bytes of header length, then '{'",
        found=found,
        next="fetch the safetensors file of the release; other formats are not read",
    )


def _truncated(file: str, expected: int, size: int, tensors: tuple[str, ...]) -> Finding:
    return fatal(
        "truncated-shard",
        f"{file} lacks its last {expected - size:,} bytes",
        file=file,
        tensors=tensors,
        expected=f"{expected:,} bytes",
        found=f"{size:,} bytes",
        next=f"fetch bytes {size}-{expected - 1} of {file} again",
    )


def _parse(file: str, raw: bytes) -> dict[str, _Entry]:
    try:
        return _decode(raw)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise Refused(
            fatal(
                "header-invalid",
                f"the header of {file} is not valid: {error}",
                file=file,
                expected="JSON of tensor name -> dtype, shape, data_offsets",
                found=repr(raw[:60]),
                next="fetch the file again",
            )
        ) from error


def _check(file: str, size: int, length: int, entries: dict[str, _Entry]) -> Header:
    base = 8 + length
    tensors: list[TensorInfo] = []
    findings: list[Finding] = []
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        problem = _entry_problem(entry)
        if problem or entry.data_offsets is None:
            findings.append(_invalid(file, (name,), problem or "data_offsets are missing"))
            continue
        begin, end = entry.data_offsets
        tensors.append(TensorInfo(name, entry.dtype, entry.shape, file, base + begin, end - begin))
    tensors.sort(key=lambda tensor: tensor.offset_bytes)
    end = base
    for tensor in tensors:
        if tensor.offset_bytes != end:
            kind = "overlaps the one before" if tensor.offset_bytes < end else "leaves a gap before it"
            findings.append(_invalid(file, (tensor.name,), f"{tensor.name} {kind}"))
        end = max(end, tensor.offset_bytes + tensor.nbytes)
    if end > size:
        cut = tuple(tensor.name for tensor in tensors if tensor.offset_bytes + tensor.nbytes > size)
        findings.append(_truncated(file, end, size, cut))
    elif end < size:
        findings.append(
            fatal(
                "trailing-bytes",
                f"{file} holds {size - end:,} bytes that no tensor claims",
                file=file,
                expected=f"{end:,} bytes",
                found=f"{size:,} bytes",
                next="fetch the file again: header and contents do not belong together",
            )
        )
    if length > LIBRARY_CAP_BYTES:
        findings.append(
            warning(
                "header-too-large",
                f"the header of {file} is {length / 2**20:.0f} MiB with {len(tensors):,} tensors: "
                "over the 100 MB cap of the safetensors library, read here all the same",
                file=file,
                expected=f"at most {LIBRARY_CAP_BYTES:,} bytes",
                found=f"{length:,} bytes",
                next="other tools will refuse this file; split it into more shards",
            )
        )
    return Header(file, size, tuple(tensors), tuple(findings))


def _entry_problem(entry: _Entry) -> str | None:
    if entry.data_offsets is None:
        return "data_offsets are missing"
    if entry.dtype not in DTYPE_BITS:
        return f"dtype {entry.dtype!r} is unknown"
    if any(size < 0 for size in entry.shape):
        return f"shape {entry.shape} has a negative size"
    begin, end = entry.data_offsets
    needed = dtype_bytes(entry.dtype, math.prod(entry.shape))
    if begin < 0 or end - begin != needed:
        return f"data_offsets span {end - begin:,} bytes, shape and dtype need {needed:,}"
    return None


def _invalid(file: str, tensors: tuple[str, ...], problem: str) -> Finding:
    return fatal(
        "header-invalid",
        f"the header of {file} is inconsistent: {problem}",
        file=file,
        tensors=tensors,
        expected="tensors back to back, each as long as its shape and dtype say",
        found=problem,
        next="fetch the file again, or report it to whoever wrote it",
    )
