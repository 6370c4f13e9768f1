"""A live run and a dashboard over it in a process of its own, which end with their file; what a page complains of."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from firstlight.workbench import Bringup
from firstlight.workbench.infer import Question
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
MENAGERIE = ROOT / "data" / "samples" / "menagerie"
PICTURES = ROOT / "data" / "samples" / "pictures"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs that the dashboard shows."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def live(runs: Path) -> Iterator[Bringup]:
    """A run of the sample model on two ranks that went up the ladder and whose engine answers."""
    with Bringup(MENAGERIE, run=runs / "live", tp=2, max_context=256, telemetry_hz=5.0) as bringup:
        for report in (bringup.scan(), bringup.plan(), bringup.load(), bringup.start()):
            assert report.passed, report
        questions = [Question(prompt="What animal is this?", picture=PICTURES / "cat.png", name="cat")]
        bringup.infer([*questions, Question(prompt="What does a cow say?")])
        assert bringup.verify().passed
        assert bringup.profile(bandwidth=False).passed
        yield bringup


@pytest.fixture(scope="module")
def address(runs: Path, live: Bringup) -> Iterator[str]:
    """Where the dashboard listens."""
    yield from serve(str(runs), "--port", "0")


def serve(*arguments: str) -> Iterator[str]:
    """A dashboard as its own process, for the time of the iteration; the address in its report.

    Nothing but the report is on its standard output, and it ends when told to even where nobody reads that any more.
    """
    command = [sys.executable, "-m", "firstlight.workbench", "dashboard", *arguments, "--json", "-"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        report = json.loads("".join(iter(process.stdout.readline, "}\n")) + "}")
        yield report["metrics"]["url"]["value"]
    finally:
        assert process.stdout is not None
        process.stdout.close()
        process.terminate()
        process.wait(PATIENCE_S)


class Errors(list[str]):
    """What a page complained about."""

    def watch(self, page: Any) -> Any:
        page.set_default_timeout(1000 * PATIENCE_S)
        page.on("pageerror", lambda error: self.append(str(error)))
        page.on("console", lambda message: self._complain(message) if message.type == "error" else None)
        return page

    def _complain(self, message: Any) -> None:
        self.append(f"{message.text} ({message.location.get('url', '')})")


@pytest.fixture
def errors() -> Errors:
    return Errors()
