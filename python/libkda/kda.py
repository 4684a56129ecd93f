# SPDX-License-Identifier: Apache-2.0
"""chunk_kda and fused_recurrent_kda with the signatures, defaults and errors of FLA 0.6, on CPU and CUDA tensors."""
from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch.compiler import is_compiling

from . import ops
from ._binding import kernels
from ._binding.checks import checked, computes_in_float64, state_type
from ._binding.operands import (Modes, as_type, dense, forward, forward_into, forward_kept, head_map_of, lengths_of,
                                modes_of, new_states, parameters_of, rows_of, slots_of, update, update_with_tail,
                                written_rows_of)
from ._binding.options import number_of, refuse_beside
from ._binding.rules import FlaError, number

_MOST_DECODE_TOKENS = 8  # of a sequence in one call of the decode kernel


# ---- arguments -------------------------------------------------------------------------------------------------------

# Where most calls have nothing to check, the condition is at the call: a step of a few tokens is host time.

def _rename_layout(state_v_first, kwargs):
    if "transpose_state_layout" not in kwargs:
        return state_v_first
    if state_v_first:
        raise ValueError("Cannot pass both `state_v_first` and the deprecated `transpose_state_layout`.")
    warnings.warn("`transpose_state_layout` is deprecated and renamed to `state_v_first`.", DeprecationWarning,
                  stacklevel=4)
    return kwargs.pop("transpose_state_layout")


def _check_sequences(q):
    if q.shape[0] != 1:
        raise ValueError(f"The batch size is expected to be 1 rather than {q.shape[0]} when using `cu_seqlens`."
                         f"Please flatten variable-length inputs before processing.")


def _expect_shape_of_v(out, v):
    if out.shape != v.shape:
        raise FlaError(f"out must have the shape of v, {list(v.shape)}, got {list(out.shape)}")


def _written(out, rows):
    """`out`, to which `rows` go if they are a copy of it (written_rows_of)."""
    return out if rows is out else out.copy_(rows)


# ---- chunk_kda -------------------------------------------------------------------------------------------------------

class _ChunkOptions(NamedTuple):
    """What chunk_kda's options say, once they have been looked at."""
    chunk_size: int
    out: torch.Tensor | None
    head_map: int
    modes: Modes


def _chunk_options(q, v, scale, lower_bound, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
                   use_qk_l2norm_in_kernel, state_v_first, safe_gate, return_intermediate_states, kwargs):
    chunk_size, out = kwargs.get("chunk_size", 64), kwargs.get("out")
    if out is not None:
        _expect_shape_of_v(out, v)
    if chunk_size not in (32, 64):
        raise ValueError(f"`chunk_size` must be either 32 or 64 for KDA, got {chunk_size}.")
    if safe_gate and use_gate_in_kernel:
        if lower_bound is None:
            raise ValueError("`lower_bound` must be specified when `safe_gate=True` and `use_gate_in_kernel=True`.")
        if not (-5 <= number("lower_bound", lower_bound) < 0):
            raise ValueError(f"`lower_bound` must be in the safe range [-5, 0), got {lower_bound}.")
    if return_intermediate_states and not torch.is_inference_mode_enabled():
        raise FlaError("return_intermediate_states is only allowed in inference mode")
    modes = modes_of(q, scale, lower_bound, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
                     use_qk_l2norm_in_kernel, state_v_first)
    return _ChunkOptions(chunk_size, out, head_map_of(kwargs.get("head_map")), modes)


