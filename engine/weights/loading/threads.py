"""Waiting for threads of our own to end, whatever their start ended in."""

from __future__ import annotations

import threading
from contextlib import suppress


def await_end(worker: threading.Thread) -> None:
    """Return when a thread has ended, at once where an interrupt came in the middle of its start.

    Such a thread may begin later or never, and Python joins neither. Whoever stops it has said so before: it ends by
    itself.
    """
    with suppress(RuntimeError):
        worker.join()
