// SPDX-License-Identifier: Apache-2.0
// The C face as a state machine: the input's bytes choose calls and their arguments, well-formed
// and absurd, in any order. Nothing may crash, hang or leak, every failure must leave a message,
// and no handle may live twice. A buffer has exactly the bytes that its tensor's view reaches, so
// reading or writing beyond them is seen by AddressSanitizer.
#include <pthread.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "acl/acl.h"
#include "aclnn/aclnn_base.h"
#include "aclnnop/aclnn_fused_cross_entropy_loss_with_max_sum.h"
#include "aclnnop/aclnn_fused_linear_cross_entropy_loss_grad.h"
#include "aclnnop/aclnn_fused_linear_online_max_sum.h"

namespace {

// The bytes as a stream of choices; zeros when they are used up.
class Choices {
 public:
  Choices(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  bool over() const { return at_ >= size_; }
  uint8_t byte() { return over() ? uint8_t{0} : data_[at_++]; }
  // 0 ... n - 1
  int below(int n) { return byte() % n; }
  bool one_in(int n) { return below(n) == n - 1; }
  int64_t number() {
    uint64_t value = 0;
    for (int i = 0; i < 8; ++i) value = value << 8 | byte();
    return static_cast<int64_t>(value);
  }
  // Mostly small, sometimes anything.
  int64_t size() { return one_in(16) ? number() : below(20); }

 private:
  const uint8_t* data_;
  size_t size_;
  size_t at_ = 0;
};

void check_message(int status) {
  const char* const message = aclGetRecentErrMsg();
  // A success may leave a hint; a failure always says something.
  if (status != 0 && (message == nullptr || message[0] == '\0')) abort();
}

int64_t bytes_of(aclDataType dtype) { return static_cast<int64_t>(aclDataTypeSize(dtype)); }

struct FuzzTensor {
  aclTensor* handle = nullptr;
  int64_t bytes = 0;  // what the view reaches; 0: it has no memory
};

struct Operands {
  aclDataType operand;
  aclDataType index;
  int64_t BT, V, H;
};

class Machine {
 public:
  explicit Machine(Choices& choices) : choices_(choices) {}

  void run() {
    for (int step = 0; step < 40 && !choices_.over(); ++step) call();
    finish();
  }

 private:
  void call() {
    switch (choices_.below(18)) {
      case 0:
        return forward();
      case 1:
        return loss();
      case 2:
      case 3:
        return gradient();
      case 4:
        return keep(random_tensor());
      case 5:
        return destroy_tensor();
      case 6:
        return inspect_tensor();
      case 7:
        return run_executor();
      case 8:
        return change_executor();
      case 9:
        return lists();
      case 10:
        return create_stream();
      case 11:
        return destroy_stream();
      case 12:
        return synchronize();
      case 13:
        return events();
      case 14:
        return memory();
      case 15:
        return callbacks();
      case 16:
        return arrays();
      case 17:
        return process();
    }
  }

  // ---- memory and tensors -----------------------------------------------------------------------

  // Lives until every stream is done.
  uint8_t* buffer(int64_t bytes, int fill) {
    buffers_.push_back(std::make_unique<uint8_t[]>(static_cast<size_t>(bytes)));
    uint8_t* const data = buffers_.back().get();
    memset(data, fill, static_cast<size_t>(bytes));
    return data;
  }

  // A tensor of a given shape in a random layout, with memory that just holds it.
  FuzzTensor tensor(aclDataType dtype, std::vector<int64_t> dims, bool output) {
    std::vector<int64_t> strides(dims.size());
    const int64_t gap = choices_.below(3);
    const int layout = choices_.below(4);
    int64_t step = 1 + (layout == 1 ? gap : 0);
    for (size_t i = 0; i < dims.size(); ++i) {
      // Ascending order of the steps: the last dimension first, or (transposed) the first.
      const size_t k = layout == 2 ? i : dims.size() - 1 - i;
      strides[k] = layout == 3 && !output ? 0 : step;
      step = step * std::max<int64_t>(dims[k], 1) + (layout == 1 ? gap : 0);
    }
    const int64_t offset = choices_.below(3);
    int64_t elements = offset + 1;
    bool empty = false;
    for (size_t i = 0; i < dims.size(); ++i) {
      empty = empty || dims[i] == 0;
      elements += (dims[i] - 1) * strides[i];
    }
    FuzzTensor made;
    uint8_t* data = nullptr;
    if (!empty) {
      made.bytes = elements * bytes_of(dtype);
      data = buffer(made.bytes, 0);
      if (!output) fill_input(dtype, data, made.bytes);
    }
    made.handle =
        aclCreateTensor(dims.data(), dims.size(), dtype, layout == 0 ? nullptr : strides.data(),
                        offset, ACL_FORMAT_ND, dims.data(), dims.size(), data);
    if (made.handle == nullptr) abort();
    return made;
  }

