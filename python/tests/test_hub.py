# SPDX-License-Identifier: Apache-2.0
"""packaging/hub/layout.py: wheels as a repository of the kernels hub, loaded by package `kernels`, alone in a process,
beside an installed libkda, and beside one of another version."""
import json
import os
import pathlib
import subprocess
import sys
import zipfile

import pytest
from test_two_versions import HERE, OTHER, THIS, make_other

pytest.importorskip("kernels", reason="package kernels is not installed (.ci/python has it for a while)")
LAYOUT = pathlib.Path(__file__).resolve().parents[2] / "packaging" / "hub" / "layout.py"


def make_wheel(path, package, version, name="libkda"):
    """The files of an installed package as a wheel has them."""
    with zipfile.ZipFile(path, "w") as files:
        for file in sorted(package.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                files.write(file, f"libkda/{file.relative_to(package)}")
        files.writestr(f"libkda-{version}.dist-info/METADATA",
                       f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n")
    return path


def layout(*arguments):
    return subprocess.run([sys.executable, LAYOUT, *map(str, arguments)], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def repositories(tmp_path_factory):
    """One of this version, one of another."""
    folder = tmp_path_factory.mktemp("hub")
    packages = {THIS: HERE, OTHER: make_other(folder / "package")}
    for version, package in packages.items():
        run = layout(folder / version, f"cpu={make_wheel(folder / f'{version}.whl', package, version)}")
        assert run.returncode == 0, run.stderr
    return folder


def python(repositories, code, *, installed):
    """Runs code that has `hub(version)`, `run(package)` and inputs x; `installed`: `import libkda` finds that one."""
    start = f"""
import pathlib, sys
import torch
import kernels
hub = lambda version: kernels.get_local_kernel(pathlib.Path({str(repositories)!r}) / version, backend="cpu")
torch.manual_seed(0)
x = torch.rand(1, 70, 2, 16)
run = lambda package: package.chunk_kda(x, x, x, -x, x[..., 0])[0]
THIS, OTHER = {THIS!r}, {OTHER!r}
if not {installed}:
    sys.modules["libkda"] = None
"""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path), HF_HUB_OFFLINE="1")
    run = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, check=False,
                         env=environment)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


def test_layout(repositories):
    folder = repositories / THIS / "build" / "torch-stable-abi210-cpu-x86_64-linux"
    metadata = json.loads((folder / "metadata.json").read_text())
    assert metadata["backend"] == {"type": "cpu"} and metadata["name"] == "libkda" and metadata["version"] >= 1
    assert metadata["id"] == f"_libkda_cpu_{THIS.replace('.', '_')}"
    assert sorted(path.name for path in (folder / "lib").iterdir()) == ["libkda_c.so", "libkda_torch.so"]
    assert not (folder / "include").exists() and not (folder / "jax.py").exists()


def test_alone(repositories):
    assert python(repositories, """
package = hub(OTHER)
assert sys.modules["libkda"] is None and package.__version__ == OTHER
q = torch.rand(1, 70, 2, 16, requires_grad=True)
o = package.chunk_kda(q, x, x, -x, x[..., 0])[0]
expected = package.naive.naive_recurrent_kda(q.double(), *(t.double() for t in (x, x, -x, x[..., 0])))[0]
assert (o - expected).norm() < 2e-6 * expected.norm()
o.sum().backward()
expected, = torch.autograd.grad(expected.sum(), q)
assert (q.grad - expected).norm() < 1e-5 * expected.norm()
print(package.__file__)
""", installed=False)[0].startswith(str(repositories / OTHER))


def test_beside_an_installed_one_of_its_version(repositories):
    python(repositories, """
o = run(hub(THIS))
import libkda
assert hub(THIS) is not libkda and torch.equal(run(hub(THIS)), o) and torch.equal(run(libkda), o)
""", installed=True)


@pytest.mark.parametrize("first, second", [
    ("hub(OTHER)", "__import__('libkda')"), ("__import__('libkda')", "hub(OTHER)")])
def test_beside_another_version(repositories, first, second):
    """The second one is refused by the name of both, and the first goes on."""
    python(repositories, f"""
first = {first}
o = run(first)
try:
    second = {second}
    run(second)
except ImportError as error:
    for version in (THIS, OTHER):
        assert f"libkda {{version}} (" in str(error), error
else:
    raise SystemExit("not refused")
assert torch.equal(run(first), o)
""", installed=True)


def test_refusals(tmp_path):
    (tmp_path / "text.whl").write_text("no archive")
    (tmp_path / "empty").mkdir()
    torchless = make_wheel(tmp_path / "torchless.whl", tmp_path / "empty", THIS)
    another = make_wheel(tmp_path / "another.whl", tmp_path / "empty", THIS, name="another")
    for argument, words in [(f"rocm={torchless}", "the backend is not one of cpu, cu130"),
                            (f"cpu={tmp_path / 'text.whl'}", "text.whl: is no wheel"),
                            (f"cpu={torchless}", "has no operators for torch"),
                            (f"cpu={another}", "is a wheel of another, not of libkda")]:
        run = layout(tmp_path / "out", argument)
        assert run.returncode != 0 and words in run.stderr, run.stderr
        assert not (tmp_path / "out").exists()
