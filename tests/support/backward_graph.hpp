// SPDX-License-Identifier: Apache-2.0
// One graph of a backward for many tables of lengths.
#pragma once

#ifdef KDA_WITH_CUDA
#include <vector>

#include "support/backward.hpp"
#include "support/graph.hpp"

namespace kda::test {

/// Captures a backward of lengths that only the device knows once, and replays it with each of
/// `tables`, offsets of as many sequences and tokens as `inputs` have: gradients have the bits of
/// plans of these lengths. Some of these are cut, and some are not.
inline void expect_one_graph(check::Inputs inputs, const check::GradientBuffers& fresh,
                             BackwardRun run, const std::vector<std::vector<int64_t>>& tables) {
  run.from_bounds = true;
  check::GradientBuffers device = fresh;
  const BackwardCall call(inputs, device.gradients, run);
  ASSERT_TRUE(call.plan.plan.device_cut.on);
  const check::DeviceTensors tensors(call.plan.plan, call.tensors);
  check::DeviceGradients gradients(call.plan, device.tensors());
  check::DeviceBuffer workspace(call.plan.plan.workspace_bytes);
  workspace.fill(0xff);
  const Stream stream;
  const Graph graph(stream, [&] {
    EXPECT_TRUE(backward(call.plan, tensors.tensors(), gradients.tensors(), workspace.data(),
                         workspace.size(), stream.stream)
                    .ok());
  });
  run.from_bounds = false;
  std::size_t cut = 0;
  for (const std::vector<int64_t>& table : tables) {
    inputs.cu_seqlens = table;
    replace_lengths(tensors.tensors(), table);
    graph.launch(stream);
    check::synchronize_device();
    gradients.download();
    check::GradientBuffers host = fresh;
    BackwardCall on_host(inputs, host.gradients, run);
    ASSERT_EQ(on_host.plan.plan.implementation, call.plan.plan.implementation);
    cut += on_host.plan.plan.segmented ? 1 : 0;
    throw_if_error(on_host.run(&host));
    ASSERT_TRUE(same_gradients(host, device)) << table[1];
  }
  EXPECT_GE(cut, 1U);
  EXPECT_LT(cut, tables.size());
}

}  // namespace kda::test
#endif
