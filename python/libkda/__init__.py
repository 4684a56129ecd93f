# SPDX-License-Identifier: Apache-2.0
"""Kimi Delta Attention: fast on CPUs and NVIDIA GPUs, exact on every gate.

    from libkda import chunk_kda, fused_recurrent_kda, fused_kda_gate   # FLA 0.6's signatures
    import libkda.fla                       # FLA's own functions and layers run libkda's kernels
    import libkda.transformers              # so do transformers' Kimi-Linear, GLM-5-Next and Ling
    LIBKDA_VLLM=1, LIBKDA_SGLANG=1          # in the environment: so do these engines
    from libkda import arrays               # NumPy and DLPack, without torch
    from libkda import jax                  # JAX, by XLA's FFI

Importing the package loads neither torch nor a GPU driver; the first use of a name does.
"""
import importlib

_NAMES = {
    "chunk_kda": "kda",
    "fused_recurrent_kda": "kda",
    "fused_recurrent_kda_fwd": "kda",
    "fused_kda_gate": "gate",
    "chunk_gated_delta_rule": "gated_delta",
    "fused_recurrent_gated_delta_rule": "gated_delta",
    "prefill": "serving",
    "decode": "serving",
    "verify": "serving",
    "fused_decode": "serving",
    "short_conv": "layer",
    "short_conv_update": "layer",
    "gated_rms_norm": "layer",
    "naive_recurrent_kda": "naive",
    "naive_chunk_kda": "naive",
    "naive_kda_gate": "naive",
    "naive_kda_lowerbound_gate": "naive",
}
_MODULES = ("arrays", "compat", "fla", "gate", "gated_delta", "jax", "kda", "layer", "naive", "ops", "serving",
            "sglang", "transformers", "vllm")
__all__ = ["__version__", *_NAMES]


def __getattr__(name):
    if name == "__version__":
        from ._library import version
        return version()
    if name in _NAMES:
        value = getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module 'libkda' has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *_NAMES, *_MODULES])
