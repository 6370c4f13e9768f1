"""References against the code that models are published with: they are the truth only as far as this holds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.masking_utils import sliding_window_overlay
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from firstlight.kernels.attention.meta import AttentionMeta
from firstlight.kernels.gated_activation.reference import gated_activation
from firstlight.kernels.registry import choose

OPS = choose("cpu", torch.float32, force="reference")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_llama_norm_bit_for_bit(dtype: torch.dtype) -> None:
    theirs = LlamaRMSNorm(100, eps=1e-5).to(dtype)
    theirs.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    x = torch.randn(7, 100, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert torch.equal(OPS.rms_norm(x, theirs.weight.data, 1e-5), theirs(x).detach())


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemma_norm_bit_for_bit(dtype: torch.dtype) -> None:
    theirs = modeling_gemma2.Gemma2RMSNorm(100, eps=1e-6).to(dtype)
    theirs.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    x = torch.randn(7, 100, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert torch.equal(OPS.rms_norm(x, theirs.weight.data, 1e-6, 1.0), theirs(x).detach())


def _angles(tokens: int, half: int) -> torch.Tensor:
    return torch.arange(tokens)[:, None] * 10000.0 ** -(torch.arange(half) / half)


def test_llama_rotary() -> None:
    q, k, angles = torch.randn(9, 4, 32), torch.randn(9, 2, 32), _angles(9, 16)
    doubled = torch.cat((angles, angles), dim=-1)[None]
    q_theirs, k_theirs = apply_rotary_pos_emb(q[None], k[None], doubled.cos(), doubled.sin(), unsqueeze_dim=2)
    q_ours, k_ours = OPS.rotary(q, k, angles.cos(), angles.sin())
    torch.testing.assert_close(q_ours, q_theirs[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(k_ours, k_theirs[0], rtol=0, atol=1e-6)


def test_deepseek_rotary_up_to_its_order_of_dims() -> None:
    """transformers returns halved order; ours keeps the order of the input. Scores are the same, dims are permuted."""
    q, k, angles = torch.randn(9, 4, 32), torch.randn(9, 1, 32), _angles(9, 16)
    doubled = torch.cat((angles, angles), dim=-1)[None]
    q_theirs, k_theirs = apply_rotary_pos_emb_interleave(
        q[None], k[None], doubled.cos(), doubled.sin(), unsqueeze_dim=2
    )
    q_ours, k_ours = OPS.rotary(q, k, angles.cos(), angles.sin(), True)
    order = torch.cat((torch.arange(0, 32, 2), torch.arange(1, 32, 2)))
    torch.testing.assert_close(q_ours[..., order], q_theirs[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(k_ours[..., order], k_theirs[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("silu", "silu"),
        ("gelu", "gelu"),
        ("gelu_tanh", "gelu_pytorch_tanh"),
        ("quick_gelu", "quick_gelu"),
        ("relu2", "relu2"),
    ],
)
def test_activations(ours: str, theirs: str) -> None:
    gate, up = torch.randn(5, 63), torch.randn(5, 63)
    expected = ACT2FN[theirs](gate) * up
    torch.testing.assert_close(gated_activation(torch.cat((gate, up), -1), ours), expected, rtol=1e-6, atol=1e-6)


def test_an_unknown_activation_is_an_error() -> None:
    with pytest.raises(KeyError, match="swish9"):
        gated_activation(torch.randn(2, 4), "swish9")


def test_attention_of_a_whole_sequence() -> None:
    """Against torch's own definition of causal attention, pages in reverse order."""
    q, k, v = torch.randn(50, 4, 16), torch.randn(50, 2, 16), torch.randn(50, 2, 16)
    meta = AttentionMeta.build([50], [50], [[6, 5, 4, 3, 2, 1, 0]], 8)
    k_cache, v_cache = torch.full((7, 2, 8, 16), 9.0), torch.full((7, 2, 8, 16), 9.0)
    OPS.write_cache(k, v, k_cache, v_cache, meta)
    ours = OPS.attention(q, k_cache, v_cache, meta, 0.25)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(ours, theirs.transpose(0, 1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("kind", ["softcap", "sinks"])
def test_attention_with_a_window_a_softcap_or_sinks(kind: str, window: int | None) -> None:
    q, k, v = torch.randn(20, 4, 16), torch.randn(20, 2, 16), torch.randn(20, 2, 16)
    meta = AttentionMeta.build([20], [20], [[1]], 24)
    k_cache, v_cache = torch.zeros(2, 2, 24, 16), torch.zeros(2, 2, 24, 16)
    OPS.write_cache(k, v, k_cache, v_cache, meta)
    in_window = sliding_window_overlay(window or 1000)
    seen = torch.tensor([[t >= s and in_window(0, 0, t, s) for s in range(20)] for t in range(20)])
    mask = torch.zeros(20, 20).masked_fill(~seen, float("-inf"))[None, None]
    batch = [x.transpose(0, 1)[None] for x in (q, k, v)]
    module = SimpleNamespace(num_key_value_groups=2, training=False, sinks=torch.randn(4))
    if kind == "softcap":
        theirs, _ = modeling_gemma2.eager_attention_forward(module, *batch, mask, scaling=0.25, softcap=1.5)
        ours = OPS.attention(q, k_cache, v_cache, meta, 0.25, window, softcap=1.5)
    else:
        theirs, _ = modeling_gpt_oss.eager_attention_forward(module, *batch, mask, scaling=0.25)
        ours = OPS.attention(q, k_cache, v_cache, meta, 0.25, window, sinks_N=module.sinks)
    torch.testing.assert_close(ours, theirs[0], rtol=0, atol=1e-6)
