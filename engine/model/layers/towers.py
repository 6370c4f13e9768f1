"""Maps each vision tower spec to the class that computes it."""

from firstlight.engine.model import spec as specs
from firstlight.engine.model.layers.anyres import AnyRes
from firstlight.engine.model.layers.moonvit import MoonViT
from firstlight.engine.model.layers.tower import PatchTower
from firstlight.engine.model.layers.vision import VisionTower

TOWERS = {
    specs.VisionSpec: VisionTower,
    specs.AnyRes: AnyRes,
    specs.MoonViT: MoonViT,
    specs.PatchTower: PatchTower,
}
