"""Exceptions a user can meet: each carries findings that name the file, expected, found and the next action."""

from __future__ import annotations

from collections.abc import Iterable

from firstlight.engine.findings import Finding


class FirstlightError(Exception):
    """Base of all errors Firstlight raises on purpose."""


class Refused(FirstlightError):
    """The input or the wish cannot be honoured; nothing was started. Exit status 2.

    `findings` holds at least one `Finding`; the message is the first finding in words.
    """

    def __init__(self, findings: Finding | Iterable[Finding]) -> None:
        self.findings: tuple[Finding, ...] = (findings,) if isinstance(findings, Finding) else tuple(findings)
        super().__init__("\n".join(str(finding) for finding in self.findings))


class RankFailure(FirstlightError):
    """A rank died, stopped answering or raised; names the rank and the phase it was in."""

    def __init__(self, rank: int, phase: str, reason: str) -> None:
        self.rank = rank
        self.phase = phase
        self.reason = reason
        super().__init__(f"rank {rank} failed in phase '{phase}': {reason}")
