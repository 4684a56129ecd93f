#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# tracked_files_test.sh: every tracked file is where files of its kind belong. A new folder of the
# root or a new kind of file is a line below; what a tool left behind is not.
set -uo pipefail
cd "$(dirname "$(readlink -f "$0")")/../.." || exit 1

# Names in the root, then endings that files in its folders may have; those without one by name.
names='\.ci|\.clang-format|\.clang-tidy|\.gitignore|\.pre-commit-config\.yaml|CHANGELOG\.md|CMakeLists\.txt|CMakePresets\.json|CONTRIBUTING\.md|LICENSE|README\.md|dev|pyproject\.toml'
folders='bench|cmake|data|docs|examples|include|packaging|python|src|tests|tools'
endings='abi|c|cmake|cpp|cu|cuh|h|hpp|in|inc|json|map|md|py|pyi|safetensors|sh|svg|typed|txt|xml|yml'
most_bytes=4000000

# Prints the names on stdin that do not belong.
strays() { grep -vE "^($names)$|^\.ci/[a-z]+$|^($folders)/([A-Za-z0-9_-]+/)*[A-Za-z0-9_-]+(\.[a-z0-9_-]+)?\.($endings)$"; }

failed=0
complain() { echo "tracked_files_test: $*"; failed=1; }

# The list itself: it must refuse these.
for stray in nothing-0.0.3-py2.py3-none-any.whl a.out core y.tmp.123 src/io/file.o tests/.kda-12.tmp \
  src/x.cpp.orig 'src/a b.cpp' .env venv/bin/python out/y.safetensors python/libkda/lib/libkda.so; do
  printf '%s\n' "$stray" | strays >/dev/null || complain "the list lets $stray in"
done

if files=$(git ls-files 2>/dev/null); then
  while read -r stray; do complain "$stray is tracked, but files of this name belong nowhere here"; done \
    < <(printf '%s\n' "$files" | strays)
  while read -r size name; do
    [ "$size" -le $most_bytes ] || complain "$name has $size bytes, more than $most_bytes"
  done < <(git ls-files -z | xargs -0 stat -c '%s %n' 2>/dev/null)
else
  echo "tracked_files_test: no git repository, only the list is tested"
fi
[ $failed = 0 ] && echo "tracked_files_test: good"
exit $failed
