# SPDX-License-Identifier: Apache-2.0
"""prefill, decode, verify and fused_decode of an engine, on a pool of states that is updated in place.

Tensors are on the CPU or on a CUDA device.

Shapes of the first three. N sequences; B = N rows of T tokens, or B = 1 with their tokens after each other.

    q, k                   [B, T, H, K]     fp32, bf16 or fp16, each its own; last dimension contiguous
    v, out                 [B, T, HV, V]
    g                      [B, T, HV, K]    log decay in nats, or raw with use_gate_in_kernel; [B, T, HV]: one a head
    beta                   [B, T, HV]       step size, or a logit with use_beta_sigmoid_in_kernel
    pool                   [slots, HV, K, V]   fp32 or bf16, any stride between slots; [.., V, K] with state_v_first
    slots                  [N]              any integers; verify: [N, S], the state after token t goes to slot [n, t]
    drafts                 [rows, HV, K, V]   as pool, of a type of its own; with it verify leaves pool as it is
    draft_slots            [N, S]           any integers: rows of drafts; slots is [N] then
    parents                [N, S]           any integers: the tokens of a sequence are a tree
    checkpoints            [rows, HV, K, V]   as pool, of a type of its own; it may be the pool
    checkpoint_offsets     [N]              any integers: tokens of the sequence in front of its checkpoint
    checkpoint_slots       [N]              any integers: rows of checkpoints
    cu_seqlens             [N + 1]          int32 or int64, where q is or on the host; repeated values: no tokens
    cu_seqlens_cpu         [N + 1]          the same on the host, where a copy is at hand: the call has a launch less
    has_state              [N]              bool; False: the sequence starts from zero, whatever its slot holds
    num_accepted_tokens    [N]              any integers, 1 to S
    A_log, dt_bias         [HV], [HV * K], or [HV] beside a g [.., HV]
    tail                                    of libkda.tail: pool has boundary states, and a step writes rows of the tail
                                            in place of states. positions, sources, accepted_rows: libkda.tails

K and V are at most 256, HV is a multiple of H (head_map as of libkda.chunk_kda), scale is K ** -0.5 unless it is given.
A slot is written by one sequence of a call, and read by no other one. A sequence without tokens leaves its initial
state in its slot, zero where has_state is False.

A slot below first_slot, and any negative one, means none: nothing is read or written of the pool and o is 0, in an
`out` too. Any number of sequences may name such a slot, as the padded rows of a CUDA graph do. A draft_slots or
checkpoint_slots below first_slot, or a negative one, stores no state. On a GPU a slot beyond its buffer means none too.
Tensors as in the table are read as they lie, and nothing is gathered.

gate: use_gate_in_kernel takes g raw, A_log and dt_bias: a softplus gate, which needs A_log, or with lower_bound a
bounded one. Each returns o [B, T, HV, V] of v's type, or `out`, of its own type. TypeError and ValueError name the
argument; nothing is written then. NotImplementedError: a gradient is asked for, of which there are none.
plan_options: as of libkda.chunk_kda.
"""
from __future__ import annotations

import torch

from . import layer
from ._binding import layer_ops
from ._binding.checks import checked, int32_of
from ._binding.kernels import is_one_kernel
from ._binding.operands import Modes, beside_of, dense, expect_dimensions, modes_of, parameter_of, slots_of
from ._binding.options import Options
from ._binding.rules import LAST_SLOT, integer, number
from .ops import BETA_SIGMOID, GATE_BOUNDED, GATE_SOFTPLUS
from .kda import _MOST_DECODE_TOKENS, _expect_shape_of_v, _update_pool
from .tails import Tail, rows_of_call


