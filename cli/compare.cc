// SPDX-License-Identifier: Apache-2.0
#include "cli/compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "cli/safetensors.h"
#include "cli/units.h"
#include "reference/tolerance.h"

namespace logitless::cli {
namespace {

enum class Kind { f32, floating, integer, mask };

struct KnownOutput {
  const char* name;
  Kind kind;
  std::vector<int64_t> shape;
};

std::vector<KnownOutput> known_outputs(const Shape& s) {
  return {{"logits_max", Kind::f32, {s.BT}},
          {"sum_exp_logits", Kind::f32, {s.BT}},
          {"predicted_logits", Kind::f32, {s.BT}},
          {"target_mask", Kind::mask, {packed_mask_bytes(s.BT)}},
          {"masked_target", Kind::integer, {s.BT}},
          {"loss", Kind::f32, {s.BT}},
          {"logsumexp", Kind::f32, {s.BT}},
          {"logits", Kind::floating, {s.BT, s.V}},
          {"softmax", Kind::f32, {s.BT, s.V}},
          {"grad_input", Kind::floating, {s.BT, s.H}},
          {"grad_weight", Kind::floating, {s.V, s.H}}};
}

const char* allowed_dtypes(Kind kind) {
  switch (kind) {
    case Kind::f32:
      return "F32";
    case Kind::floating:
      return "F32, F16 or BF16";
    case Kind::integer:
      return "I32 or I64";
    case Kind::mask:
      return "U8 or BOOL";
  }
  return "";
}

bool dtype_fits(Kind kind, std::optional<DType> dtype) {
  switch (kind) {
    case Kind::f32:
      return dtype == DType::f32;
    case Kind::floating:
      return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16;
    case Kind::integer:
      return dtype == DType::i32 || dtype == DType::i64;
    case Kind::mask:
      return dtype == DType::u8;
  }
  return false;
}

bool shape_fits(const KnownOutput& known, const std::vector<int64_t>& shape, int64_t BT) {
  if (known.kind == Kind::mask && shape == std::vector<int64_t>{BT}) return true;
  return shape == known.shape;
}

const HostTensor* find(const ForeignOutputs& outputs, const char* name) {
  const auto entry = outputs.find(name);
  return entry == outputs.end() ? nullptr : &entry->second;
}

}  // namespace

Result<ForeignOutputs> load_outputs(const std::string& path, const Case& c) {
  const Result<SafetensorsFile> file = SafetensorsFile::open(path);
  if (!file) return file.error();
  ForeignOutputs outputs;
  for (const KnownOutput& known : known_outputs(c.shape())) {
    const TensorInfo* info = file->find(known.name);
    if (info == nullptr) continue;
    const auto refuse = [&](const std::string& rule) {
      return Error{
          .kind = ErrorKind::invalid_data,
          .message = fmt::format("{}: tensor `{}`: {}", printable(path), known.name, rule)};
    };
    if (!shape_fits(known, info->shape, c.shape().BT)) {
      return refuse(fmt::format("shape [{}] must be [{}] for the case {}",
                                fmt::join(info->shape, ", "), fmt::join(known.shape, ", "),
                                format_shape(c.shape())));
    }
    if (!dtype_fits(known.kind, dtype_from_safetensors(info->dtype))) {
      return refuse(fmt::format("dtype {} must be {}", info->dtype, allowed_dtypes(known.kind)));
    }
    Result<HostTensor> tensor = file->read(*info);
    if (!tensor) return tensor.error();
    outputs.emplace(known.name, std::move(tensor).value());
  }
  if (outputs.empty()) {
    return Error{
        .kind = ErrorKind::invalid_data,
        .message = fmt::format("{}: has none of the outputs that can be judged (logits_max, "
                               "sum_exp_logits, predicted_logits, target_mask, "
                               "masked_target, loss, logsumexp, logits, softmax, "
                               "grad_input, grad_weight)",
                               printable(path))};
  }
  return outputs;
}

bool CompareReport::fine() const {
  return std::ranges::all_of(judgements,
                             [](const Judgement& judgement) { return judgement.fine(); });
}

namespace {

// How far a logit rounded to 16 bits moves if its float error carries it over the nearest rounding
// boundary; 0 when the boundary is out of reach.
double flip_of_rounded(DType dtype, double unrounded, double deviation, double samples) {
  if (!std::isfinite(unrounded)) return 0;
  const double step = reference::spacing(dtype, unrounded);
  const double to_boundary = step / 2 - std::abs(unrounded - reference::round_to(dtype, unrounded));
  return to_boundary <= reference::kMargin * reference::spread(samples) * deviation ? step : 0;
}

// Softmax made elsewhere, from float64 logits: what logits and statistics may be off by is allowed
// as well.
void judge_foreign_softmax(const HostTensor& softmax, const reference::Logits& logits,
                           const reference::Statistics& statistics, LogitsRounding rounding,
                           DType dtype, Judgements& out) {
  const int64_t V = softmax.shape()[1];
  const bool rounded = rounding == LogitsRounding::operand;
  const double samples =
      static_cast<double>(statistics.tokens.size()) * static_cast<double>(std::max<int64_t>(V, 1));
  ElementJudge judge("softmax", "softmax");
  for (size_t i = 0; i < statistics.tokens.size(); ++i) {
    const auto row = static_cast<int64_t>(i);
    const double max = statistics.logits_max.value[i];
    const double sum = statistics.sum_exp_logits.value[i];
    for (int64_t v = 0; v < V; ++v) {
      const double logit = logits.value(row, v);
      const double value = statistics.counts[i] ? reference::softmax(logit, max, sum) : 0;
      double limit = 0;
      if (statistics.counts[i] && std::isfinite(value)) {
        const double deviation = logits.deviation(row, v);
        const double flip =
            rounded ? flip_of_rounded(dtype, logits.unrounded(row, v), deviation, samples) : 0;
        limit = reference::allowed_softmax(
            value, logit - max,
            std::hypot(rounded ? 0 : deviation, statistics.logsumexp_deviation[i]),
            std::expm1(flip) + statistics.logsumexp_flip[i], samples);
      }
      judge.add(static_cast<double>(softmax.as<float>()[statistics.tokens[i] * V + v]), value,
                limit, statistics.tokens[i], v);
    }
  }
  out.push_back(judge.verdict());
}

// Statistics for all BT tokens, of which only the listed ones are known; the others are not read.
reference::Statistics spread_out(const reference::Statistics& listed, const Case& c) {
  const auto BT = static_cast<size_t>(c.shape().BT);
  reference::Statistics all;
  all.logits_max.value.assign(BT, 0);
  all.sum_exp_logits.value.assign(BT, 1);
  all.target_mask.assign(BT, 1);
  all.masked_target.assign(BT, 0);
  all.counts.assign(BT, 0);
  all.logsumexp_deviation.assign(BT, 0);
  for (size_t i = 0; i < listed.tokens.size(); ++i) {
    const auto b = static_cast<size_t>(listed.tokens[i]);
    all.logits_max.value[b] = listed.logits_max.value[i];
    all.sum_exp_logits.value[b] = listed.sum_exp_logits.value[i];
    all.target_mask[b] = listed.target_mask[i];
    all.masked_target[b] = listed.masked_target[i];
    all.counts[b] = listed.counts[i];
    all.logsumexp_deviation[b] =
        std::hypot(listed.logsumexp_deviation[i], listed.logsumexp_flip[i]);
  }
  return all;
}

// The file's own statistics for the gradient to be judged with; masks come from the case.
reference::Statistics statistics_of_file(const HostTensor& logits_max,
                                         const HostTensor& sum_exp_logits, const Case& c) {
  const Shape shape = c.shape();
  reference::Statistics all;
  for (int64_t b = 0; b < shape.BT; ++b) {
    const int64_t row = c.target.integer_at(b) - c.vocab_start_index;
    const bool inside = c.counts(b) && row >= 0 && row < shape.V;
    all.logits_max.value.push_back(static_cast<double>(logits_max.as<float>()[b]));
    all.sum_exp_logits.value.push_back(static_cast<double>(sum_exp_logits.as<float>()[b]));
    all.target_mask.push_back(inside ? 0 : 1);
    all.masked_target.push_back(inside ? row : 0);
    all.counts.push_back(c.counts(b) ? 1 : 0);
  }
  return all;
}

void set_mean_loss(const HostTensor& loss, const reference::Statistics& statistics,
                   CompareReport& report) {
  const reference::Loss expected = reference::loss(statistics);
  double got_sum = 0, expected_sum = 0, count = 0;
  for (size_t i = 0; i < statistics.tokens.size(); ++i) {
    if (!statistics.counts[i]) continue;
    got_sum += static_cast<double>(loss.as<float>()[statistics.tokens[i]]);
    expected_sum += expected.loss.value[i];
    ++count;
  }
  report.mean_loss = got_sum / std::max(count, 1.0);
  report.mean_loss_float64 = expected_sum / std::max(count, 1.0);
}

}  // namespace

CompareReport compare_outputs(const Case& c, const ForeignOutputs& outputs,
                              const CompareOptions& options) {
  const auto say = [&](const char* what) {
    if (options.progress) options.progress(what);
  };
  const Shape shape = c.shape();
  CompareReport report;
  for (const KnownOutput& known : known_outputs(shape)) {
    if (find(outputs, known.name) == nullptr) report.absent.emplace_back(known.name);
  }
  const HostTensor* logits = find(outputs, "logits");
  const HostTensor* softmax = find(outputs, "softmax");
  const HostTensor* loss = find(outputs, "loss");
  const HostTensor* grad_input = find(outputs, "grad_input");
  const HostTensor* grad_weight = find(outputs, "grad_weight");
  const HostTensor* logits_max = find(outputs, "logits_max");
  const HostTensor* sum_exp_logits = find(outputs, "sum_exp_logits");
  const bool gradient = grad_input != nullptr || grad_weight != nullptr;
  report.statistics_from_file = gradient && logits_max != nullptr && sum_exp_logits != nullptr;

  say("timing float64");
  report.sample = choose_sample(
      c, {.full = options.full,
          .passes_per_token = 1.0 + (logits || softmax ? 1 : 0) + (grad_input ? 2 : 0),
          .passes_per_row = 2});
  // Every row of grad_weight needs the statistics of all tokens.
  const bool all_statistics = grad_weight != nullptr && !report.statistics_from_file;
  std::vector<int64_t> tokens = report.sample.tokens;
  if (all_statistics) {
    tokens.resize(static_cast<size_t>(shape.BT));
    std::iota(tokens.begin(), tokens.end(), 0);
  }

  say("float64 forward");
  const reference::ForwardOptions forward_options =
      reference_options(c, {.begin = 0, .end = shape.V}, options.rounding);
  const reference::Statistics expected = reference::forward(
      c.input.matrix(), c.weight.matrix(), c.target.vector(), forward_options, tokens);
  judge_statistics("forward",
                   {.logits_max = logits_max,
                    .sum_exp_logits = sum_exp_logits,
                    .predicted_logits = find(outputs, "predicted_logits"),
                    .target_mask = find(outputs, "target_mask"),
                    .masked_target = find(outputs, "masked_target")},
                   expected, shape.BT, report.judgements);
  judge_loss("loss", loss, find(outputs, "logsumexp"), expected, false, report.judgements);
  if (loss != nullptr) set_mean_loss(*loss, expected, report);

  if (logits != nullptr || softmax != nullptr) {
    // In blocks: three doubles per logit are held.
    constexpr size_t kBlock = 128;
    for (size_t begin = 0; begin < report.sample.tokens.size(); begin += kBlock) {
      say("float64 logits");
      const size_t end = std::min(begin + kBlock, report.sample.tokens.size());
      std::vector<int64_t> block;
      for (size_t i = begin; i < end; ++i) {
        if (c.counts(report.sample.tokens[i])) block.push_back(report.sample.tokens[i]);
      }
      const reference::Logits expected_logits =
          reference::logits(c.input.matrix(), c.weight.matrix(), forward_options, block);
      Judgements judgements;
      if (logits != nullptr) {
        judge_logits("forward", *logits, expected_logits, block, options.rounding, c.dtype(),
                     judgements);
      }
      if (softmax != nullptr) {
        const reference::Statistics of_block = reference::forward(
            c.input.matrix(), c.weight.matrix(), c.target.vector(), forward_options, block);
        judge_foreign_softmax(*softmax, expected_logits, of_block, options.rounding, c.dtype(),
                              judgements);
      }
      join(report.judgements, judgements);
    }
  }
  if (!gradient) return report;

  const reference::Statistics given = report.statistics_from_file
                                          ? statistics_of_file(*logits_max, *sum_exp_logits, c)
                                          : spread_out(expected, c);
  reference::GradientOperands operands = reference_operands(c, given);
  operands.logsumexp_deviation = given.logsumexp_deviation;
  const reference::GradientOptions gradient_options{
      .multiply = {}, .logits_rounding = options.rounding, .held_softmax = options.held_softmax};
  if (grad_input != nullptr) {
    say("float64 grad_input");
    judge_gradient("gradient", "grad_input", *grad_input,
                   reference::grad_input(operands, gradient_options, report.sample.tokens), shape.V,
                   report.judgements);
  }
  if (grad_weight != nullptr) {
    say("float64 grad_weight");
    judge_grad_weights({{.stage = "gradient", .tensor = grad_weight}}, operands, gradient_options,
                       report.sample.vocabulary, report.judgements);
  }
  return report;
}

}  // namespace logitless::cli
