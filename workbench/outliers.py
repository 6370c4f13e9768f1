"""Tensors whose scale is unlike that of their siblings: the same weight in other layers or experts. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence

from firstlight.engine.findings import Finding, several, warning
from firstlight.engine.weights.names.patterns import grouped, numbers, with_numbers
from firstlight.workbench.deep import TensorReading

LEAST_SIBLINGS = 5
FAR = 5.0  # powers of two from the median; releases that are right stay within
SPREADS = 6.0  # and as many times the median distance of all siblings
APART = 8.0  # powers of two between the smallest and the largest of siblings too few to have a usual distance
WEIGHTS = ("weight", "_packed", "_blocks", "_proj")
SCALES = ("_scales", ".scale", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "scales")


def outliers(readings: Iterable[TensorReading]) -> Iterator[Finding]:
    """A warning for each pattern of names with members that are all zero, or much larger or smaller than the others.

    The scale is the root mean square; far is more than 32 times the median of the siblings and six times their usual
    distance from it. Right weights can be so; a shard of another release, a wrong conversion or a hole in a file is.
    """
    for pattern, everyone in grouped(readings, lambda reading: reading.tensor).items():
        siblings = [reading for reading in everyone if reading.rms is not None]
        rest = len(everyone) - len(siblings)  # codes, which are not zero, and what is not finite
        if len(everyone) < LEAST_SIBLINGS:
            if holes := _holes(siblings, rest):
                yield _odd(pattern, holes, "all zero", "0", "numbers")
            yield from _few(pattern, [one for one in siblings if one.rms and _is_large(one)])
            continue
        zero = [reading for reading in siblings if reading.rms == 0]
        others = [reading for reading in siblings if reading.rms]
        if zero and len(others) + rest > len(zero):
            usual = _usual(others) if others else "numbers"
            yield _odd(pattern, zero, "all zero, unlike their siblings", "0", usual)
        if len(others) >= LEAST_SIBLINGS:
            far = _far(others)
            if far:
                worst = max(far, key=lambda reading: abs(_log(reading) - _middle(others)))
                times = 2 ** (_log(worst) - _middle(others))
                size = f"{times:,.3g} times" if times > 1 else f"1/{1 / times:,.3g} of"
                yield _odd(
                    pattern, far, f"up to {size} the scale of their siblings", f"{worst.rms:.3g}", _usual(others)
                )


def _holes(siblings: Sequence[TensorReading], rest: int) -> list[TensorReading]:
    """Of few tensors of a kind, weights that are all zero while others are not, or that are alone: holes in a file.

    Norms and biases may be so.
    """
    zero = [one for one in siblings if one.rms == 0 and _is_large(one)]
    return zero if len(zero) < len(siblings) + rest or len(siblings) == 1 else []


def _is_large(one: TensorReading) -> bool:
    """Whether it is a weight or the scales of one, which are of about one size in layers that are alike."""
    return one.tensor.endswith((*WEIGHTS, *SCALES)) and "norm" not in one.tensor


def _few(pattern: str, siblings: Sequence[TensorReading]) -> Iterator[Finding]:
    """Of two siblings that are far apart nobody knows which is right; of more, the one far from the median is not."""
    if not siblings:
        return
    ordered = sorted(siblings, key=_log)
    apart = _log(ordered[-1]) - _log(ordered[0])
    if apart > APART:
        far = [one for one in ordered if len(ordered) == 2 or abs(_log(one) - _middle(ordered)) > FAR]
        found = f"root mean squares {ordered[0].rms:.3g} to {ordered[-1].rms:.3g}"
        yield _odd(pattern, far, f"{2**apart:,.3g} times apart in scale", found, "scales as siblings have them")


def _far(siblings: Sequence[TensorReading]) -> list[TensorReading]:
    middle = _middle(siblings)
    usual = statistics.median(abs(_log(reading) - middle) for reading in siblings)
    return [reading for reading in siblings if abs(_log(reading) - middle) > max(FAR, SPREADS * usual)]


def _log(reading: TensorReading) -> float:
    assert reading.rms
    return math.log2(reading.rms)


def _middle(siblings: Iterable[TensorReading]) -> float:
    return statistics.median(map(_log, siblings))


def _usual(siblings: Sequence[TensorReading]) -> str:
    return f"root mean square about {2 ** _middle(siblings):.3g}"


def _odd(pattern: str, odd: Sequence[TensorReading], how: str, found: str, expected: str) -> Finding:
    names = tuple(reading.tensor for reading in odd)
    return warning(
        "odd-scale",
        f"{with_numbers(pattern, numbers(pattern, names))}: "
        f"{several(len(names), 'of these tensors is', 'of these tensors are')} {how}",
        tensors=names,
        expected=expected,
        found=found,
        next="compare hashes with another copy (scan --against); the vendor may have meant it",
    )
