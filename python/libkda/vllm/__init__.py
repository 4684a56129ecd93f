# SPDX-License-Identifier: Apache-2.0
"""KDA and Gated DeltaNet of vLLM's models on libkda's kernels: LIBKDA_VLLM=1 in the environment is all.

vLLM calls register() in each of its processes, as an entry point of its general plugins. Kimi-Linear, Kimi-K3,
GLM-5-Next, Ling, Qwen3-Next, Qwen3.5 and OLMo-Hybrid look their kernels up in modules of vLLM; functions of the same
signatures take their places there, now or when vLLM loads the module. A call that libkda refuses goes on to vLLM's own
function; last_path() says who served the last one, and why. On vLLM's CPU backend, which has no KDA, Kimi-Linear gets
libkda's short convolution too.

On a GPU tokens and drafts stay with vLLM's kernels where those are faster (_plugins/measured.py), unless
LIBKDA_VLLM_DECODE=1 asks for libkda's; 0 leaves all of them. Prompts of Gated DeltaNet stay there unless
LIBKDA_VLLM_GDN_PREFILL=1 asks for libkda's; so do drafts whose kernel has the norm inside. vLLM's CPU backend has
kernels of its own for bf16 rows.

States stay in vLLM's pool: what gather_initial_states returns is a promise, and prefill reads and writes the slots.
Slot 0 is that of padded rows, and none: their outputs are 0 and nothing else is touched. RecoverSSM's records of a step
are its rows, from which verify's kernel makes the states of accepted drafts.
"""
from __future__ import annotations

import sys
import types

import torch

from .. import kda, layer, serving
from .._binding.library import cuda_refusal
from .._binding.rules import ENGINE_SLOTS, FIRST_SLOT
from .._plugins.places import Places
from .._plugins.plugin import Plugin
from .._plugins.switches import switch
from ..compat import flash_kda

_STATES = (torch.float32, torch.bfloat16)
_NORMED = dict(use_qk_l2norm_in_kernel=True, state_v_first=True)
_RAW = dict(use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, **_NORMED)


def last_path(part: str = "kda") -> str | None:
    """Who served the last call that came by: "libkda: NAME", "vllm: NAME: REASON", or None before the first. part:
    "kda", "step" for a decode step of a whole layer, "states" for what goes between it and the pool, "commit" for the
    accepted drafts of RecoverSSM and "records" for their states, or "conv" for the short convolution of the CPU
    backend."""
    return _plugin.last_path(part)


def register() -> None:
    """What vLLM calls (entry point `libkda` of vllm.general_plugins): enable(), if LIBKDA_VLLM is 1."""
    if switch("LIBKDA_VLLM", False):
        _places.enable()


# ---- states that stay in the pool ------------------------------------------------------------------------------------

class PoolRows(torch.Tensor):
    """States [N, HV, V, K] of sequences in a pool that nobody has gathered: shape and type without memory of its own.
    libkda's functions take the slots; whatever else is done with it is done with the states themselves."""

    @staticmethod
    def of(pool, slots, has_state, updated=False):
        shape = (slots.shape[0], *pool.shape[1:])
        rows = pool.as_strided(shape, (0,) * pool.dim()).as_subclass(PoolRows)
        rows.pool, rows.slots, rows.has_state, rows.updated, rows.gathered = pool, slots, has_state, updated, None
        return rows

    def states(self):
        """Those in front of the call, or behind it if it has updated the pool."""
        if self.gathered is None:
            self.gathered = self.pool[self.slots.long().clamp(min=0)]
            if not self.updated:  # an old state may hold anything
                self.gathered.masked_fill_(~self.has_state[:, None, None, None], 0)
        return self.gathered

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if function in _ABOUT:
                return function(*args, **kwargs)
            if function is torch.Tensor.to and not kwargs and args[1:] == (args[0].dtype,):
                return args[0]
            if function is torch.Tensor.__setitem__:
                pool, slots, rows = args
                if isinstance(rows, cls) and rows.updated and pool is rows.pool and slots is rows.slots:
                    return None  # that is where they are
            return function(*map(_states, args), **{name: _states(x) for name, x in kwargs.items()})


_ABOUT = {torch.Tensor.shape.__get__, torch.Tensor.dtype.__get__, torch.Tensor.device.__get__, torch.Tensor.dim,
          torch.Tensor.size, torch.Tensor.numel, torch.Tensor.__len__}


