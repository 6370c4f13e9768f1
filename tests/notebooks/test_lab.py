"""Notebooks in a real JupyterLab, driven through a real browser: cells run, widgets move, nothing is left behind."""

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import nbformat
import pytest

from tests.ports import free_port
from tests.repo.tree import ROOT
from tests.waiting import PATIENCE_S, alive, gone, until

MENAGERIE = ROOT / "data" / "samples" / "menagerie"
PICTURES = ROOT / "data" / "samples" / "pictures"
LIVE = ROOT / "notebooks" / "60_live_text_and_images.ipynb"

pytestmark = pytest.mark.slow


class Lab:
    """A JupyterLab on loopback with a folder of its own; `page` is a browser's."""

    page: Any

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._token = secrets.token_hex(16)
        self._port = free_port()
        homes = {f"JUPYTER_{kind}_DIR": str(folder / kind.lower()) for kind in ("CONFIG", "RUNTIME", "DATA")}
        homes["JUPYTERLAB_WORKSPACES_DIR"] = homes["JUPYTERLAB_SETTINGS_DIR"] = str(folder / "lab")
        options = [
            "--ServerApp.ip=127.0.0.1",
            f"--ServerApp.port={self._port}",
            f"--IdentityProvider.token={self._token}",
        ]
        options += ["--ServerApp.open_browser=False", f"--ServerApp.root_dir={folder}"]
        options += ["--LabApp.news_url=", "--allow-root", "--ServerApp.terminals_enabled=False"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options],
            env={**os.environ, **homes, "PYTHONPATH": str(ROOT)},
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._url = f"http://127.0.0.1:{self._port}"
        until(self._answers, "JupyterLab does not answer", every_s=0.2)

    def _answers(self) -> bool:
        assert self._process.poll() is None, "JupyterLab has ended"
        try:
            return httpx.get(f"{self._url}/api/status?token={self._token}", timeout=PATIENCE_S).status_code == 200
        except httpx.TransportError:
            return False

    def open(self, name: str, cells: list[str]) -> None:
        """A notebook of these cells, in front, its kernel ready."""
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(notebook, self.folder / name)
        self.page.goto(f"{self._url}/lab/tree/{name}?token={self._token}&reset")
        self.page.locator(".jp-NotebookPanel:visible .jp-Cell").first.wait_for()
        until(lambda: self._is_idle(name), "the kernel does not wait for work", every_s=0.2)
        self.page.locator(".jp-NotebookPanel:visible .jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()

    def _is_idle(self, name: str) -> bool:
        """Whether the notebook has a kernel that waits for work; another notebook's may have been idle for long."""
        sessions = httpx.get(f"{self._url}/api/sessions?token={self._token}", timeout=PATIENCE_S).json()
        return [one["kernel"]["execution_state"] for one in sessions if one["path"] == name] == ["idle"]

    def run(self, cell: int) -> Any:
        """Runs one cell; the place of its output. Does not wait."""
        place = self.page.locator(".jp-NotebookPanel:visible .jp-Notebook-cell").nth(cell)
        place.locator(".cm-content").click()
        self.page.keyboard.press("Control+Enter")
        return place

    def kernels(self) -> list[dict[str, Any]]:
        return list(httpx.get(f"{self._url}/api/kernels?token={self._token}", timeout=PATIENCE_S).json())

    def tell_kernel(self, verb: str) -> None:
        """`restart` or `interrupt`, as the menus do."""
        (kernel,) = self.kernels()
        answer = httpx.post(f"{self._url}/api/kernels/{kernel['id']}/{verb}?token={self._token}", timeout=PATIENCE_S)
        assert answer.status_code < 300, answer.text

    def end_kernels(self) -> None:
        for session in httpx.get(f"{self._url}/api/sessions?token={self._token}", timeout=PATIENCE_S).json():
            httpx.delete(f"{self._url}/api/sessions/{session['id']}?token={self._token}", timeout=PATIENCE_S)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def kept_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab(tmp_path_factory.mktemp("lab"))
    try:
        yield lab
    finally:
        lab.close()


@pytest.fixture
def lab(kept_lab: Lab, browser: Any) -> Iterator[Lab]:
    """With a page of its own; kernels that a test leaves go with it."""
    kept_lab.page = browser.new_page(viewport={"width": 1280, "height": 1400})
    kept_lab.page.set_default_timeout(1000 * PATIENCE_S)
    yield kept_lab
    kept_lab.page.close()
    kept_lab.end_kernels()


def engines(runs: Path) -> list[int]:
    """Processes that live, of engines whose runs lie in the folder: the supervisor's and the ranks'."""
    found = []
    for path in runs.glob("*/engine/host.json"):
        handle = json.loads(path.read_text())
        found += alive((handle["pid"], *handle["pids"]))
    return found


def cells_of(path: Path, runs: Path) -> list[str]:
    """The code of a notebook of ours up to its box for asking, on this checkout, its runs elsewhere."""
    notebook: Any = nbformat.read(path, as_version=4)
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    last = next(index for index, source in enumerate(code) if "b.box(" in source)
    code[0] += f"\nCHECKPOINT, PICTURES, RUNS = {str(MENAGERIE)!r}, {str(PICTURES)!r}, {str(runs)!r}\nTP = 1"
    return [f"import os\nos.chdir({str(ROOT)!r})\n{code[0]}", *code[1 : last + 1]]


def test_the_live_notebook_answers_a_typed_question_about_an_uploaded_picture(lab: Lab, tmp_path: Path) -> None:
    """Widgets in the browser reach the engine; restarting the kernel leaves no process of it."""
    cells = cells_of(LIVE, tmp_path / "runs")
    cells[1] = cells[1].replace("b.load()", "b.load(step=True)")
    lab.open("live.ipynb", cells)
    lab.run(0)
    bring_up = lab.run(1)
    for _ in range(2):  # the load waits for a hand: layer by layer, then on
        bring_up.get_by_text("held behind").first.wait_for()
        before = bring_up.get_by_text("held behind").first.inner_text()
        bring_up.get_by_role("button", name="Next layer").click()
        until(lambda before=before: bring_up.get_by_text("held behind").first.inner_text() != before)
    bring_up.get_by_role("button", name="Go on").click()
    asking = lab.run(2)
    box = asking.locator("input[type=text]").first
    box.wait_for()
    asking.get_by_text("Moo.").first.wait_for()  # what the cell asks by itself
    assert engines(tmp_path / "runs")
    with lab.page.expect_file_chooser() as chosen:
        asking.locator("button.jupyter-widgets:has-text('Picture')").click()
    chosen.value.set_files(PICTURES / "lion_tall.jpg")
    asking.get_by_text("Picture (1)").wait_for()
    box.fill("Is there a lion?")
    box.press("Enter")
    asking.get_by_role("button", name="Ask", exact=True).click()
    asking.get_by_text("Yes.").first.wait_for()
    bring_up.get_by_text("held behind layer 0").first.wait_for()  # the static twin of the stepping
    assert bring_up.get_by_role("button", name="Next layer").count() == 0
    running = engines(tmp_path / "runs")
    lab.tell_kernel("restart")
    gone(running)


def test_an_engine_that_was_started_detached_outlives_its_kernel_and_another_attaches(lab: Lab, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "kept"
    begin = f"from firstlight.workbench import Bringup\nrun = {str(run)!r}\n"
    start = f"b = Bringup({str(MENAGERIE)!r}, run=run, detached=True, max_context=256, telemetry_hz=0)\n"
    lab.open("kept.ipynb", [begin + start + "b.scan(), b.plan(), b.load(), b.start()\nprint('is', 'up')"])
    lab.run(0).get_by_text("is up").first.wait_for()
    pid = json.loads((run / "engine" / "host.json").read_text())["pid"]
    try:
        lab.tell_kernel("restart")
        until(lambda: lab.kernels()[0]["execution_state"] == "idle", "the kernel does not come back")
        assert alive([pid])
        ask = "b = Bringup.attach(run)\nprint('it says', b.ask('What does a cow say?', stream=False).text)\n"
        lab.open("again.ipynb", [begin + ask + "b.host.stop()"])
        cell = lab.run(0)
        cell.get_by_text("it says Moo.").first.wait_for()
        gone([pid])
    finally:
        if alive([pid]):
            os.kill(pid, signal.SIGTERM)
