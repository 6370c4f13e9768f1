"""Cases of attention and of the write into the cache: prefill, chunks, decode and mixtures, over pages in any order.

The pages a case does not use, and the slots past a sequence's length, hold numbers large enough to be noticed if read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from firstlight.kernels import testing
from firstlight.kernels.attention.meta import AttentionMeta
from firstlight.kernels.testing import Call, Work

STALE = 60.0


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Sequences as (current tokens, cached tokens); `order` gives sequences of one page their pages, else they mix."""

    name: str
    sequences: tuple[tuple[int, int], ...]
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    page_size: int
    order: tuple[int, ...] | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    latent: bool = False  # the values are the first dims of the keys
    benchmark: bool = False

    operator: str = "attention"

    @property
    def shapes(self) -> Mapping[str, int]:
        return {
            "num_heads": self.heads,
            "num_kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "value_dim": self.value_dim,
            "page_size": self.page_size,
        }

    def make(self, device: torch.device, dtype: torch.dtype) -> Call:
        random = testing.generator(self, dtype)
        meta, num_pages = self.meta(random, device)
        num_tokens = sum(query_len for query_len, _ in self.sequences)
        q_TND = torch.randn(num_tokens, self.heads, self.head_dim, generator=random).to(device, dtype)
        k_PKSD = self._cache(self.head_dim, num_pages, meta, random)
        v_PKSV = k_PKSD[..., : self.value_dim] if self.latent else self._cache(self.value_dim, num_pages, meta, random)
        k_PKSD = k_PKSD.to(device, dtype)
        v_PKSV = k_PKSD[..., : self.value_dim] if self.latent else v_PKSV.to(device, dtype)
        if self.operator == "write_cache":
            k_TKD = torch.randn(num_tokens, self.kv_heads, self.head_dim, generator=random).to(device, dtype)
            v_TKV = torch.randn(num_tokens, self.kv_heads, self.value_dim, generator=random).to(device, dtype)
            return Call((k_TKD, v_TKV, k_PKSD, v_PKSV, meta), outputs=(k_PKSD, v_PKSV))
        rules = {
            "scale": self.head_dim**-0.5,
            "window": self.window,
            "softcap": self.softcap,
            "sinks_N": torch.randn(self.heads, generator=random).to(device, dtype) if self.sinks else None,
        }
        return Call((q_TND, k_PKSD, v_PKSV, meta), rules)

    def meta(self, random: torch.Generator, device: torch.device) -> tuple[AttentionMeta, int]:
        """Give every sequence pages of its own; three more stay unused."""
        needed = [-(-kv_len // self.page_size) for _, kv_len in self.sequences]
        num_pages = sum(needed) + 3
        free = list(self.order) if self.order else torch.randperm(num_pages, generator=random).tolist()
        pages = [[free.pop(0) for _ in range(count)] for count in needed]
        query_lens, kv_lens = zip(*self.sequences, strict=True)
        return AttentionMeta.build(query_lens, kv_lens, pages, self.page_size, device), num_pages

    def _cache(self, width: int, num_pages: int, meta: AttentionMeta, random: torch.Generator) -> Tensor:
        cache = torch.randn(num_pages, self.kv_heads, self.page_size, width, generator=random)
        used = torch.zeros(num_pages, self.page_size, dtype=torch.bool)
        for kv_len, own in zip(meta.kv_lens, meta.pages, strict=True):
            for i, page in enumerate(own):
                used[page, : max(0, kv_len - i * self.page_size)] = True
        return torch.where(used[:, None, :, None], cache, STALE)

    def work(self, dtype: torch.dtype) -> Work:
        tokens = sum(query_len for query_len, _ in self.sequences)
        width = self.head_dim + (0 if self.latent else self.value_dim)
        if self.operator == "write_cache":
            return Work(bytes=2 * tokens * self.kv_heads * width * dtype.itemsize, flops=0)
        keys = sum(kv_len for _, kv_len in self.sequences)
        pairs = sum(q * kv - q * (q - 1) // 2 for q, kv in self.sequences)
        moved = keys * self.kv_heads * width + tokens * self.heads * (self.head_dim + self.value_dim)
        return Work(bytes=moved * dtype.itemsize, flops=2 * pairs * self.heads * (self.head_dim + self.value_dim))

    def distance(self, got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
        return testing.distance(got, want)


RAGGED = ((1, 7), (1, 63), (1, 100), (1, 1))
MIXED = ((1, 40), (17, 17), (5, 63), (1, 3))

CASES: tuple[AttentionCase, ...] = (
    AttentionCase("prefill 63, MHA 64", ((63, 63),), 2, 2, 64, 64, 128, order=(1,)),
    AttentionCase("prefill 100 in pages of 16, GQA 3", ((100, 100),), 6, 2, 64, 64, 16),
    AttentionCase("prefill of three, head dim 80", ((7, 7), (1, 1), (33, 33)), 4, 2, 80, 80, 64, order=(2, 0, 1)),
    AttentionCase("chunk of 9 after 54, head dim 96", ((9, 63),), 3, 1, 96, 96, 64, order=(0,)),
    AttentionCase("decode one", ((1, 63),), 9, 3, 64, 64, 64, order=(2,)),
    AttentionCase("decode ragged in neighbouring pages", RAGGED, 9, 3, 64, 64, 100, order=(0, 1, 2, 3)),
    AttentionCase("decode ragged in scattered pages", RAGGED, 4, 2, 64, 64, 100, order=(4, 1, 3, 0)),
    AttentionCase("decode ragged in pages of 16", RAGGED, 6, 1, 100, 100, 16),
    AttentionCase("decode equal lengths", ((1, 33), (1, 33)), 4, 1, 64, 64, 40, order=(1, 2)),
    AttentionCase("decode one long among short", ((1, 1000), (1, 3), (1, 2), (1, 5)), 2, 1, 64, 64, 1000),
    AttentionCase("mixed", MIXED, 6, 2, 64, 64, 64, order=(3, 0, 1, 2)),
    AttentionCase("mixed in pages of 8", MIXED, 4, 4, 72, 72, 8),
    AttentionCase("prefill, window 16", ((63, 63),), 4, 2, 64, 64, 64, order=(0,), window=16),
    AttentionCase("mixed, window 20", MIXED, 4, 2, 64, 64, 64, order=(3, 0, 1, 2), window=20),
    AttentionCase("decode ragged, window 10", RAGGED, 4, 2, 64, 64, 100, order=(0, 1, 2, 3), window=10),
    AttentionCase("decode 1000, window 100", ((1, 1000), (3, 700)), 4, 2, 64, 64, 64, window=100),
    AttentionCase("prefill, softcap 20", ((33, 33),), 4, 2, 64, 64, 64, order=(1,), softcap=20.0),
    AttentionCase("decode ragged, softcap 5", RAGGED, 4, 2, 64, 64, 100, order=(0, 1, 2, 3), softcap=5.0),
    AttentionCase("mixed, sinks", MIXED, 4, 2, 64, 64, 64, order=(3, 0, 1, 2), sinks=True),
    AttentionCase(
        "decode ragged, sinks, window 8", RAGGED, 4, 2, 64, 64, 100, order=(3, 2, 1, 0), sinks=True, window=8
    ),
    AttentionCase("mixed, expanded MLA 192 to 128", MIXED, 4, 4, 192, 128, 64, order=(3, 0, 1, 2)),
    AttentionCase("mixed, latent MLA 576 to 512", ((1, 40), (5, 33)), 16, 1, 576, 512, 64, order=(0, 1), latent=True),
    AttentionCase("mixed, small latent 40 to 24", MIXED, 5, 1, 40, 24, 16, latent=True, window=30),
    AttentionCase("write, pages of 16", MIXED, 4, 2, 80, 80, 16, operator="write_cache"),
    AttentionCase("write, one page each", RAGGED, 4, 3, 64, 48, 100, order=(3, 0, 1, 2), operator="write_cache"),
    AttentionCase("write, one token", ((1, 63),), 4, 1, 100, 100, 64, operator="write_cache"),
    AttentionCase("decode 1 x 8192", ((1, 8192),), 32, 8, 128, 128, 16, benchmark=True),
    AttentionCase("decode 64 x 4096", ((1, 4096),) * 64, 32, 8, 128, 128, 16, benchmark=True),
    AttentionCase("prefill 4096", ((4096, 4096),), 32, 8, 128, 128, 16, benchmark=True),
    AttentionCase("decode 64 x 4096, MLA", ((1, 4096),) * 64, 128, 1, 576, 512, 64, latent=True, benchmark=True),
    AttentionCase("decode 1 x 512, SmolLM2", ((1, 512),), 9, 3, 64, 64, 2048, benchmark=True),
    AttentionCase("decode 16 x 512, SmolLM2", ((1, 512),) * 16, 9, 3, 64, 64, 2048, benchmark=True),
    AttentionCase("write 4096", ((4096, 4096),), 32, 8, 128, 128, 16, benchmark=True, operator="write_cache"),
)
