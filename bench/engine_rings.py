#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A token with a ring: SGLang's Triton kernel of --enable-linear-replayssm beside libkda's in the same tensors, and
beside a token without a ring, on a GPU.

    python3 python/tests/engine_sources.py build-engines
    KDA_ENGINES=build-engines python3 bench/engine_rings.py

A line a case, in microseconds: SGLang's kernel as shipped, by the fastest of its tiles, libkda's, libkda.decode. Pools
leave the L2; the rings of a batch have 0 to 15 rows, so that a sixteenth folds in a step. Medians of CUDA graphs that
take turns. --check prints errors against float64 instead, of 24 steps by each and by both in turns.
"""
import argparse
import importlib
import itertools
import json
import pathlib
import statistics
import sys

import torch

import libkda

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "python" / "tests"))
H, D, L = 32, 128, 16
MODULE = "sglang.kernels.ops.attention.linear.fused_recurrent_linear_replayssm"
TILES = [dict(block_v=V, num_warps=warps, nk=parts) for V, warps, parts in
         itertools.product((16, 32), (1, 2), (1, 2, 4))] + [dict(block_v=64, num_warps=4, nk=2)]


class Case:
    """Pools with rings, and a token of N sequences in each."""

    def __init__(self, engine, N, dtype, pools):
        normal = lambda *shape, dtype=torch.bfloat16: torch.randn(*shape, dtype=dtype)  # noqa: E731
        self.engine, self.N = engine, N
        self.pool = torch.randn(pools * N, H, D, D).mul_(0.05).to(dtype)
        rows = lambda dtype: torch.zeros(pools * N, H, L, D, dtype=dtype)  # noqa: E731
        self.ring = libkda.Ring(rows(dtype), rows(torch.float32), rows(dtype))
        self.mixed, self.a, self.b = normal(N, 3 * H * D), normal(N, H, D), normal(N, H)
        self.out = torch.empty(N, 1, H, D, dtype=torch.bfloat16)
        self.A_log, self.dt_bias = torch.rand(H).log(), torch.randn(H, D) * 0.1 - 3
        self.slots = torch.arange(pools * N, dtype=torch.int32).view(pools, N)
        self.counts = torch.stack([torch.arange(N, dtype=torch.int32)[torch.randperm(N)] % L for _ in range(pools)])
        q, k, v = self.mixed.view(N, 1, 3, H, D).unbind(2)
        self.token = dict(q=q, k=k, v=v, g=self.a[:, None], beta=self.b[:, None], pool=self.pool, out=self.out,
                          A_log=self.A_log, dt_bias=self.dt_bias.flatten(), use_gate_in_kernel=True,
                          use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True, state_v_first=True)

    def sglang(self, i, **tile):
        self.engine(self.mixed, self.a, self.b, self.A_log, self.dt_bias, D ** -0.5, self.pool, self.ring.v_new,
                    self.ring.k, self.ring.g, self.out, self.slots[i], self.counts[i], use_qk_l2norm_in_kernel=True,
                    is_kda=True, **tile)

    def libkda(self, i):
        libkda.decode_with_ring(**self.token, slots=self.slots[i], ring=self.ring, counts=self.counts[i])

    def plain(self, i):
        libkda.decode(**self.token, slots=self.slots[i])


def graph_of(step, pools, steps):
    for i in range(pools):
        step(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(steps):
            step(i % pools)
    return graph


def microseconds(graphs, steps, rounds):
    found = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            found[name].append(begin.elapsed_time(end) * 1e3 / steps)
    return {name: statistics.median(times) for name, times in found.items()}


def measure(engine, N, dtype, tiles, rounds):
    size = N * H * D * D * dtype.itemsize
    pools = min(max(2, (256 << 20) // size + 1), 48)
    case, steps = Case(engine, N, dtype, pools), max(pools, 8)
    graphs = {name: graph_of(getattr(case, name), pools, steps) for name in ("sglang", "libkda", "plain")}
    row = dict(sequences=N, dtype=str(dtype).removeprefix("torch."), **microseconds(graphs, steps, rounds))
    if tiles:
        times = {json.dumps(tile): microseconds({0: graph_of(lambda i: case.sglang(i, **tile), pools, steps)},  # noqa: B023
                                                steps, 5)[0] for tile in TILES}
        row["best_tile"] = min(times, key=times.get)
        row["sglang_best"] = times[row["best_tile"]]
    return row


def float64_step(case, pool, ring, counts):
    """Of pool 0, in SGLang's meaning of rows; returns o."""
    q, k, v = (x.double() for x in case.mixed.view(case.N, 3, H, D).unbind(1))
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    g = -case.A_log.double().exp()[:, None] * torch.nn.functional.softplus(case.a.double() + case.dt_bias.double())
    o = torch.empty_like(v)
    for n, count in enumerate(counts.tolist()):
        S = pool[n].clone()
        for i in range(count):
            S = S * ring.g[n, :, i].exp()[:, None] + ring.v_new[n, :, i, :, None] * ring.k[n, :, i, None]
        S = S * g[n].exp()[:, None]
        v_new = case.b[n].double().sigmoid()[:, None] * (v[n] - (S * k[n][:, None]).sum(-1))
        S = S + v_new[..., None] * k[n][:, None]
        o[n] = (S * q[n][:, None]).sum(-1) * D ** -0.5
        if count == L - 1:
            pool[n] = S
        else:
            ring.k[n, :, count], ring.g[n, :, count], ring.v_new[n, :, count] = k[n], g[n], v_new
    return o


