"""The rung `export`: a run as one archive, with a card of what was verified and what the next bring-up starts from."""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from firstlight.engine.errors import Refused, unwritable
from firstlight.engine.findings import fatal
from firstlight.engine.model.families import FAMILIES
from firstlight.workbench.adaptation import FORMAT
from firstlight.workbench.events import WATCHED
from firstlight.workbench.plan import read_config
from firstlight.workbench.report import Check, Draft, Report, Value, finite, write_atomically
from firstlight.workbench.runs import LADDER, STANDS_ON, Run

LEFT_OUT = ("engine",)  # the host's own folder: its handle holds a token
HARDWARE = ("cpu", "cores", "memory_bytes", "devices", "system")
KINDS = (".tar.gz", ".tgz", ".zip")


def export(run: Run, out: str | Path | None = None) -> Report:
    """Writes `card.yaml`, `adaptation.yaml` and `report.html` into the run directory and packs it (`<run>.tar.gz`).

    `out` names another archive, .tar.gz or .zip. Raises `Refused` for an empty run or another kind of archive.
    """
    reports = run.reports()
    if not reports:
        raise Refused(
            fatal("not-found", f"{run.directory} holds no report", file=str(run.directory), next="run a rung first")
        )
    target = Path(out) if out is not None else run.directory.with_name(run.directory.name + ".tar.gz")
    if not target.name.endswith(KINDS):
        raise Refused(
            fatal(
                "usage",
                f"{target.name} is no kind of archive that is written here",
                expected=" or ".join(KINDS),
                found=target.suffix or "no suffix",
                next="correct --out",
            )
        )
    draft = Draft("export", run.record.model or run.directory.name)
    run.close()
    last = latest(reports)
    write_yaml(run.directory / "card.yaml", card(run, last))
    write_yaml(run.directory / "adaptation.yaml", adaptation(run, last))
    run.write_page()
    earlier = {str(report.metrics["archive"].value) for report in reports if "archive" in report.metrics}
    kept_out = {Path(name).resolve() for name in earlier} | {target.resolve()}
    files = [file for file in _files(run.directory) if file.resolve() not in kept_out]
    _pack(run.directory, files, target)
    data = target.read_bytes()
    names = {file.relative_to(run.directory).as_posix() for file in files}
    missing = [rung.file for rung in run.record.rungs if rung.file not in names]
    draft.check("every report is in the archive", not missing, value=len(reports), unit="reports")
    draft.check("the card lists a verified rung", any(r.passed for r in last.values()), value=_passed(last))
    draft.metric("archive", str(target), "")
    draft.metric("archive_bytes", len(data), "B", f"{len(files)} files")
    draft.metric("archive_sha256", hashlib.sha256(data).hexdigest(), "")
    return draft.close()


def latest(reports: tuple[Report, ...]) -> dict[str, Report]:
    """The last report of every verb, in the order of the ladder, verbs off the ladder behind it."""
    found = {report.verb: report for report in reports}
    order = {verb: index for index, verb in enumerate((*LADDER, *STANDS_ON, *found))}
    return dict(sorted(found.items(), key=lambda item: order[item[0]]))


def card(run: Run, last: dict[str, Report]) -> dict[str, Any]:
    """What was verified, claim by claim with verdict, figure and limit, by which command, where; and what was not.

    Commit, hardware and versions on top are those of the newest report; a rung that was made elsewhere says its own.
    """
    newest = _where(list(last.values())[-1])
    return {
        "model": run.record.model,
        "checkpoint": run.record.source,
        "created": run.record.created,
        "command": run.record.command,
        **newest,
        "verified": [_entry(report, run.record.command, newest) for report in last.values() if report.passed],
        "not_verified": [
            *(_not_passed(report) for report in last.values() if not report.passed),
            *({"rung": verb, "status": "not run"} for verb in LADDER[:-1] if verb not in last),
            *(
                {"rung": report.verb, "status": "skipped", "claim": check.name, "why": check.detail}
                for report in last.values()
                if report.passed
                for check in report.checks
                if check.status not in ("passed", "failed")
            ),
        ],
        "warnings": sorted({f.message for r in last.values() for f in r.findings if f.severity == "warning"}),
    }


