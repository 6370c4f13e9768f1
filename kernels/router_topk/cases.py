"""Cases of the router: what the released families do, with odd numbers of experts and tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from firstlight.kernels import testing
from firstlight.kernels.testing import Call, Work


@dataclass(frozen=True, slots=True)
class RouterCase:
    """Logits are random, so that no two experts are equal and the choice is unique."""

    name: str
    tokens: int
    experts: int
    top_k: int
    scoring: str = "softmax"
    normalize: bool = True
    bias: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    group_score: str = "top2_sum"
    scale: float = 1.0
    score_chosen: bool = False
    eps: float = 1e-20
    floor: float = 0.0
    chosen: bool = False
    benchmark: bool = False

    operator: str = "router_topk"

    @property
    def shapes(self) -> Mapping[str, int]:
        return {"num_experts": self.experts, "top_k": self.top_k, "num_groups": self.num_groups}

    def make(self, device: torch.device, dtype: torch.dtype) -> Call:
        random = testing.generator(self, torch.float32)
        logits_TE = torch.randn(self.tokens, self.experts, generator=random) * 2
        bias_E = torch.rand(self.experts, generator=random).to(device) if self.bias else None
        chosen_Tk = None
        if self.chosen:
            chosen_Tk = torch.rand(self.tokens, self.experts, generator=random).argsort(-1)[:, : self.top_k].to(device)
        return Call(
            (logits_TE.to(device), bias_E, self.top_k, self.scoring, self.normalize),
            {
                "num_groups": self.num_groups,
                "topk_groups": self.topk_groups,
                "group_score": self.group_score,
                "scale": self.scale,
                "score_chosen": self.score_chosen,
                "eps": self.eps,
                "floor": self.floor,
                "chosen_Tk": chosen_Tk,
            },
        )

    def work(self, dtype: torch.dtype) -> Work:
        return Work(bytes=self.tokens * (4 * self.experts + 12 * self.top_k), flops=8 * self.tokens * self.experts)

    def distance(self, got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
        """The order of the columns is free: both are sorted by expert first."""
        return testing.distance(by_expert(*got), by_expert(*want))


def by_expert(weights_Tk: Tensor, ids_Tk: Tensor) -> tuple[Tensor, Tensor]:
    """Sort the columns of a choice by expert number."""
    ids_Tk, order = ids_Tk.sort(dim=-1)
    return weights_Tk.gather(-1, order), ids_Tk


def _deepseek_v3(name: str, tokens: int, experts: int, top_k: int, groups: int, best: int, **rest: Any) -> RouterCase:
    return RouterCase(
        name,
        tokens,
        experts,
        top_k,
        scoring="sigmoid",
        bias=True,
        num_groups=groups,
        topk_groups=best,
        scale=2.5,
        **rest,
    )


CASES: tuple[RouterCase, ...] = (
    RouterCase("mixtral", 63, 8, 2),
    RouterCase("qwen3 moe", 5, 128, 8),
    RouterCase("qwen3 moe, weights not normalised", 5, 60, 4, normalize=False),
    RouterCase("gpt-oss", 7, 100, 4, score_chosen=True),
    RouterCase("one expert of one", 3, 1, 1),
    RouterCase("every expert", 3, 7, 7),
    RouterCase("deepseek v2", 7, 160, 6, normalize=False, num_groups=8, topk_groups=3, group_score="max", scale=16.0),
    _deepseek_v3("deepseek v3", 9, 256, 8, 8, 4),
    _deepseek_v3("deepseek v3, odd groups", 9, 36, 3, 3, 2),
    _deepseek_v3("kimi k2", 3, 384, 8, 1, 1),
    RouterCase("sigmoid without bias", 3, 100, 5, scoring="sigmoid", scale=0.5),
    RouterCase("lfm2", 5, 32, 4, scoring="sigmoid", bias=True, eps=1e-2),
    RouterCase("ernie", 5, 64, 6, bias=True, floor=0.5),
    RouterCase("deepseek v4", 5, 96, 6, scoring="sqrtsoftplus", bias=True, scale=1.5),
    RouterCase("deepseek v4, hashed", 5, 96, 6, scoring="sqrtsoftplus", scale=1.5, chosen=True),
    RouterCase("sigmoid of the chosen", 5, 40, 3, scoring="sigmoid", bias=True, score_chosen=True),
    RouterCase("sigmoid of the chosen, as they are", 5, 40, 3, scoring="sigmoid", normalize=False, score_chosen=True),
    RouterCase("mixtral, many tokens", 1000, 8, 2, benchmark=True),
    _deepseek_v3("deepseek v3, 64 tokens", 64, 256, 8, 8, 4, benchmark=True),
    _deepseek_v3("deepseek v3, 4096 tokens", 4096, 256, 8, 8, 4, benchmark=True),
)
