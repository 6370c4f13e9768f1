"""The two-way ledger: where every tensor of the checkpoint went, and where every parameter came from.

Less than 100 % on either side means no start. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, gathered, listing, note, several, warning
from firstlight.engine.model.backwards import Backwards
from firstlight.engine.model.rules import Match, Matcher, WeightRule
from firstlight.engine.model.spec import ModelSpec, Param
from firstlight.engine.weights.accounts.gaps import (
    Problem,
    left_over,
    lost,
    missing_findings,
    paired,
    scale_findings,
    shape_problem,
    split_scales,
    twice_findings,
    unconsumed_findings,
    wrong,
)
from firstlight.engine.weights.accounts.lots import Consumed, Parameters, Sources, experts
from firstlight.engine.weights.accounts.padding import has_more_rows, is_zero_bias, padded_findings
from firstlight.engine.weights.accounts.renamed import renamed
from firstlight.engine.weights.accounts.said import MODELOPT, two_algorithms, two_levels, unread, without_consequences
from firstlight.engine.weights.accounts.wholesale import Stock, enter_kinds, lone_scales, strangers
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.files.header import TensorInfo
from firstlight.engine.weights.files.index import CONFIG_LIMIT_BYTES, read_object
from firstlight.engine.weights.formats.announced import announced
from firstlight.engine.weights.formats.grid import Packed
from firstlight.engine.weights.formats.registry import QUANTIZED_ROLES
from firstlight.engine.weights.formats.scheme import Scheme
from firstlight.engine.weights.formats.telltale import by_files, by_names
from firstlight.engine.weights.names.listed import Group, Listed
from firstlight.engine.weights.names.naming import by_pattern, pattern_of, pattern_range
from firstlight.engine.weights.names.stock import Kind, stock
from firstlight.engine.weights.packed import (
    FLOATS,
    group,
    left_out,
    misfit,
    with_columns,
)
from firstlight.engine.weights.packed import Problem as Mismatch
from firstlight.engine.weights.source import Region, Source

__all__ = ["FLOATS", "Ledger", "Region", "Source", "account", "by_pattern", "pattern_range"]

MANY = 20_000  # tensors from which on entries of whole kinds are made only when they are asked for
ZERO_BIAS = "a bias of zeros, which exporters of codes in words put beside each weight"


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """`sources`: parameter -> where it comes from. `consumed`: tensor -> parameters. `left_out`: tensor -> reason.

    A quantized weight's tensors are consumed by the parameters that it fills, scales and all. `fills`: of kinds that
    were entered at once, pattern of tensor names -> pattern of parameters, with the same numbers in both; `strangers`
    are patterns of which nothing is consumed. Of very many
    tensors `sources` and `consumed` make entries when they are asked for (`lots.py`), and are no dicts; so do `missing`
    and `unconsumed` with names, pattern by pattern (`listed.py`).
    """

    sources: Mapping[str, Source]
    consumed: Mapping[str, tuple[str, ...]]
    left_out: dict[str, str]
    missing: Sequence[str]
    unconsumed: Sequence[str]
    findings: tuple[Finding, ...]
    fills: dict[str, str] = {}
    strangers: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Names that came as JSON are what they were when they went."""
        for field in ("missing", "unconsumed"):
            if isinstance(names := getattr(self, field), list):
                msgspec.structs.force_setattr(self, field, tuple(names))

    @property
    def complete(self) -> bool:
        return not any(finding.severity == "fatal" for finding in self.findings)

    def refuse_if_incomplete(self) -> None:
        """Raises `Refused` with every fatal finding; called before anything starts."""
        broken = [finding for finding in self.findings if finding.severity == "fatal"]
        if broken:
            raise Refused(broken)

    def sources_of(self, names: Sequence[str]) -> list[Source]:
        """Where each of many parameters comes from. Raises KeyError for one that has no source."""
        if isinstance(self.sources, Sources):
            return self.sources.several(names)
        return [self.sources[name] for name in names]

    def summary(self) -> dict[str, int]:
        """Counts for reports: both sides of the account."""
        return {
            "tensors": len(self.consumed) + len(self.left_out) + len(self.unconsumed),
            "tensors_consumed": len(self.consumed),
            "tensors_left_out": len(self.left_out),
            "tensors_unconsumed": len(self.unconsumed),
            "parameters": len(self.sources) + len(self.missing),
            "parameters_filled": len(self.sources),
            "parameters_missing": len(self.missing),
        }


