"""Limits what a chat template, which is foreign code, may compute: one budget per rendering.

Jinja's sandbox keeps a template from Python's internals; it does not keep it from looping for ever or from making a
text of terabytes. Here every turn of a loop, every call and everything that is made has its price, and the few
operations whose outcome dwarfs their arguments are looked at before they run.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.sandbox
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context

BUDGET = 1 << 27  # in characters made; a rendering of a long conversation makes a hundredth of it
ITEM_PRICE = 64  # of each item of a collection
TURN_PRICE = 128  # of a turn of a loop
CALL_PRICE = 1024
MOST_INTEGER_BITS = 4096
MOST_WIDTH = 100_000  # of padding, as methods and filters of texts take it
WIDTH = re.compile(r"\d{6,}")
NESTED_FIELD = re.compile(r"\{[^{}]*\{")


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a budget; `open_budget` starts a rendering in the calling thread."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._left = threading.local()
        self.finalize = self._made
        del self.globals["lipsum"]  # it computes in one call for as long as it is asked to

    def open_budget(self) -> None:
        """Starts a new rendering with the full budget."""
        self._left.budget = BUDGET

    def bound_filters(self) -> None:
        """Makes all filters charge the budget; call it after all filters are registered."""
        for name, function in list(self.filters.items()):
            self.filters[name] = self._paid(name, function)
        self.filters["_turns"] = jinja2.pass_context(lambda _, value: _Turns(value, self._spend))
        self.filters["_made"] = jinja2.pass_context(lambda _, value: self._made(value))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self._look_at(operator, left, right)
        return self._rearranged(super().call_binop(context, operator, left, right))

    def call(self, context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:
        self._spend(CALL_PRICE)
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            self._look_at_text(function.__name__, owner, args)
        return self._made(super().call(context, function, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        text = getattr(value, "__self__", None)
        if isinstance(text, str) and (WIDTH.search(text) or NESTED_FIELD.search(text)):
            raise SecurityError("a format that is too wide")
        return super().wrap_str_format(value)

    def _generate(self, source: jinja2.nodes.Template, *args: Any, **kwargs: Any) -> str:
        """Generates code in which loops, lists and concatenations charge the budget."""
        for loop in list(source.find_all(jinja2.nodes.For)):
            loop.iter = _through("_turns", loop.iter)
        _pay_for_literals(source)
        source.set_environment(self)
        return super()._generate(source, *args, **kwargs)

    def _spend(self, price: int) -> None:
        left = getattr(self._left, "budget", BUDGET) - price
        self._left.budget = left
        if left < 0:
            raise SecurityError("it computes more than a chat template may")

    def _made(self, value: Any) -> Any:
        """Charges for a new value and returns it: strings by length, collections by items at all depths."""
        if isinstance(value, str):
            self._spend(len(value))
        elif isinstance(value, list | tuple | Mapping):
            self._spend(_weight(value, BUDGET // ITEM_PRICE) * ITEM_PRICE)
        return value

    def _rearranged(self, value: Any) -> Any:
        """Charges for a collection of existing items and returns it."""
        if isinstance(value, list | tuple | Mapping):
            self._spend(len(value) * ITEM_PRICE // 8)
            return value
        return self._made(value)

    def _paid(self, name: str, function: Any) -> Any:
        first = 1 if hasattr(function, "jinja_pass_arg") else 0

        def paid(*args: Any, **kwargs: Any) -> Any:
            value = args[first] if len(args) > first else ""
            self._look_at_text(name, value, (*args[first + 1 :], *kwargs.values()))
            return self._rearranged(function(*args, **kwargs))

        for attribute in ("jinja_pass_arg", "jinja_async_variant"):
            if hasattr(function, attribute):
                setattr(paid, attribute, getattr(function, attribute))
        return paid

    def _look_at(self, operator: str, left: Any, right: Any) -> None:
        """Refuses an operation whose result would be huge, before it runs."""
        if operator == "*" and isinstance(left, int) and isinstance(right, int):
            self._spend(0 if left.bit_length() + right.bit_length() <= MOST_INTEGER_BITS else BUDGET + 1)
        elif operator == "*":
            times = right if isinstance(right, int) else left
            many = left if isinstance(right, int) else right
            if isinstance(many, str | list | tuple) and isinstance(times, int):
                self._spend(max(0, times) * len(many))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self._spend(0 if left.bit_length() * abs(right) <= MOST_INTEGER_BITS else BUDGET + 1)
        elif operator == "%" and isinstance(left, str) and (WIDTH.search(left) or "*" in left):
            raise SecurityError("a format that is too wide")

    def _look_at_text(self, name: str, value: Any, args: tuple[Any, ...]) -> None:
        """The same for string methods and filters: padding, joining, replacing, and writing out collections."""
        if any(isinstance(arg, int) and abs(arg) > MOST_WIDTH for arg in args):
            raise SecurityError(f"{name} with a number that is too large")
        if name == "replace":
            self._spend((len(value) + 1) * max(len(str(arg)) for arg in args) // 16 if isinstance(value, str) else 0)
        elif name == "join":
            items, between = (args[0] if args else (), value) if isinstance(value, str) and args else (value, "")
            self._spend(
                _characters(items, BUDGET) + (len(items) if hasattr(items, "__len__") else 0) * len(str(between))
            )
        elif name == "format" and isinstance(value, str) and (WIDTH.search(value) or "*" in value):
            raise SecurityError("a format that is too wide")
        elif isinstance(value, list | tuple | Mapping) and name in (
            "tojson",
            "string",
            "pprint",
            "urlencode",
            "xmlattr",
        ):
            self._spend(_characters(value, BUDGET))


class _Turns:
    """An iterable that charges the budget for every iteration."""

    def __init__(self, value: Any, spend: Callable[[int], None]) -> None:
        self._value = value
        self._spend = spend

    def __iter__(self) -> Iterator[Any]:
        for item in self._value:
            self._spend(TURN_PRICE)
            yield item

    def __len__(self) -> int:
        return len(self._value)


def _through(name: str, node: Any) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _pay_for_literals(node: jinja2.nodes.Node) -> None:
    """Wraps expressions that create lists and strings, innermost first."""
    for field, value in node.iter_fields():
        if isinstance(value, jinja2.nodes.Node):
            _pay_for_literals(value)
            if _makes(value):
                setattr(node, field, _through("_made", value))
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, jinja2.nodes.Node):
                    _pay_for_literals(item)
                    if _makes(item):
                        value[index] = _through("_made", item)


def _makes(node: Any) -> bool:
    if isinstance(node, jinja2.nodes.Concat | jinja2.nodes.Dict | jinja2.nodes.List):
        return True
    return isinstance(node, jinja2.nodes.Tuple) and node.ctx == "load"


def _weight(value: Any, most: int) -> int:
    """Items at all depths; counting ends a little above `most`."""
    count, waiting = 0, [value]
    while waiting and count <= most:
        one = waiting.pop()
        count += 1
        if isinstance(one, Mapping):
            waiting.extend(one.values())
        elif isinstance(one, list | tuple):
            waiting.extend(one)
    return count


def _characters(value: Any, most: int) -> int:
    """Characters of all texts at all depths; counting ends a little above `most`."""
    count, waiting = 0, [value]
    while waiting and count <= most:
        one = waiting.pop()
        count += len(one) if isinstance(one, str) else ITEM_PRICE
        if isinstance(one, Mapping):
            waiting.extend(one.keys())
            waiting.extend(one.values())
        elif isinstance(one, list | tuple):
            waiting.extend(one)
    return count
