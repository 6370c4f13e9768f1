"""The report of a rung: what was checked, found and measured, as data for a terminal, a notebook and a file."""

from __future__ import annotations

import datetime
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import msgspec

from firstlight.engine.errors import RankFailure, Refused, unwritable
from firstlight.engine.findings import Finding, fatal, is_text, printable

Status = Literal["passed", "failed", "refused"]
CheckStatus = Literal["passed", "failed", "skipped"]
Value = bool | int | float | str | None
EXIT_STATUS: dict[str, int] = {"passed": 0, "failed": 1, "refused": 2}
METRIC_DETAILS = "metric_details"  # the table, in files, of what is said of metrics


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One yes-or-no question with its evidence: the value found and the limit it was held against, in `unit`."""

    name: str
    status: CheckStatus
    value: Value = None
    limit: Value = None
    unit: str = ""
    detail: str = ""


class Metric(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One figure. `value` None: there is none, and `detail` says why; never 0 for "not measured"."""

    value: Value
    unit: str
    detail: str = ""

    def __post_init__(self) -> None:
        assert self.unit or not _is_number(self.value), "a number needs a unit"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a rung found. `tables` hold rows of plain values by column; columns carry their unit in the name.

    `started` is ISO 8601 in UTC. `forced` is set when the rung ran on top of one that failed.
    """

    title: str
    verb: str
    status: Status
    checks: tuple[Check, ...] = ()
    findings: tuple[Finding, ...] = ()
    metrics: dict[str, Metric] = msgspec.field(default_factory=dict)
    tables: dict[str, list[dict[str, Any]]] = msgspec.field(default_factory=dict)
    environment: dict[str, Any] = msgspec.field(default_factory=dict)
    started: str = ""
    duration_s: float = 0.0
    forced: bool = False

    @property
    def exit_status(self) -> int:
        return EXIT_STATUS[self.status]

    @property
    def passed(self) -> bool:
        return self.status == "passed"

    def value(self, metric: str) -> Value:
        """The value of a metric; KeyError names those there are."""
        if metric not in self.metrics:
            raise KeyError(f"no metric {metric!r}; there are {', '.join(self.metrics)}")
        return self.metrics[metric].value

    def to_json(self, indent: int = 2) -> bytes:
        """JSON without NaN or Infinity literals: those become null, and what is said beside the number tells which.

        A metric is a value and a unit; what is said of it stands in the table `metric_details`.
        """
        plain = finite(self)
        said = [
            {"metric": name, "detail": metric.pop("detail")}
            for name, metric in plain["metrics"].items()
            if "detail" in metric
        ]
        plain["tables"] |= {METRIC_DETAILS: said} if said else {}
        if not self.forced:
            del plain["forced"]  # said only where there is something to say
        for finding in plain["findings"]:
            if not finding["more_tensors"]:
                del finding["more_tensors"]
        return msgspec.json.format(msgspec.json.encode(plain), indent=indent) + b"\n"

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Writes the JSON in one step: a reader sees the whole report or none."""
        return write_atomically(path, self.to_json())

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Report:
        """A report from its file. Raises `Refused` when it is none."""
        try:
            return msgspec.json.decode(Path(path).read_bytes(), type=cls)._with_details()
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, AssertionError) as error:  # a number without a unit
            raise Refused(
                fatal(
                    "side-file-invalid",
                    f"{path} is not a report: {error}",
                    file=str(path),
                    expected="a report written by --json or in a run directory",
                    next="name another file",
                )
            ) from error

    def _with_details(self) -> Report:
        """What was said of metrics, back in its place."""
        tables, metrics = dict(self.tables), dict(self.metrics)
        for row in tables.pop(METRIC_DETAILS, ()):
            name, detail = row.get("metric"), row.get("detail")
            if name in metrics and isinstance(detail, str):
                metrics[name] = msgspec.structs.replace(metrics[name], detail=detail)
        return msgspec.structs.replace(self, tables=tables, metrics=metrics)

    def _repr_html_(self) -> str:
        from firstlight.workbench.render.html import report_html

        return report_html(self)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/html": self._repr_html_(), "text/plain": str(self)}

    def __str__(self) -> str:
        from firstlight.workbench.render.terminal import report_text

        return report_text(self)


