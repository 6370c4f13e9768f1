"""The two-way account: where every tensor of the checkpoint went, and where every parameter came from.

Less than 100 % on either side means no start. No torch.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, fatal, note, warning
from firstlight.engine.model.rules import Match, Matcher, WeightRule
from firstlight.engine.model.spec import ModelSpec, Param
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.header import TensorInfo

FLOATS = frozenset(("F32", "BF16", "F16", "F64"))
Region = tuple[tuple[int, int, int], ...]  # per dim of the stored tensor: start, stop, step


class Source(msgspec.Struct, frozen=True, gc=False):
    """The part of a stored tensor that is one whole parameter: `region` in the tensor's dims, then `transpose`d."""

    tensor: str
    region: Region
    transpose: bool = False
    tied: bool = False

    def cut(self, bounds: tuple[tuple[int, int], ...]) -> Region:
        """The region of the stored tensor that holds `bounds` of the parameter."""
        own = (*bounds[:-2], bounds[-1], bounds[-2]) if self.transpose else bounds
        lead = len(self.region) - len(own)
        inner = tuple(
            (start + low * step, start + (high - 1) * step + 1 if high > low else start + low * step, step)
            for (start, _, step), (low, high) in zip(self.region[lead:], own, strict=True)
        )
        return self.region[:lead] + inner


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """`sources`: parameter -> where it comes from. `consumed`: tensor -> parameters. `left_out`: tensor -> reason."""

    sources: dict[str, Source]
    consumed: dict[str, tuple[str, ...]]
    left_out: dict[str, str]
    missing: tuple[str, ...]
    unconsumed: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def complete(self) -> bool:
        return not any(finding.severity == "fatal" for finding in self.findings)

    def refuse_if_incomplete(self) -> None:
        """The gate of start: raises `Refused` with every fatal finding."""
        broken = [finding for finding in self.findings if finding.severity == "fatal"]
        if broken:
            raise Refused(broken)

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


def account(checkpoint: Checkpoint, spec: ModelSpec, matcher: Matcher) -> Ledger:
    """Matches every tensor to parameters and back; nothing is guessed and nothing is read but two tied heads."""
    params = {param.name: param for param in spec.parameters()}
    book = _Book(params)
    for tensor in checkpoint.tensors.values():
        book.enter(tensor, matcher.match(tensor.name))
    book.settle_head(checkpoint, spec)
    return book.close()


class _Book:
    """The account while it is being written."""

    def __init__(self, params: Mapping[str, Param]) -> None:
        self.params = params
        self.sources: dict[str, Source] = {}
        self.consumed: dict[str, tuple[str, ...]] = {}
        self.left_out: dict[str, str] = {}
        self.unconsumed: list[str] = []
        self.findings: list[Finding] = []

    def enter(self, tensor: TensorInfo, match: Match | None) -> None:
        if match is None:
            self.unconsumed.append(tensor.name)
            return
        if not match.params:
            self.left_out[tensor.name] = match.rule.reason
            return
        filled: list[str] = []
        for name, source in _expand(tensor, match, self.params):
            param = self.params.get(name)
            if param is None:
                continue
            if name in self.sources:
                self._twice(tensor, name)
            elif problem := _problem(tensor, param, source):
                self.findings.append(problem)
            filled.append(name)
            self.sources.setdefault(name, source)
        if filled:
            self.consumed[tensor.name] = tuple(filled)
        else:
            self.unconsumed.append(tensor.name)

    def _twice(self, tensor: TensorInfo, name: str) -> None:
        self.findings.append(
            fatal(
                "duplicate-tensor",
                f"parameter {name} has two sources",
                file=tensor.file,
                tensors=(self.sources[name].tensor, tensor.name),
                expected="one source",
                found="two",
                next="remove the stale copy from the checkpoint",
            )
        )

    def settle_head(self, checkpoint: Checkpoint, spec: ModelSpec) -> None:
        """A head in the file is used, whatever the flag says; a missing one is the embedding if the flag allows."""
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
        same = checkpoint.read_bytes(head.tensor) == checkpoint.read_bytes(embed.tensor)
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
                file=checkpoint.tensors[head.tensor].file,
                tensors=(head.tensor, embed.tensor),
                expected="no head of its own, or tie_word_embeddings false",
                found="equal copy" if same else "different values",
                next="nothing to do" if same else "set tie_word_embeddings to false where the head is meant",
            )
        )

    def close(self) -> Ledger:
        missing = tuple(name for name in self.params if name not in self.sources)
        self.findings.extend(self._gaps("missing-tensor", missing))
        self.findings.extend(self._gaps("unconsumed-tensor", self.unconsumed))
        return Ledger(
            sources=self.sources,
            consumed=self.consumed,
            left_out=self.left_out,
            missing=missing,
            unconsumed=tuple(self.unconsumed),
            findings=tuple(self.findings),
        )

    def _gaps(self, code: str, names: Iterable[str]) -> Iterator[Finding]:
        """One finding a pattern of names, with how many of that pattern are concerned."""
        everything = by_pattern(self.params) if code == "missing-tensor" else {}
        for pattern, concerned in by_pattern(names).items():
            shown = pattern_range(pattern, concerned)
            if code == "missing-tensor":
                total = len(everything[pattern])
                yield fatal(
                    code,
                    f"{shown}: {total - len(concerned):,} of {total:,} parameters filled",
                    tensors=tuple(concerned),
                    expected=f"{total:,} filled",
                    found=f"{total - len(concerned):,} filled",
                    next="find the tensors under another name and add a weight rule; values are never made up",
                )
            else:
                yield fatal(
                    code,
                    f"{shown}: {len(concerned):,} tensors that no parameter consumes",
                    tensors=tuple(concerned),
                    expected="a weight rule, or a rule that leaves it out with a reason",
                    found="no rule",
                    next="add the rule to the family file: dropping weights in silence is not offered",
                )


