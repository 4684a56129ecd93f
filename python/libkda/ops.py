# SPDX-License-Identifier: Apache-2.0
"""torch.ops.libkda.*: loading, fake kernels, and derivatives.

They are declared in python/csrc/torch_ops.cpp and torch_backward.cpp. `forward` returns (o, final_state), the latter
without slots unless it is asked for; `forward_into` writes o, final_state and checkpoints (or None) of the caller, any
strides with a contiguous last dimension; `update` writes o and the pool of states in place, or with `drafts` the states
after tokens there, and a state of each sequence to `checkpoints`, without final_states nothing but that;
`update_with_tail` writes o, tails and, where it folds them, the pool. What arguments mean: include/kda/problem.hpp;
options is the number of a libkda.Options. What an operator does not take is a ValueError that names the argument;
nothing is written then.

`forward` and `forward_kept` have derivatives. The latter also returns what it keeps for `backward`, uint8: nothing
with keep = 0, with KEEP_STATES (on a CPU) the fp32 state after every so many tokens, with KEEP_CHUNKS all that spares
work: on a Hopper GPU states and errors of every chunk, in 16 bits; a ValueError where there is no kernel for it.
`backward` returns the gradients whose bits `wanted` has, in the order of its arguments q to initial_state, the others
empty; `has_backward` says whether the library has one for such tensors, `keeps_chunks` whether KEEP_CHUNKS is worth it.
"""
import ctypes
import functools

import torch
from torch import is_grad_enabled
from torch._functorch.utils import enable_single_level_autograd_function, unwrap_dead_wrappers
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling
from torch.overrides import has_torch_function

from ._binding import refusals
from ._binding.library import FOLDER, library, version

_PATH = FOLDER / "libkda_torch.so"
if not _PATH.exists():
    raise ImportError("libkda: this build has no torch operators (it was built without torch); "
                      "build it with torch 2.10 or later installed, or use libkda.arrays")
if refusals.version_of_torch() < (2, 10):
    raise ImportError(f"libkda needs torch 2.10 or later, found {torch.__version__}; libkda.arrays works without torch")

GATE_LOG, GATE_SOFTPLUS, GATE_BOUNDED = 0, 1, 2
BETA_PLAIN, BETA_SIGMOID, BETA_SIGMOID2 = 0, 1, 2

HEADS_GROUPED, HEADS_TILED = 0, 1

KEEP_NOTHING, KEEP_STATES, KEEP_CHUNKS = 0, 2048, -1

# Inputs that a backward has gradients of, in the order of its bits and of the arguments of both operators.
_DIFFERENTIABLE = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")

NO_BACKWARD = ("libkda has no backward pass of {}: call it under torch.no_grad() or torch.inference_mode(), "
               "or train with libkda.chunk_kda")
NO_BACKWARD_HERE = ("libkda has no backward pass here ({}): call it under torch.no_grad() or torch.inference_mode(), "
                    "or train with fla.ops.kda")
NO_SECOND = ("libkda has no second derivatives: gradients of chunk_kda cannot be differentiated again. Leave out "
             "create_graph=True, or take libkda.naive_chunk_kda, which torch differentiates any number of times")
NO_TANGENT = "libkda has no forward-mode derivative (torch.func.jvp, dual tensors)"


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
        library()  # the operators need it by a name that the loader finds once it is there
        torch.ops.load_library(str(_PATH))
        refusals.keep_types("libkda")
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
_update_with_tail = torch.ops.libkda.update_with_tail.default
_update_with_ring = torch.ops.libkda.update_with_ring.default
_forward_kept = torch.ops.libkda.forward_kept.default
_backward = torch.ops.libkda.backward.default
has_backward = torch.ops.libkda.has_backward.default
keeps_chunks = torch.ops.libkda.keeps_chunks.default


_has_functorch = torch._C._are_functorch_transforms_active
_is_traced = torch._C._get_tracing_state


# ---- what has no derivative ------------------------------------------------------------------------------------------

def _has_tangent(x):
    """Of a wrapper of torch.func.jvp that an operator sees nobody can ask."""
    return torch._C._functorch.is_functorch_wrapped_tensor(x) or forward_ad.unpack_dual(x).tangent is not None


def differentiates(*arguments):
    """Whether the gradient of one of the arguments is asked for. Raises NotImplementedError for a tangent."""
    backward, forward = is_grad_enabled(), forward_ad._current_level >= 0
    if not (backward or forward):
        return False
    found = False
    for x in arguments:
        if not isinstance(x, torch.Tensor):
            continue
        if backward and x.requires_grad:
            found = True
        if forward and _has_tangent(x):
            raise NotImplementedError(NO_TANGENT)
    return found


