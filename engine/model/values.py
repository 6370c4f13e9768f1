"""Which values a configuration key may hold, told by its name and by the type of its default. No torch.

A text, a flag or an endless number in place of a size would be computed with, and answers would be others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

MOST = 1 << 40
ENDLESS = 1 << 1000  # whole numbers may have any number of digits; floats end at 2**1024
LIMITS = (  # of what is counted one by one; other numbers may be as large as memory is
    (re.compile(r"(\w+_)?(num|n)_(\w+_)?layers?|depth"), 10_000),
    (re.compile(r"(\w+_)?(num|n)_(\w+_)?heads?"), 100_000),
    (re.compile(r"(\w+_)?experts?|zero_expert_num"), 100_000),
)
_OWN = re.compile(  # of which their readers ask what they may be: places from either end, patterns, ends without end
    r"vision_feature_layers?|\w+_pattern|order_of_\w+|time_step_limit|attn_temperature_tuning"
)
_WHOLE = re.compile(
    r"(?!(use|is|has|add)_)((num|n)_\w+|(\w+_)?(size|dim|rank|heads|window|length|positions|position_embeddings|layers|experts"
    r"|per_tok|per_token|seq_len|n_ctx|topk|groups?|k_dense_replace|idxs|indices|indexes|token_id|token_index)|depth)"
)
_AT_LEAST_ONE = re.compile(
    r"(?!qk_rope_)(\w+_)?(head_dim|(num|n)_(\w+_)?(heads|channels)|topk_group|patch_size|block_size|chunk_size|topk_blocks"
    r"|multiple_of|position_embeddings|period|interval|sparse_step|layer_step)|(num|n)_(expert_)?groups?|dense_intermediate_size"
)
_NUMBER = re.compile(
    r"(\w+_)?(eps|epsilon|theta|softcapping|soft_cap|factor|scale|scaling|multipliers?|ratio|limit|bound|alpha|beta|base"
    r"|base_freq|pct|qkv_clip)|clip_qkv|scale_emb|query_pre_attn_scalar|beta_fast|beta_slow|mscale|mscale_all_dim|scale_depth"
)
_ABOVE_ZERO = re.compile(
    r"(\w+_)?(multipliers?|logits?_scal(e|ing)|rout\w+_scal(e|ing_factor)|short_factor|long_factor)|factor|scale_emb"
    r"|attention_factor|beta_fast|beta_slow|query_pre_attn_scalar|scale_depth|dim_model_base|softmax_scale|clip_qkv"
)
_BASE = re.compile(r"(?!layer_)(\w+_)?theta|rope_\w*base_freq|rotary_emb_base")
_TINY = re.compile(r"(\w+_)?(eps|epsilon)")
_SHARE = re.compile(r"partial_rotary_factor|rotary_pct")
_CAP = re.compile(r"\w*soft_?cap(ping)?|attn_scale")
_OBJECTS = ("rope_parameters", "rope_scaling")
_LISTS = ("short_factor", "long_factor")  # among them

Holds = Callable[[Any], bool]


def impossible(key: str, value: Any, default: Any = None) -> tuple[str, Any, str] | None:
    """(key, value, what was expected) if `value` is impossible for `key`, else None.

    `default` is what stands in for an absent value. Where it is a flag, a text or a fraction, its type decides what is
    possible; otherwise the name of the key does.
    """
    if value is None or value == "auto":
        return None
    if key in _OBJECTS:
        return _of_positions(key, value)
    expected, holds = _kind(key, _type_of(default))
    if holds is None or holds(value) or (isinstance(value, Mapping) and key.endswith("image_size")):  # its sides
        return None
    return key, value, expected


def _of_positions(key: str, value: Any) -> tuple[str, Any, str] | None:
    """Rotary parameters: an object of values, or of such objects by kind of layer."""
    if not isinstance(value, Mapping):
        return (key, value, "an object") if value else None
    for name, inner in value.items():
        is_kind = isinstance(inner, Mapping) and not asks_for_numbers(name)
        found = _of_positions(name, inner) if is_kind else impossible(name, inner)
        if found is None and inner is not None and asks_for_numbers(name):
            wanted = "a list of numbers" if name in _LISTS else "one number"
            found = (name, inner, wanted) if isinstance(inner, list) != (name in _LISTS) else None
        if found is not None:
            return f"{key}.{found[0]}", found[1], found[2]
    return None


def asks_for_numbers(key: str) -> bool:
    """Whether the name of a key tells that it holds numbers."""
    return bool(_kind(key, "NoneType")[0])


def _type_of(default: Any) -> str:
    """The name of the default's type; a float that is not a whole number is a `fraction`."""
    fraction = isinstance(default, float) and not default.is_integer()
    return "fraction" if fraction else type(default).__name__


@lru_cache(maxsize=4096)
def _kind(key: str, default: str) -> tuple[str, Holds | None]:
    """What a key holds, in words and as a predicate; `default` is the name of its default's type.

    The predicate is None for a key whose name says nothing about its values.
    """
    if _OWN.fullmatch(key):
        return "", None
    if default == "bool":
        return "true or false", lambda value: value in (0, 1)
    if default == "str":
        return "a name", lambda value: isinstance(value, str | int) and not isinstance(value, bool)
    if default == "fraction" or _NUMBER.fullmatch(key) or (default == "float" and not _WHOLE.fullmatch(key)):
        return _number(key)
    if default == "int" or _WHOLE.fullmatch(key):
        return _whole(key)
    if default == "list":
        return "a list", lambda value: isinstance(value, list | tuple) or type(value) is int
    return "", None


def _number(key: str) -> tuple[str, Holds]:
    if _TINY.fullmatch(key):
        return "a number from 0 to 0.1", _each(lambda number: 0 <= number <= 0.1)
    if _BASE.fullmatch(key):
        return "a finite number of at least 1", _each(lambda number: 1 <= number < math.inf)
    if _SHARE.fullmatch(key):
        return "a number from 0 to 1", _each(lambda number: 0 <= number <= 1)
    if _ABOVE_ZERO.fullmatch(key):
        return "a finite number above zero", _each(lambda number: 0 < number < math.inf)
    if _CAP.fullmatch(key):
        return "a finite number, 0 or above", _each(lambda number: 0 <= number < math.inf)
    return "a finite number", _each(math.isfinite)


def _each(holds: Callable[[float], bool]) -> Holds:
    """A predicate that holds for a number, or for each number of a list, and for nothing else."""

    def asked(value: Any) -> bool:
        if isinstance(value, list | tuple):
            return all(item is None or asked(item) for item in value)
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < ENDLESS and holds(value)

    return asked


def _whole(key: str) -> tuple[str, Holds]:
    least = 1 if _AT_LEAST_ONE.fullmatch(key) else 0
    most = next((limit for names, limit in LIMITS if names.fullmatch(key)), MOST)
    numbers = _each(lambda number: float(number).is_integer() and least <= number <= most)

    def asked(value: Any) -> bool:
        flags = isinstance(value, list | tuple) and all(isinstance(item, bool) for item in value)
        return flags or numbers(value)

    return f"{'a positive whole number' if least else 'a whole number'} of at most {most:,}", asked
