// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <csignal>

#include "logitless/cancel.h"

namespace logitless::python {

// Ctrl-C while an operator runs without the GIL: Python only notes the signal and acts on it when
// the call has ended, so here it also sets the cancel token. Armed in the main thread while
// Python's own handler is in place, which is bound to raise KeyboardInterrupt; with any other
// handler the call ends first and the handler runs then.
class Interrupt {
 public:
  // With the GIL. calls_python: the call runs Python on its way, where a pending KeyboardInterrupt
  // would break off what other ranks wait for; Python hears of the first Ctrl-C when it has ended
  // (raise_if_interrupted), of a second one at once.
  explicit Interrupt(bool worthwhile, bool calls_python = false);
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  const CancelToken* token() const { return &token_; }
  bool armed() const { return armed_; }
  // With the GIL, after the call: throws Python's exception if there was a Ctrl-C.
  void raise_if_interrupted();

 private:
  void disarm();
  bool armed_ = false;
  CancelToken token_;
  struct sigaction previous_ = {};
};

}  // namespace logitless::python
