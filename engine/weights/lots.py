"""The account's two sides as mappings that know whole kinds by rule and make an entry only when it is asked for.

A lot says: these tensors fill the parameters of that pattern, number by number, all of them or, where shards are
lacking, some. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import cached_property
from itertools import chain, count, repeat, takewhile
from typing import TypeVar

import msgspec

from firstlight.engine.model.spec import FIRST_STAGE, LAST_STAGE, ModelSpec, Param, Scope
from firstlight.engine.parallel.census import Kind as ParamKind
from firstlight.engine.parallel.census import census
from firstlight.engine.weights.formats.grid import Format, Packed
from firstlight.engine.weights.header import TensorInfo
from firstlight.engine.weights.naming import pattern_of
from firstlight.engine.weights.patterns import grouped, with_numbers
from firstlight.engine.weights.source import Region, Source
from firstlight.engine.weights.stock import Kind, some

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|\Z)")
_MOST_DIGITS = 18
V = TypeVar("V")


class Parameters(Mapping[str, Param]):
    """All parameters of a spec by name; those of lots are made layer by layer, when one of the layer is asked for."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._lots: set[str] = set()
        self._layers: dict[int, dict[str, Param]] = {}
        self._kinds: dict[str, list[ParamKind]] = {}
        for kind in census(spec):
            self._kinds.setdefault(pattern_of(kind.param.name), []).append(kind)
        experts = (pattern for pattern, kinds in self._kinds.items() if kinds[0].param.expert is not None)
        self._lots.update(pattern for pattern in experts if self._numbers(pattern) is not None)

    def covered(self, pattern: str, kind: Kind, shape: tuple[int, ...]) -> frozenset[str] | None:
        """The roles of the parameters of a pattern if they have that shape, and one for each member of the kind."""
        own = self._kinds.get(pattern)
        if own is None or any(k.param.shape != shape or k.param.padding for k in own):
            return None
        numbers = self._numbers(pattern)
        if numbers is None or len(kind.numbers) != len(numbers) or not kind.is_usual:
            return None
        is_known = all(set(wanted).issuperset(found) for wanted, found in zip(numbers, kind.numbers, strict=True))
        return frozenset(k.param.role for k in own) if is_known else None

    def _numbers(self, pattern: str) -> list[list[int]] | None:
        """The numbers at each star of a pattern, layers and experts if it has any; None where not all choices are."""
        own = self._kinds[pattern]
        if any((k.count, k.param.expert) != (own[0].count, own[0].param.expert) for k in own):
            return None
        if any(_NUMBER.findall(k.param.name)[:1] != [str(k.layers[0])] for k in own):
            return None
        layers = sorted(layer for kind in own for layer in kind.layers)
        found = [layers] + ([list(range(own[0].count))] if own[0].param.expert is not None else [])
        return found if len(found) == pattern.count("*") else None

    def count(self, pattern: str) -> int:
        """How many parameters of a pattern there are."""
        return sum(kind.count * len(kind.layers) for kind in self._kinds.get(pattern, ()))

    def in_layers(self) -> dict[int, int]:
        """How many parameters each layer has; the stages' ends are layers too."""
        found: dict[int, int] = {}
        for kind in chain.from_iterable(self._kinds.values()):
            for layer in kind.layers:
                found[layer] = found.get(layer, 0) + kind.count
        return found

    def missing(self, sources: Sources) -> tuple[str, ...]:
        """The parameters without a source, in order."""
        if len(sources) == len(self):
            return ()
        lacking = {name for name in self._few if name not in sources}
        for pattern in self._lots:
            filled = sources.of(pattern)
            if len(filled) < self.count(pattern) and (numbers := self._numbers(pattern)) is not None:
                lacking.update(_named(pattern, numbers).difference(filled, sources.singles))
        if "_all" in self.__dict__:
            return tuple(name for name in self._all if name in lacking)
        layers = sorted({layer for name in lacking if (layer := _layer_of(name)) is not None})
        order = chain(self._ends(FIRST_STAGE), *map(self._of_layer, layers), self._ends(LAST_STAGE))
        return tuple(name for name in order if name in lacking)

    def shapes(self, pattern: str) -> set[tuple[int, ...]]:
        """The shapes of the parameters of a pattern."""
        return {kind.param.shape for kind in self._kinds.get(pattern, ())}

    def cover(self, pattern: str) -> None:
        """The parameters of a pattern, which has `covered` a kind, are a lot."""
        self._lots.add(pattern)
        self.__dict__.pop("_few", None)

    @cached_property
    def _all(self) -> dict[str, Param]:
        return {param.name: param for param in self._spec.parameters()}

    @cached_property
    def _few(self) -> dict[str, Param]:
        """Those that are in no lot; experts are, whatever fills them."""
        rest = [kind for pattern, kinds in self._kinds.items() if pattern not in self._lots for kind in kinds]
        if any(kind.count > 1 for kind in rest):
            return self._all
        return {param.name: param for kind in rest for param in _each(kind)}

    def _of_layer(self, layer: int) -> dict[str, Param]:
        """The parameters of a layer, in order; none of one that there is not."""
        if layer not in self._layers and layer < len(self._spec.layers):
            scope = Scope(prefix=f"layers.{layer}.", layer=layer, hidden=self._spec.hidden)
            self._layers[layer] = {param.name: param for param in self._spec.layers[layer].parameters(scope)}
        return self._layers.get(layer, {})

    def _ends(self, end: int) -> list[str]:
        """The parameters of one end of the stages, in order."""
        params = msgspec.structs.replace(self._spec, layers=self._spec.layers[-1:]).parameters()
        return [param.name for param in params if param.layer == end]

    def __getitem__(self, name: str) -> Param:
        if (found := self._few.get(name)) is not None:
            return found
        layer = _layer_of(name)
        if layer is None or pattern_of(name) not in self._lots:
            raise KeyError(name)
        return self._of_layer(layer)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return sum(kind.count * len(kind.layers) for kinds in self._kinds.values() for kind in kinds)


