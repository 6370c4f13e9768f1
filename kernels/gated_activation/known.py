"""Activations by name: those that are built in, and any that a program adds while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

Activation = Callable[[Tensor], Tensor]


class Activations(Mapping[str, Activation]):
    """Functions of a tensor, elementwise, by name."""

    def __init__(self, built_in: Mapping[str, Activation]) -> None:
        self._known = dict(built_in)
        self._built_in = frozenset(built_in)

    def register(self, name: str, function: Activation) -> None:
        """Adds an activation to this process; every implementation that has no code of its own for it calls this one.

        A built-in name is a ValueError: what released models compute is not changed under them.
        """
        if name in self._built_in:
            raise ValueError(f"the activation {name!r} is built in")
        self._known[name] = function

    def is_added(self, name: str) -> bool:
        """Whether a program added it: implementations in C++ and Triton have no code for it."""
        return name in self._known and name not in self._built_in

    def __getitem__(self, name: str) -> Activation:
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)
