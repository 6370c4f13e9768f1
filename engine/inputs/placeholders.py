"""What stands for a picture in the prompt: how each processor class writes it, and which of its tokens are features.

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

Write = Callable[[Tensors, ImageConstants], tuple[str, ...]]


class Expansion(msgspec.Struct, frozen=True, kw_only=True):
    """How a processor class puts pictures into a prompt.

    A prompt has `token` where a picture belongs. `write` gives the text in its place, one for each picture, from the
    image processor's tensors and constants; every `fill` in it, `fill_id` after tokenizing, is one row of features.
    `write` raises `Refused` where the checkpoint's files do not say enough; a prompt without pictures never asks.
    `overrides`: what the class asks of its image processor whatever that one's file says. `hidden`: tensors that only
    the expansion needs and the model does not get. `type_ids`: the name under which the class marks the tokens in
    `typed_ids` with 1, if it does.
    """

    class_name: str
    token: str
    fill: str
    fill_id: int
    write: Write
    overrides: Mapping[str, Any] = {}
    hidden: tuple[str, ...] = ()
    type_ids: str | None = None
    constants: tuple[Constant, ...] = ()


class Settings:
    """The keys of a processor class: each read is traced to the file that has it, or to the class's default."""

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

    def count(self, key: str, default: int) -> int:
        """A whole number above zero."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self._refuse(key, "a whole number above zero", value)
        return value

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
            self._refuse(name, "a token", token)
        return token

    def id_of(self, token: str) -> int:
        """The id of a token; where the tokenizer breaks it up, `Prepared` refuses it with the prompt at hand."""
        return self.tokenizer.encode(token, add_special_tokens=False)[0]

    def expansion(self, token: str, write: Write, fill: str | None = None, **fields: Any) -> Expansion:
        fill = fill or token
        return Expansion(
            class_name=self.class_name,
            token=token,
            fill=fill,
            fill_id=self.id_of(fill),
            write=write,
            constants=tuple(self.constants),
            **fields,
        )

    def _traced(self, key: str, value: Any, is_in_file: bool) -> Constant:
        source = f"{self.path.name}: {key}" if is_in_file else f"default of {self.class_name}"
        self.constants.append(Constant(name=key, value=value, source=source))
        return self.constants[-1]

    def _refuse(self, key: str, expected: str, value: Any) -> None:
        raise Refused(
            fatal(
                "side-file-invalid",
                f"{key} of {self.path.name} cannot be used",
                file=str(self.path),
                expected=expected,
                found=str(value),
                next=f"correct {key}, or fetch {self.path.name} from the model's release again",
            )
        )
