"""One reference result against an engine: every comparison as a check, a row of a table, and the first bad block.

Legend: B batch, T padded length, R real tokens of all rows, W width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from firstlight.engine.errors import FirstlightError, Refused
from firstlight.engine.findings import Finding
from firstlight.engine.model.spec import ModelSpec, pictures_of_rows
from firstlight.engine.serving.api import EngineLike
from firstlight.engine.serving.sight import is_marked
from firstlight.engine.serving.trace import POSITIONS, UNNORMED
from firstlight.workbench.cached import judge_cached
from firstlight.workbench.cases import Case
from firstlight.workbench.compare import Deviation, deviation, unequal
from firstlight.workbench.golden import PICTURE_NAMES, Arrays
from firstlight.workbench.logits import judge_logits, place
from firstlight.workbench.progress import Progress
from firstlight.workbench.report import Draft


@dataclass(slots=True)
class Verdict:
    """What came out of one case. `free` and `forced`: hidden.i by i; forced: from the reference's hidden.(i - 1)."""

    free: dict[int, Deviation] = field(default_factory=dict)
    forced: dict[int, Deviation] = field(default_factory=dict)
    others: dict[str, Deviation] = field(default_factory=dict)  # logits, teacher.logits, image_features
    traced: Arrays = field(default_factory=dict)
    bad_layer: int | None = None  # the first whose own output is wrong
    cached: Finding | None = None  # how requests get other numbers than a trace
    passed: bool = True


def judge(draft: Draft, engine: EngineLike, case: Case, progress: Progress | None = None) -> Verdict:
    """Run the engine on the case's inputs, free and teacher-forced, and write every comparison into the draft."""
    say = progress or Progress()
    before, verdict = len(draft.checks), Verdict()
    say("free running", 0, 1, "runs")
    free, trouble = _free(engine, case)
    verdict.traced = free
    say("teacher-forced", 0, 1, "runs")
    forced = _forced(engine, case)
    _hidden(draft, case, free, forced, verdict)
    _layer_table(draft, case, verdict)
    if "image_features" in case.golden.outputs and (case.layers is None or case.layers[0] == 0):
        _image_features(draft, case, free, verdict)
    if "logits" in case.golden.outputs and _has_logits(draft, case, free):
        _logits(draft, case, free, forced, verdict)
    say("generated", 0, case.steps, "tokens")
    _answers(draft, case, engine, free, trouble, is_alone=len(draft.checks) == before)
    say("cached", 0, case.served, "tokens")
    verdict.cached = judge_cached(draft, engine, case)
    _first_fault(case, verdict)
    verdict.passed = all(check.status != "failed" for check in draft.checks[before:])
    return verdict


def _logits(draft: Draft, case: Case, free: Arrays, forced: Arrays, verdict: Verdict) -> None:
    found = verdict.others["logits"] = _compare(draft, case, "logits", "logits", free["logits"])
    if "logits" in forced:
        verdict.others["teacher.logits"] = _compare(draft, case, "teacher.logits", "logits", forced["logits"], True)
    if not found.broken:
        judge_logits(draft, case, free["logits"], case.golden.outputs["logits"], found)


def _answers(draft: Draft, case: Case, engine: EngineLike, free: Arrays, trouble: str, is_alone: bool) -> None:
    """The greedy continuation; `trouble`: why there is none, `is_alone`: nothing else was compared."""
    if trouble:
        draft.check(f"{case.prefix}generated", False, detail=trouble)
    elif case.steps and case.decodes:
        _generated(draft, case, engine, free["generated"])
    elif case.steps:
        longest = f"{case.golden.longest} + {case.steps} tokens are more than the context holds"
        fits = case.golden.longest + case.steps <= case.spec.max_positions  # a larger context than this engine's
        passed = None if fits or is_alone else False  # alone: refused as a whole
        draft.check(f"{case.prefix}generated", passed, detail=longest)


def _forced(engine: EngineLike, case: Case) -> Arrays:
    """Each layer on the reference's own input, where there is any."""
    golden = case.golden
    given = {f"hidden.{i}": value for i, value in golden.hidden.items()}
    if not given:
        return {}
    mask = golden.mask.astype(np.int64)
    return engine.trace(golden.input_ids, mask, golden.pictures, layers=case.layers, inputs=given)


def _free(engine: EngineLike, case: Case) -> tuple[Arrays, str]:
    """A free run with the generated tokens; without them, and the reason, where generating fails."""
    golden, steps = case.golden, case.steps if case.decodes else 0
    mask = golden.mask.astype(np.int64)
    try:
        return engine.trace(golden.input_ids, mask, golden.pictures, layers=case.layers, steps=steps), ""
    except Refused:
        raise
    except FirstlightError as error:
        if not steps:
            raise
        return engine.trace(golden.input_ids, mask, golden.pictures, layers=case.layers), str(error)


