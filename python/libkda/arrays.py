# SPDX-License-Identifier: Apache-2.0
"""libkda for NumPy, JAX, CuPy and whatever else speaks DLPack, without torch.

    import numpy as np
    from libkda import arrays
    o, state = arrays.forward(q, k, v, g, beta, output_final_state=True)      # q [B, T, H, K], ...
    o = arrays.decode(q1, k1, v1, g1, beta1, state)                           # the next token; state in place

Inputs are read where they lie, with their strides. On the CPU the outputs are new NumPy arrays, or those given.
On a GPU (CuPy, JAX) the caller gives o, final_state and a workspace, and the call is queued on `stream`.
"""
from __future__ import annotations

import ctypes
import operator
from collections.abc import Iterable
from typing import Any, Literal, Protocol, SupportsIndex

from libkda._dlpack import BF16, CPU, CUDA, FP32, INT32, View, new_numpy
from libkda._library import I64, PTR, PlanOptions, Problem, check, library

GATE_MODES = {"log": 0, "softplus": 1, "bounded": 2}
BETA_MODES = {"plain": 0, "sigmoid": 1, "sigmoid2": 2}
STATE_LAYOUTS = {"kv": 0, "vk": 1}
_DECODE, _INT64 = 1, 4  # of kda.h

GateMode = Literal["log", "softplus", "bounded"]
BetaMode = Literal["plain", "sigmoid", "sigmoid2"]
StateLayout = Literal["kv", "vk"]


