"""The card says of each claim where it comes from, and an archive holds what somebody else still writes."""

import sqlite3
import tarfile
from pathlib import Path

import msgspec
import pytest

from firstlight.workbench.cli import main
from firstlight.workbench.events import EventWriter, ProgressEvent
from firstlight.workbench.export import card, export, latest
from firstlight.workbench.report import Draft, Report
from firstlight.workbench.runs import Run


def made(verb: str, commit: str, cpu: str, passed: bool = True) -> Report:
    draft = Draft(verb, "toy")
    draft.check("it is sound", passed, value=1.23456789, limit=2.0, unit="ms")
    draft.check("it is as before", None, detail="there is nothing to compare with")
    draft.metric("decode_ms", 4.0, "ms")
    where = {"command": f"firstlight {verb} toy", "commit": commit, "cpu": cpu, "cores": 2, "versions": {"torch": "2"}}
    return msgspec.structs.replace(draft.close(), environment=where)


def test_a_rung_that_was_made_elsewhere_says_so_and_what_was_skipped_is_no_claim(tmp_path: Path) -> None:
    run = Run.at(tmp_path / "run", "toy", "toy")
    for report in (made("scan", "aaa", "old"), made("verify", "bbb", "new", passed=False), made("plan", "bbb", "new")):
        run.add(report)
    found = card(run, latest(run.reports()))
    scan, plan = found["verified"]
    assert (found["commit"], found["hardware"]) == ("bbb", {"cpu": "new", "cores": 2})
    assert (scan["commit"], scan["hardware"]["cpu"], scan["command"]) == ("aaa", "old", "firstlight scan toy")
    assert "versions" not in scan
    assert not {"commit", "hardware"} & set(plan)
    assert scan["claims"] == [
        {"claim": "it is sound", "verdict": "passed", "figure": 1.23457, "limit": 2.0, "unit": "ms"}
    ]
    assert plan["figures"] == {"decode_ms": {"value": 4.0, "unit": "ms"}}
    missing = {(entry["rung"], entry["status"], entry.get("claim")) for entry in found["not_verified"]}
    assert ("verify", "failed", None) in missing
    assert ("scan", "skipped", "it is as before") in missing
    assert ("load", "not run", None) in missing
    (verify,) = [entry for entry in found["not_verified"] if entry["rung"] == "verify" and entry["status"] == "failed"]
    assert verify["claims"][0] == {
        "claim": "it is sound",
        "verdict": "failed",
        "figure": 1.23457,
        "limit": 2.0,
        "unit": "ms",
    }


def test_an_archive_holds_events_that_lie_in_the_log_of_an_open_database(tmp_path: Path) -> None:
    run = Run.at(tmp_path / "run", "toy", "toy")
    run.add(made("scan", "aaa", "old"))
    with EventWriter(run.directory / "events.sqlite") as writer:  # another process, say: a page that is open
        writer.put(ProgressEvent(time_s=1.0, rung="load", phase="read", done=1.0))
        assert writer.flush()
        assert (run.directory / "events.sqlite-wal").stat().st_size
        assert export(run).passed
    with tarfile.open(tmp_path / "run.tar.gz") as archive:
        archive.extract("run/events.sqlite", tmp_path / "out", filter="data")
        assert not [name for name in archive.getnames() if name.endswith(("-wal", "-shm"))]
    with sqlite3.connect(tmp_path / "out" / "run" / "events.sqlite") as copy:
        assert copy.execute("select phase from progress").fetchall() == [("read",)]
    copy.close()


def test_a_run_is_exported_from_inside_itself_and_into_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`.` has the name of its folder, archives of before are no part of one, and --run says where the report goes."""
    Run.at(tmp_path / "run", "toy", "toy").add(made("scan", "aaa", "old"))
    monkeypatch.chdir(tmp_path / "run" / "reports")
    assert main(["export", "..", "--out", "../first.zip", "-q"]) == 0
    assert main(["export", "..", "--run", str(tmp_path / "other"), "-q"]) == 0
    with tarfile.open(tmp_path / "run.tar.gz") as archive:
        names = archive.getnames()
    assert "run/reports/01-scan.json" in names
    assert "run/first.zip" not in names
    assert [rung.verb for rung in Run.attach(tmp_path / "other").record.rungs] == ["export"]
    assert [rung.verb for rung in Run.attach(tmp_path / "run").record.rungs] == ["scan", "export"]
