"""Golden files seldom say from where their reference counted the positions of rows with padding in front; see."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from firstlight.engine.findings import warning
from firstlight.engine.model.spec import LayerSpec
from firstlight.engine.serving.api import EngineLike
from firstlight.engine.serving.sight import Sight
from firstlight.engine.serving.trace import POSITIONS
from firstlight.workbench.cases import Case
from firstlight.workbench.golden import Golden
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
    return _without_padding(draft, engine, case)


def _without_padding(draft: Draft, engine: EngineLike, case: Case) -> Case:
    """The case without rows that are padded in front, where only those disagree and layers remember what they read.

    Some references let padding into recurrent states, convolutions, spans or blocks of keys (RecurrentGemma,
    DeepSeek-V4, MiniMax-M3, Mamba with biases): what follows it then depends on the padding, and no model that is
    served computes that. Here padding is never computed, so that rows with and without it take the same way.
    """
    golden, whole = case.golden, case.golden.mask[:, 0]
    if golden.pictures.keys() - {POSITIONS} or not any(_remembers(layer) for layer in case.spec.layers):
        return case
    rest = replace(case, golden=_rows(golden, whole)) if whole.any() else None
    if rest is not None and not agrees(engine, rest, rest.golden.pictures):
        return case
    rows = ", ".join(str(row) for row in np.flatnonzero(~whole))
    done = "only they disagree: left out" if rest else "they disagree, and there are no others"
    draft.find(
        warning(
            "bad-golden",
            f"rows {rows} are padded in front, and {done}; a reference whose layers remember what they read lets "
            "padding in, and its numbers behind it are not those of the text alone",
            file=golden.source,
            expected="states that do not depend on padding",
            found=f"{int((~whole).sum())} of {len(whole)} rows with padding in front",
            next="make the golden file with padding behind, or of rows of one length",
        )
    )
    return rest or case


def _remembers(layer: LayerSpec) -> bool:
    """Whether what a layer gives for a token depends on earlier ones beyond the keys that it sees."""
    return any(part.cache().states or getattr(part.mixer, "blocks", None) for part in layer.whole)


def _rows(golden: Golden, kept: NDArray[np.bool_]) -> Golden:
    return replace(
        golden,
        input_ids=golden.input_ids[kept],
        mask=golden.mask[kept],
        pictures={name: value[kept] for name, value in golden.pictures.items()},
        outputs={name: value[kept] for name, value in golden.outputs.items()},
    )
