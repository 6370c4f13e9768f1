"""What a run is doing now: the rung that has begun and not ended, and whether the process that does it still lives."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

import msgspec

SAME_BIRTH_S = 0.1  # clocks of a process are told in steps


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """A rung that has begun: since when (s since 1970), by which process, born when, of which place.

    `ended`: why it ended without a report, empty as long as it has not. Numbers of processes mean something within
    their place alone, which is a machine since its last boot, and within it a container.
    """

    verb: str
    began_s: float
    place: str
    pid: int
    born_s: float
    ended: str = ""

    @classmethod
    def here(cls, verb: str) -> Work:
        """A rung that this process begins now."""
        return cls(verb=verb, began_s=time.time(), place=_place(), pid=os.getpid(), born_s=_born_s(os.getpid()) or 0.0)

    @property
    def is_mine(self) -> bool:
        """Whether this process does it."""
        return self.pid == os.getpid() and self.place == _place()

    @property
    def lives(self) -> bool | None:
        """Whether who does it is still there: this very process, not another of its number; None: it is elsewhere."""
        if self.place != _place():
            return None
        born_s = _born_s(self.pid)
        return born_s is not None and abs(born_s - self.born_s) <= SAME_BIRTH_S


def _place() -> str:
    """Where process numbers have one meaning."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # where the system does not say, the name has to do
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return " ".join(parts)


def _born_s(pid: int) -> float | None:
    """When a process began, in seconds since the boot; None if there is none that lives."""
    import psutil

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return float(process.create_time() - psutil.boot_time())
    except psutil.NoSuchProcess:
        return None
