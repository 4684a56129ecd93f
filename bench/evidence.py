# SPDX-License-Identifier: Apache-2.0
"""What every GPU result says of itself: the machine code that it speaks for (a hash of each kernel
family from build/kernel_hashes.json, tools/dev/kernel_code.py), the device, its driver, the toolkit,
the date, and the command."""
import datetime
import json
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


def architecture(built, capability):
    """The machine code of a build that a GPU of this compute capability ("8.6") runs: of the closest
    earlier one with its major number. None: it compiles PTX, and no hash speaks for that."""
    major, minor = (int(x) for x in capability.split("."))
    there = [arch for arch in next(iter(built["families"].values()))
             if int(arch[3:-1]) == major and int(arch[-1]) <= minor]
    return max(there, default=None)


def header(binaries, families, what, command):
    """`command`: as anyone would run it, without the paths of this machine."""
    built = json.loads((pathlib.Path(binaries) / "kernel_hashes.json").read_text())
    device, driver, capability = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"],
        capture_output=True, text=True, check=True).stdout.splitlines()[0].split(", ")
    arch = architecture(built, capability)
    return {"what": what, "families": {f: built["families"][f].get(arch) for f in families},
            "architecture": arch, "device": device, "driver": driver, "toolkit": built["toolkit"],
            "date": datetime.date.today().isoformat(), "command": command}


def write(path, report):
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written: {path}")
