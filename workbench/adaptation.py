"""What one bring-up leaves to the next: `adaptation.yaml` read back, used, and held against what the new run finds.

Used: the engine's options (mesh, dtype, sizes, forced operators). Compared: the configuration key by key, figures side
by side, answers of the validation set. A figure that got much worse is a warning.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal, note, several, warning
from firstlight.engine.serving.options import EngineOptions
from firstlight.workbench.compare_runs import worse_by
from firstlight.workbench.plan import read_config
from firstlight.workbench.render import words
from firstlight.workbench.report import Draft, Report, Value
from firstlight.workbench.runs import Run

WORSE = 1.25  # of a time or a rate, before it is called a regression
LIMIT_BYTES = 64 << 20
FORMAT = 1
MOST_VALUES = 2_000_000  # with what YAML repeats by reference counted as often as it says
LEFT_TO_THIS_RUN = ("device", "threads", "load_threads", "hosts")  # options that belong to a machine
LEFT_TO_THE_USER = ("trust_remote_code",)  # a file that came along does not decide whose code runs
SKIP = frozenset(("transformers_version", "_name_or_path"))  # keys that say nothing of the model
RENAMED = {"torch_dtype": "dtype"}  # by newer versions of what writes them


class Figure(msgspec.Struct, frozen=True):
    """A metric of an earlier run."""

    value: Value = None
    unit: str = ""


class Answered(msgspec.Struct, frozen=True):
    """An answer of the validation set."""

    name: str
    tokens: list[int] = []
    answer: str = ""


class Environment(msgspec.Struct, frozen=True):
    """Where an earlier run was made."""

    cpu: Any = ""
    cores: Any = ""
    devices: Any = ""
    system: Any = ""
    commit: Any = ""
    versions: dict[str, Any] | None = None


class Adaptation(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of an `adaptation.yaml` that the next run uses or is compared with."""

    format: int = FORMAT
    model: str = ""
    family: str | None = None
    engine: dict[str, Any] = {}
    operators: dict[str, str] = {}
    config: dict[str, Any] = {}
    figures: dict[str, dict[str, Figure]] = {}
    environment: Environment = Environment()
    validation: list[Answered] = []

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Adaptation:
        """Raises `Refused` for what is no such file."""
        file = Path(path)
        try:
            if file.stat().st_size > LIMIT_BYTES:
                raise ValueError(f"{file.stat().st_size:,} bytes, more than any adaptation file has")
            loaded = yaml.safe_load(file.read_text(encoding="utf-8"))
            _refuse_endless(loaded)
            form = loaded.get("format", FORMAT) if isinstance(loaded, dict) else FORMAT
            if form != FORMAT:
                raise ValueError(f"it is of format {form!r}, which another version writes; this one reads {FORMAT}")
            found = msgspec.convert(loaded, cls)
            if not found.model:
                raise ValueError("it names no model that was brought up")
            known = {name: found.engine[name] for name in found.engine if name in EngineOptions.__struct_fields__}
            msgspec.convert({"checkpoint": "", **known}, EngineOptions)
            return found
        except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
            raise Refused(
                fatal(
                    "not-found" if isinstance(error, FileNotFoundError) else "usage",
                    f"{file} cannot be used: {reason}",
                    file=str(file),
                    expected="an adaptation.yaml, as `firstlight export` and `firstlight up` write it",
                    found=str(reason),
                    next="correct --from",
                )
            ) from error

    @property
    def unknown(self) -> list[str]:
        """Options of the engine that this version does not have."""
        return [name for name in self.engine if name not in EngineOptions.__struct_fields__]

    def options(self, wanted: EngineOptions, given: frozenset[str]) -> EngineOptions:
        """`wanted` with what the file says of options that were not `given` on the command line."""
        changes: dict[str, Any] = {}
        defaults = EngineOptions(checkpoint="")
        for name, value in self.engine.items():
            if name in given or name in (*LEFT_TO_THIS_RUN, *LEFT_TO_THE_USER) or name in self.unknown:
                continue
            if getattr(wanted, name) == getattr(defaults, name):
                changes[name] = value
        merged = {**msgspec.to_builtins(wanted), **changes}
        return msgspec.convert(merged, EngineOptions)


