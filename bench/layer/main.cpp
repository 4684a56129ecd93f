// SPDX-License-Identifier: Apache-2.0
// kda_layer_bench: times of the operations around KDA and of a decode step on a GPU, beside a copy
// of as many bytes. A line of JSON each. Calls go around buffers that are together far larger than
// the L2 cache, and are launched as one CUDA graph.
//
//   kda_layer_bench [convolution | norm | decode [HEADS]]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "check/device.hpp"
#include "core/text.hpp"
#include "kda/kda.hpp"
#include "support/graph.hpp"

namespace kda {
namespace {

using check::DeviceBuffer;

constexpr int64_t kD = 128;
constexpr double kColdBytes = 400e6;

/// Buffers of the calls, zero.
class Memory {
 public:
  void* take(int64_t bytes) {
    buffers_.emplace_back(static_cast<std::size_t>(bytes));
    buffers_.back().fill(0);
    return buffers_.back().data();
  }
  TensorView view(DType dtype, std::array<int64_t, 4> strides, int64_t elements) {
    return {take(elements * dtype_size(dtype)), dtype, strides};
  }

 private:
  std::vector<DeviceBuffer> buffers_;
};

using Call = std::function<Status(void* stream)>;

/// Microseconds a call: a graph of all calls in turn, the fastest of some launches.
double time_of(const std::vector<Call>& calls, int rounds) {
  const test::Stream stream;
  const test::Graph graph(stream, [&] {
    for (int i = 0; i < rounds; ++i)
      for (const Call& call : calls) throw_if_error(call(stream.stream));
  });
  cudaEvent_t begin{}, end{};
  cudaEventCreate(&begin), cudaEventCreate(&end);
  float best = 1e30f;
  for (int i = 0; i < 8; ++i) {
    cudaEventRecord(begin, stream.stream);
    graph.launch(stream);
    cudaEventRecord(end, stream.stream);
    test::throw_if_cuda_error(cudaEventSynchronize(end), "wait");
    float ms = 0;
    cudaEventElapsedTime(&ms, begin, end);
    if (i > 1) best = std::min(best, ms);
  }
  cudaEventDestroy(begin), cudaEventDestroy(end);
  return best * 1e3 / (static_cast<double>(calls.size()) * rounds);
}

int turns_of(double bytes) { return static_cast<int>(std::clamp(kColdBytes / bytes, 1.0, 40.0)); }

constexpr std::size_t kPiece = std::size_t{256} << 20;

/// A copy that reads and writes `bytes` together, in pieces: one of more than half a gigabyte is
/// slow.
double copy_us(double bytes) {
  const auto half = static_cast<std::size_t>(bytes / 2);
  std::vector<DeviceBuffer> buffers;
  std::vector<Call> calls;
  const int turns = turns_of(bytes);
  for (int i = 0; i < 2 * turns; ++i) buffers.emplace_back(half);
  for (int i = 0; i < turns; ++i)
    calls.push_back([to = static_cast<char*>(buffers[2 * i].data()),
                     from = static_cast<const char*>(buffers[2 * i + 1].data()), half](void* s) {
      for (std::size_t at = 0; at < half; at += kPiece)
        test::throw_if_cuda_error(
            cudaMemcpyAsync(to + at, from + at, std::min(kPiece, half - at),
                            cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(s)),
            "copy");
      return Status{};
    });
  return time_of(calls, turns < 10 ? 4 : 1);
}

using Make = std::function<Call(Memory&)>;

double time_of(const Make& make, double bytes) {
  Memory memory;
  std::vector<Call> calls;
  const int turns = turns_of(bytes);
  for (int i = 0; i < turns; ++i) calls.push_back(make(memory));
  return time_of(calls, turns < 10 ? 4 : 1);
}

void report(const std::string& what, const Make& make, double bytes) {
  const double us = time_of(make, bytes), copy = copy_us(bytes);
  std::printf(
      "{\"what\": \"%s\", \"MB\": %.2f, \"us\": %.2f, \"copy_us\": %.2f, \"of_copy\": %.2f}\n",
      what.c_str(), bytes / 1e6, us, copy, copy / us);
  std::fflush(stdout);
}

// ---- convolution --------------------------------------------------------------------------------

ShortConv conv_call(Memory& memory, int64_t N, int64_t T, int64_t D, DType dtype, bool first) {
  ShortConv call{.batch = N, .num_tokens = T, .channels = D, .activation = Activation::kSilu};
  const std::array<int64_t, 4> last_strides = {T * D, D, 1, 0};
  call.x =
      memory.view(dtype, first ? std::array<int64_t, 4>{T * D, 1, T, 0} : last_strides, N * T * D);
  call.y = memory.view(dtype, last_strides, N * T * D);
  call.weight = memory.view(dtype, {4, 1, 0, 0}, 4 * D);
  call.device = DeviceKind::kCuda, call.trusted = true;
  return call;
}

void convolution() {
  struct Row {
    int64_t N, T, D;
    DType dtype;
    bool first;
  };
  for (const Row& r :
       {Row{1, 1024, 12288, DType::kBFloat16, false}, Row{1, 8192, 12288, DType::kBFloat16, false},
        Row{1, 8192, 12288, DType::kBFloat16, true}, Row{1, 8192, 12288, DType::kFloat32, false},
        Row{4, 2048, 1536, DType::kBFloat16, false}}) {
    const std::string name = cat(" N ", r.N, " T ", r.T, " D ", r.D, " ", dtype_name(r.dtype),
                                 r.first ? " channels first" : "");
    const double bytes = static_cast<double>(r.N * r.T * r.D * dtype_size(r.dtype));
    report(
        "convolution" + name,
        [&](Memory& memory) -> Call {
          return [call = conv_call(memory, r.N, r.T, r.D, r.dtype, r.first)](void* s) mutable {
            call.stream = s;
            return short_conv(call);
          };
        },
        2 * bytes);
    report(
        "convolution backward" + name,
        [&](Memory& memory) -> Call {
          ShortConv call = conv_call(memory, r.N, r.T, r.D, r.dtype, r.first);
          call.workspace_bytes = short_conv_backward_workspace(call);
          call.workspace = memory.take(static_cast<int64_t>(call.workspace_bytes));
          ShortConvGradients g;
          g.dy = memory.view(r.dtype, call.y.strides, r.N * r.T * r.D);
          g.dx = memory.view(r.dtype, call.x.strides, r.N * r.T * r.D);
          g.dweight = memory.view(r.dtype, call.weight.strides, 4 * r.D);
          return [call, g](void* s) mutable {
            call.stream = s;
            return short_conv_backward(call, g);
          };
        },
        3 * bytes);
  }
  for (const int64_t N : {1, 16, 64, 256, 512}) {
    const int64_t D = 12288;
    report(
        cat("convolution update N ", N, " D ", D),
        [&](Memory& memory) -> Call {
          ShortConv call = conv_call(memory, N, 1, D, DType::kBFloat16, false);
          call.state_width = 3;
          call.initial_state = {memory.view(DType::kBFloat16, {3 * D, 1, D, 0}, N * 3 * D), N};
          call.final_state = call.initial_state;
          return [call](void* s) mutable {
            call.stream = s;
            return short_conv(call);
          };
        },
        static_cast<double>(N * D * 2 * 8));
  }
}

// ---- norm ---------------------------------------------------------------------------------------

void norm() {
  for (const int64_t T : {64, 1024, 8192})
    for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
      const int64_t H = 32, elements = T * H * kD;
      const auto make = [&](Memory& memory) {
        GatedRmsNorm call{.rows = {1, T, H}, .channels = kD};
        const std::array<int64_t, 4> strides = {T * H * kD, H * kD, kD, 1};
        call.x = memory.view(dtype, strides, elements),
        call.y = memory.view(dtype, strides, elements);
        call.gate = memory.view(dtype, strides, elements);
        call.weight = memory.view(DType::kFloat32, {1, 0, 0, 0}, kD);
        call.device = DeviceKind::kCuda, call.trusted = true;
        return call;
      };
      const double bytes = static_cast<double>(elements * dtype_size(dtype));
      report(
          cat("norm T ", T, " H ", H, " ", dtype_name(dtype)),
          [&](Memory& memory) -> Call {
            return [call = make(memory)](void* s) mutable {
              call.stream = s;
              return gated_rms_norm(call);
            };
          },
          3 * bytes);
      report(
          cat("norm backward T ", T, " H ", H, " ", dtype_name(dtype)),
          [&](Memory& memory) -> Call {
            GatedRmsNorm call = make(memory);
            call.workspace_bytes = gated_rms_norm_backward_workspace(call);
            call.workspace = memory.take(static_cast<int64_t>(call.workspace_bytes));
            GatedRmsNormGradients g;
            g.dy = memory.view(dtype, call.x.strides, elements);
            g.dx = memory.view(dtype, call.x.strides, elements);
            g.dgate = memory.view(dtype, call.x.strides, elements);
            g.dweight = memory.view(DType::kFloat32, {1, 0, 0, 0}, kD);
            return [call, g](void* s) mutable {
              call.stream = s;
              return gated_rms_norm_backward(call, g);
            };
          },
          5 * bytes);
    }
}

// ---- decode step --------------------------------------------------------------------------------

FusedDecode decode_call(Memory& memory, int64_t N, int64_t H) {
  const int64_t HD = H * kD;
  FusedDecode call{.num_sequences = N, .num_heads = H};
  const TensorView x = memory.view(DType::kBFloat16, {3 * HD, 3 * HD, 1, 0}, N * 3 * HD);
  const TensorView weight = memory.view(DType::kFloat32, {1, HD, 0, 0}, 3 * HD * 4);
  const TensorView state = memory.view(DType::kBFloat16, {9 * HD, 1, 3 * HD, 0}, N * 9 * HD);
  const auto from = [](TensorView view, int64_t elements) {
    view.data = static_cast<char*>(view.data) + elements * dtype_size(view.dtype);
    return view;
  };
  int64_t part = 0;
  for (FusedDecode::Part* target : {&call.q, &call.k, &call.v}) {
    *target = {from(x, part * HD), from(weight, part * 4 * HD), {}, from(state, part * HD)};
    ++part;
  }
  const std::array<int64_t, 4> rows = {HD, HD, kD, 1};
  call.g = memory.view(DType::kBFloat16, rows, N * HD);
  call.beta = memory.view(DType::kBFloat16, {H, H, 1, 0}, N * H);
  call.gate_mode = GateMode::kBounded, call.beta_mode = BetaMode::kSigmoid;
  call.A_log = memory.view(DType::kFloat32, {1, 0, 0, 0}, H);
  call.dt_bias = memory.view(DType::kFloat32, {1, 0, 0, 0}, HD);
  call.state = memory.view(DType::kFloat32, {HD * kD, kD * kD, kD, 1}, N * HD * kD);
  call.state_layout = StateLayout::kVK, call.num_slots = N;
  call.norm_weight = memory.view(DType::kFloat32, {1, 0, 0, 0}, kD);
  call.output_gate = memory.view(DType::kBFloat16, rows, N * HD);
  call.y = memory.view(DType::kBFloat16, rows, N * HD);
  call.trusted = true;
  return call;
}

/// The same in three calls.
Call separate(Memory& memory, int64_t N, int64_t H) {
  const int64_t HD = H * kD;
  const FusedDecode fused = decode_call(memory, N, H);
  ShortConv conv = conv_call(memory, N, 1, 3 * HD, DType::kBFloat16, false);
  conv.x = fused.q.x;
  conv.state_width = 3;
  conv.initial_state = {fused.q.state, N};
  conv.final_state = conv.initial_state;
  Problem p;
  p.operation = Operation::kDecode;
  p.batch = p.num_sequences = N, p.num_tokens = 1, p.num_heads = p.num_value_heads = H;
  for (TensorDesc* desc : {&p.q, &p.k, &p.v}) *desc = {DType::kBFloat16, {3 * HD, 3 * HD, kD, 1}};
  for (TensorDesc* desc : {&p.g, &p.o}) *desc = contiguous(DType::kBFloat16, {N, 1, H, kD});
  p.beta = contiguous(DType::kBFloat16, {N, 1, H});
  p.beta.alignment = 2;
  p.gate_mode = GateMode::kBounded, p.beta_mode = BetaMode::kSigmoid, p.qk_l2norm = true;
  p.A_log = contiguous(DType::kFloat32, {H}), p.dt_bias = contiguous(DType::kFloat32, {H, kD});
  p.A_log->alignment = 4;
  p.state_layout = StateLayout::kVK;
  p.initial_state = StateDesc{contiguous(DType::kFloat32, {N, H, kD, kD}), N, false};
  DeviceFacts facts;
  throw_if_error(cuda_device_facts(0, &facts));
  Plan plan;
  throw_if_error(make_plan(p, {}, facts, {}, &plan));
  Tensors t;
  char* y = static_cast<char*>(conv.y.data);
  t.q = y, t.k = y + HD * 2, t.v = y + 2 * HD * 2;
  t.g = fused.g.data, t.beta = fused.beta.data, t.A_log = fused.A_log.data;
  t.dt_bias = fused.dt_bias.data;
  t.initial_state = fused.state.data;
  t.o = memory.take(N * HD * 2);
  t.trusted = true;
  void* workspace = memory.take(static_cast<int64_t>(plan.workspace_bytes) + 256);
  GatedRmsNorm norm{.rows = {N, 1, H}, .channels = kD};
  norm.x = {t.o, DType::kBFloat16, fused.y.strides}, norm.y = fused.y;
  norm.gate = fused.output_gate, norm.weight = fused.norm_weight;
  norm.device = DeviceKind::kCuda, norm.trusted = true;
  return [=](void* s) mutable -> Status {
    conv.stream = norm.stream = s;
    KDA_RETURN_IF_ERROR(short_conv(conv));
    KDA_RETURN_IF_ERROR(run(plan, t, workspace, plan.workspace_bytes, s));
    return gated_rms_norm(norm);
  };
}

void decode(const std::vector<int64_t>& heads) {
  for (const int64_t H : heads)
    for (const int64_t N : {1, 4, 16, 64, 256, 512}) {
      const double bytes = static_cast<double>(N * H) * (2 * 65536 + kD * 2 * (3 * 7 + 3));
      if (bytes > 8e9) continue;
      const double fused = time_of(
          [&](Memory& memory) -> Call {
            return [call = decode_call(memory, N, H)](void* s) mutable {
              call.stream = s;
              return fused_decode(call);
            };
          },
          bytes);
      const double three = time_of([&](Memory& memory) { return separate(memory, N, H); }, bytes);
      const double copy = copy_us(bytes);
      std::printf(
          "{\"what\": \"decode step\", \"H\": %ld, \"N\": %ld, \"MB\": %.2f, \"us\": %.2f, "
          "\"three_calls_us\": %.2f, \"copy_us\": %.2f, \"of_copy\": %.2f}\n",
          static_cast<long>(H), static_cast<long>(N), bytes / 1e6, fused, three, copy,
          copy / fused);
      std::fflush(stdout);
    }
}

}  // namespace
}  // namespace kda

int main(int argc, char** argv) {
  const auto wanted = [&](const char* name) { return argc < 2 || std::strcmp(argv[1], name) == 0; };
  try {
    if (wanted("convolution")) kda::convolution();
    if (wanted("norm")) kda::norm();
    if (wanted("decode"))
      kda::decode(argc > 2 ? std::vector<int64_t>{std::atoi(argv[2])}
                           : std::vector<int64_t>{3, 6, 12, 24, 32, 48, 96});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kda_layer_bench: %s\n", error.what());
    return 1;
  }
  return 0;
}
