# SPDX-License-Identifier: Apache-2.0
"""From FLA's arguments to what torch.ops.libkda takes."""
from __future__ import annotations

import torch
from torch.compiler import is_compiling

from libkda.ops import BETA_PLAIN, BETA_SIGMOID, BETA_SIGMOID2, GATE_BOUNDED, GATE_LOG, GATE_SOFTPLUS

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def rows_of(x):
    """A tensor of a type that the kernels read, its last dimension contiguous; any other strides."""
    if x.dtype not in _FLOATS:
        x = x.float()
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 and x.is_contiguous() else x.contiguous()


def parameter_of(x):
    """A parameter of the gate as the kernels read it, in any shape."""
    return x if x is None or x.dtype is torch.float32 and x.is_contiguous() else x.float().contiguous()


def as_type(x, dtype):
    return x if x.dtype is dtype else x.to(dtype)


def lengths_of(cu_seqlens, cu_seqlens_cpu, q):
    """cu_seqlens where q is, and on the host if that costs no wait."""
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"`cu_seqlens` must be int32 or int64, got {cu_seqlens.dtype}.")
    if cu_seqlens.device.type == "cpu" and q.device.type != "cpu":
        cu_seqlens_cpu = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
        cu_seqlens = cu_seqlens.to(q.device)
    return cu_seqlens.contiguous(), None if cu_seqlens_cpu is None else cu_seqlens_cpu.contiguous()


def modes_of(q, scale, lower_bound, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
             use_qk_l2norm_in_kernel, state_v_first):
    gate, beta, bound = GATE_LOG, BETA_PLAIN, -5.0
    if use_gate_in_kernel:
        if lower_bound is None:
            gate = GATE_SOFTPLUS
        else:
            gate, bound = GATE_BOUNDED, float(lower_bound)
    if use_beta_sigmoid_in_kernel:
        beta = BETA_SIGMOID2 if allow_neg_eigval else BETA_SIGMOID
    return (gate, beta, bound, q.shape[-1] ** -0.5 if scale is None else float(scale), use_qk_l2norm_in_kernel,
            bool(state_v_first))


def check_shapes(q, k, v, g, beta):
    B, T, H, K = q.shape
    HV = v.shape[2]
    assert q.shape == k.shape, f"q and k must have the same shape, got q={q.shape} vs k={k.shape}"
    assert K <= 256, f"Currently we only support key headdim <=256 for KDA, got {K}."
    assert v.shape[-1] <= 256, f"libkda supports value head dimensions up to 256, got {v.shape[-1]}."
    assert HV % H == 0, (f"For GVA, num_v_heads (HV={HV}) must be evenly divisible by num_qk_heads (H={H}), "
                         f"but got HV % H = {HV % H}")
    assert g.shape == (B, T, HV, K), f"g must have shape [B, T, HV, K]={[B, T, HV, K]}, got {list(g.shape)}"
    assert beta.shape == (B, T, HV), f"beta must have shape [B, T, HV]={[B, T, HV]}, got {list(beta.shape)}"


def call(operator, q, k, v, g, beta, *rest):
    """operator(q, k, v, g, beta, *rest). It looks at what it is given before anything else, faster than Python can:
    what it refuses is looked at here, for FLA's errors or to be given again as it takes it."""
    error = None
    if type(q) is torch.Tensor and not is_compiling():  # a fake kernel refuses nothing
        try:
            return operator(q, k, v, g, beta, *rest)
        except RuntimeError as refusal:
            error = refusal
    check_shapes(q, k, v, g, beta)
    rows = rows_of(q), rows_of(k), rows_of(v), rows_of(g), rows_of(beta)
    if error is not None and all(row is x for row, x in zip(rows, (q, k, v, g, beta))):
        raise error  # not for what these tensors are: nothing is tried twice
    return operator(*rows, *rest)


def new_states(q, v, state_v_first, slots):
    K, (HV, V) = q.shape[-1], v.shape[2:]
    return q.new_empty((slots, HV, V, K) if state_v_first else (slots, HV, K, V), dtype=torch.float32)
