"""What an account of tensors and parameters lacks, in words: one finding a pattern of names, however many there are."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from firstlight.engine.findings import Finding, fatal
from firstlight.engine.model.rules import Matcher
from firstlight.engine.model.spec import Param
from firstlight.engine.model.spec.param import FIRST_STAGE, LAST_STAGE
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.header import TensorInfo
from firstlight.engine.weights.lots import Parameters, experts
from firstlight.engine.weights.naming import by_pattern, pattern_of, pattern_range, shown
from firstlight.engine.weights.packed import FLOATS, weight_name
from firstlight.engine.weights.patterns import bare, named, with_numbers
from firstlight.engine.weights.source import Source

Problem = tuple[str, str, str, str]  # code, pattern of the parameter, expected, found: equal ones are one finding
MOST_NAMED = 200  # kinds of tensors that have a finding each
MOST_COMPARED = 200  # names that a missing one is held against
_SCALES = ("_scale_inv", "_scale", "_scale_2", "_scales", "_zero_point", "_zeros", "_g_idx")


def shape_problem(tensor: TensorInfo, param: Param, source: Source) -> Problem | None:
    """Whether a region of a tensor can be a parameter: it lies inside, and has the parameter's extents."""
    sizes = [-(-(stop - start) // step) for start, stop, step in source.region]
    inside = all(stop <= size for (_, stop, _), size in zip(source.region, tensor.shape, strict=True))
    lead = len(sizes) - len(param.shape)
    own = sizes[max(lead, 0) :]
    if source.transpose:
        own[-2:] = own[:-3:-1]
    if not inside or any(size != 1 for size in sizes[: max(lead, 0)]) or tuple(own) != param.shape:
        return ("shape-mismatch", pattern_of(param.name), str(list(param.shape)), str(list(tensor.shape)))
    return None


def left_over(tensor: TensorInfo, filled: list[str], elements: int) -> Problem:
    """A tensor of several parameters of which a part goes nowhere."""
    pattern = pattern_of(filled[0])
    return ("shape-mismatch", pattern, f"{elements:,} elements in {len(filled)} parameters", f"{list(tensor.shape)}")


def wrong(problem: Problem, where: list[tuple[str, str]], tensors: Mapping[str, TensorInfo]) -> Finding:
    """One finding for all (tensor, parameter) with the same problem."""
    code, pattern, expected, found = problem
    names = [tensor for tensor, _ in where]
    if code == "unsupported-format":
        message = (
            f"{len(names):,} tensors are stored as {found}, and config.json does not say how to read that: "
            f"{shown(names)}"
        )
        way = "fetch the release's own config.json with its quantization_config, or use an unquantized copy"
    else:
        has = "holds more than is taken by" if expected.endswith("parameters") else "does not have the shape of"
        message = f"{shown(names)} {has} {pattern_range(pattern, (param for _, param in where))}"
        way = "config.json and weights belong to different releases, or the family misreads a key"
    return fatal(
        code,
        message,
        file=tensors[names[0]].file,
        tensors=tuple(dict.fromkeys(names)),
        expected=expected,
        found=found,
        next=way,
    )


def twice_findings(
    twice: Iterable[tuple[str, str]], sources: Mapping[str, Source], tensors: Mapping[str, TensorInfo]
) -> Iterator[Finding]:
    """Parameters that two tensors fill: (parameter, the second tensor)."""
    second = dict(twice)
    for pattern, names in by_pattern(second).items():
        one, other = sources[names[0]].tensor, second[names[0]]
        yield fatal(
            "duplicate-tensor",
            f"{pattern_range(pattern, names)}: {len(names):,} parameters have two sources, {one} and {other}"
            + (", and so on" if len(names) > 1 else ""),
            file=tensors[other].file,
            tensors=tuple(dict.fromkeys(tensor for name in names for tensor in (sources[name].tensor, second[name]))),
            expected="one source",
            found="two",
            next="remove the stale copy from the checkpoint; which of them is meant is not guessed",
        )


def split_scales(unconsumed: Iterable[str], tensors: Mapping[str, TensorInfo]) -> tuple[dict[str, str], list[str]]:
    """Scales by the name of the tensor they belong to, and all other tensors nobody consumes."""
    scales: dict[str, str] = {}
    others: list[str] = []
    for name in unconsumed:
        if not name.endswith(_SCALES):
            others.append(name)
            continue
        ending = next(end for end in _SCALES if name.endswith(end))
        base = name.removesuffix(ending)
        owner = next((n for n in (base, f"{base}.weight", base.replace("input", "weight")) if n in tensors), base)
        scales[name] = owner
    return scales, others


def scale_findings(
    scales: Mapping[str, str], consumed: Mapping[str, object], tensors: Mapping[str, TensorInfo]
) -> Iterator[Finding]:
    """Scales that nothing announces, scales of nothing, and 8-bit tensors without a scale though others have."""
    paired = [name for name, owner in scales.items() if owner in consumed]
    alone = [name for name, owner in scales.items() if owner not in consumed]
    plain = [name for name in paired if tensors[scales[name]].dtype in FLOATS]
    unannounced = [name for name in paired if tensors[scales[name]].dtype not in FLOATS]
    for pattern, names in by_pattern(plain).items():
        yield fatal(
            "unpaired-scale",
            f"{pattern_range(pattern, names)}: {len(names):,} scales beside tensors that are not quantized",
            file=tensors[names[0]].file,
            tensors=tuple(names),
            expected="quantized tensors",
            found=f"tensors in {tensors[scales[names[0]]].dtype}",
            next="fetch the release again: scales and tensors belong to different copies",
        )
    if unannounced:
        yield fatal(
            "unsupported-format",
            f"{shown(unannounced)}: {len(unannounced):,} scales of tensors that config.json does not announce",
            file=tensors[unannounced[0]].file,
            tensors=tuple(unannounced),
            expected="a quantization_config that says how they are stored",
            found="tensors in " + ", ".join(sorted({tensors[scales[name]].dtype for name in unannounced})),
            next="fetch the release's own config.json; how tensors are quantized is not guessed",
        )
    for pattern, names in by_pattern(alone).items():
        yield fatal(
            "unpaired-scale",
            f"{pattern_range(pattern, names)}: {len(names):,} scales without the tensors they belong to",
            file=tensors[names[0]].file,
            tensors=tuple(names),
            expected=f"a tensor {scales[names[0]]}",
            found="the scale alone",
            next="fetch the shard that holds the tensor, or the index that lists it",
        )
    owners = set(scales.values())
    # What is announced has been held against its scales already.
    among = consumed if unannounced else ()
    bare = [name for name in among if tensors[name].dtype.startswith("F8_E") and name not in owners]
    for pattern, names in by_pattern(bare).items():
        yield fatal(
            "unpaired-scale",
            f"{pattern_range(pattern, names)}: {len(names):,} quantized tensors without a scale",
            file=tensors[names[0]].file,
            tensors=tuple(names),
            expected="a scale for each, as other tensors have",
            found="none",
            next="fetch the shard that holds the scale; a scale of one is never put in its place",
        )


def missing_findings(
    missing: Iterable[str],
    params: Parameters,
    candidates: Mapping[str, list[str]],
    tensors: Mapping[str, TensorInfo],
    tied_head: bool,
    lost: Mapping[str, str],
) -> Iterator[Finding]:
    """Parameters without a tensor, with how many of the same pattern have one, and where they might be.

    `candidates`: tensors that nothing consumes, by pattern. `lost`: parameter -> the file, absent or broken, that
    should have held it.
    """
    missing = list(missing)
    if not missing:
        return
    yield from _lost_findings([name for name in missing if name in lost], lost)
    missing = [name for name in missing if name not in lost]
    absent = _absent_layers(missing, params)
    whole = [name for name in missing if params[name].layer in absent]
    if whole and not any(_nearest(p, found, params, candidates, tensors) for p, found in by_pattern(whole).items()):
        yield _layers_finding(whole, absent)
        missing = [name for name in missing if params[name].layer not in absent]
    for pattern, names in by_pattern(missing).items():
        total = params.count(pattern)
        way = "find the tensors under another name and add a weight rule; values are never made up"
        if near := _nearest(pattern, names, params, candidates, tensors):
            way = f"perhaps {near}, as many and of the same shape: rename them or add a weight rule; nothing is guessed"
        elif names == ["head.weight"] and not tied_head and "embed.weight" not in missing:
            way = "fetch the shard with the output head; if the release ties it, tie_word_embeddings must say so"
        yield fatal(
            "missing-tensor",
            f"{pattern_range(pattern, names)}: {total - len(names):,} of {total:,} parameters filled",
            tensors=tuple(names),
            expected=f"{total:,} filled",
            found=f"{total - len(names):,} filled",
            next=way,
        )


def _absent_layers(missing: Iterable[str], params: Parameters) -> list[int]:
    """Layers of which nothing is there."""
    lacking = Counter(params[name].layer for name in missing)
    if not lacking:
        return []
    every = params.in_layers()
    return sorted(n for n, count in lacking.items() if count == every[n] and n not in (FIRST_STAGE, LAST_STAGE))


def _layers_finding(names: list[str], layers: list[int]) -> Finding:
    """One finding for all parameters of layers that are absent as a whole."""
    which = with_numbers(".*", [layers]).removeprefix(".")
    return fatal(
        "missing-tensor",
        f"layer{'s' if len(layers) > 1 else ''} {which}: no tensor at all, {len(names):,} parameters are not filled",
        tensors=tuple(names),
        expected=f"{len(names):,} filled",
        found="0 filled",
        next="fetch the shards that hold these layers; if the release has fewer, config.json is of another one",
    )


def _lost_findings(names: list[str], lost: Mapping[str, str]) -> Iterator[Finding]:
    """One finding a file for all that it should have held."""
    by_file: dict[str, list[str]] = {}
    for name in names:
        by_file.setdefault(lost[name], []).append(name)
    for file, mine in by_file.items():
        yield fatal(
            "missing-tensor",
            f"{len(mine):,} {'parameter has' if len(mine) == 1 else 'parameters have'} no source, since {file}, which "
            "should hold them, is not there, is broken or lacks them",
            file=file,
            tensors=tuple(mine),
            expected=f"{len(mine):,} filled",
            found="0 filled",
            next=f"fetch {file} again, and the index with it",
        )


def _nearest(
    pattern: str,
    names: list[str],
    params: Mapping[str, Param],
    candidates: Mapping[str, list[str]],
    tensors: Mapping[str, TensorInfo],
) -> str | None:
    """The unconsumed tensors that are as many and of the same shape, the most alike by name."""
    fitting = [
        other
        for other, found in candidates.items()
        if len(found) == len(names) and tensors[found[0]].shape == params[names[0]].shape
    ]
    if not fitting:
        return None
    if len(fitting) > MOST_COMPARED:  # those that end alike, if there are any
        fitting = [other for other in fitting if other.rpartition(".")[2] == pattern.rpartition(".")[2]] or fitting
    fitting = fitting[:MOST_COMPARED]
    best = max(fitting, key=lambda other: difflib.SequenceMatcher(None, pattern, other).ratio())
    return pattern_range(best, candidates[best])


def unconsumed_findings(
    groups: Mapping[str, list[str]], ranges: Mapping[str, str], tensors: Mapping[str, TensorInfo]
) -> Iterator[Finding]:
    """Tensors that no parameter takes, by pattern; `ranges`: patterns with their numbers, where these are known.

    Behind the first `MOST_NAMED` patterns all others are one finding.
    """
    for pattern, names in islice(groups.items(), MOST_NAMED):
        yield _unconsumed(ranges.get(pattern) or pattern_range(pattern, names), names, tensors)
    rest = [name for names in islice(groups.values(), MOST_NAMED, None) for name in names]
    if rest:
        yield _unconsumed(f"{len(groups) - MOST_NAMED:,} kinds more, as {rest[0]}", rest, tensors)


def _unconsumed(what: str, names: list[str], tensors: Mapping[str, TensorInfo]) -> Finding:
    return fatal(
        "unconsumed-tensor",
        f"{what}: {len(names):,} tensors that no parameter consumes",
        file=tensors[names[0]].file,
        tensors=tuple(names),
        expected="a weight rule, or a rule that leaves it out with a reason",
        found="no rule",
        next="add the rule to the family file: dropping weights in silence is not offered",
    )


def lost(checkpoint: Checkpoint, matcher: Matcher, params: Parameters) -> dict[str, str]:
    """Parameters whose tensors are in files that are absent or broken, as the index has it: parameter -> file."""
    found: dict[str, str] = {}
    for finding in checkpoint.findings:
        if finding.severity == "fatal" and finding.file:
            names = [name for name in finding.tensors if name not in checkpoint.tensors]
            for pattern, group_ in by_pattern(names).items():
                found.update(dict.fromkeys(_filled(pattern, group_, matcher, params), finding.file))
    if not checkpoint.tensors and len(checkpoint.shards) == 1:  # there is one file, and it cannot be read
        (file,) = checkpoint.shards
        found.update((name, file) for name in params if name not in found)
    return found


def _filled(pattern: str, names: list[str], matcher: Matcher, params: Parameters) -> Iterator[str]:
    """The parameters that tensors of one pattern would fill, whatever their shapes."""
    weights = [weight_name(name) or name for name in names]
    template = matcher.match_kind(weight_name(pattern) or pattern, weights[0], lambda: weights)
    for param in template[1] if template is not None else ():
        filled = named(bare(pattern, names), len(names), param)
        if "{e}" in param or filled is None:
            break
        yield from filled
    else:
        if template is not None:
            return
    for weight in weights:
        match = matcher.match(weight)
        for param in match.params if match is not None else ():
            yield from experts(param, params)
