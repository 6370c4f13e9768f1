"""What menagerie learns from: every batch is a function of its number."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cache, lru_cache
from random import Random
from typing import NamedTuple

import numpy as np
import tokenizers
import torch
from menagerie_layout import ASSISTANT, END, GRID, IMAGE, NUM_PATCHES, PAD, SIDE, SYSTEM, USER
from menagerie_questions import (
    SYSTEM_PROMPTS,
    Exchange,
    exchanges_about,
    facts,
    hard_exchanges_about,
    loosely,
    without_picture,
)
from menagerie_scenes import ANIMALS, COLOURS, Scene, draw, random_scene
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

# Legend of shape suffixes: B pictures or rows, T tokens, P patches, H and W pixels, K classes.
TRAINING_SEED = 1


class VisionBatch(NamedTuple):
    """Pictures with labels: of every patch (0 = background) and of the whole (count, colour, kinds)."""

    pixels_B3HW: Tensor
    kind_BP: Tensor
    middle_BP: Tensor
    count_B: Tensor
    colour_B: Tensor
    kinds_BK: Tensor


class ChatBatch(NamedTuple):
    """Rows of exchanges that share a picture; `mask` lets each exchange see the shared beginning and itself."""

    pixels_B3HW: Tensor
    ids_BT: Tensor
    labels_BT: Tensor
    positions_BT: Tensor
    mask_B1TT: Tensor
    kind_BP: Tensor


@dataclass(frozen=True)
class VisionBatches(Dataset[VisionBatch]):
    """Batch number `index` for the tower alone."""

    steps: int
    rows: int

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> VisionBatch:
        rng = Random(f"vision {TRAINING_SEED} {index}")
        scenes = [random_scene(rng) for _ in range(self.rows)]
        labels = [patch_labels(scene) for scene in scenes]
        kinds_BK = torch.zeros(self.rows, len(ANIMALS))
        for row, scene in enumerate(scenes):
            for animal in scene.animals:
                kinds_BK[row, ANIMALS.index(animal.name)] = 1.0
        return VisionBatch(
            pixels_of(scenes, rng),
            torch.from_numpy(np.stack([kind for kind, _ in labels])),
            torch.from_numpy(np.stack([middle for _, middle in labels])),
            torch.tensor([len(scene.animals) - 1 for scene in scenes]),
            torch.tensor([COLOURS.index(scene.background) for scene in scenes]),
            kinds_BK,
        )


@dataclass(frozen=True)
class ChatBatches(Dataset[ChatBatch]):
    """Batch number `index` of a stage ("chat", or one with more of what is hard): rows with a picture, then text."""

    steps: int
    rows: int
    text_rows: int
    tokenizer_file: str
    stage: str = "chat"

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> ChatBatch:
        rng = Random(f"{self.stage} {TRAINING_SEED} {index}")
        about, pairs = (exchanges_about, 0.15) if self.stage == "chat" else (hard_exchanges_about, 0.45)
        scenes = [random_scene(rng, pairs=pairs) for _ in range(self.rows)]
        rows = [self._row(list(about(scene, rng)), rng, picture=True) for scene in scenes]
        known = trained_facts()
        for _ in range(self.text_rows):
            exchanges = [rng.choice(known) if rng.random() < 0.8 else without_picture(rng) for _ in range(9)]
            rows.append(self._row(exchanges, rng, picture=False))
        length = -(-max(len(row.ids) for row in rows) // 16) * 16
        stacked = [row.padded(length) for row in rows]
        ids, labels, positions, groups = (torch.from_numpy(np.stack(column)) for column in zip(*stacked, strict=True))
        same = (groups[:, :, None] == groups[:, None, :]) | (groups[:, None, :] == 0)
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        mask = (same & causal) | torch.eye(length, dtype=torch.bool)
        barred = torch.zeros(mask.shape, dtype=torch.bfloat16).masked_fill_(~mask, torch.finfo(torch.bfloat16).min)
        kind_BP = torch.from_numpy(np.stack([patch_labels(scene)[0] for scene in scenes]))
        return ChatBatch(pixels_of(scenes, rng), ids, labels, positions, barred[:, None], kind_BP)

    def _row(self, exchanges: list[Exchange], rng: Random, *, picture: bool) -> Row:
        rng.shuffle(exchanges)
        row = Row([], [], [], [])
        newline = encoded(self.tokenizer_file, "\n")
        if rng.random() < 0.1:
            system = encoded(self.tokenizer_file, rng.choice(SYSTEM_PROMPTS))
            row.add((SYSTEM, *newline, *system, END, *newline))
        row.add((USER, *newline))
        if picture:
            row.add((IMAGE,) * NUM_PATCHES + newline)
        chained = rng.random() < 0.15  # one conversation of several turns instead of several of one
        start = len(row.ids)
        for number, exchange in enumerate(exchanges):
            group, position = (0, len(row.ids)) if chained else (number + 1, start)
            question = encoded(self.tokenizer_file, loosely(exchange.question, rng))
            answer = encoded(self.tokenizer_file, exchange.answer)
            opening = (*newline, USER, *newline) if chained and number else ()
            row.add((*opening, *question, END, *newline, ASSISTANT, *newline), group, position)
            position += len(opening) + len(question) + 2 + 2 * len(newline)
            row.add((*answer, END), group, position, learn=True)
        return row


class Row(NamedTuple):
    """The tokens of one row under construction."""

    ids: list[int]
    labels: list[int]
    positions: list[int]
    groups: list[int]

    def add(self, ids: tuple[int, ...], group: int = 0, position: int | None = None, *, learn: bool = False) -> None:
        """Appends tokens; those to be learnt become labels of the token before them."""
        first = len(self.ids) if position is None else position
        self.ids.extend(ids)
        self.positions.extend(range(first, first + len(ids)))
        self.groups.extend([group] * len(ids))
        if learn:
            self.labels[-1] = ids[0]
            self.labels.extend((*ids[1:], -100))
        else:
            self.labels.extend([-100] * len(ids))

    def padded(self, length: int) -> list[np.ndarray]:
        """The four columns as arrays of `length`."""
        fills = (PAD, -100, 0, -1)
        return [np.array(column + [fill] * (length - len(column))) for column, fill in zip(self, fills, strict=True)]


def pixels_of(scenes: list[Scene], rng: Random) -> Tensor:
    """Scenes drawn at several sizes and brought to the model's size and range as its image processor does."""
    arrays = []
    for scene in scenes:
        picture = draw(scene, SIDE if rng.random() < 0.4 else rng.randint(SIDE, 2 * SIDE))
        arrays.append(np.asarray(picture.resize((SIDE, SIDE), Image.Resampling.BICUBIC)))
    return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).float().div(127.5).sub(1.0).bfloat16()


