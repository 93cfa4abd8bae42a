// SPDX-License-Identifier: Apache-2.0
// The numbers and types behind the names are the interface: programs built against other headers
// must agree with every one of them.
#include <gtest/gtest.h>

#include <type_traits>

#include "aclnn/aclnn_base.h"
#include "aclnn/opdev/op_errno.h"
#include "support.h"

namespace ascend_test {
namespace {

static_assert(std::is_same<aclError, int>::value, "");
static_assert(std::is_same<aclnnStatus, std::int32_t>::value, "");
static_assert(std::is_same<aclFloat16, std::uint16_t>::value, "");
static_assert(std::is_same<aclrtStream, void*>::value, "");
static_assert(std::is_same<aclrtEvent, void*>::value, "");
static_assert(std::is_same<aclrtContext, void*>::value, "");
static_assert(std::is_same<aclrtNotify, void*>::value, "");
static_assert(std::is_same<aclrtFuncHandle, void*>::value, "");
static_assert(std::is_same<decltype(ACL_SUCCESS), const int>::value, "not a macro");
static_assert(std::is_same<decltype(ACL_ERROR_INVALID_PARAM), const int>::value, "not a macro");
static_assert(std::is_same<decltype(OK), const aclnnStatus>::value, "");
static_assert(sizeof(aclDataType) == 4 && sizeof(aclFormat) == 4 && sizeof(aclrtMemcpyKind) == 4,
              "passed and stored as an int");
#ifndef ACL_ERROR_RT_PARAM_INVALID
#error "clients test the runtime's numbers with #ifdef"
#endif

struct Number {
  const char* name;
  long long is;
  long long published;
};
#define NUMBER(name, published) \
  Number { #name, static_cast < long long>(name), published }

void expect_numbers(const std::vector<Number>& numbers) {
  for (const Number& n : numbers) EXPECT_EQ(n.is, n.published) << n.name;
}

TEST(Numbers, DataTypes) {
  expect_numbers(
      {NUMBER(ACL_DT_UNDEFINED, -1), NUMBER(ACL_FLOAT, 0),          NUMBER(ACL_FLOAT16, 1),
       NUMBER(ACL_INT8, 2),          NUMBER(ACL_INT32, 3),          NUMBER(ACL_UINT8, 4),
       NUMBER(ACL_INT16, 6),         NUMBER(ACL_UINT16, 7),         NUMBER(ACL_UINT32, 8),
       NUMBER(ACL_INT64, 9),         NUMBER(ACL_UINT64, 10),        NUMBER(ACL_DOUBLE, 11),
       NUMBER(ACL_BOOL, 12),         NUMBER(ACL_STRING, 13),        NUMBER(ACL_COMPLEX64, 16),
       NUMBER(ACL_COMPLEX128, 17),   NUMBER(ACL_BF16, 27),          NUMBER(ACL_INT4, 29),
       NUMBER(ACL_UINT1, 30),        NUMBER(ACL_COMPLEX32, 33),     NUMBER(ACL_HIFLOAT8, 34),
       NUMBER(ACL_FLOAT8_E5M2, 35),  NUMBER(ACL_FLOAT8_E4M3FN, 36), NUMBER(ACL_FLOAT8_E8M0, 37),
       NUMBER(ACL_FLOAT6_E3M2, 38),  NUMBER(ACL_FLOAT6_E2M3, 39),   NUMBER(ACL_FLOAT4_E2M1, 40),
       NUMBER(ACL_FLOAT4_E1M2, 41)});
}

TEST(Numbers, Formats) {
  expect_numbers({NUMBER(ACL_FORMAT_UNDEFINED, -1),
                  NUMBER(ACL_FORMAT_NCHW, 0),
                  NUMBER(ACL_FORMAT_NHWC, 1),
                  NUMBER(ACL_FORMAT_ND, 2),
                  NUMBER(ACL_FORMAT_NC1HWC0, 3),
                  NUMBER(ACL_FORMAT_FRACTAL_Z, 4),
                  NUMBER(ACL_FORMAT_NC1HWC0_C04, 12),
                  NUMBER(ACL_FORMAT_HWCN, 16),
                  NUMBER(ACL_FORMAT_NDHWC, 27),
                  NUMBER(ACL_FORMAT_FRACTAL_NZ, 29),
                  NUMBER(ACL_FORMAT_NCDHW, 30),
                  NUMBER(ACL_FORMAT_NDC1HWC0, 32),
                  NUMBER(ACL_FRACTAL_Z_3D, 33),
                  NUMBER(ACL_FORMAT_NC, 35),
                  NUMBER(ACL_FORMAT_NCL, 47),
                  NUMBER(ACL_FORMAT_FRACTAL_NZ_C0_16, 50),
                  NUMBER(ACL_FORMAT_FRACTAL_NZ_C0_32, 51),
                  NUMBER(ACL_FORMAT_FRACTAL_NZ_C0_2, 52),
                  NUMBER(ACL_FORMAT_FRACTAL_NZ_C0_4, 53),
                  NUMBER(ACL_FORMAT_FRACTAL_NZ_C0_8, 54)});
}

TEST(Numbers, Memory) {
  expect_numbers(
      {NUMBER(ACL_MEM_MALLOC_HUGE_FIRST, 0), NUMBER(ACL_MEM_MALLOC_HUGE_ONLY, 1),
       NUMBER(ACL_MEM_MALLOC_NORMAL_ONLY, 2), NUMBER(ACL_MEM_MALLOC_HUGE_FIRST_P2P, 3),
       NUMBER(ACL_MEM_MALLOC_HUGE_ONLY_P2P, 4), NUMBER(ACL_MEM_MALLOC_NORMAL_ONLY_P2P, 5),
       NUMBER(ACL_MEM_MALLOC_HUGE1G_ONLY, 6), NUMBER(ACL_MEM_MALLOC_HUGE1G_ONLY_P2P, 7),
       NUMBER(ACL_MEM_TYPE_LOW_BAND_WIDTH, 0x0100), NUMBER(ACL_MEM_TYPE_HIGH_BAND_WIDTH, 0x1000),
       NUMBER(ACL_MEM_ACCESS_USER_SPACE_READONLY, 0x100000)});
  expect_numbers({NUMBER(ACL_MEMCPY_HOST_TO_HOST, 0), NUMBER(ACL_MEMCPY_HOST_TO_DEVICE, 1),
                  NUMBER(ACL_MEMCPY_DEVICE_TO_HOST, 2), NUMBER(ACL_MEMCPY_DEVICE_TO_DEVICE, 3),
                  NUMBER(ACL_MEMCPY_DEFAULT, 4), NUMBER(ACL_MEMCPY_HOST_TO_BUF_TO_DEVICE, 5),
                  NUMBER(ACL_MEMCPY_INNER_DEVICE_TO_DEVICE, 6),
                  NUMBER(ACL_MEMCPY_INTER_DEVICE_TO_DEVICE, 7)});
  expect_numbers({NUMBER(ACL_DDR_MEM, 0), NUMBER(ACL_HBM_MEM, 1), NUMBER(ACL_DDR_MEM_HUGE, 2),
                  NUMBER(ACL_DDR_MEM_NORMAL, 3), NUMBER(ACL_HBM_MEM_HUGE, 4),
                  NUMBER(ACL_HBM_MEM_NORMAL, 5), NUMBER(ACL_DDR_MEM_P2P_HUGE, 6),
                  NUMBER(ACL_DDR_MEM_P2P_NORMAL, 7), NUMBER(ACL_HBM_MEM_P2P_HUGE, 8),
                  NUMBER(ACL_HBM_MEM_P2P_NORMAL, 9), NUMBER(ACL_HBM_MEM_HUGE1G, 10),
                  NUMBER(ACL_HBM_MEM_P2P_HUGE1G, 11), NUMBER(ACL_MEM_NORMAL, 12),
                  NUMBER(ACL_MEM_HUGE, 13), NUMBER(ACL_MEM_HUGE1G, 14),
                  NUMBER(ACL_MEM_P2P_NORMAL, 15), NUMBER(ACL_MEM_P2P_HUGE, 16),
                  NUMBER(ACL_MEM_P2P_HUGE1G, 17)});
}

TEST(Numbers, StreamsAndEvents) {
  expect_numbers(
      {NUMBER(ACL_DEVICE, 0), NUMBER(ACL_HOST, 1), NUMBER(ACL_EVENT_STATUS_COMPLETE, 0),
       NUMBER(ACL_EVENT_STATUS_NOT_READY, 1), NUMBER(ACL_EVENT_STATUS_RESERVED, 2),
       NUMBER(ACL_EVENT_RECORDED_STATUS_NOT_READY, 0),
       NUMBER(ACL_EVENT_RECORDED_STATUS_COMPLETE, 1), NUMBER(ACL_EVENT_WAIT_STATUS_COMPLETE, 0),
       NUMBER(ACL_EVENT_WAIT_STATUS_NOT_READY, 1), NUMBER(ACL_EVENT_WAIT_STATUS_RESERVED, 0xFFFF),
       NUMBER(ACL_STREAM_STATUS_COMPLETE, 0), NUMBER(ACL_STREAM_STATUS_NOT_READY, 1),
       NUMBER(ACL_STREAM_STATUS_RESERVED, 0xFFFF), NUMBER(ACL_CALLBACK_NO_BLOCK, 0),
       NUMBER(ACL_CALLBACK_BLOCK, 1)});
  expect_numbers({NUMBER(ACL_EVENT_SYNC, 1), NUMBER(ACL_EVENT_CAPTURE_STREAM_PROGRESS, 2),
                  NUMBER(ACL_EVENT_TIME_LINE, 8), NUMBER(ACL_EVENT_DEVICE_USE_ONLY, 0x10),
                  NUMBER(ACL_EVENT_EXTERNAL, 0x20), NUMBER(ACL_EVENT_IPC, 0x40)});
  expect_numbers({NUMBER(ACL_STREAM_FAST_LAUNCH, 1), NUMBER(ACL_STREAM_FAST_SYNC, 2),
                  NUMBER(ACL_STREAM_PERSISTENT, 4), NUMBER(ACL_STREAM_HUGE, 8),
                  NUMBER(ACL_STREAM_CPU_SCHEDULE, 0x10), NUMBER(ACL_STREAM_DEVICE_USE_ONLY, 0x20),
                  NUMBER(ACL_CONTINUE_ON_FAILURE, 0), NUMBER(ACL_STOP_ON_FAILURE, 1)});
  expect_numbers({NUMBER(ACL_OPT_DETERMINISTIC, 0), NUMBER(ACL_OPT_ENABLE_DEBUG_KERNEL, 1),
                  NUMBER(ACL_OPT_STRONG_CONSISTENCY, 2),
                  NUMBER(ACL_OPT_ENABLE_KERNEL_EARLY_START, 3), NUMBER(ACL_RT_THREAD_LEVEL, 0)});
  expect_numbers(
      {NUMBER(ACL_MAJOR_VERSION, 1), NUMBER(ACL_MINOR_VERSION, 17), NUMBER(ACL_PATCH_VERSION, 0)});
}

TEST(Numbers, RuntimeErrors) {
  expect_numbers({NUMBER(ACL_SUCCESS, 0),
                  NUMBER(ACL_ERROR_NONE, 0),
                  NUMBER(ACL_ERROR_INVALID_PARAM, 100000),
                  NUMBER(ACL_ERROR_UNINITIALIZE, 100001),
                  NUMBER(ACL_ERROR_REPEAT_INITIALIZE, 100002),
                  NUMBER(ACL_ERROR_INVALID_FILE, 100003),
                  NUMBER(ACL_ERROR_WRITE_FILE, 100004),
                  NUMBER(ACL_ERROR_INVALID_FILE_SIZE, 100005),
                  NUMBER(ACL_ERROR_PARSE_FILE, 100006),
                  NUMBER(ACL_ERROR_FILE_MISSING_ATTR, 100007),
                  NUMBER(ACL_ERROR_FILE_ATTR_INVALID, 100008),
                  NUMBER(ACL_ERROR_INVALID_DUMP_CONFIG, 100009),
                  NUMBER(ACL_ERROR_INVALID_PROFILING_CONFIG, 100010),
                  NUMBER(ACL_ERROR_INVALID_MODEL_ID, 100011),
                  NUMBER(ACL_ERROR_UNSUPPORTED_DATA_TYPE, 100026),
                  NUMBER(ACL_ERROR_FORMAT_NOT_MATCH, 100027),
                  NUMBER(ACL_ERROR_INVALID_QUEUE_ID, 100032),
                  NUMBER(ACL_ERROR_REPEAT_FINALIZE, 100037),
                  NUMBER(ACL_ERROR_NOT_STATIC_AIPP, 100038),
                  NUMBER(ACL_ERROR_COMPILING_STUB_MODE, 100039),
                  NUMBER(ACL_ERROR_BAD_ALLOC, 200000),
                  NUMBER(ACL_ERROR_API_NOT_SUPPORT, 200001),
                  NUMBER(ACL_ERROR_INVALID_DEVICE, 200002),
                  NUMBER(ACL_ERROR_MEMORY_ADDRESS_UNALIGNED, 200003),
                  NUMBER(ACL_ERROR_RESOURCE_NOT_MATCH, 200004),
                  NUMBER(ACL_ERROR_INVALID_RESOURCE_HANDLE, 200005),
                  NUMBER(ACL_ERROR_FEATURE_UNSUPPORTED, 200006),
                  NUMBER(ACL_ERROR_PROF_MODULES_UNSUPPORTED, 200007),
                  NUMBER(ACL_ERROR_STORAGE_OVER_LIMIT, 300000),
                  NUMBER(ACL_ERROR_INTERNAL_ERROR, 500000),
                  NUMBER(ACL_ERROR_FAILURE, 500001),
                  NUMBER(ACL_ERROR_GE_FAILURE, 500002),
                  NUMBER(ACL_ERROR_RT_FAILURE, 500003),
                  NUMBER(ACL_ERROR_DRV_FAILURE, 500004),
                  NUMBER(ACL_ERROR_PROFILING_FAILURE, 500005)});
  expect_numbers({NUMBER(ACL_ERROR_RT_PARAM_INVALID, 107000),
                  NUMBER(ACL_ERROR_RT_INVALID_DEVICEID, 107001),
                  NUMBER(ACL_ERROR_RT_CONTEXT_NULL, 107002),
                  NUMBER(ACL_ERROR_RT_STREAM_CONTEXT, 107003),
                  NUMBER(ACL_ERROR_RT_MODEL_CONTEXT, 107004),
                  NUMBER(ACL_ERROR_RT_STREAM_MODEL, 107005),
                  NUMBER(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, 107006),
                  NUMBER(ACL_ERROR_RT_EVENT_TIMESTAMP_REVERSAL, 107007),
                  NUMBER(ACL_ERROR_RT_ADDR_UNALIGNED, 107008),
                  NUMBER(ACL_ERROR_RT_FILE_OPEN, 107009),
                  NUMBER(ACL_ERROR_RT_FILE_WRITE, 107010),
                  NUMBER(ACL_ERROR_RT_INVALID_MEMORY_TYPE, 107016),
                  NUMBER(ACL_ERROR_RT_INVALID_HANDLE, 107017),
                  NUMBER(ACL_ERROR_RT_INVALID_MALLOC_TYPE, 107018),
                  NUMBER(ACL_ERROR_RT_WAIT_TIMEOUT, 107019),
                  NUMBER(ACL_ERROR_RT_TASK_TIMEOUT, 107020),
                  NUMBER(ACL_ERROR_RT_SYSPARAMOPT_NOT_SET, 107021),
                  NUMBER(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, 207000),
                  NUMBER(ACL_ERROR_RT_MEMORY_ALLOCATION, 207001),
                  NUMBER(ACL_ERROR_RT_MEMORY_FREE, 207002),
                  NUMBER(ACL_ERROR_RT_AICORE_OVER_FLOW, 207003),
                  NUMBER(ACL_ERROR_RT_NO_DEVICE, 207004),
                  NUMBER(ACL_ERROR_RT_RESOURCE_ALLOC_FAIL, 207005),
                  NUMBER(ACL_ERROR_RT_NO_PERMISSION, 207006),
                  NUMBER(ACL_ERROR_RT_NO_EVENT_RESOURCE, 207007),
                  NUMBER(ACL_ERROR_RT_NO_STREAM_RESOURCE, 207008),
                  NUMBER(ACL_ERROR_RT_AIVEC_OVER_FLOW, 207016),
                  NUMBER(ACL_ERROR_RT_OVER_FLOW, 207017),
                  NUMBER(ACL_ERROR_RT_DEVICE_OOM, 207018),
                  NUMBER(ACL_ERROR_RT_TIMEOUT, 207020),
                  NUMBER(ACL_ERROR_RT_INTERNAL_ERROR, 507000),
                  NUMBER(ACL_ERROR_RT_STREAM_NOT_COMPLETE, 507004),
                  NUMBER(ACL_ERROR_RT_EVENT_NOT_COMPLETE, 507006),
                  NUMBER(ACL_ERROR_RT_LOST_HEARTBEAT, 507010),
                  NUMBER(ACL_ERROR_RT_MODEL_EXECUTE, 507011),
                  NUMBER(ACL_ERROR_RT_AICORE_TIMEOUT, 507014),
                  NUMBER(ACL_ERROR_RT_AICORE_EXCEPTION, 507015),
                  NUMBER(ACL_ERROR_RT_AICPU_TIMEOUT, 507017),
                  NUMBER(ACL_ERROR_RT_AICPU_EXCEPTION, 507018),
                  NUMBER(ACL_ERROR_RT_VECTOR_CORE_TIMEOUT, 507034),
                  NUMBER(ACL_ERROR_RT_VECTOR_CORE_EXCEPTION, 507035),
                  NUMBER(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, 507046),
                  NUMBER(ACL_ERROR_RT_EVENT_SYNC_TIMEOUT, 507047),
                  NUMBER(ACL_ERROR_RT_DEVICE_MEM_ERROR, 507053),
                  NUMBER(ACL_ERROR_RT_DRV_INTERNAL_ERROR, 507899),
                  NUMBER(ACL_ERROR_RT_SOCKET_CLOSE, 507901)});
}

TEST(Numbers, OperatorErrors) {
  expect_numbers({NUMBER(OK, 0),
                  NUMBER(ACLNN_SUCCESS, 0),
                  NUMBER(ACLNN_ERR_PARAM_NULLPTR, 161001),
                  NUMBER(ACLNN_ERR_PARAM_INVALID, 161002),
                  NUMBER(ACLNN_ERR_RUNTIME_ERROR, 361001),
                  NUMBER(ACLNN_ERR_INNER, 561000),
                  NUMBER(ACLNN_ERR_INNER_INFERSHAPE_ERROR, 561001),
                  NUMBER(ACLNN_ERR_INNER_TILING_ERROR, 561002),
                  NUMBER(ACLNN_ERR_INNER_FIND_KERNEL_ERROR, 561003),
                  NUMBER(ACLNN_ERR_INNER_CREATE_EXECUTOR, 561101),
                  NUMBER(ACLNN_ERR_INNER_NOT_TRANS_EXECUTOR, 561102),
                  NUMBER(ACLNN_ERR_INNER_NULLPTR, 561103),
                  NUMBER(ACLNN_ERR_INNER_WRONG_ATTR_INFO_SIZE, 561104),
                  NUMBER(ACLNN_ERR_INNER_KEY_CONFLICT, 561105),
                  NUMBER(ACLNN_ERR_INNER_KEY_CONFILICT, 561105),
                  NUMBER(ACLNN_ERR_INNER_INVALID_IMPL_MODE, 561106),
                  NUMBER(ACLNN_ERR_INNER_OPP_PATH_NOT_FOUND, 561107),
                  NUMBER(ACLNN_ERR_INNER_LOAD_JSON_FAILED, 561108),
                  NUMBER(ACLNN_ERR_INNER_JSON_VALUE_NOT_FOUND, 561109),
                  NUMBER(ACLNN_ERR_INNER_JSON_FORMAT_INVALID, 561110),
                  NUMBER(ACLNN_ERR_INNER_JSON_DTYPE_INVALID, 561111),
                  NUMBER(ACLNN_ERR_INNER_OPP_KERNEL_PKG_NOT_FOUND, 561112),
                  NUMBER(ACLNN_ERR_INNER_OP_FILE_INVALID, 561113),
                  NUMBER(ACLNN_ERR_INNER_ATTR_NUM_OUT_OF_BOUND, 561114),
                  NUMBER(ACLNN_ERR_INNER_ATTR_LEN_NOT_ENOUGH, 561115),
                  NUMBER(ACLNN_ERR_INNER_INPUT_NUM_IN_JSON_TOO_LARGE, 561116),
                  NUMBER(ACLNN_ERR_INNER_INPUT_JSON_IS_NULL, 561117),
                  NUMBER(ACLNN_ERR_INNER_STATIC_WORKSPACE_INVALID, 561118),
                  NUMBER(ACLNN_ERR_INNER_STATIC_BLOCK_DIM_INVALID, 561119)});
}

TEST(DataTypes, HaveTheirSizes) {
  struct Size {
    aclDataType type;
    std::size_t bytes;
  };
  for (const Size& s : {Size{ACL_FLOAT, 4},         Size{ACL_FLOAT16, 2},
                        Size{ACL_BF16, 2},          Size{ACL_INT8, 1},
                        Size{ACL_UINT8, 1},         Size{ACL_BOOL, 1},
                        Size{ACL_INT16, 2},         Size{ACL_UINT16, 2},
                        Size{ACL_INT32, 4},         Size{ACL_UINT32, 4},
                        Size{ACL_INT64, 8},         Size{ACL_UINT64, 8},
                        Size{ACL_DOUBLE, 8},        Size{ACL_COMPLEX32, 4},
                        Size{ACL_COMPLEX64, 8},     Size{ACL_COMPLEX128, 16},
                        Size{ACL_HIFLOAT8, 1},      Size{ACL_FLOAT8_E5M2, 1},
                        Size{ACL_FLOAT8_E4M3FN, 1}, Size{ACL_FLOAT8_E8M0, 1},
                        Size{ACL_DT_UNDEFINED, 0},  Size{ACL_STRING, 0},
                        Size{ACL_FLOAT4_E2M1, 0},   Size{ACL_INT4, 0},
                        Size{ACL_UINT1, 0},         Size{static_cast<aclDataType>(999), 0}}) {
    EXPECT_EQ(aclDataTypeSize(s.type), s.bytes) << s.type;
  }
}

}  // namespace
}  // namespace ascend_test
