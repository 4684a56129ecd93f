#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Cost constants of the fused kernel for another card, from a few rows of `kda bench` on it.

    kda bench forward --set sizes --context-parallel off --device cuda --json rows.json
    python3 bench/refit.py rows.json --sms 78

The file of `./dev gpu-test --report` has such rows too, and serves in the place of rows.json.

It fits few_ns, full_ns, chain_us, fixed_us and handoff_us of src/cuda/fused/cost.hpp to the rows of cuda.sm90.fused
that are not cut, and prints them as that file has them, with what each row takes and would be predicted. A constant on
which no row depends stays as it is. Rows should be of few heads and of many, short and long. Those of merge and
correction (OnePassCosts) are not fitted. Once they stand in cost.hpp,

    kda plan --heads 8 --seq-lens 65536 --sms 78 --explain

shows how a sequence is cut on such a card, and why.
"""
import argparse
import json
import pathlib
import re
import shlex
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
NAMES = ("few_ns", "full_ns", "chain_us", "fixed_us", "handoff_us")
BYTES_PER_TOKEN = 1282  # kBytesPerToken of src/cuda/common/cost_model.hpp
ROUNDS = 20
UNCUT = "forward_uncut"  # name of these rows in the file of ./dev gpu-test --report
PRIOR = 1e-4  # weight of a constant's present value against one row


def built_in(dim):
    """Constants of cost.hpp, and the SMs of a cluster."""
    text = (ROOT / "src/cuda/fused/cost.hpp").read_text()
    body = re.search(rf"Costs kK{dim}Costs = {{(.*?)}};", text, re.S).group(1)
    values = {name: float(value) for name, value in re.findall(r"\.(\w+) = ([\d.]+)", body)}
    return [values[name] for name in NAMES], int(values["sms"])


def number(text):
    unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1].upper())
    return int(text[:-1]) * unit if unit else int(text)


def lengths_of(text):
    """Of `--seq-lens 64K,2x1K`."""
    lengths = []
    for part in text.split(","):
        count, _, length = part.rpartition("x")
        lengths += [number(length)] * int(count or 1)
    return lengths


def case_of(text):
    """Lengths, value heads and K of a row's flags."""
    parser = argparse.ArgumentParser(prog="a row's case")
    parser.add_argument("--seq-lens", type=lengths_of)
    parser.add_argument("--tokens", type=number)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, required=True)
    parser.add_argument("--value-heads", type=int)
    parser.add_argument("--key-dim", type=int, default=128)
    flags, _ = parser.parse_known_args(shlex.split(text))
    return flags.seq_lens or [flags.tokens] * flags.batch, flags.value_heads or flags.heads, flags.key_dim


def terms(lengths, heads, clusters, constants):
    """What each constant is multiplied with in the time of a row, in us: chains_us() of cuda/fused/cut_model.hpp."""
    chains, tokens = len(lengths) * heads, sum(lengths)
    few = 2 * chains <= clusters
    token = lambda count: [count * 1e-3 * few, count * 1e-3 * (not few)]
    alone = [*token(max(lengths)), 1, 1, 0]
    if chains <= clusters:
        return alone
    shared = [*(x * heads / clusters for x in (*token(tokens), len(lengths))), 1, 0]
    longest = max(alone, shared, key=lambda row: dot(row, constants))
    return [*longest[:4], 1]


def dot(row, constants):
    return sum(a * b for a, b in zip(row, constants))


def solved(matrix, right):
    """x of matrix x = right, by elimination."""
    rows = [[*row, value] for row, value in zip(matrix, right)]
    for i in range(len(rows)):
        pivot = max(range(i, len(rows)), key=lambda j: abs(rows[j][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for j in range(len(rows)):
            if j != i:
                factor = rows[j][i] / rows[i][i]
                rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i])]
    return [row[-1] / row[i] for i, row in enumerate(rows)]


def fitted(rows, clusters, prior):
    """Constants with the least squares of relative errors. rows: (lengths, value heads, us). Which terms a row has
    depends on the constants, so they are found in rounds."""
    constants = list(prior)
    for _ in range(ROUNDS):
        # Unknowns are factors of the present values, so that one weight fits all.
        equations = [[x * c / us for x, c in zip(terms(lengths, heads, clusters, constants), prior)]
                     for lengths, heads, us in rows]
        matrix = [[sum(e[i] * e[j] for e in equations) + (PRIOR**2 if i == j else 0) for j in range(len(prior))]
                  for i in range(len(prior))]
        factors = solved(matrix, [sum(e[i] for e in equations) + PRIOR**2 for i in range(len(prior))])
        found = [factor * c for factor, c in zip(factors, prior)]
        if all(abs(a - b) <= 1e-9 * b for a, b in zip(found, constants)):
            break
        constants = found
    return found


def measured(report, dim):
    """Rows of the fused kernel without segments, whose memory does not bound them: (case, lengths, value heads, us)."""
    report = report.get("times", {}).get(UNCUT, report)
    for row in report.get("cases", []):
        if row.get("implementation") != "cuda.sm90.fused" or row.get("segments"):
            continue
        lengths, heads, key_dim = case_of(row["case"])
        us = row["median_s"] * 1e6
        memory_us = sum(lengths) * heads * BYTES_PER_TOKEN * key_dim / 128 / report["copy_bytes_per_second"] * 1e6
        if key_dim == dim and us > 1.05 * memory_us:
            yield row["case"], lengths, heads, us


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", type=pathlib.Path,
                        help="JSON of `kda bench forward`, `./dev gpu-bench fused` or `./dev gpu-test --report`")
    parser.add_argument("--sms", type=int, required=True, help="multiprocessors of the card that the rows are of")
    parser.add_argument("--dim", type=int, choices=(64, 128), default=128, help="K = V (%(default)s)")
    args = parser.parse_args()
    prior, sms = built_in(args.dim)
    if args.sms < sms:
        parser.error(f"argument --sms: must be at least {sms}, the SMs of a cluster, got {args.sms}")
    rows = [row for path in args.rows for row in measured(json.loads(path.read_text()), args.dim)]
    if not rows:
        sys.exit(f"refit.py: no row of cuda.sm90.fused without segments at K = {args.dim} that memory does not bound")
    clusters = args.sms // sms
    constants = fitted([row[1:] for row in rows], clusters, prior)
    for case, lengths, heads, us in rows:
        before, after = (dot(terms(lengths, heads, clusters, c), c) for c in (prior, constants))
        print(f"{case:40} {us:9.1f} us   as built {before / us - 1:+6.1%}   fitted {after / us - 1:+6.1%}")
    print(f"\nkK{args.dim}Costs, {args.sms} SMs:")
    for name, was, now in zip(NAMES, prior, constants):
        print(f"  .{name} = {now:.4g},  // was {was:g}")


if __name__ == "__main__":
    main()
