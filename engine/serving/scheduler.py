"""Which tokens of which sequences the next step computes: continuous batching over a fixed number of pages. No torch.

A sequence gets the pages for its whole length (prompt and longest answer) when it is admitted, so that no running
sequence ever has to give way. Admission is first come, first served; within a step decodes come first, one token
each, and what is left of the token budget goes to prompts, cut into chunks, in the order of admission.
"""

from __future__ import annotations

from collections import deque

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.serving.cache import PageAllocator
from firstlight.engine.serving.request import FinishReason, Request, joined
from firstlight.engine.serving.steps import Admission, Chunk, Draw, ReplicaPlan, StepPlan, StepResult
from firstlight.engine.serving.stream import EngineFailed


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Fixed sizes: sequences that run at once, tokens of a step, pages; each for one replica."""

    max_batch: int
    token_budget: int
    page_size: int
    num_pages: int
    max_context: int
    replicas: int = 1

    def __post_init__(self) -> None:
        for name in ("max_batch", "page_size", "num_pages", "max_context", "replicas"):
            if getattr(self, name) < 1:
                raise _impossible(f"{name} must be at least 1", ">= 1", str(getattr(self, name)))
        if self.token_budget <= self.max_batch:
            raise _impossible(
                "token_budget must exceed max_batch, or running sequences would keep prompts from starting",
                f"> {self.max_batch}",
                str(self.token_budget),
            )
        if self.num_pages * self.page_size < self.max_context:
            raise _impossible(
                "the cache does not hold one sequence of max_context",
                f"at least {self.max_context} tokens",
                f"{self.num_pages} pages of {self.page_size}",
            )


class Sequence:
    """A request on its way: `tokens` is prompt and answer, the first `computed` of them are in the cache.

    `told`: a step that announced it to the ranks was applied.
    """

    __slots__ = ("computed", "pages", "prompt_len", "replica", "request", "tokens", "told")

    def __init__(self, request: Request, replica: int) -> None:
        self.request = request
        self.replica = replica
        self.tokens = list(request.prompt_ids)
        self.prompt_len = len(self.tokens)
        self.computed = 0
        self.told = False
        self.pages: tuple[int, ...] = ()

    @property
    def max_len(self) -> int:
        return self.prompt_len + self.request.params.max_new_tokens

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_len


class Step(msgspec.Struct, frozen=True):
    """What `apply` reports: a sequence got a token, and perhaps ended with it."""

    number: int
    token: int
    finish: FinishReason | None


class _Replica:
    """Sequences of one replica and the pages they share."""

    def __init__(self, limits: Limits) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}  # in the order of admission
        self.released: list[int] = []
        self.holders: dict[int, int] = {}  # page -> the running request that has it
        self.pages = PageAllocator(limits.num_pages, limits.page_size)

    def hold(self, sequence: Sequence, pages: tuple[int, ...]) -> None:
        """Pages are a sequence's own: what two write into gives both of them wrong answers, and nothing else shows."""
        number = sequence.request.number
        for page in pages:
            if (other := self.holders.setdefault(page, number)) != number:
                raise EngineFailed(
                    f"page {page} of the cache was given to request {number}, and request {other} still has it; "
                    "neither goes on: each would read the other's keys. This is a fault of the engine, not of a request"
                )
        sequence.pages = pages

    def let_go(self, sequence: Sequence) -> None:
        """A sequence that ran is over: its pages are free again."""
        for page in sequence.pages:
            del self.holders[page]
        self.pages.give_back(sequence.pages)

    @property
    def load(self) -> int:
        """Tokens spoken for: what running and waiting sequences may grow to."""
        return sum(s.max_len for s in self.running.values()) + sum(s.max_len for s in self.waiting)


