"""The first paint: what a page shows before its components are there, and which scripts it waits for.

The server draws the chosen view into the page itself, so that it can be read as soon as the page is there; the
components take its place when they have come. Scripts wait for the page, not the page for them, and the largest,
plotly, comes with the first figure that is shown.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

import panel as pn

from firstlight.dashboards import html
from firstlight.dashboards.views.view import PLOT

PLOTLY = "plotlyplot"
UNUSED = ("bokeh-gl", "es-module-shims")  # nothing here draws with bokeh's own canvas or loads modules


def scripts(bundle: str, figures: bool = False) -> str:
    """The page's script elements, deferred, of those that panel would put in front of everything.

    `figures`: the view that comes first has some, so that plotly is wanted soon.
    """
    found = re.findall(r'<script type="text/javascript" src="([^"]*)">', bundle)
    lines = []
    for address in found:
        if PLOTLY in address:
            lines.append(
                f'<link rel="prefetch" as="script" href="{address}" data-plotly{" data-now" if figures else ""}>'
            )
        elif not any(name in address for name in UNUSED):
            lines.append(f'<script defer src="{address}"></script>')
    return "\n".join(lines)


def has_figures(part: Any) -> bool:
    return PLOT in part.css_classes or any(map(has_figures, getattr(part, "objects", ())))


def text_of(part: Any) -> str:
    """The HTML that stands in the panes of a view, in their order; figures and fields have none."""
    if not part.visible:
        return ""
    if isinstance(part, pn.pane.HTML):
        return str(part.object)
    return "".join(text_of(one) for one in getattr(part, "objects", ()))


def navigation(runs: str | None, tabs: Sequence[str], tab: str) -> str:
    """The run and links to its tabs, where the fields will be."""
    links = "".join(
        f'<a class="{"now" if one == tab else ""}" href="?{html.said(urlencode({"run": runs or "", "tab": one}))}">'
        f"{html.said(one)}</a>"
        for one in tabs
    )
    return f'<p class="quiet">Run</p><p class="run">{html.said(runs or "")}</p><div class="tabs">{links}</div>'