def errors(engine, dtype):
    """{who: (worst error of o, error of the states)} of 24 steps from 0 to 15 rows of zeros on."""
    case, found = Case(engine, 4, dtype, 1), {}
    start, first = case.pool.clone(), torch.tensor([0, 3, 9, L - 1], dtype=torch.int32)
    for who in ("sglang", "libkda", "in turns"):
        torch.manual_seed(3)
        case.pool.copy_(start)
        for rows in case.ring:
            rows.zero_()
        truth, ring, worst = start.double(), libkda.Ring(*(rows.double() for rows in case.ring)), 0.0
        case.counts[0] = first
        for step in range(24):
            for x in (case.mixed, case.a, case.b):
                x.normal_()
            o = float64_step(case, truth, ring, case.counts[0])
            (case.sglang if who == "sglang" or who == "in turns" and step % 3 == 0 else case.libkda)(0)
            worst = max(worst, float((case.out.view_as(o) - o).norm() / o.norm()))
            case.counts[0] = torch.where(case.counts[0] == L - 1, 0, case.counts[0] + 1)
        found[who] = worst, float((case.pool - truth).norm() / truth.norm())
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 256, 512, 16, 1])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-tiles", action="store_true", help="SGLang's kernel as shipped alone")
    parser.add_argument("--check", action="store_true", help="errors against float64 in place of times")
    args = parser.parse_args()
    import engine_sources
    given = {"sglang.srt.utils": {}}
    with engine_sources.Engine("sglang", given, kernels=True), torch.inference_mode(), torch.device("cuda"):
        engine = importlib.import_module(MODULE).fused_recurrent_linear_replayssm_decode
        for dtype in (torch.float32, torch.bfloat16) if args.check else ():
            for who, (o, state) in errors(engine, dtype).items():
                print(f"{str(dtype).removeprefix('torch.')} {who}: o {o:.1e}, states {state:.1e}", flush=True)
        for N, dtype in itertools.product([] if args.check else args.sequences, (torch.float32, torch.bfloat16)):
            row = measure(engine, N, dtype, not args.no_tiles, args.rounds)
            print(json.dumps(row | dict(of_sglang=row["libkda"] / row["sglang"])), flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
