"""Going on after cut and stalled connections: what has arrived stays, the rest is asked for again, later and later."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from firstlight.engine.weights.sources.base import Usage, scatter, unread


@dataclass(frozen=True, slots=True)
class Retry:
    """`attempts` in a row without a byte are the end; pauses double from `first_s` to `most_s`.

    A connection on which nothing comes for `stall_s` is cut by us.
    """

    attempts: int = 6
    first_s: float = 0.2
    most_s: float = 10.0
    stall_s: float = 30.0

    def pause_s(self, failures: int, asked_s: float | None = None) -> float:
        """Before the next attempt; `asked_s` is what the server wants, followed within bounds."""
        grown = min(self.most_s, self.first_s * 2 ** (failures - 1)) * random.uniform(0.7, 1.0)
        return grown if asked_s is None else max(grown, min(asked_s, self.most_s))


class Interrupted(Exception):
    """An attempt ended early for a reason that may pass; `pause_s` is what the server asked to wait."""

    def __init__(self, reason: str, pause_s: float | None = None) -> None:
        super().__init__(reason)
        self.pause_s = pause_s


@dataclass(slots=True)
class Target:
    """A range that is being filled: from `offset_bytes` on, `left` bytes into `pending`."""

    offset_bytes: int
    pending: list[memoryview]
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = sum(view.nbytes for view in self.pending)

    def accept(self, part: memoryview) -> None:
        """What came next; more than was asked for is an interruption, since nothing says which of it is meant."""
        if part.nbytes > self.left:
            raise Interrupted(f"{part.nbytes - self.left} bytes more than asked for")
        self.pending = scatter(part, self.pending)
        self.offset_bytes += part.nbytes
        self.left -= part.nbytes


def fill(target: Target, attempt: Callable[[Target], None], retry: Retry, usage: Usage, file: str) -> None:
    """Carry out attempts until the target is full; `Refused` (read-failed) when they come to nothing."""
    failures = 0
    while target.left:
        before = target.left
        pause_s = None
        try:
            attempt(target)
            reason = "the answer ended early"
        except Interrupted as error:
            reason, pause_s = str(error), error.pause_s
        usage.add("requests")
        usage.add("fetched", before - target.left)
        if not target.left:
            return
        failures = 1 if target.left < before else failures + 1
        if failures >= retry.attempts:
            raise unread(
                file, target.offset_bytes, target.left, f"{retry.attempts} attempts failed, the last: {reason}"
            )
        usage.add("retries")
        time.sleep(retry.pause_s(failures, pause_s))
