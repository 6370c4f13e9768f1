"""The rung `plan`: what every rank would hold, whether it fits, what decided, and the nearest layout that fits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, fatal, what_is
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.model.foreign import ForeignSpec
from firstlight.engine.model.spec import ModelSpec
from firstlight.engine.parallel.estimate import Roofline, StepTime
from firstlight.engine.parallel.hardware import Cluster
from firstlight.engine.parallel.mesh import AXES, HEADS, Attention, Mesh
from firstlight.engine.parallel.plan import HEADROOM, Objective, Plan, make_plan
from firstlight.engine.parallel.ranking import reason, shown
from firstlight.engine.weights.accounts.tensor_count import tensor_count
from firstlight.engine.weights.checkpoint import config_twice
from firstlight.engine.weights.files.index import CONFIG_LIMIT_BYTES, read_object
from firstlight.engine.weights.formats.plain import Plain
from firstlight.engine.weights.formats.registry import stored_format
from firstlight.engine.weights.formats.telltale import by_files
from firstlight.workbench import fallback_rungs
from firstlight.workbench.describe import span
from firstlight.workbench.facts import completed, filled_in, shipped
from firstlight.workbench.report import Draft, Report
from firstlight.workbench.resident import resident_finding
from firstlight.workbench.side_files import absent_side_files

DEFAULT_CONTEXT = 4096
RATES = ("memory_bandwidth_Bps", "bf16_flops", "link_Bps", "nic_Bps")
SEEING = ("vision", "projector")  # roles of weights that text alone does without


def plan(
    source: str | os.PathLike[str],
    cluster: Cluster,
    mesh: Mesh | None = None,
    *,
    context: int | None = None,
    concurrency: int | None = None,
    cache_dtype: str = "BF16",
    headroom: float = HEADROOM,
    objective: Objective = "latency",
    full_window: bool = False,
    usual_context: int = DEFAULT_CONTEXT,
    exchange: str = "auto",
    attention: Attention = "divided",
) -> Report:
    """Lays a model out on a cluster, by `mesh` or, without one, the best layout for `objective`.

    `context` None: `usual_context` tokens, or what the model has positions for. `concurrency` None: one sequence at
    once or, for throughput, as many as fit. `exchange`: how tokens meet experts of other ranks. `attention`: of the
    layouts that are looked for, where no mesh says it. `full_window`: windowed layers keep the whole context, as the
    engine does. `source`: a checkpoint's directory or a configuration alone (`data/models/*.json`, or the name of one).
    The report fails when the layout does not fit. Raises `Refused` when the wish is impossible or the source is none.
    """
    name, config = read_config(source)
    draft = Draft("plan", name)
    spec, matcher = FAMILIES.describe(config)
    draft.find(filled_in(config) + spec.findings)
    if isinstance(spec, ForeignSpec):
        return fallback_rungs.planned(draft, str(source), spec, cluster, mesh, headroom)
    if (home := Path(source).expanduser()).is_dir():
        draft.find(absent_side_files(home, spec.vision is not None))
        if (tool := by_files({path.name for path in home.iterdir()})) is not None:
            raise Refused(tool)
    stored = stored_format(config, spec.dtype, matcher.rules)
    found = make_plan(
        spec,
        stored,
        cluster,
        mesh,
        context=context or min(usual_context, spec.max_positions),
        concurrency=concurrency,
        cache_dtype=cache_dtype,
        headroom=headroom,
        objective=objective,
        full_window=full_window,
        exchange=exchange,
        attention=attention,
    )
    draft.title = f"{name} on {cluster.describe()}, {found.mesh.describe()}"
    _verdict(draft, found)
    if not isinstance(stored, Plain):
        _unpacked(draft, found, *resident_finding(spec, stored, found, cache_dtype, full_window))
    draft.metric("tensors", tensor_count(spec, matcher.rules, stored), "tensors", "without extra prediction layers")
    _figures(draft, found)
    _tables(draft, spec, found, exchange)
    return draft.close()


def _unpacked(draft: Draft, found: Plan, loaded_bytes: int, finding: Finding) -> None:
    """What quantized weights take in this engine, where that is more than what is stored."""
    draft.metric("loaded_weight_bytes_per_device", loaded_bytes, "B", "as this engine holds them")
    if loaded_bytes != found.weight_bytes_per_device:
        draft.find(finding)


def read_config(source: str | os.PathLike[str]) -> tuple[str, dict[str, Any]]:
    """Name and raw configuration of a checkpoint directory, a JSON file, or a model of `data/models`."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path.resolve().name, _read(path, "config.json")
    if path.is_file():
        return path.stem, completed(_read(path.parent, path.name))
    name = path.name.removesuffix(".json")
    if (facts := shipped(name)) is not None:
        return name, completed(facts)
    known = resources.files("firstlight.data").joinpath("models")
    names = sorted(entry.name.removesuffix(".json") for entry in known.iterdir() if entry.name.endswith(".json"))
    raise Refused(
        fatal(
            "not-found",
            f"{source} is neither a checkpoint directory nor a configuration",
            file=str(source),
            expected=f"a directory, a config.json, or one of {', '.join(names)}",
            found=what_is(path),
            next="name a directory that holds config.json, or a JSON file",
        )
    )


def _read(directory: Path, name: str) -> dict[str, Any]:
    """A configuration, read with a bound; one that states a key twice is refused, since nobody knows which is meant."""
    config, twice = read_object(directory, name, CONFIG_LIMIT_BYTES)
    if twice:
        raise Refused(config_twice(twice))
    return config


