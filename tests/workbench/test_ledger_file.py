"""The ledger of a run on disk: every tensor and every gap once, found by name and by verdict, a page at a time."""

from collections.abc import Callable
from pathlib import Path

from firstlight.workbench.ledger_file import LedgerFile
from firstlight.workbench.scan import scan


def test_a_scan_keeps_the_whole_ledger(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    report = scan(checkpoint("deepseek_v3"), keep=tmp_path)
    file = LedgerFile.of(tmp_path)
    total, rows = file.page("", "", 0, 10_000)
    assert total == len(rows) == report.value("tensors")
    assert len({row["tensor"] for row in rows}) == total
    assert sum(row["total_bytes"] for row in rows) == report.value("checkpoint_bytes")
    assert {row["verdict"] for row in rows} <= {"consumed", "left out"}
    (head,) = [row for row in rows if row["tensor"] == "lm_head.weight"]
    assert (head["verdict"], head["goes_to"]) == ("consumed", "head.weight")


def test_pages_searches_and_verdicts(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    scan(checkpoint("deepseek_v3"), keep=tmp_path)
    file = LedgerFile.of(tmp_path)
    total, everything = file.page("", "", 0, 10_000)
    _, second = file.page("", "", 5, 5)
    assert second == everything[5:10]
    found, rows = file.page("router", "", 0, 100)
    assert 0 < found == len(rows) < total, "a parameter's name is found too"
    assert all("router" in row["goes_to"] for row in rows)
    assert file.page("no such name", "", 0, 10) == (0, [])
    assert file.page("", "missing", 0, 10) == (0, [])
    assert file.page("'; drop table rows; --", "", 0, 10) == (0, [])
    assert not LedgerFile.of(tmp_path / "absent").exists
