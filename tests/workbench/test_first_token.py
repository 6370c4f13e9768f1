"""Time to the first token: read off the stages of a start, and of a streaming start that is over before the other."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from firstlight.engine.serving.health import Pulse
from firstlight.engine.serving.options import EngineOptions
from firstlight.workbench import first_token
from firstlight.workbench.bringup import Bringup
from firstlight.workbench.first_token import FirstToken, line_of, of_stages

MENAGERIE = Path(__file__).parents[2] / "data" / "samples" / "menagerie"


def test_stages_say_when_the_first_token_came() -> None:
    pulse = Pulse()
    for stage in ("mesh", "ping", "ledger", "load", "build", "meet", "cache", "warm-up text"):
        pulse.enter(stage)
        assert of_stages(pulse.stages) is None
    pulse.say("all of it was there")
    pulse.enter("ready")
    taken = iter((4.0, 1.0, 1.0, 2.0, 0.5, 0.25, 0.0, 0.125, 0.0625))
    for record in pulse.stages:
        if record.seconds is not None:
            record.seconds = next(taken)
    found = of_stages(pulse.stages)
    assert found == FirstToken(seconds=0.9375, start_s=8.9375, how="all of it was there"), (
        "from load on, and from the first stage on"
    )


def test_a_start_without_a_token_says_so() -> None:
    pulse = Pulse()
    for stage in ("load", "build", "cache", "ready"):
        pulse.enter(stage)
    assert of_stages(pulse.stages) is None


@pytest.mark.parametrize("residency", ["streamed", "experts"])
def test_an_engine_that_streams_itself_is_not_started_twice(residency: str) -> None:
    found = first_token.streamed(EngineOptions(checkpoint=str(MENAGERIE), residency=residency))
    assert found.seconds is None
    assert residency in found.reason


def running() -> set[int]:
    """Processes of ours that have not ended."""
    return {one.pid for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE}


def test_both_starts_are_in_the_report_and_one_engine_is_left(tmp_path: Path) -> None:
    before = running()
    with Bringup(MENAGERIE, root=tmp_path, force=True, max_context=64, telemetry_hz=0) as session:
        report = session.start(streaming=True)
        assert report.passed
        rows = {row["start"]: row for row in report.tables["first_token"]}
        assert set(rows) == {"load, then run", "streaming"}
        for row in rows.values():
            assert 0 < row["first_token_s"] < row["from_process_start_s"]
            assert row["reason"] == ""
        assert report.value("first_token_streamed_s") == rows["streaming"]["first_token_s"]
        assert "read" in rows["streaming"]["how"]
        assert "streaming" in line_of(report)
        assert len(running() - before) == 1
