// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "cli/amx_note.h"
#include "cli/build_info.h"
#include "cli/commands.h"
#include "cli/failure.h"
#include "cli/progress.h"
#include "cli/table.h"
#include "cli/units.h"
#include "logitless/version.h"

namespace logitless::cli {
namespace {

struct InfoArguments {
  CommonOptions common;
  double seconds = 0.3;
};

// A measured peak and what the clock says it should be.
struct Peak {
  DType dtype = DType::f32;
  double one_thread = 0;              // flop/s
  double all_threads = 0;             // flop/s
  double per_instruction = 0;         // flop
  double instructions_per_cycle = 0;  // measured, one thread
  double whole_per_cycle = 0;         // the nearest whole number of them, at least 1
  double ratio() const { return instructions_per_cycle / whole_per_cycle; }
};

// A register-only loop reaches its issue rate, or the loop, not the machine, is being measured.
constexpr double kLeastRatio = 0.97;

int run_info(const InfoArguments& arguments) {
  const RunSettings settings = arguments.common.settings();
  const MachineInfo machine = machine_info();
  const Isa chosen = take(default_isa());
  const int threads = settings.threads > 0 ? settings.threads : default_threads();
  Progress progress;
  std::vector<Peak> peaks;
  double clock_hz = 0;
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    progress.show("measuring peaks");
    Peak peak;
    peak.dtype = dtype;
    // The clock moves with load and temperature: measured right beside the peak it explains.
    const double clock_before = measure_clock_hz(arguments.seconds / 4);
    peak.one_thread = take(measure_peak_flops(chosen, dtype, 1, arguments.seconds));
    const double clock = std::max(clock_before, measure_clock_hz(arguments.seconds / 4));
    clock_hz = std::max(clock_hz, clock);
    peak.all_threads = threads == 1
                           ? peak.one_thread
                           : take(measure_peak_flops(chosen, dtype, threads, arguments.seconds));
    peak.per_instruction = flops_per_instruction(chosen, dtype);
    peak.instructions_per_cycle = peak.one_thread / (peak.per_instruction * clock);
    peak.whole_per_cycle = std::max(std::round(peak.instructions_per_cycle), 1.0);
    peaks.push_back(peak);
  }
  progress.show("measuring read bandwidth");
  const double bandwidth = measure_read_bandwidth(threads, arguments.seconds);

  std::vector<std::string> isas;
  for (const Isa isa : machine.isas) isas.emplace_back(logitless::name_of(isa));
  if (arguments.common.json) {
    ordered_json peak_list = ordered_json::array();
    for (const Peak& peak : peaks) {
      peak_list.push_back({{"dtype", logitless::name_of(peak.dtype)},
                           {"flops_one_thread", peak.one_thread},
                           {"flops", peak.all_threads},
                           {"flops_per_instruction", peak.per_instruction},
                           {"instructions_per_cycle", peak.instructions_per_cycle},
                           {"ratio_to_whole_instructions", peak.ratio()}});
    }
    print_json({{"version", LOGITLESS_VERSION},
                {"commit", build_commit()},
                {"compiler", build_compiler()},
                {"cpu", machine.cpu},
                {"isas", isas},
                {"isa", logitless::name_of(chosen)},
                {"threads", threads},
                {"l1d_bytes", machine.l1d_bytes},
                {"l2_bytes", machine.l2_bytes},
                {"l3_bytes", machine.l3_bytes},
                {"amx_present", machine.amx_present},
                {"clock_hz", clock_hz},
                {"read_bytes_per_second", bandwidth},
                {"peaks", std::move(peak_list)}});
    return kExitFine;
  }
  fmt::print("logitless   {}{}, {}\n", LOGITLESS_VERSION,
             build_commit().empty() ? "" : " (" + build_commit() + ")", build_compiler());
  fmt::print("cpu         {}\n", machine.cpu);
  fmt::print("isa         {} of {}\n", logitless::name_of(chosen), fmt::join(isas, ", "));
  if (const std::string amx = amx_note(machine.amx_present); !amx.empty()) {
    fmt::print("AMX         {}\n", amx);
  }
  fmt::print("threads     {}\n", threads);
  fmt::print("caches      L1d {}, L2 {} per core, L3 {} shared\n", format_bytes(machine.l1d_bytes),
             format_bytes(machine.l2_bytes), format_bytes(machine.l3_bytes));
  fmt::print("clock       {:.2f} GHz, from a chain of dependent additions\n", clock_hz * 1e-9);
  fmt::print("reading     {:.1f} GB/s with {} thread{}\n\n", bandwidth * 1e-9, threads,
             threads == 1 ? "" : "s");
  Table table({{"operands", Align::left},
               {"GFLOP/s, 1 thread", Align::right},
               {fmt::format("{} threads", threads), Align::right},
               {"flop/instruction", Align::right},
               {"instructions/cycle", Align::right},
               {"of a whole number", Align::right},
               {"", Align::left}});
  for (const Peak& peak : peaks) {
    table.row({logitless::name_of(peak.dtype), fmt::format("{:.1f}", peak.one_thread * 1e-9),
               fmt::format("{:.1f}", peak.all_threads * 1e-9),
               fmt::format("{:.0f}", peak.per_instruction),
               fmt::format("{:.2f}", peak.instructions_per_cycle),
               fmt::format("{:.3f}", peak.ratio()),
               peak.ratio() >= kLeastRatio ? marks().good : "low: is the machine busy?"});
  }
  fmt::print("{}", table.str());
  fmt::print(
      "peak = flop/instruction x instructions/cycle x clock; at least {} of a whole number of "
      "instructions is expected\n",
      kLeastRatio);
  return kExitFine;
}

}  // namespace

void add_info(CLI::App& app, Command& command) {
  const auto arguments = std::make_shared<InfoArguments>();
  CLI::App* sub = app.add_subcommand(
      "info", "Instruction sets, threads, caches, and the machine's measured limits");
  sub->add_option("--seconds", arguments->seconds, "How long each measurement lasts")
      ->check(number(0.01, 60))
      ->capture_default_str()
      ->type_name("SECONDS");
  add_common_options(*sub, arguments->common);
  sub->footer(example("  LOGITLESS_ISA=avx2 logitless info --threads 1"));
  sub->callback([arguments, &command] { command = [arguments] { return run_info(*arguments); }; });
}

}  // namespace logitless::cli
