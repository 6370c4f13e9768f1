"""The values of an image processor's keys in the form its steps use, each checked before a step meets it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.inputs.image_kinds.kind import HEIGHT_WIDTH, LONGEST, ImageKind


def standard(path: Path, key: str, value: Any, kind: ImageKind, to_square: bool) -> Any:
    """A key's value as the steps of a kind use it; raises `Refused` (side-file-invalid) for one that no step can use.

    `to_square`: a single number for `size` is height and width.
    """
    if key == "size":
        return _size(path, key, value, kind.sizes, to_square)
    is_frame = isinstance(kind.defaults.get(key), Mapping) and key == "patch_size"
    reader = _frame if is_frame else READERS.get(key)
    return reader(path, key, value) if reader is not None else bool(value)


def _three(path: Path, key: str, value: Any) -> tuple[float, ...]:
    numbers = [value] * 3 if _is_number(value) else value
    if not isinstance(numbers, Sequence) or len(numbers) != 3 or not all(_is_number(number) for number in numbers):
        _invalid(path, key, "three numbers", value)
    if key == "image_std" and not all(numbers):
        _invalid(path, key, "numbers other than zero", value)
    return tuple(float(number) for number in numbers)


def _filter(path: Path, key: str, value: Any) -> int:
    if value not in range(6):
        _invalid(path, key, "0 to 5, a filter of Pillow", value)
    return int(value)


def _number(path: Path, key: str, value: Any) -> float:
    if not _is_number(value):
        _invalid(path, key, "a number", value)
    return float(value)


def _positive_number(path: Path, key: str, value: Any) -> float:
    if not _is_number(value) or value <= 0:
        _invalid(path, key, "a number above zero", value)
    return float(value)


def _count(path: Path, key: str, value: Any) -> int:
    if not _is_count(value):
        _invalid(path, key, "a whole number above zero", value)
    return int(value)


def _pinpoints(path: Path, key: str, value: Any) -> tuple[tuple[int, int], ...]:
    is_list = isinstance(value, list | tuple) and len(value) > 0
    if not is_list or not all(isinstance(p, list | tuple) and len(p) == 2 and all(map(_is_count, p)) for p in value):
        _invalid(path, key, "a list of [height, width]", value)
    return tuple((int(height), int(width)) for height, width in value)


def _frame(path: Path, key: str, value: Any) -> dict[str, int]:
    return _size(path, key, value, (HEIGHT_WIDTH,), to_square=True)


def _longest(path: Path, key: str, value: Any) -> dict[str, int]:
    return _size(path, key, value, (LONGEST,), to_square=True)


def _background(path: Path, key: str, value: Any) -> dict[str, Any]:
    """What lies behind transparent pixels: a colour or a chessboard, with Kimi's own sizes where none is given."""
    whole = {"chessboard_square_size": 16, "chessboard_white_value": 255, "chessboard_gray_value": 200}
    found: dict[str, Any] = {"pattern": "black", "chessboard_square_on_top_left": True, **whole}
    if not isinstance(value, Mapping) or value.keys() - found.keys():
        _invalid(path, key, f"an object with {', '.join(found)}", value)
    found |= value
    if found["pattern"] not in ("white", "black", "gray", "chessboard"):
        _invalid(path, key, "pattern white, black, gray or chessboard", value)
    if not all(isinstance(found[name], int) and 0 <= found[name] <= 255 for name in whole):
        _invalid(path, key, "whole numbers from 0 to 255", value)
    if found["chessboard_square_size"] < 1:
        _invalid(path, key, "squares of at least one pixel", value)
    return found


READERS: Mapping[str, Callable[[Path, str, Any], Any]] = {
    "background": _background,
    "crop_size": _frame,
    "pad_size": _frame,
    "max_image_size": _longest,
    "image_mean": _three,
    "image_std": _three,
    "resample": _filter,
    "rescale_factor": _number,
    "image_grid_pinpoints": _pinpoints,
    "pan_and_scan_min_ratio_to_activate": _positive_number,
    **dict.fromkeys(
        (
            "patch_size",
            "temporal_patch_size",
            "merge_size",
            "min_patches",
            "max_patches",
            "in_token_limit",
            "pan_and_scan_min_crop_size",
            "pan_and_scan_max_num_crops",
        ),
        _count,
    ),
}


def _size(path: Path, key: str, value: Any, sizes: Sequence[frozenset[str]], to_square: bool) -> dict[str, int]:
    if isinstance(value, int) and not isinstance(value, bool):
        value = {"height": value, "width": value} if to_square else {"shortest_edge": value}
    elif isinstance(value, list | tuple) and len(value) == 2:
        value = {"height": value[0], "width": value[1]}
    expected = " or ".join(" and ".join(sorted(keys)) for keys in sizes)
    if not isinstance(value, Mapping):
        _invalid(path, key, expected, value)
    size = {str(name): number for name, number in value.items() if number is not None}
    if frozenset(size) not in sizes or not all(map(_is_count, size.values())):
        _invalid(path, key, f"{expected}, whole numbers above zero", value)
    return size


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _invalid(path: Path, key: str, expected: str, value: Any) -> NoReturn:
    raise Refused(
        fatal(
            "side-file-invalid",
            f"{key} of {path.name} cannot be used",
            file=str(path),
            expected=expected,
            found=str(value),
            next=f"correct {key}, or fetch {path.name} from the model's release again",
        )
    )