def account(checkpoint: Checkpoint, spec: ModelSpec, matcher: Matcher, kinds: Sequence[Kind] | None = None) -> Ledger:
    """Matches every tensor to parameters and every parameter to its tensor; nothing is guessed.

    `kinds`: all tensors by kind, if the caller has them; kinds without faults are entered as a whole. Quantized weights
    are assembled first from codes and scales, by configuration and headers. The only tensor data read are two tied
    heads, to compare them, and the tails of padded tensors.
    """
    scheme, findings = scheme_of(checkpoint)
    book = _Book(Parameters(spec), checkpoint, scheme, Stock(stock(checkpoint.tensors) if kinds is None else kinds))
    enter_kinds(book, matcher)
    strange = strangers(book.stock.rest, matcher, scheme)
    book.strangers += strange
    book.stock.take(strange)
    book.lone = lone_scales(book.stock, matcher)
    book.stock.take(book.lone)
    rest = (tensor for kind in book.stock.rest for tensor in kind.tensors)
    others = {tensor.name: tensor for tensor in rest}
    grouped = group(others, scheme, book.broken, checkpoint.tensors)
    book.findings.extend((*findings, *grouped.findings))
    for tensor in others.values():
        if tensor.name in grouped.companions:
            continue
        packed = grouped.weights.get(tensor.name)
        if packed is not None:
            book.enter_packed(tensor, packed, matcher.match(packed.name))
        else:
            broken = grouped.broken.get(tensor.name)
            book.enter(tensor, matcher.match(broken or tensor.name), sound=broken is None)
    book.leave_out(grouped.companions)
    book.settle_head(spec)
    ledger = book.close(spec, matcher, lost(checkpoint, matcher, book.params))
    said = ledger.findings
    if not scheme.groups and not findings and (tool := by_names(Listed.firsts(ledger.unconsumed))) is not None:
        findings, said = (tool,), (tool, *said)
    return msgspec.structs.replace(ledger, findings=gathered(without_consequences(said, findings)))


def scheme_of(checkpoint: Checkpoint) -> tuple[Scheme, tuple[Finding, ...]]:
    """The quantization scheme of the configuration, or why it is not supported."""
    try:
        beside = None
        if MODELOPT in checkpoint.side_files:
            beside, _ = read_object(Path(checkpoint.directory), MODELOPT, CONFIG_LIMIT_BYTES)
        scheme = announced(checkpoint.config, beside)
        tool = by_files(checkpoint.side_files) if not scheme.groups else None
        if tool is not None:
            return Scheme(), (tool,)
        said = (*two_algorithms(checkpoint.config, beside), *two_levels(checkpoint.config), *unread(scheme))
        return scheme, said
    except Refused as refused:
        return Scheme(), refused.findings


