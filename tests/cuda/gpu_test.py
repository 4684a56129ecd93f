#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the CUDA tests on this machine's GPU and writes what they showed (./dev gpu-test).

Needs built binaries (./dev test builds them; --binaries) and Python's standard library.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "bench" / "report"), str(ROOT / "bench")]
import evidence
import gpu_bench
import refit

# Test programs, fuzzed problems and the kernel families that they run: bench/families.json.
FUZZED = 300  # random problems, each
# Histories of a pool of states, with CUDA graphs between; they run kernels of every family.
SOAK_SEEDS, SOAK_STEPS = (1, 2, 3, 4), 2500
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
# What is fuzzed, random problems for each tool.
SANITIZED = {"accuracy": 20, "accuracy --tensor-cores": 72, "accuracy --fused": 30, "accuracy --gdn": 30, "backward": 50,
             "backward --tensor-cores": 50}
# Test programs that run with each tool too, and which of their tests: nothing fuzzes their kernels.
SANITIZED_TESTS = {"decode_test": "*", "tail_test": "*", "ring_test": "*", "span_halves_test": "SpanHalves.CheckpointsAtOffsets",
                   "device_cut_test": "DeviceCut.OneSequenceWithoutAllTokens:*.CheckpointsAtOffsets/K128_bf16:"
                                      "*.CheckpointsAtOffsets/K64_fp16"}
# Reads how much memory of the GPU is free, which others would change.
ALONE = "backward_cuda_test"
# Benchmarks that --report runs, each beside a copy of as many bytes.
REPORTED = {what: lambda kda, what=what: gpu_bench.run_bench(kda, what, gpu_bench.BENCHMARKS[what])
            for what in ("forward", "decode", "backward")}
# Rows for bench/refit.py, which needs sequences that are not cut.
REPORTED[refit.UNCUT] = lambda kda: gpu_bench.run_set(kda, "forward", "sizes", ["--context-parallel", "off"])
# The same for cards that are no Hopper, which has a kernel of its own.
PORTABLE = {refit.PORTABLE_ROWS: lambda kda: gpu_bench.run_set(kda, "forward", "refit",
                                                               ["--backend", "cuda.sm80.fused"])}


def what_it_reports(done):
    """Lines of a sanitizer that found something, for the evidence file."""
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("=========")]
    return {"report": lines[:100]} if done.returncode != 0 and lines else {}


def run_gtest(program, environment, prefix=(), only="*"):
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        started = time.time()
        done = subprocess.run([*prefix, program, f"--gtest_output=json:{report.name}", f"--gtest_filter={only}"],
                              env=environment, capture_output=True, text=True)
        seconds = time.time() - started
        text = pathlib.Path(report.name).read_text()
    row = {"name": program.name, "seconds": round(seconds, 1), "ok": done.returncode == 0}
    if only != "*":
        row["only"] = only
    row |= what_it_reports(done)
    if not text:  # it died before it could say
        print(done.stdout[-4000:], done.stderr[-4000:])
        return row | {"passed": 0, "failed": 1, "skipped": 0}
    cases = [c for suite in json.loads(text)["testsuites"] for c in suite["testsuite"]]
    failed = [c for c in cases if "failures" in c]
    row["ok"] = row["ok"] and bool(cases)  # a filter may name none
    skipped = [c for c in cases if c.get("result") == "SKIPPED"]
    for case in failed:
        print(f'{program.name}: {case["classname"]}.{case["name"]}: {case["failures"][0]["failure"]}')
    return row | {"passed": len(cases) - len(failed) - len(skipped), "failed": len(failed),
                  "skipped": len(skipped),
                  "skipped_names": [f'{c["classname"]}.{c["name"]}' for c in skipped]}


def run_fuzz(program, what, count, environment, prefix=()):
    """`what`: the problems and their flags, as families.json has them."""
    started = time.time()
    with tempfile.NamedTemporaryFile(suffix=".json") as figures:
        done = subprocess.run([*prefix, program, *what.split(), "--count", str(count), "--json",
                               figures.name], env=environment, capture_output=True, text=True)
        found = pathlib.Path(figures.name).read_text()
    if done.returncode != 0:
        print(done.stdout[-4000:], done.stderr[-2000:])
    row = {"name": f"kda_fuzz {what}", "cases": count, "ok": done.returncode == 0,
           "seconds": round(time.time() - started, 1)}
    if found and json.loads(found).get("staged"):
        row["staged"] = int(json.loads(found)["staged"])  # of the cases
    return row | what_it_reports(done)


def run_soak(program, seed, environment):
    started = time.time()
    with tempfile.NamedTemporaryFile(suffix=".json") as figures:
        done = subprocess.run([program, "--seed", str(seed), "--steps", str(SOAK_STEPS), "--json", figures.name],
                              env=environment, capture_output=True, text=True)
        found = pathlib.Path(figures.name).read_text()
    if done.returncode != 0:
        print(done.stdout[-4000:], done.stderr[-2000:])
    return {"name": "kda_soak", "ok": done.returncode == 0, "seconds": round(time.time() - started, 1)} | (
        json.loads(found) if found else {"seed": seed})


