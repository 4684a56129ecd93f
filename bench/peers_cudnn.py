#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""libkda beside cuDNN's Hopper kernel on a GPU: the one of the package nvidia-cudnn-frontend (1.32 and later), launched
by its own host function; that is its kernel alone, with g and beta in fp32 and states [V, K] as it takes them. libkda
is called as a whole, with g and beta in bf16. One process, the same values, medians with a cold L2.

Needs torch, triton, nvidia-cudnn-frontend, cuda-bindings and the headers of a CUDA toolkit (CUDA_HOME).
"""
import argparse
import gc
import pathlib
from importlib.metadata import version

import evidence
import torch
import triton

from clock import Clock
from gpu_cases import cases, cu_seqlens, error_cases, libkda_call, make_inputs, recurrence, relative, timed
from libkda_ctypes import Library

GATES = ("strong", "slow", "trained")
L2NORM, BOUNDED_GATE, BETA_SIGMOID = 1, 2, 4  # its flags


def cudnn_call(c, x):
    from cudnn.linear_attention.hopper import cuda_host
    g, beta, h0 = x["g"].float(), x["beta"].float(), x["h0"].mT.contiguous()
    bias, o, state = x["dt_bias"].contiguous(), torch.full_like(x["v"], float("nan")), torch.full_like(h0, float("nan"))
    cu = cu_seqlens(c)
    if cu is None:
        cu = torch.arange(c["B"] + 1, device="cuda") * c["T"]
    cu = cu.int()
    addresses = [t.data_ptr() for t in (x["q"], x["k"], x["v"], g, beta, cu, h0, o, state)]

    def call():
        cuda_host.launch(0, torch.cuda.current_stream().cuda_stream, *addresses, c["B"] * c["T"], cu.numel() - 1, c["HV"],
                         x["A_log"].data_ptr(), bias.data_ptr(), -5.0, L2NORM | BOUNDED_GATE | BETA_SIGMOID,
                         c["K"] ** -0.5, c["H"])
        return o, state.mT
    call.keeps = g, beta, h0, bias, cu  # their addresses are in use
    return call


def measure_errors(library):
    rows = []
    for gates in GATES:
        for c in error_cases():
            if c["dtype"] != torch.bfloat16:
                continue
            x = make_inputs(c, gates)
            expected = recurrence(c, x)
            row = dict(case=c["name"], gates=gates)
            for name, call in (("cudnn", cudnn_call(c, x)), ("libkda", libkda_call(library, c, x, "auto"))):
                row[name] = [relative(found, wanted) for found, wanted in zip(call(), expected)]
            rows.append(row)
            print(row, flush=True)
    return rows


def measure_forward(library, sets, clock):
    rows = []
    for name in sets:
        for c in cases(name):
            for gates in GATES:
                x = make_inputs(c, gates)
                ours, theirs = libkda_call(library, c, x, "auto"), cudnn_call(c, x)
                row = dict(set=name, case=c["name"], gates=gates, implementation=ours.plan["implementation"])
                timed(row, "libkda", ours, clock)
                timed(row, "cudnn", theirs, clock)
                row["difference"] = relative(ours()[0], theirs()[0].double())
                row["speedup"] = row["cudnn"] / row["libkda"]
                rows.append(row)
                print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
                ours.destroy()
                del x, ours, theirs
                gc.collect()
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--sets", default="cudnn10,flagship")
    parser.add_argument("--binaries", type=pathlib.Path, default=evidence.ROOT / "build",
                        help="a folder with libkda_c.so and kernel_hashes.json")
    parser.add_argument("--json", type=pathlib.Path, default=evidence.RESULTS / "gpu_cudnn.json")
    args = parser.parse_args()
    library = Library(args.binaries / "libkda_c.so")
    report = evidence.header(args.binaries, ["fused", "staged"], "cudnn", "python3 bench/peers_cudnn.py")
    report.update(torch=torch.__version__, triton=triton.__version__, cudnn_frontend=version("nvidia-cudnn-frontend"))
    report["errors"] = measure_errors(library)
    with Clock() as clock:
        report["forward"] = measure_forward(library, args.sets.split(","), clock)
    evidence.write(args.json, report)


if __name__ == "__main__":
    main()
