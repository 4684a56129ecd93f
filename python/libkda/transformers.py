# SPDX-License-Identifier: Apache-2.0
"""Models of Hugging Face transformers on libkda's kernels: `import libkda.transformers` is all.

Models with KDA (Kimi-Linear, GLM-5-Next, Ling) and with Gated DeltaNet (Qwen3-Next, Qwen3.5 and its MoE, Qwen4-Exp,
OLMo-Hybrid, Lara-Mini) call four functions of their own model file, one for whole sequences, one for a token,
causal_conv1d_fn and causal_conv1d_update, and classes for their norms. Functions of the same signatures take their
places, so that models are served whether they were built before or after. A call that libkda refuses (a gradient that
it cannot give, a device or a size that it does not take) goes on to the function that was there; last_path() says who
served the last one and why. LIBKDA_TRANSFORMERS=0 leaves everything as it is until enable(); disable() puts the
originals back.
"""
from __future__ import annotations

import importlib
import inspect
from typing import NamedTuple

import torch

from . import gated_delta, kda, layer
from ._plugins.plugin import Plugin
from ._plugins.switches import switch

try:
    import transformers
except ImportError as error:
    raise ImportError("libkda.transformers needs transformers 5.16.1 or later (pip install transformers)") from error

_plugin = Plugin("transformers")


def last_path(part: str = "kda") -> str | None:
    """Who served the last call that came by: "libkda: NAME", "transformers: NAME: REASON", or None before the first.
    part: "kda" for KDA and Gated DeltaNet, "conv" for the short convolution, "norm" for the gated norm, "rms_norm" for
    a model's other norms."""
    return _plugin.last_path(part)


# ---- the functions ---------------------------------------------------------------------------------------------------

def _reason(tensors, options, rows=()):
    """Why libkda is not asked; None if it is. `rows`: q, k and v of KDA or Gated DeltaNet."""
    if _plugin.disabled:
        return _plugin.disabled
    if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():  # torch.compile answers yes to both
        return "an exported program must run without libkda"
    if options.get("seq_idx") is not None and options.get("cu_seqlens") is None:
        return "seq_idx without cu_seqlens"
    return _plugin.leaves_gradients(tensors, rows)


def _serve(part, original, tensors, options, function, *args, **modes):
    """function(*args, **modes), or None if the call is that of the function `original`; nothing has been written
    then. `options`: what the model hands down."""
    reason = _reason(tensors, options, tensors[:3] if part == "kda" else ())
    if reason is None:
        return _plugin.attempt(original, part, function, *args, **modes)
    _plugin.leaves(original, reason, part)
    return None


# A model hands its keyword arguments down to every layer; a function of libkda gets those that it has, as FLA's would.

def _attend(function, name, known, tensors, modes, options):
    """`function` of libkda's in the place of the model's function `name`; None if that has the call. `known`: the names
    of the options that libkda's has."""
    q, k, v, g, beta = tensors
    options_known = {option: x for option, x in options.items() if option in known}
    return _serve("kda", name, (*tensors, modes["initial_state"]), options, function, q, k, v, g=g, beta=beta,
                  **modes, **options_known)


