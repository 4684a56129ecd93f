// SPDX-License-Identifier: Apache-2.0
// A line chart with a logarithmic y axis, as SVG text.
#pragma once

#include <string>
#include <vector>

namespace kda::tools {

struct Series {
  std::string label;
  std::vector<double> y;  ///< > 0, evenly spread over x
};

struct Chart {
  std::string title, x_label, y_label;
  std::string x_first, x_last;  ///< tick labels at the ends of x
  std::vector<Series> series;
};

std::string render_svg(const Chart& chart);

}  // namespace kda::tools
