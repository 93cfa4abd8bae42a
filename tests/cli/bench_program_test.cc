// SPDX-License-Identifier: Apache-2.0
// `logitless bench` and `logitless plan` from outside. Times are looked at for being there, never
// for their size.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>

#include "tests/cli/program.h"
#include "tests/cli/scratch.h"

namespace logitless::cli {
namespace {

using nlohmann::json;
using test::ProgramResult;
using test::run_program;
using test::Scratch;
using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

class BenchTest : public testing::Test {
 protected:
  static std::vector<std::string> bench(const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"bench", "--threads", "1",  "--repeats",
                                          "5",     "--seconds", "0.1"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }
  static json json_of(std::vector<std::string> arguments, int exit_code = 0) {
    arguments.emplace_back("--json");
    const ProgramResult result = run_program(arguments);
    EXPECT_EQ(result.exit_code, exit_code) << result.err;
    json document = json::parse(result.out, nullptr, false);
    EXPECT_FALSE(document.is_discarded()) << result.out << result.err;
    return document;
  }
  static void expect_refused(const std::vector<std::string>& arguments,
                             const testing::Matcher<const std::string&>& message,
                             const std::vector<std::string>& environment = {}) {
    const ProgramResult result = run_program(arguments, environment);
    EXPECT_EQ(result.exit_code, 2) << result.err;
    EXPECT_EQ(result.out, "");
    EXPECT_EQ(std::ranges::count(result.err, '\n'), 1) << result.err;
    EXPECT_THAT(result.err, AllOf(StartsWith("logitless: "), message));
  }
  std::string write(const json& document) {
    const std::string path = scratch_.path("base.json");
    test::write_file(path, document.dump());
    return path;
  }

