# SPDX-License-Identifier: Apache-2.0
"""The shared libraries of the package and the C ABI (include/kda/kda.h) through ctypes."""
import ctypes
import functools
import pathlib

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "lib"

I32, I64, PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


class Tensor(ctypes.Structure):
    _fields_ = [("data", PTR), ("dtype", I32), ("reserved", I32), ("strides", I64 * 4), ("alignment", I64)]


class State(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("num_slots", I64), ("indices", PTR), ("present", I32), ("indexed", I32)]


class Problem(ctypes.Structure):
    _fields_ = (
        [("struct_size", ctypes.c_size_t)]
        + [(n, I32) for n in ("operation", "gate_mode", "beta_mode", "state_layout")]
        + [(n, I64) for n in ("batch", "num_tokens", "num_heads", "num_value_heads", "key_dim", "value_dim",
                              "num_sequences")]
        + [(n, Tensor) for n in ("q", "k", "v", "g", "beta", "o", "A_log", "dt_bias")]
        + [("lower_bound", ctypes.c_double), ("scale", ctypes.c_double)]
        + [(n, I32) for n in ("has_scale", "qk_l2norm", "has_cu_seqlens", "cu_seqlens_dtype")]
        + [("cu_seqlens", PTR)]
        + [(n, State) for n in ("initial_state", "final_state", "checkpoints")]
        + [("initial_state_mask", PTR), ("num_accepted_tokens", PTR)]
        + [(n, I32) for n in ("has_initial_state_mask", "has_num_accepted_tokens")]
        + [(n, I64) for n in ("checkpoint_every", "state_index_columns")]
        + [(n, I32) for n in ("batch_invariant", "trusted")]
        + [("stream", PTR)]
        + [(n, I32) for n in ("zero_skipped", "reserved")]
        + [("first_slot", I64), ("saved", PTR), ("saved_bytes", ctypes.c_size_t)]
        + [(n, I32) for n in ("head_map", "reserved2")]
        + [("token_parents", PTR)]
        + [(n, I32) for n in ("has_token_parents", "has_checkpoint_offsets")]
        + [("checkpoint_offsets", PTR)]
    )


class GradientTensors(ctypes.Structure):
    _fields_ = (
        [("struct_size", ctypes.c_size_t)]
        + [(n, Tensor) for n in ("d_o", "d_final_state", "dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias",
                                 "d_initial_state")]
    )


class PlanOptions(ctypes.Structure):
    _fields_ = (
        [("struct_size", ctypes.c_size_t)]  # type: ignore[assignment]
        + [(n, I32) for n in ("device_kind", "num_sms", "context_parallel", "one_pass")]
        + [("num_segments", I64), ("num_threads", I32), ("compute_capability", I32), ("backend", ctypes.c_char_p),
           ("intra_form", I32), ("keep", I32), ("spans", I32),
           ("reserved", I32), ("most_cut_bytes", I64), ("memory_bytes_per_second", ctypes.c_double),
           ("gigahertz", ctypes.c_double)]
    )


@functools.cache
def library():
    """libkda_c.so of this package."""
    path = FOLDER / "libkda_c.so"
    if not path.exists():
        raise ImportError(f"libkda: {path} is missing; install the package with pip install .")
    lib = ctypes.CDLL(str(path))
    lib.kda_version.restype = lib.kda_last_error.restype = ctypes.c_char_p
    if not hasattr(lib, "kda_backward"):
        raise ImportError("libkda: the Python files and libkda_c.so are of different versions; reinstall the package")
    for sizes in (lib.kda_plan_workspace_bytes, lib.kda_plan_saved_bytes, lib.kda_backward_plan_workspace_bytes):
        sizes.restype, sizes.argtypes = ctypes.c_size_t, [PTR]
    lib.kda_run.argtypes = [PTR, PTR, PTR, ctypes.c_size_t]
    lib.kda_plan_destroy.argtypes = lib.kda_backward_plan_destroy.argtypes = [PTR]
    return lib


@functools.cache
def plan_cache():
    """The library's memory of plans for this process: planning takes longer than a small call."""
    cache = PTR()
    check(library().kda_plan_cache_create(ctypes.c_size_t(0), ctypes.byref(cache)))
    return cache


def new_options():
    """kda_plan_options with their defaults."""
    options = PlanOptions()
    library().kda_plan_options_init_size(ctypes.byref(options), ctypes.c_size_t(ctypes.sizeof(PlanOptions)))
    return options


@functools.cache
def cuda_refusal(ordinal):
    """Why this build does not run on a CUDA device: it has no kernels, or none for this card. None: it runs there."""
    options = new_options()
    if library().kda_plan_options_cuda(ctypes.byref(options), ordinal) == 0:
        return None
    return library().kda_last_error().decode()


def new_problem():
    """A kda_problem with its defaults."""
    problem = Problem()
    library().kda_problem_init_size(ctypes.byref(problem), ctypes.c_size_t(ctypes.sizeof(Problem)))
    return problem


def version():
    return library().kda_version().decode()


def check(status, words=str):
    """Raises the last error of this thread, in `words` of the caller: ValueError for arguments, RuntimeError for the
    rest."""
    if status == 0:
        return
    message = words(library().kda_last_error().decode())
    raise (ValueError if status in (1, 2) else MemoryError if status == 4 else RuntimeError)(message)
