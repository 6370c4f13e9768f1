"""What the pages show is read from run directories: as they are, as they grow, and nothing outside."""

import shutil
import time
from pathlib import Path

import pytest

from firstlight.dashboards import figures, html
from firstlight.dashboards.store import DataStore, Follower, requests_once
from firstlight.engine.errors import Refused
from firstlight.workbench.events import SERVED, ProgressEvent, RequestEvent
from firstlight.workbench.readings import Bucket, Reading
from firstlight.workbench.report import Draft
from firstlight.workbench.runs import Run


def report(verb: str, passed: bool = True) -> Draft:
    draft = Draft(verb, "toy")
    draft.check("a check", passed)
    return draft


def reading(time_s: float, value: float | None, device: str = "gpu 0") -> Reading:
    reason = "" if value is not None else "NotSupported"
    return Reading(time_s=time_s, source="nvml", device=device, metric="power", unit="W", value=value, reason=reason)


def test_a_follower_sees_what_is_added_and_nothing_changes_without_news(tmp_path: Path) -> None:
    run = Run.at(tmp_path / "a", "toy", "ckpt")
    follower = Follower(tmp_path / "a")
    follower.poll()
    first = follower.snapshot
    follower.poll()
    assert follower.snapshot is first
    run.add(report("scan").close())
    run.events.put(ProgressEvent(time_s=1.0, rung="load", phase="read", done=1.0, total=4.0, unit="B"))
    run.events.put(ProgressEvent(time_s=2.0, rung="load", phase="read", done=3.0, total=4.0, unit="B"))
    for time_s, value in ((2.0, 100.0), (2.5, 300.0), (4.0, None), (6.0, 300.0), (8.0, 400.0)):
        run.events.put(reading(time_s, value))
    assert run.events.flush()
    follower.poll()
    now = follower.snapshot
    assert now.version > first.version
    assert [one.verb for one in now.reports] == ["scan"]
    assert now.progress["load", "read"].rate == pytest.approx(2.0)
    trail = now.trails["nvml", "gpu 0", "power"]
    assert trail.times_s == (3.0, 5.0, 7.0)
    assert trail.values == (200.0, None, 300.0), "means over two seconds; where there was no value there is a gap"
    assert trail.last.value == 400.0
    assert first.reports == (), "what was handed out stays as it was"
    run.close()
    follower.close()


def test_a_follower_that_comes_late_shows_the_same(tmp_path: Path) -> None:
    with Run.at(tmp_path / "a", "toy", "ckpt") as run:
        run.add(report("scan").close())
        run.add(report("plan", passed=False).close())
        early = Follower(tmp_path / "a")
        for tenth in range(3000):
            run.events.put(reading(tenth / 10, None if 2500 < tenth < 2600 else float(tenth)))
            if tenth % 700 == 0:
                assert run.events.flush()
                early.poll()
        assert run.events.flush()
        early.poll()
    late = Follower(tmp_path / "a")
    late.poll()
    assert len(late.snapshot.trails["nvml", "gpu 0", "power"].times_s) == 60, "two minutes, however often it was read"
    assert late.snapshot.reports == early.snapshot.reports
    assert late.snapshot.trails == early.snapshot.trails
    assert late.snapshot.latest("plan") is not None
    assert not late.snapshot.has_engine


def test_another_run_of_the_same_name_begins_anew(tmp_path: Path) -> None:
    with Run.at(tmp_path / "a", "toy", "ckpt") as run:
        run.events.put(reading(1.0, 1.0, "gpu 7"))
        run.events.put(ProgressEvent(time_s=1.0, rung="load", phase="read", done=1.0))
        assert run.events.flush()
        follower = Follower(tmp_path / "a")
        follower.poll()
        assert {device for _, device, _ in follower.snapshot.trails} == {"gpu 7"}
    shutil.rmtree(tmp_path / "a")
    follower.poll_if_news()
    with Run.at(tmp_path / "a", "toy", "ckpt") as run:
        run.events.put(reading(2.0, 2.0, "gpu 1"))
        assert run.events.flush()
        follower.poll()
    now = follower.snapshot
    assert {device for _, device, _ in now.trails} == {"gpu 1"}
    assert not now.progress
    follower.close()


