"""Whether the files beside the weights agree with each other, with config.json and with the shapes. No torch.

A checkpoint whose files come from two revisions loads and answers, only otherwise than the vendor's. Each
disagreement that changes prompts, pictures or where an answer ends is named here. Files are read with bounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, note, several, warning
from firstlight.engine.inputs import side_files
from firstlight.engine.inputs.generation_config import unmet
from firstlight.engine.inputs.side_files import nested
from firstlight.engine.weights.files.json_text import keys_twice
from firstlight.workbench.scan_marks import SPECIAL_TOKENS, Tokens, clash, integer, stated, unlike_marks

TEMPLATE = "chat_template.jinja"
MEDIA_KEYS = (
    "image_token_id",
    "image_token_index",
    "video_token_id",
    "video_token_index",
    "media_placeholder_token_id",
)


class _Added(msgspec.Struct):
    id: int
    content: str


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = msgspec.field(default_factory=dict)


class _Tokenizer(msgspec.Struct):
    model: _Vocabulary = msgspec.field(default_factory=_Vocabulary)
    added_tokens: list[_Added] = msgspec.field(default_factory=list)
    post_processor: Any = None


class _Reader:
    """Side files of a directory; one that is broken is a finding and counts as absent."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.findings: list[Finding] = []

    def json(self, name: str) -> dict[str, Any]:
        path = self.directory / name
        try:
            found = side_files.read_json_if_present(path) or {}
            if found and (twice := keys_twice(side_files.read_bytes(path), found)):
                self.findings.append(_stated_twice(name, twice))
            return found
        except Refused as refused:
            self.findings.extend(_softened(finding, name) for finding in refused.findings)
            return {}

    def text(self, name: str) -> str | None:
        path = self.directory / name
        try:
            return side_files.read_text(path) if path.is_file() else None
        except Refused as refused:
            self.findings.extend(_softened(finding, name) for finding in refused.findings)
            return None

    def tokens(self) -> Tokens | None:
        name = side_files.TOKENIZER
        path = self.directory / name
        if not path.is_file():
            return None
        try:
            found = msgspec.json.decode(side_files.read_bytes(path), type=_Tokenizer)
        except Refused as refused:
            self.findings.extend(_softened(finding, name) for finding in refused.findings)
            return None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self.findings.append(
                warning(
                    "side-file-invalid",
                    f"{name} is no tokenizer: {error}",
                    file=name,
                    expected="JSON with a model, its vocab and added_tokens",
                    found=_start(path),
                    next=f"fetch {name} from the model's release again",
                )
            )
            return None
        if not found.model.vocab and not found.added_tokens:
            self.findings.append(
                warning(
                    "side-file-invalid",
                    f"{name} is no tokenizer: it has no vocabulary",
                    file=name,
                    expected="JSON with a model, its vocab and added_tokens",
                    found=_start(path),
                    next=f"fetch {name} from the model's release again",
                )
            )
            return None
        vocab = found.model.vocab
        texts = vocab if isinstance(vocab, dict) else {}
        ids = frozenset(texts.values()) if texts else frozenset(range(len(vocab)))
        added = {token.content: token.id for token in found.added_tokens}
        return Tokens(ids | frozenset(added.values()), added, texts, found.post_processor)


def _stated_twice(name: str, keys: tuple[str, ...]) -> Finding:
    return clash(
        name,
        f"{name} states {', '.join(keys[:4])} twice with different values; the last counts",
        "every key once",
        f"{len(keys):,} key{'' if len(keys) == 1 else 's'} with two values",
        f"fetch {name} from the model's release again, or remove the value that is wrong",
    )


def _start(path: Path) -> str:
    with path.open("rb") as stream:
        start = stream.read(40)
    return "a Git LFS pointer" if start.startswith(b"version https") else repr(start)


def _softened(finding: Finding, name: str) -> Finding:
    """What forbids the verbs that need the file is a warning for the ones that do not."""
    return msgspec.structs.replace(
        finding,
        severity="warning",
        file=name,
        found=finding.found or "a file that cannot be used",
        expected=finding.expected or f"{name} as released",
        next=finding.next or f"fetch {name} from the model's release again",
    )


