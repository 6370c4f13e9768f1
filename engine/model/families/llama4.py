"""Llama 4 (text): chunks of positions where layers rotate, sharpened queries where they do not, experts weighed on the
way in, on every so many-th layer.
"""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import (
    ATTENTION,
    TRUNK,
    decoder,
    gqa,
    in_layers,
    mlp,
    one_a_layer,
    rms,
    rope,
    rotated_layers,
)
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.mixtures import mixture, router
from firstlight.engine.model.rules import rule
from firstlight.engine.model.spec import MLP, Attention, ModelSpec, MoE, Norm, Temperature


def _chunks(config: Config, rotated: list[bool]) -> list[int | None]:
    chunk = config.stated("attention_chunk_size", absent=8192)
    kinds = config.get("layer_types", ["chunked_attention" if one else "full_attention" for one in rotated])
    kinds = one_a_layer(config, "layer_types", kinds, "chunked_attention", "full_attention")
    return [chunk if kind == "chunked_attention" else None for kind in kinds]


def _temperature(config: Config) -> Temperature | None:
    strength, length = float(config.get("attn_scale", 0.1)), float(config.get("floor_scale", 8192))
    if not config.get("attn_temperature_tuning", True):
        return None
    return Temperature(strength=strength, length=config.positive("floor_scale", length), offset=1)


def _experts(config: Config) -> MoE:
    chooses = router(config, scoring="sigmoid", normalize=False)
    shared = mlp(config)
    return mixture(config, chooses, "intermediate_size", shared=shared, weigh_input=True)


def spec(config: Config) -> ModelSpec:
    norm = rms(config, 1e-5)
    size, bias = int(config.get("head_dim", 128)), bool(config.get("attention_bias", False))
    rotated = rotated_layers(config, 4)
    chunks, temperature = _chunks(config, rotated), _temperature(config)
    positions = rope(config, size, 500000.0, interleaved=True)
    normed = Norm(eps=norm.eps, weight=False) if config.get("use_qk_norm", True) else None

    def attention(index: int) -> Attention:
        turns = rotated[index]
        return gqa(
            config,
            head_dim=size,
            scale=size**-0.5,
            rope=positions if turns else None,
            qk_norm=normed if turns else None,
            qk_norm_last=True,
            temperature=None if turns else temperature,
            chunk=chunks[index],
            qkv_bias=bias,
            output_bias=bias,
        )

    dense = mlp(config, "intermediate_size_mlp")
    moe, step, count = _experts(config), int(config.get("interleave_moe_layer_step", 1)), len(rotated)
    sparse = set(config.get("moe_layers", range(step - 1, count, step)))

    def feed_forward(index: int) -> MLP | MoE:
        return moe if index in sparse else dense

    config.get("for_llm_compressor"), config.get("cache_implementation")  # how other programs hold the same numbers
    return decoder(config, "llama4_text", attention, feed_forward, norm=norm)


_F = "(model.|)layers.{i}.feed_forward."
_O = "layers.{i}.ffn."
RULES = (
    TRUNK
    + ATTENTION
    + in_layers({f"feed_forward.{part}_proj": f"ffn.{part}" for part in ("gate", "up", "down")})
    + in_layers({f"feed_forward.shared_expert.{part}_proj": f"ffn.shared.{part}" for part in ("gate", "up", "down")})
    + (
        rule(_F + "router.weight", _O + "router.weight"),
        rule(
            _F + "experts.gate_up_proj",
            _O + "experts.{e}.gate.weight",
            _O + "experts.{e}.up.weight",
            stacked=True,
            split_dim=1,
            transpose=True,
        ),
        rule(_F + "experts.down_proj", _O + "experts.{e}.down.weight", stacked=True, transpose=True),
        *(
            rule(f"{_F}experts.{{e}}.{part}_proj.weight", f"{_O}experts.{{e}}.{part}.weight")
            for part in ("gate", "up", "down")
        ),
    )
)
FAMILY = Family(
    name="llama4",
    model_types=("llama4_text",),
    spec=spec,
    rules=RULES,
    silent={"llama4_text": {"num_key_value_heads": 8}},
)
