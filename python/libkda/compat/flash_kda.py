# SPDX-License-Identifier: Apache-2.0
"""FlashKDA's functions on libkda's kernels: `import libkda.compat.flash_kda as flash_kda`.

install() makes `import flash_kda` find this module, so that FLA, vLLM and SGLang take it where they would take
FlashKDA. Unlike FlashKDA: any K and V up to 256, grouped value heads, fp16, CPU tensors, exact on every gate.
"""
from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from typing import ParamSpec

import torch

from .. import ops
from .._binding.checks import check, checked
from .._binding.operands import (Modes, as_type, expect_distinct, forward_into, lengths_of, new_states, parameter_of,
                                 rows_of, written_rows_of)
from .._binding.options import number_of, number_with_policy
from .._binding.rules import number

Parameters = ParamSpec("Parameters")


def _without_workspace(function: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Takes the form with a workspace, of 16 arguments, too."""
    @functools.wraps(function)
    def fwd(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        if len(args) == 16:
            args = args[:7] + args[8:]
        kwargs.pop("workspace", None)
        return function(*args, **kwargs)

    return fwd


@_without_workspace
@checked()
def fwd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, scale: float,
        out: torch.Tensor, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None, lower_bound: float,
        initial_state: torch.Tensor | None = None, final_state: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None, checkpoint_state: torch.Tensor | None = None,
        checkpoint_offsets: torch.Tensor | None = None, *, cu_seqlens_cpu: torch.Tensor | None = None) -> None:
    """Writes out [B, T, HV, V] and final_state [N, HV, V, K] (may be None, or initial_state itself).

    q, k [B, T, H, K] are normalised in the kernel; g [B, T, HV, K] is the raw gate: lower_bound sigmoid(exp(A_log)
    (g + dt_bias)); beta [B, T, HV] a logit. A_log [HV], dt_bias [HV, K]; initial_state [N, HV, V, K];
    cu_seqlens [N + 1], int32 or int64; cu_seqlens_cpu the same on the host, where a copy is at hand. States are fp32 or
    bf16. out and states of another type, or whose last dimension is not contiguous, cost a copy. Raises TypeError and
    ValueError that name what does not fit; nothing is written then. NotImplementedError where a derivative is asked
    for.

    checkpoint_state [N, HV, V, K] gets the state of sequence n behind its first checkpoint_offsets[n] tokens, where
    that is above 0; offsets [N] are at most the length of their sequence. They are looked at on the host: on a GPU such
    a call waits for them, and for cu_seqlens without cu_seqlens_cpu. vLLM passes a workspace behind `out`, 16 arguments
    in all: it is ignored.
    """
    _fwd(q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state, final_state,
         (cu_seqlens, cu_seqlens_cpu), checkpoint_state, checkpoint_offsets, number_of(None))


@_without_workspace
@checked()
def fwd_cp(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, scale: float,
           out: torch.Tensor, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None, lower_bound: float,
           initial_state: torch.Tensor | None = None, final_state: torch.Tensor | None = None,
           cu_seqlens: torch.Tensor | None = None, checkpoint_state: torch.Tensor | None = None,
           checkpoint_offsets: torch.Tensor | None = None, *, cu_seqlens_cpu: torch.Tensor | None = None,
           auto_cp: bool = True) -> None:
    """fwd with its policy of cutting long sequences over the card as an argument: auto_cp=True is libkda.Options'
    context_parallel="auto", False is "off", whatever libkda.options() says; other options stay those in force. Exact
    for every gate; nothing waits to look at lengths or gates."""
    if not isinstance(auto_cp, bool):
        raise TypeError(f"auto_cp must be a bool, got {auto_cp!r}")
    _fwd(q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state, final_state,
         (cu_seqlens, cu_seqlens_cpu), checkpoint_state, checkpoint_offsets,
         number_with_policy("auto" if auto_cp else "off"))


def _fwd(q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state, final_state, lengths,
         checkpoint_state, checkpoint_offsets, options):
    """lengths: cu_seqlens and its copy on the host; options: their number."""
    ops.refuse_gradients("flash_kda.fwd", q, k, v, g, beta, A_log, dt_bias, initial_state, out, final_state,
                         checkpoint_state)
    modes = Modes(ops.GATE_BOUNDED, ops.BETA_SIGMOID, number("lower_bound", lower_bound), number("scale", scale), True,
                  True)
    with torch.no_grad():
        if checkpoint_offsets is None and checkpoint_state is None:
            _forward(q, k, v, g, beta, out, final_state, A_log, dt_bias, initial_state, lengths, modes, options)
            return
        cu_seqlens, cu_seqlens_cpu = lengths
        check("fwd", dict(q=q, k=k, v=v, g=g, beta=beta, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu,
                          A_log=A_log, dt_bias=dt_bias, out=out, initial_state=initial_state, final_state=final_state,
                          checkpoint_state=checkpoint_state, checkpoint_offsets=checkpoint_offsets))
        sequences = _sequences(q, lengths_of(cu_seqlens, cu_seqlens_cpu, q), checkpoint_state, checkpoint_offsets)
        for name, x in (("out", out), ("final_state", final_state), ("checkpoint_state", checkpoint_state)):
            if x is not None:  # pieces of it do not show that they overlap
                expect_distinct(name, x)
        none = None, None
        for batch, begin, offset, end, n in sequences:
            state = None if initial_state is None else initial_state[n:n + 1]
            final = None if final_state is None else final_state[n:n + 1]
            if offset > 0:  # in fp32, whatever is asked for
                behind = new_states(q, v, True, 1)
                _forward(*(x[batch, begin:begin + offset] for x in (q, k, v, g, beta, out)), behind, A_log, dt_bias,
                         state, none, modes, options)
                checkpoint_state[n:n + 1].copy_(behind)
                begin, state = begin + offset, behind
            _forward(*(x[batch, begin:end] for x in (q, k, v, g, beta, out)), final, A_log, dt_bias, state, none,
                     modes, options)


def _sequences(q, lengths, checkpoint_state, offsets):
    """Of each its row of the batch, where it begins, its offset, where it ends, and its number."""
    cu_seqlens, cu_seqlens_cpu = lengths
    if checkpoint_state is None or offsets is None:
        raise ValueError("checkpoint_state and checkpoint_offsets are given together")
    if cu_seqlens is None:
        rows = [(slice(n, n + 1), 0, q.shape[1]) for n in range(q.shape[0])]
    else:
        ends = _numbers(cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu)
        if cu_seqlens_cpu is not None and cu_seqlens.device.type == "cpu" and ends != _numbers(cu_seqlens):
            raise ValueError("cu_seqlens_cpu is not cu_seqlens")
        rows = [(slice(0, 1), begin, end) for begin, end in zip(ends, ends[1:])]
        if ends[0] != 0 or ends[-1] != q.shape[1] or any(begin > end for _, begin, end in rows):
            name = "cu_seqlens" if cu_seqlens_cpu is None else "cu_seqlens_cpu"
            raise ValueError(f"{name} must go up from 0 to {q.shape[1]} beside checkpoint_offsets, got {ends}")
    offsets = _numbers(offsets)
    for n, ((_, begin, end), offset) in enumerate(zip(rows, offsets)):
        if offset > end - begin:
            raise ValueError(f"checkpoint_offsets: entry {n} = {offset} is above {end - begin}, the length of its "
                             f"sequence")
    return [(batch, begin, offset, end, n) for n, ((batch, begin, end), offset) in enumerate(zip(rows, offsets))]


def _numbers(x):
    return [0] * len(x) if x._is_zerotensor() else x.tolist()  # torch does not read what has no memory


def _forward(q, k, v, g, beta, out, final_state, A_log, dt_bias, initial_state, lengths, modes, options):
    lengths = lengths_of(*lengths, q)
    inputs = (rows_of(x) for x in (q, k, v, g, beta))
    o, final = written_rows_of("out", out), None
    if final_state is not None:
        final = _state(final_state)
        if final is not final_state:
            expect_distinct("final_state", final_state)
    forward_into(*inputs, o, final, None, (parameter_of(A_log), parameter_of(dt_bias)),
                 None if initial_state is None else _state(initial_state), lengths, modes,
                 options=options)
    _copy_back(out, o)
    _copy_back(final_state, final)


def _copy_back(given, written):
    if written is not given:
        given.copy_(written)


def _state(x):
    """States of a type that the kernels take, in rows that they take: `x` itself but for a copy of other ones."""
    return rows_of(x if x.dtype is torch.bfloat16 else as_type(x, torch.float32))


def get_workspace_size(*args: object, **kwargs: object) -> int:
    """0: fwd() takes its workspace from torch's allocator."""
    return 0


def install() -> None:
    """Makes this module importable as `flash_kda`, unless the real one has been imported."""
    sys.modules.setdefault("flash_kda", sys.modules[__name__])


_libraries: list[torch.library.Library] = []  # operators live as long as these

_FWD = ("fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float scale, Tensor(a!) out, Tensor workspace, "
        "Tensor A_log, Tensor dt_bias, float lower_bound, Tensor? initial_state, Tensor(b!)? final_state, "
        "Tensor? cu_seqlens, Tensor(c!)? checkpoint_state=None, Tensor? checkpoint_offsets=None) -> ()")


def install_operators() -> None:
    """Defines torch.ops._flashkda_C.fwd and get_workspace_size, and the module vllm._flashkda_C that loads them, where
    there is no FlashKDA: in builds of vLLM without it. Where there is, nothing changes."""
    if importlib.util.find_spec("vllm") is not None and importlib.util.find_spec("vllm._flashkda_C") is not None:
        return
    if not hasattr(torch.ops._flashkda_C, "fwd"):
        library = torch.library.Library("_flashkda_C", "DEF")
        library.define(_FWD)
        library.define("get_workspace_size(int T, int H, int N) -> int")
        library.impl("fwd", fwd, "CompositeExplicitAutograd")
        library.impl("get_workspace_size", get_workspace_size, "CompositeExplicitAutograd")
        _libraries.append(library)
    sys.modules.setdefault("vllm._flashkda_C", sys.modules[__name__])
