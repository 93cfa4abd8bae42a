// SPDX-License-Identifier: Apache-2.0
#include "tests/cli/program.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <sstream>
#include <thread>
#include <utility>

#include "tests/cli/scratch.h"

extern char** environ;

namespace logitless::cli::test {
namespace {

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> out;
  for (std::string& text : strings) out.push_back(text.data());
  out.push_back(nullptr);
  return out;
}

}  // namespace

Program::Program(std::vector<std::string> arguments, std::vector<std::string> environment,
                 const std::string& out) {
  std::string name = (std::filesystem::temp_directory_path() / "logitless_run_XXXXXX").string();
  folder_ = ::mkdtemp(name.data());

  std::vector<std::string> command;
  std::istringstream emulator(LOGITLESS_EMULATOR);
  for (std::string word; emulator >> word;) command.push_back(word);
  command.emplace_back(LOGITLESS_PROGRAM);
  command.insert(command.end(), std::make_move_iterator(arguments.begin()),
                 std::make_move_iterator(arguments.end()));
  for (char** variable = environ; *variable != nullptr; ++variable) {
    environment.emplace_back(*variable);
  }
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, 1, (out.empty() ? folder_ + "/out" : out).c_str(),
                                   O_CREAT | O_WRONLY, 0600);
  posix_spawn_file_actions_addopen(&actions, 2, (folder_ + "/err").c_str(), O_CREAT | O_WRONLY,
                                   0600);
  const std::vector<char*> argv = pointers(command);
  const std::vector<char*> envp = pointers(environment);
  if (::posix_spawnp(&pid_, argv[0], &actions, nullptr, argv.data(), envp.data()) != 0) pid_ = -1;
  posix_spawn_file_actions_destroy(&actions);
}

Program::~Program() {
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

void Program::wait_for_handler(int signal) const {
  const std::string status = "/proc/" + std::to_string(pid_) + "/status";
  for (int i = 0; i < 3000; ++i) {
    // SigCgt: the caught signals, one bit each.
    std::istringstream words(read_file(status));
    for (std::string word; words >> word;) {
      if (word != "SigCgt:") continue;
      words >> word;
      if ((std::stoull(word, nullptr, 16) >> (signal - 1)) & 1U) return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

void Program::send(int signal) const {
  if (pid_ > 0) ::kill(pid_, signal);
}

ProgramResult Program::wait() {
  ProgramResult result;
  int status = 0;
  if (pid_ > 0 && ::waitpid(pid_, &status, 0) == pid_) {
    result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  pid_ = -1;
  result.out = read_file(folder_ + "/out");
  result.err = read_file(folder_ + "/err");
  return result;
}

ProgramResult run_program(std::vector<std::string> arguments, std::vector<std::string> environment,
                          const std::string& out) {
  return Program(std::move(arguments), std::move(environment), out).wait();
}

}  // namespace logitless::cli::test
