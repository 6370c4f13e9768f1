"""The account of tensors by the ten thousand: kinds whose members are all sound are entered at once.

What it does is what the account of single tensors does; a kind about which anything is unusual is left to that. No
torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress, repeat
from operator import attrgetter
from typing import Protocol

import msgspec

from firstlight.engine.model.rules import Matcher
from firstlight.engine.weights.formats.grid import Format, Packed
from firstlight.engine.weights.formats.registry import QUANTIZED_ROLES
from firstlight.engine.weights.formats.scheme import Scheme
from firstlight.engine.weights.header import TensorInfo
from firstlight.engine.weights.lots import Consumed, Lot, Parameters, Sources, with_numbers_of
from firstlight.engine.weights.packed import (
    FLOATS,
    Problem,
    fitting,
    part_names,
    suffixes,
    weight_name,
    with_columns,
)
from firstlight.engine.weights.source import Region, Source
from firstlight.engine.weights.stock import Kind

FEWEST = 16  # members of a kind that are worth the trouble
_name_of, _shape_of, _role_of = attrgetter("name"), attrgetter("shape"), attrgetter("role")


class Book(Protocol):
    """The account while it is being written, as far as it is written here."""

    params: Parameters
    scheme: Scheme
    sources: Sources
    consumed: Consumed
    fills: dict[str, str]
    rest: dict[str, Kind]
    broken: dict[Problem, list[TensorInfo]]
    beside: set[str]
    entered: set[str]
    plain: list[str]


class _Weights(msgspec.Struct, frozen=True):
    """Weights of one kind: their names' pattern, shape, first tensors, and, quantized, all of their tensors.

    `kinds`: all their tensors. `whole`: patterns of which no other tensor is; `rest`: what else there is of others.
    `problem`: why codes and scales, all alike, are no weights.
    """

    pattern: str
    shape: tuple[int, ...]
    mains: Kind
    kinds: tuple[Kind, ...]
    whole: tuple[str, ...]
    format: Format | None = None
    parts: tuple[Sequence[TensorInfo], ...] = ()
    rest: tuple[Kind, ...] = ()
    problem: Problem | None = None


def enter_kinds(book: Book, kinds: Iterable[Kind], matcher: Matcher) -> None:
    """Enters every kind of at least `FEWEST` tensors that is sound from the first member to the last."""
    by_pattern = {kind.pattern: kind for kind in kinds}
    many = [kind for kind in by_pattern.values() if len(kind.tensors) >= FEWEST and kind.is_uniform and kind.is_plain]
    for kind in many:
        if kind.dtypes[0] not in FLOATS and (weights := _packed(kind, by_pattern, book.scheme)) is not None:
            _enter(book, weights, matcher)
    for kind in many:
        if kind.dtypes[0] in FLOATS and kind.first not in book.consumed:
            _enter(book, _Weights(kind.pattern, kind.shapes[0], kind, (kind,), (kind.pattern,)), matcher)


def _packed(kind: Kind, kinds: Mapping[str, Kind], scheme: Scheme) -> _Weights | None:
    """The quantized weights whose codes are a kind, if each has the same parts of the same shapes.

    Those that lack a part, as where a shard is missing, are left to the account of single tensors.
    """
    weight = weight_name(kind.pattern)
    if weight is None or scheme.numbered:
        return None
    format_ = scheme.of((weight_name(kind.first) or "").removesuffix(".weight"))
    if format_ is None:
        return None
    each: dict[str, tuple[Kind, Sequence[int]]] = {}
    for part in suffixes(format_):
        for pattern in part_names(weight, part):
            other = kinds.get(pattern)
            if other is None:
                continue
            places = kind.beside(other) if other is kind or other.is_uniform else None
            if places is None:
                return None
            each[part.suffix] = other, places
    if not all(isinstance(places, range) for _, places in each.values()):
        complete = [min(found) >= 0 for found in zip(*(places for _, places in each.values()), strict=True)]
        if sum(complete) < FEWEST:
            return None
        each = {suffix: (other, list(compress(places, complete))) for suffix, (other, places) in each.items()}
        kind = kind.those(complete)
    there = {suffix: other.at(places) for suffix, (other, places) in each.items()}
    kinds_of, rest = [], []
    for suffix, (other, places) in each.items():
        if len(there[suffix]) == len(other.tensors):
            kinds_of.append(other)
            continue
        mine = set(places)
        chosen = [place in mine for place in range(len(other.tensors))]
        kinds_of.append(other.those(chosen))
        rest.append(other.those([not one for one in chosen]))
    more = {kind.pattern for kind in rest}
    whole = tuple(kind.pattern for kind in kinds_of if kind.pattern not in more)
    first = {suffix: found[0] for suffix, found in there.items()}
    main = next((first[suffix] for suffix, (other, _) in each.items() if other.pattern == kind.pattern), None)
    form = fitting(format_, main, first) if main is not None else None
    if isinstance(form, tuple) and main is not None:
        return _Weights(weight, (), kind, tuple(kinds_of), whole, rest=tuple(rest), problem=form)
    if not isinstance(form, Format) or form.swapped:
        return None
    shape = form.weight_shape(kind.shapes[0])
    if shape is None:
        return None
    parts = tuple(there[part.suffix] for part in form.parts)
    return _Weights(weight, shape, kind, tuple(kinds_of), whole, form, parts, tuple(rest))


def _enter(book: Book, weights: _Weights, matcher: Matcher) -> None:
    mains = weights.mains
    first = mains.first if weights.pattern == mains.pattern else with_numbers_of(mains.first, weights.pattern)
    found = matcher.match_kind(weights.pattern, first, lambda: mains.as_names(weights.pattern) or ())
    if found is None:
        return
    rule, patterns = found
    if len(patterns) != 1 or rule.stacked or rule.transpose or rule.unpad:
        return
    pattern = patterns[0]
    shapes = book.params.shapes(pattern)
    if weights.problem is not None:
        _enter_broken(book, weights, pattern, shapes, weights.problem)
        return
    shape = _with_columns(weights, first, shapes)
    if shapes != {shape}:
        return
    roles = book.params.covered(pattern, mains, shape)
    is_lot = roles is not None and pattern not in book.fills.values()
    if is_lot and (weights.format is not None or _is_meant(book, weights, len(shape), roles)):
        lot = Lot(pattern, weights.pattern, shape, mains, weights.kinds, weights.format, weights.parts)
        book.params.cover(pattern)
        book.sources.add(lot)
        book.consumed.add(lot)
    elif is_lot or not _enter_each(book, weights, pattern, shape, roles):
        return
    book.fills.update(dict.fromkeys(weights.whole, pattern))
    book.rest.update((kind.pattern, kind) for kind in weights.rest)


def _enter_broken(book: Book, weights: _Weights, pattern: str, shapes: set[tuple[int, ...]], problem: Problem) -> None:
    """Codes that are no weights, all for one reason: the parameters are theirs, and nothing can be read."""
    mains = weights.mains
    if len(shapes) != 1 or pattern in book.fills.values() or not book.params.covered(pattern, mains, *shapes):
        return
    (codes,) = (kind for kind in weights.kinds if kind.pattern == mains.pattern)
    lot = Lot(pattern, weights.pattern, (), codes, (codes,))
    book.params.cover(pattern)
    book.sources.add(lot)
    book.consumed.add(lot)
    book.broken.setdefault(problem, []).extend(codes.tensors)
    for kind in weights.kinds:
        if kind is not codes:
            book.beside.update(kind.names)
    book.fills.update({name: pattern for name in weights.whole if name == codes.pattern})
    book.entered.update(name for name in weights.whole if name != codes.pattern)
    book.rest.update((kind.pattern, kind) for kind in weights.rest)


def _enter_each(
    book: Book, weights: _Weights, pattern: str, shape: tuple[int, ...], roles: frozenset[str] | None
) -> bool:
    """Weights of which some parameters or parts may be lacking, name by name; whether that could be done.

    `roles`: of the parameters, where all are known to be there and of that shape.
    """
    names = weights.mains.as_names(weights.pattern)
    filled = weights.mains.as_names(pattern)
    if names is None or filled is None or not book.sources.lacks_all(pattern, filled):
        return False
    if roles is None:
        params = list(map(book.params.get, filled))
        if not all(params) or set(map(_shape_of, params)) != {shape}:
            return False
        roles = frozenset(map(_role_of, params))
    if weights.format is None and not _is_meant(book, weights, len(shape), roles):
        return False
    region: Region = tuple((0, size, 1) for size in shape)
    ones = list(zip(filled, strict=True))
    if weights.format is None:
        packs: Iterable[Packed | None] = repeat(None)
        book.consumed.enter(zip(weights.mains.names, ones, strict=True))
    else:
        packs = map(Packed, names, repeat(shape), repeat(weights.format), zip(*weights.parts, strict=True))
        for part in weights.parts:
            book.consumed.enter(zip(map(_name_of, part), ones, strict=True))
    sources = map(Source, weights.mains.names, repeat(region), repeat(False), repeat(False), packs)
    book.sources.enter(zip(filled, sources, strict=True))
    return True


def _with_columns(weights: _Weights, name: str, shapes: set[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of the weights, less the columns of a last word that is part empty; none where parts do not fit it."""
    if weights.format is None or weights.format.padding == 1 or len(shapes) != 1:
        return weights.shape
    first = Packed(name, weights.shape, weights.format, tuple(part[0] for part in weights.parts))
    (wanted,) = shapes
    fitted = with_columns(first, wanted[-1]) if wanted else None
    return fitted.shape if fitted is not None else ()


