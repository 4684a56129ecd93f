#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# docs_test.sh KDA: every path that the documents name exists, every kda command in them runs, their
# tables and code are those of bench/results and examples, and every script option exists.
set -uo pipefail
kda=$(readlink -f "$1")
cd "$(dirname "$(readlink -f "$0")")/../.." || exit 1
failed=0
complain() { echo "docs_test: $*"; failed=1; }

documents=$(git ls-files '*.md' 2>/dev/null || find . -name '*.md' -not -path './build*')

# Paths: words with a slash that begin with a folder of this repository, and links.
for document in $documents; do
  folder=$(dirname "$document")
  for path in $(grep -oE '\]\([A-Za-z0-9_./-]+\)' "$document" | tr -d '()' | sed 's/^\]//'); do
    [ -e "$folder/$path" ] || complain "$document links to $path, which does not exist"
  done
  # shellcheck disable=SC2013
  for path in $(grep -oP '(?<![\w/])(src|include|tests|tools|bench|docs|examples|data|cmake|\.ci)/[A-Za-z0-9_./-]*[A-Za-z0-9_]' "$document" | sort -u); do
    case $path in bench/results*) continue ;; esac
    [ -e "$path" ] || complain "$document names $path, which does not exist"
  done
done

# Commands: indented lines that begin with kda or build/bin/kda, run in a folder of their own.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
ln -s "$PWD/data" "$work/data"
# shellcheck disable=SC2086,SC2013
grep -hE '^    (build/bin/)?kda (gen|run|check|inspect|plan|info)' $documents | sed 's/^ *//' |
  while read -r line; do
    command=${line#build/bin/}
    (cd "$work" && eval "'$kda' ${command#kda }" >/dev/null 2>"$work/.err") ||
      { echo "docs_test: '$line' fails: $(cat "$work/.err")"; touch "$work/.failed"; }
  done
[ -e "$work/.failed" ] && failed=1

# Tables and code between markers. Where there is no Python, .ci/evidence looks at them.
if command -v python3 >/dev/null; then
  python3 bench/tables.py --check || complain "documents differ from bench/results or examples"
fi

# The subcommands of ./dev that documents name.
# shellcheck disable=SC2086,SC2013
for command in $(grep -ohE '\./dev [a-z-]+' $documents | awk '{print $2}' | sort -u); do
  ./dev --help | grep -qE "^  $command " || complain "./dev has no command $command"
done

[ $failed = 0 ] && echo "docs_test: good"
exit $failed