def test_who_follows_is_told_of_every_change_and_asked_for_nothing_without(tmp_path: Path) -> None:
    told: list[int] = []
    store = DataStore(tmp_path).start()
    with Run.at(tmp_path / "a", "toy", "ckpt") as run:
        follower = store.follow("a")
        follower.listen(lambda: told.append(follower.snapshot.readings_version))
        for count in range(1, 4):
            run.events.put(reading(float(count), 1.0))
            started_s = time.monotonic()
            while len(told) < count and time.monotonic() - started_s < 5.0:
                time.sleep(0.01)
            assert time.monotonic() - started_s < 0.5, "within half a second"
        seen = len(told)
        time.sleep(0.3)
        assert len(told) == seen
    store.close()


def test_only_runs_below_the_root_can_be_followed(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    Run.at(root / "inside", "toy", "ckpt")
    Run.at(tmp_path / "outside", "toy", "ckpt")
    (root / "rubbish").mkdir()
    (root / "broken").mkdir()
    (root / "broken" / "run.json").write_text("{")
    store = DataStore(root)
    assert [name for name, _ in store.runs()] == ["inside"]
    assert store.follow("inside").snapshot.record.model == "toy"
    for name in ("../outside", "..", ".", "", "/etc", "rubbish", "absent", str(tmp_path / "outside")):
        with pytest.raises(Refused, match="there is no run"):
            store.follow(name)
    store.close()


def test_text_from_outside_is_escaped_wherever_it_stands() -> None:
    evil = "<b>\u202ex</b>"
    pieces = (
        html.table([{evil: evil}]),
        html.card(evil, ""),
        html.figures([(evil, evil)]),
        html.stacked([(evil, {evil: 1.0}, evil)]),
        html.nothing(evil),
        str(figures.layer_bars([{"rank": 0, "block": evil, "decode_ms": 1.0}], "decode")["data"][0]["hovertext"]),
    )
    for piece in pieces:
        assert "<b>\u202e" not in piece
        assert "&lt;b&gt;" in piece


def test_curves_break_where_nothing_was_read() -> None:
    buckets = [Bucket(float(t), 1, 1.0, 1.0, 1.0, 0) for t in (*range(10), *range(60, 70))]
    (line,) = figures.curves({"gpu 0": buckets}, "W")["data"]
    assert line["y"].count(None) == 1
    assert len(line["y"]) == 21


def test_what_reaches_beyond_its_block_is_overlapped() -> None:
    def row(kind: str, start: float, long: float) -> dict[str, object]:
        return {
            "phase": "decode",
            "rank": 0,
            "name": kind,
            "kind": kind,
            "start_ms": start,
            "duration_ms": long,
            "moved_bytes": 8,
        }

    inside = [row("compute", 0.0, 10.0), row("collective", 4.0, 2.0)]
    (found,) = figures.overlap(inside, "decode")
    assert (found["collective_ms"], found["overlapped"]) == (2.0, 0.0)
    beyond = [row("compute", 0.0, 10.0), row("compute", 10.0, 10.0), row("collective", 8.0, 8.0)]
    (found,) = figures.overlap(beyond, "decode")
    assert found["overlapped"] == pytest.approx(75.0)


def test_figures_stand_in_their_own_unit() -> None:
    shares = {"overlapped": 75.0, "decode_of_limit": 6.5, "share_of_limit": 0.25}
    shown = html.table([shares | {"waited_s": 8.5e-6, "rate_bytes_per_s": 2.0**20}])
    for expected in (">75 %<", ">6.5 %<", ">25 %<", ">8.5 us<", ">1.00 MiB/s<"):
        assert expected in shown, expected


def test_a_request_that_a_rung_recorded_is_not_shown_twice() -> None:
    def event(time_s: float, name: str, rung: str, number: int, prompt: int = 7) -> RequestEvent:
        record = f'{{"number": {number}}}'
        return RequestEvent(time_s=time_s, name=name, rung=rung, status="stop", prompt_tokens=prompt, record=record)

    found = [
        event(100.0, "cat.png", "infer", 3),
        event(100.4, "request 3", SERVED, 3),
        event(101.0, "request 4", SERVED, 4),
        event(900.0, "request 3", SERVED, 3),  # of an engine that was started later
    ]
    assert [(one.time_s, one.name) for one in requests_once(found)] == [
        (900.0, "request 3"), (101.0, "request 4"), (100.0, "cat.png"),
    ]  # fmt: skip


def test_a_small_curve_breaks_where_nothing_was_read_and_where_there_was_no_value() -> None:
    times = [1.0, 3.0, 5.0, 41.0, 43.0, 45.0]
    path = html.curve(times, [1.0, 2.0, 3.0, 4.0, None, 6.0], 120.0)
    assert [piece[0] for piece in path.split() if piece[0] in "ML"] == ["M", "L", "L", "M", "M"]
    assert html.curve((), (), 120.0) == ""
