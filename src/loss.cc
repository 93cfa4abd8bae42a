// SPDX-License-Identifier: Apache-2.0
// Statistics of shards -> statistics of the whole vocabulary -> loss, logsumexp, softmax.
#include "logitless/loss.h"

#include <cmath>
#include <limits>

#include "check.h"
#include "loss_row.h"
#include "plan.h"
#include "team.h"
#include "views.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int64_t kRowsPerThread = 4096;  // fewer rows are not worth waking a thread

// One row of every shard is read before the row is written, so an output may be an input's view.
void merge_row(const MergePlanData& plan, std::span<const ShardStatistics> shards,
               const MergeOutputs& out, int64_t b) {
  float max = -kInf;
  float sum = 0.0f;
  float low = 0.0f;
  for (const ShardStatistics& s : shards) {
    const float shard_max = f32_at(s.logits_max, b);
    const float shard_sum = f32_at(s.sum_exp_logits, b);
    plan.kernels->merge_rows(&max, &sum, &low, &shard_max, &shard_sum, 1);
  }
  float predicted = 0.0f;
  for (const ShardStatistics& s : shards) {
    if (mask_at(s.target_mask, b)) continue;
    const float local = f32_at(s.logits_max, b);
    // A shard of -inf logits owns the target: with any finite logit elsewhere p is 0.
    const float shift = local == max ? 0.0f : local - max;
    predicted = f32_at(s.predicted_logits, b) + shift;
    break;
  }
  set_f32(out.logits_max, b, max);
  set_f32(out.sum_exp_logits, b, sum + low);
  set_f32(out.predicted_logits, b, predicted);
}

}  // namespace

Result<void> run(const MergePlan& plan, std::span<const ShardStatistics> shards,
                 const MergeOutputs& outputs, std::span<std::byte> /*workspace*/,
                 const CancelToken* cancel) {
  const MergePlanData& p = plan.data();
  if (auto ok = check(p, shards, outputs); !ok) return ok;
  if (cancel != nullptr && cancel->cancelled()) {
    return Error{ErrorKind::cancelled, "merge: cancelled"};
  }
  const auto threads = static_cast<int>(
      std::min<int64_t>(p.threads, ceil_div(std::max<int64_t>(p.BT, 1), kRowsPerThread)));
  run_team(threads, [&](const Team& team) {
    const Range mine = team.part(p.BT);
    for (int64_t b = mine.begin; b < mine.end; ++b) merge_row(p, shards, outputs, b);
  });
  if (outputs.target_mask) {
    write_mask(*outputs.target_mask, false, [&](int64_t b) {
      for (const ShardStatistics& s : shards) {
        if (!mask_at(s.target_mask, b)) return false;
      }
      return true;
    });
  }
  return {};
}

Result<void> run(const LossPlan& plan, const LossOperands& in, const LossOutputs& out,
                 std::span<std::byte> /*workspace*/, const CancelToken* cancel) {
  const LossPlanData& p = plan.data();
  if (auto ok = check(p, in, out); !ok) return ok;
  const cpu::Kernels& kernels = *p.target.kernels;
  const int64_t work = out.softmax ? p.BT * std::max<int64_t>(p.V, 1) / 16 : p.BT;
  const auto threads = static_cast<int>(
      std::min<int64_t>(p.target.threads, ceil_div(std::max<int64_t>(work, 1), kRowsPerThread)));
  Stop stop(cancel);
  run_team(threads, [&](const Team& team) {
    constexpr int64_t kBlock = 512;
    alignas(64) float values[kBlock];
    const Range mine = team.part(p.BT);
    for (int64_t b = mine.begin; b < mine.end; ++b) {
      if (stop.requested()) return;
      const bool counts = !in.counts || byte_at(*in.counts, b);
      const float max = f32_at(in.logits_max, b);
      const float sum = f32_at(in.sum_exp_logits, b);
      const float loss = loss_of_row(max, sum, f32_at(in.predicted_logits, b));
      set_f32(out.loss, b, counts ? loss : 0.0f);
      if (out.logsumexp) set_f32(*out.logsumexp, b, counts ? std::log(sum) + max : 0.0f);
      if (!out.softmax) continue;
      if (!counts) {
        zero_row(*out.softmax, b);
        continue;
      }
      for (int64_t v = 0; v < p.V; v += kBlock) {
        const int64_t count = std::min(kBlock, p.V - v);
        load_row(kernels, *in.logits, b, v, count, values);
        kernels.softmax(values, count, max, 1.0f / sum, values);
        store_row(kernels, *out.softmax, b, v, count, values);
      }
    }
  });
  if (stop.requested()) return Error{ErrorKind::cancelled, "loss: cancelled"};
  return {};
}

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