  // Numbers of ordinary size (as bf16, fp16 and fp32 alike), NaN, or bytes of the input; indices
  // are mostly inside a vocabulary.
  void fill_input(aclDataType dtype, uint8_t* data, int64_t bytes) {
    static constexpr uint8_t kPatterns[] = {0x00, 0x3f, 0xbf, 0xff};
    if (choices_.one_in(6)) {
      for (int64_t i = 0; i < std::min<int64_t>(bytes, 40); ++i) data[i] = choices_.byte();
    } else if (dtype == ACL_INT32 || dtype == ACL_INT64) {
      for (int64_t i = 0; i < bytes; i += bytes_of(dtype)) data[i] = choices_.byte() & 0x7f;
    } else {
      memset(data, kPatterns[choices_.one_in(8) ? 3 : choices_.below(3)],
             static_cast<size_t>(bytes));
      data[static_cast<size_t>(choices_.byte()) % static_cast<size_t>(bytes)] ^= 0x55;
    }
  }

  // Anything at all; without memory, so that no valid call can follow.
  FuzzTensor random_tensor() {
    int64_t dims[5];
    int64_t strides[5];
    const int rank = choices_.below(6);
    for (int i = 0; i < rank; ++i) {
      dims[i] = choices_.size();
      strides[i] = choices_.size();
    }
    FuzzTensor made;
    made.handle = aclCreateTensor(
        dims, static_cast<uint64_t>(rank), static_cast<aclDataType>(choices_.below(45) - 1),
        choices_.one_in(2) ? strides : nullptr, choices_.size(),
        static_cast<aclFormat>(choices_.below(60) - 1), dims, static_cast<uint64_t>(rank), nullptr);
    if (made.handle == nullptr) abort();
    return made;
  }

  void keep(const FuzzTensor& made) { tensors_.push_back(made); }

  FuzzTensor* any_tensor() {
    return tensors_.empty() ? nullptr
                            : &tensors_[static_cast<size_t>(choices_.byte()) % tensors_.size()];
  }

  // A handle that may be null, alive, stale, of another kind, or no handle at all.
  template <class Handle>
  Handle* odd_handle() {
    switch (choices_.below(5)) {
      case 0:
        return nullptr;
      case 1:
        if (const FuzzTensor* t = any_tensor()) return reinterpret_cast<Handle*>(t->handle);
        return nullptr;
      case 2:
        if (!executors_.empty()) return reinterpret_cast<Handle*>(executors_.back().handle);
        return nullptr;
      case 3:
        return reinterpret_cast<Handle*>(&choices_);
      default:
        return reinterpret_cast<Handle*>(choices_.number());
    }
  }

  // Usually the tensor asked for; sometimes something else. Kept for later calls either way.
  aclTensor* argument(aclDataType dtype, std::vector<int64_t> dims, bool output) {
    if (faults_left_ > 0 && choices_.one_in(12)) {
      --faults_left_;
      switch (choices_.below(4)) {
        case 0:
          return odd_handle<aclTensor>();
        case 1: {
          const FuzzTensor odd = random_tensor();
          keep(odd);
          return odd.handle;
        }
        case 2:
          if (!dims.empty()) dims.back() += 1 - choices_.below(2) * 2;
          if (!dims.empty() && dims.back() < 0) dims.back() = 0;
          break;
        case 3:
          dtype = choices_.one_in(2) ? ACL_FLOAT : ACL_INT64;
          break;
      }
    }
    const FuzzTensor made = tensor(dtype, std::move(dims), output);
    keep(made);
    return made.handle;
  }

