// SPDX-License-Identifier: Apache-2.0
#include "cli/case.h"

#include <fmt/format.h>

#include <charconv>
#include <cstring>
#include <utility>

#include "cli/safetensors.h"
#include "cli/units.h"

namespace logitless::cli {
namespace {

Error bad(const std::string& file, const std::string& rule) {
  return Error{.kind = ErrorKind::invalid_data,
               .message = fmt::format("{}: {}", printable(file), rule)};
}

Error bad_tensor(const std::string& file, const std::string& tensor, const std::string& rule) {
  return bad(file, fmt::format("tensor `{}`: {}", printable(tensor), rule));
}

struct Found {
  const SafetensorsFile* file = nullptr;
  const TensorInfo* info = nullptr;
};

std::string name_list(const std::vector<SafetensorsFile>& files) {
  static constexpr size_t kMostNames = 8;
  std::string list;
  size_t count = 0;
  for (const SafetensorsFile& file : files) {
    for (const TensorInfo& tensor : file.tensors()) {
      if (++count <= kMostNames) list += (count == 1 ? "" : ", ") + printable(tensor.name);
    }
  }
  if (count > kMostNames) list += fmt::format(" and {} more", count - kMostNames);
  return count == 0 ? "no tensor" : list;
}

// Absent: no file has it.
Result<std::optional<Found>> find_tensor(const std::vector<SafetensorsFile>& files,
                                         const std::string& name) {
  std::optional<Found> found;
  for (const SafetensorsFile& file : files) {
    const TensorInfo* info = file.find(name);
    if (info == nullptr) continue;
    if (found) {
      return bad_tensor(
          file.path(), name,
          fmt::format("stands in {} as well; a case has it once", printable(found->file->path())));
    }
    found = Found{.file = &file, .info = info};
  }
  return found;
}

Result<Found> need_tensor(const std::vector<SafetensorsFile>& files, const std::string& name,
                          const std::string& source) {
  const Result<std::optional<Found>> found = find_tensor(files, name);
  if (!found) return found.error();
  if (!*found) {
    return bad(source, fmt::format("no tensor named `{}`; a case has input [BT, H], weight [V, H] "
                                   "and target [BT], here are {}",
                                   printable(name), name_list(files)));
  }
  return **found;
}

bool is_operand_type(std::optional<DType> dtype) {
  return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16;
}

Result<void> check_matrix(const Found& found, const std::string& shape_rule) {
  if (found.info->shape.size() != 2) {
    return bad_tensor(
        found.file->path(), found.info->name,
        fmt::format("shape [{}] must be {}", fmt::join(found.info->shape, ", "), shape_rule));
  }
  if (!is_operand_type(dtype_from_safetensors(found.info->dtype))) {
    return bad_tensor(found.file->path(), found.info->name,
                      fmt::format("dtype {} is not one of F32, F16, BF16", found.info->dtype));
  }
  return {};
}

Result<void> check_per_token(const Found& found, int64_t BT) {
  if (found.info->shape.size() != 1 || found.info->shape[0] != BT) {
    return bad_tensor(found.file->path(), found.info->name,
                      fmt::format("shape [{}] must be [BT] with BT = {}, the rows of `input`",
                                  fmt::join(found.info->shape, ", "), BT));
  }
  return {};
}

Result<std::optional<int64_t>> metadata_integer(const std::vector<SafetensorsFile>& files,
                                                const std::string& key) {
  std::optional<int64_t> value;
  for (const SafetensorsFile& file : files) {
    const auto entry = file.metadata().find(key);
    if (entry == file.metadata().end()) continue;
    const std::string& text = entry->second;
    int64_t parsed = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), parsed);
    if (error != std::errc() || end != text.data() + text.size()) {
      return bad(file.path(), fmt::format("metadata `{}` is '{}', which is not a whole number", key,
                                          printable(text)));
    }
    if (value && *value != parsed) {
      return bad(file.path(),
                 fmt::format("metadata `{}` is {}, but another file of the case says {}", key,
                             parsed, *value));
    }
    value = parsed;
  }
  return value;
}

