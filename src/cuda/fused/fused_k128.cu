// SPDX-License-Identifier: Apache-2.0
// The kernels of K = V = 128, and how units come to those of any size.
#include "cuda/fused/fused_prefill.hpp"

#include "cuda/fused/kernel.cuh"
#include "cuda/launch/sequence_map.hpp"

namespace kda::cuda::sm90 {

using fused::ArgsOf;
using fused::launch_head_gates;
using fused::launch_prefill;
using fused::UnitArgs;

extern template Status fused::launch_prefill<64, false>(const FusedPrefillArgs&, const Launch&);
extern template Status fused::launch_prefill<64, true>(const UnitArgs&, const Launch&);
extern template Status fused::launch_head_gates<false>(const FusedPrefillArgs&, const Launch&);
extern template Status fused::launch_head_gates<true>(const UnitArgs&, const Launch&);

namespace {

template <bool kSegments>
Status launch_size(const ArgsOf<kSegments>& args, const Launch& where) {
  if (args.head_gate) return launch_head_gates<kSegments>(args, where);
  return args.shape.K == 64 ? launch_prefill<64, kSegments>(args, where)
                            : launch_prefill<128, kSegments>(args, where);
}

}  // namespace

Status launch_fused_prefill(const FusedPrefillArgs& args, FusedWords words, const CutHeader* cut,
                            Launch where) {
  if (!args.units) return launch_size<false>(args, where);
  UnitArgs with_units{args, cut, static_cast<int64_t>(words.size()), {}};
  if (with_units.num_words <= UnitArgs::kMostWords) {
    std::copy(words.begin(), words.end(), with_units.words);
  } else {
    WordPieces pieces;
    pieces.add(words.data(), with_units.num_words);
    KDA_RETURN_IF_ERROR(launch_upload(with_units.target(), pieces, {where.stream}));
    where.pdl = true;
    with_units.num_words = 0;
  }
  return launch_size<true>(with_units, where);
}

}  // namespace kda::cuda::sm90
