"""A run says what is being done, by whom, and what became of it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from firstlight.engine.errors import Occupied, Refused
from firstlight.engine.findings import fatal
from firstlight.workbench import Bringup
from firstlight.workbench.events import ProgressEvent
from firstlight.workbench.progress import Progress
from firstlight.workbench.report import Draft
from firstlight.workbench.runs import Run
from firstlight.workbench.work import Work
from tests.repo.tree import ROOT
from tests.waiting import until

MENAGERIE = ROOT / "data" / "samples" / "menagerie"
WORKS = """
import sys, time
from firstlight.workbench.runs import Run
with Run.at(sys.argv[1], "m", "/x") as run, run.working("load"):
    print("works", flush=True)
    time.sleep(600)
"""


def work_of(directory: Path) -> Work | None:
    return Run.attach(directory).record.work


def test_a_rung_is_entered_while_it_works_and_its_report_takes_it_out(tmp_path: Path) -> None:
    with Run.at(tmp_path / "r", "m", "/x") as run:
        with run.working("load"):
            now = work_of(tmp_path / "r")
            assert now is not None
            assert (now.verb, now.ended, now.lives, now.is_mine) == ("load", "", True, True)
        draft = Draft("load", "m")
        draft.check("it", True)
        run.add(draft.close())
        assert work_of(tmp_path / "r") is None
        with run.working("dashboard"):
            assert work_of(tmp_path / "r") is None, "it does not end by itself"
        with run.working("export"):
            assert work_of(tmp_path / "r") is None, "an archive holds no work"


@pytest.mark.parametrize(("error", "ended"), [(KeyboardInterrupt, "interrupted"), (RuntimeError, "RuntimeError")])
def test_what_ends_a_rung_without_a_report_is_entered(tmp_path: Path, error: type[BaseException], ended: str) -> None:
    with Run.at(tmp_path / "r", "m", "/x") as run:
        with pytest.raises(error), run.working("load"):
            raise error
        now = work_of(tmp_path / "r")
        assert now is not None
        assert now.ended == ended


def test_a_start_beside_an_engine_that_runs_leaves_no_trace(tmp_path: Path) -> None:
    with Bringup(MENAGERIE, run=tmp_path / "r", telemetry_hz=0) as bringup:

        def occupied(_: Progress) -> None:
            raise Occupied(fatal("not-available", "an engine runs here"))

        bringup._rung("start", occupied)  # type: ignore[arg-type]
        assert work_of(tmp_path / "r") is None

        def refused(_: Progress) -> None:
            raise Refused(fatal("not-available", "no"))

        assert bringup._rung("start", refused).status == "refused"  # type: ignore[arg-type]
        assert work_of(tmp_path / "r") is None


def test_a_process_that_was_killed_does_not_work_any_more(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", WORKS, str(tmp_path / "r")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "works\n"
    now = work_of(tmp_path / "r")
    assert now is not None
    assert now.lives
    assert not now.is_mine
    os.kill(process.pid, signal.SIGKILL)
    until(lambda: not now.lives, "a zombie works", every_s=0.05)
    process.wait()
    process.stdout.close()
    assert not now.lives
    assert msgspec.structs.replace(now, pid=os.getpid()).lives is False, "the number of another process"
    assert msgspec.structs.replace(now, place="another machine").lives is None


def test_another_process_report_leaves_the_work_of_this_one(tmp_path: Path) -> None:
    with Run.at(tmp_path / "r", "m", "/x") as run:
        other = msgspec.structs.replace(Work.here("load"), pid=1)
        run.update(work=other)
        draft = Draft("scan", "m")
        draft.check("it", True)
        run.add(draft.close())
        assert work_of(tmp_path / "r") == other


def test_what_says_nothing_new_is_not_told() -> None:
    seen: list[ProgressEvent] = []
    progress = Progress("start", (seen.append,), period_s=0.0)
    for done in (0, 0, 1, 1, 1, 2):
        progress("load", done, 2, "B")
    progress("meet")
    progress("load", 2, 2, "B")
    assert [(event.phase, event.done) for event in seen] == [
        ("load", 0), ("load", 1), ("load", 2), ("meet", 0.0), ("load", 2),
    ]  # fmt: skip


def test_a_checkpoint_at_a_url_is_called_by_it(tmp_path: Path) -> None:
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    (mirror / ".firstlight-source.json").write_text('{"url": "s3://bucket/m", "files": {}}')
    with Run.at(tmp_path / "r", "m", str(mirror)) as run:
        assert (run.record.source, run.record.checkpoint) == ("s3://bucket/m", str(mirror))
    with Run.at(tmp_path / "s", "m", "/x") as run:
        assert run.record.source == "/x"
