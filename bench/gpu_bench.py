#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the CUDA benchmarks of `kda bench` on this machine's GPU and writes one result file a
benchmark under bench/results/ (./dev gpu-bench): gpu_forward.json; --beside: with the card's name,
gpu_decode_h100_80gb_hbm3.json. Peers: bench/peers.py --device cuda."""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import evidence

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Benchmark -> its case sets. The kernel families that it times: families.json.
BENCHMARKS = {
    "forward": ["flagship", "gva", "cudnn10", "sizes"],
    "intra": ["intra"],
    "recompute-wu": ["intra"],
    "delta-h": ["intra"],
    "context-parallel": ["context_parallel"],
    "lengths": ["lengths"],
    "decode": ["decode_gpu"],
    "backward": ["flagship", "gva"],
    "fused": ["flagship", "gva", "cudnn10", "streams", "gates", "sizes"],
}
# Benchmarks of `kda bench forward` on these backends, one after the other at every case.
BACKENDS = {"fused": ["fused", "staged"]}


def file_name(report, beside):
    """By what was timed; beside the result of another card, also by the card."""
    card = report["device"].removeprefix("NVIDIA ").lower().replace(" ", "_")
    return report["what"] + (f"_{card}" if beside else "") + ".json"


def run_set(kda, what, name, flags=()):
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        subprocess.run([kda, "bench", what, "--set", name, "--device", "cuda", "--json", file.name, *flags], check=True)
        report = json.loads(pathlib.Path(file.name).read_text())
    for case in report["cases"]:
        case["set"] = name
    return report


def run_backends(kda, what, name):
    """The reports of several backends as one, their rows beside each other."""
    reports = [run_set(kda, "forward", name, ["--backend", b, "--context-parallel", "off"]) for b in BACKENDS[what]]
    for backend, report in zip(BACKENDS[what], reports):
        for case in report["cases"]:
            case["backend"] = backend
    return reports[0] | {"cases": [case for row in zip(*(r["cases"] for r in reports)) for case in row]}


def run_bench(kda, what, sets):
    reports = [run_backends(kda, what, name) if what in BACKENDS else run_set(kda, what, name) for name in sets]
    return {"copy_bytes_per_second": reports[0]["copy_bytes_per_second"],
            "cases": [case for report in reports for case in report["cases"]]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split(" (")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("what", nargs="*", choices=[[], *BENCHMARKS], default=[], metavar="WHAT",
                        help=f"{', '.join(BENCHMARKS)}; all of them if none is named")
    parser.add_argument("--binaries", type=pathlib.Path, default=ROOT / "build",
                        help="a build folder, or a copy of its bin/ and kernel_hashes.json")
    parser.add_argument("--results", type=pathlib.Path, default=evidence.RESULTS)
    parser.add_argument("--beside", action="store_true",
                        help="put the card's name into that of the file: another card's result stays")
    args = parser.parse_args()
    kda = args.binaries.resolve() / "bin" / "kda"
    for what in args.what or BENCHMARKS:
        name = f"gpu_{what.replace('-', '_')}"
        report = evidence.header(args.binaries, name, f"./dev gpu-bench {what}") | run_bench(kda, what, BENCHMARKS[what])
        evidence.write(args.results / file_name(report, args.beside), report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
