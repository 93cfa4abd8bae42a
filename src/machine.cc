// SPDX-License-Identifier: Apache-2.0
#include "logitless/machine.h"

#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>

#include "cpu/isa.h"
#include "cpu/kernels.h"
#include "team.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {
namespace {

double now_seconds() {
  using std::chrono::duration;
  return duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// CPUs of the cgroup's quota (v2, then v1), or 0 when there is none.
int cgroup_cpus() {
  const auto ceil_ratio = [](double quota, double period) {
    return quota > 0 && period > 0 ? static_cast<int>(std::ceil(quota / period)) : 0;
  };
  std::ifstream groups("/proc/self/cgroup");
  int cpus = 0;
  for (std::string line; std::getline(groups, line);) {
    if (line.rfind("0::", 0) != 0) continue;
    // The tightest quota on the way up to the root counts.
    for (std::string path = line.substr(3);; path.erase(path.find_last_of('/'))) {
      std::ifstream file("/sys/fs/cgroup" + path + "/cpu.max");
      std::string quota;
      double period = 0;
      if (file >> quota >> period && quota != "max") {
        const int here = ceil_ratio(std::atof(quota.c_str()), period);
        if (here > 0) cpus = cpus == 0 ? here : std::min(cpus, here);
      }
      if (path.empty() || path.find_last_of('/') == std::string::npos) break;
    }
  }
  if (cpus > 0) return cpus;
  std::ifstream quota_file("/sys/fs/cgroup/cpu/cpu.cfs_quota_us");
  std::ifstream period_file("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  double quota = 0;
  double period = 0;
  if (quota_file >> quota && period_file >> period) return ceil_ratio(quota, period);
  return 0;
}

std::string cpu_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.rfind("model name", 0) == 0 || line.rfind("Processor", 0) == 0) {
      const size_t colon = line.find(':');
      if (colon != std::string::npos) return line.substr(std::min(colon + 2, line.size()));
    }
  }
  return "unknown";
}

// Bytes of a data or unified cache of this level as the system describes CPU 0, or 0.
int64_t cache_bytes(int level) {
  for (int index = 0; index < 8; ++index) {
    const std::string dir =
        "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/";
    int here = 0;
    std::string type;
    std::string size;
    if (!(std::ifstream(dir + "level") >> here) || !(std::ifstream(dir + "type") >> type) ||
        !(std::ifstream(dir + "size") >> size)) {
      continue;
    }
    if (here != level || type == "Instruction" || size.empty()) continue;
    const int64_t unit = size.back() == 'K' ? 1024 : (size.back() == 'M' ? 1024 * 1024 : 1);
    return std::atoll(size.c_str()) * unit;
  }
  return 0;
}

MachineInfo describe_machine() {
  MachineInfo info;
  info.cpu = cpu_name();
  const auto or_default = [](int64_t bytes, int64_t fallback) {
    return bytes > 0 ? bytes : fallback;
  };
  info.l1d_bytes = or_default(cache_bytes(1), 32 * 1024);
  info.l2_bytes = or_default(cache_bytes(2), 1024 * 1024);
  info.l3_bytes = or_default(cache_bytes(3), 16 * 1024 * 1024);
  info.amx_present = cpu::amx_bf16_present();
  return info;
}

// What does not change while the process lives is asked for once.
const MachineInfo& fixed_machine() {
  static const MachineInfo info = describe_machine();
  return info;
}

const cpu::GemmKernels& family(Isa isa, DType multiply) {
  const cpu::Kernels* kernels = cpu::kernels_of(isa);
  return multiply == DType::bf16 && kernels->bf16_dot != nullptr ? *kernels->bf16_dot
                                                                 : *kernels->f32;
}

// Sum of `count` words in four running vectors of 64 bytes, in whichever registers the caller's
// instruction set has. With registers of 16 bytes one core of the machine of docs/performance.md
// read 31 GB/s, with 64 bytes 42: a bandwidth measured with less than the kernels use is no limit.
__attribute__((always_inline)) inline uint64_t sum_lanes(const uint64_t* p, int64_t count) {
  typedef uint64_t Lanes __attribute__((vector_size(64)));
  Lanes sums[4] = {};
  for (int64_t i = 0; i + 32 <= count; i += 32) {
    for (int j = 0; j < 4; ++j) {
      Lanes lanes;
      std::memcpy(&lanes, p + i + 8 * j, sizeof(lanes));
      sums[j] += lanes;
    }
  }
  const Lanes sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  uint64_t total = 0;
  for (int j = 0; j < 8; ++j) total += sum[j];
  return total;
}

uint64_t sum_words(const uint64_t* p, int64_t count) { return sum_lanes(p, count); }
#if defined(__x86_64__)
__attribute__((target("avx2"))) uint64_t sum_words_avx2(const uint64_t* p, int64_t count) {
  return sum_lanes(p, count);
}
__attribute__((target("avx512f"))) uint64_t sum_words_avx512(const uint64_t* p, int64_t count) {
  return sum_lanes(p, count);
}
#endif

auto reader() -> uint64_t (*)(const uint64_t*, int64_t) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return sum_words_avx512;
  if (__builtin_cpu_supports("avx2")) return sum_words_avx2;
#endif
  return sum_words;
}

