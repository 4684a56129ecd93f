// SPDX-License-Identifier: Apache-2.0
// The command as a person uses it: outputs, exit codes, files left behind.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "check/backward.hpp"
#include "check/inputs.hpp"
#include "io/safetensors.hpp"
#include "support/harness.hpp"
#include "support/temporary_folder.hpp"

namespace kda {
namespace {

namespace fs = std::filesystem;

struct Ran {
  int exit_code = -1;
  std::string out;
  std::string err;
};

class Cli : public test::TemporaryFolder {
 protected:
  /// Runs `kda <arguments>` in the folder.
  Ran kda(const std::string& arguments) const { return shell("$KDA " + arguments); }

  /// Runs a line of the shell in the folder; $KDA is the command.
  Ran shell(const std::string& line) const {
    const std::string command = "KDA='" KDA_COMMAND "'; cd '" + folder_.string() + "' && { " +
                                line + "\n} 2>'" + path(".stderr") + "'";
    Ran ran;
    FILE* pipe = ::popen(command.c_str(), "r");
    std::array<char, 4096> chunk;
    for (std::size_t got; (got = std::fread(chunk.data(), 1, chunk.size(), pipe)) > 0;)
      ran.out.append(chunk.data(), got);
    const int status = ::pclose(pipe);
    ran.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    ran.err = read(".stderr");
    fs::remove(path(".stderr"));
    return ran;
  }

