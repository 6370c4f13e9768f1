"""Pictures for a processor whose steps are not known here: the vendor's own makes the input, and it is said."""

from pathlib import Path

import numpy as np
import pytest
import transformers
from PIL import Image

from firstlight.engine.errors import Refused
from firstlight.engine.weights.files.safetensors_file import read
from firstlight.workbench.preprocess import preprocess
from tests.engine.inputs.toys import byte_level_backend, save_tokenizer, write_json


@pytest.fixture(scope="module")
def pali(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as transformers' processor of PaliGemma saves it."""
    root = tmp_path_factory.mktemp("pali")
    backend = byte_level_backend()
    backend.add_special_tokens(["<image>"])
    end = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    save_tokenizer(backend, root, "PreTrainedTokenizerFast", **end)
    images = transformers.SiglipImageProcessorPil(size={"height": 12, "width": 12})
    images.image_seq_length = 9
    tokenizer = transformers.AutoTokenizer.from_pretrained(root)
    transformers.PaliGemmaProcessor(images, tokenizer).save_pretrained(root)
    write_json(root / "config.json", {"model_type": "paligemma", "vision_config": {}})
    return root


@pytest.mark.filterwarnings("ignore")
def test_what_the_vendors_processor_makes_is_written(pali: Path, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 31, 3), dtype=np.uint8)).save(picture)
    prepared = preprocess(pali, "What is it?", [picture], out=tmp_path / "out.safetensors")
    theirs = transformers.AutoProcessor.from_pretrained(pali)
    expected = theirs(text=["<image>What is it?"], images=[Image.open(picture)], return_tensors="np")
    found = read(tmp_path / "out.safetensors")
    assert set(found) >= {"input_ids", "attention_mask", "pixel_values"}
    for name in ("input_ids", "attention_mask", "pixel_values"):
        np.testing.assert_array_equal(np.asarray(found[name]), expected[name], err_msg=name)
    assert prepared.record.tokens_per_picture == (9,)
    (said,) = (finding for finding in prepared.record.findings if finding.code == "fallback")
    assert "PaliGemmaProcessor of transformers" in said.message


def test_what_transformers_cannot_do_either_is_refused_as_before(pali: Path, tmp_path: Path) -> None:
    home = tmp_path / "unknown"
    home.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (home / name).write_bytes((pali / name).read_bytes())
    write_json(home / "config.json", {"model_type": "unheard_of", "vision_config": {}})
    write_json(home / "processor_config.json", {"processor_class": "UnheardOfProcessor"})
    Image.new("RGB", (8, 8)).save(tmp_path / "picture.png")
    with pytest.raises(Refused, match="UnheardOfProcessor") as caught:
        preprocess(home, "What?", [tmp_path / "picture.png"])
    assert caught.value.findings[0].code == "unsupported-block"
