#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What tools/dev/kernel_code.py sees of machine code, and what it says of results."""
import contextlib
import io
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "bench"))
sys.path.insert(0, str(ROOT / "tools" / "dev"))
import evidence
import kernel_code

# A source for each pattern of a family.
SOURCES = sorted({pattern.replace("*", "a") for row in kernel_code.FAMILIES.values() for pattern in row["kernels"]})


def cubin(kernels, arch, banks=False):
    """An ELF file for sm_<arch> with a section of code for each (name, code, registers, parameter bytes). `banks`: each
    knows the number of its constant bank's symbol."""
    sections = [("", 0, b"", 0)]
    symbols = [("", 0)]
    info = b""
    for name, code, registers, parameters in kernels:
        sections.append((f".text.{name}", 1, code, 0))
        symbols.append((name, len(sections) - 1))
        number = len(symbols) - 1
        info += struct.pack("<BBHII", 4, 0x2f, 8, number, registers)
        sections.append((f".nv.constant0.{name}", 1, bytes(parameters), 0))
        own = struct.pack("<BBHI", 4, 0x0f, 4, number) + banks * struct.pack("<BBHII", 4, 0x0a, 8, number, 0x210)
        sections.append((f".nv.info.{name}", 0x70000000, own, 0))
    sections.append((".nv.info", 0x70000000, info, 0))
    strings = b"\0".join(s.encode() for s, _ in symbols) + b"\0"
    table, at = b"", 0
    for name, section in symbols:
        table += struct.pack("<IBBHQQ", at, 0, 0, section, 0, 0)
        at += len(name) + 1
    sections.append((".strtab", 3, strings, 0))
    sections.append((".symtab", 2, table, len(sections) - 1))
    names = b"\0".join(s[0].encode() for s in sections) + b"\0.shstrtab\0"
    sections.append((".shstrtab", 3, names, 0))
    body, rows, at = b"", b"", 0
    for name, kind, data, link in sections:
        rows += struct.pack("<IIQQQQIIQQ", at, kind, 0, 0, 64 + len(body), len(data), link, 0, 1, 0)
        body += data
        at += len(name) + 1
    head = b"\x7fELF\x02\x01\x01\x41\x08".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, 64 + len(body), 0x06000004 | arch << 8, 64, 0, 0, 64, len(sections), len(sections) - 1)
    return head + body + rows


A, B = ("alpha", b"a" * 32, 40, 8), ("beta", b"b" * 48, 64, 16)


