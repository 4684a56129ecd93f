# SPDX-License-Identifier: Apache-2.0
"""From FLA's arguments to what torch.ops.libkda takes. What a call gives here may be anything: an error that it makes
is made clear by checks.checked; what would go through with another meaning is refused."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch.compiler import is_compiling

from .. import ops
from ..ops import (BETA_PLAIN, BETA_SIGMOID, BETA_SIGMOID2, GATE_BOUNDED, GATE_LOG, GATE_SOFTPLUS, HEADS_GROUPED,
                  HEADS_TILED)
from .checks import computes_in_float64, expect_memory, int32_of, state_type
from .rules import FLOATS, LAST_SLOT, LENGTHS, integer, number, refuse_type

NO_A_LOG = "`A_log` must be provided when `use_gate_in_kernel=True` and `lower_bound` is not set."
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_made = tuple.__new__  # of a NamedTuple and its fields, in half the time that its own takes


class Modes(NamedTuple):
    """How a call reads g, beta, q, k and its states: as the operators take it, in their order."""
    gate_mode: int
    beta_mode: int
    lower_bound: float
    scale: float
    l2norm: bool
    state_v_first: bool

    @property
    def without_layout(self) -> tuple[int, int, float, float, bool]:
        """All but that of states, for operators that have them in the kv layout or take it at another place."""
        return self[:-1]


class Beside(NamedTuple):
    """Where else states of a call go, and the tree that its tokens are: arguments of the operator update, in their
    order."""
    drafts: torch.Tensor | None = None
    draft_indices: torch.Tensor | None = None
    parents: torch.Tensor | None = None
    checkpoints: torch.Tensor | None = None
    checkpoint_offsets: torch.Tensor | None = None
    checkpoint_indices: torch.Tensor | None = None
    checkpoint_every: int = 16


class Slots(NamedTuple):
    """A pool of states, and where in it the sequences of a call find and leave theirs: arguments of the operator
    update."""
    states: torch.Tensor
    indices: torch.Tensor | None
    num_accepted_tokens: torch.Tensor | None
    has_state: torch.Tensor | None
    first_slot: int
    beside: Beside | None  # None: nothing, as in most calls


class TailRows(NamedTuple):
    """What a call with a tail is told of it: arguments of the operator update_with_tail."""
    tail: tuple[torch.Tensor | None, ...]  #: of libkda.tail: four tensors, and three of split states
    positions: torch.Tensor
    sources: torch.Tensor | None
    parents: torch.Tensor | None
    accepted_rows: torch.Tensor | None
    settle: bool


def dense(x):
    """A contiguous tensor. torch copies from a storage that has been freed without looking."""
    if x.is_contiguous():
        return x
    expect_memory("a tensor", x)
    return x.contiguous()


def as_type(x, dtype):
    """A float tensor as one of `dtype`."""
    if x.dtype is dtype:
        return x
    expect_memory("a tensor", x)
    if x.dtype not in _FLOATS and x.dtype is not torch.float64:
        raise refuse_type("a tensor", FLOATS, x.dtype)
    return x.to(dtype)


def rows_of(x, float64=False):
    """A tensor of a type that the kernels read, its last dimension contiguous; any other strides. `float64`: of a call
    that is computed in it."""
    if x.dtype not in _FLOATS and not (float64 and x.dtype is torch.float64):
        x = as_type(x, torch.float32)
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 and x.is_contiguous() else dense(x)


def gates_of(x, float64=False):
    """The same of g, which may have one gate a head: [B, T, HV] of any strides, or a view of it expanded to K."""
    if x.dim() == 3:
        return x if x.dtype in _FLOATS or float64 and x.dtype is torch.float64 else as_type(x, torch.float32)
    if x.dim() == 4 and x.stride(-1) == 0 and x.dtype in _FLOATS:
        return x
    return rows_of(x, float64)


def written_rows_of(name, x, float64=False):
    """The same for what is written: `x` itself, or a copy that is written back."""
    rows = rows_of(x, float64)
    if rows is not x:
        expect_distinct(name, x)
    return rows


def expect_distinct(name, x):
    """That no two elements of `x` are one in memory: copying back would fail, after states have been written."""
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape) if size > 1):
        if stride <= reach:
            raise ValueError(f"{name} is written, and its elements overlap: shape {list(x.shape)}, strides "
                             f"{list(x.stride())}")
        reach += stride * (size - 1)


def parameter_of(x, float64=False):
    """A parameter of the gate as the kernels read it, in any shape."""
    if x is None or x.dtype is torch.float32 and x.is_contiguous():
        return x
    return dense(x if float64 and x.dtype is torch.float64 else as_type(x, torch.float32))


def lengths_of(cu_seqlens, cu_seqlens_cpu, q):
    """cu_seqlens where q is, and on the host if that costs no wait; none of either without packed rows."""
    if cu_seqlens is None:
        if cu_seqlens_cpu is not None:
            raise ValueError("cu_seqlens_cpu is a copy of cu_seqlens, got no cu_seqlens")
        return None, None
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise refuse_type("cu_seqlens", LENGTHS, cu_seqlens.dtype)
    if cu_seqlens.device.type == "cpu" and q.device.type == "cuda":
        if cu_seqlens_cpu is None:
            cu_seqlens_cpu = cu_seqlens
        elif not is_compiling() and not torch.equal(cu_seqlens.long(), cu_seqlens_cpu.long()):
            raise ValueError("cu_seqlens_cpu is not cu_seqlens")
        cu_seqlens = cu_seqlens.to(q.device, non_blocking=True)
    return dense(cu_seqlens), None if cu_seqlens_cpu is None else dense(cu_seqlens_cpu)


def parameters_of(A_log, dt_bias, modes, float64=False):
    """A_log and dt_bias as the kernels read them; none where the gate has no parameters."""
    if modes.gate_mode == GATE_LOG:
        return None, None
    if A_log is None and modes.gate_mode == GATE_SOFTPLUS:
        raise ValueError(NO_A_LOG)
    return parameter_of(A_log, float64), parameter_of(dt_bias, float64)


def modes_of(q, scale, lower_bound, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
             use_qk_l2norm_in_kernel, state_v_first):
    """Modes of a call that was given these options, FLA's by their names."""
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError("`allow_neg_eigval=True` requires `use_beta_sigmoid_in_kernel=True`.")
    gate, beta, bound = GATE_LOG, BETA_PLAIN, -5.0
    if use_gate_in_kernel:
        if lower_bound is None:
            gate = GATE_SOFTPLUS
        else:
            gate, bound = GATE_BOUNDED, number("lower_bound", lower_bound)
    if use_beta_sigmoid_in_kernel:
        beta = BETA_SIGMOID2 if allow_neg_eigval else BETA_SIGMOID
    scale = q.shape[-1] ** -0.5 if scale is None else number("scale", scale)
    return _made(Modes, (gate, beta, bound, scale, bool(use_qk_l2norm_in_kernel), bool(state_v_first)))