  void gen(const std::string& flags, const std::string& file = "x.safetensors") const {
    const Ran ran = kda("gen -o " + file + " " + flags);
    ASSERT_EQ(ran.exit_code, 0) << ran.err;
  }
};

void expect_has(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

TEST_F(Cli, GenRunCheckInspect) {
  gen("--tokens 200 --heads 2 --value-heads 4 --key-dim 32 --value-dim 16 --regime softplus");
  const Ran run = kda("run x.safetensors -o y.safetensors");
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_EQ(run.err, "");
  const io::SafetensorsFile out = io::read_safetensors(path("y.safetensors"));
  EXPECT_EQ(out.tensors.at("o").dtype, DType::kBFloat16);
  EXPECT_EQ(out.tensors.at("o").shape, (std::vector<int64_t>{1, 200, 4, 16}));
  EXPECT_EQ(out.tensors.at("final_state").dtype, DType::kFloat32);
  EXPECT_EQ(out.tensors.at("final_state").shape, (std::vector<int64_t>{1, 4, 32, 16}));
  const Ran check = kda("check x.safetensors");
  EXPECT_EQ(check.exit_code, 0);
  EXPECT_NE(check.out.find("within"), std::string::npos);
  const Ran inspect = kda("inspect x.safetensors --plot m.svg");
  EXPECT_EQ(inspect.exit_code, 0);
  EXPECT_NE(inspect.out.find("half-life"), std::string::npos);
  EXPECT_NE(read("m.svg").find("</svg>"), std::string::npos);
}

TEST_F(Cli, RunMatchesTheLibrary) {
  gen("--seq-lens 40,0,23 --heads 2 --key-dim 16 --value-dim 16 --dtype fp32 --initial-state");
  ASSERT_EQ(kda("run x.safetensors -o y.safetensors --state-layout kv").exit_code, 0);
  const check::Inputs inputs = check::inputs_from_file(io::read_safetensors(path("x.safetensors")));
  const test::Result expected = test::run_inputs(inputs);
  const io::SafetensorsFile out = io::read_safetensors(path("y.safetensors"));
  EXPECT_TRUE(test::same_bits(out.tensors.at("o").data, expected.outputs.o));
  EXPECT_TRUE(test::same_bits(out.tensors.at("final_state").data, expected.outputs.final_state));
}

TEST_F(Cli, BackwardOfAFile) {
  gen("--seq-lens 40,0,23 --heads 2 --value-heads 4 --key-dim 16 --value-dim 8 --initial-state "
      "--gradients");
  const Ran run = kda("run x.safetensors --backward -o dx.safetensors");
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_NE(run.out.find("d_initial_state"), std::string::npos) << run.out;
  const io::SafetensorsFile out = io::read_safetensors(path("dx.safetensors"));
  EXPECT_EQ(out.tensors.size(), 8u);
  EXPECT_EQ(out.tensors.at("dk").dtype, DType::kBFloat16);
  EXPECT_EQ(out.tensors.at("dk").shape, (std::vector<int64_t>{1, 63, 2, 16}));
  EXPECT_EQ(out.tensors.at("dbeta").shape, (std::vector<int64_t>{1, 63, 4}));
  EXPECT_EQ(out.tensors.at("d_initial_state").shape, (std::vector<int64_t>{3, 4, 16, 8}));
  EXPECT_EQ(out.tensors.at("dA_log").shape, (std::vector<int64_t>{4}));
  const Ran check = kda("check x.safetensors --backward --out-dtype fp32 --json");
  EXPECT_EQ(check.exit_code, 0) << check.err;
  const nlohmann::json report = nlohmann::json::parse(check.out);
  EXPECT_TRUE(report["within"]);
  EXPECT_LT(report["dg"]["median"], 1e-6);
  EXPECT_NE(kda("check x.safetensors --backward").out.find("ddt_bias"), std::string::npos);
}

/// A file has g [B, T, HV], and says which q/k head a value head reads.
TEST_F(Cli, OneGateAHead) {
  const std::string sizes = "--tokens 70 --heads 2 --value-heads 4 --key-dim 16 --value-dim 8 ";
  gen(sizes + "--head-gates --head-map tiled --dtype fp32 --gradients --regime softplus");
  const io::SafetensorsFile file = io::read_safetensors(path("x.safetensors"));
  const std::vector<int64_t> a_head = {1, 70, 4};
  EXPECT_EQ(file.tensors.at("g").shape, a_head);
  EXPECT_EQ(file.tensors.count("dt_bias"), 0u);
  EXPECT_EQ(file.metadata.at("head_map"), "tiled");
  EXPECT_EQ(kda("check x.safetensors").exit_code, 0);
  EXPECT_EQ(kda("check x.safetensors --backward").exit_code, 0);
  ASSERT_EQ(kda("run x.safetensors --backward -o dx.safetensors").exit_code, 0);
  EXPECT_EQ(io::read_safetensors(path("dx.safetensors")).tensors.at("dg").shape, a_head);
  const auto output = [&](const std::string& flags) {
    const Ran ran = kda("run -o y.safetensors " + flags);
    EXPECT_EQ(ran.exit_code, 0) << flags << ran.err;
    return io::read_safetensors(path("y.safetensors")).tensors.at("o").data;
  };
  const io::Buffer tiled = output("x.safetensors");
  EXPECT_FALSE(test::same_bits(tiled, output("x.safetensors --head-map grouped")));
  check::Inputs inputs = check::inputs_from_file(file);
  EXPECT_EQ(inputs.problem.head_map, HeadMap::kTiled);
  io::write_safetensors(path("each.safetensors"),
                        check::file_from_inputs(test::with_gates_expanded(inputs)));
  EXPECT_TRUE(test::same_bits(tiled, output("each.safetensors")));
  EXPECT_TRUE(test::same_bits(tiled, output("each.safetensors --head-gates")));

  inputs.problem.dt_bias = head_bias(DType::kFloat32, 4);
  inputs.dt_bias = io::Buffer(4 * sizeof(float));
  for (int head = 0; head < 4; ++head)
    inputs.dt_bias.as<float>()[head] = 0.5f * static_cast<float>(head);
  const check::GradientBuffers gradients = check::make_gradients(inputs);
  io::SafetensorsFile biased = check::file_from_inputs(inputs);
  EXPECT_EQ(biased.tensors.at("dt_bias").shape, (std::vector<int64_t>{4}));
  check::add_gradients_to_file(inputs.problem, gradients, &biased);
  io::write_safetensors(path("b.safetensors"), biased);
  EXPECT_EQ(kda("check b.safetensors --backward").exit_code, 0);
  ASSERT_EQ(kda("run b.safetensors --backward -o dx.safetensors").exit_code, 0);
  EXPECT_EQ(io::read_safetensors(path("dx.safetensors")).tensors.at("ddt_bias").shape,
            (std::vector<int64_t>{4}));
}

TEST_F(Cli, OneGateAHeadNeedsEqualChannels) {
  gen("--tokens 3 --heads 1 --value-heads 2 --key-dim 8 --value-dim 8");
  const Ran ran = kda("run x.safetensors -o y.safetensors --head-gates");
  EXPECT_EQ(ran.exit_code, 2);
  expect_has(ran.err, "g: --head-gates needs channels that are equal, those of [0, 0, 0] are ");
  EXPECT_FALSE(fs::exists(path("y.safetensors")));
}

TEST_F(Cli, PlansAndTimesOfABackward) {
  const std::string plan = "plan --heads 4 --seq-lens 8192 --device cpu --backward --explain";
  const Ran states = kda(plan);
  EXPECT_EQ(states.exit_code, 0) << states.err;
  EXPECT_NE(states.out.find("keep states: 32"), std::string::npos) << states.out;
  EXPECT_NE(states.out.find("kept_states"), std::string::npos) << states.out;
  // What each policy keeps: an fp32 state [128, 128] every 2,048 tokens is 32 bytes a token.
  for (const char* row : {"\n  nothing                                0.0  0.0 MB",
                          "\n  states                                32.0  1.0 MB",
                          "\n  chunks (as states)                    32.0  1.0 MB"})
    EXPECT_NE(states.out.find(row), std::string::npos) << row << states.out;
  EXPECT_NE(kda(plan + " --keep nothing").out.find("keep nothing: 0 bytes"), std::string::npos);
  EXPECT_EQ(nlohmann::json::parse(kda(plan + " --json").out)["keep"], "states");
  const std::string gpu = "plan --heads 64 --seq-lens 8192 --backward --device cuda --explain";
  const Ran groups = kda(gpu);
  EXPECT_EQ(groups.exit_code, 0) << groups.err;
  for (const char* text : {"chunk_reverse", "heads: one group", "cuda.sm80.staged"})
    EXPECT_NE(groups.out.find(text), std::string::npos) << text << groups.out;
  const Ran bounds = kda("plan --heads 4 --seq-lens 32K --backward --device cuda --bounds");
  EXPECT_EQ(bounds.exit_code, 0) << bounds.err;
  for (const char* text :
       {"by lengths on the device, at most 66 segments behind first ones", "segment_d_states"})
    EXPECT_NE(bounds.out.find(text), std::string::npos) << text << bounds.out;
  const Ran windows = kda(gpu + " --backend recurrent");
  EXPECT_EQ(windows.exit_code, 0) << windows.err;
  EXPECT_NE(windows.out.find("backward_starts"), std::string::npos) << windows.out;
  EXPECT_NE(windows.out.find("windows: "), std::string::npos) << windows.out;
  const std::pair<const char*, const char*> refused[] = {
      {" --keep states",
       "kda: --keep: states cannot be kept for this problem on sm_90, 132 SMs; nothing and "
       "chunks can\n"},
      {" --keep chunks --compute-capability 80",
       "kda: --keep: chunks cannot be kept for this problem on sm_80, 132 SMs; nothing can\n"},
      {" --compute-capability 75",
       "kda: --compute-capability: 75 is served by no forward; 80 and above are\n"},
      {" --keep chunks --compute-capability 75",
       "kda: --compute-capability: 75 is served by no forward; 80 and above are\n"}};
  for (const auto& [flags, message] : refused) {
    const Ran ran = kda(gpu + flags);
    EXPECT_EQ(ran.exit_code, 2) << flags;
    EXPECT_EQ(ran.err, message);
  }
  const Ran bench = kda(
      "bench backward --milliseconds 1 --case '--tokens 100 --heads 1 --key-dim 16 --dtype fp32'");
  EXPECT_EQ(bench.exit_code, 0) << bench.err;
  EXPECT_NE(bench.out.find("of forward"), std::string::npos) << bench.out;
}

TEST_F(Cli, MemoryOfACutFromBounds) {
  const std::string plan = "plan --heads 32 --seq-lens 64K --explain";
  const Ran cut = kda(plan + " --bounds"),
            kept = kda(plan + " --bounds --most-cut-bytes 500000000");
  EXPECT_EQ(cut.out.find("most_cut_bytes"), std::string::npos) << cut.out;
  EXPECT_NE(kept.out.find("more than most_cut_bytes = 500000000; not cut"), std::string::npos)
      << kept.out << kept.err;
  EXPECT_NE(kda(plan + " --most-cut-bytes 5").err.find("--bounds"), std::string::npos);
}

TEST_F(Cli, BackwardByTheOracle) {
  gen("--seq-lens 40,0,23 --heads 2 --value-heads 4 --key-dim 16 --value-dim 8 --initial-state "
      "--gradients --dtype fp32");
  const Ran run = kda("run x.safetensors --backward --backend oracle -o dx.safetensors");
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_NE(run.out.find("cpu.oracle"), std::string::npos) << run.out;
  const Ran check = kda("check x.safetensors --backward --backend oracle --json");
  EXPECT_EQ(check.exit_code, 0) << check.err;
  const nlohmann::json report = nlohmann::json::parse(check.out);
  for (const char* name : check::kGradientNames)
    EXPECT_LT(report[name]["worst"], 1e-7) << name;  // one rounding to fp32
}

TEST_F(Cli, Float64IsComputedByTheOracle) {
  gen("--seq-lens 20,0,13 --heads 2 --key-dim 16 --value-dim 8 --initial-state --gradients "
      "--dtype fp64");
  const io::SafetensorsFile in = io::read_safetensors(path("x.safetensors"));
  for (const char* name :
       {"q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "do", "d_final_state"})
    EXPECT_EQ(in.tensors.at(name).dtype, DType::kFloat64) << name;
  EXPECT_NE(in.tensors.at("q").data.as<double>()[0],
            static_cast<float>(in.tensors.at("q").data.as<double>()[0]));
  const Ran run = kda("run x.safetensors -o y.safetensors");
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_NE(run.out.find("cpu.oracle"), std::string::npos) << run.out;
  EXPECT_NE(run.out.find("o fp64, final_state fp64"), std::string::npos) << run.out;
  const io::SafetensorsFile out = io::read_safetensors(path("y.safetensors"));
  EXPECT_EQ(out.tensors.at("o").dtype, DType::kFloat64);
  EXPECT_EQ(out.tensors.at("final_state").dtype, DType::kFloat64);
  ASSERT_EQ(kda("run x.safetensors --backward -o dx.safetensors").exit_code, 0);
  const io::SafetensorsFile gradients = io::read_safetensors(path("dx.safetensors"));
  EXPECT_EQ(gradients.tensors.size(), 8u);
  for (const auto& [name, tensor] : gradients.tensors)
    EXPECT_EQ(tensor.dtype, DType::kFloat64) << name;
  EXPECT_EQ(kda("check x.safetensors").exit_code, 0);
  EXPECT_EQ(kda("check x.safetensors --backward").exit_code, 0);
  EXPECT_NE(kda("inspect x.safetensors").out.find("sm_90, 132 SMs     q: dtype fp64"),
            std::string::npos);
  EXPECT_TRUE(nlohmann::json::parse(kda("inspect x.safetensors --json").out)["plan"].is_null());

  const auto refused = [&](const std::string& arguments, int exit_code, const char* message) {
    const Ran ran = kda(arguments);
    EXPECT_EQ(ran.exit_code, exit_code) << arguments;
    EXPECT_NE(ran.err.find(message), std::string::npos) << ran.err;
  };
  const char* only = "q: dtype fp64, only backend oracle computes it, on the CPU";
  refused("run x.safetensors -o z.safetensors --backend blocked", 3, only);
  refused("run x.safetensors -o z.safetensors --backward --backend blocked", 3, only);
  refused("plan --heads 4 --seq-lens 100 --dtype fp64", 2, only);
  refused("bench intra --case '--tokens 8 --heads 1 --dtype fp64' --device cpu", 2,
          "backend: cpu.oracle has no such stage to measure");
  EXPECT_FALSE(fs::exists(path("z.safetensors")));
}

TEST_F(Cli, BackwardNeedsAGradientToStartFrom) {
  gen("--tokens 20 --heads 1 --key-dim 16 --value-dim 16");
  const Ran run = kda("run x.safetensors --backward -o dx.safetensors");
  EXPECT_EQ(run.exit_code, 2);
  EXPECT_NE(run.err.find("do, d_final_state: the file has neither"), std::string::npos) << run.err;
  EXPECT_FALSE(fs::exists(path("dx.safetensors")));
}

TEST_F(Cli, FlagsChangeTheResult) {
  gen("--tokens 100 --heads 1 --key-dim 16 --value-dim 16 --dtype fp32 --regime strong");
  const auto output = [&](const std::string& flags) {
    const Ran ran = kda("run x.safetensors -o y.safetensors " + flags);
    EXPECT_EQ(ran.exit_code, 0) << flags << ran.err;
    return io::read_safetensors(path("y.safetensors")).tensors.at("o").data;
  };
  const io::Buffer plain = output("");
  for (const char* flags : {"--gate softplus", "--gate log", "--lower-bound -1", "--beta plain",
                            "--beta sigmoid2", "--no-qk-l2norm", "--scale 2", "--out-dtype fp16"})
    EXPECT_FALSE(test::same_bits(plain, output(flags))) << flags;
  for (const char* flags :
       {"--qk-l2norm", "--beta sigmoid", "--gate bounded", "--threads 3", "--batch-invariant",
        "--state-layout vk", "--device cpu", "--context-parallel off", "--device auto"})
    EXPECT_TRUE(test::same_bits(plain, output(flags))) << flags;
}

TEST_F(Cli, EveryFlagOfRunIsAcceptedByCheck) {
  gen("--tokens 300 --heads 2 --key-dim 32 --value-dim 32 --dtype fp32");
  for (const char* flags :
       {"--context-parallel 3", "--context-parallel 4 --segment-method one-pass",
        "--context-parallel flashkda", "--context-parallel cula", "--backend portable",
        "--backend oracle", "--out-dtype bf16", "--out-dtype fp16", "--scale 0.3",
        "--state-layout vk", "--batch-invariant", "--threads 2", "--beta sigmoid2",
        "--gate softplus"})
    EXPECT_EQ(kda(std::string("check x.safetensors ") + flags).exit_code, 0) << flags;
}

TEST_F(Cli, JsonIsJson) {
  gen("--tokens 64 --heads 2 --key-dim 16 --value-dim 16");
  const auto run = nlohmann::json::parse(kda("run x.safetensors -o y.safetensors --json").out);
  EXPECT_EQ(run["num_tokens"], 64);
  EXPECT_GT(run["tokens_per_second"], 0);
  const auto check = nlohmann::json::parse(kda("check x.safetensors --json").out);
  EXPECT_EQ(check["within"], true);
  EXPECT_EQ(check["o"]["heads"].size(), 2u);
  const auto inspect = nlohmann::json::parse(kda("inspect x.safetensors --json").out);
  EXPECT_EQ(inspect["heads"].size(), 2u);
  EXPECT_EQ(inspect["transition_may_be_dropped"], true);
  const auto info = nlohmann::json::parse(kda("info --json").out);
  EXPECT_EQ(info["version"], KDA_VERSION_STRING);
  const auto plan = nlohmann::json::parse(kda("plan --heads 8 --seq-lens 64K --json").out);
  EXPECT_EQ(plan["context_parallel"]["on"], true);
}

TEST_F(Cli, CheckExitsWithOneOutsideTolerance) {
  // Positive gates that grow without bound overflow fp32 long before float64.
  check::GenerateOptions options = test::shape(400, 1, 8, 8);
  options.regime = check::Regime::kLog;
  check::Inputs inputs = check::generate(options);
  for (int64_t i = 0; i < 400 * 8; ++i) inputs.g.as<float>()[i] = 0.5f;
  for (int64_t i = 0; i < 400; ++i) inputs.beta.as<float>()[i] = -20;
  io::write_safetensors(path("x.safetensors"), check::file_from_inputs(inputs));
  EXPECT_EQ(kda("check x.safetensors").exit_code, 1);
}

/// A 16-bit result that cannot hold its reference is no result, whatever is stored there.
TEST_F(Cli, CheckNamesWhatOverflows) {
  gen("--tokens 256 --heads 1 --gradients");
  const std::string check = "check x.safetensors --gate log --no-qk-l2norm";
  for (const std::string& command :
       {check + " --backward", check + " --backward --out-dtype fp32", check + " --out-dtype bf16",
        check + " --out-dtype fp16", check + " --out-dtype fp32"}) {
    const Ran ran = kda(command);
    EXPECT_EQ(ran.exit_code, 1) << command << ran.out;
    expect_has(ran.out, "OUTSIDE");
    expect_has(ran.out, command.find("backward") == std::string::npos
                            ? "\no overflows: the reference of sequence 0, head 0 "
                            : "\ndq overflows: the reference of sequence 0, head 0 ");
    const nlohmann::json report = nlohmann::json::parse(kda(command + " --json").out);
    EXPECT_FALSE(report["within"]);
    for (const auto& part : report) {
      if (!part.is_object()) continue;
      for (const auto& head : part["heads"]) EXPECT_TRUE(head["tolerance"].is_number()) << part;
    }
  }
}

TEST_F(Cli, CheckPrintsTheLargestErrorAndTheWorst) {
  gen("--tokens 256 --heads 2 --gradients");
  for (const char* command : {"check x.safetensors", "check x.safetensors --backward"}) {
    expect_has(kda(command).out, "median error  largest error  worst error  tolerance");
    const nlohmann::json report = nlohmann::json::parse(kda(std::string(command) + " --json").out);
    for (const auto& part : report) {
      if (!part.is_object()) continue;
      EXPECT_GE(part["largest"], part["median"]);
      EXPECT_GE(part["largest"], part["worst"]);
    }
  }
  expect_has(kda("check --help").out, "the worst is nearest to it");
}

TEST_F(Cli, PlanTextAndReasons) {
  const Ran plan = kda("plan --heads 8 --seq-lens 65536 --sms 132 --explain");
  EXPECT_EQ(plan.exit_code, 0);
  for (const char* text : {"context parallel on", "why", "predicted", "segments"})
    EXPECT_NE(plan.out.find(text), std::string::npos) << text;
  EXPECT_NE(kda("plan --heads 8 --seq-lens 65536 --device cpu").out.find("cpu.blocked"),
            std::string::npos);
  // Gates as logarithms may be positive: then a transition must not stop.
  const std::string stop = "early exit", longer = "plan --heads 16 --seq-lens 256K --gate ";
  EXPECT_NE(kda(longer + "softplus").out.find(stop), std::string::npos);
  EXPECT_EQ(kda(longer + "log").out.find(stop), std::string::npos);
}

/// Loops over columns and rows of every width, of each instruction set that this CPU has.
TEST_F(Cli, TimesTailsOfEverySizeOnEveryCpu) {
  std::string cases;
  for (const char* tokens : {"1", "2", "3", "4", "8"})
    for (const char* sizes : {"--key-dim 40 --value-dim 24", "--key-dim 64 --value-dim 64"})
      cases += cat(" --case '--batch 1 --heads 1 --dtype fp32 --tokens ", tokens, " ", sizes, "'");
  for (const char* backend : {"portable", "avx2", "avx512"})
    for (const char* states : {"fp32", "split"}) {
      const Ran ran = kda(cat("bench decode --device cpu --tail --boundary-states ", states,
                              " --milliseconds 1 --threads 1 --backend ", backend, cases));
      if (ran.exit_code == 3) continue;  // not on this CPU
      EXPECT_EQ(ran.exit_code, 0) << backend << ": " << ran.err;
      EXPECT_NE(ran.out.find("of decode"), std::string::npos) << ran.out;
    }
}

/// What `kda run` can be asked for can be planned.
TEST_F(Cli, PlanTakesTheFlagsOfRun) {
  const auto plan = [&](const std::string& flags) {
    const Ran ran = kda("plan --heads 8 --seq-lens 8192 --json " + flags);
    EXPECT_EQ(ran.exit_code, 0) << ran.err;
    return nlohmann::json::parse(ran.out);
  };
  EXPECT_EQ(plan("")["implementation"], "cuda.sm90.fused");
  EXPECT_EQ(plan("--backend staged")["implementation"], "cuda.sm80.staged");
  EXPECT_EQ(plan("--backend staged")["requested"]["backend"], "staged");
  EXPECT_EQ(plan("--compute-capability 80")["implementation"], "cuda.sm80.staged");
  const auto slow = plan("--compute-capability 80 --bandwidth 200 --megahertz 1250");
  EXPECT_EQ(slow["implementation"], "cuda.sm80.fused");  // bytes decide
  EXPECT_EQ(slow["device"]["gigahertz"], 1.25);
  EXPECT_NEAR(slow["device"]["memory_bytes_per_second"].get<double>(), 0.88 * 200e9, 1);
  EXPECT_EQ(plan("--dtype fp32")["implementation"], "cuda.smxx.recurrent");
  EXPECT_EQ(plan("--out-dtype fp32")["implementation"], "cuda.sm80.staged");
  EXPECT_EQ(plan("--gate-dtype fp16")["implementation"], "cuda.sm80.staged");
  EXPECT_EQ(plan("--head-gates")["problem"]["head_gate"], true);
  EXPECT_EQ(plan("--head-gates --backend gdn")["implementation"], "cuda.sm90.gdn");
  const auto cut =
      plan("--head-gates --backend gdn --context-parallel 2 --segment-method one-pass");
  EXPECT_EQ(cut["segments"].size(), 2U);
  EXPECT_EQ(cut["context_parallel"]["early_exit"], true);
  EXPECT_EQ(cut["resolved"]["segment_method"], "scan_merge_forward");
  EXPECT_EQ(plan("--head-map tiled")["problem"]["head_map"], "tiled");
  EXPECT_EQ(kda("plan --heads 8 --seq-lens 8 --backend gdn").exit_code, 3);
  EXPECT_EQ(plan("--intra-form token")["resolved"]["intra_form"], "token");
  EXPECT_EQ(plan("--device cpu --backend oracle")["implementation"], "cpu.oracle");
  EXPECT_EQ(plan("")["problem"]["beta"], "sigmoid");
  EXPECT_EQ(plan("--gate log")["problem"]["beta"], "plain");
  EXPECT_EQ(plan("--gate softplus --beta sigmoid2")["problem"]["beta"], "sigmoid2");
  EXPECT_EQ(plan("--no-qk-l2norm")["problem"]["qk_l2norm"], false);
  const auto joined = plan("--device cpu --context-parallel 4 --segment-method one-pass");
  EXPECT_EQ(joined["resolved"]["segment_method"], "one_pass");
  EXPECT_EQ(kda("plan --heads 8 --seq-lens 8 --backend nothing").exit_code, 3);
}

TEST_F(Cli, BenchPrintsRates) {
  const std::string tiny =
      " --milliseconds 1 --case '--tokens 64 --heads 1 --key-dim 16 --value-dim 16'";
  for (const char* what : {"forward", "intra", "delta-h"}) {
    const Ran ran = kda(std::string("bench ") + what + tiny + " --json b.json --csv b.csv");
    EXPECT_EQ(ran.exit_code, 0) << ran.err;
    EXPECT_NE(ran.out.find("tokens/s"), std::string::npos);
    const auto json = nlohmann::json::parse(read("b.json"));
    EXPECT_EQ(json["what"], what);
    EXPECT_EQ(json["date"].get<std::string>().size(), std::string("2026-11-26").size());
    EXPECT_FALSE(json["cpu"].get<std::string>().empty());
    EXPECT_EQ(json["command"],
              std::string("kda bench ") + what + tiny + " --json b.json --csv b.csv");
    EXPECT_GT(json["cases"][0]["median_s"], 0);
    EXPECT_LT(
        json["cases"][0]["repeats"].get<double>() * json["cases"][0]["fastest_s"].get<double>(),
        0.25);  // not the 500 ms that it takes unasked
    EXPECT_NE(read("b.csv").find("median"), std::string::npos);
  }
  const Ran decode = kda("bench decode --milliseconds 1 --case '--batch 2 --tokens 1 --heads 1'");
  EXPECT_NE(decode.out.find("% of memory"), std::string::npos);
  const Ran cp =
      kda("bench context-parallel --milliseconds 1 --context-parallel 2 --case "
          "'--tokens 256 --heads 1 --key-dim 16 --value-dim 16' --group-size 2");
  EXPECT_NE(cp.out.find("on / off"), std::string::npos) << cp.err;
}

TEST_F(Cli, PipesCarryFiles) {
  const std::string flags = "--tokens 70 --heads 2 --key-dim 16 --value-dim 16";
  gen(flags);
  ASSERT_EQ(kda("run x.safetensors -o y.safetensors").exit_code, 0);
  const Ran piped = shell("$KDA gen -o - " + flags + " | $KDA run - -o - > z.safetensors");
  EXPECT_EQ(piped.exit_code, 0) << piped.err;
  EXPECT_EQ(piped.out, "");
  expect_has(piped.err, "standard output: B=1 T=70");
  EXPECT_EQ(read("z.safetensors"), read("y.safetensors"));
  ASSERT_EQ(shell("$KDA gen -o /dev/stdout " + flags + " > w.safetensors").exit_code, 0);
  EXPECT_EQ(read("w.safetensors"), read("x.safetensors"));
  for (const char* line :
       {"cat x.safetensors | $KDA check -", "$KDA check - < x.safetensors",
        "cat x.safetensors | $KDA check /dev/stdin", "$KDA check /dev/stdin < x.safetensors",
        "mkfifo in; cat x.safetensors > in & $KDA check in", "$KDA inspect - < x.safetensors",
        "mkfifo to; cat to > /dev/null & $KDA run x.safetensors -o to && test -p to"})
    EXPECT_EQ(shell(line).exit_code, 0) << line;
  const Ran half = shell("head -c 3000 x.safetensors | $KDA check -");
  EXPECT_EQ(half.exit_code, 2);
  expect_has(half.err, "kda: standard input: ");
}

TEST_F(Cli, ReportsLeaveTheStandardOutputToTheData) {
  gen("--tokens 8 --heads 1 --key-dim 8 --value-dim 8");
  Ran ran = kda("run x.safetensors -o - --json > y");
  EXPECT_EQ(nlohmann::json::parse(ran.err)["output"], "-");
  EXPECT_EQ(io::read_safetensors(path("y")).tensors.size(), 2u);
  ran = kda("inspect x.safetensors --plot -");
  EXPECT_EQ(ran.out.rfind("<svg", 0), 0u);
  expect_has(ran.err, "figure: standard output");
  const std::string tiny =
      " --milliseconds 1 --case '--tokens 8 --heads 1 --key-dim 8 --value-dim 8'";
  ran = kda("bench forward --json -" + tiny);
  EXPECT_EQ(nlohmann::json::parse(ran.out)["what"], "forward");
  expect_has(ran.err, "tokens/s");
  ran = kda("bench forward --csv - --json b.json" + tiny);
  EXPECT_EQ(ran.out.rfind("case,", 0), 0u);
  for (const char* both : {"--json - --csv -", "--json b --csv b", "--json b --csv ./b"}) {
    ran = kda(std::string("bench forward ") + both + tiny);
    EXPECT_EQ(ran.exit_code, 2) << both;
    expect_has(ran.err, "--csv: ");
  }
  EXPECT_FALSE(fs::exists(path("b")));
}

TEST_F(Cli, DevicesAndLinksStayWhatTheyAre) {
  gen("--tokens 8 --heads 1 --key-dim 8 --value-dim 8");
  ASSERT_EQ(::symlink("/dev/null", path("device").c_str()), 0);
  ASSERT_EQ(::symlink("target", path("link").c_str()), 0);
  std::ofstream(path("target")) << "old";
  fs::permissions(path("target"), fs::perms::owner_read | fs::perms::owner_write);
  const std::string tiny =
      " --milliseconds 1 --case '--tokens 8 --heads 1 --key-dim 8 --value-dim 8'";
  for (const std::string& command : std::vector<std::string>{
           "run x.safetensors -o ", "gen --tokens 8 --heads 1 --key-dim 8 --value-dim 8 -o ",
           "inspect x.safetensors --plot ", "bench forward" + tiny + " --json ",
           "bench forward" + tiny + " --csv "}) {
    for (const char* target : {"/dev/null", "device", "link"})
      EXPECT_EQ(kda(command + target).exit_code, 0) << command << target;
    EXPECT_TRUE(fs::is_character_file("/dev/null"));
    EXPECT_TRUE(fs::is_symlink(path("device")));
    EXPECT_TRUE(fs::is_symlink(path("link")));
    EXPECT_GT(read("target").size(), 20u) << command;
    EXPECT_EQ(fs::status(path("target")).permissions(),
              fs::perms::owner_read | fs::perms::owner_write);
    std::ofstream(path("target")) << "old";
  }
}

TEST_F(Cli, TheStandardOutputIsChecked) {
  gen("--tokens 8 --heads 1 --key-dim 8 --value-dim 8");
  const std::string tiny =
      " --milliseconds 1 --case '--tokens 8 --heads 1 --key-dim 8 --value-dim 8'";
  for (const std::string& command : std::vector<std::string>{
           "info", "info --json", "--help", "--version", "run --help", "check x.safetensors",
           "check x.safetensors --json", "inspect x.safetensors", "inspect x.safetensors --json",
           "plan --heads 1 --seq-lens 8", "plan --heads 1 --seq-lens 8 --json",
           "run x.safetensors -o y", "run x.safetensors -o y --json", "run x.safetensors -o -",
           "gen -o y --tokens 3", "gen -o - --tokens 3", "bench forward" + tiny}) {
    const Ran full = kda(command + " > /dev/full");
    EXPECT_EQ(full.exit_code, 2) << command;
    EXPECT_EQ(full.err, "kda: standard output: writing failed (No space left on device)\n")
        << command;
    const Ran closed = kda(command + " >&-");
    EXPECT_EQ(closed.exit_code, 2) << command;
    expect_has(closed.err, "kda: standard output: ");
  }
}

TEST_F(Cli, SwitchesMayBeFalse) {
  gen("--tokens 50 --heads 1 --key-dim 16 --value-dim 16 --dtype fp32 --regime strong");
  const auto output = [&](const std::string& flags) {
    const Ran ran = kda("run x.safetensors -o y.safetensors " + flags);
    EXPECT_EQ(ran.exit_code, 0) << flags << ran.err;
    return io::read_safetensors(path("y.safetensors")).tensors.at("o").data;
  };
  const io::Buffer on = output(""), off = output("--no-qk-l2norm");
  EXPECT_FALSE(test::same_bits(on, off));
  EXPECT_TRUE(test::same_bits(output("--qk-l2norm=false"), off));
  EXPECT_TRUE(test::same_bits(output("--no-qk-l2norm=true"), off));
  EXPECT_TRUE(test::same_bits(output("--no-qk-l2norm=false"), on));
  EXPECT_TRUE(test::same_bits(output("--qk-l2norm=true"), on));
  expect_has(kda("run x.safetensors -o y --json=false").out, "tokens/s");
}

TEST_F(Cli, PathsNeedNotBeUtf8) {
  gen("--tokens 8 --heads 1 --key-dim 8 --value-dim 8");
  for (const char* command :
       {"run $'a\\xff.st' -o $'o\\xff' --json", "check $'a\\xff.st' --json",
        "inspect $'a\\xff.st' --json --plot $'p\\xff'", "run $'a\\xff.st' -o $'o\\xff'"}) {
    const Ran ran =
        shell("bash -c \"mv x.safetensors $'a\\xff.st'; '$KDA' " + std::string(command) +
              "; code=\\$?; mv $'a\\xff.st' x.safetensors; exit \\$code\"");
    EXPECT_EQ(ran.exit_code, 0) << command << ran.err;
    EXPECT_EQ(ran.err, "") << command;
  }
  EXPECT_TRUE(fs::exists(path("o\xff")));
}

TEST_F(Cli, ThreadsThatCannotStartSaySo) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "the sanitizer needs terabytes of addresses";
#endif
  gen("--seq-lens 2000x12 --heads 1 --key-dim 64 --value-dim 64");  // work for so many
  const Ran ran = shell("ulimit -v 600000; $KDA run x.safetensors -o y --threads 1024");
  EXPECT_EQ(ran.exit_code, 2);
  expect_has(ran.err, "kda: --threads: the system starts no more than ");
  expect_has(ran.err, " of 1024 threads (Resource temporarily unavailable)");
  EXPECT_FALSE(fs::exists(path("y")));
  const Ran memory = shell("ulimit -v 600000; $KDA gen -o y --tokens 100000000");
  EXPECT_EQ(memory.exit_code, 2);
  expect_has(memory.err, "kda: 25600000000 bytes do not fit into memory\n");
  EXPECT_EQ(count_files(), 1u);
}

TEST_F(Cli, LimitsAndSignalsLeaveNoTemporary) {
  gen("--tokens 500 --heads 1 --key-dim 32 --value-dim 32");
  std::ofstream(path("y")) << "old";
#ifdef __OPTIMIZE__  // a build that counts coverage, -O0, writes files of its own
  const Ran limited = shell("ulimit -f 10; $KDA run x.safetensors -o y");
  EXPECT_EQ(limited.exit_code, 2);
  EXPECT_EQ(limited.err, "kda: y: writing failed (File too large)\n");
#endif
  // The command has its output open and waits for its input.
  ASSERT_EQ(::mkfifo(path("silent").c_str(), 0600), 0);
  for (const char* signal : {"HUP", "INT", "TERM"}) {
    const Ran ran = shell(std::string("timeout -s ") + signal +
                          " 0.5 $KDA run - -o y <> silent; test $? = 124");
    EXPECT_EQ(ran.exit_code, 0) << signal;
  }
  fs::remove(path("silent"));
  EXPECT_EQ(read("y"), "old");
  EXPECT_EQ(count_files(), 2u);
}

TEST_F(Cli, OutputsAreOpenedBeforeTheWork) {
  for (const char* command : {"run nothing -o no/such/y", "inspect nothing --plot no/such/y",
                              "gen -o no/such/y --tokens 1000000000 --heads 1000",
                              "bench forward --set flagship --json no/such/y",
                              "bench forward --set flagship --csv no/such/y"}) {
    const Ran ran = kda(command);
    EXPECT_EQ(ran.exit_code, 2);
    EXPECT_EQ(ran.err, "kda: no/such/y: its folder cannot be opened (No such file or directory)\n");
  }
  // Every case of every set is read before that.
  for (const auto& set : fs::directory_iterator(KDA_SOURCE_DIR "/bench/cases"))
    expect_has(kda("bench forward --json no/such/y --set " + set.path().stem().string()).err,
               "kda: no/such/y: ");
  // The last of the cases is bad: none is timed.
  const Ran bad = kda("bench forward --case '--tokens 8' --case '--heads 3' --json y");
  EXPECT_EQ(bad.exit_code, 2);
  EXPECT_EQ(bad.err, "kda: --case: '--heads 3': --tokens or --seq-lens is required\n");
  EXPECT_EQ(count_files(), 0u);
}

TEST_F(Cli, CheckNamesInputsThatHaveANan) {
  check::Inputs inputs = check::generate(test::shape(6, 2, 8, 8));
  inputs.k.as<float>()[8 * 2 * 3 + 8 + 5] = std::numeric_limits<float>::quiet_NaN();
  io::write_safetensors(path("x.safetensors"), check::file_from_inputs(inputs));
  for (const char* json : {"", " --json"}) {
    const Ran ran = kda(std::string("check x.safetensors") + json);
    EXPECT_EQ(ran.exit_code, 2);
    EXPECT_EQ(ran.out, "");
    expect_has(ran.err, "x.safetensors: NaN among the inputs");
    expect_has(ran.err, ": k[0, 3, 1, 5]\n");
  }
}

TEST_F(Cli, HelpSaysWhatBecomesOfOutputs) {
  for (const char* command : {"run", "gen", "inspect", "bench"}) {
    const std::string help = kda(std::string(command) + " --help").out;
    for (const char* part :
         {"existing file is replaced", "keeps its mode", "symbolic link is followed",
          "Devices (/dev/null) and pipes are\nwritten through", "on disk"})
      EXPECT_NE(help.find(part), std::string::npos) << command << ": " << part;
  }
}

TEST_F(Cli, MessagesAreOneLineAndUseTheOptionsNames) {
  gen("--tokens 8 --heads 1 --key-dim 8 --value-dim 8");
  const std::pair<const char*, const char*> rows[] = {
      {"run 'a\nb' -o y", "kda: a\\x0ab: cannot be read (No such file or directory)\n"},
      {"run x.safetensors -o y --backend nothing",
       "kda: --backend: 'nothing' names no implementation for"},
      {"gen -o y --tokens 8 --heads 2 --value-heads 3",
       "kda: --value-heads: 3 value heads are no multiple of --heads 2\n"},
      {"plan --seq-lens 8 --heads 2 --value-heads 3",
       "kda: --value-heads: 3 value heads are no multiple of --heads 2\n"},
      {"gen -o y --tokens 2000000000 --batch 2",
       "kda: --batch: 2 rows of --tokens 2000000000 are more than 2147483647 tokens\n"},
      {"plan --heads 1 --seq-lens 2147483647,1",
       "kda: --seq-lens: '2147483647,1' has more than 2147483647 tokens\n"},
      {"plan --heads 1 --seq-lens 16777216x1,1",
       "kda: --seq-lens: '16777216x1,1' has more than 16777216 sequences\n"},
      {"bench forward --case '--tokens 8 --heads 65535' --group-size 2",
       "kda: --case: '--tokens 8 --heads 65535': --group-size: 2 makes more than 65535 value "
       "heads\n"},
      {"run x.safetensors -o y --json --json=false", "kda: --json: given as true and as false\n"},
      {"run x.safetensors -o --json", "kda: -o,--output: '--json' is not taken for a file"},
      {"run x.safetensors -o=y", "kda: -o,--output: '=y' is not taken for a file"},
      {"run x.safetensors -o y --scale= 2", "kda: --scale: '' is empty\n"},
  };
  for (const auto& [command, message] : rows) {
    const Ran ran = kda(command);
    EXPECT_EQ(ran.err.rfind(message, 0), 0u) << ran.err;
    EXPECT_EQ(std::count(ran.err.begin(), ran.err.end(), '\n'), 1) << ran.err;
    EXPECT_EQ(count_files(), 1u) << command;
  }
  expect_has(kda("check -- x.safetensors").out, "within");
}

TEST_F(Cli, HelpTeaches) {
  for (const char* sub : {"", "run", "check", "gen", "inspect", "plan", "bench", "info"}) {
    const Ran help = kda(std::string(sub) + " --help");
    EXPECT_EQ(help.exit_code, 0);
    EXPECT_NE(help.out.find("Example"), std::string::npos) << sub;
  }
  EXPECT_EQ(kda("--version").out, "kda " KDA_VERSION_STRING "\n");
}

/// The commands on a GPU: only with KDA_TEST_DEVICE=cuda.
class CliOnGpu : public Cli {
 protected:
  void SetUp() override {
    Cli::SetUp();
    if (!test::on_cuda()) GTEST_SKIP() << "needs KDA_TEST_DEVICE=cuda and a GPU";
  }
};

TEST_F(CliOnGpu, RunsAndChecksFiles) {
  gen("--tokens 100 --heads 2 --key-dim 64 --value-dim 64 --dtype bf16 --initial-state");
  const Ran ran = kda("run x.safetensors -o y.safetensors --device cuda");
  EXPECT_EQ(ran.exit_code, 0) << ran.err;
  EXPECT_TRUE(fs::exists(path("y.safetensors")));
  for (const char* more : {"", " --intra-form token", " --intra-form tensor --json",
                           " --context-parallel 2", " --backend recurrent"}) {
    const Ran check = kda(std::string("check x.safetensors --device cuda") + more);
    EXPECT_EQ(check.exit_code, 0) << more << check.err;
  }
  EXPECT_EQ(kda("run x.safetensors -o z.safetensors --device cpu").exit_code, 0);
  // auto: the GPU, unless a backend asked for by name is one of the CPU.
  EXPECT_EQ(kda("check x.safetensors").exit_code, 0);
  EXPECT_EQ(kda("check x.safetensors --backend blocked").exit_code, 0);
  EXPECT_EQ(kda("check x.safetensors --backend staged").exit_code, 0);
  EXPECT_EQ(kda("check x.safetensors --backend nothing").exit_code, 3);
}

TEST_F(CliOnGpu, RunsAndChecksABackward) {
  gen("--seq-lens 40,0,23 --heads 2 --value-heads 4 --key-dim 16 --value-dim 8 --initial-state "
      "--gradients");
  ASSERT_EQ(kda("run x.safetensors --backward -o gpu.safetensors --device cuda").exit_code, 0);
  ASSERT_EQ(kda("run x.safetensors --backward -o cpu.safetensors --device cpu").exit_code, 0);
  EXPECT_EQ(io::read_safetensors(path("gpu.safetensors")).tensors.size(), 8u);
  EXPECT_EQ(io::read_safetensors(path("gpu.safetensors")).tensors.at("dk").shape,
            io::read_safetensors(path("cpu.safetensors")).tensors.at("dk").shape);
  for (const auto& [flags, implementation] :
       {std::pair{"", "cuda.sm80.staged"},
        std::pair{" --backend recurrent", "cuda.smxx.recurrent"}}) {
    const Ran check =
        kda(std::string("check x.safetensors --backward --out-dtype fp32 --json --device cuda") +
            flags);
    EXPECT_EQ(check.exit_code, 0) << check.err;
    const nlohmann::json report = nlohmann::json::parse(check.out);
    EXPECT_EQ(report["implementation"], implementation);
    EXPECT_TRUE(report["within"]);
  }
}

TEST_F(CliOnGpu, InfoNamesIt) {
  EXPECT_NE(kda("info").out.find("sm_"), std::string::npos);
  const nlohmann::json info = nlohmann::json::parse(kda("info --json").out);
  EXPECT_GE(info["gpus"].size(), 1u);
  EXPECT_GT(info["gpus"][0]["num_sms"], 0);
}

TEST_F(CliOnGpu, TimesGatedDeltaNet) {
  const std::string forward =
      "bench forward --case '--tokens 70 --heads 1 --value-heads 2 --key-dim 64 --regime log' "
      "--backend gdn --device cuda --json r.json";
  EXPECT_EQ(kda(forward).exit_code, 3);  // it takes no gate a channel
  const Ran ran = kda(forward + " --head-gates");
  const bool hopper = test::device().compute_capability == 90;
  ASSERT_EQ(ran.exit_code, hopper ? 0 : 3) << ran.err;
  if (!hopper) return;
  const nlohmann::json row = nlohmann::json::parse(read("r.json"))["cases"][0];
  EXPECT_EQ(row["implementation"], "cuda.sm90.gdn");
  const Ran backward =
      kda("bench backward --case '--tokens 70 --heads 1 --value-heads 2 --regime log' "
          "--head-gates --backend gdn --device cuda --json r.json");
  ASSERT_EQ(backward.exit_code, 0) << backward.err;
  const nlohmann::json rows = nlohmann::json::parse(read("r.json"))["cases"];
  ASSERT_EQ(rows.size(), 2u);  // nothing is kept for it
  EXPECT_EQ(rows[1]["implementation"], "cuda.sm90.gdn");
}

/// A forward in segments up to each of its launches; a forward that is not cut has one.
TEST_F(CliOnGpu, TimesEveryLaunch) {
  const std::string of =
      " --case '--tokens 130 --heads 1 --key-dim 64 --value-dim 64' --device cuda --json r.json";
  const auto rows = [&](const std::string& options) {
    const Ran ran = kda("bench launches" + of + options);
    EXPECT_EQ(ran.exit_code, 0) << ran.err;
    std::vector<std::string> names;
    const nlohmann::json report = nlohmann::json::parse(read("r.json"));
    for (const auto& row : report["cases"]) {
      EXPECT_EQ(row["segments"], row["what"] == "off" || options.empty() ? 0 : 3) << row;
      EXPECT_GT(row["median_s"], 0.0);
      names.push_back(row["what"]);
    }
    return names;
  };
  EXPECT_EQ(rows(""), (std::vector<std::string>{"off", "all"}));
  if (test::device().compute_capability != 90) return;
  const std::string one_pass = " --backend fused --context-parallel 3 --segment-method one-pass";
  EXPECT_EQ(rows(one_pass),
            (std::vector<std::string>{"off", "to segment_scan", "to segment_merge", "all"}));
}

TEST_F(CliOnGpu, TimesEveryStage) {
  const std::string forward =
      " --case '--tokens 130 --heads 1 --key-dim 64 --value-dim 64 --dtype bf16'";
  for (const std::string what :
       {"forward", "backward", "intra", "recompute-wu", "delta-h", "context-parallel"}) {
    const Ran ran = kda("bench " + what + forward + " --device cuda --json r.json --csv r.csv");
    ASSERT_EQ(ran.exit_code, 0) << what << ran.err;
    const nlohmann::json report = nlohmann::json::parse(read("r.json"));
    EXPECT_GT(report["copy_bytes_per_second"], 0.0);
    EXPECT_GT(report["cases"][0]["median_s"], 0.0) << what;
    EXPECT_GT(report["cases"][0]["copy_s"], 0.0) << what;
    const std::string share = what == "context-parallel" ? "% of roofline" : "% of copy";
    EXPECT_NE(read("r.csv").find(share), std::string::npos) << what;
  }
  const Ran decode =
      kda("bench decode --case '--batch 2 --tokens 1 --heads 1 --key-dim 64 --value-dim 64' "
          "--device cuda");
  EXPECT_EQ(decode.exit_code, 0) << decode.err;
  for (const char* states : {"fp32", "split"}) {
    const std::string tail = cat(" --tail --device cuda --boundary-states ", states, " --case ");
    const Ran tails =
        kda("bench decode" + tail + "'--batch 2 --tokens 2 --heads 1 --key-dim 64 --value-dim 64'");
    EXPECT_NE(tails.out.find("tail, all fold"), std::string::npos) << tails.err;
    const Ran prefills =
        kda("bench forward" + tail + "'--seq-lens 20,3 --heads 1 --key-dim 64 --value-dim 64'");
    EXPECT_NE(prefills.out.find("forward, tail"), std::string::npos) << prefills.err;
  }
  const Ran verify =
      kda("bench verify --tail --boundary-states bf16 --device cuda --json r.json --case "
          "'--batch 2 --tokens 4 --heads 1 --key-dim 64 --value-dim 64' --case "
          "'--batch 1 --tokens 16 --heads 1 --key-dim 64 --value-dim 64'");
  ASSERT_EQ(verify.exit_code, 0) << verify.err;
  const nlohmann::json verified = nlohmann::json::parse(read("r.json"));
  std::vector<std::string> names;
  for (const auto& row : verified["cases"]) names.push_back(row["what"]);
  const std::string one = "decode of one token", tail = "verify, tail", all = tail + ", all fold";
  EXPECT_EQ(names, (std::vector<std::string>{one, "verify, a slot a token", tail, all, one, tail,
                                             all}));  // no decode without a tail takes 16
  EXPECT_EQ(kda("bench lengths --tail" + forward + " --device cuda").exit_code, 2);
  // fp32 has no chunk stages.
  EXPECT_EQ(kda("bench intra --case '--tokens 8 --heads 1 --dtype fp32' --device cuda").exit_code,
            2);
  EXPECT_EQ(kda("bench forward" + forward + " --device cuda --milliseconds 5").exit_code, 2);
}

TEST_F(Cli, MissingDevicesAndBackendsExitWithThree) {
  gen("--tokens 8 --heads 1 --key-dim 8 --value-dim 8");
  for (const char* command :
       {"run x.safetensors -o y.safetensors --device cuda", "check x.safetensors --device cuda",
        "run x.safetensors -o y.safetensors --backend nothing",
        "check x.safetensors --backend sm90", "bench forward --device cuda", "bench recompute-wu",
        "bench launches --device cpu", "bench lengths --device cpu", "bench verify --device cpu"}) {
    const Ran ran = kda(command);
    EXPECT_EQ(ran.exit_code, 3) << command;
    EXPECT_NE(ran.err, "");
  }
  EXPECT_FALSE(fs::exists(path("y.safetensors")));
}

/// Bad command lines: exit 2, a message on stderr, nothing on stdout, no file left behind.
TEST_F(Cli, BadCommandLines) {
  gen("--tokens 8 --heads 1 --key-dim 8 --value-dim 8");
  gen("--tokens 8 --heads 1 --key-dim 8 --value-dim 8 --regime log", "log.safetensors");
  std::ofstream(path("junk")) << "not a safetensors file at all, but long enough";
  std::ofstream(path("empty")) << "";
  const std::size_t files = count_files();
  const char* commands[] = {
      "",
      "unknown",
      "run",
      "run x.safetensors",
      "run -o y",
      "run nothing.safetensors -o y",
      "run junk -o y",
      "run empty -o y",
      "run . -o y",
      "run x.safetensors -o no/such/folder/y",
      "run x.safetensors -o y --gate tanh",
      "run x.safetensors -o y --beta softmax",
      "run x.safetensors -o y --lower-bound 0",
      "run x.safetensors -o y --lower-bound abc",
      "run x.safetensors -o y --lower-bound nan",
      "run x.safetensors -o y --scale nan",
      "run x.safetensors -o y --scale inf",
      "run x.safetensors -o y --state-layout kk",
      "run x.safetensors -o y --out-dtype fp80",
      "run x.safetensors -o y --out-dtype float64",
      "gen -o z --tokens 8 --dtype double",
      "run x.safetensors -o y --device tpu",
      "run x.safetensors -o y --context-parallel maybe",
      "run x.safetensors -o y --context-parallel 0",
      "run x.safetensors -o y --context-parallel -2",
      "run x.safetensors -o y --segment-method three-pass",
      "run x.safetensors -o y --threads -1",
      "run x.safetensors -o y --threads 99999",
      "run x.safetensors -o y --qk-l2norm --no-qk-l2norm",
      "run x.safetensors -o y --unknown",
      "run x.safetensors extra -o y",
      "run log.safetensors -o y --gate softplus",
      "check",
      "check nothing",
      "check junk",
      "check x.safetensors --tolerance 1",
      "gen --tokens 8",
      "gen -o z",
      "gen -o z --tokens -1",
      "gen -o z --tokens abc",
      "gen -o z --tokens 8 --seq-lens 8",
      "gen -o z --seq-lens 8,x",
      "gen -o z --seq-lens ,",
      "gen -o z --seq-lens -8",
      "gen -o z --seq-lens 0x10",
      "gen -o z --seq-lens 8x",
      "run x.safetensors -o y --lower-bound -1e39",
      "run x.safetensors -o y --scale 1e39",
      "run x.safetensors -o ''",
      "gen -o z --tokens 8 --heads 0",
      "gen -o z --tokens 8 --heads 2 --value-heads 3",
      "gen -o z --tokens 8 --key-dim 300",
      "gen -o z --tokens 8 --value-dim 0",
      "gen -o z --tokens 8 --dtype int8",
      "gen -o z --tokens 8 --regime weak",
      "gen -o z --tokens 8 --seed abc",
      "inspect",
      "inspect junk",
      "inspect x.safetensors --plot no/such/folder/f.svg",
      "plan",
      "plan --heads 8",
      "plan --seq-lens 8",
      "plan --heads 0 --seq-lens 8",
      "plan --heads 8 --value-heads 3 --seq-lens 8",
      "plan --heads 8 --seq-lens 8 --sms 0",
      "plan --heads 8 --seq-lens 8 --gate none",
      "plan --heads 8 --seq-lens 8 --key-dim 512",
      "plan --heads 8 --seq-lens 99999999999",
      "plan --heads 8 --seq-lens 8 --context-parallel x",
      "bench",
      "bench sideways",
      "bench forward --set nothing",
      "bench forward --case '--tokens x'",
      "bench forward --case '--regime weak --tokens 8'",
      "bench forward --set cpu --case '--tokens 8'",
      "bench forward --group-size 0",
      "info extra",
  };
  static_assert(std::size(commands) >= 45);
  for (const char* command : commands) {
    const Ran ran = kda(command);
    EXPECT_EQ(ran.exit_code, 2) << "kda " << command;
    EXPECT_NE(ran.err, "") << "kda " << command;
    EXPECT_EQ(ran.out, "") << "kda " << command;
    EXPECT_EQ(count_files(), files) << "kda " << command;
  }
}

}  // namespace
}  // namespace kda
