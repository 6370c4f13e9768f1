"""Assembles quantized weights from their stored tensors: codes, scales, zero points and orders, checked by headers.

The configuration says which format a module has and its parameters; headers are the truth about what is there. What
contradicts is found and named; nothing is guessed, and no scale is made up. No torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from firstlight.engine.findings import Finding, fatal, listing, several, warning
from firstlight.engine.weights.files.header import TensorInfo
from firstlight.engine.weights.formats.grid import Format, Packed, Part
from firstlight.engine.weights.formats.scheme import Scheme
from firstlight.engine.weights.names.listed import Listed
from firstlight.engine.weights.names.naming import shown

FLOATS = frozenset(("F32", "BF16", "F16", "F64"))
# How the codes of a weight are called -> how the weight itself is.
MAINS = (("weight_packed", "weight"), ("qweight", "weight"), ("_packed", ""), ("_blocks", ""))
COMPANIONS = (
    "_scale", "_scale_inv", "_scale_2", "_scales", ".scales", ".scale", "_zero_point", ".qzeros", "g_idx",
    "_global_scale", ".weight_shape", "_shape",
)  # fmt: skip
# What else a weight of any format may have, to tell what is its own when nothing says how it is stored.
BESIDE = tuple(
    Part("", suffix, (), ())
    for suffix in (
        *("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "weight_zero_point"),
        *("weight_g_idx", "weight_shape", "scale", "scales", "qzeros", "g_idx"),
    )
)
_ACTIVATIONS = "scale of quantized activations: activations are not quantized here"
_CACHE = "scale of an FP8 key/value cache: the cache holds the run's dtype here"
LEFT_OUT = {  # what says how activations and caches are quantized, by the last part of its name -> why it is left out
    **dict.fromkeys(
        ("input_scale", "input_global_scale", "activation_scale", "input_scale_ub", "input_zero_point", "output_scale"),
        _ACTIVATIONS,
    ),
    **dict.fromkeys(
        (
            *("k_scale", "v_scale", "kv_scale", "q_scale", "prob_scale", "prob_output_scale"),
            *("k_zero_point", "v_zero_point"),
        ),
        _CACHE,
    ),
}
Problem = tuple[str, str, str, str, str]  # code, format, what, expected, found: equal ones are one finding
MOST_PROBLEMS = 50  # of one kind that have a finding each
UNKNOWN: Problem = ("unsupported-format", "", "unknown", "", "")  # codes by name, which nothing says how to read


class Grouped(NamedTuple):
    """Quantized weights by the name of their first tensor, the names of all other tensors, and findings.

    `broken`: first tensors of weights that cannot be assembled, with the weight's name.
    """

    weights: dict[str, Packed]
    companions: set[str]
    broken: dict[str, str]
    findings: tuple[Finding, ...]


def group(
    tensors: Mapping[str, TensorInfo],
    scheme: Scheme,
    broken: dict[Problem, Listed] | None = None,
    every: Mapping[str, TensorInfo] | None = None,
) -> Grouped:
    """Finds the quantized weights among all tensors of a checkpoint.

    A weight whose parts are missing or of another shape is broken, and a finding says why. `broken`: codes that have
    been found to be no weights already, by what is wrong; they are said with the others. `every`: all tensors, if some
    are in no need of being looked at.
    """
    book = _Grouping(tensors, scheme, {} if broken is None else broken, tensors if every is None else every)
    for tensor in tensors.values():
        if tensor.dtype not in FLOATS and (name := weight_name(tensor.name)) is not None:
            book.enter(name, tensor)
    return book.close()


def weight_name(name: str) -> str | None:
    """The name of the weight whose codes a tensor holds; None for its companions."""
    for ending, own in MAINS:
        if name.endswith(ending):
            return name[: len(name) - len(ending)] + own
    return None if name.endswith(COMPANIONS) or left_out(name) is not None else name


def left_out(name: str) -> str | None:
    """Why a quantization parameter of activations or caches is left out; None for any other tensor."""
    module, _, last = name.rpartition(".")
    if last == "output_scale" and module.endswith(("k_proj", "v_proj", "qkv_proj")):
        return _CACHE
    if last.endswith(("_input_scale", "_input_global_scale")):  # of stacked experts
        return _ACTIVATIONS
    return LEFT_OUT.get(last)


def part_names(weight: str, part: Part) -> tuple[str, ...]:
    """What a part may be called: `a.weight` has `a.weight_scale` and `a.qzeros`, `a.up` has `a.up_scale`."""
    suffix = part.suffix
    if weight.endswith(".weight"):
        return (weight[:-6] + suffix,)
    if suffix.startswith("weight"):
        return weight + suffix[6:], f"{weight}_{suffix}"
    return (f"{weight}_{suffix}",)


class _Grouping:
    def __init__(
        self,
        tensors: Mapping[str, TensorInfo],
        scheme: Scheme,
        problems: dict[Problem, Listed],
        every: Mapping[str, TensorInfo],
    ) -> None:
        self.tensors = tensors
        self.every = every
        self.scheme = scheme
        self.weights: dict[str, Packed] = {}
        self.companions: set[str] = set()
        self.broken: dict[str, str] = {}
        self.problems = problems
        self.unannounced: dict[str, list[str]] = {}
        self.suffixes = {format_: suffixes(format_) for format_ in scheme.formats}
        self.forms: dict[object, Format | Problem] = {}

    def enter(self, name: str, main: TensorInfo) -> None:
        if not self.scheme.formats:
            self._enter_unknown(name, main)
            return
        announced = self.scheme.of(name.removesuffix(".weight"))
        candidates = (announced,) if announced is not None else self.scheme.formats
        for format_ in candidates:
            there = self._parts(name, format_)
            found = self._claim(name, main, format_, there)
            if isinstance(found, Packed):
                self.weights[main.name] = found
                self.companions.update(tensor.name for tensor in found.tensors[1:])
                if announced is None:
                    self.unannounced.setdefault(format_.describe(), []).append(main.name)
                return
            if announced is not None:
                self.problems.setdefault(found, Listed()).append(main.name)
                self.broken[main.name] = name
                self.companions.update(tensor.name for tensor in there.values() if tensor is not main)

    def _enter_unknown(self, name: str, main: TensorInfo) -> None:
        """Codes of which nothing says how they are read, told by their name; others are tensors like any."""
        if name != main.name:
            self.problems.setdefault(UNKNOWN, Listed()).append(main.name)
            self.broken[main.name] = name
            own = (candidate for part in BESIDE for candidate in part_names(name, part))
            self.companions.update(candidate for candidate in own if candidate in self.tensors)

    def _parts(self, name: str, format_: Format) -> dict[str, TensorInfo]:
        """What there is of a weight, by how the name of each part ends; `up_scale` is one part, however it is read."""
        there: dict[str, TensorInfo] = {}
        seen: set[str] = set()
        for part in self.suffixes[format_]:
            for candidate in part_names(name, part):
                tensor = self.tensors.get(candidate)
                if tensor is not None and candidate not in seen:
                    there[part.suffix] = tensor
                    seen.add(candidate)
        return there

    def _claim(self, name: str, main: TensorInfo, format_: Format, there: Mapping[str, TensorInfo]) -> Packed | Problem:
        """The weight in this format, or why its tensors do not form one."""
        key = (format_, *((suffix, tensor.dtype, tensor.shape) for suffix, tensor in there.items()))
        form = self.forms.get(key)
        if form is None:
            form = self.forms[key] = fitting(format_, main, there)
        if not isinstance(form, Format):
            return form
        parts = tuple(there[part.suffix] for part in form.parts)
        shape = form.weight_shape(main.shape)
        assert shape is not None
        return Packed(name, shape, form, parts)

    def close(self) -> Grouped:
        findings = list(_each_wrong(self.problems, self.every))
        findings += [_not_announced(format_, names, self.tensors) for format_, names in self.unannounced.items()]
        return Grouped(self.weights, self.companions, self.broken, tuple(findings))


def suffixes(format_: Format) -> tuple[Part, ...]:
    """The name suffixes of all parts in all variants of a format."""
    return tuple({part.suffix: part for variant in format_.variants() for part in variant.parts}.values())


def fitting(format_: Format, main: TensorInfo, there: Mapping[str, TensorInfo]) -> Format | Problem:
    """The variant of a format that fits the tensors, or what is wrong with the closest one."""
    problems: list[tuple[int, Problem]] = []
    codes = {variant.parts[0].suffix for variant in format_.variants()}  # of another spelling: a weight of its own
    for variant in format_.variants():
        suffixes = {part.suffix for part in variant.parts}
        if there.get(variant.parts[0].suffix) is not main:
            continue
        missing, extra = suffixes - there.keys(), there.keys() - suffixes - codes
        problem = _mismatch(variant, main, there)
        if problem is None:
            if not extra:
                return variant
            taken, more = ", ".join(sorted(suffixes)), ", ".join(sorted(extra))
            problem = ("unpaired-scale", format_.describe(), "more", taken, more)
        problems.append((len(missing) * 2 + len(extra), problem))
    if problems:
        return min(problems, key=lambda item: item[0])[1]
    named = ", ".join(sorted(codes))
    return ("conflicting-flag", format_.describe(), "codes", named, f"{main.name.rsplit('.', 1)[-1]} in {main.dtype}")


def _mismatch(variant: Format, main: TensorInfo, there: Mapping[str, TensorInfo]) -> Problem | None:
    """The first mismatch between the tensors and this variant of a format."""
    shape = variant.weight_shape(main.shape)
    if shape is None:
        dims = len(variant.parts[0].dims)
        return ("shape-mismatch", variant.describe(), variant.parts[0].suffix, f"{dims} dims", str(list(main.shape)))
    for part in variant.parts:
        tensor = there.get(part.suffix)
        if tensor is None:
            return ("unpaired-scale", variant.describe(), "missing", part.suffix, "none")
        if tensor.dtype not in part.dtypes:
            return ("conflicting-flag", variant.describe(), part.suffix, " or ".join(part.dtypes), tensor.dtype)
        if tensor is not main and tensor.shape not in _shapes(variant, part, shape):
            expected = str(list(part.shape(shape)))
            return ("shape-mismatch", variant.describe(), part.suffix, expected, str(list(tensor.shape)))
    return None


def _shapes(variant: Format, part: Part, shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Shapes a part may have: the last word of a row may be part empty, so that a group fewer is possible."""
    yield part.shape(shape)
    for empty in range(1, variant.padding):
        yield part.shape((*shape[:-1], shape[-1] - empty))


