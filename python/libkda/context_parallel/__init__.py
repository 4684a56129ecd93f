# SPDX-License-Identifier: Apache-2.0
"""Sequences over several processes: context parallelism through torch.distributed (docs/design/many_cards.md).

    context = context_parallel.contiguous(cu_seqlens, group)        # or zigzag(), or Context(): any fragments
    mine = context.take(x, dim=1)                                   # the tokens of this rank
    o, final_state = libkda.chunk_kda(q, k, v, g, beta, cp_context=context, ...)
    y = context_parallel.causal_conv1d(x, weight, context=context)
    o = context_parallel.prefill(q, k, v, g, beta, pool, slots, context=context, ...)  # states in a pool

Tensors are those of this rank: B = 1, the tokens of its fragments after each other. Every rank makes the same calls in
the same order. There is one all-gather in a forward and one in its backward.

Gradients of A_log and dt_bias are of the tokens of this rank: add them up over the group, as data parallelism does.
"""
from __future__ import annotations

from .contexts import Context, Exchange, Span, contiguous, zigzag
from .convolution import causal_conv1d
from .serving import prefill

__all__ = ["Context", "Exchange", "Span", "causal_conv1d", "contiguous", "prefill", "zigzag"]
