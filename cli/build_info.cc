// SPDX-License-Identifier: Apache-2.0
#include "cli/build_info.h"

#include <fmt/format.h>

namespace logitless::cli {

std::string build_commit() { return LOGITLESS_COMMIT; }

std::string build_compiler() {
#if defined(__clang__)
  return fmt::format("Clang {}.{}.{}", __clang_major__, __clang_minor__, __clang_patchlevel__);
#elif defined(__GNUC__)
  return fmt::format("GCC {}.{}.{}", __GNUC__, __GNUC_MINOR__, __GNUC_PATCHLEVEL__);
#else
  return "unknown";
#endif
}

}  // namespace logitless::cli
