#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# resources_test.sh BUILD NVCC_VERSION: registers, spilled bytes and static shared memory of every
# kernel for every architecture, against tests/cuda/resources.txt: none may need more than it says.
# KDA_UPDATE_RESOURCES=1 writes the file anew. (Dynamic shared memory: static_assert at each launch.)
set -euo pipefail
build=$1
version=$2
table=$(dirname "$(readlink -f "$0")")/resources.txt
measured=$(mktemp)
trap 'rm -f "$measured"' EXIT

find "$build" -name '*.cu.o.ptxas' -exec cat {} + | c++filt | sed 's/ptxas info *: *//' | awk '
  /^Compiling entry function/ {
    kernel = $0
    sub(/^Compiling entry function .(void )?/, "", kernel)
    arch = kernel
    sub(/.* for ./, "", arch); sub(/.$/, "", arch)
    sub(/. for .*/, "", kernel)
    gsub(/kda::cuda::|kda::|\(anonymous namespace\)::/, "", kernel)
    sub(/\([A-Za-z<>]*\)$/, "", kernel)
    gsub(/ /, "", kernel)
  }
  /bytes spill stores/ { spilled = $5 + 0 }
  /^Used/ {
    shared = 0
    if (match($0, /[0-9]+ bytes smem/)) shared = substr($0, RSTART) + 0
    print arch, kernel, $2, spilled, shared
  }' | sort -V >"$measured"
[ -s "$measured" ] || { echo "resources_test: no ptxas reports under $build"; exit 1; }

if [ -n "${KDA_UPDATE_RESOURCES:-}" ]; then
  { echo "# nvcc $version: architecture, kernel, registers, bytes spilled, bytes of static shared memory"
    cat "$measured"; } >"$table"
fi
if ! head -1 "$table" | grep -q "nvcc $version:"; then
  echo "resources_test: the table is for $(head -1 "$table" | cut -d: -f1 | cut -c3-), not nvcc $version: not compared"
  exit 0
fi
awk 'NR == FNR { if ($1 != "#") { key = $1 " " $2; known[key] = 1; r[key] = $3; s[key] = $4; m[key] = $5 } next }
     { key = $1 " " $2 }
     !(key in known) { print "resources_test: " key " is not in tests/cuda/resources.txt"; bad = 1; next }
     $3 > r[key] || $4 > s[key] || $5 > m[key] {
       print "resources_test: " key ": " $3 " registers, " $4 " spilled, " $5 " shared; the table has " r[key] ", " s[key] ", " m[key]
       bad = 1
     }
     END { exit bad }' "$table" "$measured"
echo "resources_test: good ($(wc -l <"$measured") kernels)"
