"""Every byte of a checkpoint read once: a hash of each tensor, its NaN and infinite values, and its scale. No torch."""

from __future__ import annotations

import hashlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.files.header import TensorInfo
from firstlight.engine.weights.packed import FLOATS, weight_name
from firstlight.engine.weights.sources.base import ByteSource, OpenFile
from firstlight.workbench.progress import Progress

CHUNK_BYTES = 4 << 20  # a multiple of every element size
BLOCK = 1 << 16  # elements that are measured at a time: all that is made of them stays in a core's cache
EXPONENTS = ("_scale", ".scale", "_scales", ".scales", "_scale_inv")  # of names: scales stored as bytes are exponents
DOT = 1 << 13  # elements of one product
BATCH, BATCH_BYTES = 64, 64 << 20  # that a thread takes at a time
READERS = 2  # threads for each core: some read while others compute


class Form(NamedTuple):
    """The bits of a float: a value is finite where those below `sign` are less than `first`, which is infinity or NaN.

    Shifted up by `shift`, they are a float32, `factor` times too small; without a shift numpy has the dtype itself.
    """

    view: str
    sign: int
    first: int
    has_infinity: bool = True
    shift: int = 0
    factor: float = 1.0

    def value(self, bits: int) -> float:
        """The number that finite bits without their sign are."""
        width = 4 if self.shift else int(self.view[-1])
        whole = (bits << self.shift).to_bytes(width, "little")
        return float(np.frombuffer(whole, f"<f{width}")[0]) * self.factor


FORMS = {
    "F64": Form("<u8", 1 << 63, 0x7FF << 52),
    "F32": Form("<u4", 1 << 31, 0xFF << 23),
    "C64": Form("<u4", 1 << 31, 0xFF << 23),  # two of them
    "BF16": Form("<u2", 1 << 15, 0xFF << 7, shift=16),
    "F16": Form("<u2", 1 << 15, 0x1F << 10, shift=13, factor=2.0**112),
    "F8_E5M2": Form("u1", 1 << 7, 0x1F << 2, shift=21, factor=2.0**112),
    "F8_E4M3": Form("u1", 1 << 7, 0x7F, has_infinity=False, shift=20, factor=2.0**120),
    "F8_E8M0": Form("u1", 1 << 8, 0xFF, has_infinity=False, shift=23),  # no sign; 0, which is 2^-127, counts as zero
}
NEGATIVE_ZERO = ("F8_E4M3FNUZ", "F8_E5M2FNUZ")  # is their only NaN
CODES = ("U8", "I8", "I32", "U32", "F4", "F6_E2M3", "F6_E3M2")  # of weights


