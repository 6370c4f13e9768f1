"""How the pages look: style sheets with light and dark colours, and the frame that everything stands in.

Custom properties (`colours.css`) reach into the shadow roots of components; rules do not, so every pane gets `SHEET`.
"""

from __future__ import annotations

from importlib import resources


def _style(name: str) -> str:
    return (resources.files("firstlight.dashboards") / "style" / name).read_text(encoding="utf-8")


SHEET = _style("sheet.css")
FIELDS = _style("fields.css")
CARD = _style("card.css")
CHART = _style("chart.css")
NAV = _style("nav.css")
FRAME = _style("colours.css") + _style("frame.css") + SHEET
FIRST = _style("first.js")
TEMPLATE = _style("page.html")
