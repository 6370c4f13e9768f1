"""How far a rung is: one call from the work, any number of listeners (events of the run, a live view, a widget)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from firstlight.workbench.events import ProgressEvent

Listener = Callable[[ProgressEvent], None]


@dataclass
class Progress:
    """What rungs call while they work: `progress("read", done, total, "B")`. Without listeners nearly free.

    Calls that come faster than `period_s` within one phase are left out, except the first and the last (done == total),
    and so are calls that say what the one before them said.
    """

    rung: str = ""
    listeners: tuple[Listener, ...] = ()
    period_s: float = 0.05
    _last_s: dict[tuple[str, str], float] = field(default_factory=dict)
    _said: list[tuple[str, float, float | None, str]] = field(default_factory=list)

    def __call__(
        self, phase: str, done: float = 0.0, total: float | None = None, unit: str = "", detail: str = ""
    ) -> None:
        if not self.listeners:
            return
        said = phase, done, total, detail
        if self._said == [said]:
            return
        now_s = time.time()
        key = (self.rung, phase)
        if done != total and now_s - self._last_s.get(key, 0.0) < self.period_s:
            return
        self._last_s[key], self._said[:] = now_s, [said]
        event = ProgressEvent(
            time_s=now_s, rung=self.rung, phase=phase, done=done, total=total, unit=unit, detail=detail
        )
        for listener in self.listeners:
            listener(event)

    def of(self, rung: str) -> Progress:
        """The same listeners for another rung."""
        return Progress(rung, self.listeners, self.period_s)


@dataclass
class Pace:
    """Rate and remaining time of a phase, from its events."""

    first: ProgressEvent
    last: ProgressEvent

    @property
    def rate(self) -> float | None:
        """Units a second since the phase began; None before there is something to divide."""
        elapsed_s = self.last.time_s - self.first.time_s
        return (self.last.done - self.first.done) / elapsed_s if elapsed_s > 0 else None

    @property
    def remaining_s(self) -> float | None:
        """Seconds to go at that rate; None where the total or the rate is not known."""
        if self.last.total is None or not self.rate:
            return None
        return max(0.0, self.last.total - self.last.done) / self.rate
