# SPDX-License-Identifier: Apache-2.0
"""KDA and Gated DeltaNet of SGLang's models on libkda's kernels: LIBKDA_SGLANG=1 in the environment is all.

SGLang calls register() in each of its processes, as an entry point of its plugins. Methods of the same signatures take
the places of those of its kernel classes: of the Triton one, which is the default, and of FlashKDA's and FlashInfer's
where they are asked for. A call that libkda refuses goes on to SGLang's own method; last_path() says who served the
last one, and why.

States are read and written in SGLang's pool. Slot 0 is that of padded rows: it and negative ones are none, their
outputs are 0 and nothing else is touched.

On a GPU tokens and drafts stay with SGLang's kernels where those are faster (_plugins/measured.py), unless
LIBKDA_SGLANG_DECODE=1 asks for libkda's; 0 leaves all of them. Prompts of Gated DeltaNet stay with SGLang's kernels;
LIBKDA_SGLANG_GDN_PREFILL=1 asks for libkda's where FlashInfer's would be taken, and no states are to be kept on the
way.
"""
from __future__ import annotations

import functools

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from . import kda, rings, serving
from ._binding.rules import ENGINE_SLOTS, FIRST_SLOT
from ._plugins.places import Places
from ._plugins.plugin import Plugin
from ._plugins.switches import switch

_CHUNK = 64  # what track_chunk_idx counts
_NORMED = dict(use_qk_l2norm_in_kernel=True, state_v_first=True)
_RAW = dict(use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, **_NORMED)


def last_path(part: str = "kda") -> str | None:
    """Who served the last call that came by: "libkda: NAME", "sglang: NAME: REASON", or None before the first. part:
    "kda", or "step" for a decode step of a whole layer."""
    return _plugin.last_path(part)


def register() -> None:
    """What SGLang calls (entry point `libkda` of sglang.srt.plugins): enable(), if LIBKDA_SGLANG is 1."""
    if switch("LIBKDA_SGLANG", False):
        _places.enable()


# ---- arguments -------------------------------------------------------------------------------------------------------

def _channel_gates(a, states):
    """Raw gates [1, T, HV, K] of rows in any of SGLang's shapes."""
    HV, _, K = states.shape[1:]
    if a.dim() < 3 or a.shape[-2:] != (HV, K):  # of one head [..., T, K] has its width too
        a = a.unflatten(-1, (HV, K))
    return a.flatten(0, -3)[None]


def _betas(b):
    return b.flatten(0, -2)[None]


def _head_gates(a, states):
    """[1, T, HV] of Gated DeltaNet."""
    return a.flatten(0, -2)[None]


def _of_heads(method):
    """The same for Gated DeltaNet."""
    return functools.wraps(method)(functools.partial(method, gates=_head_gates))


def _leave_slower(step, rows, gates):
    """rows: v [B, T, HV, V]."""
    _plugin.leave_slower("gdn" if gates is _head_gates else "kda", step, rows)


def _refuse_rings(values):
    if any(x is not None for name, x in values.items() if name.startswith("replayssm_")):
        raise NotImplementedError("ReplaySSM's rings")


def _ring_of(values, lower_bound, gates):
    """The ring of a token of KDA, its count and what makes it fold, as arguments of decode_with_ring; None where SGLang
    takes a token without one: beside a bounded gate, and where only drafts have rings."""
    if gates is _head_gates:
        return _refuse_rings(values)
    d, k, g, counts = (values.get(f"replayssm_{name}") for name in ("d", "k", "g", "write_pos"))
    if lower_bound is not None or any(x is None for x in (d, k, g, counts)):
        return None
    return dict(ring=rings.Ring(k, g, d), counts=counts, flush=values.get("replayssm_force_flush"))


def _parameters(A_log, dt_bias, lower_bound):
    return dict(A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound)


# ---- the methods -----------------------------------------------------------------------------------------------------

def packed_decode(self, mixed_qkv, a, b, *, A_log, dt_bias, scale, ssm_states, cache_indices, num_v_heads, head_v_dim,
                  lower_bound=None, gates=_channel_gates, **of_rings):
    ring = _ring_of(of_rings, lower_bound, gates)
    B, K = mixed_qkv.shape[0], ssm_states.shape[-1]
    values = num_v_heads * head_v_dim
    keys = (mixed_qkv.shape[1] - values) // 2
    q, k, v = (x.unflatten(1, (-1, size))[:, None]
               for x, size in zip(mixed_qkv.split([keys, keys, values], dim=-1), (K, K, head_v_dim)))
    _leave_slower("ring" if ring else "decode", v, gates)
    step = rings.decode_with_ring if ring else serving.decode
    o = step(q, k, v, gates(a, ssm_states).transpose(0, 1), _betas(b).transpose(0, 1), ssm_states, cache_indices[:B],
             **(ring or {}), **ENGINE_SLOTS, scale=scale, **_parameters(A_log, dt_bias, lower_bound), **_RAW)
    return o.transpose(0, 1)


