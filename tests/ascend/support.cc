// SPDX-License-Identifier: Apache-2.0
#include "support.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <regex>

namespace ascend_test {
namespace {

// A binary floating-point format of 16 bits.
struct Format {
  int exponent_bits;
  int mantissa_bits;
};
constexpr Format kHalf{5, 10};
constexpr Format kBfloat16{8, 7};

std::uint16_t encode(Format f, double value) {
  const int bias = (1 << (f.exponent_bits - 1)) - 1;
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const std::uint16_t infinity = ((1 << f.exponent_bits) - 1) << f.mantissa_bits;
  if (std::isnan(value)) return sign | infinity | (1 << (f.mantissa_bits - 1));
  const double magnitude = std::fabs(value);
  if (std::isinf(magnitude)) return sign | infinity;
  if (magnitude == 0) return sign;
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  // The grid: normal numbers have mantissa_bits below the leading bit, denormals share the least
  // exponent.
  const int least = std::max(exponent - 1, 1 - bias) - f.mantissa_bits;
  // nearbyint in the default rounding mode: to nearest, ties to even. The quotient is exact in
  // float64.
  const double steps = std::nearbyint(std::ldexp(magnitude, -least));
  const double result = std::ldexp(steps, least);
  if (result >= std::ldexp(1.0, bias + 1)) return sign | infinity;
  if (result == 0) return sign;
  std::frexp(result, &exponent);
  const int biased = exponent - 1 + bias;
  if (biased <= 0) {
    return sign | static_cast<std::uint16_t>(std::ldexp(result, bias - 1 + f.mantissa_bits));
  }
  const double fraction = std::ldexp(result, 1 - exponent) - 1;
  return sign | static_cast<std::uint16_t>(biased << f.mantissa_bits) |
         static_cast<std::uint16_t>(std::ldexp(fraction, f.mantissa_bits));
}

double decode(Format f, std::uint16_t bits) {
  const int bias = (1 << (f.exponent_bits - 1)) - 1;
  const int biased = (bits & 0x7FFF) >> f.mantissa_bits;
  const int mantissa = bits & ((1 << f.mantissa_bits) - 1);
  const double sign = (bits & 0x8000) ? -1 : 1;
  if (biased == (1 << f.exponent_bits) - 1) {
    return mantissa ? std::numeric_limits<double>::quiet_NaN()
                    : sign * std::numeric_limits<double>::infinity();
  }
  if (biased == 0) return sign * std::ldexp(mantissa, 1 - bias - f.mantissa_bits);
  return sign * std::ldexp((1 << f.mantissa_bits) + mantissa, biased - bias - f.mantissa_bits);
}

// Decoding millions of elements one by one would be most of a large test's time.
std::vector<double> all_values(Format f) {
  std::vector<double> values;
  for (unsigned bits = 0; bits < 0x10000; ++bits) {
    values.push_back(decode(f, static_cast<std::uint16_t>(bits)));
  }
  return values;
}

std::size_t item_size(aclDataType dtype) {
  switch (dtype) {
    case ACL_FLOAT:
    case ACL_INT32:
      return 4;
    case ACL_FLOAT16:
    case ACL_BF16:
      return 2;
    case ACL_INT64:
    case ACL_DOUBLE:
      return 8;
    default:
      return 1;
  }
}

}  // namespace

std::uint16_t half_bits(double value) { return encode(kHalf, value); }
std::uint16_t bfloat16_bits(double value) { return encode(kBfloat16, value); }
double half_value(std::uint16_t bits) {
  static const std::vector<double> values = all_values(kHalf);
  return values[bits];
}
double bfloat16_value(std::uint16_t bits) {
  static const std::vector<double> values = all_values(kBfloat16);
  return values[bits];
}

double rounded(aclDataType dtype, double value) {
  if (dtype == ACL_FLOAT16) return half_value(half_bits(value));
  if (dtype == ACL_BF16) return bfloat16_value(bfloat16_bits(value));
  return static_cast<float>(value);
}

double unit_roundoff(aclDataType dtype) {
  return std::ldexp(1.0, dtype == ACL_FLOAT16 ? -11 : dtype == ACL_BF16 ? -8 : -24);
}

std::string take_message() {
  const char* text = aclGetRecentErrMsg();
  return text == nullptr ? std::string() : std::string(text);
}

bool names(const std::string& text, const std::string& name) {
  return std::regex_search(text, std::regex("\\b(" + name + ")\\b"));
}

GuardedBuffer::GuardedBuffer(std::size_t bytes, unsigned char fill) : size_(bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t inside = (bytes + page - 1) / page * page;
  mapped_ = inside + page;
  void* base = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) throw std::bad_alloc();
  base_ = static_cast<unsigned char*>(base);
  mprotect(base_ + inside, page, PROT_NONE);
  data_ = base_ + inside - bytes;
  std::memset(base_, fill, inside);
}

