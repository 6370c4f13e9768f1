"""Where a wrong result comes from: the first faulty block, its mixer or feed-forward, the operator or the mesh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from firstlight.engine.findings import Finding, fatal
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.serving.api import EngineLike
from firstlight.engine.serving.options import EngineOptions
from firstlight.engine.serving.trace import UNNORMED
from firstlight.workbench.cases import Case
from firstlight.workbench.compare import Deviation, deviation, gain
from firstlight.workbench.engines import open_engine
from firstlight.workbench.judge import Verdict, first_bad
from firstlight.workbench.report import Draft

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from firstlight.workbench.streamed import AnyReference

LARGEST_RERUN_BYTES = 2 << 30  # weights of an engine that is started again to try other operators


def blame(
    draft: Draft,
    case: Case,
    verdict: Verdict,
    engine: EngineLike,
    options: EngineOptions,
    reference: AnyReference | None = None,
) -> None:
    """Add the finding that says which block is at fault, as closely as the case allows to tell."""
    if verdict.bad_layer is not None:
        draft.find(_faulty_layer(draft, case, verdict, engine, options, reference))
        return
    for finding in _outside_layers(case, verdict, options.mesh):
        draft.find(finding)
        return
    if verdict.cached is not None:  # where the blocks are wrong, so is what is served
        draft.find(verdict.cached)


def _faulty_layer(
    draft: Draft,
    case: Case,
    verdict: Verdict,
    engine: EngineLike,
    options: EngineOptions,
    reference: AnyReference | None,
) -> Finding:
    index = verdict.bad_layer
    assert index is not None
    layer = case.spec.layers[index]
    kinds = (type(layer.mixer).__name__, type(layer.ffn).__name__)
    found = verdict.forced.get(index + 1) or verdict.free[index + 1]
    part = _part(case, index, engine, reference) if reference is not None else None
    where = f"layer {index}" if part is None else f"layer {index}, {part} ({kinds[part == 'feed-forward']})"
    how = "given the reference's own input" if index + 1 in verdict.forced else "free running"
    culprit = _culprit(case, index, engine, options)
    name = case.own(index + 1) if index + 1 in verdict.forced else f"hidden.{index + 1}"
    expected, measured = case.told(name, found, index + 1 in verdict.forced)
    draft.table(
        f"{case.prefix}first fault",
        [
            {
                "layer": index,
                "mixer": kinds[0],
                "feed_forward": kinds[1],
                "at_fault": part or "not told apart",
                "relative": case.measure(found),
                "cause": culprit or "not an operator: weights, rules or the spec of this layer",
            }
        ],
    )
    return fatal(
        "wrong-numbers",
        f"{where} is the first block that computes something else than the reference, {how}"
        + (f"; {culprit}" if culprit else ""),
        file=case.golden.source,
        tensors=(name,),
        expected=expected,
        found=measured,
        next=f"look at the spec and the weight rules of layers.{index}; {_advice(culprit)}",
    )


def _advice(culprit: str | None) -> str:
    if culprit is None:
        return "every operator gives the same with its reference implementation"
    return "run again with the reference implementation (--operator OP=reference), or on one rank"


def _part(case: Case, index: int, engine: EngineLike, reference: AnyReference) -> str:
    """Which half of the layer is wrong when both start from the reference's input of the layer."""
    golden = case.golden
    name = f"layers.{index}.mixer"
    mask = golden.mask
    ours = engine.trace(
        golden.input_ids,
        mask.astype(np.int64),
        golden.pictures,
        layers=(index, index + 1),
        inputs=_given(case, index),
        blocks=True,
    )
    theirs = reference.mixer(index, golden.inputs(), golden.hidden[index])
    if name not in ours or theirs is None:
        return "mixer or feed-forward"
    found = deviation(ours[name][mask], theirs[mask])
    if case.is_narrow:
        found = replace(found, gain=gain(ours[name][mask], theirs[mask]))
    return "feed-forward" if case.passes(case.own(index + 1), found, forced=True) else "mixer"


