"""Live views outside a browser: what they show, and the static twins that stay."""

import io
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output
from PIL import Image

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.workbench import NotebookBringup, figures
from firstlight.workbench.events import ProgressEvent
from firstlight.workbench.page import notebook_page
from firstlight.workbench.progress import Progress
from firstlight.workbench.report import Report
from firstlight.workbench.widgets import AskBox, ProgressView, Stepper
from tests.repo.tree import ROOT
from tests.waiting import PATIENCE_S, until

MENAGERIE = ROOT / "data" / "samples" / "menagerie"

HOSTILE = "<script>alert(1)</script>"


def test_progress_shows_amount_rate_and_end() -> None:
    view = ProgressView()
    view(ProgressEvent(time_s=0.0, rung="load", phase="reserve", done=0.0))
    ((reserve, _),) = view._bars.values()
    assert reserve.value == 0.0
    said = []
    for second, done in enumerate((0.0, 2**20, 2**21)):
        view(ProgressEvent(time_s=float(second), rung="load", phase="read", done=done, total=2.0**21, unit="B"))
        said.append(view._bars["load", "read"][1].value)
    assert reserve.value == 1.0, "it is over when the next phase begins"
    bar, text = view._bars["load", "read"]
    assert said[1] == "1.00 MiB of 2.00 MiB   1.00 MiB/s   1.0 s to go"
    assert bar.value == 1.0
    assert text.value == "2.00 MiB   1.00 MiB/s   done"
    assert "2.00 MiB   1.00 MiB/s   2.0 s" in view.twin()
    one = ProgressView()
    for time_s, phase in ((10.0, "spawn"), (13.5, "ready")):
        one(ProgressEvent(time_s=time_s, rung="start", phase=phase, done=0.0, total=None, unit="", detail=""))
    assert "3.5 s" in one.twin(), "a phase that says nothing on its way lasts until the next begins"
    assert "0.000 s" not in one.twin()
    assert "1.5 s" in one.twin(is_over=True, until_s=15.0)
    broken = ProgressView()
    broken(ProgressEvent(time_s=1.0, rung="load", phase="read", done=0.0, total=2.0**20, unit="B", detail=""))
    assert "ended here" in broken.twin(until_s=2.0), "a rung that fails leaves no empty bar"
    assert "0 B of 1.00 MiB" in broken.twin(until_s=2.0)
    assert "width:0.0%" not in broken.twin(until_s=2.0)
    assert "ended here" not in broken.twin() + broken.twin(is_over=True, until_s=2.0)


def test_progress_takes_every_event_of_a_rung() -> None:
    view = ProgressView()
    progress = Progress("start", (view,))
    progress("spawn")
    progress("read weights", 3, 10, "B", "layer 0")
    progress(HOSTILE, 1, 0)
    assert HOSTILE not in view.twin()
    assert "layer 0" in view.twin()


def test_the_transcript_holds_text_and_picture_escaped() -> None:
    out = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(out, "PNG")

    def answer(text: str, picture: bytes | None) -> Iterator[str]:
        assert picture == out.getvalue()
        yield "A "
        yield HOSTILE

    box = AskBox(answer)
    assert "Nothing asked yet" in box.twin()
    assert box.ask(f"What is {HOSTILE}?", out.getvalue()) == f"A {HOSTILE}"
    assert HOSTILE not in box.twin()
    assert "data:image/png;base64," in box.twin()


def test_a_refusal_is_shown_in_the_transcript() -> None:
    def answer(text: str, picture: bytes | None) -> Iterator[str]:
        raise Refused(fatal("bad-image", "the picture is cut off"))
        yield ""

    box = AskBox(answer)
    assert box.ask("What is this?") == ""
    assert "the picture is cut off" in box.twin()


def test_figures_have_a_live_and_a_static_form() -> None:
    rows = [{"rank": r, "attention_bytes": 2**20, "cache_bytes": 2**21, "process_bytes": 7} for r in range(2)]
    view = figures.memory_map(rows)
    bundle = view._repr_mimebundle_()
    assert set(bundle) == {"application/vnd.plotly.v1+json", "text/html"}
    assert "3.00 MiB" in view.html
    bare = re.sub(r"<style>.*?</style>|<[^>]*>", "", view.html, flags=re.DOTALL)
    assert "rank 1: 3.00 MiB" in bare, "what a notebook that is not trusted leaves of it says the same"
    assert [trace.name for trace in view.figure().data] == ["attention", "cache"]
    errors = figures.errors_by_layer([{"of": HOSTILE, "free_running": 1e-6, "teacher_forced": None}])
    assert HOSTILE not in errors.html
    assert "1.00e-06" in errors.html


