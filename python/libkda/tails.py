# SPDX-License-Identifier: Apache-2.0
"""Tails: the tokens of sequences since the boundary states of a pool (docs/design/decode.md, "Tails").

With tail= of prefill, decode and verify a pool holds the state in front of a sequence's last tokens, and a Tail holds
these tokens, in slots of the same numbers. A step reads the state, appends rows to the tail and writes no state; every
16 tokens rows are folded into the state. A rejected draft is a row that the next call overwrites.

    tail = libkda.tail(len(pool), H, HV, K, V, rows=16 + drafts)
    libkda.prefill(q, k, v, g, beta, pool, slots, tail=tail, positions=done, has_state=done > 0, cu_seqlens=cu_seqlens)
    libkda.decode(q, k, v, g, beta, pool, slots, tail=tail, positions=done)      # done: tokens before the call, [N]
    libkda.verify(q, k, v, g, beta, pool, slots, tail=tail, positions=done)      # then done += 1 + accepted drafts
    libkda.settle(pool, slots, tail=tail, positions=done)                        # plain states, as without a tail

    positions              [N]              any integers: tokens of the sequence before the call that are sure
    sources                [N]              any integers: slots to read boundary states from until the first fold; a
                                            negative one, or one below first_slot: the sequence's own
    parents                [N, S]           any integers, of verify: the tokens of a sequence are a tree
    accepted_rows          [N, columns]     any integers, of decode, verify and settle: the tokens of the call before
                                            that stay, ascending, negative ones behind them; positions counts them

With split boundary states (split=True, a pool of bfloat16) the error of o is below 2.5e-3 however long a sequence is,
that of states below 1e-5, and a step reads half of what fp32 states take: a number of a state is 16 bits in the pool,
which tokens read, and 16 bits in tail.rest, which folds read and write too. Copy a slot's rest with its state.

    joined = libkda.join_states(pool[slots], tail.rest[slots])       # of settled slots: float32
    pool[slots], tail.rest[slots] = libkda.split_states(states)      # of float32 states, to begin tails from

All calls of a slot have the gate parameters, the gate mode and the norm that its first call had, since a tail holds
keys and gates as they came in, and with split states the mode of beta. Rows of a tail are the states' device's and are
written in place.
"""
from __future__ import annotations

from typing import NamedTuple

import torch

from ._binding.checks import checked, int32_of
from ._binding.operands import TailRows, expect_dimensions, modes_of, slots_of
from ._binding.options import Options
from ._binding.rules import LAST_SLOT, MOST_CHANNELS, MOST_TAIL_ROWS, ROWS, TAIL_BOUNDARY, integer, refuse_type
from .kda import _update_pool


class Tail(NamedTuple):
    """Tails of the slots of a pool. An engine may make one of tensors of its own: any stride between slots, heads and
    rows, the last dimension contiguous. R is 16 to 256; the row of position p is p mod R."""
    k: torch.Tensor  #: [slots, H, R, K], of the type of k: keys as they came in
    g: torch.Tensor  #: [slots, HV, R, K], of the type of g, raw as they came in; one gate a head: [slots, HV, R]
    v_new: torch.Tensor  #: [slots, HV, R, V], float32
    folded: torch.Tensor  #: [slots, HV], int32: tokens in front of the state; -1: no tail. Write it for a state at hand
    rest: torch.Tensor | None = None  #: of split states, else all three None: as the pool, int16
    v: torch.Tensor | None = None  #: [slots, HV, R, V], of the type of v, as they came in
    beta: torch.Tensor | None = None  #: [slots, HV, R], of the type of beta


def tail(slots: int, H: int, HV: int, K: int, V: int, *, rows: int = TAIL_BOUNDARY,
         dtype: torch.dtype = torch.bfloat16, gate_dtype: torch.dtype | None = None, one_gate: bool = False,
         split: bool = False, value_dtype: torch.dtype | None = None, beta_dtype: torch.dtype | None = None,
         state_v_first: bool = False, device: torch.device | str | int | None = None) -> Tail:
    """Tails of `slots` slots without tokens, for H heads of K channels of k and HV of V channels of v. rows: R, 16 and
    the most drafts of a step; a step takes up to R - 15 tokens. dtype, gate_dtype: types of the k and g of the calls,
    float32, bfloat16 or float16, the second by default the first. one_gate: g is [B, T, HV]. split: boundary states
    are split; value_dtype and beta_dtype are those of v and beta then, by default dtype, and state_v_first says how the
    pool lies. Raises TypeError or ValueError that names the argument. In bytes, with rows of 16 bits: slots * R *
    (2 H K + 2 HV K + 4 HV V), and with split slots * HV * (2 K V + R * (2 V + 2)) more."""
    slots = integer("slots", slots, 0, LAST_SLOT)
    H, HV = (integer(name, heads, 1, LAST_SLOT) for name, heads in (("H", H), ("HV", HV)))
    if HV % H:
        raise ValueError(f"HV must be a multiple of H = {H}, got {HV}")
    K, V = (integer(name, channels, 1, MOST_CHANNELS) for name, channels in (("K", K), ("V", V)))
    R = integer("rows", rows, TAIL_BOUNDARY, MOST_TAIL_ROWS)
    if not split and (value_dtype is not None or beta_dtype is not None or state_v_first):
        name = "value_dtype" if value_dtype is not None else "beta_dtype" if beta_dtype is not None else "state_v_first"
        raise ValueError(f"{name} belongs to split states, got split=False")
    gate_dtype, value_dtype, beta_dtype = (dtype if x is None else x for x in (gate_dtype, value_dtype, beta_dtype))
    for name, given in (("dtype", dtype), ("gate_dtype", gate_dtype), ("value_dtype", value_dtype),
                        ("beta_dtype", beta_dtype)):
        if given not in (torch.float32, torch.bfloat16, torch.float16):
            raise refuse_type(name, ROWS, given)
    made = Tail(torch.empty(slots, H, R, K, dtype=dtype, device=device),
                torch.empty((slots, HV, R) if one_gate else (slots, HV, R, K), dtype=gate_dtype, device=device),
                torch.empty(slots, HV, R, V, dtype=torch.float32, device=device),
                torch.full((slots, HV), -1, dtype=torch.int32, device=device))
    if not split:
        return made
    state = (V, K) if state_v_first else (K, V)
    return made._replace(rest=torch.empty(slots, HV, *state, dtype=torch.int16, device=device),
                         v=torch.empty(slots, HV, R, V, dtype=value_dtype, device=device),
                         beta=torch.empty(slots, HV, R, dtype=beta_dtype, device=device))


