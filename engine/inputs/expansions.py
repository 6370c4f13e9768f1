"""How each processor class writes a picture into the prompt: one function a kind, one line in `EXPANSIONS` a class.

Source: transformers 5.24, models/*/processing_*.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.inputs import side_files
from firstlight.engine.inputs.image_constants import ImageConstants
from firstlight.engine.inputs.image_kinds.kind import Tensors
from firstlight.engine.inputs.placeholders import Expansion, Settings
from firstlight.engine.inputs.tokenizer import Tokenizer
from firstlight.engine.model.spec.anyres import best_resolution, cut_away


def _llava(settings: Settings) -> Expansion:
    """LLaVA: a token per patch, less the class token where the features leave it out, plus what the tower adds."""
    patch, extra, drops_one = _llava_keys(settings)
    token = settings.token("image_token", "<image>", from_config=_names_no_image_token(settings))

    def write(tensors: Tensors, constants: ImageConstants) -> tuple[str, ...]:
        images, _, height, width = tensors["pixel_values"].shape
        size = _known_patch(settings, patch, min(height, width))
        return (token * ((height // size) * (width // size) + extra - drops_one),) * images

    return settings.expansion(token, write, {"pixel_values": 4})


def _llava_next(settings: Settings) -> Expansion:
    """LLaVA-NeXT: the whole picture's patches, and those of its tiles without what was padded, a row end each."""
    patch, extra, drops_one = _llava_keys(settings)
    token = settings.token("image_token", "<image>", from_config=_names_no_image_token(settings))

    def write(tensors: Tensors, constants: ImageConstants) -> tuple[str, ...]:
        height, width = tensors["pixel_values"].shape[-2:]
        size = _known_patch(settings, patch, min(height, width))
        rows, columns = height // size, width // size
        whole = rows * columns + extra - drops_one
        return tuple(
            token * (whole + _unpadded(picture, (height, width), (rows, columns), constants))
            for picture in tensors["image_sizes"].tolist()
        )

    reads = {"pixel_values": 5, "image_sizes": 2}
    return settings.expansion(token, write, reads, overrides={"do_pad": True})


