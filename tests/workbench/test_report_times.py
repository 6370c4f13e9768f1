"""However a call ends, its report is about what was named and tells when the call began and how long it took."""

from __future__ import annotations

import datetime
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.workbench import Bringup
from firstlight.workbench.report import interruption, since
from tests.waiting import PATIENCE_S

HELD_S = 0.5


@pytest.mark.parametrize(("ends", "status"), [("interrupt", 130), ("refusal", 2)])
def test_a_call_that_has_no_report_of_its_own(ends: str, status: int, tmp_path: Path) -> None:
    """It waits for a server for a while, and then is interrupted, or gets an answer that it refuses."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/model"
        report = tmp_path / "report.json"
        command = [sys.executable, "-m", "firstlight.workbench", "load", url, "--json", str(report)]
        asked = datetime.datetime.now(datetime.UTC)
        with subprocess.Popen(command, stderr=subprocess.PIPE) as verb:
            server.settimeout(PATIENCE_S)
            connection, _ = server.accept()
            with connection:
                time.sleep(HELD_S)  # what the call must have taken, at least
                if ends == "interrupt":
                    verb.send_signal(signal.SIGINT)
                else:
                    connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                verb.communicate(timeout=PATIENCE_S)
    said = json.loads(report.read_text())
    assert (verb.returncode, said["title"]) == (status, "model")
    took = datetime.datetime.now(datetime.UTC) - asked
    assert HELD_S <= said["duration_s"] <= took.total_seconds()
    began = datetime.datetime.fromisoformat(said["started"])
    assert asked <= began <= asked + took - datetime.timedelta(seconds=HELD_S)


def test_a_rung_of_a_bringup_that_is_refused_late(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*_: object, **__: object) -> None:
        time.sleep(HELD_S)
        raise Refused(fatal("read-failed", "the disk went away", next="look at it"))

    monkeypatch.setattr("firstlight.workbench.load.load", late)
    with Bringup(str(checkpoint("llama")), run=tmp_path / "run") as bringup:
        report = bringup.load()
        assert (report.status, report.findings[0].code) == ("refused", "read-failed")
        assert report.duration_s >= HELD_S
        assert bringup.run.record.rungs[-1].duration_s == report.duration_s


def test_times_are_those_of_what_began() -> None:
    report = since(interruption("scan", "toy"), time.perf_counter() - 3600)
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(report.started)
    assert report.duration_s == pytest.approx(3600, abs=60)
    assert age.total_seconds() == pytest.approx(3600, abs=60)
