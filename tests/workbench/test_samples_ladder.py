"""The ladder on the sample text model, a load that is lighter than `up` puts on it; test_bringup.py has `up` itself."""

import subprocess
import sys
from pathlib import Path

import pytest

from firstlight.workbench.bringup import Bringup
from firstlight.workbench.cli import main
from tests.repo.tree import ROOT


def test_smollm2_on_two_stages(smollm2: Path, tmp_path: Path) -> None:
    """Nine heads do not divide by two ranks; two pipeline stages take the layers instead."""
    assert main(["up", str(smollm2), "--run", str(tmp_path / "refused"), "-q", "--tp", "2"]) == 2
    with Bringup(smollm2, run=tmp_path / "run", pp=2) as session:
        for rung in (session.scan, session.plan, session.load, session.start, session.infer, session.verify):
            assert rung().passed, session.run.reports()[-1]
        assert session.profile(prompt_tokens=32, decode_steps=4, bandwidth=False).passed
        assert session.stress(requests=8, concurrency=4, tokens=8).passed, session.run.reports()[-1]
        assert session.export().passed
        answers = session.run.latest("infer")
    assert answers is not None
    assert any("Paris" in row["answer"] for row in answers.tables["answers"])


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The checkpoint directory, made by the script that `make up MODEL=smollm2` runs."""

    script = ROOT / "data" / "samples" / "fetch_smollm2.py"
    made = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    return Path(made.stdout.strip())
