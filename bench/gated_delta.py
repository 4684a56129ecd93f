#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet on a GPU: libkda beside FLA's chunk_gated_delta_rule on the same inputs, in one process.

    python3 bench/gated_delta.py [--tokens 8192] [--heads 16] [--value-heads 32] [--binaries build] [--without-fla]

Inputs are those of a layer of Qwen3-Next: q, k, v and beta in bf16, g [B, T, HV] in fp32 as logarithms, norms by the
call. Times are medians with a cold L2 (triton.testing.do_bench). "written_out" has g of K channels
in memory, "recurrent" the kernels of every problem, in fp32.
"""
import argparse
import json
import pathlib

import torch

from gpu_cases import microseconds, recurrence_of_log_gates, relative
from libkda_ctypes import Library

ROOT = pathlib.Path(__file__).resolve().parent.parent
K = V = 128


def make_inputs(args):
    """Without a channel dimension in g."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, device="cuda", generator=generator)
    B, T, H, HV = 1, args.tokens, args.heads, args.value_heads
    rate = torch.rand(HV, device="cuda", generator=generator) * 16
    step = torch.nn.functional.softplus(normal(B, T, HV) - 4)
    x = dict(q=normal(B, T, H, K), k=normal(B, T, H, K), v=normal(B, T, HV, V), beta=torch.sigmoid(normal(B, T, HV)))
    return dict({n: t.bfloat16() for n, t in x.items()}, g=-rate * step)


def for_all_channels(g, written_out=False):
    wide = g[..., None].expand(*g.shape, K)
    return wide.contiguous() if written_out else wide


def forward_call(library, x, written_out=False, backend=None):
    o = torch.empty_like(x["v"])
    state = torch.empty(1, x["v"].shape[2], K, V, device="cuda")
    call = library.forward(x["q"], x["k"], x["v"], for_all_channels(x["g"], written_out), x["beta"], o,
                           backend=backend, l2norm=True, final_state=state)
    return call, o, state


def training_call(library, x, d_o, written_out=False, backend=None):
    return library.training(dict(x, g=for_all_channels(x["g"], written_out)), d_o, backend, l2norm=True)


def fla_calls(x, d_o):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    names = ("q", "k", "v", "g", "beta")
    leaves = [x[n].detach().clone().requires_grad_() for n in names]

    def forward():
        with torch.no_grad():
            return chunk_gated_delta_rule(*(x[n] for n in names), use_qk_l2norm_in_kernel=True,
                                          output_final_state=True)

    def training():
        o, _ = chunk_gated_delta_rule(*leaves, use_qk_l2norm_in_kernel=True)
        return dict(zip((f"d{n}" for n in names), torch.autograd.grad(o, leaves, d_o)), o=o.detach())
    return forward, training


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--value-heads", type=int, default=32)
    parser.add_argument("--binaries", type=pathlib.Path, default=ROOT / "build", help="a folder with libkda_c.so")
    parser.add_argument("--without-fla", action="store_true")
    args = parser.parse_args()
    library = Library(args.binaries / "libkda_c.so")
    x = make_inputs(args)
    d_o = torch.randn_like(x["v"])
    row = dict(gpu=torch.cuda.get_device_name(), tokens=args.tokens, heads=args.heads, value_heads=args.value_heads)
    one, o, state = forward_call(library, x)
    each = forward_call(library, x, written_out=True)[0]
    by_tokens = forward_call(library, x, backend="recurrent")[0]
    training, each_training = (training_call(library, x, d_o, written_out) for written_out in (False, True))
    training_by_tokens = training_call(library, x, d_o, backend="recurrent")
    row.update(implementation=one.plan["implementation"], forward=microseconds(one), written_out=microseconds(each),
               recurrent=microseconds(by_tokens), training=microseconds(training),
               training_written_out=microseconds(each_training), training_recurrent=microseconds(training_by_tokens))
    if not args.without_fla:
        fla_forward, fla_training = fla_calls(x, d_o)
        row.update(fla_forward=microseconds(fla_forward), fla_training=microseconds(fla_training))
        theirs, found, expected = fla_forward(), training(), fla_training()
        found["dg"] = found["dg"][..., 0]
        row["difference_from_fla"] = dict({n: relative(found[n], t.double()) for n, t in expected.items()},
                                          final_state=relative(state, theirs[1].double()))
    one()
    row["error"] = relative(o, recurrence_of_log_gates(x))
    print(json.dumps(row, indent=2))


if __name__ == "__main__":
    main()
