"""Wrong engines of which nothing else knows: `verify` fails, and says near the fault what is wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from firstlight.engine.inputs.prepare import Processor
from firstlight.engine.model.build import Model
from firstlight.engine.model.families.registry import FAMILIES
from firstlight.engine.model.layers import rope as rotary
from firstlight.engine.model.spec import ModelSpec
from firstlight.engine.serving import batch, trace, worker
from firstlight.engine.serving.cache import PageAllocator
from firstlight.engine.serving.options import EngineOptions
from firstlight.engine.weights.files.safetensors_file import read, write
from firstlight.kernels import operators
from firstlight.kernels.attention import reference as attention
from firstlight.kernels.registry_types import Implementation
from firstlight.kernels.sequences import Sequences
from firstlight.workbench.probe_inputs import random_inputs, reach_of, row_length
from firstlight.workbench.reference import Reference
from firstlight.workbench.report import Report
from firstlight.workbench.verify import verify
from tests.checkpoints import _model as model_of
from tests.checkpoints import quiet, randomize
from tests.families.tiny import llama, rope
from tests.vision_checkpoints import build as build_seeing

Patch = pytest.MonkeyPatch
change = msgspec.structs.replace
SAMPLE = Path(__file__).parents[2] / "data" / "samples" / "menagerie"
LONG = {"max_position_embeddings": 8192, "num_hidden_layers": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": llama(**LONG),
    "window": llama(model_type="mistral", sliding_window=300, head_dim=8, **LONG),
    "learned": {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 1024, "vocab_size": 131,
                "tie_word_embeddings": True},
    "wordy": llama(vocab_size=4099, **LONG),
    "stretched": llama(**LONG, **rope("llama3", 500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                      original_max_position_embeddings=2048)),
}  # fmt: skip


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoints by name, made once."""
    root = tmp_path_factory.mktemp("faults")

    def home(name: str) -> Path:
        if not (root / name).exists():
            model = model_of(CONFIGS[name])
            torch.manual_seed(7)
            randomize(model)
            with quiet():
                model.save_pretrained(root / name)
        return root / name

    return home


def check(home: Path, **more: Any) -> Report:
    return verify(EngineOptions(checkpoint=str(home), threads=1, **more), reference="transformers")


def operator(patch: Patch, name: str, wrong: Callable[..., Any]) -> None:
    """An operator that is preferred to all others, and wrong."""
    module = ModuleType(f"wrong_{name}")
    setattr(module, name, wrong)
    patch.setitem(sys.modules, module.__name__, module)
    made = Implementation(name, "wrong", module.__name__, name, operators.anywhere)
    patch.setattr(operators, "IMPLEMENTATIONS", (made, *operators.IMPLEMENTATIONS))


def described(patch: Patch, wrong: Callable[[ModelSpec], ModelSpec]) -> None:
    """A family whose spec is wrong, for whoever asks."""
    right = type(FAMILIES).describe

    def describe(self: Any, config: Any) -> Any:
        spec, matcher = right(self, config)
        return wrong(spec), matcher

    patch.setattr(type(FAMILIES), "describe", describe)


def mixers(spec: ModelSpec, **fields: Any) -> ModelSpec:
    return change(spec, layers=tuple(change(one, mixer=change(one.mixer, **fields)) for one in spec.layers))


def one_token_otherwise(patch: Patch) -> None:
    def wrong(q_TND: Tensor, k: Tensor, v: Tensor, meta: Any, scale: float, *more: Any) -> Tensor:
        return attention.attention(q_TND, k, v, meta, scale * (1.01 if meta.max_query_len == 1 else 1.0), *more)

    operator(patch, "attention", wrong)


def keys_are_kept_in_eight_bits(patch: Patch) -> None:
    def wrong(k_TKD: Tensor, v_TKV: Tensor, k: Tensor, v: Tensor, meta: Any) -> None:
        if meta.max_query_len == 1:
            k_TKD, v_TKV = (one.to(torch.float8_e4m3fn).float() for one in (k_TKD, v_TKV))
        attention.write_cache(k_TKD, v_TKV, k, v, meta)

    operator(patch, "write_cache", wrong)


