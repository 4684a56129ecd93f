#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the figures of docs/figures from bench/results/*.json.

    bench/report/plots.py           write the figures whose content changed
    bench/report/plots.py --check   exit 1 if a figure would change

Standard library only: the same results give the same bytes on every machine.
"""
import json
import math
import pathlib
import sys
import xml.sax.saxutils

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
FIGURES = ROOT / "docs" / "figures"

# Colours that stand out on a white page as on a dark one.
TEXT, GRID = "#767d86", "#8b949e"
OURS, LIGHT, PEER, OTHER, ROOF = "#2f81f7", "#79b0fb", "#d9822b", "#a371f7", "#8b949e"
FONT = "Helvetica, Arial, 'Liberation Sans', sans-serif"


def load(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def short(seconds):
    """A time with its unit, three digits."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1e-2 else f"{seconds * 1e3:.1f} ms"


def tick_name(seconds):
    return "0" if seconds == 0 else f"{seconds * 1e6:g} us" if seconds < 1e-3 else f"{seconds * 1e3:g} ms"


def card_of(report):
    return report["device"].removeprefix("NVIDIA ")


class Axis:
    """Values to places, linear or logarithmic."""

    def __init__(self, low, high, begin, end, log=False):
        self.log, self.begin, self.end = log, begin, end
        self.low, self.high = (math.log(low), math.log(high)) if log else (low, high)

    def __call__(self, value):
        x = math.log(value) if self.log else value
        return self.begin + (self.end - self.begin) * (x - self.low) / (self.high - self.low)


class Figure:
    """An SVG of fixed size; shapes in the order in which they are drawn."""

    def __init__(self, width, height, title, subtitle):
        self.width, self.height, self.items = width, height, []
        self.label = title
        self.text(0, 18, title, size=16, weight="bold")
        self.text(0, 37, subtitle, size=12)

    @staticmethod
    def attributes(values):
        def show(value):
            if isinstance(value, float):
                return f"{value:.1f}"
            return xml.sax.saxutils.escape(str(value), {'"': "&quot;"})
        return "".join(f' {name.replace("_", "-")}="{show(value)}"' for name, value in values.items())

    def shape(self, name, **values):
        self.items.append(f"<{name}{self.attributes(values)}/>")

    def text(self, x, y, content, size=12, anchor="start", color=TEXT, weight="normal", rotate=0):
        turned = {"transform": f"rotate({rotate} {x:.1f} {y:.1f})"} if rotate else {}
        values = self.attributes({"x": float(x), "y": float(y), "font_size": size, "text_anchor": anchor,
                                  "fill": color, "font_weight": weight, **turned})
        self.items.append(f"<text{values}>{xml.sax.saxutils.escape(content)}</text>")

    def bar(self, x, y, width, height, color):
        self.shape("rect", x=float(x), y=float(y), width=float(width), height=float(height), fill=color, rx=1.5)

    def line(self, x1, y1, x2, y2, color=GRID, width=1.0, dash="none", opacity=1):
        self.shape("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), stroke=color, stroke_width=width,
                   stroke_dasharray=dash, stroke_opacity=opacity)

    def curve(self, points, color, width=2.2, dash="none"):
        self.shape("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), fill="none", stroke=color,
                   stroke_width=width, stroke_dasharray=dash, stroke_linejoin="round")
        for x, y in points if dash == "none" else ():
            self.dot(x, y, color, 3.0)

    def dot(self, x, y, color, radius=4.5, hollow=False):
        self.shape("circle", cx=float(x), cy=float(y), r=radius, fill="none" if hollow else color, stroke=color,
                   stroke_width=2.0 if hollow else 0)

    def key(self, x, y, entries, step=None):
        """Names in their colours, beside each other."""
        for name, color in entries:
            self.bar(x, y - 9, 10, 10, color)
            self.text(x + 15, y, name)
            x += step or 30 + 6.3 * len(name)

    def svg(self):
        head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-12 -6 {self.width + 24} {self.height + 12}" '
                f'width="{self.width + 24}" height="{self.height + 12}" font-family="{FONT}" role="img" '
                f'aria-label="{xml.sax.saxutils.escape(self.label)}">')
        return "\n".join([head, *self.items, "</svg>"]) + "\n"


