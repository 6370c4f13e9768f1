"""An unknown architecture lined up with known blocks, by names, shapes and values of the configuration. No torch.

Nothing is taken for certain: each tensor pattern gets the parameter that its shape allows and its name speaks for, or
none, and every place where shapes and names leave a choice is a question for a person.

Legend: H hidden, V vocabulary, F feed-forward width, E experts, L layers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from firstlight.engine.weights.checkpoint import Checkpoint

_MEANINGS = """
qkv: qkv wqkv c_attn query_key_value qkv_proj in_proj_qkv
gate_up: gate_up gate_up_proj gateup w13 wi fc_in_fused
q: q query wq q_proj queries q_lin
k: k key wk k_proj keys k_lin
v: v value wv v_proj values v_lin
o: o out wo o_proj out_proj dense c_proj output proj attn_out o_lin merge
gate: gate w1 gate_proj wg gating fc_gate left
up: up w3 up_proj fc1 c_fc fc_in dense_h_to_4h wi_1 lin1 expand right
down: down w2 down_proj fc2 c_proj fc_out dense_4h_to_h wo lin2 contract
"""
WORDS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        part: frozenset(words.split())
        for part, _, words in (line.partition(":") for line in _MEANINGS.split("\n") if line)
    }
)
"""What parts of names mean, over many releases."""
ATTENTION = ("attn", "attention", "mixer", "self_attn", "mha", "look", "heads")
FEED = ("mlp", "ffn", "ff", "feed_forward", "feedforward", "moe", "experts", "expert", "think")
BEHIND = ("post", "after", "2", "ffn", "mlp", "second", "out", "ff", "feed", "final", "last")
COUNT_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
HIDDEN_KEYS = ("hidden_size", "n_embd", "d_model", "dim", "width", "model_dim")
VOCAB_KEYS = ("vocab_size", "n_vocab", "padded_vocab_size", "num_tokens")
HEAD_KEYS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "heads")
KV_KEYS = ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "n_head_kv", "kv_heads", "multi_query_group_num")
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "n_experts", "moe_num_experts")
WIDTH_WORDS = ("inter", "ff", "mlp", "inner", "feed", "ffw", "expert_dim", "hidden_dim")
TOP_KEYS = ("num_experts_per_tok", "top_k", "moe_top_k", "num_selected_experts", "experts_per_token")


class Pattern(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors of one name but for numbers: `template` has `{i}` for the layer and `{e}` for the expert."""

    template: str
    shape: tuple[int, ...]
    count: int
    in_layers: bool
    layers: tuple[int, ...] = ()

    @property
    def words(self) -> list[str]:
        """Parts of the name, the last ones first."""
        return [part for part in reversed(re.split(r"[.]", self.template)) if not part.startswith("{")]


class Match(msgspec.Struct, frozen=True, kw_only=True):
    """A pattern and what it fills; several parameters when they are stored as one. `why` is what speaks for it."""

    pattern: Pattern
    params: tuple[str, ...]
    why: str
    transpose: bool = False
    stacked: bool = False


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers that shapes are read with, each with the key of config.json that holds it ("" if none does)."""

    layers: tuple[int, str]
    hidden: tuple[int, str]
    vocab: tuple[int, str]
    heads: tuple[int, str]
    kv_heads: tuple[int, str]
    experts: tuple[int, str]
    top_k: tuple[int, str]
    head_dim: int = 0
    intermediate: tuple[int, str] = (0, "")


class Alignment(msgspec.Struct, frozen=True, kw_only=True):
    """What was recognised, what was not, and what a person has to decide."""

    sizes: Sizes
    matches: tuple[Match, ...]
    unmatched: tuple[Pattern, ...]
    questions: tuple[str, ...]
    config: dict[str, Any]
    as_many_keys: bool = False  # whether keys have as many rows as queries

    def filled(self) -> frozenset[str]:
        return frozenset(param for match in self.matches for param in match.params)


def align(checkpoint: Checkpoint) -> Alignment:
    """Lines the checkpoint's tensors up with attention, feed-forward, norms, embedding and head."""
    config = _text_config(checkpoint.config)
    sizes = _sizes(config, checkpoint)
    patterns = list(_patterns(checkpoint))
    found = _Finder(sizes)
    for pattern in patterns:
        found.look_at(pattern)
    found.settle()
    sizes = msgspec.structs.replace(sizes, head_dim=found.head_dim, intermediate=_named(config, found.intermediate))
    return Alignment(
        sizes=sizes,
        matches=tuple(found.matches),
        unmatched=tuple(found.unmatched),
        questions=tuple(dict.fromkeys([*found.questions, *_config_questions(config, sizes)])),
        config=config,
        as_many_keys=found.rows.get("q", 0) == found.rows.get("k", -1),
    )


def _text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, Mapping) else dict(config)


