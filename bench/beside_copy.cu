// SPDX-License-Identifier: Apache-2.0
// kda_beside_copy: forwards beside a copy that takes most of the memory's rate, as on a card with
// little of it.
//
//   kda_beside_copy [--tokens 8192] [--heads 64] [--share 0.75] [--backend sm80.fused --backend
//   staged ...]
//
// A copy on as few SMs as reach the share of a whole card's rate, alone, runs throughout. Prints
// JSON: times of each backend alone and beside the copy (us, medians, L2 cold), and the rates of
// the copy. Builds for other cards than Hopper have both backends
// (KDA_CUDA_ARCHITECTURES=80-virtual); -DKDA_SHARED_BYTES=101376 gives blocks as little shared
// memory as those of an RTX card have (src/cuda/launch/device.cpp).
#include <cuda_runtime.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "check/device.hpp"
#include "check/generate.hpp"
#include "check/inputs.hpp"

namespace {

constexpr int kThreads = 1024, kRepeats = 15;
constexpr size_t kBufferBytes = size_t{1} << 30, kFlushBytes = size_t{256} << 20;
// No other block fits beside it.
constexpr int kSharedBytes = 160 << 10;

/// Copies pieces of `from` in turns until `nanoseconds` have passed; copied[block]: bytes that it
/// has read.
__global__ __launch_bounds__(kThreads, 1) void copy_for(const uint4* from, uint4* to, size_t count,
                                                        unsigned long long nanoseconds,
                                                        unsigned long long* copied) {
  const auto now = [] {
    unsigned long long t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
  };
  constexpr size_t kUnroll = 8, kPiece = kUnroll * kThreads;
  const unsigned long long end = now() + nanoseconds;
  unsigned long long pieces = 0;
  for (size_t at = blockIdx.x * kPiece; now() < end; at += gridDim.x * kPiece, ++pieces) {
    if (at + kPiece > count) at = blockIdx.x * kPiece;
    uint4 x[kUnroll];
#pragma unroll
    for (size_t i = 0; i < kUnroll; ++i) x[i] = from[at + i * kThreads + threadIdx.x];
#pragma unroll
    for (size_t i = 0; i < kUnroll; ++i) to[at + i * kThreads + threadIdx.x] = x[i];
  }
  if (threadIdx.x == 0) copied[blockIdx.x] = pieces * kPiece * sizeof(uint4);
}

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "kda_beside_copy: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

struct Events {
  cudaEvent_t begin, end;
  Events() { check(cudaEventCreate(&begin)), check(cudaEventCreate(&end)); }
  double microseconds() const {
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end));
    return 1e3 * ms;
  }
};

