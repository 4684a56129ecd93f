// SPDX-License-Identifier: Apache-2.0
// XLA's FFI handlers over kda.h: forward, decode, prefill of a pool, and gradients, on the CPU and
// on CUDA. libkda/jax.py is their only caller. It has looked at shapes and types; what depends on
// values is refused here.
//
// Under vmap every argument has the same number of dimensions in front, each of the size of its
// batch or 1; results have all of them in full. A call whose entries are independent is folded into
// one batch. Other entries (with an A_log of their own, packed sequences, a pool, a gradient that
// is summed over tokens) are a call each.
#include <array>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kda/kda.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace libkda {

// The attributes of a call, by the same names as in jax.py.
struct Options {
  int64_t call;   // of CallKind
  int64_t given;  // bit i: argument i is there
  int64_t gate_mode, beta_mode, state_layout, first_slot;
  double lower_bound, scale;
  bool has_scale, qk_l2norm;
  int64_t context_parallel, num_segments;  // of the plan
  bool batch_invariant;
};

}  // namespace libkda

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    libkda::Options, StructMember<int64_t>("call"), StructMember<int64_t>("given"),
    StructMember<int64_t>("gate_mode"), StructMember<int64_t>("beta_mode"),
    StructMember<int64_t>("state_layout"), StructMember<int64_t>("first_slot"),
    StructMember<double>("lower_bound"), StructMember<double>("scale"),
    StructMember<bool>("has_scale"), StructMember<bool>("qk_l2norm"),
    StructMember<int64_t>("context_parallel"), StructMember<int64_t>("num_segments"),
    StructMember<bool>("batch_invariant"));