  void destroy_tensor() {
    FuzzTensor* const t = any_tensor();
    if (t == nullptr) return;
    const aclnnStatus first = aclDestroyTensor(t->handle);
    check_message(first);
    // It is dead now, whatever it was.
    if (aclDestroyTensor(t->handle) == 0) abort();
    check_message(1);
  }

  void inspect_tensor() {
    const aclTensor* handle = odd_handle<aclTensor>();
    int64_t* values = nullptr;
    uint64_t count = 0;
    int status = 0;
    switch (choices_.below(8)) {
      case 0:
        status = aclGetViewShape(handle, &values, &count);
        break;
      case 1:
        status = aclGetStorageShape(handle, &values, &count);
        break;
      case 2:
        status = aclGetViewStrides(handle, &values, choices_.one_in(4) ? nullptr : &count);
        break;
      case 3: {
        int64_t offset = 0;
        status = aclGetViewOffset(handle, &offset);
        break;
      }
      case 4: {
        aclDataType dtype = ACL_DT_UNDEFINED;
        status = aclGetDataType(handle, &dtype);
        break;
      }
      case 5: {
        void* address = nullptr;
        status = aclGetRawTensorAddr(handle, choices_.one_in(4) ? nullptr : &address);
        break;
      }
      case 6: {
        // New memory of the same size: valid for whatever uses the tensor.
        FuzzTensor* const t = any_tensor();
        if (t == nullptr || t->bytes == 0) return;
        status = aclSetRawTensorAddr(t->handle, buffer(t->bytes, 0));
        break;
      }
      case 7: {
        FuzzTensor* const t = any_tensor();
        if (t == nullptr) return;
        const int64_t dims[] = {choices_.below(5), choices_.below(5)};
        uint8_t* const data = buffer(16 * 8, 0);
        status =
            aclInitTensor(t->handle, dims, 2, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, dims, 2, data);
        if (status == 0) t->bytes = 16 * 8;
        break;
      }
    }
    check_message(status);
    if (status == 0) delete[] values;
  }

  void lists() {
    aclTensor* members[3] = {};
    for (aclTensor*& member : members) {
      member = choices_.one_in(3) ? nullptr : random_tensor().handle;
    }
    aclTensorList* const list =
        aclCreateTensorList(members, static_cast<uint64_t>(choices_.below(4)));
    if (list == nullptr) abort();
    uint64_t size = 0;
    if (aclGetTensorListSize(list, &size) != 0) abort();
    aclOpExecutor* const executor =
        executors_.empty() ? odd_handle<aclOpExecutor>() : executors_.back().handle;
    check_message(aclSetDynamicTensorAddr(executor, 0, choices_.byte(), list, nullptr));
    check_message(AclSetDynamicInputTensorAddr(executor, 0, choices_.below(4), list, nullptr));
    if (choices_.one_in(2)) check_message(aclDestroyTensor(members[0]));
    if (aclDestroyTensorList(list) != 0) abort();
    // Those that were not in it.
    for (const aclTensor* member : members) check_message(aclDestroyTensor(member));
    check_message(aclDestroyTensorList(odd_handle<aclTensorList>()));
  }

  void arrays() {
    const int64_t integers[] = {1, 2, 3};
    const bool flags[] = {true, false};
    aclIntArray* const array =
        aclCreateIntArray(integers, static_cast<uint64_t>(choices_.below(4)));
    aclBoolArray* const bools = aclCreateBoolArray(flags, static_cast<uint64_t>(choices_.below(3)));
    aclScalar* const scalar =
        aclCreateScalar(buffer(16, 1), static_cast<aclDataType>(choices_.below(45) - 1));
    uint64_t size = 0;
    check_message(aclGetIntArraySize(odd_handle<aclIntArray>(), &size));
    check_message(aclGetBoolArraySize(reinterpret_cast<aclBoolArray*>(array), &size));
    check_message(aclDestroyScalar(scalar));
    check_message(aclDestroyBoolArray(bools));
    if (aclDestroyIntArray(array) != 0) abort();
    aclGetRecentErrMsg();
  }

  // ---- the three operators
  // ------------------------------------------------------------------------