def refuse_gradients(name, *arguments):
    """Raises NotImplementedError for a tensor of which a derivative is asked."""
    if differentiates(*arguments):
        raise NotImplementedError(NO_BACKWARD.format(name))


def _name_of(operator):
    return operator._schema.name.partition("::")[2]


@functools.cache
def _names_of(operator):
    """The names of its arguments, and the defaults of those that have one."""
    arguments = operator._schema.arguments
    return (tuple(argument.name for argument in arguments),
            {argument.name: argument.default_value for argument in arguments if argument.has_default_value()})


def written_by(operator):
    """Places of the arguments that it writes, by the marks of its schema."""
    marks = [argument.alias_info for argument in operator._schema.arguments]
    return tuple(place for place, mark in enumerate(marks) if mark is not None and mark.is_write)


def named(operator, args):
    """A call's arguments by name; the dispatcher takes away what is a default."""
    names, defaults = _names_of(operator)
    return defaults | dict(zip(names, args))


def _kernel(operator, args):
    """An operator without autograd's keys."""
    try:
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return operator(*args)
    except ValueError as error:  # that the library has no backward is no fault of an argument
        reason = str(error).partition(f"{refusals.REFUSAL}no backward pass: ")[2]
        if not reason:
            raise
        raise NotImplementedError(NO_BACKWARD_HERE.format(reason)) from None


def _above_autograd(operator, written):
    """What a direct call of an operator takes first; the functions below have done it when they call."""
    expect = functools.partial(refuse_gradients, _name_of(operator)) if written else differentiates

    def call(*args):
        expect(*args)
        result = _kernel(operator, args)
        increment_version([args[i] for i in written if i < len(args) and args[i] is not None])
        return result
    return call


def _materialized(operator, written):
    """Tensors whose memory holds something else than their values: read through a copy, never written."""
    names, _ = _names_of(operator)

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
        names, _ = _names_of(operator)
        for name, x in zip(names, args):
            if isinstance(x, torch.Tensor) and x.is_nested:
                raise TypeError(f"libkda: {name} must be a dense tensor, got a nested one")
        raise AssertionError("no nested tensor")
    return call


# ---- fake kernels ----------------------------------------------------------------------------------------------------

def _checked(operator, args):
    """A call's arguments by name, with the checks that kernels make of real tensors."""
    from ._binding.checks import check
    given = named(operator, args)
    check(_name_of(operator), given, v_first=given["state_v_first"], dense_rows=True)
    return given


def _fake_forward(*args):
    return _outputs(_checked(_forward, args))


def _fake_forward_kept(*args):
    from ._binding.kernels import saved_bytes
    given = _checked(_forward_kept, args)
    q, lengths = given["q"], given["cu_seqlens"]
    packed = 0 if lengths is None else lengths.shape[0] - 1
    saved = q.new_empty(saved_bytes(q, given["v"], given["keep"], packed), dtype=torch.uint8)
    return *_outputs(given), saved


def _outputs(given):
    from ._binding.checks import state_type
    q, v, lengths = given["q"], given["v"], given["cu_seqlens"]
    K, (HV, V) = q.shape[-1], v.shape[2:]
    N = q.shape[0] if lengths is None else lengths.shape[0] - 1
    if not given["output_final_state"]:
        N = 0
    matrix = (V, K) if given["state_v_first"] else (K, V)
    return v.new_empty(v.shape), q.new_empty((N, HV, *matrix), dtype=state_type(q))


def fake_of_none(operator, checked):
    """The fake kernel of an operator that returns nothing, and whose arguments checked(operator, args) looks at."""
    def fake(*args):
        checked(operator, args)
    return fake


def _fake_backward(*args):
    given = _checked(_backward, args)
    wanted, inputs = given["wanted"], [given[name] for name in _DIFFERENTIABLE]
    return tuple(x.new_empty(x.shape) if wanted >> i & 1 else (given["q"] if x is None else x).new_empty(0)
                 for i, x in enumerate(inputs))


# ---- derivatives -----------------------------------------------------------------------------------------------------

def _below_autograd(operator, args):
    """The kernel, or under torch.func the next level, which has autograd of its own."""
    if not _has_functorch():
        return _kernel(operator, args)
    with torch.set_grad_enabled(True), torch._C._AutoDispatchBelowAutograd():
        return operator(*args)


# Functions of one level: torch.func asks an operator's autograd at each of its levels in turn.

