// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include "logitless/machine.h"
#include "logitless/tensor.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {

// BT tokens, V vocabulary rows on this shard, hidden size H; each >= 0, products may exceed 2^31.
struct Shape {
  int64_t BT = 0;
  int64_t V = 0;
  int64_t H = 0;
};

// How logits are rounded before they are used.
enum class LogitsRounding : uint8_t {
  none = 0,     // fp32 logits (the native default)
  operand = 1,  // rounded to the type the operands are multiplied in, as the aclnn operators do
  infer = 2,    // gradient only: a row is rounded exactly when its logits_max is representable in
                // the operand type (its statistics then came from rounded logits)
};

// What every plan takes. A plan latches these; run obeys them.
struct PlanOptions {
  int threads = 0;              // 0 = default_threads(), fewer where the problem is tiny;
                                // run uses that many or fewer, same bits
  std::optional<Isa> isa = {};  // absent = default_isa()
  // At most this many bytes of workspace; 0 = the documented default. A limit below the least
  // possible one is ErrorKind::limit_too_small and the message names the least.
  int64_t workspace_limit_bytes = 0;
};

// Which rows (tokens) count. A row that does not count costs nothing and contributes exactly 0,
// even when its values are NaN or infinite.
struct RowFilter {
  std::optional<int64_t> ignore_index = {};    // a row whose target equals it does not count
  std::optional<ConstVectorView> counts = {};  // [BT] u8, 0 = the row does not count
};

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
