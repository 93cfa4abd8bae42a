// SPDX-License-Identifier: Apache-2.0
// The program from outside: arguments in, exit code, text and files out.
#include "tests/cli/program.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>

#include "cli/safetensors.h"
#include "logitless/version.h"
#include "tests/cli/scratch.h"
#include "tests/support/sanitizers.h"

namespace logitless::cli {
namespace {

using nlohmann::json;
using test::Program;
using test::ProgramResult;
using test::run_program;
using test::Scratch;
using testing::AllOf;
using testing::HasSubstr;
using testing::MatchesRegex;
using testing::Not;
using testing::StartsWith;

class ProgramTest : public testing::Test {
 protected:
  // A small case on disk.
  std::string small_case(const char* dtype = "bf16") {
    const std::string path = scratch_.path("case.safetensors");
    const ProgramResult made = run_program({"make", path, "--tokens", "45", "--vocab", "507",
                                            "--hidden", "64", "--dtype", dtype, "--seed", "5"});
    EXPECT_EQ(made.exit_code, 0) << made.err;
    return path;
  }

  // Usage and input errors: exit 2, one line on stderr, nothing on stdout.
  static void expect_refused(const std::vector<std::string>& arguments,
                             const testing::Matcher<const std::string&>& message) {
    const ProgramResult result = run_program(arguments);
    EXPECT_EQ(result.exit_code, 2) << result.err;
    EXPECT_EQ(result.out, "");
    EXPECT_THAT(result.err, StartsWith("logitless: "));
    EXPECT_EQ(std::ranges::count(result.err, '\n'), 1) << result.err;
    EXPECT_THAT(result.err, message);
  }

  static json json_of(const std::vector<std::string>& arguments, int exit_code = 0) {
    const ProgramResult result = run_program(arguments);
    EXPECT_EQ(result.exit_code, exit_code) << result.err;
    json document = json::parse(result.out, nullptr, false);
    EXPECT_FALSE(document.is_discarded()) << result.out;
    return document;
  }

