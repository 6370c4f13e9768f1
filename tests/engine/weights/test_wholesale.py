"""Kinds entered at once give the account that single tensors give, right checkpoints and wrong ones alike."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from firstlight.engine.model.families import FAMILIES
from firstlight.engine.weights import checkpoint as opening
from firstlight.engine.weights import ledger
from firstlight.engine.weights.accounts import wholesale
from firstlight.engine.weights.accounts.wire import ledger_of, plain
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.files.header import TensorInfo
from firstlight.engine.weights.ledger import Ledger, account
from firstlight.engine.weights.names import columns, stock_columns
from firstlight.engine.weights.names.stock import Kind
from tests.engine.weights.releases import Stored, kimi_k3_tensors, shipped_config, write_release

Get = Callable[[str], Path]


def both(home: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Ledger, Ledger]:
    """The account with kinds entered at once from two members on, of columns and of objects, and with none."""
    checkpoint = Checkpoint.open(home)
    with monkeypatch.context() as patch:
        patch.setattr(opening, "MANY", 0)
        columns = Checkpoint.open(home)
    spec, matcher = FAMILIES.describe(checkpoint.config)
    found: list[Ledger] = []
    for fewest, seen in ((2, columns), (2, checkpoint), (1 << 60, checkpoint)):
        monkeypatch.setattr(wholesale, "FEWEST", fewest)
        monkeypatch.setattr(ledger, "MANY", fewest)
        found.append(in_order(account(seen, spec, matcher)))
    other, fast, plain = found
    assert other == fast
    assert isinstance(plain.sources, dict)
    assert len(fast.sources) == len(list(fast.sources)) == len(plain.sources)
    assert len(fast.consumed) == len(list(fast.consumed)) == len(plain.consumed)
    assert "layers.0.nothing.weight" not in fast.sources
    assert "model.layers.99.mlp.up_proj.weight" not in fast.consumed
    return fast, plain


def in_order(ledger: Ledger) -> Ledger:
    """The account with names in an order of their own: kinds come one after another, single tensors in turn."""
    findings = [msgspec.structs.replace(one, tensors=tuple(sorted(one.tensors))) for one in ledger.findings]
    findings.sort(key=lambda one: (one.code, one.message))
    return msgspec.structs.replace(
        ledger,
        findings=tuple(findings),
        missing=sorted(ledger.missing),
        unconsumed=sorted(ledger.unconsumed),
        fills={},
        strangers=frozenset(),
    )


def small_k3() -> tuple[dict[str, Any], list[Stored]]:
    """Kimi K3 with 8 layers and 12 experts, everything else as released; headers only."""
    config = shipped_config("kimi-k3")
    text, linear = config["text_config"], config["text_config"]["linear_attn_config"]
    text.update(num_hidden_layers=8, num_experts=12, num_experts_per_token=4)
    for key in ("full_attn_layers", "kda_layers"):
        linear[key] = [number for number in linear[key] if number <= 8]
    return config, list(kimi_k3_tensors(config))


@pytest.mark.parametrize(
    "name", ["llama", "llama-tied", "llama-biases", "qwen3_moe", "deepseek_v3", "gemma2", "llava-clip", "mixtral"]
)
def test_as_tensor_by_tensor(name: str, checkpoint: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, plain = both(checkpoint(name), monkeypatch)
    assert fast == plain
    assert fast.complete


def test_packed_weights_with_their_scales(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, tensors = small_k3()
    fast, plain = both(write_release(tmp_path / "k3", config, tensors, 3), monkeypatch)
    assert fast == plain
    assert fast.complete
    assert fast.summary()["tensors_consumed"] == len(tensors)


@pytest.mark.parametrize(
    ("head", "other"), [("", "other."), ("language_model.model.", "model."), ("language_model.", "language_model.x.")]
)
def test_names_that_begin_otherwise_are_one_fault(
    head: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, tensors = small_k3()
    names = {name: other + name.removeprefix(head) if name.startswith(head) else name for name, _, _ in tensors}
    renamed = [(names[name], dtype, shape) for name, dtype, shape in tensors]
    fast, plain = both(write_release(tmp_path / "k3", config, renamed, 3), monkeypatch)
    assert fast == plain
    missing, unconsumed = (finding for finding in fast.findings if finding.severity == "fatal")
    assert (missing.code, unconsumed.code) == ("missing-tensor", "unconsumed-tensor")
    changed = sorted(new for old, new in names.items() if new != old)
    assert (len(unconsumed.tensors) + unconsumed.more_tensors, list(fast.unconsumed)) == (len(changed), changed)
    assert len(missing.tensors) + missing.more_tensors == len(fast.missing)
    assert f"'{other}'" in unconsumed.message or f"'{head.removesuffix(other)}'" in unconsumed.message


def test_a_second_model_beside_the_first_is_no_other_name_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, tensors = small_k3()
    both_models = [*tensors, *((f"draft.{name}", dtype, shape) for name, dtype, shape in tensors)]
    fast, plain = both(write_release(tmp_path / "k3", config, both_models, 3), monkeypatch)
    assert fast == plain
    assert not fast.missing
    found = [finding for finding in fast.findings if finding.code == "unconsumed-tensor"]
    assert len(found) > 20
    assert not any("begin with" in finding.message for finding in found)


EXPERT = "language_model.model.layers.3.block_sparse_moe.experts.5."


@pytest.mark.parametrize("lost", [None, f"{EXPERT}w1.weight_scale"])
def test_few_tensors_are_looked_at_one_by_one(
    lost: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight that lacks its scale is one of them; thousands like it are not."""
    config, tensors = small_k3()
    tensors = [item for item in tensors if item[0] != lost]
    checkpoint = Checkpoint.open(write_release(tmp_path / "k3", config, tensors, 3))
    spec, matcher = FAMILIES.describe(checkpoint.config)
    asked: list[str] = []
    plain = matcher.match
    monkeypatch.setattr(matcher, "match", lambda name: asked.append(name) or plain(name))
    monkeypatch.setattr(wholesale, "FEWEST", 2)
    assert account(checkpoint, spec, matcher).complete is (lost is None)
    assert len(asked) * 8 < len(tensors)


