"""Describes what is missing between tensors and parameters: one finding per name pattern, however many names it has."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice

from firstlight.engine.findings import MOST_TENSORS, Finding, fatal, listing, several
from firstlight.engine.model.backwards import Backwards
from firstlight.engine.model.rules import Matcher
from firstlight.engine.model.spec import Param
from firstlight.engine.weights.accounts.lots import Parameters, experts
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.files.header import TensorInfo
from firstlight.engine.weights.names.listed import Group, Listed, Numbered, Spelt
from firstlight.engine.weights.names.naming import by_pattern, pattern_of, shown
from firstlight.engine.weights.names.patterns import parted, with_numbers
from firstlight.engine.weights.packed import FLOATS, MAINS, weight_name
from firstlight.engine.weights.source import Source

Problem = tuple[str, str, str, str]  # code, pattern of the parameter, expected, found: equal ones are one finding
MOST_NAMED = 200  # kinds of tensors that have a finding each
_WORDS = re.compile(r"[._]")
MOST_COMPARED = 200  # names that a missing one is held against
SCALES = ("_scale_inv", "_scale", "_scale_2", "_scales", "_zero_point", "_zeros", "_g_idx")


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


def wrong(problem: Problem, names: Listed, params: Listed, tensors: Mapping[str, TensorInfo]) -> Finding:
    """One finding for all tensors, and the parameters they fill, that have the same problem."""
    code, pattern, expected, found = problem
    if code == "unsupported-format" and pattern:
        message = (
            f"{names.shown()}: {several(len(names), 'weight is', 'weights are')} stored as {found}, and the "
            f"architecture has {pattern} turned round: whether the codes are turned as well, no file says"
        )
        way = "use an unquantized copy of the release"
    elif code == "unsupported-format":
        message = (
            f"{several(len(names), 'tensor is', 'tensors are')} stored as {found}, and config.json does not say how to "
            f"read that: {names.shown()}"
        )
        way = "fetch the release's own config.json with its quantization_config, or use an unquantized copy"
    else:
        has = "holds more than is taken by" if expected.endswith("parameters") else "does not have the shape of"
        filled = params.by_pattern()
        message = f"{names.shown()} {has} {filled[pattern].range if pattern in filled else params.shown(1)}"
        way = "config.json and weights belong to different releases, or the family misreads a key"
    return fatal(
        code,
        message,
        file=tensors[names[0]].file,
        **listing(list(dict.fromkeys(names)) if len(names) <= MOST_TENSORS else names),
        expected=expected,
        found=found,
        next=way,
    )


def twice_findings(
    twice: Iterable[tuple[Group, Group]], sources: Mapping[str, Source], tensors: Mapping[str, TensorInfo]
) -> Iterator[Finding]:
    """Parameters that two tensors fill: groups of them, and the second tensor of each."""
    for names, seconds in twice:
        one, other = sources[names[0]].tensor, seconds[0]
        pairs = zip(names[:MOST_TENSORS], seconds[:MOST_TENSORS], strict=True)
        both = tuple(dict.fromkeys(tensor for name, second in pairs for tensor in (sources[name].tensor, second)))
        shown = both if len(names) <= MOST_TENSORS else both[:MOST_TENSORS]
        yield fatal(
            "duplicate-tensor",
            f"{names.range}: {several(len(names), 'parameter has', 'parameters have')} two sources, {one} and {other}"
            + (", and so on" if len(names) > 1 else ""),
            file=tensors[other].file,
            tensors=shown,
            more_tensors=2 * len(names) - len(shown) if len(names) > MOST_TENSORS else 0,
            expected="one source",
            found="two",
            next="remove the stale copy from the checkpoint; which of them is meant is not guessed",
        )


def paired(twice: Iterable[tuple[str, str]]) -> Iterator[tuple[Group, Group]]:
    """Pairs of names one by one, by the pattern of the first."""
    second = dict(twice)
    for pattern, names in by_pattern(second).items():
        yield Spelt(pattern, names), Spelt("", [second[name] for name in names])


def owners(scale: str) -> Iterator[str]:
    """What the tensor that a scale belongs to may be called, and the codes of the weight that it is."""
    base = scale.removesuffix(next(end for end in SCALES if scale.endswith(end)))
    for name in dict.fromkeys((base, f"{base}.weight", base.replace("input", "weight"))):
        yield name
        yield from (name[: len(name) - len(weight)] + codes for codes, weight in MAINS if name.endswith(weight))


def split_scales(
    unconsumed: Iterable[str], consumed: Mapping[str, object], tensors: Mapping[str, TensorInfo]
) -> tuple[dict[str, str], list[str]]:
    """Scales by the name of the tensor they belong to, and all other tensors nobody consumes.

    A scale that lies beside codes that nobody consumes either is one of the others.
    """
    scales: dict[str, str] = {}
    others: list[str] = []
    for name in unconsumed:
        if not name.endswith(SCALES):
            others.append(name)
            continue
        possible = list(owners(name))
        owner = next((one for one in possible if one in tensors), possible[0])
        if owner in tensors and owner not in consumed:
            others.append(name)
        else:
            scales[name] = owner
    return scales, others


def scale_findings(
    scales: Mapping[str, str],
    lone: Iterable[Group],
    consumed: Mapping[str, object],
    tensors: Mapping[str, TensorInfo],
) -> Iterator[Finding]:
    """Scales that nothing announces, scales of nothing, and 8-bit tensors without a scale though others have.

    `lone`: whole groups of scales of nothing.
    """
    paired = [name for name, owner in scales.items() if owner in consumed]
    alone = [name for name, owner in scales.items() if owner not in consumed]
    plain = [name for name in paired if tensors[scales[name]].dtype in FLOATS]
    unannounced = [name for name in paired if tensors[scales[name]].dtype not in FLOATS]
    yield from _beside_plain(plain, scales, tensors)
    if unannounced:
        yield _unannounced(unannounced, scales, tensors)
    yield from _without_tensor(alone, lone, tensors)
    if unannounced:  # what is announced has been held against its scales already
        yield from _without_scale(consumed, set(scales.values()), tensors)


def _beside_plain(
    names: Sequence[str], scales: Mapping[str, str], tensors: Mapping[str, TensorInfo]
) -> Iterator[Finding]:
    """Scales of tensors whose numbers stand for themselves."""
    for alike in Listed(names).by_pattern().values():
        yield fatal(
            "unpaired-scale",
            f"{alike.range}: "
            + several(len(alike), "scale beside a tensor that is", "scales beside tensors that are")
            + " not quantized",
            file=tensors[alike[0]].file,
            **listing(alike),
            expected="quantized tensors",
            found=f"tensors in {tensors[scales[alike[0]]].dtype}",
            next="fetch the release again: scales and tensors belong to different copies",
        )


def _unannounced(names: Sequence[str], scales: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> Finding:
    """Scales of quantized tensors of which the configuration says nothing."""
    return fatal(
        "unsupported-format",
        f"{shown(names)}: {several(len(names), 'scale of a tensor', 'scales of tensors')} that config.json does not "
        "announce",
        file=tensors[names[0]].file,
        **listing(names),
        expected="a quantization_config that says how they are stored",
        found="tensors in " + ", ".join(sorted({tensors[scales[name]].dtype for name in names})),
        next="fetch the release's own config.json; how tensors are quantized is not guessed",
    )


def _without_tensor(
    names: Sequence[str], lone: Iterable[Group], tensors: Mapping[str, TensorInfo]
) -> Iterator[Finding]:
    """Scales of nothing: `names`, and whole groups."""
    for alike in Listed(names, lone).by_pattern().values():
        yield fatal(
            "unpaired-scale",
            f"{alike.range}: "
            + several(
                len(alike), "scale without the tensor it belongs to", "scales without the tensors they belong to"
            ),
            file=tensors[alike[0]].file,
            **listing(alike),
            expected=f"a tensor {next(owners(alike[0]))}",
            found="the scale alone",
            next="fetch the shard that holds the tensor, or the index that lists it",
        )


def _without_scale(
    consumed: Iterable[str], owned: Collection[str], tensors: Mapping[str, TensorInfo]
) -> Iterator[Finding]:
    """8-bit tensors without a scale, where others have one: `owned`."""
    bare = [name for name in consumed if tensors[name].dtype.startswith("F8_E") and name not in owned]
    for alike in Listed(bare).by_pattern().values():
        yield fatal(
            "unpaired-scale",
            f"{alike.range}: {several(len(alike), 'quantized tensor', 'quantized tensors')} without a scale",
            file=tensors[alike[0]].file,
            **listing(alike),
            expected="a scale for each, as other tensors have",
            found="none",
            next="fetch the shard that holds the scale; a scale of one is never put in its place",
        )


def missing_findings(
    missing: Mapping[str, Numbered],
    params: Parameters,
    candidates: Mapping[str, Group],
    tensors: Mapping[str, TensorInfo],
    tied_head: bool,
    head: str | None,
    lost: Mapping[str, Mapping[tuple[int, ...], str]],
    backwards: Backwards,
) -> Iterator[Finding]:
    """Parameters without a tensor, with how many of the same pattern have one, what it is called, where it might be.

    `candidates`: tensors that nothing consumes, by pattern. `head`: the tensor of the output head. `lost`: pattern and
    numbers of a parameter -> the file, absent or broken, that should have held it.
    """
    yield from _lost_findings(missing, lost)
    if lost:
        missing = _but(missing, lambda pattern, row: row not in lost.get(pattern, ()))
    near = _Nearest(candidates, tensors) if missing else None
    absent = _absent_layers(missing, params)
    of_layers = {pattern: names for pattern, names in missing.items() if absent and params.end(pattern) is None}
    gone = _but(of_layers, lambda _, row: row[0] in absent)
    if gone and not any(near.of(names, params) for names in gone.values() if near is not None):
        yield _layers_finding(Listed(groups=gone.values()), sorted(absent))
        left = _but(of_layers, lambda _, row: row[0] not in absent)
        missing = {
            pattern: left.get(pattern, names)
            for pattern, names in missing.items()
            if pattern not in of_layers or pattern in left
        }
    for pattern, names in missing.items():
        total, why = params.count(pattern), ""
        way = "find the tensors under another name and add a weight rule; values are never made up"
        if near is not None and (found := near.of(names, params)):
            way = (
                f"perhaps {found}, as many and of the same shape: rename them or add a weight rule; nothing is guessed"
            )
        elif names[:2] == ["head.weight"] and not tied_head and "embed.weight" not in missing:
            way = "fetch the shard with the output head; if the release ties it, tie_word_embeddings must say so"
        elif names[:2] == ["embed.weight"] and tied_head and head is not None:
            why = f"; config.json ties the token embedding to the output head, and {head} alone is stored"
            way = (
                "fetch the shard with the embedding; if the release has none, store "
                f"{head} under the embedding's name as well: tied, both are one matrix"
            )
        yield fatal(
            "missing-tensor",
            f"{names.range}: {total - len(names):,} of {total:,} parameters filled{why}",
            **listing(names),
            expected=f"{total:,} filled" + _stored_as(names, backwards),
            found=f"{total - len(names):,} filled",
            next=way,
        )


def _stored_as(names: Numbered, backwards: Backwards) -> str:
    """What the tensors of missing parameters are called, by the first of them in the order of numbers."""
    tensor = backwards.tensor_of(names[names.rows.index(min(names.rows))])
    return "" if tensor is None else f", from {tensor}" + (" and so on" if len(names) > 1 else "")


def _but(missing: Mapping[str, Numbered], is_chosen: Callable[[str, tuple[int, ...]], bool]) -> dict[str, Numbered]:
    """The parameters that are chosen by their pattern and numbers."""
    found = {pattern: [row for row in names.rows if is_chosen(pattern, row)] for pattern, names in missing.items()}
    return {pattern: Numbered(pattern, rows) for pattern, rows in found.items() if rows}


def _absent_layers(missing: Mapping[str, Numbered], params: Parameters) -> set[int]:
    """Layers of which nothing is there."""
    lacking: Counter[int] = Counter()
    for pattern, names in missing.items():
        if params.end(pattern) is None:
            lacking.update(row[0] for row in names.rows)
    every = params.in_layers() if lacking else {}
    return {layer for layer, count in lacking.items() if count == every[layer]}


def _layers_finding(names: Listed, layers: list[int]) -> Finding:
    """One finding for all parameters of layers that are absent as a whole."""
    which = with_numbers(".*", [layers]).removeprefix(".")
    return fatal(
        "missing-tensor",
        f"layer{'s' if len(layers) > 1 else ''} {which}: no tensor at all, "
        f"{several(len(names), 'parameter is', 'parameters are')} not filled",
        **listing(names),
        expected=f"{len(names):,} filled",
        found="0 filled",
        next="fetch the shards that hold these layers; if the release has fewer, config.json is of another one",
    )


def _lost_findings(
    missing: Mapping[str, Numbered], lost: Mapping[str, Mapping[tuple[int, ...], str]]
) -> Iterator[Finding]:
    """One finding a file for all that it should have held."""
    by_file: dict[str, dict[str, list[tuple[int, ...]]]] = {}
    for pattern, names in missing.items():
        files = lost.get(pattern, {})
        for row in names.rows if files else ():
            if (file := files.get(row)) is not None:
                by_file.setdefault(file, {}).setdefault(pattern, []).append(row)
    for file, found in by_file.items():
        mine = Listed(groups=[Numbered(pattern, rows) for pattern, rows in found.items()])
        yield fatal(
            "missing-tensor",
            f"{several(len(mine), 'parameter has', 'parameters have')} no source, since {file}, which "
            "should hold them, is not there, is broken or lacks them",
            file=file,
            **listing(mine),
            expected=f"{len(mine):,} filled",
            found="0 filled",
            next=f"fetch {file} again, and the index with it",
        )


class _Nearest:
    """Unconsumed tensors by how many there are and what shape they have."""

    def __init__(self, candidates: Mapping[str, Group], tensors: Mapping[str, TensorInfo]) -> None:
        self._found: dict[tuple[int, tuple[int, ...]], list[Group]] = {}
        for group in candidates.values():
            self._found.setdefault((len(group), tensors[group[0]].shape), []).append(group)

    def of(self, names: Numbered, params: Parameters) -> str | None:
        """Those that are as many as these parameters and of the same shape, the most alike by name."""
        shape = params[names[0]].shape
        fitting, pattern = self._found.get((len(names), shape), []), names.pattern
        if len(fitting) > MOST_COMPARED:  # those that end alike, if there are any
            ending = pattern.rpartition(".")[2]
            fitting = [other for other in fitting if other.pattern.rpartition(".")[2] == ending] or fitting
        if not fitting:
            return None
        alike = difflib.SequenceMatcher(None, pattern)
        return max(fitting[:MOST_COMPARED], key=lambda other: _likeness(alike, pattern, other.pattern.lower())).range


def _likeness(to: difflib.SequenceMatcher[str], one: str, other: str) -> tuple[int, float]:
    """How many words both have in common, and how much of their letters."""
    to.set_seq2(other)
    return len({*_WORDS.split(one)} & {*_WORDS.split(other)}), to.ratio()


def unconsumed_findings(
    groups: Mapping[str, Group], tensors: Mapping[str, TensorInfo], matcher: Matcher
) -> Iterator[Finding]:
    """Tensors that no parameter takes, by pattern; behind the first `MOST_NAMED` all others are one finding."""
    for names in islice(groups.values(), MOST_NAMED):
        is_known = not matcher.knows_none_of(weight_of(names.pattern))
        yield _unconsumed(names.range, names, tensors, is_known)
    rest = Listed(groups=islice(groups.values(), MOST_NAMED, None))
    if rest:
        count = sum(group.kinds for group in groups.values()) - MOST_NAMED
        yield _unconsumed(f"{count:,} kinds more, as {rest[0]}", rest, tensors)


def weight_of(pattern: str) -> str:
    """The name of the weight that a tensor is, or belongs to; of patterns as of names."""
    module, dot, last = pattern.rpartition(".")
    return module + _weight_of(dot + last)


@lru_cache(maxsize=1024)
def _weight_of(last: str) -> str:
    """The same of the last part of a name, which decides it."""
    weight = weight_name(last)
    if weight is not None:
        return weight
    return next(owners(last)) if last.endswith(SCALES) else last


def _unconsumed(what: str, names: Sequence[str], tensors: Mapping[str, TensorInfo], is_known: bool = False) -> Finding:
    """`is_known`: rules speak of such tensors, but by the configuration there is no parameter for these."""
    if is_known:
        return fatal(
            "unconsumed-tensor",
            f"{what}: {several(len(names), 'tensor', 'tensors')} that no parameter consumes: by config.json there are "
            "no such parameters",
            file=tensors[names[0]].file,
            **listing(names),
            expected="tensors of the layers, experts and parts that config.json has",
            found="others",
            next="fetch config.json and weights of one release, or add a rule that leaves these out with a reason",
        )
    return fatal(
        "unconsumed-tensor",
        f"{what}: {several(len(names), 'tensor', 'tensors')} that no parameter consumes",
        file=tensors[names[0]].file,
        **listing(names),
        expected="a weight rule, or a rule that leaves it out with a reason",
        found="no rule",
        next="add the rule to the family file: dropping weights in silence is not offered",
    )


def lost(checkpoint: Checkpoint, matcher: Matcher, params: Parameters) -> dict[str, dict[tuple[int, ...], str]]:
    """Parameters whose tensors are in files that are absent or broken: pattern and numbers -> file.

    That is what the index lists and no header has, and what headers say wrongly.
    """
    found: dict[str, dict[tuple[int, ...], str]] = {}
    if not checkpoint.tensors and len(checkpoint.shards) == 1:  # there is one file, and it cannot be read
        (file,) = checkpoint.shards
        for name in params:
            pattern, numbers = parted(name)
            found.setdefault(pattern, {})[numbers] = file
    for group, files in _absent(checkpoint):
        for pattern, rows, of_rows in _filled(group, files, matcher, params):
            found.setdefault(pattern, {}).update(zip(rows, of_rows, strict=False))
    return found


def _absent(checkpoint: Checkpoint) -> Iterator[tuple[Group, Sequence[str]]]:
    """Tensors that should be there and are not, by pattern, with the file of each."""
    files = checkpoint.absent
    if not isinstance(files, dict):
        yield from files.by_pattern()
        return
    for pattern, names in by_pattern(files).items():
        yield Spelt(pattern, names), [files[name] for name in names]


def _filled(
    group: Group, files: Sequence[str], matcher: Matcher, params: Parameters
) -> Iterator[tuple[str, Sequence[tuple[int, ...]], Sequence[str]]]:
    """The parameters that tensors of one pattern would fill, whatever their shapes: numbers, and the tensors' files."""

    def weights() -> list[str]:
        return [weight_name(name) or name for name in group]

    kind, first = (weight_name(name) or name for name in (group.pattern, group[0]))
    if matcher.knows_none_of(kind):
        return
    template = matcher.match_kind(kind, first, weights)
    if template is not None and not any("{e}" in param for param in template[1]):
        rows = group.rows if isinstance(group, Numbered) else [parted(name)[1] for name in group]
        yield from ((param, rows, files) for param in template[1])
        return
    for weight, file in zip(weights(), files, strict=True):
        match = matcher.match(weight)
        for param in match.params if match is not None else ():
            for name in experts(param, params):
                pattern, row = parted(name)
                yield pattern, [row], [file]
