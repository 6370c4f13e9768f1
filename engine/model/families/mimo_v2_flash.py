"""MiMo-V2-Flash: values narrower than keys, windows with sinks and twice the key heads, experts as in DeepSeek-V3."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import ATTENTION, DENSE, TRUNK, decoder, gqa, mlp, rms, rope_of_kind
from firstlight.engine.model.families.deepseek_v3 import extra_layers
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.mixtures import MIXTURE, mixture, sigmoid_router, sparse_layers
from firstlight.engine.model.rules import rule
from firstlight.engine.model.spec import Attention, ModelSpec

FULL, WINDOW = "full_attention", "sliding_attention"


def _kinds(config: Config) -> list[str]:
    count = config.size("num_hidden_layers")
    regular = [FULL if index == 0 or (index + 1) % 6 == 0 else WINDOW for index in range(count)]
    kinds = config.get("layer_types", regular)
    for kind in set(kinds) - {FULL, WINDOW}:
        config.unsupported("layer_types", kind, f"{FULL} or {WINDOW}")
    if len(kinds) != count:
        config.refuse("layer_types", f"{len(kinds)} entries", f"{count} entries, one a layer")
    return list(kinds)


def spec(config: Config) -> ModelSpec:
    norm, size, few = rms(config, 1e-5), int(config.get("head_dim", 192)), config.size("num_key_value_heads")
    ropes = {kind: rope_of_kind(config, size, kind, theta) for kind, theta in ((FULL, 5000000.0), (WINDOW, 10000.0))}
    window = config.size("sliding_window")

    def attention(kind: str) -> Attention:
        near = kind == WINDOW
        return gqa(
            config,
            head_dim=size,
            num_kv_heads=few * 2 if near else few,
            scale=size**-0.5,
            v_dim=int(config.get("v_head_dim", 128)),
            v_scale=float(config.stated("attention_value_scale", absent=0.707) or 1.0),
            rope=ropes[kind],
            qkv_bias=bool(config.get("attention_bias", False)),
            window=window if near else None,
            sinks=near,
        )

    kinds, mixers = _kinds(config), {kind: attention(kind) for kind in (FULL, WINDOW)}
    dense, moe, sparse = mlp(config), mixture(config, sigmoid_router(config)), sparse_layers(config, 1)
    return decoder(
        config, "mimo_v2_flash", lambda i: mixers[kinds[i]], lambda i: moe if sparse[i] else dense, norm=norm
    )


SINKS = rule("(model.|)layers.{i}.self_attn.(sinks|attention_sink_bias)", "layers.{i}.mixer.sinks")
RULES = (*TRUNK, *ATTENTION, SINKS, *DENSE, *MIXTURE)
FAMILY = Family(name="mimo_v2_flash", model_types=("mimo_v2_flash",), spec=spec, rules=RULES, left_out=extra_layers)
