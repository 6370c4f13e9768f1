"""Live: a conversation with the running engine, pictures included, with what goes in as the model gets it."""

from __future__ import annotations

import base64
import io
import threading
import time
from collections.abc import Sequence
from typing import Any

import panel as pn

from firstlight.dashboards import html
from firstlight.dashboards.store import Snapshot
from firstlight.dashboards.theme import FIELDS
from firstlight.dashboards.views.view import ACROSS, FIELD, Page, card, column, not_yet, pane, put
from firstlight.engine.errors import FirstlightError
from firstlight.engine.inputs.pictures import open_picture
from firstlight.engine.inputs.prepare import Prepared, Processor
from firstlight.engine.serving.request import SamplingParams, Usage
from firstlight.workbench.side_files import has_chat_template

UPDATE_S = 0.08  # an answer that streams is drawn so often
THUMBNAIL = (144, 144)
MOST_IDS = 400
INSIDE = "What goes into the model"
LATER = "Prompt, token ids and pixel tensors stand here, as the model gets them, once something is asked."


class Live:
    title = "Live"

    def __init__(self, page: Page) -> None:
        self._page = page
        self._text = pn.widgets.TextAreaInput(
            name="Message",
            placeholder="Ask something",
            rows=2,
            auto_grow=True,
            max_rows=8,
            sizing_mode="stretch_width",
            **FIELD | {"margin": ACROSS},
        )
        self._picture = pn.widgets.FileInput(accept="image/*", width=260, **FIELD)
        self._tokens = pn.widgets.IntInput(
            name="Longest answer (tokens)", value=128, start=1, end=4096, width=170, **FIELD
        )
        self._temperature = pn.widgets.FloatInput(
            name="Temperature", value=0.0, start=0.0, end=2.0, step=0.1, width=110, **FIELD
        )
        self._seed = pn.widgets.IntInput(name="Seed", value=0, width=110, **FIELD)
        self._send = pn.widgets.Button(name="Ask", button_type="primary", width=90, **FIELD)
        self._stop = pn.widgets.Button(name="Stop", width=90, disabled=True, **FIELD)
        self._halt = threading.Event()
        self._send.on_click(lambda _: self._ask())
        self._stop.on_click(lambda _: self._halt.set())
        self._turns, self._inside, self._state = pane(), pane(html.page(html.card(INSIDE, html.nothing(LATER)))), pane()
        self._said: list[dict[str, Any]] = []
        self._processor: Processor | None = None

    def panel(self) -> Any:
        controls = pn.FlexBox(
            self._send, self._stop, self._tokens, self._temperature, self._seed, margin=0, align_items="end"
        )
        picture = column(
            pn.pane.HTML("<label>Picture (optional)</label>", stylesheets=[FIELDS], margin=0), self._picture
        )
        return column(self._state, self._turns, card("", self._text, picture, controls), self._inside)

    def draw(self, snapshot: Snapshot) -> None:
        there = snapshot.has_engine
        self._send.disabled = not there or not self._stop.disabled
        if there:
            info = snapshot.info
            said = (
                f"{info.model}, {info.mesh.describe()}, {info.dtype} on {info.device}" if info is not None else "ready"
            )
            put(self._state, html.page(f"<p class='quiet'>{html.said(said)}</p>"))
        else:
            failure = snapshot.health.failure if snapshot.health is not None else None
            if snapshot.health is not None and snapshot.health.status == "starting":
                put(self._state, html.page(html.card("", html.nothing(f"starting: {snapshot.health.stage}"))))
                return
            failed = (
                html.card("", html.nothing(f"the engine failed: {failure}"), "alarm") if failure is not None else ""
            )
            put(self._state, html.page(failed, not_yet(snapshot, "No engine to ask", "up", "--detached")))

    def _ask(self) -> None:
        text = self._text.value.strip()
        data = self._picture.value or None
        if not text:
            return
        self._halt.clear()
        self._send.disabled, self._stop.disabled = True, False
        entry: dict[str, Any] = {
            "text": text,
            "picture": _thumbnail(data),
            "answer": "",
            "error": "",
            "times_ms": [],
            "usage": None,
        }
        self._said.append(entry)
        self._text.value = ""
        params = SamplingParams(
            max_new_tokens=int(self._tokens.value or 1),
            temperature=float(self._temperature.value or 0.0),
            seed=abs(int(self._seed.value or 0)),
        )
        self._draw_turns()
        threading.Thread(target=self._answer, args=(entry, text, data, params), name="ask", daemon=True).start()

    def _answer(self, entry: dict[str, Any], text: str, data: bytes | None, params: SamplingParams) -> None:
        """In a thread: what goes in is shown first, then the answer as it comes."""
        try:
            follower = self._page.follower
            client = follower.client() if follower is not None else None
            if follower is None or client is None:
                raise FirstlightError("no engine answers")
            checkpoint = follower.snapshot.record.checkpoint
            chat = has_chat_template(checkpoint)
            self._show_inside(checkpoint, text, data, chat)
            drawn_s = last_s = time.perf_counter()
            deltas = client.generate(text, [data] if data else [], params, chat)
            for delta in deltas:
                now_s = time.perf_counter()
                if delta.tokens:
                    entry["times_ms"].append(1e3 * (now_s - last_s) / len(delta.tokens))
                    last_s = now_s
                entry["answer"] += delta.text
                entry["usage"] = delta.usage or entry["usage"]
                entry["error"] = delta.error or ""
                if now_s - drawn_s > UPDATE_S:
                    drawn_s = now_s
                    self._page.later(self._draw_turns)
                if self._halt.is_set():
                    deltas.close()  # type: ignore[attr-defined]
                    entry["error"] = "stopped"
                    break
        except FirstlightError as error:
            entry["error"] = str(error)
        self._page.later(self._end)

    def _end(self) -> None:
        self._send.disabled, self._stop.disabled = False, True
        self._draw_turns()

    def _draw_turns(self) -> None:
        put(self._turns, html.page(html.card("Conversation", "".join(_turn(entry) for entry in self._said[-20:]))))

    def _show_inside(self, checkpoint: str, text: str, data: bytes | None, chat: bool) -> None:
        """Prompt, ids and picture tensors as the model gets them."""
        self._processor = self._processor or Processor.open(checkpoint)
        prepared = self._processor.prepare(text, [open_picture(data)] if data else [], chat)
        said = html.page(html.card(INSIDE, _inside(prepared)))
        self._page.later(lambda: put(self._inside, said))