def neighbours_leak(patch: Patch) -> None:
    def wrong(q_TND: Tensor, k: Tensor, v: Tensor, meta: Any, scale: float, *more: Any) -> Tensor:
        out_TNV = attention.attention(q_TND, k, v, meta, scale, *more)
        leaks = meta.max_query_len == 1 and len(meta.query_lens) > 1
        return out_TNV + 0.01 * out_TNV.roll(1, 0) if leaks else out_TNV

    operator(patch, "attention", wrong)


def later_chunks_are_elsewhere(patch: Patch) -> None:
    right = worker.build_batch

    def wrong(chunks: Any, *more: Any) -> Any:
        batch, chosen = right(chunks, *more)
        by_T = torch.cat([torch.full((len(one.tokens),), int(len(one.tokens) > 1 and one.start > 0)) for one in chunks])
        return replace(batch, positions_T=batch.positions_T + by_T), chosen

    patch.setattr(worker, "build_batch", wrong)


def values_are_kept_in_eight_bits(patch: Patch) -> None:
    def wrong(k_TKD: Tensor, v_TKV: Tensor, k: Tensor, v: Tensor, meta: Any) -> None:
        if meta.max_query_len == 1:
            v_TKV = v_TKV.to(torch.float8_e4m3fn).float()
        attention.write_cache(k_TKD, v_TKV, k, v, meta)

    operator(patch, "write_cache", wrong)


def another_token_is_chosen(patch: Patch) -> None:
    right = worker.choose_tokens

    def wrong(logits_RV: Tensor, *more: Any) -> Tensor:
        return right(logits_RV.index_add(1, torch.tensor([7]), 20 * torch.ones(len(logits_RV), 1)), *more)

    patch.setattr(worker, "choose_tokens", wrong)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (one_token_otherwise, "an answer that is computed over the cache"),
        (values_are_kept_in_eight_bits, "an answer that is computed over the cache"),
        (neighbours_leak, "a row beside others, right alone,"),
        (later_chunks_are_elsewhere, "a prompt that is computed in chunks"),
        (another_token_is_chosen, "a token that is chosen, and not the likeliest"),
    ],
)
def test_what_requests_get_otherwise_than_a_trace(
    fault: Callable[[Patch], None], words: str, homes: Callable[[str], Path], monkeypatch: Patch
) -> None:
    """No tokenizer, no golden file: every block is right, and what is served is wrong."""
    home = homes("llama")
    fault(monkeypatch)
    report = check(home)
    assert [one.name for one in report.checks if one.status == "failed"] == ["random cached"]
    (finding,) = [one for one in report.findings if one.code == "wrong-numbers"]
    assert words in finding.message


def test_answers_of_models_that_choose_keys_are_held_to_the_same(
    checkpoint: Callable[[str], Path], monkeypatch: Patch
) -> None:
    """Scores that are exactly alike are no excuse: what is chosen among them is the same in one piece."""
    home = checkpoint("deepseek_v32-ties")
    report = check(home)
    assert report.status == "passed"
    assert "within the limit" not in next(one.detail for one in report.checks if one.name == "random cached")
    keys_are_kept_in_eight_bits(monkeypatch)
    assert [one.name for one in check(home).checks if one.status == "failed"] == ["random cached"]


def early(spec: ModelSpec) -> ModelSpec:
    scaling = spec.layers[0].rope.scaling  # type: ignore[union-attr]
    return mixers(spec, rope=change(spec.layers[0].rope, scaling=change(scaling, low_freq_factor=0.4)))


def no_window(spec: ModelSpec) -> ModelSpec:
    return mixers(spec, window=None)


@pytest.mark.parametrize(
    ("name", "wrong", "first"),
    [("window", no_window, "random hidden.1"), ("stretched", early, "far hidden.1")],
)
def test_what_shows_far_behind_the_first_tokens_alone(
    name: str, wrong: Callable[[ModelSpec], ModelSpec], first: str, homes: Callable[[str], Path], monkeypatch: Patch
) -> None:
    """A window that the family has lost; frequencies that are stretched otherwise, but for the fast ones."""
    home = homes(name)
    assert check(home).status == "passed"
    described(monkeypatch, wrong)
    report = check(home)
    assert first in [one.name for one in report.checks if one.status == "failed"]
    assert any("layer 0, mixer (Attention)" in one.message for one in report.findings)


