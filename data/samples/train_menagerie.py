"""Trains menagerie, a small vision-language model that names, counts and places animals, and writes it as a checkpoint.

    python data/samples/train_menagerie.py                      # trains, evaluates, writes menagerie/ and pictures/
    python data/samples/train_menagerie.py --evaluate           # only measures the checkpoint that is there

The model is LLaVA as transformers writes it: a CLIP vision tower, a two-layer projector and a Llama decoder. Pictures
are rendered by menagerie_scenes.py from the font Noto Color Emoji, questions come from menagerie_questions.py; nothing
is downloaded. First the tower learns alone, from labels for every patch; then everything learns to answer, at last
more of what is hard. Every batch is a function of its number, so a run with the same versions on the same kind of
processor gives the same weights.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import PIL
import torch
import torch.nn.functional as F
import transformers
from menagerie_batches import ChatBatch, ChatBatches, VisionBatch, VisionBatches, encoded, split_facts
from menagerie_layout import IMAGE, config, train_tokenizer, write_checkpoint
from menagerie_questions import Exchange, exchanges_about, plural
from menagerie_scenes import ANIMALS, COLOURS, Scene, draw, place_name, random_scene
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoProcessor, LlavaForConditionalGeneration

# Legend of shape suffixes: B pictures or rows, T tokens, P patches, D width, K classes.
HERE = Path(__file__).resolve().parent
HELD_OUT_SEED = 2
STEPS = (2400, 500, 600, 700)


class Labeller(nn.Module):
    """Heads that teach the tower: over every patch of the layer LLaVA reads, and over the class token at the end."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.patch = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, len(ANIMALS) + 2))
        self.whole = nn.Linear(width, 4 + len(COLOURS) + len(ANIMALS))

    def forward(self, patches_BPD: Tensor, whole_BD: Tensor, batch: VisionBatch) -> Tensor:
        """The sum of all losses."""
        patch_BPK = self.patch(patches_BPD).float()
        whole_BK = self.whole(whole_BD).float()
        count, colour, kinds = whole_BK.split((4, len(COLOURS), len(ANIMALS)), dim=-1)
        return (
            F.cross_entropy(patch_BPK[..., :-1].flatten(0, 1), batch.kind_BP.flatten())
            + 4 * F.binary_cross_entropy_with_logits(patch_BPK[..., -1], batch.middle_BP)
            + 0.3 * F.cross_entropy(count, batch.count_B)
            + 0.3 * F.cross_entropy(colour, batch.colour_B)
            + 3.0 * F.binary_cross_entropy_with_logits(kinds, batch.kinds_BK)
        )


def tower_states(tower: Any, pixels_B3HW: Tensor, *, layers: int) -> Tensor:
    """Hidden states after the first `layers` layers of a CLIP tower: [B, 1 + P, D]."""
    states = tower.pre_layrnorm(tower.embeddings(pixels_B3HW))
    for layer in tower.encoder.layers[:layers]:
        states = layer(states, attention_mask=None)
        states = states[0] if isinstance(states, tuple) else states
    return states


def vision_loss(model: LlavaForConditionalGeneration, labeller: Labeller, batch: VisionBatch) -> Tensor:
    """How wrong the tower's labels are."""
    tower: Any = model.model.vision_tower
    depth = len(tower.encoder.layers)
    states_BPD = tower_states(tower, batch.pixels_B3HW, layers=depth - 1)
    last_BPD = tower.encoder.layers[-1](states_BPD, attention_mask=None)
    last_BPD = last_BPD[0] if isinstance(last_BPD, tuple) else last_BPD
    return labeller(states_BPD[:, 1:], tower.post_layernorm(last_BPD[:, 0]), batch)


def chat_loss(model: LlavaForConditionalGeneration, batch: ChatBatch, names_NK: Tensor | None = None) -> Tensor:
    """Cross entropy of the answers' tokens; with token ids of the animals' names, also `naming_loss`."""
    inner = model.model
    depth = len(inner.vision_tower.encoder.layers)
    states_BPD = tower_states(inner.vision_tower, batch.pixels_B3HW, layers=depth - 1)[:, 1:]
    features_BPD = inner.multi_modal_projector(states_BPD)
    words = inner.language_model.embed_tokens
    embedded_BTD = words(batch.ids_BT)
    embedded_BTD = embedded_BTD.masked_scatter((batch.ids_BT == IMAGE)[..., None], features_BPD.to(embedded_BTD.dtype))
    hidden_BTD = inner.language_model(
        inputs_embeds=embedded_BTD, attention_mask=batch.mask_B1TT, position_ids=batch.positions_BT, use_cache=False
    ).last_hidden_state
    learnt = batch.labels_BT != -100
    loss = F.cross_entropy(model.lm_head(hidden_BTD[learnt]).float(), batch.labels_BT[learnt])
    return loss if names_NK is None else loss + 0.2 * naming_loss(features_BPD, batch.kind_BP, words(names_NK))


