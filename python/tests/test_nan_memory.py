# SPDX-License-Identifier: Apache-2.0
"""That nan_memory.py finds what it is for: rows that a kernel leaves unwritten."""
import json
import os
import pathlib
import subprocess
import sys

import nan_memory
import pytest
import torch
from common import FLAGS, make

import libkda
from libkda import ops

inside = pytest.mark.skipif(not nan_memory.is_on(), reason="test_in_a_process_of_its_own runs it")
MODES = (0, 1, -5.0, 64 ** -0.5, True, False)  # gates, steps, lower bound, scale, norm, layout


def broken_kernel(q, k, v, g, beta):
    """libkda::forward_into, made to leave the last row unwritten."""
    o = torch.empty_like(v)
    rows = [x[:, :-1] for x in (q, k, v, g, beta)]
    ops.forward_into(*rows, o[:, :-1], None, None, None, None, None, None, None, *MODES)
    return o


@pytest.fixture
def broken():
    with torch.library._scoped_library("kda_broken", "DEF") as library:
        library.define("kernel(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta) -> Tensor")
        library.impl("kernel", broken_kernel, "CompositeExplicitAutograd")
        yield nan_memory.Watched(torch.ops.kda_broken.kernel.default)


@inside
def test_a_row_that_a_kernel_leaves_is_found(device, broken):
    x = make(B=1, T=70, K=64, V=64, device=device)[0]
    with torch.no_grad(), pytest.raises(AssertionError, match=r"result 0 \[1, 70, 4, 64\] has 256 NaN, the first at "
                                                              r"\[0, 69, 0, 0\]"):
        broken(*(x[name] for name in ("q", "k", "v", "g", "beta")))


@inside
def test_memory_is_nan(device):
    like = torch.ones(9, 9, device=device, dtype=torch.bfloat16)
    for made in (torch.empty(33, 5, device=device), torch.empty_like(like), like.new_empty(1 << 18),
                 torch.empty_strided((4, 5), (1, 4), device=device)):
        assert made.isnan().all()


@inside
def test_operators_take_nan_from_torch(device):
    before = nan_memory.tensors_on_a_gpu()
    x = make(B=1, T=70, K=64, V=64, device=device)[0]
    o, _ = libkda.chunk_kda(**x, **FLAGS)
    assert o.isfinite().all()
    made = nan_memory.tensors_on_a_gpu() - before
    assert made >= 2 if device == "cuda" else made == 0  # o and the final state; not every plan has a workspace


def test_a_result_names_every_family(a_card, tmp_path, monkeypatch):
    build, says = a_card
    monkeypatch.setattr(nan_memory, "tensors_on_a_gpu", lambda: 7)
    nan_memory.write_evidence(tmp_path / "result.json", build, {"passed": [1, 2]},
                              ["python/tests", "--nan-json=result.json", "--binaries", "build", "--gpu-only"])
    found = json.loads((tmp_path / "result.json").read_text())
    assert says.items() <= found.items() and (found["passed"], found["tensors_filled"]) == (2, 7)
    assert found["command"] == "python3 python/tests/nan_memory.py python3 -m pytest python/tests --gpu-only"
    hashes = json.loads((build / "kernel_hashes.json").read_text())["families"]
    assert found["families"] == {name: of["sm_90"] for name, of in hashes.items()}


@pytest.mark.skipif(nan_memory.is_on(), reason="this process is one")
def test_in_a_process_of_its_own():
    command = [sys.executable, nan_memory.__file__, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run([*command, __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout + done.stderr


def test_gpu_only_leaves_out_the_cpu():
    folder = pathlib.Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "--gpu-only"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    files = [folder / f"test_{name}.py" for name in ("rows_behind", "repeated_key", "errors")]
    done = subprocess.run([*command, *files], env=environment, capture_output=True, text=True)
    names = [line.split("::")[1].split("[") for line in done.stdout.splitlines() if "::" in line]
    assert {"test_outputs_and_gradients", "test_drift"} <= {name for name, *_ in names}, done.stdout + done.stderr
    assert names.count(["test_drift", "cuda]"]) == 1 and not any("cpu]" in rest for _, *rest in names)
    assert "test_errors.py" not in done.stdout
