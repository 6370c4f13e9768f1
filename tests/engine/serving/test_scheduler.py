"""The scheduler under random traffic: pages, budget, order and ends."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.engine.errors import Refused
from firstlight.engine.serving.request import Request, SamplingParams
from firstlight.engine.serving.scheduler import Limits, Scheduler
from firstlight.engine.serving.steps import Sampled, StepPlan, StepResult

EOS = 1


def request(number: int, prompt: int, new: int, **params: object) -> Request:
    sampling = SamplingParams(max_new_tokens=new, seed=number, **params)  # type: ignore[arg-type]
    return Request(number=number, prompt_ids=tuple(range(10, 10 + prompt)), params=sampling)


def limits(**changes: int) -> Limits:
    return Limits(**{"max_batch": 4, "token_budget": 16, "page_size": 4, "num_pages": 40, "max_context": 64, **changes})


def answer(plan: StepPlan, token: int = 7) -> StepResult:
    chosen = [chunk.number for part in plan.replicas for chunk in part.chunks if chunk.draws >= 0]
    return StepResult(tuple(Sampled(number, token) for number in chosen))


class Recorder:
    """Follows plans as a worker would and asserts that they make sense together."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.computed: dict[int, int] = {}
        self.pages: dict[int, tuple[int, ...]] = {}
        self.replica: dict[int, int] = {}
        self.started: list[int] = []

    def follow(self, plan: StepPlan) -> None:
        limits = self.scheduler.limits
        for index, part in enumerate(plan.replicas):
            for number in part.released:
                if number in self.replica:
                    assert self.replica.pop(number) == index
                    del self.computed[number], self.pages[number]
            for admission in part.admitted:
                held = {
                    page
                    for number, pages in self.pages.items()
                    if self.replica[number] == index and number != admission.number
                    for page in pages
                }
                assert not held & set(admission.pages), "a page is given out twice"
                self.computed[admission.number] = 0
                self.pages[admission.number] = admission.pages
                self.replica[admission.number] = index
                self.started += [admission.number] if admission.number not in self.started else []
            assert part.num_tokens <= limits.token_budget
            assert len(part.chunks) <= limits.max_batch
            for chunk in part.chunks:
                assert chunk.start == self.computed[chunk.number], "a token is skipped or computed twice"
                self.computed[chunk.number] += len(chunk.tokens)
                assert self.computed[chunk.number] <= len(self.pages[chunk.number]) * limits.page_size

    def forget(self, plan: StepPlan) -> None:
        for part in plan.replicas:
            for chunk in part.chunks:
                self.computed[chunk.number] = chunk.start


def run_dry(scheduler: Scheduler, most_steps: int) -> int:
    """Steps until nothing is left."""
    recorder = Recorder(scheduler)
    for step in range(most_steps):
        plan = scheduler.schedule()
        if plan is None:
            return step
        recorder.follow(plan)
        scheduler.apply(plan, answer(plan))
        scheduler.check()
    raise AssertionError(f"still running after {most_steps} steps: something starves")


sizes = st.tuples(st.integers(1, 40), st.integers(1, 20))


@settings(max_examples=60)
@given(
    wishes=st.lists(sizes, min_size=1, max_size=30),
    aborts=st.lists(st.integers(0, 29), max_size=10),
    replicas=st.integers(1, 3),
    budget=st.integers(5, 40),
    ends=st.lists(st.booleans(), max_size=60),
    interrupts=st.lists(st.sampled_from(["no", "before", "after"]), max_size=20),
)
def test_random_traffic(
    wishes: Sequence[tuple[int, int]],
    aborts: Sequence[int],
    replicas: int,
    budget: int,
    ends: Sequence[bool],
    interrupts: Sequence[str],
) -> None:
    """Requests come in twos, are aborted while a step runs, end early; steps are interrupted and planned again."""
    scheduler = Scheduler(limits(replicas=replicas, token_budget=budget), frozenset({EOS}))
    recorder = Recorder(scheduler)
    to_abort, to_end, arrivals, breaks = list(aborts), list(ends), list(enumerate(wishes)), list(interrupts)
    generated: dict[int, int] = {}
    steps = 0
    while arrivals or scheduler.num_running or scheduler.num_waiting:
        for number, (prompt, new) in arrivals[:2]:
            scheduler.add(request(number, prompt, new))
        del arrivals[:2]
        scheduler.check()
        plan = scheduler.schedule()
        assert plan is not None
        interrupted = breaks.pop() if breaks else "no"
        if interrupted == "before":  # before the ranks heard of it
            continue
        recorder.follow(plan)
        if interrupted == "after":  # before its result was taken in: the same tokens are computed again
            recorder.forget(plan)
            continue
        result = answer(plan, EOS if to_end and to_end.pop() else 7)
        if to_abort:  # while the step runs
            scheduler.finish(to_abort.pop())
        for step in scheduler.apply(plan, result):
            generated[step.number] = generated.get(step.number, 0) + 1
            assert (step.finish == "stop") == (step.token == EOS)
            assert generated[step.number] <= wishes[step.number][1]
            assert step.finish or generated[step.number] < wishes[step.number][1]
        scheduler.check()
        steps += 1
        assert steps <= 2 * sum(prompt + new for prompt, new in wishes) + len(wishes), "something starves"
    assert scheduler.free_pages == replicas * scheduler.limits.num_pages
    if replicas == 1:
        assert recorder.started == sorted(recorder.started), "a later request overtook an earlier one"