def naming_loss(features_BPD: Tensor, kind_BP: Tensor, words_NKD: Tensor) -> Tensor:
    """How far an animal's patches point from the embeddings of its name, in N forms, among those of all K animals.

    Attention compares patches with the words of a question more easily when both point the same way.
    """
    shown = kind_BP > 0
    patches_MD = F.normalize(features_BPD[shown].float(), dim=-1)
    scores_NMK = 12 * patches_MD @ F.normalize(words_NKD.float(), dim=-1).transpose(1, 2)
    right_M = kind_BP[shown] - 1
    return torch.stack([F.cross_entropy(scores_MK, right_M) for scores_MK in scores_NMK]).mean()


class Optimiser:
    """AdamW on float32 copies of parameters that compute in bfloat16."""

    def __init__(self, groups: list[tuple[nn.Module, float]], warm_up: int) -> None:
        self.warm_up = warm_up
        self.bare: list[Tensor] = [parameter for module, _ in groups for parameter in module.parameters()]
        self.full = [parameter.detach().float() for parameter in self.bare]
        peaks = [peak for module, peak in groups for _ in module.parameters()]
        decayed = {True: 0.05, False: 0.0}
        self.inner = torch.optim.AdamW(
            [
                {"params": [parameter], "lr": peak, "peak": peak, "weight_decay": decayed[parameter.ndim > 1]}
                for parameter, peak in zip(self.full, peaks, strict=True)
            ],
            betas=(0.9, 0.98),
            fused=True,
        )

    def step(self, progress: float, step: int) -> None:
        """One update from the gradients at hand, which it clears; the rate warms up and then follows a cosine."""
        scale = min(1.0, (step + 1) / self.warm_up) * 0.5 * (1 + math.cos(math.pi * progress))
        for full, bare in zip(self.full, self.bare, strict=True):
            full.grad = None if bare.grad is None else bare.grad.float()
            bare.grad = None
        nn.utils.clip_grad_norm_(self.full, 1.0)
        for group in self.inner.param_groups:
            group["lr"] = group["peak"] * scale
        self.inner.step()
        with torch.no_grad():
            torch._foreach_copy_(self.bare, self.full)


def optimise(
    name: str,
    batches: DataLoader,
    groups: list[tuple[nn.Module, float]],
    loss_of: Callable[..., Tensor],
    *,
    warm_up: int = 150,
    horizon: int = 0,
) -> None:
    """Trains on every batch once, on the first part of a schedule of `horizon` steps; prints the mean loss."""
    steps = len(batches)
    horizon = horizon or steps
    optimiser = Optimiser(groups, warm_up)
    started, recent = time.monotonic(), []
    for step, batch in enumerate(batches):
        loss = loss_of(batch)
        loss.backward()
        optimiser.step(step / horizon, step)
        recent.append(loss.item())
        if (step + 1) % 50 == 0 or step + 1 == steps:
            mean, seconds = sum(recent) / len(recent), time.monotonic() - started
            print(f"{name} {step + 1}/{steps} loss {mean:.4f} {seconds:.0f} s", flush=True)
            recent = []


def train_tower(model: LlavaForConditionalGeneration, steps: int, rows: int) -> None:
    """Teaches the tower alone to label patches and pictures."""
    labeller = Labeller(model.config.vision_config.hidden_size).bfloat16()
    tower = model.model.vision_tower
    batches = DataLoader(VisionBatches(steps, rows), batch_size=None, num_workers=1, prefetch_factor=4)
    optimise("tower", batches, [(tower, 1.5e-3), (labeller, 1.5e-3)], lambda batch: vision_loss(model, labeller, batch))


class ChatStage(NamedTuple):
    """How one stage of learning to answer differs from another; it ends at `part` of its cosine."""

    name: str
    rate: float
    text_rows: int
    warm_up: int
    part: float = 1.0
    names: bool = False


CHAT_STAGES = (
    ChatStage("chat", rate=1.5e-3, text_rows=6, warm_up=150, part=0.5),
    ChatStage("hard", rate=1.5e-3, text_rows=4, warm_up=40),
    ChatStage("names", rate=1.2e-3, text_rows=4, warm_up=40, names=True),
)


