"""A notebook as one HTML file that opens offline: static twins of every figure, pictures inside, no scripts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

LIVE = ("application/vnd.plotly.v1+json", "application/vnd.jupyter.widget-view+json", "application/javascript")
WIDGET_ALONE = {"application/vnd.jupyter.widget-view+json", "text/plain"}  # a widget without a twin: nothing to read
FROM_OUTSIDE = ("mathjax_url", "require_js_url", "jquery_url", "jupyter_widgets_base_url", "mermaid_js_url")


def notebook_page(notebook: str | Path) -> str:
    """The page of an executed notebook; live views are replaced by the HTML that stands beside them."""
    import nbformat
    from nbconvert import HTMLExporter

    node: Any = nbformat.read(str(notebook), as_version=4)
    node.metadata.pop("widgets", None)
    for cell in node.cells:
        outputs = cell.get("outputs", [])
        outputs[:] = [output for output in outputs if set(output.get("data", ())) != WIDGET_ALONE]
        for output in outputs:
            data = output.get("data", {})
            for mime in LIVE:
                if mime in data and len(data) > 1:
                    del data[mime]
    exporter = HTMLExporter(embed_images=True, sanitize_html=False, exclude_anchor_links=True)
    for name in FROM_OUTSIDE:
        if exporter.has_trait(name):
            setattr(exporter, name, "")
    exporter.register_preprocessor("nbconvert.preprocessors.CoalesceStreamsPreprocessor", enabled=True)
    page, _ = exporter.from_notebook_node(node)
    return _closed(str(page))


def _closed(page: str) -> str:
    """The page without script elements that name a place to load from: there is nothing they could still do."""
    page = re.sub(r"<script[^>]*\bsrc=[^>]*>\s*</script>", "", page)
    page = re.sub(r"<script(?![^>]*application/json)[^>]*>.*?</script>", "", page, flags=re.DOTALL)
    return re.sub(r"<link[^>]*\bhref=\"https?:[^>]*>", "", page)