/// The copy, on a stream of its own.
class Copier {
 public:
  Copier() {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    check(
        cudaFuncSetAttribute(copy_for, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    from_.fill(1);
  }
  void start(int sms, double seconds) {
    sms_ = sms;
    check(cudaEventRecord(events_.begin, stream_));
    copy_for<<<sms, kThreads, kSharedBytes, stream_>>>(
        static_cast<const uint4*>(from_.data()), static_cast<uint4*>(to_.data()),
        kBufferBytes / sizeof(uint4), static_cast<unsigned long long>(1e9 * seconds),
        static_cast<unsigned long long*>(copied_.data()));
    check(cudaEventRecord(events_.end, stream_));
  }
  bool runs() const { return cudaEventQuery(events_.end) == cudaErrorNotReady; }
  /// Bytes a second, read and written, of the whole run.
  double rate() {
    check(cudaStreamSynchronize(stream_));
    std::vector<unsigned long long> bytes(static_cast<size_t>(sms_));
    copied_.download(bytes.data(), bytes.size() * sizeof bytes[0]);
    double sum = 0;
    for (const auto b : bytes) sum += static_cast<double>(b);
    return 2 * sum / (1e-6 * events_.microseconds());
  }

 private:
  kda::check::DeviceBuffer from_{kBufferBytes}, to_{kBufferBytes}, copied_{1024 * 8};
  cudaStream_t stream_;
  Events events_;
  int sms_ = 0;
};

/// A forward by one backend, ready to run on a stream.
class Forward {
 public:
  Forward(const kda::check::Inputs& inputs, const kda::DeviceFacts& device,
          const std::string& backend)
      : problem_(inputs.problem), outputs_(kda::check::make_outputs(&problem_, problem_.v.dtype)) {
    kda::PlanOptions options;
    options.backend = backend;
    options.context_parallel = kda::SegmentPolicy::kOff;
    kda::throw_if_error(kda::make_plan(problem_, {}, device, options, &plan_));
    kda::Tensors host = inputs.tensors();
    outputs_.attach(&host);
    tensors_ = std::make_unique<kda::check::DeviceTensors>(plan_, host);
    workspace_ = kda::check::DeviceBuffer(plan_.workspace_bytes);
  }
  const std::string& implementation() const { return plan_.implementation; }
  void operator()(cudaStream_t stream) {
    kda::throw_if_error(
        run(plan_, tensors_->tensors(), workspace_.data(), workspace_.size(), stream));
  }

 private:
  kda::Problem problem_;
  kda::check::Outputs outputs_;
  kda::Plan plan_;
  std::unique_ptr<kda::check::DeviceTensors> tensors_;
  kda::check::DeviceBuffer workspace_;
};

/// Medians of calls on a stream, each behind a copy that empties the L2.
class Timer {
 public:
  Timer() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  double median(Forward& forward) {
    std::vector<Events> events(kRepeats);
    for (int i = -1; i < kRepeats; ++i) {
      check(cudaMemcpyAsync(to_.data(), from_.data(), kFlushBytes, cudaMemcpyDeviceToDevice,
                            stream_));
      if (i >= 0) check(cudaEventRecord(events[static_cast<size_t>(i)].begin, stream_));
      forward(stream_);
      if (i >= 0) check(cudaEventRecord(events[static_cast<size_t>(i)].end, stream_));
    }
    check(cudaStreamSynchronize(stream_));
    std::vector<double> times;
    for (const Events& e : events) times.push_back(e.microseconds());
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }

 private:
  cudaStream_t stream_;
  kda::check::DeviceBuffer from_{kFlushBytes}, to_{kFlushBytes};
};

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Forwards beside a copy that takes most of the memory's rate");
  kda::check::GenerateOptions problem;
  problem.num_tokens = 8192;
  problem.num_heads = 64;
  double share = 0.75;
  std::vector<std::string> backends = {"cuda.sm80.fused", "staged"};
  app.add_option("--tokens", problem.num_tokens, "Tokens of one sequence")
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--heads", problem.num_heads, "Heads of 128 channels")->check(CLI::Range(1, 256));
  app.add_option("--share", share, "Of a whole card's copy, that the copy beside takes alone")
      ->check(CLI::Range(0.1, 0.95));
  app.add_option("--backend", backends, "May be repeated");
  CLI11_PARSE(app, argc, argv);
  problem.num_value_heads = problem.num_heads;
  try {
    kda::DeviceFacts device;
    kda::throw_if_error(kda::cuda_device_facts(0, &device));
    const kda::check::Inputs inputs = kda::check::generate(problem);
    Copier copier;
    const auto alone = [&](int sms) {
      copier.start(sms, 2e-3);
      return copier.rate();
    };
    alone(device.num_sms);
    const double whole = alone(device.num_sms);
    int sms = 8;
    while (sms < device.num_sms && alone(sms) < share * whole) sms += 4;
    nlohmann::ordered_json report = {{"tokens", problem.num_tokens},
                                     {"heads", problem.num_heads},
                                     {"copy_bytes_a_second", whole},
                                     {"copy_sms", sms},
                                     {"copy_alone_share", alone(sms) / whole}};
    Timer timer;
    for (const std::string& backend : backends) {
      Forward forward(inputs, device, backend);
      const double by_itself = timer.median(forward);
      copier.start(sms, 1.0);  // far longer than the calls
      const double beside = timer.median(forward);
      const bool throughout = copier.runs();
      const double rate = copier.rate();
      report["rows"].push_back({{"backend", forward.implementation()},
                                {"alone_us", by_itself},
                                {"beside_us", beside},
                                {"copy_throughout", throughout},
                                {"copy_share_of_a_second", rate / whole}});
    }
    std::printf("%s\n", report.dump(1).c_str());
  } catch (const kda::Error& error) {
    std::fprintf(stderr, "kda_beside_copy: %s\n", error.what());
    return 1;
  }
  return 0;
}
