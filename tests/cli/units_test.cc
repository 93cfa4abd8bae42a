// SPDX-License-Identifier: Apache-2.0
#include "cli/units.h"

#include <gtest/gtest.h>

namespace logitless::cli {
namespace {

TEST(ParseBytes, TakesUnitsOfBothKinds) {
  const std::pair<const char*, int64_t> cases[] = {{"0", 0},
                                                   {"4096", 4096},
                                                   {"4096B", 4096},
                                                   {"64MiB", 64 << 20},
                                                   {"64mib", 64 << 20},
                                                   {" 64 MiB ", 64 << 20},
                                                   {"1.5GiB", 3LL << 29},
                                                   {"2kB", 2000},
                                                   {"200MB", 200000000},
                                                   {"1TiB", 1LL << 40},
                                                   {"0.5KiB", 512},
                                                   {"3GB", 3000000000}};
  for (const auto& [text, bytes] : cases) {
    const Result<int64_t> parsed = parse_bytes(text);
    ASSERT_TRUE(parsed.has_value()) << text;
    EXPECT_EQ(*parsed, bytes) << text;
  }
}

TEST(ParseBytes, RefusesWhatIsAmbiguousOrNoNumber) {
  for (const char* text : {"", " ", "MiB", "64M", "16k", "-1", "1e3", "0x10", "1.2.3MiB", "64MiBs",
                           "64 M iB", "nan", "inf", ".", "99999999999999999999", "9999999TiB"}) {
    const Result<int64_t> parsed = parse_bytes(text);
    ASSERT_FALSE(parsed.has_value()) << text;
    EXPECT_EQ(parsed.error().kind, ErrorKind::invalid_argument);
    EXPECT_NE(parsed.error().message.find(std::string("'") + text + "'"), std::string::npos)
        << parsed.error().message;
  }
}

TEST(ParseShape, TakesThreeNumbers) {
  const Result<Shape> shape = parse_shape("1024, 32000,2048");
  ASSERT_TRUE(shape.has_value());
  EXPECT_EQ(shape->BT, 1024);
  EXPECT_EQ(shape->V, 32000);
  EXPECT_EQ(shape->H, 2048);
  EXPECT_TRUE(parse_shape("0,0,0").has_value());
}

TEST(ParseShape, RefusesAnythingElse) {
  for (const char* text : {"", "1", "1,2", "1,2,3,4", "1,2,", ",1,2", "1,-2,3", "1,2,x", "1 2 3",
                           "1,2,3.5", "1,2,99999999999999999999"}) {
    EXPECT_FALSE(parse_shape(text).has_value()) << text;
  }
}

TEST(ParseOperandDtype, KnowsTheUsualNames) {
  for (const char* text : {"bf16", "BF16", "bfloat16"}) {
    EXPECT_EQ(*parse_operand_dtype(text), DType::bf16);
  }
  for (const char* text : {"f16", "fp16", "float16"}) {
    EXPECT_EQ(*parse_operand_dtype(text), DType::f16);
  }
  for (const char* text : {"f32", "fp32", "float32"}) {
    EXPECT_EQ(*parse_operand_dtype(text), DType::f32);
  }
  for (const char* text : {"", "f64", "int8", "bf"}) {
    EXPECT_FALSE(parse_operand_dtype(text).has_value()) << text;
  }
}

TEST(ParseTolerance, TakesPowersOfTwoAndDecimals) {
  for (const auto& [text, value] : std::vector<std::pair<std::string, float>>{{"2^-9", 0x1p-9f},
                                                                              {"2^-16", 0x1p-16f},
                                                                              {"0.5", 0.5f},
                                                                              {"2^-1", 0.5f},
                                                                              {"0.002", 0.002f},
                                                                              {" 1e-3 ", 0.001f},
                                                                              {"0", 0.0f}}) {
    const Result<float> parsed = parse_tolerance(text);
    ASSERT_TRUE(parsed.has_value()) << text;
    EXPECT_EQ(*parsed, value) << text;
  }
  for (const char* text : {"", "x", "2^", "2^-9x", "-0.1", "2^-17", "0.6", "1", "nan", "inf", "2^9",
                           "1/512", "0.001 0.002", "\t0.1"}) {
    const Result<float> parsed = parse_tolerance(text);
    ASSERT_FALSE(parsed.has_value()) << text;
    EXPECT_NE(parsed.error().message.find("--grad-tolerance is '"), std::string::npos);
    EXPECT_NE(parsed.error().message.find("from 2^-16 to 0.5"), std::string::npos);
  }
  EXPECT_EQ(format_tolerance(0x1p-9f), "2^-9");
  EXPECT_EQ(format_tolerance(0.5f), "2^-1");
  EXPECT_EQ(format_tolerance(0.002f), "0.002");
}

TEST(Format, PicksUnitsAPersonReads) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1536), "1.50 KiB");
  EXPECT_EQ(format_bytes(64 << 20), "64.0 MiB");
  EXPECT_EQ(format_seconds(0.0123), "12.3 ms");
  EXPECT_EQ(format_seconds(2e-6), "2.00 us");
  EXPECT_EQ(format_seconds(125), "125 s");
  EXPECT_EQ(format_count(0), "0");
  EXPECT_EQ(format_count(999), "999");
  EXPECT_EQ(format_count(1000), "1,000");
  EXPECT_EQ(format_count(-1234567), "-1,234,567");
}

TEST(Printable, EscapesControlCharactersAndCutsLongText) {
  EXPECT_EQ(printable("weight"), "weight");
  EXPECT_EQ(printable("a\x1b[31m\n"), "a\\x1b[31m\\x0a");
  EXPECT_EQ(printable(std::string(1000, 'x')), std::string(80, 'x') + "...");
}

}  // namespace
}  // namespace logitless::cli
