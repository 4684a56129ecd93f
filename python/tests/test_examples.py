# SPDX-License-Identifier: Apache-2.0
"""What README.md, docs/python.md and docs/engines.md show, run as files."""
import importlib.resources
import json
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples" / "python").glob("*.py"))
OF_OTHER_TESTS = [ROOT / "examples" / "onnxruntime" / "linear_attention.py",  # test_onnxruntime.py
                  ROOT / "examples" / "ggml" / "compare.c"]  # ./dev bench-ggml
assert EXAMPLES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_runs(path):
    needs = {"fla_plugin": "fla", "jax_forward": "jax", "transformers_generate": "transformers.models.kimi_linear"}
    if path.stem in needs:
        pytest.importorskip(needs[path.stem])
    if path.stem == "jax_forward" and not (importlib.resources.files("libkda") / "lib" / "libkda_jax.so").is_file():
        pytest.skip("this package was built where there was no jaxlib")
    run = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout


@pytest.mark.parametrize("processes", (1, 2))
def test_long_context(processes, tmp_path):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available() and torch.cuda.device_count() < processes:
        pytest.skip(f"needs {processes} GPUs, or none")
    example, report = ROOT / "examples" / "long_context.py", tmp_path / "report.json"
    launcher = [] if processes == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run([sys.executable, *launcher, example, "--tokens", "640", "--prefix", "320", "--dim", "32",
                          "--rounds", "1", "--layout", "zigzag", "--json", report], capture_output=True, text=True,
                         check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(report.read_text())
    assert found["processes"] == processes and f"{processes} processes, 640 tokens" in run.stdout
    assert (found["sent_bytes"] > 0) == (processes > 1) and found["relative_error"] < 1e-3


def test_context_parallel_over_processes():
    """The example has the same outputs on two processes as on one."""
    example = ROOT / "examples" / "python" / "context_parallel.py"
    sums = []
    for launcher in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]):
        run = subprocess.run([sys.executable, *launcher, example], capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        sums.append(sum(float(x) for x in re.findall(r"sum of squares ([\d.]+)", run.stdout)))
    assert sums[0] > 1 and abs(sums[1] - sums[0]) < 1e-3 * sums[0]


def test_engines_table():
    """Every line of docs/engines.md names a file that the tests run, and that file has what the line says to write."""
    rows = re.findall(r"^\| (.*) \| (.*) \| .* \| \[.*\]\((\S+)\) \|$", (ROOT / "docs/engines.md").read_text(), re.M)
    assert len(rows) == 14
    in_ctest = (ROOT / "tests" / "CMakeLists.txt").read_text()
    for program, write, link in rows:
        path = (ROOT / "docs" / link).resolve()
        in_loop = re.search(r"foreach\(example (.*)\)", in_ctest).group(1).split()
        assert (path in EXAMPLES or path in OF_OTHER_TESTS or f"examples/{path.name}" in in_ctest
                or path.stem in in_loop), program
        for snippet in re.findall("`(.*?)`", write):
            assert snippet in path.read_text(), f"{program}: {snippet}"


def test_training_is_faster_than_autograd_through_the_reference(tmp_path):
    bench = pathlib.Path(__file__).resolve().parents[2] / "bench" / "train" / "train_bench.py"
    rows = tmp_path / "rows.json"
    run = subprocess.run([sys.executable, bench, "--tokens", "256", "--heads", "2", "--dim", "64", "--rounds", "1",
                          "--json", rows], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    ours, reference = (row["forward_ms"] + row["backward_ms"] for row in json.loads(rows.read_text())["rows"])
    assert reference >= 5 * ours and "times as fast" in run.stdout, run.stdout
