"""LLaVA: a CLIP or SigLIP tower, a two-layer projector, and any decoder family of this engine for the text."""

import msgspec

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import activation
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.rules import Part, WeightRule, ignored, rule
from firstlight.engine.model.spec import MLP, Attention, LayerSpec, ModelSpec, Norm, Projector, VisionSpec


def _tower(config: Config) -> dict[str, object]:
    """The encoder of `vision_config` as fields of `VisionSpec`."""
    kind = config.only("model_type", "clip_vision_model", "siglip_vision_model", default="clip_vision_model")
    clip = kind == "clip_vision_model"
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    norm = Norm(kind="layer", eps=float(config.get("layer_norm_eps", 1e-5 if clip else 1e-6)), bias=True)
    head_dim = hidden // heads
    layer = LayerSpec(
        mixer=Attention(
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=True,
            output_bias=True,
            causal=False,
        ),
        ffn=MLP(
            intermediate=config.size("intermediate_size"),
            activation=activation(config, default="quick_gelu" if clip else "gelu_pytorch_tanh"),
            gated=False,
            bias=True,
        ),
        mixer_norm=norm,
        ffn_norm=norm,
    )
    config.get("vocab_size"), config.get("vision_use_head")
    return {
        "image_size": config.size("image_size"),
        "patch_size": config.size("patch_size"),
        "channels": int(config.get("num_channels", 3)),
        "hidden": hidden,
        "layers": (layer,) * config.size("num_hidden_layers"),
        "patch_bias": not clip,
        "class_token": clip,
        "pre_norm": norm if clip else None,
        "post_norm": norm,
    }


def spec(config: Config, text: ModelSpec) -> ModelSpec:
    features = config.stated("vision_feature_layer", absent=-2)
    features = tuple(features) if isinstance(features, list) else (features,)
    tower = _tower(config.sub("vision_config"))
    bias = bool(config.stated("multimodal_projector_bias", absent=True))
    vision = VisionSpec(
        **tower,  # type: ignore[arg-type]
        projector=Projector(
            widths=(int(tower["hidden"]) * len(features), text.hidden, text.hidden),  # type: ignore[call-overload]
            activation=activation(config, "projector_hidden_act", "gelu"),
            bias=bias,
        ),
        image_token_id=int(config.need("image_token_index", "image_token_id")),
        feature_layers=features,
        drop_first=config.only("vision_feature_select_strategy", "default", "full", default="default") == "default",
    )
    return msgspec.structs.replace(text, family="llava", vision=vision, tied_head=_tied(config, text))


def _tied(config: Config, text: ModelSpec) -> bool:
    """The tie flag may stand at either level; the text's own word counts, and a contradiction is reported."""
    outer, inner = config.get("tie_word_embeddings"), config.sub("text_config").raw.get("tie_word_embeddings")
    if outer is not None and inner is not None and bool(outer) != bool(inner):
        config.warn(
            "conflicting-flag",
            "tie_word_embeddings differs between the top level and text_config; a head in the checkpoint decides",
            expected=f"text_config: {inner}",
            found=f"top level: {outer}",
            next="see the ledger for where the output head came from",
        )
        return True
    return bool(text.tied_head or outer)


_V = "(model.|)vision_tower.(vision_model.|)"
_LAYER = _V + "encoder.layers.{i}."


def _both(theirs: str, ours: str) -> tuple[WeightRule, ...]:
    return tuple(rule(f"{theirs}.{kind}", f"{ours}.{kind}") for kind in ("weight", "bias"))


RULES: tuple[WeightRule, ...] = (
    rule(_V + "embeddings.class_embedding", "vision.class_embed"),
    rule(_V + "embeddings.position_embedding.weight", "vision.position_embed.weight"),
    ignored(_V + "embeddings.position_ids", "positions count from zero"),
    ignored(_V + "head.{*}", "pooling head, not used for features"),
    *_both(_V + "embeddings.patch_embedding", "vision.patch_embed"),
    *_both(_V + "(pre_layrnorm|pre_layernorm)", "vision.pre_norm"),
    *_both(_V + "post_layernorm", "vision.post_norm"),
    *_both(_LAYER + "layer_norm1", "vision.layers.{i}.mixer_norm"),
    *_both(_LAYER + "layer_norm2", "vision.layers.{i}.ffn_norm"),
    *_both(_LAYER + "mlp.fc1", "vision.layers.{i}.ffn.up"),
    *_both(_LAYER + "mlp.fc2", "vision.layers.{i}.ffn.down"),
    *(
        item
        for theirs, ours in (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("out_proj", "o"))
        for item in _both(f"{_LAYER}self_attn.{theirs}", f"vision.layers.{{i}}.mixer.{ours}")
    ),
    *_both("(model.|)multi_modal_projector.linear_1", "projector.0"),
    *_both("(model.|)multi_modal_projector.linear_2", "projector.1"),
)
TEXT = Part(key="text_config", prefix="(language_model.|model.language_model.|)", default="llama")
FAMILY = Family(name="llava", model_types=("llava",), spec=spec, rules=RULES, parts=(TEXT,))
