#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Every public header of the toolkit folder compiles alone and twice in a row, in every language
# standard that clients use, without a warning, whichever of the include levels the client knows.
# Usage: check_headers.sh INCLUDE_DIR CXX CC
set -u
include=$1
cxx=$2
cc=$3
failures=0
compiled=0
unit=$(mktemp -d) || exit 1
trap 'rm -rf "$unit"' EXIT

# compile LANGUAGE_COMPILER STANDARD SOURCE FLAGS...
compile() {
  compiler=$1
  standard=$2
  source=$3
  shift 3
  compiled=$((compiled + 1))
  if ! $compiler -std="$standard" -Wall -Wextra -Wpedantic -Werror -fsyntax-only "$@" "$source" \
    2>"$unit/log"; then
    echo "FAILED: $compiler -std=$standard $* of:"
    cat "$source" "$unit/log"
    failures=$((failures + 1))
  fi
}

# twice HEADER SOURCE: a unit that includes the header, and again (and is not empty, which pedantic C
# forbids).
twice() {
  printf '#include "%s"\n#include "%s"\nextern int not_empty;\n' "$1" "$1" >"$2"
}

for standard in c++11 c++14 c++17 c++20; do
  for header in $(cd "$include" && find acl aclnn aclnnop -name '*.h'); do
    twice "$header" "$unit/alone.cc"
    compile "$cxx" $standard "$unit/alone.cc" -I"$include"
  done
  for header in $(cd "$include/aclnnop" && find . -name '*.h' | sed 's,^\./,,'); do
    twice "$header" "$unit/bare.cc"
    compile "$cxx" $standard "$unit/bare.cc" -I"$include/aclnnop"
  done
  for header in $(cd "$include/aclnn" && find . -name '*.h' | sed 's,^\./,,'); do
    twice "$header" "$unit/bare.cc"
    compile "$cxx" $standard "$unit/bare.cc" -I"$include/aclnn"
  done

  # The three levels together, and every spelling of one header in one unit.
  cat >"$unit/all.cc" <<'END'
#include "acl/acl.h"
#include "aclnn/acl_meta.h"
#include "acl_meta.h"
#include "aclnn/opdev/fp16_t.h"
#include "opdev/fp16_t.h"
#include "aclnnop/aclnn_fused_linear_online_max_sum.h"
#include "aclnn_fused_linear_online_max_sum.h"
#include "aclnnop/aclnn_fused_cross_entropy_loss_with_max_sum.h"
#include "aclnn_fused_cross_entropy_loss_with_max_sum.h"
#include "aclnnop/aclnn_fused_linear_cross_entropy_loss_grad.h"
#include "aclnn_fused_linear_cross_entropy_loss_grad.h"
END
  compile "$cxx" $standard "$unit/all.cc" -I"$include" -I"$include/aclnnop" -I"$include/aclnn"

  # What published programs rely on: printf and fixed-width integers without their headers,
  # enumerators reached through the name of their enumeration, halves in vectors.
  cat >"$unit/habits.cc" <<'END'
#include <iostream>
#include <vector>
#include "acl/acl.h"
#include "aclnn/opdev/fp16_t.h"
#include "aclnnop/aclnn_fused_linear_online_max_sum.h"
#define CHECK_RET(cond, return_expr) do { if (!(cond)) { return_expr; } } while (0)
#define LOG_PRINT(message, ...) do { printf(message, ##__VA_ARGS__); } while (0)
int main() {
  std::vector<op::fp16_t> halves(4, 1.0);
  std::vector<op::fp16_t> zeros(4, 0);
  std::vector<int64_t> shape = {2, 2};
  aclDataType type = aclDataType::ACL_FLOAT16;
  aclFormat format = aclFormat::ACL_FORMAT_ND;
  aclTensor* tensor = aclCreateTensor(shape.data(), shape.size(), type, nullptr, 0, format,
                                      shape.data(), shape.size(), halves.data());
  auto ret = aclDestroyTensor(tensor);
  CHECK_RET(ret == ACL_SUCCESS, printf("%d\n", ret); return ret);
  uint64_t workspaceSize = 0;
  ACL_APP_LOG(ACL_INFO, "workspace of %d bytes", 0);
  printf("%f %lu %d\n", static_cast<float>(halves[0]), (unsigned long)workspaceSize, OK);
  return zeros[0] == halves[0];
}
END
  compile "$cxx" $standard "$unit/habits.cc" -I"$include" -I"$include/aclnnop" -I"$include/aclnn" \
    -Wno-variadic-macros -Wno-gnu-zero-variadic-macro-arguments

  # Building a library that exports the interface anew.
  compile "$cxx" $standard "$unit/all.cc" -I"$include" -I"$include/aclnnop" -I"$include/aclnn" \
    -DFUNC_VISIBILITY

  # A client that brings the opaque types itself.
  cat >"$unit/own.cc" <<'END'
