"""Every byte of a checkpoint read once: a hash of each tensor, its NaN and infinite values, and its scale. No torch."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from operator import attrgetter

import msgspec
import numpy as np
from numpy.typing import NDArray

from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.header import TensorInfo
from firstlight.engine.weights.sources.base import ByteSource, OpenFile
from firstlight.workbench.progress import Progress

CHUNK_BYTES = 4 << 20  # a multiple of every element size; a thread holds some five times as much
EXPONENTS = ("_scale", ".scale", "_scales", "_scale_inv")  # of names: scales stored as bytes are powers of two
BATCH = 64  # tensors that a thread takes at a time

# dtype -> view, bits of the exponent, bits of the fraction: an exponent of ones is infinity or, with a fraction, NaN.
_BITS: dict[str, tuple[str, int, int]] = {
    "F64": ("<u8", 0x7FF << 52, (1 << 52) - 1),
    "F32": ("<u4", 0xFF << 23, (1 << 23) - 1),
    "F16": ("<u2", 0x1F << 10, (1 << 10) - 1),
    "BF16": ("<u2", 0xFF << 7, (1 << 7) - 1),
    "F8_E5M2": ("u1", 0x1F << 2, 0x3),
}


class TensorReading(msgspec.Struct, frozen=True, gc=False):
    """What a tensor's bytes are; counts are 0 for dtypes that have no NaN or infinity.

    `rms` and `largest`: root of the mean square and largest absolute value, None for a dtype that is no float, for no
    elements at all, and where a value is not finite.
    """

    tensor: str
    sha256: str
    nan: int
    infinite: int
    rms: float | None = None
    largest: float | None = None


def read_all(
    checkpoint: Checkpoint, progress: Progress, threads: int | None = None
) -> tuple[list[TensorReading], float]:
    """Reads every tensor whose bytes are there, several at once; returns the readings by name and the seconds.

    Memory is bounded by the threads (as many as cores, at most 16), not by tensors or files. Raises `Refused` when a
    source cannot be read, or changes meanwhile.
    """
    sizes = {file: checkpoint.source.stat(file).nbytes for file in {t.file for t in checkpoint.tensors.values()}}
    whole = [t for t in checkpoint.tensors.values() if t.offset_bytes + t.nbytes <= sizes[t.file]]
    whole.sort(key=lambda tensor: (tensor.file, tensor.offset_bytes))
    total, done, lock = sum(tensor.nbytes for tensor in whole), 0, threading.Lock()
    batches = iter([whole[start : start + BATCH] for start in range(0, len(whole), BATCH)])
    started_s = time.perf_counter()

    def tell(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes
            progress("read, hash and look for NaN", done, total, "B")

    def work() -> list[TensorReading]:
        readings: list[TensorReading] = []
        while True:
            with lock:
                batch = next(batches, None)
            if batch is None:
                return readings
            readings.extend(_read_batch(checkpoint.source, batch, tell))

    count = threads or min(16, os.cpu_count() or 1)
    with ThreadPoolExecutor(count) as pool:
        parts = [future.result() for future in [pool.submit(work) for _ in range(count)]]
    readings = sorted((reading for part in parts for reading in part), key=lambda reading: reading.tensor)
    return readings, time.perf_counter() - started_s


def _read_batch(source: ByteSource, batch: list[TensorInfo], tell: Callable[[int], None]) -> Iterator[TensorReading]:
    """Tensors that lie one after another, each file opened once and seen not to have changed meanwhile."""
    for name, tensors in groupby(batch, key=attrgetter("file")):
        opened = source.open(name)
        try:
            for tensor in tensors:
                yield _read(tensor, opened, tell)
            opened.check()
        finally:
            opened.close()


def _read(tensor: TensorInfo, opened: OpenFile, tell: Callable[[int], None]) -> TensorReading:
    digest, nan, infinite, squares, largest, elements = hashlib.sha256(), 0, 0, 0.0, 0.0, 0
    is_exponent = tensor.dtype == "U8" and tensor.name.endswith(EXPONENTS)
    dtype = "F8_E8M0" if is_exponent else tensor.dtype
    for start in range(0, tensor.nbytes, CHUNK_BYTES):
        chunk = bytearray(min(CHUNK_BYTES, tensor.nbytes - start))
        opened.read_into(tensor.offset_bytes + start, [memoryview(chunk)])
        digest.update(chunk)
        counts = not_finite(dtype, chunk)
        nan, infinite = nan + counts[0], infinite + counts[1]
        values = wide(dtype, chunk) if not nan + infinite else None
        if values is not None:
            elements += values.size
            squares += float(np.dot(values, values))
            largest = max(largest, float(max(values.max(), -values.min())))
        tell(len(chunk))
    if nan or infinite or not elements:
        return TensorReading(tensor.name, digest.hexdigest(), nan, infinite)
    return TensorReading(tensor.name, digest.hexdigest(), 0, 0, (squares / elements) ** 0.5, largest)


def not_finite(dtype: str, data: bytes | bytearray) -> tuple[int, int]:
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


def wide(dtype: str, data: bytes | bytearray) -> NDArray[np.float64] | None:
    """The values of a float dtype that numpy has, or of BF16, in double precision; None for others."""
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    form = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}.get(dtype)
    return np.frombuffer(data, form).astype(np.float64) if form else None
