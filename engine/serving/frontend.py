"""From what a client sends to requests the scheduler takes: tokenizer, chat template, pictures; read when first needed.

A checkpoint without a tokenizer still serves token ids.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

import msgspec
import numpy as np

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, fatal
from firstlight.engine.inputs import side_files
from firstlight.engine.inputs.detokenizer import Detokenizer
from firstlight.engine.inputs.generation_config import unmet
from firstlight.engine.inputs.messages import texts_of
from firstlight.engine.inputs.pictures import Picture, open_picture
from firstlight.engine.inputs.prepare import Prepared, Processor
from firstlight.engine.model.foreign import ForeignModel, ForeignSpec
from firstlight.engine.model.spec import ModelSpec, pictures_of_rows
from firstlight.engine.serving.api import EngineInfo, PictureSource, Prompt
from firstlight.engine.serving.request import MAX_TOP_LOGPROBS, Arrays, Request, SamplingParams, arrays_of
from firstlight.engine.serving.sight import is_marked
from firstlight.engine.serving.trace import TraceCommand, check_images, spans_of
from firstlight.engine.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from firstlight.engine.serving.boot import Rank

MOST_FREE_BYTES = 1 << 20  # of a prompt: tokenized whatever comes out, in less than some seconds


class Frontend:
    """The inputs of one checkpoint."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec, foreign: ForeignModel | None = None) -> None:
        self.checkpoint = checkpoint
        self.spec = spec
        self.foreign = foreign

    @cached_property
    def processor(self) -> Processor:
        """Tokenizer, chat template and image processor; raises `Refused` (missing-side-file) without a tokenizer."""
        return Processor.open(self.checkpoint.directory)

    @cached_property
    def has_tokenizer(self) -> bool:
        return "tokenizer.json" in self.checkpoint.side_files

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer; from the configuration where there is no tokenizer."""
        if self.has_tokenizer:
            return frozenset(self.processor.tokenizer.eos_ids)
        config = self.checkpoint.config
        found = config.get("eos_token_id", (config.get("text_config") or {}).get("eos_token_id"))
        if found is None:
            return frozenset()
        return frozenset(found) if isinstance(found, list) else frozenset((int(found),))

    @cached_property
    def unmet(self) -> tuple[Finding, ...]:
        """What generation_config.json asks for and answers do without."""
        path = Path(self.checkpoint.directory) / side_files.GENERATION_CONFIG
        try:
            return tuple(unmet(side_files.read_json_if_present(path) or {}))
        except Refused as refused:
            return tuple(msgspec.structs.replace(finding, severity="warning") for finding in refused.findings)

    @cached_property
    def _longest_token_bytes(self) -> int:
        return max((len(self.token_bytes(id_)) for id_ in range(self.spec.vocab_size)), default=1) or 1

    def refuse_endless(self, prompt: Prompt, max_context: int) -> None:
        """Refuses a text that no choice of tokens fits into the context, before the tokenizer spends minutes on it.

        A limit for tokenizers that shorten texts first, too: MOST_FREE_BYTES are always looked at.
        """
        _check_prompt(prompt)
        texts = (prompt,) if isinstance(prompt, str) else () if is_ids(prompt) else texts_of(prompt)  # type: ignore[arg-type]
        size = sum(len(text) for text in texts)  # characters: at least as many bytes
        if (
            size <= MOST_FREE_BYTES
            or not self.has_tokenizer
            or size <= (most := max_context * self._longest_token_bytes)
        ):
            return
        raise Refused(
            fatal(
                "context-too-long",
                f"a text of {size:,} characters cannot fit the context",
                expected=f"at most {most:,} bytes: {max_context:,} tokens of at most {most // max_context} bytes",
                found=f"{size:,} characters",
                next="shorten the prompt",
            )
        )

    def request(
        self,
        number: int,
        prompt: Prompt,
        pictures: Sequence[PictureSource],
        params: SamplingParams | None,
        chat: bool,
    ) -> Request:
        """A request for a text, token ids or messages; raises `Refused` with what cannot be used."""
        arrival_s = time.perf_counter()
        params = params or SamplingParams()
        _check_prompt(prompt)
        if is_ids(prompt):
            if pictures:
                raise _bad(
                    "pictures beside token ids", "a text or messages, which say where each picture belongs", "ids"
                )
            ids = tuple(int(id_) for id_ in prompt)
            self._check_ids(ids)
            return Request(number=number, prompt_ids=ids, params=params, arrival_s=arrival_s)
        if pictures and self.foreign is not None:
            return self._foreign(number, prompt, pictures, params, chat, arrival_s)
        prepared = self.prepare(prompt, pictures, chat)
        if (
            self.foreign is not None
        ):  # ours gives what is beyond the vocabulary no meaning; others read past their table
            self._check_ids(prepared.input_ids[0].tolist())
        images = {key: np.asarray(value) for key, value in prepared.tensors.items()}
        check_images(self.spec, images, sum(count for _, count in prepared.image_spans))
        return Request(
            number=number,
            prompt_ids=tuple(prepared.input_ids[0].tolist()),
            params=params,
            images=arrays_of(images),
            image_spans=prepared.image_spans,
            arrival_s=arrival_s,
        )

    def prepare(self, prompt: Prompt, pictures: Sequence[PictureSource] = (), chat: bool = True) -> Prepared:
        """The model's input for a text (one user turn if `chat`) or for messages with one image part per picture."""
        if pictures and self.spec.vision is None:
            raise Refused(
                fatal(
                    "bad-image",
                    f"{self.checkpoint.name} takes no pictures",
                    expected="text alone",
                    found=f"{len(pictures)} pictures",
                    next="leave the pictures out, or serve a model that sees",
                )
            )
        opened = [picture if isinstance(picture, Picture) else open_picture(picture) for picture in pictures]
        if isinstance(prompt, str):
            return self.processor.prepare(prompt, opened, chat)
        return self.processor.prepare_messages(prompt, opened)  # type: ignore[arg-type]

    def _foreign(
        self,
        number: int,
        prompt: Prompt,
        pictures: Sequence[PictureSource],
        params: SamplingParams,
        chat: bool,
        arrival_s: float,
    ) -> Request:
        """A request with pictures that only the vendor's own processor understands."""
        assert self.foreign is not None
        opened = [picture if isinstance(picture, Picture) else open_picture(picture) for picture in pictures]
        ids, images = self.foreign.prepare(prompt, opened, chat)  # type: ignore[arg-type]
        return Request(
            number=number, prompt_ids=tuple(ids), params=params, images=arrays_of(images), arrival_s=arrival_s
        )

    def token_bytes(self, id_: int) -> bytes:
        """The bytes of a token; none without a tokenizer."""
        return self.processor.tokenizer.token_bytes(id_) if self.has_tokenizer else b""

    def detokenizer(self, request: Request) -> Detokenizer:
        return Detokenizer(self.processor.tokenizer, request.prompt_ids, request.params.stop)

    def bare(self, number: int, ids: Sequence[int], images: Arrays | None = None, steps: int = 1) -> Request:
        """A greedy request for token ids whose placeholders the images fill, `steps` tokens long whatever comes."""
        vision = self.spec.vision
        return Request(
            number=number,
            prompt_ids=tuple(ids),
            params=SamplingParams(max_new_tokens=steps, ignore_eos=True, seed=0),
            images=images or {},
            image_spans=spans_of(ids, vision.image_token_id) if vision is not None and images else (),
            arrival_s=time.perf_counter(),
        )

    def blank_picture(self) -> tuple[list[int], Arrays]:
        """Token ids and tensors of one black picture, for the first image of a start."""
        vision = self.spec.vision
        assert vision is not None
        tensors = vision.blank()
        return [vision.image_token_id] * sum(vision.counts(tensors)) + [0], arrays_of(tensors)

    def greedy(self, command: TraceCommand, steps: int, numbers: Iterator[int]) -> tuple[Request, ...]:
        """One greedy request for each row of a traced batch, with the pictures that belong to it, and its chances."""
        ids, mask = command.input_ids.numpy(), command.attention_mask.numpy()
        vision = self.spec.vision
        rows = [[int(id_) for id_ in row[real == 1]] for row, real in zip(ids, mask, strict=True)]
        own: list[Arrays] = [{} for _ in rows]
        if vision is not None and command.images:
            tensors = {name: array.numpy() for name, array in command.images.items()}
            placeholders = [row.count(vision.image_token_id) for row in rows]
            for index, (first, count) in enumerate(pictures_of_rows(vision.counts(tensors), placeholders)):
                own[index] = arrays_of(vision.share(tensors, first, count)) if count else {}
                if count and not is_marked(tensors):
                    own[index]["token_type_ids"] = command.images["token_type_ids"]
        bare = [self.bare(next(numbers), row, images, steps) for row, images in zip(rows, own, strict=True)]
        params = msgspec.structs.replace(bare[0].params, logprobs=True, top_logprobs=MAX_TOP_LOGPROBS)
        return tuple(msgspec.structs.replace(request, params=params) for request in bare)

    def info(self, rank: Rank) -> EngineInfo:
        """What runs, for reports."""
        return EngineInfo(
            model=self.checkpoint.name,
            checkpoint=self.checkpoint.directory,
            family=self.spec.family,
            mesh=rank.mesh,
            device=str(rank.device),
            dtype=rank.dtype,
            max_context=rank.limits.max_context,
            max_batch=rank.limits.max_batch,
            page_size=rank.limits.page_size,
            num_pages=rank.limits.num_pages,
            vocab_size=self.spec.vocab_size,
            num_layers=self.spec.num_layers,
            hidden=self.spec.hidden,
            sees=self.spec.vision is not None,
            operators=self._operators(rank),
            findings=(*rank.findings, *self.unmet),
            load_s=rank.weights.read_s,
            load_bytes=rank.weights.bytes_read,
        )

    def _operators(self, rank: Rank) -> tuple[tuple[str, str, bool, str], ...]:
        """The choice of operators; a foreign model calls none but the last."""
        rows = tuple((row.operator, row.implementation, row.chosen, row.reason) for row in rank.ops.report())
        if not isinstance(self.spec, ForeignSpec):
            return rows
        return tuple(row for row in rows if row[0] == "sample")

    def _check_ids(self, ids: Iterable[int]) -> None:
        wrong = [id_ for id_ in ids if not 0 <= id_ < self.spec.vocab_size]
        if wrong:
            raise Refused(
                fatal(
                    "bad-request",
                    "the prompt has token ids that the vocabulary does not",
                    expected=f"0 to {self.spec.vocab_size - 1}",
                    found=str(wrong[0]),
                    next="tokenize with the checkpoint's own tokenizer",
                )
            )


def is_ids(prompt: Prompt) -> TypeGuard[Sequence[int]]:
    """Whether a prompt is token ids rather than text or messages."""
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], int)


def _check_prompt(prompt: Prompt) -> None:
    """Refuses a list that is neither token ids nor messages: what follows looks at its first item alone."""
    if isinstance(prompt, str):
        return
    expected = "a text, token ids, or messages with role and content"
    if len(prompt) == 0:
        raise _bad("prompt", expected, "an empty list")
    wanted = int if isinstance(prompt[0], int) else Mapping
    other = next((part for part in prompt if not isinstance(part, wanted)), None)
    if other is not None:
        raise _bad("prompt", expected, f"a list of {type(prompt[0]).__name__} with {type(other).__name__} in it")


def _bad(what: str, expected: str, found: str) -> Refused:
    message = f"{what} cannot be used"
    return Refused(fatal("bad-request", message, expected=expected, found=found, next="correct the request"))
