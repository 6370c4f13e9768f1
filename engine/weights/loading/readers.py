"""Parallel positional reads of many pieces of files straight into their final memory."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from msgspec.structs import replace

from firstlight.engine.errors import FirstlightError, Refused
from firstlight.engine.weights.loading.threads import await_end
from firstlight.engine.weights.sources.base import ByteSource, OpenFile, ReadShape, Rows
from firstlight.engine.weights.sources.local import LocalFiles

Piece = tuple[str | os.PathLike[str], int, memoryview] | Rows
Provide = Callable[[memoryview], None]  # has memory backed that is about to be written to

CHUNKS_PER_THREAD = 4  # so that all threads end at about the same time
MAX_BUFFERS = 512  # per read; Linux accepts 1,024
ROWS_BYTES = 4 << 20  # of shares of rows that are one reader's
AHEAD_BYTES = 256 << 20  # of jobs that are being read or wait to be taken
POLL_S = 0.1  # how soon a cancellation is seen


class Cancelled(FirstlightError):
    """Reading was cancelled by the caller."""


@dataclass(slots=True, eq=False)
class Job:
    """Pieces (file, offset, writable contiguous memory) that are needed together; `payload` is the caller's own.

    `tensors` names the tensor of each piece for error messages. `left` counts the unfinished reads.
    """

    pieces: Sequence[Piece]
    payload: Any = None
    tensors: Sequence[str] = ()
    nbytes: int = field(init=False)
    left: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.nbytes = sum(p.target.nbytes if isinstance(p, Rows) else p[2].nbytes for p in self.pieces)


@dataclass(slots=True, eq=False)
class _Read:
    """One request: buffers that follow one another in the file from `offset_bytes`; None: bytes to throw away.

    Or, with `rows`, shares of rows and no buffers.
    """

    job: Job
    file: _SharedFile
    offset_bytes: int
    buffers: list[tuple[memoryview | None, int]]
    rows: Rows | None = None

    @property
    def nbytes(self) -> int:
        if self.rows is not None:
            return self.rows.target.nbytes
        return sum(nbytes for view, nbytes in self.buffers if view is not None)

    @property
    def span(self) -> tuple[int, int]:
        """The byte range [first, last + 1) in the file."""
        if self.rows is not None:
            length = (self.rows.count - 1) * self.rows.stride_bytes + self.rows.span_bytes
        else:
            length = sum(nbytes for _, nbytes in self.buffers)
        return self.offset_bytes, self.offset_bytes + length

    def named(self, error: Refused) -> Refused:
        """The same refusal with the tensors that this read is of."""
        start, stop = self.span
        names = tuple(
            name
            for name, piece in zip(self.job.tensors, self.job.pieces, strict=False)
            if _lies_in(piece, self.file.name, start, stop)
        )
        return Refused(
            replace(finding, tensors=tuple(dict.fromkeys(names))) if names and not finding.tensors else finding
            for finding in error.findings
        )

    def carry_out(self, scratch: memoryview, provide: Provide | None) -> None:
        if provide is not None:
            for view in [self.rows.target] if self.rows is not None else [one for one, _ in self.buffers]:
                if view is not None:
                    provide(view)
        if self.rows is not None:
            self.file.opened().read_rows(
                self.rows.offset_bytes, self.rows.target, self.rows.span_bytes, self.rows.stride_bytes
            )
        else:
            buffers = [scratch[:nbytes] if view is None else view for view, nbytes in self.buffers]
            self.file.opened().read_into(self.offset_bytes, buffers)
        self.file.read_done()


class _SharedFile:
    """A file that is opened by its first read and closed by the last one planned, so that few are open at any time."""

    def __init__(self, source: ByteSource, name: str) -> None:
        self.reads_left = 0
        self._source = source
        self.name = name
        self._opened: OpenFile | None = None
        self._lock = threading.Lock()

    def opened(self) -> OpenFile:
        with self._lock:
            if self._opened is None:
                self._opened = self._source.open(self.name)
            return self._opened

    def read_done(self) -> None:
        with self._lock:
            self.reads_left -= 1
            opened = self._opened if self.reads_left == 0 else None
        if opened is not None:
            opened.check()
            self.close()

    def stop(self) -> None:
        """End what is awaited of it."""
        with self._lock:
            if self._opened is not None:
                self._opened.stop()

    def close(self) -> None:
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()


def read_pieces(
    pieces: Iterable[Piece],
    threads: int,
    progress: Callable[[int], None] | None = None,
    source: ByteSource | None = None,
) -> int:
    """Fill every memoryview with the bytes of its file that start at its offset; returns the bytes delivered.

    Args:
        pieces: (file, offset_bytes, writable contiguous memoryview), in any order; ranges of one file may overlap.
        threads: reads in flight; the interpreter lock is released during each.
        progress: called in the caller's thread with the number of bytes delivered since the call before.
        source: where the files are; without it they are paths of this machine.

    Raises:
        Refused: a file is missing, cannot be read, or ends before a piece does; names file and offset. Some of the
            memory is filled by then.

    Neighbouring pieces of a file, with small gaps between them, are read by one request, and large pieces by several.
    At most `threads` + 1 files are open at any time.
    """
    jobs = [Job(list(pieces))]
    for _ in read_jobs(jobs, source or LocalFiles(), threads, progress):
        pass
    return jobs[0].nbytes


def read_jobs(
    jobs: Iterable[Job],
    source: ByteSource,
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
    cancel: threading.Event | None = None,
    ahead_bytes: int = AHEAD_BYTES,
    provide: Provide | None = None,
) -> Iterator[Job]:
    """Yield each job, in order, once all of its pieces are read; those behind it are being read meanwhile.

    The next job is taken from `jobs` only when fewer than `ahead_bytes` are being read or wait to be taken by the
    caller, so a generator may reserve memory for it then. `threads` None: as many reads in flight as suit the source.
    `provide` is called by a reader for memory that it is about to fill.

    Raises `Refused` as `read_pieces` does, and `Cancelled` when `cancel` is set. Whatever ends it, no reader is left
    and every file is closed.
    """
    readers = _Readers(source, threads, provide, tells=progress is not None)
    waiting: deque[Job] = deque()
    coming: Iterator[Job] | None = iter(jobs)
    in_hand = 0
    try:
        while True:
            if cancel is not None and cancel.is_set():  # also where everything that is in hand has been read
                raise Cancelled("reading was cancelled")
            while coming is not None and (not waiting or in_hand < ahead_bytes):
                job = next(coming, None)
                if job is None:
                    coming = None
                    break
                waiting.append(job)
                in_hand += job.nbytes
                readers.add(job, in_hand)
            if not waiting:
                return
            while waiting[0].left:
                count = readers.wait(cancel)
                if progress is not None:
                    progress(count)
            done = waiting.popleft()
            readers.forget(done)
            yield done
            in_hand -= done.nbytes
    finally:
        readers.close()


class _Readers:
    """Reader threads, which execute reads in order; the first failure is raised in the waiting caller."""

    def __init__(self, source: ByteSource, threads: int | None, provide: Provide | None, tells: bool) -> None:
        """`tells`: every read is told of when it ends; else jobs alone, so that nobody is woken in between."""
        assert threads is None or threads >= 1, threads
        self._source = source
        self._threads = threads
        self._provide = provide
        self._tells = tells
        self._workers: list[threading.Thread] = []
        self._todo: queue.SimpleQueue[_Read | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[_Read | BaseException | None] = queue.SimpleQueue()  # None: a job has ended
        self._files: dict[int, list[_SharedFile]] = {}
        self._counting = threading.Lock()
        self._stop = threading.Event()

    def add(self, job: Job, in_hand_bytes: int) -> None:
        """Plan a job's reads and let them be carried out, by as many readers as suit the source by now.

        They are the larger the more is in hand, this job included.
        """
        threads = self._threads or self._source.shape.in_flight
        reads = list(_plan(job, self._source, in_hand_bytes // (threads * CHUNKS_PER_THREAD)))
        job.left = len(reads)
        self._files[id(job)] = list({id(read.file): read.file for read in reads}.values())
        for read in reads:
            self._todo.put(read)
        wanted = min(threads, len(self._workers) + len(reads))
        while len(self._workers) < wanted:
            worker = threading.Thread(target=self._work, name=f"read-{len(self._workers)}", daemon=True)
            self._workers.append(worker)
            worker.start()

    def wait(self, cancel: threading.Event | None) -> int:
        """The bytes of the next read to end."""
        while True:
            if cancel is not None and cancel.is_set():
                raise Cancelled("reading was cancelled")
            try:
                result = self._done.get(timeout=POLL_S if cancel is not None else None)
            except queue.Empty:
                continue
            if isinstance(result, BaseException):
                raise result
            if result is None:
                return 0
            result.job.left -= 1
            return result.nbytes

    def forget(self, job: Job) -> None:
        """A job that is done has no file open any longer."""
        del self._files[id(job)]

    def close(self) -> None:
        """Stop all readers, at the latest after the request each is at, and close what is open."""
        self._stop.set()
        files = [one for files in self._files.values() for one in files]
        if any(worker.is_alive() for worker in self._workers):
            for file in files:
                file.stop()
        for _ in self._workers:
            self._todo.put(None)
        for worker in self._workers:
            await_end(worker)
        for file in files:
            file.close()

    def _work(self) -> None:
        scratch = memoryview(bytearray(self._source.shape.gap_bytes))
        while (read := self._todo.get()) is not None and not self._stop.is_set():
            try:
                read.carry_out(scratch, self._provide)
                if self._is_told(read.job):  # without the read: nobody may ask, and its memory would stay
                    self._done.put(read if self._tells else None)
            except Refused as error:
                self._done.put(read.named(error))
                return
            except BaseException as error:  # noqa: BLE001 - handed to the caller's thread, which raises it
                self._done.put(error)
                return
            del read  # its memory is not held while the next one is waited for

    def _is_told(self, job: Job) -> bool:
        """Whether the end of one of its reads is told."""
        if self._tells:
            return True
        with self._counting:
            job.left -= 1
            return job.left == 0


def _lies_in(piece: Piece, file: str, start: int, stop: int) -> bool:
    """Whether some of a piece lies in bytes [start, stop) of a file."""
    if isinstance(piece, Rows):
        name, first, last = piece.file, piece.offset_bytes, piece.offset_bytes + piece.count * piece.stride_bytes
    else:
        name, first, last = os.fspath(piece[0]), piece[1], piece[1] + piece[2].nbytes
    return name == file and first < stop and start < last


def _plan(job: Job, source: ByteSource, share_bytes: int) -> Iterator[_Read]:
    """Order pieces by file and offset, cut large ones into chunks and join neighbours into one read."""
    shape = source.shape
    chunk_bytes = min(shape.chunk_bytes, max(shape.smallest_bytes, share_bytes))
    chunks: list[tuple[str, int, memoryview]] = []
    for piece in job.pieces:
        if isinstance(piece, Rows):
            yield from _row_reads(job, source, piece, max(shape.smallest_bytes, share_bytes))
            continue
        path, offset_bytes, target = piece
        if target.nbytes == 0:
            continue
        view = target.cast("B")
        assert not view.readonly, f"the memory for {path} at {offset_bytes} cannot be written to"
        name = os.fspath(path)
        for start in range(0, view.nbytes, chunk_bytes):
            chunks.append((name, offset_bytes + start, view[start : start + chunk_bytes]))
    chunks.sort(key=lambda chunk: chunk[:2])
    for name, group in groupby(chunks, key=lambda chunk: chunk[0]):
        file = _SharedFile(source, name)
        reads = list(_join(job, file, ((offset, view) for _, offset, view in group), chunk_bytes, shape))
        file.reads_left = len(reads)
        yield from reads


def _row_reads(job: Job, source: ByteSource, rows: Rows, most_bytes: int) -> Iterator[_Read]:
    """Shares of rows by the hundred: so many that a request is neither long in the file nor in what it brings."""
    brought = min(ROWS_BYTES, most_bytes) // rows.span_bytes
    count = max(1, min(brought, source.shape.chunk_bytes // rows.stride_bytes))
    file = _SharedFile(source, rows.file)
    reads = [_Read(job, file, rows.offset_bytes, [], rows.part(at, count)) for at in range(0, rows.count, count)]
    file.reads_left = len(reads)
    yield from reads


def _join(
    job: Job, file: _SharedFile, chunks: Iterable[tuple[int, memoryview]], most_bytes: int, shape: ReadShape
) -> Iterator[_Read]:
    """Join chunks of one file, sorted by offset, while they are close together and the read stays small."""
    current: _Read | None = None
    end = 0
    for offset, view in chunks:
        gap = offset - end
        if (
            current is not None
            and 0 <= gap <= shape.gap_bytes
            and len(current.buffers) + 2 <= MAX_BUFFERS
            and offset + view.nbytes - current.offset_bytes <= most_bytes
        ):
            if gap:
                current.buffers.append((None, gap))
            current.buffers.append((view, view.nbytes))
        else:
            if current is not None:
                yield current
            current = _Read(job, file, offset, [(view, view.nbytes)])
        end = offset + view.nbytes
    if current is not None:
        yield current
