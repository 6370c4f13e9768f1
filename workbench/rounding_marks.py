"""Golden files do not say in which precision their reference computed; where the numbers show it, see."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from firstlight.engine.findings import Finding, note, warning
from firstlight.engine.serving.api import EngineLike
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.workbench.cases import Case
from firstlight.workbench.golden import Golden
from firstlight.workbench.picture_marks import agrees
from firstlight.workbench.report import Draft

# Tables that follow from the configuration, and which the reference reads as the checkpoint stores them.
TABLES = re.compile(r"\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)$")
STEPS = {"BF16": 2.0**-8, "F16": 2.0**-11}  # the largest relative error of one rounding
FACTOR = 4  # roundings of a table that a token's result may be off by


def on_narrow_reference(case: Case) -> tuple[Finding, ...]:
    """That the reference of a golden file computed in a narrow dtype: float32 cannot be held to it within the limit.

    Every value of such a reference is one of that dtype; in float32 hardly any is.
    """
    dtype = narrow_dtype(case.golden)
    if dtype is None or case.is_narrow:
        return ()
    return (
        warning(
            "bad-golden",
            f"the reference computed in {dtype}: each of its numbers is one of that dtype, and rounded to it",
            file=case.golden.source,
            expected=f"a reference that computes in float32, to compare within {case.limit:g}",
            found=f"numbers of {dtype}, which differ from float32 by more than that",
            next="make the golden file with dtype=torch.float32, or say what is near enough with --limit",
        ),
    )


def narrow_dtype(golden: Golden) -> str | None:
    """BF16 or F16 where all outputs behind the embedding are numbers of that dtype; the embedding is as stored."""
    found = [
        value[golden.mask] if value.shape[:2] == golden.mask.shape else value
        for name, value in golden.outputs.items()
        if name not in ("hidden.0", "generated", "image_features")
    ]
    if not found:
        return None
    return next((dtype for dtype in STEPS if all(_holds(dtype, value) for value in found)), None)


def _holds(dtype: str, values: NDArray[np.float32]) -> bool:
    if dtype == "BF16":
        return not (np.ascontiguousarray(values).view(np.uint32) & 0xFFFF).any()
    with np.errstate(over="ignore"):
        return bool((values.astype(np.float16).astype(np.float32) == values).all())


def as_stored(draft: Draft, engine: EngineLike, case: Case, tables: dict[str, str]) -> Case:
    """The case held within the rounding of `tables` (`rounded_tables`), where it passes in no other way."""
    if not tables or case.is_narrow or agrees(engine, case, case.golden.pictures):
        return case
    dtype = next(iter(tables.values()))
    limit = max(case.limit, FACTOR * STEPS[dtype])
    draft.find(
        warning(
            "bad-golden",
            f"the reference's decay tables are rounded to {dtype}, as the checkpoint stores them; held within that",
            file=case.golden.source,
            tensors=tuple(tables),
            expected=f"tables in float32, to compare within {case.limit:g}",
            found=f"{dtype}, compared within {limit:g}",
            next="make the golden file with the tables computed anew, or store them in float32",
        )
    )
    return replace(case, dtype=dtype, limit=limit)


def rounded_tables(checkpoint: Checkpoint) -> dict[str, str]:
    """Tables of fixed decays that are stored in a narrow dtype: name -> dtype."""
    return {
        name: tensor.dtype
        for name, tensor in checkpoint.tensors.items()
        if tensor.dtype in STEPS and TABLES.search(name)
    }


def on_rounded_tables(tables: dict[str, str]) -> tuple[Finding, ...]:
    """That such tables are not used, and what the difference is."""
    if not tables:
        return ()
    dtype = next(iter(tables.values()))
    return (
        note(
            "dtype-mismatch",
            f"tables of fixed decays are stored in {dtype}; they are computed from the configuration, in float32",
            tensors=tuple(tables),
            expected="float32: a decay is multiplied with itself at every token",
            found=f"{dtype}, off by up to {STEPS[dtype]:.1e} of each value; the reference uses them so",
            next="nothing: against transformers both sides compute them anew",
        ),
    )
