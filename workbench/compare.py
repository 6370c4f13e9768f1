"""How far two results are apart, and whether that is noise, a tie or a fault. numpy only.

Legend: R rows (real tokens), W width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32_LIMIT = 1e-3  # of the reference's own scale
EPSILON = {"F32": 2.0**-23, "F16": 2.0**-10, "BF16": 2.0**-7}
TOP_N = 10
TYPICAL = 0.75  # of the rows stay below the typical deviation
SMALLEST_SHARE = 1e-3  # a row's scale counts as at least this share of the largest row's
NORMAL_SPREAD = 1.4826  # standard deviations of a normal distribution in its median absolute deviation
STREAM_SHARE = 16 * EPSILON["F32"] / F32_LIMIT  # of what a block's part is added to: sixteen roundings pass


def limit_of(dtype: str) -> float:
    """The relative max-abs that passes: 1e-3 in float32; sixteen steps of rounding in a narrower dtype."""
    return max(F32_LIMIT, 16 * EPSILON[dtype])


@dataclass(frozen=True, slots=True)
class Gain:
    """How many times as large a result is as another, the median of its rows, with the standard error of that.

    Rounding moves single values by more than a block that is off by a hundredth; it moves the median of what all values
    say together by a tenth of that, and rows that went to another expert do not move it.
    """

    value: float
    error: float

    @property
    def apart(self) -> float:
        """How far from one."""
        return abs(self.value - 1)


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far `ours` [R, W] is from `theirs`.

    `relative_R` is each row's largest difference over the largest value of the reference in that row, so that a token
    with huge activations does not hide another's fault; `relative` is its worst, in row `row`, and `typical` what three
    rows in four stay below. `overall` is the same over the whole array's scale. `broken` names the first value of ours
    that is not finite. `gain`: how many times as large ours is along theirs, where that was asked for.
    """

    relative: float
    overall: float
    max_abs: float
    mean_abs: float
    cosine: float
    row: int
    typical: float
    relative_R: NDArray[np.float64]
    broken: str = ""
    gain: Gain | None = None

    def passes(self, limit: float) -> bool:
        """Whether every row stays within the limit."""
        return not self.broken and self.relative <= limit


def unequal(rows: int, reason: str, row: int = 0) -> Deviation:
    """A deviation without measure: there is nothing to compare, or it is not finite."""
    far = np.full(rows, np.inf)
    return Deviation(np.inf, np.inf, np.inf, np.inf, 0.0, row, np.inf, far, reason)


def deviation(ours: NDArray[Any], theirs: NDArray[Any], beside_R: NDArray[Any] | None = None) -> Deviation:
    """Compare two arrays of the same shape [R, W]; the reference's values are finite.

    `beside_R` is added to each row's scale.
    """
    if not np.isfinite(ours).all():
        row, column = (int(i) for i in np.argwhere(~np.isfinite(ours))[0])
        count = int((~np.isfinite(ours)).sum())
        broken = f"{ours[row, column]} at token {row}, channel {column}; {count} values are not finite"
        return unequal(len(theirs), broken, row)
    ours64, theirs64 = ours.astype(np.float64), theirs.astype(np.float64)
    difference = np.abs(ours64 - theirs64)
    scale_R = np.abs(theirs64).max(axis=1)
    if beside_R is not None:
        scale_R = scale_R + beside_R
    norms = float(np.linalg.norm(ours64) * np.linalg.norm(theirs64))
    cosine = float((ours64 * theirs64).sum() / norms) if norms else float(not difference.any())
    return of_errors(difference.max(axis=1), scale_R, float(difference.mean()), cosine)


def of_errors(
    error_R: NDArray[np.float64], scale_R: NDArray[np.float64], mean_abs: float, cosine: float = 1.0
) -> Deviation:
    """The deviation of rows whose largest errors, and what these count in relation to, are known."""
    tiny = float(np.finfo(np.float64).tiny)
    largest = max(float(scale_R.max(initial=0.0)), tiny)
    relative_R = error_R / np.maximum(scale_R, max(largest * SMALLEST_SHARE, tiny))
    row = int(relative_R.argmax())
    return Deviation(
        relative=float(relative_R[row]),
        overall=float(error_R.max() / largest),
        max_abs=float(error_R.max()),
        mean_abs=mean_abs,
        cosine=cosine,
        row=row,
        typical=float(np.quantile(relative_R, TYPICAL)),
        relative_R=relative_R,
    )


def gain(ours: NDArray[Any], theirs: NDArray[Any], entered: NDArray[Any] | None = None) -> Gain | None:
    """How many times as large ours [R, W] is along theirs; of what both add to `entered`, where that is given."""
    ours64, theirs64 = ours.astype(np.float64), theirs.astype(np.float64)
    if entered is not None:
        ours64, theirs64 = ours64 - entered, theirs64 - entered
    square_R = (theirs64 * theirs64).sum(axis=1)
    some_R = square_R > 0
    if not some_R.any() or not np.isfinite(ours64).all():
        return None
    gain_R = (ours64 * theirs64).sum(axis=1)[some_R] / square_R[some_R]
    value = float(np.median(gain_R))
    spread = NORMAL_SPREAD * float(np.median(np.abs(gain_R - value)))
    return Gain(value, spread / float(np.sqrt(len(gain_R))))


