// SPDX-License-Identifier: Apache-2.0
#include "kda/flags.hpp"

#include <CLI/CLI.hpp>
#include <charconv>

#include "core/text.hpp"

namespace kda::tools {
namespace {

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw Error(invalid(parts...));
}

int64_t parse_integer(const char* what, const std::string& text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || text.empty())
    fail(what, ": '", text, "' is not a whole number");
  return value;
}

/// "64K" -> 65536
int64_t parse_length(std::string text) {
  int64_t unit = 1;
  if (!text.empty() && (text.back() == 'K' || text.back() == 'k')) {
    unit = 1024;
    text.pop_back();
  }
  const int64_t value = parse_integer("seq-lens", text);
  if (value < 0 || value > (int64_t{1} << 31)) fail("seq-lens: ", text, " is outside 0..2^31");
  return value * unit;
}

std::vector<std::string> regime_names() {
  std::vector<std::string> names;
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
    if (text.empty() || text.find_first_not_of("0123456789") != std::string::npos)
      fail("context-parallel: '", text, "' is not auto, off, flashkda, cula or a number");
    options->context_parallel = SegmentPolicy::kFixed;
    options->num_segments = parse_integer("context-parallel", text);
  }
}

std::vector<int64_t> parse_lengths(const std::string& text) {
  constexpr int64_t kMaxRepeat = 1 << 24;
  std::vector<int64_t> lengths;
  std::size_t at = 0;
  while (at <= text.size()) {
    const std::size_t comma = std::min(text.find(',', at), text.size());
    const std::string item = text.substr(at, comma - at);
    const std::size_t times = item.find('x');
    int64_t count = 1;
    if (times != std::string::npos) count = parse_integer("seq-lens", item.substr(0, times));
    if (count < 0 || count > kMaxRepeat) fail("seq-lens: ", count, " repeats are too many");
    const int64_t length = parse_length(times == std::string::npos ? item : item.substr(times + 1));
    lengths.insert(lengths.end(), static_cast<std::size_t>(count), length);
    at = comma + 1;
  }
  return lengths;
}

void ScheduleFlags::add_to(CLI::App& command) {
  command.add_option("--device", device, "Where to run (auto: the best there is)")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  command.add_option("--backend", backend,
                     "Implementation by name or part of it (see kda info), e.g. oracle, avx2");
  command
      .add_option("--context-parallel", context_parallel,
                  "Cut long sequences: auto, off, flashkda, cula, or segments a sequence")
      ->capture_default_str();
  command
      .add_option("--segment-method", segment_method,
                  "How segments are joined; both are exact (auto: one pass in cuda.sm90.fused)")
      ->check(CLI::IsMember({"scan-merge-forward", "one-pass"}))
      ->capture_default_str();
  command
      .add_option("--intra-form", intra_form,
                  "Diagonal blocks of a chunk on CUDA: tensor cores or token by token; both exact")
      ->check(CLI::IsMember({"auto", "tensor", "token"}))
      ->capture_default_str();
  command.add_flag("--batch-invariant", batch_invariant,
                   "A sequence's bits do not depend on the batch it is in");
  command.add_option("--threads", num_threads, "CPU threads (0: OMP_NUM_THREADS or all cores)")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
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

void RunFlags::add_to(CLI::App& command) {
  command_ = &command;
  command.add_option("input", input, "Input tensors q k v g beta .. (safetensors; docs/files.md)")
      ->required();
  command.add_option("--gate", gate, "How g becomes the log decay")
      ->check(CLI::IsMember({"log", "softplus", "bounded"}));
  command.add_option("--lower-bound", lower_bound, "Of the bounded gate, below 0");
  command.add_option("--beta", beta, "How beta becomes the step size")
      ->check(CLI::IsMember({"plain", "sigmoid", "sigmoid2"}));
  auto* norm = command.add_flag("--qk-l2norm", qk_l2norm, "Normalise q and k");
  command.add_flag("--no-qk-l2norm", no_qk_l2norm, "Do not normalise q and k")->excludes(norm);
  command.add_option("--scale", scale, "Of the outputs (default K^-1/2)");
  command.add_option("--state-layout", state_layout, "Memory order of states")
      ->check(CLI::IsMember({"kv", "vk"}));
  command.add_option("--out-dtype", out_dtype, "Type of o (default: that of v)")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}));
  schedule.add_to(command);
}

check::Inputs RunFlags::load() const {
  const auto given = [&](const char* flag) { return command_->count(flag) > 0; };
  check::Overrides overrides;
  if (given("--gate")) overrides.gate = gate;
  if (given("--beta")) overrides.beta = beta;
  if (given("--state-layout")) overrides.state_layout = state_layout;
  if (given("--lower-bound")) overrides.lower_bound = lower_bound;
  if (given("--scale")) overrides.scale = scale;
  if (qk_l2norm || no_qk_l2norm) overrides.qk_l2norm = qk_l2norm;
  static const std::vector<std::string> kNames = {
      "q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens"};
  check::Inputs inputs = check::inputs_from_file(io::read_safetensors(input, kNames), overrides);
  inputs.problem.batch_invariant = schedule.batch_invariant;
  check::want_final_state(&inputs.problem);
  return inputs;
}

DType RunFlags::output_dtype(const Problem& problem) const {
  return out_dtype.empty() ? problem.v.dtype : check::parse_dtype(out_dtype);
}

void GenerateFlags::add_to(CLI::App& command) {
  auto* tokens = command.add_option("--tokens", options.num_tokens, "Tokens of each batch row");
  auto* lens =
      command.add_option("--seq-lens", seq_lens, "Lengths of packed sequences: 1000,64K,10x1K");
  tokens->excludes(lens);
  command.add_option("--batch", options.batch, "Batch rows")->excludes(lens)->capture_default_str();
  command.add_option("--heads", options.num_heads, "q/k heads H")->capture_default_str();
  command.add_option("--value-heads", options.num_value_heads,
                     "Value heads HV, a multiple of H (default: H)");
  command.add_option("--key-dim", options.key_dim, "K, 1..256")->capture_default_str();
  command.add_option("--value-dim", options.value_dim, "V, 1..256")->capture_default_str();
  command.add_option("--dtype", dtype, "Of q, k, v, g, beta")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}))
      ->capture_default_str();
  command.add_option("--regime", regime, "What the gates are like")
      ->check(CLI::IsMember(regime_names()))
      ->capture_default_str();
  command.add_option("--seed", options.seed, "Of the random numbers")->capture_default_str();
  command.add_flag("--initial-state", options.initial_state, "Add a random initial state");
  options.num_value_heads = 0;
}

check::GenerateOptions GenerateFlags::resolve() const {
  check::GenerateOptions resolved = options;
  if (!seq_lens.empty()) resolved.seq_lens = parse_lengths(seq_lens);
  if (resolved.num_value_heads == 0) resolved.num_value_heads = resolved.num_heads;
  resolved.dtype = check::parse_dtype(dtype);
  resolved.regime = check::parse_regime(regime);
  return resolved;
}

}  // namespace kda::tools
