"""The whole ladder on the sample text model, as `make up` climbs it; tests/workbench/test_bringup.py has the other."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from firstlight.workbench.cli import main
from tests.repo.tree import ROOT

RUNGS = ("scan", "plan", "load", "start", "infer", "verify", "profile", "export")


def _climb(checkpoint: Path, run: Path, *arguments: str) -> dict[str, Any]:
    """`firstlight up`; the reports by verb."""
    assert main(["up", str(checkpoint), "--run", str(run), "-q", *arguments]) == 0
    return {path.stem[3:]: json.loads(path.read_text()) for path in sorted((run / "reports").glob("*.json"))}


def test_smollm2_on_two_stages(smollm2: Path, tmp_path: Path) -> None:
    """Nine heads do not divide by two ranks; two pipeline stages take the layers instead."""
    assert main(["up", str(smollm2), "--run", str(tmp_path / "refused"), "-q", "--tp", "2"]) == 2
    reports = _climb(smollm2, tmp_path / "run", "--pp", "2")
    assert {verb: reports[verb]["status"] for verb in RUNGS} == dict.fromkeys(RUNGS, "passed")
    assert any("Paris" in row["answer"] for row in reports["infer"]["tables"]["answers"])


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The checkpoint directory, made by the script that `make up MODEL=smollm2` runs."""

    script = ROOT / "data" / "samples" / "fetch_smollm2.py"
    made = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    return Path(made.stdout.strip())
