"""The OpenAI routes as data: requests to prompts and parameters, answers to bodies. No HTTP here, no torch.

Covered: chat completions with text and data-URL pictures, completions, streaming, stop, max_tokens, temperature,
top_p, seed, logprobs; beyond OpenAI's: top_k, ignore_eos, and `images` (data URLs) for completions. Not covered, and
refused if asked for: several choices, tools, penalties, logit bias, structured output, echo, suffix.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.inputs.messages import from_openai
from firstlight.engine.serving.api import Prompt
from firstlight.engine.serving.request import Delta, SamplingParams, TokenLogprob, Usage

IGNORED = frozenset(("user", "metadata", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"))  # ask nothing
NEUTRAL: dict[str, tuple[Any, ...]] = {  # keys that are refused unless they ask for nothing
    "n": (1, None),
    "best_of": (1, None),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "logit_bias": ({}, None),
    "tools": ([], None),
    "tool_choice": ("none", "auto", None),
    "functions": ([], None),
    "function_call": ("none", "auto", None),
    "response_format": ({"type": "text"}, None),
    "echo": (False, None),
    "suffix": ("", None),
    "audio": (None,),
    "modalities": (["text"], None),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "web_search_options": (None,),
    "verbosity": (None,),
    "store": (False, None),
    "service_tier": ("auto", "default", None),
}


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False  # padding against listeners: there is none, whatever is asked for


class _Common(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | tuple[str, ...] | None = None
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class ChatBody(_Common, frozen=True, kw_only=True):
    messages: tuple[dict[str, Any], ...]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class TextBody(_Common, frozen=True, kw_only=True):
    prompt: str | tuple[int | str, ...]
    images: tuple[str, ...] = ()
    logprobs: int | None = None


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A request of either route, understood. `default_tokens`: the client did not say how many tokens it wants."""

    kind: Literal["chat", "text"]
    model: str
    prompt: Prompt
    pictures: tuple[str, ...]
    params: SamplingParams
    default_tokens: bool
    stream: bool
    include_usage: bool


def read_chat(body: bytes, default_max_tokens: int) -> Ask:
    """A chat completion's request; raises `Refused` (bad-request) with the key that cannot be used."""
    asked = _read(body, ChatBody)
    if not asked.messages:
        raise _bad("messages", "at least one message", "none")
    messages, urls = from_openai(asked.messages)
    top = asked.top_logprobs or 0
    if top and not asked.logprobs:
        raise _bad("top_logprobs", "logprobs true", "logprobs not set")
    limit = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
    params = _params(asked, default_max_tokens if limit is None else limit, bool(asked.logprobs), top)
    return _ask("chat", asked, messages, urls, params, limit is None)


def read_text(body: bytes, default_max_tokens: int) -> Ask:
    """A completion's request, for one prompt: a text or token ids."""
    asked = _read(body, TextBody)
    prompt: Prompt = asked.prompt
    if not isinstance(asked.prompt, str):
        if len(asked.prompt) == 0:
            raise _bad("prompt", "a text or token ids", "an empty list")
        if isinstance(asked.prompt[0], str):
            if len(asked.prompt) != 1:
                raise _bad("prompt", "one prompt a request", f"{len(asked.prompt)}")
            prompt = asked.prompt[0]
    wants = asked.logprobs is not None
    limit = asked.max_tokens
    params = _params(asked, default_max_tokens if limit is None else limit, wants, asked.logprobs or 0)
    return _ask("text", asked, prompt, asked.images, params, limit is None)


