"""`python -m tests.pictures [WHAT ...]`: takes the pictures of README and dashboard from real runs of the samples.

WHAT is `dashboard`, `loading` (one that is under way, of SmolLM2 from a slow source) or `notebook`; all without it. The
figures in them are those of the machine as it is: take them while nothing else runs.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
from nbclient import NotebookClient

from firstlight.workbench.page import notebook_page
from tests.browser import ARGUMENTS, BROWSER
from tests.dashboards.conftest import MENAGERIE, PICTURES, ROOT, serve
from tests.dashboards.test_pages import HAS_READ_THE_FILE
from tests.dashboards.test_working import limited
from tests.engine.weights.far import served
from tests.waiting import PATIENCE_S, until

DASHBOARD, NOTEBOOK = ROOT / "dashboards" / "pictures", ROOT / "notebooks" / "pictures"
SIZE, NARROW = (1280, 860), (400, 860)
SHOWN = ("b.memory_map()", "box = b.box(", "b.errors()", "b.step_split()")  # cells of the notebook, by how they begin
KEEP = """shown => document.querySelectorAll(".jp-Cell").forEach(cell => {
  const code = cell.querySelector(".jp-CodeMirrorEditor, .jp-InputArea-editor");
  if (!code || !shown.some(one => code.textContent.trim().startsWith(one))) cell.remove();
})"""
Act = Callable[[Any], object]


class Shot(NamedTuple):
    """One picture: its file's name, run and tab, what has to be on the page, what is done before, and the look."""

    name: str
    tab: str
    words: str | re.Pattern[str]
    act: Act = lambda _: None
    run: str = "menagerie"
    size: tuple[int, int] = SIZE
    theme: str = "light"


def _ask(page: Any) -> None:
    page.locator("input[type=file]").set_input_files(PICTURES / "cat.png")
    page.wait_for_function(HAS_READ_THE_FILE)
    page.locator("textarea").fill("What animal is this?")
    page.locator("textarea").blur()
    page.get_by_role("button", name="Ask", exact=True).click()
    page.get_by_text("at the median").first.wait_for()
    page.get_by_text("pixel_values").first.wait_for()


def _compare(page: Any) -> None:
    page.locator("select[multiple]").select_option(["before", "menagerie"])
    page.get_by_text("Figure by figure").first.wait_for()


SHOTS = (
    Shot("checkpoint", "Checkpoint", "every tensor is accounted for"),
    Shot("memory", "Memory", "Measured: what the running engine holds"),
    Shot("loading", "Loading", "resident bytes are those planned"),
    Shot("layers", "Layers", "Operators, rank 0"),
    Shot("communication", "Communication", "Where a decode step goes"),
    Shot("verify", "Verify", "noise floor"),
    Shot("live", "Live", "BF16 on cpu", _ask),
    Shot("hardware", "Hardware", "cpu utilisation"),
    Shot("topology", "Topology", "Links, measured"),
    Shot("runs", "Runs", "Compare", _compare),
    Shot("dark", "Verify", "noise floor", theme="dark"),
    Shot("narrow", "Overview", "tokens a second", size=NARROW),
    Shot("overview", "Overview", "tokens a second"),
    Shot("failed", "Overview", "What failed, and what to do next", run="truncated"),
)


def main(wanted: list[str]) -> int:
    """Takes the pictures that are wanted, in a folder of their own, which is gone in the end."""
    home = Path(tempfile.gettempdir()) / "firstlight-pictures"  # some show the place
    shutil.rmtree(home, ignore_errors=True)
    shutil.copytree(MENAGERIE.parent, home / "data" / "samples")
    (home / "runs").mkdir()
    os.chdir(home)
    try:
        with _browser() as browser:
            for name, take in {"dashboard": _dashboard, "loading": _loading, "notebook": _notebook}.items():
                if name in wanted or not wanted:
                    take(browser)
    finally:
        os.chdir(ROOT)
        shutil.rmtree(home, ignore_errors=True)
    return 0


