#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""bench/refit.py finds the constants that times were made with, and keeps those that no row depends on."""
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "bench/refit.py"
sys.path.insert(0, str(SCRIPT.parent))
import refit  # noqa: E402

KNOWN = [51.0, 57.0, 4.1, 11.0, 8.0]
CASES = ["--seq-lens 4K --heads 4", "--seq-lens 32K --heads 4", "--seq-lens 1K,64K --heads 6",
         "--seq-lens 8K --heads 30", "--tokens 2048 --heads 64", "--tokens 8192 --heads 96 --batch 2",
         "--seq-lens 300x128 --heads 8",
         "--seq-lens 40x1K --heads 4 --value-heads 8"]
SMS = 78

PORTABLE = {"step_cycles": 2100.0, "chain_cycles": 5200.0, "fixed_us": 12.0}
FACTORS = {"bf16_operands": 0.8, "softplus": 1.5, "fp16_rows": 1.1}
CARD = {"device": "a card of a test", "num_sms": 108, "compute_capability": 80, "gigahertz": 1.41}


def report(cases, constants=KNOWN, **more):
    rows, model = [], refit.Hopper(128, SMS)
    for case in cases:
        lengths, heads, _ = refit.case_of(case)
        us = refit.dot(model.terms(lengths, heads, constants), constants)
        rows.append(dict(case=case, implementation="cuda.sm90.fused", segments=0, median_s=us * 1e-6, **more))
    return dict(copy_bytes_per_second=4e12, cases=rows)


def portable_report():
    """Rows of bench/cases/refit.txt, as a card of known cycles would take them."""
    text = (SCRIPT.parent / "cases/refit.txt").read_text()
    rows, constants = [], list(PORTABLE.values())
    for case in (line for line in text.splitlines() if line and line[0] != "#"):
        lengths, heads, dim = refit.case_of(case)
        model = refit.Portable(dim, CARD["num_sms"], True, CARD["gigahertz"])
        step, *others = model.terms(lengths, heads, constants)
        us = step * constants[0] * FACTORS.get(refit.kind_of(case), 1) + refit.dot(others, constants[1:])
        rows.append(dict(case=case, implementation="cuda.sm80.fused", segments=0, median_s=us * 1e-6))
    return CARD | dict(copy_bytes_per_second=1.8e12, cases=rows)


class Refit(unittest.TestCase):
    def fit(self, found):
        model = refit.Hopper(128, SMS)
        return model.prior, refit.fitted([row[1:] for row in refit.measured(found, 128, model)], model)

    def test_known_constants_are_found(self):
        for found, known in zip(self.fit(report(CASES))[1], KNOWN):
            self.assertAlmostEqual(found, known, delta=2e-3 * known)

    def test_noise_moves_them_little(self):
        noisy = report(CASES)
        for i, row in enumerate(noisy["cases"]):
            row["median_s"] *= 1 + (0.005 if i % 2 else -0.005)
        few, full, *_ = self.fit(noisy)[1]
        self.assertAlmostEqual(few, KNOWN[0], delta=1)
        self.assertAlmostEqual(full, KNOWN[1], delta=1)

    def test_what_no_row_depends_on_stays(self):
        prior, found = self.fit(report(CASES[:2]))
        self.assertAlmostEqual(found[0], KNOWN[0], delta=0.1)
        self.assertAlmostEqual(found[1], prior[1], places=6)
        self.assertAlmostEqual(found[4], prior[4], places=6)

    def test_rows_that_say_nothing_are_left_out(self):
        mixed = report(CASES)
        mixed["cases"] += report(CASES[:3], [1e-3] * 5)["cases"]  # faster than memory
        mixed["cases"] += report(CASES, [90.0] * 5)["cases"]
        for row in mixed["cases"][-len(CASES):]:
            row["segments"] = 8
        mixed["cases"].append(dict(mixed["cases"][0], implementation="cuda.sm80.staged", median_s=1))
        self.assertAlmostEqual(self.fit(mixed)[1][0], KNOWN[0], delta=0.2)


class Command(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.path = pathlib.Path(self.folder.name) / "rows.json"

    def run_on(self, found, *flags):
        self.path.write_text(json.dumps(found))
        return subprocess.run([sys.executable, SCRIPT, self.path, *flags], capture_output=True, text=True, check=False)

    def test_of_hopper(self):
        of_a_card = dict(times=dict(forward=report(CASES, [90.0] * 5), forward_uncut=report(CASES)))
        for file in (of_a_card, report(CASES)):  # the file of ./dev gpu-test --report, and of kda bench
            done = self.run_on(file, "--sms", str(SMS))
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertRegex(done.stdout, r"kK128Costs, 78 SMs:\n  \.few_ns = 51(\.\d+)?,  // was 33\.9\n")
        said = self.run_on(report(CASES) | {"num_sms": SMS})
        self.assertEqual(said.stdout, done.stdout)
        self.assertIn("argument --sms: must be at least 2", self.run_on(report(CASES), "--sms", "1").stderr)
        self.assertIn("argument --sms: is needed", self.run_on(report(CASES)).stderr)
        self.assertIn("no row of cuda.sm90.fused", self.run_on(report(CASES), "--sms", "78", "--dim", "64").stderr)

    def test_of_other_cards(self):
        for dim in (64, 128):
            card = pathlib.Path(self.folder.name) / "card.json"
            flags = ("--backend", "cuda.sm80.fused", "--dim", str(dim), "--json", card)
            done = self.run_on(portable_report(), *flags)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn(f"kRows, K = {dim}, large, 108 SMs:", done.stdout)
            sent = json.loads(card.read_text())
            for name, known in (PORTABLE | FACTORS).items():
                self.assertAlmostEqual(sent["constants"][name], known, delta=1e-2 * known, msg=name)
            self.assertEqual((sent["compute_capability"], sent["gigahertz"]), (80, 1.41))
            self.assertGreater(len(sent["rows"]), 3)
            self.assertEqual(len(sent["others"]), 3)
            of_a_card = dict(times=dict(forward={}, forward_portable=portable_report()))
            self.assertEqual(self.run_on(of_a_card, *flags).stdout, done.stdout)
        lacks = {key: value for key, value in portable_report().items() if key != "gigahertz"}
        self.assertIn("needs rows that say compute_capability and gigahertz", self.run_on(lacks, *flags).stderr)
        self.assertIn("no row of cuda.sm80.fused", self.run_on(CARD | report(CASES), *flags).stderr)

    def test_forms_have_rows_of_their_own(self):
        small, large = (refit.Portable(128, 100, of) for of in (False, True))
        self.assertGreater(small.prior[0], large.prior[0])
        self.assertIn("small", small.title)
        self.assertEqual([refit.is_large(of) for of in (80, 86, 87, 89, 90, 100, 103, 110, 120)],
                         [True, False, True, False, True, True, True, False, False])


if __name__ == "__main__":
    unittest.main()