class _Book:
    """The ledger while it is being built."""

    def __init__(self, params: Parameters, checkpoint: Checkpoint, scheme: Scheme, stock: Stock) -> None:
        self.params = params
        self.checkpoint = checkpoint
        self.scheme = scheme
        self.stock = stock
        self.sources = Sources()
        self.consumed = Consumed(checkpoint.tensors)
        self.left_out: dict[str, str] = {}
        self.unconsumed: list[str] = []
        self.findings: list[Finding] = []
        self.problems: dict[Problem, list[tuple[str, str]]] = {}
        self.shapes: dict[Problem, list[tuple[Group, Group]]] = {}  # the same of kinds
        self.doubles: list[tuple[str, str]] = []
        self.twice: list[tuple[Group, Group]] = []  # the same of kinds
        self.padded: dict[str, Param] = {}  # longer tensor -> the parameter that its first rows are
        self.regions: dict[tuple[int, ...], Region] = {}
        self.fills: dict[str, str] = {}
        self.broken: dict[Mismatch, Listed] = {}  # why codes are no weights -> these codes
        self.plain = Listed()  # though announced as quantized
        self.companions: set[str] = set()
        self.strangers: list[Kind] = []  # of which nothing is consumed
        self.lone: list[Kind] = []  # scales of nothing

    def enter(self, tensor: TensorInfo, match: Match | None, sound: bool = True) -> None:
        """A tensor that is a weight as it is; one that is not `sound` has been found wrong already."""
        if match is None:
            self.unconsumed.append(tensor.name)
            return
        if not match.params:
            self.left_out[tensor.name] = match.rule.reason
            return
        if not match.rule.stacked and len(match.params) == 1 and self._whole(tensor, match):
            return
        filled = self._fill(tensor, match, None) if sound else self._broken(tensor, match)
        if filled and sound and not _is_plain(tensor, self.params.get(filled[0])):
            self._wrong(("unsupported-format", "", ", ".join(sorted(FLOATS)), tensor.dtype), tensor, filled[0])
        elif filled and sound and self._is_matrix(filled[0]):
            self._not_quantized(tensor)

    def enter_packed(self, main: TensorInfo, packed: Packed, match: Match | None) -> None:
        """A weight that lies in several tensors, of which `main` is the first."""
        if match is None or not match.params:
            for part in packed.tensors:
                if match is None:
                    self.unconsumed.append(part.name)
                else:
                    self.left_out[part.name] = match.rule.reason
            return
        param = self.params.get(match.params[0].replace("{e}", "0"))
        if match.rule.transpose and packed.format.of_linear:
            expected = "plain weights, or FP8 or INT8 codes"
            self._wrong(("unsupported-format", match.rule.params[0], expected, packed.format.describe()), main, "")
        if param is not None and packed.format.padding > 1:
            packed = with_columns(packed, param.shape[-1]) or packed
            if wrong_part := misfit(packed):
                part, shape = wrong_part
                problem = ("shape-mismatch", pattern_of(param.name), str(list(shape)), str(list(part.shape)))
                self._wrong(problem, part, param.name)
        filled: Sequence[str] = ()
        if len(match.params) == 1 and not match.rule.stacked and not packed.format.swapped:
            filled = match.params if self._whole(main, match, packed) else ()
        filled = filled or self._fill(main, match, packed)
        for part in packed.tensors[1:] if filled else ():
            self.consumed[part.name] = tuple(filled)
        if not filled:
            self.unconsumed.extend(part.name for part in packed.tensors[1:])

    def _fill(self, tensor: TensorInfo, match: Match, packed: Packed | None) -> list[str]:
        """Enters every parameter that a tensor (or the packed weight it begins) fills; returns their names."""
        filled: list[str] = []
        sound, elements = True, 0
        seen = tensor if packed is None else msgspec.structs.replace(tensor, shape=_rule_shape(packed))
        for name, source in expand(seen, match, self.params):
            param = self.params.get(name)
            if param is None:
                continue
            if name in self.sources:
                self.doubles.append((name, tensor.name))
            elif problem := shape_problem(seen, param, source):
                self._wrong(problem, tensor, name)
                sound = False
            filled.append(name)
            elements += param.elements
            self.sources.setdefault(name, source if packed is None else _of_packed(source, packed))
        if not filled:
            self.unconsumed.append(tensor.name)
            return filled
        self.consumed[tensor.name] = tuple(filled)
        if sound and elements != math.prod(seen.shape):
            self._wrong(left_over(seen, filled, elements), tensor, filled[0])
        return filled

    def _broken(self, tensor: TensorInfo, match: Match) -> list[str]:
        """Marks the parameters of a weight that cannot be assembled; the reason is a finding already."""
        filled = [name for param in match.params for name in experts(param, self.params) if name in self.params]
        for name in filled:
            self.sources.setdefault(name, Source(tensor.name, ()))
        self.consumed[tensor.name] = tuple(filled)
        return filled

    def _whole(self, tensor: TensorInfo, match: Match, packed: Packed | None = None) -> bool:
        """Enters a tensor that is exactly one parameter, as most are; False if anything about it is unusual."""
        (name,) = match.params
        param = self.params.get(name)
        shape = tensor.shape if packed is None else packed.shape
        if param is None or name in self.sources or match.rule.transpose:
            return False
        if packed is None and not _is_plain(tensor, param):
            return False
        if _is_longer(shape, param.shape) and (has_more_rows(param) or (packed is None and match.rule.unpad)):
            self.padded[tensor.name] = param
            self.sources[name] = Source(tensor.name, tuple((0, size, 1) for size in param.shape), packed=packed)
            self.consumed[tensor.name] = match.params
            return True
        if shape != param.shape:
            return False
        region = self.regions.get(shape)
        if region is None:
            region = self.regions[shape] = tuple((0, size, 1) for size in shape)
        self.sources[name] = Source(tensor.name, region, packed=packed)
        self.consumed[tensor.name] = match.params
        if packed is None and self._is_matrix(name):
            self._not_quantized(tensor)
        return True

    def _is_matrix(self, name: str) -> bool:
        """Whether a parameter is of a kind that is quantized (a matrix)."""
        param = self.params[name]
        return len(param.shape) == 2 and param.role in QUANTIZED_ROLES

    def _not_quantized(self, tensor: TensorInfo) -> None:
        if self.scheme.groups and self.scheme.of(tensor.name.removesuffix(".weight")) is not None:
            self.plain.append(tensor.name)

    def leave_out(self, companions: set[str]) -> None:
        """Leaves out unconsumed scales: those of activations and caches, with a reason, and those of broken weights."""
        gone = set(self.unconsumed) | self.left_out.keys()
        self.companions = {name for name in companions if name not in self.consumed and name not in gone}
        unknown = []
        for name in self.unconsumed:
            reason = left_out(name) if self.scheme.method else None
            if reason is None and self._is_spare(name):
                reason = ZERO_BIAS
            if reason is None:
                unknown.append(name)
            else:
                self.left_out[name] = reason
        self.unconsumed = unknown
        for kind in list(self.strangers):
            if kind.pattern.endswith(".bias") and all(map(self._is_spare, kind.names)):
                self.left_out.update(dict.fromkeys(kind.names, ZERO_BIAS))
                self.strangers.remove(kind)
        if self.plain:
            self.findings.append(self._said_quantized())

    def _is_spare(self, name: str) -> bool:
        try:
            return bool(self.scheme.formats) and is_zero_bias(self.checkpoint, name)
        except Refused:  # why it cannot be read is said elsewhere; it stays unconsumed
            return False

    def _said_quantized(self) -> Finding:
        """Reports modules that are quantized by the configuration but stored plain; headers decide."""
        none = self.sources.are_plain
        say = warning if none else note
        return say(
            "conflicting-flag",
            f"{self.plain.shown()}: {several(len(self.plain), 'tensor is', 'tensors are')} stored plain, though "
            f"config.json counts {'it' if len(self.plain) == 1 else 'them'} among the quantized "
            f"({self.scheme.method}); read as stored",
            file="config.json",
            **listing(self.plain),
            expected=", ".join(format_.describe() for format_ in self.scheme.formats),
            found=self.checkpoint.tensors[self.plain[0]].dtype,
            next="remove quantization_config if the copy was unpacked" if none else "nothing: headers are the truth",
        )

    def _wrong(self, problem: Problem, tensor: TensorInfo, param: str) -> None:
        self.problems.setdefault(problem, []).append((tensor.name, param))

    def settle_head(self, spec: ModelSpec) -> None:
        """Uses the output head in the file whatever the tie flag says; else the embedding, if the flag allows."""
        embed, head = self.sources.get("embed.weight"), self.sources.get("head.weight")
        if embed is None or not spec.tied_head:
            return
        if head is None:
            self.sources["head.weight"] = msgspec.structs.replace(embed, tied=True)
            self.consumed[embed.tensor] = (*self.consumed[embed.tensor], "head.weight")
            self.findings.append(
                note("tied-head", f"head.weight <- {embed.tensor}: tied, stored once", tensors=(embed.tensor,))
            )
            return
        try:
            same = equal_tensors(self.checkpoint, head.tensor, embed.tensor)
        except Refused as refused:
            self.findings.extend(refused.findings)
            return
        say = note if same else warning
        self.findings.append(
            say(
                "tied-head" if same else "conflicting-flag",
                f"tie_word_embeddings is true but the checkpoint brings {head.tensor}, "
                + (
                    "equal to the embedding"
                    if same
                    else "which differs from the embedding; the head in the file is used"
                ),
                file=self.checkpoint.tensors[head.tensor].file,
                tensors=(head.tensor, embed.tensor),
                expected="no head of its own, or tie_word_embeddings false",
                found="equal copy" if same else "different values",
                next="nothing to do" if same else "set tie_word_embeddings to false where the head is meant",
            )
        )

    def close(self, spec: ModelSpec, matcher: Matcher, lost: Mapping[str, Mapping[tuple[int, ...], str]]) -> Ledger:
        missing = self.params.missing(self.sources)
        tensors = self.checkpoint.tensors
        self.findings.extend(self._misfits())
        sources = [self.sources[param.name] for param in self.padded.values()]
        codes = {source.tensor: source.packed for source in sources if source.packed is not None}
        self.findings.extend(padded_findings(self.checkpoint, self.padded, codes))
        self.findings.extend(twice_findings((*self.twice, *paired(self.doubles)), self.sources, tensors))
        self.consumed.update((name, ()) for name in self.companions - self.consumed.keys() - self.left_out.keys())
        scales, unknown = split_scales(self.unconsumed, self.consumed, tensors)
        self.findings.extend(scale_findings(scales, [kind.group for kind in self.lone], self.consumed, tensors))
        groups = Listed(unknown, [kind.group for kind in self.strangers]).by_pattern()
        rest = missing
        if (others := renamed(groups, missing, matcher)) is not None:
            self.findings.extend(others.findings(missing, tensors))
            groups = {pattern: names for pattern, names in groups.items() if pattern not in others.groups}
            rest = {pattern: names for pattern, names in missing.items() if pattern not in others.params}
        head = self.sources.get("head.weight")
        of_head = head.tensor if head is not None else None
        backwards = Backwards(matcher.rules if rest else ())
        self.findings.extend(
            missing_findings(rest, self.params, groups, tensors, spec.tied_head, of_head, lost, backwards)
        )
        self.findings.extend(unconsumed_findings(groups, tensors, matcher))
        return Ledger(
            sources=self.sources if len(tensors) >= MANY else dict(self.sources),
            consumed=self.consumed if len(tensors) >= MANY else dict(self.consumed),
            left_out=self.left_out,
            missing=_few(Listed(groups=missing.values()), tensors),
            unconsumed=_few(Listed(self.unconsumed, [kind.group for kind in (*self.strangers, *self.lone)]), tensors),
            findings=tuple(self.findings),
            fills=self.fills,
            strangers=frozenset(kind.pattern for kind in self.strangers if self.stock.is_whole(kind)),
        )

    def _misfits(self) -> Iterator[Finding]:
        """Findings for tensors whose shape or dtype does not fit their parameters."""
        for problem in dict.fromkeys((*self.problems, *self.shapes)):
            groups, pairs = self.shapes.get(problem, ()), self.problems.get(problem, ())
            names, params = (Listed((pair[i] for pair in pairs), (g[i] for g in groups)) for i in (0, 1))
            yield wrong(problem, names, params, self.checkpoint.tensors)


