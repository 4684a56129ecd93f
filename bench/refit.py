#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Cost constants of a fused kernel for another card, from a few rows of `kda bench` on it.

    kda bench forward --set sizes --context-parallel off --device cuda --json rows.json
    python3 bench/refit.py rows.json --sms 78

    kda bench forward --set refit --backend cuda.sm80.fused --device cuda --json rows.json
    python3 bench/refit.py rows.json --backend cuda.sm80.fused --json card.json

The file of `./dev gpu-test --report` has such rows too, and serves in the place of rows.json.

The first form is for Hopper. It fits few_ns, full_ns, chain_us, fixed_us and handoff_us of src/cuda/fused/cost.hpp to
the rows of cuda.sm90.fused that are not cut, and prints them as that file has them, with what each row takes and would
be predicted. A constant on which no row depends stays as it is. Rows should be of few heads and of many, short and
long. Those of merge and correction (OnePassCosts) are not fitted. Once they stand in cost.hpp,

    kda plan --heads 8 --seq-lens 65536 --sms 78 --explain

shows how a sequence is cut on such a card, and why.

The second form is for other cards. It fits step_cycles, chain_cycles and fixed_us of src/cuda/fused/portable/cost.hpp
at the clock that the planner has for the card, then the factors of the other kinds of gates and types. Send card.json,
which has the rows and the constants, or let the row stand in kRows and the capability in is_measured().
"""
import argparse
import json
import pathlib
import re
import shlex
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
BYTES_PER_TOKEN = 1282  # kBytesPerToken of src/cuda/common/cost_model.hpp
ROUNDS = 20
UNCUT = "forward_uncut"  # name of these rows in the file of ./dev gpu-test --report
PORTABLE_ROWS = "forward_portable"  # the same of cuda.sm80.fused
PRIOR = 1e-4  # weight of a constant's present value against one row
SUBCHUNK = 16  # tokens of a step


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


def flags_of(text):
    parser = argparse.ArgumentParser(prog="a row's case")
    parser.add_argument("--seq-lens", type=lengths_of)
    parser.add_argument("--tokens", type=number)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, required=True)
    parser.add_argument("--value-heads", type=int)
    parser.add_argument("--key-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--regime", default="trained")
    return parser.parse_known_args(shlex.split(text))[0]


def case_of(text):
    """Lengths, value heads and K of a row's flags."""
    flags = flags_of(text)
    return flags.seq_lens or [flags.tokens] * flags.batch, flags.value_heads or flags.heads, flags.key_dim


def kind_of(text):
    """The field of Costs that a row's steps are multiplied by, "" for none: kind_of() of portable/cost.hpp. None: a
    regime whose sub-chunks take different times."""
    flags = flags_of(text)
    if flags.dtype != "bf16":
        return "fp16_rows" if flags.regime == "trained" else None
    return {"trained": "", "softplus": "softplus", "log": "bf16_operands"}.get(flags.regime)


def is_large(compute_capability):
    """Whether a block may have the 163 KB of the large form: block_shared_bytes() of src/cuda/common/common.hpp."""
    return compute_capability in (80, 87) or compute_capability // 10 in (9, 10)


class Hopper:
    """cuda.sm90.fused: constants of fused/cost.hpp, chains_us() of fused/cut_model.hpp."""
    names = ("few_ns", "full_ns", "chain_us", "fixed_us", "handoff_us")
    implementation, rows_in_report = "cuda.sm90.fused", UNCUT

    def __init__(self, dim, sms):
        text = (ROOT / "src/cuda/fused/cost.hpp").read_text()
        body = re.search(rf"Costs kK{dim}Costs = {{(.*?)}};", text, re.S).group(1)
        values = {name: float(value) for name, value in re.findall(r"\.(\w+) = ([\d.]+)", body)}
        self.least_sms = int(values["sms"])
        self.prior = [values[name] for name in self.names]
        self.clusters = sms // self.least_sms
        self.title = f"kK{dim}Costs"

    def terms(self, lengths, heads, constants):
        """What each constant is multiplied with in the time of a row, in us."""
        chains, tokens = len(lengths) * heads, sum(lengths)
        few = 2 * chains <= self.clusters
        token = lambda count: [count * 1e-3 * few, count * 1e-3 * (not few)]
        alone = [*token(max(lengths)), 1, 1, 0]
        if chains <= self.clusters:
            return alone
        shared = [*(x * heads / self.clusters for x in (*token(tokens), len(lengths))), 1, 0]
        return [*max(alone, shared, key=lambda row: dot(row, constants))[:4], 1]

    def kind(self, case):
        return ""


