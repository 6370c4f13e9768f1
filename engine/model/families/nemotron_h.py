"""Nemotron-H and Nemotron 3: one block a layer, by a pattern: Mamba 2, attention without positions, an MLP, experts."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import activation, computed_dtype, gqa, in_layers
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.mixtures import mixture, sigmoid_router
from firstlight.engine.model.families.state_spaces import BACKBONE, MAMBA2_RULES, layer_kinds, limits, whole_groups
from firstlight.engine.model.rules import rule
from firstlight.engine.model.spec import MLP, Attention, Latent, LayerSpec, Mamba2, ModelSpec, MoE, Norm

KINDS = ("linear_attention", "full_attention", "mlp", "moe")
LETTERS = dict(zip("M*-E", KINDS, strict=True))

# Keys that follow from others, say in which order to work, or speak of training and of layers left out of inference.
IDLE = """chunk_size expand mamba_proj_bias moe_shared_expert_overlap mtp_hybrid_override_pattern mtp_layers_block_type
norm_eps num_logits_to_keep num_nextn_predict_layers partial_rotary_factor rescale_prenorm_residual residual_in_fp32
rope_theta time_step_floor time_step_max use_mamba_kernels""".split()


def kinds(config: Config) -> list[str]:
    """What each layer is: listed, or a letter each."""
    listed, pattern = layer_kinds(config, *KINDS), config.get("hybrid_override_pattern")
    if listed is None and pattern is None:
        listed = [KINDS[0], KINDS[3], KINDS[1], KINDS[2]]
    for letter in sorted(set(pattern or "") - set(LETTERS)):
        config.unsupported("hybrid_override_pattern", letter, "M (Mamba 2), * (attention), - (MLP) or E (experts)")
    found = listed or [LETTERS[letter] for letter in pattern]
    if int(config.get("num_hidden_layers", len(found))) != len(found):
        config.refuse("num_hidden_layers", config.get("num_hidden_layers"), f"the {len(found)} layers of the pattern")
    return found


def state_space(config: Config, eps: float) -> Mamba2:
    config.only("mamba_hidden_act", "silu", default="silu")
    config.only("mamba_ssm_cache_dtype", "float32", default="float32")
    bias = bool(config.get("use_bias", False))
    low = float(config.get("time_step_min", 0.001))  # the reference's own limits; time_step_limit it does not read
    limits(config)
    mixer = Mamba2(
        num_heads=config.size("mamba_num_heads"),
        head_dim=config.size("mamba_head_dim"),
        state_dim=config.size("ssm_state_size"),
        num_groups=int(config.get("n_groups", config.get("mamba_n_groups", 8))),
        eps=eps,
        conv=int(config.get("conv_kernel", 4)),
        conv_bias=bool(config.get("use_conv_bias", True)),
        bias=bias,
        output_bias=bias,
        dt_limits=(low, None),
    )
    return whole_groups(config, mixer)


def attention(config: Config) -> Attention:
    config.only("attention_bias", False, default=False)
    config.only("sliding_window", None)
    size = int(config.get("head_dim", 128))
    return gqa(config, rope=None, head_dim=size, scale=size**-0.5)


def experts(config: Config, act: str) -> MoE:
    bias, latent = bool(config.get("mlp_bias", False)), config.get("moe_latent_size")
    if bias and latent:
        config.unsupported("mlp_bias", True, "false where experts work at a width of their own (moe_latent_size)")
    config.only("n_shared_experts", 1, default=1)
    shared = MLP(
        intermediate=config.size("moe_shared_expert_intermediate_size"), activation=act, gated=False, bias=bias
    )
    return mixture(
        config,
        sigmoid_router(config),
        activation=act,
        gated=False,
        shared=shared,
        latent=Latent(width=int(latent)) if latent else None,
    )


def spec(config: Config) -> ModelSpec:
    norm = Norm(eps=config.positive("layer_norm_epsilon", config.get("layer_norm_epsilon", 1e-5)))
    act, order = activation(config, "mlp_hidden_act", "relu2"), kinds(config)
    for key in IDLE:
        config.get(key)
    width = MLP(
        intermediate=config.size("intermediate_size"),
        activation=act,
        gated=False,
        bias=bool(config.get("mlp_bias", False)),
    )
    blocks = {
        "linear_attention": lambda: LayerSpec(mixer=state_space(config, norm.eps), ffn=None, mixer_norm=norm),
        "full_attention": lambda: LayerSpec(mixer=attention(config), ffn=None, mixer_norm=norm),
        "mlp": lambda: LayerSpec(mixer=None, ffn=width, mixer_norm=norm),
        "moe": lambda: LayerSpec(mixer=None, ffn=experts(config, act), mixer_norm=norm),
    }
    layers = {kind: blocks[kind]() for kind in dict.fromkeys(order)}
    return ModelSpec(
        family="nemotron_h",
        vocab_size=config.size("vocab_size"),
        hidden=config.size("hidden_size"),
        layers=tuple(layers[kind] for kind in order),
        final_norm=norm,
        tied_head=bool(config.get("tie_word_embeddings", False)),
        max_positions=int(config.get("max_position_embeddings", 4096)),
        dtype=computed_dtype(config),
    )


_L = "(backbone|model).layers.{i}.mixer."
_F = "layers.{i}.ffn."
RULES = (
    *BACKBONE,
    *MAMBA2_RULES,
    *(rule(f"{_L}{part}_proj.weight", f"layers.{{i}}.mixer.{part}.weight") for part in "qkvo"),
    *in_layers({"up_proj": "ffn.up", "down_proj": "ffn.down", "gate": "ffn.router"}, _L),
    *in_layers({f"shared_experts.{part}_proj": f"ffn.shared.{part}" for part in ("up", "down")}, _L),
    *(rule(f"{_L}experts.{{e}}.{part}_proj.weight", f"{_F}experts.{{e}}.{part}.weight") for part in ("up", "down")),
    *(rule(f"{_L}experts.{part}_proj", f"{_F}experts.{{e}}.{part}.weight", stacked=True) for part in ("up", "down")),
    rule(_L + "gate.e_score_correction_bias", _F + "router.correction_bias"),
    rule(_L + "fc1_latent_proj.weight", _F + "latent.down.weight"),
    rule(_L + "fc2_latent_proj.weight", _F + "latent.up.weight"),
)
FAMILY = Family(
    name="nemotron_h",
    model_types=("nemotron_h",),
    spec=spec,
    rules=RULES,
    silent={"nemotron_h": {"num_key_value_heads": 8}},
)
