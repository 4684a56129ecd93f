# SPDX-License-Identifier: Apache-2.0
import datetime
import json
import os
import pathlib
import types

import nan_memory
import pytest

torch = pytest.importorskip("torch")
torch.set_flush_denormal(True)  # else the references crawl where states decay

if nan_memory.is_on():
    nan_memory.watch()

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def pytest_addoption(parser):
    parser.addoption("--device", default=os.environ.get("KDA_TEST_DEVICE", "cpu"), choices=["cpu", "cuda"],
                     help="where test_sweep.py has its tensors (or KDA_TEST_DEVICE)")
    parser.addoption("--sweep-json", default=os.environ.get("KDA_SWEEP_JSON"), metavar="FILE",
                     help="where test_sweep.py writes a summary (or KDA_SWEEP_JSON)")
    parser.addoption("--gpu-only", action="store_true", help="leave out tests that run nothing on a CUDA device")
    parser.addoption("--nan-json", metavar="FILE", help="where a run of nan_memory.py on a GPU writes what it showed")
    parser.addoption("--binaries", metavar="FOLDER", help="the build of the package, with its kernel_hashes.json")


def pytest_configure(config):
    config.addinivalue_line("markers", "needs_cuda: skipped where there is no CUDA device")


def pytest_runtest_setup(item):
    if item.get_closest_marker("needs_cuda") and "cuda" not in DEVICES:
        pytest.skip("needs a CUDA device")


def is_on_a_gpu(item):
    """Whether a test runs something on a CUDA device in this process."""
    if item.path.stem == "test_sweep":
        return item.config.getoption("--device") == "cuda"
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return item.get_closest_marker("needs_cuda") is not None or any(type(x) is str and x == "cuda" for x in parameters)


def pytest_collection_modifyitems(config, items):
    if config.getoption("--gpu-only"):
        left_out = [item for item in items if not is_on_a_gpu(item)]
        items[:] = [item for item in items if is_on_a_gpu(item)]
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture
def on_the_device(device):
    """All that a test makes is on the device."""
    with torch.device(device):
        yield


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """What the plugins of engines leave to an engine on a GPU they leave to it on a CPU too."""
    from libkda._plugins.plugin import Plugin
    leave = Plugin.leave_slower
    monkeypatch.setattr(Plugin, "leave_slower", lambda plugin, kind, step, rows: leave(
        plugin, kind, step, types.SimpleNamespace(is_cuda=True, shape=rows.shape)))


@pytest.fixture
def a_card(tmp_path, monkeypatch):
    """An H200, as nvidia-smi names one. Returns a build for it, and what a result then says of both."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho NVIDIA H200, 580.1, 9.0\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    names = json.loads((pathlib.Path(__file__).resolve().parents[2] / "bench" / "families.json").read_text())
    hashes = {name: {"sm_90": f"hash of {name}"} for name in names}
    (tmp_path / "kernel_hashes.json").write_text(json.dumps({"toolkit": "13.0", "families": hashes}))
    return tmp_path, {"architecture": "sm_90", "device": "NVIDIA H200", "driver": "580.1", "toolkit": "13.0",
                      "date": datetime.date.today().isoformat()}


@pytest.fixture(scope="module")
def one_thread():
    """For tests of tensors that are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(7)


def pytest_terminal_summary(terminalreporter, config):
    if config.getoption("--nan-json") and nan_memory.is_on():
        nan_memory.write_evidence(config.getoption("--nan-json"), config.getoption("--binaries"),
                                  terminalreporter.stats, config.invocation_params.args)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """A process of pytest-xdist has ended."""
    nan_memory.FILLED_BY_WORKERS.append(getattr(node, "workeroutput", {}).get("tensors_filled", 0))


def pytest_sessionfinish(session):
    if nan_memory.is_on() and hasattr(session.config, "workeroutput"):
        session.config.workeroutput["tensors_filled"] = nan_memory.tensors_on_a_gpu()
    path = session.config.getoption("--sweep-json")
    found = getattr(session.config, "sweep", None)
    if path and found:
        device = session.config.getoption("--device")
        command = f"python3 -m pytest python/tests/test_sweep.py --device {device} --sweep-json {path}"
        pathlib.Path(path).write_text(json.dumps(found | {"command": command}, indent=1) + "\n")
