# SPDX-License-Identifier: Apache-2.0
"""The short causal convolution over several ranks."""
from __future__ import annotations

import bisect
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from .. import ops
from ..layer import short_conv
from .contexts import Span
from .exchange import Agreed, AllGather, agree, check_place, waited
from .fla import context_of


class _Halo:
    """Which tokens of other spans a causal convolution of a width reads, as rows of three tables after each other: the
    tokens of this rank, the last width - 1 tokens of spans that go on (of all ranks), and one row of zeros."""

    def __init__(self, context, width, device):
        self.reach = width - 1
        sent: list[list[Span]] = [[] for _ in range(context.ranks)]
        for chain in context.chains:
            for span in chain[:-1]:
                if any(other.rank != span.rank for other in chain):
                    sent[span.rank].append(span)
        self.rows = max(len(row) for row in sent)
        slots = {span: rank * self.rows + slot for rank, row in enumerate(sent)
                 for slot, span in enumerate(sorted(row, key=lambda span: span.place))}
        zero = context.num_tokens + context.ranks * self.rows * self.reach
        at = lambda span, token: context.offsets[span.place] + token - span.begin

        def source(span, token):
            if token < context.cu_seqlens_whole[span.sequence]:
                return zero
            chain = context.chains[span.sequence]
            owner = chain[bisect.bisect_right([x.begin for x in chain], token) - 1]
            if owner.rank == context.rank:
                return at(owner, token)
            return context.num_tokens + (slots[owner] + 1) * self.reach - (owner.end - token)

        read, outputs = [], []
        for span in context.spans:
            outputs += range(len(read) + self.reach, len(read) + self.reach + span.end - span.begin)
            read += [source(span, token) for token in range(span.begin - self.reach, span.begin)]
            read += range(at(span, span.begin), at(span, span.begin) + span.end - span.begin)
        #: rows that are read, and which of them have an output: not those in front of a span
        index = lambda places: torch.tensor(places, dtype=torch.int64, device=device)
        self.read, self.outputs = index(read), index(outputs)
        tails = [context.num_tokens] * (self.rows * self.reach)
        for span in sent[context.rank]:
            slot = slots[span] - context.rank * self.rows
            for token in range(max(span.begin, span.end - self.reach), span.end):
                tails[(slot + 1) * self.reach - (span.end - token)] = at(span, token)
        #: tokens of this rank that others read; the one behind the last stands for zeros
        self.sent = index(tails)


class _Tails(torch.autograd.Function):
    """The rows of all ranks that _Halo reads, [ranks * rows * reach, D]."""

    @staticmethod
    def forward(ctx, agreed, halo, x):
        ctx.context, ctx.halo, ctx.tokens = agreed.context, halo, len(x)
        D = x.shape[1]
        gather = _tail_row(agreed, halo, x.dtype)
        gather.mine[:-1] = torch.cat([x, x.new_zeros(1, D)]).index_select(0, halo.sent).flatten()
        gather.start()
        return gather.finish().reshape(-1, D)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_tails):
        context, halo = ctx.context, ctx.halo
        D = d_tails.shape[1]
        rows = d_tails.reshape(context.ranks, -1).contiguous()
        if context.ranks > 1 and halo.rows:
            received = torch.empty_like(rows)
            waited("an exchange", lambda: dist.all_to_all_single(received, rows, group=context.group))
            rows = received
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        d_x = d_tails.new_zeros(ctx.tokens + 1, D).index_copy_(0, halo.sent, total.view(-1, D))
        return None, None, d_x[:-1]


def _tail_row(agreed, halo, dtype):
    return AllGather(agreed, halo.rows * halo.reach * agreed.sizes[0] + 1, halo.rows > 0, dtype)


def causal_conv1d(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, context: Any,
                  activation: str | None = None) -> torch.Tensor:
    """The short causal convolution in front of KDA, a channel at a time, over sequences on several ranks:
    y_t = activation(bias + sum_j weight[:, j] x[t - W + 1 + j]), with zeros before the start of a sequence.

    x [1, T, D]: the tokens of this rank; weight [D, W] or [D, 1, W], W 2 to 4; bias [D]; float32, bfloat16 or
    float16. activation: None, "silu" or "swish". context: a Context or an FLACPContext. Returns y [1, T, D] of x's
    type, by libkda.short_conv, with the bits of one rank. Gradients of all three; those of weight and bias are of the
    tokens of this rank. One all-gather of W - 1 tokens a span forward, one all-to-all backward. Raises TypeError and
    ValueError, on every rank, for what does not fit.
    """
    context = context_of(context, "x", x)

    def look():
        D, W = _conv_sizes(context, x, weight, bias)
        if activation not in (None, "silu", "swish"):
            raise ValueError(f"activation must be None, 'silu' or 'swish', got {activation!r}")
        options = {"function": "causal_conv1d", "activation": activation and "silu",
                   **{f"the type of {name}": None if given is None else given.dtype
                      for name, given in (("x", x), ("weight", weight), ("bias", bias))},
                   "a gradient of x asked for": ops.differentiates(x)}
        return Agreed.of(context, (D, W, x.dtype.itemsize), options, x.device)

    agreed = agree(context, "D, W, bytes of x", look, lambda known: _tail_row(
        known, _halo_of(context, known.sizes[1], known.device),
        torch.float32 if known.sizes[2] == 4 else torch.bfloat16))
    D, W, _ = agreed.sizes
    halo = _halo_of(context, W, x.device)
    tokens = x[0]
    rows = torch.cat([tokens, _Tails.apply(agreed, halo, tokens), tokens.new_zeros(1, D)]).index_select(0, halo.read)
    y, _ = short_conv(rows[None], weight.reshape(D, W), bias, activation=activation)
    return y.index_select(1, halo.outputs)


def _halo_of(context, width, device):
    key = width, device
    if key not in context._halos:
        context._halos[key] = _Halo(context, width, device)
    return context._halos[key]


def _conv_sizes(context, x, weight, bias):
    for name, value in (("x", x), ("weight", weight), *([] if bias is None else [("bias", bias)])):
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
        if value.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(f"{name} must be float32, bfloat16 or float16, got {value.dtype}")
        if value.device != x.device:
            raise ValueError(f"{name} must be on the device of x, {x.device}, got {value.device}")
    if x.dim() != 3:
        raise ValueError(f"x must have shape [1, T, D], got {list(x.shape)}")
    check_place(context, "x", x)
    D, W = x.shape[2], weight.shape[-1] if weight.dim() else 0
    if tuple(weight.shape) not in ((D, W), (D, 1, W)) or not 2 <= W <= 4:
        raise ValueError(f"weight must have shape [{D}, W] or [{D}, 1, W] with W 2 to 4, got {list(weight.shape)}")
    if bias is not None and tuple(bias.shape) != (D,):
        raise ValueError(f"bias must have shape [{D}], got {list(bias.shape)}")
    return D, W
