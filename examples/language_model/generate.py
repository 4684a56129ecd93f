#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Text from the small model, through libkda: the prompt in one call of chunk_kda, then a byte at a time.

    python3 examples/language_model/generate.py "The state is" --bytes 300
"""
import argparse
import pathlib
import sys
import time

import torch
from model import WEIGHTS, load

from libkda import chunk_kda, fused_recurrent_kda


@torch.inference_mode()
def generate(model, prompt, count, temperature=0.6, seed=0):
    """Yields `count` bytes that go on from `prompt`; temperature 0 takes the likeliest."""
    device = model.embed.weight.device
    random = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt)], device=device)
    logits, states = model(tokens, chunk_kda)  # prefill
    for _ in range(count):
        last = logits[0, -1].float().cpu()
        if temperature > 0:
            token = torch.multinomial((last / temperature).softmax(-1), 1, generator=random)
        else:
            token = last.argmax(keepdim=True)
        yield token.item()
        logits, states = model(token[None].to(device), fused_recurrent_kda, states)  # decode


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("prompt", nargs="?", default="The state is")
    parser.add_argument("--bytes", type=int, default=400, help="to generate (400)")
    parser.add_argument("--temperature", type=float, default=0.6, help="0: always the likeliest byte (0.6)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weights", type=pathlib.Path, default=WEIGHTS, help="what train.py wrote (this folder's)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    prompt = args.prompt.encode() or b"\n"
    model = load(args.device, torch.bfloat16 if args.device.startswith("cuda") else torch.float32,
                 args.weights)
    sys.stdout.buffer.write(prompt)
    start = time.perf_counter()
    for byte in generate(model, prompt, args.bytes, args.temperature, args.seed):
        sys.stdout.buffer.write(bytes([byte]))
        sys.stdout.flush()
    seconds = time.perf_counter() - start
    print(f"\n\n{args.bytes} bytes in {seconds:.2f} s on {args.device}: {args.bytes / seconds:.0f} bytes/s",
          file=sys.stderr)


if __name__ == "__main__":
    main()
