#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the documents as a site under build-docs/html and checks it (./dev site). --browse: in a headless Chromium
# too. Its tools come from PyPI into build-docs/venv; --browse also takes Debian's chromium-driver.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/../.."
venv=build-docs/venv
tools=packaging/site/requirements.txt
if ! cmp -s $tools $venv/requirements.txt; then
  rm -rf $venv
  python3 -m venv $venv
  $venv/bin/pip install -q --no-compile -r $tools
  cp $tools $venv/requirements.txt
fi
NO_MKDOCS_2_WARNING=1 $venv/bin/mkdocs build -q --strict -f packaging/site/mkdocs.yml
if [ "${1:-}" = --browse ]; then
  if ! command -v chromedriver >/dev/null; then
    sudo=""
    [ "$(id -u)" = 0 ] || sudo=sudo
    DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends chromium chromium-driver >/dev/null
  fi
  $venv/bin/pip install -q --no-compile selenium==4.51.0
fi
$venv/bin/python packaging/site/check.py build-docs/html "$@"
