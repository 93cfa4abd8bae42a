// SPDX-License-Identifier: Apache-2.0
#include "interrupt.h"

#include <nanobind/nanobind.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

namespace nb = nanobind;

namespace logitless::python {
namespace {

// Read by the handler, on whichever thread the signal arrives.
std::atomic<CancelToken*> running{nullptr};
std::atomic<void (*)(int)> python_handler{nullptr};
std::atomic<bool> first_is_ours{false};

void on_interrupt(int signal_number) {
  if (CancelToken* token = running.load()) {
    const bool first = !token->cancelled();
    token->cancel();
    if (first && first_is_ours.load()) return;
  }
  if (auto* handler = python_handler.load()) handler(signal_number);
}

bool is_main_thread() { return syscall(SYS_gettid) == getpid(); }

bool python_raises() {
  const nb::module_ signal = nb::module_::import_("signal");
  return signal.attr("getsignal")(signal.attr("SIGINT")).is(signal.attr("default_int_handler"));
}

}  // namespace

Interrupt::Interrupt(bool worthwhile, bool calls_python) {
  if (!worthwhile || !is_main_thread() || !python_raises()) return;
  if (sigaction(SIGINT, nullptr, &previous_) != 0 || (previous_.sa_flags & SA_SIGINFO) != 0 ||
      previous_.sa_handler == SIG_DFL || previous_.sa_handler == SIG_IGN) {
    return;
  }
  python_handler.store(previous_.sa_handler);
  first_is_ours.store(calls_python);
  running.store(&token_);
  struct sigaction ours = previous_;
  ours.sa_handler = on_interrupt;
  armed_ = sigaction(SIGINT, &ours, nullptr) == 0;
}

Interrupt::~Interrupt() { disarm(); }

void Interrupt::disarm() {
  if (!armed_) return;
  sigaction(SIGINT, &previous_, nullptr);
  running.store(nullptr);
  armed_ = false;
}

void Interrupt::raise_if_interrupted() {
  disarm();
  if (!token_.cancelled()) return;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
  PyErr_SetNone(PyExc_KeyboardInterrupt);
  throw nb::python_error();
}

}  // namespace logitless::python