def weights_are(patch: Patch, name: str, rows: slice, factor: float) -> None:
    """Rows of a storage that are too large by a factor, whatever the checkpoint says."""
    right = Model.__init__

    def wrong(self: Model, spec: Any, weights: Any, ops: Any) -> None:
        weights.storages[name][rows].mul_(factor)
        right(self, spec, weights, ops)

    patch.setattr(Model, "__init__", wrong)


@pytest.mark.parametrize(
    ("name", "storage", "row", "check_name", "words"),
    [
        ("learned", "positions.weight", 701, "embeddings of positions", "1 of 1,024 positions enter"),
        ("wordy", "embed.weight", 3001, "embeddings", "1 of 4,099 tokens enter"),
    ],
)
def test_rows_that_no_prompt_uses_are_compared(
    name: str, storage: str, row: int, check_name: str, words: str, homes: Callable[[str], Path], monkeypatch: Patch
) -> None:
    """One row of a table, off by a hundredth: no token of ours stands there, and a user's will."""
    home = homes(name)
    weights_are(monkeypatch, storage, slice(row, row + 1), 1.01)
    report = check(home)
    assert [one.name for one in report.checks if one.status == "failed"] == [check_name]
    (finding,) = [one for one in report.findings if one.code == "wrong-numbers"]
    assert words in finding.message
    assert finding.message.endswith(f" {row}")
    assert report.metrics["token_embeddings"].value == {"learned": 131, "wordy": 4099}[name]


def test_a_block_that_is_two_in_a_hundred_too_large_fails_in_bfloat16(
    homes: Callable[[str], Path], monkeypatch: Patch
) -> None:
    """Less than the rounding of single values: all of them together show it."""
    home = homes("llama")
    weights_are(monkeypatch, "layers.0.ffn.down.weight", slice(None), 1.02)
    report = check(home, dtype="BF16")
    assert "random teacher.1" in [one.name for one in report.checks if one.status == "failed"]
    assert any("layer 0, feed-forward (MLP)" in one.message for one in report.findings)


def test_a_page_of_the_cache_that_two_requests_have_is_told(homes: Callable[[str], Path], monkeypatch: Patch) -> None:
    right, given = PageAllocator.take, list[int]()

    def wrong(self: PageAllocator, count: int) -> tuple[int, ...]:
        pages = right(self, count)
        given.extend(pages)
        return (given[0], *pages[1:])

    home = homes("llama")
    monkeypatch.setattr(PageAllocator, "take", wrong)
    report = check(home)
    assert [one.name for one in report.checks if one.status == "failed"] == ["random cached"]
    (finding,) = [one for one in report.findings if one.severity == "fatal"]
    assert finding.code == "engine-failed"
    assert "page 0 of the cache was given to request 2, and request 1 still has it" in finding.message


def test_a_huge_channel_hides_no_block(homes: Callable[[str], Path], tmp_path: Path, monkeypatch: Patch) -> None:
    """Two in a thousand of what one block adds, beside a channel that is three hundred times as large."""
    tensors = read(homes("llama") / "model.safetensors")
    tensors["model.embed_tokens.weight"][:, 0] = 300.0  # type: ignore[index]
    (tmp_path / "config.json").write_bytes((homes("llama") / "config.json").read_bytes())
    write(tmp_path / "model.safetensors", tensors, {"format": "pt"})
    right = Model.__init__

    def wrong(self: Model, spec: Any, weights: Any, ops: Any) -> None:
        weights.storages["layers.0.ffn.down.weight"].mul_(1.002)
        right(self, spec, weights, ops)

    assert check(tmp_path).status == "passed"
    monkeypatch.setattr(Model, "__init__", wrong)
    report = check(tmp_path)
    assert "random teacher.1" in [one.name for one in report.checks if one.status == "failed"]
    assert any("layer 0, feed-forward (MLP)" in one.message for one in report.findings)


@pytest.mark.parametrize(
    ("name", "words"), [("pixel_values", "picture processor is at fault"), ("input_ids", "tokenizer or the chat")]
)
def test_inputs_are_held_against_those_of_the_vendors_processor(name: str, words: str, monkeypatch: Patch) -> None:
    """Both sides would compute with the wrong ones, and agree."""
    right = Processor.prepare

    def wrong(self: Processor, *more: Any) -> Any:
        prepared = right(self, *more)
        if name == "pixel_values":
            prepared.tensors[name][:] *= np.float32(1.05)
            return prepared
        kept = prepared.input_ids[:, :-1]
        return change(prepared, input_ids=kept, attention_mask=np.ones_like(kept))

    monkeypatch.setattr(Processor, "prepare", wrong)
    report = check(SAMPLE)
    assert [one.name for one in report.checks if one.status == "failed"] == [f"prompt {name}"]
    assert any(words in one.message for one in report.findings)


