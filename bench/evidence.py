# SPDX-License-Identifier: Apache-2.0
"""What every GPU result says of itself: the kernels that it speaks for (build/kernel_hashes.json,
written with the binaries), the device, its driver, the toolkit, the date, and the command."""
import datetime
import json
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


def header(binaries, families, what, command):
    """`command`: as anyone would run it, without the paths of this machine."""
    built = json.loads((pathlib.Path(binaries) / "kernel_hashes.json").read_text())
    device, driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
        capture_output=True, text=True, check=True).stdout.splitlines()[0].split(", ")
    return {"what": what, "families": {f: built["families"][f] for f in families},
            "device": device, "driver": driver, "toolkit": built["toolkit"],
            "date": datetime.date.today().isoformat(), "command": command}


def write(path, report):
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written: {path}")
