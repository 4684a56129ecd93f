#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The machine code of CUDA kernels without their names: hashes, and a comparison of two builds.

The compiler launcher (cmake/keep_ptxas_output.sh) leaves the cubins of an object beside it. What a
kernel is here: its instructions, constant banks, registers, barriers, static shared and local
memory, launch attributes, and what its relocations point to. Names of kernels, types and files, the
order of kernels, comments, and the folder of the build are no part of it; nor is host code, which
chooses kernels and fills their arguments.

  kernel_code.py hash BUILD --toolkit V -o FILE   hashes of kernel families, as JSON
  kernel_code.py same A B                         compares two builds kernel by kernel
  kernel_code.py check RESULTS HASHES             says which results speak for other kernels
"""
import argparse
import collections
import difflib
import fnmatch
import hashlib
import json
import pathlib
import re
import shutil
import struct
import subprocess
import sys

# Kernel families: the sources of each, as patterns.
FAMILIES = json.loads((pathlib.Path(__file__).resolve().parents[2] / "bench" / "families.json").read_text())

Kernel = collections.namedtuple("Kernel", "file arch name digest registers shared code")


class Cubin:
    """Sections, symbols and relocations of an ELF file of 64 bits."""

    Section = collections.namedtuple("Section", "name type flags data size link info")
    NOBITS, RELA, REL = 8, 4, 9

    def __init__(self, data):
        if data[:5] != b"\x7fELF\x02":
            raise ValueError("no ELF file of 64 bits")
        flags, = struct.unpack_from("<I", data, 48)
        self.arch = f"sm_{flags >> 8 & 0xff if data[8] >= 8 else flags & 0xff}"  # by version of the ABI
        offset, = struct.unpack_from("<Q", data, 40)
        size, count, names = struct.unpack_from("<HHH", data, 58)
        rows = [struct.unpack_from("<IIQQQQIIQQ", data, offset + i * size) for i in range(count)]
        strings = data[rows[names][4]:][:rows[names][5]]
        self.sections = [
            self.Section(self.string(strings, r[0]), r[1], r[2],
                         b"" if r[1] == self.NOBITS else data[r[4]:r[4] + r[5]], r[5], r[6], r[7])
            for r in rows]
        self.by_name = {s.name: s for s in self.sections}
        table = self.by_name[".symtab"]
        strings = self.sections[table.link].data
        self.symbols = []  # (name, section number, value)
        for at in range(0, len(table.data), 24):
            name, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", table.data, at)
            self.symbols.append((self.string(strings, name), section, value))

    @staticmethod
    def string(table, at):
        return table[at:table.index(b"\0", at)].decode()

    def target(self, index):
        """What a symbol is, without its name if that is ours."""
        name, section, value = self.symbols[index]
        if section == 0:
            return f"external {name}"
        if section >= len(self.sections):
            return f"special {section:x}"
        where = self.sections[section]
        if where.name.startswith(".text."):
            return f"code {hashlib.sha256(where.data).hexdigest()} {value}"
        return f"data {hashlib.sha256(where.data).hexdigest()} {where.size} {value}"

    def relocations(self, section):
        """(offset, type, addend, target) of those that apply to a section, by its name."""
        rows = []
        for prefix, kind, form in ((".rela", self.RELA, "<QQq"), (".rel", self.REL, "<QQ")):
            table = self.by_name.get(prefix + section)
            if not table or table.type != kind:
                continue
            for row in struct.iter_unpack(form, table.data):
                rows.append((row[0], row[1] & 0xffffffff, *row[2:], self.target(row[1] >> 32)))
        return sorted(rows)


def attributes(section):
    """(attribute, value) of each record of a section .nv.info."""
    data, at = section.data, 0
    while at + 4 <= len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, at)
        length = size if form == 4 else 0  # else the value is what would be the size
        yield attribute, data[at + 4:at + 4 + length] if length else data[at + 2:at + 4]
        at += 4 + length


# Attributes: the number of the symbol of a kernel's constant bank, which depends on the kernels beside it, then what it
# holds; numbers of symbols; registers.
CONSTANT_BANK, EXTERNS, REGISTERS = 0x0a, 0x0f, 0x2f


def kernels_of(cubin, file):
    """A Kernel for each section of code."""
    elf = Cubin(cubin)
    arch = elf.arch
    module = [elf.by_name[n].data for n in (".nv.constant3", ".nv.global.init") if n in elf.by_name]
    found = []
    for section in elf.sections:
        if not section.name.startswith(".text."):
            continue
        name = section.name[len(".text."):]
        of_kernel = [(attribute, value[4:]) for attribute, value in attributes(elf.by_name[".nv.info"])
                     if len(value) == 8 and elf.symbols[struct.unpack_from("<I", value)[0]][0] == name]
        registers = next((struct.unpack("<I", v)[0] for a, v in of_kernel if a == REGISTERS), 0)
        digest = hashlib.sha256()

        def add(what, value):
            digest.update(f"{what}: {value}\n".encode())

        add("architecture", arch)
        add("code", section.data.hex())
        add("resources", sorted((attribute, value.hex()) for attribute, value in of_kernel))
        add("flags", section.flags)
        add("module", [d.hex() for d in module])
        shared = 0
        for other in elf.sections:
            kind, _, owner = other.name[1:].rpartition("." + name)
            if owner or not other.name.endswith("." + name):
                continue
            if kind.startswith("nv.constant"):
                add(kind, other.data.hex())
                add(kind, elf.relocations(other.name))
            elif kind in ("nv.shared", "nv.local"):
                add(kind, other.size)
                shared = other.size if kind == "nv.shared" else shared
            elif kind == "nv.info":
                rows = [(attribute, value) for attribute, value in attributes(other) if attribute != EXTERNS]
                add(kind, [(attribute, (value[4:] if attribute == CONSTANT_BANK else value).hex())
                           for attribute, value in rows])
        add("relocations", elf.relocations(section.name))
        found.append(Kernel(file, arch, name, digest.hexdigest(), registers, shared, section.data))
    return found


def read_build(folder):
    """All kernels of a build: those of the cubins beside its objects."""
    folder = pathlib.Path(folder)
    kernels = []
    for path in sorted(folder.rglob("*.cu.o.*.cubin")):
        if not path.with_name(path.name.partition(".cu.o.")[0] + ".cu.o").exists():
            continue  # the source has another name now: no rule of the build removes its cubins
        file = re.search(r"src/cuda/(.*\.cu)\.o\.\w+\.cubin$", str(path)).group(1)
        kernels += kernels_of(path.read_bytes(), file)
    if not kernels:
        raise SystemExit(f"kernel_code: no *.cu.o.*.cubin under {folder}: a build with CUDA leaves them")
    return kernels


def is_of(kernel, pattern):
    """Whether the source of a kernel matches a pattern of FAMILIES, folder by folder."""
    parts, wanted = kernel.file.split("/"), pattern.split("/")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def family_hashes(kernels):
    """{family: {"sm_80": hash}}; sm_90 stands for code of sm_90a too."""
    hashes = {}
    for family, row in FAMILIES.items():
        missing = [p for p in row["kernels"] if not any(is_of(k, p) for k in kernels)]
        if missing and not row.get("optional"):  # a build may be without
            raise SystemExit(f"kernel_code: family {family}: no kernels of {', '.join(missing)}")
        digests = collections.defaultdict(list)
        for kernel in kernels:
            if any(is_of(kernel, p) for p in row["kernels"]):
                digests[kernel.arch].append(kernel.digest)
        hashes[family] = {arch: hashlib.sha256("\n".join(sorted(each)).encode()).hexdigest()[:16]
                          for arch, each in sorted(digests.items())}
    return hashes


def readable(names):
    """Names for people: demangled where there is a c++filt, without the hash of the file."""
    if shutil.which("c++filt"):
        names = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True,
                               check=True).stdout.splitlines()
    return [re.sub(r"kda::cuda::|kda::|\(anonymous namespace\)::|^void |_GLOBAL__N__\w+?_cu_\w{8}", "",
                   re.sub(r"(?<=>)\(.*\)$|\([\w:]*\)$", "", n)) for n in names]


def first_difference(a, b):
    size = 16
    for at in range(0, min(len(a), len(b)), size):
        if a[at:at + size] != b[at:at + size]:
            return at // size
    return min(len(a), len(b)) // size


def pair_up(left, right):
    """Pairs of kernels that are most alike by architecture and name; then what has no pair."""
    pairs, right = [], list(right)
    names = dict(zip([k.name for k in left + right], readable([k.name for k in left + right])))
    for kernel in left:
        same = [k for k in right if k.arch == kernel.arch]
        if not same:
            continue
        best = max(same, key=lambda k: difflib.SequenceMatcher(
            None, names[k.name], names[kernel.name], autojunk=False).ratio())
        right.remove(best)
        pairs.append((kernel, best))
    paired = {id(a) for a, _ in pairs}
    return pairs, [k for k in left if id(k) not in paired], right, names


def same(a, b):
    """Prints what differs between two builds; 0 if nothing does."""
    left, right = read_build(a), read_build(b)
    counts = collections.Counter(k.digest for k in right)
    only_left = []
    for kernel in left:
        if counts[kernel.digest] > 0:
            counts[kernel.digest] -= 1
        else:
            only_left.append(kernel)
    only_right = []
    for kernel in reversed(right):
        if counts[kernel.digest] > 0:
            counts[kernel.digest] -= 1
            only_right.append(kernel)
    pairs, gone, new, names = pair_up(only_left, only_right)
    for x, y in pairs:
        change = "" if names[x.name] == names[y.name] else f" -> {names[y.name]}"
        at = first_difference(x.code, y.code)
        what = (f"instructions {len(x.code) // 16} -> {len(y.code) // 16}, the first that differs is {at}"
                if x.code != y.code else "the same instructions, other attributes")
        print(f"differs: {x.arch} {names[x.name]}{change}: {what}; registers {x.registers} -> "
              f"{y.registers}, static shared memory {x.shared} -> {y.shared}")
    for kernel in gone:
        print(f"only in {a}: {kernel.arch} {names[kernel.name]}")
    for kernel in new:
        print(f"only in {b}: {kernel.arch} {names[kernel.name]}")
    print(f"same code: {len(left) - len(only_left)} of {len(left)} kernels "
          f"({', '.join(sorted({k.arch for k in left + right}))})")
    return 1 if only_left or only_right else 0


def check(results, hashes):
    """Prints which results speak for other kernels than those of a build. Always 0: a result may be
    stale until someone has the GPU again."""
    if not pathlib.Path(hashes).exists():
        print(f"GPU evidence: cannot tell what is stale: no {hashes} (a build with CUDA writes it)")
        return 0
    built = json.loads(pathlib.Path(hashes).read_text())
    counts = collections.Counter()
    for path in sorted(pathlib.Path(results).glob("*.json")):
        result = json.loads(path.read_text())
        for family, measured in result.get("families", {}).items():
            arch = result.get("architecture")
            now = built["families"][family].get(arch)
            if result["toolkit"] != built["toolkit"]:
                verdict = f"cannot tell: its toolkit is {result['toolkit']}, this build's {built['toolkit']}"
            elif not measured or not now:
                verdict = f"cannot tell: no machine code for {arch or 'its GPU'} to compare"
            elif measured != now:
                verdict = f"stale: it speaks for other {family} kernels ({measured}, now {now})"
            else:
                counts["fresh"] += 1
                continue
            counts[verdict.split(":")[0]] += 1
            print(f"{path.name}: {family}: {verdict}")
    print(f"GPU evidence: {counts['fresh']} results speak for the kernels of this build, "
          f"{counts['stale']} for others, {counts['cannot tell']} cannot be told")
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    row = commands.add_parser("hash", help="hashes of kernel families, as JSON")
    row.add_argument("build", type=pathlib.Path)
    row.add_argument("--toolkit", required=True)
    row.add_argument("-o", "--output", type=pathlib.Path, required=True)
    row = commands.add_parser("same", help="compares two builds kernel by kernel")
    row.add_argument("a", type=pathlib.Path)
    row.add_argument("b", type=pathlib.Path)
    row = commands.add_parser("check", help="says which results speak for other kernels")
    row.add_argument("results", type=pathlib.Path)
    row.add_argument("hashes", type=pathlib.Path)
    args = parser.parse_args()
    if args.command == "same":
        return same(args.a, args.b)
    if args.command == "check":
        return check(args.results, args.hashes)
    report = {"toolkit": args.toolkit, "families": family_hashes(read_build(args.build))}
    args.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
