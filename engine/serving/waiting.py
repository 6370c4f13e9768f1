"""Waiting for a state, and no longer than a while: until something is so, and which processes still run. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import psutil

Found = TypeVar("Found")
PERIOD_S = 0.02


def until(look: Callable[[], Found], within_s: float, every_s: float = PERIOD_S) -> Found:
    """What `look` returns as soon as that is true or, after `within_s`, what it returned last.

    It is asked once at least, and anew every `every_s`, in this thread.
    """
    until_s = time.monotonic() + within_s
    while not (found := look()) and time.monotonic() < until_s:
        time.sleep(every_s)
    return found


def running(pids: Iterable[int]) -> list[int]:
    """Those processes that run; one that has ended and that nobody has collected does not."""
    return [pid for pid in pids if _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
