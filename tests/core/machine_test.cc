// SPDX-License-Identifier: Apache-2.0
#include "logitless/machine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "logitless/forward.h"

namespace logitless::test {
namespace {

// Sets an environment variable for one test.
class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) {
    if (const char* old = std::getenv(name)) old_ = old;
    if (value != nullptr) {
      setenv(name, value, 1);
    } else {
      unsetenv(name);
    }
  }
  ~Environment() {
    if (old_) {
      setenv(name_, old_->c_str(), 1);
    } else {
      unsetenv(name_);
    }
  }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  const char* name_;
  std::optional<std::string> old_;
};

TEST(Machine, UsableLevelsAreBestFirstAndEndWithScalar) {
  const auto isas = usable_isas();
  ASSERT_FALSE(isas.empty());
  EXPECT_EQ(isas.back(), Isa::scalar);
  EXPECT_TRUE(std::is_sorted(isas.begin(), isas.end()));
}

TEST(Machine, NamesParseBack) {
  for (const Isa isa : usable_isas()) {
    const auto parsed = parse_isa(name_of(isa));
    ASSERT_TRUE(parsed) << name_of(isa);
    EXPECT_EQ(*parsed, isa);
  }
}

TEST(Machine, UnknownNamesAreErrorsThatNameTheChoices) {
  for (const char* name : {"sse9", "", "AVX2", "avx512bf16 "}) {
    const auto parsed = parse_isa(name);
    ASSERT_FALSE(parsed) << name;
    EXPECT_EQ(parsed.error().kind, ErrorKind::isa_unusable);
    EXPECT_NE(parsed.error().message.find("scalar"), std::string::npos) << parsed.error().message;
    EXPECT_NE(parsed.error().message.find(name), std::string::npos) << parsed.error().message;
  }
}

TEST(Machine, LevelsOfOtherMachinesAreUnusable) {
  const auto isas = usable_isas();
  for (const char* name : {"avx2", "neon"}) {
    const auto parsed = parse_isa(name);
    if (!parsed) {
      EXPECT_EQ(parsed.error().kind, ErrorKind::isa_unusable);
    } else {
      EXPECT_NE(std::find(isas.begin(), isas.end(), *parsed), isas.end());
    }
  }
  // No machine has both.
  EXPECT_FALSE(parse_isa("avx2") && parse_isa("neon"));
}

TEST(Machine, TheVariableForcesALevel) {
  for (const Isa isa : usable_isas()) {
    const Environment forced("LOGITLESS_ISA", name_of(isa));
    const auto chosen = default_isa();
    ASSERT_TRUE(chosen);
    EXPECT_EQ(*chosen, isa);
    const auto plan = plan_forward({.BT = 2, .V = 3, .H = 4}, {});
    ASSERT_TRUE(plan);
    EXPECT_EQ(plan->isa(), isa);
  }
}

TEST(Machine, WithoutTheVariableTheBestLevelIsTaken) {
  const Environment none("LOGITLESS_ISA", nullptr);
  ASSERT_TRUE(default_isa());
  EXPECT_EQ(*default_isa(), usable_isas().front());
}

TEST(Machine, AnUnknownVariableIsAnErrorOfEveryPlan) {
  const Environment unknown("LOGITLESS_ISA", "pentium");
  ASSERT_FALSE(default_isa());
  const auto plan = plan_forward({.BT = 2, .V = 3, .H = 4}, {});
  ASSERT_FALSE(plan);
  EXPECT_EQ(plan.error().kind, ErrorKind::isa_unusable);
  EXPECT_NE(plan.error().message.find("pentium"), std::string::npos) << plan.error().message;
  EXPECT_NE(plan.error().message.find("LOGITLESS_ISA"), std::string::npos) << plan.error().message;
  // A level in the options stands above the variable.
  EXPECT_TRUE(plan_forward({.BT = 2, .V = 3, .H = 4}, {}, {.isa = Isa::scalar}));
}

TEST(Machine, ThreadsOfTheEnvironmentAreObeyed) {
  EXPECT_GE(default_threads(), 1);
  const Environment three("OMP_NUM_THREADS", "3");
  EXPECT_EQ(default_threads(), 3);
}

TEST(Machine, InformationIsPlausible) {
  const MachineInfo info = machine_info();
  EXPECT_EQ(info.isas, usable_isas());
  EXPECT_GE(info.threads, 1);
  EXPECT_GE(info.l1d_bytes, 8 << 10);
  EXPECT_GE(info.l2_bytes, info.l1d_bytes);
  EXPECT_FALSE(info.cpu.empty());
}

TEST(Machine, PeaksAreMeasured) {
  for (const Isa isa : usable_isas()) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      const auto peak = measure_peak_flops(isa, dtype, 1, 0.01);
      ASSERT_TRUE(peak) << name_of(isa);
      EXPECT_GT(*peak, 1e8) << name_of(isa);
      EXPECT_GE(flops_per_instruction(isa, dtype), 2.0);
    }
  }
  const double clock = measure_clock_hz(0.02);
  EXPECT_GT(clock, 1e8);
  EXPECT_LT(clock, 1e10);
  EXPECT_GT(measure_read_bandwidth(1, 0.05), 1e8);
}

}  // namespace
}  // namespace logitless::test