@checked()
def prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
            pool: torch.Tensor, slots: torch.Tensor, *, cu_seqlens: torch.Tensor | None = None,
            cu_seqlens_cpu: torch.Tensor | None = None, has_state: torch.Tensor | None = None, first_slot: int = 0,
            out: torch.Tensor | None = None, A_log: torch.Tensor | None = None, dt_bias: torch.Tensor | None = None,
            scale: float | None = None,
            lower_bound: float | None = None, use_gate_in_kernel: bool = False,
            use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
            use_qk_l2norm_in_kernel: bool = False, state_v_first: bool = False,
            checkpoints: torch.Tensor | None = None, checkpoint_offsets: torch.Tensor | None = None,
            checkpoint_slots: torch.Tensor | None = None, checkpoint_every: int = 16, tail: Tail | None = None,
            positions: torch.Tensor | None = None, sources: torch.Tensor | None = None, head_map: str | None = None,
            plan_options: Options | None = None) -> torch.Tensor:
    """Prompts, whole or the next piece of them: sequence n goes on from the state in slots[n], or with has_state[n]
    False from zero, and leaves its final state there.

    checkpoints: the state behind the first checkpoint_offsets[n] tokens of sequence n goes to
    checkpoints[checkpoint_slots[n]], which may be the pool. Offsets are multiples of checkpoint_every, itself one of
    16, up to the length of the sequence; 0 and below: none. On a GPU nothing waits for them, any other one is none, and
    a checkpoint_every of 64 or more is the fastest. A sequence without a slot starts from zero; its checkpoint is
    stored unless its checkpoint_slots is none too.

    tail: the sequence goes on behind the rows of its tail, and leaves the state of its last multiple of 16 tokens in
    its slot and the 0 to 15 tokens behind it in its tail; no checkpoints are taken then. has_state[n] False starts an
    empty tail and a state of zero at positions[n]. Shapes: the table of this module."""
    expect_dimensions(slots, 1)
    _expect_together(checkpoints=checkpoints, checkpoint_offsets=checkpoint_offsets, checkpoint_slots=checkpoint_slots)
    if out is not None:
        _expect_shape_of_v(out, v)
    modes = modes_of(q, scale, lower_bound, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
                     use_qk_l2norm_in_kernel, state_v_first)
    beside = beside_of(None, None, None, checkpoints, checkpoint_offsets, checkpoint_slots, checkpoint_every)
    slots = slots_of("slots", pool, slots, None, has_state, first_slot, beside)
    rows = rows_of_call(tail, positions, sources)
    if rows is not None and checkpoints is not None:
        raise ValueError("checkpoints are not taken with a tail, got both")
    return _update_pool(q, k, v, g, beta, slots, A_log, dt_bias, (cu_seqlens, cu_seqlens_cpu),
                        modes, out, head_map, plan_options, rows)


@checked()
def decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
           pool: torch.Tensor, slots: torch.Tensor, *, cu_seqlens: torch.Tensor | None = None,
           cu_seqlens_cpu: torch.Tensor | None = None, has_state: torch.Tensor | None = None, first_slot: int = 0,
           out: torch.Tensor | None = None, A_log: torch.Tensor | None = None, dt_bias: torch.Tensor | None = None,
           scale: float | None = None,
           lower_bound: float | None = None, use_gate_in_kernel: bool = False,
           use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
           use_qk_l2norm_in_kernel: bool = False, state_v_first: bool = False, tail: Tail | None = None,
           positions: torch.Tensor | None = None, sources: torch.Tensor | None = None,
           accepted_rows: torch.Tensor | None = None, head_map: str | None = None,
           plan_options: Options | None = None) -> torch.Tensor:
    """The next token of each sequence, or without cu_seqlens up to 8 of them, by the decode kernel: fp32 arithmetic,
    one read and one write of each state. With cu_seqlens it takes that kernel where T is N; other packed calls run
    prefill's. Made for CUDA graphs (docs/engines.md).

    tail: the tokens become rows of the tail, and 16 of them and more that are sure are folded into the state before; it
    takes up to R - 15 tokens a sequence, packed too. Shapes: the table of this module."""
    expect_dimensions(slots, 1)
    if tail is None:
        _expect_few_tokens("decode", q, cu_seqlens, _MOST_DECODE_TOKENS, "prefill takes any number")
    if out is not None:
        _expect_shape_of_v(out, v)
    modes = modes_of(q, scale, lower_bound, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
                     use_qk_l2norm_in_kernel, state_v_first)
    slots = slots_of("slots", pool, slots, None, has_state, first_slot)
    rows = None
    if tail is not None or positions is not None or sources is not None or accepted_rows is not None:
        rows = rows_of_call(tail, positions, sources, None, accepted_rows)
    return _update_pool(q, k, v, g, beta, slots, A_log, dt_bias, (cu_seqlens, cu_seqlens_cpu),
                        modes, out, head_map, plan_options, rows, True)