HostTensor first_rows(const HostTensor& tensor, int64_t n) {
  std::vector<int64_t> shape = tensor.shape();
  shape[0] = n;
  HostTensor out(tensor.dtype(), std::move(shape));
  if (out.bytes() > 0) std::memcpy(out.data(), tensor.data(), static_cast<size_t>(out.bytes()));
  return out;
}

// Per-token f32 tensors that a case may bring along.
Result<std::optional<HostTensor>> load_per_token_f32(const std::vector<SafetensorsFile>& files,
                                                     const std::string& name, int64_t BT,
                                                     int64_t tokens) {
  const Result<std::optional<Found>> found = find_tensor(files, name);
  if (!found) return found.error();
  if (!*found) return std::optional<HostTensor>{};
  const Result<void> shape_fits = check_per_token(**found, BT);
  if (!shape_fits) return shape_fits.error();
  if ((*found)->info->dtype != "F32") {
    return bad_tensor((*found)->file->path(), name,
                      fmt::format("dtype {} must be F32", (*found)->info->dtype));
  }
  Result<HostTensor> tensor = (*found)->file->read_rows(*(*found)->info, tokens);
  if (!tensor) return tensor.error();
  return std::optional<HostTensor>(std::move(tensor).value());
}

}  // namespace

int64_t Case::counting_tokens() const {
  int64_t count = 0;
  for (int64_t b = 0; b < shape().BT; ++b) count += counts(b) ? 1 : 0;
  return count;
}

int64_t Case::tokens_with_gradient() const {
  int64_t count = 0;
  for (int64_t b = 0; b < shape().BT; ++b) {
    const bool any =
        grad.as<float>()[b] != 0 || (grad_logsumexp && grad_logsumexp->as<float>()[b] != 0);
    count += counts(b) && any ? 1 : 0;
  }
  return count;
}

int64_t Case::tokens_outside() const {
  int64_t count = 0;
  for (int64_t b = 0; b < shape().BT; ++b) {
    const int64_t id = target.integer_at(b);
    const bool inside = id >= vocab_start_index && id < vocab_start_index + shape().V;
    count += counts(b) && !inside ? 1 : 0;
  }
  return count;
}

Case Case::first_tokens(int64_t n) const {
  Case out;
  out.source = source;
  out.input = first_rows(input, n);
  out.weight = first_rows(weight, weight.shape()[0]);
  out.target = first_rows(target, n);
  out.grad = first_rows(grad, n);
  if (grad_logsumexp) out.grad_logsumexp = first_rows(*grad_logsumexp, n);
  out.vocab_start_index = vocab_start_index;
  out.ignore_index = ignore_index;
  return out;
}

void set_mean_grad(Case& c) {
  const int64_t BT = c.shape().BT;
  const float mean = 1.0f / static_cast<float>(std::max<int64_t>(c.counting_tokens(), 1));
  c.grad = HostTensor(DType::f32, {BT});
  for (int64_t b = 0; b < BT; ++b) c.grad.as<float>()[b] = c.counts(b) ? mean : 0.0f;
}

