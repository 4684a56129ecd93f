#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Layers of vLLM and SGLang on the Triton kernels of their wheels, beside the same layers with libkda's plugin: the
part of a KDA layer and of a Gated DeltaNet layer between its projections, without the norm.

    python3 python/tests/engine_sources.py build-engines
    KDA_ENGINES=build-engines python3 bench/engine_layers.py --binaries build --json bench/results/gpu_engine_layers.json

Needs a GPU, torch with Triton, and the installed libkda package. Times are medians of turns that the two take, in
microseconds of a step: "eager" of calls one after the other until the GPU is done, "graph" of a step in a CUDA graph.
Both have the engine's own convolution. Prompts of Gated DeltaNet are timed with libkda though the plugins leave them
to the engines by default; a row says so.
"""
import argparse
import contextlib
import pathlib
import shlex
import statistics
import sys
import time

from report import evidence

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "python" / "tests"))
import torch  # noqa: E402

DEVICE, D = "cuda", 128
LENGTHS = ([65536], [8192], [32768, 1024], [2048], [65536, *[1024] * 8])
DECODES = (1, 16, 64, 256)
VERIFIES = (1, 16, 64)
IN_A_GRAPH = 8  # steps
LEAST_S = 4e-3  # of a turn
NOT_BY_DEFAULT = {("gdn", "prefill")}  # what the plugins serve only where it is asked for


def cases(quick=False):
    """(kind, step, size, heads, value heads): heads of a card of four for prompts, of one and of four for tokens."""
    for kind, few, all_heads in (("kda", (8, 8), (32, 32)), ("gdn", (4, 8), (16, 32))):
        for lengths in LENGTHS[3:4] if quick else LENGTHS:
            yield kind, "prefill", lengths, *few
        for count in DECODES[:1] if quick else DECODES:
            yield kind, "decode", count, *few
            yield kind, "decode", count, *all_heads
        for count in VERIFIES[:1] if quick else VERIFIES:
            yield kind, "verify", count, *all_heads


def case_name(step, size, drafts):
    if step != "prefill":
        return f"{size} of {drafts} drafts" if step == "verify" else f"{size}"
    first, others = size[0], size[1:]
    if not others:
        return f"{first:,}"
    return f"{first:,} + " + (f"{len(others)} x " if len(others) > 1 else "") + f"{others[0]:,}"


def make_step(layers, steps, engine, case):
    """(layer, step) of a case on the GPU."""
    kind, name, size, heads, value_heads = case
    count = len(size) if name == "prefill" else size
    with torch.device(DEVICE):
        layer = steps.LAYERS[engine](layers, kind, heads=heads, value_heads=value_heads, dim=D, slots=count,
                                     drafts=steps.DRAFTS if name == "verify" else 0)
        return layer, getattr(layer, name)(size)


def wait():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(call, repeats):
    """Of one of `repeats` calls, until the GPU is done."""
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    wait()
    return (time.perf_counter() - start) / repeats


def in_turns(calls, rounds):
    """{who: median microseconds of calls[who][1]() in the context calls[who][0]()}."""
    repeats, found = {}, {who: [] for who in calls}
    for who, (context, call) in calls.items():
        with context():
            once = min(seconds_of(call, 1) for _ in range(2))
        repeats[who] = max(1, min(200, int(LEAST_S / max(once, 1e-6))))
    for _ in range(rounds):
        for who, (context, call) in calls.items():
            with context():
                found[who].append(seconds_of(call, repeats[who]))
    return {who: 1e6 * statistics.median(times) for who, times in found.items()}


def graphs_of(step, contexts):
    """{who: a graph of IN_A_GRAPH steps}; {who: why there is none}."""
    graphs, refusals = {}, {}
    for who, context in contexts.items():
        try:
            graph = torch.cuda.CUDAGraph()
            with context(), torch.cuda.graph(graph):
                for _ in range(IN_A_GRAPH):
                    step.run()
            graphs[who] = graph
        except RuntimeError as refusal:
            wait()
            refusals[who] = str(refusal).partition("\n")[0]
    return graphs, refusals


def measure(steps, modules, engine, case, rounds):
    kind, name, size, heads, value_heads = case
    layer, step = make_step(modules, steps, engine, case)
    row = dict(engine=engine, kind=kind, step=name, case=case_name(name, size, steps.DRAFTS), heads=heads,
               value_heads=value_heads, by_default=(kind, name) not in NOT_BY_DEFAULT)
    contexts = steps.ways(layer)
    for who, context in contexts.items():
        with context(), steps.tuned() if who == "own" else contextlib.nullcontext():
            for _ in range(2):
                step.run()
            row["served"] = layer.plugin.last_path()
    row["eager_us"] = in_turns({who: (context, step.run) for who, context in contexts.items()}, rounds)
    graphs, refusals = graphs_of(step, contexts)
    replays = {who: (contextlib.nullcontext, graph.replay) for who, graph in graphs.items()}
    row["graph_us"] = {who: us / IN_A_GRAPH for who, us in in_turns(replays, rounds).items()}
    if refusals:
        row["no_graph"] = refusals
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binaries", type=pathlib.Path, default=ROOT / "build",
                        help="a folder with kernel_hashes.json of the build that the package has")
    parser.add_argument("--json")
    parser.add_argument("--engine", choices=["vllm", "sglang"], action="append", help="all if not given")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="one case of a kind of step")
    args = parser.parse_args()
    import engine_steps as steps
    import triton
    import libkda
    command = shlex.join(["python3", "bench/engine_layers.py"] + ["--quick"] * args.quick)
    report = evidence.header(args.binaries, "engine_layers", command) if args.json else {}
    report.update(torch=torch.__version__, triton=triton.__version__, libkda=libkda.__version__,
                  engines=steps.engine_sources.WHEELS, rows=[])
    torch.manual_seed(7)
    try:
        for engine in args.engine or ["vllm", "sglang"]:
            with steps.engine(engine) as modules, torch.inference_mode():
                for case in cases(args.quick):
                    report["rows"].append(measure(steps, modules, engine, case, args.rounds))
                    torch.cuda.empty_cache()
                    print(report["rows"][-1], flush=True)
    finally:  # who interrupts it keeps what is measured
        if args.json:
            evidence.write(args.json, report)


if __name__ == "__main__":
    main()
