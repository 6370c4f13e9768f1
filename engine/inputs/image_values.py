"""Validates the values of an image processor's keys and converts them for its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from firstlight.engine.inputs.image_kinds.kind import HEIGHT_WIDTH, LONGEST, MAX_STEP_PIXELS, MAX_TILES, ImageKind
from firstlight.engine.inputs.side_files import refuse_value


def standard(path: Path, key: str, value: Any, kind: ImageKind, to_square: bool) -> Any:
    """A key's value as the steps of a kind use it; raises `Refused` (side-file-invalid) for one that no step can use.

    `to_square`: a single number for `size` is height and width.
    """
    if key == "size":
        return _size(path, key, value, kind.sizes, to_square)
    if key == "patch_size" and isinstance(kind.defaults.get(key), Mapping):
        return _frame(path, key, value)
    if key in LIMITS:
        return _count(path, key, value, kind.limits.get(key, LIMITS[key]))
    return READERS.get(key, _flag)(path, key, value)


def _flag(path: Path, key: str, value: Any) -> bool:
    if value not in (False, True):
        refuse_value(path, key, "true or false, without quotes", value)
    return bool(value)


def _three(path: Path, key: str, value: Any) -> tuple[float, ...]:
    numbers = [value] * 3 if _is_number(value) else value
    if not isinstance(numbers, Sequence) or len(numbers) != 3 or not all(_is_number(number) for number in numbers):
        refuse_value(path, key, "three numbers", value)
    if key == "image_std" and not all(numbers):
        refuse_value(path, key, "numbers other than zero", value)
    return tuple(float(number) for number in numbers)


def _filter(path: Path, key: str, value: Any) -> int:
    if value not in range(6):
        refuse_value(path, key, "0 to 5, a filter of Pillow", value)
    return int(value)


def _number(path: Path, key: str, value: Any) -> float:
    if not _is_number(value):
        refuse_value(path, key, "a number", value)
    return float(value)


def _factor(path: Path, key: str, value: Any) -> float:
    if not _number(path, key, value):
        refuse_value(path, key, "a number other than zero", value)
    return float(value)


def _positive_number(path: Path, key: str, value: Any) -> float:
    if not _is_number(value) or value <= 0:
        refuse_value(path, key, "a number above zero", value)
    return float(value)


def _count(path: Path, key: str, value: Any, most: int) -> int:
    if not _is_count(value) or value > most:
        refuse_value(path, key, f"a whole number from 1 to {most:,}", value)
    return int(value)


def _pinpoints(path: Path, key: str, value: Any) -> tuple[tuple[int, int], ...]:
    is_list = isinstance(value, list | tuple) and len(value) > 0
    if not is_list or not all(isinstance(p, list | tuple) and len(p) == 2 and all(map(_is_count, p)) for p in value):
        refuse_value(path, key, "a list of [height, width]", value)
    if any(height * width > MAX_STEP_PIXELS for height, width in value):
        refuse_value(path, key, f"canvases of at most {MAX_STEP_PIXELS:,} pixels", value)
    return tuple((int(height), int(width)) for height, width in value)


def _frame(path: Path, key: str, value: Any) -> dict[str, int]:
    return _size(path, key, value, (HEIGHT_WIDTH,), to_square=True)


def _longest(path: Path, key: str, value: Any) -> dict[str, int]:
    return _size(path, key, value, (LONGEST,), to_square=True)


def _background(path: Path, key: str, value: Any) -> dict[str, Any]:
    """The background of transparent pixels: a colour or a chessboard, with the defaults of Kimi K3."""
    whole = {"chessboard_square_size": 16, "chessboard_white_value": 255, "chessboard_gray_value": 200}
    found: dict[str, Any] = {"pattern": "black", "chessboard_square_on_top_left": True, **whole}
    if not isinstance(value, Mapping) or value.keys() - found.keys():
        refuse_value(path, key, f"an object with {', '.join(found)}", value)
    found |= value
    if found["pattern"] not in ("white", "black", "gray", "chessboard"):
        refuse_value(path, key, "pattern white, black, gray or chessboard", value)
    if not all(isinstance(found[name], int) and 0 <= found[name] <= 255 for name in whole):
        refuse_value(path, key, "whole numbers from 0 to 255", value)
    if found["chessboard_square_size"] < 1:
        refuse_value(path, key, "squares of at least one pixel", value)
    return found


LARGEST = 1e30  # of a number: float32 has no larger ones to compute with
LIMITS: Mapping[str, int] = {  # whole numbers above zero, and the largest of each: more would fill the memory
    "patch_size": 4096,
    "temporal_patch_size": 4096,
    "merge_size": 4096,
    "min_patches": 1 << 24,
    "max_patches": 1 << 24,
    "in_token_limit": 1 << 24,
    "pan_and_scan_min_crop_size": MAX_STEP_PIXELS,
    "pan_and_scan_max_num_crops": MAX_TILES,
}
READERS: Mapping[str, Callable[[Path, str, Any], Any]] = {
    "background": _background,
    "crop_size": _frame,
    "pad_size": _frame,
    "max_image_size": _longest,
    "image_mean": _three,
    "image_std": _three,
    "resample": _filter,
    "rescale_factor": _factor,
    "image_grid_pinpoints": _pinpoints,
    "pan_and_scan_min_ratio_to_activate": _positive_number,
}


def _size(path: Path, key: str, value: Any, sizes: Sequence[frozenset[str]], to_square: bool) -> dict[str, int]:
    if isinstance(value, int) and not isinstance(value, bool):
        value = {"height": value, "width": value} if to_square else {"shortest_edge": value}
    elif isinstance(value, list | tuple) and len(value) == 2:
        value = {"height": value[0], "width": value[1]}
    expected = " or ".join(" and ".join(sorted(keys)) for keys in sizes)
    if not isinstance(value, Mapping):
        refuse_value(path, key, expected, value)
    size = {str(name): number for name, number in value.items() if number is not None}
    if frozenset(size) not in sizes or not all(map(_is_count, size.values())):
        refuse_value(path, key, f"{expected}, whole numbers above zero", value)
    if frozenset(size) == HEIGHT_WIDTH and size["height"] * size["width"] > MAX_STEP_PIXELS:
        refuse_value(path, key, f"at most {MAX_STEP_PIXELS:,} pixels", value)
    return size


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
