"""The constants of a checkpoint's image processor: each with its value and the file, or class, it was taken from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, fatal, warning
from firstlight.engine.inputs import side_files

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
NEAREST, LANCZOS, BILINEAR, BICUBIC = 0, 1, 2, 3

_COMMON: dict[str, Any] = {"do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}

# What transformers' classes take for a key that the file leaves out. One entry per class whose steps are those of
# `ImageProcessor.process`. Source: transformers 5.24, models/*/image_processing_pil_*.py.
CLASS_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "CLIPImageProcessor": {
        **_COMMON,
        "resample": BICUBIC,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
        "size": {"shortest_edge": 224},
        "crop_size": {"height": 224, "width": 224},
        "do_center_crop": True,
        "do_convert_rgb": True,
        "default_to_square": False,
    },
    "LlavaImageProcessor": {
        **_COMMON,
        "resample": BICUBIC,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
        "size": {"shortest_edge": 224},
        "crop_size": {"height": 224, "width": 224},
        "do_center_crop": True,
        "do_convert_rgb": True,
        "do_pad": False,
        "default_to_square": False,
    },
    "SiglipImageProcessor": {
        **_COMMON,
        "resample": BICUBIC,
        "image_mean": HALF,
        "image_std": HALF,
        "size": {"height": 224, "width": 224},
        "do_convert_rgb": True,
        "default_to_square": False,
    },
    "ViTImageProcessor": {
        **_COMMON,
        "resample": BILINEAR,
        "image_mean": HALF,
        "image_std": HALF,
        "size": {"height": 224, "width": 224},
        "default_to_square": True,
    },
    "BlipImageProcessor": {
        **_COMMON,
        "resample": BICUBIC,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
        "size": {"height": 384, "width": 384},
        "do_convert_rgb": True,
        "default_to_square": True,
    },
}

# The class transformers takes by model type where the file names none.
CLASS_OF_MODEL_TYPE = {
    "llava": "LlavaImageProcessor",
    "vipllava": "CLIPImageProcessor",
    "clip": "CLIPImageProcessor",
    "siglip": "SiglipImageProcessor",
    "paligemma": "SiglipImageProcessor",
    "vit": "ViTImageProcessor",
    "blip": "BlipImageProcessor",
}

KEYS = (
    "do_convert_rgb", "do_resize", "size", "resample", "do_center_crop", "crop_size", "do_rescale", "rescale_factor",
    "do_normalize", "image_mean", "image_std", "do_pad", "pad_size", "default_to_square",
)  # fmt: skip
SIZE_KEYS = (
    {"height", "width"},
    {"shortest_edge"},
    {"shortest_edge", "longest_edge"},
    {"max_height", "max_width"},
)
# Keys whose default decides what the model sees: taking one from the class is a warning, not a note.
WEIGHTY = frozenset({"image_mean", "image_std", "size", "crop_size", "rescale_factor", "resample"})


class Constant(msgspec.Struct, frozen=True, kw_only=True):
    """One constant, its value and where it comes from: a file with the key in it, or a class of transformers."""

    name: str
    value: Any
    source: str


class ImageConstants(msgspec.Struct, frozen=True, kw_only=True):
    """An image processor's constants in the form its steps use; `constants` traces each, `findings` the defaults."""

    class_name: str
    file: str
    values: Mapping[str, Any]
    constants: tuple[Constant, ...]
    findings: tuple[Finding, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name)


def read_constants(directory: str | Path) -> ImageConstants:
    """The image processor's constants of a checkpoint directory.

    Raises `Refused`: missing-side-file where neither processor_config.json (with an `image_processor`) nor
    preprocessor_config.json is there, unsupported-block for a class whose steps are not known, side-file-invalid for a
    value no step can use. Constants are never made up: a key the file leaves out is taken from the class it names, and
    `findings` says so.
    """
    directory = Path(directory)
    path, prefix, config = _find(directory)
    class_name = _class_name(directory, path, config)
    defaults = CLASS_DEFAULTS[class_name]
    values: dict[str, Any] = {}
    constants, findings = [], []
    conflicts = _conflicts(directory, path, config)
    for key in KEYS:
        value, source = config.get(key), f"{path.name}: {prefix}{key}"
        if value is None:
            value, source = defaults.get(key), f"default of {class_name}"
            if value is not None and key in WEIGHTY:
                findings.append(_defaulted(path, key, value, class_name))
        if value is None:
            continue
        values[key] = _standard(path, key, value, values.get("default_to_square", defaults.get("default_to_square")))
        constants.append(Constant(name=key, value=values[key], source=source))
    _check_needed(path, values)
    return ImageConstants(
        class_name=class_name,
        file=str(path),
        values=values,
        constants=tuple(constants),
        findings=(*conflicts, *(f for f in findings if _is_used(f, values))),
    )


def _find(directory: Path) -> tuple[Path, str, Mapping[str, Any]]:
    """The file, the prefix of its keys and the mapping; processor_config.json's nested one before a file of its own."""
    processor = side_files.read_json_if_present(directory / side_files.PROCESSOR_CONFIG)
    if processor is not None and isinstance(processor.get("image_processor"), dict):
        return directory / side_files.PROCESSOR_CONFIG, "image_processor.", processor["image_processor"]
    path = directory / side_files.PREPROCESSOR_CONFIG
    config = side_files.read_json_if_present(path)
    if config is None:
        raise Refused(
            side_files.missing(
                path,
                "the mean, deviation and size that pictures need are in no file, and are not guessed",
                f"fetch preprocessor_config.json or processor_config.json of the model's release into {directory}",
            )
        )
    return path, "", config


