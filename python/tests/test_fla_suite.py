# SPDX-License-Identifier: Apache-2.0
"""fla_suite.py on a folder that looks like FLA's repository: what passes, fails, needs a gradient."""
import json
import os
import pathlib
import subprocess
import sys

import fla_suite
import pytest

pytest.importorskip("fla")

SUITE = pathlib.Path(fla_suite.__file__)
TESTS = """
import os
import pytest
import torch
from fla.ops.kda import chunk_kda
from fla.utils import device

def call(**flags):
    assert device == "cpu" and "FLA_CI_ENV" not in os.environ
    x = [torch.rand(1, 70, 2, 32, device=device, **flags) for _ in range(4)]
    return chunk_kda(*x[:3], -x[3], torch.rand(1, 70, 2, device=device))[0]

def test_forward():
    with torch.no_grad():
        assert call().isfinite().all()

def test_backward():
    call(requires_grad=True).sum().backward()

def test_skipped():
    pytest.skip("no such card")

def test_wrong():
    assert call().sum() == 1e9
"""


def test_a_checkout(tmp_path):
    tests = tmp_path / "tests" / "ops"
    tests.mkdir(parents=True)
    (tests / "test_kda.py").write_text(TESTS)
    (tmp_path / "fla").mkdir()  # a checkout has the package too: the installed one counts
    (tmp_path / "fla" / "__init__.py").write_text("raise ImportError('the checkout, not the package')")
    run = subprocess.run([sys.executable, SUITE, tmp_path, "--json", tmp_path / "report.json"], capture_output=True,
                         text=True, check=False, env=dict(os.environ, FLA_CI_ENV="1"))
    assert run.returncode == 1, run.stdout + run.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["counts"] == {"passed": 1, "skipped": 1, "failed": 1, "left for the backward pass": 1}
    rows = {name.rpartition("::")[2]: row for name, row in report["tests"].items()}
    assert rows["test_forward"]["paths"] == ["libkda: chunk_kda"] and rows["test_backward"]["paths"][0][:4] == "fla:"
    assert rows["test_skipped"]["reason"].endswith("no such card")
    assert "failed: " in run.stdout and "test_wrong" in run.stdout
    assert report["device"] == "cpu" and report["fla"] and report["torch"] and report["libkda"]


def test_verdicts():
    gradient = ["fla: chunk_kda: a gradient is asked for, and libkda has no backward pass yet", "libkda: chunk_kda"]
    for device, outcome, expected in [("cpu", "failed", "left for the backward pass"), ("cuda", "failed", "failed"),
                                      ("cuda", "passed", "left for the backward pass")]:
        assert fla_suite.verdict(dict(outcome=outcome, paths=gradient), device) == expected
    assert fla_suite.verdict(dict(outcome="failed", paths=["libkda: chunk_kda"]), "cpu") == "failed"
    for counts, code in [(dict(passed=3, skipped=1), 0), (dict(passed=3, failed=1), 1), ({}, 1), (dict(skipped=9), 1)]:
        assert fla_suite.exit_code(counts) == code


def test_not_a_checkout(tmp_path):
    run = subprocess.run([sys.executable, SUITE, tmp_path], capture_output=True, text=True, check=False)
    assert run.returncode == 2 and "give a clone of FLA's repository" in run.stderr
