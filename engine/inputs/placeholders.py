"""What a processor class needs to write pictures into a prompt: placeholder tokens, counts and settings.

A new class is one function and one line in `EXPANSIONS`; a class that is not listed is refused, not guessed at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.inputs import side_files
from firstlight.engine.inputs.image_constants import Constant, ImageConstants
from firstlight.engine.inputs.image_kinds.kind import Tensors
from firstlight.engine.inputs.tokenizer import Tokenizer

MOST_COUNT = 1 << 16  # tokens for a picture, or pixels of a patch's side: a larger number would fill the memory
SMALLEST_SHARE = 1 / 64
Write = Callable[[Tensors, ImageConstants], tuple[str, ...]]


class Expansion(msgspec.Struct, frozen=True, kw_only=True):
    """How a processor class puts pictures into a prompt.

    A prompt has `token` where a picture belongs. `write` gives the text in its place, one for each picture, from the
    image processor's tensors and constants; every `fill` in it, `fill_id` after tokenizing, is one row of features.
    `write` raises `Refused` where the checkpoint's files do not say enough; a prompt without pictures never asks.
    `reads`: the tensors that `write` reads and how many dimensions each has; other image processors make others.
    `overrides`: what the class asks of its image processor whatever that one's file says. `hidden`: tensors that only
    the expansion needs and the model does not get. `type_ids`: the name of a tensor [1, T] that is 1 where a token
    stands for a picture, if the class makes one.
    """

    class_name: str
    token: str
    fill: str
    fill_id: int
    write: Write
    reads: Mapping[str, int]
    overrides: Mapping[str, Any] = {}
    hidden: tuple[str, ...] = ()
    type_ids: str | None = None
    constants: tuple[Constant, ...] = ()


class Settings:
    """Reads the keys of a processor class and records the source of each: a file, or the class's default."""

    def __init__(self, path: Path, config: Mapping[str, Any], tokenizer: Tokenizer, class_name: str) -> None:
        self.path = path
        self.config = config
        self.tokenizer = tokenizer
        self.class_name = class_name
        self.constants: list[Constant] = []

    def get(self, key: str, default: Any) -> Any:
        """The value of a key of processor_config.json."""
        value = self.config.get(key)
        found = self._traced(key, value if value is not None else default, value is not None)
        return found.value

    def count(self, key: str, default: int, least: int = 1) -> int:
        """A whole number of tokens or pixels."""
        value = self.get(key, default)
        if type(value) is not int or not least <= value <= MOST_COUNT:
            side_files.refuse_value(self.path, key, f"a whole number from {least} to {MOST_COUNT:,}", value)
        return value

    def share(self, key: str, default: float) -> float:
        """A number above 0, at most 1."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not SMALLEST_SHARE <= value <= 1:
            side_files.refuse_value(self.path, key, f"a number from {SMALLEST_SHARE} to 1", value)
        return float(value)

    def token(self, name: str, default: str | None, from_config: bool = False) -> str:
        """A token by the tokenizer's name for it (image_token), else processor_config.json's or the class's."""
        named = self.tokenizer.special_tokens.get(name)
        if named is not None and not from_config:
            self.constants.append(Constant(name=name, value=named, source=f"{side_files.TOKENIZER_CONFIG}: {name}"))
            return named
        if default is None:
            raise Refused(
                fatal(
                    "missing-side-file",
                    f"{name} is in no file: what {self.class_name} writes for a picture is unknown without it",
                    file=str(self.tokenizer.file.parent / side_files.TOKENIZER_CONFIG),
                    expected=f"{name} (or extra_special_tokens.{name})",
                    found="no such key",
                    next=f"fetch {side_files.TOKENIZER_CONFIG} of the model's release again",
                )
            )
        token = self.get(name, default) if from_config else self._traced(name, default, False).value
        if not isinstance(token, str) or not token:
            side_files.refuse_value(self.path, name, "a token", token)
        return token

    def id_of(self, token: str) -> int:
        """The id of a token. If the tokenizer splits it, `Processor.prepare` refuses it later."""
        return self.tokenizer.encode(token, add_special_tokens=False)[0]

    def expansion(
        self, token: str, write: Write, reads: Mapping[str, int], fill: str | None = None, **fields: Any
    ) -> Expansion:
        """The expansion, with every key read so far among its constants."""
        fill = fill or token
        return Expansion(
            class_name=self.class_name,
            token=token,
            fill=fill,
            fill_id=self.id_of(fill),
            write=write,
            reads=reads,
            constants=tuple(self.constants),
            **fields,
        )

    def _traced(self, key: str, value: Any, is_in_file: bool) -> Constant:
        source = f"{self.path.name}: {key}" if is_in_file else f"default of {self.class_name}"
        self.constants.append(Constant(name=key, value=value, source=source))
        return self.constants[-1]