  struct Pending {
    aclOpExecutor* handle;
    uint64_t workspace_bytes;
    int operation;
  };

  Operands sizes(bool gradient) {
    faults_left_ = choices_.one_in(3) ? 2 : 0;
    static constexpr int64_t kVocabularies[] = {0, 1, 127, 128, 129, 140};
    Operands o;
    o.operand = choices_.one_in(2) ? ACL_BF16 : ACL_FLOAT16;
    o.index = choices_.one_in(2) ? ACL_INT64 : ACL_INT32;
    o.BT = choices_.below(20);
    o.V = gradient ? kVocabularies[choices_.below(6)] : choices_.below(40);
    o.H = choices_.below(20);
    return o;
  }

  // Memory that an operator of one stream reads must not be written by another stream meanwhile:
  // that is the client's duty. Here everything before is over when an operator is enqueued.
  void quiesce() {
    end_callbacks();
    check_message(aclrtSynchronizeDevice());
  }

  void publish(int status, const Pending& pending) {
    check_message(status);
    if (status != 0) return;
    executors_.push_back(pending);
    if (!choices_.one_in(4)) run_last();
  }

  void forward() {
    const Operands o = sizes(false);
    Pending pending = {nullptr, 0, 0};
    const int64_t start = choices_.size();
    const int64_t end = choices_.one_in(8) ? choices_.number() : start + choices_.below(40);
    aclTensor* const input = argument(o.operand, {o.BT, o.H}, false);
    aclTensor* const weight = argument(o.operand, {o.V, o.H}, false);
    aclTensor* const target = argument(o.index, {o.BT}, false);
    aclTensor* const max = argument(ACL_FLOAT, {o.BT}, true);
    aclTensor* const sum = argument(ACL_FLOAT, {o.BT}, true);
    aclTensor* const predicted = argument(ACL_FLOAT, {o.BT}, true);
    aclTensor* const mask = argument(ACL_UINT8, {(o.BT + 7) / 8}, true);
    aclTensor* const masked = argument(o.index, {o.BT}, true);
    aclTensor* const logits = choices_.one_in(2) ? argument(o.operand, {o.BT, o.V}, true) : nullptr;
    publish(aclnnFusedLinearOnlineMaxSumGetWorkspaceSize(
                input, weight, target, start, end, max, sum, predicted, mask, masked, logits,
                choices_.one_in(32) ? nullptr : &pending.workspace_bytes, &pending.handle),
            pending);
  }

  void loss() {
    const Operands o = sizes(false);
    Pending pending = {nullptr, 0, 1};
    aclTensor* const max = argument(ACL_FLOAT, {o.BT}, false);
    aclTensor* const sum = argument(ACL_FLOAT, {o.BT}, false);
    aclTensor* const predicted = argument(ACL_FLOAT, {o.BT}, false);
    const bool with_softmax = choices_.one_in(2);
    aclTensor* const logits = with_softmax ? argument(o.operand, {o.BT, o.V}, false) : nullptr;
    aclTensor* const result = argument(ACL_FLOAT, {o.BT}, true);
    aclTensor* const softmax = with_softmax ? argument(ACL_FLOAT, {o.BT, o.V}, true) : nullptr;
    publish(aclnnFusedCrossEntropyLossWithMaxSumGetWorkspaceSize(
                max, sum, predicted, choices_.one_in(16) ? 0.1f : 0.0f, odd_handle<aclTensor>(),
                odd_handle<aclTensor>(), logits, result, softmax, &pending.workspace_bytes,
                choices_.one_in(32) ? nullptr : &pending.handle),
            pending);
  }

