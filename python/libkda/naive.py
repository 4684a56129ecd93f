# SPDX-License-Identifier: Apache-2.0
"""Plain torch references, token by token or by chunks, differentiable; slow, for tests and reading.

Per sequence and value head, S [K, V]:
    S_t = (I - beta_t k_t k_t^T) Diag(exp g_t) S_{t-1} + beta_t k_t v_t^T,   o_t = scale S_t^T q_t
"""
from __future__ import annotations

import torch

from ._binding.checks import checked_first
from ._binding.rules import LAST_SLOT, integer
from .gate import bounded_gate, softplus_gate


def _prepare(q, k, v, g, beta, scale, initial_state, dtype):
    """Heads first, q and k once a value head, states to start from."""
    group = v.shape[2] // q.shape[2]
    q, k, v, g, beta = (x.to(dtype).transpose(1, 2) for x in (q, k, v, g, beta))
    q, k = (x.repeat_interleave(group, dim=1) for x in (q, k))
    B, HV, _, K = q.shape
    state = q.new_zeros(B, HV, K, v.shape[-1])
    if initial_state is not None:
        state = state + initial_state.to(dtype)
    return q * (K**-0.5 if scale is None else scale), k, v, g, beta, state


@checked_first
def naive_recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The recurrence. q, k [B, T, H, K], v [B, T, HV, V], g [B, T, HV, K] log decays, beta [B, T, HV],
    initial_state [B, HV, K, V]. Computes in fp32 (fp64 inputs: fp64); returns (o as v's type, state or None)."""
    dtype = torch.promote_types(v.dtype, torch.float32)
    out_dtype = v.dtype
    q, k, v, g, beta, state = _prepare(q, k, v, g, beta, scale, initial_state, dtype)
    outputs = []
    for t in range(q.shape[2]):
        state = state * g[:, :, t].exp()[..., None]
        error = beta[:, :, t, None] * (v[:, :, t] - torch.einsum("bhk,bhkv->bhv", k[:, :, t], state))
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, :, t], error)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, :, t], state))
    o = torch.stack(outputs, dim=1) if outputs else v.transpose(1, 2)
    return o.to(out_dtype), state if output_final_state else None


@checked_first
def naive_chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same by chunks (docs/algorithm.md, "Chunked form"); any T. Every exponent is a sum of log
    decays between two tokens of a chunk, so nothing overflows where the decays do not."""
    dtype = torch.promote_types(v.dtype, torch.float32)
    out_dtype = v.dtype
    q, k, v, g, beta, state = _prepare(q, k, v, g, beta, scale, initial_state, dtype)
    chunk_size = integer("chunk_size", chunk_size, 1, LAST_SLOT)
    outputs = []
    for begin in range(0, q.shape[2], chunk_size):
        qc, kc, vc, gc, bc = (x[:, :, begin:begin + chunk_size] for x in (q, k, v, g, beta))
        C = qc.shape[2]
        total = gc.cumsum(2)
        between = total[:, :, :, None] - total[:, :, None]  # log decay from j to i, for j <= i
        lower = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
        decay = torch.where(lower[:, :, None], between, -torch.inf).exp()
        A = torch.einsum("bhik,bhjk,bhijk->bhij", qc, kc, decay)
        N = torch.einsum("bhik,bhjk,bhijk->bhij", kc, kc, decay).tril(-1)
        start = total.exp()
        target = bc[..., None] * (vc - (kc * start) @ state)
        eye = torch.eye(C, dtype=dtype, device=q.device)
        error = torch.linalg.solve_triangular(eye + bc[..., None] * N, target, upper=False, unitriangular=True)
        outputs.append((qc * start) @ state + A @ error)
        end = (total[:, :, -1:] - total).exp()
        state = state * start[:, :, -1, :, None] + (kc * end).transpose(-1, -2) @ error
    o = torch.cat(outputs, dim=2) if outputs else v
    return o.transpose(1, 2).to(out_dtype), state if output_final_state else None


@checked_first
def naive_kda_gate(
    g: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """-exp(A_log) softplus(g + dt_bias). g [..., H, K], A_log with H elements, dt_bias with H * K."""
    return softplus_gate(g, A_log, dt_bias).to(output_dtype)


@checked_first
def naive_kda_lowerbound_gate(
    g: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float = -5.0,
    output_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """lower_bound sigmoid(exp(A_log) (g + dt_bias)); without A_log the factor is 1."""
    return bounded_gate(g, A_log, dt_bias, lower_bound).to(output_dtype)


def l2norm(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last dimension, in fp32."""
    x = x.float()
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
