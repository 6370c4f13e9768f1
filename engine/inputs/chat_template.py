"""Renders messages with the checkpoint's own Jinja chat template, sandboxed, as transformers does.

Sources, first that exists: `chat_template` in processor_config.json and in chat_template.json (only where the
checkpoint has a processor), chat_template.jinja, tokenizer_config.json.
Source: transformers 5.24, utils/chat_template_utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.inputs import side_files
from firstlight.engine.inputs.special_tokens import named_special_tokens

if TYPE_CHECKING:
    import jinja2

    from firstlight.engine.inputs.template_bounds import BoundedEnvironment

Message = Mapping[str, Any]

# A text no template contains, to see what a template does with a message's content.
PROBE = "c0ntent-pr0be"
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A chat template and where it came from.

    `special_tokens` (bos_token, ...) are variables of the template. `names` lists further templates the checkpoint has.
    """

    def __init__(self, source: str, file: Path, special_tokens: Mapping[str, str], names: Sequence[str] = ()) -> None:
        self.source = source
        self.file = file
        self.special_tokens = dict(special_tokens)
        self.names = tuple(names)

    @classmethod
    def open(
        cls, directory: str | Path, special_tokens: Mapping[str, str] | None = None, processor: bool = False
    ) -> Self:
        """The chat template of a checkpoint directory.

        `special_tokens`: read from the directory where None. `processor`: look where a processor keeps it first.

        Raises `Refused` (missing-side-file) when there is none, naming the places looked at.
        """
        directory = Path(directory)
        found = _find(directory, processor)
        if found is None:
            places = "chat_template.jinja, chat_template in tokenizer_config.json"
            raise Refused(
                fatal(
                    "missing-side-file",
                    "the checkpoint has no chat template",
                    file=str(directory / "chat_template.jinja"),
                    expected=f"{places}{', chat_template.json' if processor else ''}",
                    found="none of them",
                    next="give the whole prompt as text (without --chat), or add the vendor's chat_template.jinja",
                )
            )
        templates, file = found
        if "default" not in templates:
            raise Refused(
                fatal(
                    "side-file-invalid",
                    "the checkpoint has several chat templates and none is the default",
                    file=str(file),
                    expected="a template named 'default'",
                    found=", ".join(sorted(templates)),
                    next=f"name one of them 'default' in {file.name}",
                )
            )
        if special_tokens is None:
            special_tokens = named_special_tokens(directory)
        return cls(templates["default"], file, special_tokens, sorted(set(templates) - {"default"}))

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any) -> str:
        """The prompt text of a conversation; raises `Refused` (bad-request) when the template refuses or fails."""
        import jinja2

        values = {"tools": None, "documents": None, **self.special_tokens, **variables}
        chat = [_with_reasoning(_plain({k: v for k, v in message.items() if v is not None})) for message in messages]
        try:
            template = self._compiled
            self._environment.open_budget()
            text: str = template.render(messages=chat, add_generation_prompt=add_generation_prompt, **_plain(values))
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise Refused(
                fatal(
                    "bad-request",
                    f"the chat template does not accept these messages: {error}",
                    file=str(self.file),
                    found=f"roles {', '.join(str(message.get('role')) for message in messages)}",
                    next="change the messages, or give the whole prompt as text (without --chat)",
                )
            ) from error
        return text

    def check(self) -> None:
        """Raises `Refused` (side-file-invalid) if the template is not valid Jinja."""
        assert self._compiled is not None

    @cached_property
    def takes_text(self) -> bool:
        """Whether the template accepts message content that is a string."""
        return self._writes(PROBE)

    @cached_property
    def takes_parts(self) -> bool:
        """Whether the template accepts message content that is a list of parts."""
        return self._writes([{"type": "text", "text": PROBE}])

    def _writes(self, content: Any) -> bool:
        try:
            text = self.render([{"role": "user", "content": content}])
        except Refused:
            return False
        # A template that does not expect a list writes it out as Python or JSON would.
        return PROBE in text and not any(sign in text for sign in ("'type':", '"type":', "{'text'", '{"text"'))

    @cached_property
    def _environment(self) -> BoundedEnvironment:
        from firstlight.engine.inputs.template_words import environment

        return environment()

    @cached_property
    def _compiled(self) -> jinja2.Template:
        import jinja2

        try:
            return self._environment.from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise Refused(
                fatal(
                    "side-file-invalid",
                    f"the chat template is not valid Jinja: {error.message} (line {error.lineno})",
                    file=str(self.file),
                    next=f"fetch {self.file.name} from the model's release again",
                )
            ) from error


def _find(directory: Path, processor: bool) -> tuple[dict[str, str], Path] | None:
    """All templates by name and the file of the default one, or None."""
    jinja = directory / "chat_template.jinja"
    named = {file.stem: file for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    if processor:
        for name in (side_files.PROCESSOR_CONFIG, "chat_template.json"):
            config = side_files.read_json_if_present(directory / name) or {}
            if config.get("chat_template") is not None:
                return _by_name(directory / name, config["chat_template"]), directory / name
    if jinja.is_file() or named:
        templates = {name: side_files.read_text(file) for name, file in named.items()}
        if jinja.is_file():
            templates["default"] = side_files.read_text(jinja)
        return templates, jinja if jinja.is_file() else next(iter(named.values()))
    config = side_files.read_json_if_present(directory / side_files.TOKENIZER_CONFIG) or {}
    if config.get("chat_template") is not None:
        file = directory / side_files.TOKENIZER_CONFIG
        return _by_name(file, config["chat_template"]), file
    return None


def _by_name(file: Path, value: Any) -> dict[str, str]:
    """The templates under `chat_template`: one text, texts by name, or a list of names with texts. Raises `Refused`."""
    found = {"default": value} if isinstance(value, str) else value
    if isinstance(found, list) and all(isinstance(one, Mapping) and isinstance(one.get("name"), str) for one in found):
        found = {one["name"]: one.get("template") for one in found}
    if not isinstance(found, Mapping) or not all(isinstance(text, str) for pair in found.items() for text in pair):
        side_files.refuse_value(file, "chat_template", "a text, or named texts", value)
    return dict(found)


def _plain(value: Any) -> Any:
    """A copy in plain JSON types, so that a template, which is foreign code, gets no Python objects of ours."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(item) for item in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return f"<{type(value).__name__}>"


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[name] for name in _REASONING_NAMES if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}