def _inside(prepared: Prepared) -> str:
    ids = prepared.input_ids[0].tolist()
    shown = " ".join(map(str, ids[:MOST_IDS])) + (f" ... {len(ids) - MOST_IDS:,} more" if len(ids) > MOST_IDS else "")
    parts = [
        f"<h3>prompt, {len(ids):,} tokens</h3><pre tabindex='0'>{html.said(prepared.text)}</pre>",
        f"<h3>ids</h3><pre tabindex='0'>{html.said(shown)}</pre>",
    ]
    rows = []
    for name, array in prepared.arrays().items():
        values: Any = getattr(array, "bits", array)
        row = {
            "tensor": name,
            "dtype": getattr(array, "tag", str(values.dtype)),
            "shape": " x ".join(map(str, values.shape)),
        }
        if values.dtype.kind == "f" and values.size:
            row |= {"least": float(values.min()), "mean": float(values.mean()), "greatest": float(values.max())}
        rows.append(row)
    parts.append(f"<h3>tensors</h3>{html.table(rows)}")
    return "".join(parts)


def _turn(entry: dict[str, Any]) -> str:
    picture = f'<img alt="the picture that was sent" src="{entry["picture"]}">' if entry["picture"] else "<span></span>"
    error = f"<p class='bad'>{html.said(entry['error'])}</p>" if entry["error"] else ""
    usage: Usage | None = entry["usage"]
    figures = ""
    if usage is not None:
        wait = f", first after {html.amount(usage.first_token_s, 's')}" if usage.first_token_s is not None else ""
        figures = (
            f"<p class='quiet'>{usage.prompt_tokens:,} tokens in, {usage.completion_tokens:,} out{html.said(wait)}</p>"
        )
    said = f"<p class='quiet'>{html.said(entry['text'])}</p><div class='said'>{html.said(entry['answer'])}</div>"
    body = f"{said}{error}{figures}{_times(entry['times_ms'])}"
    return f'<div class="turn">{picture}<div>{body}</div></div>'


def _times(times_ms: Sequence[float]) -> str:
    """Time per token as small bars; the first one holds the prompt and is named, not drawn."""
    later = list(times_ms[1:])[-120:]
    if not later:
        return ""
    highest, width = max(later), 4
    bars = "".join(_bar(index * width, width - 1, 22 * value / highest) for index, value in enumerate(later))
    middle = sorted(later)[len(later) // 2]
    said = html.said(f"{middle:.1f} ms a token at the median, {highest:.1f} ms at most")
    box = f'width="{len(later) * width}" height="24" role="img" aria-label="{said}"'
    return f'<svg {box}>{bars}</svg><p class="quiet">{said}</p>'


def _bar(x: int, width: int, height: float) -> str:
    return f'<rect x="{x}" y="{24 - height:.1f}" width="{width}" height="{height:.1f}" fill="var(--fl-accent)"/>'


def _thumbnail(data: bytes | None) -> str:
    """A small PNG made anew from the pixels, as a data URL; nothing for what is no picture (the engine will say so)."""
    if not data:
        return ""
    try:
        image = open_picture(data).image.copy()
    except FirstlightError:
        return ""
    image.thumbnail(THUMBNAIL)
    out = io.BytesIO()
    image.convert("RGB").save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode("ascii")
