"""Padding that must be zero: tensors longer than their parameter, and unused biases beside quantized codes.

The tail of a longer tensor is padding, and it is read to see whether it is anything else; so is such a bias.

Rows of a vocabulary behind `vocab_size` are never loaded: no token has them. A few may hold values, as what a
training run leaves there; many that do are a sign of another release's configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, fatal, note, warning
from firstlight.engine.model.spec import Param
from firstlight.engine.parallel.placement import Vocab
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.formats.grid import Packed
from firstlight.engine.weights.names.naming import by_pattern, pattern_range


def has_more_rows(param: Param) -> bool:
    """Whether releases may store more rows than there are: those of a vocabulary, for sizes that divide well."""
    return any(isinstance(place, Vocab) for place in param.placements)


def is_rounded(rows: int, stored: int) -> bool:
    """Whether a vocabulary was made longer to divide well: to a multiple of a power of two, or by an eighth at most."""
    more = stored - rows
    return more < (stored & -stored) or more * 8 <= rows


def padded_findings(
    checkpoint: Checkpoint, padded: Mapping[str, Param], packed: Mapping[str, Packed]
) -> Iterator[Finding]:
    """One finding a pattern of names; `padded`: tensor -> the parameter that its first rows are.

    A tail of zeros is a note, one of values a warning where a vocabulary was rounded up, and fatal elsewhere. Of a
    weight in codes, those in `packed` by their first tensor, rows behind are not looked at: they count as values.
    """
    found: dict[str, list[str]] = {"zero": [], "values": [], "codes": []}
    for name, param in padded.items():
        try:
            if name in packed:
                found["codes"].append(name)
            else:
                found["values" if _has_more(checkpoint, name, param.shape[0]) else "zero"].append(name)
        except Refused as refused:
            yield from refused.findings
    for tail, names in found.items():
        for pattern, group in by_pattern(names).items():
            first = packed.get(group[0])
            shape = checkpoint.tensors[group[0]].shape if first is None else first.shape
            yield _said(checkpoint, pattern, group, padded[group[0]], shape, tail)


def is_zero_bias(checkpoint: Checkpoint, name: str) -> bool:
    """Whether a tensor is the bias of a weight in words (`qweight`) and all zero. Raises `Refused`."""
    module, _, last = name.rpartition(".")
    is_bias = last == "bias" and f"{module}.qweight" in checkpoint.tensors
    return is_bias and not any(checkpoint.read_bytes(name))


def _has_more(checkpoint: Checkpoint, name: str, rows: int, step_bytes: int = 8 << 20) -> bool:
    """Whether a byte behind the first rows is not zero; minus zero counts as a value, which no padding is."""
    info = checkpoint.tensors[name]
    begin = info.nbytes // info.shape[0] * rows
    return any(
        any(checkpoint.read_bytes(name, start, min(step_bytes, info.nbytes - start)))
        for start in range(begin, info.nbytes, step_bytes)
    )


def _said(
    checkpoint: Checkpoint, pattern: str, group: list[str], param: Param, stored: tuple[int, ...], tail: str
) -> Finding:
    """`stored`: the shape of the weight as it is stored; `tail`: what is behind the first rows."""
    first, of_vocabulary = param.shape[0], has_more_rows(param)
    padding = f"rows {first} to {stored[0] - 1} of {stored[0]}"
    is_fine = tail == "zero" or (of_vocabulary and is_rounded(first, stored[0]))
    kind = note if tail == "zero" or (is_fine and tail == "codes") else warning if is_fine else fatal
    if tail == "zero":
        what, way = "are padding, all zero, and are left out", "nothing to do"
    elif is_fine:
        holds = "hold values" if tail == "values" else "are stored in codes"
        what = f"{holds}, but no token has them: vocab_size is {first}; they are left out"
        way = "nothing, if the tokenizer has no such ids; if it has, config.json is of another release"
    else:
        what = "are not zero, so they are not padding" if tail == "values" else "are more than padding has"
        counted = "vocab_size is" if of_vocabulary else "heads are counted"
        way = f"config.json and weights belong to different releases, or {counted} wrong; fetch both again"
    is_other = of_vocabulary and not is_fine
    return kind(
        "shape-mismatch" if is_other else "padded-tensor",
        f"{pattern_range(pattern, group)}: {padding} {what}",
        file=checkpoint.tensors[group[0]].file,
        tensors=tuple(group),
        expected=str(list(param.shape)) if is_other else f"{first} rows, or zeros behind them",
        found=str(list(stored)) if is_other else "zeros" if tail == "zero" else tail,
        next=way,
    )
