# SPDX-License-Identifier: Apache-2.0
"""libkda for NumPy, JAX, CuPy and whatever else speaks DLPack, without torch.

    import numpy as np
    from libkda import arrays
    o, state = arrays.forward(q, k, v, g, beta, output_final_state=True)      # q [B, T, H, K], ...
    o = arrays.decode(q1, k1, v1, g1, beta1, state)                           # the next token; state in place
    dq, dk, dv, *_ = arrays.backward(q, k, v, g, beta, d_o=d_o)               # gradients of a loss

Inputs are read where they lie, with their strides. On the CPU the outputs are new NumPy arrays, or those given.
On a GPU (CuPy, JAX) the caller gives o, final_state and a workspace, and the call is queued on `stream`. backward()
runs on the CPU.
"""
from __future__ import annotations

import ctypes
import functools
import operator
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, Protocol, SupportsIndex

from ._binding import repeats
from ._binding.dlpack import CPU, CUDA, FP32, View, new_numpy
from ._binding.library import I64, PTR, GradientTensors, check, library, new_options, new_problem, plan_cache
from ._binding.policies import expect_invariant, policy_of
from ._binding.repeats import Memory, Plan
from ._binding.rules import LAST_SLOT, RULES, in_words_of, integer, number

GATE_MODES = {"log": 0, "softplus": 1, "bounded": 2}
BETA_MODES = {"plain": 0, "sigmoid": 1, "sigmoid2": 2}
STATE_LAYOUTS = {"kv": 0, "vk": 1}
HEAD_MAPS = {"grouped": 0, "tiled": 1}
_DECODE, _INT64 = 1, 4  # of kda.h

GateMode = Literal["log", "softplus", "bounded"]
BetaMode = Literal["plain", "sigmoid", "sigmoid2"]
StateLayout = Literal["kv", "vk"]
HeadMap = Literal["grouped", "tiled"]


