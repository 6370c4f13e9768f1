"""Enters tensors into the ledger by whole kinds instead of one by one: half a million in a fraction of a second.

What it does is what the account of single tensors does; what is unusual is left to that. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import Protocol

import msgspec

from firstlight.engine.model.rules import Matcher
from firstlight.engine.weights.accounts.gaps import SCALES, owners, shape_problem, weight_of
from firstlight.engine.weights.accounts.gaps import Problem as Mismatch
from firstlight.engine.weights.accounts.lots import Consumed, Lot, Parameters, Sources, with_numbers_of
from firstlight.engine.weights.accounts.padding import has_more_rows
from firstlight.engine.weights.formats.grid import Format, Packed
from firstlight.engine.weights.formats.registry import QUANTIZED_ROLES
from firstlight.engine.weights.formats.scheme import Scheme
from firstlight.engine.weights.names.listed import Group, Listed, Numbered
from firstlight.engine.weights.names.stock import Kind, some_of
from firstlight.engine.weights.packed import (
    BESIDE,
    COMPANIONS,
    FLOATS,
    LEFT_OUT,
    MAINS,
    UNKNOWN,
    Problem,
    fitting,
    left_out,
    part_names,
    suffixes,
    weight_name,
    with_columns,
)
from firstlight.engine.weights.source import Region, Source

FEWEST = 16  # members of a kind that are worth the trouble
_ENDINGS = (*(codes for codes, _ in MAINS), *COMPANIONS, *SCALES, *LEFT_OUT)  # of what may be a part of a weight
_name_of, _shape_of, _role_of = attrgetter("name"), attrgetter("shape"), attrgetter("role")


class Stock:
    """All tensors by kind, and which of them have been entered."""

    def __init__(self, kinds: Sequence[Kind]) -> None:
        self.kinds = {kind.pattern: kind for kind in kinds}
        self._taken: dict[str, list[Sequence[int]]] = {}

    def take(self, kinds: Iterable[Kind]) -> None:
        """These members are entered."""
        for kind in kinds:
            self._taken.setdefault(kind.pattern, []).append(kind.places)

    def left(self, pattern: str) -> Kind | None:
        """The members of a kind that are still to be entered."""
        kind, taken = self.kinds[pattern], self._taken.get(pattern, ())
        if sum(map(len, taken)) == len(kind.tensors):
            return None
        return kind.without(taken) if taken else kind

    def is_whole(self, kind: Kind) -> bool:
        """Whether these are all members of the kind."""
        return len(kind.tensors) == len(self.kinds[kind.pattern].tensors)

    @property
    def rest(self) -> list[Kind]:
        """What is still to be entered, in the order in which it comes in the checkpoint."""
        return [left for pattern in self.kinds if (left := self.left(pattern)) is not None]


class Book(Protocol):
    """The account while it is being written, as far as it is written here."""

    params: Parameters
    scheme: Scheme
    stock: Stock
    sources: Sources
    consumed: Consumed
    fills: dict[str, str]
    broken: dict[Problem, Listed]
    shapes: dict[Mismatch, list[tuple[Group, Group]]]
    twice: list[tuple[Group, Group]]
    plain: Listed
    strangers: list[Kind]


class _Weights(msgspec.Struct, frozen=True):
    """Weights of one kind that are all alike: their names' pattern, shape, first tensors, and, quantized, all tensors.

    `kinds`: all their tensors, each in the order of `mains`, and in that of the format's parts if there is a format.
    `problem`: why codes and scales are no weights.
    """

    pattern: str
    shape: tuple[int, ...]
    mains: Kind
    kinds: tuple[Kind, ...]
    format: Format | None = None
    problem: Problem | None = None

    @property
    def first(self) -> str:
        """The name of the first weight."""
        mains = self.mains
        return mains.first if self.pattern == mains.pattern else with_numbers_of(mains.first, self.pattern)

    def those(self, places: Sequence[int]) -> _Weights:
        """The weights at places."""
        if isinstance(places, range):
            return self
        mains, *kinds = (kind.those(places) for kind in (self.mains, *self.kinds))
        return msgspec.structs.replace(self, mains=mains, kinds=tuple(kinds))


def enter_kinds(book: Book, matcher: Matcher) -> None:
    """Enters members of kinds that are alike, at least `FEWEST` of them: sound ones, and ones with the same fault."""
    many = [kind for kind in book.stock.kinds.values() if len(kind.tensors) >= FEWEST and kind.is_plain]
    for kind in many:
        if not FLOATS.issuperset(kind.dtypes):
            for weights in _packed(kind, book.stock.kinds, book.scheme):
                _enter(book, weights, matcher)
    for kind in many:
        if not FLOATS.isdisjoint(kind.dtypes) and (left := book.stock.left(kind.pattern)) is not None:
            for _, named in book.scheme.of_kind(kind.pattern.removesuffix(".weight"), left):
                part = left.those(named)
                for places in part.alike(()):
                    alike = part.those(places)
                    if len(alike.tensors) >= FEWEST and alike.dtypes[0] in FLOATS:
                        _enter(book, _Weights(kind.pattern, alike.shapes[0], alike, (alike,)), matcher)


def _packed(kind: Kind, kinds: Mapping[str, Kind], scheme: Scheme) -> Iterator[_Weights]:
    """The quantized weights whose codes are a kind, those together that have the same parts of the same shapes."""
    weight = weight_name(kind.pattern)
    if weight is None or (not scheme.formats and weight == kind.pattern):
        return
    for format_, places in scheme.of_kind(weight.removesuffix(".weight"), kind):
        if format_ is not None or not scheme.formats:
            yield from _packed_as(kind.those(places), weight, format_, kinds)


def _packed_as(kind: Kind, weight: str, format_: Format | None, kinds: Mapping[str, Kind]) -> Iterator[_Weights]:
    """The same of codes that are all announced in one format, or in none."""
    beside: dict[str, tuple[Kind, Sequence[int]]] = {}
    for part in suffixes(format_) if format_ is not None else BESIDE:
        for pattern in part_names(weight, part):
            other = kinds.get(pattern)
            if other is None or any(other is known for known, _ in beside.values()):
                continue
            places = kind.beside(other)
            if places is None:
                return
            beside[part.suffix] = other, places
    for places in kind.alike(list(beside.values())):
        if len(places) >= FEWEST:
            there = {
                suffix: other.those(found if isinstance(places, range) else some_of(found, places))
                for suffix, (other, found) in beside.items()
                if found[places[0]] >= 0
            }
            codes = kind.those(places)
            if format_ is None and codes.dtypes[0] not in FLOATS:
                yield _Weights(weight, (), codes, (codes, *there.values()), problem=UNKNOWN)
            elif format_ is not None and (weights := _put_together(weight, codes, format_, there)) is not None:
                yield weights


def _put_together(weight: str, codes: Kind, format_: Format, there: Mapping[str, Kind]) -> _Weights | None:
    """Weights of which all tensors are alike, by how the names of their parts end; None for what is none or unusual."""
    first = {suffix: kind.tensors[0] for suffix, kind in there.items()}
    main = next((first[suffix] for suffix, kind in there.items() if kind.pattern == codes.pattern), None)
    if main is None or main.dtype in FLOATS:
        return None
    form = fitting(format_, main, first)
    if isinstance(form, tuple):
        return _Weights(weight, (), codes, tuple(there.values()), problem=form)
    shape = None if form.swapped else form.weight_shape(main.shape)
    if shape is None:
        return None
    parts = tuple(there[part.suffix] for part in form.parts)
    return _Weights(weight, shape, codes, parts, form)


def _enter(book: Book, weights: _Weights, matcher: Matcher) -> None:
    weights = _general(weights, matcher)
    if not len(weights.mains.tensors):
        return
    found = matcher.match_kind(weights.pattern, weights.first, lambda: weights.mains.as_names(weights.pattern) or ())
    if found is None:
        return
    rule, patterns = found
    if len(patterns) != 1 or rule.stacked or rule.transpose or rule.unpad:
        return
    pattern = patterns[0]
    shapes, places = book.params.shapes(pattern), book.params.places(pattern, weights.mains)
    if len(shapes) != 1 or places is None:
        _enter_each(book, weights, pattern, shapes)
        return
    if not isinstance(places, range) and weights.problem is None:
        known = set(map(int, places))
        beyond = weights.those([place for place in range(len(weights.mains.tensors)) if place not in known])
        book.strangers.extend(beyond.kinds)
        book.stock.take(beyond.kinds)
    weights = weights.those(places)
    if len(weights.mains.tensors):
        _enter_lot(book, weights, pattern, *shapes)


def _general(weights: _Weights, matcher: Matcher) -> _Weights:
    """The weights less those that rules of particular tensors speak of."""
    spoken = set(matcher.particular(weights.pattern, lambda: weights.mains.as_names(weights.pattern) or ()))
    if not spoken:
        return weights
    return weights.those([place for place in range(len(weights.mains.tensors)) if place not in spoken])


def _enter_lot(book: Book, weights: _Weights, pattern: str, wanted: tuple[int, ...]) -> None:
    """Weights of which each has its parameter, all parameters of one shape."""
    mains = weights.mains
    roles = book.params.covered(pattern, mains, wanted)
    if roles is None:
        return
    filled = mains.as_names(pattern) if book.sources.singles else ()
    if filled is None or not book.sources.singles.keys().isdisjoint(filled):
        return
    others = book.sources.of(pattern) if book.sources.filled(pattern) else set()
    others = {row for row in mains.rows if row in others} if others else others
    if weights.problem is not None:
        if not others:
            _enter_broken(book, weights, pattern, weights.problem)
        return
    if weights.format is None and not _may_be_plain(book.scheme, len(wanted), roles):
        return
    shape = _with_columns(weights, wanted)
    lot = Lot(pattern, weights.pattern, shape, mains, weights.kinds, weights.format)
    if others:
        if len(others) < len(mains.tensors) or math.prod(shape) != math.prod(wanted):
            return
        book.twice.append((Numbered(pattern, mains.rows), mains.group))
    else:
        if shape != wanted and not _enter_misfits(book, lot, wanted):
            return
        book.params.cover(pattern)
        book.sources.add(lot)
    book.consumed.add(lot)
    _note(book, weights, pattern, len(wanted), roles)


def _enter_misfits(book: Book, lot: Lot, wanted: tuple[int, ...]) -> bool:
    """Notes that weights have another shape than their parameters; False where that is for the single account."""
    name = with_numbers_of(lot.mains.first, lot.params)
    param = book.params[name]
    if has_more_rows(param) or (lot.format is not None and lot.format.padding > 1):
        return False
    seen = msgspec.structs.replace(lot.mains.tensors[0], shape=lot.shape)
    problem = shape_problem(seen, param, lot.source(0))
    if problem is None:
        return False
    book.shapes.setdefault(problem, []).append((lot.mains.group, Numbered(lot.params, lot.mains.rows)))
    return True


def _enter_broken(book: Book, weights: _Weights, pattern: str, problem: Problem) -> None:
    """Codes that are no weights, all for one reason: the parameters are theirs, and nothing can be read."""
    (codes,) = (kind for kind in weights.kinds if kind.pattern == weights.mains.pattern)
    book.params.cover(pattern)
    lot = Lot(pattern, weights.pattern, (), codes, (codes,))
    book.sources.add(lot)
    book.consumed.add(lot)
    book.broken.setdefault(problem, Listed()).add(codes.group)
    for kind in weights.kinds:
        if kind is not codes:
            book.consumed.add(Lot("", "", (), kind, (kind,)))
    book.stock.take(weights.kinds)
    if book.stock.is_whole(codes):
        book.fills[codes.pattern] = pattern


def _enter_each(book: Book, weights: _Weights, pattern: str, shapes: set[tuple[int, ...]]) -> None:
    """Weights of which it is not known at once whether all parameters are there, name by name."""
    names = weights.mains.as_names(weights.pattern)
    filled = weights.mains.as_names(pattern)
    if weights.problem is not None or len(shapes) != 1 or names is None or filled is None:
        return
    (shape,) = shapes
    params = list(map(book.params.get, filled))
    if shape != _with_columns(weights, shape) or not book.sources.lacks_all(pattern, filled) or not all(params):
        return
    if set(map(_shape_of, params)) != {shape}:
        return
    roles = frozenset(map(_role_of, params))
    if weights.format is None and not _may_be_plain(book.scheme, len(shape), roles):
        return
    region: Region = tuple((0, size, 1) for size in shape)
    ones = list(zip(filled, strict=True))
    packs: Iterable[Packed | None] = repeat(None)
    if weights.format is not None:
        parts = zip(*(kind.tensors for kind in weights.kinds), strict=True)
        packs = map(Packed, names, repeat(shape), repeat(weights.format), parts)
    for kind in weights.kinds:
        book.consumed.enter(zip(kind.names, ones, strict=True))
    sources = map(Source, weights.mains.names, repeat(region), repeat(False), repeat(False), packs)
    book.sources.enter(zip(filled, sources, strict=True))
    _note(book, weights, pattern, len(shape), roles)


def _note(book: Book, weights: _Weights, pattern: str, dims: int, roles: frozenset[str]) -> None:
    """These weights are entered; matrices stored plain are noted where the configuration calls them quantized."""
    book.stock.take(weights.kinds)
    book.fills.update((kind.pattern, pattern) for kind in weights.kinds if book.stock.is_whole(kind))
    is_matrix = dims == 2 and bool(book.scheme.groups) and not roles.isdisjoint(QUANTIZED_ROLES)
    if weights.format is None and is_matrix and book.scheme.of(weights.first.removesuffix(".weight")) is not None:
        book.plain.add(weights.mains.group)


def _with_columns(weights: _Weights, wanted: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the weights, less the columns of a last word that is part empty; none where parts do not fit it."""
    if weights.format is None or weights.format.padding == 1:
        return weights.shape
    parts = tuple(kind.tensors[0] for kind in weights.kinds)
    fitted = with_columns(Packed(weights.first, weights.shape, weights.format, parts), wanted[-1]) if wanted else None
    return fitted.shape if fitted is not None else ()


