// SPDX-License-Identifier: Apache-2.0
// A history of a serving engine on a pool of boundary states and tails: prompts in pieces,
// tokens, drafts and trees of drafts of which some are rejected, forks that read the state of
// another slot, copies of slots with their tails, eviction and settling, beside rows without a
// slot. All of it follows from (seed, number), and the device.
//
// After every step o of each computed token is compared with the float64 recurrence, which has
// never seen the pool. Slots that the call does not name keep their bytes.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "check/generate.hpp"
#include "io/buffer.hpp"
#include "kda/kda.hpp"
#include "support/harness.hpp"

namespace kda::soak {

class TailHistory {
 public:
  TailHistory(uint64_t seed, int64_t number);
  /// One call and what follows from it. Empty, or what was wrong.
  std::string step();
  std::string describe() const;
  const std::map<std::string, int64_t>& counts() const { return counts_; }
  /// The largest error of a row of o so far.
  double worst() const { return worst_; }

 private:
  using States = std::vector<std::vector<double>>;  ///< of each head, [K, V]; empty: zeros
  struct Request {
    int32_t slot = -1;
    int32_t source = -1;  ///< of its boundary state; -1: its own
    int64_t position = 0;
    States states;                  ///< behind its sure tokens
    std::vector<int32_t> accepted;  ///< rows of the call before that stay, where it was a tree
    bool is_new = true;
    bool busy = false;
  };
  struct Row {
    Request* request = nullptr;  ///< null: padding
    int64_t tokens = 0;
    std::vector<int32_t> parents;  ///< of a tree
  };
  struct Buffers;

  Request* idle_request();
  Request* new_request();
  int32_t take_slot();
  void release(int32_t slot);
  bool is_source(int32_t slot) const;
  void fork();
  void copy();
  void evict();
  std::string settle();
  std::vector<double> state(int32_t slot, int64_t head) const;
  std::vector<io::Buffer*> of_slots();
  std::string play(const char* what, Operation operation, std::vector<Row> rows, bool trees);
  std::string compare(const Problem& p, const Tensors& t, const Row& row, std::size_t n,
                      int64_t begin, Operation operation);
  std::string run(const Problem& p, const Tensors& tensors, const std::vector<int64_t>& lengths);
  Problem problem_of(Operation operation, const std::vector<int64_t>& lengths);
  void fill(io::Buffer* buffer, DType dtype, int64_t count, double scale, double offset);
  std::size_t tail_bytes(const TensorDesc& desc) const;

  check::Random random_;
  Problem base_;
  std::vector<float> A_log_, dt_bias_;
  std::string backend_;
  io::Buffer pool_, tail_k_, tail_g_, v_new_, folded_;
  io::Buffer rest_, tail_v_, tail_beta_;  ///< of split states
  io::Buffer q_, k_, v_, g_, beta_, o_;
  std::vector<std::unique_ptr<Request>> requests_;
  std::vector<int32_t> free_;
  double limit_ = 1e-5, worst_ = 0;
  double state_limit_ = 1e-5;  ///< of settled states
  std::map<std::string, int64_t> counts_;
};

}  // namespace kda::soak