GuardedBuffer::~GuardedBuffer() {
  if (base_ != nullptr) munmap(base_, mapped_);
}

void GuardedBuffer::swap(GuardedBuffer& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(mapped_, other.mapped_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
}

void GuardedBuffer::set_read_only(bool read_only) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  if (mapped_ > page) {
    mprotect(base_, mapped_ - page, read_only ? PROT_READ : PROT_READ | PROT_WRITE);
  }
}

const char* layout_name(Layout layout) {
  switch (layout) {
    case Layout::kContiguous:
      return "Contiguous";
    case Layout::kFlat:
      return "Flat";
    case Layout::kRowGap:
      return "RowGap";
    case Layout::kGapped:
      return "Gapped";
    case Layout::kTransposed:
      return "Transposed";
    case Layout::kBroadcast:
      return "Broadcast";
  }
  return "?";
}

Array::Array(aclDataType dtype, std::vector<std::int64_t> shape, Layout layout)
    : dtype_(dtype), shape_(std::move(shape)), strides_(shape_.size(), 1) {
  const bool matrix = shape_.size() == 2;
  const std::int64_t columns = matrix ? shape_[1] : 1;
  const std::int64_t rows = shape_.empty() ? 1 : shape_[0];
  if (matrix) strides_[0] = columns;
  switch (layout) {
    case Layout::kContiguous:
      break;
    case Layout::kFlat:
      offset_ = 3;
      break;
    case Layout::kRowGap:
      strides_[0] = matrix ? columns + 3 : 2;
      break;
    case Layout::kGapped:
      offset_ = 5;
      strides_[0] = matrix ? 2 * columns + 7 : 4;
      if (matrix) strides_[1] = 2;
      break;
    case Layout::kTransposed:
      strides_[0] = matrix ? 1 : 3;
      if (matrix) strides_[1] = rows + 2;
      break;
    case Layout::kBroadcast:
      strides_[0] = 0;
      break;
  }
  std::int64_t span = 1;
  for (std::size_t d = 0; d < shape_.size(); ++d) span += (shape_[d] - 1) * strides_[d];
  if (count() == 0) span = 0;
  const std::int64_t elements = offset_ + span;
  memory_ = GuardedBuffer(static_cast<std::size_t>(elements) * item_size(dtype));
  const bool plain = layout == Layout::kContiguous;
  tensor_ = aclCreateTensor(shape_.data(), shape_.size(), dtype, plain ? nullptr : strides_.data(),
                            offset_, ACL_FORMAT_ND, plain ? shape_.data() : &elements,
                            plain ? shape_.size() : 1, memory_.data());
}

Array::Array(Array&& other) noexcept { *this = std::move(other); }

Array& Array::operator=(Array&& other) noexcept {
  std::swap(dtype_, other.dtype_);
  std::swap(shape_, other.shape_);
  std::swap(strides_, other.strides_);
  std::swap(offset_, other.offset_);
  std::swap(memory_, other.memory_);
  std::swap(tensor_, other.tensor_);
  return *this;
}

Array::~Array() { destroy_tensor(); }

aclnnStatus Array::destroy_tensor() {
  aclTensor* tensor = tensor_;
  tensor_ = nullptr;
  return aclDestroyTensor(tensor);
}

std::int64_t Array::count() const {
  std::int64_t n = 1;
  for (std::int64_t d : shape_) n *= d;
  return n;
}

unsigned char* Array::at(std::int64_t i) const {
  std::int64_t element = offset_;
  for (std::size_t d = shape_.size(); d-- > 0;) {
    element += i % shape_[d] * strides_[d];
    i /= shape_[d];
  }
  return memory_.data() + static_cast<std::size_t>(element) * item_size(dtype_);
}

