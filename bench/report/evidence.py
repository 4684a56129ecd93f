# SPDX-License-Identifier: Apache-2.0
"""What every GPU result says of itself: the machine code that it speaks for (a hash of each kernel
family from build/kernel_hashes.json, tools/dev/kernel_code.py), the device, its driver, the toolkit,
the date, and the command."""
import datetime
import json
import os
import pathlib
import platform
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
# Kernel family -> patterns of its sources in src/cuda ("kernels"), and the test programs, fuzzed problems and
# benchmarks (their result files, without gpu_) that run it. Some launch kernels of other families too.
FAMILIES = json.loads((ROOT / "bench" / "families.json").read_text())


def families_of(kind, name):
    """The families that a benchmark, a test program or a fuzzed problem runs."""
    families = [family for family, row in FAMILIES.items() if name in row[kind]]
    if not families:
        raise SystemExit(f"bench/families.json: no family names {name} among its {kind}")
    return families


def all_of(kind):
    """Every test program, fuzzed problem or benchmark that a family names."""
    return sorted({name for row in FAMILIES.values() for name in row[kind]})


def architecture(built, capability):
    """The machine code of a build that a GPU of this compute capability ("8.6") runs: of the closest
    earlier one with its major number. None: it compiles PTX, and no hash speaks for that."""
    major, minor = (int(x) for x in capability.split("."))
    there = [arch for arch in next(iter(built["families"].values()))
             if int(arch[3:-1]) == major and int(arch[-1]) <= minor]
    return max(there, default=None)


def header(binaries, what, command, families=None):
    """`what`: a benchmark, with or without gpu_, or with `families` anything. `command`: as anyone would run it,
    without the paths of this machine."""
    families = families or families_of("benchmarks", what.removeprefix("gpu_"))
    built = json.loads((pathlib.Path(binaries) / "kernel_hashes.json").read_text())
    device, driver, capability = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"],
        capture_output=True, text=True, check=True).stdout.splitlines()[0].split(", ")
    arch = architecture(built, capability)
    return {"what": what, "families": {f: built["families"][f].get(arch) for f in families},
            "architecture": arch, "device": device, "driver": driver, "toolkit": built["toolkit"],
            "date": datetime.date.today().isoformat(), "command": command}


def machine():
    """What a CPU's result says of the machine: its model, the cores that the process may use, their load before it."""
    found = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    return {"date": datetime.date.today().isoformat(), "cpu": found[1] if found else platform.machine(),
            "cores": len(os.sched_getaffinity(0)), "load": round(os.getloadavg()[0], 1)}


def write(path, report):
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written: {path}")
