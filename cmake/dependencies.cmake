# SPDX-License-Identifier: Apache-2.0
# Dependencies: the system's package if there is one, else fetched at configure time.
include(FetchContent)

# kda_require(<package> <target> <repository> <tag>)
function(kda_require package target repository tag)
  if(TARGET ${target})
    return()
  endif()
  find_package(${package} QUIET)
  if(TARGET ${target})
    return()
  endif()
  message(STATUS "${package} not found on this system: fetching ${repository} ${tag}")
  FetchContent_Declare(${package} GIT_REPOSITORY ${repository} GIT_TAG ${tag} GIT_SHALLOW ON)
  FetchContent_MakeAvailable(${package})
endfunction()

# Header only and private: a consumer of the library never sees it.
function(kda_require_json)
  kda_require(nlohmann_json nlohmann_json::nlohmann_json
              https://github.com/nlohmann/json.git v3.11.2)
  add_library(kda_json INTERFACE)
  get_target_property(includes nlohmann_json::nlohmann_json INTERFACE_INCLUDE_DIRECTORIES)
  target_include_directories(kda_json SYSTEM INTERFACE $<BUILD_INTERFACE:${includes}>)
endfunction()

function(kda_require_tools)
  kda_require(CLI11 CLI11::CLI11 https://github.com/CLIUtils/CLI11.git v2.4.2)
  kda_require(fmt fmt::fmt-header-only https://github.com/fmtlib/fmt.git 10.2.1)
endfunction()

function(kda_require_tests)
  kda_require(GTest GTest::gtest_main https://github.com/google/googletest.git v1.14.0)
endfunction()
