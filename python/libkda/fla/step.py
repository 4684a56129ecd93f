# SPDX-License-Identifier: Apache-2.0
"""A decode step of FLA's KimiDeltaAttention on a GPU: its convolutions, KDA, gate and norm by one call of fused_decode.
FLA asks its registry for each of these functions alone, five launches, so the layer's forward is what is replaced."""
from __future__ import annotations

import functools
import sys
import weakref

import torch
from torch.compiler import is_compiling

from .. import serving
from .._binding.library import cuda_refusal
from .._plugins.plugin import Plugin

_LAYERS = "fla.layers.kda"
_DEVICES = ("cuda",)  # one kernel there; elsewhere it would be the same three calls
_VERSIONS = ("0.6.",)  # of FLA whose layer this is
_last_mask = [None, 0, False]  # a weak reference, its count of changes, whether all sequences have a token


def _parts(layer):
    """The modules whose forward a step does without."""
    return layer.q_conv1d, layer.k_conv1d, layer.v_conv1d, layer.o_norm


def _weights_of(layer):
    """Weights [3 * H * D, W] and the bias. Made at every step: a parameter's values may change unseen, behind .data."""
    convs = _parts(layer)[:3]
    bias = None if convs[0].bias is None else torch.cat([conv.bias for conv in convs])
    return torch.cat([conv.weight for conv in convs])[:, 0], bias


def _joined(caches):
    """The inputs of the three convolutions as one tensor [N, 3 * H * D, W], and its three parts: `caches` themselves
    from the second step on."""
    first, (N, D, W) = caches[0], caches[0].shape
    strides, begin = (3 * D * W, W, 1), first.storage_offset()
    memory = first.untyped_storage().data_ptr()
    if any(x.stride() != strides or x.storage_offset() != begin + i * D * W
           or x.untyped_storage().data_ptr() != memory for i, x in enumerate(caches)):
        caches = torch.cat(caches, 1).chunk(3, 1)
        begin = 0
    return caches[0].as_strided((N, 3 * D, W), strides, begin), tuple(caches)


def _layer_reason(layer):
    """Why a layer is none of those that fused_decode computes; None if it is one."""
    if not layer.use_short_conv:
        return "a layer without convolutions"
    if layer.num_v_heads != layer.num_heads or not layer.head_k_dim == layer.head_v_dim == 128:
        return "value heads of their own number, or of other than 128 channels"
    if layer.allow_neg_eigval:
        return "allow_neg_eigval"
    convs = (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d)
    if any(conv.activation not in ("silu", "swish") or not 2 <= conv.kernel_size[0] <= 4 for conv in convs):
        return "a convolution without SiLU, or of other than 2 to 4 taps"
    if layer.o_norm.weight is None or layer.o_norm.bias is not None:
        return "a norm without a weight, or with a bias"
    return None


def _is_changed(module, device):
    """Whether a call of a module is more than its class says: hooks, a wrapper, parameters that come for the call."""
    return (not type(module).__module__.startswith("fla.") or "forward" in vars(module) or module._forward_hooks
            or module._forward_pre_hooks or any(x.device != device for x in module.parameters()))


def _all_have_a_token(mask):
    """Whether the last token of no sequence is masked. The layers of a model ask of one mask; the first one waits."""
    version = None if mask.is_inference() else mask._version
    kept, of, answer = _last_mask
    if version is None or kept is None or kept() is not mask or of != version:
        answer = bool(mask[:, -1].all())
        _last_mask[:] = weakref.ref(mask), version, answer
    return answer


def _call_reason(layer, x, cu_seqlens):
    if type(layer) is not sys.modules[_LAYERS].KimiDeltaAttention:
        return f"a layer of class {type(layer).__name__}"
    if x.device.type not in _DEVICES:
        return f"tensors on {x.device.type}"
    if x.is_cuda and (refusal := cuda_refusal(x.device.index)):
        return refusal
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"rows of {x.dtype}"
    if x.shape[1] != 1 or cu_seqlens is not None:
        return "no step of one token a sequence"
    if layer.training or torch.is_grad_enabled():
        return "a call with gradients"
    reason = _layer_reason(layer)
    if reason is None and any(_is_changed(module, x.device) for module in _parts(layer)):
        reason = "a convolution or norm with hooks, a forward of its own, or parameters elsewhere"
    return reason


def _mask_reason(mask):
    """Asked last: it waits for the GPU."""
    if mask is None:
        return None
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return "a mask while a CUDA graph is captured"
    return None if _all_have_a_token(mask) else "a sequence of the batch has no token"


def _state_of(layer, cache):
    there = cache is not None and layer.layer_idx is not None and len(cache) > layer.layer_idx
    return cache[layer.layer_idx] if there else None


def _state_reason(state):
    if state is None or state.get("recurrent_state") is None or not state.get("conv_state"):
        return "a cache without states"
    S = state["recurrent_state"]
    if S.dtype is not torch.float32 or not S.is_contiguous():
        return "a state that is not dense fp32"
    return None


def _step(layer, x, state, past_key_values):
    N, H, D = x.shape[0], layer.num_heads, layer.head_k_dim
    taps, bias = _weights_of(layer)
    inputs, caches = _joined(state["conv_state"])
    rows = torch.cat([project(x) for project in (layer.q_proj, layer.k_proj, layer.v_proj)], -1)
    heads = lambda rows: rows.view(N, 1, H, D)
    o = serving.fused_decode(rows, taps, bias, inputs, heads(layer.f_proj(x)), layer.b_proj(x), layer.A_log.float(),
                             layer.dt_bias.float(), None, state["recurrent_state"], None, layer.lower_bound,
                             heads(layer.g_proj(x)), layer.o_norm.weight, layer.o_norm.eps,
                             activation=layer.o_norm.activation)
    past_key_values.update(layer_idx=layer.layer_idx, recurrent_state=state["recurrent_state"], conv_state=caches,
                           offset=1)
    return layer.o_proj(o.view(N, 1, H * D)), None, past_key_values


def _forward(original, plugin):
    @functools.wraps(original)
    def forward(self, hidden_states, attention_mask=None, past_key_values=None, use_cache=False,
                output_attentions=False, **kwargs):
        """The layer's own forward, or a decode step on the states of its cache, which are updated in place."""
        if not is_compiling():
            state = _state_of(self, past_key_values) if use_cache else None
            reason = (plugin.disabled or _call_reason(self, hidden_states, kwargs.get("cu_seqlens"))
                      or _state_reason(state) or _mask_reason(attention_mask))
            if reason is None:
                try:
                    result = _step(self, hidden_states, state, past_key_values)
                except (NotImplementedError, TypeError, ValueError) as error:  # before anything is written
                    reason = str(error)
                else:
                    plugin.serves("fused_decode", "step")
                    plugin.serves("fused_decode")
                    return result
            plugin.leaves("KimiDeltaAttention", reason, "step")
        return original(self, hidden_states, attention_mask, past_key_values, use_cache, output_attentions, **kwargs)

    forward.of_libkda = True
    return forward


def serve(plugin: Plugin) -> None:
    """Puts the step into FLA's layer, if FLA's layers have been imported; they come with flash-linear-attention."""
    layers = sys.modules.get(_LAYERS)
    layer = getattr(layers, "KimiDeltaAttention", None)
    if layer is None or hasattr(layer.forward, "of_libkda"):
        return
    version = sys.modules["fla"].__version__
    if version.startswith(_VERSIONS):
        layer.forward = _forward(layer.forward, plugin)
    else:
        plugin.leaves("KimiDeltaAttention", f"the layer of FLA {version} is not known", "step")
