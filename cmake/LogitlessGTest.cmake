# SPDX-License-Identifier: Apache-2.0
include(GoogleTest)

# logitless_discover_tests(<target> LABELS <label>... [TEST_FILTER <filter>]
#                          [PROPERTIES <name> <value>...]): one CTest case
# per test of the program, found when the tests run, so that cross builds need no emulator to build.
# gtest_discover_tests itself keeps only the first of several labels and drops the properties behind
# them (lists do not survive the script it writes), so labels are set by a script of our own.
function(logitless_discover_tests target)
  cmake_parse_arguments(arg "" "TEST_FILTER" "LABELS;PROPERTIES" ${ARGN})
  set(filter)
  if(arg_TEST_FILTER)
    set(filter TEST_FILTER ${arg_TEST_FILTER})
  endif()
  gtest_discover_tests(${target} DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60 ${filter}
    TEST_LIST ${target}_cases PROPERTIES ${arg_PROPERTIES})
  set(script ${CMAKE_CURRENT_BINARY_DIR}/${target}_labels.cmake)
  file(CONFIGURE OUTPUT ${script} @ONLY CONTENT
    "set_tests_properties(\${@target@_cases} PROPERTIES LABELS \"@arg_LABELS@\")\n")
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${script})
endfunction()
