# SPDX-License-Identifier: Apache-2.0
"""Rings: the last tokens of sequences beside the states of a pool, as engines keep them (SGLang's
--enable-linear-replayssm). A step reads the state and the rows of its ring and writes one row. The one that finds the
ring full, with L - 1 rows, folds all of them and its own token into the state and writes no row.

    libkda.decode_with_ring(q, k, v, g, beta, pool, slots, libkda.Ring(k_rows, g_rows, v_new), counts, ...)
    counts = torch.where(counts == L - 1, 0, counts + 1)                         # the caller's, as in the engine

Rows are made, unlike those of libkda.tails: others may go on from them at any step, and libkda from theirs. The next L
tokens from a state at hand begin with a count of 0, whatever lies in the ring.

    counts                 [N]              any integers, 0 to L - 1: rows of the ring in front of the token, 0 and up
    flush                  [N]              any integers: where it is not 0, the ring is folded as if it were full

Other arguments are those of libkda.decode (libkda.serving), of one token a sequence, [N, 1], with a gate a channel. On
a GPU rings are for K = V = 128 and state_v_first.
"""
from __future__ import annotations

from typing import NamedTuple

import torch

from ._binding.checks import checked, int32_of
from ._binding.operands import (as_type, expect_dimensions, head_map_of, modes_of, parameters_of, rows_of, slots_of,
                                update_with_ring, written_rows_of)
from ._binding.options import Options, number_of
from .kda import _expect_shape_of_v, _written


class Ring(NamedTuple):
    """Rings of the slots of a pool, an engine's own tensors: any stride between slots, heads and rows, the last
    dimension contiguous. L is 1 to 256, on a GPU as far as its shared memory goes: 221, on sm_80 158, on sm_86, sm_89
    and sm_120 94."""
    k: torch.Tensor  #: [slots, H, L, K], float32, bfloat16 or float16: keys, normalised with use_qk_l2norm_in_kernel
    g: torch.Tensor  #: [slots, HV, L, K], float32: log decays
    v_new: torch.Tensor  #: [slots, HV, L, V], float32, bfloat16 or float16


@checked()
def decode_with_ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
                     pool: torch.Tensor, slots: torch.Tensor, ring: Ring, counts: torch.Tensor, *,
                     flush: torch.Tensor | None = None, first_slot: int = 0, out: torch.Tensor | None = None,
                     A_log: torch.Tensor | None = None, dt_bias: torch.Tensor | None = None,
                     scale: float | None = None, lower_bound: float | None = None, use_gate_in_kernel: bool = False,
                     use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
                     use_qk_l2norm_in_kernel: bool = False, state_v_first: bool = False, head_map: str | None = None,
                     plan_options: Options | None = None) -> torch.Tensor:
    """The next token of each sequence, whose row goes to row counts[n] of its ring; a ring of counts[n] = L - 1 rows is
    folded into the state instead. Who calls counts. Made for CUDA graphs. Shapes: the table of this module."""
    expect_dimensions(slots, 1)
    if type(ring) is not Ring:
        raise TypeError(f"ring must be a libkda.Ring, got {type(ring).__name__}")
    if out is not None:
        _expect_shape_of_v(out, v)
    modes = modes_of(q, scale, lower_bound, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
                     use_qk_l2norm_in_kernel, state_v_first)
    slots = slots_of("slots", pool, slots, None, None, first_slot)
    o = torch.empty_like(rows_of(v)) if out is None else written_rows_of("out", out)
    update_with_ring(q, k, v, g, beta, o, slots, ring, int32_of("counts", counts),
                     None if flush is None else int32_of("flush", flush), parameters_of(A_log, dt_bias, modes), modes,
                     head_map_of(head_map), number_of(plan_options))
    return as_type(o, v.dtype) if out is None else _written(out, o)
