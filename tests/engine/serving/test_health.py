"""Signs of life judged on a clock that the test turns."""

import threading

import msgspec
import pytest

from firstlight.engine.errors import RankFailure, Refused
from firstlight.engine.findings import fatal
from firstlight.engine.parallel.cluster import Place
from firstlight.engine.serving import launched
from firstlight.engine.serving.health import Awake, Beat, Pulse, Watch, failure_of
from firstlight.engine.serving.launched import Sentry
from tests.waiting import until


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class MemoryStore:
    """What a TCPStore does, for one process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


def beat(rank: int, count: int, stage: str = "ready", phase: str = "idle", age_s: float = 0.0) -> Beat:
    return Beat(rank=rank, pid=1, machine="m", stage=stage, phase=phase, age_s=age_s, count=count)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_rank_that_beats_is_well(clock: Clock) -> None:
    watch = Watch(2, deadline_s=3.0, clock=clock)
    for count in range(20):
        clock.now_s += 1.0
        for rank in (0, 1):
            watch.take(beat(rank, count))
        assert watch.judge() is None


def test_a_silent_rank_is_lost_after_the_deadline_with_its_phase(clock: Clock) -> None:
    watch = Watch(2, deadline_s=3.0, clock=clock)
    for count in range(8):
        clock.now_s += 1.0
        watch.take(beat(0, count))
        watch.take(beat(1, min(count, 3), phase="step 7 decode, all_reduce tp"))  # the same beat read again is no sign
        failure = watch.judge()
        assert (failure is None) == (count <= 6)
    assert failure is not None
    assert (failure.rank, failure.phase) == (1, "step 7 decode, all_reduce tp")
    assert failure.since_s == pytest.approx(4.0)
    assert "deadline 3 s" in failure.reason


def test_a_watcher_that_did_not_run_holds_nobody_to_that_time(clock: Clock) -> None:
    """A machine that was paused for a minute: the ranks were as well, and speak again after a moment."""
    watch = Watch(2, deadline_s=3.0, clock=Awake(1.0, clock))
    for rank in (0, 1):
        watch.take(beat(rank, 1))
    clock.now_s += 60.0
    assert watch.judge() is None
    watch.take(beat(0, 2))
    for _ in range(5):
        clock.now_s += 0.5
        failure = watch.judge()
        watch.take(beat(0, int(clock.now_s)))
    assert failure is not None, "one that stays silent is lost all the same"
    assert failure.rank == 1
    assert failure.since_s == pytest.approx(3.5)


def test_a_rank_that_never_came_is_lost_in_spawn(clock: Clock) -> None:
    watch = Watch(1, stage_deadlines_s={"spawn": 5.0}, clock=clock)
    clock.now_s += 4.9
    assert watch.judge() is None
    clock.now_s += 0.2
    failure = watch.judge()
    assert failure is not None
    assert failure.phase == "spawn"


@pytest.mark.parametrize(
    ("stage", "phase", "age_s", "is_well"),
    [
        ("load", "load", 50.0, True),
        ("load", "load", 70.0, False),
        ("ready", "idle", 1e6, True),
        ("ready", "step 3 decode", 8.0, True),
        ("ready", "step 3 decode", 12.0, False),
    ],
)
def test_a_phase_has_a_deadline_though_the_rank_beats(
    clock: Clock, stage: str, phase: str, age_s: float, is_well: bool
) -> None:
    watch = Watch(1, stage_deadlines_s={"load": 60.0}, step_deadline_s=10.0, clock=clock)
    watch.take(beat(0, 1, stage, phase, age_s))
    failure = watch.judge()
    assert (failure is None) == is_well
    if failure is not None:
        assert failure.phase == phase


def test_beats_go_through_a_store() -> None:
    store, pulse, watch = MemoryStore(), Pulse(0), Watch(2)
    pulse.enter("load")
    pulse.progress(3.0, 4.0)
    store.set("beat/0", msgspec.json.encode(pulse.beat()).decode())
    watch.look(store)
    assert watch.beats[0].stage == "load"
    assert (watch.beats[0].done, watch.beats[0].total) == (3.0, 4.0)
    assert 1 not in watch.beats


def test_stages_pass_one_after_another() -> None:
    pulse = Pulse()
    for stage in ("mesh", "ledger", "load"):
        pulse.enter(stage)
    states = {record.name: record.status for record in pulse.stages}
    assert states["mesh"] == states["ledger"] == "passed"
    assert states["load"] == "running"
    assert states["ready"] == "waiting"
    pulse.fail()
    assert {record.name: record.status for record in pulse.stages}["load"] == "failed"


def test_a_collective_is_named_within_its_step() -> None:
    pulse = Pulse()
    pulse.at("step 4 decode")
    pulse.collective("all_reduce tp")
    pulse.collective("all_gather tp")
    assert pulse.beat().phase == "step 4 decode, all_gather tp"


def test_findings_survive_as_failure() -> None:
    error = Refused(fatal("missing-shard", "a file is gone", file="x"))
    failure = msgspec.json.decode(
        msgspec.json.encode(failure_of(1, "load", error)), type=type(failure_of(0, "", error))
    )
    assert failure.findings == error.findings


class CutStore(MemoryStore):
    """A store on a host that is lost at some moment: an answer that was on its way never comes."""

    def __init__(self) -> None:
        super().__init__()
        self.is_cut, self.is_over, self.waiting = False, threading.Event(), threading.Event()

    def check(self, keys: list[str]) -> bool:
        if self.is_cut:
            self.waiting.set()
            self.is_over.wait()
            raise RuntimeError("the connection broke")
        return super().check(keys)


PLACE = Place(rank=1, world_size=2, local_rank=0, local_world_size=1, address="10.0.0.1", port=1)


@pytest.mark.parametrize("has_spoken", [True, False])
def test_a_rank_leaves_when_rank_0_s_host_is_lost_even_before_rank_0_spoke(
    clock: Clock, capsys: pytest.CaptureFixture[str], has_spoken: bool
) -> None:
    """That rank 0 may come late, by as much as a start may take, holds while the store answers and no longer."""
    store, left = CutStore(), threading.Event()
    if has_spoken:
        store.set("alive", "1")
    sentry = Sentry(PLACE, store, deadline_s=4.0, leave=lambda _: left.set(), clock=clock)
    sentry.pulse = Pulse(1)
    sentry.pulse.enter("load")
    until(lambda: sentry.silent_s <= 0 if has_spoken else store.check(["x"]) is False)
    if not has_spoken:
        clock.now_s += 3.0
        until(lambda: sentry.silent_s <= 0, "the store answers: rank 0 is late, and no more")
    store.is_cut = True
    assert store.waiting.wait(60)
    assert not left.is_set()
    clock.now_s += 4.5
    assert left.wait(60)
    store.is_over.set()
    said = capsys.readouterr().err
    assert "rank 0 at 10.0.0.1 gave no sign of life for 4.5 s (deadline 4 s) in phase 'load'" in said


def test_a_store_that_never_answers_is_not_waited_for() -> None:
    """torch's own deadline counts until a connection stands; what is asked over it may wait for ever."""
    never = threading.Event()
    with pytest.raises(RankFailure, match=r"store at 10\.0\.0\.1:1 has not answered for 0\.05 s, from rank 1"):
        launched._within(0.05, never.wait, PLACE)
    never.set()
