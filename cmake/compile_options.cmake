# SPDX-License-Identifier: Apache-2.0
# Warnings, sanitizers, coverage; and the instruction sets of the blocked backend's kernels.

function(kda_compile_options target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  set_target_properties(${target} PROPERTIES CXX_EXTENSIONS OFF CXX_VISIBILITY_PRESET hidden
                                             VISIBILITY_INLINES_HIDDEN ON)
  # Designated initialisers leave the other members at their defaults on purpose.
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wshadow -Wconversion
                                           $<$<COMPILE_LANGUAGE:CXX>:-Wno-missing-field-initializers>)
  # Predicted times are the same on every host and on the device (src/plan/cut_search.hpp).
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>)
  # A project that names no build type would have all but the kernels without optimisation.
  target_compile_options(${target} PRIVATE "$<$<AND:$<COMPILE_LANGUAGE:CXX>,$<STREQUAL:$<CONFIG>,>>:-O2>")
  if(KDA_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  if(KDA_SANITIZE)
    target_compile_options(${target} PUBLIC -fsanitize=${KDA_SANITIZE} -fno-omit-frame-pointer
                                            -fno-sanitize-recover=all)
    target_link_options(${target} PUBLIC -fsanitize=${KDA_SANITIZE})
  endif()
  if(KDA_COVERAGE)
    # Not --coverage: no later -fno-profile-arcs (cmake/cuda.cmake) would undo it. Arithmetic has
    # -fprofile-update=single: an atomic counter in an inner loop takes ten times as long as the loop,
    # and threads that count at once may lose some of the counts of a line, not all of them.
    target_compile_options(${target} PUBLIC -fprofile-arcs -ftest-coverage -fprofile-update=atomic)
    target_link_options(${target} PUBLIC --coverage)
  endif()
endfunction()

# For code that takes longer to compile than to run, as options and tests do: half the time of -O3, and
# with sanitizers half of that of -O1, and three quarters of that without checks of addresses, which
# AddressSanitizer sees. SCOPE: PRIVATE, or PUBLIC for what links with it too.
function(kda_compile_quickly target scope)
  set(quick "$<$<CONFIG:Release>:-O1>")
  if(KDA_SANITIZE)
    set(quick -O0)
  endif()
  target_compile_options(${target} ${scope} "$<$<COMPILE_LANGUAGE:CXX>:${quick}>")
  if(KDA_SANITIZE MATCHES "undefined")
    target_compile_options(${target} ${scope} -fno-sanitize=null,pointer-overflow,object-size,vptr,alignment)
  endif()
endfunction()

function(kda_kernel_options)
  # Where fp32 is fused is written in the source, not left to the compiler. -O3 in every build:
  # unoptimised kernels would make the tests crawl. With sanitizers -O1: they take a sixth of the time
  # to compile.
  set(common -O3)
  if(KDA_SANITIZE)
    set(common -O1)
  endif()
  if(KDA_COVERAGE)
    list(APPEND common -fprofile-update=single)
  endif()
  set(x86 ${common} -ffp-contract=off)
  set(avx2 "")
  set(avx512 "")
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64|amd64")
    set(avx2 ${x86} -mavx2 -mfma -mf16c)
    # GCC 12's own AVX-512 header warns about its undefined-value idiom (GCC bug 105593).
    set(avx512 ${avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl
               -Wno-uninitialized $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
  endif()
  foreach(isa portable avx2 avx512)
    set(flags ${common} -Wno-conversion)
    if(DEFINED ${isa} AND NOT "${${isa}}" STREQUAL "")
      set(flags ${${isa}} -Wno-conversion)
    endif()
    set_source_files_properties(src/cpu/blocked/kernels_${isa}.cpp PROPERTIES
                                COMPILE_OPTIONS "${flags}")
  endforeach()
  # The oracle is plain loops that vectorise: worth -O3 too.
  set(oracle -O3)
  if(KDA_COVERAGE)
    list(APPEND oracle -fprofile-update=single)
  endif()
  # Its loops index vectors, where AddressSanitizer sees every bad address: checks of the pointers as well would take
  # longer than all the rest of a test.
  if(KDA_SANITIZE MATCHES "undefined")
    list(APPEND oracle -fno-sanitize=null,pointer-overflow)
  endif()
  set_source_files_properties(src/cpu/oracle/backward.cpp src/cpu/oracle/oracle.cpp
                              PROPERTIES COMPILE_OPTIONS "${oracle}")
endfunction()
