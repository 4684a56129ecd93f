# SPDX-License-Identifier: Apache-2.0
"""FLA's functions and layers on libkda's kernels: `import libkda.fla` is all.

Registers with FLA's own backend registry (fla.backends since 0.6, fla.ops.backends before), in front of its
others: KDA, and with FLA 0.6 Gated DeltaNet. Calls that libkda does not serve (gradients on a GPU of other rows than
bf16 with K up to 128 or a layer's in fp16 on Hopper, unless enable(train_on_gpu=True) asks for them; heads of more
than 256 channels) go on to FLA; last_path() says who served the last one and why. On a GPU a decode step of FLA's
KimiDeltaAttention is one kernel behind its projections; the states of its cache are updated in place. FLA_LIBKDA=0 or
disable() switch it off.
FLA_INTRACARD_CP=0 has no sequence cut over a card, as in FLA.
"""
from __future__ import annotations

import functools
import inspect

import torch

from .. import gate, gated_delta, kda, ops
from . import layer, recurrent, step
from .._binding.library import cuda_refusal
from .._binding.options import uncut_where_auto
from .._binding.rules import MOST_CHANNELS
from .._plugins.plugin import Plugin
from .._plugins.switches import switch

try:
    from fla.backends import BaseBackend, register
except ImportError:
    register = None
    try:
        from fla.ops.backends import BaseBackend
        from fla.ops.kda.backends import kda_registry
    except ImportError as error:
        raise ImportError("libkda.fla needs fla-core 0.5.2 or later (pip install fla-core)") from error

_plugin = Plugin("fla", "FLA_LIBKDA")


def enable(*, train_on_gpu: bool = False) -> None:
    """Serve FLA's calls (the state after import). train_on_gpu: also calls on a GPU whose gradients are asked for and
    whose q, k, v are not bf16 with K up to 128, K and V multiples of 8, or a layer's in fp16 on Hopper. libkda's
    backward of those is exact for every gate, but slow (docs/design/backward_fp32.md). Where fla.layers is imported
    after libkda.fla, call it again: it puts the decode step into them."""
    _plugin.enabled, _plugin.train_on_gpu = True, train_on_gpu
    if register is not None:
        step.serve(_plugin)


def disable() -> None:
    """Leave all calls to FLA until enable()."""
    _plugin.enabled = False


def last_path(part: str = "kda") -> str | None:
    """Who served the last call that came by: "libkda: NAME", "fla: NAME: REASON", or None before the first.
    part: "kda" for KDA and Gated DeltaNet, "conv" for the short convolution, "norm" for the gated norm, or "step" for
    a decode step of a whole layer."""
    return _plugin.last_path(part)


def _has_backward(arguments):
    try:
        return ops.has_backward(*(arguments[name] for name in ("q", "k", "v", "g", "beta")))
    except (KeyError, TypeError, ValueError, RuntimeError):
        return True  # the call itself says what does not fit


def _option_reason(name, arguments):
    """Why libkda does not have what a call asks for, wherever its tensors are; None if it has."""
    if arguments.get("ssm_state_indices") is not None and not arguments.get("inplace_final_state", True):
        return "ssm_state_indices without inplace_final_state"
    if name == "chunk_gated_delta_rule":
        if arguments.get("cp_context") is not None:
            return "cp_context: libkda has no context parallelism of Gated DeltaNet"
        if "head_first" in arguments:
            return "head_first, which FLA has removed"
    for x in (arguments.get(row) for row in ("q", "v")):
        if isinstance(x, torch.Tensor) and x.dim() == 4 and x.shape[-1] > MOST_CHANNELS:
            return f"heads of {x.shape[-1]} channels, more than {MOST_CHANNELS}"
    return None


def _reason(name, arguments):
    """Why libkda does not serve a call with these arguments; None if it does."""
    if reason := _plugin.disabled or _option_reason(name, arguments):
        return reason
    tensors = [x for x in arguments.values() if isinstance(x, torch.Tensor)]
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    devices = {x.device for x in tensors if x.dim() > 1}
    kinds = {device.type for device in devices}
    if not kinds <= {"cpu"} and not kinds <= {"cuda"}:
        return f"tensors on {', '.join(sorted(kinds))}"
    for device in devices:
        if device.type == "cuda" and (refusal := cuda_refusal(device.index)):
            return refusal
    if name in _WITH_GRADIENTS and differentiated:
        rows = tuple(arguments.get(row) for row in ("q", "k", "v"))
        if reason := _plugin.leaves_gradients(tensors, rows, arguments if name == "chunk_kda" else None):
            return reason
        if not _has_backward(arguments):
            return "a gradient is asked for, and libkda has no backward pass here"
    return None


_WITH_GRADIENTS = ("chunk_kda", "chunk_gated_delta_rule")
_CUT_FROM = 8192  # tokens of a row: below, the bits of packed rows come before cutting a batch; above, its time


