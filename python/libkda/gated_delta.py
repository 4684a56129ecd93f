# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet: the operation of KDA with one gate a head, under FLA's names and arguments.

chunk_gated_delta_rule and fused_recurrent_gated_delta_rule take what Qwen3-Next's layers pass. They are chunk_kda and
fused_recurrent_kda with g [B, T, HV], which is never expanded; its gradient is [B, T, HV] too.
"""
from __future__ import annotations

import torch

from ._binding.checks import checked, state_type
from ._binding.operands import as_type
from .kda import chunk_kda, fused_recurrent_kda


def _expect_one_a_head(g):
    if g.dim() != 3:
        raise ValueError(f"g must have shape [B, T, HV], got {list(g.shape)}; libkda.chunk_kda takes a gate a channel")


def _state(initial_state, q):
    return None if initial_state is None else as_type(initial_state, state_type(q))


@checked("A_log", "dt_bias", "use_gate_in_kernel", "chunk_size", "has_state", "head_map", "out", "plan_options",
         "transpose_state_layout")
def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    cp_context=None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gated DeltaNet over whole sequences (FLA 0.6's chunk_gated_delta_rule).

    q, k [B, T, H, K]; v [B, T, HV, V]; g, beta [B, T, HV]; initial_state [N, HV, K, V] of any float type. g is the log
    decay in nats, or with use_gate_in_kernel raw, with A_log [HV] and dt_bias [HV]. All else as of libkda.chunk_kda,
    gradients too. chunk_indices and chunk_size (16, 32 or 64, as in FLA) change nothing.

    Returns (o [B, T, HV, V] of q's type, final state fp32 or None). Raises what chunk_kda raises, and
    NotImplementedError for a cp_context.
    """
    if cp_context is not None:
        raise NotImplementedError("libkda.chunk_gated_delta_rule has no context parallelism: leave out `cp_context`.")
    if (chunk_size := kwargs.pop("chunk_size", 64)) not in (16, 32, 64):
        raise ValueError(f"`chunk_size` must be 16, 32, or 64 for Gated Delta Rule, got {chunk_size}.")
    _expect_one_a_head(g)
    return chunk_kda(q, k, v, g, beta, scale, _state(initial_state, q), output_final_state, use_qk_l2norm_in_kernel,
                     kwargs.pop("use_gate_in_kernel", False), use_beta_sigmoid_in_kernel, allow_neg_eigval,
                     state_v_first=state_v_first, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, **kwargs)


@checked("cu_seqlens_cpu", "has_state", "head_map", "out", "plan_options", "transpose_state_layout")
def fused_recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same for a few tokens (FLA 0.6's fused_recurrent_gated_delta_rule), by fused_recurrent_kda. g and beta are
    needed; gk and gv, gates a channel, are not taken. Returns (o of v's type, final state fp32 or None)."""
    if gk is not None or gv is not None:
        raise NotImplementedError("libkda.fused_recurrent_gated_delta_rule takes no `gk` and no `gv`: "
                                  "libkda.fused_recurrent_kda has a gate a channel of k.")
    if g is None or beta is None:
        raise ValueError("g and beta must be given")
    _expect_one_a_head(g)
    return fused_recurrent_kda(q, k, v, g, beta, A_log, dt_bias, scale, initial_state,
                               output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
                               use_beta_sigmoid_in_kernel, allow_neg_eigval, None, state_v_first, cu_seqlens, **kwargs)