class _Forward(_SingleLevelFunction):
    """forward_kept and its gradients, an operator each."""

    @staticmethod
    def forward(*args):
        return _below_autograd(_forward_kept, args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        (q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu, *ctx.modes,
         ctx.output_final_state, has_state, ctx.keep, ctx.head_map, ctx.options) = inputs
        _, _, saved = output
        ctx.save_for_backward(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu, has_state,
                              saved)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, d_o, d_final_state, _):
        needed = ctx.needs_input_grad
        wanted = sum(1 << i for i in range(len(_DIFFERENTIABLE)) if needed[i])
        if not ctx.output_final_state:
            d_final_state = None
        if d_o is None and d_final_state is None or not wanted:
            return (None,) * len(needed)
        none = (None,) * (len(needed) - len(_DIFFERENTIABLE))  # of what is no float tensor
        *inputs, has_state, saved = ctx.saved_tensors
        args = (d_o, d_final_state, *inputs, *ctx.modes, has_state, saved, ctx.keep, wanted, ctx.head_map, ctx.options)
        # A graph of the backward, whose gradients nobody has, or the next level of torch.func.
        recorded = is_grad_enabled() or _has_functorch()
        gradients = _backward(*args) if recorded else _kernel(_backward, args)
        return *(x if needed[i] else None for i, x in enumerate(gradients)), *none


class _Backward(_SingleLevelFunction):
    """backward, whose gradients nobody has."""

    @staticmethod
    def forward(*args):
        return _below_autograd(_backward, args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(NO_SECOND)


def _with_gradients(operator, function):
    """What an operator does where autograd looks."""
    defaults = [argument.default_value for argument in operator._schema.arguments]

    def call(keyset, *args):
        if differentiates(*args):
            with enable_single_level_autograd_function():
                return function(*args, *defaults[len(args):])  # the dispatcher takes away what is a default
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, *args)
    return call


def _forward_of_gradients(*args):
    """forward is forward_kept that keeps nothing."""
    *operands, decode, has_state, head_map, options = args
    if decode:
        raise NotImplementedError(NO_BACKWARD.format("a forward with decode=True"))
    return _forward_kept(*operands, has_state, KEEP_NOTHING, head_map, options)[:2]


def register(library, operator, fake, function):
    """What an operator does at every key but the kernel's. `function`: its autograd, None without derivatives."""
    name, written = _name_of(operator), written_by(operator)
    library.impl(name, _above_autograd(operator, written), "ADInplaceOrView")
    for key in ("Negative", "Conjugate", "ZeroTensor"):
        library.impl(name, _materialized(operator, written), key)
    for key in ("NestedTensorCPU", "NestedTensorCUDA", "AutogradNestedTensor"):
        library.impl(name, _nested(operator), key)
    torch.library.register_fake(f"libkda::{name}", fake)
    if function is not None:
        library.impl(name, _with_gradients(operator, function), "Autograd", with_keyset=True)


if _is_first:
    _library = torch.library.Library("libkda", "IMPL")
    torch.ops.libkda.kept.append(_library)
    for _operator, _fake, _function in (
            (_forward, _fake_forward, _forward_of_gradients),
            (_forward_into, fake_of_none(_forward_into, _checked), None),
            (_update, fake_of_none(_update, _checked), None),
            (_update_with_tail, fake_of_none(_update_with_tail, _checked), None),
            (_update_with_ring, fake_of_none(_update_with_ring, _checked), None),
            (_forward_kept, _fake_forward_kept, _Forward.apply),
            (_backward, _fake_backward, _Backward.apply)):
        register(_library, _operator, _fake, _function)


# ---- without autograd's part, which is slow --------------------------------------------------------------------------

def _called(operator, what):
    """A call of an operator; raises NotImplementedError where a derivative is asked for, which `what` says."""
    written = written_by(operator)

    def call(*args):
        if is_grad_enabled() or forward_ad._current_level >= 0:
            refuse_gradients(what, *args)
        if is_compiling():
            return operator(*args)
        with torch._C._AutoDispatchBelowADInplaceOrView():
            result = operator._op(*args)  # what operator() calls
        if written:
            increment_version([args[i] for i in written if i < len(args) and args[i] is not None])
        return result

    call.__name__ = _name_of(operator)
    call.__doc__ = f"torch.ops.libkda.{call.__name__}; raises NotImplementedError where a derivative is asked for."
    return call


forward = _called(_forward, "fused_recurrent_kda (nor has FLA)")
forward_into = _called(_forward_into, "what is written into given tensors")
update = _called(_update, "states that are updated in place")
update_with_tail = _called(_update_with_tail, "states that are updated in place")
update_with_ring = _called(_update_with_ring, "states that are updated in place")


def forward_kept(*args):
    """The outputs of torch.ops.libkda.forward_kept, with gradients: its autograd at once, where nothing stands above
    autograd that would look at the operator."""
    if is_compiling() or _is_traced() or _has_functorch() or has_torch_function(args):
        return _forward_kept(*args)[:2]
    return _Forward.apply(*unwrap_dead_wrappers(args))[:2]
