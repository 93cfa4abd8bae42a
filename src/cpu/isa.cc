// SPDX-License-Identifier: Apache-2.0
#include "cpu/isa.h"

#include <array>
#include <cstdlib>

#include "cpu/kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace logitless::cpu {
namespace {

bool always() { return true; }

#if defined(__x86_64__)
bool has_f16c() {  // clang 14's __builtin_cpu_supports does not know its name
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && ((c >> 29) & 1u) != 0;
}
// __builtin_cpu_supports also asks the operating system whether it saves the registers.
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
#else
bool has_avx2() { return false; }
bool has_avx512() { return false; }
bool has_avx512bf16() { return false; }
#endif

#if defined(__aarch64__)
bool has_neon() { return true; }
bool has_neon_bf16() { return (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0; }
#else
bool has_neon() { return false; }
bool has_neon_bf16() { return false; }
#endif

constexpr std::array kLevels = {
    Level{Isa::avx512bf16, "avx512bf16", &avx512bf16_kernels, &has_avx512bf16},
    Level{Isa::avx512, "avx512", &avx512_kernels, &has_avx512},
    Level{Isa::avx2, "avx2", &avx2_kernels, &has_avx2},
    Level{Isa::neon_bf16, "neon_bf16", &neon_bf16_kernels, &has_neon_bf16},
    Level{Isa::neon, "neon", &neon_kernels, &has_neon},
    Level{Isa::scalar, "scalar", &scalar_kernels, &always},
};

}  // namespace

std::span<const Level> levels() { return kLevels; }

const Level& level_of(Isa isa) {
  for (const Level& level : kLevels) {
    if (level.isa == isa) return level;
  }
  return kLevels.back();
}

// Asked once: cpuid is slow in a virtual machine, and the answer does not change.
bool usable(const Level& level) {
  static const auto offered = [] {
    std::array<bool, kLevels.size()> all{};
    for (size_t i = 0; i < kLevels.size(); ++i) {
      all[i] = kLevels[i].kernels() != nullptr && kLevels[i].offered();
    }
    return all;
  }();
  return offered[static_cast<size_t>(&level - kLevels.data())];
}

const Kernels* kernels_of(Isa isa) { return level_of(isa).kernels(); }

bool amx_bf16_present() {
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || ((c >> 27) & 1u) == 0) return false;  // no XGETBV
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  uint32_t low = 0;
  uint32_t high = 0;
  asm("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return amx_bf16(d, uint64_t{high} << 32 | low);
#else
  return false;
#endif
}

}  // namespace logitless::cpu
