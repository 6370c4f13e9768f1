"""Exceptions that a user can meet; each carries findings with the file, expected, found and the next action."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable

from firstlight.engine.findings import Finding, fatal

FULL = (errno.ENOSPC, errno.EDQUOT)
ABSENT = (errno.ENOENT, errno.ENOTDIR)


class FirstlightError(Exception):
    """Base of all errors Firstlight raises on purpose."""


class Refused(FirstlightError):
    """The input or request cannot be used; nothing was started. Exit status 2.

    `findings` holds at least one `Finding`; the message is the first finding in words.
    """

    def __init__(self, findings: Finding | Iterable[Finding]) -> None:
        self.findings: tuple[Finding, ...] = (findings,) if isinstance(findings, Finding) else tuple(findings)
        super().__init__("\n".join(str(finding) for finding in self.findings))


class Occupied(Refused):
    """Another process is using the run directory; its records stay untouched."""


class RankFailure(FirstlightError):
    """A rank died, stopped answering or raised; names the rank and the phase it was in.

    `rank` is None if no single rank is at fault: the supervisor ended, or a deadline for all ranks passed. `log`: the
    file that says more, where there is one on this machine.
    """

    def __init__(self, rank: int | None, phase: str, reason: str, log: str | None = None) -> None:
        self.rank = rank
        self.phase = phase
        self.reason = reason
        self.log = log
        who = "the engine" if rank is None else f"rank {rank}"
        super().__init__(f"{who} failed in phase '{phase}': {reason}")


def unwritable(
    file: str | os.PathLike[str],
    error: OSError,
    *,
    expected: str = "a folder that exists and may be written",
    room: str = "room on the disk",
    elsewhere: str = "",
) -> Refused:
    """The refusal of a path that cannot be written: `not-found` if its folder does not exist, else `not-available`.

    `expected` of the place, or `room` where the disk is full; `elsewhere` is what to do other than to make room.
    """
    is_full = error.errno in FULL
    elsewhere = elsewhere or ("name a place on another disk" if is_full else "name another file")
    return Refused(
        fatal(
            "not-found" if error.errno in ABSENT else "not-available",
            f"{os.fspath(file)} cannot be written: {error.strerror or error}",
            file=os.fspath(file),
            expected=room if is_full else expected,
            found=error.strerror or str(error),
            next=f"make room, or {elsewhere}" if is_full else elsewhere,
        )
    )
