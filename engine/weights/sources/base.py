"""The interface of every source of bytes: names, sizes, versions, and range reads into given memory."""

from __future__ import annotations

import errno
import io
import os
import stat
import threading
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Protocol

from typing_extensions import Buffer

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal

STREAM_BYTES = 256 << 10  # of a header that are read at once: most are shorter


@dataclass(frozen=True, slots=True)
class FileStat:
    """Size of a file, and what changes when its contents do (an etag, a time); None where nothing tells."""

    nbytes: int
    version: str | None


@dataclass(frozen=True, slots=True)
class ReadShape:
    """How a source is best read: requests of at most `chunk_bytes`, `in_flight` at once.

    Two ranges with at most `gap_bytes` between them are one request; where there is little to read, requests become
    smaller, down to `smallest_bytes`, so that all readers end together.
    """

    chunk_bytes: int
    smallest_bytes: int
    gap_bytes: int
    in_flight: int


class OpenFile(Protocol):
    """One file of a source, as long as somebody reads it; used by many threads."""

    def read_into(self, offset_bytes: int, buffers: list[memoryview]) -> None:
        """Fill the buffers one after another with what starts at `offset_bytes`; `Refused` names file and range."""

    def read_rows(self, offset_bytes: int, target: memoryview, span_bytes: int, stride_bytes: int) -> None:
        """Fill `target` with `span_bytes` of every `stride_bytes` from `offset_bytes` on, one behind the other."""

    def check(self) -> None:
        """Raises `Refused` (changed-file) if what was read need not be of one version."""

    def stop(self) -> None:
        """Nobody wants what is being read any longer: reads that wait for it end soon, by an error."""

    def close(self) -> None: ...


class ByteSource(Protocol):
    """Where the files of a checkpoint are. `url` is how it is shown: never with credentials in it."""

    url: str
    usage: Usage

    @property
    def shape(self) -> ReadShape:
        """May change with what the source turns out to be like."""

    def names(self) -> tuple[str, ...]:
        """All files, sorted."""

    def stat(self, name: str) -> FileStat:
        """Raises `Refused` (missing-shard) for a file that is not there."""

    def open(self, name: str) -> OpenFile: ...

    def describe(self) -> str:
        """In words how bytes came, for reports."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Shares of equal rows of a file: `span_bytes` of every `stride_bytes`, from `offset_bytes` on, into `target`."""

    file: str
    offset_bytes: int
    target: memoryview
    span_bytes: int
    stride_bytes: int

    @property
    def count(self) -> int:
        return self.target.nbytes // self.span_bytes

    def part(self, first: int, count: int) -> Rows:
        """Some of the rows."""
        share = self.target[first * self.span_bytes : (first + count) * self.span_bytes]
        return replace(self, offset_bytes=self.offset_bytes + first * self.stride_bytes, target=share)


class Usage:
    """Bytes and events by kind, counted by many threads at once."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, kind: str, count: int = 1) -> None:
        if count:
            with self._lock:
                self._counts[kind] += count

    def __getitem__(self, kind: str) -> int:
        return self._counts[kind]

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


def ended_early(file: str, size: int, end: int, wanted: int) -> Refused:
    """The file ends at `size`, while `wanted` bytes up to `end` are needed."""
    return Refused(
        fatal(
            "truncated-shard",
            f"the file ends at byte {size}, while {wanted} bytes from byte {end - wanted} on are needed",
            file=file,
            expected=f"at least {end} bytes",
            found=f"{size} bytes",
            next=f"fetch bytes {size} to {end - 1} of the file again",
        )
    )


def changed(file: str, expected: str, found: str) -> Refused:
    """The file is not the one whose header was read."""
    return Refused(
        fatal(
            "changed-file",
            f"{file} changed while it was being read: what was loaded is of two versions",
            file=file,
            expected=expected,
            found=found,
            next="load again once nobody writes to it",
        )
    )


def absent(file: str) -> Refused:
    """There is no such file."""
    return Refused(
        fatal(
            "missing-shard",
            f"{file} is not there",
            file=file,
            expected="a file of the checkpoint",
            found="absent",
            next="put it back, or scan the checkpoint to see what else is missing",
        )
    )


def unkept(file: str, error: OSError) -> Refused:
    """What came from afar could not be written beside it."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    where = "set FIRSTLIGHT_CACHE to another directory"
    return Refused(
        fatal(
            "not-available",
            f"{file} cannot be written: {error.strerror}",
            file=file,
            expected="room for the weights that are kept" if is_full else "a directory that may be written",
            found=str(error.strerror),
            next=f"make room there, {where}, or load without --keep" if is_full else f"allow writing there, or {where}",
        )
    )