def slots_of(name, states, indices, num_accepted_tokens, has_state, first_slot, beside=None):
    """Slots of a call that was given these. `name`: what the caller calls `indices`."""
    if num_accepted_tokens is not None:
        num_accepted_tokens = int32_of("num_accepted_tokens", num_accepted_tokens)
    if type(first_slot) is not int or first_slot:
        first_slot = integer("first_slot", first_slot, 0, LAST_SLOT)
    if has_state is not None:
        has_state = dense(has_state)
    if indices is not None:
        indices = _indices_of(name, indices)
    return _made(Slots, (states, indices, num_accepted_tokens, has_state, first_slot, beside))


def beside_of(drafts=None, draft_slots=None, parents=None, checkpoints=None, checkpoint_offsets=None,
              checkpoint_slots=None, checkpoint_every=16):
    """Likewise; None where nothing is given."""
    if drafts is None and parents is None and checkpoints is None:
        return None
    if drafts is not None:
        draft_slots = _indices_of("draft_slots", draft_slots)
    if parents is not None:
        parents = int32_of("parents", parents)
    if checkpoints is not None:
        checkpoint_offsets = int32_of("checkpoint_offsets", checkpoint_offsets)
        checkpoint_slots = int32_of("checkpoint_slots", checkpoint_slots)
        checkpoint_every = integer("checkpoint_every", checkpoint_every, 16, LAST_SLOT)
    return Beside(drafts, draft_slots, parents, checkpoints, checkpoint_offsets, checkpoint_slots, checkpoint_every)


def _indices_of(name, indices):
    """Slots as the operators take them: [N], or [N, S] with S above 1, one a token."""
    indices = int32_of(name, indices)
    return indices.flatten() if indices.dim() == 2 and indices.shape[1] <= 1 else indices


def expect_dimensions(slots, dimensions):
    """What the kernels take of another kind of step; checked() says which shape is meant."""
    if slots.dim() != dimensions:
        raise ValueError(f"slots must have {dimensions} dimensions, got {list(slots.shape)}")


