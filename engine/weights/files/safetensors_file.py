"""Reads and writes small safetensors files without torch: atomic writes, byte for byte like the safetensors library.

For inputs, golden files and reports. Checkpoints are read by `checkpoint.py`, which has bounds for much larger headers.

numpy has no bfloat16 and no 8-bit floats: such tensors travel as `Tagged`, the bits as unsigned integers with the name
of the dtype.
Source: the format as described in huggingface/safetensors, README.md.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal

HEADER_LIMIT_BYTES = 100_000_000
METADATA = "__metadata__"

# The formats numpy holds as they are.
NUMPY_OF_TAG = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "I16": "<i2", "U16": "<u2", "F16": "<f2", "I32": "<i4", "U32": "<u4",
    "F32": "<f4", "C64": "<c8", "F64": "<f8", "I64": "<i8", "U64": "<u8",
}  # fmt: skip
TAG_OF_NUMPY = {np.dtype(form): tag for tag, form in NUMPY_OF_TAG.items()}
# The formats that travel as bits.
BITS_OF_TAG = {"BF16": "<u2", "F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E8M0": "u1"}
# The library's order of dtypes in a file: the widest first, so that every tensor is aligned.
_RANK = {
    tag: rank
    for rank, tag in enumerate(
        (
            "BOOL",
            "U8",
            "I8",
            "F8_E5M2",
            "F8_E4M3",
            "F8_E8M0",
            "I16",
            "U16",
            "F16",
            "BF16",
            "I32",
            "U32",
            "F32",
            "C64",
            "F64",
            "I64",
            "U64",
        )
    )
}


class Tagged(msgspec.Struct, frozen=True, eq=False):
    """A tensor of a dtype numpy lacks: `tag` as in safetensors (BF16, F8_E4M3, ...), `bits` as unsigned integers."""

    tag: str
    bits: NDArray[np.unsignedinteger[Any]]

    def float32(self) -> NDArray[np.float32]:
        """The values of a BF16 tensor, exactly."""
        assert self.tag == "BF16", f"{self.tag} has no conversion here"
        return (self.bits.astype(np.uint32) << 16).view(np.float32)


Tensor = NDArray[np.generic] | Tagged


def bfloat16(values: NDArray[np.floating[Any]]) -> Tagged:
    """Values rounded to bfloat16, to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40
    return Tagged("BF16", np.where(np.isnan(values), quiet, rounded).astype(np.uint16))


