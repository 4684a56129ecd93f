// SPDX-License-Identifier: Apache-2.0
// kda: Kimi Delta Attention on files. Results on stdout, progress and errors on stderr.
#include "tools/kda/commands.hpp"

int main(int argc, char** argv) { return kda::tools::run_command(argc, argv); }
