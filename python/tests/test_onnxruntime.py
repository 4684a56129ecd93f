# SPDX-License-Identifier: Apache-2.0
"""examples/onnxruntime: LinearAttention of ONNX Runtime on libkda, beside a float64 recurrence and the built-in op."""
import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

from libkda import naive

pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed (.ci/python has it in a folder of its own)")
onnx = pytest.importorskip("onnx")
np = pytest.importorskip("numpy")

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "onnxruntime"))
import linear_attention  # noqa: E402  after its folder is known
from linear_attention import inputs, make_model, open_session  # noqa: E402

MICROSOFT, STANDARD = "com.microsoft", ""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return linear_attention.compile_library(tmp_path_factory.mktemp("kda_ort"), "-Wall", "-Wextra", "-Wconversion",
                                            "-Wshadow", "-Werror")


def reference(x, H, HV, scale=None):
    """The recurrence in float64, token by token."""
    B, T = x["query"].shape[:2]
    rows = lambda name, heads: torch.from_numpy(x[name]).double().reshape(B, T, heads, -1)
    q, k, v, g = rows("query", H), rows("key", H), rows("value", HV), rows("decay", HV)
    beta = rows("beta", x["beta"].shape[2]).expand(B, T, -1, 1)[..., 0].expand(B, T, HV)
    state = torch.from_numpy(x["past_state"]).double() if "past_state" in x else None
    o, state = naive.naive_recurrent_kda(q, k, v, g.expand(B, T, HV, k.shape[3]), beta, scale, state, True)
    return o.reshape(B, T, -1).numpy(), state.numpy()


def distance(a, b):
    assert a.shape == b.shape and not np.isnan(a).any()
    return np.linalg.norm(a - b) / np.linalg.norm(b)


CASES = {  # B, T, H, HV, D
    "prefill": (1, 150, 4, 4, 128), "batch": (2, 70, 2, 2, 64), "grouped heads": (1, 60, 2, 6, 64),
    "decode": (1, 1, 4, 4, 128), "decode of a batch": (5, 1, 2, 4, 128), "decode of many heads": (3, 1, 8, 8, 128),
    "draft": (2, 5, 2, 2, 32), "odd sizes": (3, 33, 3, 3, 24), "one channel": (1, 9, 2, 2, 1),
    "no token": (2, 0, 2, 2, 32)}


@pytest.mark.parametrize("head_gates", [False, True], ids=["KDA", "one gate a head"])
@pytest.mark.parametrize("case", CASES)
def test_values(library, case, head_gates):
    B, T, H, HV, D = CASES[case]
    x = inputs(B, T, H, HV, D, head_gates)
    model = make_model(x, q_num_heads=H, kv_num_heads=HV)
    expected = reference(x, H, HV) if T else (np.empty((B, 0, HV * D)), x["past_state"])
    for found, built_in, right in zip(open_session(model, library).run(None, x), open_session(model).run(None, x),
                                      expected):
        assert not right.size or distance(found, right) < 2e-6 and distance(found, built_in) < 2e-6


@pytest.mark.parametrize("domain", [MICROSOFT, STANDARD])
@pytest.mark.parametrize("scale", [0.0, 0.25])
def test_both_domains_without_a_state(library, domain, scale):
    """The op of com.microsoft, and the one of opset 27, which ONNX Runtime runs as a loop; a beta for all heads."""
    x = inputs(1, 40, 2, 2, 32)
    del x["past_state"]
    x["beta"] = np.ascontiguousarray(x["beta"][..., :1])
    model = make_model(x, domain, q_num_heads=2, kv_num_heads=2, scale=scale)
    expected = reference(x, 2, 2, scale or None)
    for found, built_in, right in zip(open_session(model, library).run(None, x), open_session(model).run(None, x),
                                      expected):
        assert distance(found, right) < 2e-6 and distance(built_in, right) < 2e-6


