"""Reads local files: from the page cache what is there, the rest with O_DIRECT or buffered, whichever is faster.

Reading past the page cache (O_DIRECT) needs aligned ranges and memory, so it goes through small buffers of ours; it
spares the system a copy of every page and leaves the cache to others, but a second start finds nothing in it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

from firstlight.engine.weights.sources.base import (
    FileStat,
    ReadShape,
    Usage,
    absent,
    after,
    before,
    changed,
    ended_early,
    unread,
)
from firstlight.engine.weights.sources.native import Native, native
from firstlight.engine.weights.sources.trial import Cheaper, Gaps, Trial

Method = Literal["auto", "buffered", "direct"]
BLOCK_BYTES = 4096  # what O_DIRECT aligns offsets, lengths and memory to, on every disk there is
HUGE_PAGE_BYTES = 2 << 20  # reads past the cache go into these: in small pages a request is a list of 256 places
BUFFER_BYTES = 2 * HUGE_PAGE_BYTES
DIRECT_BYTES = BUFFER_BYTES - 2 * BLOCK_BYTES  # of one read past the cache
SCRATCH_BYTES = 1 << 20  # of rows out of the page cache: what is read into it is still in the processor's own
ALONE_BYTES = 32 << 10  # of a share of a row that is worth a read of its own past the cache
STEP_BYTES = 32  # the kernel copies fastest between places that lie alike in so many bytes
NATIVE_BYTES = 256 << 10  # of one piece of memory that compiled code is worth being called for
NO_WAIT = getattr(os, "RWF_NOWAIT", 0)
NOT_THERE = (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL)  # without waiting, or without asking so at all
CACHED_CHUNK_BYTES = 32 << 20  # of one read while nothing is waited for
FEW_BYTES, FEW_SHARE = 64 << 20, 0.05  # that are not in the page cache, and change nothing about how the rest is read
LOCAL_SHAPE = ReadShape(chunk_bytes=8 << 20, smallest_bytes=1 << 20, gap_bytes=4 << 10, in_flight=8)


class LocalFiles:
    """The files of a directory, or of any path where `directory` is None.

    `method` auto takes what the page cache holds from there; of the rest some is read through the cache, then some past
    it, and what was faster is kept to.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None, method: Method = "auto") -> None:
        self.url = os.fspath(directory) if directory is not None else ""
        self.usage = Usage()
        self.method = method
        self.trial = Trial()
        self.gaps = Gaps()
        self.has_shares = False  # of rows to be read: then what comes next in a file is not what will be wanted next
        self.out_of_step = Cheaper("scratch", "at once")
        self._rows: dict[tuple[int, int], Cheaper] = {}
        readers = min(LOCAL_SHAPE.in_flight, len(os.sched_getaffinity(0)))
        self._cached_shape = replace(LOCAL_SHAPE, chunk_bytes=CACHED_CHUNK_BYTES, in_flight=readers)
        self._spare: list[Buffer] = []
        self._scratch: list[memoryview] = []
        self._compiling = threading.Lock()
        self._first_seen: dict[str, str] = {}

    @property
    def shape(self) -> ReadShape:
        """As many readers as cores while nearly everything comes from the page cache; then more, for less each."""
        cold, cached = self.usage["buffered"] + self.usage["direct"], self.usage["cached"]
        waits = self.method == "direct" or cold > min(FEW_BYTES, FEW_SHARE * (cold + cached))
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
        if counts.get("buffered") or counts.get("direct"):
            asked, given = (counts.get(kind, 0) / 1e6 for kind in ("asked", "disk"))
            parts.append(f"for which {asked:,.0f} MB were asked of the disk, and it gave {given:,.0f} MB")
        return "; ".join((", ".join(parts), *filter(None, (self.trial.verdict, self.gaps.verdict))))

    def rows(self, span_bytes: int, stride_bytes: int) -> Cheaper:
        """Which way shares of about such rows come out of the page cache."""
        kind = span_bytes.bit_length(), stride_bytes.bit_length()
        return self._rows.setdefault(kind, Cheaper("together", "apart"))

    def native(self, nbytes: int) -> Native | None:
        """What is compiled, for a piece of memory that is worth it; None: there is only Python."""
        if nbytes < NATIVE_BYTES:
            return None
        with self._compiling:
            return native()

    def note(self, path: Path, found: os.stat_result) -> None:
        """Remember what a file was when it was first looked at."""
        self._first_seen.setdefault(str(path), _version(found))

    def compare(self, path: Path, found: os.stat_result) -> None:
        """Raises `Refused` (changed-file) for a file that is not what it was."""
        before, now = self._first_seen[str(path)], _version(found)
        if before != now:
            raise changed(str(path), f"size, time and number {before}", now)

    def take_buffer(self) -> Buffer:
        """Memory for one read past the cache; give it back with `give_buffer`."""
        try:
            return self._spare.pop()
        except IndexError:
            return Buffer()

    def give_buffer(self, buffer: Buffer) -> None:
        self._spare.append(buffer)

    def take_scratch(self) -> memoryview:
        """Memory for rows out of the page cache, in use already; give it back with `give_scratch`."""
        try:
            return self._scratch.pop()
        except IndexError:
            return memoryview(bytearray(b"\1") * SCRATCH_BYTES)

    def give_scratch(self, scratch: memoryview) -> None:
        self._scratch.append(scratch)

    def close(self) -> None:
        """Give the memory of reads back."""
        self._spare.clear()
        self._scratch.clear()


