#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""FLA's own tests of KDA, unchanged, with libkda behind FLA's functions.

    python fla_suite.py FLA_CHECKOUT [--device cpu|cuda] [--json FILE] [PYTEST ARGUMENT ...]

FLA_CHECKOUT is a clone of FLA's repository: its tests are in no package. fla-core, libkda and pytest are those of this
Python. Says of every test who served its calls. A test in which a gradient was asked for is left for the backward pass:
libkda hands those calls on to FLA, which cannot serve them on a CPU. Exit code 1 if another one failed, or if none ran.
"""
import argparse
import collections
import json
import os
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent


# ---- in pytest's process (-p fla_suite) ------------------------------------------------------------------------------

seen: list[str] = []  # every path that libkda.fla notes


def keep_paths(plugin):
    def kept(note):
        def call(*args):
            note(*args)
            seen.append(plugin.path)
        return call
    plugin.serves, plugin.leaves = kept(plugin.serves), kept(plugin.leaves)


found = {"tests": {}}


def pytest_configure(config):
    import fla
    import torch

    import libkda
    found.update(fla=fla.__version__, torch=torch.__version__, libkda=libkda.__version__,
                 device=torch.cuda.get_device_name() if os.environ["LIBKDA_SUITE_DEVICE"] == "cuda" else "cpu")
    if os.environ["LIBKDA_SUITE_DEVICE"] == "cpu":
        torch.set_flush_denormal(True)  # FLA's references crawl where states decay
        import fla.utils
        fla.utils.device = "cpu"
        if hasattr(fla.utils, "hardware"):
            fla.utils.hardware.device = "cpu"
    import libkda.fla
    keep_paths(libkda.fla._plugin)


def pytest_runtest_setup(item):
    seen.clear()


def pytest_runtest_logreport(report):
    row = found["tests"].setdefault(report.nodeid, {"outcome": "passed", "paths": []})
    row["paths"] = sorted({*row["paths"], *seen})
    if report.outcome != "passed" and row["outcome"] == "passed":
        row["outcome"] = report.outcome
        text = report.longrepr[-1] if isinstance(report.longrepr, tuple) else str(report.longrepr).strip()
        row["reason"] = text.rpartition("\n")[2][:300]


def pytest_sessionfinish(session):
    pathlib.Path(os.environ["LIBKDA_SUITE_REPORT"]).write_text(json.dumps(found))


# ---- the command -----------------------------------------------------------------------------------------------------

def commit_of(checkout):
    run = subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return run.stdout.strip() or None


def run_pytest(checkout, tests, device, extra):
    """What the plugin above found."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.json"
        environment = {n: x for n, x in os.environ.items() if n != "FLA_CI_ENV"}  # it loosens the bounds
        environment.update(LIBKDA_SUITE_DEVICE=device, LIBKDA_SUITE_REPORT=str(report),
                           PYTHONPATH=os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH")))))
        if device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        # Not in the checkout, and by importlib: its folder fla must not stand before the installed package.
        subprocess.run([sys.executable, "-m", "pytest", "-p", "fla_suite", "-p", "no:cacheprovider", "-q",
                        "--import-mode=importlib", f"--rootdir={checkout}", checkout / tests, *extra],
                       cwd=folder, env=environment, check=False)
        return json.loads(report.read_text()) if report.exists() else {"tests": {}}


def verdict(row, device):
    gradient = any("a gradient is asked for" in path for path in row["paths"])
    if gradient and (device == "cpu" or row["outcome"] != "failed"):
        return "left for the backward pass"
    return row["outcome"]


def exit_code(counts):
    return 0 if counts.get("passed") and not counts.get("failed") else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=pathlib.Path, help="a clone of FLA's repository")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tests", default="tests/ops/test_kda.py", help="file in the checkout")
    parser.add_argument("--json", type=pathlib.Path, help="write the report to this file")
    args, extra = parser.parse_known_args()
    if not (args.checkout / args.tests).is_file():
        parser.error(f"{args.checkout} has no {args.tests}: give a clone of FLA's repository")
    report = {"commit": commit_of(args.checkout)} | run_pytest(args.checkout.resolve(), args.tests, args.device, extra)
    for row in report["tests"].values():
        row["verdict"] = verdict(row, args.device)
    report["counts"] = dict(collections.Counter(row["verdict"] for row in report["tests"].values()))
    for name, row in report["tests"].items():
        if row["verdict"] not in ("passed", "skipped"):
            print(f'{row["verdict"]}: {name}: {row.get("reason", row["outcome"])}')
    print(", ".join(f"{count} {what}" for what, count in report["counts"].items()) or "no test ran")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return exit_code(report["counts"])


if __name__ == "__main__":
    sys.exit(main())
