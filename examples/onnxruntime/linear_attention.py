# SPDX-License-Identifier: Apache-2.0
"""Compiles kda_ort.c against the installed libkda, and runs a model of one LinearAttention with and without it."""
import pathlib
import subprocess
import tempfile

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

import libkda

SOURCE = pathlib.Path(__file__).resolve().parent / "kda_ort.c"
TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}


def compile_library(folder, *flags):
    """libkda_ort.so in `folder`, with a link of the name by which the loader knows the package's libkda_c.so."""
    folder = pathlib.Path(folder)
    kda = pathlib.Path(libkda.__file__).resolve().parent / "lib" / "libkda_c.so"
    (folder / f"libkda_c-{libkda.__version__}.so").symlink_to(kda)
    subprocess.run(["cc", "-std=c11", "-O2", "-shared", "-fPIC", *flags, f"-I{libkda.get_include()}", SOURCE, kda,
                    "-Wl,-rpath,$ORIGIN", "-o", folder / "libkda_ort.so"], check=True)
    return folder / "libkda_ort.so"


def make_model(x, domain="com.microsoft", type="float32", state_type="float32", **attributes):
    """A model of one node for the shapes of `x`, arrays as inputs() makes them; `attributes` are the node's."""
    names = ["query", "key", "value", "past_state", "decay", "beta"]
    tensor = lambda name, type, shape: helper.make_tensor_value_info(name, TYPES[type], shape)
    state = (x["query"].shape[0], attributes["kv_num_heads"],
             x["query"].shape[2] // attributes["q_num_heads"], x["value"].shape[2] // attributes["kv_num_heads"])
    node = helper.make_node("LinearAttention", [name if name in x else "" for name in names],
                            ["output", "present_state"], domain=domain, **attributes)
    graph = helper.make_graph(
        [node], "one_layer",
        [tensor(n, state_type if n == "past_state" else type, x[n].shape) for n in names if n in x],
        [tensor("output", type, x["value"].shape), tensor("present_state", state_type, state)])
    opsets = [helper.make_opsetid("", 27)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def open_session(model, library=None, threads=2):
    """All that a program does to have libkda is the line with register_custom_ops_library."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # errors are exceptions
    if library is not None:
        options.register_custom_ops_library(str(library))
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def inputs(B, T, H, HV, D, head_gates=False, seed=0):
    """Keys of length 1 and gates below 0, as a layer gives them; one gate a head with `head_gates`."""
    rng = np.random.default_rng(seed)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    row = lambda heads: rng.standard_normal((B, T, heads, D), np.float32)
    x = {"query": unit(row(H)), "key": unit(row(H)), "value": row(HV), "decay": -np.abs(row(HV)),
         "beta": rng.random((B, T, HV, 1), np.float32)}
    if head_gates:
        x["decay"] = x["decay"][..., :1]
    x = {name: value.reshape(B, T, value.shape[2] * value.shape[3]) for name, value in x.items()}
    return x | {"past_state": rng.standard_normal((B, HV, D, D), np.float32)}


def main():
    x = inputs(B=1, T=300, H=2, HV=4, D=128)
    model = make_model(x, q_num_heads=2, kv_num_heads=4)
    with tempfile.TemporaryDirectory() as folder:
        libkdas, built_in = (open_session(model, library).run(None, x)
                             for library in (compile_library(folder), None))
    for name, mine, theirs in zip(("output", "present_state"), libkdas, built_in):
        print(f"{name}: {np.linalg.norm(mine - theirs) / np.linalg.norm(theirs):.0e} from ONNX Runtime's own")


if __name__ == "__main__":
    main()
