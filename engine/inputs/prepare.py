"""Turns a prompt and pictures into token ids and pixel tensors, as the vendor's processor does.

Legend: T tokens, P pictures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, fatal, note, warning
from firstlight.engine.inputs import side_files
from firstlight.engine.inputs.chat_template import ChatTemplate, Message
from firstlight.engine.inputs.expansions import EXPANSIONS, processor_class, read_expansion
from firstlight.engine.inputs.image_constants import Constant
from firstlight.engine.inputs.image_processor import ImageProcessor
from firstlight.engine.inputs.messages import refuse_lost, refuse_unread, texts_of, user_turn, with_plain_text
from firstlight.engine.inputs.pictures import Picture, PictureRecord
from firstlight.engine.inputs.placeholders import Expansion
from firstlight.engine.inputs.tokenizer import Tokenizer
from firstlight.engine.weights.files.safetensors_file import Tensor, bfloat16

Span = tuple[int, int]


class PreparedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How an input was made: classes and files, constants with their sources, pictures, and findings."""

    tokenizer_class: str
    tokenizer_file: str
    chat_template_file: str | None = None
    processor_class: str | None = None
    image_processor_class: str | None = None
    constants: tuple[Constant, ...] = ()
    pictures: tuple[PictureRecord, ...] = ()
    tokens_per_picture: tuple[int, ...] = ()
    findings: tuple[Finding, ...] = ()


class Prepared(msgspec.Struct, frozen=True, eq=False):
    """One input of a model.

    `input_ids` and `attention_mask` (all ones): [1, T] int64. `tensors`: the image tensors under the vendor's names and
    dtypes; those in `tags` hold, in float32, the values of a dtype that numpy lacks. `type_ids`: what marks the tokens
    of pictures, [1, T] int64, where the vendor's processor gives it. `picture_spans`: (start, count) of each run of
    tokens that features fill, for each picture; a picture whose rows or tiles are kept apart has several. `text`: the
    prompt after the chat template, placeholders not expanded.
    """

    input_ids: NDArray[np.int64]
    attention_mask: NDArray[np.int64]
    tensors: Mapping[str, NDArray[Any]]
    picture_spans: tuple[tuple[Span, ...], ...]
    text: str
    record: PreparedRecord
    type_ids: Mapping[str, NDArray[np.int64]] = {}
    tags: Mapping[str, str] = {}

    @property
    def image_spans(self) -> tuple[Span, ...]:
        """The runs of all pictures, in order."""
        return tuple(span for spans in self.picture_spans for span in spans)

    def arrays(self) -> dict[str, Tensor]:
        """All tensors to be saved, under the vendor's names and in the vendor's dtypes."""
        images = {n: bfloat16(a) if self.tags.get(n) == "BF16" else a for n, a in self.tensors.items()}
        return {"input_ids": self.input_ids, "attention_mask": self.attention_mask, **self.type_ids, **images}


class _Filled(msgspec.Struct, frozen=True, eq=False):
    """A prompt with its placeholders expanded (`counts` tokens for each picture), and the picture tensors."""

    text: str
    tensors: Mapping[str, NDArray[Any]] = {}
    counts: tuple[int, ...] = ()
    constants: tuple[Constant, ...] = ()
    findings: tuple[Finding, ...] = ()


