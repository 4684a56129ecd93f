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


def report(cases, constants=KNOWN, **more):
    rows = []
    for case in cases:
        lengths, heads, _ = refit.case_of(case)
        us = refit.dot(refit.terms(lengths, heads, SMS // 2, constants), constants)
        rows.append(dict(case=case, implementation="cuda.sm90.fused", segments=0, median_s=us * 1e-6, **more))
    return dict(copy_bytes_per_second=4e12, cases=rows)


class Refit(unittest.TestCase):
    def fit(self, found):
        prior, sms = refit.built_in(128)
        return prior, refit.fitted([row[1:] for row in refit.measured(found, 128)], SMS // sms, prior)

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

    def test_command(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "rows.json"
            run = lambda *more: subprocess.run([sys.executable, SCRIPT, path, *more], capture_output=True, text=True)
            of_a_card = dict(times=dict(forward=report(CASES, [90.0] * 5), forward_uncut=report(CASES)))
            for file in (of_a_card, report(CASES)):  # the file of ./dev gpu-test --report, and of kda bench
                path.write_text(json.dumps(file))
                done = run("--sms", str(SMS))
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertRegex(done.stdout, r"kK128Costs, 78 SMs:\n  \.few_ns = 51(\.\d+)?,  // was 33\.9\n")
            self.assertIn("argument --sms: must be at least 2", run("--sms", "1").stderr)
            self.assertIn("no row of cuda.sm90.fused", run("--sms", "78", "--dim", "64").stderr)


if __name__ == "__main__":
    unittest.main()
