"""Parallel positional reads of many pieces of files straight into memory that is already in its final place."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal

Piece = tuple[str | os.PathLike[str], int, memoryview]

CHUNK_BYTES = 8 << 20  # most of one system call
SMALLEST_CHUNK_BYTES = 1 << 20  # large enough to hide the cost of a call
CHUNKS_PER_THREAD = 4  # so that all threads end at about the same time
MAX_GAP_BYTES = 4 << 10  # unwanted bytes between two pieces that are cheaper to read than to skip
MAX_BUFFERS = 512  # per preadv; Linux accepts 1,024


class _Read(msgspec.Struct):
    """One preadv: buffers that follow one another in the file from `offset_bytes`; None: bytes to throw away."""

    file: _SharedFile
    offset_bytes: int
    buffers: list[tuple[memoryview | None, int]]


class _SharedFile:
    """A file that is opened by its first read and closed by its last, so that few descriptors are open at any time."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.reads_left = 0
        self._descriptor: int | None = None
        self._lock = threading.Lock()

    def descriptor(self) -> int:
        with self._lock:
            if self._descriptor is None:
                self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            return self._descriptor

    def read_done(self) -> None:
        with self._lock:
            self.reads_left -= 1
        if self.reads_left == 0:
            self.close()

    def close(self) -> None:
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None


def read_pieces(pieces: Iterable[Piece], threads: int, progress: Callable[[int], None] | None = None) -> int:
    """Fill every memoryview with the bytes of its file that start at its offset; returns the bytes delivered.

    Args:
        pieces: (path, offset_bytes, writable contiguous memoryview), in any order; ranges of one file may overlap.
        threads: reads in flight; the interpreter lock is released during each.
        progress: called in the caller's thread with the number of bytes delivered since the call before.

    Raises:
        Refused: a file is missing, cannot be read, or ends before a piece does; names file and offset. Some of the
            memory is filled by then.

    Neighbouring pieces of a file, with gaps of at most 4 KiB between them, are read by one system call, and pieces
    larger than 8 MiB, or than a fair share of a thread, by several. At most `threads` + 1 files are open at any time.
    """
    assert threads >= 1, threads
    reads = _plan(list(pieces), threads)
    if not reads:
        return 0
    threads = min(threads, len(reads))
    delivered = 0
    for count in _carry_out_inline(reads) if threads == 1 else _carry_out(reads, threads):
        delivered += count
        if progress is not None:
            progress(count)
    return delivered


def _plan(pieces: Sequence[Piece], threads: int) -> list[_Read]:
    """Order pieces by file and offset, cut large ones into chunks and join neighbours into one read."""
    share_bytes = sum(target.nbytes for _, _, target in pieces) // (threads * CHUNKS_PER_THREAD)
    chunk_bytes = min(CHUNK_BYTES, max(SMALLEST_CHUNK_BYTES, share_bytes))
    chunks: list[tuple[str, int, memoryview]] = []
    for path, offset_bytes, target in pieces:
        if target.nbytes == 0:
            continue
        view = target.cast("B")
        assert not view.readonly, f"the memory for {path} at {offset_bytes} cannot be written to"
        name = os.fspath(path)
        for start in range(0, view.nbytes, chunk_bytes):
            chunks.append((name, offset_bytes + start, view[start : start + chunk_bytes]))
    chunks.sort(key=lambda chunk: chunk[:2])
    reads: list[_Read] = []
    for name, group in groupby(chunks, key=lambda chunk: chunk[0]):
        file = _SharedFile(name)
        of_this_file = list(_join(file, ((offset, view) for _, offset, view in group), chunk_bytes))
        file.reads_left = len(of_this_file)
        reads += of_this_file
    return reads


