"""A runbook runs by itself, leaves everything in the run directory, and stops at the first rung that fails."""

import json
import re
from pathlib import Path

import nbformat
import pytest
import yaml

from firstlight.engine.errors import Refused
from firstlight.workbench.cli import main
from firstlight.workbench.events import ProgressEvent
from firstlight.workbench.report import Draft
from firstlight.workbench.runbook import parse_setting, runbook, settings_for
from firstlight.workbench.runs import Run

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "notebooks" / "runbook_template.ipynb"
MENAGERIE = ROOT / "data" / "samples" / "menagerie"


def short(path: Path, *rungs: str) -> Path:
    """The template with these rungs only."""
    notebook = nbformat.read(TEMPLATE, as_version=4)
    kept = ("parameters", "NotebookBringup", *(f"b.{rung}(" for rung in rungs), "b.close()")
    notebook.cells = [
        cell
        for cell in notebook.cells
        if cell.cell_type == "code"
        and ("parameters" in cell.metadata.get("tags", []) or any(word in cell.source for word in kept))
    ]
    nbformat.write(notebook, path)
    return path


def test_it_runs_by_itself_and_leaves_notebook_page_card_and_adaptation(tmp_path: Path) -> None:
    told: list[ProgressEvent] = []
    run = Run.create("menagerie", str(MENAGERIE), tmp_path)
    notebook = short(tmp_path / "short.ipynb", "scan", "plan", "start", "infer", "validate", "memory_map")
    report = runbook(notebook, str(MENAGERIE), run, {"tp": 2}, listener=told.append)
    assert report.passed, report
    folder = run.directory
    assert [rung.verb for rung in Run.attach(folder).record.rungs] == ["scan", "plan", "start", "infer", "validate"]
    assert {event.rung for event in told} >= {"start", "infer"}
    page = (folder / "runbook.html").read_text()
    assert "Memory by rank and role" in page
    assert "rank 1" in page
    front = page.partition("<body")[2].partition("jp-Cell")[0]
    for words in ('menagerie: <span class="passed">passed', "5 of 5 rungs", "tp 2", "answers are the expected ones"):
        assert words in front, "what passed, on what, with which limits comes first"
    assert front.index("Not verified") < front.index("verify: not run")
    assert not re.search(r"<script[^>]*src=|<link[^>]*href=.https?:|<img[^>]*src=.https?:", page), "it opens offline"
    executed = nbformat.read(folder / "runbook.ipynb", as_version=4)
    assert any("TP = 2" in cell.source for cell in executed.cells)
    card = yaml.safe_load((folder / "card.yaml").read_text())
    assert [entry["rung"] for entry in card["verified"]] == ["scan", "plan", "start", "infer", "validate"]
    assert {entry["rung"] for entry in card["not_verified"]} >= {"verify", "profile", "stress"}
    assert {"rung": "validate", "claim": "answers are those of the accepted run"}.items() <= card["not_verified"][
        -1
    ].items()
    claims = [claim for entry in card["verified"] for claim in entry["claims"]]
    assert {
        "claim": "every tensor is accounted for",
        "verdict": "passed",
        "figure": 146,
        "limit": 146,
        "unit": "tensors",
    } in claims
    assert all(claim["verdict"] == "passed" for claim in claims), "what was not looked at is no claim"
    assert all(entry["command"] for entry in card["verified"])
    assert card["hardware"]["cores"]
    assert card["versions"]["torch"]
    adaptation = yaml.safe_load((folder / "adaptation.yaml").read_text())
    assert adaptation["engine"]["mesh"]["tp"] == 2
    assert len(adaptation["validation"]) > 10