def _states(x):
    """A promise kept; anything else as it is."""
    if isinstance(x, PoolRows):
        return x.states()
    return type(x)(map(_states, x)) if type(x) in (tuple, list) else x


def gather_initial_states(state, indices, has_initial_state):
    if state.device.type not in ("cpu", "cuda") or torch.version.hip:
        raise NotImplementedError(f"states on {'ROCm' if torch.version.hip else state.device.type}")
    return PoolRows.of(state, indices, has_initial_state)


def scatter_states(state, src, indices):
    if not isinstance(src, PoolRows):
        raise NotImplementedError("states that are not in the pool")
    state[indices] = src
    return state


def _prefill(q, k, v, g, beta, initial_state, out, cu_seqlens, **modes):
    """(o, final states): in the pool where the first ones are, else in a tensor that is returned."""
    if isinstance(initial_state, PoolRows):
        rows = initial_state
        o = serving.prefill(q, k, v, g, beta, rows.pool, rows.slots, cu_seqlens=cu_seqlens, has_state=rows.has_state,
                            **ENGINE_SLOTS, out=out, **modes)
        return o, PoolRows.of(rows.pool, rows.slots, rows.has_state, updated=True)
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if initial_state is None:
        states = q.new_zeros((N, *v.shape[2:], q.shape[-1]), dtype=torch.float32)
    else:
        states = initial_state.clone(memory_format=torch.contiguous_format)
    slots = torch.arange(N, dtype=torch.int32, device=q.device)
    return serving.prefill(q, k, v, g, beta, states, slots, cu_seqlens=cu_seqlens, out=out, **modes), states


# ---- Kimi-Linear and Kimi-K3 -----------------------------------------------------------------------------------------