class Draft:
    """A report being written: collects while a rung runs; `close` makes the frozen report.

    The status follows from what was collected: failed with a failed check or a fatal finding, else passed. `began_s` is
    when the rung began (`time.perf_counter`): before its title was known, if that took reading; None is now.
    """

    def __init__(self, verb: str, title: str, began_s: float | None = None) -> None:
        self.verb = verb
        self.title = title
        self.checks: list[Check] = []
        self.findings: list[Finding] = []
        self.metrics: dict[str, Metric] = {}
        self.tables: dict[str, list[dict[str, Any]]] = {}
        self._began_s = time.perf_counter() if began_s is None else began_s

    def check(
        self,
        name: str,
        passed: bool | None,
        *,
        value: Value = None,
        limit: Value = None,
        unit: str = "",
        detail: str = "",
    ) -> bool:
        """Records a check, `None` for one that was skipped (the detail says why); returns whether it did not fail."""
        assert unit or not (_is_number(value) or _is_number(limit)), "a number needs a unit"
        status: CheckStatus = "skipped" if passed is None else "passed" if passed else "failed"
        self.checks.append(Check(name=name, status=status, value=value, limit=limit, unit=unit, detail=detail))
        return passed is not False

    def metric(self, name: str, value: Value, unit: str, detail: str = "") -> None:
        self.metrics[name] = Metric(value=value, unit=unit, detail=detail)

    def table(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        self.tables[name] = [dict(row) for row in rows]

    def find(self, findings: Finding | Iterable[Finding]) -> None:
        """Adds findings, each once."""
        for finding in (findings,) if isinstance(findings, Finding) else findings:
            if finding not in self.findings:
                self.findings.append(finding)

    def include(self, other: Report, prefix: str = "") -> None:
        """Takes over checks, findings, metrics and tables of another report, names prefixed."""
        self.checks += [msgspec.structs.replace(check, name=prefix + check.name) for check in other.checks]
        self.find(other.findings)
        self.metrics |= {prefix + name: metric for name, metric in other.metrics.items()}
        self.tables |= {prefix + name: rows for name, rows in other.tables.items()}

    def close(self, status: Status | None = None) -> Report:
        """The report; findings worst first."""
        from firstlight.workbench.environment import environment

        failed = any(check.status == "failed" for check in self.checks)
        failed = failed or any(finding.severity == "fatal" for finding in self.findings)
        order = ("fatal", "warning", "note")
        report = Report(
            title=self.title,
            verb=self.verb,
            status=status or ("failed" if failed else "passed"),
            checks=tuple(self.checks),
            findings=tuple(sorted(self.findings, key=lambda finding: order.index(finding.severity))),
            metrics=dict(self.metrics),
            tables=dict(self.tables),
            environment=environment(),
        )
        return since(report, self._began_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


def refusal(verb: str, title: str, error: Refused) -> Report:
    """The report of a rung that was refused."""
    draft = Draft(verb, title)
    draft.find(error.findings)
    return draft.close("refused")


def failure(verb: str, title: str, error: RankFailure) -> Report:
    """The report of a rung that lost a rank, or the engine without one rank being at fault."""
    draft = Draft(verb, title)
    is_rank = error.rank is not None
    log = error.log or ("the log of that rank" if is_rank else "host.log in its directory")
    draft.find(
        fatal(
            "rank-lost" if is_rank else "engine-failed",
            str(error),
            file=error.log,
            expected="every rank alive to the end" if is_rank else "an engine that is watched to the end",
            found=f"rank {error.rank}, phase {error.phase}" if is_rank else f"phase {error.phase}",
            next=f"look at {log}; start again",
        )
    )
    lost = f"rank {error.rank} lost" if is_rank else "the engine was lost"
    draft.check("all ranks alive", False, value=lost, detail=error.phase)
    return draft.close("failed")


def interruption(verb: str, title: str) -> Report:
    """The report of a verb that was interrupted before it had one."""
    draft = Draft(verb, title)
    draft.find(fatal("interrupted", f"{verb} was interrupted", expected="it goes on to its end", next="call it again"))
    return draft.close("failed")


def since(report: Report, began_s: float) -> Report:
    """A report that was made at the end of what began at `began_s` (`time.perf_counter`), with its true times."""
    duration_s = time.perf_counter() - began_s
    began = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=duration_s)
    return msgspec.structs.replace(
        report, started=began.isoformat(timespec="milliseconds"), duration_s=round(duration_s, 6)
    )


def now_iso() -> str:
    """Now as ISO 8601 in UTC, to the millisecond."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def finite(value: Any) -> Any:
    """Plain data without NaN and infinities: null in their place, said in the `detail` beside it if there is a unit.

    Names that are not UTF-8 have their bytes spelt out.
    """
    if isinstance(value, str):
        return value if is_text(value) else printable(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, msgspec.Struct):
        value = _fields(value)
    if isinstance(value, Mapping):
        plain = {finite(str(key)): finite(item) for key, item in value.items()}
        lost = [
            f"{key} is {item}" for key, item in value.items() if isinstance(item, float) and not math.isfinite(item)
        ]
        if lost and "unit" in plain:
            plain["detail"] = "; ".join(filter(None, (plain.get("detail"), ", ".join(lost))))
        return plain
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [finite(item) for item in value]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a numpy or torch scalar
        return finite(value.item())
    if isinstance(value, os.PathLike):
        return finite(os.fspath(value))
    return value


def _fields(value: msgspec.Struct) -> dict[str, Any]:
    """A struct as a dict of what its fields hold, as msgspec would encode it; what they hold may be of any type."""
    plain = {field.encode_name: getattr(value, field.name) for field in msgspec.structs.fields(type(value))}
    if value.__struct_config__.omit_defaults:
        defaults = {field.encode_name: field.default for field in msgspec.structs.fields(type(value))}
        plain = {name: item for name, item in plain.items() if item != defaults[name]}
    return plain


def write_atomically(path: str | os.PathLike[str], data: bytes) -> Path:
    """Writes a file beside its place and moves it there. Raises `Refused` when the place cannot be written."""
    import tempfile

    target = Path(path)
    try:
        if target.exists() and not target.is_file() and not target.is_dir():
            target.write_bytes(data)  # a device or a pipe is written to, never replaced
            return target
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(data)
            Path(temporary).chmod(0o644)
            Path(temporary).replace(target)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise unwritable(target, error, room=f"room for {len(data):,} bytes") from error
    return target


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
