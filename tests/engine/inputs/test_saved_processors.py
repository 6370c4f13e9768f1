"""Directories that transformers' own processors wrote: a nested image processor with its defaults spelt out."""

import json
from pathlib import Path

import pytest
import transformers

from firstlight.engine.inputs.prepare import Processor
from tests.engine.inputs.test_image_processor import picture
from tests.engine.inputs.test_processors import CASES, PROMPT, OurTensors, assert_same, theirs_of

SAVED = [name for name, case in CASES.items() if hasattr(transformers, f"{case.image['image_processor_type']}Pil")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SAVED)
def test_what_a_processor_saved_is_read_alike(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    (tmp_path / "made").mkdir()
    made = CASES[name].save(tmp_path / "made")
    theirs = theirs_of(monkeypatch, made, CASES[name])
    assert not isinstance(theirs.image_processor, OurTensors)
    theirs.chat_template = (made / "chat_template.jinja").read_text()
    saved = tmp_path / "saved"
    parts = [part for part in type(theirs).get_attributes() if getattr(theirs, part) is not None]
    with monkeypatch.context() as without_videos:
        without_videos.setattr(type(theirs), "get_attributes", lambda *_: parts)
        theirs.save_pretrained(saved)
    (saved / "config.json").write_text((made / "config.json").read_text())
    assert "image_processor" in json.loads((saved / "processor_config.json").read_text())
    ours = Processor.open(saved)
    for sizes in ([(31, 33)], [(131, 20), (64, 48)], [(17, 99), (17, 99), (3, 40)]):
        pictures = [picture(width, height) for width, height in sizes]
        turn = [{"type": "image"} for _ in pictures] + [{"type": "text", "text": PROMPT}]
        talk = [{"role": "user", "content": turn}]
        template = {"chat_template": theirs.chat_template, "add_generation_prompt": True, "tokenize": False}
        text = theirs.tokenizer.apply_chat_template(talk, **template)
        images = [one.image for one in pictures]
        prepared = ours.prepare(PROMPT, pictures, chat=True)
        assert prepared.text == text
        assert_same(prepared, theirs(images=images, text=text, return_tensors="np"))
    assert not [one for one in prepared.record.findings if one.severity == "fatal"]
