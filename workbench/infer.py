"""The rung `infer`: text and picture answers from a running engine, and whether they are answers at all.

Checks: nothing is empty, a loop or gibberish (a loop of the likeliest tokens is a warning where drawn answers read
well); the same seed gives the same tokens; every picture fills its placeholders; another picture gives another answer;
and, where a folder `pictures` with `expected.json` stands beside the checkpoint, that its answers are the expected
ones.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, warning
from firstlight.engine.inputs.prepare import Processor
from firstlight.engine.serving.api import EngineInfo, EngineLike
from firstlight.engine.serving.options import EngineOptions
from firstlight.engine.serving.request import Completion, SamplingParams
from firstlight.workbench import answers
from firstlight.workbench.events import RequestEvent
from firstlight.workbench.progress import Progress
from firstlight.workbench.report import Check, Draft, Report
from firstlight.workbench.side_files import has_chat_template

ANSWER_TOKENS = 32
SEED = 20240229
EXPECTED_SHARE = 0.75  # of the expected answers; a broken engine gives next to none
DRAWS = 3  # answers that are drawn where the likeliest tokens run in circles
SAME_DISTRIBUTION = 0.1  # nats: below it two pictures gave the same first token for all we know

Recorder = Callable[[RequestEvent], None]


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked; `expected` None: any sound answer will do."""

    prompt: str
    picture: Path | bytes | None = None
    name: str = ""
    expected: str | None = None


def infer(
    engine: EngineLike,
    questions: Sequence[Question] | None = None,
    *,
    progress: Progress | None = None,
    record: Recorder | None = None,
) -> Report:
    """Asks the engine and judges the answers. `questions` None: those of data/prompts.yaml and of the checkpoint.

    Raises `Refused` when the checkpoint lacks what answering needs (tokenizer, processor).
    """
    info = engine.info()
    draft = Draft("infer", f"{info.model}, {info.mesh.describe()}")
    asker = _Asker(engine, info, record)
    asked = list(questions) if questions is not None else [*text_questions(), *picture_questions(info)]
    progress = progress or Progress("infer")
    rows, problems = [], []
    for index, question in enumerate(asked):
        progress("ask", index, len(asked), "questions")
        row, problem, circles = _ask(asker, question)
        rows.append(row)
        if circles:
            draft.find(_in_circles(question, problem))
        elif problem:
            problems.append(f"{question.prompt!r}: {problem}")
    progress("ask", len(asked), len(asked), "questions")
    draft.check(
        READABLE,
        not problems,
        value=len(problems),
        limit=0,
        unit="problems",
        detail="; ".join(problems[:3]),
    )
    _expected(draft, rows)
    _same_seed(draft, asker, asked[0])
    if info.sees:
        _pictures(draft, asker, [question for question in asked if question.picture is not None])
    _figures(draft, rows)
    draft.table("answers", rows)
    return draft.close()


READABLE = "answers are neither empty, loops nor gibberish"


def with_answers(report: Report, options: EngineOptions, progress: Progress) -> Report:
    """The report of `verify` with the checks of `infer` added, asked of an engine like the one that was verified.

    A checkpoint that lacks what answering needs has these checks skipped, and says so. Answers that do not read well
    are a warning where the numbers equal the reference's: then its answers read no better, as with random weights.
    """
    from firstlight.workbench.engines import open_engine

    skipped = ""
    try:
        same = {"dtype": "F32" if options.dtype == "auto" else options.dtype}
        same |= {"device": "cpu" if options.device == "auto" else options.device}
        with open_engine(msgspec.structs.replace(options, **same), progress) as engine:
            answered = infer(engine, _without_expectations(engine.info()), progress=progress)
    except Refused as refused:
        skipped = str(refused.findings[0].message)
    if skipped:
        checks = (*report.checks, Check(name="answers", status="skipped", detail=skipped))
        return msgspec.structs.replace(report, checks=checks)
    if report.passed:
        answered = _forgive_unreadable(answered)
    return msgspec.structs.replace(
        report,
        status=report.status if answered.passed else answered.status,
        checks=(*report.checks, *answered.checks),
        findings=(*report.findings, *(f for f in answered.findings if f not in report.findings)),
        tables={**report.tables, **answered.tables},
        duration_s=report.duration_s + answered.duration_s,
    )


def _forgive_unreadable(answered: Report) -> Report:
    """The check of how answers read becomes a warning; the others decide."""
    odd = [check for check in answered.checks if check.name == READABLE and check.status == "failed"]
    if not odd:
        return answered
    checks = tuple(
        msgspec.structs.replace(check, status="skipped", detail=f"as the reference's: {check.detail}")
        if check in odd
        else check
        for check in answered.checks
    )
    said = warning(
        "odd-answers",
        f"answers do not read well, and the reference computes the same: {odd[0].detail}",
        next="a model that is not trained, or not for chat, answers so; ask it something it was made for",
    )
    failed = any(check.status == "failed" for check in checks)
    return msgspec.structs.replace(
        answered, checks=checks, findings=(*answered.findings, said), status="failed" if failed else "passed"
    )


