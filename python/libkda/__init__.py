# SPDX-License-Identifier: Apache-2.0
"""Kimi Delta Attention: fast on CPUs and NVIDIA GPUs, exact on every gate.

    from libkda import chunk_kda, fused_recurrent_kda, fused_kda_gate   # FLA 0.6's signatures
    import libkda.fla                       # FLA's own functions and layers run libkda's kernels
    import libkda.transformers              # so do transformers' Kimi-Linear, GLM-5-Next and Ling
    LIBKDA_VLLM=1, LIBKDA_SGLANG=1          # in the environment: so do these engines
    from libkda import arrays               # NumPy and DLPack, without torch
    from libkda import jax                  # JAX, by XLA's FFI

Functions on torch tensors, which need torch 2.10 or later:

    chunk_kda, fused_recurrent_kda      KDA over sequences, with gradients; over a few tokens
    fused_kda_gate                      the gate of KDA by itself, with gradients
    chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
                                        Gated DeltaNet, which has one gate a head: the same two
    prefill, decode, verify             serving: sequences, tokens and drafts on a pool of states
    Tail, tail, settle                  serving: the tokens since the states of a pool, which a step does not write then
    Ring, decode_with_ring              serving: the same in the rings that an engine keeps beside its states
    split_states, join_states           serving: float32 states as those of a pool and a tail, and back
    fused_decode                        serving: a decode step of a whole layer
    short_conv, short_conv_update       the short convolution in front of KDA: with gradients; on a pool of states
    gated_rms_norm                      the gated norm behind KDA, with gradients
    Options, options                    how calls are planned: a value for plan_options=, and `with` for a thread
    naive_recurrent_kda, naive_chunk_kda, naive_kda_gate, naive_kda_lowerbound_gate
                                        references in plain torch

Modules beside them:

    libkda.context_parallel             context parallelism: sequences over several processes
    libkda.jax                          forward with gradients, decode and prefill in JAX, without torch
    libkda.compat.flash_kda             FlashKDA's interface on libkda's kernels
    libkda.ops                          the operators, torch.ops.libkda

Importing the package loads neither torch nor a GPU driver; the first use of a name does. help(libkda) changes nothing
in other packages: it loads no plugin.
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
    "Ring": "rings",
    "decode_with_ring": "rings",
    "Tail": "tails",
    "tail": "tails",
    "settle": "tails",
    "join_states": "tails",
    "split_states": "tails",
    "short_conv": "layer",
    "short_conv_update": "layer",
    "gated_rms_norm": "layer",
    "Options": "_binding.options",
    "options": "_binding.options",
    "naive_recurrent_kda": "naive",
    "naive_chunk_kda": "naive",
    "naive_kda_gate": "naive",
    "naive_kda_lowerbound_gate": "naive",
}
_MODULES = ("arrays", "compat", "context_parallel", "fla", "gate", "gated_delta", "jax", "kda", "layer", "naive", "ops",
            "rings", "rollout", "serving", "sglang", "tails", "transformers", "vllm")
_WITHOUT_TORCH = ("arrays", "compat", "jax")
# dir() is without them: who looks at each of its names, as help() does, loads them. Two put functions of libkda into
# other packages, or say that these are missing; the others need torch.distributed and JAX.
_BY_NAME_ALONE = ("context_parallel", "fla", "jax", "sglang", "transformers", "vllm")
__all__ = ["__version__", "get_include", *_NAMES]


def get_include():
    """The folder of the C and C++ headers (kda/kda.h), which are those of the libkda_c.so beside them."""
    import pathlib
    return str(pathlib.Path(__file__).resolve().parent / "include")


def __getattr__(name):
    if name == "__version__":
        from ._binding.library import version
        return version()
    if name in _NAMES:
        value = getattr(_module(_NAMES[name], name), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return _module(name, name)
    raise AttributeError(f"module 'libkda' has no attribute {name!r}")


def _module(module, name):
    try:
        return importlib.import_module(f"{__name__}.{module}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"libkda.{name} needs torch 2.10 or later (pip install 'libkda[torch]'); libkda.arrays works "
                          "without it") from error


def _has_torch():
    """Whether there is a torch that libkda takes, without loading it."""
    import importlib.metadata
    import importlib.util
    import pathlib
    operators = pathlib.Path(__file__).parent / "lib" / "libkda_torch.so"
    if importlib.util.find_spec("torch") is None or not operators.exists():
        return False
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:  # torch in its own build folder
        return True
    return tuple(int(x) for x in version.split(".")[:2]) >= (2, 10)


def __dir__():
    late = [name for name in (*_NAMES, *_MODULES) if name not in _BY_NAME_ALONE]
    if not _has_torch():
        late = [name for name in late if name in _WITHOUT_TORCH]
    return sorted({*globals(), "__version__", *late})
