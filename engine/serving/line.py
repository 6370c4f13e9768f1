"""The line between a rank and its supervisor: messages as lines of JSON over a socket pair. No torch.

Its end is a message too: when the supervisor is gone, a rank leaves at once.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import msgspec

from firstlight.engine.serving.health import Failure, Status


class Note(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message: a rank says its url, status or failure; a supervisor the store's port or who failed."""

    url: str | None = None
    status: Status | None = None
    failure: Failure | None = None
    store_port: int | None = None


class Line:
    """One end of the line. `send` from any thread; one reader."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._buffer = b""

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, note: Note) -> bool:
        """False when nobody is there any more."""
        try:
            with self._lock:
                self._connection.sendall(msgspec.json.encode(note) + b"\n")
        except OSError:
            return False
        return True

    def read(self) -> tuple[Note, ...] | None:
        """What has come; waits for something if nothing has. None: the other end is gone."""
        try:
            data = self._connection.recv(1 << 16)
        except OSError:
            return None
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return tuple(msgspec.json.decode(line, type=Note) for line in lines if line)

    def notes(self) -> Iterator[Note]:
        """Notes until the other end is gone."""
        while (came := self.read()) is not None:
            yield from came

    def listen(self, take: Callable[[Note], None], gone: Callable[[], None]) -> None:
        """Read in a daemon thread."""

        def run() -> None:
            for note in self.notes():
                take(note)
            gone()

        threading.Thread(target=run, name="line", daemon=True).start()

    def close(self) -> None:
        self._connection.close()


def line_pair() -> tuple[Line, Line]:
    """Both ends of a new line."""
    ours, theirs = socket.socketpair()
    return Line(ours), Line(theirs)