def time_ticks(figure, axis, ticks, top, bottom, label):
    for tick in ticks:
        figure.line(axis(tick), top, axis(tick), bottom, opacity=0.35)
        figure.text(axis(tick), bottom + 16, tick_name(tick), anchor="middle", size=11)
    figure.text((axis.begin + axis.end) / 2, bottom + 34, label, anchor="middle")


def first_of(report, case):
    return next(c for c in report["cases"] if c["case"] == case)


def words_of(case):
    """A case of the command line in words."""
    flags = dict(pair.split(" ", 1) for pair in case.removeprefix("--").split(" --"))
    many = flags.get("seq-lens", "")
    if many.count(",") >= 5:
        tokens = f"{many.count(',') + 1} uneven sequences"
    elif many:
        parts = [part.split("x") for part in many.split(",")]
        tokens = ", ".join(" x ".join(f"{int(n):,}" if n.isdigit() else n for n in part) for part in parts) + " tokens"
    else:
        batch = flags.get("batch", "1")
        tokens = (f"{batch} x " if batch != "1" else "") + f'{int(flags["tokens"]):,} tokens'
    heads = flags["heads"] + (f'/{flags["value-heads"]}' if "value-heads" in flags else "")
    return f"{tokens}, {heads} heads" + (", K 64" if flags.get("key-dim") == "64" else "")


# ---- figures -----------------------------------------------------------------------------------

def figure_forward():
    """Beside FLA in one run, and a copy of the call's bytes."""
    report, bytes_of = load("gpu_peers_forward"), {}
    for source in ("gpu_fused", "gpu_context_parallel"):
        bytes_of |= {c["case"]: c["bytes"] for c in load(source)["cases"]}
    cases = ["--tokens 8192 --heads 64", "--seq-lens 8x1024 --heads 64", "--tokens 8192 --heads 96",
             "--tokens 8192 --heads 16", "--seq-lens 64K --heads 4", "--seq-lens 64K --heads 8",
             "--seq-lens 64K --heads 16"]
    left, row, top = 190, 46, 78
    bottom = top + row * len(cases) - 8
    figure = Figure(860, bottom + 42, "Forward: one call, bf16, K = V = 128",
                    f'{card_of(report)}, {report["date"]}; FLA {report["fla"]} chunk_kda in one run, '
                    "calls without a pause; gates as trained")
    figure.key(left, 60, [("copy of the call's bytes", ROOF), ("libkda", OURS), ("FLA", PEER)])
    time = Axis(0, 5.5e-3, left, 770)
    time_ticks(figure, time, [i * 1e-3 for i in range(6)], top - 4, bottom, "time of a call")
    for i, case in enumerate(cases):
        r, y = first_of(report, case), top + i * row
        ours, theirs = r["libkda"] * 1e-6, r["fla"] * 1e-6
        figure.text(left - 10, y + 22, words_of(case), anchor="end")
        for j, (seconds, color, label) in enumerate((
                (bytes_of[case] / report["copy_bytes_per_second"], ROOF, ""),
                (ours, OURS, f"{short(ours)}, {r['speedup']:.1f}x"),
                (theirs, PEER, short(theirs)))):
            figure.bar(left, y + j * 12, time(seconds) - left, 10, color)
            if label:
                figure.text(time(seconds) + 6, y + j * 12 + 9, label, size=11, color=color)
    return figure


def copy_key(figure, report):
    figure.bar(200, 51, 10, 10, OURS)
    figure.text(215, 60, "libkda")
    figure.line(275, 48, 275, 64, ROOF, 3.0)
    figure.text(282, 60, "a copy of the bytes that the call reads and writes, at "
                f'{report["copy_bytes_per_second"] * 1e-12:.2f} TB/s; in percent of its rate')


def bars_against_copy(figure, report, groups, left, top, limit, ticks):
    """Bars of times; a mark where a copy of the call's bytes would be."""
    time, y = Axis(0, limit, left, 760), top
    rows = sum(len(rows) for _, rows in groups)
    bottom = top + 19 * rows + 26 * len(groups) - 4
    time_ticks(figure, time, ticks, top, bottom, "time of a call")
    for name, rows in groups:
        figure.text(left, y + 13, name, weight="bold")
        y += 22
        for label, c in rows:
            seconds, copy = c["median_s"], c["bytes"] / report["copy_bytes_per_second"]
            figure.text(left - 10, y + 11, label, anchor="end")
            figure.bar(left, y + 1, time(seconds) - left, 12, OURS)
            figure.line(time(copy), y + 1, time(copy), y + 13, "#ffffff", 6.0)
            figure.line(time(copy), y - 2, time(copy), y + 16, ROOF, 3.0)
            figure.text(time(seconds) + 8, y + 11, f"{short(seconds)}, {100 * copy / seconds:.0f}%", size=11)
            y += 19
        y += 4


