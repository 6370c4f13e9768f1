"""Pictures of animals: a scene is data, and drawing it is a pure function of that data.

A scene says which animals stand where, how large and how turned, on which background. The animals are the colour
bitmaps of the font Noto Color Emoji (Debian: fonts-noto-color-emoji). Lengths are fractions of the picture's side, so
that one scene can be drawn at any size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image, ImageDraw, ImageFont

FONT_PATHS = (
    "/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf",
    "/usr/share/fonts/noto/NotoColorEmoji.ttf",
    "/usr/share/fonts/google-noto-emoji/NotoColorEmoji.ttf",
)
FONT_SIZE = 109  # the one size of the font's bitmaps

GLYPHS: dict[str, str] = {
    "bee": "🐝",
    "cat": "🐱🐈",
    "chicken": "🐔",
    "cow": "🐮🐄",
    "crab": "🦀",
    "dog": "🐶🐕",
    "duck": "🦆",
    "elephant": "🐘",
    "fish": "🐟🐠",
    "fox": "🦊",
    "frog": "🐸",
    "horse": "🐴🐎",
    "lion": "🦁",
    "monkey": "🐵🐒",
    "octopus": "🐙",
    "owl": "🦉",
    "panda": "🐼",
    "penguin": "🐧",
    "pig": "🐷🐖",
    "rabbit": "🐰🐇",
    "sheep": "🐑",
    "snake": "🐍",
    "tiger": "🐯🐅",
    "turtle": "🐢",
}
ANIMALS = tuple(GLYPHS)

RGB = tuple[int, int, int]
BACKGROUNDS: dict[str, tuple[RGB, ...]] = {
    "black": ((0, 0, 0), (30, 30, 34)),
    "blue": ((50, 100, 215), (0, 0, 255), (20, 30, 120), (125, 195, 240)),
    "green": ((60, 165, 75), (0, 225, 30), (0, 105, 40), (150, 215, 150)),
    "grey": ((128, 128, 128), (95, 97, 100), (165, 165, 165)),
    "orange": ((245, 140, 30), (255, 165, 0), (225, 115, 20)),
    "pink": ((250, 165, 200), (255, 192, 203), (255, 105, 180)),
    "purple": ((130, 60, 170), (128, 0, 128), (90, 40, 150), (170, 120, 215)),
    "red": ((215, 45, 40), (255, 0, 0), (150, 20, 25)),
    "white": ((255, 255, 255), (240, 242, 244)),
    "yellow": ((245, 220, 60), (255, 255, 0), (250, 240, 130)),
}
COLOURS = tuple(BACKGROUNDS)


@dataclass(frozen=True)
class Animal:
    """One animal in a scene: centre and size as fractions of the side, the turn in degrees."""

    name: str
    glyph: str
    x: float
    y: float
    size: float
    turn_deg: float = 0.0
    mirrored: bool = False


@dataclass(frozen=True)
class Scene:
    """What a picture shows; `seed` fixes the grain of the background."""

    background: str
    rgb: RGB
    animals: tuple[Animal, ...]
    ramp: float = 0.0
    ramp_direction_rad: float = 0.0
    grain: float = 0.0
    seed: int = 0


def random_scene(
    rng: Random,
    *,
    names: tuple[str, ...] = (),
    count: int | None = None,
    background: str | None = None,
    pairs: float = 0.15,
) -> Scene:
    """A scene drawn by `rng`: one to four animals of one kind or, as often as `pairs` says, one each of two kinds."""
    names = names or tuple(rng.sample(ANIMALS, 2 if rng.random() < pairs else 1))
    if len(names) == 2:
        animals = _side_by_side(rng, names)
    else:
        count = count or rng.choices((1, 2, 3, 4), (0.5, 0.18, 0.16, 0.16))[0]
        animals = (_one_alone(rng, names[0]),) if count == 1 else _scattered(rng, names[0], count)
    background = background or rng.choice(COLOURS)
    return Scene(
        background=background,
        rgb=_shade(rng, background),
        animals=animals,
        ramp=rng.choice((0.0, rng.uniform(0.0, 0.2))),
        ramp_direction_rad=rng.uniform(0.0, 2 * math.pi),
        grain=rng.choice((0.0, rng.uniform(0.0, 7.0))),
        seed=rng.getrandbits(32),
    )


def place_name(animal: Animal) -> str:
    """Where an animal stands, by the third of the picture that holds its centre: "top left", ..., "centre"."""
    row = "top" if animal.y < 0.4 else "bottom" if animal.y > 0.6 else ""
    column = "left" if animal.x < 0.4 else "right" if animal.x > 0.6 else ""
    return f"{row} {column}".strip() or "centre"


def draw(scene: Scene, width: int, height: int | None = None) -> Image.Image:
    """The picture of a scene as RGB; where it is not square the scene fills the middle and the background the rest."""
    height = height or width
    side = min(width, height)
    picture = Image.fromarray(_background(scene, width, height))
    for animal in scene.animals:
        bitmap = _bitmap(animal, max(4.0, animal.size * side))
        left = round((width - side) / 2 + animal.x * side - bitmap.width / 2)
        top = round((height - side) / 2 + animal.y * side - bitmap.height / 2)
        picture.paste(bitmap, (left, top), bitmap)
    return picture


def font_path() -> Path:
    """The emoji font, where Linux distributions put it."""
    for candidate in map(Path, FONT_PATHS):
        if candidate.is_file():
            return candidate
    raise SystemExit("The font NotoColorEmoji.ttf is not installed: apt-get install fonts-noto-color-emoji")


def _one_alone(rng: Random, name: str) -> Animal:
    row, column = rng.choice((0, 1, 2)), rng.choice((0, 1, 2))
    largest = 0.9 if row == column == 1 else 0.62
    size = rng.uniform(0.28, largest)
    if rng.random() < 0.2:
        row, column, size = 1, 1, rng.uniform(0.55, 0.95)
    low = max(size / 2 - 0.03, 0.15)
    thirds = ((low, 0.365), (0.455, 0.545), (0.635, 1 - low))
    return _animal(rng, name, rng.uniform(*thirds[column]), rng.uniform(*thirds[row]), size)


def _scattered(rng: Random, name: str, count: int) -> tuple[Animal, ...]:
    glyph = rng.choice(GLYPHS[name])
    size = rng.uniform(0.26, 0.45 if count == 2 else 0.38)
    while True:
        spots = [(rng.uniform(size / 2, 1 - size / 2), rng.uniform(size / 2, 1 - size / 2)) for _ in range(count)]
        if all(math.dist(a, b) > size * 1.02 for i, a in enumerate(spots) for b in spots[:i]):
            break
        size *= 0.995
    return tuple(replace(_animal(rng, name, x, y, size * rng.uniform(0.92, 1.0)), glyph=glyph) for x, y in spots)


def _side_by_side(rng: Random, names: tuple[str, ...]) -> tuple[Animal, ...]:
    middles = (rng.uniform(0.2, 0.32), rng.uniform(0.68, 0.8))
    return tuple(
        _animal(rng, name, x, rng.uniform(0.25, 0.75), rng.uniform(0.3, 0.42))
        for name, x in zip(names, middles, strict=True)
    )


def _animal(rng: Random, name: str, x: float, y: float, size: float) -> Animal:
    turn = rng.choice((0.0, rng.uniform(-25.0, 25.0)))
    return Animal(name, rng.choice(GLYPHS[name]), x, y, size, turn, rng.random() < 0.3)


def _shade(rng: Random, colour: str) -> RGB:
    a, b = rng.choice(BACKGROUNDS[colour]), rng.choice(BACKGROUNDS[colour])
    share = rng.choice((0.0, rng.random()))
    mixed = [(1 - share) * p + share * q + rng.uniform(-6, 6) for p, q in zip(a, b, strict=True)]
    red, green, blue = (min(255, max(0, round(value))) for value in mixed)
    return red, green, blue


def _background(scene: Scene, width: int, height: int) -> np.ndarray:
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    along = (x / width - 0.5) * math.cos(scene.ramp_direction_rad) + (y / height - 0.5) * math.sin(
        scene.ramp_direction_rad
    )
    pixels = np.asarray(scene.rgb, np.float32) * (1 + scene.ramp * along[..., None])
    if scene.grain:
        noise = np.random.default_rng(scene.seed).standard_normal((height, width, 1), np.float32)
        pixels = pixels + scene.grain * noise
    return np.clip(np.rint(pixels), 0, 255).astype(np.uint8)


def _bitmap(animal: Animal, size_px: float) -> Image.Image:
    halvings = next((n for n in (2, 1) if 128 / 2**n >= size_px), 0)
    bitmap = _glyph(animal.glyph, halvings, animal.mirrored)
    scale = size_px / max(bitmap.size)
    if animal.turn_deg:
        bitmap = bitmap.rotate(animal.turn_deg, Image.Resampling.BICUBIC, expand=True)
    target = (max(1, round(bitmap.width * scale)), max(1, round(bitmap.height * scale)))
    return bitmap.resize(target, Image.Resampling.BICUBIC)


@cache
def _glyph(character: str, halvings: int, mirrored: bool) -> Image.Image:
    if halvings:
        full = _glyph(character, 0, mirrored)
        return full.resize([max(1, side >> halvings) for side in full.size], Image.Resampling.BOX)
    canvas = Image.new("RGBA", (160, 160), (255, 255, 255, 0))
    ImageDraw.Draw(canvas).text((8, 8), character, font=_font(), embedded_color=True)
    bitmap = canvas.crop(canvas.getbbox())
    return bitmap.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else bitmap


@lru_cache(maxsize=1)
def _font() -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(font_path(), FONT_SIZE)
