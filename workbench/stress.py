"""The rung `stress`: many requests at once, and whether each still gets its own answer.

Every request is first asked alone, then together with the others. Checks: no request fails; answers are the same as
alone, but for near-ties of the likeliest tokens; no request's code word shows up in another's answer; requests whose
client leaves free what they held; memory does not grow; every rank is alive at the end.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from firstlight.engine.errors import FirstlightError
from firstlight.engine.serving.api import EngineInfo, RankMemory
from firstlight.engine.serving.client import EngineClient
from firstlight.engine.serving.request import Completion, SamplingParams, TokenLogprob
from firstlight.engine.serving.stats import EngineStats
from firstlight.engine.serving.waiting import until
from firstlight.workbench.infer import picture_questions
from firstlight.workbench.progress import Progress
from firstlight.workbench.report import Draft, Report

NEAR_TIE = {"F32": 1e-3, "F16": 0.02, "BF16": 0.15}
"""Nats between the two likeliest tokens below which a batch may choose the other: sums in another order."""
PARTED_SHARE = {"F32": 0.1, "F16": 0.4, "BF16": 0.6}
"""Of drawn answers: each token's draw falls so near a boundary as rounding moves it about once in 10^2 to 10^5."""
GROWTH_BYTES = 64 << 20  # of a rank's resident memory that a burst may leave behind, beside 2 % of it
MOST_BURSTS = 3
LEFT_BEHIND_S = 20.0  # how long requests of clients that left may take to free what they held
LETTERS = "BCDFGHJKLMNPQRSTVWXZ"


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One request of the load. `code` is a word that no other request has; `leaves`: its client goes away early."""

    prompt: str | tuple[int, ...]
    picture: bytes | None
    params: SamplingParams
    code: str
    leaves: bool = False


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a request: the answer, or the error."""

    answer: Completion | None = None
    error: str = ""
    first_token_s: float | None = None
    total_s: float = 0.0


