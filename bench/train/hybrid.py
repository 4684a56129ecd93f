# SPDX-License-Identifier: Apache-2.0
"""A small hybrid of Gated DeltaNet and softmax attention, as Qwen3-Next has them, in the frame of
examples/language_model: three layers of Gated DeltaNet, then one of attention. And Gated DeltaNet in torch alone, in
fp32, from FLA's naive_chunk_gated_delta_rule."""
import math

import torch
import torch.nn.functional as F
from model import LanguageModel
from torch import nn

TAPS = 4  # of the short convolution


class GatedDeltaNetLayer(nn.Module):
    """`rule` is a function with the signature of libkda.chunk_gated_delta_rule."""

    def __init__(self, width, heads, dim, value_heads):
        super().__init__()
        self.sizes, self.dim = [heads * dim, heads * dim, value_heads * dim], dim
        inner = value_heads * dim
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, sum(self.sizes), bias=False)
        self.taps = nn.Parameter(torch.randn(TAPS, sum(self.sizes)) * TAPS**-0.5)
        self.output_gate = nn.Linear(width, inner, bias=False)
        self.gate_and_step = nn.Linear(width, 2 * value_heads, bias=False)
        # The first weights of Qwen3-Next and FLA: A up to 16, steps of time from 1e-3 to 0.1.
        self.A_log = nn.Parameter(torch.log(torch.empty(value_heads).uniform_(1e-2, 16)))
        step = torch.exp(torch.empty(value_heads).uniform_(math.log(1e-3), math.log(0.1)))
        self.dt_bias = nn.Parameter(torch.log(torch.expm1(step)))
        self.out_norm = nn.RMSNorm(dim)
        self.out = nn.Linear(inner, width, bias=False)

    def forward(self, x, rule, state):
        x = self.norm(x)
        padded = F.pad(self.qkv(x), (0, 0, TAPS - 1, 0))
        mixed = F.silu(sum(padded[:, i:i + x.shape[1]] * self.taps[i].to(padded) for i in range(TAPS)))
        q, k, v = (t.unflatten(-1, (-1, self.dim)) for t in mixed.split(self.sizes, dim=-1))
        g, beta = self.gate_and_step(x).chunk(2, dim=-1)
        o, state = rule(q, k, v, g, beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True,
                        use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, A_log=self.A_log,
                        dt_bias=self.dt_bias)
        gate = F.silu(self.output_gate(x).unflatten(-1, (-1, self.dim)))
        return self.out((self.out_norm(o) * gate).flatten(-2)), state


class AttentionLayer(nn.Module):
    """Causal, without positions: the layers around it have them. It keeps no state."""

    def __init__(self, width, dim):
        super().__init__()
        self.dim = dim
        self.norm = nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x, _, state):
        q, k, v = (t.unflatten(-1, (-1, self.dim)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, dim=-1))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(o.transpose(1, 2).flatten(-2)), state


def hybrid(width, layers, dim=128):
    """Two value heads for each q/k head, a head of q and k for every 128 of the width."""
    model, heads = LanguageModel(width=width, layers=layers, heads=1, inner=width * 11 // 4), width // dim
    for i in range(layers):
        model.attention[i] = (AttentionLayer(width, dim) if i % 4 == 3 else
                              GatedDeltaNetLayer(width, heads, dim, 2 * heads))
    return model


def gated_delta_rule_in_torch(q, k, v, g, beta, A_log, dt_bias, initial_state=None, output_final_state=False, **modes):
    """FLA's naive_chunk_gated_delta_rule under the modes that GatedDeltaNetLayer asks for, all of it in fp32."""
    from fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule
    assert all(modes[f"use_{name}_in_kernel"] for name in ("qk_l2norm", "gate", "beta_sigmoid"))
    with torch.autocast(q.device.type, enabled=False):
        of_each = v.shape[2] // q.shape[2]
        q, k = (F.normalize(t.float(), dim=-1).repeat_interleave(of_each, dim=2) for t in (q, k))
        decay = -A_log.exp() * F.softplus(g.float() + dt_bias)
        o, state = naive_chunk_gated_delta_rule(q, k, v, decay, beta.float().sigmoid(), initial_state=initial_state,
                                                output_final_state=output_final_state)
    return o.to(v.dtype), state
