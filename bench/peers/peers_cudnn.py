#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""libkda beside cuDNN's Hopper kernel on a GPU: the one of the package nvidia-cudnn-frontend (1.32 and later), launched
by its own host function; that is its kernel alone, with g and beta in fp32 and states [V, K] as it takes them. libkda
is called as a whole, with g and beta in bf16. One process, the same values, medians with a cold L2.

`--what backward`: the backward alone. cuDNN's takes normalised q and k, and g and beta in fp32 that have been through gate
and sigmoid; so it has no gradients of these steps, which libkda's has. Initial states and the gradient of the final ones
are none for libkda, zeros for cuDNN.

Needs torch, triton, nvidia-cudnn-frontend, cuda-bindings and the headers of a CUDA toolkit (CUDA_HOME).
"""
import argparse
import gc
import pathlib
import sys
from importlib.metadata import version

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "report"))
import evidence
import torch
import triton

from clock import Clock
from gpu_cases import cases, cu_seqlens, error_cases, libkda_call, make_inputs, recurrence, relative, timed
from libkda_ctypes import Library

GATES = ("strong", "slow", "trained")
L2NORM, BOUNDED_GATE, BETA_SIGMOID = 1, 2, 4  # its flags


def cudnn_call(c, x):
    from cudnn.linear_attention.hopper import cuda_host
    g, beta, h0 = x["g"].float(), x["beta"].float(), x["h0"].mT.contiguous()
    bias, o, state = x["dt_bias"].contiguous(), torch.full_like(x["v"], float("nan")), torch.full_like(h0, float("nan"))
    cu = cu_seqlens(c)
    if cu is None:
        cu = torch.arange(c["B"] + 1, device="cuda") * c["T"]
    cu = cu.int()
    addresses = [t.data_ptr() for t in (x["q"], x["k"], x["v"], g, beta, cu, h0, o, state)]

    def call():
        cuda_host.launch(0, torch.cuda.current_stream().cuda_stream, *addresses, c["B"] * c["T"], cu.numel() - 1, c["HV"],
                         x["A_log"].data_ptr(), bias.data_ptr(), -5.0, L2NORM | BOUNDED_GATE | BETA_SIGMOID,
                         c["K"] ** -0.5, c["H"])
        return o, state.mT
    call.keeps = g, beta, h0, bias, cu  # their addresses are in use
    return call


def measure_errors(library):
    rows = []
    for gates in GATES:
        for c in error_cases():
            if c["dtype"] != torch.bfloat16:
                continue
            x = make_inputs(c, gates)
            expected = recurrence(c, x)
            row = dict(case=c["name"], gates=gates)
            for name, call in (("cudnn", cudnn_call(c, x)), ("libkda", libkda_call(library, c, x, "auto"))):
                row[name] = [relative(found, wanted) for found, wanted in zip(call(), expected)]
            rows.append(row)
            print(row, flush=True)
    return rows


def measure_forward(library, sets, clock):
    rows = []
    for name in sets:
        for c in cases(name):
            for gates in GATES:
                x = make_inputs(c, gates)
                ours, theirs = libkda_call(library, c, x, "auto"), cudnn_call(c, x)
                row = dict(set=name, case=c["name"], gates=gates, implementation=ours.plan["implementation"])
                timed(row, "libkda", ours, clock)
                timed(row, "cudnn", theirs, clock)
                row["difference"] = relative(ours()[0], theirs()[0].double())
                row["speedup"] = row["cudnn"] / row["libkda"]
                rows.append(row)
                print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
                ours.destroy()
                del x, ours, theirs
                gc.collect()
    return rows


def prepared_inputs(x):
    """What cuDNN's backward takes, from raw inputs."""
    normalise = lambda t: torch.nn.functional.normalize(t.float(), dim=-1).to(t.dtype)
    g = -5 * torch.sigmoid(torch.exp(x["A_log"])[:, None] * (x["g"].float() + x["dt_bias"]))
    return dict(q=normalise(x["q"]), k=normalise(x["k"]), v=x["v"], g=g, beta=torch.sigmoid(x["beta"].float()))


