# SPDX-License-Identifier: Apache-2.0
# What `cmake --install` lays out: headers, liblogitless.so, liblogitless_mpi.so where MPI was found,
# find_package(logitless), logitless.pc
# and the program. The C face's toolkit folder <prefix>/ascend has its own rules in src/ascend.
include(CMakePackageConfigHelpers)

set(LOGITLESS_CMAKEDIR ${CMAKE_INSTALL_LIBDIR}/cmake/logitless)

install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/logitless
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")

install(TARGETS logitless EXPORT logitlessTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT logitlessTargets NAMESPACE logitless:: DESTINATION ${LOGITLESS_CMAKEDIR})
# A set of its own: who does not ask for the component `mpi` needs no MPI.
if(TARGET logitless_mpi)
  install(TARGETS logitless_mpi EXPORT logitlessMpiTargets
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
    INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  install(EXPORT logitlessMpiTargets NAMESPACE logitless:: DESTINATION ${LOGITLESS_CMAKEDIR})
endif()

if(LOGITLESS_BUILD_CLI AND TARGET logitless_cli)
  install(TARGETS logitless_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

configure_package_config_file(
  ${PROJECT_SOURCE_DIR}/cmake/logitlessConfig.cmake.in
  ${PROJECT_BINARY_DIR}/logitlessConfig.cmake
  INSTALL_DESTINATION ${LOGITLESS_CMAKEDIR})
# Before 1.0 a minor version may break (CHANGELOG.md), so 0.1 does not satisfy a wish for 0.2.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/logitlessConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES
  ${PROJECT_BINARY_DIR}/logitlessConfig.cmake
  ${PROJECT_BINARY_DIR}/logitlessConfigVersion.cmake
  DESTINATION ${LOGITLESS_CMAKEDIR})

# Paths in logitless.pc are relative to the file, so a moved prefix keeps working.
file(RELATIVE_PATH LOGITLESS_PC_PREFIX
  ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
configure_file(${PROJECT_SOURCE_DIR}/cmake/logitless.pc.in ${PROJECT_BINARY_DIR}/logitless.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/logitless.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
