#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times of ONNX Runtime's LinearAttention beside libkda's (examples/onnxruntime) on a CPU, in milliseconds. Sessions
take turns in blocks, for threads of one that still poll would slow the other; medians count, minima are
beside them. A time has all of session.run() in it.

    bench/onnxruntime_bench.py [--seconds 2] [--threads 2] [--only TEXT] [--library FILE] [--json FILE]
"""
import argparse
import pathlib
import statistics
import sys
import tempfile
import time

import numpy as np
import onnxruntime

import libkda

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples" / "onnxruntime"))
import linear_attention  # noqa: E402  after its folder is known
from report import evidence  # noqa: E402

REST, UNTIMED = 0.02, 3  # seconds; calls
ROWS = [  # name, domain, B, T, H, whether there is one gate a head, the least ratio of times that is wanted
    ("prefill, 1,024 tokens, 4 heads", "com.microsoft", 1, 1024, 4, False, 1.7),
    ("prefill, 1,024 tokens, 32 heads", "com.microsoft", 1, 1024, 32, False, 1.7),
    ("prefill, 4,096 tokens, 4 heads", "com.microsoft", 1, 4096, 4, False, 1.7),
    ("prefill, 1,024 tokens, 32 heads, one gate a head", "com.microsoft", 1, 1024, 32, True, 1.7),
    ("decode, 4 heads", "com.microsoft", 1, 1, 4, False, 1 / 1.1),
    ("decode, 32 heads", "com.microsoft", 1, 1, 32, False, 1 / 1.03),
    ("decode, batch 8, 32 heads", "com.microsoft", 8, 1, 32, False, 1 / 1.03),
    ("opset 27, 512 tokens, 4 heads", "", 1, 512, 4, False, 1.7),
]


def block(session, x, calls):
    """Times of `calls` calls, after a rest and some that are not counted."""
    time.sleep(REST)
    times = []
    for _ in range(UNTIMED + calls):
        start = time.perf_counter()
        session.run(None, x)
        times.append(time.perf_counter() - start)
    return times[UNTIMED:]


def measure(seconds, threads, library, domain, B, T, H, head_gates):
    x = linear_attention.inputs(B, T, H, H, 128, head_gates)
    model = linear_attention.make_model(x, domain, q_num_heads=H, kv_num_heads=H)
    sessions = {name: linear_attention.open_session(model, path, threads)
                for name, path in (("built_in", None), ("libkda", library))}
    outputs = [session.run(None, x)[0] for session in sessions.values()]
    times = {name: [] for name in sessions}
    calls = 100 if T == 1 else 3
    end = time.perf_counter() + 2 * seconds
    while time.perf_counter() < end or len(times["libkda"]) < 3 * calls:
        for name, session in sessions.items():
            times[name] += block(session, x, calls)
    row = {}
    for name, found in times.items():
        row |= {f"{name}_ms": round(statistics.median(found) * 1e3, 4),
                f"{name}_least_ms": round(min(found) * 1e3, 4)}
    return row | {"times_as_fast": round(row["built_in_ms"] / row["libkda_ms"], 3),
                  "least_times_as_fast": round(row["built_in_least_ms"] / row["libkda_least_ms"], 3),
                  "apart": float(f"{np.linalg.norm(outputs[0] - outputs[1]) / np.linalg.norm(outputs[0]):.1e}")}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2, help="for each session of each row")
    parser.add_argument("--threads", type=int, default=2, help="of each session")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name has it")
    parser.add_argument("--library", metavar="FILE", help="libkda_ort.so, where there is no C compiler to make one")
    parser.add_argument("--json", metavar="FILE", help="where the rows are written")
    arguments = parser.parse_args()
    machine, rows = evidence.machine(), {}
    with tempfile.TemporaryDirectory() as folder:
        library = arguments.library or linear_attention.compile_library(folder)
        for name, *case, wanted in ROWS:
            if arguments.only in name:
                rows[name] = row = measure(arguments.seconds, arguments.threads, library, *case) | {
                    "wanted": round(wanted, 3)}
                print(f"{name:50} built in {row['built_in_ms']:.3f} ms, libkda {row['libkda_ms']:.3f} ms, "
                      f"{row['times_as_fast']:.2f}x ({row['least_times_as_fast']:.2f}x by minima; wanted "
                      f"{row['wanted']:.2f}x); {row['apart']:.0e} apart", flush=True)
    if arguments.json:
        command = f"bench/onnxruntime_bench.py --seconds {arguments.seconds:g} --threads {arguments.threads}"
        evidence.write(arguments.json, {"command": command} | machine | {
            "libkda": libkda.__version__, "onnxruntime": onnxruntime.__version__, "threads": arguments.threads,
            "rows": rows})


if __name__ == "__main__":
    main()
