"""What the table of operators is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeAlias

import torch

Verdict: TypeAlias = tuple[bool, str]
"""Whether an implementation can serve a situation and, if not, the reason in words."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What a choice among implementations may depend on.

    `shapes` are sizes of the model and of its cache by name, as far as the caller knows them: `hidden`,
    `intermediate`, `num_heads`, `num_kv_heads`, `head_dim`, `value_dim`, `page_size`, `num_experts`, `top_k`,
    `vocabulary`, ... What is not in there must not be asked for.
    """

    device_type: str
    dtype: torch.dtype
    shapes: Mapping[str, int]
    has_triton: bool
    interpret: bool


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to compute an operator: where its code is and where it can be used.

    `attribute` of `module` is the function itself; or, with `per_choice`, makes one that keeps what it learns.
    """

    operator: str
    name: str
    module: str
    attribute: str
    supports: Callable[[Situation], Verdict]
    per_choice: bool = False

    def load(self) -> Callable[..., Any]:
        """Import the code; an ImportError here is a fault to be seen, not a reason to take another implementation."""
        function: Callable[..., Any] = getattr(import_module(self.module), self.attribute)
        return function() if self.per_choice else function