CHANGES: dict[str, Callable[[list[Stored]], Any]] = {
    "a scale is not there": lambda t: [item for item in t if item[0] != f"{EXPERT}w1.weight_scale"],
    "codes are not there": lambda t: [item for item in t if item[0] != f"{EXPERT}w2.weight_packed"],
    "a scale of another shape": lambda t: [
        (n, d, (3072, 56)) if n == f"{EXPERT}w1.weight_scale" else (n, d, s) for n, d, s in t
    ],
    "codes of another dtype": lambda t: [(n, "I64" if n == f"{EXPERT}w1.weight_packed" else d, s) for n, d, s in t],
    "a whole kind of scales of another shape": lambda t: [
        (n, d, (s[0], 2 * s[1])) if n.endswith("w1.weight_scale") else (n, d, s) for n, d, s in t
    ],
    "a whole kind of scales is not there": lambda t: [item for item in t if not item[0].endswith("w1.weight_scale")],
    "a whole kind of codes in a plain dtype": lambda t: [
        (n, "BF16" if n.endswith("w1.weight_packed") else d, s) for n, d, s in t
    ],
    "two layers are not there": lambda t: [
        item for item in t if ".layers.3." not in item[0] and ".layers.5." not in item[0]
    ],
    "a shard is not there, codes and scales cut apart": lambda t: t[:500] + t[601:],
    "other names throughout": lambda t: [(f"other.{n}", d, s) for n, d, s in t],
    "an expert too many": lambda t: [*t, *((n.replace(".5.", ".12."), d, s) for n, d, s in t if EXPERT in n)],
    "a name misspelt": lambda t: [(n.replace("w3", "w4") if EXPERT in n else n, d, s) for n, d, s in t],
    "a whole kind misspelt": lambda t: [(n.replace(".w3.", ".w4."), d, s) for n, d, s in t],
    "a whole kind of another shape": lambda t: [
        (n, d, (2, *s)) if n.endswith("input_layernorm.weight") else (n, d, s) for n, d, s in t
    ],
    "twice under two names": lambda t: [
        *t,
        *((n.replace("language_model.model", "model.language_model"), d, s) for n, d, s in t if "o_proj" in n),
    ],
    "every second tensor is not there": lambda t: t[1::2],
    "every third tensor is not there": lambda t: [item for place, item in enumerate(t) if place % 3],
    "an expert of each layer is not there": lambda t: [item for item in t if ".experts.7." not in item[0]],
    "experts from one on": lambda t: [(renumbered(n, "experts"), d, s) for n, d, s in t],
    "layers from one on": lambda t: [(renumbered(n, "layers"), d, s) for n, d, s in t],
    "experts the other way round": lambda t: [(n, d, s[::-1] if ".experts." in n else s) for n, d, s in t],
    "every second expert the other way round": lambda t: [
        (n, d, s[::-1] if ".experts." in n and int(n.split(".")[6]) % 2 else s) for n, d, s in t
    ],
    "upper case": lambda t: [(n.upper(), d, s) for n, d, s in t],
    "more layers": lambda t: [
        *t,
        *((n.replace(".7.", f".{more}."), d, s) for more in (8, 9) for n, d, s in t if ".layers.7." in n),
    ],
    "unpacked beside the codes": lambda t: [
        *t,
        *((n.removesuffix("_packed"), "BF16", (s[0], 2 * s[1])) for n, d, s in t if n.endswith("_packed")),
    ],
    "layers with a zero before them": lambda t: [(re.sub(r"layers\.(\d)", r"layers.0\1", n), d, s) for n, d, s in t],
    "an expert with a zero before it": lambda t: [
        (n.replace(EXPERT, EXPERT.replace(".5.", ".05.")), d, s) for n, d, s in t
    ],
    "numbers of many digits": lambda t: [(n.replace("experts.", f"experts.{10**16}"), d, s) for n, d, s in t],
    "other letters": lambda t: [(n.replace("experts", "exp\u00e9rts"), d, s) for n, d, s in t],
    "every name of a kind of its own": lambda t: [(f"{n}_{i}x", d, s) for i, (n, d, s) in enumerate(t)],
    "norms of two shapes": lambda t: [
        (n, d, (2,) if n.endswith(("1.input_layernorm.weight", "5.input_layernorm.weight")) else s) for n, d, s in t
    ],
}


