"""The last stretch of every series, as small curves need it: means over some seconds each, however often it is read."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from firstlight.workbench.readings import Reading

SPAN_S = 120.0
WIDTH_S = 2.0  # a small curve is less than a hundred pixels wide
KEPT = int(SPAN_S / WIDTH_S)

SeriesKey = tuple[str, str, str]  # source, device, metric


class Trail(msgspec.Struct, frozen=True, kw_only=True):
    """The last reading of one series, and its last `SPAN_S`: times, and mean values (None: there was none)."""

    last: Reading
    times_s: tuple[float, ...]
    values: tuple[float | None, ...]


class Gatherer:
    """One series: readings in, a `Trail` out, whose curve is another object only when a stretch has ended."""

    def __init__(self, past: Sequence[tuple[int, int, float, int]] = ()) -> None:
        """`past`: (number, count, total, gaps) of the stretches so far; the last of them may go on."""
        self._ended: deque[tuple[float, float | None]] = deque(maxlen=KEPT)
        self._curve: tuple[tuple[float, ...], tuple[float | None, ...]] = ((), ())
        self._number, self._count, self._total, self._gaps = -1, 0, 0.0, 0
        for number, count, total, gaps in past:
            self._begin(number)
            self._count, self._total, self._gaps = count, total, gaps

    def add(self, reading: Reading) -> None:
        number = int(reading.time_s / WIDTH_S)
        if number != self._number:
            self._begin(number)
        if reading.value is None:
            self._gaps += 1
        else:
            self._count += 1
            self._total += reading.value

    def trail(self, last: Reading) -> Trail:
        return Trail(last=last, times_s=self._curve[0], values=self._curve[1])

    def _begin(self, number: int) -> None:
        """Ends the stretch that went on."""
        if self._count or self._gaps:
            mean = self._total / self._count if self._count else None
            self._ended.append(((self._number + 0.5) * WIDTH_S, mean))
            times_s, values = zip(*self._ended, strict=True)
            self._curve = times_s, values
        self._number, self._count, self._total, self._gaps = number, 0, 0.0, 0