  void gradient() {
    const Operands o = sizes(true);
    Pending pending = {nullptr, 0, 2};
    const bool packed = choices_.one_in(2);
    const bool recompute = choices_.one_in(2);
    aclTensor* const grad = argument(ACL_FLOAT, {o.BT}, false);
    aclTensor* const input = argument(o.operand, {o.BT, o.H}, false);
    aclTensor* const weight = argument(o.operand, {o.V, o.H}, false);
    aclTensor* const mask = packed
                                ? argument(ACL_UINT8, {(o.BT + 7) / 8 + choices_.below(2)}, false)
                                : argument(ACL_BOOL, {o.BT}, false);
    aclTensor* const masked = argument(o.index, {o.BT}, false);
    aclTensor* const max = recompute ? argument(ACL_FLOAT, {o.BT}, false) : odd_handle<aclTensor>();
    aclTensor* const sum = recompute ? argument(ACL_FLOAT, {o.BT}, false) : nullptr;
    aclTensor* const softmax = recompute ? nullptr : argument(ACL_FLOAT, {o.BT, o.V}, false);
    aclTensor* const grad_input = argument(o.operand, {o.BT, o.H}, true);
    aclTensor* const grad_weight = argument(o.operand, {o.V, o.H}, true);
    publish(aclnnFusedLinearCrossEntropyLossGradGetWorkspaceSize(
                grad, input, weight, mask, masked, choices_.one_in(16) ? NAN : 0.0f, max, sum,
                softmax, grad_input, grad_weight, &pending.workspace_bytes, &pending.handle),
            pending);
  }

  void run_executor() {
    if (executors_.empty()) {
      check_message(
          aclnnFusedLinearOnlineMaxSum(nullptr, 0, odd_handle<aclOpExecutor>(), stream()));
      return;
    }
    std::swap(executors_.back(),
              executors_[static_cast<size_t>(choices_.byte()) % executors_.size()]);
    run_last();
  }

  void run_last() {
    const Pending pending = executors_.back();
    if (choices_.one_in(8)) check_message(aclSetAclOpExecutorRepeatable(pending.handle));
    uint64_t bytes = pending.workspace_bytes;
    void* workspace = nullptr;
    switch (choices_.below(8)) {
      case 0:
        break;  // null with a size
      case 1:
        bytes = bytes > 0 ? bytes - 1 : 0;
        [[fallthrough]];
      default:
        if (bytes > 0)
          workspace = buffer(static_cast<int64_t>(bytes) + 3, 0xff) + choices_.below(4);
    }
    const int operation = choices_.one_in(24) ? choices_.below(3) : pending.operation;
    quiesce();
    int status = 0;
    if (operation == 0) {
      status = aclnnFusedLinearOnlineMaxSum(workspace, bytes, pending.handle, stream());
    } else if (operation == 1) {
      status = aclnnFusedCrossEntropyLossWithMaxSum(workspace, bytes, pending.handle, stream());
    } else {
      status = aclnnFusedLinearCrossEntropyLossGrad(workspace, bytes, pending.handle, stream());
    }
    check_message(status);
    if (choices_.one_in(4)) destroy_tensor();
  }

  void change_executor() {
    aclOpExecutor* const executor = executors_.empty() || choices_.one_in(8)
                                        ? odd_handle<aclOpExecutor>()
                                        : executors_.back().handle;
    FuzzTensor* const t = any_tensor();
    switch (choices_.below(4)) {
      case 0:
        check_message(aclSetAclOpExecutorRepeatable(executor));
        break;
      case 1:
        check_message(aclDestroyAclOpExecutor(executor));
        break;
      case 2:
        if (t != nullptr && t->bytes > 0) {
          check_message(
              AclSetTensorAddr(executor, choices_.byte(), t->handle, buffer(t->bytes, 0)));
        }
        break;
      case 3:
        check_message(aclSetInputTensorAddr(executor, 0, odd_handle<aclTensor>(), nullptr));
        break;
    }
  }

  // ---- streams, events, copies
  // -------------------------------------------------------------------

  aclrtStream stream() {
    if (choices_.one_in(12)) return odd_handle<void>();
    if (streams_.empty() || choices_.one_in(4)) return nullptr;
    return streams_[static_cast<size_t>(choices_.byte()) % streams_.size()];
  }

  void create_stream() {
    if (streams_.size() >= 3) return;
    aclrtStream made = nullptr;
    const aclError status = aclrtCreateStreamWithConfig(
        &made, choices_.byte(), static_cast<uint32_t>(choices_.below(0x42)));
    check_message(status);
    if (status == 0) streams_.push_back(made);
  }

