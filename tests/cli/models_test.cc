// SPDX-License-Identifier: Apache-2.0
#include "cli/models.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

namespace logitless::cli {
namespace {

using testing::HasSubstr;
using testing::Not;

TEST(Models, TheTableIsSound) {
  std::set<std::string> names;
  for (const Model& model : models()) {
    EXPECT_TRUE(names.insert(model.name).second) << model.name;
    EXPECT_GE(model.V, 32000) << model.name;
    EXPECT_GE(model.H, 512) << model.name;
    EXPECT_EQ(model.H % 64, 0) << model.name;
    EXPECT_THAT(model.source, HasSubstr("/")) << model.name;
    // No two names are the same to find_model.
    const Result<Model> found = find_model(model.name);
    ASSERT_TRUE(found.has_value()) << model.name;
    EXPECT_EQ(found->name, model.name);
    for (const char c : model.name) EXPECT_TRUE(std::isupper(static_cast<unsigned char>(c)) == 0);
  }
  EXPECT_GE(names.size(), 13U);
}

TEST(Models, KnownHeads) {
  const std::tuple<const char*, int64_t, int64_t> expected[] = {
      {"llama-3-8b", 128256, 4096},  {"llama-2-7b", 32000, 4096},  {"smollm2-135m", 49152, 576},
      {"smollm2-1.7b", 49152, 2048}, {"qwen3-0.6b", 151936, 1024}, {"qwen3-8b", 151936, 4096},
      {"qwen2.5-7b", 152064, 3584},  {"gpt-2", 50257, 768},        {"gemma-3-1b", 262144, 1152},
      {"gemma-3-4b", 262208, 2560},  {"mistral-7b", 32000, 4096},  {"phi-3-mini", 32064, 3072},
      {"deepseek-v3", 129280, 7168}};
  for (const auto& [name, V, H] : expected) {
    const Result<Model> model = find_model(name);
    ASSERT_TRUE(model.has_value()) << name;
    EXPECT_EQ(model->V, V) << name;
    EXPECT_EQ(model->H, H) << name;
  }
}

TEST(Models, CaseAndPunctuationDoNotMatter) {
  for (const char* name : {"GPT-2", "gpt2", "GPT_2"}) {
    const Result<Model> model = find_model(name);
    ASSERT_TRUE(model.has_value()) << name;
    EXPECT_EQ(model->name, "gpt-2");
  }
  EXPECT_EQ(find_model("Qwen2.5-7B")->name, "qwen2.5-7b");
}

TEST(Models, AnUnknownNameGetsTheNearOnes) {
  const Result<Model> near = find_model("lama-3-8b");
  ASSERT_FALSE(near.has_value());
  EXPECT_THAT(near.error().message, HasSubstr("there is no model 'lama-3-8b'; near it are"));
  EXPECT_THAT(near.error().message, HasSubstr("llama-3-8b"));
  EXPECT_THAT(near.error().message, Not(HasSubstr("gpt-2")));
  const Result<Model> family = find_model("qwen3");
  ASSERT_FALSE(family.has_value());
  EXPECT_THAT(family.error().message, HasSubstr("qwen3-0.6b, qwen3-1.7b"));
  // Nothing near: all are listed.
  const Result<Model> none = find_model("zzzzzzzzzzzz");
  ASSERT_FALSE(none.has_value());
  for (const Model& model : models()) EXPECT_THAT(none.error().message, HasSubstr(model.name));
  EXPECT_FALSE(find_model("").has_value());
  EXPECT_FALSE(find_model(std::string(100000, 'a')).has_value());
}

}  // namespace
}  // namespace logitless::cli
