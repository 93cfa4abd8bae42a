// SPDX-License-Identifier: Apache-2.0
// The neon_bf16 level: flags come from the build, everything below has internal linkage.

#include "cpu/kernels.h"

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include "cpu/table-inl.h"
#include "cpu/vec_neon-inl.h"
#endif

namespace logitless::cpu {

const Kernels* neon_bf16_kernels() {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  static constexpr GemmKernels kF32 = gemm_table<NeonF32>();
  static constexpr GemmKernels kBf16Dot = gemm_table<NeonBf16Dot>();
  static constexpr Kernels kTable = table<NeonVec>(Isa::neon_bf16, &kF32, &kBf16Dot);
  return &kTable;
#else
  return nullptr;
#endif
}

}  // namespace logitless::cpu
