"""Caches remote bytes in a local file, from which an interrupted load resumes.

Beside the sparse `NAME.part` lies a journal of the blocks that are in it, each with its checksum: whatever a crash left
behind, a block whose checksum does not hold is fetched again. Several are asked for by one request, and each is written
down as it comes. The file gets its name when the last block is there.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from firstlight.engine.weights.sources.base import (
    ByteSource,
    FileStat,
    OpenFile,
    ReadShape,
    Usage,
    read_rows_at_once,
    unkept,
    unread,
)
from firstlight.engine.weights.sources.local import LocalFiles
from firstlight.engine.weights.sources.retry import Arrived

BLOCK_BYTES = 512 << 10  # of a record of the journal: less than that of each request is lost with its process
RUN_BLOCKS = 8  # that one request asks for, at most
PART, JOURNAL = ".part", ".journal"
_RECORD = struct.Struct("<II")  # block, CRC-32 of its bytes


class FarFile(OpenFile, Protocol):
    """A file that comes bit by bit."""

    def read_into(self, offset_bytes: int, buffers: list[memoryview], arrived: Arrived | None = None) -> None:
        """As that of any file; `arrived` is called by this thread as bytes come, in order, and at last with all."""


class FarFiles(ByteSource, Protocol):
    """Where such files are."""

    def open(self, name: str) -> FarFile: ...


class KeptFiles:
    """The files of `far`, of which `directory` holds some and some parts; with `keep` it gets all that is read."""

    def __init__(self, far: FarFiles, directory: Path, keep: bool) -> None:
        self.url = far.url
        self.shape: ReadShape = far.shape
        self.usage: Usage = far.usage
        self._far = far
        self._near = LocalFiles(directory)
        self._keep = keep
        self._open: dict[str, KeptFile] = {}
        self._lock = threading.Lock()

    def names(self) -> tuple[str, ...]:
        return self._far.names()

    def stat(self, name: str) -> FileStat:
        return self._far.stat(name)

    def open(self, name: str) -> OpenFile:
        """From the directory if it is all there, else from afar."""
        stat = self.stat(name)
        if self.is_whole(name):
            return self._near.open(name)
        if not self._keep and not (self._near.path(name + JOURNAL)).exists():
            return self._far.open(name)
        with self._lock:  # one journal a file, however often it is opened
            if name not in self._open:
                self._open[name] = KeptFile(self._far, self._near, name, stat.nbytes)
            return _Opened(self._open[name])

    def is_whole(self, name: str) -> bool:
        path = self._near.path(name)
        return path.is_file() and path.stat().st_size == self.stat(name).nbytes

    def describe(self) -> str:
        near = self._near.describe()
        again = self.usage["kept"]
        parts = [self._far.describe(), f"{again / 1e6:,.0f} MB kept from before" if again else "", near]
        return "; ".join(part for part in parts if part)


class _Opened:
    """A file that is partly here, as one load has it open; what it fetches ends with that load."""

    def __init__(self, file: KeptFile) -> None:
        self._file = file
        self._fetching: set[OpenFile] = set()
        self._stopped = False

    def read_into(self, offset_bytes: int, buffers: list[memoryview]) -> None:
        self._file.read_into(offset_bytes, buffers, self)

    def read_rows(self, offset_bytes: int, target: memoryview, span_bytes: int, stride_bytes: int) -> None:
        read_rows_at_once(self, offset_bytes, target, span_bytes, stride_bytes, BLOCK_BYTES)

    def check(self) -> None:
        self._file.check()

    def begin(self, far: OpenFile) -> None:
        """Something is being fetched for this load."""
        self._fetching.add(far)
        if self._stopped:
            far.stop()

    def end(self, far: OpenFile) -> None:
        self._fetching.discard(far)

    def stop(self) -> None:
        self._stopped = True
        for far in list(self._fetching):
            far.stop()

    def close(self) -> None:
        """Descriptors stay for the next reader; they go with the file."""


class KeptFile:
    """One file that is partly here. Blocks are fetched whole, by whichever reader needs one first."""

    def __init__(self, far: FarFiles, near: LocalFiles, name: str, nbytes: int) -> None:
        self._far = far
        self._name = name
        self._nbytes = nbytes
        self._path = near.path(name)
        self._part, self._journal = near.path(name + PART), near.path(name + JOURNAL)
        self._usage = far.usage
        self._count = -(-nbytes // BLOCK_BYTES)
        self._changed = threading.Condition()
        self._busy: set[int] = set()
        self._sure: set[int] = set()  # fetched or checked by this process
        self._known: dict[int, int] = {}
        self._log: int | None = None
        self._read_to = 0  # of the journal
        try:
            with _in_turn(self._path.parent):
                self._begin()
        except OSError as error:
            raise unkept(str(self._part), error) from error

    def _begin(self) -> None:
        """Open the part and its journal, or the file that another process has finished meanwhile."""
        if self._path.is_file() and self._path.stat().st_size == self._nbytes:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            self._sure = set(range(self._count))
            return
        self._descriptor = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._descriptor, self._nbytes)
        self._log = os.open(self._journal, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        written = os.fstat(self._log).st_size
        os.ftruncate(self._log, written - written % _RECORD.size)  # a cut record would put all behind it out of step
        self._learn()

    def read_into(self, offset_bytes: int, buffers: list[memoryview], reader: _Opened) -> None:
        """Fill the buffers with what starts at `offset_bytes`; what is not here is fetched for `reader`."""
        last = (offset_bytes + sum(view.nbytes for view in buffers) - 1) // BLOCK_BYTES
        for view in buffers:
            done = 0
            while done < view.nbytes:
                block, at = divmod(offset_bytes + done, BLOCK_BYTES)
                count = min(view.nbytes - done, BLOCK_BYTES - at)
                self._provide(block, last, reader)
                self._from_part(offset_bytes + done, view[done : done + count])
                done += count
            offset_bytes += view.nbytes

    def check(self) -> None:
        """Give the file its name once all of it is there, unless another process has: a part may be another's."""
        with self._changed, _in_turn(self._path.parent):
            if len(self._sure) < self._count or not self._part.exists():
                return
            if os.path.samestat(self._part.stat(), os.fstat(self._descriptor)):
                os.fsync(self._descriptor)
                self._part.replace(self._path)
                self._journal.unlink(missing_ok=True)

    def __del__(self) -> None:
        for descriptor in (getattr(self, "_descriptor", None), getattr(self, "_log", None)):
            if descriptor is not None:
                os.close(descriptor)

    def _provide(self, block: int, last: int, reader: _Opened) -> None:
        """Have a block in the file: because it was, and its checksum holds, or fetched with others up to `last`."""
        with self._changed:
            while block in self._busy:
                self._changed.wait()
            if block in self._sure:
                return
            run = self._run(block, last)
            self._busy.update(run)
            self._learn()
        try:
            for start, stop in _runs([one for one in run if not self._holds(one)]):
                self._fetch(start, stop, reader)
        finally:
            with self._changed:
                self._busy.difference_update(run)
                self._changed.notify_all()

    def _run(self, block: int, last: int) -> range:
        """A block and those behind it, up to `last`, that nobody has or is at."""
        stop = block + 1
        while stop <= last and stop < block + RUN_BLOCKS and stop not in self._busy and stop not in self._sure:
            stop += 1
        return range(block, stop)

    def _learn(self) -> None:
        """Take in what has been written into the journal, by other processes as well."""
        if self._log is None:
            return
        count = (os.fstat(self._log).st_size - self._read_to) // _RECORD.size
        if count > 0:
            written = os.pread(self._log, count * _RECORD.size, self._read_to)
            self._known.update(_RECORD.iter_unpack(_whole(written)))
            self._read_to += len(_whole(written))

    def _holds(self, block: int) -> bool:
        if block not in self._known:
            return False
        data = memoryview(bytearray(self._size(block)))
        self._from_part(block * BLOCK_BYTES, data)
        if zlib.crc32(data) != self._known[block]:
            self._usage.add("spoilt")
            return False
        self._usage.add("kept", data.nbytes)
        self._settle(block)
        return True

    def _fetch(self, start: int, stop: int, reader: _Opened) -> None:
        """Blocks [start, stop) by one request; each is in the file, and written down, once it has come."""
        first_byte = start * BLOCK_BYTES
        data = memoryview(bytearray(min(stop * BLOCK_BYTES, self._nbytes) - first_byte))
        coming = start

        def arrived(count: int) -> None:
            nonlocal coming
            while coming < stop and count >= (edge := min((coming + 1) * BLOCK_BYTES - first_byte, data.nbytes)):
                self._write(coming, data[coming * BLOCK_BYTES - first_byte : edge])
                coming += 1

        opened = self._far.open(self._name)
        reader.begin(opened)
        try:
            opened.read_into(first_byte, [data], arrived)
            opened.check()
        finally:
            reader.end(opened)
            opened.close()

    def _write(self, block: int, data: memoryview) -> None:
        try:
            written = 0
            while written < data.nbytes:
                written += os.pwrite(self._descriptor, data[written:], block * BLOCK_BYTES + written)
            assert self._log is not None
            os.write(self._log, _RECORD.pack(block, zlib.crc32(data)))
        except OSError as error:
            raise unkept(str(self._part), error) from error
        self._settle(block)

    def _settle(self, block: int) -> None:
        with self._changed:
            self._sure.add(block)
            self._busy.discard(block)
            self._changed.notify_all()

    def _size(self, block: int) -> int:
        return min(BLOCK_BYTES, self._nbytes - block * BLOCK_BYTES)

    def _from_part(self, offset: int, view: memoryview) -> None:
        done = 0
        while done < view.nbytes:
            count = os.preadv(self._descriptor, [view[done:]], offset + done)
            if count == 0:
                raise unread(str(self._part), offset + done, view.nbytes - done, "somebody cut it")
            done += count


@contextmanager
def _in_turn(directory: Path) -> Iterator[None]:
    """One process at a time begins a file of the directory or gives one its name."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def fetch_all(source: KeptFiles, names: tuple[str, ...]) -> None:
    """Have all of the files in the directory."""
    from firstlight.engine.weights.loading.readers import Job, read_jobs

    for name in names:
        nbytes = source.stat(name).nbytes
        if source.is_whole(name):
            continue
        size = RUN_BLOCKS * BLOCK_BYTES
        jobs = (Job([(name, at, memoryview(bytearray(min(size, nbytes - at))))]) for at in range(0, nbytes, size))
        for _ in read_jobs(jobs, source, ahead_bytes=2 * source.shape.in_flight * size):
            pass
        if nbytes and not source.is_whole(name):
            source.open(name).check()


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Blocks in order as [start, stop) of those that follow one another."""
    start = 0
    for at in range(1, len(blocks) + 1):
        if at == len(blocks) or blocks[at] != blocks[at - 1] + 1:
            yield blocks[start], blocks[at - 1] + 1
            start = at


def _whole(journal: bytes) -> bytes:
    """The records that were written to their end."""
    return journal[: len(journal) // _RECORD.size * _RECORD.size]
