"""Whether weights look as config.json says that they are stored, where two readings fit the headers alike.

Two options of quantization leave no trace in headers. GPTQ's zero points are stored less one, or (`gptq_v2`) as they
are: read the other way, every weight is off by a step of its group, and the mean of a matrix, which is near zero, by
one step as well. Scales are multiplied by or divided by: the other way numbers become thousands. Engine and reference
both believe what is said, so that no comparison of the two shows it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, fatal
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.recipes import Recipe
from firstlight.engine.weights.unpacked import Unpacked

Floats = NDArray[np.float32]
SAMPLE = 12  # weights that are looked at, from the first to the last
MOST_VALUES = 1 << 24  # of one that is, where there are such
NEAR = 0.25  # steps: a mean that is so near zero is zero, and one so near a step is a step
SURE = 4.0  # standard errors of a mean, within which it must be known for that
TOO_LARGE, USUAL = 1e3, 1e2  # root mean squares: no weight is the one, and what is read right is below the other


def misannounced(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    """Findings (conflicting-flag) on weights that only the other reading makes look like weights."""
    try:
        weights = Unpacked(checkpoint)
    except Refused:
        return ()  # whoever starts it says why
    return tuple(_findings(weights, {name: weights.recipe(name) for name in _sample(weights)}))


def _sample(weights: Unpacked) -> list[str]:
    """Weights that could be read in two ways, spread over all of them."""
    names = [name for name in weights.packed if _otherwise(weights.recipe(name)) is not None]
    sizes = {name: math.prod(weights.recipe(name).shape) for name in names}
    names = [name for name in names if sizes[name] <= max(MOST_VALUES, min(sizes.values()))]
    places = np.unique(np.linspace(0, len(names) - 1, min(SAMPLE, len(names))).astype(int)) if names else ()
    return [names[place] for place in places]


def _otherwise(recipe: Recipe) -> Recipe | None:
    """The other reading of the same tensors; None where there is none."""
    if recipe.formula == "inputs":
        return recipe._replace(less=1 - recipe.less)
    return recipe._replace(divides=not recipe.divides) if recipe.formula in ("float", "twice") else None


def _findings(weights: Unpacked, sample: Mapping[str, Recipe]) -> Iterator[Finding]:
    shifts, sizes, less = [], [], 0
    for name, recipe in sample.items():
        other = _otherwise(recipe)
        assert other is not None
        told, otherwise = (weights.read_by(name, one).numpy() for one in (recipe, other))
        if recipe.formula == "inputs":
            shifts += _in_steps(told, otherwise)
            less = recipe.less
        else:
            sizes.append((_size(told), _size(otherwise)))
    if shifts and _are_shifted(np.array(shifts)):
        yield _shifted(tuple(sample), float(np.median([shift for shift, _ in shifts])), bool(less))
    if sizes and all(told > TOO_LARGE and otherwise < USUAL for told, otherwise in sizes):
        yield _inverted(tuple(sample), *sizes[0])


def _shifted(names: tuple[str, ...], mean: float, less: bool) -> Finding:
    told, true = ("gptq", "gptq_v2") if less else ("gptq_v2", "gptq")
    return fatal(
        "conflicting-flag",
        f"zero points are said to be those of {told!r}, and read so all weights are shifted by a step: they are those "
        f"of {true!r}",
        file="config.json",
        tensors=names,
        expected="weights whose mean is near zero",
        found=f"a mean of {mean:+.2f} steps; of {mean - np.sign(mean):+.2f} read as {true!r}",
        next=f"fetch the release's own config.json; checkpoint_format should be {true!r}",
    )


def _inverted(names: tuple[str, ...], size: float, otherwise: float) -> Finding:
    return fatal(
        "conflicting-flag",
        "scales are read the wrong way round: weights would be thousands",
        file="config.json",
        tensors=names,
        expected=f"weights of a root mean square below {USUAL:g}",
        found=f"{size:.3g}, and {otherwise:.3g} with the reciprocal of the scale",
        next="fetch the release's own config.json, and check how its exporter means its scales",
    )


def _in_steps(told: Floats, otherwise: Floats) -> list[tuple[float, float]]:
    """The mean of a matrix in steps of its groups, and the standard error of that; none of what has no step."""
    step = float(np.abs(told - otherwise).mean(dtype=np.float64))
    mean, spread = (float(found) / step if step else 0.0 for found in (told.mean(dtype=np.float64), told.std()))
    return [(mean, spread / told.size**0.5)] if step else []


def _size(values: Floats) -> float:
    return float(np.sqrt(np.square(np.nan_to_num(values), dtype=np.float64).mean()))


def _are_shifted(shifts: NDArray[np.float64]) -> bool:
    """Whether three matrices in four are a whole step off, to the same side, and known to be."""
    mean_N, error_N = shifts.T
    side = np.sign(np.median(mean_N))
    off_N = (np.abs(mean_N - side) < NEAR) & (SURE * error_N < 1 - NEAR)
    return bool(side and off_N.sum() >= 0.75 * len(mean_N))