def _each_wrong(problems: Mapping[Problem, Listed], tensors: Mapping[str, TensorInfo]) -> Iterator[Finding]:
    """A finding for each problem; of one kind those behind the first `MOST_PROBLEMS` are counted with the last."""
    of_kind: dict[tuple[str, ...], list[Problem]] = defaultdict(list)
    for problem in problems:
        of_kind[problem[:3]].append(problem)
    for alike in of_kind.values():
        *first, last = alike[:MOST_PROBLEMS]
        yield from (_wrong(problem, problems[problem], tensors) for problem in first)
        finding, more = _wrong(last, problems[last], tensors), sum(len(problems[one]) for one in alike[MOST_PROBLEMS:])
        others = f"; and {several(more, 'tensor', 'tensors')} more likewise, with other sizes" if more else ""
        yield msgspec.structs.replace(
            finding, message=finding.message + others, more_tensors=finding.more_tensors + more
        )


def _wrong(problem: Problem, names: Listed, tensors: Mapping[str, TensorInfo]) -> Finding:
    if problem == UNKNOWN:
        return _unknown(names, tensors)
    code, format_, what, expected, found = problem
    tensors_are, those = several(len(names), "tensor is", "tensors are"), several(len(names), "tensor", "tensors")
    way = "fetch the release again: its configuration and its weights do not belong together"
    if what == "missing":
        message = f"{names.shown()}: {those} in {format_} without {expected}"
        way = "fetch the shard that holds the scale; a scale of one is never put in its place"
        expected = f"{expected} for each"
    elif what == "more":
        message = f"{names.shown()}: {those} in {format_} with {found} as well, which it does not have"
    elif what == "codes":
        message = f"{names.shown()}: {tensors_are} announced as {format_}, but not stored so"
    else:
        message = f"{names.shown()}: {what} of {those} in {format_} is not what the configuration says"
    return fatal(
        code,
        message,
        file=tensors[names[0]].file,
        expected=expected,
        found=found,
        next=way,
        **listing(names),
    )


