// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string>
#include <vector>

#include "cli/host_tensor.h"
#include "examples/train_lm/trainer.h"
#include "logitless/parallel/communicator.h"

// All that a run needs to go on as if it had not stopped: the parameters with AdamW's means and the
// losses so far, as a safetensors file. The head is whole in it, so that a run may go on with
// other ranks. Its metadata have a checksum of the tensors. Both functions are collective; a
// failure is the same cli::Failure on every rank, and names the file.
namespace logitless::train_lm {

// Rank 0 writes, beside `path`, and renames at the end: what stood there stays until then.
void save_checkpoint(const std::string& path, Communicator& ranks,
                     const std::vector<RowRange>& cover, const std::string& fingerprint,
                     Trainer& trainer);

// Every rank reads its own rows of the head. The file must be of the same text and options, and
// undamaged: every rank reads all of it once for that. What is wrong with it leaves the model
// alone.
void load_checkpoint(const std::string& path, Communicator& ranks, const std::string& fingerprint,
                     Trainer& trainer);

// The rows of every rank, whole, on rank 0 (nothing on the others). mine [rows of this rank, cols].
// Collective.
cli::HostTensor gather_rows(Communicator& ranks, const std::vector<RowRange>& cover,
                            std::span<const float> mine, int64_t cols);

}  // namespace logitless::train_lm
