"""Golden files seldom say from where their reference counted the positions of rows with padding in front; see."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from firstlight.engine.findings import warning
from firstlight.engine.serving.api import EngineLike
from firstlight.engine.serving.sight import Sight
from firstlight.engine.serving.trace import POSITIONS
from firstlight.workbench.cases import Case
from firstlight.workbench.picture_marks import agrees
from firstlight.workbench.report import Draft


def as_counted(draft: Draft, engine: EngineLike, case: Case) -> Case:
    """The case with positions counted as its reference counted them.

    Told nothing, transformers counts the columns of a batch, padding included; when it generates, and when it is
    served, it counts tokens. Where positions are learned, or tell more than distances, the two differ. A golden file
    without `position_ids` is held against what it agrees with; the report says so if that is not the count of tokens.
    """
    golden = case.golden
    is_padded_in_front = bool((~golden.mask[:, 0]).any())
    by_grid = bool(golden.pictures) and Sight.of(case.spec).grid  # found from the prompt, whatever is in front of it
    if not is_padded_in_front or by_grid or POSITIONS in golden.pictures or agrees(engine, case, golden.pictures):
        return case
    columns = np.broadcast_to(np.arange(golden.mask.shape[1]), golden.mask.shape)
    tokens = np.maximum(golden.mask.cumsum(axis=1) - 1, 0)
    for counted, what in ((columns, "columns, padding included"), (tokens, "tokens")):
        given = {**golden.pictures, POSITIONS: np.ascontiguousarray(counted, dtype=np.int64)}
        if not agrees(engine, case, given):
            continue
        draft.find(
            warning(
                "bad-golden",
                f"the reference counted positions by {what}, in rows that are padded in front; held against the same",
                file=golden.source,
                expected="position_ids that count a row's tokens from 0, as when the model is served",
                found=f"states as with {what} counted",
                next="give the reference position_ids, or pad behind",
            )
        )
        return replace(case, golden=replace(golden, pictures=given))
    return case