def _unknown(names: Listed, tensors: Mapping[str, TensorInfo]) -> Finding:
    """Refusal of quantized codes in a checkpoint whose configuration does not say how to read them."""
    return fatal(
        "unsupported-format",
        f"{names.shown()}: {several(len(names), 'weight is', 'weights are')} stored as codes with scales, and "
        "config.json does not say how to read that",
        file=tensors[names[0]].file,
        **listing(names),
        expected="a quantization_config that says how they are stored",
        found=", ".join(sorted({_ending(group[0], tensors) for group in names.by_pattern().values()})),
        next="fetch the release's own config.json; how tensors are quantized is not guessed",
    )


def _ending(name: str, tensors: Mapping[str, TensorInfo]) -> str:
    return f"{name.rsplit('.', 1)[-1]} in {tensors[name].dtype}"


def _not_announced(format_: str, names: list[str], tensors: Mapping[str, TensorInfo]) -> Finding:
    """Headers show a format where the configuration says that modules stay plain: headers are the truth."""
    return warning(
        "conflicting-flag",
        f"{shown(names)}: {several(len(names), 'tensor is', 'tensors are')} stored as {format_}, though config.json "
        f"leaves {'it' if len(names) == 1 else 'them'} out; read as stored",
        file=tensors[names[0]].file,
        **listing(names),
        expected="tensors in a plain dtype",
        found=format_,
        next="nothing, if the scales beside them are theirs: headers are the truth",
    )


def with_columns(packed: Packed, columns: int) -> Packed | None:
    """The same weight with its true number of columns, where headers show whole words only; None: it is another."""
    slack = packed.shape[-1] - columns
    if not 0 <= slack < packed.format.padding:
        return None
    fitted = Packed(packed.name, (*packed.shape[:-1], columns), packed.format, packed.tensors)
    return None if misfit(fitted) else fitted


def misfit(packed: Packed) -> tuple[TensorInfo, tuple[int, ...]] | None:
    """The first of its tensors that has not the shape that the weight's asks for, and that shape."""
    for part, tensor in zip(packed.format.parts, packed.tensors, strict=True):
        if part.shape(packed.shape) != tensor.shape:
            return tensor, part.shape(packed.shape)
    return None
