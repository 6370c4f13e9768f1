"""A draft family file for an architecture that nobody has described yet: what was recognised, and what is open.

The draft is Python, to be finished in a notebook and registered live (`firstlight.engine.register_family`). What is not
certain is marked UNRESOLVED. The draft is tried as it stands: what it does not account for, and keys of the
configuration that it does not read, are questions as well.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, fatal, printable
from firstlight.engine.model.families.common import ACTIVATIONS
from firstlight.engine.model.families.registry import Families
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.ledger import account
from firstlight.workbench.alignment import Alignment, Match, Pattern, align
from firstlight.workbench.kinship import Kin, kin_of
from firstlight.workbench.render import words
from firstlight.workbench.report import Draft, Report, write_atomically

SAID = 4  # tensors named in a question


def propose(source: str | Path, out: str | Path | None = None) -> Report:
    """Aligns the checkpoint with known blocks and writes a draft family file (`<model_type>.py`, or `out`).

    The report says what every tensor was taken for and lists what is open. It fails while anything is.
    """
    began_s = time.perf_counter()
    checkpoint = Checkpoint.open(source)
    found = align(checkpoint)
    name = re.sub(r"\W+", "_", str(checkpoint.config.get("model_type", "unknown"))).strip("_").lower() or "unknown"
    target = Path(out) if out is not None else Path(f"{name}.py")
    if target.exists():
        raise Refused(
            fatal("usage", f"{target} is there already", file=str(target), next="name another file, or remove it")
        )
    kin = kin_of([*(match.pattern for match in found.matches), *found.unmatched])
    text = draft_text(name, str(checkpoint.config.get("model_type", name)), found, kin)
    write_atomically(target, text.encode())
    draft = Draft("propose", f"{checkpoint.name}, model_type {checkpoint.config.get('model_type')!r}", began_s)
    total = len(found.matches) + len(found.unmatched)
    draft.check(
        "every pattern of tensors is recognised",
        not found.unmatched,
        value=len(found.matches),
        limit=total,
        unit="patterns",
    )
    open_, tried = unresolved(text), list(_tried(text, checkpoint, found.unmatched))
    draft.check("nothing is left to decide", not open_, value=len(open_), limit=0, unit="places")
    draft.check(
        "the draft accounts for all tensors, parameters and keys", not tried, value=len(tried), unit="questions"
    )
    draft.metric("file", str(target), "", f"{len(text.splitlines())} lines")
    draft.table("matches", (_row(match) for match in found.matches))
    draft.table(
        "unmatched",
        (
            {"tensors": p.template, "shape": list(p.shape), "count": p.count, "known_as": kin.words(p.template)}
            for p in found.unmatched
        ),
    )
    draft.table("nearest_families", ({"family": one, "names_shared": count, "of": total} for one, count in kin.nearest))
    draft.table("to_decide", ({"question": question} for question in (*open_, *tried, *found.questions)))
    return draft.close()


def _tried(text: str, checkpoint: Checkpoint, unmatched: tuple[Pattern, ...]) -> Iterator[str]:
    """What the draft as it stands leaves open, in the engine's own words; what is marked as unmatched apart."""
    space: dict[str, Any] = {}
    exec(compile(text, "draft", "exec"), space)  # of our own writing: foreign names stand in it as literals alone
    families = Families()
    families.register(space["FAMILY"])
    try:
        spec, matcher = families.describe(checkpoint.config)
        ledger = account(checkpoint, spec, matcher)
    except Refused as refused:
        yield from (_said_by(finding) for finding in refused.findings)
        return
    marked = [re.compile(re.sub(r"\\\{\w\\\}", r"\\d+", re.escape(pattern.template))) for pattern in unmatched]
    for finding in (*spec.findings, *ledger.findings):
        if finding.code == "unconsumed-tensor" and any(one.fullmatch(finding.tensors[0]) for one in marked):
            continue
        if finding.severity == "fatal" or finding.code == "unread-config-key":
            yield _said_by(finding)


def _said_by(finding: Finding) -> str:
    names = ", ".join(finding.tensors[:SAID])
    left = len(finding.tensors) - SAID + finding.more_tensors
    more = f" and {left} more" if left > 0 else ""
    return _line(f"{finding.message}{f': {names}{more}' if names and names not in finding.message else ''}")


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
    return [line.split("UNRESOLVED:", 1)[1].strip() for line in text.splitlines() if "UNRESOLVED:" in line]


def draft_text(name: str, model_type: str, found: Alignment, kin: Kin) -> str:
    """The draft as Python source. Names from the checkpoint stand in it as literals and in comments, never as code."""
    lines = [f'"""Draft of the family {name}: lined up by names and shapes, to be finished and verified."""', ""]
    lines += [f"# To decide: {_line(question)}" for question in found.questions]
    lines += ["", *_imports(found), "", "", *_spec(name, found), "", "", *_rules(found, kin)]
    lines.append(f"FAMILY = Family(name={name!r}, model_types=({model_type!r},), spec=spec, rules=RULES)")
    return "\n".join(lines) + "\n"


