// SPDX-License-Identifier: Apache-2.0
// Plans as values: segments cover the tokens, reasons are given, golden texts stay as they are.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <tuple>

#include "kda/backward.hpp"
#include "plan/builder.hpp"
#include "plan/cards.hpp"
#include "plan/ledger.hpp"
#include "support/harness.hpp"
#include "tools/kda/flags.hpp"

namespace kda {
namespace {

Problem packed(const std::vector<int64_t>& lengths, int64_t heads,
               std::vector<int64_t>* cu_seqlens) {
  *cu_seqlens = {0};
  for (const int64_t length : lengths) cu_seqlens->push_back(cu_seqlens->back() + length);
  Problem p;
  p.num_tokens = cu_seqlens->back();
  p.num_sequences = static_cast<int64_t>(lengths.size());
  p.cu_seqlens = DType::kInt64;
  p.num_heads = p.num_value_heads = heads;
  const int64_t T = p.num_tokens;
  p.q = p.k = p.g = p.v = p.o = contiguous(DType::kBFloat16, {1, T, heads, 128});
  p.beta = contiguous(DType::kBFloat16, {1, T, heads});
  return p;
}

Plan plan_for(const std::string& lengths, int64_t heads, const DeviceFacts& device,
              const PlanOptions& options = {}, bool invariant = false) {
  std::vector<int64_t> cu_seqlens;
  Problem p = packed(tools::parse_lengths(lengths), heads, &cu_seqlens);
  p.batch_invariant = invariant;
  Plan plan;
  throw_if_error(make_plan(p, cu_seqlens, device, options, &plan));
  return plan;
}

PlanOptions policy(SegmentPolicy rule) {
  PlanOptions options;
  options.context_parallel = rule;
  options.num_threads = 2;
  return options;
}

/// A build without CUDA has no forward in two phases, and refuses to plan one.
bool has_two_phases() {
  std::vector<int64_t> cu;
  const Problem p = packed({64}, 1, &cu);
  PlanOptions options;
  options.spans = true;
  Plan plan;
  const Status made = make_plan(p, cu, gpu_facts(132), options, &plan);
  EXPECT_TRUE(made.ok() || made.message().find("no forward in two phases") != std::string::npos);
  return made.ok();
}

TEST(Planner, SegmentsCoverEverySequenceInOrder) {
  for (const SegmentPolicy rule :
       {SegmentPolicy::kAuto, SegmentPolicy::kFlashKda, SegmentPolicy::kCula}) {
    const Plan plan = plan_for("128K,1000,0,77", 4, gpu_facts(152), policy(rule));
    ASSERT_TRUE(plan.segmented);
    int64_t at = 0, sequence = 0;
    for (const Segment& segment : plan.segments) {
      EXPECT_EQ(segment.begin, at);
      EXPECT_GE(segment.end, segment.begin);
      EXPECT_GE(segment.sequence, sequence);
      const auto n = static_cast<std::size_t>(segment.sequence);
      EXPECT_GE(segment.begin, plan.cu_seqlens[n]);
      EXPECT_LE(segment.end, plan.cu_seqlens[n + 1]);
      EXPECT_EQ((segment.begin - plan.cu_seqlens[n]) % 16, 0);
      at = segment.end;
      sequence = segment.sequence;
    }
    EXPECT_EQ(at, plan.cu_seqlens.back());
  }
}

/// Bytes of the workspace of a backward on a GPU, all but those that every token needs whatever the
/// windows are: a state at the start of each window, sums for A_log and dt_bias.
std::size_t window_bytes(const std::string& lengths, int64_t heads, int64_t most_tokens) {
  PlanOptions options;
  options.kept_state_every = most_tokens;
  const Plan forward = plan_for(lengths, heads, gpu_facts(132), options);
  const Problem& p = forward.problem;
  PlanOptions windows;
  windows.backend = "recurrent";
  BackwardPlan backward;
  throw_if_error(make_backward_plan(forward, {.d_o = p.o, .dq = p.q}, windows, &backward));
  std::size_t bytes = backward.plan.workspace_bytes;
  for (const WorkspaceBlock& block : backward.plan.workspace)
    if (block.name == "backward_starts" || block.name == "parameter_sums") bytes -= block.bytes;
  return bytes;
}

TEST(Planner, WindowsBoundTheWorkspaceOfABackward) {
  const std::size_t bound = 700'000'000;
  EXPECT_GT(window_bytes("8192", 64, 1 << 20), bound / 2);
  EXPECT_LT(window_bytes("8192", 64, 1 << 20), bound);
  EXPECT_LT(window_bytes("1000x1,100x50", 64, 1 << 20), bound);
  EXPECT_LT(window_bytes("256K", 8, 0), bound);
  EXPECT_LT(window_bytes("8192", 64, 64), bound / 8);
  EXPECT_EQ(window_bytes("64", 4, 0), window_bytes("64", 4, 64));
}

BackwardPlan backward_of(const Problem& p, Gradients gradients, const PlanOptions& options = {}) {
  Plan forward;
  throw_if_error(make_plan(p, {}, gpu_facts(132), {}, &forward));
  BackwardPlan backward;
  throw_if_error(make_backward_plan(forward, gradients, options, &backward));
  return backward;
}

/// Dense rows of T tokens.
Problem rows_of(int64_t T, int64_t heads, int64_t K, int64_t V, DType dtype) {
  Problem p;
  p.batch = p.num_sequences = 1;
  p.num_tokens = T;
  p.num_heads = p.num_value_heads = heads;
  p.key_dim = K, p.value_dim = V;
  p.q = p.k = p.g = contiguous(dtype, {1, T, heads, K});
  p.v = p.o = contiguous(dtype, {1, T, heads, V});
  p.beta = contiguous(dtype, {1, T, heads});
  return p;
}

TEST(Planner, TheStagedBackwardSaysWhatItDeclines) {
  const Problem good = rows_of(8192, 64, 128, 128, DType::kBFloat16);
  const Gradients wanted{.d_o = good.o, .dq = good.q};
  EXPECT_EQ(backward_of(good, wanted).plan.implementation, "cuda.sm80.staged");
  const auto refusal = [&](const Problem& p, const Gradients& gradients) {
    const BackwardPlan backward = backward_of(p, gradients);
    EXPECT_EQ(backward.plan.implementation, "cuda.smxx.recurrent");
    for (const Candidate& row : backward.plan.candidates)
      if (row.name == "cuda.sm80.staged") return row.reason;
    return std::string();
  };
  const auto of_rows = [&](int64_t K, int64_t V, DType dtype) {
    const Problem p = rows_of(8192, 4, K, V, dtype);
    return refusal(p, {.d_o = p.o, .dq = p.q});
  };
  EXPECT_EQ(of_rows(64, 64, DType::kFloat16),
            "q, k, v are fp16, fp16, fp16; needs bf16 for all three");
  EXPECT_EQ(of_rows(64, 64, DType::kFloat32),
            "q, k, v are fp32, fp32, fp32; needs bf16 for all three");
  EXPECT_EQ(of_rows(136, 64, DType::kBFloat16), "K = 136 is above 128");
  EXPECT_EQ(of_rows(60, 64, DType::kBFloat16), "K = 60 is not a multiple of 8");
  EXPECT_EQ(of_rows(64, 60, DType::kBFloat16), "V = 60 is not a multiple of 8");
  Problem p = good;
  p.v.dtype = DType::kFloat32;
  EXPECT_EQ(refusal(p, wanted), "q, k, v are bf16, bf16, fp32; needs bf16 for all three");
  p = good;
  p.k.alignment = 8;
  EXPECT_EQ(refusal(p, wanted), "k is aligned to 8 bytes, needs 16");
  Gradients gradients = wanted;
  gradients.d_o->dtype = DType::kFloat32;
  EXPECT_EQ(refusal(good, gradients), "d_o is fp32, needs bf16");
  gradients = wanted;
  gradients.d_o->alignment = 8;
  EXPECT_EQ(refusal(good, gradients), "d_o is aligned to 8 bytes, needs 16");
  // What the forward writes and d_o that is not there are no reasons.
  p = good;
  p.o.alignment = 2;
  EXPECT_EQ(backward_of(
                p, {.d_final_state = contiguous(DType::kFloat32, {1, 64, 128, 128}), .dq = good.q})
                .plan.implementation,
            "cuda.sm80.staged");
}

TEST(Planner, TheBackwardOfFp16RowsSaysWhatItDeclines) {
  Problem good = rows_of(65536, 2, 128, 128, DType::kFloat16);
  good.gate_mode = GateMode::kBounded;
  good.A_log = contiguous(DType::kFloat32, {2});
  good.beta_mode = BetaMode::kSigmoid;
  good.qk_l2norm = true;
  good.initial_state = StateDesc{contiguous(DType::kFloat32, {1, 2, 128, 128}), 1, false};
  const Gradients wanted{.d_o = good.o, .dq = good.q, .dk = good.k, .dv = good.v, .dg = good.g};
  const BackwardPlan served = backward_of(good, wanted);
  EXPECT_EQ(served.plan.implementation, "cuda.sm90.staged");
  const std::string text = served.to_text(true);
  for (const char* part :
       {"chunk_grad_sm90, fp16", "chunk_intra_fp16: factors in fp16", "behind chunks, dv",
        "segments declined: they begin from states of bf16 factors"})
    EXPECT_NE(text.find(part), std::string::npos) << part << text;
  EXPECT_EQ(text.find("fallback"), std::string::npos) << text;

  const auto refusal = [&](const auto& change) {
    Problem p = good;
    Gradients gradients = wanted;
    change(p, gradients);
    const BackwardPlan backward = backward_of(p, gradients);
    EXPECT_EQ(backward.plan.implementation, "cuda.smxx.recurrent");
    for (const Candidate& row : backward.plan.candidates)
      if (row.name == "cuda.sm90.staged") return row.reason;
    return std::string();
  };
  using P = Problem;
  using G = Gradients;
  EXPECT_EQ(refusal([](P& p, G&) { p.k.dtype = DType::kFloat32; }), "k is fp32, needs fp16");
  EXPECT_EQ(refusal([](P& p, G&) { p.v.alignment = 8; }), "v is aligned to 8 bytes, needs 16");
  EXPECT_EQ(refusal([](P& p, G&) { p.qk_l2norm = false; }),
            "q and k are not normalised by the call");
  EXPECT_EQ(refusal([](P& p, G&) { p.beta_mode = BetaMode::kPlain; }), "no sigmoid bounds beta");
  EXPECT_EQ(refusal([](P& p, G&) { p.scale = 17; }), "scale = 17 is not 2^-8 to 2^4 in size");
  EXPECT_EQ(refusal([](P& p, G&) { p.gate_mode = GateMode::kLog, p.A_log.reset(); }),
            "gates are logarithms, which may be positive");
  EXPECT_EQ(refusal([](P& p, G&) { p.lower_bound = -6; }), "lower_bound = -6 is below -5.19");
  EXPECT_EQ(refusal([](P&, G& g) { g.d_o->dtype = DType::kBFloat16; }),
            "d_o is not of fp16 rows aligned to 16 bytes");
  EXPECT_EQ(refusal([](P&, G& g) { g.dq->dtype = DType::kFloat32; }),
            "dq is not of fp16 rows aligned to 16 bytes");
  EXPECT_EQ(refusal([](P&, G& g) { g.dk->alignment = 8; }),
            "dk is not of fp16 rows aligned to 16 bytes");
  EXPECT_EQ(refusal([](P& p, G& g) { p.g.strides[3] = 0, g.dg = p.g; }),
            "dg has one gradient a head");
  EXPECT_EQ(refusal([](P& p, G& g) { g.d_initial_state = p.initial_state->tensor; }),
            "d_initial_state is wanted, which may be far below d_o");
  Problem small = good;
  small.key_dim = small.value_dim = 64;
  small.initial_state.reset();
  small.q = small.k = small.g = small.v = small.o = contiguous(DType::kFloat16, {1, 65536, 2, 64});
  const BackwardPlan left = backward_of(small, {.d_o = small.o, .dq = small.q});
  EXPECT_EQ(left.plan.implementation, "cuda.smxx.recurrent");
  EXPECT_NE(left.to_text(true).find("cuda.sm90.staged: K = 64, V = 64; fp16 needs 128"),
            std::string::npos)
      << left.to_text(true);
  // Another card has kernels for bf16 alone.
  Plan forward;
  throw_if_error(make_plan(good, {}, gpu_facts(108, 80), {}, &forward));
  BackwardPlan backward;
  throw_if_error(make_backward_plan(forward, wanted, {}, &backward));
  EXPECT_EQ(backward.plan.implementation, "cuda.smxx.recurrent");
}

TEST(Planner, GroupsOfHeadsBoundTheWorkspaceOfABackward) {
  const auto plan_of = [](int64_t T, int64_t heads) {
    const Problem p = rows_of(T, heads, 128, 128, DType::kBFloat16);
    return backward_of(p, {.d_o = p.o, .dq = p.q});
  };
  const std::size_t bound = 2'400'000'000;
  const BackwardPlan one = plan_of(8192, 64);
  EXPECT_LT(one.plan.workspace_bytes, bound);
  EXPECT_NE(one.to_text(true).find("heads: one group"), std::string::npos) << one.to_text(true);
  const BackwardPlan several = plan_of(32768, 64);
  EXPECT_LT(several.plan.workspace_bytes, bound);
  EXPECT_GT(several.plan.workspace_bytes, bound / 2);
  EXPECT_NE(several.to_text(true).find("heads: 3 groups of 22 of 64 q/k heads"), std::string::npos)
      << several.to_text(true);
  // A head alone may take more.
  const BackwardPlan large = plan_of(2'000'000, 2);
  EXPECT_GT(large.plan.workspace_bytes, bound);
  EXPECT_NE(large.to_text(true).find("heads: 2 groups of 1 of 2 q/k heads"), std::string::npos);
  // The same bytes a token and head, about 3.1 KB.
  EXPECT_NEAR(plan::bytes_a_token(one.plan, one.plan.workspace_bytes), 3104, 40);
  EXPECT_GT(one.plan.cost.serial_us, one.plan.cost.roofline_us);
}

TEST(Planner, SegmentsOfABackwardAreThoseAskedOfTheForward) {
  const auto plan_of = [](int64_t T, int64_t heads, const PlanOptions& options = {}) {
    const Problem p = rows_of(T, heads, 128, 128, DType::kBFloat16);
    Plan forward;
    throw_if_error(make_plan(p, {}, gpu_facts(132), options, &forward));
    BackwardPlan backward;
    throw_if_error(make_backward_plan(forward, {.d_o = p.o, .dq = p.q}, {}, &backward));
    return backward.plan;
  };
  const Plan few = plan_of(32768, 4), off = plan_of(32768, 4, policy(SegmentPolicy::kOff));
  EXPECT_TRUE(few.segmented);
  EXPECT_EQ(few.resolved.segment_method, SegmentMethod::kScanMergeForward);
  EXPECT_NE(few.to_text(true).find("auto: segments of "), std::string::npos) << few.to_text(true);
  EXPECT_GT(off.cost.serial_us, 1.12 * few.cost.segmented_us);
  EXPECT_FALSE(off.segmented);
  EXPECT_EQ(off.segments.size(), 0u);
  EXPECT_NE(off.to_text(true).find("off: asked for"), std::string::npos) << off.to_text(true);
  EXPECT_EQ(plan_of(32768, 4, test::fixed_segments(5)).segments.size(), 5u);
  // M, B, D and two states of 4 heads, and some words a segment.
  const std::size_t n = few.segments.size(), more = few.workspace_bytes - off.workspace_bytes;
  EXPECT_GE(more, n * 4 * 5 * 128 * 128 * 4);
  EXPECT_LE(more, n * 4 * 5 * 128 * 128 * 4 + n * 100 + 1024);
  for (const auto& [T, heads] : {std::pair{8192, 64}, std::pair{256, 8}, std::pair{64, 1}}) {
    const Plan declined = plan_of(T, heads);
    EXPECT_FALSE(declined.segmented) << T;
    EXPECT_NE(declined.to_text(true).find("auto: serial"), std::string::npos)
        << declined.to_text(true);
    EXPECT_EQ(declined.stages.size(), plan_of(T, heads, policy(SegmentPolicy::kOff)).stages.size());
  }
  // Segments are sequences of one row of tokens.
  Problem rows = rows_of(32768, 4, 128, 128, DType::kBFloat16);
  rows.batch = rows.num_sequences = 2;
  for (TensorDesc* desc : {&rows.q, &rows.k, &rows.v, &rows.g, &rows.o})
    *desc = contiguous(DType::kBFloat16, {2, 32768, 4, 128});
  rows.beta = contiguous(DType::kBFloat16, {2, 32768, 4});
  Gradients gradients{.d_o = rows.o, .dq = rows.q, .dv = rows.v};
  EXPECT_TRUE(backward_of(rows, gradients).plan.segmented);
  gradients.dv->strides[0] += 8;
  const Plan apart = backward_of(rows, gradients).plan;
  EXPECT_FALSE(apart.segmented);
  EXPECT_NE(apart.to_text(true).find("segments declined: the rows of dv do not follow each other"),
            std::string::npos)
      << apart.to_text(true);
}

TEST(Planner, ChunksStartWithTheirSequence) {
  EXPECT_EQ(plan_for("17,0,8,1", 1, cpu_facts()).chunk_offsets,
            (std::vector<int64_t>{0, 3, 3, 4, 5}));
  EXPECT_EQ(plan_for("65,64", 1, gpu_facts(132)).chunk_offsets, (std::vector<int64_t>{0, 2, 3}));
}

TEST(Planner, CpuIsSerialUnlessAsked) {
  EXPECT_FALSE(plan_for("128K", 4, cpu_facts()).segmented);
  EXPECT_TRUE(plan_for("128K", 4, cpu_facts(), test::fixed_segments(4)).segmented);
}

TEST(Planner, BatchInvariantLooksAtEachSequenceAlone) {
  const Plan alone = plan_for("128K", 4, gpu_facts(132), policy(SegmentPolicy::kAuto), true);
  const Plan batch = plan_for("128K,8x64K", 4, gpu_facts(132), policy(SegmentPolicy::kAuto), true);
  const auto first = [](const Plan& plan) {
    std::vector<Segment> found;
    for (const Segment& segment : plan.segments)
      if (segment.sequence == 0) found.push_back(segment);
    return found;
  };
  ASSERT_TRUE(alone.segmented);
  EXPECT_EQ(first(alone), first(batch));
}

TEST(Planner, GpuPlansAreMadeWithoutAGpu) {
  const Plan plan = plan_for("64K", 8, gpu_facts(132));
  EXPECT_EQ(plan.implementation, "cuda.sm90.fused");
  for (const Candidate& row : plan.candidates)
    EXPECT_EQ(row.reason == "runs on cpu", row.name.starts_with("cpu.")) << row.name;
}

TEST(Planner, GpusBeforeSm80HaveNone) {
  DeviceFacts facts = gpu_facts(80);
  facts.compute_capability = 75;
  const Plan plan = plan_for("64K", 8, facts);
  EXPECT_TRUE(plan.implementation.empty());
  const Status status = run(plan, {}, nullptr, 0);
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_NE(plan.to_text(true).find("none in this build"), std::string::npos);
  const Status why = supported(plan.problem, facts);
  EXPECT_NE(why.message().find("cuda.smxx.recurrent"), std::string::npos) << why.message();
}

TEST(Planner, IntraFormsAreNamedAndChecked) {
  std::vector<int64_t> cu;
  const Problem p = packed({64}, 1, &cu);
  PlanOptions options;
  Plan plan;
  options.intra_form = static_cast<IntraForm>(3);
  EXPECT_EQ(make_plan(p, cu, gpu_facts(132), options, &plan).message(),
            "intra_form: value 3 is unknown");
  options.intra_form = static_cast<IntraForm>(-1);
  EXPECT_EQ(make_plan(p, cu, gpu_facts(132), options, &plan).code(), StatusCode::kInvalidArgument);
  options.intra_form = IntraForm::kToken;
  ASSERT_TRUE(make_plan(p, cu, cpu_facts(), options, &plan).ok());
  EXPECT_NE(plan.reasons.back().find("has one form"), std::string::npos);
}

TEST(Planner, BackendsByNameOrPart) {
  std::vector<int64_t> cu;
  const Problem p = packed({64}, 1, &cu);
  const auto choose = [&](const std::string& name, Plan* plan) {
    return make_plan(p, cu, cpu_facts(), test::with_backend(name), plan);
  };
  Plan plan;
  ASSERT_TRUE(choose("oracle", &plan).ok());
  EXPECT_EQ(plan.implementation, "cpu.oracle");
  ASSERT_TRUE(choose("blocked.portable", &plan).ok());
  EXPECT_EQ(plan.implementation, "cpu.blocked.portable");
  ASSERT_TRUE(choose("cpu.blocked", &plan).ok());
  EXPECT_EQ(plan.implementation, test::backends().front());
  for (const char* unknown : {"block", "avx", "gpu", "portable.", "cpu.blocked.avx1024"}) {
    const Status status = choose(unknown, &plan);
    EXPECT_EQ(status.code(), StatusCode::kUnavailable) << unknown;
    EXPECT_NE(status.message().find("backend"), std::string::npos);
  }
}

TEST(Planner, ForcedBackendsRun) {
  const check::Inputs inputs = check::generate(test::shape(20, 1, 16, 16));
  for (const std::string& name : test::backends())
    EXPECT_EQ(test::run_inputs(inputs, {.plan = test::with_backend(name)}).plan.implementation,
              name);
}

TEST(Planner, OracleHasNoSegments) {
  PlanOptions options = test::fixed_segments(4);
  options.backend = "oracle";
  const Plan plan = plan_for("1000", 1, cpu_facts(), options);
  EXPECT_FALSE(plan.segmented);
  EXPECT_NE(plan.reasons.back().find("no segments"), std::string::npos);
}

TEST(Planner, Float64GoesToTheOracleWithAReason) {
  std::vector<int64_t> cu_seqlens;
  Problem p = packed({100, 30}, 2, &cu_seqlens);
  p.v.dtype = DType::kFloat64;
  Plan plan;
  ASSERT_TRUE(make_plan(p, cu_seqlens, cpu_facts(), {}, &plan).ok());
  EXPECT_EQ(plan.implementation, "cpu.oracle");
  const std::string reason = "v: dtype fp64, only backend oracle computes it, on the CPU";
  EXPECT_EQ(plan.reasons.back(), reason);
  EXPECT_EQ(plan.candidates[0].reason, reason);
  // A gradient in fp64 asks for it as well.
  p.v.dtype = DType::kBFloat16;
  ASSERT_TRUE(make_plan(p, cu_seqlens, cpu_facts(), {}, &plan).ok());
  EXPECT_NE(plan.implementation, "cpu.oracle");
  Gradients gradients;
  gradients.d_o = p.o;
  gradients.dq = contiguous(DType::kFloat64, {1, p.num_tokens, 2, 128});
  BackwardPlan backward;
  ASSERT_TRUE(make_backward_plan(plan, gradients, {}, &backward).ok());
  EXPECT_EQ(backward.plan.implementation, "cpu.oracle");
  EXPECT_EQ(backward.plan.reasons.back(),
            "dq: dtype fp64, only backend oracle computes it, on the CPU");
  gradients.dq->dtype = DType::kFloat32;
  ASSERT_TRUE(make_backward_plan(plan, gradients, {}, &backward).ok());
  EXPECT_NE(backward.plan.implementation, "cpu.oracle");
}

TEST(Planner, OracleKeepsNothing) {
  PlanOptions options = test::with_backend("oracle");
  options.keep = KeepPolicy::kStates;
  const Plan plan = plan_for("5000", 2, cpu_facts(), options);
  EXPECT_EQ(plan.saved_bytes, 0u);
  EXPECT_EQ(plan.resolved.keep, KeepPolicy::kNothing);
  EXPECT_EQ(plan.reasons.back(), "keep: cpu.oracle keeps nothing and makes the states again");
}

TEST(Planner, WorkspaceBlocksAreDisjointAndAligned) {
  const Plan plan =
      plan_for("1000", 2, cpu_facts(), test::fixed_segments(3, SegmentMethod::kOnePass));
  std::size_t at = 0;
  for (const WorkspaceBlock& block : plan.workspace) {
    EXPECT_EQ(block.offset, at);
    EXPECT_EQ(block.offset % kWorkspaceAlignment, 0u);
    EXPECT_GT(block.bytes, 0u);
    at += block.bytes;
  }
  EXPECT_EQ(at, plan.workspace_bytes);
}

TEST(Planner, MemoryBeyondInputsAndOutputsIsSmall) {
  const Plan plan = plan_for("4096", 4, cpu_facts(), policy(SegmentPolicy::kAuto));
  EXPECT_LE(plan.workspace_bytes, std::size_t{64} << 20);
}

TEST(Planner, LedgerRefusesOverflow) {
  std::vector<WorkspaceBlock> blocks;
  std::size_t total = 0;
  EXPECT_TRUE(plan::add_block(blocks, total, "a", 10, 10));
  EXPECT_FALSE(plan::add_block(blocks, total, "b", SIZE_MAX / 2, 4));
  EXPECT_FALSE(plan::add_block(blocks, total, "c", std::size_t{1} << 62, 1));
  EXPECT_TRUE(plan::add_block(blocks, total, "empty", 0, 8));
  EXPECT_EQ(blocks.size(), 1u);
  EXPECT_EQ(plan::find_block(blocks, nullptr, "nothing"), nullptr);
}

TEST(Planner, AMillionSequences) {
  const Plan plan = plan_for("1000000x3", 1, cpu_facts());
  EXPECT_EQ(plan.cu_seqlens.size(), 1000001u);
  EXPECT_FALSE(plan.segmented);
}

TEST(Planner, SupportedSaysWhyNot) {
  std::vector<int64_t> cu;
  const Problem p = packed({64}, 1, &cu);
  EXPECT_TRUE(supported(p, cpu_facts()).ok());
  EXPECT_TRUE(supported(p, gpu_facts(132)).ok());
  DeviceFacts facts = gpu_facts(132);
  facts.compute_capability = 75;
  const Status status = supported(p, facts);
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_NE(status.message().find("cpu.oracle runs on cpu"), std::string::npos);
  Problem bad = p;
  bad.key_dim = 0;
  EXPECT_EQ(supported(bad, cpu_facts()).code(), StatusCode::kInvalidArgument);
}

TEST(Planner, SupportedReadsBackendAndKeep) {
  const auto why = [](int64_t heads, const PlanOptions& options, const DeviceFacts& device) {
    std::vector<int64_t> cu;
    return supported(packed({512}, heads, &cu), device, options);
  };
  PlanOptions keep, fused;
  keep.keep = KeepPolicy::kChunks, fused.backend = "fused";
  const DeviceFacts hopper = gpu_facts(132);
  EXPECT_TRUE(why(50, keep, hopper).ok());  // 100 of 132 SMs
  const Status few = why(49, keep, hopper);
  EXPECT_EQ(few.code(), StatusCode::kUnsupported);
  EXPECT_EQ(few.message(),
            "keep: 49 chains of K = 128 keep 98 of 132 SMs busy, fewer than three quarters; a "
            "forward that cuts them gains more");
  EXPECT_TRUE(why(49, {}, hopper).ok());
  EXPECT_TRUE(why(1, keep, cpu_facts()).ok());
  EXPECT_EQ(why(50, keep, gpu_facts(132, 80)).code(), StatusCode::kUnsupported);
  keep.backend = "fused";  // who names one has made up his mind
  EXPECT_TRUE(why(49, keep, hopper).ok());
  EXPECT_TRUE(why(1, fused, hopper).ok());
  EXPECT_TRUE(why(1, fused, gpu_facts(108, 80)).ok());  // the portable form
  fused.backend = "sm90.fused";
  EXPECT_EQ(why(1, fused, gpu_facts(108, 80)).code(), StatusCode::kUnavailable);
  keep.kept_state_every = 7;
  EXPECT_EQ(why(50, keep, hopper).code(), StatusCode::kInvalidArgument);
  // A plan that is asked to keep does so.
  std::vector<int64_t> cu;
  const Problem p = packed({512}, 1, &cu);
  PlanOptions asked;
  asked.keep = KeepPolicy::kChunks;
  Plan plan;
  ASSERT_TRUE(make_plan(p, cu, hopper, asked, &plan).ok());
  EXPECT_GT(plan.saved_bytes, 0u);
}

TEST(Planner, AssumesOfAGpuWhatCardsOfItsCapabilityHave) {
  const DeviceFacts h200 = gpu_facts(132), a100 = gpu_facts(108, 80), a30 = gpu_facts(56, 80);
  EXPECT_EQ(h200.memory_bytes_per_second, 4.24e12);
  EXPECT_EQ(h200.gigahertz, 1.75);
  EXPECT_EQ(gpu_facts(66).memory_bytes_per_second, 4.24e12 / 2);
  EXPECT_NEAR(a100.memory_bytes_per_second, 0.88 * 2039e9, 1e3);
  EXPECT_EQ(a100.gigahertz, 1.41);
  EXPECT_NEAR(a30.memory_bytes_per_second, 0.88 * 933e9, 1e3);
  EXPECT_NEAR(gpu_facts(48, 121).memory_bytes_per_second, 0.88 * 273e9, 1e3);  // DGX Spark
  EXPECT_NEAR(gpu_facts(150, 89).memory_bytes_per_second, 0.88 * 864e9 * 150 / 142, 1e3);
  EXPECT_EQ(gpu_facts(84, 125).gigahertz, gpu_facts(48, 121).gigahertz);  // a later one
  EXPECT_EQ(gpu_facts(108, 75).gigahertz, a30.gigahertz);                 // an older one
  EXPECT_EQ(gpu_facts(INT32_MIN, 80).gigahertz, a30.gigahertz);           // refused by a plan
}

/// Facts of a caller who knows neither: those of an H200, as the clock is.
TEST(Planner, PredictsWithoutRates) {
  std::vector<int64_t> cu;
  const Problem p = packed({8192}, 64, &cu);
  for (const int32_t capability : {80, 90}) {
    DeviceFacts facts = gpu_facts(132, capability);
    facts.memory_bytes_per_second = facts.gigahertz = 0;
    Plan plan;
    ASSERT_TRUE(make_plan(p, cu, facts, {}, &plan).ok());
    EXPECT_GT(plan.cost.roofline_us, 1);
    EXPECT_LT(plan.cost.roofline_us, 1e6);
    EXPECT_EQ(plan.to_json().find("inf"), std::string::npos) << plan.to_json();
    EXPECT_EQ(plan.to_text(true).find("-9223"), std::string::npos) << plan.to_text(true);
  }
}

TEST(Planner, TakesTheDriversWordWhereItIsAnother) {
  const auto with = [](DeviceFacts facts, int clock, int memory_clock, int bus) {
    plan::take_driver_rates(
        {.clock_khz = clock, .memory_clock_khz = memory_clock, .memory_bus_bits = bus}, &facts);
    return facts;
  };
  const DeviceFacts assumed = gpu_facts(84, 86);  // an RTX A6000
  const auto rates = [](const DeviceFacts& x) {
    return std::pair{x.memory_bytes_per_second, x.gigahertz};
  };
  EXPECT_EQ(rates(with(assumed, 1800000, 8001000, 384)), rates(assumed));  // as assumed
  const DeviceFacts a40 = with(assumed, 1300000, 7251000, 256);
  EXPECT_NEAR(a40.memory_bytes_per_second, 0.88 * 464.064e9, 1e3);
  EXPECT_NEAR(a40.gigahertz, 0.9 * 1.3, 1e-9);
  EXPECT_EQ(rates(with(assumed, 0, 0, 0)), rates(assumed));  // it does not know
  EXPECT_EQ(rates(with(assumed, -1, 7251000, 0)), rates(assumed));
  // The constants of Hopper's kernels were fitted so, on an H100 too.
  EXPECT_EQ(rates(with(gpu_facts(132), 1980000, 2619000, 5120)), rates(gpu_facts(132)));
}

/// Rates that a user gives take the place of those that are assumed.
TEST(Planner, RefusesRatesThatNoGpuHas) {
  std::vector<int64_t> cu;
  const Problem p = packed({512}, 1, &cu);
  const auto why = [&](double rate, double clock) {
    DeviceFacts facts = gpu_facts(108, 80);
    facts.memory_bytes_per_second = rate, facts.gigahertz = clock;
    Plan plan;
    return make_plan(p, cu, facts, {}, &plan).message();
  };
  EXPECT_EQ(why(1e12, 1.4), "");
  EXPECT_EQ(why(1e12, 0), "");
  EXPECT_EQ(why(-1, 1.4), "device: memory_bytes_per_second = -1 is neither 0 nor in 1e6..1e18");
  EXPECT_EQ(why(1e12, 1e4), "device: gigahertz = 10000 is neither 0 nor in 0.001..1000");
  EXPECT_EQ(why(1e12, NAN), "device: gigahertz = nan is neither 0 nor in 0.001..1000");
}

/// cuda.sm80.fused beside cuda.sm80.staged. The first counts of heads that it serves are predicted.
TEST(Planner, TakesOneKernelOnOtherCardsWhereItIsPredictedToBeFaster) {
  const auto plan_on = [](const DeviceFacts& card, int64_t heads, int64_t K = 128,
                          const PlanOptions& options = {}, const char* lengths = "8192") {
    std::vector<int64_t> cu;
    Problem p = packed(tools::parse_lengths(lengths), heads, &cu);
    p.key_dim = p.value_dim = K;
    const int64_t T = p.num_tokens;
    p.q = p.k = p.v = p.g = p.o = contiguous(DType::kBFloat16, {1, T, heads, K});
    Plan plan;
    throw_if_error(make_plan(p, cu, card, options, &plan));
    return plan;
  };
  const struct {
    int32_t sms, capability;
    int64_t staged, fused;  // heads
  } cards[] = {{108, 80, 24, 48},  {82, 86, 16, 64},   {142, 89, 8, 48},
               {148, 100, 32, 64}, {148, 103, 32, 64}, {170, 120, 16, 64},
               {48, 121, 2, 24},   {16, 87, 1, 16},    {20, 110, 1, 16}};
  for (const auto& [sms, capability, staged, fused] : cards) {
    const DeviceFacts card = gpu_facts(sms, capability);
    EXPECT_EQ(plan_on(card, staged).implementation, "cuda.sm80.staged") << card.name;
    const Plan plan = plan_on(card, fused);
    EXPECT_EQ(plan.implementation, "cuda.sm80.fused") << card.name;
    const std::string text = plan.to_text(true);
    EXPECT_NE(text.find("predicted: "), std::string::npos) << text;
    EXPECT_NE(text.find(" has timed it, so 1.15 times that counts"), std::string::npos) << text;
    EXPECT_NE(text.find("predicted (constants of an H200, at "), std::string::npos) << text;
    EXPECT_NE(
        plan_on(card, staged).to_text(true).find(" us in stages; no card of compute capability "),
        std::string::npos);
    // Lengths and `off` never change the kernel.
    for (const char* lengths : {"64", "100000", "9x1000,0"})
      EXPECT_EQ(plan_on(card, fused, 128, {}, lengths).implementation, "cuda.sm80.fused");
    EXPECT_EQ(plan_on(card, staged, 128, policy(SegmentPolicy::kOff)).implementation,
              "cuda.sm80.staged");
    EXPECT_EQ(plan_on(card, fused, 128, test::fixed_segments(4)).implementation,
              "cuda.sm80.staged");
    EXPECT_EQ(plan_on(card, 132, 64).implementation, "cuda.sm80.fused") << card.name;
  }
  for (const int64_t heads : {1, 32, 64})
    EXPECT_EQ(plan_on(gpu_facts(132), heads).implementation, "cuda.sm90.fused");
  // Who names it has it, and where stages have nothing to serve with it needs no name.
  EXPECT_EQ(plan_on(gpu_facts(108, 80), 1, 128, test::with_backend("fused")).implementation,
            "cuda.sm80.fused");
  std::vector<int64_t> cu;
  Problem p = packed({8192}, 1, &cu);
  p.checkpoints = StateDesc{contiguous(DType::kFloat32, {512, 1, 128, 128}), 512, false};
  p.checkpoint_every = 16;
  Plan plan;
  throw_if_error(make_plan(p, cu, gpu_facts(108, 80), {}, &plan));
  EXPECT_EQ(plan.implementation, "cuda.sm80.fused") << plan.to_text(true);
}

// Times of both forms on an H200: `./dev gpu-bench fused`.
TEST(Planner, TakesOneKernelWhereSegmentsCanBeJoinedOrHeadsFillTheCard) {
  const auto chosen = [](const char* lengths, int64_t heads, const PlanOptions& options = {}) {
    return plan_for(lengths, heads, gpu_facts(132), options).implementation;
  };
  const std::string fused = "cuda.sm90.fused", staged = "cuda.sm80.staged";
  for (const int64_t heads : {1, 2, 4, 8, 12, 16, 18, 19, 24, 32, 64, 66, 67, 96, 132, 200})
    EXPECT_EQ(chosen("8192", heads), fused) << heads;
  EXPECT_EQ(chosen("8192", 64, policy(SegmentPolicy::kOff)), fused);
  EXPECT_EQ(chosen("8192", 64, policy(SegmentPolicy::kCula)), staged);
  // Outputs that are not dense have no one pass: few heads would leave the card idle.
  for (const int64_t heads : {4, 18, 19, 64}) {
    std::vector<int64_t> cu;
    Problem p = packed({8192}, heads, &cu);
    p.o.strides[1] += 128;
    Plan plan;
    throw_if_error(make_plan(p, cu, gpu_facts(132), {}, &plan));
    EXPECT_EQ(plan.implementation, heads < 19 ? staged : fused) << heads;
    EXPECT_FALSE(heads >= 19 && plan.segmented);
  }
}

TEST(Planner, OnePassTakesALongerFirstSegment) {
  const Plan plan = plan_for("8192,100", 32, gpu_facts(132));
  ASSERT_TRUE(plan.segmented);
  EXPECT_EQ(plan.resolved.segment_method, SegmentMethod::kOnePass);
  ASSERT_EQ(plan.segments.size(), 3u);  // two of the long one
  const auto length = [&](std::size_t n) { return plan.segments[n].end - plan.segments[n].begin; };
  EXPECT_GT(length(0), length(1) + 1024);
  EXPECT_EQ(length(0) + length(1), 8192);
  EXPECT_EQ(length(0) % 64, 0);
  EXPECT_EQ(length(2), 100);
  EXPECT_LT(plan.cost.segmented_us, plan.cost.fused_us);
  // One decision for bits that must not depend on neighbours: the same as alone.
  const Plan alone = plan_for("8192", 32, gpu_facts(132), {}, true);
  const Plan beside = plan_for("8192,100", 32, gpu_facts(132), {}, true);
  ASSERT_EQ(alone.segments.size(), 2u);
  EXPECT_EQ(beside.segments[0], alone.segments[0]);
  EXPECT_EQ(beside.segments[1], alone.segments[1]);
}

TEST(Planner, TransitionsStopWhereSegmentsAreLongAndTheirNormNeverGrows) {
  const auto stop = [](int64_t tokens, int64_t heads, const auto& change) {
    std::vector<int64_t> cu;
    Problem p = packed({tokens}, heads, &cu);
    p.gate_mode = GateMode::kBounded;
    p.beta_mode = BetaMode::kSigmoid;
    p.qk_l2norm = true;
    change(&p);
    Plan plan;
    throw_if_error(make_plan(p, cu, gpu_facts(132), {}, &plan));
    const bool kept = std::any_of(plan.workspace.begin(), plan.workspace.end(),
                                  [](const auto& block) { return block.name == "exit_token"; });
    EXPECT_EQ(kept, plan.early_exit);
    return plan.early_exit;
  };
  const auto nothing = [](Problem*) {};
  EXPECT_TRUE(stop(262144, 16, nothing));
  EXPECT_TRUE(stop(262144, 4, nothing));
  EXPECT_FALSE(stop(8192, 16, nothing));
  EXPECT_FALSE(stop(262144, 64, nothing));  // nothing is cut
  EXPECT_FALSE(stop(262144, 16, [](Problem* p) { p->qk_l2norm = false; }));
  EXPECT_FALSE(stop(262144, 16, [](Problem* p) { p->gate_mode = GateMode::kLog; }));
  EXPECT_FALSE(stop(262144, 16, [](Problem* p) { p->beta_mode = BetaMode::kPlain; }));
  EXPECT_FALSE(stop(262144, 16, [](Problem* p) { p->batch_invariant = true; }));
}

TEST(Planner, SpansTakeSegmentsThatFillTheCardWithTransitionsThatMayStop) {
  const auto plan_of = [](const std::vector<int64_t>& lengths, int64_t heads, bool may_stop) {
    std::vector<int64_t> cu;
    Problem p = packed(lengths, heads, &cu);
    p.gate_mode = GateMode::kBounded;
    p.beta_mode = may_stop ? BetaMode::kSigmoid : BetaMode::kPlain;
    p.qk_l2norm = true;
    PlanOptions options;
    options.spans = true;
    Plan plan;
    throw_if_error(make_plan(p, cu, gpu_facts(132), options, &plan));
    return plan;
  };
  if (!has_two_phases()) GTEST_SKIP() << "a build without CUDA has no phases of a forward";
  // Behind the empty one: a chain a cluster, of which there are 66.
  for (const auto& [tokens, heads, segments] :
       {std::tuple<int64_t, int64_t, std::size_t>{32768, 16, 4}, {8192, 64, 1}, {65536, 16, 4}}) {
    const Plan plan = plan_of({tokens}, heads, true);
    ASSERT_EQ(plan.segments.size(), segments + 1) << tokens << " " << heads;
    EXPECT_EQ(plan.segments[0].begin, plan.segments[0].end);
    EXPECT_TRUE(plan.early_exit) << tokens << " " << heads;
    EXPECT_FALSE(plan_of({tokens}, heads, false).early_exit) << tokens << " " << heads;
  }
  // In line, where those that stop would leave a quarter of the card idle, or are short.
  EXPECT_FALSE(plan_of({8192}, 48, true).early_exit);
  EXPECT_FALSE(plan_of({2048}, 4, true).early_exit);
  // No tokens, no segments but one of each kind.
  EXPECT_EQ(plan_of({0}, 4, true).segments.size(), 2u);
}

/// What a cut sequence takes does not grow with short ones beside it: those have no states.
TEST(Planner, UncutSequencesTakeNoStates) {
  const auto bytes_of = [](const std::string& lengths) {
    PlanOptions options = test::fixed_segments(3, SegmentMethod::kOnePass);
    options.backend = "fused";
    const Plan plan = plan_for(lengths, 32, gpu_facts(132), options);
    EXPECT_TRUE(plan.segmented) << lengths;
    std::size_t bytes = 0;
    for (const WorkspaceBlock& block : plan.workspace)
      if (block.name != "transition_output") bytes += block.bytes;  // that is one of tokens
    return bytes;
  };
  EXPECT_LT(bytes_of("64K,1000x16"), bytes_of("64K") + 1000 * 256);
}

TEST(Planner, LengthsAndBatchesDoNotChangeTheKernel) {
  for (const int64_t heads : {8, 18, 19, 64})
    for (const bool invariant : {false, true}) {
      const auto chosen = [&](const char* lengths) {
        return plan_for(lengths, heads, gpu_facts(132), {}, invariant).implementation;
      };
      const std::string one = chosen("1");
      for (const char* lengths : {"64", "512", "8192", "128K", "64x128", "8x4096", "16K,16x1K"})
        EXPECT_EQ(chosen(lengths), one) << lengths << ", " << heads << " heads";
      std::vector<int64_t> cu;
      Plan bounds;
      Problem p = packed({70, 300}, heads, &cu);
      p.batch_invariant = invariant;
      throw_if_error(make_plan_from_bounds(p, gpu_facts(132), {}, &bounds));
      EXPECT_EQ(bounds.implementation, one);
    }
}

TEST(Planner, OneKernelSaysWhyItDoesNotServe) {
  const auto reason = [](const Plan& plan) {
    EXPECT_EQ(plan.implementation, "cuda.sm80.staged");
    for (const Candidate& row : plan.candidates)
      if (row.name == "cuda.sm90.fused") return row.reason;
    return std::string("not asked");
  };
  PlanOptions token;
  token.intra_form = IntraForm::kToken;
  EXPECT_EQ(reason(plan_for("8192", 64, gpu_facts(132), policy(SegmentPolicy::kFlashKda))),
            "context_parallel asks for segments");
  EXPECT_EQ(reason(plan_for("8192", 64, gpu_facts(132), token)),
            "intra_form asks for a form of stages");
  std::vector<int64_t> cu;
  Problem p = packed({64}, 16, &cu);
  p.o.strides[1] += 128;
  Plan plan;
  throw_if_error(make_plan(p, cu, gpu_facts(132), {}, &plan));
  EXPECT_NE(reason(plan).find("a sequence of 8192 tokens and 16 value heads is predicted to take "),
            std::string::npos);
}

TEST(Planner, OneKernelHoldsItsTimesAndNoSegments) {
  const Plan plan = plan_for("8192", 64, gpu_facts(132));
  EXPECT_FALSE(plan.segmented);
  EXPECT_EQ(plan.num_v_splits, 2);
  EXPECT_LT(plan.cost.fused_us, plan.cost.serial_us);
  EXPECT_GE(plan.cost.fused_us, plan.cost.roofline_us);
  EXPECT_EQ(plan_for("0,0", 4, gpu_facts(132)).cost.fused_us, 0);
}

TEST(Planner, JsonHoldsWhatTheTextSays) {
  const Plan plan = plan_for("128K,10x1K", 4, gpu_facts(152), policy(SegmentPolicy::kCula));
  const nlohmann::json json = nlohmann::json::parse(plan.to_json());
  EXPECT_EQ(json["context_parallel"]["policy"], "cula");
  EXPECT_EQ(json["segments_per_sequence"][0], 19);
  EXPECT_EQ(json["segments_per_sequence"].size(), 11u);
  EXPECT_EQ(json["implementation"], "cuda.sm80.staged");
  const std::string text = plan.to_text(true);
  EXPECT_NE(text.find("29 segments, 19 in the longest"), std::string::npos);
}

TEST(Planner, JsonSaysWhatAForwardKeeps) {
  for (const auto& [keep, asked, resolved] :
       {std::tuple{KeepPolicy::kNothing, "nothing", "nothing"},
        std::tuple{KeepPolicy::kStates, "states", "states"},
        std::tuple{KeepPolicy::kChunks, "chunks", "states"}}) {  // the CPU takes it so
    PlanOptions options;
    options.keep = keep;
    if (keep == KeepPolicy::kStates) options.kept_state_every = 128;
    const Plan plan = plan_for("1000", 2, cpu_facts(), options);
    const nlohmann::json json = nlohmann::json::parse(plan.to_json());
    EXPECT_EQ(json["requested"]["keep"], asked);
    EXPECT_EQ(json["requested"]["kept_state_every"], options.kept_state_every);
    EXPECT_EQ(json["resolved"]["keep"], resolved);
    EXPECT_EQ(json["resolved"]["kept_state_every"],
              keep == KeepPolicy::kStates ? 128 : kKeptStateEvery);
  }
}

TEST(Planner, HopperKeepsStatesAndErrorsOfChunks) {
  const auto plan_of = [](KeepPolicy keep, int32_t capability, int64_t heads, auto&& change) {
    std::vector<int64_t> cu;
    Problem p = packed({8192, 100}, heads, &cu);
    PlanOptions options;
    options.keep = keep;
    change(&p, &options);
    Plan plan;
    throw_if_error(make_plan(p, cu, gpu_facts(132, capability), options, &plan));
    return plan;
  };
  const auto nothing = [](Problem*, PlanOptions*) {};
  const auto says = [](const Plan& plan, const char* text) {
    return plan.implementation.empty() && plan.to_text(true).find(text) != std::string::npos;
  };
  const Plan kept = plan_of(KeepPolicy::kChunks, 90, 64, nothing);
  EXPECT_EQ(kept.implementation, "cuda.sm90.fused");
  EXPECT_EQ(kept.resolved.keep, KeepPolicy::kChunks);
  EXPECT_EQ(kept.saved_bytes, (8192u + 128u) * 64u * 768u);  // 128 tokens are two chunks
  // Few heads: nothing is cut, and no other backend is better, since none keeps.
  const Plan few = plan_of(KeepPolicy::kChunks, 90, 1, nothing);
  EXPECT_EQ(few.implementation, "cuda.sm90.fused");
  EXPECT_FALSE(few.segmented);
  EXPECT_NE(few.to_text(true).find("states and errors need the true start state"),
            std::string::npos);
  EXPECT_TRUE(says(plan_of(KeepPolicy::kStates, 90, 64, nothing),
                   "keeps states and errors of all chunks, or nothing"));
  EXPECT_TRUE(says(plan_of(KeepPolicy::kChunks, 80, 64, nothing), "keeps nothing for a backward"));
  const auto half = [](Problem* p, PlanOptions*) {
    for (TensorDesc* desc : {&p->q, &p->k, &p->v, &p->g, &p->o}) desc->dtype = DType::kFloat16;
    p->gate_mode = GateMode::kBounded, p->beta_mode = BetaMode::kSigmoid, p->qk_l2norm = true;
  };
  EXPECT_TRUE(says(plan_of(KeepPolicy::kChunks, 90, 64, half), "keeps states and errors of bf16"));
  const auto spans = [](Problem*, PlanOptions* options) { options->spans = true; };
  try {
    plan_of(KeepPolicy::kChunks, 90, 4, spans);
    ADD_FAILURE() << "a forward in two phases that keeps";
  } catch (const std::exception& refused) {
    EXPECT_NE(std::string(refused.what()).find("no forward in two phases; keep"), std::string::npos)
        << refused.what();
  }
}

TEST(Planner, ABackwardOfWhatWasKeptSparesItsMemory) {
  const auto plan_of = [](KeepPolicy keep, bool spans, DType d_o, BackwardPlan* plan) {
    std::vector<int64_t> cu;
    const Problem p = packed({8192}, 16, &cu);
    PlanOptions options;
    options.keep = keep;
    Plan forward;
    throw_if_error(make_plan(p, cu, gpu_facts(132, 90), options, &forward));
    Gradients gradients;
    gradients.d_o = p.o, gradients.dq = p.q, gradients.dk = p.k, gradients.dv = p.v;
    gradients.d_o->dtype = d_o;
    if (spans) gradients.d_final_state = contiguous(DType::kFloat32, {1, 16, 128, 128});
    PlanOptions backward;
    backward.spans = spans;
    return make_backward_plan(forward, gradients, backward, plan);
  };
  BackwardPlan kept, bare, other;
  throw_if_error(plan_of(KeepPolicy::kChunks, false, DType::kBFloat16, &kept));
  throw_if_error(plan_of(KeepPolicy::kNothing, false, DType::kBFloat16, &bare));
  EXPECT_EQ(kept.plan.implementation, "cuda.sm80.staged");
  EXPECT_EQ(kept.plan.saved_bytes, 8192u * 16u * 768u);
  EXPECT_EQ(bare.plan.saved_bytes, 0u);
  EXPECT_EQ(bare.plan.workspace_bytes - kept.plan.workspace_bytes, kept.plan.saved_bytes);
  EXPECT_EQ(kept.to_text(true).find("chunk_delta_h"), std::string::npos);
  EXPECT_NE(bare.to_text(true).find("chunk_delta_h"), std::string::npos);
  EXPECT_NE(kept.forward_id, bare.forward_id);
  // Gradients that the stages do not take: the other backward reads nothing of it.
  throw_if_error(plan_of(KeepPolicy::kChunks, false, DType::kFloat32, &other));
  EXPECT_EQ(other.plan.implementation, "cuda.smxx.recurrent");
  EXPECT_EQ(other.plan.saved_bytes, 0u);
  const Status halves = plan_of(KeepPolicy::kChunks, true, DType::kBFloat16, &other);
  EXPECT_NE(halves.message().find("no backward in two phases; the forward keeps"),
            std::string::npos)
      << halves.message();
}

/// Gated DeltaNet in bf16, K = V = 128: who serves the forward, by lengths that are known or not.
Plan plan_of_head_gates(const std::string& lengths, int64_t heads, int64_t value_heads,
                        const PlanOptions& options = {}, bool invariant = false,
                        bool known = true) {
  std::vector<int64_t> cu_seqlens;
  Problem p = packed(tools::parse_lengths(lengths), heads, &cu_seqlens);
  p.num_value_heads = value_heads;
  p.v = p.o = contiguous(DType::kBFloat16, {1, p.num_tokens, value_heads, 128});
  p.g = head_gates(DType::kFloat32, 1, p.num_tokens, value_heads);
  p.beta = contiguous(DType::kBFloat16, {1, p.num_tokens, value_heads});
  p.batch_invariant = invariant;
  p.gate_mode = GateMode::kLog;
  Plan plan;
  throw_if_error(known ? make_plan(p, cu_seqlens, gpu_facts(132), options, &plan)
                       : make_plan_from_bounds(p, gpu_facts(132), options, &plan));
  return plan;
}

constexpr const char *kGdn = "cuda.sm90.gdn", *kFused = "cuda.sm90.fused";

std::string why_not_gdn(const Plan& plan) {
  for (const Candidate& candidate : plan.candidates)
    if (candidate.name == kGdn) return candidate.reason;
  return "no candidate";
}

/// The faster one on an H200 (docs/design/gdn.md, docs/log/2026-11.md), where half of the heads
/// forget; 8x1024 of 16/32 heads take the same time.
TEST(Planner, TakesTheFasterKernelsOfOneGateAHead) {
  const struct {
    const char *lengths, *backend;
    int64_t heads, value_heads;
  } rows[] = {{"8192", kGdn, 16, 64},     {"4x2048", kGdn, 16, 64},   {"8x1024", kGdn, 16, 64},
              {"64K", kGdn, 2, 8},        {"2048", kGdn, 16, 32},     {"8192", kFused, 16, 32},
              {"32K", kGdn, 16, 32},      {"64x100", kFused, 16, 32}, {"200x20", kFused, 16, 32},
              {"8x1024", kFused, 16, 32}, {"8192", kGdn, 2, 8},       {"1024", kFused, 2, 8}};
  for (const auto& row : rows) {
    const Plan plan = plan_of_head_gates(row.lengths, row.heads, row.value_heads);
    EXPECT_EQ(plan.implementation, row.backend)
        << row.lengths << ", " << row.value_heads << " heads: " << why_not_gdn(plan);
  }
  EXPECT_EQ(why_not_gdn(plan_of_head_gates("200x20", 16, 32)),
            "predicted: 386 us, between heads that forget and heads that do not; "
            "cuda.sm90.fused 334 us");
}

TEST(Planner, LengthsDoNotChooseTheKernelWhereBitsMayNotDependOnThem) {
  for (const char* lengths : {"8192", "4x2048", "200x20", "64K"}) {
    const Plan invariant = plan_of_head_gates(lengths, 16, 64, {}, /*invariant=*/true);
    EXPECT_EQ(invariant.implementation, kFused);
    EXPECT_EQ(why_not_gdn(invariant), "batch_invariant: lengths must not change the kernel");
    const Plan off = plan_of_head_gates(lengths, 16, 64, policy(SegmentPolicy::kOff));
    EXPECT_EQ(off.implementation, kFused);
    EXPECT_EQ(why_not_gdn(off), "context_parallel is off: lengths must not change the kernel");
    const Plan bounds = plan_of_head_gates(lengths, 16, 64, {}, false, /*known=*/false);
    EXPECT_EQ(bounds.implementation, kFused);
    EXPECT_EQ(why_not_gdn(bounds), "lengths are not known, and cuda.sm90.fused cuts there");
  }
}

TEST(Planner, TakesTheKernelsOfOneGateAHeadWhereTheFusedOnesDoNotServe) {
  PlanOptions asked = test::fixed_segments(3), spans;
  for (const bool invariant : {false, true})
    EXPECT_EQ(plan_of_head_gates("200x20", 16, 32, asked, invariant).implementation, kGdn);
  spans.spans = true;
  if (!has_two_phases()) GTEST_SKIP() << "the rest needs a build with CUDA";
  const Plan plan = plan_of_head_gates("64K", 2, 8, spans);
  EXPECT_EQ(plan.implementation, kFused);
  EXPECT_EQ(why_not_gdn(plan), "spans are of cuda.sm90.fused");
}

/// Golden plans: tests/plan/golden/<name>.txt; write them anew with KDA_UPDATE_GOLDEN=1.
TEST(Planner, GoldenPlans) {
  const struct {
    const char* name;
    const char* lengths;
    int64_t heads;
    int32_t sms;
    SegmentPolicy rule;
  } rows[] = {{"h200_64k_auto", "64K", 8, 132, SegmentPolicy::kAuto},
              {"h200_full_auto", "8192", 64, 132, SegmentPolicy::kAuto},
              {"cula_152_skewed", "128K,10x1K", 4, 152, SegmentPolicy::kCula},
              {"flashkda_78", "8192", 16, 78, SegmentPolicy::kFlashKda},
              {"off", "64K", 8, 132, SegmentPolicy::kOff}};
  for (const auto& row : rows) {
    const std::string text =
        plan_for(row.lengths, row.heads, gpu_facts(row.sms), policy(row.rule)).to_text(true);
    const std::string path =
        std::string(KDA_SOURCE_DIR) + "/tests/plan/golden/" + row.name + ".txt";
    if (std::getenv("KDA_UPDATE_GOLDEN")) std::ofstream(path) << text;
    std::stringstream golden;
    golden << std::ifstream(path).rdbuf();
    EXPECT_EQ(text, golden.str()) << path;
  }
}

}  // namespace
}  // namespace kda
