"""The ledger's two sides as lazy mappings: whole kinds are stored as rules, and entries are made on demand.

A lot says: these tensors fill the parameters of that pattern, number by number, all of them or, where shards are
lacking, some. No torch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import cached_property
from itertools import chain, count, product, repeat, takewhile
from typing import TypeVar

import msgspec

from firstlight.engine.model.spec import FIRST_STAGE, LAST_STAGE, ModelSpec, Param, Scope
from firstlight.engine.parallel.census import Kind as ParamKind
from firstlight.engine.parallel.census import census
from firstlight.engine.weights.files.header import TensorInfo
from firstlight.engine.weights.formats.grid import Format, Packed
from firstlight.engine.weights.names.listed import Numbered
from firstlight.engine.weights.names.naming import pattern_of
from firstlight.engine.weights.names.patterns import grouped, literals, parted, with_numbers
from firstlight.engine.weights.names.stock import Kind, some
from firstlight.engine.weights.source import Region, Source

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
        if numbers is None or len(kind.numbers) != len(numbers):
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

    def places(self, pattern: str, kind: Kind) -> Sequence[int] | None:
        """The places of the members of a kind that have a parameter of their numbers; None where that is not known."""
        numbers = self._numbers(pattern) if pattern in self._kinds else None
        if numbers is None or len(kind.numbers) != len(numbers):
            return None
        return kind.within(numbers)

    def missing(self, sources: Sources) -> dict[str, Numbered]:
        """The parameters without a source by pattern: those before the layers, those of layers, and those behind."""
        if len(sources) == len(self):
            return {}
        found: dict[str, list[tuple[int, ...]]] = {}
        for name in self._few:
            if name not in sources:
                pattern, numbers = parted(name)
                found.setdefault(pattern, []).append(numbers)
        singles: dict[str, list[str]] | None = None
        for pattern in self._lots - found.keys():
            filled = set(sources.of(pattern))
            if len(filled) < self.count(pattern):
                singles = grouped(sources.singles, str) if singles is None else singles
                filled.update(parted(name)[1] for name in singles.get(pattern, ()))
            if len(filled) < self.count(pattern) and (columns := self._numbers(pattern)) is not None:
                found[pattern] = [row for row in product(*columns) if row not in filled]
        ends = {FIRST_STAGE: -1, LAST_STAGE: 1}
        rank = {
            pattern: (ends.get(kinds[0].layers[0], 0), at) for at, (pattern, kinds) in enumerate(self._kinds.items())
        }
        return {pattern: Numbered(pattern, found[pattern]) for pattern in sorted(found, key=rank.__getitem__)}

    def end(self, pattern: str) -> int | None:
        """The stage whose end the parameters of a pattern are; None for those of layers."""
        layer = self._kinds[pattern][0].param.layer
        return layer if layer in (FIRST_STAGE, LAST_STAGE) else None

    def shapes(self, pattern: str) -> set[tuple[int, ...]]:
        """The shapes of the parameters of a pattern."""
        return {kind.param.shape for kind in self._kinds.get(pattern, ())}

    def cover(self, pattern: str) -> None:
        """The parameters of a pattern, which has `covered` a kind, are a lot."""
        if pattern not in self._lots:
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


def experts(param: str, params: Mapping[str, Param]) -> Iterator[str]:
    """A parameter, or each expert's that a stacked tensor fills."""
    if "{e}" not in param:
        yield param
        return
    names = (param.replace("{e}", str(expert)) for expert in count())
    yield from takewhile(params.__contains__, names)


