#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One sequence over the GPUs of a machine: libkda's context parallelism beside FLA's, and beside one GPU.

    python3 bench/many_cards.py --binaries build --json bench/results/gpu_many_cards.json
    python3 bench/many_cards.py --tune    first, on one GPU: configs of FLA's kernels (fla_configs.py)

Every number of GPUs in --ranks is a group of processes of its own (NCCL), which times libkda first, all cases, and FLA
then. A time is the median over rounds of the slowest rank's, from an all-reduce on, by CUDA events. The outputs and
gradients of a short sequence are compared first with those of one GPU, and the bytes that a rank gives to exchanges are
counted. Needs torch, libkda and fla-core.
"""
import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from report import evidence

sys.path.append(str(pathlib.Path(__file__).resolve().parent / "peers"))
import fla_configs  # before fla: it sets FLA's cache mode
from gpu_cases import cases, make_inputs, relative

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))
ROWS = ("q", "k", "v", "g", "beta")
FLAGS = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, lower_bound=-5.0)
CHECKED = dict(B=1, T=4096, H=4, HV=4, K=128, V=128, lengths=None, dtype=torch.bfloat16)


def contexts_of(name, tokens, ranks):
    """Keywords of a call; nothing on one GPU."""
    if ranks == 1:
        return {}
    if name == "libkda":
        from libkda import context_parallel
        return dict(cp_context=context_parallel.contiguous([0, tokens]))
    from fla.ops.cp import build_cp_context
    cu = torch.tensor([0, tokens], device="cuda")
    return dict(cp_context=build_cp_context(cu, group=dist.group.WORLD))


def function_of(name):
    if name == "libkda":
        import libkda
        return lambda **x: libkda.chunk_kda(**x, **FLAGS)[0]
    from fla.ops.kda import chunk_kda
    return lambda **x: chunk_kda(**dict(x, dt_bias=x["dt_bias"].reshape(-1)), safe_gate=True, **FLAGS)[0]


def calls_of(name, x, d_o, where):
    function = function_of(name)
    leaves = {n: t.detach().requires_grad_() for n, t in x.items()}

    def forward():
        with torch.no_grad():
            return function(**x, **where)

    def train():
        o = function(**leaves, **where)
        return o, *torch.autograd.grad(o, list(leaves.values()), d_o)
    return dict(forward=forward, train=train)


def inputs_of(c, seed):
    x = make_inputs(c, seed=seed)
    del x["h0"]
    generator = torch.Generator(device="cuda").manual_seed(seed + 1000)
    return x, torch.randn(x["v"].shape, device="cuda", generator=generator).to(c["dtype"])


def difference_from_one(rank, ranks):
    """Of libkda's outputs and gradients of rows, at most."""
    c = CHECKED
    x, d_o = inputs_of(c, seed=0)
    begin, end = rank * c["T"] // ranks, (rank + 1) * c["T"] // ranks
    mine = {n: t[:, begin:end].contiguous() if n in ROWS else t for n, t in x.items()}
    here = calls_of("libkda", mine, d_o[:, begin:end].contiguous(), contexts_of("libkda", c["T"], ranks))["train"]()
    alone = calls_of("libkda", x, d_o, {})["train"]()
    worst = max(relative(a, b[:, begin:end].double()) for a, b in zip(here[:1 + len(ROWS)], alone))
    return max(gathered(worst, ranks))


def gathered(value, ranks):
    if ranks == 1:
        return [value]
    values = [None] * ranks
    dist.all_gather_object(values, value)
    return values


def median_us(call, ranks, rounds):
    """Of the slowest rank. Ranks begin at once, on their GPUs: their hosts go on while these wait for each other."""
    for _ in range(2):
        call()
    together, times = torch.zeros(1, device="cuda"), []
    for _ in range(rounds):
        if ranks > 1:
            dist.barrier()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if ranks > 1:
            dist.all_reduce(together)
        else:
            together += 1
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    if ranks == 1:
        return statistics.median(times)
    every = torch.tensor(times, device="cuda")
    dist.all_reduce(every, dist.ReduceOp.MAX)
    return every.median().item()


def in_graph(call):
    """The same in a CUDA graph, its exchange too."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        graph.kept = call()
    return graph.replay


def print_profile(title, call, rank, ranks):
    """Host time of a call, and its kernels, on a rank in the middle."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    host = time.perf_counter() - began
    if ranks > 1:
        dist.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    if rank != ranks // 2:
        return
    rows = [(row.device_time_total, row.count, row.key) for row in profile.key_averages() if row.device_time_total > 0]
    print(f"{title}, {ranks} GPUs, rank {rank}: host {host * 1e6:.0f} us, {sum(row[1] for row in rows)} launches, "
          f"{sum(row[0] for row in rows):.0f} us")
    for us, count, key in sorted(rows, reverse=True):
        print(f"  {us:8.1f} us {count:3d} {key[:100]}", flush=True)


