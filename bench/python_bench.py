#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""libkda's Python functions beside FLA's, in one process, as a user sees them: host time of a call, and decode steps.

    python3 bench/python_bench.py --binaries build --json bench/results/gpu_python.json

Needs a GPU, the installed libkda package and fla-core. FLA runs its own kernels (libkda.fla is not imported).
"""
import argparse
import collections
import functools
import itertools
import pathlib
import statistics
import sys
import time

from report import evidence

sys.path.append(str(pathlib.Path(__file__).resolve().parent / "peers"))
import fla_configs  # before fla: it reads its cache mode when it is imported
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
D = 128
LAYERS_BYTES = 256 << 20  # of states, together
PASSES, ROUNDS = 5, 3  # through all rows; of a row's calls in each


def inputs(B, T, H):
    normal = lambda *shape: torch.randn(*shape, device="cuda")
    x = {n: normal(B, T, H, D).bfloat16() for n in "qkvg"}
    x["beta"] = normal(B, T, H).bfloat16()
    x.update(A_log=torch.zeros(H, device="cuda"), dt_bias=torch.zeros(H * D, device="cuda"),
             initial_state=normal(B, H, D, D), output_final_state=True, use_qk_l2norm_in_kernel=True,
             use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, lower_bound=-5.0)
    return x


def microseconds(call, count, wait):
    """Of a call until it returns, or with `wait` until the device is done; never a full queue."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    if wait:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / count * 1e6


def host_us(call):
    return microseconds(call, 40, wait=False)


def step_us(call):
    return microseconds(call, 100, wait=True)


def host_cases(libkda, fla):
    """Rows of the table, and what makes the calls of each."""
    for T in (1, 64, 256, 1024):
        for H in (4, 12, 16):
            name = "fused_recurrent_kda" if T == 1 else "chunk_kda"
            yield dict(function=name, tokens=T, heads=H), functools.partial(host_calls, libkda, fla, T, H, name)


def host_calls(libkda, fla, T, H, name):
    x = inputs(1, T, H)
    fla_configs.use(H)
    if T > 1:
        x["safe_gate"] = True  # FLA's faster kernels
    return dict(libkda=functools.partial(getattr(libkda, name), **x), fla=functools.partial(getattr(fla, name), **x))


def layers_of(state_bytes):
    """As many layers as a model has, or as it takes to leave the L2 cache several times over."""
    return min(32, -(-LAYERS_BYTES // state_bytes))


def in_turn(call, layers):
    """A step goes from layer to layer: call(layer) for one after the other, again and again."""
    turn = itertools.cycle(layers)
    return lambda: call(next(turn))


def decode_cases(libkda, fla):
    for B, H in ((1, 4), (1, 32), (4, 32), (16, 32), (64, 32), (128, 32), (256, 32)):
        state_bytes = B * H * D * D * 4
        yield (dict(batch=B, heads=H, layers=layers_of(state_bytes), bytes=2 * state_bytes),
               functools.partial(decode_calls, libkda, fla, B, H))


def as_packed(pool, B):
    """As a server calls it: one row of packed sequences, slots by index, lengths on the device."""
    steps = torch.arange(B + 1, device="cuda", dtype=torch.int32)
    rows = {n: pool[n].flatten(0, 1)[None] for n in ("q", "k", "v", "g", "beta")}
    return dict(pool, **rows, cu_seqlens=steps, ssm_state_indices=steps[:-1])


def decode_calls(libkda, fla, B, H):
    x = inputs(B, 1, H)
    states = x["initial_state"]
    layers = [dict(x, initial_state=torch.randn_like(states)) for _ in range(layers_of(states.numel() * 4))]
    copies = [torch.empty_like(states) for _ in layers]
    pools = [dict(layer, inplace_final_state=True) for layer in layers]
    for pool in pools:
        pool.pop("output_final_state")
    packed = [as_packed(pool, B) for pool in pools]
    return dict(copy=in_turn(lambda of: of[0].copy_(of[1]["initial_state"]), list(zip(copies, layers))),
                libkda=in_turn(lambda layer: libkda.fused_recurrent_kda(**layer), layers),
                libkda_in_place=in_turn(lambda pool: libkda.fused_recurrent_kda_fwd(**pool), pools),
                libkda_packed=in_turn(lambda pool: libkda.fused_recurrent_kda_fwd(**pool), packed),
                fla=in_turn(lambda layer: fla.fused_recurrent_kda(**layer), layers))


def measure(cases, time_of):
    """Medians of times that are PASSES apart: a host has slow seconds, which no row then has alone."""
    rows, samples = [row for row, _ in cases], [collections.defaultdict(list) for _ in cases]
    for _ in range(PASSES):
        for (_, make_calls), of in zip(cases, samples):
            calls = make_calls()
            for _ in range(ROUNDS):
                for who, call in calls.items():
                    of[who].append(time_of(call))
    for row, of in zip(rows, samples):
        row.update({who: statistics.median(times) for who, times in of.items()})
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
    report = evidence.header(args.binaries, "python",
                             "python3 bench/python_bench.py")
    report.update(torch=torch.__version__, fla=fla.__version__, libkda=libkda.__version__)
    with torch.inference_mode():
        report["host"] = measure(list(host_cases(libkda, fla_kda)), host_us)
        report["decode"] = measure(list(decode_cases(libkda, fla_kda)), step_us)
    if args.json:
        evidence.write(args.json, report)


if __name__ == "__main__":
    main()
