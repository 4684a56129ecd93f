#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Losses of a small language model while it trains on a GPU: libkda beside its peers, from the same first weights, on
the same pieces of text, in bf16 under torch.autocast.

    python3 bench/train/loss_curve.py [--model kda|gdn] [--steps 300] [--results bench/results]

kda: examples/language_model, chunk_kda of libkda and of FLA. gdn: bench/train/hybrid.py, a hybrid of Gated DeltaNet
and attention, beside the same in torch, with Gated DeltaNet in fp32: FLA's kernels refuse the backward with Triton
from 3.4 to 3.7.0 on Hopper.

Needs torch, safetensors and fla-core from PyPI, and libkda's Python package.
"""
import argparse
import math
import os
import pathlib
import sys
import time
import types

os.environ.setdefault("FLA_FLASH_KDA", "0")  # FLA's own kernels, not another library behind it

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "report"))
import evidence
import torch
import torch.nn.functional as F

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "language_model"))
import train  # noqa: E402
from hybrid import gated_delta_rule_in_torch, hybrid  # noqa: E402
from model import LanguageModel  # noqa: E402


def texts():
    paths = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    data = b"\n".join(path.read_bytes() for path in paths)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def kda_model(args):
    return LanguageModel(width=args.width, layers=args.layers, heads=args.width // 64, inner=args.width * 11 // 4)


def kda_rules():
    from fla.ops.kda import chunk_kda as fla_kda

    from libkda import chunk_kda
    return {"libkda": chunk_kda, "fla": fla_kda}


def gdn_rules():
    from libkda import chunk_gated_delta_rule
    return {"libkda": chunk_gated_delta_rule, "torch": gated_delta_rule_in_torch}


# Model -> its module from the arguments, the functions that its layers may call, and the result file.
MODELS = {"kda": (kda_model, kda_rules, "loss_curve"),
          "gdn": (lambda args: hybrid(args.width, args.layers), gdn_rules, "loss_curve_gdn")}


def losses(rule, data, args):
    """The loss of each step in bits a byte, and the seconds of a step."""
    torch.manual_seed(args.seed)
    model = MODELS[args.model][0](args).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, betas=(0.9, 0.98), weight_decay=0.05)
    history, start = [], time.perf_counter()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = train.rate_of(step, args)
        rows = train.pieces(data, args, step)
        with torch.autocast("cuda", torch.bfloat16):
            logits, _ = model(rows[:, :-1], rule)
        loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        history.append(loss.detach() / math.log(2))
        if step == 9:  # kernels are compiled and plans made
            torch.cuda.synchronize()
            start = time.perf_counter()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / max(args.steps - 10, 1)
    return [round(x, 5) for x in torch.stack(history).tolist()], seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="kda", help="whose layers (%(default)s)")
    for name, value in dict(steps=300, batch=8, tokens=1024, width=256, layers=4, seed=0).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--binaries", type=pathlib.Path, default=ROOT / "build",
                        help="a folder with kernel_hashes.json")
    parser.add_argument("--results", type=pathlib.Path, help="the folder of the result file")
    args = types.SimpleNamespace(**vars(parser.parse_args()), device="cuda")
    import fla
    import triton
    data, rows = texts(), []
    _, rules, what = MODELS[args.model]
    for name, rule in rules().items():
        history, seconds = losses(rule, data, args)
        rows.append({"implementation": name, "seconds_a_step": seconds, "losses": history})
        print(f"{name}: {history[0]:.3f} .. {history[-1]:.3f} bits a byte, {seconds * 1e3:.2f} ms a step", flush=True)
    if args.results:
        of_model = "" if args.model == "kda" else f" --model {args.model}"
        report = evidence.header(args.binaries, what, f"python3 bench/train/loss_curve.py{of_model}")
        options = ("steps", "batch", "tokens", "width", "layers", "seed", "rate")
        report.update(torch=torch.__version__, triton=triton.__version__, fla=fla.__version__,
                      text_bytes=len(data), **{n: getattr(args, n) for n in options}, cases=rows)
        evidence.write(args.results / f"gpu_{what}.json", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
