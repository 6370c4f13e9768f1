"""One answer to a prompt and pictures: the text as it comes, and a report of what went in, what came out and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from firstlight.engine.errors import Refused
from firstlight.engine.inputs import side_files
from firstlight.engine.serving.api import EngineLike
from firstlight.engine.serving.request import Delta, SamplingParams
from firstlight.engine.serving.stream import EngineFailed
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.workbench.inputs_report import add_inputs
from firstlight.workbench.report import Draft, Report
from firstlight.workbench.residency import add_residency
from firstlight.workbench.side_files import has_chat_template

if TYPE_CHECKING:
    from firstlight.engine.inputs.prepare import Prepared

Told = Callable[[str], None]


def generate(
    engine: EngineLike,
    prompt: str,
    images: Sequence[str | Path | bytes] = (),
    params: SamplingParams | None = None,
    *,
    chat: bool | None = None,
    tell: Told | None = None,
    since_start_s: Callable[[], float] | None = None,
) -> Report:
    """Asks an engine once. `tell` gets each piece of text as it comes.

    `chat` None: the prompt is one user turn where the checkpoint has a chat template, else the text as it is.
    `since_start_s`: a clock whose value at the first token is reported. Raises `Refused`, or `EngineFailed`.
    """
    info = engine.info()
    draft = Draft("generate", info.model)
    chat = has_chat_template(info.checkpoint) if chat is None else chat
    text, first_s = "", None
    tokens: list[int] = []
    last: Delta | None = None
    for delta in engine.generate(prompt, images, params, chat):
        if first_s is None and since_start_s is not None and delta.tokens:
            first_s = since_start_s()
        text += delta.text
        tokens.extend(delta.tokens)
        last = delta
        if tell is not None and delta.text:
            tell(delta.text)
    if last is None or last.finish == "error":
        raise EngineFailed((last and last.error) or "the engine gave no answer")
    draft.find(finding for finding in info.findings if finding.code == "generation-default")
    _figures(draft, last, len(tokens), first_s)
    draft.table("answer", [{"text": text, "finish": last.finish, "seed": last.seed, "token_ids": tokens}])
    add_residency(draft, engine.memory())
    add_inputs(draft, prepare(info.checkpoint, prompt, images, chat))
    return draft.close()


def refuse_early(checkpoint: str, prompt: str, images: Sequence[str | Path | bytes], chat: bool | None) -> None:
    """Refuses, before an engine is started, what it would refuse later: broken files, no tokenizer, a bad picture."""
    Checkpoint.open(checkpoint).refuse_if_broken()
    directory = Path(checkpoint)
    if images:
        prepare(checkpoint, prompt, images, has_chat_template(directory) if chat is None else chat)
    elif not (directory / side_files.TOKENIZER).is_file():
        raise Refused(side_files.missing(directory / side_files.TOKENIZER, "text cannot be turned into token ids"))


def prepare(checkpoint: str, prompt: str, images: Sequence[str | Path | bytes], chat: bool) -> Prepared:
    """What the prompt and the pictures are for the model, with the record of how they came to be so."""
    from firstlight.engine.inputs.pictures import open_picture
    from firstlight.engine.inputs.prepare import Processor

    return Processor.open(checkpoint).prepare(prompt, [open_picture(image) for image in images], chat)


def _figures(draft: Draft, last: Delta, count: int, since_start_s: float | None) -> None:
    usage = last.usage
    assert usage is not None
    draft.metric("prompt_tokens", usage.prompt_tokens, "tokens")
    draft.metric("completion_tokens", usage.completion_tokens, "tokens", f"ended by {last.finish}")
    draft.metric("first_token_s", usage.first_token_s, "s", "from the request")
    if since_start_s is not None:
        draft.metric("first_token_since_start_s", since_start_s, "s", "from the start of the process")
    draft.metric("total_s", usage.total_s, "s")
    rate, why = None, "needs two tokens"
    if usage.first_token_s is not None and usage.total_s is not None and count > 1:
        rate, why = (count - 1) / max(usage.total_s - usage.first_token_s, 1e-9), "after the first"
    draft.metric("tokens_per_s", rate, "tokens/s", why)
    if last.seed is not None:
        draft.metric("seed", last.seed, "seed")