def _dashboard(browser: Any) -> None:
    """Every tab on a run whose engine answers, beside one before it and one that failed."""
    broken = Path("data/samples/truncated")
    shutil.copytree("data/samples/menagerie", broken)
    shard = sorted(broken.glob("*.safetensors"))[1]
    os.truncate(shard, shard.stat().st_size - 5000)
    _firstlight("up", str(broken), "--tp", "2", "--run", "runs/truncated", status=1)
    for verb in ("scan", "plan", "load"):
        _firstlight(verb, "data/samples/menagerie", *(() if verb == "scan" else ("--tp", "2")), "--run", "runs/before")
    _firstlight("up", "data/samples/menagerie", "--tp", "2", "--run", "runs/menagerie", "--detached")
    try:
        for address in serve(str(Path("runs").resolve()), "--port", "0"):
            for shot in SHOTS:
                _take(browser, address, shot)
    finally:
        _firstlight("serve", "--stop", "runs/menagerie")


def _loading(browser: Any) -> None:
    """A load from a source of 12 MB a second, in the middle."""
    fetched = subprocess.run([sys.executable, ROOT / "data/samples/fetch_smollm2.py"], capture_output=True, text=True)
    assert fetched.returncode == 0, fetched.stderr
    smollm2, process = Path(fetched.stdout.strip()), None
    with served(smollm2) as web, tempfile.TemporaryDirectory() as cache:
        slow = limited(web)
        web.always |= {path.name: slow for path in smollm2.glob("*.safetensors")}
        url = web.url.replace("/tiny", "/smollm2")
        environment = {**os.environ, "FIRSTLIGHT_CACHE": cache}
        try:
            for address in serve(str(Path("runs").resolve()), "--port", "0"):
                process = subprocess.Popen(_command("load", url, "--run", "runs/smollm2", "-q"), env=environment)
                until(lambda: Path("runs/smollm2/run.json").exists(), "the run does not begin")
                _take(browser, address, Shot("under_way", "Loading", re.compile(r"layer 1\d$"), run="smollm2"))
        finally:
            if process is not None:
                process.kill()
                process.wait()


def _notebook(browser: Any) -> None:
    """The cells of the first notebook that show most, as its page has them."""
    notebook: Any = nbformat.read(ROOT / "notebooks" / "00_first_light.ipynb", as_version=4)
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    parameters.source += f"\nRUNS = {str(Path('runs').resolve())!r}"
    where = {"metadata": {"path": str(ROOT)}}
    NotebookClient(notebook, timeout=300, startup_timeout=int(PATIENCE_S), resources=where).execute()
    nbformat.write(notebook, "executed.ipynb")
    Path("page.html").write_text(notebook_page("executed.ipynb"), encoding="utf-8")
    page = browser.new_page(viewport={"width": 1080, "height": 900})
    page.goto(Path("page.html").resolve().as_uri())
    page.evaluate(KEEP, list(SHOWN))
    assert page.locator(".jp-Cell").count() == len(SHOWN), "the notebook has other cells"
    _keep(page, NOTEBOOK / "first_light.png", is_whole=True)
    page.close()


def _take(browser: Any, address: str, shot: Shot) -> None:
    width, height = shot.size
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=shot.theme)
    page = context.new_page()
    page.set_default_timeout(1000 * PATIENCE_S)
    page.goto(f"{address}?run={shot.run}&tab={shot.tab}")
    page.wait_for_function("!document.querySelector('.fl-first')")
    page.get_by_text(shot.words).first.wait_for()
    shot.act(page)
    page.wait_for_timeout(1500)  # figures are drawn, the next readings are there
    _keep(page, DASHBOARD / f"{shot.name}.png")
    context.close()


def _keep(page: Any, file: Path, is_whole: bool = False) -> None:
    page.screenshot(path=file, full_page=is_whole, animations="disabled")
    print(file.relative_to(ROOT))


def _command(*words: str) -> list[str]:
    return [sys.executable, "-m", "firstlight.workbench", *words]


def _firstlight(*words: str, status: int = 0) -> None:
    done = subprocess.run(_command(*words), capture_output=True, text=True)
    assert done.returncode == status, f"{' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}"


@contextlib.contextmanager
def _browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=BROWSER, args=ARGUMENTS)
        yield browser
        browser.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
