# SPDX-License-Identifier: Apache-2.0
"""The gate by itself. chunk_kda and fused_recurrent_kda compute it in their kernels
(use_gate_in_kernel=True); this is for callers that want the log decays."""
from __future__ import annotations

import torch
import torch.nn.functional as F

from ._binding.checks import check_rates, checked_first
from ._binding.rules import number


def _with_bias(g, dt_bias):
    g = g.float()
    return g if dt_bias is None else g + dt_bias.reshape(g.shape[-2:])


def _rate(A_log, heads):
    check_rates(A_log)
    return A_log.reshape(heads, 1).float().exp()


def softplus_gate(g, A_log, dt_bias):
    return -_rate(A_log, g.shape[-2]) * F.softplus(_with_bias(g, dt_bias))


def bounded_gate(g, A_log, dt_bias, lower_bound):
    x = _with_bias(g, dt_bias)
    lower_bound = number("lower_bound", lower_bound)
    return lower_bound * torch.sigmoid(x if A_log is None else _rate(A_log, g.shape[-2]) * x)


@checked_first
def fused_kda_gate(
    g: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Log decays from raw gates, with gradients; FLA's function of this name.

    g [..., HV, K] of any float type; A_log with HV elements (optional with lower_bound); dt_bias with
    HV * K elements; lower_bound < 0, in nats a token. Returns [..., HV, K] of output_dtype:
    lower_bound sigmoid(exp(A_log) (g + dt_bias)) with a lower_bound, else -exp(A_log) softplus(g + dt_bias).

    Elementwise torch operations in fp32: under torch.compile one kernel.
    """
    if lower_bound is not None:
        return bounded_gate(g, A_log, dt_bias, lower_bound).to(output_dtype)
    if A_log is None:
        raise ValueError("`A_log` must be provided when `lower_bound` is not set.")
    return softplus_gate(g, A_log, dt_bias).to(output_dtype)
