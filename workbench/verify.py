"""The rung `verify`: an engine's numbers against a golden file or transformers, layer by layer, under any mesh."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal, note, warning
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.model.foreign import ForeignSpec
from firstlight.engine.model.spec import ModelSpec
from firstlight.engine.model.spec.foreign import ForeignVision
from firstlight.engine.parallel.constraints import refuse_impossible
from firstlight.engine.serving.options import EngineOptions
from firstlight.engine.serving.sight import Sight
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.ledger import account
from firstlight.workbench.bisect import blame
from firstlight.workbench.cached import CHECK
from firstlight.workbench.cases import ANSWER, Case, Rules
from firstlight.workbench.compare import limit_of
from firstlight.workbench.engines import open_engine
from firstlight.workbench.golden import PICTURE_NAMES, Golden
from firstlight.workbench.judge import judge
from firstlight.workbench.misannounced import misannounced
from firstlight.workbench.picture_marks import as_made
from firstlight.workbench.position_marks import as_counted
from firstlight.workbench.progress import Progress
from firstlight.workbench.render import words
from firstlight.workbench.report import Draft, Report
from firstlight.workbench.rounding_marks import as_stored, on_narrow_reference, on_rounded_tables, rounded_tables
from firstlight.workbench.side_files import absent_side_files
from firstlight.workbench.vocabulary import judge_embeddings

CHUNKS = 3  # that the longest prompt comes in, at least

if TYPE_CHECKING:
    from firstlight.engine.model.rules import Matcher
    from firstlight.engine.serving.api import EngineLike
    from firstlight.workbench.streamed import AnyReference


def verify(
    options: EngineOptions,
    golden: str | Path | None = None,
    reference: str | None = None,
    *,
    layers: tuple[int, int] | None = None,
    limit: float | None = None,
    engine: EngineLike | None = None,
    prompt: str | None = None,
    pictures: Sequence[str | Path] = (),
    trust_remote_code: bool = False,
    streamed: bool | None = None,
    progress: Progress | None = None,
) -> Report:
    """Compare the checkpoint of `options` under its mesh with a golden file, else with transformers.

    Float32 on the CPU unless `options` name a dtype or device. `engine`, one that runs already, is used as it is.
    `layers` [first, last) limits the comparison; `limit` replaces the relative max-abs that passes. Against
    transformers the inputs are `prompt` and `pictures` (or ones of our own) and random tokens, and what passes follows
    from the reference's own noise; `streamed` runs it layer by layer (None: if it would not fit). Raises `Refused`:
    bad-golden, not-available, and what a start may be refused for.
    """
    began_s = time.perf_counter()
    checkpoint = Checkpoint.open(options.checkpoint)
    spec, matcher = FAMILIES.describe(checkpoint.config)
    _check_layers(layers, spec)
    _check_reference(reference)
    options = _defaults(options, engine)
    if engine is None:  # before a reference is run for nothing
        _refuse_unstartable(checkpoint, spec, matcher, options)
    draft = _begun(checkpoint, spec, options, began_s)
    _judge_announcement(draft, checkpoint)
    rules = _rules(draft, checkpoint, spec, options.dtype, layers, limit)
    say = progress or Progress("verify")
    oracle: AnyReference | None = None
    if golden is not None:
        cases = [_golden_case(draft, Golden.read(golden), rules, eos_ids(checkpoint, "forced_eos_token_id"))]
    else:
        from firstlight.workbench.probe_inputs import inputs_of
        from firstlight.workbench.probes import reference_cases

        asked = inputs_of(draft, checkpoint, spec, prompt, pictures)
        oracle, cases = reference_cases(draft, checkpoint, rules, asked, say, streamed, trust_remote_code)
    cases = _within_context(cases, spec.max_positions if engine is None else engine.info().max_context)
    options = _sized(options, cases)
    tables = rounded_tables(checkpoint)
    draft.find(on_rounded_tables(tables))
    with open_engine(options, say.of("start")) if engine is None else nullcontext(engine) as running:
        draft.find(running.info().findings)
        if golden is not None:
            cases = [_as_written(draft, running, case, tables if limit is None else None) for case in cases]
        _compare(draft, running, cases, options, oracle, say)
    _refuse_idle(draft, cases, layers)
    _overall(draft, cases)
    return draft.close()


def _begun(checkpoint: Checkpoint, spec: ModelSpec, options: EngineOptions, began_s: float) -> Draft:
    """The report, with what is known before anything is computed."""
    draft = Draft("verify", f"{checkpoint.name}, {spec.family}, {options.mesh.describe()}, {options.dtype}", began_s)
    draft.find((*checkpoint.findings, *spec.findings))
    draft.find(absent_side_files(checkpoint.directory, spec.vision is not None))
    return draft


def _judge_announcement(draft: Draft, checkpoint: Checkpoint) -> None:
    """What engine and reference both take from the configuration, held against the numbers: the check `announced`."""
    found = misannounced(checkpoint)
    draft.find(found)
    if found:
        draft.check("announced", False, value=len(found), limit=0, unit="contradictions", detail=found[0].message)


def _rules(
    draft: Draft,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    dtype: str,
    layers: tuple[int, int] | None,
    limit: float | None,
) -> Rules:
    """What passes, by the dtype or as asked for."""
    within = limit_of(dtype) if limit is None else limit
    draft.metric("relative_max_abs_limit", within, "of scale", f"{dtype}; the reference's own scale, token by token")
    return Rules(spec=spec, limit=within, dtype=dtype, layers=layers, eos_ids=eos_ids(checkpoint))


def _within_context(cases: Sequence[Case], context: int) -> list[Case]:
    """The cases with what of their answers a context has room for; where only some layers are compared, none."""
    room = [context - case.golden.longest for case in cases]
    return [
        replace(case, decodes=case.steps <= left, served=0 if case.layers else max(0, min(ANSWER, left)))
        for case, left in zip(cases, room, strict=True)
    ]


def _refuse_unstartable(checkpoint: Checkpoint, spec: ModelSpec, matcher: Matcher, options: EngineOptions) -> None:
    """Refuses what no engine could be started with."""
    checkpoint.refuse_if_broken()
    refuse_impossible(spec, options.mesh)
    if not isinstance(spec, ForeignSpec):  # who loads that accounts for it
        account(checkpoint, spec, matcher).refuse_if_incomplete()


def _as_written(draft: Draft, running: EngineLike, case: Case, tables: dict[str, str] | None) -> Case:
    """A golden file's case by the conventions its numbers show: pictures, positions and, with `tables`, roundings."""
    case = as_counted(draft, running, as_made(draft, running, case))
    return case if tables is None else as_stored(draft, running, case, tables)


