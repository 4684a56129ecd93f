#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Profiles the fused kernel with Nsight Compute (ncu, of the CUDA toolkit) on this machine's GPU: how busy its units
are and what warps wait for. Writes bench/results/gpu_profile.json."""
import argparse
import csv
import pathlib
import shutil
import subprocess
import sys

from report import evidence

ROOT = pathlib.Path(__file__).resolve().parent.parent
CASES = ("--tokens 8192 --heads 64", "--tokens 8192 --heads 16", "--tokens 8192 --heads 64 --regime softplus")
METRICS = {
    "dram_percent": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "tensor_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "shared_percent": "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
    "issue_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "cycles_an_instruction": "smsp__average_warp_latency_per_inst_issued.ratio",
}
STALLS = ("wait", "not_selected", "long_scoreboard", "short_scoreboard", "dispatch_stall", "math_pipe_throttle",
          "barrier", "no_instruction", "gmma", "mio_throttle")


def stall_metric(stall):
    return f"smsp__average_warps_issue_stalled_{stall}_per_issue_active.ratio"


def number(text):
    return float(text.replace(",", ""))


def profile(ncu, kda, case):
    metrics = [*METRICS.values(), *map(stall_metric, STALLS)]
    command = [ncu, "--csv", "--page", "raw", "--clock-control", "none", "--metrics", ",".join(metrics),
               "--kernel-name", "regex:fused_prefill", "--launch-skip", "2", "--launch-count", "1",
               kda, "bench", "forward", "--device", "cuda", "--backend", "fused", "--case", case]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = text.splitlines()
    names, _, values = csv.reader(lines[next(i for i, line in enumerate(lines) if line.startswith('"ID"')):])
    found = dict(zip(names, values))
    return {"case": case, **{name: number(found[metric]) for name, metric in METRICS.items()},
            "stalls": {stall: number(found[stall_metric(stall)]) for stall in STALLS}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--binaries", type=pathlib.Path, default=ROOT / "build",
                        help="a build folder, or a copy of its bin/ and kernel_hashes.json")
    parser.add_argument("--json", type=pathlib.Path, default=evidence.RESULTS / "gpu_profile.json")
    args = parser.parse_args()
    ncu = shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin")
    if not ncu:
        sys.exit("ncu is not on the PATH: it comes with the CUDA toolkit (nsight-compute)")
    kda = args.binaries.resolve() / "bin" / "kda"
    report = evidence.header(args.binaries, "profile", "python3 bench/gpu_profile.py")
    evidence.write(args.json, report | {"cases": [profile(ncu, kda, case) for case in CASES]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
