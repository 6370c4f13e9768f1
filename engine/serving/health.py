"""Signs of life: what each rank says it is doing, and who judges that one is lost. No torch.

A rank beats from a thread of its own, so a stopped or dead process falls silent at once, while one whose work hangs
goes on beating and is found by the age of its phase.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding

BEAT_PERIOD_S = 0.5
DEADLINE_S = 10.0

STAGE_DEADLINES_S: dict[str, float] = {
    "spawn": 120.0,
    "mesh": 120.0,
    "ping": 60.0,
    "ledger": 300.0,
    "load": 7200.0,
    "build": 900.0,
    "meet": 7200.0,
    "cache": 300.0,
    "warm-up text": 600.0,
    "warm-up image": 600.0,
    "ready": float("inf"),
}
"""The stages of a start, in order, and how long each may take. `ready` is the last and lasts."""

STEP_DEADLINE_S = 600.0
Status = Literal["starting", "ready", "draining", "failed", "stopped"]


class Beat(msgspec.Struct, frozen=True):
    """What a rank says about itself. `count` grows with every beat; ages are on the rank's own clock."""

    rank: int
    pid: int
    machine: str
    stage: str
    phase: str
    age_s: float
    count: int
    done: float = 0.0
    total: float = 0.0


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why an engine stopped: the rank and the phase at fault, and how long ago it was last known to be well.

    `rank` is None where none was at fault: what starts and watches them ended. `machine` is the host that the rank ran
    on, where that is known.
    """

    rank: int | None
    phase: str
    reason: str
    since_s: float = 0.0
    findings: tuple[Finding, ...] = ()
    machine: str = ""

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"

    @property
    def place(self) -> str:
        """`rank 3 in phase 'load'`, or the phase alone."""
        phase = f"phase '{self.phase}'"
        return phase if self.rank is None else f"rank {self.rank} in {phase}"


class StageRecord(msgspec.Struct, kw_only=True):
    """One stage of a start as rank 0 saw it; `detail` is what was decided or found there, in words."""

    name: str
    status: Literal["waiting", "running", "passed", "failed"] = "waiting"
    seconds: float | None = None
    deadline_s: float | None = None
    detail: str = ""


class Pulse:
    """Where a rank is. The main thread says so (plain assignments, nothing is locked), the beating thread reads it."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.stages = [
            StageRecord(name=name, deadline_s=None if limit == float("inf") else limit)
            for name, limit in STAGE_DEADLINES_S.items()
        ]
        self.done = self.total = 0.0
        self._stage = "spawn"
        self._phase = "spawn"
        self._since_s = time.monotonic()
        self._stage_since_s = self._since_s
        self._count = 0
        self.stages[0].status = "running"

    @property
    def stage(self) -> str:
        return self._stage

    @property
    def phase(self) -> str:
        return self._phase

    def enter(self, stage: str) -> None:
        """A stage of the start begins; the one before it passed."""
        assert stage in STAGE_DEADLINES_S, stage
        now_s = time.monotonic()
        for record in self.stages:
            if record.status == "running":
                record.status, record.seconds = "passed", now_s - self._stage_since_s
            if record.name == stage:
                record.status = "passed" if stage == "ready" else "running"
        self._stage, self._stage_since_s = stage, now_s
        self.done = self.total = 0.0
        self.at(stage)

    def fail(self) -> None:
        """The running stage did not pass."""
        for record in self.stages:
            if record.status == "running":
                record.status, record.seconds = "failed", time.monotonic() - self._stage_since_s

    def at(self, phase: str) -> None:
        """What the rank does now, in words: `step 17 decode`, `all_reduce tp`, ..."""
        self._phase = phase
        self._since_s = time.monotonic()

    def alive(self) -> None:
        """The phase goes on, and something of it was just done."""
        self._since_s = time.monotonic()

    def say(self, detail: str) -> None:
        """What was decided or found in the stage that runs."""
        for record in self.stages:
            if record.status == "running":
                record.detail = detail

    def collective(self, name: str) -> None:
        """A collective starts; the age goes on, since only its step has a deadline."""
        self._phase = f"{self._phase.partition(', ')[0]}, {name}"

    def progress(self, done: float, total: float) -> None:
        self.done, self.total = done, total

    def beat(self) -> Beat:
        self._count += 1
        return Beat(
            rank=self.rank,
            pid=os.getpid(),
            machine=socket.gethostname(),
            stage=self._stage,
            phase=self._phase,
            age_s=time.monotonic() - self._since_s,
            count=self._count,
            done=self.done,
            total=self.total,
        )