def _first(config: Mapping[str, Any], keys: Sequence[str], default: int) -> tuple[int, str]:
    key = next((key for key in keys if isinstance(config.get(key), int)), "")
    return (int(config[key]), key) if key else (default, "")


def _named(config: Mapping[str, Any], size: int) -> tuple[int, str]:
    """A width of feed-forward blocks with the key that holds it; equal numbers of other meaning are none."""
    keys = [key for key, value in config.items() if value == size and type(value) is int]
    return size, next((key for key in keys if any(word in key for word in WIDTH_WORDS)), "")


def _sizes(config: Mapping[str, Any], checkpoint: Checkpoint) -> Sizes:
    widths = Counter(size for info in checkpoint.tensors.values() for size in info.shape)
    rows = [info.shape for info in checkpoint.tensors.values() if len(info.shape) == 2]
    heads = _first(config, HEAD_KEYS, 1)
    return Sizes(
        layers=_first(config, COUNT_KEYS, 0),
        hidden=_first(config, HIDDEN_KEYS, widths.most_common(1)[0][0] if widths else 0),
        vocab=_first(config, VOCAB_KEYS, max((shape[0] for shape in rows), default=0)),
        heads=heads,
        kv_heads=_first(config, KV_KEYS, heads[0]),
        experts=_first(config, EXPERT_KEYS, 0),
        top_k=_first(config, TOP_KEYS, 1),
    )


def _patterns(checkpoint: Checkpoint) -> Iterator[Pattern]:
    """Names with their numbers taken out: the first number is the layer, another one the expert."""
    groups: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for name, info in checkpoint.tensors.items():
        parts, layer, expert = [], -1, False
        for part in name.split("."):
            if part.isdigit() and layer < 0:
                layer = int(part)
                parts.append("{i}")
            elif part.isdigit() and not expert:
                expert = True
                parts.append("{e}")
            else:
                parts.append(part)
        groups.setdefault((".".join(parts), info.shape), []).append(layer)
    for (template, shape), found in groups.items():
        yield Pattern(
            template=template,
            shape=shape,
            count=len(found),
            in_layers="{i}" in template,
            layers=tuple(sorted({layer for layer in found if layer >= 0})),
        )


