"""What a model is, as frozen data: the one description that scan, plan, load, start, verify and profile all use.

No torch. Each block variant declares its own parameters and what it keeps per token, so a shape is stated once.
"""

from firstlight.engine.model.spec.alibi import Alibi
from firstlight.engine.model.spec.anyres import AnyRes, best_resolution, cut_away
from firstlight.engine.model.spec.attention import Attention, Temperature
from firstlight.engine.model.spec.block_sparse import BlockIndexer
from firstlight.engine.model.spec.cache import CacheSpec, CacheTensor, StateTensor
from firstlight.engine.model.spec.chain import (
    ActivationStep,
    Chain,
    GatedStep,
    LinearStep,
    MergeStep,
    NormStep,
    Step,
)
from firstlight.engine.model.spec.compressed import CompressedAttention, Compressor, SpanIndexer
from firstlight.engine.model.spec.dense_and_experts import DenseAndExperts
from firstlight.engine.model.spec.gated_delta import GatedDelta
from firstlight.engine.model.spec.layer import Blend, FeedForward, LayerSpec, Mixer
from firstlight.engine.model.spec.lightning import Lightning
from firstlight.engine.model.spec.mamba import Mamba
from firstlight.engine.model.spec.mamba2 import Mamba2
from firstlight.engine.model.spec.mla import MLA, Indexer
from firstlight.engine.model.spec.mlp import MLP
from firstlight.engine.model.spec.model import ModelSpec, Vision
from firstlight.engine.model.spec.moe import Latent, MoE, Router
from firstlight.engine.model.spec.moonvit import GRIDS, MergedProjector, MoonViT
from firstlight.engine.model.spec.norm import Norm
from firstlight.engine.model.spec.param import FIRST_STAGE, LAST_STAGE, Param, Role, Scope
from firstlight.engine.model.spec.per_layer import PerLayerGate, PerLayerInputs
from firstlight.engine.model.spec.residual import AttentionResidual, HyperConnections, Residual
from firstlight.engine.model.spec.rg_lru import RgLru
from firstlight.engine.model.spec.rope import Rope, RopeScaling
from firstlight.engine.model.spec.short_conv import ShortConv
from firstlight.engine.model.spec.side_by_side import SideBySide
from firstlight.engine.model.spec.tower import AxialRope, DeepFeatures, GridPositions, PatchTower, Shape
from firstlight.engine.model.spec.vision import Projector, VisionSpec, pictures_of_rows

__all__ = [
    "FIRST_STAGE",
    "GRIDS",
    "LAST_STAGE",
    "MLA",
    "MLP",
    "ActivationStep",
    "Alibi",
    "AnyRes",
    "Attention",
    "AttentionResidual",
    "AxialRope",
    "Blend",
    "BlockIndexer",
    "CacheSpec",
    "CacheTensor",
    "Chain",
    "CompressedAttention",
    "Compressor",
    "DeepFeatures",
    "DenseAndExperts",
    "FeedForward",
    "GatedDelta",
    "GatedStep",
    "GridPositions",
    "HyperConnections",
    "Indexer",
    "Latent",
    "LayerSpec",
    "Lightning",
    "LinearStep",
    "Mamba",
    "Mamba2",
    "MergeStep",
    "MergedProjector",
    "Mixer",
    "MoE",
    "ModelSpec",
    "MoonViT",
    "Norm",
    "NormStep",
    "Param",
    "PatchTower",
    "PerLayerGate",
    "PerLayerInputs",
    "Projector",
    "Residual",
    "RgLru",
    "Role",
    "Rope",
    "RopeScaling",
    "Router",
    "Scope",
    "Shape",
    "ShortConv",
    "SideBySide",
    "SpanIndexer",
    "StateTensor",
    "Step",
    "Temperature",
    "Vision",
    "VisionSpec",
    "best_resolution",
    "cut_away",
    "pictures_of_rows",
]