def disagreements(directory: Path, config: Mapping[str, Any], rows: int | None) -> tuple[Finding, ...]:
    """What side files say differently; `rows`: of the token embedding, as the headers have it, if that is known."""
    reader = _Reader(directory)
    tokens = reader.tokens()
    options = reader.json(side_files.TOKENIZER_CONFIG)
    generation = reader.json(side_files.GENERATION_CONFIG)
    rows = rows or integer(stated(config, "vocab_size"))
    found: list[Finding] = []
    if tokens is not None:
        found.extend(_vocabulary(tokens, rows))
        found.extend(_media(tokens, config, reader.json(side_files.PROCESSOR_CONFIG)))
    elif rows is not None:
        found.extend(_media_beyond(config, rows))
    found.extend(unlike_marks(tokens, config, generation, options, reader.json(SPECIAL_TOKENS), rows))
    found.extend(unmet(generation))
    found.extend(_templates(reader, options))
    found.extend(_pictures(reader, config))
    return (*reader.findings, *found)


def _vocabulary(tokens: Tokens, rows: int | None) -> Iterator[Finding]:
    if rows is None:
        return
    beyond = sorted(id_ for id_ in tokens.ids if id_ >= rows)
    if beyond:
        name = next((text for text, id_ in (tokens.added | tokens.texts).items() if id_ == beyond[0]), "")
        yield clash(
            side_files.TOKENIZER,
            f"{several(len(beyond), 'token has', 'tokens have')} no row in the embedding, {name!r} ({beyond[0]:,}) "
            "first",
            f"ids below {rows:,}",
            f"ids up to {tokens.highest:,}",
            "fetch tokenizer and weights of one release; prompts with these tokens are refused",
        )
    elif tokens.highest + 1 < rows:
        yield note(
            "padded-tensor",
            f"the embedding has {rows:,} rows, the tokenizer {tokens.highest + 1:,} ids: the last rows have no token",
            file=side_files.TOKENIZER,
            expected=f"at most {rows:,} ids",
            found=f"{tokens.highest + 1:,} ids",
            next="nothing: vocabularies are padded so",
        )


def _media(tokens: Tokens, config: Mapping[str, Any], processor: Mapping[str, Any]) -> Iterator[Finding]:
    """The placeholders of pictures: the model looks for an id, the processor writes a text."""
    for key in MEDIA_KEYS:
        id_ = integer(config.get(key))
        if id_ is None:
            continue
        if id_ not in tokens.ids:
            yield clash(
                "config.json",
                f"{key} {id_:,} is no token of the tokenizer, so no prompt can hold a picture",
                "an id of tokenizer.json",
                f"{id_:,}, ids up to {tokens.highest:,}",
                "fetch config.json and tokenizer.json of one release",
            )
            continue
        text = processor.get(f"{key.split('_')[0]}_token")
        written = tokens.id_of(text) if isinstance(text, str) else None
        if isinstance(text, str) and written != id_:
            yield clash(
                side_files.PROCESSOR_CONFIG,
                f"the processor writes {text!r} for a picture, which is not the token of {key}",
                f"the token with id {id_:,}",
                f"{text!r} with id {written}",
                "fetch processor and config.json of one release",
            )


def _media_beyond(config: Mapping[str, Any], rows: int) -> Iterator[Finding]:
    """The same without a tokenizer: an id that no row of the embedding belongs to."""
    for key in MEDIA_KEYS:
        id_ = integer(config.get(key))
        if id_ is not None and id_ >= rows:
            yield clash(
                "config.json",
                f"{key} {id_:,} is beyond the {rows:,} rows of the embedding",
                f"an id below {rows:,}",
                f"{id_:,}",
                "check it against the model's release: prompts with pictures hold this id",
            )


def _templates(reader: _Reader, options: Mapping[str, Any]) -> Iterator[Finding]:
    """Chat templates that differ, of which transformers takes the file of its own, and one that is no Jinja."""
    own, inner = reader.text(TEMPLATE), options.get("chat_template")
    older = reader.json("chat_template.json").get("chat_template")
    texts = {TEMPLATE: own, "chat_template.json": older, side_files.TOKENIZER_CONFIG: inner}
    stated = [(name, text) for name, text in texts.items() if isinstance(text, str)]
    if stated:
        yield from _silent_template(*stated[0])
    if stated or inner is not None:
        yield from _broken_template(reader)
    for name, text in stated[1:]:
        if text.strip() != stated[0][1].strip():
            yield clash(
                name,
                f"the chat template in {name} is not that of {stated[0][0]}, which is used",
                f"{len(stated[0][1]):,} characters as in {stated[0][0]}",
                f"{len(text):,} other characters",
                "fetch both from one release, or remove the stale one",
            )


