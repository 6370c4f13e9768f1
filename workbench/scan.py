"""The rung `scan`: what a checkpoint is and whether it is whole, from headers and configuration alone. No torch."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, fatal, several
from firstlight.engine.inputs.image_constants import read_constants
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.model.foreign import ForeignSpec
from firstlight.engine.model.rules import Matcher
from firstlight.engine.model.spec import ModelSpec, VisionSpec
from firstlight.engine.weights.accounts.lots import Consumed
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.files.uncollected import uncollected
from firstlight.engine.weights.ledger import Ledger, account
from firstlight.engine.weights.names.patterns import grouped, numbers, with_numbers
from firstlight.engine.weights.names.stock import Kind, by_dtype, stock
from firstlight.workbench import fallback_rungs
from firstlight.workbench.agreement import disagreements, unlike_tower
from firstlight.workbench.contradictions import contradictions, embedding_rows
from firstlight.workbench.describe import layer_rows, operator_rows
from firstlight.workbench.fallback import remote_code
from firstlight.workbench.ledger_file import LedgerFile
from firstlight.workbench.progress import Progress
from firstlight.workbench.report import Draft, Report
from firstlight.workbench.side_files import absent_side_files, side_file_rows
from firstlight.workbench.storage import storage_rows

if TYPE_CHECKING:
    from firstlight.workbench.deep import TensorReading
    from firstlight.workbench.manifest import Manifest

MOST_KINDS = 5_000  # that have a row of the report each


def scan(
    source: str | os.PathLike[str],
    deep: bool = False,
    progress: Progress | None = None,
    *,
    strict: bool = False,
    manifest: str | os.PathLike[str] | None = None,
    against: str | os.PathLike[str] | None = None,
    keep: Path | None = None,
    operators: bool = False,
    trust_remote_code: bool = False,
) -> Report:
    """Architecture, tensors, formats, operators, gaps and integrity of a checkpoint.

    Reads headers, index and side files only; `deep` reads every tensor as well, hashes it, and looks for NaN, infinity
    and scales unlike those of siblings. `manifest` writes the hashes to a file, `against` compares with such a file;
    both imply `deep`. `strict`: a warning fails the scan. `keep`: a run directory that gets the whole ledger, row by
    row, for the dashboard. `operators`: what the reference's own code computes and what serves it here; code that the
    checkpoint brings is run for it with `trust_remote_code` alone. Raises `Refused` when the source is no checkpoint at
    all, or `against` no manifest; everything else that is wrong is a failed check.
    """
    trusted = trust_remote_code if operators else None
    with uncollected():
        return _scan(source, deep, progress or Progress(), strict, manifest, against, keep, trusted)


def _scan(
    source: str | os.PathLike[str],
    deep: bool,
    progress: Progress,
    strict: bool,
    manifest: str | os.PathLike[str] | None,
    against: str | os.PathLike[str] | None,
    keep: Path | None,
    trusted: bool | None,
) -> Report:
    began_s = time.perf_counter()
    other = _manifest(manifest, against)
    checkpoint = Checkpoint.open(source)
    draft = Draft("scan", checkpoint.name, began_s)
    kinds = stock(checkpoint.tensors)
    _files(draft, checkpoint)
    described = _architecture(draft, checkpoint)
    foreign = described is not None and isinstance(described[0], ForeignSpec)
    ledger = account(checkpoint, *described, kinds) if described is not None and not foreign else None
    if described is not None and isinstance(described[0], ForeignSpec):
        fallback_rungs.scanned(draft, checkpoint, described[0])
    draft.table("remote_code", remote_code(checkpoint))
    if ledger is not None and described is not None:
        _account(draft, ledger)
        _model(draft, checkpoint, *described)
    if ledger is not None and keep is not None:
        LedgerFile.of(keep).write(checkpoint, ledger)
    _tensors(draft, kinds, ledger)
    _contradictions(draft, checkpoint, kinds)
    rows = embedding_rows(kinds)
    if ledger is not None and described is not None and rows is not None:
        rows = min(rows, described[0].vocab_size)  # rows behind are padding, so a token there has none
    _side_files(draft, checkpoint, rows, sees=described is not None and described[0].vision is not None)
    if deep or manifest is not None or other is not None:
        _deep(draft, checkpoint, progress, manifest, other)
    if trusted is not None:
        _operators(draft, checkpoint, trusted)
    if strict:
        warnings = sum(finding.severity == "warning" for finding in draft.findings)
        draft.check("no warnings (strict)", not warnings, value=warnings, limit=0, unit="warnings")
    return draft.close()


def _operators(draft: Draft, checkpoint: Checkpoint, trust_remote_code: bool) -> None:
    """What the reference computes; that it cannot be asked is a failed check, and the scan stands."""
    from firstlight.workbench.coverage import coverage

    try:
        coverage(draft, checkpoint.directory, trust_remote_code)
    except Refused as refused:
        draft.find(refused.findings)
        draft.check("the reference's operators are listed", False, detail=refused.findings[0].code)


def _manifest(manifest: str | os.PathLike[str] | None, against: str | os.PathLike[str] | None) -> Manifest | None:
    """The manifest to compare with; what cannot be read or written is said before anything else is done."""
    if manifest is None and against is None:
        return None
    from firstlight.workbench.manifest import Manifest, refuse_unwritable

    if manifest is not None:
        refuse_unwritable(manifest)
    return None if against is None else Manifest.read(against)


def _files(draft: Draft, checkpoint: Checkpoint) -> None:
    draft.find(checkpoint.findings)
    broken = [finding for finding in checkpoint.findings if finding.severity == "fatal"]
    concerned = sorted({finding.file for finding in broken if finding.file})
    draft.check(
        "files, headers and index are sound",
        not broken,
        value=len(checkpoint.shards),
        unit="shards",
        detail=f"see findings: {', '.join(concerned) or broken[0].code}" if broken else "",
    )
    draft.metric(
        "checkpoint_bytes", checkpoint.payload_bytes, "B", "in " + several(len(checkpoint.shards), "file", "files")
    )
    draft.metric("tensors", len(checkpoint.tensors), "tensors")


def _architecture(draft: Draft, checkpoint: Checkpoint) -> tuple[ModelSpec, Matcher] | None:
    """The spec, or None with the reasons in the report."""
    named = checkpoint.config.get("model_type")
    try:
        spec, matcher = FAMILIES.describe(checkpoint.config)
    except Refused as refused:
        draft.find(refused.findings)
        draft.check("architecture is known", False, value=str(named), detail=refused.findings[0].code)
        return None
    draft.find(spec.findings)
    draft.title = f"{checkpoint.name}, {spec.family}"
    draft.check("architecture is known", True, value=str(named), detail=f"family {spec.family}")
    return spec, matcher


def _account(draft: Draft, ledger: Ledger) -> None:
    draft.find(ledger.findings)
    counts = ledger.summary()
    accounted = counts["tensors_consumed"] + counts["tensors_left_out"]
    left_out = f"{counts['tensors_left_out']:,} left out with a reason" if counts["tensors_left_out"] else ""
    draft.check(
        "every tensor is accounted for",
        counts["tensors_unconsumed"] == 0,
        value=accounted,
        limit=counts["tensors"],
        unit="tensors",
        detail=left_out,
    )
    draft.check(
        "every parameter is filled",
        counts["parameters_missing"] == 0,
        value=counts["parameters_filled"],
        limit=counts["parameters"],
        unit="parameters",
    )
    other = [
        f for f in ledger.findings if f.severity == "fatal" and f.code not in ("missing-tensor", "unconsumed-tensor")
    ]
    draft.check("shapes and dtypes are as the model needs them", not other, value=len(other), limit=0, unit="problems")


def _model(draft: Draft, checkpoint: Checkpoint, spec: ModelSpec, matcher: Matcher) -> None:
    from firstlight.engine.parallel.plan import totals
    from firstlight.engine.weights.formats.registry import stored_format

    try:
        facts = totals(spec, stored_format(checkpoint.config, spec.dtype, matcher.rules))
        draft.metric("parameters", facts.parameters, "parameters")
        draft.metric("active_parameters", facts.active_parameters, "parameters", "for one text token")
        if facts.mtp_parameters:
            draft.metric("mtp_parameters", facts.mtp_parameters, "parameters", "counted apart, not loaded")
        draft.metric("kv_bytes_per_token", facts.kv_bytes_per_token, "B", "whole model, bf16")
        if facts.state_bytes_per_sequence:
            draft.metric("state_bytes_per_sequence", facts.state_bytes_per_sequence, "B", "whole model")
        if facts.convolution_bytes_per_sequence:
            draft.metric("convolution_bytes_per_sequence", facts.convolution_bytes_per_sequence, "B", "whole model")
    except Refused as refused:
        draft.find(refused.findings)
    draft.metric("layers", spec.num_layers, "layers", f"hidden {spec.hidden:,}")
    if spec.residual is not None:
        widest = max(spec.residual.planes(layer) for layer in range(spec.num_layers + 1))
        draft.metric("residual_streams", widest, "streams", f"at most; {spec.residual.words()}")
    draft.metric("vocabulary", spec.vocab_size, "tokens")
    draft.metric("max_positions", spec.max_positions, "tokens")
    if isinstance(spec.vision, VisionSpec):  # other towers take pictures of any size
        side = f"{spec.vision.image_size} x {spec.vision.image_size}"
        draft.metric("tokens_per_image", spec.vision.tokens_per_image, "tokens", f"from {side} pixels")
    draft.table("layers", layer_rows(spec))
    draft.table("operators", operator_rows(spec))


def _tensors(draft: Draft, kinds: Sequence[Kind], ledger: Ledger | None) -> None:
    draft.table(
        "formats",
        (
            {"dtype": dtype, "tensors": count, "elements": elements, "total_bytes": nbytes}
            for dtype, (count, elements, nbytes) in by_dtype(kinds).items()
        ),
    )
    if ledger is not None and (rows := list(storage_rows(ledger))):
        draft.table("storage", rows)
    draft.table("tensors", _kind_rows(kinds, ledger))


def _kind_rows(kinds: Sequence[Kind], ledger: Ledger | None) -> Iterator[dict[str, Any]]:
    for kind in islice(kinds, MOST_KINDS):
        shapes = [" x ".join(map(str, shape)) for shape in kind.shapes[:1]]
        yield {
            "name": kind.range,
            "count": len(kind.tensors),
            "dtype": ", ".join(kind.dtypes),
            "shape": shapes[0] if len(kind.shapes) == 1 else f"{len(kind.shapes)} shapes",
            "total_bytes": kind.nbytes,
            **({} if ledger is None else {"fills": _destination(ledger, kind)}),
        }
    if len(kinds) > MOST_KINDS:
        yield _rest(kinds[MOST_KINDS:])


def _rest(kinds: Sequence[Kind]) -> dict[str, Any]:
    """One row for the kinds behind those that are listed."""
    return {
        "name": f"{sum(kind.kinds for kind in kinds):,} kinds more",
        "count": sum(len(kind.tensors) for kind in kinds),
        "dtype": ", ".join(sorted({dtype for kind in kinds for dtype in kind.dtypes})),
        "shape": "",
        "total_bytes": sum(kind.nbytes for kind in kinds),
    }


def _destination(ledger: Ledger, kind: Kind) -> str:
    """Where the tensors of one kind go: parameters, the reason why nowhere, or that nobody knows."""
    if kind.pattern in ledger.fills:
        return with_numbers(ledger.fills[kind.pattern], kind.numbers)
    if kind.pattern in ledger.strangers:
        return "nothing"
    if isinstance(ledger.consumed, Consumed) and (entered := ledger.consumed.entered(kind.pattern)) is not None:
        return entered or "nothing"
    params = dict.fromkeys(param for name in kind.names for param in ledger.consumed.get(name, ()))
    if params:
        groups = grouped(params, str)
        return ", ".join(with_numbers(pattern, numbers(pattern, names)) for pattern, names in groups.items())
    reason = ledger.left_out.get(kind.names[0])
    return f"left out: {reason}" if reason else "nothing"


def _contradictions(draft: Draft, checkpoint: Checkpoint, kinds: Sequence[Kind]) -> None:
    """What a family has said already, in the same words, is not said twice."""
    said = [finding.message.split(";")[0] for finding in draft.findings]
    whole = not any(finding.severity == "fatal" for finding in checkpoint.findings)
    found = tuple(contradictions(checkpoint.config, kinds, whole))
    draft.find(finding for finding in found if finding.message.split(";")[0] not in said)
    if wrong := [finding.message for finding in found if finding.severity == "fatal"]:
        draft.check("config.json agrees with itself", False, value=len(wrong), limit=0, unit="keys", detail=wrong[0])


def _side_files(draft: Draft, checkpoint: Checkpoint, rows: int | None, sees: bool) -> None:
    files = side_file_rows(checkpoint.directory, sees)
    draft.table("side_files", ({"file": row[0], "for": row[1], "there": row[2]} for row in files))
    draft.find(absent_side_files(checkpoint.directory, sees))
    draft.find(disagreements(checkpoint.path(""), checkpoint.config, rows))
    if sees:
        _constants(draft, checkpoint)


def _constants(draft: Draft, checkpoint: Checkpoint) -> None:
    """The constants of pictures, each with the file or class it comes from, as `preprocess` takes them."""
    try:
        found = read_constants(checkpoint.path(""))
    except Refused as refused:  # what forbids pictures is a warning for what needs none; absent files are said already
        said = {(finding.code, finding.file) for finding in draft.findings}
        softened = (
            msgspec.structs.replace(finding, severity="warning", file=Path(finding.file or "").name)
            for finding in refused.findings
        )
        draft.find(finding for finding in softened if (finding.code, finding.file) not in said)
        return
    rows = ({"constant": one.name, "value": str(one.value), "source": one.source} for one in found.constants)
    draft.table("constants", rows)
    file = Path(found.file).name
    draft.find(msgspec.structs.replace(finding, file=Path(finding.file or file).name) for finding in found.findings)
    messages = {finding.message for finding in draft.findings}  # with defaults of the class, which no file states
    unlike = unlike_tower(checkpoint.config, found.values, file)
    draft.find(finding for finding in unlike if finding.message not in messages)


def _deep(
    draft: Draft,
    checkpoint: Checkpoint,
    progress: Progress,
    manifest: str | os.PathLike[str] | None,
    other: Manifest | None,
) -> None:
    from firstlight.workbench.deep import read_all
    from firstlight.workbench.manifest import differences, manifest_of
    from firstlight.workbench.outliers import outliers
    from firstlight.workbench.scan_copies import copies

    readings, elapsed_s = read_all(checkpoint, progress)
    bad = [reading for reading in readings if reading.nan or reading.infinite]
    total = sum(checkpoint.tensors[reading.tensor].nbytes for reading in readings)
    draft.check("every value is finite", not bad, value=len(bad), limit=0, unit="tensors", detail=_names(bad))
    draft.metric("read_rate", total / elapsed_s if elapsed_s else None, "B/s", f"{total:,} bytes read and hashed")
    draft.find(_not_finite(bad, checkpoint))
    draft.find(_placed(finding, checkpoint) for finding in (*outliers(readings), *copies(readings, checkpoint)))
    draft.table(
        "hashes",
        (
            {"name": r.tensor, "sha256": r.sha256, **({"nan": r.nan, "infinite": r.infinite} if bad else {})}
            for r in readings
        ),
    )
    if manifest is None and other is None:
        return
    mine = manifest_of(checkpoint, readings)
    if manifest is not None:
        mine.write(manifest)
        draft.metric(
            "manifest",
            str(manifest),
            "",
            f"{several(len(mine.tensors), 'tensor', 'tensors')}, {several(len(mine.files), 'side file', 'side files')}",
        )
    if other is not None:
        found = [_placed(finding, checkpoint) for finding in differences(mine, other)]
        draft.find(found)
        wrong = sum(len(finding.tensors) + finding.more_tensors for finding in found)
        draft.check(
            "tensors are those of the manifest",
            not any(finding.severity == "fatal" for finding in found),
            value=wrong,
            limit=0,
            unit="tensors",
            detail=f"{len(other.tensors):,} of {other.name} compared by dtype, shape and SHA-256",
        )


def _not_finite(bad: Sequence[TensorReading], checkpoint: Checkpoint) -> Iterator[Finding]:
    """One finding a file for its tensors that hold NaN or infinity."""
    files: dict[str, list[TensorReading]] = {}
    for reading in bad:
        files.setdefault(checkpoint.tensors[reading.tensor].file, []).append(reading)
    for file, readings in files.items():
        nan, infinite = sum(one.nan for one in readings), sum(one.infinite for one in readings)
        yield fatal(
            "not-finite",
            f"{readings[0].tensor}{_more(len(readings) - 1)} of {file} "
            f"{'hold' if len(readings) > 1 else 'holds'} values that are no numbers",
            file=file,
            tensors=tuple(one.tensor for one in readings),
            expected="finite values",
            found=f"{nan:,} NaN, {infinite:,} infinite",
            next=f"fetch {file} again, or compare its hashes with another copy (scan --against)",
        )


def _more(count: int) -> str:
    return f" and {several(count, 'tensor', 'tensors')} more" if count else ""


def _placed(finding: Finding, checkpoint: Checkpoint) -> Finding:
    """The finding with the file of its first tensor, where that is here."""
    tensor = next((checkpoint.tensors[name] for name in finding.tensors if name in checkpoint.tensors), None)
    return finding if tensor is None or finding.file else msgspec.structs.replace(finding, file=tensor.file)


def _names(readings: Iterable[Any]) -> str:
    return ", ".join(f"{r.tensor} ({r.nan:,} NaN, {r.infinite:,} infinite)" for r in list(readings)[:4])
