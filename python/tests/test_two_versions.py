# SPDX-License-Identifier: Apache-2.0
"""Two versions of the package in one process, as a kernel of a hub may lie beside a wheel: each computes with its own
library, or the second is refused by name."""
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import libkda

HERE = pathlib.Path(libkda.__file__).parent
THIS = libkda.__version__
OTHER = "9" + THIS[1:]  # as long, so that it can be written over the version in a library
LOAD = f"""
import importlib.util, pathlib, sys
sys.modules["libkda"] = None  # a copy that is installed too is not imported
def load(name, folder):
    spec = importlib.util.spec_from_file_location(name, folder + "/__init__.py", submodule_search_locations=[folder])
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
load_this, load_other = lambda: load("this", {str(HERE)!r}), lambda: load("other", OTHER)
"""


def make_other(folder):
    """The package as its build with another version in version.h leaves it: the version is in the name of the library,
    in those of its symbols, and in what kda_version() says."""
    shutil.copytree(HERE, folder)
    for library in (folder / "lib").glob("*.so"):
        version = re.compile(rb"(?<![0-9.])%s(?=\0|\.so\0)" % re.escape(THIS.encode()))
        content, count = version.subn(OTHER.encode(), library.read_bytes())
        assert count, library
        library.unlink()  # a name of its own on the disk: the installed file stays as it is
        library.write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return make_other(tmp_path_factory.mktemp("two_versions") / "other")


def python(code, other, environment=None):
    run = subprocess.run([sys.executable, "-c", f"OTHER = {str(other)!r}\n{LOAD}\n{code}"], capture_output=True,
                         text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


ORDERS = pytest.mark.parametrize("order", ["load_this, load_other", "load_other, load_this"])


@ORDERS
def test_arrays_of_both(order, other):
    found = python(f"""
import numpy as np
x = np.random.default_rng(1).random((1, 5, 2, 16), np.float32)
results = []
for make in ({order}):
    package = make()
    results.append(package.arrays.forward(x, x, x, -x, x[..., 0])[0])
    print(package.__version__)
assert np.array_equal(*results)
""", other)
    assert sorted(found) == sorted([THIS, OTHER])


@ORDERS
def test_operators_of_the_second_are_refused(order, other):
    found = python(f"""
import torch
x = torch.rand(1, 5, 2, 16)
first, second = (make() for make in ({order}))
before = first.chunk_kda(x, x, x, -x, x[..., 0])[0]
try:
    second.chunk_kda(x, x, x, -x, x[..., 0])
except ImportError as error:
    for words in (f"libkda {{second.__version__}} (", f"beside libkda {{first.__version__}} ("):
        assert words in str(error), error
else:
    raise SystemExit("not refused")
assert torch.equal(first.chunk_kda(x, x, x, -x, x[..., 0])[0], before)
print(first.__version__)
""", other)
    assert found == [THIS if order.startswith("load_this") else OTHER]


@pytest.mark.skipif(not (HERE / "lib" / "libkda_jax.so").exists(), reason="built without jaxlib")
def test_handlers_of_the_second_are_refused(other):
    pytest.importorskip("jax")
    python("""
import jax.numpy as jnp
x = jnp.full((1, 5, 2, 16), 0.3)
this, other = load_this(), load_other()
before = this.jax.forward(x, x, x, -x, x[..., 0])[0]
try:
    other.jax.forward(x, x, x, -x, x[..., 0])
except ImportError as error:
    assert "other/lib/libkda_jax.so cannot serve JAX beside another copy of libkda" in str(error), error
else:
    raise SystemExit("not refused")
assert (this.jax.forward(x, x, x, -x, x[..., 0])[0] == before).all()
""", other)


def test_a_library_never_serves_operators_of_another_version(other):
    """The operators ask for libkda_c.so by a name with its version: what another version has loaded is not taken."""
    python("""
import ctypes, torch
ctypes.CDLL(f"{OTHER}/lib/libkda_c.so")
try:
    ctypes.CDLL(str(pathlib.Path(load_this().__file__).parent / "lib" / "libkda_torch.so"))
except OSError as error:
    assert "libkda_c-" in str(error), error
else:
    raise SystemExit("the operators run the kernels of another version")
""", other)


def test_symbols_that_all_libraries_see_are_not_taken(other, tmp_path):
    """A program may have loaded another libkda_c.so for all to see: the operators take the symbols of their version."""
    environment = dict(os.environ, LD_DEBUG="bindings", LD_DEBUG_OUTPUT=str(tmp_path / "bindings"))
    python("""
import ctypes, torch
ctypes.CDLL(f"{OTHER}/lib/libkda_c.so", mode=ctypes.RTLD_GLOBAL)
x = torch.rand(1, 5, 2, 16)
load_this().chunk_kda(x, x, x, -x, x[..., 0])
""", other, environment)
    lines = "".join(path.read_text() for path in tmp_path.glob("bindings.*"))
    of_the_operators = r"binding file \S+/libkda_torch\.so \[0\] to (\S+) \[0\]: normal symbol `(?!kda_torch_)kda_"
    bound = set(re.findall(of_the_operators, lines))
    assert bound == {str(HERE / "lib" / "libkda_c.so")}