class Lot:
    """Weights of one kind and the parameters of one pattern that they fill, each the one with its own numbers.

    `params` is empty for tensors that are accounted for and fill none. `kinds`: all tensors of the lot, each kind in
    the order of `mains`, and in that of the format's parts if there is a format.
    """

    def __init__(
        self,
        params: str,
        weights: str,
        shape: tuple[int, ...],
        mains: Kind,
        kinds: tuple[Kind, ...],
        format: Format | None = None,
    ) -> None:
        self.params, self.weights, self.shape = params, weights, shape
        self.mains, self.kinds, self.format = mains, kinds, format
        self.region: Region = tuple((0, size, 1) for size in shape)

    def __len__(self) -> int:
        return len(self.mains.tensors)

    @cached_property
    def places(self) -> Mapping[str, int]:
        """Name of each parameter -> its place among the weights."""
        return self.mains.places_as(self.params or self.mains.pattern)

    @cached_property
    def rows(self) -> frozenset[tuple[int, ...]]:
        """The numbers of the parameters."""
        return frozenset(self.mains.rows)

    def source(self, place: int) -> Source:
        return self.sources([place])[0]

    def sources(self, places: Sequence[int]) -> list[Source]:
        """Of the parameters at places."""
        mains = [tensor.name for tensor in some(self.mains.tensors, places)]
        if self.format is None:
            return [Source(main, self.region) for main in mains]
        names = self.mains.some_as(self.weights, places)
        parts = zip(*(some(kind.tensors, places) for kind in self.kinds), strict=True)
        packs = map(Packed, names, repeat(self.shape), repeat(self.format), parts)
        return [Source(main, self.region, packed=packed) for main, packed in zip(mains, packs, strict=True)]


def with_numbers_of(name: str, pattern: str) -> str:
    """The name of a pattern with the numbers of another name."""
    found = iter(_NUMBER.findall(name))
    before, *between = literals(pattern)
    return before + "".join(next(found) + words for words in between)


class _Book(MutableMapping[str, V]):
    """Entries one by one beside lots, of which several may be of one pattern."""

    def __init__(self) -> None:
        self._single: dict[str, V] = {}
        self._lots: dict[str, list[Lot]] = {}

    def __setitem__(self, name: str, value: V) -> None:
        self._single[name] = value

    def __delitem__(self, name: str) -> None:
        raise TypeError("nothing is struck out of an account")

    def __contains__(self, name: object) -> bool:
        return name in self._single or (isinstance(name, str) and self._place(name) is not None)

    def __getitem__(self, name: str) -> V:
        found = self._single.get(name)
        if found is not None:
            return found
        place = self._place(name)
        if place is None:
            raise KeyError(name)
        return self._of_lot(*place)

    @property
    def lots(self) -> tuple[Lot, ...]:
        """Whole kinds; what is not in them is in `singles`."""
        return tuple(dict.fromkeys(lot for lots in self._lots.values() for lot in lots))

    @property
    def singles(self) -> Mapping[str, V]:
        return self._single

    def enter(self, entries: Iterable[tuple[str, V]]) -> None:
        """Many at once."""
        self._single.update(entries)

    def _place(self, name: str) -> tuple[Lot, int] | None:
        """The lot that has an entry, and its place there; no entry is made to tell whether there is one."""
        lots = self._lots.get(pattern_of(name), ()) if self._lots else ()
        found = ((lot, self._place_in(lot, name)) for lot in lots)
        return next(((lot, place) for lot, place in found if place is not None), None)

    def _place_in(self, lot: Lot, name: str) -> int | None:
        raise NotImplementedError

    def _of_lot(self, lot: Lot, place: int) -> V:
        raise NotImplementedError