def _compare(
    draft: Draft,
    running: EngineLike,
    cases: Sequence[Case],
    options: EngineOptions,
    oracle: AnyReference | None,
    progress: Progress,
) -> None:
    """Judges every case, and then looks for the block and operator at fault in those that did not pass."""
    judge_embeddings(draft, running, cases, oracle)
    verdicts = [judge(draft, running, case, progress) for case in cases]
    for case, verdict in zip(cases, verdicts, strict=True):
        if not verdict.passed:
            blame(draft, case, verdict, running, options, oracle)


def _refuse_idle(draft: Draft, cases: Sequence[Case], layers: tuple[int, int] | None) -> None:
    """A report in which nothing was compared with the reference would pass."""
    if any(check.status != "skipped" and not check.name.endswith(CHECK) for check in draft.checks):
        return
    held = ", ".join(sorted(set().union(*(case.golden.outputs for case in cases))))
    raise Refused(
        fatal(
            "bad-golden",
            "nothing was compared" + (f" in layers {layers[0]}:{layers[1]}" if layers is not None else ""),
            file=cases[0].golden.source,
            expected="outputs of the layers that are compared, within the context",
            found="; ".join(filter(None, (held, *(check.detail for check in draft.checks)))),
            next="compare other layers, or write hidden.0 ... hidden.L as well (output_hidden_states=True)",
        )
    )


def _overall(draft: Draft, cases: Sequence[Case]) -> None:
    """The headline figures over several inputs: the worst of them."""
    for name in ("logits_max_abs", "kl_mean"):
        found = [draft.metrics[key] for case in cases if (key := case.metric(name)) in draft.metrics]
        if found and name not in draft.metrics:
            worst = max(found, key=lambda metric: float(metric.value or 0.0))
            draft.metric(name, worst.value, worst.unit, "the worst of the inputs")


