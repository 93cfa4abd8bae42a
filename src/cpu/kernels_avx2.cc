// SPDX-License-Identifier: Apache-2.0
// The avx2 level: flags come from the build, everything below has internal linkage.

#include "cpu/kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "cpu/table-inl.h"
#include "cpu/vec_avx2-inl.h"
#endif

namespace logitless::cpu {

const Kernels* avx2_kernels() {
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
  static constexpr GemmKernels kF32 = gemm_table<Avx2F32>();

  static constexpr Kernels kTable = table<Avx2Vec>(Isa::avx2, &kF32, nullptr);
  return &kTable;
#else
  return nullptr;
#endif
}

}  // namespace logitless::cpu