def cudnn_backward(c, x, d_o):
    """A callable for the gradients of prepared inputs; None where it has no such kernel."""
    from cudnn.linear_attention.hopper import cuda_bwd_host
    if c["HV"] != c["H"] or c["K"] != 128 or c["V"] != 128:
        return None
    cu = cu_seqlens(c)
    if cu is None:
        cu = torch.arange(c["B"] + 1, device="cuda") * c["T"]
    cu, tokens, N = cu.int(), c["B"] * c["T"], cu.numel() - 1
    memory = torch.empty(cuda_bwd_host.workspace_bytes(tokens, c["H"], N), dtype=torch.uint8, device="cuda")
    states = [torch.zeros(N, c["H"], 128, 128, device="cuda") for _ in range(2)]
    outputs = {f"d{n}": torch.full_like(t, float("nan")) for n, t in x.items()}
    d_states = torch.empty_like(states[0])
    tensors = [d_o, *(x[n] for n in ("q", "k", "v", "g", "beta")), cu, *states, *outputs.values(), d_states]
    addresses = [t.data_ptr() for t in tensors]

    def call(kept_alive=(memory, tensors)):
        stream = torch.cuda.current_stream().cuda_stream
        cuda_bwd_host.launch(0, stream, memory.data_ptr(), *addresses, tokens, c["H"], N)
        return outputs
    return call


def backward_differences(library, c, prepared, d_o, theirs):
    """Both libraries' gradients of the same prepared inputs, relative."""
    ours = library.training(prepared, d_o, seq_lens=c["lengths"])
    found = {n: relative(t, theirs()[n].double()) for n, t in ours.backward()().items()}
    ours.destroy()
    return found


def measure_backward(library, clock, name="backward_alone"):
    rows = []
    for c in cases(name):
        for gates in GATES:
            x = make_inputs(c, gates)
            del x["h0"]
            d_o = torch.randn_like(x["v"])
            ours = library.training(x, d_o, gate="bounded", beta_mode="sigmoid", l2norm=True, seq_lens=c["lengths"])
            row = dict(set=name, case=c["name"], gates=gates)
            timed(row, "libkda", ours.backward(), clock)
            prepared = prepared_inputs(x)
            theirs = cudnn_backward(c, prepared, d_o)
            if theirs:
                timed(row, "cudnn", theirs, clock)
                row["difference"] = backward_differences(library, c, prepared, d_o, theirs)
                row["speedup"] = row["cudnn"] / row["libkda"]
            rows.append(row)
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
            ours.destroy()
            del x, ours, theirs, prepared
            gc.collect()
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--what", choices=("forward", "backward"), default="forward")
    parser.add_argument("--sets", default="cudnn10,flagship", help="of the forward")
    parser.add_argument("--binaries", type=pathlib.Path, default=evidence.ROOT / "build",
                        help="a folder with libkda_c.so and kernel_hashes.json")
    parser.add_argument("--json", type=pathlib.Path, help="gpu_cudnn.json or gpu_cudnn_backward.json in bench/results")
    args = parser.parse_args()
    library = Library(args.binaries / "libkda_c.so")
    backward = args.what == "backward"
    what = "cudnn_backward" if backward else "cudnn"
    report = evidence.header(args.binaries, what, "python3 bench/peers/peers_cudnn.py" + backward * " --what backward")
    report.update(torch=torch.__version__, triton=triton.__version__, cudnn_frontend=version("nvidia-cudnn-frontend"))
    if not backward:
        report["errors"] = measure_errors(library)
    with Clock() as clock:
        report[args.what] = measure_backward(library, clock) if backward else measure_forward(library, args.sets.split(","), clock)
    evidence.write(args.json or evidence.RESULTS / f"gpu_{what}.json", report)


if __name__ == "__main__":
    main()
