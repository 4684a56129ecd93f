# SPDX-License-Identifier: Apache-2.0
"""torch.ops.libkda.short_conv, gated_rms_norm and their kin: fake kernels and derivatives.

They are declared in python/csrc/torch_layer.cpp. `short_conv` returns (y, final_state), the latter without states
unless state_width is above 0; `short_conv_update` writes `states` in place and returns y; y is contiguous.
`short_conv_into`, `short_conv_update_into` and `gated_rms_norm_into` write `out` in the place of y, any strides (of the
norm with a contiguous last dimension), without gradients; the first returns final_state. The
backwards return the gradients whose bits `wanted` has, in the order of x, weight, bias, initial_state and of x, gate,
weight, the others empty. `fused_decode` writes both states and `out` in place. `activation` is a number
of ACTIVATIONS.
"""
from __future__ import annotations

import torch
from torch import is_grad_enabled
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling

from .. import ops
from .checks import check

ACTIVATIONS = {None: 0, "none": 0, "silu": 1, "swish": 1, "sigmoid": 2}
NO_SECOND = ("libkda has no second derivatives of {}: leave out create_graph=True, or compute it with torch's own "
             "functions")

_short_conv = torch.ops.libkda.short_conv.default
_short_conv_update = torch.ops.libkda.short_conv_update.default
_short_conv_backward = torch.ops.libkda.short_conv_backward.default
_short_conv_into = torch.ops.libkda.short_conv_into.default
_short_conv_update_into = torch.ops.libkda.short_conv_update_into.default
_gated_rms_norm_into = torch.ops.libkda.gated_rms_norm_into.default
_gated_rms_norm = torch.ops.libkda.gated_rms_norm.default
_gated_rms_norm_backward = torch.ops.libkda.gated_rms_norm_backward.default
_fused_decode = torch.ops.libkda.fused_decode.default
_WRITTEN = {operator: ops.written_by(operator) for operator in (
    _short_conv_into, _short_conv_update, _short_conv_update_into, _gated_rms_norm_into, _fused_decode)}
_WITHOUT_TAPS = (_gated_rms_norm, _gated_rms_norm_into, _gated_rms_norm_backward, _fused_decode)


# ---- fake kernels ----------------------------------------------------------------------------------------------------

def _checked(operator, args):
    """A call's arguments by name, with the checks that kernels make of real tensors."""
    values = ops.named(operator, args)
    x = values["x"]
    if x.device.type not in ("cpu", "cuda"):
        raise ValueError(f"x must be on the CPU or on a CUDA device, got {x.device}")
    check(ops._name_of(operator), values)
    weight = values["weight"]
    if operator not in _WITHOUT_TAPS and not 2 <= weight.shape[1] <= 4:
        raise ValueError(f"weight must have 2 to 4 taps, got {weight.shape[1]}")
    return values


def _fake_y(operator):
    """The fake kernel of an operator that returns what x becomes."""
    def fake(*args):
        x = _checked(operator, args)["x"]
        return x.new_empty(x.shape)
    return fake


def _fake_final_state(given):
    x, lengths, initial, width = (given[name] for name in ("x", "cu_seqlens", "initial_state", "state_width"))
    N = x.shape[0] if lengths is None else lengths.shape[0] - 1
    return (x if initial is None else initial).new_empty((N if width else 0, x.shape[2], width))


def _fake_short_conv(*args):
    given = _checked(_short_conv, args)
    return given["x"].new_empty(given["x"].shape), _fake_final_state(given)


def _fake_short_conv_into(*args):
    return _fake_final_state(_checked(_short_conv_into, args))


def _fake_gradients(operator, names):
    """The fake kernel of a backward, of the gradients of its arguments `names`."""
    def fake(*args):
        given = _checked(operator, args)
        return tuple(t.new_empty(t.shape) if given["wanted"] >> i & 1 else (given["x"] if t is None else t).new_empty(0)
                     for i, t in enumerate(given[name] for name in names))
    return fake


# ---- derivatives -----------------------------------------------------------------------------------------------------

def _wanted(ctx, count):
    return sum(1 << i for i, needed in enumerate(ctx.needs_input_grad[:count]) if needed)


def _only(gradients, wanted):
    return tuple(x if wanted >> i & 1 else None for i, x in enumerate(gradients))


_CONV_INPUTS, _NORM_INPUTS = ("x", "weight", "bias", "initial_state"), ("x", "gate", "weight")


