// SPDX-License-Identifier: Apache-2.0
#include "tools/kda/print.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "tools/kda/flags.hpp"
#include "tools/kda/report.hpp"
#include "tools/kda/svg.hpp"

namespace kda::tools {
namespace {

TEST(Print, Tables) {
  EXPECT_EQ(format_table({{"name", "value"}, {"a", "1.5"}, {"long", "-20"}}),
            "  name  value\n  a       1.5\n  long    -20\n");
  EXPECT_EQ(format_csv({{"a", "b"}, {"1,5", "x"}}), "a,b\n\"1,5\",x\n");
  EXPECT_EQ(format_csv({{"--seed \"7\"", "x"}}), "\"--seed \"\"7\"\"\",x\n");
}

TEST(Print, CommandLinesAsAShellTakesThem) {
  const char* words[] = {"/home/me/build/bin/kda", "bench", "--case", "--tokens 8", "it's", ""};
  EXPECT_EQ(command_text(6, words), "kda bench --case '--tokens 8' 'it'\\''s' ''");
  const char* relative[] = {"build/tests/kda_fuzz", "accuracy"};
  EXPECT_EQ(command_text(2, relative), "build/tests/kda_fuzz accuracy");
}

TEST(Print, Units) {
  EXPECT_EQ(format_seconds(1.5e-6), "1.5 us");
  EXPECT_EQ(format_seconds(0.0123), "12.30 ms");
  EXPECT_EQ(format_seconds(61), "61.00 s");
  EXPECT_EQ(format_count(999), "999");
  EXPECT_EQ(format_count(12345), "12.3 k");
  EXPECT_EQ(format_count(3.2e15), "3200.0 T");
  EXPECT_EQ(format_error(1.234e-7), "1.23e-07");
}

TEST(Print, ProgressIsSilentWithoutATerminal) {
  testing::internal::CaptureStderr();
  {
    Progress progress("work");
    progress.update(1, 2);
    progress.update(2, 2);
    progress.update(0, 0);
  }
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST(Print, ProgressIsDrawnOnceItTakesOverASecond) {
  testing::internal::CaptureStderr();
  {
    Progress progress("work", /*terminal=*/true);
    progress.update(1, 4);  // too early
    std::this_thread::sleep_for(std::chrono::milliseconds(1050));
    progress.update(2, 4);
    progress.update(1, 0);
  }
  const std::string drawn = testing::internal::GetCapturedStderr();
  EXPECT_NE(drawn.find("work [###############...............] 2/4"), std::string::npos) << drawn;
  EXPECT_EQ(drawn.find("1/4"), std::string::npos);
  EXPECT_EQ(drawn.substr(drawn.size() - 4), "\r\033[K");  // cleared at the end
}

TEST(Svg, OneLineASeriesAndEscapedText) {
  Chart chart{"a < b & c", "x", "y", "first", "last", {{"one", {1, 10, 100}}, {"two", {5}}}};
  const std::string svg = render_svg(chart);
  EXPECT_NE(svg.find("a &lt; b &amp; c"), std::string::npos);
  std::size_t lines = 0;
  for (std::size_t at = 0; (at = svg.find("<polyline", at)) != std::string::npos; ++at) ++lines;
  EXPECT_EQ(lines, 2u);
  EXPECT_NE(svg.find("</svg>"), std::string::npos);
  EXPECT_EQ(svg.find("nan"), std::string::npos);
}

TEST(Svg, EmptyAndFlatCharts) {
  EXPECT_NE(render_svg({"t", "x", "y", "", "", {}}).find("</svg>"), std::string::npos);
  EXPECT_EQ(render_svg({"t", "x", "y", "", "", {{"flat", {10, 10}}}}).find("nan"),
            std::string::npos);
}

TEST(Flags, ContextParallel) {
  PlanOptions options;
  parse_context_parallel("off", &options);
  EXPECT_EQ(options.context_parallel, SegmentPolicy::kOff);
  parse_context_parallel("12", &options);
  EXPECT_EQ(options.context_parallel, SegmentPolicy::kFixed);
  EXPECT_EQ(options.num_segments, 12);
  for (const char* bad : {"", "on", "-1", "1.5", "4x", "99999999999999999999"})
    EXPECT_THROW(parse_context_parallel(bad, &options), Error) << bad;
}

}  // namespace
}  // namespace kda::tools