def decode(self, q, k, v, a, b, *, A_log, dt_bias, ssm_states, cache_indices, query_start_loc, lower_bound=None,
           gates=_channel_gates, **others):
    _leave_slower("decode", v, gates)
    o, _ = kda.fused_recurrent_kda_fwd(
        q, k, v, gates(a, ssm_states), _betas(b), initial_state=ssm_states, cu_seqlens=query_start_loc,
        ssm_state_indices=cache_indices[:query_start_loc.shape[0] - 1], **ENGINE_SLOTS,
        **_parameters(A_log, dt_bias, lower_bound), **_RAW)
    return o


def extend(self, q, k, v, g, beta, *, ssm_states, cache_indices, query_start_loc, A_log=None, dt_bias=None,
           lower_bound=None, beta_is_raw=False, return_intermediate_states=False, track_state=None,
           track_chunk_idx=None, track_ssm_h_src=None, **others):
    if return_intermediate_states and track_state is None and (track_ssm_h_src is None or track_ssm_h_src.numel()):
        raise NotImplementedError("the states of all chunks")
    slots = cache_indices[:query_start_loc.shape[0] - 1]
    modes = dict(_NORMED, use_gate_in_kernel=A_log is not None, use_beta_sigmoid_in_kernel=beta_is_raw,
                 **_parameters(A_log, dt_bias, lower_bound if A_log is not None else None))
    if track_state is None:
        o = serving.prefill(q, k, v, g, beta, ssm_states, slots, cu_seqlens=query_start_loc, **ENGINE_SLOTS,
                            **modes)
    else:
        o = _tracked(q, k, v, g, beta, ssm_states, slots, query_start_loc, track_state, track_chunk_idx, **modes)
    return (o, None) if return_intermediate_states else o


def _tracked(q, k, v, g, beta, pool, slots, cu_seqlens, track_state, chunk, **modes):
    """extend, with the fp32 state in front of chunk[n] of sequence n in track_state[n], where that is not negative and
    the sequence has a slot. Each small kernel takes about two microseconds of a GPU: hence so few."""
    has_slot = slots >= FIRST_SLOT
    chunk = torch.where(has_slot, chunk, -1)
    at_start = chunk == 0
    # In front of chunk 0 is the state that a sequence starts from; its slot will hold another one.
    first = pool.index_select(0, torch.where(at_start, slots, 0)).float()
    o = serving.prefill(q, k, v, g, beta, pool, torch.where(has_slot, slots, -1), cu_seqlens=cu_seqlens,
                        checkpoints=track_state, checkpoint_offsets=chunk * _CHUNK, checkpoint_every=_CHUNK,
                        checkpoint_slots=_numbers(len(slots), slots.device), **modes)
    torch.where(at_start[:, None, None, None], first, track_state, out=track_state)
    return o


def gdn_extend(self, q, k, v, g, beta, *, ssm_states, cache_indices, query_start_loc, num_state_checkpoints=0,
               output=None, **others):
    if not switch("LIBKDA_SGLANG_GDN_PREFILL", False):
        raise NotImplementedError("not measured against FlashInfer's kernel; LIBKDA_SGLANG_GDN_PREFILL=1 asks for it")
    if num_state_checkpoints:
        raise NotImplementedError("states on the way")
    if ssm_states.shape[0] <= cache_indices.shape[0]:  # slot 0 is a sequence's there
        raise NotImplementedError("states that SGLang has gathered from its pool")
    o = serving.prefill(q, k, v, g, beta, ssm_states, cache_indices[:query_start_loc.shape[0] - 1],
                        cu_seqlens=query_start_loc, **ENGINE_SLOTS, out=output, **_NORMED)
    return o, None, None


_counted: dict[tuple[int, torch.device], torch.Tensor] = {}


def _numbers(count, device):
    """0 to count - 1, made once: in a CUDA graph each small kernel takes more than a microsecond."""
    if (count, device) in _counted:
        return _counted[count, device]
    made = torch.arange(count, dtype=torch.int32, device=device)
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():  # there nothing has been written yet
        _counted[count, device] = made
    return made