def _where(report: Report) -> dict[str, Any]:
    """Commit, hardware and versions of a report."""
    found = report.environment
    return {
        "commit": found.get("commit", ""),
        "hardware": {name: found.get(name) for name in HARDWARE if found.get(name) is not None},
        "versions": found.get("versions", {}),
    }


def _entry(report: Report, command: str, newest: dict[str, Any]) -> dict[str, Any]:
    here = _where(report)
    return {
        "rung": report.verb,
        "what": report.title,
        "command": report.environment.get("command") or command,
        **{name: value for name, value in here.items() if value != newest[name]},
        "started": report.started,
        "duration_s": round(report.duration_s, 3),
        **({"forced": True} if report.forced else {}),
        "claims": [_claim(check) for check in report.checks if check.status in ("passed", "failed")],
        "figures": {
            name: {"value": _figure(metric.value), "unit": metric.unit}
            for name, metric in report.metrics.items()
            if metric.value is not None
        },
    }


def _figure(value: Value) -> Value:
    """Six digits are enough to compare by."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _claim(check: Check) -> dict[str, Any]:
    """A check as a claim; what it has no figure, limit or unit for is left out."""
    found = {"figure": _figure(check.value), "limit": _figure(check.limit), "unit": check.unit, "detail": check.detail}
    return {
        "claim": check.name,
        "verdict": check.status,
        **{name: value for name, value in found.items() if value not in (None, "")},
    }


def _not_passed(report: Report) -> dict[str, Any]:
    """A rung that did not pass: why, and what it claimed nevertheless, claim by claim."""
    claims = [_claim(check) for check in report.checks if check.status in ("passed", "failed")]
    said = {"rung": report.verb, "status": report.status, "why": _why(report)}
    return {**said, "claims": claims} if claims else said


def _why(report: Report) -> str:
    failed = [check.name for check in report.checks if check.status == "failed"]
    fatal_ones = [finding.message for finding in report.findings if finding.severity == "fatal"]
    return "; ".join((*fatal_ones, *failed)[:3])


def _passed(last: dict[str, Report]) -> str:
    return ", ".join(verb for verb, report in last.items() if report.passed) or "none"


def adaptation(run: Run, last: dict[str, Report]) -> dict[str, Any]:
    """What the next bring-up starts from: family, rules, plan, operator choices, tolerances."""
    verify, planned = last.get("verify"), last.get("plan")
    options = (run.record.engine or {}).get("options", {})
    return {
        "format": FORMAT,
        "model": run.record.model,
        **_family(run.record.checkpoint),
        "engine": {key: value for key, value in options.items() if value not in (None, {}) and key != "checkpoint"},
        "plan": {name: metric.value for name, metric in planned.metrics.items()} if planned else {},
        "operators": _operators(last.get("start")),
        "config": _config(run.record.checkpoint),
        "figures": {verb: _figures_of(report) for verb, report in last.items() if report.passed and verb in LADDER},
        "environment": _environment(last),
        "validation": _validation(last.get("validate")),
        "tolerances": {n: m.value for n, m in verify.metrics.items() if "limit" in n} if verify else {},
    }


def _config(checkpoint: str) -> dict[str, Any]:
    """The raw configuration: what the next release's is compared with."""
    try:
        return read_config(checkpoint)[1]
    except Refused:
        return {}


def _figures_of(report: Report) -> dict[str, Any]:
    return {
        name: {"value": _figure(metric.value), "unit": metric.unit}
        for name, metric in report.metrics.items()
        if metric.value is not None and not isinstance(metric.value, str)
    }


