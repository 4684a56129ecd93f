// SPDX-License-Identifier: Apache-2.0
// The search for a cut as functions of numbers alone, for the planner and for the kernel that cuts
// where only the GPU knows the lengths. Both call these in files that are compiled without
// contraction of products and sums, so that both find the same cut, bit for bit.
//
// For every number of segments there are candidates, which differ in how long a first segment is.
// The best of them is the one with the least time, the first of equals. A walk over the numbers of
// segments then takes the best of a number where it gains enough.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "core/host_device.hpp"

namespace kda::plan {

// The planner counts in int64_t, the kernel in int, whose divisions take less code and time.

/// a / b of counts, which are not negative: a division without signs is shorter.
template <class A, class B>
KDA_HOST_DEVICE constexpr auto quotient(A a, B b) {
  using Both = decltype(a / b);
  using Unsigned = std::make_unsigned_t<Both>;
  return static_cast<Both>(static_cast<Unsigned>(a) / static_cast<Unsigned>(b));
}
template <class A, class B>
KDA_HOST_DEVICE constexpr auto ceil_div(A a, B b) {
  return quotient(a + b - 1, b);
}
template <class A, class B>
KDA_HOST_DEVICE constexpr auto larger(A a, B b) {
  return a > b ? a : b;
}
template <class A, class B>
KDA_HOST_DEVICE constexpr auto smaller(A a, B b) {
  return a < b ? a : b;
}

/// Segments must win by this factor: a choice, about the error of predicted times.
inline constexpr double kMinimumGain = 1.12;
inline constexpr int64_t kAutoChunk = 64;  ///< tokens; searched cuts lie at multiples of it
inline constexpr int64_t kAutoMaxSegments = 64;

/// Sums over lengths that predicted times depend on: integers, so that their order does not matter.
template <class Int>
struct LengthSums {
  Int sequences = 0;    ///< all of them
  Int with_tokens = 0;  ///< those that are not empty
  Int tokens = 0;
  Int longest = 0;

  KDA_HOST_DEVICE void add(Int length) {
    ++sequences;
    with_tokens += length > 0 ? 1 : 0;
    tokens += length;
    longest = larger(longest, length);
  }
};

/// Lengths of the segments of a sequence that is cut, in chunks.
template <class Int>
struct CutLengths {
  Int first = 0, others = 0;
};

/// The cut of `chunks` chunks into `segments`, the first of which is `first` times as long as the
/// others.
template <class Int>
KDA_HOST_DEVICE CutLengths<Int> cut_lengths(Int chunks, Int segments, double first) {
  const auto others = static_cast<Int>(
      ceil(static_cast<double>(chunks) / (static_cast<double>(segments - 1) + first)));
  return {larger(others, chunks - (segments - 1) * others), others};
}

/// Sums over sequences that are cut: segments of at most `segment_tokens` behind first ones of
/// `first_tokens`.
template <class Int>
struct Cut {
  Int segments = 0;                   ///< of sequences with tokens
  Int behind = 0, tokens_behind = 0;  ///< behind the first one of their sequence
  Int most = 1;                       ///< of a sequence

  KDA_HOST_DEVICE void add(Int length, Int first_tokens, Int segment_tokens) {
    const Int after_first = larger(Int{0}, length - first_tokens);
    const Int more = ceil_div(after_first, segment_tokens);
    most = larger(most, more + 1);
    segments += more + (length > 0 ? 1 : 0);
    behind += more;
    tokens_behind += after_first;
  }
};

/// The walk over numbers of segments.
struct CutWalk {
  double best;          ///< time of what is taken; uncut at first
  double minimum_step;  ///< of that time, for more segments: they take more memory
  int patience;         ///< so many segments more without a gain: still more have none either
  int segments = 0;     ///< of what is taken; 0: nothing is
  double below = best;  ///< less time than this is taken

  /// Whether no cut into so many or more is looked at.
  KDA_HOST_DEVICE bool is_over(int number) const {
    return number > (segments > 1 ? segments : 1) + patience;
  }
  /// Whether the best cut into `number` segments, which takes `time`, is taken.
  KDA_HOST_DEVICE bool take(int number, double time) {
    if (!(time < below)) return false;
    best = time;
    segments = number;
    below = minimum_step * best;
    return true;
  }
};

/// Segments of a sequence of `chunks` chunks. A first length of 0: as the others.
template <class Int>
KDA_HOST_DEVICE Int num_segments_of(const CutLengths<Int>& lengths, Int chunks) {
  const Int first = lengths.first == 0 ? lengths.others : lengths.first;
  return chunks <= first ? 1 : 1 + ceil_div(chunks - first, lengths.others);
}

/// Segments of such a sequence where `segments` are asked for.
template <class Int>
KDA_HOST_DEVICE Int fixed_segments_of(Int segments, Int chunks) {
  return chunks <= 1 ? 1 : smaller(segments, chunks);
}

/// Chunks of a sequence before segment `s` of `count`: the first one as long as it was asked for
/// (0: as the others), the others as even as they go.
template <class Int>
KDA_HOST_DEVICE Int chunks_before(Int s, Int count, Int chunks, Int first) {
  if (s == 0) return 0;
  if (s == count) return chunks;
  const Int set = first == 0 ? 0 : 1;  // segments whose length is given
  return first + quotient((chunks - first) * (s - set), count - set);
}

}  // namespace kda::plan
