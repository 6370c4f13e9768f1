"""Notebooks in a real JupyterLab, driven through a real browser: cells run, widgets move, nothing is left behind."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import nbformat
import psutil
import pytest

from tests.dashboards.conftest import ARGUMENTS, BROWSER
from tests.repo.tree import ROOT

MENAGERIE = ROOT / "data" / "samples" / "menagerie"
PICTURES = ROOT / "data" / "samples" / "pictures"
LIVE = ROOT / "notebooks" / "60_live_text_and_images.ipynb"

pytestmark = pytest.mark.slow


class Lab:
    """A JupyterLab on loopback with a folder of its own, and a page of a browser in it."""

    def __init__(self, folder: Path, browser: Any) -> None:
        self.folder = folder
        self._token = secrets.token_hex(16)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
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
        wait_until(self._answers, 120)
        self.page = browser.new_page(viewport={"width": 1280, "height": 1400})
        self.page.set_default_timeout(60_000)

    def _answers(self) -> bool:
        assert self._process.poll() is None, "JupyterLab has ended"
        try:
            return httpx.get(f"{self._url}/api/status?token={self._token}").status_code == 200
        except httpx.TransportError:
            return False

    def open(self, name: str, cells: list[str]) -> None:
        """A notebook of these cells, in front, its kernel ready."""
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(notebook, self.folder / name)
        self.page.goto(f"{self._url}/lab/tree/{name}?token={self._token}&reset")
        self.page.locator(".jp-NotebookPanel:visible .jp-Cell").first.wait_for()
        wait_until(lambda: self._is_idle(name), 90)
        self.page.locator(".jp-NotebookPanel:visible .jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()

    def _is_idle(self, name: str) -> bool:
        """Whether the notebook has a kernel that waits for work; another notebook's may have been idle for long."""
        sessions = httpx.get(f"{self._url}/api/sessions?token={self._token}").json()
        return [one["kernel"]["execution_state"] for one in sessions if one["path"] == name] == ["idle"]

    def run(self, cell: int) -> Any:
        """Runs one cell; the place of its output. Does not wait."""
        place = self.page.locator(".jp-NotebookPanel:visible .jp-Notebook-cell").nth(cell)
        place.locator(".cm-content").click()
        self.page.keyboard.press("Control+Enter")
        return place

    def kernels(self) -> list[dict[str, Any]]:
        return list(httpx.get(f"{self._url}/api/kernels?token={self._token}").json())

    def tell_kernel(self, verb: str) -> None:
        """`restart` or `interrupt`, as the menus do."""
        (kernel,) = self.kernels()
        answer = httpx.post(f"{self._url}/api/kernels/{kernel['id']}/{verb}?token={self._token}", timeout=60)
        assert answer.status_code < 300, answer.text

    def close(self) -> None:
        self.page.close()
        for kernel in self.kernels():
            httpx.delete(f"{self._url}/api/kernels/{kernel['id']}?token={self._token}", timeout=60)
        self._process.terminate()
        self._process.wait(30)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if not Path(BROWSER).exists():
        pytest.skip(f"there is no browser at {BROWSER}; on Debian: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        started = play.chromium.launch(executable_path=BROWSER, args=ARGUMENTS)
        yield started
        started.close()


@pytest.fixture
def lab(tmp_path: Path, browser: Any) -> Iterator[Lab]:
    lab = Lab(tmp_path, browser)
    yield lab
    lab.close()


def engines(runs: Path) -> list[int]:
    """Processes that live, of engines whose runs lie in the folder: the supervisor's and the ranks'."""
    found = []
    for path in runs.glob("*/engine/host.json"):
        handle = json.loads(path.read_text())
        found += [pid for pid in (handle["pid"], *handle["pids"]) if is_alive(pid)]
    return found


def is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], object], seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until_s, "it did not happen in time"
        time.sleep(0.2)


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
        bring_up.get_by_text("held behind").first.wait_for(timeout=120_000)
        before = bring_up.get_by_text("held behind").first.inner_text()
        bring_up.get_by_role("button", name="Next layer").click()
        wait_until(lambda before=before: bring_up.get_by_text("held behind").first.inner_text() != before, 30)
    bring_up.get_by_role("button", name="Go on").click()
    asking = lab.run(2)
    box = asking.locator("input[type=text]").first
    box.wait_for(timeout=180_000)
    asking.get_by_text("Moo.").first.wait_for(timeout=60_000)  # what the cell asks by itself
    assert engines(tmp_path / "runs")
    with lab.page.expect_file_chooser() as chosen:
        asking.locator("button.jupyter-widgets:has-text('Picture')").click()
    chosen.value.set_files(PICTURES / "lion_tall.jpg")
    asking.get_by_text("Picture (1)").wait_for()
    box.fill("Is there a lion?")
    box.press("Enter")
    asking.get_by_role("button", name="Ask", exact=True).click()
    asking.get_by_text("Yes.").first.wait_for(timeout=60_000)
    bring_up.get_by_text("held behind layer 0").first.wait_for()  # the static twin of the stepping
    assert bring_up.get_by_role("button", name="Next layer").count() == 0
    running = engines(tmp_path / "runs")
    lab.tell_kernel("restart")
    wait_until(lambda: not any(map(is_alive, running)), 60)


def test_an_engine_that_was_started_detached_outlives_its_kernel_and_another_attaches(lab: Lab, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "kept"
    begin = f"from firstlight.workbench import Bringup\nrun = {str(run)!r}\n"
    start = f"b = Bringup({str(MENAGERIE)!r}, run=run, detached=True, max_context=256, telemetry_hz=0)\n"
    lab.open("kept.ipynb", [begin + start + "b.scan(), b.plan(), b.load(), b.start()\nprint('is', 'up')"])
    lab.run(0).get_by_text("is up").first.wait_for(timeout=180_000)
    pid = json.loads((run / "engine" / "host.json").read_text())["pid"]
    try:
        lab.tell_kernel("restart")
        time.sleep(2.0)
        assert is_alive(pid)
        ask = "b = Bringup.attach(run)\nprint('it says', b.ask('What does a cow say?', stream=False).text)\n"
        lab.open("again.ipynb", [begin + ask + "b.host.stop()"])
        cell = lab.run(0)
        cell.locator(".jp-OutputArea-output").first.wait_for(timeout=90_000)
        assert "it says Moo." in cell.inner_text()
        wait_until(lambda: not is_alive(pid), 60)
    finally:
        if is_alive(pid):
            os.kill(pid, signal.SIGTERM)