class Array(Protocol):
    """Whatever speaks DLPack."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


def forward(q: Array, k: Array, v: Array, g: Array, beta: Array, *, A_log: Array | None = None,
            dt_bias: Array | None = None, initial_state: Array | None = None,
            cu_seqlens: Iterable[SupportsIndex] | None = None, scale: float | None = None, gate_mode: GateMode = "log",
            beta_mode: BetaMode = "plain", lower_bound: float = -5.0, qk_l2norm: bool = False,
            state_layout: StateLayout = "kv", output_final_state: bool = False, o: Array | None = None,
            final_state: Array | None = None, workspace: Array | None = None, stream: int = 0,
            num_threads: int = 0) -> tuple[Any, Any]:
    """The forward pass; formulas and modes as in docs/operation.md.

    q, k [B, T, H, K]; v [B, T, HV, V]; g [B, T, HV, K]; beta [B, T, HV]; float32, float16 or bfloat16, each its own.
    A_log [HV], dt_bias [HV, K] float32; initial_state [N, HV, K, V] (kv) or [N, HV, V, K] (vk), float32 or bfloat16;
    cu_seqlens [N + 1], integers on the host: packs N sequences into B = 1. num_threads 0: all cores.
    On a GPU: o, final_state (if asked for), workspace (a dense array of any type, of at least workspace_bytes(),
    aligned to 64) and stream (an integer handle).
    Returns (o [B, T, HV, V] of v's type, final_state or None). ValueError or TypeError names an argument that does
    not fit; nothing is written then.
    """
    call = _Call(q, k, v, g, beta, A_log, dt_bias, cu_seqlens, scale, gate_mode, beta_mode, lower_bound, qk_l2norm,
                 state_layout)
    if call.on_gpu and (o is None or workspace is None or (output_final_state and final_state is None)):
        raise ValueError("on a GPU o, workspace and the final_state that is asked for must be given")
    if initial_state is not None:
        call.set_state("initial_state", View(initial_state, "initial_state"), call.sequences)
    o = call.set_output(o)
    if final_state is None and output_final_state:
        final_state = new_numpy(call.states(call.sequences), FP32, "final_state")
    if final_state is not None:
        call.set_state("final_state", _writable(final_state, "final_state"), call.sequences)
    call.run(workspace, stream, num_threads)
    return o, final_state


def decode(q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, *, indices: Array | None = None,
           A_log: Array | None = None, dt_bias: Array | None = None, cu_seqlens: Iterable[SupportsIndex] | None = None,
           scale: float | None = None, gate_mode: GateMode = "log", beta_mode: BetaMode = "plain",
           lower_bound: float = -5.0, qk_l2norm: bool = False, state_layout: StateLayout = "kv",
           o: Array | None = None, workspace: Array | None = None, stream: int = 0, num_threads: int = 0) -> Any:
    """The next 1 to 8 tokens of every sequence; the states are read and written in place.

    Arguments as of forward(), T counting the new tokens. state [N, HV, K, V] (kv) or [N, HV, V, K] (vk), float32 or
    bfloat16, or a pool of more slots with indices [N], int32, dense, where q is: the slot of each sequence, -1: none
    (its tokens are skipped: they are 0 in an o that is made here, as they were in one that is given).
    On a GPU: o, workspace (of workspace_bytes(..., state=state)) and stream.
    Returns o [B, T, HV, V] of v's type. Errors as of forward().
    """
    call = _Call(q, k, v, g, beta, A_log, dt_bias, cu_seqlens, scale, gate_mode, beta_mode, lower_bound, qk_l2norm,
                 state_layout)
    if call.on_gpu and (o is None or workspace is None):
        raise ValueError("on a GPU o and workspace must be given")
    call.set_pool(_writable(state, "state"), indices)
    out = call.set_output(o)
    if o is None and indices is not None:
        out[...] = 0
    call.run(workspace, stream, num_threads)
    return out


def workspace_bytes(q: Array, k: Array, v: Array, g: Array, beta: Array, *, A_log: Array | None = None,
                    dt_bias: Array | None = None, initial_state: Array | None = None,
                    cu_seqlens: Iterable[SupportsIndex] | None = None, scale: float | None = None,
                    gate_mode: GateMode = "log", beta_mode: BetaMode = "plain", lower_bound: float = -5.0,
                    qk_l2norm: bool = False, state_layout: StateLayout = "kv", output_final_state: bool = False,
                    state: Array | None = None, indices: Array | None = None) -> int:
    """Bytes of workspace that forward() of the same arguments takes on a GPU, or decode() if `state` is given."""
    call = _Call(q, k, v, g, beta, A_log, dt_bias, cu_seqlens, scale, gate_mode, beta_mode, lower_bound, qk_l2norm,
                 state_layout)
    p = call.problem
    if state is not None:
        call.set_pool(View(state, "state"), indices)
    if initial_state is not None:
        call.set_state("initial_state", View(initial_state, "initial_state"), call.sequences)
    _describe_dense(p.o, call.views["v"].dtype, call.output)
    if output_final_state:
        _describe_dense(p.final_state.tensor, FP32, call.states(call.sequences))
        p.final_state.num_slots, p.final_state.present = call.sequences, 1
    with call.plan(0) as plan:
        return plan.workspace_bytes


class _Call:
    """The problem of a call, and what it points to."""

    def __init__(self, q, k, v, g, beta, A_log, dt_bias, cu_seqlens, scale, gate_mode, beta_mode, lower_bound,
                 qk_l2norm, state_layout):
        self.views = {n: View(x, n) for n, x in dict(q=q, k=k, v=v, g=g, beta=beta).items()}
        q, v = self.views["q"], self.views["v"]
        if len(q.shape) != 4 or len(v.shape) != 4:
            raise ValueError(f"q and v must have four dimensions, got {list(q.shape)} and {list(v.shape)}")
        (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
        self.device, self.on_gpu = q.device, q.device[0] == CUDA
        self.output, self.problem, self.cu = (B, T, HV, V), Problem(), None
        p = self.problem
        library().kda_problem_init(ctypes.byref(p))
        p.batch, p.num_tokens, p.num_heads, p.num_value_heads, p.key_dim, p.value_dim = B, T, H, HV, K, V
        shapes = dict(q=(B, T, H, K), k=(B, T, H, K), v=self.output, g=(B, T, HV, K), beta=(B, T, HV))
        for name, shape in shapes.items():
            self._here(self.views[name]).describe(getattr(p, name), shape)
        for name, array, shape in (("A_log", A_log, (HV,)), ("dt_bias", dt_bias, (HV, K))):
            if array is not None:
                self._here(View(array, name)).describe(getattr(p, name), shape)
        p.gate_mode = _choice("gate_mode", gate_mode, GATE_MODES)
        p.beta_mode = _choice("beta_mode", beta_mode, BETA_MODES)
        p.state_layout = _choice("state_layout", state_layout, STATE_LAYOUTS)
        p.lower_bound, p.qk_l2norm = _number("lower_bound", lower_bound), int(bool(qk_l2norm))
        if scale is not None:
            p.scale, p.has_scale = _number("scale", scale), 1
        self.sequences = p.num_sequences = B
        if cu_seqlens is not None:
            self._set_lengths(cu_seqlens)
        self._matrix = (V, K) if state_layout == "vk" else (K, V)

    def _here(self, view):
        """`view`, kept as long as the call."""
        if view.device != self.device:
            raise ValueError(f"{view.name} must be on the device of q")
        self.views[view.name] = view
        return view

    def _set_lengths(self, cu_seqlens):
        try:
            ends = [operator.index(x) for x in cu_seqlens]
        except TypeError:
            raise TypeError(f"cu_seqlens must be a sequence of integers, got {cu_seqlens!r}") from None
        if not ends:
            raise ValueError("cu_seqlens must have N + 1 entries, got none")
        self.cu, p = (I64 * len(ends))(*ends), self.problem
        self.sequences = p.num_sequences = len(ends) - 1
        p.has_cu_seqlens, p.cu_seqlens_dtype, p.cu_seqlens = 1, _INT64, ctypes.cast(self.cu, PTR)

    def states(self, slots):
        return slots, self.problem.num_value_heads, *self._matrix

    def set_state(self, name, view, slots):
        target = getattr(self.problem, name)
        if view.dtype not in (FP32, BF16):
            raise TypeError(f"{view.name} must be float32 or bfloat16, got {view.type_name}")
        self._here(view).describe(target.tensor, self.states(slots))
        target.num_slots, target.present = slots, 1

    def set_pool(self, view, indices):
        """States in place: one a sequence, or where `indices` say."""
        self.problem.operation = _DECODE
        slots = self.sequences if indices is None or not view.shape else view.shape[0]
        self.set_state("initial_state", view, slots)
        if indices is None:
            return
        index = self._here(View(indices, "indices"))
        index.expect_shape((self.sequences,))
        if index.dtype != INT32 or not index.is_dense():
            raise TypeError(f"indices must be a dense array of int32, got {index.type_name} of strides {index.strides}")
        self.problem.initial_state.indices, self.problem.initial_state.indexed = index.data, 1

    def set_output(self, o) -> Any:
        o = new_numpy(self.output, self.views["v"].dtype, "o") if o is None else o
        self._here(_writable(o, "o")).describe(self.problem.o, self.output)
        return o

    def plan(self, num_threads):
        options = PlanOptions()
        library().kda_plan_options_init(ctypes.byref(options))
        if self.on_gpu:
            check(library().kda_plan_options_cuda(ctypes.byref(options), self.device[1]))
        elif self.device[0] != CPU:
            raise ValueError("q must be on the CPU or on a CUDA device")
        options.num_threads = num_threads
        return _Plan(self.problem, self.cu, options)

    def run(self, workspace, stream, num_threads):
        self.problem.stream = stream
        with self.plan(num_threads) as plan:
            size = plan.workspace_bytes
            if self.on_gpu:
                memory = self._here(View(workspace, "workspace", raw=True))
                start, given = memory.data, memory.bytes
            else:
                memory = ctypes.create_string_buffer(size + 64)
                start, given = (ctypes.addressof(memory) + 63) // 64 * 64, size
            check(library().kda_run(plan.handle, ctypes.byref(self.problem), PTR(start), ctypes.c_size_t(given)))


class _Plan:
    def __init__(self, problem, cu, options):
        self.handle = PTR()
        check(library().kda_plan_create(ctypes.byref(problem), cu, ctypes.byref(options), ctypes.byref(self.handle)))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        library().kda_plan_destroy(self.handle)

    @property
    def workspace_bytes(self):
        return library().kda_plan_workspace_bytes(self.handle)


def _choice(name, value, table):
    if value not in table:
        raise ValueError(f"{name} must be one of {', '.join(table)}, got {value!r}")
    return table[value]


def _number(name, value):
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, got {value!r}") from None


def _describe_dense(target, dtype, shape):
    check(library().kda_tensor_contiguous(ctypes.byref(target), None, dtype, len(shape), (I64 * len(shape))(*shape)))


def _writable(array, name):
    view = View(array, name)
    if not view.writable:
        raise ValueError(f"{name} is read-only")
    return view
