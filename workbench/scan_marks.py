"""Marks of prompts and answers (bos, eos, pad) that the files beside the weights state differently. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

import msgspec

from firstlight.engine.findings import Finding, several, warning
from firstlight.engine.inputs import side_files
from firstlight.engine.inputs.side_files import nested
from firstlight.engine.inputs.special_tokens import MOST_DIGITS
from firstlight.workbench.contradictions import TEXT_LEVELS

SPECIAL_TOKENS = "special_tokens_map.json"
MARKS = ("bos_token", "eos_token")  # that prompts hold or answers end at


class Tokens(msgspec.Struct, frozen=True):
    """Every token id of a tokenizer.json with, where it has one, the text of an added token.

    `behind`: what it does with the ids of a prompt, as it says so.
    """

    ids: frozenset[int]
    added: dict[str, int]
    texts: dict[str, int]
    behind: Any = None

    @property
    def highest(self) -> int:
        return max(self.ids, default=-1)

    def id_of(self, text: str) -> int | None:
        return self.added.get(text, self.texts.get(text))


def unlike_marks(
    tokens: Tokens | None,
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    options: Mapping[str, Any],
    special: Mapping[str, Any],
    rows: int | None,
) -> Iterator[Finding]:
    """What files say differently about where prompts begin and answers end.

    `options` and `special`: tokenizer_config.json and special_tokens_map.json. `rows`: of the token embedding.
    """
    yield from _unlike_texts(options, special)
    if "added_tokens_decoder" not in options:  # else transformers does not look at the other file
        options = {**options, **{key: special[key] for key in MARKS if special.get(key) is not None}}
    if tokens is not None:
        yield from _moved_tokens(tokens, options)
        yield from _prompt_marks(tokens, options)
        yield from _starts(tokens, config, generation, options)
    yield from _ends(tokens, config, generation, options, rows)
    yield from _impossible_ends(config, generation, rows)
    yield from _padding_beyond(config, rows)


def _moved_tokens(tokens: Tokens, options: Mapping[str, Any]) -> Iterator[Finding]:
    """Added tokens that both files list, under different ids."""
    decoder = options.get("added_tokens_decoder")
    if not isinstance(decoder, Mapping):
        return
    held = {id_: text for text, id_ in tokens.added.items()}
    moved: list[tuple[int, str, str]] = []  # id and text there, and what stands here
    for key, one in decoder.items():
        text = one.get("content") if isinstance(one, Mapping) else one
        if not isinstance(text, str) or not key.isdecimal() or len(key) > MOST_DIGITS:
            continue
        id_, used = int(key), tokens.id_of(text)
        if used is not None and used != id_:
            moved.append((id_, text, f"{text!r} is id {used:,}"))
        elif used is None and id_ in held:
            moved.append((id_, text, f"id {id_:,} is {held[id_]!r}"))
    if moved:
        id_, text, here = moved[0]
        count = several(len(moved), "added token has another id", "added tokens have other ids")
        yield clash(
            side_files.TOKENIZER_CONFIG,
            f"{count} than in {side_files.TOKENIZER}, which is used: {text!r} first",
            f"{side_files.TOKENIZER}: {here}",
            f"added_tokens_decoder: id {id_:,} is {text!r}",
            "fetch both files of one release: the model may have learned the other ids",
        )


def _unlike_texts(options: Mapping[str, Any], special: Mapping[str, Any]) -> Iterator[Finding]:
    """Marks that both files state, differently."""
    used = side_files.TOKENIZER_CONFIG if "added_tokens_decoder" in options else SPECIAL_TOKENS
    for key in MARKS:
        own, other = _text(options.get(key)), _text(special.get(key))
        if own is not None and other is not None and own != other:
            yield clash(
                SPECIAL_TOKENS,
                f"{key} is {other!r} in {SPECIAL_TOKENS}, {own!r} in {side_files.TOKENIZER_CONFIG}; {used} is used",
                f"{own!r}, as in {side_files.TOKENIZER_CONFIG}",
                repr(other),
                "fetch both files of one release: prompts hold this token, or answers end at it",
            )


def _prompt_marks(tokens: Tokens, options: Mapping[str, Any]) -> Iterator[Finding]:
    """What tokenizer.json writes around a prompt: the ids there and in its vocabulary, and the mark of a beginning."""
    before, marks = _around(tokens.behind)
    for text, id_ in marks:
        own = tokens.id_of(text)
        if own is not None and own != id_:
            yield clash(
                side_files.TOKENIZER,
                f"the post_processor writes id {id_:,} for {text!r}, which is id {own:,} in the vocabulary",
                f"{text!r} as id {own:,}",
                f"id {id_:,}",
                f"fetch {side_files.TOKENIZER} from the model's release again: every prompt holds this id",
            )
    begin = _text(options.get("bos_token"))
    if before is not None and begin is not None and before != begin and tokens.id_of(begin) is not None:
        yield clash(
            side_files.TOKENIZER_CONFIG,
            f"bos_token is {begin!r}, and the post_processor of {side_files.TOKENIZER} begins prompts with {before!r}",
            f"{before!r}, as in {side_files.TOKENIZER}",
            repr(begin),
            "fetch both files of one release: prompts and chats begin with different tokens",
        )


def _around(processor: object) -> tuple[str | None, list[tuple[str, int]]]:
    """The text that a post-processor puts before a prompt, if any, and all that it writes, with ids."""
    before: str | None = None
    marks: list[tuple[str, int]] = []
    for part in _parts(processor):
        special, single = part.get("special_tokens"), part.get("single")
        if not isinstance(special, Mapping) or not isinstance(single, list):
            continue
        names = [nested({"piece": piece}, "piece", "SpecialToken", "id") for piece in single]
        written = [_spelt(special.get(name)) if isinstance(name, str) else [] for name in names]
        marks.extend(mark for of_piece in written for mark in of_piece)
        if before is None and written and written[0]:
            before = written[0][0][0]
    return before, marks


def _parts(processor: object) -> Iterator[Mapping[str, Any]]:
    """A post-processor, or those of a sequence of them, in order."""
    left = [processor]
    while left:
        part = left.pop()
        if isinstance(part, Mapping):
            yield part
            inner = part.get("processors")
            left.extend(reversed(inner) if isinstance(inner, list) else ())


def _spelt(mark: object) -> list[tuple[str, int]]:
    """The texts of a mark of a post-processor with their ids."""
    if not isinstance(mark, Mapping):
        return []
    texts, ids = mark.get("tokens"), mark.get("ids")
    if not isinstance(texts, list) or not isinstance(ids, list) or len(texts) != len(ids):
        return []
    return [(text, id_) for text, id_ in zip(texts, ids, strict=True) if isinstance(text, str) and type(id_) is int]


def _starts(
    tokens: Tokens, config: Mapping[str, Any], generation: Mapping[str, Any], options: Mapping[str, Any]
) -> Iterator[Finding]:
    """The mark of a beginning: the tokenizer writes it, and no other file knows it by that id."""
    begin = _text(options.get("bos_token"))
    own = tokens.id_of(begin) if begin is not None else None
    known = {
        file: ids
        for file, ids in (
            (side_files.GENERATION_CONFIG, _ids(generation.get("bos_token_id"))),
            ("config.json", _ids(stated(config, "bos_token_id"))),
        )
        if ids
    }
    if own is not None and known and not any(own in ids for ids in known.values()):
        file, ids = next(iter(known.items()))
        yield clash(
            side_files.TOKENIZER_CONFIG,
            f"bos_token {begin!r} is id {own:,}, and {file} says bos_token_id {_listed(ids)}; prompts begin as the "
            "tokenizer says",
            f"{file}: {_listed(ids)}",
            f"{own:,}",
            "fetch both files of one release: the model may have learned to begin with the other token",
        )


def _padding_beyond(config: Mapping[str, Any], rows: int | None) -> Iterator[Finding]:
    """A padding id without a row: other implementations cannot build the embedding."""
    id_ = integer(stated(config, "pad_token_id"))
    if id_ is not None and rows is not None and id_ >= rows:
        yield clash(
            "config.json",
            f"pad_token_id {id_:,} is beyond the {rows:,} rows of the embedding",
            f"an id below {rows:,}",
            f"{id_:,}",
            "check it against the model's release: transformers refuses such an id, nothing here needs it",
        )


def _ends(
    tokens: Tokens | None,
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    options: Mapping[str, Any],
    rows: int | None,
) -> Iterator[Finding]:
    """Where an answer ends: generation_config.json decides, then config.json; the tokenizer has its own idea."""
    first, second = _ids(generation.get("eos_token_id")), _ids(stated(config, "eos_token_id"))
    if first and second and not first & second:
        yield clash(
            side_files.GENERATION_CONFIG,
            "answers end at other tokens than config.json says; generation_config.json is used",
            f"config.json: {_listed(second)}",
            f"generation_config.json: {_listed(first)}",
            "check eos_token_id against the model's release",
        )
    elif first and second - first:
        yield clash(
            side_files.GENERATION_CONFIG,
            f"answers do not end at id {_listed(second - first)}, as config.json says; generation_config.json is used",
            f"config.json: {_listed(second)}",
            f"generation_config.json: {_listed(first)}",
            "check eos_token_id against the model's release: answers may run on",
        )
    used, source = (first, side_files.GENERATION_CONFIG) if first else (second, "config.json")
    text = _text(options.get("eos_token"))
    if tokens is None:
        return
    yield from _unknown_marks(tokens, options)
    own = tokens.id_of(text) if text is not None else None
    if used and own is not None and own not in used:
        yield clash(
            side_files.TOKENIZER_CONFIG,
            f"eos_token {text!r} is id {own:,}, at which answers do not end; {source} is used",
            f"{source}: {_listed(used)}",
            f"{own:,}",
            "check eos_token_id against the model's release: answers may run on",
        )
    if strangers := {one for one in used - tokens.ids if rows is None or one < rows}:  # others are impossible ends
        yield clash(
            source,
            f"answers end at id {_listed(strangers)}, which is no token of the tokenizer",
            f"ids up to {tokens.highest:,}",
            _listed(strangers),
            "fetch tokenizer.json and eos_token_id of one release: answers may run on",
        )


def _unknown_marks(tokens: Tokens, options: Mapping[str, Any]) -> Iterator[Finding]:
    """Marks that the template may write and the tokenizer takes for plain text."""
    decoder = options.get("added_tokens_decoder")
    added = decoder.values() if isinstance(decoder, Mapping) else ()
    listed = [one.get("content") for one in added if isinstance(one, Mapping)]
    for key in MARKS:
        value = options.get(key)
        text = value.get("content") if isinstance(value, Mapping) else value
        if value is not None and not isinstance(text, str):
            problem = f"{key} of {side_files.TOKENIZER_CONFIG} is {type(text).__name__}, and no text"
        elif isinstance(text, str) and tokens.texts and tokens.id_of(text) is None and text not in listed:
            problem = f"{key} {text!r} is no token of the tokenizer: prompts would spell it out"
        else:
            continue
        yield clash(
            side_files.TOKENIZER_CONFIG,
            problem,
            f"a token of {side_files.TOKENIZER}",
            repr(value)[:80],
            "fetch both files of one release",
        )


def _impossible_ends(config: Mapping[str, Any], generation: Mapping[str, Any], rows: int | None) -> Iterator[Finding]:
    """Ends of answers that are no ids at all, or ids that no answer can hold."""
    for file, value in (
        (side_files.GENERATION_CONFIG, generation.get("eos_token_id")),
        ("config.json", stated(config, "eos_token_id")),
    ):
        values = value if isinstance(value, list) else [] if value is None else [value]
        wrong = [one for one in values if integer(one) is None]
        beyond = [one for one in values if one not in wrong and rows is not None and not 0 <= one < rows]
        if wrong or beyond:
            yield clash(
                file,
                f"eos_token_id of {file} holds {', '.join(map(repr, (wrong or beyond)[:4]))}: no answer ends at that",
                f"token ids{'' if rows is None else f' below {rows:,}'}",
                repr(value)[:80],
                "fetch the file and the weights of one release: answers may run on",
            )


def clash(file: str, message: str, expected: str, found: str, next: str) -> Finding:
    return warning("conflicting-flag", message, file=file, expected=expected, found=found, next=next)


def stated(config: Mapping[str, Any], key: str) -> Any:
    """The value of a key of the text model, which may stand at either level; the inner one first."""
    inner = (nested(config, level, key) for level in TEXT_LEVELS)
    return next((value for value in (*inner, config.get(key)) if value is not None), None)


def _text(token: object) -> str | None:
    """The text of a token, which may be an object that holds it."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _ids(value: object) -> frozenset[int]:
    values = value if isinstance(value, list) else [value]
    return frozenset(id_ for id_ in values if isinstance(id_, int) and not isinstance(id_, bool))


def _listed(ids: Set[int]) -> str:
    return ", ".join(f"{id_:,}" for id_ in sorted(ids)[:6]) + (f" and {len(ids) - 6} more" if len(ids) > 6 else "")
