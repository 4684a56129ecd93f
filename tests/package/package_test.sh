#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# package_test.sh BUILD: installs into a temporary prefix and builds the consumer three ways:
# find_package, add_subdirectory, pkg-config (C++ static; C99 and C++17 shared).
set -euo pipefail
build=$(readlink -f "$1")
here=$(dirname "$(readlink -f "$0")")
root=$(readlink -f "$here/../..")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cmake --install "$build" --prefix "$work/prefix" >/dev/null
"$work/prefix/bin/kda" --version

echo "find_package"
cmake -S "$here/consumer" -B "$work/found" -DCMAKE_PREFIX_PATH="$work/prefix" >/dev/null
cmake --build "$work/found" >/dev/null
run_consumers() { "$1/consumer" && "$1/consumer_c" && "$1/consumer_cxx11"; }
run_consumers "$work/found"

echo "add_subdirectory"
# No build type, as in many a project: libkda's own sources are optimised all the same.
cmake -S "$here/consumer" -B "$work/sub" -DLIBKDA_SOURCE_DIR="$root" -DKDA_CUDA=OFF -DCMAKE_EXPORT_COMPILE_COMMANDS=ON \
  >/dev/null
commands=$work/sub/compile_commands.json
sources=$(grep -c "\"file\": \"$root/src/" "$commands")
optimised=$(grep "\"command\": .* -c $root/src/" "$commands" | grep -cE -- ' -O[23] ')
if [ "$sources" -lt 40 ] || [ "$sources" != "$optimised" ]; then
  echo "package_test: $optimised of $sources sources are optimised in a project without a build type"
  exit 1
fi
# Together, which takes two thirds of the time: build/ has compiled each source alone.
cmake -DCMAKE_UNITY_BUILD=ON "$work/sub" >/dev/null
cmake --build "$work/sub" -j2 >/dev/null
run_consumers "$work/sub"
[ ! -e "$work/sub/libkda/bin/kda" ] || { echo "a subproject must not build the tools"; exit 1; }

echo "pkg-config"
PKG_CONFIG_PATH=$(dirname "$(find "$work/prefix" -name kda.pc)")
export PKG_CONFIG_PATH
# shellcheck disable=SC2046
g++ "$here/consumer/consumer.cpp" $(pkg-config --cflags --libs kda) -o "$work/static"
"$work/static"
# shellcheck disable=SC2046
gcc -std=c99 -pedantic -Wall -Wextra -Werror "$here/consumer/consumer.c" $(pkg-config --cflags --libs kda_c) -o "$work/shared"
# shellcheck disable=SC2046
g++ -std=c++17 -pedantic -Wall -Wextra -Werror "$here/consumer/consumer17.cpp" $(pkg-config --cflags --libs kda_c) -o "$work/shared17"
LD_LIBRARY_PATH=$(pkg-config --variable=libdir kda_c)
export LD_LIBRARY_PATH
"$work/shared"
"$work/shared17"
echo "package_test: good"
