#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compiler launcher: keeps what ptxas says of each kernel (registers, spills, shared memory) beside
# the object, for tests/cuda/resources_test.sh, and lets everything else through.
object=""
previous=""
for argument in "$@"; do
  [ "$previous" = -o ] && object=$argument
  previous=$argument
done
log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$@" 2>"$log"
status=$?
[ -z "$object" ] || grep -E '^ptxas info|bytes stack frame' "$log" >"$object.ptxas"
grep -vE '^ptxas info|bytes stack frame' "$log" >&2
exit $status
