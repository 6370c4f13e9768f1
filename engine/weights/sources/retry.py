"""Resumes broken or stalled transfers: bytes that arrived are kept, the rest is requested again with backoff.

How long that is tried while no byte comes is the patience; whoever gives up a load ends what is being tried at once.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from firstlight.engine.weights.sources.base import Usage, out_of_patience, scatter

PATIENCE_S = 8.0
Arrived = Callable[[int], None]  # is told how many bytes of a range are there, from its start on
LEAST_BYTES = 64 << 10  # that renew it: a server that gives a few and breaks off, again and again, would never end


@dataclass(frozen=True, slots=True)
class Retry:
    """`patience_s` without progress are the end, though not before `attempts`; pauses double up to `most_s`.

    A connection on which nothing comes for `stall_s` is cut by us.
    """

    attempts: int = 3
    patience_s: float = PATIENCE_S
    first_s: float = 0.2
    most_s: float = 10.0
    stall_s: float = 30.0

    def pause_s(self, failures: int, asked_s: float | None = None) -> float:
        """Before the next attempt; `asked_s` is what the server wants, followed within bounds."""
        grown = min(self.most_s, self.first_s * 2.0 ** min(failures - 1, 30)) * random.uniform(0.7, 1.0)
        return grown if asked_s is None else max(grown, min(asked_s, self.most_s))


class Patience:
    """What is left of it, from the last progress on."""

    def __init__(self, retry: Retry, stop: threading.Event | None = None) -> None:
        """`stop` is set by whoever wants no more of it."""
        self.failures = self.gained_bytes = 0
        self._retry = retry
        self._stop = stop or threading.Event()
        self._since_s = time.monotonic()

    @property
    def is_stopped(self) -> bool:
        return self._stop.is_set()

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._since_s

    def gain(self, nbytes: int) -> None:
        """Bytes came."""
        self.gained_bytes += nbytes
        if self.gained_bytes >= LEAST_BYTES:
            self.failures = self.gained_bytes = 0
            self._since_s = time.monotonic()

    def ends(self) -> bool:
        """Another attempt failed; whether that was the last one."""
        self.failures += 1
        return self.is_stopped or (self.failures >= self._retry.attempts and self.waited_s >= self._retry.patience_s)

    def pause(self, asked_s: float | None) -> None:
        """Wait before the next attempt, no longer than there is patience for it, and not at all once stopped."""
        pause_s = self._retry.pause_s(self.failures, asked_s)
        if self.failures >= self._retry.attempts:  # the last one comes when patience ends, not after it
            pause_s = min(pause_s, max(0.0, self._retry.patience_s - self.waited_s))
        self._stop.wait(pause_s)


class Pace:
    """Whether what comes on one connection comes fast enough to go on with it: bytes that drip would never end."""

    def __init__(self, retry: Retry) -> None:
        self._most_s = max(retry.stall_s, retry.patience_s)
        self._since_s = time.monotonic()
        self._nbytes = 0

    def came(self, nbytes: int) -> None:
        """Raises `Interrupted` when fewer than `LEAST_BYTES` came for longer than any silence may last."""
        self._nbytes += nbytes
        taken_s = time.monotonic() - self._since_s
        if self._nbytes >= LEAST_BYTES:
            self._nbytes, self._since_s = 0, time.monotonic()
        elif taken_s > self._most_s:
            raise Interrupted(f"{self._nbytes:,} bytes in {taken_s:.1f} s")


class Interrupted(Exception):
    """An attempt ended early for a reason that may pass; `pause_s` is what the server asked to wait."""

    def __init__(self, reason: str, pause_s: float | None = None) -> None:
        super().__init__(reason)
        self.pause_s = pause_s


@dataclass(slots=True)
class Target:
    """A range that is being filled: from `offset_bytes` on, `left` bytes of `whole` into `pending`."""

    offset_bytes: int
    pending: list[memoryview]
    arrived: Arrived | None = None
    left: int = field(init=False)
    whole: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.whole = sum(view.nbytes for view in self.pending)

    def accept(self, part: memoryview) -> None:
        """What came next; more than was asked for is an interruption, since nothing says which of it is meant."""
        if part.nbytes > self.left:
            raise Interrupted(f"{part.nbytes - self.left} bytes more than asked for")
        self.pending = scatter(part, self.pending)
        self.offset_bytes += part.nbytes
        self.left -= part.nbytes
        if self.arrived is not None:
            self.arrived(self.whole - self.left)


def fill(
    target: Target,
    attempt: Callable[[Target], None],
    retry: Retry,
    usage: Usage,
    file: str,
    stop: threading.Event | None = None,
) -> None:
    """Carry out attempts until the target is full; `Refused` (read-failed) when they come to nothing or are stopped."""
    patience = Patience(retry, stop)
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
        patience.gain(before - target.left)
        if patience.ends():
            tried = f"{patience.failures} attempts in {patience.waited_s:.1f} s gave {patience.gained_bytes:,} bytes"
            raise out_of_patience(file, target.offset_bytes, target.left, f"{tried}, the last: {reason}")
        usage.add("retries")
        patience.pause(pause_s)
