"""Files of a local file system: from the page cache what is there, the rest past it or through it, whichever is faster.

Reading past the page cache (O_DIRECT) needs aligned ranges and memory, so it goes through small buffers of ours; it
spares the system a copy of every page and leaves the cache to others, but a second start finds nothing in it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

from firstlight.engine.weights.sources.base import (
    FileStat,
    ReadShape,
    Usage,
    absent,
    after,
    changed,
    ended_early,
    unread,
)

Method = Literal["auto", "buffered", "direct"]
BLOCK_BYTES = 4096  # what O_DIRECT aligns offsets, lengths and memory to, on every disk there is
DIRECT_BYTES = 1 << 20  # of one read past the cache: memory of one thread
TRIAL_BYTES = 64 << 20  # read in each way before one is chosen
TRIAL_FROM_BYTES = 384 << 20  # cold bytes of a load that make a choice worth its trial
CLEARLY_FASTER = 1.1  # what past the cache must be to be worth that the next start finds nothing in it
NO_WAIT = getattr(os, "RWF_NOWAIT", 0)
LOCAL_SHAPE = ReadShape(chunk_bytes=8 << 20, smallest_bytes=1 << 20, gap_bytes=4 << 10, in_flight=16)


class LocalFiles:
    """The files of a directory, or of any path where `directory` is None.

    `method` auto takes what the page cache holds from there; of the rest, once there is much of it, some is read
    through the cache and some past it, and what was faster is kept to.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None, method: Method = "auto") -> None:
        self.url = os.fspath(directory) if directory is not None else ""
        self.usage = Usage()
        self.method = method
        self.trial = Trial()
        self._cached_shape = replace(LOCAL_SHAPE, in_flight=min(LOCAL_SHAPE.in_flight, len(os.sched_getaffinity(0))))
        self._spare: list[mmap.mmap] = []
        self._first_seen: dict[str, str] = {}

    @property
    def shape(self) -> ReadShape:
        """As many readers as cores while everything comes from the page cache; once the disk is waited for, more."""
        waits = self.method == "direct" or self.usage["buffered"] or self.usage["direct"]
        return LOCAL_SHAPE if waits else self._cached_shape

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(path.name for path in Path(self.url).iterdir() if path.is_file()))

    def stat(self, name: str) -> FileStat:
        try:
            found = self.path(name).stat()
        except OSError as error:
            raise absent(str(self.path(name))) from error
        self.note(self.path(name), found)
        return FileStat(found.st_size, _version(found))

    def open(self, name: str) -> LocalFile:
        return LocalFile(self, self.path(name))

    def path(self, name: str) -> Path:
        return Path(self.url) / name

    def describe(self) -> str:
        counts = self.usage.counts()
        ways = {"cached": "from the page cache", "buffered": "through it", "direct": "past it (O_DIRECT)"}
        parts = [f"{counts[kind] / 1e6:,.0f} MB {text}" for kind, text in ways.items() if counts.get(kind)]
        return ", ".join(parts) + (f"; {self.trial.verdict}" if self.trial.verdict else "")

    def note(self, path: Path, found: os.stat_result) -> None:
        """Remember what a file was when it was first looked at."""
        self._first_seen.setdefault(str(path), _version(found))

    def compare(self, path: Path, found: os.stat_result) -> None:
        """Raises `Refused` (changed-file) for a file that is not what it was."""
        before, now = self._first_seen[str(path)], _version(found)
        if before != now:
            raise changed(str(path), f"size, time and number {before}", now)

    def take_buffer(self) -> mmap.mmap:
        """Aligned memory for one read past the cache; give it back with `give_buffer`."""
        try:
            return self._spare.pop()
        except IndexError:
            return mmap.mmap(-1, DIRECT_BYTES + 2 * BLOCK_BYTES)

    def give_buffer(self, buffer: mmap.mmap) -> None:
        self._spare.append(buffer)

    def close(self) -> None:
        """Give the memory of reads past the cache back."""
        self._spare.clear()


