# SPDX-License-Identifier: Apache-2.0
"""FlashKDA's functions on libkda's kernels: `import libkda.compat.flash_kda as flash_kda`.

install() makes `import flash_kda` find this module, so that FLA, vLLM and SGLang take it where they would take
FlashKDA. Unlike FlashKDA: any K and V up to 256, grouped value heads, fp16, CPU tensors, exact on every gate.
"""
from __future__ import annotations

import sys

import torch

from .. import ops
from .._checks import checked
from .._operands import as_type, expect_distinct, lengths_of, parameter_of, rows_of, written_rows_of
from .._rules import number


@checked()
def fwd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, scale: float,
        out: torch.Tensor, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None, lower_bound: float,
        initial_state: torch.Tensor | None = None, final_state: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None) -> None:
    """Writes out [B, T, HV, V] and final_state [N, HV, V, K] (may be None, or initial_state itself).

    q, k [B, T, H, K] are normalised in the kernel; g [B, T, HV, K] is the raw gate: lower_bound sigmoid(exp(A_log)
    (g + dt_bias)); beta [B, T, HV] a logit. A_log [HV], dt_bias [HV, K]; initial_state [N, HV, V, K];
    cu_seqlens [N + 1], int32 or int64. States are fp32 or bf16. out and states of another type, or whose last
    dimension is not contiguous, cost a copy. Raises TypeError and ValueError that name what does not fit; nothing is
    written then. NotImplementedError where a derivative is asked for.
    """
    ops.refuse_gradients("flash_kda.fwd", q, k, v, g, beta, A_log, dt_bias, initial_state, out, final_state)
    with torch.no_grad():
        cu, cpu = (None, None) if cu_seqlens is None else lengths_of(cu_seqlens, None, q)
        inputs = (rows_of(x) for x in (q, k, v, g, beta))
        o, final = written_rows_of("out", out), None
        if final_state is not None:
            final = _state(final_state)
            if final is not final_state:
                expect_distinct("final_state", final_state)
        ops.forward_into(*inputs, o, final, None, parameter_of(A_log), parameter_of(dt_bias),
                         None if initial_state is None else _state(initial_state), cu, cpu, ops.GATE_BOUNDED,
                         ops.BETA_SIGMOID, number("lower_bound", lower_bound), number("scale", scale), True, True)
        _copy_back(out, o)
        _copy_back(final_state, final)


def _copy_back(given, written):
    if written is not given:
        given.copy_(written)


def _state(x):
    """States of a type that the kernels take, in rows that they take: `x` itself but for a copy of other ones."""
    return rows_of(x if x.dtype is torch.bfloat16 else as_type(x, torch.float32))


def get_workspace_size(*args: object, **kwargs: object) -> int:
    """0: fwd() takes its workspace from torch's allocator."""
    return 0


def install() -> None:
    """Makes this module importable as `flash_kda`, unless the real one has been imported."""
    sys.modules.setdefault("flash_kda", sys.modules[__name__])
