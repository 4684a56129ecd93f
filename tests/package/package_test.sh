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
"$work/found/consumer"
"$work/found/consumer_c"

echo "add_subdirectory"
# No build type: neither optimised nor with symbols, which compiles fastest.
cmake -S "$here/consumer" -B "$work/sub" -DLIBKDA_SOURCE_DIR="$root" -DKDA_CUDA=OFF >/dev/null
cmake --build "$work/sub" -j2 >/dev/null
"$work/sub/consumer"
"$work/sub/consumer_c"
[ ! -e "$work/sub/libkda/bin/kda" ] || { echo "a subproject must not build the tools"; exit 1; }

echo "pkg-config"
PKG_CONFIG_PATH=$(dirname "$(find "$work/prefix" -name kda.pc)")
export PKG_CONFIG_PATH
# shellcheck disable=SC2046
g++ -std=c++20 "$here/consumer/consumer.cpp" $(pkg-config --cflags --libs kda) -o "$work/static"
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