std::uint64_t Array::bits(std::int64_t i) const {
  std::uint64_t value = 0;
  std::memcpy(&value, at(i), item_size(dtype_));
  return value;
}

std::int64_t Array::get_int(std::int64_t i) const {
  const std::uint64_t raw = bits(i);
  if (dtype_ == ACL_INT32) return static_cast<std::int32_t>(raw);
  return static_cast<std::int64_t>(raw);
}

void Array::set_int(std::int64_t i, std::int64_t value) {
  std::memcpy(at(i), &value, item_size(dtype_));  // little endian: the low bytes come first
}

double Array::get(std::int64_t i) const {
  const std::uint64_t raw = bits(i);
  switch (dtype_) {
    case ACL_FLOAT: {
      float value = 0;
      std::memcpy(&value, &raw, sizeof value);
      return value;
    }
    case ACL_FLOAT16:
      return half_value(static_cast<std::uint16_t>(raw));
    case ACL_BF16:
      return bfloat16_value(static_cast<std::uint16_t>(raw));
    default:
      return static_cast<double>(get_int(i));
  }
}

void Array::set(std::int64_t i, double value) {
  switch (dtype_) {
    case ACL_FLOAT: {
      const auto stored = static_cast<float>(value);
      std::memcpy(at(i), &stored, sizeof stored);
      return;
    }
    case ACL_FLOAT16:
      return set_int(i, half_bits(value));
    case ACL_BF16:
      return set_int(i, bfloat16_bits(value));
    default:
      return set_int(i, static_cast<std::int64_t>(value));
  }
}

void Array::fill(double value) {
  for (std::int64_t i = 0; i < count(); ++i) set(i, value);
}

void Array::assign(const std::vector<double>& values) {
  ASSERT_EQ(static_cast<std::int64_t>(values.size()), count());
  for (std::int64_t i = 0; i < count(); ++i) set(i, values[static_cast<std::size_t>(i)]);
}

void Array::assign(const Array& other) {
  ASSERT_EQ(other.shape_, shape_);
  ASSERT_EQ(other.dtype_, dtype_);
  for (std::int64_t i = 0; i < count(); ++i) {
    const std::uint64_t raw = other.bits(i);
    std::memcpy(at(i), &raw, item_size(dtype_));
  }
}

std::vector<double> Array::values() const {
  std::vector<double> result(static_cast<std::size_t>(count()));
  for (std::int64_t i = 0; i < count(); ++i) result[static_cast<std::size_t>(i)] = get(i);
  return result;
}

bool Array::gaps_untouched() const {
  std::vector<bool> belongs(memory_.size(), false);
  for (std::int64_t i = 0; i < count(); ++i) {
    const auto first = static_cast<std::size_t>(at(i) - memory_.data());
    for (std::size_t k = 0; k < item_size(dtype_); ++k) belongs[first + k] = true;
  }
  for (std::size_t k = 0; k < memory_.size(); ++k) {
    if (!belongs[k] && memory_.data()[k] != kGapByte) return false;
  }
  return true;
}

bool Array::untouched() const {
  return std::all_of(memory_.data(), memory_.data() + memory_.size(),
                     [](unsigned char byte) { return byte == kGapByte; });
}

std::uint64_t Random::next() {
  // SplitMix64 (Steele, Lea and Flood, 2014).
  state_ += 0x9E3779B97F4A7C15u;
  std::uint64_t z = state_;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

std::int64_t Random::integer(std::int64_t low, std::int64_t high) {
  return low + static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(high - low + 1));
}

double Random::uniform() { return std::ldexp(static_cast<double>(next() >> 11), -53); }

void fill_exact(Array& array, std::uint64_t seed, std::int64_t magnitude) {
  Random random(seed);
  for (std::int64_t i = 0; i < array.count(); ++i) {
    array.set(i, static_cast<double>(random.integer(-magnitude, magnitude)) / 8);
  }
}