def figure_shapes():
    forward = load("gpu_forward")
    by_case = {c["case"]: c for c in forward["cases"]}
    sets = [("many heads or sequences",
             ["--tokens 8192 --heads 64", "--seq-lens 8x1024 --heads 64",
              "--seq-lens 1300,547,2048,963,271,3063 --heads 64", "--tokens 8192 --heads 96",
              "--tokens 8192 --heads 32 --value-heads 64", "--seq-lens 8x2048 --heads 16"]),
            ("few heads: cut into segments",
             [f"--tokens {tokens} --heads {heads}" for tokens, heads in (
                 (8192, 24), (8192, 16), (4096, 12), (4096, 8), (2048, 12), (1024, 4))]),
            ("K = V = 64", [f"--tokens 8192 --heads {h} --key-dim 64 --value-dim 64" for h in (128, 64, 16)]),
            ("fp16", [f"--tokens 8192 --heads {h} --dtype fp16" for h in (64, 16)])]
    groups = [(name, [(words_of(c.replace(" --dtype fp16", "")), by_case[c]) for c in cases]) for name, cases in sets]
    figure = Figure(860, 533, "Forward against the roofline, by shape",
                    f'{card_of(forward)}, {forward["date"]}; bf16, K = V = 128 and gates as trained unless said')
    copy_key(figure, forward)
    bars_against_copy(figure, forward, groups, 200, 72, 500e-6, [i * 1e-4 for i in range(6)])
    return figure


def figure_gates():
    fused = load("gpu_fused")
    by_case = {c["case"]: c for c in fused["cases"] if c["backend"] == "fused"}
    regimes = ["strong", "slow", "mixed", "trained", "trained-softplus", "softplus"]
    groups = []
    for heads, size, flags in ((64, 128, ""), (128, 64, " --key-dim 64 --value-dim 64")):
        name, shape = f"8,192 tokens, {heads} heads, K = V = {size}", f"--tokens 8192 --heads {heads}{flags}"
        rows = [(r, by_case.get(f"{shape} --regime {r}", by_case[shape])) for r in regimes]
        groups.append((name, rows))
    figure = Figure(860, 385, "Forward by gate regime",
                    f'{card_of(fused)}, {fused["date"]}; bf16, fused kernel, without segments')
    copy_key(figure, fused)
    bars_against_copy(figure, fused, groups, 200, 72, 400e-6, [i * 1e-4 for i in range(5)])
    return figure


def panel(figure, x, y, width, height, xs, ys, x_range, y_range, name, x_name):
    """A log-log panel with its grid; returns both axes."""
    across, up = Axis(*x_range, x, x + width, log=True), Axis(*y_range, y + height, y, log=True)
    for value, label in xs:
        figure.line(across(value), y, across(value), y + height, opacity=0.25)
        figure.text(across(value), y + height + 15, label, anchor="middle", size=11)
    for value in ys:
        figure.line(x, up(value), x + width, up(value), opacity=0.25)
    figure.text(x, y - 8, name, weight="bold")
    figure.text(x + width / 2, y + height + 32, x_name, anchor="middle")
    return across, up


def figure_segments():
    report = load("gpu_context_parallel")
    lengths = [4, 8, 16, 32, 64, 128, 256]
    found = {}
    for off, on in zip(report["cases"][::2], report["cases"][1::2]):
        found[off["case"]] = (off, on)
    figure = Figure(860, 364, "One long sequence: segments off and on",
                    f'{card_of(report)}, {report["date"]}; bf16, K = V = 128, gates as trained')
    figure.key(58, 60, [("off", PEER), ("auto", OURS), ("copy of the call's bytes", ROOF)])
    ys = [1e-5, 1e-4, 1e-3, 1e-2]
    width, height, top = 235, 230, 100
    for i, heads in enumerate((4, 8, 16)):
        x = 58 + i * (width + 38)
        across, up = panel(figure, x, top, width, height, [(n, f"{n}K") for n in lengths], ys, (3.6, 285),
                           (5e-6, 1.2e-2), f"{heads} heads", "tokens")
        if i == 0:
            for value in ys:
                figure.text(x - 8, up(value) + 4, tick_name(value), anchor="end", size=11)
        rows = [found[f"--seq-lens {n}K --heads {heads}"] for n in lengths]
        copy = [on["bytes"] / report["copy_bytes_per_second"] for _, on in rows]
        places = [across(n) for n in lengths]
        figure.curve([(a, up(s)) for a, s in zip(places, copy)], ROOF, 2.0, "5 4")
        figure.curve([(a, up(off["median_s"])) for a, (off, _) in zip(places, rows)], PEER)
        figure.curve([(a, up(on["median_s"])) for a, (_, on) in zip(places, rows)], OURS)
        for n in (0, 3, 6):
            off, on = rows[n]
            figure.text(places[n], up(off["median_s"]) - 9, f'{off["median_s"] / on["median_s"]:.1f}x',
                        anchor="middle" if n < 6 else "end", size=11, color=OURS, weight="bold")
    return figure