  Scratch scratch_;
};

TEST_F(ProgramTest, HelpHasAnExampleForEveryCommand) {
  for (const char* command :
       {"info", "make", "forward", "loss", "gradient", "verify", "compare", "bench", "plan"}) {
    const ProgramResult help = run_program({command, "--help"});
    EXPECT_EQ(help.exit_code, 0) << command;
    EXPECT_THAT(help.out, HasSubstr("Example:\n  ")) << command;
    EXPECT_THAT(help.out, HasSubstr(std::string("logitless ") + command + " ")) << command;
    for (const char* option : {"--json", "--threads", "--workspace-limit", "--help"}) {
      EXPECT_THAT(help.out, HasSubstr(option)) << command;
    }
  }
  EXPECT_THAT(run_program({"--help"}).out, HasSubstr("Example:"));
  EXPECT_EQ(run_program({"--version"}).out, "logitless " LOGITLESS_VERSION "\n");
}

TEST_F(ProgramTest, BadUsageIsRefusedInOneSentence) {
  expect_refused({}, HasSubstr("subcommand is required"));
  expect_refused({"nonsense"}, HasSubstr("there is no command 'nonsense'"));
  expect_refused({"verify"}, HasSubstr("case is required"));
  expect_refused({"verify", "x", "--bogus"}, HasSubstr("--bogus"));
  expect_refused({"verify", "x", "--shards", "0"}, HasSubstr("--shards"));
  expect_refused({"verify", "x", "--threads", "-1"}, HasSubstr("--threads"));
  expect_refused({"verify", "x", "--workspace-limit", "64M"},
                 HasSubstr("'64M' is not a number of bytes"));
  expect_refused({"plan", "--shape", "1,2"}, HasSubstr("'1,2' is not a shape"));
  expect_refused({"plan", "--shape", "1,2,3", "--op", "backward"}, HasSubstr("--op"));
  expect_refused({"make", scratch_.path("x"), "--dtype", "int4"},
                 HasSubstr("'int4' is not an operand type"));
  expect_refused({"make", scratch_.path("x"), "--masked", "2"},
                 HasSubstr("--masked is 2, must be in [0, 1]"));
  expect_refused({"bench", "x", "--shape", "1,2,3"},
                 HasSubstr("a CASE, or --shape and --model, not both"));
  EXPECT_TRUE(scratch_.files().empty());
}

TEST_F(ProgramTest, BadInputIsRefusedInOneSentenceThatNamesFileTensorAndRule) {
  const std::string path = small_case();
  expect_refused({"verify", scratch_.path("absent")},
                 AllOf(HasSubstr("absent"), HasSubstr("No such file")));
  const std::string text = scratch_.path("text");
  test::write_file(text, "hello, this is text");
  expect_refused({"loss", text}, AllOf(HasSubstr(text), HasSubstr("is it a safetensors file?")));
  expect_refused({"loss", path, path},
                 AllOf(HasSubstr("case.safetensors"), HasSubstr("tensor `input`")));
  expect_refused({"forward", path, "--tokens", "46"}, HasSubstr("has 45 tokens, 46 are asked for"));
  expect_refused({"gradient", path, "--mode", "fast"},
                 HasSubstr("must be memory-saving or high-performance"));
  expect_refused({"loss", path, "--logits-rounding", "infer"},
                 HasSubstr("must be none or operand"));
  expect_refused({"gradient", path, "--grad-dtype", "f16"}, HasSubstr("must be f32 or bf16"));
  expect_refused({"gradient", path, "--workspace-limit", "1KiB"}, HasSubstr("least possible"));
  expect_refused({"compare", path, "--outputs", path}, HasSubstr("none of the outputs"));
  expect_refused({"loss", path, "--out", scratch_.path("no/such/folder")},
                 HasSubstr("cannot be written"));
  expect_refused({"loss", path, "--out", "/dev/null"}, HasSubstr("not a regular file"));
}

TEST_F(ProgramTest, AnUnusableIsaIsAnError) {
  const std::string path = small_case();
  const ProgramResult result = run_program({"loss", path}, {"LOGITLESS_ISA=mmx"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, HasSubstr("mmx"));
}

TEST_F(ProgramTest, MakeIsDeterministic) {
  const std::string first = test::read_file(small_case());
  EXPECT_EQ(test::read_file(small_case()), first);
  const std::string other = scratch_.path("other");
  run_program({"make", other, "--tokens", "45", "--vocab", "507", "--hidden", "64", "--seed", "6"});
  EXPECT_NE(test::read_file(other), first);
}

TEST_F(ProgramTest, OutputsHaveTheirNamesShapesAndTypes) {
  const std::string path = small_case();
  const std::string out = scratch_.path("out.safetensors");
  const ProgramResult run =
      run_program({"gradient", path, "--shards", "4", "--threads", "2", "--out", out});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_EQ(run.err, "");
  EXPECT_THAT(run.out, AllOf(HasSubstr("mean"), HasSubstr("gradient memory-saving"),
                             HasSubstr("4 shards"), HasSubstr(out)));
  const Result<SafetensorsFile> file = SafetensorsFile::open(out);
  ASSERT_TRUE(file.has_value()) << file.error().message;
  const std::vector<std::tuple<const char*, const char*, std::vector<int64_t>>> expected = {
      {"logits_max", "F32", {45}},       {"sum_exp_logits", "F32", {45}},
      {"predicted_logits", "F32", {45}}, {"target_mask", "U8", {6}},
      {"masked_target", "I64", {45}},    {"loss", "F32", {45}},
      {"logsumexp", "F32", {45}},        {"grad_input", "BF16", {45, 64}},
      {"grad_weight", "BF16", {507, 64}}};
  EXPECT_EQ(file->tensors().size(), expected.size());
  for (const auto& [name, dtype, shape] : expected) {
    const TensorInfo* info = file->find(name);
    ASSERT_NE(info, nullptr) << name;
    EXPECT_EQ(info->dtype, dtype) << name;
    EXPECT_EQ(info->shape, shape) << name;
  }
  EXPECT_EQ(file->metadata().at("logits_rounding"), "none");
  EXPECT_EQ(file->metadata().at("vocab_end_index"), "507");
  // Nothing but the two files: the temporary one took its name.
  EXPECT_EQ(scratch_.files(), (std::vector<std::string>{"case.safetensors", "out.safetensors"}));
}

TEST_F(ProgramTest, EveryCommandsOwnOutputsCompareWell) {
  const std::string path = small_case("f16");
  const std::vector<std::vector<std::string>> runs = {
      {"forward", path},
      {"loss", path, "--with-softmax", "--logits-rounding", "operand"},
      {"gradient", path, "--mode", "high-performance", "--shards", "2"},
      {"gradient", path, "--logits-rounding", "operand", "--grad-dtype", "f32", "--shards", "7"}};
  for (std::vector<std::string> run : runs) {
    const std::string out = scratch_.path("out");
    run.insert(run.end(), {"--out", out});
    ASSERT_EQ(run_program(run).exit_code, 0);
    const ProgramResult compared = run_program({"compare", path, "--outputs", out});
    EXPECT_EQ(compared.exit_code, 0) << compared.out << compared.err;
    EXPECT_THAT(compared.out, HasSubstr("every error is within what is allowed"));
  }
}

TEST_F(ProgramTest, CompareNamesWhatIsBeyond) {
  const std::string path = small_case();
  const std::string out = scratch_.path("out");
  ASSERT_EQ(run_program({"gradient", path, "--out", out}).exit_code, 0);
  const Result<SafetensorsFile> file = SafetensorsFile::open(out);
  ASSERT_TRUE(file.has_value());
  Result<HostTensor> grad = file->read(*file->find("grad_weight"));
  ASSERT_TRUE(grad.has_value());
  store_float(grad->data(), grad->dtype(), 506 * 64 + 63, 1.0f);
  ASSERT_TRUE(write_safetensors(out, {{"grad_weight", &*grad}}, {}).has_value());
  const ProgramResult compared = run_program({"compare", path, "--outputs", out});
  EXPECT_EQ(compared.exit_code, 1);
  EXPECT_THAT(compared.out, AllOf(HasSubstr("BEYOND"), HasSubstr("grad_weight[506, 63] is 1, "),
                                  HasSubstr("not in the file, so not judged: logits_max")));
  const json document = json_of({"compare", path, "--outputs", out, "--json"}, 1);
  EXPECT_FALSE(document["fine"].get<bool>());
  EXPECT_EQ(document["judgements"][0]["worst"]["row"], 506);
  EXPECT_EQ(document["judgements"][0]["worst"]["column"], 63);
}

TEST_F(ProgramTest, VerifyPassesAndSaysWhatItChecked) {
  const std::string path = small_case();
  const ProgramResult verified = run_program({"verify", path, "--shards", "2", "--threads", "2"});
  EXPECT_EQ(verified.exit_code, 0) << verified.out;
  EXPECT_THAT(verified.out, AllOf(HasSubstr("all tokens and vocabulary rows are checked"),
                                  HasSubstr("observed"), HasSubstr("margin"),
                                  HasSubstr("gradient high-performance"), Not(HasSubstr("BEYOND")),
                                  // Plain text where stdout is a file.
                                  Not(HasSubstr("\x1b")), Not(HasSubstr("✓"))));
  EXPECT_EQ(verified.err, "");
}

TEST_F(ProgramTest, JsonOfEveryCommandParses) {
  const std::string path = small_case();
  const std::string made = scratch_.path("made");
  EXPECT_EQ(json_of({"make", made, "--tokens", "3", "--vocab", "4", "--hidden", "5",
                     "--json"})["shape"]["V"],
            4);
  EXPECT_TRUE(
      json_of({"info", "--seconds", "0.01", "--threads", "1", "--json"})["isas"].is_array());
  EXPECT_EQ(json_of({"forward", path, "--json"})["isa"].get<std::string>().empty(), false);
  const json loss = json_of({"loss", path, "--json", "--tokens", "40"});
  EXPECT_EQ(loss["shape"]["BT"], 40);
  EXPECT_GT(loss["mean_loss"].get<double>(), 0);
  EXPECT_TRUE(json_of({"gradient", path, "--json"})["stages"].is_array());
  const json verify = json_of({"verify", path, "--json", "--dtype", "f32"});
  EXPECT_TRUE(verify["fine"].get<bool>());
  EXPECT_EQ(verify["dtype"], "f32");
  EXPECT_NEAR(verify["mean_loss"].get<double>(), loss["mean_loss"].get<double>(), 0.5);
  const json plan = json_of({"plan", "--shape", "1024,32000,2048", "8,100,16", "--json"});
  EXPECT_EQ(plan["plans"].size(), 8U);
  EXPECT_GT(plan["plans"][0]["workspace_bytes"].get<int64_t>(), 0);
  const json bench = json_of({"bench", path, "--op", "forward,gradient,gradient-hp,step,one-pass",
                              "--repeats", "2", "--seconds", "0.1", "--threads", "1", "--json"});
  ASSERT_EQ(bench["cases"].size(), 5U);
  for (const json& line : bench["cases"]) {
    EXPECT_GT(line["median_seconds"].get<double>(), 0);
    EXPECT_GT(line["ratio_to_peak"].get<double>(), 0);
    EXPECT_EQ(line["seconds"].size(), 2U);
    EXPECT_EQ(line.contains("unfused"), line["op"] != "gradient-hp");
  }
  // 2 BT V H per product: one forward, three of the memory-saving gradient, two of the other.
  const double product = 2.0 * 45 * 507 * 64;
  EXPECT_EQ(bench["cases"][0]["flops"].get<double>(), product);
  EXPECT_EQ(bench["cases"][1]["flops"].get<double>(), 3 * product);
  EXPECT_EQ(bench["cases"][2]["flops"].get<double>(), 2 * product);
  EXPECT_EQ(bench["cases"][3]["flops"].get<double>(), 4 * product);
  EXPECT_EQ(bench["cases"][4]["flops"].get<double>(), 3 * product);
}

TEST_F(ProgramTest, ASparseGradientIsMadeVerifiedAndPlanned) {
  const std::string path = small_case("f32");
  const std::string out = scratch_.path("out.safetensors");
  const std::vector<std::string> gradient = {
      "gradient", path, "--grad-tolerance", "2^-4", "--seed", "9", "--out", out};
  const ProgramResult made = run_program(gradient);
  EXPECT_EQ(made.exit_code, 0) << made.err;
  EXPECT_THAT(made.out, AllOf(HasSubstr("grad_tolerance 2^-4, seed 9"), HasSubstr("kept"),
                              HasSubstr("rows dense")));
  const std::string bytes = test::read_file(out);
  EXPECT_EQ(run_program(gradient).exit_code, 0);
  EXPECT_EQ(test::read_file(out), bytes);
  const Result<SafetensorsFile> file = SafetensorsFile::open(out);
  ASSERT_TRUE(file.has_value());
  EXPECT_EQ(file->metadata().at("grad_tolerance"), "2^-4");
  EXPECT_EQ(file->metadata().at("seed"), "9");
  ASSERT_NE(file->find("grad_weight"), nullptr);
  // Not judged element by element, and said so.
  const ProgramResult compared = run_program({"compare", path, "--outputs", out});
  EXPECT_EQ(compared.exit_code, 0) << compared.out << compared.err;
  EXPECT_THAT(compared.out, HasSubstr("its gradients are sparse (grad_tolerance 2^-4)"));
  const std::string other = scratch_.path("other.safetensors");
  const json document = json_of({"gradient", path, "--grad-tolerance", "0.0625", "--seed",
                                 "18446744073709551615", "--out", other, "--json"});
  EXPECT_NE(test::read_file(other), bytes);
  EXPECT_EQ(document["seed"].get<uint64_t>(), ~uint64_t{0});
  EXPECT_EQ(document["grad_tolerance"].get<double>(), 0.0625);
  EXPECT_GT(document["kept"].get<int64_t>(), 0);
  EXPECT_EQ(document["elements"].get<int64_t>(),
            (document["rows"].get<int64_t>() - document["dense_rows"].get<int64_t>()) * 507);

  const std::vector<std::string> verify = {"verify",  path, "--grad-tolerance", "2^-4",
                                           "--seeds", "12", "--threads",        "2"};
  const ProgramResult verified = run_program(verify);
  EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
  EXPECT_THAT(verified.out, AllOf(HasSubstr("relative error"), HasSubstr("bias: 12 seeds"),
                                  HasSubstr("every error is within what is allowed")));
  std::vector<std::string> as_json = verify;
  as_json.emplace_back("--json");
  const json verdict = json_of(as_json);
  EXPECT_TRUE(verdict["fine"].get<bool>());
  for (const char* key : {"rows", "all", "median", "p99", "worst"}) {
    EXPECT_TRUE(verdict["grad_input"].contains(key)) << key;
  }
  EXPECT_EQ(verdict["seeds"], 12);

  const json plans =
      json_of({"plan", "--shape", "64,5000,64", "--grad-tolerance", "2^-9", "--json"});
  ASSERT_EQ(plans["plans"].size(), 3U);  // all but gradient-hp
  for (const json& plan : plans["plans"]) {
    EXPECT_EQ(plan.contains("grad_tolerance"), plan["op"] != "forward");
    EXPECT_EQ(plan["describe"].get<std::string>().find("sparse") != std::string::npos,
              plan["op"] != "forward");
  }
}

TEST_F(ProgramTest, ASparseGradientThatCannotBeIsRefused) {
  const std::string path = small_case();
  for (const char* command : {"gradient", "verify"}) {
    for (const char* bad : {"0.6", "2^-17", "-1", "nan", "eps"}) {
      expect_refused({command, path, "--grad-tolerance", bad},
                     AllOf(HasSubstr(std::string("--grad-tolerance is '") + bad + "'"),
                           HasSubstr("from 2^-16 to 0.5")));
    }
    expect_refused({command, path, "--seed", "3"}, HasSubstr("--grad-tolerance"));
    expect_refused({command, path, "--grad-tolerance", "2^-9", "--seed", "-3"},
                   HasSubstr("--seed"));
    expect_refused({command, path, "--grad-tolerance", "2^-9", "--shards", "2"},
                   HasSubstr("--shards has no sparse gradient"));
  }
  expect_refused({"gradient", path, "--grad-tolerance", "2^-9", "--mode", "high-performance"},
                 HasSubstr("--mode high-performance has no sparse gradient"));
  expect_refused({"gradient", path, "--grad-tolerance", "2^-9", "--logits-rounding", "operand"},
                 HasSubstr("--logits-rounding operand has no sparse gradient"));
  expect_refused({"gradient", path, "--grad-tolerance", "2^-9", "--workspace-limit", "1KiB"},
                 HasSubstr("limit"));
  expect_refused({"verify", path, "--grad-tolerance", "0"}, HasSubstr("exact gradients"));
  expect_refused({"plan", "--shape", "1,2,3", "--op", "gradient-hp", "--grad-tolerance", "2^-9"},
                 HasSubstr("grad_tolerance"));
  const std::string outside = scratch_.path("outside");
  ASSERT_EQ(run_program({"make", outside, "--tokens", "45", "--vocab", "507", "--hidden", "64",
                         "--masked", "0.5"})
                .exit_code,
            0);
  expect_refused({"gradient", outside, "--grad-tolerance", "2^-9"},
                 HasSubstr("--grad-tolerance takes a whole vocabulary"));
}

TEST_F(ProgramTest, TheWorkspaceLimitIsObeyed) {
  const json plan =
      json_of({"plan", "--shape", "1024,32000,2048", "--workspace-limit", "24MiB", "--json"});
  for (const json& entry : plan["plans"]) {
    EXPECT_LE(entry["workspace_bytes"].get<int64_t>(), 24 << 20) << entry["op"];
  }
}

// Interrupted in the middle of `make` and of a gradient: exit 130, whatever stood at OUT before
// still stands, and no other file is left.
TEST_F(ProgramTest, CtrlCLeavesNoHalfFile) {
  const std::string path = scratch_.path("case");
  ASSERT_EQ(run_program({"make", path, "--tokens", "2048", "--vocab", "20000", "--hidden", "512"})
                .exit_code,
            0);
  const std::string out = scratch_.path("out");
  test::write_file(out, "old");
  const std::vector<std::vector<std::string>> commands = {
      {"make", out, "--tokens", "1000", "--vocab", "300000", "--hidden", "2048"},
      {"gradient", path, "--shards", "64", "--threads", "1", "--out", out}};
  for (const std::vector<std::string>& command : commands) {
    Program program(command);
    program.wait_for_handler(SIGINT);
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    program.send(SIGINT);
    const ProgramResult result = program.wait();
    EXPECT_EQ(result.exit_code, 130) << command[0] << ": " << result.out << result.err;
    EXPECT_THAT(result.err, HasSubstr("cancelled")) << command[0];
    EXPECT_EQ(test::read_file(out), "old") << command[0];
    EXPECT_EQ(scratch_.files(), (std::vector<std::string>{"case", "out"})) << command[0];
  }
}

// At any moment, also while the file is being written.
TEST_F(ProgramTest, CtrlCAtAnyMomentLeavesAllOrNothing) {
  const std::string out = scratch_.path("out");
  for (int i = 0; i < 12; ++i) {
    Program program({"make", out, "--tokens", "64", "--vocab", "20000", "--hidden", "512"});
    std::this_thread::sleep_for(std::chrono::milliseconds(8 * i));
    program.send(SIGINT);
    const ProgramResult result = program.wait();
    EXPECT_THAT(result.exit_code, testing::AnyOf(0, 130)) << result.err;
    if (result.exit_code == 0) {
      EXPECT_TRUE(SafetensorsFile::open(out).has_value());
      std::filesystem::remove(out);
    }
    EXPECT_TRUE(scratch_.files().empty()) << i;
  }
}

TEST_F(ProgramTest, AFullDiskIsSaid) {
  if (::access("/dev/full", W_OK) != 0) GTEST_SKIP() << "no /dev/full";
  const ProgramResult result = run_program({"make", "/dev/full"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err,
              MatchesRegex("logitless: /dev/full: exists and is not a regular file.*\n"));
  // Text that cannot be printed is no success either, be it short or long.
  const std::string path = small_case();
  const std::vector<std::vector<std::string>> commands = {{"loss", path},
                                                          {"loss", path, "--json"},
                                                          {"verify", path, "--tokens", "3"},
                                                          {"verify", "--help"},
                                                          {"--version"}};
  for (const std::vector<std::string>& command : commands) {
    const ProgramResult unprinted = run_program(command, {}, "/dev/full");
    EXPECT_EQ(unprinted.exit_code, 2) << command.back();
    EXPECT_EQ(unprinted.err, "logitless: stdout cannot be written\n") << command.back();
  }
}

// A limit of the size of files is an error like a full disk: said, and no half file.
TEST_F(ProgramTest, AFileLargerThanIsAllowedIsSaid) {
  // Its runtime maps a file of its own, and dies of SIGBUS where that cannot grow.
  if (logitless::test::kThreadSanitized)
    GTEST_SKIP() << "ThreadSanitizer cannot run under a limit of file sizes";
  const std::string path = small_case();
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit small = before;
  small.rlim_cur = 20000;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);  // the child's too
  Program program({"gradient", path, "--out", scratch_.path("out")});
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  const ProgramResult result = program.wait();
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, MatchesRegex("logitless: .*out: cannot be written: File too large\n"));
  EXPECT_EQ(scratch_.files(), (std::vector<std::string>{"case.safetensors"}));
}

TEST_F(ProgramTest, ACaseIsNotWrittenOver) {
  const std::string path = small_case();
  const std::string bytes = test::read_file(path);
  const std::string link = scratch_.path("link");
  std::filesystem::create_symlink(path, link);
  for (const std::string& out : {path, link, scratch_.path("./case.safetensors")}) {
    expect_refused({"gradient", path, "--out", out}, HasSubstr("is an input"));
    expect_refused({"gradient", path, "--grad-tolerance", "2^-4", "--out", out},
                   HasSubstr("is an input"));
  }
  EXPECT_EQ(test::read_file(path), bytes);
}

// Before anything is computed: this case would take for ever, and so would its making.
TEST_F(ProgramTest, AnImpossibleOutIsRefusedAtOnce) {
  expect_refused({"make", scratch_.path("no/folder"), "--tokens", "1", "--vocab", "1000000",
                  "--hidden", "1000000"},
                 HasSubstr("cannot be written: No such file or directory"));
}

TEST_F(ProgramTest, NumbersOutOfRangeAreNamedWithTheirRange) {
  const std::string path = small_case();
  expect_refused({"loss", path, "--threads", "0"},
                 HasSubstr("--threads: '0' is not a whole number from 1 to 4096"));
  expect_refused({"loss", path, "--threads", "5000"}, HasSubstr("from 1 to 4096"));
  expect_refused({"loss", path, "--tokens", "-1"}, HasSubstr("--tokens: '-1'"));
  expect_refused({"loss", path, "--shards", "1.5"}, HasSubstr("from 1 to 1048576"));
  // Not the nearest number of 64 bits.
  expect_refused({"loss", path, "--ignore-index", "99999999999999999999"},
                 HasSubstr("--ignore-index: '99999999999999999999' is not a whole number"));
  expect_refused({"make", path, "--tokens", "99999999999999999999"}, HasSubstr("--tokens"));
  expect_refused({"make", path, "--seed", "-1"}, HasSubstr("--seed: '-1' is not a whole number"));
  expect_refused({"bench", "--shape", "1,2,3", "--seconds", "0"},
                 HasSubstr("--seconds: '0' is not a number from 0.001 to 86400"));
  expect_refused({"bench", "--shape", "1,2,3", "--seconds", "nan"}, HasSubstr("--seconds: 'nan'"));
}

}  // namespace
}  // namespace logitless::cli