def test_a_long_prompt_does_not_stop_running_sequences() -> None:
    scheduler = Scheduler(limits())
    scheduler.add(request(0, 2, 30))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.apply(plan, answer(plan))
    scheduler.add(request(1, 50, 5))
    for _ in range(4):
        plan = scheduler.schedule()
        assert plan is not None
        chunks = {chunk.number: chunk for chunk in plan.replicas[0].chunks}
        assert len(chunks[0].tokens) == 1
        assert len(chunks[1].tokens) <= 15
        scheduler.apply(plan, answer(plan))
    assert chunks[1].draws == 0  # 50 tokens of prompt took 4 steps of at most 15
    assert plan.phase == "mixed"


def test_a_large_request_is_not_overtaken_for_ever() -> None:
    """Small requests that would fit must wait behind a large one that does not fit yet."""
    scheduler = Scheduler(limits(num_pages=16, max_context=64))
    scheduler.add(request(0, 8, 8))
    scheduler.add(request(1, 40, 24))
    for number in range(2, 12):
        scheduler.add(request(number, 2, 2))
    order = Recorder(scheduler)
    while (plan := scheduler.schedule()) is not None:
        order.follow(plan)
        scheduler.apply(plan, answer(plan))
        scheduler.check()
    assert order.started == list(range(12))


def test_replicas_share_the_load() -> None:
    scheduler = Scheduler(limits(replicas=2))
    for number in range(6):
        scheduler.add(request(number, 5, 5))
    plan = scheduler.schedule()
    assert plan is not None
    assert [len(part.chunks) for part in plan.replicas] == [3, 3]


def test_chunks_come_in_the_order_of_pages() -> None:
    scheduler = Scheduler(limits(page_size=64, num_pages=4))
    for number in range(4):
        scheduler.add(request(number, 3, 8))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.apply(plan, answer(plan))
    scheduler.finish(1)
    scheduler.add(request(9, 3, 8))
    plan = scheduler.schedule()
    assert plan is not None
    assert [chunk.number for chunk in plan.replicas[0].chunks] == [0, 9, 2, 3]


def test_what_can_never_fit_is_refused() -> None:
    scheduler = Scheduler(limits())
    with pytest.raises(Refused, match="context-too-long"):
        scheduler.add(request(0, 60, 5))
    assert scheduler.num_running == scheduler.num_waiting == 0


@pytest.mark.parametrize("wrong", [{"token_budget": 4}, {"num_pages": 2}, {"max_batch": 0}])
def test_impossible_limits_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(Refused):
        limits(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"max_new_tokens": 0},
        {"stop": ("",)},
        {"top_logprobs": 21},
    ],
)
def test_impossible_parameters_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(Refused, match="bad-request"):
        SamplingParams(**wrong)  # type: ignore[arg-type]


def test_running_dry_frees_everything() -> None:
    scheduler = Scheduler(limits())
    for number in range(20):
        scheduler.add(request(number, 1 + number, 1 + number % 7))
    assert run_dry(scheduler, 400) > 0
    assert scheduler.free_pages == scheduler.limits.num_pages
    assert scheduler.num_running == scheduler.num_waiting == 0


@settings(max_examples=60)
@given(
    texts=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    picture=st.integers(1, 12),
    budget=st.integers(16, 30),
)
def test_pictures_seen_whole_are_never_cut(texts: Sequence[int], picture: int, budget: int) -> None:
    scheduler = Scheduler(limits(token_budget=budget, num_pages=80, max_context=160), whole_pictures=True)
    spans, length = [], 0
    for text in texts:
        spans.append((length + text, picture))
        length += text + picture
    for number in range(3):
        scheduler.add(msgspec.structs.replace(request(number, length + 1, 4), image_spans=tuple(spans)))
    recorder = Recorder(scheduler)
    while (plan := scheduler.schedule()) is not None:
        recorder.follow(plan)
        for chunk in plan.replicas[0].chunks:
            stop = chunk.start + len(chunk.tokens)
            assert not any(begin < stop < begin + count for begin, count in spans)
        scheduler.apply(plan, answer(plan))


def test_a_picture_larger_than_a_step_is_refused_where_it_is_seen_whole() -> None:
    wish = msgspec.structs.replace(request(0, 30, 4), image_spans=((2, 13),))
    Scheduler(limits()).fits(wish)
    with pytest.raises(Refused, match="a picture does not fit into one step"):
        Scheduler(limits(), whole_pictures=True).fits(wish)