def figure_errors():
    report, cudnn, rounding = load("gpu_peers_errors"), load("gpu_cudnn"), load("cpu_accuracy")
    figure = Figure(860, 346, "Errors against float64, beside FLA and cuDNN",
                    f'{card_of(report)}, {report["date"]}; 2,048 tokens, 4 heads, K = V = 128; all heads; '
                    f'FLA {report["fla"]}')
    figure.key(90, 62, [("libkda", OURS), ("libkda, staged, in 4 segments", LIGHT), ("FLA", PEER), ("cuDNN", OTHER)])
    theirs = {c["gates"]: c["cudnn"] for c in cudnn["errors"] if c["case"] == "T 2048, H 4"}
    panels = [("bfloat16", 0, "o, bf16"), ("bfloat16", 1, "final state, bf16"),
              ("float16", 0, "o, fp16"), ("float16", 1, "final state, fp16")]
    for i, (dtype, which, name) in enumerate(panels):
        x, y, width = 90 + i % 2 * 400, 102 + i // 2 * 132, 350
        high, ticks = (6e-3, [0, 2e-3, 4e-3, 6e-3]) if dtype == "bfloat16" else (1e-3, [0, 2.5e-4, 5e-4, 7.5e-4, 1e-3])
        across = Axis(0, high, x, x + width)
        figure.text(x, y - 8, name, weight="bold")
        for tick in ticks:
            figure.line(across(tick), y, across(tick), y + 72, opacity=0.3)
            figure.text(across(tick), y + 88, f"{tick * 1e3:g}e-3" if tick else "0", anchor="middle", size=11)
        if dtype == "bfloat16" and which == 0:
            place = across(rounding["bf16_o_median"])
            figure.line(place, y - 4, place, y + 72, ROOF, 2.0, "4 3")
            figure.text(place + 4, y - 8, "the exact result, rounded to bf16", size=11)
        for j, gates in enumerate(("strong", "slow", "trained")):
            r = next(c for c in report["cases"]
                     if c["dtype"] == dtype and c["gates"] == gates and c["case"] == "T 2048, H 4")
            level = y + 14 + j * 24
            if i % 2 == 0:
                figure.text(x - 10, level + 4, gates, anchor="end")
            figure.line(x, level, x + width, level, opacity=0.2)
            if j == 2 and dtype == "float16":
                figure.text(x + width / 2, y + 106, "|x - ref| / |ref|", anchor="middle")
            if dtype == "bfloat16":
                figure.dot(across(theirs[gates][which]), level, OTHER)
            figure.dot(across(r["fla"][which]), level, PEER)
            figure.dot(across(r["libkda_cp"][which]), level, LIGHT, hollow=True)
            figure.dot(across(r["libkda"][which]), level, OURS)
    return figure


def bars_of_pairs(figure, left, width, top, limit, ticks, name, rows):
    """Bars of two times a row, (label, ours, theirs or None, their colour), in seconds."""
    time, row = Axis(0, limit, left, left + width), 40
    bottom = top + row * len(rows) - 6
    figure.text(left, top - 12, name, weight="bold")
    time_ticks(figure, time, ticks, top - 4, bottom, "time of a call")
    for i, (label, ours, theirs, color) in enumerate(rows):
        y = top + i * row
        figure.text(left - 8, y + 18, label, anchor="end", size=11)
        figure.bar(left, y + 2, time(ours) - left, 13, OURS)
        gain = f", {theirs / ours:.2f}x" if theirs else ""
        figure.text(time(ours) + 6, y + 13, short(ours) + gain, size=11, color=OURS)
        if theirs:
            figure.bar(left, y + 17, time(theirs) - left, 13, color)
            figure.text(time(theirs) + 6, y + 28, short(theirs), size=11, color=color)
        else:
            figure.text(left + 6, y + 28, "declines", size=11, color=color)