def stress(
    engine: EngineClient,
    *,
    requests: int = 32,
    concurrency: int = 16,
    tokens: int = 24,
    seed: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Puts `requests` on the engine, `concurrency` at a time, of `tokens` each, and judges what comes back."""
    progress = progress or Progress("stress")
    info = engine.info()
    draft = Draft("stress", f"{info.model}, {info.mesh.describe()}, {info.dtype} on {info.device}")
    loads = _loads(info, requests, tokens, seed, _has_tokenizer(engine))
    staying = [load for load in loads if not load.leaves]
    alone = _alone(engine, staying, progress)
    before = engine.memory()
    together, wall_s, fullest = _together(engine, loads, concurrency, progress)
    stayed = [outcome for load, outcome in zip(loads, together, strict=True) if not load.leaves]
    _complete(draft, together)
    _same(draft, info, staying, alone, stayed)
    _own_words(draft, loads, together)
    _freed(draft, engine)
    _memory(draft, before, engine.memory, lambda: _together(engine, loads, concurrency, progress))
    health = engine.health()
    draft.check("every rank is alive", health.is_ready, value=health.status, detail=str(health.failure or ""))
    _figures(draft, stayed, wall_s, fullest, concurrency)
    return draft.close()


def _has_tokenizer(engine: EngineClient) -> bool:
    try:
        engine.complete("a", params=SamplingParams(max_new_tokens=1), chat=False)
    except FirstlightError:
        return False
    return True


def _loads(info: EngineInfo, count: int, tokens: int, seed: int, with_text: bool) -> list[Load]:
    """Requests of many lengths, greedy and drawn, with and without pictures; of one in eight the client leaves."""
    chance = random.Random(seed)
    seen = [question for question in picture_questions(info) if question.picture is not None] if info.sees else []
    room = max(1, info.max_context - tokens - 1)
    found = []
    for index in range(count):
        code = "".join(chance.choice(LETTERS) for _ in range(8))
        sampled = index % 3 == 2
        params = SamplingParams(
            max_new_tokens=max(1, min(tokens, info.max_context // 2)),
            temperature=0.8 if sampled else 0.0,
            seed=index,
            ignore_eos=True,
            logprobs=True,
            top_logprobs=2,
        )
        picture = None
        prompt: str | tuple[int, ...]
        if seen and index % 2:
            question = seen[index % len(seen)]
            given = question.picture
            picture = given.read_bytes() if isinstance(given, Path) else given
            prompt = f"{question.prompt} {code}"
        elif with_text:
            prompt = f"{code} " + "what does it say? " * chance.choice((0, 1, 2, 4))
        else:
            length = min(room, chance.choice((1, 3, 9, 27, 81)))
            prompt = tuple(chance.randrange(info.vocab_size) for _ in range(length))
        found.append(Load(prompt=prompt, picture=picture, params=params, code=code, leaves=index % 8 == 5))
    return found


def _ask(engine: EngineClient, load: Load) -> Outcome:
    started_s = time.perf_counter()
    first_s: float | None = None
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    pictures = [load.picture] if load.picture is not None else []
    chat = not isinstance(load.prompt, str) or bool(pictures)
    try:
        deltas = engine.generate(load.prompt, pictures, load.params, chat)
        text, last = "", None
        for delta in deltas:
            first_s = first_s or time.perf_counter() - started_s
            text += delta.text
            tokens += delta.tokens
            logprobs += delta.logprobs
            last = delta
            if load.leaves and len(tokens) >= 2:
                deltas.close()  # type: ignore[attr-defined]
                return Outcome(first_token_s=first_s, total_s=time.perf_counter() - started_s)
        if last is None or last.finish is None or last.usage is None:
            return Outcome(error="the answer broke off")
        if last.finish == "error":
            return Outcome(error=last.error or "the engine failed")
        answer = Completion(
            text=text, tokens=tuple(tokens), finish=last.finish, usage=last.usage, logprobs=tuple(logprobs)
        )
        return Outcome(answer=answer, first_token_s=first_s, total_s=time.perf_counter() - started_s)
    except FirstlightError as error:
        return Outcome(error=str(error))


def _alone(engine: EngineClient, loads: Sequence[Load], progress: Progress) -> list[Outcome]:
    found = []
    for index, load in enumerate(loads):
        progress("one at a time", index, len(loads), "requests")
        found.append(_ask(engine, load))
    progress("one at a time", len(loads), len(loads), "requests")
    return found


def _together(
    engine: EngineClient, loads: Sequence[Load], concurrency: int, progress: Progress
) -> tuple[list[Outcome], float, EngineStats]:
    """All outcomes, the time for all of them, and the statistics at the fullest moment that was seen."""
    done = 0
    lock = threading.Lock()

    def one(load: Load) -> Outcome:
        nonlocal done
        outcome = _ask(engine, load)
        with lock:
            done += 1
            progress("all at once", done, len(loads), "requests")
        return outcome

    with _Watch(engine.stats) as watch, ThreadPoolExecutor(concurrency) as pool:
        started_s = time.perf_counter()
        found = list(pool.map(one, loads))
        wall_s = time.perf_counter() - started_s
    return found, wall_s, watch.fullest


class _Watch:
    """Looks at the statistics again and again, and keeps those with the most requests running."""

    def __init__(self, look: Callable[[], EngineStats]) -> None:
        self._look = look
        self.fullest = look()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, name="watch", daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._end.wait(0.05):
            try:
                now = self._look()
            except FirstlightError:
                return
            if (now.running, now.waiting) > (self.fullest.running, self.fullest.waiting):
                self.fullest = now


def _complete(draft: Draft, outcomes: Sequence[Outcome]) -> None:
    errors = [outcome.error for outcome in outcomes if outcome.error]
    draft.check(
        "every request is answered",
        not errors,
        value=len(errors),
        limit=0,
        unit="errors",
        detail="; ".join(dict.fromkeys(errors))[:300],
    )


def _same(
    draft: Draft, info: EngineInfo, loads: Sequence[Load], alone: Sequence[Outcome], together: Sequence[Outcome]
) -> None:
    """Answers depend on nobody else in the batch: greedy ones but for near-ties, drawn ones but for rounding."""
    wrong, ties, drawn, parted = [], 0, 0, 0
    for load, one, other in zip(loads, alone, together, strict=True):
        if one.answer is None or other.answer is None:
            continue
        is_drawn, is_same = load.params.temperature > 0, one.answer.tokens == other.answer.tokens
        drawn += is_drawn
        if is_same:
            continue
        if is_drawn:
            parted += 1
        elif _is_tie(one.answer, other.answer, NEAR_TIE.get(info.dtype, 0.15)):
            ties += 1
        else:
            wrong.append(repr(str(load.prompt)[:40]))
    draft.check(
        "greedy answers under load are those given alone",
        not wrong,
        value=len(wrong),
        limit=0,
        unit="answers",
        detail="; ".join(wrong[:3]) or (f"{ties} part at a near-tie" if ties else ""),
    )
    if drawn:
        draft.check(
            "drawn answers under load are those given alone, but for rounding",
            parted / drawn <= PARTED_SHARE.get(info.dtype, 0.6),
            value=parted / drawn,
            limit=PARTED_SHARE.get(info.dtype, 0.6),
            unit="share",
            detail=f"{parted} of {drawn}; a draw that falls next to a boundary takes the other token",
        )


def _is_tie(one: Completion, other: Completion, gap_nats: float) -> bool:
    """Whether the first token that differs was chosen between two that are nearly as likely."""
    pairs = zip(one.tokens, other.tokens, one.logprobs, strict=False)
    first = next((logprob for mine, theirs, logprob in pairs if mine != theirs), None)
    if first is None or len(first.top) < 2:
        return False
    return first.top[0][1] - first.top[1][1] < gap_nats


def _own_words(draft: Draft, loads: Sequence[Load], outcomes: Sequence[Outcome]) -> None:
    """No answer holds another request's code word."""
    if not any(isinstance(load.prompt, str) for load in loads):
        draft.check("no answer holds another's code word", None, detail="there is no tokenizer to write words with")
        return
    leaked = [
        other.code
        for load, outcome in zip(loads, outcomes, strict=True)
        for other in loads
        if other is not load and outcome.answer is not None and other.code in outcome.answer.text
    ]
    draft.check(
        "no answer holds another's code word",
        not leaked,
        value=len(leaked),
        limit=0,
        unit="leaks",
        detail=", ".join(leaked[:3]),
    )


def _freed(draft: Draft, engine: EngineClient) -> None:
    """Nothing runs and every page is free, soon after the last client went."""

    def is_free() -> bool:
        stats = engine.stats()
        return not stats.running and stats.free_pages == stats.num_pages

    until(is_free, LEFT_BEHIND_S, every_s=0.1)
    stats = engine.stats()
    held = stats.num_pages - stats.free_pages
    draft.check(
        "requests that ended or whose client left hold nothing",
        not stats.running and not held,
        value=held,
        limit=0,
        unit="pages",
        detail=f"{stats.running} still run" if stats.running else "",
    )


def _memory(
    draft: Draft,
    before: Sequence[RankMemory],
    memory: Callable[[], Sequence[RankMemory]],
    burst: Callable[[], object],
) -> None:
    """After growth the same burst is put on again: libraries keep what they compiled for each new shape, once."""
    after = tuple(memory())
    bursts = 1
    while bursts < MOST_BURSTS and any(map(_grows, before, after)):
        burst()
        before, after = after, tuple(memory())
        bursts += 1
    for old, new in zip(before, after, strict=True):
        draft.check(
            f"rank {new.rank} does not grow",
            not _grows(old, new),
            value=max(0, new.resident_bytes - old.resident_bytes),
            limit=_allowed_growth(old),
            unit="B",
            detail=new.device if bursts == 1 else f"{new.device}, in burst {bursts} of the same requests",
        )


def _grows(old: RankMemory, new: RankMemory) -> bool:
    return new.resident_bytes - old.resident_bytes > _allowed_growth(old)


def _allowed_growth(old: RankMemory) -> int:
    return GROWTH_BYTES + old.resident_bytes // 50


def _figures(draft: Draft, stayed: Sequence[Outcome], wall_s: float, fullest: EngineStats, concurrency: int) -> None:
    answers = [outcome.answer for outcome in stayed if outcome.answer is not None]
    generated = sum(len(answer.tokens) for answer in answers)
    first = sorted(outcome.first_token_s for outcome in stayed if outcome.first_token_s is not None)
    whole = sorted(outcome.total_s for outcome in stayed if outcome.answer is not None)
    draft.metric("requests", len(stayed), "requests", f"whose client stayed, {concurrency} at a time")
    draft.metric("tokens_per_s", generated / wall_s, "tokens/s", "of requests that were answered whole")
    draft.metric("running_most", fullest.running, "requests", "in the batch at once, as seen 20 times a second")
    draft.metric("waiting_then", fullest.waiting, "requests", "in the queue at that moment")
    for name, values in (("first_token", first), ("answer", whole)):
        if values:
            draft.metric(f"{name}_median_s", statistics.median(values), "s")
            draft.metric(f"{name}_p95_s", values[min(len(values) - 1, int(0.95 * len(values)))], "s")
