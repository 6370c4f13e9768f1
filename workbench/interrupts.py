"""Interrupts for the command line: they arrive in the background of a shell too, and never in the middle of an import.

Libraries in C lose an interrupt that comes while they define their types, or crash; half a report is none. Python
drops one that comes while a finaliser runs: it is raised again. No torch.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

RETRY_S = 0.02
LONGEST_S = 30.0  # an import that hangs can be interrupted after all
WHOLE = "firstlight.workbench.outlet"  # the module that writes reports


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """`KeyboardInterrupt` of SIGINT and SIGTERM at the first moment at which nothing is imported or half written.

    What `Early` heard before is raised at once; only the main thread is told.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    since_s: list[float] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        since_s.append(time.monotonic())
        if not _is_busy(frame) or since_s[-1] - since_s[0] > LONGEST_S:
            raise KeyboardInterrupt
        _again(number)

    def ignored(error: sys.UnraisableHookArgs) -> None:
        if error.exc_type is KeyboardInterrupt:
            _again(signal.SIGINT)
        else:
            reports(error)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    reports, sys.unraisablehook = sys.unraisablehook, ignored
    try:
        if getattr(before[signal.SIGINT], "heard", False):
            raise KeyboardInterrupt
        yield
    finally:
        sys.unraisablehook = reports
        for number, handler in before.items():
            signal.signal(number, handler)


def _again(number: int) -> None:
    """The signal once more, a little later."""
    later = threading.Timer(RETRY_S, signal.pthread_kill, (threading.main_thread().ident, number))
    later.daemon = True
    later.start()


def _is_busy(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib") or frame.f_globals.get("__name__") == WHOLE:
            return True
        frame = frame.f_back
    return False
