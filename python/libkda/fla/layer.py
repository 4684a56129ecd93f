# SPDX-License-Identifier: Apache-2.0
"""FLA's functions around KDA and Gated DeltaNet on libkda's kernels, on a CPU, where Triton has none: the short
convolution and the gated norm, and the gates. Signatures are FLA 0.6's; `refusal` says of a call why it stays FLA's."""
from __future__ import annotations

import torch

from .. import gate, layer
from .._binding import layer_ops

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def _rows(x, weight):
    """[B, T, D] of FLA's [B, T, ..] with D elements a token."""
    return x if x.dim() == 3 and x.shape[-1] == weight.shape[0] else x.flatten(2)


def causal_conv1d_fwd(x, weight, bias, residual, initial_state=None, output_final_state=False, activation=None,
                      cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, chunk_size=64, layout_fallback=False):
    y, final_state = layer.short_conv(_rows(x, weight), weight, bias, activation=activation,
                                      initial_state=initial_state, output_final_state=bool(output_final_state),
                                      cu_seqlens=cu_seqlens)
    y = y.view(x.shape)
    return y if residual is None else y + residual, final_state


def causal_conv1d_bwd(x, dy, dht, weight=None, bias=None, residual=None, initial_state=None, activation=None,
                      cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, chunk_size=64, layout_fallback=False):
    wanted = 3 | (bias is not None) << 2 | (initial_state is not None) << 3
    dx, dw, db, dh0 = layer_ops.short_conv_backward(
        _rows(dy, weight), dht, _rows(x, weight), weight, bias, initial_state, cu_seqlens, activation is not None,
        wanted)
    return (dx.view(x.shape), dw, None if bias is None else db, None if residual is None else dy,
            None if initial_state is None else dh0)


def causal_conv1d_update(x, cache, residual=None, weight=None, bias=None, activation=None):
    tokens = x.reshape(cache.shape[0], 1, weight.shape[0])  # one of each sequence, in whatever shape
    y = layer.short_conv_update(tokens, cache, weight, bias, activation=activation).view(x.shape)
    return y if residual is None else y + residual, cache


def layer_norm_gated_fwd(x, g, weight, bias, activation="swish", eps=1e-5, residual=None, out_dtype=None,
                         residual_dtype=None, is_rms_norm=False):
    """What its backward reads of mean and norm libkda computes again."""
    return layer.gated_rms_norm(x, g, weight, eps=eps, activation=activation), None, None, x


def layer_norm_gated_bwd(dy, x, g, weight, bias, activation="swish", eps=1e-5, mean=None, rstd=None, dresidual=None,
                         has_residual=False, is_rms_norm=False, x_dtype=None, recompute_output=False):
    wanted = 3 | (weight is not None) << 2
    dx, dg, dw = layer_ops.gated_rms_norm_backward(dy, x, g, weight, eps, layer_ops.ACTIVATIONS[activation], wanted)
    return dx, dg, None if weight is None else dw, None, None


def kda_gate_bwd(g, A_log=None, dt_bias=None, dyg=None, lower_bound=None):
    """Gradients of g, A_log and dt_bias, each of its type, from that of the log decays."""
    leaves = {name: None if x is None else x.detach().requires_grad_()
              for name, x in dict(g=g, A_log=A_log, dt_bias=dt_bias).items()}
    with torch.enable_grad():
        decays = gate.fused_kda_gate(**leaves, lower_bound=lower_bound)
    found = iter(torch.autograd.grad(decays, [x for x in leaves.values() if x is not None], dyg.to(decays.dtype)))
    return tuple(None if x is None else next(found) for x in leaves.values())


def gdn_gate_fwd(g, A_log, dt_bias=None, output_dtype=torch.float32):
    """Log decays of Gated DeltaNet, [.., HV]: KDA's of one channel."""
    return gate.fused_kda_gate(g[..., None], A_log, dt_bias, output_dtype=output_dtype)[..., 0]


def gdn_gate_bwd(g, A_log, dt_bias, dyg):
    dg, dA_log, ddt_bias = kda_gate_bwd(g[..., None], A_log, dt_bias, dyg[..., None])
    return dg[..., 0], dA_log, ddt_bias


def refusal(name, arguments):
    """Why libkda does not compute a call with these arguments, by name; None if it does."""
    for given, x in arguments.items():
        if isinstance(x, torch.Tensor):
            if x.device.type != "cpu":
                return f"{given} on {x.device}"
            if x.is_floating_point() and x.dtype not in _TYPES and given not in ("mean", "rstd"):
                return f"{given} of {x.dtype}"
    if name == "kda_gate_bwd":
        without_rate = arguments.get("A_log") is None and arguments.get("lower_bound") is None
        return "a softplus gate without A_log" if without_rate else None
    if name in ("gdn_gate_fwd", "gdn_gate_bwd"):
        return None
    if name.startswith("causal_conv1d"):
        weight = arguments.get("weight")
        if weight is None or not 2 <= weight.shape[1] <= 4:
            return "a convolution of other than 2 to 4 taps"
        return None
    if not arguments.get("is_rms_norm") or arguments.get("bias") is not None:
        return "a norm with a mean or a bias"
    x_type = arguments["x"].dtype
    if any(arguments.get(given) is not None for given in ("residual", "dresidual")) or arguments.get("has_residual"):
        return "a norm with a residual"
    if any(arguments.get(given) not in (None, x_type) for given in ("out_dtype", "residual_dtype", "x_dtype")):
        return "a norm of two types"
    return "a norm whose output is computed again" if arguments.get("recompute_output") else None


CONVOLUTIONS = (causal_conv1d_fwd, causal_conv1d_bwd, causal_conv1d_update)
NORMS = (layer_norm_gated_fwd, layer_norm_gated_bwd)
STAGES = (kda_gate_bwd,)
GATED_DELTA_STAGES = (gdn_gate_fwd, gdn_gate_bwd)