def chunk_kda_with_fused_gate(q, k, v, raw_g, raw_beta, A_log, g_bias, scale=None, initial_state=None,
                              output_final_state=False, lower_bound=None, use_qk_l2norm_in_kernel=False,
                              cu_seqlens=None, out=None):
    modes = _RAW | dict(use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
    return _prefill(q, k, v, raw_g, raw_beta, initial_state, out, cu_seqlens, A_log=A_log, dt_bias=g_bias, scale=scale,
                    lower_bound=lower_bound, **modes)


def _on_the_pool(kind, q, k, v, g, beta, pool, cu_seqlens, slots, accepted, **modes):
    """Tokens or drafts of a "kda" or "gdn" layer. vLLM pads its tables to the longest batch: they are cut to the
    sequences of this one."""
    N = cu_seqlens.shape[0] - 1
    _plugin.leave_slower(kind, "decode" if accepted is None and v.shape[1] <= N else "verify", v)
    return kda.fused_recurrent_kda_fwd(
        q, k, v, g, beta, initial_state=pool, cu_seqlens=cu_seqlens, ssm_state_indices=slots[:N],
        num_accepted_tokens=None if accepted is None else accepted[:N], **ENGINE_SLOTS, **modes)


def _recurrent(kind, q, k, v, g, beta, scale, pool, in_place, normed, cu_seqlens, slots, accepted, **modes):
    if not in_place or cu_seqlens is None or slots is None:
        raise NotImplementedError("states that are not in a pool")
    return _on_the_pool(kind, q, k, v, g, beta, pool, cu_seqlens, slots, accepted, scale=scale,
                        use_qk_l2norm_in_kernel=normed, state_v_first=True, **modes)


def fused_recurrent_kda(q, k, v, raw_g, raw_beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens,
                        ssm_state_indices, num_accepted_tokens=None, out=None, fuse_gate=None):
    return _on_the_pool("kda", q, k, v, raw_g, raw_beta, initial_state, cu_seqlens, ssm_state_indices,
                        num_accepted_tokens, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, out=out, **_RAW)


def fused_recurrent_kda_packed_decode(mixed_qkv, raw_g, raw_beta, A_log, dt_bias, lower_bound, initial_state,
                                      state_indices, scale=None, out=None):
    HV, V, K = initial_state.shape[1:]
    q, k, v = (x.unflatten(1, (HV, -1)).unsqueeze(1) for x in mixed_qkv.split([HV * K, HV * K, HV * V], dim=-1))
    _plugin.leave_slower("kda", "decode", v)
    if out is None:
        out = mixed_qkv.new_empty((1, mixed_qkv.shape[0], HV, V))
    serving.decode(q, k, v, raw_g.transpose(0, 1), raw_beta.transpose(0, 1), initial_state, state_indices,
                   **ENGINE_SLOTS, out=out.transpose(0, 1), A_log=A_log, dt_bias=dt_bias, scale=scale,
                   lower_bound=lower_bound, **_RAW)
    return out, initial_state


def _flashkda_prefill(q, k, v, g, beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens, out, final_state,
                      workspace, checkpoint_state=None, checkpoint_offsets=None):
    if checkpoint_state is None:
        return _prefill(q, k, v, g, beta, initial_state, out, cu_seqlens, A_log=A_log, dt_bias=dt_bias,
                        lower_bound=lower_bound, **_RAW)
    # The caller reads final_state itself then.
    flash_kda.fwd(q, k, v, g, beta, q.shape[-1] ** -0.5, out, A_log, dt_bias, lower_bound, _states(initial_state),
                  final_state, cu_seqlens, checkpoint_state, checkpoint_offsets)
    return out, final_state


def _flashinfer_kda_prefill(q, k, v, raw_g, raw_beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens, out,
                            seq_order=None, prefill_workspace=None):
    return _prefill(q, k, v, raw_g, raw_beta, initial_state, out, cu_seqlens, A_log=A_log, dt_bias=dt_bias,
                    lower_bound=lower_bound, **_RAW)


def fused_kda_decode(x, weight, bias, conv_state, raw_g, raw_beta, A_log, dt_bias, state_indices, state, out=None,
                     lower_bound=None, output_gate=None, norm_weight=None, norm_eps=1e-5):
    return serving.fused_decode(x, weight, bias, conv_state, raw_g, raw_beta, A_log, dt_bias, state_indices, state, out,
                                lower_bound, output_gate, norm_weight, norm_eps)


def is_fused_kda_decode_supported(num_heads, head_dim, conv_width, num_spec, input_dtype, conv_state_dtype,
                                  recurrent_state_dtype):
    """Of a layer that is being made: any number of heads, where vLLM's kernel has four."""
    if num_spec or head_dim != 128 or not 2 <= conv_width <= 4 or recurrent_state_dtype not in _STATES:
        raise NotImplementedError("a step of another shape or type")
    if not torch.cuda.is_available():
        raise NotImplementedError("no GPU")
    _plugin.asks_for_decode()
    if refusal := cuda_refusal(torch.cuda.current_device()):
        raise NotImplementedError(refusal)
    return True


# ---- RecoverSSM of Kimi-K3: drafts without a state each --------------------------------------------------------------

class _Records:
    """The rows of a step, packed, in the memory of one layer's KDARecoverSSMRecords: k and raw gates in key_gate,
    values in correction, and beside them betas. From these rows verify's kernel makes the states that it did not store,
    bit for bit; vLLM's own kernels keep differences in the place of values."""

    def __init__(self, records, beta):
        correction, key_gate = records.correction, records.key_gate
        R, H, Q, V = correction.shape
        self.window, heads = Q, (R * Q, H, -1)
        self.k, self.g = (half.view(heads) for half in key_gate.view(2, -1))
        self.v = correction.view(-1).view(heads)
        self.beta = beta.new_zeros(R * Q, H)

    @staticmethod
    def of(records, beta):
        """Those of a layer; a graph that is replayed finds them where they were."""
        correction = records.correction
        kept = getattr(correction, "libkda_kept", None)
        if kept is None or kept.beta.dtype is not beta.dtype:
            kept = correction.libkda_kept = _Records(records, beta)
        return kept

    def keep(self, k, v, g, beta):
        for rows, given in ((self.k, k), (self.v, v), (self.g, g), (self.beta, beta)):
            rows[:given.shape[1]].copy_(given[0])

    def rows(self, T):
        return tuple(x[None, :T] for x in (self.k, self.v, self.g, self.beta))


def kda_recoverssm_verify(q, k, v, raw_g, raw_beta, A_log, dt_bias, lower_bound, checkpoint_state, records,
                          query_start_loc, state_indices, spec_query_len, out=None):
    correction, key_gate = records.correction, records.key_gate
    correction.libkda_records = None  # those that are there are vLLM's, unless this call is served
    if q.is_cuda:
        if not switch("LIBKDA_VLLM_RECOVERSSM", False):
            raise NotImplementedError("on GPUs vLLM's own kernels are faster; LIBKDA_VLLM_RECOVERSSM=1 asks for these")
        if torch.cuda.get_device_capability(q.device)[0] == 10:
            raise NotImplementedError("vLLM's CuTe kernels write the same records without a word to libkda")
    if not 2 <= spec_query_len <= 8:
        raise NotImplementedError(f"a window of {spec_query_len} tokens")
    if not {k.dtype, raw_g.dtype} == {key_gate.dtype}:
        raise NotImplementedError("records of another type than keys and gates")
    if f"{_RECOVERSSM}.cute_recoverssm_commit" not in places():
        raise NotImplementedError("a version of vLLM without a fold of records to replace")
    if q.shape[1] > correction.shape[0] * correction.shape[2] or not (correction.is_contiguous()
                                                                     and key_gate.is_contiguous()):
        raise NotImplementedError("records without room for the rows of this step")
    kept = _Records.of(records, raw_beta)
    none = torch.full((state_indices.shape[0], spec_query_len), -1, dtype=torch.int32, device=q.device)
    out = serving.verify(q, k, v, raw_g, raw_beta, checkpoint_state, state_indices, cu_seqlens=query_start_loc,
                         **ENGINE_SLOTS, out=out, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
                         drafts=checkpoint_state, draft_slots=none, **_RAW)
    kept.keep(k, v, raw_g, raw_beta)
    correction.libkda_records = kept
    return out


def recoverssm_commit(context, num_accepted_tokens, state_indices, query_start_loc, *rest, **more):
    """KDARecoverSSMCommitContext.commit: its plan and the states of convolutions are vLLM's own, the states of KDA are
    those of cute_recoverssm_commit, below. Returns True, for None means that libkda has refused."""
    kept = [getattr(x, "libkda_records", None) for x in context.correction_caches]
    if all(x is None for x in kept):
        raise NotImplementedError("records of vLLM's own verify")
    if any(x is None for x in kept):
        raise RuntimeError("libkda: some layers' records are of vLLM's own verify, and others of libkda's")
    commit = _places.original(type(context), "commit")
    backend, context.backend, context.libkda_starts = context.backend, "cute", query_start_loc
    try:
        commit(context, num_accepted_tokens, state_indices, query_start_loc, *rest, **more)
    finally:
        context.backend = backend
    return True


def cute_recoverssm_commit(context, state_indices, batch, align):
    """The states behind commit_lens tokens to final_state_indices, and where blocks of a prefix cache are aligned those
    behind boundary_recovery_lens tokens to boundary_state_indices: one call a layer, which reads and writes each state
    once. Returns True."""
    kept = [getattr(x, "libkda_records", None) for x in context.correction_caches]
    if any(x is None for x in kept):
        raise NotImplementedError("records of vLLM's own verify")
    try:
        _fold_records(context, kept, state_indices[:batch], context.libkda_starts[:batch + 1], align)
    except (NotImplementedError, TypeError, ValueError) as refusal:  # vLLM's own would read other records
        raise RuntimeError(f"libkda: the states of accepted drafts cannot be made: {refusal}") from refusal
    return True


def _fold_records(context, kept, source, starts, align):
    N, window = source.shape[0], kept[0].window
    lengths, last = context.commit_lens[:N, None], context.final_state_indices[:N]
    column = torch.arange(window, dtype=torch.int32, device=source.device)
    slots = torch.where(column == lengths - 1, last[:, None], -1)
    if align:
        boundary = context.boundary_recovery_lens[:N, None] - 1
        slots = torch.where((column == boundary) & (column != lengths - 1),
                            context.boundary_state_indices[:N, None], slots)
    chain = torch.where(column < lengths, column - 1, -1)
    source = torch.where((lengths[:, 0] > 0) & (last >= FIRST_SLOT), source, -1)
    # What lies on a GPU nobody reads: rows behind the last sequence are none.
    T = N * window if starts.is_cuda else int(starts[-1])
    out = None
    for records, pool, A_log, dt_bias in zip(kept, context.checkpoints, context.A_log, context.dt_bias):
        k, v, g, beta = records.rows(T)
        out = k.new_empty(v.shape) if out is None else out
        serving.verify(k, k, v, g, beta, pool, source, cu_seqlens=starts, **ENGINE_SLOTS, out=out,
                       A_log=A_log, dt_bias=dt_bias, lower_bound=context.lower_bound, drafts=pool, draft_slots=slots,
                       parents=chain, **_RAW)


# ---- Gated DeltaNet: Qwen3-Next, Qwen3.5, OLMo-Hybrid ----------------------------------------------------------------

def gdn_packed_decode(mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices,
                      use_qk_l2norm_in_kernel=False):
    HV, V, K = initial_state.shape[1:]
    keys = (mixed_qkv.shape[1] - HV * V) // 2
    q, k, v = (x.unflatten(1, (-1, size))[:, None]
               for x, size in zip(mixed_qkv.split([keys, keys, HV * V], dim=-1), (K, K, V)))
    _plugin.leave_slower("gdn", "decode", v)
    serving.decode(q, k, v, a[:, None], b[:, None], initial_state, ssm_state_indices, **ENGINE_SLOTS, out=out,
                   A_log=A_log, dt_bias=dt_bias, scale=scale,
                   **_RAW | dict(use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel))
    return out, initial_state


def gdn_update(A_log, a, b, dt_bias, q, k, v, beta=1.0, threshold=20.0, scale=None, initial_state=None,
               inplace_final_state=True, cu_seqlens=None, ssm_state_indices=None, num_accepted_tokens=None,
               use_qk_l2norm_in_kernel=False, is_kda=False):
    if is_kda or beta != 1 or not inplace_final_state or cu_seqlens is None or ssm_state_indices is None:
        raise NotImplementedError("another gate than Gated DeltaNet's, or states that are not in a pool")
    return _on_the_pool("gdn", q, k, v, a[None], b[None], initial_state, cu_seqlens, ssm_state_indices,
                        num_accepted_tokens, A_log=A_log, dt_bias=dt_bias, scale=scale,
                        **_RAW | dict(use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel))


def gdn_fused_recurrent(q, k, v, g, beta=None, scale=None, initial_state=None, inplace_final_state=True,
                        cu_seqlens=None, ssm_state_indices=None, num_accepted_tokens=None,
                        use_qk_l2norm_in_kernel=False):
    return _recurrent("gdn", q, k, v, g, beta, scale, initial_state, inplace_final_state, use_qk_l2norm_in_kernel,
                      cu_seqlens, ssm_state_indices, num_accepted_tokens)


def gdn_chunk(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None,
              chunk_indices=None, chunk_offsets=None, use_qk_l2norm_in_kernel=False, core_attn_out=None):
    if core_attn_out is not None:
        raise NotImplementedError("an output of the caller's")
    if q.is_cuda and not switch("LIBKDA_VLLM_GDN_PREFILL", False):
        raise NotImplementedError("not measured against FlashInfer's kernel; LIBKDA_VLLM_GDN_PREFILL=1 asks for it")
    return _prefill(q, k, v, g, beta, initial_state, None, cu_seqlens, scale=scale,
                    use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, state_v_first=True)


def gdn_flashinfer_chunk(q, k, v, g, beta, initial_state, output_final_state, cu_seqlens=None,
                         use_qk_l2norm_in_kernel=True, state_checkpoints=None, checkpoint_cu_starts=None,
                         checkpoint_every_n_tokens=0, use_cp="auto"):
    if state_checkpoints is not None:
        raise NotImplementedError("checkpoints")
    return gdn_chunk(q, k, v, g, beta, None, initial_state, output_final_state, cu_seqlens,
                     use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)


# ---- GLM-5-Next ------------------------------------------------------------------------------------------------------

def glm_chunk_kda_with_fused_gate(q, k, v, raw_g, beta, A_log, g_bias, scale=None, initial_state=None,
                                  output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None,
                                  safe_gate=False, lower_bound=-5.0):
    return _prefill(q, k, v, raw_g, beta, initial_state, None, cu_seqlens, A_log=A_log, dt_bias=g_bias, scale=scale,
                    lower_bound=lower_bound if safe_gate else None, use_gate_in_kernel=True,
                    use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, state_v_first=True)


def glm_fused_recurrent_kda(q, k, v, g, beta, scale=None, initial_state=None, inplace_final_state=True,
                            use_qk_l2norm_in_kernel=True, cu_seqlens=None, ssm_state_indices=None,
                            num_accepted_tokens=None, out=None, sigmoid_beta=False, a_log=None, g_bias=None,
                            compute_gate=False, lower_bound=-5.0):
    return _recurrent("kda", q, k, v, g, beta, scale, initial_state, inplace_final_state, use_qk_l2norm_in_kernel,
                      cu_seqlens, ssm_state_indices, num_accepted_tokens, A_log=a_log, dt_bias=g_bias,
                      lower_bound=lower_bound, out=out, use_gate_in_kernel=compute_gate,
                      use_beta_sigmoid_in_kernel=sigmoid_beta)


def glm_flashkda_prefill(self, q, k, v, g, beta, initial_state, cu_seqlens, out, checkpoint=None, raw_qkv=None,
                         conv_state=None, recurrent_state=None):
    if checkpoint is not None:
        raise NotImplementedError("checkpoints in the workspace of the layer")
    return _prefill(q, k, v, g, beta, initial_state, out, cu_seqlens, A_log=self.A_log.view(-1), dt_bias=self.dt_bias,
                    lower_bound=self.kda_lower_bound, **_RAW)


# ---- Ling, whose gates are computed in front -------------------------------------------------------------------------

def ling_chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
                   use_qk_l2norm_in_kernel=False, cu_seqlens=None, safe_gate=None, lower_bound=None):
    return _prefill(q, k, v, g, beta, initial_state, None, cu_seqlens, scale=scale,
                    use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, state_v_first=True)


