// SPDX-License-Identifier: Apache-2.0
#include "cli/units.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <limits>

namespace logitless::cli {
namespace {

std::string lower(std::string_view text) {
  std::string out(text);
  std::ranges::transform(out, out.begin(),
                         [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return out;
}

std::string_view trim(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

Error invalid(std::string message) {
  return Error{.kind = ErrorKind::invalid_argument, .message = std::move(message)};
}

}  // namespace

Result<int64_t> parse_bytes(std::string_view text) {
  struct Unit {
    const char* name;
    double bytes;
  };
  static constexpr std::array<Unit, 10> kUnits = {{{"", 1},
                                                   {"b", 1},
                                                   {"kb", 1e3},
                                                   {"mb", 1e6},
                                                   {"gb", 1e9},
                                                   {"tb", 1e12},
                                                   {"kib", 0x1p10},
                                                   {"mib", 0x1p20},
                                                   {"gib", 0x1p30},
                                                   {"tib", 0x1p40}}};
  const std::string rule = fmt::format(
      "'{}' is not a number of bytes; write for example 64MiB, 1.5GiB or 4096", printable(text));
  const std::string_view whole = trim(text);
  const size_t digits = std::min(whole.find_first_not_of("0123456789."), whole.size());
  double number = 0;
  const auto [end, error] =
      std::from_chars(whole.data(), whole.data() + digits, number, std::chars_format::fixed);
  if (digits == 0 || error != std::errc() || end != whole.data() + digits) return invalid(rule);
  const std::string unit = lower(trim(whole.substr(digits)));
  const auto found =
      std::ranges::find_if(kUnits, [&](const Unit& known) { return unit == known.name; });
  if (found == kUnits.end()) return invalid(rule);
  const double bytes = number * found->bytes;
  if (!(bytes < 0x1p62))
    return invalid(fmt::format("'{}' is more than 2^62 bytes", printable(text)));
  return static_cast<int64_t>(std::llround(bytes));
}

Result<Shape> parse_shape(std::string_view text) {
  const std::string rule = fmt::format(
      "'{}' is not a shape; write BT,V,H as three whole numbers >= 0, for example 1024,32000,2048",
      printable(text));
  std::array<int64_t, 3> sizes{};
  std::string_view rest = text;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const size_t comma = rest.find(',');
    if ((comma == std::string_view::npos) != (i + 1 == sizes.size())) return invalid(rule);
    const std::string_view part = trim(rest.substr(0, comma));
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), sizes[i]);
    if (error != std::errc() || end != part.data() + part.size() || sizes[i] < 0) {
      return invalid(rule);
    }
    if (comma != std::string_view::npos) rest.remove_prefix(comma + 1);
  }
  return Shape{.BT = sizes[0], .V = sizes[1], .H = sizes[2]};
}

Result<DType> parse_operand_dtype(std::string_view text) {
  const std::string name = lower(text);
  if (name == "f32" || name == "fp32" || name == "float32") return DType::f32;
  if (name == "f16" || name == "fp16" || name == "float16") return DType::f16;
  if (name == "bf16" || name == "bfloat16") return DType::bf16;
  return invalid(
      fmt::format("'{}' is not an operand type; allowed are f32, f16 and bf16", printable(text)));
}

Result<float> parse_tolerance(std::string_view text) {
  const std::string_view whole = trim(text);
  const bool power = whole.starts_with("2^");
  const std::string_view digits = power ? whole.substr(2) : whole;
  double number = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  const auto value = static_cast<float>(power ? std::exp2(number) : number);
  const bool allowed = value == 0 || (value >= kLeastGradTolerance && value <= kMostGradTolerance);
  if (digits.empty() || error != std::errc() || end != digits.data() + digits.size() || !allowed) {
    return invalid(
        fmt::format("--grad-tolerance is '{}', must be 0 (exact) or from 2^-16 to 0.5, for example "
                    "2^-9 or 0.002",
                    printable(text)));
  }
  return value;
}

std::string format_bytes(int64_t bytes) {
  static constexpr std::array<const char*, 5> kNames = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < kNames.size()) {
    value /= 1024;
    ++unit;
  }
  if (unit == 0) return fmt::format("{} B", bytes);
  return fmt::format("{:.{}f} {}", value, value < 10 ? 2 : value < 100 ? 1 : 0, kNames[unit]);
}

std::string format_seconds(double seconds) {
  const auto digits = [](double value) { return value < 10 ? 2 : value < 100 ? 1 : 0; };
  if (seconds < 1e-3) return fmt::format("{:.{}f} us", seconds * 1e6, digits(seconds * 1e6));
  if (seconds < 1) return fmt::format("{:.{}f} ms", seconds * 1e3, digits(seconds * 1e3));
  return fmt::format("{:.{}f} s", seconds, digits(seconds));
}

std::string format_count(int64_t count) {
  std::string digits = fmt::format("{}", count);
  const size_t sign = count < 0 ? 1 : 0;
  for (size_t i = digits.size(); i > sign + 3;) {
    i -= 3;
    digits.insert(i, 1, ',');
  }
  return digits;
}

std::string format_error(double value) {
  if (value == 0) return "0";
  return fmt::format("{:.2e}", value);
}

std::string format_tolerance(float value) {
  int exponent = 0;
  if (std::frexp(value, &exponent) == 0.5f) return fmt::format("2^{}", exponent - 1);
  return fmt::format("{:.4g}", value);
}

std::string format_shape(const Shape& shape) {
  return fmt::format("(BT {}, V {}, H {})", format_count(shape.BT), format_count(shape.V),
                     format_count(shape.H));
}

std::string printable(std::string_view text) {
  static constexpr size_t kMost = 80;
  std::string out;
  for (const char c : text) {
    if (out.size() >= kMost) return out + "...";
    const unsigned char byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  return out;
}

}  // namespace logitless::cli