def _join(file: _SharedFile, chunks: Iterable[tuple[int, memoryview]], most_bytes: int) -> Iterator[_Read]:
    """Join chunks of one file, sorted by offset, while they are close together and the read stays small."""
    current: _Read | None = None
    end = 0
    for offset, view in chunks:
        gap = offset - end
        if (
            current is not None
            and 0 <= gap <= MAX_GAP_BYTES
            and len(current.buffers) + 2 <= MAX_BUFFERS
            and offset + view.nbytes - current.offset_bytes <= most_bytes
        ):
            if gap:
                current.buffers.append((None, gap))
            current.buffers.append((view, view.nbytes))
        else:
            if current is not None:
                yield current
            current = _Read(file, offset, [(view, view.nbytes)])
        end = offset + view.nbytes
    if current is not None:
        yield current


def _perform(read: _Read, scratch: memoryview) -> int:
    """Carry out one read, going on after short ones; returns the bytes delivered, gaps not counted."""
    file = read.file
    try:
        descriptor = file.descriptor()
        pending = [scratch[:nbytes] if view is None else view for view, nbytes in read.buffers]
        offset = read.offset_bytes
        while pending:
            count = os.preadv(descriptor, pending, offset)
            if count == 0:
                raise _ended_early(file.path, offset, sum(view.nbytes for view in pending))
            offset += count
            pending = _after(pending, count)
    except FileNotFoundError as error:
        raise Refused(
            fatal(
                "missing-shard",
                "a file of the checkpoint is not there",
                file=file.path,
                next="fetch the file again, or scan the directory to see what else is missing",
            )
        ) from error
    except OSError as error:
        raise Refused(
            fatal(
                "read-failed",
                f"the system could not read {sum(nbytes for _, nbytes in read.buffers)} bytes at {read.offset_bytes}: "
                f"{error.strerror}",
                file=file.path,
                next="check permissions and the health of the storage",
            )
        ) from error
    file.read_done()
    return sum(nbytes for view, nbytes in read.buffers if view is not None)


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the buffers after their first `count` bytes were filled."""
    for index, view in enumerate(buffers):
        if count < view.nbytes:
            return [view[count:], *buffers[index + 1 :]]
        count -= view.nbytes
    return []


def _ended_early(path: str, offset: int, missing: int) -> Refused:
    size = Path(path).stat().st_size
    return Refused(
        fatal(
            "truncated-shard",
            f"the file ends at byte {size}, while {missing} bytes from byte {offset} on are needed",
            file=path,
            expected=f"at least {offset + missing} bytes",
            found=f"{size} bytes",
            next=f"fetch bytes {size} to {offset + missing - 1} of the file again",
        )
    )


def _new_scratch() -> memoryview:
    return memoryview(bytearray(MAX_GAP_BYTES))


def _carry_out_inline(reads: list[_Read]) -> Iterator[int]:
    scratch = _new_scratch()
    try:
        for read in reads:
            yield _perform(read, scratch)
    finally:
        _close_all(reads)


def _carry_out(reads: list[_Read], threads: int) -> Iterator[int]:
    """Yield the bytes of each finished read, in the caller's thread; the first failure stops all and is raised."""
    todo = iter(reads)
    done: queue.SimpleQueue[int | BaseException] = queue.SimpleQueue()
    lock = threading.Lock()
    stop = threading.Event()

    def work() -> None:
        scratch = _new_scratch()
        while not stop.is_set():
            with lock:
                read = next(todo, None)
            if read is None:
                return
            try:
                done.put(_perform(read, scratch))
            except BaseException as error:  # noqa: BLE001 - handed to the caller's thread, which raises it
                done.put(error)
                return

    workers = [threading.Thread(target=work, name=f"read-{index}", daemon=True) for index in range(threads)]
    try:
        for worker in workers:
            worker.start()
        for _ in reads:
            result = done.get()
            if isinstance(result, BaseException):
                raise result
            yield result
    finally:
        stop.set()
        for worker in workers:
            worker.join()
        _close_all(reads)


def _close_all(reads: list[_Read]) -> None:
    """Close what a failure left open; files whose reads all finished are closed already."""
    for file in {read.file for read in reads}:
        file.close()