class _Finder:
    """Decides pattern by pattern; biases follow their weights at the end."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.matches: list[Match] = []
        self.unmatched: list[Pattern] = []
        self.questions: list[str] = []
        self.head_dim = 0
        self.intermediate = 0
        self.rows: dict[str, int] = {}
        self._norms: list[Pattern] = []
        self._later: list[Pattern] = []

    def look_at(self, pattern: Pattern) -> None:
        found = self._outside(pattern) if not pattern.in_layers else self._inside(pattern)
        if found is not None:
            self.matches.append(found)

    def settle(self) -> None:
        """Norms by their places, then biases by the weights beside them; the rest is unmatched."""
        self._place_norms()
        places = {match.pattern.template.rpartition(".")[0]: match for match in self.matches if len(match.params) == 1}
        for pattern in self._later:
            beside = places.get(pattern.template.rpartition(".")[0])
            if pattern.words[0] == "bias" and beside is not None:
                param = beside.params[0].rpartition(".")[0] + ".bias"
                self.matches.append(Match(pattern=pattern, params=(param,), why="the bias of the weight beside it"))
            else:
                self.unmatched.append(pattern)

    def _outside(self, pattern: Pattern) -> Match | None:
        hidden, vocab = self.sizes.hidden[0], self.sizes.vocab[0]
        if pattern.shape == (vocab, hidden):
            is_head = any(word in ("lm_head", "head", "output", "unembed", "logits") for word in pattern.words)
            param = "head.weight" if is_head else "embed.weight"
            return Match(pattern=pattern, params=(param,), why=f"[vocabulary, hidden] and called {pattern.words[1]}")
        if pattern.shape == (hidden,) and pattern.words[0] != "bias":
            return Match(pattern=pattern, params=("norm.weight",), why="[hidden] outside the layers")
        self._later.append(pattern)
        return None

    def _inside(self, pattern: Pattern) -> Match | None:
        hidden = self.sizes.hidden[0]
        if pattern.words[0] == "bias" or not pattern.shape:
            self._later.append(pattern)
            return None
        if len(pattern.shape) == 1:
            if pattern.shape == (hidden,):
                self._norms.append(pattern)
                return None
            return self._head_norm(pattern)
        if len(pattern.shape) == 2:
            return self._matrix(pattern)
        self._later.append(pattern)
        return None

    def _head_norm(self, pattern: Pattern) -> Match | None:
        """A norm of every query or key head."""
        side = next((s for s in ("q", "k") if any(re.match(rf"{s}(uery|ey)?_?", w) for w in pattern.words[1:3])), None)
        if side is None or not any("norm" in word or "ln" in word for word in pattern.words):
            self._later.append(pattern)
            return None
        return Match(pattern=pattern, params=(f"layers.{{i}}.mixer.{side}_norm.weight",), why="[head] and called so")

    def _matrix(self, pattern: Pattern) -> Match | None:
        part = self._part(pattern)
        if part is None:
            self._later.append(pattern)
            return None
        block, name = part
        base = f"layers.{{i}}.{block}."
        if name == "qkv":
            params = tuple(f"{base}{side}.weight" for side in "qkv")
            self._heads(pattern.shape[0] // (self.sizes.heads[0] + 2 * self.sizes.kv_heads[0]))
            self.questions.append(
                f"{pattern.template}: are queries, keys and values one after another, or by head in turn?"
            )
            return Match(pattern=pattern, params=params, why="rows of queries, keys and values together")
        if name == "gate_up":
            self._width(pattern.shape[0] // 2)
            self.questions.append(f"{pattern.template}: which half is activated? the first is assumed")
            return Match(pattern=pattern, params=(f"{base}gate.weight", f"{base}up.weight"), why="twice the width")
        transpose = self._is_turned(pattern, name)
        rows = pattern.shape[1] if transpose else pattern.shape[0]
        self.rows[name] = rows
        if name == "q":
            self._heads(rows // self.sizes.heads[0])
        if name in ("gate", "up"):
            self._width(rows)
        expert = "experts.{e}." if "{e}" in pattern.template else ""
        param = f"{base}{expert}{name}.weight"
        return Match(
            pattern=pattern, params=(param,), why=f"shape {list(pattern.shape)} and its name", transpose=transpose
        )

    def _part(self, pattern: Pattern) -> tuple[str, str] | None:
        """(mixer or ffn, which matrix): what the shape allows, chosen by the name."""
        hidden, experts = self.sizes.hidden[0], self.sizes.experts[0]
        low = [word.lower() for word in pattern.words]
        names = low[1:] if low[0] in ("weight", "kernel") else low
        near = names[0] if names else ""
        in_feed = any(any(word == f or word.startswith(f) for f in FEED) for word in names) or "{e}" in pattern.template
        in_attention = any(any(a in word for a in ATTENTION) for word in names) and not in_feed
        if experts and pattern.shape == (experts, hidden):
            return "ffn", "router"
        if hidden not in pattern.shape:
            return None
        order: tuple[str, ...] = ("gate_up", "gate", "up", "down") if in_feed else ("qkv", "q", "k", "v", "o")
        if not in_feed and not in_attention:
            order = ("qkv", "q", "k", "v", "gate_up", "gate", "up", "down", "o")
        for name in order:
            if near in WORDS[name]:
                return ("ffn" if name in ("gate_up", "gate", "up", "down") else "mixer"), name
        return None

    def _is_turned(self, pattern: Pattern, name: str) -> bool:
        """Whether the matrix is stored [in, out]; a square one cannot tell."""
        hidden, (rows, columns) = self.sizes.hidden[0], pattern.shape
        if rows == columns:
            return False
        reads_hidden = name not in ("o", "down")
        return (columns != hidden) if reads_hidden else (rows != hidden)

    def _heads(self, size: int) -> None:
        self.head_dim = self.head_dim or size

    def _width(self, size: int) -> None:
        self.intermediate = self.intermediate or size

    def _place_norms(self) -> None:
        """[hidden] vectors of a layer are norms: two stand before the blocks, four also behind them."""
        order = sorted(self._norms, key=lambda p: any(mark in p.template.rpartition("}")[2].lower() for mark in BEHIND))
        places = {
            1: ("mixer_norm",),
            2: ("mixer_norm", "ffn_norm"),
            4: ("mixer_norm", "post_mixer_norm", "ffn_norm", "post_ffn_norm"),
        }.get(len(order))
        if places is None:
            self._later.extend(order)
            if order:
                self.questions.append(
                    f"{len(order)} vectors of the hidden width in a layer: which are norms, and where?"
                )
            return
        for pattern, place in zip(order, places, strict=True):
            param = f"layers.{{i}}.{place}.weight"
            self.matches.append(Match(pattern=pattern, params=(param,), why="[hidden] in a layer, by its name"))
        if len(order) > 1:
            said = ", ".join(p.template.rpartition("}.")[2] for p in order)
            self.questions.append(f"norms were placed by their names: {said} -> {', '.join(places)}")


def _config_questions(config: Mapping[str, Any], sizes: Sizes) -> Iterator[str]:
    for name, (_, key) in (("layers", sizes.layers), ("hidden size", sizes.hidden), ("attention heads", sizes.heads)):
        if not key:
            yield f"no key of config.json names the number of {name}"
    if not any("rope" in key or "rotary" in key for key in config):
        yield "no key speaks of rotary positions: NoPE, learned positions, or a default base?"
    if not any("eps" in key for key in config):
        yield "no key names the epsilon of the norms"
