"""What a run is doing now: the rung, its phases as bars, and whether who did it is still there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from firstlight.dashboards import html
from firstlight.dashboards.store import Snapshot, progress_rows
from firstlight.workbench.events import ProgressEvent
from firstlight.workbench.progress import Pace
from firstlight.workbench.render import words
from firstlight.workbench.work import Work

RECENT_S = 15.0  # what was said so lately is so now, where nothing else tells
RUNNING, BROKE_OFF, INTERRUPTED = "running", "broke off", "interrupted"
SENTENCES = {RUNNING: "is running", BROKE_OFF: "broke off", INTERRUPTED: "was interrupted"}


class Doing(NamedTuple):
    """A rung without a report: its state, its phases of this time (those that go on), when it was last heard of."""

    verb: str
    state: str
    began_s: float
    rows: list[tuple[ProgressEvent, Pace]]
    heard_s: float

    @property
    def is_running(self) -> bool:
        return self.state == RUNNING

    @property
    def kind(self) -> str:
        """The class of its colour."""
        return "running" if self.is_running else "failed"

    @property
    def sentence(self) -> str:
        """`load is running`."""
        return f"{self.verb} {SENTENCES[self.state]}"


def doing(snapshot: Snapshot) -> Doing | None:
    """What the run's record says is being done; of a run whose writer enters nothing, what was told of lately."""
    work = snapshot.record.work
    if work is None:
        return _heard_of(snapshot)
    rows = [row for row in progress_rows(snapshot) if row[0].time_s >= work.began_s]
    heard_s = max((event.time_s for event, _ in rows), default=work.began_s)
    return Doing(work.verb, state_of(work, _last_word_s(snapshot, heard_s)), work.began_s, _going_on(rows), heard_s)


def state_of(work: Work, last_word_s: float) -> str:
    """What has become of a rung that has begun; of one at work elsewhere by when anything was heard of the run."""
    if work.ended:
        return INTERRUPTED if work.ended == INTERRUPTED else BROKE_OFF
    lives = work.lives if work.lives is not None else time.time() - last_word_s < RECENT_S
    return RUNNING if lives else BROKE_OFF


def _heard_of(snapshot: Snapshot) -> Doing | None:
    done = {rung.verb for rung in snapshot.record.rungs}
    rows = [row for row in progress_rows(snapshot) if row[0].rung not in done]
    if not rows:
        return None
    event = max((told for told, _ in rows), key=lambda told: told.time_s)
    if time.time() - event.time_s >= RECENT_S:
        return None
    rows = [row for row in rows if row[0].rung == event.rung]
    return Doing(event.rung, RUNNING, min(row[1].first.time_s for row in rows), _going_on(rows), event.time_s)


def _last_word_s(snapshot: Snapshot, heard_s: float) -> float:
    """When anything was written last: a reading comes though a layer takes long."""
    return max([heard_s, *(trail.last.time_s for trail in snapshot.trails.values())])


def _going_on(rows: list[tuple[ProgressEvent, Pace]]) -> list[tuple[ProgressEvent, Pace]]:
    """The newest phase and those that were told of since it began; the others are over."""
    since_s = rows[-1][1].first.time_s if rows else 0.0
    return [row for row in rows if row[0].time_s >= since_s]


def bars(now: Doing) -> str:
    """How far it is: amount, rate, time to go, the layer; for how long nothing was heard; how far it came at last."""
    if not now.rows:
        return _bar(now, [now.verb], 0.0)
    return "".join(
        _bar(
            now,
            [
                f"{event.rung}: {event.phase}",
                _amount(event),
                *(_pace(event, pace) if now.is_running else ()),
                event.detail,
            ],
            event.done / event.total if event.total else 0.0,
        )
        for event, pace in now.rows
    )


def _bar(now: Doing, parts: Sequence[str], share: float) -> str:
    """A line of words over a bar; when it was last heard of stands there where that is not just now."""
    heard = ""
    if not now.is_running:
        heard = f"{now.state} here, last heard of at {_clock(now.heard_s)} UTC"
    elif time.time() - now.heard_s >= RECENT_S:
        heard = f"nothing new since {_clock(now.heard_s)} UTC; it is still at work"
    return f"<p>{html.with_units(' · '.join(part for part in (*parts, heard) if part))}</p>{html.track(share)}"


def _amount(event: ProgressEvent) -> str:
    return words.of_total(event.done, event.total, event.unit) if event.total else ""


def _pace(event: ProgressEvent, pace: Pace) -> tuple[str, str]:
    rate = words.quantity(pace.rate, f"{event.unit}/s") if pace.rate and event.unit else ""
    return rate, f"{words.seconds(pace.remaining_s)} to go" if pace.remaining_s else ""


def _clock(time_s: float) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(time_s))