class LocalFile:
    """An open file; the descriptor for reads past the cache is opened by the first of them."""

    def __init__(self, source: LocalFiles, path: Path) -> None:
        self.path = path
        self._source = source
        self._lock = threading.Lock()
        self._direct: int | None = None
        self._has_direct = True
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise absent(str(path)) from error
        except OSError as error:
            raise unread(str(path), 0, 0, str(error.strerror)) from error
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode):
            os.close(self._descriptor)
            raise unread(str(path), 0, 0, "not a regular file")
        source.note(path, found)

    def read_into(self, offset_bytes: int, buffers: list[memoryview]) -> None:
        pending, source = buffers, self._source
        wanted = sum(view.nbytes for view in buffers)
        end = offset_bytes + wanted
        try:
            if source.method == "auto" and NO_WAIT:
                pending = self._from_cache(offset_bytes, pending)
            cold = sum(view.nbytes for view in pending)
            if cold:
                self._read_cold(end - cold, pending, cold, end)
        except OSError as error:
            raise unread(str(self.path), offset_bytes, wanted, str(error.strerror)) from error

    def read_rows(self, offset_bytes: int, target: memoryview, span_bytes: int, stride_bytes: int) -> None:
        """One call a row, and no byte between them; what the page cache lacks is asked for before it is waited for."""
        count = target.nbytes // span_bytes
        places = [target[at : at + span_bytes] for at in range(0, count * span_bytes, span_bytes)]
        offsets = range(offset_bytes, offset_bytes + count * stride_bytes, stride_bytes)
        try:
            done = self._rows_from_cache(offsets, places, span_bytes)
            self._source.usage.add("cached", done * span_bytes)
            if done < count:
                self._rows_to_come(offsets[done:], span_bytes, stride_bytes)
                self._source.usage.add("buffered", (count - done) * span_bytes)
            for place, offset in zip(places[done:], offsets[done:], strict=True):
                self._read_buffered(offset, [place], offset + span_bytes)
        except OSError as error:
            raise unread(str(self.path), offset_bytes, target.nbytes, str(error.strerror)) from error

    def _rows_from_cache(self, offsets: range, places: list[memoryview], span_bytes: int) -> int:
        """How many rows, from the first on, the page cache gave without waiting for the disk."""
        if not NO_WAIT:
            return 0
        descriptor, preadv, done = self._descriptor, os.preadv, 0
        try:
            for place, offset in zip(places, offsets, strict=True):
                if preadv(descriptor, (place,), offset, NO_WAIT) != span_bytes:
                    break
                done += 1
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL):
                raise
        return done

    def _rows_to_come(self, offsets: range, span: int, stride: int) -> None:
        """Have the system begin to read the pages that hold these shares, or all of them where that is half of all."""
        if not hasattr(os, "posix_fadvise"):
            return
        if 2 * (span + BLOCK_BYTES) >= stride:
            os.posix_fadvise(self._descriptor, offsets[0], len(offsets) * stride, os.POSIX_FADV_WILLNEED)
            return
        for offset in offsets:
            os.posix_fadvise(self._descriptor, offset, span, os.POSIX_FADV_WILLNEED)

    def check(self) -> None:
        """Whoever wrote to the file since it was first looked at left another size, time or number."""
        self._source.compare(self.path, os.fstat(self._descriptor))

    def stop(self) -> None:
        """Reads end by themselves."""

    def close(self) -> None:
        os.close(self._descriptor)
        if self._direct is not None:
            os.close(self._direct)

    def _from_cache(self, offset: int, pending: list[memoryview]) -> list[memoryview]:
        """Take what the page cache holds without waiting for the disk; what is left."""
        while pending:
            try:
                count = os.preadv(self._descriptor, pending, offset, NO_WAIT)
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL):
                    return pending
                raise
            if count == 0:
                return pending
            self._source.usage.add("cached", count)
            offset += count
            pending = after(pending, count)
        return pending

    def _read_cold(self, offset: int, pending: list[memoryview], nbytes: int, end: int) -> None:
        source = self._source
        method = source.trial.method() if source.method == "auto" else source.method
        started_s = time.perf_counter()
        if method == "direct" and self._direct_descriptor() is not None:
            self._read_direct(offset, pending, end)
        else:
            method = "buffered"
            self._read_buffered(offset, pending, end)
        source.usage.add(method, nbytes)
        if source.method == "auto":
            source.trial.took(method, nbytes, started_s, time.perf_counter())

    def _read_buffered(self, offset: int, pending: list[memoryview], end: int) -> None:
        while pending:
            count = os.preadv(self._descriptor, pending, offset)
            if count == 0:
                raise self._ended(end, end - offset)
            offset += count
            pending = after(pending, count)

    def _read_direct(self, offset: int, pending: list[memoryview], end: int) -> None:
        descriptor = self._direct_descriptor()
        assert descriptor is not None
        buffer = self._source.take_buffer()
        try:
            address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
            while pending:
                start = offset // BLOCK_BYTES * BLOCK_BYTES
                span = min(DIRECT_BYTES + BLOCK_BYTES, -(-(end - start) // BLOCK_BYTES) * BLOCK_BYTES)
                found = os.preadv(descriptor, [memoryview(buffer)[:span]], start)
                count = min(start + found, end) - offset
                if count <= 0:
                    raise self._ended(end, end - offset)
                pending = _copy(address + offset - start, count, pending)
                offset += count
        finally:
            self._source.give_buffer(buffer)

    def _direct_descriptor(self) -> int | None:
        """None where the file system knows no O_DIRECT."""
        with self._lock:
            if self._direct is None and self._has_direct:
                try:
                    self._direct = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
                except OSError:
                    self._has_direct = False
                self._has_direct = self._has_direct and hasattr(os, "O_DIRECT")
            return self._direct

    def _ended(self, end: int, wanted: int) -> Exception:
        return ended_early(str(self.path), os.fstat(self._descriptor).st_size, end, wanted)


class Trial:
    """Which way of reading what the page cache lacks is faster here, measured on the load itself.

    The first cold bytes go through the cache, as many past it, each by all readers together; then the faster way is
    kept to. Loads with little to read go through the cache, which then serves the next one.
    """

    def __init__(self) -> None:
        self.verdict = ""
        self._rates: dict[str, float] = {}
        self._lock = threading.Lock()
        self._chosen: Literal["buffered", "direct"] | None = None
        self._bytes, self._began_s = 0, 0.0
        self._phase: Literal["skip", "buffered", "direct"] = "skip"

    def method(self) -> Literal["buffered", "direct"]:
        return self._chosen or ("direct" if self._phase == "direct" else "buffered")

    def took(self, method: str, nbytes: int, started_s: float, ended_s: float) -> None:
        """A read that was begun in the phase that is being measured counts; others belong to the one before."""
        if self._chosen is not None:
            return
        with self._lock:
            limit = TRIAL_FROM_BYTES - 2 * TRIAL_BYTES if self._phase == "skip" else TRIAL_BYTES
            if self._phase != "skip" and (method != self._phase or started_s < self._began_s):
                return
            self._bytes += nbytes
            if self._bytes >= limit:
                self._next(ended_s)

    def _next(self, now_s: float) -> None:
        if self._phase != "skip":
            self._rates[self._phase] = self._bytes / (now_s - self._began_s)
        if self._phase == "direct":
            buffered, direct = self._rates["buffered"], self._rates["direct"]
            self._chosen = "direct" if direct > CLEARLY_FASTER * buffered else "buffered"
            words = "past" if self._chosen == "direct" else "through"
            rates = f"buffered {buffered / 1e9:.2f}, O_DIRECT {direct / 1e9:.2f} GB/s on this load"
            self.verdict = f"cold files are read {words} the page cache: {rates}"
        self._phase = "buffered" if self._phase == "skip" else "direct"
        self._bytes, self._began_s = 0, now_s


def _copy(address: int, nbytes: int, buffers: list[memoryview]) -> list[memoryview]:
    """Copy from an address into the buffers without the interpreter lock; what is left of them."""
    pending = buffers
    while nbytes and pending:
        view = pending[0]
        count = min(nbytes, view.nbytes)
        if count:
            ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(view)), address, count)
        address, nbytes = address + count, nbytes - count
        pending = after(pending, count) if count < view.nbytes else pending[1:]
    return pending


def _version(found: os.stat_result) -> str:
    return f"{found.st_size}-{found.st_mtime_ns}-{found.st_ino}"
