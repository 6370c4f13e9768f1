"""Live views for notebooks: progress of a rung, and a box to ask the model about text and pictures.

Every view has a static twin in plain HTML that stays when the kernel is gone: progress turns into its twin when the
rung ends, the box keeps its transcript in an output of its own. Everything a model or a user wrote is escaped.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, TypeVar

import ipywidgets as ipw
from IPython.core.getipython import get_ipython
from IPython.display import HTML, display

from firstlight.engine.errors import FirstlightError
from firstlight.workbench.events import ProgressEvent
from firstlight.workbench.figures import COLOURS, SEP, STYLE
from firstlight.workbench.page import HAS_TWIN
from firstlight.workbench.progress import Pace
from firstlight.workbench.render import words

LEAST_SHARE = 0.02  # of a bar, so that it can be seen
Made = TypeVar("Made")
Answer = Callable[[str, bytes | None], Iterator[str]]
"""(text, picture file or None) -> pieces of the answer as they come."""


class ProgressView:
    """One line a phase: bar, amount, rate, time to go. Call it with events; `close` leaves the static twin."""

    def __init__(self) -> None:
        self._paces: dict[tuple[str, str], Pace] = {}
        self._bars: dict[tuple[str, str], tuple[ipw.FloatProgress, ipw.HTML]] = {}
        self._box = ipw.VBox([])
        self._handle: Any = None

    def show(self) -> ProgressView:
        """Displays the view under the running cell."""
        if self._handle is None:
            self._handle = display(self._box, display_id=True)
        return self

    def __call__(self, event: ProgressEvent) -> None:
        """Takes one event; the listener of a `Progress`."""
        key = (event.rung, event.phase)
        pace = self._paces.get(key)
        self._paces[key] = pace = Pace(pace.first if pace else event, event)
        if key not in self._bars:
            self._end_uncounted(event.rung)
            bar = ipw.FloatProgress(min=0.0, max=1.0, bar_style="info", layout=ipw.Layout(width="220px"))
            text = ipw.HTML()
            name = ipw.HTML(f"{escape(event.rung)} · {escape(event.phase)}", layout=ipw.Layout(width="220px"))
            self._bars[key] = (bar, text)
            self._box.children = (*self._box.children, ipw.HBox([name, bar, text]))
        bar, text = self._bars[key]
        share = event.done / event.total if event.total else 0.0
        bar.value = min(1.0, share)
        if event.total and event.done >= event.total:
            bar.bar_style = "success"
        text.value = escape(_so_far(pace))

    def _end_uncounted(self, rung: str) -> None:
        """Phases that only begin and end are over when the next one of their rung begins."""
        for key, (bar, _) in self._bars.items():
            if key[0] == rung and not self._paces[key].last.total:
                bar.value, bar.bar_style = 1.0, "success"

    def twin(self, is_over: bool = False, until_s: float | None = None) -> str:
        """The view as plain HTML. A phase is over when the next one of its rung began, or the rung is: `is_over`.

        `until_s`: when the rung ended, in seconds as events have them. None: its last phase took what its events say.
        A phase in which the rung ended before its time says so, and its bar is of another colour, never none at all.
        """
        rows = []
        ends_s = self._ends_s(until_s)
        newest = next(reversed(self._paces), None)  # whatever began before it is over
        for (rung, phase), pace in self._paces.items():
            last = pace.last
            goes_on = (rung, phase) == newest and not is_over
            share = min(1.0, last.done / last.total) if last.total and goes_on else 1.0
            broke_off = goes_on and until_s is not None and (last.total is None or last.done < last.total)
            colour = COLOURS["vision" if broke_off else "compute"]
            amount = _amount_so_far(last) if broke_off and last.total else _amount(last)
            rate = words.quantity(pace.rate, f"{last.unit}/s") if pace.rate and last.unit else ""
            took_s = ends_s[rung, phase] - pace.first.time_s
            took = words.seconds(took_s) if took_s > 0 else ""
            ended = "ended here" if broke_off else ""
            said = escape("   ".join(part for part in (amount, rate, took, last.detail, ended) if part))
            share = max(share, LEAST_SHARE) if broke_off else share
            rows.append(
                f'<div class="row"><span class="name">{escape(rung)} · {escape(phase)}</span><span class="bar">'
                f'<i style="width:{100 * share:.1f}%;background:{colour}"></i></span>{SEP}'
                f'<span class="num">{said}</span></div>'
            )
        return f'<div class="fl-fig wide"><style>{STYLE}</style>{"".join(rows)}</div>'

    def _ends_s(self, until_s: float | None) -> dict[tuple[str, str], float]:
        """When each phase ended: with its last event or, where that is not its end, when the next of its rung began."""
        found: dict[tuple[str, str], float] = {}
        began_s: dict[str, float | None] = {}  # of the phase that follows, by rung
        for (rung, phase), pace in reversed(self._paces.items()):
            last = pace.last
            is_done = last.total is not None and last.done >= last.total
            following_s = began_s.get(rung, until_s)
            found[rung, phase] = last.time_s if is_done or following_s is None else max(last.time_s, following_s)
            began_s[rung] = pace.first.time_s
        return found

    def close(self, is_over: bool = False) -> None:
        """Puts the static twin in the place of the widgets; `is_over`: the rung came to its end."""
        if self._handle is not None:
            self._handle.update(HTML(self.twin(is_over, time.time())))
            self._handle = None
        self._box.close()


class Stepper:
    """Pause, next layer, go on: holds whoever calls it between two layers while it is paused.

    The one who is held holds no lock, readers have read ahead and wait, and an interrupt ends the waiting. Where it was
    held, and for how long, stays as the static twin.
    """

    def __init__(self, paused: bool = False) -> None:
        self.held: list[tuple[ProgressEvent, float]] = []
        """Where it was held (the last event before), and for how many seconds."""
        self._paused = paused
        self._passes = 0  # layers that may still go by while it is paused
        self._change = threading.Condition()
        self._at: tuple[str, str] | None = None
        self._handle: Any = None
        names = ("Pause", "Next layer", "Go on")
        self._buttons = _of_no_cell(
            lambda: {
                name: ipw.Button(description=name, layout=ipw.Layout(width="7rem", min_width="6rem")) for name in names
            }
        )
        self._said = _of_no_cell(ipw.HTML)
        for name, act in (("Pause", self.pause), ("Next layer", self.next_layer), ("Go on", self.go_on)):
            self._buttons[name].on_click(lambda _, act=act: act())
        wraps = {"flex_flow": "row wrap"}  # a notebook may be as narrow as a telephone
        self._box = _of_no_cell(lambda: ipw.HBox([*self._buttons.values(), self._said], layout=ipw.Layout(**wraps)))
        self._say()

    def show(self) -> Stepper:
        """Displays the buttons under the running cell."""
        if self._handle is None:
            self._handle = display(self._box, display_id=True)
        return self

    def pause(self) -> None:
        """Holds at the end of the layer that is being read."""
        self._set(True)

    def next_layer(self) -> None:
        """Lets one more layer go by and holds again."""
        self._set(True, 1)

    def go_on(self) -> None:
        """Holds no more."""
        self._set(False)

    def __call__(self, event: ProgressEvent) -> None:
        """A layer was read; returns when the next one may be. Called by the thread that reads."""
        if self._at == (event.phase, event.detail) or (event.total is not None and event.done >= event.total):
            return
        self._at = event.phase, event.detail
        started_s, is_held = time.monotonic(), False
        with self._change:
            if self._passes:
                self._passes -= 1
            while self._paused and not self._passes:
                is_held = True
                self._say(event)
                self._change.wait(0.5)  # so short that an interrupt is seen
        if is_held:
            self.held.append((event, time.monotonic() - started_s))
        self._say()

    def twin(self) -> str:
        """Where the load was held, as plain HTML; nothing if it never was."""
        if not self.held:
            return ""
        rows = "".join(
            f'<div class="row"><span class="name">held behind {escape(event.detail)}</span>{SEP}<span class="num">'
            f"{escape(event.phase)}: {_amount_so_far(event)}, for {words.seconds(held_s)}</span></div>"
            for event, held_s in self.held
        )
        return f'<div class="fl-fig"><style>{STYLE}</style>{rows}</div>'

    def close(self) -> None:
        """Lets go of whoever is held and puts the static twin in the place of the buttons."""
        self.go_on()
        if self._handle is not None:
            self._handle.update(HTML(self.twin()))
            self._handle = None
        self._box.close()

    def _set(self, paused: bool, passes: int = 0) -> None:
        with self._change:
            self._paused = paused
            self._passes = self._passes + passes if paused and passes else 0
            self._change.notify_all()
        self._say()

    def _say(self, event: ProgressEvent | None = None) -> None:
        _of_no_cell(lambda: self._say_it(event))

    def _say_it(self, event: ProgressEvent | None) -> None:
        self._buttons["Pause"].disabled = self._paused
        self._buttons["Next layer"].disabled = self._buttons["Go on"].disabled = not self._paused
        at = f"held behind {escape(event.detail)}, {_amount_so_far(event)}" if event is not None else ""
        if self._said.value != at:
            self._said.value = at


class AskBox:
    """A text box, a picture to drop, a button, and the transcript. `ask` does from code what the button does."""

    def __init__(self, answer: Answer, pictures: Sequence[str | Path] = (), question: str = "") -> None:
        self._answer = answer
        self._transcript: list[dict[str, Any]] = []
        self._handle: Any = None
        self._busy = threading.Lock()
        self._text = ipw.Text(value=question, placeholder="Ask something", layout=ipw.Layout(width="60%"))
        self._upload = ipw.FileUpload(accept="image/*", multiple=False, description="Picture")
        names = [("no picture", None), *((Path(path).name, str(path)) for path in pictures)]
        self._sample = ipw.Dropdown(options=names, description="", layout=ipw.Layout(width="11rem"))
        self._button = ipw.Button(description="Ask", button_style="primary", layout=ipw.Layout(width="5rem"))
        self._button.on_click(lambda _: self._start())
        self._text.continuous_update = False

    def show(self) -> AskBox:
        """Displays the controls and, in an output of its own, the transcript."""
        row = ipw.HBox([self._text, self._upload, self._sample, self._button], layout=ipw.Layout(flex_flow="row wrap"))
        display(row, metadata={HAS_TWIN: True})
        self._handle = display(HTML(self.twin()), display_id=True)
        return self

    def ask(self, text: str, picture: str | Path | bytes | None = None) -> str:
        """Asks, shows the answer as it comes, and returns it."""
        data = Path(picture).read_bytes() if isinstance(picture, str | Path) else picture
        name = Path(picture).name if isinstance(picture, str | Path) else ("picture" if picture else "")
        with self._busy:
            entry: dict[str, Any] = {"text": text, "name": name, "picture": data, "answer": ""}
            self._transcript.append(entry)
            try:
                for piece in self._answer(text, data):
                    entry["answer"] += piece
                    self._update()
            except FirstlightError as error:
                entry["error"] = str(error)
            self._update()
        return str(entry["answer"])

    def twin(self) -> str:
        """The transcript as plain HTML, pictures included."""
        if not self._transcript:
            return f'<div class="fl-fig"><style>{STYLE}</style><p style="opacity:.7">Nothing asked yet.</p></div>'
        return f'<div class="fl-fig"><style>{STYLE}</style>{"".join(_entry(entry) for entry in self._transcript)}</div>'

    def _start(self) -> None:
        upload = self._upload.value
        picture: bytes | str | None = bytes(upload[0]["content"]) if upload else self._sample.value
        thread = threading.Thread(target=self.ask, args=(self._text.value, picture), daemon=True)
        thread.start()

    def _update(self) -> None:
        if self._handle is not None:
            self._handle.update(HTML(self.twin()))


def _of_no_cell(call: Callable[[], Made]) -> Made:
    """Makes or changes widgets as if no cell had asked for it, which lets their buttons work while a cell is held.

    A kernel hands what a frontend says of a widget to the shell that spoke of it last (ipykernel 7.4, `BaseComm`), and
    the one of the running cell is busy; what belongs to no cell goes to the subshell that JupyterLab keeps for widgets.
    """
    parent = getattr(getattr(get_ipython(), "kernel", None), "_shell_parent", None)
    if not isinstance(parent, contextvars.ContextVar):  # another kernel, or none
        return call()

    def apart() -> Made:
        parent.set({})  # within this context alone
        return call()

    return contextvars.copy_context().run(apart)


def _so_far(pace: Pace) -> str:
    """The amount, the rate and the time to go, as far as they are known."""
    last, rate, left_s = pace.last, pace.rate, pace.remaining_s
    speed = words.quantity(rate, f"{last.unit}/s") if rate and last.unit else ""
    left = "" if left_s is None else "done" if left_s == 0 else f"{words.seconds(left_s)} to go"
    is_over = not last.total or last.done >= last.total
    amount = _amount(last) if is_over else _amount_so_far(last)
    return "   ".join(part for part in (amount, speed, left, last.detail) if part)


def _amount_so_far(event: ProgressEvent) -> str:
    """How much of how much."""
    if event.total is None:
        return words.quantity(event.done, event.unit)
    return words.of_total(event.done, event.total, event.unit)


def _amount(event: ProgressEvent) -> str:
    """How much in words; nothing for a phase that only begins and ends."""
    return words.quantity(event.total or event.done, event.unit) if event.total or event.done else ""


def _entry(entry: dict[str, Any]) -> str:
    picture = _thumbnail(entry["picture"], entry["name"]) if entry["picture"] else ""
    failed = f'<div class="error">{escape(entry["error"])}</div>' if "error" in entry else ""
    return (
        f'<div style="display:flex;gap:.8rem;margin:.5rem 0;align-items:flex-start">{picture}'
        f'<div><div style="opacity:.7">{escape(entry["text"])}</div>'
        f'<div style="white-space:pre-wrap">{escape(entry["answer"])}</div>{failed}</div></div>'
    )


def _thumbnail(data: bytes, name: str) -> str:
    """A small PNG of a picture, made anew from its pixels; an unreadable one is named instead."""
    import base64
    import io

    from firstlight.engine.inputs.pictures import open_picture

    try:
        image = open_picture(data).image.copy()
    except FirstlightError:
        return f'<span style="opacity:.7">[{escape(name)}]</span>'
    image.thumbnail((96, 96))
    out = io.BytesIO()
    image.save(out, "PNG")
    coded = base64.b64encode(out.getvalue()).decode()
    return f'<img alt="{escape(name, quote=True)}" src="data:image/png;base64,{coded}" style="border-radius:4px">'
