"""SIGINT for the command line: it arrives in the background of a shell too, and never in the middle of an import.

Libraries in C lose an interrupt that comes while they define their types, or crash. No torch.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

RETRY_S = 0.02
LONGEST_S = 30.0  # an import that hangs can be interrupted after all


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """`KeyboardInterrupt` at the first moment at which nothing is being imported; only the main thread is told."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    since_s: list[float] = []

    def interrupt(_number: int, frame: FrameType | None) -> None:
        since_s.append(time.monotonic())
        if not _is_importing(frame) or since_s[-1] - since_s[0] > LONGEST_S:
            raise KeyboardInterrupt
        later = threading.Timer(RETRY_S, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        later.daemon = True
        later.start()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
