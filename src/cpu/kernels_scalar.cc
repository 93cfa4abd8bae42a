// SPDX-License-Identifier: Apache-2.0
// The scalar level: flags come from the build, everything below has internal linkage.

#include "cpu/kernels.h"
#include "cpu/table-inl.h"
#include "cpu/vec_scalar-inl.h"

namespace logitless::cpu {

const Kernels* scalar_kernels() {
  static constexpr GemmKernels kF32 = gemm_table<ScalarF32>();

  static constexpr Kernels kTable = table<ScalarVec>(Isa::scalar, &kF32, nullptr);
  return &kTable;
}

}  // namespace logitless::cpu
