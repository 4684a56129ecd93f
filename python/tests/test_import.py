# SPDX-License-Identifier: Apache-2.0
"""The package in interpreters of its own."""
import ast
import pathlib
import subprocess
import sys

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
    assert out.startswith("(1, 3, 1, 8) 0.") and "no torch" in out


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
