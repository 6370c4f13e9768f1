"""How much memory this process may use: the machine's, within the limits of containers and jobs. No torch.

A container or a job of a scheduler is a control group with a limit of its own, within those of the groups it lies in;
whoever takes more is killed, however much the machine has. Both versions of control groups are read (Linux documents
them as cgroup-v1/memory.rst and cgroup-v2.rst). Copies of files in a group's memory go before anybody is killed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")


class Limit(NamedTuple):
    """The memory limit of a control group in bytes, and how much of it is used and not reclaimable."""

    most_bytes: int
    taken_bytes: int


class _Files(NamedTuple):
    """Names of the memory files in one version of control groups."""

    most: str
    taken: str
    copies: tuple[str, ...]  # of files, lines of memory.stat


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_V2 = _Files("memory.max", "memory.current", ("inactive_file", "active_file"))


def memory_bytes() -> int:
    """Total memory in bytes: the machine's, or the smallest limit of its control groups."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min((whole, *(limit.most_bytes for limit in limits())))


def available_bytes() -> int | None:
    """Memory in bytes that this process can still allocate: MemAvailable within every limit; None if unknown."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", MEMINFO.read_text()) if MEMINFO.exists() else None
    free = [max(0, limit.most_bytes - limit.taken_bytes) for limit in limits()]
    return min((*((int(found[1]) * 1024,) if found else ()), *free), default=None)


def limits(groups: Path = GROUPS, own: Path = OWN_GROUPS) -> Iterator[Limit]:
    """The limits of all control groups that this process is in, from its own outwards."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _above(groups, path, _V2)
            yield from _above(groups / "unified", path, _V2)
        elif "memory" in controllers.split(","):
            yield from _above(groups / "memory", path, _V1)


def _above(top: Path, path: str, files: _Files) -> Iterator[Limit]:
    """Limits of a control group and its ancestors. In a container the path may be the host's and the group the root."""
    names = [name for name in path.split("/") if name and name != ".."]
    for depth in range(len(names), -1, -1):
        group = top.joinpath(*names[:depth])
        try:
            most = (group / files.most).read_text().strip()
            if most != "max":
                taken = int((group / files.taken).read_text())
                yield Limit(int(most), max(0, taken - _copies_bytes(group, files)))
        except (OSError, ValueError):  # none of it is there, or it ends just now
            continue


def _copies_bytes(group: Path, files: _Files) -> int:
    """Page cache in a group's memory, in bytes, which is reclaimed under pressure."""
    rows = (row.split() for row in (group / "memory.stat").read_text().splitlines())
    return sum(int(row[1]) for row in rows if row[0] in files.copies)
