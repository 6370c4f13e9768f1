"""The constants of a checkpoint's image processor, each with the file or class that it was taken from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, fatal, note, warning
from firstlight.engine.inputs import side_files
from firstlight.engine.inputs.image_kinds.kind import ImageKind
from firstlight.engine.inputs.image_kinds.registry import CLASS_OF_MODEL_TYPE, IMAGE_KINDS, kind_of
from firstlight.engine.inputs.image_values import standard

# Keys whose default decides what the model sees: taking one from the class is a warning, not a note.
WEIGHTY = frozenset(
    {"image_mean", "image_std", "size", "crop_size", "rescale_factor", "resample", "patch_size", "merge_size"}
    | {"temporal_patch_size", "image_grid_pinpoints", "max_image_size", "max_patches", "in_token_limit"}
)
# The step that a key belongs to, where a step can be off.
STEP_OF = {
    "image_mean": "do_normalize",
    "image_std": "do_normalize",
    "size": "do_resize",
    "resample": "do_resize",
    "crop_size": "do_center_crop",
    "rescale_factor": "do_rescale",
}


class Constant(msgspec.Struct, frozen=True, kw_only=True):
    """One constant, its value and where it comes from: a file with the key in it, or a class of transformers."""

    name: str
    value: Any
    source: str


class ImageConstants(msgspec.Struct, frozen=True, kw_only=True):
    """An image processor's constants in the form its steps use; `constants` traces each, `findings` the defaults."""

    class_name: str
    kind: ImageKind
    file: str
    values: Mapping[str, Any]
    constants: tuple[Constant, ...]
    findings: tuple[Finding, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name)


def read_constants(
    directory: str | Path, overrides: Mapping[str, Any] | None = None, overrides_source: str = ""
) -> ImageConstants:
    """The image processor's constants of a checkpoint directory.

    `overrides`: values that the processor class passes to its image processor regardless of the file, and
    `overrides_source` for the record.

    Raises `Refused`: missing-side-file where neither processor_config.json (with an `image_processor`) nor
    preprocessor_config.json is there, unsupported-block for a class whose steps are not known, side-file-invalid for a
    value no step can use. Constants are never made up: a key the file leaves out is taken from the class it names, and
    `findings` says so.
    """
    directory = Path(directory)
    path, prefix, config = _find(directory)
    class_name, kind = _class(directory, path, config)
    sources = {key: f"{path.name}: {prefix}{key}" for key in kind.keys}
    raw = {key: config.get(key) for key in kind.keys}
    for key, value, where in kind.renamed(config, kind.defaults) if kind.renamed else ():
        raw[key], sources[key] = value, f"{path.name}: {prefix}{where}"
    for key, value in (overrides or {}).items():
        raw[key], sources[key] = value, overrides_source
    values: dict[str, Any] = {}
    constants, findings = [], []
    for key in kind.keys:
        value, source = raw[key], sources[key]
        if value is None:
            value, source = kind.defaults.get(key), f"default of {class_name}"
            if value is not None and key in WEIGHTY:
                findings.append(_defaulted(path, key, value, class_name))
        if value is None:
            continue
        to_square = values.get("default_to_square") if key == "size" else True
        values[key] = standard(path, key, value, kind, to_square is not False)
        constants.append(Constant(name=key, value=values[key], source=source))
    _check_needed(path, values)
    return ImageConstants(
        class_name=class_name,
        kind=kind,
        file=str(path),
        values=values,
        constants=tuple(constants),
        findings=(
            *_conflicts(directory, path, config, kind),
            *(f for f in findings if _is_used(f, values)),
            *_backend(path, config, kind),
        ),
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


def _conflicts(directory: Path, path: Path, config: Mapping[str, Any], kind: ImageKind) -> tuple[Finding, ...]:
    """Warnings for constants that differ in the file that is not used."""
    other = directory / side_files.PREPROCESSOR_CONFIG
    second = side_files.read_json_if_present(other) if other != path else None
    if second is None:
        return ()
    keys = [key for key in kind.keys if None not in (config.get(key), second.get(key)) and config[key] != second[key]]
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


def _backend(path: Path, config: Mapping[str, Any], kind: ImageKind) -> tuple[Finding, ...]:
    """A note where the file names a class that resizes with torchvision, which is not used here."""
    name = config.get("image_processor_type")
    if not isinstance(name, str) or not name.endswith("Fast") or kind.torchvision:
        return ()
    return (
        note(
            "class-default",
            f"{name} resizes by torchvision where that is installed; pictures are resized by Pillow here, as "
            "transformers does without it",
            file=str(path),
            expected="Pillow, exact to transformers without torchvision",
            found=f"{name}: on pictures up to 2 of 255 levels apart for bilinear, 9 for bicubic",
            next="compare with the vendor's processor where torchvision is not installed, or allow for the difference",
        ),
    )


def _class(directory: Path, path: Path, config: Mapping[str, Any]) -> tuple[str, ImageKind]:
    """The name of the image processor class and its implementation; refused if the class is unknown."""
    model = side_files.read_json_if_present(directory / side_files.CONFIG) or {}
    name = config.get("image_processor_type")
    if name is None and config.get("feature_extractor_type") is not None:
        name = str(config["feature_extractor_type"]).replace("FeatureExtractor", "ImageProcessor")
    remote = side_files.nested(config, "auto_map", "AutoImageProcessor")
    if name is None and isinstance(remote, str):
        name = remote.rpartition(".")[2]
    if name is None:
        name = CLASS_OF_MODEL_TYPE.get(str(model.get("model_type")))
    found = kind_of(str(name))
    if found is None:
        raise Refused(
            fatal(
                "unsupported-block",
                f"the steps of image processor {name} are not known"
                if name
                else f"{path.name} names no image processor",
                file=str(path),
                expected=f"image_processor_type: one of {', '.join(IMAGE_KINDS)}",
                found=str(name),
                next="text works; for pictures, add the class to engine/inputs/image_kinds",
            )
        )
    return found


def _defaulted(path: Path, key: str, value: Any, class_name: str) -> Finding:
    return warning(
        "class-default",
        f"{key} is not in the file; {value} is used, the default of {class_name} in transformers",
        file=str(path),
        expected=key,
        found="no such key",
        next=f"check {key} against the model's release",
    )


def _is_used(finding: Finding, values: Mapping[str, Any]) -> bool:
    """Whether a constant taken from the class's defaults belongs to a step that is enabled."""
    step = STEP_OF.get(finding.expected or "")
    return step is None or step not in values or bool(values[step])


def _check_needed(path: Path, values: Mapping[str, Any]) -> None:
    """Refuses if an enabled step lacks its constants."""
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
                        f"{step} is on but {key} is in no file; it is not guessed",
                        file=str(path),
                        expected=key,
                        found="no such key",
                        next=f"fetch {path.name} of the model's release again, or add {key} from its documentation",
                    )
                )