def own_part(ours: NDArray[Any], theirs: NDArray[Any], entered: NDArray[Any]) -> Deviation:
    """What a layer adds to `entered`, its input [R, W] on both sides, in relation to that alone.

    A layer that adds little to a large stream, or beside a huge channel, would hide its faults there. The rounding of
    the stream itself is no fault: `STREAM_SHARE` of it counts to the scale.
    """
    if not np.isfinite(ours).all():
        return deviation(ours, theirs)
    given = entered.astype(np.float64)
    return deviation(ours - given, theirs - given, STREAM_SHARE * np.abs(given).max(axis=1))


def behind_norm(ours: NDArray[Any], theirs: NDArray[Any], unnormed: NDArray[Any], entered: NDArray[Any]) -> Deviation:
    """The same of a layer that is known behind a norm [R, W] alone, which hides how large the stream is.

    What the layer adds is that part of it behind the norm that it is in front of it: of `unnormed`, ours.
    """
    if not np.isfinite(ours).all() or not np.isfinite(unnormed).all():
        return deviation(ours, theirs)
    stream = unnormed.astype(np.float64)
    tiny = float(np.finfo(np.float64).tiny)
    share_R = np.abs(stream - entered).max(axis=1) / np.maximum(np.abs(stream).max(axis=1), tiny)
    whole = deviation(ours, theirs)
    scale_R = np.abs(theirs.astype(np.float64)).max(axis=1)
    error_R = np.abs(ours.astype(np.float64) - theirs).max(axis=1)
    return of_errors(error_R, scale_R * (np.minimum(share_R, 1.0) + STREAM_SHARE), whole.mean_abs, whole.cosine)


@dataclass(frozen=True, slots=True)
class Ranking:
    """Agreement of two sets of logits on what is likeliest, flips at near-ties apart from faults.

    A flip is a near-tie when the reference itself puts the two tokens within twice the allowed deviation of each other.
    `faults` are the rows of flips that are none. `overlap` is the mean share of the reference's top N found in ours.
    """

    rows: int
    agree: int
    ties: tuple[int, ...]
    faults: tuple[int, ...]
    overlap: float
    strangers: tuple[int, ...]  # rows where a missing token of the reference's top N is not close to its next

    @property
    def agreement(self) -> float:
        return self.agree / self.rows


def ranking(ours: NDArray[Any], theirs: NDArray[Any], limit: float, top_n: int = TOP_N) -> Ranking:
    """Compare logits [R, V]; `limit` is the relative deviation that is allowed."""
    rows = np.arange(len(theirs))
    top_n = min(top_n, theirs.shape[1])
    best_R, our_best_R = theirs.argmax(axis=1), ours.argmax(axis=1)
    margin_R = 2 * limit * np.abs(theirs).max(axis=1)
    flipped_R = best_R != our_best_R
    close_R = theirs[rows, best_R] - theirs[rows, our_best_R] <= margin_R
    top_RN = np.argpartition(-theirs, top_n - 1, axis=1)[:, :top_n]
    our_top_RN = np.argpartition(-ours, top_n - 1, axis=1)[:, :top_n]
    found_RN = (top_RN[:, :, None] == our_top_RN[:, None, :]).any(axis=2)
    values_RN = np.take_along_axis(theirs, top_RN, axis=1)
    following = min(top_n, theirs.shape[1] - 1)
    next_R1 = -np.partition(-theirs, following, axis=1)[:, following : following + 1]
    strange_R = (~found_RN & (values_RN - next_R1 > margin_R[:, None])).any(axis=1)
    return Ranking(
        rows=len(rows),
        agree=int((~flipped_R).sum()),
        ties=_indices(flipped_R & close_R),
        faults=_indices(flipped_R & ~close_R),
        overlap=float(found_RN.mean()),
        strangers=_indices(strange_R),
    )


def divergence(ours: NDArray[Any], theirs: NDArray[Any]) -> NDArray[np.float64]:
    """KL(reference || ours) of each row of logits [R, V], in nats."""
    p, q = log_softmax(theirs), log_softmax(ours)
    return np.maximum((np.exp(p) * (p - q)).sum(axis=1), 0.0)


def divergence_limit(theirs: NDArray[Any], limit: float) -> float:
    """The largest divergence that deviations within the limit can make: for |error| <= e it is about e^2 / 2."""
    return max(float((limit * np.abs(theirs).max()) ** 2), 1e-9)


def log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    """Log-probabilities of each row, in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def _indices(flags: NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(int(index) for index in np.flatnonzero(flags))
