"""The sample models' own files: what goes into them equals transformers on real pictures and real vocabularies."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers import AutoProcessor, AutoTokenizer

from firstlight.engine.inputs.detokenizer import Detokenizer
from firstlight.engine.inputs.pictures import open_picture
from firstlight.engine.inputs.prepare import Processor
from tests.engine.inputs.toys import CORPUS

SAMPLES = Path(__file__).resolve().parents[3] / "data" / "samples"
MENAGERIE = SAMPLES / "menagerie"
PICTURES = sorted(file for file in (SAMPLES / "pictures").glob("*") if file.suffix in (".png", ".jpg"))
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
SMOLLM2 = CACHE / "firstlight" / "smollm2"

TEXTS = (
    *CORPUS,
    "1234567890 12 3.14 0x1F",
    "<|im_start|>user\nhi<|im_end|>\n",
    "It's we'll I'd THEY'RE\u00a0nbsp\u2028line",
    "👨‍👩‍👧‍👦 e\u0301 ﬁ ☃ \u202eabc",
    "x" * 3000,
    " \n \t\n" * 50,
)

needs_menagerie = pytest.mark.skipif(not MENAGERIE.is_dir(), reason=f"{MENAGERIE} is not there")
needs_smollm2 = pytest.mark.skipif(not SMOLLM2.is_dir(), reason="run data/samples/fetch_smollm2.py")


@needs_menagerie
@pytest.mark.parametrize("file", PICTURES, ids=lambda file: file.name)
def test_a_question_about_a_sample_picture(file: Path) -> None:
    theirs = AutoProcessor.from_pretrained(MENAGERIE)
    turn = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What animal is this?"}]}]
    text = theirs.apply_chat_template(turn, add_generation_prompt=True)
    image = ImageOps.exif_transpose(Image.open(file))
    expected = theirs(text=text, images=[image], return_tensors="np")
    ours = Processor.open(MENAGERIE).prepare("What animal is this?", [open_picture(file)], chat=True)
    for name, array in ours.arrays().items():
        assert array.dtype == expected[name].dtype
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    assert not ours.record.findings
    sources = {constant.name: constant.source for constant in ours.record.constants}
    assert sources["image_mean"] == "processor_config.json: image_processor.image_mean"


@needs_menagerie
def test_text_of_menagerie() -> None:
    theirs, ours = AutoTokenizer.from_pretrained(MENAGERIE), Processor.open(MENAGERIE).tokenizer
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
    assert ours.eos_ids == (2,)


@pytest.mark.smollm2
@needs_smollm2
def test_text_of_smollm2() -> None:
    theirs, processor = AutoTokenizer.from_pretrained(SMOLLM2), Processor.open(SMOLLM2)
    ours = processor.tokenizer
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        detokenizer = Detokenizer(ours)
        deltas = [detokenizer.push(id_) for id_ in ids]
        assert "".join(deltas) + detokenizer.finish() == theirs.decode(ids, skip_special_tokens=True)
    turn = [{"role": "user", "content": "What is the capital of France?"}]
    expected = theirs.apply_chat_template(turn, add_generation_prompt=True, tokenize=True, return_tensors="np")
    prepared = processor.prepare("What is the capital of France?", chat=True)
    np.testing.assert_array_equal(prepared.input_ids, expected["input_ids"])


@pytest.mark.smollm2
@needs_smollm2
def test_every_token_of_smollm2_streams_as_it_decodes() -> None:
    """A vocabulary with many tokens that are no valid UTF-8 alone: in a random order, in windows."""
    ours = Processor.open(SMOLLM2).tokenizer
    ids = np.random.default_rng(0).permutation(ours.size).tolist()
    broken = sum("\ufffd" in ours.decode([id_], skip_special_tokens=False) for id_ in range(ours.size))
    assert broken > 100
    for start in range(0, len(ids), 500):
        window = ids[start : start + 500]
        detokenizer = Detokenizer(ours, skip_special_tokens=False)
        deltas = [detokenizer.push(id_) for id_ in window]
        assert "".join(deltas) + detokenizer.finish() == ours.decode(window, skip_special_tokens=False)
