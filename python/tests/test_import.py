# SPDX-License-Identifier: Apache-2.0
"""The package in interpreters of its own."""
import ast
import importlib.metadata
import pathlib
import shutil
import subprocess
import sys

import pytest

import libkda


def python(code):
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_without_torch():
    """NumPy is enough for libkda.arrays; what needs torch says so."""
    out = python("""
import sys
sys.modules["torch"] = None
import numpy as np, libkda
from libkda import arrays
x = np.ones((1, 3, 1, 8), np.float32)
o, _ = arrays.forward(x, x, x, -x, x[..., 0])
print(o.shape, libkda.__version__)
try:
    libkda.chunk_kda
except ImportError as error:
    print("no torch:", error)
""")
    assert out.startswith("(1, 3, 1, 8) 0.")
    assert "no torch: libkda.chunk_kda needs torch 2.10 or later (pip install 'libkda[torch]'); libkda.arrays" in out


HELP = """
import inspect, pydoc, libkda
text = pydoc.render_doc(libkda, renderer=pydoc.plaintext)
members = dict(inspect.getmembers(libkda))
for line in {lines!r}:
    assert line in text, line
assert ("chunk_kda" in members) == ("chunk_kda" in dir(libkda)) == ("chunk_kda(q:" in text) == {torch}
loaded = [name for name in ("fla", "transformers", "vllm", "sglang") if sys.modules.get(name)]
plugins = [name for name in libkda._BY_NAME_ALONE if "libkda." + name in sys.modules]
assert not loaded and not plugins, (loaded, plugins)
"""
LINES = ["short_conv, short_conv_update       the short convolution",
         "gated_rms_norm                      the gated norm",
         "Gated DeltaNet, which has one gate a head", "prefill, decode, verify             serving",
         "libkda.context_parallel             context parallelism"]


@pytest.mark.parametrize("missing, torch", [
    (["torch"], False), (["fla", "transformers"], True), ([], True)], ids=["no torch", "no host", "all"])
def test_help_changes_nothing(missing, torch):
    """help(), inspect.getmembers() and dir() look at all names of the package; plugins have to be imported."""
    python("import sys\n" + "".join(f"sys.modules[{name!r}] = None\n" for name in missing)
           + HELP.format(lines=LINES, torch=torch))


def test_help_beside_an_old_torch():
    python("""
import importlib.metadata, sys
importlib.metadata.version = lambda name: "2.9.1+cu128"
""" + HELP.format(lines=LINES, torch=False))


def test_the_extra_has_the_bound():
    try:
        needed = importlib.metadata.requires("libkda")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("this libkda was not installed from a wheel")
    assert "torch>=2.10; extra == 'torch'" in [line.replace('"', "'") for line in needed]


def test_without_jax():
    assert "libkda.jax needs JAX (pip install libkda[jax])" in python("""
import sys
sys.modules["jax"] = None
try:
    from libkda import jax
except ImportError as error:
    print(error)
""")


def test_import_is_quick_and_lazy():
    seconds = float(python("""
import sys, time
start = time.perf_counter()
import libkda
print(time.perf_counter() - start)
assert "torch" not in sys.modules and "numpy" not in sys.modules
assert "chunk_kda" in dir(libkda)
"""))
    assert seconds < 0.3


def test_unknown_names():
    python("""
import libkda
try:
    libkda.chunk_kdb
except AttributeError as error:
    assert "chunk_kdb" in str(error)
else:
    raise SystemExit("no error")
""")


def test_stub_has_the_names_that_load_late():
    stub = ast.parse((pathlib.Path(libkda.__file__).parent / "__init__.pyi").read_text())
    imported = {name.name for node in stub.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert imported == {*libkda._NAMES, *libkda._MODULES}
    for node in stub.body:
        if isinstance(node, ast.ImportFrom) and node.module != "libkda":
            assert {libkda._NAMES[name.name] for name in node.names} == {node.module.removeprefix("libkda.")}


COPIES = """
import importlib.util, sys
def load(name, folder):
    spec = importlib.util.spec_from_file_location(name, folder + "/__init__.py", submodule_search_locations=[folder])
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
import torch
first, folder = load("first", {folder!r}), {folder!r}
x = [torch.rand(1, 3, 1, 16) for _ in range(4)]
call = lambda package: package.chunk_kda(*x[:3], -x[3], x[0][..., 0])[0]
expected = call(first)
"""


def test_a_second_copy_uses_the_operators_of_the_first(tmp_path):
    """As a package of a hub beside the wheel, under another name and in another folder."""
    here = pathlib.Path(libkda.__file__).parent
    shutil.copytree(here, tmp_path / "second")
    python(COPIES.format(folder=str(here)) + f"""
second = load("second", {str(tmp_path / "second")!r})
assert torch.equal(call(second), expected)
del sys.modules["first.ops"], first
import gc; gc.collect()
state = torch.zeros(1, 1, 16, 16)
with torch.no_grad():
    second.fused_recurrent_kda_fwd(*x[:3], -x[3], x[0][..., 0], initial_state=state)
assert state._version == 1 and state.abs().sum() > 0
""")


def test_a_copy_of_another_version_is_refused(tmp_path):
    here = pathlib.Path(libkda.__file__).parent
    shutil.copytree(here, tmp_path / "second")
    library = tmp_path / "second" / "_binding" / "library.py"
    library.write_text(library.read_text() + "\n\ndef version():\n    return '9.9.9'\n")
    python(COPIES.format(folder=str(here)) + f"""
second = load("second", {str(tmp_path / "second")!r})
try:
    call(second)
except ImportError as error:
    assert "libkda 9.9.9" in str(error) and "cannot be loaded beside libkda" in str(error), error
else:
    raise SystemExit("no error")
assert torch.equal(call(first), expected)
""")