def train_chat(model: LlavaForConditionalGeneration, stage: ChatStage, steps: int, tokenizer_file: str) -> None:
    """Teaches the whole model to answer, the tower at a lower rate than the rest."""
    data = ChatBatches(steps, 24, stage.text_rows, tokenizer_file, stage.name)
    batches = DataLoader(data, batch_size=None, num_workers=1, prefetch_factor=4)
    inner = model.model
    others = (inner.multi_modal_projector, inner.language_model, model.lm_head)
    groups = [(inner.vision_tower, 3e-4), *((module, stage.rate) for module in others)]
    forms = [[encoded(tokenizer_file, f" {form(name)}") for name in ANIMALS] for form in (str, plural)]
    names_NK = torch.tensor(forms)[..., 0] if stage.names else None
    horizon = round(steps / stage.part)
    optimise(
        stage.name,
        batches,
        groups,
        lambda batch: chat_loss(model, batch, names_NK),
        warm_up=stage.warm_up,
        horizon=horizon,
    )


def fresh_model() -> LlavaForConditionalGeneration:
    """The untrained model, in bfloat16; eager attention has the faster backward pass on CPUs."""
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config())
    model.set_attn_implementation("eager")
    return model.bfloat16()


def train(arguments: argparse.Namespace) -> LlavaForConditionalGeneration:
    """All stages; what a stage ends with is kept in --work, and a later run begins after the last one kept."""
    work, steps = arguments.work, arguments.steps
    work.mkdir(parents=True, exist_ok=True)
    tokenizer_file = str(work / "tokenizer.json")
    train_tokenizer().save(tokenizer_file)
    model = fresh_model()
    stages = [lambda: train_tower(model, steps[0], rows=64)]
    stages += [
        partial(train_chat, model, stage, count, tokenizer_file)
        for stage, count in zip(CHAT_STAGES, steps[1:], strict=True)
    ]
    files = [work / f"after-{'-'.join(map(str, steps[: number + 1]))}.pt" for number in range(len(stages))]
    done = max((number + 1 for number, file in enumerate(files) if file.is_file()), default=0)
    if done:
        model.load_state_dict(torch.load(files[done - 1], weights_only=True))
    for stage, file in list(zip(stages, files, strict=True))[done:]:
        stage()
        torch.save(model.state_dict(), file)
    return model


# --- measuring ---------------------------------------------------------------------------------------------------


