"""Prompts with pictures equal transformers' own processors: ids, marks between rows and tiles, tensors, type ids."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer
from transformers.processing_utils import ProcessorMixin

from firstlight.engine.errors import Refused
from firstlight.engine.inputs.expansions import EXPANSIONS
from firstlight.engine.inputs.image_processor import ImageProcessor
from firstlight.engine.inputs.prepare import Prepared, Processor
from firstlight.engine.weights.files import safetensors_file
from tests.engine.inputs.test_image_kinds import GEMMA, GOT, IDEFICS, NEXT, PAN, QWEN
from tests.engine.inputs.test_image_processor import picture
from tests.engine.inputs.torchvision_stand_in import imported
from tests.engine.inputs.toys import byte_level_backend, picture_of, save_tokenizer, write_json

PROMPT = "What animals are these? 🦊"
SIZES = [(31, 33), (64, 48), (131, 20), (17, 99), (200, 150)]
ROWS = [f"<row_{r}_col_{c}>" for r in range(1, 5) for c in range(1, 5)]
LLAMA4 = {"image_processor_type": "Llama4ImageProcessor", "size": {"height": 28, "width": 28}, "max_patches": 5}
KIMI = {
    "image_processor_type": "Kimi_K25ImageProcessor",
    "patch_size": 4,
    "max_patches": 60,
    "size": {"max_height": 40, "max_width": 40},
}


class Case:
    """A processor class with its keys, its image processor, its tokens, and what its template writes for a picture."""

    def __init__(
        self,
        class_name: str,
        image: Mapping[str, Any],
        token: str,
        tokens: Sequence[str] = (),
        named: Mapping[str, str] | None = None,
        **keys: Any,
    ) -> None:
        self.class_name = class_name
        self.image = image
        self.token = token
        self.tokens = [token, *tokens]
        self.named = dict(named or {})
        self.keys = keys

    def save(self, directory: Path) -> Path:
        backend: Tokenizer = byte_level_backend()
        backend.add_special_tokens([token for token in self.tokens if backend.token_to_id(token) is None])
        named = {"extra_special_tokens": self.named} if self.named else {}
        end = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
        save_tokenizer(backend, directory, "PreTrainedTokenizerFast", **end, **named)
        template = (
            "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% for part in m.content %}"
            "{% if part.type == 'image' %}TOKEN{% else %}{{ part.text }}{% endif %}{% endfor %}"
            "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
        )
        (directory / "chat_template.jinja").write_text(template.replace("TOKEN", self.token))
        write_json(directory / "config.json", {"model_type": "unheard_of", "vision_config": {}})
        write_json(directory / "processor_config.json", {"processor_class": self.class_name, **self.keys})
        write_json(directory / "preprocessor_config.json", self.image)
        return directory


MERGED = {**QWEN, "size": {"shortest_edge": 256, "longest_edge": 4096}}
CASES = {
    "llava_next": Case("LlavaNextProcessor", NEXT, "<image>", patch_size=4, vision_feature_select_strategy="default"),
    "llava_next, full": Case(
        "LlavaNextProcessor",
        {**NEXT, "do_pad": False},
        "<image>",
        patch_size=6,
        vision_feature_select_strategy="full",
        num_additional_image_tokens=1,
    ),
    "qwen2_vl": Case("Qwen2VLProcessor", MERGED, "<|image_pad|>", ["<|video_pad|>"]),
    "qwen2_5_vl": Case("Qwen2_5_VLProcessor", MERGED, "<image>", ["<|video_pad|>"], named={"image_token": "<image>"}),
    "qwen3_vl": Case(
        "Qwen3VLProcessor",
        {**MERGED, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
        "<|image_pad|>",
        ["<|video_pad|>", "<|vision_start|>", "<|vision_end|>"],
    ),
    "glm4v": Case(
        "Glm4vProcessor",
        {**MERGED, "image_processor_type": "Glm4vImageProcessor"},
        "<|image|>",
        ["<|video|>", "<|begin_of_video|>", "<|end_of_video|>"],
    ),
    "glm46v": Case(
        "Glm46VProcessor",
        {**MERGED, "image_processor_type": "Glm46VImageProcessor"},
        "<|image|>",
        ["<|video|>", "<|begin_of_video|>", "<|end_of_video|>"],
    ),
    "pixtral": Case(
        "PixtralProcessor",
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 64}, "patch_size": 16},
        "[IMG]",
        ["[IMG_BREAK]", "[IMG_END]"],
        patch_size=4,
        spatial_merge_size=2,
    ),
    "pixtral, other tokens": Case(
        "PixtralProcessor",
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 32}},
        "<p>",
        ["<r>", "<e>"],
        image_token="<p>",
        image_break_token="<r>",
        image_end_token="<e>",
        patch_size=8,
    ),
    "gemma3": Case(
        "Gemma3Processor",
        {**GEMMA, **PAN},
        "<start_of_image>",
        ["<end_of_image>", "<soft>"],
        named={"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<soft>"},
        image_seq_length=9,
    ),
    "internvl": Case(
        "InternVLProcessor",
        {**GOT, "crop_to_patches": False},
        "<IMG_CONTEXT>",
        ["<img>", "</img>", "<video>"],
        named={
            "context_image_token": "<IMG_CONTEXT>",
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "video_token": "<video>",
        },
        image_seq_length=4,
    ),
    "idefics3": Case(
        "Idefics3Processor",
        IDEFICS,
        "<image>",
        ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *ROWS],
        image_seq_len=5,
    ),
    "smolvlm": Case(
        "SmolVLMProcessor",
        {**IDEFICS, "image_processor_type": "SmolVLMImageProcessor"},
        "<pic>",
        ["<around>", "<whole>", "<end_of_utterance>", *ROWS],
        named={"image_token": "<pic>", "fake_image_token": "<around>", "global_image_token": "<whole>"},
        image_seq_len=3,
    ),
    "llama4": Case(
        "Llama4Processor",
        LLAMA4,
        "<|image|>",
        ["<|patch|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>"],
        patch_size=7,
        pixel_shuffle_ratio=0.5,
    ),
    "kimi_k25": Case("Kimi_K25Processor", KIMI, "<|media_pad|>"),
    "minimax_m3": Case(
        "MiniMaxM3VLProcessor",
        {
            "image_processor_type": "MiniMaxM3VLImageProcessor",
            "patch_size": 4,
            "size": {"shortest_edge": 200, "longest_edge": 4000},
        },
        "]<]image[>[",
        ["]<]video[>[", "]<]start of image[>[", "]<]end of image[>["],
    ),
}
FEATURES = {"gemma3": "<soft>", "llama4": "<|patch|>"}


class OurTensors:
    """Stands where transformers has an image processor with torchvision only: ours, which equals it elsewhere."""

    merge_size = 2

    def __init__(self, directory: Path) -> None:
        self.processor = ImageProcessor.open(directory)

    def fetch_images(self, images: Any) -> Any:
        return images

    def __call__(self, images: Any, **kwargs: Any) -> Any:
        return dict(self.processor.process([picture_of(image) for image in images]))


def theirs_of(monkeypatch: pytest.MonkeyPatch, directory: Path, case: Case) -> Any:
    """transformers' processor. Those that also take videos need torchvision for that part alone: it gets none."""
    monkeypatch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *args: None)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    has_pil = hasattr(transformers, f"{case.image['image_processor_type']}Pil")
    images = transformers.AutoImageProcessor.from_pretrained(directory) if has_pil else OurTensors(directory)
    cls = getattr(transformers, case.class_name)
    if case.class_name == "PixtralProcessor":  # its module imports from one that needs torchvision
        cls = imported(monkeypatch, "pixtral", "processing_pixtral", "PixtralProcessor")
    if case.class_name == "SmolVLMProcessor":  # it asks for a package that only videos need
        monkeypatch.setattr("transformers.models.smolvlm.processing_smolvlm.num2words", object())
    videos = {"video_processor": None} if "video_processor" in cls.get_attributes() else {}
    return cls(image_processor=images, tokenizer=tokenizer, **videos, **case.keys)


