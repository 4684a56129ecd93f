#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""FLA's own tests of KDA and of Gated DeltaNet, unchanged, with libkda behind FLA's functions.

    python fla_suite.py FLA_CHECKOUT [--device cpu|cuda] [--tests FILE] [--json FILE] [PYTEST ARGUMENT ...]

FLA_CHECKOUT is a clone of FLA's repository: its tests are in no package. fla-core, libkda and pytest are those of this
Python; --tests tests/ops/test_gdn.py runs those of Gated DeltaNet. Says of every test who served its calls. One that
passes though FLA served such a call is "handed back", one that the memory of the machine does not hold "out of memory",
and one that calls kernels of Triton alone on a CPU "needs a GPU". Exit code 1 if a test failed or was handed back, or
if none passed.
"""
import argparse
import collections
import gc
import json
import os
import pathlib
import re
import resource
import subprocess
import sys
import tempfile

import pytest

HERE = pathlib.Path(__file__).resolve().parent
KDA_TESTS = "tests/ops/test_kda.py"
# Without this variable FLA skips tests of several value heads a q/k head, which another of its backends has not.
SEVERAL_VALUE_HEADS = "FLA_DISABLE_BACKEND_DISPATCH"


# ---- in pytest's process (-p fla_suite) ------------------------------------------------------------------------------

seen: list[str] = []  # every path of a call of KDA or Gated DeltaNet that libkda.fla notes


def keep_paths(plugin, keep):
    def kept(note):
        def call(*args, **part):
            plugin.paths.clear()
            note(*args, **part)
            keep([path for part, path in plugin.paths.items() if part == "kda"])
        return call
    plugin.serves, plugin.leaves = kept(plugin.serves), kept(plugin.leaves)


def serve(keep):
    os.environ.pop(SEVERAL_VALUE_HEADS, None)  # FLA reads it when it is imported; here its registry is to be asked
    import libkda.fla
    libkda.fla.enable(train_on_gpu=True)
    keep_paths(libkda.fla._plugin, keep)


# A test may start processes, one a rank. They serve too (SERVE_IN_CHILDREN), and write down what they note.
SERVE_IN_CHILDREN = """
import sys
if "--multiprocessing-fork" in sys.orig_argv:
    import fla_suite
    fla_suite.serve_in_child()
"""


def serve_in_child():
    noted = set()

    def keep(paths):
        if not noted.issuperset(paths):
            noted.update(paths)
            with open(os.environ["LIBKDA_SUITE_PATHS"], "a", encoding="utf-8") as file:
                file.writelines(f"{path}\n" for path in paths)
    serve(keep)


def paths_of_children():
    file = pathlib.Path(os.environ["LIBKDA_SUITE_PATHS"])
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


found = {"tests": {}}


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests():
    """Before FLA's conftest.py looks for a device."""
    import fla
    import torch

    import libkda
    found.update(fla=fla.__version__, torch=torch.__version__, libkda=libkda.__version__,
                 device=torch.cuda.get_device_name() if os.environ["LIBKDA_SUITE_DEVICE"] == "cuda" else "cpu")
    if os.environ["LIBKDA_SUITE_DEVICE"] == "cpu":
        most = int(float(os.environ["LIBKDA_SUITE_MEMORY"]) * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))  # an error of the test, not the end of a process
        torch.set_flush_denormal(True)  # FLA's references crawl where states decay
        import fla.utils
        for module in (fla.utils, getattr(fla.utils, "hardware", fla.utils)):
            module.device, module.device_torch_lib = "cpu", torch.cpu
    serve(seen.extend)
    os.environ[SEVERAL_VALUE_HEADS] = "1"
    sys.path.append(os.environ["LIBKDA_SUITE_CHECKOUT"])  # last: processes that a test starts import it from there


def pytest_runtest_logstart():
    seen.clear()
    pathlib.Path(os.environ["LIBKDA_SUITE_PATHS"]).unlink(missing_ok=True)
    sys.last_exc = sys.last_value = sys.last_traceback = None  # the tensors of a test that failed
    gc.collect()


def reason_of(longrepr):
    """Its line that says most."""
    if isinstance(longrepr, tuple):  # a skip
        return longrepr[-1]
    crash = getattr(longrepr, "reprcrash", None)
    return crash.message.partition("\n")[0] if crash else str(longrepr).strip().rpartition("\n")[2]


def pytest_runtest_logreport(report):
    row = found["tests"].setdefault(report.nodeid, {"outcome": "passed", "paths": []})
    row["paths"] = sorted({*row["paths"], *seen, *paths_of_children()})
    if report.outcome != "passed" and row["outcome"] == "passed":
        row["outcome"] = report.outcome
        row["reason"] = reason_of(report.longrepr)[:300]


