#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""gpu_test.py --report where programs stand in for those of a build, and for nvidia-smi: what the file says."""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
FAMILIES = json.loads((ROOT / "bench/families.json").read_text())
PROGRAM = """#!{python}
import json, pathlib, sys
words, fails = sys.argv[1:], {fails!r}
name = pathlib.Path(sys.argv[0]).name
file = words[words.index("--json") + 1] if "--json" in words else words[0].partition("json:")[2] if words else ""
failed = fails in (name, *words)
if name.endswith("_test"):
    case = dict(classname="A", name="b", **(dict(failures=[dict(failure="wrong")]) if failed else {{}}))
    content = dict(testsuites=[dict(testsuite=[case])])
elif words[0] == "bench":
    case = dict(case="--heads 4", implementation="cuda." + words[1], median_s=2e-5, copy_s=1e-5, words=words)
    content = dict(copy_bytes_per_second=1e12, cases=[case])
else:
    content = {{}}
    print("a card of a test")
if file and not (failed and words[0] == "bench"):
    pathlib.Path(file).write_text(json.dumps(content))
sys.exit(failed)
"""


class Report(unittest.TestCase):
    def report(self, *flags, fails=""):
        with tempfile.TemporaryDirectory() as folder:
            build = pathlib.Path(folder)
            hashes = {family: {"sm_90": "0", "sm_120": "1"} for family in FAMILIES}
            (build / "kernel_hashes.json").write_text(json.dumps({"toolkit": "13.0", "families": hashes}))
            smi = "#!/bin/sh\necho 'NVIDIA GeForce RTX 5090, 590.1, 12.0'\n"
            programs = {"tests/decode_test", "tests/head_gate_test", "tests/streams_test", "tests/kda_fuzz", "bin/kda"}
            for name in programs | {"smi/nvidia-smi"}:
                path = build / name
                path.parent.mkdir(exist_ok=True)
                path.write_text(smi if "smi" in name else PROGRAM.format(python=sys.executable, fails=fails))
                path.chmod(0o755)
            done = subprocess.run(
                [sys.executable, HERE / "gpu_test.py", "--family", "decode", "--binaries", build, *flags], text=True,
                env=dict(os.environ, PATH=f"{build}/smi:{os.environ['PATH']}"), cwd=folder, capture_output=True,
                check=False)
            file = build / "gpu_report.json"
            return done, json.loads(file.read_text()) if file.exists() else None

    def test_one_file_says_all(self):
        done, found = self.report("--report")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual((found["device"], found["architecture"]), ("NVIDIA GeForce RTX 5090", "sm_120"))
        self.assertEqual(found["kernels_that_ran"], ["cuda.backward", "cuda.decode", "cuda.forward"])
        self.assertEqual(found["times"]["decode"]["cases"][0]["copy_s"], 1e-5)
        self.assertIn(["--context-parallel", "off"],
                      [row["words"][-2:] for row in found["times"]["forward_uncut"]["cases"]], "rows of bench/refit.py")
        self.assertIn(["--backend", "cuda.sm80.fused"],
                      [row["words"][-2:] for row in found["times"]["forward_portable"]["cases"]])
        self.assertEqual({row["name"] for row in found["rows"] if row.get("passed")},
                         {"decode_test", "head_gate_test", "streams_test"})
        self.assertIn("a card of a test", found["info"])
        self.assertTrue(found["ok"])

    def test_what_fails_is_in_it(self):
        done, found = self.report("--report", fails="decode_test")
        self.assertEqual((done.returncode, found["ok"]), (1, False))
        self.assertEqual([row["name"] for row in found["rows"] if not row["ok"]], ["decode_test"])
        done, found = self.report("--report", fails="backward")
        self.assertEqual((done.returncode, found["ok"]), (1, False))
        self.assertIn("exit status 1", found["times"]["backward"]["failed"])
        self.assertEqual(found["kernels_that_ran"], ["cuda.decode", "cuda.forward"])

    def test_flags_that_do_not_go_with_it(self):
        done, found = self.report("--report", "--sanitize")
        self.assertEqual((done.returncode, found), (2, None))
        self.assertIn("without --sanitize and --json", done.stderr)


if __name__ == "__main__":
    unittest.main()
