#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What it costs in Python that lengths are on the GPU alone: chunk_kda with a copy of them on the host and without one,
prefill on a pool without one, the same by SGLang's plugin with and without a state on the way, and the backward of a
training step with and without one. Times of the GPU and of the host, in microseconds, medians.

    python3 bench/lengths_bench.py --binaries build --json bench/results/gpu_lengths_python.json

Needs a GPU and the installed libkda package. `kda bench lengths` (./dev gpu-bench lengths) has the kernels alone.
"""
import argparse
import pathlib
import shlex
import statistics
import time

import torch

from report import evidence

ROOT = pathlib.Path(__file__).resolve().parent.parent
D, REPEATS, HOST_CALLS = 128, 15, 40
SLEEP_CYCLES = 4_000_000  # while the host launches: no gap is counted
BACKWARDS = ("32K --heads 4",)  # cases of which a step's backward is timed too
STEPS = ("512 --heads 12",)  # cases of which a training step is timed too: its host time
TRACKED = ("64K --heads 8", "32K,1K --heads 12")  # cases of which SGLang keeps a state on the way


def cases():
    """(name, lengths, heads) of bench/cases/lengths.txt."""
    for line in (ROOT / "bench" / "cases" / "lengths.txt").read_text().splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        lengths = []
        for part in words[1].split(","):
            count, _, tokens = part.rpartition("x")
            lengths += [int(tokens.rstrip("K")) * (1024 if tokens.endswith("K") else 1)] * int(count or 1)
        yield f"{words[1]} --heads {words[3]}", lengths, int(words[3])


def inputs(tokens, heads):
    normal = lambda *shape: torch.randn(*shape, device="cuda")
    x = {n: normal(1, tokens, heads, D).bfloat16() for n in "qkvg"}
    return dict(x, beta=normal(1, tokens, heads).bfloat16(), A_log=torch.zeros(heads, device="cuda"),
                use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                lower_bound=-5.0)


def gpu_us(calls):
    """Of each of `calls`, which take turns: a clock that goes up or down is that of all."""
    times = {what: [] for what in calls}
    for turn in range(REPEATS + 3):
        for what, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(SLEEP_CYCLES)
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            if turn >= 3:
                times[what].append(begin.elapsed_time(end) * 1e3)
    return {what: statistics.median(found) for what, found in times.items()}


def host_us(calls):
    times = {what: [] for what in calls}
    for _ in range(HOST_CALLS):
        for what, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            times[what].append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return {what: statistics.median(found) for what, found in times.items()}


def forwards(libkda, lengths, heads):
    x = inputs(sum(lengths), heads)
    cpu = torch.tensor([0, *lengths]).cumsum(0)
    cu, N = cpu.cuda(), len(lengths)
    pool, slots = torch.zeros(N, heads, D, D, device="cuda"), torch.arange(N, device="cuda", dtype=torch.int32)
    call = lambda **lengths: libkda.chunk_kda(**x, output_final_state=True, cu_seqlens=cu, **lengths)
    return {"host lengths": lambda: call(cu_seqlens_cpu=cpu), "GPU lengths": call,
            "prefill": lambda: libkda.prefill(**x, pool=pool, slots=slots, cu_seqlens=cu)}


def tracked(lengths, heads):
    """SGLang's prefill by the plugin. Where it tracks, a sequence leaves the state in front of its last whole chunk but
    one, as for a prefix that is kept."""
    from libkda import sglang
    x = inputs(sum(lengths), heads)
    cu, N = torch.tensor([0, *lengths]).cumsum(0).int().cuda(), len(lengths)
    pool, kept = (torch.zeros(N + 1, heads, D, D, device="cuda") for _ in range(2))
    slots = torch.arange(1, N + 1, device="cuda", dtype=torch.int32)
    chunks = torch.tensor([length // 64 - 1 for length in lengths], device="cuda", dtype=torch.int32)
    call = lambda **state: sglang.extend(
        None, *(x[n] for n in ("q", "k", "v", "g", "beta")), ssm_states=pool, cache_indices=slots, query_start_loc=cu,
        A_log=x["A_log"], lower_bound=x["lower_bound"], beta_is_raw=True, **state)
    return {"sglang": call, "sglang, tracked": lambda: call(track_state=kept[1:], track_chunk_idx=chunks)}


def training(lengths, heads):
    """(inputs, the leaves among them, lengths on the GPU and on the host) of a step."""
    x = inputs(sum(lengths), heads)
    leaves = [x[n].requires_grad_() for n in ("q", "k", "v", "g", "beta", "A_log")]
    cpu = torch.tensor([0, *lengths]).cumsum(0)
    return x, leaves, cpu.cuda(), cpu


def step(libkda, lengths, heads):
    x, leaves, cu, _ = training(lengths, heads)
    d_o = torch.randn_like(x["v"])

    def run():
        o, _ = libkda.chunk_kda(**x, cu_seqlens=cu)
        torch.autograd.grad(o, leaves, d_o)

    return {"training step": run}


def backwards(libkda, lengths, heads):
    x, leaves, cu, cpu = training(lengths, heads)

    def backward(**more):
        o, _ = libkda.chunk_kda(**x, cu_seqlens=cu, **more)
        d_o = torch.randn_like(o)
        return lambda: torch.autograd.grad(o, leaves, d_o, retain_graph=True)

    return {"backward, host lengths": backward(cu_seqlens_cpu=cpu), "backward, GPU lengths": backward()}


def measure(libkda, name, lengths, heads):
    def times(calls):
        gpu, host = gpu_us(calls), host_us(calls)
        return {what: {"gpu_us": gpu[what], "host_us": host[what]} for what in calls}

    with torch.no_grad():
        calls = forwards(libkda, lengths, heads) | (tracked(lengths, heads) if name in TRACKED else {})
        row = {"case": f"--seq-lens {name}"} | times(calls)
    for names, calls in ((BACKWARDS, backwards), (STEPS, step)):
        if name in names:
            row.update(times(calls(libkda, lengths, heads)))
    ratio = lambda a, b, kind: round(row[a][kind] / row[b][kind], 3)
    row["GPU to host lengths"] = ratio("GPU lengths", "host lengths", "gpu_us")
    row["prefill to chunk_kda"] = [ratio("prefill", "GPU lengths", kind) for kind in ("gpu_us", "host_us")]
    if name in BACKWARDS:
        row["backward, GPU to host lengths"] = ratio("backward, GPU lengths", "backward, host lengths", "gpu_us")
    if name in TRACKED:
        row["tracked to not tracked"] = ratio("sglang, tracked", "sglang", "gpu_us")
    if name in STEPS:
        row["training step to chunk_kda"] = ratio("training step", "GPU lengths", "host_us")
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--binaries", type=pathlib.Path, default=ROOT / "build",
                        help="a folder with kernel_hashes.json of the build that the package has")
    parser.add_argument("--only", choices=["tracked"], help="the cases that SGLang's prefill is timed at")
    parser.add_argument("--json")
    args = parser.parse_args()
    import libkda
    report = evidence.header(args.binaries, "lengths", "python3 bench/lengths_bench.py")
    report.update(torch=torch.__version__, libkda=libkda.__version__, cases=[])
    for name, lengths, heads in cases():
        if args.only and name not in TRACKED:
            continue
        row = measure(libkda, name, lengths, heads)
        report["cases"].append(row)
        print(row, flush=True)
        torch.cuda.empty_cache()
    if args.json:
        evidence.write(args.json, report)


if __name__ == "__main__":
    main()
