# SPDX-License-Identifier: Apache-2.0
"""The operations around KDA in its layer: the short convolution in front of it and the gated RMS norm behind it, on
CPU and CUDA tensors, with gradients (docs/layer.md)."""
from __future__ import annotations

import torch

from ._binding import layer_ops
from ._binding.checks import checked, int32_of
from ._binding.operands import dense
from ._binding.rules import LAST_SLOT, integer, number


def _activation(activation, allowed):
    if activation not in allowed:
        raise ValueError(f"activation must be one of {', '.join(map(repr, allowed))}, got {activation!r}")
    return layer_ops.ACTIVATIONS[activation]


def _silu(activation):
    return _activation(activation, (None, "silu", "swish")) == 1


@checked()
def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    state_width: int | None = None,
    cu_seqlens: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Causal depthwise convolution of whole sequences, with gradients.

    x [B, T, D], any strides: what is [B, D, T] in memory comes as x.transpose(1, 2), without a copy. weight [D, W], W
    from 2 to 4, its last tap that of the token itself; bias [D]. activation: None, "silu" or "swish". Types are fp32,
    bf16 or fp16, each tensor its own; sums are in fp32. cu_seqlens [N + 1], int32 or int64, packs N sequences into B =
    1. A state [N, D, S] has the last S inputs of each sequence, the oldest first, S at least W - 1; without
    initial_state the inputs before a sequence are zero.

    Returns (y [B, T, D], contiguous, of x's type; with output_final_state the state behind each sequence, else None,
    of initial_state's type and width, without one of x's type and state_width, W if that is None). out [B, T, D]: y
    goes there, of its own type and any strides, and no gradient is taken; it shares no memory with an input.
    """
    width = 0
    if output_final_state:
        width = (weight if initial_state is None else initial_state).shape[-1]
        if state_width is not None:
            width = integer("state_width", state_width, weight.shape[-1] - 1, LAST_SLOT)
    if cu_seqlens is not None:
        cu_seqlens = dense(cu_seqlens)
    call = x, weight, bias, initial_state, cu_seqlens, _silu(activation), width
    if out is None:
        y, final_state = layer_ops.short_conv(*call)
    else:
        y, final_state = out, layer_ops.short_conv_into(*call, out)
    return y, final_state if output_final_state else None


@checked()
def short_conv_update(
    x: torch.Tensor,
    states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    has_state: torch.Tensor | None = None,
    first_slot: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same for any number of tokens of each sequence, on a pool of states [slots, D, S], any strides, that is read
    and written in place; without gradients.

    Sequence n has slot indices[n], without indices slot n. A negative index, or one below first_slot (1 where slot 0
    is that of padded rows, as in vLLM), means none: the sequence starts from zero and nothing is stored. has_state
    [N], bool: where it is False (a new request in an old slot) a sequence starts from zero. Returns y [B, T, D], or
    `out`, of its own type and any strides.
    """
    if indices is not None:
        indices = int32_of("indices", indices)
    if type(first_slot) is not int or first_slot:
        first_slot = integer("first_slot", first_slot, 0, LAST_SLOT)
    call = (x, states, weight, bias, None if cu_seqlens is None else dense(cu_seqlens), indices,
            None if has_state is None else dense(has_state), _silu(activation), first_slot)
    if out is None:
        return layer_ops.short_conv_update(*call)
    layer_ops.short_conv_update(*call, out)
    return out


@checked()
def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    activation: str | None = "sigmoid",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight * act(gate) over the last dimension, with gradients.

    x and gate [..., D] of one shape, weight [D]: fp32, bf16 or fp16, each its own; arithmetic is fp32. activation of
    the gate: "sigmoid", "silu" or "swish", or None for the gate itself. Returns [..., D], contiguous, of x's type, or
    `out`: of x's shape and its own type, its last dimension contiguous, beyond 4 dimensions all of it. It shares no
    memory with an input, and no gradient is taken then.
    """
    shape = x.shape
    kind = _activation(activation, ("sigmoid", "silu", "swish", None))
    x, gate = _rows(x), None if gate is None else _rows(gate)
    if weight is not None:
        weight = dense(weight)
    eps = number("eps", eps)
    if out is None:
        return layer_ops.gated_rms_norm(x, gate, weight, eps, kind).view(shape)
    if out.shape != shape:
        raise ValueError(f"out must have the shape of x, {list(shape)}, got {list(out.shape)}")
    if out.dim() > 4 and not out.is_contiguous():
        raise ValueError(f"out must be contiguous where it has {out.dim()} dimensions")
    layer_ops.gated_rms_norm_into(x, gate, weight, eps, kind, out.view(x.shape))
    return out


def _rows(x):
    """With at most 4 dimensions and a contiguous last one."""
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    return x if x.dim() <= 4 else x.flatten(0, -4)
