"""Every byte of a checkpoint read once: a hash of each tensor, and how many NaN and infinite values it holds."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
from numpy.typing import NDArray

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, fatal
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.header import TensorInfo
from firstlight.workbench.progress import Progress

CHUNK_BYTES = 8 << 20  # a multiple of every element size

# dtype -> view, bits of the exponent, bits of the fraction: an exponent of ones is infinity or, with a fraction, NaN.
_BITS: dict[str, tuple[str, int, int]] = {
    "F64": ("<u8", 0x7FF << 52, (1 << 52) - 1),
    "F32": ("<u4", 0xFF << 23, (1 << 23) - 1),
    "F16": ("<u2", 0x1F << 10, (1 << 10) - 1),
    "BF16": ("<u2", 0xFF << 7, (1 << 7) - 1),
    "F8_E5M2": ("u1", 0x1F << 2, 0x3),
}


class TensorReading(msgspec.Struct, frozen=True):
    """What a tensor's bytes are; counts are 0 for dtypes that have no NaN or infinity."""

    tensor: str
    sha256: str
    nan: int
    infinite: int


def read_all(checkpoint: Checkpoint, progress: Progress, threads: int = 4) -> tuple[list[TensorReading], float]:
    """Reads every tensor whose bytes are there, several at once; returns the readings by name and the seconds.

    Raises `Refused` (read-failed) when the system cannot read.
    """
    sizes = {file: checkpoint.path(file).stat().st_size for file in checkpoint.shards}
    whole = [t for t in checkpoint.tensors.values() if t.offset_bytes + t.nbytes <= sizes[t.file]]
    total, done, lock = sum(tensor.nbytes for tensor in whole), 0, threading.Lock()
    started_s = time.perf_counter()

    def tell(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes
            progress("read, hash and look for NaN", done, total, "B")

    with ThreadPoolExecutor(threads) as pool:
        readings = list(pool.map(lambda tensor: _read(checkpoint, tensor, tell), whole))
    return sorted(readings, key=lambda reading: reading.tensor), time.perf_counter() - started_s


def _read(checkpoint: Checkpoint, tensor: TensorInfo, tell: Callable[[int], None]) -> TensorReading:
    digest, nan, infinite = hashlib.sha256(), 0, 0
    descriptor = os.open(checkpoint.path(tensor.file), os.O_RDONLY)
    try:
        for start in range(0, tensor.nbytes, CHUNK_BYTES):
            chunk = _pread(descriptor, min(CHUNK_BYTES, tensor.nbytes - start), tensor.offset_bytes + start)
            if len(chunk) < min(CHUNK_BYTES, tensor.nbytes - start):
                raise Refused(_short(tensor))
            digest.update(chunk)
            counts = not_finite(tensor.dtype, chunk)
            nan, infinite = nan + counts[0], infinite + counts[1]
            tell(len(chunk))
    finally:
        os.close(descriptor)
    return TensorReading(tensor.name, digest.hexdigest(), nan, infinite)


def _pread(descriptor: int, nbytes: int, offset_bytes: int) -> bytes:
    """`nbytes` from the file; the system may give less at a time."""
    data = os.pread(descriptor, nbytes, offset_bytes)
    while 0 < len(data) < nbytes and (more := os.pread(descriptor, nbytes - len(data), offset_bytes + len(data))):
        data += more
    return data


def not_finite(dtype: str, data: bytes) -> tuple[int, int]:
    """How many NaN and how many infinite values the bytes of a dtype hold."""
    if dtype == "F8_E4M3":  # has no infinity; NaN is all ones
        values: NDArray[np.unsignedinteger] = np.frombuffer(data, np.uint8)
        return int(np.count_nonzero((values & 0x7F) == 0x7F)), 0
    if dtype == "F8_E8M0":
        return int(np.count_nonzero(np.frombuffer(data, np.uint8) == 0xFF)), 0
    if dtype not in _BITS:
        return 0, 0
    view, exponent, fraction = _BITS[dtype]
    values = np.frombuffer(data, view)
    special = values[(values & exponent) == exponent]
    nan = int(np.count_nonzero(special & fraction))
    return nan, special.size - nan


def _short(tensor: TensorInfo) -> Finding:
    return fatal(
        "read-failed",
        f"{tensor.file} ended while {tensor.name} was read",
        file=tensor.file,
        tensors=(tensor.name,),
        next="fetch the file again",
    )
