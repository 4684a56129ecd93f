#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""libkda beside Python peers, in one process, on the same inputs.

    python3 bench/peers/peers.py [--tokens 4096] [--heads 4] [--threads 2] [--json FILE]
    python3 bench/peers/peers.py --device cuda [--what errors,intra,decode,train,forward] [--results FOLDER]

Needs torch and fla-core from PyPI, and build/libkda_c.so (./dev build). libkda is called through
its C ABI with ctypes, as any other language would.
"""
import argparse
import math
import pathlib
import sys
import time

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "report"))
import evidence
import torch

from libkda_ctypes import Library

ROOT = pathlib.Path(__file__).resolve().parents[2]
K = V = 128


def median_seconds(call, repeats):
    call()
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return sorted(samples)[len(samples) // 2]


def main():
    if "--device" in sys.argv and sys.argv[sys.argv.index("--device") + 1] == "cuda":
        import peers_cuda
        return peers_cuda.main()
    import fla  # not before peers_cuda: FLA reads its cache mode when it is imported
    from fla.ops.kda import naive
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"],
                        help="cuda: other options, see --device cuda --help")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json")
    args = parser.parse_args()
    machine = evidence.machine()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    shape = (1, args.tokens, args.heads, K)
    unit = lambda: torch.nn.functional.normalize(torch.randn(shape), dim=-1)
    q, k, v = unit(), unit(), torch.randn(shape)
    g = -torch.exp(torch.randn(shape) / 2) * 0.05
    beta = torch.rand(shape[:3])
    o = torch.full(shape, math.nan)
    library = Library(ROOT / "build" / "libkda_c.so").forward(q, k, v, g, beta, o, threads=args.threads)
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
        report = {"what": "peers", **machine,
                  "command": " ".join(["python3 bench/peers/peers.py", *sys.argv[1:]]), "tokens": args.tokens, "heads": args.heads, "threads": args.threads,
                  "torch": torch.__version__, "fla": fla.__version__, "rows": rows}
        evidence.write(args.json, report)


if __name__ == "__main__":
    main()
