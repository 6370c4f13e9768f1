"""Attention on CPUs by torch's fused scaled_dot_product_attention, over views of the cache wherever it allows them.

The engine gives each sequence one page there, so the keys of a sequence are a view, and those of all sequences that
decode are one view over a range of pages: one call a layer, whatever their lengths. Query heads that share a key head
are folded into the query length, which spares the copies of a grouped-query call. Keys beyond a sequence's length are
masked, not skipped: the cache must hold finite numbers there.

Legend: T tokens of all sequences flattened, t tokens of one, B rows of a decode call, L keys, N query heads, K
key/value heads, G = N / K, D head dim, V value head dim, P pages, S page size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.kernels.attention.meta import AttentionMeta
from firstlight.kernels.attention.reference import visible

FEW_KEYS = 64  # a vector of any CPU, in any dtype, has no more lanes
Rules: TypeAlias = tuple[float, float | None, Tensor | None]
"""Scale, softcap, sinks [N]: what every query of a call has in common."""


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
    """Attend causally over the cache (see the reference for the contract); the cache must be finite throughout."""
    rules = (scale, softcap, sinks_N)
    key = ("sdpa", window, q_TND.dtype)
    plan = meta.memo.get(key)
    if plan is None:
        plan = meta.memo[key] = _plan(meta, window, q_TND)
    if plan.all_in_order:
        return _decode(q_TND, k_cache_PKSD, v_cache_PKSV, plan, rules)
    out_TNV = q_TND.new_empty(*q_TND.shape[:2], v_cache_PKSV.shape[-1])
    if plan.tokens is not None:
        q_BND = q_TND.new_zeros(plan.num_pages, *q_TND.shape[1:])
        q_BND[plan.rows] = q_TND[plan.tokens]
        out_TNV[plan.tokens] = _decode(q_BND, k_cache_PKSD, v_cache_PKSV, plan, rules)[plan.rows]
    for b, start, end in plan.alone:
        out_TNV[start:end] = _one_sequence(q_TND[start:end], k_cache_PKSD, v_cache_PKSV, meta, b, window, rules)
    return out_TNV


@dataclass(frozen=True, slots=True)
class _Plan:
    """How the batch is served in this step, the same in every layer with the same window."""

    first_page: int  # the decode call covers pages first_page ... first_page + num_pages - 1
    num_pages: int
    first_key: int  # and of each page the slots first_key ... end_key - 1
    end_key: int
    mask_B11L: Tensor | None  # 0 or -inf, in the dtype of the queries
    all_in_order: bool  # every token decodes, and token b belongs to page first_page + b
    tokens: Tensor | None  # otherwise: which tokens decode ...
    rows: Tensor | None  # ... and in which row of the call
    alone: tuple[tuple[int, int, int], ...]  # sequences served one by one: (sequence, first token, end)


def _plan(meta: AttentionMeta, window: int | None, q_TND: Tensor) -> _Plan:
    """Put the sequences that decode into one call where their pages allow it, and the others one by one."""
    starts = [0]
    for query_len in meta.query_lens:
        starts.append(starts[-1] + query_len)
    together = [b for b, n in enumerate(meta.query_lens) if n == 1 and meta.kv_lens[b] <= meta.page_size]
    own_pages = [meta.pages[b][0] for b in together]
    lengths = [meta.kv_lens[b] for b in together]
    first_page = min(own_pages, default=0)
    num_pages = max(own_pages, default=-1) + 1 - first_page
    if num_pages * max(lengths, default=0) > 2 * sum(lengths):  # mostly masked or unused keys: not worth one call
        together, own_pages, lengths, num_pages = [], [], [], 0
    rest = sorted(set(range(len(meta.query_lens))) - set(together))
    first_key = max(0, min(lengths) - window) if lengths and window is not None else 0
    end_key = max(lengths, default=0)
    rows = [page - first_page for page in own_pages]
    in_order = not rest and rows == list(range(num_pages))
    return _Plan(
        first_page=first_page,
        num_pages=num_pages,
        first_key=first_key,
        end_key=end_key,
        mask_B11L=_decode_mask(rows, lengths, num_pages, first_key, end_key, window, q_TND),
        all_in_order=in_order and num_pages > 0,
        tokens=None if in_order or not together else torch.tensor([starts[b] for b in together], device=q_TND.device),
        rows=None if in_order or not together else torch.tensor(rows, device=q_TND.device),
        alone=tuple((b, starts[b], starts[b + 1]) for b in rest),
    )


def _decode_mask(
    rows: list[int],
    lengths: list[int],
    num_pages: int,
    first_key: int,
    end_key: int,
    window: int | None,
    q_TND: Tensor,
) -> Tensor | None:
    """Hide the keys that a row does not have or no longer sees; none are hidden where all lengths are equal.

    Rows of pages that no sequence uses see all keys; what comes out for them is not read.
    """
    if len(set(lengths)) <= 1:
        return None
    row_lengths = torch.full((num_pages,), end_key, dtype=torch.int64)
    row_lengths[rows] = torch.tensor(lengths)
    position_L = torch.arange(first_key, end_key)
    hidden_BL = position_L >= row_lengths[:, None]
    if window is not None:
        hidden_BL |= position_L < row_lengths[:, None] - window
    mask_BL = torch.zeros(num_pages, end_key - first_key, dtype=q_TND.dtype).masked_fill_(hidden_BL, float("-inf"))
    return mask_BL.to(q_TND.device)[:, None, None, :]


def _decode(q_BND: Tensor, k_cache_PKSD: Tensor, v_cache_PKSV: Tensor, plan: _Plan, rules: Rules) -> Tensor:
    """One query per page over a range of pages: the group takes the place of the query length."""
    pages = slice(plan.first_page, plan.first_page + plan.num_pages)
    k_BKLD = k_cache_PKSD[pages, :, plan.first_key : plan.end_key]
    v_BKLV = v_cache_PKSV[pages, :, plan.first_key : plan.end_key]
    num_rows, num_heads, head_dim = q_BND.shape
    num_kv_heads = k_BKLD.shape[1]
    q_BKGD = q_BND.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scale, softcap, sinks_N = rules
    if softcap is None and sinks_N is None and v_BKLV.shape[-1] == head_dim:
        out_BKGV = F.scaled_dot_product_attention(q_BKGD, k_BKLD, v_BKLV, attn_mask=plan.mask_B11L, scale=scale)
        out_BKGV = _not_swallowed(out_BKGV, q_BKGD, k_BKLD)
    else:
        sinks_KG1 = None if sinks_N is None else sinks_N.view(num_kv_heads, -1, 1)
        out_BKGV = _written_out(q_BKGD, k_BKLD, v_BKLV, plan.mask_B11L, scale, softcap, sinks_KG1)
    return out_BKGV.reshape(num_rows, num_heads, -1)


def _one_sequence(
    q_tND: Tensor,
    k_cache_PKSD: Tensor,
    v_cache_PKSV: Tensor,
    meta: AttentionMeta,
    b: int,
    window: int | None,
    rules: Rules,
) -> Tensor:
    """The queries of one sequence: key heads take the place of the batch, so that a group shares them by stride 0."""
    scale, softcap, sinks_N = rules
    query_len, num_heads, head_dim = q_tND.shape
    kv_len = meta.kv_lens[b]
    first_key = max(0, kv_len - query_len + 1 - window) if window is not None else 0
    k_KLD = _keys(k_cache_PKSD, meta, b)[:, first_key:kv_len]
    v_KLV = _keys(v_cache_PKSV, meta, b)[:, first_key:kv_len]
    num_kv_heads, num_keys = k_KLD.shape[:2]
    group = num_heads // num_kv_heads
    q_KGtD = q_tND.view(query_len, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    if softcap is None and sinks_N is None and v_KLV.shape[-1] == head_dim:
        causal = window is None and query_len == num_keys
        out_KGtV = F.scaled_dot_product_attention(
            q_KGtD,
            k_KLD.unsqueeze(1).expand(-1, group, -1, -1),
            v_KLV.unsqueeze(1).expand(-1, group, -1, -1),
            attn_mask=None if causal or query_len == 1 else _causal_mask(meta, query_len, num_keys, window, q_tND),
            is_causal=causal and query_len > 1,
            scale=scale,
        )
        out_KGtV = _not_swallowed(out_KGtV, q_KGtD, k_KLD.unsqueeze(1))
    else:
        mask_tL = _causal_mask(meta, query_len, num_keys, window, q_tND)
        mask_GtL = mask_tL.expand(group, -1, -1).reshape(1, 1, group * query_len, num_keys)
        q_1KrD = q_KGtD.reshape(1, num_kv_heads, group * query_len, head_dim)
        sinks_Kr1 = None if sinks_N is None else sinks_N.repeat_interleave(query_len).view(num_kv_heads, -1, 1)
        out = _written_out(q_1KrD, k_KLD[None], v_KLV[None], mask_GtL, scale, softcap, sinks_Kr1)
        out_KGtV = out.view(num_kv_heads, group, query_len, -1)
    return out_KGtV.permute(2, 0, 1, 3).reshape(query_len, num_heads, -1)


def _not_swallowed(out: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The output, with what is not finite among queries and keys in it.

    Where keys are fewer than the lanes of a vector, torch's operator on CPUs takes scores that are NaN for masked ones,
    and gives zeros: a fault of the layers before would go on as an answer. Zero times a number is zero if the number is
    finite, however large, and NaN if it is not.
    """
    if k.shape[-2] >= FEW_KEYS:
        return out
    return out + (0.0 * q).sum(dim=-1, keepdim=True) + (0.0 * k).sum(dim=(-2, -1), keepdim=True)


