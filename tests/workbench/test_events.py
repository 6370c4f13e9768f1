"""Events are written while others read, in order, and a disk that refuses is said."""

import os
import sqlite3
import threading
from pathlib import Path

import pytest

from firstlight.workbench import events
from firstlight.workbench.events import EventReader, EventWriter, ProgressEvent, RequestEvent
from firstlight.workbench.progress import Pace, Progress
from firstlight.workbench.readings import Reading


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


def test_a_disk_that_refuses_does_not_stop_the_work_and_the_loss_is_counted(tmp_path: Path) -> None:
    folder = tmp_path / "absent"
    with EventWriter(folder / "e.sqlite") as writer:
        for done in range(3):
            writer.put(progress_event(done))
        assert writer.flush() is False
        assert writer.lost == 3
        assert writer.problem is not None
        folder.mkdir()
        writer.put(progress_event(4))
        assert writer.flush()
        assert writer.problem is None
    reader = EventReader(folder / "e.sqlite")
    assert [event.done for _, event in reader.progress()] == [4]
    (said,) = reader.latest()
    assert (said.metric, said.value, said.alarm) == ("lost", 3.0, True)


def test_a_disk_that_fills_up_costs_only_what_did_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "e.sqlite"
    with EventWriter(path) as writer:
        writer.put(reading(0, 1.0))
        assert writer.flush()
        assert writer._file is not None
        writer._file._connection.execute("pragma max_page_count = 8")  # as full as a disk can be for SQLite
        writer.put(reading(1, 1.0, metric="x" * 200_000))
        assert writer.flush() is False
        assert "full" in str(writer.problem)
        assert writer.lost == 1
        writer._file._connection.execute("pragma max_page_count = 1000000")
        writer.put(reading(2, 3.0))
        assert writer.flush()
    assert [(one.metric, one.value) for _, one in EventReader(path).readings()] == [("m", 1.0), ("m", 3.0), ("lost", 1)]


def test_a_file_that_somebody_holds_is_waited_for_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "BUSY_TIMEOUT_S", 0.01)
    path = tmp_path / "e.sqlite"
    with EventWriter(path) as writer:
        writer.put(progress_event(1))
        assert writer.flush(30.0)
        holder = sqlite3.connect(path, isolation_level=None)
        holder.execute("begin immediate")
        writer.put(progress_event(2))
        assert writer.flush(30.0) is False
        assert (writer.lost, writer.problem) == (0, "database is locked")
        holder.execute("rollback")
        holder.close()
        writer.put(progress_event(3))
        assert writer.flush(30.0)
        assert (writer.lost, writer.problem, writer.last_problem) == (0, None, "database is locked")
    assert [event.done for _, event in EventReader(path).progress()] == [1, 2, 3]


def test_events_gather_while_nobody_looks_and_come_at_once_when_somebody_does(tmp_path: Path) -> None:
    path = tmp_path / "e.sqlite"
    reader = EventReader(path)
    with EventWriter(path) as writer:
        reader.watch()
        assert writer._period_s() == events.UNWATCHED_PERIOD_S, "there is nothing to look at yet"
        writer.put(progress_event(1))
        assert writer.flush()
        EventReader(path).watch()
        assert writer._period_s() == events.BATCH_PERIOD_S
        os.utime(tmp_path / events.WATCHED, (0, 0))
        assert writer._period_s() == events.UNWATCHED_PERIOD_S, "whoever looked has gone"
        (tmp_path / events.WATCHED).unlink()
        (tmp_path / events.WATCHED).symlink_to(tmp_path / "elsewhere")
        EventReader(path).watch()
        assert not (tmp_path / "elsewhere").exists(), "a link is not followed"
        (tmp_path / events.WATCHED).unlink()
        os.utime(tmp_path / "e.sqlite-wal", (0, 0))
        EventReader(path).watch()
        assert not (tmp_path / events.WATCHED).exists(), "a run that is over is left as it is"


def test_what_no_column_holds_costs_itself_alone(tmp_path: Path) -> None:
    path = tmp_path / "e.sqlite"
    with EventWriter(path) as writer:
        writer.put(RequestEvent(time_s=0.0, name="r", rung="infer", status="stop", prompt_tokens=2**70))
        assert writer.flush() is False
        for value in (float("nan"), float("inf"), 2.0):
            writer.put(reading(1.0, value, metric=str(value)))
        assert writer.flush()
        assert writer.lost == 1
    found = {one.metric: (one.value, one.reason) for _, one in EventReader(path).readings()}
    assert found.pop("lost") == (1.0, "")
    assert found == {"nan": (None, "the source said nan"), "inf": (None, "the source said inf"), "2.0": (2.0, "")}


def reading(time_s: float, value: float | None, metric: str = "m", device: str = "gpu 0") -> Reading:
    reason = "" if value is not None else "NotSupported"
    return Reading(time_s=time_s, source="s", device=device, metric=metric, unit="u", value=value, reason=reason)


@pytest.mark.parametrize("points", [12, 1000])
def test_history_has_means_extremes_and_gaps_whatever_it_is_read_from(tmp_path: Path, points: int) -> None:
    path, rows = tmp_path / "e.sqlite", []
    with EventWriter(path) as writer:
        for second in range(1200):
            value = None if second % 10 == 3 else float(second)
            rows.append(value)
            writer.put(reading(float(second), value))
            writer.put(reading(float(second), 7.0, device="gpu 1"))
        assert writer.flush()
        reader = EventReader(path)
        first, second_ = reader.series()
        assert (first.device, second_.device) == ("gpu 0", "gpu 1")
        found = reader.history([first.id], 0.0, 1200.0, points)[first.id]
    assert 0 < len(found) <= points
    there = [value for value in rows if value is not None]
    assert sum(bucket.count for bucket in found) == len(there)
    assert sum(bucket.gaps for bucket in found) == len(rows) - len(there)
    assert sum((bucket.mean or 0.0) * bucket.count for bucket in found) == pytest.approx(sum(there))
    assert min(bucket.low for bucket in found if bucket.low is not None) == min(there)
    assert max(bucket.high for bucket in found if bucket.high is not None) == max(there)
    assert [bucket.time_s for bucket in found] == sorted(bucket.time_s for bucket in found)
    assert [one.value for one in reader.latest()] == [1199.0, 7.0]
    assert reader.span() == (0.0, 1200.0)


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