def _culprit(case: Case, index: int, engine: EngineLike, options: EngineOptions) -> str | None:
    """An operator whose reference implementation heals the layer, or the mesh when one rank alone is right."""
    if index not in case.golden.hidden or engine.info().load_bytes > LARGEST_RERUN_BYTES:
        return None
    alone = msgspec.structs.replace(options, mesh=Mesh())
    if options.mesh.world_size > 1:
        healed = _heals(case, index, alone)
        return f"one rank alone is right: the division over {options.mesh.describe()} is at fault" if healed else None
    fast = [(op, name) for op, name, chosen, _ in engine.info().operators if chosen and name != "reference"]
    if not fast or not _heals(case, index, _by_reference(alone, [op for op, _ in fast])):
        return None
    for operator, name in fast:
        if _heals(case, index, _by_reference(alone, [operator])):
            return f"operator {operator} is at fault: its implementation {name} differs from the reference one"
    return "with the reference implementations of all operators it is right"


def _by_reference(options: EngineOptions, operators: Sequence[str]) -> EngineOptions:
    return msgspec.structs.replace(options, operators={**options.operators, **dict.fromkeys(operators, "reference")})


def _heals(case: Case, index: int, options: EngineOptions) -> bool:
    """Whether the layer is right in an engine that is started with other options."""
    golden, name = case.golden, case.own(index + 1)
    with open_engine(options) as engine:
        ours = engine.trace(
            golden.input_ids,
            golden.mask.astype(np.int64),
            golden.pictures,
            layers=(index, index + 1),
            inputs=_given(case, index),
        )
    if name not in ours:  # some of what enters the layer is not in the golden file
        return False
    return case.passes(name, case.apart(name, ours[name], True, ours.get(UNNORMED)), forced=True)


def _given(case: Case, index: int) -> dict[str, NDArray[Any]]:
    """The reference's hidden states up to what enters layer `index`: a topology of planes needs earlier ones."""
    return {f"hidden.{i}": value for i, value in case.golden.hidden.items() if i <= index}


def _outside_layers(case: Case, verdict: Verdict, mesh: Mesh) -> Iterator[Finding]:
    """Faults before the first layer and behind the last, and errors that only add up."""
    features = verdict.others.get("image_features")
    if features is not None and not case.passes("image_features", features):
        yield _outside(case, "the vision tower or the projector", "image_features", features)
    if 0 in verdict.free and not case.passes("hidden.0", verdict.free[0]):
        yield _outside(case, _embedding_words(case, verdict), "hidden.0", verdict.free[0])
    norm = verdict.others.get("teacher.norm")
    if norm is not None and not case.passes(f"hidden.{case.spec.num_layers}", norm, forced=True):
        yield _outside(case, "the final norm", f"hidden.{case.spec.num_layers}", norm, forced=True)
    head = verdict.others.get("teacher.logits")
    if head is not None and not case.passes("logits", head, forced=True):
        yield _outside(case, "the output head", "logits", head, forced=True)
    if verdict.forced and first_bad(case, verdict.forced, forced=True) is None:
        wrong = first_bad(case, verdict.free)
        if wrong is not None:
            message = "errors that only add up: every block alone is right on the reference's input"
            message += ", or what one stage hands to the next is wrong" if mesh.pp > 1 else ""
            yield _outside(case, message, f"hidden.{wrong}", verdict.free[wrong])


def _embedding_words(case: Case, verdict: Verdict) -> str:
    """Whether text or placeholders are wrong at the decoder's input."""
    vision, golden = case.spec.vision, case.golden
    if vision is None or "hidden.0" not in verdict.traced:
        return "the token embedding or its scale"
    at_R = (golden.input_ids == vision.image_token_id)[golden.mask]
    ours, theirs = verdict.traced["hidden.0"][golden.mask], golden.outputs["hidden.0"][golden.mask]
    text_right = bool((~at_R).any()) and case.passes("hidden.0", deviation(ours[~at_R], theirs[~at_R]))
    return "picture features at the placeholders" if text_right else "the token embedding or its scale"


def _outside(case: Case, what: str, name: str, deviates: Deviation, forced: bool = False) -> Finding:
    expected, found = case.told(name, deviates, forced)
    return fatal(
        "wrong-numbers",
        f"{what}: first difference at {name}",
        file=case.golden.source,
        tensors=(name,),
        expected=expected,
        found=found,
        next="look at the family's spec and rules for this part, and at the inputs of the golden file",
    )
