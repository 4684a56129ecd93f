// SPDX-License-Identifier: Apache-2.0
// A history of a serving engine on one pool of states: requests come and go, prefill in chunks,
// decode, verify drafts and roll back, keep checkpoints, start from them, fork and are evicted,
// beside rows of padding that have no slot. Sizes, types and modes are the history's; all of it
// follows from (seed, number).
//
// After every step each state that the call wrote is compared with
// - the oracle from the state as it lay in the pool before the step, within the tolerance of a
// call;
// - the oracle's own state machine, which has never seen the pool, within the sum of such
//   tolerances. An error does not grow, since |I - beta k k^T| <= 1 here, and it decays at least as
//   the slowest channel does.
// Every other byte of the pool must be what it was.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "soak/call.hpp"

namespace kda::soak {

class History {
 public:
  History(uint64_t seed, int64_t number);
  /// One call and what follows from it. Empty, or what was wrong.
  std::string step();
  std::string describe() const;
  /// Steps by what they were, tokens, and states that were compared.
  const std::map<std::string, int64_t>& counts() const { return counts_; }

 private:
  /// The state machine's state of one head, and how far the pool's may be from it.
  struct Truth {
    std::vector<double> S;  // [K, V]; empty: zeros
    double bound = 0;
  };
  struct Request {
    std::vector<int32_t> slots;  ///< a state_index_column each
    std::size_t current = 0;     ///< the one that holds its state
    bool busy = false;           ///< in the call that is being put together
    int32_t slot() const { return slots[current]; }
  };
  /// A state that a row stores: after these of its tokens.
  struct Store {
    int32_t slot;
    std::vector<int64_t> path;
  };

  bool is_none(int32_t slot) const { return slot < base_.first_slot; }
  int32_t none();
  int64_t some_tokens(int64_t most);
  Request* idle_request();
  Request* new_request();
  void evict();

  Problem problem_for(Operation operation, const std::vector<Row>& rows, bool packed);
  void fill_inputs(Call* call);
  void fill_rows(io::Buffer* buffer, const TensorDesc& desc, int64_t heads, int64_t size,
                 double (History::*element)(), bool normalise);
  double normal() { return random_.normal(); }
  double gate();
  double step_size();

  Row forward_row(int64_t tokens);
  std::string forward();
  std::string decode();
  std::string verify();
  void grow(Row* row);
  static int64_t tokens_of(const Row& row);
  static std::vector<int64_t> path_to(const Row& row, int64_t token);
  /// Runs and compares.
  std::string play(const char* what, Call* call, const std::vector<Row>& rows, bool in_graph);
  std::string compare(const Call& call, const std::vector<Row>& rows, const io::Buffer& before);
  std::string compare_row(const Call& call, const Row& row, int64_t begin, const io::Buffer& before,
                          std::map<int32_t, std::vector<Truth>>* written);
  std::string compare_untouched(const io::Buffer& before,
                                const std::map<int32_t, std::vector<Truth>>& written) const;
  std::vector<Store> stores_of(const Problem& p, const Row& row) const;

  check::Random random_;
  Problem base_;  ///< sizes of heads, types, modes, and the pool as initial_state
  int64_t state_elements_ = 0;
  DType g_type_ = DType::kFloat32, beta_type_ = DType::kFloat32, o_type_ = DType::kFloat32;
  std::vector<float> A_log_, dt_bias_;
  std::vector<std::string> backends_;
  Memory pool_;
  std::vector<std::unique_ptr<Request>> requests_;
  std::vector<int32_t> free_, saved_;
  std::map<int32_t, std::vector<Truth>> truth_;  ///< of the slots that hold a state, by head
  std::unique_ptr<Call> decode_graph_, verify_graph_;
  bool graph_has_trees_ = false, graph_has_drafts_ = false;
  std::map<std::string, int64_t> counts_;
};

}  // namespace kda::soak
