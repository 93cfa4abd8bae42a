// SPDX-License-Identifier: Apache-2.0
#include "cli/interrupt.h"

#include <signal.h>
#include <unistd.h>

#include "cli/failure.h"
#include "cli/files.h"

namespace logitless::cli {
namespace {

CancelToken token;  // a lock-free atomic: may be set in a handler

void on_signal(int) {
  if (token.cancelled()) {
    remove_unfinished_file();
    ::_exit(kExitCancelled);
  }
  token.cancel();
}

}  // namespace

const CancelToken& cancel_on_interrupt() {
  struct sigaction action {};
  action.sa_handler = on_signal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  return token;
}

}  // namespace logitless::cli