def pytest_sessionfinish(session):
    pathlib.Path(os.environ["LIBKDA_SUITE_REPORT"]).write_text(json.dumps(found))


# ---- the command -----------------------------------------------------------------------------------------------------

NAMES = {"context_parallel": "context_parallel", "gdn": "gdn", "--tests": "models"}  # of results, by what --tests says


def commit_of(checkout):
    run = subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return run.stdout.strip() or None


def free_memory():
    """GiB that a process may take and leave some for others."""
    rows = dict(line.split(":") for line in pathlib.Path("/proc/meminfo").read_text().splitlines())
    return 0.9 * int(rows["MemAvailable"].split()[0]) / 2**20


def run_pytest(checkout, tests, device, memory, extra):
    """What the plugin above found."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.json"
        pathlib.Path(folder, "sitecustomize.py").write_text(SERVE_IN_CHILDREN)
        environment = {n: x for n, x in os.environ.items() if n != "FLA_CI_ENV"}  # it loosens the bounds
        environment.update(LIBKDA_SUITE_DEVICE=device, LIBKDA_SUITE_REPORT=str(report), LIBKDA_SUITE_MEMORY=str(memory),
                           LIBKDA_SUITE_PATHS=str(pathlib.Path(folder) / "paths"), LIBKDA_SUITE_CHECKOUT=str(checkout),
                           PYTHONPATH=os.pathsep.join(filter(None, (folder, str(HERE), os.environ.get("PYTHONPATH")))))
        if device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        # Not in the checkout, by importlib, and without the checkout's own pythonpath: its folder fla must not stand
        # before the installed package.
        subprocess.run([sys.executable, "-m", "pytest", "-p", "fla_suite", "-p", "no:cacheprovider", "-q",
                        "-o", "pythonpath=", "-o", "log_cli=false", "--import-mode=importlib",
                        f"--rootdir={checkout}", checkout / tests, *extra],
                       cwd=folder, env=environment, check=False)
        return json.loads(report.read_text()) if report.exists() else {"tests": {}}


def header_of(args):
    """What bench/report/evidence.py says of a result on a GPU."""
    sys.path.append(str(HERE.parent.parent / "bench" / "report"))
    import evidence
    tests = "" if args.tests == KDA_TESTS else f" --tests {args.tests}"
    what = next((what for part, what in NAMES.items() if part in tests), "suite")
    return evidence.header(args.binaries, f"gpu_fla_{what}",
                           f"python3 python/tests/fla_suite.py FLA_CHECKOUT --device cuda{tests}")


def verdict(row):
    if row["outcome"] == "passed" and any(path.startswith("fla: ") for path in row["paths"]):
        return "handed back"
    if row["outcome"] == "failed" and re.search("can't allocate memory|cannot be allocated|out of memory|MemoryError",
                                                row.get("reason", "")):
        return "out of memory"
    if row["outcome"] == "failed" and not row["paths"] and "0 active drivers" in row.get("reason", ""):
        return "needs a GPU"
    return row["outcome"]


def exit_code(counts):
    return 0 if counts.get("passed") and not counts.get("failed") and not counts.get("handed back") else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=pathlib.Path, help="a clone of FLA's repository")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--memory", type=float, metavar="GIB", default=None,
                        help="of a test on the CPU, at most (nine tenths of what is free)")
    parser.add_argument("--tests", default=KDA_TESTS, help="file in the checkout")
    parser.add_argument("--json", type=pathlib.Path, help="write the report to this file")
    parser.add_argument("--binaries", type=pathlib.Path, metavar="BUILD",
                        help="the build that libkda is of: the report names its GPU kernels (kernel_hashes.json)")
    args, extra = parser.parse_known_args()
    if not (args.checkout / args.tests).is_file():
        parser.error(f"{args.checkout} has no {args.tests}: give a clone of FLA's repository")
    header = header_of(args) if args.binaries else {}
    memory = args.memory or free_memory()
    report = header | {"commit": commit_of(args.checkout)}
    report |= run_pytest(args.checkout.resolve(), args.tests, args.device, memory, extra)
    for row in report["tests"].values():
        row["verdict"] = verdict(row)
    report["counts"] = dict(collections.Counter(row["verdict"] for row in report["tests"].values()))
    for name, row in report["tests"].items():
        if row["verdict"] not in ("passed", "skipped"):
            print(f'{row["verdict"]}: {name}: {row.get("reason", row["paths"])}')
    print(", ".join(f"{count} {what}" for what, count in report["counts"].items()) or "no test ran")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return exit_code(report["counts"])


if __name__ == "__main__":
    sys.exit(main())