class Store(Protocol):
    """The part of torch's TCPStore that is used here."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


def start_beating(
    pulse: Pulse, store: Store, period_s: float = BEAT_PERIOD_S, over: threading.Event | None = None
) -> threading.Thread:
    """Beat into the store from a daemon thread until the process ends, the store is gone, or it is `over`."""
    over = over or threading.Event()

    def beat() -> None:
        while not over.is_set():
            try:
                store.set(f"beat/{pulse.rank}", msgspec.json.encode(pulse.beat()).decode())
            except RuntimeError:  # the store's process is gone: whoever watches this rank ends it
                return
            over.wait(period_s)

    thread = threading.Thread(target=beat, name="beat", daemon=True)
    thread.start()
    return thread


class Awake:
    """A clock for who watches others, which stands while the watcher itself does not run: a machine that was paused, or
    that had so much else to do, kept the others from speaking as well.

    Between two readings no more than `most_s` pass; whoever uses it reads it more often than that. Any thread may.
    """

    def __init__(self, most_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_s = most_s
        self._clock = clock
        self._read_s = clock()
        self._now_s = 0.0
        self._reading = threading.Lock()

    @classmethod
    def of_period(cls, period_s: float) -> Awake:
        """For who looks every `period_s`."""
        return cls(1.0 + 2.0 * period_s)

    def __call__(self) -> float:
        with self._reading:
            now_s = self._clock()
            self._now_s += min(now_s - self._read_s, self._most_s)
            self._read_s = now_s
            return self._now_s


class Watch:
    """Judges ranks by their beats, on its own clock. `look` reads them; `judge` names the first rank at fault."""

    def __init__(
        self,
        world_size: int,
        deadline_s: float = DEADLINE_S,
        stage_deadlines_s: dict[str, float] | None = None,
        step_deadline_s: float = STEP_DEADLINE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.deadline_s = deadline_s
        self._limits_s = {**STAGE_DEADLINES_S, **(stage_deadlines_s or {})}
        self._step_deadline_s = step_deadline_s
        self._clock = clock
        self._seen_s = dict.fromkeys(range(world_size), clock())
        self.beats: dict[int, Beat] = {}

    def look(self, store: Store) -> None:
        """Take in the beats that have come since the last look."""
        for rank in self._seen_s:
            key = f"beat/{rank}"
            if store.check([key]):
                self.take(msgspec.json.decode(store.get(key), type=Beat))

    def take(self, beat: Beat) -> None:
        before = self.beats.get(beat.rank)
        if before is None or before.count != beat.count:
            self._seen_s[beat.rank] = self._clock()
            self.beats[beat.rank] = beat

    def judge(self) -> Failure | None:
        """The first rank that fell silent or whose phase takes too long, or None."""
        now_s = self._clock()
        for rank, seen_s in self._seen_s.items():
            beat = self.beats.get(rank)
            silent_s = now_s - seen_s
            if beat is None:
                if silent_s > self._limits_s["spawn"]:
                    return Failure(rank=rank, phase="spawn", reason="gave no sign of life", since_s=silent_s)
                continue
            if silent_s > self.deadline_s:
                reason = f"gave no sign of life for {silent_s:.1f} s (deadline {self.deadline_s:g} s)"
                return self._failure(beat, reason, silent_s)
            limit_s = self._limit_s(beat)
            if beat.age_s > limit_s:
                reason = f"has been in this phase for {beat.age_s:.1f} s (deadline {limit_s:g} s)"
                return self._failure(beat, reason, beat.age_s)
        return None

    def _failure(self, beat: Beat, reason: str, since_s: float) -> Failure:
        """A rank is at fault; of ranks on several hosts the reason names the host, and says if all of it is silent."""
        hosts: dict[str, list[int]] = {}
        for rank, one in self.beats.items():
            hosts.setdefault(one.machine, []).append(rank)
        if len(hosts) > 1:
            mine = hosts[beat.machine]
            now_s = self._clock()
            silent = [rank for rank in mine if now_s - self._seen_s[rank] > self.deadline_s / 2]
            whole = len(mine) > 1 and silent == mine
            reason += f", on host {beat.machine}" + (f", as did all {len(mine)} ranks there" if whole else "")
        return Failure(rank=beat.rank, phase=beat.phase, reason=reason, since_s=since_s, machine=beat.machine)

    def phase_of(self, rank: int) -> str:
        beat = self.beats.get(rank)
        return "spawn" if beat is None else beat.phase

    def _limit_s(self, beat: Beat) -> float:
        if beat.stage != "ready":
            return self._limits_s[beat.stage]
        return float("inf") if beat.phase == "idle" else self._step_deadline_s


def failure_of(rank: int, phase: str, error: BaseException) -> Failure:
    """A rank's own error as data; findings survive."""
    findings = error.findings if isinstance(error, Refused) else ()
    reason = str(error) if findings else f"{type(error).__name__}: {error}"
    return Failure(rank=rank, phase=phase, reason=reason, findings=findings, machine=socket.gethostname())
