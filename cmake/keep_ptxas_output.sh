#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compiler launcher: keeps beside the object what ptxas makes of each kernel, and lets everything else
# through: its report (registers, spills, shared memory; tests/cuda/resources_test.sh) and its machine
# code (OBJECT.sm_80.cubin, ...; tools/dev/kernel_code.py).
object=""
previous=""
for argument in "$@"; do
  [ "$previous" = -o ] && object=$argument
  previous=$argument
done
log=$(mktemp)
trap 'rm -f "$log"; [ -z "$object" ] || rm -rf "$object.keep"' EXIT
keep=()
if [[ "$object" == *.cu.o ]]; then
  mkdir -p "$object.keep"
  rm -f "$object".*.cubin
  keep=(--keep --keep-dir "$object.keep")
fi
"$@" "${keep[@]}" 2>"$log"
status=$?
if [ -n "$object" ]; then
  grep -E '^ptxas info|bytes stack frame' "$log" >"$object.ptxas"
  for cubin in "$object.keep"/*.cubin; do
    [ -e "$cubin" ] || continue
    architecture=${cubin%.cubin}  # NAME.compute_80, or NAME.compute_120.sm_120
    architecture=${architecture##*.}
    mv "$cubin" "$object.sm_${architecture#*_}.cubin"
  done
fi
grep -vE '^ptxas info|bytes stack frame' "$log" >&2
exit $status