def _environment(last: dict[str, Report]) -> dict[str, Any]:
    newest = list(last.values())[-1].environment if last else {}
    return {name: newest.get(name) for name in ("cpu", "cores", "devices", "system", "commit", "versions")}


def _validation(report: Report | None) -> list[dict[str, Any]]:
    rows = report.tables.get("validation", []) if report is not None else []
    return [{"name": row["name"], "tokens": row["tokens"], "answer": row["answer"]} for row in rows]


def _operators(start: Report | None) -> dict[str, str]:
    rows = start.tables.get("operators", []) if start is not None else []
    return {row["operator"]: row["implementation"] for row in rows}


def _family(checkpoint: str) -> dict[str, Any]:
    """The family and its weight rules, with those of nested models."""
    try:
        _, config = read_config(checkpoint)
        family = FAMILIES[str(config["model_type"])]
    except (Refused, KeyError):
        return {"family": None, "rules": []}
    rules = [_rule(rule) for rule in family.rules]
    for part in family.parts:
        nested = str((config.get(part.key) or {}).get("model_type") or part.default)
        inner = FAMILIES[nested].rules if nested in FAMILIES else ()
        rules += [{**_rule(rule), "tensor": part.prefix + rule.tensor} for rule in inner]
    return {"family": family.name, "rules": rules}


def _rule(rule: Any) -> dict[str, Any]:
    return {key: value for key, value in msgspec.to_builtins(rule).items() if value not in ("", 0, False, [], ())}


def write_yaml(path: Path, value: dict[str, Any]) -> None:
    """A mapping as YAML, in its order, whole or not at all."""
    import yaml

    text = yaml.safe_dump(finite(value), sort_keys=False, allow_unicode=True, width=120, default_flow_style=None)
    write_atomically(path, text.encode())


def _files(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.rglob("*")):
        inside = path.relative_to(directory)
        is_ours = inside.parts[0] not in LEFT_OUT and not path.name.endswith(("-wal", "-shm", WATCHED))
        if is_ours and path.is_file() and not path.is_symlink():
            yield path


def _pack(directory: Path, files: list[Path], target: Path) -> None:
    """Writes the archive beside its place, then moves it there."""
    draft = target.with_name(f".{target.name}")
    try:
        with tempfile.TemporaryDirectory() as folder:
            names = [
                (_whole(file, Path(folder)), f"{directory.name}/{file.relative_to(directory).as_posix()}")
                for file in files
            ]
            _write(draft, target, names)
        draft.replace(target)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise unwritable(target, error, elsewhere="name another --out file") from error
    except sqlite3.Error as error:
        draft.unlink(missing_ok=True)
        is_full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
        raise Refused(
            fatal(
                "not-available" if is_full else "read-failed",
                f"the events of {directory} cannot be copied into the archive: {error}",
                file=str(directory / "events.sqlite"),
                expected="room in the temporary directory (TMPDIR)" if is_full else "a database that can be read",
                next="make room there" if is_full else "remove it: reports, card and page do not need it",
            )
        ) from error


def _whole(file: Path, folder: Path) -> Path:
    """A database as a file of its own, with what still lies in its log while somebody else has it open."""
    if file.suffix != ".sqlite" or not file.with_name(f"{file.name}-wal").exists():
        return file
    copy = folder / f"{len(list(folder.iterdir()))}-{file.name}"
    address = f"{file.resolve().as_uri()}?mode=ro"
    with (
        contextlib.closing(sqlite3.connect(address, uri=True)) as source,
        contextlib.closing(sqlite3.connect(copy)) as target,
    ):
        source.backup(target)
    return copy


def _write(draft: Path, target: Path, names: list[tuple[Path, str]]) -> None:
    """The archive, of the kind that the target's name says."""
    if target.suffix == ".zip":
        with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as archive:
            for file, name in names:
                archive.write(file, name)
        return
    with tarfile.open(draft, "w:gz") as tar:
        for file, name in names:
            tar.add(file, name)
