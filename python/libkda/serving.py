# SPDX-License-Identifier: Apache-2.0
"""prefill, decode and verify of an engine, on a pool of states that is updated in place, on CPU and CUDA tensors.

Shapes of all three. N sequences; B = N rows of T tokens, or B = 1 with their tokens after each other.

    q, k                   [B, T, H, K]     fp32, bf16 or fp16, each its own; last dimension contiguous
    v, out                 [B, T, HV, V]
    g                      [B, T, HV, K]    log decay in nats, or raw with use_gate_in_kernel
    beta                   [B, T, HV]       step size, or a logit with use_beta_sigmoid_in_kernel
    pool                   [slots, HV, K, V]   fp32 or bf16, any stride between slots; [.., V, K] with state_v_first
    slots                  [N]              any integers; verify: [N, S], the state after token t goes to slot [n, t]
    cu_seqlens             [N + 1]          int32 or int64, where q is or on the host; repeated values: no tokens
    has_state              [N]              bool; False: the sequence starts from zero, whatever its slot holds
    num_accepted_tokens    [N]              any integers
    A_log, dt_bias         [HV], [HV * K]

K and V are at most 256, HV is a multiple of H, scale is K ** -0.5 unless it is given. A slot is written by one sequence
of a call, and read by no other one.

A slot below first_slot, and any negative one, means none: nothing is read or written of the pool and o is 0. Any
number of sequences may name such a slot, as the padded rows of a CUDA graph do. In an `out` of the caller's, decode
and verify leave the rows of such a sequence as they were, unless first_slot is above 0. On a GPU a slot beyond the pool
means none too. Tensors as in the table are read as they lie, and nothing is gathered.

gate: use_gate_in_kernel takes g raw, A_log and dt_bias: a softplus gate, which needs A_log, or with lower_bound a
bounded one. Each returns o [B, T, HV, V] of v's type, or `out`, of its own type. TypeError and ValueError name the
argument; nothing is written then. NotImplementedError: a gradient is asked for, of which there are none.
"""
from __future__ import annotations

import torch

from ._checks import checked
from ._rules import FlaError
from .kda import _MOST_DECODE_TOKENS, _check_beta, _update_pool


def _run(q, k, v, g, beta, pool, slots, accepted, cu_seqlens, has_state, first_slot, out, A_log, dt_bias, scale,
         lower_bound, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, use_qk_l2norm_in_kernel,
         state_v_first):
    if allow_neg_eigval:
        _check_beta(use_beta_sigmoid_in_kernel)
    if out is not None and out.shape != v.shape:
        raise FlaError(f"out must have the shape of v, {list(v.shape)}, got {list(out.shape)}")
    return _update_pool(q, k, v, g, beta, pool, "slots", slots, accepted, A_log, dt_bias, cu_seqlens, has_state,
                        first_slot, out, scale, lower_bound, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
                        allow_neg_eigval, use_qk_l2norm_in_kernel, state_v_first)


@checked()
def prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
            pool: torch.Tensor, slots: torch.Tensor, *, cu_seqlens: torch.Tensor | None = None,
            has_state: torch.Tensor | None = None, first_slot: int = 0, out: torch.Tensor | None = None,
            A_log: torch.Tensor | None = None, dt_bias: torch.Tensor | None = None, scale: float | None = None,
            lower_bound: float | None = None, use_gate_in_kernel: bool = False,
            use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
            use_qk_l2norm_in_kernel: bool = False, state_v_first: bool = False) -> torch.Tensor:
    """Prompts, whole or the next piece of them: sequence n goes on from the state in slots[n], or with has_state[n]
    False from zero, and leaves its final state there. Shapes: the table of this module."""
    _expect_dimensions(slots, 1)
    return _run(q, k, v, g, beta, pool, slots, None, cu_seqlens, has_state, first_slot, out, A_log, dt_bias, scale,
                lower_bound, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
                use_qk_l2norm_in_kernel, state_v_first)


@checked()
def decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
           pool: torch.Tensor, slots: torch.Tensor, *, cu_seqlens: torch.Tensor | None = None,
           has_state: torch.Tensor | None = None, first_slot: int = 0, out: torch.Tensor | None = None,
           A_log: torch.Tensor | None = None, dt_bias: torch.Tensor | None = None, scale: float | None = None,
           lower_bound: float | None = None, use_gate_in_kernel: bool = False,
           use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
           use_qk_l2norm_in_kernel: bool = False, state_v_first: bool = False) -> torch.Tensor:
    """The next token of each sequence, or without cu_seqlens up to 8 of them, by the decode kernel: fp32 arithmetic,
    one read and one write of each state. With cu_seqlens it takes that kernel where T is N; other packed calls run
    prefill's. Made for CUDA graphs (docs/engines.md). Shapes: the table of this module."""
    _expect_dimensions(slots, 1)
    if cu_seqlens is None and q.shape[1] > _MOST_DECODE_TOKENS:
        raise ValueError(f"q must have at most {_MOST_DECODE_TOKENS} tokens a sequence for decode, got {q.shape[1]}; "
                         f"prefill takes any number")
    return _run(q, k, v, g, beta, pool, slots, None, cu_seqlens, has_state, first_slot, out, A_log, dt_bias, scale,
                lower_bound, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
                use_qk_l2norm_in_kernel, state_v_first)


@checked()
def verify(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
           pool: torch.Tensor, slots: torch.Tensor, num_accepted_tokens: torch.Tensor | None = None, *,
           cu_seqlens: torch.Tensor | None = None, has_state: torch.Tensor | None = None, first_slot: int = 0,
           out: torch.Tensor | None = None, A_log: torch.Tensor | None = None, dt_bias: torch.Tensor | None = None,
           scale: float | None = None, lower_bound: float | None = None, use_gate_in_kernel: bool = False,
           use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
           use_qk_l2norm_in_kernel: bool = False, state_v_first: bool = False) -> torch.Tensor:
    """Drafts: as decode, of up to min(S, 8) tokens: the last sure one, then the drafts. The state after token t goes to
    slots[n, t] of [N, S], S > 1, so nothing has to be undone for a rejected token; no slot there leaves out that store
    alone. It starts from slots[n, num_accepted_tokens[n] - 1]: the count is of the call before, its first token
    included, and 1 if num_accepted_tokens is None. A sequence is skipped if its count is outside of 1 to S, or its
    start no slot. Shapes: the table of this module."""
    _expect_dimensions(slots, 2)
    if slots.shape[1] < 2:
        raise ValueError(f"slots must have at least 2 columns for verify, got {list(slots.shape)}; decode takes one")
    return _run(q, k, v, g, beta, pool, slots, num_accepted_tokens, cu_seqlens, has_state, first_slot, out, A_log,
                dt_bias, scale, lower_bound, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
                use_qk_l2norm_in_kernel, state_v_first)


def _expect_dimensions(slots, dimensions):
    """What the kernels take of another kind of step; checked() says which shape is meant."""
    if slots.dim() != dimensions:
        raise ValueError(f"slots must have {dimensions} dimensions, got {list(slots.shape)}")
