# SPDX-License-Identifier: Apache-2.0
"""What README.md and docs/python.md show, run as files."""
import json
import pathlib
import subprocess
import sys

import pytest

EXAMPLES = sorted((pathlib.Path(__file__).resolve().parents[2] / "examples" / "python").glob("*.py"))
assert EXAMPLES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_runs(path):
    needs = {"fla_plugin": "fla", "jax_forward": "jax"}
    if path.stem in needs:
        pytest.importorskip(needs[path.stem])
    run = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout


def test_training_is_faster_than_autograd_through_the_reference(tmp_path):
    bench = pathlib.Path(__file__).resolve().parents[2] / "bench" / "train_bench.py"
    rows = tmp_path / "rows.json"
    run = subprocess.run([sys.executable, bench, "--tokens", "256", "--heads", "2", "--dim", "64", "--rounds", "1",
                          "--json", rows], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    ours, reference = (row["forward_ms"] + row["backward_ms"] for row in json.loads(rows.read_text())["rows"])
    assert reference >= 5 * ours and "times as fast" in run.stdout, run.stdout
