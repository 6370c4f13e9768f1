"""LLaVA-NeXT: LLaVA over the whole picture and the tiles of a canvas that suits it."""

import msgspec

from firstlight.engine.model.config import Config
from firstlight.engine.model.families import llava
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.rules import rule
from firstlight.engine.model.spec import AnyRes, ModelSpec, VisionSpec

PINPOINTS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))


def spec(config: Config, text: ModelSpec) -> ModelSpec:
    whole = llava.spec(config, text)
    tower = whole.vision
    if not isinstance(tower, VisionSpec) or tower.tokens_per_image != tower.num_patches:
        config.unsupported(
            "vision_feature_select_strategy",
            config.get("vision_feature_select_strategy", "default"),
            "one that leaves a tower of fixed size with its patches alone",
        )
    assert isinstance(tower, VisionSpec)
    given = config.get("image_grid_pinpoints", PINPOINTS)
    resolutions = tuple((int(height), int(width)) for height, width in given)
    if any(size % tower.image_size or size < 1 for one in resolutions for size in one) or not resolutions:
        config.refuse("image_grid_pinpoints", given, f"[height, width] in tiles of {tower.image_size}")
    config.get("use_image_newline_parameter"), config.get("image_seq_length")
    vision = AnyRes(tower=tower, resolutions=resolutions, text_hidden=text.hidden)
    return msgspec.structs.replace(whole, family="llava_next", vision=vision)


RULES = (*llava.RULES, rule("(model.|)image_newline", "projector.row_end"))
FAMILY = Family(name="llava_next", model_types=("llava_next",), spec=spec, rules=RULES, parts=(llava.TEXT,))
