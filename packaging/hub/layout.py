#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Lays out wheels of libkda as a repository of the kernels hub: OUT/build/torch-stable-abi210-BACKEND-x86_64-linux/.

    python3 packaging/hub/layout.py OUT cpu=WHEEL [cu130=WHEEL]

Package `kernels` loads it: get_local_kernel(pathlib.Path(OUT), backend="cpu"); without `backend` it takes the variant
of torch's own. Uploading is a person's. Beside a libkda of another version in one process it is refused by name.
"""
import argparse
import email
import json
import pathlib
import shutil
import sys
import zipfile

# Cards whose kernels ./dev wheel compiles; cards above the last one take its PTX.
ARCHITECTURES = ["8.0", "8.6", "9.0", "10.0", "12.0+PTX"]
BACKENDS = {"cpu": {"type": "cpu"}, "cu130": {"type": "cuda", "archs": ARCHITECTURES}}
# Folders of the package that the hub has no use for: JAX, and what C programs and a shell take from a wheel.
LEFT_OUT = ("include/", "bin/", "jax.py", "lib/libkda_jax.so")


def metadata_of(wheel, files):
    """The headers of the wheel's METADATA."""
    names = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
    if len(names) != 1:
        sys.exit(f"layout: {wheel}: has {len(names)} files METADATA, not one: this is no wheel")
    return email.message_from_bytes(files.read(names[0]))


def lay_out(out, backend, wheel):
    """Writes the folder of one backend, and returns it."""
    folder = out / "build" / f"torch-stable-abi210-{backend}-x86_64-linux"
    with zipfile.ZipFile(wheel) as files:
        headers = metadata_of(wheel, files)
        if headers["Name"] != "libkda":
            sys.exit(f"layout: {wheel}: is a wheel of {headers['Name']}, not of libkda")
        parts = [name for name in files.namelist() if name.startswith("libkda/") and not name.endswith("/")]
        if "libkda/lib/libkda_torch.so" not in parts:
            sys.exit(f"layout: {wheel}: has no operators for torch")
        shutil.rmtree(folder, ignore_errors=True)
        for name in parts:
            part = name.removeprefix("libkda/")
            if not part.startswith(LEFT_OUT):
                path = folder / part
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(files.read(name))
    version = headers["Version"]
    described = {"id": f"_libkda_{backend}_{version.replace('.', '_')}", "name": "libkda",
                 "version": max(int(version.split(".")[0]), 1), "license": "Apache-2.0", "python-depends": [],
                 "backend": BACKENDS[backend]}
    (folder / "metadata.json").write_text(json.dumps(described, indent=2) + "\n")
    return folder


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path, metavar="OUT")
    parser.add_argument("wheels", nargs="+", metavar="BACKEND=WHEEL", help=f"BACKEND is one of {', '.join(BACKENDS)}")
    arguments = parser.parse_args()
    pairs = [argument.partition("=")[::2] for argument in arguments.wheels]
    for backend, wheel in pairs:
        if backend not in BACKENDS:
            parser.error(f"{backend}={wheel}: the backend is not one of {', '.join(BACKENDS)}")
        if not zipfile.is_zipfile(wheel):
            parser.error(f"{backend}={wheel}: is no wheel")
    for backend, wheel in pairs:
        print(lay_out(arguments.out, backend, wheel))


if __name__ == "__main__":
    main()