def _packs_batches(function):
    """chunk_kda or chunk_gated_delta_rule: under autograd on a GPU, rows of a batch run as the same rows packed, where
    no length is known on the host. So both forms have one cut and the same bits, as with FLA's kernels."""
    names = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args, **kwargs):
        x = dict(zip(names, args), **kwargs)
        rows = {n: x.get(n) for n in ("q", "k", "v", "g", "beta")}
        shapes = {t.shape[:2] if isinstance(t, torch.Tensor) and t.is_cuda else None for t in rows.values()}
        batch, tokens = shapes.pop() or (1, 0)
        if (shapes or batch < 2 or not 0 < tokens < _CUT_FROM or not torch.is_grad_enabled()
                or x.get("cu_seqlens") is not None or x.get("cp_context") is not None):
            return function(*args, **kwargs)
        ends = torch.arange(0, batch * tokens + 1, tokens, dtype=torch.int32, device=rows["q"].device)
        packed = {n: t.flatten(0, 1)[None] for n, t in rows.items()}
        o, final_state = function(**dict(x, **packed, cu_seqlens=ends))
        return o[0].unflatten(0, (batch, tokens)), final_state

    return call


def _with_fla_switch(names, args, kwargs):
    """Keywords of a call: FLA_INTRACARD_CP=0 lets nothing be cut where neither it nor libkda.options() says how."""
    if switch("FLA_INTRACARD_CP", True):
        return kwargs
    given = dict(zip(names, args), **kwargs)
    if given.get("plan_options") is not None or given.get("cp_context") is not None:
        return kwargs
    return dict(kwargs, plan_options=uncut_where_auto())


def _serve(name, function):
    """A backend's method and its verifier for one of FLA's functions."""
    names = tuple(inspect.signature(function).parameters)

    # FLA's recurrent function has no gradients either: what it returns is cut off from its inputs.
    run = torch.no_grad()(function) if name == "fused_recurrent_kda_fwd" else function

    plans = function is not gate.fused_kda_gate

    @functools.wraps(function)
    def call(self, *args, **kwargs):
        _plugin.serves(name)
        return run(*args, **(_with_fla_switch(names, args, kwargs) if plans else kwargs))

    def verifier(self, *args, **kwargs):
        reason = _reason(name, dict(zip(names, args), **kwargs))
        if reason is not None:
            _plugin.leaves(name, reason)
        return reason is None, reason

    return {name: call, f"{name}_verifier": verifier}


def _backend_of(methods):
    members = {"backend_type": "libkda", "env_var": "FLA_LIBKDA", "priority": 1, **methods,
               "is_enabled": staticmethod(lambda: switch("FLA_LIBKDA", True))}  # FLA takes all but "0" for on
    return type("LibkdaBackend", (BaseBackend,), members)


def _around(part, function):
    """A backend for one of FLA's functions around KDA, which libkda has on a CPU."""
    name, names = function.__name__, tuple(inspect.signature(function).parameters)

    def call(self, *args, **kwargs):
        _plugin.serves(name, part)
        return function(*args, **kwargs)

    def verifier(self, *args, **kwargs):
        reason = _plugin.disabled or layer.refusal(name, dict(zip(names, args), **kwargs))
        if reason is not None:
            _plugin.leaves(name, reason, part)
        return reason is None, reason

    return {name: call, f"{name}_verifier": verifier}


def _backend(functions, more=()):
    """Of FLA's functions, and of methods that are there."""
    methods = {}
    for part in (*(_serve(function.__name__, function) for function in functions), *more):
        methods.update(part)
    return _backend_of(methods)


def _register_around(part, functions, module):
    for function in functions:
        host = getattr(module, function.__name__, None)
        if host is not None:
            register(host)(_backend_of(_around(part, function)))


_OPERATIONS = (kda.fused_recurrent_kda_fwd, gate.fused_kda_gate)
_chunk_kda = _packs_batches(kda.chunk_kda)
_STAGES = [_around("kda", function) for function in layer.STAGES]
if register is None:  # one registry for whole functions and parts; 0.5 asks it for fewer of them
    kda_registry.register(_backend((_chunk_kda, *_OPERATIONS), _STAGES)())
else:
    from fla.ops.kda import chunk_kda as _fla_chunk_kda
    register(_fla_chunk_kda)(_backend((_chunk_kda,)))
    register("kda")(_backend(_OPERATIONS, _STAGES))
    register("gated_delta_rule")(_backend((_packs_batches(gated_delta.chunk_gated_delta_rule),), [
        _around("kda", function) for function in layer.GATED_DELTA_STAGES]))
    recurrent.serve(_plugin)
    from fla.modules.causal_conv1d import ops as _conv_ops
    from fla.modules.norm import fused_norm_gate as _norm_ops
    _register_around("conv", layer.CONVOLUTIONS, _conv_ops)
    _register_around("norm", layer.NORMS, _norm_ops)
    step.serve(_plugin)
