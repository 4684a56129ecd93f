#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""policies_test.py KDA: what ./dev gpu-bench context-parallel reports of the published policies, and the tables of
./dev gpu-bench launches and tails, without a GPU. Times and cards are made up; cases and plans are those of the
program KDA."""
import json
import pathlib
import stat
import sys
import tempfile
import textwrap
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))
import gpu_bench  # noqa: E402
sys.path.insert(1, str(pathlib.Path(gpu_bench.__file__).parent / "report"))
import tables  # noqa: E402

KDA = pathlib.Path(sys.argv.pop(1)).resolve()
CASES = ["--seq-lens 4K --heads 16", "--seq-lens 128K --heads 4", "--seq-lens 128K,1K --heads 4"]

# `kda` on a card of 132 SMs: a plan is the program's, off takes 200 us, a cut call 50 and an uncut one 210.
STAND_IN = f"""#!{sys.executable}
import json, subprocess, sys
what, *flags = sys.argv[1:]
if what == "info":
    print(json.dumps(dict(gpus=[dict(num_sms=132)])))
elif what == "plan":
    sys.exit(subprocess.run([{str(KDA)!r}, what, *flags]).returncode)
else:
    policy = flags[flags.index("--context-parallel") + 1] if "--context-parallel" in flags else "auto"
    rows = []
    for case in {CASES!r}:
        plan = subprocess.run([{str(KDA)!r}, "plan", *case.split(), "--context-parallel", policy, "--json"],
                              capture_output=True, check=True, text=True).stdout
        segments = len(json.loads(plan)["segments"])
        for name, us, cut in (("off", 200, 0), ("on", 50 if segments else 210, segments)):
            rows.append(dict(case=case, what=name, median_s=us * 1e-6, segments=cut, implementation="cuda." + policy))
    with open(flags[flags.index("--json") + 1], "w") as file:
        json.dump(dict(copy_bytes_per_second=4e12, cases=rows), file)