def _over_ranks(cp_context, q, k, v, g, beta, initial_state, output_final_state, cu_seqlens, kwargs,
                return_intermediate_states, options_of):
    """chunk_kda with `cp_context`, which knows its sequences. All but the context is looked at where ranks compare what
    they were given, so that a refusal on one rank is an error on all of them. FLA's callers give cu_seqlens beside
    their context, to no effect."""
    from .context_parallel import attention, fla  # torch.distributed is not for everybody
    if is_compiling():
        raise NotImplementedError("`cp_context` is not for torch.compile: put the call into torch.compiler.disable().")
    context = fla.context_of(cp_context, "q", q)

    def read():
        if return_intermediate_states:
            raise NotImplementedError("`return_intermediate_states` is not taken with `cp_context`.")
        if kwargs.get("has_state") is not None:
            raise NotImplementedError("`has_state` is not taken with `cp_context`: give zeros in `initial_state`.")
        if cu_seqlens is not None and cp_context is context:
            raise ValueError("`cu_seqlens` is part of `cp_context`, and is not taken beside it.")
        refuse_beside("cp_context", kwargs.get("plan_options"))
        chunk = options_of()
        if chunk.head_map or g.dim() == 3:
            raise NotImplementedError("One gate a head and tiled heads are not taken with `cp_context`.")
        if chunk.out is not None:
            raise NotImplementedError("`out` is not taken with `cp_context`.")
        return attention.Options(kwargs.get("A_log"), kwargs.get("dt_bias"), initial_state, chunk.modes,
                                 bool(output_final_state))
    return attention.chunk_kda(context, q, k, v, g, beta, read)


def _can_keep_chunks(q, k, v, g, beta, cu_seqlens, head_map, options):
    """Whether a GPU has kernels of the forward that keep states and errors of chunks, and it is worth it."""
    if type(q) is torch.Tensor and not (is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(q)):
        try:
            return ops.keeps_chunks(q, k, v, g, beta, cu_seqlens, head_map, options)
        except ValueError:
            return False  # the forward says what does not fit, or converts it
    if options or not torch.cuda.is_available():  # the latter: tensors without memory, as of torch.export
        return False
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return kernels.keeps_chunks(q, k, v, g, sequences, head_map, torch.cuda.get_device_properties(q.device))


def _kept(q, k, v, g, beta, cu_seqlens, head_map, options, disable_recompute):
    """What a forward keeps for its backward: nothing up to 4,096 tokens, where little is spared, and on a GPU, unless
    disable_recompute asks for it."""
    if q.is_cuda:
        keeps = disable_recompute and _can_keep_chunks(q, k, v, g, beta, cu_seqlens, head_map, options)
        return ops.KEEP_CHUNKS if keeps else ops.KEEP_NOTHING
    if disable_recompute:
        return ops.KEEP_CHUNKS
    return ops.KEEP_STATES if q.shape[1] > 4096 else ops.KEEP_NOTHING


def _chunk_states(checkpoints, initial_state, lengths, chunk_size):
    """States at the start of every chunk, of sequences after each other, from those after every full chunk."""
    pieces, used = [], 0
    for n, length in enumerate(lengths):
        full, count = length // chunk_size, (length + chunk_size - 1) // chunk_size
        if count:
            zero = checkpoints.new_zeros((1, *checkpoints.shape[1:]))
            pieces.append(zero if initial_state is None else initial_state[n:n + 1])
            pieces.append(checkpoints[used:used + count - 1])
        used += full
    return torch.cat(pieces) if pieces else checkpoints[:0]


