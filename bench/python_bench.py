#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""libkda's Python functions beside FLA's, in one process, as a user sees them: host time of a call, and decode steps.

    python3 bench/python_bench.py --binaries build --json bench/results/gpu_python.json

Needs a GPU, the installed libkda package and fla-core. FLA runs its own kernels (libkda.fla is not imported).
"""
import argparse
import itertools
import pathlib
import time

import evidence
import fla_configs  # before fla: it reads its cache mode when it is imported
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
D = 128
LAYERS_BYTES = 256 << 20  # of states, together


def inputs(B, T, H):
    normal = lambda *shape: torch.randn(*shape, device="cuda")
    x = {n: normal(B, T, H, D).bfloat16() for n in "qkvg"}
    x["beta"] = normal(B, T, H).bfloat16()
    x.update(A_log=torch.zeros(H, device="cuda"), dt_bias=torch.zeros(H * D, device="cuda"),
             initial_state=normal(B, H, D, D), output_final_state=True, use_qk_l2norm_in_kernel=True,
             use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, lower_bound=-5.0)
    return x


def median_us(call, count, wait, rounds=7):
    """Median time of a call until it returns, or with `wait` until the device is done; never a full queue."""
    for _ in range(3):
        call()
    samples = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        if wait:
            torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) / count * 1e6)
    return sorted(samples)[rounds // 2]


def host_us(call):
    return median_us(call, 40, wait=False)


def step_us(call):
    return median_us(call, 100, wait=True)


def measure_host(libkda, fla):
    rows = []
    for T in (1, 64, 256, 1024):
        for H in (4, 12, 16):
            x = inputs(1, T, H)
            fla_configs.use(H)
            name = "fused_recurrent_kda" if T == 1 else "chunk_kda"
            if T > 1:
                x["safe_gate"] = True  # FLA's faster kernels
            row = dict(function=name, tokens=T, heads=H,
                       **{who: host_us(lambda f=getattr(module, name): f(**x))
                          for who, module in (("libkda", libkda), ("fla", fla))})
            rows.append(row)
            print(row, flush=True)
    return rows


def layers_of(state_bytes):
    """As many layers as a model has, or as it takes to leave the L2 cache several times over."""
    return min(32, -(-LAYERS_BYTES // state_bytes))


def in_turn(call, layers):
    """A step goes from layer to layer: call(layer) for one after the other, again and again."""
    turn = itertools.cycle(layers)
    return lambda: call(next(turn))


def measure_decode(libkda, fla):
    rows = []
    for B, H in ((1, 4), (1, 32), (4, 32), (16, 32), (64, 32), (128, 32), (256, 32)):
        x = inputs(B, 1, H)
        states = x["initial_state"]
        layers = [dict(x, initial_state=torch.randn_like(states)) for _ in range(layers_of(states.numel() * 4))]
        copies = [torch.empty_like(states) for _ in layers]
        pools = [dict(layer, inplace_final_state=True) for layer in layers]
        for pool in pools:
            pool.pop("output_final_state")
        row = dict(batch=B, heads=H, layers=len(layers), bytes=2 * states.numel() * 4,
                   copy=step_us(in_turn(lambda of: of[0].copy_(of[1]["initial_state"]), list(zip(copies, layers)))),
                   libkda=step_us(in_turn(lambda layer: libkda.fused_recurrent_kda(**layer), layers)),
                   libkda_in_place=step_us(in_turn(lambda pool: libkda.fused_recurrent_kda_fwd(**pool), pools)),
                   fla=step_us(in_turn(lambda layer: fla.fused_recurrent_kda(**layer), layers)))
        rows.append(row)
        print(row, flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--binaries", type=pathlib.Path, default=ROOT / "build",
                        help="a folder with kernel_hashes.json of the build that the package has")
    parser.add_argument("--json")
    args = parser.parse_args()
    import fla
    import fla.ops.kda as fla_kda
    import libkda
    report = evidence.header(args.binaries, ["fused", "staged", "recurrent", "decode"], "python",
                             "python3 bench/python_bench.py")
    report.update(torch=torch.__version__, fla=fla.__version__, libkda=libkda.__version__)
    with torch.inference_mode():
        report["host"] = measure_host(libkda, fla_kda)
        report["decode"] = measure_decode(libkda, fla_kda)
    if args.json:
        evidence.write(args.json, report)


if __name__ == "__main__":
    main()
