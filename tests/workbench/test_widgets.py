"""Live views outside a browser: what they show, and the static twins that stay."""

import io
from collections.abc import Iterator

from PIL import Image

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.workbench import figures
from firstlight.workbench.events import ProgressEvent
from firstlight.workbench.progress import Progress
from firstlight.workbench.widgets import AskBox, ProgressView

HOSTILE = "<script>alert(1)</script>"


def test_progress_shows_amount_rate_and_end() -> None:
    view = ProgressView()
    for second, done in enumerate((0.0, 2**20, 2**21)):
        view(ProgressEvent(time_s=float(second), rung="load", phase="read", done=done, total=2.0**21, unit="B"))
    ((bar, text),) = view._bars.values()
    assert bar.value == 1.0
    assert text.value == "2.00 MiB   1.00 MiB/s   done"
    assert "2.00 MiB   1.00 MiB/s   2.0 s" in view.twin()


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
    assert "3.0 MiB" in view.html
    assert [trace.name for trace in view.figure().data] == ["attention", "cache"]
    errors = figures.errors_by_layer([{"of": HOSTILE, "free_running": 1e-6, "teacher_forced": None}])
    assert HOSTILE not in errors.html
    assert "1.00e-06" in errors.html
