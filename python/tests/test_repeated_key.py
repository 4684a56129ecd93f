# SPDX-License-Identifier: Apache-2.0
"""The drift of a state where one key repeats and nothing decays stays within docs/accuracy.md."""
import json
import pathlib
import subprocess
import sys

import pytest
import torch

BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench" / "repeated_key.py"
# A token adds at most this to the error of the state: where values repeat, and where they do not.
MOST = {"cpu": (3e-8, 1e-8), "cuda": (1e-4, 2e-5)}


@pytest.mark.parametrize("device", ("cpu", "cuda"))
def test_drift(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    run = subprocess.run([sys.executable, BENCH, "--device", device, "--tokens", "1024,4096", "--json"],
                         capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    rows = json.loads(run.stdout)
    assert len(rows) == 4
    for row in rows:
        most = MOST[device][0 if row["repeats"] else 1]
        assert 0 < row["state"] <= most * row["tokens"], row
        assert row["o"] <= 5e-3, row
