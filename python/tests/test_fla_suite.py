# SPDX-License-Identifier: Apache-2.0
"""fla_suite.py on a folder that looks like FLA's repository: what passes, fails, is served by FLA."""
import argparse
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
    x = [torch.rand(1, 70, 2, 32, **flags) for _ in range(4)]
    return chunk_kda(*x[:3], -x[3], torch.rand(1, 70, 2))[0]

def test_forward():
    assert device == "cpu" and "FLA_CI_ENV" not in os.environ
    with torch.no_grad():
        assert call().isfinite().all()

def test_backward():
    call(requires_grad=True).sum().backward()

def rank(index):
    call()

def test_processes():
    torch.multiprocessing.spawn(rank, nprocs=1)

def test_handed_back():
    import libkda.fla
    libkda.fla._plugin.leaves("chunk_kda", "switched off by disable()")

def test_too_large():
    torch.zeros(1 << 33, dtype=torch.uint8)

def test_skipped():
    pytest.skip("no such card")

def test_wrong():
    assert call().sum() == 1e9

def test_a_kernel_of_triton():
    from fla.ops.gated_delta_rule.wy_fast import recompute_w_u_fwd
    k, A = torch.rand(1, 64, 1, 64), torch.rand(1, 64, 1, 64)
    recompute_w_u_fwd(k=k, v=k, beta=k[..., 0], A=A)

def test_several_value_heads():
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    assert os.environ["FLA_DISABLE_BACKEND_DISPATCH"] == "1"  # where it is not, FLA skips them
    q, v = torch.rand(1, 70, 2, 32), torch.rand(1, 70, 4, 32)
    chunk_gated_delta_rule(q, q, v, -v[..., 0], v[..., 1])
"""

CONFTEST = """
import pytest
from fla.utils import device_torch_lib

@pytest.fixture(autouse=True)
def wait():
    yield
    device_torch_lib.synchronize()
"""


def test_a_checkout(tmp_path):
    tests = tmp_path / "tests" / "ops"
    tests.mkdir(parents=True)
    (tests / "test_kda.py").write_text(TESTS)
    (tmp_path / "tests" / "conftest.py").write_text(CONFTEST)
    (tmp_path / "fla").mkdir()  # a checkout has the package too: the installed one counts
    (tmp_path / "fla" / "__init__.py").write_text("raise ImportError('the checkout, not the package')")
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\nlog_cli = true\npythonpath = ['.']\n")
    run = subprocess.run([sys.executable, SUITE, tmp_path, "--json", tmp_path / "report.json", "--memory", "6"],
                         capture_output=True, text=True, check=False, env=dict(os.environ, FLA_CI_ENV="1"))
    assert run.returncode == 1, run.stdout + run.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["counts"] == {"passed": 4, "skipped": 1, "failed": 1, "handed back": 1, "out of memory": 1,
                                "needs a GPU": 1}
    rows = {name.rpartition("::")[2]: row for name, row in report["tests"].items()}
    assert rows["test_forward"]["paths"] == rows["test_backward"]["paths"] == ["libkda: chunk_kda"]
    assert rows["test_processes"]["paths"] == ["libkda: chunk_kda"]  # noted in other processes
    assert rows["test_handed_back"]["verdict"] == "handed back"
    assert rows["test_too_large"]["verdict"] == "out of memory"
    assert rows["test_a_kernel_of_triton"]["verdict"] == "needs a GPU"
    assert rows["test_several_value_heads"]["paths"] == ["libkda: chunk_gated_delta_rule"]
    assert rows["test_skipped"]["reason"].endswith("no such card")
    assert "failed: " in run.stdout and "test_wrong" in run.stdout
    assert "handed back: " in run.stdout and "switched off by disable()" in run.stdout
    assert report["device"] == "cpu" and report["fla"] and report["torch"] and report["libkda"]


def test_a_result_on_a_card_names_it_and_its_kernels(a_card):
    build, says = a_card
    for tests, what, flags in [(fla_suite.KDA_TESTS, "suite", ""), ("tests/models", "models", " --tests tests/models"),
                               ("tests/ops/test_gdn.py", "gdn", " --tests tests/ops/test_gdn.py"),
                               ("tests/context_parallel", "context_parallel", " --tests tests/context_parallel")]:
        found = fla_suite.header_of(argparse.Namespace(binaries=build, tests=tests))
        families = found.pop("families")
        assert found == says | {"what": f"gpu_fla_{what}",
                                "command": f"python3 python/tests/fla_suite.py FLA_CHECKOUT --device cuda{flags}"}
        assert families["staged_backward"] == "hash of staged_backward"
        assert ("spans" in families) == (what == "context_parallel")


def test_verdicts():
    served = ["libkda: chunk_kda"]
    returned = ["fla: chunk_kda: switched off by disable()", *served]
    assert fla_suite.verdict(dict(outcome="failed", paths=served, reason="0 active drivers ([])")) == "failed"
    for outcome, paths, expected in [("passed", served, "passed"), ("passed", returned, "handed back"),
                                     ("failed", returned, "failed"), ("skipped", [], "skipped")]:
        assert fla_suite.verdict(dict(outcome=outcome, paths=paths)) == expected
    for counts, code in [({"passed": 3, "skipped": 1}, 0), ({"passed": 3, "failed": 1}, 1), ({}, 1),
                         ({"skipped": 9}, 1), ({"passed": 3, "handed back": 1}, 1),
                         ({"passed": 3, "out of memory": 1}, 0)]:
        assert fla_suite.exit_code(counts) == code


def test_not_a_checkout(tmp_path):
    run = subprocess.run([sys.executable, SUITE, tmp_path], capture_output=True, text=True, check=False)
    assert run.returncode == 2 and "give a clone of FLA's repository" in run.stderr
