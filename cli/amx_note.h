// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace logitless::cli {

// What to say about AMX where the machine has it; else "". A user of such a machine must not take
// the ratio to this library's own peak for the ratio to what the machine could do.
constexpr const char* amx_note(bool present) {
  return present ? "present, unused; PyTorch's bf16 uses it: bench/peers.py measures the ratio"
                 : "";
}

}  // namespace logitless::cli
