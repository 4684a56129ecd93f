# SPDX-License-Identifier: Apache-2.0
"""libkda in JAX by XLA's FFI: under jit, with gradients and vmap, without torch and without Python in a call.

    from libkda import jax as kda
    o, state = kda.forward(q, k, v, g, beta, beta_mode="sigmoid", qk_l2norm=True)    # q [B, T, H, K], ...
    step = jax.jit(kda.decode, donate_argnames="state")
    o, state = step(q1, k1, v1, g1, beta1, state)                                    # the next token; state in place

q, k [B, T, H, K]; v [B, T, HV, V]; g [B, T, HV, K], or [B, T, HV]: one gate a head (Gated DeltaNet); beta [B, T, HV];
float32, float16 or bfloat16, each its own. A_log [HV]; dt_bias [HV, K], or [HV] beside one gate a head; float32. States
are [.., HV, K, V] (kv) or [.., HV, V, K] (vk), float32 or bfloat16. has_state [N], bool: where it is False a sequence
starts from zero. cu_seqlens [N + 1], int32 or int64, packs N sequences into B = 1. Formulas and modes:
docs/operation.md.

ValueError or TypeError names an argument that does not fit when a call is traced. Values are looked at when it runs: on
the CPU cu_seqlens, indices and A_log that do not fit are jax.errors.JaxRuntimeError, with the argument's name.

vmap folds entries into one batch where they are independent. It has a call an entry where A_log or dt_bias have a
batch of their own, where sequences are packed and with indices. On the CPU each of XLA's threads keeps the workspace of
its largest call.
"""
from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

try:
    import jax
    import jax.numpy as jnp
except ImportError as error:
    raise ImportError(f"libkda.jax needs JAX (pip install libkda[jax]): {error}") from error

from ._binding.library import FOLDER
from ._binding.library import library as c_abi
from ._binding.policies import expect_invariant, policy_of
from ._binding.rules import LAST_SLOT, RULES, Sizes, check_heads, integer, number, refuse_type
from .arrays import BETA_MODES, GATE_MODES, STATE_LAYOUTS, BetaMode, GateMode, StateLayout, _choice

_FORWARD, _DECODE, _PREFILL = range(3)
# In the order of csrc/jax_ffi.cpp.
_FLOATS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "state")
_INTEGERS = ("has_state", "indices", "cu_seqlens")


def forward(q, k, v, g, beta, *, A_log=None, dt_bias=None, initial_state=None, has_state=None, cu_seqlens=None,
            scale: float | None = None, gate_mode: GateMode = "log", beta_mode: BetaMode = "plain",
            lower_bound: float = -5.0, qk_l2norm: bool = False, state_layout: StateLayout = "kv",
            context_parallel: str | int = "auto", batch_invariant: bool = False) -> tuple[jax.Array, jax.Array]:
    """The forward pass, with initial_state [N, HV, K, V]. context_parallel and batch_invariant as of libkda.Options
    (docs/planning.md). Returns (o [B, T, HV, V] of v's type, final state [N, HV, K, V] in float32). It has gradients of
    all arguments but has_state and cu_seqlens, in reverse mode and of first order."""
    arguments = _checked("jax.forward", state_layout, q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias,
                         cu_seqlens=cu_seqlens, initial_state=initial_state, has_state=has_state)
    if has_state is not None and initial_state is None:
        raise ValueError("has_state is given without initial_state")
    options = _options(_FORWARD, 0, scale, gate_mode, beta_mode, lower_bound, qk_l2norm, state_layout, context_parallel,
                       batch_invariant)
    return _forward(options, *_operands(arguments, "initial_state"))


def decode(q, k, v, g, beta, state, *, indices=None, first_slot: int = 0, has_state=None, cu_seqlens=None, A_log=None,
           dt_bias=None, scale: float | None = None, gate_mode: GateMode = "log", beta_mode: BetaMode = "plain",
           lower_bound: float = -5.0, qk_l2norm: bool = False,
           state_layout: StateLayout = "kv") -> tuple[jax.Array, jax.Array]:
    """The next 1 to 8 tokens of every sequence. state [N, HV, K, V]: that of each; or with indices [N], int32, a pool
    [slots, HV, K, V]: sequence n has the state in slot indices[n]. An index below first_slot, or a negative one, is
    none: the sequence is skipped, and its o is 0. Returns (o of v's type, the state behind the tokens). The state lies
    where `state` lay if a jit donates that; else XLA copies it first. decode() has no gradients."""
    return _in_place(_DECODE, q, k, v, g, beta, state, indices, first_slot, has_state, cu_seqlens, A_log, dt_bias,
                     scale, gate_mode, beta_mode, lower_bound, qk_l2norm, state_layout)


