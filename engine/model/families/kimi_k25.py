"""Kimi K2.5 and Kimi-VL: MoonViT and its projector over DeepSeek-V3's decoder."""

import msgspec

from firstlight.engine.model.config import Config
from firstlight.engine.model.families import deepseek_v3
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.moonvit import MOONVIT_RULES, moonvit
from firstlight.engine.model.families.vision_common import both, image_token, tied, tower_config
from firstlight.engine.model.rules import Part, under
from firstlight.engine.model.spec import ModelSpec

TOKEN = 163605


def spec(config: Config, text: ModelSpec) -> ModelSpec:
    kind = str(config.need("model_type"))
    vision = tower_config(config, "moonvit", "kimi")
    for key in ("video_placeholder", "use_unified_vision_chunk", "image_token_id", "video_token_id"):
        config.get(key)  # of videos, and former names
    for key in ("vision_start_token_id", "vision_end_token_id"):
        config.get(key)  # marks around pictures are tokens like others
    tower = moonvit(vision, text.hidden, image_token(config, TOKEN, "media_placeholder_token_id"))
    if config.get("projection_hidden_size", tower.hidden) != tower.hidden:
        config.refuse("projection_hidden_size", config.get("projection_hidden_size"), f"{tower.hidden}, the tower's")
    eps = config.get("projection_layer_norm_eps")
    if eps is not None and tower.projector.pre_norm is not None:
        norm = msgspec.structs.replace(tower.projector.pre_norm, eps=config.positive("projection_layer_norm_eps", eps))
        tower = msgspec.structs.replace(tower, projector=msgspec.structs.replace(tower.projector, pre_norm=norm))
    return msgspec.structs.replace(text, family=kind, vision=tower, tied_head=tied(config, text))


_P = "(model.|)multi_modal_projector."
_BLOCKS = tuple(
    msgspec.structs.replace(one, tensor=one.tensor.replace("layers.{i}.", "blocks.{i}.")) for one in deepseek_v3.RULES
)
RULES = (
    *MOONVIT_RULES,
    *both(_P + "pre_norm", "projector.pre_norm"),
    *both(_P + "linear_1", "projector.0"),
    *both(_P + "linear_2", "projector.1"),
    # transformers 5.24 writes the decoder's layers as blocks, like the tower's
    *under("language_model.", (one for one in _BLOCKS if "blocks.{i}." in one.tensor)),
)
TEXT = Part(key="text_config", prefix="(language_model.|model.language_model.|)", default="deepseek_v3")
FAMILY = Family(name="kimi_k25", model_types=("kimi_k25", "kimi_vl"), spec=spec, rules=RULES, parts=(TEXT,))