def figure_training():
    """A backward alone beside cuDNN, and a forward with its backward beside FLA."""
    alone, both = load("gpu_cudnn_backward"), load("gpu_peers_train")
    most = max(len(both["cases"]), sum(r["gates"] == "trained" for r in alone["backward"]))
    figure = Figure(860, 132 + 40 * most, "Training: the backward alone, and a forward with its backward",
                    f'{card_of(alone)}, {max(alone["date"], both["date"])}; bf16, K = V = 128 unless said, gates as trained; '
                    f'nvidia-cudnn-frontend {alone["cudnn_frontend"]}, FLA {both["fla"]}')
    figure.key(150, 60, [("libkda", OURS), ("cuDNN", OTHER), ("FLA", PEER)])
    rows = [(words_of(r["case"]), r["libkda"] * 1e-6, r["cudnn"] * 1e-6 if "cudnn" in r else None, OTHER)
            for r in alone["backward"] if r["gates"] == "trained"]
    bars_of_pairs(figure, 150, 230, 98, 4e-3, [i * 1e-3 for i in range(5)], "backward alone, beside cuDNN", rows)
    rows = [(words_of(r["case"]), r["libkda"] * 1e-6, r["fla"] * 1e-6, PEER) for r in both["cases"]]
    bars_of_pairs(figure, 590, 200, 98, 18e-3, [0, 5e-3, 1e-2, 15e-3], "forward and backward, beside FLA", rows)
    return figure


def figure_decode():
    peers, python = load("gpu_peers_decode"), load("gpu_python")
    plain = {c["case"]: c for c in load("gpu_decode")["cases"]}
    figure = Figure(860, 364, "Decode: one token a sequence, 32 heads, fp32 states",
                    f'K = V = 128, bf16; FLA {peers["fla"]} fused_recurrent_kda in one run')
    figure.key(62, 60, [("copy of the states", ROOF), ("libkda", OURS), ("FLA", PEER)])
    one_token = [c for c in peers["cases"] if "--tokens 1 " in c["case"]]
    batch_of = lambda c: int(c["case"].split()[1])
    kernel = [(batch_of(c), c["libkda"], c["fla"], plain[c["case"]]["copy_s"] * 1e6) for c in one_token]
    call = [(r["batch"], r["libkda_in_place"], r["fla"], r["copy"]) for r in python["decode"] if r["heads"] == 32]
    panels = [(kernel, f'time on the device, {card_of(peers)}, {peers["date"]}'),
              (call, f'step from Python, in place, {card_of(python)}, {python["date"]}')]
    for i, (rows, name) in enumerate(panels):
        x = 62 + i * 410
        batches = [1, 4, 16, 64, 256] + ([512] if i == 0 else [])
        across, up = panel(figure, x, 100, 370, 230, [(b, str(b)) for b in batches], [1e1, 1e2, 1e3], (0.85, 620),
                           (5, 1e3), name, "sequences")
        for value in (10, 100, 1000) if i == 0 else ():
            figure.text(x - 8, up(value) + 4, tick_name(value * 1e-6), anchor="end", size=11)
        for column, color in ((3, ROOF), (2, PEER), (1, OURS)):
            figure.curve([(across(r[0]), up(r[column])) for r in rows], color, 2.2, "5 4" if column == 3 else "none")
        for r in (rows[0], rows[-1]):
            figure.text(across(r[0]), up(r[2]) - 10, f"{r[2] / r[1]:.1f}x",
                        anchor="start" if r is rows[0] else "middle", size=11, color=OURS, weight="bold")
    return figure


def bars_of_ways(figure, left, width, top, limit, ticks, name, rows):
    """Bars of three times a row: (label, FLA, its module on libkda, libkda), in seconds."""
    time, row = Axis(0, limit, left, left + width), 44
    bottom = top + row * len(rows) - 6
    figure.text(left, top - 12, name, weight="bold")
    time_ticks(figure, time, ticks, top - 4, bottom, "time of a call")
    for i, (label, *times) in enumerate(rows):
        y = top + i * row
        figure.text(left - 8, y + 22, label, anchor="end", size=11)
        for j, (seconds, color) in enumerate(zip(times, (PEER, LIGHT, OURS))):
            figure.bar(left, y + 1 + 12 * j, time(seconds) - left, 10, color)
            gain = f", {times[0] / seconds:.2f}x" if j else ""
            figure.text(time(seconds) + 5, y + 10 + 12 * j, short(seconds) + gain, size=10, color=color)


