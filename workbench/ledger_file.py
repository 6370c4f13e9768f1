"""The ledger of a run as a table on disk: half a million rows are written once and read a page at a time.

`ledger.sqlite` in the run directory has a row a tensor (where it went) and a row a parameter without a tensor.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from firstlight.engine.weights.accounts.lots import Consumed
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.ledger import Ledger

FILE = "ledger.sqlite"
COLUMNS = ("tensor", "file", "dtype", "shape", "total_bytes", "verdict", "goes_to")
Verdict = Literal["consumed", "left out", "unconsumed", "missing"]


class LedgerFile:
    """The ledger file of one run directory; it need not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, directory: str | os.PathLike[str]) -> LedgerFile:
        return cls(Path(directory) / FILE)

    @property
    def exists(self) -> bool:
        return self.path.is_file()

    def write(self, checkpoint: Checkpoint, ledger: Ledger) -> None:
        """Writes all rows beside the place, then moves the file there."""
        draft = self.path.with_name(f".{self.path.name}")
        draft.unlink(missing_ok=True)
        connection = sqlite3.connect(draft)
        try:
            connection.execute("pragma journal_mode = off")
            connection.execute("pragma synchronous = off")
            connection.execute(
                "create table rows (id integer primary key, tensor text, file text, dtype text, shape text,"
                " total_bytes integer, verdict text, goes_to text)"
            )
            marks = ", ".join("?" * len(COLUMNS))
            connection.executemany(
                f"insert into rows ({', '.join(COLUMNS)}) values ({marks})", _rows(checkpoint, ledger)
            )
            connection.execute("create index by_verdict on rows (verdict)")
            connection.commit()
        finally:
            connection.close()
        draft.replace(self.path)

    def page(self, search: str, verdict: str, first: int, count: int) -> tuple[int, list[dict[str, Any]]]:
        """(how many rows there are, `count` of them from `first`) that hold `search` and have the verdict, if given."""
        conditions, values = [], []
        if search:
            conditions.append("(instr(tensor, ?) or instr(goes_to, ?))")
            values += [search, search]
        if verdict:
            conditions.append("verdict = ?")
            values.append(verdict)
        where = f" where {' and '.join(conditions)}" if conditions else ""
        connection = sqlite3.connect(f"{self.path.resolve().as_uri()}?mode=ro", uri=True)
        try:
            total = connection.execute(f"select count(*) from rows{where}", values).fetchone()[0]
            query = f"select {', '.join(COLUMNS)} from rows{where} order by id limit ? offset ?"
            rows = connection.execute(query, [*values, count, first]).fetchall()
        finally:
            connection.close()
        return total, [dict(zip(COLUMNS, row, strict=True)) for row in rows]


def _rows(checkpoint: Checkpoint, ledger: Ledger) -> Iterator[tuple[object, ...]]:
    of_lots = ledger.consumed.of_lots() if isinstance(ledger.consumed, Consumed) else {}
    for info in checkpoint.tensors.values():
        name = info.name
        verdict: Verdict
        if name in of_lots:
            verdict, goes_to = "consumed", of_lots[name]
        elif name in ledger.consumed:
            verdict, goes_to = "consumed", ", ".join(ledger.consumed[name][:8])
            left = len(ledger.consumed[name]) - 8
            goes_to += f" and {left} more" if left > 0 else ""
        elif name in ledger.left_out:
            verdict, goes_to = "left out", ledger.left_out[name]
        else:
            verdict, goes_to = "unconsumed", ""
        shape = " x ".join(map(str, info.shape)) or "scalar"
        yield name, info.file, info.dtype, shape, info.nbytes, verdict, goes_to
    for name in ledger.missing:
        yield "", "", "", "", None, "missing", name
