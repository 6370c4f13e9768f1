"""Readings that many families share: rotary positions, attention, feed-forward, decoders, and their usual rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from firstlight.engine.model.config import Config
from firstlight.engine.model.rules import WeightRule, ignored, rule
from firstlight.engine.model.spec import (
    MLP,
    Attention,
    FeedForward,
    LayerSpec,
    Mixer,
    ModelSpec,
    Norm,
    Rope,
    RopeScaling,
    Temperature,
)

ACTIVATIONS = {  # names in configs -> names of kernels/gated_activation
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
}
ROPE_ELSEWHERE = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "max_position_embeddings")
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def activation(config: Config, key: str = "hidden_act", default: str = "silu") -> str:
    """The activation by the kernels' name; an unknown one is refused."""
    return ACTIVATIONS[config.only(key, *ACTIVATIONS, default=default)]


def rope(
    config: Config,
    dim: int,
    theta: float = 10000.0,
    interleaved: bool = False,
    partial: float | None = None,
    kind: str | None = None,
    read_elsewhere: tuple[str, ...] = (),
) -> Rope:
    """Rotary positions from `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (4).

    Where both name a base and disagree the newer key wins and the conflict is reported. `theta` and `partial` are the
    defaults of the architecture when the file is silent. `partial_rotary_factor` is applied to `dim`; `partial` None
    says that the architecture's code never asks for it and rotates all of `dim`. `kind` picks the parameters of a kind
    of layers (`full_attention`) where the file has them by kind. `read_elsewhere` are keys among the parameters that
    the family reads itself.
    """
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    by_kind = kind is not None and isinstance(new.get(kind), Mapping)
    new = new[kind] if by_kind else _of_one_kind(config, new)
    value = _base(
        config, new.get("rope_theta"), old.get("rope_theta"), None if by_kind else config.get("rope_theta"), theta
    )
    both = {**old, **new}
    fields = {key: value for key, value in both.items() if value is not None and key not in read_elsewhere}
    share = 1.0 if "partial_rotary_factor" in read_elsewhere else _rotated_share(config, fields, partial)
    if fields.get("alpha") and fields.get("rope_type", fields.get("type")) == "dynamic":  # HunYuan: stretched for good
        value *= float(fields["alpha"]) ** (dim / (dim - 2))
        fields = {}
    max_positions = int(config.get("max_position_embeddings", 0))
    return Rope(
        theta=value,
        dim=dim if fields.get("rope_type") == "proportional" else int(dim * share),
        interleaved=interleaved,
        max_positions=max_positions,
        scaling=_rope_scaling(config, fields, max_positions),
    )


def _base(config: Config, new: Any, old: Any, outer: Any, default: float) -> float:
    """The rotary base: of `rope_parameters`, of `rope_scaling`, or of the key beside them; conflicts are reported."""
    places = (("rope_parameters.rope_theta", new), ("rope_scaling.rope_theta", old), ("rope_theta", outer))
    (used, stated), *others = [(where, value) for where, value in places if value is not None] or [("", None)]
    for where, value in others:
        if float(value) != float(stated):
            config.warn(
                "conflicting-flag",
                f"{where} and {used} disagree; {used.partition('.')[0]} is used",
                expected=f"{used} = {stated}",
                found=f"{where} = {value}",
                next="verify at positions beyond 4,000, where a wrong base shows",
            )
    if stated is None:
        config.warn(
            "config-invalid",
            f"no rope base in {config.where}; the architecture's default {default:g} is used",
            expected="rope_theta or rope_parameters.rope_theta",
            found="absent",
            next="check the release's config.json; verify at long positions",
        )
    return config.positive("rope_theta", default if stated is None else float(stated))


def _rotated_share(config: Config, fields: Mapping[str, Any], partial: float | None) -> float:
    """How much of a head rotates; code that never asks rotates all of it, which is said."""
    key, kind = "partial_rotary_factor", fields.get("rope_type", fields.get("type")) or "default"
    share = float(fields.get(key, config.get(key, 1.0 if partial is None else partial)))
    if partial is not None or share == 1.0 or kind == "proportional":
        return share
    if kind not in ("default", "mrope"):
        config.unsupported(key, share, f"1.0: with positions of type {kind} this architecture rotates whole heads")
    config.warn(
        "unread-config-key",
        f"{config.where}: {key} = {share} is not read by this architecture's code; whole heads are rotated",
        expected="1.0, or no such key",
        found=str(share),
        next="if the release's own code rotates a part of each head, it is another architecture: register a family",
    )
    return 1.0


