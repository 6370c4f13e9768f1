"""What a model is, as frozen data: the one description that scan, plan, load, start, verify and profile all use.

No torch. Each block variant declares its own parameters and what it keeps per token, so a shape is stated once.
Axes and dims: placements name mesh axes (`tp`, `ep`); dims are tensor dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from firstlight.engine.findings import Finding
from firstlight.engine.parallel.placement import Expert, Placement, Shard, Vocab

Role = Literal["embedding", "attention", "mlp", "expert", "router", "norm", "head", "vision", "projector"]
FIRST_STAGE = -1  # `Param.layer` of what belongs to the first pipeline stage
LAST_STAGE = 1 << 30  # ... and to the last


class Param(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter of the model, in global shape.

    Parameters that share `storage` lie in one allocation: concatenated along dim 0 in the order declared and, with an
    `expert`, stacked over the rank's experts. `dtype` pins a storage dtype (`F32`); None follows the run.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    layer: int
    placements: tuple[Placement, ...] = ()
    storage: str = ""
    expert: int | None = None
    dtype: str | None = None

    @property
    def home(self) -> str:
        return self.storage or self.name

    @property
    def elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """Where a block sits while it declares its parameters: name prefix, layer, width of the residual stream, tower."""

    prefix: str
    layer: int
    hidden: int
    vision: bool = False

    def into(self, name: str) -> Scope:
        return msgspec.structs.replace(self, prefix=f"{self.prefix}{name}.")

    def param(
        self,
        name: str,
        *shape: int,
        role: Role,
        place: tuple[Placement, ...] = (),
        storage: str = "",
        expert: int | None = None,
        dtype: str | None = None,
    ) -> Param:
        """A parameter of this block. The vision tower is replicated: it is small and runs once a picture."""
        return Param(
            name=self.prefix + name,
            shape=shape,
            role="vision" if self.vision and role != "projector" else role,
            layer=self.layer,
            placements=() if self.vision else place,
            storage=self.prefix + storage if storage else "",
            expert=expert,
            dtype=dtype,
        )


class Norm(msgspec.Struct, frozen=True, kw_only=True):
    """RMSNorm or LayerNorm over the last dim; `offset` 1.0 multiplies by (1 + weight)."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    bias: bool = False
    offset: float = 0.0

    def parameters(self, scope: Scope, size: int, place: tuple[Placement, ...] = ()) -> Iterator[Param]:
        yield scope.param("weight", size, role="norm", place=place)
        if self.bias:
            yield scope.param("bias", size, role="norm", place=place)


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """How rotary frequencies are stretched beyond the trained length; the names are those of released configs."""

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary positions over the first `dim` dims of each head, in halves or, `interleaved`, in neighbouring pairs."""

    theta: float
    dim: int
    interleaved: bool = False
    max_positions: int = 0
    scaling: RopeScaling | None = None


class CacheTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of [tokens, heads, dim] that a layer keeps; heads are divided over tp when `divided`."""

    name: str
    heads: int
    dim: int
    divided: bool

    def local_heads(self, tp: int) -> int:
        return max(1, self.heads // tp) if self.divided else self.heads


class CacheSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a layer keeps: tensors per token (the last `window` tokens only, if set) and state elements per sequence."""

    tensors: tuple[CacheTensor, ...] = ()
    window: int | None = None
    state_elements: int = 0

    @property
    def elements_per_token(self) -> int:
        return sum(tensor.heads * tensor.dim for tensor in self.tensors)


class Attention(msgspec.Struct, frozen=True, kw_only=True, tag="attention"):
    """Grouped-query attention; multi-head when `num_kv_heads == num_heads`. `scale` multiplies q k^T."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Norm | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    causal: bool = True

    def parameters(self, scope: Scope) -> Iterator[Param]:
        heads = Shard(0, self.num_heads, unit_name="query heads")
        kv_heads = Shard(0, self.num_kv_heads, replicate=True, unit_name="key/value heads")
        for part, count, place in (
            ("q", self.num_heads, heads),
            ("k", self.num_kv_heads, kv_heads),
            ("v", self.num_kv_heads, kv_heads),
        ):
            rows = count * self.head_dim
            yield scope.param(
                f"{part}.weight", rows, scope.hidden, role="attention", place=(place,), storage="qkv.weight"
            )
            if self.qkv_bias:
                yield scope.param(f"{part}.bias", rows, role="attention", place=(place,), storage="qkv.bias")
        width = self.num_heads * self.head_dim
        output = Shard(1, self.num_heads, unit_name="query heads")
        yield scope.param("o.weight", scope.hidden, width, role="attention", place=(output,))
        if self.output_bias:
            yield scope.param("o.bias", scope.hidden, role="attention")
        if self.sinks:
            yield scope.param("sinks", self.num_heads, role="attention", place=(heads,), dtype="F32")
        if self.qk_norm is not None:
            yield from self.qk_norm.parameters(scope.into("q_norm"), self.head_dim)
            yield from self.qk_norm.parameters(scope.into("k_norm"), self.head_dim)

    def cache(self) -> CacheSpec:
        if not self.causal:
            return CacheSpec()
        return CacheSpec(
            tensors=tuple(
                CacheTensor(name=name, heads=self.num_kv_heads, dim=self.head_dim, divided=True) for name in ("k", "v")
            ),
            window=self.window,
        )


class MLA(msgspec.Struct, frozen=True, kw_only=True, tag="mla"):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values come from one latent per token."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    scale: float
    norm: Norm
    rope: Rope | None = None
    bias: bool = False

    def parameters(self, scope: Scope) -> Iterator[Param]:
        heads = Shard(0, self.num_heads, unit_name="query heads")
        q_rows = self.num_heads * (self.nope_dim + self.rope_dim)
        if self.q_lora_rank is None:
            yield scope.param("q.weight", q_rows, scope.hidden, role="attention", place=(heads,))
        else:
            yield scope.param("q_a.weight", self.q_lora_rank, scope.hidden, role="attention")
            if self.bias:
                yield scope.param("q_a.bias", self.q_lora_rank, role="attention")
            yield from self.norm.parameters(scope.into("q_a_norm"), self.q_lora_rank)
            yield scope.param("q_b.weight", q_rows, self.q_lora_rank, role="attention", place=(heads,))
        latent = self.kv_lora_rank + self.rope_dim
        yield scope.param("kv_a.weight", latent, scope.hidden, role="attention")
        if self.bias:
            yield scope.param("kv_a.bias", latent, role="attention")
        yield from self.norm.parameters(scope.into("kv_a_norm"), self.kv_lora_rank)
        kv_rows = self.num_heads * (self.nope_dim + self.v_dim)
        yield scope.param("kv_b.weight", kv_rows, self.kv_lora_rank, role="attention", place=(heads,))
        output = Shard(1, self.num_heads, unit_name="query heads")
        yield scope.param("o.weight", scope.hidden, self.num_heads * self.v_dim, role="attention", place=(output,))
        if self.bias:
            yield scope.param("o.bias", scope.hidden, role="attention")

    def cache(self) -> CacheSpec:
        latent = CacheTensor(name="latent", heads=1, dim=self.kv_lora_rank + self.rope_dim, divided=False)
        return CacheSpec(tensors=(latent,))


class MLP(msgspec.Struct, frozen=True, kw_only=True, tag="mlp"):
    """down(act(gate x) * up x), or down(act(up x)) when not `gated`."""

    intermediate: int
    activation: str
    gated: bool = True
    bias: bool = False

    def parameters(self, scope: Scope) -> Iterator[Param]:
        columns = Shard(0, self.intermediate, unit_name="feed-forward channels")
        for part in ("gate", "up") if self.gated else ("up",):
            yield scope.param(
                f"{part}.weight",
                self.intermediate,
                scope.hidden,
                role="mlp",
                place=(columns,),
                storage="gate_up.weight" if self.gated else "",
            )
            if self.bias:
                yield scope.param(
                    f"{part}.bias",
                    self.intermediate,
                    role="mlp",
                    place=(columns,),
                    storage="gate_up.bias" if self.gated else "",
                )
        rows = Shard(1, self.intermediate, unit_name="feed-forward channels")
        yield scope.param("down.weight", scope.hidden, self.intermediate, role="mlp", place=(rows,))
        if self.bias:
            yield scope.param("down.bias", scope.hidden, role="mlp")


class Router(msgspec.Struct, frozen=True, kw_only=True):
    """How experts are chosen and weighted for a token; see `kernels/router_topk` for the exact order of steps.

    `float32`: the router's logits are computed in float32 from the weight as stored.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    correction_bias: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    group_score: Literal["max", "top2_sum"] = "max"
    softmax_after: bool = False
    float32: bool = False


class MoE(msgspec.Struct, frozen=True, kw_only=True, tag="moe"):
    """Routed experts (gated MLPs of `intermediate`), optionally with a shared expert that sees every token."""

    num_experts: int
    intermediate: int
    activation: str
    router: Router
    shared: MLP | None = None
    shared_gate: bool = False

    def parameters(self, scope: Scope) -> Iterator[Param]:
        yield scope.param("router.weight", self.num_experts, scope.hidden, role="router")
        if self.router.correction_bias:
            yield scope.param("router.correction_bias", self.num_experts, role="router", dtype="F32")
        columns = Shard(0, self.intermediate, unit_name="expert channels")
        rows = Shard(1, self.intermediate, unit_name="expert channels")
        for expert in range(self.num_experts):
            owner = Expert(expert, self.num_experts)
            for part in ("gate", "up"):
                yield scope.param(
                    f"experts.{expert}.{part}.weight",
                    self.intermediate,
                    scope.hidden,
                    role="expert",
                    place=(owner, columns),
                    storage="experts.gate_up",
                    expert=expert,
                )
            yield scope.param(
                f"experts.{expert}.down.weight",
                scope.hidden,
                self.intermediate,
                role="expert",
                place=(owner, rows),
                storage="experts.down",
                expert=expert,
            )
        if self.shared is not None:
            yield from self.shared.parameters(scope.into("shared"))
        if self.shared_gate:
            yield scope.param("shared_gate.weight", 1, scope.hidden, role="router")


Mixer = Attention | MLA
FeedForward = MLP | MoE


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """x += post_mixer_norm(mixer(mixer_norm x)); x += post_ffn_norm(ffn(ffn_norm x)); an absent norm is identity."""

    mixer: Mixer
    ffn: FeedForward
    mixer_norm: Norm | None = None
    ffn_norm: Norm | None = None
    post_mixer_norm: Norm | None = None
    post_ffn_norm: Norm | None = None
    residual_scale: float = 1.0

    def parameters(self, scope: Scope) -> Iterator[Param]:
        for name in ("mixer_norm", "ffn_norm", "post_mixer_norm", "post_ffn_norm"):
            norm: Norm | None = getattr(self, name)
            if norm is not None:
                yield from norm.parameters(scope.into(name), scope.hidden)
        yield from self.mixer.parameters(scope.into("mixer"))
        yield from self.ffn.parameters(scope.into("ffn"))


class Projector(msgspec.Struct, frozen=True, kw_only=True):
    """Linear layers with an activation between them, from vision features to the decoder's width."""

    widths: tuple[int, ...]  # input, (hidden ...), output
    activation: str
    bias: bool

    def parameters(self, scope: Scope) -> Iterator[Param]:
        for index, (width_in, width_out) in enumerate(zip(self.widths, self.widths[1:], strict=False)):
            yield scope.param(f"{index}.weight", width_out, width_in, role="projector")
            if self.bias:
                yield scope.param(f"{index}.bias", width_out, role="projector")


class VisionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A CLIP- or SigLIP-type tower: patches plus learned positions, encoder layers, chosen features, projector.

    `feature_layers` index hidden states as transformers does (0 is the embedding, negative from the end);
    several are concatenated. `drop_first` removes the class token from the features.
    """

    image_size: int
    patch_size: int
    channels: int
    hidden: int
    layers: tuple[LayerSpec, ...]
    projector: Projector
    image_token_id: int
    patch_bias: bool = False
    class_token: bool = True
    pre_norm: Norm | None = None
    post_norm: Norm | None = None
    feature_layers: tuple[int, ...] = (-1,)
    drop_first: bool = False

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_positions(self) -> int:
        return self.num_patches + (1 if self.class_token else 0)

    @property
    def tokens_per_image(self) -> int:
        return self.num_positions - (1 if self.drop_first else 0)

    def parameters(self) -> Iterator[Param]:
        scope = Scope(prefix="vision.", layer=FIRST_STAGE, hidden=self.hidden, vision=True)
        yield scope.param(
            "patch_embed.weight", self.hidden, self.channels, self.patch_size, self.patch_size, role="vision"
        )
        if self.patch_bias:
            yield scope.param("patch_embed.bias", self.hidden, role="vision")
        if self.class_token:
            yield scope.param("class_embed", self.hidden, role="vision")
        yield scope.param("position_embed.weight", self.num_positions, self.hidden, role="vision")
        for name, norm in (("pre_norm", self.pre_norm), ("post_norm", self.post_norm)):
            if norm is not None:
                yield from norm.parameters(scope.into(name), self.hidden)
        for index, layer in enumerate(self.layers):
            yield from layer.parameters(scope.into(f"layers.{index}"))
        yield from self.projector.parameters(msgspec.structs.replace(scope, prefix="projector."))


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A whole model. `tied_head`: the output head is the embedding unless the checkpoint brings a head of its own."""

    family: str
    vocab_size: int
    hidden: int
    layers: tuple[LayerSpec, ...]
    final_norm: Norm
    tied_head: bool
    max_positions: int
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    head_bias: bool = False
    vision: VisionSpec | None = None
    mtp: tuple[LayerSpec, ...] = ()
    dtype: str = "BF16"
    findings: tuple[Finding, ...] = ()

    def parameters(self) -> tuple[Param, ...]:
        """Every parameter in global shape, in forward order; a tied head is declared too (`Ledger` says where from)."""
        scope = Scope(prefix="", layer=FIRST_STAGE, hidden=self.hidden)
        found: list[Param] = []
        if self.vision is not None:
            found.extend(self.vision.parameters())
        found.append(scope.param("embed.weight", self.vocab_size, self.hidden, role="embedding", place=(Vocab(0),)))
        for index, layer in enumerate(self.layers):
            found.extend(layer.parameters(Scope(prefix=f"layers.{index}.", layer=index, hidden=self.hidden)))
        last = msgspec.structs.replace(scope, layer=LAST_STAGE)
        found.extend(self.final_norm.parameters(last.into("norm"), self.hidden))
        found.append(last.param("head.weight", self.vocab_size, self.hidden, role="head", place=(Vocab(0),)))
        if self.head_bias:
            found.append(last.param("head.bias", self.vocab_size, role="head", place=(Vocab(0),)))
        return tuple(found)

    def mtp_parameters(self) -> tuple[Param, ...]:
        """Parameters of multi-token-prediction layers, stored behind the last layer; they are counted and never loaded.

        Each is a layer with two norms, a projection of [embedding | hidden], a norm and its own copies of embedding
        and head (DeepSeek-V3, arXiv 2412.19437, section 2.2).
        """
        found: list[Param] = []
        for index, layer in enumerate(self.mtp, start=self.num_layers):
            scope = Scope(prefix=f"mtp.{index}.", layer=index, hidden=self.hidden)
            found.extend(layer.parameters(scope))
            for name in ("embedding_norm", "hidden_norm", "norm"):
                found.extend(self.final_norm.parameters(scope.into(name), self.hidden))
            found.append(scope.param("project.weight", self.hidden, 2 * self.hidden, role="router"))
            found.append(scope.param("embed.weight", self.vocab_size, self.hidden, role="embedding"))
            found.append(scope.param("head.weight", self.vocab_size, self.hidden, role="head"))
        return tuple(found)

    @property
    def num_layers(self) -> int:
        return len(self.layers)
