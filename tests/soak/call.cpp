// SPDX-License-Identifier: Apache-2.0
#include "soak/call.hpp"

#include <algorithm>

#include "core/layout.hpp"

namespace kda::soak {
namespace {

std::size_t bytes_of(const TensorDesc& desc, const Shape& shape) {
  int64_t last = 0;
  for (std::size_t d = 0; d < 4; ++d) {
    if (shape[d] == 0) return 0;
    if (shape[d] > 1) last += desc.strides[d] * (shape[d] - 1);
  }
  return static_cast<std::size_t>((last + 1) * dtype_size(desc.dtype));
}

}  // namespace

Memory::Memory(std::size_t bytes) : host_(bytes) {
  host_.fill(0xff);
  if (test::on_cuda()) device_ = std::make_unique<check::DeviceBuffer>(bytes);
}
void* Memory::at() { return device_ ? device_->data() : host_.data(); }
void Memory::upload() {
  if (device_) device_->upload(host_.data(), host_.size());
}
void Memory::download() {
  if (device_) device_->download(host_.data(), host_.size());
}

Call::Call(const Problem& problem, const std::vector<int64_t>& lengths, bool from_bounds,
           const PlanOptions& options, Memory* pool)
    : problem_(problem), pool_(pool) {
  const Problem& p = problem_;
  const DeviceFacts device = test::device_of(options.backend);
  const bool known = !from_bounds || !p.cu_seqlens;
  throw_if_error(
      known ? make_plan(p, p.cu_seqlens ? lengths : std::vector<int64_t>{}, device, options, &plan_)
            : make_plan_from_bounds(p, device, options, &plan_));
  const auto N = static_cast<std::size_t>(p.num_sequences);
  inputs_[kQ] = Memory(bytes_of(p.q, qk_shape(p)));
  inputs_[kK] = Memory(bytes_of(p.k, qk_shape(p)));
  inputs_[kV] = Memory(bytes_of(p.v, v_shape(p)));
  inputs_[kG] = Memory(bytes_of(p.g, g_shape(p)));
  inputs_[kBeta] = Memory(bytes_of(p.beta, beta_shape(p)));
  if (p.A_log) inputs_[kALog] = Memory(static_cast<std::size_t>(p.num_value_heads) * 4);
  if (p.dt_bias)
    inputs_[kDtBias] = Memory(static_cast<std::size_t>(p.num_value_heads * p.key_dim) * 4);
  o_ = Memory(bytes_of(p.o, v_shape(p)));
  if (p.cu_seqlens)
    cu_seqlens_ = Memory((N + 1) * static_cast<std::size_t>(dtype_size(*p.cu_seqlens)));
  read_ = Memory(N * static_cast<std::size_t>(initial_columns(p)) * 4);
  write_ = Memory(N * static_cast<std::size_t>(final_columns(p)) * 4);
  parents_ = Memory(N * static_cast<std::size_t>(p.state_index_columns) * 4);
  std::size_t checkpoints = 0;
  for (std::size_t n = 0; p.checkpoints && n < N; ++n)
    checkpoints += static_cast<std::size_t>(
        num_checkpoints(p, p.cu_seqlens ? lengths[n + 1] - lengths[n] : p.num_tokens));
  checkpoints_ = Memory((p.checkpoint_offsets ? N : checkpoints) * 4);
  offsets_ = Memory(N * 4);
  mask_ = Memory(N);
  accepted_ = Memory(N * 4);
  workspace_ = Memory(plan_.workspace_bytes);
  workspace_.upload();

  tensors_.q = inputs_[kQ].at(), tensors_.k = inputs_[kK].at(), tensors_.v = inputs_[kV].at();
  tensors_.g = inputs_[kG].at(), tensors_.beta = inputs_[kBeta].at();
  if (p.A_log) tensors_.A_log = static_cast<const float*>(inputs_[kALog].at());
  if (p.dt_bias) tensors_.dt_bias = static_cast<const float*>(inputs_[kDtBias].at());
  if (p.cu_seqlens) tensors_.cu_seqlens = cu_seqlens_.at();
  tensors_.o = o_.at();
  if (p.initial_state) tensors_.initial_state = pool->at();
  if (p.final_state) tensors_.final_state = pool->at();
  if (p.checkpoints) tensors_.checkpoints = pool->at();
  tensors_.initial_state_indices = static_cast<const int32_t*>(read_.at());
  tensors_.final_state_indices = static_cast<const int32_t*>(write_.at());
  tensors_.checkpoint_indices = static_cast<const int32_t*>(checkpoints_.at());
  tensors_.initial_state_mask = static_cast<const uint8_t*>(mask_.at());
  tensors_.num_accepted_tokens = static_cast<const int32_t*>(accepted_.at());
  tensors_.checkpoint_offsets = static_cast<const int32_t*>(offsets_.at());
  tensors_.token_parents = static_cast<const int32_t*>(parents_.at());
}

Tensors Call::host_tensors() const {
  Tensors t;
  t.q = inputs_[kQ].host().data(), t.k = inputs_[kK].host().data();
  t.v = inputs_[kV].host().data(), t.g = inputs_[kG].host().data();
  t.beta = inputs_[kBeta].host().data();
  t.A_log = inputs_[kALog].host().as<float>(), t.dt_bias = inputs_[kDtBias].host().as<float>();
  return t;
}

void Call::fill_indices(const std::vector<Row>& rows) {
  const auto initial = static_cast<std::size_t>(initial_columns(problem_));
  const auto S = static_cast<std::size_t>(problem_.state_index_columns);
  int64_t end = 0;
  std::size_t checkpoint = 0;
  const auto set_end = [&](std::size_t i) {
    if (problem_.cu_seqlens == DType::kInt64) cu_seqlens_.host().as<int64_t>()[i] = end;
    if (problem_.cu_seqlens == DType::kInt32)
      cu_seqlens_.host().as<int32_t>()[i] = static_cast<int32_t>(end);
  };
  set_end(0);
  for (std::size_t n = 0; n < rows.size(); ++n) {
    const Row& row = rows[n];
    end += row.tokens;
    set_end(n + 1);
    std::copy_n(row.read.begin(), initial, read_.host().as<int32_t>() + n * initial);
    if (S == 1) write_.host().as<int32_t>()[n] = row.write;
    if (S > 1 && problem_.final_state)
      std::copy_n(row.drafts.begin(), S, write_.host().as<int32_t>() + n * S);
    if (problem_.token_parents)
      std::copy_n(row.parents.begin(), S, parents_.host().as<int32_t>() + n * S);
    for (const int32_t slot : row.checkpoints)
      checkpoints_.host().as<int32_t>()[checkpoint++] = slot;
    offsets_.host().as<int32_t>()[n] = static_cast<int32_t>(row.offset);
    mask_.host().as<uint8_t>()[n] = row.has_state ? 1 : 0;
    accepted_.host().as<int32_t>()[n] = row.accepted;
  }
}

void Call::run(const std::vector<Row>& rows, [[maybe_unused]] bool in_graph) {
  fill_indices(rows);
  o_.host().fill(0xff);
  for (Memory& memory : inputs_) memory.upload();
  for (Memory* memory : {&o_, &cu_seqlens_, &read_, &write_, &checkpoints_, &mask_, &accepted_,
                         &parents_, &offsets_})
    memory->upload();
  const auto run_on = [&](void* stream) {
    throw_if_error(kda::run(plan_, tensors_, workspace_.at(), plan_.workspace_bytes, stream));
  };
  if (!test::on_cuda()) return run_on(nullptr);
  check::synchronize_device();  // copies from pageable memory may end after the call
#ifdef KDA_WITH_CUDA
  if (in_graph) {
    if (!stream_) stream_ = std::make_unique<test::Stream>();
    if (!graph_) graph_ = std::make_unique<test::Graph>(*stream_, [&] { run_on(stream_->stream); });
    graph_->launch(*stream_);
  } else {
    run_on(nullptr);
  }
#endif
  check::synchronize_device();
  o_.download();
  pool_->download();
}

}  // namespace kda::soak