class TensorReading(msgspec.Struct, frozen=True, gc=False):
    """What a tensor's bytes are; counts are 0 for dtypes that have no NaN or infinity.

    `rms` and `largest`: root of the mean square and largest absolute value. None for no elements at all, where a value
    is not finite, and for codes of a quantized weight, of which scales say how large they are; but 0 where all is zero.
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

    Memory is bounded by the threads (two for each core, at most 32), not by tensors or files. Raises `Refused` when a
    source cannot be read, or changes meanwhile.
    """
    sizes = {file: checkpoint.source.stat(file).nbytes for file in {t.file for t in checkpoint.tensors.values()}}
    whole = [t for t in checkpoint.tensors.values() if t.offset_bytes + t.nbytes <= sizes[t.file]]
    whole.sort(key=lambda tensor: (tensor.file, tensor.offset_bytes))
    total, done, lock = sum(tensor.nbytes for tensor in whole), 0, threading.Lock()
    batches = _batches(whole)
    started_s = time.perf_counter()

    def tell(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes
            progress("read, hash and look for NaN", done, total, "B")

    def work() -> list[TensorReading]:
        readings: list[TensorReading] = []
        gauge = Gauge()
        while True:
            with lock:
                batch = next(batches, None)
            if batch is None:
                return readings
            readings.extend(_read_batch(checkpoint.source, batch, gauge, tell))

    count = threads or min(32, READERS * (os.cpu_count() or 1))
    with ThreadPoolExecutor(count) as pool:
        parts = [future.result() for future in [pool.submit(work) for _ in range(count)]]
    readings = sorted((reading for part in parts for reading in part), key=lambda reading: reading.tensor)
    return readings, time.perf_counter() - started_s


def _batches(tensors: Iterable[TensorInfo]) -> Iterator[list[TensorInfo]]:
    """Neighbours, many small ones or few large ones, so that no thread is left with much more than the others."""
    batch: list[TensorInfo] = []
    nbytes = 0
    for tensor in tensors:
        batch.append(tensor)
        nbytes += tensor.nbytes
        if len(batch) == BATCH or nbytes >= BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _read_batch(
    source: ByteSource, batch: list[TensorInfo], gauge: Gauge, tell: Callable[[int], None]
) -> Iterator[TensorReading]:
    """Tensors that lie one after another, each file opened once and seen not to have changed meanwhile."""
    for name, tensors in groupby(batch, key=attrgetter("file")):
        opened = source.open(name)
        try:
            for tensor in tensors:
                yield _read(tensor, opened, gauge, tell)
            opened.check()
        finally:
            opened.close()


def _read(tensor: TensorInfo, opened: OpenFile, gauge: Gauge, tell: Callable[[int], None]) -> TensorReading:
    digest, found, add = hashlib.sha256(), Measure(), gauge.measure_of(tensor)
    for start in range(0, tensor.nbytes, CHUNK_BYTES):
        chunk = gauge.chunk[: min(CHUNK_BYTES, tensor.nbytes - start)]
        opened.read_into(tensor.offset_bytes + start, [chunk])
        digest.update(chunk)
        if add is not None:
            add(found, chunk)
        tell(chunk.nbytes)
    rms, largest = found.scale()
    return TensorReading(tensor.name, digest.hexdigest(), found.nan, found.infinite, rms, largest)


@dataclass(slots=True)
class Measure:
    """What was found so far. `elements`: those whose size was measured; codes are only seen to be zero or not."""

    nan: int = 0
    infinite: int = 0
    squares: float = 0.0
    largest: float = 0.0
    elements: int = 0
    is_code: bool = False

    def scale(self) -> tuple[float | None, float | None]:
        """Root of the mean square and largest absolute value, where both say something."""
        if self.nan or self.infinite or not self.elements or (self.is_code and self.largest):
            return None, None
        rms = (self.squares / self.elements) ** 0.5
        return (rms, self.largest) if math.isfinite(rms) else (None, None)


class Gauge:
    """Measures chunks of tensors block by block, in memory that is taken once: one for each thread."""

    def __init__(self) -> None:
        self.chunk = memoryview(bytearray(CHUNK_BYTES))
        self._bits = np.empty(BLOCK, np.uint64)
        self._shifted = np.empty(BLOCK, np.uint32)
        self._wide = np.empty(BLOCK, np.float64)

    def measure_of(self, tensor: TensorInfo) -> Callable[[Measure, memoryview], None] | None:
        """What is measured of a tensor's bytes; nothing of whole numbers that are no codes of a weight."""
        if tensor.dtype in NEGATIVE_ZERO:
            return _count_negative_zero
        is_exponent = tensor.dtype == "U8" and tensor.name.endswith(EXPONENTS)
        form = FORMS.get("F8_E8M0" if is_exponent else tensor.dtype)
        is_code = tensor.dtype not in FLOATS and not is_exponent and weight_name(tensor.name) is not None
        if form is not None:
            return partial(self.add, form, is_code)
        return _see_zero if is_code and tensor.dtype in CODES else None

    def add(self, form: Form, is_code: bool, found: Measure, chunk: memoryview) -> None:
        """Counts what is not finite and, but for codes, sums the squares of all else in double precision."""
        found.is_code = is_code
        values: NDArray[np.unsignedinteger] = np.frombuffer(chunk, form.view)
        for start in range(0, values.size, BLOCK):
            block = values[start : start + BLOCK]
            bits = np.bitwise_and(block, form.sign - 1, out=self._bits.view(form.view)[: block.size])
            top = int(bits.max())
            if top >= form.first:
                infinite = int(np.count_nonzero(bits == form.first)) if form.has_infinity else 0
                found.infinite += infinite
                found.nan += int(np.count_nonzero(bits >= form.first)) - infinite
                continue
            found.elements += block.size
            found.largest = max(found.largest, form.value(top))
            if not is_code and top:
                found.squares += _squares(self._widened(form, bits)) * form.factor**2

    def _widened(self, form: Form, bits: NDArray[np.unsignedinteger]) -> NDArray[np.float64]:
        """Absolute values in double precision, `factor` times too small."""
        wide = self._wide[: bits.size]
        if form.shift:
            shifted = self._shifted[: bits.size]
            bits = np.left_shift(bits, form.shift, out=shifted, dtype=np.uint32, casting="unsafe")
        wide[:] = bits.view(f"<f{bits.itemsize}")
        return wide


def _squares(wide: NDArray[np.float64]) -> float:
    """The sum of squares, a part at a time: BLAS has threads of its own for longer ones, which wait for each other."""
    parts = (wide[start : start + DOT] for start in range(0, wide.size, DOT))
    return sum(float(np.dot(part, part)) for part in parts)


def _count_negative_zero(found: Measure, chunk: memoryview) -> None:
    found.is_code = True
    values = np.frombuffer(chunk, np.uint8)
    found.nan += int(np.count_nonzero(values == 0x80))
    found.elements += values.size
    found.largest = max(found.largest, float(values.max()))


def _see_zero(found: Measure, chunk: memoryview) -> None:
    """Codes are told from a hole in a file, which holds zeros alone."""
    found.is_code = True
    found.elements += 1
    if not found.largest:
        found.largest = float(np.frombuffer(chunk, np.uint8).max())
