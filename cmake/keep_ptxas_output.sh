#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compiler launcher: keeps beside the object what ptxas makes of each kernel, and lets everything else
# through: its report (registers, spills, shared memory; tests/cuda/resources_test.sh) and its machine
# code (OBJECT.0.cubin, ..., one an architecture; tools/dev/kernel_code.py).
object=""
previous=""
for argument in "$@"; do
  [ "$previous" = -o ] && object=$argument
  previous=$argument
done
log=$(mktemp)
folder=""
trap 'rm -rf "$log" ${folder:+"$folder"}' EXIT
keep=()
if [[ "$object" == *.cu.o ]]; then
  folder=$(mktemp -d "$object.keep.XXXXXX")  # its own: a build that was stopped may still clean up
  rm -f "$object".*.cubin
  keep=(--keep --keep-dir "$folder")
fi
"$@" "${keep[@]}" 2>"$log"
status=$?
if [ -n "$object" ]; then
  grep -E '^ptxas info|bytes stack frame' "$log" >"$object.ptxas"
  number=0
  for cubin in "${folder:-/nowhere}"/*.cubin; do
    [ -e "$cubin" ] || continue
    mv "$cubin" "$object.$number.cubin"
    number=$((number + 1))
  done
fi
grep -vE '^ptxas info|bytes stack frame' "$log" >&2
exit $status
