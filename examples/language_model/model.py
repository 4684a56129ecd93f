# SPDX-License-Identifier: Apache-2.0
"""A small byte-level language model of KDA layers, written as such models are: raw gates, beta logits and
unnormalised q and k go into the kernel, one state a layer is all that a generated text costs in memory."""
import pathlib

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

WEIGHTS = pathlib.Path(__file__).resolve().parent / "weights.safetensors"
LOWER_BOUND = -5.0  # of the log decay a token, in nats


class KDALayer(nn.Module):
    """Kimi Delta Attention with an output gate. `kda` is a function with the signature of libkda.chunk_kda."""

    def __init__(self, width, heads, dim):
        super().__init__()
        self.heads, self.dim = heads, dim
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * heads * dim, bias=False)
        self.gates = nn.Linear(width, 2 * heads * dim, bias=False)  # decay, output
        self.beta = nn.Linear(width, heads, bias=False)
        self.A_log = nn.Parameter(torch.zeros(heads))
        # From channels that forget in a token to channels that keep a thousand.
        decay = torch.exp(torch.linspace(-7, 0, heads * dim))
        self.dt_bias = nn.Parameter(torch.logit(decay / -LOWER_BOUND))
        self.out_norm = nn.RMSNorm(dim)
        self.out = nn.Linear(heads * dim, width, bias=False)

    def forward(self, x, kda, state):
        x = self.norm(x)
        split = lambda t: t.unflatten(-1, (self.heads, self.dim))
        q, k, v = map(split, self.qkv(x).chunk(3, dim=-1))
        g, output_gate = map(split, self.gates(x).chunk(2, dim=-1))
        o, state = kda(q, k, v, g, self.beta(x), initial_state=state, output_final_state=True,
                       use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                       lower_bound=LOWER_BOUND, A_log=self.A_log, dt_bias=self.dt_bias)
        return self.out((self.out_norm(o) * output_gate.sigmoid()).flatten(-2)), state


class MLP(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x):
        value, gate = self.up(self.norm(x)).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


class LanguageModel(nn.Module):
    def __init__(self, width=128, layers=4, heads=2, dim=64, inner=352):
        super().__init__()
        self.embed = nn.Embedding(256, width)  # also the output layer
        nn.init.normal_(self.embed.weight, std=width**-0.5)
        self.attention = nn.ModuleList(KDALayer(width, heads, dim) for _ in range(layers))
        self.mlp = nn.ModuleList(MLP(width, inner) for _ in range(layers))
        self.norm = nn.RMSNorm(width)

    def forward(self, tokens, kda, states=None):
        """Logits [B, T, 256] of the next byte after each of `tokens` [B, T], and the state of every layer."""
        states = states or [None] * len(self.attention)
        x, after = self.embed(tokens), []
        for attention, mlp, state in zip(self.attention, self.mlp, states):
            y, state = attention(x, kda, state)
            x = x + y
            x = x + mlp(x)
            after.append(state)
        return F.linear(self.norm(x), self.embed.weight), after


def load(device="cpu", dtype=torch.float32, weights=WEIGHTS):
    model = LanguageModel()
    model.load_state_dict(load_file(weights))
    for name, parameter in model.named_parameters():
        keep = name.endswith(("A_log", "dt_bias"))  # the kernels read them in fp32
        parameter.data = parameter.data.to(device, torch.float32 if keep else dtype)
    return model.eval()
