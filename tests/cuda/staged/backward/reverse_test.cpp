// SPDX-License-Identifier: Apache-2.0
// The two chains of the staged backward, states with errors and chunk_reverse, against the adjoint
// of the recurrence in float64, token by token.
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/oracle/oracle.hpp"
#include "support/gpu.hpp"

#ifdef KDA_WITH_CUDA

#include "cuda/launch/built.hpp"
#include "cuda/launch/views.hpp"
#include "cuda/staged/backward/chains_sm90.hpp"
#include "cuda/staged/backward/chunk_delta_h_errors.hpp"
#include "cuda/staged/backward/reverse.hpp"
#include "cuda/staged/chunk_delta_h.hpp"
#include "cuda/staged/chunk_intra.hpp"
#include "cuda/tile/chunk.hpp"
#include "cuda/tile/swizzle.hpp"

namespace kda {
namespace {

using check::DeviceBuffer;
using check::Inputs;
using check::Regime;
using Doubles = std::vector<double>;

/// Which kernels run: those of sm_80, or both chains in one launch on Hopper.
enum class Form { kMmaSync, kWgmma };

bool on_hopper() { return cuda::sm90::kBuilt && test::device().compute_capability == 90; }

/// Where Hopper's chains serve, those of sm_80 have no code, but on the emulator.
bool has(Form form) {
  return form == Form::kWgmma ? on_hopper() : test::emulated() || !on_hopper();
}

class Reverse : public test::GpuTest, public ::testing::WithParamInterface<Form> {
 protected:
  void SetUp() override {
    test::GpuTest::SetUp();
    if (!IsSkipped() && !has(GetParam()))
      GTEST_SKIP() << "this build has no such chains for this GPU";
    form = GetParam();
  }

 public:
  static inline Form form;
};

constexpr std::size_t kBf16 = 2;

std::size_t size(int64_t count) { return static_cast<std::size_t>(count); }

/// Gradients that come in, and how all of them lie.
struct Options {
  bool narrow = false;     ///< of the kernels of sm_80
  bool one_launch = true;  ///< of those of Hopper
  bool loss = true;        ///< d_o is there
  bool final_loss = true;  ///< d_final is there
  bool wanted = true;      ///< dv and d_initial are
  DType state = DType::kFloat32;
  bool vk = false;
  DType dv = DType::kFloat32;
  int64_t gap = 0;  ///< elements between rows of dv; 8 times as many between those of d_o
};

/// A problem with d_o [tokens, HV, V], d_final [N, HV, K, V], and which sequences have a state.
struct Case {
  Inputs inputs;
  std::vector<int64_t> offsets;
  Doubles d_o, d_final;
  std::vector<uint8_t> has_state;