def measure(c, name, whats, rank, ranks, rounds, graphs=False, profile=False, search=True):
    """Microseconds by "forward" and "train"; None: out of memory on some rank."""
    if name == "fla":
        import fla.ops.cp  # noqa: F401
        fla_configs.use(c["HV"])
        if not search:
            fla_configs.take_one()
    local = dict(c, T=c["T"] // ranks, lengths=None)
    found = {}
    for what in whats:
        full = False
        try:
            x, d_o = inputs_of(local, seed=rank)
            call = calls_of(name, x, d_o, contexts_of(name, c["T"], ranks))[what]
            call()
            torch.cuda.synchronize()
            if name == "fla" and rank == 0 and search:
                fla_configs.save(c["HV"])
            if profile:
                print_profile(f"{c['name']} {what}", call, rank, ranks)
            if graphs:
                call = in_graph(call)
        except torch.OutOfMemoryError:
            full = True
        found[what] = None if any(gathered(full, ranks)) else median_us(call, ranks, rounds)
        x = d_o = call = None
        torch.cuda.empty_cache()
    return found


def tune_fla(heads, part, parts):
    """Tunes every FLA kernel of a rank in the middle of four, whose group is none; a part of several is a worker's,
    which compiles its share."""
    from torch.testing._internal.distributed.fake_pg import FakeStore
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    import fla.ops.cp  # noqa: F401
    import fla.ops.kda  # noqa: F401
    fla_configs.use(heads)
    if parts > 1:
        fla_configs.take_part(part, parts)
    c = dict(CHECKED, T=8192, H=heads, HV=heads)
    x, d_o = inputs_of(c, seed=0)
    calls = calls_of("fla", x, d_o, contexts_of("fla", 4 * c["T"], ranks=4))
    for what in ("forward", "train"):
        calls[what]()
        torch.cuda.synchronize()
        if parts == 1:
            fla_configs.save(heads)


def tune_all(heads, workers):
    """Workers compile what is tuned then."""
    for n in heads:
        parts = [subprocess.Popen([sys.executable, __file__, "--tune", n, "--part", f"{i}/{workers}"],
                                  stdout=subprocess.DEVNULL, stderr=None if i == 0 else subprocess.DEVNULL)
                 for i in range(workers)]
        failed = sum(part.wait() != 0 for part in parts)
        print(f"{n} heads: {workers} workers have compiled, {failed} failed", flush=True)
        subprocess.run([sys.executable, __file__, "--tune", n, "--part", "0/1"], check=True)


def planned_bytes(c, ranks):
    from libkda import context_parallel
    if ranks == 1:
        return [0, 0]
    exchange = context_parallel.contiguous([0, c["T"]]).exchange(c["HV"], c["K"], c["V"])
    return [exchange.forward_bytes, exchange.backward_bytes]


def given_bytes(c, rank, ranks):
    """What a rank gives to all-gathers in a forward, and in its backward, once its context is known."""
    x, d_o = inputs_of(dict(c, T=c["T"] // ranks, lengths=None), seed=rank)
    calls = calls_of("libkda", x, d_o, contexts_of("libkda", c["T"], ranks))
    all_gather, given = dist.all_gather_into_tensor, []

    def counted(out, mine, *rest, **keywords):
        given.append(mine.numel() * mine.element_size())
        return all_gather(out, mine, *rest, **keywords)
    calls["train"]()
    dist.all_gather_into_tensor = counted
    try:
        calls["forward"]()
        forward = sum(given)
        calls["train"]()
    finally:
        dist.all_gather_into_tensor = all_gather
    return [forward, sum(given) - 2 * forward]


def parts_us(c, rank, ranks, rounds):
    """Of a call of one span a rank: its exchange alone, and the fold of all maps but the last."""
    from libkda.context_parallel import maps
    HV, K, V = c["HV"], c["K"], c["V"]
    rows = torch.full((ranks, planned_bytes(c, ranks)[0] // 4), 0.01, device="cuda")
    exchange = lambda: dist.all_gather_into_tensor(rows.view(-1), rows[rank])
    steps = torch.tensor([(-1, i, -1) for i in range(ranks - 1)])
    steps[0, 0], steps[-1, 2] = -2, 0  # from zero to the state before the last rank
    on_device, states = steps.cuda(), torch.empty(1, HV, K, V, device="cuda")
    fold = lambda: maps.fold_states(rows, 1, states[:0], states, steps, on_device, False)
    return dict(exchange=median_us(in_graph(exchange), ranks, rounds), fold=median_us(in_graph(fold), ranks, rounds))


def worker(rank, ranks, folder, args):
    torch.cuda.set_device(rank)
    if ranks > 1:
        store = dist.FileStore(str(pathlib.Path(folder) / f"store{ranks}"), ranks)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=ranks, device_id=torch.device("cuda", rank))
    difference = difference_from_one(rank, ranks)
    chosen = [c for c in cases("many_cards") if not args.cases or c["name"] in args.cases.split(",")]
    rows = {c["name"]: dict(case=c["name"], ranks=ranks, difference_from_one=difference,
                            sent_bytes=planned_bytes(c, ranks)) for c in chosen}

    def keep(c, key, found):
        rows[c["name"]][key] = found
        if rank == 0:
            print(f"{c['name']}, {ranks} GPUs, {key}: {found}", flush=True)
            torch.save(list(rows.values()), pathlib.Path(folder) / f"rows{ranks}")
    for c in chosen:
        keep(c, "libkda", measure(c, "libkda", ("forward", "train"), rank, ranks, args.rounds, profile=args.profile))
        if args.graphs:
            keep(c, "libkda_graphs",
                 measure(c, "libkda", ("forward", "train"), rank, ranks, args.rounds, graphs=True))
    if ranks > 1:
        for c in chosen:
            keep(c, "given_bytes", max(gathered(given_bytes(c, rank, ranks), ranks)))
            keep(c, "parts", parts_us(c, rank, ranks, args.rounds))
    began = time.monotonic()
    for c in chosen if args.fla and ranks > 1 else []:
        if any(gathered(args.seconds is not None and time.monotonic() - began > args.seconds, ranks)):
            break
        keep(c, "fla", measure(c, "fla", args.fla.split(","), rank, ranks, args.rounds, search=not args.no_search))
    if ranks > 1:
        dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,4", help="numbers of GPUs")
    parser.add_argument("--fla", default="forward,train",
                        help="what of FLA is timed on several GPUs (%(default)s)")
    parser.add_argument("--no-search", action="store_true",
                        help="kernels of FLA that --tune has not seen take one config of theirs, unsearched")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--cases", default="", help="names of cases, with commas between; all without it")
    parser.add_argument("--graphs", action="store_true", help="calls in CUDA graphs too")
    parser.add_argument("--profile", action="store_true", help="print host time and kernels of each call")
    parser.add_argument("--seconds", type=float, help="of FLA for a number of GPUs; no case begins later")
    parser.add_argument("--binaries", default=str(ROOT / "build"), help="folder with kernel_hashes.json")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--tune", nargs="?", const="64,16", metavar="HEADS",
                        help="tune FLA's kernels on one GPU, and do nothing else (%(const)s)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)),
                        help="that compile for --tune (one a processor)")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.setdefault("FLA_FLASH_KDA", "0")
    os.environ.setdefault("FLA_INTRACARD_CP", "0")
    if args.part:
        return tune_fla(int(args.tune), *(int(n) for n in args.part.split("/")))
    if args.tune:
        return tune_all(args.tune.split(","), args.workers)
    rows, failed = [], False
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (int(n) for n in args.ranks.split(",")):
            try:
                mp.spawn(worker, (ranks, folder, args), nprocs=ranks)
            except Exception as error:  # what other numbers of GPUs found is kept
                print(f"{ranks} GPUs: {error}", file=sys.stderr, flush=True)
                failed = True
            found = pathlib.Path(folder) / f"rows{ranks}"
            rows += torch.load(found) if found.exists() else []
            if args.json:
                write(args, rows)
    return int(failed)


def write(args, rows):
    command = f"python3 bench/many_cards.py --ranks {args.ranks} --fla '{args.fla}'" + (
        " --graphs" if args.graphs else "") + (" --no-search" if args.no_search else "") + (
        f" --cases '{args.cases}'" if args.cases else "")
    report = evidence.header(args.binaries, "gpu_many_cards", command)
    report.update(torch=torch.__version__, nccl=".".join(map(str, torch.cuda.nccl.version())), cases=rows)
    if args.fla:
        from importlib.metadata import version
        report["fla"] = version("fla-core")
    evidence.write(args.json, report)


if __name__ == "__main__":
    sys.exit(main())
