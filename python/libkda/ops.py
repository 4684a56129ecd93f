# SPDX-License-Identifier: Apache-2.0
"""torch.ops.libkda.forward, .forward_into and .update: loading, fake kernels, and what autograd answers.

They are declared in python/csrc/torch_ops.cpp. `forward` returns (o, final_state), the latter without slots unless it
is asked for; `forward_into` writes o, final_state and checkpoints (or None) of the caller, any strides with a
contiguous last dimension; `update` writes o and the pool of states in place. has_state [N], bool: where it is False a
sequence starts from zero. first_slot: a smaller index means no slot. What an operator does not take is a ValueError
that names the argument; nothing is written then.
"""
import ctypes

import torch
from torch import is_grad_enabled
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling

from ._library import FOLDER, version

_PATH = FOLDER / "libkda_torch.so"
if not _PATH.exists():
    raise ImportError("libkda: this build has no torch operators (it was built without torch); "
                      "build it with torch 2.10 or later installed, or use libkda.arrays")
if tuple(int(x) for x in torch.__version__.split("+")[0].split(".")[:2]) < (2, 10):
    raise ImportError(f"libkda needs torch 2.10 or later, found {torch.__version__}; libkda.arrays works without torch")

GATE_LOG, GATE_SOFTPLUS, GATE_BOUNDED = 0, 1, 2
BETA_PLAIN, BETA_SIGMOID, BETA_SIGMOID2 = 0, 1, 2

NO_BACKWARD = ("libkda has no backward pass yet: call it under torch.no_grad() or torch.inference_mode(), "
               "or train with fla.ops.kda")
NO_TANGENT = "libkda has no forward-mode derivative (torch.func.jvp, dual tensors)"

# Places of what an operator writes.
_WRITTEN = {"forward": (), "forward_into": (5, 6, 7), "update": (5, 6)}


# ---- loading ---------------------------------------------------------------------------------------------------------

_ProbeType = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32,
                              ctypes.POINTER(ctypes.c_char), ctypes.c_int64)


@_ProbeType
def _memory_probe(size, cuda, index, text, text_size):
    """Whether torch has `size` bytes (csrc/memory.hpp)."""
    try:
        torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", index) if cuda else "cpu")
        return 0
    except Exception as error:  # nobody above could catch it
        words = str(error).partition("\n")[0].encode()[:text_size - 1]
        ctypes.memmove(text, words, len(words))
        return 1


def _load():
    """Whether the operators come from this copy of the package: torch has one of each name in a process."""
    loaded = getattr(torch.ops.libkda, "loaded_by", None)
    if loaded is None and hasattr(torch.ops.libkda, "forward"):
        loaded = "a version that does not say", "a file that does not say"
    if loaded is None:
        torch.ops.load_library(str(_PATH))
        ctypes.CDLL(str(_PATH)).kda_torch_set_memory_probe(_memory_probe)
        torch.ops.libkda.loaded_by = version(), str(_PATH)
        torch.ops.libkda.kept = [_memory_probe]  # as long as the operators, whatever becomes of this module
        return True
    if loaded[0] != version():
        raise ImportError(f"libkda {version()} ({_PATH}) cannot be loaded beside libkda {loaded[0]} ({loaded[1]}): "
                          f"torch has one set of operators of that name in a process. Import one of the two")
    return False


_is_first = _load()
_forward = torch.ops.libkda.forward.default
_forward_into = torch.ops.libkda.forward_into.default
_update = torch.ops.libkda.update.default


# ---- autograd --------------------------------------------------------------------------------------------------------

def _has_tangent(x):
    """Of a wrapper of torch.func.jvp that an operator sees nobody can ask."""
    return torch._C._functorch.is_functorch_wrapped_tensor(x) or forward_ad.unpack_dual(x).tangent is not None


def refuse_gradients(*arguments):
    """Raises NotImplementedError for a tensor of which a derivative is asked."""
    backward, forward = is_grad_enabled(), forward_ad._current_level >= 0
    for x in arguments:
        if not isinstance(x, torch.Tensor):
            continue
        if backward and x.requires_grad:
            raise NotImplementedError(NO_BACKWARD)
        if forward and _has_tangent(x):
            raise NotImplementedError(NO_TANGENT)