def ling_fused_recurrent_kda(q, k, v, g, beta, scale=None, initial_state=None, inplace_final_state=True,
                             use_qk_l2norm_in_kernel=True, cu_seqlens=None, ssm_state_indices=None,
                             num_accepted_tokens=None, safe_gate=None, lower_bound=None):
    return _recurrent("kda", q, k, v, g, beta, scale, initial_state, inplace_final_state, use_qk_l2norm_in_kernel,
                      cu_seqlens, ssm_state_indices, num_accepted_tokens)


# ---- the short convolution of the CPU backend ------------------------------------------------------------------------

def _expect_cpu(x):
    if x.device.type != "cpu":
        raise NotImplementedError("vLLM's own convolution serves GPUs")


def _window(states, weight):
    """The inputs that vLLM keeps where nothing is speculated: the first of a page that may be wider."""
    return states[..., :weight.shape[-1] - 1]


def _activation(activation):
    return ("silu" if activation else None) if isinstance(activation, bool) else activation


def causal_conv1d_fn(x, weight, bias, conv_states, query_start_loc, cache_indices=None, has_initial_state=None,
                     activation="silu", pad_slot_id=-1, null_block_id=0, metadata=None, validate_data=False):
    _expect_cpu(x)
    y = layer.short_conv_update(x.transpose(0, 1)[None], _window(conv_states, weight), weight, bias,
                                activation=_activation(activation), cu_seqlens=query_start_loc, indices=cache_indices,
                                has_state=has_initial_state, **ENGINE_SLOTS)
    return y[0].transpose(0, 1)