def unread(file: str, offset_bytes: int, nbytes: int, reason: str) -> Refused:
    """The system could not read a range."""
    return Refused(
        fatal(
            "read-failed",
            f"the system could not read {nbytes} bytes at {offset_bytes}: {reason}",
            file=file,
            next="check permissions, the health of the storage and, where it is far away, the network",
        )
    )


def out_of_patience(file: str, offset_bytes: int, nbytes: int, found: str) -> Refused:
    """A source far away gave next to nothing of a range for as long as was waited for it."""
    return Refused(
        fatal(
            "read-failed",
            f"bytes {offset_bytes} to {offset_bytes + nbytes - 1} could not be read: {found}",
            file=file,
            expected=f"{nbytes:,} bytes from byte {offset_bytes} on",
            found=found,
            next="check the network and the server; --patience SECONDS tries for longer, --keep goes on from what came",
        )
    )


def after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the buffers after their first `count` bytes were filled."""
    for index, view in enumerate(buffers):
        if count < view.nbytes:
            return [view[count:], *buffers[index + 1 :]]
        count -= view.nbytes
    return []


def before(buffers: list[memoryview], count: int) -> list[memoryview]:
    """The first `count` bytes of the buffers."""
    found: list[memoryview] = []
    for view in buffers:
        if count <= 0:
            break
        found.append(view[:count])
        count -= view.nbytes
    return found


def scatter(part: memoryview, buffers: list[memoryview]) -> list[memoryview]:
    """Copy `part` into the buffers, one after another; what is left of them. Bytes beyond them are an error."""
    taken = 0
    for index, view in enumerate(buffers):
        count = min(view.nbytes, part.nbytes - taken)
        view[:count] = part[taken : taken + count]
        taken += count
        if count < view.nbytes:
            return [view[count:], *buffers[index + 1 :]]
    assert taken == part.nbytes, f"{part.nbytes - taken} bytes more than asked for"
    return []


def read_rows_at_once(file: OpenFile, offset: int, target: memoryview, span: int, stride: int, gap_bytes: int) -> None:
    """Shares of rows where requests cost more than bytes: near ones by one, what is between is thrown away."""
    count = target.nbytes // span
    if stride - span > gap_bytes:
        for row in range(count):
            file.read_into(offset + row * stride, [target[row * span : (row + 1) * span]])
        return
    whole = bytearray((count - 1) * stride + span)
    file.read_into(offset, [memoryview(whole)])
    for row in range(count):
        target[row * span : (row + 1) * span] = memoryview(whole)[row * stride : row * stride + span]


class SourcePath:
    """A file of a source, as far as whoever reads a header needs a path: name, size, and a stream to read from."""

    def __init__(self, source: ByteSource, name: str) -> None:
        self.name = name
        self._source = source

    def stat(self) -> os.stat_result:
        nbytes = self._source.stat(self.name).nbytes
        return os.stat_result((stat.S_IFREG | 0o444, 0, 0, 1, 0, 0, nbytes, 0, 0, 0))

    def open(self, mode: str = "rb") -> BinaryIO:
        assert mode == "rb", mode
        return io.BufferedReader(_Stream(self._source, self.name), STREAM_BYTES)

    def is_dir(self) -> bool:
        return False


AnyPath = Path | SourcePath


class _Stream(io.RawIOBase):
    """A file of a source from its start on."""

    def __init__(self, source: ByteSource, name: str) -> None:
        self._file = source.open(name)
        self._size = source.stat(name).nbytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(view.nbytes, self._size - self._at))
        if count:
            self._file.read_into(self._at, [view[:count]])
        self._at += count
        return count

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
