#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The recipes of packaging/ as far as seconds go: versions, JSON, the port of vcpkg, and that no package build fetches
sources; the programs of ./dev doors. ./dev packages and ./dev doors build and try them."""
import json
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PACKAGING = ROOT / "packaging"
VERSION = re.search(r'KDA_VERSION_STRING "([0-9.]+)"', (ROOT / "include/kda/version.h").read_text())[1]
# Where a recipe has the version of libkda. The other recipes read version.h.
WRITTEN = {"debian/changelog": r"^libkda \(([0-9.]+)-\d+\)", "conda/recipe.yaml": r'^  version: "([0-9.]+)"',
           "vcpkg/vcpkg.json": r'^  "version": "([0-9.]+)"'}
# They have versions of others.
ELSEWHERE = {"wheel/requirements.txt", "site/requirements.txt", "debian/control", "site/mkdocs.yml"}
RECIPES = ("debian/rules", "conan/conanfile.py", "conda/recipe.yaml", "vcpkg/portfile.cmake")


def versions():
    listed = subprocess.run(["git", "-C", PACKAGING, "ls-files", "--cached", "--others", "--exclude-standard"],
                            capture_output=True, text=True, check=False).stdout.split()
    if not listed:  # sources without a repository
        listed = [path.relative_to(PACKAGING).as_posix() for path in PACKAGING.rglob("*")
                  if path.is_file() and path.suffix != ".pyc"]
    assert WRITTEN.keys() <= set(listed), listed
    for name in listed:
        text = (PACKAGING / name).read_text()
        if name in WRITTEN:
            found = re.search(WRITTEN[name], text, re.M)
            assert found, f"packaging/{name}: no version where this test looks for it"
            assert found[1] == VERSION, f"packaging/{name} says {found[1]}, version.h says {VERSION}"
            text = text.replace(found[0], "", 1)
        if name not in ELSEWHERE:
            more = re.search(r"(?i)\bversion\W{1,4}(\d+\.\d+\.\d+)", text)
            assert not more, f"packaging/{name} has a version that this test does not know: {more[0]}"


def vcpkg():
    manifest = json.loads((PACKAGING / "vcpkg/vcpkg.json").read_text())
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", manifest["name"]) and manifest["license"] == "Apache-2.0", manifest
    for features, cuda in (("core", "OFF"), ("core;cuda", "ON")):
        with tempfile.TemporaryDirectory() as work:
            done = subprocess.run(
                ["cmake", f"-DPORTFILE={PACKAGING}/vcpkg/portfile.cmake", f"-DWORK={work}", f"-DFEATURES={features}",
                 "-P", ROOT / "tests/package/vcpkg_stubs.cmake"], capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "the port ran" in done.stderr, done.stderr
        assert f"option -DKDA_CUDA={cuda}" in done.stderr, done.stderr


def nothing_is_fetched():
    for name in RECIPES:
        recipe = (PACKAGING / name).read_text()
        assert "FETCHCONTENT_FULLY_DISCONNECTED" in recipe, f"packaging/{name} may clone sources"
    with tempfile.TemporaryDirectory() as work:
        done = subprocess.run(
            ["cmake", "-S", ROOT, "-B", work, "-G", "Ninja", "-DKDA_CUDA=OFF", "-DKDA_BUILD_TESTS=OFF",
             "-DKDA_BUILD_BENCH=OFF", "-DFETCHCONTENT_FULLY_DISCONNECTED=ON", "-DCMAKE_DISABLE_FIND_PACKAGE_fmt=ON"],
            capture_output=True, text=True, check=False)
        assert done.returncode != 0, "a build without fmt and without the network goes on"
        assert not list(pathlib.Path(work).glob("_deps/*-src/*")), "sources were fetched"
    assert "fmt" in done.stderr, done.stderr


def doors():
    """What ./dev doors runs is there, and a door that it does not know is refused by the names of all."""
    text = (PACKAGING / "doors.sh").read_text()
    programs = re.findall(r"python ((?:examples|packaging)/\S+\.py)", text)
    assert len(programs) >= 7 and all((ROOT / program).is_file() for program in programs), programs
    known = re.search(r'echo "doors: (.*); not \$1"', text)[1].split(", ")
    assert re.findall(r"^    (\w+)\) .*command=", text, re.M) == known, known
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder, "packaging", "doors.sh")
        copy.parent.mkdir()
        copy.write_text(text)
        wheel = pathlib.Path(folder, "build-wheel", "out", "libkda.whl")
        for words in ("no wheel under build-wheel/out", f"doors: {', '.join(known)}; not window"):
            done = subprocess.run(["bash", copy, "window"], capture_output=True, text=True, check=False)
            assert done.returncode == 2 and words in done.stderr, done.stderr
            wheel.parent.mkdir(parents=True, exist_ok=True)
            wheel.touch()


if __name__ == "__main__":
    for check in (versions, vcpkg, nothing_is_fetched, doors):
        check()
        print(f"packaging_test: {check.__name__}: good")
    sys.exit(0)
