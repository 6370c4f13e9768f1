"""Golden files do not say whether their reference was told which tokens are of pictures; where that matters, see."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from firstlight.engine.findings import warning
from firstlight.engine.serving.api import EngineLike
from firstlight.engine.serving.sight import Sight
from firstlight.workbench.cases import Case
from firstlight.workbench.golden import Arrays
from firstlight.workbench.report import Draft


def as_made(draft: Draft, engine: EngineLike, case: Case) -> Case:
    """The case as its reference was run: told which tokens are of pictures, or not.

    transformers lets the tokens of a picture see each other, and places them by its grid, only if it is given the
    `token_type_ids` or `mm_token_type_ids` of the vendor's processor; without, some models take pictures for text and
    say nothing. A golden file made so is held against the same and the report says so.
    """
    golden, sight = case.golden, Sight.of(case.spec)
    if not golden.pictures or not (sight.whole or sight.grid):
        return case
    unmarked = {**golden.pictures, "token_type_ids": np.zeros_like(golden.input_ids)}
    if agrees(engine, case, golden.pictures) or not agrees(engine, case, unmarked):
        return case
    draft.find(
        warning(
            "bad-golden",
            "the reference was not told which tokens are of pictures, and treated them as text; this model is trained "
            "and served with that",
            file=golden.source,
            expected="a reference that is given token_type_ids or mm_token_type_ids, 1 at the tokens of pictures",
            found="states as without these; held against a run without them",
            next="make the golden file from all tensors of the vendor's processor",
        )
    )
    return replace(case, golden=replace(golden, pictures=unmarked))


def agrees(engine: EngineLike, case: Case, pictures: Arrays) -> bool:
    """Whether a run with these tensors beside the tokens gives the golden file's states."""
    golden = case.golden
    found = engine.trace(golden.input_ids, golden.mask.astype(np.int64), pictures, layers=case.layers)
    names = [name for name in golden.outputs if name in found and name != "image_features"]
    return all(case.passes(name, case.apart(name, found[name])) for name in names)
