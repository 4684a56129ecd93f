#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet on a GPU: libkda beside FlashQLA's kernels, forward and backward, in one process. The result is
gpu_flash_qla.json. FlashQLA's kernels are compiled first, for minutes.

    python3 bench/peers/flash_qla_bench.py [--binaries build] [--results bench/results]

Needs torch, flash-qla and tilelang from PyPI, which compiles kernels with nvcc. Inputs are those of a layer of
Qwen3-Next: q and k, here normalised already, and v in bf16; g as logarithms and beta in fp32. A forward returns its
final state too; a backward computes all gradients but that of an initial state, from what the forward has left. A
"call" has a cold L2 and the host's time if that is longer; "kernels" is what the GPU alone takes.
"""
import argparse
import concurrent.futures
import functools
import pathlib
import subprocess
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "report"))
import evidence
import torch
from gpu_cases import microseconds, relative
from libkda_ctypes import Library

ROOT = pathlib.Path(__file__).resolve().parents[2]
CASES = ((16, 32, 8192), (16, 32, 32768), (16, 64, 8192))  # q/k heads, value heads, tokens
CALLS = 10


def make_inputs(H, HV, T):
    generator = torch.Generator(device="cuda").manual_seed(0)
    normal = lambda *shape: torch.randn(1, T, *shape, device="cuda", generator=generator)
    unit = lambda x: torch.nn.functional.normalize(x, dim=-1).bfloat16()
    rate = torch.rand(HV, device="cuda", generator=generator) * 16
    return dict(q=unit(normal(H, 128)), k=unit(normal(H, 128)), v=normal(HV, 128).bfloat16(),
                g=-rate * torch.nn.functional.softplus(normal(HV) - 4), beta=torch.sigmoid(normal(HV)))


def libkda_calls(library, x, d_o):
    wide = dict(x, g=x["g"][..., None].expand(*x["g"].shape, 128))
    o, state = torch.empty_like(x["v"]), torch.empty(1, x["v"].shape[2], 128, 128, device="cuda")
    run = library.forward(*(wide[n] for n in ("q", "k", "v", "g", "beta")), o, final_state=state)
    training = library.training(wide, d_o)
    training()

    def forward():
        run()
        return dict(o=o)
    forward.implementation = run.plan["implementation"]
    return forward, training.backward()


def flash_qla_calls(x, d_o):
    from flash_qla import chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd
    rows = [x[n] for n in ("q", "k", "v")]

    def forward():
        return dict(o=chunk_gated_delta_rule_fwd(*rows, x["g"], x["beta"])[2])

    @functools.cache
    def kept():
        return chunk_gated_delta_rule_fwd(*rows, x["g"], x["beta"], enable_fwd_cp_cache=True)

    def backward():
        sums, A, *_, cache = kept()
        names = ("dq", "dk", "dv", "dbeta", "dg")
        return dict(zip(names, chunk_gated_delta_rule_bwd(*rows, sums, x["beta"], A, d_o, cp_cache=cache)))
    return forward, backward


def profiled(*calls):
    """Microseconds of the kernels of all calls."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(CALLS):
            for call in calls:
                call()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in trace.key_averages()) / CALLS


@functools.cache
def flush():
    """A write of more than the L2 cache holds, and its microseconds."""
    write = torch.empty(256 << 20, dtype=torch.uint8, device="cuda").zero_
    return write, profiled(write)


def kernel_microseconds(call):
    """The sum of the times of the kernels of a call, each call with a cold L2."""
    write, its_time = flush()
    return profiled(write, call) - its_time


def row_of(library, H, HV, T):
    x = make_inputs(H, HV, T)
    d_o = torch.randn_like(x["v"])
    calls = dict(libkda=libkda_calls(library, x, d_o), flash_qla=flash_qla_calls(x, d_o))
    row = dict(heads=H, value_heads=HV, tokens=T, implementation=calls["libkda"][0].implementation)
    for i, name in enumerate(("forward", "backward")):
        ours, theirs = calls["libkda"][i](), calls["flash_qla"][i]()
        row[name] = {who: dict(call=microseconds(both[i]), kernels=kernel_microseconds(both[i]))
                     for who, both in calls.items()}
        row[name]["difference"] = {n: relative(t[..., 0] if n == "dg" else t, theirs[n].double())
                                   for n, t in ours.items()}
    print(row, flush=True)
    return row


def compile_ahead():
    """FlashQLA's kernels, a process for each case and direction, into TileLang's cache."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        parts = [",".join(map(str, (*case, direction))) for case in CASES for direction in (0, 1)]
        list(pool.map(lambda part: subprocess.run([sys.executable, __file__, "--compile", part], check=True), parts))


def compile_part(part):
    *case, direction = map(int, part.split(","))
    x = make_inputs(*case)
    flash_qla_calls(x, torch.randn_like(x["v"]))[direction]()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--binaries", type=pathlib.Path, default=ROOT / "build",
                        help="a folder with libkda_c.so and kernel_hashes.json")
    parser.add_argument("--results", type=pathlib.Path, default=evidence.RESULTS)
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile:
        return compile_part(args.compile)
    compile_ahead()
    import tilelang
    from flash_qla import __version__ as version
    library = Library(args.binaries / "libkda_c.so")
    report = evidence.header(args.binaries, "gpu_flash_qla", "python3 bench/peers/flash_qla_bench.py")
    report.update(torch=torch.__version__, tilelang=tilelang.__version__, flash_qla=version)
    report["cases"] = []
    for case in CASES:
        report["cases"].append(row_of(library, *case))
        evidence.write(args.results / "gpu_flash_qla.json", report)


if __name__ == "__main__":
    main()
