// SPDX-License-Identifier: Apache-2.0
// What the suites of the C face share: memory with guard pages, tensors in every layout, and the
// three operators in float64 straight from their formulas. Nothing here knows the library beyond
// its public C headers.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "acl/acl.h"
#include "aclnn/acl_meta.h"
#include "aclnnop/aclnn_fused_cross_entropy_loss_with_max_sum.h"
#include "aclnnop/aclnn_fused_linear_cross_entropy_loss_grad.h"
#include "aclnnop/aclnn_fused_linear_online_max_sum.h"

namespace ascend_test {

// ---- 16-bit floating point, written from the formats' definitions

// Rounds to nearest, ties to even, once. Overflow gives infinity; NaN gives a quiet NaN.
std::uint16_t half_bits(double value);
std::uint16_t bfloat16_bits(double value);
double half_value(std::uint16_t bits);
double bfloat16_value(std::uint16_t bits);
// The value a number has once it is stored as `dtype` (ACL_FLOAT, ACL_FLOAT16 or ACL_BF16).
double rounded(aclDataType dtype, double value);
// Half a unit in the last place of 1.0: the largest relative error of one rounding.
double unit_roundoff(aclDataType dtype);

// ---- error texts

// The calling thread's error text, taken and cleared; empty when there is none.
std::string take_message();
// Whether `name` stands in `text` as a whole word. `name` may offer alternatives: "input|weight".
bool names(const std::string& text, const std::string& name);

// ---- memory

// The byte that fills memory nobody asked the library to touch. As bf16 or fp16 it is a plain small
// number, so a kernel that reads a gap gives wrong results instead of NaN that might hide
// elsewhere.
inline constexpr unsigned char kGapByte = 0xA5;

// Memory that ends exactly where an inaccessible page begins: one byte too far is a crash, not
// luck.
class GuardedBuffer {
 public:
  GuardedBuffer() = default;
  explicit GuardedBuffer(std::size_t bytes, unsigned char fill = kGapByte);
  GuardedBuffer(GuardedBuffer&& other) noexcept { swap(other); }
  GuardedBuffer& operator=(GuardedBuffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~GuardedBuffer();

  [[nodiscard]] unsigned char* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return size_; }
  void set_read_only(bool read_only);

 private:
  void swap(GuardedBuffer& other) noexcept;
  unsigned char* base_ = nullptr;
  std::size_t mapped_ = 0;
  unsigned char* data_ = nullptr;
  std::size_t size_ = 0;
};

enum class Layout {
  kContiguous,  // storage shape = view shape, as most C++ clients write it
  kFlat,        // contiguous view at an offset in 1-D storage, as torch_npu writes it
  kRowGap,      // a few foreign elements behind each row (2-D), every second element (1-D)
  kGapped,      // gaps in every dimension and an offset
  kTransposed,  // column-major (2-D), every third element (1-D)
  kBroadcast,   // first dimension with stride 0: inputs only
};
const char* layout_name(Layout layout);

// A tensor with its memory. Elements are addressed by their row-major position in the view.
class Array {
 public:
  Array() = default;
  Array(aclDataType dtype, std::vector<std::int64_t> shape, Layout layout = Layout::kContiguous);
  Array(Array&& other) noexcept;
  Array& operator=(Array&& other) noexcept;
  ~Array();

  [[nodiscard]] aclTensor* tensor() const { return tensor_; }
  [[nodiscard]] aclDataType dtype() const { return dtype_; }
  [[nodiscard]] std::int64_t dim(std::size_t i) const { return shape_[i]; }
  [[nodiscard]] const std::vector<std::int64_t>& shape() const { return shape_; }
  [[nodiscard]] std::int64_t count() const;
  // The pointer given to aclCreateTensor; the view begins `offset` elements later.
  [[nodiscard]] void* storage() const { return memory_.data(); }
  [[nodiscard]] std::size_t storage_bytes() const { return memory_.size(); }

  [[nodiscard]] double get(std::int64_t i) const;
  void set(std::int64_t i, double value);
  [[nodiscard]] std::int64_t get_int(std::int64_t i) const;
  void set_int(std::int64_t i, std::int64_t value);
  void fill(double value);
  void assign(const std::vector<double>& values);
  // Copies the elements of an array of the same shape and type, whatever the layouts.
  void assign(const Array& other);
  [[nodiscard]] std::vector<double> values() const;

  // The element's raw bits, for comparisons that must be exact.
  [[nodiscard]] std::uint64_t bits(std::int64_t i) const;
  // Whether every byte that belongs to no element still holds kGapByte.
  [[nodiscard]] bool gaps_untouched() const;
  // Whether every byte, elements included, still holds kGapByte.
  [[nodiscard]] bool untouched() const;
  void set_read_only(bool read_only) { memory_.set_read_only(read_only); }
  // Ends the handle and keeps the memory.
  aclnnStatus destroy_tensor();

 private:
  [[nodiscard]] unsigned char* at(std::int64_t i) const;
  aclDataType dtype_ = ACL_DT_UNDEFINED;
  std::vector<std::int64_t> shape_;
  std::vector<std::int64_t> strides_;
  std::int64_t offset_ = 0;
  GuardedBuffer memory_;
  aclTensor* tensor_ = nullptr;
};

// ---- random numbers

// A small generator whose numbers are the same on every platform.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next();
  std::int64_t integer(std::int64_t low, std::int64_t high);  // both ends included
  double uniform();                                           // [0, 1)

 private:
  std::uint64_t state_;
};

