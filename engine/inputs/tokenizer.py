"""Encodes text to token ids and back, equal to transformers for the same tokenizer files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, fatal, note, warning
from firstlight.engine.inputs import side_files
from firstlight.engine.inputs.byte_pieces import Pieces, pieces_of
from firstlight.engine.inputs.special_tokens import content_of, ids_by_text, read_special_tokens, tokens_by_id
from firstlight.engine.inputs.tokenizer_classes import BACKEND_NAMES, PIPELINES, Pipeline, effective_class

if TYPE_CHECKING:
    import tokenizers

# What transformers strips after decoding where `clean_up_tokenization_spaces` is on.
CLEAN_UP = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"),
    (" n't", "n't"), (" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip


class _Model(msgspec.Struct, frozen=True):
    """The flags of a tokenizer.json's model; the vocabulary is skipped while parsing."""

    type: str | None = None
    unk_token: str | None = None
    fuse_unk: bool | None = None
    byte_fallback: bool | None = None
    ignore_merges: bool | None = None


class _File(msgspec.Struct, frozen=True):
    """A tokenizer.json without its vocabulary."""

    model: _Model
    normalizer: Any = None
    pre_tokenizer: Any = None
    decoder: Any = None
    post_processor: Any = None
    added_tokens: tuple[dict[str, Any], ...] = ()