  void destroy_stream() {
    if (streams_.empty()) {
      check_message(aclrtDestroyStream(odd_handle<void>()));
      return;
    }
    end_callbacks();
    aclrtStream const gone = streams_[static_cast<size_t>(choices_.byte()) % streams_.size()];
    const bool force = choices_.one_in(3);
    check_message(force ? aclrtDestroyStreamForce(gone) : aclrtDestroyStream(gone));
    if (aclrtDestroyStream(gone) == 0) abort();
    check_message(1);
  }

  void synchronize() {
    end_callbacks();
    switch (choices_.below(5)) {
      case 0:
        return check_message(aclrtSynchronizeStream(stream()));
      case 1:
        return check_message(aclrtSynchronizeStreamWithTimeout(stream(), choices_.below(5) - 2));
      case 2:
        return check_message(aclrtSynchronizeDevice());
      case 3:
        return check_message(aclrtSetStreamFailureMode(stream(), choices_.byte() % 3));
      case 4: {
        aclrtStreamStatus status = ACL_STREAM_STATUS_RESERVED;
        return check_message(aclrtStreamQuery(stream(), &status));
      }
    }
  }

  aclrtEvent event() {
    if (events_.empty() || choices_.one_in(8)) return odd_handle<void>();
    return events_[static_cast<size_t>(choices_.byte()) % events_.size()];
  }

  void events() {
    aclrtEvent made = nullptr;
    float ms = 0;
    switch (choices_.below(10)) {
      case 0:
      case 1: {
        const aclError status =
            choices_.one_in(2)
                ? aclrtCreateEvent(&made)
                : aclrtCreateEventWithFlag(&made, static_cast<uint32_t>(choices_.below(0x50)));
        check_message(status);
        if (status == 0) events_.push_back(made);
        return;
      }
      case 2:
      case 3:
        return check_message(aclrtRecordEvent(event(), stream()));
      case 4:
        return check_message(aclrtStreamWaitEvent(stream(), event()));
      case 5:
        return check_message(aclrtResetEvent(event(), stream()));
      case 6:
        end_callbacks();
        return check_message(aclrtSynchronizeEvent(event()));
      case 7:
        return check_message(aclrtEventElapsedTime(&ms, event(), event()));
      case 8: {
        aclrtEventRecordedStatus recorded = ACL_EVENT_RECORDED_STATUS_NOT_READY;
        check_message(aclrtQueryEventStatus(event(), &recorded));
        aclrtEventWaitStatus waited = ACL_EVENT_WAIT_STATUS_RESERVED;
        check_message(aclrtQueryEventWaitStatus(event(), &waited));
        return check_message(aclrtDestroyEvent(event()));
      }
      case 9: {
        aclrtStream const on = stream();
        aclrtEvent pair[2] = {};
        for (aclrtEvent& one : pair) {
          check_message(aclrtCreateEvent(&one));
          check_message(aclrtRecordEvent(one, on));
        }
        end_callbacks();
        check_message(aclrtSynchronizeEventWithTimeout(pair[1], 1000));
        const int first = choices_.below(2);
        check_message(aclrtEventElapsedTime(&ms, pair[first], pair[1 - first]));
        for (aclrtEvent one : pair) check_message(aclrtDestroyEvent(one));
        return;
      }
    }
  }

  void memory() {
    void* block = nullptr;
    const int64_t size = choices_.one_in(8) ? choices_.number() : choices_.below(200);
    const bool host = choices_.one_in(3);
    const aclError status =
        host ? aclrtMallocHost(&block, static_cast<size_t>(size))
             : aclrtMalloc(&block, static_cast<size_t>(size),
                           static_cast<aclrtMemMallocPolicy>(choices_.below(12)));
    check_message(status);
    if (status != 0) return;
    const size_t count = static_cast<size_t>(choices_.below(256));
    const size_t limit = static_cast<size_t>(std::min<int64_t>(size, 200));
    uint8_t* const other = buffer(256, 7);
    const auto kind = static_cast<aclrtMemcpyKind>(choices_.below(9));
    // A pageable copy returns when the stream got there.
    end_callbacks();
    check_message(aclrtMemcpyAsync(block, limit, other, count, kind, stream()));
    check_message(aclrtMemcpyAsync(other, 256, block, std::min(count, limit), kind, stream()));
    check_message(aclrtMemsetAsync(block, limit, choices_.byte(), count, stream()));
    check_message(aclrtMemset(other, 256, choices_.byte(), count));
    check_message(aclrtMemcpy2dAsync(other, 16, other + 128,
                                     static_cast<size_t>(choices_.below(17)),
                                     static_cast<size_t>(choices_.below(17)), 8, kind, stream()));
    size_t free = 0;
    size_t total = 0;
    check_message(aclrtGetMemInfo(static_cast<aclrtMemAttr>(choices_.below(20)), &free, &total));
    check_message(aclrtSynchronizeDevice());
    check_message(host ? aclrtFree(block) : aclrtFreeHost(block));
    if ((host ? aclrtFreeHost(block) : aclrtFree(block)) != 0) abort();
    check_message(host ? aclrtFreeHost(block) : aclrtFree(block));
  }

