# SPDX-License-Identifier: Apache-2.0
# GoogleTest: the installed package; in a cross build, where the package's libraries are of the
# wrong architecture, built from the sources that Debian's `googletest` package installs.
if(TARGET GTest::gtest)
  set(GTest_FOUND TRUE)
  return()
endif()

if(NOT CMAKE_CROSSCOMPILING)
  find_package(GTest CONFIG QUIET)
  include(FindPackageHandleStandardArgs)
  find_package_handle_standard_args(GTest REQUIRED_VARS GTest_DIR)
  return()
endif()

set(LOGITLESS_GTEST_SOURCE /usr/src/googletest CACHE PATH "Sources of GoogleTest for cross builds")
if(EXISTS ${LOGITLESS_GTEST_SOURCE}/CMakeLists.txt)
  set(INSTALL_GTEST OFF CACHE BOOL "" FORCE)
  set(BUILD_GMOCK ON CACHE BOOL "" FORCE)
  add_subdirectory(${LOGITLESS_GTEST_SOURCE} ${CMAKE_BINARY_DIR}/googletest EXCLUDE_FROM_ALL SYSTEM)
  foreach(library gtest gtest_main gmock gmock_main)
    if(NOT TARGET GTest::${library})
      add_library(GTest::${library} ALIAS ${library})
    endif()
  endforeach()
  set(GTest_DIR ${LOGITLESS_GTEST_SOURCE})
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(GTest REQUIRED_VARS GTest_DIR
  REASON_FAILURE_MESSAGE "install the package `googletest`, or set LOGITLESS_GTEST_SOURCE")