def _keys(cache_PKSD: Tensor, meta: AttentionMeta, b: int) -> Tensor:
    """The cache of one sequence as [K, L or more, D]: a view if it fits one page, otherwise gathered."""
    num_pages = -(-meta.kv_lens[b] // meta.page_size)
    if num_pages == 1:
        return cache_PKSD[meta.pages[b][0]]
    return cache_PKSD[list(meta.pages[b][:num_pages])].transpose(0, 1).flatten(1, 2)


def _causal_mask(meta: AttentionMeta, query_len: int, num_keys: int, window: int | None, q_tND: Tensor) -> Tensor:
    """0 or -inf [t, L] for the last `query_len` positions of `num_keys`; layers share it."""
    key = ("causal", query_len, num_keys, window, q_tND.dtype)
    mask_tL = meta.memo.get(key)
    if mask_tL is None:
        hidden_tL = ~visible(query_len, num_keys, window, q_tND.device)
        mask_tL = torch.zeros(hidden_tL.shape, dtype=q_tND.dtype, device=q_tND.device)
        meta.memo[key] = mask_tL.masked_fill_(hidden_tL, float("-inf"))
    return meta.memo[key]


def _written_out(
    q_BKrD: Tensor,
    k_BKLD: Tensor,
    v_BKLV: Tensor,
    mask_B1rL: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks_Kr1: Tensor | None,
) -> Tensor:
    """What torch's operator does not do: softcap, sinks, values narrower than keys. In float32; r counts G x t rows."""
    logits_BKrL = torch.matmul(q_BKrD.float(), k_BKLD.float().transpose(-1, -2)).mul_(scale)
    if softcap is not None:
        logits_BKrL.div_(softcap).tanh_().mul_(softcap)
    if mask_B1rL is not None:
        logits_BKrL += mask_B1rL
    weights_BKrL = logits_BKrL.softmax(dim=-1)
    if sinks_Kr1 is not None:  # the sink takes its share of every softmax: what is left is 1 / (1 + exp(sink - lse))
        weights_BKrL *= torch.sigmoid(logits_BKrL.logsumexp(dim=-1, keepdim=True) - sinks_Kr1.float())
    return torch.matmul(weights_BKrL, v_BKLV.float()).to(q_BKrD.dtype)