def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None, conv_state_indices=None,
                         num_accepted_tokens=None, query_start_loc=None, max_query_len=-1, null_block_id=0,
                         validate_data=False, out=None):
    _expect_cpu(x)
    if x.dim() != 2:
        raise NotImplementedError(f"x of {x.dim()} dimensions")
    activation = _activation(activation)
    if num_accepted_tokens is not None:
        y = _speculative_conv(x, conv_state, weight, bias, activation, conv_state_indices, num_accepted_tokens,
                              query_start_loc)
    else:
        rows, lengths = (x[:, None], None) if query_start_loc is None else (x[None], query_start_loc)
        y = layer.short_conv_update(rows, _window(conv_state, weight), weight, bias, activation=activation,
                                    cu_seqlens=lengths, indices=conv_state_indices, **ENGINE_SLOTS)
    return (x if out is None else out).copy_(y.view(x.shape))


def _speculative_conv(x, pages, weight, bias, activation, slots, accepted, cu_seqlens):
    """Drafts: a page has W - 1 inputs in front of the first token of the step before, less the oldest, and then that
    step's tokens. This step begins behind `accepted` of them, and leaves the same. A sequence is skipped if that is no
    count of them."""
    W, ends = weight.shape[-1], cu_seqlens.tolist()
    y = x.new_zeros(x.shape)
    for slot, count, begin, end in zip(slots.tolist(), accepted.tolist(), ends, ends[1:]):
        if slot < FIRST_SLOT or begin == end or not 1 <= count <= pages.shape[-1] - W + 2:
            continue
        page = pages[slot]
        before = page[:, count - 1:count + W - 2].clone()
        tokens = x[begin:end]
        y[begin:end] = layer.short_conv(tokens[None], weight, bias, activation=activation,
                                        initial_state=before[None])[0][0]
        page[:, :W - 2] = before[:, 1:]
        page[:, W - 2:W - 2 + end - begin] = tokens.transpose(0, 1)
    return y


