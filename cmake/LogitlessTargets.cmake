# SPDX-License-Identifier: Apache-2.0
# What every target of the project shares.

# logitless_target(<target>): C++20, warnings, hidden symbols, our include path.
function(logitless_target target)
  target_compile_features(${target} PRIVATE cxx_std_20)
  set_target_properties(${target} PROPERTIES
    CXX_EXTENSIONS OFF
    CXX_VISIBILITY_PRESET hidden
    VISIBILITY_INLINES_HIDDEN ON
    POSITION_INDEPENDENT_CODE ON)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Wshadow)
  if(LOGITLESS_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/include)
endfunction()

# logitless_quick_build(<target> [<precompiled>]): of code that runs for moments, or waits for the
# library: compiled in half the time. Its large headers are compiled once, with the target
# `precompiled`, which has to be a program with the same definitions.
function(logitless_quick_build target)
  target_compile_options(${target} PRIVATE
    $<$<OR:$<CONFIG:Release>,$<CONFIG:RelWithDebInfo>>:-O1>
    # g++ 12 warns of its own std::string then (GCC bugs 105329, 105651).
    $<$<CXX_COMPILER_ID:GNU>:-Wno-array-bounds$<SEMICOLON>-Wno-restrict$<SEMICOLON>-Wno-stringop-overflow>)
  if(ARGC GREATER 1)
    target_precompile_headers(${target} REUSE_FROM ${ARGV1})
  endif()
endfunction()