def split_states(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 states as split ones: bfloat16, rounded to nearest with ties away from zero, for the pool, and int16 for
    tail.rest. A NaN keeps its sign alone."""
    if states.dtype is not torch.float32:
        raise refuse_type("states", ("float32",), states.dtype)
    bits = states.contiguous().view(torch.int32)
    low = bits & 0xFFFF
    rest = torch.where(states.isnan(), 0, low - ((low & 0x8000) << 1))
    high = torch.where(states.isnan(), bits >> 16 | 0x40, bits - rest >> 16)
    return high.to(torch.int16).view(torch.bfloat16), rest.to(torch.int16)


def join_states(pool: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """All bits of split states, in float32: those of a pool and of tail.rest."""
    if pool.dtype is not torch.bfloat16:
        raise refuse_type("pool", ("bfloat16",), pool.dtype)
    if rest.dtype is not torch.int16:
        raise refuse_type("rest", ("int16",), rest.dtype)
    if rest.shape != pool.shape:
        raise ValueError(f"rest must have the shape of pool, {list(pool.shape)}, got {list(rest.shape)}")
    return ((pool.contiguous().view(torch.int16).int() << 16) + rest.int()).view(torch.float32)


def rows_of_call(tail, positions, sources=None, parents=None, accepted_rows=None, settle=False):
    """A call's part in its tail; None without one."""
    if tail is None:
        if positions is None and sources is None and accepted_rows is None:
            return None
        given = "positions" if positions is not None else "sources" if sources is not None else "accepted_rows"
        raise ValueError(f"{given} belongs to a tail, got no tail")
    if type(tail) is not Tail:
        raise TypeError(f"tail must be a libkda.Tail, got {type(tail).__name__}")
    if positions is None:
        raise ValueError("positions must be given with a tail: the sure tokens of each sequence before the call")
    positions = int32_of("positions", positions)
    if sources is not None:
        sources = int32_of("sources", sources)
    if parents is not None:
        parents = int32_of("parents", parents)
    if accepted_rows is not None:
        accepted_rows = int32_of("accepted_rows", accepted_rows)
    return tuple.__new__(TailRows, (tail, positions, sources, parents, accepted_rows, settle))


@checked()
def settle(pool: torch.Tensor, slots: torch.Tensor, *, tail: Tail, positions: torch.Tensor,
           sources: torch.Tensor | None = None, accepted_rows: torch.Tensor | None = None, first_slot: int = 0,
           A_log: torch.Tensor | None = None, dt_bias: torch.Tensor | None = None, lower_bound: float | None = None,
           use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool | None = None,
           allow_neg_eigval: bool = False, use_qk_l2norm_in_kernel: bool = False, state_v_first: bool = False,
           head_map: str | None = None, plan_options: Options | None = None) -> None:
    """Folds all rows of the sequences' tails, so that pool[slots] are the states behind their `positions` tokens, which
    calls without a tail take. Options as of the calls that made the rows; those of beta are needed with split states,
    whose folds make v_new anew, and use_beta_sigmoid_in_kernel must be given then. A tail goes on from there, too.
    Shapes: the tables of this module and of libkda.serving."""
    expect_dimensions(slots, 1)
    if type(tail) is Tail and tail.rest is not None and use_beta_sigmoid_in_kernel is None:
        raise ValueError("use_beta_sigmoid_in_kernel must be given with split states, as the calls before had it")
    rows = rows_of_call(tail, positions, sources, None, accepted_rows, True)
    N, (H, K), (HV, V) = len(slots), tail.k.shape[1::2], tail.v_new.shape[1::2]
    k = tail.k.new_empty((N, 0, H, K))
    g = tail.g.new_empty((N, 0, HV) if tail.g.dim() == 3 or tail.g.stride(-1) == 0 else (N, 0, HV, K))
    of_v, of_beta = (tail.v_new if x is None else x for x in (tail.v, tail.beta))
    v, beta = of_v.new_empty((N, 0, HV, V)), of_beta.new_empty((N, 0, HV))
    modes = modes_of(k, None, lower_bound, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
                     use_qk_l2norm_in_kernel, state_v_first)
    _update_pool(k, k, v, g, beta, slots_of("slots", pool, slots, None, None, first_slot), A_log, dt_bias,
                 (None, None), modes, v, head_map, plan_options, rows, True)
