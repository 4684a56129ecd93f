# SPDX-License-Identifier: Apache-2.0
"""What plugins for engines are made of, without an engine."""
import importlib.metadata
import importlib.util
import sys

import pytest
import torch

import libkda.sglang
import libkda.vllm
from libkda._plugins.places import Places
from libkda._plugins.plugin import Plugin
from libkda.vllm import PoolRows


@pytest.fixture
def pool():
    return torch.randn(6, 2, 4, 4)


def promise(pool, updated=False):
    slots = torch.tensor([3, 0, 5], dtype=torch.int32)
    return slots, PoolRows.of(pool, slots, torch.tensor([True, True, False]), updated)


def test_promised_states(pool):
    """They cost nothing until somebody looks at them, and then have what is in the pool, zero for a new request."""
    slots, rows = promise(pool)
    assert rows.shape == (3, 2, 4, 4) and rows.dtype is pool.dtype and rows.device == pool.device and len(rows) == 3
    assert rows.to(torch.float32) is rows and rows.gathered is None
    dense = torch.stack([pool[3], pool[0], torch.zeros(2, 4, 4)])
    assert torch.equal(rows.contiguous(), dense) and type(rows.contiguous()) is torch.Tensor
    assert torch.equal(rows.to(torch.bfloat16), dense.bfloat16())
    assert torch.equal(torch.cat([rows, rows]), dense.repeat(2, 1, 1, 1))
    assert torch.equal(torch.add(input=rows, other=1), dense + 1)


def test_promised_states_that_are_in_the_pool(pool):
    """Putting them where they are is nothing; anywhere else it is a copy."""
    slots, rows = promise(pool, updated=True)
    before = pool.clone()
    pool[slots] = rows.to(torch.float32)
    assert torch.equal(pool, before) and rows.gathered is None
    other = torch.zeros_like(pool)
    other[slots] = rows
    assert torch.equal(other[[3, 0, 5]], pool[[3, 0, 5]])


def test_states_before_a_call_are_not_taken_for_those_behind_it(pool):
    slots, rows = promise(pool)
    pool[slots] = rows
    assert not pool[5].any()


def test_states_on_other_devices(pool, monkeypatch):
    for state, hip in ((pool.to("meta"), None), (pool, "6.0")):
        monkeypatch.setattr(torch.version, "hip", hip)
        with pytest.raises(NotImplementedError, match="states on meta|states on ROCm"):
            libkda.vllm.gather_initial_states(state, None, None)


def test_counts_that_no_draft_has():
    """The convolution skips such a sequence, as KDA does: its outputs are 0 and its page is left alone."""
    x, pages, weight = torch.randn(6, 8), torch.randn(4, 8, 5), torch.randn(8, 4)  # up to 3 tokens a step
    before = pages.clone()
    y = libkda.vllm.causal_conv1d_update(
        x, pages, weight, conv_state_indices=torch.tensor([1, 2, 3]), num_accepted_tokens=torch.tensor([0, 4, 3]),
        query_start_loc=torch.tensor([0, 2, 4, 6]), out=torch.empty_like(x))
    assert not y[:4].any() and y[4:].all() and torch.equal(pages[1:3], before[1:3])
    assert torch.equal(pages[3, :, 2:4], x[4:].T) and torch.equal(pages[3, :, :2], before[3, :, 3:5])


ENGINES = [(libkda.vllm, "LIBKDA_VLLM", "vllm.general_plugins"),
           (libkda.sglang, "LIBKDA_SGLANG", "sglang.srt.plugins")]


@pytest.mark.parametrize("module, variable", [engine[:2] for engine in ENGINES])
def test_register_asks_the_environment(monkeypatch, module, variable):
    for value in (None, "0"):
        monkeypatch.delenv(variable, raising=False)
        if value is not None:
            monkeypatch.setenv(variable, value)
        module.register()
        assert not module._plugin.enabled and module._places not in sys.meta_path
    monkeypatch.setenv(variable, "1")
    module.register()
    module.register()  # an engine may do so twice
    assert sys.meta_path.count(module._places) == 1 and module.last_path() is None
    module.disable()
    assert module._places not in sys.meta_path


