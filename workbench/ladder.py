"""The whole ladder in order, one line a rung, and a report over all of it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from shutil import which
from string import Formatter
from typing import TYPE_CHECKING, Any

import msgspec

from firstlight.workbench.bringup import Bringup
from firstlight.workbench.face import Face, say_refused
from firstlight.workbench.first_token import line_of
from firstlight.workbench.infer import answer_lines
from firstlight.workbench.render import words
from firstlight.workbench.report import Draft, Report
from firstlight.workbench.runs import LADDER

if TYPE_CHECKING:
    from firstlight.workbench.adaptation import Adaptation

Rung = Callable[[], Report]
MOST_ANSWER = 60  # characters of an answer in the terminal; the report has it whole

# What a rung's line says of its figures.
HIGHLIGHTS: dict[str, str] = {
    "scan": "{parameters}, {checkpoint_bytes}",
    "plan": "{weight_bytes_per_device} of weights a device",
    "load": "{read_bytes} at {read_rate}",
    "start": "{ranks} in {start_s}",
    "infer": "{first_token_s} to the first, {tokens_per_s}",
    "verify": "{logits_max_abs}, KL {kl_mean}",
    "profile": "{decode_tokens_per_s}, {decode_of_limit} of memory's limit",
    "stress": "{requests} at {tokens_per_s}, 95 % within {answer_p95_s}",
    "export": "{archive_bytes}",
}


def climb(
    bringup: Bringup,
    face: Face,
    golden: str | None = None,
    deep: bool = False,
    cluster: str | None = None,
    adaptation: Adaptation | None = None,
) -> Report:
    """Every rung on the one below; stops at the first that does not pass, unless the bring-up is forced.

    With the `adaptation` of an earlier run, the validation set is compared with its answers, and what changed is shown.
    """
    if adaptation is not None:
        bringup.accepted = [msgspec.to_builtins(one) for one in adaptation.validation] or None
    draft = Draft("up", bringup.run.record.model)
    done: dict[str, Report] = {}
    stopped, status = "", None
    for verb, rung in _rungs(bringup, golden, deep, cluster):
        if stopped and not bringup.force:
            draft.check(verb, None, detail=f"not run: {stopped} did not pass")
            continue
        report = rung()
        done[verb] = report
        _tell(face, report)
        draft.check(verb, report.passed, value=report.status, detail=highlights(report))
        if not report.passed:
            status = status or report.status
            stopped = stopped or (verb if verb in LADDER else "")  # nothing stands on what is beside the ladder
            draft.find(finding for finding in report.findings if finding.severity == "fatal")
    if adaptation is not None:
        _tell_changes(face, bringup, adaptation, draft)
    _summary(draft, done)
    report = draft.close(status)  # a rung that was refused makes the whole refused
    bringup.run.add(report)
    bringup.run.write_page()
    _end(face, bringup, report)
    return report


def _rungs(bringup: Bringup, golden: str | None, deep: bool, cluster: str | None) -> Iterator[tuple[str, Rung]]:
    yield "scan", partial(bringup.scan, deep)
    yield "plan", partial(bringup.plan, cluster)
    yield "load", bringup.load
    yield "start", partial(bringup.start, streaming=True)
    yield "infer", bringup.infer
    yield "validate", bringup.validate
    yield "verify", partial(bringup.verify, golden)
    yield "profile", bringup.profile
    yield "stress", bringup.stress
    yield "export", bringup.export


def _tell_changes(face: Face, bringup: Bringup, adaptation: Adaptation, draft: Draft) -> None:
    """What is not as it was: keys of the configuration, and figures that got worse."""
    from firstlight.workbench.adaptation import compare

    report = compare(adaptation, bringup.run)
    bringup.run.add(report)
    draft.include(report, "since ")
    face.line()
    face.line(f"since {adaptation.model}: {report.value('config_changes')} keys of config.json changed")
    for finding in report.findings:
        before = f"before {finding.expected}, now " if finding.expected else ""
        face.paragraph(f"{finding.code}: {finding.message} ({before}{finding.found})", indent=2)


def _tell(face: Face, report: Report) -> None:
    """One line; under it the answers of `infer`, what failed, and why."""
    passed = sum(check.status != "failed" for check in report.checks)
    checks = f"{passed}/{len(report.checks)}" if report.checks else ""
    face.verdict(report.status, report.verb, checks, words.seconds(report.duration_s), highlights(report))
    if streams := line_of(report):
        face.line(f"          {streams}")
    if report.verb == "infer":
        for number, (picture, question, answer, expected) in enumerate(answer_lines(report)):
            if number < 6 or expected:  # some, and all that are not as expected
                wanted = f"  (expected: {expected})" if expected else ""
                answer = " ".join(answer.split())
                said = answer if len(answer) <= MOST_ANSWER else answer[: MOST_ANSWER - 1] + "…"
                face.line(f"          {picture + ': ' if picture else ''}{question}  {said}{wanted}")
    for check in report.checks:
        if check.status == "failed":
            value = words.quantity(check.value, check.unit) if check.value is not None else ""
            limit = f", limit {words.quantity(check.limit, check.unit)}" if check.limit is not None else ""
            detail = f" ({check.detail})" if check.detail else ""
            face.paragraph(f"failed: {check.name}: {value}{limit}{detail}", indent=10)
    fatal = [finding for finding in report.findings if finding.severity == "fatal"]
    if fatal:
        face.settle()
        say_refused(fatal, lead=report.status)


def highlights(report: Report) -> str:
    """The figures of the rung's line; empty where the report lacks one. `verify` names a figure once for each input."""
    template = HIGHLIGHTS.get(report.verb, "")
    found: dict[str, str] = {}
    for _, wanted, _, _ in Formatter().parse(template):
        for name, metric in report.metrics.items():
            if wanted and metric.value is not None and (name == wanted or name.endswith(f"_{wanted}")):
                found.setdefault(wanted, words.quantity(metric.value, metric.unit))
    try:
        return template.format_map(found)
    except KeyError:
        return ""


