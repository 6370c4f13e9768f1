"""Time to the first token: with layers that run while those behind them are read, beside loading all and running then.

The stages of a start say both: from the first byte that is asked for to the token that the warm-up computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from firstlight.engine.errors import FirstlightError
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.model.foreign import ForeignSpec
from firstlight.engine.parallel.cluster import launched
from firstlight.engine.serving.api import Health
from firstlight.engine.serving.health import StageRecord
from firstlight.engine.serving.host import Host
from firstlight.engine.serving.options import EngineOptions
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.workbench.progress import Progress
from firstlight.workbench.render import words
from firstlight.workbench.report import Draft, Report

DEADLINE_S = 4 * 3600.0  # stages have deadlines of their own
FROM, TO = "load", "warm-up text"  # stages of a start


class FirstToken(msgspec.Struct, frozen=True, kw_only=True):
    """`seconds` from the first byte to the first token, `start_s` from the start of the processes; or why neither.

    `how`: what was read by then, and whether layers ran meanwhile, in words.
    """

    seconds: float | None = None
    start_s: float | None = None
    reason: str = ""
    how: str = ""


def of_stages(stages: Sequence[StageRecord]) -> FirstToken | None:
    """What the stages of a start say; None as long as there is no token."""
    names = [stage.name for stage in stages]
    if TO not in names or stages[names.index(TO)].status != "passed":
        return None
    taken = [stage.seconds or 0.0 for stage in stages[: names.index(TO) + 1]]
    how = "; ".join(stage.detail for stage in stages if stage.name in (FROM, TO) and stage.detail)
    return FirstToken(seconds=sum(taken[names.index(FROM) :]), start_s=sum(taken), how=how)


def streamed(options: EngineOptions, progress: Progress | None = None) -> FirstToken:
    """Starts an engine whose layers run while others are read, and stops it at its first token.

    Nothing else of it is used, so it is over before the engine that stays needs its memory.
    """
    if options.residency != "resident":
        return FirstToken(reason=f"not measured: the engine itself runs with residency {options.residency}")
    spec, _ = FAMILIES.describe(Checkpoint.open(options.checkpoint).config)
    if isinstance(spec, ForeignSpec):
        return FirstToken(reason="not measured: the reference's own modules are loaded whole")
    if launched() is not None:
        return FirstToken(reason="not measured: a launcher starts its ranks once")
    progress = progress or Progress("start")

    def watch(health: Health) -> None:
        progress(f"streaming start, {health.stage}")
        if of_stages(health.stages) is not None:
            raise _Enough(health)

    values = {name: getattr(options, name) for name in options.__struct_fields__}
    values |= {"residency": "streamed", "warm_up": True}
    host = None
    try:
        host = Host.start(values.pop("checkpoint"), values.pop("mesh"), **values)
        host.wait_ready(DEADLINE_S, watch)
    except _Enough as enough:
        return of_stages(enough.health.stages) or FirstToken()
    except FirstlightError as error:
        return FirstToken(reason=f"a streaming start failed: {error}")
    finally:
        if host is not None:
            host.stop()
    return FirstToken(reason="the engine computed no token when it started")


def add_first_token(draft: Draft, loaded: FirstToken | None, streaming: FirstToken | None) -> None:
    """The engine's own time to its first token and, if it was measured, that of a streaming start."""
    own = loaded or FirstToken(reason="the engine computed no token when it started")
    draft.metric(
        "first_token_loaded_s", own.seconds, "s", own.reason or "from the first byte asked for: all is loaded, then run"
    )
    if streaming is None:
        return
    draft.metric(
        "first_token_streamed_s",
        streaming.seconds,
        "s",
        streaming.reason
        or f"from the first byte asked for{': ' if streaming.how else ''}{streaming.how}; this start came first: files "
        "that it read and operators that it chose are at hand for the other",
    )
    draft.table(
        "first_token",
        (
            {
                "start": name,
                "first_token_s": one.seconds,
                "from_process_start_s": one.start_s,
                "how": one.how,
                "reason": one.reason,
            }
            for name, one in (("load, then run", own), ("streaming", streaming))
        ),
    )


def line_of(report: Report) -> str:
    """Both times in a line for the terminal; empty where a report has none."""
    rows = report.tables.get("first_token", [])
    told = [
        f"{row['start']} {words.seconds(row['first_token_s']) if row['first_token_s'] is not None else row['reason']}"
        for row in rows
    ]
    return f"first token, from the first byte read: {'; '.join(told)}" if told else ""


class _Enough(Exception):
    """What was waited for has come."""

    def __init__(self, health: Health) -> None:
        super().__init__()
        self.health = health