// Small multiples of 1/8 (both signs): with H <= 4096 every product and every partial sum is exact
// in fp32, so a logit is known to the last bit whatever the order of additions, and rounding it to
// 16 bits is a real step.
void fill_exact(Array& array, std::uint64_t seed, std::int64_t magnitude = 12);

// ---- the three operators

using Prepare = std::function<aclnnStatus(std::uint64_t*, aclOpExecutor**)>;
using LaunchFunction = aclnnStatus (*)(void*, std::uint64_t, aclOpExecutor*, aclrtStream);

// Phase 1, a guarded workspace of exactly the size asked for, phase 2, synchronise. The first
// status that is not 0, or 0.
aclError run(const Prepare& prepare, LaunchFunction launch, aclrtStream stream = nullptr);

struct Forward {
  Array input, weight, target;
  std::int64_t start = 0, end = 0;
  Array logits_max, sum_exp, predicted, mask, masked_target;
  Array logits;  // without a tensor: not asked for

  // Allocates outputs for the inputs in place; logits only on request.
  void make_outputs(bool with_logits, Layout layout = Layout::kContiguous);
  [[nodiscard]] aclnnStatus prepare(std::uint64_t* workspace_size, aclOpExecutor** executor) const;
  [[nodiscard]] Prepare preparer() const;
  [[nodiscard]] aclError run(aclrtStream stream = nullptr) const;
  [[nodiscard]] bool is_masked(std::int64_t b) const {
    return (mask.get_int(b / 8) >> (b % 8)) & 1;
  }
};
// [9, 16] times [140, 16], all of it in place: a forward to run where any will do.
Forward small_forward();

struct Loss {
  Array logits_max, sum_exp, predicted, logits;
  float label_smoothing = 0;
  Array loss, softmax;

  void make_outputs(Layout layout = Layout::kContiguous);
  [[nodiscard]] aclnnStatus prepare(std::uint64_t* workspace_size, aclOpExecutor** executor) const;
  [[nodiscard]] Prepare preparer() const;
  [[nodiscard]] aclError run(aclrtStream stream = nullptr) const;
};

struct Gradient {
  Array grad, input, weight, mask, masked_target;
  float label_smoothing = 0;
  Array logits_max, sum_exp, softmax;  // either the first two or the last
  Array grad_input, grad_weight;

  void make_outputs(Layout layout = Layout::kContiguous);
  [[nodiscard]] aclnnStatus prepare(std::uint64_t* workspace_size, aclOpExecutor** executor) const;
  [[nodiscard]] Prepare preparer() const;
  [[nodiscard]] aclError run(aclrtStream stream = nullptr) const;
  [[nodiscard]] bool is_masked(std::int64_t b) const;
};

// ---- float64

// Logits in float64, rounded to the operand type when `round` is set; row-major [BT, V].
std::vector<double> reference_logits(const Array& input, const Array& weight, bool round);

struct Statistics {
  std::vector<double> logits_max, sum_exp, predicted;
};
// predicted follows `forward.target` and its range; the mask and masked target are checked by the
// caller.
Statistics reference_statistics(const Forward& forward);

// grad_logits[b, v] in float64 before its rounding, from the given softmax or from recomputed
// logits (rounded to the operand type when `round` is set) and the given statistics. Rows whose
// grad is 0 are 0.
std::vector<double> reference_grad_logits(const Gradient& gradient, bool round_logits);

// Compares both outputs with products of `grad_logits`. Allowed error of one element, with u the
// operand type's unit roundoff and K the number of addends: sum |g| |x| (extra * u + (K + 8) 2^-24)
// + u |result|, plus the least denormal, plus extra * sum |x| max |grad| 2^-22 for softmax - 1 near
// 0 (and 2^-25 for grad_logits below fp16's normal numbers). `extra` is 1 when grad_logits is
// rounded by the operator and 0 when the caller already rounded it.
void expect_gradients(const Gradient& gradient, const std::vector<double>& grad_logits,
                      double extra = 1.0);

// Statistics, mask, masked target and logits of a forward call on exact inputs: maxima, predictions
// and logits to the bit, sums within (V + 16) 2^-24.
void expect_forward(const Forward& forward);

// ---- streams

// A host function that keeps a stream busy until it is opened. Declare it behind the stream: its
// end opens it, and the stream's end waits for it. What the host function needs outlives both.
class Gate {
 public:
  Gate() : state_(std::make_shared<State>()) {}
  ~Gate() { open(); }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  // Enqueues the gate; the stream runs nothing behind it until open(). Once per gate.
  aclError close_on(aclrtStream stream);
  void open();
  // Waits until the stream has reached the gate.
  bool wait_until_reached(std::chrono::milliseconds limit = std::chrono::seconds(20));

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool reached = false;
    bool open = false;
    std::shared_ptr<State> enqueued;  // while the stream may still run hold()
  };
  static void hold(void* held);
  std::shared_ptr<State> state_;
};

// A stream for one test.
class Stream {
 public:
  Stream();
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator aclrtStream() const { return stream_; }

 private:
  aclrtStream stream_ = nullptr;
};

// Runs statements in a fresh process (a child of one that has not used the library yet) and expects
// them to end without a failed expectation. For what a process can do only once: initialise,
// finalise, have no device.
#define EXPECT_IN_FRESH_PROCESS(...)                       \
  EXPECT_EXIT(                                             \
      {                                                    \
        __VA_ARGS__                                        \
        std::_Exit(::testing::Test::HasFailure() ? 1 : 0); \
      },                                                   \
      ::testing::ExitedWithCode(0), "")

}  // namespace ascend_test