def _silent_template(name: str, text: str) -> Iterator[Finding]:
    """A template that writes the same prompt whatever was said: an empty file, a web page, a pointer."""
    if "messages" not in text:
        yield warning(
            "side-file-invalid",
            f"the chat template in {name} never names the messages: every conversation becomes the same prompt",
            file=name,
            expected="a template that writes messages",
            found=repr(text[:40]) if text.strip() else "nothing",
            next=f"fetch {name} from the model's release again",
        )


def _broken_template(reader: _Reader) -> Iterator[Finding]:
    """A template that no conversation can be written with."""
    from firstlight.engine.inputs.chat_template import ChatTemplate

    try:
        ChatTemplate.open(reader.directory, special_tokens={}).check()
    except Refused as refused:
        yield from (_softened(one, Path(one.file or TEMPLATE).name) for one in refused.findings)


def _pictures(reader: _Reader, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Sizes that the processor makes pictures to, beside those that the vision tower is made for."""
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        return
    processor = reader.json(side_files.PROCESSOR_CONFIG)
    inner = processor.get("image_processor")
    file = side_files.PROCESSOR_CONFIG if isinstance(inner, Mapping) else side_files.PREPROCESSOR_CONFIG
    images = inner if isinstance(inner, Mapping) else reader.json(side_files.PREPROCESSOR_CONFIG)
    pairs = [
        (file, "patch_size", images, vision, "patch_size"),
        (file, "merge_size", images, vision, "spatial_merge_size"),
        (file, "temporal_patch_size", images, vision, "temporal_patch_size"),
        (side_files.PROCESSOR_CONFIG, "patch_size", processor, vision, "patch_size"),
        (
            side_files.PROCESSOR_CONFIG,
            "vision_feature_select_strategy",
            processor,
            config,
            "vision_feature_select_strategy",
        ),
    ]
    for name, key, ours, theirs, their_key in pairs:
        own, other = ours.get(key), theirs.get(their_key)
        if own is not None and other is not None and own != other:
            yield _unequal(name, key, own, f"{their_key} {other}")
    yield from unlike_tower(config, images, file)
    side, patch = (integer(vision.get(key)) for key in ("image_size", "patch_size"))
    if side and patch and side % patch:
        yield clash(
            "config.json",
            f"vision_config: image_size {side} is no multiple of patch_size {patch}: the rest of a picture is cut off",
            f"a multiple of {patch}",
            f"{side}",
            "check both against the model's release",
        )


def unlike_tower(config: Mapping[str, Any], images: Mapping[str, Any], file: str) -> Iterator[Finding]:
    """Pictures that leave the processor in another size than the vision tower takes; `images`: its constants."""
    vision = config.get("vision_config")
    side = integer(vision.get("image_size")) if isinstance(vision, Mapping) else None
    made = _output_side(images)
    if side is not None and made is not None and made != (side, side):
        yield _unequal(file, "the size of pictures", f"{made[0]} x {made[1]}", f"image_size {side}")


def _output_side(images: Mapping[str, Any]) -> tuple[int, int] | None:
    """Height and width of every picture that leaves the processor, where its constants fix them."""
    if images.get("do_resize") is False or images.get("do_image_splitting") or images.get("image_grid_pinpoints"):
        return None
    size = images.get("crop_size") if images.get("do_center_crop") else images.get("size")
    if isinstance(size, int) and not isinstance(size, bool):
        return (size, size) if images.get("do_center_crop") else None
    height, width = (integer(nested({"size": size}, "size", side)) for side in ("height", "width"))
    return None if height is None or width is None else (height, width)


def _unequal(file: str, key: str, own: object, other: str) -> Finding:
    return clash(
        file,
        f"{key} is {own} in {file}, but config.json says {other}",
        other,
        str(own),
        "fetch both from one release: pictures would be cut into other patches than the tower was trained on",
    )
