"""Overview: the ladder and its state, what failed and what to do next, the engine now, progress, key figures."""

from __future__ import annotations

import time
from typing import Any

from firstlight.dashboards import html
from firstlight.dashboards.store import SILENT_S, Snapshot, requests_once
from firstlight.dashboards.views.view import Page, column, command, mesh_of, pane, put
from firstlight.dashboards.views.working import BROKE_OFF, Doing, bars, doing
from firstlight.engine.findings import Finding
from firstlight.engine.serving.api import Health
from firstlight.workbench.cli import VERBS
from firstlight.workbench.ladder import highlights
from firstlight.workbench.render import words
from firstlight.workbench.report import Report
from firstlight.workbench.runs import LADDER, RungRecord

UNREADABLE = "unreadable"  # what a rung is whose report cannot be read

GONE = (
    "Its process is gone and left no report. It was killed, perhaps for want of memory (dmesg says so), or its machine"
    " went down. Do it again:"
)


class Overview:
    title = "Overview"

    def __init__(self, page: Page) -> None:
        self._head, self._wrong, self._ladder, self._engine, self._rest = (pane() for _ in range(5))

    def panel(self) -> Any:
        return column(self._head, self._wrong, self._ladder, self._engine, self._rest)

    def draw(self, snapshot: Snapshot) -> None:
        now = doing(snapshot)
        put(self._head, _head(snapshot, now))
        put(self._wrong, _wrong(snapshot, now))
        going_on = bars(now) if now is not None else _first(snapshot)
        put(self._ladder, html.page(html.card("Ladder", _ladder(snapshot, now) + going_on)))
        put(self._engine, _engine(snapshot))
        put(self._rest, _rest(snapshot))


def _head(snapshot: Snapshot, now: Doing | None) -> str:
    record = snapshot.record
    found = mesh_of(snapshot)
    mesh = f"{found.describe()} · " if found is not None else ""
    said = f"{record.source} · {mesh}since {record.created[:19].replace('T', ' ')} UTC"
    head = f"<h2 class='model'>{html.said(record.model)}</h2><p class='quiet'>{html.said(said)}</p>"
    return html.page(head + _verdict(snapshot, now))


def _verdict(snapshot: Snapshot, now: Doing | None) -> str:
    """The run in one line: how it stands, how far up the ladder, how many checks."""
    last = {rung.verb: _status(snapshot, rung) for rung in snapshot.record.rungs if rung.verb in LADDER}
    reports = [report for report in _last(snapshot) if report.verb in LADDER]
    checks = [check.status for report in reports for check in report.checks if check.status != "skipped"]
    failed = next((verb for verb in LADDER if last.get(verb, "passed") != "passed"), "")
    has_died = snapshot.health is not None and snapshot.health.failure is not None
    if now is not None and (now.is_running or not (failed or has_died)):
        word, kind = now.sentence, now.kind
    elif failed:
        word, kind = f"{last[failed]} at {failed}", "failed"
    elif has_died:
        word, kind = "the engine failed", "failed"
    elif not last:
        word, kind = "nothing was run yet", ""
    else:
        word, kind = "passed", "passed"
    passed = sum(status == "passed" for status in last.values())
    parts = [f"{passed} of {len(LADDER)} rungs passed"] if last else []
    if checks:
        parts.append(f"{checks.count('passed'):,} of {len(checks):,} checks")
    if snapshot.has_engine:
        parts.append("its engine answers")
    said = "".join(f" · {html.said(part)}" for part in parts)
    return f"<p class='verdict'><span class='status {kind}'>{html.said(word)}</span>{said}</p>"


def _ladder(snapshot: Snapshot, now: Doing | None) -> str:
    last = {rung.verb: rung for rung in snapshot.record.rungs}
    items = []
    for verb in LADDER:
        current = now if now is not None and now.verb == verb else None
        rung = last.get(verb) if current is None else None  # what is done again has no outcome yet
        report = snapshot.latest(verb) if rung else None
        word = current.state if current else _status(snapshot, rung) if rung else "not run"
        state = current.kind if current else {"not run": "", UNREADABLE: "failed"}.get(word, word)
        took = f" in {_took(rung.duration_s)}" if rung and rung.status != "refused" else ""
        said = html.with_units(highlights(report)) if report is not None else ""  # as HTML
        forced = " (forced)" if rung and rung.forced else ""
        items.append(
            f'<li class="{state}"><b>{verb}</b><span class="{state}">{html.said(word)}</span>'
            f"<span>{html.said(took + forced)}</span><p>{said}</p></li>"
        )
    return f'<ol class="ladder">{"".join(items)}</ol>'


def _status(snapshot: Snapshot, rung: RungRecord) -> str:
    """As its report has it; where that cannot be read, nothing holds."""
    report = snapshot.latest(rung.verb)
    return rung.status if report is None or report.status == rung.status else UNREADABLE


def _took(duration_s: float) -> str:
    return html.amount(duration_s, "s") if duration_s < 1 else words.seconds(duration_s)


def _first(snapshot: Snapshot) -> str:
    """How to begin, where nothing was run."""
    is_new = not snapshot.record.rungs and not snapshot.progress
    return html.commands(command(snapshot, "up")) if is_new else ""


