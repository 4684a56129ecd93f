#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains the model on text files, on any device:

    python3 examples/language_model/train.py docs/*.md README.md CONTRIBUTING.md --minutes 10

libkda has no backward pass yet, so this uses its differentiable reference, libkda.naive_chunk_kda.
"""
import argparse
import pathlib
import time

import torch
import torch.nn.functional as F
from model import LOWER_BOUND, WEIGHTS, LanguageModel
from safetensors.torch import save_file

from libkda import naive_chunk_kda, naive_kda_lowerbound_gate


def reference_kda(q, k, v, g, beta, initial_state=None, A_log=None, dt_bias=None, **flags):
    """chunk_kda with gradients, for the flags that the model sets."""
    unit = lambda x: x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    g = naive_kda_lowerbound_gate(g, A_log, dt_bias, LOWER_BOUND)
    return naive_chunk_kda(unit(q), unit(k), v, g, beta.sigmoid(), initial_state=initial_state,
                           output_final_state=True, chunk_size=32)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("texts", nargs="+", type=pathlib.Path)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=pathlib.Path, default=WEIGHTS)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_flush_denormal(True)
    data = torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in args.texts)), dtype=torch.uint8).long()
    model = LanguageModel().to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, betas=(0.9, 0.98), weight_decay=0.05)
    start, step, mean = time.time(), 0, None
    while (done := (time.time() - start) / (60 * args.minutes)) < 1:
        begin = torch.randint(len(data) - args.tokens - 1, (args.batch, 1))
        rows = data[begin + torch.arange(args.tokens + 1)].to(args.device)
        for group in optimizer.param_groups:  # warm up, then down to a twentieth
            group["lr"] = args.rate * min(1, (step + 1) / 50) * (1 - 0.95 * done)
        logits, _ = model(rows[:, :-1], reference_kda)
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean = loss.item() if mean is None else 0.98 * mean + 0.02 * loss.item()
        step += 1
        if step % 50 == 0:
            print(f"step {step}: {mean / 0.6931:.3f} bits a byte, {100 * done:.0f}%", flush=True)
    save_file({name: x.half() for name, x in model.state_dict().items()}, args.output)
    print(f"written: {args.output}, {args.output.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
