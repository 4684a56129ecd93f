# SPDX-License-Identifier: Apache-2.0
# The CUDA backends: a fat binary of every architecture, the static runtime. Without a compiler (or
# with KDA_CUDA=OFF) the same library is built with functions that say so.
include(CheckLanguage)

set(KDA_WITH_CUDA OFF)
if(KDA_CUDA STREQUAL "EMULATED")
  # Kernels as C++ on the CPU, for tests (tests/emulator): CUDA's headers and nothing else of it.
  find_package(CUDAToolkit REQUIRED)
  find_package(Boost REQUIRED COMPONENTS context)
elseif(NOT KDA_CUDA STREQUAL "OFF")
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX} AND EXISTS /usr/local/cuda/bin/nvcc)
    set(CMAKE_CUDA_COMPILER /usr/local/cuda/bin/nvcc)
  endif()
  set(CMAKE_CUDA_ARCHITECTURES OFF)  # set target by target
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER AND NOT CMAKE_CROSSCOMPILING)
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    set(KDA_WITH_CUDA ON)
  elseif(KDA_CUDA STREQUAL "ON")
    message(FATAL_ERROR "KDA_CUDA=ON, but no CUDA compiler was found (set CMAKE_CUDA_COMPILER)")
  endif()
endif()
message(STATUS "kda: CUDA ${KDA_WITH_CUDA}")

set(KDA_CUDA_KERNELS
  src/cuda/sm80/chunk_delta_h.cu
  src/cuda/sm80/chunk_intra.cu
  src/cuda/smxx/decode.cu
  src/cuda/smxx/recurrent.cu
  src/cuda/smxx/segment_merge.cu
  src/cuda/smxx/sequence_map.cu)

# Hopper's own instructions: machine code for sm_90a and nothing else.
set(KDA_CUDA_KERNELS_SM90A src/cuda/sm90/chunk_delta_h.cu src/cuda/sm90/fused_prefill.cu
                           src/cuda/sm90/fused_prefill_64.cu src/cuda/sm90/segment_correct.cu
                           src/cuda/sm90/segment_merge.cu)

set(KDA_CUDA_HOST src/cuda/host/device.cpp src/cuda/host/fused.cpp src/cuda/host/recurrent.cpp
                  src/cuda/host/segment_merge.cpp src/cuda/host/staged.cpp
                  src/cuda/host/views.cpp)

function(kda_add_emulated_cuda target)
  set(emulator ${PROJECT_SOURCE_DIR}/tests/emulator)
  set_source_files_properties(${KDA_CUDA_KERNELS} ${KDA_CUDA_KERNELS_SM90A} PROPERTIES LANGUAGE CXX COMPILE_OPTIONS
    "-x;c++;-w;-O3;-fno-profile-arcs;-fno-test-coverage;-iquote;${emulator}/include;-I${emulator}/include;-I${emulator};-include;${emulator}/emulator.hpp")
  set_source_files_properties(tests/emulator/emulator.cpp tests/emulator/runtime.cpp PROPERTIES COMPILE_OPTIONS
    "-O3;-fno-profile-arcs;-fno-test-coverage;-I${emulator}/include")
  target_compile_definitions(${target} PRIVATE KDA_WITH_SM90A)
  target_sources(${target} PRIVATE ${KDA_CUDA_HOST} ${KDA_CUDA_KERNELS} ${KDA_CUDA_KERNELS_SM90A}
                 tests/emulator/emulator.cpp tests/emulator/runtime.cpp)
  target_include_directories(${target} SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
endfunction()

function(kda_add_kernels objects architectures)
  add_library(${objects} OBJECT ${ARGN})
  set_target_properties(${objects} PROPERTIES
    CUDA_ARCHITECTURES "${architectures}" CUDA_VISIBILITY_PRESET hidden POSITION_INDEPENDENT_CODE ON)
  # The standard as a flag: CMake 3.25 does not know that nvcc has C++20.
  # -Xfatbin: machine code of six architectures compresses to a third.
  target_compile_options(${objects} PRIVATE
    -std=c++20 -O3 -Xcompiler=-Wall,-Wextra -Xfatbin=-compress-all -Xptxas=-v)
  set_target_properties(${objects} PROPERTIES
    CUDA_COMPILER_LAUNCHER ${PROJECT_SOURCE_DIR}/cmake/keep_ptxas_report.sh)
  target_include_directories(${objects} PRIVATE include src)
endfunction()

function(kda_add_cuda target)
  if(KDA_CUDA STREQUAL "EMULATED")
    kda_add_emulated_cuda(${target})
    return()
  endif()
  if(NOT KDA_WITH_CUDA)
    target_sources(${target} PRIVATE src/cuda/host/no_cuda.cpp)
    target_compile_definitions(${target} PRIVATE KDA_NO_CUDA)
    return()
  endif()
  target_sources(${target} PRIVATE ${KDA_CUDA_HOST})
  target_include_directories(${target} SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
  kda_add_kernels(kda_cuda_objects "${KDA_CUDA_ARCHITECTURES}" ${KDA_CUDA_KERNELS})
  if(KDA_CUDA_ARCHITECTURES MATCHES "90|all|native")
    kda_add_kernels(kda_cuda_objects_sm90a 90a-real ${KDA_CUDA_KERNELS_SM90A})
    target_compile_definitions(${target} PRIVATE KDA_WITH_SM90A)
  endif()
  # Beside the binaries: which kernels they hold (bench/evidence.py).
  add_custom_target(kda_kernel_hashes ALL
    COMMAND ${CMAKE_COMMAND} -DOUT=${PROJECT_BINARY_DIR}/kernel_hashes.json
            -DTOOLKIT=${CMAKE_CUDA_COMPILER_VERSION} -P ${PROJECT_SOURCE_DIR}/cmake/kernel_hashes.cmake
    COMMENT "")
endfunction()

function(kda_link_cuda library)
  if(KDA_CUDA STREQUAL "EMULATED")
    target_link_libraries(${library} PRIVATE Boost::context)
  endif()
  if(NOT KDA_WITH_CUDA)
    return()
  endif()
  target_sources(${library} PRIVATE $<TARGET_OBJECTS:kda_cuda_objects>)
  if(TARGET kda_cuda_objects_sm90a)
    target_sources(${library} PRIVATE $<TARGET_OBJECTS:kda_cuda_objects_sm90a>)
  endif()
  target_link_libraries(${library} PRIVATE CUDA::cudart_static)
endfunction()

# For targets that call the CUDA runtime themselves; KDA_WITH_CUDA tells them whether there is one.
function(kda_use_cuda target)
  if(KDA_CUDA STREQUAL "EMULATED")
    target_compile_definitions(${target} PUBLIC KDA_WITH_CUDA)
    target_include_directories(${target} SYSTEM PUBLIC ${PROJECT_SOURCE_DIR}/tests/emulator/include
                               ${CUDAToolkit_INCLUDE_DIRS})
  endif()
  if(KDA_WITH_CUDA)
    target_compile_definitions(${target} PUBLIC KDA_WITH_CUDA)
    target_include_directories(${target} SYSTEM PUBLIC ${CUDAToolkit_INCLUDE_DIRS})
    target_link_libraries(${target} PUBLIC CUDA::cudart_static)
  endif()
endfunction()
