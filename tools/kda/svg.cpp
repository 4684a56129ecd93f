// SPDX-License-Identifier: Apache-2.0
#include "tools/kda/svg.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace kda::tools {
namespace {

constexpr double kWidth = 760, kHeight = 420;
constexpr double kLeft = 80, kRight = 130, kTop = 48, kBottom = 56;
constexpr std::array<const char*, 8> kColors = {"#1b6ca8", "#d1495b", "#3a7d44", "#8f5fbf",
                                                "#e08e1b", "#2a9d8f", "#7a5c3e", "#555555"};

std::string text_at(double x, double y, const char* anchor, const std::string& text,
                    const char* more = "") {
  std::string safe;
  for (const char c : text) safe += c == '<' ? "&lt;" : c == '&' ? "&amp;" : std::string(1, c);
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\"{}>{}</text>\n", x, y,
                     anchor, more, safe);
}

std::string power_of_ten(int exponent) {
  return exponent >= -3 && exponent <= 5 ? fmt::format("{:g}", std::pow(10, exponent))
                                         : fmt::format("1e{}", exponent);
}

struct Axis {
  int low = 0, high = 1;  // powers of ten
  double y(double value) const {
    const double share = (std::log10(value) - low) / (high - low);
    return kHeight - kBottom - share * (kHeight - kTop - kBottom);
  }
};

Axis fit_axis(const std::vector<Series>& series) {
  double low = 1e300, high = 1e-300;
  for (const Series& line : series)
    for (const double value : line.y) {
      low = std::min(low, value);
      high = std::max(high, value);
    }
  if (low > high) return {};
  Axis axis{static_cast<int>(std::floor(std::log10(low))),
            static_cast<int>(std::ceil(std::log10(high)))};
  if (axis.high <= axis.low) axis.high = axis.low + 1;
  return axis;
}

}  // namespace

std::string render_svg(const Chart& chart) {
  const Axis axis = fit_axis(chart.series);
  const double plot_width = kWidth - kLeft - kRight;
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" "
      "height=\"{1}\" font-family=\"sans-serif\" font-size=\"12\">\n"
      "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
      kWidth, kHeight);
  svg += text_at(kLeft, 24, "start", chart.title, " font-size=\"15\"");
  for (int power = axis.low; power <= axis.high; ++power) {
    const double y = axis.y(std::pow(10, power));
    svg += fmt::format("<line x1=\"{}\" x2=\"{}\" y1=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"#ddd\"/>\n",
                       kLeft, kWidth - kRight, y, y);
    svg += text_at(kLeft - 8, y + 4, "end", power_of_ten(power));
  }
  for (std::size_t s = 0; s < chart.series.size(); ++s) {
    const Series& line = chart.series[s];
    const char* color = kColors[s % kColors.size()];
    std::string points;
    for (std::size_t i = 0; i < line.y.size(); ++i) {
      const double share =
          line.y.size() > 1 ? static_cast<double>(i) / static_cast<double>(line.y.size() - 1) : 0.5;
      points += fmt::format("{:.1f},{:.1f} ", kLeft + share * plot_width, axis.y(line.y[i]));
    }
    svg += fmt::format("<polyline fill=\"none\" stroke=\"{}\" stroke-width=\"2\" points=\"{}\"/>\n",
                       color, points);
    const double y = kTop + 16 * static_cast<double>(s);
    svg += fmt::format("<rect x=\"{}\" y=\"{:.1f}\" width=\"12\" height=\"3\" fill=\"{}\"/>\n",
                       kWidth - kRight + 14, y - 4, color);
    svg += text_at(kWidth - kRight + 32, y, "start", line.label);
  }
  const double base = kHeight - kBottom;
  svg += text_at(kLeft, base + 18, "start", chart.x_first);
  svg += text_at(kWidth - kRight, base + 18, "end", chart.x_last);
  svg += text_at(kLeft + plot_width / 2, base + 38, "middle", chart.x_label);
  svg += fmt::format(
      "<text transform=\"translate(18 {:.1f}) rotate(-90)\" "
      "text-anchor=\"middle\">{}</text>\n</svg>\n",
      kTop + (base - kTop) / 2, chart.y_label);
  return svg;
}

}  // namespace kda::tools
