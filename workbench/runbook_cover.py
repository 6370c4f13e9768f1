"""The first screen of a runbook's page: what passed, on what, with which limits, and what was not verified.

A notebook tells a bring-up in its order, with the verdict at the end; who opens the page wants the verdict first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from firstlight.engine.findings import printable
from firstlight.workbench.ladder import highlights
from firstlight.workbench.render import words
from firstlight.workbench.report import Check, Report

NEAREST = 2  # claims of a rung that are shown on the cover, those nearest to their limits
MOST_LINES = 12
STYLE = """
.fl-cover{font:14px/1.5 system-ui,sans-serif;max-width:72rem;margin:0 auto 1.5rem;padding:1.2rem 1.4rem;color:#1d1f21;
background:#fff;border:1px solid #d9d9d4;border-radius:8px;box-sizing:border-box}
.fl-cover h1{font-size:22px;font-weight:650;margin:0 0 .2rem;overflow-wrap:anywhere}
.fl-cover h2{font-size:14px;font-weight:650;margin:1.1rem 0 .3rem}
.fl-cover p{margin:.15rem 0;overflow-wrap:anywhere}.fl-cover .quiet{color:#5d636a}
.fl-cover table{border-collapse:collapse;width:100%;margin:0;font-size:13px}
.fl-cover th,.fl-cover td{text-align:left;vertical-align:top;padding:.25rem 1rem .25rem 0;overflow-wrap:anywhere;
border-bottom:1px solid #e3e3de}
.fl-cover th{font-weight:500;color:#5d636a}.fl-cover td.t{white-space:nowrap}
.fl-cover .n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.fl-cover .scroll{overflow-x:auto}.fl-cover .scroll:focus-visible{outline:2px solid #0b62a8}
.fl-cover .passed{color:#1f7a43;font-weight:600}.fl-cover .failed,.fl-cover .refused{color:#b9252c;font-weight:600}
.fl-cover .skipped,.fl-cover .not{color:#5d636a;font-weight:600}
.fl-cover ul{margin:.2rem 0;padding-left:1.2rem}.fl-cover code{font-size:12px;overflow-wrap:anywhere}
@media (max-width:640px){.fl-cover{padding:.8rem;border-radius:0}.fl-cover table{min-width:34rem}}
@media print{.fl-cover{border:0;padding:0}}
"""


def cover(card: Mapping[str, Any], last: Mapping[str, Report], judged: Sequence[Check]) -> str:
    """One HTML element, no scripts. `card` as in card.yaml, `last`: a report a rung, `judged`: the runbook's checks."""
    failed = [check for check in judged if check.status == "failed"]
    verdict = "failed" if failed or not last else "passed"
    checks = [check.status for report in last.values() for check in report.checks if check.status != "skipped"]
    passed = sum(report.passed for report in last.values())
    counted = f"{passed} of {len(last)} rungs · {checks.count('passed'):,} of {len(checks):,} checks"
    parts = [
        f'<h1>{_said(card["model"])}: <span class="{verdict}">{verdict}</span></h1>',
        f"<p>{_said(counted)}</p>",
        f'<p class="quiet">{_said(_on_what(card, last))}</p>',
    ]
    if failed:
        parts.append("<h2>What failed</h2>" + _list(_failures(failed, last)))
    if last:
        parts.append("<h2>Rung by rung</h2>" + _rungs(last) + "<h2>Nearest to their limits</h2>" + _limits(last))
    parts.append("<h2>Not verified</h2>" + _list(_not_verified(card), "everything that the ladder asks was verified"))
    if card["warnings"]:
        parts.append("<h2>Warnings</h2>" + _list(card["warnings"]))
    parts.append(f"<h2>How it was made</h2><p><code>{_said(card['command'])}</code></p>")
    versions = ", ".join(f"{name} {version}" for name, version in (card.get("versions") or {}).items() if version)
    parts.append(f'<p class="quiet">{_said("; ".join(one for one in (_commit(card), versions) if one))}</p>')
    parts.append('<p class="quiet">The record follows: every rung with its figures, as the notebook took it.</p>')
    return f'<section class="fl-cover"><style>{STYLE}</style>{"".join(parts)}</section>'


def _said(text: object) -> str:
    return escape(printable(str(text)))


def _commit(card: Mapping[str, Any]) -> str:
    return f"commit {card['commit']}" if card.get("commit") else ""


def _on_what(card: Mapping[str, Any], last: Mapping[str, Report]) -> str:
    """Checkpoint, mesh and precision, machine, time."""
    hardware = card.get("hardware") or {}
    devices = hardware.get("devices") or ()
    names = [str(one.get("name", one)) if isinstance(one, Mapping) else str(one) for one in devices]
    memory = words.in_bytes(hardware["memory_bytes"]) if hardware.get("memory_bytes") else ""
    cores = f"{hardware['cores']} cores" if hardware.get("cores") else ""
    engine = last["start"].title.partition(", ")[2] if "start" in last else ""
    created = str(card.get("created", ""))[:16].replace("T", " ")
    took = words.seconds(sum(report.duration_s for report in last.values())) if last else ""
    machine = ", ".join(part for part in (*names, str(hardware.get("cpu") or ""), cores, memory) if part)
    when = f"{created} UTC" + (f", {took}" if took else "")
    return " · ".join(part for part in (str(card["checkpoint"]), engine, machine, when) if part)


def _rungs(last: Mapping[str, Report]) -> str:
    rows = []
    for verb, report in last.items():
        judged = [check for check in report.checks if check.status != "skipped"]
        count = f"{sum(check.status == 'passed' for check in judged)} of {len(judged)}"
        forced = " (forced)" if report.forced else ""
        rows.append(
            f'<tr><td class="t">{_said(verb)}</td><td class="t"><span class="{report.status}">{report.status}</span>'
            f'{forced}</td><td class="n">{count}</td><td>{_said(highlights(report))}</td>'
            f'<td class="n">{words.seconds(report.duration_s)}</td></tr>'
        )
    return _table(("rung", "verdict", "checks", "what it measured", "took"), rows, ("checks", "took"))


def _limits(last: Mapping[str, Report]) -> str:
    """Of each rung the claims whose figures are nearest to their limits; deadlines, which only bound waiting, apart."""
    rows = []
    for verb, report in last.items():
        found = [(nearness, check) for check in report.checks if (nearness := _nearness(check)) is not None]
        for _, check in sorted(found, key=lambda item: (item[1].status != "failed", -item[0]))[:NEAREST]:
            is_scaled = words.is_scaled(check.unit)
            unit = "" if is_scaled else check.unit
            value, limit = (words.quantity(one, check.unit if is_scaled else "") for one in (check.value, check.limit))
            rows.append(
                f'<tr><td class="t">{_said(verb)}</td><td>{_said(check.name)}</td><td class="n">{_said(value)}</td>'
                f'<td class="n">{_said(limit)}</td><td>{_said(unit)}</td></tr>'
            )
    return _table(("rung", "claim", "figure", "limit", "unit"), rows, ("figure", "limit"))


def _nearness(check: Check) -> float | None:
    """The figure as a part of its limit; None without both, and for deadlines."""
    value, limit = check.value, check.limit
    if isinstance(value, bool | str | None) or isinstance(limit, bool | str | None) or check.unit == "s":
        return None
    return value / limit if limit else None


def _failures(failed: Sequence[Check], last: Mapping[str, Report]) -> list[str]:
    lines = []
    for check in failed:
        report = last.get(check.name)
        found = (
            [f"{one.message}; next: {one.next}" for one in report.findings if one.severity == "fatal"] if report else []
        )
        wrong = [f"{one.name}: {one.detail}" for one in report.checks if one.status == "failed"] if report else []
        lines += [f"{check.name}: {line}" for line in (*found, *wrong)] or [f"{check.name}: {check.detail}"]
    return lines


def _not_verified(card: Mapping[str, Any]) -> list[str]:
    return [
        ": ".join(str(one[key]) for key in ("rung", "status", "claim", "why") if one.get(key))
        for one in card["not_verified"]
    ]


def _list(lines: Iterable[str], otherwise: str = "") -> str:
    found = list(lines)
    more = f"<li>and {len(found) - MOST_LINES:,} more, in card.yaml</li>" if len(found) > MOST_LINES else ""
    items = "".join(f"<li>{_said(line)}</li>" for line in found[:MOST_LINES])
    return f"<ul>{items}{more}</ul>" if found else f'<p class="quiet">{_said(otherwise)}</p>'


def _table(columns: Sequence[str], rows: Sequence[str], right: Sequence[str]) -> str:
    kinds = dict.fromkeys(right, ' class="n"')
    head = "".join(f'<th scope="col"{kinds.get(name, "")}>{name}</th>' for name in columns)
    return f'<div class="scroll" tabindex="0"><table><tr>{head}</tr>{"".join(rows)}</table></div>'