def write(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors to a file that is there whole or not at all; an existing file is replaced.

    The header is padded to 8 bytes and tensors come widest dtype first, then by name, so every tensor is aligned.
    Raises `TypeError` for a dtype the format does not have, `OSError` as the system does.
    """
    entries = {name: _entry(name, tensor) for name, tensor in tensors.items()}
    order = sorted(entries, key=lambda name: (-_RANK[entries[name][0]], name))
    header: dict[str, Any] = {METADATA: dict(sorted(metadata.items()))} if metadata else {}
    offset = 0
    for name in order:
        tag, array = entries[name]
        header[name] = {"dtype": tag, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    _replace(Path(path), [len(text).to_bytes(8, "little"), text, *(entries[name][1].data for name in order)])


def _entry(name: str, tensor: Tensor) -> tuple[str, NDArray[np.generic]]:
    if isinstance(tensor, Tagged):
        form = np.dtype(BITS_OF_TAG[tensor.tag])
        if tensor.bits.dtype != form:
            raise TypeError(f"{name}: {tensor.tag} needs bits of dtype {form}, not {tensor.bits.dtype}")
        return tensor.tag, _contiguous(tensor.bits)
    if name == METADATA:
        raise TypeError(f"{METADATA} is not a name a tensor can have")
    little = np.asarray(tensor)
    little = little.astype(little.dtype.newbyteorder("<"), copy=False)
    if little.dtype not in TAG_OF_NUMPY:
        raise TypeError(f"{name}: safetensors has no dtype {little.dtype}")
    return TAG_OF_NUMPY[little.dtype], _contiguous(little)


def _contiguous(array: NDArray[np.generic]) -> NDArray[np.generic]:
    return np.ascontiguousarray(array).reshape(array.shape)


def _replace(path: Path, chunks: list[bytes | memoryview]) -> None:
    """Write beside the file, flush to the disk, and put it in place in one step; into a device or a pipe directly."""
    if path.exists() and not path.is_file() and not path.is_dir():
        with path.open("wb") as device:
            device.writelines(chunks)
        return
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a file, by name in the file's order, as copies; see `read_metadata` for the rest.

    Raises `Refused`: not-found, not-safetensors, header-too-large, header-invalid, truncated-shard, trailing-bytes,
    unsupported-format.
    """
    header, body = _parts(Path(path))
    tensors: dict[str, Tensor] = {}
    end = 0
    for name, info in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = info["data_offsets"]
        if start != end:
            _refuse(path, "header-invalid", "bytes between or shared by tensors", name, f"offset {end}", f"{start}")
        tensors[name] = _tensor(path, name, info["dtype"], tuple(info["shape"]), body[start:stop])
        end = stop
    if end != len(body):
        code = "truncated-shard" if end > len(body) else "trailing-bytes"
        _refuse(path, code, "the file's length is not its tensors'", None, f"{end} bytes", f"{len(body)} bytes")
    return {name: tensors[name] for name in header}


def read_metadata(path: str | Path) -> dict[str, str]:
    """The `__metadata__` of a file; empty where it has none."""
    with Path(path).open("rb") as file:
        return dict(_header(Path(path), file.read(8), file.read).get(METADATA, {}))


def _parts(path: Path) -> tuple[dict[str, Any], memoryview]:
    try:
        with path.open("rb") as file:
            header = _header(path, file.read(8), file.read)
            header.pop(METADATA, None)
            return header, memoryview(file.read())
    except FileNotFoundError:
        raise Refused(fatal("not-found", f"there is no file {path}", file=str(path), next="check the path")) from None


def _header(path: Path, length: bytes, read_bytes: Any) -> dict[str, Any]:
    size = int.from_bytes(length, "little")
    if len(length) < 8:
        _refuse(path, "not-safetensors", "too short to have a header", None, "8 bytes or more", f"{len(length)} bytes")
    if size > HEADER_LIMIT_BYTES:
        _refuse(
            path,
            "header-too-large",
            "the header is too long, or this is no safetensors file",
            None,
            f"at most {HEADER_LIMIT_BYTES:,} bytes",
            f"{size:,} bytes, of a file that starts with {length!r}",
        )
    text = read_bytes(size)
    try:
        header = msgspec.json.decode(text, type=dict[str, dict[str, Any]])
    except msgspec.DecodeError as error:
        _refuse(path, "not-safetensors", f"the header is not JSON: {error}", None, "a JSON object", repr(text[:16]))
    for name, info in header.items():
        if name == METADATA:
            continue
        offsets, shape = info.get("data_offsets"), info.get("shape")
        if not _are_sizes(offsets, 2) or not _are_sizes(shape) or not isinstance(info.get("dtype"), str):
            _refuse(path, "header-invalid", "an entry of the header", name, "dtype, shape, data_offsets", str(info))
    return header


def _are_sizes(value: Any, count: int | None = None) -> bool:
    return (
        isinstance(value, list)
        and (count is None or len(value) == count)
        and all(isinstance(number, int) and number >= 0 for number in value)
    )


def _tensor(path: str | Path, name: str, tag: str, shape: tuple[int, ...], data: memoryview) -> Tensor:
    form = NUMPY_OF_TAG.get(tag) or BITS_OF_TAG.get(tag)
    if form is None:
        _refuse(path, "unsupported-format", f"dtype {tag}", name, ", ".join([*NUMPY_OF_TAG, *BITS_OF_TAG]), tag)
    expected = int(np.prod(shape, dtype=np.int64)) * np.dtype(form).itemsize
    if expected != len(data):
        _refuse(path, "truncated-shard", f"{tag} {list(shape)}", name, f"{expected} bytes", f"{len(data)} bytes")
    array = np.frombuffer(data, dtype=form).reshape(shape).copy()
    return array if tag in NUMPY_OF_TAG else Tagged(tag, array)


def _refuse(path: str | Path, code: str, message: str, name: str | None, expected: str, found: str) -> NoReturn:
    tensors = (name,) if name is not None else ()
    raise Refused(
        fatal(
            code,
            message,
            file=str(path),
            tensors=tensors,
            expected=expected,
            found=found,
            next="write the file again, or name another",
        )
    )
