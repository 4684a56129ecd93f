#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet on a GPU: libkda beside FLA's chunk_gated_delta_rule and fused_recurrent_gated_delta_rule on the same
inputs, in one process. The result is gpu_gated_delta.json.

    python3 bench/peers/gated_delta.py [--heads 16] [--value-heads 32] [--binaries build] [--results bench/results]

Inputs are those of a layer of Qwen3-Next: q, k, v and beta in bf16, g [B, T, HV] in fp32 as logarithms, norms by the
call. A forward returns its final state too. Times of whole sequences are medians with a cold L2
(triton.testing.do_bench); a decode step is one of many in a CUDA graph, each with states of its own. FLA searches the
configs of its kernels itself; workers compile them ahead. "written_out" has g of K channels in memory. On Hopper FLA's
backward refuses some versions of Triton: its time is missing then, and the reason is in the result.
"""
import argparse
import functools
import os
import pathlib
import subprocess
import sys

os.environ.setdefault("FLA_FLASH_KDA", "0")  # FLA's own kernels

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "report"))
import evidence
import fla_configs  # before fla
import torch

os.environ["FLA_CACHE_MODE"] = "disabled"  # configs that KDA's kernels have are not for these

from gpu_cases import (COLD_BYTES, MOST_CALLS, copy, graph_of, medians, microseconds, recurrence_of_log_gates,
                       relative)
from libkda_ctypes import Library

ROOT = pathlib.Path(__file__).resolve().parents[2]
K = V = 128
TOKENS = (2048, 8192, 32768)
CHECKED = 8192  # tokens of the case that is compared with the recurrence in float64
BATCHES = (1, 4, 16, 64, 256)
NAMES = ("q", "k", "v", "g", "beta")


def make_inputs(args, B, T):
    """Without a channel dimension in g."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, device="cuda", generator=generator)
    H, HV = args.heads, args.value_heads
    rate = torch.rand(HV, device="cuda", generator=generator) * 16
    step = torch.nn.functional.softplus(normal(B, T, HV) - 4)
    x = dict(q=normal(B, T, H, K), k=normal(B, T, H, K), v=normal(B, T, HV, V), beta=torch.sigmoid(normal(B, T, HV)))
    return dict({n: t.bfloat16() for n, t in x.items()}, g=-rate * step)


def for_all_channels(g, written_out=False):
    wide = g[..., None].expand(*g.shape, K)
    return wide.contiguous() if written_out else wide


# ---- whole sequences -------------------------------------------------------------------------------------------------

def forward_call(library, x, written_out=False):
    o = torch.empty_like(x["v"])
    state = torch.empty(1, x["v"].shape[2], K, V, device="cuda")
    call = library.forward(x["q"], x["k"], x["v"], for_all_channels(x["g"], written_out), x["beta"], o,
                           l2norm=True, final_state=state)
    return call, o, state


def training_call(library, x, d_o, written_out=False):
    return library.training(dict(x, g=for_all_channels(x["g"], written_out)), d_o, l2norm=True)


def fla_calls(x, d_o):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    leaves = [x[n].detach().clone().requires_grad_() for n in NAMES]

    def forward():
        with torch.no_grad():
            return chunk_gated_delta_rule(*(x[n] for n in NAMES), use_qk_l2norm_in_kernel=True,
                                          output_final_state=True)

    def training():
        o, _ = chunk_gated_delta_rule(*leaves, use_qk_l2norm_in_kernel=True)
        return dict(zip((f"d{n}" for n in NAMES), torch.autograd.grad(o, leaves, d_o)), o=o.detach())
    return forward, training


def differences(found, expected):
    """Of libkda's outputs and gradients from FLA's."""
    found = dict(found, dg=found["dg"][..., 0])
    return {n: relative(found[n], t.double()) for n, t in expected.items()}


def refusal_of(call):
    """What FLA says where it has no backward; None if it has one."""
    try:
        call()
    except RuntimeError as error:
        if "Triton" not in str(error):
            raise
        return str(error)
    return None