def _hidden(draft: Draft, case: Case, free: Arrays, forced: Arrays, verdict: Verdict) -> None:
    """hidden.i and teacher.i for every i that the golden file holds."""
    golden = case.golden
    for index in golden.hidden:
        if not case.wants(index):
            continue
        name = f"hidden.{index}"
        verdict.free[index] = _compare(draft, case, name, name, free.get(name))
        if not index or name not in forced:
            continue
        found = _compare(draft, case, f"teacher.{index}", name, forced[name], True, forced.get(UNNORMED))
        own = case.own(index)
        if own == name:
            verdict.forced[index] = found
        else:  # the layer in front of the final norm, and that norm
            verdict.others["teacher.norm"] = found
            verdict.forced[index] = _compare(draft, case, f"teacher.{own}", own, forced.get(own), True)


def _compare(
    draft: Draft,
    case: Case,
    check: str,
    name: str,
    ours: NDArray[Any] | None,
    forced: bool = False,
    unnormed: NDArray[Any] | None = None,
) -> Deviation:
    mask, limit = case.golden.mask, case.limit_for(name, forced)
    if ours is None:
        draft.check(case.prefix + check, False, limit=limit, unit="of scale", detail=f"the engine shows no {name}")
        return unequal(int(mask.sum()), f"the engine shows no {name}")
    found = case.apart(name, ours, forced, unnormed)
    where = place(mask, found.row)
    _record(draft, case, check, name, found, where, forced)
    return found


def _record(
    draft: Draft, case: Case, check: str, name: str, found: Deviation, where: str, forced: bool = False
) -> None:
    """A deviation as a check; the detail says more when it does not pass."""
    passed = case.passes(name, found, forced)
    words = found.broken or f"max-abs {found.max_abs:.2e}"
    if not passed and not found.broken:
        words += f", cosine {found.cosine:.8f}, worst at {where}"
    if case.is_narrow and not found.broken:
        outside, count = int(case.outside(found).sum()), len(found.relative_R)
        words += f", {outside} of {count} tokens beyond {case.limit:.3g}"
        words += f" ({case.outliers_allowed(name, count, forced)} may be)" if outside else ""
    value, limit = case.measure(found), case.limit_for(name, forced)
    unit = "of scale, 3 tokens in 4" if case.is_narrow else "of scale"
    if not passed and found.gain is not None and value <= limit and case.is_off(name, found, forced):
        value, limit, unit = found.gain.apart, case.gain_limit(name, found, forced) or 0.0, "of its size"
        words += f"; {found.gain.value:.4f} times as large as the reference's throughout"
    draft.check(case.prefix + check, passed, value=value, limit=limit, unit=unit, detail=words)


def _image_features(draft: Draft, case: Case, free: Arrays, verdict: Verdict) -> None:
    theirs, ours = case.golden.outputs["image_features"], free.get("image_features")
    limit = case.limit_for("image_features")
    if ours is None or ours.shape != theirs.shape:
        shape = "none" if ours is None else str(list(ours.shape))
        detail = f"the engine gives {shape}, the reference {list(theirs.shape)}"
        draft.check(f"{case.prefix}image_features", False, limit=limit, unit="of scale", detail=detail)
        return
    found = deviation(ours, theirs)
    _record(draft, case, "image_features", "image_features", found, f"feature {found.row}")
    verdict.others["image_features"] = found


def _has_logits(draft: Draft, case: Case, free: Arrays) -> bool:
    """Whether there are logits to compare: the last layer is asked for, and the engine shows them."""
    if case.layers is not None and case.layers[1] != case.spec.num_layers:
        return False
    if "logits" not in free:
        _compare(draft, case, "logits", "logits", None)
    return "logits" in free


def _generated(draft: Draft, case: Case, engine: EngineLike, ours: NDArray[Any]) -> None:
    """The greedy continuation through the cache: equal to the reference's, or up to a near-tie of the two tokens."""
    theirs = case.golden.outputs["generated"]
    same, first = True, ""
    forgiven, passed_over, shifted, forced = 0, 0, 0, 0
    counts_padding = POSITIONS in case.golden.pictures  # see `as_counted`; what is served counts tokens
    for batch, (row, expected) in enumerate(zip(ours, theirs, strict=True)):
        if _is_stretched(case.spec) and case.golden.mask[batch].sum() < case.golden.longest:
            passed_over += 1
            continue
        stop = _until_end(case, expected)
        if stop == len(expected) and int(expected[-1]) in case.forced_ids:
            stop, forced = stop - 1, forced + 1
        differing = np.flatnonzero(row[:stop] != expected[:stop])
        if not len(differing):
            continue
        step = int(differing[0])
        if counts_padding and not case.golden.mask[batch, 0]:
            shifted += 1
            continue
        exists = 0 <= expected[step] < case.spec.vocab_size
        if exists and _is_tie(case, engine, batch, expected[: step + 1], int(row[step])):
            forgiven += 1
            continue
        same = False
        first = first or f"row {batch}, step {step}: {int(row[step])} instead of {int(expected[step])}"
    count, steps = theirs.shape
    words = first or f"{count} {'row' if count == 1 else 'rows'} of {steps} steps"
    if forgiven:
        words += f", {forgiven} part at a near-tie"
    if forced:
        words += f", the last step of {forced} rows left out: generation_config.json has the reference end there"
    if shifted:
        words += f", {shifted} rows passed over: the reference counts the padding in front of them"
    if passed_over:
        words += f", {passed_over} shorter rows passed over: the reference stretches their positions to the longest row"
    draft.check(f"{case.prefix}generated", same, value=int(not same), limit=0, unit="differences", detail=words)


