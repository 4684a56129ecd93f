# SPDX-License-Identifier: Apache-2.0
"""FlashKDA's functions on libkda's kernels: `import libkda.compat.flash_kda as flash_kda`.

install() makes `import flash_kda` find this module, so that FLA, vLLM and SGLang take it where they would take
FlashKDA. Unlike FlashKDA: any K and V up to 256, grouped value heads, fp16, CPU tensors, exact on every gate.
"""
from __future__ import annotations

import sys

import torch

from libkda import ops
from libkda.kda import _as, _lengths, _parameter, _rows


def fwd(q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state=None, final_state=None,
        cu_seqlens=None):
    """Writes out [B, T, HV, V] and final_state [N, HV, V, K] (may be None, or initial_state itself).

    q, k [B, T, H, K] are normalised in the kernel; g [B, T, HV, K] is the raw gate: lower_bound sigmoid(exp(A_log)
    (g + dt_bias)); beta [B, T, HV] a logit. A_log [HV], dt_bias [HV, K]; initial_state [N, HV, V, K];
    cu_seqlens [N + 1], int32 or int64. States are fp32 or bf16. out and states of another type, or whose last
    dimension is not contiguous, cost a copy. Raises ValueError and RuntimeError that name what does not fit.
    """
    if out.shape != v.shape:
        raise ValueError(f"out must have the shape of v, {tuple(v.shape)}, got {tuple(out.shape)}")
    with torch.no_grad():
        cu, cpu = _lengths(cu_seqlens, None, q)
        inputs = (_rows(x) for x in (q, k, v, g, beta))
        o, final = _rows(out), None if final_state is None else _state(final_state)
        ops.forward_into(*inputs, o, final, _parameter(A_log), _parameter(dt_bias),
                         None if initial_state is None else _state(initial_state), cu, cpu, ops.GATE_BOUNDED,
                         ops.BETA_SIGMOID, float(lower_bound), float(scale), True, True)
        for given, written in ((out, o), (final_state, final)):
            if written is not given:
                given.copy_(written)


def _state(x):
    """States of a type that the kernels take, in rows that they take: `x` itself but for a copy of other ones."""
    return _rows(x if x.dtype is torch.bfloat16 else _as(x, torch.float32))


def get_workspace_size(*args, **kwargs) -> int:
    """0: fwd() takes its workspace from torch's allocator."""
    return 0


def install() -> None:
    """Makes this module importable as `flash_kda`, unless the real one has been imported."""
    sys.modules.setdefault("flash_kda", sys.modules[__name__])