def _chunk(original, name, function):
    known = frozenset(inspect.signature(function).parameters)

    def chunk(
        query,
        key,
        value,
        g,
        beta,
        chunk_size=64,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        **kwargs,
    ):
        """The model's own function by libkda, for which chunk_size makes no difference."""
        modes = dict(initial_state=initial_state, output_final_state=output_final_state,
                     use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
        result = _attend(function, name, known, (query, key, value, g, beta), modes, kwargs)
        if result is not None:
            return result
        return original(query, key, value, g=g, beta=beta, chunk_size=chunk_size, **modes, **kwargs)

    return chunk


def _recurrent(original, name, function):
    known = frozenset(inspect.signature(function).parameters)

    def recurrent(
        query,
        key,
        value,
        g,
        beta,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        **kwargs,
    ):
        """The model's own function by libkda's decode kernel. An fp32 initial_state whose successor is asked for is the
        cache's tensor: it is updated in place and returned, and the layer's copy of it into the cache does nothing."""
        modes = dict(initial_state=initial_state, output_final_state=output_final_state,
                     use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
        in_place = output_final_state and initial_state is not None and initial_state.dtype is torch.float32
        result = _attend(kda.fused_recurrent_kda_fwd if in_place else function, name, known,
                         (query, key, value, g, beta), modes, kwargs)
        if result is not None:
            return result
        return original(query, key, value, g=g, beta=beta, **modes, **kwargs)

    return recurrent


# The model's tensors are [B, D, T]. What libkda returns is so in shape, and [B, T, D] in memory, as KDA reads it.

def _conv(original):
    def causal_conv1d_fn(
        hidden_states,
        weight,
        bias=None,
        activation=None,
        **kwargs,
    ):
        """The model's own function by libkda.short_conv."""
        tensors = (hidden_states, weight, bias)
        result = _serve("conv", "causal_conv1d_fn", tensors, kwargs, layer.short_conv, hidden_states.transpose(1, 2),
                        weight, bias, activation=activation, cu_seqlens=kwargs.get("cu_seqlens"))
        if result is not None:
            return result[0].transpose(1, 2)
        return original(hidden_states, weight=weight, bias=bias, activation=activation, **kwargs)

    return causal_conv1d_fn


def _conv_update(original):
    def causal_conv1d_update(
        hidden_states,
        conv_state,
        weight,
        bias=None,
        activation=None,
    ):
        """The model's own function by libkda.short_conv_update, in place on the cache's tensor."""
        tensors = (hidden_states, conv_state, weight, bias)
        result = _serve("conv", "causal_conv1d_update", tensors, {}, layer.short_conv_update,
                        hidden_states.transpose(1, 2), conv_state, weight, bias, activation=activation)
        if result is not None:
            return result.transpose(1, 2)
        return original(hidden_states, conv_state, weight=weight, bias=bias, activation=activation)

    return causal_conv1d_update


def _rms_norm(original):
    def forward(self, hidden_states):
        """The class's own forward by libkda.gated_rms_norm without a gate. A class rounds to its type before it
        multiplies with the weight: other types than fp32 are its own."""
        weight = self.weight
        if hidden_states.dtype is torch.float32 and weight.dtype is torch.float32:
            result = _serve("rms_norm", type(self).__name__, (hidden_states, weight), {}, layer.gated_rms_norm,
                            hidden_states, None, weight, eps=self.variance_epsilon)
            if result is not None:
                return result
        else:
            _plugin.leaves(type(self).__name__, f"a norm of {hidden_states.dtype}", "rms_norm")
        return original(self, hidden_states)

    return forward


def _gated_norm(original):
    def forward(self, hidden_states, gate=None):
        """The class's own forward by libkda.gated_rms_norm."""
        if gate is None:
            return original(self, hidden_states, gate)
        result = _serve("norm", type(self).__name__, (hidden_states, gate, self.weight), {}, layer.gated_rms_norm,
                        hidden_states, gate, self.weight, eps=self.variance_epsilon, activation=self.activation)
        return original(self, hidden_states, gate) if result is None else result

    return forward


# ---- their places ----------------------------------------------------------------------------------------------------

class _Family(NamedTuple):
    """Models that compute the same: the names of their files, and of their two functions, each with what makes
    libkda's and the function of libkda that serves it."""
    models: tuple[str, ...]
    functions: dict


_FAMILIES = (
    _Family(("kimi_linear", "glm5_next", "bailing_hybrid"),
            {"chunk_kimi_delta_attention": (_chunk, kda.chunk_kda),
             "recurrent_kimi_delta_attention": (_recurrent, kda.fused_recurrent_kda)}),
    _Family(("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "olmo_hybrid", "lara_mini"),
            {"torch_chunk_gated_delta_rule": (_chunk, gated_delta.chunk_gated_delta_rule),
             "torch_recurrent_gated_delta_rule": (_recurrent, gated_delta.fused_recurrent_gated_delta_rule)}))
_CONVOLUTIONS = {"causal_conv1d_fn": _conv, "causal_conv1d_update": _conv_update}


def _model_files():
    """The installed model files that have both functions of their family, with that family."""
    found, missing = [], None
    for family in _FAMILIES:
        for model in family.models:
            try:
                module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
            except ImportError as error:
                missing = error
                continue
            if all(hasattr(module, function) for function in family.functions):
                found.append((module, family))
    if not found:
        known = ", ".join(model for family in _FAMILIES for model in family.models)
        raise ImportError(f"libkda.transformers serves {known}, and none of them is in transformers "
                          f"{transformers.__version__} (5.16.1 has most of them, 5.24 all)") from missing
    return found


def _replaced(file, family):
    """What a model file has that libkda serves: where it is, its name, and libkda's in place of it."""
    for name, (make, function) in family.functions.items():
        ours = make(getattr(file, name), name, function)
        ours.__name__ = ours.__qualname__ = name
        yield file, name, ours
    for name, make in _CONVOLUTIONS.items():
        if hasattr(file, name):
            yield file, name, make(getattr(file, name))
    for name, found in vars(file).items():
        if not isinstance(found, type) or found.__module__ != file.__name__:
            continue
        if name.endswith("RMSNormGated"):
            yield found, "forward", _gated_norm(found.forward)
        elif name.endswith("RMSNorm") and [*inspect.signature(found.forward).parameters] == ["self", "hidden_states"]:
            yield found, "forward", _rms_norm(found.forward)


_files = _model_files()
_places: list = []  # while enabled: the model file or class, the name, what was there, and libkda's function


def enable(*, train_on_gpu: bool = False) -> None:
    """Serve the models' calls (the state after import). train_on_gpu: also calls on a GPU whose gradients are asked for
    and whose q, k, v are not bf16 with K up to 128, K and V multiples of 8. libkda's backward of those is exact for
    every gate, but slow (docs/design/backward_fp32.md)."""
    _plugin.train_on_gpu = train_on_gpu
    if _places:
        return
    for file, family in _files:
        for place, name, ours in [*_replaced(file, family)]:
            _places.append((place, name, getattr(place, name), ours))
            setattr(place, name, ours)
    _plugin.enabled = True


def disable() -> None:
    """Put the models' own functions back until enable()."""
    _plugin.enabled = False
    _plugin.paths.clear()
    for place, name, original, ours in _places:
        if getattr(place, name) is ours:  # not somebody else's, in front of ours
            setattr(place, name, original)
    _places.clear()


if switch("LIBKDA_TRANSFORMERS", True):
    enable()
else:
    disable()
