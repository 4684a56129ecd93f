// SPDX-License-Identifier: Apache-2.0
// Small random cases: changes after token t leave earlier outputs bit-equal (finite changes), and
// NaN or Inf in another sequence or head changes nothing.
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/convert.hpp"
#include "core/text.hpp"
#include "fuzz/fuzz.hpp"

namespace kda::fuzz {
namespace {

using check::Inputs;
using check::Random;

struct Rows {
  io::Buffer* buffer;
  DType dtype;
  int64_t heads, size;
};

std::array<Rows, 5> rows_of(Inputs& in) {
  const Problem& p = in.problem;
  return {{{&in.q, p.q.dtype, p.num_heads, p.key_dim},
           {&in.k, p.k.dtype, p.num_heads, p.key_dim},
           {&in.v, p.v.dtype, p.num_value_heads, p.value_dim},
           {&in.g, p.g.dtype, p.num_value_heads, p.key_dim},
           {&in.beta, p.beta.dtype, p.num_value_heads, 1}}};
}

/// Overwrites all heads of tokens [begin, end).
void overwrite(Inputs* in, int64_t begin, int64_t end, const std::function<double()>& value) {
  for (const Rows& rows : rows_of(*in))
    for (int64_t i = begin * rows.heads * rows.size; i < end * rows.heads * rows.size; ++i)
      store_element(rows.buffer->data(), rows.dtype, i, static_cast<float>(value()));
}

check::GenerateOptions small_shape(Random& random) {
  check::GenerateOptions o;
  o.num_heads = 1 + random.below(2);
  o.num_value_heads = o.num_heads * (1 + random.below(2));
  o.key_dim = 1 + random.below(24);
  o.value_dim = 1 + random.below(40);
  o.regime = static_cast<check::Regime>(random.below(check::kNumRegimes));
  o.dtype = random.chance(0.5) ? DType::kFloat32 : DType::kBFloat16;
  o.seed = random.next();
  o.seq_lens = {random.below(40), 1 + random.below(40), random.below(30)};
  return o;
}

std::string run_case(const Options& options, int64_t index) {
  Random random = random_of(options, index);
  const Inputs inputs = check::generate(small_shape(random));
  const Problem& p = inputs.problem;
  const std::vector<std::string> backends = test::backends();
  test::RunOptions run;
  run.plan.backend =
      backends[static_cast<std::size_t>(random.below(static_cast<int64_t>(backends.size())))];
  if (test::on_cuda() && random.chance(0.4)) run.plan.intra_form = IntraForm::kToken;
  run.plan.num_threads = 1;
  const test::Result before = test::run_inputs(inputs, run);
  const std::size_t row = static_cast<std::size_t>(p.num_value_heads * p.value_dim * 4);
  const std::size_t state =
      static_cast<std::size_t>(p.num_value_heads * p.key_dim * p.value_dim * 4);
  const auto same_rows = [&](const test::Result& after, int64_t begin, int64_t end) {
    const std::size_t at = static_cast<std::size_t>(begin) * row;
    return std::memcmp(before.outputs.o.data() + at, after.outputs.o.data() + at,
                       static_cast<std::size_t>(end - begin) * row) == 0;
  };

  // Sequence 1: finite changes from `cut` on.
  const int64_t begin = inputs.cu_seqlens[1], end = inputs.cu_seqlens[2];
  const int64_t cut = begin + random.below(end - begin + 1);
  Inputs changed = inputs;
  overwrite(&changed, cut, end, [&] { return 10 * random.normal(); });
  const test::Result causal = test::run_inputs(changed, run);
  if (!same_rows(causal, 0, cut)) return cat("not causal at token ", cut - begin);
  if (!same_rows(causal, end, p.num_tokens)) return "a later sequence changed";

  // Sequence 1: NaN, Inf and huge values everywhere.
  const std::array<double, 3> poisons = {std::numeric_limits<double>::quiet_NaN(),
                                         std::numeric_limits<double>::infinity(), -1e38};
  overwrite(&changed, begin, end,
            [&] { return poisons[static_cast<std::size_t>(random.below(3))]; });
  const test::Result poisoned = test::run_inputs(changed, run);
  if (!same_rows(poisoned, 0, begin) || !same_rows(poisoned, end, p.num_tokens))
    return "NaN reached another sequence";
  for (const std::size_t n : {std::size_t{0}, std::size_t{2}})
    if (std::memcmp(before.outputs.final_state.data() + n * state,
                    poisoned.outputs.final_state.data() + n * state, state) != 0)
      return "NaN reached another sequence's state";
  return "";
}

}  // namespace

Report fuzz_causality(const Options& options) {
  return run_cases(options, [&](int64_t index) { return run_case(options, index); });
}

}  // namespace kda::fuzz
