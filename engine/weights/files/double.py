"""Duplicate tensors: which copy is used when several shards hold one, and what is reported. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, named, several, warning
from firstlight.engine.weights.files.header import TensorInfo
from firstlight.engine.weights.sources.base import ByteSource

COMPARED_BYTES = 64 << 20  # of tensors that two shards hold
Where = tuple[str, str, bool, bool | None]  # both files, whether the index decides, whether copies are equal


def settled(
    tensors: Iterable[TensorInfo], index: Mapping[str, str], source: ByteSource
) -> tuple[dict[str, TensorInfo], list[Finding]]:
    """Chooses between two copies of a tensor by the index; if it does not list them, they must be equal.

    Copies are compared byte by byte, up to `COMPARED_BYTES` in total.
    """
    first: dict[str, TensorInfo] = {}
    copies: dict[Where, list[str]] = {}
    left_bytes = COMPARED_BYTES
    for tensor in tensors:
        earlier = first.setdefault(tensor.name, tensor)
        if earlier is tensor:
            continue
        chosen = index.get(tensor.name)
        same = None
        if (earlier.dtype, earlier.shape) != (tensor.dtype, tensor.shape):
            same = False
        elif tensor.nbytes <= left_bytes:
            left_bytes -= tensor.nbytes
            same = are_equal(source, earlier, tensor)
        if chosen == tensor.file:
            first[tensor.name] = tensor
        where = earlier.file, tensor.file, chosen in (tensor.file, earlier.file), same
        copies.setdefault(where, []).append(tensor.name)
    return first, [copies_finding(*where, names) for where, names in copies.items()]


def are_equal(source: ByteSource, one: TensorInfo, other: TensorInfo) -> bool | None:
    """Whether two stored tensors hold the same bytes; None if they cannot be read, which is reported elsewhere."""
    found = []
    for tensor in (one, other):
        data = bytearray(tensor.nbytes)
        try:
            opened = source.open(tensor.file)
            try:
                opened.read_into(tensor.offset_bytes, [memoryview(data)])
            finally:
                opened.close()
        except Refused:
            return None
        found.append(data)
    return found[0] == found[1]


def copies_finding(first: str, second: str, decided: bool, same: bool | None, names: Sequence[str]) -> Finding:
    """The finding for tensors that two files hold; `decided`: by the index."""
    contents = {True: "equal copies", False: "two that differ", None: "two, not compared"}[same]
    is_fine = decided or same is True
    what = (
        f"{names[0]} is"
        if len(names) == 1
        else f"{names[0]} and {several(len(names) - 1, 'tensor', 'tensors')} more are"
    )
    return msgspec.structs.replace(
        warning(
            "duplicate-tensor",
            f"{what} in {first} and in {second}, {contents}"
            + ("; the index says which is used" if decided else "; the first is used" if is_fine else ""),
            file=second,
            **named(names),
            expected="one copy",
            found=contents,
            next="delete the stale shard" + ("" if is_fine else ": which of them is meant is not guessed"),
        ),
        severity="warning" if is_fine else "fatal",
    )