def _unpadded(picture: list[int], tile: tuple[int, int], patches: tuple[int, int], constants: ImageConstants) -> int:
    """Features of a picture's tiles: its own share of the canvas's patches, and the end of each row."""
    best = best_resolution(picture[0], picture[1], constants["image_grid_pinpoints"])
    assert best is not None, "the image processor refuses such pictures"
    rows, columns = patches[0] * (best[0] // tile[0]), patches[1] * (best[1] // tile[1])
    if not rows or not columns:
        expected = f"canvases of at least one tile, {tile[0]} x {tile[1]}"
        side_files.refuse_value(Path(constants.file), "image_grid_pinpoints", expected, best)
    above, left = cut_away(picture[0], picture[1], rows, columns)
    return (rows - 2 * above) * (columns - 2 * left + 1)


def _llava_keys(settings: Settings) -> tuple[Any, int, bool]:
    patch = settings.get("patch_size", None)
    strategy = settings.get("vision_feature_select_strategy", None)
    return patch, settings.count("num_additional_image_tokens", 0, least=0), strategy == "default"


def _names_no_image_token(settings: Settings) -> bool:
    return "image_token" not in settings.tokenizer.special_tokens


def _known_patch(settings: Settings, patch: Any, side: int) -> int:
    """The side of a patch in pixels; refused where no file has it, or where a picture of `side` pixels has no patch."""
    if not isinstance(patch, int) or patch < 1:
        _refuse_unknown_patch(settings, patch)
    if patch > side:
        side_files.refuse_value(settings.path, "patch_size", f"at most {side}, the side of the pixel tensor", patch)
    return patch


def _refuse_unknown_patch(settings: Settings, patch: object) -> NoReturn:
    path = settings.path
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


def _grid(token: str, typed: str | None = None, grid: str = "image_grid_thw") -> Callable[[Settings], Expansion]:
    """Qwen-VL, GLM-V, Kimi: a token for each merged patch of the picture's grid."""

    def read(settings: Settings) -> Expansion:
        image_token = settings.token("image_token", token)

        def write(tensors: Tensors, constants: ImageConstants) -> tuple[str, ...]:
            merged = constants["merge_size"] ** 2
            return tuple(image_token * (int(np.prod(sizes)) // merged) for sizes in tensors[grid].tolist())

        return settings.expansion(image_token, write, {grid: 2}, type_ids=typed)

    return read


def _minimax_m3(settings: Settings) -> Expansion:
    """MiniMax-M3: as many tokens as merged patches, between two marks; all three are fixed in the class."""
    token, first, last = "]<]image[>[", "]<]start of image[>[", "]<]end of image[>["

    def write(tensors: Tensors, constants: ImageConstants) -> tuple[str, ...]:
        merged = constants["merge_size"] ** 2
        return tuple(
            first + token * (int(np.prod(sizes)) // merged) + last for sizes in tensors["image_grid_thw"].tolist()
        )

    return settings.expansion(token, write, {"image_grid_thw": 2})


def _pixtral(settings: Settings) -> Expansion:
    """Pixtral: a token for each (merged) patch, one that ends each row, and another that ends the picture."""
    edge = settings.count("patch_size", 16) * settings.count("spatial_merge_size", 1)
    token = settings.token("image_token", "[IMG]", from_config=True)
    row_end = settings.token("image_break_token", "[IMG_BREAK]", from_config=True)
    end = settings.token("image_end_token", "[IMG_END]", from_config=True)

    def write(tensors: Tensors, constants: ImageConstants) -> tuple[str, ...]:
        return tuple(
            row_end.join([token * (width // edge)] * (height // edge)) + end
            for height, width in tensors["image_sizes"].tolist()
        )

    overrides = {"patch_size": {"height": edge, "width": edge}}
    return settings.expansion(token, write, {"image_sizes": 2}, overrides=overrides)


def _gemma3(settings: Settings) -> Expansion:
    """Gemma 3: a fixed number of tokens between marks and blank lines; crops come with a sentence."""
    begin, fill = settings.token("boi_token", None), settings.token("image_token", None)
    end = settings.token("eoi_token", None)
    one = f"\n\n{begin}{fill * settings.count('image_seq_length', 256)}{end}\n\n"

    def write(tensors: Tensors, constants: ImageConstants) -> tuple[str, ...]:
        return tuple(
            f"Here is the original image {one} and here are some crops to help you see better "
            + " ".join([one] * crops)
            if crops
            else one
            for crops in tensors["num_crops"].tolist()
        )

    overrides = {
        "do_convert_rgb": True,
        "do_pan_and_scan": False,
        "pan_and_scan_min_crop_size": 256,
        "pan_and_scan_max_num_crops": 4,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    }
    more: dict[str, Any] = {"overrides": overrides, "hidden": ("num_crops",), "type_ids": "token_type_ids"}
    return settings.expansion(begin, write, {"num_crops": 1}, fill, **more)


def _internvl(settings: Settings) -> Expansion:
    """InternVL: the tokens of all tiles in a row, between marks."""
    begin, end = settings.token("start_image_token", None), settings.token("end_image_token", None)
    fill, count = settings.token("context_image_token", None), settings.count("image_seq_length", 256)

    def write(tensors: Tensors, constants: ImageConstants) -> tuple[str, ...]:
        return tuple(f"{begin}{fill * count * tiles}{end}" for tiles in tensors["num_patches"].tolist())

    overrides = {"crop_to_patches": True}
    return settings.expansion(fill, write, {"num_patches": 1}, overrides=overrides, hidden=("num_patches",))


def _idefics3(reads_tokenizer: bool) -> Callable[[Settings], Expansion]:
    """Idefics3 and SmolVLM: each tile with its row and column, then the whole picture, all between marks."""

    def read(settings: Settings) -> Expansion:
        def named(name: str, default: str) -> str:
            return settings.token(name, default) if reads_tokenizer else default

        token = named("image_token", "<image>")
        mark = named("fake_image_token", "<fake_token_around_image>")
        whole = named("global_image_token", "<global-img>")
        count = settings.count("image_seq_len", 169)

        def text(rows: int, columns: int) -> Iterator[str]:
            for row in range(1, rows + 1):
                for column in range(1, columns + 1):
                    yield f"{mark}<row_{row}_col_{column}>{token * count}"
                yield "\n"
            yield "\n" if rows else ""
            yield f"{mark}{whole}{token * count}{mark}"

        def write(tensors: Tensors, constants: ImageConstants) -> tuple[str, ...]:
            grids = zip(tensors["rows"].ravel().tolist(), tensors["cols"].ravel().tolist(), strict=True)
            return tuple("".join(text(rows, columns)) for rows, columns in grids)

        return settings.expansion(token, write, {"rows": 2, "cols": 2}, hidden=("rows", "cols"))

    return read


def _llama4(settings: Settings) -> Expansion:
    """Llama 4: the patches of each tile, marks between columns and after rows, and the whole picture last."""
    edge = settings.count("patch_size", 14)
    shuffled = round(1.0 / settings.share("pixel_shuffle_ratio", 0.5) ** 2)
    token = settings.token("image_token", "<|image|>", from_config=True)

    def write(tensors: Tensors, constants: ImageConstants) -> tuple[str, ...]:
        height, width = tensors["pixel_values"].shape[-2:]
        patches = "<|patch|>" * ((height // edge) * (width // edge) // shuffled)
        return tuple(
            "<|image_start|>"
            + ("<|tile_x_separator|>".join([patches] * columns) + "<|tile_y_separator|>")
            * (rows * (rows * columns > 1))
            + f"<|image|>{patches}<|image_end|>"
            for rows, columns in tensors["aspect_ratios"].tolist()
        )

    reads = {"pixel_values": 4, "aspect_ratios": 2}
    return settings.expansion(token, write, reads, "<|patch|>", hidden=("aspect_ratios",))


_QWEN = _grid("<|image_pad|>", "mm_token_type_ids")
_GLM = _grid("<|image|>", "mm_token_type_ids")

EXPANSIONS: Mapping[str, Callable[[Settings], Expansion]] = {
    "LlavaProcessor": _llava,
    "LlavaNextProcessor": _llava_next,
    "Qwen2VLProcessor": _QWEN,
    "Qwen2_5_VLProcessor": _QWEN,
    "Qwen3VLProcessor": _QWEN,
    "Glm4vProcessor": _GLM,
    "Glm46VProcessor": _GLM,
    "PixtralProcessor": _pixtral,
    "Gemma3Processor": _gemma3,
    "InternVLProcessor": _internvl,
    "Idefics3Processor": _idefics3(reads_tokenizer=False),
    "SmolVLMProcessor": _idefics3(reads_tokenizer=True),
    "Llama4Processor": _llama4,
    "Kimi_K25Processor": _grid("<|media_pad|>"),
    "KimiK25Processor": _grid("<|media_pad|>"),  # the release's own code
    "KimiVLProcessor": _grid("<|media_pad|>", grid="image_grid_hws"),
    "KimiK3Processor": _grid("<|media_pad|>", grid="grid_thws"),
    "MiniMaxM3VLProcessor": _minimax_m3,
}

# The processor class transformers takes by model type where no file names one.
CLASS_OF_MODEL_TYPE: Mapping[str, str] = {
    "llava": "LlavaProcessor",
    "vipllava": "LlavaProcessor",
    "llava_next": "LlavaNextProcessor",
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "qwen3_vl_moe": "Qwen3VLProcessor",
    "qwen3_5": "Qwen3VLProcessor",
    "qwen3_5_moe": "Qwen3VLProcessor",
    "glm4v": "Glm4vProcessor",
    "glm4v_moe": "Glm4vProcessor",
    "glm46v": "Glm46VProcessor",
    "pixtral": "PixtralProcessor",
    "mistral3": "PixtralProcessor",
    "gemma3": "Gemma3Processor",
    "internvl": "InternVLProcessor",
    "idefics3": "Idefics3Processor",
    "smolvlm": "SmolVLMProcessor",
    "llama4": "Llama4Processor",
    "kimi_k25": "Kimi_K25Processor",
    "kimi_vl": "KimiVLProcessor",
    "kimi_k3": "KimiK3Processor",
    "minimax_m3_vl": "MiniMaxM3VLProcessor",
}


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
                next="send text only; for pictures, add the class to engine/inputs/expansions.py",
            )
        )
    path = directory / side_files.PROCESSOR_CONFIG
    config = side_files.read_json_if_present(path) or {}
    return EXPANSIONS[name](Settings(path, config, tokenizer, name))