def _few(names: Listed, tensors: Mapping[str, TensorInfo]) -> Sequence[str]:
    """The names as a tuple, unless there are very many."""
    return names if len(tensors) >= MANY else tuple(names)


def _is_plain(tensor: TensorInfo, param: Param | None) -> bool:
    """Whether a tensor is stored unquantized: floats, or integers of a table."""
    return tensor.dtype in FLOATS or (param is not None and param.dtype == "I64" and tensor.dtype in ("I64", "I32"))


def _is_longer(stored: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether the tensor has more rows than expected, each of the expected shape."""
    return len(stored) == len(wanted) > 0 and stored[1:] == wanted[1:] and stored[0] > wanted[0]


def _rule_shape(packed: Packed) -> tuple[int, ...]:
    """The shape that weight rules expect of the tensor."""
    shape = packed.shape
    return (*shape[:-2], shape[-1], shape[-2]) if packed.format.swapped else shape


def _of_packed(source: Source, packed: Packed) -> Source:
    """The source in [..., rows, columns] of the weight."""
    region, transpose = source.region, source.transpose
    if packed.format.swapped and len(region) > 1:
        region, transpose = (*region[:-2], region[-1], region[-2]), not transpose
    return Source(source.tensor, region, transpose, packed=packed)


def equal_tensors(checkpoint: Checkpoint, first: str, second: str, step_bytes: int = 8 << 20) -> bool:
    """Whether two tensors are equal byte for byte; reads until they differ. Raises `Refused`."""
    one, other = checkpoint.tensors[first], checkpoint.tensors[second]
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return all(
        checkpoint.read_bytes(first, start, min(step_bytes, one.nbytes - start))
        == checkpoint.read_bytes(second, start, min(step_bytes, one.nbytes - start))
        for start in range(0, one.nbytes, step_bytes)
    )


def expand(tensor: TensorInfo, match: Match, params: Mapping[str, Param]) -> Iterator[tuple[str, Source]]:
    """Each parameter that the tensor fills, with the region that fills it."""
    if not match.rule.stacked:
        whole = tuple((0, size, 1) for size in tensor.shape)
        yield from _split(tensor, match.rule, match.params, whole, params)
        return
    for expert in range(tensor.shape[0] if tensor.shape else 0):
        names = tuple(name.replace("{e}", str(expert)) for name in match.params)
        region = ((expert, expert + 1, 1), *((0, size, 1) for size in tensor.shape[1:]))
        yield from _split(tensor, match.rule, names, region, params)


def _split(
    tensor: TensorInfo, how: WeightRule, names: tuple[str, ...], region: Region, params: Mapping[str, Param]
) -> Iterator[tuple[str, Source]]:
    dim, start = how.split_dim + (1 if how.stacked else 0), 0
    if len(names) == 1 or dim >= len(region):  # a tensor of too few dims: the shape check will say so
        yield from ((name, Source(tensor.name, region, how.transpose)) for name in names)
        return
    for index, name in enumerate(names):
        rows = region[dim][1] // len(names)
        if name in params:
            shape = params[name].shape
            rows = shape[how.split_dim if not how.transpose else len(shape) - 1 - how.split_dim]
        cut = (index, index + (rows - 1) * len(names) + 1, len(names)) if how.interleaved else (start, start + rows, 1)
        yield name, Source(tensor.name, (*region[:dim], cut, *region[dim + 1 :]), how.transpose)
        start += rows
