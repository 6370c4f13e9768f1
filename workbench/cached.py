"""Tokens as requests get them, against the same tokens in one piece.

A trace, which is held against the reference, computes a row at once, over a cache of its own. Requests take other ways:
prompts come in chunks, answers token by token over keys and states that are kept, beside rows of other lengths, in
pages and slots that were another's before. What they get is held against a trace of prompt and answer together.

Legend: B rows, S steps, K likeliest tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from firstlight.engine.errors import FirstlightError, Refused
from firstlight.engine.findings import Finding, fatal
from firstlight.engine.model.foreign import ForeignSpec
from firstlight.engine.model.spec import ModelSpec
from firstlight.engine.serving.api import EngineLike
from firstlight.engine.serving.trace import POSITIONS, PROMPTS
from firstlight.workbench.cases import Case, chooses_keys
from firstlight.workbench.compare import Deviation, log_softmax, of_errors, unequal
from firstlight.workbench.golden import PICTURE_NAMES, Arrays
from firstlight.workbench.report import Draft

CHECK = "cached"
START = 2  # tokens of a row that is as short as rows are
MOST_ALIKE = 0.9  # of the steps, where keys are chosen: a rounding may choose another of two that score nearly alike


@dataclass(frozen=True, slots=True)
class Cached:
    """How far served answers are from the trace: every step of every row, `steps` of each, one row behind another.

    `lost_R`: how much likelier another token was than the one that was chosen, of the same scale.
    """

    found: Deviation
    steps: int
    rows: tuple[NDArray[np.int64], ...]
    lost_R: NDArray[np.float64]

    def place(self) -> tuple[int, int]:
        """Row and step of the largest deviation."""
        return divmod(self.found.row, self.steps)


def judge_cached(draft: Draft, engine: EngineLike, case: Case) -> Finding | None:
    """Write the check `cached`; the finding that says which way is wrong, if one is. None where nothing is served."""
    if not case.served or POSITIONS in case.golden.pictures or _is_foreign_with_pictures(case):
        return None
    rows = _rows(case)
    if stretches(case.spec, case.golden.longest + case.served):  # keys of later steps are rotated for another length
        if case.golden.pictures:
            return None
        rows, case = (max(rows, key=len),), replace(case, served=1)
    limit = case.limit_for("logits")
    try:
        cached = _compared(engine, case, rows, case.golden.pictures)
    except Refused:
        raise
    except FirstlightError as error:
        draft.check(case.prefix + CHECK, False, limit=limit, unit="of scale", detail=str(error))
        return fatal(
            "engine-failed",
            f"requests could not be served: {error}",
            file=case.golden.source,
            expected="an answer to every row",
            found=type(error).__name__,
            next="look at what requests share: pages, slots, steps; every block alone is right where the checks pass",
        )
    found, (row, step) = cached.found, cached.place()
    words = found.broken or f"{len(cached.rows)} rows, {cached.steps} tokens each, farthest at row {row}, token {step}"
    passed = case.passes("logits", found)
    if not passed and not found.broken and chooses_keys(case.spec):
        at_limit = int((found.relative_R <= limit).sum())
        passed = at_limit >= MOST_ALIKE * len(found.relative_R)
        words += f"; {at_limit} of {len(found.relative_R)} within the limit, others chose among keys that score alike"
    draft.check(case.prefix + CHECK, passed, value=case.measure(found), limit=limit, unit="of scale", detail=words)
    return None if passed else _fault(engine, case, cached)


def _rows(case: Case) -> tuple[NDArray[np.int64], ...]:
    """The real tokens of every row; of text also half of the longest, and its start, which wait for another's place.

    What a place still holds of the row before is forgotten over a long prompt, and shows behind a short one.
    """
    golden = case.golden
    rows = [ids[real] for ids, real in zip(golden.input_ids, golden.mask, strict=True)]
    if not golden.pictures.keys() & PICTURE_NAMES:
        longest = max(rows, key=len)
        rows += [longest[: -(-len(longest) // 2)], longest[:START]]
    return tuple(rows)


def _compared(engine: EngineLike, case: Case, rows: tuple[NDArray[np.int64], ...], pictures: Arrays) -> Cached:
    last = case.spec.num_layers
    served = engine.trace(*_padded(rows), pictures, layers=(last - 1, last), steps=case.served)
    steps = _steps(case.spec, served["generated"])
    chosen_BS, likeliest_BSK = served["generated"][:, :steps], served["generated.likeliest"][:, :steps]
    given_BSK = served["generated.logprobs"][:, :steps].astype(np.float64)
    whole = [np.concatenate((row, answer[:-1])) for row, answer in zip(rows, chosen_BS, strict=True)]
    given = {**pictures, PROMPTS: np.array([len(row) for row in rows])} if chooses_keys(case.spec) else pictures
    logits_BTV = engine.trace(*_padded(whole), given, layers=(last - 1, last))["logits"]
    logits_BSV = np.stack([logits_BTV[b, len(row) - 1 :][:steps] for b, row in enumerate(rows)])
    if not (np.isfinite(given_BSK).all() and np.isfinite(logits_BSV).all()):
        broken = unequal(chosen_BS.size, "numbers that are not finite")
        return Cached(broken, steps, rows, np.zeros(chosen_BS.size))
    flat_RV = logits_BSV.reshape(-1, logits_BSV.shape[-1]).astype(np.float64)
    expected_RK = np.take_along_axis(log_softmax(flat_RV), likeliest_BSK.reshape(len(flat_RV), -1), axis=1)
    apart_RK = np.abs(given_BSK.reshape(expected_RK.shape) - expected_RK)
    lost_R = flat_RV.max(axis=1) - np.take_along_axis(flat_RV, chosen_BS.reshape(-1, 1), axis=1)[:, 0]
    scale_R = np.abs(flat_RV).max(axis=1)
    error_R = np.maximum(apart_RK.max(axis=1), lost_R) / 2  # of two numbers, each of which may be off
    return Cached(of_errors(error_R, scale_R, float(apart_RK.mean())), steps, rows, lost_R / 2 / scale_R)


def _steps(spec: ModelSpec, chosen_BS: NDArray[np.int64]) -> int:
    """Steps up to the first whose token stands for a picture: a trace wants a picture for it."""
    token = getattr(spec.vision, "image_token_id", None)
    at_S = np.flatnonzero((chosen_BS == token).any(axis=0))
    return max(1, int(at_S[0])) if len(at_S) else chosen_BS.shape[1]


def _padded(rows: list[NDArray[np.int64]] | tuple[NDArray[np.int64], ...]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Rows as a batch with padding behind them, and its mask."""
    longest = max(map(len, rows))
    mask = np.stack([(np.arange(longest) < len(row)).astype(np.int64) for row in rows])
    return np.stack([np.pad(row, (0, longest - len(row))) for row in rows]), mask