class KernelCode(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def build(self, name, kernels, arch=80):
        """A build folder with an object a source, all with the same kernels."""
        for source in SOURCES:
            path = self.folder / name / "CMakeFiles" / "src" / "cuda" / f"{source}.o.0.cubin"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(cubin(kernels, arch))
            path.with_name(pathlib.Path(source).name + ".o").touch()
        return self.folder / name

    def hashes(self, *kernels, arch=80):
        return kernel_code.family_hashes(kernel_code.read_build(self.build("x", kernels, arch)))

    def test_names_and_order_do_not_count(self):
        renamed = ("a_name_that_is_longer", *A[1:])
        self.assertEqual(self.hashes(A, B), self.hashes(B, renamed))

    def test_code_registers_and_parameters_count(self):
        for other in (("alpha", b"a" * 31 + b"x", 40, 8), ("alpha", A[1], 41, 8), ("alpha", A[1], 40, 12)):
            self.assertNotEqual(self.hashes(A, B), self.hashes(other, B))
        self.assertNotEqual(self.hashes(A, B), self.hashes(A))
        self.assertNotEqual(self.hashes(A), self.hashes(A, A))

    def test_architectures_are_apart(self):
        self.assertEqual(list(self.hashes(A, arch=90)["fused"]), ["sm_90"])
        self.assertNotEqual(self.hashes(A, arch=90)["fused"]["sm_90"], self.hashes(A)["fused"]["sm_80"])

    def test_a_source_is_of_a_family_folder_by_folder(self):
        kernel = kernel_code.Kernel("staged/backward/a.cu", "sm_80", "a", "digest", 0, 0, b"")
        self.assertTrue(kernel_code.is_of(kernel, "staged/backward/*.cu"))
        for pattern in ("staged/*.cu", "backward/*.cu", "*.cu", "staged/backward/b*.cu"):
            self.assertFalse(kernel_code.is_of(kernel, pattern), pattern)

    def test_kernels_beside_one_do_not_count(self):
        digest = lambda *rows: next(k.digest for k in kernel_code.kernels_of(cubin(rows, 80, True), "a.cu")
                                    if k.name == A[0])
        self.assertEqual(digest(A), digest(B, A))

    def test_every_source_has_a_family_and_every_family_is_tested(self):
        sources = [str(path.relative_to(ROOT / "src" / "cuda")) for path in (ROOT / "src" / "cuda").rglob("*.cu")]
        patterns = [pattern for row in kernel_code.FAMILIES.values() for pattern in row["kernels"]]
        kernel = lambda source: kernel_code.Kernel(source, "sm_80", "a", "digest", 0, 0, b"")
        for source in sources:
            self.assertTrue(any(kernel_code.is_of(kernel(source), p) for p in patterns), source)
        for pattern in patterns:
            self.assertTrue(any(kernel_code.is_of(kernel(source), pattern) for source in sources), pattern)
        programs = {path.stem for path in (ROOT / "tests").rglob("*_test.cpp")}
        for family, row in kernel_code.FAMILIES.items():
            self.assertTrue(row["tests"], family)
            self.assertLessEqual(set(row["tests"]), programs, family)

    def test_a_missing_object_is_an_error(self):
        folder = self.build("x", [A])
        next(folder.rglob("decode/decode.cu.o.0.cubin")).unlink()
        with self.assertRaisesRegex(SystemExit, "family decode: no kernels of decode/decode.cu"):
            kernel_code.family_hashes(kernel_code.read_build(folder))
        with self.assertRaisesRegex(SystemExit, "a build with CUDA leaves them"):
            kernel_code.read_build(self.folder / "nothing")

    def say(self, function, *arguments):
        with contextlib.redirect_stdout(io.StringIO()) as text:
            status = function(*arguments)
        return status, text.getvalue()

    def test_same_names_what_differs(self):
        a, b = self.build("a", [A, B]), self.build("b", [B, ("gamma", *A[1:])])
        self.assertEqual(self.say(kernel_code.same, a, b)[0], 0)
        c = self.build("c", [("alpha_2", b"a" * 16 + b"c" * 16, 42, 8)])
        status, text = self.say(kernel_code.same, a, c)
        self.assertEqual(status, 1)
        self.assertIn("differs: sm_80 alpha -> alpha_2: instructions 2 -> 2, the first that differs is 1; "
                      "registers 40 -> 42", text)
        self.assertIn(f"only in {a}: sm_80 beta", text)

    def test_what_is_said_of_results(self):
        results = self.folder / "results"
        results.mkdir()
        hashes = self.folder / "kernel_hashes.json"
        built = {"toolkit": "13.0", "families": {"fused": {"sm_90": "f"}, "decode": {"sm_90": "d"}}}
        hashes.write_text(json.dumps(built))

        def say(**result):
            (results / "r.json").write_text(json.dumps({"toolkit": "13.0", "architecture": "sm_90"} | result))
            return self.say(kernel_code.check, results, hashes)[1]

        self.assertIn("1 results speak for", say(families={"fused": "f"}))
        self.assertIn("r.json: decode: stale: it speaks for other decode kernels (e, now d)",
                      say(families={"fused": "f", "decode": "e"}))
        self.assertIn("fused: cannot tell: its toolkit is 12.9", say(families={"fused": "e"}, toolkit="12.9"))
        self.assertIn("fused: cannot tell: no machine code for sm_80",
                      say(families={"fused": "e"}, architecture="sm_80"))
        self.assertIn("fused: cannot tell: no machine code for its GPU",
                      say(families={"fused": None}, architecture=None))
        hashes.unlink()
        self.assertIn("cannot tell what is stale", say(families={"fused": "f"}))

    def test_the_machine_code_that_a_gpu_runs(self):
        built = {"families": {"fused": {"sm_80": "", "sm_86": "", "sm_90": "", "sm_100": ""}}}
        for capability, arch in (("8.0", "sm_80"), ("8.7", "sm_86"), ("9.0", "sm_90"), ("10.3", "sm_100"),
                                 ("12.0", None)):
            self.assertEqual(evidence.architecture(built, capability), arch)

    def test_results_of_this_repository_have_hashes(self):
        for path in sorted((ROOT / "bench" / "results").glob("gpu_*.json")):
            result = json.loads(path.read_text())
            # Counts of many kernels, each row with its day; what Python refuses.
            if path.name in ("gpu_fuzz.json", "gpu_sweep.json"):
                continue
            self.assertLessEqual({"families", "architecture", "toolkit"}, set(result), path.name)


@unittest.skipUnless(os.environ.get("NVCC"), "no CUDA compiler")
class CompiledCode(unittest.TestCase):
    def digests(self, text, name):
        with tempfile.TemporaryDirectory() as folder:
            source, target = pathlib.Path(folder, name + ".cu"), pathlib.Path(folder, name + ".cubin")
            source.write_text(text)
            subprocess.run([os.environ["NVCC"], "-cubin", "-arch=sm_80", source, "-o", target], check=True)
            return sorted(k.digest for k in kernel_code.kernels_of(target.read_bytes(), name))

    def test_a_rename_leaves_the_hash_and_a_constant_does_not(self):
        text = """struct Args { float* x; int n; };
            template <int kTimes> __global__ void scale(Args a) {
              __shared__ float s[64];
              s[threadIdx.x] = a.x[threadIdx.x]; __syncthreads();
              if (threadIdx.x < a.n) a.x[threadIdx.x] = kTimes * sinf(s[63 - threadIdx.x]);
            }
            template __global__ void scale<2>(Args); template __global__ void scale<3>(Args);"""
        renamed = "// A comment.\nnamespace other {\n" + text.replace("scale", "multiply").replace(
            "Args", "Arguments") + "}"
        self.assertEqual(self.digests(text, "one"), self.digests(renamed, "another_file"))
        self.assertNotEqual(self.digests(text, "one"), self.digests(text.replace("63", "31"), "one"))


@unittest.skipUnless(os.environ.get("NVCC"), "no CUDA compiler")
class BoundedWaits(unittest.TestCase):
    """Waits of src/cuda/ptx: endless in a release build, with a trap in a debug build."""
    SOURCE = """#include "cuda/ptx/cluster.cuh"
        #include "cuda/ptx/global_flag.cuh"
        using namespace kda::cuda::ptx;
        extern "C" __global__ void of_barrier(Mbarrier* b) { mbarrier_wait(*b, 0); }
        extern "C" __global__ void of_cluster(Mbarrier* b) { mbarrier_wait_cluster(*b, 0); }
        extern "C" __global__ void of_flag(uint64_t* f) { wait_ld_acquire(f, 1); }"""

    def traps(self, *flags):
        with tempfile.TemporaryDirectory() as folder:
            source, target = pathlib.Path(folder, "waits.cu"), pathlib.Path(folder, "waits.ptx")
            source.write_text(self.SOURCE)
            subprocess.run([os.environ["NVCC"], "-std=c++20", "-ptx", "-arch=compute_90a", f"-I{ROOT / 'src'}",
                            *flags, source, "-o", target], check=True)
            return target.read_text().count("trap;")

    def test_only_debug_builds_trap(self):
        self.assertEqual(self.traps(), 0)
        self.assertEqual(self.traps("-DKDA_BOUNDED_WAITS"), 3)


if __name__ == "__main__":
    unittest.main()
