"""Times inside a step: by block through a tap, by collective through the recorder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from firstlight.engine.model.batch import Tap
from firstlight.engine.parallel.comm import CommRecord
from firstlight.engine.serving.stats import CollectiveTime

Result = TypeVar("Result")


class Clock:
    """Seconds, with the device awaited."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def took(self, call: Callable[[], Result]) -> tuple[float, Result]:
        """(seconds, what the call returned)."""
        started_s = self.now()
        result = call()
        return self.now() - started_s, result


class LayerTap:
    """The time between taps, booked on the block that just ended; `starts_s` is when each block began."""

    only_names = True  # of a divided step, rows need not be gathered for it

    def __init__(self, clock: Clock, tap: Tap | None = None) -> None:
        self.layers_s: dict[str, float] = {}
        self.starts_s: dict[str, float] = {}
        self._clock = clock
        self._tap = tap
        self._last_s = clock.now()

    def begin(self) -> float:
        """The step starts now; the time on the clock."""
        self._last_s = self._clock.now()
        return self._last_s

    def end(self) -> None:
        """What came behind the last tap is the output head."""
        self._book("head")

    def _book(self, block: str) -> None:
        now_s = self._clock.now()
        self.layers_s[block] = now_s - self._last_s
        self.starts_s[block] = self._last_s
        self._last_s = now_s

    def leave_out(self, records: Sequence[CommRecord]) -> None:
        """Have the first block begin when its stage had received its input: waiting for that is no work of a block."""
        first = min(self.starts_s, key=lambda name: self.starts_s[name], default=None)
        if first is None:
            return
        for record in records:
            if record.operation != "receive":
                return
            late_s = record.start_s + record.duration_s - self.starts_s[first]
            if 0 < late_s < self.layers_s[first]:
                self.starts_s[first] += late_s
                self.layers_s[first] -= late_s

    def __call__(self, name: str, value: Tensor) -> None:
        self._book(name if name.count(".") != 1 else f"{name}.ffn")
        if self._tap is not None:
            self._tap(name, value)


def collective_times(records: Iterable[CommRecord]) -> tuple[CollectiveTime, ...]:
    """Calls of the same kind added up."""
    found: dict[tuple[str, str], tuple[int, int, float]] = {}
    for record in records:
        calls, nbytes, total_s = found.get((record.axis, record.operation), (0, 0, 0.0))
        found[record.axis, record.operation] = calls + 1, nbytes + record.nbytes, total_s + record.duration_s
    return tuple(
        CollectiveTime(axis=axis, operation=operation, calls=calls, nbytes=nbytes, total_ms=1e3 * total_s)
        for (axis, operation), (calls, nbytes, total_s) in found.items()
    )
