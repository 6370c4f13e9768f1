"""Waiting for a state, never for a time: until it is there, with patience for a machine that does much else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import psutil

Found = TypeVar("Found")
PATIENCE_S = 120.0


def until(
    look: Callable[[], Found], said: str = "it did not happen", within_s: float = PATIENCE_S, every_s: float = 0.02
) -> Found:
    """What `look` returns as soon as that is true; fails with `said` after `within_s`."""
    until_s = time.monotonic() + within_s
    while not (found := look()):
        assert time.monotonic() < until_s, said
        time.sleep(every_s)
    return found


def alive(pids: Iterable[int]) -> list[int]:
    """Those processes that run; one that has ended and that nobody has collected does not."""
    return [pid for pid in pids if _runs(pid)]


def gone(pids: Iterable[int], said: str = "processes are left", within_s: float = PATIENCE_S) -> None:
    """Waits until all these processes have ended."""
    left = list(pids)
    until(lambda: not alive(left), said, within_s)


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
