"""Tensors stored longer than their parameter: the tail is padding, and it is read to see that it is nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, fatal, note
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.naming import by_pattern, pattern_range


def padded_findings(checkpoint: Checkpoint, rows: dict[str, int]) -> Iterator[Finding]:
    """One finding a pattern of names; `rows`: tensor -> how many of it are its parameter. A tail of zeros is a note."""
    empty: list[str] = []
    full: list[str] = []
    for name, count in rows.items():
        try:
            (full if _has_more(checkpoint, name, count) else empty).append(name)
        except Refused as refused:
            yield from refused.findings
    yield from _say(checkpoint, empty, rows, is_zero=True)
    yield from _say(checkpoint, full, rows, is_zero=False)


def _has_more(checkpoint: Checkpoint, name: str, rows: int) -> bool:
    """Whether a byte behind the first rows is not zero; minus zero counts as a value, which no padding is."""
    info = checkpoint.tensors[name]
    start = info.nbytes // info.shape[0] * rows
    return any(checkpoint.read_bytes(name, start, info.nbytes - start))


def _say(checkpoint: Checkpoint, names: Iterable[str], rows: dict[str, int], is_zero: bool) -> Iterator[Finding]:
    kind = note if is_zero else fatal
    for pattern, group in by_pattern(names).items():
        info, first = checkpoint.tensors[group[0]], rows[group[0]]
        padding = f"rows {first} to {info.shape[0] - 1} of {info.shape[0]}"
        yield kind(
            "padded-tensor",
            f"{pattern_range(pattern, group)}: {padding} are "
            + ("padding, all zero, and are left out" if is_zero else "not zero, so they are not padding"),
            file=info.file,
            tensors=tuple(group),
            expected=f"{first} rows, or zeros behind them",
            found="zeros" if is_zero else "values",
            next="nothing to do"
            if is_zero
            else "config.json and weights belong to different releases, or heads are counted wrongly; fetch both again",
        )