aclError run(const Prepare& prepare, LaunchFunction launch, aclrtStream stream) {
  std::uint64_t workspace_size = 0;
  aclOpExecutor* executor = nullptr;
  if (const aclnnStatus status = prepare(&workspace_size, &executor); status != 0) return status;
  const GuardedBuffer workspace(workspace_size);
  const aclnnStatus status =
      launch(workspace_size > 0 ? workspace.data() : nullptr, workspace_size, executor, stream);
  const aclError finished = aclrtSynchronizeStream(stream);
  return status != 0 ? status : finished;
}

void Forward::make_outputs(bool with_logits, Layout layout) {
  const std::int64_t tokens = input.dim(0);
  logits_max = Array(ACL_FLOAT, {tokens}, layout);
  sum_exp = Array(ACL_FLOAT, {tokens}, layout);
  predicted = Array(ACL_FLOAT, {tokens}, layout);
  mask = Array(ACL_UINT8, {(tokens + 7) / 8}, layout);
  masked_target = Array(target.dtype(), {tokens}, layout);
  if (with_logits) logits = Array(input.dtype(), {tokens, weight.dim(0)}, layout);
}

Forward small_forward() {
  Forward f;
  f.input = Array(ACL_BF16, {9, 16});
  f.weight = Array(ACL_BF16, {140, 16});
  f.target = Array(ACL_INT32, {9});
  fill_exact(f.input, 1);
  fill_exact(f.weight, 2);
  f.target.fill(4);
  f.end = 140;
  f.make_outputs(false);
  return f;
}

aclnnStatus Forward::prepare(std::uint64_t* workspace_size, aclOpExecutor** executor) const {
  return aclnnFusedLinearOnlineMaxSumGetWorkspaceSize(
      input.tensor(), weight.tensor(), target.tensor(), start, end, logits_max.tensor(),
      sum_exp.tensor(), predicted.tensor(), mask.tensor(), masked_target.tensor(), logits.tensor(),
      workspace_size, executor);
}

Prepare Forward::preparer() const {
  return [this](std::uint64_t* size, aclOpExecutor** executor) { return prepare(size, executor); };
}

aclError Forward::run(aclrtStream stream) const {
  return ascend_test::run(preparer(), aclnnFusedLinearOnlineMaxSum, stream);
}

void Loss::make_outputs(Layout layout) {
  loss = Array(ACL_FLOAT, {logits_max.dim(0)}, layout);
  if (logits.tensor() != nullptr) softmax = Array(ACL_FLOAT, logits.shape(), layout);
}

aclnnStatus Loss::prepare(std::uint64_t* workspace_size, aclOpExecutor** executor) const {
  return aclnnFusedCrossEntropyLossWithMaxSumGetWorkspaceSize(
      logits_max.tensor(), sum_exp.tensor(), predicted.tensor(), label_smoothing, nullptr, nullptr,
      logits.tensor(), loss.tensor(), softmax.tensor(), workspace_size, executor);
}

Prepare Loss::preparer() const {
  return [this](std::uint64_t* size, aclOpExecutor** executor) { return prepare(size, executor); };
}

aclError Loss::run(aclrtStream stream) const {
  return ascend_test::run(preparer(), aclnnFusedCrossEntropyLossWithMaxSum, stream);
}

void Gradient::make_outputs(Layout layout) {
  grad_input = Array(input.dtype(), input.shape(), layout);
  grad_weight = Array(input.dtype(), weight.shape(), layout);
}

aclnnStatus Gradient::prepare(std::uint64_t* workspace_size, aclOpExecutor** executor) const {
  return aclnnFusedLinearCrossEntropyLossGradGetWorkspaceSize(
      grad.tensor(), input.tensor(), weight.tensor(), mask.tensor(), masked_target.tensor(),
      label_smoothing, logits_max.tensor(), sum_exp.tensor(), softmax.tensor(), grad_input.tensor(),
      grad_weight.tensor(), workspace_size, executor);
}

Prepare Gradient::preparer() const {
  return [this](std::uint64_t* size, aclOpExecutor** executor) { return prepare(size, executor); };
}

aclError Gradient::run(aclrtStream stream) const {
  return ascend_test::run(preparer(), aclnnFusedLinearCrossEntropyLossGrad, stream);
}

bool Gradient::is_masked(std::int64_t b) const {
  if (mask.dtype() == ACL_BOOL) return mask.get_int(b) != 0;
  return (mask.get_int(b / 8) >> (b % 8)) & 1;
}