def times(kda, architecture):
    """{benchmark: its times, or why it has none}; a card on which one fails has the others."""
    found = {}
    for what, run in (REPORTED if architecture == "sm_90" else REPORTED | PORTABLE).items():
        try:
            found[what] = run(kda)
        except (subprocess.CalledProcessError, OSError, ValueError) as error:
            found[what] = {"failed": str(error)}
    return found


def card_report(kda, tested):
    """One file about a card: which kernels ran, which tests passed, times. `tested`: what main() found."""
    timed = times(kda, tested["architecture"])
    info = subprocess.run([kda, "info"], capture_output=True, text=True, check=False)
    ran = {case["implementation"] for row in timed.values() for case in row.get("cases", [])}
    passed = tested["ok"] and not any("failed" in row for row in timed.values())
    return tested | {"what": "card report", "ok": passed, "kernels_that_ran": sorted(ran), "times": timed,
                     "info": (info.stdout + info.stderr).splitlines()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--family", choices=(*evidence.FAMILIES, "soak"),
                        help="tests of one kernel family only, or the histories of a pool of states")
    parser.add_argument("--binaries", type=pathlib.Path, default=ROOT / "build",
                        help="a build folder, or a copy of its tests/, bin/, kernel_hashes.json")
    parser.add_argument("--sanitize", nargs="?", const=",".join(SANITIZERS), metavar="TOOLS",
                        help="compute-sanitizer over random shapes instead of the tests")
    parser.add_argument("--jobs", type=int, default=4, metavar="N",
                        help="programs at once; most of their time is float64 on a CPU. A small card may want 1")
    parser.add_argument("--report", nargs="?", type=pathlib.Path, const=pathlib.Path("gpu_report.json"), metavar="FILE",
                        help="tests and times of this card in one file to send")
    parser.add_argument("--json", type=pathlib.Path, help="evidence file; under bench/results/")
    args = parser.parse_args()
    if args.report and (args.sanitize or args.json):
        parser.error("--report is the tests and the times in one file: without --sanitize and --json")
    if args.sanitize and args.family == "soak":
        parser.error("--sanitize runs random shapes, not histories")
    soak = args.family in (None, "soak")
    families = [args.family] if args.family in evidence.FAMILIES else list(evidence.FAMILIES)
    environment = dict(os.environ, KDA_TEST_DEVICE="cuda")
    tests = args.binaries.resolve() / "tests"
    fuzz = tests / "kda_fuzz"
    suffix = f"_{args.family}" if args.family else ""
    rows = []

    def chosen(kind, names):
        return [name for name in names if set(evidence.families_of(kind, name)) & set(families)]

    def add(row):
        rows.append(row)
        print({k: v for k, v in row.items() if k not in ("skipped_names", "report")}, flush=True)

    started = time.time()
    if args.sanitize:
        what = "gpu_sanitizer" + suffix
        prefix = lambda tool: ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
        jobs = [(tool, lambda tool, w=name: run_fuzz(fuzz, w, SANITIZED[w], environment, prefix(tool)))
                for tool in args.sanitize.split(",") for name in chosen("fuzz", SANITIZED)]
        jobs += [(tool, lambda tool, name=name: run_gtest(tests / name, environment, prefix(tool),
                                                          SANITIZED_TESTS[name]))
                 for tool in args.sanitize.split(",") for name in chosen("tests", SANITIZED_TESTS)]
        with concurrent.futures.ThreadPoolExecutor() as side_by_side:
            for row in side_by_side.map(lambda job: {"tool": job[0]} | job[1](job[0]), jobs):
                add(row)
    else:
        what = "gpu_test" + suffix
        jobs = []
        if args.family != "soak":
            names = chosen("tests", evidence.all_of("tests"))
            if ALONE in names:
                add(run_gtest(tests / ALONE, environment))
            jobs += [(run_gtest, tests / name) for name in names if name != ALONE]
            jobs += [(run_fuzz, fuzz, name, FUZZED) for name in chosen("fuzz", evidence.all_of("fuzz"))]
        if soak:
            jobs += [(run_soak, tests / "kda_soak", seed) for seed in SOAK_SEEDS]
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as side_by_side:
            for row in side_by_side.map(lambda job: job[0](*job[1:], environment), jobs):
                add(row)
    command = ["./dev", "gpu-test", *(["--family", args.family] if args.family else []),
               *(["--sanitize", args.sanitize] if args.sanitize else []), *(["--report"] if args.report else [])]
    report = evidence.header(args.binaries, what, " ".join(command), families)
    report |= {"ok": all(row["ok"] for row in rows), "seconds": round(time.time() - started, 1),
               "rows": rows}
    if args.report:
        report = card_report(args.binaries.resolve() / "bin" / "kda", report)
    evidence.write(args.report or args.json or evidence.RESULTS / f"{what}.json", report)
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
