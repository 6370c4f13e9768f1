"""What a view is: components made once, and redrawn from a snapshot. Views only render; the store reads."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import panel as pn

from firstlight.dashboards import html
from firstlight.dashboards.figures import Figure
from firstlight.dashboards.store import DataStore, Follower, Snapshot
from firstlight.dashboards.theme import CARD, CHART, FIELDS, SHEET
from firstlight.dashboards.views.working import bars, doing
from firstlight.engine.parallel.mesh import AXES, HEADS, Mesh
from firstlight.workbench.runs import LADDER

PLOT = "fl-plot"
CONFIG = {
    "displaylogo": False,
    "responsive": True,
    "modeBarButtonsToRemove": ["lasso2d", "select2d", "zoomIn2d", "zoomOut2d", "autoScale2d"],
}
MARGIN = (0, 14, 10, 0)
ACROSS = (0, 0, 10, 0)  # of a field as wide as its card
STAGES = {"up": "start"}
"""The rung that a verb's cards wait for, where it is another than the verb."""
FIELD: dict[str, Any] = {"stylesheets": [FIELDS], "margin": MARGIN}
"""What every field is made with."""


class Page(Protocol):
    """What views know of the page they stand on."""

    store: DataStore

    @property
    def follower(self) -> Follower | None:
        """The run that is shown."""

    def when_live(self, draw: Callable[[], None]) -> None:
        """Have something that takes time drawn once the page stands in its browser; at once from then on."""

    def later(self, change: Callable[[], None]) -> None:
        """Have a change of components made in the page's own turn; from any thread."""


class View(Protocol):
    """One tab. `panel` is made once; `draw` is called with every new snapshot while the tab is in front."""

    title: str

    def panel(self) -> Any: ...

    def draw(self, snapshot: Snapshot) -> None: ...


def pane(text: str = "") -> Any:
    """A piece of page as HTML, with the style sheet."""
    return pn.pane.HTML(text, stylesheets=[SHEET], sizing_mode="stretch_width", margin=0)


def put(target: Any, text: str) -> None:
    """Shows a text if it is another one: what did not change is not sent."""
    if target.object != text:
        target.object = text


class Chart:
    """A card with a figure: its title, what it is chosen by, the figure, and what is said of it in words."""

    def __init__(self, title: str, *controls: Any, height: int = 300) -> None:
        self._slot = pn.Column(sizing_mode="stretch_width", margin=0, min_height=height)
        self._note = pane()
        self._card = card(title, *controls, self._slot, self._note)
        self._card.css_classes, self._card.visible = [PLOT], False

    def panel(self) -> Any:
        return self._card

    def show(self, figure: Figure | None, note: str = "") -> None:
        """Shows a figure, or nothing; `note` is HTML below it. A note alone stands in the figure's place.

        The figure's component is made when there is one to show.
        """
        put(self._note, html.page(note) if note else "")
        self._card.visible = figure is not None or bool(note)
        self._slot.visible = figure is not None
        if figure is None:
            return
        if self._slot.min_height != figure["layout"]["height"]:
            self._slot.min_height = figure["layout"]["height"]
        if not self._slot.objects:
            self._slot.objects = [
                pn.pane.Plotly(figure, config=CONFIG, sizing_mode="stretch_width", margin=0, stylesheets=[CHART])
            ]
        elif self._slot[0].object != figure:
            self._slot[0].object = figure


def mesh_of(snapshot: Snapshot) -> Mesh | None:
    """The mesh that the run's engine has, or is to have."""
    saved = (snapshot.record.engine or {}).get("options", {}).get("mesh")
    return msgspec.convert(saved, Mesh) if saved else None


def not_yet(snapshot: Snapshot, title: str, verb: str, *more: str) -> str:
    """A card for what a rung has not done in this run: why, if the ladder stopped before, and the command that does.

    Of a rung that is being done, or broke off, how far it is; of one that holds no figures, the reason. `more`:
    further words of the command.
    """
    now = doing(snapshot)
    is_this = now is not None and now.verb in (verb, STAGES.get(verb))
    if now is not None and is_this:
        again = "" if now.is_running else html.commands(command(snapshot, verb, *more))
        return html.card(title, html.nothing(f"The rung {now.sentence}.") + bars(now) + again)
    last = {rung.verb: rung.status for rung in snapshot.record.rungs}
    said = f"The rung {verb} was not run."
    if verb == "up":
        said = f"No engine {'was started' if mesh_of(snapshot) is None else 'answers'} in this run."
    report = snapshot.latest(STAGES.get(verb, verb))
    if report is not None and not snapshot.has_engine and snapshot.figures(report.verb) is None:
        said = f"The rung {report.verb} has no figures to show."
        return html.card(title, html.nothing(said) + html.findings(report.findings), "alarm")
    stopped = next((one for one in LADDER if last.get(one) in ("failed", "refused")), "")
    if stopped and stopped != verb:
        said += f" The ladder stopped at {stopped}: Overview says why, and what to do next."
    return html.card(title, html.nothing(said) + html.commands(command(snapshot, verb, *more)))


def command(snapshot: Snapshot, verb: str, *more: str) -> str:
    """The command that does a rung of this run, with its checkpoint and mesh; `more`: further words of it."""
    directory, checkpoint = Path(snapshot.directory), snapshot.record.source
    mesh = mesh_of(snapshot) if verb != "scan" else None
    axes = [word for axis in AXES if mesh and mesh.size(axis) > 1 for word in (f"--{axis}", str(mesh.size(axis)))]
    place = f"{directory.parent.name}/{directory.name}"
    if mesh is not None and mesh.size(HEADS) < mesh.tp:
        axes += ["--attention", "whole"]
    return shlex.join(["firstlight", verb, checkpoint, *axes, "--run", place, *more])


def card(title: str, *parts: Any) -> Any:
    """Components in a card of their own."""
    head = [pane(html.page(f"<h2>{html.said(title)}</h2>"))] if title else []
    return pn.Column(*head, *parts, sizing_mode="stretch_width", margin=0, stylesheets=[CARD])


def column(*parts: Any) -> Any:
    return pn.Column(*parts, sizing_mode="stretch_width", margin=0)
