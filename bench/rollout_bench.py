#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A step of libkda.rollout beside libkda.decode, on a Hopper GPU: CUDA graphs of 16 steps, so that each sequence writes
its state once; a line a batch, microseconds a step, medians of 20 replays."""
import argparse
import json
import statistics

import torch

import libkda
from libkda import rollout

STEPS, D = 16, 128


def us_per_step(step):
    """Median time of a step, in a graph of 16."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(STEPS):
            step()
    times = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / STEPS)
    return statistics.median(times)


def measure(N, H):
    normal = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    rows = lambda B, T: (normal(B, T, H, D), normal(B, T, H, D), normal(B, T, H, D),  # noqa: E731
                         normal(B, T, H, D).float(), normal(B, T, H))
    gate = dict(use_gate_in_kernel=True, A_log=torch.zeros(H, device="cuda"), use_qk_l2norm_in_kernel=True,
                use_beta_sigmoid_in_kernel=True)
    slots = torch.arange(N, device="cuda", dtype=torch.int32)
    token = rows(N, 1)
    found = {}

    pool = torch.zeros(N, H, D, D, device="cuda")
    found["decode"] = us_per_step(lambda: libkda.decode(*token, pool, slots, **gate))
    block = rows(N, 16)
    found["prefill of 16"] = us_per_step(lambda: libkda.prefill(
        *block, pool, slots, plan_options=rollout.options("cuda"), **gate))
    del pool, block
    for drafts in (0, 3):
        states = rollout.States(N, H, H, D, D, drafts=drafts, device="cuda")
        lengths = torch.randint(1, 17, (N,), device="cuda")
        cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        states.prefill(*rows(1, 16 * N), slots, torch.zeros_like(slots), cu_seqlens=cu_seqlens, **gate)
        positions, token = lengths.clone(), rows(N, 1 + drafts)

        def step():
            states.decode(*token, slots, positions, **gate)
            positions.add_(1)
        found["rollout" if drafts == 0 else f"rollout, {drafts} drafts"] = us_per_step(step)
        del states
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", default="64,512", help="sequences, with commas between")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--json", help="a file for the results")
    args = parser.parse_args()
    results = {"device": torch.cuda.get_device_name(), "heads": args.heads, "rows": []}
    for N in map(int, args.batches.split(",")):
        found = measure(N, args.heads)
        results["rows"].append(dict(sequences=N, us=found))
        print(f"{N} x {args.heads}: " + ", ".join(f"{name} {x:.0f} us ({x / found['decode']:.2f}x)"
                                                   for name, x in found.items()), flush=True)
    if args.json:
        with open(args.json, "w") as out:
            json.dump(results, out, indent=1)


if __name__ == "__main__":
    main()
