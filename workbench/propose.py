"""A draft family file for an architecture that nobody has described yet: what was recognised, and what is open.

The draft is Python, to be finished in a notebook and registered live (`firstlight.engine.register_family`). Everything
that is not certain is marked UNRESOLVED and is refused when it is used; nothing is filled in for it.
"""

from __future__ import annotations

import re
from pathlib import Path

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal, printable
from firstlight.engine.model.families.common import ACTIVATIONS
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.workbench.alignment import Alignment, Match, Pattern, align
from firstlight.workbench.report import Draft, Report, write_atomically


def propose(source: str | Path, out: str | Path | None = None) -> Report:
    """Aligns the checkpoint with known blocks and writes a draft family file (`<model_type>.py`, or `out`).

    The report says what every tensor was taken for and lists what is open. It fails while anything is.
    """
    checkpoint = Checkpoint.open(source)
    found = align(checkpoint)
    name = re.sub(r"\W+", "_", str(checkpoint.config.get("model_type", "unknown"))).strip("_").lower() or "unknown"
    target = Path(out) if out is not None else Path(f"{name}.py")
    if target.exists():
        raise Refused(
            fatal("usage", f"{target} is there already", file=str(target), next="name another file, or remove it")
        )
    text = draft_text(name, str(checkpoint.config.get("model_type", name)), found)
    write_atomically(target, text.encode())
    draft = Draft("propose", f"{checkpoint.name}, model_type {checkpoint.config.get('model_type')!r}")
    total = len(found.matches) + len(found.unmatched)
    draft.check(
        "every pattern of tensors is recognised",
        not found.unmatched,
        value=len(found.matches),
        limit=total,
        unit="patterns",
    )
    open_ = unresolved(text)
    draft.check("nothing is left to decide", not open_, value=len(open_), limit=0, unit="places")
    draft.metric("file", str(target), "", f"{len(text.splitlines())} lines")
    draft.table("matches", (_row(match) for match in found.matches))
    draft.table(
        "unmatched", ({"tensors": p.template, "shape": list(p.shape), "count": p.count} for p in found.unmatched)
    )
    draft.table("to_decide", ({"question": question} for question in (*open_, *found.questions)))
    return draft.close()


def _row(match: Match) -> dict[str, object]:
    return {
        "tensors": match.pattern.template,
        "shape": list(match.pattern.shape),
        "count": match.pattern.count,
        "fills": ", ".join(match.params),
        "why": match.why,
    }


def unresolved(text: str) -> list[str]:
    """The places of a draft that are marked."""
    return [line.split("UNRESOLVED:", 1)[1].strip().strip('")') for line in text.splitlines() if "UNRESOLVED:" in line]


def draft_text(name: str, model_type: str, found: Alignment) -> str:
    """The draft as Python source. Names from the checkpoint stand in it as literals and in comments, never as code."""
    lines = [f'"""Draft of the family {name}: lined up by names and shapes, to be finished and verified."""', ""]
    lines += [f"# To decide: {_line(question)}" for question in found.questions]
    lines += ["", *_imports(found), "", "", *_spec(name, found), "", "", *_rules(found)]
    lines.append(f"FAMILY = Family(name={name!r}, model_types=({model_type!r},), spec=spec, rules=RULES)")
    return "\n".join(lines) + "\n"


def _imports(found: Alignment) -> list[str]:
    blocks = ["Attention", "LayerSpec", "ModelSpec", "Norm", *(["MoE", "Router"] if _has_experts(found) else ["MLP"])]
    return [
        "from firstlight.engine.model.config import Config",
        "from firstlight.engine.model.families.common import rope",
        "from firstlight.engine.model.families.family import Family",
        "from firstlight.engine.model.rules import WeightRule, rule",
        f"from firstlight.engine.model.spec import {', '.join(sorted(blocks, key=str.lower))}",
    ]


def _has_experts(found: Alignment) -> bool:
    return any("experts.{e}" in param for param in found.filled())


class _Size:
    """A size as source: the key that holds it or, marked, the number itself."""

    def __init__(self, value: tuple[int, str], what: str) -> None:
        number, key = value
        self.source = f"config.size({key!r})" if key else str(number)
        self.mark = "" if key else f"  # UNRESOLVED: no key of config.json holds the {what} ({number})"


