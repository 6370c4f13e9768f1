"""One checkpoint through scan and verify, and the word for what came out."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path

from firstlight.engine.errors import Refused
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.serving.options import EngineOptions
from firstlight.workbench.fallback import use
from firstlight.workbench.report import Report
from firstlight.workbench.verify import verify


@dataclass(frozen=True, slots=True)
class Result:
    """`word`: native, fallback, refused, wrong or crashed; `error`: the largest relative deviation found."""

    word: str
    error: float | None = None
    why: str = ""
    said: tuple[str, ...] = ()


def tried(home: Path, golden: Path, mesh: Mesh | None = None) -> Result:
    """Verify `home` against `golden`; transformers' modules where no family is native."""
    name = use("auto", str(home))
    options = EngineOptions(checkpoint=str(home), mesh=mesh or Mesh(), fallback=name, threads=1)
    try:
        report = verify(options, golden)
    except Refused as refusal:
        return Result("refused", why=str(refusal).replace("\n", " ")[:300])
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the sweep looks for
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Result("crashed", why=f"{type(error).__name__}: {error} ({where.filename[-40:]}:{where.lineno})"[:300])
    return sorted_out(report)


def sorted_out(report: Report) -> Result:
    """The word for a report of verify, the largest deviation, and what it said."""
    values = [
        float(check.value) for check in report.checks if check.unit.startswith("of scale") and check.value is not None
    ]
    codes = tuple(
        f"{finding.code}: {finding.message[:80]}" for finding in report.findings if finding.severity != "note"
    )
    said = tuple(code for code in codes if not code.startswith("missing-side-file"))
    foreign = any(code.startswith("fallback") for code in codes)
    failed = [check for check in report.checks if check.status == "failed"]
    if report.status != "passed":
        why = "; ".join(f"{check.name} {check.value} {check.detail}" for check in failed[:3])[:300]
        return Result("wrong", max(values, default=None), why, said)
    return Result("fallback" if foreign else "native", max(values, default=None), said=said)