Result<Isa> usable_or_error(const std::string& name, const char* asked_by) {
  std::string offered;
  for (const cpu::Level& level : cpu::levels()) {
    const bool usable = cpu::usable(level);
    if (name == level.name && usable) return level.isa;
    if (usable) offered += (offered.empty() ? "" : ", ") + std::string(level.name);
  }
  return Error{ErrorKind::isa_unusable, std::string(asked_by) + ": '" + name +
                                            "' is not an instruction set usable here, must be one "
                                            "of " +
                                            offered};
}

}  // namespace

const char* name_of(Isa isa) { return cpu::level_of(isa).name; }

std::vector<Isa> usable_isas() {
  std::vector<Isa> isas;
  for (const cpu::Level& level : cpu::levels()) {
    if (cpu::usable(level)) isas.push_back(level.isa);
  }
  return isas;
}

Result<Isa> parse_isa(const std::string& name) { return usable_or_error(name, "isa"); }

Result<Isa> default_isa() {
  if (const char* forced = std::getenv("LOGITLESS_ISA"); forced != nullptr && *forced != '\0') {
    return usable_or_error(forced, "LOGITLESS_ISA");
  }
  for (const cpu::Level& level : cpu::levels()) {
    if (cpu::usable(level)) return level.isa;
  }
  return Isa::scalar;
}

int default_threads() {
  if (const char* text = std::getenv("OMP_NUM_THREADS"); text != nullptr) {
    const int64_t threads = std::strtoll(text, nullptr, 10);
    if (threads >= 1) return static_cast<int>(std::min<int64_t>(threads, 1024));
  }
  static const int quota = cgroup_cpus();
  cpu_set_t set;
  int cpus = 1;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) cpus = CPU_COUNT(&set);
  if (quota > 0) cpus = std::min(cpus, quota);
  return std::max(cpus, 1);
}

MachineInfo machine_info() {
  MachineInfo info = fixed_machine();
  info.isas = usable_isas();
  info.threads = default_threads();
  return info;
}

Result<double> measure_peak_flops(Isa isa, DType multiply, int threads, double seconds) {
  if (!cpu::usable(cpu::level_of(isa))) {
    return usable_or_error(name_of(isa), "isa").error();
  }
  if (threads < 1 || !(seconds > 0)) {
    return Error{ErrorKind::invalid_argument, "threads and seconds must be positive"};
  }
  const cpu::GemmKernels& gemm = family(isa, multiply);
  std::atomic<double> total{0};
  run_team(threads, [&](const Team& team) {
    gemm.peak(1000);
    team.barrier();
    const double begin = now_seconds();
    int64_t done = 0;
    double end = begin;
    while ((end = now_seconds()) - begin < seconds) done += gemm.peak(20000);
    double rate = static_cast<double>(done) * gemm.flops_per_instruction / (end - begin);
    double expected = total.load();
    while (!total.compare_exchange_weak(expected, expected + rate)) {
    }
  });
  return total.load();
}

double flops_per_instruction(Isa isa, DType multiply) {
  if (!cpu::usable(cpu::level_of(isa))) return 0;
  return family(isa, multiply).flops_per_instruction;
}

double measure_clock_hz(double seconds) {
  uint64_t x = 1;
  int64_t adds = 0;
  const double begin = now_seconds();
  double end = begin;
  while ((end = now_seconds()) - begin < seconds) {
    for (int i = 0; i < 100000; ++i) {
#if defined(__x86_64__)
      asm volatile("add $1, %0\n\tadd $1, %0\n\tadd $1, %0\n\tadd $1, %0" : "+r"(x));
#elif defined(__aarch64__)
      asm volatile("add %0, %0, #1\n\tadd %0, %0, #1\n\tadd %0, %0, #1\n\tadd %0, %0, #1"
                   : "+r"(x));
#endif
    }
    adds += 400000;
  }
  return static_cast<double>(adds) / (end - begin);
}

void prefer_huge_pages(std::span<std::byte> memory) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  const uintptr_t begin = (address + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (address + memory.size()) / kHugePage * kHugePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  static_cast<void>(memory);
#endif
}

double measure_read_bandwidth(int threads, double seconds) {
  // Eight times the last cache: of what a walk over the buffer leaves there, the next one finds
  // nothing.
  const int64_t bytes = std::clamp<int64_t>(8 * fixed_machine().l3_bytes, 128 << 20, 512 << 20);
  const int64_t words = bytes / 8;
  const auto sum_words = reader();
  // Each thread touches its part first, so that the pages lie where it reads them from.
  const auto buffer = std::make_unique_for_overwrite<uint64_t[]>(static_cast<size_t>(words));
  std::atomic<double> total{0};
  std::atomic<uint64_t> sink{0};
  run_team(threads, [&](const Team& team) {
    const Range mine = team.part(words);
    for (int64_t i = mine.begin; i < mine.end; ++i) buffer[static_cast<size_t>(i)] = 1;
    team.barrier();
    const double begin = now_seconds();
    double end = begin;
    double read = 0;
    uint64_t sum = 0;
    do {
      sum += sum_words(buffer.get() + mine.begin, mine.size());
      read += static_cast<double>(mine.size()) * 8;
    } while ((end = now_seconds()) - begin < seconds);
    sink.fetch_add(sum);
    double expected = total.load();
    while (!total.compare_exchange_weak(expected, expected + read / (end - begin))) {
    }
  });
  return total.load();
}

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