class Array(Protocol):
    """Whatever speaks DLPack."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


class Gradients(NamedTuple):
    """What backward() returns: arrays of the shape of what each is the gradient of; None: not wanted."""

    dq: Any
    dk: Any
    dv: Any
    dg: Any
    dbeta: Any
    dA_log: Any
    ddt_bias: Any
    d_initial_state: Any


class Kept:
    """What a forward() on the CPU keeps for the backward() of the same arguments: the float32 state after every `every`
    tokens of a sequence, a multiple of 64; 4 K V / every bytes a token and value head. A forward() that succeeds fills
    it anew; a backward() only reads it."""

    def __init__(self, every: SupportsIndex = 2048) -> None:
        self.every = integer("every", every, 64, LAST_SLOT)
        if self.every % 64 != 0:
            raise ValueError(f"every must be a multiple of 64, got {self.every}")
        self._memory: Memory | None = None


def forward(q: Array, k: Array, v: Array, g: Array, beta: Array, *, A_log: Array | None = None,
            dt_bias: Array | None = None, initial_state: Array | None = None,
            cu_seqlens: Iterable[SupportsIndex] | None = None, scale: float | None = None, gate_mode: GateMode = "log",
            beta_mode: BetaMode = "plain", lower_bound: float = -5.0, qk_l2norm: bool = False,
            state_layout: StateLayout = "kv", output_final_state: bool = False, o: Array | None = None,
            final_state: Array | None = None, workspace: Array | None = None, stream: int = 0,
            num_threads: int = 0, has_state: Array | None = None, kept: Kept | None = None,
            head_map: HeadMap = "grouped", context_parallel: str | int = "auto",
            batch_invariant: bool = False) -> tuple[Any, Any]:
    """The forward pass; formulas and modes as in docs/operation.md.

    q, k [B, T, H, K]; v [B, T, HV, V]; g [B, T, HV, K], or [B, T, HV]: one gate a head; beta [B, T, HV]; float32,
    float16 or bfloat16, each its own.
    A_log [HV], dt_bias [HV, K], or [HV] beside a g [B, T, HV], float32; initial_state [N, HV, K, V] (kv) or
    [N, HV, V, K] (vk), float32 or bfloat16; has_state [N], bool: where it is False a sequence starts from zero.
    cu_seqlens [N + 1], integers on the host: packs N sequences into B = 1. num_threads 0: all cores. kept: is filled
    for a backward(). head_map "tiled": value head j reads q/k head j % H, not j // (HV // H) as with "grouped".
    On a GPU: o, final_state (if asked for), workspace (a dense array of any type, of at least workspace_bytes(),
    aligned to 64) and stream (an integer handle).
    context_parallel and batch_invariant as of libkda.Options (docs/planning.md); workspace_bytes() has the same.
    Returns (o [B, T, HV, V] of v's type, final_state or None). ValueError or TypeError names an argument that does
    not fit; nothing is written then.
    """
    key = None
    given: dict[str, Any] = dict(q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias,
                                 initial_state=initial_state, has_state=has_state, o=o, final_state=final_state)
    if cu_seqlens is None and kept is None:
        key = repeats.key_of("forward", given, (scale, gate_mode, beta_mode, lower_bound, qk_l2norm, state_layout,
                                                 output_final_state, stream, num_threads, head_map, context_parallel,
                                                 batch_invariant))
        done = repeats.run(key, given)
        if done is not None:
            return done["o"], done["final_state"]
    call = _Call("forward", q, k, v, g, beta, A_log, dt_bias, cu_seqlens, scale, gate_mode, beta_mode, lower_bound,
                 qk_l2norm, state_layout, head_map)
    if call.on_gpu and (o is None or workspace is None or (output_final_state and final_state is None)):
        raise ValueError("on a GPU o, workspace and the final_state that is asked for must be given")
    if initial_state is not None:
        call.set_state("initial_state", call.view("initial_state", initial_state), call.sequences)
    call.set_mask(has_state, initial_state)
    o = call.set_output(o)
    if final_state is None and output_final_state:
        final_state = new_numpy(call.states(call.sequences), FP32, "final_state")
    if final_state is not None:
        call.set_state("final_state", call.written("final_state", final_state), call.sequences)
    call.set_schedule(context_parallel, batch_invariant)
    call.run(workspace, stream, num_threads, kept)
    made = {name: array for name, array in dict(o=o, final_state=final_state).items() if array is not given[name]}
    call.remember(key, given, made)
    return o, final_state


def backward(q: Array, k: Array, v: Array, g: Array, beta: Array, *, d_o: Array | None = None,
             d_final_state: Array | None = None, A_log: Array | None = None, dt_bias: Array | None = None,
             initial_state: Array | None = None, cu_seqlens: Iterable[SupportsIndex] | None = None,
             scale: float | None = None, gate_mode: GateMode = "log", beta_mode: BetaMode = "plain",
             lower_bound: float = -5.0, qk_l2norm: bool = False, state_layout: StateLayout = "kv",
             has_state: Array | None = None, wanted: Iterable[str] | None = None,
             out: Mapping[str, Array] | None = None, kept: Kept | None = None, num_threads: int = 0,
             head_map: HeadMap = "grouped") -> Gradients:
    """Gradients of a loss with respect to the arguments of a forward(), as they were given (raw gates and step sizes,
    q and k before their norm). On the CPU; formulas in docs/operation.md.

    Arguments as of forward(), unchanged since. d_o [B, T, HV, V], float32, float16 or bfloat16, and d_final_state
    [N, HV, K, V] (kv) or [N, HV, V, K] (vk), float32 or bfloat16: gradients of the loss with respect to its outputs.
    One of them may be absent, and counts as zero then. wanted: names of Gradients; by default all whose argument is
    given. out: arrays that some of them are written to, by name, of any type that their argument may have and any
    strides. The others are new NumPy arrays of the type of their argument; d_initial_state is float32. kept: what the
    forward() has kept; without it states of sequences of more than 4,096 tokens are computed twice.
    Returns Gradients. Errors as of forward().
    """
    call = _Call("backward", q, k, v, g, beta, A_log, dt_bias, cu_seqlens, scale, gate_mode, beta_mode, lower_bound,
                 qk_l2norm, state_layout, head_map)
    if call.device[0] != CPU:
        raise ValueError("q must be on the CPU: backward() of arrays does not run on a GPU yet")
    if initial_state is not None:
        call.set_state("initial_state", call.view("initial_state", initial_state), call.sequences)
    call.set_mask(has_state, initial_state)
    if d_o is None and d_final_state is None:
        raise ValueError("d_o or d_final_state must be given")
    return call.run_backward(dict(d_o=d_o, d_final_state=d_final_state), wanted, out, kept, num_threads)


def decode(q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, *, indices: Array | None = None,
           A_log: Array | None = None, dt_bias: Array | None = None, cu_seqlens: Iterable[SupportsIndex] | None = None,
           scale: float | None = None, gate_mode: GateMode = "log", beta_mode: BetaMode = "plain",
           lower_bound: float = -5.0, qk_l2norm: bool = False, state_layout: StateLayout = "kv",
           o: Array | None = None, workspace: Array | None = None, stream: int = 0, num_threads: int = 0,
           has_state: Array | None = None, first_slot: int = 0, head_map: HeadMap = "grouped") -> Any:
    """The next 1 to 8 tokens of every sequence; the states are read and written in place.

    Arguments as of forward(), T counting the new tokens. state [N, HV, K, V] (kv) or [N, HV, V, K] (vk), float32 or
    bfloat16, or a pool of more slots with indices [N], int32, dense, where q is: the slot of each sequence. A negative
    index, or one below first_slot, is none: its tokens are skipped, and o is 0. A sequence without tokens leaves its
    initial state in its slot. has_state and head_map as of forward().
    On a GPU: o, workspace (of workspace_bytes(..., state=state)) and stream.
    Returns o [B, T, HV, V] of v's type. Errors as of forward().
    """
    key = None
    given: dict[str, Any] = dict(q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, state=state,
                                 indices=indices, has_state=has_state, o=o)
    if cu_seqlens is None:
        key = repeats.key_of("decode", given, (scale, gate_mode, beta_mode, lower_bound, qk_l2norm, state_layout,
                                                stream, num_threads, first_slot, head_map))
        done = repeats.run(key, given)
        if done is not None:
            return done["o"]
    call = _Call("decode", q, k, v, g, beta, A_log, dt_bias, cu_seqlens, scale, gate_mode, beta_mode, lower_bound,
                 qk_l2norm, state_layout, head_map)
    if call.on_gpu and (o is None or workspace is None):
        raise ValueError("on a GPU o and workspace must be given")
    call.set_pool(call.written("state", state), indices, first_slot)
    call.set_mask(has_state, state)
    o = call.set_output(o)
    call.run(workspace, stream, num_threads)
    call.remember(key, given, {} if given["o"] is o else dict(o=o))
    return o


def workspace_bytes(q: Array, k: Array, v: Array, g: Array, beta: Array, *, A_log: Array | None = None,
                    dt_bias: Array | None = None, initial_state: Array | None = None,
                    cu_seqlens: Iterable[SupportsIndex] | None = None, scale: float | None = None,
                    gate_mode: GateMode = "log", beta_mode: BetaMode = "plain", lower_bound: float = -5.0,
                    qk_l2norm: bool = False, state_layout: StateLayout = "kv", output_final_state: bool = False,
                    state: Array | None = None, indices: Array | None = None, has_state: Array | None = None,
                    first_slot: int = 0, head_map: HeadMap = "grouped", context_parallel: str | int = "auto",
                    batch_invariant: bool = False) -> int:
    """Bytes of workspace that forward() of the same arguments takes on a GPU, or decode() if `state` is given."""
    call = _Call("forward" if state is None else "decode", q, k, v, g, beta, A_log, dt_bias, cu_seqlens, scale,
                 gate_mode, beta_mode, lower_bound, qk_l2norm, state_layout, head_map)
    p = call.problem
    if state is not None:
        if initial_state is not None:
            raise ValueError("initial_state belongs to forward(), state to decode(): give one of them")
        if context_parallel != "auto" or batch_invariant:
            raise ValueError("context_parallel and batch_invariant belong to forward(), state to decode()")
        call.set_pool(call.view("state", state), indices, first_slot)
    if initial_state is not None:
        call.set_state("initial_state", call.view("initial_state", initial_state), call.sequences)
    call.set_mask(has_state, state if state is not None else initial_state)
    _describe_dense(p.o, call.views["v"].dtype, call.output)
    if output_final_state:
        _describe_dense(p.final_state.tensor, FP32, call.states(call.sequences))
        p.final_state.num_slots, p.final_state.present = call.sequences, 1
    call.set_schedule(context_parallel, batch_invariant)
    return call.plan(call.options(0)).workspace_bytes


class _Call:
    """The problem of a call, and what it points to."""

    def __init__(self, function, q, k, v, g, beta, A_log, dt_bias, cu_seqlens, scale, gate_mode, beta_mode, lower_bound,
                 qk_l2norm, state_layout, head_map):
        self.words = functools.partial(in_words_of, f"arrays.{function}")
        self.views, self.device, self.policy = {}, None, (0, 0)
        q, k, v, g, beta = (self.view(n, x) for n, x in dict(q=q, k=k, v=v, g=g, beta=beta).items())
        for x in (q, v):
            if len(x.shape) != 4:
                raise ValueError(f"{x.name} must have four dimensions, got {list(x.shape)}")
        (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
        self.on_gpu = q.device[0] == CUDA
        self.output, self.problem, self.cu = (B, T, HV, V), new_problem(), None
        p = self.problem
        p.batch, p.num_tokens, p.num_heads, p.num_value_heads, p.key_dim, p.value_dim = B, T, H, HV, K, V
        gates = (B, T, HV) if len(g.shape) == 3 else (B, T, HV, K)  # a head's innermost stride is 0
        shapes = dict(q=(B, T, H, K), k=(B, T, H, K), v=self.output, g=gates, beta=(B, T, HV))
        for name, shape in shapes.items():
            self.views[name].describe(getattr(p, name), shape)
        for name, array in (("A_log", A_log), ("dt_bias", dt_bias)):
            if array is not None:
                view = self.view(name, array)
                a_head = name == "A_log" or len(gates) == 3 and len(view.shape) == 1
                view.describe(getattr(p, name), (HV,) if a_head else (HV, K))
                if getattr(p, name).strides[0] == 0:  # for the C ABI there is none then
                    raise ValueError(f"{name}: stride of dimension 0 is 0, must step over a head")
        p.gate_mode = _choice("gate_mode", gate_mode, GATE_MODES)
        p.beta_mode = _choice("beta_mode", beta_mode, BETA_MODES)
        p.state_layout = _choice("state_layout", state_layout, STATE_LAYOUTS)
        p.head_map = _choice("head_map", head_map, HEAD_MAPS)
        p.lower_bound, p.qk_l2norm = number("lower_bound", lower_bound), int(bool(qk_l2norm))
        if scale is not None:
            p.scale, p.has_scale = number("scale", scale), 1
        self.sequences = p.num_sequences = B
        if cu_seqlens is not None:
            self._set_lengths(cu_seqlens)
        self._matrix = (V, K) if state_layout == "vk" else (K, V)

    def view(self, name, array):
        """The memory of an argument, kept as long as the call."""
        rule = RULES["arrays"].get(name)
        view = View(array, name, rule.types if rule else None)
        if self.device is None:
            self.device = view.device
        if view.device != self.device:
            raise ValueError(f"{name} must be on the device of q")
        self.views[name] = view
        return view

    def written(self, name, array):
        view = self.view(name, array)
        if not view.writable:
            raise ValueError(f"{name} is read-only")
        return view

    def _set_lengths(self, cu_seqlens):
        try:
            ends = [operator.index(x) for x in cu_seqlens]
        except TypeError:
            raise TypeError(f"cu_seqlens must be a sequence of integers, got {cu_seqlens!r}") from None
        if not ends:
            raise ValueError("cu_seqlens must have N + 1 entries, got none")
        T = self.problem.num_tokens
        for i, end in enumerate(ends):
            if not 0 <= end <= T:
                raise ValueError(f"cu_seqlens: entry {i} = {end} is outside 0..{T}")
        self.cu, p = (I64 * len(ends))(*ends), self.problem
        self.sequences = p.num_sequences = len(ends) - 1
        p.has_cu_seqlens, p.cu_seqlens_dtype, p.cu_seqlens = 1, _INT64, ctypes.cast(self.cu, PTR)

    def states(self, slots):
        return slots, self.problem.num_value_heads, *self._matrix

    def set_state(self, name, view, slots):
        target = getattr(self.problem, name)
        view.describe(target.tensor, self.states(slots))
        target.num_slots, target.present = slots, 1

    def set_pool(self, view, indices, first_slot):
        """States in place: one a sequence, or where `indices` say."""
        self.problem.operation, self.problem.zero_skipped = _DECODE, 1
        slots = self.sequences if indices is None or not view.shape else view.shape[0]
        self.set_state("initial_state", view, slots)
        if slots == 0 and self.sequences > 0:
            raise ValueError("state has no slots")
        self.problem.first_slot = integer("first_slot", first_slot, 0, LAST_SLOT)
        if indices is None:
            return
        self.problem.initial_state.indices = self._dense("indices", indices)
        self.problem.initial_state.indexed = 1

    def set_mask(self, has_state, states):
        if has_state is None:
            return
        if states is None:
            raise ValueError("has_state is given without initial_state")
        self.problem.initial_state_mask = self._dense("has_state", has_state)
        self.problem.has_initial_state_mask = 1

    def _dense(self, name, array):
        """Where entries of the sequences lie one after the other."""
        view = self.view(name, array)
        view.expect_shape((self.sequences,))
        if not view.is_dense():
            raise ValueError(f"{name} must be dense, got strides {list(view.strides)}")
        return view.data

    def set_schedule(self, context_parallel, batch_invariant):
        self.policy = policy_of(context_parallel)
        self.problem.batch_invariant = expect_invariant(batch_invariant)

    def set_output(self, o) -> Any:
        o = new_numpy(self.output, self.views["v"].dtype, "o") if o is None else o
        self.written("o", o).describe(self.problem.o, self.output)
        return o

    def options(self, num_threads, kept=None):
        options = new_options()
        if kept is not None:
            if not isinstance(kept, Kept):
                raise TypeError(f"kept must be a libkda.arrays.Kept, got {type(kept).__name__}")
            if self.on_gpu:
                raise ValueError("kept must be None on a GPU, which keeps nothing yet")
            options.keep = kept.every
        if self.on_gpu:
            check(library().kda_plan_options_cuda(ctypes.byref(options), self.device[1]), self.words)
        elif self.device[0] != CPU:
            raise ValueError("q must be on the CPU or on a CUDA device")
        options.num_threads = integer("num_threads", num_threads, 0, LAST_SLOT)
        options.context_parallel, options.num_segments = self.policy
        return options

    def plan(self, options):
        return Plan("plan", self.words, library().kda_plan_cache_find, plan_cache(), ctypes.byref(self.problem),
                     self.cu, ctypes.byref(options))

    def run(self, workspace, stream, num_threads, kept=None):
        self.problem.stream = integer("stream", stream, 0, 2**64 - 1)
        plan = self.made_plan = self.plan(self.options(num_threads, kept))
        if self.on_gpu:
            memory = self.view("workspace", workspace)
            start, size = memory.data, memory.bytes
        else:
            memory = repeats.workspace_of(plan.workspace_bytes)
            start, size = memory.start, memory.bytes
        saved = None if kept is None else Memory("kept", plan.saved_bytes)
        self._set_saved(saved)
        check(library().kda_run(plan.handle, ctypes.byref(self.problem), start, size), self.words)
        if kept is not None:
            kept._memory = saved

    def remember(self, key, given, made):
        """For calls like this one that may follow. `made`: the outputs that it allocated."""
        if key is not None and not self.on_gpu:
            repeats.remember(key, given, made, self.problem, self.made_plan, self.words)

    def run_backward(self, given, wanted, out, kept, num_threads):
        gradients = GradientTensors(struct_size=ctypes.sizeof(GradientTensors))
        for name, array in given.items():
            if array is not None:
                self.view(name, array).describe(getattr(gradients, name), self._gradient_shape(name))
        names = self._wanted(wanted)
        out = {} if out is None else out
        if not isinstance(out, Mapping):
            raise TypeError(f"out must be a mapping of names to arrays, got {type(out).__name__}")
        for name in out:
            self._expect_gradient("out", name)
            if name not in names:
                raise ValueError(f"out: {name} is not wanted")
        found = {}
        for name in names:
            shape = self._gradient_shape(name)
            dtype = FP32 if name == "d_initial_state" else self.views[_argument_of(name)].dtype
            found[name] = out[name] if name in out else new_numpy(shape, dtype, name)
            self.written(name, found[name]).describe(getattr(gradients, name), shape)
        _describe_dense(self.problem.o, self.views["v"].dtype, self.output)
        options = self.options(num_threads, kept)
        forward = self.plan(options)
        if kept is not None:
            if kept._memory is None:
                raise ValueError("kept holds nothing: give it to the forward() first")
            self._set_saved(kept._memory)
        plan = Plan("backward_plan", self.words, library().kda_backward_plan_create, forward.handle,
                    ctypes.byref(gradients), ctypes.byref(options))
        memory = Memory("workspace", plan.workspace_bytes)
        status = library().kda_backward(plan.handle, ctypes.byref(self.problem), ctypes.byref(gradients),
                                        PTR(memory.start), ctypes.c_size_t(memory.bytes))
        check(status, self.words)
        return Gradients(*(found.get(name) for name in Gradients._fields))

    def _wanted(self, wanted):
        """The gradients that are wanted, in the order of Gradients."""
        if wanted is None:
            return [name for name in Gradients._fields if _argument_of(name) in self.views]
        try:
            names = [wanted] if isinstance(wanted, str) else list(wanted)
        except TypeError:
            raise TypeError(f"wanted must be names of Gradients, got {wanted!r}") from None
        for name in names:
            self._expect_gradient("wanted", name)
        if not names:
            raise ValueError("wanted must name at least one gradient, got none")
        return [name for name in Gradients._fields if name in names]

    def _expect_gradient(self, where, name):
        if name not in Gradients._fields:
            raise ValueError(f"{where}: {name!r} is none of {', '.join(Gradients._fields)}")
        if _argument_of(name) not in self.views:
            raise ValueError(f"{where}: {name} is that of {_argument_of(name)}, which is not given")

    def _gradient_shape(self, name):
        if name in ("d_final_state", "d_initial_state"):
            return self.states(self.sequences)
        return self.output if name == "d_o" else self.views[_argument_of(name)].shape

    def _set_saved(self, memory):
        if memory is not None:
            self.problem.saved, self.problem.saved_bytes = memory.start, memory.bytes


def _argument_of(gradient):
    return gradient.removeprefix("d").removeprefix("_")


def _choice(name, value, table):
    if not isinstance(value, str) or value not in table:
        raise ValueError(f"{name} must be one of {', '.join(table)}, got {value!r}")
    return table[value]


def _describe_dense(target, dtype, shape):
    check(library().kda_tensor_contiguous(ctypes.byref(target), None, dtype, len(shape), (I64 * len(shape))(*shape)))