def dots_of_steps(figure, left, top, xs, ticks, limit, name, points, begin, mark):
    """A dot for each (sequences x heads, value); from `begin` on, a line at the value that is asked for."""
    width, height = 350, 170
    across, up = Axis(xs[0] * 0.8, xs[-1] * 1.25, left, left + width, log=True), Axis(0, limit, top + height, top)
    figure.text(left, top - 12, name, weight="bold")
    for value, label in ticks:
        figure.line(left, up(value), left + width, up(value), opacity=0.25)
        figure.text(left - 6, up(value) + 4, label, anchor="end", size=11)
    for x in xs:
        figure.text(across(x), top + height + 16, f"{x:,}", anchor="middle", size=11)
    figure.text(left + width / 2, top + height + 34, "sequences x heads", anchor="middle")
    figure.line(across(begin), up(mark), left + width, up(mark), ROOF, 2.0, "5 4")
    for x, y in points:
        figure.dot(across(x), up(y), OURS, 3.0)


def figure_layer():
    """A layer beside FLA's, and the fused decode step beside a copy and beside kernels that are not fused."""
    report, steps = load("gpu_layer"), load("gpu_fused_decode")
    figure = Figure(860, 690, "A whole KDA layer: hidden size 2,304, 32 heads of 128, bf16",
                    f'{card_of(report)}, {report["date"]}; FLA {report["fla"]} KimiDeltaAttention in one run')
    figure.key(110, 60, [("FLA's layer", PEER), ("the same module on libkda", LIGHT), ("libkda's functions", OURS)], step=190)
    ways = ("fla", "libkda_fla", "libkda")
    form = {"prefill": "eager", "decode": "graph"}
    rows = {kind: [(f'{c["gate"]}, {c["size"]:,}', *(c[way][form[kind]] * 1e-6 for way in ways))
                   for c in report["cases"] if c["kind"] == kind] for kind in form}
    for kind, left, width, name in (("prefill", 110, 230, "prefill of 1,024 and 8,192 tokens, from Python"),
                                    ("decode", 530, 230, "decode of 1, 16, 64 sequences, in a CUDA graph")):
        step, count = step_of(max(max(times) for _, *times in rows[kind]))
        bars_of_ways(figure, left, width, 98, step * count, [i * step for i in range(count + 1)], name, rows[kind])
    size = lambda c: c["heads"] * c["batch"]
    dots_of_steps(figure, 60, 462, [3, 16, 64, 256, 2048, 8192, 49152], [(i / 4, f"{25 * i}%") for i in range(5)], 1.1,
                  f"fused decode step: rate of a copy ({card_of(steps)})",
                  [(size(c), c["copy"] / c["libkda"]) for c in steps["cases"]], 2048, 0.9)
    dots_of_steps(figure, 500, 462, [3, 16, 64, 256, 1536], [(i, f"{i}x") for i in range(3)], 2.3,
                  "fused step: gain over the faster of unfused ones",
                  [(size(c), min(c["libkda_unfused"], c["fla"]) / c["libkda"]) for c in steps["cases"] if "fla" in c], 3, 1.3)
    return figure


def step_of(most):
    """A round distance of ticks, and how many reach `most`."""
    step = 10.0 ** math.floor(math.log10(most))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if s * 5 >= most)
    return step, math.ceil(most / step)


