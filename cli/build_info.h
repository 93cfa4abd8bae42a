// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace logitless::cli {

// The commit the build was configured at, "+" behind it if files were changed; "" outside git.
std::string build_commit();
std::string build_compiler();  // "GCC 12.2.0"

}  // namespace logitless::cli
