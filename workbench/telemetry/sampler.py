"""Asks the sources again and again from a thread of its own and hands their readings on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Self

import psutil

from firstlight.engine.errors import FirstlightError
from firstlight.engine.serving.client import EngineClient
from firstlight.workbench.courtesy import step_back
from firstlight.workbench.events import RequestEvent
from firstlight.workbench.readings import Reading
from firstlight.workbench.telemetry.engine import EngineSource, MemorySource
from firstlight.workbench.telemetry.nvml import NvmlSource
from firstlight.workbench.telemetry.source import Source
from firstlight.workbench.telemetry.system import SystemSource


class Sampler:
    """Readings of all sources every `period_s`, in the background, until closed.

    A source that falls over is named in a reading and asked again the next time. `cost` is the share of one core that
    sampling takes in this process. `known`: numbers of the engine's requests that were told before.
    """

    def __init__(
        self,
        put: Callable[[Reading | RequestEvent], None],
        client: Callable[[], EngineClient | None] = lambda: None,
        period_s: float = 1.0,
        sources: Sequence[Source] | None = None,
        known: Collection[int] = (),
    ) -> None:
        self.period_s = period_s
        self._put = put
        self._engine = EngineSource(client, known)
        self._nvml = NvmlSource() if sources is None else None
        self._sources: Sequence[Source] = (
            sources if self._nvml is None else (self._engine, SystemSource(), self._nvml, MemorySource(client))
        ) or ()
        self._due_s = [0.0] * len(self._sources)
        self._busy_s = 0.0
        self._since_s = time.monotonic()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, name="telemetry", daemon=True)

    @property
    def cost(self) -> float:
        """Share of one core, 0 to 1."""
        return self._busy_s / max(1e-9, time.monotonic() - self._since_s)

    def start(self) -> Self:
        self._thread.start()
        return self

    def close(self) -> None:
        """Ends the thread; a last reading is on its way when this returns."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(10.0)
        if self._nvml is not None:
            self._nvml.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def sample(self) -> None:
        """Ask every source whose last readings are no longer good."""
        time_s, now_s = time.time(), time.monotonic()
        started_s = time.thread_time()
        for index, source in enumerate(self._sources):
            if now_s < self._due_s[index]:
                continue
            self._due_s[index] = now_s + max(source.every_s, self.period_s) * 0.99
            try:
                for reading in source.read(time_s, self._engine.step):
                    self._put(reading)
            except (OSError, RuntimeError, ValueError, psutil.Error, FirstlightError) as error:
                reason = f"the source failed: {type(error).__name__}: {error}"
                self._put(
                    Reading(
                        time_s=time_s, source=source.name, device=source.name, metric="source", unit="", reason=reason
                    )
                )
        self._busy_s += time.thread_time() - started_s

    def _work(self) -> None:
        step_back()
        while not self._end.is_set():
            started_s = time.monotonic()
            self.sample()
            self._end.wait(max(0.0, self.period_s - (time.monotonic() - started_s)))