def _without_expectations(info: EngineInfo) -> list[Question]:
    """What is asked where equality with the reference is the question, not what the model has learned."""
    asked = [*text_questions(), *picture_questions(info)]
    return [msgspec.structs.replace(question, expected=None) for question in asked]


def text_questions() -> list[Question]:
    """The questions of data/prompts.yaml that need no picture."""
    return [Question(prompt=prompt) for prompt in _prompts()["text"]]


def picture_questions(info: EngineInfo) -> list[Question]:
    """Questions about pictures: those beside the checkpoint with their answers, else about two drawn here."""
    if not info.sees:
        return []
    folder = Path(info.checkpoint).parent / "pictures"
    if (folder / "expected.json").is_file():
        return [
            Question(prompt=row["question"], picture=folder / row["file"], name=row["file"], expected=row["answer"])
            for row in msgspec.json.decode((folder / "expected.json").read_bytes())
        ]
    return [
        Question(prompt=prompt, picture=drawn(which), name=f"drawn {which}")
        for prompt in _prompts()["picture"]
        for which in DRAWN
    ]


def _prompts() -> dict[str, list[str]]:
    import yaml

    text = resources.files("firstlight.data").joinpath("prompts.yaml").read_text(encoding="utf-8")
    prompts: dict[str, list[str]] = yaml.safe_load(text)
    return prompts


DRAWN = {"red disc on white": ("white", "red", "disc"), "blue square on black": ("black", "blue", "square")}


