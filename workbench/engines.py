"""An engine for a rung: in this process for one rank, a host of its own for more; both answer to `EngineLike`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from firstlight.engine.parallel.cluster import launched
from firstlight.engine.serving.api import EngineLike
from firstlight.engine.serving.options import EngineOptions
from firstlight.workbench.progress import Progress


@contextmanager
def open_engine(options: EngineOptions, progress: Progress | None = None) -> Iterator[EngineLike]:
    """An engine that is ready, closed at the end. Raises `Refused`, or what made its start fail."""
    progress = progress or Progress()
    if options.mesh.world_size > 1 or options.hosts or launched() is not None:
        from firstlight.workbench.start import started

        with started(options, progress) as host:
            yield host.client()
        return
    engine = start_here(options, progress)
    try:
        yield engine
    finally:
        engine.close()


def start_here(options: EngineOptions, progress: Progress) -> EngineLike:
    """An engine in this process, on one rank; its stages are told as progress."""
    import numpy  # noqa: F401 - before torch, which imports it where an interrupt is lost

    from firstlight.engine.serving.health import Pulse
    from firstlight.engine.serving.runtime import Engine

    class Telling(Pulse):
        """A pulse that is told on."""

        def enter(self, stage: str) -> None:
            super().enter(stage)
            progress(stage)

        def progress(self, done: float, total: float) -> None:
            super().progress(done, total)
            progress(self.stage, done, total, "B")

    fields = {name: getattr(options, name) for name in options.__struct_fields__}
    return Engine.start(**fields, pulse=Telling())