@checked()
def verify(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
           pool: torch.Tensor, slots: torch.Tensor, num_accepted_tokens: torch.Tensor | None = None, *,
           cu_seqlens: torch.Tensor | None = None, cu_seqlens_cpu: torch.Tensor | None = None,
           has_state: torch.Tensor | None = None, first_slot: int = 0, out: torch.Tensor | None = None,
           A_log: torch.Tensor | None = None, dt_bias: torch.Tensor | None = None,
           scale: float | None = None, lower_bound: float | None = None, use_gate_in_kernel: bool = False,
           use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
           use_qk_l2norm_in_kernel: bool = False, state_v_first: bool = False, drafts: torch.Tensor | None = None,
           draft_slots: torch.Tensor | None = None, parents: torch.Tensor | None = None, tail: Tail | None = None,
           positions: torch.Tensor | None = None, sources: torch.Tensor | None = None,
           accepted_rows: torch.Tensor | None = None, head_map: str | None = None,
           plan_options: Options | None = None) -> torch.Tensor:
    """Drafts: as decode, of up to min(S, 8) tokens: the last sure one, then the drafts. The state after token t goes to
    slots[n, t] of [N, S], S > 1, so nothing has to be undone for a rejected token; no slot there leaves out that store
    alone. It starts from slots[n, num_accepted_tokens[n] - 1]: the count is of the call before, its first token
    included, and 1 if num_accepted_tokens is None. A sequence is skipped if its start is no slot. A count outside of 1
    to S is refused, or on a GPU skips the sequence. A sequence without tokens stores nothing, whatever its has_state: a
    new request in an old slot has has_state False until a call has a token of it.

    drafts: it starts from slots[n] of [N], the pool stays as it is, and the state after token t goes to
    drafts[draft_slots[n, t]]. parents: token t > 0 follows token parents[n, t] < t of its sequence, whose state must
    have a slot unless it is token t - 1; parents[n, 0] is not looked at, and a negative one ends the sequence before
    that token: rows of o from there on are those of a skipped sequence. Any other parent is refused, or on a GPU ends
    it too. The next call goes on from the column of the last accepted token: its num_accepted_tokens is that column + 1
    where slots is [N, S].

    tail: slots is [N], the tokens become rows of the tail, up to R - 15 a sequence, and no state is written but by
    folds of sure rows. The next call's positions says how many of them stay; of a tree its accepted_rows says which.
    parents is [N, S] of any S then, and needs no slots. Shapes: the table of this module."""
    rows = rows_of_call(tail, positions, sources, parents, accepted_rows)
    if rows is None:
        _expect_columns(q, slots, num_accepted_tokens, cu_seqlens, drafts, draft_slots)
        beside = beside_of(drafts, draft_slots, parents)
    else:
        expect_dimensions(slots, 1)
        for name, given in (("num_accepted_tokens", num_accepted_tokens), ("drafts", drafts),
                            ("draft_slots", draft_slots)):
            if given is not None:
                raise ValueError(f"{name} is not taken with a tail, whose positions say what was accepted; got both")
        beside = None
    if out is not None:
        _expect_shape_of_v(out, v)
    modes = modes_of(q, scale, lower_bound, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
                     use_qk_l2norm_in_kernel, state_v_first)
    slots = slots_of("slots", pool, slots, num_accepted_tokens, has_state, first_slot, beside)
    return _update_pool(q, k, v, g, beta, slots, A_log, dt_bias, (cu_seqlens, cu_seqlens_cpu),
                        modes, out, head_map, plan_options, rows, True)


