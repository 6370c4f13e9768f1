"""While a rung works: how far it is, live and by layer; what is told when nothing new comes, and when it broke off."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from firstlight.dashboards.store import Follower, Snapshot, _told
from firstlight.dashboards.trails import Trail
from firstlight.dashboards.views.hardware import Sparks, _device
from firstlight.dashboards.views.loading import _last_attempt, _points
from firstlight.dashboards.views.overview import _ladder, _verdict, _wrong
from firstlight.dashboards.views.runs import _rungs, _state, _status
from firstlight.dashboards.views.view import not_yet
from firstlight.dashboards.views.working import bars, doing
from firstlight.engine.serving.api import Health
from firstlight.engine.serving.health import Beat
from firstlight.workbench.events import ProgressEvent
from firstlight.workbench.readings import Reading
from firstlight.workbench.report import Draft
from firstlight.workbench.runs import Run
from firstlight.workbench.work import Work
from tests.dashboards.conftest import Errors
from tests.dashboards.test_pages import open_page, shown
from tests.engine.inputs.test_samples import SMOLLM2, needs_smollm2
from tests.engine.weights.far import Fault, Handler, Web, served
from tests.waiting import until


def event(rung: str, phase: str, done: float, time_s: float, total: float | None = 4096.0) -> ProgressEvent:
    return ProgressEvent(time_s=time_s, rung=rung, phase=phase, done=done, total=total, unit="B", detail="layer 7")


def report(verb: str) -> Any:
    draft = Draft(verb, "m")
    draft.check("it", True)
    return draft.close()


def snapshot_of(directory: Path) -> Snapshot:
    follower = Follower(directory)
    follower.poll()
    follower.close()
    return follower.snapshot


def test_a_rung_that_says_nothing_new_for_long_is_running_as_long_as_its_process_lives(tmp_path: Path) -> None:
    began_s = time.time() - 600
    with Run.at(tmp_path / "a", "m", "/x") as run:
        run.add(report("scan"))
        run.events.put(event("load", "read weights", 4096, began_s - 100))  # of an earlier time
        run.events.put(event("load", "reserve memory", 0, began_s + 1, None))
        run.events.put(event("load", "read weights", 0, began_s + 10, None))
        run.events.put(event("load", "read weights", 1024, began_s + 20))
        assert run.events.flush()
        run.update(work=msgspec.structs.replace(Work.here("load"), began_s=began_s))
        snapshot = snapshot_of(tmp_path / "a")
        now = doing(snapshot)
        assert now is not None
        assert now.is_running
        assert [(told.phase, told.done) for told, _ in now.rows] == [("read weights", 1024)], "the others are over"
        assert "load is running" in _verdict(snapshot, now)
        assert "passed</span> · 1 of 9" not in _verdict(snapshot, now)
        said = bars(now)
        for words in ("1.00 KiB</span> of", "102.4 B/s", "30.0 s</span> to go", "layer 7", "it is still at work"):
            assert words in said, words
        assert "The rung load is running" in not_yet(snapshot, "Loading", "load")
        assert "firstlight load" not in not_yet(snapshot, "Loading", "load"), "what runs is not asked for"
        assert "The rung verify was not run" in not_yet(snapshot, "Verify", "verify")
        state = _state(tmp_path / "a", snapshot.record)
        assert (_status(snapshot.record, state), _rungs(snapshot.record, state)) == ("running", "load running")


def test_a_rung_whose_process_is_gone_broke_off_and_says_how_far_it_was(tmp_path: Path) -> None:
    with Run.at(tmp_path / "a", "m", "/x") as run:
        run.add(report("scan"))
        run.add(report("load"))  # of an earlier time: it does not hold any more
        work = Work.here("load")
        run.events.put(event("load", "read weights", 1024, work.began_s))
        assert run.events.flush()
        run.update(work=msgspec.structs.replace(work, born_s=work.born_s - 1000))
        snapshot = snapshot_of(tmp_path / "a")
        now = doing(snapshot)
        assert now is not None
        assert "load broke off" in _verdict(snapshot, now)
        assert "broke off here" in bars(now)
        assert "to go" not in bars(now)
        assert '<li class="failed"><b>load</b><span class="failed">broke off</span>' in _ladder(snapshot, now)
        for words in ("left no report", "firstlight load /x"):
            assert words in _wrong(snapshot, now), words
        state = _state(tmp_path / "a", snapshot.record)
        assert (_status(snapshot.record, state), _rungs(snapshot.record, state)) == ("failed", "load broke off")


def test_an_interrupted_rung_is_called_so_and_one_elsewhere_goes_by_what_it_writes(tmp_path: Path) -> None:
    with Run.at(tmp_path / "a", "m", "/x") as run:
        work = Work.here("load")
        run.update(work=msgspec.structs.replace(work, ended="interrupted"))
        snapshot = snapshot_of(tmp_path / "a")
        now = doing(snapshot)
        assert "load was interrupted" in _verdict(snapshot, now)
        assert "left no report" not in _wrong(snapshot, now), "somebody wanted it"
        for began_s, state in ((work.began_s, "running"), (work.began_s - 100, "broke off")):
            run.update(work=msgspec.structs.replace(work, place="another machine", began_s=began_s))
            now = doing(snapshot_of(tmp_path / "a"))
            assert now is not None
            assert now.state == state


def test_a_report_that_cannot_be_read_is_no_pass_and_no_blank_card(tmp_path: Path) -> None:
    with Run.at(tmp_path / "a", "toy", "ckpt") as run:
        for verb in ("scan", "load"):
            run.add(report(verb))
    (tmp_path / "a/reports/02-load.json").write_text("{")
    snapshot = snapshot_of(tmp_path / "a")
    assert "unreadable at load" in _verdict(snapshot, None)
    assert '<li class="failed"><b>load</b><span class="failed">unreadable</span>' in _ladder(snapshot, None)
    assert '<li class="passed"><b>scan</b>' in _ladder(snapshot, None)
    said = not_yet(snapshot, "Loading", "load")
    for words in ("has no figures to show", "is not a report", "do load again"):
        assert words in said.replace("<wbr>", ""), words
    assert snapshot.figures("load") is None
    assert snapshot.figures("scan") is not None


def test_what_ranks_do_now_and_readings_that_ended_are_not_shown_as_they_were() -> None:
    def health(phase: str, count: int) -> Health:
        beat = Beat(rank=0, machine="m", pid=7, stage="ready", phase=phase, age_s=1.0, count=count)
        return Health(status="ready", stage="ready", ranks=(beat,))

    assert _told(health("load", 1)) != _told(health("idle", 1))
    assert _told(health("idle", 1)) == _told(health("idle", 2))

    def trail(metric: str, time_s: float, value: float | None, reason: str = "") -> Trail:
        one = {"source": "engine", "device": "engine", "metric": metric, "unit": "%"}
        return Trail(last=Reading(time_s=time_s, value=value, reason=reason, **one), times_s=(), values=())

    now_s = time.time()
    found = [
        trail("tokens", now_s, None, "it does not answer"),
        trail("busy", now_s - 10, 91.0),
        trail("step", now_s, 3.0),
    ]
    shown_ = _device("engine", found, now_s, Sparks())
    assert '<span class="v none">91 %</span>' in shown_, "its time is over, though nobody else is newer by much"
    assert '<span class="v ">3 %</span>' in shown_


def test_only_the_last_attempt_is_drawn_and_very_many_events_as_so_many_points() -> None:
    again = [
        event("start", "spawn", 0, 1.0), event("start", "load", 10, 2.0), event("start", "load", 10, 3.0),
        event("start", "meet", 0, 4.0), event("start", "spawn", 0, 5.0), event("start", "load", 10, 6.0),
    ]  # fmt: skip
    assert [told.time_s for told in _last_attempt(again)] == [5.0, 6.0]
    assert [told.time_s for told in _last_attempt(again[:4])] == [1.0, 2.0, 3.0, 4.0], "as much as before is no new one"
    assert [told.time_s for told in _last_attempt([again[1], event("start", "load", 5, 9.0)])] == [9.0]
    many = [event("load", "read weights", float(at), float(at)) for at in range(100_000)]
    points = _points(many)
    assert len(points) < 1100
    assert points[-1][2] == 99_999


RATE = 12e6  # bytes a second: 22 s for all of it


def limited(web: Web) -> Fault:
    """Every answer at one rate, whoever else is being answered."""
    lock, free_s = threading.Lock(), [0.0]

    def fault(handler: Handler, content: bytes) -> bool:
        wanted = content[handler.first : handler.last + 1]
        with lock:
            free_s[0] = max(free_s[0], time.monotonic()) + len(wanted) / RATE
            wait_s = free_s[0] - time.monotonic()
        web.over.wait(wait_s)
        handler.part(wanted)
        return True

    return fault


@pytest.mark.slow
@needs_smollm2
def test_a_load_from_a_slow_source_is_followed_layer_by_layer_and_its_kill_is_seen(
    browser: Any, address: str, runs: Path, tmp_path: Path, errors: Errors
) -> None:
    with served(SMOLLM2) as web:
        slow = limited(web)
        web.always |= {path.name: slow for path in SMOLLM2.glob("*.safetensors")}
        command = [sys.executable, "-m", "firstlight.workbench", "load", web.url, "--run", str(runs / "slowly"), "-q"]
        process = subprocess.Popen(command, env={**os.environ, "FIRSTLIGHT_CACHE": str(tmp_path)})
        try:
            until(lambda: (runs / "slowly" / "run.json").exists(), "the run does not begin")
            tabs = ("Overview", "Loading")
            overview, loading = (open_page(browser, f"{address}?run=slowly&tab={tab}", errors) for tab in tabs)
            for words in ("load is running", "MiB/s", "to go", "layer 2", "layer 1"):
                overview.get_by_text(words).first.wait_for()
            loading.get_by_text("The rung load is running").first.wait_for()
            loading.locator(".js-plotly-plot .main-svg").first.wait_for()
            assert web.url in shown(overview), "a checkpoint is called by its address"
            assert process.poll() is None
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            for page in (overview, loading):
                page.get_by_text("The rung load broke off").first.wait_for()
        finally:
            process.kill()
            process.wait()
    assert not errors
    for page in (overview, loading):
        page.context.close()
