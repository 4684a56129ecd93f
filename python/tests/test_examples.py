# SPDX-License-Identifier: Apache-2.0
"""What README.md and docs/python.md show, run as files."""
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
