"""How many placeholder tokens stand for a picture in the prompt: one entry per processor class.

A new class is one function here and one line in `EXPANSIONS`; a class that is not listed is refused, not guessed at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.inputs import side_files
from firstlight.engine.inputs.image_constants import Constant
from firstlight.engine.inputs.tokenizer import Tokenizer

Tensors = Mapping[str, NDArray[np.generic]]


class Expansion(msgspec.Struct, frozen=True):
    """What the processor class writes for pictures: the placeholder, its id, and how often it stands for each.

    `counts` raises `Refused` where the checkpoint's files do not say how often; a prompt without pictures never asks.
    """

    class_name: str
    token: str
    token_id: int
    counts: Callable[[Tensors], tuple[int, ...]]
    constants: tuple[Constant, ...] = ()


def _llava(path: Path, config: Mapping[str, Any], tokenizer: Tokenizer) -> Expansion:
    """LLaVA: a token per patch, less the class token where the features leave it out, plus what the tower adds."""
    patch = config.get("patch_size")
    extra = int(config.get("num_additional_image_tokens") or 0)
    strategy = config.get("vision_feature_select_strategy")
    token = tokenizer.special_tokens.get("image_token") or config.get("image_token") or "<image>"
    found = {
        "patch_size": patch,
        "vision_feature_select_strategy": strategy,
        "num_additional_image_tokens": extra,
        "image_token": token,
    }

    def counts(tensors: Tensors) -> tuple[int, ...]:
        if not isinstance(patch, int) or patch < 1:
            _refuse_unknown_patch(path, patch)
        images, _, height, width = tensors["pixel_values"].shape
        count = (height // patch) * (width // patch) + extra - (strategy == "default")
        return (count,) * images

    return Expansion(
        class_name="LlavaProcessor",
        token=token,
        token_id=tokenizer.encode(token, add_special_tokens=False)[0],
        counts=counts,
        constants=tuple(
            Constant(
                name=name, value=value, source=f"{path.name}: {name}" if name in config else "default of LlavaProcessor"
            )
            for name, value in found.items()
        ),
    )


def _refuse_unknown_patch(path: Path, patch: object) -> NoReturn:
    why = "how many tokens stand for a picture is unknown without its patch_size"
    if not path.is_file():
        raise Refused(side_files.missing(path, why))
    model = side_files.read_json_if_present(path.parent / side_files.CONFIG) or {}
    raise Refused(
        fatal(
            "missing-side-file",
            f"patch_size is not in {path.name}: {why}",
            file=str(path),
            expected="patch_size, as the vision tower has it",
            found="no such key" if patch is None else str(patch),
            next=f"add it; vision_config of config.json says {side_files.nested(model, 'vision_config', 'patch_size')}",
        )
    )


EXPANSIONS: Mapping[str, Callable[[Path, Mapping[str, Any], Tokenizer], Expansion]] = {
    "LlavaProcessor": _llava,
}

# The processor class transformers takes by model type where no file names one.
CLASS_OF_MODEL_TYPE = {"llava": "LlavaProcessor", "vipllava": "LlavaProcessor"}


def processor_class(directory: Path) -> tuple[str | None, Path]:
    """The processor class of a checkpoint and the file that names it; None where the checkpoint has no processor."""
    path = directory / side_files.PROCESSOR_CONFIG
    processor = side_files.read_json_if_present(path) or {}
    image = directory / side_files.PREPROCESSOR_CONFIG
    nested = processor.get("image_processor")
    places = (
        (processor, path),
        (nested if isinstance(nested, Mapping) else {}, path),
        (side_files.read_json_if_present(image) or {}, image),
        (
            side_files.read_json_if_present(directory / side_files.TOKENIZER_CONFIG) or {},
            directory / side_files.TOKENIZER_CONFIG,
        ),
        (side_files.read_json_if_present(directory / side_files.CONFIG) or {}, directory / side_files.CONFIG),
    )
    for config, file in places:
        if config.get("processor_class"):
            return str(config["processor_class"]), file
    model = places[-1][0]
    return CLASS_OF_MODEL_TYPE.get(str(model.get("model_type"))), directory / side_files.CONFIG


def read_expansion(directory: Path, tokenizer: Tokenizer) -> Expansion:
    """How the checkpoint's processor writes pictures; raises `Refused` (unsupported-block, missing-side-file)."""
    name, file = processor_class(directory)
    if name is None or name not in EXPANSIONS:
        raise Refused(
            fatal(
                "unsupported-block",
                f"how processor {name} writes pictures into a prompt is not known"
                if name
                else "the checkpoint names no processor, so it takes no pictures",
                file=str(file),
                expected=f"processor_class: one of {', '.join(EXPANSIONS)}",
                found=str(name),
                next="send text only; for pictures, add the class to engine/inputs/placeholders.py",
            )
        )
    path = directory / side_files.PROCESSOR_CONFIG
    return EXPANSIONS[name](path, side_files.read_json_if_present(path) or {}, tokenizer)