def head_map_of(name):
    """The operators' number of a head_map."""
    if name is None or name == "grouped":
        return HEADS_GROUPED
    if name == "tiled":
        return HEADS_TILED
    raise ValueError(f"head_map must be 'grouped' or 'tiled', got {name!r}")


_OF_POOLS = ops.update, ops.update_with_tail, ops.update_with_ring


def _call(operator, args):
    """operator(*args), whose first five are q, k, v, g and beta. It looks at what it is given before anything else,
    faster than Python can: what it refuses is looked at here, to be given again as it takes it."""
    error = None
    if not is_compiling():  # a graph holds one call
        try:
            return operator(*args)
        except ValueError as refusal:
            error = refusal
    q, k, v, g, beta, *rest = args
    float64 = operator not in _OF_POOLS and computes_in_float64(q)  # pools: fp32 or bf16
    rows = tuple((gates_of if x is g else rows_of)(x, float64) for x in (q, k, v, g, beta))
    if error is not None and all(row is x for row, x in zip(rows, (q, k, v, g, beta))):
        raise error  # not for what these tensors are: nothing is tried twice
    return operator(*rows, *rest)


# The operators, by what calls hand on: here, and nowhere else, it is taken apart. `parameters`: of parameters_of;
# `lengths`: of lengths_of, or a pair of None; `options`: of number_of.

def forward(q, k, v, g, beta, parameters, state, lengths, modes, output_final_state, decode, has_state, head_map,
            options):
    """o and the final state, without gradients."""
    return _call(ops.forward, (q, k, v, g, beta, *parameters, state, *lengths, *modes, output_final_state, decode,
                               has_state, head_map, options))


def forward_kept(q, k, v, g, beta, parameters, state, lengths, modes, output_final_state, has_state, keep, head_map,
                 options):
    """o and the final state, with gradients."""
    return _call(ops.forward_kept, (q, k, v, g, beta, *parameters, state, *lengths, *modes, output_final_state,
                                    has_state, keep, head_map, options))


def forward_into(q, k, v, g, beta, o, final_state, checkpoints, parameters, state, lengths, modes, checkpoint_every=0,
                 decode=False, has_state=None, head_map=HEADS_GROUPED, options=0):
    """Writes o, and the final state and checkpoints where they are given."""
    _call(ops.forward_into, (q, k, v, g, beta, o, final_state, checkpoints, *parameters, state, *lengths, *modes,
                             checkpoint_every, decode, has_state, head_map, options))


def update(q, k, v, g, beta, o, slots, parameters, lengths, modes, decode, zero_skipped, head_map, options,
           final_states=True):
    """Writes o, checkpoints and, with final_states, the states of `slots`."""
    states, indices, accepted, has_state, first_slot, beside = slots
    # Defaults cost a call of few tokens time.
    more = ()
    if beside is not None or head_map or options or not final_states:
        more = (*(beside or Beside()), head_map, options, final_states)
    _call(ops.update, (q, k, v, g, beta, o, states, indices, accepted, *parameters, *lengths, decode, *modes,
                       zero_skipped, has_state, first_slot, *more))


def update_with_tail(q, k, v, g, beta, o, slots, rows, parameters, lengths, modes, decode, head_map, options):
    """Writes o, the rows of `rows` and, where they are folded, the states of `slots`."""
    states, indices, _, has_state, first_slot, _ = slots
    tail, positions, sources, parents, accepted_rows, settle = rows
    tail, of_split = tail[:4], tail[4:]
    more = ()
    if has_state is not None or first_slot or sources is not None or parents is not None or (
            accepted_rows is not None or settle or head_map or options or of_split != (None, None, None)):
        more = has_state, first_slot, sources, parents, accepted_rows, settle, head_map, options, *of_split
    _call(ops.update_with_tail, (q, k, v, g, beta, o, states, indices, *tail, positions, *parameters, *lengths, decode,
                                 *modes, *more))


def update_with_ring(q, k, v, g, beta, o, slots, ring, counts, flush, parameters, modes, head_map, options):
    """Writes o, the rows of `ring` and, where they are folded, the states of `slots`."""
    _call(ops.update_with_ring, (q, k, v, g, beta, o, slots.states, slots.indices, *ring, counts, flush, *parameters,
                                 *modes, slots.first_slot, head_map, options))


def new_states(q, v, state_v_first, slots):
    K, (HV, V) = q.shape[-1], v.shape[2:]
    return q.new_empty((slots, HV, V, K) if state_v_first else (slots, HV, K, V), dtype=state_type(q))
