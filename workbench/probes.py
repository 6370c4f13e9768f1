"""What an engine and the reference are both asked when there is no golden file: results and the noise floor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from firstlight.engine.findings import note
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.workbench.cases import LEAST_LIMIT, Case, Rules, chooses
from firstlight.workbench.compare import EPSILON, Deviation, deviation
from firstlight.workbench.golden import Arrays, Golden
from firstlight.workbench.probe_inputs import POSITIONS
from firstlight.workbench.progress import Progress
from firstlight.workbench.report import Draft
from firstlight.workbench.streamed import AnyReference, StreamedReference, open_reference

GENERATED = 8


def reference_cases(
    draft: Draft,
    checkpoint: Checkpoint,
    rules: Rules,
    asked: Mapping[str, Arrays],
    progress: Progress,
    streamed: bool | None = None,
    trust_remote_code: bool = False,
) -> tuple[AnyReference, list[Case]]:
    """The reference and a case for each of the inputs `asked` (`inputs_of`), with the reference's own noise.

    `streamed`: whether it runs layer by layer (None: if it would not fit), for which no tokens are generated.
    """
    dtype = rules.dtype
    if dtype != "F32" and chooses(rules.spec):  # in one short row all tokens may follow from one other choice
        asked = {name: inputs for name, inputs in asked.items() if POSITIONS not in inputs}
    progress("reference", 0, 1, "models")
    reference = open_reference(checkpoint, streamed=streamed, trust_remote_code=trust_remote_code)
    in_layers = isinstance(reference, StreamedReference)
    if in_layers:
        message = "the reference runs layer by layer, so no generated tokens are compared"
        draft.find(note("not-available", message, next="run it whole where it fits"))
    rounded = None if dtype == "F32" else open_reference(checkpoint, dtype, streamed=in_layers)
    cases = []
    for index, (name, inputs) in enumerate(asked.items()):
        progress("reference", index, len(asked), "inputs")
        found = reference.run(inputs, generate=GENERATED if name == "prompt" else 0)
        golden = Golden.of({**inputs, **found}, f"transformers {reference.version}, {name}")
        case = _held(rules.case(golden, name=name, **_least(rules, inputs)), reference, rounded, inputs, found)
        worst = max(map(case.measure, case.floor.values()))
        how = "another summation order" if rounded is None else f"{dtype} instead of F32"
        draft.metric(f"{name}_noise_floor", worst, "of scale", f"the reference against itself, {how}; largest")
        draft.metric(f"{name}_tokens", int(golden.mask.sum()), "tokens")
        cases.append(case)
    progress("reference", len(asked), len(asked), "inputs")
    return reference, cases


def _held(case: Case, reference: AnyReference, rounded: AnyReference | None, inputs: Arrays, found: Arrays) -> Case:
    """The case with the reference's deviation from itself: free running, and from its own inputs layer by layer.

    In float32 another order of summation; in a narrower dtype the whole computation in that dtype.
    """
    free = reference.again(inputs) if rounded is None else rounded.run(inputs)
    forced = reference.again(inputs, found) if rounded is None else rounded.forced(inputs, found)
    names = [name for name in found if name not in ("generated", "image_features")]
    floor: dict[str, Deviation] = {name: case.apart(name, free[name]) for name in names}
    if "image_features" in found:
        floor["image_features"] = deviation(free["image_features"], found["image_features"])
    return replace(case, floor=floor, forced_floor={name: case.apart(name, forced[name], True) for name in names})


def _least(rules: Rules, inputs: Arrays) -> dict[str, float]:
    """Limits of positions that are far: an angle is position times frequency, rounded, so its error grows with both."""
    if POSITIONS not in inputs:
        return {}
    least = max(LEAST_LIMIT, int(inputs[POSITIONS].max()) * EPSILON["F32"])
    return {"least": least, "limit": max(rules.limit, least)}
