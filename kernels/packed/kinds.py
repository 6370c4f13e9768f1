"""Kinds of codes that operators multiply by, as data. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

CODE_BITS: Mapping[str, int] = MappingProxyType({"e2m1": 4, "int2": 2, "int4": 4, "int8": 8, "e4m3": 8, "e5m2": 8})
"""`int2` and `int4` are stored as number + 2 and number + 8; several codes stand in a byte, the first column lowest."""
