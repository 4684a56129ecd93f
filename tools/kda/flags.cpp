// SPDX-License-Identifier: Apache-2.0
#include "tools/kda/flags.hpp"

#include <CLI/CLI.hpp>
#include <algorithm>

#include "check/numbers.hpp"
#include "core/text.hpp"
#include "tools/kda/options.hpp"

namespace kda::tools {
namespace {

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw Error(invalid(parts...));
}

constexpr int64_t kMaxTokens = (int64_t{1} << 31) - 1;
constexpr int64_t kMaxSequences = int64_t{1} << 24;
constexpr int64_t kMaxSegments = int64_t{1} << 20;

/// A whole number in 0..high; else `high` + 1.
int64_t parse_up_to(int64_t high, const std::string& text) {
  int64_t value = 0;
  return check::parse_whole(text, &value) && value >= 0 && value <= high ? value : high + 1;
}

/// "64K" -> 65536; above kMaxTokens: not a length.
int64_t parse_length(std::string text) {
  const bool kilo = !text.empty() && (text.back() == 'K' || text.back() == 'k');
  if (kilo) text.pop_back();
  return parse_up_to(kMaxTokens, text) * (kilo ? 1024 : 1);
}

std::vector<std::string> regime_names() {
  std::vector<std::string> names;
  names.reserve(check::kNumRegimes);
  for (int i = 0; i < check::kNumRegimes; ++i)
    names.emplace_back(check::regime_name(static_cast<check::Regime>(i)));
  return names;
}

}  // namespace

void parse_context_parallel(const std::string& text, PlanOptions* options) {
  if (text == "auto") {
    options->context_parallel = SegmentPolicy::kAuto;
  } else if (text == "off") {
    options->context_parallel = SegmentPolicy::kOff;
  } else if (text == "flashkda") {
    options->context_parallel = SegmentPolicy::kFlashKda;
  } else if (text == "cula") {
    options->context_parallel = SegmentPolicy::kCula;
  } else {
    const int64_t count = parse_up_to(kMaxSegments, text);
    if (count < 1 || count > kMaxSegments)
      fail("--context-parallel: '", text, "' is not auto, off, flashkda, cula or a number in 1..",
           kMaxSegments);
    options->context_parallel = SegmentPolicy::kFixed;
    options->num_segments = count;
  }
}

std::vector<int64_t> parse_lengths(const std::string& text) {
  std::vector<int64_t> lengths;
  int64_t total = 0;
  std::size_t at = 0;
  while (at <= text.size()) {
    const std::size_t comma = std::min(text.find(',', at), text.size());
    const std::string item = text.substr(at, comma - at);
    const std::size_t times = item.find('x');
    const int64_t count =
        times == std::string::npos ? 1 : parse_up_to(kMaxSequences, item.substr(0, times));
    const int64_t length = parse_length(times == std::string::npos ? item : item.substr(times + 1));
    if (count < 1 || count > kMaxSequences || length > kMaxTokens)
      fail("--seq-lens: '", text, "': '", item, "' is not a length like 1000 or 64K, nor times a ",
           "length like 10x1K (up to ", kMaxTokens, " tokens)");
    total += count * length;
    if (total > kMaxTokens) fail("--seq-lens: '", text, "' has more than ", kMaxTokens, " tokens");
    if (static_cast<int64_t>(lengths.size()) + count > kMaxSequences)
      fail("--seq-lens: '", text, "' has more than ", kMaxSequences, " sequences");
    lengths.insert(lengths.end(), static_cast<std::size_t>(count), length);
    at = comma + 1;
  }
  return lengths;
}

CLI::Option* add_context_parallel(CLI::App& command, std::string* target) {
  const auto read = [=](const std::string& text) {
    PlanOptions unused;
    parse_context_parallel(text, &unused);
    *target = text;
    return std::string();
  };
  return add_value(command, "--context-parallel", "WORD", read,
                   "Cut long sequences: auto, off, flashkda, cula, or segments a sequence")
      ->default_str(*target);
}

CLI::Option* add_seq_lens(CLI::App& command, std::vector<int64_t>* target) {
  const auto read = [=](const std::string& text) {
    *target = parse_lengths(text);
    return std::string();
  };
  return add_value(command, "--seq-lens", "LENGTHS", read,
                   "Lengths of packed sequences: 1000,64K,10x1K");
}

void check_multiple(const char* name, int64_t value_heads, int64_t heads) {
  if (value_heads % heads != 0)
    fail(name, ": ", value_heads, " value heads are no multiple of --heads ", heads);
}

