// SPDX-License-Identifier: Apache-2.0
#include "cli/baseline.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "cli/files.h"
#include "cli/units.h"

namespace logitless::cli {
namespace {

using nlohmann::json;

// Thrown and caught in this file only: the place and the rule.
struct Malformed {
  std::string message;
};

// A member of an object, of the type T; where and name are for the message.
template <typename T>
T member(const json& object, const std::string& where, const char* name, const char* type) {
  const auto complain = [&](const std::string& rule) {
    throw Malformed{fmt::format("{}{}{} {}", where, where.empty() ? "" : ".", name, rule)};
  };
  if (!object.is_object() || !object.contains(name)) complain("is missing");
  const json& value = object[name];
  bool fits = false;
  if constexpr (std::is_same_v<T, std::string>) {
    fits = value.is_string();
  } else if constexpr (std::is_integral_v<T>) {
    fits = value.is_number_integer();
  } else if constexpr (std::is_same_v<T, double>) {
    fits = value.is_number() && std::isfinite(value.get<double>());
  } else {
    fits = value.is_array();
  }
  if (!fits) complain(fmt::format("must be {}", type));
  return value.get<T>();
}

template <typename T>
T optional_member(const json& object, const std::string& where, const char* name,
                  const char* type) {
  return object.contains(name) ? member<T>(object, where, name, type) : T{};
}

constexpr const char* kText = "text";
constexpr const char* kWhole = "a whole number";
constexpr const char* kNumber = "a number";
constexpr const char* kList = "a list";

Baseline::Line parse_line(const json& entry, const std::string& where) {
  Baseline::Line line;
  line.op = member<std::string>(entry, where, "op", kText);
  const json shape = entry.contains("shape") ? entry["shape"] : json();
  line.shape = {.BT = member<int64_t>(shape, where + ".shape", "BT", kWhole),
                .V = member<int64_t>(shape, where + ".shape", "V", kWhole),
                .H = member<int64_t>(shape, where + ".shape", "H", kWhole)};
  line.dtype = member<std::string>(entry, where, "dtype", kText);
  line.isa = member<std::string>(entry, where, "isa", kText);
  line.threads = static_cast<int>(member<int64_t>(entry, where, "threads", kWhole));
  line.logits_rounding = member<std::string>(entry, where, "logits_rounding", kText);
  line.only = optional_member<std::string>(entry, where, "only", kText);
  line.zero_grad_rows = optional_member<double>(entry, where, "zero_grad_rows", kNumber);
  line.workspace_limit_bytes =
      optional_member<int64_t>(entry, where, "workspace_limit_bytes", kWhole);
  line.grad_tolerance = optional_member<double>(entry, where, "grad_tolerance", kNumber);
  const auto repeats = member<int64_t>(entry, where, "repeats", kWhole);
  if (repeats < kLeastRepeats) {
    throw Malformed{fmt::format("{}.repeats is {}, a comparison of intervals needs at least {}",
                                where, repeats, kLeastRepeats)};
  }
  line.ratio_to_peak = member<double>(entry, where, "ratio_to_peak", kNumber);
  const auto interval = member<json>(entry, where, "ratio_interval", kList);
  if (interval.size() != 2 || !interval[0].is_number() || !interval[1].is_number() ||
      interval[0].get<double>() > interval[1].get<double>()) {
    throw Malformed{where + ".ratio_interval must be two numbers, the lower first"};
  }
  line.ratio_interval = {.low = interval[0].get<double>(), .high = interval[1].get<double>()};
  return line;
}

Baseline parse_document(const json& document) {
  const auto schema = optional_member<std::string>(document, "", "schema", kText);
  if (schema != kBenchSchema) {
    throw Malformed{
        fmt::format("schema is {}, must be '{}': was it written by this version's "
                    "`logitless bench --json`?",
                    schema.empty() ? "missing" : "'" + printable(schema) + "'", kBenchSchema)};
  }
  Baseline baseline;
  baseline.commit = member<std::string>(document, "", "commit", kText);
  baseline.date = member<std::string>(document, "", "date", kText);
  baseline.cpu = member<std::string>(document, "", "cpu", kText);
  baseline.l3_bytes = member<int64_t>(document, "", "l3_bytes", kWhole);
  baseline.isa = member<std::string>(document, "", "isa", kText);
  for (const json& threads : member<json>(document, "", "threads", kList)) {
    if (!threads.is_number_integer()) throw Malformed{"threads must be a list of whole numbers"};
    baseline.threads.push_back(static_cast<int>(threads.get<int64_t>()));
  }
  const auto cases = member<json>(document, "", "cases", kList);
  for (size_t i = 0; i < cases.size(); ++i) {
    baseline.lines.push_back(parse_line(cases[i], fmt::format("cases[{}]", i)));
  }
  if (baseline.lines.empty()) throw Malformed{"cases is empty"};
  return baseline;
}

bool same_work(const BenchLine& now, const Baseline::Line& before) {
  return now.op == before.op && now.shape.BT == before.shape.BT && now.shape.V == before.shape.V &&
         now.shape.H == before.shape.H && logitless::name_of(now.dtype) == before.dtype &&
         logitless::name_of(now.isa) == before.isa && now.threads == before.threads &&
         now.logits_rounding == before.logits_rounding && now.only == before.only &&
         now.zero_grad_rows == before.zero_grad_rows &&
         now.workspace_limit_bytes == before.workspace_limit_bytes &&
         static_cast<double>(now.grad_tolerance) == before.grad_tolerance;
}

Verdict verdict_of(const Interval& now, const Interval& before) {
  if (now.high < before.low) return Verdict::slower;
  if (now.low > before.high) return Verdict::faster;
  return Verdict::same;
}

}  // namespace

Result<Baseline> parse_baseline(const std::string& text, const std::string& source) {
  const auto bad = [&](const std::string& rule) {
    return Error{.kind = ErrorKind::invalid_data,
                 .message = fmt::format("--baseline {}: {}", printable(source), rule)};
  };
  const json document = json::parse(text, nullptr, false);
  if (document.is_discarded() || !document.is_object()) {
    return bad("is not JSON; it must be what `logitless bench --json` printed");
  }
  try {
    Baseline baseline = parse_document(document);
    baseline.source = source;
    return baseline;
  } catch (const Malformed& malformed) {
    return bad(malformed.message);
  }
}

Result<Baseline> read_baseline(const std::string& path) {
  static constexpr uint64_t kMost = uint64_t{64} << 20;
  const Result<InputFile> file = InputFile::open(path);
  if (!file) return file.error();
  if (file->size() > kMost) {
    return Error{
        .kind = ErrorKind::invalid_data,
        .message = fmt::format("--baseline {}: {} is too much for a benchmark's result",
                               printable(path), format_bytes(static_cast<int64_t>(file->size())))};
  }
  std::string text(file->size(), '\0');
  if (const Result<void> read = file->read(0, text.data(), text.size()); !read) return read.error();
  return parse_baseline(text, path);
}

Result<void> check_comparable(const Baseline& baseline, const std::string& isa,
                              const std::vector<int>& threads) {
  const auto bad = [&](const std::string& rule) {
    return Error{.kind = ErrorKind::invalid_argument,
                 .message = fmt::format("--baseline {}: {}", printable(baseline.source), rule)};
  };
  if (baseline.isa != isa) {
    return bad(
        fmt::format("was measured with {}, this would be {}; LOGITLESS_ISA={} makes them "
                    "comparable",
                    printable(baseline.isa), isa, printable(baseline.isa)));
  }
  const bool common = std::ranges::any_of(threads, [&](int count) {
    return std::ranges::find(baseline.threads, count) != baseline.threads.end();
  });
  if (!common) {
    return bad(fmt::format("was measured with --threads {}, this would be {}",
                           fmt::join(baseline.threads, ","), fmt::join(threads, ",")));
  }
  return {};
}

const char* name_of(Verdict verdict) {
  switch (verdict) {
    case Verdict::same:
      return "same";
    case Verdict::slower:
      return "slower";
    case Verdict::faster:
      return "faster";
    case Verdict::unmatched:
      return "not in the baseline";
  }
  return "?";
}

std::vector<Comparison> compare_lines(const std::vector<BenchLine>& lines,
                                      const Baseline& baseline) {
  std::vector<Comparison> comparisons;
  for (const BenchLine& line : lines) {
    Comparison comparison{.now = &line};
    for (const Baseline::Line& before : baseline.lines) {
      if (!same_work(line, before)) continue;
      comparison.before = &before;
      comparison.verdict = verdict_of(line.ratio_interval(), before.ratio_interval);
      break;
    }
    comparisons.push_back(comparison);
  }
  return comparisons;
}

}  // namespace logitless::cli
