#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# docs_test.sh KDA: every path and heading that the documents link to exists, every kda command in
# them runs, their tables, figures and code are those of bench/results and examples, every script
# option exists, a log lists its sections, and the documents keep to their form.
set -uo pipefail
kda=$(readlink -f "$1")
cd "$(dirname "$(readlink -f "$0")")/../.." || exit 1
failed=0
complain() { echo "docs_test: $*"; failed=1; }

documents=$(git ls-files '*.md' 2>/dev/null || find . -name '*.md' -not -path './build*')

# Headings of a document as links name them.
anchors_of() {
  grep -E '^#+ ' "$1" | sed -E 's/^#+ //' | tr '[:upper:]' '[:lower:]' | sed 's/[^a-z0-9_ -]//g; s/ /-/g'
}

# Paths: words with a slash that begin with a folder of this repository, and links.
for document in $documents; do
  folder=$(dirname "$document")
  for link in $(grep -oE '\]\([A-Za-z0-9_./#-]+\)' "$document" | tr -d '()' | sed 's/^\]//'); do
    path=${link%%#*}
    target=${path:+$folder/$path}
    target=${target:-$document}
    [ -e "$target" ] || { complain "$document links to $path, which does not exist"; continue; }
    case $link in
      *'#'*) anchors_of "$target" | grep -qxF -- "${link#*#}" ||
        complain "$document links to $link, which is no heading there" ;;
    esac
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

# Tables, figures, and code between markers. Where there is no Python, .ci/evidence looks at them.
if command -v python3 >/dev/null; then
  python3 bench/report/tables.py --check || complain "documents differ from bench/results or examples"
  python3 bench/report/plots.py --check || complain "figures differ from bench/results"
fi

# Form: lines that fit a screen (tables may be wider), one page of performance, and numbers without a
# result file in the log alone.
for document in $documents; do
  long=$(awk 'length > 160 && !/^ *\|/ { print FNR }' "$document" | head -1)
  [ -z "$long" ] || complain "$document:$long has more than 160 columns"
  case $document in docs/log/* | ./docs/log/*) continue ;; esac
  ! grep -q 'not in a result file' "$document" || complain "$document has numbers without a result file"
done
at_most() { # LINES FILE
  [ "$(wc -l <"$2")" -le "$1" ] || complain "$2 has more than $1 lines"
}
at_most 100 README.md
at_most 130 docs/operation.md
at_most 250 docs/performance.md
at_most 80 docs/planning.md
at_most 130 docs/accuracy.md
for log in docs/log/*.md; do
  for heading in $(anchors_of <(grep '^## ' "$log")); do
    grep -qF "](#$heading)" "$log" || complain "$log does not list its section #$heading"
  done
done
for figure in docs/figures/*.svg; do
  # shellcheck disable=SC2086
  grep -qF "figures/${figure##*/}" $documents || complain "no document shows $figure"
done

# The how-tos name files under src/.
if [ -d src/registry ]; then
  # shellcheck disable=SC2013
  for path in $(grep -oP '`\K(registry|plan|run|stage|core|check|cpu|cuda|capi)/[a-z0-9_./]*[a-z0-9_]' CONTRIBUTING.md | sort -u); do
    [ -e "src/$path" ] || complain "CONTRIBUTING.md names src/$path, which does not exist"
  done
fi

# The subcommands of ./dev that documents name.
# shellcheck disable=SC2086,SC2013
for command in $(grep -ohE '\./dev [a-z-]+' $documents | awk '{print $2}' | sort -u); do
  ./dev --help | grep -qE "^  $command " || complain "./dev has no command $command"
done

[ $failed = 0 ] && echo "docs_test: good"
exit $failed