def _expand(tensor: TensorInfo, match: Match, params: Mapping[str, Param]) -> Iterator[tuple[str, Source]]:
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
    if len(names) == 1:
        yield names[0], Source(tensor.name, region, how.transpose)
        return
    lead = 1 if how.stacked else 0
    dim, start = lead + how.split_dim, 0
    for index, name in enumerate(names):
        rows = region[dim][1] // len(names)
        if name in params:
            shape = params[name].shape
            own = how.split_dim if not how.transpose else len(shape) - 1 - how.split_dim
            rows = shape[own]
        cut = (index, index + (rows - 1) * len(names) + 1, len(names)) if how.interleaved else (start, start + rows, 1)
        yield name, Source(tensor.name, (*region[:dim], cut, *region[dim + 1 :]), how.transpose)
        start += rows


def _problem(tensor: TensorInfo, param: Param, source: Source) -> Finding | None:
    sizes = [-(-(stop - start) // step) for start, stop, step in source.region]
    inside = all(stop <= size for (_, stop, _), size in zip(source.region, tensor.shape, strict=True))
    own = sizes[len(sizes) - len(param.shape) :]
    if source.transpose:
        own[-2:] = own[:-3:-1]
    if not inside or tuple(own) != param.shape:
        return fatal(
            "shape-mismatch",
            f"{tensor.name} does not have the shape of {param.name}",
            file=tensor.file,
            tensors=(tensor.name,),
            expected=str(list(param.shape)),
            found=str(list(tensor.shape)),
            next="config.json and weights belong to different releases, or the family misreads a key",
        )
    if tensor.dtype not in FLOATS:
        return fatal(
            "unsupported-format",
            f"{tensor.name} is stored as {tensor.dtype}, which is not read yet",
            file=tensor.file,
            tensors=(tensor.name,),
            expected=", ".join(sorted(FLOATS)),
            found=tensor.dtype,
            next="use an unquantized copy of the checkpoint",
        )
    return None


def by_pattern(names: Iterable[str]) -> dict[str, list[str]]:
    """Names grouped by what is left when numbers are taken out."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)].append(name)
    return dict(groups)


def pattern_range(pattern: str, names: list[str]) -> str:
    """The pattern with the range of numbers that occur: `layers.{0..39}.mlp.gate.weight`."""
    numbers = [tuple(int(part) for part in re.findall(r"(?<=\.)\d+(?=\.|$)", name)) for name in names]
    shown = pattern
    for column in zip(*numbers, strict=True):
        low, high = min(column), max(column)
        shown = shown.replace(".*", f".{low}" if low == high else f".{{{low}..{high}}}", 1)
    return shown
