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
  src/cuda/recurrent/backward/backward.cu
  src/cuda/launch/checkpoint_places.cu
  src/cuda/decode/decode.cu
  src/cuda/decode/drafts.cu
  src/cuda/segments/fold_states.cu
  src/cuda/recurrent/backward/head_gates.cu
  src/cuda/decode/head_gates.cu
  src/cuda/decode/tail/ends.cu
  src/cuda/decode/tail/fold_split.cu
  src/cuda/decode/tail/move_rows.cu
  src/cuda/decode/tail/planes.cu
  src/cuda/decode/tail/ring.cu
  src/cuda/decode/tail/step.cu
  src/cuda/decode/tail/tail.cu
  src/cuda/decode/tail/verify.cu
  src/cuda/recurrent/head_gates.cu
  src/cuda/layer/fused_decode.cu
  src/cuda/layer/gated_rms_norm.cu
  src/cuda/layer/short_conv.cu
  src/cuda/launch/head_bias.cu
  src/cuda/launch/sequence_map.cu
  src/cuda/recurrent/recurrent.cu
  src/cuda/launch/zero_rows.cu
  src/cuda/staged/backward/reverse_merge.cu
  src/cuda/segments/segment_merge.cu
  src/cuda/staged/backward/chunk_grad.cu
  src/cuda/staged/backward/device_cut.cu
  src/cuda/staged/backward/finish.cu
  src/cuda/staged/chunk_delta_h_sm80.cu
  src/cuda/staged/chunk_intra.cu)

# Chains that Hopper has kernels of its own for: no code for sm_90 where those are built.
set(KDA_CUDA_KERNELS_PORTABLE_CHAINS
  src/cuda/fused/portable/portable_k128.cu
  src/cuda/fused/portable/portable_k64.cu
  src/cuda/staged/backward/chunk_delta_h_errors_sm80.cu
  src/cuda/staged/backward/reverse.cu
  src/cuda/staged/chunk_delta_h_chains_sm80.cu)

# Hopper's own instructions: machine code for sm_90a and nothing else.
set(KDA_CUDA_KERNELS_SM90A
  src/cuda/fused/device_cut.cu
  src/cuda/fused/fused_k128.cu
  src/cuda/fused/fused_k64.cu
  src/cuda/fused/segment_correct.cu
  src/cuda/fused/head_gates.cu
  src/cuda/fused/keep_k128.cu
  src/cuda/fused/keep_k64.cu
  src/cuda/gdn/backward/chains_sm90.cu
  src/cuda/gdn/backward/grad_sm90.cu
  src/cuda/gdn/backward/intra_sm90.cu
  src/cuda/gdn/chain_sm90.cu
  src/cuda/gdn/device_cut.cu
  src/cuda/gdn/intra_sm90.cu
  src/cuda/gdn/merge_sm90.cu
  src/cuda/segments/segment_compose.cu
  src/cuda/segments/segment_merge_sm90.cu
  src/cuda/staged/backward/both_merges_sm90.cu
  src/cuda/staged/backward/chains_sm90.cu
  src/cuda/staged/backward/chunk_grad_fp16_sm90.cu
  src/cuda/staged/backward/chunk_grad_head_sm90.cu
  src/cuda/staged/backward/chunk_grad_rows_sm90.cu
  src/cuda/staged/backward/chunk_grad_sm90.cu
  src/cuda/staged/backward/chunk_intra_fp16_sm90.cu
  src/cuda/staged/chunk_delta_h_sm90.cu)

set(KDA_CUDA_HOST src/cuda/recurrent/backward/launches.cpp src/cuda/launch/checkpoint_places.cpp src/cuda/launch/device.cpp
                  src/cuda/launch/head_bias.cpp
                  src/cuda/fused/launches.cpp src/cuda/fused/portable/launches.cpp src/cuda/gdn/backward/launches.cpp src/cuda/gdn/launches.cpp src/cuda/layer/launches.cpp src/cuda/recurrent/launches.cpp
                  src/cuda/recurrent/tails.cpp
                  src/cuda/segments/launches.cpp src/cuda/staged/launches.cpp
                  src/cuda/staged/backward/arguments.cpp src/cuda/staged/backward/launches.cpp src/cuda/launch/views.cpp
                  src/cuda/launch/zero_rows.cpp)

