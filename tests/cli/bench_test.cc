// SPDX-License-Identifier: Apache-2.0
// What a benchmark makes of its times, and how two of them are compared. Nothing here is timed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/amx_note.h"
#include "cli/baseline.h"
#include "cli/bench_line.h"

namespace logitless::cli {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;
using testing::AllOf;
using testing::HasSubstr;

TEST(Quantile, LiesBetweenNeighbours) {
  EXPECT_EQ(quantile({}, 0.5), 0);
  EXPECT_EQ(quantile({7}, 0.1), 7);
  EXPECT_EQ(quantile({4, 1, 3, 2}, 0), 1);
  EXPECT_EQ(quantile({4, 1, 3, 2}, 1), 4);
  EXPECT_EQ(median({4, 1, 3, 2}), 2.5);
  EXPECT_EQ(median({5, 1, 3}), 3);
  const Interval interval = middle({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11});
  EXPECT_DOUBLE_EQ(interval.low, 2);
  EXPECT_DOUBLE_EQ(interval.high, 10);
}

// 10 tokens, 3 of them without a gradient; bf16: 2 bytes.
TEST(Work, CountsOperandsOnceAndPanelsOncePerProduct) {
  WorkRequest request{.op = "forward",
                      .shape = {.BT = 10, .V = 100, .H = 8},
                      .dtype = DType::bf16,
                      .rows = 10,
                      .with_gradient = 7};
  const Work forward = work_of(request);
  EXPECT_EQ(forward.bytes_read, (10 + 100) * 8 * 2);
  EXPECT_EQ(forward.bytes_written, 0);
  EXPECT_EQ(forward.packed, (10 + 100) * 8);

  request.op = "gradient";
  const Work gradient = work_of(request);
  EXPECT_EQ(gradient.bytes_read, (7 + 100) * 8 * 2);
  EXPECT_EQ(gradient.bytes_written, (10 + 100) * 8 * 2);
  const double logits = (7 + 100) * 8;
  const double for_input = 7 * 100 + 100 * 8;
  const double for_weight = 7 * 100 + 7 * 8;
  EXPECT_EQ(gradient.packed, logits + for_input + for_weight);

  request.op = "gradient-hp";
  const Work given = work_of(request);
  EXPECT_EQ(given.bytes_read, (7 + 100) * 8 * 2 + 7 * 100 * 4);
  EXPECT_EQ(given.packed, for_input + for_weight);

  request.op = "one-pass";
  request.dtype = DType::f32;
  const Work one_pass = work_of(request);
  EXPECT_EQ(one_pass.bytes_read, (10 + 100) * 8 * 4);
  EXPECT_EQ(one_pass.packed, (10 + 100) * 8 + for_input + for_weight);

  request.grad_weight = false;
  EXPECT_EQ(work_of(request).bytes_written, 10 * 8 * 4);
  EXPECT_EQ(work_of(request).packed, (10 + 100) * 8 + for_input);
}

// What is kept is multiplied as it lies: only the logits are packed.
TEST(Work, OfASparseGradientIsPackedOnce) {
  const WorkRequest request{.op = "sparse",
                            .shape = {.BT = 10, .V = 100, .H = 8},
                            .dtype = DType::bf16,
                            .rows = 10,
                            .with_gradient = 7};
  const Work sparse = work_of(request);
  EXPECT_EQ(sparse.bytes_read, (10 + 100) * 8 * 2);
  EXPECT_EQ(sparse.bytes_written, (10 + 100) * 8 * 2);
  EXPECT_EQ(sparse.packed, (10 + 100) * 8);
}

BenchLine line_of(std::vector<double> seconds) {
  BenchLine line;
  line.op = "forward";
  line.shape = {.BT = 10, .V = 100, .H = 8};
  line.isa = Isa::avx2;
  line.threads = 2;
  line.seconds = std::move(seconds);
  line.flops = 8e9;
  line.peak_before = 8e9;
  line.peak_after = 16e9;
  line.clock_hz = 1e9;
  line.read_bytes_per_second = 1e9;
  line.work = {.bytes_read = 2e8, .bytes_written = 1e8, .packed = 1e9};
  return line;
}

TEST(BenchLine, RatiosAndExpectations) {
  const BenchLine line = line_of({1, 1, 1, 1, 2});
  EXPECT_DOUBLE_EQ(line.ratio_to_peak(), 0.5);  // the higher of the two peaks
  EXPECT_DOUBLE_EQ(line.ratio_interval().high, 0.5);
  EXPECT_DOUBLE_EQ(line.ratio_interval().low, 0.5 / 1.6);
  EXPECT_DOUBLE_EQ(line.spread(), 1);
  EXPECT_DOUBLE_EQ(line.bytes_seconds(), 0.3);
  EXPECT_DOUBLE_EQ(line.roofline_seconds(), 0.5);
  EXPECT_DOUBLE_EQ(line.flops_seconds(), 0.5 / 0.9);
  // 1e9 elements of 0.3 cycles at 1 GHz, over two threads.
  EXPECT_DOUBLE_EQ(line.packing_seconds(), 0.15);
  EXPECT_DOUBLE_EQ(line.expected_seconds(), 0.5 / 0.9 + 0.15);
  const ordered_json entry = to_json(line);
  EXPECT_FALSE(entry.contains("cold"));
  EXPECT_FALSE(entry.contains("unfused"));
  EXPECT_FALSE(entry.contains("only"));
  EXPECT_EQ(entry["ratio_interval"][1], 0.5);
}

TEST(BenchLine, ASparseLineTellsWhatWasKept) {
  BenchLine line = line_of({1, 1, 1, 1, 1});
  EXPECT_FALSE(to_json(line).contains("sparse"));
  EXPECT_EQ(line.kept_share(), 0);
  line.grad_tolerance = 0x1p-9f;
  line.sparse_counts = {.rows = 10, .dense_rows = 2, .kept = 40, .elements = 800};
  line.forward = {0.5, 0.5, 0.5};
  line.exact = {4, 4, 4};
  const ordered_json sparse = to_json(line)["sparse"];
  EXPECT_EQ(sparse["kept_share"], 0.05);
  EXPECT_EQ(sparse["times_forward"], 2);
  EXPECT_EQ(sparse["times_exact"], 0.25);
}

TEST(BenchLine, BytesBoundWhereFlopsAreFew) {
  BenchLine line = line_of({1, 1, 1, 1, 1});
  line.work.bytes_read = 7e8;
  EXPECT_DOUBLE_EQ(line.roofline_seconds(), 0.8);
  EXPECT_DOUBLE_EQ(line.ratio_to_roofline(), 0.8);
  EXPECT_DOUBLE_EQ(line.expected_seconds(), 0.8 + 0.15);
}

json document_of(const std::vector<BenchLine>& lines) {
  ordered_json cases = ordered_json::array();
  for (const BenchLine& line : lines) cases.push_back(to_json(line));
  const ordered_json document = {{"schema", kBenchSchema}, {"date", "2026-01-02T03:04:05Z"},
                                 {"commit", "abc"},        {"cpu", "a CPU"},
                                 {"l3_bytes", 1 << 20},    {"isa", "avx2"},
                                 {"threads", {2}},         {"cases", cases}};
  return json::parse(document.dump());
}

Result<Baseline> baseline_of(const json& document) {
  return parse_baseline(document.dump(), "base.json");
}

TEST(Baseline, OverlappingIntervalsAreTheSame) {
  const Result<Baseline> baseline = baseline_of(document_of({line_of({1, 1.1, 1.2, 1.3, 1.4})}));
  ASSERT_TRUE(baseline.has_value()) << baseline.error().message;
  EXPECT_EQ(baseline->commit, "abc");
  const auto verdict = [&](std::vector<double> seconds) {
    const std::vector<BenchLine> lines = {line_of(std::move(seconds))};
    return compare_lines(lines, *baseline)[0].verdict;
  };
  EXPECT_EQ(verdict({1, 1.1, 1.2, 1.3, 1.4}), Verdict::same);
  EXPECT_EQ(verdict({1.3, 1.4, 1.5, 1.6, 1.7}), Verdict::same);
  EXPECT_EQ(verdict({1.5, 1.6, 1.7, 1.8, 1.9}), Verdict::slower);
  EXPECT_EQ(verdict({0.5, 0.6, 0.7, 0.8, 0.9}), Verdict::faster);
  // One disturbed repeat of many makes no regression and hides none.
  std::vector<double> repeats(20, 1.2);
  repeats.push_back(50);
  EXPECT_EQ(verdict(repeats), Verdict::same);
  std::vector<double> slow(20, 2.0);
  slow.push_back(1.0);
  EXPECT_EQ(verdict(slow), Verdict::slower);
}

// Whatever tells two lines apart, another value of it is another line.
TEST(Baseline, OnlyTheSameWorkIsCompared) {
  const BenchLine line = line_of({1, 1, 1, 1, 1});
  const Result<Baseline> baseline = baseline_of(document_of({line}));
  ASSERT_TRUE(baseline.has_value());
  std::vector<BenchLine> others(11, line);
  others[0].op = "gradient";
  others[1].shape.BT = 11;
  others[2].shape.V = 101;
  others[3].shape.H = 9;
  others[4].dtype = DType::f16;
  others[5].isa = Isa::scalar;
  others[6].threads = 1;
  others[7].logits_rounding = "operand";
  others[8].only = "grad_input";
  others[9].zero_grad_rows = 0.5;
  others[10].workspace_limit_bytes = 1 << 20;
  for (const Comparison& c : compare_lines(others, *baseline)) {
    EXPECT_EQ(c.verdict, Verdict::unmatched);
    EXPECT_EQ(c.before, nullptr);
  }
  EXPECT_EQ(compare_lines({line}, *baseline)[0].verdict, Verdict::same);
  // And each finds itself.
  const Result<Baseline> all = baseline_of(document_of(others));
  ASSERT_TRUE(all.has_value());
  for (const Comparison& c : compare_lines(others, *all)) EXPECT_EQ(c.verdict, Verdict::same);
}

TEST(Baseline, AnotherIsaOrThreadsAreRefused) {
  const Result<Baseline> baseline = baseline_of(document_of({line_of({1, 1, 1, 1, 1})}));
  ASSERT_TRUE(baseline.has_value());
  EXPECT_TRUE(check_comparable(*baseline, "avx2", {2}).has_value());
  EXPECT_TRUE(check_comparable(*baseline, "avx2", {1, 2}).has_value());
  const Result<void> isa = check_comparable(*baseline, "scalar", {2});
  ASSERT_FALSE(isa.has_value());
  EXPECT_THAT(isa.error().message,
              AllOf(HasSubstr("base.json"), HasSubstr("measured with avx2, this would be scalar"),
                    HasSubstr("LOGITLESS_ISA=avx2")));
  const Result<void> threads = check_comparable(*baseline, "avx2", {4});
  ASSERT_FALSE(threads.has_value());
  EXPECT_THAT(threads.error().message, HasSubstr("--threads 2, this would be 4"));
}

TEST(Baseline, AMalformedFileIsNamedWithItsFault) {
  const json good = document_of({line_of({1, 1, 1, 1, 1}), line_of({1, 1, 1, 1, 1})});
  const auto message = [](const std::string& text) {
    const Result<Baseline> baseline = parse_baseline(text, "base.json");
    EXPECT_FALSE(baseline.has_value()) << text;
    return baseline.has_value() ? "" : baseline.error().message;
  };
  EXPECT_THAT(message(""), HasSubstr("--baseline base.json: is not JSON"));
  EXPECT_THAT(message("[]"), HasSubstr("is not JSON"));
  EXPECT_THAT(message("{}"), HasSubstr("schema is missing, must be 'logitless-bench-1'"));
  const auto with = [&](const std::string& path, const json& value) {
    json changed = good;
    changed[json::json_pointer(path)] = value;
    return message(changed.dump());
  };
  EXPECT_THAT(with("/schema", "logitless-bench-9"), HasSubstr("schema is 'logitless-bench-9'"));
  EXPECT_THAT(with("/schema", 1), HasSubstr("schema must be text"));
  EXPECT_THAT(with("/cases", json::array()), HasSubstr("cases is empty"));
  EXPECT_THAT(with("/cases", 3), HasSubstr("cases must be a list"));
  EXPECT_THAT(with("/threads", "2"), HasSubstr("threads must be a list"));
  EXPECT_THAT(with("/cases/1", 3), HasSubstr("cases[1].op is missing"));
  EXPECT_THAT(with("/cases/1/op", 3), HasSubstr("cases[1].op must be text"));
  EXPECT_THAT(with("/cases/1/shape", "x"), HasSubstr("cases[1].shape.BT is missing"));
  EXPECT_THAT(with("/cases/1/shape/H", 1.5), HasSubstr("cases[1].shape.H must be a whole number"));
  EXPECT_THAT(with("/cases/0/ratio_to_peak", nullptr), HasSubstr("ratio_to_peak must be a number"));
  EXPECT_THAT(with("/cases/0/ratio_interval", json::array({2, 1})), HasSubstr("the lower first"));
  EXPECT_THAT(with("/cases/0/ratio_interval", json::array({1})), HasSubstr("two numbers"));
  EXPECT_THAT(with("/cases/0/repeats", 2), HasSubstr("cases[0].repeats is 2"));
  json without = good;
  without["cases"][1].erase("threads");
  EXPECT_THAT(message(without.dump()), HasSubstr("cases[1].threads is missing"));
}

TEST(AmxNote, SaysWhatIsUnusedOnlyWhereItIsPresent) {
  EXPECT_STREQ(amx_note(false), "");
  EXPECT_THAT(amx_note(true), AllOf(HasSubstr("present, unused; PyTorch's bf16 uses it"),
                                    HasSubstr("bench/peers.py")));
}

}  // namespace
}  // namespace logitless::cli
