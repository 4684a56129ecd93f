# SPDX-License-Identifier: Apache-2.0
"""Prompts over several ranks, on pools of states that are updated in place."""
from __future__ import annotations

from typing import Any

import torch

from .. import ops
from .._binding.operands import as_type, expect_distinct, modes_of, parameters_of
from .._binding.options import refuse_beside
from .._binding.rules import LAST_SLOT, integer
from . import attention
from .contexts import Context

_INTEGERS = (torch.int32, torch.int64)


def prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
            pool: torch.Tensor, slots: torch.Tensor, *, context: Context, has_state: torch.Tensor | None = None,
            first_slot: int = 0, A_log: torch.Tensor | None = None, dt_bias: torch.Tensor | None = None,
            scale: float | None = None, lower_bound: float | None = None, use_gate_in_kernel: bool = False,
            use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
            use_qk_l2norm_in_kernel: bool = False, state_v_first: bool = False) -> torch.Tensor:
    """Prompts, whole or the next piece of them, as libkda.serving.prefill computes them in one process.

    Rows are those of chunk_kda with `cp_context`: the tokens of this rank, B = 1. pool [slots, HV, K, V], fp32 or bf16
    ([.., V, K] with state_v_first): each rank has one of its own. slots [N], int32 or int64, and has_state [N], bool,
    are of all N sequences of the context, on every rank the same, where q is. Sequence n goes on from the state in
    slots[n] of the rank that begins it, or with has_state[n] False from zero. Its final state goes to slots[n]: of the
    rank that ends it, or with the context's final_states = "all" of every rank, so that its next piece may begin
    anywhere.

    A slot below first_slot and any negative one mean none: nothing is read or written, and o is 0. On a GPU one beyond
    the pool means none too. Other slots are of one sequence each, which is looked at where they are on a CPU. Returns
    o of q's type. Never waits for the device. There are no gradients.
    Raises TypeError and ValueError that name the argument, on every rank, and NotImplementedError where a gradient is
    asked for; nothing is written then.
    """
    if not isinstance(context, Context):
        raise TypeError(f"context must be a libkda.context_parallel.Context, got {type(context).__name__}")
    valid: Any = None  # which of `slots` are slots

    def read():
        nonlocal valid
        if ops.differentiates(q, k, v, g, beta, A_log, dt_bias, pool):
            raise NotImplementedError("libkda: prefill has no gradients; chunk_kda has, with `cp_context`")
        refuse_beside("context", None)
        first = integer("first_slot", first_slot, 0, LAST_SLOT)
        modes = modes_of(q, scale, lower_bound, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
                         use_qk_l2norm_in_kernel, state_v_first)
        _expect(context, q, v, pool, slots, has_state, state_v_first, first)
        valid = (slots >= first) & (slots < len(pool))
        states = _starting_states(context, pool, slots, valid if has_state is None else valid & has_state)
        more = ("function", "prefill"), ("the type of pool", pool.dtype), ("first_slot", first)
        return attention.Options(*parameters_of(A_log, dt_bias, modes), states, modes, True, more)

    o, final = attention.chunk_kda(context, q, k, v, g, beta, read)
    written = slice(None) if context.final_states == "all" else context._table("ends", q.device)
    _store(pool, slots[written], valid[written], final)
    return as_type(o.masked_fill_(~valid[context._table("tokens", q.device)][None, :, None, None], 0), q.dtype)


def _starting_states(context, pool, slots, read):
    """Of the sequences that begin on this rank; `read`: which of all sequences go on from their slots."""
    begins = context._table("begins", slots.device)
    read, mine = read[begins], torch.where(read, slots, 0)[begins]
    # An old state may hold anything.
    return torch.where(read[:, None, None, None], pool.index_select(0, mine).float(), 0.0)


def _expect(context, q, v, pool, slots, has_state, state_v_first, first_slot):
    HV, K, V = v.shape[2], q.shape[3], v.shape[3]
    shape = (HV, V, K) if state_v_first else (HV, K, V)
    if not isinstance(pool, torch.Tensor) or pool.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"pool must be a float32 or bfloat16 tensor, got {getattr(pool, 'dtype', type(pool).__name__)}")
    if pool.dim() != 4 or tuple(pool.shape[1:]) != shape or len(pool) == 0:
        raise ValueError(f"pool must have shape [slots, {', '.join(map(str, shape))}] with at least one slot, got "
                         f"{list(pool.shape)}")
    expect_distinct("pool", pool)
    if first_slot > len(pool):
        raise ValueError(f"first_slot = {first_slot} is above {len(pool)}, the number of slots of pool")
    for name, x, types in (("slots", slots, _INTEGERS), ("has_state", has_state, (torch.bool,))):
        if x is None and name == "has_state":
            continue
        if not isinstance(x, torch.Tensor) or x.dtype not in types:
            raise TypeError(f"{name} must be a tensor of {' or '.join(str(t)[6:] for t in types)}, got "
                            f"{getattr(x, 'dtype', type(x).__name__)}")
        if tuple(x.shape) != (context.num_sequences,):
            raise ValueError(f"{name} must have shape [{context.num_sequences}], got {list(x.shape)}")
    for name, x in (("pool", pool), ("slots", slots), ("has_state", has_state)):
        if x is not None and x.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}")
    expect_distinct("pool", pool)
    if slots.device.type == "cpu":
        beyond = (slots >= len(pool)).nonzero().flatten().tolist()
        if beyond:
            raise ValueError(f"slots: entry {beyond[0]} = {slots[beyond[0]]} is outside 0..{len(pool) - 1} (a negative "
                             f"one means none)")
        used = sorted(slots[slots >= first_slot].tolist())
        twice = [slot for slot, next_slot in zip(used, used[1:]) if slot == next_slot]
        if twice:
            raise ValueError(f"slots: slot {twice[0]} would be written twice")


def _store(pool, slots, valid, states):
    """states [n] to their slots, where these are valid. A place without one is a copy of a place that has one, if there
    is any, and else of what slot 0 holds: nothing else is written, and no host asks which they are."""
    if not len(slots):
        return
    one = valid.int().argmax()  # the first that is valid, else 0
    any_valid = valid.any()
    slots = torch.where(valid, slots, torch.where(any_valid, slots[one], 0)).long()
    states = states.to(pool.dtype)
    other = torch.where(any_valid, states[one], pool[0])
    pool.index_copy_(0, slots, torch.where(valid[:, None, None, None], states, other))
