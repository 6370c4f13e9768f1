"""Kimi K3 in plain float32 torch, written from its published formulas: what the native family is held against.

Readable before fast: one sequence at a time, the delta rule token by token, keys and values expanded, experts in a
loop, no cache. It shares no code with the engine. Where the mathematics coincides with Kimi Linear's (no lower bound of
the decay, a low-rank gate, no output gate, no latent width, no attention residuals) the same functions compute that,
so that they can be held against an implementation that others wrote.

Sources: the technical report of Kimi K3 (arXiv 2607.24653); Kimi Linear (arXiv 2510.26692) for the delta rule;
DeepSeek-V2 (arXiv 2405.04434) for latent attention; OCP Microscaling Formats v1.0 for MXFP4.

Legend: T tokens, H hidden, N heads, D head dim, P = N * D, E experts, Z latent width, F expert width.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.reference.moonvit import image_features
from tests.reference.mxfp4 import dequantize


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of a checkpoint below a prefix."""

    tensors: Mapping[str, Tensor]
    prefix: str = ""

    def into(self, name: str) -> Weights:
        return Weights(self.tensors, f"{self.prefix}{name}.")

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.tensors

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[self.prefix + name].float()

    def matrix(self, name: str) -> Tensor:
        """`name.weight`, or what `name.weight_packed` and `name.weight_scale` stand for."""
        if f"{name}.weight_packed" in self:
            packed = self.tensors[f"{self.prefix}{name}.weight_packed"]
            return dequantize(packed, self.tensors[f"{self.prefix}{name}.weight_scale"])
        return self[f"{name}.weight"]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.matrix(name).T


