#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The wheel and the source distribution, finished and checked, under build-wheel/out.
#   ./dev wheel     as the tree is; KDA_CUDA=OFF: without CUDA kernels; KDA_CUDA_ARCHITECTURES as in ./dev build
#   ./dev release   from a clean tree at the tag of its version, with a CHANGELOG and addresses that are set
# torch comes from the environment that PYTHON is of, else into an environment of its own: its headers are needed.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/../.."
root=$PWD out=build-wheel/out published=()

refuse() { echo "release: $*" >&2; exit 1; }
check_release() {
  local version
  version=$(sed -n 's/.*KDA_VERSION_STRING "\([0-9.]*\)".*/\1/p' include/kda/version.h)
  [ -z "$(git status --porcelain)" ] || refuse "the tree has changes: commit them first"
  [ "$(git tag --points-at HEAD | grep -cx "v$version")" = 1 ] || refuse "HEAD has no tag v$version, the version of include/kda/version.h"
  grep -qE "^## $version, [0-9]{4}-[0-9]{2}-[0-9]{2}$" CHANGELOG.md || refuse "CHANGELOG.md has no heading '## $version, YYYY-MM-DD'"
  published=(--published)
}
case "${1:-}" in
  --release) check_release ;;
  "") ;;
  *) refuse "takes --release or nothing, not $1" ;;
esac

# Tools of ours; torch, for its headers, from the caller's environment if that has it.
venv=build-wheel/venv
tools=packaging/wheel/requirements.txt
if ! cmp -s $tools $venv/requirements.txt; then
  rm -rf $venv
  "${PYTHON:-python3}" -m venv --system-site-packages $venv
  $venv/bin/pip install -q --no-compile -r $tools ninja
  $venv/bin/python -c 'import torch' 2>/dev/null || $venv/bin/pip install -q --no-compile --no-deps torch
  cp $tools $venv/requirements.txt
fi
export PATH=$root/$venv/bin:$PATH

cuda=${KDA_CUDA:-ON}
options=(-C "cmake.define.KDA_CUDA=$cuda" -C cmake.define.KDA_BUILD_TOOLS=ON
  -C cmake.define.FETCHCONTENT_FULLY_DISCONNECTED=ON -C "build-dir=$root/build-wheel/build-$cuda")
[ -z "${KDA_CUDA_ARCHITECTURES:-}" ] || options+=(-C "cmake.define.KDA_CUDA_ARCHITECTURES=$KDA_CUDA_ARCHITECTURES")
runtime=()
[ "$cuda" = OFF ] || runtime=(--cuda "$("${CUDACXX:-/usr/local/cuda/bin/nvcc}" --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p')")
rm -rf build-wheel/dist
python -c "from scikit_build_core.build import build_sdist; build_sdist('build-wheel/dist')" >/dev/null
pip wheel -q . --no-build-isolation --no-deps -w build-wheel/dist "${options[@]}"
python packaging/wheel/release.py $out build-wheel/dist/* "${runtime[@]}" "${published[@]}"
ls -l $out
