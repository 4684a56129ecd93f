# SPDX-License-Identifier: Apache-2.0
"""libkda beside FLA on a GPU (bench/peers/peers.py --device cuda): same inputs, one process, medians with a
cold L2 (triton.testing.do_bench). Cases are those of bench/cases. Needs torch, triton and fla-core."""
import argparse
import gc
import os
import pathlib
import subprocess
import sys

os.environ.setdefault("FLA_FLASH_KDA", "0")  # FLA's own kernels, not another library behind it

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "report"))
import evidence
import fla_configs  # before fla: it sets FLA's cache mode
import torch
import triton

from clock import Clock
from gpu_cases import (cases, cu_seqlens, error_cases, libkda_call, make_inputs, microseconds, recurrence, relative,
                       timed)
from libkda_ctypes import Library

ROOT = pathlib.Path(__file__).resolve().parents[2]
WHAT = ("errors", "intra", "decode", "train", "forward")  # the longest last: each has a result of its own
FORWARD_SETS = ("flagship", "cudnn10", "cula", "cp", "gva", "context_parallel")
INTRACARD_SETS = ("cp", "context_parallel")
INTRACARD_TOKENS = 32768  # FLA cuts no sequence below 16,384


def tune_fla(heads, part=None):
    """Tunes every FLA kernel for this many heads (fla_configs.py); a worker compiles its share."""
    fla_configs.use(heads)
    if part:
        import fla.ops.kda  # noqa: F401
        fla_configs.take_part(*part)
    for dtype in (torch.bfloat16, torch.float16):
        c = dict(B=1, T=8192, H=heads, HV=heads, K=128, V=128, lengths=None, dtype=dtype)
        x = make_inputs(c)
        if dtype == torch.bfloat16:
            fla_call(c, x)()
        else:
            stages = fla_stages(c, x)
            for name in ("intra", "wu", "intra_token_parallel"):
                stages[name]()
        torch.cuda.synchronize()
    if not part:
        fla_configs.save(heads)


def fla_work(args):
    """One (case, function that makes calls) for every set of FLA kernels that this run needs: they are
    compiled a head count, layout and type, not a length."""
    wanted = []
    if "errors" in args.what:
        wanted += [(c, fla_call) for c in error_cases()]
    if "forward" in args.what:
        for name in args.sets.split(","):
            wanted += [(c, fla_call) for c in cases(name)]
            if name in INTRACARD_SETS:
                wanted += [(c, intracard_call) for c in cases(name)]
    if "train" in args.what:
        wanted += [(c, train_call) for c in cases("train")]
    if "intra" in args.what:
        wanted += [(c, fla_stages) for c in cases("intra") + cases("intra_fp16")]
    seen = {}
    for c, make in wanted:
        lengths = [2048, 1024] if c["lengths"] else None
        if make == intracard_call:
            rest = 1024 if len(c["lengths"]) > 1 else 0
            small = dict(c, T=INTRACARD_TOKENS, lengths=[INTRACARD_TOKENS - rest] + [rest] * (rest > 0))
        else:
            small = c if c["B"] * c["T"] <= 2048 else dict(c, B=min(c["B"], 2), T=3072 if lengths else 1024,
                                                           lengths=lengths)
        key = tuple(str(small[n]) for n in ("H", "HV", "B", "K", "lengths", "dtype"))
        seen.setdefault((key, make), (small, make))
    return list(seen.values())


def warm_fla(args, part, parts):
    """A worker's share of that, once each: Triton's disk cache then has the kernels."""
    for c, make in fla_work(args)[part::parts]:
        fla_configs.use(c["HV"])
        calls = make(c, make_inputs(c))
        for call in calls.values() if isinstance(calls, dict) else [calls]:
            call and call()


def run_workers(extra, count=max(1, min(15, os.cpu_count() - 1))):
    """This script, `count` times side by side, with a share of the work each."""
    command = [sys.executable, str(ROOT / "bench" / "peers" / "peers.py"), *sys.argv[1:]]
    workers = [subprocess.Popen(command + extra + ["--part", f"{i}/{count}"]) for i in range(count)]
    for worker in workers:
        if worker.wait() != 0:
            raise RuntimeError("a worker failed")