class KimiK3:
    """A checkpoint directory, whole and in float32."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.config = config
        self.text: Mapping[str, Any] = config["text_config"]
        self.weights = Weights(tensors)

    @classmethod
    def open(cls, directory: str | Path) -> KimiK3:
        home = Path(directory)
        tensors: dict[str, Tensor] = {}
        for file in sorted(home.glob("*.safetensors")):
            tensors.update(load_file(file))
        return cls(json.loads((home / "config.json").read_text()), tensors)

    def run(self, inputs: Mapping[str, Tensor], generate: int = 0) -> dict[str, Tensor]:
        """What a golden file holds, for `input_ids` [batch, tokens], optionally `attention_mask` and picture tensors.

        `hidden.0` is the embedding after placeholders were filled, `hidden.i` the running prefix that layer i hands on,
        and the last one what the output's attention residual gives, after the final norm. Padded positions are zero.
        `pixel_values` [patches, 3, size, size] with `grid_thws` [pictures, 3]: placeholders stand in the ids once for
        each feature. `generated` [batch, generate]: the greedy continuation of the real tokens.
        """
        ids_BT = inputs["input_ids"]
        mask_BT = inputs.get("attention_mask", torch.ones_like(ids_BT)).bool()
        features = self._features(inputs)
        found: dict[str, Tensor] = {} if features is None else {"image_features": features}
        used = 0
        rows: list[dict[str, Tensor]] = []
        continued: list[Tensor] = []
        for ids_T, mask_T in zip(ids_BT, mask_BT, strict=True):
            real_T = ids_T[mask_T]
            count = int((real_T == self.config["media_placeholder_token_id"]).sum())
            own = None if features is None else features[used : used + count]
            used += count
            row = self.sequence(real_T, own)
            rows.append({name: _spread(value, mask_T) for name, value in row.items()})
            if generate:
                continued.append(self._greedy(real_T, own, row["logits"], generate))
        found |= {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        return found | ({"generated": torch.stack(continued)} if generate else {})

    def sequence(self, ids_T: Tensor, features_NH: Tensor | None = None) -> dict[str, Tensor]:
        """`hidden.i` [T, H] and `logits` [T, vocabulary] of one sequence."""
        model = self.weights.into("language_model.model")
        prefix_TH = model["embed_tokens.weight"][ids_T]
        if features_NH is not None:
            prefix_TH[ids_T == self.config["media_placeholder_token_id"]] = features_NH
        found, bank = {"hidden.0": prefix_TH}, []
        for index in range(self.text["num_hidden_layers"]):
            prefix_TH, bank = self.layer(index, prefix_TH, bank)
            found[f"hidden.{index + 1}"] = prefix_TH
        y_TH = attention_residual(model, "output_attn_res", prefix_TH, bank)
        last_TH = rms_norm(y_TH, model["norm.weight"], self.text["rms_norm_eps"])
        found[f"hidden.{self.text['num_hidden_layers']}"] = last_TH
        return found | {"logits": self.weights.into("language_model").linear("lm_head", last_TH)}

    def layer(self, index: int, prefix_TH: Tensor, bank: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """One decoder layer: (prefix, bank) -> (prefix, bank)."""
        text, eps = self.text, self.text["rms_norm_eps"]
        w = self.weights.into(f"language_model.model.layers.{index}")
        h_TH = attention_residual(w, "self_attention_res", prefix_TH, bank) if bank else prefix_TH
        running: Tensor | None = prefix_TH
        if index % text["attn_res_block_size"] == 0:
            bank, running = [*bank, prefix_TH], None
        normed_TH = rms_norm(h_TH, w["input_layernorm.weight"], eps)
        if index + 1 in text["linear_attn_config"]["full_attn_layers"]:  # the lists count layers from one
            mixed_TH = latent_attention(w.into("self_attn"), normed_TH, text)
        else:
            mixed_TH = delta_attention(w.into("self_attn"), normed_TH, text["linear_attn_config"], eps)
        prefix_TH = mixed_TH if running is None else running + mixed_TH
        x_TH = attention_residual(w, "mlp_res", prefix_TH, bank)
        normed_TH = rms_norm(x_TH, w["post_attention_layernorm.weight"], eps)
        if index < text["first_k_dense_replace"]:
            return prefix_TH + gated_mlp(w.into("mlp"), normed_TH, text), bank
        return prefix_TH + latent_moe(w.into("block_sparse_moe"), normed_TH, text), bank

    def _features(self, inputs: Mapping[str, Tensor]) -> Tensor | None:
        if "pixel_values" not in inputs:
            return None
        grids = inputs["grid_thws"] if "grid_thws" in inputs else inputs["image_grid_thw"]
        return image_features(self.weights.tensors, self.config["vision_config"], inputs["pixel_values"], grids)

    def _greedy(self, ids_T: Tensor, features: Tensor | None, logits_TV: Tensor, steps: int) -> Tensor:
        chosen: list[Tensor] = []
        for _ in range(steps):
            chosen.append(logits_TV[-1].argmax())
            logits_TV = self.sequence(torch.cat((ids_T, torch.stack(chosen))), features)["logits"]
        return torch.stack(chosen)


def _spread(value: Tensor, mask_T: Tensor) -> Tensor:
    """Rows of the real tokens put where they stand, zero elsewhere."""
    whole = value.new_zeros(mask_T.shape[0], value.shape[-1])
    whole[mask_T] = value
    return whole


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def attention_residual(w: Weights, name: str, prefix_TH: Tensor, bank: list[Tensor]) -> Tensor:
    """A softmax over finished blocks and the running prefix, each token for itself, of the un-normalised values."""
    values_STH = torch.stack([*bank, prefix_TH])
    keys_STH = rms_norm(values_STH, w[f"{name}_norm.weight"], 1e-5)
    scores_ST = (keys_STH * w[f"{name}_proj.weight"][0]).sum(-1)
    return (scores_ST.softmax(0).unsqueeze(-1) * values_STH).sum(0)


def short_convolution(x_TP: Tensor, weight_P1K: Tensor) -> Tensor:
    """Causal, a filter for each channel: y_t = sum_j w_j x_{t - K + 1 + j}, zeros before the first token."""
    taps = weight_P1K.shape[-1]
    y_TP = torch.zeros_like(x_TP)
    for tap in range(taps):
        back = taps - 1 - tap
        y_TP[back:] += weight_P1K[:, 0, tap] * x_TP[: x_TP.shape[0] - back]
    return y_TP


def delta_attention(w: Weights, x_TH: Tensor, config: Mapping[str, Any], eps: float) -> Tensor:
    """Kimi delta attention; without `gate_lower_bound` the decay of Kimi Linear, without g_proj its low-rank gate."""
    heads, dim = config["num_heads"], config["head_dim"]
    q_TND, k_TND, v_TND = (
        torch.nn.functional.silu(short_convolution(w.linear(f"{part}_proj", x_TH), w[f"{part}_conv1d.weight"])).view(
            -1, heads, dim
        )
        for part in "qkv"
    )
    beta_TN = torch.sigmoid(w.linear("b_proj", x_TH))
    f_TND = (w.linear("f_b_proj", w.linear("f_a_proj", x_TH)) + w["dt_bias"].flatten()).view(-1, heads, dim)
    log_decay_TND = log_decay(f_TND, w["A_log"].flatten()[:heads], config.get("gate_lower_bound"))
    out_TND = delta_rule(l2_norm(q_TND) * dim**-0.5, l2_norm(k_TND), v_TND, log_decay_TND, beta_TN)
    gate_TP = w.linear("g_proj", x_TH) if "g_proj.weight" in w else w.linear("g_b_proj", w.linear("g_a_proj", x_TH))
    gated_TND = rms_norm(out_TND, w["o_norm.weight"], eps) * torch.sigmoid(gate_TP.view(-1, heads, dim))
    return w.linear("o_proj", gated_TND.flatten(1))


def l2_norm(x: Tensor) -> Tensor:
    return x / torch.sqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def log_decay(f_TND: Tensor, a_log_N: Tensor, lower_bound: float | None) -> Tensor:
    """The logarithm of what each channel of the state keeps, below zero; bounded below where a bound is given."""
    rate_N1 = torch.exp(a_log_N).unsqueeze(-1)
    if lower_bound is None:
        return -rate_N1 * torch.nn.functional.softplus(f_TND)
    return lower_bound * torch.sigmoid(rate_N1 * f_TND)


def delta_rule(q_TND: Tensor, k_TND: Tensor, v_TND: Tensor, log_decay_TND: Tensor, beta_TN: Tensor) -> Tensor:
    """S_t = (I - beta k k^T) Diag(decay) S_{t-1} + beta k v^T; o_t = S_t^T q. S: [heads, key dim, value dim]."""
    tokens, heads, dim = k_TND.shape
    state_NKV = k_TND.new_zeros(heads, dim, v_TND.shape[-1])
    out = []
    for t in range(tokens):
        decayed_NKV = log_decay_TND[t].exp().unsqueeze(-1) * state_NKV
        recalled_NV = torch.einsum("nkv,nk->nv", decayed_NKV, k_TND[t])
        correction_NV = beta_TN[t].unsqueeze(-1) * (v_TND[t] - recalled_NV)
        state_NKV = decayed_NKV + k_TND[t].unsqueeze(-1) * correction_NV.unsqueeze(-2)
        out.append(torch.einsum("nkv,nk->nv", state_NKV, q_TND[t]))
    return torch.stack(out)


def latent_attention(w: Weights, x_TH: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Latent attention without positions, keys and values expanded for every head; gated where g_proj is there."""
    heads, tokens = config["num_attention_heads"], x_TH.shape[0]
    nope, shared, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    if config["q_lora_rank"] is None:
        q_TP = w.linear("q_proj", x_TH)
    else:
        q_TP = w.linear("q_b_proj", rms_norm(w.linear("q_a_proj", x_TH), w["q_a_layernorm.weight"], 1e-6))
    latent_TL, k_shared_TR = w.linear("kv_a_proj_with_mqa", x_TH).split((config["kv_lora_rank"], shared), -1)
    kv_TP = w.linear("kv_b_proj", rms_norm(latent_TL, w["kv_a_layernorm.weight"], 1e-6))
    k_TNK, v_TNV = kv_TP.view(tokens, heads, nope + value).split((nope, value), -1)
    k_TNK = torch.cat((k_TNK, k_shared_TR.unsqueeze(1).expand(tokens, heads, shared)), -1)
    scores_NTT = torch.einsum("tnk,snk->nts", q_TP.view(tokens, heads, nope + shared), k_TNK)
    scores_NTT = scores_NTT * (nope + shared) ** -0.5
    future_TT = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    weights_NTT = scores_NTT.masked_fill(future_TT, -torch.inf).softmax(-1)
    out_TP = torch.einsum("nts,snv->tnv", weights_NTT, v_TNV).flatten(1)
    if "g_proj.weight" in w:
        out_TP = out_TP * torch.sigmoid(w.linear("g_proj", x_TH))
    return w.linear("o_proj", out_TP)