class Sources(_Book[Source]):
    """Parameter -> where it comes from."""

    def __init__(self) -> None:
        super().__init__()
        self._filled: Counter[str] = Counter()
        self._rows: dict[str, tuple[int, set[tuple[int, ...]]]] = {}

    def add(self, lot: Lot) -> None:
        self._lots.setdefault(lot.params, []).append(lot)
        self._filled[lot.params] += len(lot)

    def several(self, names: Sequence[str]) -> list[Source]:
        """Of many parameters at once. Raises KeyError."""
        found = list(map(self._single.get, names))
        others = [place for place, source in enumerate(found) if source is None]
        for pattern, group in grouped(others, names.__getitem__).items():
            for lot in self._lots[pattern]:
                places = lot.mains.places_of(lot.params, [names[place] for place in group])
                here = [(place, at) for place, at in zip(group, places, strict=True) if at >= 0]
                for (place, _), source in zip(here, lot.sources([at for _, at in here]), strict=True):
                    found[place] = source
                group = [place for place in group if found[place] is None]
                if not group:
                    break
            else:
                raise KeyError(names[group[0]])
        return [source for source in found if source is not None]

    def _place_in(self, lot: Lot, name: str) -> int | None:
        return lot.places.get(name)

    def _of_lot(self, lot: Lot, place: int) -> Source:
        return lot.source(place)

    def of(self, pattern: str) -> set[tuple[int, ...]]:
        """The numbers of the parameters of a pattern that lots fill: to read, not to change. Each lot is seen once."""
        lots, (known, rows) = self._lots.get(pattern, ()), self._rows.get(pattern, (0, set()))
        rows.update(*(lot.rows for lot in lots[known:]))
        self._rows[pattern] = len(lots), rows
        return rows

    def filled(self, pattern: str) -> int:
        """How many parameters of a pattern lots fill."""
        return self._filled[pattern]

    @property
    def are_plain(self) -> bool:
        """Whether no source is a weight in codes."""
        singles = all(source.packed is None for source in self._single.values())
        return singles and all(lot.format is None for lot in self.lots)

    def lacks_all(self, pattern: str, names: Sequence[str]) -> bool:
        """Whether none of the parameters, all of one pattern, has a source."""
        return self._single.keys().isdisjoint(names) and (pattern not in self._lots or not any(map(self._place, names)))

    def __iter__(self) -> Iterator[str]:
        places = (lot.places for lot in self.lots)
        return chain(self._single, (name for of_lot in places for name in of_lot if name not in self._single))

    def __len__(self) -> int:
        return len(self._single) + sum(map(len, self.lots))


class Consumed(_Book[tuple[str, ...]]):
    """Tensor -> the parameters that it fills. `tensors` are all there are."""

    def __init__(self, tensors: Mapping[str, TensorInfo]) -> None:
        super().__init__()
        self._tensors = tensors

    def add(self, lot: Lot) -> None:
        for kind in lot.kinds:
            self._lots.setdefault(kind.pattern, []).append(lot)

    def of_lots(self) -> dict[str, str]:
        """All tensors of lots at once, each with the parameter that it fills, if any."""
        found: dict[str, str] = {}
        for lot in self.lots:
            for kind in lot.kinds:
                params = kind.as_names(lot.params) if lot.params else [""] * len(kind.tensors)
                assert params is not None
                found.update(zip(kind.names, params, strict=True))
        return found

    def _place_in(self, lot: Lot, name: str) -> int | None:
        return lot.places.get(with_numbers_of(name, lot.params or lot.mains.pattern)) if name in self._tensors else None

    def _of_lot(self, lot: Lot, place: int) -> tuple[str, ...]:
        return tuple(lot.mains.some_as(lot.params, [place])) if lot.params else ()

    def entered(self, pattern: str) -> str | None:
        """What the tensors of a pattern that are in lots fill: patterns of parameters with their numbers, or nothing.

        None where none is in a lot.
        """
        if pattern not in self._lots:
            return None
        numbers: dict[str, list[set[int]]] = {}
        for lot in self._lots.get(pattern, ()):
            columns = numbers.setdefault(lot.params, [set() for _ in lot.mains.numbers])
            for column, found in zip(columns, lot.mains.numbers, strict=True):
                column.update(found)
        numbers.pop("", None)
        return ", ".join(with_numbers(params, map(sorted, columns)) for params, columns in numbers.items())

    def __iter__(self) -> Iterator[str]:
        kinds = (kind for lot in self.lots for kind in lot.kinds)
        return chain(self._single, (name for kind in kinds for name in kind.names if name not in self._single))

    def __len__(self) -> int:
        kinds = (kind for lot in self.lots for kind in lot.kinds)
        return len(self._single) + sum(len(kind.tensors) for kind in kinds)
