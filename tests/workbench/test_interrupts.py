"""Interrupts are not lost: not while libraries are imported, nor in the background of a shell."""

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

from firstlight.workbench.interrupts import listening

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
    ended = subprocess.run([sys.executable, "-c", f"{WATCH}\n{start}"], capture_output=True, text=True, timeout=60)
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
            server.settimeout(30)
            connection, _ = server.accept()  # it waits for an answer now
            with connection:
                verb.send_signal(signal.SIGINT)
                _, err = verb.communicate(timeout=30)
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
