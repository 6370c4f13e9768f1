"""Events are written while others read, in order, and a disk that refuses is said."""

import sqlite3
import threading
from pathlib import Path

import pytest

from firstlight.engine.errors import Refused
from firstlight.workbench.events import EventReader, EventWriter, ProgressEvent, Reading, RequestEvent
from firstlight.workbench.progress import Pace, Progress


def progress_event(done: float, time_s: float = 0.0, total: float | None = 100.0) -> ProgressEvent:
    return ProgressEvent(time_s=time_s, rung="load", phase="read", done=done, total=total, unit="B")


def test_every_kind_comes_back_as_it_was(tmp_path: Path) -> None:
    reading = Reading(time_s=1.0, source="psutil", device="cpu", metric="memory", unit="B", value=3.0)
    absent = Reading(time_s=1.0, source="nvml", device="gpu0", metric="power", unit="W", reason="NotSupported")
    request = RequestEvent(time_s=2.0, name="r", rung="infer", status="stop", prompt_tokens=4, record='{"seed":1}')
    with EventWriter(tmp_path / "e.sqlite") as writer:
        for event in (progress_event(1), reading, absent, request):
            writer.put(event)
    reader = EventReader(tmp_path / "e.sqlite")
    assert [e for _, e in reader.progress()] == [progress_event(1)]
    assert [e for _, e in reader.readings()] == [reading, absent]
    assert [e for _, e in reader.requests()] == [request]


def test_readers_follow_while_it_is_written(tmp_path: Path) -> None:
    count, last = 5000, 0
    seen: list[float] = []
    reader = EventReader(tmp_path / "e.sqlite")
    assert list(reader.progress()) == [], "a file that is not there yet has no events"
    with EventWriter(tmp_path / "e.sqlite") as writer:

        def write() -> None:
            for index in range(count):
                writer.put(progress_event(index))

        threads = [threading.Thread(target=write) for _ in range(2)]
        for thread in threads:
            thread.start()
        while len(seen) < 2 * count:
            rows = list(reader.progress(after=last))
            seen += [event.done for _, event in rows]
            last = rows[-1][0] if rows else last
        for thread in threads:
            thread.join()
    assert len(seen) == 2 * count
    assert sorted(seen) == sorted([*range(count)] * 2)
    mode = sqlite3.connect(tmp_path / "e.sqlite").execute("pragma journal_mode").fetchone()
    assert mode == ("wal",)


def test_a_disk_that_refuses_does_not_stop_the_work(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "absent" / "e.sqlite")
    writer.put(progress_event(1))
    assert writer.flush() is False
    with pytest.raises(Refused, match="events were not written"):
        writer.close()


def test_a_reading_has_a_value_or_a_reason() -> None:
    for wrong in ({}, {"value": 0.0, "reason": "NotSupported"}):
        with pytest.raises(AssertionError):
            Reading(time_s=0.0, source="s", device="d", metric="m", unit="u", **wrong)  # type: ignore[arg-type]


def test_progress_leaves_out_what_comes_too_fast_but_never_the_end() -> None:
    seen: list[ProgressEvent] = []
    progress = Progress("load", (seen.append,), period_s=60)
    for done in range(101):
        progress("read", done, 100, "B")
    progress("check")
    assert [(e.phase, e.done) for e in seen] == [("read", 0), ("read", 100), ("check", 0)]
    assert progress.of("verify").rung == "verify"


def test_pace_gives_rate_and_remaining_time() -> None:
    pace = Pace(progress_event(0, time_s=10.0), progress_event(40, time_s=12.0))
    assert pace.rate == pytest.approx(20)
    assert pace.remaining_s == pytest.approx(3)
    assert Pace(progress_event(0), progress_event(0)).rate is None
    assert Pace(progress_event(0, total=None), progress_event(4, time_s=1.0, total=None)).remaining_s is None
