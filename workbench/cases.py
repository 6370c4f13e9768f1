"""What an engine is held against, and what passes: limits from the contract, from the dtype and from measured noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from firstlight.engine.model.spec import ModelSpec
from firstlight.engine.serving.trace import UNNORMED
from firstlight.workbench.compare import EPSILON, Deviation, behind_norm, deviation, gain, own_part
from firstlight.workbench.golden import Golden

NOISE_FACTOR = 16  # how many times the reference's own noise still passes in float32
NARROW_NOISE_FACTOR = 3  # ... and in dtypes whose noise is large
ROUTED_NOISE_FACTOR = 4  # ... where a router or an indexer that is near a tie hands a rounding on
LEAST_LIMIT = 2.0**-16  # a measured floor does not narrow the limit below this: 128 steps of float32
ANSWER = 8  # tokens of each row that are served, to be held against the same tokens in one piece
SURE = 3.0  # standard deviations: what the number of chance events may differ by between two runs
LEAST_GAIN = 0.5  # steps of a narrow dtype: what a layer adds may be too large or too small by this, throughout
OUTLIER_SHARE = 0.02  # of the tokens may lie outside in narrow dtypes, besides twice those of the reference itself
ROUTED_SHARE = 0.08  # ... for each router, where the reference's own share is not known
CARRIED_SHARE = 0.04  # ... for each layer with a state, which carries a rounding on to all tokens behind it
MOST_ROUTED_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Case:
    """One set of inputs with the reference's outputs, and the rules of its comparison.

    In float32 the worst token decides. In a narrower dtype rounding moves near-ties of routers, for the reference as
    well, and a token with another expert is far off: there the bulk of the tokens decides, and the share of those
    outside `limit` is held against that of the reference itself. What is less than a rounding in each value shows in
    all of them together: see `Gain`.
    `floor` and `forced_floor`: the reference's deviation from itself by name; `least`: what a floor does not narrow the
    limit below. `layers` [first, last) limits the comparison. `eos_ids` end a generated row: what stands behind them is
    padding. `forced_ids` are put last whatever is likeliest. `decodes`: whether the engine's context holds the
    generated tokens; `served`: for how many tokens of an answer it has room.
    """

    golden: Golden
    spec: ModelSpec
    limit: float
    name: str = ""
    dtype: str = "F32"
    eos_ids: frozenset[int] = frozenset()
    forced_ids: frozenset[int] = frozenset()
    decodes: bool = True
    served: int = 0
    least: float = LEAST_LIMIT
    layers: tuple[int, int] | None = None
    floor: Mapping[str, Deviation] = field(default_factory=dict)
    forced_floor: Mapping[str, Deviation] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Generated tokens to compare; none when only some layers are."""
        generated = self.golden.outputs.get("generated")
        return 0 if generated is None or self.layers is not None else int(generated.shape[1])

    @property
    def prefix(self) -> str:
        return f"{self.name} " if self.name else ""

    def metric(self, name: str) -> str:
        """The name of a figure of this case."""
        return f"{self.name}_{name}" if self.name else name

    @property
    def is_narrow(self) -> bool:
        return self.dtype != "F32"

    def wants(self, index: int) -> bool:
        """Whether hidden.`index` is asked for."""
        return self.layers is None or self.layers[0] <= index <= self.layers[1]

    def measure(self, found: Deviation) -> float:
        """The figure that is held against the limit."""
        return found.typical if self.is_narrow else found.relative

    def floor_of(self, name: str, forced: bool = False) -> float | None:
        """The measured noise in terms of `measure`; None without one."""
        floor = (self.forced_floor if forced else self.floor).get(name)
        return None if floor is None else self.measure(floor)

    def limit_for(self, name: str, forced: bool = False) -> float:
        """The limit of a comparison: the given one, or what the measured noise allows."""
        floor = self.floor_of(name, forced)
        if floor is None:
            return self.limit
        if self.is_narrow and chooses(self.spec):  # free running, all that follow see a token with another expert
            return max(ROUTED_NOISE_FACTOR * floor, self.least if forced else self.limit)
        if self.is_narrow:
            return max(NARROW_NOISE_FACTOR * floor, self.least)
        return min(max(NOISE_FACTOR * floor, self.least), self.limit)

    def outliers_allowed(self, name: str, count: int, forced: bool = False) -> int:
        """How many of `count` tokens may deviate by more than `limit`."""
        if not self.is_narrow:
            return 0
        floor = (self.forced_floor if forced else self.floor).get(name)
        if floor is not None:  # as many again by chance: both numbers are counts of independent events
            theirs = int(self.outside(floor).sum()) * count / len(floor.relative_R)
            unseen = 1 if chooses(self.spec) else 0  # none among few tokens does not say that there are none
            chance = 2 * theirs + unseen
            return math.ceil(2 * theirs + SURE * math.sqrt(chance) + OUTLIER_SHARE * count)
        routers = sum(layer.experts is not None for layer in self.spec.layers)
        carried = sum(bool(layer.cache().states) for layer in self.spec.layers)
        share = ROUTED_SHARE * routers + CARRIED_SHARE * carried
        share = max(OUTLIER_SHARE, min(share, MOST_ROUTED_SHARE))
        return math.ceil(share * count)

    def own(self, index: int) -> str:
        """The output that shows what layer `index - 1` gives: of the last one in front of the final norm, if known."""
        is_last = index == self.spec.num_layers and UNNORMED in self.golden.outputs
        return UNNORMED if is_last else f"hidden.{index}"

    def apart(
        self, name: str, ours: NDArray[Any], forced: bool = False, unnormed: NDArray[Any] | None = None
    ) -> Deviation:
        """How far `ours` [batch, tokens, width] is from the reference's output of this name, at real tokens.

        `forced`: what a layer made of the reference's own input, in float32 by what it added to that. The last one's
        is behind the final norm, unless the reference shows it in front of that, and taken whole, or in float32 in
        relation to the share of what it added in ours, `unnormed`.
        """
        golden, mask = self.golden, self.golden.mask
        theirs = golden.outputs[name]
        last = self.spec.num_layers
        index = last if name == UNNORMED else int(name[7:]) if name.startswith("hidden.") else 0
        entered = golden.hidden.get(index - 1)
        adds = forced and index > 0 and entered is not None and entered.shape == theirs.shape
        before = entered[mask] if adds and entered is not None else None
        if before is not None and name == f"hidden.{last}":
            is_all = self.own(index) == name and not self.is_narrow  # that is known of the last layer
            if is_all and unnormed is not None and unnormed.shape == theirs.shape:
                return behind_norm(ours[mask], theirs[mask], unnormed[mask], before)
            before = None
        if before is not None and not self.is_narrow:
            return own_part(ours[mask], theirs[mask], before)
        found = deviation(ours[mask], theirs[mask])
        sums = self.is_narrow and (forced or name == "hidden.0")
        return replace(found, gain=gain(ours[mask], theirs[mask], before)) if sums else found

    def gain_limit(self, name: str, found: Deviation, forced: bool = False) -> float | None:
        """How far from one the gain may be: half a step of the dtype, or what the reference's own rounding makes."""
        if found.gain is None:
            return None
        floor = (self.forced_floor if forced else self.floor).get(name)
        theirs = 0.0 if floor is None or floor.gain is None else floor.gain.apart
        return max(LEAST_GAIN * EPSILON[self.dtype], NARROW_NOISE_FACTOR * theirs) + SURE * found.gain.error

    def outside(self, found: Deviation) -> NDArray[np.bool_]:
        """Which tokens deviate by more than `limit`."""
        return found.relative_R > self.limit

    def passes(self, name: str, found: Deviation, forced: bool = False) -> bool:
        """Whether a comparison is good."""
        if found.broken or self.measure(found) > self.limit_for(name, forced):
            return False
        if not self.is_narrow:
            return True
        if int(self.outside(found).sum()) > self.outliers_allowed(name, len(found.relative_R), forced):
            return False
        return not self.is_off(name, found, forced)

    def told(self, name: str, found: Deviation, forced: bool = False) -> tuple[str, str]:
        """Limit and figure of a comparison in words: by the gain where that alone is wrong."""
        limit, measure = self.limit_for(name, forced), self.measure(found)
        if not found.broken and measure <= limit and found.gain is not None and self.is_off(name, found, forced):
            return (
                f"as large as the reference's within {self.gain_limit(name, found, forced):.1e}",
                f"{found.gain.value:.4f} times as large throughout",
            )
        return f"within {limit:.1e} of scale", found.broken or f"{measure:.2e} of scale, max-abs {found.max_abs:.2e}"

    def is_off(self, name: str, found: Deviation, forced: bool = False) -> bool:
        """Whether a result is too large or too small throughout, by more than rounding makes it in the median."""
        limit = self.gain_limit(name, found, forced)
        return limit is not None and found.gain is not None and found.gain.apart > limit


def chooses(spec: ModelSpec) -> bool:
    """Whether a layer chooses experts or keys: near a tie a rounding makes it another choice."""
    return chooses_keys(spec) or any(layer.experts is not None for layer in spec.layers)


def chooses_keys(spec: ModelSpec) -> bool:
    """Whether an indexer chooses the keys that a token sees: among those that score alike any choice is right."""
    mixers = [part.mixer for layer in spec.layers for part in layer.whole]
    return any(getattr(mixer, name, None) for mixer in mixers for name in ("indexer", "blocks"))


@dataclass(frozen=True, slots=True)
class Rules:
    """What all cases of one comparison have in common; see `Case`."""

    spec: ModelSpec
    limit: float
    dtype: str
    layers: tuple[int, int] | None
    eos_ids: frozenset[int]

    def case(self, golden: Golden, **own: Any) -> Case:
        """A case under these rules; `own` are fields of `Case` that it has for itself."""
        common: dict[str, Any] = {
            "spec": self.spec,
            "limit": self.limit,
            "dtype": self.dtype,
            "layers": self.layers,
            "eos_ids": self.eos_ids,
        }
        return Case(golden=golden, **(common | own))
