// SPDX-License-Identifier: Apache-2.0
// Walks over all floats, or every so many-th of them.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/kernels.h"

namespace logitless {

inline constexpr double kPermittedUlp = 2.0;  // docs/numerics.md quotes this number

// Distance of y from exp(x) in units of the last place of the exact value; infinite where a NaN or
// an infinity is wrong.
double exp_ulp_error(float x, float y);

// Per level the worst error of exp over every `step`-th float. The exact values are computed once
// for all of them: they take longer than the kernels.
std::vector<double> worst_exp_error(const std::vector<const cpu::Kernels*>& levels, uint64_t step);

// Per level how many of every `step`-th float are stored, rounded in place or packed as a 16-bit
// type otherwise than the storage types say (which tests/core checks against double).
std::vector<int64_t> wrong_conversions(const std::vector<const cpu::Kernels*>& levels,
                                       uint64_t step);

}  // namespace logitless
