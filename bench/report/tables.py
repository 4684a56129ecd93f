#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the tables and code between the markers of README.md and of all documents under docs/.

    bench/report/tables.py           rewrite them from bench/results/*.json and examples/
    bench/report/tables.py --check   exit 1 if a file would change, or a result feeds no table

Standard library only.
"""
import json
import math
import pathlib
import statistics
import re
import runpy
import sys
import textwrap

import evidence

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"


loaded = set()
# Results that are no numbers.
EVIDENCE = {"gpu_fla_gdn", "gpu_fla_models", "gpu_fla_suite", "gpu_nan_memory", "gpu_sanitizer", "gpu_sweep",
            *(f"gpu_{of}_{family}" for of in ("test", "sanitizer") for family in evidence.FAMILIES)}


def load(name):
    loaded.add(name)
    return json.loads((RESULTS / f"{name}.json").read_text()) | {"file": f"{name}.json"}


TIME = re.compile(r"\b([\d.]+) (us|ms)\b")


def in_one_unit(columns):
    """Columns whose cells with a number all begin with a time have their unit in the header: us, or ms where all times
    of the table are. A table of times that differ a thousandfold is left as it is."""
    is_timed = lambda column: any(map(TIME.match, column[1:])) and all(
        TIME.match(cell) for cell in column[1:] if re.search(r"\d", cell))
    times = [time for column in columns if is_timed(column) for cell in column[1:] for time in TIME.findall(cell)]
    unit = "ms" if {unit for _, unit in times} == {"ms"} else "us"
    factor = {"us": 1, "ms": 1 if unit == "ms" else 1000}
    numbers = [float(number) * factor[given] for number, given in times]
    if not times or max(numbers) > 1000 * min(numbers):
        return columns
    short = lambda time: (time[1] if time[2] == unit and "." in time[1] else
                          f"{float(time[1]) * factor[time[2]]:,.0f}")
    return [[f"{column[0]}, {unit}", *(TIME.sub(short, cell) for cell in column[1:])] if is_timed(column) else column
            for column in columns]


def markdown(header, rows, units=False):
    """A table; with `units` each time has its own."""
    if not units:
        header, *rows = zip(*in_one_unit(list(zip(header, *rows))))
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def microseconds(seconds):
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-4 else milliseconds(seconds)


def milliseconds(seconds):
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def percent_of_peak(report, case):
    return 100 * case["multiply_adds"] / case["median_s"] / report["peak_fma_per_second"]


def forward_rows(report):
    for case in report["cases"]:
        spread = f'-{100 * (1 - case["fastest_s"] / case["median_s"]):.0f}% +{100 * (case["slowest_s"] / case["median_s"] - 1):.0f}%'
        yield [f'`{case["case"]}`', milliseconds(case["median_s"]), spread,
               f'{case["tokens"] / case["median_s"] / 1e3:.0f} k',
               f'{2e-9 * case["multiply_adds"] / case["median_s"]:.0f}',
               f'{percent_of_peak(report, case):.0f}%']


def table_forward():
    report, one = load("cpu_forward"), load("cpu_forward_1")
    head = f'{report["implementation"]}, {report["threads"]} threads, {report["cpu"]}, measured peak of fp32 {2e-9 * report["peak_fma_per_second"]:.0f} GFLOP/s\n\n'
    alone = one["cases"][0]
    tail = f'\n\nOne thread, the first case: {milliseconds(alone["median_s"])}, {percent_of_peak(one, alone):.0f}% of its peak.'
    return head + markdown(["case", "median", "spread", "tokens/s", "GFLOP/s", "of peak"],
                           forward_rows(report)) + tail + source(report, one)


def table_decode():
    report = load("cpu_decode")
    head = f'{report["implementation"]}, {report["threads"]} threads, {report["cpu"]}; memory read and written in place at {report["memory_bytes_per_second"] * 1e-9:.0f} GB/s\n\n'
    rows = [[f'`{c["case"]}`', milliseconds(c["median_s"]), f'{1e-9 * c["bytes"] / c["median_s"]:.1f}',
             f'{100 * c["bytes"] / c["median_s"] / report["memory_bytes_per_second"]:.0f}%']
            for c in report["cases"]]
    return head + markdown(["case", "median", "GB/s", "of memory rate"], rows) + source(report)


def beside_what(report):
    """What else a machine of a CPU's result did: its load average before it."""
    return f'load {report["load"]:.1f} before it' if "load" in report else "while other processes ran"


def table_decode_ggml(name="cpu_decode_ggml"):
    report = load(name)
    head = (f'A token a sequence, K = V = 128, fp32, {report["rows"][0]["implementation"]}, {report["cpu"]}, '
            f'{beside_what(report)}; ggml {report["ggml"]}, {report["date"]}\n\n')
    found = {(r["batch"], r["heads"], r["threads"]): r for r in report["rows"]}
    threads = sorted({r["threads"] for r in report["rows"]})
    rows = [[str(batch), str(heads), *(cell for t in threads for cell in (
                 microseconds(found[batch, heads, t]["median_s"]), microseconds(found[batch, heads, t]["ggml_median_s"]),
                 f'{found[batch, heads, t]["of_ggml"]:.2f}'))]
            for batch, heads in dict.fromkeys((r["batch"], r["heads"]) for r in report["rows"])]
    header = ["batch", "heads", *(cell for t in threads for cell in (f'{t} thread{"s" if t > 1 else ""}', "ggml", "libkda / ggml"))]
    return head + markdown(header, rows) + source(report)


def table_decode_ggml_busy():
    return table_decode_ggml("cpu_decode_ggml_busy")


def of_other_kernels(report):
    """The results of the tests are the reference: CI tells whether they are of this tree."""
    tested = {}
    for path in sorted(RESULTS.glob("gpu_test*.json")):
        tested |= json.loads(path.read_text())["families"]
    return any(tested.get(family, kernels) != kernels for family, kernels in report["families"].items())


def gpu_of(report):
    earlier = "\n(other kernels than those of the last test run)" if of_other_kernels(report) else ""
    return f'{report["device"]}, driver {report["driver"]}, CUDA {report["toolkit"]}, {report["date"]}{earlier}'


def gpu_head(report):
    peer = f'; torch {report["torch"]}, triton {report["triton"]}, fla-core {report["fla"]}' if "fla" in report else ""
    return (f'{gpu_of(report)}{peer}; '
            f'a copy moves {report["copy_bytes_per_second"] * 1e-12:.2f} TB/s\n\n')


def gpu_heads(*reports):
    """Of a table from several results: one line where they are of one card and day."""
    versions = next((f'; torch {r["torch"]}, triton {r["triton"]}, fla-core {r["fla"]}' for r in reports if "fla" in r), "")
    copies = sorted(r["copy_bytes_per_second"] * 1e-12 for r in reports if "copy_bytes_per_second" in r)
    rate = f"{copies[0]:.2f}" if f"{copies[0]:.2f}" == f"{copies[-1]:.2f}" else f"{copies[0]:.2f} to {copies[-1]:.2f}"
    cards = ";\n".join(dict.fromkeys(map(gpu_of, reports)))
    return f"{cards}{versions}; a copy moves {rate} TB/s\n\n"


def source(*reports):
    """Where the numbers of a table are from: files of bench/results, and the commands that wrote them."""
    sources = [f'`{r["file"]}` (`{r["command"]}`)' for r in reports]
    line = f"\n\nFrom {', '.join(sources)}."
    return line if len(line) < 160 else line.replace("`), `", "`),\n`")


def of_copy(report, case):
    return f'{100 * case["bytes"] / case["median_s"] / report["copy_bytes_per_second"]:.0f}%'


def of_copies(report, case):
    """Of the rate of a large copy; in parentheses of a copy of as many bytes, timed the same way."""
    return f'{of_copy(report, case)} ({100 * case["copy_s"] / case["median_s"]:.0f}%)'


def pairs(report):
    """Two rows a case: {case: (first, second)}."""
    cases = report["cases"]
    return {c["case"]: (c, d) for c, d in zip(cases[::2], cases[1::2])}


def fused_and_staged():
    """{case: (fused, staged)}, without segments."""
    report = load("gpu_fused")
    return report, pairs(report)


def table_gpu_forward():
    """The planner's choice; both backends without segments; FLA in another run. Cases of the gate table are not here."""
    report, (beside, whole), peers = load("gpu_forward"), fused_and_staged(), load("gpu_peers_forward")
    auto = {c["case"]: c for c in report["cases"]}
    theirs = {r["case"]: r for r in reversed(peers["cases"])}
    rows = []
    for case in dict.fromkeys([*whole, *auto]):
        if "--regime" in case and "fp16" not in case:
            continue
        on, (fused, staged), fla = auto.get(case), whole.get(case, (None, None)), theirs.get(case)
        cells = [milliseconds(on["median_s"]), str(on["segments"] or ""), of_copy(report, on)] if on else ["", "", ""]
        cells += [milliseconds(fused["median_s"]), milliseconds(staged["median_s"])] if fused else [""] * 2
        cells += [milliseconds(fla["fla"] * 1e-6), f'{fla["speedup"]:.2f}x'] if fla else ["", ""]
        rows.append([f"`{case}`", *cells])
    header = ["case", "auto", "segments", "of copy", "off", "staged, off", "FLA chunk_kda", "FLA / libkda"]
    mhz = [r["libkda_mhz"] for r in peers["cases"] if r.get("libkda_mhz")]
    return (gpu_heads(report, beside, peers) + markdown(header, rows) + source(report, beside, peers)
            + f"\nIn the run with FLA the SMs ran at {min(mhz):.0f} to {max(mhz):.0f} MHz.")


def table_gpu_gates():
    report, whole = fused_and_staged()
    shapes = ("--tokens 8192 --heads 64", "--tokens 8192 --heads 128 --key-dim 64 --value-dim 64")
    rows = []
    for regime in ("strong", "slow", "mixed", "trained", "trained-softplus", "softplus"):
        cells = []
        for shape in shapes:
            fused, staged = whole.get(f"{shape} --regime {regime}", whole[shape])  # trained is what a case has of itself
            cells += [milliseconds(fused["median_s"]), milliseconds(staged["median_s"])]
        rows.append([regime, *cells])
    header = ["gates", "64 heads, K = V = 128: fused", "staged", "128 heads, K = V = 64: fused", "staged"]
    return gpu_head(report) + markdown(header, rows) + source(report)


def by_heads(cases, cells_of):
    """Cases `--seq-lens L --heads H` as rows of L and columns of H: 4, 8, 16."""
    found = {}
    for case, value in cases:
        lengths, heads = re.fullmatch(r"--seq-lens (\S+) --heads (4|8|16)", case).groups()
        found.setdefault(lengths, {})[int(heads)] = cells_of(value)
    empty = [""] * len(next(iter(next(iter(found.values())).values())))
    return [[f"`--seq-lens {lengths}`", *sum((of.get(h, empty) for h in (4, 8, 16)), [])] for lengths, of in found.items()]


def table_gpu_profile():
    report, rows = load("gpu_profile"), []
    for case in report["cases"]:
        stalls = sorted(case["stalls"].items(), key=lambda item: -item[1])[:3]
        rows.append([f'`{case["case"]}`', *(f"{case[unit + '_percent']:.0f}%" for unit in ("dram", "tensor", "shared", "issue")),
                     f'{case["cycles_an_instruction"]:.1f}',
                     ", ".join(f'{name.replace("_", " ")} {cycles:.2f}' for name, cycles in stalls)])
    return gpu_of(report) + "\n\n" + markdown(
        ["case", "DRAM", "tensor cores", "shared memory", "issue slots", "cycles of a warp per instruction",
         "longest stalls, cycles"], rows) + source(report)


def is_between(case):
    """Lengths of stages that the tables leave out."""
    return re.match(r"--tokens (1024|4096|16384) --batch 2 ", case)


def table_gpu_stages():
    intra, wu, delta = load("gpu_intra"), load("gpu_recompute_wu"), load("gpu_delta_h")
    rows = []
    for case, (bare, full) in pairs(intra).items():
        if is_between(case):
            continue
        bare_wu, full_wu = pairs(wu)[case]
        states, outputs = pairs(delta)[case]
        rows.append([f"`{case}`"] + [cell for report, c in ((intra, full), (intra, bare), (wu, full_wu), (wu, bare_wu),
                                                            (delta, states), (delta, outputs))
                                     for cell in (milliseconds(c["median_s"]), of_copy(report, c))])
    head = ["case"] + [cell for name in ("chunk_intra", "the same without kg, qg", "recompute_w_u", "the same without kg, qg",
                                         "chunk_delta_h (h and v_new)", "chunk_o") for cell in (name, "of copy")]
    return gpu_heads(intra, wu, delta) + markdown(head, rows) + source(intra, wu, delta)


def table_gpu_peers_batches():
    """The cases of cuLA's comparison that are not in the table of forwards."""
    report, rows = load("gpu_peers_forward"), {}
    for r in report["cases"]:
        tokens = re.match(r"--tokens (\d+) ", r["case"]).group(1) if r["set"] == "cula" else None
        if tokens and tokens != "8192":
            rows.setdefault(f"`--tokens {tokens} --heads 64`", []).extend(
                [milliseconds(r["libkda"] * 1e-6), milliseconds(r["fla"] * 1e-6), f'{r["speedup"]:.2f}x'])
    header = ["case", *sum(([f"batch {b}: libkda", "FLA", "FLA / libkda"] for b in (1, 2)), [])]
    return gpu_head(report) + markdown(header, [[case, *cells] for case, cells in rows.items()]) + source(report)


def table_gpu_segments():
    """Every case with and without segments; FLA, the faster of its two, from a run of both. A case that only that run has is from there."""
    us = lambda x: milliseconds(x * 1e-6)
    report, peers, gains = load("gpu_context_parallel"), load("gpu_peers_forward"), []
    ours = pairs(report)
    theirs = {r["case"]: r for r in reversed(peers["cases"])}  # sets overlap
    named = [r["case"] for name in ("context_parallel", "cp") for r in peers["cases"] if r["set"] == name]

    def times(case):
        if case not in ours:
            r = theirs[case]
            return us(r["libkda_off"]), us(r["libkda"]), r["segments"]
        off, on = ours[case]
        gains.extend([off["median_s"] / on["median_s"]] if on["segments"] else [])
        return milliseconds(off["median_s"]), milliseconds(on["median_s"]), on["segments"]

    def cells(case):
        off, on, segments = times(case)
        fla = min(filter(None, (theirs[case]["fla"], theirs[case].get("fla_intracard"))))
        return [off, f"{on} ({segments or 'none'})", us(fla), f'{fla / theirs[case]["libkda"]:.2f}x']

    rows = [row for row in by_heads(((case, case) for case in dict.fromkeys([*ours, *named])), cells)
            if not re.search(r" (28K,4K|128K,1K|128K,2x1K|128K,5x1K|64K,2x1K)`", row[0])]  # much as their neighbours
    mean = math.exp(sum(map(math.log, gains)) / len(gains))
    header = ["case", *sum(([f"{h} heads: off", "auto (segments)", "FLA", "FLA / libkda"] for h in (4, 8, 16)), [])]
    return (gpu_heads(report, peers) + markdown(header, rows)
            + f"\n\nWithout segments the {len(gains)} cases that `auto` splits take {mean:.2f} times as long (geometric mean)."
            + source(report, peers))


def geometric_mean(values):
    return math.exp(sum(map(math.log, values)) / len(values))


def percent_range(values):
    low, high = (f"{100 * x:+.0f}%" for x in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def table_gpu_policies():
    """The published policies beside `auto`, then what each declines, by its reason. A card must have run it once."""
    report = load("gpu_context_parallel")
    if "policies" not in report:
        return "No card has run the published policies with `./dev gpu-bench context-parallel` yet."
    found = {}
    for row in report["policies"]:
        found.setdefault(row["policy"], {})[row["set"], row["case"]] = row
    auto, rows = found["auto"], []
    for policy, cases in found.items():
        cut = [row["off_s"] / row["on_s"] for row in cases.values() if row["segments"]]
        beside = [row["on_s"] / auto[case]["on_s"] for case, row in cases.items()]
        said = [row["predicted_s"] / row["on_s"] - 1 for row in cases.values() if row["predicted_s"]]
        rows.append([f"`{policy}`", f"{len(cut)} of {len(cases)}", f"{geometric_mean(cut):.2f}x" if cut else "",
                     "" if policy == "auto" else f"{geometric_mean(beside):.2f}x", percent_range(said) if said else ""])
    text = markdown(["policy", "cuts", "off / on of those (geometric mean)", "time / `auto`'s, all cases",
                     "prediction beside the time"], rows)
    reasons = {}
    for row in report["declined"]:
        reasons.setdefault((row["policy"], row["reason"].partition(":")[0]), []).append(row["overhead"])
    declined = [[f"`{policy}`", reason, str(len(costs)), percent_range(costs)] for (policy, reason), costs in reasons.items()]
    return (f"{gpu_head(report)}{text}\n\n"
            + markdown(["declined by", "why", "cases", "time beside `off`"], declined) + source(report))


def launch_cell(times, segments):
    """us of the segments, of what the merge adds and the correction, and of all of it; of all alone where nothing is cut.
    Two segments need no merge."""
    if "to segment_scan" not in times:
        return f'{times["all"]:.1f}'
    scan, whole = times["to segment_scan"], times["all"]
    merged = times["to segment_merge"] if segments > 2 else scan
    merge = f" + {merged - scan:.1f}" if segments > 2 else ""
    return f"{scan:.1f}{merge} + {whole - merged:.1f} = {whole:.1f}"


def table_gpu_launches():
    """Short calls of few heads: a case of bench/cases/short.txt a row. A card must have run it once."""
    if not (RESULTS / "gpu_launches.json").exists():
        return "No card has run `./dev gpu-bench launches` yet."
    report, found, segments = load("gpu_launches"), {}, {}
    for row in report["cases"]:
        T, H, gates = re.fullmatch(r"--tokens (\d+) --heads (\d+) --regime (\S+)", row["case"]).groups()
        found.setdefault((int(T), int(H)), {}).setdefault(gates, {})[row["what"]] = row["median_s"] * 1e6
        segments[int(T), int(H)] = row["segments"]
    kinds = list(next(iter(found.values())))
    rows = [[f"{T:,}, {H}", f'{segments[T, H] or "none"}', *(cell for kind in kinds for cell in
                                                           (f'{of[kind]["off"]:.1f}', launch_cell(of[kind], segments[T, H])))]
            for (T, H), of in found.items()]
    head = ["tokens, heads", "segments", *sum(([f"{kind}: off", "segments + merge + correction"] for kind in kinds), [])]
    return f"{gpu_head(report)}{markdown(head, rows)}{source(report)}"


def table_gpu_lengths():
    """Forward and backward of packed calls, by where their lengths are."""
    report, found, segments = load("gpu_lengths"), {}, {}
    for row in report["cases"]:
        found.setdefault(row["case"], {})[row["what"]] = row["median_s"]
        segments[row["case"], row["what"]] = row["segments"]

    def cells(case, prefix):
        host, device, uncut = (found[case][prefix + where] for where in ("on the host", "on the device", "on the device, not cut"))
        cut = segments[case, prefix + "on the host"] or "none"
        return [f"{microseconds(host)} ({cut})", microseconds(device), microseconds(uncut), f"{device / host:.2f}"]

    rows = [[f"`{case}`", *cells(case, ""), *cells(case, "backward, ")] for case in found]
    header = ["case", *(cell for what in ("forward", "backward")
                        for cell in (f"{what}, lengths on the host (segments)", "on the GPU", "not cut", "GPU / host"))]
    return gpu_head(report) + markdown(header, rows) + source(report)


def table_gpu_lengths_python():
    """Calls of Python by where their lengths are: times of the GPU and of the host. A card must have run it once."""
    if not (RESULTS / "gpu_lengths_python.json").exists():
        return "No card has run `python3 bench/lengths_bench.py` yet."
    report = load("gpu_lengths_python")
    cell = lambda row, what: f'{row[what]["gpu_us"]:,.0f}, {row[what]["host_us"]:.0f}' if what in row else ""
    columns = {"`chunk_kda`, lengths on the host": "host lengths", "on the GPU": "GPU lengths", "`prefill`": "prefill",
               "SGLang": "sglang", "SGLang, tracked": "sglang, tracked", "backward, on the host": "backward, host lengths",
               "backward, on the GPU": "backward, GPU lengths", "training step": "training step"}
    rows = [[f'`{row["case"]}`', *(cell(row, what) for what in columns.values())] for row in report["cases"]]
    return (f'{gpu_of(report)}; torch {report["torch"]}\n\n' + markdown(["us of the GPU, of the host", *columns], rows)
            + source(report))


def cudnn_means(report):
    """Of cuDNN's time / libkda's over the cases of cuDNN's own comparison, by gates."""
    ratios = {}
    for r in report["forward"]:
        if r["set"] == "cudnn10":
            ratios.setdefault(r["gates"], []).append(r["speedup"])
    return ", ".join(f"{kind} {math.exp(sum(map(math.log, of)) / len(of)):.2f}x" for kind, of in ratios.items())


def table_gpu_cudnn():
    """Each case: libkda, cuDNN and their ratio with strong gates, and with trained ones, which slow ones are like."""
    report = load("gpu_cudnn")
    kinds = list(dict.fromkeys(r["gates"] for r in report["forward"]))
    found = {(r["case"], r["gates"]): r for r in report["forward"]}
    cells = lambda r: [milliseconds(r["libkda"] * 1e-6), milliseconds(r["cudnn"] * 1e-6), f'{r["speedup"]:.2f}x']
    shown = [kind for kind in kinds if kind != "slow"]
    rows = [[f"`{case}`", *sum((cells(found[case, kind]) for kind in shown), [])]
            for case in dict.fromkeys(r["case"] for r in report["forward"])]
    head = ["case", *sum(([f"{kind}: libkda", "cuDNN", "cuDNN / libkda"] for kind in shown), [])]
    return (f'{gpu_of(report)}; torch {report["torch"]}, nvidia-cudnn-frontend {report["cudnn_frontend"]}\n\n'
            f'{markdown(head, rows)}\n\nGeometric means of the ten cases of cuDNN\'s own comparison: {cudnn_means(report)}.{source(report)}')


def table_gpu_cudnn_backward():
    """Trained gates; how little others differ; empty cells where cuDNN has no such kernel."""
    report = load("gpu_cudnn_backward")
    trained = {r["case"]: r for r in report["backward"] if r["gates"] == "trained"}
    most = max(abs(r[who] / trained[r["case"]][who] - 1) for r in report["backward"] for who in ("libkda", "cudnn") if who in r)

    def cells(r):
        theirs = [milliseconds(r["cudnn"] * 1e-6), f'{r["speedup"]:.2f}x'] if "cudnn" in r else ["declines", ""]
        return [milliseconds(r["libkda"] * 1e-6), *theirs]

    table = markdown(["case", "libkda", "cuDNN", "cuDNN / libkda"], [[f"`{case}`", *cells(r)] for case, r in trained.items()])
    return (f'{gpu_of(report)}; torch {report["torch"]}, nvidia-cudnn-frontend {report["cudnn_frontend"]}\n\n{table}\n\n'
            f'Trained gates; with strong and slow ones all times are within {math.ceil(100 * most)}% of these.{source(report)}')


def table_gpu_peers_stages():
    def row(report, r):
        by = lambda ours, theirs: f'{r["fla_" + theirs] / r["libkda_" + ours]:.2f}x' if "fla_" + theirs in r else ""
        us = lambda name: milliseconds(r[name] * 1e-6)
        return [f'`{r["case"]}`', us("fla_intra"), by("chunk_intra", "intra"), by("chunk_intra_bare", "intra_bare"),
                by("chunk_intra", "intra_token_parallel"), us("fla_wu"), by("recompute_w_u", "wu"), by("recompute_w_u", "wu_expanded")]
    report = load("gpu_peers_intra")
    return gpu_head(report) + markdown(["case", "FLA's chunk_intra", "FLA / libkda", "the same without kg, qg",
                                         "FLA token parallel / libkda", "FLA's recompute_w_u", "FLA / libkda",
                                         "FLA with q, k expanded / libkda"],
                                       [row(report, r) for r in report["cases"] if not is_between(r["case"])]) + source(report)


def table_gpu_errors():
    """One sequence; packed ones with grouped heads have much the same errors, and are in the files."""
    report, cudnn = load("gpu_peers_errors"), load("gpu_cudnn")
    cell = lambda pair: f"{pair[0]:.2e}, {pair[1]:.2e}"
    theirs = {(r["case"], r["gates"]): cell(r["cudnn"]) for r in cudnn["errors"]}
    rows = [[r["gates"], {"bfloat16": "bf16", "float16": "fp16"}[r["dtype"]], cell(r["libkda"]),
             cell(r["libkda_cp"]), cell(r["fla"]),
             theirs.get((r["case"], r["gates"]), "") if r["dtype"] == "bfloat16" else ""]
            for r in report["cases"] if r["case"] == report["cases"][0]["case"]]
    header = ["gates", "type", "libkda: o, final state", "staged, 4 segments", "FLA", "cuDNN"]
    return (gpu_heads(report, cudnn) + f'{report["cases"][0]["case"]}.\n\n' + markdown(header, rows)
            + source(report, cudnn))


def table_gpu_backward():
    report = load("gpu_backward")
    found = {(c["case"], c["what"]): c for c in report["cases"]}
    time = lambda case, what: milliseconds(found[case, what]["median_s"]) if (case, what) in found else ""
    columns = ["forward", "backward"]
    if any("keep" in what for _, what in found):
        columns += ["forward, keep", "backward, keep"]
    rows = [[f"`{case}`", *(time(case, what) for what in columns), milliseconds(found[case, "backward"]["copy_s"])]
            for case in dict.fromkeys(case for case, _ in found)]
    return gpu_head(report) + markdown(["case", *columns, "copy of the backward's bytes"], rows) + source(report)


def table_gpu_train_errors():
    report = load("gpu_train_errors")
    names = ("dq", "dk", "dv", "dg", "dbeta", "d_initial_state", "ddt_bias", "dA_log")
    def cell(r, name):
        show = lambda e: "not finite" if e is None else f"{1e3 * e:.2f}"
        return f'{show(r["libkda"][name])} ({show(r["fla"][name])})' if name in r["libkda"] else ""
    found = {}
    for r in report["cases"]:
        found.setdefault(tuple(cell(r, name) for name in names), []).append(r["case"])
    rows = [["; ".join(cases), *cells] for cells, cases in found.items()]
    head = (f'{gpu_of(report)}; torch {report["torch"]}, triton {report["triton"]}, fla-core {report["fla"]}\n\n'
            f'{report["tokens"]:,} tokens, {report["heads"]} heads, K = V = 128, bf16. Relative errors, 1e-3: libkda (FLA).\n\n')
    return head + markdown(["gates", *names], rows) + source(report)


def table_gpu_loss_curve(name="gpu_loss_curve"):
    """Means over 10 steps, since single losses scatter."""
    report = load(name)
    steps = [10, 50, 100, 200, report["steps"]]
    mean = lambda losses, step: f"{sum(losses[step - 10:step]) / 10:.3f}"
    names = {"fla": f'FLA {report["fla"]}', "torch": "torch, in fp32"}
    rows = [[names.get(r["implementation"], r["implementation"]),
             *(mean(r["losses"], step) for step in steps), milliseconds(r["seconds_a_step"])] for r in report["cases"]]
    return (f'{gpu_of(report)}; torch {report["torch"]}, triton {report["triton"]}\n\n'
            f'{report["batch"]} x {report["tokens"]:,} bytes a step, {report["layers"]} layers of width {report["width"]}. '
            f'Bits a byte, mean of the 10 steps up to:\n\n'
            + markdown(["", *(f"step {step}" for step in steps), "a step takes"], rows) + source(report))


def table_gpu_loss_curve_gdn():
    return table_gpu_loss_curve("gpu_loss_curve_gdn")


def case_in_short(case):
    """A case as it is written, or how many sequences it has."""
    lengths = [int(n) for n in case.split()[1].split(",")] if case.count(",") > 6 else []
    if not lengths:
        return f"`{case}`"
    return f'{len(lengths)} sequences of {min(lengths)} to {max(lengths):,} tokens, {sum(lengths):,} in all, `{case[case.index("--heads"):]}`'


def table_gpu_peers_train():
    report = load("gpu_peers_train")
    gigabytes = lambda size: f"{1e-9 * size:.2f} GB"
    rows = [[case_in_short(c["case"]), milliseconds(c["libkda"] * 1e-6), milliseconds(c["fla"] * 1e-6), f'{c["speedup"]:.2f}x',
             gigabytes(c["libkda_peak_bytes"]), gigabytes(c["fla_peak_bytes"])] for c in report["cases"]]
    header = ["case", "libkda", f'FLA {report["fla"]}', "FLA / libkda", "peak memory of libkda", "of FLA"]
    return gpu_head(report) + markdown(header, rows) + source(report)


def table_gpu_many_cards():
    """By case and number of GPUs, with the part of the time on one GPU divided by their number."""
    report = load("gpu_many_cards")
    found = {(c["case"], c["ranks"]): c for c in report["cases"]}
    forms = [key for key in ("libkda", "libkda_graphs") if key in report["cases"][0]]
    with_fla = [what for what in ("forward", "train") if any(what in c.get("fla", {}) for c in report["cases"])]
    names = {"forward": "forward", "train": "forward and backward"}
    rows = []
    for case in dict.fromkeys(c["case"] for c in report["cases"]):
        for c in sorted((c for c in report["cases"] if c["case"] == case), key=lambda c: c["ranks"]):
            rows.append([f"`{case}`", str(c["ranks"]),
                         *(part_of_ideal(c, found[case, 1], key, what) for what in names for key in forms),
                         *(fla_on_cards(c, forms, what) for what in with_fla), bytes_of_rank(c)])
    header = ["case", "GPUs", *(name + (" in a graph" if key != "libkda" else "") for name in names.values() for key in forms),
              *(f'FLA {report["fla"]}, {names[what]}' for what in with_fla), "a rank sends a direction"]
    return f'{gpu_of(report)}; torch {report["torch"]}, NCCL {report["nccl"]}\n\n' + markdown(header, rows) + source(report)


def part_of_ideal(c, alone, key, what):
    """A time, and on several GPUs the part of the ideal."""
    us, one = c[key][what], alone[key][what]
    if us is None:
        return "out of memory"
    part = "" if c["ranks"] == 1 or one is None else f' ({100 * one / us / c["ranks"]:.0f}%)'
    return milliseconds(us * 1e-6) + part


def fla_on_cards(c, forms, what):
    """FLA's time over that of libkda, both call by call."""
    if c["ranks"] == 1:
        return ""
    if what not in c.get("fla", {}):
        return "not timed"
    us, ours = c["fla"][what], c[forms[0]][what]
    if us is None:
        return "out of memory"
    return milliseconds(us * 1e-6) + (f" ({us / ours:.1f}x)" if ours else "")


def bytes_of_rank(c):
    """As planned; where they were counted and are others, both."""
    if c["ranks"] == 1:
        return ""
    mib = lambda sizes: " and ".join(dict.fromkeys(f"{size / 2**20:.1f} MiB" for size in sizes))
    given = c.get("given_bytes", c["sent_bytes"])
    return mib(c["sent_bytes"]) + ("" if given == c["sent_bytes"] else f" planned, {mib(given)} counted")


NVLINK, INFINIBAND = 450e9, 50e9  # bytes a second and card, one direction


class CardModel:
    """Times of many cards, us: those of one card over their number, what a span adds whatever its length (fitted by
    number of heads), and what the exchange and the fold of each direction take."""

    def __init__(self, report):
        self.cases = {(c["case"], c["ranks"]): c for c in report["cases"]}
        self.key = "libkda_graphs" if "libkda_graphs" in report["cases"][0] else "libkda"
        self.added = {}
        for what in ("forward", "train"):
            rest = {}
            for (case, ranks), c in self.cases.items():
                if ranks > 1 and self.measured(case, ranks, what):
                    rest.setdefault(self.heads(case), []).append(
                        self.measured(case, ranks, what) - self.shared(case, ranks, what))
            self.added[what] = {heads: max(statistics.median(us), 0.0) for heads, us in rest.items()}

    @staticmethod
    def heads(case):
        return int(case.split("--heads ")[1].split()[0])

    def measured(self, case, ranks, what):
        return self.cases[case, ranks][self.key][what]

    def exchange_and_fold(self, case, ranks):
        """Measured alone; without that what the links need."""
        c = self.cases[case, ranks]
        parts = c.get("parts")
        return (parts["exchange"], parts["fold"]) if parts else (1e6 * c["sent_bytes"][0] * (ranks - 1) / NVLINK, 0.0)

    def shared(self, case, ranks, what):
        """All but what a span adds."""
        directions = 1 if what == "forward" else 2
        return self.measured(case, 1, what) / ranks + directions * sum(self.exchange_and_fold(case, ranks))

    def predicted(self, case, ranks, what):
        return self.shared(case, ranks, what) + self.added[what][self.heads(case)]


def table_many_cards_model():
    """The model beside what was measured."""
    report = load("gpu_many_cards")
    model, rows, worst = CardModel(report), [], 0.0
    for case, ranks in sorted(model.cases, key=lambda c: (model.heads(c[0]), c[0], c[1])):
        if ranks == 1:
            continue
        cells = [milliseconds(us * 1e-6) for us in model.exchange_and_fold(case, ranks)]
        for what in ("forward", "train"):
            found, said = model.measured(case, ranks, what), model.predicted(case, ranks, what)
            cells.append(f"{milliseconds(said * 1e-6)}, {milliseconds(found * 1e-6)} ({100 * (said / found - 1):+.0f}%)")
            worst = max(worst, abs(said / found - 1))
        rows.append([f"`{case}`", str(ranks), *cells])
    header = ["case", "GPUs", "exchange", "fold", "forward: model, measured", "forward and backward: model, measured"]
    added = "; ".join(f"{heads} heads {milliseconds(us * 1e-6)} and {milliseconds(model.added['train'][heads] * 1e-6)}"
                      for heads, us in sorted(model.added["forward"].items()))
    return (f"{gpu_of(report)}\n\n{markdown(header, rows)}\n\nA span adds, in a forward and in both: {added}. "
            f"The largest difference is {100 * worst:.0f}%.{source(report)}")


def levels(model, case, cards):
    """Exchange and fold of a direction, us, in one level and in two, machines having eight cards: what a rank receives
    over its slowest link, and the maps that the last rank folds, at the rate of the measured fold."""
    most = max(ranks for name, ranks in model.cases if name == case)
    sent = model.cases[case, most]["sent_bytes"][0]
    exchange, fold = model.exchange_and_fold(case, most)
    inside, a_map = sent * (most - 1) / exchange, fold / (most - 1)  # bytes a us, us
    rate = lambda n: inside if n <= 8 else INFINIBAND / 1e6
    one = sent * (cards - 1) / rate(cards), (cards - 1) * a_map
    if cards <= 8:
        return one, one
    machines = cards // 8
    # Maps of a machine are products of its cards' (each has K + V columns, where a state has V), a card for 1/8 of the
    # heads; then those of the machines before, and at last the cards before in the machine.
    received = sent * 7 / inside + sent / 8 * (machines - 1) / rate(cards) + sent / 2 / inside
    folds = 2 * 7 * a_map / 8 + (machines - 1) * a_map / 8 + 7 * a_map
    return one, (received, folds)


def table_many_cards_beyond():
    """What the model says of more cards than were measured."""
    report = load("gpu_many_cards")
    model, case, rows = CardModel(report), "--seq-lens 128K --heads 16", []
    one = {what: model.measured(case, 1, what) / 4 for what in ("forward", "train")}
    for cards in (8, 16, 64, 256, 1024):
        cells = []
        for level in levels(model, case, cards)[:1 if cards == 8 else 2]:
            cells.append(" and ".join(milliseconds(us * 1e-6) for us in level))
            for what, directions in (("forward", 1), ("train", 2)):
                us = one[what] + model.added[what][16] + directions * sum(level)
                cells.append(f"{milliseconds(us * 1e-6)} ({100 * one[what] / us:.0f}%)")
        rows.append([f"{cards:,}", *cells, *[""] * (6 - len(cells))])
    header = ["cards", "one level: exchange and fold", "forward", "forward and backward",
              "two levels: exchange and fold", "forward", "forward and backward"]
    return markdown(header, rows) + source(report)


def table_gpu_decode():
    """The kernel's time, and FLA's kernel beside it in another run."""
    report, peers = load("gpu_decode"), load("gpu_peers_decode")
    theirs = {c["case"]: c for c in peers["cases"]}
    rows = []
    for c in report["cases"]:
        fla = theirs[c["case"]]
        rows.append([f'`{c["case"]}`', milliseconds(c["median_s"]), f'{1e-9 * c["bytes"] / c["median_s"]:.0f}', of_copies(report, c),
                     f'{milliseconds(fla["fla"] * 1e-6)} ({fla["fla"] / fla["libkda"]:.2f}x)'])
    header = ["case", "median", "GB/s", "of copy", f'FLA {peers["fla"]} (FLA / libkda, in one run)']
    return gpu_heads(report, peers) + markdown(header, rows) + source(report, peers)


def share_of(row, of):
    return f'{row["median_s"] / of["median_s"]:.2f}' if of else ""


def tail_cells(found):
    plain, mixed, folds = (found[what] for what in ("decode", "tail", "tail, all fold"))
    return [microseconds(plain["copy_s"]), microseconds(plain["median_s"]), microseconds(mixed["median_s"]),
            share_of(mixed, plain), microseconds(folds["median_s"]), share_of(folds, plain)]


def verify_cells(found):
    one, slots = found["decode of one token"], found.get("verify, a slot a token")
    mixed, folds = found["verify, tail"], found["verify, tail, all fold"]
    return [microseconds(one["median_s"]), microseconds(slots["median_s"]) if slots else "", microseconds(mixed["median_s"]),
            share_of(mixed, slots), share_of(mixed, one), microseconds(folds["median_s"])]


def table_gpu_tails():
    """Decode, then verify: a row a type of boundary states and a case. A card must have run it once."""
    if not (RESULTS / "gpu_tails.json").exists():
        return "No card has run `./dev gpu-bench tails` yet."
    report, found = load("gpu_tails"), {}
    for row in report["cases"]:
        N, T = (int(re.search(rf"--{name} (\d+)", row["case"])[1]) for name in ("batch", "tokens"))
        found.setdefault(row["set"], {}).setdefault((row["boundary_states"], N, T), {})[row["what"]] = row
    head = ["boundary states", "sequences", "a copy", "decode", "tails of random length", "of decode", "all fold", "of decode"]
    decodes = [[states, str(N), *tail_cells(of)] for (states, N, _), of in found["tails"].items()]
    verify_head = ["boundary states", "sequences, tokens", "decode of one token", "verify, a slot a token", "verify in a tail",
                   "of a slot a token", "of a decode of one", "all fold"]
    verifies = [[states, f"{N}, {T}", *verify_cells(of)] for (states, N, T), of in found["verify"].items()]
    return (gpu_head(report) + markdown(head, decodes) + "\n\nVerify, of whose tokens 3 in 4 are accepted:\n\n"
            + markdown(verify_head, verifies) + source(report))


def table_gpu_python():
    report = load("gpu_python")
    us = lambda x: f"{x:.0f} us"
    heads = list(dict.fromkeys(r["heads"] for r in report["host"]))
    heads, calls = [heads[0], heads[-1]], {}
    for r in filter(lambda r: r["heads"] in heads, report["host"]):
        calls.setdefault(f'{r["function"]}, T {r["tokens"]}', []).extend(
            [us(r["libkda"]), us(r["fla"]), f'{r["fla"] / r["libkda"]:.1f}x'])
    host = [[name, *cells] for name, cells in calls.items()]
    decode = [[f'B {r["batch"]}, H {r["heads"]}', us(r["libkda"]), us(r["libkda_in_place"]),
               us(r["libkda_packed"]), us(r["fla"]),
               f'{r["fla"] / r["libkda"]:.2f}x', us(r["copy"])] for r in report["decode"] if r["heads"] == 32]
    header = ["host time of a call", *sum(([f"H {h}: libkda", "FLA", "FLA / libkda"] for h in heads), [])]
    return (f'{report["device"]}, {report["date"]}; torch {report["torch"]}, fla-core {report["fla"]}\n\n'
            + markdown(header, host) + "\n\n"
            + markdown(["decode step", "fused_recurrent_kda", "in place in a pool", "packed, by index", "FLA", "FLA / libkda", "copy_ of the states"], decode)
            + source(report))


def versions_head(report):
    return f'{gpu_of(report)}; torch {report["torch"]}, triton {report["triton"]}, fla-core {report["fla"]}\n\n'


def table_gpu_fused_decode():
    """A row of heads, a column of sequences: beside a copy, then beside what is not fused."""
    report = load("gpu_fused_decode")
    found = {(c["heads"], c["batch"]): c for c in report["cases"]}
    heads, batches = (list(dict.fromkeys(key[i] for key in found)) for i in (0, 1))
    heads = heads[::2]
    shown = batches[::2] + batches[-1:]  # the file has all powers of two
    unfused = [n for n in shown if "fla" in found[heads[0], n]]
    us = lambda c, name: f"{c[name]:.1f}" if c[name] < 99.95 else f"{c[name]:,.0f}"
    def of_a_copy(c):
        return f'{us(c, "libkda")} ({100 * c["copy"] / c["libkda"]:.0f}%)'
    def of_others(c):
        best = min(("libkda_unfused", "fla"), key=c.get)
        return f'{us(c, best)}{" F" if best == "fla" else ""} ({c[best] / c["libkda"]:.2f}x)'
    def rows(columns, cell):
        return [[str(h), *(cell(found[h, n]) for n in columns)] for h in heads]
    full = [100 * c["copy"] / c["libkda"] for c in found.values() if c["heads"] * c["batch"] >= 2048]
    gains = [min(c["libkda_unfused"], c["fla"]) / c["libkda"] for c in found.values() if "fla" in c]
    return (versions_head(report) + "A step in us, and in percent of the rate of a copy of its bytes:\n\n"
            + markdown(["heads", *(f"batch {n}" for n in shown)], rows(shown, of_a_copy))
            + f"\n\nWhere batch times heads is 2,048 or more: {min(full):.0f}% to {max(full):.0f}%. The same step by kernels "
            "that are not fused,\nthe faster of libkda's and FLA's (F), and its time divided by that of the fused step:\n\n"
            + markdown(["heads", *(f"batch {n}" for n in unfused)], rows(unfused, of_others))
            + f"\n\nLeast {min(gains):.2f}x, most {max(gains):.2f}x." + source(report))


def table_gpu_layer():
    """FLA's layer, the same module served by libkda, and libkda's own functions; as calls, then in a CUDA graph."""
    report, rows = load("gpu_layer"), []
    ways = ("fla", "libkda_fla", "libkda")

    def cells(c, form):
        if form not in c["fla"]:
            return [""] * 5
        us = {way: c[way][form] for way in ways}
        return [*(milliseconds(us[way] * 1e-6) for way in ways), *(f'{us["fla"] / us[way]:.2f}x' for way in ways[1:])]

    for c in report["cases"]:
        what = f'prefill of {c["size"]:,} tokens' if c["kind"] == "prefill" else f'decode, batch {c["size"]}'
        rows.append([f'{c["gate"]}, {what}', *cells(c, "eager"), *cells(c, "graph")])
    names = [f'FLA {report["fla"]}', "its module on libkda", "libkda", "FLA / its module", "FLA / libkda"]
    header = ["gate, call", *names, f"in a graph: {names[0]}", *names[1:]]
    return versions_head(report) + markdown(header, rows) + source(report)


def table_gpu_gated_delta():
    report = load("gpu_gated_delta")
    us = lambda x: milliseconds(x * 1e-6)
    rows = []
    for name, words in (("forward", "forward"), ("training", "forward and backward")):
        for c in report["cases"]:
            t = c[name]
            theirs = [us(t["fla"]), f'{t["fla"] / t["libkda"]:.2f}x'] if "fla" in t else ["refuses", ""]
            rows.append([f'{words}, {c["tokens"]:,} tokens', us(t["libkda"]), *theirs, us(t["written_out"])])
    rows += [[f'decode, batch {c["batch"]}', us(c["libkda"]), us(c["fla"]), f'{c["fla"] / c["libkda"]:.2f}x', ""]
             for c in report["decode"]]
    errors = next(c["error"] for c in report["cases"] if "error" in c)
    refusals = dict.fromkeys(c["refusal"] for c in report["cases"] if "refusal" in c)
    header = ["call", "libkda", f'FLA {report["fla"]}', "FLA / libkda", "libkda, gates written out"]
    return (versions_head(report) + markdown(header, rows)
            + f'\n\nErrors of o against float64: libkda {errors["libkda"]:.1e}, FLA {errors["fla"]:.1e}.'
            + "".join(f"\nFLA says:\n\n{textwrap.fill(text, 150, initial_indent='> ', subsequent_indent='> ')}" for text in refusals)
            + source(report))


def table_gpu_flash_qla():
    """Kernel times of both passes, and the largest difference of their results."""
    report = load("gpu_flash_qla")
    rows = []
    for c in report["cases"]:
        cells = []
        for what in ("forward", "backward"):
            ours, theirs = (c[what][who]["kernels"] for who in ("libkda", "flash_qla"))
            cells += [f"{ours:,.0f}", f"{theirs:,.0f}", f"{ours / theirs:.2f}"]
        rows.append([f'{c["tokens"]:,}, {c["heads"]} / {c["value_heads"]}', f'`{c["implementation"]}`', *cells])
    most = max(x for c in report["cases"] for what in ("forward", "backward") for x in c[what]["difference"].values())
    head = ["tokens, q/k heads / value heads", "forward by", "forward: libkda, us", "FlashQLA, us", "libkda / FlashQLA",
            "backward: libkda, us", "FlashQLA, us", "libkda / FlashQLA"]
    return (f'{gpu_of(report)}; torch {report["torch"]}, flash-qla {report["flash_qla"]}, tilelang {report["tilelang"]}\n\n'
            f"{markdown(head, rows)}\n\nOutputs and gradients of the two differ by {most:.1e} at most.{source(report)}")


def table_gpu_fuzz():
    """Random problems above the bound, of each backend's last day; the last row is that of the GPU tests."""
    report, tested = load("gpu_fuzz"), load("gpu_test")
    rows = []
    last = {r["backend"]: r["date"] for r in report["rows"]}  # rows are by date
    earlier = [r for r in report["rows"] if r["date"] < last[r["backend"]]]
    above = sum(e["count"] for r in earlier for e in r["exceed"])
    for r in report["rows"]:
        if r in earlier:
            continue
        kinds = []
        for e in r["exceed"]:
            worst = f'{e["of"]} {e["worst"]:g}x'.strip() if e["worst"] else ""
            beside = f'staged {e["staged"]:g}x' if e.get("staged") else ""
            sizes = ", ".join(filter(None, (worst, beside)))
            kinds.append(f'{e["count"]}: {e["kind"]}' + (f" ({sizes})" if sizes else ""))
        rows.append([r["date"], r["card"].removeprefix("NVIDIA ").split(" 80GB")[0], f'{r["backend"]}: `{r["flags"]}`',
                     ", ".join(map(str, r["seeds"])), f'{r["count"]:,}', str(sum(e["count"] for e in r["exceed"])),
                     "; ".join(kinds), r["note"]])
    fuzzed = [r for r in tested["rows"] if r["name"].startswith("kda_fuzz")]
    names = ", ".join(f'`{r["name"].removeprefix("kda_fuzz ")}`' for r in fuzzed)
    rows.append([tested["date"], tested["device"].removeprefix("NVIDIA ").split(" 80GB")[0], f"all: {names}", "default",
                 f'{sum(r["cases"] for r in fuzzed):,}', "0" if all(r["ok"] for r in fuzzed) else "some", "", f'`{tested["command"]}`'])
    return markdown(["date", "card", "kernels: flags", "seeds", "problems", "above the bound", "what they are (largest error / bound)", "note"], rows) + (
        f"\n\nEarlier kernels, {earlier[0]['date']} to {earlier[-1]['date']}: {sum(r['count'] for r in earlier):,} problems, {above} above the bound.")


def table_rivals():
    report = load("cpu_rivals")
    instructions = list(dict.fromkeys(r["isa"] for r in report["rows"]))
    found = {(r["method"], r["isa"]): r for r in report["rows"]}
    rows = [[method, *(cell for isa in instructions for cell in (
                 milliseconds(found[method, isa]["median_s"]), f'{found[method, isa]["peak_percent"]:.0f}%',
                 f'{found[method, isa]["libkda_speedup"]:.2f}x')), f'{found[method, instructions[0]]["error"]:.1e}']
            for method in dict.fromkeys(r["method"] for r in report["rows"])]
    head = f'T = {report["tokens"]}, H = {report["heads"]}, K = V = 128, fp32, log gates, {report["threads"]} threads\n\n'
    return head + markdown(["method", *(cell for isa in instructions for cell in (isa, "of peak", "time / libkda")),
                            "error of o"], rows) + source(report)


def table_peers():
    report = load("cpu_peers")
    rows = [[r["name"], milliseconds(r["median_s"]), f'{r["speedup"]:.1f}x', f'{r["error"]:.1e}']
            for r in report["rows"]]
    head = f'T = {report["tokens"]}, H = {report["heads"]}, K = V = 128, fp32, {report["threads"]} threads, torch {report["torch"]}, fla-core {report["fla"]}\n\n'
    return head + markdown(["function", "median", "time / libkda", "difference of o"], rows) + source(report)


def table_summary():
    """A case a row; the numbers of a row are of one run."""
    us = lambda x: milliseconds(1e-6 * x)
    case_of = lambda cases, name: next(c for c in cases if c["case"] == name)
    flagship, size = "--tokens 8192 --heads 64", "8,192 tokens, 64 heads"
    found, names, of_gpus, earlier = [], {"libkda": None}, [], []
    cpu, rivals = load("cpu_forward"), load("cpu_rivals")
    on_cpu = f'{cpu["threads"]} cores of an {cpu["cpu"]}'

    def add(report, label, number, who="", other=None):
        card = report.get("device", "").split(" 80GB")[0] or on_cpu
        names.setdefault(who or "libkda")
        found.append((label, card.removeprefix("NVIDIA "), {"libkda": number, who: other}))
        if "families" in report:
            of_gpus.append(label)
            if of_other_kernels(report):
                earlier.append(label)

    peers = load("gpu_peers_forward")
    fla = f'FLA {peers["fla"]}'
    theirs = lambda case: min(x for x in map(case_of(peers["cases"], case).get, ("fla", "fla_intracard")) if x)
    median = lambda case: milliseconds(case["median_s"])
    ours = lambda case: us(case_of(peers["cases"], case)["libkda"])
    add(peers, f"forward, {size}", ours(flagship), fla, us(theirs(flagship)))
    for lengths, words in (("64K --heads 4", "65,536 tokens, 4 heads"), ("256K --heads 8", "262,144 tokens, 8 heads")):
        case = f"--seq-lens {lengths}"
        add(peers, f"forward, {words}", ours(case), fla, us(theirs(case)))
    others = load("gpu_peers_decode")
    step = next(c for c in others["cases"] if c["case"].startswith("--batch 512"))
    add(others, "decode, batch 512, 32 heads", us(step["libkda"]), fla, us(step["fla"]))
    errors = load("gpu_peers_errors")
    worst = lambda who: f'{max(r[who][0] for r in errors["cases"] if r["dtype"] == "bfloat16"):.1e}'
    add(errors, "error of o, worst of strong, slow and trained gates", worst("libkda"), fla, worst("fla"))
    train, cudnn = load("gpu_peers_train"), load("gpu_cudnn_backward")
    both = case_of(train["cases"], flagship)
    add(train, f"forward and backward, {size}", us(both["libkda"]), f'FLA {train["fla"]}', us(both["fla"]))
    alone = next(r for r in cudnn["backward"] if r["case"] == flagship and r["gates"] == "trained")
    add(cudnn, f"backward alone, {size}", us(alone["libkda"]), "cuDNN", us(alone["cudnn"]))
    ggml = next(r for r in rivals["rows"] if r["method"].startswith("ggml"))
    best = next(r for r in rivals["rows"] if r["method"].startswith("libkda"))
    add(rivals, f'forward in fp32, {rivals["tokens"]:,.0f} tokens, {rivals["heads"]} heads', median(best), "ggml's method", median(ggml))
    rows = [[label, card, *(values.get(name) or "" for name in names)] for label, card, values in found]
    files = ", ".join(f'`{r["file"]}`' for r in (peers, others, errors, train, cudnn, rivals))
    notes = (f"From, row by row, {files}, and the CPU's name from `{cpu['file']}`. cuDNN's forward alone, its time / libkda's by gates: {cudnn_means(load('gpu_cudnn'))} "
             "(geometric means of [ten cases](docs/performance.md#beside-cudnn)).")
    if earlier:
        named = lambda labels: ", ".join(f'"{label}"' for label in labels)
        later = [label for label in of_gpus if label not in earlier]
        all_but = "all rows of GPUs" + (f" but {named(later)}" if later else "")
        rows_of = all_but if len(later) < len(earlier) else f"the rows {named(earlier)}"
        notes += f" Of earlier kernels: {rows_of}."
    return markdown(["", "on", *names], rows, units=True) + "\n\n" + textwrap.fill(notes, 158, break_long_words=False, break_on_hyphens=False)


def transformers_table(name, operation):
    report = load(name)
    names = dict(prefill="the model, a prefill of {} tokens", decode="the model, a token",
                 layer_decode=f"a {operation} layer, a token")
    rows = [[f'{names[r["case"]].format(r["tokens"])}, {r["heads"]} heads',
             *(milliseconds(1e-3 * r["ms"][way]) for way in ("torch", "kda_alone", "libkda")),
             f'{r["times_as_fast"]:.2f}x'] for r in report["rows"]]
    versions = report["versions"]
    head = (f'{report["threads"]} thread of an {report["cpu"]}, fp32; torch {versions["torch"]}, '
            f'transformers {versions["transformers"]}, {report["date"]}\n\n')
    columns = ["case", "torch", f"libkda's {operation} alone", "libkda", "torch / libkda"]
    return head + markdown(columns, rows) + source(report)


def table_cpu_transformers():
    return transformers_table("cpu_transformers", "KDA")


def table_cpu_transformers_gdn():
    return transformers_table("cpu_transformers_gdn", "Gated DeltaNet")


def table_cpu_onnxruntime():
    report = load("cpu_onnxruntime")
    rows = [[name, *(milliseconds(1e-3 * row[f"{which}_ms"]) for which in ("built_in", "libkda")),
             f'{row["times_as_fast"]:.2f}x', f'{row["least_times_as_fast"]:.2f}x'] for name, row in report["rows"].items()]
    head = (f'{report["threads"]} threads of an {report["cpu"]}, {beside_what(report)}, fp32; '
            f'onnxruntime {report["onnxruntime"]}, {report["date"]}\n\n')
    return head + markdown(["case", "built in", "libkda", "built in / libkda", "by minima"], rows) + source(report)


def table_cpu_jax():
    report = load("cpu_jax")
    methods = {"ffi": "`libkda.jax`", "arrays": "`libkda.arrays` in place", "callback": "`jax.pure_callback`", "scan": "a scan in JAX",
               "not_donated": "state not donated", "single_calls": "8 calls"}
    rows = [[name, *(milliseconds(1e-3 * row[way]) if way in row else "" for way in methods)]
            for name, row in report["rows"].items()]
    head = (f'{report["cores"]} cores of an {report["cpu"]}, {beside_what(report)}, fp32, D = 128; JAX {report["jax"]}, '
            f'{report["date"]}\n\n')
    return head + markdown(["case", *methods.values()], rows) + source(report)


def engine_layer_cells(row, default):
    """Both times in us, of a call and in graphs (empty where it could not be captured), and who serves it."""
    def both(us):
        if len(us) < 2:
            return ""
        digits = [f'{us[who]:,.0f}' if us[who] >= 100 else f'{us[who]:.1f}' for who in ("own", "libkda")]
        return f'{" / ".join(digits)} ({us["own"] / us["libkda"]:.2f}x)'
    return [both(row["eager_us"]), both(row["graph_us"]), "libkda" if default else "own"]


def table_gpu_engine_layers():
    if not (RESULTS / "gpu_engine_layers.json").exists():
        return "No card has timed them yet."
    report = load("gpu_engine_layers")
    serves = runpy.run_path(ROOT / "python" / "libkda" / "_plugins" / "measured.py")["serves"]
    by_default = lambda r: serves(r["engine"], r["kind"], r["step"], r["tokens"], r["value_heads"])
    names, steps = dict(vllm="vLLM", sglang="SGLang"), ["prefill", "decode", "verify"]
    order = lambda r: (steps.index(r["step"]), r["value_heads"], r["tokens"])
    versions = ", ".join(f"{names[name]} {version}" for name, version in report["engines"].items())
    text = f'{gpu_of(report)}; torch {report["torch"]}, triton {report["triton"]}; {versions}\n'
    for kind, layer in dict(kda="KDA", gdn="Gated DeltaNet").items():
        found = {}
        for r in sorted((r for r in report["rows"] if r["kind"] == kind), key=order):
            cells = found.setdefault((r["step"], r["case"], f'{r["heads"]} / {r["value_heads"]}'), {})
            cells[r["engine"]] = engine_layer_cells(r, by_default(r))
        rows = [[step, f"{case}; {heads}", *(cell for name in names for cell in cells.get(name, [""] * 3))]
                for (step, case, heads), cells in found.items()]
        header = [layer, "tokens or sequences; q/k / value heads",
                  *(text for name in names.values() for text in (f"{name}: a call", "in a graph", "by default"))]
        text += ("\nOwn / libkda, us:\n\n" if kind == "kda" else "\n\n") + markdown(header, rows)
    return text + source(report)


def table_cpu_ggml():
    report = load("cpu_ggml")
    rows = [[f'{r["tokens"]:,}', f'{r["heads"]} / {r["value_heads"]}', str(r["sequences"]),
             "one a head" if r["gates_a_head"] == 1 else "one a channel",
             *(milliseconds(1e-3 * r[f"{which}_ms"]) for which in ("ggml", "libkda")), f'{r["times_as_fast"]:.1f}x']
            for r in report["rows"]]
    head = (f'Least times of {report["threads"]} threads of an {report["cpu"]}, D = 128, fp32, {beside_what(report)}; '
            f'ggml {report["ggml"]}, {report["date"]}\n\n')
    return head + markdown(["tokens", "q/k / value heads", "sequences", "gates", "ggml", "libkda", "ggml / libkda"],
                           rows) + source(report)


def code(path):
    text = (ROOT / path).read_text()
    body = re.search(r"\[readme\][^\n]*\n(.*?)\n[^\n]*\[readme\]", text, re.S).group(1)
    language = {"cpp": "cpp", "c": "c", "py": "python"}[path.rpartition(".")[2]]
    return f"```{language}\n{textwrap.dedent(body)}\n```"


def table_accuracy():
    report, backward = load("cpu_accuracy"), load("cpu_backward")
    figure = lambda name: f"{report[name]:.1e}"
    names = ("dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "d_initial_state")
    gradients = lambda what: ", ".join(f'{backward[f"fp32_{name}_{what}"]:.1e} ({name})' for name in names)
    rows = [["fp32 in and out, median over heads", "1e-6", f'{figure("fp32_o_median")} (o), {figure("fp32_final_state_median")} (final state)'],
            ["fp32 in and out, worst head", "1e-5", f'{figure("fp32_o_worst")} (o), {figure("fp32_final_state_worst")} (final state)'],
            ["fp32 gradients, median over heads", "1e-6", gradients("median")],
            ["fp32 gradients, worst head", "1e-5; fewer than 16 values (dA_log has one): 1e-4; K of 1 or 2: 1e-4 more; terms that cancel below a hundredth: 1e-7 of their magnitude more", f'{gradients("worst")}; {backward["excepted_few_channels"]:.0f} problems need what K of 1 or 2 adds, {backward["excepted_cancelled"]:.0f} what cancelled terms add'],
            ["bf16 or fp16 stored", "error of the exact result rounded once, plus 2e-5", f'bf16 o: {report["bf16_o_median"]:.2e} median, {report["bf16_o_worst"]:.2e} worst, over heads of at least 16,384 values'],
            ["marginally stable (beta > 1.9 on most tokens)", "max(1e-4, 1e-7 T)", ""],
            ["fewer than 16 values", "1e-4", ""]]
    assert (report["count"], report["seed"]) == (backward["count"], backward["seed"])
    return f'{report["count"]} random problems, seed {report["seed"]}\n\n' + markdown(["case", "bound", "measured"], rows) + source(report, backward)


TABLES = {name[len("table_"):]: function for name, function in list(globals().items())
          if name.startswith("table_")}


def fill(text):
    def block(match):
        kind, name = match.group(1), match.group(2)
        body = TABLES[name]() if kind == "table" else code(name)
        return f"<!-- {kind}: {name} -->\n{body}\n<!-- end -->"

    return re.sub(r"<!-- (table|code): (\S+) -->\n.*?<!-- end -->", block, text, flags=re.S)


def main():
    stale = False
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        old = path.read_text()
        new = fill(old)
        if new != old and "--check" in sys.argv:
            print(f"{path.relative_to(ROOT)}: its tables are not those of bench/results; run bench/report/tables.py")
            stale = True
        elif new != old:
            path.write_text(new)
            print(f"{path.relative_to(ROOT)}: written")
    for path in sorted(RESULTS.glob("*.json")):
        report = json.loads(path.read_text())
        for key in ("date", "command"):  # of the whole, or of each of its rows
            if key not in report and not all(key in row for row in report.get("rows", [{}])):
                print(f"{path.relative_to(ROOT)}: does not say its {key}")
                stale = True
        if path.stem not in loaded | EVIDENCE:
            print(f"{path.relative_to(ROOT)}: no document shows it")
            stale = True
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
