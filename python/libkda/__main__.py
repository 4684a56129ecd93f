# SPDX-License-Identifier: Apache-2.0
"""What this installation of libkda is, and what runs here: quote it when you report a problem.

    python -m libkda [--json]    versions, the kernels that this CPU and each GPU get, engines that are installed
    kda ...                      the command (docs/files.md), where the build has it
"""
import argparse
import ctypes
import importlib.metadata
import json
import os
import pathlib
import platform
import sys

from ._binding import library
from ._binding.library import I64, PTR

# Packages that libkda serves or stands on, by their names on the index.
PACKAGES = ("torch", "triton", "numpy", "jax", "transformers", "fla-core", "flash-linear-attention", "vllm", "sglang")
SWITCHES = ("LIBKDA_", "FLA_", "OMP_NUM_THREADS")
_BF16, _FP32, _DECODE = 2, 0, 1  # of kda.h


def _typical(decode):
    """A call as trained layers make it: bf16, 16 heads of 128 channels, bounded gates, a pool of fp32 states."""
    lib, problem = library.library(), library.new_problem()
    tokens = 1 if decode else 8192
    problem.batch, problem.num_tokens, problem.num_sequences = 1, tokens, 1
    problem.num_heads = problem.num_value_heads = 16
    problem.key_dim = problem.value_dim = 128
    problem.operation, problem.gate_mode, problem.beta_mode, problem.qk_l2norm = _DECODE * decode, 2, 1, 1

    def describe(tensor, dtype, *shape):
        sizes = (I64 * len(shape))(*shape)
        library.check(lib.kda_tensor_contiguous(ctypes.byref(tensor), None, dtype, len(shape), sizes))
    for name in ("q", "k", "v", "g", "o"):
        describe(getattr(problem, name), _BF16, 1, tokens, 16, 128)
    describe(problem.beta, _BF16, 1, tokens, 16)
    describe(problem.A_log, _FP32, 16)
    describe(problem.dt_bias, _FP32, 16, 128)
    for state in (problem.initial_state,) if decode else (problem.initial_state, problem.final_state):
        describe(state.tensor, _FP32, 1, 16, 128, 128)
        state.num_slots = state.present = 1
    return problem


def _kernels(options):
    """{what: the implementation that a typical call gets} on the device of `options`."""
    lib, found = library.library(), {}
    lib.kda_plan_implementation.restype = ctypes.c_char_p
    for what, decode in (("prefill", False), ("decode", True)):
        plan = PTR()
        problem = _typical(decode)
        library.check(lib.kda_plan_create(ctypes.byref(problem), None, ctypes.byref(options), ctypes.byref(plan)))
        found[what] = lib.kda_plan_implementation(plan).decode() or "none"
        lib.kda_plan_destroy(plan)
    return found


def _gpus():
    """What each GPU gets; and why there is none, where that is so."""
    lib, found = library.library(), []
    while True:
        options = library.new_options()
        if lib.kda_plan_options_cuda(ctypes.byref(options), len(found)) != 0:
            return found, None if found else lib.kda_last_error().decode()
        found.append({"compute_capability": options.compute_capability / 10, "sms": options.num_sms,
                      "kernels": _kernels(options)})


def _cpu_name():
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def report():
    """The report as plain values. It imports no other package and starts no GPU work."""
    gpus, refusal = _gpus()
    return {
        "libkda": library.version(),
        "folder": str(library.FOLDER.parent),
        "torch operators": (library.FOLDER / "libkda_torch.so").exists(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": {"name": _cpu_name(), "cores": len(os.sched_getaffinity(0)), "kernels": _kernels(library.new_options())},
        "gpus": gpus,
        "no gpu because": refusal,
        "packages": {name: _version(name) for name in PACKAGES},
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(SWITCHES)},
    }


def _as_text(found):
    kernels = lambda of: ", ".join(f"{what} {name}" for what, name in of["kernels"].items())
    operators = "with" if found["torch operators"] else "without"
    rows = [("libkda", f"{found['libkda']}, {operators} torch's operators, in {found['folder']}"),
            ("python", f"{found['python']} on {found['system']}"),
            ("cpu", f"{found['cpu']['name']}, {found['cpu']['cores']} cores: {kernels(found['cpu'])}")]
    rows += [(f"gpu {n}", f"compute capability {gpu['compute_capability']}, {gpu['sms']} SMs: {kernels(gpu)}")
             for n, gpu in enumerate(found["gpus"])]
    if found["no gpu because"]:
        rows.append(("gpu", found["no gpu because"]))
    installed = ", ".join(f"{name} {version}" for name, version in found["packages"].items() if version)
    rows.append(("packages", installed or "none of those it serves"))
    rows.append(("environment", " ".join(f"{k}={v}" for k, v in found["environment"].items()) or "no switches set"))
    return "\n".join(f"{name:12}{text}" for name, text in rows)


def command():
    """The kda command, which is in libkda_c.so where the wheel was built with it."""
    run = getattr(library.library(), "kda_command_main", None)
    if run is None:
        sys.exit("kda: this build of libkda has no kda command (it was built with KDA_BUILD_TOOLS=OFF, as pip does from"
                 " sources); ./dev build makes one, and python -m libkda says what runs here")
    words = [b"kda", *(os.fsencode(word) for word in sys.argv[1:])]
    sys.exit(run(len(words), (ctypes.c_char_p * (len(words) + 1))(*words, None)))


def main():
    parser = argparse.ArgumentParser(prog="python -m libkda", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    arguments = parser.parse_args()
    found = report()
    print(json.dumps(found, indent=1) if arguments.json else _as_text(found))


if __name__ == "__main__":
    main()
