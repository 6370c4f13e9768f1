"""EXAONE 3 and 3.5, IQuest-Coder: Llama under other names, with other values where config.json is silent."""

from types import MappingProxyType

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import ATTENTION, DENSE, TRUNK, decoder, gqa, in_layers, mlp, rms, rope
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.rules import rule
from firstlight.engine.model.spec import ModelSpec

OLDER = {  # the keys of EXAONE's releases
    "num_hidden_layers": "num_layers",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}
DEFAULTS = MappingProxyType({"exaone": (500000.0, None), "iquestcoder": (10000.0, 128)})  # rotary base, width of a head


def spec(config: Config) -> ModelSpec:
    config.rename(OLDER)
    model_type = str(config.need("model_type"))
    theta, width = DEFAULTS[model_type]
    config.only("use_sliding_window", False, default=False)
    config.only("clip_qkv", None)
    own, bias = config.size("hidden_size") // config.size("num_attention_heads"), config.get("attention_bias", False)
    size = int(config.stated("head_dim", absent=width) or own)
    attention = gqa(
        config,
        head_dim=size,
        scale=size**-0.5,
        rope=rope(config, size, theta),
        qkv_bias=bool(bias),
        output_bias=bool(bias),
    )
    feed_forward = mlp(config, bias=bool(config.get("mlp_bias", False)))
    return decoder(config, model_type, attention, feed_forward, norm=rms(config, 1e-5))


_NAMES = {
    "ln_1": "mixer_norm",
    "ln_2": "ffn_norm",
    **{f"attn.attention.{theirs}": f"mixer.{theirs[0]}" for theirs in ("q_proj", "k_proj", "v_proj", "out_proj")},
    "mlp.c_fc_0": "ffn.gate",
    "mlp.c_fc_1": "ffn.up",
    "mlp.c_proj": "ffn.down",
}
RULES = (
    *TRUNK,
    *ATTENTION,
    *DENSE,
    rule("transformer.wte.weight", "embed.weight"),
    rule("transformer.ln_f.weight", "norm.weight"),
    *in_layers(_NAMES, "transformer.h.{i}."),
)
FAMILY = Family(
    name="exaone",
    model_types=tuple(DEFAULTS),
    spec=spec,
    rules=RULES,
    silent={name: {"num_key_value_heads": 8} for name in DEFAULTS},
    classes=dict.fromkeys(DEFAULTS, "LlamaForCausalLM"),
)
