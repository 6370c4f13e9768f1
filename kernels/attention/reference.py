"""Reference of attention over the paged cache: plain torch, the truth that every other implementation is compared with.

Legend: T tokens of all sequences flattened, t tokens of one sequence, L its cached tokens, N query heads, K key/value
heads, G = N / K, D head dim, V value head dim, P pages, S page size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from firstlight.kernels.attention.meta import AttentionMeta


def write_cache(k_TKD: Tensor, v_TKV: Tensor, k_cache_PKSD: Tensor, v_cache_PKSV: Tensor, meta: AttentionMeta) -> None:
    """Write the current tokens' keys and values into their slots, in place.

    `k_TKD` [T, K, D] and `v_TKV` [T, K, V] are rounded to the dtype of the caches [P, K, S, D] and [P, K, S, V].
    """
    k_cache_PKSD[meta.token_page, :, meta.token_slot] = k_TKD.to(k_cache_PKSD.dtype)
    v_cache_PKSV[meta.token_page, :, meta.token_slot] = v_TKV.to(v_cache_PKSV.dtype)


def attention(
    q_TND: Tensor,
    k_cache_PKSD: Tensor,
    v_cache_PKSV: Tensor,
    meta: AttentionMeta,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Attend causally from each token to its sequence's cached keys, the current tokens' own included.

    `q_TND` [T, N, D] over caches [P, K, S, D] and [P, K, S, V] gives [T, N, V] in the dtype of `q_TND`; query head n
    uses key head n // (N / K). Logits are q.k * scale, then softcap * tanh(logit / softcap) where given (Gemma 2),
    then the mask: a key at or before the query and, with a window, less than `window` positions before it. `sinks_N`
    [N] joins each softmax as one more logit that has no value (GPT-OSS). All in float32, rounded once. Vaswani et
    al., arXiv:1706.03762; GQA: arXiv:2305.13245. Not covered: ALiBi and other masks: `selective_attention`.
    """
    seen = [visible(q, kv, window, q_TND.device) for q, kv in zip(meta.query_lens, meta.kv_lens, strict=True)]
    return selective_attention(q_TND, k_cache_PKSD, v_cache_PKSV, meta, scale, seen, softcap, sinks_N)


def selective_attention(
    q_TND: Tensor,
    k_cache_PKSD: Tensor,
    v_cache_PKSV: Tensor,
    meta: AttentionMeta,
    scale: float,
    seen: Sequence[Tensor],
    softcap: float | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Attend from each token to the keys of its sequence that `seen` selects, one bool [t, L] a sequence.

    Where heads see different keys, [N, t, L]; in place of bools, float32 that is added to the logits, -inf for a key
    that is not seen (ALiBi, arXiv:2108.12409). Otherwise as `attention`. Every token must see a key, unless there are
    sinks. For what no window says: chunks of positions (Llama 4), keys that an indexer chose (DeepSeek-V3.2,
    arXiv:2512.02556), spans seen in both directions.
    """
    outputs, start = [], 0
    for b, (query_len, seen_tL) in enumerate(zip(meta.query_lens, seen, strict=True)):
        k_KLD = cached(k_cache_PKSD, meta, b).float()
        v_KLV = cached(v_cache_PKSV, meta, b).float()
        q_tND = q_TND[start : start + query_len].float()
        outputs.append(_attend_one(q_tND, k_KLD, v_KLV, scale, seen_tL, softcap, sinks_N))
        start += query_len
    return torch.cat(outputs).to(q_TND.dtype)


def cached(cache_PKSD: Tensor, meta: AttentionMeta, b: int) -> Tensor:
    """What the cache holds of sequence b, in order: [K, L, D]."""
    kv_len = meta.kv_lens[b]
    used = torch.tensor(meta.pages[b][: -(-kv_len // meta.page_size)], device=cache_PKSD.device)
    return cache_PKSD[used].transpose(0, 1).flatten(1, 2)[:, :kv_len]


def _attend_one(
    q_tND: Tensor,
    k_KLD: Tensor,
    v_KLV: Tensor,
    scale: float,
    seen_tL: Tensor,
    softcap: float | None,
    sinks_N: Tensor | None,
) -> Tensor:
    group = q_tND.shape[1] // k_KLD.shape[0]
    k_NLD, v_NLV = k_KLD.repeat_interleave(group, dim=0), v_KLV.repeat_interleave(group, dim=0)
    logits_NtL = torch.einsum("tnd,nld->ntl", q_tND, k_NLD) * scale
    if softcap is not None:
        logits_NtL = softcap * torch.tanh(logits_NtL / softcap)
    if seen_tL.dtype == torch.bool:
        logits_NtL = logits_NtL.masked_fill(~seen_tL, float("-inf"))
    else:
        logits_NtL = logits_NtL + seen_tL
    if sinks_N is not None:
        sink_Nt1 = sinks_N.float()[:, None, None].expand(-1, logits_NtL.shape[1], 1)
        weights_NtL = torch.cat((logits_NtL, sink_Nt1), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights_NtL = logits_NtL.softmax(dim=-1)
    return torch.einsum("ntl,nlv->tnv", weights_NtL, v_NLV)


def visible(query_len: int, kv_len: int, window: int | None, device: torch.device) -> Tensor:
    """Say which of the `kv_len` keys each of the last `query_len` positions sees: bool [query_len, kv_len]."""
    position_q = torch.arange(kv_len - query_len, kv_len, device=device)[:, None]
    position_k = torch.arange(kv_len, device=device)[None, :]
    seen = position_k <= position_q
    if window is not None:
        seen &= position_q - position_k < window
    return seen
