#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# portable_test.sh LIBRARIES...: none needs a symbol that is newer than manylinux_2_34 has (RHEL 9 and what is younger).
set -euo pipefail
newest="GLIBC_2.34 GLIBCXX_3.4.29 CXXABI_1.3.13 GCC_7.0.0"

for library in "$@"; do
  needed=$(readelf --dyn-syms --wide "$library" | awk '$7 == "UND" { print $8 }')
  [ -n "$needed" ] || { echo "portable_test: $library needs no symbols at all: is it a library?"; exit 1; }
  for limit in $newest; do
    family=${limit%%_*}
    newer=$(grep -E "@$family(_[0-9.]+)+\$" <<<"$needed" | while read -r symbol; do
      version=${symbol##*@}
      [ "$(printf '%s\n' "$version" "$limit" | sort -V | tail -1)" = "$limit" ] || echo "  $symbol"
    done)
    [ -z "$newer" ] || { printf 'portable_test: %s needs more than %s:\n%s\n' "$library" "$limit" "$newer"; exit 1; }
  done
done
echo "portable_test: good"