def _is_meant(book: Book, weights: _Weights, dims: int, roles: frozenset[str] | None) -> bool:
    """Whether tensors stored plain may be so; what the configuration calls quantized is noted, as in single account."""
    if dims != 2 or not book.scheme.groups or roles is None or roles.isdisjoint(QUANTIZED_ROLES):
        return True
    if book.scheme.numbered or not roles <= QUANTIZED_ROLES:
        return False
    if book.scheme.of(weights.mains.first.removesuffix(".weight")) is not None:
        book.plain.extend(weights.mains.names)
    return True


def strangers(kinds: Sequence[Kind], matcher: Matcher, scheme: Scheme) -> list[Kind]:
    """Kinds of which nothing can be consumed: weights that no rule speaks of, and the scales beside these alone."""
    strange: dict[str, str] = {}
    known: set[str] = set()
    for kind in kinds:
        weight = weight_name(kind.pattern)
        if weight is not None and _is_strange(kind, weight, matcher, scheme):
            strange[kind.pattern] = weight
        elif weight is not None:
            known.add(weight)
    parts = {part.suffix: part for format_ in scheme.formats for part in suffixes(format_)}
    weights = {weight for weight in strange.values() if weight not in known}
    beside = {name for weight in weights for part in parts.values() for name in part_names(weight, part)}
    return [
        kind
        for kind in kinds
        if kind.pattern in strange or (kind.pattern in beside and matcher.knows_none_of(kind.pattern))
    ]


def _is_strange(kind: Kind, weight: str, matcher: Matcher, scheme: Scheme) -> bool:
    """Whether no rule speaks of the tensors of a kind, which hold weights as they are, or codes in a known format."""
    if not matcher.knows_none_of(kind.pattern):
        return False
    if FLOATS.issuperset(kind.dtypes):  # no codes, whatever they are called
        return True
    return bool(scheme.formats) and matcher.knows_none_of(weight)
