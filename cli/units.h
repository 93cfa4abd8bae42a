// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "logitless/gradient.h"
#include "logitless/options.h"
#include "logitless/result.h"

namespace logitless::cli {

// "64MiB", "1.5 GiB", "200MB", "4096" -> bytes. B and no unit: bytes; kB, MB, GB, TB:
// powers of 1000; KiB, MiB, GiB, TiB: powers of 1024; case does not matter. "64M" alone is refused:
// it means one thing to some people and another to others.
Result<int64_t> parse_bytes(std::string_view text);

// "1024,32000,2048" -> Shape{BT, V, H}.
Result<Shape> parse_shape(std::string_view text);

// f32, f16, bf16 and the names other tools use for them (fp16, float16, bfloat16, ...).
Result<DType> parse_operand_dtype(std::string_view text);

// "2^-9", "0.002", "1e-3" -> a grad_tolerance: 0 (exact), or from 2^-16 to 0.5.
Result<float> parse_tolerance(std::string_view text);

std::string format_bytes(int64_t bytes);       // 1536 -> "1.50 KiB"
std::string format_seconds(double seconds);    // 0.0123 -> "12.3 ms"
std::string format_count(int64_t count);       // 49152 -> "49,152"
std::string format_error(double value);        // 1.234e-06 -> "1.23e-06", exact 0 -> "0"
std::string format_tolerance(float value);     // 0x1p-9 -> "2^-9", 0.002 -> "0.002"
std::string format_shape(const Shape& shape);  // "(BT 1,024, V 32,000, H 2,048)"

// Text from a file, made safe to print: control characters are escaped, long text is cut.
std::string printable(std::string_view text);

}  // namespace logitless::cli