def _summary(draft: Draft, done: dict[str, Report]) -> None:
    """The rungs as rows, and what was predicted beside what was measured."""
    draft.table(
        "rungs",
        (
            {"rung": verb, "status": report.status, "duration_s": report.duration_s, "figures": highlights(report)}
            for verb, report in done.items()
        ),
    )
    draft.table("predicted_and_measured", _predictions(done))
    if "start" in done:
        draft.table("first_token", done["start"].tables.get("first_token", []))
    if "infer" in done:
        draft.table("answers", done["infer"].tables.get("answers", []))
    draft.metric("duration_s", sum(report.duration_s for report in done.values()), "s", "of all rungs")


def _predictions(done: dict[str, Report]) -> Iterator[dict[str, Any]]:
    plan, start, load, profile = (done.get(verb) for verb in ("plan", "start", "load", "profile"))
    if plan is None:
        return
    planned = plan.metrics.get("weight_bytes_per_device")
    if planned is not None and load is not None and "largest_rank_bytes" in load.metrics:
        measured = load.metrics["largest_rank_bytes"].value
        yield {"figure": "weight bytes per device", "predicted": planned.value, "measured": measured, "unit": "B"}
    rows = plan.tables.get("ranks", [])
    cached = [row["cache_bytes"] for row in start.tables.get("memory", [])] if start is not None else []
    if rows and cached:
        predicted = max(row["cache_bytes"] + row["state_bytes"] for row in rows)
        yield {"figure": "cache bytes per device", "predicted": predicted, "measured": max(cached), "unit": "B"}
    decode = next((row for row in plan.tables.get("step_time_ms", []) if row["phase"] == "decode"), None)
    if decode is not None and decode.get("step_ms") is not None and profile is not None and profile.metrics:
        measured = profile.metrics["decode_ms"].value
        yield {"figure": "decode step", "predicted": decode["step_ms"], "measured": measured, "unit": "ms"}


def _end(face: Face, bringup: Bringup, report: Report) -> None:
    face.line()
    left = [check.name for check in report.checks if check.status == "skipped"]
    if left:
        face.paragraph(f"not run: {', '.join(left)}; --force goes on, and the record shows it", indent=0)
    face.line(f"{report.status}; the report: {bringup.run.directory / 'report.html'}")
    if bringup.detached and bringup.host is not None:
        face.line(f"the engine goes on at {bringup.host.url}")
        face.line(f"end it:  {_program()} serve --stop {shlex.quote(str(bringup.run.directory))}")
    elif report.passed:
        face.line(f'ask it:  {_program()} generate {shlex.quote(str(bringup.checkpoint))} --prompt "..."')


def _program() -> str:
    """How the command line was called, where its own name would not be found: `make` calls it by its path."""
    return "firstlight" if which("firstlight") or not Path(sys.argv[0]).is_file() else sys.argv[0]
