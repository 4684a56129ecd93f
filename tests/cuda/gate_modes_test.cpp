// SPDX-License-Identifier: Apache-2.0
// A gate mode that kernels have no formula for: every family refuses it, and launches nothing.
#include <gtest/gtest.h>

#include <functional>

#include "cuda/decode/drafts.hpp"
#include "cuda/decode/head_gates.hpp"
#include "cuda/fused/fused_prefill.hpp"
#include "cuda/fused/portable/portable_prefill.hpp"
#include "cuda/gdn/intra_sm90.hpp"
#include "cuda/recurrent/backward/head_gates.hpp"
#include "cuda/recurrent/head_gates.hpp"
#include "cuda/staged/backward/chunk_grad.hpp"
#include "cuda/staged/backward/chunk_grad_sm90.hpp"
#include "cuda/staged/backward/chunk_intra_fp16_sm90.hpp"
#include "cuda/staged/backward/finish.hpp"
#include "cuda/staged/chunk_intra.hpp"
#include "emulator/recording.hpp"

namespace kda::cuda {
namespace {

/// Sizes of one chunk, head and sequence.
template <class Args>
Args small(int64_t size = 128) {
  Args args;
  args.shape.K = static_cast<int>(size), args.shape.V = static_cast<int>(size);
  args.shape.H = args.shape.HV = 1;
  args.shape.heads = args.shape.group = Divisor(1);
  args.map.num_sequences = 1, args.map.num_tokens = 64;
  args.gate.gate_mode = static_cast<GateMode>(77);
  return args;
}

template <class Args>
Args chunked() {
  Args args = small<Args>();
  args.num_chunks = 1;
  return args;
}

template <class Args>
Args of_backward() {
  Args args = small<Args>();
  args.sizes = {.tiles = 2, .window = 64, .windows = 1, .pieces = 1, .state = 128 * 128};
  args.num_tokens = 64;
  return args;
}

sm90::KeepArgs keeping() {
  auto args = small<sm90::KeepArgs>();
  args.clusters = 1;
  return args;
}

Status launch_grad(GradGates gates) {
  return sm90::launch_chunk_grad(chunked<HeadGates<FinishedGradArgs>>(), gates, 132, {});
}

TEST(GateModes, ThatAreUnknownAreRefusedByEveryFamily) {
  using Launches = std::vector<std::pair<const char*, std::function<Status()>>>;
  const Launches families = {
      {"recurrent", [] { return launch_recurrent(small<RecurrentArgs>(), {}); }},
      {"recurrent, head gates",
       [] { return head_gates::launch_recurrent(small<HeadGates<RecurrentArgs>>(), {}); }},
      {"decode", [] { return launch_decode(small<DecodeArgs>(), {}); }},
      {"decode, head gates",
       [] { return head_gates::launch_decode(small<HeadGates<DecodeArgs>>(), {}); }},
      {"drafts", [] { return drafts::launch_decode(small<drafts::DraftArgs>(), {}); }},
      {"backward", [] { return launch_backward(of_backward<BackwardArgs>(), {}); }},
      {"backward, head gates",
       [] { return head_gates::launch_backward(of_backward<HeadGates<BackwardArgs>>(), {}); }},
      {"chunk_intra",
       [] { return launch_chunk_intra(chunked<HeadGates<ChunkIntraArgs>>(), false, false, {}); }},
      {"chunk_intra by tokens",
       [] { return launch_chunk_intra(chunked<HeadGates<ChunkIntraArgs>>(), false, true, {}); }},
      {"recompute_w_u",
       [] { return launch_recompute_w_u(chunked<HeadGates<ChunkIntraArgs>>(), false, {}); }},
      {"chunk_intra_fp16",
       [] {
         return sm90::launch_chunk_intra_fp16(chunked<HeadGates<ChunkIntraArgs>>(), false, {});
       }},
      {"chunk_intra_fp16, rows in fp16",
       [] {
         return sm90::launch_chunk_intra_fp16(chunked<HeadGates<ChunkIntraArgs>>(), true, {});
       }},
      {"chunk_grad", [] { return launch_chunk_grad(chunked<HeadGates<ChunkGradArgs>>(), {}); }},
      {"backward_gradients",
       [] { return launch_finish_gradients(of_backward<HeadGates<BackwardArgs>>(), {}); }},
      {"chunk_grad_sm90", [] { return launch_grad(GradGates::kTiles); }},
      {"chunk_grad_sm90, rows", [] { return launch_grad(GradGates::kRows); }},
      {"chunk_grad_sm90, head gates", [] { return launch_grad(GradGates::kHead); }},
      {"fused",
       [] {
         return sm90::launch_fused_prefill(static_cast<sm90::FusedPrefillArgs>(keeping()), {},
                                           nullptr, {});
       }},
      {"portable fused",
       [] { return sm90::launch_portable_prefill(small<sm90::PortableArgs>(), {}); }},
      {"portable fused, K 64",
       [] { return sm90::launch_portable_prefill(small<sm90::PortableArgs>(64), {}); }},
      {"gdn", [] { return gdn::launch_intra(chunked<HeadGates<gdn::IntraArgs>>(), {}); }},
      {"keep", [] { return sm90::launch_fused_keep(keeping(), {}); }},
  };
  for (const auto& [name, launch] : families) {
    emulator::Recording recording;
    const Status status = launch();
    EXPECT_EQ(status.code(), StatusCode::kUnsupported) << name;
    EXPECT_NE(status.message().find("gate_mode"), std::string::npos) << name;
    EXPECT_TRUE(recording.launches.empty()) << name;
  }
}

}  // namespace
}  // namespace kda::cuda
