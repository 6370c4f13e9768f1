"""A missing side file is a warning where a verb can go on, and a refusal before any start where it cannot."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from firstlight.engine.parallel.hardware import parse_cluster
from firstlight.engine.serving.options import EngineOptions
from firstlight.workbench.cli import main
from firstlight.workbench.load import load
from firstlight.workbench.plan import plan
from firstlight.workbench.scan import scan
from firstlight.workbench.verify import verify

Get = Callable[[str], Path]
MENAGERIE = Path(__file__).parents[2] / "data" / "samples" / "menagerie"


def test_scan_plan_load_and_verify_warn_and_go_on(checkpoint: Get, golden_file: Get) -> None:
    home = checkpoint("llava-clip")
    assert not (home / "tokenizer.json").exists()
    reports = [
        scan(home),
        plan(home, parse_cluster("1xH200")),
        load(home),
        verify(EngineOptions(checkpoint=str(home), threads=1), golden_file("llava-clip")),
    ]
    for report in reports:
        assert report.status == "passed", report.verb
        missing = {f.file: f.severity for f in report.findings if f.code == "missing-side-file"}
        assert missing["tokenizer.json"] == missing["preprocessor_config.json"] == "warning", report.verb


def test_a_configuration_alone_misses_no_side_files() -> None:
    report = plan("llama-3.1-405b", parse_cluster("8xH200"))
    assert not [finding for finding in report.findings if finding.code == "missing-side-file"]


@pytest.mark.parametrize(("absent", "image"), [("tokenizer.json", False), ("processor_config.json", True)])
def test_generate_is_refused_before_an_engine_starts(
    absent: str, image: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "menagerie"
    shutil.copytree(MENAGERIE, home)
    (home / absent).unlink()
    words = ["generate", str(home), "--prompt", "hello", "--tp", "3"]  # which a start would stumble over first
    words += ["--image", str(MENAGERIE.parent / "pictures" / "cat.png")] if image else []
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "is not there" in error
    assert "next" in error


def test_scan_lists_the_constants_of_pictures_and_says_which_come_from_a_class(checkpoint: Get, tmp_path: Path) -> None:
    home = Path(shutil.copytree(checkpoint("llava-clip"), tmp_path / "model"))
    file = home / "preprocessor_config.json"
    file.write_text(json.dumps({"image_processor_type": "CLIPImageProcessor", "image_mean": [0.5, 0.5, 0.5]}))
    report = scan(home)
    sources = {row["constant"]: row["source"] for row in report.tables["constants"]}
    assert sources["image_mean"] == "preprocessor_config.json: image_mean"
    assert sources["image_std"] == "default of CLIPImageProcessor"
    defaults = {f.expected for f in report.findings if f.code == "class-default" and f.severity == "warning"}
    assert "image_std" in defaults
    assert "image_mean" not in defaults
    assert report.status == "passed"
    file.write_text(json.dumps({"image_processor_type": "NobodysImageProcessor"}))
    (unknown,) = [f for f in scan(home).findings if f.code == "unsupported-block"]
    assert (unknown.severity, unknown.found) == ("warning", "NobodysImageProcessor")