class Portable:
    """cuda.sm80.fused: a row of kRows and forward_us() of fused/portable/cost.hpp."""
    names = ("step_cycles", "chain_cycles", "fixed_us")
    factors = ("bf16_operands", "softplus", "fp16_rows")
    implementation, rows_in_report, least_sms = "cuda.sm80.fused", PORTABLE_ROWS, 1

    def __init__(self, dim, sms, large=True, gigahertz=1.75):
        text = (ROOT / "src/cuda/fused/portable/cost.hpp").read_text()
        form = rf"\.key_dim = {dim},\s*\.large = {str(large).lower()},(.*?)}}"
        values = {name: float(value) for name, value in re.findall(r"\.(\w+) = ([\d.]+)",
                                                                   re.search(form, text, re.S).group(1))}
        self.prior = [values[name] for name in self.names]
        self.present = {name: values[name] for name in self.factors}
        self.sms, self.tiles, self.cycle_us = sms, dim // 64, 1e-3 / gigahertz
        self.title = f"kRows, K = {dim}, {'large' if large else 'small'}"

    def terms(self, lengths, heads, constants):
        chains = lambda tokens, count: [tokens / SUBCHUNK * self.cycle_us, count * self.cycle_us, 1]
        share = heads * self.tiles / self.sms
        alone = chains(max(lengths), 1)
        shared = chains(sum(lengths) * share, len(lengths) * share)
        return max(alone, shared, key=lambda row: dot(row, constants))

    def kind(self, case):
        return kind_of(case)

    def fitted_factors(self, rows, constants):
        """{kind: what its steps take of the usual ones}, from the middle one of its rows."""
        found = {name: [] for name in self.factors}
        for case, lengths, heads, us in rows:
            if self.kind(case) in found:
                step, *others = self.terms(lengths, heads, constants)
                found[self.kind(case)].append((us - dot(others, constants[1:])) / (step * constants[0]))
        return {name: sorted(ratios)[len(ratios) // 2] for name, ratios in found.items() if ratios}


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


def fitted(rows, model):
    """Constants with the least squares of relative errors. rows: (lengths, value heads, us). Which terms a row has
    depends on the constants, so they are found in rounds."""
    prior = model.prior
    constants = list(prior)
    for _ in range(ROUNDS):
        # Unknowns are factors of the present values, so that one weight fits all.
        equations = [[x * c / us for x, c in zip(model.terms(lengths, heads, constants), prior)]
                     for lengths, heads, us in rows]
        matrix = [[sum(e[i] * e[j] for e in equations) + (PRIOR**2 if i == j else 0) for j in range(len(prior))]
                  for i in range(len(prior))]
        factors = solved(matrix, [sum(e[i] for e in equations) + PRIOR**2 for i in range(len(prior))])
        found = [factor * c for factor, c in zip(factors, prior)]
        if all(abs(a - b) <= 1e-9 * b for a, b in zip(found, constants)):
            break
        constants = found
    return found


def measured(report, dim, model):
    """Rows of the kernel without segments, whose memory does not bound them: (case, lengths, value heads, us)."""
    report = report.get("times", {}).get(model.rows_in_report, report)
    for row in report.get("cases", []):
        if row.get("implementation") != model.implementation or row.get("segments"):
            continue
        lengths, heads, key_dim = case_of(row["case"])
        us = row["median_s"] * 1e6
        memory_us = sum(lengths) * heads * BYTES_PER_TOKEN * key_dim / 128 / report["copy_bytes_per_second"] * 1e6
        if key_dim == dim and us > 1.05 * memory_us:
            yield row["case"], lengths, heads, us


def card_of(reports, key):
    """What the files say of the card; None: nothing."""
    for report in reports:
        for part in (report, *report.get("times", {}).values()):
            if key in part:
                return part[key]
    return None


def model_of(parser, args, reports):
    sms = args.sms or card_of(reports, "num_sms")
    if sms is None:
        parser.error("argument --sms: is needed, the rows do not say it")
    args.sms = sms
    if args.backend == Hopper.implementation:
        model = Hopper(args.dim, sms)
    else:
        capability, gigahertz = (card_of(reports, key) for key in ("compute_capability", "gigahertz"))
        if capability is None or gigahertz is None:
            parser.error(f"argument --backend: {args.backend} needs rows that say compute_capability and gigahertz, "
                         "as `kda bench forward --json` writes them")
        model = Portable(args.dim, sms, is_large(capability), gigahertz)
    if sms < model.least_sms:
        parser.error(f"argument --sms: must be at least {model.least_sms}, the SMs of a cluster, got {sms}")
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", type=pathlib.Path,
                        help="JSON of `kda bench forward`, `./dev gpu-bench fused` or `./dev gpu-test --report`")
    parser.add_argument("--sms", type=int,
                        help="multiprocessors of the card that the rows are of (default: as they say)")
    parser.add_argument("--dim", type=int, choices=(64, 128), default=128, help="K = V (%(default)s)")
    parser.add_argument("--backend", choices=(Hopper.implementation, Portable.implementation),
                        default=Hopper.implementation, help="whose constants (%(default)s)")
    parser.add_argument("--json", type=pathlib.Path, help="a file of the card, its rows and constants, to send")
    args = parser.parse_args()
    reports = [json.loads(path.read_text()) for path in args.rows]
    model = model_of(parser, args, reports)
    rows = [row for report in reports for row in measured(report, args.dim, model)]
    usual = [row for row in rows if model.kind(row[0]) == ""]
    if not usual:
        sys.exit(f"refit.py: no row of {args.backend} without segments at K = {args.dim} that memory does not bound")
    constants = fitted([row[1:] for row in usual], model)
    errors = []
    for case, lengths, heads, us in usual:
        before, after = (dot(model.terms(lengths, heads, c), c) for c in (model.prior, constants))
        errors.append({"case": case, "us": us, "as_built": before / us - 1, "fitted": after / us - 1})
        print(f"{case:40} {us:9.1f} us   as built {before / us - 1:+6.1%}   fitted {after / us - 1:+6.1%}")
    print(f"\n{model.title}, {args.sms} SMs:")
    found = dict(zip(model.names, constants))
    was = dict(zip(model.names, model.prior))
    if isinstance(model, Portable):
        found |= model.fitted_factors(rows, constants)
        was |= model.present
    for name, now in found.items():
        print(f"  .{name} = {now:.4g},  // was {was[name]:g}")
    if args.json:
        keys = ("device", "driver", "compute_capability", "gigahertz", "copy_bytes_per_second")
        args.json.write_text(json.dumps(
            {"what": "cost constants", "backend": args.backend, "key_dim": args.dim, "num_sms": args.sms}
            | {key: card_of(reports, key) for key in keys}
            | {"constants": found, "rows": errors, "others": [{"case": row[0], "us": row[3]} for row in rows
                                                              if row not in usual]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
