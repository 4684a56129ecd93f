# SPDX-License-Identifier: Apache-2.0
"""libkda for NumPy, JAX, CuPy and whatever else speaks DLPack, without torch.

    import numpy as np
    from libkda import arrays
    o, state = arrays.forward(q, k, v, g, beta, output_final_state=True)      # q [B, T, H, K], ...

Inputs are read where they lie, with their strides. On the CPU the outputs are new NumPy arrays, or those given.
On a GPU (CuPy, JAX) the caller gives o, final_state and a workspace, and the call is queued on `stream`.
"""
from __future__ import annotations

import ctypes
import math

from libkda._library import I64, PTR, PlanOptions, Problem, check, library

GATE_MODES = {"log": 0, "softplus": 1, "bounded": 2}
BETA_MODES = {"plain": 0, "sigmoid": 1, "sigmoid2": 2}
STATE_LAYOUTS = {"kv": 0, "vk": 1}

_CPU, _CUDA = 1, 2  # of DLPack
_FP32, _BF16, _FP16, _INT32, _INT64 = range(5)  # of kda.h
_DTYPES = {(2, 32): _FP32, (4, 16): _BF16, (2, 16): _FP16, (0, 32): _INT32, (0, 64): _INT64}


class _DLTensor(ctypes.Structure):
    _fields_ = [("data", PTR), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(I64)), ("strides", ctypes.POINTER(I64)),
                ("byte_offset", ctypes.c_uint64)]


_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = PTR, [ctypes.py_object, ctypes.c_char_p]


class _View:
    """An array's memory, as kda_tensor describes it; holds the array while it lives."""

    def __init__(self, array, name, raw=False):
        self.name = name
        if not hasattr(array, "__dlpack__"):
            raise TypeError(f"{name} must be an array with __dlpack__ (NumPy, JAX, CuPy), got {type(array).__name__}")
        flags = getattr(array, "flags", None)
        self.writable = getattr(flags, "writeable", True)
        if not self.writable:  # DLPack has no word for read-only: NumPy refuses
            array = array.copy()
        self.owner = array, array.__dlpack__()
        x = _DLTensor.from_address(_pointer_of(self.owner[1], b"dltensor"))
        self.shape = tuple(x.shape[i] for i in range(x.ndim))
        self.device = x.device_type, x.device_id
        self.dtype = _DTYPES.get((x.code, x.bits)) if x.lanes == 1 else None
        self.bytes = math.prod(self.shape) * x.bits * x.lanes // 8
        if self.dtype is None and not raw:
            raise TypeError(f"{name} must be float32, bfloat16, float16, int32 or int64")
        self.data = (x.data or 0) + x.byte_offset
        self.strides = tuple(x.strides[i] for i in range(x.ndim)) if x.strides else self._row_major()

    def _row_major(self):
        strides, step = [], 1
        for size in reversed(self.shape):
            strides.append(step)
            step *= size
        return tuple(reversed(strides))

    def describe(self, target, shape):
        if self.shape != tuple(shape):
            raise ValueError(f"{self.name} must have shape {list(shape)}, got {list(self.shape)}")
        target.data, target.dtype = self.data, self.dtype
        for i, stride in enumerate(self.strides):
            target.strides[i] = stride
        size = 4 if self.dtype == _FP32 else 2
        steps = [self.data, *(s * size for s in self.strides[:-1])]
        target.alignment = max(size, min(16, *(step & -step or 16 for step in steps)))


def _choice(name, value, table):
    if value not in table:
        raise ValueError(f"{name} must be one of {', '.join(table)}, got {value!r}")
    return table[value]


def _options(view, num_threads):
    options = PlanOptions()
    library().kda_plan_options_init(ctypes.byref(options))
    if view.device[0] == _CUDA:
        check(library().kda_plan_options_cuda(ctypes.byref(options), view.device[1]))
    elif view.device[0] != _CPU:
        raise ValueError("q must be on the CPU or on a CUDA device")
    options.num_threads = num_threads
    return options


def _new(shape, like):
    import numpy
    names = {_FP32: numpy.float32, _FP16: numpy.float16}
    if like not in names:
        raise ValueError("NumPy has no bfloat16: give o (any writable DLPack array of that type), or use float16")
    return numpy.full(shape, numpy.nan, dtype=names[like])


