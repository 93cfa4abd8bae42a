// SPDX-License-Identifier: Apache-2.0
#ifndef LOGITLESS_ASCEND_ACLNNOP_ACLNN_FUSED_CROSS_ENTROPY_LOSS_WITH_MAX_SUM_H
#define LOGITLESS_ASCEND_ACLNNOP_ACLNN_FUSED_CROSS_ENTROPY_LOSS_WITH_MAX_SUM_H

#include "../acl/acl_rt.h"
#include "../aclnn/aclnn_base.h"
#include "aclnn_util.h"

#ifdef __cplusplus
extern "C" {
#endif

// lossOut = log(sumExpLogits) - predictedLogits, from statistics merged over all shards; with
// logits also softMaxOut = exp(logits - logitsMax) / sumExpLogits.
//
//   logitsMax, sumExpLogits, predictedLogits, lossOut [BT]   FLOAT
//   labelSmoothing                   only 0. It is a float: called through a wrong type, say with a
//                                    double, it is misread
//   inputOptional, weightOptional    ignored
//   vocabParallelLogitsOptional      null, or [BT, V] FLOAT, FLOAT16 or BF16; then
//   softMaxOutOptional               [BT, V] FLOAT, else ignored
ACLNN_API aclnnStatus aclnnFusedCrossEntropyLossWithMaxSumGetWorkspaceSize(
    const aclTensor* logitsMax, const aclTensor* sumExpLogits, const aclTensor* predictedLogits,
    float labelSmoothing, const aclTensor* inputOptional, const aclTensor* weightOptional,
    const aclTensor* vocabParallelLogitsOptional, aclTensor* lossOut, aclTensor* softMaxOutOptional,
    uint64_t* workspaceSize, aclOpExecutor** executor);

// Enqueues on the stream and returns; lifetimes as in aclnnFusedLinearOnlineMaxSum.
ACLNN_API aclnnStatus aclnnFusedCrossEntropyLossWithMaxSum(void* workspace, uint64_t workspaceSize,
                                                           aclOpExecutor* executor,
                                                           aclrtStream stream);

#ifdef __cplusplus
}
#endif

#endif