  explicit Case(const check::GenerateOptions& options) : inputs(check::generate(options)) {
    const Problem& p = inputs.problem;
    offsets = inputs.offsets();
    check::Random random(7);
    d_o.resize(size(offsets.back() * p.num_value_heads * p.value_dim));
    for (double& x : d_o) x = bf16_to_float(float_to_bf16(static_cast<float>(random.normal())));
    d_final.resize(size(p.num_sequences * p.num_value_heads * p.key_dim * p.value_dim));
    for (double& x : d_final) x = bf16_to_float(float_to_bf16(static_cast<float>(random.normal())));
    has_state.assign(size(p.num_sequences), p.initial_state ? 1 : 0);
  }
  int64_t chunks(int64_t n) const {
    return (offsets[size(n) + 1] - offsets[size(n)] + cuda::kChunk - 1) / cuda::kChunk;
  }
  int64_t all_chunks() const {
    int64_t sum = 0;
    for (int64_t n = 0; n < inputs.problem.num_sequences; ++n) sum += chunks(n);
    return sum;
  }
};

check::GenerateOptions case_of(std::vector<int64_t> lengths, int64_t K, int64_t V,
                               Regime regime = Regime::kTrained, int64_t value_heads = 1) {
  check::GenerateOptions options = test::shape16(0, 1, K, V);
  options.seq_lens = std::move(lengths);
  options.num_value_heads = value_heads;
  options.regime = regime;
  return options;
}

// ---- the truth
// -----------------------------------------------------------------------------------

/// What holds for one sequence and value head; chunks after each other.
struct Truth {
  Doubles h, dh;       // [chunks, K, V]
  Doubles errors, dz;  // [tokens, V]
  Doubles d_initial;   // [K, V]
};

Truth truth_of(const Case& c, const Options& options, int64_t n, int64_t head) {
  const Problem& p = c.inputs.problem;
  const Tensors t = c.inputs.tensors();
  const int64_t K = p.key_dim, V = p.value_dim, HV = p.num_value_heads;
  const int64_t begin = c.offsets[size(n)], end = c.offsets[size(n) + 1];
  const int64_t q_head = head / (HV / p.num_heads);
  struct Token {
    Doubles q, k, decay;
    double beta;
  };
  std::vector<Token> tokens;
  Truth truth;
  Doubles S(size(K * V)), dS(size(K * V));
  if (c.has_state[size(n)])
    S = cpu::oracle::load_state(p, *p.initial_state, t.initial_state, n, head);
  for (int64_t i = begin; i < end; ++i) {
    if ((i - begin) % cuda::kChunk == 0) truth.h.insert(truth.h.end(), S.begin(), S.end());
    Token x{cpu::oracle::load_row(p, p.q, t.q, i, q_head, K),
            cpu::oracle::load_row(p, p.k, t.k, i, q_head, K), cpu::oracle::log_decay(p, t, i, head),
            cpu::oracle::step_size(p, t, i, head)};
    const auto normalise = [&](Doubles& row, double factor) {
      double sum = 0;
      for (const double e : row) sum += e * e;
      for (double& e : row) e *= factor * (p.qk_l2norm ? 1 / std::sqrt(sum + 1e-6) : 1);
    };
    normalise(x.q, effective_scale(p));
    normalise(x.k, 1);
    for (double& e : x.decay) e = std::exp(e);
    Doubles error = cpu::oracle::load_row(p, p.v, t.v, i, head, V);
    for (int64_t d = 0; d < K; ++d)
      for (int64_t v = 0; v < V; ++v) {
        S[size(d * V + v)] *= x.decay[size(d)];
        error[size(v)] -= S[size(d * V + v)] * x.k[size(d)];
      }
    for (int64_t d = 0; d < K; ++d)
      for (int64_t v = 0; v < V; ++v) S[size(d * V + v)] += x.beta * x.k[size(d)] * error[size(v)];
    truth.errors.insert(truth.errors.end(), error.begin(), error.end());
    tokens.push_back(std::move(x));
  }
  if (options.final_loss) {
    const auto from = c.d_final.begin() + (n * HV + head) * K * V;
    dS.assign(from, from + K * V);
  }
  truth.dh.resize(truth.h.size());
  truth.dz.resize(truth.errors.size());
  for (int64_t i = end - begin - 1; i >= 0; --i) {
    if (i % cuda::kChunk == cuda::kChunk - 1 || i == end - begin - 1)
      std::copy(dS.begin(), dS.end(), truth.dh.begin() + i / cuda::kChunk * K * V);
    const Token& x = tokens[size(i)];
    double* dz = &truth.dz[size(i * V)];
    const double* d_o = &c.d_o[size(((begin + i) * HV + head) * V)];
    for (int64_t v = 0; v < V; ++v) {
      double sum = 0;
      for (int64_t d = 0; d < K; ++d) {
        double& gradient = dS[size(d * V + v)];
        if (options.loss) gradient += x.q[size(d)] * d_o[v];
        sum += gradient * x.k[size(d)];
      }
      dz[v] = x.beta * sum;
      for (int64_t d = 0; d < K; ++d) {
        double& gradient = dS[size(d * V + v)];
        gradient = x.decay[size(d)] * (gradient - x.k[size(d)] * dz[v]);
      }
    }
  }
  if (!c.has_state[size(n)]) dS.assign(dS.size(), 0);
  truth.d_initial = dS;
  return truth;
}

// ---- the kernels
// ---------------------------------------------------------------------------------

/// Everything that the kernels write, as it lies in memory.
struct Result {
  io::Buffer h, errors, dh, dz, dv, d_initial;

