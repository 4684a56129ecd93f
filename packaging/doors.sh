#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The ways into libkda from its wheel, each tried as a new user would in a fresh environment: other packages come first,
# where the caller's Python lacks them; then the wheel is installed and an example runs, where the machine allows it
# without a network. Prints the seconds of both; more than two minutes of the second are a failure.
#   ./dev doors [wheel|numpy|torch|transformers|fla|jax|onnxruntime|hub]...     from build-wheel/out (./dev wheel)
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
work=$PWD/build-doors most_seconds=120

offline() {
  if unshare -rn true 2>/dev/null; then unshare -rn "$@"; else "$@"; fi
}

# shellcheck disable=SC2016
hub='python packaging/hub/layout.py "$0" cpu="$1"
python -c "import kernels, pathlib, sys; kernels.get_local_kernel(pathlib.Path(sys.argv[1]), backend=\"cpu\").chunk_kda" "$0"'

# describe DOOR: the modules that others bring, and the command.
describe() {
  modules=() command=()
  case $1 in
    wheel) command=(python -m libkda) ;;
    numpy) modules=(numpy) command=(python examples/python/numpy_forward.py) ;;
    torch) modules=(torch) command=(python examples/python/forward.py) ;;
    transformers) modules=(torch transformers) command=(python examples/python/transformers_generate.py) ;;
    fla) modules=(torch fla) command=(python examples/python/fla_plugin.py) ;;
    jax) modules=(jax) command=(python examples/python/jax_forward.py) ;;
    onnxruntime) modules=(onnx onnxruntime) command=(python examples/onnxruntime/linear_attention.py) ;;
    hub) modules=(torch kernels) command=(bash -ec "$hub" "$work/hub-layout" "$wheel") ;;
    *) echo "doors: wheel, numpy, torch, transformers, fla, jax, onnxruntime, hub; not $1" >&2; exit 2 ;;
  esac
}

# try DOOR
try() {
  local venv=$work/$1 started=$SECONDS prepared module
  rm -rf "$venv"
  "${PYTHON:-python3}" -m venv --system-site-packages "$venv"
  for module in "${modules[@]}"; do
    "$venv/bin/python" -c "import importlib.util as u; exit(u.find_spec('$module') is None)" ||
      "$venv/bin/pip" install -q --no-compile "${module/#fla/flash-linear-attention}"
  done
  prepared=$SECONDS
  # shellcheck disable=SC2016
  if (PATH=$venv/bin:$PATH && offline bash -ec 'pip install -q --no-compile --no-index "$0" && "$@"' "$wheel" "${command[@]}") \
    >"$work/$1.log" 2>&1 && [ $((SECONDS - prepared)) -le $most_seconds ]; then
    printf '%-14s %4d s (others: %d s)   %s\n' "$1" $((SECONDS - prepared)) $((prepared - started)) "${command[*]:0:3}"
  else
    printf '%-14s FAILED after %d s   %s\n' "$1" $((SECONDS - prepared)) "${command[*]:0:3}"
    tail -20 "$work/$1.log"
    return 1
  fi
}

wheels=(build-wheel/out/*.whl)
[ -e "${wheels[0]}" ] || { echo "doors: no wheel under build-wheel/out: ./dev wheel makes one" >&2; exit 2; }
wheel=$PWD/${wheels[0]} failed=0
mkdir -p "$work"
[ $# -gt 0 ] || set -- wheel numpy torch transformers fla jax onnxruntime hub
for door in "$@"; do describe "$door"; done
for door in "$@"; do
  describe "$door"
  try "$door" || failed=1
done
exit $failed
