"""Tensors stored longer than their parameter: the tail is padding, and it is read to see whether it is anything else.

Rows of a vocabulary behind `vocab_size` are never loaded: no token has them. A few may hold values, as what a
training run leaves there; many that do are a sign of another release's configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, fatal, note, warning
from firstlight.engine.model.spec import Param
from firstlight.engine.parallel.placement import Vocab
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.naming import by_pattern, pattern_range


def has_more_rows(param: Param) -> bool:
    """Whether releases may store more rows than there are: those of a vocabulary, for sizes that divide well."""
    return any(isinstance(place, Vocab) for place in param.placements)


def is_rounded(rows: int, stored: int) -> bool:
    """Whether a vocabulary was made longer to divide well: to a multiple of a power of two, or by an eighth at most."""
    more = stored - rows
    return more < (stored & -stored) or more * 8 <= rows


def padded_findings(checkpoint: Checkpoint, padded: Mapping[str, Param]) -> Iterator[Finding]:
    """One finding a pattern of names; `padded`: tensor -> the parameter that its first rows are.

    A tail of zeros is a note, one of values a warning where a vocabulary was rounded up, and fatal elsewhere.
    """
    empty: list[str] = []
    full: list[str] = []
    for name, param in padded.items():
        try:
            (full if _has_more(checkpoint, name, param.shape[0]) else empty).append(name)
        except Refused as refused:
            yield from refused.findings
    yield from _say(checkpoint, empty, padded, is_zero=True)
    yield from _say(checkpoint, full, padded, is_zero=False)


def _has_more(checkpoint: Checkpoint, name: str, rows: int, step_bytes: int = 8 << 20) -> bool:
    """Whether a byte behind the first rows is not zero; minus zero counts as a value, which no padding is."""
    info = checkpoint.tensors[name]
    begin = info.nbytes // info.shape[0] * rows
    return any(
        any(checkpoint.read_bytes(name, start, min(step_bytes, info.nbytes - start)))
        for start in range(begin, info.nbytes, step_bytes)
    )


def _say(checkpoint: Checkpoint, names: Iterable[str], padded: Mapping[str, Param], is_zero: bool) -> Iterator[Finding]:
    for pattern, group in by_pattern(names).items():
        info, param = checkpoint.tensors[group[0]], padded[group[0]]
        first, of_vocabulary = param.shape[0], has_more_rows(param)
        padding = f"rows {first} to {info.shape[0] - 1} of {info.shape[0]}"
        is_fine = is_zero or (of_vocabulary and is_rounded(first, info.shape[0]))
        kind = note if is_zero else warning if is_fine else fatal
        if is_zero:
            what, way = "are padding, all zero, and are left out", "nothing to do"
        elif is_fine:
            what = f"hold values, but no token has them: vocab_size is {first}; they are left out"
            way = "nothing, if the tokenizer has no such ids; if it has, config.json is of another release"
        else:
            what = "are not zero, so they are not padding"
            counted = "vocab_size is" if of_vocabulary else "heads are counted"
            way = f"config.json and weights belong to different releases, or {counted} wrong; fetch both again"
        is_other = of_vocabulary and not is_fine
        yield kind(
            "shape-mismatch" if is_other else "padded-tensor",
            f"{pattern_range(pattern, group)}: {padding} {what}",
            file=info.file,
            tensors=tuple(group),
            expected=str(list(param.shape)) if is_other else f"{first} rows, or zeros behind them",
            found=str(list(info.shape)) if is_other else "zeros" if is_zero else "values",
            next=way,
        )
