// SPDX-License-Identifier: Apache-2.0
// The C ABI in a project of an older C++.
#include <kda/kda.h>

static_assert(__cplusplus == 201103L, "kda::kda_c must leave the standard to its user");

int main() { return kda_version()[0] == '\0' ? 1 : 0; }