def test_it_stops_at_the_first_rung_that_fails_and_says_which(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in MENAGERIE.iterdir():
        if file.name != "model-00002-of-00003.safetensors":
            (broken / file.name).write_bytes(file.read_bytes())
    run = Run.create("broken", str(broken), tmp_path / "runs")
    earlier = Draft("stress", "broken")
    earlier.check("an earlier attempt", False)
    run.add(earlier.close())
    (run.directory / "runbook.ipynb").write_text("the first")
    report = runbook(short(tmp_path / "short.ipynb", "scan", "plan", "load"), str(broken), run)
    assert report.status == "failed"
    (check,) = [check for check in report.checks if check.name == "the notebook ran to its end"]
    assert check.status == "failed"
    assert "RungFailed: scan failed" in check.detail
    assert [rung.verb for rung in Run.attach(run.directory).record.rungs] == ["stress", "scan"]
    assert not [check for check in report.checks if check.name == "stress"], "what was there before is not its doing"
    assert (run.directory / "runbook-1.ipynb").read_text() == "the first"
    assert "missing-shard" in (run.directory / "runbook.html").read_text()
    assert yaml.safe_load((run.directory / "card.yaml").read_text())["verified"] == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tpp": 2}, "no parameter 'tpp'"),
        ({"CHECKPOINT": "x"}, "no parameter 'CHECKPOINT'"),
        ({"tp": 2, "TP": 3}, "TP is set twice"),
    ],
)
def test_a_parameter_that_the_notebook_lacks_is_refused(
    tmp_path: Path, values: dict[str, object], message: str
) -> None:
    run = Run.create("m", str(MENAGERIE), tmp_path)
    with pytest.raises(Refused, match=message):
        runbook(TEMPLATE, str(MENAGERIE), run, values)


def test_a_file_that_is_no_runbook_is_refused(tmp_path: Path) -> None:
    run = Run.create("m", str(MENAGERIE), tmp_path)
    good = json.loads(TEMPLATE.read_text())
    for name, content in (
        ("a.ipynb", "not json"),
        ("b.ipynb", json.dumps({"cells": []})),
        ("c.txt", ""),
        ("d.ipynb", json.dumps({"a": 1})),
        ("e.ipynb", json.dumps(good | {"nbformat": 3})),
        ("f.ipynb", json.dumps(good | {"cells": None})),
        ("g.ipynb", json.dumps(good | {"cells": [{"cell_type": "code"}]})),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(Refused):
            runbook(tmp_path / name, str(MENAGERIE), run)
    with pytest.raises(Refused, match="is no notebook"):
        runbook(tmp_path / "absent.ipynb", str(MENAGERIE), run)
    cell = nbformat.v4.new_code_cell("TP = 1", metadata={"tags": ["parameters"]})
    notebook = nbformat.v4.new_notebook(cells=[cell], metadata=nbformat.read(TEMPLATE, as_version=4).metadata)
    nbformat.write(notebook, tmp_path / "d.ipynb")
    with pytest.raises(Refused, match="no parameters CHECKPOINT, RUN, STOP"):
        runbook(tmp_path / "d.ipynb", str(MENAGERIE), run)


def test_a_refused_notebook_leaves_no_run_directory(tmp_path: Path) -> None:
    """One that is there, with a rung in it, says what was refused."""
    (tmp_path / "empty").mkdir()
    for name in ("new/run", "empty"):
        assert main(["runbook", "absent.ipynb", str(MENAGERIE), "--run", str(tmp_path / name)]) == 2
    assert not (tmp_path / "new" / "run").exists()
    assert list((tmp_path / "empty").iterdir()) == []
    assert main(["plan", str(MENAGERIE), "--tp", "3", "--run", str(tmp_path / "run")]) == 2
    assert main(["runbook", "absent.ipynb", str(MENAGERIE), "--run", str(tmp_path / "run")]) == 2
    assert [rung.verb for rung in Run.attach(tmp_path / "run").record.rungs] == ["plan", "runbook"]


def test_settings_are_read_as_yaml() -> None:
    assert parse_setting("tp=2") == ("tp", 2)
    assert parse_setting("dtype=f32") == ("dtype", "f32")
    assert parse_setting("golden=a=b") == ("golden", "a=b")
    wished = [parse_setting("tp=2"), parse_setting("attention=whole")]
    assert settings_for(TEMPLATE, wished) == {"TP": 2, "ATTENTION": "whole"}
    for wrong in ("tp", "=2", "t p=2", "tp=[1"):
        with pytest.raises(ValueError, match="tp"):
            parse_setting(wrong if "tp" in wrong else f"{wrong}  # tp")