def _may_be_plain(scheme: Scheme, dims: int, roles: frozenset[str]) -> bool:
    """Whether it is known of all tensors alike, stored plain, if the configuration calls them quantized."""
    return dims != 2 or not scheme.groups or roles.isdisjoint(QUANTIZED_ROLES) or roles <= QUANTIZED_ROLES


def strangers(kinds: Sequence[Kind], matcher: Matcher, scheme: Scheme) -> list[Kind]:
    """Kinds of which nothing can be consumed: weights that no rule speaks of, and the scales beside these alone.

    Of a crowd that is everything that no rule speaks of, whatever it is.
    """
    strange: dict[str, str] = {}
    known: set[str] = set()
    crowds = [kind for kind in kinds if kind.kinds > 1]
    kinds = [kind for kind in kinds if kind.kinds == 1]
    for kind in kinds:
        weight = weight_name(kind.pattern)
        if weight is not None and _is_strange(kind, weight, matcher, scheme):
            strange[kind.pattern] = weight
        elif weight is not None:
            known.add(weight)
    parts = {part.suffix: part for format_ in scheme.formats for part in suffixes(format_)}
    weights = {weight for weight in strange.values() if weight not in known}
    beside = {name for weight in weights for part in parts.values() for name in part_names(weight, part)}
    found = [
        kind
        for kind in kinds
        if kind.pattern in strange or (kind.pattern in beside and matcher.knows_none_of(kind.pattern))
    ]
    unknown = [crowd.those(crowd.chosen(partial(_unknown, matcher))) for crowd in crowds]
    return [*found, *(part for part in unknown if len(part.tensors))]