  friend bool operator==(const Result& a, const Result& b) {
    return test::same_bits(a.h, b.h) && test::same_bits(a.errors, b.errors) &&
           test::same_bits(a.dh, b.dh) && test::same_bits(a.dz, b.dz) &&
           test::same_bits(a.dv, b.dv) && test::same_bits(a.d_initial, b.d_initial);
  }
};

constexpr std::size_t kGuard = 256;  // bytes behind a buffer, which stay 0xff

DeviceBuffer nan_buffer(std::size_t bytes) {
  DeviceBuffer buffer(bytes + kGuard);
  buffer.fill(0xff);
  return buffer;
}
DeviceBuffer uploaded(const void* source, std::size_t bytes) {
  DeviceBuffer buffer(bytes);
  buffer.upload(source, bytes);
  return buffer;
}
io::Buffer downloaded(const DeviceBuffer& buffer) {
  io::Buffer all(buffer.size()), copy(buffer.size() - kGuard);
  buffer.download(all.data(), all.size());
  std::memcpy(copy.data(), all.data(), copy.size());
  for (std::size_t i = copy.size(); i < all.size(); ++i)
    EXPECT_EQ(std::to_integer<int>(all.data()[i]), 0xff) << "behind a buffer";
  return copy;
}

/// Element (row, v) of rows [tokens, HV, V] with gaps behind heads.
int64_t row_at(const Problem& p, int64_t gap, int64_t token, int64_t head) {
  return (token * p.num_value_heads + head) * (p.value_dim + gap);
}
int64_t state_at(const Problem& p, bool vk, int64_t slot, int64_t k, int64_t v) {
  return slot * p.key_dim * p.value_dim + (vk ? v * p.key_dim + k : k * p.value_dim + v);
}

cuda::StateView states(const Problem& p, const Options& options, void* base) {
  cuda::StateView view;
  view.base = base;
  view.stride_row = options.vk ? p.key_dim : p.value_dim;
  view.stride_head = p.key_dim * p.value_dim;
  view.stride_slot = p.num_value_heads * view.stride_head;
  view.num_slots = p.num_sequences;
  view.bf16 = options.state == DType::kBFloat16;
  view.vk = options.vk;
  return view;
}

Result run(const Case& c, const Options& options = {}) {
  const test::OnDevice device(c.inputs, {.plan = test::with_backend("staged")});
  const Problem& p = device.problem;
  const Tensors& t = device.memory->tensors();
  const int64_t K = p.key_dim, V = p.value_dim, HV = p.num_value_heads, N = p.num_sequences;
  const int64_t Kp = K <= 64 ? 64 : 128, v_tiles = (V + cuda::kVTile - 1) / cuda::kVTile;
  const int64_t tokens = c.offsets.back(), num_chunks = c.all_chunks(), tiles = num_chunks * HV;

  std::vector<int64_t> chunk_offsets = {0};
  for (int64_t n = 0; n < N; ++n) chunk_offsets.push_back(chunk_offsets.back() + c.chunks(n));
  const DeviceBuffer cu_seqlens = uploaded(c.offsets.data(), 8 * c.offsets.size());
  const DeviceBuffer before = uploaded(chunk_offsets.data(), 8 * chunk_offsets.size());
  cuda::SequenceMap map;
  map.num_sequences = N;
  map.num_tokens = p.num_tokens;
  map.chunks = cuda::Divisor((p.num_tokens + cuda::kChunk - 1) / cuda::kChunk);
  if (p.cu_seqlens) {
    map.cu_seqlens = static_cast<const int64_t*>(cu_seqlens.data());
    map.chunk_offsets = static_cast<const int64_t*>(before.data());
  }

  std::vector<DeviceBuffer> memory;
  const auto make = [&](int64_t bytes) {
    memory.push_back(nan_buffer(size(bytes)));
    return memory.back().data();
  };
  cuda::Factors factors;
  factors.w = make(tiles * 64 * Kp * 2);
  factors.u = make(tiles * v_tiles * 64 * 64 * 2);
  factors.kg = make(tiles * 64 * Kp * 2);
  factors.qg = make(tiles * 64 * Kp * 2);
  factors.Aqk = make(tiles * 64 * 64 * 2);
  factors.T = make(tiles * 64 * 64 * 2);
  factors.gamma = static_cast<float*>(make(tiles * Kp * 4));
  factors.beta = static_cast<float*>(make(tiles * 64 * 4));
  factors.diag = static_cast<float*>(make(tiles * 64 * 4));

  cuda::HeadGates<cuda::ChunkIntraArgs> intra;
  intra.shape = cuda::shape_of(p);
  intra.map = map;
  intra.num_chunks = num_chunks;
  intra.q = cuda::row_view(p.q, t.q);
  intra.k = cuda::row_view(p.k, t.k);
  intra.v = cuda::row_view(p.v, t.v);
  intra.g = cuda::row_view(p.g, t.g);
  intra.beta = cuda::row_view(p.beta, t.beta);
  intra.gate = cuda::gate_view(p, t);
  intra.factors = factors;
  throw_if_error(launch_chunk_intra(intra, false, false, {}));

  const DeviceBuffer mask = uploaded(c.has_state.data(), c.has_state.size());
  cuda::StateView initial = cuda::initial_view(p, t);
  initial.mask = static_cast<const uint8_t*>(mask.data());

  const auto states_bytes = size(tiles * v_tiles * 64 * Kp * 2);
  const auto rows_bytes = size(tiles * v_tiles * 64 * 64 * 2);
  DeviceBuffer h = nan_buffer(states_bytes), errors = nan_buffer(rows_bytes);
  cuda::ChainArgs chain;
  chain.shape = intra.shape;
  chain.map = map;
  chain.factors = factors;
  chain.initial = initial;
  chain.h = h.data();
  chain.vn = errors.data();
  const auto rows = [&](const DeviceBuffer& buffer, DType dtype, int64_t gap) {
    const int64_t row = V + gap;
    const TensorDesc desc{dtype, {p.num_tokens * HV * row, HV * row, row, 1}, gap % 2 ? 2 : 4};
    return cuda::row_view(desc, buffer.data());
  };
  io::Buffer host(size(tokens * HV * (V + 8 * options.gap)) * kBf16);
  std::memset(host.data(), 0xff, host.size());
  for (int64_t i = 0; i < tokens * HV; ++i)
    for (int64_t v = 0; v < V; ++v)
      store_element(host.data(), DType::kBFloat16, row_at(p, 8 * options.gap, i / HV, i % HV) + v,
                    static_cast<float>(c.d_o[size(i * V + v)]));
  const DeviceBuffer d_o = uploaded(host.data(), host.size());
  const int64_t state_bytes = dtype_size(options.state);
  host = io::Buffer(c.d_final.size() * size(state_bytes));
  for (int64_t i = 0; i < N * HV; ++i)
    for (int64_t k = 0; k < K; ++k)
      for (int64_t v = 0; v < V; ++v)
        store_element(host.data(), options.state, state_at(p, options.vk, i, k, v),
                      static_cast<float>(c.d_final[size(state_at(p, false, i, k, v))]));
  const DeviceBuffer d_final = uploaded(host.data(), host.size());
  DeviceBuffer d_initial = nan_buffer(host.size());
  DeviceBuffer dh = nan_buffer(states_bytes), dz = nan_buffer(rows_bytes);
  DeviceBuffer dv = nan_buffer(size(tokens * HV * (V + options.gap) * dtype_size(options.dv)));

  cuda::ReverseArgs reverse;
  reverse.shape = intra.shape;
  reverse.map = map;
  reverse.factors = factors;
  reverse.factors.u = nullptr;
  if (options.loss) reverse.d_o = rows(d_o, DType::kBFloat16, 8 * options.gap);
  if (options.final_loss) reverse.d_final = states(p, options, d_final.data());
  if (options.wanted) reverse.dv = rows(dv, options.dv, options.gap);
  if (options.wanted) reverse.d_initial = states(p, options, d_initial.data());
  reverse.initial = initial;
  reverse.dh = dh.data();
  reverse.dz = dz.data();
  if (Reverse::form == Form::kMmaSync) {
    throw_if_error(launch_chunk_delta_h_errors(chain, options.narrow, {}));
    throw_if_error(launch_chunk_reverse(reverse, options.narrow, {}));
  } else if constexpr (cuda::sm90::kBuilt) {
    if (options.one_launch) {
      throw_if_error(cuda::sm90::launch_chains(&chain, &reverse, {}));
    } else {
      throw_if_error(cuda::sm90::launch_chains(&chain, nullptr, {}));
      throw_if_error(cuda::sm90::launch_chains(nullptr, &reverse, {}));
    }
  }
  check::synchronize_device();
  return {downloaded(h),  downloaded(errors), downloaded(dh),
          downloaded(dz), downloaded(dv),     downloaded(d_initial)};
}

// ---- comparison
// ----------------------------------------------------------------------------------

/// Relative error of one tensor, root mean square.
struct Error {
  double difference = 0, norm = 0;
  void add(double x, double truth) {
    difference += (x - truth) * (x - truth);
    norm += truth * truth;
  }
  /// Where everything is zero no difference is allowed.
  double relative() const {
    return difference == 0 ? 0
                           : std::sqrt(difference / norm);  // inf, or NaN, which no bound is above
  }
};

struct Errors {
  Error h, errors, dh, dz, dv, d_initial;
};

/// Element (row, column) of a tile.
double tile_element(const io::Buffer& tiles, int64_t tile, int64_t tile_size, int64_t row,
                    int64_t column) {
  const int64_t at = tile * tile_size +
                     cuda::swizzled(static_cast<int>(row), static_cast<int>(column / 8)) +
                     column % 8;
  return load_element(tiles.data(), DType::kBFloat16, at);
}

/// Compares one sequence and head, and counts what is not zero where it must be.
Errors compare(const Case& c, const Options& options, const Result& result, int64_t n, int64_t head,
               int64_t* not_zero) {
  const Problem& p = c.inputs.problem;
  const int64_t K = p.key_dim, V = p.value_dim, HV = p.num_value_heads;
  const int64_t Kp = K <= 64 ? 64 : 128, v_tiles = (V + 63) / 64;
  const Truth truth = truth_of(c, options, n, head);
  const int64_t begin = c.offsets[size(n)], count = c.offsets[size(n) + 1] - begin;
  int64_t chunk0 = 0;
  for (int64_t i = 0; i < n; ++i) chunk0 += c.chunks(i);
  Errors errors;
  const auto add = [&](Error& error, double x, bool exists, const Doubles& values, int64_t at) {
    if (exists)
      error.add(x, values[size(at)]);
    else
      *not_zero += x != 0;
  };
  for (int64_t chunk = 0; chunk < c.chunks(n); ++chunk)
    for (int64_t v = 0; v < v_tiles * 64; ++v) {
      const int64_t tile = ((chunk0 + chunk) * HV + head) * v_tiles + v / 64;
      for (int64_t k = 0; k < Kp; ++k) {
        const bool exists = k < K && v < V;
        const int64_t at = (chunk * K + k) * V + v;
        add(errors.h, tile_element(result.h, tile, 64 * Kp, v % 64, k), exists, truth.h, at);
        add(errors.dh, tile_element(result.dh, tile, 64 * Kp, v % 64, k), exists, truth.dh, at);
      }
      for (int64_t i = 0; i < 64; ++i) {
        const int64_t token = chunk * 64 + i;
        const bool exists = token < count && v < V;
        const int64_t at = token * V + v;
        add(errors.errors, tile_element(result.errors, tile, 64 * 64, i, v % 64), exists,
            truth.errors, at);
        add(errors.dz, tile_element(result.dz, tile, 64 * 64, i, v % 64), exists, truth.dz, at);
      }
    }
  for (int64_t i = 0; i < count; ++i)
    for (int64_t v = 0; v < V; ++v)
      errors.dv.add(
          load_element(result.dv.data(), options.dv, row_at(p, options.gap, begin + i, head) + v),
          truth.dz[size(i * V + v)]);
  for (int64_t k = 0; k < K; ++k)
    for (int64_t v = 0; v < V; ++v)
      errors.d_initial.add(load_element(result.d_initial.data(), options.state,
                                        state_at(p, options.vk, n * HV + head, k, v)),
                           truth.d_initial[size(k * V + v)]);
  return errors;
}

/// Runs and compares; bounds are for what bf16 operands and bf16 tiles leave.
Result expect_true(const Case& c, const Options& options, const std::string& what,
                   double bound = 6e-3) {
  const Result result = run(c, options);
  const Problem& p = c.inputs.problem;
  Errors worst;
  int64_t not_zero = 0;
  for (int64_t n = 0; n < p.num_sequences; ++n)
    for (int64_t head = 0; head < p.num_value_heads; ++head) {
      const Errors errors = compare(c, options, result, n, head, &not_zero);
      for (const auto& member : {&Errors::h, &Errors::errors, &Errors::dh, &Errors::dz, &Errors::dv,
                                 &Errors::d_initial}) {
        const Error& error = errors.*member;
        EXPECT_LE(error.relative(), bound) << what << ", sequence " << n << ", head " << head;
        (worst.*member).difference += error.difference;
        (worst.*member).norm += error.norm;
      }
    }
  EXPECT_EQ(not_zero, 0) << what << ": rows past the end, columns past K and V";
  if (std::getenv("KDA_TEST_VERBOSE"))
    std::printf("  %-32s h %.2e E %.2e dh %.2e dz %.2e dv %.2e d_initial %.2e\n", what.c_str(),
                worst.h.relative(), worst.errors.relative(), worst.dh.relative(),
                worst.dz.relative(), worst.dv.relative(), worst.d_initial.relative());
  return result;
}

// ---- tests
// ---------------------------------------------------------------------------------------

TEST_P(Reverse, EveryRegime) {
  for (int i = 0; i < check::kNumRegimes; ++i) {
    const auto regime = static_cast<Regime>(i);
    // Equal keys: T' has large terms that cancel, and its rounding stays.
    const double bound = regime == Regime::kEqualKeys ? 0.1 : 6e-3;
    expect_true(Case(case_of({test::long_case(800)}, 128, 64, regime)), {.final_loss = false},
                check::regime_name(regime), bound);
  }
}

TEST_P(Reverse, GatesOfMinusInfinity) {
  Case c(case_of({150}, 64, 64, Regime::kLog));
  for (int64_t i = 0; i < 150 * 64; ++i)
    if (i / 64 % 40 == 20 || i % 7 == 0)
      store_element(c.inputs.g.data(), c.inputs.problem.g.dtype, i,
                    -std::numeric_limits<float>::infinity());
  expect_true(c, {}, "gates of -inf");
}

TEST_P(Reverse, LengthsHeadsAndSizes) {
  for (const auto& [K, V] : {std::pair{32, 24}, std::pair{64, 128}, std::pair{128, 72}})
    expect_true(Case(case_of({1, 0, 16, 63, 64, 65, 0}, K, V, Regime::kTrained, 2)), {},
                "packed, K " + std::to_string(K) + " V " + std::to_string(V));
}

TEST_P(Reverse, WidthAndLaunchesChangeNoBit) {
  for (const auto& [K, V] : {std::pair{64, 24}, std::pair{128, 104}}) {
    const Case c(case_of({70}, K, V));
    const Result whole = expect_true(c, {}, "wide, one launch");
    EXPECT_TRUE(whole == run(c, {.narrow = true, .one_launch = false})) << K << " " << V;
  }
}

TEST_P(Reverse, TypesLayoutsAndGaps) {
  check::GenerateOptions rows = test::shape16(70, 1, 40, 24);
  rows.batch = 2;
  rows.num_value_heads = 2;
  Case c(rows);
  c.has_state = {0, 1};
  const Result plain = expect_true(c, {}, "two rows");
  const Result vk = expect_true(c, {.vk = true}, "vk");
  EXPECT_TRUE(test::same_bits(plain.dv, vk.dv));
  // The gradients of d_final are of bf16 values, so its type is of no concern to dv.
  const Result bf16 = expect_true(c, {.state = DType::kBFloat16}, "states in bf16");
  EXPECT_TRUE(test::same_bits(plain.dv, bf16.dv));
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16})
    for (const int64_t gap : {0, 1, 2}) {
      const Options options{.dv = dtype, .gap = gap};
      const Result result = expect_true(c, options, std::string("dv ") + dtype_name(dtype));
      EXPECT_TRUE(test::same_bits(plain.dz, result.dz));
      // What is not a gradient is still 0xff.
      const auto element = size(dtype_size(dtype));
      for (int64_t row = 0; row < 2 * 70 * 2; ++row)
        for (std::size_t i = 0; i < size(gap) * element; ++i)
          ASSERT_EQ(
              std::to_integer<int>(result.dv.data()[size(row * (24 + gap) + 24) * element + i]),
              0xff);
    }
}