class _ShortConv(_SingleLevelFunction):
    """short_conv and its gradients."""

    @staticmethod
    def forward(*args):
        return ops._below_autograd(_short_conv, args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:5])
        ctx.silu, ctx.state_width = inputs[5:]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, d_y, d_final_state):
        wanted = _wanted(ctx, len(_CONV_INPUTS))
        if ctx.state_width == 0:
            d_final_state = None
        if d_y is None and d_final_state is None or not wanted:
            return (None,) * 7
        gradients = _short_conv_backward(d_y, d_final_state, *ctx.saved_tensors, ctx.silu, wanted)
        return *_only(gradients, wanted), None, None, None


class _GatedRmsNorm(_SingleLevelFunction):
    """gated_rms_norm and its gradients."""

    @staticmethod
    def forward(*args):
        return ops._below_autograd(_gated_rms_norm, args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:3])
        ctx.modes = inputs[3:]

    @staticmethod
    def backward(ctx, d_y):
        wanted = _wanted(ctx, len(_NORM_INPUTS))
        if not wanted:
            return (None,) * 5
        return *_only(_gated_rms_norm_backward(d_y, *ctx.saved_tensors, *ctx.modes, wanted), wanted), None, None


def _once(operator, name):
    """The autograd of a backward, whose gradients nobody has."""
    class Backward(_SingleLevelFunction):
        @staticmethod
        def forward(*args):
            return ops._below_autograd(operator, args)

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, *_):
            raise NotImplementedError(NO_SECOND.format(name))
    return Backward.apply


if ops._is_first:
    _library = torch.library.Library("libkda", "IMPL")
    torch.ops.libkda.kept.append(_library)
    for _operator, _fake, _function in (
            (_short_conv, _fake_short_conv, _ShortConv.apply),
            (_short_conv_update, _fake_y(_short_conv_update), None),
            (_short_conv_into, _fake_short_conv_into, None),
            (_short_conv_update_into, ops.fake_of_none(_short_conv_update_into, _checked), None),
            (_gated_rms_norm_into, ops.fake_of_none(_gated_rms_norm_into, _checked), None),
            (_short_conv_backward, _fake_gradients(_short_conv_backward, _CONV_INPUTS),
             _once(_short_conv_backward, "short_conv")),
            (_gated_rms_norm, _fake_y(_gated_rms_norm), _GatedRmsNorm.apply),
            (_gated_rms_norm_backward, _fake_gradients(_gated_rms_norm_backward, _NORM_INPUTS),
             _once(_gated_rms_norm_backward, "gated_rms_norm")),
            (_fused_decode, ops.fake_of_none(_fused_decode, _checked), None)):
        ops.register(_library, _operator, _fake, _function)


# ---- without autograd's part, which is slow --------------------------------------------------------------------------

def _call(operator, args):
    if is_compiling() or (is_grad_enabled() or forward_ad._current_level >= 0) and ops.differentiates(*args):
        return operator(*args)
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return operator._op(*args)  # what operator() calls


def short_conv(*args):
    """torch.ops.libkda.short_conv, with gradients."""
    return _call(_short_conv, args)


def gated_rms_norm(*args):
    """torch.ops.libkda.gated_rms_norm, with gradients."""
    return _call(_gated_rms_norm, args)


def short_conv_backward(*args):
    """torch.ops.libkda.short_conv_backward."""
    return _call(_short_conv_backward, args)


def gated_rms_norm_backward(*args):
    """torch.ops.libkda.gated_rms_norm_backward."""
    return _call(_gated_rms_norm_backward, args)


def _write(operator, what, args):
    """An operator that writes what it is given; raises NotImplementedError where a derivative is asked for."""
    if is_grad_enabled() or forward_ad._current_level >= 0:
        ops.refuse_gradients(what, *args)
    if is_compiling():
        return operator(*args)
    with torch._C._AutoDispatchBelowADInplaceOrView():
        result = operator._op(*args)
    increment_version([args[i] for i in _WRITTEN[operator]])
    return result


_IN_PLACE, _INTO = "states that are updated in place", "what is written into given tensors"


def short_conv_update(*args):
    """torch.ops.libkda.short_conv_update, or with `out` behind its arguments short_conv_update_into."""
    return _write(_short_conv_update if len(args) == 9 else _short_conv_update_into, _IN_PLACE, args)


def short_conv_into(*args):
    """torch.ops.libkda.short_conv_into."""
    return _write(_short_conv_into, _INTO, args)


def gated_rms_norm_into(*args):
    """torch.ops.libkda.gated_rms_norm_into."""
    _write(_gated_rms_norm_into, _INTO, args)


def fused_decode(*args):
    """torch.ops.libkda.fused_decode."""
    _write(_fused_decode, _IN_PLACE, args)