def _unknown(matcher: Matcher, patterns: Sequence[str]) -> list[bool]:
    """Whether no rule speaks of the tensors of each pattern, nor of weights that they may be parts of."""
    beginnings, unknown = matcher.beginnings, [True] * len(patterns)
    asked = [place for place, pattern in enumerate(patterns) if pattern.startswith(beginnings)]
    weights = [weight_of(patterns[place]) if patterns[place].endswith(_ENDINGS) else "" for place in asked]
    there = dict.fromkeys(weights)
    of_weights = dict(zip(there, matcher.knows(there), strict=True))
    known = matcher.knows(patterns[place] for place in asked)
    for place, weight, is_known in zip(asked, weights, known, strict=True):
        unknown[place] = not (is_known or of_weights[weight])
    return unknown


def _is_strange(kind: Kind, weight: str, matcher: Matcher, scheme: Scheme) -> bool:
    """Whether no rule speaks of the tensors of a kind, which hold weights as they are, or codes in a known format."""
    if "*" not in kind.pattern and matcher.match(kind.pattern) is not None:  # a name: sooner asked than a kind
        return False
    if not matcher.knows_none_of(kind.pattern):
        return False
    if FLOATS.issuperset(kind.dtypes):  # no codes, whatever they are called
        return True
    return bool(scheme.formats) and matcher.knows_none_of(weight)


def lone_scales(stock: Stock, matcher: Matcher) -> list[Kind]:
    """Of what is still to be entered the scales beside which there is no tensor that they could belong to."""
    found = []
    for kind in stock.rest:
        is_scale = kind.pattern.endswith(SCALES) and left_out(kind.pattern) is None
        if not is_scale or not kind.is_plain or not matcher.knows_none_of(kind.pattern):
            continue
        owned: set[int] = set()
        for pattern in owners(kind.pattern):
            places = kind.beside(stock.kinds[pattern]) if pattern in stock.kinds else ()
            if places is None:
                owned.update(range(len(kind.tensors)))
            else:
                owned.update(place for place, other in enumerate(places) if other >= 0)
        alone = [place for place in range(len(kind.tensors)) if place not in owned]
        if len(alone) >= FEWEST:
            found.append(kind.those(alone if owned else range(len(kind.tensors))))
    return found