def _stand_in(module):
    """On a CPU the module where Kimi-Linear looks for its kernels, if nobody has loaded it: the packages around it are
    made for GPUs."""
    if not module.current_platform.is_cpu() or _KERNELS in sys.modules:
        return

    def missing(*args, **kwargs):
        raise NotImplementedError(f"vLLM has no KDA on a CPU, and libkda has refused: {last_path()}")

    kernels = types.ModuleType(_KERNELS)
    for name in _places.sites[_KERNELS]:
        setattr(kernels, name, missing)
    sys.modules[_KERNELS] = kernels
    _places.replace(kernels)


# ---- their places ----------------------------------------------------------------------------------------------------

_plugin = Plugin("vllm")
_plugin.enabled = False
_KERNELS = "vllm.models.kimi_k3.nvidia.ops.third_party.kda"
_KIMI = "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn"
_RECOVERSSM = "vllm.models.kimi_k3.nvidia.ops.recoverssm"
_GDN = "vllm.model_executor.layers.mamba.gdn"
_CONVOLUTIONS = {"causal_conv1d_fn": ("conv", causal_conv1d_fn),
                 "causal_conv1d_update": ("conv", causal_conv1d_update)}
_POOL = {"gather_initial_states": ("states", gather_initial_states),
         "scatter_states": ("states", scatter_states)}