def forward(q, k, v, g, beta, *, A_log=None, dt_bias=None, initial_state=None, cu_seqlens=None, scale=None,
            gate_mode="log", beta_mode="plain", lower_bound=-5.0, qk_l2norm=False, state_layout="kv",
            output_final_state=False, o=None, final_state=None, workspace=None, stream=0, num_threads=0):
    """The forward pass; formulas and modes as in docs/operation.md.

    q, k [B, T, H, K]; v [B, T, HV, V]; g [B, T, HV, K]; beta [B, T, HV]; float32, float16 or bfloat16, each its own.
    A_log [HV], dt_bias [HV, K] float32; initial_state [N, HV, K, V] (kv) or [N, HV, V, K] (vk), float32 or bfloat16;
    cu_seqlens [N + 1], int32 or int64, on the host: packs N sequences into B = 1. num_threads 0: all cores.
    On a GPU: o, final_state (if asked for), workspace (a dense array of any type, of at least workspace_bytes(),
    aligned to 64) and stream (an integer handle).
    Returns (o [B, T, HV, V] of v's type, final_state or None). ValueError names an argument that does not fit.
    """
    lib, views = library(), {n: _View(x, n) for n, x in dict(q=q, k=k, v=v, g=g, beta=beta).items()}
    problem, cu, output = _problem(views, A_log, dt_bias, initial_state, cu_seqlens, scale, gate_mode, beta_mode,
                                   lower_bound, qk_l2norm, state_layout)
    on_gpu = views["q"].device[0] == _CUDA
    if on_gpu and (o is None or workspace is None or (output_final_state and final_state is None)):
        raise ValueError("on a GPU o, workspace and the final_state that is asked for must be given")
    o = _new(output["o"], views["v"].dtype) if o is None else o
    _out(problem.o, o, "o", output["o"])
    if final_state is None and output_final_state:
        final_state = _new(output["state"], _FP32)
    if final_state is not None:
        _state(problem.final_state, _out(problem.final_state.tensor, final_state, "final_state", output["state"]))
    problem.stream = stream
    plan = _plan(problem, cu, _options(views["q"], num_threads))
    try:
        size = lib.kda_plan_workspace_bytes(plan)
        if on_gpu:
            memory = _View(workspace, "workspace", raw=True)
            start, given = memory.data, memory.bytes
        else:
            memory = ctypes.create_string_buffer(size + 64)
            start, given = (ctypes.addressof(memory) + 63) // 64 * 64, size
        check(lib.kda_run(plan, ctypes.byref(problem), PTR(start), ctypes.c_size_t(given)))
    finally:
        lib.kda_plan_destroy(plan)
    return o, final_state


def workspace_bytes(q, k, v, g, beta, *, cu_seqlens=None, **options) -> int:
    """Bytes of workspace that forward() of the same arguments takes on a GPU."""
    views = {n: _View(x, n) for n, x in dict(q=q, k=k, v=v, g=g, beta=beta).items()}
    names = ("A_log", "dt_bias", "initial_state")
    problem, cu, output = _problem(views, *(options.get(n) for n in names), cu_seqlens, options.get("scale"),
                                   *(options.get(n, d) for n, d in (("gate_mode", "log"), ("beta_mode", "plain"),
                                                                    ("lower_bound", -5.0), ("qk_l2norm", False),
                                                                    ("state_layout", "kv"))))
    check(library().kda_tensor_contiguous(ctypes.byref(problem.o), None, views["v"].dtype, 4, (I64 * 4)(*output["o"])))
    if options.get("output_final_state"):
        tensor = problem.final_state.tensor
        check(library().kda_tensor_contiguous(ctypes.byref(tensor), None, _FP32, 4, (I64 * 4)(*output["state"])))
        problem.final_state.num_slots, problem.final_state.present = output["state"][0], 1
    plan = _plan(problem, cu, _options(views["q"], 0))
    try:
        return library().kda_plan_workspace_bytes(plan)
    finally:
        library().kda_plan_destroy(plan)


def _problem(views, A_log, dt_bias, initial_state, cu_seqlens, scale, gate_mode, beta_mode, lower_bound, qk_l2norm,
             state_layout):
    """The problem without its outputs, cu_seqlens for the planner, and the shapes of the outputs."""
    q, v = views["q"], views["v"]
    if len(q.shape) != 4 or len(v.shape) != 4:
        raise ValueError(f"q and v must have four dimensions, got {list(q.shape)} and {list(v.shape)}")
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    p = Problem()
    library().kda_problem_init(ctypes.byref(p))
    p.batch, p.num_tokens, p.num_heads, p.num_value_heads, p.key_dim, p.value_dim = B, T, H, HV, K, V
    shapes = dict(q=(B, T, H, K), k=(B, T, H, K), v=(B, T, HV, V), g=(B, T, HV, K), beta=(B, T, HV))
    for name, view in views.items():
        if view.device != q.device:
            raise ValueError(f"{name} must be on the device of q")
        view.describe(getattr(p, name), shapes[name])
    p.gate_mode = _choice("gate_mode", gate_mode, GATE_MODES)
    p.beta_mode = _choice("beta_mode", beta_mode, BETA_MODES)
    p.state_layout = _choice("state_layout", state_layout, STATE_LAYOUTS)
    p.lower_bound, p.qk_l2norm = lower_bound, int(qk_l2norm)
    if scale is not None:
        p.scale, p.has_scale = scale, 1
    p.num_sequences, cu = B, None
    if cu_seqlens is not None:
        ends = [int(x) for x in cu_seqlens]
        cu = (I64 * len(ends))(*ends)
        p.num_sequences, p.has_cu_seqlens, p.cu_seqlens_dtype = len(ends) - 1, 1, _INT64
        p.cu_seqlens = ctypes.cast(cu, PTR)
    for name, array, shape in (("A_log", A_log, (HV,)), ("dt_bias", dt_bias, (HV, K))):
        if array is not None:
            views[name] = _View(array, name)
            views[name].describe(getattr(p, name), shape)
    matrix = (V, K) if state_layout == "vk" else (K, V)
    states = (p.num_sequences, HV, *matrix)
    if initial_state is not None:
        views["initial_state"] = view = _View(initial_state, "initial_state")
        view.describe(p.initial_state.tensor, states)
        _state(p.initial_state, view)
    return p, cu, dict(o=(B, T, HV, V), state=states)


def _state(target, view):
    target.num_slots, target.present = view.shape[0], 1


def _out(target, array, name, shape):
    view = _View(array, name)
    if not view.writable:
        raise ValueError(f"{name} is read-only")
    view.describe(target, shape)
    return view


def _plan(problem, cu, options):
    plan = PTR()
    check(library().kda_plan_create(ctypes.byref(problem), cu, ctypes.byref(options), ctypes.byref(plan)))
    return plan
