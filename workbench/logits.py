"""Logits of an engine against the reference's: divergence, the likeliest tokens, ties and faults.

Legend: B batch, T padded length, R real tokens of all rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from firstlight.workbench.cases import Case
from firstlight.workbench.compare import (
    TOP_N,
    Deviation,
    Ranking,
    divergence,
    divergence_limit,
    log_softmax,
    ranking,
)
from firstlight.workbench.report import Draft

ROWS_SHOWN = 8
TOKENS_SHOWN = 4


def judge_logits(draft: Draft, case: Case, ours_BTV: NDArray[Any], theirs_BTV: NDArray[Any], found: Deviation) -> None:
    """KL, top-1 and top-N; tokens that `found` counts as outliers are set aside, since they count there."""
    mask = case.golden.mask.copy()
    ours_RV, theirs_RV = ours_BTV[mask], theirs_BTV[mask]
    _top_table(draft, case, ours_RV, theirs_RV)
    limit = case.limit if case.is_narrow else case.limit_for("logits")
    aside = ""
    if case.is_narrow:
        near_R = ~case.outside(found)
        mask[mask] = near_R
        ours_RV, theirs_RV = ours_RV[near_R], theirs_RV[near_R]
        aside = f", {int((~near_R).sum())} tokens set aside" if not near_R.all() else ""
    if not len(ours_RV):
        return
    kl_R = divergence(ours_RV, theirs_RV)
    worst, kl_limit = int(kl_R.argmax()), divergence_limit(theirs_RV, limit)
    draft.check(
        f"{case.prefix}kl",
        bool(kl_R[worst] <= kl_limit),
        value=float(kl_R[worst]),
        limit=kl_limit,
        unit="nat",
        detail=f"KL(reference || ours), largest at {place(mask, worst)}, mean {kl_R.mean():.2e}{aside}",
    )
    ranks = ranking(ours_RV, theirs_RV, limit)
    _ranks(draft, case, ranks, mask)
    draft.metric(case.metric("logits_max_abs"), found.max_abs, "logits", f"mean-abs {found.mean_abs:.2e}")
    draft.metric(case.metric("kl_mean"), float(kl_R.mean()), "nat", f"over {len(kl_R):,} tokens")
    draft.metric(case.metric("top1_agreement"), ranks.agreement, "share", f"{len(ranks.ties)} flips at near-ties")
    draft.metric(case.metric(f"top{TOP_N}_overlap"), ranks.overlap, "share", "mean over tokens")


def place(mask: NDArray[np.bool_], row: int) -> str:
    """Where a real token stands, in words."""
    batch, column = (int(i) for i in np.argwhere(mask)[row])
    return f"row {batch}, token {column}"


def _ranks(draft: Draft, case: Case, ranks: Ranking, mask: NDArray[np.bool_]) -> None:
    words = f"{ranks.agree:,} of {ranks.rows:,} equal"
    if ranks.ties:
        words += f", {len(ranks.ties):,} at near-ties of the reference"
    if ranks.faults:
        words += f", {len(ranks.faults):,} flipped, first at {place(mask, ranks.faults[0])}"
    draft.check(f"{case.prefix}top1", not ranks.faults, value=len(ranks.faults), limit=0, unit="tokens", detail=words)
    strange = f", first at {place(mask, ranks.strangers[0])}" if ranks.strangers else ""
    draft.check(
        f"{case.prefix}top{TOP_N}",
        not ranks.strangers,
        value=len(ranks.strangers),
        limit=0,
        unit="tokens",
        detail=f"{100 * ranks.overlap:.2f} % of the reference's {TOP_N} likeliest are among ours{strange}",
    )


def _top_table(draft: Draft, case: Case, ours_RV: NDArray[Any], theirs_RV: NDArray[Any]) -> None:
    """The likeliest tokens at the last token of each row, ours beside the reference's."""
    last = np.cumsum(case.golden.mask.sum(axis=1)) - 1
    rows = []
    for batch, row in enumerate(last[:ROWS_SHOWN]):
        ours_1V, theirs_1V = ours_RV[row : row + 1], theirs_RV[row : row + 1]
        p, q = np.exp(log_softmax(theirs_1V)[0]), np.exp(log_softmax(ours_1V)[0])
        best, ours_best = np.argsort(-p)[:TOKENS_SHOWN], np.argsort(-q)[:TOKENS_SHOWN]
        rows.append(
            {
                "row": batch,
                "reference": ", ".join(f"{i} ({p[i]:.3f})" for i in best),
                "ours": ", ".join(f"{i} ({q[i]:.3f})" for i in ours_best),
                "kl_nat": float(divergence(ours_1V, theirs_1V)[0]),
            }
        )
    draft.table(f"{case.prefix}likeliest at the last token", rows)
