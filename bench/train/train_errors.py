#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Errors of every gradient on a GPU, beside FLA's on the same inputs, by gate regime (docs/files.md).

    python3 bench/train/train_errors.py [--binaries build] [--results bench/results]

The reference is backend oracle, which computes in float64. An error is the norm of the difference divided by the norm
of the gradient, over all heads. Needs torch and fla-core from PyPI, and build/bin/kda (./dev build).
"""
import argparse
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile

os.environ.setdefault("FLA_FLASH_KDA", "0")  # FLA's own kernels, not another library behind it

sys.path += [str(pathlib.Path(__file__).resolve().parents[1] / folder) for folder in ("report", "peers")]
import evidence
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
REGIMES = ("strong", "slow", "mixed", "trained", "softplus", "trained-softplus", "needle", "structured", "equal-keys")
TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "d_initial_state")


def read(path):
    """Tensors and metadata of a safetensors file."""
    data = bytearray(pathlib.Path(path).read_bytes())
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + size])
    modes = header.pop("__metadata__", {})
    at = lambda row: (8 + size + offset for offset in row["data_offsets"])
    return {name: torch.frombuffer(data[slice(*at(row))], dtype=TYPES[row["dtype"]]).reshape(row["shape"])
            for name, row in header.items()}, modes


def rewrite(path, name, change):
    """Changes the elements of one tensor of a file."""
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    row = json.loads(data[8:8 + size])[name]
    begin, end = (8 + size + offset for offset in row["data_offsets"])
    changed = change(torch.frombuffer(data[begin:end], dtype=TYPES[row["dtype"]]).reshape(row["shape"]))
    data[begin:end] = changed.contiguous().view(torch.uint8).numpy().tobytes()
    path.write_bytes(data)


def spread(do):
    """Tokens whose gradients differ by up to 2^24, in size, all of them small."""
    generator = torch.Generator().manual_seed(1)
    powers = torch.randint(0, 25, (*do.shape[:2], 1, 1), generator=generator)
    return (do.float() * torch.exp2(-powers.float()) * 1e-9).to(do.dtype)


# Name -> regime, and what becomes of do (d_final_state is 0 then).
CASES = {regime: (regime, None) for regime in REGIMES} | {
    "trained, do over 2^24, x 1e-9": ("trained", spread),
    "trained, do x 2^-30": ("trained", lambda do: do * 2.0**-30),
    "trained, do x 2^30": ("trained", lambda do: do * 2.0**30)}


def fla_gradients(x, modes):
    """chunk_kda of FLA with autograd: gradients by the names of `kda run --backward`."""
    from fla.ops.kda import chunk_kda
    from fla_untuned import one_config_each
    names = [n for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state") if n in x]
    leaves = {n: x[n].cuda().requires_grad_() for n in names}
    bounded, raw = modes["gate"] == "bounded", modes["gate"] != "log"
    options = {}
    if raw:
        options = dict(A_log=leaves["A_log"], dt_bias=leaves["dt_bias"].reshape(-1), use_gate_in_kernel=True,
                       safe_gate=bounded, lower_bound=float(modes["lower_bound"]) if bounded else None)
    with one_config_each():
        o, state = chunk_kda(*(leaves[n] for n in ("q", "k", "v", "g", "beta")), initial_state=leaves["initial_state"],
                             output_final_state=True, use_qk_l2norm_in_kernel=modes["qk_l2norm"] == "1",
                             use_beta_sigmoid_in_kernel=True, allow_neg_eigval=modes["beta"] == "sigmoid2", **options)
        torch.autograd.backward([o, state], [x["do"].cuda(), x["d_final_state"].cuda()])
    return {"d_initial_state" if n == "initial_state" else "d" + n: leaf.grad.cpu() for n, leaf in leaves.items()}


def relative(x, reference):
    """None: not finite."""
    error = ((x.double() - reference.double()).norm() / reference.double().norm()).item()
    return error if math.isfinite(error) else None


def measure(kda, case, folder, args):
    regime, change = CASES[case]
    inputs = folder / "x.safetensors"
    run = lambda *command: subprocess.run([kda, *map(str, command)], check=True, stdout=subprocess.DEVNULL)
    run("gen", "-o", inputs, "--tokens", args.tokens, "--heads", args.heads, "--value-heads", args.value_heads,
        "--regime", regime, "--gradients", "--initial-state", "--seed", args.seed)
    if change:
        rewrite(inputs, "do", change)
        rewrite(inputs, "d_final_state", torch.zeros_like)
    results = {}
    for name, options in (("oracle", ["--device", "cpu", "--backend", "oracle", "--out-dtype", "fp32"]),
                          ("libkda", ["--device", "cuda", "--backend", args.backend])):
        output = folder / f"{name}.safetensors"
        run("run", inputs, "--backward", "-o", output, *options)
        results[name] = read(output)[0]
    x, modes = read(inputs)
    if not args.without_fla:
        results["fla"] = fla_gradients(x, modes)
    row = {"case": case}
    for name in ("libkda", "fla"):
        if name in results:
            row[name] = {d: relative(results[name][d].reshape(reference.shape), reference)
                         for d, reference in results["oracle"].items() if d in GRADIENTS}
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--value-heads", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="sm80.staged", help="of libkda (%(default)s)")
    parser.add_argument("--without-fla", action="store_true", help="libkda alone, which needs no GPU library of Python")
    parser.add_argument("--cases", help="some of them, with ; between (all)")
    parser.add_argument("--binaries", type=pathlib.Path, default=ROOT / "build",
                        help="a build folder, or a copy of its bin/ and kernel_hashes.json")
    parser.add_argument("--results", type=pathlib.Path, help="the folder of gpu_train_errors.json")
    args = parser.parse_args()
    kda = args.binaries.resolve() / "bin" / "kda"
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for case in args.cases.split(";") if args.cases else CASES:
            rows.append(measure(kda, case, pathlib.Path(folder), args))
            print({k: {d: e if e is None else float(f"{e:.2e}") for d, e in v.items()} if k != "case" else v
                   for k, v in rows[-1].items()}, flush=True)
    if args.results:
        report = evidence.header(args.binaries, "train_errors",
                                 "python3 bench/train/train_errors.py")
        if not args.without_fla:
            import fla
            import triton
            report.update(torch=torch.__version__, triton=triton.__version__, fla=fla.__version__)
        report.update(tokens=args.tokens, heads=args.heads, value_heads=args.value_heads, cases=rows)
        evidence.write(args.results / "gpu_train_errors.json", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