def _wrong(snapshot: Snapshot, now: Doing | None) -> str:
    """What failed and what to do next, before everything else: the engine, then rungs, then readings that alarm."""
    health, parts = snapshot.health, []
    if health is not None and health.failure is not None:
        failure = health.failure
        log = "host" if failure.rank is None else f"rank{failure.rank}"
        body = (
            f"<p>{html.status('failed')} {html.said(str(failure))}</p>"
            f"<p class='quiet'>See engine/{log}.log in the run directory, and start again.</p>"
        )
        parts.append(html.card("The engine failed", body, "alarm"))
    if now is not None and now.state == BROKE_OFF:
        again = html.commands(command(snapshot, now.verb if now.verb in VERBS else "up"))
        parts.append(html.card(f"The rung {now.sentence}", html.nothing(GONE) + again, "alarm"))
    last = _last(snapshot)
    failed = [(report, check) for report in last for check in report.checks if check.status == "failed"]
    rows = "".join(
        f"<tr><td class='t'>{html.status('failed')}</td><td class='t'>{html.said(report.verb)}</td>"
        f"<td class='w'>{html.said(check.name)} <span class='quiet'>{html.said(check.detail)}</span></td></tr>"
        for report, check in failed
        if report.verb != "up"
    )
    fatal = [finding for report in last for finding in report.findings if finding.severity == "fatal"]
    if fatal:
        parts.append(html.card("What failed, and what to do next", html.findings(_once(fatal)), "alarm"))
    if rows:
        title = "Checks that failed" if fatal else "What failed"
        parts.append(html.card(title, html.scrolled(title, f"<table>{rows}</table>"), "alarm"))
    return html.page(*parts, _alarms(snapshot)) if parts or snapshot.alarms else ""


def _once(found: list[Finding]) -> list[Finding]:
    """A rung's findings come again in the report of `up`."""
    return list({(one.code, one.message): one for one in found}.values())


def _alarms(snapshot: Snapshot) -> str:
    return "".join(
        html.card(
            f"alarm: {one.device}",
            f"<p>{html.said(words.heading(one.metric))}: "
            f"{html.said(one.reason or words.quantity(one.value, one.unit))}</p>",
            "alarm",
        )
        for one in snapshot.alarms
        if one.source != "engine"
    )


def _engine(snapshot: Snapshot) -> str:
    health = snapshot.health
    if health is None or health.failure is not None:
        return ""
    return html.page(html.card("Engine", _alive(snapshot, health)))


def _alive(snapshot: Snapshot, health: Health) -> str:
    if health.status in ("stopped", "failed"):
        stage = f", last in the stage {html.said(health.stage)}" if health.stage else ""
        return f"<p class='quiet'>no engine answers any more{stage}</p>"
    if health.status == "starting":
        share = health.done / health.total if health.total else 0.0
        return f"<p>starting: {html.said(health.stage)}</p>{html.track(share)}"
    found = [("requests running", str(health.running)), ("waiting", str(health.waiting))]
    for metric, name in (("tokens", "tokens a second"), ("cache_used", "cache used"), ("busy", "busy")):
        trail = snapshot.trails.get(("engine", "engine", metric))
        if trail is not None and trail.last.value is not None and time.time() - trail.last.time_s < SILENT_S:
            unit = "%" if trail.last.unit == "%" else ""
            found.append((name, words.quantity(round(trail.last.value, 1), unit)))
    return f"<p><span class='status passed'>{health.status}</span></p>{html.figures(found)}"


def _rest(snapshot: Snapshot) -> str:
    parts = []
    warned = [finding for report in _last(snapshot) for finding in report.findings if finding.severity == "warning"]
    if warned:
        parts.append(html.card("To look at", html.findings(_once(warned))))
    up = snapshot.latest("up")
    if up is not None and up.tables.get("predicted_and_measured"):
        parts.append(html.card("Predicted beside measured", html.table(_side_by_side(up))))
    infer = snapshot.latest("infer")
    if infer is not None:
        parts.append(html.card("Answers", html.table(_answers(infer)[:20])))
    if snapshot.requests:
        rows_ = [
            {
                "request": r.name,
                "rung": r.rung,
                "finish": r.status,
                "tokens_in": r.prompt_tokens,
                "tokens_out": r.completion_tokens,
                "first_token_s": r.first_token_s,
                "total_s": r.total_s,
            }
            for r in requests_once(snapshot.requests)
        ]
        parts.append(html.card("Requests, the latest first", html.table(rows_[:50])))
    return html.page(*parts)


def _answers(infer: Report) -> list[dict[str, Any]]:
    """Answers; those that are not what was expected say so."""
    rows = []
    for row in infer.tables.get("answers", []):
        known = row.get("expected")
        is_right = known is None or _plain(row.get("answer")) == _plain(known)
        shown = {name: row.get(name) for name in ("picture", "question", "answer")}
        shown |= {"expected": known and (known if not is_right else "the same"), "status": None}
        rows.append(shown | ({} if is_right else {"status": "differs"}) | _without(row, "expected"))
    return rows


def _without(row: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != name}


def _plain(text: object) -> str:
    return " ".join(str(text).lower().replace(".", " ").split())


def _last(snapshot: Snapshot) -> list[Report]:
    found: dict[str, Report] = {}
    for report in snapshot.reports:
        found[report.verb] = report
    return list(found.values())


def _side_by_side(up: Report) -> list[dict[str, Any]]:
    rows = []
    for row in up.tables["predicted_and_measured"]:
        unit = str(row["unit"])
        ratio = row["measured"] / row["predicted"] if row["predicted"] else None
        rows.append(
            {
                "figure": row["figure"],
                "predicted": html.Figure(words.quantity(row["predicted"], unit)),
                "measured": html.Figure(words.quantity(row["measured"], unit)),
                "measured_of_predicted": html.Figure(words.quantity(ratio, "share")) if ratio is not None else None,
            }
        )
    return rows