def fla_call(c, x, intracard=False):
    from fla.ops.kda import chunk_kda
    cu = cu_seqlens(c)
    cpu = cu.cpu() if cu is not None else None
    if intracard and cu is None:  # FLA's intra-card form takes packed sequences only
        if c["B"] != 1:
            return None
        cu = torch.tensor([0, c["T"]], device="cuda")
        cpu = cu.cpu()

    mode = torch.inference_mode if intracard else torch.no_grad  # the intra-card form asks for it

    def call():
        os.environ["FLA_INTRACARD_CP"] = "1" if intracard else "0"
        with mode():
            return chunk_kda(x["q"], x["k"], x["v"], x["g"], x["beta"], initial_state=x["h0"],
                             output_final_state=True, use_qk_l2norm_in_kernel=True,
                             use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                             safe_gate=True, lower_bound=-5.0, A_log=x["A_log"],
                             dt_bias=x["dt_bias"].reshape(-1), cu_seqlens=cu, cu_seqlens_cpu=cpu)
    return call


def intracard_call(c, x):
    return fla_call(c, x, intracard=True)


def train_inputs(c):
    """Inputs of a training step without states, and d_o; dt_bias as FLA takes it."""
    x = make_inputs(c)
    del x["h0"]
    generator = torch.Generator(device="cuda").manual_seed(1)
    d_o = torch.randn(x["v"].shape, device="cuda", generator=generator).to(c["dtype"])
    return x, d_o


def train_call(c, x, d_o=None):
    """FLA's forward and, by autograd, its backward: o and the gradients by name."""
    from fla.ops.kda import chunk_kda
    cu = cu_seqlens(c)
    cpu = cu.cpu() if cu is not None else None
    d_o = torch.ones_like(x["v"]) if d_o is None else d_o
    leaves = {n: t.detach().requires_grad_() for n, t in x.items() if n != "h0"}

    def call():
        os.environ["FLA_INTRACARD_CP"] = "0"
        rows = [leaves[n] for n in ("q", "k", "v", "g", "beta")]
        o, _ = chunk_kda(*rows, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
                         use_beta_sigmoid_in_kernel=True, safe_gate=True, lower_bound=-5.0, A_log=leaves["A_log"],
                         dt_bias=leaves["dt_bias"].reshape(-1), cu_seqlens=cu, cu_seqlens_cpu=cpu)
        gradients = torch.autograd.grad(o, list(leaves.values()), d_o)
        return dict({f"d{n}": t for n, t in zip(leaves, gradients)}, o=o.detach())
    return call


