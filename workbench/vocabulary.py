"""Every row of the token embedding, and of learned positions, against the reference: no layer runs for it.

Prompts use some hundred tokens of a vocabulary; a row that was taken from elsewhere shows when somebody uses it. The
output head needs none of this: each token's logits use all of its rows.

Legend: T tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from firstlight.engine.findings import Finding, fatal
from firstlight.engine.model.foreign import ForeignSpec
from firstlight.engine.model.spec import ModelSpec
from firstlight.engine.serving.api import EngineLike
from firstlight.engine.serving.trace import NO_LAYER, POSITIONS
from firstlight.workbench.cases import LEAST_LIMIT, Case
from firstlight.workbench.compare import EPSILON, SMALLEST_SHARE
from firstlight.workbench.probe_inputs import vocabulary_ends
from firstlight.workbench.report import Draft

if TYPE_CHECKING:
    from firstlight.workbench.streamed import AnyReference

CHECK = "embeddings"
VALUES = 1 << 28  # of rows that are compared; of a larger table some, evenly spread
CHUNK_VALUES = 1 << 21  # of rows that are compared at once: they stay in the processor's cache
CHUNK_TOKENS = 4096
ROUNDINGS = 4  # in narrow dtypes: of the row, its scale, its position and a norm


@dataclass(slots=True)
class _Apart:
    """What came out of the rows so far: how many differ, the first of them, and the largest deviation."""

    limit: float
    rows: int = 0
    wrong: int = 0
    first: int | None = None
    worst: float = 0.0
    least_scale: float = field(default=float(np.finfo(np.float32).tiny))

    def add(self, numbers_T: NDArray[np.int64], ours_TH: NDArray[Any], theirs_TH: NDArray[Any]) -> None:
        """Rows `numbers_T` as the engine and as the reference have them."""
        scale_T = np.maximum(theirs_TH.max(axis=1), -theirs_TH.min(axis=1))
        apart_TH = ours_TH - theirs_TH
        error_T = np.maximum(apart_TH.max(axis=1), -apart_TH.min(axis=1))
        self.least_scale = max(self.least_scale, SMALLEST_SHARE * float(scale_T.max()))
        relative_T = error_T / np.maximum(scale_T, self.least_scale)
        wrong_T = ~(relative_T <= self.limit)  # what is not finite is wrong
        self.rows += len(numbers_T)
        self.wrong += int(wrong_T.sum())
        if self.first is None and wrong_T.any():
            self.first = int(numbers_T[wrong_T][0])
        self.worst = max(self.worst, float(np.nan_to_num(relative_T, nan=np.inf).max()))


def judge_embeddings(draft: Draft, engine: EngineLike, cases: Sequence[Case], reference: AnyReference | None) -> None:
    """Write the check `embeddings`, how many tokens it covers, and the finding that names the first wrong row.

    Against a golden file nothing is known of tokens that are not in it: only their number is told.
    """
    case = cases[0]
    spec = case.spec
    if case.layers is not None and case.layers[0]:
        return
    used = np.unique(np.concatenate([one.golden.input_ids[one.golden.mask] for one in cases]))
    if reference is None or isinstance(spec, ForeignSpec):  # those are the reference's own
        words = f"of {spec.vocab_size:,}: embeddings of the others were not compared"
        draft.metric("token_embeddings", len(used), "tokens", words)
        return
    tokens = _chosen(spec)
    limit = min(case.limit, ROUNDINGS * EPSILON[case.dtype] if case.is_narrow else LEAST_LIMIT)
    found = _compared(engine, reference, tokens, np.zeros_like(tokens), tokens, spec, limit)
    covered = len(np.union1d(tokens, used))
    words = f"of {spec.vocab_size:,}" + ("" if covered == spec.vocab_size else ": the others were not compared")
    draft.metric("token_embeddings", covered, "tokens", words)
    _tell(draft, case, CHECK, "token", found)
    if spec.learned_positions:
        at = np.arange(spec.max_positions)
        one = np.full_like(at, tokens[0])
        found = _compared(engine, reference, one, at, at, spec, limit)
        _tell(draft, case, f"{CHECK} of positions", "position", found)


def _chosen(spec: ModelSpec) -> NDArray[np.int64]:
    """Tokens whose rows are compared: all, or of a large table some, with those where ranks divide it."""
    most = max(1, VALUES // spec.hidden)
    tokens = np.arange(spec.vocab_size)
    if len(tokens) > most:
        spread = np.linspace(0, spec.vocab_size - 1, most).astype(np.int64)
        tokens = np.union1d(spread, vocabulary_ends(spec.vocab_size))
    return tokens if spec.vision is None else tokens[tokens != spec.vision.image_token_id]


def _compared(
    engine: EngineLike,
    reference: AnyReference,
    ids_T: NDArray[np.int64],
    positions_T: NDArray[np.int64],
    numbers_T: NDArray[np.int64],
    spec: ModelSpec,
    limit: float,
) -> _Apart:
    """Tokens that stand alone, at these positions; `numbers_T` names them."""
    found = _Apart(limit)
    size = max(1, min(CHUNK_TOKENS, CHUNK_VALUES // spec.hidden))
    for start in range(0, len(ids_T), size):
        part = slice(start, start + size)
        at_T = positions_T[part]
        ours = engine.trace(ids_T[part][None], None, {POSITIONS: at_T[None]}, layers=NO_LAYER)["hidden.0"][0]
        theirs = reference.embed(ids_T[part], at_T if spec.learned_positions else None)
        found.add(numbers_T[part], ours, theirs)
    return found


def _tell(draft: Draft, case: Case, check: str, what: str, found: _Apart) -> None:
    words = f"{found.rows:,} {what}s, each by itself"
    if found.wrong:
        words += f"; {found.wrong:,} differ, first {what} {found.first}"
    passed = not found.wrong
    draft.check(check, passed, value=found.worst, limit=found.limit, unit="of scale", detail=words)
    if not passed:
        draft.find(_wrong(case, what, found))


def _wrong(case: Case, what: str, found: _Apart) -> Finding:
    return fatal(
        "wrong-numbers",
        f"{found.wrong:,} of {found.rows:,} {what}s enter the decoder as something else than in the reference, first "
        f"{what} {found.first}",
        file=case.golden.source,
        tensors=("hidden.0",),
        expected=f"within {found.limit:.1e} of scale",
        found=f"{found.worst:.2e} of scale",
        next="look at the rules of the token embedding, and at how its rows are divided over ranks",
    )
