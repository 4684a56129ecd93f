# SPDX-License-Identifier: Apache-2.0
"""Models of Hugging Face transformers on libkda's kernels: `import libkda.transformers` is all.

Kimi-Linear, GLM-5-Next and Ling (bailing_hybrid) call four functions of their own model file,
chunk_kimi_delta_attention, recurrent_kimi_delta_attention, causal_conv1d_fn and causal_conv1d_update, and classes for
their norms. Functions of the same signatures take their places, so that models are served whether they were built
before or after. A call that libkda refuses (a gradient that it cannot give, a device or a size that it does not take)
goes on to the function that was there; last_path() says who served the last one and why. LIBKDA_TRANSFORMERS=0 leaves
everything as it is until enable(); disable() puts the originals back.
"""
from __future__ import annotations

import importlib
import inspect

import torch

from . import kda, layer
from ._plugins.plugin import Plugin
from ._plugins.switches import switch

try:
    import transformers
except ImportError as error:
    raise ImportError("libkda.transformers needs transformers 5.16.1 or later (pip install transformers)") from error

_plugin = Plugin("transformers")


def last_path(part: str = "kda") -> str | None:
    """Who served the last call that came by: "libkda: NAME", "transformers: NAME: REASON", or None before the first.
    Models of other families than Kimi-Linear, GLM-5-Next and Ling, such as Qwen3-Next, do not come by. part: "kda",
    "conv" for the short convolution, "norm" for the gated norm, "rms_norm" for a model's other norms."""
    return _plugin.last_path(part)


# ---- the functions ---------------------------------------------------------------------------------------------------

# A model hands its keyword arguments down to every layer; these are the ones that FLA's functions would get.
_CHUNK_OPTIONS = frozenset(inspect.signature(kda.chunk_kda).parameters)
_RECURRENT_OPTIONS = frozenset(inspect.signature(kda.fused_recurrent_kda).parameters)


def _reason(tensors, options, rows=()):
    """Why libkda is not asked; None if it is. `rows`: q, k and v of KDA."""
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


def _serve_kda(function, original, arguments, modes, names, options):
    known = {name: x for name, x in options.items() if name in names}
    return _serve("kda", original, (*arguments, modes["initial_state"]), options, function, *arguments, **modes,
                  **known)


def _chunk(original):
    def chunk_kimi_delta_attention(
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
        """The model's own function by libkda.chunk_kda, for which chunk_size makes no difference."""
        modes = dict(initial_state=initial_state, output_final_state=output_final_state,
                     use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
        result = _serve_kda(kda.chunk_kda, "chunk_kimi_delta_attention", (query, key, value, g, beta), modes,
                            _CHUNK_OPTIONS, kwargs)
        if result is not None:
            return result
        return original(query, key, value, g=g, beta=beta, chunk_size=chunk_size, **modes, **kwargs)

    return chunk_kimi_delta_attention


def _recurrent(original):
    def recurrent_kimi_delta_attention(
        query,
        key,
        value,
        g,
        beta,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel=False,
        **kwargs,
    ):
        """The model's own function by libkda's decode kernel. An fp32 initial_state whose successor is asked for is the
        cache's tensor: it is updated in place and returned, and the layer's copy of it into the cache does nothing."""
        modes = dict(initial_state=initial_state, output_final_state=output_final_state,
                     use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
        in_place = output_final_state and initial_state is not None and initial_state.dtype is torch.float32
        function = kda.fused_recurrent_kda_fwd if in_place else kda.fused_recurrent_kda
        result = _serve_kda(function, "recurrent_kimi_delta_attention", (query, key, value, g, beta), modes,
                            _RECURRENT_OPTIONS, kwargs)
        if result is not None:
            return result
        return original(query, key, value, g=g, beta=beta, **modes, **kwargs)

    return recurrent_kimi_delta_attention


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

_MODELS = ("kimi_linear", "glm5_next", "bailing_hybrid")
_FUNCTIONS = {"chunk_kimi_delta_attention": _chunk, "recurrent_kimi_delta_attention": _recurrent}
_CONVOLUTIONS = {"causal_conv1d_fn": _conv, "causal_conv1d_update": _conv_update}


def _model_files():
    """The installed model files that have both functions."""
    found, missing = [], None
    for model in _MODELS:
        try:
            module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
        except ImportError as error:
            missing = error
            continue
        if all(hasattr(module, function) for function in _FUNCTIONS):
            found.append(module)
    if not found:
        raise ImportError(f"libkda.transformers serves {', '.join(_MODELS)}, and none of them is in transformers "
                          f"{transformers.__version__} (5.16.1 has the first, 5.21.1 all)") from missing
    return found


def _replaced(file):
    """What a model file has that libkda serves: where it is, its name, and what makes libkda's."""
    for name, make in (*_FUNCTIONS.items(), *_CONVOLUTIONS.items()):
        if hasattr(file, name):
            yield file, name, make
    for name, found in vars(file).items():
        if not isinstance(found, type) or found.__module__ != file.__name__:
            continue
        if name.endswith("RMSNormGated"):
            yield found, "forward", _gated_norm
        elif name.endswith("RMSNorm") and [*inspect.signature(found.forward).parameters] == ["self", "hidden_states"]:
            yield found, "forward", _rms_norm


_files = _model_files()
_places: list = []  # while enabled: the model file or class, the name, what was there, and libkda's function


def enable(*, train_on_gpu: bool = False) -> None:
    """Serve the models' calls (the state after import). train_on_gpu: also calls on a GPU whose gradients are asked for
    and whose q, k, v are not bf16 with K up to 128, K and V multiples of 8. libkda's backward of those is exact for
    every gate, but slow (docs/design/backward_fp32.md)."""
    _plugin.train_on_gpu = train_on_gpu
    if _places:
        return
    for file in _files:
        for place, name, make in _replaced(file):
            original = getattr(place, name)
            _places.append((place, name, original, make(original)))
            setattr(place, name, _places[-1][-1])
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