def target_verify(self, A_log, dt_bias, q, k, v, a, b, *, ssm_states, cache_indices, query_start_loc,
                  intermediate_states_buffer, intermediate_state_indices, cache_steps, retrieve_parent_token,
                  lower_bound=None, fused_accept_state_indices=None, fused_accept_num_accepted=None,
                  gates=_channel_gates, **of_rings):
    _refuse_rings(of_rings)
    _leave_slower("verify", v, gates)
    scratch = intermediate_states_buffer
    if scratch is None:
        raise NotImplementedError("drafts without states behind them")
    if scratch.stride(0) != scratch.shape[1] * scratch.stride(1):
        raise NotImplementedError("states of drafts that are not in one pool")
    N, steps = query_start_loc.shape[0] - 1, scratch.shape[1]
    slots, accepted = fused_accept_state_indices, fused_accept_num_accepted
    tree = retrieve_parent_token is not None and cache_steps > 1
    if slots is None:
        slots = _numbers(cache_steps, scratch.device).add(intermediate_state_indices[:N, None], alpha=steps)
        if cache_steps == 1:
            slots = torch.nn.functional.pad(slots, (0, 1), value=-1)  # of a second draft that is not there
        # Not first_slot: it would be one of the drafts' slots too, of which row 0 has number 0.
        committed = torch.threshold(cache_indices[:N], FIRST_SLOT - 1, -1)
        return serving.verify(
            q, k, v, gates(a, ssm_states), _betas(b), ssm_states, committed, cu_seqlens=query_start_loc,
            drafts=scratch.flatten(0, 1), draft_slots=slots,
            parents=retrieve_parent_token[:N] if tree else None, **_parameters(A_log, dt_bias, lower_bound), **_RAW)
    if tree:
        raise NotImplementedError("drafts that are a tree, beside accepted lengths")
    if cache_steps == 1:
        slots, accepted = slots.flatten(), None
    o, _ = kda.fused_recurrent_kda_fwd(
        q, k, v, gates(a, ssm_states), _betas(b), initial_state=scratch.flatten(0, 1), cu_seqlens=query_start_loc,
        ssm_state_indices=slots[:N], num_accepted_tokens=None if accepted is None else accepted[:N],
        **_parameters(A_log, dt_bias, lower_bound), **_RAW)
    return o


_taps = WeakTensorKeyDictionary()  # of a layer's three weights, which SGLang makes once, in one tensor


def kda_fused_decode(mixed_qkv, a, b, conv_states, w_q_t, w_k_t, w_v_t, conv_bias, A_log, dt_bias, onorm_g,
                     onorm_weight, ssm_states, cache_indices, scale, onorm_eps, lower_bound=None):
    if mixed_qkv.is_cuda:
        _plugin.asks_for_decode()
    if w_q_t not in _taps:
        _taps[w_q_t] = torch.stack([w_q_t, w_k_t, w_v_t])
    heads = ssm_states.shape[-3:-1]
    return serving.fused_decode(
        mixed_qkv, _taps[w_q_t], conv_bias, conv_states.transpose(-1, -2), _channel_gates(a, ssm_states), _betas(b),
        A_log, dt_bias, cache_indices, ssm_states, None, lower_bound, onorm_g.unflatten(-1, heads), onorm_weight,
        onorm_eps, scale=scale, **ENGINE_SLOTS)


# ---- their places ----------------------------------------------------------------------------------------------------

_plugin = Plugin("sglang")
_plugin.enabled = False
_KERNELS = "sglang.srt.layers.attention.linear.kernels"
_places = Places(_plugin, {
    f"{_KERNELS}.kda_triton": {
        "TritonKDAKernel.packed_decode": ("kda", packed_decode),
        "TritonKDAKernel.decode": ("kda", decode),
        "TritonKDAKernel.extend": ("kda", extend),
        "TritonKDAKernel.target_verify": ("kda", target_verify),
    },
    f"{_KERNELS}.kda_flashkda": {"FlashKDAKernel.extend": ("kda", extend)},
    f"{_KERNELS}.kda_flashinfer": {
        "FlashInferKDAKernel.decode": ("kda", decode),
        "FlashInferKDAKernel.target_verify": ("kda", target_verify),
    },
    f"{_KERNELS}.gdn_triton": {
        "TritonGDNKernel.packed_decode": ("kda", _of_heads(packed_decode)),
        "TritonGDNKernel.decode": ("kda", _of_heads(decode)),
        "TritonGDNKernel.target_verify": ("kda", _of_heads(target_verify)),
    },
    f"{_KERNELS}.gdn_flashinfer": {
        "FlashInferGDNKernel.decode": ("kda", _of_heads(decode)),
        "FlashInferGDNKernel.extend": ("kda", gdn_extend),
        "FlashInferGDNKernel.target_verify": ("kda", _of_heads(target_verify)),
    },
    f"{_KERNELS}.gdn_cutedsl": {"CuteDSLGDNKernel.decode": ("kda", _of_heads(decode))},
    "sglang.kernels.ops.attention.kda_fused_decode": {"kda_fused_decode": ("step", kda_fused_decode)},
})
enable, disable, places = _places.enable, _places.disable, _places.names
