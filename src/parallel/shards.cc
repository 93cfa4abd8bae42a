// SPDX-License-Identifier: Apache-2.0
#include "logitless/parallel/shards.h"

#include <algorithm>
#include <string>

#include "team.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {
namespace {

constexpr int64_t kMaxRows = int64_t{1} << 48;

Result<void> check_ranks(int64_t V, int ranks, int rank) {
  const auto invalid = [](const std::string& message) {
    return Error{ErrorKind::invalid_argument, message};
  };
  if (V < 0 || V > kMaxRows) {
    return invalid("V is " + std::to_string(V) + ", must be between 0 and 2^48");
  }
  if (ranks < 1) return invalid("ranks is " + std::to_string(ranks) + ", must be at least 1");
  if (rank < 0 || rank >= ranks) {
    return invalid("rank is " + std::to_string(rank) + ", must be in [0, ranks) = [0, " +
                   std::to_string(ranks) + ")");
  }
  return {};
}

}  // namespace

Result<RowRange> balanced_shard(int64_t V, int ranks, int rank) {
  if (auto ok = check_ranks(V, ranks, rank); !ok) return ok.error();
  const Range part = split(V, ranks, rank);
  return RowRange{part.begin, part.end};
}

Result<RowRange> padded_shard(int64_t V, int ranks, int rank, int64_t multiple) {
  if (auto ok = check_ranks(V, ranks, rank); !ok) return ok.error();
  if (multiple < 1 || multiple > kMaxRows / ranks) {
    return Error{ErrorKind::invalid_argument, "multiple is " + std::to_string(multiple) +
                                                  ", must be between 1 and 2^48 / ranks"};
  }
  const int64_t unit = multiple * ranks;
  const int64_t rows = (V + unit - 1) / unit * multiple;  // of each rank, padding included
  return RowRange{std::min(V, rows * rank), std::min(V, rows * (rank + 1))};
}

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