def activate(gate: Tensor, up: Tensor, config: Mapping[str, Any]) -> Tensor:
    """SiTU: both factors run through a scaled tanh; silu(gate) * up where the config says silu."""
    if config["hidden_act"] == "silu":
        return torch.nn.functional.silu(gate) * up
    assert config["hidden_act"] == "situ"
    beta, linear_beta = config["activation_situ_beta"], config["activation_situ_linear_beta"]
    bounded_gate = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
    return bounded_gate * linear_beta * torch.tanh(up / linear_beta)


def gated_mlp(w: Weights, x_TH: Tensor, config: Mapping[str, Any]) -> Tensor:
    return w.linear("down_proj", activate(w.linear("gate_proj", x_TH), w.linear("up_proj", x_TH), config))


def route(w: Weights, x_TH: Tensor, config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Chosen experts [T, k] and their weights: the bias selects and weighs nothing. One group of experts."""
    assert config["num_expert_group"] == config["topk_group"] == 1
    scores_TE = torch.sigmoid(w.linear("gate", x_TH))
    chosen_Tk = (scores_TE + w["gate.e_score_correction_bias"]).topk(config["num_experts_per_token"], -1).indices
    weights_Tk = scores_TE.gather(-1, chosen_Tk)
    if config["moe_renormalize"]:
        weights_Tk = weights_Tk / (weights_Tk.sum(-1, keepdim=True) + 1e-20)
    return chosen_Tk, weights_Tk * config["routed_scaling_factor"]


def latent_moe(w: Weights, x_TH: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Experts work on a narrower vector that all share; Kimi Linear's have the full width and no norm."""
    chosen_Tk, weights_Tk = route(w, x_TH, config)
    is_latent = "routed_expert_down_proj.weight" in w
    z_TZ = w.linear("routed_expert_down_proj", x_TH) if is_latent else x_TH
    y_TZ = torch.zeros_like(z_TZ)
    for expert in chosen_Tk.unique().tolist():
        own, (rows, slots) = w.into(f"experts.{expert}"), (chosen_Tk == expert).nonzero(as_tuple=True)
        inner_RF = activate(own.linear("w1", z_TZ[rows]), own.linear("w3", z_TZ[rows]), config)
        y_TZ[rows] += weights_Tk[rows, slots].unsqueeze(-1) * own.linear("w2", inner_RF)
    if is_latent:
        if config["latent_moe_use_norm"]:
            y_TZ = rms_norm(y_TZ, w["routed_expert_norm.weight"], config["rms_norm_eps"])
        y_TZ = w.linear("routed_expert_up_proj", y_TZ)
    return y_TZ + gated_mlp(w.into("shared_experts"), x_TH, config)
