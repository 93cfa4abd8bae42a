// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cli/host_tensor.h"
#include "logitless/options.h"
#include "logitless/parallel/shards.h"
#include "logitless/result.h"

namespace logitless::cli {

// What the operators are run on: one vocabulary shard (usually the whole vocabulary).
struct Case {
  std::string source;                        // the files it came from, for messages
  HostTensor input;                          // [BT, H] f32, f16 or bf16
  HostTensor weight;                         // [V, H], same type
  HostTensor target;                         // [BT] i32 or i64, global vocabulary ids
  HostTensor grad;                           // [BT] f32; 1 / (tokens that count) if not given
  std::optional<HostTensor> grad_logsumexp;  // [BT] f32
  int64_t vocab_start_index = 0;             // the shard is [start, start + V)
  int64_t file_rows = 0;                     // of weight in the file, where a part of them was read
  std::optional<int64_t> ignore_index;       // tokens whose target equals it do not count

  Shape shape() const {
    return {.BT = input.shape()[0], .V = weight.shape()[0], .H = input.shape()[1]};
  }
  DType dtype() const { return input.dtype(); }
  bool counts(int64_t b) const { return !ignore_index || target.integer_at(b) != *ignore_index; }
  int64_t counting_tokens() const;
  // Of these, the ones with a gradient: grad or grad_logsumexp is not 0.
  int64_t tokens_with_gradient() const;
  // Tokens that count and whose target is outside [start, start + V).
  int64_t tokens_outside() const;
  // The first n tokens; n <= BT. A default grad is not renewed.
  Case first_tokens(int64_t n) const;
};

struct CaseOptions {
  std::optional<int64_t> tokens = {};  // only the first so many
  std::optional<DType> dtype = {};     // input and weight are converted to it
  std::string weight_name = "weight";  // a model's own file may call it "lm_head.weight"
  std::optional<int64_t> ignore_index = {};
  // Which of the file's rows of weight are read; absent: all. vocab_start_index is that of the
  // first one read.
  std::function<Result<RowRange>(int64_t rows)> weight_rows = {};
};

// A case is made of one or more safetensors files. Wanted are the tensors input, weight, target
// and, where present, grad and grad_logsumexp; each may stand in any of the files but in one only.
// Scalars (vocab_start_index, vocab_end_index, ignore_index) are metadata.
Result<Case> load_case(const std::vector<std::string>& paths, const CaseOptions& options = {});

// The metadata that load_case understands, for a case of this start and size.
std::map<std::string, std::string> case_metadata(int64_t vocab_start_index, int64_t V);

// Sets grad to 1 / (tokens that count): the gradient of the mean loss.
void set_mean_grad(Case& c);

}  // namespace logitless::cli