class Tokenizer:
    """A tokenizer read from a checkpoint directory.

    `class_name` is the class transformers would take; `findings` say where it changes tokenizer.json. `special_tokens`
    maps the names a chat template may use (bos_token, ...) to their text. `eos_ids` end a generation; `eos_source` is
    the file they come from: generation_config.json, else config.json, else the tokenizer's eos_token.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        file: Path,
        class_name: str,
        special_tokens: Mapping[str, str],
        clean_up: bool,
        decoder: Any,
        findings: Sequence[Finding] = (),
    ) -> None:
        self._backend = backend
        self.file = file
        self.class_name = class_name
        self.special_tokens = dict(special_tokens)
        self.findings = tuple(findings)
        self.clean_up = clean_up
        self.decoder = decoder
        self.added_tokens: dict[int, str] = {
            id_: token.content for id_, token in sorted(backend.get_added_tokens_decoder().items())
        }
        self.special_ids = frozenset(id_ for id_, token in backend.get_added_tokens_decoder().items() if token.special)
        self.size: int = backend.get_vocab_size(with_added_tokens=True)
        self.pieces: Pieces | None = None if clean_up else pieces_of(decoder)
        self.eos_ids, self.eos_source = _eos_ids(file.parent, self)

    @classmethod
    def open(cls, directory: str | Path) -> Self:
        """The tokenizer of a checkpoint directory; raises `Refused` (missing-side-file, side-file-invalid)."""
        directory = Path(directory)
        path = directory / side_files.TOKENIZER
        if not path.is_file():
            raise Refused(_no_tokenizer(directory))
        text = side_files.read_bytes(path)
        parsed = _parse(path, text)
        config = side_files.read_json_if_present(directory / side_files.CONFIG) or {}
        options = side_files.read_json_if_present(directory / side_files.TOKENIZER_CONFIG) or {}
        class_name = effective_class(config, options, b'"ByteLevel"' in text)
        pipeline = PIPELINES[class_name](options) if class_name in PIPELINES else None

        backend = _load(path, text if pipeline is None else _without_added_tokens(text))
        findings = list(_override(backend, path, parsed, class_name, pipeline))
        named, extra = read_special_tokens(directory, options, pipeline)
        _add_tokens(backend, _listed_tokens(directory, options, parsed, named, extra), named, extra)
        if pipeline is not None and pipeline.mark_all_special:
            _mark_special(backend, [*named.values(), *extra])
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = bool(options.get("split_special_tokens"))
        is_bpe = parsed.model.type == "BPE" or pipeline is not None
        forced = options.get("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output")
        return cls(
            backend,
            file=path,
            class_name=class_name,
            special_tokens={name: content_of(token) for name, token in named.items()},
            clean_up=bool(options.get("clean_up_tokenization_spaces")) and (not is_bpe or bool(forced)),
            decoder=pipeline.decoder if pipeline is not None else parsed.decoder,
            findings=findings,
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; text that spells an added token becomes that token, as it does in transformers."""
        # Of the library's calls only those for batches let other threads run: a long prompt must not silence a server.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids, cleaned of spaces only where transformers would clean it."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        if self.clean_up:
            for before, after in CLEAN_UP:
                text = text.replace(before, after)
        return text

    def token(self, id_: int) -> str | None:
        """The token of an id as the vocabulary writes it, or None where the id is not used."""
        token: str | None = self._backend.id_to_token(id_)
        return token

    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary writes it, or None."""
        id_: int | None = self._backend.token_to_id(token)
        return id_

    def token_bytes(self, id_: int) -> bytes:
        """The bytes a token contributes in the middle of a text; an unused id contributes none."""
        token = self.token(id_)
        if token is None:
            return b""
        if self.pieces is None:
            return token.encode()
        return self.pieces.bytes_of(token)

    def special_tokens_in(self, text: str) -> tuple[str, ...]:
        """The special tokens that a text spells, each once, in the order of their ids."""
        return tuple(token for id_, token in self.added_tokens.items() if id_ in self.special_ids and token in text)


def _no_tokenizer(directory: Path) -> Finding:
    others = [
        name
        for name in ("tokenizer.model", "tiktoken.model", "tekken.json", "vocab.json")
        if (directory / name).is_file()
    ]
    if others:
        next_ = f"convert {others[0]} with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        return side_files.missing(directory / side_files.TOKENIZER, f"there is {', '.join(others)} instead", next_)
    return side_files.missing(directory / side_files.TOKENIZER, "text cannot be turned into token ids")


def _parse(path: Path, text: bytes) -> _File:
    try:
        return msgspec.json.decode(text, type=_File)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Refused(
            fatal(
                "side-file-invalid",
                f"tokenizer.json is not a tokenizer: {error}",
                file=str(path),
                next="fetch tokenizer.json from the model's release again",
            )
        ) from None


def _load(path: Path, text: bytes) -> tokenizers.Tokenizer:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_buffer(text)
    except Exception as error:  # the library raises no narrower type than Exception
        raise Refused(
            fatal(
                "side-file-invalid",
                f"tokenizer.json cannot be loaded: {error}",
                file=str(path),
                next=f"tokenizers {tokenizers.__version__} reads it or does not: try a newer one",
            )
        ) from error


def _without_added_tokens(text: bytes) -> bytes:
    """tokenizer.json without its added tokens, as such a class reads it."""
    parts = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    return msgspec.json.encode({**parts, "added_tokens": []})


def _override(
    backend: tokenizers.Tokenizer, path: Path, parsed: _File, class_name: str, pipeline: Pipeline | None
) -> Iterable[Finding]:
    """Put the pipeline of the class into the tokenizer, yielding what this changes."""
    if pipeline is None:
        if class_name not in BACKEND_NAMES:
            yield note(
                "tokenizer-class",
                f"{class_name} is not known here: tokenizer.json is taken as it is",
                file=str(path),
            )
        return
    theirs = _part_holder(parsed.normalizer, parsed.pre_tokenizer, parsed.decoder)
    ours = _part_holder(pipeline.normalizer, pipeline.pre_tokenizer, pipeline.decoder)
    changed = [
        part
        for part in ("normalizer", "pre_tokenizer", "decoder")
        if repr(getattr(theirs, part)) != repr(getattr(ours, part))
    ]
    for part in changed:
        setattr(backend, part, getattr(ours, part))
    flags = {flag: value for flag, value in pipeline.model.items() if _flag(parsed.model, flag) != value}
    if parsed.model.type in (None, "BPE"):
        for flag, value in flags.items():
            setattr(backend.model, flag, value)
    if pipeline.drop_post_processor:
        backend.post_processor = None
    # Dropping an unknown token that a full set of byte tokens makes unreachable is no change worth a warning.
    if changed:
        yield warning(
            "tokenizer-class",
            f"{class_name} of transformers replaces the {', '.join(changed)} of tokenizer.json; the same is done here",
            file=str(path),
            expected=f"the pipeline of {class_name}",
            found=f"another {', '.join(changed)} in tokenizer.json",
            next="compare token ids with the vendor's own stack if it does not use transformers 5",
        )


def _flag(model: _Model, flag: str) -> Any:
    value = getattr(model, flag)
    return False if value is None and flag != "unk_token" else value


def _part_holder(normalizer: Any, pre_tokenizer: Any, decoder: Any) -> tokenizers.Tokenizer:
    """A tokenizer with an empty vocabulary and the given parts, built by the library."""
    import tokenizers

    parts = {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "decoder": decoder}
    model = {"type": "BPE", "vocab": {}, "merges": []}
    return tokenizers.Tokenizer.from_buffer(
        msgspec.json.encode({"version": "1.0", "added_tokens": [], "model": model, **parts})
    )


def _listed_tokens(
    directory: Path, options: Mapping[str, Any], parsed: _File, named: Mapping[str, Any], extra: Sequence[Any]
) -> list[Any]:
    """Added tokens in order of their ids, from tokenizer_config.json if it lists them."""
    if "added_tokens_decoder" in options:
        key = "added_tokens_decoder"
        by_id = tokens_by_id(directory / side_files.TOKENIZER_CONFIG, key, options[key])
    else:
        special = {content_of(token) for token in (*named.values(), *extra)}
        by_id = {
            id_: {"content": token, "normalized": token not in special, "special": token in special}
            for token, id_ in ids_by_text(directory / "added_tokens.json").items()
        }
        for token in parsed.added_tokens:
            if type(token.get("id")) is not int or not isinstance(token.get("content"), str):
                side_files.refuse_value(
                    directory / side_files.TOKENIZER, "added_tokens", "tokens with id, content", token
                )
            by_id[token["id"]] = token
    return [by_id[id_] for id_ in sorted(by_id)]


def _added_token(token: Any, **defaults: bool) -> tokenizers.AddedToken:
    import tokenizers

    if isinstance(token, str):
        return tokenizers.AddedToken(token, **defaults)
    flags = {
        flag: bool(token[flag])
        for flag in ("lstrip", "rstrip", "single_word", "normalized", "special")
        if flag in token
    }
    return tokenizers.AddedToken(token["content"], **{**defaults, **flags})


def _add_tokens(
    backend: tokenizers.Tokenizer, listed: Sequence[Any], named: Mapping[str, Any], extra: Sequence[Any]
) -> None:
    tokens = [_added_token(token) for token in listed]
    known = {token.content for token in tokens} | {
        token.content for token in backend.get_added_tokens_decoder().values()
    }
    by_content = {token.content: token for token in tokens}
    for token in (*named.values(), *extra):
        if content_of(token) not in known:
            tokens.append(by_content.get(content_of(token)) or _added_token(token, special=True))
            known.add(content_of(token))
    names = {content_of(token) for token in named.values()}
    for token in tokens:
        if token.content in names and not token.special:
            token.special = True
    if tokens:
        backend.add_tokens(tokens)


def _mark_special(backend: tokenizers.Tokenizer, tokens: Sequence[Any]) -> None:
    unique = dict.fromkeys(content_of(token) for token in tokens)
    if unique:
        backend.add_tokens([_added_token(token, special=True) for token in unique])


def _eos_ids(directory: Path, tokenizer: Tokenizer) -> tuple[tuple[int, ...], str]:
    for name in (side_files.GENERATION_CONFIG, side_files.CONFIG):
        config = side_files.read_json_if_present(directory / name) or {}
        for value in (config.get("eos_token_id"), side_files.nested(config, "text_config", "eos_token_id")):
            ids = value if isinstance(value, list) else [value]
            if all(type(id_) is int for id_ in ids) and ids:
                return tuple(ids), name
    eos = tokenizer.special_tokens.get("eos_token")
    id_ = tokenizer.token_id(eos) if eos is not None else None
    return ((id_,) if id_ is not None else ()), side_files.TOKENIZER_CONFIG
