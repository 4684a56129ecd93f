# SPDX-License-Identifier: Apache-2.0
"""Models of Hugging Face transformers on libkda's kernels: `import libkda.transformers` is all.

Kimi-Linear, GLM-5-Next and Ling (bailing_hybrid) call two functions of their own model file,
chunk_kimi_delta_attention and recurrent_kimi_delta_attention. Functions of the same signatures take their places, so
that models are served whether they were built before or after. A call that libkda refuses (a gradient that it cannot
give, a device or a size that it does not take) goes on to the function that was there; last_path() says who served the
last one and why. LIBKDA_TRANSFORMERS=0 leaves everything as it is until enable(); disable() puts the originals back.
"""
from __future__ import annotations

import importlib
import inspect
import os

import torch

from . import kda
from ._plugin import Plugin

try:
    import transformers
except ImportError as error:
    raise ImportError("libkda.transformers needs transformers 5.16.1 or later (pip install transformers)") from error

_plugin = Plugin("transformers")


def last_path() -> str | None:
    """Who served the last call that came by: "libkda: NAME", "transformers: NAME: REASON", or None before the first."""
    return _plugin.path


# ---- the functions ---------------------------------------------------------------------------------------------------

# A model hands its keyword arguments down to every layer; these are the ones that FLA's functions would get.
_CHUNK_OPTIONS = frozenset(inspect.signature(kda.chunk_kda).parameters)
_RECURRENT_OPTIONS = frozenset(inspect.signature(kda.fused_recurrent_kda).parameters)


def _reason(tensors, options):
    """Why libkda is not asked; None if it is."""
    if _plugin.disabled:
        return _plugin.disabled
    if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():  # torch.compile answers yes to both
        return "an exported program must run without libkda"
    if options.get("seq_idx") is not None and options.get("cu_seqlens") is None:
        return "seq_idx without cu_seqlens"
    return _plugin.leaves_gradients(tensors)


def _serve(function, original, arguments, modes, names, options):
    """The result of `function`, or None if the call is the original's; nothing has been written then."""
    reason = _reason((*arguments, modes["initial_state"]), options)
    if reason is None:
        known = {name: x for name, x in options.items() if name in names}
        try:
            result = function(*arguments, **modes, **known)
            _plugin.serves(function.__name__)
            return result
        except (NotImplementedError, TypeError, ValueError) as refusal:
            reason = str(refusal).partition("\n")[0]
        except RuntimeError as failure:
            reason = str(failure)
            if "this build has no" not in reason:  # CUDA, or kernels for this card
                raise
    _plugin.leaves(original, reason)
    return None


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
        result = _serve(kda.chunk_kda, "chunk_kimi_delta_attention", (query, key, value, g, beta), modes,
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
        result = _serve(function, "recurrent_kimi_delta_attention", (query, key, value, g, beta), modes,
                        _RECURRENT_OPTIONS, kwargs)
        if result is not None:
            return result
        return original(query, key, value, g=g, beta=beta, **modes, **kwargs)

    return recurrent_kimi_delta_attention


# ---- their places ----------------------------------------------------------------------------------------------------

_MODELS = ("kimi_linear", "glm5_next", "bailing_hybrid")
_FUNCTIONS = {"chunk_kimi_delta_attention": _chunk, "recurrent_kimi_delta_attention": _recurrent}


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


_files = _model_files()
_places: list = []  # while enabled: the model file, the name, what was there, and libkda's function


def enable(*, train_on_gpu: bool = False) -> None:
    """Serve the models' calls (the state after import). train_on_gpu: also calls on a GPU whose gradients are asked
    for. libkda's backward there is exact for every gate, but not yet fast (docs/design/backward.md)."""
    _plugin.train_on_gpu = train_on_gpu
    if _places:
        return
    for file in _files:
        for name, make in _FUNCTIONS.items():
            original = getattr(file, name)
            _places.append((file, name, original, make(original)))
            setattr(file, name, _places[-1][-1])
    _plugin.enabled = True


def disable() -> None:
    """Put the models' own functions back until enable()."""
    _plugin.enabled = False
    _plugin.path = None
    for file, name, original, ours in _places:
        if getattr(file, name) is ours:  # not somebody else's, in front of ours
            setattr(file, name, original)
    _places.clear()


if os.environ.get("LIBKDA_TRANSFORMERS") != "0":
    enable()
else:
    disable()
