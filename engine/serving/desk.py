"""Rank 0's side of HTTP: what the server may ask before there is an engine, while there is one, and after it failed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from firstlight.engine.serving.api import Health
from firstlight.engine.serving.health import Beat, Failure, Pulse
from firstlight.engine.serving.options import HostOptions

if TYPE_CHECKING:
    from firstlight.engine.serving.runtime import Engine


class Desk:
    """Holds the engine once it is there. `open` starts the HTTP server in a thread; `beats` are the ranks' latest."""

    def __init__(self, pulse: Pulse, options: HostOptions) -> None:
        self.pulse = pulse
        self.options = options
        self.engine: Engine | None = None
        self.beats: tuple[Beat, ...] = ()
        self._failure: Failure | None = None
        self._stop: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None

    def health(self) -> Health:
        """How the engine is, from its first moment on."""
        if self.engine is not None:
            return msgspec.structs.replace(self.engine.health(), ranks=self.beats)
        return Health(
            status="starting" if self._failure is None else "failed",
            stage=self.pulse.stage,
            stages=tuple(self.pulse.stages),
            done=self.pulse.done,
            total=self.pulse.total,
            failure=self._failure,
            ranks=self.beats,
        )

    def fail(self, failure: Failure) -> None:
        """From now on health is bad, and running requests end with the reason."""
        self._failure = self._failure or failure
        if self.engine is not None:
            self.engine.fail(failure)

    def open(self, opened: Callable[[str], None], refused: Callable[[Exception], None]) -> None:
        """Import and start the server without holding up the caller; `opened` gets its url, or `refused` the reason.

        Whatever the reason, it is told: who waits for the url of a server that cannot be would wait for ever.
        """

        def run() -> None:
            from firstlight.engine.serving.server import HttpServer

            try:
                server = HttpServer(self)
            except Exception as error:  # noqa: BLE001 - the thread ends here
                refused(error)
                return
            self._stop = server.stop
            opened(server.url)
            server.run()

        self._thread = threading.Thread(target=run, name="http", daemon=True)
        self._thread.start()

    def close(self, grace_s: float = 5.0) -> None:
        """Let running responses end, then stop listening."""
        if self._stop is not None and self._thread is not None:
            self._stop()
            self._thread.join(grace_s)