def _spec(name: str, found: Alignment) -> list[str]:
    sizes = found.sizes
    heads, kv_heads = _Size(sizes.heads, "attention heads"), _Size(sizes.kv_heads, "key/value heads")
    layers, hidden = _Size(sizes.layers, "layers"), _Size(sizes.hidden, "hidden size")
    vocab = _Size(sizes.vocab, "vocabulary")
    places = [place for place in _NORMS if f"layers.{{i}}.{place}.weight" in found.filled()]
    given = [f"{place}=norm" for place in places]
    one = "one norm a layer: do both blocks read it side by side (parallel=True)?"
    mark = f"  # UNRESOLVED: {one}" if len(places) == 1 else ""
    tied = "config.get('tie_word_embeddings', True)" if "head.weight" not in found.filled() else "False"
    return [
        "def spec(config: Config) -> ModelSpec:",
        *_norm(found),
        f"    heads, kv_heads, size = {heads.source}, {kv_heads.source}, {sizes.head_dim}{heads.mark or kv_heads.mark}",
        *_attention(found),
        *_feed_forward(found),
        f"    layer = LayerSpec({', '.join(['mixer=attention', 'ffn=feed_forward', *given])}){mark}",
        "    return ModelSpec(",
        f"        family={name!r},",
        f"        vocab_size={vocab.source},{vocab.mark}",
        f"        hidden={hidden.source},{hidden.mark}",
        f"        layers=(layer,) * {layers.source},{layers.mark}",
        "        final_norm=norm,",
        f"        tied_head=bool({tied}),",
        "        max_positions=int(config.get('max_position_embeddings', 4096)),",
        "    )",
    ]


_NORMS = ("mixer_norm", "post_mixer_norm", "ffn_norm", "post_ffn_norm")


def _norm(found: Alignment) -> list[str]:
    key = next((key for key in found.config if "eps" in key), None)
    has_bias = any(param.endswith("norm.bias") for param in found.filled())
    kind = "'layer'" if has_bias else "'rms'"
    eps, mark = (f"float(config.need({key!r}))", "") if key else ("1e-6", "  # UNRESOLVED: the epsilon of the norms")
    return [f"    norm = Norm(kind={kind}, eps={eps}, bias={has_bias}){mark}"]


def _attention(found: Alignment) -> list[str]:
    filled = found.filled()
    has_rope = any("rope" in key or "rotary" in key for key in found.config)
    positions, mark = ("rope(config, size)", "") if has_rope else ("None", "  # UNRESOLVED: positions, if it has any")
    normed = "norm" if "layers.{i}.mixer.q_norm.weight" in filled else "None"
    return [
        "    attention = Attention(",
        "        num_heads=heads,",
        "        num_kv_heads=kv_heads,",
        "        head_dim=size,",
        "        scale=size**-0.5,",
        f"        rope={positions},{mark}",
        f"        qkv_bias={'layers.{i}.mixer.q.bias' in filled},",
        f"        output_bias={'layers.{i}.mixer.o.bias' in filled},",
        f"        qk_norm={normed},",
        "    )",
    ]


def _feed_forward(found: Alignment) -> list[str]:
    filled, sizes = found.filled(), found.sizes
    width = _Size(sizes.intermediate, "feed-forward width")
    name, mark = _activation(found)
    if _has_experts(found):
        count, chosen = _Size(sizes.experts, "experts"), _Size(sizes.top_k, "experts a token chooses")
        return [
            "    # UNRESOLVED: how the router scores and weighs experts; softmax over all, normalised, is assumed",
            "    feed_forward = MoE(",
            f"        num_experts={count.source},{count.mark}",
            f"        intermediate={width.source},{width.mark}",
            f"        activation={name},{mark}",
            f"        router=Router(top_k={chosen.source}),{chosen.mark}",
            "    )",
        ]
    return [
        "    feed_forward = MLP(",
        f"        intermediate={width.source},{width.mark}",
        f"        activation={name},{mark}",
        f"        gated={'layers.{i}.ffn.gate.weight' in filled},",
        f"        bias={'layers.{i}.ffn.down.bias' in filled},",
        "    )",
    ]


def _activation(found: Alignment) -> tuple[str, str]:
    """The activation as source, and the mark behind it where it is not known."""
    names = [value for key, value in found.config.items() if "act" in key and isinstance(value, str)]
    if names and names[0] in ACTIVATIONS:
        return repr(ACTIVATIONS[names[0]]), ""
    if not names:
        return "'silu'", "  # UNRESOLVED: no key names the activation"
    return repr(names[0]), f"  # UNRESOLVED: no kernel knows the activation {_line(names[0])}"


def _rules(found: Alignment) -> list[str]:
    lines = ["RULES: tuple[WeightRule, ...] = ("]
    for match in found.matches:
        options = "".join(f", {name}=True" for name in ("transpose", "stacked") if getattr(match, name))
        params = ", ".join(repr(param) for param in match.params)
        lines.append(f"    rule({match.pattern.template!r}, {params}{options}),")
    lines += [f"    # UNRESOLVED: {_said(pattern)}" for pattern in found.unmatched]
    return [*lines, ")"]


def _said(pattern: Pattern) -> str:
    return _line(f"{pattern.template} {list(pattern.shape)}, {pattern.count} tensors")


def _line(text: str) -> str:
    """Foreign text that stays on the one line of its comment."""
    return " ".join(printable(text).split())
