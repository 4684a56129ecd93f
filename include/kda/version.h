// SPDX-License-Identifier: Apache-2.0
// The one place of the version: CMake, pkg-config, `kda info` and the C ABI read it from here.
#ifndef KDA_VERSION_H_
#define KDA_VERSION_H_

#define KDA_VERSION_MAJOR 0
#define KDA_VERSION_MINOR 2
#define KDA_VERSION_PATCH 0
#define KDA_VERSION_STRING "0.2.0"

#endif  // KDA_VERSION_H_
