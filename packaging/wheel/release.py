#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""From a built wheel and source distribution, what may be published: ./dev wheel and ./dev release call it.

    release.py OUT FILE... [--cuda VERSION] [--published]

Each wheel gets its manylinux tag (auditwheel: the newest symbols of glibc and libstdc++ decide) and an SBOM (PEP 770,
CycloneDX 1.6) of what is linked in. Then all that must hold is checked: the tag, sizes, contents, no path of the
building machine, twine --strict, an installation without an index and without torch, and what its removal leaves.
--published also refuses addresses that nobody has set. OUT gets a SHA256SUMS. Uploading is a person's.
"""
import argparse
import base64
import hashlib
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import links

NEWEST_TAG = (2, 34)  # RHEL 9, Debian 12, Ubuntu 22.04 and what is younger
MOST_BYTES = {".whl": 30 << 20, ".gz": 4 << 20}
FROM_TORCH = "libtorch_cpu.so"  # torch has loaded it before libkda_torch.so is
# What is compiled into the command, and its licence; the CUDA runtime comes with CUDA kernels.
LINKED = (("fmt", "/usr/share/doc/libfmt-dev", "MIT"), ("CLI11", "/usr/share/doc/libcli11-dev", "BSD-3-Clause"),
          ("nlohmann-json", "/usr/share/doc/nlohmann-json3-dev", "MIT"))
CUDA_LICENCE = "NVIDIA CUDA Toolkit EULA, attachment A"


def run(*command, **more):
    return subprocess.run([str(word) for word in command], check=True, **more)


def version_of(name):
    """As the headers say that the command was compiled with."""
    header, pattern = {"fmt": ("fmt/core.h", r"#define FMT_VERSION (\d+)"),
                       "CLI11": ("CLI/Version.hpp", r'#define CLI11_VERSION "([\d.]+)"'),
                       "nlohmann-json": ("nlohmann/detail/abi_macros.hpp", None)}[name]
    text = (pathlib.Path("/usr/include") / header).read_text()
    if pattern is None:
        return ".".join(re.search(rf"#define NLOHMANN_JSON_VERSION_{part}\s+(\d+)", text)[1]
                        for part in ("MAJOR", "MINOR", "PATCH"))
    found = re.search(pattern, text)[1]
    return found if "." in found else f"{int(found) // 10000}.{int(found) // 100 % 100}.{int(found) % 100}"


def components(cuda):
    found = [{"type": "library", "name": name, "version": version_of(name), "bom-ref": name,
              "licenses": [{"license": {"id": licence}}]} for name, _, licence in LINKED]
    if cuda:
        found.append({"type": "library", "name": "cudart_static", "version": cuda, "bom-ref": "cudart_static",
                      "licenses": [{"license": {"name": CUDA_LICENCE}}]})
    return found


def sbom(name, version, linked):
    return {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1,
            "metadata": {"component": {"type": "library", "name": name, "version": version, "bom-ref": name,
                                       "purl": f"pkg:pypi/{name}@{version}",
                                       "licenses": [{"license": {"id": "Apache-2.0"}}]}},
            "components": linked, "dependencies": [{"ref": name, "dependsOn": [x["bom-ref"] for x in linked]}]}


def licences(cuda):
    """{file: text} of what is linked in."""
    found = {f"{name}.txt": (pathlib.Path(folder) / "copyright").read_bytes() for name, folder, _ in LINKED}
    if cuda:
        found["cudart_static.txt"] = f"{CUDA_LICENCE}: the static CUDA runtime is part of libkda_c.so.\n".encode()
    return found


def add_to_wheel(wheel, files):
    """Adds {place below dist-info: bytes}, and their lines to RECORD."""
    with zipfile.ZipFile(wheel) as old:
        record = next(name for name in old.namelist() if name.endswith(".dist-info/RECORD"))
        date = old.getinfo(record).date_time
        places = {record.replace("RECORD", place): data for place, data in files.items()}
        digest = lambda data: base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines = "".join(f"{place},sha256={digest(data)},{len(data)}\n" for place, data in places.items())
        part = wheel.with_suffix(".part")
        with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as new:
            for entry in old.infolist():
                data = old.read(entry)
                new.writestr(entry, lines.encode() + data if entry.filename == record else data)
            for place, data in places.items():
                new.writestr(zipfile.ZipInfo(place, date), data, zipfile.ZIP_DEFLATED)
    part.replace(wheel)


def check_schema(bom):
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator
    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(bom))
    return [f"SBOM: {error}"] if error else []


def problems_of_wheel(wheel, build_paths):
    tag = re.search(r"manylinux_(\d+)_(\d+)", wheel.name)
    if tag is None or (int(tag[1]), int(tag[2])) > NEWEST_TAG:
        yield f"{wheel.name}: asks for a newer system than manylinux_{NEWEST_TAG[0]}_{NEWEST_TAG[1]}"
    with zipfile.ZipFile(wheel) as files:
        for name in files.namelist():
            data = files.read(name)
            for path in build_paths:
                if path.encode() in data:
                    yield f"{wheel.name}: {name} holds {path}, a folder of the building machine"


def try_install(wheel):
    """What an installation without torch leaves behind once it is removed."""
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "venv", folder)
        python = f"{folder}/bin/python"
        run(python, "-m", "pip", "install", "-q", "--no-compile", "--no-index", wheel)
        run(python, "-m", "libkda")
        run(f"{folder}/bin/kda", "info", stdout=subprocess.DEVNULL)
        header = run(python, "-c", "import libkda; print(libkda.get_include())", capture_output=True, text=True).stdout
        if not (pathlib.Path(header.strip()) / "kda" / "kda.h").is_file():
            yield f"{wheel.name}: get_include() leads to no kda/kda.h"
        run(python, "-m", "pip", "uninstall", "-q", "-y", "libkda")
        yield from (f"{wheel.name}: its removal leaves {path}" for path in pathlib.Path(folder).rglob("*kda*"))


def finish_wheel(wheel, cuda, build_paths):
    name, version = wheel.name.split("-")[:2]
    bom = sbom(name, version, components(cuda))
    add_to_wheel(wheel, {"sboms/libkda.cdx.json": (json.dumps(bom, indent=1) + "\n").encode()}
                 | {f"licenses/linked/{file}": text for file, text in licences(cuda).items()})
    run("check-wheel-contents", "--toplevel", "libkda", wheel)
    return [*check_schema(bom), *problems_of_wheel(wheel, build_paths), *try_install(wheel)]


def problems_of_addresses():
    known = links.addresses()
    for kind in ("site", "source"):
        address = known.get(kind)
        if not address or "example.org" in address or ".invalid" in address:
            yield f"packaging/addresses.txt: {kind} is {address or 'not set'}; the wheel's links would lead nowhere"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    parser.add_argument("--cuda", help="version of the CUDA runtime that is linked into the wheels")
    parser.add_argument("--published", action="store_true", help="refuse addresses that nobody has set")
    parser.add_argument("--build-path", action="append", default=[], help="a folder that no file may name")
    arguments = parser.parse_args()
    shutil.rmtree(arguments.out, ignore_errors=True)
    arguments.out.mkdir(parents=True)
    found = [*problems_of_addresses()] if arguments.published else []
    for file in arguments.files:
        if file.suffix == ".whl":
            run("auditwheel", "repair", "--exclude", FROM_TORCH, "-w", arguments.out, file, stderr=subprocess.DEVNULL)
        else:
            shutil.copy(file, arguments.out)
    for wheel in sorted(arguments.out.glob("*.whl")):
        found += finish_wheel(wheel, arguments.cuda, [str(links.ROOT), *arguments.build_path])
    files = sorted(arguments.out.iterdir())
    found += [f"{file.name}: {file.stat().st_size} bytes, above {MOST_BYTES[file.suffix]}" for file in files
              if file.stat().st_size > MOST_BYTES[file.suffix]]
    run("twine", "check", "--strict", *files)
    sums = "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
    (arguments.out / "SHA256SUMS").write_text(sums)
    print(sums, *found, sep="\n")
    return len(found) > 0


if __name__ == "__main__":
    sys.exit(main())