class Scheduler:
    """All sequences of an engine. `add`, `schedule`, `apply` and `finish` change it; one thread calls them.

    `whole_pictures`: the tokens of a picture see each other, so no prompt is cut inside one.
    """

    def __init__(self, limits: Limits, eos_ids: frozenset[int] = frozenset(), whole_pictures: bool = False) -> None:
        self.limits = limits
        self.eos_ids = eos_ids
        self.whole_pictures = whole_pictures
        self._replicas = tuple(_Replica(limits) for _ in range(limits.replicas))
        self._sequences: dict[int, Sequence] = {}
        self._steps = 0

    @property
    def num_running(self) -> int:
        return sum(len(replica.running) for replica in self._replicas)

    @property
    def num_waiting(self) -> int:
        return sum(len(replica.waiting) for replica in self._replicas)

    @property
    def free_pages(self) -> int:
        return sum(replica.pages.num_free for replica in self._replicas)

    def fits(self, request: Request) -> None:
        """Raise `Refused` (context-too-long) if the request could never be admitted."""
        length = len(request.prompt_ids) + request.params.max_new_tokens
        if length > self.limits.max_context:
            raise Refused(
                fatal(
                    "context-too-long",
                    f"{len(request.prompt_ids)} tokens of prompt and {request.params.max_new_tokens} of answer do not "
                    f"fit the context",
                    expected=f"at most {self.limits.max_context} tokens",
                    found=f"{length} tokens",
                    next="shorten the prompt, lower max_new_tokens (max_tokens), or start with a larger max_context",
                )
            )
        room = self.limits.token_budget - self.limits.max_batch
        largest = max((count for _, count in joined(request.image_spans)), default=0) if self.whole_pictures else 0
        if largest > room:
            raise Refused(
                fatal(
                    "context-too-long",
                    "a picture does not fit into one step, and its tokens must be computed together",
                    expected=f"at most {room} tokens a picture: token_budget less max_batch",
                    found=f"{largest} tokens",
                    next="send a smaller picture, or start with a larger token_budget",
                )
            )

    def add(self, request: Request) -> None:
        """Queue a request at the replica with the least to do; it must fit (`fits`)."""
        assert request.number not in self._sequences, request.number
        self.fits(request)
        replica = min(range(len(self._replicas)), key=lambda index: self._replicas[index].load)
        sequence = Sequence(request, replica)
        self._replicas[replica].waiting.append(sequence)
        self._sequences[request.number] = sequence

    def schedule(self) -> StepPlan | None:
        """The next step, or None when there is nothing to compute.

        A plan that is never applied, since its step was interrupted, is planned again: computing it twice changes
        nothing, and ranks are told again what they may not have heard.
        """
        if not self._sequences:
            return None
        self._steps += 1
        return StepPlan(self._steps, tuple(self._plan(replica) for replica in self._replicas))

    def apply(self, plan: StepPlan, result: StepResult) -> list[Step]:
        """Take in what the step computed; sequences that end by length or end-of-sequence are over."""
        for part, replica in zip(plan.replicas, self._replicas, strict=True):
            del replica.released[: len(part.released)]
            for admission in part.admitted:
                if admission.number in self._sequences:  # it may have been finished while the step ran
                    self._sequences[admission.number].told = True
            for chunk in part.chunks:
                if chunk.number in self._sequences:
                    self._sequences[chunk.number].computed = chunk.start + len(chunk.tokens)
        steps = []
        for sampled in result.sampled:
            sequence = self._sequences.get(sampled.number)
            if sequence is None:
                continue
            sequence.tokens.append(sampled.token)
            finish = self._end(sequence)
            steps.append(Step(sampled.number, sampled.token, finish))
            if finish is not None:
                self.finish(sampled.number)
        return steps

    def finish(self, number: int) -> bool:
        """End a sequence, whatever its state, and free its pages; False if it is not here (any more)."""
        sequence = self._sequences.pop(number, None)
        if sequence is None:
            return False
        replica = self._replicas[sequence.replica]
        if number in replica.running:
            del replica.running[number]
            replica.let_go(sequence)
            replica.released.append(number)
        else:
            replica.waiting.remove(sequence)
        return True

    def check(self) -> None:
        """Assert what always holds; called by tests after every change."""
        for replica in self._replicas:
            replica.pages.check()
            held = [page for sequence in replica.running.values() for page in sequence.pages]
            assert len(held) == len(set(held)), "two sequences share a page"
            assert set(held) == set(replica.holders), "a page is held by nobody"
            assert len(held) + replica.pages.num_free == self.limits.num_pages, "a page leaked"
            assert len(replica.running) <= self.limits.max_batch
            for sequence in replica.running.values():
                assert 0 <= sequence.computed < len(sequence.tokens) <= sequence.max_len
                assert len(sequence.pages) * self.limits.page_size >= sequence.max_len
                assert sequence.computed >= sequence.prompt_len or sequence.num_generated == 0
        known = {number for replica in self._replicas for number in replica.running}
        known |= {sequence.request.number for replica in self._replicas for sequence in replica.waiting}
        assert known == set(self._sequences), "a sequence is lost"

    def _plan(self, replica: _Replica) -> ReplicaPlan:
        self._admit(replica)
        new = tuple(_admission(sequence) for sequence in replica.running.values() if not sequence.told)
        return ReplicaPlan(tuple(replica.released), new, self._chunks(replica))

    def _admit(self, replica: _Replica) -> None:
        """Start waiting sequences, in order, while there are places and pages."""
        while replica.waiting and len(replica.running) < self.limits.max_batch:
            sequence = replica.waiting[0]
            count = replica.pages.pages_for(sequence.max_len)
            if count > replica.pages.num_free:
                break
            replica.hold(sequence, replica.pages.take(count))
            replica.waiting.popleft()
            replica.running[sequence.request.number] = sequence

    def _chunks(self, replica: _Replica) -> tuple[Chunk, ...]:
        """Decodes first, then prompts while the budget lasts; in the order of pages, so that neighbours are views."""
        decodes: list[Sequence] = []
        prompts: list[Sequence] = []
        for sequence in replica.running.values():
            (decodes if sequence.computed >= sequence.prompt_len else prompts).append(sequence)
        budget = self.limits.token_budget - len(decodes)
        chunks = [(sequence.pages, _chunk(sequence, 1)) for sequence in decodes]
        for sequence in prompts:
            if budget == 0:
                break
            count = self._uncut(sequence, min(budget, len(sequence.tokens) - sequence.computed))
            if count == 0:
                break
            budget -= count
            chunks.append((sequence.pages, _chunk(sequence, count)))
        chunks.sort(key=lambda item: item[0])
        return tuple(chunk for _, chunk in chunks)

    def _uncut(self, sequence: Sequence, count: int) -> int:
        """At most `count` next tokens, ending in front of a picture that would be cut."""
        stop = sequence.computed + count
        for begin, tokens in joined(sequence.request.image_spans) if self.whole_pictures else ():
            if begin < stop < begin + tokens:
                return max(begin - sequence.computed, 0)
        return count

    def _end(self, sequence: Sequence) -> FinishReason | None:
        params = sequence.request.params
        if not params.ignore_eos and sequence.tokens[-1] in self.eos_ids:
            return "stop"
        return "length" if sequence.num_generated >= params.max_new_tokens else None


def draw_of(request: Request) -> Draw:
    """How the tokens of a request are chosen; its seed is known by now."""
    params = request.params
    assert params.seed is not None
    logprobs = params.top_logprobs if params.logprobs else -1
    return Draw(params.temperature, params.top_p, params.top_k, params.seed, logprobs)


def _admission(sequence: Sequence) -> Admission:
    request = sequence.request
    return Admission(
        number=request.number,
        pages=sequence.pages,
        draw=draw_of(request),
        images=request.images,
        image_spans=request.image_spans,
        prompt_tokens=sequence.prompt_len,
    )


def _chunk(sequence: Sequence, count: int) -> Chunk:
    start, stop = sequence.computed, sequence.computed + count
    draws = stop - sequence.prompt_len if stop == len(sequence.tokens) else -1
    return Chunk(sequence.request.number, start, tuple(sequence.tokens[start:stop]), draws)


def _impossible(message: str, expected: str, found: str) -> Refused:
    return Refused(fatal("usage", message, expected=expected, found=found, next="change the limits of the engine"))
