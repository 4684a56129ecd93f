# SPDX-License-Identifier: Apache-2.0
"""Switches in the environment, each of which means the same words."""
import os
import pathlib
import re
import subprocess
import sys
import types
import warnings

import pytest

import libkda
from libkda import sglang, vllm
from libkda._plugins import measured, switches

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


def test_what_the_caller_decides(monkeypatch):
    """A switch that is not set says so, also where it has another word."""
    switches._warned.clear()
    monkeypatch.delenv("LIBKDA_X", raising=False)
    assert switches.switch("LIBKDA_X", None) is None
    monkeypatch.setenv("LIBKDA_X", "sometimes")
    with pytest.warns(UserWarning, match="LIBKDA_X must be .*, got 'sometimes': it is taken as not set"):
        assert switches.switch("LIBKDA_X", None) is None
    for text, value in (("on", True), ("off", False)):
        monkeypatch.setenv("LIBKDA_X", text)
        assert switches.switch("LIBKDA_X", None) is value


@pytest.mark.parametrize("module", [vllm, sglang])
def test_steps_of_engines(monkeypatch, module):
    """Where it is not said, a step on a GPU is taken from a number of tokens and value heads on; on a CPU always."""
    host = module._plugin.host
    variable = f"LIBKDA_{host.upper()}_DECODE"
    monkeypatch.setitem(measured.LEAST, (host, "kda", "decode"), 64)
    monkeypatch.setitem(measured.LEAST, (host, "kda", "verify"), measured.NEVER)
    monkeypatch.delitem(measured.LEAST, (host, "gdn", "decode"), raising=False)

    def taken(kind, step, shape, is_cuda=True):
        try:
            module._plugin.leave_slower(kind, step, types.SimpleNamespace(is_cuda=is_cuda, shape=shape))
        except NotImplementedError as refusal:
            assert variable in str(refusal)
            return False
        return True

    def answers():
        return [taken("kda", "decode", (16, 1, 4, 128)), taken("kda", "decode", (1, 15, 4, 128)),
                taken("kda", "verify", (1, 4096, 32, 128)), taken("gdn", "decode", (1, 1, 1, 128))]

    for text, expected in (("", [True, False, False, True]), ("1", [True] * 4), ("0", [False] * 4)):
        monkeypatch.setenv(variable, text)
        assert answers() == expected
        assert taken("kda", "verify", (1, 4, 4, 128), is_cuda=False)
    switches._warned.clear()
    monkeypatch.setenv(variable, "most")
    with pytest.warns(UserWarning, match=f"{variable} must be 0, .*, got 'most': it is taken as not set"):
        assert answers() == [True, False, False, True]


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
