// SPDX-License-Identifier: Apache-2.0
// The kda command as a function of the shared library (python/libkda/__main__.py calls it).
#include "kda/kda.h"
#include "tools/kda/commands.hpp"

/// main() of tools/kda: returns the exit status; results go to stdout, progress and errors to
/// stderr.
extern "C" KDA_API int kda_command_main(int argc, char** argv) {
  return kda::tools::run_command(argc, argv);
}