namespace libkda {
namespace {

enum CallKind { kForward, kDecode, kPrefill };

// The arguments in their order, and the dimensions of each. The first eight have gradients.
enum Name {
  kQ,
  kK,
  kV,
  kG,
  kBeta,
  kALog,
  kDtBias,
  kState,
  kHasState,
  kIndices,
  kCuSeqlens,
  kNames
};
constexpr std::array<std::size_t, kNames> kRanks = {4, 4, 4, 4, 3, 1, 2, 4, 1, 1, 1};
constexpr int kGradients = 8;

struct Refusal {
  ffi::ErrorCode code;
  std::string text;
};

void check(kda_status status) {
  if (status == KDA_OK) return;
  const bool argument = status == KDA_INVALID_ARGUMENT || status == KDA_UNSUPPORTED;
  throw Refusal{status == KDA_OUT_OF_MEMORY ? ffi::ErrorCode::kResourceExhausted
                : argument                  ? ffi::ErrorCode::kInvalidArgument
                                            : ffi::ErrorCode::kInternal,
                kda_last_error()};
}

// The text of a refusal with its first word, an argument, as jax.py calls it.
std::string in_words_of(int64_t call, const std::string& text) {
  static constexpr std::pair<std::string_view, const char*> kWords[] = {
      {"initial_state_mask", "has_state"},
      {"initial_state_indices", "indices"},
      {"final_state_indices", "indices"},
      {"initial_state", "state"},
      {"final_state", "state"}};
  const std::string_view first = std::string_view(text).substr(0, text.find_first_of(": "));
  for (const auto& [theirs, ours] : kWords)
    if (first == theirs && (call != kForward || theirs == "initial_state_mask"))
      return ours + text.substr(first.size());
  return text;
}

// Runs `body`; what it throws becomes an error of XLA.
template <class Body>
ffi::Error guarded(const Options& options, Body&& body) {
  try {
    body();
    return ffi::Error::Success();
  } catch (const Refusal& refusal) {
    return {refusal.code, in_words_of(options.call, refusal.text)};
  } catch (const std::bad_alloc&) {
    return {ffi::ErrorCode::kResourceExhausted, "libkda: out of memory"};
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
}

using Shape = std::vector<int64_t>;

int64_t size_of(const Shape& shape) {
  int64_t size = 1;
  for (int64_t n : shape) size *= n;
  return size;
}

// Memory of an argument or a result: the dimensions of vmap, and those of a call.
struct Buffer {
  char* data = nullptr;  // null: not given
  ffi::DataType type = ffi::DataType::F32;
  Shape batch, shape;

  Buffer() = default;
  Buffer(ffi::AnyBuffer from, std::size_t rank)
      : data(static_cast<char*>(from.untyped_data())), type(from.element_type()), given_(true) {
    const auto sizes = from.dimensions();
    if (sizes.size() < rank)
      throw Refusal{ffi::ErrorCode::kInternal, "libkda: a buffer has too few dimensions"};
    batch.assign(sizes.begin(), sizes.end() - static_cast<std::ptrdiff_t>(rank));
    shape.assign(sizes.end() - static_cast<std::ptrdiff_t>(rank), sizes.end());
  }
  bool given() const { return given_; }  // one without elements may have no memory
  int64_t bytes() const { return size_of(shape) * static_cast<int64_t>(ffi::ByteWidth(type)); }
  kda_dtype dtype() const {
    switch (type) {
      case ffi::DataType::F32: return KDA_FP32;
      case ffi::DataType::BF16: return KDA_BF16;
      case ffi::DataType::F16: return KDA_FP16;
      case ffi::DataType::S32: return KDA_INT32;
      case ffi::DataType::S64: return KDA_INT64;
      default:
        throw Refusal{ffi::ErrorCode::kInternal, "libkda: a buffer has a type that is not served"};
    }
  }

 private:
  bool given_ = false;
};

// Memory that a thread keeps on the CPU: as much as the largest call has needed.
class KeptMemory {
 public:
  KeptMemory() = default;
  KeptMemory(const KeptMemory&) = delete;
  KeptMemory& operator=(const KeptMemory&) = delete;
  ~KeptMemory() { std::free(start_); }
  void* at_least(std::size_t bytes) {
    if (bytes_ >= bytes) return start_;
    std::free(start_);
    bytes_ = (bytes + 63) / 64 * 64;
    start_ = std::aligned_alloc(64, bytes_);
    if (!start_) bytes_ = 0;
    return start_;
  }

 private:
  void* start_ = nullptr;
  std::size_t bytes_ = 0;
};

// Where a call runs. XLA's scratch memory serves CUDA alone.
struct Device {
  ffi::ScratchAllocator* scratch = nullptr;
  void* stream = nullptr;
  int32_t ordinal = -1;  // of CUDA; below 0: the CPU

  bool on_cpu() const { return ordinal < 0; }
  kda_plan_options plan_options(const Options& of_call) const {
    kda_plan_options options;
    kda_plan_options_init(&options);
    options.context_parallel = static_cast<int32_t>(of_call.context_parallel);
    options.num_segments = of_call.num_segments;
    if (!on_cpu()) check(kda_plan_options_cuda(&options, ordinal));
    return options;
  }
  void* workspace(std::size_t bytes) const {
    if (bytes == 0) return nullptr;
    thread_local KeptMemory kept;
    void* memory = on_cpu() ? kept.at_least(bytes) : of_xla(bytes);
    if (!memory)
      throw Refusal{ffi::ErrorCode::kResourceExhausted,
                    "workspace: " + std::to_string(bytes) + " bytes cannot be allocated"};
    return memory;
  }

 private:
  /// XLA aligns to 16 at most, a workspace wants 64.
  void* of_xla(std::size_t bytes) const {
    constexpr std::size_t kAlignment = 64, kOfXla = 16;
    std::size_t space = bytes + kAlignment - kOfXla;
    void* memory = scratch->Allocate(space, kOfXla).value_or(nullptr);
    return memory ? std::align(kAlignment, bytes, memory, space) : nullptr;
  }
};

struct Deleter {
  void operator()(kda_plan* plan) const { kda_plan_destroy(plan); }
  void operator()(kda_backward_plan* plan) const { kda_backward_plan_destroy(plan); }
};
using Plan = std::unique_ptr<kda_plan, Deleter>;
using BackwardPlan = std::unique_ptr<kda_backward_plan, Deleter>;

kda_plan_cache* plans() {
  static kda_plan_cache* const cache = [] {
    kda_plan_cache* made = nullptr;
    check(kda_plan_cache_create(0, &made));
    return made;
  }();
  return cache;
}

// The inputs of a call, and what its entries make of them.
class Call {
 public:
  Call(const Device& device, const Options& options, const ffi::RemainingArgs& arguments)
      : device_(device), options_(options), plan_options_(device.plan_options(options)) {
    for (int name = 0; name < kNames; ++name)
      if (options.given >> name & 1) inputs_[name] = next(arguments, kRanks[name]);
    batch_.assign(inputs_[kQ].batch.size(), 1);
    for (const Buffer& x : inputs_)
      for (std::size_t d = 0; x.given() && d < batch_.size(); ++d)
        if (x.batch[d] != 1) batch_[d] = x.batch[d];
    entries_ = size_of(batch_);
  }

  /// The next argument that has not been read.
  Buffer next(const ffi::RemainingArgs& arguments, std::size_t rank) {
    const auto found = arguments.get<ffi::AnyBuffer>(read_++);
    if (!found.has_value()) throw Refusal{ffi::ErrorCode::kInternal, found.error().message()};
    return {*found, rank};
  }

  /// Calls body(entry) for every entry of the batch, or once for all of them. `sums`: results of
  /// parameters are sums over what is folded.
  template <class Body>
  void each(bool sums, Body&& body) {
    const bool fold = entries_ > 1 && folds(sums);
    folded_ = fold ? entries_ : 1;
    for (int64_t entry = 0; entry < (fold ? 1 : entries_); ++entry) body(entry);
  }

  kda_problem problem(int64_t entry) const {
    kda_problem p;
    kda_problem_init(&p);
    const Shape &q = inputs_[kQ].shape, &v = inputs_[kV].shape;
    p.batch = p.num_sequences = q[0] * folded_;
    p.num_tokens = q[1], p.num_heads = q[2], p.key_dim = q[3];
    p.num_value_heads = v[2], p.value_dim = v[3];
    p.gate_mode = static_cast<int32_t>(options_.gate_mode);
    p.beta_mode = static_cast<int32_t>(options_.beta_mode);
    p.state_layout = static_cast<int32_t>(options_.state_layout);
    p.lower_bound = options_.lower_bound, p.scale = options_.scale;
    p.has_scale = options_.has_scale, p.qk_l2norm = options_.qk_l2norm;
    p.batch_invariant = options_.batch_invariant;
    p.stream = device_.stream;
    kda_tensor* const tensors[] = {&p.q, &p.k, &p.v, &p.g, &p.beta, &p.A_log, &p.dt_bias};
    for (int name = kQ; name <= kDtBias; ++name)
      if (inputs_[name].given()) *tensors[name] = tensor(inputs_[name], entry);
    describe_gates(&p.g, inputs_[kG]);
    describe_bias(&p.dt_bias, inputs_[kDtBias]);
    if (const Buffer& ends = inputs_[kCuSeqlens]; ends.given()) {
      p.num_sequences = ends.shape[0] - 1;
      p.has_cu_seqlens = 1, p.cu_seqlens_dtype = ends.dtype();
      p.cu_seqlens = at(ends, entry);
    }
    if (inputs_[kHasState].given()) {
      p.initial_state_mask = reinterpret_cast<const uint8_t*>(at(inputs_[kHasState], entry));
      p.has_initial_state_mask = 1;
    }
    if (inputs_[kState].given()) p.initial_state = states(inputs_[kState], entry);
    p.first_slot = options_.first_slot;
    return p;
  }

  /// A result, or an argument, of an entry.
  kda_tensor tensor(const Buffer& x, int64_t entry) const {
    Shape shape = x.shape;
    if (size_of(x.batch) != 1) shape[0] *= folded_;
    kda_tensor made;
    check(kda_tensor_contiguous(&made, at(x, entry), x.dtype(), static_cast<int32_t>(shape.size()),
                                shape.data()));
    return made;
  }
  /// One gate a head is [.., HV, 1] in memory, and read for every channel.
  void describe_gates(kda_tensor* g, const Buffer& x) const {
    if (x.shape[3] == 1) g->strides[3] = inputs_[kQ].shape[3] == 1 ? 1 : 0;
  }
  /// The same of one bias a head, [HV, 1].
  void describe_bias(kda_tensor* dt_bias, const Buffer& x) const {
    if (x.given() && x.shape[1] == 1) dt_bias->strides[1] = inputs_[kQ].shape[3] == 1 ? 1 : 0;
  }
  kda_state states(const Buffer& x, int64_t entry) const {
    kda_state made = {};
    made.tensor = tensor(x, entry);
    made.num_slots = x.shape[0] * folded_, made.present = 1;
    if (const Buffer& indices = inputs_[kIndices]; indices.given()) {
      made.indices = reinterpret_cast<const int32_t*>(at(indices, entry));
      made.indexed = 1;
    }
    return made;
  }

  /// On the CPU the lengths of the sequences are the plan's; those on a device are not looked at.
  Plan plan(const kda_problem& p) const {
    std::vector<int64_t> ends;
    if (p.has_cu_seqlens && device_.on_cpu())
      for (int64_t n = 0; n <= p.num_sequences; ++n)
        ends.push_back(p.cu_seqlens_dtype == KDA_INT64
                           ? static_cast<const int64_t*>(p.cu_seqlens)[n]
                           : static_cast<const int32_t*>(p.cu_seqlens)[n]);
    kda_plan* made = nullptr;
    check(kda_plan_cache_find(plans(), &p, ends.empty() ? nullptr : ends.data(), &plan_options_,
                              &made));
    return Plan(made);
  }
  const kda_plan_options& plan_options() const { return plan_options_; }
  const Buffer& input(Name name) const { return inputs_[name]; }

 private:
  bool folds(bool sums) const {
    if (inputs_[kCuSeqlens].given() || inputs_[kIndices].given()) return false;
    for (Name name : {kALog, kDtBias})
      if (inputs_[name].given() && (sums || size_of(inputs_[name].batch) != 1)) return false;
    for (Name name : {kQ, kK, kV, kG, kBeta, kState, kHasState})
      if (inputs_[name].given() && inputs_[name].batch != batch_) return false;
    return true;
  }

  /// The memory of an entry: entries are counted over the whole batch, row-major.
  char* at(const Buffer& x, int64_t entry) const {
    int64_t index = 0, step = 1;
    for (std::size_t d = batch_.size(); d-- > 0; entry /= batch_[d])
      if (x.batch[d] != 1) {
        index += entry % batch_[d] * step;
        step *= x.batch[d];
      }
    return x.data + index * x.bytes();
  }

  const Device& device_;
  const Options& options_;
  const kda_plan_options plan_options_;
  std::array<Buffer, kNames> inputs_;
  std::size_t read_ = 0;
  Shape batch_;
  int64_t entries_ = 1, folded_ = 1;
};

Buffer result(const ffi::RemainingRets& results, std::size_t index, std::size_t rank) {
  auto found = results.get<ffi::AnyBuffer>(index);
  if (!found.has_value()) throw Refusal{ffi::ErrorCode::kInternal, found.error().message()};
  return {**found, rank};
}

// o and the states: final ones, or the buffer of the argument `state`, which XLA has made the same
// memory.
ffi::Error run(const Device& device, ffi::RemainingArgs arguments, ffi::RemainingRets results,
               Options options) {
  return guarded(options, [&] {
    Call call(device, options, arguments);
    const Buffer o = result(results, 0, 4), states = result(results, 1, 4);
    if (options.call != kForward && states.data != call.input(kState).data)
      throw Refusal{ffi::ErrorCode::kInternal,
                    "libkda: the state is not where XLA was asked to have it"};
    call.each(false, [&](int64_t entry) {
      kda_problem p = call.problem(entry);
      p.o = call.tensor(o, entry);
      if (options.call == kDecode)
        p.operation = KDA_DECODE, p.zero_skipped = 1;
      else
        p.final_state = call.states(states, entry);
      const Plan plan = call.plan(p);
      const std::size_t bytes = kda_plan_workspace_bytes(plan.get());
      check(kda_run(plan.get(), &p, device.workspace(bytes), bytes));
    });
  });
}

// The gradients of those of the first eight arguments that are given. Two more arguments: d_o and
// d_final_state.
ffi::Error run_backward(const Device& device, ffi::RemainingArgs arguments,
                        ffi::RemainingRets results, Options options) {
  return guarded(options, [&] {
    Call call(device, options, arguments);
    const Buffer d_o = call.next(arguments, 4), d_final_state = call.next(arguments, 4);
    std::array<Buffer, kGradients> found;
    std::size_t count = 0;
    for (int name = 0; name < kGradients; ++name)
      if (call.input(static_cast<Name>(name)).given())
        found[name] = result(results, count++, kRanks[name]);
    call.each(true, [&](int64_t entry) {
      kda_problem p = call.problem(entry);
      p.o = p.v;  // of its shape and type, and not looked at
      kda_gradients gradients = {};
      gradients.struct_size = sizeof(gradients);
      gradients.d_o = call.tensor(d_o, entry);
      gradients.d_final_state = call.tensor(d_final_state, entry);
      kda_tensor* const tensors[kGradients] = {
          &gradients.dq,    &gradients.dk,     &gradients.dv,       &gradients.dg,
          &gradients.dbeta, &gradients.dA_log, &gradients.ddt_bias, &gradients.d_initial_state};
      for (int name = 0; name < kGradients; ++name)
        if (found[name].given()) *tensors[name] = call.tensor(found[name], entry);
      call.describe_gates(&gradients.dg, found[kG]);
      call.describe_bias(&gradients.ddt_bias, found[kDtBias]);
      const Plan forward = call.plan(p);
      kda_backward_plan* made = nullptr;
      check(kda_backward_plan_create(forward.get(), &gradients, &call.plan_options(), &made));
      const BackwardPlan plan(made);
      const std::size_t bytes = kda_backward_plan_workspace_bytes(plan.get());
      check(kda_backward(plan.get(), &p, &gradients, device.workspace(bytes), bytes));
    });
  });
}

auto on_the_cpu(decltype(run)* body) {
  return [body](ffi::RemainingArgs arguments, ffi::RemainingRets results, Options options) {
    return body({}, arguments, results, options);
  };
}

// A stream is a pointer here, so no header of CUDA is needed. The calls are not marked as fit for
// command buffers: these would replay them after the workspace has gone back to XLA.
auto on_cuda(decltype(run)* body) {
  return [body](ffi::ScratchAllocator scratch, void* stream, int32_t ordinal,
                ffi::RemainingArgs arguments, ffi::RemainingRets results, Options options) {
    return body({&scratch, stream, ordinal}, arguments, results, options);
  };
}

auto bind() { return ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs<Options>(); }
auto bind_cuda() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ScratchAllocator>()
      .Ctx<ffi::PlatformStream<void*>>()
      .Ctx<ffi::DeviceOrdinal>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs<Options>();
}

}  // namespace
}  // namespace libkda

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(kda_jax_run_cpu, libkda::on_the_cpu(libkda::run), libkda::bind());
XLA_FFI_DEFINE_HANDLER_SYMBOL(kda_jax_backward_cpu, libkda::on_the_cpu(libkda::run_backward),
                              libkda::bind());
XLA_FFI_DEFINE_HANDLER_SYMBOL(kda_jax_run_cuda, libkda::on_cuda(libkda::run), libkda::bind_cuda());
XLA_FFI_DEFINE_HANDLER_SYMBOL(kda_jax_backward_cuda, libkda::on_cuda(libkda::run_backward),
                              libkda::bind_cuda());
#pragma GCC visibility pop
