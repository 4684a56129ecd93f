#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# abi_test.sh CXX: the C ABI against tests/package/abi/kda_c.xml (abidw of an earlier version). Functions,
# enumerators, and fields at the end of structs with a struct_size may be added; nothing else may
# change. KDA_UPDATE_ABI=1 writes the file anew.
set -euo pipefail
cxx=$1
root=$(readlink -f "$(dirname "$0")/../..")
abi=$root/tests/package/abi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for tool in abidw abidiff; do
  command -v "$tool" >/dev/null || { echo "abi_test: needs $tool (Debian: abigail-tools)"; exit 1; }
done

# library FOLDER: libkda_c.so of FOLDER's kda.h and kda.cpp (sources), with the types of its functions. The rest of
# the library is left out: it has no part in the ABI.
library() {
  "$cxx" -std=c++20 -g -O0 -fPIC -shared -fvisibility=hidden -I"$1/include" -I"$root/src" \
    "$1/kda.cpp" -Wl,--version-script="$root/cmake/kda_c.map" -o "$1/libkda_c.so"
  abidw --exported-interfaces-only --drop-private-types --header-file "$1/include/kda/kda.h" \
    --no-show-locs --no-comp-dir-path --no-corpus-path --no-elf-needed "$1/libkda_c.so" >"$1/kda_c.xml"
}

# compare FOLDER: prints what older programs would stumble over; fails if there is any. A field that moves no
# other one is an addition, in structs that begin with struct_size.
compare() {
  local code=0 bad
  abidiff --leaf-changes-only --no-added-syms "$abi/kda_c.xml" "$1/kda_c.xml" >"$1/report" || code=$?
  [ "$code" != 0 ] || return 0
  bad=$(grep -vE '^$|^(Leaf changes|Changed leaf|Removed/Changed)|^ *type size changed from [0-9]+ to [0-9]+ \(in bits\)$|^ *[0-9]+ data member insertions?:$|^ +.*, at offset [0-9]+ \(in bits\)$' "$1/report" |
    grep -vE "^'struct kda_(problem|tail|plan_options|segments|stages|stage_bytes|fold|fused_decode_call|short_conv_call|short_conv_gradients|gated_rms_norm_call|gated_rms_norm_gradients)' changed:$") || true
  [ -n "$bad" ] || [ "$code" != 4 ] || return 0
  cat "$1/report"
  return 1
}

# enumerations FOLDER: structs hold enumerations as int32_t: without a function that takes them nobody would see
# them. A new one is an addition, not another parameter of that function.
enumerations() {
  local enums
  enums=$(grep -oE '^typedef enum kda_[a-z_]+' "$1/include/kda/kda.h" | awk '{print $3}' | while read -r name; do
    if [ -n "${KDA_UPDATE_ABI:-}" ] || grep -q "name='$name'" "$abi/kda_c.xml"; then echo "$name"; fi
  done | paste -sd,)
  echo "extern \"C\" KDA_API void kda_enumerations($enums) {}" >>"$1/kda.cpp"
}

# bodies FOLDER: kda.cpp with an empty body for each function of kda.h. It has the same ABI and compiles in a tenth of
# a second. Names in brackets are no macros.
bodies() {
  {
    printf '#include "kda/kda.h"\n#pragma GCC diagnostic ignored "-Wreturn-type"\n'
    tr '\n' ' ' <"$1/include/kda/kda.h" | grep -oE 'KDA_API [a-z][^;{]*;' |
      sed -E 's/(kda_[a-z0-9_]+)\(/(\1)(/; s/;$/ {}/; s/^/extern "C" /'
  } >"$1/kda.cpp"
  enumerations "$1"
}

mkdir "$work/now"
cp -r "$root/include" "$work/now"
cat "$root"/src/capi/*.cpp >"$work/now/kda.cpp"  # one file compiles in a third of the time of four
enumerations "$work/now"
library "$work/now"
if [ -n "${KDA_UPDATE_ABI:-}" ]; then
  sed "s|$work/now/||" "$work/now/kda_c.xml" >"$abi/kda_c.xml"
fi
compare "$work/now" || { echo "abi_test: the C ABI changed in a way that breaks older programs"; exit 1; }

# changed NAME EXPECTED SED: what the comparison says of a header changed so
changed() {
  local folder=$work/$1 verdict=good
  mkdir "$folder"
  cp -r "$root/include" "$folder"
  sed -i -E "$3" "$folder/include/kda/kda.h"
  [ -z "$3" ] || ! diff -rq "$folder/include" "$root/include" >/dev/null || { echo "abi_test: $1 changed nothing"; exit 1; }
  bodies "$folder"
  library "$folder"
  compare "$folder" >/dev/null || verdict=broken
  if [ "$verdict" != "$2" ]; then
    cat "$folder/report"
    echo "abi_test: $1 is $verdict, must be $2"
    exit 1
  fi
}
changed nothing good ''
changed function_gone broken 's/kda_plan_num_segments/kda_plan_num_parts/'
changed argument_changed broken 's/(kda_plan_options_cuda\(kda_plan_options\* options, )int32_t/\1int64_t/'
changed field_before_others broken 's/^  int64_t num_tokens;/  int64_t inserted;\n&/'
changed field_narrowed broken 's/^  double scale;/  float scale;/'
changed field_of_part broken 's/^(  int32_t indexed;.*)$/\1\n  int64_t appended;/'
changed enumerator_moved broken 's/KDA_GATE_SOFTPLUS = 1/KDA_GATE_SOFTPLUS = 3/'
changed status_moved broken 's/KDA_INTERNAL = 6/KDA_INTERNAL = 9/'
changed field_appended good 's/^  const int32_t\* checkpoint_offsets;.*/&\n  int64_t appended;/'
changed enumerator_added good 's/^  KDA_INT16 = 6/&, KDA_FP8 = 7/'
changed function_added good 's/^KDA_API void kda_plan_destroy/KDA_API int kda_added(void);\n&/'
echo "abi_test: $(grep -c '<elf-symbol ' "$abi/kda_c.xml") symbols as the baseline has them"