def _conflicts(directory: Path, path: Path, config: Mapping[str, Any]) -> tuple[Finding, ...]:
    """Constants that the file which is not used says otherwise; nobody may have meant one of the two."""
    other = directory / side_files.PREPROCESSOR_CONFIG
    second = side_files.read_json_if_present(other) if other != path else None
    if second is None:
        return ()
    keys = [key for key in KEYS if None not in (config.get(key), second.get(key)) and config[key] != second[key]]
    return tuple(
        warning(
            "conflicting-flag",
            f"{key} differs between {path.name} and {other.name}; {path.name} is used, as transformers does",
            file=str(other),
            expected=str(config[key]),
            found=str(second[key]),
            next=f"check {key} against the model's release and correct one of the two",
        )
        for key in keys
    )


def _class_name(directory: Path, path: Path, config: Mapping[str, Any]) -> str:
    model = side_files.read_json_if_present(directory / side_files.CONFIG) or {}
    name = config.get("image_processor_type")
    if name is None and config.get("feature_extractor_type") is not None:
        name = str(config["feature_extractor_type"]).replace("FeatureExtractor", "ImageProcessor")
    if name is None:
        name = CLASS_OF_MODEL_TYPE.get(str(model.get("model_type")))
    base = str(name).removesuffix("Fast").removesuffix("Pil")
    if base not in CLASS_DEFAULTS:
        raise Refused(
            fatal(
                "unsupported-block",
                f"the steps of image processor {name} are not known"
                if name
                else f"{path.name} names no image processor",
                file=str(path),
                expected=f"image_processor_type: one of {', '.join(CLASS_DEFAULTS)}",
                found=str(name),
                next="text works; for pictures, add the class to engine/inputs/image_constants.py and its steps",
            )
        )
    return base


def _defaulted(path: Path, key: str, value: Any, class_name: str) -> Finding:
    return warning(
        "class-default",
        f"{key} is not in the file; {value} is the default of {class_name}, as transformers takes it",
        file=str(path),
        expected=key,
        found="no such key",
        next=f"check {key} against the model's release",
    )


def _is_used(finding: Finding, values: Mapping[str, Any]) -> bool:
    """Whether a defaulted constant belongs to a step that is on."""
    step = {"image_mean": "do_normalize", "image_std": "do_normalize", "size": "do_resize", "resample": "do_resize"}
    step |= {"crop_size": "do_center_crop", "rescale_factor": "do_rescale"}
    return bool(values.get(step[finding.expected or ""]))


def _standard(path: Path, key: str, value: Any, to_square: bool | None) -> Any:
    """A value in the form the steps use."""
    if key in ("size", "crop_size", "pad_size"):
        return _size(path, key, value, to_square=to_square is not False or key != "size")
    if key in ("image_mean", "image_std"):
        numbers = [value] * 3 if isinstance(value, int | float) else value
        is_valid = isinstance(numbers, Sequence) and len(numbers) == 3
        if not is_valid or not all(isinstance(number, int | float) for number in numbers):
            _invalid(path, key, "three numbers", value)
        if key == "image_std" and not all(numbers):
            _invalid(path, key, "numbers other than zero", value)
        return tuple(float(number) for number in numbers)
    if key == "resample":
        if value not in range(6):
            _invalid(path, key, "0 to 5, a filter of Pillow", value)
        return int(value)
    if key == "rescale_factor":
        if not isinstance(value, int | float):
            _invalid(path, key, "a number", value)
        return float(value)
    return bool(value)


def _size(path: Path, key: str, value: Any, to_square: bool) -> dict[str, int]:
    if isinstance(value, int) and not isinstance(value, bool):
        value = {"height": value, "width": value} if to_square else {"shortest_edge": value}
    elif isinstance(value, list | tuple) and len(value) == 2:
        value = {"height": value[0], "width": value[1]}
    expected = " or ".join(" and ".join(sorted(keys)) for keys in SIZE_KEYS)
    if not isinstance(value, Mapping):
        _invalid(path, key, expected, value)
    size = {str(name): number for name, number in value.items() if number is not None}
    allowed = SIZE_KEYS if key == "size" else SIZE_KEYS[:1]
    if set(size) not in allowed or not all(isinstance(n, int) and n > 0 for n in size.values()):
        _invalid(path, key, expected if key == "size" else "height and width", value)
    return size


def _invalid(path: Path, key: str, expected: str, value: Any) -> NoReturn:
    raise Refused(
        fatal(
            "side-file-invalid",
            f"{key} of {path.name} cannot be used",
            file=str(path),
            expected=expected,
            found=str(value),
        )
    )


def _check_needed(path: Path, values: Mapping[str, Any]) -> None:
    """A step that is on needs its constants."""
    needs = {
        "do_resize": ("size", "resample"),
        "do_center_crop": ("crop_size",),
        "do_rescale": ("rescale_factor",),
        "do_normalize": ("image_mean", "image_std"),
    }
    for step, keys in needs.items():
        for key in keys:
            if values.get(step) and key not in values:
                raise Refused(
                    fatal(
                        "missing-side-file",
                        f"{step} is on but {key} is in no file, and is not guessed",
                        file=str(path),
                        expected=key,
                        found="no such key",
                        next=f"fetch {path.name} of the model's release again, or add {key} from its documentation",
                    )
                )