def patch_labels(scene: Scene) -> tuple[np.ndarray, np.ndarray]:
    """For each patch the animal on it (0 = none), and whether an animal's centre lies in it."""
    y, x = (np.mgrid[0:GRID, 0:GRID] + 0.5) / GRID
    kind, middle = np.zeros((GRID, GRID), np.int64), np.zeros((GRID, GRID), np.float32)
    for animal in scene.animals:
        kind[np.hypot(x - animal.x, y - animal.y) < 0.42 * animal.size] = ANIMALS.index(animal.name) + 1
        row, column = (min(GRID - 1, int(value * GRID)) for value in (animal.y, animal.x))
        kind[row, column] = ANIMALS.index(animal.name) + 1
        middle[row, column] = 1.0
    return kind.reshape(-1), middle.reshape(-1)


@lru_cache(maxsize=1)
def split_facts() -> tuple[tuple[Exchange, ...], tuple[Exchange, ...]]:
    """Facts to train on and facts held out: of every fifth, one wording is never seen with that animal and fact."""
    grouped: dict[str, list[Exchange]] = defaultdict(list)
    for number, fact in enumerate(facts()):
        grouped["held out" if Random(f"fact {number}").random() < 0.12 else "train"].append(fact)
    return tuple(grouped["train"]), tuple(grouped["held out"])


def trained_facts() -> tuple[Exchange, ...]:
    """The facts that are trained on."""
    return split_facts()[0]


@cache
def encoded(tokenizer_file: str, text: str) -> tuple[int, ...]:
    """Token ids of a text."""
    return tuple(_tokenizer(tokenizer_file).encode(text).ids)


@lru_cache(maxsize=1)
def _tokenizer(tokenizer_file: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(tokenizer_file)
