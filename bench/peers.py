#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""libkda beside Python peers on the CPU, in one process, on the same inputs.

    python3 bench/peers.py [--tokens 4096] [--heads 4] [--threads 2] [--json FILE]

Needs torch and fla-core from PyPI, and build/libkda_c.so (./dev build). libkda is called through
its C ABI with ctypes, as any other language would.
"""
import argparse
import ctypes
import json
import math
import pathlib
import time

import fla
import torch
from fla.ops.kda import naive

ROOT = pathlib.Path(__file__).resolve().parent.parent
K = V = 128


class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_int32), ("reserved", ctypes.c_int32),
                ("strides", ctypes.c_int64 * 4), ("alignment", ctypes.c_int64)]


class State(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("num_slots", ctypes.c_int64), ("indices", ctypes.c_void_p),
                ("present", ctypes.c_int32), ("indexed", ctypes.c_int32)]


class Problem(ctypes.Structure):
    _fields_ = ([("struct_size", ctypes.c_size_t)] +
                [(n, ctypes.c_int32) for n in ("operation", "gate_mode", "beta_mode", "state_layout")] +
                [(n, ctypes.c_int64) for n in ("batch", "num_tokens", "num_heads", "num_value_heads",
                                               "key_dim", "value_dim", "num_sequences")] +
                [(n, Tensor) for n in ("q", "k", "v", "g", "beta", "o", "A_log", "dt_bias")] +
                [("lower_bound", ctypes.c_double), ("scale", ctypes.c_double)] +
                [(n, ctypes.c_int32) for n in ("has_scale", "qk_l2norm", "has_cu_seqlens",
                                               "cu_seqlens_dtype")] +
                [("cu_seqlens", ctypes.c_void_p)] +
                [(n, State) for n in ("initial_state", "final_state", "checkpoints")] +
                [("initial_state_mask", ctypes.c_void_p), ("num_accepted_tokens", ctypes.c_void_p)] +
                [(n, ctypes.c_int32) for n in ("has_initial_state_mask", "has_num_accepted_tokens")] +
                [(n, ctypes.c_int64) for n in ("checkpoint_every", "state_index_columns")] +
                [(n, ctypes.c_int32) for n in ("batch_invariant", "reserved")])


class PlanOptions(ctypes.Structure):
    _fields_ = ([("struct_size", ctypes.c_size_t)] +
                [(n, ctypes.c_int32) for n in ("device_kind", "num_sms", "context_parallel", "one_pass")] +
                [("num_segments", ctypes.c_int64), ("num_threads", ctypes.c_int32),
                 ("reserved", ctypes.c_int32), ("backend", ctypes.c_char_p)])


class Library:
    def __init__(self):
        self.lib = ctypes.CDLL(str(ROOT / "build" / "libkda_c.so"))
        self.lib.kda_last_error.restype = ctypes.c_char_p
        self.lib.kda_plan_workspace_bytes.restype = ctypes.c_size_t

    def check(self, status):
        if status != 0:
            raise RuntimeError(self.lib.kda_last_error().decode())

    def tensor(self, target, x):
        shape = (ctypes.c_int64 * x.dim())(*x.shape)
        self.check(self.lib.kda_tensor_contiguous(ctypes.byref(target), ctypes.c_void_p(x.data_ptr()),
                                                  0, x.dim(), shape))

    def prepare(self, q, k, v, g, beta, o, threads):
        """A callable that runs forward into `o`, with its plan and workspace made once."""
        problem = Problem()
        self.lib.kda_problem_init(ctypes.byref(problem))
        if problem.struct_size != ctypes.sizeof(Problem):
            raise RuntimeError("kda_problem has changed: bring bench/peers.py up to date")
        problem.num_tokens, problem.num_heads, problem.num_value_heads = q.shape[1], q.shape[2], v.shape[2]
        for name, x in dict(q=q, k=k, v=v, g=g, beta=beta, o=o).items():
            self.tensor(getattr(problem, name), x)
        options = PlanOptions()
        self.lib.kda_plan_options_init(ctypes.byref(options))
        options.num_threads = threads
        plan = ctypes.c_void_p()
        self.check(self.lib.kda_plan_create(ctypes.byref(problem), None, ctypes.byref(options),
                                            ctypes.byref(plan)))
        size = self.lib.kda_plan_workspace_bytes(plan)
        memory = torch.empty(size + 64, dtype=torch.uint8)
        start = (memory.data_ptr() + 63) // 64 * 64

        def call(kept_alive=memory):
            self.check(self.lib.kda_run(plan, ctypes.byref(problem), ctypes.c_void_p(start),
                                        ctypes.c_size_t(size)))

        return call


def median_seconds(call, repeats):
    call()
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return sorted(samples)[len(samples) // 2]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    shape = (1, args.tokens, args.heads, K)
    unit = lambda: torch.nn.functional.normalize(torch.randn(shape), dim=-1)
    q, k, v = unit(), unit(), torch.randn(shape)
    g = -torch.exp(torch.randn(shape) / 2) * 0.05
    beta = torch.rand(shape[:3])
    o = torch.full(shape, math.nan)
    library = Library().prepare(q, k, v, g, beta, o, args.threads)
    ours = median_seconds(library, 15)
    rows = [{"name": "libkda", "median_s": ours, "speedup": 1.0, "error": 0.0}]
    for name, repeats in (("naive_chunk_kda", 3), ("naive_recurrent_kda", 1)):
        function = getattr(naive, name)
        result = function(q, k, v, g, beta, output_final_state=True)
        theirs = result[0] if isinstance(result, tuple) else result
        error = ((theirs - o).norm() / o.norm()).item()
        seconds = median_seconds(lambda: function(q, k, v, g, beta, output_final_state=True), repeats)
        rows.append({"name": f"fla.ops.kda.naive.{name}", "median_s": seconds,
                     "speedup": seconds / ours, "error": error})
    for row in rows:
        print(f'{row["name"]:38} {row["median_s"] * 1e3:10.2f} ms   {row["speedup"]:7.1f}x   {row["error"]:.1e}')
    if args.json:
        report = {"tokens": args.tokens, "heads": args.heads, "threads": args.threads,
                  "torch": torch.__version__, "fla": fla.__version__, "rows": rows}
        pathlib.Path(args.json).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
