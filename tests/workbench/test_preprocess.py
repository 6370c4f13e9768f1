"""The rung `preprocess`: the file holds what the vendor's processor makes, under its names and dtypes."""

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from PIL import Image, ImageOps
from transformers import AutoProcessor

from firstlight.engine.errors import Refused
from firstlight.workbench.preprocess import preprocess
from tests.engine.inputs.toys import make_toys

# What running the rung may load, and importing it may not.
HEAVY = ("torch", "transformers", "jinja2", "tokenizers", "PIL.Image")


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("toys")
    make_toys(root)
    return root


def photo(tag: int) -> bytes:
    rng = np.random.default_rng(1)
    exif = Image.Exif()
    exif[0x0112] = tag
    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (16, 24, 3), dtype=np.uint8)).save(file, "JPEG", exif=exif.tobytes())
    return file.getvalue()


@pytest.mark.parametrize("chat", [True, False])
def test_the_file_holds_what_the_processor_makes(toys: Path, tmp_path: Path, chat: bool) -> None:
    (tmp_path / "picture.jpg").write_bytes(photo(6))
    prompt = "What is it?" if chat else "<image>What is it?"
    prepared = preprocess(toys / "vlm", prompt, [tmp_path / "picture.jpg"], chat, tmp_path / "out.safetensors")
    theirs = AutoProcessor.from_pretrained(toys / "vlm")
    content = [{"type": "image"}, {"type": "text", "text": prompt}]
    text = (
        theirs.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        if chat
        else prompt
    )
    upright = ImageOps.exif_transpose(Image.open(tmp_path / "picture.jpg"))
    expected = theirs(text=text, images=[upright], return_tensors="np")
    loaded = safetensors.numpy.load_file(tmp_path / "out.safetensors")
    assert set(loaded) == {"input_ids", "attention_mask", "pixel_values"}
    for name, array in loaded.items():
        assert array.dtype == expected[name].dtype
        np.testing.assert_array_equal(array, expected[name])
    assert prepared.record.pictures[0].orientation_applied


def test_the_orientation_can_be_left_as_stored(toys: Path, tmp_path: Path) -> None:
    theirs = AutoProcessor.from_pretrained(toys / "vlm")
    stored = Image.open(io.BytesIO(photo(6)))
    expected = theirs(text="<image>", images=[stored], return_tensors="np")["pixel_values"]
    left = preprocess(toys / "vlm", "<image>", [photo(6)], apply_exif=False)
    np.testing.assert_array_equal(left.tensors["pixel_values"], expected)
    assert not np.array_equal(preprocess(toys / "vlm", "<image>", [photo(6)]).tensors["pixel_values"], expected)


def test_nothing_is_written_for_what_is_refused(toys: Path, tmp_path: Path) -> None:
    with pytest.raises(Refused):
        preprocess(toys / "vlm", "no placeholder", [photo(1)], out=tmp_path / "out.safetensors")
    assert not list(tmp_path.iterdir())


def test_importing_the_rung_loads_no_heavy_library() -> None:
    loaded = f"[name for name in {HEAVY!r} if name in sys.modules]"
    code = f"import json, sys, firstlight.workbench.preprocess; print(json.dumps({loaded}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == []
