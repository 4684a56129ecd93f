#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# symbols_test.sh libkda_c.so: it exports every function of kda.h, and nothing else.
set -euo pipefail
header="$(dirname "$(readlink -f "$0")")/../../include/kda/kda.h"
exported=$(nm -D --defined-only "$1" | awk '{print $3}' | sed 's/@.*//' | sort)
declared=$(grep -v '^#define' "$header" | grep -oE '\bkda_[a-z_]+\(' | tr -d '(' | sort -u)
if [ "$exported" != "$declared" ]; then
  diff <(echo "$declared") <(echo "$exported") || true
  echo "symbols_test: the library does not export exactly what kda.h declares"
  exit 1
fi
echo "symbols_test: $(echo "$exported" | wc -l) symbols, all kda_*"