def test_other_ops_of_the_standard_stay(library):
    """A library that has an op of the standard's domain leaves the others of that domain to ONNX Runtime."""
    x = inputs(1, 40, 2, 2, 32)
    model = make_model(x, STANDARD, q_num_heads=2, kv_num_heads=2)
    model.graph.node.append(onnx.helper.make_node("Relu", ["output"], ["positive"]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("positive", onnx.TensorProto.FLOAT, None))
    output, _, positive = open_session(model, library).run(None, x)
    assert distance(output, reference(x, 2, 2)[0]) < 2e-6 and np.array_equal(positive, np.maximum(output, 0))


def test_decode_goes_on_from_a_prefill(library):
    x = inputs(2, 24, 2, 2, 64)
    heads = dict(q_num_heads=2, kv_num_heads=2)
    part = lambda begin, end: {n: a if n == "past_state" else np.ascontiguousarray(a[:, begin:end])
                               for n, a in x.items()}
    rows, state = open_session(make_model(part(0, 20), **heads), library).run(None, part(0, 20))
    step = open_session(make_model(part(20, 21), **heads), library)
    rows = [rows]
    for t in range(20, 24):
        o, state = step.run(None, part(t, t + 1) | {"past_state": state})
        rows.append(o)
    expected = reference(x, 2, 2)
    assert distance(np.concatenate(rows, 1), expected[0]) < 2e-6 and distance(state, expected[1]) < 2e-6


@pytest.mark.parametrize("type, state_type, limit", [("float16", "float32", 4e-4), ("bfloat16", "float32", 2.5e-3),
                                                     ("bfloat16", "bfloat16", 4e-3)])
def test_types(library, type, state_type, limit):
    """Rows of 16 bits, for which ONNX Runtime's op has no kernel: casts are around the node."""
    x = inputs(1, 40, 2, 2, 64)
    model = make_model(x, type=type, state_type=state_type, q_num_heads=2, kv_num_heads=2)
    node, casts = model.graph.node.pop(), []
    cast = lambda a, b, t: casts.append(onnx.helper.make_node("Cast", [a], [b], to=t))
    for value in model.graph.input:
        cast(value.name, value.name + "_cast", value.type.tensor_type.elem_type)
        cast(value.name + "_cast", value.name + "_read", onnx.TensorProto.FLOAT)
        model.graph.output.append(
            onnx.helper.make_tensor_value_info(value.name + "_read", onnx.TensorProto.FLOAT, None))
    node.input[:] = [name + "_cast" for name in node.input]
    for i, name in enumerate(list(node.output)):
        node.output[i] = name + "_made"
        cast(name + "_made", name, onnx.TensorProto.FLOAT)
    for value in [*model.graph.input, *model.graph.output]:
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    last = [casts.pop(), casts.pop()]
    model.graph.node.extend([*casts, node, *last])
    found = open_session(model, library).run(None, x)
    read = dict(zip((value.name for value in model.graph.input), found[2:]))
    for output, right in zip(found, reference(read, 2, 2)):
        assert distance(output, right) < limit


@pytest.mark.parametrize("attributes, words", [
    (dict(q_num_heads=2, kv_num_heads=2, update_rule="linear"), "update_rule: linear is not gated_delta"),
    (dict(q_num_heads=2, kv_num_heads=2, update_rule="x" * 100), "update_rule: a name of 101 characters is not"),
    (dict(q_num_heads=4, kv_num_heads=2), "q_num_heads: kv_num_heads = 2 is no multiple of 4; query heads cannot"),
    (dict(q_num_heads=2, kv_num_heads=3), "q_num_heads: kv_num_heads = 3 is no multiple of 2"),
    (dict(q_num_heads=0, kv_num_heads=2), "q_num_heads: 0 is not in 1 to"),
    (dict(q_num_heads=2, kv_num_heads=-2), "kv_num_heads: -2 is not in 1 to"),
    (dict(kv_num_heads=2), "q_num_heads: is missing"),
    (dict(q_num_heads=2), "kv_num_heads: is missing"),
    (dict(q_num_heads=2, kv_num_heads=2, state_window=3), "state_window: 3 is not 0")])
def test_refused_when_a_session_is_made(library, attributes, words):
    x = inputs(1, 5, 2, 2, 32)
    model = make_model(x, q_num_heads=2, kv_num_heads=2)
    del model.graph.node[0].attribute[:]
    model.graph.node[0].attribute.extend(onnx.helper.make_attribute(*a) for a in attributes.items())
    with pytest.raises(Exception, match="LinearAttention on libkda: " + words):
        open_session(model, library)


def test_float16_states_are_refused_when_a_session_is_made(library):
    model = make_model(inputs(1, 5, 2, 2, 32), type="float16", state_type="float16", q_num_heads=2, kv_num_heads=2)
    with pytest.raises(Exception, match="past_state: is float16; libkda has states in float32 and bfloat16"):
        open_session(model, library)


@pytest.mark.parametrize("name, shape, words", [
    ("key", (1, 5, 32), r"key: shape \[1, 5, 32\] is not \[1, 5, 64\]"),
    ("query", (1, 5, 63), r"query: shape \[1, 5, 63\] is not \[B, T, a multiple of q_num_heads = 2\]"),
    ("query", (5, 64), r"query: shape \[5, 64\] is not \[B, T,"),
    ("query", (1, 1, 1, 5, 64), "query: has 5 dimensions, more than 4"),
    ("value", (1, 4, 64), r"value: shape \[1, 4, 64\] is not \[1, 5, 64\]"),
    ("value", (1, 5, 0), r"value: shape \[1, 5, 0\] is not \[B, T, a multiple of kv_num_heads = 2\]"),
    ("past_state", (1, 2, 32, 31), r"past_state: shape \[1, 2, 32, 31\] is not \[1, 2, 32, 32\]"),
    ("decay", (1, 5, 3), r"decay: shape \[1, 5, 3\] is not \[1, 5, 64\]"),
    ("beta", (1, 5, 4), r"beta: shape \[1, 5, 4\] is not \[1, 5, 2\]"),
    ("decay", None, "decay: is missing"), ("beta", None, "beta: is missing")])
def test_a_bad_call_is_an_error_with_the_name(library, name, shape, words):
    """The session goes on: a call that fits comes after it."""
    x = inputs(1, 5, 2, 2, 32)
    bad = {n: a for n, a in x.items() if n != name} | ({} if shape is None else {name: np.zeros(shape, np.float32)})
    model = make_model(x if shape else bad, q_num_heads=2, kv_num_heads=2)
    for value in [*model.graph.input, *model.graph.output]:
        value.type.tensor_type.ClearField("shape")
    session = open_session(model, library)
    with pytest.raises(Exception, match="LinearAttention on libkda: " + words):
        session.run(None, bad)
    if shape:
        assert distance(session.run(None, x)[0], reference(x, 2, 2)[0]) < 2e-6


def test_threads_are_those_of_the_session(library):
    """libkda starts none of its own, and the bits do not depend on their number."""
    code = f"""
import os, sys
sys.path.insert(0, {str(ROOT / "examples" / "onnxruntime")!r})
from linear_attention import inputs, make_model, open_session
x = inputs(2, 300, 4, 4, 64)
model = make_model(x, q_num_heads=4, kv_num_heads=4)
outputs = []
for threads in (1, 2, 3):
    session = open_session(model, {str(library)!r}, threads)
    before = len(os.listdir("/proc/self/task"))
    outputs.append(session.run(None, x))
    assert len(os.listdir("/proc/self/task")) == before, threads
    assert all((a == b).all() for a, b in zip(outputs[0], outputs[-1])), threads
"""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr


def test_example():
    run = subprocess.run([sys.executable, ROOT / "examples" / "onnxruntime" / "linear_attention.py"],
                         capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "output: " in run.stdout and "present_state: " in run.stdout


def test_benchmark(tmp_path):
    report = tmp_path / "report.json"
    run = subprocess.run([sys.executable, ROOT / "bench" / "onnxruntime_bench.py", "--seconds", "0", "--only",
                          "decode, 4 heads", "--json", report], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    row, = json.loads(report.read_text())["rows"].values()
    assert row["apart"] < 1e-6 and row["libkda_ms"] > 0 and row["built_in_ms"] > 0