def losses_of(name, title, model, peer, peer_name):
    """Losses of two implementations by step, from a result of bench/train/loss_curve.py."""
    report = load(name)
    rows = {r["implementation"]: r for r in report["cases"]}
    steps = report["steps"]
    figure = Figure(860, 364, title,
                    f'{card_of(report)}, {report["date"]}; {model}, width {report["width"]}, {report["layers"]} '
                    f'layers, {report["batch"]} x {report["tokens"]} bytes a step, bf16; {peer_name} {report[peer]}')
    names = {who: f'{name}, {1e3 * rows[who]["seconds_a_step"]:.1f} ms a step'
             for who, name in ((peer, peer_name), ("libkda", "libkda"))}
    figure.key(62, 60, [(names[peer], PEER), (names["libkda"], OURS)], step=220)
    across, up = Axis(0, steps, 62, 820), Axis(0, 8, 320, 90)
    for value in range(0, 9, 2):
        figure.line(62, up(value), 820, up(value), opacity=0.25)
        figure.text(54, up(value) + 4, str(value), anchor="end", size=11)
    for value in range(0, steps + 1, 50):
        figure.text(across(value), 336, str(value), anchor="middle", size=11)
    figure.text(441, 354, "step", anchor="middle")
    figure.text(62, 84, "bits a byte", size=11)
    figure.text(820, 84, "means of 10 steps", anchor="end", size=11)
    for who, color, width in ((peer, PEER, 5.0), ("libkda", OURS, 2.0)):
        losses = rows[who]["losses"]
        means = [(first + 5, sum(losses[first:first + 10]) / 10) for first in range(0, steps, 10)]
        figure.curve([(across(i), up(x)) for i, x in means], color, width)
    return figure


def figure_loss():
    return losses_of("gpu_loss_curve", "Training with libkda and with FLA: the same losses", "examples/language_model",
                     "fla", "FLA")


def figure_loss_gdn():
    return losses_of("gpu_loss_curve_gdn", "Training a Gated DeltaNet hybrid with libkda and in torch: the same losses",
                     "bench/train/hybrid.py", "torch", "torch")


def figure_many_cards():
    report = load("gpu_many_cards")
    found = {(c["case"], c["ranks"]): c for c in report["cases"]}
    cases = dict.fromkeys(c["case"] for c in report["cases"])
    ranks = sorted({c["ranks"] for c in report["cases"]} - {1})
    forms = [(key, name, color) for key, name, color in (
        ("libkda", "call by call", LIGHT), ("libkda_graphs", "in a CUDA graph", OURS)) if key in report["cases"][0]]
    step = 8 + 13 * len(forms)
    top, height = 104, len(cases) * (len(ranks) * step + 6)
    figure = Figure(860, top + height + 42, "One sequence over several GPUs",
                    f'{card_of(report)}, {report["date"]}; bf16, K = V = 128, gates as trained; speed against one GPU')
    figure.key(0, 62, [(name, color) for _, name, color in forms] + [("as many times as GPUs", ROOF)])
    for x, what, title in ((210, "forward", "forward"), (550, "train", "forward and backward")):
        speed, y = Axis(0, max(ranks), x, x + 250), top
        figure.text(x, top - 12, title, weight="bold")
        for tick in range(max(ranks) + 1):
            figure.line(speed(tick), top - 4, speed(tick), top + height - 6, opacity=0.35)
            figure.text(speed(tick), top + height + 10, f"{tick}x", anchor="middle", size=11)
        for case in cases:
            for n in ranks:
                if what == "forward":
                    figure.text(x - 10, y + step / 2, f"{words_of(case)}, {n} GPUs", anchor="end", size=11)
                for i, (key, _, color) in enumerate(forms):
                    one, us = (found[case, m][key][what] for m in (1, n))
                    if one and us:
                        figure.bar(x, y + 13 * i, speed(one / us) - x, 11, color)
                        figure.text(speed(one / us) + 5, y + 13 * i + 9, f"{100 * one / us / n:.0f}%", size=11)
                figure.line(speed(n), y - 2, speed(n), y + 13 * len(forms), ROOF, 3.0)
                y += step
            y += 6
    return figure


FIGURE_FUNCTIONS = {name[len("figure_"):]: function for name, function in list(globals().items())
                    if name.startswith("figure_")}


def main():
    stale = False
    for name, draw in FIGURE_FUNCTIONS.items():
        path, new = FIGURES / f"{name}.svg", draw().svg()
        if path.exists() and path.read_text() == new:
            continue
        if "--check" in sys.argv:
            print(f"{path.relative_to(ROOT)}: not what bench/results gives; run bench/report/plots.py")
            stale = True
        else:
            FIGURES.mkdir(parents=True, exist_ok=True)
            path.write_text(new)
            print(f"{path.relative_to(ROOT)}: written")
    for path in sorted(FIGURES.glob("*.svg")):
        if path.stem not in FIGURE_FUNCTIONS:
            print(f"{path.relative_to(ROOT)}: bench/report/plots.py does not draw it")
            stale = True
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