_places = Places(_plugin, {
    _KERNELS: {
        "chunk_kda_with_fused_gate": ("kda", chunk_kda_with_fused_gate),
        "fused_recurrent_kda": ("kda", fused_recurrent_kda),
        "fused_recurrent_kda_packed_decode": ("kda", fused_recurrent_kda_packed_decode),
    },
    _KIMI: {
        **_POOL,
        **_CONVOLUTIONS,
    },
    f"{_GDN}.qwen_gdn_linear_attn": {
        **_CONVOLUTIONS,
        "fla_chunk_gated_delta_rule": ("kda", gdn_chunk),
        "fi_chunk_gated_delta_rule": ("kda", gdn_flashinfer_chunk),
        "fused_recurrent_gated_delta_rule_packed_decode": ("kda", gdn_packed_decode),
        "fused_sigmoid_gating_delta_rule_update": ("kda", gdn_update),
    },
    f"{_GDN}.olmo_gdn_linear_attn": {
        **_CONVOLUTIONS,
        "chunk_gated_delta_rule": ("kda", gdn_chunk),
        "fused_recurrent_gated_delta_rule": ("kda", gdn_fused_recurrent),
    },
    "vllm.models.kimi_k3.nvidia.kda": {
        **_POOL,
        "is_fused_kda_decode_supported": ("step", is_fused_kda_decode_supported),
        "_flashkda_prefill": ("kda", _flashkda_prefill),
        "_flashinfer_kda_prefill": ("kda", _flashinfer_kda_prefill),
        "kda_recoverssm_verify": ("kda", kda_recoverssm_verify),
    },
    _RECOVERSSM: {
        "cute_recoverssm_commit": ("records", cute_recoverssm_commit),
        "KDARecoverSSMCommitContext.commit": ("commit", recoverssm_commit),
    },
    "vllm._custom_ops": {"fused_kda_decode": ("step", fused_kda_decode)},
    "vllm.models.glm5next.common.kda": {
        **_POOL,
        "chunk_kda_with_fused_gate": ("kda", glm_chunk_kda_with_fused_gate),
        "fused_recurrent_kda": ("kda", glm_fused_recurrent_kda),
        "Glm5NextLinearAttention._flashkda_prefill": ("kda", glm_flashkda_prefill),
    },
    "vllm.model_executor.models.bailing_moe_v3": {
        "chunk_kda": ("kda", ling_chunk_kda),
        "fused_recurrent_kda": ("kda", ling_fused_recurrent_kda),
        "fused_recurrent_kda_fwd": ("kda", ling_fused_recurrent_kda),
    },
}, as_host=_states, after={_KIMI: _stand_in})
enable, disable, places = _places.enable, _places.disable, _places.names