TEST_P(Reverse, GradientsThatAreNotThere) {
  Case c(case_of({100, 0, 3}, 64, 64));
  expect_true(c, {.final_loss = false}, "no d_final");
  expect_true(c, {.loss = false}, "no d_o");
  const Result all = run(c), parts = run(c, {.wanted = false});
  EXPECT_TRUE(test::same_bits(all.dh, parts.dh));
  EXPECT_TRUE(test::same_bits(all.dz, parts.dz));
  for (const io::Buffer* buffer : {&parts.dv, &parts.d_initial})
    for (std::size_t i = 0; i < buffer->size(); ++i)
      ASSERT_EQ(std::to_integer<int>(buffer->data()[i]), 0xff);
  const Result none = expect_true(c, {.loss = false, .final_loss = false}, "neither");
  for (int64_t i = 0; i < 103 * 64; ++i)
    ASSERT_EQ(load_element(none.dv.data(), DType::kFloat32, i), 0);
}

/// Tokens that no loss sees have gradients of exactly zero.
TEST_P(Reverse, ZerosBehindTheLoss) {
  constexpr int64_t kTokens = 140, V = 64;
  for (const int64_t last : {0, 37, 64, 100}) {
    Case c(case_of({kTokens}, 64, V));
    for (std::size_t i = size((last + 1) * V); i < c.d_o.size(); ++i) c.d_o[i] = 0;
    const Result result = expect_true(c, {.final_loss = false}, "loss ends");
    for (int64_t i = last + 1; i < kTokens; ++i)
      for (int64_t v = 0; v < V; ++v) {
        ASSERT_EQ(load_element(result.dv.data(), DType::kFloat32, i * V + v), 0) << last;
        ASSERT_EQ(tile_element(result.dz, i / 64, 64 * 64, i % 64, v), 0) << last;
      }
    for (int64_t chunk = last / 64; chunk < 3; ++chunk)
      for (int64_t v = 0; v < V; ++v)
        for (int64_t k = 0; k < 64; ++k)
          ASSERT_EQ(tile_element(result.dh, chunk, 64 * 64, v, k), 0) << last;
  }
}

