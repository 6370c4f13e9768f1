"""A run directory is appended to, found again, and holds rungs to their order."""

import json
import sys
from pathlib import Path

import pytest

from firstlight.engine.errors import Refused
from firstlight.workbench.events import ProgressEvent
from firstlight.workbench.report import Draft, Report
from firstlight.workbench.runs import Run, name_of


def report(verb: str, passed: bool = True) -> Report:
    draft = Draft(verb, "m")
    draft.check("it", passed)
    return draft.close()


def test_a_new_run_has_a_name_of_time_and_model(tmp_path: Path) -> None:
    one, other = (Run.create("org/a model", "/x", tmp_path) for _ in range(2))
    assert one.directory != other.directory
    assert one.directory.name.split("-", 1)[1].startswith("org-a-model")
    assert {p.name for p in one.directory.iterdir()} == {"run.json", "reports", "traces", "golden"}
    with Run.create("n" * 250, "/x", tmp_path) as long:
        assert long.record.model == "n" * 250, "a folder's name is shorter"
    here = Path.cwd().name
    assert [name_of(path) for path in (".", "a/..", "/models/m/", "s3://bucket/m")] == [here, here, "m", "m"]


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("/venv/bin/firstlight", "firstlight up m --token ... --tp 2"),
        ("/site/firstlight/workbench/__main__.py", "firstlight up m --token ... --tp 2"),
        ("mine.py", "python mine.py up m --token ... --tp 2"),
        ("", "python up m --token ... --tp 2"),
    ],
)
def test_a_run_says_which_program_made_it(
    tmp_path: Path, program: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [program, "up", "m", "--token", "secret", "--tp", "2"])
    with Run.at(tmp_path / "r", "m", "/x") as run:
        assert run.record.command == said


def test_reports_are_numbered_and_listed(tmp_path: Path) -> None:
    run = Run.at(tmp_path / "r", "m", "/x")
    for verb in ("scan", "plan", "scan"):
        run.add(report(verb))
    assert [p.name for p in sorted((tmp_path / "r" / "reports").iterdir())] == [
        "01-scan.json",
        "02-plan.json",
        "03-scan.json",
    ]
    again = Run.at(tmp_path / "r")
    assert again.record == run.record
    assert [r.verb for r in again.reports()] == ["scan", "plan", "scan"]
    listed = json.loads((tmp_path / "r" / "run.json").read_text())["rungs"]
    assert listed[2]["number"] == 3
    assert listed[2]["status"] == "passed"


def test_a_step_that_was_timed_call_by_call_is_left_as_a_trace(tmp_path: Path) -> None:
    run, rows = Run.at(tmp_path / "r"), []
    for phase in ("prefill", "decode"):
        for rank in (0, 1):
            block = {"name": "layers.0", "kind": "compute", "start_ms": 1.5, "duration_ms": 2.0, "moved_bytes": 0}
            call = {
                "name": "all_reduce tp",
                "kind": "collective",
                "start_ms": 2.5,
                "duration_ms": 0.5,
                "moved_bytes": 64,
            }
            rows += [{"phase": phase, "rank": rank, **span} for span in (block, call)]
    draft = Draft("profile", "m")
    draft.table("timeline", rows)
    run.add(report("scan"))
    run.add(draft.close())
    assert [path.name for path in (run.directory / "traces").iterdir()] == ["02-profile.json"]
    events = json.loads((run.directory / "traces" / "02-profile.json").read_bytes())["traceEvents"]
    named = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    assert list(named.values()) == ["prefill, rank 0", "prefill, rank 1", "decode, rank 0", "decode, rank 1"]
    calls = [one for one in events if one["ph"] == "X" and named[one["pid"]] == "decode, rank 1"]
    assert [(one["name"], one["tid"], one["ts"], one["dur"]) for one in calls] == [
        ("layers.0", 0, 1500.0, 2000.0),
        ("all_reduce tp", 1, 2500.0, 500.0),
    ]
    assert calls[1]["args"] == {"moved_bytes": 64}


def test_a_rung_does_not_stand_on_one_that_failed(tmp_path: Path) -> None:
    run = Run.at(tmp_path / "r")
    assert run.require("start") is False, "what was never run does not forbid"
    run.add(report("scan", passed=False))
    assert run.require("scan") is False
    for verb in ("load", "infer", "generate", "serve", "export"):
        with pytest.raises(Refused) as caught:
            run.require(verb)
        finding = caught.value.findings[0]
        assert finding.code == "earlier-rung-failed"
        assert finding.found == "scan failed"
        assert "--force" in str(finding.next)
    assert run.require("load", force=True) is True
    assert run.require("doctor") is False, "not on the ladder"
    run.add(report("scan"))
    assert run.require("load") is False, "the last report counts"


def test_other_directories_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(Refused, match="not a run directory"):
        Run.at(tmp_path)
    with pytest.raises(Refused, match="not a run directory"):
        Run.at(tmp_path / "thesis.txt")
    with pytest.raises(Refused, match="holds no run"):
        Run.attach(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(Refused, match="holds no run"):
        Run.attach(tmp_path)


def test_closing_twice_is_fine(tmp_path: Path) -> None:
    run = Run.at(tmp_path / "r")
    assert run.events.flush()
    run.close()
    run.close()
    assert (tmp_path / "r" / "events.sqlite").exists()


def test_the_page_begins_with_the_report_over_all_rungs(tmp_path: Path) -> None:
    run = Run.at(tmp_path / "r", "m", "/x")
    for verb in ("scan", "plan", "up"):
        run.add(report(verb))
    page = run.write_page().read_text()
    assert sorted(("up", "scan", "plan"), key=lambda verb: page.index(f"<h4>{verb} ")) == ["up", "scan", "plan"]


def test_events_that_were_lost_are_a_warning_in_the_next_report_and_only_there(tmp_path: Path) -> None:
    run = Run.at(tmp_path / "r", "m", "/x")
    (tmp_path / "r" / "events.sqlite").mkdir()  # no database can be there
    assert run.with_losses(report("scan")).findings == ()
    for step in range(3):
        run.events.put(ProgressEvent(time_s=1.0, rung="load", phase="read", done=float(step)))
    assert not run.events.flush()
    (said,) = run.with_losses(report("load")).findings
    assert (said.code, said.severity) == ("events-lost", "warning")
    assert "3 progress events and readings" in said.message
    assert run.with_losses(report("start")).findings == ()
    run.close()


def test_two_who_write_to_one_run_lose_nothing_of_each_other(tmp_path: Path) -> None:
    first = Run.at(tmp_path / "run", "m", "c")
    second = Run.at(tmp_path / "run", "m", "c")
    first.add(Draft("scan", "m").close())
    second.update(engine={"options": {}})
    second.add(Draft("plan", "m").close())
    first.add(Draft("load", "m").close())
    record = Run.attach(tmp_path / "run").record
    assert [(rung.number, rung.verb) for rung in record.rungs] == [(1, "scan"), (2, "plan"), (3, "load")]
    assert record.engine == {"options": {}}
