"""The tags, filters and functions that transformers adds to Jinja for chat templates, in the sandbox.

Source: transformers 5.24, utils/chat_template_utils.py.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.exceptions import SecurityError

from firstlight.engine.inputs.template_bounds import MOST_WIDTH, BoundedEnvironment


def environment() -> BoundedEnvironment:
    """Jinja's sandbox, bounded, with transformers' filters, functions and the `generation` tag."""
    found = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    found.filters["tojson"] = _tojson
    found.globals["raise_exception"] = _raise_exception
    found.globals["strftime_now"] = _strftime_now
    found.globals["dict"] = _Dict()
    found.globals["namespace"] = _Namespace
    found.bound_filters()
    return found


class _Generation(jinja2.ext.Extension):
    """The tag `{% generation %}`, which marks the assistant's text; variables set inside are local to it."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_kept"), [], [], body).set_lineno(line)

    def _kept(self, caller: jinja2.runtime.Macro) -> str:
        return caller()


class _Dict:
    """`dict` as a function, since the type itself would expose its attributes to the template."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """A namespace that refuses names by which a template could reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace attribute must not begin with an underscore: {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    if any(len(digits) >= len(str(MOST_WIDTH)) for digits in re.findall(r"\d+", form)):
        raise SecurityError("a date that is too wide")
    return datetime.now().astimezone().replace(tzinfo=None).strftime(form)
