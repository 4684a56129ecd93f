// SPDX-License-Identifier: Apache-2.0
// A planned call that keeps its memory, on the host or on a GPU, and can be run again with new
// data: on a GPU by a CUDA graph, captured when it first runs.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "check/device.hpp"
#include "support/graph.hpp"
#include "support/harness.hpp"

namespace kda::soak {

/// Bytes on the host, and on a GPU where the tests run on one.
class Memory {
 public:
  explicit Memory(std::size_t bytes = 0);
  io::Buffer& host() { return host_; }
  const io::Buffer& host() const { return host_; }
  void* at();  ///< where calls find it
  void upload();
  void download();

 private:
  io::Buffer host_;
  std::unique_ptr<check::DeviceBuffer> device_;
};

/// One row of a call: a sequence. Slots may name none.
struct Row {
  int64_t tokens = 0;
  std::vector<int32_t> read;    ///< initial_state_indices: 1, or in place a state_index_column each
  int32_t write = -1;           ///< final_state_indices
  std::vector<int32_t> drafts;  ///< the same of drafts, a state_index_column each
  std::vector<int32_t> parents;  ///< token_parents, a state_index_column each
  bool has_state = true;         ///< of the mask
  int32_t accepted = 1;
  std::vector<int32_t> checkpoints;
  int64_t offset = 0;  ///< with checkpoint_offsets
};

class Call {
 public:
  /// `problem` has everything but cu_seqlens' values; `lengths`: what is planned with, unless the
  /// plan is made `from_bounds`. `pool`: of all states.
  Call(const Problem& problem, const std::vector<int64_t>& lengths, bool from_bounds,
       const PlanOptions& options, Memory* pool);

  /// Host sides of the inputs, for the caller to fill before run().
  enum Input { kQ, kK, kV, kG, kBeta, kALog, kDtBias, kNumInputs };
  io::Buffer& input(Input which) { return inputs_[which].host(); }
  const io::Buffer& o() const { return o_.host(); }
  const Problem& problem() const { return problem_; }
  const Plan& plan() const { return plan_; }
  /// The host's inputs, for the oracle.
  Tensors host_tensors() const;

  /// Runs on `rows` and waits; outputs are 0xff before. `in_graph`: by a graph, on a GPU.
  void run(const std::vector<Row>& rows, bool in_graph);

 private:
  void fill_indices(const std::vector<Row>& rows);

  Problem problem_;
  Plan plan_;
  Memory* pool_;
  std::array<Memory, kNumInputs> inputs_;
  Memory o_, cu_seqlens_, read_, write_, checkpoints_, mask_, accepted_, parents_, offsets_,
      workspace_;
  Tensors tensors_;
#ifdef KDA_WITH_CUDA
  std::unique_ptr<test::Stream> stream_;
  std::unique_ptr<test::Graph> graph_;
#endif
};

}  // namespace kda::soak
