"""The rung `start`: a host of one process per rank, brought up in stages, each with a deadline and its time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from firstlight.engine.errors import RankFailure, Refused
from firstlight.engine.findings import fatal
from firstlight.engine.parallel.cluster import launched
from firstlight.engine.serving.api import EngineLike, Health, RankMemory
from firstlight.engine.serving.health import Failure
from firstlight.engine.serving.host import Host
from firstlight.engine.serving.options import EngineOptions, HostOptions
from firstlight.engine.serving.stream import EngineFailed
from firstlight.workbench.first_token import FirstToken, add_first_token, of_stages
from firstlight.workbench.progress import Progress
from firstlight.workbench.report import Draft, Report
from firstlight.workbench.residency import add_residency

if TYPE_CHECKING:
    from firstlight.engine.serving.launched import LaunchedHost
    from firstlight.engine.serving.ray_host import RayHost

AnyHost: TypeAlias = "Host | LaunchedHost | RayHost"
START_DEADLINE_S = 4 * 3600.0  # stages have deadlines of their own; this one is for what they forget
STAGES_TOLD = ("load",)  # stages whose progress counts bytes


def start_host(
    options: EngineOptions,
    progress: Progress | None = None,
    *,
    http: HostOptions | None = None,
    run_dir: Path | None = None,
    detached: bool = False,
    make_token: bool = True,
) -> AnyHost:
    """A host that is ready; it is stopped again if its start fails or is interrupted.

    Where a launcher started the ranks, on this machine and others, those are used.

    Raises `Refused` if checkpoint, plan or memory were at fault, `RankFailure` if a rank was.
    """
    host = _begin(msgspec.structs.replace(options, warm_up=True), http, run_dir, detached, make_token)
    try:
        host.wait_ready(START_DEADLINE_S, _watcher(progress or Progress("start")))
    except BaseException:
        host.stop()
        raise
    return host


def _begin(
    options: EngineOptions, http: HostOptions | None, run_dir: Path | None, detached: bool, make_token: bool
) -> AnyHost:
    if detached:
        refuse_detached(options)
    if launched() is not None:
        from firstlight.engine.serving.launched import LaunchedHost

        return LaunchedHost.start(options, http, run_dir)
    if options.hosts:
        from firstlight.engine.serving.ray_host import RayHost

        return RayHost.start(options, http, run_dir)
    values = {name: getattr(options, name) for name in options.__struct_fields__}
    checkpoint, mesh = values.pop("checkpoint"), values.pop("mesh")
    return Host.start(checkpoint, mesh, run_dir=run_dir, detached=detached, http=http, make_token=make_token, **values)


def refuse_detached(options: EngineOptions) -> None:
    """Raises `Refused` for an engine that cannot be left running."""
    if options.hosts or launched() is not None:
        raise Refused(
            fatal(
                "usage",
                "an engine of several hosts ends with the process that started it",
                expected="not detached",
                found="detached",
                next="start it with `firstlight serve`, and leave that running",
            )
        )


@contextmanager
def started(options: EngineOptions, progress: Progress) -> Iterator[AnyHost]:
    """A host for the time of a `with`; an engine that fails meanwhile is told by the rank that was lost."""
    host = start_host(options, progress)
    try:
        yield host
    except EngineFailed as error:
        raise told_by(host, error) from error
    finally:
        host.stop()


def told_by(host: AnyHost, error: EngineFailed) -> EngineFailed | RankFailure:
    """An engine that does not answer, by the rank that was lost where its host knows one."""
    failure = host.health().failure
    if failure is None or failure.findings:
        return error
    return lost(host, failure)


def lost(host: AnyHost, failure: Failure) -> RankFailure:
    """The failure that a host knows of, with the log that says more."""
    return RankFailure(failure.rank, failure.phase, failure.reason, host.log_file(failure.rank))


def _watcher(progress: Progress) -> Any:
    def watch(health: Health) -> None:
        if health.total:
            progress(health.stage, health.done, health.total, "B" if health.stage in STAGES_TOLD else "")
        else:
            progress(health.stage)

    return watch


def start_report(
    engine: EngineLike,
    duration_s: float | None = None,
    where: str = "",
    url: str | None = None,
    streaming: FirstToken | None = None,
) -> Report:
    """What came up: stages with their times, the ledger, operators, memory of every rank.

    `streaming`: the time to the first token of another start, to be shown beside this one's.
    """
    info, health = engine.info(), engine.health()
    draft = Draft("start", f"{info.model}, {info.mesh.describe()}, {info.dtype} on {info.device}")
    draft.find(info.findings)
    _stages(draft, health)
    counts = engine.ledger().summary()
    draft.check(
        "the ledger is complete on both sides",
        counts["tensors_unconsumed"] == 0 and counts["parameters_missing"] == 0,
        value=counts["parameters_filled"],
        limit=counts["parameters"],
        unit="parameters",
        detail=f"{counts['tensors']:,} tensors",
    )
    draft.metric("ranks", info.mesh.world_size, "ranks", where)
    if url is not None:
        draft.metric("url", url, "")
    if duration_s is not None:
        draft.metric("start_s", duration_s, "s", "until the first token could be asked for")
    add_first_token(draft, of_stages(health.stages), streaming)
    draft.metric("load_rate", info.load_bytes / info.load_s if info.load_s else None, "B/s", "rank 0")
    draft.metric("max_context", info.max_context, "tokens", "of one sequence")
    draft.metric("max_batch", info.max_batch, "sequences", "at once per replica")
    _memory(draft, engine.memory(pools=True))
    draft.table(
        "operators",
        (
            {"operator": operator, "implementation": name, "chosen": chosen, "reason": reason}
            for operator, name, chosen, reason in info.operators
            if chosen
        ),
    )
    return draft.close()


def _stages(draft: Draft, health: Health) -> None:
    for stage in health.stages:
        if stage.status == "waiting":
            continue
        draft.check(
            f"stage {stage.name}",
            stage.status == "passed",
            value=stage.seconds,
            limit=stage.deadline_s,
            unit="s",
            detail=stage.detail,
        )
    draft.check("engine is ready", health.is_ready, value=health.status, detail=str(health.failure or ""))


def _memory(draft: Draft, ranks: tuple[RankMemory, ...]) -> None:
    draft.table(
        "memory",
        (
            {
                "rank": rank.rank,
                "device": rank.device,
                **{f"{role}_bytes": nbytes for role, nbytes in rank.bytes_by_role.items()},
                "process_bytes": rank.resident_bytes,
                "pages": rank.pages,
                "page_tokens": rank.page_size,
            }
            for rank in ranks
        ),
    )
    add_residency(draft, ranks)
    draft.table("pools", ({"rank": rank.rank, **msgspec.to_builtins(pool)} for rank in ranks for pool in rank.pools))
