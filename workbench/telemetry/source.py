"""What a source of readings is: something that can be asked again and again and never fails as a whole.

A reading has a value or the reason why there is none; a source that cannot read anything says that in one reading.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from firstlight.workbench.events import RequestEvent
from firstlight.workbench.readings import Reading

FIRST = "a rate needs two samples"


class Source(Protocol):
    """`every_s`: how long a reading stays good, at the least; the sampler asks no more often."""

    name: str
    every_s: float

    def read(self, time_s: float, step: int | None) -> Iterator[Reading | RequestEvent]:
        """Readings of now, and requests that ended since. `step`: the number of the engine's last step, if one runs."""


class Maker:
    """Readings of one source at one time, with less ink."""

    def __init__(self, source: str, time_s: float, step: int | None) -> None:
        self._source = source
        self.time_s = self._time_s = time_s
        self._step = step

    def value(self, device: str, metric: str, unit: str, value: float, alarm: bool = False) -> Reading:
        return Reading(
            time_s=self._time_s,
            source=self._source,
            device=device,
            metric=metric,
            unit=unit,
            value=float(value),
            step=self._step,
            alarm=alarm,
        )

    def none(self, device: str, metric: str, unit: str, reason: str, alarm: bool = False) -> Reading:
        return Reading(
            time_s=self._time_s,
            source=self._source,
            device=device,
            metric=metric,
            unit=unit,
            reason=reason,
            step=self._step,
            alarm=alarm,
        )


class Rates:
    """Counters turned into rates: the difference to the last sample over the time between."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], tuple[float, float]] = {}

    def rate(self, device: str, metric: str, time_s: float, count: float) -> float | None:
        """Per second since the last sample; None at the first one, or when the counter began anew."""
        key = device, metric
        before = self._last.get(key)
        self._last[key] = time_s, count
        if before is None or time_s <= before[0] or count < before[1]:
            return None
        return (count - before[1]) / (time_s - before[0])