def compare(adaptation: Adaptation, run: Run) -> Report:
    """What changed since the run that the file comes from: configuration, machine, figures. Nothing fails a run."""
    draft = Draft("adapt", f"{run.record.model} from {adaptation.model}")
    now = read_config(run.record.checkpoint)[1] if adaptation.config else {}
    changed = list(config_changes(adaptation.config, now))
    draft.check("the file can be compared with", bool(adaptation.figures), value=len(adaptation.figures), unit="rungs")
    draft.metric("config_changes", len(changed), "keys")
    if changed:
        draft.find(
            note(
                "config-changed",
                f"{several(len(changed), 'key of config.json differs', 'keys of config.json differ')} from the "
                "earlier release",
                file="config.json",
                found=", ".join(row["key"] for row in changed[:6]),
                next="look at each in the table `config`: which of them change the mathematics?",
            )
        )
    if adaptation.unknown:
        draft.find(
            warning(
                "usage",
                f"the file asks for {', '.join(adaptation.unknown)}, which this version does not know: left out",
                expected=", ".join(EngineOptions.__struct_fields__[1:]),
                found=", ".join(adaptation.unknown),
                next="see whether the same is asked by another name now",
            )
        )
    rows = list(_figures(adaptation, run))
    worse = [row for row in rows if row["verdict"] == "worse"]
    for row in worse:
        draft.find(
            warning(
                "regression",
                f"{row['rung']}: {row['figure']} is {row['worse_by']:.2f} times worse than before",
                expected=words.quantity(row["before"], row["unit"]),
                found=words.quantity(row["now"], row["unit"]),
                next="compare hardware, versions and operators of the two runs",
            )
        )
    draft.metric("regressions", len(worse), "figures")
    draft.table("config", changed)
    draft.table("machine", _machine(adaptation, run))
    draft.table("figures", rows)
    return draft.close()


def config_changes(before: Mapping[str, Any], now: Mapping[str, Any], at: str = "") -> Iterator[dict[str, Any]]:
    """Keys that differ, nested ones by their path."""
    before, now = ({RENAMED.get(key, key): value for key, value in one.items()} for one in (before, now))
    for key in dict.fromkeys((*before, *now)):
        one, other, path = before.get(key), now.get(key), f"{at}{key}"
        if key in SKIP or one == other:
            continue
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from config_changes(one, other, f"{path}.")
            continue
        yield {"key": path, "before": _short(one, key in before), "now": _short(other, key in now)}


def _refuse_endless(loaded: object) -> None:
    """Raises `ValueError` for a file whose references make much of little, or run in circles."""
    left, rest = MOST_VALUES, [loaded]
    while rest:
        value = rest.pop()
        inner = (*value, *value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ()
        left -= len(inner)
        if left < 0:
            raise ValueError(f"it stands for more than {MOST_VALUES:,} values")
        rest.extend(inner)


def _short(value: object, there: bool) -> str:
    text = repr(value) if there else "absent"
    return text if len(text) <= 80 else text[:77] + "..."


def _machine(adaptation: Adaptation, run: Run) -> Iterator[dict[str, Any]]:
    reports = run.reports()
    now = reports[-1].environment if reports else {}
    for name in ("cpu", "cores", "devices", "system", "commit"):
        yield {"what": name, "before": str(getattr(adaptation.environment, name)), "now": str(now.get(name, ""))}
    before, after = adaptation.environment.versions or {}, now.get("versions") or {}
    for name in dict.fromkeys((*before, *after)):
        if before.get(name) != after.get(name):
            yield {"what": name, "before": str(before.get(name, "absent")), "now": str(after.get(name, "absent"))}


def _figures(adaptation: Adaptation, run: Run) -> Iterator[dict[str, Any]]:
    last = {report.verb: report for report in run.reports()}
    for verb, figures in adaptation.figures.items():
        report = last.get(verb)
        for name, was in figures.items():
            metric = report.metrics.get(name) if report is not None else None
            if metric is None or metric.value is None:
                continue
            factor = worse_by(name, was.value, metric.value)
            yield {
                "rung": verb,
                "figure": name,
                "before": was.value,
                "now": metric.value,
                "unit": metric.unit,
                "worse_by": factor,
                "verdict": "equal" if was.value == metric.value else _verdict(factor),
            }


def _verdict(factor: float | None) -> str:
    if factor is None:
        return ""
    return "worse" if factor > WORSE else "better" if factor < 1 / WORSE else "alike"
