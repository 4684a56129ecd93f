# SPDX-License-Identifier: Apache-2.0
"""What the GPU comparisons with other libraries share: cases of bench/cases, inputs, the float64 recurrence, times."""
import math
import pathlib
import statistics
import time

import torch
import triton

ROOT = pathlib.Path(__file__).resolve().parents[2]
COLD_BYTES = 300e6  # of the calls of a graph, together: several times the L2 cache
MOST_CALLS = 256  # of a graph
COPY_BYTES = 256 << 20  # of a copy in one piece; those of more than half a gigabyte are slow
PASSES = 7


def parse_lengths(text):
    lengths = []
    for item in text.split(","):
        times, _, length = item.rpartition("x")
        size = int(length[:-1]) * 1024 if length.endswith("K") else int(length)
        lengths += [size] * (int(times) if times else 1)
    return lengths


def parse_case(line):
    words = line.split()
    flags = dict(zip(words[::2], words[1::2]))
    heads = int(flags["--heads"])
    batch = int(flags.get("--batch", 1))
    lengths = parse_lengths(flags["--seq-lens"]) if "--seq-lens" in flags else None
    return dict(name=line, H=heads, HV=int(flags.get("--value-heads", heads)), B=batch,
                T=sum(lengths) if lengths else int(flags["--tokens"]), lengths=lengths,
                K=int(flags.get("--key-dim", 128)), V=int(flags.get("--value-dim", 128)),
                dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[flags.get("--dtype", "bf16")])


def cases(name):
    text = (ROOT / "bench" / "cases" / f"{name}.txt").read_text()
    return [parse_case(line) for line in text.splitlines() if line and line[0] != "#"]


def make_inputs(c, gates="trained", seed=0):
    """Raw bounded gates (lower bound -5), beta raw, q/k to be normalised; FLA's own shapes."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, device="cuda", generator=generator)
    uniform = lambda *shape: torch.rand(*shape, device="cuda", generator=generator)
    B, T, H, HV, K, V = (c[n] for n in ("B", "T", "H", "HV", "K", "V"))
    q, k, v = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, HV, V)
    beta = normal(B, T, HV)
    if gates == "strong":
        g, A_log, dt_bias = normal(B, T, HV, K), uniform(HV), uniform(HV, K)
    else:
        low, high = (1e-4, 0.5) if gates == "slow" else (1e-3, 4.95)
        mean = torch.exp(uniform(HV, K) * math.log(high / low) + math.log(low))
        g, A_log, dt_bias = 0.5 * normal(B, T, HV, K), torch.zeros(HV, device="cuda"), torch.log(mean / (5 - mean))
    N = len(c["lengths"]) if c["lengths"] else B
    x = {n: t.to(c["dtype"]) for n, t in dict(q=q, k=k, v=v, g=g, beta=beta).items()}
    x.update(A_log=A_log, dt_bias=dt_bias, h0=0.1 * normal(N, HV, K, V))
    return x


def cu_seqlens(c):
    if not c["lengths"]:
        return None
    return torch.tensor([0] + c["lengths"], device="cuda").cumsum(0)


def libkda_call(library, c, x, policy):
    o, state = torch.full_like(x["v"], math.nan), torch.full_like(x["h0"], math.nan)
    call = library.forward(x["q"], x["k"], x["v"], x["g"], x["beta"], o, policy=policy,
                           gate="bounded", beta_mode="sigmoid", l2norm=True, A_log=x["A_log"],
                           dt_bias=x["dt_bias"], initial_state=x["h0"], final_state=state,
                           seq_lens=c["lengths"])

    def run():
        call()
        return o, state
    run.plan = call.plan
    run.destroy = call.destroy
    return run


def microseconds(call, rep=60):
    return triton.testing.do_bench(call, warmup=25, rep=rep, return_mode="median") * 1e3


def timed(row, name, call, clock):
    """Microseconds of a call to row[NAME], the SM clock meanwhile (clock.Clock) to row[NAME_mhz]."""
    begin = time.monotonic()
    row[name] = microseconds(call)
    row[name + "_mhz"] = clock.since(begin)


def graph_of(calls):
    """A function that launches all calls as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        graph.kept = calls, [call() for call in calls]  # a replay reads what these own
    return graph.replay


def device_us(launch):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    launch()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3


def medians(launches, calls):
    """Microseconds of one of the calls of each launch, by name; the launches take turns."""
    samples = {name: [] for name in launches}
    for turn in range(PASSES + 1):
        for name, launch in launches.items():
            us = device_us(launch) / calls
            if turn:
                samples[name].append(us)
    return {name: statistics.median(times) for name, times in samples.items()}


def copy(to, source):
    """Of bytes [N]."""
    for target, piece in zip(to.split(COPY_BYTES), source.split(COPY_BYTES)):
        target.copy_(piece)


def unit_rows(x, value_heads):
    """q or k of tokens [T, H, K], normed, for each value head."""
    return (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)).repeat_interleave(value_heads // x.shape[1], 1)


def recurrence_of_rows(q, k, v, decay, beta, S):
    """The definition for the tokens of one sequence, [T, HV, ..], from the states S [HV, K, V]: o and the final S."""
    o = torch.empty_like(v)
    for t in range(len(v)):
        S = S * decay[t][..., None]
        error = v[t] - torch.einsum("hk,hkv->hv", k[t], S)
        S = S + torch.einsum("hk,hv->hkv", beta[t][:, None] * k[t], error)
        o[t] = torch.einsum("hk,hkv->hv", q[t], S) * k.shape[2] ** -0.5
    return o, S


def recurrence(c, x):
    """The definition in float64: o [T, HV, V] and the final states [N, HV, K, V]."""
    rows = {n: x[n].reshape(-1, *x[n].shape[2:]).double() for n in ("q", "k", "v", "g", "beta")}
    decay = torch.exp(-5 * torch.sigmoid(torch.exp(x["A_log"].double())[:, None] *
                                         (rows["g"] + x["dt_bias"].double())))
    tokens = (*(unit_rows(rows[n], c["HV"]) for n in ("q", "k")), rows["v"], decay, torch.sigmoid(rows["beta"]))
    lengths = c["lengths"] or [c["T"]] * c["B"]
    sequences = zip(*(part.split(lengths) for part in tokens), x["h0"].double())
    outputs, states = zip(*(recurrence_of_rows(*sequence) for sequence in sequences))
    return torch.cat(outputs), torch.stack(states)


def recurrence_of_log_gates(x):
    """The definition in float64 of one row of tokens with one log decay a head and plain beta: o [1, T, HV, V]."""
    q, k, v, g, beta = (x[n][0].double() for n in ("q", "k", "v", "g", "beta"))
    HV, K, V = v.shape[1], k.shape[2], v.shape[2]
    return recurrence_of_rows(unit_rows(q, HV), unit_rows(k, HV), v, torch.exp(g)[..., None], beta,
                              v.new_zeros(HV, K, V))[0][None]


def relative(x, reference):
    return ((x.double().reshape(reference.shape) - reference).norm() / reference.norm()).item()


def error_cases():
    shapes = [dict(name="T 2048, H 4", B=1, T=2048, H=4, HV=4, lengths=None),
              dict(name="37+1+300+64+615, H 4, HV 8", B=1, T=1017, H=4, HV=8,
                   lengths=[37, 1, 300, 64, 615])]
    return [dict(shape, K=128, V=128, dtype=dtype)
            for shape in shapes for dtype in (torch.bfloat16, torch.float16)]