std::vector<double> reference_logits(const Array& input, const Array& weight, bool round) {
  const std::int64_t tokens = input.dim(0), vocab = weight.dim(0), hidden = input.dim(1);
  const std::vector<double> x = input.values(), w = weight.values();
  std::vector<double> logits(static_cast<std::size_t>(tokens * vocab));
  for (std::int64_t b = 0; b < tokens; ++b) {
    for (std::int64_t v = 0; v < vocab; ++v) {
      double sum = 0;
      for (std::int64_t h = 0; h < hidden; ++h) sum += x[b * hidden + h] * w[v * hidden + h];
      logits[b * vocab + v] = round ? rounded(input.dtype(), sum) : sum;
    }
  }
  return logits;
}

Statistics reference_statistics(const Forward& forward) {
  const std::int64_t tokens = forward.input.dim(0), vocab = forward.weight.dim(0);
  const std::vector<double> logits = reference_logits(forward.input, forward.weight, true);
  Statistics result;
  for (std::int64_t b = 0; b < tokens; ++b) {
    const double* row = logits.data() + b * vocab;
    const double max = *std::max_element(row, row + vocab);
    double sum = 0;
    for (std::int64_t v = 0; v < vocab; ++v) sum += std::exp(row[v] - max);
    const std::int64_t target = forward.target.get_int(b);
    double predicted = 0;
    if (target >= forward.start && target < forward.end) {
      const std::int64_t local = target - forward.start;
      predicted = (local < vocab ? row[local] : 0) - max;
    }
    result.logits_max.push_back(max);
    result.sum_exp.push_back(sum);
    result.predicted.push_back(predicted);
  }
  return result;
}

void expect_forward(const Forward& forward) {
  const std::int64_t tokens = forward.input.dim(0), vocab = forward.weight.dim(0);
  const Statistics expected = reference_statistics(forward);
  for (std::int64_t b = 0; b < tokens; ++b) {
    SCOPED_TRACE(testing::Message() << "token " << b);
    const auto i = static_cast<std::size_t>(b);
    EXPECT_EQ(forward.logits_max.get(b), expected.logits_max[i]);
    EXPECT_NEAR(forward.sum_exp.get(b), expected.sum_exp[i],
                expected.sum_exp[i] * static_cast<double>(vocab + 16) * std::ldexp(1.0, -24));
    EXPECT_EQ(forward.predicted.get(b), static_cast<float>(expected.predicted[i]));
    const std::int64_t target = forward.target.get_int(b);
    const bool outside = target < forward.start || target >= forward.end;
    EXPECT_EQ(forward.is_masked(b), outside);
    EXPECT_EQ(forward.masked_target.get_int(b), outside ? 0 : target - forward.start);
  }
  for (std::int64_t b = tokens; b < forward.mask.dim(0) * 8; ++b) {
    EXPECT_EQ(forward.is_masked(b), 0 < forward.start || 0 >= forward.end) << "padding bit " << b;
  }
  if (forward.logits.tensor() != nullptr) {
    EXPECT_EQ(forward.logits.values(), reference_logits(forward.input, forward.weight, true));
  }
}

std::vector<double> reference_grad_logits(const Gradient& gradient, bool round_logits) {
  const std::int64_t tokens = gradient.input.dim(0), vocab = gradient.weight.dim(0);
  std::vector<double> p(static_cast<std::size_t>(tokens * vocab));
  if (gradient.softmax.tensor() != nullptr) {
    p = gradient.softmax.values();
  } else {
    const std::vector<double> logits =
        reference_logits(gradient.input, gradient.weight, round_logits);
    for (std::int64_t b = 0; b < tokens; ++b) {
      for (std::int64_t v = 0; v < vocab; ++v) {
        p[b * vocab + v] =
            std::exp(logits[b * vocab + v] - gradient.logits_max.get(b)) / gradient.sum_exp.get(b);
      }
    }
  }
  for (std::int64_t b = 0; b < tokens; ++b) {
    const double scale = gradient.grad.get(b);
    for (std::int64_t v = 0; v < vocab; ++v) {
      const bool hit = !gradient.is_masked(b) && gradient.masked_target.get_int(b) == v;
      double& g = p[b * vocab + v];
      g = scale == 0 ? 0 : (g - (hit ? 1 : 0)) * scale;
    }
  }
  return p;
}

