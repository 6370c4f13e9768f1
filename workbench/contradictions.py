"""Keys of config.json that contradict each other or the headers, of the kinds that hold whatever the family. No torch.

What a family reads it checks itself; this is for what two places say differently, where one of them is passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from firstlight.engine.findings import Finding, fatal, note, several, warning
from firstlight.engine.weights.names.stock import Kind, by_dtype, numbered

TEXT_LEVELS = ("text_config", "llm_config", "language_config", "language_model_config")
# Keys of the text model: stated at two levels they must agree, since readers differ in which level they look at.
SHARED_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "num_experts", "n_routed_experts", "num_local_experts",
    "num_experts_per_tok", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "sliding_window",
    "layer_types", "max_position_embeddings", "tie_word_embeddings", "hidden_act", "eos_token_id",
    "quantization_config",
)  # fmt: skip
SYNONYMS = (
    ("torch_dtype", "dtype"),
    ("image_token_id", "image_token_index"),
    ("video_token_id", "video_token_index"),
    ("num_experts", "num_local_experts", "n_routed_experts"),
    ("num_experts_per_tok", "num_experts_per_token"),
)
STORED = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}
_EXPERTS = SYNONYMS[3]
PLAIN_ROPE = (  # keys of rotary parameters that plain positions are made from, or that say nothing of them
    "rope_theta", "rope_type", "type", "partial_rotary_factor", "mrope_section", "mrope_interleaved",
    "max_position_embeddings", "original_max_position_embeddings", "llama_4_scaling_beta",
)  # fmt: skip


def contradictions(config: Mapping[str, Any], kinds: Sequence[Kind], whole: bool) -> Iterator[Finding]:
    """Findings about keys; `whole`: all shards are there, so what the headers hold can be held against the keys."""
    levels = [("", config)]
    levels += [(key, config[key]) for key in TEXT_LEVELS if isinstance(config.get(key), Mapping)]
    text = levels[-1][1]
    rows = embedding_rows(kinds) if whole else None
    for where, level in levels:
        yield from _within(where, level)
    for where, level in levels[1:]:
        yield from _between(where, config, level, rows)
    yield from _rotary(text)
    yield from _attention(text)
    yield from _windows(text)
    if not whole:
        return
    yield from _layers(text, kinds)
    yield from _experts(text, kinds)
    yield from _vocabulary(text, rows)
    yield from _dtype(config, text, kinds)


def _clash(message: str, expected: str, found: str, next: str, severity: str = "warning") -> Finding:
    say = {"warning": warning, "fatal": fatal, "note": note}[severity]
    return say("conflicting-flag", message, file="config.json", expected=expected, found=found, next=next)


def _within(where: str, level: Mapping[str, Any]) -> Iterator[Finding]:
    """Two names of one thing in one level."""
    prefix = f"{where}." if where else ""
    for names in SYNONYMS:
        stated = [(name, level[name]) for name in names if level.get(name) is not None]
        for name, value in stated[1:]:
            first, other = stated[0]
            if _plain(value) != _plain(other):
                yield _clash(
                    f"{prefix}{first} and {prefix}{name} mean the same and differ",
                    f"{first} = {_short(other)}",
                    f"{name} = {_short(value)}",
                    "check both against the model's release and correct one",
                )


def _between(where: str, outer: Mapping[str, Any], inner: Mapping[str, Any], rows: int | None) -> Iterator[Finding]:
    """One key at two levels with two values."""
    for key in SHARED_KEYS:
        above, below = outer.get(key), inner.get(key)
        if above is None or below is None or above == below:
            continue
        way = f"correct the one that is wrong; what reads {where} and what reads the top level will differ"
        if key == "vocab_size" and rows in (above, below):
            right = "the top level" if rows == above else where
            way = f"the embedding has {rows:,} rows, so {right} is right; correct the other"
        elif key == "tie_word_embeddings":
            way = "see where the output head comes from: a head in the file is used, whatever the flag says"
        yield _clash(
            f"{key} differs between the top level and {where}",
            f"{where}: {_short(below)}",
            f"top level: {_short(above)}",
            way,
        )


def _rotary(text: Mapping[str, Any]) -> Iterator[Finding]:
    """The old and the new way to write rotary positions, both present."""
    old, new = text.get("rope_scaling"), text.get("rope_parameters")
    new = new if isinstance(new, Mapping) else {}
    both = [("rope_scaling", old)] if isinstance(old, Mapping) else []
    for name, fields in (("rope_scaling", old), ("rope_parameters", new)):
        if isinstance(fields, Mapping):
            yield from _stretched(name, fields, text)
    if isinstance(old, Mapping) and old and new and "rope_type" not in old.keys() & new.keys():  # else said below
        one, other = (_rope_kind(fields) or "default" for fields in (old, new))
        if one != other:
            yield _clash(
                f"rope_scaling asks for {_short(one)} and rope_parameters for {_short(other)}",
                f"rope_parameters: {_short(new)}",
                f"rope_scaling: {_short(old)}",
                "check both against the model's release; engines differ in which of them they read",
            )
    if text.get("rope_theta") is not None:
        both.append(("rope_theta", {"rope_theta": text["rope_theta"]}))
    for name, values in both:
        for key in sorted(values.keys() & new.keys()):
            if values[key] is None or new[key] is None or values[key] == new[key]:
                continue
            label = key if name == key else f"{name}.{key}"
            yield _clash(
                f"{label} and rope_parameters.{key} disagree; rope_parameters is used",
                f"rope_parameters.{key} = {_short(new[key])}",
                f"{label} = {_short(values[key])}",
                "verify at positions beyond 4,000, where a wrong base shows",
            )


def _rope_kind(fields: Mapping[str, Any]) -> object:
    return fields.get("rope_type", fields.get("type"))


def _stretched(name: str, fields: Mapping[str, Any], text: Mapping[str, Any]) -> Iterator[Finding]:
    """Positions that are stretched, by two names for how, or by how much nobody says."""
    kind, other = fields.get("rope_type"), fields.get("type")
    if kind is not None and other is not None and kind != other:
        yield _clash(
            f"{name}.rope_type and {name}.type mean the same and differ; rope_type is used",
            f"rope_type = {_short(kind)}",
            f"type = {_short(other)}",
            "check both against the model's release and correct one",
        )
    strange = [key for key in fields if key not in PLAIN_ROPE and not isinstance(fields[key], Mapping)]
    if _rope_kind(fields) in (None, "default", "mrope") and strange:  # other kinds refuse what they do not know
        yield warning(
            "unread-config-key",
            f"{name}: {', '.join(strange[:4])} is not read where positions are of the plain kind",
            file="config.json",
            expected="keys that such positions are made from",
            found=", ".join(f"{key} = {_short(fields[key])}" for key in strange[:4]),
            next="check that it does not change the mathematics; if it does, the release needs a rope_type",
        )
    sized = any(level.get("original_max_position_embeddings") for level in (fields, text))
    sized = sized or fields.get("factor") is not None or fields.get("alpha") is not None
    if _rope_kind(fields) in ("linear", "dynamic", "yarn", "llama3") and not sized:
        yield _clash(
            f"{name} stretches positions by {_rope_kind(fields)}, and no factor says how far: they stay as they are",
            f"{name}.factor",
            "absent",
            "fetch config.json of the release again; verify at positions beyond 4,000",
        )


def _attention(text: Mapping[str, Any]) -> Iterator[Finding]:
    """Sizes that must divide each other where nothing else gives a head its size."""
    hidden, heads = _size(text, "hidden_size"), _size(text, "num_attention_heads")
    given = any(text.get(key) is not None for key in ("head_dim", "v_head_dim", "kv_lora_rank", "d_kv", "head_size"))
    if hidden and heads and hidden % heads and not given:
        yield _clash(
            f"hidden_size {hidden:,} is no multiple of num_attention_heads {heads:,}, and no head_dim is stated",
            f"a multiple of {heads:,}, or a head_dim",
            f"{hidden:,}",
            "fetch config.json of the release again",
        )
    experts = next((size for key in _EXPERTS if (size := _size(text, key))), None)
    for key in SYNONYMS[4]:
        chosen = _size(text, key)
        if chosen and experts and chosen > experts:
            yield _clash(
                f"{key} chooses {chosen:,} of {experts:,} experts",
                f"at most {experts:,}",
                f"{chosen:,}",
                "fetch config.json of the release again",
                "fatal",
            )


def _windows(text: Mapping[str, Any]) -> Iterator[Finding]:
    """Layers that are said to see a window, of which no size is stated: null is no size, and no default."""
    kinds = text.get("layer_types")
    windows = kinds.count("sliding_attention") if isinstance(kinds, list) else 0
    if windows and text.get("sliding_window", 1) is None and text.get("attention_window_size") is None:
        yield _clash(
            f"layer_types names {windows:,} layers of sliding_attention, sliding_window is null: they see everything",
            "the size of the window",
            "sliding_window = null",
            "fetch config.json of the release again; verify with a prompt longer than the window",
        )


def _layers(text: Mapping[str, Any], kinds: Sequence[Kind]) -> Iterator[Finding]:
    count = _size(text, "num_hidden_layers")
    if not count:
        return
    for key in ("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers"):
        value = text.get(key)
        if isinstance(value, list) and len(value) != count:
            yield _clash(
                f"{key} has {several(len(value), 'entry', 'entries')} for {several(count, 'layer', 'layers')}",
                several(count, "entry", "entries") + ", one a layer",
                f"{len(value):,}",
                "correct num_hidden_layers or the list against the model's release",
            )
    extra = max(_size(text, key) or 0 for key in ("num_nextn_predict_layers", "mtp_num_layers", "num_mtp_layers"))
    found = set().union(*(of_it for kind, of_it in numbered(kinds, ("layers", "h", "blocks")) if kind.is_text))
    absent = set(range(min(count, len(found) + 1_000))) - found
    beyond = {layer for layer in found if layer >= count + extra}
    if found and (absent or beyond):
        yield _clash(
            f"num_hidden_layers is {count:,}, the headers hold {several(len(found), 'layer', 'layers')} "
            f"up to number {max(found):,}",
            f"layers 0 to {count - 1:,}" + (f", and {extra} extra prediction layers" if extra else ""),
            f"no layer {min(absent):,}" if absent else _beyond(min(beyond), len(beyond) - 1),
            "config.json and weights belong to different releases: fetch both again",
        )


def _beyond(first: int, others: int) -> str:
    return f"layer {first:,}" + (f" and {others:,} more" if others else "")


def _experts(text: Mapping[str, Any], kinds: Sequence[Kind]) -> Iterator[Finding]:
    stated = next(((key, size) for key in _EXPERTS if (size := _size(text, key))), None)
    found = set().union(*(of_it for kind, of_it in numbered(kinds, ("experts",)) if kind.is_text))
    if stated and found and (len(found), max(found)) != (stated[1], stated[1] - 1):
        yield _clash(
            f"{stated[0]} is {stated[1]:,}, the headers hold {several(len(found), 'expert', 'experts')} "
            f"up to number {max(found):,}",
            f"experts 0 to {stated[1] - 1:,}",
            several(len(found), "expert", "experts"),
            "config.json and weights belong to different releases: fetch both again",
        )


def embedding_rows(kinds: Sequence[Kind]) -> int | None:
    """Rows of the token embedding, as the headers have it."""
    endings = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight")
    found = [k for k in kinds if k.is_text and k.pattern.endswith(endings) and k.shapes[0]]
    return found[0].shapes[0][0] if len(found) == 1 else None


def _vocabulary(text: Mapping[str, Any], rows: int | None) -> Iterator[Finding]:
    stated = _size(text, "vocab_size")
    if rows is None or stated is None or stated == rows:
        return
    if rows > stated:
        yield note(
            "padded-tensor",
            f"vocab_size is {stated:,}, the token embedding has {rows:,} rows; the last {rows - stated:,} are not used",
            file="config.json",
            expected=f"vocab_size = {rows:,}",
            found=f"{stated:,}",
            next="nothing, if the tokenizer has no ids for them: logits have vocab_size columns",
        )
        return
    yield warning(
        "conflicting-flag",
        f"vocab_size is {stated:,}, the token embedding has {rows:,} rows",
        file="config.json",
        expected=f"vocab_size = {rows:,}",
        found=f"{stated:,}",
        next="fetch config.json and the shard with the embedding of one release",
    )


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any], kinds: Sequence[Kind]) -> Iterator[Finding]:
    """The floats that the weights are stored as, beside what the configuration calls them."""
    named = next((level[key] for level in (text, config) for key in SYNONYMS[0][::-1] if level.get(key)), None)
    stored = STORED.get(str(named).removeprefix("torch."))
    floats = [dtype for dtype in by_dtype(kinds) if dtype in STORED.values()]
    if stored and floats and floats[0] != stored:
        yield _clash(
            f"config.json calls the weights {named}, most are stored as {floats[0]}",
            f"{floats[0]}",
            f"{named}",
            "nothing, if the release is so; --dtype chooses what is computed in",
            "note",
        )


def _size(level: Mapping[str, Any], key: str) -> int | None:
    value = level.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 63 else None


def _plain(value: object) -> object:
    return value.removeprefix("torch.") if isinstance(value, str) else value


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