def test_a_crowd_of_names_is_one_lot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the first kinds of a few tensors each, what no rule speaks of is entered together.

    What a rule speaks of is not, and nobody is sent to a name of the crowd for another.
    """
    config, tensors = small_k3()
    odd = [(f"{n}_{i}x" if ".experts." in n else n, d, s) for i, (n, d, s) in enumerate(tensors)]
    monkeypatch.setattr(stock_columns, "MOST_OF_FEW", 250)
    monkeypatch.setattr(columns, "_MOST_GROUPS", 3)
    fast, plain = both(write_release(tmp_path / "k3", config, odd, 3), monkeypatch)
    assert fast == plain
    rest = next(finding for finding in fast.findings if "kinds more" in finding.message)
    assert f"{len(fast.unconsumed) - 200:,} kinds more" in rest.message
    assert fast.summary()["tensors"] == len(tensors)
    assert len(fast.consumed) == sum(".experts." not in name for name, _, _ in tensors)


def renumbered(name: str, part: str) -> str:
    """The name with the number behind a part of it one higher."""
    return re.sub(rf"(?<={part}\.)\d+", lambda number: str(int(number[0]) + 1), name)


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_wrong_is_found_all_the_same(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, tensors = small_k3()
    fast, plain = both(write_release(tmp_path / "k3", config, CHANGES[change](tensors), 3), monkeypatch)
    assert fast == plain
    assert not fast.complete


CONFIGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "fewer experts": lambda text: text.update(num_experts=6),
    "more experts": lambda text: text.update(num_experts=24),
    "fewer layers": lambda text: text.update(num_hidden_layers=4),
    "nothing about codes": lambda text: text.pop("quantization_config"),
}


@pytest.mark.parametrize("change", CONFIGS)
def test_the_configuration_of_another_release(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, tensors = small_k3()
    text, linear = config["text_config"], config["text_config"]["linear_attn_config"]
    CONFIGS[change](text)
    for key in ("full_attn_layers", "kda_layers"):
        linear[key] = [number for number in linear[key] if number <= text["num_hidden_layers"]]
    fast, plain = both(write_release(tmp_path / "k3", config, tensors, 3), monkeypatch)
    assert fast == plain
    assert not fast.complete


KEPT = (
    ["re:.*layers.3.*"],
    ["model.layers.1"],
    ["re:.*experts.*"],
    [f"layers.{i}.block_sparse_moe.experts.{e}.w1" for i in (2, 3, 5) for e in (0, 1, 10)] + ["experts.4", "w3"],
    [f"language_model.model.layers.{i}.self_attn*" for i in range(8)] + ["model.layers.4.block*"],
    ["re:.*layers\\.[2-4]\\.block_sparse_moe.*", "re:.*experts\\.1.*", "re:.*(?P<a>[a-z])_(?P=a).*"],
    ["re:.*experts\\.\\d\\.w[12]", "re:.*layers\\.(?!4)\\d\\.self_attn.*"],
)


@pytest.mark.parametrize("kept", KEPT)
def test_modules_that_configurations_leave_out(
    kept: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, tensors = small_k3()
    config["text_config"]["quantization_config"]["ignore"] += kept
    fast, plain = both(write_release(tmp_path / "k3", json.loads(json.dumps(config)), tensors, 3), monkeypatch)
    assert fast == plain


@pytest.mark.parametrize("experts", [12, 6], ids=["sound", "beyond config.json"])
def test_an_account_of_many_goes_to_clients_and_comes_back(
    experts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries and names that are made when asked for are an answer of the server like any."""
    config, tensors = small_k3()
    config["text_config"]["num_experts"] = experts
    monkeypatch.setattr(wholesale, "FEWEST", 2)
    monkeypatch.setattr(ledger, "MANY", 2)
    checkpoint = Checkpoint.open(write_release(tmp_path / "k3", config, tensors, 3))
    found = account(checkpoint, *FAMILIES.describe(checkpoint.config))
    assert not isinstance(found.sources, dict)
    assert bool(found.unconsumed) == (experts < 12)
    back = ledger_of(msgspec.json.encode(found, enc_hook=plain))
    assert (back.consumed, back.sources.keys()) == (dict(found.consumed), set(found.sources))
    assert (back.missing, back.unconsumed) == (tuple(found.missing), tuple(found.unconsumed))


class Watched(Sequence[TensorInfo]):
    """Tensors of which it is known how many were looked at."""

    def __init__(self, names: Sequence[str]) -> None:
        self.looked_at = 0
        self._tensors = [TensorInfo(name, "F32", (1,), "a.safetensors", 0, 4) for name in names]

    def __getitem__(self, place: Any) -> Any:
        self.looked_at += 1
        return self._tensors[place]

    def __len__(self) -> int:
        return len(self._tensors)


@pytest.mark.parametrize("pattern", ["layers.*.w", "layers.*.experts.*.w"])
def test_one_of_a_kind_is_named_without_the_others(pattern: str) -> None:
    """Looking at all of them for each one takes minutes of a release of 20,000 tensors."""
    names = [pattern.replace("*", str(place)) for place in range(1000)]
    tensors = Watched(names)
    kind = Kind(pattern, tensors, {})
    assert kind.some_as(pattern.replace(".w", ".up"), [7, 3]) == [names[place].replace(".w", ".up") for place in (7, 3)]
    assert tensors.looked_at == 2
    assert kind.some_as(pattern, []) == []
