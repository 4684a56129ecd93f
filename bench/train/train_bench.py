#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A forward and a backward of chunk_kda on the CPU, beside torch's autograd through a chunked reference.

    python3 bench/train/train_bench.py --tokens 1024 --heads 4 --threads 2

The reference is FLA's naive_chunk_kda if fla-core is installed, else libkda's. It keeps [64, 64, K] decays of every
chunk for its backward, so 1,024 tokens stand for the 4,096 of the other benchmarks: both take time in proportion to
the tokens. Every row runs in a process of its own, whose peak of memory beyond the inputs is its own too.
"""
import argparse
import json
import multiprocessing
import pathlib
import resource
import statistics
import time


def leaves_of(torch, args):
    torch.manual_seed(0)
    shape = (1, args.tokens, args.heads, args.dim)
    x = {name: torch.randn(shape) for name in "qkv"}
    for name in "qk":
        x[name] = torch.nn.functional.normalize(x[name], dim=-1)
    x.update(g=-torch.rand(shape), beta=torch.rand(shape[:3]))
    return {name: t.requires_grad_() for name, t in x.items()}


def function_of(name):
    import libkda
    if name == "libkda":
        return libkda.chunk_kda, "libkda.chunk_kda"
    try:
        from fla.ops.kda.naive import naive_chunk_kda
        return naive_chunk_kda, "fla.ops.kda.naive.naive_chunk_kda"
    except ImportError:
        return libkda.naive_chunk_kda, "libkda.naive_chunk_kda"


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(name, args, sender):
    import torch
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    leaves = leaves_of(torch, args)
    call, title = function_of(name)
    with torch.no_grad():
        call(**{name: t[:, :64] for name, t in leaves.items()})  # loads what a first call loads
    before = peak()
    times = []
    for _ in range(1 + args.rounds):
        start = time.perf_counter()
        o = call(**leaves)[0]
        between = time.perf_counter()
        gradients = torch.autograd.grad(o.sum(), list(leaves.values()))
        times.append((between - start, time.perf_counter() - between))
        del o, gradients
    forward, backward = (statistics.median(column) * 1e3 for column in zip(*times[1:]))
    sender.send(dict(function=title, forward_ms=forward, backward_ms=backward, peak_bytes=peak() - before))


def run(name, args):
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=measure, args=(name, args, sender))
    process.start()
    sender.close()
    row = receiver.recv()
    process.join()
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path, help="write the rows to this file")
    args = parser.parse_args()
    rows = [run(name, args) for name in ("libkda", "reference")]
    for row in rows:
        print(f"{row['function']:35} forward {row['forward_ms']:9.1f} ms  backward {row['backward_ms']:9.1f} ms  "
              f"peak {row['peak_bytes'] / 1e6:8.1f} MB")
    whole = [row["forward_ms"] + row["backward_ms"] for row in rows]
    print(f"T {args.tokens}, H {args.heads}, K = V = {args.dim}, fp32, {args.threads} threads: "
          f"{whole[1] / whole[0]:.1f} times as fast; backward {rows[0]['backward_ms'] / rows[0]['forward_ms']:.2f} "
          f"times the time of its forward")
    if args.json:
        shape = dict(tokens=args.tokens, heads=args.heads, dim=args.dim, threads=args.threads)
        args.json.write_text(json.dumps(dict(shape, rows=rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