def _above_autograd(operator, written):
    """What a direct call of an operator takes first; the functions below have done it when they call."""
    def call(*args, **kwargs):
        if is_grad_enabled() or forward_ad._current_level >= 0:
            refuse_gradients(*args)
        with torch._C._AutoDispatchBelowADInplaceOrView():
            result = operator(*args, **kwargs)
        increment_version([args[i] for i in written if args[i] is not None])
        return result
    return call


def _materialized(operator, written):
    """Tensors whose memory holds something else than their values: read through a copy, never written."""
    names = [argument.name for argument in operator._schema.arguments]

    def call(*args, **kwargs):
        plain = list(args)
        for i, x in enumerate(args):
            if not isinstance(x, torch.Tensor) or not (x.is_neg() or x.is_conj() or x._is_zerotensor()):
                continue
            if i in written:
                raise ValueError(f"libkda: {names[i]} is written, so it cannot be a negative or conjugate view or a "
                                 f"tensor without memory")
            plain[i] = x.clone() if x._is_zerotensor() else x.resolve_neg().resolve_conj()
        return operator(*plain, **kwargs)
    return call


def _nested(operator):
    def call(*args, **kwargs):
        for argument, x in zip(operator._schema.arguments, args):
            if isinstance(x, torch.Tensor) and x.is_nested:
                raise TypeError(f"libkda: {argument.name} must be a dense tensor, got a nested one")
        raise AssertionError("no nested tensor")
    return call


# ---- fake kernels ----------------------------------------------------------------------------------------------------

def _check(operator, args):
    """What the kernels look at in real tensors."""
    from ._checks import check
    names = [argument.name for argument in operator._schema.arguments]
    values = dict(zip(names, args))
    check(operator._schema.name.partition("::")[2], values, v_first=values["state_v_first"], dense_rows=True)


def _fake_forward(*args):
    _check(_forward, args)
    q, v, cu_seqlens, state_v_first, output_final_state = args[0], args[2], args[8], args[15], args[16]
    K, (HV, V) = q.shape[-1], v.shape[2:]
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    matrix = (V, K) if state_v_first else (K, V)
    return v.new_empty(v.shape), q.new_empty((N if output_final_state else 0, HV, *matrix), dtype=torch.float32)


def _backward(ctx, *grads):
    raise NotImplementedError(NO_BACKWARD)


if _is_first:
    _library = torch.library.Library("libkda", "IMPL")
    torch.ops.libkda.kept.append(_library)
    for _operator in (_forward, _forward_into, _update):
        _name = _operator._schema.name.partition("::")[2]
        _library.impl(_name, _above_autograd(_operator, _WRITTEN[_name]), "ADInplaceOrView")
        for _key in ("Negative", "Conjugate", "ZeroTensor"):
            _library.impl(_name, _materialized(_operator, _WRITTEN[_name]), _key)
        for _key in ("NestedTensorCPU", "NestedTensorCUDA", "AutogradNestedTensor"):
            _library.impl(_name, _nested(_operator), _key)
    torch.library.register_fake("libkda::forward", _fake_forward)
    torch.library.register_fake("libkda::forward_into", lambda *args: _check(_forward_into, args))
    torch.library.register_fake("libkda::update", lambda *args: _check(_update, args))
    torch.library.register_autograd("libkda::forward", _backward)


# ---- without autograd's part, which is slow --------------------------------------------------------------------------

def forward(*args):
    """torch.ops.libkda.forward; raises NotImplementedError where a derivative is asked for."""
    return _call(_forward, (), args)


def forward_into(*args):
    """torch.ops.libkda.forward_into, likewise."""
    return _call(_forward_into, _WRITTEN["forward_into"], args)


def update(*args):
    """torch.ops.libkda.update, likewise."""
    return _call(_update, _WRITTEN["update"], args)


def _call(operator, written, args):
    if is_grad_enabled() or forward_ad._current_level >= 0:
        refuse_gradients(*args)
    if is_compiling():
        return operator(*args)
    with torch._C._AutoDispatchBelowADInplaceOrView():
        result = operator(*args)
    if written:
        increment_version([args[i] for i in written if args[i] is not None])
    return result