Result<Case> load_case(const std::vector<std::string>& paths, const CaseOptions& options) {
  Case c;
  std::vector<SafetensorsFile> files;
  for (const std::string& path : paths) {
    Result<SafetensorsFile> file = SafetensorsFile::open(path);
    if (!file) return file.error();
    files.push_back(std::move(file).value());
    c.source += (c.source.empty() ? "" : ", ") + path;
  }
  const Result<Found> input = need_tensor(files, "input", c.source);
  if (!input) return input.error();
  const Result<Found> weight = need_tensor(files, options.weight_name, c.source);
  if (!weight) return weight.error();
  const Result<Found> target = need_tensor(files, "target", c.source);
  if (!target) return target.error();

  const Result<void> input_fits = check_matrix(*input, "[BT, H]");
  if (!input_fits) return input_fits.error();
  const Result<void> weight_fits = check_matrix(*weight, "[V, H]");
  if (!weight_fits) return weight_fits.error();
  const int64_t BT = input->info->shape[0];
  const int64_t H = input->info->shape[1];
  const int64_t V = weight->info->shape[0];
  if (weight->info->shape[1] != H) {
    return bad_tensor(weight->file->path(), weight->info->name,
                      fmt::format("shape [{}] must be [V, H] with H = {}, the columns of `input`",
                                  fmt::join(weight->info->shape, ", "), H));
  }
  if (!options.dtype && weight->info->dtype != input->info->dtype) {
    return bad_tensor(
        weight->file->path(), weight->info->name,
        fmt::format("dtype {} must be {}, the dtype of `input`; --dtype converts both",
                    weight->info->dtype, input->info->dtype));
  }
  const Result<void> target_fits = check_per_token(*target, BT);
  if (!target_fits) return target_fits.error();
  if (target->info->dtype != "I32" && target->info->dtype != "I64") {
    return bad_tensor(target->file->path(), "target",
                      fmt::format("dtype {} is not one of I32, I64", target->info->dtype));
  }
  const int64_t tokens = options.tokens.value_or(BT);
  if (tokens < 0 || tokens > BT) {
    return bad_tensor(input->file->path(), "input",
                      fmt::format("has {} tokens, {} are asked for", BT, tokens));
  }

  const Result<std::optional<int64_t>> start = metadata_integer(files, "vocab_start_index");
  if (!start) return start.error();
  const Result<std::optional<int64_t>> end = metadata_integer(files, "vocab_end_index");
  if (!end) return end.error();
  const Result<std::optional<int64_t>> ignore = metadata_integer(files, "ignore_index");
  if (!ignore) return ignore.error();
  c.vocab_start_index = start->value_or(0);
  int64_t expected_end = 0;
  if (c.vocab_start_index < 0 || __builtin_add_overflow(c.vocab_start_index, V, &expected_end)) {
    return bad(c.source,
               fmt::format("metadata `vocab_start_index` is {}; it must be >= 0 and, with "
                           "V = {}, below 2^63",
                           c.vocab_start_index, V));
  }
  if (*end && **end != expected_end) {
    return bad(
        c.source,
        fmt::format("metadata `vocab_end_index` is {}; vocab_start_index {} and the {} rows of "
                    "weight make it {} (exclusive)",
                    **end, c.vocab_start_index, V, expected_end));
  }
  c.ignore_index = options.ignore_index ? options.ignore_index : *ignore;

  Result<HostTensor> input_read = input->file->read_rows(*input->info, tokens);
  if (!input_read) return input_read.error();
  RowRange rows{0, V};
  if (options.weight_rows) {
    const Result<RowRange> part = options.weight_rows(V);
    if (!part) return part.error();
    rows = *part;
    c.file_rows = V;
    c.vocab_start_index += rows.begin;
  }
  Result<HostTensor> weight_read = weight->file->read_rows(*weight->info, rows.begin, rows.end);
  if (!weight_read) return weight_read.error();
  Result<HostTensor> target_read = target->file->read_rows(*target->info, tokens);
  if (!target_read) return target_read.error();
  c.input = std::move(input_read).value();
  c.weight = std::move(weight_read).value();
  c.target = std::move(target_read).value();
  if (options.dtype && c.input.dtype() != *options.dtype) {
    c.input = c.input.converted(*options.dtype);
  }
  if (options.dtype && c.weight.dtype() != *options.dtype) {
    c.weight = c.weight.converted(*options.dtype);
  }

  Result<std::optional<HostTensor>> grad = load_per_token_f32(files, "grad", BT, tokens);
  if (!grad) return grad.error();
  if (*grad) {
    c.grad = std::move(**grad);
  } else {
    set_mean_grad(c);
  }
  Result<std::optional<HostTensor>> grad_logsumexp =
      load_per_token_f32(files, "grad_logsumexp", BT, tokens);
  if (!grad_logsumexp) return grad_logsumexp.error();
  if (*grad_logsumexp) c.grad_logsumexp = std::move(**grad_logsumexp);
  return c;
}

std::map<std::string, std::string> case_metadata(int64_t vocab_start_index, int64_t V) {
  return {{"vocab_start_index", fmt::format("{}", vocab_start_index)},
          {"vocab_end_index", fmt::format("{}", vocab_start_index + V)}};
}

}  // namespace logitless::cli