def assert_same(ours: Prepared, theirs: Mapping[str, Any]) -> None:
    arrays = ours.arrays()
    assert set(arrays) == set(theirs)
    for name, value in theirs.items():
        found, array = np.asarray(value), arrays[name]
        if isinstance(array, safetensors_file.Tagged):
            array = array.float32()
        assert (array.dtype, array.shape) == (found.dtype, found.shape), name
        np.testing.assert_array_equal(array, found, err_msg=name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_prompts_equal_the_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    directory = case.save(tmp_path)
    theirs, ours = theirs_of(monkeypatch, directory, case), Processor.open(directory)
    pictures = [picture(width, height) for width, height in SIZES]
    for given in ([pictures[0]], [pictures[2]], pictures[1:4], [pictures[3], pictures[4]]):
        turn = [{"type": "image"} for _ in given] + [{"type": "text", "text": PROMPT}]
        chat = ours.prepare(PROMPT, given, chat=True)
        rendered = ours.chat_template.render([{"role": "user", "content": turn}])
        plain = "x".join([case.token] * len(given)) + " and?"
        for found, text in ((chat, rendered), (ours.prepare(plain, given), plain)):
            images = [p.image for p in given]
            assert_same(found, theirs(images=images, text=text, return_tensors="np"))
            fill = ours.tokenizer.token_id(FEATURES.get(name, case.token))
            inside = [position for start, count in found.image_spans for position in range(start, start + count)]
            np.testing.assert_array_equal(np.flatnonzero(found.input_ids[0] == fill), inside)
            assert [sum(n for _, n in spans) for spans in found.picture_spans] == list(found.record.tokens_per_picture)
    assert_same(ours.prepare("text alone"), theirs(text="text alone", return_tensors="np"))


def test_every_class_is_compared() -> None:
    ours = {"KimiVLProcessor", "KimiK25Processor", "KimiK3Processor"}  # not in transformers
    assert {case.class_name for case in CASES.values()} | {"LlavaProcessor"} | ours == set(EXPANSIONS)


@pytest.mark.parametrize("class_name", ["KimiVLProcessor", "KimiK25Processor"])
def test_kimi_as_released(tmp_path: Path, class_name: str) -> None:
    """A token for every block of 2 x 2 patches."""
    image = (
        KIMI if class_name == "KimiK25Processor" else {"image_processor_type": "KimiVLImageProcessor", "patch_size": 4}
    )
    directory = Case(class_name, {**image, "pad_input": True}, "<|media_pad|>").save(tmp_path)
    prepared = Processor.open(directory).prepare(PROMPT, [picture(32, 17), picture(8, 9)], chat=True)
    assert prepared.record.tokens_per_picture == (4 * 3, 1 * 2)
    assert set(prepared.tensors) == {"pixel_values", "image_grid_hws" if "VL" in class_name else "image_grid_thw"}


@pytest.mark.parametrize(("name", "missing"), [("gemma3", "eoi_token"), ("internvl", "context_image_token")])
def test_a_token_that_no_file_names_is_refused_with_pictures_only(tmp_path: Path, name: str, missing: str) -> None:
    directory = CASES[name].save(tmp_path)
    options = json.loads((directory / "tokenizer_config.json").read_text())
    del options["extra_special_tokens"][missing]
    write_json(directory / "tokenizer_config.json", options)
    processor = Processor.open(directory)
    assert processor.prepare("text alone", chat=True).input_ids.size
    with pytest.raises(Refused, match=missing) as caught:
        processor.prepare(PROMPT, [picture(40, 40)], chat=True)
    assert caught.value.findings[0].code == "missing-side-file"


@pytest.mark.parametrize("value", [0, -3, "9", True, 2.5])
def test_a_count_that_is_none_is_refused(tmp_path: Path, value: Any) -> None:
    directory = CASES["gemma3"].save(tmp_path)
    write_json(directory / "processor_config.json", {"processor_class": "Gemma3Processor", "image_seq_length": value})
    with pytest.raises(Refused, match="image_seq_length"):
        Processor.open(directory).prepare(PROMPT, [picture(40, 40)], chat=True)


def test_constants_of_every_part_are_traced(tmp_path: Path) -> None:
    """What the processor class sets for its image processor is said, whatever that one's file says."""
    directory = CASES["gemma3"].save(tmp_path)
    record = Processor.open(directory).prepare(PROMPT, [picture(90, 20)], chat=True).record
    sources = {constant.name: (constant.value, constant.source) for constant in record.constants}
    assert sources["do_pan_and_scan"] == (False, "set by Gemma3Processor")
    assert sources["image_mean"] == ((0.5, 0.5, 0.5), "default of Gemma3ImageProcessor")
    assert sources["size"][1] == "preprocessor_config.json: size"
    assert sources["image_seq_length"] == (9, "processor_config.json: image_seq_length")
    assert sources["boi_token"] == ("<start_of_image>", "tokenizer_config.json: boi_token")


def test_bfloat16_is_written_as_bfloat16(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from firstlight.workbench.preprocess import preprocess

    directory = CASES["llama4"].save(tmp_path)
    given = tmp_path / "picture.png"
    picture(64, 48).image.save(given)
    prepared = preprocess(directory, PROMPT, [given], chat=True, out=tmp_path / "out.safetensors")
    tensors = load_file(tmp_path / "out.safetensors")
    assert str(tensors["pixel_values"].dtype) == "torch.bfloat16"
    np.testing.assert_array_equal(tensors["pixel_values"].float().numpy(), prepared.tensors["pixel_values"])
    assert set(tensors) == {"input_ids", "attention_mask", "pixel_values"}
