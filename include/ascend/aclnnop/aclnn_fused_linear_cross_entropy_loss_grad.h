// SPDX-License-Identifier: Apache-2.0
#ifndef LOGITLESS_ASCEND_ACLNNOP_ACLNN_FUSED_LINEAR_CROSS_ENTROPY_LOSS_GRAD_H
#define LOGITLESS_ASCEND_ACLNNOP_ACLNN_FUSED_LINEAR_CROSS_ENTROPY_LOSS_GRAD_H

#include "../acl/acl_rt.h"
#include "../aclnn/aclnn_base.h"
#include "aclnn_util.h"

#ifdef __cplusplus
extern "C" {
#endif

// Gradients of both operands on one shard of the vocabulary:
//   d = (softmax - one_hot(maskedTarget) where not masked) * grad
//   inputGradOut = d . weight (to be summed over shards),  weightGradOut = d^T . input
//
//   grad [BT]                        FLOAT; rows where it is 0 contribute exactly 0
//   input [BT, H], weight [V, H]     FLOAT16 or BF16, the same; V is 0 or at least 128
//   targetMask                       UINT8, packed as the forward writes it, 8 * length >= BT; or
//                                    BOOL, one per token
//   maskedTarget [BT]                INT32 or INT64; outside [0, V) and not masked: the stream's
//                                    work fails and nothing is written
//   labelSmoothing                   only 0; mind the type, see the loss operator
//   softmaxOptional                  [BT, V] FLOAT, read only; or null, then it is recomputed from
//   logitsMaxOptional, sumExpLogitsOptional [BT]   FLOAT, merged over all shards
//   inputGradOut [BT, H], weightGradOut [V, H]     type of input
// All tensors have format ND.
ACLNN_API aclnnStatus aclnnFusedLinearCrossEntropyLossGradGetWorkspaceSize(
    const aclTensor* grad, const aclTensor* input, const aclTensor* weight,
    const aclTensor* targetMask, const aclTensor* maskedTarget, float labelSmoothing,
    const aclTensor* logitsMaxOptional, const aclTensor* sumExpLogitsOptional,
    const aclTensor* softmaxOptional, aclTensor* inputGradOut, aclTensor* weightGradOut,
    uint64_t* workspaceSize, aclOpExecutor** executor);

// Enqueues on the stream and returns; lifetimes as in aclnnFusedLinearOnlineMaxSum.
ACLNN_API aclnnStatus aclnnFusedLinearCrossEntropyLossGrad(void* workspace, uint64_t workspaceSize,
                                                           aclOpExecutor* executor,
                                                           aclrtStream stream);

#ifdef __cplusplus
}
#endif

#endif
