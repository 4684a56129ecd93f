# SPDX-License-Identifier: Apache-2.0
# A port over this repository: vcpkg install libkda --overlay-ports=packaging/vcpkg. That of a registry has
# vcpkg_from_github(...) of a release in place of the next line.
get_filename_component(SOURCE_PATH "${CMAKE_CURRENT_LIST_DIR}/../.." ABSOLUTE)
vcpkg_check_features(OUT_FEATURE_OPTIONS options FEATURES cuda KDA_CUDA)
# Each build has the static and the shared library, and the files of CMake name both.
vcpkg_cmake_configure(SOURCE_PATH "${SOURCE_PATH}"
  OPTIONS ${options} -DKDA_BUILD_TOOLS=OFF -DKDA_BUILD_TESTS=OFF -DKDA_BUILD_BENCH=OFF -DKDA_INSTALL=ON
          -DFETCHCONTENT_FULLY_DISCONNECTED=ON)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(PACKAGE_NAME kda CONFIG_PATH lib/cmake/kda)
vcpkg_fixup_pkgconfig()
file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/debug/include")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
