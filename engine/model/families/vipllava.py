"""ViP-LLaVA: LLaVA over the states of several layers of its tower side by side, behind a norm."""

import msgspec

from firstlight.engine.model.config import Config
from firstlight.engine.model.families import llava
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.vision_common import both
from firstlight.engine.model.spec import ModelSpec, Norm, VisionSpec

LAYERS = [-2, -5, -8, -11, 6]


def spec(config: Config, text: ModelSpec) -> ModelSpec:
    config.assume(vision_feature_layer=config.get("vision_feature_layers", LAYERS), projector_layernorm_eps=1e-5)
    config.get("image_seq_length")
    whole = llava.spec(config, text)
    tower = whole.vision
    if not isinstance(tower, VisionSpec) or not tower.class_token:
        config.unsupported("vision_config", config.sub("vision_config").get("model_type"), "clip_vision_model")
    assert isinstance(tower, VisionSpec)
    eps = config.positive("projector_layernorm_eps", config.get("projector_layernorm_eps"))
    projector = msgspec.structs.replace(tower.projector, norm=Norm(kind="layer", eps=eps, bias=True))
    vision = msgspec.structs.replace(tower, projector=projector, drop_first=True)
    return msgspec.structs.replace(whole, family="vipllava", vision=vision)


RULES = (*llava.RULES, *both("(model.|)multi_modal_projector.projector_layernorm", "projector.norm"))
FAMILY = Family(name="vipllava", model_types=("vipllava",), spec=spec, rules=RULES, parts=(llava.TEXT,))
