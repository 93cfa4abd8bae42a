// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <iostream>
#include <new>
#include <string>
#include <system_error>

#include "cli/commands.h"
#include "cli/failure.h"
#include "cli/units.h"
#include "logitless/version.h"

namespace {

// CLI11's own messages span lines; ours is one sentence.
std::string one_line(std::string text) {
  std::ranges::replace(text, '\n', ' ');
  text.erase(text.find_last_not_of(' ') + 1);
  return text;
}

// A word where a command is expected, or "".
std::string unknown_command(const CLI::App& app, int argc, char** argv) {
  if (argc < 2 || argv[1][0] == '-' || !app.get_subcommands().empty()) return "";
  return argv[1];
}

// Of ranks that fail together, one says why: the others' message is empty. Where stderr cannot be
// written either, the code has to do.
int complain(int code, const std::string& message) {
  if (message.empty()) return code;
  std::fputs(fmt::format("logitless: {}\n", message).c_str(), stderr);
  return code;
}

constexpr const char* kNoStdout = "stdout cannot be written";

}  // namespace

int main(int argc, char** argv) {
  using namespace logitless::cli;
  // A file beyond the limit of its size is an error of write(), as a full disk is.
  std::signal(SIGXFSZ, SIG_IGN);
  Command command;
  CLI::App app(
      "Cross-entropy over a huge vocabulary without building the logits: run, verify, compare and "
      "measure the fused operators.",
      "logitless");
  app.set_version_flag("--version", "logitless " LOGITLESS_VERSION);
  app.require_subcommand(1);
  app.footer(
      "Exit code: 0 fine, 1 a verification failed or a benchmark is slower than its baseline, 2 "
      "bad "
      "usage or input, 130 interrupted.\n" +
      example("  logitless make case.safetensors --tokens 1024 --vocab 32000 --hidden 1024\n"
              "  logitless verify case.safetensors"));
  add_info(app, command);
  add_make(app, command);
  add_forward_loss_gradient(app, command);
  add_verify(app, command);
  add_compare(app, command);
  add_bench(app, command);
  add_plan(app, command);

  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& asked) {  // --help, --version
    const int code = app.exit(asked);
    return std::cout.flush() ? code : complain(kExitBadInput, kNoStdout);
  } catch (const CLI::ParseError& error) {
    const std::string unknown = unknown_command(app, argc, argv);
    if (!unknown.empty()) {
      return complain(kExitBadInput, fmt::format("there is no command '{}' (see logitless --help)",
                                                 printable(unknown)));
    }
    return complain(kExitBadInput, one_line(error.what()) + " (see logitless --help)");
  }
  try {
    const int code = command();
    if (std::fflush(stdout) != 0) return complain(kExitBadInput, kNoStdout);
    return code;
  } catch (const Failure& failure) {
    return complain(failure.exit_code, failure.message);
  } catch (const std::bad_alloc&) {
    return complain(kExitBadInput, "there is not enough memory for this case");
  } catch (const std::system_error&) {  // fmt::print's, of a text longer than stdout's buffer
    return complain(kExitBadInput, kNoStdout);
  }
}