void ScheduleFlags::add_to(CLI::App& command) {
  add_choice(command, "--device", &device, {"auto", "cpu", "cuda"}, "Where to run")
      ->default_str(device);
  add_options_to(command);
}

void ScheduleFlags::add_options_to(CLI::App& command) {
  add_text(command, "--backend", &backend,
           "Implementation by name or part of it (see kda info), e.g. oracle, avx2");
  add_context_parallel(command, &context_parallel);
  add_choice(command, "--segment-method", &segment_method, {"scan-merge-forward", "one-pass"},
             "How segments are joined, both exact")
      ->default_str(segment_method);
  add_choice(command, "--intra-form", &intra_form, {"auto", "tensor", "token"},
             "Diagonal blocks of a chunk on CUDA by tensor cores or token by token, both exact")
      ->default_str(intra_form);
  add_switch(command, "--batch-invariant", &batch_invariant,
             "A sequence's bits do not depend on the batch it is in");
  add_threads(command, &num_threads);
}

CLI::Option* add_threads(CLI::App& command, int32_t* target) {
  return add_whole<int32_t>(command, "--threads", target, 0, 1024,
                            "CPU threads (0: OMP_NUM_THREADS, else the cores of this process)")
      ->default_str(cat(*target));
}

DeviceFacts ScheduleFlags::device_facts() const {
  DeviceFacts facts = cpu_facts();
  if (device == "cuda") {
    const Status status = cuda_device_facts(0, &facts);
    if (!status.ok()) throw Error(Status(status.code(), cat("device: ", status.message())));
  } else if (device == "auto" && cuda_device_count() > 0) {
    // A backend asked for by name says where.
    DeviceFacts cuda;
    throw_if_error(cuda_device_facts(0, &cuda));
    if (backend.empty() || has_backend(DeviceKind::kCuda)) facts = cuda;
  }
  return facts;
}

bool ScheduleFlags::has_backend(DeviceKind kind) const {
  for (const Candidate& row : implementations())
    if (row.name.rfind(device_kind_name(kind), 0) == 0 &&
        row.name.find(backend) != std::string::npos)
      return true;
  return false;
}

PlanOptions ScheduleFlags::plan_options() const {
  PlanOptions options;
  parse_context_parallel(context_parallel, &options);
  options.segment_method =
      segment_method == "one-pass" ? SegmentMethod::kOnePass : SegmentMethod::kScanMergeForward;
  options.intra_form = intra_form == "token"    ? IntraForm::kToken
                       : intra_form == "tensor" ? IntraForm::kTensor
                                                : IntraForm::kAuto;
  options.backend = backend;
  options.num_threads = num_threads;
  return options;
}

void OperationFlags::add_to(CLI::App& command) {
  command_ = &command;
  add_choice(command, "--gate", &gate, {"log", "softplus", "bounded"},
             "How g becomes the log decay");
  add_real(command, "--lower-bound", &lower_bound, /*negative=*/true,
           "Of the bounded gate, below 0");
  add_choice(command, "--beta", &beta, {"plain", "sigmoid", "sigmoid2"},
             "How beta becomes the step size");
  auto* norm = add_switch(command, "--qk-l2norm", &qk_l2norm, "Normalise q and k");
  add_switch(command, "--no-qk-l2norm", &no_qk_l2norm, "Do not normalise q and k")->excludes(norm);
  add_real(command, "--scale", &scale, /*negative=*/false, "Of the outputs (default K^-1/2)");
  add_choice(command, "--state-layout", &state_layout, {"kv", "vk"}, "Memory order of states");
  add_switch(command, "--head-gates", &head_gates,
             "One gate a head (Gated DeltaNet); a g [B, T, HV, K] has equal channels");
  add_head_map(command, &head_map);
  add_choice(command, "--out-dtype", &out_dtype, kFloatTypes,
             "Type of o (default that of v), or of gradients (default each that of its input)");
}

check::Overrides OperationFlags::overrides() const {
  const auto given = [&](const char* flag) { return command_->count(flag) > 0; };
  check::Overrides overrides;
  if (given("--gate")) overrides.gate = gate;
  if (given("--beta")) overrides.beta = beta;
  if (given("--state-layout")) overrides.state_layout = state_layout;
  if (given("--head-map")) overrides.head_map = head_map;
  overrides.head_gates = head_gates;
  if (given("--lower-bound")) overrides.lower_bound = lower_bound;
  if (given("--scale")) overrides.scale = scale;
  if (given("--qk-l2norm")) overrides.qk_l2norm = qk_l2norm;
  if (given("--no-qk-l2norm")) overrides.qk_l2norm = !no_qk_l2norm;
  return overrides;
}

