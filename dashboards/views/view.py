"""What a view is: components made once, and redrawn from a snapshot. Views only render; the store reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import panel as pn

from firstlight.dashboards import html
from firstlight.dashboards.figures import Figure
from firstlight.dashboards.store import DataStore, Follower, Snapshot
from firstlight.dashboards.theme import SHEET

PLOT = "fl-plot"


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


def heading(text: str) -> Any:
    """The title of a figure that stands by itself."""
    return pane(html.page(f"<h2>{html.said(text)}</h2>"))


def put(target: Any, text: str) -> None:
    """Shows a text if it is another one: what did not change is not sent."""
    if target.object != text:
        target.object = text


def plot(height: int = 300) -> Any:
    """A place for a plotly figure; the figure's component is made when there is one to show."""
    return pn.Column(sizing_mode="stretch_width", margin=0, min_height=height, visible=False, css_classes=[PLOT])


def show(target: Any, figure: Figure | None) -> None:
    """Shows a figure, or nothing."""
    if figure is None:
        target.visible = False
        return
    if not target.objects:
        config = {"displaylogo": False, "responsive": True, "modeBarButtonsToRemove": ["lasso2d", "select2d"]}
        target.objects = [pn.pane.Plotly(figure, config=config, sizing_mode="stretch_width", margin=0)]
    elif target[0].object != figure:
        target[0].object = figure
    target.visible = True


def column(*parts: Any) -> Any:
    return pn.Column(*parts, sizing_mode="stretch_width", margin=0)
