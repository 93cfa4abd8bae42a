// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "logitless/cancel.h"

namespace logitless::cli {

// For commands that write a file. The first SIGINT or SIGTERM fires the token, so that the command
// unwinds and leaves no half file; the second ends the program at once and removes the temporary
// file itself.
const CancelToken& cancel_on_interrupt();

}  // namespace logitless::cli