@checked("A_log", "dt_bias", "chunk_size", "has_state", "head_map", "out", "plan_options", "transpose_state_layout")
def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    cp_context=None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    **kwargs,
):
    """Kimi Delta Attention over whole sequences (FLA 0.6's chunk_kda; docs/python.md maps every argument).

    q, k [B, T, H, K]; v [B, T, HV, V]; g [B, T, HV, K]; beta [B, T, HV]: fp32, bf16 or fp16, each its own, any
    strides with a contiguous last dimension, K and V up to 256, HV a multiple of H. A g [B, T, HV] is one gate a head
    (Gated DeltaNet). head_map "tiled" has value head j read q/k head j % H, not j // (HV // H), as "grouped" does.
    g is the log decay a token in nats, or with use_gate_in_kernel the raw gate of softplus (A_log [HV] required) or of
    a lower_bound; dt_bias [HV * K], or [HV] beside a g [B, T, HV]. beta is plain or, with use_beta_sigmoid_in_kernel, a
    logit (allow_neg_eigval: doubled).
    cu_seqlens [N + 1], int32 or int64, packs N sequences into B = 1; cu_seqlens_cpu, the same on the host, lets long
    sequences be cut over the card; where both are on the host they must be equal. initial_state [N, HV, K, V] fp32
    ([N, HV, V, K] with state_v_first); has_state [N], bool: where it is False a sequence starts from zero.

    Returns (o [B, T, HV, V] of q's type, final state fp32 or None), with return_intermediate_states also
    h [B, NT, HV, K, V] of k's type, the states before each chunk of chunk_size tokens. out, a keyword: o goes there,
    of v's shape and its own type, any strides; it shares no memory with an input, and no gradient is taken then.

    A q in fp64 on the CPU has the call computed in float64, token by token, for gradient checks: states and parameters
    may be fp64 then, and final states are. Else fp64 is computed in fp32.

    Gradients of all float tensors, each of the type of its tensor, are exact to the rounding of that type
    (docs/python.md, "Training"). A forward keeps its inputs for them; on the CPU also the fp32 state after every 2,048
    tokens, beyond 4,096 tokens or with disable_recompute; on a Hopper GPU that it fills, with disable_recompute, the
    state before every 64 tokens and the errors of all, 768 bytes a token and head of 128. There are no second and no
    forward-mode derivatives.

    safe_gate, use_graph and max_num_seqs change nothing: every gate is exact, and a call never waits for the device.
    plan_options: a libkda.Options, how the library plans the call; by default those of libkda.options().
    cp_context: a context_parallel.Context, or an FLACPContext: sequences are on several processes.
    The context has their lengths; it says which states are given and returned (docs/python.md).

    Raises TypeError and ValueError (an AssertionError too where FLA asserts) that name the argument,
    NotImplementedError for derivatives that there are not; nothing is written then. A keyword
    argument that nobody knows is ignored, with one warning.
    """
    if cp_context is not None:
        return _over_ranks(
            cp_context, q, k, v, g, beta, initial_state, output_final_state, cu_seqlens, kwargs,
            return_intermediate_states, lambda: _chunk_options(
                q, v, scale, lower_bound, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
                use_qk_l2norm_in_kernel, _rename_layout(state_v_first, kwargs), safe_gate, False, kwargs))
    if kwargs:
        state_v_first = _rename_layout(state_v_first, kwargs)
    if cu_seqlens is not None:
        _check_sequences(q)
    float64 = computes_in_float64(q)
    if initial_state is not None and initial_state.dtype not in (torch.float32, state_type(q)):
        raise FlaError(f"initial_state must be in float32. Got {initial_state.dtype}")
    chunk_size, out, head_map, modes = _chunk_options(
        q, v, scale, lower_bound, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        use_qk_l2norm_in_kernel, state_v_first, safe_gate, return_intermediate_states, kwargs)
    parameters = parameters_of(kwargs.get("A_log"), kwargs.get("dt_bias"), modes, float64)
    if cu_seqlens is not None:
        cu_seqlens, cu_seqlens_cpu = lengths_of(cu_seqlens, cu_seqlens_cpu, q)
    if return_intermediate_states and cu_seqlens is not None and cu_seqlens_cpu is None:
        cu_seqlens_cpu = cu_seqlens.cpu()  # the number of chunks is needed on the host, as in FLA
    lengths, options = (cu_seqlens, cu_seqlens_cpu), number_of(kwargs.get("plan_options"))
    state = None if initial_state is None else dense(initial_state)
    has_state = kwargs.get("has_state")
    if has_state is not None:
        has_state = dense(has_state)
    if not return_intermediate_states and out is None:
        if ops.differentiates(q, k, v, g, beta, *parameters, state):
            keep = _kept(q, k, v, g, beta, cu_seqlens, head_map, options, disable_recompute)
            o, final_state = forward_kept(q, k, v, g, beta, parameters, state, lengths, modes, bool(output_final_state),
                                          has_state, keep, head_map, options)
        else:
            o, final_state = forward(q, k, v, g, beta, parameters, state, lengths, modes, bool(output_final_state),
                                     False, has_state, head_map, options)
        return as_type(o, q.dtype), final_state if output_final_state else None
    if out is not None:
        o = written_rows_of("out", out, float64)
    if not return_intermediate_states:
        N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        final_state = new_states(q, v, state_v_first, N) if output_final_state else None
        forward_into(q, k, v, g, beta, o, final_state, None, parameters, state, lengths, modes, 0, False, has_state,
                     head_map, options)
        return _written(out, o), final_state
    counts = [q.shape[1]] * q.shape[0] if cu_seqlens is None else cu_seqlens_cpu.diff().tolist()
    final_state = new_states(q, v, state_v_first, len(counts)) if output_final_state else None
    if out is None:
        o = torch.empty(v.shape, dtype=rows_of(v, float64).dtype, device=v.device)
    checkpoints = new_states(q, v, state_v_first, sum(count // chunk_size for count in counts))
    forward_into(q, k, v, g, beta, o, final_state, checkpoints, parameters, state, lengths, modes, chunk_size, False,
                 has_state, head_map, options)
    if has_state is not None:
        state = torch.where(has_state.bool()[:, None, None, None], state, 0)  # an old state may hold anything
    h = _chunk_states(checkpoints, state, counts, chunk_size)
    o = as_type(o, q.dtype) if out is None else _written(out, o)
    return o, final_state, h.to(k.dtype).unflatten(0, (q.shape[0], len(h) // max(q.shape[0], 1)))


# ---- fused_recurrent_kda ---------------------------------------------------------------------------------------------

@checked("cu_seqlens_cpu", "has_state", "head_map", "out", "plan_options", "transpose_state_layout")
def fused_recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same operation for a few tokens (FLA 0.6's fused_recurrent_kda); arguments as of chunk_kda, initial_state of
    any float type. Returns (o of v's type, final state fp32 or None). Up to 8 tokens a sequence take the decode
    kernel: fp32 arithmetic, one read and one write of the state; more take chunk_kda's kernels."""
    if kwargs:
        state_v_first = _rename_layout(state_v_first, kwargs)
        if kwargs.get("out") is not None:
            _expect_shape_of_v(kwargs["out"], v)
    if cu_seqlens is not None:
        _check_sequences(q)
    modes = modes_of(q, scale, lower_bound, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
                     use_qk_l2norm_in_kernel, state_v_first)
    return _recurrent(q, k, v, g, beta, A_log, dt_bias, initial_state, modes, output_final_state,
                      (cu_seqlens, kwargs.get("cu_seqlens_cpu")), kwargs.get("has_state"), kwargs.get("out"),
                      kwargs.get("head_map"), kwargs.get("plan_options"))


@checked("cu_seqlens_cpu", "has_state", "first_slot", "head_map", "plan_options", "transpose_state_layout")
def fused_recurrent_kda_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    scale: float | None = None,
    output_final_state: bool = False,
    inplace_final_state: bool = True,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    ssm_state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    out: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Decode on a pool of states, as vLLM calls it (fla.ops.kda.fused_recurrent.fused_recurrent_kda_fwd).

    With inplace_final_state, initial_state [slots, HV, K, V] ([slots, HV, V, K] with state_v_first; fp32 or bf16, any
    slot stride) is read and written: sequence n at slot ssm_state_indices[n]. ssm_state_indices [N, S] with S > 1: the
    state after token t goes to slot [n, t], and is read from slot [n, num_accepted_tokens[n] - 1]. has_state [N], bool:
    where it is False (a new request, whose slot may hold an old state) a sequence starts from zero. A negative index,
    or one below first_slot (0; 1 where slot 0 is the null block of padded rows, as in vLLM), means no slot: nothing
    is read or written of the pool, and o is 0. head_map as of chunk_kda.
    Returns (o, the final states: the pool itself, fp32 [N, ...], or None).
    """
    if kwargs:
        state_v_first = _rename_layout(state_v_first, kwargs)
    has_state, first_slot = kwargs.get("has_state"), kwargs.get("first_slot", 0)
    lengths = cu_seqlens, kwargs.get("cu_seqlens_cpu")
    if out is not None:
        _expect_shape_of_v(out, v)
    modes = modes_of(q, scale, lower_bound, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
                     use_qk_l2norm_in_kernel, state_v_first)
    if not inplace_final_state:
        if ssm_state_indices is not None:
            raise NotImplementedError("libkda takes `ssm_state_indices` with `inplace_final_state=True` only.")
        return _recurrent(q, k, v, g, beta, A_log, dt_bias, initial_state, modes, output_final_state, lengths,
                          has_state, out, kwargs.get("head_map"), kwargs.get("plan_options"))
    if initial_state is None:
        raise FlaError("initial_state must be given with `inplace_final_state=True`: it is the pool that is updated.")
    slots = slots_of("ssm_state_indices", initial_state, ssm_state_indices, num_accepted_tokens, has_state, first_slot)
    o = _update_pool(q, k, v, g, beta, slots, A_log, dt_bias, lengths, modes, out, kwargs.get("head_map"),
                     kwargs.get("plan_options"))
    return o, initial_state


def _update_pool(q, k, v, g, beta, slots, A_log, dt_bias, lengths, modes, out=None, head_map=None,
                 plan_options=None, rows=None, decode_rows=False):
    """o of sequences whose states are in a pool, which is updated, or with drafts only read. lengths: cu_seqlens, and
    a copy of it on the host or None. rows: of a call with a tail, by the decode kernel with decode_rows."""
    parameters = parameters_of(A_log, dt_bias, modes)
    cu_seqlens, _ = lengths = lengths_of(*lengths, q)
    if rows is not None:
        o = torch.empty_like(rows_of(v)) if out is None else written_rows_of("out", out)
        update_with_tail(q, k, v, g, beta, o, slots, rows, parameters, lengths, modes, decode_rows,
                         head_map_of(head_map), number_of(plan_options))
        return as_type(o, v.dtype) if out is None else _written(out, o)
    indices, beside = slots.indices, slots.beside
    columns, decode = indices, True
    if beside is not None:
        columns, decode = indices if beside.drafts is None else beside.draft_indices, beside.checkpoints is None
    state_a_token = columns is not None and columns.dim() == 2
    decode = state_a_token or decode and _decodes(q, cu_seqlens)
    skips = cu_seqlens is not None or indices is not None  # zeros where no token is, or no slot
    o = torch.empty_like(rows_of(v)) if out is None else written_rows_of("out", out)
    update(q, k, v, g, beta, o, slots, parameters, lengths, modes, decode, skips, head_map_of(head_map),
           number_of(plan_options))
    if out is None:
        return as_type(o, v.dtype)
    return _written(out, o)


def _recurrent(q, k, v, g, beta, A_log, dt_bias, initial_state, modes, output_final_state, lengths, has_state=None,
               out=None, head_map=None, plan_options=None):
    """fused_recurrent_kda, into `out` if that is given."""
    float64 = computes_in_float64(q)
    parameters = parameters_of(A_log, dt_bias, modes, float64)
    cu_seqlens, _ = lengths = lengths_of(*lengths, q)
    state = None if initial_state is None else dense(as_type(initial_state, state_type(q)))
    decode, head_map, options = _decodes(q, cu_seqlens), head_map_of(head_map), number_of(plan_options)
    if has_state is not None:
        has_state = dense(has_state)
    if out is not None:
        N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        o = written_rows_of("out", out, float64)
        final = new_states(q, v, modes.state_v_first, N) if output_final_state or decode else None
        forward_into(q, k, v, g, beta, o, final, None, parameters, state, lengths, modes, 0, decode, has_state,
                     head_map, options)
        return _written(out, o), final if output_final_state else None
    o, final = forward(q, k, v, g, beta, parameters, state, lengths, modes, bool(output_final_state or decode), decode,
                       has_state, head_map, options)
    return as_type(o, v.dtype), final if output_final_state else None


def _decodes(q, cu_seqlens):
    """Whether a call looks like decode steps. As many tokens as sequences are taken for one token each; the operators
    look at lengths that are on the host, and lengths on a GPU are computed right whatever they are."""
    if cu_seqlens is None:
        return q.shape[1] <= _MOST_DECODE_TOKENS
    return q.shape[1] == cu_seqlens.shape[0] - 1