def drawn(which: str, side: int = 224) -> bytes:
    """A picture of one shape, as PNG."""
    from PIL import Image, ImageDraw

    ground, colour, shape = DRAWN[which]
    image = Image.new("RGB", (side, side), ground)
    box = (side // 4, side // 4, side * 3 // 4, side * 3 // 4)
    pen = ImageDraw.Draw(image)
    (pen.ellipse if shape == "disc" else pen.rectangle)(box, fill=colour)
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


class _Asker:
    """Sends questions in the form that the checkpoint takes and keeps a record of each."""

    def __init__(self, engine: EngineLike, info: EngineInfo, record: Recorder | None) -> None:
        self.engine = engine
        self.info = info
        self.processor = Processor.open(info.checkpoint)
        self.chat = has_chat_template(info.checkpoint)
        self._record = record

    def prompt(self, question: Question) -> str:
        """Without a chat template a picture needs its placeholder written out."""
        if self.chat or question.picture is None:
            return question.prompt
        return f"{self.processor.expansion.token}\n{question.prompt}"

    def ask(self, question: Question, **params: Any) -> Completion:
        pictures = [] if question.picture is None else [question.picture]
        settings = SamplingParams(**{"max_new_tokens": ANSWER_TOKENS, "logprobs": True, **params})
        answer = self.engine.complete(self.prompt(question), pictures, settings, self.chat)
        if self._record is not None:
            self._record(_event(question, answer))
        return answer

    def placeholders(self, question: Question) -> tuple[int, int]:
        """Placeholder tokens of a question's picture, and tokens of the whole prompt."""
        from firstlight.engine.inputs.pictures import open_picture

        assert question.picture is not None
        prepared = self.processor.prepare(self.prompt(question), [open_picture(question.picture)], self.chat)
        return sum(count for _, count in prepared.image_spans), int(prepared.input_ids.size)


def _event(question: Question, answer: Completion) -> RequestEvent:
    usage = answer.usage
    record = {"prompt": question.prompt, "picture": question.name, "answer": answer.text}
    numbers = {"seed": answer.seed, "number": usage.number}
    return RequestEvent(
        time_s=time.time(),
        name=question.name or question.prompt[:40],
        rung="infer",
        status=answer.finish,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        first_token_s=usage.first_token_s,
        total_s=usage.total_s,
        record=msgspec.json.encode(record | numbers).decode(),
    )


def _ask(asker: _Asker, question: Question) -> tuple[dict[str, Any], str, bool]:
    """The answer as a row, what is wrong with it, and whether that is the likeliest tokens' habit alone."""
    answer = asker.ask(question)
    logprob = _mean_logprob(answer)
    row = {
        "picture": question.name or None,
        "question": question.prompt,
        "answer": answer.text.strip(),
        "expected": question.expected,
        "finish": answer.finish,
        "tokens": answer.usage.completion_tokens,
        "mean_logprob": logprob,
        "first_token_s": answer.usage.first_token_s,
        "total_s": answer.usage.total_s,
    }
    problem = answers.problem(answer.text, answer.tokens, logprob) or ""
    return row, problem, bool(problem) and _circles(asker, question, answer)


def _circles(asker: _Asker, question: Question, answer: Completion) -> bool:
    """Whether the likeliest tokens run in circles and most drawn answers do not.

    Sound models do so under greedy decoding, the smaller the more (arXiv 1904.09751): one rounding decides whether a
    prompt ends there. Of broken weights no way of decoding gives sentences.
    """
    if answers.loop(answer.tokens) is None:
        return False
    drawn = [asker.ask(question, temperature=0.8, seed=SEED + number) for number in range(DRAWS)]
    sound = [one for one in drawn if answers.problem(one.text, one.tokens, _mean_logprob(one)) is None]
    return 2 * len(sound) > DRAWS


def _in_circles(question: Question, problem: str) -> Finding:
    return warning(
        "odd-answers",
        f"the likeliest tokens answer {question.prompt!r} with {problem}; drawn answers read well",
        expected="an answer that ends",
        found=problem,
        next="ask with a temperature; whether the numbers are right is for verify to say",
    )


def _mean_logprob(answer: Completion) -> float | None:
    if not answer.logprobs:
        return None
    return sum(one.logprob for one in answer.logprobs) / len(answer.logprobs)


def _expected(draft: Draft, rows: list[dict[str, Any]]) -> None:
    judged = [row for row in rows if row["expected"] is not None]
    if not judged:
        return
    right = [row for row in judged if _plain(row["answer"]) == _plain(row["expected"])]
    wrong = [
        f"{row['picture']}: {_brief(row['answer'])}, not {row['expected']!r}" for row in judged if row not in right
    ]
    draft.check(
        "answers are the expected ones",
        len(right) >= EXPECTED_SHARE * len(judged),
        value=len(right),
        limit=round(EXPECTED_SHARE * len(judged)),
        unit=f"of {len(judged)}",
        detail="; ".join(wrong[:3]),
    )


def _brief(text: str, most: int = 40) -> str:
    text = " ".join(text.split())
    return repr(text if len(text) <= most else text[:most] + "…")


def _plain(text: str) -> str:
    return " ".join(text.lower().replace(".", " ").split())


def _same_seed(draft: Draft, asker: _Asker, question: Question) -> None:
    """Sampled twice with one seed: the tokens must not depend on when or beside what they were drawn."""
    first, second = (asker.ask(question, temperature=0.8, seed=SEED).tokens for _ in range(2))
    same = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    differs = "" if first == second else f"differ from token {min(len(first), len(second)) if same is None else same}"
    draft.check("the same seed gives the same tokens", first == second, value=len(first), unit="tokens", detail=differs)


def _pictures(draft: Draft, asker: _Asker, questions: list[Question]) -> None:
    one, other = _pair(questions)
    filled, _ = asker.placeholders(one)
    answer = asker.ask(one, top_logprobs=5)
    _, whole = asker.placeholders(one)
    draft.check(
        "the picture fills its placeholders",
        filled > 0 and answer.usage.prompt_tokens == whole,
        value=filled,
        unit="tokens",
        detail=f"of a prompt of {answer.usage.prompt_tokens}; prepared apart: {whole}",
    )
    swapped = asker.ask(msgspec.structs.replace(one, picture=other.picture, name=other.name), top_logprobs=5)
    nats = _distance(answer, swapped)
    said = f"{one.name}: {_brief(answer.text)}; {other.name}: {_brief(swapped.text)}"
    changed = answer.tokens != swapped.tokens
    draft.check(
        "another picture gives another answer",
        changed or nats > SAME_DISTRIBUTION,
        value=nats,
        limit=None if changed else SAME_DISTRIBUTION,
        unit="nat",
        detail=said + ("" if changed else "; the same words, judged by their probabilities"),
    )


def _pair(questions: list[Question]) -> tuple[Question, Question]:
    """Two questions in the same words about different pictures, best with different answers."""
    for one in questions:
        for other in questions:
            if one.prompt == other.prompt and one.name != other.name and _differ(one, other):
                return one, other
    first, second = (Question(prompt=questions[0].prompt, picture=drawn(which), name=which) for which in DRAWN)
    return first, second


def _differ(one: Question, other: Question) -> bool:
    return one.expected is None or one.expected != other.expected


def _distance(one: Completion, other: Completion) -> float:
    """The largest difference of the log probabilities of the likeliest first tokens."""
    if not one.logprobs or not other.logprobs:
        return 0.0
    first, second = dict(one.logprobs[0].top), dict(other.logprobs[0].top)
    shared = set(first) & set(second)
    if not shared:
        return abs(next(iter(first.values()), 0.0) - min(second.values(), default=0.0))
    return max(abs(first[token] - second[token]) for token in shared)


def _figures(draft: Draft, rows: list[dict[str, Any]]) -> None:
    import statistics

    waits = [row["first_token_s"] for row in rows if row["first_token_s"] is not None]
    rates = [
        (row["tokens"] - 1) / (row["total_s"] - row["first_token_s"])
        for row in rows
        if row["tokens"] > 1 and row["total_s"] > row["first_token_s"]
    ]
    draft.metric("questions", len(rows), "questions", "greedy")
    draft.metric("first_token_s", statistics.median(waits) if waits else None, "s", "median over questions")
    draft.metric(
        "tokens_per_s", statistics.median(rates) if rates else None, "tokens/s", "median, one request at a time"
    )


def answer_lines(report: Report) -> Iterator[tuple[str, str, str, str]]:
    """Picture, question and answer of each question of an `infer` report, and what was expected where it differs."""
    for row in report.tables.get("answers", []):
        expected: str = row.get("expected") or ""
        differs = expected and _plain(row["answer"]) != _plain(expected)
        yield row.get("picture") or "", row["question"], row["answer"], expected if differs else ""
