# SPDX-License-Identifier: Apache-2.0
"""Maps of spans, and their fold (docs/design/many_cards.md), for one call: on a CPU by the operators made for them,
elsewhere by the ordinary forward and backward."""
from __future__ import annotations

from typing import NamedTuple

import torch

from .._binding.operands import Modes, forward_into

_span_maps = torch.ops.libkda.span_maps.default
fold_states = torch.ops.libkda.fold_states.default
_span_begin = torch.ops.libkda.span_begin.default
_span_finish = torch.ops.libkda.span_finish.default
_span_backward_begin = torch.ops.libkda.span_backward_begin.default
_span_backward_finish = torch.ops.libkda.span_backward_finish.default
backward = torch.ops.libkda.backward.default

_INITIAL_STATE = 1 << 7  # of what a backward is asked for


class Spans(NamedTuple):
    """Neighbouring spans of a rank as sequences of one problem."""
    rows: tuple[torch.Tensor, ...]  # q, k, v, g, beta of their tokens
    parameters: tuple[torch.Tensor | None, ...]
    lengths: tuple[torch.Tensor, torch.Tensor | None]  # cu_seqlens, and on the host
    modes: Modes  # states of spans are in the kv layout, whatever the call has
    sizes: tuple[int, int, int]  # HV, K, V

    @property
    def count(self):
        return len(self.lengths[0]) - 1

    @property
    def kv_modes(self):
        return self.modes.without_layout

    def new(self, *shape):
        return self.rows[0].new_empty((self.count, self.sizes[0], *shape), dtype=torch.float32)


def run_forward(spans, o, behind, before):
    """o, and the states behind the spans, from those before them (None: zero)."""
    forward_into(*spans.rows, o, behind, None, spans.parameters, before, spans.lengths,
                 spans.modes._replace(state_v_first=False))


def run_backward(spans, d_o, d_behind, before, wanted):
    """Gradients of q to dt_bias, and of the states before the spans."""
    return backward(d_o, d_behind, *spans.rows, *spans.parameters, before, *spans.lengths, *spans.kv_modes, False,
                    None, None, 0, wanted | _INITIAL_STATE)


class Begun:
    """A forward of which all is done that does not wait for the states before its spans."""

    def __init__(self, call, workspace):
        self._call, self._workspace = call, workspace

    def finish(self, before):
        _span_finish(*self._call, before, self._workspace)


class BegunBackward:
    """A backward of which all is done that does not wait for the gradients behind its spans."""

    def __init__(self, call, gradients, workspace):
        self._call, self._workspace, self.gradients = call, workspace, gradients

    def finish(self, d_behind):
        """Gradients as run_backward() returns them."""
        d_o, *rest = self._call
        _span_backward_finish(d_o, d_behind, *rest, *self.gradients, self._workspace)
        return self.gradients


class OnCpu:
    """One pass for M and B, and one for M and D, in fp32."""
    #: whether a state alone, without outputs, is cheaper than a forward
    states_alone = True

    @staticmethod
    def begin(spans, o, behind, M, B):
        """A Begun, with M and B where they are wanted, or None where a forward waits for the states."""
        return None

    @staticmethod
    def begin_backward(spans, d_o, d_behind, before, wanted, D, from_final):
        """A BegunBackward, with D where it is wanted (`from_final`: from d_behind), or None as above."""
        return None

    @staticmethod
    def forward_maps(spans, M, B):
        _span_maps(*spans.rows, M, B, None, *spans.parameters, None, spans.lengths[0], *spans.kv_modes)

    @staticmethod
    def backward_maps(spans, d_o, M, D):
        _span_maps(*spans.rows, M, D, d_o, *spans.parameters, None, spans.lengths[0], *spans.kv_modes)

    @staticmethod
    def states_behind(spans, before):
        states = torch.empty_like(before)
        _span_maps(*spans.rows, None, states, None, *spans.parameters, before, spans.lengths[0], *spans.kv_modes)
        return states

    @staticmethod
    def gradients_before(spans, d_o, d_behind, _):
        _, K, V = spans.sizes
        M, D = spans.new(K, K), spans.new(K, V)
        OnCpu.backward_maps(spans, d_o, M, D)
        maps = torch.cat([M.flatten(1), D.flatten(1)], dim=1)
        states = torch.empty_like(d_behind)
        steps = torch.tensor([[i, i, i] for i in range(spans.count)])
        fold_states(maps, 1, d_behind, states, steps, None, True)
        return states


class OnKernels:
    """M is the final state from the identity with v = 0, B that from zero, D the gradient of the initial state."""
    states_alone = False

    @staticmethod
    def begin(spans, o, behind, M, B):
        if spans.rows[0].device.type != "cuda":
            return None
        call = *spans.rows, o, behind, *spans.parameters, *spans.lengths, *spans.kv_modes
        workspace = _span_begin(*call, M, B)
        return Begun(call, workspace) if len(workspace) else None

    @staticmethod
    def begin_backward(spans, d_o, d_behind, before, wanted, D, from_final):
        if spans.rows[0].device.type != "cuda":
            return None
        call = (d_o, *spans.rows, *spans.parameters, before, *spans.lengths, *spans.kv_modes, wanted | _INITIAL_STATE)
        *gradients, workspace = _span_backward_begin(d_o, d_behind, *call[1:], D, from_final)
        return BegunBackward(call, gradients, workspace) if len(workspace) else None

    @staticmethod
    def transitions(spans, M):
        q, k, v, g, beta = spans.rows
        HV, K, _ = spans.sizes
        no_values = v.new_zeros(*v.shape[:3], K)
        start = torch.eye(K, dtype=torch.float32, device=q.device).expand(spans.count, HV, K, K).contiguous()
        run_forward(spans._replace(rows=(q, k, no_values, g, beta)), torch.empty_like(no_values), M, start)

    @staticmethod
    def forward_maps(spans, M, B):
        run_forward(spans, torch.empty_like(spans.rows[2], memory_format=torch.contiguous_format), B, None)
        OnKernels.transitions(spans, M)

    @staticmethod
    def backward_maps(spans, d_o, M, D):
        """`M`: None where the forward's are known."""
        D.copy_(OnKernels.gradients_before(spans, d_o, None, spans.new(*spans.sizes[1:]).zero_()))
        if M is not None:
            OnKernels.transitions(spans, M)

    @staticmethod
    def gradients_before(spans, d_o, d_behind, before):
        return run_backward(spans, d_o, d_behind, before, 0)[7]


def of_device(device):
    return OnCpu if device.type == "cpu" else OnKernels
