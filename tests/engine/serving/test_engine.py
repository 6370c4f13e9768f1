"""The engine in this process: what it answers, alone and in company, and what it refuses."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from firstlight.engine.errors import Refused
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.serving.health import Failure
from firstlight.engine.serving.request import Completion, Delta, SamplingParams
from firstlight.engine.serving.runtime import Engine
from firstlight.engine.serving.stream import EngineFailed, completion_of
from tests.checkpoints import inputs, quiet
from tests.engine.serving.conftest import MENAGERIE

PROMPTS = ([5, 9, 77, 3], [8], [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50], [100, 7, 7, 30, 12])
LENGTH = 8

Get = Callable[[str], Path]


def start(path: Path, **options: Any) -> Engine:
    return Engine.start(str(path), **{"max_context": 64, "threads": 1, **options})


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": LENGTH, "ignore_eos": True, **changes})


def reference(path: Path) -> Any:
    with quiet():
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        kind = AutoModelForImageTextToText if "llava" in path.name else AutoModelForCausalLM
        return kind.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def engine(checkpoint: Get) -> Iterator[Engine]:
    engine = start(checkpoint("llama"), max_batch=3)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "engine" in request.fixturenames:
        engine: Engine = request.getfixturevalue("engine")
        engine.drain()
        engine.status = "ready"
        engine.scheduler.check()
        assert engine.scheduler.free_pages == engine.scheduler.limits.num_pages
        assert not engine.worker._held or engine.scheduler._replicas[0].released


def together(engine: Engine, params: list[SamplingParams]) -> list[Completion]:
    streams = [engine.submit(prompt, params=one) for prompt, one in zip(PROMPTS, params, strict=True)]
    return [completion_of(engine._read(stream)) for stream in streams]


@pytest.fixture(scope="module")
def expected(checkpoint: Get) -> list[list[int]]:
    """Greedy continuations by transformers, one prompt at a time and without an end-of-sequence token."""
    model = reference(checkpoint("llama"))
    answers = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(LENGTH):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        answers.append(ids[len(prompt) :])
    return answers


def test_greedy_tokens_are_the_references(engine: Engine, expected: list[list[int]]) -> None:
    assert [list(engine.complete(prompt, params=greedy()).tokens) for prompt in PROMPTS] == expected


def test_company_changes_nothing(engine: Engine, expected: list[list[int]]) -> None:
    """Four requests of different lengths, three places: prefill and decode mix in one batch."""
    assert [list(one.tokens) for one in together(engine, [greedy()] * 4)] == expected


@pytest.mark.parametrize("options", [{"token_budget": 4, "max_batch": 2}, {"page_size": 4, "num_pages": 24}])
def test_chunks_and_pages_change_nothing(checkpoint: Get, expected: list[list[int]], options: dict[str, int]) -> None:
    engine = start(checkpoint("llama"), **options)
    assert [list(one.tokens) for one in together(engine, [greedy()] * 4)] == expected
    engine.scheduler.check()


def test_a_sampled_token_depends_on_its_seed_and_place_alone(engine: Engine) -> None:
    params = [greedy(temperature=1.0, top_p=0.95, top_k=40, seed=seed) for seed in range(4)]
    alone = [engine.complete(prompt, params=one).tokens for prompt, one in zip(PROMPTS, params, strict=True)]
    assert [one.tokens for one in together(engine, params)] == alone
    other = engine.complete(PROMPTS[0], params=greedy(temperature=1.0, seed=99))
    assert other.tokens != engine.complete(PROMPTS[0], params=greedy(temperature=1.0, seed=98)).tokens
    unseeded = engine.complete(PROMPTS[0], params=greedy(temperature=1.0))
    assert unseeded.seed is not None
    assert engine.complete(PROMPTS[0], params=greedy(temperature=1.0, seed=unseeded.seed)).tokens == unseeded.tokens


def test_log_probabilities_are_the_models_own(engine: Engine, checkpoint: Get) -> None:
    params = greedy(max_new_tokens=2, temperature=0.7, seed=3, logprobs=True, top_logprobs=4)
    streams = [engine.submit(PROMPTS[0], params=params), engine.submit(PROMPTS[1], params=greedy(max_new_tokens=2))]
    answer, plain = (completion_of(engine._read(stream)) for stream in streams)
    assert plain.logprobs == ()
    with torch.no_grad():
        logits = reference(checkpoint("llama"))(torch.tensor([[*PROMPTS[0], *answer.tokens]])).logits[0]
    logprobs = logits.log_softmax(-1)
    for step, one in enumerate(answer.logprobs):
        row = logprobs[len(PROMPTS[0]) - 1 + step]
        assert one.logprob == pytest.approx(float(row[one.token]), abs=1e-4)
        values, ids = row.topk(4)
        assert [id_ for id_, _ in one.top] == ids.tolist()
        assert [value for _, value in one.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_an_end_of_sequence_token_ends_the_answer(engine: Engine, expected: list[list[int]]) -> None:
    engine.scheduler.eos_ids = frozenset((expected[2][3],))
    try:
        answer = engine.complete(PROMPTS[2], params=SamplingParams(max_new_tokens=LENGTH))
    finally:
        engine.scheduler.eos_ids = engine.frontend.eos_ids
    assert answer.finish == "stop"
    assert list(answer.tokens) == expected[2][: expected[2].index(expected[2][3]) + 1]
    assert answer.usage.completion_tokens == len(answer.tokens)


def test_closing_the_iterator_frees_the_pages(engine: Engine) -> None:
    answer = engine.generate(PROMPTS[0], params=greedy(max_new_tokens=50))
    next(answer)
    assert engine.scheduler.free_pages < engine.scheduler.limits.num_pages
    answer.close()  # type: ignore[attr-defined]
    assert engine.scheduler.free_pages == engine.scheduler.limits.num_pages


def test_who_has_an_answer_finds_it_counted(engine: Engine) -> None:
    seen: list[tuple[int, int]] = []

    def listener(delta: Delta) -> None:
        if delta.finish is not None:
            seen.append((sum(engine.stats().requests.values()), engine.ended(before)[-1].number))

    before = sum(engine.stats().requests.values())
    streams = [engine.submit(prompt, params=greedy(), listener=listener) for prompt in PROMPTS[:2]]
    engine.drain()
    engine.status = "ready"
    assert seen == [(before + 1, streams[0].request.number), (before + 2, streams[1].request.number)]


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_in_a_step_leaves_the_engine_usable(
    engine: Engine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """What Ctrl-C in a notebook does: the interrupted request is dropped, those beside it go on unharmed."""
    beside = engine.submit(PROMPTS[2], params=greedy())
    execute, left = engine.worker.execute, [2]

    def interrupted(plan: Any) -> Any:
        left[0] -= 1
        result = execute(plan) if when == "after" or left[0] >= 0 else None
        if left[0] < 0:
            monkeypatch.undo()
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(engine.worker, "execute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.complete(PROMPTS[0], params=greedy())
    assert list(completion_of(engine._read(beside)).tokens) == expected[2]
    assert list(engine.complete(PROMPTS[3], params=greedy()).tokens) == expected[3]


def test_too_long_a_request_is_refused_and_others_go_on(engine: Engine, expected: list[list[int]]) -> None:
    stream = engine.submit(PROMPTS[0], params=greedy())
    with pytest.raises(Refused, match="context-too-long"):
        engine.submit(PROMPTS[1], params=greedy(max_new_tokens=64))
    with pytest.raises(Refused, match="vocabulary"):
        engine.submit([5, 4000], params=greedy())
    with pytest.raises(Refused, match="missing-side-file"):
        engine.submit("text needs a tokenizer", params=greedy())
    assert list(completion_of(engine._read(stream)).tokens) == expected[0]


def test_a_text_that_no_tokens_fit_is_refused_before_it_is_tokenized() -> None:
    engine, text = start(MENAGERIE, max_context=160), "x" * (2 << 20)
    for prompt, chat in ((text, False), ([{"role": "user", "content": [{"type": "text", "text": text}]}], True)):
        with pytest.raises(Refused, match="a text of 2,097,152 characters cannot fit the context"):
            engine.submit(prompt, chat=chat)
    engine.frontend.refuse_endless("x" * (1 << 20), 1)  # a tokenizer may shorten what is as short as this
    engine.close()


@pytest.mark.parametrize(
    ("name", "value", "block"),
    [
        ("norm.weight", math.nan, "norm"),
        ("layers.1.mixer_norm.weight", math.inf, "layers.1.mixer"),
        ("head.weight", -math.inf, "head"),
    ],
)
def test_one_number_that_is_not_finite_ends_the_request_and_names_block_rank_and_weight(
    checkpoint: Get, name: str, value: float, block: str
) -> None:
    engine = start(checkpoint("llama"))
    engine.worker.rank.weights.params[name].flatten()[3] = value
    with pytest.raises(EngineFailed, match=f"first in {block}, whose weights are not finite on rank 0: {name}"):
        engine.complete(PROMPTS[0], params=greedy())
    assert engine.scheduler.num_running == engine.scheduler.num_waiting == 0
    with pytest.raises(EngineFailed, match="not finite"):
        engine.complete(PROMPTS[0], params=greedy(temperature=1.0))


def test_a_request_that_was_not_taken_in_yet_is_told_of_a_failure_too(checkpoint: Get) -> None:
    """A step that waits for a lost rank never ends, so nobody looks into the inbox again."""
    engine = start(checkpoint("llama"))
    running = engine.submit([3, 4, 5], params=greedy(max_new_tokens=9))
    engine.step()
    coming = engine.submit([3, 4], params=greedy(max_new_tokens=9))
    engine.fail(Failure(rank=1, phase="step 2 decode", reason="gave no sign of life"))
    for stream in (running, coming):
        while (delta := stream.read(0)) is not None and delta.finish is None:
            pass
        assert delta is not None
        assert (delta.finish, delta.error) == ("error", "rank 1 in phase 'step 2 decode': gave no sign of life")


def test_start_refuses_what_it_cannot_do(checkpoint: Get) -> None:
    with pytest.raises(Refused, match="one rank"):
        Engine.start(str(checkpoint("llama")), Mesh(tp=2))
    with pytest.raises(Refused, match="positions"):
        start(checkpoint("llama"), max_context=4096)
    with pytest.raises(Refused, match="no implementation"):
        start(checkpoint("llama"), operators={"attention": "magic"})
    with pytest.raises(Refused, match="not-found"):
        start(Path("nowhere"))


def test_a_closed_engine_refuses(checkpoint: Get) -> None:
    engine = start(checkpoint("llama"), warm_up=True)
    assert engine.health().is_ready
    assert {stage.name for stage in engine.health().stages if stage.status == "passed"} >= {"ledger", "load", "ready"}
    engine.close()
    with pytest.raises(Refused, match="stopped"):
        engine.submit(PROMPTS[0])


def test_an_answer_that_a_stop_cuts_off_is_an_error_not_an_end(checkpoint: Get) -> None:
    engine = start(checkpoint("llama"))
    stream = engine.submit(PROMPTS[0], params=greedy())
    engine.step()
    engine.step()
    engine.close()
    deltas = []
    while not deltas or deltas[-1].finish is None:
        delta = stream.read()
        assert delta is not None
        deltas.append(delta)
    assert sum(len(delta.tokens) for delta in deltas) == 2
    assert (deltas[-1].finish, deltas[-1].error) == ("error", "the engine was stopped before the answer was complete")


@pytest.mark.parametrize("name", ["llama", "llava-clip", "deepseek_v3", "gemma2"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_trace_shows_what_the_reference_has(checkpoint: Get, name: str, side: str) -> None:
    path = checkpoint(name)
    given = inputs(name)
    if side == "left":
        given = {**given, "input_ids": given["input_ids"].copy(), "attention_mask": given["attention_mask"].copy()}
        for row, mask in zip(given["input_ids"], given["attention_mask"], strict=True):
            shift = int((mask == 0).sum())
            row[:] = np.roll(row, shift)
            mask[:] = np.roll(mask, shift)
    model = reference(path)
    with torch.no_grad():
        arguments = {key: torch.from_numpy(value) for key, value in given.items()}
        outcome = model(**arguments, output_hidden_states=True, use_cache=False)
    states = {f"hidden.{i}": state.numpy() for i, state in enumerate(outcome.hidden_states)}
    states["logits"] = outcome.logits.numpy()
    engine = start(path, dtype="F32", max_context=None)
    ids, mask = given.pop("input_ids"), given.pop("attention_mask")
    shown = engine.trace(ids, mask, given, steps=3)
    real = mask.astype(bool)
    for key, wanted in states.items():
        np.testing.assert_allclose(shown[key][real], wanted[real], atol=1e-4 * np.abs(wanted[real]).max(), err_msg=key)
        assert not shown[key][~real].any()
    assert shown["generated"].shape == (2, 3)
    last = states["logits"][0, np.flatnonzero(mask[0])[-1]]
    assert shown["generated"][0, 0] == last.argmax()
    forced = engine.trace(ids, mask, given, inputs=states_only(states), layers=(1, len(states) - 2), blocks=True)
    assert set(forced) == {key for key in shown if not key.startswith(("hidden.0", "hidden.1", "generated"))} | {
        f"layers.{i}.mixer" for i in range(1, len(states) - 2)
    }
    for key in states.keys() & forced.keys():
        wanted = states[key][real]
        np.testing.assert_allclose(forced[key][real], wanted, atol=1e-4 * np.abs(wanted).max(), err_msg=key)


def states_only(states: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {key: value for key, value in states.items() if key.startswith("hidden.")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": np.zeros((2, 3))}, "integers"),
        ({"input_ids": np.array([[1, 9999]])}, "ids below"),
        ({"attention_mask": np.array([[1, 0, 1, 1]])}, "holes"),
        ({"attention_mask": np.array([[0, 0, 0, 0]])}, "empty row"),
        ({"layers": (2, 1)}, "range"),
        ({"inputs": {"hidden.0": np.zeros((1, 4, 7), np.float32)}}, "hidden.0"),
        ({"tensors": {"pixel_values": np.zeros((1, 3, 8, 8), np.float32)}}, "bad-image"),
    ],
)
def test_a_trace_that_cannot_be_run_is_refused_before_it_starts(
    engine: Engine, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(Refused, match=message):
        engine.trace(**{"input_ids": np.array([[1, 2, 3, 4]]), **change})


def test_the_memory_that_telemetry_asks_for_walks_over_no_pages(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system takes 0.1 s and more for that, in which nothing steps."""
    monkeypatch.setattr("firstlight.engine.weights.memory.Pool.report", lambda _: pytest.fail("it was not asked for"))
    (memory,) = engine.memory()
    assert (memory.pools, memory.rank) == ((), 0)


def test_memory_and_profile_add_up(engine: Engine) -> None:
    (memory,) = engine.memory(pools=True)
    assert sum(pool["reserved_bytes"] for pool in memory.pools) == sum(memory.bytes_by_role.values())
    assert sum(memory.bytes_by_role.values()) <= memory.resident_bytes
    weights = sum(size for role, size in memory.bytes_by_role.items() if role != "cache")
    assert weights == engine.worker.rank.weights.nbytes
    (profile,) = engine.profile(prompt_tokens=16, decode_steps=3, batch=2)
    for phase in (profile.prefill, profile.decode):
        assert phase.compute_ms + phase.communication_ms + phase.waiting_ms == pytest.approx(phase.total_ms)
        assert {f"layers.{i}.{part}" for i in range(3) for part in ("mixer", "ffn")} <= set(phase.layers_ms)
        assert phase.operators_ms["attention"] > 0