def test_rows_reach_beyond_windows_where_a_run_ends_soon(homes: Callable[[str], Path]) -> None:
    spec, _ = FAMILIES.describe(CONFIGS["window"] | {"architectures": ["MistralForCausalLM"]})
    lost = mixers(spec, window=None)
    assert reach_of(spec, {}) == reach_of(lost, CONFIGS["window"]) == 300
    assert reach_of(lost, {"text_config": {"sliding_window": 70}}) == 70
    assert row_length(spec, 300, elements=100_000) == 308
    assert row_length(spec, 300, elements=10**9) == 256
    ids = random_inputs(spec, 48)["input_ids"]
    assert {0, 16, 17, 65, 66, 130} <= set(ids[1].tolist()), "both ends of what each of 2, 4 and 8 ranks has"


def test_a_window_that_is_not_reached_is_said(homes: Callable[[str], Path], monkeypatch: Patch) -> None:
    monkeypatch.setattr("firstlight.workbench.probe_inputs.MULTIPLIES", 0.0)
    report = check(homes("window"))
    assert report.status == "passed"
    assert any("beyond 300 tokens was not compared" in one.message for one in report.findings)


def test_the_padding_row_of_a_reference_is_that_of_the_checkpoint(checkpoint: Callable[[str], Path]) -> None:
    """transformers sets it to zero for one architecture, behind loading it."""
    home = checkpoint("youtu")
    found = Reference.open(home).run({"input_ids": np.zeros((1, 2), np.int64)})["hidden.0"][0, 0]
    np.testing.assert_array_equal(found, read(home / "model.safetensors")["model.embed_tokens.weight"][0])  # type: ignore[index]


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize(("storage", "factor"), [("ffn.down", 1.02), ("mixer.o", 0.98)])
def test_the_scale_of_the_last_layer_shows_in_front_of_the_norm(
    storage: str, factor: float, dtype: str, homes: Callable[[str], Path], monkeypatch: Patch
) -> None:
    """The final norm hides how large the stream is, and a part of it that is two in a hundred off, in rounding."""
    home = homes("llama")
    assert check(home, dtype=dtype).status == "passed"
    weights_are(monkeypatch, f"layers.1.{storage}.weight", slice(None), factor)
    report = check(home, dtype=dtype)
    assert "random teacher.unnormed" in [one.name for one in report.checks if one.status == "failed"]
    assert any(one.message.startswith("layer 1,") for one in report.findings if one.code == "wrong-numbers")


def test_a_last_layer_that_is_known_behind_the_norm_alone(
    homes: Callable[[str], Path], tmp_path: Path, monkeypatch: Patch
) -> None:
    """Golden files have it so: two in a hundred of a part that is a thousandth of the stream."""
    tensors = read(homes("llama") / "model.safetensors")
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.layers.1.{name}.weight"] *= np.float32(1e-3)  # type: ignore[operator]
    (tmp_path / "config.json").write_bytes((homes("llama") / "config.json").read_bytes())
    write(tmp_path / "model.safetensors", tensors, {"format": "pt"})
    given = random_inputs(FAMILIES.describe(json.loads((tmp_path / "config.json").read_text()))[0], 32)
    found = Reference.open(tmp_path).run(given)
    del found["unnormed"]
    write(tmp_path / "golden", {**given, **found})
    options = EngineOptions(checkpoint=str(tmp_path), threads=1)
    assert verify(options, tmp_path / "golden").status == "passed"
    weights_are(monkeypatch, "layers.1.ffn.down.weight", slice(None), 1.02)
    report = verify(options, tmp_path / "golden")
    assert [one.name for one in report.checks if one.status == "failed"] == ["teacher.2"]
    assert any("layer 1" in one.message for one in report.findings if one.code == "wrong-numbers")


