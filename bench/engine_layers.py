#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Layers of vLLM and SGLang on the Triton kernels of their wheels, beside the same layers with libkda's plugin: the
part of a KDA layer and of a Gated DeltaNet layer between its projections, without the norm.

    python3 python/tests/engine_sources.py build-engines
    KDA_ENGINES=build-engines python3 bench/engine_layers.py --ahead --binaries build --json \\
        bench/results/gpu_engine_layers.json

Prints a line a step. Those of --quick come first and the engines take turns: who interrupts it has rows of both. Needs a GPU, torch with Triton, and the installed libkda package. Times are medians of turns that the two take, in
microseconds of a step: "eager" of calls one after the other until the GPU is done, "graph" of a step in a CUDA graph.
Both have the engine's own convolution. Steps that the plugins leave to the engines by default are timed with libkda's
kernels all the same. --ahead compiles what Triton compiles in processes beside each other, a minute earlier.
"""
import argparse
import contextlib
import itertools
import pathlib
import shlex
import statistics
import subprocess
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
QUICK = dict(prefill=([65536], [2048]), decode=(1, 16, 256), verify=(16,))
ENGINES, KINDS, STEPS = ("vllm", "sglang"), ("kda", "gdn"), ("prefill", "decode", "verify")
IN_A_GRAPH = 8  # steps
LEAST_S = 4e-3  # of a turn


def cases(quick=False):
    """(kind, step, size, heads, value heads): heads of a card of four for prompts, of one and of four for tokens. Those
    of a quick run come first."""
    for kind, few, all_heads in (("kda", (8, 8), (32, 32)), ("gdn", (4, 8), (16, 32))):
        for step, sizes in QUICK.items():
            for size in sizes:
                yield kind, step, size, *(few if step == "prefill" else all_heads)
    if quick:
        return
    for kind, few, all_heads in (("kda", (8, 8), (32, 32)), ("gdn", (4, 8), (16, 32))):
        for count in DECODES:
            yield kind, "decode", count, *few
        for step, sizes, heads in (("decode", DECODES, all_heads), ("verify", VERIFIES, all_heads),
                                   ("prefill", LENGTHS, few)):
            for size in sizes:
                if size not in QUICK[step]:
                    yield kind, step, size, *heads


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


def run_both(steps, layer, step):
    """Twice by each, with what Triton compiles and chooses; who served libkda's."""
    for who, context in steps.ways(layer).items():
        with context(), steps.tuned() if who == "own" else contextlib.nullcontext():
            for _ in range(2):
                step.run()
            served = layer.plugin.last_path()
    return served


def measure(steps, modules, engine, case, rounds):
    kind, name, size, heads, value_heads = case
    layer, step = make_step(modules, steps, engine, case)
    tokens = sum(size) if name == "prefill" else size * max(1, layer.drafts)
    row = dict(engine=engine, kind=kind, step=name, case=case_name(name, size, steps.DRAFTS), heads=heads,
               value_heads=value_heads, tokens=tokens, served=run_both(steps, layer, step))
    contexts = steps.ways(layer)
    row["eager_us"] = in_turns({who: (context, step.run) for who, context in contexts.items()}, rounds)
    graphs, refusals = graphs_of(step, contexts)
    replays = {who: (contextlib.nullcontext, graph.replay) for who, graph in graphs.items()}
    row["graph_us"] = {who: us / IN_A_GRAPH for who, us in in_turns(replays, rounds).items()}
    if refusals:
        row["no_graph"] = refusals
    return row


def line_of(row):
    """A row of the result in short."""
    times = [f"{which} {' / '.join(f'{us:.1f}' for us in row[f'{which}_us'].values())}"
             for which in ("eager", "graph") if row[f"{which}_us"]]
    refusals = [f"no graph of {who}: {why}" for who, why in row.get("no_graph", {}).items()]
    return "; ".join([f"{row['engine']} {row['kind']} {row['step']} {row['case']}, {row['heads']} / {row['value_heads']}"
                      f" heads: {', '.join(times)} us", row["served"], *refusals])


def all_rows(steps, modules, chosen, rounds, report):
    """Rows of the cases of each engine's modules into report["rows"]; what fails goes to report["failed"], and the
    others on. Without rounds each step runs, and nothing is timed."""
    for case, engine in itertools.product(chosen, modules):
        try:
            if rounds:
                report["rows"].append(measure(steps, modules[engine], engine, case, rounds))
                print(line_of(report["rows"][-1]), flush=True)
            else:
                run_both(steps, *make_step(modules[engine], steps, engine, case))
        except Exception as failure:
            reason = f"{engine} {case}: {type(failure).__name__}: {failure}"
            report.setdefault("failed", []).append(reason.partition("\n")[0])
            print(f"failed: {reason}", flush=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def compile_ahead(arguments, engines):
    """Runs each case once, in a process for each engine, kind and step."""
    processes = [subprocess.Popen([sys.executable, __file__, *arguments, "--rounds", "0", "--engine", engine, "--kind",
                                   kind, "--step", step]) for engine in engines for kind in KINDS for step in STEPS]
    for process in processes:
        process.wait()  # what it could not run will say so again


def parsed(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binaries", type=pathlib.Path, default=ROOT / "build",
                        help="for --json: a folder with kernel_hashes.json of the build that the package has")
    parser.add_argument("--json")
    parser.add_argument("--engine", choices=ENGINES, action="append", help="all if not given")
    parser.add_argument("--kind", choices=KINDS, action="append", help="all if not given")
    parser.add_argument("--step", choices=STEPS, action="append", help="all if not given")
    parser.add_argument("--rounds", type=int, default=7, help="0: each step runs, and nothing is timed")
    parser.add_argument("--quick", action="store_true", help="six cases of a kind of layer")
    parser.add_argument("--ahead", action="store_true", help="compile all kernels first, in processes beside each other")
    args = parser.parse_args(arguments)
    if args.rounds < 0:
        parser.error(f"--rounds must be at least 0, got {args.rounds}")
    if args.json and not (args.binaries / "kernel_hashes.json").is_file():
        parser.error(f"--json needs --binaries with the folder of the build: {args.binaries} has no kernel_hashes.json")
    return args


def main():
    args = parsed()
    quick, engines = ["--quick"] * args.quick, args.engine or ENGINES
    command = shlex.join(["python3", "bench/engine_layers.py", *quick])
    report = evidence.header(args.binaries, "engine_layers", command) if args.json else {}
    if args.ahead:
        compile_ahead(quick, engines)
    import engine_steps as steps
    import triton
    import libkda
    report.update(torch=torch.__version__, triton=triton.__version__, libkda=libkda.__version__,
                  engines=steps.engine_sources.WHEELS, rows=[])
    chosen = [case for case in cases(args.quick)
              if case[0] in (args.kind or KINDS) and case[1] in (args.step or STEPS)]
    torch.manual_seed(7)
    try:
        with contextlib.ExitStack() as stack:
            modules = {engine: stack.enter_context(steps.engine(engine)) for engine in engines}
            stack.enter_context(torch.inference_mode())
            all_rows(steps, modules, chosen, args.rounds, report)
    except KeyboardInterrupt:
        report["interrupted"] = True
    finally:  # who interrupts it keeps what is measured
        if args.json:
            evidence.write(args.json, report)
    if report.get("interrupted") or report.get("failed"):
        raise SystemExit(f"{len(report['rows'])} rows; " + "; ".join(report.get("failed", ["interrupted"])))


if __name__ == "__main__":
    main()