def _each(kind: ParamKind) -> Iterator[Param]:
    """The parameter of each layer of a kind."""
    first, param = f"layers.{kind.layers[0]}.", kind.param
    for layer in kind.layers:
        here = f"layers.{layer}."
        if layer == kind.layers[0]:
            yield param
            continue
        assert param.name.startswith(first)
        storage = param.storage.replace(first, here, 1)
        yield msgspec.structs.replace(param, name=param.name.replace(first, here, 1), storage=storage, layer=layer)


def _layer_of(name: str) -> int | None:
    """The layer that a parameter is of by its name."""
    start, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    return int(number) if start == "layers" and number.isdecimal() and len(number) < _MOST_DIGITS else None


def _named(pattern: str, numbers: Sequence[Sequence[int]]) -> set[str]:
    """The names of a pattern with every choice of numbers for its one or two stars."""
    before, *between = pattern.split("*")
    if len(between) == 1:
        return {f"{before}{number}{between[0]}" for number in numbers[0]}
    inner = [f"{between[0]}{number}{between[1]}" for number in numbers[1]]
    return {f"{before}{number}{end}" for number in numbers[0] for end in inner}


def experts(param: str, params: Mapping[str, Param]) -> Iterator[str]:
    """A parameter, or each expert's that a stacked tensor fills."""
    if "{e}" not in param:
        yield param
        return
    names = (param.replace("{e}", str(expert)) for expert in count())
    yield from takewhile(params.__contains__, names)


class Lot:
    """Weights of one kind and the parameters of one pattern that they fill, each the one with its own numbers.

    `kinds`: all tensors of the lot. `parts`: all tensors of quantized weights, in the
    order of the format's parts, each in the order of `mains`.
    """

    def __init__(
        self,
        params: str,
        weights: str,
        shape: tuple[int, ...],
        mains: Kind,
        kinds: tuple[Kind, ...],
        format: Format | None = None,
        parts: tuple[Sequence[TensorInfo], ...] = (),
    ) -> None:
        self.params, self.weights, self.shape = params, weights, shape
        self.mains, self.kinds, self.format, self.parts = mains, kinds, format, parts
        self.region: Region = tuple((0, size, 1) for size in shape)

    def __len__(self) -> int:
        return len(self.mains.tensors)

    @cached_property
    def places(self) -> Mapping[str, int]:
        """Name of each parameter -> its place among the weights."""
        return self.mains.places_as(self.params)

    def source(self, place: int) -> Source:
        return self.sources([place])[0]

    def sources(self, places: Sequence[int]) -> list[Source]:
        """Of the parameters at places."""
        mains = [tensor.name for tensor in some(self.mains.tensors, places)]
        if self.format is None:
            return [Source(main, self.region) for main in mains]
        names = self.mains.some_as(self.weights, places)
        parts = zip(*(some(part, places) for part in self.parts), strict=True)
        packs = map(Packed, names, repeat(self.shape), repeat(self.format), parts)
        return [Source(main, self.region, packed=packed) for main, packed in zip(mains, packs, strict=True)]


def with_numbers_of(name: str, pattern: str) -> str:
    """The name of a pattern with the numbers of another name."""
    found = iter(_NUMBER.findall(name))
    return "".join(next(found) if part == "*" else part for part in re.split(r"(\*)", pattern))


