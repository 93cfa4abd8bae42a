// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "logitless/result.h"
#include "logitless/tensor.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {

// Instruction-set levels, best first. `neon` is aarch64 with BF16 dot where the CPU has it.
enum class Isa : uint8_t {
  avx512bf16 = 0,
  avx512 = 1,
  avx2 = 2,
  neon_bf16 = 3,
  neon = 4,
  scalar = 5
};

LOGITLESS_API const char* name_of(Isa isa);

// Levels this build has and this CPU offers, best first; `scalar` is always last.
LOGITLESS_API std::vector<Isa> usable_isas();

// The level a plan uses when its options name none: LOGITLESS_ISA if set, else the best usable.
// An unknown or unusable LOGITLESS_ISA is an error, never a silent fallback. Read on every call.
LOGITLESS_API Result<Isa> default_isa();
LOGITLESS_API Result<Isa> parse_isa(const std::string& name);

// OMP_NUM_THREADS if set, else the CPUs this process may use (affinity and cgroup quota). >= 1.
LOGITLESS_API int default_threads();

struct MachineInfo {
  std::string cpu;           // as the operating system names it
  std::vector<Isa> isas;     // usable_isas()
  int threads = 1;           // default_threads()
  int64_t l1d_bytes = 0;     // per core; a documented default where the system does not say
  int64_t l2_bytes = 0;      // per core
  int64_t l3_bytes = 0;      // shared
  bool amx_present = false;  // AMX with bf16 is there; unused by this version
};
LOGITLESS_API MachineInfo machine_info();

// Register-only peak of the instruction that `isa` multiplies `multiply` operands with, in flop/s
// over `threads` threads, measured for about `seconds`. f16 and, without a bf16 dot, bf16 are
// multiplied as fp32.
LOGITLESS_API Result<double> measure_peak_flops(Isa isa, DType multiply, int threads,
                                                double seconds);
// flops one core could do per cycle with that instruction (an assumption about the core's ports is
// not made: this is flops per instruction).
LOGITLESS_API double flops_per_instruction(Isa isa, DType multiply);
// Clock of the calling thread's core in Hz, from a chain of dependent additions.
LOGITLESS_API double measure_clock_hz(double seconds);
// Asks the system to back `memory`, a workspace or large operands, with huge pages, where it has
// them and they are not forced on or off for everyone (Linux: madvise). Before the first touch. A
// hint: nothing is read or written, and failing is silent. Measured: 1 to 2 % of a gradient.
LOGITLESS_API void prefer_huge_pages(std::span<std::byte> memory);
// Bytes/s that `threads` threads read from a buffer far larger than the last cache, with the widest
// loads of this CPU. The buffer is allocated; afterwards no cache holds what the caller had there.
LOGITLESS_API double measure_read_bandwidth(int threads, double seconds);

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