class Menagerie:
    """The checkpoint in a directory, asked through transformers as anybody would ask it."""

    def __init__(self, directory: Path) -> None:
        self.processor = AutoProcessor.from_pretrained(directory)
        self.model = LlavaForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)

    def answers(self, questions: list[str], pictures: list[Image.Image] | None = None) -> list[str]:
        """Greedy answers to a batch of questions, each with its picture if there are any."""
        image = [{"type": "image"}] if pictures else []
        chats = [[{"role": "user", "content": [*image, {"type": "text", "text": text}]}] for text in questions]
        prompts = [self.processor.apply_chat_template(chat, add_generation_prompt=True) for chat in chats]
        inputs = self.processor(text=prompts, images=pictures, padding=True, return_tensors="pt")
        with torch.inference_mode():
            generated = self.model.generate(**inputs, max_new_tokens=32)
        return self.processor.batch_decode(generated[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def held_out_scene(number: int) -> tuple[Scene, list[Exchange], int]:
    """Held-out scene `number`, what is asked about it, and the side at which its picture is drawn."""
    rng = Random(f"held out {HELD_OUT_SEED} {number}")
    scene = random_scene(rng)
    return scene, list(exchanges_about(scene, rng)), rng.randint(64, 320)


def evaluate(directory: Path, num_scenes: int) -> dict[str, dict[str, float]]:
    """Exact-match accuracy by kind of question on pictures, and on wordings of facts, never trained on."""
    menagerie = Menagerie(directory)
    asked: Counter[str] = Counter()
    right: Counter[str] = Counter()
    wrong: list[str] = []

    def settle(exchanges: list[Exchange], pictures: list[Image.Image] | None) -> None:
        answers = menagerie.answers([exchange.question for exchange in exchanges], pictures)
        for exchange, answer in zip(exchanges, answers, strict=True):
            asked[exchange.kind] += 1
            right[exchange.kind] += answer == exchange.answer
            if answer != exchange.answer:
                wrong.append(f"{exchange.kind}: {exchange.question} {exchange.answer!r}, not {answer!r}")

    for start in range(0, num_scenes, 16):
        batch = [held_out_scene(number) for number in range(start, min(start + 16, num_scenes))]
        pairs = [(exchange, draw(scene, side)) for scene, exchanges, side in batch for exchange in exchanges]
        settle([exchange for exchange, _ in pairs], [picture for _, picture in pairs])
    unseen = list(split_facts()[1])
    for start in range(0, len(unseen), 64):
        settle(unseen[start : start + 64], None)
    for line in wrong[:: max(1, len(wrong) // 12)]:
        print("  wrong,", line)
    accuracy = {kind: {"accuracy": right[kind] / asked[kind], "asked": asked[kind]} for kind in asked}
    for kind, row in accuracy.items():
        print(f"held out: {kind:10s} {100 * row['accuracy']:6.2f} % of {row['asked']}")
    return accuracy


# --- sample pictures ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """A picture that ships beside the checkpoint: what it shows, and a question with its right answer."""

    file: str
    names: tuple[str, ...]
    count: int
    background: str
    question: str
    answer: str
    size: tuple[int, int] = (192, 192)
    orientation: int = 1


SAMPLES = (
    Sample("cat.png", ("cat",), 1, "blue", "What animal is this?", "A cat."),
    Sample("dog.png", ("dog",), 1, "white", "What animal is this?", "A dog."),
    Sample("fox_wide.png", ("fox",), 1, "grey", "What animal is this?", "A fox.", (240, 160)),
    Sample("lion_tall.jpg", ("lion",), 1, "purple", "Is there a lion?", "Yes.", (150, 220)),
    Sample("owl.png", ("owl",), 1, "black", "What colour is the background?", "Black."),
    Sample("bee.png", ("bee",), 1, "pink", "What animal is this?", "A bee.", (96, 96)),
    Sample("two_penguins.png", ("penguin",), 2, "red", "How many penguins are there?", "Two."),
    Sample("three_cows.jpg", ("cow",), 3, "green", "How many animals are there?", "Three."),
    Sample("four_frogs.jpg", ("frog",), 4, "yellow", "Describe the picture.", "Four frogs on a yellow background."),
    Sample("cat_and_dog.png", ("cat", "dog"), 2, "green", "What animals are these?", "A cat and a dog."),
    Sample("octopus.png", ("octopus",), 1, "orange", "What animal is this?", "An octopus."),
    Sample("elephant_sideways.jpg", ("elephant",), 1, "blue", "Where is it?", "Top left.", (192, 192), 6),
)
LYING = {1: None, 6: Image.Transpose.ROTATE_90, 3: Image.Transpose.ROTATE_180, 8: Image.Transpose.ROTATE_270}


def write_pictures(directory: Path) -> None:
    """Writes the sample pictures and, beside them, `expected.json` with a question and the right answer for each."""
    directory.mkdir(parents=True, exist_ok=True)
    for sample in SAMPLES:
        picture = draw(sample_scene(sample), *sample.size)
        exif = Image.Exif()
        turn = LYING[sample.orientation]
        if turn is not None:
            picture, exif[0x0112] = picture.transpose(turn), sample.orientation
        picture.save(directory / sample.file, quality=92, exif=exif, optimize=True)
    rows = [{"file": sample.file, "question": sample.question, "answer": sample.answer} for sample in SAMPLES]
    (directory / "expected.json").write_text(json.dumps(rows, indent=2) + "\n")


def sample_scene(sample: Sample) -> Scene:
    """The first scene of the sample's own stream that has the place which the answer names."""
    for attempt in range(1000):
        rng = Random(f"sample {HELD_OUT_SEED} {sample.file} {attempt}")
        scene = random_scene(rng, names=sample.names, count=sample.count, background=sample.background)
        if not sample.question.startswith("Where") or f"{place_name(scene.animals[0]).capitalize()}." == sample.answer:
            return scene
    raise AssertionError(f"no scene fits {sample.file}")


def main() -> None:
    """Trains, writes and measures as the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=HERE / "menagerie")
    parser.add_argument("--pictures", type=Path, default=HERE / "pictures")
    parser.add_argument("--work", type=Path, default=Path("build/menagerie"), help="keeps what each stage ends with")
    parser.add_argument("--steps", type=int, nargs=4, default=STEPS, help="of the tower, then of CHAT_STAGES")
    parser.add_argument("--scenes", type=int, default=400, help="held-out scenes to measure on")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--evaluate", action="store_true", help="measure only")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.evaluate:
        evaluate(arguments.out, arguments.scenes)
        return
    started = time.monotonic()
    write_pictures(arguments.pictures)
    write_checkpoint(train(arguments), arguments.out)
    write_record(arguments, time.monotonic() - started)


def write_record(arguments: argparse.Namespace, duration_s: float) -> None:
    """Measures the checkpoint and writes beside it how it was made and how often it is right."""
    record = {
        "command": f"python data/samples/train_menagerie.py --steps {' '.join(map(str, arguments.steps))}",
        "date": datetime.now(UTC).date().isoformat(),
        "duration_s": round(duration_s),
        "held_out": evaluate(arguments.out, arguments.scenes),
        "held_out_scenes": arguments.scenes,
        "processor": processor_name(),
        "versions": {
            "pillow": PIL.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    (arguments.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")


def processor_name() -> str:
    """What the system calls the processor."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    main()