namespace {

// result[r, c] = sum_k a[r, k] b[k, c], compared with `actual`.
void expect_product(const char* what, const Array& actual, const std::vector<double>& a,
                    std::int64_t a_row, std::int64_t a_k, const std::vector<double>& b,
                    std::int64_t addends, double extra, double largest_grad) {
  const aclDataType dtype = actual.dtype();
  const double u = unit_roundoff(dtype);
  const double per_addend = extra * u + static_cast<double>(addends + 8) * std::ldexp(1.0, -24);
  const double per_factor =
      extra * largest_grad *
      (std::ldexp(1.0, -22) + (dtype == ACL_FLOAT16 ? std::ldexp(1.0, -25) : 0));
  const double least = dtype == ACL_FLOAT16 ? std::ldexp(1.0, -24) : std::ldexp(1.0, -126);
  const std::int64_t rows = actual.dim(0), columns = actual.dim(1);
  std::int64_t wrong = 0;
  struct Sums {
    double sum = 0, magnitude = 0, factors = 0;
  };
  for (std::int64_t r = 0; r < rows; ++r) {
    std::vector<Sums> row(static_cast<std::size_t>(columns));
    for (std::int64_t k = 0; k < addends; ++k) {
      const double factor = a[r * a_row + k * a_k];
      if (factor == 0) continue;  // a row that does not count may stand beside infinite operands
      for (std::int64_t c = 0; c < columns; ++c) {
        Sums& at = row[static_cast<std::size_t>(c)];
        at.sum += factor * b[k * columns + c];
        at.magnitude += std::fabs(factor * b[k * columns + c]);
        at.factors += std::fabs(b[k * columns + c]);
      }
    }
    for (std::int64_t c = 0; c < columns; ++c) {
      const auto [sum, magnitude, factors] = row[static_cast<std::size_t>(c)];
      const double allowed =
          magnitude * per_addend + factors * per_factor + std::fabs(sum) * u * 1.01 + least;
      const double got = actual.get(r * columns + c);
      if (!(std::fabs(got - sum) <= allowed) && ++wrong <= 5) {
        ADD_FAILURE() << what << "[" << r << ", " << c << "] is " << got << ", should be " << sum
                      << " within " << allowed;
      }
    }
  }
  EXPECT_EQ(wrong, 0) << what;
}

}  // namespace

void expect_gradients(const Gradient& gradient, const std::vector<double>& grad_logits,
                      double extra) {
  const std::int64_t tokens = gradient.input.dim(0), vocab = gradient.weight.dim(0);
  double largest = 0;
  for (double g : gradient.grad.values()) largest = std::max(largest, std::fabs(g));
  expect_product("inputGradOut", gradient.grad_input, grad_logits, vocab, 1,
                 gradient.weight.values(), vocab, extra, largest);
  expect_product("weightGradOut", gradient.grad_weight, grad_logits, 1, vocab,
                 gradient.input.values(), tokens, extra, largest);
}

void Gate::hold(void* held) {
  auto* state = static_cast<State*>(held);
  const std::shared_ptr<State> keep = std::move(state->enqueued);
  std::unique_lock lock(state->mutex);
  state->reached = true;
  state->changed.notify_all();
  state->changed.wait(lock, [state] { return state->open; });
}

aclError Gate::close_on(aclrtStream stream) {
  state_->enqueued = state_;
  return aclrtLaunchHostFunc(stream, hold, state_.get());
}

void Gate::open() {
  const std::lock_guard lock(state_->mutex);
  state_->open = true;
  state_->changed.notify_all();
}

bool Gate::wait_until_reached(std::chrono::milliseconds limit) {
  std::unique_lock lock(state_->mutex);
  return state_->changed.wait_for(lock, limit, [this] { return state_->reached; });
}

Stream::Stream() { EXPECT_EQ(aclrtCreateStream(&stream_), ACL_SUCCESS); }

Stream::~Stream() { EXPECT_EQ(aclrtDestroyStream(stream_), ACL_SUCCESS); }

}  // namespace ascend_test