@checked()
def fused_decode(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, conv_state: torch.Tensor,
                 raw_g: torch.Tensor, raw_beta: torch.Tensor, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None,
                 state_indices: torch.Tensor | None, state: torch.Tensor, out: torch.Tensor | None = None,
                 lower_bound: float | None = None, output_gate: torch.Tensor | None = None,
                 norm_weight: torch.Tensor | None = None, norm_eps: float = 1e-5, *, activation: str | None = "sigmoid",
                 scale: float | None = None, has_state: torch.Tensor | None = None, first_slot: int = 1,
                 state_v_first: bool = True) -> torch.Tensor:
    """A decode step of a whole layer, with the 15 arguments of vLLM's fused_kda_decode: short convolution with SiLU of
    q, k and v, KDA with q and k normed, raw gates and logits of beta, then the gated RMS norm. Both pools in place.

        x             [N, 3 * H * D] or [N, T, 3 * H * D]   q, k and v after each other; T is at most 8
        weight, bias  [3 * H * D, W] or [3, W, H * D]; [3 * H * D]
        conv_state    [slots, 3 * H * D, S]                 S at least W - 1, any strides
        raw_g, out    [1, N, H, D] or [N, T, H, D]
        raw_beta      [1, N, H] or [N, T, H]
        A_log, dt_bias  [H], [H * D], fp32
        state_indices [N]                                   slots of both pools; below first_slot: none, and out is 0.
                                                            Without them sequence n has slot n
        state         [slots, H, D, D]                      [.., V, K], without state_v_first [.., K, V]; fp32 or bf16
        output_gate   [N, H, D], [1, N, H, D] or [N, T, H, D]; activation: "sigmoid", "silu" or None
        norm_weight   [D]; without it there is neither norm nor gate
        has_state     [N], bool; False: from zero

    Other tensors are fp32, bf16 or fp16, each its own. Without lower_bound the gate is softplus. One kernel on a GPU
    where D is 128 and the heads of `state` are dense; elsewhere three convolutions, decode and the norm, one after the
    other, with fp32 between them. Returns out, by default of x's type and raw_g's shape.
    """
    gate = layer._activation(activation, ("sigmoid", "silu", "swish", None))
    norm_eps = number("norm_eps", norm_eps)
    first_slot = 0 if state_indices is None else integer("first_slot", first_slot, 0, LAST_SLOT)
    N, T = x.shape[0], x.shape[1] if x.dim() == 3 else 1
    if not 1 <= T <= _MOST_DECODE_TOKENS:
        raise ValueError(f"x must have 1 to {_MOST_DECODE_TOKENS} tokens a sequence, got {T}")
    H, D = raw_g.shape[-2:]
    for name, given, sizes in (("raw_g", raw_g, (H, D)), ("raw_beta", raw_beta, (H,)),
                               ("output_gate", output_gate, (H, D)), ("out", out, (H, D))):
        if given is not None:
            _expect_tokens(name, given, N, T, sizes, x)
    if out is None:
        out = x.new_empty(raw_g.shape)
    if A_log is None and lower_bound is None:
        raise ValueError("A_log is required by a softplus gate")
    modes = Modes(GATE_SOFTPLUS if lower_bound is None else GATE_BOUNDED, BETA_SIGMOID,
                  -5.0 if lower_bound is None else number("lower_bound", lower_bound),
                  D ** -0.5 if scale is None else number("scale", scale), True, bool(state_v_first))
    slots = None if state_indices is None else int32_of("state_indices", state_indices)
    taps = weight if weight.dim() == 3 else weight.unflatten(0, (3, -1)).transpose(1, 2)
    o = out.view(N, T, H, D)
    layer_ops.fused_decode(x.reshape(N, T, -1), taps, bias, conv_state, raw_g.reshape(N, T, H, D),
                            raw_beta.reshape(N, T, H), parameter_of(A_log), parameter_of(dt_bias), slots, state, o,
                            None if output_gate is None else output_gate.reshape(N, T, H, D), norm_weight,
                            None if has_state is None else dense(has_state), *modes.without_layout,
                            norm_eps, gate, first_slot, modes.state_v_first)
    if slots is not None and norm_weight is not None and not (state.is_cuda and is_one_kernel(state)):
        # The norm and its gate make of the zeros of a sequence without a slot what they are.
        without = (slots < first_slot) | (slots >= len(state))
        o.masked_fill_(without[:, None, None, None], 0)
    return out


def _expect_tokens(name, given, N, T, sizes, x):
    """That a tensor has an entry for each token of x: [N, T, *sizes], or of one token a row [1, N, *sizes], or for
    output_gate [N, *sizes]."""
    forms = [(N, T, *sizes)] + ([(1, N, *sizes)] if T == 1 else [])
    if name == "output_gate" and T == 1:
        forms.append((N, *sizes))
    if tuple(given.shape) not in forms:
        raise ValueError(f"{name} must have shape {' or '.join(str(list(form)) for form in forms)} (tokens of x, "
                         f"{list(x.shape)}), got {list(given.shape)}")


def _expect_few_tokens(function, q, cu_seqlens, most, hint):
    if cu_seqlens is None and q.shape[1] > most:
        raise ValueError(f"q must have at most {most} tokens a sequence for {function}, got {q.shape[1]}; {hint}")


def _expect_columns(q, slots, num_accepted_tokens, cu_seqlens, drafts, draft_slots):
    """What verify takes where it writes a state a token."""
    _expect_together(drafts=drafts, draft_slots=draft_slots)
    if drafts is not None and num_accepted_tokens is not None:
        raise ValueError("num_accepted_tokens counts columns of slots in the pool; with drafts, slots names the state "
                         "to start from")
    name, columns = ("slots", slots) if draft_slots is None else ("draft_slots", draft_slots)
    expect_dimensions(slots, 2 if drafts is None else 1)
    if columns.dim() == 2 and columns.shape[1] < 2:
        raise ValueError(f"{name} must have at least 2 columns for verify, got {list(columns.shape)}; decode takes one")
    _expect_few_tokens("verify", q, cu_seqlens, _MOST_DECODE_TOKENS, f"{name} has a column a token")


def _expect_together(**arguments):
    missing = [name for name, x in arguments.items() if x is None]
    if missing and len(missing) < len(arguments):
        *names, last = arguments
        raise ValueError(f"{', '.join(names)} and {last} are given together, got no {' and no '.join(missing)}")
