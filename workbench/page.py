"""A notebook as one HTML file that opens offline: static twins of every figure, pictures inside, no scripts."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import Any

LIVE = ("application/vnd.plotly.v1+json", "application/vnd.jupyter.widget-view+json", "application/javascript")
READABLE = ("text/", "image/")  # what a page can show without scripts
HAS_TWIN = "firstlight_twin"  # in the metadata of an output: what it shows is in the output behind it
# Whatever HTML a cell put out: nothing is fetched, no script runs. Styles and pictures are those within the page.
CLOSED = (
    "default-src 'none'; img-src data:; media-src data:; font-src data:; style-src 'unsafe-inline'; base-uri 'none'"
)
FROM_OUTSIDE = ("mathjax_url", "require_js_url", "jquery_url", "jupyter_widgets_base_url", "mermaid_js_url")


def notebook_page(notebook: str | Path) -> str:
    """The page of an executed notebook; live views are replaced by the HTML that stands beside them."""
    import nbformat
    from nbconvert import HTMLExporter

    node: Any = nbformat.read(str(notebook), as_version=4)
    node.metadata.pop("widgets", None)
    for cell in node.cells:
        outputs = cell.get("outputs", [])
        outputs[:] = [output for output in outputs if not output.get("metadata", {}).get(HAS_TWIN)]
        for output in outputs:
            _without_kernel(output.get("data", {}))
    exporter = HTMLExporter(embed_images=True, sanitize_html=False, exclude_anchor_links=True)
    for name in FROM_OUTSIDE:
        if exporter.has_trait(name):
            setattr(exporter, name, "")
    exporter.register_preprocessor("nbconvert.preprocessors.CoalesceStreamsPreprocessor", enabled=True)
    page, _ = exporter.from_notebook_node(node)
    return _closed(str(page))


def _without_kernel(data: Any) -> None:
    """Leaves of an output what can be read; one that is live and nothing else says that it was there."""
    live = [mime for mime in LIVE if data.pop(mime, None) is not None]
    words = str(data.get("text/plain", ""))
    is_widget_name = "application/vnd.jupyter.widget-view+json" in live and set(data) <= {"text/plain"}
    if live and (is_widget_name or not any(mime.startswith(READABLE) for mime in data)):
        what = escape(words[:80] or live[0])
        data["text/html"] = (
            f"<p><em>A live view that left nothing to read here; run its cell to see it: {what}</em></p>"
        )


def _closed(page: str) -> str:
    """The page without scripts and without anything that is loaded from elsewhere, which its head forbids as well."""
    policy = f'<meta http-equiv="Content-Security-Policy" content="{CLOSED}">'
    page = re.sub(r"<script[^>]*\bsrc=[^>]*>\s*</script>", "", page)
    page = re.sub(r"<script(?![^>]*application/json)[^>]*>.*?</script>", "", page, flags=re.DOTALL)
    page = re.sub(r"<link\b[^>]*>|<meta\b[^>]*http-equiv[^>]*refresh[^>]*>", "", page, flags=re.IGNORECASE)
    return re.sub(r"<head[^>]*>", lambda found: found[0] + policy, page, count=1)
