"""The two-way account: where every tensor of the checkpoint went, and where every parameter came from.

Less than 100 % on either side means no start. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, note, warning
from firstlight.engine.model.rules import Match, Matcher, WeightRule
from firstlight.engine.model.spec import ModelSpec, Param
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.gaps import (
    FLOATS,
    Problem,
    by_pattern,
    left_over,
    missing_findings,
    pattern_range,
    scale_findings,
    shape_problem,
    split_scales,
    twice_findings,
    unconsumed_findings,
    wrong,
)
from firstlight.engine.weights.header import TensorInfo
from firstlight.engine.weights.padding import padded_findings
from firstlight.engine.weights.source import Region, Source

__all__ = ["FLOATS", "Ledger", "Region", "Source", "account", "by_pattern", "pattern_range"]


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
    """Matches every tensor to parameters and back; nothing is guessed.

    Nothing is read but two tied heads, and the tails of padded tensors.
    """
    params = {param.name: param for param in spec.parameters()}
    book = _Book(params, checkpoint)
    for tensor in checkpoint.tensors.values():
        book.enter(tensor, matcher.match(tensor.name))
    book.settle_head(spec)
    return book.close(spec, _lost(checkpoint, matcher, params))


def _lost(checkpoint: Checkpoint, matcher: Matcher, params: Mapping[str, Param]) -> dict[str, str]:
    """Parameters whose tensors are in files that are absent or broken, as the index has it: parameter -> file."""
    found: dict[str, str] = {}
    for finding in checkpoint.findings:
        for name in finding.tensors if finding.severity == "fatal" and finding.file else ():
            match = matcher.match(name) if name not in checkpoint.tensors else None
            for param in match.params if match else ():
                if "{e}" not in param:
                    found[param] = finding.file or ""
                    continue
                start, end = param.split("{e}", 1)
                found.update((p, finding.file or "") for p in params if p.startswith(start) and p.endswith(end))
    return found


class _Book:
    """The account while it is being written."""

    def __init__(self, params: Mapping[str, Param], checkpoint: Checkpoint) -> None:
        self.params = params
        self.checkpoint = checkpoint
        self.sources: dict[str, Source] = {}
        self.consumed: dict[str, tuple[str, ...]] = {}
        self.left_out: dict[str, str] = {}
        self.unconsumed: list[str] = []
        self.findings: list[Finding] = []
        self.problems: dict[Problem, list[tuple[str, str]]] = {}
        self.twice: list[tuple[str, str]] = []
        self.padded: dict[str, int] = {}  # tensor -> rows that are its parameter
        self.regions: dict[tuple[int, ...], Region] = {}

    def enter(self, tensor: TensorInfo, match: Match | None) -> None:
        if match is None:
            self.unconsumed.append(tensor.name)
            return
        if not match.params:
            self.left_out[tensor.name] = match.rule.reason
            return
        if not match.rule.stacked and len(match.params) == 1 and self._whole(tensor, match):
            return
        filled: list[str] = []
        sound, elements = True, 0
        for name, source in expand(tensor, match, self.params):
            param = self.params.get(name)
            if param is None:
                continue
            if name in self.sources:
                self.twice.append((name, tensor.name))
            elif problem := shape_problem(tensor, param, source):
                self._wrong(problem, tensor, name)
                sound = False
            filled.append(name)
            elements += param.elements
            self.sources.setdefault(name, source)
        if not filled:
            self.unconsumed.append(tensor.name)
            return
        self.consumed[tensor.name] = tuple(filled)
        if sound and elements != math.prod(tensor.shape):
            self._wrong(left_over(tensor, filled, elements), tensor, filled[0])
        if tensor.dtype not in FLOATS:
            self._wrong(("unsupported-format", "", ", ".join(sorted(FLOATS)), tensor.dtype), tensor, filled[0])

    def _whole(self, tensor: TensorInfo, match: Match) -> bool:
        """Enters a tensor that is one whole parameter, as most are; False when anything about it is unusual."""
        (name,) = match.params
        param = self.params.get(name)
        if param is None or name in self.sources or tensor.dtype not in FLOATS or match.rule.transpose:
            return False
        if match.rule.unpad and _is_longer(tensor.shape, param.shape):
            self.padded[tensor.name] = param.shape[0]
            self.sources[name] = Source(tensor.name, tuple((0, size, 1) for size in param.shape))
            self.consumed[tensor.name] = match.params
            return True
        if tensor.shape != param.shape:
            return False
        region = self.regions.get(tensor.shape)
        if region is None:
            region = self.regions[tensor.shape] = tuple((0, size, 1) for size in tensor.shape)
        self.sources[name] = Source(tensor.name, region)
        self.consumed[tensor.name] = match.params
        return True

    def _wrong(self, problem: Problem, tensor: TensorInfo, param: str) -> None:
        self.problems.setdefault(problem, []).append((tensor.name, param))

    def settle_head(self, spec: ModelSpec) -> None:
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

    def close(self, spec: ModelSpec, lost: Mapping[str, str]) -> Ledger:
        missing = tuple(name for name in self.params if name not in self.sources)
        tensors = self.checkpoint.tensors
        self.findings.extend(wrong(problem, names, tensors) for problem, names in self.problems.items())
        self.findings.extend(padded_findings(self.checkpoint, self.padded))
        self.findings.extend(twice_findings(self.twice, self.sources, tensors))
        scales, unknown = split_scales(self.unconsumed, tensors)
        self.findings.extend(scale_findings(scales, self.consumed, tensors))
        self.findings.extend(missing_findings(missing, self.params, unknown, tensors, spec.tied_head, lost))
        self.findings.extend(unconsumed_findings(unknown))
        return Ledger(
            sources=self.sources,
            consumed=self.consumed,
            left_out=self.left_out,
            missing=missing,
            unconsumed=tuple(self.unconsumed),
            findings=tuple(self.findings),
        )


def _is_longer(stored: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether there are more rows than wanted, each of the shape that is wanted."""
    return len(stored) == len(wanted) > 0 and stored[1:] == wanted[1:] and stored[0] > wanted[0]


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
