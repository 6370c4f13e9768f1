"""LongCat-Flash: two latent attentions and two dense feed-forwards a layer, around experts that join at its end.

Some of the experts give back their input and cost nothing.
"""

import msgspec

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import ENDS, activation, decoder, mlp, rms, rope
from firstlight.engine.model.families.deepseek_v3 import MLA_RULES, score_scale
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.mixtures import mixture, router
from firstlight.engine.model.rules import WeightRule, ignored, rule
from firstlight.engine.model.spec import MLA, LayerSpec, ModelSpec, Norm


def _attention(config: Config) -> MLA:
    """Latents are scaled up to the layer's width; for the queries that is a factor on all scores."""
    hidden, nope, rotated = config.size("hidden_size"), config.size("qk_nope_head_dim"), config.size("qk_rope_head_dim")
    config.only("attention_method", "MLA", default="MLA")
    config.get("qk_head_dim"), config.get("head_dim"), config.get("num_key_value_heads")  # follow from the others
    low, latent = config.size("q_lora_rank"), config.size("kv_lora_rank")
    config.only("mla_scale_q_lora", True, default=True)
    config.only("mla_scale_kv_lora", True, default=True)
    positions = rope(config, rotated, 10000000.0, interleaved=True)
    return MLA(
        num_heads=config.size("num_attention_heads"),
        q_lora_rank=low,
        kv_lora_rank=latent,
        nope_dim=nope,
        rope_dim=rotated,
        v_dim=config.size("v_head_dim"),
        scale=score_scale(nope + rotated, positions) * (hidden / low) ** 0.5,
        norm=Norm(eps=1e-6),  # fixed in the reference, whatever rms_norm_eps says
        rope=positions,
        bias=bool(config.get("attention_bias", False)),
        kv_scale=(hidden / latent) ** 0.5,
    )


def spec(config: Config) -> ModelSpec:
    norm = rms(config, 1e-5)
    width = "ffn_hidden_size" if "ffn_hidden_size" in config else "intermediate_size"
    mixer, dense = _attention(config), mlp(config, width)
    part = LayerSpec(mixer=mixer, ffn=dense, mixer_norm=norm, ffn_norm=norm)
    config.get("intermediate_size"), config.get("moe_intermediate_size")  # other names of the two widths
    config.get("router_bias")  # the reference leaves it out
    config.only("zero_expert_type", "identity", default="identity")
    chooses = router(
        config,
        normalize=bool(config.only("norm_topk_prob", False, default=False)),
        scale=float(config.get("routed_scaling_factor", 6.0)),
        correction_bias=True,
        float32=True,
    )
    experts = mixture(
        config,
        chooses,
        "expert_ffn_hidden_size" if "expert_ffn_hidden_size" in config else "moe_intermediate_size",
        zero_experts=int(config.get("zero_expert_num", 256)),
        activation=activation(config),
    )
    layer = LayerSpec(parts=(part, part), shortcut=experts)
    count = config.size("num_layers") if "num_layers" in config else config.size("num_hidden_layers") // 2
    config.get("num_hidden_layers")  # counts each half, where it is there
    plain = decoder(config, "longcat_flash", mixer, dense, norm=norm, count=count)
    return msgspec.structs.replace(plain, layers=(layer,) * count)


def names(config: Config) -> tuple[WeightRule, ...]:
    """Experts that give back their input have first projections in some files all the same."""
    first = config.size("n_routed_experts")
    numbers = "|".join(str(first + index) for index in range(int(config.get("zero_expert_num", 256))))
    pattern = f"(model.|)layers.{{i}}.mlp.experts.({numbers}).(gate_proj|up_proj).{{*}}"
    return (ignored(pattern, "an expert that gives back its input"),) if numbers else ()


_L = "(model.|)layers.{i}."
_P = "layers.{i}.parts.{j}."
_S = "layers.{i}.shortcut."
RULES = (
    ENDS
    + tuple(
        msgspec.structs.replace(
            item,
            tensor=item.tensor.replace("self_attn.", "self_attn.{j}."),
            params=tuple(name.replace("layers.{i}.", _P) for name in item.params),
        )
        for item in MLA_RULES
    )
    + (
        *(rule(f"{_L}mlps.{{j}}.{name}_proj.weight", f"{_P}ffn.{name}.weight") for name in ("gate", "up", "down")),
        rule(_L + "input_layernorm.{j}.weight", _P + "mixer_norm.weight"),
        rule(_L + "post_attention_layernorm.{j}.weight", _P + "ffn_norm.weight"),
        *(
            rule(f"{_L}mlp.experts.{{e}}.{name}_proj.weight", f"{_S}experts.{{e}}.{name}.weight")
            for name in ("gate", "up", "down")
        ),
        rule(_L + "mlp.experts.down_proj", _S + "experts.{e}.down.weight", stacked=True),
        rule(_L + "mlp.router.classifier.weight", _S + "router.weight"),
        rule(_L + "mlp.router.e_score_correction_bias", _S + "router.correction_bias"),
    )
)
FAMILY = Family(name="longcat_flash", model_types=("longcat_flash",), spec=spec, rules=RULES, left_out=names)
