"""MoonViT as releases of Kimi configure and name it: the tower of `vision_config` and its projector."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import activation
from firstlight.engine.model.families.vision_common import axial, count, layer
from firstlight.engine.model.rules import WeightRule, rule
from firstlight.engine.model.spec import MergedProjector, MoonViT, Norm

FLOAT32_EPS = 2.0**-23  # torch's own for an RMSNorm that is given none
PROJECTORS = ("patchmerger", "patchmergerv2")  # a norm of each patch before it, or one of what comes out


def moonvit(config: Config, text_hidden: int, image_token_id: int) -> MoonViT:
    """The tower; what a file does not state is Kimi K2.5's. `config` is `vision_config`."""
    for key, known in (("pos_emb_type", "divided_fixed"), ("merge_type", "sd2_tpool"), ("mlp_type", "mlp2")):
        config.only(key, known, default=known)
    config.get("video_attn_type"), config.get("model_type")
    hidden = config.size("vt_hidden_size", "hidden_size")
    heads = config.size("vt_num_attention_heads", "num_attention_heads")
    act = "activation_func" if "activation_func" in config else "hidden_act"
    is_rms = config.only("norm_type", "layernorm", "rmsnorm", default="layernorm") == "rmsnorm"
    norm = Norm(eps=FLOAT32_EPS) if is_rms else Norm(kind="layer", eps=1e-5, bias=True)
    head_dim, left = divmod(int(config.get("qkv_hidden_size", hidden)), heads)
    if left or head_dim % 4:
        config.refuse("qkv_hidden_size", config.get("qkv_hidden_size", hidden), f"{heads} heads of a multiple of 4")
    down, across = (int(size) for size in config.get("merge_kernel_size", [2, 2]))
    attention_bias = bool(config.get("attn_bias", True))
    one = layer(
        norm,
        heads,
        heads * head_dim,
        config.size("vt_intermediate_size", "intermediate_size"),
        activation(config, act, "gelu_pytorch_tanh"),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=bool(config.get("linear_bias", True)),
    )
    grid, read_square = _grid(config)
    return MoonViT(
        patch_size=config.size("patch_size"),
        hidden=hidden,
        layers=(one,) * config.size("vt_num_hidden_layers", "num_hidden_layers"),
        grid=grid,
        read_square=read_square,
        frames=count(config, "init_pos_emb_time", 4, "pos_emb_time"),
        interpolation=config.only("pos_emb_interpolation_mode", "bilinear", "bicubic", default="bicubic"),
        rope_theta=axial(config).theta,
        norm=norm,
        merge=(down, across),
        projector=_projector(config, hidden, down * across, text_hidden),
        image_token_id=image_token_id,
        patch_bias=bool(config.get("patch_embed_proj_bias", True)),
    )


def _grid(config: Config) -> tuple[tuple[int, int], bool]:
    """Rows and columns of learned positions, and whether they are read as a square.

    Releases' own code, whose keys begin with `init_`, stretches a grid of any shape. transformers 5.24, whose keys do
    not, counts through the table as if it had as many columns as rows; a file of its making is read as it reads it.
    """
    rows = config.size("init_pos_emb_height", "pos_emb_height")
    columns = config.size("init_pos_emb_width", "pos_emb_width")
    if rows == columns or "init_pos_emb_height" in config:
        return (rows, columns), False
    if rows > columns:
        config.refuse("pos_emb_height", rows, f"at most pos_emb_width, {columns}: transformers reads beyond the table")
    config.warn(
        "config-invalid",
        f"pos_emb_height {rows} differs from pos_emb_width {columns}: positions are taken as a square of {rows}, as "
        "transformers takes them",
        expected="the same height and width",
        found=f"{rows} x {columns}",
        next="for a release's own reading, name the keys init_pos_emb_height and init_pos_emb_width",
    )
    return (rows, columns), True


def _projector(config: Config, hidden: int, kernel: int, text_hidden: int) -> MergedProjector:
    is_post = config.only("mm_projector_type", *PROJECTORS, default=PROJECTORS[0]) == PROJECTORS[1]
    eps, out = config.positive("projector_ln_eps", config.get("projector_ln_eps", 1e-5)), text_hidden
    for key, expected in (("mm_hidden_size", hidden), ("text_hidden_size", out)):
        if config.get(key, expected) != expected:
            config.refuse(key, config.get(key), f"{expected}, as the tower and the text have it")
    return MergedProjector(
        widths=(hidden * kernel, hidden * kernel, out),
        activation=activation(config, "projector_hidden_act", "gelu"),
        bias=not is_post,
        pre_norm=None if is_post else Norm(kind="layer", eps=eps, bias=True),
        post_norm=Norm(eps=eps) if is_post else None,
    )


_V, _B = "(|model.)vision_tower.", "(|model.)vision_tower.(encoder.|)(blocks|layers).{i}."
_P = "(|model.)mm_projector."
_NAMES = {  # theirs, older and newer -> ours
    _V + "(|encoder.)patch_embed.proj": "vision.patch_embed",
    _V + "(encoder.|)final_layernorm": "vision.norm",
    _B + "norm0": "vision.layers.{i}.mixer_norm",
    _B + "norm1": "vision.layers.{i}.ffn_norm",
    _B + "wo": "vision.layers.{i}.mixer.o",
    _B + "mlp.fc0": "vision.layers.{i}.ffn.up",
    _B + "mlp.fc1": "vision.layers.{i}.ffn.down",
    _P + "pre_norm": "projector.pre_norm",
    _P + "post_norm": "projector.post_norm",
    _P + "proj.0": "projector.0",
    _P + "proj.2": "projector.1",
}
MOONVIT_RULES: tuple[WeightRule, ...] = (
    rule(_V + "patch_embed.pos_emb.weight", "vision.position_embed.weight"),
    *(rule(f"{theirs}.{kind}", f"{ours}.{kind}") for theirs, ours in _NAMES.items() for kind in ("weight", "bias")),
    *(
        rule(f"{_B}wqkv.{kind}", *(f"vision.layers.{{i}}.mixer.{part}.{kind}" for part in "qkv"))
        for kind in ("weight", "bias")
    ),
)
