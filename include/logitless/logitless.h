// SPDX-License-Identifier: Apache-2.0
// Cross-entropy over a huge vocabulary without building the logits.
#pragma once

#include "logitless/cancel.h"             // CancelToken
#include "logitless/forward.h"            // plan_forward: input, weight, target -> statistics
#include "logitless/gradient.h"           // plan_gradient: grad_input, grad_weight
#include "logitless/loss.h"               // plan_merge, plan_loss: statistics -> loss, softmax
#include "logitless/loss_and_gradient.h"  // plan_loss_and_gradient: a training step, in one pass
#include "logitless/machine.h"            // Isa, threads, measured peaks
#include "logitless/options.h"            // Shape, PlanOptions, RowFilter
#include "logitless/parallel/communicator.h"    // Communicator, self_communicator
#include "logitless/parallel/shards.h"          // balanced_shard, padded_shard
#include "logitless/parallel/vocab_parallel.h"  // plan_vocab_parallel_linear_cross_entropy
#include "logitless/result.h"                   // Result, Error
#include "logitless/tensor.h"                   // DType, views, bfloat16, float16
#include "logitless/version.h"                  // LOGITLESS_VERSION