def prefill(q, k, v, g, beta, state, indices, *, first_slot: int = 0, has_state=None, cu_seqlens=None, A_log=None,
            dt_bias=None, scale: float | None = None, gate_mode: GateMode = "log", beta_mode: BetaMode = "plain",
            lower_bound: float = -5.0, qk_l2norm: bool = False,
            state_layout: StateLayout = "kv", context_parallel: str | int = "auto",
            batch_invariant: bool = False) -> tuple[jax.Array, jax.Array]:
    """Prompts, or the next pieces of them, on a pool state [slots, HV, K, V]: sequence n goes on from slot indices[n],
    or with has_state[n] False from zero, and leaves its state there. An index that is none, as of decode(): the
    sequence starts from zero and its state is not stored. Options as of forward(). Returns (o, the pool), as decode()
    does; no gradients."""
    return _in_place(_PREFILL, q, k, v, g, beta, state, indices, first_slot, has_state, cu_seqlens, A_log, dt_bias,
                     scale, gate_mode, beta_mode, lower_bound, qk_l2norm, state_layout, context_parallel,
                     batch_invariant)


def _in_place(kind, q, k, v, g, beta, state, indices, first_slot, has_state, cu_seqlens, A_log, dt_bias, scale,
              gate_mode, beta_mode, lower_bound, qk_l2norm, state_layout, context_parallel="auto",
              batch_invariant=False):
    rules = "jax.decode" if kind == _DECODE and indices is None else "jax.pool"
    arguments = _checked(rules, state_layout, q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias,
                         cu_seqlens=cu_seqlens, state=state, indices=indices, has_state=has_state)
    first_slot = integer("first_slot", first_slot, 0, LAST_SLOT)
    options = _options(kind, first_slot, scale, gate_mode, beta_mode, lower_bound, qk_l2norm, state_layout,
                       context_parallel, batch_invariant)
    return _update(options, *_operands(arguments, "state"))


def _checked(function, state_layout, **values):
    """The arguments that are given, as arrays of the types and shapes that they must have."""
    _choice("state_layout", state_layout, STATE_LAYOUTS)
    found, sizes = {}, Sizes()
    for name, rule in RULES[function].items():
        if values[name] is None and not rule.required:
            continue
        x = found[name] = _array(name, values[name])
        if x.dtype.name not in rule.types:
            raise refuse_type(name, rule.types, x.dtype.name)
        if state_layout == "vk":
            rule = rule._replace(shape=rule.shape.replace("HV K V", "HV V K"))
        if name != "cu_seqlens" and "N" in rule.shape.split():
            sizes.default_n()
        sizes.expect(name, rule, x.shape)
        if name == "v":
            check_heads(sizes)
    if "cu_seqlens" in found and sizes["B"] != 1:
        raise ValueError(f"q must have B = 1 with cu_seqlens, got {sizes['B']}")
    if found["g"].ndim == 3:
        found["g"] = found["g"][..., None]
    if "dt_bias" in found and found["dt_bias"].ndim == 1:  # [HV, 1] in memory, as g
        if found["g"].shape[-1] != 1:
            raise ValueError("dt_bias must have shape [HV, K] where g has a gate a channel, got "
                             f"{list(found['dt_bias'].shape)}")
        found["dt_bias"] = found["dt_bias"][:, None]
    return found


def _array(name, value):
    if isinstance(value, jax.Array):
        return value
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be an array, got {type(value).__name__}") from None


