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
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.serving.options import EngineOptions
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.workbench import Bringup
from firstlight.workbench.load import load
from firstlight.workbench.one_rank import one_rank
from firstlight.workbench.propose import propose
from firstlight.workbench.report import Report, interruption, since
from firstlight.workbench.scan import scan
from firstlight.workbench.verify import verify
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


@pytest.mark.parametrize(
    "rung",
    [
        lambda home, _: scan(home),
        lambda home, _: load(home, limit=False),
        lambda home, _: one_rank(home, Mesh(), 0),
        lambda home, folder: propose(home, folder / "draft.py"),
        lambda home, _: verify(EngineOptions(checkpoint=str(home), threads=1), reference="transformers"),
    ],
    ids=["scan", "load", "one rank", "propose", "verify"],
)
def test_a_rung_takes_the_time_of_opening_the_checkpoint_too(
    rung: Callable[[Path, Path], Report],
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = Checkpoint.open

    def slowly(source: str | Path) -> Checkpoint:
        time.sleep(HELD_S)
        return opened(source)

    monkeypatch.setattr(Checkpoint, "open", slowly)
    asked_s = time.perf_counter()
    report = rung(checkpoint("llama"), tmp_path)
    assert HELD_S <= report.duration_s <= time.perf_counter() - asked_s


def test_times_are_those_of_what_began() -> None:
    report = since(interruption("scan", "toy"), time.perf_counter() - 3600)
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(report.started)
    assert report.duration_s == pytest.approx(3600, abs=60)
    assert age.total_seconds() == pytest.approx(3600, abs=60)