class Processor:
    """The tokenizer, chat template and image processor of a checkpoint, read once for any number of prompts.

    Chat template and image processor are read when first needed, so that a checkpoint without them can still be used
    for prompts that need neither.
    """

    def __init__(self, directory: Path, tokenizer: Tokenizer) -> None:
        self.directory = directory
        self.tokenizer = tokenizer
        self.class_name, self._class_file = processor_class(directory)
        config = side_files.read_json_if_present(directory / side_files.CONFIG) or {}
        self.takes_pictures = self.class_name is not None or "vision_config" in config

    @classmethod
    def open(cls, directory: str | Path) -> Self:
        """The processor of a checkpoint directory; raises `Refused` (missing-side-file) without a tokenizer."""
        return cls(Path(directory), Tokenizer.open(directory))

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The checkpoint's chat template; raises `Refused` where it has none."""
        return ChatTemplate.open(self.directory, self.tokenizer.special_tokens, processor=self.takes_pictures)

    @cached_property
    def image_processor(self) -> ImageProcessor:
        """The checkpoint's image processor; raises `Refused` where its constants are in no file."""
        return ImageProcessor.open(self.directory, self.expansion.overrides, f"set by {self.expansion.class_name}")

    @cached_property
    def expansion(self) -> Expansion:
        """How pictures are written into a prompt; raises `Refused` where that is not known."""
        return read_expansion(self.directory, self.tokenizer)

    @cached_property
    def _known_expansion(self) -> Expansion | None:
        """The same, or None if it is unknown: a prompt without pictures does not need it."""
        try:
            return self.expansion
        except Refused:
            return None

    def prepare(self, prompt: str, pictures: Sequence[Picture] = (), chat: bool = False) -> Prepared:
        """A prompt's input. `chat`: the prompt is one user turn, pictures first, in the checkpoint's chat template;
        otherwise it is the whole text, with a placeholder where each picture belongs.

        Raises `Refused`: bad-request where placeholders and pictures differ in number, bad-image, missing-side-file.
        """
        if not chat:
            placeholder = self.expansion.token if pictures else None
            spelled = tuple(t for t in self.tokenizer.special_tokens_in(prompt) if t != placeholder)
            findings = [_spelled(spelled, note, "the text is given whole")] if spelled else []
            return self._prepare(prompt, pictures, add_special_tokens=True, findings=findings)
        parts = self.takes_pictures if pictures else self.takes_pictures and self.chat_template.takes_parts
        if not self.takes_pictures and not self.chat_template.takes_text:
            parts = True
        return self.prepare_messages([user_turn(prompt, len(pictures), parts)], pictures)

    def prepare_messages(
        self, messages: Sequence[Message], pictures: Sequence[Picture] = (), **variables: Any
    ) -> Prepared:
        """A conversation's input, in the checkpoint's chat template with its generation prompt.

        `messages`: role and content; content is a text or parts ({"type": "text", "text": ...}, {"type": "image"}), one
        image part for each picture in order. Text parts become one text where the template takes only texts.
        `variables` are the template's own (tools, enable_thinking, ...). Raises `Refused` as `prepare` does.
        """
        if pictures:
            _ = self.expansion  # refused here, before a template that knows no pictures fails on them
        elif not self.chat_template.takes_parts:
            messages = with_plain_text(messages)
        refuse_unread(messages, self.chat_template.source)
        spelled = tuple(dict.fromkeys(t for text in texts_of(messages) for t in self.tokenizer.special_tokens_in(text)))
        findings = [_spelled(spelled, warning, "the model takes it for its own")] if spelled else []
        text = self.chat_template.render(messages, add_generation_prompt=True, **variables)
        refuse_lost(messages, text)
        # A tokenizer alone adds nothing to a template's text; a processor does, unless the template began as it would.
        bos = self.tokenizer.special_tokens.get("bos_token")
        add_special_tokens = self.class_name is not None and not (bos is not None and text.startswith(bos))
        return self._prepare(text, pictures, add_special_tokens, findings, self.chat_template.file)

    def _prepare(
        self,
        text: str,
        pictures: Sequence[Picture],
        add_special_tokens: bool,
        findings: list[Finding],
        template_file: Path | None = None,
    ) -> Prepared:
        filled = self._filled(text, pictures)
        ids = self.tokenizer.encode(filled.text, add_special_tokens)
        spans = self._spans(ids, filled.counts) if filled.counts else ()
        if not ids:
            raise Refused(
                fatal(
                    "bad-request",
                    "the prompt has no tokens",
                    expected="at least one token",
                    found=repr(text),
                    next="give a text",
                )
            )
        record = PreparedRecord(
            tokenizer_class=self.tokenizer.class_name,
            tokenizer_file=str(self.tokenizer.file),
            chat_template_file=str(template_file) if template_file else None,
            processor_class=self.class_name,
            image_processor_class=self.image_processor.constants.class_name if pictures else None,
            constants=filled.constants,
            pictures=tuple(picture.record for picture in pictures),
            tokens_per_picture=filled.counts,
            findings=(*self.tokenizer.findings, *findings, *filled.findings),
        )
        ids_1T = np.array([ids], dtype=np.int64)
        return Prepared(
            input_ids=ids_1T,
            attention_mask=np.ones_like(ids_1T),
            tensors=filled.tensors,
            picture_spans=spans,
            text=text,
            record=record,
            type_ids=self._type_ids(ids_1T),
            tags=self.image_processor.constants.kind.tags if pictures else {},
        )

    def _filled(self, text: str, pictures: Sequence[Picture]) -> _Filled:
        """The text with its placeholders expanded, and the picture tensors; unchanged if it has no placeholder."""
        if not pictures and not self._has_placeholder(text):
            is_unknown = self.class_name is not None and not self._is_known()
            return _Filled(text, findings=(self._unknown_class(),) if is_unknown else ())
        self._check_placeholders(text, len(pictures))
        tensors = self.image_processor.process(pictures)
        self._check_tensors(tensors)
        written = self.expansion.write(tensors, self.image_processor.constants)
        counts = tuple(part.count(self.expansion.fill) for part in written)
        self._check_counts(pictures, counts)
        return _Filled(
            text=_expand(text, self.expansion.token, written),
            tensors={name: array for name, array in tensors.items() if name not in self.expansion.hidden},
            counts=counts,
            constants=(*self.image_processor.constants.constants, *self.expansion.constants),
            findings=(*self.image_processor.constants.findings, *self._colour_findings(pictures)),
        )

    def _type_ids(self, ids_1T: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
        expansion = self._known_expansion
        if expansion is None or expansion.type_ids is None:
            return {}
        return {expansion.type_ids: (ids_1T == expansion.fill_id).astype(np.int64)}

    def _is_known(self) -> bool:
        return self.class_name in EXPANSIONS

    def _unknown_class(self) -> Finding:
        return warning(
            "unsupported-block",
            f"processor {self.class_name} is not known: the text was only tokenized",
            file=str(self._class_file),
            next="nothing for text; for pictures, add the class to engine/inputs/expansions.py",
        )

    def _has_placeholder(self, text: str) -> bool:
        return self._known_expansion is not None and self._known_expansion.token in text

    def _check_placeholders(self, text: str, num_pictures: int) -> None:
        token = self.expansion.token
        found = text.count(token)
        if found != num_pictures:
            raise Refused(
                fatal(
                    "bad-request",
                    f"{num_pictures} pictures, but the prompt has {found} placeholders {token}",
                    expected=f"{num_pictures} placeholders {token}",
                    found=str(found),
                    next=f"write {token} where each picture belongs, or ask as a conversation, whose template places it"
                    if found < num_pictures
                    else f"give a picture for each {token}, or take {token} out of the text",
                )
            )

    def _check_tensors(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Refuses an image processor whose tensors are not those that the processor class counts."""
        reads = self.expansion.reads
        lacking = [name for name, dims in reads.items() if name not in tensors or tensors[name].ndim != dims]
        if lacking:
            self._refuse_processors(
                ", ".join(f"{name} with {reads[name]} dimensions" for name in lacking),
                ", ".join(f"{name} with {array.ndim}" for name, array in tensors.items()),
            )

    def _refuse_processors(self, expected: str, found: str) -> NoReturn:
        constants = self.image_processor.constants
        raise Refused(
            fatal(
                "conflicting-flag",
                f"{constants.class_name} does not make the tensors that {self.expansion.class_name} needs",
                file=constants.file,
                expected=expected,
                found=found,
                next="fetch the processor files of one release: processor_class and image_processor_type disagree",
            )
        )

    def _check_counts(self, pictures: Sequence[Picture], counts: Sequence[int]) -> None:
        if len(counts) != len(pictures):
            self._refuse_processors(f"tensors of {len(pictures)} pictures", f"tensors of {len(counts)}")
        for picture, count in zip(pictures, counts, strict=True):
            if count < 1:
                raise Refused(
                    fatal(
                        "bad-image",
                        "the picture would get no tokens",
                        file=picture.record.source,
                        expected="at least one placeholder token",
                        found=f"{count} for {picture.image.size[0]} x {picture.image.size[1]} pixels",
                        next="send a larger picture",
                    )
                )

    def _colour_findings(self, pictures: Sequence[Picture]) -> list[Finding]:
        constants = self.image_processor.constants
        if constants["do_convert_rgb"] or all(picture.record.mode == "RGB" for picture in pictures):
            return []
        return [
            note("class-default", "do_convert_rgb is off; pictures are converted to RGB anyway", file=constants.file)
        ]

    def _spans(self, ids: Sequence[int], counts: Sequence[int]) -> tuple[tuple[Span, ...], ...]:
        """The runs of tokens of each picture; raises `Refused` if the tokenizer split the placeholder token."""
        positions = [index for index, id_ in enumerate(ids) if id_ == self.expansion.fill_id]
        is_token = self.tokenizer.encode(self.expansion.fill, add_special_tokens=False) == [self.expansion.fill_id]
        if not is_token or len(positions) != sum(counts):
            self._refuse_placeholder(len(positions), sum(counts))
        spans, used = [], 0
        for count in counts:
            spans.append(tuple(_runs(positions[used : used + count])))
            used += count
        return tuple(spans)

    def _refuse_placeholder(self, found: int, expected: int) -> NoReturn:
        fill = self.expansion.fill
        raise Refused(
            fatal(
                "side-file-invalid",
                f"the tokenizer does not keep {fill} as one token",
                file=str(self.tokenizer.file),
                expected=f"{expected} times id {self.expansion.fill_id}",
                found=f"{found} times",
                next=f"{fill} must be an added token of tokenizer.json",
            )
        )


def prepare(
    directory: str | Path, prompt: str | Sequence[Message], pictures: Sequence[Picture] = (), chat: bool = False
) -> Prepared:
    """One prompt's or conversation's input; for more than one keep a `Processor`. Raises `Refused`."""
    processor = Processor.open(directory)
    if isinstance(prompt, str):
        return processor.prepare(prompt, pictures, chat)
    return processor.prepare_messages(prompt, pictures)


def _expand(text: str, token: str, written: Sequence[str]) -> str:
    pieces = text.split(token)
    return pieces[0] + "".join(part + piece for part, piece in zip(written, pieces[1:], strict=True))


def _runs(positions: Sequence[int]) -> Iterator[Span]:
    """Runs of neighbouring positions, as (start, count)."""
    start = 0
    for index in range(1, len(positions) + 1):
        if index == len(positions) or positions[index] != positions[index - 1] + 1:
            yield positions[start], index - start
            start = index


def _spelled(tokens: Sequence[str], kind: Any, consequence: str) -> Finding:
    finding: Finding = kind(
        "control-token",
        f"the prompt contains control tokens: {', '.join(tokens)}; {consequence}",
        expected="text without control tokens",
        found=", ".join(tokens),
        next="nothing if they are meant; otherwise take them out of the text",
    )
    return finding