class _Book(MutableMapping[str, V]):
    """Entries one by one beside lots."""

    def __init__(self) -> None:
        self._single: dict[str, V] = {}
        self._lots: dict[str, Lot] = {}

    def __setitem__(self, name: str, value: V) -> None:
        self._single[name] = value

    def __delitem__(self, name: str) -> None:
        raise TypeError("nothing is struck out of an account")

    def __contains__(self, name: object) -> bool:
        return name in self._single or (isinstance(name, str) and self._of_lot(name) is not None)

    def __getitem__(self, name: str) -> V:
        found = self._single.get(name)
        if found is None and (found := self._of_lot(name)) is None:
            raise KeyError(name)
        return found

    @property
    def lots(self) -> tuple[Lot, ...]:
        """Whole kinds; what is not in them is in `singles`."""
        return tuple(dict.fromkeys(self._lots.values()))

    @property
    def singles(self) -> Mapping[str, V]:
        return self._single

    def enter(self, entries: Iterable[tuple[str, V]]) -> None:
        """Many at once."""
        self._single.update(entries)

    def _of_lot(self, name: str) -> V | None:
        raise NotImplementedError


class Sources(_Book[Source]):
    """Parameter -> where it comes from."""

    def add(self, lot: Lot) -> None:
        self._lots[lot.params] = lot

    def several(self, names: Sequence[str]) -> list[Source]:
        """Of many parameters at once. Raises KeyError."""
        found = list(map(self._single.get, names))
        others = [place for place, source in enumerate(found) if source is None]
        for pattern, group in grouped(others, names.__getitem__).items():
            lot = self._lots[pattern]
            sources = lot.sources(lot.mains.places_of(lot.params, [names[place] for place in group]))
            for place, source in zip(group, sources, strict=True):
                found[place] = source
        return [source for source in found if source is not None]

    def _of_lot(self, name: str) -> Source | None:
        lot, place = self._place(name)
        return None if lot is None or place is None else lot.source(place)

    def _place(self, name: str) -> tuple[Lot | None, int | None]:
        """The lot of a parameter and its place there; no source is made to tell whether there is one."""
        lot = self._lots.get(pattern_of(name)) if self._lots else None
        return lot, (lot.places.get(name) if lot is not None else None)

    def __contains__(self, name: object) -> bool:
        return name in self._single or (isinstance(name, str) and self._place(name)[1] is not None)

    def of(self, pattern: str) -> Sequence[str]:
        """The parameters of a pattern that a lot fills."""
        lot = self._lots.get(pattern)
        return (lot.mains.as_names(pattern) or ()) if lot is not None else ()

    def lacks_all(self, pattern: str, names: Iterable[str]) -> bool:
        """Whether none of the parameters, all of one pattern, has a source."""
        return self._single.keys().isdisjoint(names) and (pattern not in self._lots or self.keys().isdisjoint(names))

    def __iter__(self) -> Iterator[str]:
        places = (lot.places for lot in self._lots.values())
        return chain(self._single, (name for of_lot in places for name in of_lot if name not in self._single))

    def __len__(self) -> int:
        return len(self._single) + sum(map(len, self._lots.values()))


class Consumed(_Book[tuple[str, ...]]):
    """Tensor -> the parameters that it fills. `tensors` are all there are."""

    def __init__(self, tensors: Mapping[str, TensorInfo]) -> None:
        super().__init__()
        self._tensors = tensors

    def add(self, lot: Lot) -> None:
        self._lots.update((kind.pattern, lot) for kind in lot.kinds)

    def of_lots(self) -> dict[str, str]:
        """All tensors of lots at once, each with the parameter that it fills."""
        found: dict[str, str] = {}
        for lot in self.lots:
            for kind in lot.kinds:
                params = kind.as_names(lot.params)
                assert params is not None
                found.update(zip(kind.names, params, strict=True))
        return found

    def _of_lot(self, name: str) -> tuple[str, ...] | None:
        lot = self._lots.get(pattern_of(name)) if self._lots else None
        if lot is None or name not in self._tensors:
            return None
        param = with_numbers_of(name, lot.params)
        return (param,) if param in lot.places else None

    def entered(self, pattern: str) -> str | None:
        """What the tensors of a pattern that are in a lot fill: the pattern of parameters with its numbers."""
        lot = self._lots.get(pattern)
        return None if lot is None else with_numbers(lot.params, lot.mains.numbers)

    def __iter__(self) -> Iterator[str]:
        kinds = (kind for lot in self.lots for kind in lot.kinds)
        return chain(self._single, (name for kind in kinds for name in kind.names if name not in self._single))

    def __len__(self) -> int:
        kinds = (kind for lot in self.lots for kind in lot.kinds)
        return len(self._single) + sum(len(kind.tensors) for kind in kinds)
