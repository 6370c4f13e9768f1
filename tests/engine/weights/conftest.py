"""Weights that come and go, in memory as small as their models."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from firstlight.engine.weights.loading import room
from firstlight.engine.weights.loading.overlap import Overlap
from tests.engine.weights.holding import STAGING, Held


@pytest.fixture
def held() -> Iterator[Callable[..., Held]]:
    made: list[Held] = []

    def make(*arguments: object) -> Held:
        made.append(Held(*arguments))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.weights.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "layers"]


@pytest.fixture
def small_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models are tiny; staging memory as large as a real one's would be larger than they are."""
    monkeypatch.setattr(room, "STAGING_BYTES", STAGING)


@pytest.fixture
def runs_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a source is slow."""
    monkeypatch.setattr(Overlap, "judge", lambda *_: (True, "slow"))