def _imports(found: Alignment) -> list[str]:
    blocks = ["Attention", "LayerSpec", "ModelSpec", "Norm", *(["MoE", "Router"] if _has_experts(found) else ["MLP"])]
    return [
        "from firstlight.engine.model.config import Config",
        f"from firstlight.engine.model.families.common import {', '.join(_helpers(found))}",
        "from firstlight.engine.model.families.family import Family",
        "from firstlight.engine.model.rules import WeightRule, rule",
        f"from firstlight.engine.model.spec import {', '.join(sorted(blocks, key=str.lower))}",
    ]


def _helpers(found: Alignment) -> list[str]:
    source = "".join((*_attention(found), *_feed_forward(found)))
    return [name for name in ("activation", "rope") if f"={name}(" in source] or ["rope"]


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
    shared = "heads" if not sizes.kv_heads[1] and found.as_many_keys else kv_heads.source
    mark_of_heads = heads.mark or ("" if shared == "heads" else kv_heads.mark)
    layers, hidden = _Size(sizes.layers, "layers"), _Size(sizes.hidden, "hidden size")
    vocab = _Size(sizes.vocab, "vocabulary")
    places = [place for place in _NORMS if f"layers.{{i}}.{place}.weight" in found.filled()]
    given = [f"{place}=norm" for place in places]
    one = "one norm a layer: do both blocks read it side by side (parallel=True)?"
    mark = f"  # UNRESOLVED: {one}" if len(places) == 1 else ""
    tied = "bool(config.get('tie_word_embeddings', True))" if "head.weight" not in found.filled() else "False"
    said = [key for key in TOLD_BY_TENSORS if key in found.config]
    return [
        "def spec(config: Config) -> ModelSpec:",
        *([f"    {', '.join(f'config.get({key!r})' for key in said)}  # the tensors say the same"] if said else []),
        *_norm(found),
        *_attention_sizes(heads.source, shared, sizes.head_dim, mark_of_heads),
        *_attention(found),
        *_feed_forward(found),
        f"    layer = LayerSpec({', '.join(['mixer=attention', 'ffn=feed_forward', *given])}){mark}",
        "    return ModelSpec(",
        f"        family={name!r},",
        f"        vocab_size={vocab.source},{vocab.mark}",
        f"        hidden={hidden.source},{hidden.mark}",
        f"        layers=(layer,) * {layers.source},{layers.mark}",
        "        final_norm=norm,",
        f"        tied_head={tied},",
        "        max_positions=int(config.get('max_position_embeddings', 4096)),",
        "    )",
    ]


def _attention_sizes(heads: str, kv_heads: str, size: int, mark: str) -> list[str]:
    if kv_heads == "heads":
        return [f"    heads = kv_heads = {heads}{mark}", f"    size = {size}"]
    return [f"    heads, kv_heads, size = {heads}, {kv_heads}, {size}{mark}"]


TOLD_BY_TENSORS = ("head_dim", "attention_bias", "qkv_bias", "mlp_bias", "tie_word_embeddings", "kv_channels")
_NORMS = ("mixer_norm", "post_mixer_norm", "ffn_norm", "post_ffn_norm")


def _norm(found: Alignment) -> list[str]:
    key = next((key for key in found.config if "eps" in key), None)
    has_bias = any(param.endswith("norm.bias") for param in found.filled())
    kind = "'layer'" if has_bias else "'rms'"
    eps, mark = (f"float(config.need({key!r}))", "") if key else ("1e-6", "  # UNRESOLVED: the epsilon of the norms")
    has_weight = any(param.endswith("norm.weight") for param in found.filled())
    if not has_weight:
        mark = f"{mark or '  # UNRESOLVED:'} no norm has weights: where are norms, if any?"
    return [f"    norm = Norm(kind={kind}, eps={eps}, weight={has_weight}, bias={has_bias}){mark}"]


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
    names = {key: value for key, value in found.config.items() if "act" in key and isinstance(value, str)}
    if not names:
        return "'silu'", "  # UNRESOLVED: no key names the activation"
    key, name = next(iter(names.items()))
    if name in ACTIVATIONS:
        return f"activation(config, {key!r})", ""
    return f"str(config.need({key!r}))", f"  # UNRESOLVED: no kernel knows the activation {_line(name)}"


def _rules(found: Alignment, kin: Kin) -> list[str]:
    lines = ["RULES: tuple[WeightRule, ...] = ("]
    for match in found.matches:
        options = "".join(f", {name}=True" for name in ("transpose", "stacked") if getattr(match, name))
        params = ", ".join(repr(param) for param in match.params)
        lines.append(f"    rule({match.pattern.template!r}, {params}{options}),")
    for pattern in found.unmatched:
        known = kin.words(pattern.template)
        lines.append(f"    # UNRESOLVED: {_said(pattern)}{f': {known}' if known else ''}")
    return [*lines, ")"]


def _said(pattern: Pattern) -> str:
    return _line(f"{pattern.template} {list(pattern.shape)}, {words.quantity(pattern.count, 'tensors')}")


def _line(text: str) -> str:
    """Foreign text that stays on the one line of its comment."""
    return " ".join(printable(text).split())