def _golden_case(draft: Draft, golden: Golden, rules: Rules, forced: frozenset[int]) -> Case:
    """The case of a golden file, and findings on what it lacks. `forced`: tokens that end an answer cut short."""
    spec = rules.spec
    draft.find(golden.check(spec))
    if not golden.hidden:
        draft.find(
            note(
                "bad-golden",
                "no hidden states in the golden file: a fault can be seen but not located",
                file=golden.source,
                next="write hidden.0 ... hidden.L as well (output_hidden_states=True)",
            )
        )
    if golden.outputs.keys().isdisjoint(("logits", "generated")):
        draft.find(
            note(
                "bad-golden",
                "no logits in the golden file: the output head is not compared",
                file=golden.source,
                next="write logits as well",
            )
        )
    if golden.longest > spec.max_positions:
        draft.find(
            warning(
                "context-too-long",
                "the golden file's sequences are longer than the model has positions for",
                file=golden.source,
                expected=f"at most {spec.max_positions} tokens",
                found=str(golden.longest),
                next="compare shorter sequences as well",
            )
        )
    draft.metric("tokens", int(golden.mask.sum()), "tokens", f"in {words.quantity(golden.mask.shape[0], 'sequences')}")
    case = rules.case(golden, forced_ids=forced)
    draft.find(on_narrow_reference(case))
    return case


def _sized(options: EngineOptions, cases: Sequence[Case]) -> EngineOptions:
    """A cache no larger than the cases need, and steps that cut their prompts in several chunks."""
    answers = [max(case.served, case.steps if case.decodes else 0) for case in cases]
    longest = [case.golden.longest for case in cases]
    needed = max((tokens + answer for tokens, answer in zip(longest, answers, strict=True) if answer), default=16)
    vision = cases[0].spec.vision
    if vision is not None:
        needed = max(needed, sum(vision.counts(vision.blank())) + 2)  # a host answers to one picture before it is ready
    batch = min(options.max_batch, max(len(case.golden.input_ids) for case in cases))
    budget = options.token_budget
    if budget is None and not isinstance(vision, ForeignVision):
        seeing = [case.golden.longest for case in cases if case.golden.pictures.keys() & PICTURE_NAMES]
        budget = batch + max(1, -(-min(seeing, default=max(longest)) // CHUNKS), _uncut(cases))
    return msgspec.structs.replace(options, max_context=needed, max_batch=batch, token_budget=budget)


def _uncut(cases: Sequence[Case]) -> int:
    """Tokens of the largest picture that must be computed in one step; 0 where pictures may be cut."""
    spec = cases[0].spec
    if spec.vision is None or not Sight.of(spec).whole:
        return 0
    rows = [row == spec.vision.image_token_id for case in cases for row in case.golden.input_ids]
    runs = [len(list(run)) for row in rows for is_picture, run in groupby(row) if is_picture]
    return max([*runs, sum(spec.vision.counts(spec.vision.blank()))])


def _defaults(options: EngineOptions, engine: EngineLike | None) -> EngineOptions:
    """Float32 on the CPU unless something else is asked for or runs: what is compared is the mathematics."""
    info = None if engine is None else engine.info()
    dtype, device = ("F32", "cpu") if info is None else (info.dtype, info.device.partition(":")[0])
    return msgspec.structs.replace(
        options,
        mesh=options.mesh if info is None else info.mesh,
        dtype=dtype if info is not None or options.dtype == "auto" else options.dtype,
        device=device if info is not None or options.device == "auto" else options.device,
        num_pages=None,
        warm_up=False,
    )


def _check_layers(layers: tuple[int, int] | None, spec: ModelSpec) -> None:
    if layers is not None and not 0 <= layers[0] < layers[1] <= spec.num_layers:
        raise Refused(
            fatal(
                "usage",
                "there is no such range of layers",
                expected=f"FIRST:LAST within 0:{spec.num_layers}",
                found=f"{layers[0]}:{layers[1]}",
                next="correct --layers",
            )
        )


def _check_reference(reference: str | None) -> None:
    if reference not in (None, "transformers"):
        raise Refused(
            fatal(
                "usage",
                f"{reference!r} is not a reference that is known",
                expected="transformers, or a golden file",
                found=str(reference),
                next="give --reference transformers or --golden FILE",
            )
        )


def eos_ids(checkpoint: Checkpoint, key: str = "eos_token_id") -> frozenset[int]:
    """Tokens that end a reference's answer: those of generation_config.json and of config.json at both levels."""
    config = checkpoint.config
    levels = [config, config.get("text_config") or {}]
    if "generation_config.json" in checkpoint.side_files:
        with contextlib.suppress(ValueError, OSError):
            levels.append(json.loads((Path(checkpoint.directory) / "generation_config.json").read_text()))
    found: set[int] = set()
    for level in levels:
        ids = level.get(key)
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return frozenset(found)
