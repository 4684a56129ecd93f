#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds packages for CPUs from the tracked files and tries each as a new user would: in a folder of its own, and where
# the machine allows it without a network. ./dev packages [debian] [conan] [conda] [vcpkg]; all if none is named.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
root=$PWD work=$PWD/build-packages
mkdir -p "$work"

# A recipe that builds from sources runs without a network, so that it cannot clone them.
offline() {
  if unshare -rn true 2>/dev/null; then unshare -rn "$@"; else "$@"; fi
}
# tools PACKAGE...: into an environment of ours.
venv=$work/venv
tools() {
  [ -x "$venv/bin/pip" ] || python3 -m venv "$venv"
  for package in "$@"; do "$venv/bin/pip" show -q "$package" 2>/dev/null || "$venv/bin/pip" install -q --no-compile "$package"; done
}
# sources FOLDER: the files that git knows, as they are.
sources() {
  rm -rf "$1"
  mkdir -p "$1"
  git ls-files -z --cached --others --exclude-standard | tar c --null -T - --ignore-failed-read | tar x -C "$1"
}
# try_prefix PREFIX: what a package installed serves pkg-config, a C program and the command.
try_prefix() {
  local libraries
  libraries=$(dirname "$(find "$1" -name kda_c.pc | head -1)")
  # shellcheck disable=SC2046
  PKG_CONFIG_PATH=$libraries gcc -std=c99 "$root/examples/decode.c" $(PKG_CONFIG_PATH=$libraries pkg-config --cflags --libs kda_c) \
    -lm -o "$work/decode"
  LD_LIBRARY_PATH=$libraries/.. "$work/decode"
}

debian() {
  local missing=()
  for package in debhelper lintian libcli11-dev libfmt-dev nlohmann-json3-dev ninja-build; do
    dpkg -s $package >/dev/null 2>&1 || missing+=("$package")
  done
  [ ${#missing[@]} -eq 0 ] || { echo "packages: please install ${missing[*]}" >&2; exit 2; }
  rm -rf "$work/debian"
  sources "$work/debian/libkda"
  cp -r packaging/debian "$work/debian/libkda/debian"
  (cd "$work/debian/libkda" && offline dpkg-buildpackage -us -uc -b >../build.log 2>&1) || { tail -40 "$work/debian/build.log"; exit 1; }
  lintian --fail-on error "$work"/debian/*.changes
  for package in "$work"/debian/*.deb; do dpkg-deb -x "$package" "$work/debian/root"; done
  [ -s "$work"/debian/root/usr/share/man/man1/kda.1.gz ]
  LD_LIBRARY_PATH=$(dirname "$(find "$work/debian/root" -name 'libkda_c.so.0')") "$work/debian/root/usr/bin/kda" --version
  try_prefix "$work/debian/root"
}

conan() {
  tools conan
  export CONAN_HOME=$work/conan
  "$venv/bin/conan" profile detect --force >/dev/null 2>&1
  export PYTHONDONTWRITEBYTECODE=1
  offline "$venv/bin/conan" create packaging/conan --no-remote -s compiler.cppstd=20 \
    -c tools.cmake.cmake_layout:test_folder="$work/conan-test"
}

conda() {
  tools py-rattler-build
  "$venv/bin/python" packaging/conda/render.py
}

vcpkg() {
  offline cmake -DPORTFILE="$root/packaging/vcpkg/portfile.cmake" -DWORK="$work/vcpkg" -DFEATURES=core -DBUILD=ON \
    -P tests/package/vcpkg_stubs.cmake
  try_prefix "$work/vcpkg/package"
}

[ $# -gt 0 ] || set -- debian conan conda vcpkg
for kind in "$@"; do
  case $kind in
    debian | conan | conda | vcpkg) ;;
    *) echo "packages: debian, conan, conda, vcpkg; not $kind" >&2; exit 2 ;;
  esac
  started=$SECONDS
  "$kind"
  echo "packages: $kind: good, $((SECONDS - started)) s"
done
