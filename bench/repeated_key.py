#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The drift of a state where one key repeats and nothing decays: errors against float64, by length.

    python3 bench/repeated_key.py [--tokens 1024,4096,16384] [--device cuda] [--fla]

q = k = one row for all tokens, raw gates of -12 bounded at -5 (a decay of 1 - 3e-5 a token), step sizes sigmoid(8), and
values that repeat every 16 tokens, or do not. An error is the norm of the difference divided by the norm of what is
right. Needs torch and libkda; with --fla, fla-core too.
"""
import argparse
import json

import torch

import libkda

FLAGS = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, lower_bound=-5.0,
             output_final_state=True)


def inputs(tokens, period, heads=1, size=128, seed=0):
    """bf16, on the CPU. `period`: tokens after which values repeat."""
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator).bfloat16()
    key = normal(1, 1, heads, size).expand(1, tokens, heads, size)
    values = normal(1, period, heads, size).repeat(1, -(-tokens // period), 1, 1)[:, :tokens]
    filled = lambda value, *shape: torch.full(shape, value, dtype=torch.bfloat16)
    return dict(q=key, k=key, v=values, g=filled(-12.0, 1, tokens, heads, size), beta=filled(8.0, 1, tokens, heads),
                A_log=torch.zeros(heads))


def relative(found, right):
    return ((found.double().cpu() - right).norm() / right.norm()).item()


def errors(function, tokens, period, device):
    """Of o and of the final state."""
    x = inputs(tokens, period)
    with torch.no_grad():
        right = libkda.chunk_kda(**{name: t.double() for name, t in x.items()}, **FLAGS)
        found = function(**{name: t.contiguous().to(device) for name, t in x.items()}, **FLAGS)
    return dict(o=relative(found[0], right[0]), state=relative(found[1], right[1]))


def functions(fla):
    yield "libkda", libkda.chunk_kda
    if fla:
        from fla.ops.kda import chunk_kda
        yield "FLA", lambda **x: chunk_kda(**x, safe_gate=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", default="1024,4096,16384", help="lengths (%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(%(default)s)")
    parser.add_argument("--fla", action="store_true", help="FLA's chunk_kda beside libkda's, on a GPU")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    arguments = parser.parse_args()
    rows = []
    for name, function in functions(arguments.fla):
        for tokens in map(int, arguments.tokens.split(",")):
            for repeats in (True, False):
                row = dict(function=name, tokens=tokens, repeats=repeats,
                           **errors(function, tokens, 16 if repeats else tokens, arguments.device))
                rows.append(row)
                if not arguments.json:
                    print(f"{name}, {tokens:6d} tokens, v {'every 16 tokens' if repeats else 'without repeats'}: "
                          f"state {row['state']:.2e}, o {row['o']:.2e}", flush=True)
    if arguments.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
