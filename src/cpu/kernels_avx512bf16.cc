// SPDX-License-Identifier: Apache-2.0
// The avx512bf16 level: flags come from the build, everything below has internal linkage.

#include "cpu/kernels.h"

#if defined(__AVX512BF16__)
#include "cpu/table-inl.h"
#include "cpu/vec_avx512-inl.h"
#endif

namespace logitless::cpu {

const Kernels* avx512bf16_kernels() {
#if defined(__AVX512BF16__)
  static constexpr GemmKernels kF32 = gemm_table<Avx512F32>();
  static constexpr GemmKernels kBf16Dot = gemm_table<Avx512Bf16Dot>();
  static constexpr Kernels kTable = table<Avx512Bf16Vec>(Isa::avx512bf16, &kF32, &kBf16Dot);
  return &kTable;
#else
  return nullptr;
#endif
}

}  // namespace logitless::cpu