def sequence_row(library, args, T):
    x = make_inputs(args, 1, T)
    d_o = torch.randn_like(x["v"])
    one, o, state = forward_call(library, x)
    each, _, _ = forward_call(library, x, written_out=True)
    training, each_training = (training_call(library, x, d_o, written_out) for written_out in (False, True))
    fla_forward, fla_training = fla_calls(x, d_o)
    (fla_o, fla_state), refusal = fla_forward(), refusal_of(fla_training)
    one()
    difference = {} if refusal else differences(training(), fla_training())
    difference.update(o=relative(o, fla_o.double()), final_state=relative(state, fla_state.double()))
    row = dict(tokens=T, implementation=one.plan["implementation"], difference=difference)
    if T == CHECKED:
        exact = recurrence_of_log_gates(x)
        row["error"] = dict(libkda=relative(o, exact), fla=relative(fla_o, exact))
    calls = dict(forward=dict(libkda=one, written_out=each, fla=fla_forward),
                 training=dict(libkda=training, written_out=each_training, fla=fla_training))
    if refusal:
        del calls["training"]["fla"]
        row["refusal"] = refusal
    for name, of in calls.items():
        row[name] = {who: microseconds(call) for who, call in of.items()}
    print(row, flush=True)
    return row


# ---- a decode step ---------------------------------------------------------------------------------------------------

def decode_inputs(args, N):
    x = make_inputs(args, N, 1)
    return dict(x, state=torch.randn(N, args.value_heads, K, V, device="cuda") * 0.1)


def decode_call(library, x):
    o, after = torch.empty_like(x["v"]), torch.empty_like(x["state"])
    call = library.forward(x["q"], x["k"], x["v"], for_all_channels(x["g"]), x["beta"], o, decode=True, l2norm=True,
                           initial_state=x["state"], final_state=after)

    def run():
        call()
        return o, after
    return run


def fla_decode_call(x):
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    def run():
        with torch.no_grad():
            return fused_recurrent_gated_delta_rule(**{n: x[n] for n in NAMES}, initial_state=x["state"],
                                                    output_final_state=True, use_qk_l2norm_in_kernel=True)
    return run


def decode_row(library, args, N):
    bytes_ = 2 * N * args.value_heads * K * V * 4  # states: rows of a token are a hundredth
    count = min(-(-int(COLD_BYTES) // bytes_), MOST_CALLS)
    layers = [decode_inputs(args, N) for _ in range(count)]
    makers = dict(libkda=lambda x: decode_call(library, x), fla=fla_decode_call)
    o, state = decode_call(library, layers[0])()
    fla_o, fla_state = fla_decode_call(layers[0])()
    row = dict(batch=N, bytes=bytes_, difference=dict(o=relative(o, fla_o.double()),
                                                      final_state=relative(state, fla_state.double())))
    rounds = -(-8 // count)  # a graph is long beside its launch
    launches = {name: graph_of([make(x) for x in layers] * rounds) for name, make in makers.items()}
    copies = [torch.empty(2, bytes_ // 2, device="cuda", dtype=torch.uint8) for _ in range(count)]
    launches["copy"] = graph_of([functools.partial(copy, *pair) for pair in copies] * rounds)
    row.update(medians(launches, count * rounds))
    print(row, flush=True)
    return row


# ---- compiling ahead -------------------------------------------------------------------------------------------------

def compile_part(args):
    """A worker's share of the configs of FLA's kernels, for Triton's cache on disk."""
    part, parts = map(int, args.part.split("/"))
    import fla.ops.gated_delta_rule  # noqa: F401
    fla_configs.take_part(part, parts)
    x = make_inputs(args, 1, min(TOKENS))
    forward, training = fla_calls(x, torch.randn_like(x["v"]))
    forward()
    refusal_of(training)
    torch.cuda.synchronize()


def compile_ahead(count=max(1, min(15, os.cpu_count() - 1))):
    command = [sys.executable, __file__, *sys.argv[1:]]
    workers = [subprocess.Popen([*command, "--part", f"{i}/{count}"], stderr=subprocess.DEVNULL) for i in range(count)]
    for worker in workers:
        worker.wait()  # one whose configs all want too much shared memory stops there


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--value-heads", type=int, default=32)
    parser.add_argument("--binaries", type=pathlib.Path, default=ROOT / "build",
                        help="a folder with libkda_c.so and kernel_hashes.json")
    parser.add_argument("--results", type=pathlib.Path, default=evidence.RESULTS)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        return compile_part(args)
    compile_ahead()
    import fla
    import triton
    library = Library(args.binaries / "libkda_c.so")
    report = evidence.header(args.binaries, "gpu_gated_delta", "python3 bench/peers/gated_delta.py")
    report.update(torch=torch.__version__, triton=triton.__version__, fla=fla.__version__, heads=args.heads,
                  value_heads=args.value_heads)
    report["cases"] = [sequence_row(library, args, T) for T in TOKENS]
    report["decode"] = [decode_row(library, args, N) for N in BATCHES]
    evidence.write(args.results / "gpu_gated_delta.json", report)


if __name__ == "__main__":
    main()