@pytest.mark.parametrize("T, HV", [(5, 1), (1, 1), (5, 3), (3, 3)])
def test_gates_in_sglangs_shapes(T, HV):
    """With one head a row of gates is as wide as a head."""
    gates, states = torch.randn(1, T, HV, 16), torch.zeros(2, HV, 16, 16)
    for a in (gates, gates[0], gates.flatten(-2), gates[0].flatten(-2), gates.transpose(0, 1),
              gates.transpose(0, 1).flatten(-2)):
        assert torch.equal(libkda.sglang._channel_gates(a, states), gates)


@pytest.mark.parametrize("module, group", [engine[::2] for engine in ENGINES])
def test_entry_points(module, group):
    found = [point for point in importlib.metadata.entry_points(group=group) if point.name == "libkda"]
    if not found:
        pytest.skip("this libkda was not installed from a wheel")
    assert found[0].load() == module.register


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A plugin of a module kda_engine, which is not loaded yet, with one function, a class, and what it lacks."""
    (tmp_path / "kda_engine.py").write_text(
        "def kernel(x):\n    return f'own {x}'\nclass Layer:\n    def step(self, x):\n        return f'step {x}'\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def kernel(x):
        if x == 0:
            raise ValueError("x must not be 0\nand more")
        if x == 1:
            raise RuntimeError("this build has no CUDA")
        if x == 2:
            raise RuntimeError("broken")
        return f"ours {x}"

    def step(self, x):
        return f"our step {x}"

    plugin = Plugin("kda_engine")
    plugin.enabled = False
    places = Places(plugin, {"kda_engine": {"kernel": ("kda", kernel), "Layer.step": ("step", step),
                                            "missing": ("kda", kernel), "Missing.step": ("step", step)}},
                    as_host=lambda x: -x if isinstance(x, int) else x)
    yield places
    places.disable()
    sys.modules.pop("kda_engine", None)


@pytest.mark.parametrize("late", [False, True])
def test_places(places, late):
    if not late:
        importlib.import_module("kda_engine")
    places.enable()
    places.enable()
    module = importlib.import_module("kda_engine")
    assert sorted(places.names()) == ["kda_engine.Layer.step", "kda_engine.kernel"]
    assert module.kernel(3) == "ours 3" and module.Layer().step(4) == "our step 4"
    assert places.plugin.last_path("kda") == "libkda: kernel" and places.plugin.last_path("step") == "libkda: step"
    assert module.kernel(x=0) == "own 0" and module.kernel(0) == "own 0"
    assert places.plugin.last_path("kda") == "kda_engine: kernel: x must not be 0"
    assert module.kernel(1) == "own -1"
    assert places.plugin.last_path("kda") == "kda_engine: kernel: this build has no CUDA"
    with pytest.raises(RuntimeError, match="broken"):
        module.kernel(2)
    ours = module.kernel
    places.disable()
    assert module.kernel(3) == "own 3" and module.Layer().step(4) == "step 4"
    assert ours(3) == "own -3"  # somebody who has kept it
    assert places.plugin.last_path("kda") == "kda_engine: kernel: libkda.kda_engine.disable() was called"


@pytest.mark.parametrize("function", [libkda.chunk_kda, libkda.fused_recurrent_kda])
def test_the_note_of_a_compiled_call(function):
    plugin, x = Plugin("host"), torch.rand(1, 3, 1, 16)
    served = lambda x: plugin.attempt("own", "kda", function, x, x, x, -x, x[..., 0])[0]
    compiled = torch.compile(served, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert compiled(x).shape == x.shape
    assert plugin.last_path("kda") == f"libkda: {function.__name__}"


def test_somebody_else_in_front(places):
    module = importlib.import_module("kda_engine")
    places.enable()
    theirs = module.kernel = lambda x: "theirs"
    places.disable()
    assert module.kernel is theirs


def test_a_module_that_is_not_there(places):
    places.sites["kda_engine_that_is_missing"] = {}
    places.enable()
    assert importlib.util.find_spec("kda_engine_that_is_missing") is None
