// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cli/case.h"
#include "cli/judge.h"
#include "cli/operators.h"
#include "cli/verify_sparse.h"

namespace logitless::cli {

using nlohmann::ordered_json;

// What every command takes.
struct CommonOptions {
  bool json = false;
  int threads = 0;
  std::string workspace_limit;

  // Fails on a bad limit.
  RunSettings settings() const;
};

// The same where several may be given: every limit with every number of threads.
struct ListOptions {
  bool json = false;
  std::vector<int> threads;
  std::vector<std::string> workspace_limits;

  std::vector<RunSettings> settings() const;
};

// A sparse gradient, where loss and gradients are computed in one call.
struct SparseOptions {
  std::string grad_tolerance;
  uint64_t seed = 0;

  // Fails on a bad tolerance; without one, exact.
  SparseGradient parse() const;
};

// How a case is named on the command line.
struct CaseArguments {
  std::vector<std::string> paths;
  std::optional<int64_t> tokens;
  std::string dtype;
  std::string weight_name = "weight";
  std::optional<int64_t> ignore_index;

  Case load() const;  // fails with the reader's sentence
  Result<Case> try_load(const std::function<Result<RowRange>(int64_t rows)>& weight_rows) const;
};

// forward, loss and gradient on the ranks that mpirun started (or on one).
struct RankRun {
  const CaseArguments* case_arguments = nullptr;
  RunSettings settings = {};
  bool json = false;
  bool with_loss = false;
  bool gradient = false;
  std::optional<DType> grad_dtype = {};
  SparseGradient sparse = {};
  int64_t chunk_tokens = 0;
  Strategy strategy = Strategy::automatic;
  std::string split = "balanced";
  std::string out = {};
};
int run_on_ranks(const RankRun& run);
// The same by both strategies, judged by rank 0 against float64.
int verify_on_ranks(const RankRun& run, bool full);
// A sparse gradient of the ranks, judged by rank 0: see verify_sparse.h.
int verify_sparse_on_ranks(const RankRun& run, int seeds, bool full);

// What a parsed command line wants done; the result is the exit code.
using Command = std::function<int()>;

// Each adds its subcommand, which sets `command` when chosen.
void add_info(CLI::App& app, Command& command);
void add_make(CLI::App& app, Command& command);
void add_forward_loss_gradient(CLI::App& app, Command& command);
void add_verify(CLI::App& app, Command& command);
void add_compare(CLI::App& app, Command& command);
void add_bench(CLI::App& app, Command& command);
void add_plan(CLI::App& app, Command& command);

// Shared by them.
inline constexpr const char* kFloatMargins =
    "few elements, whose worst is milder than the worst of many; float sums, which are\nallowed "
    "partial sums that wander from 0 to the result and beyond; the mean of merged\nsums, one "
    "number "
    "in which errors cancel; and merging, which is allowed exp's promised\n2 ulp and stays below "
    "(docs/numerics.md, How error is judged)";

// Option values. CLI11's own checks take a number beyond 64 bits for the nearest one and a negative
// one for a huge one, and name a range by its 300 digits.
CLI::Validator whole_number(int64_t least, int64_t most);
CLI::Validator seed_number();                      // from 0 to 2^64 - 1
CLI::Validator number(double least, double most);  // not NaN
inline constexpr int64_t kMostThreads = 4096;      // as the library's plans take
inline constexpr int64_t kMostTokens = int64_t{1} << 48;
void add_common_options(CLI::App& sub, CommonOptions& common);
void add_list_options(CLI::App& sub, ListOptions& lists);
void add_case_options(CLI::App& sub, CaseArguments& arguments, bool required = true,
                      bool with_tokens = true);
std::string example(const std::string& lines);  // the footer of --help
void add_strategy_option(CLI::App& sub, std::string& strategy);
CLI::Option* add_tolerance_option(CLI::App& sub, std::string& grad_tolerance,
                                  const std::string& what);
void add_sparse_options(CLI::App& sub, SparseOptions& sparse, const std::string& what);
LogitsRounding parse_rounding(const std::string& text);
const char* name_of(LogitsRounding rounding);
Strategy parse_strategy(const std::string& text);  // "": automatic
const char* name_of(Strategy strategy);
// A line about what a sparse gradient kept.
void print_kept(const SparseCounts& counts);
void print_json(const ordered_json& document);
ordered_json to_json(const Shape& shape);
ordered_json to_json(const std::vector<RowRange>& cover);  // [[begin, end], ...]
ordered_json to_json(const Judgements& judgements);
// What verify says of a sparse gradient; the exit code. cover: of ranks, where there are any.
int print_sparse_verification(const SparseVerifyReport& report, const Case& c,
                              const SparseGradient& sparse, bool json,
                              const std::vector<RowRange>& cover = {});
// Table of observed and allowed errors, and a sentence for each output that is beyond.
// wide_margins: what may be the reason of a wide one.
void print_judgements(const Judgements& judgements,
                      const std::string& wide_margins = kFloatMargins);

}  // namespace logitless::cli
