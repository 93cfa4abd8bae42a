// SPDX-License-Identifier: Apache-2.0
// The neon level: flags come from the build, everything below has internal linkage.

#include "cpu/kernels.h"

#if defined(__aarch64__)
#include "cpu/table-inl.h"
#include "cpu/vec_neon-inl.h"
#endif

namespace logitless::cpu {

const Kernels* neon_kernels() {
#if defined(__aarch64__)
  static constexpr GemmKernels kF32 = gemm_table<NeonF32>();

  static constexpr Kernels kTable = table<NeonVec>(Isa::neon, &kF32, nullptr);
  return &kTable;
#else
  return nullptr;
#endif
}

}  // namespace logitless::cpu