def test_a_final_norm_that_is_wrong_is_no_layer(homes: Callable[[str], Path], monkeypatch: Patch) -> None:
    home = homes("llama")
    weights_are(monkeypatch, "norm.weight", slice(3, 4), 1.01)
    report = check(home)
    assert "random teacher.unnormed" not in [one.name for one in report.checks if one.status == "failed"]
    assert any("the final norm" in one.message for one in report.findings if one.code == "wrong-numbers")


@pytest.mark.parametrize("name", ["deepseek_v4", "olmoe-normalized"])
def test_what_is_right_passes_in_float16(name: str, checkpoint: Callable[[str], Path]) -> None:
    """Projections that the reference keeps in float32; a token with another expert, which all that follow see."""
    assert check(checkpoint(name), dtype="F16").status == "passed"


@pytest.mark.parametrize(("name", "dtype"), [("llama4", "BF16"), ("kimi_k25", "BF16"), ("minimax_m3_vl", "F16")])
def test_pictures_are_given_to_a_reference_in_its_own_dtype(name: str, dtype: str, tmp_path: Path) -> None:
    """Of the last, two of few tokens have another expert than the reference's: by chance, and no fault."""
    assert check(build_seeing(name, tmp_path), dtype=dtype).status == "passed"


def test_a_state_that_an_earlier_row_left_is_told(checkpoint: Callable[[str], Path], monkeypatch: Patch) -> None:
    """It is forgotten over a long prompt: a row of two tokens waits for a place as well."""
    home = checkpoint("mamba2")
    assert check(home).status == "passed"
    monkeypatch.setattr(Sequences, "build", partial(_never_fresh, Sequences.build))
    assert [one.name for one in check(home).checks if one.status == "failed"] == ["random cached"]


def _never_fresh(right: Callable[..., Any], query_lens: Any, slots: Any, fresh: Any, *more: Any) -> Any:
    return right(query_lens, slots, [False] * len(fresh), *more)


@pytest.mark.parametrize(("off", "first"), [(1, "row33 hidden.1"), (-1, "row32 hidden.1")])
def test_frequencies_that_change_one_token_too_late_or_too_soon(
    off: int, first: str, checkpoint: Callable[[str], Path], monkeypatch: Patch
) -> None:
    home = checkpoint("llama-rope-long")
    assert check(home).status == "passed"
    right = rotary.frequencies
    monkeypatch.setattr(rotary, "frequencies", lambda rope, length=0: right(rope, length - off))
    assert first in [one.name for one in check(home).checks if one.status == "failed"]


def test_the_second_of_two_pictures_is_another(checkpoint: Callable[[str], Path], monkeypatch: Patch) -> None:
    """One picture a prompt would not show whose features stand where."""
    home = checkpoint("llava-siglip")
    assert check(home).status == "passed"
    right = batch.place_features

    def wrong(spans: Any, start: int, stop: int, offset: int, features_NH: Tensor) -> list[Any]:
        return [one for span in spans for one in right((span,), start, stop, offset, features_NH)]

    for module in (batch, trace):
        monkeypatch.setattr(module, "place_features", wrong)
    failed = [one.name for one in check(home).checks if one.status == "failed"]
    assert "pictures hidden.0" in failed
    assert not any(name.startswith("random") for name in failed)


def test_a_picture_that_is_cut_between_two_steps(tmp_path: Path, monkeypatch: Patch) -> None:
    """The rest of it begins anew with the first features; where no picture is cut nothing is wrong."""
    home = build_seeing("qwen2_vl", tmp_path)
    assert check(home).status == "passed"
    right = batch.place_features

    def wrong(spans: Any, start: int, stop: int, offset: int, features_NH: Tensor) -> list[Any]:
        placed = right(spans, start, stop, offset, features_NH)
        return [replace(one, features_NH=features_NH[: len(one.features_NH)]) if start else one for one in placed]

    monkeypatch.setattr(batch, "place_features", wrong)
    assert [one.name for one in check(home).checks if one.status == "failed"] == ["pictures cached"]


def test_a_reference_forgets_how_long_the_row_before_was(checkpoint: Callable[[str], Path]) -> None:
    """transformers keeps stretched frequencies for a row that is exactly as long as those it was trained with."""
    reference = Reference.open(checkpoint("llama-rope-dynamic"))
    rows = [{"input_ids": np.arange(1, length + 1)[None]} for length in (64, 96, 64)]
    first, _, again = (reference.run(row)["logits"] for row in rows)
    np.testing.assert_array_equal(first, again)