def peak_bytes(call):
    """Of torch's memory during a call, beyond what is there before it: results and workspaces."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure_train(library):
    """A forward and its backward, with memory for all results."""
    rows = []
    with Clock() as clock:
        for c in cases("train"):
            x, d_o = train_inputs(c)
            row = dict(case=c["name"])
            ours = library.training(x, d_o, gate="bounded", beta_mode="sigmoid", l2norm=True, seq_lens=c["lengths"])
            timed(row, "libkda", ours, clock)
            fla_configs.use(c["HV"])
            fla = train_call(c, x, d_o)
            timed(row, "fla", fla, clock)
            fla_configs.save(c["HV"])  # of the backward's kernels, where there are none yet
            row["libkda_peak_bytes"], row["fla_peak_bytes"] = peak_bytes(ours), peak_bytes(fla)
            row["libkda_workspace_bytes"] = ours.workspace_bytes
            found, theirs = ours(), fla()
            row["difference_from_fla"] = {n: relative(t, theirs[n].double()) for n, t in found.items()}
            row["speedup"] = row["fla"] / row["libkda"]
            rows.append(row)
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
            ours.destroy()
            del x, d_o, ours, fla, found, theirs
            gc.collect()
            torch.cuda.empty_cache()
    return rows


def measure_errors(library):
    rows = []
    for gates in ("strong", "slow", "trained"):
        for c in error_cases():
            x = make_inputs(c, gates)
            fla_configs.use(c["HV"])
            o, state = recurrence(c, x)
            row = dict(case=c["name"], gates=gates, dtype=str(c["dtype"]).split(".")[1])
            for name, call in (("fla", fla_call(c, x)), ("libkda", libkda_call(library, c, x, "off")),
                               ("libkda_cp", libkda_call(library, c, x, 4))):
                theirs = call()
                row[name] = [relative(theirs[0], o), relative(theirs[1], state)]
            rows.append(row)
            print(row, flush=True)
    return rows


def measure_forward(library, sets, gates):
    with Clock() as clock:
        return forward_rows(library, sets, gates, clock)


def forward_rows(library, sets, gates, clock):
    rows = []
    for name in sets:
        for c in cases(name):
            x = make_inputs(c, gates)
            row = dict(set=name, case=c["name"], gates=gates)
            off = libkda_call(library, c, x, "off")
            auto = libkda_call(library, c, x, "auto")
            row["segments"] = len(auto.plan.get("segments", []))
            timed(row, "libkda_off", off, clock)
            timed(row, "libkda", auto, clock)
            fla_configs.use(c["HV"])
            fla = fla_call(c, x)
            timed(row, "fla", fla, clock)
            difference = relative(auto()[0], fla()[0].double())
            row["difference_from_fla"] = difference
            if name in INTRACARD_SETS:
                intracard = intracard_call(c, x)
                row["fla_intracard"] = microseconds(intracard) if intracard else None
            row["speedup"] = row["fla"] / row["libkda"]
            rows.append(row)
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
            off.destroy(), auto.destroy()
            del x, off, auto, fla
            gc.collect()
            torch.cuda.empty_cache()
    return rows


def stage_inputs(c, x):
    """Normalised q and k, log gates and beta after their transforms."""
    unit = lambda t: torch.nn.functional.normalize(t.float(), dim=-1).to(t.dtype)
    g = (-5 * torch.sigmoid(x["g"].float() + x["dt_bias"])).to(c["dtype"])
    return unit(x["q"]), unit(x["k"]), x["v"], g, torch.sigmoid(x["beta"].float()).to(c["dtype"])


def fla_stages(c, x):
    """FLA's stage functions on the cumulated gates in fp32 (its cumsum is not part of them)."""
    from fla.ops.kda.chunk_intra import chunk_kda_fwd_intra
    from fla.ops.kda.chunk_intra_token_parallel import chunk_kda_fwd_intra_token_parallel
    from fla.ops.kda.wy_fast import recompute_w_u_fwd
    from fla.ops.utils import chunk_local_cumsum
    q, k, v, g, beta = stage_inputs(c, x)
    scale, cu = c["K"] ** -0.5, cu_seqlens(c)
    G = chunk_local_cumsum(g.float(), scale=1.4426950408889634, chunk_size=64, cu_seqlens=cu)
    B, T, HV = c["B"], c["T"], c["HV"]
    Aqk = torch.empty(B, T, HV, 64, device="cuda", dtype=c["dtype"])
    Akk = torch.zeros_like(Aqk)
    Akkd = torch.empty(B, T, HV, 16, device="cuda")
    intra = lambda safe, bare: lambda: chunk_kda_fwd_intra(
        q, k, v, G, beta, scale, cu_seqlens=cu, safe_gate=safe, disable_recompute=not bare)
    wu = lambda q, k: recompute_w_u_fwd(k=k, v=v, beta=beta, A=Akk, q=q, gk=G, cu_seqlens=cu)
    expand = lambda t: t.repeat_interleave(HV // c["H"], 2)
    return dict(intra=intra(True, False), intra_bare=intra(True, True),
                intra_token_parallel=intra(False, True), wu=lambda: wu(q, k),
                wu_expanded=lambda: wu(expand(q), expand(k)),
                cumsum=lambda: chunk_local_cumsum(g.float(), scale=1.4426950408889634,
                                                  chunk_size=64, cu_seqlens=cu),
                token_parallel=lambda: chunk_kda_fwd_intra_token_parallel(
                    q, k, G, beta, Aqk, Akkd, scale, cu_seqlens=cu))


def measure_intra(library, sets):
    """chunk_intra and recompute_w_u beside FLA's functions of the same outputs. libkda is given
    normalised q and k, log gates a token in the type of q, and beta; it cumulates by itself."""
    rows = []
    for name in sets:
        for c in cases(name):
            x = make_inputs(c)
            fla_configs.use(c["HV"])
            fla = fla_stages(c, x)
            q, k, v, g, beta = stage_inputs(c, x)
            o = torch.empty_like(v)
            call = library.forward(q, k, v, g, beta, o, policy="off", backend="staged", seq_lens=c["lengths"])
            ours = library.stages(call)
            row = dict(set=name, case=c["name"])
            for ours_name, fla_names in (("chunk_intra", ["intra"]), ("chunk_intra_bare", ["intra_bare"]),
                                         ("recompute_w_u", ["wu"])):
                row["libkda_" + ours_name] = microseconds(ours[ours_name], rep=30)
                for fla_name in fla_names:
                    row["fla_" + fla_name] = microseconds(fla[fla_name], rep=30)
            extra = ["token_parallel", "intra_token_parallel"] if name == "intra_fp16" else []
            extra += ["wu_expanded"] if c["HV"] > c["H"] else []
            for fla_name in extra:
                row["fla_" + fla_name] = microseconds(fla[fla_name], rep=30)
            moved = sum(t.numel() * t.element_size() for t in (q, k, v, g, beta))
            sizes = ours["sizes"]
            row["intra_bytes"] = moved + sum(sizes[n] for n in ("w", "u", "kg", "qg", "Aqk", "T", "gamma", "beta", "diag"))
            row["wu_bytes"] = moved + sum(sizes[n] for n in ("T", "w", "u", "kg", "qg"))
            rows.append(row)
            print({k: round(v, 1) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
            call.destroy()
            del x, q, k, v, g, ours, call, fla
            gc.collect()
            torch.cuda.empty_cache()
    return rows


def measure_decode(library):
    from fla.ops.kda import fused_recurrent_kda
    rows = []
    for c in cases("decode_gpu"):
        B, T, H, K = c["B"], c["T"], c["H"], c["K"]
        normal = lambda *shape: torch.randn(*shape, device="cuda")
        q, k, v, g = (normal(B, T, H, K).to(c["dtype"]) for _ in range(4))
        g = -g.abs()
        beta, pool, o = normal(B, T, H).to(c["dtype"]), normal(B, H, K, K), torch.empty_like(v)
        call = library.forward(q, k, v, g, beta, o, initial_state=pool, decode=True,
                               beta_mode="sigmoid", l2norm=True)
        row = dict(case=c["name"], libkda=microseconds(call), bytes=2 * pool.numel() * 4)
        row["fla"] = microseconds(lambda: fused_recurrent_kda(
            q, k, v, g, beta.sigmoid(), initial_state=pool, output_final_state=True,
            use_qk_l2norm_in_kernel=True))
        rows.append(row)
        print(row, flush=True)
    return rows


def copy_rate():
    a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.numel() / (microseconds(lambda: b.copy_(a)) * 1e-6)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device")
    parser.add_argument("--what", default=",".join(WHAT), help="in this order")
    parser.add_argument("--sets", default=",".join(FORWARD_SETS))
    parser.add_argument("--gates", default="trained", choices=["strong", "slow", "trained"])
    parser.add_argument("--binaries", type=pathlib.Path, default=ROOT / "build",
                        help="a folder with libkda_c.so and kernel_hashes.json")
    parser.add_argument("--results", type=pathlib.Path,
                        help="a folder: one file each, gpu_peers_WHAT.json, when it is done")
    parser.add_argument("--tune", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.what.split(",")) - set(WHAT):
        parser.error(f"--what: {', '.join(sorted(unknown))} is none of {', '.join(WHAT)}")
    if args.part:
        part, parts = map(int, args.part.split("/"))
        return tune_fla(args.tune, (part, parts)) if args.tune else warm_fla(args, part, parts)
    for heads in (64, 16):
        if not list(fla_configs.directory(heads).glob("*.json")):
            run_workers(["--tune", str(heads)])
            tune_fla(heads)
    run_workers([])
    library = Library(str(args.binaries / "libkda_c.so"))
    import fla
    parts = {"errors": lambda: measure_errors(library),
             "intra": lambda: measure_intra(library, ("intra", "intra_fp16")),
             "decode": lambda: measure_decode(library),
             "train": lambda: measure_train(library),
             "forward": lambda: measure_forward(library, args.sets.split(","), args.gates)}
    copied = copy_rate()
    for name in args.what.split(","):
        report = evidence.header(args.binaries, f"peers_{name}",
                                 f"python3 bench/peers/peers.py --device cuda --what {name}")
        report.update(torch=torch.__version__, triton=triton.__version__, fla=fla.__version__,
                      gates=args.gates, copy_bytes_per_second=copied, cases=parts[name]())
        if args.results:
            evidence.write(args.results / f"gpu_peers_{name}.json", report)
