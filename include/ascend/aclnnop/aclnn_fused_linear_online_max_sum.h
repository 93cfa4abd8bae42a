// SPDX-License-Identifier: Apache-2.0
#ifndef LOGITLESS_ASCEND_ACLNNOP_ACLNN_FUSED_LINEAR_ONLINE_MAX_SUM_H
#define LOGITLESS_ASCEND_ACLNNOP_ACLNN_FUSED_LINEAR_ONLINE_MAX_SUM_H

#include "../acl/acl_rt.h"
#include "../aclnn/aclnn_base.h"
#include "aclnn_util.h"

#ifdef __cplusplus
extern "C" {
#endif

// Per token, over one shard of the vocabulary, without storing logits = input . weight^T (rounded
// to the type of input before anything else): their maximum, the sum of exp(logit - maximum), and
// the target's logit - maximum.
//
//   input [BT, H], weight [V, H]     FLOAT16 or BF16, the same; V >= 1, H <= 65534
//   target [BT]                      INT32 or INT64, ids of the whole vocabulary
//   vocabStartIndex, vocabEndIndex   this shard's ids; the end is exclusive
//   logitsMaxLocalOut, sumExpLogitsLocalOut, predictedLogitsLocalOut [BT]   FLOAT
//   targetMaskOut [ceil(BT / 8)]     UINT8; bit b % 8 of byte b / 8: 1 = the target is not here
//   maskedTargetOut [BT]             type of target; target - vocabStartIndex, 0 where masked
//   vocabParallelLogitsOutOptional   null, or [BT, V] of the type of input: the logits are stored
// Any strides; predictedLogitsLocalOut is 0 where masked.
ACLNN_API aclnnStatus aclnnFusedLinearOnlineMaxSumGetWorkspaceSize(
    const aclTensor* input, const aclTensor* weight, const aclTensor* target,
    int64_t vocabStartIndex, int64_t vocabEndIndex, aclTensor* logitsMaxLocalOut,
    aclTensor* sumExpLogitsLocalOut, aclTensor* predictedLogitsLocalOut, aclTensor* targetMaskOut,
    aclTensor* maskedTargetOut, aclTensor* vocabParallelLogitsOutOptional, uint64_t* workspaceSize,
    aclOpExecutor** executor);

// Enqueues on the stream and returns. Tensors may be destroyed afterwards; their buffers and the
// workspace must live until the stream got there.
ACLNN_API aclnnStatus aclnnFusedLinearOnlineMaxSum(void* workspace, uint64_t workspaceSize,
                                                   aclOpExecutor* executor, aclrtStream stream);

#ifdef __cplusplus
}
#endif

#endif
