"""Every notebook runs from top to bottom on the sample model, leaves nothing behind, and is kept without outputs."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from firstlight.workbench.page import notebook_page
from tests.repo.tree import ROOT
from tests.waiting import PATIENCE_S

SHOWN = {  # what each page must show
    "10_scan_and_plan_a_giant": ("497,220 tensors", "2,779,931,837,184 parameters", "Memory by rank and role"),
    "20_load_and_memory": ("resident bytes are those planned", "Memory by rank and role", "streamed", "Moo."),
    "30_new_architecture": ("unknown-architecture", "no kernel knows the activation snake", "2 of them changed"),
    "40_verify_and_bisect": (
        "first bad",
        "layer 2 is the first block that computes something else",
        "Error per layer against the reference",
    ),
    "50_profile_and_overlap": ("One decode step", "collectives", "Where a step goes"),
    "60_live_text_and_images": ("A cat.", "pixel_values", "greedy answers under load", "Moo."),
}
ON_ONE_RANK = ("20_load_and_memory", "40_verify_and_bisect", "60_live_text_and_images")  # the others show two
ELSEWHERE = {"00_first_light": "test_first_light.py", "runbook_template": "tests/workbench/test_runbook.py"}


def test_every_notebook_is_tried_somewhere() -> None:
    there = {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert there == set(SHOWN) | set(ELSEWHERE)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWN)
def test_it_runs_and_its_page_shows_what_it_found(name: str, tmp_path: Path) -> None:
    notebook: Any = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "it is kept without outputs"
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    parameters.source += f"\nRUNS = {str(tmp_path / 'runs')!r}"
    if name in ON_ONE_RANK:
        parameters.source += "\nTP = 1"
    where = {"metadata": {"path": str(ROOT)}}
    NotebookClient(notebook, timeout=300, startup_timeout=int(PATIENCE_S), resources=where).execute()
    nbformat.write(notebook, tmp_path / "executed.ipynb")
    page = notebook_page(tmp_path / "executed.ipynb")
    for words in SHOWN[name]:
        assert words in page, words
    assert "Traceback" not in page