  Scratch scratch_;
};

TEST_F(BenchTest, TheDocumentSaysWhatWasMeasuredWhereAndWhen) {
  const json document = json_of(bench(
      {"--shape", "45,507,64", "--op", "forward,gradient,gradient-hp,step,one-pass", "--cold"}));
  EXPECT_EQ(document["schema"], "logitless-bench-1");
  for (const char* text : {"commit", "compiler", "cpu", "version", "isa", "logits_rounding"}) {
    EXPECT_TRUE(document[text].is_string()) << text;
  }
  EXPECT_THAT(document["date"].get<std::string>(), testing::MatchesRegex("....-..-..T..:..:..Z"));
  EXPECT_EQ(document["threads"], json::array({1}));
  EXPECT_TRUE(document["amx_present"].is_boolean());
  EXPECT_EQ(document["interval_percentiles"], json::array({10, 90}));
  ASSERT_EQ(document["cases"].size(), 5U);
  for (const json& line : document["cases"]) {
    EXPECT_EQ(line["isa"], document["isa"]);
    EXPECT_EQ(line["threads"], 1);
    EXPECT_EQ(line["seconds"].size(), 5U);
    EXPECT_EQ(line["cold"]["seconds"].size(), 5U);
    for (const char* interval : {"seconds_interval", "ratio_interval"}) {
      ASSERT_EQ(line[interval].size(), 2U);
      EXPECT_LE(line[interval][0].get<double>(), line[interval][1].get<double>());
    }
    EXPECT_LE(line["seconds_interval"][0], line["median_seconds"]);
    EXPECT_GE(line["seconds_interval"][1], line["median_seconds"]);
    for (const char* positive : {"read_bytes_per_second", "clock_hz", "bytes_read", "flops",
                                 "roofline_seconds", "ratio_to_roofline", "packed_elements"}) {
      EXPECT_GT(line[positive].get<double>(), 0) << positive;
    }
    EXPECT_GT(line["expected"]["seconds"].get<double>(),
              line["expected"]["packing_seconds"].get<double>());
    EXPECT_EQ(line.contains("strategy"), line["op"] == "one-pass");
    EXPECT_THAT(line["plan"].get<std::string>(), HasSubstr("workspace"));
  }
}

TEST_F(BenchTest, ASparseGradientIsTimedBesideForwardAndExact) {
  const json document =
      json_of(bench({"--shape", "45,3000,64", "--grad-tolerance", "2^-6", "--seed", "4"}));
  ASSERT_EQ(document["cases"].size(), 1U);
  const json& line = document["cases"][0];
  EXPECT_EQ(line["op"], "sparse");
  EXPECT_EQ(line["grad_tolerance"].get<double>(), 0x1p-6);
  const json& sparse = line["sparse"];
  EXPECT_EQ(sparse["seed"], 4);
  EXPECT_EQ(sparse["rows"], 45);
  EXPECT_EQ(sparse["forward_seconds"].size(), 5U);
  EXPECT_EQ(sparse["exact_seconds"].size(), 5U);
  EXPECT_GT(sparse["times_forward"].get<double>(), 0);
  EXPECT_GT(sparse["times_exact"].get<double>(), 0);
  EXPECT_GT(sparse["kept_share"].get<double>(), 0);
  EXPECT_LT(sparse["kept_share"].get<double>(), 0.2);
  // The forward's product, and of the gradients' what is kept and what is dense.
  const double elements =
      2.0 * 64 * (sparse["kept"].get<double>() + 3000 * sparse["dense_rows"].get<double>());
  EXPECT_EQ(line["flops"].get<double>(), 2.0 * 45 * 3000 * 64 + 2 * elements);
  const ProgramResult text =
      run_program(bench({"--shape", "45,3000,64", "--grad-tolerance", "0.02"}));
  EXPECT_EQ(text.exit_code, 0) << text.err;
  EXPECT_THAT(text.out, AllOf(HasSubstr("/ forward"), HasSubstr("/ exact"), HasSubstr("kept"),
                              HasSubstr("dense rows"), HasSubstr("0.02")));
  // Another tolerance is other work.
  const std::string base = write(document);
  expect_refused(bench({"--shape", "45,3000,64", "--grad-tolerance", "2^-5", "--baseline", base}),
                 HasSubstr("none of its 1 lines"));
  expect_refused(bench({"--shape", "45,3000,64", "--op", "sparse"}),
                 HasSubstr("--op sparse takes --grad-tolerance"));
  expect_refused(bench({"--shape", "45,3000,64", "--op", "forward", "--grad-tolerance", "2^-5"}),
                 HasSubstr("--grad-tolerance is for --op sparse, not for forward"));
}

TEST_F(BenchTest, ModelsHaveTheirShapes) {
  // One thread of the slowest level would take minutes for a model's own vocabulary.
  const json plan = json_of({"plan", "--model", "GPT2,llama-3-8b", "--op", "forward"});
  ASSERT_EQ(plan["plans"].size(), 2U);
  EXPECT_EQ(plan["plans"][0]["shape"], (json{{"BT", 1024}, {"V", 50257}, {"H", 768}}));
  EXPECT_EQ(plan["plans"][1]["shape"], (json{{"BT", 1024}, {"V", 128256}, {"H", 4096}}));
  const json few = json_of({"plan", "--model", "gpt-2", "--tokens", "4", "--op", "forward"});
  EXPECT_EQ(few["plans"][0]["shape"]["BT"], 4);
  const json bench_document =
      json_of(bench({"--model", "smollm2-135m", "--tokens", "1", "--op", "forward"}));
  EXPECT_EQ(bench_document["cases"][0]["model"], "smollm2-135m");
  EXPECT_EQ(bench_document["cases"][0]["shape"], (json{{"BT", 1}, {"V", 49152}, {"H", 576}}));
  expect_refused(bench({"--model", "gpt-3"}), HasSubstr("there is no model 'gpt-3'; near it are"));
  expect_refused({"plan", "--model", "nobody"}, HasSubstr("known are gpt-2"));
  expect_refused({"plan"}, HasSubstr("--shape or --model"));
}

TEST_F(BenchTest, ListsAreRunOneAfterTheOther) {
  const json document = json_of({"bench", "--shape", "64,507,64", "--tokens", "2,33", "--threads",
                                 "1,2", "--workspace-limit", "8MiB,64MiB", "--op", "gradient",
                                 "--no-unfused", "--repeats", "2", "--seconds", "0.1"});
  EXPECT_EQ(document["threads"], json::array({1, 2}));
  std::vector<std::tuple<int, int, int64_t>> found;
  for (const json& line : document["cases"]) {
    EXPECT_FALSE(line.contains("unfused"));
    EXPECT_LE(line["workspace_bytes"], line["workspace_limit_bytes"]);
    found.emplace_back(line["shape"]["BT"], line["threads"], line["workspace_limit_bytes"]);
  }
  constexpr int64_t kMiB = 1 << 20;
  EXPECT_EQ(found, (std::vector<std::tuple<int, int, int64_t>>{{2, 1, 8 * kMiB},
                                                               {2, 1, 64 * kMiB},
                                                               {2, 2, 8 * kMiB},
                                                               {2, 2, 64 * kMiB},
                                                               {33, 1, 8 * kMiB},
                                                               {33, 1, 64 * kMiB},
                                                               {33, 2, 8 * kMiB},
                                                               {33, 2, 64 * kMiB}}));
  // Said before anything is measured.
  expect_refused(bench({"--shape", "64,507,64", "--workspace-limit", "64MiB,1KiB"}),
                 HasSubstr("the least possible workspace"));
}

TEST_F(BenchTest, TheTokensOfACaseAreItsFirst) {
  const std::string path = scratch_.path("case.safetensors");
  ASSERT_EQ(
      run_program({"make", path, "--tokens", "45", "--vocab", "507", "--hidden", "64"}).exit_code,
      0);
  const json document = json_of(bench({path, "--tokens", "45,3", "--op", "one-pass"}));
  EXPECT_EQ(document["cases"][0]["shape"]["BT"], 45);
  EXPECT_EQ(document["cases"][1]["shape"]["BT"], 3);
  EXPECT_EQ(document["cases"][1]["shape"]["V"], 507);
  expect_refused(bench({path, "--tokens", "3,46"}), HasSubstr("has 45 tokens, 46 are asked for"));
  expect_refused(bench({path, "--model", "gpt-2"}), HasSubstr("a CASE, or --shape and --model"));
}

// 2 BT V H for each product, over the rows that count in it.
TEST_F(BenchTest, WorkThatIsLeftOutIsNotCounted) {
  const double product = 2.0 * 64 * 507 * 64;
  const json one = json_of(bench({"--shape", "64,507,64", "--only", "grad_weight", "--op",
                                  "forward,gradient,gradient-hp,one-pass"}));
  EXPECT_EQ(one["cases"][0]["flops"].get<double>(), product);
  EXPECT_FALSE(one["cases"][0].contains("only"));
  EXPECT_EQ(one["cases"][1]["flops"].get<double>(), 2 * product);
  EXPECT_EQ(one["cases"][1]["only"], "grad_weight");
  EXPECT_EQ(one["cases"][2]["flops"].get<double>(), product);
  EXPECT_EQ(one["cases"][3]["flops"].get<double>(), 2 * product);
  EXPECT_THAT(one["cases"][1]["plan"].get<std::string>(), HasSubstr("grad_input not wanted"));

  const json half = json_of(bench(
      {"--shape", "64,507,64", "--zero-grad-rows", "0.5", "--op", "forward,gradient,one-pass"}));
  EXPECT_EQ(half["cases"][0]["flops"].get<double>(), product);
  EXPECT_EQ(half["cases"][1]["flops"].get<double>(), 1.5 * product);
  EXPECT_EQ(half["cases"][1]["zero_grad_rows"], 0.5);
  EXPECT_EQ(half["cases"][2]["flops"].get<double>(), 2 * product);
  expect_refused(bench({"--shape", "4,4,4", "--zero-grad-rows", "1.5"}),
                 HasSubstr("--zero-grad-rows"));
  expect_refused(bench({"--shape", "4,4,4", "--only", "both"}), HasSubstr("--only"));
}

TEST_F(BenchTest, ABaselineIsComparedAndTheExitCodeTells) {
  const std::vector<std::string> same = bench({"--shape", "45,507,64", "--op", "forward,gradient"});
  json document = json_of(same);
  const auto with_ratios = [&](double low, double high) {
    for (json& line : document["cases"]) {
      line["ratio_interval"] = {low, high};
      line["ratio_to_peak"] = (low + high) / 2;
    }
    std::vector<std::string> arguments = same;
    arguments.insert(arguments.end(), {"--baseline", write(document)});
    return arguments;
  };
  // Far away on either side, so that no machine is slow or fast enough to matter.
  const ProgramResult slower = run_program(with_ratios(1e6, 1e7));
  EXPECT_EQ(slower.exit_code, 1) << slower.err;
  EXPECT_THAT(slower.out, AllOf(HasSubstr("slower"), HasSubstr("2 of 2 lines slower"),
                                HasSubstr("base.json"), Not(HasSubstr("another machine"))));
  const ProgramResult faster = run_program(with_ratios(1e-12, 1e-11));
  EXPECT_EQ(faster.exit_code, 0) << faster.err;
  EXPECT_THAT(faster.out, AllOf(HasSubstr("faster"), HasSubstr("0 of 2 lines slower")));
  const ProgramResult as_before = run_program(with_ratios(1e-12, 1e7));
  EXPECT_EQ(as_before.exit_code, 0) << as_before.err;
  EXPECT_THAT(as_before.out, HasSubstr("same"));

  const json judged = json_of(with_ratios(1e6, 1e7), 1);
  EXPECT_EQ(judged["baseline"]["regressions"], 2);
  EXPECT_EQ(judged["baseline"]["same_machine"], true);
  EXPECT_EQ(judged["baseline"]["lines"][1]["case"], 1);
  EXPECT_EQ(judged["baseline"]["lines"][1]["verdict"], "slower");
  EXPECT_EQ(judged["baseline"]["lines"][1]["ratio_interval"][0], 1e6);

  document["cpu"] = "another CPU";
  const ProgramResult elsewhere = run_program(with_ratios(1e-12, 1e7));
  EXPECT_EQ(elsewhere.exit_code, 0);
  EXPECT_THAT(elsewhere.out, HasSubstr("another machine, another CPU"));
}

TEST_F(BenchTest, ABaselineThatCannotAnswerIsRefused) {
  const std::vector<std::string> forward = bench({"--shape", "45,507,64", "--op", "forward"});
  const auto with = [&](const std::string& path, std::vector<std::string> more = {}) {
    std::vector<std::string> arguments = forward;
    arguments.insert(arguments.end(), {"--baseline", path});
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  };
  expect_refused(with(scratch_.path("absent")),
                 AllOf(HasSubstr("absent"), HasSubstr("No such file")));
  const std::string text = scratch_.path("text");
  test::write_file(text, "median 3 ms");
  expect_refused(with(text), AllOf(HasSubstr(text), HasSubstr("is not JSON")));

  json document = json_of(forward);
  document["schema"] = "logitless-bench-0";
  expect_refused(with(write(document)), HasSubstr("schema is 'logitless-bench-0'"));
  document["schema"] = "logitless-bench-1";
  const std::string base = write(document);
  if (document["isa"] != "scalar") {
    expect_refused(with(base), HasSubstr("this would be scalar"), {"LOGITLESS_ISA=scalar"});
  }
  expect_refused({"bench", "--shape", "45,507,64", "--threads", "3", "--baseline", base},
                 HasSubstr("--threads 1, this would be 3"));
  expect_refused(
      {"bench", "--shape", "45,507,64", "--threads", "1", "--repeats", "4", "--baseline", base},
      HasSubstr("--repeats is 4, must be at least 5"));
  // Nothing in common: measured, but there is no answer.
  expect_refused(bench({"--shape", "4,5,6", "--op", "forward", "--baseline", base}),
                 HasSubstr("none of its 1 lines"));
}

TEST_F(BenchTest, AStepThatTheLimitMadeRecomputeIsMarked) {
  const auto with_limit = [](std::vector<std::string> arguments, int64_t bytes) {
    for (const char* more : {"--shape", "45,507,64", "--op", "one-pass", "--workspace-limit"}) {
      arguments.emplace_back(more);
    }
    arguments.push_back(std::to_string(bytes));
    return arguments;
  };
  const auto strategy = [&](int64_t limit) -> std::string {
    return json_of(with_limit({"plan"}, limit))["plans"][0]["strategy"];
  };
  constexpr int64_t kEnough = 400'000;
  ASSERT_EQ(strategy(kEnough), "one_pass");
  int64_t limit = kEnough;
  while (strategy(limit) == "one_pass") limit -= limit / 50;
  const ProgramResult recomputed = run_program(with_limit(bench({}), limit));
  EXPECT_THAT(recomputed.out, HasSubstr("one-pass, recomputed")) << recomputed.err;
  const ProgramResult one_pass = run_program(with_limit(bench({}), kEnough));
  EXPECT_THAT(one_pass.out, AllOf(HasSubstr("one-pass"), Not(HasSubstr("recomputed"))));
}

TEST_F(BenchTest, ThePlanSaysTheIdleShareForEveryNumberOfThreads) {
  const json document = json_of({"plan", "--shape", "1024,32000,2048", "--threads", "16,64,128"});
  ASSERT_EQ(document["plans"].size(), 12U);
  int i = 0;
  for (const json& plan : document["plans"]) {
    const int threads = plan["threads"];
    EXPECT_EQ(threads, (std::vector<int>{16, 64, 128})[static_cast<size_t>(i++ % 3)]);
    const std::string text = plan["describe"];
    EXPECT_THAT(text, HasSubstr("idle: "));
    if (plan["op"] == "forward") continue;
    // The steps between barriers, which differ from schedule to schedule.
    EXPECT_THAT(text, AllOf(HasSubstr("grad_logits "),
                            AnyOf(HasSubstr(", products "), HasSubstr(", grad_input "))));
    if (plan["op"] == "one-pass") {
      EXPECT_THAT(text, HasSubstr("idle: forward "));
    }
  }
}

// Training shapes on servers: no step lets more than 3 % of a large team wait.
TEST_F(BenchTest, LargeTeamsShareTheWorkEvenly) {
  const json any = json_of({"plan", "--shape", "64,64,64", "--op", "forward"});
  const std::string described = any["plans"][0]["describe"];
  if (described.find("avx512bf16") == std::string::npos) {
    GTEST_SKIP() << "this CPU has no avx512bf16: operands are packed in fp32, and the forward's 16 "
                    "MiB hold half as many pieces";
  }
  for (const char* shape : {"1024,32000,2048", "1024,49152,576", "512,32064,4096",
                            "8192,32000,1024", "2048,128256,2048"}) {
    const json document = json_of({"plan", "--shape", shape, "--threads", "16,64,128"});
    ASSERT_EQ(document["plans"].size(), 12U);
    for (const json& plan : document["plans"]) {
      const std::string text = plan["describe"];
      const std::string idle = text.substr(text.rfind("idle: "));
      static const std::regex kShare("([0-9.]+) %");
      int steps = 0;
      for (std::sregex_iterator i(idle.begin(), idle.end(), kShare), end; i != end; ++i, ++steps) {
        EXPECT_LE(std::stod((*i)[1]), 3.0) << text;
      }
      EXPECT_GE(steps, plan["op"] == "forward" ? 1 : 2) << text;
    }
  }
}

}  // namespace
}  // namespace logitless::cli
