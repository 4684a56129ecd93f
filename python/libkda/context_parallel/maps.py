# SPDX-License-Identifier: Apache-2.0
"""Maps of spans, and their fold (docs/design/many_cards.md), for one call: on a CPU by the operators made for them,
elsewhere by the ordinary forward and backward."""
from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .. import ops
from .contexts import _NONE, _ZERO

_span_maps = torch.ops.libkda.span_maps.default
_fold_states = torch.ops.libkda.fold_states.default
_has_span_halves = torch.ops.libkda.has_span_halves.default
_span_begin = torch.ops.libkda.span_begin.default
_span_finish = torch.ops.libkda.span_finish.default
backward = torch.ops.libkda.backward.default

_FLOATS_AT_ONCE = 1 << 26  # of maps, that are converted together: fewer launches
_INITIAL_STATE = 1 << 7  # of what a backward is asked for


class Spans(NamedTuple):
    """Neighbouring spans of a rank as sequences of one problem."""
    rows: tuple[torch.Tensor, ...]  # q, k, v, g, beta of their tokens
    parameters: tuple[torch.Tensor | None, ...]
    lengths: tuple[torch.Tensor, torch.Tensor | None]  # cu_seqlens, and on the host
    modes: tuple[Any, ...]
    sizes: tuple[int, int, int]  # HV, K, V

    @property
    def count(self):
        return len(self.lengths[0]) - 1

    def new(self, *shape):
        return self.rows[0].new_empty((self.count, self.sizes[0], *shape), dtype=torch.float32)


def run_forward(spans, o, behind, before):
    """o, and the states behind the spans, from those before them (None: zero)."""
    ops.forward_into(*spans.rows, o, behind, None, *spans.parameters, before, *spans.lengths, *spans.modes[:5], False)


def run_backward(spans, d_o, d_behind, before, wanted):
    """Gradients of q to dt_bias, and of the states before the spans."""
    return backward(d_o, d_behind, *spans.rows, *spans.parameters, before, *spans.lengths, *spans.modes[:5], False,
                    None, None, 0, wanted | _INITIAL_STATE)


class Begun:
    """A forward of which all is done that does not wait for the states before its spans."""

    def __init__(self, spans, o, behind, maps_wanted):
        HV, K, V = spans.sizes
        self.M, self.B = (spans.new(K, K), spans.new(K, V)) if maps_wanted else (None, None)
        self._call = _half(spans, o, behind)
        self._workspace = _span_begin(*self._call, self.M, self.B)

    def finish(self, before):
        _span_finish(*self._call, before, self._workspace)


def _half(spans, o, behind):
    return *spans.rows, o, behind, *spans.parameters, *spans.lengths, *spans.modes[:5]


class OnCpu:
    """One pass for M and B, and one for M and D, in fp32."""
    #: whether a state alone, without outputs, is cheaper than a forward
    states_alone = True

    @staticmethod
    def begin(spans, o, behind, maps_wanted):
        """A Begun, or None where a forward waits for the states."""
        return None

    @staticmethod
    def forward_maps(spans):
        _, K, V = spans.sizes
        M, B = spans.new(K, K), spans.new(K, V)
        _span_maps(*spans.rows, M, B, None, *spans.parameters, None, spans.lengths[0], *spans.modes[:5])
        return M, B

    @staticmethod
    def backward_maps(spans, d_o, _):
        _, K, V = spans.sizes
        M, D = spans.new(K, K), spans.new(K, V)
        _span_maps(*spans.rows, M, D, d_o, *spans.parameters, None, spans.lengths[0], *spans.modes[:5])
        return M, D

    @staticmethod
    def states_behind(spans, before):
        states = torch.empty_like(before)
        _span_maps(*spans.rows, None, states, None, *spans.parameters, before, spans.lengths[0], *spans.modes[:5])
        return states

    @staticmethod
    def gradients_before(spans, d_o, d_behind, _):
        M, D = OnCpu.backward_maps(spans, d_o, None)
        states = torch.empty_like(d_behind)
        for i in range(spans.count):
            maps = torch.cat([M[i].flatten(), D[i].flatten()])[None]
            _fold_states(maps, d_behind[i:i + 1], states[i:i + 1], torch.tensor([[0, 0, 0]]), True)
        return states

    @staticmethod
    def fold(maps, starts, states, steps, transposed):
        _fold_states(maps, starts, states, steps, transposed)


class OnKernels:
    """M is the final state from the identity with v = 0, B that from zero, D the gradient of the initial state."""
    states_alone = False

    @staticmethod
    def begin(spans, o, behind, maps_wanted):
        if spans.rows[0].device.type != "cuda" or not _has_span_halves(*_half(spans, o, behind)):
            return None
        return Begun(spans, o, behind, maps_wanted)

    @staticmethod
    def transitions(spans):
        q, k, v, g, beta = spans.rows
        HV, K, _ = spans.sizes
        no_values = v.new_zeros(*v.shape[:3], K)
        start = torch.eye(K, dtype=torch.float32, device=q.device).expand(spans.count, HV, K, K).contiguous()
        M = torch.empty_like(start)
        run_forward(spans._replace(rows=(q, k, no_values, g, beta)), torch.empty_like(no_values), M, start)
        return M

    @staticmethod
    def forward_maps(spans):
        B = spans.new(*spans.sizes[1:])
        run_forward(spans, torch.empty_like(spans.rows[2], memory_format=torch.contiguous_format), B, None)
        return OnKernels.transitions(spans), B

    @staticmethod
    def backward_maps(spans, d_o, M):
        """`M`: those of the forward, or None."""
        D = OnKernels.gradients_before(spans, d_o, None, spans.new(*spans.sizes[1:]).zero_())
        return OnKernels.transitions(spans) if M is None else M, D

    @staticmethod
    def gradients_before(spans, d_o, d_behind, before):
        return run_backward(spans, d_o, d_behind, before, 0)[7]

    @staticmethod
    def fold(maps, starts, states, steps, transposed):
        """In float64: what torch allows products of fp32 to lose is no matter here."""
        HV, K, V = states.shape[1:]
        if maps.numel() <= _FLOATS_AT_ONCE:
            maps = maps.double()
        M, A = maps[:, :HV * K * K].view(-1, HV, K, K), maps[:, HV * K * K:].view(-1, HV, K, V)
        state = None  # zero
        for start, index, place in steps.tolist():
            if start != _NONE:
                state = None if start == _ZERO else starts[start].double()
            if index != _NONE:
                step = M[index].double()
                term = A[index].double()
                state = term if state is None else torch.baddbmm(term, step.mT if transposed else step, state)
            if place != _NONE:
                states[place] = 0 if state is None else state


def of_device(device):
    return OnCpu if device.type == "cpu" else OnKernels
