// SPDX-License-Identifier: Apache-2.0
// The avx512 level: flags come from the build, everything below has internal linkage.

#include "cpu/kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "cpu/table-inl.h"
#include "cpu/vec_avx512-inl.h"
#endif

namespace logitless::cpu {

const Kernels* avx512_kernels() {
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
  static constexpr GemmKernels kF32 = gemm_table<Avx512F32>();

  static constexpr Kernels kTable = table<Avx512Vec>(Isa::avx512, &kF32, nullptr);
  return &kTable;
#else
  return nullptr;
#endif
}

}  // namespace logitless::cpu