def test_a_page_fetches_nothing_and_says_what_it_cannot_show(tmp_path: Path) -> None:
    view, twin = "application/vnd.jupyter.widget-view+json", {"firstlight_twin": True}
    plotly = {"application/vnd.plotly.v1+json": {"data": []}}
    outputs = [
        new_output("display_data", {view: {}, "text/plain": f"IntSlider({HOSTILE})"}),
        new_output("display_data", {view: {}, "text/plain": "HBox()"}, metadata=twin),
        new_output("display_data", plotly),
        new_output("display_data", {**plotly, "text/html": "<b>its twin</b>"}),
        new_output(
            "display_data", {"text/html": '<LINK rel=x href=//e.x><meta http-equiv="refresh" content="0;//e.x">'}
        ),
    ]
    nbformat.write(new_notebook(cells=[new_code_cell("1", outputs=outputs)]), tmp_path / "a.ipynb")
    page = notebook_page(tmp_path / "a.ipynb")
    assert page.count("A live view that left nothing to read here") == 2
    assert "its twin" in page
    assert "HBox" not in page
    assert HOSTILE not in page
    assert "//e.x" not in page
    assert re.search(
        r"<head>\s*<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; img-src data:", page
    )


def event_of(layer: str, done: float, total: float = 4.0) -> ProgressEvent:
    return ProgressEvent(time_s=done, rung="load", phase="read", done=done, total=total, unit="B", detail=layer)


def said(bringup: NotebookBringup) -> str:
    """What stands beside the buttons of the load that is running."""
    return "" if bringup.stepper is None else bringup.stepper._said.value


def clicked(stepper: Stepper, name: str) -> None:
    (button,) = [button for button in stepper._box.children[:3] if button.description == name]
    assert not button.disabled, name
    button.click()


def test_a_paused_stepper_lets_one_layer_by_at_a_click() -> None:
    stepper, passed = Stepper(paused=True), []

    def read() -> None:
        for number in range(5):
            stepper(event_of(f"layer {number}", float(number)))
            stepper(event_of(f"layer {number}", float(number) + 0.5))  # more of the same layer is not held again
            passed.append(number)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    for number in range(3):
        until(lambda number=number: f"held behind layer {number}," in stepper._said.value)
        assert passed == list(range(number))
        clicked(stepper, "Next layer")
    until(lambda: "held behind layer 3," in stepper._said.value)
    clicked(stepper, "Go on")
    thread.join(PATIENCE_S)
    assert passed == [0, 1, 2, 3, 4]
    assert [event.detail for event, _ in stepper.held] == [f"layer {number}" for number in range(4)]
    stepper.close()
    assert "held behind layer 3" in stepper.twin()


def test_a_stepper_that_nobody_touches_holds_nothing() -> None:
    stepper = Stepper()
    for number in range(3):
        stepper(event_of(f"layer {number}", float(number)))
    stepper.close()
    assert stepper.held == []
    assert stepper.twin() == ""


def test_a_load_is_gone_through_layer_by_layer_and_claims_no_rate_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("firstlight.workbench.load.HELD_SHARE", 0.0)  # however long the reading takes
    with NotebookBringup(MENAGERIE, run=tmp_path / "run", telemetry_hz=0) as bringup:
        assert bringup.scan().passed
        assert bringup.plan().passed
        found: list[Report] = []
        thread = threading.Thread(target=lambda: found.append(bringup.load(step=True)), daemon=True)
        thread.start()
        for layer in ("before the layers", "layer 0", "layer 1"):
            until(lambda layer=layer: f"held behind {layer}," in said(bringup))
            if layer == "layer 1":
                time.sleep(0.7)
            clicked(bringup.stepper, "Go on" if layer == "layer 1" else "Next layer")
        thread.join(PATIENCE_S)
        (report,) = found
        assert report.passed
        assert report.metrics["read_rate"].value is None
        assert "held between layers" in report.metrics["read_rate"].detail
        rows = report.tables["by_layer"]
        assert [row["layer"] for row in rows][:2] == ["before the layers", "layer 0"]
        assert sum(row["read_bytes"] for row in rows) == report.metrics["read_bytes"].value
        assert all(row.get("rate_bytes_per_s") is None for row in rows)


def test_an_interrupt_ends_a_held_load(tmp_path: Path) -> None:
    script = (
        "import _thread, signal, sys, threading, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell has it ignored in what runs behind
        "from firstlight.workbench import NotebookBringup\n"
        "b = NotebookBringup(sys.argv[1], run=sys.argv[2], telemetry_hz=0)\n"
        "b.scan(), b.plan()\n"
        "def stop():\n"
        "    while b.stepper is None or 'held' not in b.stepper._said.value: time.sleep(0.05)\n"
        "    _thread.interrupt_main()\n"
        "threading.Thread(target=stop, daemon=True).start()\n"
        "try: b.load(step=True)\n"
        "except KeyboardInterrupt: print('interrupted', threading.active_count())\n"
        "b.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(MENAGERIE), str(tmp_path / "run")],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert "interrupted" in done.stdout, done.stderr
    assert done.returncode == 0