function(kda_add_emulated_cuda target)
  set(emulator ${PROJECT_SOURCE_DIR}/tests/emulator)
  # A GPU refuses addresses that are not multiples of the size of what is read or written.
  set(aligned -fsanitize=alignment -fno-sanitize-recover=alignment)
  target_link_options(${target} PUBLIC ${aligned})
  set(kernels ${KDA_CUDA_KERNELS} ${KDA_CUDA_KERNELS_PORTABLE_CHAINS} ${KDA_CUDA_KERNELS_SM90A})
  set_source_files_properties(${kernels} PROPERTIES LANGUAGE CXX COMPILE_OPTIONS
    "-x;c++;-w;-O2;${aligned};-fno-profile-arcs;-fno-test-coverage;-iquote;${emulator}/include;-I${emulator}/include;-I${emulator};-include;${emulator}/emulator.hpp")
  set_source_files_properties(tests/emulator/emulator.cpp tests/emulator/runtime.cpp PROPERTIES COMPILE_OPTIONS
    "-O3;-fno-profile-arcs;-fno-test-coverage;-I${emulator}/include")
  target_compile_definitions(${target} PRIVATE KDA_WITH_SM90A)
  target_sources(${target} PRIVATE ${KDA_CUDA_HOST} ${kernels} tests/emulator/emulator.cpp tests/emulator/runtime.cpp)
  target_include_directories(${target} SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
endfunction()

# GPUs of compute capability 8.x have the same PTX, and so have those from 10.0 on: it is made once and
# assembled for each of them, with no more registers than from PTX of their own (tests/cuda/resources.txt;
# from the PTX of 9.0 those of 10.0 and 12.0 would spill). A GPU of 8.9 runs the code of sm_86: its own would
# be the same, instruction by instruction. What has other names than numbers (90a, native, all) is left to
# CMake.
function(kda_set_architectures objects architectures)
  set(all_ptx "")
  foreach(architecture ${architectures})
    if(NOT architecture MATCHES "^([0-9]+)(-real|-virtual)?$")
      set_target_properties(${objects} PROPERTIES CUDA_ARCHITECTURES "${architectures}")
      return()
    endif()
    set(number ${CMAKE_MATCH_1})
    set(kind "${CMAKE_MATCH_2}")
    set(ptx ${number})
    if(number GREATER_EQUAL 100)
      set(ptx 100)
    elseif(ptx MATCHES "^8.$")
      set(ptx 80)
    endif()
    list(APPEND all_ptx ${ptx})
    if(NOT kind STREQUAL "-virtual")
      list(APPEND codes_${ptx} sm_${number})
    endif()
    if(NOT kind STREQUAL "-real")
      list(APPEND codes_${ptx} compute_${ptx})
    endif()
  endforeach()
  list(REMOVE_DUPLICATES all_ptx)
  set_target_properties(${objects} PROPERTIES CUDA_ARCHITECTURES OFF)
  foreach(ptx ${all_ptx})
    list(REMOVE_DUPLICATES codes_${ptx})
    list(JOIN codes_${ptx} "," codes)
    target_compile_options(${objects} PRIVATE "--generate-code=arch=compute_${ptx},code=[${codes}]")
  endforeach()
endfunction()

function(kda_add_kernels objects architectures)
  add_library(${objects} OBJECT ${ARGN})
  kda_set_architectures(${objects} "${architectures}")
  set_target_properties(${objects} PROPERTIES CUDA_VISIBILITY_PRESET hidden POSITION_INDEPENDENT_CODE ON)
  # The standard as a flag: CMake 3.25 does not know that nvcc has C++20.
  # -Xfatbin: machine code of many architectures compresses to a third.
  target_compile_options(${objects} PRIVATE
    -std=c++20 -O3 -Xcompiler=-Wall,-Wextra -Xfatbin=-compress-all -Xptxas=-v)
  set_target_properties(${objects} PROPERTIES
    CUDA_COMPILER_LAUNCHER ${PROJECT_SOURCE_DIR}/cmake/keep_ptxas_output.sh)
  target_include_directories(${objects} PRIVATE include src)
  # A wait that would hang ends the kernel (src/cuda/ptx/bounded_wait.cuh).
  target_compile_definitions(${objects} PRIVATE $<$<CONFIG:Debug>:KDA_BOUNDED_WAITS>)
endfunction()

# Sources that call the CUDA runtime.
function(kda_include_cuda)
  foreach(directory ${CUDAToolkit_INCLUDE_DIRS})
    set_property(SOURCE ${ARGN} APPEND PROPERTY COMPILE_OPTIONS -isystem "${directory}")
  endforeach()
endfunction()

function(kda_add_cuda target)
  if(KDA_CUDA STREQUAL "EMULATED")
    kda_add_emulated_cuda(${target})
    return()
  endif()
  # Only these sources know whether there is CUDA (.ci/rules): a build that had none and gets it, as
  # ./dev demo and then ./dev test do, compiles the others once.
  get_target_property(cuda_sources ${target} SOURCES)
  list(FILTER cuda_sources INCLUDE REGEX "^src/(cuda|registry)/")
  if(NOT KDA_WITH_CUDA)
    target_sources(${target} PRIVATE src/cuda/launch/no_cuda.cpp)
    set_property(SOURCE ${cuda_sources} src/cuda/launch/no_cuda.cpp APPEND PROPERTY
                 COMPILE_DEFINITIONS KDA_NO_CUDA)
    return()
  endif()
  target_sources(${target} PRIVATE ${KDA_CUDA_HOST})
  list(APPEND cuda_sources ${KDA_CUDA_HOST})
  kda_include_cuda(${KDA_CUDA_HOST})
  kda_add_kernels(kda_cuda_objects "${KDA_CUDA_ARCHITECTURES}" ${KDA_CUDA_KERNELS})
  set(KDA_CUDA_OBJECTS kda_cuda_objects)
  # Their times are the planner's, bit for bit (src/plan/cut_search.hpp).
  set_property(SOURCE src/cuda/fused/device_cut.cu src/cuda/gdn/device_cut.cu
                      src/cuda/staged/backward/device_cut.cu
               APPEND PROPERTY COMPILE_OPTIONS -fmad=false)
  set(portable "${KDA_CUDA_ARCHITECTURES}")
  if(KDA_CUDA_ARCHITECTURES MATCHES "90|all|native")
    kda_add_kernels(kda_cuda_objects_sm90a 90a-real ${KDA_CUDA_KERNELS_SM90A})
    list(APPEND KDA_CUDA_OBJECTS kda_cuda_objects_sm90a)
    set_property(SOURCE ${cuda_sources} APPEND PROPERTY COMPILE_DEFINITIONS KDA_WITH_SM90A)
    list(REMOVE_ITEM portable 90-real)
  endif()
  if(portable)
    kda_add_kernels(kda_cuda_objects_portable_chains "${portable}" ${KDA_CUDA_KERNELS_PORTABLE_CHAINS})
    list(APPEND KDA_CUDA_OBJECTS kda_cuda_objects_portable_chains)
  else()
    target_sources(${target} PRIVATE src/cuda/fused/portable/hopper_alone.cpp src/cuda/staged/backward/hopper_alone.cpp)
  endif()
  list(TRANSFORM KDA_CUDA_OBJECTS REPLACE "(.+)" "$<TARGET_OBJECTS:\\1>")
  set(KDA_CUDA_OBJECTS ${KDA_CUDA_OBJECTS} PARENT_SCOPE)
  # Beside the binaries: which kernels they hold (bench/report/evidence.py).
  find_package(Python3 COMPONENTS Interpreter QUIET)
  if(Python3_FOUND)
    set(hashes ${PROJECT_BINARY_DIR}/kernel_hashes.json)
    add_custom_command(OUTPUT ${hashes}
      COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/tools/dev/kernel_code.py hash ${PROJECT_BINARY_DIR}
              --toolkit ${CMAKE_CUDA_COMPILER_VERSION} --output ${hashes}
      DEPENDS ${PROJECT_SOURCE_DIR}/tools/dev/kernel_code.py ${KDA_CUDA_OBJECTS}
      COMMENT "" VERBATIM)
    add_custom_target(kda_kernel_hashes ALL DEPENDS ${hashes})
  endif()
endfunction()

function(kda_link_cuda library)
  if(KDA_CUDA STREQUAL "EMULATED")
    target_link_libraries(${library} PRIVATE Boost::context)
  endif()
  if(NOT KDA_WITH_CUDA)
    return()
  endif()
  target_sources(${library} PRIVATE ${KDA_CUDA_OBJECTS})
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