TEST_P(Reverse, NaNStaysInItsSequenceAndHead) {
  constexpr int64_t V = 24, HV = 2;
  const Case clean(case_of({70, 65, 3}, 32, V, Regime::kTrained, HV));
  Case c = clean;
  for (const double poison :
       {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    c.d_o[size((100 * HV + 1) * V + 5)] = poison;  // sequence 1, head 1
    c.d_final[size((1 * HV + 1) * 32 * V)] = poison;
    const Result result = run(c), expected = run(clean);
    const std::size_t bytes = V * 4;
    for (int64_t row = 0; row < 138 * HV; ++row) {
      if (row / HV >= 70 && row / HV < 135 && row % HV == 1) continue;
      const std::size_t at = size(row) * bytes;
      ASSERT_EQ(std::memcmp(result.dv.data() + at, expected.dv.data() + at, bytes), 0) << row;
    }
    EXPECT_FALSE(std::isfinite(
        load_element(result.dv.data(), DType::kFloat32, row_at(c.inputs.problem, 0, 99, 1) + 5)));
    const auto states_are_same = [&](int64_t n, int64_t head) {
      const std::size_t state = 32 * bytes, at = size(n * HV + head) * state;
      return std::memcmp(result.d_initial.data() + at, expected.d_initial.data() + at, state) == 0;
    };
    for (int64_t n = 0; n < 3; ++n)
      for (int64_t head = 0; head < HV; ++head)
        EXPECT_EQ(states_are_same(n, head), n != 1 || head != 1) << n << " " << head;
  }
}

/// Largest difference of two buffers and the root mean square of the first.
void expect_close(const io::Buffer& a, const io::Buffer& b, DType dtype, const char* what) {
  double worst = 0, sum = 0;
  const auto count = static_cast<int64_t>(a.size()) / dtype_size(dtype);
  for (int64_t i = 0; i < count; ++i) {
    const double x = load_element(a.data(), dtype, i), y = load_element(b.data(), dtype, i);
    ASSERT_TRUE(std::isfinite(x) && std::isfinite(y)) << what << " " << i;
    worst = std::max(worst, std::abs(x - y));
    sum += x * x;
  }
  EXPECT_LE(worst, 0.02 * std::sqrt(sum / static_cast<double>(count))) << what;
}

/// Element by element: the forms differ in the order of sums alone.
TEST_P(Reverse, IsThatOfMmaSync) {
  if (form == Form::kMmaSync) GTEST_SKIP() << "the run of the other form compares both";
  if (!has(Form::kMmaSync)) GTEST_SKIP() << "a GPU has one of the two forms";
  for (const auto& [K, V] : {std::pair{64, 72}, std::pair{128, 64}}) {
    const Case c(case_of({150, 64}, K, V, Regime::kMixed));
    const Result wgmma = run(c);
    form = Form::kMmaSync;
    const Result mma = run(c);
    form = GetParam();
    expect_close(mma.h, wgmma.h, DType::kBFloat16, "h");
    expect_close(mma.errors, wgmma.errors, DType::kBFloat16, "E");
    expect_close(mma.dh, wgmma.dh, DType::kBFloat16, "dh");
    expect_close(mma.dz, wgmma.dz, DType::kBFloat16, "dZ");
    expect_close(mma.dv, wgmma.dv, DType::kFloat32, "dv");
    expect_close(mma.d_initial, wgmma.d_initial, DType::kFloat32, "d_initial");
  }
}

INSTANTIATE_TEST_SUITE_P(Chains, Reverse, ::testing::Values(Form::kMmaSync, Form::kWgmma),
                         [](const auto& of) {
                           return of.param == Form::kMmaSync ? "MmaSync" : "Wgmma";
                         });

TEST(ReverseArguments, ErrorsHaveALaunchOfTheirOwn) {
  const Status status =
      cuda::launch_chunk_delta_h({}, cuda::ChainUse::kErrors, /*fp16=*/false, false, {});
  EXPECT_TRUE(status.code() == StatusCode::kInternal || status.code() == StatusCode::kUnavailable)
      << status.message();  // the latter in a build for Hopper alone
}

}  // namespace
}  // namespace kda

#endif  // KDA_WITH_CUDA