def _verdict(draft: Draft, found: Plan) -> None:
    worst = found.largest
    draft.check(
        "the largest rank fits",
        found.fits,
        value=worst.total,
        limit=found.usable_bytes,
        unit="B",
        detail=f"rank {worst.rank} of {found.mesh.world_size}; {found.context:,} tokens of context, "
        f"{found.concurrency:,} at once",
    )
    draft.find(found.findings)


def _figures(draft: Draft, found: Plan) -> None:
    facts = found.totals
    draft.metric("parameters", facts.parameters, "parameters")
    draft.metric("active_parameters", facts.active_parameters, "parameters", "for one text token")
    draft.metric("mtp_parameters", facts.mtp_parameters, "parameters", "extra prediction layers, counted apart")
    draft.metric("checkpoint_bytes", facts.checkpoint_bytes, "B", "all tensors of the release")
    draft.metric("weight_bytes_per_device", found.weight_bytes_per_device, "B", "the largest over ranks")
    if any(role in facts.by_role for role in SEEING):
        text = max(sum(size for role, size in rank.weights.items() if role not in SEEING) for rank in found.ranks)
        draft.metric("text_weight_bytes_per_device", text, "B", "the same without vision tower and projector")
    draft.metric("kv_bytes_per_token", facts.kv_bytes_per_token, "B", "whole model")
    remembered = "whole model: full windows and what layers remember; inputs of convolutions apart"
    draft.metric("state_bytes_per_sequence", facts.state_bytes_per_sequence, "B", remembered)
    if facts.convolution_bytes_per_sequence:
        kept = facts.convolution_bytes_per_sequence
        draft.metric("convolution_bytes_per_sequence", kept, "B", "whole model: last inputs of convolutions")
    why = "" if found.devices_needed is not None else "no layout of up to 4,096 devices holds one sequence"
    draft.metric("devices_needed", found.devices_needed, "devices", why or f"of {found.cluster.device.name}")
    draft.metric("binding_constraint", found.binding, "", found.binding_reason)
    draft.metric("usable_bytes_per_device", found.usable_bytes, "B", "device memory less the headroom")
    whole = found.mesh.size(HEADS) < found.mesh.tp
    draft.metric("mesh", found.mesh.describe(), "", "every rank of tp holds and caches all heads" if whole else "")
    ms, rate = found.estimate.ms_per_token, found.estimate.tokens_per_s
    device = found.cluster.device
    unknown = ", ".join(name for name in RATES if getattr(device, name) is None)
    missing = "" if ms is not None else f"no {unknown} of {device.name} is known to estimate from"
    at_once = missing or f"of decode, {found.concurrency:,} at once, by a roofline"
    draft.metric("ms_per_token", ms, "ms", at_once)
    draft.metric("tokens_per_s", rate, "tokens/s", at_once)
    by = missing and "no estimate of time: layouts were compared by their sizes"
    draft.metric("objective", found.objective, "", by or f"of {len(found.ranking)} layouts that fit")
    if not found.fits:
        nearest = found.nearest
        said = f"{nearest.describe()} on {nearest.world_size} x {found.cluster.device.name}" if nearest else None
        draft.metric("nearest_plan", said, "", "" if said else "no layout of this device fits")


def _tables(draft: Draft, spec: ModelSpec, found: Plan, exchange: str) -> None:
    draft.table("ranks", _rank_rows(found))
    estimate, roofline = found.estimate, Roofline(spec, found.cluster, exchange)
    draft.table("step_time_ms", (_time_row(step) for step in (estimate.prefill, estimate.decode)))
    draft.table(
        "communication_bytes_per_token",
        (
            {"phase": step.phase, **msgspec.to_builtins(row)}
            for step in (estimate.prefill, estimate.decode)
            for row in roofline.traffic(found.mesh, step.phase, step.tokens)
        ),
    )
    draft.table("layouts", _layout_rows(found))


def _layout_rows(found: Plan) -> Iterator[dict[str, Any]]:
    """The layouts that were weighed against each other, the chosen one first."""
    for place, one in enumerate(shown(found.ranking), start=1):
        yield {
            "mesh": one.mesh.describe(),
            "place": place,
            "devices": one.devices,
            "concurrency": one.concurrency,
            "ms_per_token": one.ms_per_token,
            "tokens_per_s": one.tokens_per_s,
            "prefill_ms": one.prefill.step_ms,
            "total_bytes": one.largest_bytes,
            "why": reason(one, found.ranking[0], found.objective),
        }


def _rank_rows(found: Plan) -> Iterator[dict[str, Any]]:
    axes = [axis for axis in AXES if found.mesh.size(axis) > 1]
    roles = list(dict.fromkeys(role for rank in found.ranks for role in rank.weights))
    for rank in found.ranks:
        yield {
            "rank": rank.rank,
            **{axis: rank.at.on(axis) for axis in axes},
            "layers": span(rank.layers[0], rank.layers[1] - rank.layers[0]),
            **{f"{role}_bytes": rank.weights.get(role, 0) for role in roles},
            "weight_bytes": rank.weight_bytes,
            "cache_bytes": rank.cache,
            "state_bytes": rank.state,
            "total_bytes": rank.total,
            "free_bytes": found.usable_bytes - rank.total,
        }


def _time_row(estimate: StepTime) -> dict[str, Any]:
    return {**msgspec.to_builtins(estimate), "step_ms": estimate.step_ms, "bound_by": estimate.bound_by}