DType OperationFlags::output_dtype(const Problem& problem) const {
  return out_dtype.empty() ? problem.v.dtype : check::parse_dtype(out_dtype);
}

void RunFlags::add_to(CLI::App& command) {
  add_path(command, "input", &input,
           "Input tensors q k v g beta .. (safetensors, docs/files.md); - is the standard input")
      ->required();
  operation.add_to(command);
  schedule.add_to(command);
}

check::Inputs RunFlags::load(check::GradientBuffers* gradients) const {
  std::vector<std::string> names = {
      "q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens"};
  if (gradients) names.insert(names.end(), {"do", "d_final_state"});
  const io::SafetensorsFile file = io::read_safetensors(input, names);
  check::Inputs inputs = check::inputs_from_file(file, operation.overrides());
  if (gradients) {
    std::optional<DType> type;
    if (!operation.out_dtype.empty()) type = check::parse_dtype(operation.out_dtype);
    *gradients = check::gradients_from_file(file, inputs, type);
  }
  inputs.problem.batch_invariant = schedule.batch_invariant;
  check::want_final_state(&inputs.problem);
  return inputs;
}

void GenerateFlags::add_to(CLI::App& command) {
  options.num_value_heads = 0;
  options.num_tokens = -1;
  auto* tokens = add_whole<int64_t>(command, "--tokens", &options.num_tokens, 0, kMaxTokens,
                                    "Tokens of each batch row");
  auto* lens = add_seq_lens(command, &options.seq_lens);
  tokens->excludes(lens);
  add_whole<int64_t>(command, "--batch", &options.batch, 0, kMaxSequences, "Batch rows")
      ->excludes(lens)
      ->default_str(cat(options.batch));
  add_heads(command, &options.num_heads)->default_str(cat(options.num_heads));
  add_value_heads(command, &options.num_value_heads);
  add_head_dim(command, "--key-dim", "K", &options.key_dim);
  add_head_dim(command, "--value-dim", "V", &options.value_dim);
  add_choice(command, "--dtype", &dtype, kFloatTypes,
             "Of q, k, v, g, beta (fp64: also of parameters and states)")
      ->default_str(dtype);
  add_choice(command, "--regime", &regime, regime_names(), "What the gates are like")
      ->default_str(regime);
  add_whole<uint64_t>(command, "--seed", &options.seed, 0, UINT64_MAX, "Of the random numbers")
      ->default_str(cat(options.seed));
  add_switch(command, "--initial-state", &options.initial_state, "Add a random initial state");
  add_switch(command, "--head-gates", &options.head_gates,
             "One gate a head, no dt_bias: g [B, T, HV] in fp32 (fp64 as --dtype; Gated DeltaNet)");
  add_head_map(command, &head_map)->default_str(head_map);
}

check::GenerateOptions GenerateFlags::resolve() const {
  check::GenerateOptions resolved = options;
  if (resolved.num_tokens < 0 && resolved.seq_lens.empty())
    fail("--tokens or --seq-lens is required");
  resolved.num_tokens = std::max<int64_t>(resolved.num_tokens, 0);
  if (resolved.batch * resolved.num_tokens > kMaxTokens)
    fail("--batch: ", resolved.batch, " rows of --tokens ", resolved.num_tokens, " are more than ",
         kMaxTokens, " tokens");
  if (resolved.num_value_heads == 0) resolved.num_value_heads = resolved.num_heads;
  check_multiple("--value-heads", resolved.num_value_heads, resolved.num_heads);
  resolved.dtype = check::parse_dtype(dtype);
  resolved.regime = check::parse_regime(regime);
  resolved.head_map = check::parse_head_map(head_map);
  return resolved;
}

CLI::Option* add_heads(CLI::App& command, int64_t* target) {
  return add_whole<int64_t>(command, "--heads", target, 1, kMaxHeads, "q/k heads H");
}

CLI::Option* add_value_heads(CLI::App& command, int64_t* target) {
  return add_whole<int64_t>(command, "--value-heads", target, 1, kMaxHeads,
                            "Value heads HV, a multiple of H (default H)");
}

CLI::Option* add_head_map(CLI::App& command, std::string* target) {
  return add_choice(command, "--head-map", target, {"grouped", "tiled"},
                    "The q/k head of value head j: j / (HV / H), or j mod H");
}

CLI::Option* add_head_dim(CLI::App& command, const char* name, const char* symbol,
                          int64_t* target) {
  return add_whole<int64_t>(command, name, target, 1, kMaxHeadDim,
                            cat(symbol, ", 1..", kMaxHeadDim))
      ->default_str(cat(*target));
}

}  // namespace kda::tools