"""


class Policies(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        kda = cls.folder / "kda"
        kda.write_text(textwrap.dedent(STAND_IN))
        kda.chmod(kda.stat().st_mode | stat.S_IXUSR)
        cls.report = gpu_bench.run_bench(kda, "context-parallel", ["context_parallel"])

    def test_rows_of_every_policy(self):
        rows = self.report["policies"]
        self.assertEqual([row["policy"] for row in rows[::len(CASES)]], ["auto", "flashkda", "cula"])
        self.assertEqual([row["case"] for row in rows], 3 * CASES)
        for row in rows:
            self.assertAlmostEqual(row["off_s"], 200e-6)
            self.assertAlmostEqual(row["on_s"], 50e-6 if row["segments"] else 210e-6)
            self.assertTrue(row["reason"].startswith(row["policy"]), row["reason"])
            self.assertEqual(row["predicted_s"] is None, row["policy"] != "auto")

    def test_what_is_declined(self):
        declined = {(row["policy"], row["case"]): row for row in self.report["declined"]}
        uncut = {(row["policy"], row["case"]) for row in self.report["policies"] if not row["segments"]}
        self.assertEqual(set(declined), uncut)
        self.assertIn(("cula", CASES[0]), uncut)  # fewer than 256 chunks
        self.assertNotIn(("cula", CASES[1]), uncut)
        self.assertNotIn(("auto", CASES[1]), uncut)
        for row in declined.values():
            self.assertAlmostEqual(row["overhead"], 0.05)

    def test_cases_are_those_of_auto_alone(self):
        """Tables read two rows a case, off and on."""
        self.assertEqual([row["what"] for row in self.report["cases"]], ["off", "on"] * len(CASES))
        self.assertEqual({row["implementation"] for row in self.report["cases"]}, {"cuda.auto"})

    def test_text(self):
        text = gpu_bench.policy_table(json.loads(json.dumps(self.report)))
        self.assertIn(f"{CASES[1]} | 200.0 | 50.0 (", text)
        self.assertIn(f"declined by cula: {CASES[0]}: +5.0% beside off (cuda.cula; cula guard 1: ", text)

    def test_table(self):
        self.addCleanup(setattr, tables, "RESULTS", tables.RESULTS)
        tables.RESULTS = self.folder
        head = dict(device="a card", driver="1", toolkit="13", date="2026-01-01", command="a command", families={})
        (tables.RESULTS / "gpu_context_parallel.json").write_text(json.dumps(head | self.report))
        text = tables.table_gpu_policies()
        cut = sum(1 for row in self.report["policies"] if row["policy"] == "cula" and row["segments"])
        self.assertIn(f"| `cula` | {cut} of 3 | 4.00x | ", text)
        self.assertRegex(text, r"\| `cula` \| cula guard 1 \| \d \| \+5% \|")


class MadeUpResults(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.results = pathlib.Path(folder.name)
        self.addCleanup(setattr, tables, "RESULTS", tables.RESULTS)
        tables.RESULTS = self.results

    def write(self, what, rows):
        (self.results / f"gpu_{what}.json").write_text(json.dumps(dict(
            device="a card", driver="1", toolkit="13", date="2026-01-01", command=f"./dev gpu-bench {what}",
            families={}, copy_bytes_per_second=4e12, cases=rows)))


class Tails(MadeUpResults):
    """The tables of `./dev gpu-bench tails`, before and after a card has run it."""

    def test_before(self):
        self.assertEqual(tables.table_gpu_tails(), "No card has run `./dev gpu-bench tails` yet.")

    def test_after(self):
        row = lambda name, tokens, what, us: dict(  # noqa: E731
            set=name, case=f"--batch 64 --tokens {tokens} --heads 32", boundary_states="bf16", what=what,
            median_s=us * 1e-6, copy_s=5e-5)
        rows = [row("tails", 1, what, us) for what, us in (("decode", 60), ("tail", 45), ("tail, all fold", 90))]
        for tokens in (4, 16):
            rows += [row("verify", tokens, what, us) for what, us in (
                ("decode of one token", 50), ("verify, tail", 75), ("verify, tail, all fold", 80))]
        rows.append(row("verify", 4, "verify, a slot a token", 150))
        self.write("tails", rows)
        text = tables.table_gpu_tails()
        self.assertIn("| bf16 | 64 | 50.0 | 60.0 | 45.0 | 0.75 | 90.0 | 1.50 |", text)
        self.assertIn("| bf16 | 64, 4 | 50.0 | 150 | 75.0 | 0.50 | 1.50 | 80.0 |", text)
        self.assertIn("| bf16 | 64, 16 | 50.0 |  | 75.0 |  | 1.50 | 80.0 |", text)  # a slot a token: 8 at most


class Launches(MadeUpResults):
    """The table of `./dev gpu-bench launches`, before and after a card has run it."""

    def test_before(self):
        self.assertEqual(tables.table_gpu_launches(), "No card has run `./dev gpu-bench launches` yet.")

    def test_after(self):
        us = {"off": 48, "to segment_scan": 22, "to segment_merge": 30, "all": 42}
        rows = [dict(case=f"--tokens 1024 --heads 4 --regime {kind}", what=what, median_s=us[what] * 1e-6, segments=4)
                for kind in ("strong", "trained") for what in us]
        rows += [dict(case=f"--tokens 2048 --heads 24 --regime {kind}", what=what, median_s=us[what] * 1e-6, segments=2)
                 for kind in ("strong", "trained") for what in us]
        rows += [dict(case=f"--tokens 2048 --heads 16 --regime {kind}", what=what, median_s=us[what] * 1e-6, segments=0)
                 for kind in ("strong", "trained") for what in ("off", "all")]
        self.write("launches", rows)
        text = tables.table_gpu_launches()
        cells = "48.0 | 22.0 + 8.0 + 12.0 = 42.0"
        self.assertIn(f"| 1,024, 4 | 4 | {cells} | {cells} |", text)
        unmerged = "48.0 | 22.0 + 20.0 = 42.0"  # two segments need no merge
        self.assertIn(f"| 2,048, 24 | 2 | {unmerged} | {unmerged} |", text)
        self.assertIn("| 2,048, 16 | none | 48.0 | 42.0 | 48.0 | 42.0 |", text)


if __name__ == "__main__":
    unittest.main()