class Buffer:
    """Huge pages, where the system gives them, or as much of small ones."""

    def __init__(self) -> None:
        area_bytes = BUFFER_BYTES + HUGE_PAGE_BYTES  # room to align
        self._area = mmap.mmap(-1, area_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._area))
        start = -address % HUGE_PAGE_BYTES
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._area.madvise(mmap.MADV_HUGEPAGE, start, BUFFER_BYTES)
        self.address = address + start
        self.bytes = memoryview(self._area)[start : start + BUFFER_BYTES]


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
        if source.has_shares:
            self._read_no_further()

    def read_into(self, offset_bytes: int, buffers: list[memoryview]) -> None:
        pending, source = buffers, self._source
        wanted = sum(view.nbytes for view in buffers)
        end, from_disk = offset_bytes + wanted, _disk_bytes()
        try:
            if source.method == "auto" and NO_WAIT:
                pending = self._from_cache(offset_bytes, pending)
            cold = sum(view.nbytes for view in pending)
            if cold:
                self._read_cold(end - cold, pending, cold, end)
        except OSError as error:
            raise unread(str(self.path), offset_bytes, wanted, str(error.strerror)) from error
        source.usage.add("disk", _disk_bytes() - from_disk)

    def read_rows(self, offset_bytes: int, target: memoryview, span_bytes: int, stride_bytes: int) -> None:
        """No byte between rows is delivered; what is near enough is read with them where that is sooner done."""
        count, source, from_disk = target.nbytes // span_bytes, self._source, _disk_bytes()
        offsets = range(offset_bytes, offset_bytes + count * stride_bytes, stride_bytes)
        try:
            done = self._rows_from_cache(offsets, target, span_bytes) if source.method == "auto" and NO_WAIT else 0
            source.usage.add("cached", done * span_bytes)
            each = max(1, LOCAL_SHAPE.chunk_bytes // stride_bytes)
            for at in range(done, count, each):  # which way is the better one may turn out meanwhile
                part = target[at * span_bytes : (at + each) * span_bytes]
                self._rows_from_disk(offsets[at : at + each], part, span_bytes)
        except OSError as error:
            raise unread(str(self.path), offset_bytes, target.nbytes, str(error.strerror)) from error
        source.usage.add("disk", _disk_bytes() - from_disk)

    def _rows_from_disk(self, offsets: range, target: memoryview, span: int) -> None:
        """Shares of rows with what is between them, or one by one, whichever is sooner done."""
        source, stride = self._source, offsets.step
        method, descriptor = self._cold_way()
        is_settled = source.method != "auto" or bool(source.trial.verdict)
        is_together = source.gaps.is_together(method, span, stride, is_settled)
        self._read_no_further()
        if is_together and span <= DIRECT_BYTES:
            asked = _in_blocks(offsets[0], offsets[-1] + span)
            with self._read_of(method, asked, target.nbytes):
                self._rows_together(descriptor, offsets, target, span)
        else:
            self._rows_apart(method, offsets, target, span)

    @contextmanager
    def _read_of(self, method: Method, asked: int, delivered: int) -> Iterator[None]:
        """`asked` bytes in one run, on whose time ways are judged."""
        source = self._source
        started_s = source.gaps.begin(method, asked)
        try:
            yield
        finally:
            ended_s = source.gaps.end(method, asked)
        source.usage.add(method, delivered)
        source.usage.add("asked", asked)
        if source.method == "auto":
            source.trial.took(method, asked, started_s, ended_s)

    def _read_no_further(self) -> None:
        """Have the system read what is asked for, and not what comes behind it."""
        self._source.has_shares = True
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def _cold_way(self) -> tuple[Method, int]:
        """How what the page cache lacks is read now, and the descriptor for it."""
        source = self._source
        method = source.trial.method() if source.method == "auto" else source.method
        direct = self._direct_descriptor() if method == "direct" else None
        return ("buffered", self._descriptor) if direct is None else ("direct", direct)

    def _rows_together(self, descriptor: int, offsets: range, target: memoryview, span: int) -> None:
        """Many rows by one read, with what is between them; their shares are copied from there."""
        stride, at = offsets.step, 0
        each = max(1, (DIRECT_BYTES - span) // stride + 1)
        buffer = self._source.take_buffer()
        try:
            for first in range(0, len(offsets), each):
                part = offsets[first : first + each]
                start, end = part[0] // BLOCK_BYTES * BLOCK_BYTES, part[-1] + span
                self._fill(descriptor, buffer, start, end)
                rows = target[at : at + len(part) * span]
                self._gather(buffer.address + part[0] - start, rows, span, stride)
                at += rows.nbytes
        finally:
            self._source.give_buffer(buffer)

    def _rows_apart(self, method: Method, offsets: range, target: memoryview, span: int) -> None:
        """One read a row; small ones through the cache, which has many of them under way at once."""
        source, is_alone = self._source, method == "direct" and span >= ALONE_BYTES
        source.gaps.begin_rows(len(offsets))
        try:
            done = 0 if is_alone else self._rows_through_cache(offsets, target, span)
            for row, offset in enumerate(offsets[done:], done):
                own = [target[row * span : (row + 1) * span]]
                (self._read_direct if is_alone else self._read_buffered)(offset, own, offset + span)
        finally:
            source.gaps.end_rows(len(offsets))
        source.usage.add("direct" if is_alone else "buffered", target.nbytes)
        source.usage.add("asked", sum(_in_blocks(offset, offset + span) for offset in offsets))

    def _rows_through_cache(self, offsets: range, target: memoryview, span: int) -> int:
        """How many rows were read; the rest is to come by itself."""
        compiled = self._source.native(target.nbytes)
        if compiled is not None:
            return compiled.read_rows(self._descriptor, offsets[0], target, span, offsets.step)
        for offset in offsets if hasattr(os, "posix_fadvise") else ():
            os.posix_fadvise(self._descriptor, offset, span, os.POSIX_FADV_WILLNEED)
        return 0

    def _fill(self, descriptor: int, buffer: Buffer, start: int, end: int) -> None:
        """Bytes [start, end) into the buffer, from a block's start on; what is read behind them is of no use."""
        done, wanted = 0, _in_blocks(start, end)
        while start + done < end:
            count = os.preadv(descriptor, [buffer.bytes[done:wanted]], start + done)
            done += count
            if count == 0 or (count % BLOCK_BYTES and start + done < end):  # that is where the file ends
                raise self._ended(end, end - start)

    def _gather(self, address: int, target: memoryview, span: int, stride: int) -> None:
        compiled = self._source.native(target.nbytes)
        if compiled is not None:
            compiled.gather(address, target, span, stride)
            return
        place = ctypes.addressof(ctypes.c_char.from_buffer(target))
        for row in range(target.nbytes // span):
            ctypes.memmove(place + row * span, address + row * stride, span)

    def _rows_from_cache(self, offsets: range, target: memoryview, span: int) -> int:
        """How many rows, from the first on, the page cache gave without waiting for the disk."""
        compiled, ways = self._source.native(target.nbytes), self._source.rows(span, offsets.step)
        if compiled is None:
            return self._rows_one_by_one(offsets, target, span)
        way, scratch, done = ways.way(), self._source.take_scratch(), 0
        before_s = time.thread_time()
        if way == "together":
            done = compiled.take_rows(self._descriptor, offsets[0], target, span, offsets.step, scratch)
        if done < len(offsets):
            done += compiled.try_rows(self._descriptor, offsets[done], target[done * span :], span, offsets.step)
        ways.took(way, done * span, time.thread_time() - before_s)
        self._source.give_scratch(scratch)
        return done

    def _rows_one_by_one(self, offsets: range, target: memoryview, span: int) -> int:
        descriptor, preadv, done = self._descriptor, os.preadv, 0
        try:
            for at, offset in zip(range(0, target.nbytes, span), offsets, strict=True):
                if preadv(descriptor, (target[at : at + span],), offset, NO_WAIT) != span:
                    break
                done += 1
        except OSError as error:
            if error.errno not in NOT_THERE:
                raise
        return done

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
            wanted = sum(view.nbytes for view in pending)
            compiled, there = self._source.native(wanted), wanted
            if compiled is not None:
                there = compiled.cached(self._descriptor, offset, wanted)
            if not there:
                return pending
            there_now = before(pending, there)
            if compiled is not None and _is_out_of_step(there_now[0], offset):
                count = self._out_of_step(compiled, offset, there_now[0])
            else:
                count = self._at_once(offset, there_now)
            if count == 0:
                return pending
            self._source.usage.add("cached", count)
            offset += count
            pending = after(pending, count)
        return pending

    def _out_of_step(self, compiled: Native, offset: int, target: memoryview) -> int:
        """By way of memory that is in step, or at once where the processor copies as fast between any places."""
        ways = self._source.out_of_step
        way, before_s = ways.way(), time.thread_time()
        by_scratch = way == "scratch"
        count = self._by_scratch(compiled, offset, target) if by_scratch else self._at_once(offset, [target])
        ways.took(way, count, time.thread_time() - before_s)
        return count

    def _by_scratch(self, compiled: Native, offset: int, target: memoryview) -> int:
        scratch = self._source.take_scratch()
        count = compiled.take(self._descriptor, offset, target, scratch)
        self._source.give_scratch(scratch)
        return count

    def _at_once(self, offset: int, buffers: list[memoryview]) -> int:
        """Fill the buffers, as far as the page cache has them, up to one that is better filled by itself."""
        at, together = offset, buffers[:1]
        for view in buffers[1:]:
            at += together[-1].nbytes
            if _is_out_of_step(view, at):
                break
            together.append(view)
        try:
            return os.preadv(self._descriptor, together, offset, NO_WAIT)
        except OSError as error:
            if error.errno in NOT_THERE:
                return 0
            raise

    def _read_cold(self, offset: int, pending: list[memoryview], nbytes: int, end: int) -> None:
        method, _ = self._cold_way()
        with self._read_of(method, _in_blocks(offset, end), nbytes):
            (self._read_direct if method == "direct" else self._read_buffered)(offset, pending, end)

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
        reads = -(-(end - offset) // DIRECT_BYTES)  # of about the same size: a short one takes nearly as long
        each = -(-(end - offset) // reads)
        try:
            while pending:
                start = offset // BLOCK_BYTES * BLOCK_BYTES
                stop = min(offset + each, end)
                self._fill(descriptor, buffer, start, stop)
                pending = _copy(buffer.address + offset - start, stop - offset, pending)
                offset = stop
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


def _is_out_of_step(target: memoryview, offset: int) -> bool:
    """Whether the kernel may copy slowly to this memory from `offset` of a file.

    On some processors it does where the two lie differently in lines of 32 bytes; a tensor's place in a file is what
    its header's length makes it, while in memory it begins with a line.
    """
    if target.nbytes < NATIVE_BYTES:
        return False
    return (ctypes.addressof(ctypes.c_char.from_buffer(target)) - offset) % STEP_BYTES != 0


def _disk_bytes() -> int:
    """What this thread had the disk read so far, pages ahead included; 0 where the system does not tell."""
    whose = getattr(resource, "RUSAGE_THREAD", None)
    return 0 if whose is None else resource.getrusage(whose).ru_inblock * 512


def _in_blocks(start: int, end: int) -> int:
    """Bytes of the blocks that hold [start, end)."""
    return -(-end // BLOCK_BYTES) * BLOCK_BYTES - start // BLOCK_BYTES * BLOCK_BYTES


def _version(found: os.stat_result) -> str:
    return f"{found.st_size}-{found.st_mtime_ns}-{found.st_ino}"