#include <cstdint>
#define ACLNN_META
typedef int32_t aclnnStatus;
typedef struct aclOpExecutor aclOpExecutor;
typedef struct aclTensor aclTensor;
typedef struct aclScalar aclScalar;
typedef struct aclIntArray aclIntArray;
typedef struct aclFloatArray aclFloatArray;
typedef struct aclBoolArray aclBoolArray;
typedef struct aclTensorList aclTensorList;
typedef struct aclScalarList aclScalarList;
#include "aclnn/acl_meta.h"
enum { OK = 7 };
static_assert(OK == 7, "the client's own");
END
  compile "$cxx" $standard "$unit/own.cc" -I"$include"
done

# What each header brings along; the errors of operators come with their own header only.
while read -r header names; do
  {
    printf '#include "%s"\n#ifdef ACLNN_SUCCESS\n#error not asked for\n#endif\n' "$header"
    echo "namespace found {"
    for name in $names; do echo "using ::$name;"; done
    echo "}"
  } >"$unit/chain.cc"
  compile "$cxx" c++11 "$unit/chain.cc" -I"$include"
done <<'END'
acl/acl.h aclrtMalloc aclInit aclGetRecentErrMsg aclDataTypeSize aclrtStream aclrtRunMode size_t
acl/acl_rt.h aclrtMalloc aclError aclDataType ACL_SUCCESS int32_t size_t
acl/acl_base.h aclError aclDataType aclFormat ACL_ERROR_INVALID_PARAM aclFloat16ToFloat
aclnn/acl_meta.h aclCreateTensor aclnnStatus aclOpExecutor aclDataType OK ACL_SUCCESS aclrtStream
aclnn/aclnn_base.h aclnnInit aclnnFinalize aclCreateTensor
aclnnop/aclnn_fused_linear_online_max_sum.h aclnnFusedLinearOnlineMaxSum aclCreateTensor aclnnInit
aclnnop/aclnn_fused_cross_entropy_loss_with_max_sum.h aclnnFusedCrossEntropyLossWithMaxSum aclnnInit
aclnnop/aclnn_fused_linear_cross_entropy_loss_grad.h aclnnFusedLinearCrossEntropyLossGrad aclnnInit
END
cat >"$unit/macros.cc" <<'END'
#include "aclnnop/aclnn_util.h"
#ifndef ACLNN_API
#error aclnn_util.h brings ACLNN_API
#endif
ACLNN_API extern int exported;
#include "acl/acl_base.h"
#if !defined(ACL_ERROR_RT_PARAM_INVALID) || ACL_ERROR_RT_PARAM_INVALID != 107000
#error acl_base.h brings the errors of the runtime
#endif
#include "aclnn/opdev/op_errno.h"
#if ACLNN_SUCCESS != 0 || ACLNN_ERR_PARAM_NULLPTR != 161001
#error op_errno.h brings the errors of operators
#endif
#define TEXT_OF(macro) #macro
#define TEXT(macro) TEXT_OF(macro)
static_assert((sizeof(TEXT(ACL_FUNC_VISIBILITY)) == 1) == (EXPECT_EMPTY != 0), "visibility");
END
compile "$cxx" c++11 "$unit/macros.cc" -I"$include" -DEXPECT_EMPTY=1
compile "$cxx" c++11 "$unit/macros.cc" -I"$include" -DEXPECT_EMPTY=0 -DFUNC_VISIBILITY

for standard in c99 c11; do
  for header in $(cd "$include" && find acl -name '*.h'); do
    twice "$header" "$unit/alone.c"
    compile "$cc" $standard "$unit/alone.c" -I"$include"
  done
