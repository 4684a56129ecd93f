# SPDX-License-Identifier: Apache-2.0
"""Layers of vLLM and SGLang with the Triton kernels of their wheels, beside the same layers on libkda's kernels; and
the parts of the benchmark that times both, `bench/engine_layers.py`."""
import contextlib
import functools
import json
import pathlib
import subprocess
import sys
import types
import zipfile

import engine_sources
import pytest
import torch

import libkda.vllm

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).resolve().parent
FETCHED = all(engine_sources.folder_of(name, part) for name in engine_sources.WHEELS for part in ("", "-kernels"))
fetched = pytest.mark.skipif(not FETCHED, reason="KDA_ENGINES names no folder with the engines' layers and kernels: "
                             "python/tests/engine_sources.py FOLDER fetches them")


def steps_of(*arguments):
    """Lines of engine_steps.py, in a process of its own: it decides where Triton's kernels run."""
    run = subprocess.run([sys.executable, str(HERE / "engine_steps.py"), *arguments], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


@fetched
@pytest.mark.parametrize("pool", [(), ("--bf16-pool",)], ids=["fp32 pool", "bf16 pool"])
@pytest.mark.parametrize("engine", engine_sources.WHEELS)
def test_steps_of_layers(engine, device, pool):
    """Outputs and states by the engine's own kernels and by libkda's, from equal memory, with padded rows."""
    if device == "cpu" and pool:
        pytest.skip("Triton's interpreter is slow: a CPU tries pools in fp32, a GPU both types")
    sizes = ["--heads", "8", "--dim", "128", "--lengths", "300", "70", "3"]
    if device == "cpu":
        sizes = ["--heads", "1", "--dim", "16", "--lengths", "20", "3"]
    rows = steps_of("--engine", engine, "--device", device, *sizes, *pool)
    assert {row["step"] for row in rows} == {"prefill", "decode", "verify"}
    bound = 2e-2 if device == "cuda" else 1e-6
    for row in rows:
        assert row["served"].startswith("libkda: "), row
        assert all(x < bound for x in row["libkda"] + row.get("other_lengths", [])), row
        if device == "cpu" and row["step"] == "prefill":
            assert row["own"].startswith("not on a CPU: "), row  # the interpreter cannot run it
            continue
        if pool and (row["engine"], row["kind"], row["step"]) == ("vllm", "kda", "prefill"):
            assert row["own"].startswith("not with this pool: "), row  # vLLM would put fp32 states into it
            continue
        assert all(x < bound for x in row["own"] + row["apart"]), row
        if device == "cuda" and row["step"] != "prefill":
            assert row["own_graph"] is True and row["libkda_graph"] is True, row
        if device == "cuda" and "other_lengths" in row:  # a replay has them
            assert row["libkda_graph"] is True, row
    assert engine != "vllm" or sum("other_lengths" in row for row in rows) == len(rows) // 3


def test_a_step_that_the_engine_does_not_serve(monkeypatch):
    """Its reason is in the place of distances, and libkda's are beside float64's. Another error is one."""
    pytest.importorskip("triton")
    import engine_steps as steps
    monkeypatch.setattr(steps, "on_a_gpu", lambda: False)
    memory, refusal, who = torch.zeros(3), RuntimeError(
        "Index put requires the source and destination dtypes match, got BFloat16 for the destination"), []

    @contextlib.contextmanager
    def turn_of(name):
        who.append(name)
        yield

    def run():
        if who[-1] == "own":
            raise refusal
        memory.add_(1)
        return torch.ones(2)

    monkeypatch.setattr(steps, "ways", lambda layer: {
        name: functools.partial(turn_of, name) for name in ("own", "libkda")})
    layer = types.SimpleNamespace(plugin=types.SimpleNamespace(last_path=lambda: "libkda: x"))
    step = steps.Step(run, [memory], lambda: (torch.ones(2).double(), torch.ones(3).double()), lambda: memory)
    report = steps.compared(layer, step)
    assert report == dict(own=f"not with this pool: {refusal}", libkda=[0, 0], served="libkda: x")
    refusal = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        steps.compared(layer, step)


def test_what_is_fetched(monkeypatch, tmp_path):
    """Layers and kernels, each once; what is missing comes again and leaves the rest alone."""
    downloads = []

    def download(command, check):
        name = command[-1].partition("==")[0]
        downloads.append(name)
        with zipfile.ZipFile(pathlib.Path(command[command.index("-d") + 1], "x.whl"), "w") as wheel:
            for file in [*engine_sources.FILES[name], *engine_sources.KERNELS[name], "other.py"]:
                wheel.writestr(file, "new")

    monkeypatch.setattr(engine_sources.subprocess, "run", download)
    monkeypatch.setenv("KDA_ENGINES", str(tmp_path))
    for expected in (["vllm", "sglang"], []):
        downloads.clear()
        engine_sources.fetch(tmp_path)
        assert downloads == expected
    layers, kernels = (engine_sources.folder_of("vllm", part) for part in ("", "-kernels"))
    assert all((layers / file).exists() for file in engine_sources.FILES["vllm"])
    assert len(list(tmp_path.iterdir())) == 4 and not list(tmp_path.rglob("other.py"))
    lost = kernels / engine_sources.KERNELS["vllm"][0]
    lost.unlink()
    (layers / engine_sources.FILES["vllm"][0]).write_text("old")
    engine_sources.fetch(tmp_path)
    assert downloads == ["vllm"] and lost.exists()
    assert (layers / engine_sources.FILES["vllm"][0]).read_text() == "old"


# ---- the benchmark ---------------------------------------------------------------------------------------------------

@pytest.fixture
def bench(monkeypatch):
    if not (ROOT / "bench").exists():
        pytest.skip("bench/ is not in the source distribution, whose tests these are too")
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import engine_layers
    return engine_layers


def test_cases_have_names(bench):
    cases = list(bench.cases())
    names = [(kind, step, bench.case_name(step, size, 4), heads) for kind, step, size, heads, _ in cases]
    assert len(set(names)) == len(names)
    assert ("kda", "prefill", "32,768 + 1,024", 8) in names and ("gdn", "verify", "16 of 4 drafts", 16) in names
    assert ("kda", "prefill", "65,536 + 8 x 1,024", 8) in names and ("kda", "decode", "256", 32) in names
    quick = list(bench.cases(quick=True))
    assert {case[:2] for case in quick} == {case[:2] for case in cases} and quick == cases[:len(quick)]
    assert [case[1] for case in quick] == (["prefill"] * 2 + ["decode"] * 3 + ["verify"]) * 2


def test_a_result_without_hashes_is_refused(bench, tmp_path, capsys):
    """Before anything is measured."""
    arguments = ["--binaries", str(tmp_path), "--json", "x.json"]
    with pytest.raises(SystemExit):
        bench.parsed(arguments)
    assert f"--json needs --binaries with the folder of the build: {tmp_path} has no" in capsys.readouterr().err
    (tmp_path / "kernel_hashes.json").write_text("{}")
    assert bench.parsed(arguments).binaries == tmp_path
    with pytest.raises(SystemExit):
        bench.parsed(["--rounds", "-1"])
    assert "--rounds must be at least 0, got -1" in capsys.readouterr().err


def test_compiling_ahead(bench, monkeypatch):
    """A process for each engine, kind and step, which times nothing."""
    begun = []

    class Process:
        def __init__(self, command):
            begun.append(bench.parsed(command[2:]))

        def wait(self):
            begun.append("waited")

    monkeypatch.setattr(bench.subprocess, "Popen", Process)
    bench.compile_ahead(["--quick"], ["vllm"])
    assert begun[6:] == ["waited"] * 6 and len({(*args.kind, *args.step) for args in begun[:6]}) == 6
    assert all(args.rounds == 0 and args.quick and args.engine == ["vllm"] for args in begun[:6])


def test_a_case_that_fails(bench, monkeypatch, capsys):
    """The others are measured, engines in turns, and the result says what failed; without rounds they only run."""
    def measure(steps, modules, engine, case, rounds):
        if case == 2:
            raise ValueError("no such case\nat all")
        return dict(engine=engine, kind="kda", step="decode", case=f"{case}", heads=8, value_heads=8,
                    served="libkda: x", eager_us=dict(own=2.0, libkda=1.0), graph_us={}, no_graph=dict(own="a copy"))

    monkeypatch.setattr(bench, "measure", measure)
    report = dict(rows=[])
    bench.all_rows(None, dict(vllm=0, sglang=1), [1, 2, 3], 5, report)
    assert [(row["case"], row["engine"]) for row in report["rows"]] == [
        ("1", "vllm"), ("1", "sglang"), ("3", "vllm"), ("3", "sglang")]
    assert report["failed"] == [f"{engine} 2: ValueError: no such case" for engine in ("vllm", "sglang")]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "vllm kda decode 1, 8 / 8 heads: eager 2.0 / 1.0 us; libkda: x; no graph of own: a copy"
    ran, report = [], dict(rows=[])
    monkeypatch.setattr(bench, "make_step", lambda modules, steps, engine, case: (engine, case))
    monkeypatch.setattr(bench, "run_both", lambda *what: ran.append(what))
    bench.all_rows(None, dict(vllm=0), [1, 2], 0, report)
    assert ran == [(None, "vllm", 1), (None, "vllm", 2)] and report == dict(rows=[])


def test_turns_of_two(bench, monkeypatch):
    """Each is called in its own context, equally often a round, and short calls many times a turn."""
    calls, inside = {"own": 0, "libkda": 0}, []

    def context_of(who):
        @contextlib.contextmanager
        def context():
            inside.append(who)
            yield
            inside.pop()
        return context

    def call_of(who):
        def call():
            assert inside == [who]
            calls[who] += 1
        return call

    times = bench.in_turns({who: (context_of(who), call_of(who)) for who in calls}, rounds=3)
    assert set(times) == set(calls) and all(0 < us < 1e4 for us in times.values())
    assert all(count == 2 + 3 * 200 for count in calls.values())
    assert bench.in_turns({}, rounds=3) == {}


def test_a_step_that_no_graph_can_have(bench):
    if torch.cuda.is_available():
        pytest.skip("a GPU captures this step: test_steps_of_layers compares its graphs")
    graphs, refusals = bench.graphs_of(None, dict(own=contextlib.nullcontext))
    assert graphs == {} and "CUDA" in refusals["own"]


MEASURED = """
import contextlib, functools, json, os, sys
os.environ.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
sys.path[:0] = sys.argv[1:]
import engine_layers as bench, engine_steps as steps, torch
bench.DEVICE, bench.D, bench.LEAST_S, steps.tuned = "cpu", 16, 0, contextlib.nullcontext
steps.LAYERS = {name: functools.partial(layer, dtype=torch.float32) for name, layer in steps.LAYERS.items()}
with contextlib.ExitStack() as stack:
    modules = {name: stack.enter_context(steps.engine(name)) for name in ("vllm", "sglang")}
    stack.enter_context(torch.inference_mode())
    for name in modules:
        steps.interpret(name)
    report = dict(rows=[])
    bench.all_rows(steps, modules, [("kda", "decode", 1, 1, 1)], 1, report)
    print(json.dumps(report))
"""


@fetched
def test_rows_of_the_result(bench):
    """Whole, but for the graphs, where Triton's interpreter has the engines' kernels, both in one process."""
    run = subprocess.run([sys.executable, "-c", MEASURED, str(ROOT / "bench"), str(HERE)],
                         capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    report = json.loads(run.stdout.splitlines()[-1])
    assert "failed" not in report, report
    for row, served in zip(report["rows"], ("fused_recurrent_kda_packed_decode", "decode"), strict=True):
        assert row["served"] == f"libkda: {served}" and row["tokens"] == 1
        assert set(row["eager_us"]) == {"own", "libkda"} and row["graph_us"] == {} and "own" in row["no_graph"]


def test_defaults_are_those_of_the_result():
    """What libkda serves by default is faster by it in a graph, and of tokens and drafts that it leaves there is one as
    large or larger that is not."""
    rows = json.loads((ROOT / "bench" / "results" / "gpu_engine_layers.json").read_text())["rows"]
    of = lambda row: (row["engine"], row["kind"], row["step"])
    size = lambda row: row["tokens"] * row["value_heads"]
    slower = {}
    for row in rows:
        if row["graph_us"]["libkda"] >= row["graph_us"]["own"]:
            slower[of(row)] = max(size(row), slower.get(of(row), 0))
    assert {("vllm", "kda", "decode"), ("sglang", "kda", "decode")} <= set(slower)
    for row in rows:
        if libkda._plugins.measured.serves(*of(row), row["tokens"], row["value_heads"]):
            assert size(row) > slower.get(of(row), 0), row
        elif row["step"] != "prefill":  # prompts have kernels beside which no result is
            assert size(row) <= slower.get(of(row), 0), row


def test_the_result_and_its_table(bench, monkeypatch, a_card):
    """The result names its families and engines; the table leaves out times of graphs that are not there, and says
    who serves a step by default. Without a result it says so."""
    monkeypatch.syspath_prepend(str(ROOT / "bench" / "report"))
    import tables
    folder, card = a_card
    monkeypatch.setattr(tables, "RESULTS", folder)
    assert tables.table_gpu_engine_layers() == "No card has timed them yet."
    header = bench.evidence.header(folder, "engine_layers", "python3 bench/engine_layers.py")
    assert card.items() <= header.items() and {"fused", "decode", "gdn"} <= set(header["families"])
    row = dict(engine="vllm", kind="kda", step="prefill", case="2,048", heads=8, value_heads=8, tokens=2048,
               eager_us=dict(own=300.0, libkda=200.0), graph_us=dict(own=200.0, libkda=80.0))
    rows = [row, row | dict(engine="sglang", kind="gdn", graph_us=dict(libkda=80.0)),
            *(row | dict(step="decode", case=f"{count}", tokens=count) for count in (255, 256))]
    bench.evidence.write(folder / "gpu_engine_layers.json", header | dict(
        torch="2.11", triton="3.6", libkda="0", engines=engine_sources.WHEELS, rows=rows))
    lines = tables.table_gpu_engine_layers().splitlines()
    assert f"vLLM {engine_sources.WHEELS['vllm']}" in lines[0]
    assert "| prefill | 2,048; 8 / 8 | 300 / 200 (1.50x) | 200 / 80.0 (2.50x) | libkda |  |  |  |" in lines
    assert any(line.endswith("|  |  |  | 300 / 200 (1.50x) |  | own |") for line in lines)
    least = libkda._plugins.measured.LEAST["vllm", "kda", "decode"]
    for count in (255, 256):
        who = "libkda" if count * 8 >= least else "own"
        assert any(f"| decode | {count}; 8 / 8 |" in line and f"| {who} |" in line for line in lines)
