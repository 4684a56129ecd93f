# SPDX-License-Identifier: Apache-2.0
# find_package(kda) with kda::kda (C++ and C, static) and kda::kda_c (C, shared); pkg-config kda.
include(CMakePackageConfigHelpers)

install(TARGETS kda kda_c EXPORT kda-targets
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/kda DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
if(TARGET kda_command)
  install(TARGETS kda_command RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

set(config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/kda)
install(EXPORT kda-targets NAMESPACE kda:: DESTINATION ${config_dir})
configure_package_config_file(cmake/kda-config.cmake.in ${PROJECT_BINARY_DIR}/kda-config.cmake
                              INSTALL_DESTINATION ${config_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/kda-config-version.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/kda-config.cmake ${PROJECT_BINARY_DIR}/kda-config-version.cmake
        DESTINATION ${config_dir})

# Relative to the .pc file, so that an installed tree can move.
file(RELATIVE_PATH KDA_PC_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
set(KDA_PC_CUDA "")
if(KDA_WITH_CUDA)
  set(KDA_PC_CUDA "-L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -lrt -ldl ")
endif()
configure_file(cmake/kda.pc.in ${PROJECT_BINARY_DIR}/kda.pc @ONLY)
configure_file(cmake/kda_c.pc.in ${PROJECT_BINARY_DIR}/kda_c.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/kda.pc ${PROJECT_BINARY_DIR}/kda_c.pc
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