def _options(kind, first_slot, scale, gate_mode, beta_mode, lower_bound, qk_l2norm, state_layout, context_parallel,
             batch_invariant):
    """The attributes of a call."""
    policy, segments = policy_of(context_parallel)
    return (("call", np.int64(kind)), ("first_slot", np.int64(first_slot)),
            ("gate_mode", np.int64(_choice("gate_mode", gate_mode, GATE_MODES))),
            ("beta_mode", np.int64(_choice("beta_mode", beta_mode, BETA_MODES))),
            ("state_layout", np.int64(_choice("state_layout", state_layout, STATE_LAYOUTS))),
            ("lower_bound", np.float64(number("lower_bound", lower_bound))),
            ("scale", np.float64(0 if scale is None else number("scale", scale))), ("has_scale", scale is not None),
            ("qk_l2norm", bool(qk_l2norm)), ("context_parallel", np.int64(policy)),
            ("num_segments", np.int64(segments)), ("batch_invariant", expect_invariant(batch_invariant)))


def _operands(arguments, state):
    arguments["state"] = arguments.pop(state, None)
    return tuple(arguments.get(name) for name in _FLOATS), tuple(arguments.get(name) for name in _INTEGERS)


def _like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _call(target, options, floats, integers, results, more=(), aliases=None):
    _register()
    arguments = (*floats, *integers)
    given = sum(1 << i for i, x in enumerate(arguments) if x is not None)
    call = jax.ffi.ffi_call(target, results, vmap_method="expand_dims", input_output_aliases=aliases)
    return tuple(call(*(x for x in arguments if x is not None), *more, given=np.int64(given), **dict(options)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _forward(options, floats, integers):
    q, v, cu_seqlens = floats[0], floats[2], integers[2]
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    matrix = (v.shape[3], q.shape[3]) if dict(options)["state_layout"] else (q.shape[3], v.shape[3])
    states = jax.ShapeDtypeStruct((sequences, v.shape[2], *matrix), jnp.float32)
    return _call("libkda_run", options, floats, integers, (_like(v), states))


def _forward_and_inputs(options, floats, integers):
    return _forward(options, floats, integers), (floats, integers)


def _backward(options, inputs, cotangents):
    floats, integers = inputs
    results = tuple(_like(x) for x in floats if x is not None)
    found = iter(_call("libkda_backward", options, floats, integers, results, cotangents))
    return tuple(None if x is None else next(found) for x in floats), (None,) * len(integers)


_forward.defvjp(_forward_and_inputs, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _update(options, floats, integers):
    others, state = floats[:-1], floats[-1]
    state = _batched_as_any(state, *(x for x in (*others, *integers) if x is not None))
    return _call("libkda_run", options, (*others, state), integers, (_like(floats[2]), _like(state)),
                 aliases={sum(x is not None for x in floats) - 1: 1})


def _refuse_gradients(*_):
    raise NotImplementedError("decode() and prefill() of libkda.jax have no gradients: forward() has them")


_update.defvjp(_refuse_gradients, _refuse_gradients)


@jax.custom_batching.custom_vmap
def _batched_as_any(state, *others):
    """A state that is written has an entry for every one of a vmap, whichever argument that is over."""
    return state


@_batched_as_any.def_vmap
def _batch_state(axis_size, batched, state, *others):
    if not batched[0]:
        state = jnp.broadcast_to(state, (axis_size, *state.shape))
    return _batched_as_any(state, *others), True


@functools.cache
def _register():
    """The handlers of libkda_jax.so, under the names that calls have in XLA's programs."""
    path = FOLDER / "libkda_jax.so"
    if not path.exists():
        raise ImportError(f"libkda: {path} is missing: this package was built where there was no jaxlib; "
                          "install jax, then build it anew with pip install --no-build-isolation .")
    c_abi()  # the handlers need it by a name that only a loaded library has
    library: Any = ctypes.CDLL(str(path))
    for device, platform in (("cpu", "cpu"), ("cuda", "CUDA")):
        for name in ("run", "backward"):
            handler = jax.ffi.pycapsule(getattr(library, f"kda_jax_{name}_{device}"))
            try:
                jax.ffi.register_ffi_target(f"libkda_{name}", handler, platform=platform)
            except jax.errors.JaxRuntimeError as refusal:
                if "Duplicate FFI handler" in str(refusal):
                    raise ImportError(f"libkda: {path} cannot serve JAX beside another copy of libkda, whose handlers "
                                      "JAX has under the same names. Import one of the two") from None
                raise ImportError(f"libkda: JAX {jax.__version__} does not take the handlers of libkda_jax.so, which "
                                  f"were built with a newer one: {refusal}") from None
