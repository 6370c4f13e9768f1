"""Configurations and pictures as others would choose them: what a golden file of the reference holds is met."""

from pathlib import Path

import pytest

from tests.sweep import inside, outside, pictures

LIMIT = 1e-4  # float32, of the reference's own scale
CASES = {  # of all in tests/sweep/pictures.py those that found something
    ("qwen3_vl", "deep 0, 1, 2"): "",  # features are added behind the last layer too
    ("qwen2_5_vl", "window 20, no multiple"): "",
    ("kimi_k25", "wide positions"): "config-invalid: pos_emb_height 4 differs from pos_emb_width 9",
    ("llava clip", "layers 0, 1 and -1, full"): "",
    ("llava clip", "text of gemma2"): "config-invalid: the text's configuration gives its logits a soft cap",
    ("llava clip", "text of granite"): "config-invalid: the text's configuration gives its logits a scale",
    ("llava clip", "text of afmoe"): "",  # features are scaled with the embeddings
    ("llava_next siglip", "as it is"): "",
    ("gemma3", "softcaps"): "config-invalid: attn_logit_softcapping is stated",
    ("llama4", "no rope every 2"): "bad-golden: the reference counted positions by columns",
    ("idefics3", "scale 4"): "",
}


@pytest.mark.parametrize(("base", "what"), CASES)
def test_a_golden_file_is_met(tmp_path: Path, base: str, what: str) -> None:
    (variant,) = (one for one in pictures.all_variants([base]) if one.what == what)
    model, given = outside.model_of(variant.raw), pictures.given(variant)
    golden = outside.write(model, tmp_path / "case", given, outside.run(model, given, 4))
    result = inside.tried(tmp_path / "case", golden)
    assert result.word == "native", result
    assert result.error is not None
    assert result.error <= LIMIT, result
    expected = CASES[base, what]
    assert any(said.startswith(expected) for said in result.said) if expected else not result.said, result.said


def test_positions_that_the_reference_reads_beyond_are_refused(tmp_path: Path) -> None:
    (variant,) = (one for one in pictures.moonvit() if one.what == "high positions")
    model = outside.model_of(variant.raw)
    golden = outside.write(model, tmp_path / "case", pictures.given(variant), {})
    result = inside.tried(tmp_path / "case", golden)
    assert result.word == "refused"
    assert "pos_emb_height" in result.why