def _read(body: bytes, kind: type[Any]) -> Any:
    try:
        raw = msgspec.json.decode(body)
        if not isinstance(raw, dict):
            raise _bad("body", "a JSON object", type(raw).__name__)
        known = {field.encode_name for field in msgspec.structs.fields(kind)}
        for key, value in raw.items():
            if key in NEUTRAL and key not in known:
                if value not in NEUTRAL[key]:
                    raise _bad(key, "a request without it: this is not supported", str(value)[:200], "leave it out")
            elif key not in known and key not in IGNORED:
                raise _bad(key, f"one of {', '.join(sorted(known))}", "an unknown key")
        return msgspec.convert({key: raw[key] for key in raw if key in known}, kind)
    except msgspec.ValidationError as error:
        raise _bad("body", "the types of the OpenAI API", str(error)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise _bad("body", "JSON", str(error)) from None


def _params(asked: _Common, max_tokens: int, logprobs: bool, top: int) -> SamplingParams:
    stop = (asked.stop,) if isinstance(asked.stop, str) else asked.stop or ()
    return SamplingParams(
        max_new_tokens=max_tokens,
        temperature=1.0 if asked.temperature is None else asked.temperature,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        top_k=asked.top_k or 0,
        seed=asked.seed,
        stop=stop,
        ignore_eos=asked.ignore_eos,
        logprobs=logprobs,
        top_logprobs=top,
    )


def _ask(
    kind: Literal["chat", "text"],
    asked: _Common,
    prompt: Prompt,
    urls: Sequence[str],
    params: SamplingParams,
    default_tokens: bool,
) -> Ask:
    for url in urls:
        if not url.startswith("data:"):  # never a path, and nothing is fetched for a stranger
            raise Refused(
                fatal(
                    "bad-image",
                    "a picture that is not sent along",
                    expected="a data: URL (data:image/png;base64,...)",
                    found=url[:80],
                    next="send the picture's bytes in the request",
                )
            )
    return Ask(
        kind=kind,
        model=asked.model,
        prompt=prompt,
        pictures=tuple(urls),
        params=params,
        default_tokens=default_tokens,
        stream=bool(asked.stream),
        include_usage=asked.stream_options is not None and asked.stream_options.include_usage,
    )


class Writer:
    """The bodies of one answer, whole or in chunks; `token_bytes` gives a token's bytes, for log probabilities."""

    def __init__(self, ask: Ask, token_bytes: Callable[[int], bytes]) -> None:
        self.ask = ask
        self._token_bytes = token_bytes
        self._id = ("chatcmpl-" if ask.kind == "chat" else "cmpl-") + uuid.uuid4().hex
        self._created = int(time.time())
        self._first = True
        self._offset = 0

    def chunk(self, delta: Delta) -> dict[str, Any] | None:
        """The chunk of a stream for a delta; None where there is nothing to say yet."""
        if not delta.text and delta.finish is None and not delta.logprobs and not self._first:
            return None
        finish = _finish(delta)
        if self.ask.kind == "text":
            choice: dict[str, Any] = {"index": 0, "text": delta.text, "finish_reason": finish}
        else:
            content: dict[str, Any] = {"content": delta.text} if delta.text or self._first else {}
            if self._first:
                content["role"] = "assistant"
            choice = {"index": 0, "delta": content, "finish_reason": finish}
        choice["logprobs"] = self._logprobs(delta.logprobs, delta.text)
        self._first = False
        return self._body([choice], chunk=True) | ({"usage": None} if self.ask.include_usage else {})

    def last_chunk(self, usage: Usage) -> dict[str, Any]:
        """The chunk with the usage, for clients that asked for it."""
        return self._body([], chunk=True) | {"usage": _usage(usage)}

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """The body of an answer that was not streamed."""
        text = "".join(delta.text for delta in deltas)
        last = deltas[-1]
        assert last.usage is not None
        choice: dict[str, Any] = {"index": 0, "finish_reason": _finish(last)}
        choice |= {"text": text} if self.ask.kind == "text" else {"message": {"role": "assistant", "content": text}}
        choice["logprobs"] = self._logprobs([one for delta in deltas for one in delta.logprobs], text)
        return self._body([choice], chunk=False) | {"usage": _usage(last.usage)}

    def _body(self, choices: list[dict[str, Any]], chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion" + (".chunk" if chunk else "")) if self.ask.kind == "chat" else "text_completion"
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self.ask.model,
            "choices": choices,
        }

    def _logprobs(self, logprobs: Sequence[TokenLogprob], text: str) -> dict[str, Any] | None:
        if not self.ask.params.logprobs:
            return None
        if self.ask.kind == "chat":
            return {"content": [self._chat_logprob(one) for one in logprobs], "refusal": None}
        offsets = []
        for one in logprobs:
            offsets.append(self._offset)
            self._offset += len(self._token(one.token))
        return {
            "tokens": [self._token(one.token) for one in logprobs],
            "token_logprobs": [one.logprob for one in logprobs],
            "top_logprobs": [{self._token(id_): value for id_, value in one.top} for one in logprobs],
            "text_offset": offsets,
        }

    def _chat_logprob(self, one: TokenLogprob) -> dict[str, Any]:
        top = [self._scored(id_, value) for id_, value in one.top]
        return {**self._scored(one.token, one.logprob), "top_logprobs": top}

    def _scored(self, id_: int, logprob: float) -> dict[str, Any]:
        return {"token": self._token(id_), "logprob": logprob, "bytes": list(self._token_bytes(id_))}

    def _token(self, id_: int) -> str:
        return self._token_bytes(id_).decode("utf-8", errors="replace")


def error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """An error as OpenAI writes it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def model_body(name: str, created: int, max_context: int, fallback: str | None = None) -> dict[str, Any]:
    """A model of the list. `fallback` names the modules that compute where they are not ours."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "firstlight",
        "max_model_len": max_context,
        **({} if fallback is None else {"fallback": fallback}),
    }


def _finish(delta: Delta) -> str | None:
    return "stop" if delta.finish == "abort" else delta.finish


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _bad(key: str, expected: str, found: str, next: str = "") -> Refused:
    said = {"expected": expected, "found": found, "next": next or f"change {key}"}
    return Refused(fatal("bad-request", f"{key} cannot be served", **said))