def _is_stretched(spec: ModelSpec) -> bool:
    """Whether rotary frequencies depend on the length of the context."""
    ropes = [layer.rope for layer in spec.layers]
    return any(rope and rope.scaling and rope.scaling.kind in ("dynamic", "longrope") for rope in ropes)


def _until_end(case: Case, expected: NDArray[Any]) -> int:
    """Steps that count: through the first end-of-sequence token; references fill the rest with padding."""
    ends = [step for step, token in enumerate(expected) if int(token) in case.eos_ids]
    return ends[0] + 1 if ends else len(expected)


def _is_tie(case: Case, engine: EngineLike, batch: int, expected: NDArray[Any], ours: int) -> bool:
    """Whether the reference's last token and ours are within the limit of each other after the same prefix."""
    golden = case.golden
    prefix = np.concatenate([golden.input_ids[batch][golden.mask[batch]], expected[:-1]])[None]
    logits_V = engine.trace(prefix, None, _pictures_of(case, batch))["logits"][0, -1]
    margin = abs(float(logits_V[ours] - logits_V[int(expected[-1])]))
    return margin <= 2 * case.limit * float(np.abs(logits_V).max())


def _pictures_of(case: Case, batch: int) -> Arrays:
    """The picture tensors of one row: pictures are in the order of their placeholders."""
    golden, vision = case.golden, case.spec.vision
    if vision is None or not golden.pictures.keys() & PICTURE_NAMES:
        return {}
    pictures = {name: value for name, value in golden.pictures.items() if name != POSITIONS}
    is_placeholder = (golden.input_ids == vision.image_token_id) & golden.mask
    rows = pictures_of_rows(vision.counts(pictures), is_placeholder.sum(axis=1).tolist())
    first, count = rows[batch]
    if not count:
        return {}
    unmarked = {} if is_marked(pictures) else {"token_type_ids": np.zeros((1, 1), np.int64)}
    return {**vision.share(pictures, first, count), **unmarked}


def _first_fault(case: Case, verdict: Verdict) -> None:
    """Name the first block whose own output is wrong: teacher forcing tells a faulty block from one fed wrongly."""
    bad = first_bad(case, verdict.forced, forced=True)
    if bad is not None:
        verdict.bad_layer = bad - 1
        return
    wrong = first_bad(case, verdict.free)
    if wrong and wrong - 1 not in case.golden.hidden:
        verdict.bad_layer = wrong - 1


def first_bad(case: Case, errors: Mapping[int, Deviation], forced: bool = False) -> int | None:
    """The lowest i whose hidden.i does not pass."""
    names = {i: case.own(i) if forced else f"hidden.{i}" for i in errors}
    return next((i for i, found in errors.items() if not case.passes(names[i], found, forced)), None)


def _layer_table(draft: Draft, case: Case, verdict: Verdict) -> None:
    rows = []
    for index, free in verdict.free.items():
        name, forced = f"hidden.{index}", verdict.forced.get(index)
        rows.append(
            {
                "hidden": index,
                "of": "embedding" if index == 0 else f"layer {index - 1}",
                "verdict": _word(case, index, free, forced),
                "free_running": case.measure(free),
                "teacher_forced": None if forced is None else case.measure(forced),
                "floor": case.floor_of(name),
                "forced_floor": case.floor_of(case.own(index), forced=True),
                "limit": case.limit_for(name),
                "cosine": free.cosine,
                "max_abs": free.max_abs,
            }
        )
    if rows:
        optional = ("teacher_forced", "floor", "forced_floor")
        empty = [name for name in optional if all(row[name] is None for row in rows)]
        kept = [{key: value for key, value in row.items() if key not in empty} for row in rows]
        draft.table(f"{case.prefix}layers", kept)


def _word(case: Case, index: int, free: Deviation, forced: Deviation | None) -> str:
    if forced is not None and not case.passes(case.own(index), forced, forced=True):
        return "fault here"
    if not case.passes(f"hidden.{index}", free):
        return "not finite" if free.broken else "wrong input" if forced is not None else "apart"
    return "equal"
