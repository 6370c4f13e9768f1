"""Waiting for a state, never for a time: the product's own way, with patience for a machine that does much else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from firstlight.engine.serving import waiting

Found = TypeVar("Found")
PATIENCE_S = 120.0
alive = waiting.running


def until(
    look: Callable[[], Found], said: str = "it did not happen", within_s: float = PATIENCE_S, every_s: float = 0.02
) -> Found:
    """What `look` returns as soon as that is true; fails with `said` after `within_s`."""
    found = waiting.until(look, within_s, every_s)
    assert found, said
    return found


def gone(pids: Iterable[int], said: str = "processes are left", within_s: float = PATIENCE_S) -> None:
    """Waits until all these processes have ended."""
    left = list(pids)
    until(lambda: not alive(left), said, within_s)
