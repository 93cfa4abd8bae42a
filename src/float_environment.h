// SPDX-License-Identifier: Apache-2.0
// The floating-point control of the calling thread, as results are defined for: rounding to
// nearest, subnormals kept, no traps. Hosts change it, and for some of their threads only
// (torch.set_flush_denormal, a library linked with -ffast-math): the bits of a result would then
// depend on which thread computed it.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#elif !defined(__aarch64__)
#include <cfenv>
#endif

namespace logitless {

// The default while it lives; what was there before comes back with it.
class DefaultFloatEnvironment {
 public:
#if defined(__x86_64__)
  DefaultFloatEnvironment() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~DefaultFloatEnvironment() { _mm_setcsr(before_); }
#elif defined(__aarch64__)
  DefaultFloatEnvironment() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}) : "memory");
  }
  ~DefaultFloatEnvironment() { asm volatile("msr fpcr, %0" : : "r"(before_) : "memory"); }
#else
  DefaultFloatEnvironment() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&before_); }
#endif
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
#if defined(__x86_64__)
  unsigned before_;
#elif defined(__aarch64__)
  uint64_t before_;
#else
  std::fenv_t before_;
#endif
};

}  // namespace logitless
