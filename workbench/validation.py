"""The validation set: prompts of several lengths, pictures of several sizes, greedy and drawn, asked in batches.

Its answers are what the next bring-up of the model is compared with: on other hardware, of the next release, after a
change. They are kept in the run's report and in adaptation.yaml.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from typing import Any

import msgspec
import yaml

from firstlight.engine.serving.api import EngineInfo, EngineLike
from firstlight.engine.serving.request import Completion, SamplingParams
from firstlight.workbench.progress import Progress
from firstlight.workbench.report import Draft, Report
from firstlight.workbench.side_files import has_chat_template

AT_ONCE = 8
SAME_SHARE = 0.8  # of greedy answers that must begin alike on other hardware or in another dtype


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One question of the set; `size` (width, height) asks about a picture made for it."""

    name: str
    prompt: str
    size: tuple[int, int] | None = None
    temperature: float = 0.0
    seed: int = 0
    tokens: int = 24


def items(info: EngineInfo) -> list[Item]:
    """The questions of data/validation.yaml that the model can be asked: pictures only if it sees, what fits only."""
    text = (resources.files("firstlight.data") / "validation.yaml").read_text(encoding="utf-8")
    found = []
    for entry in yaml.safe_load(text):
        repeated = entry.pop("repeat", 1)
        entry["prompt"] = " ".join([entry["prompt"]] * repeated)
        item = msgspec.convert(entry, Item)
        fits = len(item.prompt) // 2 + item.tokens < info.max_context  # two letters a token is a dense text
        if fits and (item.size is None or info.sees):
            found.append(item)
    return found


def validate(
    engine: EngineLike, accepted: Sequence[Mapping[str, Any]] | None = None, *, progress: Progress | None = None
) -> Report:
    """Asks the set, several at once, and compares with `accepted`: rows of an earlier run's table `validation`."""
    info = engine.info()
    progress = progress or Progress("validate")
    draft = Draft("validate", f"{info.model}, {info.mesh.describe()}, {info.dtype} on {info.device}")
    asked = items(info)
    done, chat = 0, has_chat_template(info.checkpoint)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = []
        for answer in pool.map(lambda item: _ask(engine, item, chat), asked):
            done += 1
            progress("ask", done, len(asked), "questions")
            answers.append(answer)
    rows = [_row(item, answer) for item, answer in zip(asked, answers, strict=True)]
    empty = [row["name"] for row in rows if not row["tokens"]]
    draft.check(
        "every question is answered", not empty, value=len(empty), limit=0, unit="answers", detail=", ".join(empty[:5])
    )
    if accepted is None:
        draft.check("answers are those of the accepted run", None, detail="there is no accepted run to compare with")
    else:
        _compare(draft, rows, accepted, info)
    draft.metric("questions", len(rows), "questions")
    draft.table("validation", rows)
    return draft.close()


def _ask(engine: EngineLike, item: Item, chat: bool) -> Completion:
    params = SamplingParams(max_new_tokens=item.tokens, temperature=item.temperature, seed=item.seed)
    pictures = [picture(item.size)] if item.size is not None else []
    return engine.complete(item.prompt, pictures, params, chat)


def picture(size: tuple[int, int]) -> bytes:
    """A PNG of that size, the same everywhere: a gradient with a disc and a bar in it."""
    from PIL import Image, ImageDraw

    width, height = size
    image = Image.linear_gradient("L").resize(size).convert("RGB")
    draw = ImageDraw.Draw(image)
    draw.ellipse((width // 6, height // 6, width // 2, height // 2), fill=(200, 40, 40))
    draw.rectangle((width // 2, height // 2, width - width // 8, height - height // 6), fill=(40, 80, 200))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def _row(item: Item, answer: Completion) -> dict[str, Any]:
    return {
        "name": item.name,
        "prompt": item.prompt if len(item.prompt) <= 80 else item.prompt[:77] + "...",
        "picture": "" if item.size is None else f"{item.size[0]} x {item.size[1]}",
        "temperature": item.temperature,
        "answer": answer.text,
        "finish": answer.finish,
        "tokens": list(answer.tokens),
        "digest": hashlib.sha256(",".join(map(str, answer.tokens)).encode()).hexdigest()[:16],
    }


def _compare(draft: Draft, rows: list[dict[str, Any]], accepted: Sequence[Mapping[str, Any]], info: EngineInfo) -> None:
    """Greedy answers must mostly begin alike; drawn ones are shown, since one rounding may lead them elsewhere."""
    before = {str(row["name"]): row for row in accepted}
    found = list(_pairs(rows, before))
    greedy = [row for row in found if not row["drawn"]]
    alike = [row for row in greedy if row["same_tokens"] >= min(8, row["of_tokens"])]
    share = len(alike) / len(greedy) if greedy else 1.0
    draft.check(
        "greedy answers begin as those of the accepted run",
        bool(greedy) and share >= SAME_SHARE,
        value=100.0 * share,
        limit=100.0 * SAME_SHARE,
        unit="%",
        detail=f"{len(alike)} of {len(greedy)}; the first 8 tokens of each" if greedy else "nothing to compare",
    )
    draft.table("compared", found)


def _pairs(rows: list[dict[str, Any]], before: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        old = before.get(row["name"])
        if old is None:
            continue
        theirs, ours = list(old.get("tokens", ())), row["tokens"]
        pairs = enumerate(zip(theirs, ours, strict=False))
        same = next((index for index, (a, b) in pairs if a != b), min(len(theirs), len(ours)))
        yield {
            "name": row["name"],
            "same_tokens": same,
            "of_tokens": len(theirs),
            "drawn": row["temperature"] > 0,
            "accepted": old.get("answer", ""),
            "now": row["answer"],
        }
