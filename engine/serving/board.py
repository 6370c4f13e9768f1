"""The engine's statistics where other processes of its machine read them without asking: a small file, mapped by both.

Whoever takes readings ten times a second would otherwise ask rank 0 each time, in the interpreter that steps the
engine. Here the engine writes now and then what it has counted anyway, and a reader costs it nothing. No torch.

    twice: process (8 bytes) | number (8) | length (4) | crc32 of the payload (4) | `EngineStats` as MessagePack

The two places are written in turn, so that an engine which the system takes off its core in the middle of a payload,
for however long, leaves the one before whole; the checksum says which are. What a process that is gone has left behind
counts for nothing.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from firstlight.engine.serving.stats import EngineStats

BOARD = "stats.board"
SIZE_BYTES = 256 << 10  # of a place: a sampled step of thousands of blocks
PLACES = (0, SIZE_BYTES)
PERIOD_S = 0.05
LOOKS = 5  # a reader that the system stops between head and payload may find both places written anew
_HEAD = struct.Struct("<QQII")
_NOBODY = 0


class Board:
    """The engine's side: `offer` writes at most every `PERIOD_S`, `show` at once."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._map = _mapped(Path(path), write=True)
        self._shown_s = 0.0
        self._number = 0

    def offer(self, stats: Callable[[], EngineStats]) -> None:
        """Writes what `stats` returns if the last time is long enough ago; else it is not even called."""
        if time.monotonic() - self._shown_s >= PERIOD_S:
            self.show(stats())

    def show(self, stats: EngineStats) -> None:
        payload = msgspec.msgpack.encode(stats)
        if len(payload) > SIZE_BYTES - _HEAD.size:
            payload = msgspec.msgpack.encode(msgspec.structs.replace(stats, sample=None))
        self._number += 1
        place = PLACES[self._number % 2]
        self._map[place + _HEAD.size : place + _HEAD.size + len(payload)] = payload
        _HEAD.pack_into(self._map, place, os.getpid(), self._number, len(payload), zlib.crc32(payload))
        self._shown_s = time.monotonic()

    def close(self) -> None:
        """Nothing that stands there is true any more."""
        for place in PLACES:
            _HEAD.pack_into(self._map, place, _NOBODY, 0, 0, 0)
        self._map.close()


class BoardReader:
    """The other side; `path` need not exist yet."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._map: mmap.mmap | None = None
        self._inode = 0

    def read(self) -> EngineStats | None:
        """What was written last by an engine that lives; None without one, and for what another version wrote."""
        board = self._open()
        if board is None:
            return None
        for _ in range(LOOKS):
            heads = [(_HEAD.unpack_from(board, place), place) for place in PLACES]
            living = [
                (number, length, check, place) for (process, number, length, check), place in heads if _lives(process)
            ]
            if not living:
                return None
            for _number, length, check, place in sorted(living, reverse=True):
                payload = board[place + _HEAD.size : place + _HEAD.size + min(length, SIZE_BYTES - _HEAD.size)]
                if zlib.crc32(payload) == check:
                    try:
                        return msgspec.msgpack.decode(payload, type=EngineStats)
                    except msgspec.MsgspecError:
                        return None
        return None

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None

    def _open(self) -> mmap.mmap | None:
        """The file as it is named now: an engine that was started again made another."""
        try:
            inode = self.path.stat().st_ino
            if self._map is None or inode != self._inode:
                self.close()
                self._map, self._inode = _mapped(self.path, write=False), inode
        except (OSError, ValueError):  # absent, or too short to be one
            self.close()
        return self._map


def _lives(process: int) -> bool:
    """Whether there is such a process; psutil asks for more than that, and takes as long as all the rest."""
    if process == _NOBODY:
        return False
    try:
        os.kill(process, 0)
    except PermissionError:  # somebody else's
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def open_board(directory: str | os.PathLike[str] | None) -> Board | None:
    """A board in a host's directory; None where there is no directory, or no room in it: readings then come by HTTP."""
    if directory is None:
        return None
    try:
        return Board(Path(directory) / BOARD)
    except OSError:
        return None


def _mapped(path: Path, write: bool) -> mmap.mmap:
    """The file's bytes; one that is written is made anew, for this user alone."""
    if not write:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 2 * SIZE_BYTES, access=mmap.ACCESS_READ)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "r+b") as file:
        file.write(bytes(2 * SIZE_BYTES))  # a disk that is full says so here, not when a page is written
        file.flush()
        return mmap.mmap(file.fileno(), 2 * SIZE_BYTES)
