# SPDX-License-Identifier: Apache-2.0
"""Switches in the environment, each of which means the same words."""
import os
import pathlib
import re
import subprocess
import sys
import warnings

import pytest

import libkda
from libkda import sglang, vllm
from libkda._plugins import switches

ON, OFF = ["1", "true", "True", "YES", "on", " on "], ["0", "false", "No", "off", "OFF "]


@pytest.mark.parametrize("default", [False, True])
def test_words(monkeypatch, default):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.delenv("LIBKDA_X", raising=False)
        assert switches.switch("LIBKDA_X", default) is default
        for text, value in [("", default), *((text, True) for text in ON), *((text, False) for text in OFF)]:
            monkeypatch.setenv("LIBKDA_X", text)
            assert switches.switch("LIBKDA_X", default) is value


def test_another_word_is_one_warning(monkeypatch):
    switches._warned.clear()
    monkeypatch.setenv("LIBKDA_X", "2")
    with pytest.warns(UserWarning, match="LIBKDA_X must be 0, false, no or off, or 1, true, yes or on, got '2'"):
        assert not switches.switch("LIBKDA_X", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert switches.switch("LIBKDA_X", True)


def test_no_other_file_reads_the_environment():
    """But for the report, which prints it, and the number of threads, which is OpenMP's."""
    package = pathlib.Path(libkda.__file__).parent
    readers = {path.name for path in package.rglob("*.py") if re.search(r"os\.environ|getenv", path.read_text())}
    assert readers == {"switches.py", "repeats.py", "__main__.py"}


@pytest.mark.parametrize("module, variable", [(vllm, "LIBKDA_VLLM"), (sglang, "LIBKDA_SGLANG")])
def test_engines(monkeypatch, module, variable):
    for text, value in [("yes", True), ("off", False), ("true", True), ("no", False)]:
        monkeypatch.setenv(variable, text)
        module.register()
        assert module._plugin.enabled is value
        module.disable()


def python(code, **variables):
    environment = dict(os.environ, **variables)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


@pytest.mark.parametrize("text, enabled", [("false", "False"), ("ON", "True")])
def test_transformers(text, enabled):
    pytest.importorskip("transformers")
    code = "import libkda.transformers as plugin; print(plugin._plugin.enabled)"
    assert python(code, LIBKDA_TRANSFORMERS=text) == [enabled]


@pytest.mark.parametrize("text, enabled", [("off", "False"), ("yes", "True")])
def test_fla(text, enabled):
    pytest.importorskip("fla")
    code = """
import torch, libkda.fla
made = libkda.fla._backend_of({})
print(made.can_use(), libkda.fla._plugin.disabled is None)
"""
    assert python(code, FLA_LIBKDA=text) == [enabled, enabled]
