"""A golden file whose reference was not told which tokens are of pictures is held against the same, and it is said."""

from pathlib import Path

import numpy as np
import pytest

from firstlight.engine.serving.options import EngineOptions
from firstlight.workbench import reference
from firstlight.workbench.golden import Golden
from firstlight.workbench.report import Report
from firstlight.workbench.verify import verify
from tests import vision_checkpoints as vision


@pytest.fixture(scope="module", params=["gemma3", "qwen2_5_vl"])
def home(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision.build(request.param, tmp_path_factory.mktemp("marks"))


def verdict(home: Path, golden: Path) -> tuple[Report, bool]:
    report = verify(EngineOptions(checkpoint=str(home)), golden)
    return report, any("not told which tokens" in found.message for found in report.findings)


def test_without_marks(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "TYPE_NAMES", ())
    given = vision.inputs(home.name)
    found = reference.Reference.open(home).run(given, generate=4)
    Golden.of({**given, **found}, "test").write(tmp_path / "golden.safetensors")
    report, said = verdict(home, tmp_path / "golden.safetensors")
    assert report.status == "passed"
    assert said
    assert {check.name for check in report.checks if check.status == "passed"} >= {"generated", "hidden.1", "logits"}


def test_with_marks_and_with_a_fault_nothing_is_said(home: Path, tmp_path: Path) -> None:
    path = vision.write_golden(home.name, home)
    report, said = verdict(home, path)
    assert (report.status, said) == ("passed", False)
    golden = Golden.read(path)
    golden.outputs["hidden.2"] = golden.outputs["hidden.2"] * np.float32(1.01)
    golden.write(tmp_path / "wrong.safetensors")
    report, said = verdict(home, tmp_path / "wrong.safetensors")
    assert (report.status, said) == ("failed", False)
