// SPDX-License-Identifier: Apache-2.0
// What the fuzzers share. A case is a function of (seed, index) alone.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "check/generate.hpp"
#include "support/harness.hpp"

namespace kda::fuzz {

struct Options {
  uint64_t seed = 1;
  int64_t first = 0;
  int64_t count = 100;
  int32_t num_threads = 2;
  bool fp16 = false;          ///< only what fp16 rows of a backward on Hopper may be
  bool tensor_cores = false;  ///< only sizes and types that the staged kernels take
  bool fused = false;         ///< accuracy: only problems that the fused kernel takes, on it
  bool gdn = false;           ///< accuracy, backward: only problems that cuda.sm90.gdn takes, on it
  bool hard = false;          ///< and those of them that may exceed the tolerance
  bool unwritten = false;     ///< accuracy, backward: leaves rows unwritten; every case must fail
  std::string dump;  ///< accuracy: write the inputs of each case to this file (for --count 1)
};

/// One number for the outputs of all cases. It does not depend on the order in which they run, so
/// that two builds can be compared to the bit.
class Digest {
 public:
  /// FNV-1a over the bytes of `buffers`, of case `index`.
  void add(int64_t index, const std::vector<const io::Buffer*>& buffers) {
    uint64_t hash = 0xcbf29ce484222325u ^ static_cast<uint64_t>(index);
    for (const io::Buffer* buffer : buffers)
      for (std::size_t i = 0; i < buffer->size(); ++i)
        hash = (hash ^ static_cast<uint64_t>(buffer->data()[i])) * 0x100000001b3u;
    sum_.fetch_add(check::Random(hash).next(), std::memory_order_relaxed);
  }
  uint64_t value() const { return sum_; }

 private:
  std::atomic<uint64_t> sum_ = 0;
};

/// What a fuzzer found: failures (empty: good) and a summary line.
struct Report {
  std::vector<std::string> failures;
  std::string summary;
  std::map<std::string, double> figures;  ///< what --json writes
  uint64_t digest = 0;                    ///< accuracy, backward, problems: of all outputs
};

/// Random numbers of one case.
inline check::Random random_of(const Options& options, int64_t index) {
  check::Random mixer(options.seed * 0x2545f4914f6cdd1du + static_cast<uint64_t>(index));
  return check::Random(mixer.next());
}

/// Sizes, lengths, regime and type of a case.
check::GenerateOptions random_shape(check::Random& random);
/// The nearest shape that the staged kernels take (docs/planning.md). Unless `hard`, not fewer than
/// 32 channels and no equal keys: there 16-bit operands may lose more than the tolerance
/// (docs/accuracy.md).
void fit_tensor_cores(check::GenerateOptions* shape, bool hard);
/// The nearest that Gated DeltaNet's kernels take.
void fit_gdn(check::GenerateOptions* shape);
/// Shrinks lengths until T HV K V is at most `limit`: the oracle's time.
void limit_work(check::GenerateOptions* shape, double limit);
/// Options that the regimes leave alone. Without the norm, keys are made |k| <= 1. `unit`: strides
/// are multiples of it. `plain`: steps and keys may come as they are used.
void vary_options(check::Inputs* inputs, check::Random& random, int64_t unit, bool plain);
/// On a GPU some packed problems of `index` get tokens behind their last sequence, which only the
/// device knows; their rows are still dense. Says whether `inputs` has them.
bool add_rows_behind(const Options& options, int64_t index, check::Inputs* inputs);
/// The last token's row of a buffer becomes what it was before the call, as of a kernel that has
/// not written it.
void leave_last_row(int64_t rows, io::Buffer* buffer);
/// Sorts `values`; 0 if there are none.
double quantile(std::vector<double>& values, double share);

Report fuzz_accuracy(const Options& options);
Report fuzz_backward(const Options& options);
Report fuzz_causality(const Options& options);
Report fuzz_files(const Options& options);
Report fuzz_problems(const Options& options);

/// Calls body(index) for every case on the options' threads; collects thrown and returned
/// failures with their index.
Report run_cases(const Options& options, const std::function<std::string(int64_t)>& body);

}  // namespace kda::fuzz
