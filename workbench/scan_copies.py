"""Layers and experts that hold the bytes of others: a shard written twice under other names. No torch."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from firstlight.engine.findings import Finding, several, warning
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.names.patterns import parted
from firstlight.workbench.deep import TensorReading
from firstlight.workbench.outliers import WEIGHTS

LEAST_BYTES = 64  # shorter tensors may be equal by chance
PERIOD_BYTES = 8  # of one value again and again, whatever its dtype
LOOKED_AT_BYTES = 1 << 16
MOST = 16  # pairs that have a finding each
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|\Z)")
Pair = tuple[str, str]  # what holds the bytes first, and what holds them again


def copies(readings: Iterable[TensorReading], checkpoint: Checkpoint) -> Iterator[Finding]:
    """A warning for each layer, or expert of a layer, that has weights which are another's byte for byte.

    Compared are matrices of one name but for its numbers. Equal by right are norms, biases and tables, weights of zeros
    or of any one value, and what is stored once and named twice by the architecture (tied heads have other names).
    """
    weights = [reading for reading in readings if _is_weight(reading, checkpoint)]
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for reading in weights:
        alike[parted(reading.tensor)[0], reading.sha256].append(reading.tensor)
    pairs: dict[Pair, list[str]] = defaultdict(list)
    for names in alike.values():
        first, *others = sorted(names, key=lambda name: parted(name)[1])
        if others and not _is_one_value(checkpoint, first):
            for name in others:
                pairs[_owners(first, name)].append(name)
    yield from _said(pairs, [reading.tensor for reading in weights])


def _is_weight(reading: TensorReading, checkpoint: Checkpoint) -> bool:
    """Whether it is a matrix that training makes: no norm, and not all zero."""
    name, tensor = reading.tensor, checkpoint.tensors[reading.tensor]
    is_matrix = len(tensor.shape) > 1 and tensor.nbytes >= LEAST_BYTES
    return is_matrix and name.endswith(WEIGHTS) and "norm" not in name and reading.rms != 0


def _is_one_value(checkpoint: Checkpoint, name: str) -> bool:
    """Whether the first bytes of a tensor are one value again and again."""
    start = checkpoint.read_bytes(name, 0, min(LOOKED_AT_BYTES, checkpoint.tensors[name].nbytes))
    return start[PERIOD_BYTES:] == start[:-PERIOD_BYTES]


def _owners(first: str, other: str) -> Pair:
    """What two tensors belong to, up to the first number in which they differ: layers, or experts of one layer."""
    numbers = zip(_NUMBER.finditer(first), _NUMBER.finditer(other), strict=True)
    one, two = next((one, two) for one, two in numbers if one[0] != two[0])
    return first[: one.end()], other[: two.end()]


def _said(pairs: dict[Pair, list[str]], weights: Sequence[str]) -> Iterator[Finding]:
    counts = Counter(owner for owner in {pair[1] for pair in pairs} for name in weights if name.startswith(f"{owner}."))
    shown = list(pairs.items())
    for (first, other), names in shown[:MOST]:
        yield _finding(f"{other} holds", names, f"{len(names):,} of its {counts[other]:,} weights", first)
    rest = list(chain.from_iterable(names for _, names in shown[MOST:]))
    if rest:
        others = several(len(shown) - MOST, "more holds", "more hold")
        yield _finding(others, rest, several(len(rest), "weight", "weights"), f"others, as {shown[MOST][0][1]} does")


def _finding(who: str, names: Sequence[str], what: str, whose: str) -> Finding:
    return warning(
        "equal-layers",
        f"{who} the bytes of {whose}: {what}",
        tensors=tuple(names),
        expected="weights of its own",
        found=f"byte for byte those of {whose}",
        next="compare hashes with another copy (scan --against): a shard may have been written twice under other "
        "names; layers that were doubled on purpose look the same",
    )
