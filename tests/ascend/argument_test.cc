// SPDX-License-Identifier: Apache-2.0
// Every rule about arguments of the three operators, in the order in which it is looked at. One
// table per operator: a valid call, and the faults in order. Each fault alone must give its code
// and name its parameter; of two faults at once the earlier one must win.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <sstream>

#include "support.h"

namespace ascend_test {
namespace {

constexpr aclnnStatus kNull = 161001;
constexpr aclnnStatus kInvalid = 161002;

struct TensorArgument {
  aclDataType dtype = ACL_FLOAT;
  std::vector<std::int64_t> shape;
  bool null = false;
  aclFormat format = ACL_FORMAT_ND;
  std::vector<std::int64_t> strides = {};  // none: contiguous
};

// The arguments of one phase-1 call, tensors by the names of the C parameters.
struct Arguments {
  std::map<std::string, TensorArgument> tensors;
  std::int64_t start = 0;
  std::int64_t end = 0;
  float label_smoothing = 0;
  bool workspace_size_null = false;
  bool executor_null = false;

  TensorArgument& operator[](const std::string& name) { return tensors.at(name); }
};

struct Answer {
  aclnnStatus status = -1;
  std::string message;
  bool workspace_size_touched = false;
  bool executor_touched = false;
};

using Handles = std::map<std::string, aclTensor*>;
using Phase1 = aclnnStatus (*)(const Arguments&, Handles&, std::uint64_t*, aclOpExecutor**);

// Tensors without memory: phase 1 has no business with data.
Answer ask(Phase1 phase1, const Arguments& arguments) {
  Handles handles;
  for (const auto& [name, t] : arguments.tensors) {
    handles[name] = t.null ? nullptr
                           : aclCreateTensor(t.shape.data(), t.shape.size(), t.dtype,
                                             t.strides.empty() ? nullptr : t.strides.data(), 0,
                                             t.format, t.shape.data(), t.shape.size(), nullptr);
  }
  static aclOpExecutor* const kUnset = reinterpret_cast<aclOpExecutor*>(0x5A5A);
  constexpr std::uint64_t kUnsetSize = 0x5A5A5A5A5A5Au;
  std::uint64_t size = kUnsetSize;
  aclOpExecutor* executor = kUnset;
  take_message();
  Answer answer;
  answer.status = phase1(arguments, handles, arguments.workspace_size_null ? nullptr : &size,
                         arguments.executor_null ? nullptr : &executor);
  answer.message = take_message();
  answer.workspace_size_touched = size != kUnsetSize;
  answer.executor_touched = executor != kUnset;
  if (answer.status == 0 && answer.executor_touched) {
    EXPECT_EQ(aclDestroyAclOpExecutor(executor), 0);
  }
  for (const auto& handle : handles) EXPECT_EQ(aclDestroyTensor(handle.second), 0);
  return answer;
}

void expect_refused(const Answer& answer, aclnnStatus code, const std::string& named) {
  EXPECT_EQ(answer.status, code) << answer.message;
  EXPECT_TRUE(names(answer.message, named))
      << "should name " << named << ": \"" << answer.message << '"';
  EXPECT_TRUE(answer.message.find("EZ1001") != std::string::npos) << answer.message;
  EXPECT_TRUE(names(answer.message, "must")) << "should tell what is allowed: " << answer.message;
  EXPECT_FALSE(answer.workspace_size_touched);
  EXPECT_FALSE(answer.executor_touched);
}

void expect_accepted(const Answer& answer) {
  EXPECT_EQ(answer.status, 0) << answer.message;
  EXPECT_TRUE(answer.workspace_size_touched);
  EXPECT_TRUE(answer.executor_touched);
}

struct Fault {
  std::string title;
  aclnnStatus code;
  std::string named;  // the parameter the message must name; alternatives as "a|b"
  std::vector<std::string> touches;
  std::function<void(Arguments&)> apply;
  std::string came = {};  // what the message must tell when this fault is the only one
};

struct Accepted {
  std::string title;
  std::function<void(Arguments&)> apply;
};

Fault null_tensor(const std::string& name) {
  return {name + "IsNull", kNull, name, {name}, [name](Arguments& a) { a[name].null = true; }};
}

Fault dtype(const std::string& name, aclDataType type, const std::string& what,
            const std::string& named = "", const std::vector<std::string>& also_touches = {}) {
  std::vector<std::string> touches = also_touches;
  touches.push_back(name);
  return {name + "Is" + what,
          kInvalid,
          named.empty() ? name : named,
          touches,
          [name, type](Arguments& a) { a[name].dtype = type; },
          std::to_string(type)};
}

Fault format(const std::string& name) {
  return {name + "IsNchw",
          kInvalid,
          name,
          {name},
          [name](Arguments& a) { a[name].format = ACL_FORMAT_NCHW; },
          std::to_string(ACL_FORMAT_NCHW)};
}

Fault shape(const std::string& name, const std::vector<std::int64_t>& dims, const std::string& what,
            const std::string& named = "") {
  std::string came = "[";
  for (std::size_t i = 0; i < dims.size(); ++i) {
    came += (i > 0 ? ", " : "") + std::to_string(dims[i]);
  }
  came += "]";
  return {name + what,
          kInvalid,
          named.empty() ? name : named,
          {name},
          [name, dims](Arguments& a) { a[name].shape = dims; },
          came};
}

// The rank rule: one dimension of 1 too many.
Fault rank(const std::string& name) {
  return {name + "HasOneDimensionTooMany", kInvalid, name, {name}, [name](Arguments& a) {
            a[name].shape.push_back(1);
          }};
}

Fault no_workspace_size() {
  return {
      "WorkspaceSizeOutPointerIsNull", kNull, "workspaceSize", {"workspaceSize"}, [](Arguments& a) {
        a.workspace_size_null = true;
      }};
}

Fault no_executor() {
  return {"ExecutorOutPointerIsNull", kNull, "executor", {"executor"}, [](Arguments& a) {
            a.executor_null = true;
          }};
}

Fault smoothing(const std::string& what, float value) {
  std::ostringstream came;
  came << "is " << value;
  return {"LabelSmoothingIs" + what,
          kInvalid,
          "labelSmoothing",
          {"labelSmoothing"},
          [value](Arguments& a) { a.label_smoothing = value; },
          came.str()};
}

void expect_each_fault_alone(Phase1 phase1, const Arguments& good,
                             const std::vector<Fault>& faults) {
  expect_accepted(ask(phase1, good));
  for (const Fault& fault : faults) {
    SCOPED_TRACE(fault.title);
    Arguments bad = good;
    fault.apply(bad);
    const Answer answer = ask(phase1, bad);
    expect_refused(answer, fault.code, fault.named);
    EXPECT_NE(answer.message.find(fault.came), std::string::npos)
        << "should tell what came, " << fault.came << ": " << answer.message;
  }
}

void expect_earlier_fault_wins(Phase1 phase1, const Arguments& good,
                               const std::vector<Fault>& faults) {
  int pairs = 0;
  for (std::size_t i = 0; i < faults.size(); ++i) {
    for (std::size_t j = i + 1; j < faults.size(); ++j) {
      const std::set<std::string> touched(faults[i].touches.begin(), faults[i].touches.end());
      if (std::any_of(faults[j].touches.begin(), faults[j].touches.end(),
                      [&](const std::string& name) { return touched.count(name) != 0; })) {
        continue;
      }
      SCOPED_TRACE(faults[i].title + " and " + faults[j].title);
      Arguments bad = good;
      faults[j].apply(bad);
      faults[i].apply(bad);
      expect_refused(ask(phase1, bad), faults[i].code, faults[i].named);
      ++pairs;
      if (testing::Test::HasFailure() && pairs > 5000) return;
    }
  }
  EXPECT_GT(pairs, 100);
}

void expect_each_accepted(Phase1 phase1, const Arguments& good,
                          const std::vector<Accepted>& variants) {
  for (const Accepted& variant : variants) {
    SCOPED_TRACE(variant.title);
    Arguments arguments = good;
    variant.apply(arguments);
    expect_accepted(ask(phase1, arguments));
  }
}

// ---- forward

constexpr std::int64_t kBT = 19, kV = 130, kH = 24;

Arguments good_forward() {
  Arguments a;
  a.tensors = {{"input", {ACL_FLOAT16, {kBT, kH}}},
               {"weight", {ACL_FLOAT16, {kV, kH}}},
               {"target", {ACL_INT32, {kBT}}},
               {"logitsMaxLocalOut", {ACL_FLOAT, {kBT}}},
               {"sumExpLogitsLocalOut", {ACL_FLOAT, {kBT}}},
               {"predictedLogitsLocalOut", {ACL_FLOAT, {kBT}}},
               {"targetMaskOut", {ACL_UINT8, {3}}},
               {"maskedTargetOut", {ACL_INT32, {kBT}}},
               {"vocabParallelLogitsOutOptional", {ACL_FLOAT16, {kBT, kV}}}};
  a.start = 10;
  a.end = 10 + kV;
  return a;
}

aclnnStatus forward_phase1(const Arguments& a, Handles& t, std::uint64_t* size,
                           aclOpExecutor** executor) {
  return aclnnFusedLinearOnlineMaxSumGetWorkspaceSize(
      t["input"], t["weight"], t["target"], a.start, a.end, t["logitsMaxLocalOut"],
      t["sumExpLogitsLocalOut"], t["predictedLogitsLocalOut"], t["targetMaskOut"],
      t["maskedTargetOut"], t["vocabParallelLogitsOutOptional"], size, executor);
}

std::vector<Fault> forward_faults() {
  return {
      no_workspace_size(),
      no_executor(),
      null_tensor("input"),
      null_tensor("weight"),
      null_tensor("target"),
      null_tensor("logitsMaxLocalOut"),
      null_tensor("sumExpLogitsLocalOut"),
      null_tensor("predictedLogitsLocalOut"),
      null_tensor("targetMaskOut"),
      null_tensor("maskedTargetOut"),
      dtype("input", ACL_FLOAT, "Float32"),
      dtype("input", ACL_INT8, "Int8"),
      dtype("weight", ACL_FLOAT, "Float32"),
      dtype("weight", ACL_DOUBLE, "Float64"),
      dtype("target", ACL_INT8, "Int8"),
      dtype("target", ACL_FLOAT, "Float32"),
      dtype("weight", ACL_BF16, "BFloat16BesideFloat16", "input|weight", {"input"}),
      dtype("logitsMaxLocalOut", ACL_FLOAT16, "Float16"),
      dtype("sumExpLogitsLocalOut", ACL_FLOAT16, "Float16"),
      dtype("predictedLogitsLocalOut", ACL_DOUBLE, "Float64"),
      dtype("targetMaskOut", ACL_INT8, "Int8"),
      dtype("targetMaskOut", ACL_BOOL, "Bool"),
      dtype("maskedTargetOut", ACL_FLOAT16, "Float16", "", {"target"}),
      dtype("maskedTargetOut", ACL_INT64, "Int64BesideInt32", "", {"target"}),
      dtype("vocabParallelLogitsOutOptional", ACL_FLOAT, "Float32"),
      dtype("vocabParallelLogitsOutOptional", ACL_BF16, "BFloat16BesideFloat16"),
      rank("input"),
      rank("weight"),
      shape("weight", {kV * kH}, "HasOneDimension"),
      rank("target"),
      rank("logitsMaxLocalOut"),
      rank("sumExpLogitsLocalOut"),
      rank("predictedLogitsLocalOut"),
      rank("targetMaskOut"),
      rank("maskedTargetOut"),
      shape("maskedTargetOut", {}, "HasNoDimension"),
      shape("weight", {0, kH}, "HasNoRows"),
      {"HiddenSizeIs65535",
       kInvalid,
       "input|weight",
       {"input", "weight"},
       [](Arguments& a) { a["input"].shape[1] = a["weight"].shape[1] = 65535; },
       "65535"},
      shape("weight", {kV, kH - 1}, "HasOneColumnTooFew", "input|weight"),
      shape("weight", {kV, kH + 1}, "HasOneColumnTooMany", "input|weight"),
      shape("target", {1}, "HasOneElement"),
      shape("target", {kBT + 1}, "HasOneElementTooMany"),
      shape("logitsMaxLocalOut", {1}, "HasOneElement"),
      shape("sumExpLogitsLocalOut", {kBT - 1}, "HasOneElementTooFew"),
      shape("predictedLogitsLocalOut", {kBT + 1}, "HasOneElementTooMany"),
      shape("targetMaskOut", {2}, "HasOneByteTooFew"),
      shape("targetMaskOut", {4}, "HasOneByteTooMany"),
      shape("targetMaskOut", {kBT}, "HasOneBytePerToken"),
      shape("maskedTargetOut", {1}, "HasOneElement"),
      shape("maskedTargetOut", {kBT + 1}, "HasOneElementTooMany"),
      rank("vocabParallelLogitsOutOptional"),
      shape("vocabParallelLogitsOutOptional", {kBT * kV}, "HasOneDimension"),
      shape("vocabParallelLogitsOutOptional", {kBT, 1}, "HasOneColumn"),
      shape("vocabParallelLogitsOutOptional", {kBT + 1, kV}, "HasOneRowTooMany"),
      {"VocabStartIndexIsNegative",
       kInvalid,
       "vocabStartIndex",
       {"vocabStartIndex"},
       [](Arguments& a) { a.start = -1; },
       "-1"},
      {"VocabEndIndexIsBelowStart",
       kInvalid,
       "vocabEndIndex",
       {"vocabEndIndex", "vocabStartIndex"},
       [](Arguments& a) { a.end = a.start - 1; },
       "9"},
  };
}

TEST(ForwardArguments, EachFaultAloneGivesItsCodeAndNamesItsParameter) {
  expect_each_fault_alone(forward_phase1, good_forward(), forward_faults());
}

TEST(ForwardArguments, OfTwoFaultsTheEarlierCheckWins) {
  expect_earlier_fault_wins(forward_phase1, good_forward(), forward_faults());
}

TEST(ForwardArguments, WhatIsAllowedIsAccepted) {
  const auto all_16_bit = [](Arguments& a, aclDataType type) {
    a["input"].dtype = a["weight"].dtype = a["vocabParallelLogitsOutOptional"].dtype = type;
  };
  expect_each_accepted(
      forward_phase1, good_forward(),
      {{"NoLogits", [](Arguments& a) { a["vocabParallelLogitsOutOptional"].null = true; }},
       {"BFloat16", [&](Arguments& a) { all_16_bit(a, ACL_BF16); }},
       {"Int64", [](Arguments& a) { a["target"].dtype = a["maskedTargetOut"].dtype = ACL_INT64; }},
       {"AnyFormat",
        [](Arguments& a) {
          for (auto& t : a.tensors) t.second.format = ACL_FORMAT_FRACTAL_NZ;
        }},
       {"EmptyRange", [](Arguments& a) { a.end = a.start; }},
       {"RangeLongerThanTheShard", [](Arguments& a) { a.end = a.start + 100 * kV; }},
       {"RangeUpToTheLargestInteger",
        [](Arguments& a) { a.end = std::numeric_limits<std::int64_t>::max(); }},
       {"HiddenSize65534",
        [](Arguments& a) { a["input"].shape[1] = a["weight"].shape[1] = 65534; }},
       {"HiddenSize0", [](Arguments& a) { a["input"].shape[1] = a["weight"].shape[1] = 0; }},
       {"OneRow",
        [](Arguments& a) {
          a["weight"].shape[0] = a["vocabParallelLogitsOutOptional"].shape[1] = 1;
        }},
       {"NoTokens", [](Arguments& a) {
          for (auto& t : a.tensors) {
            if (t.first != "weight") t.second.shape[0] = 0;
          }
        }}});
}

TEST(ForwardArguments, EmptyVocabularyIsRefusedEvenWithoutTokens) {
  Arguments a = good_forward();
  for (auto& t : a.tensors) t.second.shape[0] = 0;
  a["vocabParallelLogitsOutOptional"].null = true;
  expect_refused(ask(forward_phase1, a), kInvalid, "weight");
}

// The rule about tokens comes last: without any, everything else is still looked at.
TEST(ForwardArguments, NoTokensExcuseNoOtherFault) {
  Arguments none = good_forward();
  for (auto& t : none.tensors) {
    if (t.first != "weight") t.second.shape[0] = 0;
  }
  expect_accepted(ask(forward_phase1, none));
  Arguments a = none;
  a.start = -1;
  expect_refused(ask(forward_phase1, a), kInvalid, "vocabStartIndex");
  a.end = -5;
  expect_refused(ask(forward_phase1, a), kInvalid, "vocabStartIndex");
  a = none;
  a.end = a.start - 1;
  expect_refused(ask(forward_phase1, a), kInvalid, "vocabEndIndex");
  a = none;
  a["vocabParallelLogitsOutOptional"].shape = {0, kV + 1};
  expect_refused(ask(forward_phase1, a), kInvalid, "vocabParallelLogitsOutOptional");
  a = none;
  a["targetMaskOut"].shape = {1};
  expect_refused(ask(forward_phase1, a), kInvalid, "targetMaskOut");
}

TEST(ForwardArguments, NegativeDimensionsAreRefused) {
  for (const char* name : {"input", "weight"}) {
    Arguments a = good_forward();
    a[name].shape[0] = -4;
    EXPECT_EQ(ask(forward_phase1, a).status, kInvalid) << name;
  }
}

// ---- loss

Arguments good_loss() {
  Arguments a;
  a.tensors = {{"logitsMax", {ACL_FLOAT, {kBT}}},
               {"sumExpLogits", {ACL_FLOAT, {kBT}}},
               {"predictedLogits", {ACL_FLOAT, {kBT}}},
               {"inputOptional", {ACL_FLOAT, {}, true}},
               {"weightOptional", {ACL_FLOAT, {}, true}},
               {"vocabParallelLogitsOptional", {ACL_BF16, {kBT, kV}}},
               {"lossOut", {ACL_FLOAT, {kBT}}},
               {"softMaxOutOptional", {ACL_FLOAT, {kBT, kV}}}};
  return a;
}

aclnnStatus loss_phase1(const Arguments& a, Handles& t, std::uint64_t* size,
                        aclOpExecutor** executor) {
  return aclnnFusedCrossEntropyLossWithMaxSumGetWorkspaceSize(
      t["logitsMax"], t["sumExpLogits"], t["predictedLogits"], a.label_smoothing,
      t["inputOptional"], t["weightOptional"], t["vocabParallelLogitsOptional"], t["lossOut"],
      t["softMaxOutOptional"], size, executor);
}

std::vector<Fault> loss_faults() {
  return {
      no_workspace_size(),
      no_executor(),
      null_tensor("logitsMax"),
      null_tensor("sumExpLogits"),
      null_tensor("predictedLogits"),
      null_tensor("lossOut"),
      null_tensor("softMaxOutOptional"),
      dtype("logitsMax", ACL_FLOAT16, "Float16"),
      dtype("logitsMax", ACL_BF16, "BFloat16"),
      dtype("sumExpLogits", ACL_DOUBLE, "Float64"),
      dtype("predictedLogits", ACL_FLOAT16, "Float16"),
      dtype("lossOut", ACL_FLOAT16, "Float16"),
      dtype("vocabParallelLogitsOptional", ACL_INT32, "Int32"),
      dtype("vocabParallelLogitsOptional", ACL_DOUBLE, "Float64"),
      dtype("softMaxOutOptional", ACL_BF16, "BFloat16"),
      rank("logitsMax"),
      shape("sumExpLogits", {kBT + 1}, "HasOneElementTooMany"),
      rank("sumExpLogits"),
      shape("predictedLogits", {1}, "HasOneElement"),
      rank("predictedLogits"),
      shape("lossOut", {kBT - 1}, "HasOneElementTooFew"),
      rank("lossOut"),
      rank("vocabParallelLogitsOptional"),
      shape("vocabParallelLogitsOptional", {kBT * kV}, "HasOneDimension"),
      shape("softMaxOutOptional", {kBT, kV - 1}, "HasOneColumnTooFew"),
      rank("softMaxOutOptional"),
      {"VocabParallelLogitsAndSoftmaxHaveOneRowTooMany",
       kInvalid,
       "vocabParallelLogitsOptional",
       {"vocabParallelLogitsOptional", "softMaxOutOptional"},
       [](Arguments& a) {
         a["vocabParallelLogitsOptional"].shape[0] = a["softMaxOutOptional"].shape[0] = kBT + 1;
       }},
      smoothing("Tenth", 0.1F),
      smoothing("One", 1.0F),
      smoothing("Negative", -0.5F),
      smoothing("TheLeastDenormal", std::numeric_limits<float>::denorm_min()),
      smoothing("NaN", std::numeric_limits<float>::quiet_NaN()),
      smoothing("Infinite", std::numeric_limits<float>::infinity()),
  };
}

TEST(LossArguments, EachFaultAloneGivesItsCodeAndNamesItsParameter) {
  expect_each_fault_alone(loss_phase1, good_loss(), loss_faults());
}

TEST(LossArguments, OfTwoFaultsTheEarlierCheckWins) {
  expect_earlier_fault_wins(loss_phase1, good_loss(), loss_faults());
}

TEST(LossArguments, WhatIsAllowedIsAccepted) {
  expect_each_accepted(
      loss_phase1, good_loss(),
      {{"NoLogits",
        [](Arguments& a) {
          a["vocabParallelLogitsOptional"].null = a["softMaxOutOptional"].null = true;
        }},
       {"SoftmaxIsIgnoredWithoutLogits",
        [](Arguments& a) {
          a["vocabParallelLogitsOptional"].null = true;
          a["softMaxOutOptional"] = {ACL_INT8, {3, 4, 5}};
        }},
       {"Float32Logits", [](Arguments& a) { a["vocabParallelLogitsOptional"].dtype = ACL_FLOAT; }},
       {"Float16Logits",
        [](Arguments& a) { a["vocabParallelLogitsOptional"].dtype = ACL_FLOAT16; }},
       {"NegativeZeroSmoothing", [](Arguments& a) { a.label_smoothing = -0.0F; }},
       {"InputAndWeightOfOddShapes",
        [](Arguments& a) {
          a["inputOptional"] = {ACL_FLOAT, {2}};
          a["weightOptional"] = {ACL_FLOAT, {7, 1, 3}};
        }},
       {"InputAndWeightOfOddTypes",
        [](Arguments& a) {
          a["inputOptional"] = {ACL_INT64, {}};
          a["weightOptional"] = {ACL_BOOL, {0}};
        }},
       {"AnyFormat",
        [](Arguments& a) {
          for (auto& t : a.tensors) t.second.format = ACL_FORMAT_NCDHW;
        }},
       {"EmptyVocabulary",
        [](Arguments& a) {
          a["vocabParallelLogitsOptional"].shape[1] = a["softMaxOutOptional"].shape[1] = 0;
        }},
       {"NoTokens", [](Arguments& a) {
          for (auto& t : a.tensors) {
            if (!t.second.null) t.second.shape[0] = 0;
          }
        }}});
}

// ---- gradient

Arguments good_gradient(bool memory_saving) {
  Arguments a;
  a.tensors = {{"grad", {ACL_FLOAT, {kBT}}},
               {"input", {ACL_BF16, {kBT, kH}}},
               {"weight", {ACL_BF16, {kV, kH}}},
               {"targetMask", {ACL_UINT8, {3}}},
               {"maskedTarget", {ACL_INT32, {kBT}}},
               {"logitsMaxOptional", {ACL_FLOAT, {kBT}, !memory_saving}},
               {"sumExpLogitsOptional", {ACL_FLOAT, {kBT}, !memory_saving}},
               {"softmaxOptional", {ACL_FLOAT, {kBT, kV}, memory_saving}},
               {"inputGradOut", {ACL_BF16, {kBT, kH}}},
               {"weightGradOut", {ACL_BF16, {kV, kH}}}};
  return a;
}

aclnnStatus gradient_phase1(const Arguments& a, Handles& t, std::uint64_t* size,
                            aclOpExecutor** executor) {
  return aclnnFusedLinearCrossEntropyLossGradGetWorkspaceSize(
      t["grad"], t["input"], t["weight"], t["targetMask"], t["maskedTarget"], a.label_smoothing,
      t["logitsMaxOptional"], t["sumExpLogitsOptional"], t["softmaxOptional"], t["inputGradOut"],
      t["weightGradOut"], size, executor);
}

void add(std::vector<Fault>& faults, std::vector<Fault> more) {
  faults.insert(faults.end(), more.begin(), more.end());
}

std::vector<Fault> gradient_faults(bool memory_saving) {
  const std::string modes = "softmaxOptional|logitsMaxOptional|sumExpLogitsOptional";
  std::vector<Fault> faults = {no_workspace_size(), no_executor()};
  const auto mode_missing = [&](const std::string& name) {
    Fault fault = null_tensor(name);
    fault.named = modes;
    return fault;
  };
  if (memory_saving) {
    add(faults, {mode_missing("logitsMaxOptional"), mode_missing("sumExpLogitsOptional")});
  } else {
    add(faults, {mode_missing("softmaxOptional")});
  }
  add(faults,
      {null_tensor("grad"), null_tensor("input"), null_tensor("weight"), null_tensor("targetMask"),
       null_tensor("maskedTarget"), null_tensor("inputGradOut"), null_tensor("weightGradOut")});
  add(faults, {dtype("grad", ACL_BF16, "BFloat16"), dtype("input", ACL_FLOAT, "Float32"),
               dtype("weight", ACL_FLOAT, "Float32"), dtype("targetMask", ACL_INT8, "Int8"),
               dtype("targetMask", ACL_INT32, "Int32"), dtype("maskedTarget", ACL_FLOAT, "Float32"),
               dtype("maskedTarget", ACL_UINT32, "UInt32")});
  if (memory_saving) {
    add(faults, {dtype("logitsMaxOptional", ACL_BF16, "BFloat16"),
                 dtype("sumExpLogitsOptional", ACL_FLOAT16, "Float16")});
  } else {
    add(faults, {dtype("softmaxOptional", ACL_BF16, "BFloat16")});
  }
  add(faults, {dtype("weight", ACL_FLOAT16, "Float16BesideBFloat16", "input|weight", {"input"}),
               dtype("inputGradOut", ACL_FLOAT16, "Float16BesideBFloat16", "", {"input"}),
               dtype("inputGradOut", ACL_FLOAT, "Float32", "", {"input"}),
               dtype("weightGradOut", ACL_FLOAT16, "Float16BesideBFloat16", "", {"input"}),
               dtype("weightGradOut", ACL_FLOAT, "Float32", "", {"input"})});
  add(faults, {format("grad"), format("input"), format("weight"), format("targetMask"),
               format("maskedTarget")});
  if (memory_saving) {
    add(faults, {format("logitsMaxOptional"), format("sumExpLogitsOptional")});
  } else {
    add(faults, {format("softmaxOptional")});
  }
  add(faults, {format("inputGradOut"), format("weightGradOut")});
  add(faults, {smoothing("One", 1.0F),
               smoothing("TheLeastDenormal", std::numeric_limits<float>::denorm_min()),
               smoothing("NaN", std::numeric_limits<float>::quiet_NaN())});
  add(faults,
      {rank("grad"), rank("input"), rank("weight"), rank("targetMask"), rank("maskedTarget")});
  if (memory_saving) {
    add(faults, {rank("logitsMaxOptional"), rank("sumExpLogitsOptional")});
  } else {
    add(faults, {rank("softmaxOptional"), shape("softmaxOptional", {kBT}, "HasOneDimension")});
  }
  add(faults, {rank("inputGradOut"), rank("weightGradOut")});
  add(faults, {shape("input", {kBT + 1, kH}, "HasOneRowTooMany"),
               shape("input", {kBT - 1, kH}, "HasOneRowTooFew"),
               shape("weight", {127, kH}, "Has127Rows"),
               shape("weight", {100, kH}, "Has100Rows"),
               shape("weight", {1, kH}, "HasOneRow"),
               shape("weight", {kV, kH + 1}, "HasOneColumnTooMany", "input|weight"),
               {"BoolMaskHasOneElementTooMany",
                kInvalid,
                "targetMask",
                {"targetMask"},
                [](Arguments& a) {
                  a["targetMask"] = {ACL_BOOL, {kBT + 1}};
                }},
               {"BoolMaskIsPacked",
                kInvalid,
                "targetMask",
                {"targetMask"},
                [](Arguments& a) {
                  a["targetMask"] = {ACL_BOOL, {3}};
                }},
               shape("targetMask", {2}, "HasOneByteTooFew"),
               shape("targetMask", {0}, "IsEmpty"),
               shape("maskedTarget", {kBT + 1}, "HasOneElementTooMany"),
               shape("maskedTarget", {1}, "HasOneElement")});
  if (memory_saving) {
    add(faults, {shape("logitsMaxOptional", {kBT - 1}, "HasOneElementTooFew"),
                 shape("sumExpLogitsOptional", {kBT + 1}, "HasOneElementTooMany")});
  } else {
    add(faults, {shape("softmaxOptional", {kBT, kV - 1}, "HasOneColumnTooFew"),
                 shape("softmaxOptional", {kBT + 1, kV}, "HasOneRowTooMany")});
  }
  add(faults, {shape("inputGradOut", {kBT, kH + 1}, "HasOneColumnTooMany"),
               shape("inputGradOut", {kBT + 1, kH}, "HasOneRowTooMany"),
               shape("weightGradOut", {kV, kBT}, "IsVByBT"),
               shape("weightGradOut", {kV + 1, kH}, "HasOneRowTooMany")});
  return faults;
}

class GradientArguments : public testing::TestWithParam<bool> {};

TEST_P(GradientArguments, EachFaultAloneGivesItsCodeAndNamesItsParameter) {
  expect_each_fault_alone(gradient_phase1, good_gradient(GetParam()), gradient_faults(GetParam()));
}

TEST_P(GradientArguments, OfTwoFaultsTheEarlierCheckWins) {
  expect_earlier_fault_wins(gradient_phase1, good_gradient(GetParam()),
                            gradient_faults(GetParam()));
}

TEST_P(GradientArguments, WhatIsAllowedIsAccepted) {
  const auto all_16_bit = [](Arguments& a, aclDataType type) {
    for (const char* name : {"input", "weight", "inputGradOut", "weightGradOut"}) {
      a[name].dtype = type;
    }
  };
  const auto rows = [](Arguments& a, std::int64_t vocab) {
    a["weight"].shape[0] = a["weightGradOut"].shape[0] = vocab;
    a["softmaxOptional"].shape[1] = vocab;
  };
  const auto columns = [](Arguments& a, std::int64_t hidden) {
    for (const char* name : {"input", "weight", "inputGradOut", "weightGradOut"}) {
      a[name].shape[1] = hidden;
    }
  };
  expect_each_accepted(
      gradient_phase1, good_gradient(GetParam()),
      {{"Float16", [&](Arguments& a) { all_16_bit(a, ACL_FLOAT16); }},
       {"Int64", [](Arguments& a) { a["maskedTarget"].dtype = ACL_INT64; }},
       {"BoolMask",
        [](Arguments& a) {
          a["targetMask"] = {ACL_BOOL, {kBT}};
        }},
       {"PackedMaskOfOneBytePerToken", [](Arguments& a) { a["targetMask"].shape[0] = kBT; }},
       {"VocabularyOf128", [&](Arguments& a) { rows(a, 128); }},
       {"EmptyVocabulary", [&](Arguments& a) { rows(a, 0); }},
       {"HiddenSize0", [&](Arguments& a) { columns(a, 0); }},
       {"HiddenSize65535", [&](Arguments& a) { columns(a, 65535); }},
       {"HiddenSize100000", [&](Arguments& a) { columns(a, 100000); }},
       {"NegativeZeroSmoothing", [](Arguments& a) { a.label_smoothing = -0.0F; }},
       {"NoTokens", [](Arguments& a) {
          for (auto& t : a.tensors) {
            if (t.first != "weight" && t.first != "weightGradOut") t.second.shape[0] = 0;
          }
        }}});
}

INSTANTIATE_TEST_SUITE_P(BothModes, GradientArguments, testing::Bool(), [](const auto& mode) {
  return std::string(mode.param ? "MemorySaving" : "HighPerformance");
});

TEST(GradientArguments, StatisticsAreIgnoredBesideSoftmax) {
  Arguments a = good_gradient(false);
  a["logitsMaxOptional"] = {ACL_INT8, {}, false, ACL_FORMAT_NCHW};
  a["sumExpLogitsOptional"] = {ACL_DOUBLE, {5, 6, 7}, false, ACL_FORMAT_NC};
  expect_accepted(ask(gradient_phase1, a));
}

TEST(GradientArguments, AMissingModeIsSeenBeforeEveryOtherNull) {
  Arguments a = good_gradient(false);
  for (auto& t : a.tensors) t.second.null = true;
  expect_refused(ask(gradient_phase1, a), kNull,
                 "softmaxOptional|logitsMaxOptional|sumExpLogitsOptional");
}

TEST(GradientArguments, SmallVocabularyIsRefusedEvenWithoutTokens) {
  Arguments a = good_gradient(true);
  for (auto& t : a.tensors) t.second.shape[0] = 0;
  a["weight"].shape[0] = a["weightGradOut"].shape[0] = 127;
  expect_refused(ask(gradient_phase1, a), kInvalid, "weight");
}

// ---- sizes and strides beyond reason

constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();

TEST(ForwardArguments, ShapesWhoseProductsOverflowAreRefused) {
  for (std::int64_t tokens : {kBT, std::int64_t{1} << 40, std::int64_t{1} << 62, kHuge}) {
    for (std::int64_t vocab : {std::int64_t{1} << 40, std::int64_t{1} << 62, kHuge}) {
      if (tokens == kBT && vocab == std::int64_t{1} << 40) continue;  // large but possible
      Arguments a = good_forward();
      for (auto& t : a.tensors) t.second.shape[0] = tokens;
      a["targetMaskOut"].shape[0] = tokens / 8 + (tokens % 8 != 0 ? 1 : 0);
      a["weight"].shape[0] = vocab;
      a["vocabParallelLogitsOutOptional"].null = true;
      const Answer answer = ask(forward_phase1, a);
      EXPECT_EQ(answer.status, kInvalid) << tokens << " tokens, " << vocab << " rows";
      EXPECT_FALSE(answer.message.empty());
    }
  }
}

TEST(GradientArguments, ShapesWhoseProductsOverflowAreRefused) {
  for (bool memory_saving : {false, true}) {
    for (std::int64_t vocab : {std::int64_t{1} << 62, kHuge}) {
      Arguments a = good_gradient(memory_saving);
      a["weight"].shape[0] = a["weightGradOut"].shape[0] = a["softmaxOptional"].shape[1] = vocab;
      const Answer answer = ask(gradient_phase1, a);
      EXPECT_EQ(answer.status, kInvalid) << vocab;
      EXPECT_FALSE(answer.message.empty());
    }
  }
}

TEST(LossArguments, ShapesWhoseProductsOverflowAreRefused) {
  Arguments a = good_loss();
  a["vocabParallelLogitsOptional"].shape[1] = a["softMaxOutOptional"].shape[1] = kHuge;
  EXPECT_EQ(ask(loss_phase1, a).status, kInvalid);
}

// Strides are not negative, and no view may reach further than addresses go.
TEST(ForwardArguments, StridesThatAreNegativeOrOverflowAreRefused) {
  for (const auto& strides :
       {std::vector<std::int64_t>{-8, 1}, std::vector<std::int64_t>{8, -1},
        std::vector<std::int64_t>{kHuge, 1}, std::vector<std::int64_t>{kHuge, kHuge}}) {
    Forward f;
    f.input = Array(ACL_BF16, {4, 8});
    f.weight = Array(ACL_BF16, {5, 8});
    f.target = Array(ACL_INT32, {4});
    f.end = 5;
    f.make_outputs(false);
    const std::int64_t shape[] = {4, 8};
    EXPECT_EQ(aclInitTensor(f.input.tensor(), shape, 2, ACL_BF16, strides.data(), 0, ACL_FORMAT_ND,
                            shape, 2, nullptr),
              0);
    std::uint64_t size = 0;
    aclOpExecutor* executor = nullptr;
    EXPECT_EQ(f.prepare(&size, &executor), kInvalid);
    EXPECT_TRUE(names(take_message(), "input"));
  }
}

// Every tensor of a call in turn with a stride that no view has; outputs also with elements that
// share memory, which is fine for inputs.
void expect_strides_checked(Phase1 phase1, const Arguments& good,
                            const std::set<std::string>& outputs) {
  for (const auto& argument : good.tensors) {
    const std::string& name = argument.first;
    const TensorArgument& tensor = argument.second;
    if (tensor.null) continue;
    SCOPED_TRACE(name);
    std::vector<std::int64_t> strides(tensor.shape.size(), 1);
    if (strides.size() == 2) strides[0] = tensor.shape[1];
    const auto with_first_stride = [&](std::int64_t stride) {
      Arguments a = good;
      a[name].strides = strides;
      a[name].strides[0] = stride;
      return ask(phase1, a);
    };
    expect_accepted(with_first_stride(strides[0]));
    expect_accepted(with_first_stride(strides[0] + 3));
    expect_refused(with_first_stride(-1), kInvalid, name);
    expect_refused(with_first_stride(kHuge), kInvalid, name);
    if (outputs.count(name) != 0) {
      expect_refused(with_first_stride(0), kInvalid, name);
      if (strides.size() == 2) expect_refused(with_first_stride(strides[0] - 1), kInvalid, name);
    } else {
      expect_accepted(with_first_stride(0));
    }
  }
}

TEST(ForwardArguments, StridesOfEveryTensorAreChecked) {
  expect_strides_checked(forward_phase1, good_forward(),
                         {"logitsMaxLocalOut", "sumExpLogitsLocalOut", "predictedLogitsLocalOut",
                          "targetMaskOut", "maskedTargetOut", "vocabParallelLogitsOutOptional"});
}

TEST(LossArguments, StridesOfEveryTensorAreChecked) {
  expect_strides_checked(loss_phase1, good_loss(), {"lossOut", "softMaxOutOptional"});
}

TEST_P(GradientArguments, StridesOfEveryTensorAreChecked) {
  expect_strides_checked(gradient_phase1, good_gradient(GetParam()),
                         {"inputGradOut", "weightGradOut"});
}

// ---- handles that are none

// Every tensor of a call in turn destroyed; ignored ones may be anything.
void expect_handles_checked(Phase1 phase1, const Arguments& good,
                            const std::set<std::string>& ignored) {
  for (const auto& [name, tensor] : good.tensors) {
    const bool is_ignored = ignored.count(name) != 0;
    if (tensor.null && !is_ignored) continue;
    SCOPED_TRACE(name);
    Handles handles;
    for (const auto& [other, t] : good.tensors) {
      handles[other] = t.null ? nullptr
                              : aclCreateTensor(t.shape.data(), t.shape.size(), t.dtype, nullptr, 0,
                                                t.format, t.shape.data(), t.shape.size(), nullptr);
    }
    unsigned char foreign[64] = {};
    std::vector<aclTensor*> bad = {reinterpret_cast<aclTensor*>(foreign),
                                   reinterpret_cast<aclTensor*>(std::uintptr_t{8})};
    if (handles[name] != nullptr) {
      EXPECT_EQ(aclDestroyTensor(handles[name]), 0);
      bad.push_back(handles[name]);
    }
    for (aclTensor* handle : bad) {
      Handles given = handles;
      given[name] = handle;
      std::uint64_t size = 1;
      aclOpExecutor* executor = nullptr;
      take_message();
      if (is_ignored) {
        EXPECT_EQ(phase1(good, given, &size, &executor), 0) << take_message();
        EXPECT_EQ(aclDestroyAclOpExecutor(executor), 0);
        continue;
      }
      EXPECT_EQ(phase1(good, given, &size, &executor), kInvalid);
      EXPECT_TRUE(names(take_message(), name));
      EXPECT_EQ(executor, nullptr);
    }
    handles[name] = nullptr;
    for (const auto& handle : handles) EXPECT_EQ(aclDestroyTensor(handle.second), 0);
  }
}

TEST(ForwardArguments, HandlesThatAreNoneAreRefused) {
  expect_handles_checked(forward_phase1, good_forward(), {});
}

TEST(LossArguments, HandlesThatAreNoneAreRefusedUnlessIgnored) {
  expect_handles_checked(loss_phase1, good_loss(), {"inputOptional", "weightOptional"});
  Arguments a = good_loss();
  a["vocabParallelLogitsOptional"].null = true;
  expect_handles_checked(loss_phase1, a, {"inputOptional", "weightOptional", "softMaxOutOptional"});
}

TEST_P(GradientArguments, HandlesThatAreNoneAreRefusedUnlessIgnored) {
  const std::set<std::string> statistics = {"logitsMaxOptional", "sumExpLogitsOptional"};
  expect_handles_checked(gradient_phase1, good_gradient(GetParam()),
                         GetParam() ? std::set<std::string>{} : statistics);
}

// ---- messages

TEST(Messages, TellWhatCameAndWhatIsAllowed) {
  Arguments a = good_gradient(true);
  a["weight"].shape[0] = 100;
  const Answer answer = ask(gradient_phase1, a);
  EXPECT_TRUE(names(answer.message, "100")) << answer.message;
  EXPECT_TRUE(names(answer.message, "128")) << answer.message;
}

TEST(Messages, AreClearedWhenTaken) {
  Arguments a = good_loss();
  a.label_smoothing = 1;
  EXPECT_FALSE(ask(loss_phase1, a).message.empty());
  EXPECT_EQ(aclGetRecentErrMsg(), nullptr);
}

}  // namespace
}  // namespace ascend_test