def _fault(engine: EngineLike, case: Case, cached: Cached) -> Finding:
    """Which way is wrong: that of prompts, of answers, or of rows beside each other."""
    row, step = cached.place()
    limit = case.limit_for("logits")
    way, look = _way(cached, limit)
    if not case.golden.pictures and len(cached.rows) > 1:
        alone = _compared(engine, case, (cached.rows[row],), {})
        if case.passes("logits", alone.found):
            way, look = "a row beside others, right alone,", "what rows of a batch share: pages, slots, masks"
    return fatal(
        "wrong-numbers",
        f"{way} is not what the same tokens give in one piece: row {row}, token {step} of the answer",
        file=case.golden.source,
        tensors=("logits",),
        expected=f"within {limit:.1e} of scale",
        found=cached.found.broken or f"{case.measure(cached.found):.2e} of scale",
        next=f"look at {look}; every block alone is right where the checks above pass",
    )


def _way(cached: Cached, limit: float) -> tuple[str, str]:
    """What requests do otherwise than a trace where the first number is wrong, and where to look for it."""
    wrong_R = cached.found.relative_R > limit
    if wrong_R.any() and (cached.lost_R[wrong_R] >= cached.found.relative_R[wrong_R]).all():
        return "a token that is chosen, and not the likeliest,", "how tokens are chosen"
    if wrong_R.reshape(-1, cached.steps)[:, 0].any():
        return "a prompt that is computed in chunks", "chunks of prompts, their positions and keys"
    return "an answer that is computed over the cache", "how keys, values and states are kept and read"


def stretches(spec: ModelSpec, length: int) -> bool:
    """Whether rotary frequencies of a context of that length depend on it."""
    for layer in spec.layers:
        rope = layer.rope
        if rope is None or rope.scaling is None or rope.scaling.kind not in ("dynamic", "longrope"):
            continue
        trained = rope.max_positions if rope.scaling.kind == "dynamic" else rope.scaling.original_max_positions
        if length > trained:
            return True
    return False


def _is_foreign_with_pictures(case: Case) -> bool:
    return isinstance(case.spec, ForeignSpec) and bool(case.golden.pictures.keys() & PICTURE_NAMES)
