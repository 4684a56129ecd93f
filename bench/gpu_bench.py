#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the CUDA benchmarks of `kda bench` on this machine's GPU and writes one result file a
benchmark under bench/results/ (./dev gpu-bench): gpu_forward.json; --beside: with the card's name,
gpu_decode_h100_80gb_hbm3.json. Peers: bench/peers/peers.py --device cuda."""
import argparse
import json
import pathlib
import shlex
import subprocess
import sys
import tempfile

from report import evidence

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Benchmark -> its case sets. The kernel families that it times: families.json.
BENCHMARKS = {
    "forward": ["flagship", "gva", "cudnn10", "sizes"],
    "intra": ["intra"],
    "recompute-wu": ["intra"],
    "delta-h": ["intra"],
    "context-parallel": ["context_parallel"],
    "lengths": ["lengths"],
    "launches": ["short"],
    "decode": ["decode_gpu"],
    "tails": ["tails", "verify"],
    "backward": ["flagship", "gva"],
    "fused": ["flagship", "gva", "cudnn10", "streams", "gates", "sizes"],
}
# Benchmarks of `kda bench forward` on these backends, one after the other at every case.
BACKENDS = {"fused": ["fused", "staged"]}
# `gpu-bench tails` runs two sets of cases, each by one `kda bench` command and with each type of boundary states.
TAILS = {"tails": "decode", "verify": "verify"}
BOUNDARY_STATES = ("fp32", "bf16", "split")
# Benchmarks of which each case runs with these policies, on and off: `auto` first, whose rows are those of the file.
POLICIES = {"context-parallel": ["auto", "flashkda", "cula"]}


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


def run_tails(kda, name):
    """The reports of a set with all types of boundary states as one."""
    reports = [run_set(kda, TAILS[name], name, ["--tail", "--boundary-states", states]) for states in BOUNDARY_STATES]
    for states, report in zip(BOUNDARY_STATES, reports):
        for case in report["cases"]:
            case["boundary_states"] = states
    return reports[0] | {"cases": [case for report in reports for case in report["cases"]]}


def run_any(kda, what, name):
    if what == "tails":
        return run_tails(kda, name)
    return run_backends(kda, what, name) if what in BACKENDS else run_set(kda, what, name)


def json_of(kda, *command):
    return json.loads(subprocess.run([kda, *command, "--json"], check=True, capture_output=True, text=True).stdout)


def policy_row(kda, policy, off, on, sms):
    """A case with a policy: times off and on, what the plan says of it, and the predicted time, of `auto` alone."""
    plan = json_of(kda, "plan", *shlex.split(on["case"]), "--sms", str(sms), "--context-parallel", policy)
    uncut = "fused" if plan["implementation"].endswith("fused") else "serial"
    predicted = plan["cost_us"]["segmented" if on["segments"] else uncut]
    return {"case": on["case"], "set": on["set"], "policy": policy, "off_s": off["median_s"], "on_s": on["median_s"],
            "implementation": on["implementation"], "segments": on["segments"],
            "predicted_s": predicted * 1e-6 if predicted else None, "reason": "; ".join(plan["context_parallel"]["reasons"])}


def compare_policies(kda, what, sets, auto):
    """Rows of every policy, and those where it cuts nothing, with what that costs beside `off`."""
    sms = json_of(kda, "info")["gpus"][0]["num_sms"]
    rows = []
    for policy in POLICIES[what]:
        cases = auto if policy == "auto" else [case for name in sets for case in run_set(
            kda, what, name, ["--context-parallel", policy])["cases"]]
        rows += [policy_row(kda, policy, off, on, sms) for off, on in zip(cases[::2], cases[1::2])]
    declined = [{name: row[name] for name in ("case", "set", "policy", "implementation", "reason")}
                | {"overhead": row["on_s"] / row["off_s"] - 1} for row in rows if not row["segments"]]
    return {"policies": rows, "declined": declined}


def policy_table(report):
    """The text of what compare_policies() has found: a row a case and set, microseconds."""
    found = {}
    for row in report["policies"]:
        found.setdefault((row["set"], row["case"]), {})[row["policy"]] = row
    us = lambda seconds: f"{seconds * 1e6:.1f}"
    policies = list(dict.fromkeys(row["policy"] for row in report["policies"]))
    lines = [" | ".join(["case", "off", *(f"{policy} (segments)" for policy in policies), "predicted for auto"])]
    for (_, case), rows in found.items():
        cells = [f"{us(rows[policy]['on_s'])} ({rows[policy]['segments'] or 'declined'})" for policy in policies]
        predicted = rows["auto"]["predicted_s"]
        lines.append(" | ".join([case, us(rows["auto"]["off_s"]), *cells, us(predicted) if predicted else ""]))
    lines += [f"declined by {row['policy']}: {row['case']}: {row['overhead']:+.1%} beside off ({row['implementation']}; "
              f"{row['reason']})" for row in report["declined"]]
    return "\n".join(lines)


def run_bench(kda, what, sets):
    reports = [run_any(kda, what, name) for name in sets]
    found = {"copy_bytes_per_second": reports[0]["copy_bytes_per_second"],
             "cases": [case for report in reports for case in report["cases"]]}
    return found | compare_policies(kda, what, sets, found["cases"]) if what in POLICIES else found


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
        if what in POLICIES:
            print(policy_table(report))
        evidence.write(args.results / file_name(report, args.beside), report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
