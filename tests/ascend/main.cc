// SPDX-License-Identifier: Apache-2.0
// For suites that need one device, set before the first test on the thread that runs them.
#include <gtest/gtest.h>

#include "acl/acl.h"

namespace {

class Device : public testing::Environment {
 public:
  void SetUp() override {
    ASSERT_EQ(aclInit(nullptr), ACL_SUCCESS);
    ASSERT_EQ(aclrtSetDevice(0), ACL_SUCCESS);
  }
  void TearDown() override {
    EXPECT_EQ(aclrtResetDevice(0), ACL_SUCCESS);
    EXPECT_EQ(aclFinalize(), ACL_SUCCESS);
  }
};

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  testing::AddGlobalTestEnvironment(new Device);
  return RUN_ALL_TESTS();
}