def _of_one_kind(config: Config, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Parameters for all layers; those given by kinds of layers only where all kinds have the same."""
    kinds = {key: value for key, value in fields.items() if isinstance(value, Mapping)}
    if not any("rope_theta" in value or "rope_type" in value for value in kinds.values()):
        return fields
    first, *others = kinds.values()
    if any(dict(other) != dict(first) for other in others):
        config.unsupported("rope_parameters", ", ".join(kinds), "one set of parameters: all layers rotate alike here")
    return {**{key: value for key, value in fields.items() if key not in kinds}, **first}


def silent_rope(config: Config, **fields: Any) -> None:
    """Rotary parameters that an architecture's code takes where config.json says nothing of them at all."""
    if any(key in config for key in ("rope_parameters", "rope_scaling")):
        return
    if "rope_theta" not in config:
        config.assume(rope_parameters=fields)
    elif fields.get("rope_type", "default") != "default":
        config.warn(
            "config-invalid",
            f"{config.where} has a rope base and no scaling; positions are rotated plainly, though the "
            f"architecture's own default is {fields['rope_type']}",
            expected="rope_scaling or rope_parameters",
            found="absent",
            next="check the release's config.json; verify at long positions",
        )


def rope_of_kind(
    config: Config, dim: int, kind: str, theta: float, local: float | None = None, partial: float | None = None
) -> Rope:
    """Rotary positions where layers with windows have their own: unstretched, of base `rope_local_base_freq`.

    Newer files have parameters by kind. `theta` and `local` are the architecture's defaults; without `local` windows
    rotate by the base of the other layers.
    """
    if kind == "full_attention" or isinstance((config.get("rope_parameters") or {}).get(kind), Mapping):
        return rope(config, dim, theta, kind=kind, partial=partial)
    base = config.get("rope_local_base_freq", local or config.get("rope_theta", theta))
    return Rope(theta=config.positive("rope_local_base_freq", base), dim=dim)


def llama4_temperature(config: Config) -> Temperature | None:
    """How Mistral's releases of 2025 sharpen the queries of far positions: Llama 4's formula, other key names."""
    fields = config.get("rope_parameters") or {}
    strength, length = fields.get("llama_4_scaling_beta"), fields.get("original_max_position_embeddings")
    if not strength:
        return None
    return Temperature(
        strength=float(strength), length=config.positive("original_max_position_embeddings", length or 0)
    )


def _rope_scaling(config: Config, fields: dict[str, Any], max_positions: int) -> RopeScaling | None:
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind in ("default", "mrope", None):
        return None
    kind = {"su": "longrope", "deepseek_yarn": "yarn"}.get(kind, kind)  # names of first releases
    fields = {key: value for key, value in fields.items() if not key.startswith("mrope_")}  # vision families read them
    known = ("linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
    if kind not in known:
        config.unsupported("rope_scaling.rope_type", kind, ", ".join(known))
    known_fields = {
        "factor": ("factor", float),
        "original_max_position_embeddings": ("original_max_positions", int),
        "low_freq_factor": ("low_freq_factor", float),
        "high_freq_factor": ("high_freq_factor", float),
        "beta_fast": ("beta_fast", float),
        "beta_slow": ("beta_slow", float),
        "mscale": ("mscale", float),
        "mscale_all_dim": ("mscale_all_dim", float),
        "attention_factor": ("attention_factor", float),
        "truncate": ("truncate", bool),
        "short_factor": ("short_factor", tuple),
        "long_factor": ("long_factor", tuple),
    }
    read: dict[str, Any] = {}
    for key, value in fields.items():
        if key in known_fields and value is not None:
            name, convert = known_fields[key]
            read[name] = convert(value)
        elif key not in ROPE_ELSEWHERE and value is not None:
            config.unsupported(f"rope_scaling.{key}", value, "a key that a rotary variant here reads")
    if kind in ("llama3", "yarn", "longrope") and "original_max_position_embeddings" in config:
        read["original_max_positions"] = config.size("original_max_position_embeddings")  # the outer key wins
    original = read.setdefault("original_max_positions", max_positions)
    if kind in ("yarn", "longrope") and original and "factor" not in read:
        read["factor"] = config.size("max_position_embeddings") / original
    if kind == "proportional":
        read["share"] = float(fields.get("partial_rotary_factor", 1.0))
    config.positive("rope_scaling.factor", read.get("factor", 1.0))
    return RopeScaling(kind=kind, **read)


def head_dim(config: Config) -> int:
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    size = int(config.get("head_dim", hidden // heads))
    if size < 1:
        config.refuse("num_attention_heads", heads, f"at most hidden_size {hidden}")
    return size


def gqa(config: Config, **fields: Any) -> Attention:
    """Grouped-query attention from the usual keys; `fields` overrides or adds."""
    size, heads = head_dim(config), config.size("num_attention_heads")
    values: dict[str, Any] = {
        "num_heads": heads,
        "num_kv_heads": int(config.get("num_key_value_heads", heads)),
        "head_dim": size,
        "scale": size**-0.5,
    }
    if "rope" not in fields:
        values["rope"] = rope(config, size)
    values.update(fields)
    spec = Attention(**values)
    if spec.num_heads % spec.num_kv_heads:
        config.refuse("num_key_value_heads", spec.num_kv_heads, f"a divisor of num_attention_heads {spec.num_heads}")
    return spec


def mlp(config: Config, key: str = "intermediate_size", **fields: Any) -> MLP:
    """A gated MLP from the usual keys."""
    return MLP(**{"intermediate": config.size(key), "activation": activation(config), **fields})


def plain_mlp(config: Config, act: str, bias: bool) -> MLP:
    """A feed-forward without a gate from the usual keys; `act` is the default of the architecture."""
    return mlp(config, activation=activation(config, default=act), gated=False, bias=bias)


def rms(config: Config, default: float = 1e-6) -> Norm:
    return Norm(eps=config.positive("rms_norm_eps", config.get("rms_norm_eps", default)))


def layer_norm(config: Config, key: str, default: float = 1e-5, **fields: Any) -> Norm:
    """LayerNorm with weight and bias; its epsilon under `key`."""
    return Norm(kind="layer", eps=config.positive(key, config.get(key, default)), **{"bias": True, **fields})


def one_a_layer(config: Config, key: str, values: Sequence[Any], *known: str) -> list[Any]:
    """`values`, which `key` holds: as many as layers and, where `known` are given, each one of these; else refused."""
    for value in values:
        if known and value not in known:
            config.unsupported(key, value, " or ".join(known))
    count = config.size("num_hidden_layers")
    if len(values) != count:
        config.refuse(key, f"{len(values)} entries", f"{count} entries, one a layer")
    return list(values)


def layer_windows(config: Config, window: int | None) -> list[int | None]:
    """The window of each layer: `layer_types` decides where present, else every layer has `window`."""
    types = config.get("layer_types")
    if types is None:
        return [window] * config.size("num_hidden_layers")
    kinds = one_a_layer(config, "layer_types", types, "full_attention", "sliding_attention")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def rotated_layers(config: Config, interval: int = 0) -> list[bool]:
    """Which layers rotate: all, unless the file lists those that do, or every so many-th does not."""
    count, every = config.size("num_hidden_layers"), int(config.get("no_rope_layer_interval", interval))
    default = [not every or bool((index + 1) % every) for index in range(count)]
    listed = config.get("no_rope_layers") or default  # 1: the layer rotates
    return [bool(one) for one in one_a_layer(config, "no_rope_layers", listed)]


PRE = ("mixer_norm", "ffn_norm")  # where a layer has norms
POST = ("post_mixer_norm", "post_ffn_norm")
SANDWICH = PRE + POST


def decoder(
    config: Config,
    family: str,
    mixer: Mixer | Callable[[int], Mixer],
    ffn: FeedForward | Callable[[int], FeedForward | None],
    *,
    norm: Norm | None = None,
    norms: tuple[str, ...] = PRE,
    layer: Mapping[str, Any] | None = None,
    count: int | None = None,
    tie_default: bool = False,
    **fields: Any,
) -> ModelSpec:
    """A decoder of `mixer` and `ffn`, of which each is the same in all layers or a function of a layer's index.

    Everything else comes from the usual keys.
    `norms` are the places of a layer that have `norm`; `layer` are further fields of every layer. `count` is the number
    of layers where the usual key does not say it.
    """
    norm = norm or rms(config)
    layers = tuple(
        LayerSpec(
            mixer=mixer(index) if callable(mixer) else mixer,
            ffn=ffn(index) if callable(ffn) else ffn,
            **{**dict.fromkeys(norms, norm), **(layer or {})},
        )
        for index in range(count or config.size("num_hidden_layers"))
    )
    values: dict[str, Any] = {
        "family": family,
        "vocab_size": config.size("vocab_size"),
        "hidden": config.size("hidden_size"),
        "layers": layers,
        "final_norm": norm,
        "tied_head": bool(config.get("tie_word_embeddings", tie_default)),
        "max_positions": _reach(config),
        "dtype": computed_dtype(config),
    }
    return ModelSpec(**{**values, **fields})


def computed_dtype(config: Config, silent: str = "bfloat16") -> str:
    """The dtype that a release is meant to be computed in; one that nothing here computes in is said.

    `silent` is the architecture's where the file says nothing, or nothing that will do.
    """
    key = "dtype" if "dtype" in config else "torch_dtype"
    named = config.get(key, silent)
    if not isinstance(named, str):
        config.refuse(key, named, "the name of a dtype")
    found = DTYPES.get(named.removeprefix("torch."))
    if found is None and named != "auto":
        config.warn(
            "config-invalid",
            f"{config.where}: {key} = {named[:40]} is no dtype that is computed in here; {silent} is taken",
            expected=" or ".join(DTYPES),
            found=named[:40],
            next=f"nothing, if {silent} will do; --dtype chooses another",
        )
    return found or DTYPES[silent]


def _reach(config: Config) -> int:
    """Positions the model is made for: dynamic scaling stretches the trained length, the others state the result."""
    trained = int(config.get("max_position_embeddings", 0))
    fields = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    is_dynamic = fields.get("rope_type", fields.get("type")) == "dynamic"
    return int(trained * float(fields.get("factor", 1.0))) if is_dynamic else trained


_M = "(model.|)"
_L = _M + "layers.{i}."


def in_layers(names: Mapping[str, str], layer: str = _L) -> tuple[WeightRule, ...]:
    """Weights and biases of layers by their names below `layer`: theirs -> ours."""
    return tuple(
        rule(f"{layer}{theirs}.{kind}", f"layers.{{i}}.{ours}.{kind}")
        for theirs, ours in names.items()
        for kind in ("weight", "bias")
    )


ENDS: tuple[WeightRule, ...] = (
    rule(_M + "embed_tokens.weight", "embed.weight"),
    rule(_M + "(norm|final_layernorm).weight", "norm.weight"),
    rule(_M + "(norm|final_layernorm).bias", "norm.bias"),
    rule("lm_head.weight", "head.weight"),
    rule("lm_head.bias", "head.bias"),
    ignored(_L + "self_attn.rotary_emb.inv_freq", "recomputed from the configuration"),
)
TRUNK = ENDS + in_layers({"input_layernorm": "mixer_norm", "post_attention_layernorm": "ffn_norm"})
POST_NORMS = in_layers({"post_attention_layernorm": "post_mixer_norm", "post_feedforward_layernorm": "post_ffn_norm"})
SANDWICH_NORMS = POST_NORMS + in_layers({"input_layernorm": "mixer_norm", "pre_feedforward_layernorm": "ffn_norm"})
FUSED_ATTENTION = (
    rule(_L + "self_attn.qkv_proj.weight", *(f"layers.{{i}}.mixer.{part}.weight" for part in "qkv")),
    rule(_L + "self_attn.qkv_proj.bias", *(f"layers.{{i}}.mixer.{part}.bias" for part in "qkv")),
)
FUSED_DENSE = (rule(_L + "mlp.gate_up_proj.weight", *(f"layers.{{i}}.ffn.{part}.weight" for part in ("gate", "up"))),)
ATTENTION: tuple[WeightRule, ...] = tuple(
    rule(f"{_L}self_attn.{part}_proj.{kind}", f"layers.{{i}}.mixer.{part}.{kind}")
    for part in "qkvo"
    for kind in ("weight", "bias")
)
QK_NORM: tuple[WeightRule, ...] = tuple(
    rule(f"{_L}self_attn.{part}_norm.weight", f"layers.{{i}}.mixer.{part}_norm.weight") for part in "qk"
)
DENSE: tuple[WeightRule, ...] = tuple(
    rule(f"{_L}mlp.{part}_proj.{kind}", f"layers.{{i}}.ffn.{part}.{kind}")
    for part in ("gate", "up", "down")
    for kind in ("weight", "bias")
)
LLAMA = TRUNK + ATTENTION + DENSE  # the names that most decoders took over


def experts(block: str, gate: str, up: str, down: str) -> tuple[WeightRule, ...]:
    """Routed experts stored one by one, or fused as transformers 5 keeps them in memory (gate and up stacked).

    Exporters of quantized weights take the fused ones apart under names of their own, `gate_proj` and the like.
    """
    usual = {"gate": gate, "up": up, "down": down}
    names = ((part, name if name == f"{part}_proj" else f"({name}|{part}_proj)") for part, name in usual.items())
    single = tuple(
        rule(f"{_L}{block}.experts.{{e}}.{name}.weight", f"layers.{{i}}.ffn.experts.{{e}}.{part}.weight")
        for part, name in names
    )
    fused = (
        rule(
            f"{_L}{block}.experts.gate_up_proj",
            "layers.{i}.ffn.experts.{e}.gate.weight",
            "layers.{i}.ffn.experts.{e}.up.weight",
            stacked=True,
        ),
        rule(f"{_L}{block}.experts.down_proj", "layers.{i}.ffn.experts.{e}.down.weight", stacked=True),
        rule(f"{_L}{block}.gate.weight", "layers.{i}.ffn.router.weight"),
    )
    return single + fused
