"""The notebook runs from top to bottom on two ranks, and its page shows every figure without scripts."""

import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter

from tests.repo.tree import ROOT
from tests.waiting import PATIENCE_S

NOTEBOOK = ROOT / "notebooks" / "00_first_light.ipynb"


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> nbformat.NotebookNode:
    """The notebook as JupyterLab would save it after running all cells, its run directory outside the repository."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    runs = tmp_path_factory.mktemp("runs")
    parameters.source += f"\nRUNS = {str(runs)!r}"
    where = {"metadata": {"path": str(ROOT)}}
    client = NotebookClient(notebook, timeout=300, startup_timeout=int(PATIENCE_S), resources=where)
    client.execute()
    notebook.metadata["runs"] = str(runs)
    return notebook


def _cell(notebook: nbformat.NotebookNode, source: str) -> nbformat.NotebookNode:
    (found,) = [c for c in notebook.cells if c.cell_type == "code" and c.source.strip().endswith(source)]
    return found


def test_every_rung_passed(executed: nbformat.NotebookNode) -> None:
    (run,) = [path for path in Path(executed.metadata["runs"]).iterdir() if path.is_dir()]  # the archive is beside it
    reports = {path.stem[3:]: json.loads(path.read_text()) for path in sorted((run / "reports").glob("*.json"))}
    assert {verb: report["status"] for verb, report in reports.items()} == dict.fromkeys(
        ("scan", "plan", "load", "start", "infer", "verify", "profile", "export"), "passed"
    )


def test_the_page_shows_the_figures_without_scripts(executed: nbformat.NotebookNode) -> None:
    page, _ = HTMLExporter().from_notebook_node(executed)
    for words in ("Memory by rank and role", "Error per layer against the reference", "Where a step goes", "A cat."):
        assert words in page, words
    assert "rank 1" in page
    live = [
        mime
        for cell in executed.cells
        for out in cell.get("outputs", ())
        for mime in out.get("data", {})
        if "widget" in mime
    ]
    assert len(live) <= 1, "only the box for asking stays live; every other view is replaced by its twin"


def test_nothing_is_left_running(executed: nbformat.NotebookNode) -> None:
    found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    runs = executed.metadata["runs"]
    assert not [line for line in found.splitlines() if runs in line and sys.executable in line]


def test_the_repository_holds_it_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in notebook.cells)