  static void count_up(void* counter) { ++*static_cast<uint64_t*>(counter); }

  void callbacks() {
    aclrtStream const on = stream();
    void* const counter = buffer(8, 0);
    const uint64_t self = static_cast<uint64_t>(pthread_self());
    switch (choices_.below(5)) {
      case 0:
        return check_message(
            aclrtLaunchHostFunc(on, choices_.one_in(8) ? nullptr : count_up, counter));
      case 1: {
        const aclError status = aclrtSubscribeReport(self, on);
        check_message(status);
        if (status == 0) subscribed_.push_back(on);
        return;
      }
      case 2:
        return check_message(aclrtLaunchCallback(
            count_up, counter, static_cast<aclrtCallbackBlockType>(choices_.below(3)), on));
      case 3:
        return check_message(aclrtProcessReport(choices_.below(2)));
      case 4:
        return check_message(aclrtUnSubscribeReport(choices_.one_in(2) ? self : 1, on));
    }
  }

  // This thread is the one that would run callbacks: before it waits for streams nothing may.
  void end_callbacks() {
    for (aclrtStream on : subscribed_) {
      check_message(aclrtUnSubscribeReport(static_cast<uint64_t>(pthread_self()), on));
    }
    subscribed_.clear();
  }

  void process() {
    int32_t id = 0;
    switch (choices_.below(6)) {
      case 0:
        check_message(aclrtSetDevice(choices_.below(3) - 1));
        // The first user of the device, which set it before all inputs, stays.
        if (aclrtSetDevice(0) != 0 || aclrtResetDevice(0) != 0) abort();
        break;
      case 1:
        check_message(aclrtGetDevice(&id));
        break;
      case 2:
        check_message(aclInit(nullptr));
        break;
      case 3:
        end_callbacks();
        check_message(aclFinalizeReference(nullptr));
        break;
      case 4: {
        aclrtContext context = nullptr;
        aclrtContext before = nullptr;
        end_callbacks();
        check_message(aclrtGetCurrentContext(&before));
        check_message(aclrtCreateContext(&context, 0));
        create_stream();
        check_message(aclrtRecordEvent(event(), nullptr));
        check_message(aclrtDestroyContext(context));
        check_message(aclrtDestroyContext(odd_handle<void>()));
        check_message(aclrtSetCurrentContext(before));
        break;
      }
      case 5:
        aclrtGetLastError(ACL_RT_THREAD_LEVEL);
        check_message(aclrtStreamGetId(stream(), &id));
        break;
    }
  }

  void finish() {
    end_callbacks();
    check_message(aclrtSynchronizeDevice());
    for (aclrtStream const s : streams_) check_message(aclrtDestroyStream(s));
    for (aclrtEvent const e : events_) check_message(aclrtDestroyEvent(e));
    for (const Pending& pending : executors_)
      check_message(aclDestroyAclOpExecutor(pending.handle));
    for (const FuzzTensor& t : tensors_) check_message(aclDestroyTensor(t.handle));
  }

  Choices& choices_;
  std::vector<std::unique_ptr<uint8_t[]>> buffers_;
  std::vector<FuzzTensor> tensors_;
  std::vector<Pending> executors_;
  std::vector<aclrtStream> streams_;
  std::vector<aclrtStream> subscribed_;
  std::vector<aclrtEvent> events_;
  int faults_left_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const bool ready = aclrtSetDevice(0) == 0;
  if (!ready) abort();
  Choices choices(data, size);
  Machine(choices).run();
  return 0;
}