done
cat >"$unit/use.c" <<'END'
#include "acl/acl.h"
int main(void) {
  aclrtStream stream = 0;
  void* memory = 0;
  aclError status = aclrtMalloc(&memory, 64, ACL_MEM_MALLOC_HUGE_FIRST);
  if (status != ACL_SUCCESS) return status;
  return aclrtSynchronizeStream(stream) + ACL_ERROR_INVALID_PARAM + ACL_ERROR_RT_PARAM_INVALID;
}
END
compile "$cc" c99 "$unit/use.c" -I"$include" -Wno-unused-variable

# Misuse that must not compile; line 0 is the control that must.
misuse() {
  cat >"$unit/misuse.cc" <<END
#include "acl/acl.h"
#include "aclnnop/aclnn_fused_linear_online_max_sum.h"
#include "aclnnop/aclnn_fused_cross_entropy_loss_with_max_sum.h"
int main() {
  const auto loss_phase1 = aclnnFusedCrossEntropyLossWithMaxSumGetWorkspaceSize;
  (void)loss_phase1;
  const aclTensor* in = nullptr;
  aclTensor* out = nullptr;
  aclIntArray* array = nullptr;
  aclrtStream stream = nullptr;
  uint64_t size = 0;
  int wrong = 0;
  aclOpExecutor* executor = nullptr;
  (void)in; (void)out; (void)array; (void)stream; (void)size; (void)wrong; (void)executor;
  $1
}
END
}
# Clients pass a size_t* for the uint64_t*.
good='size_t own_size = 0; loss_phase1(in, in, in, 0, in, in, in, out, out, &own_size, &executor);'
good="$good loss_phase1(in, in, in, 0, in, in, in, out, out, &size, &executor);"
misuse "$good aclrtSynchronizeStream(stream);"
compile "$cxx" c++11 "$unit/misuse.cc" -I"$include"
while IFS= read -r line; do
  [ -n "$line" ] || continue
  misuse "$line"
  compiled=$((compiled + 1))
  if $cxx -std=c++11 -fsyntax-only -I"$include" "$unit/misuse.cc" 2>/dev/null; then
    echo "FAILED: this must not compile: $line"
    failures=$((failures + 1))
  fi
done <<'END'
loss_phase1(in, in, in, 0, in, in, in, in, out, &size, &executor);
loss_phase1(in, in, in, 0, in, in, in, out, out, &size, executor);
loss_phase1(in, in, in, 0, in, in, in, out, out, size, &executor);
loss_phase1(in, in, in, 0, in, in, in, out, out, &wrong, &executor);
loss_phase1(in, in, in, 0, in, in, in, out, &size, &executor);
loss_phase1(array, in, in, 0, in, in, in, out, out, &size, &executor);
aclnnFusedCrossEntropyLossWithMaxSum(nullptr, 0, stream, stream);
aclnnFusedLinearOnlineMaxSum(nullptr, 0, executor);
aclTensor tensor;
aclOpExecutor object;
aclDestroyTensor(array);
aclDestroyAclOpExecutor(out);
aclrtMemcpy(nullptr, 0, nullptr, 0, 1);
aclrtMalloc(&size, 64, ACL_MEM_MALLOC_HUGE_FIRST);
aclrtMallocPhysical(nullptr, 0, nullptr, 0);
PTAGetExecCache(0, &size);
aclnnMatmul(nullptr, 0, executor, stream);
OK = 1;
END

# The umbrella of the runtime alone does not know tensors.
printf '#include "acl/acl.h"\nint main() { return aclrtFree(nullptr); }\n' >"$unit/umbrella.cc"
compile "$cxx" c++11 "$unit/umbrella.cc" -I"$include"
printf '#include "acl/acl.h"\nint main() { return aclDestroyTensor(nullptr); }\n' >"$unit/umbrella.cc"
compiled=$((compiled + 1))
if $cxx -std=c++11 -fsyntax-only -I"$include" "$unit/umbrella.cc" 2>/dev/null; then
  echo "FAILED: acl/acl.h reaches tensors"
  failures=$((failures + 1))
fi

echo "$compiled units with $cxx and $cc, $failures failures"
[ "$failures" -eq 0 ]
