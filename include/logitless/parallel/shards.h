// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "logitless/export.h"
#include "logitless/result.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {

// Rows [begin, end) of the vocabulary (or of the tokens); empty where begin == end.
struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};

// Sizes within one of each other, the longer ones first; some are empty with more ranks than rows.
LOGITLESS_API Result<RowRange> balanced_shard(int64_t V, int ranks, int rank);

// Megatron's: V is rounded up to a multiple of `multiple` * ranks and cut equally. Rows of the
// padding are no vocabulary here, so the last shards may be shorter, or empty.
LOGITLESS_API Result<RowRange> padded_shard(int64_t V, int ranks, int rank, int64_t multiple = 128);

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
