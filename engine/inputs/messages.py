"""Converts chat messages from OpenAI's format to what templates take, and collects the pictures in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal

Message = Mapping[str, Any]

READ_ANYWAY = frozenset(("role", "content", "reasoning_content", "reasoning", "thinking"))
QUOTED = frozenset(("assistant", "tool", "function"))
PART_KEYS = {
    "text": {"type", "text"},
    "image_url": {"type", "image_url"},
    "image": {"type", "image_url", "url"},
}
URL_KEYS = {"url", "detail"}  # a wish about costs: pictures always go in as the vendor's processor makes them


def user_turn(prompt: str, num_pictures: int, parts: bool) -> dict[str, Any]:
    """One user message: pictures first, then the text; `parts`: as a list of parts, else as a text."""
    if not parts and not num_pictures:
        return {"role": "user", "content": prompt}
    content = [{"type": "image"} for _ in range(num_pictures)]
    return {"role": "user", "content": [*content, {"type": "text", "text": prompt}]}


def texts_of(messages: Sequence[Message]) -> Iterator[str]:
    """The texts that messages of all roles carry."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            yield content
        elif isinstance(content, list | tuple):
            yield from (str(part["text"]) for part in content if isinstance(part, Mapping) and "text" in part)


def with_plain_text(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages with lists of text parts joined into one string each, by line breaks; others unchanged."""
    plain = []
    for message in messages:
        content = message.get("content")
        is_text = isinstance(content, list | tuple) and all(
            isinstance(part, Mapping) and part.get("type") == "text" for part in content
        )
        plain.append({**message, "content": "\n".join(texts_of([message]))} if is_text else dict(message))
    return plain


def refuse_unread(messages: Sequence[Message], source: str) -> None:
    """Refuses (bad-request) message fields that the chat template (its text is `source`) never reads.

    They would silently be missing from the prompt, tool calls for example. Reasoning is exempt: templates drop that of
    earlier turns.
    """
    for index, message in enumerate(messages):
        for key, value in message.items():
            if value and key not in READ_ANYWAY and key not in source:
                _refuse(
                    f"messages[{index}].{key}", f"a message without {key}: the chat template has no place for it", key
                )


def refuse_lost(messages: Sequence[Message], prompt: str) -> None:
    """Refuses (bad-request) messages whose text is missing from the `prompt` that the chat template rendered.

    Templates silently drop roles that they do not know, system messages for example. White space is ignored. Answers of
    the model and of tools are exempt: templates drop reasoning and quote results.
    """
    shown: str | None = None
    for index, message in enumerate(messages):
        if message.get("role") in QUOTED:
            continue
        for text in texts_of([message]):
            if text.strip() in prompt:
                continue
            shown = "".join(prompt.split()) if shown is None else shown
            if "".join(text.split()) not in shown:
                role = str(message.get("role"))
                _refuse(
                    f"messages[{index}] of role {role}",
                    "roles that the checkpoint's chat template has a place for",
                    f"a template that leaves it out of the prompt: {text[:60]!r}",
                )


def from_openai(messages: Sequence[Message]) -> tuple[list[dict[str, Any]], list[str]]:
    """Messages as the chat completions API sends them, and the URLs of their pictures in order.

    `image_url` parts (and `image` parts with a `url`) become {"type": "image"}; text parts and texts stay. Raises
    `Refused` (bad-request) for other kinds of parts and for malformed messages.
    """
    turned, urls = [], []
    for index, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            _refuse(f"messages[{index}]", "a message with a role and content", "no role")
        content = message.get("content")
        if isinstance(content, list | tuple):
            parts = []
            for number, part in enumerate(content):
                kind = part.get("type") if isinstance(part, Mapping) else None
                strange = _strange(part, str(kind))
                if strange:
                    _refuse(f"messages[{index}].content[{number}]", f"a part without {strange}", strange)
                if kind == "text" and isinstance(part.get("text"), str):
                    parts.append({"type": "text", "text": part["text"]})
                elif kind in ("image_url", "image") and (url := _url(part)) is not None:
                    parts.append({"type": "image"})
                    urls.append(url)
                else:
                    _refuse(f"messages[{index}].content[{number}]", "a text or image_url part", str(kind))
            content = parts
        elif not isinstance(content, str) and (content is not None or message["role"] != "assistant"):
            found = "none" if content is None else type(content).__name__
            _refuse(f"messages[{index}].content", "a text or a list of parts", found)
        turned.append({**message, "content": content})
    return turned, urls


def _strange(part: Any, kind: str) -> str | None:
    """A key of a part that is not read."""
    if kind not in PART_KEYS:
        return None
    inner = part.get("image_url")
    unknown = [*(set(part) - PART_KEYS[kind]), *(set(inner) - URL_KEYS if isinstance(inner, Mapping) else ())]
    return min(map(str, unknown), default=None)


def _url(part: Mapping[str, Any]) -> str | None:
    value = part.get("image_url", part.get("url"))
    if isinstance(value, Mapping):
        value = value.get("url")
    return value if isinstance(value, str) else None


def _refuse(where: str, expected: str, found: str) -> None:
    raise Refused(
        fatal("bad-request", f"{where} cannot be used", expected=expected, found=found, next=f"send {expected}")
    )
