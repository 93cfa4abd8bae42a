// SPDX-License-Identifier: Apache-2.0
#pragma once

// One place for the version: CMake, the command line and the packages read it from here.
#define LOGITLESS_VERSION_MAJOR 0
#define LOGITLESS_VERSION_MINOR 1
#define LOGITLESS_VERSION_PATCH 0
#define LOGITLESS_VERSION "0.1.0"
