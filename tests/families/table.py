"""The README of the families, from the results of tests: `python -m tests.families.table results.xml [more.xml ...]`.

`results.xml` is what `pytest --junitxml` writes. A family without a result is listed as not verified by any test here.
"""

from __future__ import annotations

import importlib
import platform
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import msgspec

from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.registry import HOMES
from tests.families.verified import Verified

FOLDER = Path(__file__).parents[2] / "engine/model/families"
README = FOLDER / "README.md"
AXES = ("tp", "pp", "ep")
HEAD = """# Families

One file a family: `spec(config)` says what the layers are, `RULES` which tensor fills which parameter. What families
share is in `common.py`, `mixtures.py` and `vision_common.py`; those that differ by a number or a flag share a file.

Each is held layer by layer, in float32, against transformers {transformers}, Kimi K3 against the plain implementation
in `tests/reference`, on tiny random checkpoints in which every parameter matters. *Error* is the largest difference of
any layer or of the logits on one rank, relative to the largest value of the reference. *Axes* are those along which
several ranks gave what one rank gives; *steps*: a prompt in chunks and single steps gave what one pass gives. *Formats*
are those in which these checkpoints store matrices; every family reads all formats (`tests/engine/weights`). Model
types in `this type` were tried under that name, others are read by the same lines. The table is written by
`make families` from the results of the tests and by nothing else: {date}, {python} on {machine}, torch {torch}.

| family | model types | text | pictures | axes | steps | formats | error | lines |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""
FOOT = """
What none of them knows runs in the reference's own modules on one rank, and is called a fallback wherever it shows
(`--fallback never` forbids it).
"""


def read(results: Iterable[Path]) -> Iterator[Verified]:
    """The comparisons in these results whose tests passed."""
    for path in results:
        for case in ET.parse(path).iter("testcase"):
            if any(case.find(kind) is not None for kind in ("failure", "error", "skipped")):
                continue
            for one in case.iter("property"):
                if one.get("name") == "verified":
                    yield msgspec.json.decode(one.get("value") or "", type=Verified)


def family(module: str) -> Family:
    found: Family = importlib.import_module(f"firstlight.engine.model.families.{module}").FAMILY
    return found


def row(module: str, found: Iterable[Verified]) -> str:
    """One line of the table."""
    known = family(module).model_types
    mine = [one for one in found if one.model_type in known]
    whats = {one.what for one in mine}
    errors = [one.error for one in mine if one.error is not None and one.what in ("text", "image")]
    axes = [axis for axis in AXES if any(part.startswith(axis) for what in whats for part in what.split())]
    seen = {one.model_type for one in mine}
    types = ", ".join(f"`{one}`" if one in seen else f"{one}" for one in known)
    cells = (
        f"[{module}]({module}.py)",
        types,
        "yes" if "text" in whats else "",
        "yes" if "image" in whats else "",
        ", ".join(axes),
        "yes" if "steps" in whats else "",
        ", ".join(sorted({name for one in mine for name in one.formats})),
        f"{max(errors):.0e}" if errors else "not verified here",
        str(len((FOLDER / f"{module}.py").read_text().splitlines())),
    )
    return f"| {' | '.join(cells)} |"


def table(found: Iterable[Verified]) -> str:
    """The whole file."""
    found = list(found)
    head = HEAD.format(
        transformers=version("transformers"),
        torch=version("torch"),
        python=f"Python {platform.python_version()}",
        machine=platform.machine(),
        date=datetime.now(tz=UTC).date().isoformat(),
    )
    return head + "\n".join(row(module, found) for module in HOMES) + "\n" + FOOT


if __name__ == "__main__":
    README.write_text(table(read(map(Path, sys.argv[1:]))))
