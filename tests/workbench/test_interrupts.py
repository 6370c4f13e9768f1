"""Interrupts are not lost: not while libraries are imported, nor in the background of a shell."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from firstlight.workbench.__main__ import Early
from firstlight.workbench.interrupts import listening
from firstlight.workbench.outlet import Outlet
from firstlight.workbench.report import Report, interruption
from tests.waiting import PATIENCE_S, until

# Ends the process where torch would be imported: 0 if numpy was imported before it. torch imports numpy itself from a
# place that drops every exception, an interrupt too, and then goes on without numpy.
WATCH = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.exit(0 if hasattr(sys.modules.get("numpy"), "ndarray") else 3)

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize(
    "start",
    [
        "import firstlight.workbench.load",
        "from firstlight.workbench.engines import start_here; start_here(None, None)",
    ],
)
def test_numpy_is_imported_before_torch(start: str) -> None:
    command = [sys.executable, "-c", f"{WATCH}\n{start}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_verb_can_be_interrupted_in_the_background_too(before: signal.Handlers) -> None:
    """A shell has SIGINT ignored in what it starts in the background; who sends it all the same means it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/model"
        command = [sys.executable, "-m", "firstlight.workbench", "scan", url]
        old = signal.signal(signal.SIGINT, before)  # inherited
        try:
            verb = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        finally:
            signal.signal(signal.SIGINT, old)
        with verb:
            server.settimeout(PATIENCE_S)
            connection, _ = server.accept()  # it waits for an answer now
            with connection:
                verb.send_signal(signal.SIGINT)
                _, err = verb.communicate(timeout=PATIENCE_S)
    assert (verb.returncode, err) == (130, "interrupted\n")


def _wait(act: Callable[[], object]) -> None:
    act()
    time.sleep(5)


def test_an_interrupt_waits_for_the_end_of_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(0.1)\nDONE = True\n"
    (tmp_path / "slow_to_import.py").write_text(lines)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt), listening():
        _wait(lambda: import_module("slow_to_import"))
    assert sys.modules.pop("slow_to_import").DONE
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), listening():
        _wait(lambda: os.kill(os.getpid(), signal.SIGINT))
    assert signal.getsignal(signal.SIGINT) is before


def _finish(make: Callable[[], object]) -> None:
    """Makes one, which ends at once, and waits for what comes of it."""
    make()
    until(lambda: False)


def test_an_interrupt_that_comes_in_a_finaliser_is_not_lost() -> None:
    class Late:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), listening():
        _finish(Late)
    assert sys.unraisablehook.__module__ != listening.__module__


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_came_before_python_ran_is_heard_and_told_as_a_report(number: signal.Signals, tmp_path: Path) -> None:
    """As `make install` has `firstlight` begin: held back by whoever starts it, with the signal on its way already."""

    def before() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [number])
        os.kill(os.getpid(), number)

    command = [sys.executable, "-m", "firstlight.workbench", "scan", str(tmp_path), "--json"]
    for where in ("-", str(tmp_path / "r.json")):
        ended = subprocess.run([*command, where], preexec_fn=before, capture_output=True, text=True)
        assert (ended.returncode, ended.stderr) == (130, "interrupted\n")
        said = json.loads(ended.stdout or (tmp_path / "r.json").read_text())
        assert (said["verb"], said["status"], said["findings"][0]["code"]) == ("scan", "failed", "interrupted")


def test_an_interrupt_that_was_heard_early_is_raised_when_somebody_listens() -> None:
    early, before = Early(), signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, early)
    try:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), listening():
            raise AssertionError("it went on")
    finally:
        signal.signal(signal.SIGINT, before)


def test_standard_output_gets_one_report_and_a_file_the_last(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`serve` tells that it is ready, and may fail hours later."""
    first, then = interruption("first", "toy"), interruption("then", "toy")
    spoken, kept = Outlet(("serve", "--json", "-")), Outlet(("serve", f"--json={tmp_path / 'r.json'}"))
    for report in (first, then):
        spoken.write(report)
        kept.write(report)
    assert json.loads(capsys.readouterr().out)["verb"] == "first"
    assert Report.read(tmp_path / "r.json").verb == "then"
    assert (spoken.is_done, kept.is_done, Outlet(("serve",)).is_done) == (True, True, True)


def test_a_report_is_written_whole_before_an_interrupt_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        text = ""

        def write(self, text: str) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.001)
            self.text += text

        def flush(self) -> None: ...

    slow = Slow()
    monkeypatch.setattr(sys, "stdout", slow)
    with pytest.raises(KeyboardInterrupt), listening():
        _wait(lambda: Outlet(("scan", "--json", "-")).write(interruption("scan", "toy")))
    assert json.loads(slow.text)["verb"] == "scan"


def test_a_full_place_is_refused_in_a_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "firstlight.workbench", "scan", str(tmp_path)]
    for more in (["--json", "-"], ["--help"]):
        with Path("/dev/full").open("wb") as full:
            ended = subprocess.run([*command, *more], stdout=full, stderr=subprocess.PIPE, text=True)
        assert ended.returncode == 2
        assert "No space left on device" in ended.stderr
        assert "Traceback" not in ended.stderr
